"""The derivatives of every rule, against finite differences and forward mode."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from rule_cases import (
    CASES,
    Case,
    assert_equal,
    every_case,
    final,
    flat_start,
    inputs,
    start,
    unroll,
    vanishing,
)
from torch import Tensor, optim
from torch.autograd import forward_ad

from bda_optim._step.rules.adam import Adam
from bda_optim._step.rules.arithmetic import root
from bda_optim._step.rules.fista import FISTA
from bda_optim._step.rules.resolve import resolve

pytestmark = pytest.mark.usefixtures("doubles")  # torch.optim keeps some scalars of its state in the default dtype


def horizon(case: Case) -> int:
    return 8 if case.kind is optim.RAdam else 5  # its second branch begins at step 6


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
@every_case
def test_derivatives_have_two_witnesses(case: Case) -> None:
    function, points = final(case, horizon(case), case.settings()), inputs(case)
    assert torch.autograd.gradcheck(function, points, atol=1e-6, rtol=1e-5)
    generator = torch.Generator().manual_seed(2)
    tangents = [torch.randn(p.shape, generator=generator) for p in points]
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(p, t) for p, t in zip(points, tangents, strict=True)]
        out = [forward_ad.unpack_dual(y) for y in function(*duals)]
        weights = [torch.randn(o.primal.shape, generator=generator) for o in out]
        forward = sum((w * o.tangent).sum() for w, o in zip(weights, out, strict=True) if o.tangent is not None)
    value = sum((w * y).sum() for w, y in zip(weights, function(*points), strict=True))
    grads = torch.autograd.grad(value, points, allow_unused=True)
    reverse = sum((g * t).sum() for g, t in zip(grads, tangents, strict=True) if g is not None)
    torch.testing.assert_close(forward.detach(), reverse, rtol=1e-9, atol=1e-9)


@every_case
def test_tracing_leaves_the_derivative_alone(case: Case) -> None:
    grads = []
    for trace in (False, True):
        points = inputs(case)
        *params, lr, x = points
        out, _ = unroll(case.rule, case.settings(lr=lr), params, x, steps=horizon(case), graph=True, trace=trace)
        grads.append(torch.autograd.grad(sum(y.sin().sum() for y in out), points))
    assert_equal(grads[1], grads[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("trace", [False, True], ids=["eager", "traced"])
@every_case
def test_derivatives_are_finite_where_gradients_vanish(case: Case, trace: bool) -> None:
    points = inputs(case, flat_start)
    *params, lr, x = points
    steps = horizon(case)
    out, _ = unroll(case.rule, case.settings(lr=lr), params, x, loss=vanishing, steps=steps, graph=True, trace=trace)
    first = torch.autograd.grad(sum(y.sum() for y in out), points, create_graph=True)
    assert all(torch.isfinite(g).all() for g in first)
    if any(g.requires_grad for g in first):
        second = torch.autograd.grad(sum(g.sum() for g in first), points, allow_unused=True)
        assert all(torch.isfinite(g).all() for g in second if g is not None)


def test_adams_derivative_at_a_zero_gradient_is_one_over_eps() -> None:
    grad = torch.zeros(3, requires_grad=True)
    for rule, expected in ((Adam(), 1 / 1e-3), (resolve(optim.RMSprop), 1 / 1e-3), (resolve(optim.Adagrad), 1 / 1e-3)):
        params, settings = [torch.ones(3)], {"eps": 1e-3, "lr": 1.0}
        moves, _ = rule.update([grad], rule.init(params, settings), params, settings)
        assert moves[0] is not None
        (found,) = torch.autograd.grad(moves[0].displacement().sum(), grad)
        torch.testing.assert_close(found, torch.full((3,), expected))


def test_centered_variance_below_zero_counts_as_zero() -> None:
    rule, params = resolve(optim.RMSprop), [torch.zeros(1)]
    settings = {"centered": True, "rule_alpha": 0.5, "eps": 0.1, "lr": 1.0}
    state = ({"step": 5, "square_avg": torch.tensor([1.0 - 1e-9]), "grad_avg": torch.tensor([1.0])},)
    grad = torch.ones(1, requires_grad=True)
    moves, _ = rule.update([grad], state, params, settings)
    assert moves[0] is not None
    torch.testing.assert_close(moves[0].direction.detach(), torch.tensor([10.0]))
    assert torch.isfinite(torch.autograd.grad(moves[0].direction.sum(), grad)[0]).all()


def test_the_safe_root() -> None:
    x = torch.tensor([4.0, 0.0, -1e-9], requires_grad=True)
    assert root(x).tolist() == [2.0, 0.0, 0.0] and root(torch.tensor(math.nan)).isnan()
    assert torch.autograd.grad(root(x).sum(), x)[0].tolist() == [0.25, 0.0, 0.0]


def test_learned_betas_in_float32_are_corrected_in_double() -> None:
    params, grads, found = [torch.ones(3, dtype=torch.float32)], [torch.full((3,), 0.5, dtype=torch.float32)], []
    for betas in ((0.9, 0.999), (torch.tensor(0.9, dtype=torch.float32), torch.tensor(0.999, dtype=torch.float32))):
        settings = {"lr": 1.0, "betas": betas}
        state = Adam().init(params, settings)
        for _ in range(2):
            (move,), state = Adam().update(grads, state, params, settings)
        assert move is not None
        found.append(move.displacement())
    torch.testing.assert_close(found[1], found[0], rtol=1e-6, atol=0.0)


def test_a_diverged_gradient_is_not_hidden() -> None:
    for case in CASES:
        if case.kind is optim.Rprop:
            continue
        params = [torch.ones(2)]
        moves, _ = case.rule.update(
            [torch.full((2,), math.nan)], case.rule.init(params, case.settings()), params, case.settings()
        )
        assert moves[0].displacement().isnan().all(), case


LEARNED = [
    (optim.SGD, {"momentum": 0.8, "weight_decay": 0.2, "dampening": 0.3}),
    (optim.SGD, {"momentum": 0.8, "nesterov": True}),
    (optim.Adam, {"betas": (0.7, 0.8), "eps": 0.1, "weight_decay": 0.2}),
    (optim.Adam, {"betas": (0.7, 0.8), "amsgrad": True, "weight_decay": 0.2, "decoupled_weight_decay": True}),
    (optim.AdamW, {"betas": (0.7, 0.8), "weight_decay": 0.2}),
    (optim.Adamax, {"betas": (0.7, 0.8), "eps": 0.1, "weight_decay": 0.2}),
    (optim.NAdam, {"betas": (0.7, 0.8), "momentum_decay": 0.3, "weight_decay": 0.2}),
    (optim.RAdam, {"betas": (0.7, 0.9), "eps": 0.1, "weight_decay": 0.2}),
    (optim.RAdam, {"betas": (0.7, 0.6)}),
    (optim.RMSprop, {"rule_alpha": 0.8, "eps": 0.1, "momentum": 0.5, "centered": True, "weight_decay": 0.2}),
    (optim.Adagrad, {"lr_decay": 0.3, "eps": 0.1, "weight_decay": 0.2}),
    (optim.Adadelta, {"rho": 0.7, "eps": 0.1, "weight_decay": 0.2}),
    (optim.ASGD, {"lambd": 0.3, "rule_alpha": 0.6, "weight_decay": 0.2, "lr": 0.1}),
    (optim.Adafactor, {"beta2_decay": -0.7, "d": 1.2, "eps": (0.1, 0.2), "weight_decay": 0.2}),
    (FISTA, {"lr": 0.1, "weight_decay": 0.2}),
]


@pytest.mark.parametrize(("kind", "numbers"), LEARNED, ids=lambda v: "-".join(v) if isinstance(v, dict) else v.__name__)
def test_any_number_can_be_learned(kind: Any, numbers: dict[str, Any]) -> None:
    rule, flags = resolve(kind), {key: v for key, v in numbers.items() if isinstance(v, bool)}
    keys = [key for key in numbers if key not in flags]
    sizes = [len(numbers[key]) if isinstance(numbers[key], tuple) else 1 for key in keys]
    values = [v for key in keys for v in (numbers[key] if isinstance(numbers[key], tuple) else (numbers[key],))]

    def settings(*learned: Any) -> dict[str, Any]:
        source = iter(learned)
        parts = [tuple(next(source) for _ in range(size)) for size in sizes]
        return {
            key: part if isinstance(numbers[key], tuple) else part[0] for key, part in zip(keys, parts, strict=True)
        }

    def run(*learned: Tensor) -> tuple[Tensor, ...]:
        full = {"lr": 0.05, **settings(*learned), **flags}
        rule.validate(full)
        return tuple(unroll(rule, full, start(), steps=8, graph=True)[0])

    learned = [torch.tensor([v]).requires_grad_() for v in values]  # one element, but not 0-dim
    expected, _ = unroll(rule, {"lr": 0.05, **numbers}, start(), steps=8)
    assert_equal(run(*learned), expected)
    assert torch.autograd.gradcheck(run, learned, atol=1e-6, rtol=1e-5)
