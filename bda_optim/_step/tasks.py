"""Many tasks at once: a function of one task is mapped over the task dimension."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from .._context.environment import Ambient
from .._modules.closed import chosen, noting_forgone_forms
from .._support.checks import user_level
from .._support.slots import Keyed
from .._support.torch_private import has_padded_embedding, inside_transform, sequence_number
from .._support.tree import tensors
from .._support.vmap import one_by_one, over_tasks
from .objective import Buffers, Loss, Objective

_better_one_by_one: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Modules whose tasks run one after another, since that saves time."""


class TaskMapper:
    """Maps a function over B tasks: all at once by `vmap`, or one after another where that is better.

    The tasks run one after another where `vmap` fails, which is warned about once; and where it keeps layers from their
    closed second derivatives. Four tasks of a Conv-4 with 32 filters and 25 images of 28x28 take 0.76 of the time and
    0.59 of the memory one after another. The first call decides.

    Args:
        tasks: The number B of tasks.
        what: What the warning calls the function.
        module: What the function calls; for the next rollout the choice is remembered with it.
    """

    def __init__(self, tasks: int, what: str = "the loss", module: nn.Module | None = None) -> None:
        """Start with `vmap`, or with what an earlier rollout chose."""
        self.tasks = tasks
        self._what = what
        self._module = module
        self._loops = module is not None and module in _better_one_by_one and chosen() is not False
        self._batches = False  # whether `vmap` has succeeded

    def __call__(self, function: Callable[..., Any], *trees: Any) -> Any:
        """Return what `function` gives for each task, with the task dimension in front."""
        if self._loops:
            return one_by_one(function, self.tasks, *trees)
        if self._batches:
            return over_tasks(function, *trees)
        ambient = Ambient(tensors(trees))
        rng = ambient.rng()
        number = sequence_number()
        forgone: list[bool] = []
        try:
            with noting_forgone_forms() as forgone:
                result = over_tasks(function, *trees)
            _refuse_padding(tensors(result), number)
            self._batches = not forgone or inside_transform()
        except (RuntimeError, NotImplementedError, ValueError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            warnings.warn(
                f"torch.func.vmap cannot batch {self._what} over tasks ({reason}); the {self.tasks} tasks run one "
                "after another instead, which gives the same result more slowly.",
                stacklevel=user_level(),
            )
        if self._batches:
            return result
        self._loops, result = True, None  # its graph is freed
        if forgone and self._module is not None:
            _better_one_by_one.add(self._module)
        ambient.set_rng(rng)  # the attempt may have drawn from it, and a replay does not repeat the attempt
        return one_by_one(function, self.tasks, *trees)


def _refuse_padding(results: Sequence[Tensor], since: int) -> None:
    """Raise where a loss calls `F.embedding` itself: `vmap` is right about the row for padding of the first task alone.

    The layers of a module do without, in a way of their own.
    """
    if any(has_padded_embedding(result.grad_fn, since) for result in results):
        raise NotImplementedError("it gives the row of `padding_idx` in F.embedding a gradient")


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
