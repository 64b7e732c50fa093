"""Copies, replicas, nested loops, and classes of the user's own: modules, optimizers and tensors."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from problems import difference_quotients, double, relative_error
from torch import Tensor, nn

import bda_optim as bda

DATA = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(4, 3)


def lower(net: Any, x: Tensor, batch: Any = None) -> Tensor:
    return (net(DATA) - x).square().mean()


def upper(net: Any, x: Tensor, batch: Any = None) -> Tensor:
    return (net(DATA.flip(1)) + x).square().mean()


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1)).double()


def slope(model: nn.Module, inner: bda.BDAInnerOptimizer | None = None, adjoint: Any = None) -> Tensor:
    """The hypergradient of four steps on a module."""
    x = double(0.5).requires_grad_()
    inner = inner or bda.BDAInnerOptimizer(model.parameters(), lr=0.1, alpha=bda.harmonic(0.5))
    fmodel = inner.unroll(model, lower, upper, hyper=x, steps=4, adjoint=adjoint)
    return torch.autograd.grad(upper(fmodel, x), x)[0]


# Copies.


def saved(thing: Any) -> Any:
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda thing: pickle.loads(pickle.dumps(thing)),
    "torch.save": saved,
}


@pytest.mark.parametrize("way", COPIES.values(), ids=COPIES)
def test_a_module_and_its_optimizer_are_copied_together(way: Callable[[Any], Any]) -> None:
    model = mlp()
    inner = bda.BDAInnerOptimizer(model.parameters(), lr=0.1, alpha=bda.harmonic(0.5), rule=torch.optim.Adam)
    inner.step(lambda: (lower(model, double(0.1)), upper(model, double(0.1))))
    twin, other = way((model, inner))
    assert all(p is not q for p, q in zip(model.parameters(), twin.parameters(), strict=True))
    assert torch.equal(slope(twin, other), slope(model, inner))
    other.commit(other.unroll(twin, lower, upper, hyper=double(0.5), steps=1))
    assert not torch.equal(slope(twin, other), slope(model, inner))


@pytest.mark.parametrize("way", COPIES.values(), ids=COPIES)
def test_a_functional_module_is_copied_without_its_graph(way: Callable[[Any], Any]) -> None:
    model, x = mlp(), double(0.5)
    inner = bda.BDAInnerOptimizer(model.parameters(), lr=0.1)
    with torch.no_grad():
        fmodel = inner.unroll(model, lower, hyper=x, steps=3)
    twin = way(fmodel)
    assert torch.equal(twin(DATA), fmodel(DATA))
    assert all(torch.equal(twin.params[name], p) for name, p in fmodel.params.items())
    assert torch.equal(twin.trace.lower, fmodel.trace.lower)
    before = {name: p.clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        for p in twin.params.values():
            p.add_(1.0)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert not torch.equal(twin(DATA), fmodel(DATA))


def test_of_a_functional_module_with_a_graph_only_the_values_can_be_saved() -> None:
    """As for any non-leaf tensor of torch: deepcopy raises, and a file holds values, not graphs."""
    model, x = mlp(), double(0.5).requires_grad_()
    fmodel = bda.BDAInnerOptimizer(model.parameters(), lr=0.1).unroll(model, lower, hyper=x, steps=2)
    with pytest.raises(RuntimeError, match="graph leaves"):
        copy.deepcopy(fmodel)
    twin = COPIES["pickle"](fmodel)
    assert torch.equal(twin(DATA), fmodel(DATA)) and all(p.grad_fn is None for p in twin.params.values())


def test_replicas_of_a_module_are_modules_of_their_own() -> None:
    """As DataParallel makes them: `_replicate_for_data_parallel`, then tensors in the place of the parameters."""
    model = mlp()
    replica = model._replicate_for_data_parallel()
    layers = []
    for child in model:
        twin = child._replicate_for_data_parallel()
        for name, p in child._parameters.items():
            twin._parameters[name] = None if p is None else p.detach().clone().requires_grad_()
        twin._buffers = {name: b.clone() for name, b in child._buffers.items()}
        layers.append(twin)
    replica._modules = {str(i): layer for i, layer in enumerate(layers)}
    owned = [p for layer in layers for p in layer._parameters.values() if p is not None]
    assert torch.equal(slope(replica, bda.BDAInnerOptimizer(owned, lr=0.1, alpha=bda.harmonic(0.5))), slope(model))
    with pytest.raises(ValueError, match="a parameter that is not in the module"):
        slope(replica, bda.BDAInnerOptimizer(model.parameters(), lr=0.1))


# Loops inside loops.


def test_three_levels() -> None:
    """z minimises h(y, z), y minimises g(x, y, z_K(y)), and x is learned: the derivative, by finite differences."""
    x = double(0.7).requires_grad_()

    def innermost(y: Tensor) -> Tensor:
        return bda.rollout(
            lambda z, y, b: ((z - y) ** 2).sum() + 0.1 * (z**4).sum(), None, double(0.5, -0.5), y, steps=3, lr=0.2,
            adjoint=bda.Unroll(),
        )  # fmt: skip

    def middle(x: Tensor, adjoint: Any) -> Tensor:
        def g(y: Tensor, x: Tensor, b: Any) -> Tensor:
            return (y * x).square().sum() + (innermost(y) * x - 1).square().sum()

        return bda.rollout(g, None, double(1.0, 2.0), x, steps=3, lr=0.1, adjoint=adjoint)

    for adjoint in (bda.Unroll(), bda.Checkpointed(), bda.Checkpointed(slots=2)):

        def value(adjoint: Any = adjoint) -> Tensor:
            y = middle(x, adjoint)
            return (y * innermost(y)).sum()

        assert relative_error(torch.autograd.grad(value(), x), difference_quotients(value, [x])) < 1e-7

    def outermost(adjoint: Any) -> bda.Hypergradient:  # the middle loop inside an upper-level loop of its own
        return bda.hypergradient(
            lambda w, x, b: (w - middle(x, adjoint)).square().sum(), lambda w, x, b: w.prod(), double(0.1, 0.2), x,
            steps=2, lr=0.3, adjoint=adjoint,
        )  # fmt: skip

    torch.testing.assert_close(outermost(bda.Checkpointed()).grad, outermost(bda.Unroll()).grad, rtol=1e-10, atol=0)

    def plain() -> Tensor:
        return outermost(bda.Unroll()).value

    assert relative_error([outermost(bda.Unroll()).grad], difference_quotients(plain, [x])) < 1e-7


def test_three_levels_of_modules() -> None:
    x = double(0.4).requires_grad_()
    models = [nn.Linear(3, 1).double() for _ in range(2)]
    inners = [bda.BDAInnerOptimizer(m.parameters(), lr=0.1) for m in models]

    def second(x: Tensor) -> Tensor:
        return inners[1].unroll(models[1], lower, hyper=x, steps=2).weight.sum()

    def value() -> Tensor:
        fmodel = inners[0].unroll(
            models[0], lambda net, x, b: (net(DATA) - second(x * net.bias.sum())).square().mean(), hyper=x, steps=2
        )
        return upper(fmodel, x)

    assert relative_error(torch.autograd.grad(value(), x), difference_quotients(value, [x])) < 1e-7


# Classes of the user's own.


class Slotted(nn.Module):
    __slots__ = ("factor",)

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1).double()
        self.factor = 2.0

    def forward(self, inputs: Tensor) -> Tensor:
        return self.factor * self.layer(inputs)


class TensorsInSlots(Slotted):
    """Parameters and modules of the tree that are also held in slots: alone, in a list, and under a private name."""

    __slots__ = ("__bias", "child", "unset", "weights")

    def __init__(self) -> None:
        super().__init__()
        object.__setattr__(self, "weights", [self.layer.weight])
        object.__setattr__(self, "_TensorsInSlots__bias", self.layer.bias)
        object.__setattr__(self, "child", self.layer)

    def forward(self, inputs: Tensor) -> Tensor:
        return nn.functional.linear(inputs, self.weights[0], self.__bias) + self.child(inputs)


class WithProperty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.raw = nn.Parameter(torch.ones(1, 3, dtype=torch.float64))

    @property
    def weight(self) -> Tensor:
        return self.raw.exp()

    @weight.setter
    def weight(self, value: Tensor) -> None:
        self.raw = nn.Parameter(value.log())

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs @ self.weight.T


class Forwarding(nn.Module):
    """Finds the attributes of the wrapped module, as many wrappers do."""

    def __init__(self) -> None:
        super().__init__()
        self.wrapped = mlp()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("wrapped"), name)

    def forward(self, inputs: Tensor) -> Tensor:
        return self[3](self[2](self[1](self[0](inputs))))

    def __getitem__(self, index: int) -> nn.Module:
        return self.wrapped[index]


class Counting(nn.Module):
    """Hooks of every kind, and a `__call__` of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(3, 1).double(), []
        self.layer.register_forward_pre_hook(lambda m, args: (args[0] * 2,))
        self.layer.register_forward_hook(lambda m, args, out: out + 1)
        self.layer.register_full_backward_hook(lambda m, grad_in, grad_out: self.calls.append("backward"))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(inputs)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "__slots__": Slotted,
    "tensors in __slots__": TensorsInSlots,
    "property": WithProperty,
    "__getattr__": Forwarding,
    "hooks": Counting,
}


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # torch reports that the inputs need no gradient
@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)
@pytest.mark.parametrize("adjoint", [bda.Unroll(), bda.Checkpointed()], ids=["unroll", "checkpointed"])
def test_modules_of_the_users_own_classes(make: Callable[[], nn.Module], adjoint: Any) -> None:
    model, x = make(), double(0.3).requires_grad_()
    inner = bda.BDAInnerOptimizer(model.parameters(), lr=0.02)
    before = [(p, p._version, p.detach().clone()) for p in model.parameters()]

    def value() -> Tensor:
        return upper(inner.unroll(model, lower, hyper=x, steps=3, adjoint=adjoint), x)

    assert relative_error(torch.autograd.grad(value(), x), difference_quotients(value, [x])) < 1e-7
    with bda.innerloop_ctx(model, inner) as (fmodel, diffopt):
        for _ in range(3):
            diffopt.step(lower(fmodel, x))
        torch.testing.assert_close(upper(fmodel, x), value(), rtol=1e-12, atol=0)
    for p, (old, version, values) in zip(model.parameters(), before, strict=True):
        assert p is old and p._version == version and torch.equal(p.detach(), values)


class Halving(bda.BDAInnerOptimizer):
    """A subclass with a setting of its own."""

    def __init__(self, params: Any, lr: float, *, half: bool = True) -> None:
        super().__init__(params, lr=lr / 2 if half else lr)
        self.half = half

    def unroll(self, *args: Any, **kwargs: Any) -> Any:
        return super().unroll(*args, **kwargs)


def test_a_subclass_of_the_optimizer() -> None:
    model = mlp()
    want = slope(model, bda.BDAInnerOptimizer(model.parameters(), lr=0.1))
    inner = Halving(model.parameters(), lr=0.2)
    assert torch.equal(slope(model, inner), want)
    with bda.innerloop_ctx(model, inner) as (fmodel, diffopt):
        diffopt.step(lower(fmodel, double(0.0)))
    model2, inner2 = copy.deepcopy((model, inner))
    assert isinstance(inner2, Halving) and torch.equal(slope(model2, inner2), want)
    fresh = Halving(model.parameters(), lr=1.0)
    fresh.load_state_dict(inner.state_dict())
    assert torch.equal(slope(model, fresh), want)


# Tensors of other classes.


class Named(Tensor):
    """A subclass that keeps its class through every operation."""


def test_a_subclass_of_tensor_gives_the_same_numbers() -> None:
    def run(kind: Callable[[Tensor], Tensor], adjoint: Any) -> Tensor:
        x = double(0.5).requires_grad_()
        data = kind(DATA)

        def f(y: Tensor, x: Tensor, batch: Any) -> Tensor:
            return (batch @ y - x).square().mean()

        y = bda.rollout(f, None, double(1.0, 2.0, 3.0), x, steps=3, lr=0.1, batches=[data] * 3, adjoint=adjoint)
        return torch.autograd.grad(y.sum().as_subclass(Tensor), x)[0]

    for adjoint in (bda.Unroll(), bda.Checkpointed(), bda.ForwardMode()):
        got, want = run(lambda t: t.as_subclass(Named), adjoint), run(lambda t: t, adjoint)
        assert torch.equal(got.as_subclass(Tensor), want)


def test_inference_tensors_and_inference_mode() -> None:
    model = mlp()
    inner = bda.BDAInnerOptimizer(model.parameters(), lr=0.1)
    with torch.inference_mode():
        data = DATA.clone()
        with pytest.raises(RuntimeError, match=r"`torch.inference_mode\(\)` rules out.*`torch.no_grad\(\)`"):
            inner.unroll(model, lower, hyper=double(0.0), steps=1)
        with pytest.raises(RuntimeError, match="rules out"), bda.innerloop_ctx(model, inner):
            pass
        with pytest.raises(RuntimeError, match="rules out"):
            bda.hypergradient(lambda y, x, b: y**2, lambda y, x, b: y, double(1.0), double(1.0), steps=1, lr=0.1)
    fmodel = inner.unroll(model, lower, hyper=double(0.0), steps=1)
    with torch.inference_mode():  # the result can be used inside
        assert fmodel(data).shape == (4, 1)
