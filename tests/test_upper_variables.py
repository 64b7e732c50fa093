"""The upper variables of a module: a backbone, y_0, another module, the anchor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from problems import TIGHT, numbers
from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module
from zoo import Backboned, K, cubic, square, untouched

import bda_optim as bda

pytestmark = pytest.mark.usefixtures("doubles")


@pytest.mark.parametrize("adjoint", [bda.Unroll(), bda.Checkpointed(), bda.ForwardMode()], ids=type)
def test_parameters_that_the_optimizer_does_not_own_are_upper_variables(adjoint: Any) -> None:
    module = Backboned()
    inner = bda.BDAInnerOptimizer(module.head.parameters(), lr=0.3, upper_lr=0.1, alpha=0.2)
    fmodel = inner.unroll(module, square, cubic, steps=K, adjoint=adjoint)
    assert list(fmodel.params) == ["head.weight", "head.bias"]
    cubic(fmodel, None, None).backward()
    assert all(p.grad is None for p in (*module.head.parameters(), *module.frozen.parameters()))
    weight = module.backbone.weight
    found, eps, numeric = weight.grad, 1e-6, torch.zeros(4, 3)
    for i in range(2):
        ends = []
        for sign in (1, -1):
            with torch.no_grad():
                weight[i, i] += sign * eps
                ends.append(cubic(inner.unroll(module, square, cubic, steps=K), None, None))
                weight[i, i] -= sign * eps
        numeric[i, i] = (ends[0] - ends[1]) / (2 * eps)
        torch.testing.assert_close(found[i, i], numeric[i, i], rtol=1e-6, atol=1e-10)
    assert module.backbone.bias.grad.abs().sum() > 0


def test_initial_weights_are_copied_or_reached() -> None:
    module = Backboned()
    inner = bda.BDAInnerOptimizer(module.head.parameters(), lr=0.3)
    y0 = {name: p for name, p in module.named_parameters() if name.startswith("head")}
    fixed = inner.unroll(module, square, steps=K)
    cubic(fixed, None, None).backward()
    assert all(p.grad is None for p in y0.values())
    module.zero_grad()
    live = inner.unroll(module, square, steps=K, copy_initial_weights=False)
    torch.testing.assert_close(live.params, fixed.params, rtol=0, atol=0)
    cubic(live, None, None).backward()
    found = {name: p.grad for name, p in y0.items()}

    def phi(weight: Tensor, bias: Tensor) -> Tensor:
        params = [weight, bias]
        features = module.frozen(torch.tanh(module.backbone(numbers(4, 3)))).detach()
        for _ in range(K):
            f = (F.linear(features, *params) - 0.5).square().mean()
            grads = torch.autograd.grad(f, params, create_graph=True)
            params = [p - 0.3 * g for p, g in zip(params, grads, strict=True)]
        features = module.frozen(torch.tanh(module.backbone(numbers(4, 3, seed=2)))).detach()
        return (F.linear(features, *params) - 1).abs().pow(3).mean()

    expected = torch.autograd.grad(phi(*y0.values()), list(y0.values()))
    torch.testing.assert_close(list(found.values()), list(expected), **TIGHT)


def test_an_owned_parameter_in_hyper_is_the_anchor() -> None:
    """The proximal term of iMAML: |y - y_0|^2 with y_0 an upper variable, while the start of the loop is a constant."""
    module, strength = nn.Linear(3, 2, bias=False), 0.7
    inner = bda.BDAInnerOptimizer(module.parameters(), lr=0.2)
    x = numbers(4, 3)

    def lower(net: Any, hyper: Any, batch: Any) -> Tensor:
        return net(x).square().mean() + strength * (net.weight - hyper["anchor"]).square().sum()

    def upper(net: Any, hyper: Any, batch: Any) -> Tensor:
        return (net(x) - 1).square().mean()

    for adjoint in (bda.Unroll(), bda.Checkpointed(), bda.ForwardMode()):
        module.zero_grad()
        fmodel = inner.unroll(module, lower, hyper={"anchor": module.weight}, steps=K, adjoint=adjoint)
        upper(fmodel, None, None).backward()
        anchor = module.weight.detach().clone().requires_grad_()
        y = module.weight.detach().clone().requires_grad_()
        for _ in range(K):
            f = (x @ y.T).square().mean() + strength * (y - anchor).square().sum()
            y = y - 0.2 * torch.autograd.grad(f, y, create_graph=True)[0]
        (expected,) = torch.autograd.grad((x @ y.T - 1).square().mean(), anchor)
        torch.testing.assert_close(fmodel.weight, y, **TIGHT)
        torch.testing.assert_close(module.weight.grad, expected, **TIGHT)


@pytest.mark.parametrize("adjoint", [bda.Unroll(), bda.Checkpointed()], ids=type)
def test_hyper_may_be_a_module(adjoint: Any) -> None:
    """A network that weights the examples, with batch normalisation in it."""
    module = nn.Linear(3, 1)
    weigh = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
    x, y = numbers(6, 3), numbers(6, 1, seed=4)
    inner = bda.BDAInnerOptimizer(module.parameters(), lr=0.2)
    shown: list[Any] = []

    def lower(net: Any, hyper: Any, batch: Any) -> Tensor:
        shown.append(hyper["net"])
        return (hyper["net"](x).sigmoid() * (net(x) - y).square()).mean() * hyper["scale"]

    def upper(net: Any, hyper: Any, batch: Any) -> Tensor:
        return (net(x) - 1).square().mean()

    scale = torch.tensor(1.5, requires_grad=True)
    with untouched(module, weigh):
        fmodel = inner.unroll(module, lower, upper, hyper={"net": weigh, "scale": scale}, steps=K, adjoint=adjoint)
        assert all(net is not weigh and type(net) is type(weigh) for net in shown)
        grads = torch.autograd.grad(upper(fmodel, None, None), [*weigh.parameters(), scale])
    params = [module.weight, module.bias]
    for _ in range(K):
        with _reparametrize_module(weigh, {name: b.clone() for name, b in weigh.named_buffers()}):
            weights = weigh(x).sigmoid()
        f = (weights * (F.linear(x, *params) - y).square()).mean() * scale
        steps = torch.autograd.grad(f, params, create_graph=True)
        params = [p - 0.2 * g for p, g in zip(params, steps, strict=True)]
    expected = torch.autograd.grad((F.linear(x, *params) - 1).square().mean(), [*weigh.parameters(), scale])
    torch.testing.assert_close(grads, expected, **TIGHT)


@pytest.mark.parametrize("adjoint", [bda.Unroll(), bda.Checkpointed()], ids=type)
def test_a_tensor_in_several_places_counts_once(adjoint: Any) -> None:
    """The module itself as hyper: its backbone acts inside the net and beside it, its head is the anchor."""
    module = Backboned()
    inner = bda.BDAInnerOptimizer(module.head.parameters(), lr=0.3)
    x = numbers(4, 3)

    def lower(net: Any, hyper: Any, batch: Any) -> Tensor:
        pull = sum((p - q).square().sum() for p, q in zip(net.head.parameters(), hyper.head.parameters(), strict=True))
        return (net(x) - hyper.backbone(x)[:, :2]).square().mean() + pull

    fmodel = inner.unroll(module, lower, hyper=module, steps=K, adjoint=adjoint)
    cubic(fmodel, None, None).backward()
    found = [p.grad for p in module.parameters() if p.requires_grad]
    anchor = [module.head.weight, module.head.bias]
    params = [p.detach().clone().requires_grad_() for p in anchor]

    def features(x: Tensor) -> Tensor:
        return module.frozen(torch.tanh(module.backbone(x)))

    for _ in range(K):
        pull = sum((p - q).square().sum() for p, q in zip(params, anchor, strict=True))
        f = (F.linear(features(x), *params) - module.backbone(x)[:, :2]).square().mean() + pull
        steps = torch.autograd.grad(f, params, create_graph=True)
        params = [p - 0.3 * g for p, g in zip(params, steps, strict=True)]
    value = (F.linear(features(numbers(4, 3, seed=2)), *params) - 1).abs().pow(3).mean()
    expected = torch.autograd.grad(value, [p for p in module.parameters() if p.requires_grad])
    torch.testing.assert_close(found, list(expected), **TIGHT)
