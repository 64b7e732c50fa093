"""Closed second derivatives of layers: the switch, and the conditions under which they are used.

torch composes the derivative of a layer's gradient of many elementwise operations, each of which passes over the
activations. A formula takes a few passes. Layers of exactly torch's classes get one in a module's twin; subclasses and
calls of `torch.nn.functional` keep torch's own derivative.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor, nn

from .._support import torch_private

_choices: ContextVar[tuple[bool, ...]] = ContextVar("closed_derivatives", default=())
"""What the contexts chose that this thread is in, the innermost last."""


class closed_derivatives:
    """Choose whether inner loops that start in this context use closed second derivatives of layers.

    Batch norm, layer norm, group norm, convolutions and `MaxPool2d` have one. By default it is used where it saves
    time: on the CPU, for activations that are not small. Results agree with torch's own up to rounding. The choice is
    made where a module enters a loop (`unroll`, `innerloop_ctx`, a patched module of `compat.higher`) and stays with
    that loop. It holds for the current thread.

    A third derivative (of a hypergradient, taken with ``create_graph=True``) through batch norm or layer norm is wrong
    in torch, whose second derivative takes mean and variance as constants. Closed forms have the right one. They are
    used whatever the size where one inner loop runs inside a loss of another.

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

    def __enter__(self) -> None:
        """Make the choice."""
        _choices.set((*_choices.get(), self._enabled))

    def __exit__(self, *_: object) -> None:
        """Return to the choice before."""
        _choices.set(_choices.get()[:-1])


def chosen() -> bool | None:
    """Return whether closed derivatives are to be used whatever the size; None leaves it to the size."""
    if choices := _choices.get():
        return choices[-1]
    return True if torch_private.hooks_are_forbidden() else None  # they are in a forward pass of another inner loop


def is_small(x: Tensor, least: int) -> bool:
    """Whether the closed form of a layer costs more than it saves; in a program that is traced it never does.

    Args:
        x: The input.
        least: From how many activations on the closed form saves time.
    """
    return x.numel() < least and not torch_private.is_traced()


_forgone: ContextVar[list[bool]] = ContextVar("forgone_closed_forms")
"""Where a layer notes that a map over tasks keeps it from its closed form."""


@contextmanager
def noting_forgone_forms() -> Iterator[list[bool]]:
    """Give a list that is not empty afterwards if layers did without their closed forms for the sake of a transform."""
    token = _forgone.set([])
    try:
        yield _forgone.get()
    finally:
        _forgone.reset(token)


def is_usable(*tensors: Tensor | None) -> bool:
    """Whether a closed form can take the input, weights and buffers of a layer; if not, torch's own layer is called.

    Closed forms were measured on the CPU. They are for strided tensors of one real dtype, of which one requires grad.
    Maps over tasks, forward-mode derivatives, autocast, compilers and tensors of other classes see torch's own
    operations, which have rules for them.
    """
    suitable = torch.is_grad_enabled() and _are_plain(tensors)
    if suitable and torch_private.are_transformed(*tensors) and not torch_private.is_traced():
        _forgone.get([]).append(True)  # whether the outer tensors require grad is not seen inside of a map
    return suitable and any(t is not None and t.requires_grad for t in tensors) and is_plain(*tensors)


def is_ordinary(*tensors: Tensor | None) -> bool:
    """Whether a layer may be computed in another way that gives the same numbers, with a graph or without one."""
    return _are_plain(tensors) and is_plain(*tensors)


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


def sum_of_products(*terms: tuple[Tensor, Tensor], plus: Tensor | None = None, composed: bool) -> Tensor:
    """Return a sum of products, each of them one pass over memory.

    Args:
        *terms: Pairs of an activation, and of a tensor that broadcasts to it.
        plus: A tensor to add.
        composed: Whether nothing may be changed in place, as in a map over tasks.
    """
    total = terms[0][0] * terms[0][1]
    for values, factor in terms[1:]:
        total = total.addcmul(values, factor) if composed else total.addcmul_(values, factor)
    if plus is not None:
        total = total.add(plus) if composed else total.add_(plus)
    return total


_DTYPES = (torch.float32, torch.float64)
_CLASSES = (Tensor, nn.Parameter)


def _are_plain(tensors: Sequence[Tensor | None]) -> bool:
    """Whether tensors (those that there are) are dense, of torch's classes and of one real dtype, on the CPU."""
    present = [t for t in tensors if t is not None]
    dtype = present[0].dtype
    return (
        dtype in _DTYPES
        and all(
            type(t) in _CLASSES and t.dtype is dtype and t.is_cpu and t.layout is torch.strided and t.numel()
            for t in present
        )
        and not torch.compiler.is_compiling()
    )
