"""Wrong use of `hypergradient` and `rollout`: the error says what was wrong, what came, and what to do."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from problems import EXACT, START, double, exact, leaf, lower, run, upper
from torch import Tensor, optim

import bda_optim as bda


def vector(y: Tensor, x: Tensor, batch: Any) -> Tensor:
    return y * x


def number(y: Tensor, x: Tensor, batch: Any) -> Any:
    return lower(y, x).item()


@exact
@pytest.mark.parametrize("level", ["lower", "upper"])
def test_a_loss_must_be_a_scalar(level: str, adjoint: Any) -> None:
    with pytest.raises(
        ValueError, match=rf"the {level} loss must be a scalar; got shape \(2,\) at step k=1\. Reduce it"
    ):
        run(**{level: vector}, adjoint=adjoint)
    with pytest.raises(TypeError, match=rf"the {level} loss must be a scalar tensor; got float at step k=1\. Return"):
        run(**{level: number}, adjoint=adjoint)


@pytest.mark.parametrize("wrong, got", [(vector, r"\(2,\)"), (number, "float"), (lambda y, x, b: None, "NoneType")])
def test_the_last_upper_loss_must_be_a_scalar_too(wrong: Any, got: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"the upper loss must be a scalar.*got.*{got}"):
        run(upper=wrong, alpha=0.0)


@exact
def test_the_lower_loss_must_depend_on_y(adjoint: Any) -> None:
    for wrong in (lambda y, x, b: x**2, lambda y, x, b: lower(y.detach(), x), lambda y, x, b: double(1.0)):
        with pytest.raises(ValueError, match=r"does not depend on any parameter .*step k=1.* without `\.detach\(\)`"):
            run(wrong, adjoint=adjoint)


def test_the_upper_loss_need_not_depend_on_y() -> None:
    out = run(upper=lambda y, x, b: x**2)
    assert out.grad.item() == pytest.approx(0.6)


@exact
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_names_the_step(adjoint: Any, bad: float) -> None:
    factors = [1.0, 1.0, bad, 1.0]
    with pytest.raises(
        FloatingPointError, match=r"diverged: the lower loss is not finite at step k=3 of 4\. Lower `lr`"
    ):
        run(lambda y, x, b: b * lower(y, x), steps=4, batches=factors, adjoint=adjoint)
    with pytest.raises(
        FloatingPointError, match=r"diverged: the upper loss is not finite at step k=3 of 4\. Lower `lr`"
    ):
        run(upper=lambda y, x, b: (b or 1.0) * upper(y, x), steps=4, batches=factors, adjoint=adjoint)


def test_parameters_that_are_not_finite_at_the_end() -> None:
    with pytest.raises(FloatingPointError, match=r"`params` is not finite after step k=1 of 1"):
        bda.rollout(lambda y, x, b: y.pow(4).sum(), None, double(1e60, 1.0), steps=1, lr=1e200)


@pytest.mark.parametrize("alpha", [1.0, 1.3, -0.1, math.nan])
def test_alpha_lies_below_one(alpha: float) -> None:
    message = rf"`alpha` must lie in \[0, 1\) at every step; got {alpha} at k="
    with pytest.raises(ValueError, match=message + r"1\. Use `harmonic\(0\.5\)` or clip it"):
        run(alpha=alpha)
    with pytest.raises(ValueError, match=message + "2"):
        run(alpha=lambda k: alpha if k == 2 else 0.5)
    with pytest.raises(ValueError, match=message + "3"):
        run(alpha=lambda k: alpha if k == 3 else 0.0)


@pytest.mark.parametrize("alpha", [1.0, 1.5, -0.25])
def test_a_tensor_alpha_lies_below_one(alpha: float) -> None:
    message = rf"`alpha` must lie in \[0, 1\) at every step; got {alpha} at k=1\. Learn it through a sigmoid"
    for wrong in (leaf(alpha), double(alpha), lambda k: double(alpha)):
        with pytest.raises(ValueError, match=message):
            run(alpha=wrong)
    with pytest.raises(ValueError, match=r"`alpha` must lie in \[0, 1\) at every step; got a tensor beyond"):
        run(alpha=[double(0.5, alpha)])


def test_a_negative_constant_in_a_tensor_schedule() -> None:
    with pytest.raises(ValueError, match=r"`alpha` must lie in \[0, 1\)"):
        run(alpha=bda.harmonic(leaf(-0.5)))


@pytest.mark.parametrize("alpha", ["0.5", None, True, (0.5,)])
def test_alpha_of_a_wrong_kind(alpha: Any) -> None:
    with pytest.raises(TypeError, match=r"`alpha` must be a number, a schedule or a tensor; got"):
        run(alpha=alpha)


@pytest.mark.parametrize("alpha", [0.3, bda.harmonic(0.5), leaf(0.2)], ids=["number", "schedule", "tensor"])
def test_aggregation_needs_the_upper_loss(alpha: Any) -> None:
    with pytest.raises(ValueError, match=r"`alpha` is not 0 at step k=1.*got upper=None\. Pass it, or set alpha=0\.0"):
        bda.rollout(lower, None, START, double(0.3), steps=3, lr=0.2, alpha=alpha)


def test_aggregation_in_the_middle_needs_the_upper_loss() -> None:
    with pytest.raises(ValueError, match=r"`alpha` is not 0 at step k=2.*got upper=None"):
        bda.rollout(lower, None, START, double(0.3), steps=3, lr=0.2, alpha=lambda k: 0.3 * (k == 2))


def test_a_hypergradient_needs_the_upper_loss() -> None:
    with pytest.raises(TypeError, match=r"got upper=None\. Use `rollout` for y_K alone"):
        run(upper=None, alpha=0.0)


@pytest.mark.parametrize("adjoint", [a for a in EXACT if a != bda.Unroll()], ids=str)
def test_a_captured_tensor_must_be_in_hyper(adjoint: Any) -> None:
    captured = torch.zeros(4, 3, dtype=torch.float64, requires_grad=True)
    for f, big_f in (
        (lambda y, x, b: lower(y, x) + captured.sum() * y[0], upper),
        (lower, lambda y, x, b: upper(y, x) + captured.sum() * y[0]),
    ):
        with pytest.raises(ValueError, match=r"neither in `hyper=` nor in `batches=`.*; got one of 4x3 float64 on cpu"):
            run(f, big_f, adjoint=adjoint)


def test_unrolling_differentiates_captured_tensors() -> None:
    captured = leaf(0.3)
    y = bda.rollout(lambda y, x, b: lower(y, captured), None, START, steps=3, lr=0.2)
    want = torch.autograd.grad(bda.rollout(lower, None, START, captured, steps=3, lr=0.2)[0], captured)
    assert torch.autograd.grad(y[0], captured) == want


@pytest.mark.parametrize("steps", [0, -1, 2.5, True, "3", None])
def test_steps_is_a_count(steps: Any) -> None:
    with pytest.raises(ValueError, match=r"`steps` must be a whole number of at least 1; got .*Pass an integer"):
        run(steps=steps)


@pytest.mark.parametrize("tasks", [0, -2, 1.0, True])
def test_tasks_is_a_count(tasks: Any) -> None:
    with pytest.raises(ValueError, match=r"`tasks` must be a whole number of at least 1; got .*Pass an integer"):
        run(tasks=tasks)


@pytest.mark.parametrize("params", [None, 1.0, [], {"a": "b"}], ids=str)
def test_params_must_hold_tensors(params: Any) -> None:
    with pytest.raises(ValueError, match="`params` must be a tensor or a tree of tensors; got"):
        run(params=params)


def test_params_must_be_floating_point() -> None:
    with pytest.raises(
        ValueError, match=r"must be floating point; got params\['n'\]\[0\], 2 int64 on cpu\. Keep it in"
    ):
        run(params={"y": START, "n": [torch.tensor([1, 2])]})


FAR = torch.zeros(2, device="meta", dtype=torch.float64)


@pytest.mark.parametrize(
    "name, options",
    [
        (r"hyper\['x'\]\[1\]", {"hyper": {"x": [double(0.3), FAR]}}),
        ("lr", {"lr": torch.zeros((), device="meta")}),
        (r"batches\[1\]", {"batches": [START, FAR, START]}),
        (r"batches\[1\]", {"batches": [START, FAR.clone().requires_grad_(), START]}),
    ],
    ids=["hyper", "setting", "batch", "batch with grad"],
)
def test_everything_is_on_one_device(name: str, options: dict[str, Any]) -> None:
    message = rf"must be on the device of the parameters \(cpu\); got .*{name}.* on meta\. Move it there with `\.to"
    with pytest.raises(ValueError, match=message):
        run(lambda y, x, b: y.sum(), lambda y, x, b: y.sum(), **options)


def test_single_numbers_may_stay_on_the_cpu() -> None:
    y0 = torch.zeros(2, device="meta")
    y = bda.rollout(lower, upper, y0, torch.tensor(0.3), steps=2, lr=torch.tensor(0.2), alpha=torch.tensor(0.4))
    assert y.is_meta


@pytest.mark.parametrize(
    "options, message",
    [
        ({"momentun": 0.9}, r"SGD has no setting `momentun`; it takes .*momentum.*Check the spelling"),
        ({"betas": (0.9, 0.9)}, r"SGD has no setting `betas`; it takes .*momentum"),
        ({"rule": optim.Adam, "momentum": 0.9}, r"Adam has no setting `momentum`; it takes .*betas"),
        ({"hypr": 1}, r"SGD has no setting `hypr`"),
    ],
    ids=str,
)
def test_unknown_settings(options: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        run(**options)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"lr": -0.1}, r"`lr` of SGD must be at least 0; got -0\.1"),
        ({"lr": double(0.1, 0.2, 0.3)}, r"`lr` as a tensor must have one element, or broadcast .*got shape \(3,\)"),
        (
            {"lr": [double(0.1, 0.2, 0.3)]},
            r"`lr` as a list must have one tensor per parameter .*got \[\(3,\)\] for .*\(2,\)",
        ),
        ({"lr": [double(0.1), double(0.1)]}, r"`lr` as a list must have one tensor per parameter"),
        ({"upper_lr": -1.0}, r"`upper_lr` must be a number of at least 0; got -1\.0\. Leave it out to follow `lr`"),
        ({"upper_lr": math.nan}, r"`upper_lr` must be a number of at least 0; got nan"),
        (
            {"lr": [double(0.1, 0.2)], "prox": bda.prox.l2_ball(1.0)},
            r"one rate per element; got l2_ball.*separable prox",
        ),
    ],
)
def test_settings_that_cannot_be_honoured(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(**options)


def test_prox_must_be_a_map() -> None:
    with pytest.raises(TypeError, match=r"`prox` must be a proximal map; got 0\.1\. Use one of `bda_optim\.prox`"):
        run(prox=0.1)
