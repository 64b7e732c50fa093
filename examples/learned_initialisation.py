r"""A nonconvex lower level: learn where the inner loop starts, together with x.

    min over x in [1, 10] of  F(x, y) = x + x y,  where y in [-2, 2] minimises  f(x, y) = -sin(x y)

f has many minimisers, and K small steps end in the one beside y_0. The best is y = -2, at x* = 11 pi / 4 = 8.639, where
F = -8.639. Unrolling from a fixed y_0 (RHG) finds it from none of four starts: from three of them x runs to its bound,
and from the fourth to a worse place. With the initialisation z as a second upper variable (``params=z, hyper=[x, z]``)
every start ends beside x*. The iterates do not come to rest there, because the steps have a fixed length.

    python examples/learned_initialisation.py

prints a table, and writes it as JSON beside a figure; it takes ten seconds.

Reference: Liu, Liu, Zeng, Zhang, "Towards Gradient-based Bilevel Optimization with Non-convex Followers and Beyond",
NeurIPS 2021, which has the problem and its rates. Its pessimistic trajectory truncation is left out: alone it does
not help on this problem.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from _run import write_atomically, write_json
from matplotlib.figure import Figure
from torch import Tensor
from tqdm import trange

import bda_optim as bda

# --- settings ---------------------------------------------------------------------------------------------------------

STEPS = 40  # K
LOWER_LR = 5e-4
UPPER_LR = 0.1  # of x, and of z where it is learned
ITERATIONS = 500
STARTS = ((1.0, 2.0), (3.0, 0.0), (5.0, 1.0), (8.0, -1.0))  # (x_0, y_0)
X_BOUNDS = (1.0, 10.0)
Y_BOUNDS = (-2.0, 2.0)
X_STAR = 11 * math.pi / 4

# --- the problem ------------------------------------------------------------------------------------------------------

Upper = list[Tensor]  # x, and z where it is learned


def lower(y: Tensor, upper: Upper, batch: None = None) -> Tensor:
    """All starts side by side: nothing couples them."""
    return -torch.sin(upper[0] * y).sum()


def upper(y: Tensor, upper: Upper, batch: None = None) -> Tensor:
    return (upper[0] + upper[0] * y).sum()


# --- its solution -----------------------------------------------------------------------------------------------------


class Run(NamedTuple):
    """x and F(x, y_K) of every start, before each iteration and after the last: (iterations + 1, starts)."""

    x: Tensor
    value: Tensor


def descend(learned: bool, iterations: int = ITERATIONS) -> Run:
    """Projected gradient descent on x, and on the initialisation z if it is learned."""
    x, z = torch.tensor(STARTS).T
    xs, values = [], []
    for _ in trange(iterations + 1, desc="x and z" if learned else "x"):
        out = bda.hypergradient(
            lower, upper, params=z, hyper=[x, z] if learned else [x], steps=STEPS, lr=LOWER_LR,
            prox=bda.prox.box(*Y_BOUNDS),
        )  # fmt: skip
        xs.append(x)
        values.append(x + x * out.params)
        x = (x - UPPER_LR * out.grad[0]).clamp(*X_BOUNDS)
        if learned:
            z = (z - UPPER_LR * out.grad[1]).clamp(*Y_BOUNDS)
    return Run(torch.stack(xs), torch.stack(values))


# --- what the command does --------------------------------------------------------------------------------------------


def table(runs: Mapping[str, Run]) -> str:
    """Return the last x and F of every start."""
    lines = ["| start (x, y) | " + " | ".join(f"{name}: x, F" for name in runs) + " |", "|---|" + "---|" * len(runs)]
    for i, (x, y) in enumerate(STARTS):
        cells = [f"{run.x[-1, i]:.3f}, {run.value[-1, i]:.3f}" for run in runs.values()]
        lines.append(f"| ({x:g}, {y:g}) | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def figure(runs: Mapping[str, Run]) -> Figure:
    fig = Figure(figsize=(11, 4.2), layout="constrained")
    for axes, (name, run) in zip(fig.subplots(1, 2, sharey=True), runs.items(), strict=True):
        for i, (x, y) in enumerate(STARTS):
            axes.plot(run.x[:, i], linewidth=1.8, label=f"$x_0 = {x:g},\\ y_0 = {y:g}$")
        axes.axhline(X_STAR, color="black", linewidth=1, linestyle=":", label="$x^* = 11 \\pi / 4$")
        axes.set(xlabel="upper iteration", ylabel="$x$", title=name)
        axes.spines[["top", "right"]].set_visible(False)
    fig.axes[0].legend(frameon=False, loc="center right")
    return fig


def main() -> None:
    parser = argparse.ArgumentParser(description="A learned initialisation on a nonconvex lower level.")
    parser.add_argument(
        "--out", type=Path, default=Path("figures"), help="folder for the JSON and PNG file (%(default)s)"
    )
    parser.add_argument("--iterations", type=int, default=ITERATIONS, help="upper iterations (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="without effect: nothing is random")
    parser.add_argument("--smoke", action="store_true", help="5 iterations, to see that all is there")
    args = parser.parse_args()
    iterations = 5 if args.smoke else args.iterations
    runs = {"fixed start (RHG)": descend(False, iterations), "learned start": descend(True, iterations)}
    print(f"x* = {X_STAR:.3f}, F* = {-X_STAR:.3f}; after {iterations} iterations:\n\n{table(runs)}")
    found = {name: {"x": run.x[-1].tolist(), "F": run.value[-1].tolist()} for name, run in runs.items()}
    write_json(args.out / "learned_initialisation.json", {"iterations": iterations, "starts": STARTS, "runs": found})
    path = args.out / "learned_initialisation.png"
    write_atomically(path, lambda file: figure(runs).savefig(file, dpi=120))
    print("\nWritten:", args.out / "learned_initialisation.json", path, sep="\n  ")


if __name__ == "__main__":
    main()
