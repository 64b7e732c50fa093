r"""Data hyper-cleaning, the paper's Table 2: find wrong labels by learning one weight per training sample.

    min over x of  F(y) = mean over validation of cross-entropy(y) + lambda |y|^2,
    where y minimises  f(x, y) = mean over training of sigmoid(x_i) * cross-entropy_i(y)

y are the weights of a softmax regression. Half of the training labels are replaced by wrong ones, the validation labels
are right. K steps on f start at y0 = 0, and Adam descends on x. A sample with a weight below 1/2 counts as wrong.

- RHG unrolls f alone. T-RHG does the same and differentiates the last 25 steps only.
- BDA takes part of the upper direction into the steps, alpha_k = c / k, so its y_K has seen the validation labels.
- RHG+val is the control for that: RHG, with the validation samples in f too, at weight 1.

Three numbers are reported: the accuracy of y_K on the test data, as in the paper; the F1 score of finding the wrong
labels; and the test accuracy of a fresh model that was trained on the samples that were kept, and on nothing else. The
last two do not depend on what y_K itself has seen.

    python examples/hyper_cleaning.py                                             (scikit-learn's digits, a minute)
    python examples/hyper_cleaning.py --data DIR --dataset mnist --steps 50 100 200 400 800 --seeds 0 1 2

The paper writes f and F with sums and gives no rates; here they are means, with the rates below.

Reference: Liu, Mu, Yuan, Zeng, Zhang, "A Generic First-Order Algorithmic Framework for Bi-Level Programming Beyond
Lower-Level Singleton", ICML 2020: section on hyper-parameter optimization.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import _data
import matplotlib
import torch
import torch.nn.functional as F
from _run import Checkpoint, arguments, write_json
from matplotlib.figure import Figure
from torch import Tensor
from tqdm import tqdm

import bda_optim as bda

# --- settings ---------------------------------------------------------------------------------------------------------

PER_CLASS = {"mnist": 700, "fashion_mnist": 700, "digits": 40}  # in training, and as many in validation; the rest: test
SCALE = {
    "mnist": 1.0,
    "fashion_mnist": 0.5,
    "digits": 1.0,
}  # of pixels from 0 to 1: so one rate suits all sets, see load
STEPS = (50, 100, 200, 400, 800)  # K
LOWER_LR = 2.0  # s_l
UPPER_LR = 4.0  # s_u, the rate of the upper direction inside the lower steps
C = 40.0  # of BDA's alpha_k = C / k, clipped below 1
X_LR = 2.0  # of Adam on x
ITERATIONS = 4  # of Adam, the same for all methods
DECAY = 1e-4  # lambda
LAST = 25  # steps that T-RHG differentiates
RETRAIN = 200  # steps on the cleaned set, with LOWER_LR
RECORDED = 200  # up to this K all steps are recorded, 1.5 MB each for BDA on MNIST; beyond, they are checkpointed
EVERY = 10  # steps between two checkpoints: a state is small, 31 kB; so K = 800 takes 91 MiB over the data
BINS = 20  # of the histograms of weights


class Method(NamedTuple):
    """What tells the methods apart."""

    alpha: float | Callable[[int], float | Tensor] = 0.0
    last: int | None = None
    validation_in_lower: bool = False


METHODS = {
    "RHG": Method(),
    "T-RHG": Method(last=LAST),
    "BDA": Method(alpha=bda.harmonic(C)),
    "RHG+val": Method(validation_in_lower=True),
}
PAPER = {  # Table 2, MNIST: K -> accuracy in %
    "RHG": {50: 88.96, 100: 89.73, 200: 90.13, 400: 90.19, 800: 90.15},
    "T-RHG": {50: 87.90, 100: 88.28, 200: 88.50, 400: 88.52, 800: 89.99},
    "BDA": {50: 89.12, 100: 90.12, 200: 90.57, 400: 90.81, 800: 90.86},
}

# --- the data ---------------------------------------------------------------------------------------------------------


class Part(NamedTuple):
    """Images (n, pixels) and labels."""

    images: Tensor
    labels: Tensor


class Data(NamedTuple):
    """The three parts, and which training labels are wrong."""

    train: Part
    val: Part
    test: Part
    wrong: Tensor


def load(name: str, root: Path | None) -> Part:
    if name == "digits":
        images, labels = _data.digits()
    else:
        assert root is not None
        train_images, train_labels, test_images, test_labels = getattr(_data, name)(root)
        images, labels = torch.cat((train_images, test_images)), torch.cat((train_labels, test_labels))
    # The largest eigenvalue of the covariance bounds the rates: 5.4 for MNIST, 20 for unscaled FashionMNIST.
    return Part(images.flatten(1).float() / images.max() * SCALE[name], labels)


def split(whole: Part, per_class: int, seed: int, device: torch.device) -> Data:
    """Draw class-balanced training and validation sets, and replace half of the training labels by wrong ones."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(whole.labels), generator=generator)
    by_class = [order[whole.labels[order] == label] for label in range(10)]
    bounds = (0, per_class, 2 * per_class, len(order))
    train, val, test = (
        Part(whole.images[chosen], whole.labels[chosen])
        for low, high in itertools.pairwise(bounds)
        for chosen in [torch.cat([samples[low:high] for samples in by_class])]
    )
    size = len(train.labels)
    wrong = torch.zeros(size, dtype=torch.bool)
    wrong[torch.randperm(size, generator=generator)[: size // 2]] = True
    shift = torch.randint(1, 10, (size,), generator=generator)  # never 0 mod 10: another class for certain
    train = train._replace(labels=torch.where(wrong, (train.labels + shift) % 10, train.labels))
    mean = train.images.mean(0)  # without it the largest eigenvalue of the Hessian is ten times as large
    parts = (Part((part.images - mean).to(device), part.labels.to(device)) for part in (train, val, test))
    return Data(*parts, wrong.to(device))


# --- the problem ------------------------------------------------------------------------------------------------------


def cross_entropy(net: torch.nn.Module, part: Part) -> Tensor:
    """One loss per sample. The classes come first: W X^T takes two thirds of the time of F.linear(X, W) on a CPU."""
    logits = net.weight @ part.images.T + net.bias[:, None]
    return F.cross_entropy(logits[None], part.labels[None], reduction="none")[0]


def weighted(net: torch.nn.Module, weights: Tensor, data: Data) -> Tensor:
    return (weights * cross_entropy(net, data.train)).mean()


def regression(data: Data) -> torch.nn.Linear:
    images = data.train.images
    model = torch.nn.Linear(images.shape[1], 10, device=images.device, dtype=images.dtype)
    for y0 in model.parameters():
        torch.nn.init.zeros_(y0)
    return model


class Problem:
    """f, F and the K lower steps of one method."""

    def __init__(self, data: Data, method: Method, steps: int, recorded: int = RECORDED) -> None:
        self.data, self.method, self.steps = data, method, steps
        self.model = regression(data)
        self.inner = bda.BDAInnerOptimizer(self.model.parameters(), lr=LOWER_LR, upper_lr=UPPER_LR, alpha=method.alpha)
        self.adjoint = bda.Unroll() if steps <= recorded else bda.Checkpointed(every=EVERY)
        if method.last is not None:
            self.adjoint = bda.Truncated(last=method.last)

    def lower(self, net: torch.nn.Module, x: Tensor, batch: None = None) -> Tensor:
        f = weighted(net, torch.sigmoid(x), self.data)
        return (f + cross_entropy(net, self.data.val).mean()) / 2 if self.method.validation_in_lower else f

    def upper(self, net: torch.nn.Module, x: Tensor, batch: None = None) -> Tensor:
        penalty = sum(y.square().sum() for y in (net.weight, net.bias))
        return cross_entropy(net, self.data.val).mean() + DECAY * penalty

    def rollout(self, x: Tensor) -> torch.nn.Module:
        """Return the model with y_K(x) inside."""
        return self.inner.unroll(self.model, self.lower, self.upper, hyper=x, steps=self.steps, adjoint=self.adjoint)

    def hypergradient(self, x: Tensor) -> float:
        """Fill x.grad, and return F(y_K(x))."""
        value = self.upper(self.rollout(x), x)
        value.backward()
        return value.item()


def train(data: Data, weights: Tensor, steps: int) -> torch.nn.Module:
    """Fit a fresh model with fixed weights, and no validation data."""
    model = regression(data)
    optimizer = torch.optim.SGD(model.parameters(), lr=LOWER_LR)
    for _ in range(steps):
        optimizer.zero_grad()
        weighted(model, weights, data).backward()
        optimizer.step()
    return model


# --- what is reported -------------------------------------------------------------------------------------------------


@torch.no_grad()
def accuracy(net: torch.nn.Module, part: Part) -> float:
    """In percent."""
    return 100 * (net(part.images).argmax(1) == part.labels).double().mean().item()


def f1_score(found: Tensor, wrong: Tensor) -> float:
    """2 TP / (2 TP + FP + FN)."""
    return 2 * (found & wrong).sum().item() / (found.sum() + wrong.sum()).item()


def histogram(weights: Tensor) -> list[int]:
    return [int(count) for count in torch.histc(weights.float().cpu(), BINS, 0, 1)]


def report(problem: Problem, x: Tensor, retrain: int) -> dict[str, Any]:
    data, found = problem.data, x < 0
    with torch.no_grad():
        net = problem.rollout(x)
        upper = problem.upper(net, x).item()
    weights = torch.sigmoid(x.detach())
    return {
        "accuracy": accuracy(net, data.test),
        "f1": f1_score(found, data.wrong),
        "retrained": accuracy(train(data, (~found).float(), retrain), data.test),
        "upper": upper,
        "weights": {"right": histogram(weights[~data.wrong]), "wrong": histogram(weights[data.wrong])},
    }


def references(data: Data, retrain: int) -> dict[str, float]:
    """What plain training gets: with all labels as they are, and with the right ones only."""
    return {
        "all labels": accuracy(train(data, torch.ones_like(data.wrong).float(), retrain), data.test),
        "right labels only": accuracy(train(data, (~data.wrong).float(), retrain), data.test),
    }


# --- one run ----------------------------------------------------------------------------------------------------------


def solve(problem: Problem, checkpoint: Checkpoint, iterations: int, retrain: int, tick: Callable[[int], Any]) -> None:
    """Run Adam on x, from x = 0, with a checkpoint after every upper iteration; the last one has the report."""
    x = torch.zeros(problem.data.wrong.shape, device=problem.data.wrong.device, requires_grad=True)
    outer = torch.optim.Adam([x], lr=X_LR)
    state = checkpoint.load() or {"curve": [], "seconds": 0.0}
    if state["curve"]:
        x.data.copy_(state["x"])
        outer.load_state_dict(state["adam"])
    tick(len(state["curve"]))
    start = time.perf_counter() - state["seconds"]
    while "report" not in state:
        if len(state["curve"]) < iterations:
            outer.zero_grad()
            state["curve"].append(problem.hypergradient(x))
            outer.step()
            tick(1)
        else:
            state["report"] = report(problem, x, retrain)
        state |= {"x": x.detach(), "adam": outer.state_dict(), "seconds": time.perf_counter() - start}
        checkpoint.save(state)


def finished(folder: Path, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the outcomes of all finished runs with these settings that are in the folder, whoever started them."""
    cells = []
    for path in sorted(folder.glob("*-*-*.pt")):
        found = torch.load(path, weights_only=True)
        which = {key: found["settings"].get(key) for key in ("method", "steps", "seed")}
        state = found["state"]
        if found["settings"] == settings | which and "report" in state:
            cells.append({**which, **state["report"], "curve": state["curve"], "seconds": round(state["seconds"], 1)})
    return cells


def run(args: argparse.Namespace, dataset: str, whole: Part) -> dict[str, Any]:
    """Run all that was asked for on one data set; with --resume, what is finished is read from its checkpoint."""
    settings = {
        "dataset": dataset,
        "per_class": PER_CLASS[dataset],
        "scale": SCALE[dataset],
        "iterations": args.iterations,
        "retrain": args.retrain,
        "recorded": args.recorded,
        "rates": {"lower": LOWER_LR, "upper": UPPER_LR, "x": X_LR},
        "c": C,
        "decay": DECAY,
        "last": LAST,
    }
    asked, plain, folder = list(itertools.product(args.seeds, args.steps, args.methods)), [], args.out / dataset
    with tqdm(total=len(asked) * args.iterations, desc=dataset, unit="iteration", disable=None) as bar:
        for seed in args.seeds:
            data = split(whole, PER_CLASS[dataset], seed, args.device)
            for steps, name in itertools.product(args.steps, args.methods):
                which = {"method": name, "steps": steps, "seed": seed}
                bar.set_postfix(which)
                checkpoint = Checkpoint(folder / f"{name}-{steps}-{seed}.pt", settings | which, resume=args.resume)
                problem = Problem(data, METHODS[name], steps, args.recorded)
                solve(problem, checkpoint, args.iterations, args.retrain, bar.update)
            checkpoint = Checkpoint(folder / f"plain-{seed}.pt", settings | {"seed": seed}, resume=args.resume)
            state = checkpoint.load() or references(data, args.retrain)
            checkpoint.save(state)
            plain.append({"seed": seed, **state})
    cells = finished(folder, settings)  # with --resume also those of earlier runs with other K, methods or seeds
    if not args.resume:
        cells = [cell for cell in cells if (cell["seed"], cell["steps"], cell["method"]) in asked]
    return {"settings": settings, "date": datetime.date.today().isoformat(), "cells": cells, "plain": plain}


# --- tables and figures -----------------------------------------------------------------------------------------------

REPORTED = (
    ("accuracy", "Test accuracy of y_K in %", 2),
    ("f1", "F1 of finding the wrong labels", 4),
    ("retrained", "Test accuracy in % after retraining on the cleaned set", 2),
)
COLORS = {"RHG": "#0072B2", "T-RHG": "#009E73", "BDA": "#D55E00", "RHG+val": "#777777"}
STYLE = {"font.size": 11, "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True}


def rows(results: Mapping[str, Any], key: str) -> dict[str, dict[int, list[Any]]]:
    """Return method -> K -> one value per seed."""
    found: dict[str, dict[int, list[Any]]] = {name: {} for name in METHODS}
    for cell in sorted(results["cells"], key=lambda cell: (cell["steps"], cell["seed"])):
        found[cell["method"]].setdefault(cell["steps"], []).append(cell[key])
    return {name: row for name, row in found.items() if row}


def paper(results: Mapping[str, Any], key: str, name: str) -> dict[int, float]:
    """Return K -> the paper's number, where it has one, for the K that were run."""
    theirs = PAPER.get(name, {}) if key == "accuracy" and results["settings"]["dataset"] == "mnist" else {}
    return {k: theirs[k] for k in sorted({cell["steps"] for cell in results["cells"]} & theirs.keys())}


def entry(found: Sequence[float], digits: int) -> str:
    """Mean, and standard deviation where there are several."""
    if not found:
        return "-"
    spread = f" ± {statistics.stdev(found):.{digits}f}" if len(found) > 1 else ""
    return f"{statistics.mean(found):.{digits}f}{spread}"


def tables(results: Mapping[str, Any]) -> str:
    """Return the tables of the README, in Markdown."""
    lines, steps = [], sorted({cell["steps"] for cell in results["cells"]})
    for key, title, digits in (*REPORTED, ("seconds", "Wall time in s, one seed", 0)):
        lines += [f"| {title} |" + "".join(f" K = {k} |" for k in steps), "|---|" + "---:|" * len(steps)]
        for name, row in rows(results, key).items():
            lines.append(f"| {name} |" + "".join(f" {entry(row.get(k, []), digits)} |" for k in steps))
            if theirs := paper(results, key, name):
                lines.append(
                    f"| {name}, paper |" + "".join(f" {theirs[k]:.2f} |" if k in theirs else " - |" for k in steps)
                )
        lines.append("")
    for name in ("all labels", "right labels only"):
        lines.append(f"Plain training, {name}: {entry([row[name] for row in results['plain']], 2)} %.")
    return "\n".join(lines)


def accuracy_figure(results: Mapping[str, Any]) -> Figure:
    """Draw the three numbers against K; bars are standard deviations over seeds, dotted lines the paper's."""
    steps = sorted({cell["steps"] for cell in results["cells"]})
    with matplotlib.rc_context(STYLE):
        fig = Figure(figsize=(14, 4.6), layout="constrained")
        for ax, (key, title, _) in zip(fig.subplots(1, 3), REPORTED, strict=True):
            for name, row in rows(results, key).items():
                means = [statistics.mean(found) for found in row.values()]
                bars = [statistics.stdev(found) if len(found) > 1 else 0.0 for found in row.values()]
                ax.errorbar(list(row), means, bars, color=COLORS[name], marker="o", ms=5, capsize=3, label=name)
                if theirs := paper(results, key, name):
                    ax.plot(list(theirs), list(theirs.values()), ":", color=COLORS[name], label=f"{name}, paper")
            ax.set_xscale("log", base=2)
            ax.set_xticks(steps, [str(k) for k in steps])
            ax.minorticks_off()
            ax.grid(color="#e6e6e6")
            ax.set_xlabel("lower steps $K$")
            ax.set_title(title.replace("y_K", "$y_K$"), fontsize=11)
        fig.legend(*fig.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=7, frameon=False)
        fig.suptitle(f"Hyper-cleaning, {results['settings']['dataset']}")
    return fig


def weights_figure(results: Mapping[str, Any], steps: int) -> Figure:
    """Draw histograms of sigmoid(x), over all seeds together."""
    found = {name: row[steps] for name, row in rows(results, "weights").items() if steps in row}
    with matplotlib.rc_context(STYLE):
        fig = Figure(figsize=(3.6 * len(found), 3.8), layout="constrained")
        edges = [number / BINS for number in range(BINS + 1)]
        for ax, name in zip(fig.subplots(1, len(found), sharey=True, squeeze=False)[0], found, strict=True):
            for kind, color in (("right", "#0072B2"), ("wrong", "#D55E00")):
                counts = torch.tensor([weights[kind] for weights in found[name]]).sum(0)
                ax.stairs(counts / counts.sum(), edges, fill=True, alpha=0.6, color=color, label=f"{kind} label")
            ax.set_yscale("log", nonpositive="clip")
            ax.set_ylim(1e-3, 1)
            ax.axvline(0.5, color="black", linewidth=0.8, linestyle=":")
            ax.set_title(name)
            ax.set_xlabel(r"learned weight $\sigma(x_i)$")
        fig.axes[0].set_ylabel("share of the samples")
        fig.legend(*fig.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
        fig.suptitle(f"Weights of right and wrong labels, {results['settings']['dataset']}, K = {steps}")
    return fig


# --- what the command does --------------------------------------------------------------------------------------------

SMOKE = {"steps": [2, 40], "iterations": 2, "retrain": 5}


def parse() -> argparse.Namespace:
    parser = arguments("Data hyper-cleaning: RHG, T-RHG, BDA and a control.", "hyper_cleaning")
    parser.add_argument(
        "--data", type=Path, metavar="DIR", help="folder with MNIST/, FashionMNIST/; without it: digits"
    )
    parser.add_argument("--dataset", choices=("mnist", "fashion_mnist"), help="which one of --data; without it: mnist")
    parser.add_argument("--steps", type=int, nargs="+", default=list(STEPS), metavar="K", help="lower steps")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), help="which ones to run")
    parser.add_argument("--iterations", type=int, default=ITERATIONS, help="upper iterations")
    parser.add_argument("--retrain", type=int, default=RETRAIN, help="steps of the training on the cleaned set")
    parser.add_argument("--recorded", type=int, default=RECORDED, metavar="K", help="beyond: less memory, more time")
    if parser.parse_known_args()[0].smoke:
        parser.set_defaults(**SMOKE)
    args = parser.parse_args()
    if min(*args.steps, args.iterations, args.retrain) < 1:
        parser.error("--steps, --iterations and --retrain must be at least 1")
    if args.dataset and args.data is None:
        parser.error(f"--dataset {args.dataset} needs --data, the folder that holds it")
    args.dataset = "digits" if args.data is None else args.dataset or "mnist"
    return args


def main() -> None:
    args = parse()
    dataset = args.dataset
    results = run(args, dataset, load(dataset, args.data))
    write_json(args.out / f"{dataset}.json", results)
    shown = 200 if 200 in args.steps else args.steps[-1]
    accuracy_figure(results).savefig(args.out / f"{dataset}_accuracy.png", dpi=120)
    weights_figure(results, shown).savefig(args.out / f"{dataset}_weights.png", dpi=120)
    print(f"\n{tables(results)}\n\nWritten: {args.out / dataset}.json, _accuracy.png and _weights.png")


if __name__ == "__main__":
    main()
