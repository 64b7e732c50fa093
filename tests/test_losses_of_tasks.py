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
from torch.autograd import forward_ad

import bda_optim as bda
from bda_optim._compiled import cache, losses
from bda_optim._support import torch_private

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


# What a program depends on.


def compared(module: nn.Module, function: Any, **options: Any) -> list[Tensor]:
    """The losses after a rollout: uncompiled, and compiled."""
    return [adapted(module, None, function, compile=c, **options).losses(function, None, QUERY) for c in (False, True)]


def test_the_order_of_the_parameters() -> None:
    module = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Tanh(), nn.Linear(2, 2, bias=False))
    found = []
    for order in ((0, 2), (2, 0)):
        for compile in (False, True):
            inner = bda.BDAInnerOptimizer([module[i].weight for i in order], lr=0.1)
            options = {"steps": 2, "batches": [BATCH] * 2, "tasks": TASKS, "copy_initial_weights": False}
            found.append(inner.unroll(module, loss, compile=compile, **options).losses(loss, None, QUERY))
    for other in found[1:]:
        torch.testing.assert_close(found[0], other)


def test_a_module_that_changes_beside_its_twin() -> None:
    module = nn.Sequential(nn.Linear(2, 3), nn.LeakyReLU(0.1), nn.Linear(3, 1))
    old = adapted(module, None, compile=True)
    module[1].negative_slope = 5.0
    before = old.losses(loss, None, QUERY)  # that of the twin, which has the slope of the rollout
    torch.testing.assert_close(*compared(module, loss))
    activation = old[1]
    torch.testing.assert_close(old.losses(loss, None, QUERY), before)
    activation.negative_slope = 5.0
    assert not torch.allclose(old.losses(loss, None, QUERY), before)


def test_a_frozen_parameter_of_the_twin_that_is_replaced(traces: mock.Mock) -> None:
    module = model()
    module[0].requires_grad_(False)
    inner = bda.BDAInnerOptimizer(module[2].parameters(), lr=0.1)
    options = {"steps": 2, "batches": [BATCH] * 2, "tasks": TASKS, "copy_initial_weights": False, "compile": True}
    fmodel = inner.unroll(module, loss, **options)
    layer = fmodel[0]
    before = fmodel.losses(loss, None, QUERY)
    layer.weight = nn.Parameter(torch.zeros(3, 2), requires_grad=False)
    assert not torch.allclose(fmodel.losses(loss, None, QUERY), before)
    assert traces.call_count == 2


def test_an_alias_of_a_parameter_does_not_take_its_gradient() -> None:
    module = nn.Sequential(nn.Linear(2, 3, bias=False), nn.Tanh(), nn.Linear(3, 1))
    anchor = module[0].weight.detach()

    def pulled(net: Any, hyper: Any, batch: Any) -> Tensor:
        return loss(net, None, batch) + (net[0].weight - 0.5 * anchor).square().sum()

    found = []
    for compile in (False, True):
        inner = bda.BDAInnerOptimizer(module[2].parameters(), lr=0.1)
        options = {"steps": 2, "batches": [BATCH] * 2, "tasks": TASKS, "hyper": module[0], "compile": compile}
        fmodel = inner.unroll(module, pulled, **options)
        found.append(torch.autograd.grad(fmodel.losses(pulled, None, QUERY).sum(), module[0].weight))
    torch.testing.assert_close(*found)


def test_tensors_of_a_closure_that_were_one_and_are_two() -> None:
    def made(first: Tensor, second: Tensor) -> Any:
        return lambda net, hyper, batch: loss(net, None, batch) + net[0].weight.sum() * (first - 2 * second)

    one = torch.tensor(1.5)
    torch.testing.assert_close(*compared(model(), made(one, one.detach())))
    torch.testing.assert_close(*compared(model(), made(torch.tensor(1.5), torch.tensor(-0.3))))


def test_a_graph_of_the_backward_pass_is_of_the_first_call() -> None:
    """Whatever became of the mode, of the batch, and of autocast since."""

    def moody(net: Any, hyper: Any, batch: Any) -> Tensor:
        return (3.0 if net.training else 1.0) * batch["scale"] * loss(net, hyper, batch)

    found = []
    for change in (False, True):
        module = model()
        query = {**QUERY, "scale": 2.0}
        batches = [{**BATCH, "scale": 1.0}] * 2
        fmodel = adapted(module, None, moody, compile=True, batches=batches)
        values = fmodel.losses(moody, None, query)
        if change:
            fmodel.eval()
            query["scale"] = 100.0
        with torch.autocast("cpu", enabled=change):
            grads = torch.autograd.grad(values.sum(), list(module.parameters()), create_graph=True)
        assert not change or not fmodel.training
        found.append([g.detach() for g in grads])
    assert_same(found)


# What else is at work.


def test_batched_gradients_and_duals_and_tracers_see_the_loss_itself(traces: mock.Mock) -> None:
    module = model()
    rows = []
    for compile in (False, True):
        fmodel = adapted(module, None, compile=compile)
        y = next(iter(fmodel.params.values()))
        values = fmodel.losses(loss, None, QUERY)
        rows.append(torch.autograd.grad(values, y, torch.eye(TASKS), is_grads_batched=True)[0])
    torch.testing.assert_close(*rows)
    assert traces.call_count == 1
    weight = torch.tensor(0.3)
    fmodel = adapted(module, {"weight": weight}, compile=True)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(weight, torch.tensor(1.0))
        tangent = forward_ad.unpack_dual(fmodel.losses(loss, {"weight": dual}, QUERY)).tangent
    torch.testing.assert_close(tangent, fmodel.losses(loss, {"weight": weight}, QUERY))
    x = QUERY["x"]
    graph = torch_private.trace_graph(lambda x: [fmodel.losses(loss, {"weight": weight}, {**QUERY, "x": x})], [x])
    torch.testing.assert_close(graph(x + 1)[0], fmodel.losses(loss, {"weight": weight}, {**QUERY, "x": x + 1}))


def test_random_numbers_are_drawn_as_without_a_trace() -> None:
    def noisy(net: Any, hyper: Any, batch: Any) -> Tensor:
        return loss(net, hyper, batch) * (1 + torch.rand(()))

    module = model()
    found = []
    for traced in ((), (noisy,)):
        fmodel = adapted(module, None, compile=True)
        fmodel.__dict__["_traced"] = traced
        torch.manual_seed(7)
        found.append((fmodel.losses(noisy, None, QUERY), torch.rand(())))
    torch.testing.assert_close(*found)
