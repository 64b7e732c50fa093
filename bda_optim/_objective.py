"""How a loss of the user's is evaluated at given tensors: on a tree of them, in a module, for one task or for many."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ._functional import Skeleton
from ._tree import Slot, Template, map_tensors, over_tasks, replace_tensors

Loss: TypeAlias = Callable[[Any, Any, Any], Tensor]
"""``loss(params_or_net, hyper, batch)`` -> a scalar."""

Buffers: TypeAlias = tuple[Tensor, ...]


Objective: TypeAlias = Callable[[Loss, Sequence[Tensor], Buffers, Sequence[Tensor], Any], tuple[Tensor, Buffers]]
"""``objective(loss, params, buffers, hyper, batch)`` -> the loss at flat tensors, and the buffers as it left them."""


class TreeObjective:
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


class ModuleObjective:
    """Losses of a module; the tensors are laid into its skeleton."""

    def __init__(self, skeleton: Skeleton, names: Sequence[str], others: dict[str, Slot], hyper: Template) -> None:
        """Remember which parameters are the lower variables (`names`) and which are upper ones (`others`)."""
        self._skeleton, self._names, self._others, self._hyper = skeleton, tuple(names), others, hyper

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
        with self._skeleton.surroundings():
            value = loss(self._skeleton.root, self._hyper.fill(hyper), batch)
        return value, self._skeleton.read_buffers()


class TasksObjective:
    """The same loss on many tasks at once: parameters, buffers and batches have a task dimension in front."""

    def __init__(self, objective: Objective, tasks: int) -> None:
        """Remember the objective of a single task."""
        self._objective, self._tasks, self._looping = objective, tasks, False

    def frozen(self) -> Any:
        """Return what a trace depends on."""
        return self._objective, self._tasks

    def __call__(
        self, loss: Loss, params: Sequence[Tensor], buffers: Buffers, hyper: Sequence[Tensor], batch: Any
    ) -> tuple[Tensor, Buffers]:
        """Return one loss per task."""

        def one(params: Sequence[Tensor], buffers: Buffers, batch: Any) -> tuple[Tensor, Buffers]:
            return self._objective(loss, params, buffers, hyper, batch)

        if not self._looping:
            try:
                value, new = over_tasks(one, tuple(params), buffers, batch)
            except (RuntimeError, NotImplementedError, ValueError) as error:
                self._loop_from_now_on(error)
            else:
                return value, new
        trees = (tuple(params), buffers, batch)
        mapped = [one(*map_tensors(operator.itemgetter(i), trees)) for i in range(self._tasks)]
        values, states = zip(*mapped, strict=True)
        return torch.stack(values), tuple(torch.stack(column) for column in zip(*states, strict=True))

    def _loop_from_now_on(self, error: Exception) -> None:
        self._looping = True
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        warnings.warn(
            f"the loss cannot be batched over tasks by torch.func.vmap ({reason}); the {self._tasks} tasks run one after "
            "another instead, which gives the same result more slowly.",
            stacklevel=2,
        )
