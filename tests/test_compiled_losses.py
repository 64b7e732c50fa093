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
