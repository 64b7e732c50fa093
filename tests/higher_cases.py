"""Modules, data and a loop for the tests of `bda_optim.compat.higher`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import bda_optim.compat.higher as higher


class Net(nn.Module):
    """BatchNorm, a method, an attribute that forward sets, an overridden `train`."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh())
        self.head = nn.Linear(6, 2)
        self.scale = 1.0
        self.calls = 0

    def features(self, x: Tensor) -> Tensor:
        return self.body(x)

    def train(self, mode: bool = True) -> Net:
        super().train(mode)
        self.body[1].eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.head(self.features(x)) * self.scale


def data(n: int = 6) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(n, 4), torch.randn(n, 2)


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))


def stepped(net: nn.Module, opt: Any, steps: int = 3, **settings: Any) -> Any:
    x, y = data()
    with higher.innerloop_ctx(net, opt, **settings) as (fnet, diffopt):
        for _ in range(steps):
            diffopt.step(F.mse_loss(fnet(x), y))
    return fnet, diffopt
