"""Layers whose second derivative is wrong in torch: replaced in a module's twin, or marked for `autograd_graph`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm


class _Composed(nn.Module):
    """Weight normalisation written out: torch's fused one has a wrong second derivative on the CPU."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, g: Tensor, v: Tensor) -> Tensor:
        # Not `torch.norm_except_dim`, which vmap batches slowly, with a warning.
        others = [d for d in range(v.dim()) if d != self.dim]
        norm = torch.linalg.vector_norm(v) if self.dim == -1 else v.abs()
        if others and self.dim != -1:
            norm = torch.linalg.vector_norm(v, dim=others, keepdim=True)
        weight: Tensor = v * (g / norm)
        return weight


def recompose(twin: nn.Module) -> None:
    """Replace what torch differentiates wrongly the second time, or make it known to `autograd_graph`."""
    if isinstance(twin, nn.Embedding):
        twin.__dict__["sparse"] = False  # a sparse gradient has wrong derivatives in turn, and only SGD takes it
    for name, child in twin._modules.items():
        if isinstance(child, parametrizations._WeightNorm):
            twin._modules[name] = _Composed(child.dim)
        elif isinstance(child, parametrizations._SpectralNorm):
            child.__dict__["_forward_pre_hooks"] = OrderedDict({-1: _mark_input, **child._forward_pre_hooks})
    hooks = twin.__dict__["_forward_pre_hooks"]
    if any(isinstance(hook, WeightNorm | SpectralNorm) for hook in hooks.values()):
        twin.__dict__["_forward_pre_hooks"] = {key: _hook(hook) for key, hook in hooks.items()}


def _hook(hook: Any) -> Callable[[nn.Module, Any], None]:
    def normalise(module: nn.Module, inputs: Any) -> None:
        g, v = getattr(module, hook.name + "_g"), getattr(module, hook.name + "_v")
        setattr(module, hook.name, _Composed(hook.dim)(g, v))

    def mark(module: nn.Module, inputs: Any) -> None:
        own, name = module._parameters, hook.name + "_orig"
        weight = own[name]
        try:
            own[name] = _Marked.apply(weight) if module.training else weight  # type: ignore[no-untyped-call]
            hook(module, inputs)
        finally:
            own[name] = weight

    if isinstance(hook, WeightNorm):
        return normalise
    return mark if isinstance(hook, SpectralNorm) else hook


def _mark_input(module: nn.Module, inputs: Any) -> Any:
    return tuple(map(_Marked.apply, inputs)) if module.training else inputs


class _Marked(torch.autograd.Function):
    """The identity before a spectral norm in training mode; `autograd_graph` recognises the node of its gradient.

    Each forward pass moves the singular vectors towards those of the weight, and torch takes them as constants: right
    for a gradient, if they have converged, but not for the derivative of that gradient (off by 0.1 % on a toy).
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(weight: Tensor) -> Tensor:
        return weight.view_as(weight)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        pass

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        return tangent.view_as(tangent)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return MovingSingularVectors.apply(grad)  # type: ignore[no-untyped-call]


class MovingSingularVectors(_Marked):
    """The identity again; the name of its node is in `autograd_graph`."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Pass on."""
        return grad
