r"""Is plain unrolling wrong on my problem? Three problems, diagnosed: one on which it is right, two on which it is not.

- ridge: ridge regression with one strength per feature. The lower level has a single solution, and K steps forget where
  they started: alpha = 0 is right.
- counterexample: the paper's. f says nothing about y_2, so y_2 stays where it started, and F depends on it.
- least_squares: 10 samples and 30 parameters. The lower level leaves 20 directions open, and F slopes along them.

`bda.diagnose` runs the inner loop forward and backward, and prints what it measures, what that means, and what to
choose instead. All three problems are quadratic, so phi'(x), the derivative of the optimistic value function
phi(x) = min of F over the lower solutions, has a closed form: the last table says how far the hypergradient is from it
with alpha = 0, and with the suggestion taken over as it is.

    python examples/diagnosis.py

writes one figure per problem and settings, and everything as JSON; it takes a minute.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from _run import write_json
from torch import Tensor

import bda_optim as bda

# --- settings ---------------------------------------------------------------------------------------------------------

STEPS = 256  # K
X = 0.3  # of the counter-example
SAMPLES, FEATURES = 40, 20  # of ridge
FEW, PARAMETERS, EFFECTS = 10, 30, 5  # samples, parameters and upper variables of least_squares

# --- the problems -----------------------------------------------------------------------------------------------------


class Problem(NamedTuple):
    """Both losses, the start, x, the rates, and F at the best lower solution as a function of x."""

    lower: Callable[[Tensor, Tensor, Any], Tensor]
    upper: Callable[[Tensor, Tensor, Any], Tensor]
    start: Tensor
    x: Tensor
    lr: float
    upper_lr: float
    phi: Callable[[Tensor], Tensor]


def counterexample(draw: torch.Generator) -> Problem:
    def lower(y: Tensor, x: Tensor, batch: None) -> Tensor:
        return 0.5 * y[0] ** 2 - x * y[0]

    def upper(y: Tensor, x: Tensor, batch: None) -> Tensor:
        return 0.5 * (x - y[1]) ** 2 + 0.5 * (y[0] - 1) ** 2

    def phi(x: Tensor) -> Tensor:
        return 0.5 * (x - 1) ** 2

    return Problem(lower, upper, torch.tensor([2.0, 2.0]), torch.tensor(X), 0.2, 0.7, phi)


def ridge(draw: torch.Generator) -> Problem:
    inputs = torch.randn(2, SAMPLES, FEATURES, generator=draw)
    targets = torch.randn(2, SAMPLES, generator=draw)

    def lower(y: Tensor, x: Tensor, batch: None) -> Tensor:
        return 0.5 * ((inputs[0] @ y - targets[0]) ** 2).mean() + 0.5 * (x.exp() * y**2).sum()

    def upper(y: Tensor, x: Tensor, batch: None) -> Tensor:
        return 0.5 * ((inputs[1] @ y - targets[1]) ** 2).mean()

    def phi(x: Tensor) -> Tensor:
        hessian = inputs[0].T @ inputs[0] / SAMPLES + torch.diag(x.exp())
        return upper(torch.linalg.solve(hessian, inputs[0].T @ targets[0] / SAMPLES), x, None)

    return Problem(lower, upper, torch.zeros(FEATURES), torch.full((FEATURES,), -1.5), 0.25, 0.5, phi)


def least_squares(draw: torch.Generator) -> Problem:
    design = torch.randn(FEW, PARAMETERS, generator=draw) / PARAMETERS**0.5
    effect = torch.randn(FEW, EFFECTS, generator=draw)
    root = torch.randn(3 * PARAMETERS, PARAMETERS, generator=draw)
    metric = root.T @ root / (3 * PARAMETERS)
    target = torch.randn(PARAMETERS, generator=draw)

    def lower(y: Tensor, x: Tensor, batch: None) -> Tensor:
        return 0.5 * ((design @ y - effect @ x) ** 2).sum()

    def upper(y: Tensor, x: Tensor, batch: None) -> Tensor:
        return 0.5 * (y - target) @ metric @ (y - target)

    def phi(x: Tensor) -> Tensor:
        fitted = torch.linalg.pinv(design) @ effect @ x
        free = torch.linalg.svd(design)[2][FEW:].T  # the directions that f leaves open
        best = torch.linalg.solve(free.T @ metric @ free, free.T @ metric @ (target - fitted))
        return upper(fitted + free @ best, x, None)

    start, x = torch.randn(PARAMETERS, generator=draw), torch.randn(EFFECTS, generator=draw)
    return Problem(lower, upper, start, x, 0.45, 0.8, phi)


# --- what the command does --------------------------------------------------------------------------------------------


def error(problem: Problem, **settings: Any) -> float:
    """The relative error of the hypergradient against phi'(x)."""
    x = problem.x.clone().requires_grad_()
    exact = torch.autograd.grad(problem.phi(x), x)[0]
    found = bda.hypergradient(problem.lower, problem.upper, problem.start, problem.x, **settings).grad
    return float((found - exact).norm() / exact.norm())


def diagnose(name: str, problem: Problem, steps: int, out: Path) -> dict[str, Any]:
    """Diagnose alpha = 0, take the suggestion over, and diagnose that."""
    arguments = problem.lower, problem.upper, problem.start, problem.x
    plain = {"steps": steps, "lr": problem.lr, "upper_lr": problem.upper_lr, "alpha": 0.0}
    report = bda.diagnose(*arguments, **plain, progress=True)
    print(f"--- {name} {'-' * (74 - len(name))}\n{report}\n", flush=True)
    settings = report.suggestion.settings
    again = bda.diagnose(*arguments, **settings, suggest=False)
    write_json(out / f"diagnosis_{name}.json", report.as_dict())
    report.plot(out / f"diagnosis_{name}.png")
    again.plot(out / f"diagnosis_{name}_suggested.png")
    return {
        "start": report.start, "open": report.flat_share, "findings": [finding.code for finding in report.findings],
        "steps": settings["steps"], "alpha": report.suggestion.as_dict()["settings"]["alpha"],
        "start with the suggestion": again.start, "findings with the suggestion": [f.code for f in again.findings],
        "error of alpha=0": error(problem, **plain), "error of the suggestion": error(problem, **settings),
    }  # fmt: skip


def table(found: dict[str, Any]) -> str:
    lines = [
        "| problem | start | grad F, open | alpha = 0: error | suggestion | its error |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in found.items():
        chosen = f"{row['alpha'].removeprefix('bda.') if row['alpha'] else 'alpha = 0'}, K = {row['steps']}"
        errors = [f"{row[key]:.2g}" for key in ("error of alpha=0", "error of the suggestion")]
        lines.append(f"| {name} | {row['start']:.2g} | {row['open']:.0%} | {errors[0]} | {chosen} | {errors[1]} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Three problems, diagnosed.")
    parser.add_argument("--out", type=Path, default=Path("figures"), help="folder for JSON and PNG files (%(default)s)")
    parser.add_argument("--steps", type=int, default=STEPS, help="K (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the data (%(default)s)")
    parser.add_argument("--smoke", action="store_true", help="K = 8, to see that all is there")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_default_dtype(torch.float64)
    steps = 8 if args.smoke else args.steps
    found = {}
    for make in (ridge, counterexample, least_squares):
        problem = make(torch.Generator().manual_seed(args.seed))
        found[make.__name__] = diagnose(make.__name__, problem, steps, args.out)
    print(table(found))
    write_json(args.out / "diagnosis.json", {"steps": steps, "seed": args.seed, "problems": found})
    print("\nWritten:", args.out / "diagnosis.json", *sorted(args.out.glob("diagnosis_*")), sep="\n  ")


if __name__ == "__main__":
    main()
