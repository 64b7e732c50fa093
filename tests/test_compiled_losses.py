"""The losses of compiled steps: in one tensor per level and call, and the same as those of uncompiled steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._inductor
from torch import Tensor

import bda_optim as bda
from bda_optim._compiled import cache, programs
from bda_optim._compiled.records import JoinedRecords, losses_of
from bda_optim._support.types import Record

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")


@pytest.fixture(autouse=True)
def _traced(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Any:
    """Run traced graphs as they are, three steps per call."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(programs, "_MOST_STEPS", 3)
    monkeypatch.setattr(torch._inductor, "compile", lambda graph, inputs, options: graph)
    yield
    cache._engines.clear()


def lower(y: Tensor, x: Tensor, batch: Any) -> Tensor:
    return 0.5 * (y - x).square().sum()


def upper(y: Tensor, x: Tensor, batch: Any) -> Tensor:
    return (y - 1).square().sum() + x


def solve(**options: Any) -> bda.Hypergradient:
    y0, x = torch.tensor([2.0, 3.0], dtype=torch.float64), torch.tensor(0.3, dtype=torch.float64)
    return bda.hypergradient(lower, upper, y0, x, **{"steps": 7, "lr": 0.2, **options})


@pytest.mark.parametrize("alpha", [0.0, bda.harmonic(0.5), lambda k: 0.0 if k % 2 else 0.3 / k])
@pytest.mark.parametrize("adjoint", [bda.Unroll(), bda.Checkpointed(), bda.ForwardMode()], ids=repr)
def test_the_trace_is_that_of_uncompiled_steps(alpha: Any, adjoint: Any) -> None:
    """Also where a step is left over, and where only some steps evaluate the upper loss."""
    got, want = (solve(alpha=alpha, adjoint=adjoint, compile=compile) for compile in (True, False))
    torch.testing.assert_close(got.grad, want.grad)
    torch.testing.assert_close(got.trace.lower, want.trace.lower)
    assert (got.trace.upper is None) == (want.trace.upper is None) == (alpha == 0.0)
    if want.trace.upper is not None:
        torch.testing.assert_close(got.trace.upper, want.trace.upper, equal_nan=True)


def test_tasks() -> None:
    batches = [torch.arange(4.0, dtype=torch.float64)] * 7
    options = dict(tasks=4, batches=batches, alpha=bda.harmonic(0.5), upper_batch=batches[0])
    got, want = (solve(compile=compile, **options) for compile in (True, False))
    assert got.trace.lower.shape == got.trace.upper.shape == (7, 4)
    torch.testing.assert_close(list(got.trace), list(want.trace))


@pytest.mark.parametrize("inside", ["forward", "backward"])
def test_the_backward_pass_runs_with_the_autocast_of_the_rollout(inside: str) -> None:
    """A second rollout finds everything again; its pull-back is the same inside of autocast and outside."""
    weight = torch.randn(3, 3, generator=torch.Generator().manual_seed(0))
    grads = []
    for compile in (False, True, True):  # autograd itself would multiply in bfloat16
        x = torch.full((3,), 0.3, requires_grad=True)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=inside == "forward"):
            y = bda.rollout(
                lambda y, x, b: ((y @ weight - x) ** 2).sum(), None, torch.ones(3), x, steps=6, lr=0.05, compile=compile
            )
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=compile and inside == "backward"):
            grads.append(torch.autograd.grad(y.sum(), x)[0])
    tolerance = {"rtol": 0.05, "atol": 0.02} if inside == "forward" else {}
    torch.testing.assert_close(grads[1], grads[0], **tolerance)
    torch.testing.assert_close(grads[2], grads[1], rtol=0, atol=0)


def test_a_rollout_that_draws_nothing_leaves_the_random_state_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    solve(compile=True)
    (engine,) = next(iter(cache._engines.values())).values()
    assert not engine.draws
    before = torch.get_rng_state()
    want = solve(compile=True, adjoint=bda.Checkpointed()).grad
    assert torch.equal(torch.get_rng_state(), before)
    torch.testing.assert_close(want, solve().grad)


def test_numbers_and_plans_are_found_again() -> None:
    schedule = bda.harmonic(0.5)
    for _ in range(2):
        solve(compile=True, alpha=schedule)
        solve(compile=True, alpha=bda.harmonic(0.5))  # equal numbers
    (engine,) = next(iter(cache._engines.values())).values()
    (table,) = engine.tables.values()
    assert len(table.plans) == 1
    got = [solve(compile=True, alpha=lambda k, c=c: c / k).grad for c in (0.1, 0.4)]  # a function is asked every time
    want = [solve(alpha=lambda k, c=c: c / k).grad for c in (0.1, 0.4)]
    torch.testing.assert_close(got, want)
    for lr in (0.01 * k for k in range(1, 12)):
        torch.testing.assert_close(solve(compile=True, alpha=schedule, lr=lr).grad, solve(alpha=schedule, lr=lr).grad)
    assert len(engine.tables) <= 8


def test_a_divergence_names_its_step() -> None:
    with pytest.raises(FloatingPointError, match="k=") as compiled:
        solve(lr=1e200, compile=True)
    with pytest.raises(FloatingPointError) as plain:
        solve(lr=1e200)
    assert str(compiled.value) == str(plain.value)


def test_records_are_taken_out_of_their_blocks() -> None:
    one = [Record(torch.tensor(1.0), None), Record(torch.tensor(2.0), torch.tensor(5.0))]
    two = [Record(torch.tensor(3.0), None)]
    records = JoinedRecords([losses_of(one), losses_of(two)])
    assert len(records) == 3 and list(records) == [*one, *two]
    assert records[1] == one[1] and records[:2] == one
