"""The twin of a module tree, and every reference inside it made to point to the twin."""

from __future__ import annotations

import copy
import dataclasses
import functools
import types
from collections import OrderedDict, defaultdict, deque
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._support.torch_private import COMPILED_CALL, MODULE_DICTS, compiled_original


class Place(NamedTuple):
    """One tensor of the user's module and every spot of the skeleton that refers to it."""

    original: Tensor
    spots: list[tuple[Any, Any]]

    def put(self, tensor: Tensor) -> None:
        """Lay `tensor` into all the spots."""
        for container, key in self.spots:
            container[key] = tensor

    def get(self) -> Tensor:
        """Return what lies there now."""
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


def _twin(module: nn.Module, twins: dict[int, Any]) -> nn.Module:
    known: nn.Module | None = twins.get(id(module))
    if known is not None:
        return known
    plain = unwrap(module)
    if plain is not module:
        twins[id(module)] = twin = _twin(plain, twins)
        return twin
    if isinstance(module, torch.jit.ScriptModule):
        raise TypeError(
            f"a scripted module cannot be given other parameters; got {type(module).__name__}. "
            "Pass the Python module it was scripted from."
        )
    twin = object.__new__(type(module))  # past a `__new__` such as GraphModule's, which makes a class
    twins[id(module)] = twin
    content = dict(module.__dict__)
    content.pop(COMPILED_CALL, None)  # bound to the user's module
    params, buffers, children = (content[key] for key in MODULE_DICTS)
    copies = (
        dict(params),
        dict(buffers),
        {name: None if child is None else _twin(child, twins) for name, child in children.items()},
    )
    content.update(zip(MODULE_DICTS, copies, strict=True))
    twin.__dict__.update(content)
    for name in _slots(type(module)):  # type: ignore[arg-type]
        if hasattr(module, name):
            object.__setattr__(twin, name, getattr(module, name))
    return twin


@functools.lru_cache(maxsize=1024)
def _slots(kind: type) -> tuple[str, ...]:
    """Return the names of the `__slots__` of a class (private ones as they are stored), which no `__dict__` holds."""
    found = (item for base in kind.__mro__ for item in base.__dict__.items())
    return tuple(name for name, value in found if isinstance(value, types.MemberDescriptorType))


_EMPTY = (dict, OrderedDict, list, tuple, set, type(None))
_ATOMS = (bool, int, float, str, torch.Tensor, nn.Parameter, torch.dtype, torch.device)


def _redirect(twin: nn.Module, twins: dict[int, Any], places: dict[int, Place]) -> None:
    """Make every reference in `twin` to a module or tensor of the tree point to the skeleton's."""
    content = twin.__dict__
    for key, value in content.items():
        kind = type(value)
        if kind in _ATOMS or key in MODULE_DICTS or (kind in _EMPTY and not value):  # nearly all attributes of a layer
            continue
        content[key] = _redirected(value, twins, places)
    _note(content, places)
    names = _slots(type(twin))  # type: ignore[arg-type]
    if names:
        held = {name: _redirected(getattr(twin, name), twins, places) for name in names if hasattr(twin, name)}
        for name, value in held.items():
            object.__setattr__(twin, name, value)
            if isinstance(value, Tensor) and id(value) in places:
                places[id(value)].spots.append((_Attributes(twin), name))


def _redirected(value: Any, twins: dict[int, Any], places: dict[int, Place]) -> Any:
    """Return `value` itself, or a copy that refers to the skeleton; `twins` knows what became of which object."""
    if id(value) in twins:
        return twins[id(value)]
    if isinstance(value, types.MethodType) and id(value.__self__) in twins:
        return types.MethodType(value.__func__, twins[id(value.__self__)])
    if isinstance(value, functools.partial):
        function, args, keywords = (_redirected(v, twins, places) for v in (value.func, value.args, value.keywords))
        return functools.partial(function, *args, **keywords)
    if isinstance(value, types.FunctionType):
        return _rebound(value, twins, places)
    old = _contents(value)
    if old is None:
        return value
    twins[id(value)] = value  # in case it contains itself
    new = {key: _redirected(item, twins, places) for key, item in old.items()}
    if any(new[key] is not old[key] or id(old[key]) in places for key in old):
        twins[id(value)] = value = _rebuilt(value, new)
        if not isinstance(value, tuple):
            _note(value if isinstance(value, dict | list | deque) else value.__dict__, places)
    return value


_HELD = (nn.Module, Tensor, types.MethodType, types.FunctionType, functools.partial)


def _rebound(function: types.FunctionType, twins: dict[int, Any], places: dict[int, Place]) -> types.FunctionType:
    """Return a function whose closure (as of ``self.f = lambda x: self.layer(x)``) holds the skeleton's objects."""
    if not function.__closure__:
        return function
    twins[id(function)] = function  # in case it holds itself
    cells = [_cell(cell, twins, places) for cell in function.__closure__]
    if all(new is old for new, old in zip(cells, function.__closure__, strict=True)):
        return function
    new = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, tuple(cells)
    )
    new.__kwdefaults__ = function.__kwdefaults__
    new.__dict__.update(function.__dict__)
    twins[id(function)] = new
    return new


def _cell(cell: types.CellType, twins: dict[int, Any], places: dict[int, Place]) -> types.CellType:
    """Return the cell itself, or one that holds the skeleton's object; containers stay shared with the user."""
    try:
        value = cell.cell_contents
    except ValueError:  # not assigned yet
        return cell
    if not isinstance(value, _HELD):
        return cell
    held = _redirected(value, twins, places)
    if held is value and id(value) not in places:
        return cell
    new = types.CellType(held)
    if id(value) in places:
        places[id(value)].spots.append((_Attributes(new), "cell_contents"))
    return new


def _contents(value: Any) -> dict[Any, Any] | None:
    """Return what a container or a record of the user's holds; None of anything else."""
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


def _note(container: dict[Any, Any] | list[Any] | deque[Any], places: dict[int, Place]) -> None:
    """Note the spots of a container that hold a tensor of the module; RNNs' `_flat_weights` is such a container."""
    for key, value in container.items() if isinstance(container, dict) else enumerate(container):
        if isinstance(value, Tensor) and id(value) in places:
            spots = places[id(value)].spots
            if not any(known is container and k == key for known, k in spots):
                spots.append((container, key))
        elif isinstance(value, tuple):
            for index, item in enumerate(value):
                if isinstance(item, Tensor) and id(item) in places:
                    places[id(item)].spots.append((_Entries(container, key), index))


class _Entries:
    """The entries of a tuple, which can be replaced because the container that holds it is known."""

    def __init__(self, container: Any, key: Any) -> None:
        self._container, self._key = container, key

    def __getitem__(self, index: int) -> Any:
        return self._container[self._key][index]

    def __setitem__(self, index: int, value: Any) -> None:
        old = self._container[self._key]
        self._container[self._key] = _rebuilt(old, {**dict(enumerate(old)), index: value})


class _Attributes:
    """The attributes of an object that has no `__dict__` for them, as a container."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner

    def __getitem__(self, name: str) -> Any:
        return getattr(self._owner, name)

    def __setitem__(self, name: str, value: Any) -> None:
        object.__setattr__(self._owner, name, value)
