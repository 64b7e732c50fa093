"""Slots for the tensors that a rollout differentiates, each counted once, and the templates that they fill."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from .tensors import refuse_sharded
from .tree import Leaf, map_leaves, named_leaves, unflatten


class Keyed:
    """An object that knows what a compiled program of it depends on."""

    def key(self) -> Any:
        """Return that: values, tensors, functions and modules, in any tree."""
        raise NotImplementedError


class Filler:
    """A leaf that becomes a value as soon as the tensors of the slots are known."""

    def fill(self, values: Sequence[Tensor]) -> Any:
        """Return the value for these tensors."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Slot(Filler):
    """Stands for the tensor number `index`."""

    index: int

    def fill(self, values: Sequence[Tensor]) -> Tensor:
        """Return the tensor of that number."""
        return values[self.index]


@dataclasses.dataclass(frozen=True)
class _Fields(Filler):
    """A dataclass (a schedule, a prox) some of whose fields are slots."""

    value: Any
    slots: dict[str, Slot]

    def fill(self, values: Sequence[Tensor]) -> Any:
        return dataclasses.replace(self.value, **{name: slot.fill(values) for name, slot in self.slots.items()})


_PLAIN = frozenset({bool, int, float, str, type(None)})


class Template(Keyed):
    """A tree with slots in the place of tensors."""

    def __init__(self, leaves: list[Any], structure: Any) -> None:
        """Store a flattened tree, some of whose leaves are fillers."""
        self._leaves = leaves
        self._structure = structure
        self._fillers = [(i, leaf) for i, leaf in enumerate(leaves) if isinstance(leaf, Filler)]
        self._constant = None if self._fillers else unflatten(leaves, structure)

    @classmethod
    def constant(cls, tree: Any) -> Template:
        """Return a template without slots: `fill` returns `tree` itself, whatever tensors it contains."""
        return cls([tree], Leaf(0))

    def key(self) -> Any:
        """Return the leaves, with slots in the place of tensors, and the structure."""
        return self._leaves, repr(self._structure)

    @property
    def is_constant(self) -> bool:
        """Whether there are no slots."""
        return not self._fillers

    def unfilled(self) -> Any:
        """Return the tree with its slots."""
        return unflatten(self._leaves, self._structure)

    def fill(self, values: Sequence[Tensor]) -> Any:
        """Return the tree with the slots' tensors in place."""
        if not self._fillers:
            return self._constant
        leaves = list(self._leaves)
        for i, filler in self._fillers:
            leaves[i] = filler.fill(values)
        return unflatten(leaves, self._structure)


def fill(tree: Any, values: Sequence[Tensor]) -> Any:
    """Return a tree with the slots that are its leaves replaced by their tensors."""
    return map_leaves(lambda slot: slot.fill(values), Slot, tree)


class Slots:
    """Collects tensors, the same object only once, with a name for messages."""

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
        """Return the slot of `tensor`: the one it has, or a new one."""
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
            special: Takes each other leaf and its name, and returns what replaces it.
        """
        if type(tree) in _PLAIN or (type(tree) is dict and all(type(value) in _PLAIN for value in tree.values())):
            return Template.constant(tree)  # most settings; naming every leaf takes ten times as long
        leaves, structure = named_leaves(tree, name)
        return Template([self._leaf(leaf, path, special) for path, leaf in leaves], structure)

    def _leaf(self, leaf: Any, name: str, special: Callable[[Any, str], Any] | None) -> Any:
        if isinstance(leaf, Tensor):
            return self.put(leaf, name)
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            values = {field.name: getattr(leaf, field.name) for field in dataclasses.fields(leaf) if field.init}
            slots = {key: self.put(v, f"{name}.{key}") for key, v in values.items() if isinstance(v, Tensor)}
            return _Fields(leaf, slots) if slots else leaf
        return special(leaf, name) if special else leaf
