"""Replaces and learns the settings of an optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Override = Mapping[str, Any]
"""Name of a setting to one value, or to a list with one value per parameter group."""


def per_group(name: str, value: Any, groups: int, *, pair: bool) -> list[Any]:
    """Return the value of a setting for each group.

    Args:
        name: The setting, for messages.
        value: One value, or a list (or a tensor with a dimension) with one per group.
        groups: The number of groups.
        pair: Whether a value of this setting is a tuple itself, as `betas` is.

    >>> per_group("lr", 0.1, 2, pair=False), per_group("betas", (0.9, 0.99), 1, pair=True)
    ([0.1, 0.1], [(0.9, 0.99)])
    """
    if isinstance(value, Tensor):
        values = list(value) if value.dim() else [value]
    elif isinstance(value, list | nn.ParameterList) or (isinstance(value, tuple) and not pair):
        values = list(value)
    else:
        values = [value]
    if len(values) not in (1, groups):
        raise ValueError(
            f"`override[{name!r}]` must be one value, or a list with one per parameter group ({groups}); got "
            f"{len(values)}. For one value per parameter write a list of lists."
        )
    return values * groups if len(values) == 1 else values


def trainable(value: Any, device: torch.device | str | None) -> Any:
    """Return a number, or a tuple or list of numbers, as tensors that require grad; None if it is none of these."""
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.detach().clone().to(device or value.device).requires_grad_()
    if isinstance(value, int | float) and not isinstance(value, bool):
        return torch.tensor(float(value), device=device, requires_grad=True)
    if isinstance(value, tuple | list) and value:
        entries = [trainable(entry, device) for entry in value]
        return None if any(entry is None for entry in entries) else type(value)(entries)
    return None


def restored(value: Any, old: Any, name: str) -> Any:
    """Return a learned value in the form of the old one: a number of its type, a tensor in place, a tuple of these.

    A whole number stays an int only if the new value is whole: lr=1 that became 0.4 must not turn into 0.

    >>> restored(torch.tensor(0.5), 1, "lr"), restored(torch.tensor(2.0), 1, "lr")
    (0.5, 2)
    """
    if isinstance(old, tuple | list):
        if not isinstance(value, Sequence) or len(value) != len(old):
            raise ValueError(f"`{name}` has {len(old)} entries; got {value!r}. Pass as many.")
        return type(old)([restored(v, o, name) for v, o in zip(value, old, strict=True)])
    if isinstance(old, Tensor):
        with torch.no_grad():
            return old.copy_(torch.as_tensor(value).reshape(old.shape))
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(f"`{name}` is one number; got a tensor of shape {tuple(value.shape)}. Pass one element.")
        value = value.item()
    if isinstance(old, bool):
        return bool(value)
    if isinstance(old, int):
        return int(value) if float(value).is_integer() else float(value)
    return type(old)(value) if isinstance(old, float) else value
