"""A module as a function of its tensors, without touching the user's module.

`torch.func.functional_call` swaps tensors in the user's own module, which is not thread-safe, and fails where a
sub-module is reachable by two names. A `Skeleton` is a twin of the module tree instead: the same classes, hooks and
attributes, but its own dictionaries of parameters and buffers, into which any tensors can be put. Nothing else is
copied.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from .._support.slots import Filler, Keyed, Slot, Slots
from .._support.tensors import refuse_sharded
from .rewire import Place, Rewiring
from .second_order import recompose


class Skeleton(Keyed):
    """A twin of a module whose parameters and buffers can be replaced.

    Attributes:
        module: The user's module.
        root: The twin; of the same class as the module, and called like it.
        params: Name to `Place`, shared parameters once, by the names of `module.named_parameters()`.
        buffers: The same for buffers.
    """

    def __init__(self, module: nn.Module) -> None:
        """Build the twin of `module`, with the module's own tensors in it."""
        rewiring = Rewiring(module)
        self.module = module
        self.root = rewiring.root
        self.params = {name: Place(tensor, []) for name, tensor in module.named_parameters()}
        self.buffers = {name: Place(tensor, []) for name, tensor in module.named_buffers()}
        _check((*self.params.items(), *self.buffers.items()))
        self._recurrent = any(isinstance(twin, nn.RNNBase) for twin in rewiring.twins)
        rewiring.connect((*self.params.values(), *self.buffers.values()))
        for twin in rewiring.twins:
            recompose(twin)

    def key(self) -> Any:
        """Return what a program depends on: the structure, the flags, and the tensors that nobody replaces."""
        fixed = [place.original for place in self.params.values() if not place.original.requires_grad]
        return self.module, tuple((type(child), child.training) for child in self.root.modules()), fixed

    def surroundings(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context for a forward pass: cuDNN's RNNs have no second derivative."""
        cudnn = torch.backends.cudnn
        return cudnn.flags(enabled=False) if self._recurrent and cudnn.is_available() else contextlib.nullcontext()

    def lay_params(self, names: Iterable[str], values: Iterable[Tensor]) -> None:
        """Put `values` in the place of the named parameters, in the dtypes that the module computes in."""
        for name, value in zip(names, values, strict=True):
            place = self.params[name]
            dtype = place.original.dtype
            place.put(value if value.dtype is dtype else value.to(dtype))  # another one only with a master copy

    def lay_buffers(self, values: Sequence[Tensor], *, copy: bool = True) -> None:
        """Put `values`, or copies that a forward pass may overwrite, in the place of all buffers."""
        for place, value in zip(self.buffers.values(), values, strict=True):
            place.put(value.detach().clone() if copy else value)

    def read_buffers(self) -> tuple[Tensor, ...]:
        """Return the buffers as the last forward pass left them."""
        return tuple(place.get().detach() for place in self.buffers.values())


@dataclasses.dataclass(frozen=True)
class ModuleSlot(Filler):
    """A module among the upper variables: filled, it is a skeleton with the slots' tensors in it."""

    skeleton: Skeleton
    slots: dict[str, Slot]

    def fill(self, values: Sequence[Tensor]) -> nn.Module:
        """Put the tensors into the skeleton and return its root."""
        self.skeleton.lay_params(self.slots, (slot.fill(values) for slot in self.slots.values()))
        return self.skeleton.root


def module_slot(slots: Slots) -> Callable[[Any, str], Any]:
    """Return what `Slots.template` does with a module in a tree: slots for its parameters, copies of its buffers."""

    def special(leaf: Any, name: str) -> Any:
        if not isinstance(leaf, nn.Module):
            return leaf
        skeleton = Skeleton(leaf)
        skeleton.lay_buffers([place.original for place in skeleton.buffers.values()])
        return ModuleSlot(skeleton, {key: slots.put(p.original, f"{name}.{key}") for key, p in skeleton.params.items()})

    return special


def _check(places: Iterable[tuple[str, Place]]) -> None:
    for name, place in places:
        refuse_sharded(f"parameter {name!r}", place.original)
        if isinstance(place.original, UninitializedParameter | UninitializedBuffer):
            raise ValueError(
                f"{name!r} of a lazy module has no shape yet; got an uninitialised tensor. "
                "Run the module once on a batch before handing it over."
            )
