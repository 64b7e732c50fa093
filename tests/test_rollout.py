"""`hypergradient` and `rollout` on trees of tensors: what comes out, what is evaluated, and what is read back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from problems import START, double, exact, leaf, lower, run, upper
from torch import Tensor, optim
from torch.utils._python_dispatch import TorchDispatchMode

import bda_optim as bda

# What comes out.


def test_the_parts_of_a_hypergradient() -> None:
    out = run(steps=5)
    assert out._fields == ("value", "grad", "params", "trace")
    assert out.value.shape == out.grad.shape == () and out.params.shape == (2,)
    assert out.trace.lower.shape == out.trace.upper.shape == (5,)
    assert not any(t.requires_grad for t in (out.value, out.grad, out.params, out.trace.lower, out.trace.upper))


def test_values_equal_the_equation() -> None:
    """y_{k+1} = y_k - [a_k s_u grad F + (1 - a_k) s_l grad f], written out with the gradients known."""
    y, x, f, big_f = START.clone(), 0.3, [], []
    for k in range(1, 6):
        f.append(0.5 * y[0] ** 2 - x * y[0])
        big_f.append(0.5 * (x - y[1]) ** 2 + 0.5 * (y[0] - 1) ** 2)
        g_lower, g_upper = torch.stack([y[0] - x, y[0] * 0]), torch.stack([y[0] - 1, y[1] - x])
        y = y - (0.5 / k * 0.7 * g_upper + (1 - 0.5 / k) * 0.2 * g_lower)
    out = run(steps=5)
    torch.testing.assert_close(out.params, y, rtol=0, atol=1e-15)
    torch.testing.assert_close(out.trace.lower, torch.stack(f), rtol=0, atol=1e-15)
    torch.testing.assert_close(out.trace.upper, torch.stack(big_f), rtol=0, atol=1e-15)
    assert out.value.item() == pytest.approx(upper(y, x).item(), abs=1e-15)


@exact
def test_trace_is_the_same_for_every_adjoint(adjoint: Any) -> None:
    want, got = run(steps=6).trace, run(steps=6, adjoint=adjoint).trace
    assert torch.equal(got.lower, want.lower) and torch.equal(got.upper, want.upper)


def test_trace_without_aggregation_has_no_upper_losses() -> None:
    assert run(alpha=0.0).trace.upper is None


def test_trace_is_nan_where_a_step_skipped_the_upper_loss() -> None:
    trace = run(alpha=lambda k: 0.3 if k == 2 else 0.0).trace
    assert trace.upper.isnan().tolist() == [True, False, True]
    assert trace.lower.isfinite().all()


def test_rollout_is_the_differentiable_part() -> None:
    x, out = leaf(0.3), run()
    y = bda.rollout(lower, upper, START, x, steps=3, lr=0.2, upper_lr=0.7, alpha=bda.harmonic(0.5))
    assert torch.equal(y, out.params) and y.requires_grad
    (grad,) = torch.autograd.grad(upper(y, x), x)
    assert grad.item() == pytest.approx(out.grad.item(), abs=1e-15)


def test_arguments_stay_as_they_are() -> None:
    x, y0 = leaf(0.3), leaf(2.0, 2.0)
    for out in (run(hyper=x, params=y0).params, bda.rollout(lower, None, y0, x, steps=3, lr=0.2)):
        assert out is not y0
    assert torch.equal(y0, START) and x.item() == 0.3
    assert x.grad is None and y0.grad is None and x.requires_grad and y0.requires_grad


def test_default_rates_are_those_of_the_rule() -> None:
    plain = bda.rollout(lower, None, START, double(0.3), steps=2)
    assert torch.equal(plain, bda.rollout(lower, None, START, double(0.3), steps=2, lr=1e-3))
    adam = bda.rollout(lower, None, START, double(0.3), steps=2, rule=optim.Adagrad)
    assert torch.equal(adam, bda.rollout(lower, None, START, double(0.3), steps=2, rule=optim.Adagrad, lr=1e-2))


def test_upper_lr_follows_lr() -> None:
    assert torch.equal(run(upper_lr=None).params, run(upper_lr=0.2).params)
    assert not torch.equal(run(upper_lr=None).params, run(upper_lr=0.7).params)


def test_a_hypergradient_under_no_grad() -> None:
    with torch.no_grad():
        assert torch.equal(run().grad, run().grad)
        inside = run().grad
    assert torch.equal(inside, run().grad)


def test_parameters_keep_their_dtype() -> None:
    y = bda.rollout(lower, upper, START.float(), torch.tensor(0.3), steps=3, lr=double(0.2), alpha=double(0.3))
    assert y.dtype == torch.float32


def test_params_may_be_a_tree() -> None:
    params = {"a": [START.clone(), double(1.0)], "b": (double(3.0),)}

    def f(y: Any, x: Tensor, batch: Any) -> Tensor:
        assert isinstance(y["a"], list) and isinstance(y["b"], tuple)
        return lower(y["a"][0], x) + (y["a"][1] * y["b"][0] - x).square()

    out = run(f, lambda y, x, b: upper(y["a"][0], x), params=params)
    assert out.params["a"][0].shape == (2,) and out.params["b"][0].shape == ()
    assert torch.equal(out.params["a"][0], run().params)


# The upper loss costs nothing where alpha is 0.


class Counted:
    def __init__(self, loss: Callable[..., Tensor]) -> None:
        self.loss, self.calls = loss, 0

    def __call__(self, y: Tensor, x: Tensor, batch: Any) -> Tensor:
        self.calls += 1
        return self.loss(y, x)


@pytest.mark.parametrize(
    "alpha", [0.0, 0, bda.constant(0.0), lambda k: 0.0], ids=["float", "int", "schedule", "function"]
)
@exact
def test_upper_is_not_called_in_the_loop(alpha: Any, adjoint: Any) -> None:
    big_f = Counted(upper)
    run(upper=big_f, alpha=alpha, steps=5, adjoint=adjoint)
    assert big_f.calls == 1


def test_upper_is_called_where_it_counts() -> None:
    f, big_f = Counted(lower), Counted(upper)
    run(f, big_f, steps=5)
    assert (f.calls, big_f.calls) == (5, 6)
    big_f.calls = 0
    run(f, big_f, steps=5, alpha=lambda k: 0.3 * (k <= 2))
    assert big_f.calls == 3


def test_upper_may_be_left_out() -> None:
    assert torch.equal(bda.rollout(lower, None, START, double(0.3), steps=3, lr=0.2), run(alpha=0.0).params)


# No value is read back from the device: on `meta` there is none.


META: dict[str, dict[str, Any]] = {
    "plain": {"lr": 0.1},
    "aggregated": {"lr": 0.1, "alpha": bda.harmonic(0.5), "upper_lr": 0.2},
    "learned": {
        "lr": torch.zeros((), device="meta", requires_grad=True),
        "alpha": torch.zeros((), device="meta", requires_grad=True),
        "momentum": torch.zeros((), device="meta", requires_grad=True),
    },
    "schedule": {"lr": 0.1, "alpha": bda.harmonic(torch.zeros((), device="meta", requires_grad=True))},
    "prox": {"lr": 0.1, "alpha": 0.3, "prox": bda.prox.l1(torch.zeros((), device="meta", requires_grad=True))},
    "Adam": {"lr": 0.1, "alpha": 0.3, "rule": optim.Adam, "amsgrad": True},
    "l2_ball": {"lr": 0.1, "prox": bda.prox.l2_ball(1.0)},
}


@pytest.mark.parametrize("settings", META.values(), ids=META)
@pytest.mark.parametrize("adjoint", [bda.Unroll(), bda.Checkpointed(), bda.Checkpointed(slots=2)], ids=str)
def test_nothing_is_read_back(settings: dict[str, Any], adjoint: Any) -> None:
    x, y0 = torch.zeros(3, device="meta"), torch.zeros(4, 3, device="meta")

    def f(y: Tensor, x: Tensor, batch: Any) -> Tensor:
        return (torch.tanh(y) * x + batch).square().mean()

    out = bda.hypergradient(
        f, lambda y, x, b: (y @ x).square().mean(), y0, x, steps=5, batches=[torch.ones(3, device="meta")] * 5,
        adjoint=adjoint, **settings,
    )  # fmt: skip
    assert out.grad.shape == (3,) and out.params.shape == (4, 3) and out.trace.lower.shape == (5,)
    assert all(t.is_meta for t in (out.value, out.grad, out.params, out.trace.lower))


class Reads(TorchDispatchMode):
    """Counts how often a value is read back from the device."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("rule", [None, optim.Adam, optim.RAdam, bda.FISTA])
@exact
def test_values_are_read_once_and_not_in_every_step(adjoint: Any, rule: Any) -> None:
    def reads(steps: int, alpha: Any) -> int:
        with Reads() as mode:
            run(
                hyper=leaf(0.3),
                steps=steps,
                lr=leaf(0.1),
                alpha=alpha,
                prox=bda.prox.l1(0.01),
                adjoint=adjoint,
                rule=rule,
            )
        return mode.count

    # The check of replays reads its flags in one `tolist`, which is no such operation: test_device.py counts it.
    assert reads(3, 0.3) == reads(12, 0.3) == 1
    assert reads(3, leaf(0.3)) == reads(12, leaf(0.3))
