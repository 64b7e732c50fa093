"""Tangents: derivatives that are carried forward beside the state."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from .._support.tensors import is_differentiable
from .._support.vmap import vmapped

Tangents: TypeAlias = list[Tensor | None]
"""One tangent per tensor, with the P directions in front; None stands for zero."""


def identity(leaves: Sequence[Tensor], size: int) -> Tangents:
    """Return the derivatives of `leaves` with respect to the P = `size` real scalars of those that require grad."""
    tangents: Tangents = []
    offset = 0
    for leaf in leaves:
        if not leaf.requires_grad:
            tangents.append(None)
            continue
        count = scalars(leaf)
        tangent = torch.zeros(size, count, dtype=leaf.real.dtype, device=leaf.device)
        tangent[offset : offset + count] = torch.eye(count, dtype=tangent.dtype, device=leaf.device)
        tangents.append(_from_real(tangent, (size, *leaf.shape), leaf.dtype))
        offset += count
    return tangents


def scalars(tensor: Tensor) -> int:
    """Return how many real numbers a tensor has: two for each complex one."""
    return tensor.numel() * (2 if tensor.is_complex() else 1)


def _real(tensor: Tensor) -> Tensor:
    """Return a tensor as real numbers; a complex one gets a last dimension of 2."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _from_real(numbers: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Undo `_real`, whatever the shape in between."""
    if not dtype.is_complex:
        return numbers.reshape(shape)
    return torch.complex(*numbers.reshape(*shape, 2).unbind(-1))


def push_forward(outputs: Sequence[Tensor], inputs: Sequence[Tensor], tangents: Tangents) -> Tangents:
    """Push tangents of `inputs` through a recorded step, all of them through the same evaluation of it.

    The pull-back of a step is linear in the cotangent. Its transpose, which reverse mode gives as well, is the
    push-forward; `vmap` maps it over the tangents.
    """
    pushed: Tangents = [None] * len(outputs)
    moving = [(x, tangent) for x, tangent in zip(inputs, tangents, strict=True) if tangent is not None]
    targets = [i for i, output in enumerate(outputs) if output.requires_grad]
    if not targets or not moving:
        return pushed
    duals = [torch.zeros_like(outputs[i], requires_grad=True) for i in targets]
    pulled = torch.autograd.grad(
        [outputs[i] for i in targets], [x for x, _ in moving], duals, create_graph=True, allow_unused=True
    )
    linear = [(p, tangent) for p, (_, tangent) in zip(pulled, moving, strict=True) if p is not None and p.requires_grad]
    if linear:
        ends = [p for p, _ in linear]

        def one(*seeds: Tensor) -> Sequence[Tensor | None]:
            return torch.autograd.grad(ends, duals, seeds, allow_unused=True)

        mapped = vmapped(one, [tangent for _, tangent in linear], randomness="same")
        for i, tangent in zip(targets, mapped, strict=True):
            pushed[i] = None if tangent is None else tangent.detach()
    return pushed


class Attached(torch.autograd.Function):
    """Gives values a known derivative: ``Attached.apply(values, tangents, *inputs)``."""

    @staticmethod
    def forward(ctx: Any, values: Sequence[Tensor], tangents: Tangents, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Return the values."""
        ctx.inputs = [(t.shape, t.dtype, t.device) for t in inputs]
        ctx.carries = [tangent is not None for tangent in tangents]
        ctx.save_for_backward(*(tangent for tangent in tangents if tangent is not None))
        ctx.set_materialize_grads(False)
        outputs = tuple(t.detach().clone() for t in values)
        ctx.mark_non_differentiable(*(t for t in outputs if not is_differentiable(t)))
        return outputs

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        """Contract the cotangents with the derivatives."""
        if torch.is_grad_enabled():
            raise RuntimeError(
                "`ForwardMode` gives no second derivative of the hypergradient; got create_graph=True. "
                "Use `Unroll()` or `Checkpointed()`."
            )
        saved = iter(ctx.saved_tensors)
        parts = []
        for carries, cotangent in zip(ctx.carries, cotangents, strict=True):
            tangent = next(saved) if carries else None
            if tangent is not None and cotangent is not None:
                parts.append(_real(tangent).reshape(len(tangent), -1) @ _real(cotangent).reshape(-1))
        if not parts:
            return (None,) * (2 + len(ctx.inputs))
        total = torch.stack([part.to(parts[0].device) for part in parts]).sum(0)
        pieces = total.split([math.prod(shape) * (2 if dtype.is_complex else 1) for shape, dtype, _ in ctx.inputs])
        whole = zip(pieces, ctx.inputs, strict=True)
        return None, None, *(_from_real(p, shape, dtype).to(device, dtype) for p, (shape, dtype, device) in whole)
