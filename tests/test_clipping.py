"""Clipping of the lower gradient as a setting of a group, and transformations that cut the graph."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from problems import difference_quotients, double, relative_error
from torch import Tensor, nn, optim

import bda_optim as bda

START = {"a": double(1.0, -2.0, 0.5), "b": double(3.0)}
X = double(2.0, 0.3)


def lower(y: Any, x: Tensor, batch: Any) -> Tensor:
    return x[0] * y["a"].square().sum() + (y["b"] - x[1] * y["a"].sum()) ** 2


def upper(y: Any, x: Tensor, batch: Any) -> Tensor:
    return y["a"].sin().sum() + y["b"] ** 2


CASES: dict[str, dict[str, Any]] = {
    "norm": {"clip_norm": 1.5},
    "value": {"clip_value": 0.9},
    "both": {"clip_norm": 1.2, "clip_value": 0.9},
    "momentum": {"clip_norm": 1.5, "momentum": 0.8},
    "alpha": {"clip_norm": 1.5, "alpha": 0.2},
    "Adam": {"clip_norm": 1.5, "rule": optim.Adam, "eps": 0.05},
    "FISTA": {"clip_norm": 1.5, "rule": bda.FISTA, "prox": bda.prox.l1(0.05)},
}


@pytest.mark.parametrize("name", CASES)
def test_clipped_hypergradients_equal_differences_and_other_adjoints(name: str) -> None:
    options = {"steps": 4, "lr": 0.2, **CASES[name]}

    x = X.clone()

    def value() -> Tensor:
        return upper(bda.rollout(lower, upper, START, x, **options), x, None)

    adjoints = (bda.Unroll(), bda.Checkpointed(), bda.ForwardMode())
    grads = [bda.hypergradient(lower, upper, START, X, adjoint=adjoint, **options).grad for adjoint in adjoints]
    assert relative_error([grads[0]], difference_quotients(value, [x])) < 1e-6
    for grad in grads[1:]:
        assert relative_error([grad], [grads[0]]) < 1e-12
    free = {key: value for key, value in options.items() if not key.startswith("clip")}
    assert relative_error([bda.hypergradient(lower, upper, START, X, **free).grad], [grads[0]]) > 1e-3


def test_the_norm_is_clipped_as_torch_does() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    twin = nn.Linear(3, 2).double()
    twin.load_state_dict(model.state_dict())
    inputs = torch.linspace(-3, 3, 12, dtype=torch.float64).reshape(4, 3)
    inner = bda.BDAInnerOptimizer(model.parameters(), lr=0.3, clip_norm=0.4, momentum=0.9)
    with bda.innerloop_ctx(model, inner, track_higher_grads=False) as (fmodel, diffopt):
        for _ in range(3):
            diffopt.step(fmodel(inputs).square().sum())
    plain = optim.SGD(twin.parameters(), lr=0.3, momentum=0.9)
    for _ in range(3):
        plain.zero_grad()
        twin(inputs).square().sum().backward()
        nn.utils.clip_grad_norm_(twin.parameters(), 0.4)
        plain.step()
    for name, p in twin.named_parameters():
        torch.testing.assert_close(fmodel.params[name], p.detach(), rtol=1e-12, atol=1e-14)


def test_a_learned_bound_has_a_gradient() -> None:
    bound = double(1.5).requires_grad_()
    y = bda.rollout(lower, None, START, X, steps=3, lr=0.2, clip_norm=bound, adjoint=bda.Checkpointed())
    (grad,) = torch.autograd.grad(upper(y, X, None), bound)
    ends = [
        upper(bda.rollout(lower, None, START, X, steps=3, lr=0.2, clip_norm=1.5 + h), X, None) for h in (1e-6, -1e-6)
    ]
    assert grad.item() == pytest.approx(((ends[0] - ends[1]) / 2e-6).item(), rel=1e-6)


def test_each_task_has_its_own_norm() -> None:
    scales = double(0.1, 1.0, 10.0)
    batches = [scales] * 3

    def loss(y: Tensor, x: Tensor, scale: Tensor) -> Tensor:
        return scale * (x * y).square().sum()

    start, x = double(1.0, 2.0), double(0.7)
    options = {"steps": 3, "lr": 0.2, "clip_norm": 0.5}
    together = bda.rollout(loss, None, start, x, batches=batches, tasks=3, **options)
    for i, scale in enumerate(scales):
        alone = bda.rollout(loss, None, start, x, batches=[scale] * 3, **options)
        torch.testing.assert_close(together[i], alone, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("wrong", [0.0, -1.0, True, "1", [1.0]], ids=repr)
def test_bounds_must_be_positive(wrong: Any) -> None:
    with pytest.raises(ValueError, match="`clip_norm` must be a positive number"):
        bda.rollout(lower, None, START, X, steps=1, lr=0.1, clip_norm=wrong)


@pytest.mark.parametrize("case", [{"clip_norm": 0.3}, {"clip_value": 0.2}], ids=str)
@pytest.mark.parametrize("more", [{"alpha": 0.2}, {"weight_decay": 1.0}], ids=str)
def test_an_implicit_adjoint_clips_where_the_loop_comes_to_rest(case: dict[str, Any], more: dict[str, Any]) -> None:
    """There the lower gradient is not 0: the upper level or a decay balances it."""
    start, x = double(1.0, -2.0, 0.5), double(2.0, 0.1, -0.3)
    below = lambda y, x, b: 0.5 * (y - x).square().sum() + 0.2 * (y.sum() - x[2]) ** 2  # noqa: E731
    above = lambda y, x, b: 0.5 * (y + x.sin()).square().sum()  # noqa: E731
    options: dict[str, Any] = {"steps": 800, "lr": 0.2, "upper_lr": 0.2, "momentum": 0.5, **more}
    want = bda.hypergradient(below, above, start, x, adjoint=bda.Checkpointed(), **case, **options)
    got = bda.hypergradient(below, above, start, x, adjoint=bda.Implicit(tol=1e-12), **case, **options)
    assert relative_error([got.grad], [want.grad]) < 1e-9
    assert (got.params - bda.hypergradient(below, above, start, x, **options).params).norm() > 0.01, "it clips"


# Transformations of torchopt.


def test_a_transformation_that_cuts_the_graph_is_warned_of_once() -> None:
    torchopt = pytest.importorskip("torchopt")
    broken = torchopt.chain(torchopt.clip.clip_grad_norm(1.0), torchopt.sgd(lr=0.2))
    with pytest.warns(UserWarning, match=r"a transformation cuts the graph.*`clip_norm=`"):
        bda.hypergradient(lower, upper, START, X, steps=3, rule=broken)
    bda.hypergradient(lower, upper, START, X, steps=3, rule=broken)


@pytest.mark.parametrize("name", ["sgd", "adam", "rmsprop", "adamw"])
def test_a_transformation_that_keeps_the_graph_passes(name: str) -> None:
    torchopt = pytest.importorskip("torchopt")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bda.hypergradient(lower, upper, START, X, steps=2, rule=getattr(torchopt, name)(lr=0.1))


def test_a_transformation_that_knows_the_shapes_is_tried_on_them() -> None:
    torchopt = pytest.importorskip("torchopt")

    def update(updates: Any, state: Any, *, params: Any = None, inplace: bool = True) -> Any:
        assert [tuple(u.shape) for u in updates] == [(3,), ()]
        return tuple(-0.2 * u for u in updates), state

    shaped = torchopt.base.GradientTransformation(lambda params: (), update)
    out = bda.hypergradient(lower, upper, START, X, steps=3, rule=shaped)
    want = bda.hypergradient(lower, upper, START, X, steps=3, lr=0.2)
    assert relative_error([out.grad], [want.grad]) < 1e-12
