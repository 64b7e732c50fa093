"""Mixed precision: autocast in the inner loop, a master copy of y, and GradScaler at the upper level."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from problems import relative_error
from torch import Tensor, nn

import bda_optim as bda

HALVES = pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
REPLAYING = (bda.Checkpointed(), bda.Checkpointed(every=1), bda.Checkpointed(slots=2))


def problem(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, tuple[Tensor, Tensor], Tensor]:
    """A small network, a batch, and logits that weight its examples."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 4)).to(dtype)
    batch = torch.randn(12, 8, dtype=dtype), torch.randint(4, (12,))
    return net, batch, torch.zeros(12, requires_grad=True)


def lower(net: Any, w: Tensor, batch: Any) -> Tensor:
    inputs, labels = batch
    return (torch.sigmoid(w) * F.cross_entropy(net(inputs).float(), labels, reduction="none")).mean()


def upper(net: Any, w: Tensor, batch: Any) -> Tensor:
    inputs, labels = batch
    return F.cross_entropy(net(inputs.flip(0)).float(), labels)


# --- autocast ---------------------------------------------------------------------------------------------------------


def under_autocast(half: torch.dtype | None, adjoint: Any, **options: Any) -> list[Tensor]:
    """The hypergradient and y_K; the backward pass runs outside autocast, as torch recommends."""
    net, batch, w = problem()
    inner = bda.BDAInnerOptimizer(net.parameters(), lr=0.5, upper_lr=0.3, alpha=bda.harmonic(0.5))
    torch.manual_seed(1)
    with torch.autocast("cpu", dtype=half or torch.bfloat16, enabled=half is not None):
        fmodel = inner.unroll(net, lower, upper, hyper=w, steps=5, batches=[batch] * 5, adjoint=adjoint, **options)
        value = upper(fmodel.eval(), w, batch)
    value.backward()
    return [w.grad, *fmodel.params.values()]


@HALVES
@pytest.mark.parametrize("adjoint", REPLAYING, ids=repr)
def test_autocast_is_the_same_under_recomputation(half: torch.dtype, adjoint: Any) -> None:
    got, want = under_autocast(half, adjoint), under_autocast(half, bda.Unroll())
    assert all(map(torch.equal, got[1:], want[1:])), "y_K to the bit"
    assert relative_error(got[:1], want[:1]) < 1e-6
    assert all(t.dtype == torch.float32 for t in got), "y stays in float32; only the forward passes are cast"
    exact = under_autocast(None, bda.Unroll())
    assert 1e-5 < relative_error(got[:1], exact[:1]) < (0.1 if half == torch.bfloat16 else 0.02)


@HALVES
def test_autocast_in_innerloop_and_over_tasks(half: torch.dtype) -> None:
    net, batch, w = problem()
    net.eval()
    inner = bda.BDAInnerOptimizer(net.parameters(), lr=0.5)
    with torch.autocast("cpu", dtype=half):
        with bda.innerloop_ctx(net, inner) as (fmodel, diffopt):
            for _ in range(3):
                diffopt.step(lower(fmodel, w, batch))
            value = upper(fmodel, w, batch)
        (by_hand,) = torch.autograd.grad(value, w)
        fmodel = inner.unroll(net, lower, hyper=w, steps=3, batches=[batch] * 3)
        (handed_over,) = torch.autograd.grad(upper(fmodel, w, batch), w)
        stacked = tuple(torch.stack([t, t]) for t in batch)
        fmodel = inner.unroll(net, lower, hyper=w, steps=3, batches=[stacked] * 3, tasks=2)
        (twice,) = torch.autograd.grad(fmodel.losses(upper, w, stacked).sum(), w)
    assert torch.equal(by_hand, handed_over)
    assert relative_error([twice / 2], [by_hand]) < 0.02  # other kernels, with other rounding in half precision


# --- a master copy of y -----------------------------------------------------------------------------------------------


def by_hand(half: torch.dtype, steps: int, lr: float) -> tuple[list[Tensor], Tensor]:
    """y_K in float32 and the hypergradient, with the module computing in half precision: a naive unroll."""
    net, batch, w = problem(half)
    net.eval()
    names = [name for name, _ in net.named_parameters()]
    ys = [p.detach().float().requires_grad_() for p in net.parameters()]

    def module(ys: list[Tensor]) -> Callable[[Tensor], Tensor]:
        tensors = {name: y.to(half) for name, y in zip(names, ys, strict=True)}
        return lambda inputs: torch.func.functional_call(net, tensors, (inputs,))

    for _ in range(steps):
        grads = torch.autograd.grad(lower(module(ys), w, batch), ys, create_graph=True)
        ys = [y - lr * g for y, g in zip(ys, grads, strict=True)]
    (grad,) = torch.autograd.grad(upper(module(ys), w, batch), w)
    return [y.detach() for y in ys], grad


@HALVES
@pytest.mark.parametrize("adjoint", [bda.Unroll(), *REPLAYING], ids=repr)
def test_master_copy_is_the_naive_one(half: torch.dtype, adjoint: Any) -> None:
    ys, grad = by_hand(half, steps=4, lr=0.5)
    net, batch, w = problem(half)
    net.eval()
    inner = bda.BDAInnerOptimizer(net.parameters(), lr=0.5)
    fmodel = inner.unroll(net, lower, hyper=w, steps=4, batches=[batch] * 4, adjoint=adjoint, master=torch.float32)
    assert all(y.dtype == torch.float32 for y in fmodel.params.values())
    assert fmodel(batch[0]).dtype == half, "the module computes in its own dtype"
    assert relative_error(list(fmodel.params.values()), ys) < 1e-6
    assert relative_error([torch.autograd.grad(upper(fmodel, w, batch), w)[0]], [grad]) < 1e-5
    assert all(p.dtype == half for p in net.parameters())


def test_master_copy_keeps_small_steps() -> None:
    """In bfloat16 a step of a thousandth of y is lost, every time; in the master copy they add up."""
    lr, steps = 2e-3, 20
    ys, _ = by_hand(torch.bfloat16, steps, lr)
    net, batch, w = problem(torch.bfloat16)
    net.eval()
    start = [p.detach().float() for p in net.parameters()]
    inner = bda.BDAInnerOptimizer(net.parameters(), lr=lr)

    def moved(fmodel: Any) -> Tensor:
        return torch.cat([(y.float() - s).reshape(-1) for y, s in zip(fmodel.params.values(), start, strict=True)])

    want = torch.cat([(y - s).reshape(-1) for y, s in zip(ys, start, strict=True)])
    options = dict(hyper=w, steps=steps, batches=[batch] * steps)
    kept, lost = (moved(inner.unroll(net, lower, master=m, **options)) for m in (torch.float32, None))
    assert relative_error([kept], [want]) < 1e-4
    assert relative_error([lost], [want]) > 0.3
    with bda.innerloop_ctx(net, inner, master=torch.float32) as (fmodel, diffopt):
        for _ in range(steps):
            diffopt.step(lower(fmodel, w, batch))
    assert relative_error([moved(fmodel)], [want]) < 1e-4


def test_master_copy_of_a_rule_and_its_commit() -> None:
    """Adam's moments are in float32 too; committed, y is rounded once, and the next loop goes on with the moments."""
    net, batch, w = problem(torch.bfloat16)
    net.eval()
    inner = bda.BDAInnerOptimizer(net.parameters(), lr=1e-2, rule=torch.optim.Adam)
    for count in (3, 6):
        fmodel = inner.unroll(
            net, lower, hyper=w, steps=3, batches=[batch] * 3, master=torch.float32, copy_initial_weights=False
        )
        upper(fmodel, w, batch).backward()
        assert w.grad is not None and w.grad.abs().sum() > 0
        assert all(p.grad is not None and p.grad.dtype == torch.bfloat16 for p in net.parameters())
        inner.commit(fmodel)
        for p, y in zip(net.parameters(), fmodel.params.values(), strict=True):
            assert torch.equal(p, y.bfloat16())
            assert inner.state[p]["exp_avg"].dtype == torch.float32 and inner.state[p]["step"] == count


def test_master_copy_over_tasks() -> None:
    net, batch, w = problem(torch.bfloat16)
    net.eval()
    inner = bda.BDAInnerOptimizer(net.parameters(), lr=0.5)
    stacked = tuple(torch.stack([t, t.flip(0)]) for t in batch)
    fmodel = inner.unroll(net, lower, hyper=w, steps=2, batches=[stacked] * 2, tasks=2, master=torch.float32)
    (got,) = torch.autograd.grad(fmodel.losses(upper, w, stacked).sum(), w)
    want = torch.zeros_like(w)
    for task in zip(*stacked, strict=True):
        single = inner.unroll(net, lower, hyper=w, steps=2, batches=[task] * 2, master=torch.float32)
        want += torch.autograd.grad(upper(single, w, task), w)[0]
    assert fmodel.params["0.weight"].dtype == torch.float32
    assert relative_error([got], [want]) < 0.02


def test_master_copy_is_refused_or_needless() -> None:
    net, batch, w = problem()
    net.eval()
    inner = bda.BDAInnerOptimizer(net.parameters(), lr=0.5)
    with pytest.raises(TypeError, match="`master` must be a floating-point dtype"):
        inner.unroll(net, lower, hyper=w, steps=1, batches=[batch], master=torch.int32)
    with pytest.raises(TypeError, match="'float32'"):
        inner.unroll(net, lower, hyper=w, steps=1, batches=[batch], master="float32")  # type: ignore[arg-type]
    plain, same, narrow = (
        inner.unroll(net, lower, hyper=w, steps=2, batches=[batch] * 2, master=m)
        for m in (None, torch.float32, torch.bfloat16)
    )
    for fmodel in (same, narrow):
        assert all(map(torch.equal, fmodel.params.values(), plain.params.values()))


# --- GradScaler -------------------------------------------------------------------------------------------------------


def test_a_scaler_saves_hypergradients_from_underflow() -> None:
    """In float16 an upper loss of 1e-6 has no hypergradient; scaled, it has that of float32, to half precision."""

    def grad(half: bool, scaler: torch.amp.GradScaler) -> Tensor:
        net, batch, w = problem()
        net.eval()
        inner = bda.BDAInnerOptimizer(net.parameters(), lr=0.5)
        outer = torch.optim.SGD([w], lr=1.0)
        with torch.autocast("cpu", dtype=torch.float16, enabled=half):
            fmodel = inner.unroll(net, lower, hyper=w, steps=3, batches=[batch] * 3, adjoint=bda.Checkpointed())
            value = 1e-6 * upper(fmodel, w, batch)
        scaler.scale(value).backward()
        scaler.unscale_(outer)
        assert w.grad is not None
        return w.grad

    off, on = torch.amp.GradScaler("cpu", enabled=False), torch.amp.GradScaler("cpu", init_scale=2.0**20)
    exact = grad(False, off)
    assert relative_error([grad(True, off)], [exact]) > 0.1
    assert relative_error([grad(True, on)], [exact]) < 0.01


def test_an_overflow_skips_the_upper_step() -> None:
    net, batch, w = problem()
    net.eval()
    inner = bda.BDAInnerOptimizer(net.parameters(), lr=0.5)
    outer, scaler = torch.optim.SGD([w], lr=1.0), torch.amp.GradScaler("cpu", init_scale=2.0**40)
    scales = [scaler.get_scale()]
    for _ in range(40):
        outer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            fmodel = inner.unroll(net, lower, hyper=w, steps=3, batches=[batch] * 3)
            value = upper(fmodel, w, batch)
        scaler.scale(value).backward()
        before = w.detach().clone()
        scaler.step(outer)
        scaler.update()
        scales.append(scaler.get_scale())
        assert torch.equal(w, before) == (scales[-1] < scales[-2]), "a step is taken, or the scale is halved"
        if scales[-1] == scales[-2]:
            break
    assert 1 < len(scales) - 1 < 40, "it overflowed at first, and not in the end"
