"""Memory: upper iterations without the garbage collector leave no cyclic object, no tensor and no growth behind.

For each style of inner loop the collector is switched off, and upper iterations are run: a warm-up, then those that
count. Then the collector is asked what only it could have freed, the tensors that Python holds are counted, and the
resident memory of the process is read.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import os
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from problems import no_collector
from torch import Tensor, nn

import bda_optim as bda
import bda_optim.compat.higher as higher

GROWTH = 1.0
"""By how many MB the process may grow."""


class Problem:
    """A small network with buffers, a weight for each example, and batches of tasks."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
        self.inputs, self.labels = torch.randn(32, 8), torch.randint(3, (32,))
        self.tasks = torch.randn(4, 32, 8), torch.randint(3, (4, 32))
        self.w = torch.zeros(32, requires_grad=True)
        self.opt = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.plain = bda.BDAInnerOptimizer(self.model.parameters(), lr=0.1)
        self.inner = bda.BDAInnerOptimizer(
            self.model.parameters(), lr=1e-3, alpha=bda.harmonic(0.5), rule=torch.optim.Adam, prox=bda.prox.l1(1e-4)
        )
        self.outer = torch.optim.SGD([self.w], lr=0.1)
        self.y = {"a": torch.ones(3), "b": [torch.ones(2, 2)]}
        self.x = torch.zeros((), requires_grad=True)

    def lower(self, net: Any, w: Tensor, batch: Any = None) -> Tensor:
        inputs, labels = batch or (self.inputs, self.labels)
        return (torch.sigmoid(w) * F.cross_entropy(net(inputs), labels, reduction="none")).mean()

    def upper(self, net: Any, w: Any, batch: Any = None) -> Tensor:
        inputs, labels = batch or (self.inputs, self.labels)
        return F.cross_entropy(net(inputs.flip(0)), labels)

    def loop(self, **options: Any) -> None:
        with bda.innerloop_ctx(self.model, self.inner, copy_initial_weights=False, **options) as (fmodel, diffopt):
            for _ in range(3):
                diffopt.step(self.lower(fmodel, self.w), self.upper(fmodel, self.w))
            if options.get("track_higher_grads", True):
                self._descend(self.upper(fmodel, self.w))

    def unroll(self, adjoint: Any, **options: Any) -> None:
        fmodel = self.inner.unroll(
            self.model, self.lower, self.upper, hyper=self.w, steps=4, adjoint=adjoint, **options
        )
        if torch.is_grad_enabled():
            self._descend(self.upper(fmodel, self.w))
        self.inner.commit(fmodel)

    def many(self, adjoint: Any, **options: Any) -> None:
        fmodel = self.plain.unroll(
            self.model, self.lower, hyper=self.w, steps=3, batches=[self.tasks] * 3, tasks=4, adjoint=adjoint, **options
        )
        self._descend(fmodel.losses(self.upper, self.w, self.tasks).mean())

    def trees(self) -> None:
        bda.hypergradient(
            lambda y, x, b: ((y["a"] - x) ** 2).sum() + (y["b"][0] * x).square().sum(),
            lambda y, x, b: y["a"].sum() + y["b"][0].sum(),
            self.y, self.x, steps=4, lr=0.1, alpha=0.3, adjoint=bda.Guarded(bda.Checkpointed(slots=2), limit=1e6),
        )  # fmt: skip

    def compiled(self, adjoint: Any, tasks: int | None = None) -> None:
        """Few operations: a step of the network above takes minutes to compile."""
        batches = None if tasks is None else [torch.ones(tasks)] * 2
        bda.hypergradient(
            lambda y, x, b: ((y - x) ** 2).sum() * (1.0 if b is None else b), lambda y, x, b: y.sum(),
            self.y["a"], self.x, steps=2, lr=0.1, adjoint=adjoint, tasks=tasks, batches=batches, compile=True,
        )  # fmt: skip

    def compat(self, track: bool = True) -> None:
        with higher.innerloop_ctx(
            self.model, self.opt, copy_initial_weights=False, track_higher_grads=track
        ) as (fmodel, diffopt):  # fmt: skip
            for _ in range(3):
                diffopt.step(self.lower(fmodel, self.w))
            if track:
                self._descend(self.upper(fmodel, self.w))

    def twice(self) -> None:
        fmodel = self.plain.unroll(
            self.model, self.lower, hyper=self.w, steps=3, adjoint=bda.Checkpointed(), copy_initial_weights=False
        )
        (slope,) = torch.autograd.grad(self.upper(fmodel, self.w), self.w, create_graph=True)
        self._descend(slope.square().sum())

    def step(self) -> None:
        self.inner.step(lambda: (self.lower(self.model, self.w), self.upper(self.model, self.w)))

    def no_grad(self) -> None:
        with torch.no_grad():
            self.unroll(bda.Checkpointed())

    def failing(self) -> None:
        with contextlib.suppress(FloatingPointError):
            self.plain.unroll(self.model, lambda n, w, b: b * self.lower(n, w), hyper=self.w, steps=3,
                              batches=[1.0, float("nan"), 1.0])  # fmt: skip

    def _descend(self, loss: Tensor) -> None:
        self.outer.zero_grad()
        loss.backward()
        self.outer.step()


STYLES: dict[str, Callable[[Problem], None]] = {
    "loop": Problem.loop,
    "loop, first order": lambda p: p.loop(first_order=True),
    "loop, not tracked": lambda p: p.loop(track_higher_grads=False),
    "unroll": lambda p: p.unroll(bda.Unroll()),
    "unroll, checkpointed": lambda p: p.unroll(bda.Checkpointed()),
    "unroll, slots": lambda p: p.unroll(bda.Checkpointed(slots=2)),
    "unroll, truncated": lambda p: p.unroll(bda.Truncated(last=2)),
    "unroll, forward mode": lambda p: p.unroll(bda.ForwardMode()),
    "unroll, no_grad": Problem.no_grad,
    "unroll, second derivative": Problem.twice,
    "unroll, diverged": Problem.failing,
    "tasks": lambda p: p.many(bda.Unroll()),
    "tasks, checkpointed": lambda p: p.many(bda.Checkpointed()),
    "trees": Problem.trees,
    "step in place": Problem.step,
    "compile": lambda p: p.compiled(bda.Unroll()),
    "compile, tasks": lambda p: p.compiled(bda.Checkpointed(), tasks=4),
    "compat": Problem.compat,
    "compat, not tracked": lambda p: p.compat(track=False),
}


_LIBC = ctypes.CDLL(None)


def resident() -> float:
    """The process's resident memory in MB, after the allocator gave back what it could."""
    if hasattr(_LIBC, "malloc_trim"):
        _LIBC.malloc_trim(0)
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def live_tensors() -> int:
    return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())


def measure(once: Callable[[], None], count: int, warm_up: int) -> dict[str, Any]:
    """Run something `count` times without the collector, and say what is left."""
    with no_collector() as garbage:
        for _ in range(warm_up):
            once()
        gc.collect()  # what a compiler left behind
        tensors, memory = live_tensors(), resident()
        for _ in range(count):
            once()
        grown = resident() - memory
        tensors = live_tensors() - tensors
        left = garbage()
    kinds = sorted({type(thing).__name__ for thing in left})
    return {"cyclic": len(left), "kinds": kinds, "tensors": tensors, "grown": round(grown, 2)}


def campaign(count: int, warm_up: int, styles: list[str], growth: float) -> dict[str, Any]:
    found, failures = {}, []
    for name in styles:
        problem = Problem()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found[name] = left = measure(lambda p=problem, s=STYLES[name]: s(p), count, warm_up)
        if left["cyclic"] or left["tensors"] or left["grown"] > growth:
            failures.append(f"python -m tests.campaign memory --count {count} --styles '{name}': {left}")
    return {"count": count * len(styles), "iterations": count, "styles": found, "failures": failures}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--count", type=int, default=1000, help="upper iterations of each style")
    parser.add_argument("--warm-up", type=int, default=300, help="upper iterations before that")
    parser.add_argument("--styles", nargs="+", default=list(STYLES), choices=STYLES)


def run(args: argparse.Namespace) -> dict[str, Any]:
    return campaign(args.count, args.warm_up, args.styles, GROWTH)


def smoke() -> dict[str, Any]:
    """Three iterations of the styles that need no compiler: cycles and tensors; the growth means nothing yet."""
    left_out = ("compile", "step", "loop, first", "unroll, slots", "unroll, truncated", "tasks, ", "compat, ")
    return campaign(3, 2, [name for name in STYLES if not name.startswith(left_out)], float("inf"))


def row(result: dict[str, Any]) -> str:
    most = {key: max(style[key] for style in result["styles"].values()) for key in ("cyclic", "tensors", "grown")}
    return (
        f"{result['iterations']} upper iterations of {len(result['styles'])} styles without the collector: "
        f"{most['cyclic']} cyclic objects, {most['tensors']} tensors, at most {most['grown']:.2f} MB more"
    )
