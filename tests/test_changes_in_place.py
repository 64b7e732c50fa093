"""Tensors that change in place between a rollout and its backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from problems import START, double, leaf
from torch import Tensor

import bda_optim as bda

REPLAYED = [bda.Checkpointed(), bda.Checkpointed(every=1), bda.Checkpointed(slots=2)]
replayed = pytest.mark.parametrize("adjoint", REPLAYED, ids=str)


def product(y: Tensor, x: Any, batch: Tensor) -> Tensor:
    """A loss whose derivative needs the values of all its arguments."""
    return (y * x["w"][0] * batch).square().sum() + (y - 1).square().sum()


def changing() -> tuple[dict[str, Any], Tensor, list[Tensor], Tensor]:
    return {"w": [leaf(0.3)]}, leaf(0.2), [double(1.0), double(2.0), leaf(3.0), double(4.0)], leaf(0.4)


def rolled(x: Any, lr: Tensor, batches: list[Tensor], alpha: Tensor, adjoint: Any) -> Tensor:
    return bda.rollout(
        product, product, START, x, steps=4, lr=lr, upper_lr=0.01, alpha=alpha, batches=batches, adjoint=adjoint
    ).prod()


CHANGES: dict[str, tuple[Callable[..., Tensor], str]] = {
    "hyper": (lambda x, lr, batches, alpha: x["w"][0], r"hyper\['w'\]\[0\] \(scalar float64 on cpu\)"),
    "batch": (lambda x, lr, batches, alpha: batches[1], r"a tensor of the batch of step k=2 \(scalar float64 on cpu\)"),
    "batch with grad": (
        lambda x, lr, batches, alpha: batches[2],
        r"a tensor of batches\[2\] \(scalar float64 on cpu\)",
    ),
    "lr": (lambda x, lr, batches, alpha: lr, r"lr.* \(scalar float64 on cpu\)"),
    "alpha": (lambda x, lr, batches, alpha: alpha, r"alpha.* \(scalar float64 on cpu\)"),
}


@pytest.mark.parametrize("which", CHANGES)
@replayed
def test_a_change_in_place_is_named(adjoint: Any, which: str) -> None:
    parts = changing()
    loss = rolled(*parts, adjoint)
    find, name = CHANGES[which]
    with torch.no_grad():
        find(*parts).mul_(2)
    with pytest.raises(
        RuntimeError, match=name + r" was changed in place .*Call `\.backward\(\)` first, or change a copy"
    ):
        loss.backward()


@pytest.mark.parametrize("which", [name for name in CHANGES if name != "alpha"])  # no derivative needs alpha
def test_a_change_in_place_of_an_unrolled_loop_is_found_by_torch(which: str) -> None:
    parts = changing()
    loss = rolled(*parts, bda.Unroll())
    with torch.no_grad():
        CHANGES[which][0](*parts).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@replayed
def test_a_change_in_place_is_named_with_create_graph(adjoint: Any) -> None:
    parts = changing()
    loss = rolled(*parts, adjoint)
    with torch.no_grad():
        parts[2][1].mul_(2)
    with pytest.raises(RuntimeError, match="the batch of step k=2"):
        torch.autograd.grad(loss, parts[1], create_graph=True)


def test_forward_mode_has_its_derivatives_already() -> None:
    parts = changing()
    (want,) = torch.autograd.grad(rolled(*parts, bda.Unroll()), parts[0]["w"])
    loss = rolled(*parts, bda.ForwardMode())
    with torch.no_grad():
        parts[0]["w"][0].mul_(2)
        parts[2][1].mul_(2)
    assert torch.autograd.grad(loss, parts[0]["w"])[0].item() == pytest.approx(want.item(), rel=1e-12)


@replayed
def test_a_change_before_the_rollout_is_allowed(adjoint: Any) -> None:
    """Only a change between the two passes is an error: an upper step after `backward` is the ordinary case."""
    parts = changing()
    for _ in range(2):
        rolled(*parts, adjoint).backward()
        with torch.no_grad():
            parts[0]["w"][0].sub_(0.01)
