"""Checks of what a rollout is asked to do, which more than one door makes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from .tensors import describe


def check_ambient() -> None:
    """Refuse to run where no gradient can be had."""
    if torch.is_inference_mode_enabled():
        raise RuntimeError(
            "an inner loop takes gradients, which `torch.inference_mode()` rules out. Use `torch.no_grad()` instead: "
            "the loop then adapts the parameters and keeps no graph."
        )


def check_count(name: str, value: Any) -> int:
    """Return a whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(
            f"`{name}` must be a whole number of at least 1; got {value!r}. Ask for one {name[:-1]} or more."
        )
    return value


def check_devices(params: Sequence[Tensor], others: Iterable[tuple[str, Tensor]]) -> None:
    """Raise where a tensor lives on another device than all the parameters; single numbers on the CPU may."""
    devices = {p.device for p in params}
    for name, tensor in others:
        if tensor.device not in devices and not (tensor.device.type == "cpu" and tensor.dim() == 0):
            home = ", ".join(sorted(map(str, devices)))
            raise ValueError(
                f"everything in a rollout must be on the device of the parameters ({home}); got {name}, "
                f"{describe(tensor)}. Move it there with `.to(...)`."
            )
