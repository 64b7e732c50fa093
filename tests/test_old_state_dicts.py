"""A state_dict that lacks settings, as one written before they existed, is completed with their defaults."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from problems import mlp, numbers
from torch import Tensor, nn, optim

import bda_optim as bda

pytestmark = pytest.mark.usefixtures("doubles")

X, Y = numbers(6, 3), numbers(6, 2, seed=2)


def loss(net: nn.Module) -> Tensor:
    return (net(X) - Y).square().mean()


def step(model: nn.Module, opt: optim.Optimizer) -> list[Tensor]:
    opt.zero_grad()
    loss(model).backward()
    opt.step()
    return [p.detach().clone() for p in model.parameters()]


def without(state_dict: dict[str, Any], *names: str) -> dict[str, Any]:
    groups = [{key: value for key, value in group.items() if key not in names} for group in state_dict["param_groups"]]
    return {**state_dict, "param_groups": groups}


def fresh() -> nn.Module:
    torch.manual_seed(0)
    return mlp()


@pytest.mark.parametrize(
    "rule, missing, settings",
    [
        (None, ("maximize", "nesterov", "dampening", "weight_decay"), {"momentum": 0.9}),
        (None, ("momentum", "upper_lr", "k"), {"weight_decay": 0.1}),
        (optim.Adam, ("amsgrad", "maximize", "decoupled_weight_decay", "weight_decay"), {"betas": (0.8, 0.9)}),
        (optim.RMSprop, ("maximize", "centered", "momentum"), {"rule_alpha": 0.9}),
    ],
    ids=str,
)
def test_missing_settings_get_their_defaults(rule: Any, missing: tuple[str, ...], settings: dict[str, Any]) -> None:
    """As torch's optimizers do: what the optimizer that loads had before does not count."""
    model = fresh()
    first = bda.BDAInnerOptimizer(model.parameters(), lr=0.1, rule=rule, **settings)
    step(model, first)
    packed = without(first.state_dict(), *missing)
    other = fresh()
    other.load_state_dict(model.state_dict())
    second = bda.BDAInnerOptimizer(other.parameters(), lr=0.5, weight_decay=0.7, rule=rule)
    second.load_state_dict(packed)
    assert second.param_groups[0].keys() == first.param_groups[0].keys()
    for _ in range(2):
        torch.testing.assert_close(step(other, second), step(model, first), rtol=0, atol=0)
    fmodel = second.unroll(other, lambda net, hyper, batch: loss(net), steps=1)
    assert len(fmodel.params) == 4


def test_the_defaults_are_those_of_torch() -> None:
    results = []
    for make in (optim.SGD, bda.BDAInnerOptimizer):
        model = fresh()
        opt: Any = make(model.parameters(), lr=0.1, momentum=0.5, nesterov=True)
        packed = without(opt.state_dict(), "maximize", "nesterov")
        opt.load_state_dict(packed)
        assert opt.param_groups[0]["nesterov"] is False and opt.param_groups[0]["maximize"] is False
        step(model, opt)
        results.append(step(model, opt))
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-14)


def test_what_is_never_written_stays() -> None:
    model = fresh()
    prox = bda.prox.l1(0.1)
    inner = bda.BDAInnerOptimizer(model.parameters(), lr=0.1, alpha=lambda k: 0.5 / k, prox=prox)
    alpha = inner.param_groups[0]["alpha"]
    inner.load_state_dict(without(inner.state_dict(), "maximize"))
    assert inner.param_groups[0]["prox"] is prox and inner.param_groups[0]["alpha"] is alpha
