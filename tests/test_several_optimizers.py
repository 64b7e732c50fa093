"""Two optimizers for one module, moments that are carried over, batches from an iterator, and online use."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from problems import double
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader, TensorDataset

import bda_optim as bda

INPUTS = torch.linspace(-1, 1, 18, dtype=torch.float64).reshape(6, 3)
TARGETS = torch.linspace(1, -1, 6, dtype=torch.float64).reshape(6, 1)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def loss(fnet: Any, weight: Tensor) -> Tensor:
    return (weight * (fnet(INPUTS) - TARGETS).square()).mean()


def test_two_optimizers_take_their_own_steps() -> None:
    model = net()
    weight = double(0.7).requires_grad_()
    first = bda.BDAInnerOptimizer(model[0].parameters(), lr=0.1, momentum=0.9)
    second = optim.Adam(model[2].parameters(), lr=0.05, eps=0.01)
    with bda.innerloop_ctx(model, [first, second], copy_initial_weights=False) as (fmodel, diffopts):
        for _ in range(3):
            value = loss(fmodel, weight)
            for diffopt in diffopts:
                diffopt.step(value)
        (grad,) = torch.autograd.grad(loss(fmodel, double(1.0)), weight)
        params = {name: p.detach() for name, p in fmodel.params.items()}

    plain = [p.detach().clone().requires_grad_() for p in model.parameters()]
    names = [name for name, _ in model.named_parameters()]
    ys = [p * 1.0 for p in plain]
    momentum = [torch.zeros_like(p) for p in ys[:2]]
    means = [torch.zeros_like(p) for p in ys[2:]]
    squares = [torch.zeros_like(p) for p in ys[2:]]
    for k in range(1, 4):
        value = (
            weight * (torch.func.functional_call(model, dict(zip(names, ys, strict=True)), INPUTS) - TARGETS) ** 2
        ).mean()
        grads = torch.autograd.grad(value, ys, create_graph=True)
        momentum = [0.9 * m + g for m, g in zip(momentum, grads[:2], strict=True)]
        means = [0.9 * m + 0.1 * g for m, g in zip(means, grads[2:], strict=True)]
        squares = [0.999 * v + 0.001 * g * g for v, g in zip(squares, grads[2:], strict=True)]
        new = [y - 0.1 * m for y, m in zip(ys[:2], momentum, strict=True)]
        for y, m, v in zip(ys[2:], means, squares, strict=True):
            new.append(y - 0.05 * (m / (1 - 0.9**k)) / ((v / (1 - 0.999**k)).sqrt() + 0.01))
        ys = new
    value = ((torch.func.functional_call(model, dict(zip(names, ys, strict=True)), INPUTS) - TARGETS) ** 2).mean()
    (want,) = torch.autograd.grad(value, weight)
    assert grad.item() == pytest.approx(want.item(), rel=1e-10)
    for name, y in zip(names, ys, strict=True):
        torch.testing.assert_close(params[name], y.detach(), rtol=1e-10, atol=1e-12)


def test_each_optimizer_commits_its_own_part() -> None:
    model = net()
    optimizers = [bda.BDAInnerOptimizer(model[i].parameters(), lr=0.1, momentum=0.9) for i in (0, 2)]
    before = [p.detach().clone() for p in model.parameters()]
    with bda.innerloop_ctx(model, optimizers, track_higher_grads=False) as (fmodel, diffopts):
        value = loss(fmodel, double(1.0))
        for diffopt in diffopts:
            diffopt.step(value)
    optimizers[1].commit(fmodel)
    changed = [not torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True)]
    assert changed == [False, False, True, True]
    assert "momentum_buffer" in optimizers[1].state[model[2].weight]
    with pytest.raises(ValueError, match="a lower point needs the settings of one optimizer"):
        fmodel.lower_point(lambda fnet, hyper, batch: loss(fnet, double(1.0)))


def test_a_parameter_has_one_optimizer() -> None:
    model = net()
    optimizers = [bda.BDAInnerOptimizer(model.parameters(), lr=0.1) for _ in range(2)]
    with pytest.raises(ValueError, match=r"each parameter belongs to one optimizer; got '0\.bias' in two"):
        bda.innerloop_ctx(model, optimizers).__enter__()


@pytest.mark.parametrize("settings", [{"momentum": 0.9}, {"rule": optim.Adam, "eps": 0.01}], ids=["SGD", "Adam"])
def test_moments_are_carried_over(settings: Any) -> None:
    model = net()
    twin = net()
    inner = bda.BDAInnerOptimizer(model.parameters(), lr=0.05, **settings)
    other = bda.BDAInnerOptimizer(twin.parameters(), lr=0.05, **settings)
    with bda.innerloop_ctx(model, inner, track_higher_grads=False) as (fmodel, diffopt):
        for _ in range(2):
            diffopt.step(loss(fmodel, double(1.0)))
    inner.load_state_dict(diffopt.state_dict())
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(fmodel.params[name])
    for _ in range(2):
        other.step(lambda: (loss(twin, double(1.0)), None))
    for optimizer, module in ((inner, model), (other, twin)):
        optimizer.step(lambda module=module: (loss(module, double(1.0)), None))
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-14)


# Batches that can be read once.


def stream() -> Iterator[Tensor]:
    for i in itertools.count():
        yield double(0.1 * i)


def lower(y: Tensor, x: Tensor, batch: Tensor) -> Tensor:
    return 0.5 * (y - x - batch) ** 2


@pytest.mark.parametrize(
    "adjoint", [bda.Unroll(), bda.Truncated(last=2), bda.ForwardMode(), bda.FirstOrder()], ids=repr
)
def test_an_iterator_of_batches(adjoint: Any) -> None:
    def run(batches: Any) -> Tensor:
        start = double(1.0).requires_grad_(isinstance(adjoint, bda.FirstOrder))
        return bda.rollout(
            lower, None, start, double(2.0).requires_grad_(), steps=4, lr=0.3, batches=batches, adjoint=adjoint
        )

    want = run(list(itertools.islice(stream(), 4)))
    assert run(stream()).item() == want.item()


def test_a_data_loader_of_batches() -> None:
    loader = DataLoader(TensorDataset(INPUTS, TARGETS), batch_size=2)
    model = net()
    inner = bda.BDAInnerOptimizer(model.parameters(), lr=0.1)

    def fit(fnet: Any, hyper: Any, batch: Any) -> Tensor:
        return (fnet(batch[0]) - batch[1]).square().mean()

    runs = [
        inner.unroll(model, fit, steps=3, batches=batches, copy_initial_weights=False)
        for batches in (loader, list(loader))
    ]
    for name, p in runs[0].params.items():
        torch.testing.assert_close(p, runs[1].params[name], rtol=0, atol=0)


@pytest.mark.parametrize(
    "options",
    [{"adjoint": bda.Checkpointed()}, {"on_divergence": "stop"}, {"adjoint": bda.Checkpointed(slots=2)}],
    ids=str,
)
def test_what_reads_batches_twice_says_so(options: Any) -> None:
    with pytest.raises(TypeError, match=r"Pass a list, as in `list\(itertools.islice\(loader, steps\)\)`"):
        bda.rollout(
            lower, None, double(1.0), double(2.0).requires_grad_(), steps=4, lr=0.3, batches=stream(), **options
        )


def test_an_iterator_that_ends_early() -> None:
    with pytest.raises(ValueError, match="got 2 batches for steps=4"):
        batches = itertools.islice(stream(), 2)
        bda.rollout(lower, None, double(1.0), double(2.0).requires_grad_(), steps=4, lr=0.3, batches=batches)


def test_a_loop_over_an_iterator_that_diverges_is_reported() -> None:
    with pytest.raises(FloatingPointError, match="diverged"):
        x = double(2.0).requires_grad_()
        bda.rollout(lambda y, x, b: (y - x - b) ** 4, None, double(9.0), x, steps=40, lr=9.0, batches=stream())


# Online use: y and the rule's memory are carried from window to window, and gradients are truncated at each.


def test_windows_of_a_long_run() -> None:
    model = net()
    twin = net()
    weight = double(0.7).requires_grad_()
    inner = bda.BDAInnerOptimizer(model.parameters(), lr=0.05, rule=optim.Adam, eps=0.01)
    whole = bda.BDAInnerOptimizer(twin.parameters(), lr=0.05, rule=optim.Adam, eps=0.01)

    def fit(fnet: Any, hyper: Tensor, batch: Any) -> Tensor:
        return loss(fnet, hyper)

    for _ in range(3):
        fmodel = inner.unroll(model, fit, hyper=weight, steps=4)
        (window,) = torch.autograd.grad(loss(fmodel, double(1.0)), weight)
        inner.commit(fmodel)
    long = whole.unroll(twin, fit, hyper=weight, steps=12, adjoint=bda.Truncated(last=4))
    (last,) = torch.autograd.grad(loss(long, double(1.0)), weight)
    assert window.item() == pytest.approx(last.item(), rel=1e-10)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach(), long.params[name].detach(), rtol=1e-12, atol=1e-14)
