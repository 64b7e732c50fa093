"""A step whose losses are means over parts of a batch, recorded and pulled back part by part."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._context.environment import Ambient
from .._step.gradients import Grads, add, gradient
from .._step.objective import Buffers
from .._step.step import BDAStep, Evaluation
from .._support.slots import fill
from .._support.tree import tensors
from .._support.types import InnerState, Item
from .base import Cotangents, Step, pull_back, refuse_captured
from .stages import pull_in_stages


@dataclasses.dataclass(frozen=True)
class Exact:
    """Second-order products by double backward, one part of the batch after the other."""

    def __call__(
        self,
        step: BDAStep,
        level: str,
        points: Sequence[Tensor],
        buffers: Buffers,
        hyper: Sequence[Tensor],
        item: Item,
        directions: Grads,
    ) -> tuple[Grads, Grads]:
        """Return the second derivatives of a loss along directions of the points: by points, and by hyper."""

        def one(part: Any, buffers: Buffers, seeds: Grads) -> tuple[Cotangents, Buffers]:  # its frame holds the graph
            value, kept = step.loss(level, points, buffers, hyper, part, item.k)
            refuse_captured([value], [*points, *hyper])
            grads = gradient(value, points, level, item.k, create_graph=True, tasks=step.update.tasks)
            pairs = [(g, seed) for g, seed in zip(grads, seeds, strict=True) if g is not None and seed is not None]
            # Parts that a function computed from upper variables may share a graph, which later parts need.
            shared = any(t.grad_fn is not None for t in tensors(part))
            outputs = [g for g, _ in pairs]
            return pull_back(outputs, [*points, *hyper], [s for _, s in pairs], retain_graph=shared), kept

        assert step.split is not None
        total: Cotangents = [None] * (len(points) + len(hyper))
        with torch.enable_grad():
            for weight, part in step.split(fill(item.batch, hyper)):
                found, buffers = one(part, buffers, [None if v is None else weight * v for v in directions])
                total = add(total, found)
        return total[: len(points)], total[len(points) :]


class PartwiseStep(Step):
    """A step whose batch is divided into parts: `record` and `pull` hold the graph of one part at a time.

    What autograd records (`Unroll`, `ForwardMode`) holds the graphs of all parts.

    Args:
        function: The step, with a `split`.
        products: The second-order products.
    """

    def __init__(self, function: BDAStep, products: Exact | None = None) -> None:
        """Store the step."""
        super().__init__(function)
        self._products = products or Exact()
        self._ambient: Ambient | None = None

    @property
    def repeats(self) -> bool:
        """Whether `pull` evaluates the losses again."""
        return True

    def record(self, state: InnerState, hyper: Sequence[Tensor], item: Item) -> tuple[Any, Any, Evaluation]:
        """Take the step without a graph; return also both gradients and the random states of both levels."""
        step: BDAStep = self._function
        self._ambient = self._ambient or Ambient(tensors(state))
        if not self._inspected:
            self._inspect(state, hyper, item, self._ambient)
            self._inspected = True
        with torch.no_grad():
            settings = step.update.settings(hyper, item.k)
            after, found = step.take(state, hyper, item, settings, self._ambient.rng)
        return after, found.record, found

    def pull(
        self, state: InnerState, hyper: Sequence[Tensor], item: Item, cotangents: Cotangents, saved: Any = None
    ) -> Cotangents:
        """Pull cotangents back through the update, then through both gradients part by part."""
        step: BDAStep = self._function
        found: Evaluation = self.record(state, hyper, item)[2] if saved is None else saved
        assert self._ambient is not None
        ambient = self._ambient
        random = dict(zip(("lower", "upper", "update"), found.marks, strict=True))

        def gradients(*_: Any) -> tuple[tuple[Grads, Grads], Buffers]:
            ambient.set_rng(random["update"])  # a rule may draw random numbers, too
            return found.grads, found.buffers

        def product(level: str, points: Any, buffers: Buffers, given: Any, along: Grads) -> tuple[Grads, Grads]:
            ambient.set_rng(random[level])
            return self._products(step, level, points, buffers, given, item, along)

        def resolve(given: Sequence[Tensor]) -> Sequence[Any]:
            return step.update.settings(given, item.k)

        return pull_in_stages(step, state, hyper, resolve, gradients, product, cotangents)

    def _inspect(self, state: InnerState, hyper: Sequence[Tensor], item: Item, ambient: Ambient) -> None:
        """Record the step on the first part alone: it raises where a gradient would be lost, or has no derivative."""
        whole: BDAStep = copy.copy(self._function)
        assert whole.split is not None
        rng = ambient.rng()
        with torch.enable_grad():
            (_, first), *_ = whole.split(fill(item.batch, hyper))
        whole.split = None
        Step(whole).tape(state, hyper, item._replace(batch=first))
        ambient.set_rng(rng)
