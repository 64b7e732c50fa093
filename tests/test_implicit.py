"""Implicit differentiation of the fixed point, against closed forms, dense matrices, long loops and differences."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from implicit_problems import Problem, cleaning, dense, lasso, lasso_gradient, overparametrised, ridge
from problems import START, double, numbers, relative_error, run
from torch import Tensor

import bda_optim as bda

far = pytest.mark.filterwarnings("ignore:y_K may be far from the fixed point")


def implicit(problem: Problem, *, tol: float = 1e-12, **options: Any) -> bda.Hypergradient:
    """The hypergradient of a problem; what is an option of `Implicit` goes there."""
    own = {name: options.pop(name) for name in ("solver", "limit", "settle", "carry") if name in options}
    adjoint = bda.Implicit(tol=tol, **own)
    settings = {"lr": problem.lr, "upper_lr": problem.upper_lr, "adjoint": adjoint, **options}
    return bda.hypergradient(*problem.arguments, **settings)


# The counter-example, and one like it of other sizes.


@far
@pytest.mark.parametrize(
    ("alpha", "steps", "value"),
    [
        (bda.harmonic(0.5), 16, -0.755498345),
        (bda.harmonic(0.5), 64, -0.945250412),
        (bda.harmonic(0.5), 256, -0.986332591),
        (bda.harmonic(0.5), 4096, -0.999145533),
        (0.05, 256, -0.713086420),
    ],
)
def test_the_counter_example(alpha: Any, steps: int, value: float) -> None:
    out = run(hyper=double(0.0), steps=steps, alpha=alpha, adjoint=bda.Implicit())
    assert out.grad.item() == pytest.approx(value, abs=1e-8)
    a = alpha if isinstance(alpha, float) else alpha(steps)
    closed = (1 - a) * 0.2 * (out.params[0] - 1) / (a * 0.7 + (1 - a) * 0.2)
    assert out.grad.item() == pytest.approx(closed.item(), abs=1e-12)


@far
def test_the_counter_example_is_solved_where_unrolling_is_not() -> None:
    """50 upper iterations of K = 16 steps from where the last ones ended; exact differentiation ends at x = 1.08."""
    ends = []
    for adjoint in (bda.Implicit(), bda.Unroll()):
        x, y = double(0.0), START
        for _ in range(50):
            out = run(hyper=x, params=y if isinstance(adjoint, bda.Implicit) else START, steps=16, adjoint=adjoint)
            x, y = x - out.grad, out.params
        ends.append(x.item())
    assert abs(ends[0] - 1) < 1e-9
    assert ends[1] == pytest.approx(1.083240, abs=1e-4)


def many_directions(seed: int) -> Problem:
    """A counter-example with two determined and three open directions, and two upper variables."""
    effect, mix = numbers(2, 2, seed=seed), numbers(5, 5, seed=seed + 1) / 3 + torch.eye(5, dtype=torch.float64)
    tilt = numbers(5, 2, seed=seed + 2)

    def lower(y: Tensor, x: Tensor, batch: Any = None) -> Tensor:
        return 0.5 * (y[:2] - effect @ x).square().sum()

    def upper(y: Tensor, x: Tensor, batch: Any = None) -> Tensor:
        return 0.5 * (mix @ y - tilt @ x - 1).square().sum() + 0.5 * x.square().sum()

    return Problem(lower, upper, 2 * torch.ones(5, dtype=torch.float64), numbers(2, seed=seed + 3), 0.3, 0.2)


@far
@pytest.mark.parametrize("seed", [3, 11])
@pytest.mark.parametrize(("alpha", "steps"), [(bda.harmonic(0.5), 30), (0.3, 700)])
def test_a_second_counter_example(seed: int, alpha: Any, steps: int) -> None:
    problem = many_directions(seed)
    out = implicit(problem, steps=steps, alpha=alpha)
    a = alpha if isinstance(alpha, float) else alpha(steps)
    want = dense(problem, out.params, alpha=a, rate=0.3, upper_rate=0.2)
    assert relative_error([out.grad], [want]) < 1e-11
    if alpha == 0.3:  # a fixed point: the exact derivative of y_K is the same
        exact = implicit(problem, steps=steps, alpha=alpha, adjoint=bda.Unroll()).grad
        assert relative_error([out.grad], [exact]) < 1e-9


@pytest.mark.parametrize(("seed", "steps"), [(3, 200), (11, 300)])
def test_the_share_that_is_open(seed: int, steps: int) -> None:
    """The error names the norm of dF/dy in the null space of the lower Hessian."""
    problem = many_directions(seed)
    y = implicit(problem, steps=steps, adjoint=bda.Unroll()).params
    slope = torch.func.grad(problem.upper)(y, problem.hyper)
    share = float(slope[2:].norm() / slope.norm())
    with pytest.raises(RuntimeError, match=rf"a share of {share:.2f} of dF/dy.*`alpha` > 0"):
        implicit(problem, steps=steps)


@far
def test_a_second_counter_example_is_solved() -> None:
    """Other weights and rates: phi is least at x = 3, where both levels agree."""
    lower = lambda y, x, b: y[0] ** 2 - 2 * x * y[0]  # noqa: E731
    upper = lambda y, x, b: (x - y[1]) ** 2 + 0.5 * (y[0] - 3) ** 2  # noqa: E731
    x, y = double(0.5), double(1.0, -2.0)
    for _ in range(80):
        out = bda.hypergradient(
            lower, upper, y, x, steps=20, lr=0.15, upper_lr=0.4, alpha=bda.harmonic(0.5), adjoint=bda.Implicit()
        )
        x, y = x - out.grad, out.params
    assert abs(x.item() - 3) < 1e-9


# Lower levels that are regular, or singular where it does not matter.


@pytest.mark.parametrize("problem", [ridge(20, 30, seed=0), ridge(12, 50, seed=40)])
def test_ridge_regression(problem: Problem) -> None:
    assert relative_error([implicit(problem, steps=2048).grad], [problem.exact]) < 1e-9
    truncated = implicit(problem, steps=2048, adjoint=bda.Truncated(last=4)).grad
    assert relative_error([truncated], [problem.exact]) > 0.1


@pytest.mark.parametrize("problem", [cleaning(500, 20, 3, seed=0), cleaning(300, 12, 4, seed=50)])
def test_a_null_space_that_does_not_matter(problem: Problem) -> None:
    """The gauge of softmax regression: dF/dy slopes along it by the upper penalty alone."""
    carry = bda.Carry()
    got = implicit(problem, steps=400, tol=1e-6, carry=carry)
    want = implicit(problem, steps=400, adjoint=bda.Checkpointed())
    assert relative_error([got.grad], [want.grad]) < 1e-9
    assert 1e-4 < carry.residual < 0.01, "the part of dF/dy in the null space"
    assert carry.low > 0.01 * carry.high, "null directions are left out"


@pytest.mark.parametrize("problem", [lasso(60, 40, 6, seed=1), lasso(80, 50, 9, seed=60)])
@pytest.mark.parametrize(("rule", "steps"), [(None, 1500), (bda.FISTA, 400)])
@pytest.mark.parametrize("solver", ["auto", "gmres", "neumann"])
def test_the_lasso(problem: Problem, rule: Any, steps: int, solver: str) -> None:
    options: dict[str, Any] = dict(steps=steps, rule=rule, prox=bda.prox.l1(lambda x: x), limit=2000)
    out = implicit(problem, solver=solver, **options)
    want = lasso_gradient(problem, out.params)
    assert 3 < int((out.params != 0).sum()) < 15
    assert relative_error([out.grad], [want]) < 1e-9


@pytest.mark.parametrize("problem", [ridge(20, 30, seed=0), ridge(9, 40, seed=70)])
@pytest.mark.parametrize(
    "settings",
    [
        {"momentum": 0.9},
        {"momentum": 0.8, "nesterov": True},
        {"momentum": 0.8, "dampening": 0.5},
        {"momentum": 0.5, "weight_decay": 0.3},
        {"rule": bda.FISTA},
    ],
    ids=str,
)
def test_momentum_settles_at_a_rate_of_its_own(problem: Problem, settings: dict[str, Any]) -> None:
    options: dict[str, Any] = dict(steps=600, lr=0.2, upper_lr=0.2, alpha=0.05, **settings)
    want = implicit(problem, adjoint=bda.Unroll(), **options).grad
    got, y, *_ = implicit(problem, **options)[1:]
    assert relative_error([got], [want]) < 1e-9
    if "momentum" in settings:  # the plain map at `lr` itself
        decay = settings.get("weight_decay", 0.0)
        plain = problem._replace(lower=lambda y, x: problem.lower(y, x) + 0.5 * decay * y.square().sum())
        naive = dense(plain, y, alpha=0.05, rate=0.2, upper_rate=0.2)
        assert relative_error([naive], [want]) > 0.01


# Fewer samples than parameters.


@far
@pytest.mark.parametrize("problem", [overparametrised(10, 30, seed=0), overparametrised(14, 40, seed=80)])
def test_fewer_samples_than_parameters(problem: Problem) -> None:
    options: dict[str, Any] = dict(steps=100, alpha=1e-3)
    assert relative_error([implicit(problem, tol=1e-6, **options).grad], [problem.exact]) < 1e-2
    assert relative_error([implicit(problem, adjoint=bda.Unroll(), **options).grad], [problem.exact]) > 0.5
    plain = implicit(problem, steps=1000, alpha=0.0, adjoint=bda.Unroll()).grad
    assert relative_error([plain], [problem.exact]) > 0.5


@far
@pytest.mark.parametrize("arguments", [(10, 30, 0), (14, 40, 80)])
def test_newton_steps_where_the_lower_level_is_not_quadratic(arguments: tuple[int, int, int]) -> None:
    problem = overparametrised(*arguments, log_cosh=True, far=10.0)
    options: dict[str, Any] = dict(steps=100, alpha=1e-3, tol=1e-8, limit=400)
    carry, settled = bda.Carry(), bda.Carry()
    far_off = implicit(problem, carry=carry, **options)
    out = implicit(problem, settle=8, carry=settled, **options)
    assert relative_error([out.grad], [problem.exact]) < 1e-2
    assert relative_error([far_off.grad], [problem.exact]) > 0.05
    assert settled.moved < 1e-10 * carry.moved
    # 2 G(a / 2) - G(a) removes the bias of first order.
    half = implicit(problem, settle=8, **{**options, "alpha": 5e-4}).grad
    assert relative_error([2 * half - out.grad], [problem.exact]) < 1e-4


# Numbers: one dimension, scales, precision.


@pytest.mark.parametrize("start", [torch.zeros(()), torch.zeros(1), torch.zeros(1, 1)])
@pytest.mark.parametrize("solver", ["auto", "gmres"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("weight", "offset", "at"), [(1.0, 0.0, 2.0), (3.0, 5.0, -1.0)])
def test_one_dimension(start: Tensor, solver: str, dtype: torch.dtype, weight: float, offset: float, at: float) -> None:
    """phi(x) = (x - c)^2 / 2, so phi'(x) = x - c. Three libraries return 0 where one product suffices."""
    x = torch.tensor(at, dtype=dtype)
    out = bda.hypergradient(
        lambda y, x, b: 0.5 * weight * (y.sum() - x) ** 2, lambda y, x, b: 0.5 * (y - offset).square().sum(),
        start.to(dtype), x, steps=200, lr=0.1, adjoint=bda.Implicit(solver=solver),
    )  # fmt: skip
    assert out.grad.item() == pytest.approx(at - offset, rel=1e-6)
    assert out.params.shape == start.shape


@pytest.mark.parametrize("scale", [1e-25, 1e25])
@pytest.mark.parametrize("solver", ["minres", "gmres", "neumann"])
@pytest.mark.parametrize("seed", [0, 40])
def test_the_scale_of_the_upper_loss_does_not_matter(scale: float, solver: str, seed: int) -> None:
    problem = ridge(12, 50, seed=seed)

    def single(y: Tensor, x: Tensor, batch: Any = None) -> Tensor:
        return problem.lower(y.double(), x.double()).float()

    def gradient(factor: float) -> Tensor:
        def scaled(y: Tensor, x: Tensor, batch: Any = None) -> Tensor:
            return (factor * problem.upper(y.double(), x.double())).float()

        return bda.hypergradient(
            single, scaled, problem.start.float(), problem.hyper.float(), steps=500, lr=problem.lr,
            adjoint=bda.Implicit(solver=solver, limit=500),
        ).grad  # fmt: skip

    assert gradient(scale).item() / scale == pytest.approx(gradient(1.0).item(), rel=1e-5)
    assert gradient(1.0).item() == pytest.approx(problem.exact.item(), rel=2e-3)


def test_the_neumann_series_by_hand() -> None:
    for problem, products in ((ridge(7, 20, seed=0), 5), (ridge(11, 30, seed=90), 12)):
        options: dict[str, Any] = dict(steps=40, alpha=0.1, solver="neumann", limit=products, tol=math.inf)
        out = implicit(problem, **options)
        y, x = out.params.requires_grad_(), problem.hyper.clone().requires_grad_()
        slope_y, slope_x = torch.func.grad(problem.upper, argnums=(0, 1))(y.detach(), x.detach())
        f = torch.autograd.grad(problem.lower(y, x), y, create_graph=True)[0]
        g = torch.autograd.grad(problem.upper(y, x), y, create_graph=True)[0]
        step = y - (0.1 * problem.upper_lr * g + 0.9 * problem.lr * f)
        term = total = slope_y
        for _ in range(products):
            term = torch.autograd.grad(step, y, term, retain_graph=True)[0]
            total = total + term
        want = slope_x + torch.autograd.grad(step, x, total)[0]
        torch.testing.assert_close(out.grad, want, rtol=1e-14, atol=1e-14)


# A solve that starts where the last one ended.


@far
@pytest.mark.parametrize(
    "problem", [cleaning(300, 20, 3, seed=0, strength=0.01), cleaning(150, 10, 4, seed=30, strength=0.03)]
)
def test_a_carried_solution_makes_three_products_enough(problem: Problem) -> None:
    errors: dict[bool, list[float]] = {True: [], False: []}
    for warm, found in errors.items():
        carry = bda.Carry() if warm else None
        x, y = problem.hyper, problem.start
        for _ in range(20):
            now = problem._replace(hyper=x, start=y)
            out = implicit(now, steps=30, lr=2.0, tol=math.inf, limit=3, carry=carry)
            full = implicit(now, steps=30, lr=2.0)
            found.append(relative_error([out.grad], [full.grad]))
            x, y = x - 20.0 * full.grad, full.params
    assert max(errors[True][10:]) <= 2e-3
    assert min(errors[False][10:]) >= 2e-2
