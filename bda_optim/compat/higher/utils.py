"""Helpers of `higher.utils`; scripts use the private ones too."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ._fast_weights import leaf

__all__ = ["flatten", "get_func_params"]


def flatten(x: Any) -> list[Any]:
    """Return the leaves of nested dicts, lists, tuples and sets.

    >>> flatten({"lr": [0.1, 0.2], "betas": [(0.9, 0.99)]})
    [0.1, 0.2, 0.9, 0.99]
    """
    if isinstance(x, dict):
        return [entry for value in x.values() for entry in flatten(value)]
    if isinstance(x, list | tuple | set | nn.ParameterList):
        return [entry for value in x for entry in flatten(value)]
    return [x]


def get_func_params(
    module: nn.Module, device: torch.device | str | None = None, safe_copy: bool = True
) -> list[Tensor]:
    """Return the parameters of a module as leaves of their own, shared ones once.

    Args:
        module: The module.
        device: Their device; by default they stay where they are.
        safe_copy: Whether they are copied; if False they share the memory of the module's parameters.
    """
    return [_copy_tensor(p, safe_copy, device) for p in module.parameters()]


def _copy_tensor(t: Tensor, safe_copy: bool, device: torch.device | str | None = None) -> Tensor:
    """Return a leaf with the values of `t` that requires grad if `t` does; without `safe_copy` it shares memory."""
    return leaf(t, device, copy=safe_copy)


def _recursive_map(target: Any, map_fn: Callable[[Any], Any]) -> Any:
    """Return nested dicts, lists, tuples and sets like `target`, with `map_fn` applied to what they contain.

    >>> _recursive_map({"lr": [1, 2], "betas": (3, 4)}, lambda x: x + 0.5)
    {'lr': [1.5, 2.5], 'betas': (3.5, 4.5)}
    """
    if isinstance(target, dict):
        new = copy.copy(target)  # a defaultdict keeps its factory
        new.update((key, _recursive_map(value, map_fn)) for key, value in target.items())
        return new
    if isinstance(target, tuple) and hasattr(target, "_fields"):
        return type(target)(*(_recursive_map(value, map_fn) for value in target))
    if isinstance(target, list | tuple | set):
        return type(target)([_recursive_map(value, map_fn) for value in target])
    return map_fn(target)
