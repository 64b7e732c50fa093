"""The twin of a module tree, and every reference inside it made to point to the twin."""

from __future__ import annotations

import copy
import dataclasses
import functools
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._support.torch_private import (
    COMPILED_CALL,
    MODULE_DICTS,
    compiled_original,
    own_buffers,
    own_children,
    own_parameters,
)

_EMPTY = (dict, OrderedDict, list, tuple, set, type(None))
_ATOMS = (bool, int, float, str, torch.Tensor, nn.Parameter, torch.dtype, torch.device)
_FOLLOWED = (nn.Module, Tensor, types.MethodType, types.FunctionType, functools.partial)


class Place(NamedTuple):
    """One tensor of the user's module and every spot of the twin that refers to it."""

    original: Tensor
    spots: list[tuple[Any, Any]]

    def put(self, tensor: Tensor) -> None:
        """Put `tensor` into all the spots."""
        for container, key in self.spots:
            container[key] = tensor

    def get(self) -> Tensor:
        """Return the tensor that is there now."""
        container, key = self.spots[0]
        value: Tensor = container[key]
        return value


def unwrap(module: nn.Module) -> nn.Module:
    """Return the module inside a `torch.compile`, DataParallel or DistributedDataParallel wrapper.

    A compiled module has no second derivative, and a parallel one would synchronise gradients in the inner loop.
    """
    if isinstance(module, torch.jit.ScriptModule):
        return module
    inner = compiled_original(module)
    if isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
        inner = module.module
    return module if inner is None else unwrap(inner)


class Rewiring:
    """Builds the twin of a module tree, and makes every reference inside it point to the twin.

    Attributes:
        root: The twin of the root.
    """

    def __init__(self, module: nn.Module) -> None:
        """Build the twin; it still refers to the user's module wherever an attribute does."""
        self._copies: dict[int, Any] = {}  # of an object of the user's, by its id, what takes its place
        self._places: dict[int, Place] = {}
        self.root = self._twin(module)
        self.twins = list(dict.fromkeys(self._copies.values()))

    def connect(self, places: Iterable[Place]) -> None:
        """Find the spots of all tensors, and replace references to the user's modules and tensors."""
        self._places = {id(place.original): place for place in places}
        for twin in self.twins:  # these spots come first: a forward pass may assign another tensor to a buffer's name
            self._note(own_parameters(twin))
            self._note(own_buffers(twin))
        for twin in self.twins:
            self._redirect(twin)

    def _twin(self, module: nn.Module) -> nn.Module:
        known: nn.Module | None = self._copies.get(id(module))
        if known is not None:
            return known
        plain = unwrap(module)
        if plain is not module:
            self._copies[id(module)] = twin = self._twin(plain)
            return twin
        if isinstance(module, torch.jit.ScriptModule):
            raise TypeError(
                f"a scripted module cannot be given other parameters; got {type(module).__name__}. "
                "Pass the Python module it was scripted from."
            )
        twin = object.__new__(type(module))  # not through a `__new__` such as GraphModule's, which makes a class
        self._copies[id(module)] = twin
        twin.__dict__.update(module.__dict__)
        twin.__dict__.pop(COMPILED_CALL, None)  # bound to the user's module
        for key in MODULE_DICTS:
            twin.__dict__[key] = dict(module.__dict__[key])
        children = own_children(twin)
        for name, child in children.items():
            if child is not None:
                children[name] = self._twin(child)
        for name in _slots(type(module)):  # type: ignore[arg-type]
            if hasattr(module, name):
                object.__setattr__(twin, name, getattr(module, name))
        return twin

    def _redirect(self, twin: nn.Module) -> None:
        """Make every reference in `twin` to a module or tensor of the tree point to the twin's."""
        content = twin.__dict__
        for key, value in content.items():
            kind = type(value)
            if kind in _ATOMS or key in MODULE_DICTS or (kind in _EMPTY and not value):  # nearly all attributes
                continue
            content[key] = self._redirected(value)
        self._note(content)
        for name in _slots(type(twin)):  # type: ignore[arg-type]
            if not hasattr(twin, name):
                continue
            value = self._redirected(getattr(twin, name))
            object.__setattr__(twin, name, value)
            if isinstance(value, Tensor) and id(value) in self._places:
                self._places[id(value)].spots.append((_Attributes(twin), name))

    def _redirected(self, value: Any) -> Any:
        """Return `value` itself, or a copy that refers to the twin."""
        if id(value) in self._copies:
            return self._copies[id(value)]
        if isinstance(value, types.MethodType) and id(value.__self__) in self._copies:
            return types.MethodType(value.__func__, self._copies[id(value.__self__)])
        if isinstance(value, functools.partial):
            function, args, keywords = map(self._redirected, (value.func, value.args, value.keywords))
            return functools.partial(function, *args, **keywords)
        if isinstance(value, types.FunctionType):
            return self._rebound(value)
        old = _contents(value)
        if old is None:
            return value
        self._copies[id(value)] = value  # in case it contains itself
        new = {key: self._redirected(item) for key, item in old.items()}
        if any(new[key] is not old[key] or id(old[key]) in self._places for key in old):
            self._copies[id(value)] = value = _rebuilt(value, new)
            if not isinstance(value, tuple):
                self._note(value if isinstance(value, dict | list | deque) else value.__dict__)
        return value

    def _rebound(self, function: types.FunctionType) -> types.FunctionType:
        """Return a function whose closure (as of ``self.f = lambda x: self.layer(x)``) refers to the twin."""
        if not function.__closure__:
            return function
        self._copies[id(function)] = function  # in case it refers to itself
        cells = tuple(map(self._cell, function.__closure__))
        if all(new is old for new, old in zip(cells, function.__closure__, strict=True)):
            return function
        new = types.FunctionType(
            function.__code__, function.__globals__, function.__name__, function.__defaults__, cells
        )
        new.__kwdefaults__ = function.__kwdefaults__
        new.__dict__.update(function.__dict__)
        self._copies[id(function)] = new
        return new

    def _cell(self, cell: types.CellType) -> types.CellType:
        """Return the cell itself, or one that refers to the twin; containers stay shared with the user."""
        try:
            value = cell.cell_contents
        except ValueError:  # not assigned yet
            return cell
        if not isinstance(value, _FOLLOWED):
            return cell
        content = self._redirected(value)
        if content is value and id(value) not in self._places:
            return cell
        new = types.CellType(content)
        if id(value) in self._places:
            self._places[id(value)].spots.append((_Attributes(new), "cell_contents"))
        return new

    def _note(self, container: dict[Any, Any] | list[Any] | deque[Any]) -> None:
        """Note which spots of a container, such as the `_flat_weights` of an RNN, refer to a tensor of the module."""
        places = self._places
        for key, value in container.items() if isinstance(container, dict) else enumerate(container):
            if isinstance(value, Tensor) and id(value) in places:
                spots = places[id(value)].spots
                if not any(known is container and k == key for known, k in spots):
                    spots.append((container, key))
            elif isinstance(value, tuple):
                for index, item in enumerate(value):
                    if isinstance(item, Tensor) and id(item) in places:
                        places[id(item)].spots.append((TupleEntries(container, key), index))


@functools.lru_cache(maxsize=1024)
def _slots(kind: type) -> tuple[str, ...]:
    """Return the names of the `__slots__` of a class (private ones as they are stored), which no `__dict__` holds."""
    attributes = (item for base in kind.__mro__ for item in base.__dict__.items())
    return tuple(name for name, value in attributes if isinstance(value, types.MemberDescriptorType))


def _contents(value: Any) -> dict[Any, Any] | None:
    """Return the items of a container, or the attributes of a plain record; None for anything else."""
    kind = type(value)
    if kind in (dict, OrderedDict, defaultdict):
        return dict(value)
    if kind in (list, deque) or isinstance(value, tuple):
        return dict(enumerate(value))
    if kind is types.SimpleNamespace or (dataclasses.is_dataclass(value) and not isinstance(value, type)):
        return dict(getattr(value, "__dict__", {}))
    return None


def _rebuilt(value: Any, content: dict[Any, Any]) -> Any:
    """Return a container like `value` with other content under the same keys."""
    if isinstance(value, tuple):
        return type(value)(*content.values()) if hasattr(value, "_fields") else tuple(content.values())
    new = copy.copy(value)
    if isinstance(value, dict):
        new.update(content)
    elif isinstance(value, list | deque):
        for index, item in content.items():
            new[index] = item
    else:
        new.__dict__.update(content)
    return new


class TupleEntries:
    """The entries of a tuple as a container: to replace one, the tuple is replaced in the container that holds it."""

    def __init__(self, container: Any, key: Any) -> None:
        """Refer to the tuple ``container[key]``."""
        self.container = container
        self._key = key

    def __getitem__(self, index: int) -> Any:
        return self.container[self._key][index]

    def __setitem__(self, index: int, value: Any) -> None:
        old = self.container[self._key]
        self.container[self._key] = _rebuilt(old, {**dict(enumerate(old)), index: value})


class _Attributes:
    """The attributes of an object that has no `__dict__` for them, as a container."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner

    def __getitem__(self, name: str) -> Any:
        return getattr(self._owner, name)

    def __setitem__(self, name: str, value: Any) -> None:
        object.__setattr__(self._owner, name, value)
