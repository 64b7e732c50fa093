"""What the implicit adjoint refuses. For each refusal, the number that it keeps back is shown to be wrong."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from implicit_problems import Problem, overparametrised, ridge
from problems import START, difference_quotients, double, leaf, numbers, relative_error, run
from torch import Tensor, nn

import bda_optim as bda
from bda_optim._adjoints import fixed_point, implicit
from bda_optim._adjoints.linearised import Linearised
from bda_optim._step import stationary

pytestmark = pytest.mark.usefixtures("doubles")

far = pytest.mark.filterwarnings("ignore:y_K may be far from the fixed point")

TIGHT = bda.Implicit(tol=1e-12)


def gradient(problem: Problem, adjoint: Any = TIGHT, **options: Any) -> Tensor:
    settings = {"lr": problem.lr, "upper_lr": problem.upper_lr, "adjoint": adjoint, **options}
    return bda.hypergradient(*problem.arguments, **settings).grad


def off(got: Tensor, want: Tensor) -> float:
    return relative_error([got], [want])


# Initial parameters.


def test_initial_parameters_that_require_grad(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = ridge(5, 20, seed=0)
    start = problem.start.clone().requires_grad_()

    def slope(adjoint: Any) -> Tensor | None:
        x = problem.hyper.clone().requires_grad_()
        y = bda.rollout(problem.lower, None, start, x, steps=3, lr=0.1, adjoint=adjoint)
        return torch.autograd.grad(problem.upper(y, x), start, allow_unused=True)[0]

    with pytest.raises(ValueError, match=r"initial parameters no gradient; got some.*`Checkpointed\(\)`"):
        slope(TIGHT)
    monkeypatch.setattr(implicit, "_anchors", lambda state, hyper: [])
    assert slope(TIGHT) is None, "no gradient at all"
    exact = slope(bda.Checkpointed())
    assert exact is not None and exact.norm() > 0.1


def test_initial_weights_of_a_module() -> None:
    net = nn.Linear(2, 1)
    inner = bda.BDAInnerOptimizer(net.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="copy_initial_weights=True"):
        inner.unroll(
            net, lambda net, x, b: net(torch.ones(1, 2)).square().sum(), None, steps=3, adjoint=TIGHT,
            copy_initial_weights=False,
        )  # fmt: skip


def test_a_learned_initialisation_is_no_anchor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same tensor is in `hyper`, but the lower loss does not use it: this is MAML, not iMAML."""
    start = numbers(4, seed=1)
    lower = lambda y, x, b: 0.5 * (y - 1).square().sum()  # noqa: E731
    upper = lambda y, x, b: 0.5 * y.square().sum()  # noqa: E731
    options: dict[str, Any] = dict(steps=3, lr=0.1)
    with pytest.raises(ValueError, match="anchor of a term"):
        bda.hypergradient(lower, upper, start, start, adjoint=TIGHT, **options)
    monkeypatch.setattr(fixed_point.FixedPoint, "refuse_unused", lambda self, anchors: None)
    with pytest.warns(RuntimeWarning, match="far"):
        assert bda.hypergradient(lower, upper, start, start, adjoint=TIGHT, **options).grad.norm() == 0
    assert bda.hypergradient(lower, upper, start, start, adjoint=bda.Checkpointed(), **options).grad.norm() > 0.1


def test_a_start_that_is_computed_from_hyper() -> None:
    x = numbers(3, seed=0).requires_grad_()
    lower = lambda y, x, b: 0.5 * (y - x).square().sum()  # noqa: E731
    with pytest.raises(ValueError, match="no gradient"):
        bda.rollout(lower, None, x * 3, x, steps=3, lr=0.1, adjoint=TIGHT)


# Maps that differ from step to step.


def noisy(net: Any, x: Tensor, batch: Any) -> Tensor:
    return 0.5 * (batch[0] @ net - x * batch[1]).square().mean() + 0.05 * net.square().sum()


def batches(count: int, seed: int = 0, signal: float = 0.0) -> list[tuple[Tensor, Tensor]]:
    inputs, targets = numbers(count, 6, 3, seed=seed), numbers(count, 6, seed=seed + 1)
    targets = targets + signal * inputs.sum(-1)
    return list(zip(inputs, targets, strict=True))


@far
def test_batches_that_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    steps, data = 300, batches(4)
    options: dict[str, Any] = dict(steps=steps, lr=0.05, batches=[data[k % 4] for k in range(steps)])

    def slope(adjoint: Any) -> Tensor:
        upper = lambda y, x, b: 0.5 * (y - 1).square().sum()  # noqa: E731
        return bda.hypergradient(noisy, upper, torch.zeros(3), double(0.5), adjoint=adjoint, **options).grad

    with pytest.raises(ValueError, match=r"got batches that differ, those of steps k=1 and k=300.*`Implicit\(batch="):
        slope(TIGHT)
    exact = slope(bda.Checkpointed())
    whole = tuple(torch.cat(parts) for parts in zip(*data, strict=True))
    assert off(slope(bda.Implicit(tol=1e-12, batch=whole)), exact) < 0.03, "the map of all data"
    monkeypatch.setattr(bda.Implicit, "_item", lambda self, items, hyper: items[len(items) - 1])
    assert off(slope(TIGHT), exact) > 0.1, "the map of the last batch"


def test_equal_batches_may_be_different_containers() -> None:
    inputs, targets = batches(1)[0]
    upper = lambda y, x, b: 0.5 * (y - 1).square().sum()  # noqa: E731
    made = [{"a": inputs, "b": [targets], "c": 3, "name": "all"} for _ in range(40)]
    lower = lambda y, x, b: noisy(y, x, (b["a"], b["b"][0]))  # noqa: E731
    bda.hypergradient(lower, upper, torch.zeros(3), double(0.5), steps=40, lr=0.5, batches=made, adjoint=TIGHT)
    made[7] = {**made[7], "c": 4}
    with pytest.raises(ValueError, match="k=8"):
        bda.hypergradient(lower, upper, torch.zeros(3), double(0.5), steps=40, lr=0.5, batches=made, adjoint=TIGHT)


class Lazy(Sequence[Any]):
    """Makes a batch when it is asked for, and each time a different one."""

    def __init__(self, count: int) -> None:
        self._count, self._random, self.read = count, random.Random(0), 0

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        self.read += 1
        return batches(1, seed=self._random.randrange(10**6), signal=1.0)[0]


@far
def test_lazy_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    upper = lambda y, x, b: 0.5 * (y - 1).square().sum()  # noqa: E731
    options: dict[str, Any] = dict(steps=100, lr=0.1)

    def slope(adjoint: Any, lazy: Lazy) -> Tensor:
        return bda.hypergradient(
            noisy, upper, torch.zeros(3), double(0.5), batches=lazy, adjoint=adjoint, **options
        ).grad

    with pytest.raises(ValueError, match=r"no list or tuple.*`Implicit\(batch="):
        slope(TIGHT, Lazy(100))
    lazy = Lazy(100)
    whole = tuple(torch.cat(parts) for parts in zip(*batches(500, signal=1.0), strict=True))
    exact = slope(bda.Unroll(), Lazy(100))
    assert off(slope(bda.Implicit(tol=1e-12, batch=whole), lazy), exact) < 0.2
    assert lazy.read == 100, "each batch once"
    monkeypatch.setattr(bda.Implicit, "_item", lambda self, items, hyper: items[len(items) - 1])
    assert off(slope(TIGHT, Lazy(100)), exact) > 0.3, "the map of one more batch"


def test_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 1))
    inputs, targets = numbers(8, 4, seed=1), numbers(8, 1, seed=2)

    def lower(net: Any, x: Tensor, batch: Any) -> Tensor:
        return (net(inputs) - x * targets).square().mean() + 0.1 * net[1].weight.square().sum()

    def slope(adjoint: Any) -> Tensor:
        torch.manual_seed(1)
        x = double(0.5).requires_grad_()
        fmodel = bda.BDAInnerOptimizer(net.parameters(), lr=0.1).unroll(
            net, lower, None, hyper=x, steps=100, adjoint=adjoint
        )
        return torch.autograd.grad(fmodel[1](inputs).sum(), x)[0]

    with pytest.raises(ValueError, match=r"draws random numbers.*`eval\(\)`"):
        slope(TIGHT)
    net.eval()
    slope(TIGHT)
    net.train()
    monkeypatch.setattr(
        fixed_point.FixedPoint, "_recorded",
        lambda self, params: Linearised(self._still.displacement, params, self._given, self._still.tasks),
    )  # fmt: skip
    with pytest.warns(RuntimeWarning, match="far"):
        assert off(slope(bda.Implicit(limit=1, tol=math.inf)), slope(bda.Checkpointed())) > 0.1


# Rules that do not come to rest where the plain map does.


def balance(y: Tensor, x: Tensor, batch: Any = None) -> Tensor:
    return 0.5 * (y - x).square().sum()


def pull(y: Tensor, x: Tensor, batch: Any = None) -> Tensor:
    return 0.5 * (y - 3).square().sum()


ADAPTIVE = ["Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "Adagrad", "Adadelta", "ASGD", "Adafactor"]


@pytest.mark.parametrize("name", ADAPTIVE)
def test_adaptive_rules_with_alpha(name: str) -> None:
    rule = getattr(torch.optim, name)
    with pytest.raises(ValueError, match=rf"{name} has no fixed point.*alpha=0.1.*SGD"):
        bda.hypergradient(balance, pull, torch.zeros(()), double(1.0), steps=2, rule=rule, alpha=0.1, adjoint=TIGHT)


def test_the_plain_map_of_adam_with_alpha_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adam settles at 3 - 0.9 lr / (a s_u) = 2.1 whatever x is, so the derivative tends to 0."""
    options: dict[str, Any] = dict(steps=400, lr=0.01, upper_lr=0.1, alpha=0.1, rule=torch.optim.Adam, betas=(0.9, 0.9))
    problem = balance, pull, torch.zeros(()), double(1.0)
    monkeypatch.setattr(stationary, "check_rule", lambda name, settings: None)
    kept_back = bda.hypergradient(*problem, adjoint=TIGHT, **options)
    exact = bda.hypergradient(*problem, adjoint=bda.ForwardMode(), **options)
    assert exact.params.item() == pytest.approx(2.1, abs=0.03)
    assert abs(exact.grad.item()) < 0.05 < 0.1 < abs(kept_back.grad.item())


@pytest.mark.parametrize("name", ADAPTIVE)
def test_adaptive_rules_without_alpha_have_the_plain_map(name: str) -> None:
    """A solution of the lower level is a solution, by whatever rule; ASGD adds a decay of its own."""
    problem = ridge(4, 20, seed=0)
    rule, more = getattr(torch.optim, name), {"weight_decay": 0.0} if name == "AdamW" else {}
    lr = {"Adadelta": 30.0, "Adagrad": 1.0, "ASGD": 0.4}.get(name, 0.05)
    adjoint = bda.Implicit(tol=1e-12, settle=8)
    got = bda.hypergradient(*problem.arguments, steps=300, lr=lr, rule=rule, adjoint=adjoint, **more)
    if name == "ASGD":
        lower = lambda y, x, b=None: problem.lower(y, x) + 0.5 * 1e-4 * y.square().sum()  # noqa: E731
        problem = problem._replace(exact=gradient(problem._replace(lower=lower), steps=1000))
    assert off(got.grad, problem.exact) < 1e-8


@far
@pytest.mark.parametrize(
    "settings",
    [
        {"rule": torch.optim.AdamW, "betas": (0.9, 0.9)},
        {"rule": torch.optim.Adam, "betas": (0.9, 0.9), "decoupled_weight_decay": True},
        {"rule": torch.optim.Adafactor},
    ],
    ids=lambda s: s["rule"].__name__,
)
def test_decoupled_weight_decay(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Adam settles at y = 1 / weight_decay, whatever x is."""
    problem = balance, pull, torch.zeros(3), double(1.0)
    options: dict[str, Any] = dict(steps=300, lr=0.02, weight_decay=2.0, **settings)
    with pytest.raises(ValueError, match=r"decoupled weight decay.*got rule=Ada.*weight_decay=2"):
        bda.hypergradient(*problem, adjoint=TIGHT, **options)
    monkeypatch.setattr(stationary, "check_rule", lambda name, settings: None)
    assert abs(bda.hypergradient(*problem, adjoint=bda.ForwardMode(), **options).grad.item()) < 0.01
    assert abs(bda.hypergradient(*problem, adjoint=TIGHT, **options).grad.item()) > 2.0


@far
def test_adam_with_a_prox(monkeypatch: pytest.MonkeyPatch) -> None:
    """The solution y = x - 0.9 has dF/dx = y - 3 = -2.9, but Adam's steps outweigh the prox: it rests near y = x."""
    problem = balance, pull, double(2.0), double(1.0)
    options: dict[str, Any] = dict(steps=300, lr=0.01, rule=torch.optim.Adam, prox=bda.prox.l1(0.9), betas=(0.9, 0.9))
    with pytest.raises(ValueError, match=r"Adam with a prox.*got rule=Adam and prox=l1"):
        bda.hypergradient(*problem, adjoint=TIGHT, **options)
    monkeypatch.setattr(stationary, "check_rule", lambda name, settings: None)
    assert bda.hypergradient(*problem, adjoint=TIGHT, **options).grad.item() == pytest.approx(-2.0, abs=0.05)
    descent = dict(steps=300, lr=0.1, prox=bda.prox.l1(0.9), adjoint=TIGHT)
    assert bda.hypergradient(*problem, **descent).grad.item() == pytest.approx(-2.9)


def test_transformations_and_unknown_rules() -> None:
    torchopt = pytest.importorskip("torchopt")
    problem = balance, pull, torch.zeros(()), double(1.0)
    with pytest.raises(ValueError, match="of a Transformation it does not"):
        bda.hypergradient(*problem, steps=2, rule=torchopt.adam(lr=0.1), adjoint=TIGHT)


def test_momentum_of_one_and_a_rate_of_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = balance, pull, torch.zeros(()), double(1.0)
    with pytest.raises(ValueError, match="momentum >= 1 has no fixed point; got momentum=1"):
        bda.hypergradient(*problem, steps=2, lr=0.1, momentum=1.0, adjoint=TIGHT)
    with pytest.raises(ValueError, match="got lr=0"):
        bda.hypergradient(*problem, steps=2, lr=0.0, adjoint=TIGHT)
    assert bda.hypergradient(*problem, steps=2, lr=0.0).grad.item() == 0.0, "y stays, whatever x is"


# Systems without a solution.


@pytest.mark.parametrize("steps", [16, 64])
def test_a_lower_level_that_leaves_open_what_matters(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    share = {16: r"0\.90", 64: r"0\.89"}[steps]
    with pytest.raises(
        RuntimeError, match=rf"share of {share} of dF/dy.*stalls at {share} with alpha=0.*Use `alpha` > 0"
    ):
        run(hyper=double(0.0), steps=steps, alpha=0.0, adjoint=bda.Implicit())
    monkeypatch.setattr(fixed_point, "refuse", lambda *arguments: None)
    kept_back = run(hyper=double(0.0), steps=steps, alpha=0.0, adjoint=bda.Implicit()).grad.item()
    assert kept_back < -2.5, "the derivative of the optimistic value function is -1"


@far
@pytest.mark.parametrize("problem", [overparametrised(10, 30, seed=0), overparametrised(14, 40, seed=80)])
@pytest.mark.parametrize("solver", ["minres", "gmres"])
def test_fewer_samples_than_parameters_without_alpha(
    problem: Problem, solver: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    adjoint = bda.Implicit(solver=solver, limit=200)
    with pytest.raises(RuntimeError, match=r"a share of 0.\d\d of dF/dy"):
        gradient(problem, adjoint, steps=500)
    monkeypatch.setattr(fixed_point, "refuse", lambda *arguments: None)
    assert off(gradient(problem, adjoint, steps=500), problem.exact) > 0.5


def test_the_upper_loss_alone_can_settle_it() -> None:
    """`Implicit(alpha=...)` for a loop without: the weight is that of the map."""
    with pytest.warns(RuntimeWarning, match="far"):
        out = run(hyper=double(0.0), steps=64, alpha=0.0, adjoint=bda.Implicit(alpha=1e-4))
    assert out.grad.item() == pytest.approx(-1.0, abs=1e-3)
    with pytest.raises(ValueError, match="got upper=None"):
        bda.rollout(balance, None, torch.zeros(()), leaf(1.0), steps=2, lr=0.1, adjoint=bda.Implicit(alpha=0.1))


@far
def test_a_parameter_that_only_the_upper_loss_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    lower = lambda y, x, b: 0.5 * (y["a"] - x).square().sum()  # noqa: E731
    start = {"a": torch.zeros(2), "unused": torch.ones(3)}
    options: dict[str, Any] = dict(steps=200, lr=0.2)
    fine = lambda y, x, b: 0.5 * (y["a"] - 3).square().sum()  # noqa: E731
    out = bda.hypergradient(lower, fine, start, double(1.0), adjoint=TIGHT, **options)
    assert out.grad.item() == pytest.approx(-4.0, abs=1e-9)
    open_ = lambda y, x, b: fine(y, x, b) + (y["unused"] * x).square().sum()  # noqa: E731
    with pytest.raises(RuntimeError, match=r"a share of 0.77 of dF/dy"):
        bda.hypergradient(lower, open_, start, double(1.0), adjoint=TIGHT, **options)
    # With alpha > 0 the upper loss determines it: at 0, where it contributes nothing.
    small = dict(options, alpha=0.01, upper_lr=0.2, steps=4000)
    out = bda.hypergradient(lower, open_, start, double(1.0), adjoint=TIGHT, **small)
    assert out.grad.item() == pytest.approx(-4.0, abs=0.1)


def double_well(y: Tensor, x: Tensor, batch: Any = None) -> Tensor:
    return (0.25 * y**4 - 0.5 * y**2 - x * y).sum()


def test_negative_curvature(monkeypatch: pytest.MonkeyPatch) -> None:
    """From y = 0.05 three steps do not leave the hill, whose derivative has the wrong sign."""
    problem = double_well, pull, double(0.05), double(0.1)
    with pytest.raises(RuntimeError, match=r"y_K is no minimum.*negative curvature.*from -0"):
        bda.hypergradient(*problem, steps=3, lr=0.1, adjoint=TIGHT)
    monkeypatch.setattr(fixed_point, "refuse", lambda *arguments: None)
    with pytest.warns(RuntimeWarning, match="far"):
        kept_back = bda.hypergradient(*problem, steps=3, lr=0.1, adjoint=TIGHT).grad
    assert kept_back * bda.hypergradient(*problem, steps=3, lr=0.1).grad < 0
    assert kept_back * bda.hypergradient(*problem, steps=300, lr=0.1).grad < 0


@pytest.mark.parametrize("solver", ["minres", "gmres", "neumann"])
def test_the_limit(solver: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = ridge(30, 40, seed=0)
    adjoint = bda.Implicit(solver=solver, limit=3)
    with pytest.raises(
        RuntimeError, match=r"did not converge: its residual is 0.\d+ after \d products.*`limit` \(now 3\)"
    ):
        gradient(problem, adjoint, steps=800)
    monkeypatch.setattr(fixed_point, "refuse", lambda *arguments: None)
    assert off(gradient(problem, adjoint, steps=800), problem.exact) > 0.02


def test_a_neumann_series_that_diverges() -> None:
    problem = ridge(6, 20, seed=0)
    options: dict[str, Any] = dict(steps=500, momentum=0.9)
    with pytest.raises(RuntimeError, match=r'Neumann series diverges.*momentum.*solver="minres"'):
        gradient(problem, bda.Implicit(solver="neumann"), **options)
    assert off(gradient(problem, **options), problem.exact) < 1e-9


def test_minres_with_a_prox() -> None:
    problem = ridge(6, 20, seed=0)
    with pytest.raises(ValueError, match=r'unsymmetric; got solver="minres"'):
        gradient(problem, bda.Implicit(solver="minres"), steps=5, prox=bda.prox.l1(0.1))


def test_numbers_that_are_not_finite() -> None:
    problem = ridge(6, 20, seed=0)
    broken = problem._replace(upper=lambda y, x, b: (y - y.detach()).square().sum().sqrt())
    with pytest.raises(FloatingPointError, match="dF/dy is not finite"):
        gradient(broken, steps=50)
    steep = problem._replace(lower=lambda y, x, b=None: (y.abs() ** 1.5).sum() + x * 0, start=torch.zeros(6))
    with pytest.raises(FloatingPointError, match="a product with the derivative of the step is not finite"):
        gradient(steep, steps=2, lr=0.1)


# Precision.


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    design, targets = (numbers(20, 6, seed=1) / 4).to(dtype), numbers(20, seed=2).to(dtype)

    def lower(y: Tensor, x: Tensor, batch: Any) -> Tensor:
        return 0.5 * (design @ y - targets).square().sum() + 0.5 * x.exp() * y.square().sum()

    def upper(y: Tensor, x: Tensor, batch: Any) -> Tensor:
        return 0.5 * (y - 1).square().sum()

    def slope(kind: torch.dtype, **options: Any) -> Tensor:
        start, x = torch.zeros(6, dtype=kind), torch.tensor(-3.0, dtype=kind)
        return bda.hypergradient(lower, upper, start, x, steps=200, lr=0.3, adjoint=bda.Implicit(**options)).grad

    with pytest.raises(ValueError, match="half precision do not suffice; got parameters of 6"):
        slope(dtype)
    monkeypatch.setattr(bda.Implicit, "_check", lambda self, still: None)
    with pytest.raises((RuntimeError, RuntimeWarning), match=r"did not converge|share|far from"):
        slope(dtype, tol=1e-4)


def test_single_precision_with_a_null_space() -> None:
    """What is harmless in float64 is so in float32."""
    inputs, labels = numbers(60, 5, seed=0).float(), numbers(60, seed=1).sign().long().clamp(min=0)

    def lower(net: Any, x: Tensor, batch: Any) -> Tensor:
        return (x.sigmoid() * nn.functional.cross_entropy(net(inputs), labels, reduction="none")).mean()

    def upper(net: Any, x: Tensor, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(net(inputs.flip(1)), labels) + 1e-3 * net.weight.square().sum()

    found = []
    for adjoint in (bda.Checkpointed(), bda.Implicit()):
        torch.manual_seed(0)
        net, x = nn.Linear(5, 2).float(), torch.zeros(60, requires_grad=True, dtype=torch.float32)
        inner = bda.BDAInnerOptimizer(net.parameters(), lr=4.0)
        fmodel = inner.unroll(net, lower, upper, hyper=x, steps=300, adjoint=adjoint)
        found.append(torch.autograd.grad(upper(fmodel, x, None), x)[0])
    assert off(found[1], found[0]) < 1e-3


@pytest.mark.parametrize("kind", ["autocast", "master"])
def test_losses_in_reduced_precision(kind: str) -> None:
    """Products have the precision of the losses: the default tolerance is out of reach, and a wider one is met."""
    inputs, targets = numbers(40, 6, seed=1), numbers(40, 1, seed=2)

    def slope(adjoint: Any, kind: str) -> Tensor:
        torch.manual_seed(0)
        dtype = torch.bfloat16 if kind == "master" else torch.float32
        net, x = nn.Linear(6, 1).to(dtype), torch.zeros(40, 1, requires_grad=True, dtype=dtype)
        a, b = inputs.to(dtype), targets.to(dtype)

        def lower(net: Any, x: Tensor, batch: Any) -> Tensor:
            return (x.sigmoid() * (net(a) - b).square()).mean() + 0.1 * (
                net.weight.square().sum() + net.bias.square().sum()
            )

        inner = bda.BDAInnerOptimizer(net.parameters(), lr=0.3)
        options: dict[str, Any] = {"master": torch.float32} if kind == "master" else {}
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=kind == "autocast"):
            fmodel = inner.unroll(net, lower, None, hyper=x, steps=200, adjoint=adjoint, **options)
            return torch.autograd.grad((fmodel(a.flip(0)) - b).square().mean(), x)[0].float()

    with pytest.raises(RuntimeError, match="if the losses compute in reduced precision, raise `tol`"):
        slope(bda.Implicit(), kind)
    assert off(slope(bda.Implicit(tol=0.02), kind), slope(bda.Checkpointed(), "float32")) < 0.05


# What surrounds a solve.


def test_second_derivatives(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = ridge(6, 20, seed=0)
    x = problem.hyper.clone().requires_grad_()
    y = bda.rollout(problem.lower, None, problem.start, x, steps=300, lr=problem.lr, adjoint=TIGHT)
    with pytest.raises(RuntimeError, match=r"no second derivative.*got create_graph=True.*Use `Unroll\(\)`"):
        torch.autograd.grad(problem.upper(y, x), x, create_graph=True)


def test_combinations_that_make_no_sense() -> None:
    with pytest.raises(ValueError, match="no adjoints to guard; got within=Implicit"):
        bda.Guarded(within=bda.Implicit(), limit=1.0)
    with pytest.raises(ValueError, match="nothing to truncate; got within=Implicit"):
        bda.Truncated(last=3, within=bda.Implicit())
    # Whatever is cut off, the fixed point is the same: `last` would have no effect.
    problem = ridge(6, 20, seed=0)

    def truncated(last: int) -> Any:
        def adjoint(step: Any, state: Any, hyper: Any, items: Any) -> Any:
            with torch.no_grad():
                state, first = bda.Unroll()(step, state, hyper, items[:-last])
            state, rest = TIGHT(step, state, hyper, items[-last:])
            return state, first + rest

        return adjoint

    assert torch.equal(gradient(problem, truncated(1), steps=50), gradient(problem, truncated(40), steps=50))
    assert off(gradient(problem, bda.Truncated(last=1), steps=50), gradient(problem, steps=50)) > 0.1


@pytest.mark.parametrize("what", ["hyper", "batch"])
def test_changes_in_place_before_the_backward_pass(what: str) -> None:
    batch, x = batches(1)[0], double(0.5).requires_grad_()
    y = bda.rollout(noisy, None, torch.zeros(3), x, steps=60, lr=0.1, batches=[batch] * 60, adjoint=TIGHT)
    with torch.no_grad():
        (x if what == "hyper" else batch[0]).mul_(2.0)
    with pytest.raises(
        RuntimeError, match=r"hyper .*was changed in place" if what == "hyper" else "of the batch .*was changed"
    ):
        y.sum().backward()


def test_a_captured_tensor() -> None:
    captured = leaf(0.3)
    with pytest.raises(ValueError, match="neither in `hyper=` nor in `batches=`"):
        bda.hypergradient(
            lambda y, x, b: 0.5 * (y - x * captured).square().sum(), pull, torch.zeros(2), double(1.0), steps=3, lr=0.1,
            adjoint=TIGHT,
        )  # fmt: skip


def test_the_data_of_tasks() -> None:
    batch = numbers(4, 6, 3, seed=0), numbers(4, 6, seed=1)
    upper = lambda y, x, b: 0.5 * (y - 1).square().sum()  # noqa: E731
    options: dict[str, Any] = dict(steps=5, lr=0.1, batches=[batch] * 5, tasks=4)
    wrong = tuple(t[:3] for t in batch)
    for adjoint, more in ((bda.Implicit(batch=wrong), {}), (bda.Implicit(batch=batch), {"chunk_size": 2})):
        with pytest.raises(ValueError, match=r"every tensor of `Implicit\(batch=...\)` has a leading dimension"):
            bda.hypergradient(noisy, upper, torch.zeros(3), double(0.5), adjoint=adjoint, **options, **more)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alpha": 1.0}, r"`alpha` of `Implicit` must be a number in \[0, 1\)"),
        ({"alpha": torch.tensor(0.5)}, "To learn it, pass it to the inner loop"),
        ({"solver": "cg"}, "\"minres\".*got 'cg'"),
        ({"tol": 0.0}, "`tol` must be a positive number; got 0.0"),
        ({"limit": 0}, "`limit` must be a whole number of at least 1; got 0"),
        ({"settle": -1}, "`settle` must be a whole number of at least 0; got -1"),
    ],
)
def test_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bda.Implicit(**options)
    with pytest.raises(TypeError, match="`carry` must be a `Carry`; got dict"):
        bda.Implicit(carry={})  # type: ignore[arg-type]


def test_an_error_leaves_the_carry_as_it_was() -> None:
    carry = bda.Carry()
    adjoint = bda.Implicit(carry=carry)
    problem = ridge(2, 20, seed=0)
    gradient(problem, adjoint, steps=300)
    before = carry.state_dict()
    with pytest.raises(RuntimeError, match="share"):
        run(params=START, steps=16, alpha=0.0, adjoint=adjoint)
    after = carry.state_dict()
    assert torch.equal(before.pop("v")[0], after.pop("v")[0]) and before == after


def test_differences_are_a_second_witness() -> None:
    """Of the counter-example at a fixed point with alpha > 0, and of the ridge problem."""
    options: dict[str, Any] = dict(steps=4, lr=0.2, upper_lr=0.7, alpha=0.05, adjoint=bda.Implicit(settle=4, tol=1e-12))
    x = double(0.3)
    (want,) = difference_quotients(lambda: run(hyper=x, **options).value, [x])
    assert off(run(hyper=x, **options).grad, want) < 1e-9
