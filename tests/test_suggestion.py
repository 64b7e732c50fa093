"""What `diagnose` suggests: taken over as it is, it is right, and the finding that it answers is gone."""

from __future__ import annotations

import json
from typing import Any

import diagnosed
import pytest
import torch
from diagnosed import Problem
from torch import nn

import bda_optim as bda

REGULAR = {
    "ridge": diagnosed.ridge(),
    "ridge, larger": diagnosed.ridge(60, 35, seed=50),
    "ridge, n close to d": diagnosed.ridge(25, 20, seed=70),
}
OPEN = {
    "counter-example": diagnosed.counterexample(0.3),
    "counter-example, scaled": diagnosed.counterexample(-0.4, scale=3.0, start=(1.0, -3.0)),
    "least squares": diagnosed.least_squares(),
    "least squares, other seed": diagnosed.least_squares(seed=100),
    "least squares, larger": diagnosed.least_squares(14, 50, 7, seed=200),
}
ANSWERED = {"start", "weak-alpha", "strong-alpha", "rate", "short-K", "explodes", "truncated"}


def codes(report: bda.Diagnosis) -> set[str]:
    return {finding.code for finding in report.findings}


def taken_over(problem: Problem, **options: Any) -> tuple[bda.Diagnosis, float]:
    """Diagnose, take the suggestion over; return the report and the error, after a look at what is found then."""
    report = problem.call(bda.diagnose, **options)
    settings = report.suggestion.settings
    assert settings["steps"] <= max(2000, options["steps"])
    out = bda.hypergradient(problem.lower, problem.upper, problem.params, problem.hyper, **settings)
    again = bda.diagnose(problem.lower, problem.upper, problem.params, problem.hyper, **{**settings, "suggest": False})
    assert not codes(report) & codes(again) & ANSWERED
    assert report.suggestion.evaluations <= 16 * options["steps"] + 2
    return report, problem.error(out.grad)


@pytest.mark.parametrize("steps", [64, pytest.param(400, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", OPEN)
def test_open_problems(name: str, steps: int) -> None:
    """Plain unrolling is off by more than 10 % on all of them."""
    problem = OPEN[name]
    assert problem.error(problem.call(bda.hypergradient, steps=steps).grad) > 0.1
    report, error = taken_over(problem, steps=steps)
    assert "start" in codes(report)
    assert error < 0.02
    assert report.suggestion.error < 0.05
    assert report.suggestion.settings["alpha"].name == "harmonic"
    assert "is y_K what you will use, or is it refitted?" in report.suggestion.question


@pytest.mark.parametrize("steps", [16, 200])
@pytest.mark.parametrize("name", REGULAR)
def test_regular_problems_keep_alpha_0(name: str, steps: int) -> None:
    report, error = taken_over(REGULAR[name], steps=steps)
    assert error < 0.02
    assert report.suggestion.settings["alpha"] == 0.0
    assert report.suggestion.question is None


@pytest.mark.slow
@pytest.mark.parametrize("alpha", [0.0, bda.harmonic(0.5), bda.polynomial(0.5, 0.5), 0.3], ids=str)
@pytest.mark.parametrize("steps", [16, 1000, 2000])
@pytest.mark.parametrize("name", [*OPEN, *REGULAR])
def test_from_any_settings(name: str, steps: int, alpha: Any) -> None:
    assert taken_over({**OPEN, **REGULAR}[name], steps=steps, alpha=alpha)[1] < 0.02


@pytest.mark.parametrize("steps", [16, 64])
@pytest.mark.parametrize(("n", "d", "seed"), [(25, 30, 300), (28, 30, 400)])
def test_a_slow_lower_level_is_handed_to_newton_steps(n: int, d: int, seed: int, steps: int) -> None:
    """The condition number is 340 and more: no harmonic(c) with K <= 2000 comes within 2 %."""
    report, error = taken_over(diagnosed.least_squares(n, d, 3, seed=seed), steps=steps)
    assert isinstance(report.suggestion.settings["adjoint"], bda.Implicit)
    assert report.suggestion.settings["steps"] == steps
    assert error < 0.02


def test_rates_are_brought_to_their_limits() -> None:
    problem = diagnosed.counterexample()
    report, error = taken_over(problem, steps=100, lr=1.6, upper_lr=1.9)
    assert "rate" in codes(report)
    assert report.suggestion.settings["lr"] == pytest.approx(0.9)
    assert report.suggestion.settings["upper_lr"] == pytest.approx(1.0)
    assert error < 0.02
    report, error = taken_over(problem, steps=100, lr=1e-3, upper_lr=1e-3)
    assert report.suggestion.settings["lr"] == pytest.approx(0.9)
    assert error < 0.02


def test_upper_lr_is_chosen_where_none_is_given() -> None:
    problem = diagnosed.least_squares()
    del problem.settings["upper_lr"]
    report, error = taken_over(problem, steps=100)
    assert report.suggestion.settings["upper_lr"] == pytest.approx(report.upper_rate_limit, rel=1e-2)
    assert error < 0.02


def test_what_is_printed_can_be_pasted() -> None:
    problem = diagnosed.counterexample()
    for options in ({}, {"momentum": 0.5}, {"rule": bda.FISTA}):
        report = problem.call(bda.diagnose, steps=64, **options)
        text = str(report.suggestion)
        assert text in str(report)
        names = {"bda": bda, "torch": torch, **problem._asdict()}
        pasted = eval(next(line for line in text.splitlines() if not line.startswith("#")), names)
        assert torch.equal(pasted.grad, problem.call(bda.hypergradient, **report.suggestion.settings).grad)
        assert set(report.suggestion.reasons) >= {"steps", "alpha", "adjoint", "error"}
        json.dumps(report.as_dict(), allow_nan=False)


def test_batches_stay_and_so_does_their_number() -> None:
    problem = diagnosed.least_squares()
    batches = [torch.tensor(1.0, dtype=torch.float64)] * 100
    report = problem.call(bda.diagnose, steps=100, batches=batches)
    assert report.suggestion.settings["steps"] == 100
    assert report.suggestion.settings["batches"] is batches
    out = bda.hypergradient(problem.lower, problem.upper, problem.params, problem.hyper, **report.suggestion.settings)
    assert problem.error(out.grad) < 0.1  # 0.24 with alpha = 0
    assert "batches=batches" in str(report.suggestion)


def test_of_an_optimizer() -> None:
    torch.manual_seed(0)
    inputs, targets = torch.randn(2, 5, 12, dtype=torch.float64), torch.randn(2, 5, 1, dtype=torch.float64)
    x = torch.zeros(5, 1, dtype=torch.float64, requires_grad=True)

    def lower(net: nn.Module, x: Any, batch: Any) -> Any:
        return (net(inputs[0]) - targets[0] - x).square().mean()

    def upper(net: nn.Module, x: Any, batch: Any) -> Any:
        penalty = sum(p.square().sum() for p in net.parameters())
        return (net(inputs[1]) - targets[1]).square().mean() + 0.1 * penalty

    model = nn.Linear(12, 1).double()
    inner = bda.BDAInnerOptimizer(model.parameters(), lr=0.05)
    report = inner.diagnose(model, lower, upper, hyper=x, steps=60)
    assert "start" in codes(report)
    lines = [line for line in str(report.suggestion).splitlines() if not line.startswith("#")]
    names: dict[str, Any] = {"bda": bda, "model": model, "lower": lower, "upper": upper, "hyper": x}
    for line in lines:
        exec(line, names)
    upper(names["fmodel"], x, None).backward()
    assert x.grad is not None
    chosen = {name: report.suggestion.settings[name] for name in ("steps", "adjoint")}
    again = names["inner"].diagnose(model, lower, upper, hyper=x, suggest=False, **chosen)
    assert not codes(report) & codes(again) & ANSWERED


def test_a_learned_start_is_not_forgotten() -> None:
    problem = diagnosed.counterexample()
    start = torch.tensor([2.0, 2.0], dtype=torch.float64)
    learned = Problem(
        lambda y, h, b: problem.lower(y, h[0]), lambda y, h, b: problem.upper(y, h[0]), start,
        [problem.hyper, start], problem.settings,
    )  # fmt: skip
    report = learned.call(bda.diagnose, steps=30)
    assert report.start > 0.5
    assert "start" not in codes(report) and report.truncation == {}
    assert "start is an upper variable" in report.suggestion.reasons["alpha"]


def test_nothing_is_searched_if_that_is_not_wanted() -> None:
    problem = diagnosed.counterexample()
    assert problem.call(bda.diagnose, steps=16, suggest=False).suggestion is None
