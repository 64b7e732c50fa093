"""How many steps share a compiled call, what is left over, and how few programs a problem has."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor
import torch.nn.functional as F
from torch import Tensor, nn

import bda_optim as bda
from bda_optim._compiled import cache, compiling, decisions, programs

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No programs, and no choices from earlier processes."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    cache._engines.clear()
    yield
    cache._engines.clear()


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Run traced graphs as they are; the list has one entry per program."""
    built: list[Any] = []
    monkeypatch.setattr(programs, "_MOST_STEPS", 3)
    monkeypatch.setattr(torch._inductor, "compile", lambda graph, inputs, options: built.append(graph) or graph)
    return built


# --- decisions on disk ------------------------------------------------------------------------------------------------


def refuse() -> int:
    raise AssertionError("nothing was to be measured")


def test_a_choice_is_made_once(tmp_path: Path) -> None:
    assert decisions.Decisions("a problem").get("steps", lambda: 7, fixed=refuse) == 7
    assert decisions.Decisions("a problem").get("steps", refuse, fixed=refuse) == 7  # another process
    assert decisions.Decisions("another problem").get("steps", lambda: 3, fixed=refuse) == 3
    both = decisions.Decisions("a problem")
    both.get("mode", lambda: "another", fixed=str)
    assert decisions.Decisions("a problem").get("steps", refuse, fixed=refuse) == 7
    assert len(list((tmp_path / "bda_optim").iterdir())) == 2


def test_deterministic_choices_are_not_measured(tmp_path: Path) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        assert decisions.Decisions("a problem").get("steps", refuse, fixed=lambda: 2) == 2
    finally:
        torch.use_deterministic_algorithms(False)
    assert not (tmp_path / "bda_optim").exists()


def test_a_disk_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "bda_optim").write_text("a file where a folder should be")
    assert decisions.Decisions("a problem").get("steps", lambda: 7, fixed=refuse) == 7
    (tmp_path / "bda_optim").unlink()
    decisions.Decisions("a problem").get("steps", lambda: 7, fixed=refuse)
    (file,) = (tmp_path / "bda_optim").iterdir()
    file.write_text("no JSON")
    assert decisions.Decisions("a problem").get("steps", lambda: 8, fixed=refuse) == 8


# --- how many steps ---------------------------------------------------------------------------------------------------


def test_steps_per_call_divide_k_or_leave_little_over() -> None:
    engine = cache.Engine(compiling.Choices())
    engine.most = 8
    assert engine.steps_per_call(64) == 8
    assert engine.steps_per_call(67) == 8  # three are left over
    assert engine.steps_per_call(15) == 5  # not seven of fifteen
    assert engine.steps_per_call(10) == 5
    assert engine.steps_per_call(7) == 7
    assert engine.steps_per_call(6) == 5  # no fourth size
    assert engine.steps_per_call(3) == 5  # all three uncompiled
    prime = cache.Engine(compiling.Choices())
    prime.most = 8
    assert prime.steps_per_call(67) == 8


def test_slow_steps_have_a_call_of_their_own(monkeypatch: pytest.MonkeyPatch, traced: list[Any]) -> None:
    for seconds, steps in ((1.0, 1), (1e-9, 3)):
        cache._engines.clear()
        monkeypatch.setattr(programs, "_seconds", lambda *_, seconds=seconds, **__: seconds)
        monkeypatch.setattr(programs, "_CALL", 40e-6 + 1e-12 * steps)  # another problem, whose choice is not on disk
        problem(steps=6, compile=True)
        (engine,) = next(iter(cache._engines.values())).values()
        assert engine.most == steps


# --- few programs -----------------------------------------------------------------------------------------------------


def lower(y: Tensor, x: Tensor, batch: Any) -> Tensor:
    return ((y - x) ** 2).sum() + 0.1 * (y**4).sum()


def upper(y: Tensor, x: Tensor, batch: Any) -> Tensor:
    return (y * x).sum()


def problem(**options: Any) -> list[Tensor]:
    x = torch.tensor([0.3, -0.2, 0.5], dtype=torch.float64)
    settings = {"lr": 0.1, "upper_lr": 0.05, "alpha": bda.harmonic(0.5), **options}
    out = bda.hypergradient(lower, upper, torch.ones(3, dtype=torch.float64), x, **settings)
    return [out.grad, out.params, out.trace.lower]


ADJOINTS = [
    bda.Unroll(),
    bda.Checkpointed(),
    bda.Checkpointed(every=2),
    bda.Checkpointed(slots=2),
    bda.Truncated(last=4),
    bda.Truncated(last=5, within=bda.Checkpointed()),
]


@pytest.mark.parametrize("adjoint", ADJOINTS, ids=str)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_two_programs_whatever_k_and_adjoint(adjoint: Any, momentum: float, traced: list[Any]) -> None:
    """Also where a cotangent is missing, as that of the last momentum is, and where K is no multiple of the unit."""
    for steps in (9, 10, 13):
        options = {"steps": steps, "adjoint": adjoint, "momentum": momentum}
        torch.testing.assert_close(problem(**options, compile=True), problem(**options), rtol=1e-12, atol=1e-13)
    (engine,) = next(iter(cache._engines.values())).values()
    assert len(traced) == 2 and len(engine.sizes) == 1 and not engine.programs


def test_a_chain_of_calls_with_another_batch_in_each(traced: list[Any]) -> None:
    torch.manual_seed(0)
    batches = [torch.randn(3, dtype=torch.float64) for _ in range(10)]
    loss = lambda y, x, b: ((y - x * b) ** 2).sum()  # noqa: E731
    args = (loss, upper, torch.ones(3, dtype=torch.float64), torch.full((3,), 0.3, dtype=torch.float64))
    found = [bda.hypergradient(*args, steps=10, lr=0.1, batches=batches, compile=c).grad for c in (False, True)]
    torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=1e-13)
    assert len(traced) == 2


def test_batches_of_two_sizes(traced: list[Any]) -> None:
    """A last batch that is smaller has programs of its own."""
    torch.manual_seed(0)
    batches = [torch.randn(4 if k < 7 else 2, dtype=torch.float64) for k in range(9)]
    loss = lambda y, x, b: ((y - x * b.mean()) ** 2).sum()  # noqa: E731
    args = (loss, upper, torch.ones(3, dtype=torch.float64), torch.full((3,), 0.3, dtype=torch.float64))
    found = [bda.hypergradient(*args, steps=9, lr=0.1, batches=batches, compile=c).grad for c in (False, True)]
    torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=1e-13)


def test_buffers_need_no_third_program(traced: list[Any]) -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3)).double()
    inner = bda.BDAInnerOptimizer(model.parameters(), lr=0.1, rule=torch.optim.Adam, eps=1e-3)
    data = torch.randn(8, 4, dtype=torch.float64), torch.randint(0, 3, (8,))
    loss = lambda net, x, b: F.cross_entropy(net(b[0]), b[1])  # noqa: E731
    grads = []
    for compile in (False, True):
        fmodel = inner.unroll(model, loss, steps=7, batches=[data] * 7, compile=compile, copy_initial_weights=False)
        grads.append([*torch.autograd.grad(loss(fmodel, None, data), list(model.parameters())), *fmodel.buffers()])
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-9, atol=1e-11)
    assert len(traced) == 2


def test_rollouts_without_gradients_have_one_program(traced: list[Any]) -> None:
    with torch.no_grad():
        for _ in range(2):
            got, want = (
                bda.rollout(lower, None, torch.ones(3, dtype=torch.float64), torch.ones(3), steps=7, lr=0.1, compile=c)
                for c in (True, False)
            )
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-13)
    assert len(traced) == 1
