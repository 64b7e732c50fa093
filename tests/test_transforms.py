"""Rollouts inside the transforms of torch.func, and inside a function that the user compiles."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from problems import double
from torch import Tensor, func, nn, optim

import bda_optim as bda

START = {"a": double(0.3, -0.2), "b": double(0.5)}
X = double(0.4, 0.7)


def lower(y: Any, x: Tensor, batch: Any) -> Tensor:
    return 0.5 * (y["a"] - x).square().sum() + (y["a"].sum() * y["b"] - x[0]).square() + 0.1 * y["b"] ** 4


def upper(y: Any, x: Tensor, batch: Any) -> Tensor:
    return (y["a"].sin() * x).sum() + (y["b"] - 1).square()


def phi(x: Tensor, **options: Any) -> Tensor:
    y = bda.rollout(lower, upper, START, x, **{"steps": 4, "lr": 0.1, **options})
    return upper(y, x, None)


CASES: dict[str, dict[str, Any]] = {
    "SGD": {},
    "momentum": {"momentum": 0.9},
    "Nesterov": {"momentum": 0.9, "nesterov": True},
    "weight decay": {"weight_decay": 0.1},
    "alpha": {"alpha": bda.harmonic(0.5), "upper_lr": 0.2},
    "l1": {"prox": bda.prox.l1(0.3)},
    "l1 of x": {"prox": bda.prox.l1(lambda x: x.square().sum()), "alpha": 0.2},
    "simplex": {"prox": bda.prox.simplex()},
    "schedule": {"lr": lambda k: 0.2 / k},
    "FISTA": {"rule": bda.FISTA},
    "Adam": {"rule": optim.Adam, "eps": 0.01},
    "AdamW": {"rule": optim.AdamW, "eps": 0.01, "alpha": 0.1},
    "RMSprop": {"rule": optim.RMSprop, "eps": 0.01, "centered": True},
    "Adagrad": {"rule": optim.Adagrad, "eps": 0.01},
    "Adadelta": {"rule": optim.Adadelta, "eps": 0.01, "lr": 1.0},
    "NAdam": {"rule": optim.NAdam, "eps": 0.01},
    "RAdam": {"rule": optim.RAdam, "eps": 0.01, "steps": 7},
}


def by_autograd(x: Tensor, **options: Any) -> Tensor:
    leaf = x.detach().requires_grad_()
    (grad,) = torch.autograd.grad(phi(leaf, **options), leaf)
    return grad


@pytest.mark.parametrize("name", CASES)
def test_transforms_equal_autograd(name: str) -> None:
    options = CASES[name]
    want = by_autograd(X, **options)

    def slope(x: Tensor) -> Tensor:
        return func.grad(lambda z: phi(z, **options))(x)

    torch.testing.assert_close(slope(X), want, rtol=1e-12, atol=1e-14)
    rows = torch.stack([X, 2 * X, -X])
    batched = func.vmap(slope)(rows)
    for row, got in zip(rows, batched, strict=True):
        torch.testing.assert_close(got, by_autograd(row, **options), rtol=1e-12, atol=1e-14)
    tangent = func.jvp(lambda x: phi(x, **options), (X,), (double(1.0, -2.0),))[1]
    torch.testing.assert_close(tangent, want @ double(1.0, -2.0), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(func.jacrev(lambda x: phi(x, **options))(X), want, rtol=1e-12, atol=1e-14)


def test_nested_transforms_equal_a_second_derivative() -> None:
    hessian = func.jacrev(func.grad(phi))(X)
    torch.testing.assert_close(hessian, torch.autograd.functional.hessian(phi, X), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(func.hessian(phi)(X), hessian, rtol=1e-12, atol=1e-14)


def test_a_hypergradient_inside_a_transform() -> None:
    def slope(x: Tensor) -> Tensor:
        out = bda.hypergradient(lower, upper, START, x, steps=4, lr=0.1, alpha=0.2)
        assert len(out.trace.lower) == 4
        return out.grad

    want = by_autograd(X, alpha=0.2)
    torch.testing.assert_close(slope(X), want, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(func.vmap(slope)(torch.stack([X, X]))[1], want, rtol=1e-12, atol=1e-14)
    hessian = torch.autograd.functional.hessian(lambda x: phi(x, alpha=0.2), X)
    torch.testing.assert_close(func.jacrev(slope)(X), hessian, rtol=1e-12, atol=1e-14)


def test_a_module_inside_a_transform() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    inner = bda.BDAInnerOptimizer(model.parameters(), lr=0.1)
    inputs = torch.linspace(-1, 1, 8, dtype=torch.float64).reshape(4, 2)

    def value(x: Tensor) -> Tensor:
        fmodel = inner.unroll(model, lambda net, x, b: (net(inputs) * x[0] - x[1]).square().mean(), hyper=x, steps=3)
        return fmodel(inputs).square().mean()

    leaf = X.clone().requires_grad_()
    (want,) = torch.autograd.grad(value(leaf), leaf)
    torch.testing.assert_close(func.grad(value)(X), want, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(func.vmap(func.grad(value))(X.expand(3, 2))[2], want, rtol=1e-12, atol=1e-14)


class Scaled(nn.Embedding):
    def forward(self, words: Tensor) -> Tensor:
        return 2 * super().forward(words)


def test_padding_inside_a_transform() -> None:
    """A `vmap` would give the row for padding a gradient; other transforms do not."""
    torch.manual_seed(0)
    model = Scaled(4, 2, padding_idx=1, dtype=torch.float64)
    inner = bda.BDAInnerOptimizer(model.parameters(), lr=0.1)
    words = torch.tensor([0, 1, 3, 1])

    def value(x: Tensor) -> Tensor:
        fmodel = inner.unroll(model, lambda net, x, b: (net(words).sin() - x).square().sum(), steps=3, hyper=x)
        loss: Tensor = (fmodel(words) * x).cos().sum()
        return loss

    x = double(0.4).requires_grad_()
    (expected,) = torch.autograd.grad(value(x), x)
    torch.testing.assert_close(func.grad(value)(x.detach()), expected)
    torch.testing.assert_close(func.jvp(value, (x.detach(),), (torch.ones_like(x),))[1], expected)
    with pytest.raises(RuntimeError, match=r"Scaled has a row for padding.*\nMap over tasks with"):
        func.vmap(value)(torch.stack([x.detach(), x.detach()]))


@pytest.mark.parametrize(
    "options", [{"adjoint": bda.Checkpointed()}, {"adjoint": bda.ForwardMode()}, {"compile": True}], ids=str
)
def test_what_cannot_run_inside_a_transform_is_refused(options: Any) -> None:
    with pytest.raises(ValueError, match=r"inside a transform of torch.func .*Use `Unroll\(\)` here, or `tasks=`"):
        func.grad(lambda x: phi(x, **options))(X)


# The user's own torch.compile.


def compiled_equals_eager(function: Any) -> None:
    weights = torch.zeros(4, 1, dtype=torch.float64, requires_grad=True)
    (want,) = torch.autograd.grad(function(weights), weights)
    with warnings.catch_warnings():
        # Dynamo looks at `.grad` of every tensor that its graphs receive, leaf or not.
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor")
        value = torch.compile(function, backend="aot_eager")(weights)
    (got,) = torch.autograd.grad(value, weights)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)


def problem() -> tuple[nn.Module, Any, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    return model, bda.BDAInnerOptimizer(model.parameters(), lr=0.1), torch.linspace(-1, 1, 8).double().reshape(4, 2)


@pytest.mark.slow
def test_unroll_inside_a_compiled_function() -> None:
    model, inner, inputs = problem()

    def value(weights: Tensor) -> Tensor:
        scale = nn.functional.softplus(weights)
        fmodel = inner.unroll(model, lambda net, w, b: (w * (net(inputs) - 1).square()).mean(), hyper=scale, steps=3)
        return fmodel(inputs).square().mean()

    compiled_equals_eager(value)
    with pytest.raises(Exception, match="bda_optim runs an inner loop as it would without"):
        torch.compile(value, fullgraph=True, backend="eager")(torch.zeros(4, 1, dtype=torch.float64))


@pytest.mark.slow
def test_a_loop_of_ones_own_inside_a_compiled_function() -> None:
    model, inner, inputs = problem()

    def value(weights: Tensor) -> Tensor:
        scale = nn.functional.softplus(weights)
        with bda.innerloop_ctx(model, inner) as (fmodel, diffopt):
            for _ in range(3):
                diffopt.step((scale * (fmodel(inputs) - 1).square()).mean())
            return fmodel(inputs).square().mean()

    compiled_equals_eager(value)
