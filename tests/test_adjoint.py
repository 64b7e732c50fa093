"""Adjoints with a step that is a plain function: exactness, cost, memory, and what a replay restores."""

from __future__ import annotations

import functools
import itertools
import math
import random
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from memory import Memory
from problems import difference_quotients, double, leaf, lower, no_collector, relative_error, upper
from torch import Tensor, nn

import bda_optim as bda
from bda_optim._adjoints.revolve import reevaluations, segments, split

EXACT = [
    bda.Unroll(),
    bda.Checkpointed(),
    bda.Checkpointed(every=1),
    bda.Checkpointed(every=3),
    bda.Checkpointed(every=50),
    bda.Checkpointed(slots=1),
    bda.Checkpointed(slots=2),
    bda.Checkpointed(slots=3),
    bda.Checkpointed(slots=50),
    bda.ForwardMode(),
    bda.Truncated(last=50),
    bda.Truncated(last=50, within=bda.Checkpointed()),
    bda.Truncated(last=50, within=bda.ForwardMode()),
]
REPLAYING = [bda.Checkpointed(), bda.Checkpointed(every=2), bda.Checkpointed(slots=1), bda.Checkpointed(slots=3)]
exact = pytest.mark.parametrize("adjoint", EXACT, ids=str)
replaying = pytest.mark.parametrize("adjoint", REPLAYING, ids=str)


def affine(y: Tensor, hyper: tuple[Tensor, ...], k: int) -> tuple[Tensor, int]:
    """y <- a y + c, so that y_K = a^K y_0 + c (a^K - 1) / (a - 1)."""
    a, c = hyper
    return a * y + c, k


def curved(y: Tensor, hyper: tuple[Tensor, ...], k: int) -> tuple[Tensor, None]:
    """A step that is nonlinear in everything."""
    a, c = hyper
    return y - 0.3 * torch.sin(a * y + c / k), None


def numbers(steps: int) -> list[int]:
    return list(range(1, steps + 1))


# Exactness.


@exact
@pytest.mark.parametrize("steps", [1, 2, 5, 12])
def test_derivatives_of_an_affine_loop(adjoint: Any, steps: int) -> None:
    a, c, y0 = leaf(0.9), leaf(0.4), leaf(2.0)
    y, _ = adjoint(affine, y0, (a, c), numbers(steps))
    power, total = 0.9**steps, sum(0.9**i for i in range(steps))
    assert y.item() == pytest.approx(power * 2.0 + total * 0.4, abs=1e-14)
    da, dc, dy = torch.autograd.grad(y, (a, c, y0))
    slope = sum(i * 0.9 ** (i - 1) for i in range(1, steps))
    assert da.item() == pytest.approx(steps * 0.9 ** (steps - 1) * 2.0 + slope * 0.4, abs=1e-13)
    assert dc.item() == pytest.approx(total, abs=1e-13)
    assert dy.item() == pytest.approx(power, abs=1e-13)


@exact
def test_derivatives_of_a_curved_loop(adjoint: Any) -> None:
    leaves = [leaf(1.3), leaf(0.4, -0.2), leaf(2.0, 0.5)]

    def value() -> Tensor:
        y, _ = adjoint(curved, leaves[2], tuple(leaves[:2]), numbers(7))
        return y.prod()

    assert relative_error(torch.autograd.grad(value(), leaves), difference_quotients(value, leaves)) < 1e-9


@exact
def test_derivatives_of_a_complex_loop(adjoint: Any) -> None:
    """A complex number counts as two real ones: torch's gradient is dF/dRe + i dF/dIm."""
    x, y0 = leaf(0.7, -0.4), torch.tensor([1.0 + 0.5j, -0.3 + 2.0j], dtype=torch.complex128, requires_grad=True)
    c = torch.tensor(0.2 - 0.6j, dtype=torch.complex128, requires_grad=True)

    def step(y: Tensor, hyper: tuple[Tensor, ...], k: int) -> tuple[Tensor, None]:
        x, c = hyper
        return y - 0.3 * torch.sin(x * y.conj() + c / k) * torch.complex(x, 0 * x).exp(), None

    def value() -> Tensor:
        y, _ = adjoint(step, y0, (x, c), numbers(4))
        return (y.real**2 + y.imag**3 + y.real * y.imag).sum()

    found = torch.autograd.grad(value(), [x, y0, c])
    for leaf_, grad in zip((x, y0, c), found, strict=True):
        real = torch.view_as_real(leaf_.detach()) if leaf_.is_complex() else leaf_.detach()
        want = difference_quotients(value, [real])[0]
        torch.testing.assert_close(torch.view_as_real(grad) if grad.is_complex() else grad, want, rtol=1e-7, atol=1e-9)


@exact
def test_records_come_in_order(adjoint: Any) -> None:
    _, records = adjoint(affine, double(1.0), (leaf(0.9), leaf(0.4)), numbers(6))
    assert records == numbers(6)


@exact
def test_a_state_may_be_a_tree_with_numbers_in_it(adjoint: Any) -> None:
    def step(state: Any, hyper: Any, k: int) -> Any:
        grown = state["y"][0] * hyper[0] + state["moves"]
        return {"y": [grown], "count": state["count"] + 1, "moves": state["moves"] + 1}, None

    x, start = leaf(0.5), {"y": [double(1.0, 2.0)], "count": 0, "moves": torch.tensor(1)}
    last, _ = adjoint(step, start, (x,), numbers(4))
    assert last["count"] == 4 and last["moves"].item() == 5 and not last["moves"].requires_grad
    (slope,) = torch.autograd.grad(last["y"][0].sum(), x)
    # y_4 = x^4 y_0 + x^3 + 2 x^2 + 3 x + 4
    assert slope.item() == pytest.approx(4 * 0.5**3 * 3 + 2 * (3 * 0.5**2 + 4 * 0.5 + 3), abs=1e-13)


@exact
def test_only_some_inputs_require_grad(adjoint: Any) -> None:
    a, c = double(0.9), leaf(0.4)
    y, _ = adjoint(affine, double(2.0), (a, c), numbers(5))
    assert torch.autograd.grad(y, c)[0].item() == pytest.approx(sum(0.9**i for i in range(5)), abs=1e-13)
    assert not a.requires_grad


@exact
def test_the_derivative_is_partial_where_inputs_depend_on_each_other(adjoint: Any) -> None:
    """c = 2 a is a function of a: both paths count, each once."""
    a = leaf(0.9)
    y, _ = adjoint(affine, double(1.0), (a, 2 * a), numbers(3))
    # y_3 = a^3 + 2 a (1 + a + a^2)
    assert torch.autograd.grad(y, a)[0].item() == pytest.approx(3 * 0.81 + 2 + 4 * 0.9 + 6 * 0.81, abs=1e-13)


@exact
def test_without_grad_there_is_no_graph(adjoint: Any) -> None:
    hyper = (leaf(1.3), leaf(0.4))
    want, _ = bda.Unroll()(curved, double(2.0), hyper, numbers(6))
    with torch.no_grad():
        got, _ = adjoint(curved, double(2.0), hyper, numbers(6))
    assert got.grad_fn is None and not got.requires_grad
    assert torch.equal(got, want)
    constant, _ = adjoint(curved, double(2.0), tuple(x.detach() for x in hyper), numbers(6))
    assert constant.grad_fn is None and torch.equal(constant, want)


# Cost: how many steps are evaluated, and how many states are alive.


class Token:
    """Lives as long as the state that carries it."""


class Watched:
    """A step that counts its evaluations, and the states that are kept beside the one it is given."""

    def __init__(self, steps: int) -> None:
        self.steps, self.evaluations, self.kept = steps, 0, 0
        self.alive: weakref.WeakSet[Token] = weakref.WeakSet()

    def start(self) -> Any:
        return self._state(double(2.0))

    def __call__(self, state: Any, hyper: tuple[Tensor, ...], k: int) -> Any:
        result = int(self.evaluations >= self.steps)  # in the backward pass the result is alive as well
        self.kept = max(self.kept, len(self.alive) - result - (state["token"] in self.alive))
        self.evaluations += 1
        return self._state(torch.sin(state["y"] * hyper[0]) + k), None

    def _state(self, y: Tensor) -> Any:
        token = Token()
        self.alive.add(token)
        return {"y": y, "token": token}


def run_watched(adjoint: Any, steps: int) -> Watched:
    watched, x = Watched(steps), leaf(0.9)
    start = watched.start()
    last, _ = adjoint(watched, start, (x,), numbers(steps))
    assert watched.evaluations == steps, "the forward pass evaluates each step once"
    del start
    torch.autograd.grad(last["y"], x)
    return watched


@pytest.mark.parametrize("steps", [1, 2, 3, 7, 16, 17, 30])
@pytest.mark.parametrize("every", [None, 1, 2, 5, 100])
def test_segments_are_replayed_once(steps: int, every: int | None) -> None:
    assert run_watched(bda.Checkpointed(every=every), steps).evaluations == 2 * steps


@pytest.mark.parametrize("cost", [1.0, 2.25])
@pytest.mark.parametrize("steps", [1, 2, 5, 64, 1000, 4000])
def test_segments_need_less_than_equal_ones(steps: int, cost: float) -> None:
    """The states beside a segment and its graphs together, in states; sqrt(2 cost K) is the least in the continuum."""
    starts = segments(steps, cost)
    lengths = [stop - start for start, stop in itertools.pairwise([*starts, steps])]
    assert starts[0] == 0 and min(lengths) >= 1
    assert lengths[:-1] == sorted(lengths[:-1], reverse=True)
    most = max(beside + cost * length for beside, length in enumerate(lengths))
    assert most <= (2 * cost * steps) ** 0.5 + cost + 1
    if steps >= 64:
        equal = min(math.ceil(steps / every) - 1 + cost * every for every in range(1, steps + 1))
        assert most < 0.8 * equal


def test_states_are_dropped_as_their_segments_are_replayed() -> None:
    alive = []

    class Counting(Watched):
        def __call__(self, state: Any, hyper: tuple[Tensor, ...], k: int) -> Any:
            alive.append(len(self.alive))
            return super().__call__(state, hyper, k)

    watched, x, steps = Counting(100), leaf(0.9), 100
    last, _ = bda.Checkpointed()(watched, watched.start(), (x,), numbers(steps))
    first = torch.autograd.grad(last["y"], x, retain_graph=True)
    places = len(segments(steps, 2.25))
    assert alive[steps] >= places > 15 and alive[2 * steps - 1] <= 5
    assert torch.autograd.grad(last["y"], x) == first
    again = segments(steps, 2.25)[-1]  # a second pass stores the states anew
    assert watched.evaluations == 2 * steps + again + steps


@functools.cache
def fewest(steps: int, slots: int) -> int:
    """Re-evaluations by dynamic programming: store after m steps, reverse the rest with one slot less, then those m."""
    if slots == 1:
        return steps * (steps - 1) // 2
    return min((m + fewest(steps - m, slots - 1) + fewest(m, slots) for m in range(1, steps)), default=0)


@pytest.mark.parametrize("slots", range(1, 7))
def test_the_formula_for_reevaluations_is_optimal(slots: int) -> None:
    assert [reevaluations(k, slots) for k in range(1, 41)] == [fewest(k, slots) for k in range(1, 41)]


@pytest.mark.parametrize("slots", range(2, 7))
def test_the_splits_are_optimal(slots: int) -> None:
    for steps in range(2, 41):
        m = split(steps, slots)
        assert m + fewest(steps - m, slots - 1) + fewest(m, slots) == fewest(steps, slots)


def shortest_reversal(steps: int, slots: int) -> int:
    """Evaluations of the best reversal, by search: advance, store, drop, load, or reverse the last step left."""
    start = (0, frozenset({0}), steps)  # where the loop stands, what is stored, how many steps are left to reverse
    reached, frontier = {start}, [start]
    for evaluations in itertools.count():
        following = []
        while frontier:  # moves that evaluate nothing
            at, stored, left = frontier.pop()
            if left == 0:
                return evaluations
            free = [(position, stored, left) for position in stored if position < left]
            free += [(at, stored - {position}, left) for position in stored if position != 0]
            if len(stored) < slots:
                free.append((at, stored | {at}, left))
            # Reversing a step evaluates it, and so does advancing over it.
            following += [(0, stored, left - 1)] if at == left - 1 else [(at + 1, stored, left)]
            frontier += [node for node in free if node not in reached and not reached.add(node)]
        frontier = [node for node in following if node not in reached and not reached.add(node)]
    raise AssertionError


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_no_other_reversal_is_cheaper(slots: int) -> None:
    for steps in range(1, 8):
        assert shortest_reversal(steps, slots) == steps + reevaluations(steps, slots)


@pytest.mark.parametrize("slots", range(1, 7))
@pytest.mark.parametrize("steps", range(1, 13))
def test_slots_cost_what_the_formula_says(steps: int, slots: int) -> None:
    watched = run_watched(bda.Checkpointed(slots=slots), steps)
    assert watched.evaluations == steps + reevaluations(steps, slots) == steps + fewest(steps, slots)
    assert watched.kept <= slots


@pytest.mark.parametrize("slots", [2, 3, 4])
def test_all_slots_are_used_in_a_long_loop(slots: int) -> None:
    watched = run_watched(bda.Checkpointed(slots=slots), 60)
    assert watched.kept == slots
    assert watched.evaluations == 60 + reevaluations(60, slots)


def peak_states(adjoint: Any, steps: int, size: int = 512) -> float:
    """The peak memory of a hypergradient, in states."""
    x, y0 = leaf(0.9), torch.linspace(0, 1, size, dtype=torch.float64)
    with Memory() as memory:
        y, _ = adjoint(lambda y, h, k: (torch.sin(y * h[0]), None), y0, (x,), numbers(steps))
        torch.autograd.grad(y.sum(), x)
        del y
    return memory.peak / (8 * size)


def test_memory_grows_as_the_adjoint_says() -> None:
    lengths = (16, 64, 256)
    unrolled, segments, slots, forward = (
        [peak_states(adjoint, steps) for steps in lengths]
        for adjoint in (bda.Unroll(), bda.Checkpointed(), bda.Checkpointed(slots=4), bda.ForwardMode())
    )
    assert unrolled[2] > 3.5 * unrolled[1] > 3.5**2 * unrolled[0]
    # A segment of sqrt(K) graphs and sqrt(K) states: four times the steps, twice the memory.
    assert segments[2] < 2.2 * segments[1] < 2.2**2 * segments[0]
    assert all(peak < 4 * math.sqrt(steps) + 8 for peak, steps in zip(segments, lengths, strict=True))
    assert max(slots) <= 4 + 12  # four states and what one step makes, whatever K is
    assert forward[0] == forward[1] == forward[2]


# What a replay restores.


def dropout_problem() -> tuple[nn.Module, Callable[..., Tensor], Callable[..., Tensor], Tensor]:
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 1)).double()
    inputs, targets = torch.randn(6, 4, dtype=torch.float64), torch.randn(6, 1, dtype=torch.float64)

    def lower(net: Any, x: Tensor, batch: Any) -> Tensor:
        return (torch.exp(x) * (net(inputs) - targets).square()).mean()

    def upper(net: Any, x: Tensor, batch: Any) -> Tensor:
        return (net(inputs) - 1).square().mean()

    return net, lower, upper, torch.zeros(6, 1, dtype=torch.float64, requires_grad=True)


def with_dropout(adjoint: Any, steps: int = 7) -> tuple[Tensor, Tensor, Tensor]:
    """The hypergradient, then the numbers drawn after the rollout and after its backward pass."""
    torch.manual_seed(3)
    net, lower, upper, x = dropout_problem()
    inner = bda.BDAInnerOptimizer(net.parameters(), lr=0.2, upper_lr=0.1, alpha=bda.harmonic(0.5))
    fmodel = inner.unroll(net, lower, upper, hyper=x, steps=steps, adjoint=adjoint)
    between = torch.rand(3)
    (grad,) = torch.autograd.grad(upper(fmodel, x, None), x)
    return grad, between, torch.rand(3)


@replaying
def test_dropout_masks_are_drawn_again(adjoint: Any) -> None:
    got, want = with_dropout(adjoint), with_dropout(bda.Unroll())
    assert relative_error([got[0]], [want[0]]) < 1e-12
    assert torch.equal(got[1], want[1]), "the forward pass drew other numbers"
    assert torch.equal(got[2], want[2]), "the backward pass moved the global random state"


@replaying
def test_random_state_is_kept_when_a_replay_fails(adjoint: Any) -> None:
    x = leaf(0.5)

    def step(y: Tensor, hyper: Any, k: int) -> Any:
        if armed and k == 2:
            raise ArithmeticError("on purpose")
        return y * hyper[0] + torch.rand((), dtype=torch.float64), None

    armed = False
    y, _ = adjoint(step, double(1.0), (x,), numbers(5))
    armed, before = True, torch.get_rng_state()
    with pytest.raises(ArithmeticError, match="on purpose"):
        torch.autograd.grad(y, x)
    assert torch.equal(torch.get_rng_state(), before)


def with_autocast(adjoint: Any, enabled: bool) -> Tensor:
    torch.manual_seed(0)
    net, inputs = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)), torch.randn(5, 8)
    x = torch.zeros(4, requires_grad=True)

    def lower(net: Any, x: Tensor, batch: Any) -> Tensor:
        return (net(inputs).float() - x).square().mean()

    inner = bda.BDAInnerOptimizer(net.parameters(), lr=0.5)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
        fmodel = inner.unroll(net, lower, hyper=x, steps=6, adjoint=adjoint)
    loss = (fmodel(inputs) - 1).square().mean()  # outside, as is the backward pass
    assert loss.dtype == torch.float32
    return torch.autograd.grad(loss, x)[0]


@replaying
def test_autocast_is_restored(adjoint: Any) -> None:
    want = with_autocast(bda.Unroll(), enabled=True)
    assert relative_error([with_autocast(adjoint, enabled=True)], [want]) < 1e-6
    assert relative_error([with_autocast(bda.Unroll(), enabled=False)], [want]) > 1e-4, "autocast made no difference"


@replaying
def test_autocast_of_the_caller_does_not_reach_a_replay(adjoint: Any) -> None:
    torch.manual_seed(0)
    w, x = torch.randn(8, 8, requires_grad=True), torch.randn(8, requires_grad=True)

    def step(y: Tensor, hyper: Any, k: int) -> Any:
        return torch.tanh(y @ hyper[0] + hyper[1]), None

    def grads(adjoint: Any, enabled: bool) -> tuple[Tensor, ...]:
        y, _ = adjoint(step, torch.ones(2, 8), (w, x), numbers(5))
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            return torch.autograd.grad(y.sum(), (w, x))

    assert relative_error(grads(adjoint, True), grads(bda.Unroll(), False)) < 1e-6


@replaying
def test_buffers_are_updated_once_a_step(adjoint: Any) -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
    inputs, x = torch.randn(6, 3, dtype=torch.float64), leaf(0.3)
    calls = []

    def lower(net: Any, x: Tensor, batch: Any) -> Tensor:
        calls.append(net[1].num_batches_tracked.item())
        return (net(inputs) - x).square().mean()

    def upper(net: Any, x: Tensor, batch: Any) -> Tensor:
        return (net(inputs) - 1).square().mean()

    def unroll(adjoint: Any) -> bda.FunctionalModule:
        inner = bda.BDAInnerOptimizer(net.parameters(), lr=0.1, upper_lr=0.1, alpha=0.2)
        return inner.unroll(net, lower, upper, hyper=x, steps=5, adjoint=adjoint)

    want = unroll(bda.Unroll()).buffer_dict
    calls.clear()
    fmodel = unroll(adjoint)
    assert calls == [0, 1, 2, 3, 4]
    before = {name: buffer.clone() for name, buffer in fmodel.buffer_dict.items()}
    torch.autograd.grad(fmodel.params["2.bias"].sum(), x)
    assert len(calls) > 5, "nothing was replayed"
    assert fmodel.buffer_dict["1.num_batches_tracked"].item() == 5
    for name, buffer in fmodel.buffer_dict.items():
        assert torch.equal(buffer, before[name]) and torch.equal(buffer, want[name])
    assert net[1].num_batches_tracked.item() == 0 and torch.equal(net[1].running_mean, torch.zeros(4).double())


# What a replay cannot restore is detected.


def python_random() -> Callable[[], float]:
    return random.random


def own_generator() -> Callable[[], float]:
    generator = torch.Generator().manual_seed(0)
    return lambda: torch.rand((), generator=generator).item()


def counter() -> Callable[[], float]:
    return functools.partial(next, itertools.count(0.0, 0.1))


@replaying
@pytest.mark.parametrize("source", [python_random, own_generator, counter])
def test_a_replay_that_differs_from_the_first_pass_raises(adjoint: Any, source: Any) -> None:
    draw, x = source(), leaf(0.5)
    y = bda.rollout(lambda y, x, b: 0.5 * (y - x * draw()) ** 2, None, double(0.0), x, steps=6, lr=0.5, adjoint=adjoint)
    with pytest.raises(RuntimeError, match=r"a replayed step gave another result than the first time.*`batches=`"):
        torch.autograd.grad(y, x)


def test_unrolling_accepts_losses_that_cannot_be_replayed() -> None:
    draw, x = python_random(), leaf(0.5)
    y = bda.rollout(lambda y, x, b: 0.5 * (y - x * draw()) ** 2, None, double(0.0), x, steps=6, lr=0.5)
    assert torch.autograd.grad(y, x)[0].item() == pytest.approx(y.item() / 0.5)


# Second backward passes, and second derivatives.


@exact
def test_a_second_backward_needs_retain_graph(adjoint: Any) -> None:
    x = leaf(1.3)
    y, _ = adjoint(curved, double(2.0), (x, double(0.4)), numbers(9))
    torch.autograd.grad(y, x)
    with pytest.raises(RuntimeError, match="retain_graph=True"):
        torch.autograd.grad(y, x)


@exact
def test_retain_graph_gives_the_same_again(adjoint: Any) -> None:
    x, y0 = leaf(1.3), leaf(2.0)
    y, _ = adjoint(curved, y0, (x, double(0.4)), numbers(9))
    first = torch.autograd.grad(y, (x, y0), retain_graph=True)
    second = torch.autograd.grad(y, (x, y0), retain_graph=True)
    third = torch.autograd.grad(y, (x, y0))
    assert first == second == third


@pytest.mark.parametrize("adjoint", [a for a in EXACT if "ForwardMode" not in str(a)], ids=str)
def test_second_derivatives(adjoint: Any) -> None:
    leaves = [leaf(1.3), leaf(0.4), leaf(2.0)]

    def slopes(adjoint: Any) -> list[Tensor]:
        y, _ = adjoint(curved, leaves[2], tuple(leaves[:2]), numbers(6))
        return list(torch.autograd.grad(y, leaves, create_graph=True))

    for i in range(3):
        got = torch.autograd.grad(slopes(adjoint)[i], leaves)
        assert relative_error(got, torch.autograd.grad(slopes(bda.Unroll())[i], leaves)) < 1e-12

        def slope(i: int = i) -> Tensor:
            with torch.enable_grad():
                return slopes(adjoint)[i]

        assert relative_error(got, difference_quotients(slope, leaves)) < 1e-8


@replaying
def test_second_derivatives_where_inputs_depend_on_each_other(adjoint: Any) -> None:
    """c = a^2 and y_0 = sin a are functions of a: every path counts once, on the tape too."""

    def slope(adjoint: Any, a: Tensor) -> Tensor:
        y, _ = adjoint(curved, torch.sin(a), (a, a**2), numbers(5))
        return torch.autograd.grad(y, a, create_graph=True)[0]

    a = leaf(0.9)
    got, want = slope(adjoint, a), slope(bda.Unroll(), a)
    assert relative_error([got], [want]) < 1e-12
    assert relative_error(torch.autograd.grad(got, a), torch.autograd.grad(want, a)) < 1e-12


@pytest.mark.parametrize("adjoint", [bda.Unroll(), *REPLAYING], ids=str)
@pytest.mark.parametrize("outside", [bda.Unroll(), bda.Checkpointed(), bda.Checkpointed(slots=2)], ids=str)
def test_loops_nest(adjoint: Any, outside: Any) -> None:
    """An inner loop inside the lower loss of an outer one, both of them replayed."""
    x = leaf(0.7)

    def value(within: Any, outside: Any) -> Tensor:
        def innermost(z: Tensor, y: Tensor, batch: Any) -> Tensor:
            return 0.25 * z**4 + 0.5 * (z - y) ** 2

        def middle(y: Tensor, x: Tensor, batch: Any) -> Tensor:
            z = bda.rollout(innermost, None, double(0.5), y, steps=4, lr=0.2, adjoint=within)
            return torch.cos(x * z) + 0.5 * (y - 1) ** 2

        y = bda.rollout(middle, None, double(0.1), x, steps=3, lr=0.3, adjoint=outside)
        return torch.sin(y) * x

    got = torch.autograd.grad(value(adjoint, outside), x)
    assert relative_error(got, torch.autograd.grad(value(bda.Unroll(), bda.Unroll()), x)) < 1e-12
    assert relative_error(got, difference_quotients(lambda: value(adjoint, outside), [x])) < 1e-8


def test_forward_mode_has_no_second_derivative() -> None:
    x = leaf(1.3)
    y, _ = bda.ForwardMode()(curved, double(2.0), (x, double(0.4)), numbers(3))
    with pytest.raises(RuntimeError, match=r"second derivative.*got create_graph=True.*`Checkpointed\(\)`"):
        torch.autograd.grad(y, x, create_graph=True)


# What is refused.


def test_forward_mode_counts_scalars() -> None:
    hyper = (torch.ones(2, 3, dtype=torch.float64, requires_grad=True), torch.ones(50, dtype=torch.float64))
    start = leaf(1.0, 2.0)

    def step(y: Tensor, hyper: Any, k: int) -> Any:
        return y * hyper[0].sum() + hyper[1].sum(), None

    bda.ForwardMode(limit=8)(step, start, hyper, [1])
    with pytest.raises(ValueError, match=r"at most 7; got 8\. Use `Checkpointed\(\)`"):
        bda.ForwardMode(limit=7)(step, start, hyper, [1])


@pytest.mark.parametrize("within", [bda.Unroll(), bda.Checkpointed(), bda.ForwardMode()], ids=str)
def test_truncation_refuses_initial_parameters_that_require_grad(within: Any) -> None:
    hyper = (leaf(0.9), leaf(0.4))
    with pytest.raises(ValueError, match="got last=2 of 3 steps and initial parameters that require grad"):
        bda.Truncated(last=2, within=within)(affine, leaf(2.0), hyper, numbers(3))
    with torch.no_grad():
        bda.Truncated(last=2, within=within)(affine, leaf(2.0), hyper, numbers(3))


def test_the_first_steps_of_a_truncated_loop_keep_no_graph() -> None:
    modes = []

    def step(y: Tensor, hyper: Any, k: int) -> Any:
        modes.append(torch.is_grad_enabled())
        return affine(y, hyper, k)

    bda.Truncated(last=2)(step, double(1.0), (leaf(0.9), leaf(0.4)), numbers(5))
    assert modes == [False, False, False, True, True]
    assert peak_states(bda.Truncated(last=4), 100) == peak_states(bda.Truncated(last=4), 25)


@pytest.mark.parametrize("value", [0, -1, 1.0, True, "2", None])
def test_truncation_takes_a_whole_number(value: Any) -> None:
    with pytest.raises(ValueError, match="`last` must be a whole number of at least 1; got"):
        bda.Truncated(last=value)


@pytest.mark.parametrize("name", ["every", "slots"])
@pytest.mark.parametrize("value", [0, -3, 2.0, True, "2"])
def test_checkpointed_takes_a_whole_number(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"`{name}` must be a whole number of at least 1; got"):
        bda.Checkpointed(**{name: value})


def test_every_and_slots_exclude_each_other() -> None:
    with pytest.raises(ValueError, match=r"exclude each other; got every=2, slots=3\. Give one of them\."):
        bda.Checkpointed(every=2, slots=3)


@pytest.mark.parametrize("adjoint", [*EXACT, bda.FirstOrder()], ids=str)
def test_inference_mode_is_refused(adjoint: Any) -> None:
    with torch.inference_mode(), pytest.raises(RuntimeError, match=r"inference_mode.*Use `torch.no_grad\(\)`"):
        bda.rollout(lower, None, double(2.0, 2.0), double(0.3), steps=3, lr=0.2, adjoint=adjoint)


@pytest.mark.parametrize("adjoint", [*REPLAYING, bda.ForwardMode()], ids=str)
@pytest.mark.parametrize("at", [1, 3])
def test_a_captured_tensor_is_found_in_any_step(adjoint: Any, at: int) -> None:
    captured, x = torch.ones(3, 2, dtype=torch.float64, requires_grad=True), leaf(0.5)

    def step(y: Tensor, hyper: Any, k: int) -> Any:
        return y * hyper[0] + (captured.sum() if k == at else 0.0), None

    with pytest.raises(ValueError, match=r"got one of 3x2 float64 on cpu.*pass it in `hyper=`"):
        y, _ = adjoint(step, double(1.0), (x,), numbers(5))
        torch.autograd.grad(y, x)


@replaying
def test_a_captured_tensor_is_found_with_create_graph(adjoint: Any) -> None:
    captured, x = torch.ones(3, 2, dtype=torch.float64, requires_grad=True), leaf(0.5)

    def step(y: Tensor, hyper: Any, k: int) -> Any:
        return y * hyper[0] + (captured.sum() if k == 3 else 0.0), None

    with pytest.raises(ValueError, match=r"got one of 3x2 float64 on cpu.*pass it in `hyper=`"):
        y, _ = adjoint(step, double(1.0), (2 * x,), numbers(5))
        torch.autograd.grad(y, x, create_graph=True)


@pytest.mark.parametrize("adjoint", [*REPLAYING, bda.ForwardMode()], ids=str)
def test_a_leaf_made_inside_a_loss_is_not_captured(adjoint: Any) -> None:
    """A penalty on the gradient with respect to an input that the loss makes itself."""
    x = leaf(0.5)

    def penalised(y: Tensor, x: Tensor, batch: Any) -> Tensor:
        point = double(0.3, -0.2).requires_grad_()
        (slope,) = torch.autograd.grad(torch.sin(y * point).sum(), point, create_graph=True)
        return (slope - x).square().sum()

    def value() -> Tensor:
        return bda.rollout(penalised, None, double(1.0, 2.0), x, steps=4, lr=0.1, adjoint=adjoint).prod()

    assert relative_error(torch.autograd.grad(value(), x), difference_quotients(value, [x])) < 1e-8


# Nothing is left behind.


@pytest.fixture
def garbage() -> Iterator[Callable[[], list[Any]]]:
    """The objects made since the last call that only the garbage collector would free; it does not run by itself."""
    with no_collector() as look:
        yield look


def check_no_cycles(once: Callable[[], weakref.ref[Tensor]], garbage: Callable[[], list[Any]]) -> None:
    once()
    garbage()
    assert once()() is None, "y_K outlived its last reference"
    assert garbage() == []


@pytest.mark.parametrize("adjoint", [*EXACT, bda.FirstOrder(), bda.Truncated(last=2)], ids=str)
def test_no_reference_cycles(adjoint: Any, garbage: Any) -> None:
    def once() -> weakref.ref[Tensor]:
        x = leaf(0.5)
        y = bda.rollout(
            lower, upper, double(2.0, 2.0), x, steps=5, lr=0.2, alpha=bda.harmonic(0.5), prox=bda.prox.l1(0.01),
            rule=torch.optim.Adam, adjoint=adjoint,
        )  # fmt: skip
        torch.autograd.grad(upper(y, x), x)
        return weakref.ref(y)

    check_no_cycles(once, garbage)


@replaying
def test_no_reference_cycles_with_create_graph(adjoint: Any, garbage: Any) -> None:
    def once() -> weakref.ref[Tensor]:
        x = leaf(0.5)
        y = bda.rollout(lower, upper, double(2.0, 2.0), x, steps=5, lr=0.2, alpha=0.3, adjoint=adjoint)
        (slope,) = torch.autograd.grad(upper(y, x), x, create_graph=True)
        torch.autograd.grad(slope, x)
        return weakref.ref(y)

    check_no_cycles(once, garbage)
