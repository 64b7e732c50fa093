"""Helpers of `higher.utils`."""

from __future__ import annotations

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
        return [leaf_ for value in x.values() for leaf_ in flatten(value)]
    if isinstance(x, list | tuple | set | nn.ParameterList):
        return [leaf_ for value in x for leaf_ in flatten(value)]
    return [x]


def get_func_params(
    module: nn.Module, device: torch.device | str | None = None, safe_copy: bool = True
) -> list[Tensor]:
    """Return the parameters of a module as leaves of their own, shared ones once.

    Args:
        module: The module.
        device: Where they are to be; where they were, by default.
        safe_copy: Whether they are copied; if False they share the memory of the module's parameters.
    """
    if safe_copy:
        return [leaf(p, device) for p in module.parameters()]
    shared = [p.detach() if device is None else p.detach().to(device) for p in module.parameters()]
    return [t.requires_grad_(p.requires_grad) for t, p in zip(shared, module.parameters(), strict=True)]
