"""Many tasks at once: a function of one task is mapped over the task dimension."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from .._context.environment import Ambient
from .._support.checks import user_level
from .._support.slots import Keyed
from .._support.tree import tensors
from .._support.vmap import one_by_one, over_tasks
from .objective import Buffers, Loss, Objective


class TaskMapper:
    """Maps a function over B tasks: all at once by `vmap`, or one after another where `vmap` fails.

    The first failure is remembered, and warned about once.

    Args:
        tasks: The number B of tasks.
        what: What the warning calls the function.
    """

    def __init__(self, tasks: int, what: str = "the loss") -> None:
        """Start with `vmap`."""
        self.tasks = tasks
        self._what = what
        self._loops = False
        self._batches = False  # whether `vmap` has succeeded

    def __call__(self, function: Callable[..., Any], *trees: Any) -> Any:
        """Return what `function` gives for each task, with the task dimension in front."""
        if self._loops:
            return one_by_one(function, self.tasks, *trees)
        ambient = None if self._batches else Ambient(tensors(trees))
        rng = ambient and ambient.rng()
        try:
            result = over_tasks(function, *trees)
        except (RuntimeError, NotImplementedError, ValueError) as error:
            self._loops = True
            if ambient:
                ambient.set_rng(rng)  # the attempt may have drawn from it, and a replay does not repeat the attempt
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            warnings.warn(
                f"torch.func.vmap cannot batch {self._what} over tasks ({reason}); the {self.tasks} tasks run one "
                "after another instead, which gives the same result more slowly.",
                stacklevel=user_level(),
            )
            return one_by_one(function, self.tasks, *trees)
        self._batches = True
        return result


class TasksObjective(Keyed):
    """The same loss on many tasks at once: parameters, buffers and batches have a task dimension in front."""

    def __init__(self, objective: Objective, mapper: TaskMapper) -> None:
        """Store the objective of a single task."""
        self._objective = objective
        self._mapper = mapper

    @property
    def module(self) -> Any:
        """The user's module, if there is one."""
        return getattr(self._objective, "module", None)

    def key(self) -> Any:
        """Return what a trace depends on."""
        return self._objective, self._mapper.tasks

    def __call__(
        self, loss: Loss, params: Sequence[Tensor], buffers: Buffers, hyper: Sequence[Tensor], batch: Any
    ) -> tuple[Tensor, Buffers]:
        """Return one loss per task."""

        def one(params: Sequence[Tensor], buffers: Buffers, batch: Any) -> tuple[Tensor, Buffers]:
            return self._objective(loss, params, buffers, hyper, batch)

        result: tuple[Tensor, Buffers] = self._mapper(one, tuple(params), buffers, batch)
        return result
