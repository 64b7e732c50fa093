"""`fmodel`, the module with y_K inside: its names, its trace, its losses and its lower point."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from problems import TIGHT, mlp, numbers
from torch import Tensor, nn
from zoo import TRAIN, Backboned, K, Noted, cubic, noted_lower, square

import bda_optim as bda

pytestmark = pytest.mark.usefixtures("doubles")


def test_fmodel_shows_the_iterate_under_the_modules_own_names() -> None:
    module = Backboned()
    module.note = "text"
    inner = bda.BDAInnerOptimizer(module.head.parameters(), lr=0.3, alpha=bda.harmonic(0.5))
    fmodel = inner.unroll(module, square, cubic, steps=K)
    assert isinstance(fmodel, nn.Module)
    assert isinstance(fmodel, bda.FunctionalModule)
    assert fmodel.head.weight is fmodel.params["head.weight"]
    assert fmodel.params["head.weight"].grad_fn is not None
    assert not torch.equal(fmodel.head.weight, module.head.weight)
    assert fmodel.backbone.weight is module.backbone.weight
    assert fmodel.note == "text"
    assert type(fmodel.head) is nn.Linear
    names = [name for name, _ in module.named_parameters()]
    assert [name for name, _ in fmodel.named_parameters()] == names
    assert list(fmodel.parameters())[-1] is fmodel.params["head.bias"]
    assert list(fmodel.buffers()) == []
    assert fmodel.buffer_dict == {}
    state = fmodel.state_dict()
    assert list(state) == list(module.state_dict())
    other = Backboned()
    other.load_state_dict(state)
    torch.testing.assert_close(other(numbers(4, 3)), fmodel(numbers(4, 3)).detach(), rtol=0, atol=0)
    assert repr(fmodel).startswith("FunctionalModule(Backboned(")
    with pytest.raises(AttributeError, match="nothing"):
        _ = fmodel.nothing
    assert bool(fmodel)


def test_fmodel_of_a_sequential_is_indexed_and_iterated() -> None:
    module, x = mlp(), numbers(4, 3)
    fmodel = bda.BDAInnerOptimizer(module.parameters(), lr=0.3).unroll(module, square, steps=K)
    assert len(fmodel) == 3
    assert bool(fmodel)
    assert [type(layer) for layer in fmodel] == [nn.Linear, nn.Tanh, nn.Linear]
    assert fmodel[0].weight is fmodel.params["0.weight"]
    torch.testing.assert_close(fmodel[2](fmodel[1](fmodel[0](x))), fmodel(x), rtol=0, atol=0)
    torch.testing.assert_close(fmodel[1:](fmodel[0](x)), fmodel(x), rtol=0, atol=0)


@pytest.mark.parametrize("move", ["cpu", "float", "double", "half", "cuda"])
def test_fmodel_is_not_moved_or_cast(move: str) -> None:
    module = mlp()
    fmodel = bda.BDAInnerOptimizer(module.parameters(), lr=0.3).unroll(module, square, steps=1)
    with pytest.raises(NotImplementedError, match="Move the module before the loop"):
        getattr(fmodel, move)()
    with pytest.raises(NotImplementedError, match="Move the module before the loop"):
        fmodel.to(torch.float32)


def test_trace_has_the_losses_of_every_step() -> None:
    module = mlp()
    settings = dict(lr=0.3, upper_lr=0.1)
    fmodel = bda.BDAInnerOptimizer(module.parameters(), **settings).unroll(module, square, cubic, steps=K)
    assert fmodel.trace.upper is None
    assert fmodel.trace.lower.shape == (K,)
    assert not fmodel.trace.lower.requires_grad
    reference = copy.deepcopy(module)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.3)
    for value in fmodel.trace.lower:
        optimizer.zero_grad()
        loss = square(reference, None, None)
        torch.testing.assert_close(loss.detach(), value, **TIGHT)
        loss.backward()
        optimizer.step()

    def alpha(k: int) -> float:
        return 0.5 if k == 2 else 0.0

    fmodel = bda.BDAInnerOptimizer(module.parameters(), alpha=alpha, **settings).unroll(module, square, cubic, steps=K)
    assert torch.isnan(fmodel.trace.upper).tolist() == [True, False, True]
    full = bda.BDAInnerOptimizer(module.parameters(), alpha=0.5, **settings).unroll(module, square, cubic, steps=K)
    assert torch.isfinite(full.trace.upper).all()
    torch.testing.assert_close(full.trace.upper[0], cubic(module, None, None).detach(), **TIGHT)
    with bda.innerloop_ctx(module, torch.optim.SGD(module.parameters(), lr=0.1)) as (fmodel, _):
        assert fmodel.trace is None


def test_losses_of_a_single_task() -> None:
    module = mlp()
    fmodel = bda.BDAInnerOptimizer(module.parameters(), lr=0.3).unroll(module, square, steps=K)
    losses = fmodel.losses(lambda net, h, b: h * net(b).sum(), 2.0, numbers(4, 3))
    torch.testing.assert_close(losses, 2 * fmodel(numbers(4, 3)).sum().reshape(1))


def test_lower_point_is_sparse_where_the_iterate_is_not() -> None:
    module, target = nn.Linear(6, 1, bias=False), torch.tensor([[1.0, 0, 0, 0, 0, -1.0]])
    strength = torch.tensor(0.3, requires_grad=True)
    inner = bda.BDAInnerOptimizer(
        module.parameters(), lr=0.5, upper_lr=0.1, alpha=bda.harmonic(0.5), prox=bda.prox.l1(lambda x: x)
    )

    def lower(net: Any, x: Any, batch: Any) -> Tensor:
        return 0.5 * (net.weight - target).square().sum()

    def upper(net: Any, x: Any, batch: Any) -> Tensor:
        return 0.5 * (net.weight - 1).square().sum()

    fmodel = inner.unroll(module, lower, upper, hyper=strength, steps=40)
    assert (fmodel.params["weight"] == 0).sum() == 0
    point = fmodel.lower_point(lower, strength)
    assert list(point) == ["weight"]
    assert (point["weight"] == 0).sum() == 4
    assert not point["weight"].requires_grad
    assert fmodel.weight is fmodel.params["weight"]

    def tree(loss: Any) -> Any:
        class Net:
            def __init__(self, weight: Tensor) -> None:
                self.weight = weight

        return lambda y, x, b: loss(Net(y), x, b)

    settings = dict(lr=0.5, prox=bda.prox.l1(lambda x: x))
    y = bda.rollout(
        tree(lower), tree(upper), module.weight.detach(), strength, steps=40, upper_lr=0.1, alpha=bda.harmonic(0.5),
        **settings,
    )  # fmt: skip
    torch.testing.assert_close(y, fmodel.params["weight"], **TIGHT)
    torch.testing.assert_close(bda.lower_point(tree(lower), y, strength, **settings), point["weight"], **TIGHT)


def test_a_loss_that_fails_leaves_fmodel_as_it_was() -> None:
    module = Noted()
    fmodel = bda.BDAInnerOptimizer(module.parameters(), lr=0.1).unroll(module, noted_lower, steps=2)
    before = {name: t.clone() for name, t in (fmodel.params | fmodel.buffer_dict).items()}

    def broken(net: Any, hyper: Any, batch: Any) -> Tensor:
        net(TRAIN)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fmodel.lower_point(broken)
    assert fmodel.norm.weight is fmodel.params["norm.weight"]
    for name, t in (fmodel.params | fmodel.buffer_dict).items():
        assert torch.equal(t, before[name])
