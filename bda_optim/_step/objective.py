"""How a loss of the user's is evaluated at given tensors: on a tree of them, in a module, for one task or for many."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from .._context.environment import Ambient
from .._context.forward import refuse_reentrant, sequence_number
from .._modules.skeleton import Skeleton
from .._support.slots import Frozen, Slot, Template
from .._support.tree import map_tensors, replace_tensors, tensors
from .._support.vmap import one_by_one, over_tasks

Loss: TypeAlias = Callable[[Any, Any, Any], Tensor]
"""``loss(params_or_net, hyper, batch)`` -> a scalar."""

Buffers: TypeAlias = tuple[Tensor, ...]


Objective: TypeAlias = Callable[[Loss, Sequence[Tensor], Buffers, Sequence[Tensor], Any], tuple[Tensor, Buffers]]
"""``objective(loss, params, buffers, hyper, batch)`` -> the loss at flat tensors, and the buffers as it left them."""


class TreeObjective(Frozen):
    """Losses of a tree of tensors."""

    def __init__(self, params: Any, hyper: Template) -> None:
        """Remember the shape of both trees."""
        self._params, self._hyper = map_tensors(lambda t: torch.empty(0), params), hyper

    def frozen(self) -> Any:
        """Return what a trace depends on."""
        return self._params, self._hyper

    def __call__(
        self, loss: Loss, params: Sequence[Tensor], buffers: Buffers, hyper: Sequence[Tensor], batch: Any
    ) -> tuple[Tensor, Buffers]:
        """Call ``loss(params, hyper, batch)``."""
        return loss(replace_tensors(self._params, params), self._hyper.fill(hyper), batch), buffers


class ModuleObjective(Frozen):
    """Losses of a module; the tensors are laid into its skeleton."""

    def __init__(self, skeleton: Skeleton, names: Sequence[str], others: dict[str, Slot], hyper: Template) -> None:
        """Remember which parameters are the lower variables (`names`) and which are upper ones (`others`)."""
        self._skeleton, self._names, self._others, self._hyper = skeleton, tuple(names), others, hyper
        self._seen: list[Loss] = []

    def frozen(self) -> Any:
        """Return what a trace depends on."""
        return self._skeleton, self._names, self._others, self._hyper

    def __call__(
        self, loss: Loss, params: Sequence[Tensor], buffers: Buffers, hyper: Sequence[Tensor], batch: Any
    ) -> tuple[Tensor, Buffers]:
        """Call ``loss(net, hyper, batch)``."""
        self._skeleton.lay_params(self._names, params)
        self._skeleton.lay_params(self._others, (slot.fill(hyper) for slot in self._others.values()))
        self._skeleton.lay_buffers(buffers)
        number = sequence_number()
        with self._skeleton.surroundings():
            value = loss(self._skeleton.root, self._hyper.fill(hyper), batch)
        if all(loss is not seen for seen in self._seen):
            self._seen.append(loss)
            refuse_reentrant(value, number)
        return value, self._skeleton.read_buffers()


class OverTasks:
    """Maps a function over B tasks: all at once by `vmap`, or one after another where `vmap` cannot."""

    def __init__(self, tasks: int, *, looping: bool = False) -> None:
        """Start with `vmap`, unless it is known that it fails."""
        self.tasks, self.looping, self._known = tasks, looping, False

    def __call__(self, function: Callable[..., Any], *trees: Any) -> Any:
        """Return what `function` gives for each task, with the task dimension in front."""
        if self.looping:
            return one_by_one(function, self.tasks, *trees)
        ambient = None if self._known else Ambient(tensors(trees))
        rng = ambient and ambient.rng()
        try:
            result = over_tasks(function, *trees)
        except (RuntimeError, NotImplementedError, ValueError) as error:
            self.looping = True
            if ambient:
                ambient.set_rng(rng)  # the attempt may have drawn from it, and a replay does not repeat the attempt
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            warnings.warn(
                f"the loss cannot be batched over tasks by torch.func.vmap ({reason}); the {self.tasks} tasks run one "
                "after another instead, which gives the same result more slowly.",
                stacklevel=2,
            )
            return one_by_one(function, self.tasks, *trees)
        self._known = True
        return result


class TasksObjective(Frozen):
    """The same loss on many tasks at once: parameters, buffers and batches have a task dimension in front."""

    def __init__(self, objective: Objective, tasks: int, over: OverTasks | None = None) -> None:
        """Remember the objective of a single task."""
        self._objective, self._tasks, self.over = objective, tasks, over or OverTasks(tasks)

    def frozen(self) -> Any:
        """Return what a trace depends on."""
        return self._objective, self._tasks

    def __call__(
        self, loss: Loss, params: Sequence[Tensor], buffers: Buffers, hyper: Sequence[Tensor], batch: Any
    ) -> tuple[Tensor, Buffers]:
        """Return one loss per task."""

        def one(params: Sequence[Tensor], buffers: Buffers, batch: Any) -> tuple[Tensor, Buffers]:
            return self._objective(loss, params, buffers, hyper, batch)

        found: tuple[Tensor, Buffers] = self.over(one, tuple(params), buffers, batch)
        return found
