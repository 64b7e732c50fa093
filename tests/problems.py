"""What several test files share: the paper's counter-example, and finite differences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def double(*values: Any) -> Tensor:
    """A float64 tensor: of one number a scalar, of several a vector."""
    return torch.tensor(values[0] if len(values) == 1 else values, dtype=torch.float64)


def lower(y: Tensor, x: Tensor, batch: Any = None) -> Tensor:
    """The paper's counter-example: no y_2 here, so every y_2 is a lower solution."""
    return 0.5 * y[0] ** 2 - x * y[0]


def upper(y: Tensor, x: Tensor, batch: Any = None) -> Tensor:
    return 0.5 * (x - y[1]) ** 2 + 0.5 * (y[0] - 1) ** 2


def difference_quotients(value: Callable[[], Tensor], leaves: Sequence[Tensor], h: float = 1e-5) -> list[Tensor]:
    """The gradient of `value()` by central differences of fourth order, element by element and without any graph."""
    with torch.no_grad():
        return [_quotients(value, leaf, h) for leaf in leaves]


def _quotients(value: Callable[[], Tensor], leaf: Tensor, h: float) -> Tensor:
    found, flat = torch.zeros_like(leaf), leaf.detach().reshape(-1)
    assert flat.data_ptr() == leaf.data_ptr(), "perturb the leaf itself, not a copy"
    for i in range(flat.numel()):
        middle, values = flat[i].item(), {}
        for shift in (-2, -1, 1, 2):
            flat[i] = middle + shift * h
            values[shift] = float(value())
        flat[i] = middle
        found.reshape(-1)[i] = (8 * (values[1] - values[-1]) - (values[2] - values[-2])) / (12 * h)
    return found


def relative_error(got: Sequence[Tensor], want: Sequence[Tensor]) -> float:
    """The distance of two lists of tensors, over the norm of the second, which must not vanish."""
    got_flat, want_flat = (torch.cat([t.detach().reshape(-1) for t in tensors]) for tensors in (got, want))
    assert want_flat.norm() > 1e-8, "a comparison with nothing proves nothing"
    return float((got_flat - want_flat).norm() / want_flat.norm())
