r"""Second-order products as central differences of first-order gradients.

Along a direction v the lower variables y move by h v, with

.. math:: h = \text{scale} \cdot \epsilon^{1/3} \Big/ \sqrt{\textstyle\sum_b
          \big( \lVert v_b \rVert / (\lVert y_b \rVert + 0.01 \sqrt{n_b}) \big)^2} .

b runs over the tensors, whose magnitudes differ: the norms of a transformer would hide all others. Truncation and
rounding balance at the cube root of epsilon, the unit of rounding of the coarsest type that a loss is computed in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from .._step.gradients import Grads
from .base import Cotangents

Gradient: TypeAlias = Callable[[Sequence[Tensor], Tensor | None], Cotangents]
"""``gradient(values, seeds)`` -> the gradient by all values of a loss; with tasks, of their losses times `seeds`."""

_FLOOR = 0.01
"""The magnitude of a tensor's elements at least: variables may start from 0."""


class _Move(NamedTuple):
    """How far the values go, and what makes a derivative of the difference of two gradients.

    Attributes:
        shifts: h v.
        seeds: With tasks, the weight of each task's loss: its own 1 / h, the largest of them being 1.
        factor: What the difference is multiplied with.
    """

    shifts: list[Tensor | None]
    seeds: Tensor | None
    factor: Tensor


def difference(
    gradient: Gradient, values: Sequence[Tensor], directions: Grads, length: float, tasks: int | None = None
) -> tuple[Cotangents, Cotangents]:
    """Return the derivative of a gradient along directions, and one of the two gradients that it was taken from.

    Args:
        gradient: The gradient by all values.
        values: Where the derivative is taken.
        directions: One per value; None if it does not move.
        length: The relative length of the move.
        tasks: The number of tasks, if each has a length of its own; then all directions have a task dimension.
    """
    move = _move(values, directions, length, tasks)
    sides = [gradient(_moved(values, move.shifts, sign), move.seeds) for sign in (1, -1)]
    plus, minus = sides
    return [_scaled(a, b, move.factor) for a, b in zip(plus, minus, strict=True)], plus


def size(value: Tensor, tasks: int | None = None) -> Tensor:
    """Return the norm of a tensor (of each task), with a floor."""
    count = value.numel() // (tasks or 1)
    floor: float = _FLOOR * count**0.5
    return _norm(value, tasks) + floor


def scaled_down(directions: Grads) -> tuple[list[Tensor | None], Tensor]:
    """Return directions divided by their largest element, whose square may be beyond a float, and that element."""
    peaks = [v.detach().abs().amax() for v in directions if v is not None and v.numel()]
    home = peaks[0]
    peak = torch.stack([p.to(home.device, _wide(home.dtype)) for p in peaks]).amax()
    divisor = torch.where(peak > 0, peak, 1)
    return [None if v is None else v / divisor.to(v.device, v.real.dtype) for v in directions], peak


def relative_norm(values: Sequence[Tensor], directions: Grads, tasks: int | None = None) -> Tensor:
    """Return the norm of directions relative to the sizes of the values (of each task)."""
    pairs = [(y, v) for y, v in zip(values, directions, strict=True) if v is not None and v.numel()]
    ratios = [_norm(v, tasks) / size(y, tasks) for y, v in pairs]
    home = ratios[0]
    norm: Tensor = torch.linalg.vector_norm(torch.stack([r.to(home.device, home.dtype) for r in ratios]), dim=0)
    return norm


def _move(values: Sequence[Tensor], directions: Grads, length: float, tasks: int | None) -> _Move:
    """Choose h; where the directions are 0, nothing moves and the factor is 0, without a look at the numbers."""
    units, peak = scaled_down(directions)
    rate = relative_norm(values, units, tasks)
    h = torch.where(rate > 0, length / rate, 0)
    fastest = rate.amax()
    seeds = None if tasks is None else rate / torch.where(fastest > 0, fastest, 1)
    return _Move([None if v is None else v * _like(h, v) for v in units], seeds, peak * fastest / (2 * length))


def _moved(values: Sequence[Tensor], shifts: Sequence[Tensor | None], sign: int) -> list[Tensor]:
    """Return leaves beside the values."""
    moved = []
    for value, shift in zip(values, shifts, strict=True):
        if shift is not None:
            value = torch.add(value.detach(), shift.to(value.dtype), alpha=sign).requires_grad_(value.requires_grad)
        moved.append(value)
    return moved


def _scaled(plus: Tensor | None, minus: Tensor | None, factor: Tensor) -> Tensor | None:
    if plus is None or minus is None:
        one = minus if plus is None else plus
        sign = -1 if plus is None else 1
        return None if one is None else sign * one * _like(factor, one)
    return (plus - minus) * _like(factor, plus)


def _like(number: Tensor, tensor: Tensor) -> Tensor:
    """Return a number (or one per task) so that it multiplies a tensor, in the tensor's precision."""
    shape = [-1] + [1] * (tensor.dim() - 1) if number.dim() else []
    return number.to(tensor.device, tensor.real.dtype).reshape(shape)


def _norm(value: Tensor, tasks: int | None) -> Tensor:
    value = value.detach()
    flat = value.reshape(-1) if tasks is None else value.reshape(tasks, -1)
    norm: Tensor = torch.linalg.vector_norm(flat, dim=-1, dtype=_wide(value.dtype))
    return norm


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return a type in which norms are taken: at least float32."""
    wide: torch.dtype = torch.promote_types(dtype, torch.float32)
    return wide
