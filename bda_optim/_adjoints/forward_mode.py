"""Tangents of a rollout: derivatives carried forward beside the state."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._support.tensors import is_differentiable
from .._support.vmap import vmapped

Flows = list[Tensor | None]
"""One derivative per tensor, with the P scalars in front; None where it is zero."""


def identity(leaves: Sequence[Tensor], size: int) -> Flows:
    """Return the derivatives of `leaves` with respect to the P = `size` real scalars of those that require grad."""
    found: Flows = []
    offset = 0
    for leaf in leaves:
        if not leaf.requires_grad:
            found.append(None)
            continue
        count = scalars(leaf)
        flow = torch.zeros(size, count, dtype=leaf.real.dtype, device=leaf.device)
        flow[offset : offset + count] = torch.eye(count, dtype=flow.dtype, device=leaf.device)
        found.append(_from_real(flow, (size, *leaf.shape), leaf.dtype))
        offset += count
    return found


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


def push(outputs: Sequence[Tensor], inputs: Sequence[Tensor], flows: Flows) -> Flows:
    """Push tangents through a recorded step, all of them through the same evaluation of it.

    The pull-back of a step is linear in the cotangent, so its transpose, which reverse mode gives as well, is the
    push-forward; `vmap` maps it over the tangents.
    """
    found: Flows = [None] * len(outputs)
    moving = [(x, flow) for x, flow in zip(inputs, flows, strict=True) if flow is not None]
    targets = [i for i, output in enumerate(outputs) if output.requires_grad]
    if not targets or not moving:
        return found
    duals = [torch.zeros_like(outputs[i], requires_grad=True) for i in targets]
    pulled = torch.autograd.grad(
        [outputs[i] for i in targets], [x for x, _ in moving], duals, create_graph=True, allow_unused=True
    )
    linear = [(p, flow) for p, (_, flow) in zip(pulled, moving, strict=True) if p is not None and p.requires_grad]
    if linear:
        ends = [p for p, _ in linear]

        def one(*seeds: Tensor) -> Sequence[Tensor | None]:
            return torch.autograd.grad(ends, duals, seeds, allow_unused=True)

        pushed = vmapped(one, [flow for _, flow in linear], randomness="same")
        for i, tangent in zip(targets, pushed, strict=True):
            found[i] = None if tangent is None else tangent.detach()
    return found


class Attached(torch.autograd.Function):
    """Gives values a derivative that is known: ``Attached.apply(values, flows, *inputs)``."""

    @staticmethod
    def forward(ctx: Any, values: Sequence[Tensor], flows: Flows, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Return the values."""
        ctx.inputs = [(t.shape, t.dtype, t.device) for t in inputs]
        ctx.carries = [flow is not None for flow in flows]
        ctx.save_for_backward(*(flow for flow in flows if flow is not None))
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
        flows = iter(ctx.saved_tensors)
        parts = []
        for carries, cotangent in zip(ctx.carries, cotangents, strict=True):
            flow = next(flows) if carries else None
            if flow is not None and cotangent is not None:
                parts.append(_real(flow).reshape(len(flow), -1) @ _real(cotangent).reshape(-1))
        if not parts:
            return (None,) * (2 + len(ctx.inputs))
        total = torch.stack(parts).sum(0)
        pieces = total.split([math.prod(shape) * (2 if dtype.is_complex else 1) for shape, dtype, _ in ctx.inputs])
        whole = zip(pieces, ctx.inputs, strict=True)
        return None, None, *(_from_real(p, shape, dtype).to(device, dtype) for p, (shape, dtype, device) in whole)
