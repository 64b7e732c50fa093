"""Whether something is still what it was when its key was made, without making the key again.

`freeze` describes a problem in full; that takes longer than some whole rollouts do. `same_as` goes through the same
parts (functions with their closures, globals and defaults, modules with their flags, containers, settings), but only
asks whether each is the object, or the plain value, that it was. Objects are held weakly; a dead one matches nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from torch import Tensor, nn

from .._support.slots import Keyed
from .._support.tensors import layout
from .trace_key import (
    CONTAINERS,
    DEPTH,
    PLAIN,
    Ref,
    cell_is_filled,
    configuration,
    contents,
    global_names,
    is_followed,
    named_in,
    of_class,
    small_array,
)

Same: TypeAlias = Callable[[Any], bool]
"""Says whether something is what it was."""

_MISSING = object()


def same_as(value: Any) -> Same:
    """Return a function that tells whether a later value has the key of this one, and the same tensors in it.

    It may say no where the keys are equal, as of a list of other tensors; it does not say yes where they differ.

    >>> limits = {"high": 3.0}
    >>> same = same_as(lambda x: x * limits["high"])
    >>> limits["high"] = 4.0
    >>> same(lambda x: x * limits["high"])
    False
    """
    return _Builder().look(value, DEPTH, ())


class _Builder:
    """Builds the questions; what is met again is asked for its identity alone, and then at its first place too."""

    def __init__(self) -> None:
        self._met: dict[int, tuple[int, list[bool]]] = {}
        self._keep: list[Any] = []  # an id is only good while its object lives

    def look(self, value: Any, depth: int, inside: tuple[int, ...]) -> Same:
        """Return the question for a value; `inside` are the containers around it."""
        if isinstance(value, PLAIN):
            return _plain(value)
        if id(value) in inside:  # a container that holds itself
            return lambda now: False
        inside = (*inside, id(value))
        if isinstance(value, Tensor):
            return _tensor(value)
        if isinstance(value, Keyed):
            return _through(type(value), lambda now: now.key(), self.look(value.key(), DEPTH, inside))
        if isinstance(value, CONTAINERS):
            return _sequence(type(value), [self.look(item, depth, inside) for item in value])
        if isinstance(value, dict):
            return _dictionary(list(map(str, value)), [self.look(item, depth, inside) for item in value.values()])
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            names = [field.name for field in dataclasses.fields(value)]
            fields = self.look([getattr(value, name) for name in names], depth, inside)
            return _through(type(value), lambda now: [getattr(now, name) for name in names], fields)
        if (array := small_array(value)) is not None:
            return lambda now: small_array(now) == array
        return self._once(value, depth, inside) if is_followed(value, depth) else _object(value)

    def _once(self, value: Any, depth: int, inside: tuple[int, ...]) -> Same:
        """Look into an object, unless that is done elsewhere."""
        deepest, strict = self._met.get(id(value), (-1, [False]))
        if deepest >= depth:
            strict[0] = True
            return _object(value)
        strict = [False]
        self._met[id(value)] = depth, strict
        self._keep.append(value)
        itself, same = _object(value), self._deeper(value, depth - 1, inside)
        return lambda now: (not strict[0] or itself(now)) and same(now)

    def _deeper(self, value: Any, depth: int, inside: tuple[int, ...]) -> Same:
        """Look into what counts as one step away."""
        if isinstance(value, types.FunctionType):
            code, names = Ref(value.__code__), global_names(value.__code__)
            parts = self.look(_parts(value, names), depth, inside)
            kind = types.FunctionType
            return lambda now: type(now) is kind and code.refers_to(now.__code__) and parts(_parts(now, names))
        if isinstance(value, types.MethodType):
            parts = self.look((value.__func__, value.__self__), depth, inside)
            return _through(type(value), lambda now: (now.__func__, now.__self__), parts)
        if isinstance(value, functools.partial):
            parts = self.look((value.func, value.args, value.keywords), depth, inside)
            return _through(type(value), lambda now: (now.func, now.args, now.keywords), parts)
        itself = _object(value)
        if isinstance(value, nn.Module):
            flags, tensors = tuple(configuration(value)), self.look(contents(value), depth, inside)
            return lambda now: itself(now) and tuple(configuration(now)) == flags and tensors(contents(now))
        shared, attributes = of_class(type(value)), self.look(vars(value), depth, inside)
        return lambda now: itself(now) and of_class(type(now)) == shared and attributes(vars(now))


def _plain(value: Any) -> Same:
    kind = type(value)
    return lambda now: now is value or (type(now) is kind and bool(now == value))


def _object(value: Any) -> Same:
    reference = Ref(value)
    return reference.refers_to


def _tensor(value: Tensor) -> Same:
    reference, before = Ref(value), layout(value)
    return lambda now: reference.refers_to(now) and layout(now) == before


def _through(kind: type, look: Callable[[Any], Any], same: Same) -> Same:
    return lambda now: type(now) is kind and same(look(now))


def _sequence(kind: type, sames: Sequence[Same]) -> Same:
    return lambda now: type(now) is kind and _all(sames, now)


def _all(sames: Sequence[Same], values: Any) -> bool:
    return len(values) == len(sames) and all([same(value) for same, value in zip(sames, values, strict=True)])


def _dictionary(names: Sequence[str], sames: Sequence[Same]) -> Same:
    def same(now: Any) -> bool:
        return isinstance(now, dict) and [str(key) for key in now] == names and _all(sames, now.values())

    return same


def _parts(function: types.FunctionType, names: Sequence[str]) -> list[Any]:
    """Return what a function reads: its closure, its globals, its defaults, and attributes of what it names."""
    cells = [cell.cell_contents if cell_is_filled(cell) else _MISSING for cell in function.__closure__ or ()]
    used = [function.__globals__.get(name, _MISSING) for name in names]
    attributes = named_in([*cells, *used], names)
    return [*cells, *used, attributes, function.__defaults__, function.__kwdefaults__, vars(function)]
