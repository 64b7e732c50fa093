"""Where `Checkpointed` stores states (`Shelf`) and records (`Ledger`), and what it moves to the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import bda_optim as bda
from bda_optim._adjoints.storage import Ledger, Shelf
from bda_optim._support.types import Record


def test_shelf_stores_copies_in_blocks() -> None:
    """A stored state does not change with the original or with other slots, and keeps its layout."""
    state = (torch.arange(6.0).view(2, 3), torch.ones(1, 2, 3, 4).to(memory_format=torch.channels_last), 7)
    shelf = Shelf(state, 2, offload=False)
    first = shelf.put(state)
    state[0].zero_()
    second = shelf.put((torch.full((2, 3), 5.0), state[1], 8))
    assert torch.equal(first.state[0], torch.arange(6.0).view(2, 3)) and first.state[2] == 7
    assert first.state[1].stride() == state[1].stride() and first.state[0]._version == 1
    assert first.state[0].untyped_storage().data_ptr() == second.state[0].untyped_storage().data_ptr()
    third = shelf.put(state)  # all slots are taken
    assert third.place is None and third.state[0] is state[0]
    shelf.drop(first)
    fourth = shelf.put((torch.full((2, 3), 9.0), state[1], 9))
    assert fourth.place == first.place and float(first.state[0][0, 0]) == 9.0
    assert torch.equal(second.state[0], torch.full((2, 3), 5.0)) and second.state[0]._version == 1


def test_shelf_gives_blocks_back() -> None:
    """A block is freed when all its states are dropped; tensors are aligned as an allocator would align them."""
    states = [(torch.full((3, 5), float(i)), torch.full((7,), i), torch.full((), i + 0.5)) for i in range(10)]
    shelf = Shelf(states[0], 10, offload=False)
    kept = [shelf.put(state) for state in states]
    for state, one in zip(states, kept, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one.state, state, strict=True))
        assert all(t.data_ptr() % 64 == 0 for t in one.state)
    places = {t.untyped_storage().data_ptr() for one in kept for t in one.state}
    assert len(places) == 6  # three blocks for float32, three for int64
    while kept:
        shelf.drop(kept.pop())
    assert not shelf._blocks
    again = [shelf.put(state) for state in states]
    assert [float(one.state[0][0, 0]) for one in again] == [float(i) for i in range(10)]


def test_shelf_keeps_what_does_not_fit() -> None:
    """A state of another shape, or an expanded tensor, is stored as it is."""
    shelf = Shelf((torch.zeros(2),), 3, offload=False)
    shelf.put((torch.zeros(2),))
    other, wide = torch.ones(3), torch.ones(()).expand(4)
    assert shelf.put((other,)).state[0] is other
    assert Shelf((wide,), 1, offload=False).put((wide,)).state[0] is wide


def test_ledger_returns_records_as_they_came() -> None:
    ledger = Ledger(4)
    told = [
        Record(torch.tensor(1.0), None),
        Record(torch.tensor(2.0), torch.tensor(3.0)),
        Record(torch.tensor([4.0, 5.0]), torch.tensor(6.0, dtype=torch.float64)),  # another shape, another type
        None,
    ]
    for record in told:
        ledger.append(record)
    got = ledger.records()
    assert got[0] == (1.0, None) and got[1] == (2.0, 3.0) and got[3] is None
    assert torch.equal(got[2].lower, torch.tensor([4.0, 5.0])) and got[2].upper.dtype == torch.float64
    assert isinstance(got[0], Record) and got[0].lower.untyped_storage().nbytes() == 4 * 4


@pytest.mark.parametrize("options", [{"every": 2}, {"slots": 2}, {}], ids=str)
def test_offloaded_states(options: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    moved, put = [], Shelf.put
    monkeypatch.setattr(Shelf, "put", lambda shelf, state: moved.append(state) or put(shelf, state))
    args = (lambda y, x, b: ((y - x) ** 4).sum(), lambda y, x, b: y.sum(), torch.zeros(2), torch.ones(()))
    got = bda.hypergradient(*args, steps=7, lr=0.1, adjoint=bda.Checkpointed(offload="cpu", **options))
    assert moved and torch.equal(
        got.grad, bda.hypergradient(*args, steps=7, lr=0.1, adjoint=bda.Checkpointed(**options)).grad
    )
    with pytest.raises(ValueError, match="`offload` must be None or"):
        bda.Checkpointed(offload="disk")
