"""What several test files share: tensors, a network, the counter-example, finite differences, a look at garbage."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bda_optim as bda

TIGHT = {"rtol": 1e-10, "atol": 1e-13}
"""Tolerances of two computations of the same number in float64."""

EXACT = [bda.Unroll(), bda.Checkpointed(), bda.Checkpointed(slots=2), bda.ForwardMode()]
"""An adjoint of each kind that gives the exact derivative."""

exact = pytest.mark.parametrize("adjoint", EXACT, ids=str)


DTYPE = getattr(torch, os.environ.get("BDA_DTYPE", "float64"))
"""The dtype of exact tests; `tests.device` chooses float32 for a device that has no float64."""


def double(*values: Any) -> Tensor:
    """A float64 tensor: of one number a scalar, of several a vector."""
    return torch.tensor(values[0] if len(values) == 1 else values, dtype=DTYPE)


def leaf(*values: Any) -> Tensor:
    """A float64 tensor that requires grad."""
    return double(*values).requires_grad_()


def numbers(*shape: int, seed: int = 1) -> Tensor:
    """Normal numbers in float64, the same at every call."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def mlp(*sizes: int) -> nn.Sequential:
    """Two linear layers with tanh between them; by default of 3, 4 and 2 units."""
    first, hidden, last = sizes or (3, 4, 2)
    return nn.Sequential(nn.Linear(first, hidden), nn.Tanh(), nn.Linear(hidden, last))


START = double(2.0, 2.0)
"""Where the tests start on the counter-example."""


def lower(y: Tensor, x: Tensor, batch: Any = None) -> Tensor:
    """The paper's counter-example: no y_2 here, so every y_2 is a lower solution."""
    return 0.5 * y[0] ** 2 - x * y[0]


def upper(y: Tensor, x: Tensor, batch: Any = None) -> Tensor:
    return 0.5 * (x - y[1]) ** 2 + 0.5 * (y[0] - 1) ** 2


def run(lower: Any = lower, upper: Any = upper, hyper: Any = None, **options: Any) -> bda.Hypergradient:
    """The hypergradient of the counter-example through three steps of BDA; losses and options may be replaced."""
    hyper = double(0.3) if hyper is None else hyper
    defaults = {"params": START, "steps": 3, "lr": 0.2, "upper_lr": 0.7, "alpha": bda.harmonic(0.5)}
    return bda.hypergradient(lower, upper, hyper=hyper, **{**defaults, **options})


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


@contextlib.contextmanager
def no_collector() -> Iterator[Callable[[], list[Any]]]:
    """Switch the garbage collector off; what is yielded returns what only it could have freed since the last look.

    What exists at the start is frozen: a collection would visit the half million objects of torch every time.
    """

    def look() -> list[Any]:
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        garbage, gc.garbage[:] = list(gc.garbage), []
        gc.set_debug(0)
        return garbage

    gc.collect()
    gc.disable()
    gc.freeze()
    try:
        yield look
    finally:
        gc.unfreeze()
        gc.enable()
