"""Questions about tensors."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .torch_private import version_of
from .tree import tensors


def is_differentiable(tensor: Tensor) -> bool:
    """Whether a tensor's dtype can carry a gradient at all."""
    return tensor.is_floating_point() or tensor.is_complex()


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor, distributed over several ranks."""
    module = sys.modules.get("torch.distributed.tensor")  # not imported here: that takes two seconds
    return module is not None and isinstance(tensor, module.DTensor)


def refuse_sharded(name: str, tensor: Tensor) -> None:
    """Raise if a tensor is distributed over several ranks: an inner loop computes with plain tensors."""
    if is_sharded(tensor):
        raise TypeError(
            f"an inner loop cannot compute with a DTensor, such as a parameter after `fully_shard`; got {name}. Use a "
            "plain copy of the module, `bda_optim.distributed.Averager(module, local=copy)`, or `tensor.full_tensor()`."
        )


def describe(tensor: Tensor) -> str:
    """Describe a tensor for messages: shape, dtype and device."""
    shape = "x".join(map(str, tensor.shape)) or "scalar"
    return f"{shape} {str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"


def layout(tensor: Tensor) -> tuple[Any, ...]:
    """Return everything about a tensor that a compiled program depends on, except its values."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad


def any_requires_grad(tree: Any) -> bool:
    """Whether grad mode is on and some tensor of the tree requires grad."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors(tree))


def broadcasts(shape: Sequence[int], target: Sequence[int]) -> bool:
    """Whether a tensor of that shape broadcasts to the shape `target`, and not both to a larger one."""
    pairs = zip(reversed(shape), reversed(target), strict=False)
    return len(shape) <= len(target) and all(size in (1, wanted) for size, wanted in pairs)


def refuse_changed(names: Sequence[str], values: Sequence[Tensor], versions: Sequence[int]) -> None:
    """Raise if a tensor has been changed in place since its version was recorded."""
    for name, tensor, before in zip(names, values, versions, strict=True):
        if version_of(tensor) != before:
            raise RuntimeError(
                f"a loss must not change its arguments in place; got {name} ({describe(tensor)}), which was changed "
                "inside the inner loop. No derivative sees such a change: return a changed copy instead, or use a "
                "proximal map, such as `prox.box(low, high)` for a clamp."
            )
