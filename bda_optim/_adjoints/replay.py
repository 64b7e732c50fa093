"""K steps that are replayed from stored states on the way back."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._context.environment import Ambient, fingerprints
from .._support.torch_private import version_of
from .._support.tree import detach, replace_tensors, tensors
from .base import Cotangents, Items, Step, as_leaves, changed_in_place, pull_back, refuse_captured
from .revolve import split
from .storage import Kept, Ledger, Shelf, Stored, Taken

READ_AGAIN = (
    "this rollout reads its batches twice, and got an iterable that can be read once. Pass a list, as in "
    "`list(itertools.islice(loader, steps))`, or use `Unroll()`, `Truncated(last=T)` or `ForwardMode()` without "
    "`compile`, which read them once."
)


class Replay:
    """K steps, the states stored on the way, and how to pull cotangents back through them.

    With `starts`, a state is stored before each segment that starts there, and dropped when it has been replayed.
    Otherwise at most `slots` states are stored, and the last step stays recorded, as the count of Griewank & Walther
    assumes.

    Args:
        step: The step.
        state: The initial state.
        hyper: The upper variables.
        items: What changes from step to step.
        starts: Where segments start, or None.
        slots: The maximum number of stored states, if `starts` is None.
        offload: Whether states are stored in the host's memory.
        check: Whether every replayed state is compared with that of the first sweep, to the bit.
        record: Whether the first sweep keeps what the pull-back of every step needs.
    """

    def __init__(
        self,
        step: Step,
        state: Any,
        hyper: Sequence[Tensor],
        items: Items,
        *,
        starts: Sequence[int] | None,
        slots: int,
        offload: bool = False,
        check: bool = False,
        record: bool = False,
    ) -> None:
        """Prepare; nothing runs yet."""
        if getattr(items, "once", False):
            raise TypeError(READ_AGAIN)
        self._step = step
        self._items = items
        self._starts = starts
        self._slots = slots
        self._state = detach(state)
        self._count = len(tensors(state))
        self._repeats = step.repeats
        self._draws = step.draws
        self._recording = record
        self._keeps = step.keeps and not offload  # what is saved beside a state stays on its device
        self._ambient = Ambient(tensors(state), twice=step.twice)
        self._stored: dict[int, Stored] = {}
        self._saved: dict[int, Any] = {}
        self._all = starts is not None and len(starts) == len(items) and not offload
        self._shelf = Shelf(state, 0 if self._all else slots or len(self._positions()), offload=offload)
        self._batch_versions: list[list[int]] = []
        self._prints: list[list[Tensor]] | None = [] if check else None
        self.names = [f"tensor {i} of the initial state" for i in range(self._count)]
        self.names += step.names or [f"hyper[{i}]" for i in range(len(hyper))]
        self.records: list[Any] = []
        self.last: Any = None

    def sweep(self, leaves: Sequence[Tensor]) -> list[Tensor]:
        """Run all steps without a graph, storing states on the way; return the last state's tensors."""
        state, _ = self._split(self._state, [t.detach() for t in leaves])
        hyper = as_leaves(leaves[self._count :])
        positions = self._positions()
        end = len(self._items)
        ledger = None if self._all else Ledger(end)  # with all states in memory, the losses do not matter
        before = None if self._draws else self._ambient.rng()
        for number in range(end):
            if number in positions:
                kept = self._shelf.put(state) if number else Kept(state, None)  # the caller's graph holds the first
                self._stored[number] = Stored(kept, self._rng())
            item = self._items[number]
            self._batch_versions.append([version_of(t) for t in tensors(item)])
            keep = self._recording or (self._starts is None and number == end - 1 and not self._repeats)
            keep = keep or (self._keeps and number in positions)
            if keep or number == 0 or self._prints is not None:
                state, record, saved = self._step.record(state, hyper, item)
                if keep:
                    self._saved[number] = saved
            else:
                state, record = self._step(state, hyper, item)
            (ledger or self.records).append(record)
            if self._prints is not None:
                self._prints.append(fingerprints(tensors(state)))
        self.last = state
        self.records = ledger.records() if ledger else self.records
        if before is not None and self._ambient.has_drawn(since=before):
            self._keep_first(before)
        return tensors(state)

    def _keep_first(self, rng: Any) -> None:
        """Drop all states but the first: a step drew that was not known to, and the others lack their random state."""
        self._draws = True
        for number in [number for number in self._stored if number]:
            self._shelf.drop(self._stored.pop(number).kept)
        self._stored[0] = self._stored[0]._replace(rng=rng)

    def pull(self, leaves: Sequence[Tensor], cotangents: Cotangents) -> Cotangents:
        """Pull cotangents of the last state back to the initial one and to hyper."""
        quick = self._pull_saved(len(leaves) - self._count, cotangents)
        if quick is not None:
            return quick
        hyper = as_leaves(leaves[self._count :])
        total: Cotangents = [None] * len(hyper)
        end = len(self._items)
        with torch.no_grad(), self._ambient.restored():
            # States are dropped on the way; a second backward pass (retain_graph=True) starts from the first alone.
            if self._starts is None:
                cotangents = self._reverse(self._stored, 0, end, self._slots, hyper, cotangents, total)
            else:
                for start, later in itertools.pairwise(self._starts):
                    if later not in self._stored:
                        self._stored[later] = self._advance(self._stored[start], start, later, hyper)
                for start, stop in reversed(list(itertools.pairwise([*self._starts, end]))):
                    cotangents = self._segment(self._stored[start], start, stop, hyper, cotangents, total)
                    if stop in self._stored and not self._all:  # it was compared with the end of this segment
                        self._shelf.drop(self._stored.pop(stop).kept)
        return cotangents + total

    def _pull_saved(self, count: int, cotangents: Cotangents) -> Cotangents | None:
        """Do what `pull` does, for `count` upper variables, by what was saved alone; None if that does not suffice."""
        end = len(self._items)
        if not self._all or len(self._saved) < end or not self._ambient.holds():
            return None
        total: Cotangents = [None] * count
        with torch.no_grad():
            for number in reversed(range(end)):
                self._item(number)
                pulled = self._step.pull_saved(self._saved[number], cotangents)
                if pulled is None:
                    return None
                cotangents = self._add(pulled, total)
        self._saved.clear()
        return cotangents + total

    def pull_on_tape(self, leaves: Sequence[Tensor], cotangents: Sequence[Tensor | None]) -> Cotangents:
        """Pull back through a rollout that is itself recorded, so that the result can be differentiated again."""
        with self._ambient.restored():
            self._set_rng(self._stored[0].rng)
            # Views: the derivative is the partial one of each input, whatever else it depends on.
            inputs = [t.view_as(t) if t.requires_grad else t for t in leaves]
            state, hyper = self._split(self._state, inputs)
            for number in range(len(self._items)):
                state, _ = self._step(state, hyper, self._item(number))
            self._ambient.compare(tensors(state), tensors(self.last))
        refuse_captured(tensors(state), inputs, ends=[t.grad_fn for t in inputs])
        return pull_back(tensors(state), inputs, cotangents, create_graph=True)

    def _positions(self) -> set[int]:
        """Where the first sweep stores a state."""
        end = len(self._items)
        if self._starts is not None:
            return set(self._starts)
        positions = {0}
        at = 0
        for slots in range(self._slots, 1, -1):
            if end - at > 1:
                at += split(end - at, slots)
                positions.add(at)
        return positions

    def _reverse(
        self,
        stored: dict[int, Stored],
        start: int,
        stop: int,
        slots: int,
        hyper: tuple[Tensor, ...],
        cotangents: Cotangents,
        total: Cotangents,
    ) -> Cotangents:
        """Reverse the steps from `start` to `stop` with `slots` states, the one at `start` among them."""
        while stop - start > 1:
            middle = start + split(stop - start, slots)
            if middle not in stored and middle not in self._saved:
                stored[middle] = self._advance(stored[start], start, middle, hyper)
            cotangents = self._reverse(stored, middle, stop, slots - 1, hyper, cotangents, total)
            if middle in stored:
                self._shelf.drop(stored.pop(middle).kept)
            stop = middle
        return self._segment(stored.get(start), start, stop, hyper, cotangents, total)

    def _advance(self, source: Stored, start: int, stop: int, hyper: tuple[Tensor, ...]) -> Stored:
        """Repeat steps from a stored state, and store the state they lead to."""
        self._set_rng(source.rng)
        state = self._shelf.get(source.kept)
        for number in range(start, stop):
            item = self._item(number)
            saved = self._saved.get(number) if self._keeps else None
            if saved is not None:
                state, _ = self._step.advance(state, hyper, item, saved)
            elif self._prints is None and (number > start or not self._keeps):
                state, _ = self._step(state, hyper, item)
            else:  # recorded as in the first sweep: with and without a graph other kernels may run
                state, _, saved = self._step.record(state, hyper, item)
                if self._keeps and number == start:
                    self._saved[number] = saved
            self._compare_prints(number, state)
        return Stored(self._shelf.put(state), self._rng())

    def _segment(
        self,
        source: Stored | None,
        start: int,
        stop: int,
        hyper: tuple[Tensor, ...],
        cotangents: Cotangents,
        total: Cotangents,
    ) -> Cotangents:
        """Repeat the steps of a segment, and pull the cotangents through one after the other."""
        state = None
        if source is not None:
            self._set_rng(source.rng)
            state = self._shelf.get(source.kept)
        ledger = Ledger(stop - start)
        taken = []
        for number in range(start, stop):
            # A tape evaluates nothing again: it needs neither the state nor the random numbers.
            before = state if self._repeats else None
            rng = self._rng() if self._repeats else None
            # A second backward pass (retain_graph=True) records anew: as autograd does, the first frees its graph.
            saved = self._saved.pop(number, None)
            item = self._item(number) if saved is None or self._repeats else None
            if saved is None:
                state, record, saved = self._step.record(state, hyper, item)
                ledger.append(record)
                self._compare_prints(number, state)
            elif number + 1 < stop:
                state, record = self._step.advance(state, hyper, item, saved)
                ledger.append(record)
            taken.append(Taken(before, rng, item, saved))
        records = ledger.records()
        while taken:
            before, rng, item, saved = taken.pop()
            self._set_rng(rng)
            cotangents = self._add(self._step.pull(before, hyper, item, cotangents, saved), total)
        if len(records) == stop - start:
            self._compare(start, stop, tensors(state), records)
        return cotangents

    def _compare(self, start: int, stop: int, outputs: Sequence[Tensor], records: Sequence[Any]) -> None:
        """Compare a replayed segment with the first sweep; after the pull, which freed its graph."""
        self._ambient.compare(_joined(records), _joined(self.records[start:stop]))
        if stop == len(self._items):
            self._ambient.compare(outputs, tensors(self.last))
        elif stop in self._stored:
            self._ambient.compare(outputs, tensors(self._shelf.get(self._stored[stop].kept)))

    def _compare_prints(self, number: int, state: Any) -> None:
        """If that was asked for, compare a repeated state with that of the first sweep, to the bit."""
        if self._prints is not None:
            self._ambient.compare_prints(fingerprints(tensors(state)), self._prints[number], number + 1)

    def _rng(self) -> Any:
        """Return the random state, if steps draw from it."""
        return self._ambient.rng() if self._draws else None

    def _set_rng(self, state: Any) -> None:
        if state is not None:
            self._ambient.set_rng(state)

    def _add(self, pulled: Cotangents, total: Cotangents) -> Cotangents:
        """Add the cotangents of hyper to their total; return those of the state."""
        for i, grad in enumerate(pulled[self._count :]):
            known = total[i]
            if grad is not None:
                total[i] = grad if known is None else known + grad
        return pulled[: self._count]

    def _split(self, state: Any, leaves: Sequence[Tensor]) -> tuple[Any, tuple[Tensor, ...]]:
        return replace_tensors(state, leaves[: self._count]), tuple(leaves[self._count :])

    def _item(self, number: int) -> Any:
        """Return an item once more, after a look at whether its tensors are still the same."""
        item = self._items[number]
        for tensor, version in zip(tensors(item), self._batch_versions[number], strict=False):
            if version_of(tensor) != version:
                raise RuntimeError(changed_in_place(f"a tensor of the batch of step k={number + 1}", tensor))
        return item


def _joined(records: Any) -> list[Tensor]:
    """Return all numbers of some records as one vector per device, so that two rows of them are compared at once."""
    numbers: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors(records):
        numbers.setdefault(tensor.device, []).append(tensor.reshape(-1))
    return [torch.cat(own) for own in numbers.values()]
