"""Layers whose second derivative is slow or wrong in torch: replaced in a module's twin, or marked to be refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from .._support import torch_private
from .._support.autograd_graph import BeforeMovingConstants, WithoutSecondDerivative
from . import batch_norm, convolution, max_pool, padding, row_norms
from .closed import chosen

_CLOSED: dict[type[nn.Module], Any] = {
    nn.BatchNorm1d: batch_norm.BatchNorm1d,
    nn.BatchNorm2d: batch_norm.BatchNorm2d,
    nn.BatchNorm3d: batch_norm.BatchNorm3d,
    nn.Conv1d: convolution.Conv1d,
    nn.Conv2d: convolution.Conv2d,
    nn.Conv3d: convolution.Conv3d,
    nn.ConvTranspose1d: convolution.ConvTranspose1d,
    nn.ConvTranspose2d: convolution.ConvTranspose2d,
    nn.ConvTranspose3d: convolution.ConvTranspose3d,
    nn.LayerNorm: row_norms.LayerNorm,
    nn.GroupNorm: row_norms.GroupNorm,
    nn.MaxPool2d: max_pool.MaxPool2d,
}
"""The layers with a closed second derivative: torch's class, and that of the twin."""

_OPEN: dict[type[nn.Module], type[nn.Module]] = {
    padding.Embedding: nn.Embedding,
    **{closed: own for own, closed in _CLOSED.items()},
}

_PADDED = -2  # no hook of torch's has this number


def torch_class(kind: type[nn.Module]) -> type[nn.Module]:
    """Return the class of the user's layer, given that of its twin."""
    return _OPEN.get(kind, kind)


def recompose(twin: nn.Module) -> None:
    """Replace what torch differentiates slowly or wrongly the second time, or mark it to be refused."""
    hooks = torch_private.pre_hooks(twin)
    if (own := torch_class(type(twin))) in _CLOSED:
        _close(twin, own)
    if isinstance(twin, nn.Embedding):
        twin.__dict__["sparse"] = False  # the derivative of a sparse gradient is wrong, and only SGD accepts one
        if twin.padding_idx is not None:
            _pad(twin)
    elif isinstance(twin, torch_private.WeightNorm):
        twin.__class__ = _WeightNorm  # type: ignore[assignment]
    elif isinstance(twin, torch_private.SpectralNorm):
        torch_private.replace_pre_hooks(twin, {-1: _mark_input, **hooks})
    if any(isinstance(hook, WeightNorm | SpectralNorm) for hook in hooks.values()):
        torch_private.replace_pre_hooks(twin, {key: _replaced(hook) for key, hook in hooks.items()})


def _close(twin: nn.Module, own: type[nn.Module]) -> None:
    """Give a layer its closed derivative, or torch's own, as was chosen."""
    choice = chosen()
    twin.__class__ = own if choice is False else _CLOSED[own]
    if choice:
        twin.__dict__["closed_from"] = 0
    else:
        twin.__dict__.pop("closed_from", None)


def _pad(twin: nn.Embedding) -> None:
    """Keep `vmap` from giving the row for padding a gradient; what cannot be batched runs task by task."""
    if type(twin) in (nn.Embedding, padding.Embedding):
        twin.__class__ = padding.Embedding
    else:
        hooks = torch_private.pre_hooks(twin)
        torch_private.replace_pre_hooks(twin, {_PADDED: padding.refuse_mapping, **hooks})


def _normalised(g: Tensor, v: Tensor, dim: int) -> Tensor:
    """``g v / |v|``, the norm over all dimensions but `dim`, or over all of them if `dim` is -1.

    torch's fused operation has a wrong second derivative on the CPU, and `vmap` batches `torch.norm_except_dim` slowly,
    with a warning.
    """
    others = [d for d in range(v.dim()) if d != dim]
    norm = torch.linalg.vector_norm(v) if dim == -1 else v.abs()
    if others and dim != -1:
        norm = torch.linalg.vector_norm(v, dim=others, keepdim=True)
    weight: Tensor = v * (g / norm)
    return weight


class _WeightNorm(nn.Module):
    """What the twin of torch's parametrization becomes; its `dim` stays."""

    dim: int

    def forward(self, g: Tensor, v: Tensor) -> Tensor:
        return _normalised(g, v, self.dim)


def _replaced(hook: Any) -> Callable[[nn.Module, Any], None]:
    """Return what takes the place of a hook before a forward pass: the same hook, unless it is one of the two norms."""

    def normalise(module: nn.Module, inputs: Any) -> None:
        g = getattr(module, hook.name + "_g")
        v = getattr(module, hook.name + "_v")
        setattr(module, hook.name, _normalised(g, v, hook.dim))

    def mark(module: nn.Module, inputs: Any) -> None:
        params = torch_private.own_parameters(module)
        name = hook.name + "_orig"
        weight = params[name]
        try:
            params[name] = _Marked.apply(weight) if module.training else weight  # type: ignore[no-untyped-call]
            hook(module, inputs)
        finally:
            params[name] = weight

    if isinstance(hook, WeightNorm):
        return normalise
    return mark if isinstance(hook, SpectralNorm) else hook


def _mark_input(module: nn.Module, inputs: Any) -> Any:
    return tuple(map(_Marked.apply, inputs)) if module.training else inputs


class _Marked(BeforeMovingConstants):
    """The identity before a spectral norm in training mode; it marks the gradient.

    Each forward pass moves the singular vectors towards those of the weight, and torch treats them as constants. If
    they have converged, that is right for a gradient, but not for its derivative (0.1 % off on a toy problem).
    """

    operation = "spectral_norm in training mode"
    alternative = "it in eval mode (that sub-module suffices)"
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
        return _MovingSingularVectors.apply(grad)  # type: ignore[no-untyped-call]


class _MovingSingularVectors(_Marked, WithoutSecondDerivative):
    """The identity in the graph of the gradient."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad
