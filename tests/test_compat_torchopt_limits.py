"""What torchopt cannot do, beside what this package does there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torchopt_cases import torchopt

import bda_optim as bda

# torchopt computes bias corrections in the default dtype, so 1e-12 can only be had in this one.
pytestmark = pytest.mark.usefixtures("doubles")


class Two(nn.Module):
    """Two parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))


def tied_weights() -> tuple[str, str]:
    def net() -> nn.Module:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Tanh(), nn.Linear(2, 2, bias=False))
        net[2].weight = net[0].weight
        return net

    def loss(net: nn.Module) -> Tensor:
        return (net(torch.ones(2)) - 3).square().sum()

    first = net()
    optimizer = torchopt.MetaSGD(first, lr=0.1)
    for _ in range(2):
        optimizer.step(loss(first))
    assert not torch.equal(first[0].weight, first[2].weight)
    second = net()
    fmodel = bda.BDAInnerOptimizer(second.parameters(), rule=torchopt.sgd(0.1)).unroll(
        second, lambda net, x, b: loss(net), steps=2
    )
    assert fmodel[0].weight is fmodel[2].weight
    return "come apart", "stay one tensor"


def unused_at_first() -> tuple[str, str]:
    def losses(net: Any) -> Iterator[Tensor]:
        yield net.a.square().sum()
        yield net.a.square().sum() + net.b.square().sum()

    net = Two()
    optimizer = torchopt.MetaSGD(net, lr=0.1, momentum=0.9)
    for loss in losses(net):
        optimizer.step(loss)
    assert torch.equal(net.b, torch.ones(2))
    net = Two()
    inner = bda.BDAInnerOptimizer(net.parameters(), rule=torchopt.sgd(0.1, momentum=0.9))
    with bda.innerloop_ctx(net, inner) as (fmodel, diffopt):
        for loss in losses(fmodel):
            diffopt.step(loss)
    torch.testing.assert_close(fmodel.b.detach(), torch.full((2,), 0.8))
    return "never moves again", "moves"


def zero_gradients() -> tuple[str, str]:
    def loss(net: Any, x: Tensor, batch: Any = None) -> Tensor:
        return x * (net.a.square().sum() + (net.b - 1).square().sum())  # b is where it should be

    x, net = torch.ones((), requires_grad=True), Two()
    optimizer = torchopt.MetaAdam(net, lr=0.1)
    for _ in range(2):
        optimizer.step(loss(net, x))
    assert torch.autograd.grad(net.a.sum() + net.b.sum(), x)[0].isnan()
    net = Two()
    inner = bda.BDAInnerOptimizer(net.parameters(), lr=0.1, rule=optim.Adam)
    fmodel = inner.unroll(net, loss, hyper=x, steps=2)
    assert torch.autograd.grad(fmodel.a.sum() + fmodel.b.sum(), x)[0].isfinite()
    return "hypergradient NaN", "finite"


def frozen_and_integer() -> tuple[str, str]:
    def net() -> Any:
        net = Two()
        net.b.requires_grad_(False)
        net.count = nn.Parameter(torch.ones(2, dtype=torch.int64), requires_grad=False)
        return net

    first = net()
    with pytest.raises(RuntimeError, match="does not require grad"):
        torchopt.MetaSGD(first, lr=0.1).step(first.a.sum())
    second = net()
    fmodel = bda.BDAInnerOptimizer(second.parameters(), rule=torchopt.sgd(0.1)).unroll(
        second, lambda net, x, b: (net.a * net.b * net.count).sum(), steps=1
    )
    assert [*fmodel.params] == ["a"]
    return "RuntimeError", "stay as they are"


def interrupted() -> tuple[str, str]:
    net = Two()
    before = dict(net._parameters)
    with contextlib.suppress(KeyboardInterrupt):
        torchopt.MetaSGD(net, lr=0.1).step(net.a.sum() + net.b.sum())
        raise KeyboardInterrupt
    assert net.a is not before["a"]
    net = Two()
    before = dict(net._parameters)
    with contextlib.suppress(KeyboardInterrupt):
        inner = bda.BDAInnerOptimizer(net.parameters(), rule=torchopt.sgd(0.1))
        with bda.innerloop_ctx(net, inner) as (fmodel, diffopt):
            diffopt.step(fmodel.a.sum() + fmodel.b.sum())
            raise KeyboardInterrupt
    assert net.a is before["a"] and torch.equal(net.a, torch.ones(2))
    return "module stays changed", "module untouched"


def parameter_groups() -> tuple[str, str]:
    net = Two()
    groups = [{"params": [net.a], "lr": 0.1}, {"params": [net.b], "lr": 0.2}]
    with pytest.raises(RuntimeError, match="Unexpected class"):
        torchopt.MetaSGD(groups, lr=0.1)
    inner = bda.BDAInnerOptimizer(groups)
    fmodel = inner.unroll(net, lambda net, x, b: net.a.sum() + net.b.sum(), steps=1)
    torch.testing.assert_close((fmodel.a[0], fmodel.b[0]), (torch.tensor(0.9), torch.tensor(0.8)), check_stride=False)
    return "RuntimeError", "a rate per group"


def recovered_momentum() -> tuple[str, str]:
    def loss(net: Any) -> Tensor:
        return (net.a - 3).square().sum() + net.b.square().sum()

    def run(renew: bool) -> Tensor:
        net = Two()
        optimizer = torchopt.MetaSGD(net, lr=0.1, momentum=0.5)
        for k in range(4):
            if renew and k == 2:
                state, optimizer = torchopt.extract_state_dict(optimizer), torchopt.MetaSGD(net, lr=0.1, momentum=0.5)
                torchopt.recover_state_dict(optimizer, state)
            optimizer.step(loss(net))
        return net.a

    assert not torch.allclose(run(False), run(True))
    net = Two()
    first, second = (bda.BDAInnerOptimizer(net.parameters(), rule=torchopt.sgd(0.1, momentum=0.5)) for _ in range(2))
    first.commit(first.unroll(net, lambda net, x, b: loss(net), steps=2))
    second.load_state_dict(first.state_dict())
    second.commit(second.unroll(net, lambda net, x, b: loss(net), steps=2))
    torch.testing.assert_close(net.a.detach(), run(False).detach())
    return "first step without decay", "goes on exactly"


def dampening_twice() -> tuple[str, str]:
    settings = {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}
    impl, x = torchopt.sgd(**settings), torch.ones(())

    def loop() -> Tensor:
        optimizer, params = torchopt.FuncOptimizer(impl), (torch.zeros(2, requires_grad=True),)
        for _ in range(2):
            params = optimizer.step((params[0] - 1).square().sum(), params)
        return params[0].detach()

    assert not torch.allclose(loop(), loop())
    ys = [
        bda.rollout(lambda y, x, b: (y - x).square().sum(), None, torch.zeros(2), x, steps=2, **settings)
        for _ in range(2)
    ]
    assert torch.equal(*ys)
    return "another result", "the same result"


def undecayed_biases() -> tuple[str, str]:
    net = nn.Linear(2, 1)
    optimizer = torchopt.MetaAdamW(net, lr=0.1, mask=lambda ps: [p.ndim > 1 for p in ps])
    with pytest.raises(AttributeError, match="MaskedNode"):
        optimizer.step(net(torch.ones(2)).sum())
    groups = [{"params": [net.weight], "weight_decay": 0.5}, {"params": [net.bias], "weight_decay": 0.0}]
    inner = bda.BDAInnerOptimizer(groups, lr=0.1, rule=optim.AdamW)
    fmodel = inner.unroll(net, lambda net, x, b: net(torch.ones(2)).sum(), steps=1)
    torch.testing.assert_close(fmodel.bias, net.bias - 0.1, rtol=1e-6, atol=0.0)
    return "AttributeError", "a decay per group"


def long_loops() -> tuple[str, str]:
    def lower(y: Tensor, x: Tensor, batch: Any = None) -> Tensor:
        return (y - x).square().sum()

    x = torch.ones((), requires_grad=True)

    def theirs(steps: int) -> Tensor:
        optimizer, params = torchopt.FuncOptimizer(torchopt.adam(0.1)), (torch.zeros(3, requires_grad=True),)
        for _ in range(steps):
            params = optimizer.step(lower(params[0], x), params)
        return params[0]

    def ours(steps: int) -> Tensor:
        checkpointed = {"rule": torchopt.adam(0.1), "adjoint": bda.Checkpointed()}
        return bda.rollout(lower, None, torch.zeros(3), x, steps=steps, **checkpointed)

    assert _nodes(theirs(100)) > 9 * _nodes(theirs(10))
    assert _nodes(ours(100)) == _nodes(ours(10))
    grads = [torch.autograd.grad(road(100).sum(), x)[0] for road in (theirs, ours)]
    torch.testing.assert_close(*grads, rtol=1e-10, atol=0.0)
    return "a graph of all K steps", "Checkpointed(), also with its rules"


def _nodes(tensor: Tensor) -> int:
    """How many operations autograd keeps for a tensor."""
    seen, todo = set(), [tensor.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            todo += [parent for parent, _ in node.next_functions]
    return len(seen)


CANNOT = {
    "tied weights": tied_weights,
    "a parameter unused in the first step, momentum": unused_at_first,
    "Adam at zero gradients": zero_gradients,
    "frozen and integer parameters": frozen_and_integer,
    "Ctrl-C inside the loop": interrupted,
    "parameter groups": parameter_groups,
    "momentum recovered into a new optimizer": recovered_momentum,
    "momentum with dampening, a second loop": dampening_twice,
    "AdamW without decay of the biases": undecayed_biases,
    "long inner loops": long_loops,
}


def test_what_torchopt_cannot_do(record_property: Callable[[str, object], None]) -> None:
    rows = [("", f"torchopt {torchopt.__version__}", "bda_optim")]
    rows += [(what, *show()) for what, show in CANNOT.items()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    record_property("table", table)
    print(table)
