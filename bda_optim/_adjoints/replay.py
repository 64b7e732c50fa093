"""A rollout as one node of the autograd graph, whose backward pass replays steps from stored states.

`torch.utils.checkpoint` cannot serve: around steps that take gradients it replays a segment once per inner gradient
(640 step evaluations instead of 64 at K = 64).
"""

from __future__ import annotations

import abc
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._context.environment import Ambient, fingerprints
from .._support import autograd_graph
from .._support.tensors import describe, is_differentiable
from .._support.tree import detach, replace_tensors, tensors
from .._support.types import Step
from .revolve import split
from .storage import Kept, Ledger, Shelf

Cotangents = list[Tensor | None]


class CompiledStep(abc.ABC):
    """A step that knows its own pull-back, and takes several items at once."""

    inspected: bool
    broken: str | None

    @abc.abstractmethod
    def __call__(self, state: Any, hyper: Sequence[Tensor], unit: Any) -> tuple[Any, Any]:
        """Take the steps of a unit."""

    @abc.abstractmethod
    def units(self, items: Sequence[Any]) -> Sequence[Any]:
        """Divide items into units."""

    def record(self, state: Any, hyper: Sequence[Tensor], unit: Any) -> tuple[Any, Any, Any]:
        """Take the steps of a unit; return also what saves `pull` from doing their work again, or None."""
        return *self(state, hyper, unit), None

    @abc.abstractmethod
    def pull(
        self, state: Any, hyper: Sequence[Tensor], unit: Any, cotangents: Cotangents, saved: Any = None
    ) -> Cotangents:
        """Pull cotangents of the state after a unit back to the state before it, and to hyper."""

    @abc.abstractmethod
    def push(
        self, state: Any, hyper: Sequence[Tensor], unit: Any, flows: Cotangents
    ) -> tuple[Any, Any, Cotangents] | None:
        """Take the steps of a unit with the tangents of state and hyper; None if that cannot be done."""


class Stored(NamedTuple):
    """A state from which steps can be replayed."""

    kept: Kept
    rng: Any


class Replay:
    """K steps, the states stored on the way, and how to pull cotangents back through them.

    With `starts`, a state is stored before each segment that starts there, and dropped when it was replayed. Otherwise
    at most `slots` states are stored, and the last step stays recorded, as the count of Griewank & Walther supposes.
    """

    def __init__(
        self,
        step: Step,
        state: Any,
        hyper: Sequence[Tensor],
        items: Sequence[Any],
        *,
        starts: Sequence[int] | None,
        slots: int,
        offload: bool = False,
        check: bool = False,
        record: bool = False,
    ) -> None:
        """Prepare; nothing runs yet. With `record`, a compiled step saves what its pull-back needs in the sweep."""
        self._step, self._items, self._starts, self._slots = step, items, starts, slots
        self._state, self._count = detach(state), len(tensors(state))
        self._compiled, self._recording = isinstance(step, CompiledStep), record
        self._ambient = Ambient(tensors(state))
        self._stored: dict[int, Stored] = {}
        self._saved: dict[int, Any] = {}
        # With a state at every step none is copied or dropped, except to the host.
        self._all = starts is not None and len(starts) == len(items) and not offload
        self._shelf = Shelf(state, 0 if self._all else slots or len(self._positions()), offload=offload)
        self._tape: tuple[list[Tensor], list[Tensor]] | None = None
        self._batch_versions: list[list[int]] = []
        self._prints: list[list[Tensor]] | None = [] if check else None
        self.names = [f"tensor {i} of the initial state" for i in range(self._count)]
        self.names += getattr(step, "names", ()) or [f"hyper[{i}]" for i in range(len(hyper))]
        self.records: list[Any] = []
        self.last: Any = None

    def sweep(self, leaves: Sequence[Tensor]) -> list[Tensor]:
        """Run all steps without a graph, storing states on the way; return the last state's tensors."""
        state, hyper = self._split(self._state, [t.detach() for t in leaves])
        wanted = tuple(t.detach().requires_grad_(t.requires_grad) for t in leaves[self._count :])
        positions, end = self._positions(), len(self._items)
        ledger = None if self._all else Ledger(end)  # with all states in memory, losses are no matter
        for number in range(end):
            if number in positions:
                kept = self._shelf.put(state) if number else Kept(state, None)  # the caller's graph holds the first
                self._stored[number] = Stored(kept, self._ambient.rng())
            self._batch_versions.append([_version(t) for t in tensors(self._items[number])])
            keep = self._starts is None and number == end - 1 and not self._compiled
            inspect = number == 0 and not getattr(self._step, "inspected", False)
            if inspect and self._compiled:
                rng = self._ambient.rng()
                self._recorded_step(number, state, hyper, keep)
                self._ambient.set_rng(rng)
            if keep or (inspect and not self._compiled):
                state, record = self._recorded_step(number, state, hyper, keep)
            elif self._recording and isinstance(self._step, CompiledStep):
                state, record, self._saved[number] = self._step.record(state, wanted, self._items[number])
            else:
                state, record = self._step(state, hyper, self._items[number])
            (ledger or self.records).append(record)
            if self._prints is not None:
                self._prints.append(fingerprints(tensors(state)))
        self.last, self.records = state, ledger.records() if ledger else self.records
        return tensors(state)

    def pull(self, leaves: Sequence[Tensor], cotangents: Cotangents) -> Cotangents:
        """Pull cotangents of the last state back to the initial one and to hyper."""
        hyper = tuple(t.detach().requires_grad_(t.requires_grad) for t in leaves[self._count :])
        total: Cotangents = [None] * len(hyper)
        end = len(self._items)
        with self._ambient.restored():
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

    def pull_on_tape(self, leaves: Sequence[Tensor], cotangents: Sequence[Tensor | None]) -> Cotangents:
        """Pull back through a rollout that is itself recorded, so that the result can be differentiated again."""
        with self._ambient.restored():
            self._ambient.set_rng(self._stored[0].rng)
            # Views: the derivative is the partial one of each input, whatever else it depends on.
            inputs = [t.view_as(t) if t.requires_grad else t for t in leaves]
            state, hyper = self._split(self._state, inputs)
            for number in range(len(self._items)):
                state, _ = self._again(number, state, hyper)
            self._ambient.compare(tensors(state), tensors(self.last))
        refuse_captured(tensors(state), inputs, ends=[t.grad_fn for t in inputs])
        return pull_back(tensors(state), inputs, cotangents, create_graph=True)

    def _positions(self) -> set[int]:
        """Where the first sweep stores a state."""
        end = len(self._items)
        if self._starts is not None:
            return set(self._starts)
        found, at = {0}, 0
        for slots in range(self._slots, 1, -1):
            if end - at > 1:
                at += split(end - at, slots)
                found.add(at)
        return found

    def _recorded_step(self, number: int, state: Any, hyper: Sequence[Tensor], keep: bool) -> tuple[Any, Any]:
        """Take a step with a graph: to look at what it depends on, or to keep it for the backward pass."""
        with torch.enable_grad():
            inputs = fresh([*tensors(state), *hyper])
            after, record = self._step(*self._split(state, inputs), self._items[number])
        autograd_graph.refuse_once_differentiable(tensors(after))
        refuse_captured(tensors(after), inputs)
        if isinstance(self._step, CompiledStep):
            self._step.inspected = True
        if keep:
            self._tape = inputs, tensors(after)
        return detach(after), record

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
            if middle not in stored and not (self._tape and middle == stop - 1):
                stored[middle] = self._advance(stored[start], start, middle, hyper)
            cotangents = self._reverse(stored, middle, stop, slots - 1, hyper, cotangents, total)
            if middle in stored:
                self._shelf.drop(stored.pop(middle).kept)
            stop = middle
        return self._segment(stored.get(start), start, stop, hyper, cotangents, total)

    def _advance(self, source: Stored, start: int, stop: int, hyper: tuple[Tensor, ...]) -> Stored:
        self._ambient.set_rng(source.rng)
        state = self._shelf.get(source.kept)
        with torch.no_grad():
            for number in range(start, stop):
                state, _ = self._again(number, state, hyper)
        return Stored(self._shelf.put(state), self._ambient.rng())

    def _segment(
        self,
        source: Stored | None,
        start: int,
        stop: int,
        hyper: tuple[Tensor, ...],
        cotangents: Cotangents,
        total: Cotangents,
    ) -> Cotangents:
        """Replay a segment on the tape, or take the tape that was kept, and pull the cotangents through it."""
        if isinstance(self._step, CompiledStep):
            assert source is not None
            return self._compiled_segment(self._step, source, start, stop, hyper, cotangents, total)
        if self._tape is not None:
            (inputs, outputs), self._tape = self._tape, None
            return self._add(pull_back(outputs, inputs, cotangents), total)
        assert source is not None
        self._ambient.set_rng(source.rng)
        ledger = Ledger(stop - start)
        with torch.enable_grad():
            inputs = [*fresh(tensors(self._shelf.get(source.kept))), *hyper]
            state, _ = self._split(source.kept.state, inputs)
            for number in range(start, stop):
                state, record = self._again(number, state, hyper)
                ledger.append(record)
        outputs = tensors(state)
        refuse_captured(outputs, inputs)
        found = pull_back(outputs, inputs, cotangents)
        self._check(stop, detach(outputs), _joined(ledger.records()), _joined(self.records[start:stop]))
        return self._add(found, total)

    def _check(self, stop: int, outputs: Sequence[Tensor], losses: Sequence[Tensor], known: Sequence[Tensor]) -> None:
        """Compare a replayed segment with what is known of the first sweep; after the pull, which freed its graph."""
        self._ambient.compare(losses, known)
        if stop == len(self._items):
            self._ambient.compare(outputs, tensors(self.last))
        elif stop in self._stored:
            self._ambient.compare(outputs, tensors(self._shelf.get(self._stored[stop].kept)))

    def _compiled_segment(
        self,
        step: CompiledStep,
        source: Stored,
        start: int,
        stop: int,
        hyper: tuple[Tensor, ...],
        cotangents: Cotangents,
        total: Cotangents,
    ) -> Cotangents:
        """Run a segment once more, and pull the cotangents through one item after the other."""
        self._ambient.set_rng(source.rng)
        state, way, records = self._shelf.get(source.kept), [], []
        with torch.no_grad():
            for number in range(start, stop):
                # A second backward pass (retain_graph=True) records anew: as autograd does, the first frees its graph.
                saved, before, rng = self._saved.pop(number, None), state, self._ambient.rng()
                if saved is None and self._prints is None:
                    state, record, saved = step.record(state, hyper, self._item(number))
                    records.append(record)
                elif saved is None:
                    state, record = self._again(number, state, hyper)
                    records.append(record)
                way.append((before, rng, saved))
            self._ambient.compare(_joined(records), _joined(self.records[stop - len(records) : stop]))
            for number in reversed(range(start, stop)):
                before, rng, saved = way.pop()
                self._ambient.set_rng(rng)
                cotangents = self._add(step.pull(before, hyper, self._item(number), cotangents, saved), total)
        return cotangents

    def _add(self, found: Cotangents, total: Cotangents) -> Cotangents:
        """Add the cotangents of hyper to their total; return those of the state."""
        for i, grad in enumerate(found[self._count :]):
            known = total[i]
            if grad is not None:
                total[i] = grad if known is None else known + grad
        return found[: self._count]

    def _split(self, state: Any, leaves: Sequence[Tensor]) -> tuple[Any, tuple[Tensor, ...]]:
        return replace_tensors(state, leaves[: self._count]), tuple(leaves[self._count :])

    def _again(self, number: int, state: Any, hyper: tuple[Tensor, ...]) -> tuple[Any, Any]:
        """Take a step once more; if that was asked for, compare its state with the first one, to the bit."""
        state, record = self._step(state, hyper, self._item(number))
        if self._prints is not None:
            self._ambient.compare_prints(fingerprints(tensors(state)), self._prints[number], number + 1)
        return state, record

    def _item(self, number: int) -> Any:
        """Return an item once more, after a look at whether its tensors are still the same."""
        item = self._items[number]
        for tensor, version in zip(tensors(item), self._batch_versions[number], strict=False):
            if _version(tensor) != version:
                raise RuntimeError(changed_in_place(f"a tensor of the batch of step k={number + 1}", tensor))
        return item


class Replayed(torch.autograd.Function):
    """The K steps as one node of the graph: ``Replayed.apply(replay, *tensors_of_the_state, *hyper)``."""

    @staticmethod
    def forward(ctx: Any, replay: Replay, *leaves: Tensor) -> tuple[Tensor, ...]:
        """Run the first sweep."""
        ctx.replay, ctx.leaves, ctx.versions = replay, leaves, [_version(t) for t in leaves]
        ctx.save_for_backward(*leaves)
        ctx.set_materialize_grads(False)
        outputs = tuple(t.clone() for t in replay.sweep(leaves))
        ctx.mark_non_differentiable(*(t for t in outputs if not is_differentiable(t)))
        return outputs

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        """Replay; on the tape if the caller wants a graph of the backward pass."""
        replay: Replay = ctx.replay
        for name, tensor, version in zip(replay.names, ctx.leaves, ctx.versions, strict=True):
            if _version(tensor) != version:
                raise RuntimeError(changed_in_place(name, tensor))
        leaves = ctx.saved_tensors  # a second backward without retain_graph raises here
        if torch.is_grad_enabled():
            return None, *replay.pull_on_tape(leaves, cotangents)
        return None, *replay.pull(leaves, list(cotangents))


def fresh(values: Sequence[Tensor]) -> list[Tensor]:
    """Return leaves with the same values, which require grad where they can."""
    return [value.detach().requires_grad_(is_differentiable(value)) for value in values]


def pull_back(
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    cotangents: Sequence[Tensor | None],
    *,
    create_graph: bool = False,
) -> Cotangents:
    """Return the vector-Jacobian products with respect to `inputs`; None where there is none."""
    pairs = [(o, c) for o, c in zip(outputs, cotangents, strict=True) if c is not None and o.requires_grad]
    wanted = [x for x in inputs if x.requires_grad]
    if not pairs or not wanted:
        return [None] * len(inputs)
    results, seeds = zip(*pairs, strict=True)
    found = iter(torch.autograd.grad(results, wanted, seeds, allow_unused=True, create_graph=create_graph))
    return [next(found) if x.requires_grad else None for x in inputs]


def refuse_captured(outputs: Sequence[Tensor], inputs: Sequence[Tensor], ends: Sequence[Any] = ()) -> None:
    """Raise where a step depends on a leaf that it was not given: its gradient would be lost, silently.

    Inputs that are no leaves are told by their nodes, `ends`.
    """
    known = {id(t) for t in inputs}
    for leaf in autograd_graph.leaves(outputs, ends):
        if id(leaf) not in known:
            raise ValueError(
                "a loss uses a tensor that requires grad but is neither in `hyper=` nor in `batches=`; got one of "
                f"{describe(leaf)}. Its gradient would be lost: pass it in `hyper=` and take it from the loss "
                "function's second argument, detach it, or use `adjoint=Unroll()`."
            )


def _joined(records: Any) -> list[Tensor]:
    """Return all numbers of some records as one vector, so that two rows of them are compared at once."""
    numbers = [t.reshape(-1) for t in tensors(records)]
    return [torch.cat(numbers)] if numbers else []


def changed_in_place(name: str, tensor: Tensor) -> str:
    """Say that a tensor is not what it was."""
    return (
        f"{name} ({describe(tensor)}) was changed in place between the rollout and its backward pass, as an "
        "`optimizer.step()` or a `commit()` does. Call `.backward()` first, or change a copy."
    )


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version
