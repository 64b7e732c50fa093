"""What the tests of `BDAInnerOptimizer` share: two losses, optimizers, steps, and a comparison."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from installed import attention_kernels
from problems import numbers
from torch import Tensor, nn, optim

import bda_optim as bda

EXACT = {"rtol": 1e-12, "atol": 1e-12}


def lower(net: Any, hyper: Any = None, batch: Any = None) -> Tensor:
    return (net(numbers(5, 3)) - 0.5).square().mean()


def upper(net: Any, hyper: Any = None, batch: Any = None) -> Tensor:
    return (net(numbers(5, 3, seed=2)) - 1).abs().pow(3).mean()


RULES: dict[str, tuple[type[optim.Optimizer], dict[str, Any]]] = {
    "SGD": (optim.SGD, {"lr": 0.1, "momentum": 0.5}),
    "Adam": (optim.Adam, {"lr": 0.05, "amsgrad": True, "weight_decay": 0.1}),
    "AdamW": (optim.AdamW, {"lr": 0.05}),
    "Adamax": (optim.Adamax, {"lr": 0.05}),
    "NAdam": (optim.NAdam, {"lr": 0.05}),
    "RAdam": (optim.RAdam, {"lr": 0.05, "betas": (0.8, 0.9)}),
    "RMSprop": (optim.RMSprop, {"lr": 0.02, "alpha": 0.8, "centered": True, "momentum": 0.6}),
    "Rprop": (optim.Rprop, {"lr": 0.05}),
    "Adagrad": (optim.Adagrad, {"lr": 0.1, "lr_decay": 0.1}),
    "Adadelta": (optim.Adadelta, {}),
    "ASGD": (optim.ASGD, {"lr": 0.1, "lambd": 0.1, "t0": 3.0}),
    "Adafactor": (optim.Adafactor, {"lr": 0.05}),
}
every_rule = pytest.mark.parametrize(("kind", "settings"), RULES.values(), ids=RULES.keys())


def make(model: nn.Module, kind: Any, settings: dict[str, Any], **more: Any) -> bda.BDAInnerOptimizer:
    """A BDAInnerOptimizer with a rule of torch.optim, whose `alpha` is called `rule_alpha`."""
    own = {"rule_alpha" if name == "alpha" else name: value for name, value in settings.items()}
    return bda.BDAInnerOptimizer(model.parameters(), rule=kind, **own, **more)


def descend(model: nn.Module, optimizer: optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        lower(model).backward()
        optimizer.step()


@contextlib.contextmanager
def unchanged(model: nn.Module, inner: bda.BDAInnerOptimizer) -> Iterator[None]:
    """The module, the optimizer and torch's global switches are the same afterwards, to the bit."""

    def objects() -> list[Any]:
        found: list[Any] = [torch.is_grad_enabled(), torch.is_autocast_cache_enabled()]
        found += attention_kernels()
        for t in (*model.parameters(), *model.buffers()):
            found += [id(t), t._version, id(t.grad), t.requires_grad]
        for m in model.modules():
            found += [m.training, [(k, id(v)) for k, v in m.__dict__.items()], list(m._forward_hooks)]
        for group in inner.param_groups:
            found.append({k: v if isinstance(v, int | float | str | bool) else id(v) for k, v in group.items()})
        found += [(id(p), [(k, id(v)) for k, v in s.items()]) for p, s in inner.state.items()]
        return found

    def tensors() -> list[Tensor]:
        held = [v for s in inner.state.values() for v in s.values() if isinstance(v, Tensor)]
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        return [t.detach().clone() for t in (*model.parameters(), *model.buffers(), *held, *grads)]

    before, values = objects(), tensors()
    yield
    assert objects() == before
    assert all(torch.equal(a, b) for a, b in zip(tensors(), values, strict=True))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):  # allowed again
        torch.ones(1, requires_grad=True).exp()
