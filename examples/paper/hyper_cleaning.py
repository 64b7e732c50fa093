r"""Data hyper-cleaning, the paper's Table 2: find wrong labels by learning one weight per training sample.

    min over x of  F(y) = mean over validation of cross-entropy(y) + lambda |y|^2,
    where y minimises  f(x, y) = mean over training of sigmoid(x_i) * cross-entropy_i(y)

y are the weights of a softmax regression. Half of the training labels are replaced by wrong ones, the validation labels
are right. K steps on f start at y0 = 0, and Adam descends on x until F changes by less than 1 % over 4 iterations, or
for 32 iterations. A sample with a weight below 1/2 counts as wrong.

- RHG unrolls f alone. T-RHG does the same and differentiates the last 25 steps only.
- BDA takes part of the upper direction into the steps, alpha_k = c / k, so its y_K has seen the validation labels.
- RHG+val is the control for that: RHG, with the validation samples in f too, at weight 1.

Four numbers are reported: the accuracy of y_K on the test data, as in the paper; that of y_K after K steps on f alone
with the learned x ("lower only"); the F1 score of finding the wrong labels; and the test accuracy of a fresh model that
was trained on the samples that were kept, and on nothing else. In the last three y has seen no validation label.

    python examples/paper/hyper_cleaning.py                                     (scikit-learn's digits, a minute)
    python examples/paper/hyper_cleaning.py --data DIR --steps 50 100 200 --seeds 3 4 5
    python examples/paper/hyper_cleaning.py --data DIR --steps 400 800 --seeds 3 --iterations 16 --resume

The paper writes f and F with sums and gives no rates; here they are means, with the rates below.

Reference: Liu, Mu, Yuan, Zeng, Zhang, "A Generic First-Order Algorithmic Framework for Bi-Level Programming Beyond
Lower-Level Singleton", ICML 2020: section on hyper-parameter optimization.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import _above  # noqa: F401
import torch
import torch.nn.functional as F
from _cleaning_data import SCALE, Data, Part, load, split
from _cleaning_report import accuracy_figure, curves_figure, tables, weights_figure
from _run import Checkpoint, arguments, provenance, wait_while_paused, write_json
from torch import Tensor
from tqdm import tqdm

import bda_optim as bda

# --- settings ---------------------------------------------------------------------------------------------------------

PER_CLASS = {"mnist": 700, "fashion_mnist": 700, "digits": 40}  # in training, and as many in validation; the rest: test
STEPS = (50, 100, 200, 400, 800)  # K
ITERATIONS = 32  # of Adam on x, at most; the same for all methods
WINDOW = 4  # iterations, over which F has to change ...
TOLERANCE = 0.01  # ... by less than this part of it, for x to count as converged
DECAY = 1e-4  # lambda
RETRAIN = 200  # steps on the cleaned set
RETRAIN_LR = 2.0
RECORDED = 200  # up to this K all steps are recorded, 1.5 MB each for BDA on MNIST; beyond, they are checkpointed
EVERY = 10  # steps between two checkpoints: a state is small, 31 kB; so K = 800 takes 91 MiB over the data
BINS = 20  # of the histograms of weights


class Method(NamedTuple):
    """What tells the methods apart, and the rates, which hyper_cleaning_choice.py chose."""

    lower_lr: float = 2.0  # s_l
    x_lr: float = 2.0  # of Adam on x
    c: float = 0.0  # of alpha_k = c / k, clipped below 1
    upper_lr: float = 1.0  # s_u, the rate of the upper direction inside the lower steps
    last: int | None = None  # steps that are differentiated; None: all
    validation_in_lower: bool = False


METHODS = {
    "RHG": Method(),
    "T-RHG": Method(last=25),
    "BDA": Method(c=10.0, upper_lr=2.0),
    "RHG+val": Method(validation_in_lower=True),
}

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
        self.data, self.method, self.steps, self.recorded = data, method, steps, recorded
        self.model = regression(data)
        alpha = bda.harmonic(method.c) if method.c else 0.0
        rates = {"lr": method.lower_lr, "upper_lr": method.upper_lr}
        self.inner = bda.BDAInnerOptimizer(self.model.parameters(), alpha=alpha, **rates)
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

    def hypergradient(self, x: Tensor) -> tuple[float, torch.nn.Module]:
        """Fill x.grad, and return F(y_K(x)) and the model with y_K(x) inside."""
        net = self.rollout(x)
        value = self.upper(net, x)
        value.backward()
        return value.item(), net

    def lower_only(self) -> Problem:
        """Return the same problem with K steps on f alone: no validation label is seen by y."""
        method = self.method._replace(c=0.0, validation_in_lower=False)
        return Problem(self.data, method, self.steps, self.recorded)


def train(data: Data, weights: Tensor, steps: int) -> torch.nn.Module:
    """Fit a fresh model with fixed weights, and no validation data."""
    model = regression(data)
    optimizer = torch.optim.SGD(model.parameters(), lr=RETRAIN_LR)
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
        lower_only = problem.lower_only().rollout(x)
    weights = torch.sigmoid(x.detach())
    return {
        "accuracy": accuracy(net, data.test),
        "lower_only": accuracy(lower_only, data.test),
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


def converged(upper: Sequence[float]) -> bool:
    """Whether F changed by less than 1 % over the last 4 iterations."""
    return len(upper) > WINDOW and abs(upper[-1 - WINDOW] - upper[-1]) < TOLERANCE * abs(upper[-1])


def solve(
    problem: Problem, checkpoint: Checkpoint, iterations: int, retrain: int, tick: Callable[[int], Any]
) -> dict[str, Any]:
    """Run Adam on x, from x = 0, with a checkpoint after every upper iteration; return the last, which has a report.

    The curve has F(y_K), the test accuracy of y_K and F1 before each iteration. The test data take no part in anything
    else: not in the stopping rule, nor in what is kept.
    """
    data = problem.data
    x = torch.zeros(data.wrong.shape, device=data.wrong.device, requires_grad=True)
    outer = torch.optim.Adam([x], lr=problem.method.x_lr)
    state = checkpoint.load() or {"curve": {"upper": [], "accuracy": [], "f1": []}, "seconds": 0.0}
    curve = state["curve"]
    if curve["upper"]:
        x.data.copy_(state["x"])
        outer.load_state_dict(state["adam"])
    tick(len(curve["upper"]))
    start = time.process_time() - state["seconds"]
    while "report" not in state:
        wait_while_paused()
        if len(curve["upper"]) < iterations and not converged(curve["upper"]):
            outer.zero_grad()
            value, net = problem.hypergradient(x)
            curve["upper"].append(value)
            curve["accuracy"].append(round(accuracy(net, data.test), 4))
            curve["f1"].append(round(f1_score(x < 0, data.wrong), 5))
            outer.step()
            tick(1)
        else:
            state["report"] = report(problem, x, retrain)
        state |= {"x": x.detach(), "adam": outer.state_dict(), "seconds": time.process_time() - start}
        checkpoint.save(state)
    return state


def finished(folder: Path, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the outcomes of all finished runs with these settings that are in the folder, whoever started them."""
    cells = []
    for path in sorted(folder.glob("*-*-*.pt")):
        found = torch.load(path, weights_only=True)
        which = {key: found["settings"].get(key) for key in ("method", "steps", "seed", "iterations")}
        state = found["state"]
        if found["settings"] == identity(settings, **which) and "report" in state:
            time_taken = {"seconds": round(state["seconds"], 1)}
            cells.append({**which, **state["report"], "curve": state["curve"], **time_taken})
    return cells


def identity(settings: Mapping[str, Any], method: str, steps: int, seed: int, iterations: int) -> dict[str, Any]:
    """Return all that the numbers of a run depend on."""
    which = {"method": method, "steps": steps, "seed": seed, "iterations": iterations}
    return {**settings, **which, **METHODS[method]._asdict()}


def run(args: argparse.Namespace, dataset: str, whole: Part) -> dict[str, Any]:
    """Run all that was asked for on one data set; with --resume, what is finished is read from its checkpoint."""
    settings = {
        "dataset": dataset,
        "per_class": PER_CLASS[dataset],
        "scale": SCALE[dataset],
        "window": WINDOW,
        "tolerance": TOLERANCE,
        "retrain": args.retrain,
        "retrain_lr": RETRAIN_LR,
        "recorded": args.recorded,
        "decay": DECAY,
    }
    asked, plain, folder = list(itertools.product(args.seeds, args.steps, args.methods)), [], args.out / dataset
    with tqdm(total=len(asked) * args.iterations, desc=dataset, unit="iteration", disable=None) as bar:
        for seed in args.seeds:
            data = split(whole, PER_CLASS[dataset], seed, args.device)
            for steps, name in itertools.product(args.steps, args.methods):
                which = {"method": name, "steps": steps, "seed": seed}
                bar.set_postfix(which)
                path = folder / f"{name}-{steps}-{seed}.pt"
                what = identity(settings, **which, iterations=args.iterations)
                checkpoint = Checkpoint(path, what, resume=args.resume)
                problem = Problem(data, METHODS[name], steps, args.recorded)
                solve(problem, checkpoint, args.iterations, args.retrain, bar.update)
            checkpoint = Checkpoint(folder / f"plain-{seed}.pt", settings | {"seed": seed}, resume=args.resume)
            state = checkpoint.load() or references(data, args.retrain)
            checkpoint.save(state)
            plain.append({"seed": seed, **state})
    cells = finished(folder, settings)  # with --resume also those of earlier runs with other K, methods or seeds
    if not args.resume:
        cells = [cell for cell in cells if (cell["seed"], cell["steps"], cell["method"]) in asked]
    methods = {name: METHODS[name]._asdict() for name in dict.fromkeys(cell["method"] for cell in cells)}
    return {"settings": settings, "methods": methods, **provenance(), "cells": cells, "plain": plain}


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
    parser.add_argument("--iterations", type=int, default=ITERATIONS, help="upper iterations, at most")
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
    curves_figure(results).savefig(args.out / f"{dataset}_curves.png", dpi=120)
    print(f"\n{tables(results)}\n\nWritten: {args.out / dataset}.json, _accuracy.png, _weights.png and _curves.png")


if __name__ == "__main__":
    main()
