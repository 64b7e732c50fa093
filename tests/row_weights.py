"""Rows with learned weights: a lower problem whose batches can be cut into parts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

ROWS = 12
D = torch.float64


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=D, generator=torch.Generator().manual_seed(seed))


def batches(steps: int) -> list[Any]:
    return [(torch.arange(ROWS), draw(ROWS, 3, seed=k), draw(ROWS, 2, seed=10 + k)) for k in range(steps)]


Y0 = {"w": 0.3 * draw(3, 2, seed=20), "b": torch.zeros(2, dtype=D)}
FIRST = batches(1)[0]


def lower(y: Any, x: Any, batch: Any) -> Tensor:
    rows, inputs, targets = batch
    residuals = torch.tanh(inputs @ y["w"] + y["b"]) - targets
    return (torch.sigmoid(x["rows"][rows]) * residuals.square().sum(-1)).mean()


def upper(y: Any, x: Any, batch: Any) -> Tensor:
    _, inputs, targets = FIRST if batch is None else batch
    return (torch.tanh(inputs @ y["w"] + y["b"]) - x["rows"].mean() * targets.cos()).square().mean()
