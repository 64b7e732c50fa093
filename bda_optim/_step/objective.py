"""How a user's loss is evaluated at given tensors: on a tree of them, or in a module."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from .._context.forward import refuse_reentrant
from .._modules.skeleton import Skeleton
from .._support.slots import Frozen, Slot, Template
from .._support.torch_private import sequence_number
from .._support.tree import map_tensors, replace_tensors

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
