"""Closed second derivatives of layers: the switch, and the conditions under which they are used.

torch composes the derivative of a layer's gradient of many elementwise operations, each of which passes over the
activations. A formula takes a few passes. Layers of exactly torch's classes get one in a module's twin; subclasses and
calls of `torch.nn.functional` keep torch's own derivative.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar, Token

import torch
from torch import Tensor, nn

from .._support import torch_private

_choice: ContextVar[bool | None] = ContextVar("closed_derivatives", default=None)


class closed_derivatives:
    """Choose whether inner loops that start in this context use closed second derivatives of layers.

    By default they do where this saves time: on the CPU, for activations that are not small. The results agree with
    torch's own up to rounding. The choice is made where a module enters a loop (`unroll`, `innerloop_ctx`, a patched
    module of `compat.higher`) and stays with that loop; it holds for the current thread.

    A third derivative (of a hypergradient, with ``create_graph=True``) through batch norm is wrong in torch: its second
    derivative takes mean and variance as constants. The closed form has the right one. It is used whatever the size
    where one inner loop runs inside a loss of another.

    Args:
        enabled: True for closed derivatives whatever the size; False for torch's own.

    >>> with closed_derivatives(False):
    ...     print(chosen())
    False
    """

    def __init__(self, enabled: bool = True) -> None:
        if not isinstance(enabled, bool):
            raise TypeError(f"`enabled` is True or False; got {enabled!r}. Without this context the size decides.")
        self._enabled = enabled
        self._tokens: list[Token[bool | None]] = []

    def __enter__(self) -> None:
        """Make the choice."""
        self._tokens.append(_choice.set(self._enabled))

    def __exit__(self, *_: object) -> None:
        """Return to the choice before."""
        _choice.reset(self._tokens.pop())


def chosen() -> bool | None:
    """Return whether closed derivatives are to be used whatever the size; None leaves it to the size."""
    if _choice.get() is None and torch_private.hooks_are_forbidden():  # inside a forward pass of another inner loop
        return True
    return _choice.get()


def is_closed(size: int, least: int, *tensors: Tensor | None) -> bool:
    """Whether a call of a layer gets a closed derivative; where it does not, torch's own operations are called.

    Closed forms were measured on the CPU. They are for strided tensors of one real dtype. Maps over tasks, forward-mode
    derivatives, autocast, compilers and tensors of other classes see torch's own operations, which have rules for them.

    Args:
        size: The number of activations.
        least: From which number on the closed form saves time; in a program that is traced it always does.
        *tensors: Input, weights and buffers; the input comes first.
    """
    if size < least and not torch_private.is_traced():
        return False
    return (
        torch.is_grad_enabled()
        and any(t is not None and t.requires_grad for t in tensors)
        and _are_plain(tensors)
        and is_plain(*tensors)
        and not torch.compiler.is_compiling()
    )


def is_plain(*tensors: Tensor | None) -> bool:
    """Whether nothing transforms what is computed with tensors; a closed form asks anew in every backward pass."""
    return (
        not torch_private.are_transformed(*tensors)
        and not torch.is_autocast_enabled("cpu")
        and (not torch_private.is_watched() or torch_private.is_traced())
    )


def wanted_only(values: Sequence[Tensor | None], wanted: Sequence[bool]) -> tuple[Tensor | None, ...]:
    """Return the values that are wanted, and None for the others."""
    return tuple(value if there else None for value, there in zip(values, wanted, strict=True))


_DTYPES = (torch.float32, torch.float64)
_CLASSES = (Tensor, nn.Parameter)


def _are_plain(tensors: Sequence[Tensor | None]) -> bool:
    there = [t for t in tensors if t is not None]
    return all(
        type(t) in _CLASSES
        and t.dtype in _DTYPES
        and t.dtype is there[0].dtype
        and t.is_cpu
        and t.layout is torch.strided
        for t in there
    )
