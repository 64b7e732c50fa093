"""A step that is recorded and pulled back part by part of its batch, and in two stages."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .._context.environment import Ambient
from .._step.gradients import Grads, add, gradient
from .._step.objective import Buffers
from .._step.step import BDAStep, Evaluation
from .._support.slots import fill
from .._support.tensors import any_requires_grad
from .._support.tree import tensors
from .._support.types import InnerState, Item
from .base import Cotangents, Step, pull_back, refuse_captured
from .stages import pull_in_stages


class LossAt(NamedTuple):
    """One loss of a step, at the points where its gradient was taken.

    Attributes:
        step: The step.
        level: "lower" or "upper".
        points: Where the gradient was taken: leaves that require grad.
        buffers: The buffers before the loss.
        hyper: The tensors of the slots, as leaves.
        item: The number of the step, and its batch.
        value: The loss that was found there, detached.
        rewind: Sets the random state from which the loss was evaluated.
    """

    step: BDAStep
    level: str
    points: Sequence[Tensor]
    buffers: Buffers
    hyper: Sequence[Tensor]
    item: Item
    value: Tensor | None
    rewind: Callable[[], None]

    def parts(self) -> Sequence[tuple[float, Any]]:
        """Return the parts of the batch, with weights that sum to 1."""
        assert self.step.split is not None
        return self.step.split(fill(self.item.batch, self.hyper))

    def on(self, part: Any, buffers: Buffers) -> tuple[Tensor, Buffers]:
        """Return the loss on a part of the batch, and the buffers after it."""
        value, kept = self.step.loss(self.level, self.points, buffers, self.hyper, part, self.item.k)
        refuse_captured([value], [*self.points, *self.hyper])
        return value, kept


def shares_graph(part: Any) -> bool:
    """Whether a part was computed from upper variables, so that other parts may need the same graph."""
    return any(t.grad_fn is not None for t in tensors(part))


class Products(Protocol):
    """How the second-order products of a step are taken.

    Attributes:
        twice: Whether the losses are differentiated twice.
    """

    twice: bool

    def inspect(self, step: BDAStep, state: InnerState, hyper: Sequence[Tensor], item: Item) -> None:
        """Look at the first step of a rollout, and raise where a gradient would be lost or wrong."""

    def __call__(self, loss: LossAt, directions: Grads) -> tuple[Grads, Grads]:
        """Return the second derivatives of a loss along directions of the points: by points, and by hyper."""


class Exact:
    """Second-order products by double backward, one part of the batch after the other."""

    twice = True

    def inspect(self, step: BDAStep, state: InnerState, hyper: Sequence[Tensor], item: Item) -> None:
        """Record the step on the first part alone: it raises where a gradient would be lost, or has no derivative."""
        whole: BDAStep = copy.copy(step)
        assert whole.split is not None
        with torch.enable_grad():
            (_, first), *_ = whole.split(fill(item.batch, hyper))
        whole.split = None
        Step(whole).tape(state, hyper, item._replace(batch=first))

    def __call__(self, loss: LossAt, directions: Grads) -> tuple[Grads, Grads]:
        """Return the second derivatives of a loss along directions of the points: by points, and by hyper."""
        inputs = [*loss.points, *loss.hyper]

        def one(part: Any, buffers: Buffers, seeds: Grads) -> tuple[Cotangents, Buffers]:  # its frame holds the graph
            value, kept = loss.on(part, buffers)
            tasks = loss.step.update.tasks
            grads = gradient(value, loss.points, loss.level, loss.item.k, create_graph=True, tasks=tasks)
            pairs = [(g, seed) for g, seed in zip(grads, seeds, strict=True) if g is not None and seed is not None]
            return pull_back(
                [g for g, _ in pairs], inputs, [s for _, s in pairs], retain_graph=shares_graph(part)
            ), kept

        total: Cotangents = [None] * len(inputs)
        buffers = loss.buffers
        loss.rewind()
        with torch.enable_grad():
            for weight, part in loss.parts():
                found, buffers = one(part, buffers, [None if v is None else weight * v for v in directions])
                total = add(total, found)
        return total[: len(loss.points)], total[len(loss.points) :]


class PartwiseStep(Step):
    """A step that `record` and `pull` evaluate part by part: they hold the graph of one part at a time.

    What autograd records (`Unroll`, `ForwardMode`) holds the graphs of all parts.

    Args:
        function: The step; without a `split` its batch is one part.
        products: The second-order products.
    """

    keeps = True

    def __init__(self, function: BDAStep, products: Products | None = None) -> None:
        """Store the step."""
        if function.split is None:
            function = copy.copy(function)
            function.split = _whole
        super().__init__(function)
        self._products = products or Exact()
        self.taped = self._products.twice
        self.twice = self.taped or function.update.tasks is not None  # `vmap` batches no fused attention
        self._ambient: Ambient | None = None

    @property
    def repeats(self) -> bool:
        """Whether `pull` evaluates the losses again."""
        return True

    def __call__(self, state: InnerState, hyper: Sequence[Tensor], item: Item) -> tuple[Any, Any]:
        """Take the step.

        Raises:
            RuntimeError: If autograd would record it, and could not.
        """
        if not self.taped and torch.is_grad_enabled():
            if any_requires_grad((state, hyper)):
                raise RuntimeError(
                    "products by differences cannot be differentiated again, and autograd cannot record them; got "
                    "`create_graph=True`, or an adjoint that records steps. Use `Checkpointed()` or `Unroll()`."
                )
            return self.record(state, hyper, item)[:2]
        return super().__call__(state, hyper, item)

    def record(self, state: InnerState, hyper: Sequence[Tensor], item: Item) -> tuple[Any, Any, Evaluation]:
        """Take the step without a graph; return also both gradients and the random states of both levels."""
        step: BDAStep = self._function
        self._ambient = self._ambient or Ambient(tensors(state))
        if not self._inspected:
            rng = self._ambient.rng()
            self._products.inspect(step, state, hyper, item)
            self._ambient.set_rng(rng)
            self._inspected = True
        with torch.no_grad():
            settings = step.update.settings(hyper, item.k)
            after, found = step.take(state, hyper, item, settings, self._ambient.rng)
        return after, found.record, found

    def advance(self, state: InnerState, hyper: Sequence[Tensor], item: Item, saved: Evaluation) -> tuple[Any, Any]:
        """Take a recorded step once more: only the update."""
        step: BDAStep = self._function
        assert self._ambient is not None
        self._ambient.set_rng(saved.marks[-1])
        with torch.no_grad():
            settings = step.update.settings(hyper, item.k)
            state = InnerState(state.params, state.rule, saved.buffers)
            return step.update(state, *saved.grads, settings, step.hyper.fill(hyper)), saved.record

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
            value = getattr(found.record, level)
            loss = LossAt(step, level, points, buffers, given, item, value, lambda: ambient.set_rng(random[level]))
            return self._products(loss, along)

        def resolve(given: Sequence[Tensor]) -> Sequence[Any]:
            return step.update.settings(given, item.k)

        return pull_in_stages(step, state, hyper, resolve, gradients, product, cotangents)


def _whole(batch: Any) -> list[tuple[float, Any]]:
    """Return a batch as one part."""
    return [(1.0, batch)]
