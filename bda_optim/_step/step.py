"""One inner step as a pure function: the gradients of both levels, then the update."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._support.slots import Template, fill
from .._support.tensors import refuse_changed
from .._support.torch_private import inside_transform, version_of
from .._support.types import InnerState, Item, Record, Settings
from .aggregation import needs_upper
from .gradients import Grads, both_gradients, check_scalar, no_gradient
from .objective import Loss, Objective
from .update import Update


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
    ) -> None:
        """Store the parts."""
        self.objective = objective
        self.lower = lower
        self.upper = upper
        self.update = update
        self.hyper = hyper
        self.names = tuple(names)
        self.param_names = tuple(param_names)
        self.constant_gradients = False
        self.transformed = inside_transform()

    def first_order(self) -> BDAStep:
        """Return the same step with the gradients of both losses treated as constants (first-order MAML)."""
        step = copy.copy(self)
        step.constant_gradients = True
        return step

    def __call__(self, state: InnerState, hyper: Sequence[Tensor], item: Item) -> tuple[InnerState, Record]:
        """Take step ``item.k``."""
        return self.apply(state, hyper, item, self.update.settings(hyper, item.k))

    def apply(
        self, state: InnerState, hyper: Sequence[Tensor], item: Item, settings: Sequence[Settings]
    ) -> tuple[InnerState, Record]:
        """Take a step with given settings."""
        graph = torch.is_grad_enabled() and not self.constant_gradients
        points = self.update.points(state, settings)
        if self.transformed:
            f, big_f, buffers, grads = self._by_transforms(points, state.buffers, hyper, item, settings)
            new = self.update(InnerState(state.params, state.rule, buffers), *grads, settings, self.hyper.fill(hyper))
            return new, Record(f, big_f)
        with torch.enable_grad():  # the caller may be in a validation loop under no_grad
            points = [p if graph and p.requires_grad else p.detach().requires_grad_() for p in points]
            f, big_f, buffers = self.losses(points, state.buffers, hyper, item, settings)
            grads = both_gradients(f, big_f, points, item.k, create_graph=graph, tasks=self.update.tasks)
        state = InnerState(state.params, state.rule, buffers)
        new = self.update(state, *grads, settings, self.hyper.fill(hyper))
        return new, Record(f.detach(), None if big_f is None else big_f.detach())

    def _by_transforms(
        self,
        points: Sequence[Tensor],
        buffers: tuple[Tensor, ...],
        hyper: Sequence[Tensor],
        item: Item,
        settings: Sequence[Settings],
    ) -> tuple[Tensor, Tensor | None, tuple[Tensor, ...], tuple[Grads, Grads]]:
        """Return both losses, the buffers and both gradients, taken by `torch.func.grad`, so that transforms nest.

        A parameter that a loss does not use has the gradient 0 here, not None: its rule moves it all the same.
        """
        batch = fill(item.batch, hyper)

        def total(points: Sequence[Tensor], loss: Any, level: str) -> tuple[Tensor, Any]:
            value, kept = self.objective(loss, points, buffers, hyper, batch)
            check_scalar(value, level, item.k, self.update.tasks)
            return value.sum(), (value.detach(), kept)

        differentiate = torch.func.grad(total, has_aux=True)
        lower, (f, kept) = differentiate(tuple(points), self.lower, "lower")
        if not needs_upper(settings, self.upper, item.k):
            return f, None, kept, (lower, no_gradient(points))
        upper, (big_f, _) = differentiate(tuple(points), self.upper, "upper")
        return f, big_f, kept, (lower, upper)

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
        f, kept = self.objective(self.lower, points, buffers, hyper, batch)
        big_f = None
        if needs_upper(settings, self.upper, item.k):
            assert self.upper is not None
            big_f, _ = self.objective(self.upper, points, buffers, hyper, batch)
        if versions:
            refuse_changed(self.param_names, points, versions)
        return f, big_f, kept


def _is_first(k: int | Tensor) -> bool:
    """Whether a step is the first of a rollout; in a trace k is a tensor."""
    return not isinstance(k, Tensor) and k == 1
