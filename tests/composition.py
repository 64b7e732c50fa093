"""What composes with what: each adjoint with each option gives the right hypergradient, or refuses with a sentence.

``python -m tests.composition`` prints the table of the documentation.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import bda_optim as bda

K = 6
LAST = 2
RATE = 0.3
START = torch.tensor([0.4, -0.3], dtype=torch.float64)
X = torch.tensor([0.7, 0.2], dtype=torch.float64)
BATCHES = torch.tensor([1.0, 0.8], dtype=torch.float64)  # one number per task


def lower(y: Tensor, x: Tensor, batch: Any) -> Tensor:
    scale = 1.0 if batch is None else batch
    return scale * (0.5 * (y - x).square().sum() + 0.1 * x[0] * y.prod() + 0.02 * y.sum() ** 4)


def upper(y: Tensor, x: Tensor, batch: Any) -> Tensor:
    return (y - 1).square().sum() + 0.1 * x.square().sum()


class Kind(NamedTuple):
    """An adjoint, and the loop by hand that has the same derivative."""

    adjoint: Any
    steps: int = K
    cut: int = 0
    first_order: bool = False
    tolerance: float = 1e-11


KINDS = {
    "Unroll()": Kind(bda.Unroll()),
    "Checkpointed()": Kind(bda.Checkpointed()),
    "Checkpointed(slots=2)": Kind(bda.Checkpointed(slots=2)),
    "ForwardMode()": Kind(bda.ForwardMode()),
    "Truncated(last=T)": Kind(bda.Truncated(last=LAST), cut=K - LAST),
    "Truncated(last=T, within=Checkpointed())": Kind(bda.Truncated(last=LAST, within=bda.Checkpointed()), cut=K - LAST),
    "FirstOrder()": Kind(bda.FirstOrder(), first_order=True),
    "Differences()": Kind(bda.Differences(), tolerance=1e-8),
    "Differences(last=T)": Kind(bda.Differences(last=LAST), cut=K - LAST, tolerance=1e-8),
    "Guarded(limit=c)": Kind(bda.Guarded(limit=1e6)),
    "Guarded(within=Checkpointed(), limit=c)": Kind(bda.Guarded(within=bda.Checkpointed(), limit=1e6)),
    "Implicit()": Kind(bda.Implicit(tol=1e-12), steps=150, tolerance=1e-7),
}
"""The adjoints of the table."""


class Option(NamedTuple):
    """An option of a rollout: its arguments, and what the loop by hand does differently."""

    arguments: dict[str, Any]
    tasks: int | None = None
    second: bool = False


def parts(batch: Any) -> list[tuple[float, Any]]:
    """Two parts of different weights, whose mean is the batch: the lower loss is linear in it."""
    return [(1.0, 1.5 * batch), (2.0, 0.75 * batch)]


OPTIONS = {
    "compile": Option({"compile": True}),
    "tasks": Option({"tasks": 2}, tasks=2),
    "chunk_size": Option({"tasks": 2, "chunk_size": 1}, tasks=2),
    "alpha > 0": Option({"alpha": 0.2, "upper_lr": 0.1}),
    "prox": Option({"prox": bda.prox.l1(0.05)}),
    "momentum": Option({"momentum": 0.5}),
    "FISTA": Option({"rule": bda.FISTA}),
    "accumulate": Option({"accumulate": parts}),
    "batches from an iterator": Option({"batches": "iterator"}),
    'on_divergence="stop"': Option({"on_divergence": "stop"}),
    "create_graph": Option({}, second=True),
    "torch.func.grad": Option({"transform": True}),
}
"""The options of the table."""

DIFFERENCES = ("Differences()", "Differences(last=T)")

REFUSED = {
    ("Guarded(limit=c)", "compile"): "the adjoints of compiled steps cannot be guarded",
    ("Guarded(within=Checkpointed(), limit=c)", "compile"): "the adjoints of compiled steps cannot be guarded",
    ("Checkpointed()", "batches from an iterator"): "reads its batches twice",
    ("Checkpointed(slots=2)", "batches from an iterator"): "reads its batches twice",
    ("Truncated(last=T, within=Checkpointed())", "batches from an iterator"): "reads its batches twice",
    ("Guarded(within=Checkpointed(), limit=c)", "batches from an iterator"): "reads its batches twice",
    ("Implicit()", "batches from an iterator"): "batch",
    ("Implicit()", "accumulate"): "from one graph of a whole batch",
    **{(name, "compile"): "compiled steps have exact products only" for name in DIFFERENCES},
    **{(name, "batches from an iterator"): "reads its batches twice" for name in DIFFERENCES},
    **{(name, "create_graph"): "cannot be differentiated again" for name in DIFFERENCES},
    ("ForwardMode()", "create_graph"): "no second derivative of the hypergradient",
    ("Implicit()", "create_graph"): "create_graph",
    **{(name, "torch.func.grad"): "inside a transform of torch.func" for name in KINDS if name != "Unroll()"},
}
"""The cells that refuse, and a part of the sentence."""


def hypergradient(kind: Kind, option: Option) -> Tensor:
    """Return dF/dx, or its derivative along x, by the library."""
    arguments = dict(option.arguments)
    transform = arguments.pop("transform", False)
    batches = [BATCHES] * kind.steps if option.tasks else [BATCHES[0]] * kind.steps
    arguments["batches"] = itertools.cycle([BATCHES[0]]) if arguments.get("batches") == "iterator" else batches

    def value(x: Tensor) -> Tensor:
        y = bda.rollout(lower, upper, START, x, steps=kind.steps, lr=RATE, adjoint=kind.adjoint, **arguments)
        values = [upper(row, x, None) for row in y] if option.tasks else [upper(y, x, None)]
        return torch.stack(values).sum()

    if transform:
        return torch.func.grad(value)(X)
    x = X.clone().requires_grad_()
    (grad,) = torch.autograd.grad(value(x), x, create_graph=option.second)
    return torch.autograd.grad(grad.sum(), x)[0] if option.second else grad


def by_hand(kind: Kind, option: Option) -> Tensor:
    """Return the same by a loop that is written out."""
    x = X.clone().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for task in range(option.tasks or 1):
        total = total + upper(_loop(x, BATCHES[task], kind, option.arguments), x, None)
    (grad,) = torch.autograd.grad(total, x, create_graph=option.second)
    return torch.autograd.grad(grad.sum(), x)[0] if option.second else grad


def _loop(x: Tensor, batch: Tensor, kind: Kind, options: dict[str, Any]) -> Tensor:
    alpha = options.get("alpha", 0.0)
    y = START
    before = y
    velocity = torch.zeros_like(y)
    t = 1.0
    for k in range(kind.steps):
        point = y
        if options.get("rule") is bda.FISTA:
            following = (1 + (1 + 4 * t * t) ** 0.5) / 2
            point = y + (t - 1) / following * (y - before) if k else y
            t = following if k else t
        leaf = point if point.requires_grad else point.detach().requires_grad_()
        constant = {"create_graph": not kind.first_order}
        (g,) = torch.autograd.grad(lower(leaf, x, batch), leaf, **constant)
        move = RATE * g
        if "momentum" in options:
            velocity = 0.5 * velocity + g
            move = RATE * velocity
        if "prox" in options:
            z = y - move
            move = y - torch.sign(z) * (z.abs() - RATE * 0.05).clamp(min=0)
        if options.get("rule") is bda.FISTA:
            move = y - (point - RATE * g)
        direction = (1 - alpha) * move
        if alpha:
            (big,) = torch.autograd.grad(upper(leaf, x, None), leaf, **constant)
            direction = direction + alpha * 0.1 * big
        before, y = y, y - direction
        if k + 1 == kind.cut:
            y = y.detach()
            before = before.detach()
            velocity = velocity.detach()
    return y


def table(check: Callable[[str, str], str]) -> str:
    """Return the table in Markdown; `check` gives the entry of a cell."""
    lines = ["| adjoint | " + " | ".join(f"`{name}`" for name in OPTIONS) + " |", "|---" * (len(OPTIONS) + 1) + "|"]
    for kind in KINDS:
        lines.append(f"| `{kind}` | " + " | ".join(check(kind, option) for option in OPTIONS) + " |")
    return "\n".join(lines)


def entry(kind: str, option: str) -> str:
    """Return what the documentation says about a cell."""
    return "refused" if (kind, option) in REFUSED else "yes"


if __name__ == "__main__":
    print(table(entry))
