"""Where the states of a rollout wait until they are replayed from, and its losses until they are asked for."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._context import devices
from .._support.tree import map_leaves, replace_tensors, tensors


class Kept(NamedTuple):
    """A stored state, and its place on the shelf; None if it has none there."""

    state: Any
    place: int | None


class Stored(NamedTuple):
    """A state from which steps can be replayed."""

    kept: Kept
    rng: Any


class Taken(NamedTuple):
    """A step of a replayed segment: what its pull-back needs."""

    state: Any
    rng: Any
    item: Any
    saved: Any


class Shelf:
    """A fixed number of places for states, several of them in one block of memory.

    A step's new state lies between tensors that are freed soon. Left there, stored states keep the gaps around them
    from being joined and used again: 1000 steps of a small MLP grew by 17 MiB for 10 MiB of states, and by 14 with
    blocks. A block is given back when its last state is dropped. A tensor that does not fit (its shape changed, or it
    is no dense tensor) is kept as it is.

    Args:
        state: An example: its devices are where states are fetched to.
        places: How many states are stored at most; with 0 all are kept as they are.
        offload: Whether to store them in the (pinned) memory of the host. The host waits for no copy; on the device a
            copy waits for the last one from or to the same place, also where that was in another stream.
    """

    def __init__(self, state: Any, places: int, *, offload: bool) -> None:
        """Reserve nothing yet."""
        self._homes = [t.device for t in tensors(state)]
        self._accelerators = devices.accelerators(tensors(state)) if offload else []
        self._marks: dict[int, list[Any]] = {}  # place -> what its next copy waits for, per device
        self._offload = offload
        self._free = list(reversed(range(places)))
        self._spots: list[_Spot | None] | None = None
        self._widths: dict[_Kind, int] = {}
        self._blocks: dict[tuple[int, _Kind], Tensor] = {}
        self._used: dict[int, int] = {}  # block -> how many of its places are taken

    def put(self, state: Any) -> Kept:
        """Store a state."""
        if not self._free:
            return Kept(state, None)
        place = self._free.pop()
        values = tensors(state)
        if self._spots is None:
            self._spots = [self._spot(t) for t in values]
        self._used[place // _STATES] = self._used.get(place // _STATES, 0) + 1
        self._wait(place)
        kept = Kept(replace_tensors(state, [self._copy(i, t, place) for i, t in enumerate(values)]), place)
        self._mark(place)
        return kept

    def get(self, kept: Kept) -> Any:
        """Return a state, on the devices where its steps run."""
        if not self._offload:
            return kept.state
        pairs = zip(tensors(kept.state), self._homes, strict=True)
        self._wait(kept.place)
        state = replace_tensors(kept.state, [t.to(home, non_blocking=True) for t, home in pairs])
        self._mark(kept.place)
        return state

    def _wait(self, place: int | None) -> None:
        """Let the devices wait for the last copies from and to a place."""
        if place in self._marks:
            for device, event in zip(self._accelerators, self._marks[place], strict=True):
                devices.wait(event, device)

    def _mark(self, place: int | None) -> None:
        """Note where the copies from or to a place end."""
        if place is not None and self._accelerators:
            self._marks[place] = [devices.mark(device) for device in self._accelerators]

    def drop(self, kept: Kept) -> None:
        """Free the place of a state, whose tensors may be overwritten by the next one."""
        if kept.place is None:
            return
        self._free.append(kept.place)
        block = kept.place // _STATES
        self._used[block] -= 1
        if not self._used[block]:
            for key in [key for key in self._blocks if key[0] == block]:
                del self._blocks[key]

    def _copy(self, number: int, tensor: Tensor, place: int) -> Tensor:
        assert self._spots is not None
        spot = self._spots[number] if number < len(self._spots) else None
        if spot is None or (spot.shape, spot.kind.dtype) != (tensor.shape, tensor.dtype):
            return tensor
        number, row = divmod(place, _STATES)
        key, width = (number, spot.kind), self._widths[spot.kind]
        if key not in self._blocks:
            self._blocks[key] = self._block(spot.kind, _STATES * width)
        view = self._blocks[key].as_strided(spot.shape, spot.stride, row * width + spot.offset)
        return view.data.copy_(tensor, non_blocking=True)  # `.data`: to overwrite a place changes no other in place

    def _spot(self, tensor: Tensor) -> _Spot | None:
        """Reserve a part of every place for a tensor, in its own order of dimensions; None if it is kept as it is."""
        if type(tensor) is not Tensor or torch.empty_like(tensor).stride() != tensor.stride():
            return None
        kind = _Kind(tensor.dtype, tensor.device)
        offset = self._widths.get(kind, 0)
        self._widths[kind] = offset + -(-tensor.numel() // _ALIGNED) * _ALIGNED
        return _Spot(kind, tensor.shape, tensor.stride(), offset)

    def _block(self, kind: _Kind, size: int) -> Tensor:
        if kind.device in self._accelerators:
            return devices.pinned(size, kind.dtype)
        return torch.empty(size, dtype=kind.dtype, device=kind.device)


_STATES = 4
"""States in a block: more would be given back later, fewer leave more gaps."""

_ALIGNED = 64
"""Elements: tensors start where memory of their own would, so that kernels treat them alike, to the bit."""


class _Kind(NamedTuple):
    """What tensors of one block have in common."""

    dtype: torch.dtype
    device: torch.device


class _Spot(NamedTuple):
    """Where in its place a tensor lies."""

    kind: _Kind
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class Ledger:
    """The records of a number of steps, the tensors at the same place of each record in one block of memory.

    A loss is a few bytes, but kept where it was made it divides the memory that the next step could have used: 1000
    steps of a small MLP that remember their losses grow by 19 MiB, and by 2 if the losses are copied to a table.
    """

    def __init__(self, steps: int) -> None:
        """Start without any."""
        self._steps = steps
        self._trees: list[Any] = []
        self._blocks: dict[int, Tensor] = {}

    def append(self, record: Any) -> None:
        """Copy a record."""
        row = len(self._trees)
        entries: list[Any] = []
        for column, tensor in enumerate(tensors(record)):
            if column not in self._blocks:
                self._blocks[column] = tensor.new_empty((self._steps, *tensor.shape))
            block = self._blocks[column]
            if (block.shape[1:], block.dtype) == (tensor.shape, tensor.dtype):
                block[row] = tensor
                entries.append(_Column(column))
            else:
                entries.append(tensor)
        self._trees.append(replace_tensors(record, entries))

    def records(self) -> list[Any]:
        """Return the records as they came."""
        rows = {column: block.unbind(0) for column, block in self._blocks.items()}

        def filled(tree: Any, row: int) -> Any:
            return map_leaves(lambda column: rows[column.number][row], _Column, tree)

        return [filled(tree, row) for row, tree in enumerate(self._trees)]


class _Column(NamedTuple):
    """Stands for a tensor of a record."""

    number: int
