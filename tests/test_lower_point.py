"""`lower_point`: the proximal step on the lower loss alone, from which supports are read."""

from __future__ import annotations

from typing import Any

import pytest
from problems import START, double
from torch import Tensor

import bda_optim as bda


def test_lower_point_is_one_proximal_step() -> None:
    params, x = {"y": double(3.0, 0.2, -1.0)}, double(1.0)

    def f(y: Any, x: Tensor, batch: Any) -> Tensor:
        return 0.5 * (y["y"] - x * batch).square().sum()

    got = bda.lower_point(f, params, x, double(2.0), lr=0.5, prox=bda.prox.l1(lambda hyper: 0.8 * hyper))
    # y - lr (y - 2) = (2.5, 1.1, 0.5), and a threshold of 0.4
    assert got["y"].tolist() == pytest.approx([2.1, 0.7, 0.1]) and not got["y"].requires_grad
    plain = bda.lower_point(f, params, x, double(2.0), lr=double(0.5))
    assert plain["y"].tolist() == pytest.approx([2.5, 1.1, 0.5])
    assert params["y"].tolist() == [3.0, 0.2, -1.0]


def test_lower_point_is_sparse_where_y_is_not() -> None:
    """With alpha > 0 the iterate contains a part of the upper direction."""

    def f(y: Tensor, x: Any, batch: Any) -> Tensor:
        return 0.5 * (y - double(2.0, 0.05)).square().sum()

    prox = bda.prox.l1(0.3)
    y = bda.rollout(f, lambda y, x, b: (y - 1).square().sum(), START, steps=30, lr=0.5, alpha=0.1, prox=prox)
    assert y[1].abs() > 1e-3
    assert bda.lower_point(f, y, lr=0.5, prox=prox)[1] == 0
