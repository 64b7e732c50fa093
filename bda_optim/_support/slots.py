"""Slots: the tensors that a rollout differentiates, each counted once, and the templates they fill."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from .tensors import refuse_sharded
from .tree import Leaf, map_leaves, named_leaves, unflatten


class Frozen:
    """Something that says itself what a trace of it depends on."""

    def frozen(self) -> Any:
        """Return it."""
        raise NotImplementedError


class Filler:
    """A leaf that becomes a value once the tensors of the slots are known."""

    def fill(self, values: Sequence[Tensor]) -> Any:
        """Return the value."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Slot(Filler):
    """Stands for the tensor number `index`."""

    index: int

    def fill(self, values: Sequence[Tensor]) -> Tensor:
        """Return that tensor."""
        return values[self.index]


@dataclasses.dataclass(frozen=True)
class _Fields(Filler):
    """A dataclass (a schedule, a prox) some of whose fields are slots."""

    value: Any
    slots: dict[str, Slot]

    def fill(self, values: Sequence[Tensor]) -> Any:
        return dataclasses.replace(self.value, **{name: slot.fill(values) for name, slot in self.slots.items()})


_PLAIN = frozenset({bool, int, float, str, type(None)})


class Template(Frozen):
    """A tree with slots in the place of tensors."""

    def __init__(self, leaves: list[Any], spec: Any) -> None:
        """Remember the leaves and which of them are to be filled."""
        self._leaves, self._spec = leaves, spec
        self._fillers = [(i, leaf) for i, leaf in enumerate(leaves) if isinstance(leaf, Filler)]
        self._constant = None if self._fillers else unflatten(leaves, spec)

    @classmethod
    def constant(cls, tree: Any) -> Template:
        """Return a template that has no slots: `fill` gives `tree` itself, whatever tensors it holds."""
        return cls([tree], Leaf(0))

    def frozen(self) -> Any:
        """Return what a trace of something filled depends on."""
        return self._leaves, repr(self._spec)

    def unfilled(self) -> Any:
        """Return the tree with its slots."""
        return unflatten(self._leaves, self._spec)

    def fill(self, values: Sequence[Tensor]) -> Any:
        """Return the tree with the slots' tensors in place."""
        if not self._fillers:
            return self._constant
        leaves = list(self._leaves)
        for i, filler in self._fillers:
            leaves[i] = filler.fill(values)
        return unflatten(leaves, self._spec)


def fill(tree: Any, values: Sequence[Tensor]) -> Any:
    """Return a tree with the slots that are its leaves replaced by their tensors."""
    return map_leaves(lambda slot: slot.fill(values), Slot, tree)


class Slots:
    """Collects tensors, the same object once, and remembers a name for messages."""

    def __init__(self) -> None:
        """Start empty."""
        self.tensors: list[Tensor] = []
        self.names: list[str] = []
        self._index: dict[int, int] = {}

    def copy(self) -> Slots:
        """Return slots for the same tensors, to which others can be added."""
        other = Slots()
        for tensor, name in zip(self.tensors, self.names, strict=True):
            other.put(tensor, name)
        return other

    def put(self, tensor: Tensor, name: str) -> Slot:
        """Return the slot of `tensor`, a new one unless it has one already."""
        refuse_sharded(name, tensor)
        index = self._index.setdefault(id(tensor), len(self.tensors))
        if index == len(self.tensors):
            self.tensors.append(tensor)
            self.names.append(name)
        return Slot(index)

    def template(self, tree: Any, name: str, special: Callable[[Any, str], Any] | None = None) -> Template:
        """Turn every tensor of a tree, and of the dataclasses in it, into a slot.

        Args:
            tree: Dicts, lists and tuples of tensors, dataclasses and anything else.
            name: What messages call the tree.
            special: Is shown each other leaf with its name, and returns what stands in its place.
        """
        if type(tree) in _PLAIN or (type(tree) is dict and all(type(value) in _PLAIN for value in tree.values())):
            return Template.constant(tree)  # most settings; a path for every leaf takes ten times as long
        leaves, spec = named_leaves(tree, name)
        return Template([self._leaf(leaf, path, special) for path, leaf in leaves], spec)

    def _leaf(self, leaf: Any, name: str, special: Callable[[Any, str], Any] | None) -> Any:
        if isinstance(leaf, Tensor):
            return self.put(leaf, name)
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            found = {field.name: getattr(leaf, field.name) for field in dataclasses.fields(leaf) if field.init}
            slots = {key: self.put(value, f"{name}.{key}") for key, value in found.items() if isinstance(value, Tensor)}
            return _Fields(leaf, slots) if slots else leaf
        return special(leaf, name) if special else leaf
