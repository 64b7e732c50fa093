"""The numerical core on a device: its hypergradients are the CPU's, and the host waits for nothing in the loop.

``python -m tests.device NAME`` runs these tests on a device that is there. Without one, `tests/test_device.py` runs
them on a fake device (`tests/fake_device.py`), which also counts what the host would wait for.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import fake_device
import pytest
import test_capabilities as table
import torch
from fake_device import LOG
from problems import DTYPE, leaf, numbers, relative_error
from torch import Tensor, nn

import bda_optim as bda

NAME = os.environ.get("BDA_DEVICE", fake_device.NAME)
FAKE = fake_device.NAME == NAME
DEVICE = fake_device.install() if FAKE else torch.zeros(1, device=NAME).device
CLOSE = 1e-9 if DTYPE == torch.float64 else 1e-3
"""How far two computations of a hypergradient may be apart."""

only_fake = pytest.mark.skipif(not FAKE, reason="only the fake device notes what the host waits for")


@contextlib.contextmanager
def waits(most: int, what: object) -> Iterator[None]:
    """Assert that the host waits for the device at most so many times."""
    LOG.clear()
    yield
    assert not FAKE or len(LOG.waits) <= most, f"{what}: {LOG.waits}"


def check_grads(grads: Any, leaves: Any, want: Any, close: float = CLOSE) -> None:
    """Assert that gradients are on the devices of their leaves, and that they are the CPU's."""
    assert [g.device for g in grads] == [t.device for t in leaves]
    assert relative_error([g.cpu() for g in grads], want) < close


# The table: each rule with each upper variable; the other capabilities take turns, the adjoints too.

DATA = ("INPUTS", "TEST_INPUTS", "TARGETS", "TEST_TARGETS", "WEIGHT", "BIAS")
TURNS = [(case, (None, *table.ADJOINTS)[i % (1 + len(table.ADJOINTS))]) for i, case in enumerate(table.CASES)]


@pytest.fixture
def data_on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in DATA:
        monkeypatch.setattr(table, name, getattr(table, name).to(DEVICE))


def moved_setup(case: table.Case, values: list[Tensor]) -> table.Setup:
    """A case on the device, with the same values."""
    with torch.device(DEVICE):
        setup = table.Setup(case)
    batches = setup.upper.batches
    with torch.no_grad():
        for variable, value in zip(setup.upper.leaves, values, strict=True):
            variable.copy_(value)

    def moved() -> Any:
        with torch.device(DEVICE):
            return batches()

    setup.upper = setup.upper._replace(batches=moved)
    return setup


@pytest.mark.parametrize(("case", "adjoint"), TURNS, ids=str)
def test_table(case: table.Case, adjoint: Any, request: pytest.FixtureRequest) -> None:
    there = table.Setup(case)
    want = there.grads()
    request.getfixturevalue("data_on_device")
    setup = moved_setup(case, [t.detach() for t in there.upper.leaves])
    batches = setup.upper.batches()
    setup.upper = setup.upper._replace(batches=lambda: batches)
    with waits(1, "the rollout"):
        value = setup.value(adjoint)
    with waits(1, "the backward pass"):
        grads = torch.autograd.grad(value, setup.upper.leaves, materialize_grads=True)
    check_grads(grads, setup.upper.leaves, want)


def test_adjoints_meet_all_rules_and_upper_variables() -> None:
    met = {(adjoint, part) for case, adjoint in TURNS for part in (case.row.name, case.kind)}
    free = [row.name for row in table.ROWS] + [name for name, kind in table.KINDS.items() if not kind.needs]
    assert {(adjoint, part) for adjoint in (None, *table.ADJOINTS) for part in free} <= met


# A network with dropout, on one device or on two.


class Net(nn.Module):
    """Two layers with dropout between them, which may be on two devices."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.dropout, self.last = nn.Linear(3, 4), nn.Dropout(p), nn.Linear(4, 2)
        self.to(DTYPE)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.dropout(torch.tanh(self.first(x)))
        return self.last(hidden.to(self.last.weight.device))


ROLLOUT: list[str] = []
"""What the host waited for in the last rollout; `LOG` has what it waited for in the backward pass."""


class Problem:
    """The network's hypergradient with respect to weights of its examples, and to its initial parameters."""

    def __init__(self, device: Any = DEVICE, p: float = 0.0, last: Any = None) -> None:
        self.net = Net(p).to(device)
        self.net.last.to(last or device)
        home = self.net.last.weight.device
        self.inputs, self.targets = numbers(5, 3).to(DTYPE).to(device), numbers(5, 2, seed=2).to(DTYPE).to(home)
        self.logits = numbers(5, seed=3).to(DTYPE).to(home).requires_grad_()

    def lower(self, net: Any, logits: Tensor, batch: Any = None) -> Tensor:
        return (torch.sigmoid(logits) * (net(self.inputs) - self.targets).square().sum(1)).mean()

    def upper(self, net: Any, *_: Any) -> Tensor:
        return (net(self.inputs).flip(0) - self.targets).square().mean()

    @property
    def leaves(self) -> list[Tensor]:
        return [self.logits, *self.net.parameters()]

    def run(self, adjoint: Any, steps: int = 6, **options: Any) -> list[Tensor]:
        options = {"lr": 0.3, "momentum": 0.5, "rule": torch.optim.SGD, **options}
        loop = {name: options.pop(name) for name in ("compile", "on_divergence", "batches") if name in options}
        inner = bda.BDAInnerOptimizer(self.net.parameters(), **options)
        # A `Truncated` rollout gives no gradient of the initial parameters.
        whole = not isinstance(adjoint, bda.Truncated | bda.Implicit)
        torch.manual_seed(3)
        fmodel = inner.unroll(
            self.net, self.lower, self.upper, hyper=self.logits, steps=steps, adjoint=adjoint,
            copy_initial_weights=not whole, **loop,
        )  # fmt: skip
        ROLLOUT[:] = LOG.waits
        LOG.waits.clear()
        loss = self.upper(fmodel.eval())
        return list(torch.autograd.grad(loss, self.leaves if whole else self.leaves[:1], materialize_grads=True))


ADJOINTS = [
    bda.Unroll(),
    bda.Checkpointed(),
    bda.Checkpointed(every=2),
    bda.Checkpointed(slots=2),
    bda.Checkpointed(check=True),
    bda.Checkpointed(offload="cpu"),
    bda.Checkpointed(slots=2, offload="cpu", check=True),
    bda.ForwardMode(),
    bda.Truncated(last=4),
    bda.Truncated(last=4, within=bda.Checkpointed()),
    bda.FirstOrder(),
    bda.Guarded(limit=1e6),
    bda.Guarded(within=bda.Checkpointed(), clip=1e3),
]


@pytest.mark.parametrize("adjoint", ADJOINTS, ids=str)
def test_adjoints(adjoint: Any) -> None:
    want = Problem("cpu").run(adjoint)
    problem = Problem()
    check_grads(problem.run(adjoint), problem.leaves[: len(want)], want)


@only_fake
@pytest.mark.parametrize("adjoint", ADJOINTS, ids=str)
def test_the_host_waits_once_whatever_the_number_of_steps(adjoint: Any) -> None:
    for steps in (5, 11):
        problem = Problem(p=0.3)
        LOG.clear()
        problem.run(adjoint, steps, alpha=bda.harmonic(0.4), upper_lr=0.1)
        assert len(ROLLOUT) == 1, ROLLOUT
        assert len(LOG.waits) <= 1, LOG.waits


@only_fake
def test_the_host_does_not_wait_for_a_rollout_that_may_diverge() -> None:
    problem = Problem()
    LOG.clear()
    problem.run(None, on_divergence="ignore")
    assert ROLLOUT == LOG.waits == []


def implicit(first: Any, last: Any, steps: int) -> tuple[list[Tensor], list[Tensor]]:
    """The hypergradient of a lower level with parameters on two devices that has converged, and its leaf."""
    x = leaf(0.4).detach().to(first).requires_grad_()
    y0 = {"a": torch.zeros(2, dtype=DTYPE, device=first), "b": torch.zeros(3, dtype=DTYPE, device=last)}

    def lower(y: dict[str, Tensor], x: Tensor, batch: Any) -> Tensor:
        joined = y["a"].sum() + y["b"].sum().to(first)
        return (y["a"] - x).square().sum() + (y["b"] - 1).square().sum().to(first) + 0.1 * (joined - x**2) ** 2

    LOG.clear()
    y = bda.rollout(lower, None, y0, x, steps=steps, lr=0.4, adjoint=bda.Implicit(tol=1e-4))
    ROLLOUT[:] = LOG.waits
    LOG.clear()
    value = torch.sin(y["a"]).sum() + y["b"].square().sum().to(first)
    return list(torch.autograd.grad(value, x)), [x]


def test_implicit() -> None:
    want, _ = implicit("cpu", "cpu", 30)
    for first, last in ((DEVICE, DEVICE), (DEVICE, "cpu"), ("cpu", DEVICE)):
        grads, leaves = implicit(first, last, 30)
        check_grads(grads, leaves, want, 1e-3)


@only_fake
def test_implicit_waits_in_its_solver_and_not_in_the_loop() -> None:
    for steps in (30, 40):
        implicit(DEVICE, DEVICE, steps)
        assert len(ROLLOUT) <= 4, ROLLOUT
        assert len(LOG.waits) <= 30, LOG.waits


# Random numbers.


@pytest.mark.parametrize("adjoint", [a for a in ADJOINTS if not isinstance(a, bda.Truncated)], ids=str)
def test_dropout_is_replayed_from_the_random_state_of_the_device(adjoint: Any) -> None:
    if isinstance(adjoint, bda.FirstOrder):
        pytest.skip("biased")
    problem = Problem(p=0.4)
    want = [g.cpu() for g in problem.run(bda.Unroll())]
    assert relative_error(want, [g.cpu() for g in Problem().run(bda.Unroll())]) > 0.01, "nothing was dropped"
    check_grads(problem.run(adjoint), problem.leaves, want)


@only_fake
def test_dropout_on_the_fake_device_is_that_of_the_cpu() -> None:
    problem = Problem(p=0.4)
    check_grads(problem.run(bda.Checkpointed()), problem.leaves, Problem("cpu", p=0.4).run(bda.Unroll()))


@only_fake
def test_random_states_are_read_once_for_a_stored_state() -> None:
    problem = Problem(p=0.4)
    LOG.clear()
    problem.run(bda.Checkpointed(every=2), 12)
    stored, around = 6, 2  # before the rollout, and before the backward pass
    assert len(LOG.random) <= stored + around, LOG.random


def test_random_state_is_as_before_after_a_backward_pass() -> None:
    problem = Problem(p=0.4)
    states = []
    for adjoint in (bda.Unroll(), bda.Checkpointed(), bda.Checkpointed(slots=2)):
        problem.run(adjoint)
        states.append(torch.rand(3, device=DEVICE).cpu())
    assert torch.equal(states[0], states[1]) and torch.equal(states[0], states[2])


# States that wait in the memory of the host.


@only_fake
def test_offload_copies_without_waiting() -> None:
    problem = Problem()
    LOG.clear()
    problem.run(bda.Checkpointed(every=2, offload="cpu"), 12)
    out, back = ([entry for entry in LOG.copies if entry.startswith(to)] for to in ("to the host", "to the device"))
    states, parts = 5, 8  # the first state stays; four parameters and their momentum
    assert len(out) == states * parts
    assert len(back) == 2 * states * parts  # to be replayed from, and to be compared with
    made, awaited = ({e for e in LOG.events if e.startswith(kind)} for kind in ("record", "wait"))
    assert len(made) >= states
    first_waits = {f"wait {event.split()[1]}" for event in LOG.events[:states] if event.startswith("record")}
    assert first_waits <= awaited, "a state was fetched before its copy was awaited on the device"


# Upper variables on the host.

HOST: dict[str, Callable[[Tensor], dict[str, Any]]] = {
    "lr": lambda t: {"lr": t},
    "weight_decay": lambda t: {"weight_decay": 0.1 * t},
    "alpha": lambda t: {"alpha": t, "upper_lr": 0.1},
    "schedule": lambda t: {"alpha": bda.harmonic(t), "upper_lr": 0.1},
    "upper_lr": lambda t: {"alpha": 0.3, "upper_lr": t},
    "prox": lambda t: {"prox": bda.prox.l1(0.1 * t)},
}


@pytest.mark.parametrize("adjoint", [None, bda.Checkpointed(), bda.Checkpointed(slots=2), bda.ForwardMode()], ids=str)
@pytest.mark.parametrize("name", HOST)
def test_an_upper_variable_on_the_host_is_moved_once(name: str, adjoint: Any) -> None:
    def grad(device: Any, steps: int) -> tuple[Tensor, list[list[str]]]:
        x, y0 = leaf(0.3), numbers(4).to(DTYPE).to(device)
        log = []
        LOG.clear()
        y = bda.rollout(
            lambda y, x, b: (y**4).sum() / 4 + (y - 1).square().sum() / 2, lambda y, x, b: (y - 2).square().sum(),
            y0, steps=steps, adjoint=adjoint, **{"lr": 0.1, **HOST[name](x)},
        )  # fmt: skip
        log.append(list(LOG.waits))
        LOG.clear()
        (found,) = torch.autograd.grad(torch.sin(y).sum(), x)
        log.append(list(LOG.waits))
        return found, log

    for steps in (3, 7):
        want, _ = grad("cpu", steps)
        found, log = grad(DEVICE, steps)
        assert found.device.type == "cpu"
        assert relative_error([found], [want]) < CLOSE
        if FAKE:
            assert [entry.split(" @")[0] for entry in log[0]].count("to the device") <= 1, log[0]
            assert len(log[0]) <= 2 and len(log[1]) <= 2, log


# Two devices.


@pytest.mark.parametrize("adjoint", ADJOINTS, ids=str)
def test_a_module_on_two_devices(adjoint: Any) -> None:
    want = Problem("cpu").run(adjoint)
    for first, last in ((DEVICE, "cpu"), ("cpu", DEVICE)):
        problem = Problem(first, last=last)
        check_grads(problem.run(adjoint), problem.leaves[: len(want)], want)


def test_batches_on_another_device_are_refused() -> None:
    with pytest.raises(ValueError, match=r"everything in a rollout must be on the device of the parameters"):
        bda.rollout(
            lambda y, x, b: ((y - b) ** 2).sum(), None, torch.zeros(2, device=DEVICE), steps=2, lr=0.1,
            batches=[torch.ones(2)] * 2,
        )  # fmt: skip


def test_a_functional_module_is_not_moved() -> None:
    problem = Problem()
    inner = bda.BDAInnerOptimizer(problem.net.parameters(), lr=0.1)
    fmodel = inner.unroll(problem.net, problem.lower, hyper=problem.logits, steps=2)
    with pytest.raises(NotImplementedError, match="cannot be moved or cast"):
        fmodel.to("cpu")


# Autocast.


def test_autocast_of_the_device_is_restored_in_a_replay() -> None:
    seen: list[tuple[bool, torch.dtype]] = []
    x = leaf(0.3).detach().to(DEVICE).requires_grad_()

    def lower(y: Tensor, x: Tensor, batch: Any) -> Tensor:
        seen.append((torch.is_autocast_enabled(DEVICE.type), torch.get_autocast_dtype(DEVICE.type)))
        return (y - x).square().sum()

    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        y = bda.rollout(lower, None, torch.zeros(2, device=DEVICE, dtype=DTYPE), x, steps=4, lr=0.1,
                        adjoint=bda.Checkpointed())  # fmt: skip
    first = len(seen)
    torch.autograd.grad(y.sum(), x)
    assert len(seen) > first
    assert set(seen) == {(True, torch.bfloat16)}


# Tasks, networks, doors.


@pytest.mark.parametrize("adjoint", [None, bda.Checkpointed(), bda.ForwardMode()], ids=str)
@pytest.mark.parametrize("chunk_size", [None, 2])
@pytest.mark.parametrize("rule", [torch.optim.Adam, torch.optim.Adafactor])
def test_tasks(adjoint: Any, chunk_size: int | None, rule: Any) -> None:
    def grads(device: Any) -> tuple[list[Tensor], list[Tensor]]:
        x = leaf(0.4, -0.3).detach().to(device).requires_grad_()
        batches = [numbers(3, 5, 2, seed=k).to(DTYPE).to(device) for k in range(3)]
        y0 = numbers(2).to(DTYPE).to(device)
        LOG.clear()
        y = bda.rollout(
            lambda y, x, b: (b @ y - x.sum()).square().mean() + 0.1 * y.square().sum(), lambda y, x, b: (y - x).sum(),
            y0, x, steps=3, tasks=3, chunk_size=chunk_size, batches=batches, rule=rule,
            lr=0.1, alpha=0.2, upper_lr=0.1, adjoint=adjoint,
        )  # fmt: skip
        assert len(LOG.waits) <= (2 if chunk_size else 1), LOG.waits
        return list(torch.autograd.grad(torch.sin(y).sum(), x)), [x]

    want, _ = grads("cpu")
    check_grads(*grads(DEVICE), want)


@pytest.mark.parametrize("adjoint", [bda.Unroll(), bda.Checkpointed(slots=2)], ids=str)
@pytest.mark.parametrize("name", table.NETWORKS)
def test_networks(name: str, adjoint: Any) -> None:
    want = table.Network(name)
    network = table.Network(name)
    network.net.to(DEVICE)
    network.inputs, network.labels = network.inputs.to(DEVICE), network.labels.to(DEVICE)
    network.logits = network.logits.detach().to(DEVICE).requires_grad_()
    leaves = [network.logits, *network.net.parameters()]
    settings = {"lr": 0.02, "betas": (0.8, 0.9)}
    expected = want.ours(torch.optim.Adam, adjoint, **settings)
    with waits(2, "rollout and backward pass"):
        found = network.ours(torch.optim.Adam, adjoint, **settings)
    check_grads(found, leaves, expected)
    with waits(1, "the steps of a loop of the user's"):
        found = network.ours_step_by_step(torch.optim.Adam, **settings)
    check_grads(found, leaves, expected)


@pytest.mark.parametrize("choice", ["raise", "stop", "ignore"])
def test_divergence(choice: str) -> None:
    def run(device: Any) -> Any:
        start = torch.ones(2, dtype=DTYPE, device=device)
        options = {"steps": 9, "lr": 1e60 if torch.float64 == DTYPE else 1e8, "on_divergence": choice}
        x = leaf(1.0).detach().to(device).requires_grad_()
        return bda.rollout(lambda y, x, b: x * (y**4).sum(), None, start, x, **options)

    if choice == "raise":
        with pytest.raises(FloatingPointError) as here:
            run("cpu")
        with pytest.raises(FloatingPointError) as there:
            run(DEVICE)
        assert str(there.value) == str(here.value)
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        assert torch.equal(run(DEVICE).cpu().isfinite(), run("cpu").isfinite())


def test_a_learned_weight_beyond_its_range_is_refused() -> None:
    alpha = leaf(1.5).detach().to(DEVICE).requires_grad_()
    for choice in ("raise", "ignore"):
        with pytest.raises(ValueError, match=r"must lie in \[0, 1\) at every step; got 1.5"):
            bda.rollout(
                lambda y, x, b: y.square().sum(), lambda y, x, b: y.sum(), torch.zeros(2, dtype=DTYPE, device=DEVICE),
                steps=3, lr=0.1, alpha=alpha, on_divergence=choice,
            )  # fmt: skip


def test_hypergradient() -> None:
    def run(device: Any) -> bda.Hypergradient:
        torch.manual_seed(0)
        x = numbers(3).to(DTYPE).to(device)
        return bda.hypergradient(
            lambda y, x, b: (y - x).square().sum() + (y**4).sum(), lambda y, x, b: torch.sin(y).sum(),
            torch.zeros(3, dtype=DTYPE, device=device), x, steps=5, lr=0.1, accumulate=None,
        )  # fmt: skip

    want, found = run("cpu"), run(DEVICE)
    check_grads([found.grad, found.value], [torch.zeros(1, device=DEVICE)] * 2, [want.grad, want.value])


@pytest.mark.parametrize("adjoint", [None, bda.Checkpointed()], ids=str)
def test_a_batch_in_parts(adjoint: Any) -> None:
    def grads(device: Any) -> tuple[list[Tensor], list[Tensor]]:
        x = leaf(0.4, -0.3).detach().to(device).requires_grad_()
        batches = [numbers(6, 2, seed=k).to(DTYPE).to(device) for k in range(3)]
        y = bda.rollout(
            lambda y, x, b: (b @ y - x.sum()).square().mean(), None, numbers(2).to(DTYPE).to(device), x, steps=3,
            batches=batches, lr=0.1, clip_norm=1.0, accumulate=3, adjoint=adjoint,
        )  # fmt: skip
        return list(torch.autograd.grad(torch.sin(y).sum(), x)), [x]

    want, _ = grads("cpu")
    check_grads(*grads(DEVICE), want)


# Compiled steps: on the fake device a traced graph is run as it is.


@pytest.fixture
def graphs_run_as_they_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    if FAKE:
        monkeypatch.setattr("bda_optim._compiled.program.compile_graph", lambda graph, inputs, choices: graph)


@pytest.mark.parametrize(
    ("rule", "adjoint"),
    [
        (torch.optim.SGD, bda.Checkpointed(every=2)),
        (torch.optim.SGD, bda.ForwardMode()),
        (torch.optim.Adam, bda.Unroll()),
    ],
    ids=str,
)
def test_compiled_steps(rule: Any, adjoint: Any, graphs_run_as_they_are: None) -> None:
    settings = {"rule": rule, "lr": 0.05, **({"momentum": 0.5} if rule is torch.optim.SGD else {})}
    want, problem = Problem("cpu"), Problem()
    expected = compiled(want, adjoint, compile=False, **settings)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="compile=True")
        for _ in range(1 + isinstance(adjoint, bda.ForwardMode)):  # it looks at the first step uncompiled
            compiled(problem, adjoint, **settings)
        LOG.clear()
        found = compiled(problem, adjoint, **settings)
        backward = list(LOG.waits)
    check_grads(found, problem.leaves, expected)
    # Beside the finite check, the counts of a rule are read once, and once whether missing cotangents were zeros.
    assert len(ROLLOUT) <= (2 if rule is torch.optim.Adam else 1), ROLLOUT
    assert len(backward) <= 2, backward


def compiled(problem: Problem, adjoint: Any, **options: Any) -> list[Tensor]:
    how = options.pop("compile", True)
    optimizer = bda.BDAInnerOptimizer(problem.net.parameters(), **options)
    fmodel = optimizer.unroll(
        problem.net, problem.lower, hyper=problem.logits, steps=6, adjoint=adjoint, copy_initial_weights=False,
        compile=how,
    )  # fmt: skip
    ROLLOUT[:] = LOG.waits
    LOG.waits.clear()
    return list(torch.autograd.grad(problem.upper(fmodel), problem.leaves))


def test_compiled_dropout_draws_the_same_numbers(graphs_run_as_they_are: None) -> None:
    problem = Problem(p=0.4)
    inner = bda.BDAInnerOptimizer(problem.net.parameters(), lr=0.3)

    def run(compile: Any) -> list[Tensor]:
        torch.manual_seed(5)
        fmodel = inner.unroll(problem.net, problem.lower, hyper=problem.logits, steps=4, compile=compile)
        return list(torch.autograd.grad(problem.upper(fmodel.eval()), [problem.logits]))

    want, found = run(False), run(True)
    assert relative_error([g.cpu() for g in found], [g.cpu() for g in want]) < CLOSE
