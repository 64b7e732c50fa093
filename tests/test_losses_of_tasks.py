"""`fmodel.losses` after a compiled rollout: traced where that is the same, called where it would not be."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch._inductor
from problems import numbers
from torch import Tensor, nn

import bda_optim as bda
from bda_optim._compiled import cache, losses

pytestmark = [
    pytest.mark.usefixtures("doubles"),
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
]
TASKS = 3
BATCH = {"x": numbers(TASKS, 4, 2), "y": numbers(TASKS, 4, 1, seed=5)}
QUERY = {"x": numbers(TASKS, 5, 2, seed=6), "y": numbers(TASKS, 5, 1, seed=7)}


@pytest.fixture(autouse=True)
def _traced(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Iterator[None]:
    """Run traced graphs as they are: compiling takes seconds."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch._inductor, "compile", lambda graph, inputs, options: graph)
    yield
    cache._engines.clear()


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> mock.Mock:
    """Counts the losses that came from a trace."""
    counted = mock.Mock(wraps=losses.TracedLosses.apply)
    monkeypatch.setattr(losses.TracedLosses, "apply", counted)
    return counted


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))


def loss(net: Any, hyper: Any, batch: Any) -> Tensor:
    weight = 1.0 if hyper is None else hyper["weight"].exp()
    return weight * (net(batch["x"]) - batch["y"]).square().mean()


def adapted(module: nn.Module, hyper: Any, loss: Any = loss, **options: Any) -> Any:
    inner = bda.BDAInnerOptimizer(module.parameters(), lr=0.1)
    options = {"steps": 2, "batches": [BATCH] * 2, "tasks": TASKS, "copy_initial_weights": False} | options
    return inner.unroll(module, loss, hyper=hyper, **options)


def both(function: Any, hyper: Any, *, module: Any = None, order: int = 1, other: Any = None) -> list[list[Tensor]]:
    """Losses and their derivatives, without and with a compiled rollout."""
    module = module or model()
    by = [*module.parameters(), *([] if hyper is None else hyper.values()), *([] if other is None else [other])]
    found = []
    for compile in (False, True):
        values = adapted(module, hyper, function, compile=compile).losses(function, hyper, QUERY)
        grads = torch.autograd.grad(values.square().sum(), by, create_graph=order == 2, allow_unused=True)
        if order == 2:
            ends = sum(g.square().sum() for g in grads if g is not None)
            grads = (*grads, *torch.autograd.grad(ends, by, allow_unused=True))
        found.append([values.detach(), *(g.detach() for g in grads if g is not None)])
    return found


def assert_same(found: list[list[Tensor]]) -> None:
    assert len(found[0]) == len(found[1]) > 2
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("upper", [False, True], ids=["no hyper", "hyper"])
@pytest.mark.parametrize("order", [1, 2])
def test_values_and_derivatives_are_those_of_the_loss(upper: bool, order: int, traces: mock.Mock) -> None:
    hyper = {"weight": torch.tensor(0.3, requires_grad=True)} if upper else None
    assert_same(both(loss, hyper, order=order))
    assert traces.called


def test_derivatives_agree_with_differences(traces: mock.Mock) -> None:
    weight = torch.tensor(0.3, requires_grad=True)

    def value(weight: Tensor) -> Tensor:
        return adapted(model(), {"weight": weight}, compile=True).losses(loss, {"weight": weight}, QUERY)

    assert torch.autograd.gradcheck(value, weight)
    assert traces.called


def test_a_loss_is_traced_once(traces: mock.Mock) -> None:
    calls = itertools.count()

    def counted(net: Any, hyper: Any, batch: Any) -> Tensor:
        next(calls)
        return loss(net, hyper, batch)

    module = model()
    adapted(module, None, counted, compile=True).losses(counted, None, QUERY)
    before = next(calls)
    adapted(module, None, counted, compile=True).losses(counted, None, QUERY)
    assert traces.call_count == 2 and next(calls) == before + 1  # it was not called again


def test_what_has_no_gradient_has_none(traces: mock.Mock) -> None:
    def stopped(net: Any, hyper: Any, batch: Any) -> Tensor:
        with torch.no_grad():
            scale = net(batch["x"]).square().mean()
        return scale * loss(net, hyper, batch) + net(batch["x"]).detach().mean()

    assert_same(both(stopped, None))
    assert traces.called


def test_a_tensor_of_the_closure_that_requires_grad_keeps_its_gradient(traces: mock.Mock) -> None:
    weight = torch.tensor(0.7, requires_grad=True)

    def outside(net: Any, hyper: Any, batch: Any) -> Tensor:
        return loss(net, {"weight": hyper["weight"]}, batch)

    def captured(net: Any, hyper: Any, batch: Any) -> Tensor:
        return weight * loss(net, None, batch)

    found = []
    for compile in (False, True):
        fmodel = adapted(model(), {"weight": weight}, outside, compile=compile)
        fmodel.__dict__["_traced"] = (captured,)
        found.append(torch.autograd.grad(fmodel.losses(captured, None, QUERY).sum(), weight))
    torch.testing.assert_close(*found)
    assert not traces.called


def test_a_parameter_that_is_not_adapted_keeps_its_gradient(traces: mock.Mock) -> None:
    """A backbone that the upper level learns."""
    module = model()
    found = []
    for compile in (False, True):
        inner = bda.BDAInnerOptimizer(module[2].parameters(), lr=0.1)
        options = {"steps": 2, "batches": [BATCH] * 2, "tasks": TASKS, "hyper": module[0]}
        lower = lambda net, hyper, batch: loss(net, None, batch)  # noqa: E731
        fmodel = inner.unroll(module, lower, compile=compile, **options)
        found.append(torch.autograd.grad(fmodel.losses(lower, module[0], QUERY).sum(), list(module[0].parameters())))
    assert_same([list(grads) * 2 for grads in found])
    assert not traces.called


@pytest.mark.parametrize("kind", ["buffers", "random numbers", "no gradient", "another loss"])
def test_what_is_not_traced_is_called(kind: str, traces: mock.Mock) -> None:
    module = model()
    function: Any = loss
    if kind == "buffers":
        module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    elif kind == "random numbers":
        function = lambda net, hyper, batch: loss(net, hyper, batch) * (1 + torch.rand(()))  # noqa: E731
    fmodel = adapted(module, None, function, compile=True)
    other = (lambda net, hyper, batch: loss(net, hyper, batch)) if kind == "another loss" else function
    with torch.set_grad_enabled(kind != "no gradient"):
        assert fmodel.losses(other, None, QUERY).shape == (TASKS,)
    assert not traces.called


def test_changes_between_two_calls_are_seen(traces: mock.Mock) -> None:
    """Of the mode, of a tensor in the closure, of the structure of a batch, and of hooks."""
    scale = torch.tensor(2.0)
    module = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))

    def scaled(net: Any, hyper: Any, batch: Any) -> Tensor:
        factor = 3.0 if net.training else 1.0
        return factor * scale * batch.get("also", 1.0) * (net(batch["x"]) - batch["y"]).square().mean()

    fmodel = adapted(module, None, scaled, compile=True)
    first = fmodel.losses(scaled, None, QUERY).detach()
    scale.mul_(2)
    torch.testing.assert_close(fmodel.losses(scaled, None, QUERY).detach(), 2 * first)
    torch.testing.assert_close(fmodel.losses(scaled, None, {**QUERY, "also": 5.0}).detach(), 10 * first)
    fmodel.eval()
    torch.testing.assert_close(fmodel.losses(scaled, None, QUERY).detach(), 2 * first / 3)
    before = fmodel.losses(scaled, None, QUERY).detach()
    fmodel[2].register_forward_hook(lambda module, inputs, output: output + 1)
    assert not torch.allclose(fmodel.losses(scaled, None, QUERY).detach(), before)
    assert traces.call_count == 6


def test_a_tensor_of_the_closure_that_is_changed_before_the_backward_pass() -> None:
    scale = torch.tensor(2.0)

    def scaled(net: Any, hyper: Any, batch: Any) -> Tensor:
        return scale * loss(net, hyper, batch)

    module = model()
    values = adapted(module, None, scaled, compile=True).losses(scaled, None, QUERY)
    scale.add_(1)
    with pytest.raises(RuntimeError, match="was changed in place"):
        torch.autograd.grad(values.sum(), list(module.parameters()))


def test_a_loss_that_raises_says_so_itself() -> None:
    def fragile(net: Any, hyper: Any, batch: Any) -> Tensor:
        if "x" not in batch:
            raise KeyError("no x here")
        return loss(net, hyper, batch)

    fmodel = adapted(model(), None, fragile, compile=True)
    with pytest.raises(KeyError, match="no x here"):
        fmodel.losses(fragile, None, {"y": QUERY["y"]})
    assert fmodel.losses(fragile, None, QUERY).shape == (TASKS,)
