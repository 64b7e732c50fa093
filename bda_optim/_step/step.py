"""One inner step as a pure function: the gradients of both levels, then the update."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from .._support.slots import Template, fill
from .._support.tensors import refuse_changed
from .._support.torch_private import inside_transform, version_of
from .._support.types import InnerState, Item, Record, Settings
from .aggregation import needs_upper
from .gradients import Grads, add, both_gradients, check_scalar, gradient, no_gradient
from .objective import Buffers, Loss, Objective
from .sweep import Opening, Sweep, Weights, moved
from .update import Update

Split: TypeAlias = Callable[[Any], Sequence[tuple[float, Any]]]
"""Divides a batch into parts, with weights that sum to 1."""


class Evaluation(NamedTuple):
    """Both levels at one point.

    Attributes:
        record: Both losses, detached.
        buffers: The buffers after the lower forward.
        grads: The gradients of both losses.
        marks: What `mark` returned before the lower loss, before the upper loss and after both.
    """

    record: Record
    buffers: Buffers
    grads: tuple[Grads, Grads]
    marks: tuple[Any, ...] = ()


def _no_mark() -> None:
    """Mark nothing."""


class BDAStep:
    """``step(state, hyper, item) -> (state, record)``; it builds a graph if, and only if, grad mode is on.

    Args:
        objective: Evaluates a loss at flat parameters.
        lower: The lower loss f.
        upper: The upper loss F; evaluated only in steps where some `alpha` is not 0.
        update: Rule, prox and aggregation.
        hyper: The user's tree of upper variables, as a prox receives it.
        names: What messages call the tensors of `hyper`.
        param_names: What messages call the lower variables.
        split: Divides a batch into parts, if both losses are means over parts.
    """

    def __init__(
        self,
        objective: Objective,
        lower: Loss,
        upper: Loss | None,
        update: Update,
        hyper: Template,
        *,
        names: Sequence[str] = (),
        param_names: Sequence[str] = (),
        split: Split | None = None,
    ) -> None:
        """Store the parts."""
        self.objective = objective
        self.lower = lower
        self.upper = upper
        self.update = update
        self.hyper = hyper
        self.names = tuple(names)
        self.param_names = tuple(param_names)
        self.split = split
        self.constant_gradients = False
        self.transformed = inside_transform()
        self._sweep = Sweep(update.rule)

    def first_order(self) -> BDAStep:
        """Return the same step with the gradients of both losses treated as constants (first-order MAML)."""
        step = copy.copy(self)
        step.constant_gradients = True
        return step

    def __call__(self, state: InnerState, hyper: Sequence[Tensor], item: Item) -> tuple[InnerState, Record]:
        """Take step ``item.k``: plain gradient descent in one backward pass, anything else by both gradients."""
        settings = self.update.settings(hyper, item.k)
        if not self.transformed and self.split is None:
            weights = self._sweep.weights(settings, constant=self.constant_gradients)
            if weights is not None:
                return self._descend(state, hyper, item, settings, weights)
        return self.apply(state, hyper, item, settings)

    def _differentiates(self) -> bool:
        """Whether the gradients of the losses are differentiated again."""
        return torch.is_grad_enabled() and not self.constant_gradients

    def _descend(
        self, state: InnerState, hyper: Sequence[Tensor], item: Item, settings: Sequence[Settings], weights: Weights
    ) -> tuple[InnerState, Record]:
        """Take a step of plain gradient descent."""
        graph = self._differentiates()
        since = Opening.now()
        with torch.enable_grad():  # the caller may be in a validation loop under no_grad
            points = _leaves(state.params, graph)
            f, big_f, buffers = self.losses(points, state.buffers, hyper, item, settings)
            moves = self._sweep.moves(f, big_f, points, weights, item.k, since, create_graph=graph)
            if moves is None:
                both = both_gradients(f, big_f, points, item.k, create_graph=graph, tasks=self.update.tasks)
        if moves is None:
            new = self.update(state._replace(buffers=buffers), *both, settings, self.hyper.fill(hyper))
        else:
            new = InnerState(moved(state.params, moves, weights), state.rule, buffers)
        return new, Record(f.detach(), None if big_f is None else big_f.detach())

    def apply(
        self, state: InnerState, hyper: Sequence[Tensor], item: Item, settings: Sequence[Settings]
    ) -> tuple[InnerState, Record]:
        """Take a step with given settings."""
        new, evaluation = self.take(state, hyper, item, settings)
        return new, evaluation.record

    def take(
        self,
        state: InnerState,
        hyper: Sequence[Tensor],
        item: Item,
        settings: Sequence[Settings],
        mark: Callable[[], Any] = _no_mark,
    ) -> tuple[InnerState, Evaluation]:
        """Take a step with given settings; return also what was evaluated."""
        graph = self._differentiates()
        points = self.update.points(state, settings)
        if self.transformed:
            found = self._by_transforms(points, state.buffers, hyper, item, settings)
        else:
            with torch.enable_grad():  # the caller may be in a validation loop under no_grad
                points = _leaves(points, graph)
                if self.split is None or graph:
                    f, big_f, buffers = self.losses(points, state.buffers, hyper, item, settings)
                    grads = both_gradients(f, big_f, points, item.k, create_graph=graph, tasks=self.update.tasks)
                    record = Record(f.detach(), None if big_f is None else big_f.detach())
                    found = Evaluation(record, buffers, grads)
                else:
                    found = self._part_by_part(points, state.buffers, hyper, item, settings, mark)
        state = InnerState(state.params, state.rule, found.buffers)
        return self.update(state, *found.grads, settings, self.hyper.fill(hyper)), found

    def _part_by_part(
        self,
        points: Sequence[Tensor],
        buffers: Buffers,
        hyper: Sequence[Tensor],
        item: Item,
        settings: Sequence[Settings],
        mark: Callable[[], Any],
    ) -> Evaluation:
        """Evaluate both levels; the graph of each part of the batch is freed before the next part."""
        versions = [version_of(p) for p in points] if _is_first(item.k) else []
        before = mark()
        f, kept, lower = self._accumulated("lower", points, buffers, hyper, item)
        between = mark()
        big_f = None
        upper = no_gradient(points)
        if needs_upper(settings, self.upper, item.k):
            big_f, _, upper = self._accumulated("upper", points, buffers, hyper, item)
        if versions:
            refuse_changed(self.param_names, points, versions)
        return Evaluation(Record(f, big_f), kept, (lower, upper), (before, between, mark()))

    def _accumulated(
        self, level: str, points: Sequence[Tensor], buffers: Buffers, hyper: Sequence[Tensor], item: Item
    ) -> tuple[Tensor, Buffers, Grads]:
        """Return one loss, the buffers after it and its gradient, summed part by part."""

        def one(part: Any, buffers: Buffers) -> tuple[Tensor, Buffers, Grads]:  # its frame holds the graph
            value, kept = self.loss(level, points, buffers, hyper, part, item.k)
            return value.detach(), kept, gradient(value, points, level, item.k, tasks=self.update.tasks)

        assert self.split is not None
        values = []
        total = no_gradient(points)
        for weight, part in self.split(fill(item.batch, hyper)):
            value, buffers, grads = one(part, buffers)
            values.append(weight * value)
            total = add(total, [None if g is None else weight * g for g in grads])
        return sum(values[1:], start=values[0]), buffers, total

    def _by_transforms(
        self,
        points: Sequence[Tensor],
        buffers: tuple[Tensor, ...],
        hyper: Sequence[Tensor],
        item: Item,
        settings: Sequence[Settings],
    ) -> Evaluation:
        """Evaluate both levels, with gradients taken by `torch.func.grad`, so that transforms nest.

        A parameter that a loss does not use has the gradient 0 here, not None: its rule moves it all the same.
        """
        batch = fill(item.batch, hyper)

        def total(points: Sequence[Tensor], level: str) -> tuple[Tensor, Any]:
            value, kept = self._mean(level, points, buffers, hyper, batch, item.k)
            return value.sum(), (value.detach(), kept)

        differentiate = torch.func.grad(total, has_aux=True)
        lower, (f, kept) = differentiate(tuple(points), "lower")
        if not needs_upper(settings, self.upper, item.k):
            return Evaluation(Record(f, None), kept, (lower, no_gradient(points)))
        upper, (big_f, _) = differentiate(tuple(points), "upper")
        return Evaluation(Record(f, big_f), kept, (lower, upper))

    def losses(
        self,
        points: Sequence[Tensor],
        buffers: tuple[Tensor, ...],
        hyper: Sequence[Tensor],
        item: Item,
        settings: Sequence[Settings],
    ) -> tuple[Tensor, Tensor | None, tuple[Tensor, ...]]:
        """Return both losses (the upper one None where every alpha is 0), and the buffers after the lower forward."""
        batch = fill(item.batch, hyper)
        versions = [version_of(p) for p in points] if _is_first(item.k) else []
        f, kept = self._mean("lower", points, buffers, hyper, batch, item.k)
        big_f = None
        if needs_upper(settings, self.upper, item.k):
            big_f, _ = self._mean("upper", points, buffers, hyper, batch, item.k)
        if versions:
            refuse_changed(self.param_names, points, versions)
        return f, big_f, kept

    def loss(
        self, level: str, points: Sequence[Tensor], buffers: Buffers, hyper: Sequence[Tensor], batch: Any, k: Any
    ) -> tuple[Tensor, Buffers]:
        """Return one loss on a batch, or on a part of one, and the buffers after it."""
        loss = self.lower if level == "lower" else self.upper
        assert loss is not None
        value, kept = self.objective(loss, points, buffers, hyper, batch)
        check_scalar(value, level, k, self.update.tasks)
        return value, kept

    def _mean(
        self, level: str, points: Sequence[Tensor], buffers: Buffers, hyper: Sequence[Tensor], batch: Any, k: Any
    ) -> tuple[Tensor, Buffers]:
        """Return the mean of one loss over the parts of a batch, and the buffers after the last part."""
        if self.split is None:
            return self.loss(level, points, buffers, hyper, batch, k)
        values = []
        for weight, part in self.split(batch):
            value, buffers = self.loss(level, points, buffers, hyper, part, k)
            values.append(weight * value)
        return sum(values[1:], start=values[0]), buffers


def _leaves(points: Sequence[Tensor], graph: bool) -> list[Tensor]:
    """Return tensors with respect to which gradients are taken: the points themselves, if they are in a graph."""
    return [p if graph and p.requires_grad else p.detach().requires_grad_() for p in points]


def _is_first(k: int | Tensor) -> bool:
    """Whether a step is the first of a rollout; in a trace k is a tensor."""
    return not isinstance(k, Tensor) and k == 1
