r"""Clipping of the lower gradient of a parameter group, before the rule sees it.

.. math:: g \leftarrow \max(-v, \min(g, v)), \qquad g \leftarrow g \, \min\big(1, c / (\lVert g \rVert + 10^{-6})\big)

`clip_value` is v, applied to each element; `clip_norm` is c, applied to the norm over all parameters of the group, as
`torch.nn.utils.clip_grad_norm_` does (with tasks: over those of each task). Both are differentiated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .._support.types import Settings
from .gradients import Grads

CLIPPING: Mapping[str, Any] = {"clip_norm": None, "clip_value": None}
"""The settings of a group that clip its gradient, with their defaults."""

_SMALL = 1e-6  # as in torch.nn.utils.clip_grad_norm_


def clip(grads: Grads, settings: Settings, tasks: int | None = None) -> Grads:
    """Return the gradients of a group, clipped as its settings say; values first, then the norm.

    >>> clip([torch.tensor([3.0, 4.0])], {"clip_value": None, "clip_norm": 1.0})
    [tensor([0.6000, 0.8000])]
    """
    value = settings["clip_value"]
    if value is not None:
        grads = [None if g is None else g.clamp(-value, value) for g in grads]
    bound = settings["clip_norm"]
    if bound is None:
        return grads
    norm = _norm([g for g in grads if g is not None], tasks)
    scale = (bound / (norm + _SMALL)).clamp(max=1.0)
    return [None if g is None else g * _spread(scale, g).to(g.dtype) for g in grads]


def check_clipping(settings: Settings) -> None:
    """Raise where a bound is neither None nor positive; the values of tensors are not read."""
    for name in CLIPPING:
        bound = settings[name]
        number = isinstance(bound, int | float) and not isinstance(bound, bool) and bound > 0
        one = isinstance(bound, Tensor) and bound.numel() == 1
        if bound is not None and not (number or one):
            raise ValueError(f"`{name}` must be a positive number, or None for no clipping; got {bound!r}.")


def _norm(grads: Sequence[Tensor], tasks: int | None) -> Tensor:
    """Return the norm over all gradients, of each task if there are several."""
    rows = [g.reshape(tasks or 1, -1) for g in grads]
    parts = [torch.linalg.vector_norm(row, dim=1) for row in rows]
    norm: Tensor = torch.linalg.vector_norm(torch.stack([part.to(parts[0].device) for part in parts]), dim=0)
    return norm


def _spread(scale: Tensor, grad: Tensor) -> Tensor:
    """Give a scale per task (or a single one) the dimensions of a gradient."""
    return scale.to(grad.device).reshape(-1, *[1] * (grad.dim() - 1)) if scale.numel() > 1 else scale[0].to(grad.device)
