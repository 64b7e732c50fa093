"""FISTA, against the textbook's loop."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from rule_cases import (
    EXACT,
    Case,
    X,
    apply,
    assert_equal,
    final,
    generic,
    inputs,
    start,
    traced,
    unroll,
)
from torch import Tensor

from bda_optim._step.rules.fista import FISTA
from bda_optim._step.rules.resolve import resolve
from bda_optim._step.rules.sgd import SGD

pytestmark = pytest.mark.usefixtures("doubles")  # torch.optim keeps some scalars of its state in the default dtype


def fista_by_the_book(y: Tensor, matrix: Tensor, rhs: Tensor, lr: float, threshold: float, steps: int) -> Tensor:
    """Beck & Teboulle's constant step size algorithm for ``|A y - b|^2 / 2 + threshold |y|_1``, in their notation."""
    x_old, z, t = y, y, 1.0
    for _ in range(steps):
        forward = z - lr * matrix.T @ (matrix @ z - rhs)
        x = forward.sign() * (forward.abs() - lr * threshold).clamp(min=0)
        t_next = (1 + math.sqrt(1 + 4 * t * t)) / 2
        z = x + (t - 1) / t_next * (x - x_old)
        x_old, t = x, t_next
    return x_old


@pytest.mark.parametrize("trace", [False, True], ids=["eager", "traced"])
@pytest.mark.parametrize("threshold", [0.0, 0.3])
def test_fista_is_the_textbook_loop(threshold: float, trace: bool) -> None:
    matrix, rhs, y = torch.randn(6, 4), torch.randn(6), torch.randn(4)
    lr = 1 / torch.linalg.matrix_norm(matrix, 2).item() ** 2
    rule, settings = resolve(FISTA), {"lr": lr}
    state = rule.init([y], settings)
    state = traced(state) if trace else state
    found = y
    for _ in range(15):
        (z,) = rule.point([found], state, settings)
        (move,), state = rule.update([matrix.T @ (matrix @ z - rhs)], state, [found], settings)
        assert move is not None and move.scale == 1.0
        forward = apply(found, move)
        found = forward.sign() * (forward.abs() - lr * threshold).clamp(min=0)
    torch.testing.assert_close(found, fista_by_the_book(y, matrix, rhs, lr, threshold, 15), **EXACT)


def test_fista_is_faster_than_descent_and_keeps_its_bound() -> None:
    curvature = torch.logspace(-4, 0, 50)
    y0 = torch.ones(50)

    def loss(params: Sequence[Tensor], x: Tensor, k: int) -> Tensor:
        return 0.5 * (curvature * params[0].square()).sum()

    for steps in (50, 200):
        values = {}
        for rule in (FISTA(), SGD()):
            (y,), _ = unroll(rule, {"lr": 1.0}, [y0], loss=loss, steps=steps)
            values[rule.name] = loss([y], X, 0).item()
        assert values["FISTA"] <= 2 * y0.square().sum().item() / (steps + 1) ** 2
        assert values["FISTA"] < values["SGD"] / 5


def test_fistas_weight_decay_is_a_quadratic_of_the_loss() -> None:
    def decayed(params: Sequence[Tensor], x: Tensor, k: int) -> Tensor:
        return generic(params, x, 1) + 0.1 * sum(p.square().sum() for p in params)

    found, _ = unroll(FISTA(), {"lr": 0.1, "weight_decay": 0.2}, start(), loss=lambda p, x, k: generic(p, x, 1))
    assert_equal(found, unroll(FISTA(), {"lr": 0.1}, start(), loss=decayed)[0])


def test_fista_is_differentiable_from_the_first_step() -> None:
    case = Case(FISTA, {"lr": 0.1, "weight_decay": 0.1, "maximize": True})
    for steps in (1, 2, 5):
        assert torch.autograd.gradcheck(final(case, steps, case.settings()), inputs(case), atol=1e-6, rtol=1e-5)
