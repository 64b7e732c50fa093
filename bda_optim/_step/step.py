"""One inner step as a pure function: gradients of both levels, the rule, the prox, the aggregation."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._support.autograd_graph import refuse_once_differentiable
from .._support.slots import Template, fill
from .._support.types import InnerState, Item, Record, Rule, Scalar, Settings
from .._support.vmap import one_by_one, over_tasks
from .aggregation import aggregate, is_zero, weight
from .objective import Loss, Objective

Grads = Sequence[Tensor | None]


class Group(NamedTuple):
    """A parameter group: which of the flat parameters it has, and its settings (`lr`, `alpha`, `prox`, ...)."""

    members: tuple[int, ...]
    settings: Template


class Update:
    """What becomes of the state, given the gradients of both levels."""

    def __init__(self, rule: Rule, groups: Sequence[Group], *, tasks: int | None = None) -> None:
        """Remember the rule and the groups, and whether every tensor has a task dimension in front."""
        self.rule, self.groups, self.tasks = rule, tuple(groups), tasks

    def settings(self, hyper: Sequence[Tensor]) -> list[Settings]:
        """Return the settings of each group, with the tensors of `hyper` in their places."""
        return [group.settings.fill(hyper) for group in self.groups]

    def points(self, state: InnerState, settings: Sequence[Settings]) -> list[Tensor]:
        """Return where the gradients are taken: the parameters, unless the rule extrapolates."""
        points = list(state.params)
        for group, memory, chosen in zip(self.groups, state.rule, settings, strict=True):
            moved = self.rule.point([state.params[i] for i in group.members], memory, chosen)
            for i, point in zip(group.members, moved, strict=True):
                points[i] = point
        return points

    def __call__(
        self,
        state: InnerState,
        lower: Grads,
        upper: Grads,
        settings: Sequence[Settings],
        weights: Sequence[Any],
        hyper: Any,
    ) -> InnerState:
        """Return the next state; `weights` are the groups' alpha_k, and buffers stay."""
        params, memories = list(state.params), []
        for group, memory, chosen, alpha in zip(self.groups, state.rule, settings, weights, strict=True):
            old = [state.params[i] for i in group.members]
            moves, new_memory = self._moves([lower[i] for i in group.members], memory, old, chosen)
            memories.append(new_memory)
            for place, (i, y, move) in enumerate(zip(group.members, old, moves, strict=True)):
                new = aggregate(
                    y,
                    move,
                    upper[i],
                    alpha=_nth(alpha, place),
                    upper_lr=_nth(chosen["lr"] if chosen["upper_lr"] is None else chosen["upper_lr"], place),
                    prox=self._bind(chosen["prox"], _nth(chosen["lr"], place), hyper),
                )
                params[i] = new if new.dtype == y.dtype else new.to(y.dtype)
        return InnerState(tuple(params), tuple(memories), state.buffers)

    def lower_point(
        self, params: Sequence[Tensor], grads: Grads, settings: Sequence[Settings], hyper: Any
    ) -> list[Tensor]:
        """Return one plain proximal step of the lower level: the paper's ``y~ = prox(y - lr grad f)``."""
        found = list(params)
        for group, chosen in zip(self.groups, settings, strict=True):
            for place, i in enumerate(group.members):
                lr, grad = _nth(chosen["lr"], place), grads[i]
                if lr is None:
                    raise ValueError(
                        f"the lower point needs a rate, and a {self.rule.name} does not tell its own. "
                        "Use `bda_optim.lower_point(..., lr=...)`."
                    )
                prox = self._bind(chosen["prox"], lr, hyper) or (lambda y: y)
                found[i] = prox(params[i] if grad is None else params[i] - lr * grad)
        return found

    def _moves(self, grads: Grads, memory: Any, params: Sequence[Tensor], settings: Settings) -> Any:
        if self.tasks is None or self.rule.elementwise:
            return self.rule.update(grads, memory, params, settings)

        def one(grads: Grads, memory: Any, params: Sequence[Tensor]) -> Any:
            return self.rule.update(grads, memory, params, settings)

        try:
            with warnings.catch_warnings():  # torch tells of the operations that it batches slowly
                warnings.filterwarnings("ignore", message=".*not yet implemented the batching rule")
                return over_tasks(one, list(grads), memory, list(params))
        except RuntimeError:  # `vmap` cannot batch what reads a number, as torchopt's clip_grad_norm does
            return one_by_one(one, self.tasks, list(grads), memory, list(params))

    def _bind(self, prox: Any, step: Scalar, hyper: Any) -> Callable[[Tensor], Tensor] | None:
        if prox is None:
            return None
        if self.tasks is None or getattr(prox, "separable", False):
            return lambda y: prox(y, step, hyper)
        return lambda y: over_tasks(lambda one: prox(one, step, hyper), y)


class BDAStep:
    """``step(state, hyper, item) -> (state, record)``; builds a graph if grad mode is on."""

    def __init__(
        self,
        objective: Objective,
        lower: Loss,
        upper: Loss | None,
        update: Update,
        hyper: Template,
        *,
        names: Sequence[str] = (),
        constant_gradients: bool = False,
    ) -> None:
        """Put the parts together.

        Args:
            objective: Evaluates a loss at flat parameters.
            lower: The lower loss f.
            upper: The upper loss F; evaluated only in steps where some `alpha` is not plainly 0.
            update: Rule, prox and aggregation.
            hyper: The user's tree of upper variables, as the prox is shown it.
            names: What messages call the tensors of `hyper`.
            constant_gradients: Whether both gradients count as constants (first-order MAML).
        """
        self.objective, self.lower, self.upper, self.update, self.hyper = objective, lower, upper, update, hyper
        self.names, self.constant_gradients = tuple(names), constant_gradients

    def first_order(self) -> BDAStep:
        """Return the same step with the gradients of both losses taken as constants."""
        step = copy.copy(self)
        step.constant_gradients = True
        return step

    def __call__(self, state: InnerState, hyper: Sequence[Tensor], item: Item) -> tuple[InnerState, Record]:
        """Take step ``item.k``."""
        settings = self.update.settings(hyper)
        weights = [weight(chosen["alpha"], item.k) for chosen in settings]
        return self.apply(state, hyper, item, settings, weights)

    def apply(
        self,
        state: InnerState,
        hyper: Sequence[Tensor],
        item: Item,
        settings: Sequence[Settings],
        weights: Sequence[Any],
    ) -> tuple[InnerState, Record]:
        """Take a step whose settings and weights are given."""
        graph, tasks = torch.is_grad_enabled() and not self.constant_gradients, self.update.tasks
        points = self.update.points(state, settings)
        with torch.enable_grad():  # the caller may be in a validation loop under no_grad
            points = [p if graph and p.requires_grad else p.detach().requires_grad_() for p in points]
            f, big_f, buffers = self.losses(points, state.buffers, hyper, item, weights)
            lower = gradients(f, points, "lower", item.k, create_graph=graph, tasks=tasks)
            upper = no_gradients(points)
            if big_f is not None:
                upper = gradients(big_f, points, "upper", item.k, create_graph=graph, tasks=tasks)
        state = InnerState(state.params, state.rule, buffers)
        new = self.update(state, lower, upper, settings, weights, self.hyper.fill(hyper))
        return new, Record(f.detach(), None if big_f is None else big_f.detach())

    def losses(
        self,
        points: Sequence[Tensor],
        buffers: tuple[Tensor, ...],
        hyper: Sequence[Tensor],
        item: Item,
        weights: Sequence[Any],
    ) -> tuple[Tensor, Tensor | None, tuple[Tensor, ...]]:
        """Return both losses (the upper one None where all weights are plainly 0), and the lower forward's buffers."""
        batch = fill(item.batch, hyper)
        f, kept = self.objective(self.lower, points, buffers, hyper, batch)
        if all(map(is_zero, weights)):
            return f, None, kept
        if self.upper is None:
            raise ValueError(
                f"`alpha` is not 0 at step k={item.k}, so the upper loss is needed in the inner loop; got upper=None. "
                "Pass it, or set alpha=0.0."
            )
        return f, self.objective(self.upper, points, buffers, hyper, batch)[0], kept


def gradients(
    loss: Any,
    points: Sequence[Tensor],
    level: str,
    k: Any,
    *,
    create_graph: bool,
    retain_graph: bool | None = None,
    tasks: int | None = None,
) -> Grads:
    """Return the gradient of a loss (of the sum of the tasks' losses) with respect to `points`.

    None stands where the loss does not depend on a point.

    Raises:
        TypeError: If the loss is no tensor.
        ValueError: If it is not a scalar, or the lower loss depends on no parameter at all.
    """
    if not isinstance(loss, Tensor):
        raise TypeError(
            f"the {level} loss must be a scalar tensor; got {type(loss).__name__} at step k={k}. "
            "Return the loss itself, not `.item()`."
        )
    if loss.numel() != (tasks or 1):
        shape = tuple(loss.shape[1:] if tasks else loss.shape)
        raise ValueError(
            f"the {level} loss must be a scalar; got shape {shape} at step k={k}. Reduce it, for example by `.mean()`."
        )
    found = no_gradients(points)
    if loss.requires_grad:
        total = loss if loss.numel() == 1 else loss.sum()
        found = torch.autograd.grad(
            total, points, create_graph=create_graph, retain_graph=retain_graph, allow_unused=True
        )
        if any(g is not None and g.layout is not torch.strided for g in found):
            raise NotImplementedError(
                f"torch differentiates a sparse gradient wrongly; got one of the {level} loss at step k={k}. Use "
                "`F.embedding(..., sparse=False)`; of an nn.Embedding in the module the setting does not matter."
            )
        if create_graph and any(g is not None and not g.requires_grad for g in found):
            refuse_once_differentiable([loss])  # a gradient without a graph: or else the loss is linear
    if level == "lower" and all(g is None for g in found):
        raise ValueError(
            f"the lower loss does not depend on any parameter that the optimizer adapts; got a loss at step k={k} "
            "whose graph reaches none of them. Compute it with the `net` (or `params`) that the function receives, "
            "not with the original module, and without `.detach()` or `no_grad()`."
        )
    return found


def no_gradients(points: Sequence[Tensor]) -> Grads:
    """Return the gradients of a loss that depends on nothing."""
    return [None] * len(points)


def _nth(setting: Any, place: int) -> Scalar:
    """Return a setting of the parameter at `place`: a list has one tensor per parameter."""
    chosen: Scalar = setting[place] if isinstance(setting, list) else setting
    return chosen
