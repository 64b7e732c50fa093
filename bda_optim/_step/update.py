"""From the gradients of both levels to the next state: the rule, the prox and the aggregation of each group."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from .._support.slots import Template
from .._support.types import InnerState, Move, Rule, Scalar, Settings
from .aggregation import aggregate, at_step
from .clipping import clip
from .gradients import Grads
from .tasks import TaskMapper


class Group(NamedTuple):
    """A parameter group: which of the flat parameters it has, and its settings (`lr`, `alpha`, `prox`, ...)."""

    members: tuple[int, ...]
    settings: Template


class Update:
    """Computes the next state from the gradients of both levels.

    Args:
        rule: The rule of all groups.
        groups: The parameter groups.
        tasks: The number of tasks, if every tensor has a task dimension in front.
    """

    def __init__(self, rule: Rule, groups: Sequence[Group], *, tasks: int | None = None) -> None:
        """Store the parts."""
        self.rule = rule
        self.groups = tuple(groups)
        self.tasks = tasks
        self._fixed: list[Settings] | None = None
        self._map_rule = TaskMapper(tasks, f"the rule {rule.name}") if tasks else None
        self._map_prox = TaskMapper(tasks, "the prox") if tasks else None

    def settings(self, hyper: Sequence[Tensor], k: Any) -> list[Settings]:
        """Return the settings of each group at step k, with the tensors of `hyper` in their places."""
        if self._fixed is not None:
            return self._fixed
        filled = [group.settings.fill(hyper) for group in self.groups]
        settings = [at_step(chosen, k) for chosen in filled]
        constant = all(group.settings.is_constant for group in self.groups)
        if constant and all(now is chosen for now, chosen in zip(settings, filled, strict=True)):
            self._fixed = settings  # nothing in them changes: they are resolved once per rollout
        return settings

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
        hyper: Any,
    ) -> InnerState:
        """Return the next state, with the same buffers."""
        params = list(state.params)
        memories = []
        for group, memory, chosen in zip(self.groups, state.rule, settings, strict=True):
            old = [state.params[i] for i in group.members]
            grads: Grads = [lower[i] for i in group.members]
            if chosen["clip_norm"] is not None or chosen["clip_value"] is not None:
                grads = clip(grads, chosen, self.tasks)
            moves, new_memory = self._moves(grads, memory, old, chosen)
            memories.append(new_memory)
            for place, (i, y, move) in enumerate(zip(group.members, old, moves, strict=True)):
                new = aggregate(
                    y,
                    move,
                    upper[i],
                    alpha=_nth(chosen["alpha"], place),
                    upper_lr=_nth(chosen["lr"] if chosen["upper_lr"] is None else chosen["upper_lr"], place),
                    prox=self._bind(chosen["prox"], _nth(chosen["lr"], place), hyper),
                )
                params[i] = new if new.dtype == y.dtype else new.to(y.dtype)
        return InnerState(tuple(params), tuple(memories), state.buffers)

    def lower_point(
        self, params: Sequence[Tensor], grads: Grads, settings: Sequence[Settings], hyper: Any
    ) -> list[Tensor]:
        """Return one plain proximal step of the lower level: the paper's ``y~ = prox(y - lr grad f)``."""
        points = list(params)
        for group, chosen in zip(self.groups, settings, strict=True):
            for place, i in enumerate(group.members):
                lr = _nth(chosen["lr"], place)
                grad = grads[i]
                if lr is None:
                    raise ValueError(
                        f"the lower point needs a rate, and a {self.rule.name} does not expose its own. "
                        "Use `bda_optim.lower_point(..., lr=...)`."
                    )
                moved = params[i] if grad is None else params[i] - lr * grad
                prox = self._bind(chosen["prox"], lr, hyper)
                points[i] = moved if prox is None else prox(moved)
        return points

    def _moves(self, grads: Grads, memory: Any, params: Sequence[Tensor], settings: Settings) -> Any:
        if self._map_rule is None or self.rule.elementwise:
            return self.rule.update(grads, memory, params, settings)

        def one(grads: Grads, memory: Any, params: Sequence[Tensor]) -> Any:
            moves, new = self.rule.update(grads, memory, params, settings)
            # A scale that is a tensor would come back with a task dimension alone, and no longer broadcast.
            return [Move(m.displacement(), 1.0) if m and isinstance(m.scale, Tensor) else m for m in moves], new

        with warnings.catch_warnings():  # torch reports operations that it batches slowly
            warnings.filterwarnings("ignore", message=".*not yet implemented the batching rule")
            return self._map_rule(one, list(grads), memory, list(params))

    def _bind(self, prox: Any, step: Scalar, hyper: Any) -> Callable[[Tensor], Tensor] | None:
        if prox is None:
            return None
        mapper = self._map_prox
        if mapper is None or getattr(prox, "separable", False):
            return lambda y: prox(y, step, hyper)
        return lambda y: mapper(lambda one: prox(one, step, hyper), y)


def _nth(setting: Any, place: int) -> Scalar:
    """Return a setting of the parameter at `place`: a list has one tensor per parameter."""
    chosen: Scalar = setting[place] if isinstance(setting, list) else setting
    return chosen


def refuse_extrapolation(update: Update, state: InnerState, settings: Sequence[Settings], where: str) -> None:
    """Raise where gradients that are already there were taken at another point than the rule wants."""
    points = update.points(state, settings)
    if any(point is not p for point, p in zip(points, state.params, strict=True)):
        raise ValueError(
            f"the rule {update.rule.name} takes its gradients at an extrapolated point, which `{where}` cannot "
            "evaluate. Use `unroll`, which calls the losses itself."
        )
