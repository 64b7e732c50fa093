"""`batches`: what they may be, when they are read, and the gradients that flow into them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from problems import EXACT, START, difference_quotients, double, exact, leaf, lower, relative_error, run, upper
from torch import Tensor

import bda_optim as bda


class Listed(Sequence[Any]):
    """A sequence that is neither list nor tuple; it notes the index of every read."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items
        self.reads: list[int] = []

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        self.reads.append(index)
        return self.items[index]


class Dataset:
    """As a map-style dataset of torch.utils.data: it has no `__iter__`."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


def test_batches_are_shown_in_order() -> None:
    seen = []

    def note(level: str, loss: Any) -> Any:
        def noted(y: Tensor, x: Tensor, batch: Any) -> Tensor:
            seen.append((level, batch))
            return loss(y, x)

        return noted

    run(note("lower", lower), note("upper", upper), batches=["a", "b", "c"], upper_batch="last")
    assert seen == [(level, batch) for batch in "abc" for level in ("lower", "upper")] + [("upper", "last")]


@pytest.mark.parametrize("kind", [list, tuple, torch.stack, Listed, Dataset])
@exact
def test_kinds_of_batches(kind: Any, adjoint: Any) -> None:
    shifts = [double(0.1), double(0.2), double(-0.1)]
    want = run(lambda y, x, b: lower(y, x + b), batches=shifts).grad
    got = run(lambda y, x, b: lower(y, x + b), batches=kind(shifts), adjoint=adjoint).grad
    assert got.item() == pytest.approx(want.item(), abs=1e-14)
    assert abs(want.item() - run().grad.item()) > 1e-3


READERS = [
    *EXACT,
    bda.Checkpointed(every=1),
    bda.Checkpointed(every=2),
    bda.Truncated(last=4),
    bda.Truncated(last=4, within=bda.Checkpointed()),
    bda.FirstOrder(),
]


@pytest.mark.parametrize("adjoint", READERS, ids=str)
def test_a_lazy_batch_is_read_once_by_each_step(adjoint: Any) -> None:
    """A read may load a file: the forward sweep reads each batch once, in order, and so does every replayed step."""
    batches, x, calls = Listed([double(0.1)] * 9), leaf(0.3), 0

    def counted(y: Tensor, x: Tensor, batch: Any) -> Tensor:
        nonlocal calls
        calls += 1
        return lower(y, x + batch)

    options = {"steps": 9, "lr": 0.2, "alpha": bda.harmonic(0.5), "batches": batches, "adjoint": adjoint}
    y = bda.rollout(counted, upper, START, x, **options)
    assert batches.reads == list(range(9))
    upper(y, x).backward()
    assert len(batches.reads) == calls


@exact
def test_gradients_flow_into_batches(adjoint: Any) -> None:
    """One tensor at k = 1 and 3, another at k = 2, inside any tree; the same object counts once."""
    often, once, idle = leaf(0.1), leaf(-0.2), double(3.0)

    def value() -> Tensor:
        batches = [{"b": [often], "more": idle}, {"b": (once,), "more": None}, {"b": [often], "more": "text"}]
        y = bda.rollout(
            lambda y, x, b: lower(y, x + b["b"][0]), lambda y, x, b: upper(y, x * b["b"][0]), START, double(0.3),
            steps=3, lr=0.2, alpha=0.3, batches=batches, adjoint=adjoint,
        )  # fmt: skip
        return upper(y, double(0.3))

    got = torch.autograd.grad(value(), (often, once))
    assert relative_error(got, difference_quotients(value, [often, once])) < 1e-8


@exact
def test_a_batch_that_is_also_hyper(adjoint: Any) -> None:
    x = leaf(0.3)
    got = run(lambda y, h, b: lower(y, b), hyper=x, batches=[x] * 3, adjoint=adjoint).grad
    assert got.item() == pytest.approx(run().grad.item(), abs=1e-14)


@exact
def test_the_list_of_batches_may_change_afterwards(adjoint: Any) -> None:
    x, batches = leaf(0.3), [double(1.0), double(2.0), double(3.0)]

    def grad(change: Callable[[list[Tensor]], Any]) -> Tensor:
        mine = list(batches)
        y = bda.rollout(lambda y, x, b: lower(y, x * b), None, START, x, steps=3, lr=0.2, batches=mine, adjoint=adjoint)
        change(mine)
        return torch.autograd.grad(y[0], x)[0]

    want = grad(lambda mine: None)
    for change in (list.reverse, list.clear, lambda mine: mine.append(double(4.0))):
        assert torch.equal(grad(change), want)


def test_lazy_batches_carry_no_gradients() -> None:
    with pytest.raises(ValueError, match=r"as a list or tuple; got Listed whose batch 1 requires grad\. Pass `list\("):
        run(lambda y, x, b: lower(y, x + b), batches=Listed([double(0.1), leaf(0.1), double(0.1)]))


@pytest.mark.parametrize(
    "batches, kind",
    [
        ({0: 1, 1: 2, 2: 3}, "dict"),
        ("abc", "str"),
        (3, "int"),
    ],
)
def test_batches_must_be_a_sequence(batches: Any, kind: str) -> None:
    with pytest.raises(TypeError, match=rf"one batch per step; got {kind}\. Pass a list, for example `list\(itertools"):
        run(batches=batches)


@pytest.mark.parametrize("batches", [[], [1, 2], [1, 2, 3, 4], torch.zeros(2, 3)], ids=str)
def test_one_batch_per_step(batches: Any) -> None:
    with pytest.raises(
        ValueError, match=rf"got {len(batches)} batches for steps=3\. Pass as many .*`\[batch\] \* steps`"
    ):
        run(batches=batches)
