"""Threads: four threads use one module and one optimizer at once; every result is that of a single thread."""

from __future__ import annotations

import argparse
import threading
from typing import Any

import torch
from torch import Tensor, nn

import bda_optim as bda
import bda_optim.compat.higher as higher

THREADS = 4


class Use:
    """One use of the module: an inner loop in one of several styles, and its hypergradient."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1)).double()
        self.data = torch.randn(5, 3, dtype=torch.float64)
        self.inner = bda.BDAInnerOptimizer(self.model.parameters(), lr=0.05, alpha=bda.harmonic(0.4))
        self.plain = torch.optim.SGD(self.model.parameters(), lr=0.05)

    def lower(self, net: Any, x: Tensor, batch: Any = None) -> Tensor:
        return (net(self.data) - x).square().mean()

    def upper(self, net: Any, x: Tensor, batch: Any = None) -> Tensor:
        return (net(self.data.flip(1)) + x).square().mean()

    def __call__(self, number: int) -> Tensor:
        x = torch.tensor(number % 7 / 7, dtype=torch.float64, requires_grad=True)
        style = number % 4
        if style == 3:
            with higher.innerloop_ctx(self.model, self.plain) as (fmodel, diffopt):
                for _ in range(2):
                    diffopt.step(self.lower(fmodel, x))
                return torch.autograd.grad(self.upper(fmodel, x), x)[0]
        if style == 2:
            with bda.innerloop_ctx(self.model, self.inner) as (fmodel, diffopt):
                for _ in range(2):
                    diffopt.step(self.lower(fmodel, x), self.upper(fmodel, x))
                return torch.autograd.grad(self.upper(fmodel, x), x)[0]
        adjoint = (bda.Unroll(), bda.Checkpointed())[style]
        fmodel = self.inner.unroll(self.model, self.lower, self.upper, hyper=x, steps=2, adjoint=adjoint)
        return torch.autograd.grad(self.upper(fmodel, x), x)[0]


def campaign(count: int) -> dict[str, Any]:
    """Let each thread use the module `count` times."""
    use = Use()
    want = [use(number) for number in range(28)]
    before = [(id(t), t._version, t.detach().clone()) for t in (*use.model.parameters(), *use.model.buffers())]
    wrong: list[str] = []
    start = threading.Barrier(THREADS)

    def work(thread: int) -> None:
        start.wait()
        for i in range(count):
            number = (i * THREADS + thread) % len(want)
            try:
                if not torch.equal(use(number), want[number]):
                    wrong.append(f"thread {thread}, use {i}: another number")
            except Exception as error:
                wrong.append(f"thread {thread}, use {i}: {error!r}")

    threads = [threading.Thread(target=work, args=(n,)) for n in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    after = [*use.model.parameters(), *use.model.buffers()]
    changed = [i for i, (t, (name, version, value)) in enumerate(zip(after, before, strict=True))
               if id(t) != name or t._version != version or not torch.equal(t.detach(), value)]  # fmt: skip
    failures = [f"python -m tests.campaign threads --count {count}: {what}" for what in wrong[:20]]
    failures += [f"tensor {i} of the module was changed" for i in changed]
    return {"count": THREADS * count, "threads": THREADS, "each": count, "wrong": len(wrong), "failures": failures}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--count", type=int, default=2000, help="uses by each thread")


def run(args: argparse.Namespace) -> dict[str, Any]:
    return campaign(args.count)


def smoke() -> dict[str, Any]:
    return campaign(40)


def row(result: dict[str, Any]) -> str:
    return f"{result['threads']} threads x {result['each']} uses of one module: {result['wrong']} wrong"
