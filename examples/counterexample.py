r"""The paper's counter-example: a lower level with many solutions, on which plain unrolling ends at the wrong place.

    min over x of  F(x, y) = 1/2 (x - y2)^2 + 1/2 (y1 - 1)^2,  where y minimises  f(x, y) = 1/2 y1^2 - x y1

f asks for y1 = x and says nothing about y2, so y2 is the upper level's choice: x* = 1, y* = (1, 1), F* = 0, f* = -1/2.
Unrolling K steps on f alone (RHG, alpha = 0) leaves y2 where it started. From y0 = (2, 2), x then ends near 1.5,
however large K is. BDA gives the upper direction a share alpha_k of step k, which brings y2 to x.

There are two ways to run the upper level, and both are shown:

- cold start: the K lower steps start from the same y0 in every upper iteration. That is gradient descent on
  phi_K(x) = F(x, y_K(x)), and it ends at argmin phi_K, which for BDA approaches x* = 1 as K grows.
- warm start: y_K is the next y0, and k starts at 1 again. BDA then reaches x* = 1 at every K.

    python examples/counterexample.py

prints a table, and writes it as JSON together with the paper's three figures; --help lists the options. Nothing is
random, and the run takes half a minute.

Reference: Liu, Mu, Yuan, Zeng, Zhang, "A Generic First-Order Algorithmic Framework for Bi-Level Programming Beyond
Lower-Level Singleton", ICML 2020: the counter-example, and the experiments on synthetic problems.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib
import torch
from _run import write_atomically, write_json
from matplotlib.figure import Figure
from torch import Tensor
from tqdm import tqdm

import bda_optim as bda

# --- settings ---------------------------------------------------------------------------------------------------------

LOWER_LR = 0.2  # s_l
UPPER_LR = 0.7  # s_u, the rate of the upper direction inside the lower steps
X_LR = 0.5  # the rate of gradient descent on x; the paper does not give its own
ITERATIONS = 50  # of that descent
STEPS = (8, 16, 64)  # K, in the table and in the second figure
K = 16  # in the first and third figure
STARTS = ((0.0, (0.0, 0.0)), (0.0, (2.0, 2.0)), (2.0, (2.0, 2.0)))  # (x0, y0), in the first figure
X0, Y0 = STARTS[1]  # everywhere else

RHG = 0.0  # alpha = 0: the upper level takes no part in the lower steps
BDA = bda.harmonic(0.5)  # alpha_k = 0.5 / k

# --- the problem ------------------------------------------------------------------------------------------------------

X_STAR = torch.tensor(1.0, dtype=torch.float64)
Y_STAR = torch.tensor((1.0, 1.0), dtype=torch.float64)


def lower(y: Tensor, x: Tensor, batch: None = None) -> Tensor:
    return 0.5 * y[0] ** 2 - x * y[0]


def upper(y: Tensor, x: Tensor, batch: None = None) -> Tensor:
    return 0.5 * (x - y[1]) ** 2 + 0.5 * (y[0] - 1) ** 2


# --- its solution -----------------------------------------------------------------------------------------------------

Alpha = float | Callable[[int], float | Tensor]


def phi(x: Tensor, y0: Tensor, steps: int, alpha: Alpha) -> bda.Hypergradient:
    """F(x, y_K(x)) as `.value`, its derivative in x as `.grad`, and y_K as `.params`."""
    return bda.hypergradient(lower, upper, y0, x, steps=steps, lr=LOWER_LR, upper_lr=UPPER_LR, alpha=alpha)


class Run(NamedTuple):
    """x and y_K(x) at the upper iterations 0, 1, 2, ..."""

    x: Tensor
    y: Tensor


@functools.cache  # some runs are in two figures and in the table
def descend(
    x0: float, y0: tuple[float, ...], steps: int, alpha: Alpha, *, warm: bool, iterations: int = ITERATIONS
) -> Run:
    """Gradient descent on x."""
    x, y = torch.tensor(x0, dtype=torch.float64), torch.tensor(y0, dtype=torch.float64)
    xs, ys = [], []
    for _ in range(iterations + 1):
        out = phi(x, y, steps, alpha)
        xs.append(x)
        ys.append(out.params)
        x = x - X_LR * out.grad
        if warm:
            y = out.params
    return Run(torch.stack(xs), torch.stack(ys))


def errors(run: Run) -> dict[str, Tensor]:
    """The paper's four, one value per upper iteration."""
    x, y = run
    return {
        "$|F - F^*|$": (upper(y.T, x) - upper(Y_STAR, X_STAR)).abs(),
        "$|f - f^*|$": (lower(y.T, x) - lower(Y_STAR, X_STAR)).abs(),
        r"$\|x - x^*\|^2 \;/\; \|x^*\|^2$": (x - X_STAR) ** 2 / X_STAR**2,
        r"$\|y - y^*\|^2 \;/\; \|y^*\|^2$": ((y - Y_STAR) ** 2).sum(1) / (Y_STAR**2).sum(),
    }


# --- the table --------------------------------------------------------------------------------------------------------


class Row(NamedTuple):
    """What the table says of one K; each entry is a pair, RHG and BDA."""

    steps: int
    argmin: tuple[float, float]
    slope: tuple[float, float]
    warm: tuple[float, float]


def row(steps: int, iterations: int = ITERATIONS) -> Row:
    """Where gradient descent ends from a cold start, the first hypergradient, and the end from a warm start."""
    y0 = torch.tensor(Y0, dtype=torch.float64)
    argmin, slope, warm = [], [], []
    for alpha in (RHG, BDA):
        # Both losses are quadratic, so y_K is affine in x, phi_K a parabola, and two slopes give its minimiser.
        at_0, at_1 = (phi(torch.tensor(x, dtype=torch.float64), y0, steps, alpha).grad.item() for x in (0.0, 1.0))
        argmin.append(at_0 / (at_0 - at_1))
        slope.append(at_0)
        warm.append(descend(X0, Y0, steps, alpha, warm=True, iterations=iterations).x[-1].item())
    return Row(steps, *(tuple(pair) for pair in (argmin, slope, warm)))


def table(rows: Sequence[Row], iterations: int = ITERATIONS) -> str:
    heads = ("argmin phi_K (cold start)", "d phi_K / dx at x = 0", f"x, warm start, {iterations} iterations")
    width = 17
    lines = [
        "  K" + "".join(f" |{head:^{2 * width}}" for head in heads),
        "   " + f" |{'RHG':>{width}}{'BDA':>{width}}" * 3,
        "---" + ("-+" + "-" * 2 * width) * 3,
    ]
    for steps, *pairs in rows:
        lines.append(f"{steps:3d}" + "".join(f" |{first:{width}.12f}{second:{width}.12f}" for first, second in pairs))
    return "\n".join(lines)


# --- the figures ------------------------------------------------------------------------------------------------------

COLORS = ("#0072B2", "#D55E00", "#009E73")  # three that are told apart with any colour vision
WIDTHS = (3.4, 2.4, 1.6)  # so that curves that coincide are seen all the same
FLOORS = {"cold": 1e-6, "warm": 1e-18}  # where the axes end; a dip below is a curve that passes through the solution
STYLE = {
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e6e6",
    "lines.scale_dashes": False,
}


class Curve(NamedTuple):
    """A line of a figure; the problem is x0, y0, K and alpha."""

    label: str
    color: int
    problem: tuple[float, tuple[float, ...], int, Alpha]


def figure(title: str, curves: Sequence[Curve], iterations: int) -> Figure:
    """Four errors side by side, from a cold start above and from a warm start below."""
    with matplotlib.rc_context(STYLE):
        fig = Figure(figsize=(14, 7), layout="constrained")
        fig.get_layout_engine().set(wspace=0.05, hspace=0.05)
        axes = fig.subplots(2, 4, sharex=True, sharey="row")
        for line, start in zip(axes, ("cold", "warm"), strict=True):
            for curve in curves:
                x0, y0, steps, alpha = curve.problem
                run = descend(x0, y0, steps, alpha, warm=start == "warm", iterations=iterations)
                style = {"color": COLORS[curve.color], "linewidth": WIDTHS[curve.color], "label": curve.label}
                style["linestyle"] = (6 * curve.color, (6, 6)) if alpha is RHG else "solid"
                for ax, (name, error) in zip(line, errors(run).items(), strict=True):
                    ax.semilogy(error.clamp(min=FLOORS[start] / 1e3), **style)
                    ax.set_title(name if start == "cold" else "", fontsize=13)
            line[0].set_ylim(bottom=FLOORS[start])
        axes[0, 0].set_xlim(0, iterations)
        axes[0, 0].set_ylabel("cold start\n($y$ restarts at $y_0$)", fontsize=12)
        axes[1, 0].set_ylabel("warm start\n($y$ is carried over)", fontsize=12)
        for ax in axes[1]:
            ax.set_xlabel("upper iteration")
        fig.suptitle(title, fontsize=15)
        handles = axes[0, 0].get_legend_handles_labels()
        fig.legend(*handles, loc="outside lower center", ncols=3, handlelength=4, frameon=False)
    return fig


def initialisations(iterations: int = ITERATIONS) -> Figure:
    """The first and the last start mirror each other at the solution: their errors in F, x and y coincide."""
    curves = []
    for color, (x0, y0) in enumerate(STARTS):
        start = f"$x_0 = {x0:g},\\ y_0 = ({y0[0]:g}, {y0[1]:g})$"
        curves.append(Curve(f"RHG, {start}", color, (x0, y0, K, RHG)))
        curves.append(Curve(f"BDA, {start}", color, (x0, y0, K, BDA)))
    title = "Errors of RHG and BDA from three starts"
    return figure(f"{title}   ($K = {K}$, $\\alpha_k = 0.5/k$)", curves, iterations)


def lower_steps(steps: Sequence[int] = STEPS, iterations: int = ITERATIONS) -> Figure:
    curves = []
    for color, number in enumerate(steps):
        curves.append(Curve(f"RHG, $K = {number}$", color, (X0, Y0, number, RHG)))
        curves.append(Curve(f"BDA, $K = {number}$", color, (X0, Y0, number, BDA)))
    title = "Errors of RHG and BDA with different numbers of lower steps"
    return figure(f"{title}   ($\\alpha_k = 0.5/k$)", curves, iterations)


def weights(iterations: int = ITERATIONS) -> Figure:
    curves = [
        Curve(r"RHG, $\alpha = 0$", 0, (X0, Y0, K, RHG)),
        Curve(r"BDA, $\alpha = 0.5$", 1, (X0, Y0, K, 0.5)),
        Curve(r"BDA, $\alpha_k = 0.9/k$", 2, (X0, Y0, K, bda.harmonic(0.9))),
    ]
    title = "Errors with no, a fixed and a vanishing weight of the upper direction"
    return figure(f"{title}   ($K = {K}$)", curves, iterations)


# --- what the command does --------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description="BDA against RHG on the paper's counter-example.")
    parser.add_argument("--out", type=Path, default=Path("figures"), help="folder for JSON and PNG files (%(default)s)")
    parser.add_argument("--iterations", type=int, default=ITERATIONS, help="upper iterations (%(default)s)")
    parser.add_argument("--steps", type=int, nargs="+", default=STEPS, metavar="K", help="up to three K (8 16 64)")
    parser.add_argument("--smoke", action="store_true", help="2 iterations at K = 2 and 3, to see that all is there")
    args = parser.parse_args()
    if args.smoke:
        args.iterations, args.steps = 2, (2, 3)
    if args.iterations < 1 or min(args.steps) < 1 or len(args.steps) > len(COLORS):
        parser.error("--iterations and each K must be at least 1, and at most three K fit into the figure")

    print(f"x* = 1, y* = (1, 1). Rates: lower {LOWER_LR}, upper {UPPER_LR}, x {X_LR}. Start: x0 = {X0:g}, y0 = (2, 2).")
    print("RHG: alpha = 0. BDA: alpha_k = 0.5 / k.\n")
    rows = [row(steps, args.iterations) for steps in tqdm(args.steps, "table")]
    print(table(rows, args.iterations), flush=True)
    found = {"iterations": args.iterations, "order": ["RHG", "BDA"], "rows": [r._asdict() for r in rows]}
    write_json(args.out / "counterexample.json", found)
    figures = {
        "initialisations": lambda: initialisations(args.iterations),
        "lower_steps": lambda: lower_steps(args.steps, args.iterations),
        "weights": lambda: weights(args.iterations),
    }
    paths = []
    for name, draw in tqdm(figures.items(), "figures"):
        paths.append(args.out / f"counterexample_{name}.png")
        write_atomically(paths[-1], lambda file, draw=draw: draw().savefig(file, dpi=120))
    print("\nWritten:", args.out / "counterexample.json", *paths, sep="\n  ")


if __name__ == "__main__":
    main()
