"""Whose implicit hypergradient survives a lower level that leaves y open?

    python -m benchmarks.implicit_peers

The error is the distance to phi'(x), the derivative of the optimistic value function, over its norm; phi' is known in
closed form. A name stands for the exception that was raised. The peers get y after 4000 plain steps, where the lower
level is solved to rounding; BOAT's are called with 10 to 100 iterations and a tolerance of 1e-10.

Latest output:

2026-11-17; x86_64, 2 cores, CPU, one thread, float64; torch 2.13.0+cpu, torchopt 0.7.3, boat-torch 1.1.1

relative error                          one number    ridge  counter-example        n=10 < d=30  the same, log-cosh
Unroll(), alpha=0, K=4000                  0.0e+00  1.5e-15          2.4e+00            5.6e-01             8.3e+00
Implicit(), alpha=0, K=4000                0.0e+00  7.7e-08     RuntimeError       RuntimeError        RuntimeError
Implicit(), alpha=0.5/k, K=4000            2.5e-04  1.7e-03          8.7e-04            1.6e-04             2.7e-04
Unroll(), alpha=1e-3, K=100                2.0e-03  1.4e-02          2.1e+00            5.4e-01             7.2e+00
Implicit(), alpha=1e-3, K=100              2.0e-03  1.3e-02          7.0e-03            1.5e-03             3.3e-01
Implicit(settle=16), alpha=1e-3, K=100     2.0e-03  1.3e-02          7.0e-03            1.1e-03             1.1e-03
the same, extrapolated to alpha=0          5.0e-07  5.6e-05          1.5e-05            1.1e-06             1.1e-06
torchopt cg                                0.0e+00  4.4e-07              NaN  ZeroDivisionError             2.1e+19
torchopt normal_cg                         0.0e+00  4.6e-06          2.4e+00            5.6e-01             8.3e+00
torchopt inv                               0.0e+00  4.4e-16     _LinAlgError            2.8e+01             2.3e+02
BOAT CG, 10                                1.0e+00  1.8e-04              NaN            1.2e+04             5.8e+05
BOAT CG, 20                                1.0e+00  2.3e-12              NaN            4.4e+03             3.7e+01
BOAT CG, 40                                1.0e+00  2.3e-12              NaN            6.5e+08             5.1e+02
BOAT CG, 100                               1.0e+00  2.3e-12              NaN            3.4e+05             5.8e+05
BOAT NS, 100                               1.5e-11  6.6e-06          2.4e+00            5.6e-01             8.3e+00

Without alpha `Implicit` raises where the others return a wrong number or fail: for a share of dF/dy of 0.92, 0.81 and
0.92 the system has no solution. With alpha it is right, up to a bias of first order in alpha, which an extrapolation
removes; where f is not quadratic, Newton steps (`settle`) bring y to the fixed point. BOAT's CG leaves its loop before
it stores the iterate that solves the system: 0 for one number.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

import bda_optim as bda

from . import _common

Gradient = Callable[[], Tensor]


@dataclasses.dataclass
class Problem:
    """A lower and an upper loss of (y, x), a start, both rates, and phi'(x)."""

    lower: Callable[..., Tensor]
    upper: Callable[..., Tensor]
    start: Tensor
    hyper: Tensor
    lr: float
    upper_lr: float
    exact: Tensor
    steps: int = 4000

    @functools.cached_property
    def solution(self) -> Tensor:
        """Where plain gradient descent ends."""
        with torch.no_grad():
            return bda.rollout(self.lower, None, self.start, self.hyper, steps=self.steps, lr=self.lr)


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(
        shape, generator=torch.Generator(torch.get_default_device()).manual_seed(seed), dtype=torch.float64
    )


def largest(matrix: Tensor) -> float:
    return float(torch.linalg.eigvalsh(matrix)[-1])


def one_number() -> Problem:
    """The lower loss (y - x)^2 / 2 and the upper loss y^2 / 2: one product solves the system."""
    x = torch.full((1,), 2.0, dtype=torch.float64)

    def lower(y: Tensor, x: Tensor, batch: Any = None) -> Tensor:
        return 0.5 * (y - x).square().sum()

    def upper(y: Tensor, x: Tensor, batch: Any = None) -> Tensor:
        return 0.5 * y.square().sum()

    return Problem(lower, upper, torch.zeros_like(x), x, 0.5, 0.5, x.clone())


def ridge(size: int = 20, samples: int = 30) -> Problem:
    """Ridge regression with a learned strength: the regular case."""
    design, held = (numbers(samples, size, seed=seed) / samples**0.5 for seed in (0, 1))
    targets, wanted = (numbers(samples, seed=seed) for seed in (2, 3))
    x = torch.full((1,), -1.5, dtype=torch.float64)

    def lower(y: Tensor, x: Tensor, batch: Any = None) -> Tensor:
        return 0.5 * (design @ y - targets).square().sum() + 0.5 * x[0].exp() * y.square().sum()

    def upper(y: Tensor, x: Tensor, batch: Any = None) -> Tensor:
        return 0.5 * (held @ y - wanted).square().sum()

    hessian = design.T @ design + x.exp() * torch.eye(size, dtype=torch.float64)
    y = torch.linalg.solve(hessian, design.T @ targets)
    exact = -(held.T @ (held @ y - wanted)) @ torch.linalg.solve(hessian, x.exp() * y)
    return Problem(lower, upper, torch.zeros_like(y), x, 1 / largest(hessian), 1 / largest(held.T @ held), exact[None])


def counterexample() -> Problem:
    """The paper's: y_2 does not occur in f, so F chooses it; phi'(x) = x - 1."""
    x = torch.full((1,), 0.3, dtype=torch.float64)
    return Problem(
        lambda y, x, b=None: 0.5 * y[0] ** 2 - x[0] * y[0],
        lambda y, x, b=None: 0.5 * (x[0] - y[1]) ** 2 + 0.5 * (y[0] - 1) ** 2,
        torch.full((2,), 2.0, dtype=torch.float64), x, 0.2, 0.7, x - 1,
    )  # fmt: skip


def least_squares(samples: int = 10, size: int = 30, *, log_cosh: bool = False) -> Problem:
    """Fewer samples than parameters: 20 directions are open; phi'(x) by the KKT conditions of F on ``A y = B x``."""
    design, effect = numbers(samples, size, seed=0) / samples**0.5, numbers(samples, 3, seed=1)
    held, wanted = numbers(size, size, seed=2) / size**0.5, numbers(size, seed=3)
    x = numbers(3, seed=4)

    def lower(y: Tensor, x: Tensor, batch: Any = None) -> Tensor:
        residual = design @ y - effect @ x
        return residual.cosh().log().sum() if log_cosh else 0.5 * residual.square().sum()

    def upper(y: Tensor, x: Tensor, batch: Any = None) -> Tensor:
        return 0.5 * (held @ y - wanted).square().sum() + 0.05 * y.square().sum()

    hessian = held.T @ held + 0.1 * torch.eye(size, dtype=torch.float64)
    zero = torch.zeros(samples, samples, dtype=torch.float64)
    system = torch.cat([torch.cat([hessian, design.T], 1), torch.cat([design, zero], 1)])
    multipliers = torch.linalg.solve(system, torch.cat([held.T @ wanted, effect @ x]))[size:]
    start = numbers(size, seed=5) * (10 if log_cosh else 1)
    return Problem(
        lower, upper, start, x, 0.9 / largest(design.T @ design), 1 / largest(hessian), -effect.T @ multipliers
    )


PROBLEMS: dict[str, Callable[[], Problem]] = {
    "one number": one_number,
    "ridge": ridge,
    "counter-example": counterexample,
    "n=10 < d=30": least_squares,
    "the same, log-cosh": functools.partial(least_squares, log_cosh=True),
}


# ------------------------------------------------------------------------------------------------------- contestants


def ours(adjoint: Any, *, alpha: Any = 0.0, steps: int | None = None) -> Callable[[Problem], Tensor]:
    def gradient(p: Problem) -> Tensor:
        settings = dict(steps=steps or p.steps, lr=p.lr, upper_lr=p.upper_lr, alpha=alpha)
        return bda.hypergradient(p.lower, p.upper, p.start, p.hyper, adjoint=adjoint, **settings).grad

    return gradient


def extrapolated(p: Problem) -> Tensor:
    """``2 G(a / 2) - G(a)``: the bias is of first order in a."""
    adjoint = bda.Implicit(settle=16, tol=1e-10, limit=400)
    whole, half = (ours(adjoint, alpha=a, steps=100)(p) for a in (1e-3, 5e-4))
    return 2 * half - whole


def with_torchopt(solver: str) -> Callable[[Problem], Tensor]:
    def gradient(p: Problem) -> Tensor:
        import torchopt

        linear = getattr(torchopt.linear_solve, f"solve_{solver}")()
        optimality = torch.func.grad(p.lower)
        root = torchopt.diff.implicit.custom_root(optimality, argnums=1, solve=linear)
        x = p.hyper.clone().requires_grad_()
        y = root(lambda start, x: p.solution.clone())(p.start, x)
        return torch.autograd.grad(p.upper(y, x), x)[0]

    return gradient


def with_boat(solver: str, iterations: int) -> Callable[[Problem], Tensor]:
    def gradient(p: Problem) -> Tensor:
        from boat_torch.utils import op_utils

        y, x = p.solution.clone().requires_grad_(), p.hyper.clone().requires_grad_()

        def step(params: Sequence[Tensor], loss: Tensor) -> list[Tensor]:
            grads = torch.autograd.grad(loss, params, create_graph=True)
            return [q - p.lr * g for q, g in zip(params, grads, strict=True)]

        solve = getattr(op_utils, solver)
        return solve([y], [x], p.upper(y, x), p.lower(y, x), iterations, step, 1e-10)[0]

    return gradient


CONTESTANTS: dict[str, Callable[[Problem], Tensor]] = {
    "Unroll(), alpha=0, K=4000": ours(bda.Unroll()),
    "Implicit(), alpha=0, K=4000": ours(bda.Implicit()),
    "Implicit(), alpha=0.5/k, K=4000": ours(bda.Implicit(), alpha=bda.harmonic(0.5)),
    "Unroll(), alpha=1e-3, K=100": ours(bda.Unroll(), alpha=1e-3, steps=100),
    "Implicit(), alpha=1e-3, K=100": ours(bda.Implicit(), alpha=1e-3, steps=100),
    "Implicit(settle=16), alpha=1e-3, K=100": ours(bda.Implicit(settle=16), alpha=1e-3, steps=100),
    "the same, extrapolated to alpha=0": extrapolated,
}

PEERS: dict[str, Callable[[Problem], Tensor]] = {
    **{f"torchopt {name}": with_torchopt(name) for name in ("cg", "normal_cg", "inv") if _common.installed("torchopt")},
    **{
        f"BOAT {short}, {count}": with_boat(name, count)
        for short, name, counts in (("CG", "conjugate_gradient", (10, 20, 40, 100)), ("NS", "neumann", (100,)))
        for count in counts
        if _common.installed("boat-torch")
    },
}


def outcome(gradient: Callable[[Problem], Tensor], problem: Problem) -> float | str:
    """Return the relative error, or the name of the exception."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            got = gradient(problem)
    except Exception as error:
        return type(error).__name__
    return float((got - problem.exact).norm() / problem.exact.norm())


def cell(value: float | str) -> str:
    return value if isinstance(value, str) else "NaN" if math.isnan(value) else f"{value:.1e}"


def about() -> dict[str, str]:
    """Describe the run: as in `_common`, in float64, and with BOAT."""
    known = _common.machine()
    known["machine"] = known["machine"].replace("float32", "float64")
    if _common.installed("boat-torch"):
        known["boat-torch"] = metadata.version("boat-torch")
    return known


def draw(results: dict[str, dict[str, float | str]], plt: Any) -> None:
    """Errors by problem; exceptions are left out."""
    _, axis = plt.subplots(figsize=(9, 4.5))
    for name, errors in results.items():
        points = [(i, e) for i, e in enumerate(errors.values()) if isinstance(e, float) and 0 < e < math.inf]
        axis.plot(*zip(*points, strict=True), "s" if "torchopt" in name or "BOAT" in name else "o", label=name)
    axis.set(yscale="log", ylabel="relative error", xticks=range(len(PROBLEMS)), xticklabels=list(PROBLEMS))
    axis.axhline(1.0, color="grey", lw=0.5)
    axis.legend(fontsize=6, bbox_to_anchor=(1, 1))


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, write; the status is 1 if one of ours is wrong by more than 1 % and does not say so."""
    contestants = {**CONTESTANTS, **PEERS}
    args = _common.options(__doc__, list(contestants), argv)
    problems = {name: make() for name, make in PROBLEMS.items()}
    for problem in problems.values():
        problem.steps = 200 if args.smoke else problem.steps
    results: dict[str, dict[str, float | str]] = {}
    with tqdm(total=len(args.only) * len(problems), disable=None, desc="implicit_peers") as bar:
        for name in args.only:
            results[name] = {}
            for title, problem in problems.items():
                results[name][title] = outcome(contestants[name], problem)
                bar.update()
    known = about()
    versions = ", ".join(f"{n} {known[n]}" for n in ("torch", "torchopt", "boat-torch") if n in known)
    rows = [[name, *map(cell, errors.values())] for name, errors in results.items()]
    print(f"{known['date']}; {known['machine']}; {versions}\n\n" + _common.table(["relative error", *problems], rows))
    _common.save(args.out, "implicit_peers", {**known, "errors": results}, functools.partial(draw, results))
    settled = results.get("Implicit(settle=16), alpha=1e-3, K=100", {})
    return 0 if all(isinstance(e, float) and e < 0.01 for t, e in settled.items() if "<" in t or "log" in t) else 1


if __name__ == "__main__":
    sys.exit(main())
