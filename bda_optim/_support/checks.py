"""Checks that several doors make before a rollout."""

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from .tensors import describe
from .torch_private import opaque

P = ParamSpec("P")
R = TypeVar("R")


def door(names: str, then: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Mark a function that users call: torch.compile stays outside, and too many arguments by position are explained.

    Args:
        names: The arguments that may be given by position.
        then: The name of the next one, which must be given by name.
    """
    count = len(names.split())

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @opaque
        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            if len(args) > count:
                taken = [name for name in names.split() if name != "self"]
                raise TypeError(
                    f"`{function.__name__}` takes {', '.join(taken)} by position; got {len(args) - count} more. Pass "
                    f"the others by name, as in `{then}=`."
                )
            return function(*args, **kwargs)

        return checked

    return decorate


def user_level() -> int:
    """Return the `stacklevel` with which a caller's warning names the first line outside of this package and torch."""
    frame = inspect.currentframe()
    level = 0
    while frame is not None and (frame.f_globals.get("__name__") or "").split(".")[0] in ("bda_optim", "torch"):
        frame = frame.f_back
        level += 1
    return level


def check_ambient() -> None:
    """Raise where no gradient can be taken."""
    if torch.is_inference_mode_enabled():
        raise RuntimeError(
            "an inner loop takes gradients, which `torch.inference_mode()` rules out. Use `torch.no_grad()` instead: "
            "the loop then adapts the parameters and keeps no graph."
        )


def check_count(name: str, value: Any) -> int:
    """Return a whole number of at least 1, of whatever type `operator.index` takes."""
    count = 0
    if not isinstance(value, bool):
        with contextlib.suppress(TypeError):
            count = operator.index(value)
    if count < 1:
        raise ValueError(f"`{name}` must be a whole number of at least 1; got {value!r}. Pass an integer.")
    return count


def check_devices(params: Sequence[Tensor], others: Iterable[tuple[str, Tensor]]) -> None:
    """Raise if a tensor is on a device that no parameter is on; 0-dim tensors on the CPU are allowed."""
    devices = {p.device for p in params}
    for name, tensor in others:
        if tensor.device not in devices and not (tensor.device.type == "cpu" and tensor.dim() == 0):
            home = ", ".join(sorted(map(str, devices)))
            raise ValueError(
                f"everything in a rollout must be on the device of the parameters ({home}); got {name}, "
                f"{describe(tensor)}. Move it there with `.to(...)`."
            )
