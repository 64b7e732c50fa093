"""The numbers and the theorems of the BDA paper: the counter-example, truncation, the bounds on y_K, the schedules."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from problems import double, lower, upper
from torch import Tensor

import bda_optim as bda

RHG, BDA = 0.0, bda.harmonic(0.5)
NAMES = {RHG: "RHG", BDA: "BDA"}


def phi(x: float, steps: int, alpha: Any, y0: Tensor | None = None, **options: Any) -> bda.Hypergradient:
    """phi_K of the counter-example and its derivative, at the paper's rates."""
    y0 = double(2.0, 2.0) if y0 is None else y0
    return bda.hypergradient(lower, upper, y0, double(x), steps=steps, lr=0.2, upper_lr=0.7, alpha=alpha, **options)


def argmin(steps: int, alpha: Any, y0: Tensor | None = None) -> float:
    """phi_K is quadratic in x, so two derivatives give its minimiser."""
    at_0, at_1 = (phi(x, steps, alpha, y0).grad.item() for x in (0.0, 1.0))
    return at_0 / (at_0 - at_1)


# The counter-example: x* = 1, y* = (1, 1).

TABLE = [  # K, alpha, argmin phi_K, dphi_K/dx at 0
    (8, RHG, 1.508314854315, -2.552978515342131),
    (8, BDA, 1.137076083542, -0.624011700227637),
    (16, RHG, 1.500203724024, -2.917142070237089),
    (16, BDA, 1.083240150351, -0.862081933783990),
    (64, RHG, 1.500000000000, -2.999998116870268),
    (64, BDA, 1.029095608589, -0.999969526796144),
]
table = pytest.mark.parametrize(
    "steps, alpha, minimiser, slope", TABLE, ids=[f"{NAMES[row[1]]}-K={row[0]}" for row in TABLE]
)


@table
def test_cold_start(steps: int, alpha: Any, minimiser: float, slope: float) -> None:
    assert argmin(steps, alpha) == pytest.approx(minimiser, abs=1e-10)
    assert phi(0.0, steps, alpha).grad.item() == pytest.approx(slope, abs=1e-10)


@table
def test_the_origin_is_the_mirror_image(steps: int, alpha: Any, minimiser: float, slope: float) -> None:
    assert argmin(steps, alpha, double(0.0, 0.0)) == pytest.approx(2 - minimiser, abs=1e-10)


@table
def test_phi_is_quadratic(steps: int, alpha: Any, minimiser: float, slope: float) -> None:
    """The assumption of `argmin`: the derivative vanishes at the minimiser that it returns."""
    assert phi(argmin(steps, alpha), steps, alpha).grad.item() == pytest.approx(0.0, abs=1e-12)


def warm_start(steps: int, alpha: Any, iterations: int, rate: float = 0.5) -> float:
    """Upper descent from x = 0 that carries y over; k restarts at 1."""
    x, y = 0.0, double(2.0, 2.0)
    for _ in range(iterations):
        out = phi(x, steps, alpha, y)
        x, y = x - rate * out.grad.item(), out.params
    return x


def test_warm_start_of_bda_reaches_the_solution() -> None:
    assert warm_start(16, BDA, 50) == pytest.approx(0.9999999989, abs=1e-10)


@pytest.mark.parametrize("steps, tolerance", [(8, 1e-6), (32, 1e-10)])
def test_warm_start_of_bda_reaches_the_solution_at_other_lengths(steps: int, tolerance: float) -> None:
    assert warm_start(steps, BDA, 60) == pytest.approx(1.0, abs=tolerance)


def test_warm_start_of_rhg_does_not_reach_the_solution() -> None:
    assert warm_start(16, RHG, 50) == pytest.approx(1.507, abs=5e-4)


TRUNCATION = [(1, -2.02780), (2, -2.00605), (4, -1.94489), (6, -1.84932)]


@pytest.mark.parametrize("within", [bda.Unroll(), bda.Checkpointed(), bda.Checkpointed(slots=2), bda.ForwardMode()])
@pytest.mark.parametrize("cut, slope", TRUNCATION)
def test_truncation(cut: int, slope: float, within: Any) -> None:
    out = phi(0.3, 8, RHG, adjoint=bda.Truncated(last=8 - cut, within=within))
    assert out.grad.item() == pytest.approx(slope, abs=5e-6)


@pytest.mark.parametrize("cut", [1, 3, 6])
def test_k_runs_on_across_the_cut(cut: int) -> None:
    """The last steps from y_cut, with a_k counted from k = cut + 1, written as a schedule of its own."""
    middle = phi(0.3, cut, BDA).params
    rest = phi(0.3, 8 - cut, lambda k: 0.5 / (k + cut), middle)
    truncated = phi(0.3, 8, BDA, adjoint=bda.Truncated(last=8 - cut))
    assert truncated.grad.item() == pytest.approx(rest.grad.item(), abs=1e-12)
    assert abs(truncated.grad.item() - phi(0.3, 8 - cut, BDA, middle).grad.item()) > 1e-3


# The bounds on y_K, on random problems that satisfy the assumptions (except that F is Lipschitz on R^m, which no
# strongly convex function is).


class Problem(NamedTuple):
    """A lower level h = f + g whose solutions are many, and the one of them that F prefers, by linear algebra."""

    lower: Callable[..., Tensor]
    upper: Callable[..., Tensor]
    prox: Any
    h: Callable[[Tensor], Tensor]
    proximal_step: Callable[[Tensor, float], Tensor]
    solution: Tensor
    lower_smoothness: float
    upper_curvature: Tensor


def orthogonal(n: int) -> Tensor:
    return torch.linalg.qr(torch.randn(n, n, dtype=torch.float64))[0]


def positive_definite(n: int) -> Tensor:
    basis = orthogonal(n)
    return basis @ torch.diag(torch.exp(0.7 * torch.randn(n, dtype=torch.float64))) @ basis.T


def quadratic(matrix: Tensor, center: Tensor) -> Callable[..., Tensor]:
    return lambda y, x=None, batch=None: 0.5 * (y - center) @ matrix @ (y - center)


def smooth_problem() -> Problem:
    """f = (y - c)^T A (y - c) / 2 with a singular A: the solutions are c + ker A, over which F is minimised."""
    n = int(torch.randint(2, 7, ()))
    rank = int(torch.randint(1, n, ()))
    basis, eigenvalues = orthogonal(n), torch.zeros(n, dtype=torch.float64)
    eigenvalues[:rank] = 0.05 + 3 * torch.rand(rank, dtype=torch.float64)
    a, kernel = basis @ torch.diag(eigenvalues) @ basis.T, basis[:, rank:]
    b, c, target = positive_definite(n), *(2 * torch.randn(2, n, dtype=torch.float64))
    solution = c + kernel @ torch.linalg.solve(kernel.T @ b @ kernel, kernel.T @ b @ (target - c))
    f = quadratic(a, c)
    return Problem(
        f, quadratic(b, target), None, f, lambda y, s: y - s * a @ (y - c), solution, float(eigenvalues.max()), b
    )


def nonsmooth_problem() -> Problem:
    """h = |A y - r|^2 / 2 + s |y|_1, where A has orthogonal columns, each of them twice.

    Only the sum of a pair of twins matters: it solves a lasso in one variable, and the solutions are the segments on
    which the pair has that sum and no two signs. F couples the two of a pair, so on a segment it is a parabola.
    """
    pairs = int(torch.randint(1, 4, ()))
    strength = 0.05 + 0.8 * torch.rand((), dtype=torch.float64).item()
    columns, scales = orthogonal(pairs + 1)[:, :pairs], 0.3 + torch.rand(pairs, dtype=torch.float64)
    a, r = (columns * scales).repeat_interleave(2, dim=1), 2 * torch.randn(pairs + 1, dtype=torch.float64)
    correlation = scales * (columns.T @ r)
    sums = correlation.sign() * (correlation.abs() - strength).clamp(min=0) / scales**2
    blocks, targets = [positive_definite(2) for _ in range(pairs)], 2 * torch.randn(pairs, 2, dtype=torch.float64)
    along, found = double(1.0, -1.0), []
    for total, block, target in zip(sums, blocks, targets, strict=True):
        start = torch.stack([torch.zeros_like(total), total])
        free = along @ block @ (target - start) / (along @ block @ along)
        found.append(start + free.clamp(min(0.0, total.item()), max(0.0, total.item())) * along)

    def f(y: Tensor, x: Any = None, batch: Any = None) -> Tensor:
        return 0.5 * (a @ y - r).square().sum()

    def proximal_step(y: Tensor, s: float) -> Tensor:
        moved = y - s * a.T @ (a @ y - r)
        return moved.sign() * (moved.abs() - s * strength).clamp(min=0)

    b = torch.block_diag(*blocks)
    return Problem(
        f, quadratic(b, targets.reshape(-1)), bda.prox.l1(strength), lambda y: f(y) + strength * y.abs().sum(),
        proximal_step, torch.cat(found), float(2 * scales.square().max()), b,
    )  # fmt: skip


class Constants(NamedTuple):
    s_l: float
    s_u: float
    sigma: float
    smoothness: float
    gamma: float

    @property
    def one_minus_beta(self) -> float:
        product = self.s_u * self.sigma * self.smoothness / (self.sigma + self.smoothness)
        return 1 - math.sqrt(max(0.0, 1 - 2 * product))


def constants(problem: Problem, number: int) -> Constants:
    """Rates that the theory allows; every second problem takes the largest ones."""
    eigenvalues = torch.linalg.eigvalsh(problem.upper_curvature)
    sigma, smoothness = eigenvalues[0].item(), eigenvalues[-1].item()
    share, gamma = (0.1 + 0.9 * torch.rand(2, dtype=torch.float64)).tolist() if number % 2 else (1.0, 1.0)
    return Constants(1 / problem.lower_smoothness, share * 2 / (smoothness + sigma), sigma, smoothness, gamma)


def iterates(problem: Problem, c: Constants, y0: Tensor, steps: int) -> list[Tensor]:
    """y_1, ..., y_K, as the lower loss receives them."""
    seen = []

    def watched(y: Tensor, x: Any, batch: Any) -> Tensor:
        seen.append(y.detach().clone())
        return problem.lower(y)

    with torch.no_grad():
        last = bda.rollout(
            watched, problem.upper, y0, steps=steps, lr=c.s_l, upper_lr=c.s_u, prox=problem.prox,
            alpha=bda.theory(c.s_u, c.sigma, c.smoothness, gamma=c.gamma),
        )  # fmt: skip
    assert len(seen) == steps
    return [*seen[1:], last]


def ratios(problem: Problem, c: Constants, y0: Tensor, steps: int) -> Tensor:
    """The three sides of the proposition over their bounds, for every K up to `steps`."""
    y_star = problem.solution.requires_grad_()
    (slope,) = torch.autograd.grad(problem.upper(y_star), y_star)
    y_star = y_star.detach()
    gap = c.one_minus_beta
    big_c = max((y0 - y_star).norm().item(), c.s_u / gap * slope.norm().item())
    j = math.floor(2 / gap)
    rows = []
    for k, y in enumerate(iterates(problem, c, y0, steps), 1):
        tilde = problem.proximal_step(y, c.s_l)
        rows.append(
            [
                (y - y_star).norm().item() / big_c,
                (y - tilde).norm().item() / (2 * big_c * (j + 2) / (k * gap)),
                (problem.h(tilde) - problem.h(y_star)).item() / (2 * big_c**2 * (j + 2) / (k * gap * c.s_l)),
            ]
        )
    return double(rows)


KINDS = pytest.mark.parametrize("make", [smooth_problem, nonsmooth_problem])


@KINDS
def test_bounds_hold_on_random_problems(make: Callable[[], Problem], record_property: Any) -> None:
    worst = double(0.0, 0.0, 0.0)
    for number in range(50):
        problem = make()
        y0 = 2 * torch.randn_like(problem.solution)
        found = ratios(problem, constants(problem, number), y0, steps=60)
        assert found[:, 2].min() > -1e-12, "h(y*) is not the smallest value: y* is wrong"
        worst = torch.maximum(worst, found.amax(0))
    print("largest ratio of each side to its bound:", worst.tolist())
    record_property("largest ratios", worst.tolist())
    assert worst.max() <= 1
    assert worst[0] > 0.5, "a bound that is never approached would prove little"


@KINDS
def test_iterates_converge_to_the_optimistic_solution(make: Callable[[], Problem]) -> None:
    """The distance to y* falls as 1/K: three times as many steps, a third of it."""
    for number in range(3):
        problem = make()
        y0 = 2 * torch.randn_like(problem.solution)
        path = iterates(problem, constants(problem, 2 * number), y0, steps=900)
        first, middle, last = ((path[k - 1] - problem.solution).norm().item() for k in (1, 300, 900))
        assert last < 0.4 * middle and last < 0.05 * first


# The sum of a_k must diverge.


def distances(alpha: Any, lengths: tuple[int, ...]) -> list[float]:
    """How far argmin phi_K is from x* = 1."""
    return [abs(argmin(steps, alpha) - 1) for steps in lengths]


def test_harmonic_weights_approach_the_solution() -> None:
    found = distances(BDA, (64, 256, 512))
    slope = math.log(found[2] / found[0]) / math.log(512 / 64)
    assert slope == pytest.approx(-0.7, abs=0.05)
    assert found[2] < 0.01


def test_geometric_weights_do_not_approach_the_solution() -> None:
    with pytest.warns(UserWarning, match="finite sum"):
        alpha = bda.geometric(0.5, decay=0.5)
    found = distances(alpha, (32, 64, 128))
    assert found[2] > 0.15
    assert found[1] == pytest.approx(found[0], rel=1e-6) and found[2] == pytest.approx(found[1], rel=1e-8)


def test_geometric_weights_stop_where_their_product_says() -> None:
    """y_2 moves by the upper direction alone: y_2 - x shrinks by the factor 1 - a_k s_u in step k."""
    with pytest.warns(UserWarning, match="finite sum"):
        alpha = bda.geometric(0.5, decay=0.5)
    y = bda.rollout(lower, upper, double(2.0, 2.0), double(0.0), steps=100, lr=0.2, upper_lr=0.7, alpha=alpha)
    assert y[1].item() == pytest.approx(2 * math.prod(1 - 0.7 * 0.5**k for k in range(1, 101)), abs=1e-12)
    assert y[1].item() > 0.8
