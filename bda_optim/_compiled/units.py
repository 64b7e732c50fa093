"""Steps that share a compiled call: their batches and numbers as flat tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._step.schedules import Schedule
from .._support.slots import Slot
from .._support.tensors import layout
from .._support.tree import flatten, tensors, unflatten
from .._support.types import Item, Settings
from .trace_key import freeze


class Part(NamedTuple):
    """Steps that share a compiled call: their items, a row of numbers (k, rates, weights) for each, and their form."""

    items: tuple[Item, ...]
    rows: Tensor
    form: Form


class Plan:
    """The parts of a unit, in order. A tree that contains a plan does not contain what is inside.

    Attributes:
        parts: The parts.
        compiled: Whether they are compiled; the steps that are left over after all whole parts are not.
    """

    def __init__(self, parts: Sequence[Part], *, compiled: bool) -> None:
        self.parts = tuple(parts)
        self.compiled = compiled


class Unit(NamedTuple):
    """Steps that an adjoint takes by one call.

    Attributes:
        tensors: The distinct tensors of their batches, whose versions are watched.
        plan: What is to be done.
    """

    tensors: tuple[Tensor, ...]
    plan: Plan

    @classmethod
    def of(cls, parts: Sequence[Part], *, compiled: bool) -> Unit:
        """Return the unit of some parts."""
        distinct = {id(t): t for part in parts for t in part.form.tensors}
        return cls(tuple(distinct.values()), Plan(parts, compiled=compiled))

    def first(self) -> Unit:
        """Return the first step alone, uncompiled."""
        part = self.plan.parts[0]
        return Unit.of([Part(part.items[:1], part.rows[:1], part.form)], compiled=False)


@dataclasses.dataclass(frozen=True)
class _Nth:
    """Stands for a distinct tensor of a unit's batches."""

    index: int


@dataclasses.dataclass(eq=False)
class Table:
    """The numbers of a rollout: what its programs take for k, rates and weights.

    Attributes:
        rows: A row for each step.
        modes: What kind of weights each step has, per group.
        plans: The units of rollouts without batches, by the size of a part and whether all parts are joined.
    """

    rows: Tensor
    modes: list[tuple[str, ...]]
    plans: dict[tuple[int, bool], Units] = dataclasses.field(default_factory=dict)


def made_of(settings: Settings) -> Hashable | None:
    """Return what a group's column of a table is made from; None if that cannot be compared, as of a user's function.

    >>> made_of({"lr": 0.1, "upper_lr": None, "alpha": lambda k: 0.5 / k})
    """
    found = tuple(_constant(settings[name]) for name in ("lr", "upper_lr", "alpha"))
    return None if None in found else found


def _constant(value: Any) -> Hashable | None:
    if is_number(value):
        return float(value)
    if value is None or isinstance(value, Tensor | list):
        return type(value).__name__  # tensors are inputs of a program, and no part of its table
    if isinstance(value, Schedule) and all(map(is_number, vars(value).values())):
        return type(value), tuple(vars(value).values())
    return None


class Units(Sequence[Unit]):
    """Items divided into units; a batch is read when its unit is asked for, and known units are kept."""

    def __init__(self, items: Sequence[Item], table: Table) -> None:
        self._items = items
        self._table = table.rows
        self._modes = table.modes
        self._kept = getattr(items, "eager", True)  # the batches are held by their list anyway
        self._last_read: tuple[int, Item] | None = None
        self._bounds: list[list[tuple[int, int]]] = []
        self._whole = 0
        self._known: dict[int, Unit] = {}
        self._forms: dict[Hashable, Form] = {}

    def part(self, start: int, stop: int) -> Part:
        """Return these steps as a part; where they have the batches of another one, they share its form."""
        items = tuple(map(self._read, range(start, stop)))
        modes = tuple(self._modes[start:stop])
        if not self._kept:
            return Part(items, self._table[start:stop], Form(items, modes))
        same = (tuple(id(item.batch) for item in items), modes)
        if same not in self._forms:
            self._forms[same] = Form(items, modes)
        return Part(items, self._table[start:stop], self._forms[same])

    def _read(self, index: int) -> Item:
        """Return an item; the last one is kept, so that a look at the first batch reads it once."""
        if self._last_read is None or self._last_read[0] != index:
            self._last_read = index, self._items[index]
        return self._last_read[1]

    def divided(self, size: int, *, joined: bool) -> Units:
        """Divide into parts of `size` steps, each a unit or all `joined` in one; what is left over is one unit."""
        steps = len(self._items)
        whole = steps - steps % size
        parts = [(start, start + size) for start in range(0, whole, size)]
        self._bounds = ([parts] if parts else []) if joined else [[part] for part in parts]
        self._whole = len(self._bounds)
        if whole < steps:
            self._bounds.append([(whole, steps)])
        return self

    def __len__(self) -> int:
        return len(self._bounds)

    def __getitem__(self, index: Any) -> Any:
        unit = self._known.get(index)
        if unit is None:
            parts = [self.part(start, stop) for start, stop in self._bounds[index]]
            unit = Unit.of(parts, compiled=range(len(self))[index] < self._whole)
        if self._kept:
            self._known[index] = unit
        return unit


class Form:
    """The batches of a unit taken apart: their distinct tensors, and a key for all the rest."""

    def __init__(self, items: Sequence[Item], modes: tuple[tuple[str, ...], ...]) -> None:
        self.tensors: list[Tensor] = []
        self.modes = modes
        self.evaluated = tuple(any(mode != "0" for mode in step) for step in modes)  # whether the upper loss is needed
        self.number: int | None = None  # an engine's short name for the key
        known: dict[int, _Nth] = {}
        self._batches = []
        for item in items:
            leaves, spec = flatten(item.batch)
            self._batches.append(([self._place(leaf, known) for leaf in leaves], spec))
        shapes = [(tuple(map(_comparable, leaves)), repr(spec)) for leaves, spec in self._batches]
        self.layouts = tuple(map(layout, self.tensors))
        self.key = (tuple(shapes), self.modes, self.layouts)

    def _place(self, leaf: Any, known: dict[int, _Nth]) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) not in known:
            known[id(leaf)] = _Nth(len(self.tensors))
            self.tensors.append(leaf)
        return known[id(leaf)]

    def filled(self, values: Sequence[Tensor]) -> Iterator[Any]:
        """Yield each batch, with `values` for its tensors."""
        for leaves, spec in self._batches:
            filled = [values[leaf.index] if isinstance(leaf, _Nth) else leaf for leaf in leaves]
            yield unflatten(filled, spec)


def with_tensor_counts(state: Any, shape: tuple[int, ...] = ()) -> Any:
    """Turn the plain numbers of a rule's state (Adam's step) into tensors of a shape, and lay all out densely."""
    device = tensors(state)[0].device

    def leaf(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.contiguous()
        return torch.full(shape, float(value), dtype=torch.float64, device=device) if is_number(value) else value

    leaves, structure = flatten(state)
    return unflatten([leaf(value) for value in leaves], structure)


def with_plain_counts(state: Any, like: Any) -> Any:
    """Undo `with_tensor_counts`: what is a number in `like` becomes one again."""
    leaves, spec = flatten(like)
    found = flatten(state)[0]
    counts = [new.max() for new, old in zip(found, leaves, strict=True) if is_number(old)]
    if not counts:
        return state
    numbers = iter(torch.stack(counts).tolist())  # one look at the device
    return unflatten(
        [type(old)(next(numbers)) if is_number(old) else new for new, old in zip(found, leaves, strict=True)], spec
    )


def _comparable(leaf: Any) -> Hashable:
    return leaf if isinstance(leaf, _Nth | Slot) else freeze(leaf)[0]


def is_number(value: Any) -> bool:
    """Whether a value is a plain number, and no flag."""
    return isinstance(value, int | float) and not isinstance(value, bool)
