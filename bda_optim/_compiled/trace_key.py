"""What a traced function depended on beside its arguments, so that a trace is used again only where it still holds.

`freeze` looks through functions (their code, closure, defaults and the globals they name), modules, containers and
plain objects. Numbers, strings and flags are compared by value, tensors by shape, type and place: the tensors found are
handed over as well, in order, and become inputs of the trace, so that a closure may hold other data at the next call.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import types
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .._support.slots import Keyed
from .._support.tensors import layout
from .._support.torch_private import hook_numbers, own_tensors

DEPTH = 3  # so many functions and objects are followed: a loss, a helper it calls, what that refers to
PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, type)
CONTAINERS = (list, tuple, set, frozenset, collections.deque)
_FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial)
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_SMALL = 4096  # bytes: so much of an array is compared in every rollout
_LIBRARIES = ("torch", "bda_optim", "builtins")


class Ref:
    """An object compared by identity, and not kept alive."""

    def __init__(self, value: Any) -> None:
        """Refer weakly where the type allows it."""
        self._get: Callable[[], Any] = lambda: value
        with contextlib.suppress(TypeError):
            self._get = weakref.ref(value)
        self._hash = hash((type(value), id(value)))

    def __eq__(self, other: object) -> bool:
        """Whether both are alive and the same."""
        own = self._get()
        return isinstance(other, Ref) and own is not None and own is other._get()

    def refers_to(self, value: Any) -> bool:
        """Whether this is the object, and alive."""
        return value is not None and self._get() is value

    def __hash__(self) -> int:
        """Return the hash of the identity."""
        return self._hash


def freeze(value: Any) -> tuple[Hashable, list[Tensor]]:
    """Return something comparable that stands for `value`, and the tensors inside it, each once.

    >>> limit = 3.0
    >>> freeze(lambda x: x * limit)[0] == freeze(lambda x: x + limit)[0]
    False
    """
    walker = _Walker()
    return walker.visit(value, DEPTH), walker.tensors


class _Walker:
    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self._seen: dict[int, int] = {}
        self._places: dict[Hashable, int] = {}
        self._keep: list[Any] = []

    def visit(self, value: Any, depth: int) -> Hashable:
        if isinstance(value, PLAIN):
            return type(value).__name__, value
        if id(value) in self._seen:
            return "again", self._seen[id(value)]
        self._seen[id(value)] = len(self._seen)
        self._keep.append(value)  # an id is only good while its object lives
        if isinstance(value, Tensor):
            self.tensors.append(value)
            return "tensor", layout(value), self._alias(value)
        return self._visit_object(value, depth)

    def _alias(self, value: Tensor) -> int:
        """Return which tensor before has the same memory, or this one: a program reads one of them for both."""
        place = len(self.tensors) - 1
        return self._places.setdefault((address(value), layout(value.detach())), place)

    def _visit_object(self, value: Any, depth: int) -> Hashable:
        if isinstance(value, Keyed):  # as deep as it goes: it says itself what it depends on, however it is nested
            return type(value).__name__, self.visit(value.key(), DEPTH)
        if isinstance(value, CONTAINERS):  # a container is no step away: what it holds is compared, not itself
            return type(value).__name__, tuple(self.visit(item, depth) for item in value)
        if isinstance(value, dict):
            return "dict", tuple((str(key), self.visit(item, depth)) for key, item in value.items())
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
            return type(value).__name__, self.visit(fields, depth)
        if (array := small_array(value)) is not None:
            return array
        if not is_followed(value, depth):
            return Ref(value)
        if isinstance(value, types.FunctionType):
            return self._visit_function(value, depth - 1)
        if isinstance(value, types.MethodType):
            return "method", self.visit(value.__func__, depth - 1), self.visit(value.__self__, depth - 1)
        if isinstance(value, functools.partial):
            return "partial", self.visit((value.func, value.args, value.keywords), depth - 1)
        if isinstance(value, nn.Module):
            return "module", Ref(value), tuple(configuration(value)), self.visit(contents(value), depth - 1)
        return Ref(value), of_class(type(value)), self.visit(vars(value), depth - 1)

    def _visit_function(self, function: types.FunctionType, depth: int) -> Hashable:
        code = function.__code__
        cells = [cell.cell_contents for cell in function.__closure__ or () if cell_is_filled(cell)]
        names = [name for name in global_names(code) if name in function.__globals__]
        used = [function.__globals__[name] for name in names]
        inside = (cells, used, function.__defaults__, function.__kwdefaults__, vars(function))
        return Ref(code), named_in([*cells, *used], global_names(code)), self.visit(inside, depth)


def address(value: Tensor) -> int:
    """Return where a tensor has its numbers; of one without memory of its own, where itself is."""
    try:
        return value.data_ptr()
    except RuntimeError:  # sparse, or of a transform
        return id(value)


def is_followed(value: Any, depth: int) -> bool:
    """Whether an object is looked into, and not only compared by identity."""
    if depth <= 0 or isinstance(value, types.ModuleType | types.BuiltinFunctionType):
        return False
    if isinstance(value, types.FunctionType):
        return not _is_of_library(value)
    return isinstance(value, types.MethodType | functools.partial | nn.Module) or hasattr(value, "__dict__")


def small_array(value: Any) -> Hashable | None:
    """Return what a small array or number of NumPy holds; None of anything else, and of a large array."""
    kind = type(value)
    if kind.__module__ != "numpy" or not hasattr(value, "tobytes") or value.nbytes > _SMALL:
        return None
    return kind, str(value.dtype), value.shape, value.tobytes()


def contents(module: nn.Module) -> dict[str, Any]:
    """Return what the parts of a module hold that may be replaced: tensors, functions, containers of plain values."""
    found = {}
    for name, child in module.named_modules():
        for key, value in vars(child).items():
            if key not in _OF_EVERY_MODULE and (isinstance(value, (Tensor, *_FUNCTIONS)) or _holds_plain(value)):
                found[f"{name}.{key}"] = value
        for key, value in own_tensors(child).items():
            if type(value) in (Tensor, nn.Parameter) and value.layout is torch.strided:
                found[f"{name}.{key}"] = value
    return found


def _holds_plain(value: Any, depth: int = DEPTH) -> bool:
    """Whether a value is a container of plain values, or of such containers."""
    if not depth or not isinstance(value, (*CONTAINERS, dict)):
        return False
    items = value.values() if isinstance(value, dict) else value
    return all(isinstance(item, PLAIN) or _holds_plain(item, depth - 1) for item in items)


def configuration(module: nn.Module) -> Iterator[Hashable]:
    """Yield the classes, flags and numbers of a module tree: what decides which operations it runs."""
    for name, child in module.named_modules():
        kind = type(child)
        plain = ((key, value) for key, value in vars(child).items() if isinstance(value, PLAIN))
        yield name, kind, tuple(plain), *hook_numbers(child), *_forward(kind)


def _forward(kind: type[nn.Module]) -> tuple[Hashable, ...]:
    """Return the forward pass of a user's class, and the plain values among the globals that it names."""
    function = getattr(kind, "forward", None)
    if not isinstance(function, types.FunctionType) or _is_of_library(function):
        return ()
    names, space = global_names(function.__code__), function.__globals__
    return function, tuple((name, space[name]) for name in names if isinstance(space.get(name, space), PLAIN))


def of_class(kind: type) -> tuple[Hashable, ...]:
    """Return the plain values and the methods of a user's class."""
    classes = [one for one in kind.__mro__ if not _is_of_library(one)]
    entries = [(name, value) for one in classes for name, value in vars(one).items()]
    plain = [(name, value) for name, value in entries if isinstance(value, PLAIN)]
    return (*plain, *(Ref(value) for _, value in entries if isinstance(value, types.FunctionType)))


def named_in(values: Sequence[Any], names: Sequence[str]) -> tuple[Hashable, ...]:
    """Return the plain attributes of Python modules and classes, among some values, that a function may read."""
    spaces = [vars(value) for value in values if isinstance(value, types.ModuleType | type)]
    found = ((name, space[name]) for space in spaces for name in names if name in space)
    return tuple((name, value) for name, value in found if isinstance(value, PLAIN))


def _is_of_library(value: Any) -> bool:
    return (value.__module__ or "").split(".")[0] in _LIBRARIES


def cell_is_filled(cell: Any) -> bool:
    """Whether a variable of a closure has a value yet."""
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def global_names(code: types.CodeType) -> list[str]:
    """Return the global names that a function and the functions inside it may use."""
    inner = [name for const in code.co_consts if isinstance(const, types.CodeType) for name in global_names(const)]
    return [*code.co_names, *inner]
