"""Rules of torchopt beside ours, networks, and one problem that both libraries solve."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from problems import mlp
from torch import Tensor, nn, optim
from torch.nn.attention import SDPBackend, sdpa_kernel

import bda_optim as bda

torchopt = pytest.importorskip("torchopt")

STEPS = 5


# torchopt's name of a rule -> the settings that it and torch.optim share, torch's class, settings of each alone.
# `initial_scale` and Adadelta's eps keep derivatives of roots moderate: torchopt's are not safe at 0.
Case = tuple[Callable[..., Any], type[optim.Optimizer], dict[str, Any]]
RULES: dict[str, Case] = {
    "sgd": (torchopt.sgd, optim.SGD, {"lr": 0.1}),
    "sgd_weight_decay": (torchopt.sgd, optim.SGD, {"lr": 0.1, "weight_decay": 0.1}),
    "sgd_maximize": (torchopt.sgd, optim.SGD, {"lr": 0.01, "weight_decay": 0.1, "maximize": True}),
    "sgd_momentum": (torchopt.sgd, optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.05}),
    "sgd_nesterov": (torchopt.sgd, optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    "adam": (torchopt.adam, optim.Adam, {"lr": 0.01, "betas": (0.8, 0.95)}),
    "adam_weight_decay": (torchopt.adam, optim.Adam, {"lr": 0.01, "weight_decay": 0.1}),
    "adamw": (torchopt.adamw, optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "adamax": (torchopt.adamax, optim.Adamax, {"lr": 0.01, "eps": 1e-6}),
    "adagrad": (torchopt.adagrad, optim.Adagrad, {"lr": 0.02, "lr_decay": 0.1, "initial_accumulator_value": 0.1}),
    "adadelta": (torchopt.adadelta, optim.Adadelta, {"lr": 0.5, "rho": 0.9, "eps": 1e-4}),
    "rmsprop": (torchopt.rmsprop, optim.RMSprop, {"lr": 0.005, "alpha": 0.9, "eps": 1e-4}),
    "rmsprop_centered": (
        torchopt.rmsprop,
        optim.RMSprop,
        {"lr": 0.005, "centered": True, "momentum": 0.9, "eps": 1e-2},
    ),
    "radam": (torchopt.radam, optim.RAdam, {"lr": 0.01, "betas": (0.9, 0.6), "eps": 1e-6}),
}


def theirs(name: str, **changes: Any) -> Any:
    factory, _, settings = RULES[name]
    return factory(**{**settings, **changes})


def ours(name: str) -> dict[str, Any]:
    """The keyword arguments of BDAInnerOptimizer that mean the same, with our own rule."""
    _, kind, settings = RULES[name]
    return {"rule": kind, **{"rule_alpha" if key == "alpha" else key: value for key, value in settings.items()}}


# --- networks ---------------------------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x.reshape(len(x), 4, 3))[0][:, -1])


class Attentive(nn.Module):
    """Without biases: those of the keys have gradients that are rounding errors, on which Adam is chaotic."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, activation="gelu", batch_first=True, bias=False)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x.reshape(len(x), 3, 4)).mean(1))


def convolutional() -> nn.Module:
    conv = nn.Conv2d(1, 3, 2, bias=False)
    return nn.Sequential(nn.Unflatten(1, (1, 3, 4)), conv, nn.BatchNorm2d(3), nn.Tanh(), nn.Flatten(), nn.Linear(18, 2))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: mlp(12, 6, 2),
    "conv_batchnorm": convolutional,
    "lstm": Recurrent,
    "transformer": Attentive,
}


class Problem:
    """Training data whose samples are weighted by x (the upper variables), and clean data."""

    def __init__(self, network: str = "mlp") -> None:
        torch.manual_seed(1)
        self.net = NETWORKS[network]()
        self.x = (0.3 * torch.randn(8)).requires_grad_()
        self.data = torch.randn(2, 8, 12), torch.randn(2, 8, 2)

    def lower(self, net: Callable[[Tensor], Tensor], x: Tensor, batch: Any = None) -> Tensor:
        return (x.exp() * (net(self.data[0][0]) - self.data[1][0]).square().sum(1)).mean()

    def upper(self, net: Callable[[Tensor], Tensor], x: Any = None, batch: Any = None) -> Tensor:
        return (net(self.data[0][1]) - self.data[1][1]).square().mean()


Outcome = tuple[list[Tensor], list[Tensor]]


def with_torchopt(problem: Problem, impl: Any, *more: Tensor, steps: int = STEPS) -> Outcome:
    """y_K, and the derivatives of F(y_K) by x, by y_0 and by what else is given, all by torchopt's MetaOptimizer."""
    net = copy.deepcopy(problem.net)
    start = [*net.parameters()]
    optimizer = torchopt.MetaOptimizer(net, impl)
    with sdpa_kernel(SDPBackend.MATH):  # the other kernels have no second derivative
        for _ in range(steps):
            optimizer.step(problem.lower(net, problem.x))
        grads = torch.autograd.grad(problem.upper(net), [problem.x, *start, *more])
    return [*net.parameters()], list(grads)


def unrolled(problem: Problem, *more: Tensor, steps: int = STEPS, adjoint: Any = None, **settings: Any) -> Outcome:
    """The same by `unroll`."""
    inner = bda.BDAInnerOptimizer(problem.net.parameters(), **settings)
    fmodel = inner.unroll(
        problem.net, problem.lower, hyper=problem.x, steps=steps, adjoint=adjoint, copy_initial_weights=False
    )
    wanted = [problem.x, *problem.net.parameters(), *more]
    grads = torch.autograd.grad(problem.upper(fmodel), wanted, allow_unused=True, materialize_grads=True)
    return [*fmodel.params.values()], list(grads)


def error(got: Outcome, want: Outcome) -> float:
    """The largest difference of iterates and derivatives, relative to the largest number of each kind."""
    found = []
    for mine, other in zip(got, want, strict=True):
        a, b = (torch.cat([t.detach().flatten() for t in tensors]) for tensors in (mine, other))
        assert torch.isfinite(b).all() and b.abs().max() > 1e-6, "a comparison with nothing proves nothing"
        found.append(float((a - b).abs().max() / b.abs().max()))
    return max(found)
