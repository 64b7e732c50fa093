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
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import _data
import torch
import torch.nn.functional as F
from _cleaning_report import accuracy_figure, tables, weights_figure
from _run import Checkpoint, arguments, write_json
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
ITERATIONS = 4  # of Adam on x, the same for all methods
DECAY = 1e-4  # lambda
RETRAIN = 200  # steps on the cleaned set
RETRAIN_LR = 2.0
RECORDED = 200  # up to this K all steps are recorded, 1.5 MB each for BDA on MNIST; beyond, they are checkpointed
EVERY = 10  # steps between two checkpoints: a state is small, 31 kB; so K = 800 takes 91 MiB over the data
BINS = 20  # of the histograms of weights


class Method(NamedTuple):
    """What tells the methods apart, and the rates of each, which hyper_cleaning_choice.py chose."""

    lower_lr: float  # s_l
    x_lr: float  # of Adam on x
    c: float = 0.0  # of alpha_k = c / k, clipped below 1
    upper_lr: float = 1.0  # s_u, the rate of the upper direction inside the lower steps
    last: int | None = None  # steps that are differentiated; None: all
    validation_in_lower: bool = False


METHODS = {
    "RHG": Method(lower_lr=4.0, x_lr=2.0),
    "T-RHG": Method(lower_lr=4.0, x_lr=1.0, last=25),
    "BDA": Method(lower_lr=2.0, x_lr=1.0, c=40.0, upper_lr=4.0),
    "RHG+val": Method(lower_lr=4.0, x_lr=1.0, validation_in_lower=True),
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

    def hypergradient(self, x: Tensor) -> float:
        """Fill x.grad, and return F(y_K(x))."""
        value = self.upper(self.rollout(x), x)
        value.backward()
        return value.item()


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


def solve(
    problem: Problem, checkpoint: Checkpoint, iterations: int, retrain: int, tick: Callable[[int], Any]
) -> dict[str, Any]:
    """Run Adam on x, from x = 0, with a checkpoint after every upper iteration; return the last, which has a report."""
    x = torch.zeros(problem.data.wrong.shape, device=problem.data.wrong.device, requires_grad=True)
    outer = torch.optim.Adam([x], lr=problem.method.x_lr)
    state = checkpoint.load() or {"curve": [], "seconds": 0.0}
    if state["curve"]:
        x.data.copy_(state["x"])
        outer.load_state_dict(state["adam"])
    tick(len(state["curve"]))
    start = time.process_time() - state["seconds"]
    while "report" not in state:
        if len(state["curve"]) < iterations:
            outer.zero_grad()
            state["curve"].append(problem.hypergradient(x))
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
        which = {key: found["settings"].get(key) for key in ("method", "steps", "seed")}
        state = found["state"]
        if found["settings"] == identity(settings, **which) and "report" in state:
            cells.append({**which, **state["report"], "curve": state["curve"], "seconds": round(state["seconds"], 1)})
    return cells


def identity(settings: Mapping[str, Any], method: str, steps: int, seed: int) -> dict[str, Any]:
    """Return all that the numbers of a run depend on."""
    return {**settings, "method": method, "steps": steps, "seed": seed, **METHODS[method]._asdict()}


def run(args: argparse.Namespace, dataset: str, whole: Part) -> dict[str, Any]:
    """Run all that was asked for on one data set; with --resume, what is finished is read from its checkpoint."""
    settings = {
        "dataset": dataset,
        "per_class": PER_CLASS[dataset],
        "scale": SCALE[dataset],
        "iterations": args.iterations,
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
                path, what = folder / f"{name}-{steps}-{seed}.pt", identity(settings, **which)
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
    today = datetime.date.today().isoformat()
    return {"settings": settings, "methods": methods, "date": today, "cells": cells, "plain": plain}


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
