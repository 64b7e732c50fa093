r"""One exact backward sweep, and what its partial sums say.

.. math:: \lambda_K = \partial_y F, \quad \lambda_{k-1} = (\partial_y S_k)^T \lambda_k, \quad
          \frac{dF}{dx} = \partial_x F + \sum_k (\partial_x S_k)^T \lambda_k

The norms of :math:`\lambda_k = dF/dy_k` show how much of the start is left and whether adjoints explode. The sum over
the last T steps is the hypergradient of `Truncated(T)`: one sweep gives the bias of every T.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._adjoints.base import fresh, pull_back, refuse_captured
from .._adjoints.revolve import segments
from .._context.environment import Ambient
from .._context.forward import surroundings
from .._rollout.losses import check_finite
from .._support import autograd_graph
from .._support.tree import detach, replace_tensors, tensors
from .._support.types import InnerState, Record
from .inner_loop import InnerLoop

Advance = Callable[[int], None]
"""Is called with how many steps were evaluated since the last call."""


class Sweep(NamedTuple):
    """What one pass forward and backward gives.

    Attributes:
        norms: ``|dF/dy_k| / |dF/dy_K|`` for k = 0..K.
        slope: ``|dF/dy_K|``.
        gradient: dF/dx, flat and in float64; None without upper variables.
        truncation: T -> the relative bias of `Truncated(T)`.
        states: k -> the state after k steps, for those k that were asked for and for K.
        records: The losses of the K steps.
        value: F(x, y_K).
        evaluated: How many steps were evaluated.
    """

    norms: tuple[float, ...]
    slope: float
    gradient: Tensor | None
    truncation: dict[int, float]
    states: dict[int, InnerState]
    records: list[Record]
    value: float
    evaluated: int

    @property
    def start(self) -> float:
        """How much of the start is left: ``|dF/dy_0| / |dF/dy_K|``."""
        return self.norms[0]

    @property
    def growth(self) -> float:
        """The largest adjoint over the last one; infinite where one is not a number."""
        return max(size if math.isfinite(size) else math.inf for size in self.norms)


class _Stored(NamedTuple):
    state: InnerState
    rng: Any


def sweep(
    loop: InnerLoop, *, keep: Collection[int] = (), lengths: Collection[int] = (), advance: Advance | None = None
) -> Sweep:
    """Run the loop, and pull dF/dy_K back through it step by step: 2 K step evaluations.

    Args:
        loop: The inner loop.
        keep: The k whose states are returned.
        lengths: The T whose truncation bias is wanted, beside the powers of two below K.
        advance: Is called as steps are done.

    Raises:
        FloatingPointError: If a loss or y_K is not finite.
    """
    advance = advance or (lambda steps: None)
    ambient = Ambient(loop.state.params)
    hyper = tuple(value.detach() for value in loop.hyper)
    starts = segments(loop.steps, 2.25)
    stored, states, records = _forward(loop, hyper, ambient, {*starts}, {*keep}, advance)
    check_finite(records, states[loop.steps].params, loop.names)
    value, cotangents, direct = _end(loop, states[loop.steps], hyper)
    slope = norm(cotangents[: len(loop.names)])
    sums = _PartialSums(loop, direct, slope, cotangents, {*lengths})
    with ambient.restored():
        for start, stop in reversed(list(itertools.pairwise([*starts, loop.steps]))):
            tapes, after = _recorded(loop, stored[start], start, stop, hyper, ambient)
            first = stored.pop(stop).state if stop in stored else states[stop]
            ambient.compare(after.params, first.params)
            for inputs, outputs in reversed(tapes):
                sums.pull(inputs, outputs)
            advance(stop - start)
    gradient, truncation = sums.finish()
    return Sweep(tuple(reversed(sums.norms)), slope, gradient, truncation, states, records, value, 2 * loop.steps)


def _forward(
    loop: InnerLoop, hyper: tuple[Tensor, ...], ambient: Ambient, starts: set[int], keep: set[int], advance: Advance
) -> tuple[dict[int, _Stored], dict[int, InnerState], list[Record]]:
    """Run all steps without a graph; return the states that segments start from, those to keep, and the losses."""
    state: InnerState = detach(loop.state)
    stored: dict[int, _Stored] = {}
    states: dict[int, InnerState] = {}
    records: list[Record] = []
    with torch.no_grad(), surroundings():
        for number, item in enumerate(loop.items):
            if number in starts:
                stored[number] = _Stored(state, ambient.rng())
            if number in keep:
                states[number] = state
            state, record = loop.step(state, hyper, item)
            records.append(record)
            advance(1)
    states[loop.steps] = state
    return stored, states, records


def _end(
    loop: InnerLoop, last: InnerState, hyper: tuple[Tensor, ...]
) -> tuple[float, list[Tensor | None], list[Tensor | None]]:
    """Return F(x, y_K), and its partial derivatives with respect to the last state and to `hyper`."""
    with torch.enable_grad(), surroundings():
        inputs = fresh([*tensors(last), *hyper])
        count = len(inputs) - len(hyper)
        state = replace_tensors(last, inputs[:count])
        value = loop.upper(state.params, state.buffers, inputs[count:])
        slopes = pull_back([value], inputs, [torch.ones_like(value)])
    return float(value.detach()), slopes[:count], slopes[count:]


def _recorded(
    loop: InnerLoop, source: _Stored, start: int, stop: int, hyper: tuple[Tensor, ...], ambient: Ambient
) -> tuple[list[tuple[list[Tensor], list[Tensor]]], InnerState]:
    """Take the steps of a segment once more, each with a graph of its own; return inputs and outputs of each."""
    ambient.set_rng(source.rng)
    state, tapes = source.state, []
    for number in range(start, stop):
        with torch.enable_grad():
            inputs = fresh([*tensors(state), *hyper])
            count = len(inputs) - len(hyper)
            after, _ = loop.step(replace_tensors(state, inputs[:count]), tuple(inputs[count:]), loop.items[number])
        outputs = tensors(after)
        if number in (0, loop.steps - 1):
            autograd_graph.refuse_once_differentiable(outputs)
            refuse_captured(outputs, inputs)
        tapes.append((inputs, outputs))
        state = detach(after)
    return tapes, state


class _PartialSums:
    """The adjoint as it is pulled back, and the sum of what each step adds to the hypergradient.

    Both are kept in units of ``2^exponent |dF/dy_K|``, and the exponent follows the adjoint: a loss scaled by 1e-25 and
    an adjoint that grows by 1e77 both fit into float32.
    """

    def __init__(
        self, loop: InnerLoop, direct: Sequence[Tensor | None], slope: float, cotangents: list[Tensor | None],
        lengths: set[int],
    ) -> None:  # fmt: skip
        """Start at step K."""
        self._loop, self._count = loop, len(cotangents)
        self._unit = slope if slope > 0 and math.isfinite(slope) else 1.0
        self._exponent = 0
        self._cotangents = [None if c is None else c / self._unit for c in cotangents]
        self._total = [self._wide(direct[i], loop.hyper[i]) for i in loop.variables]
        self._lengths = {2**j for j in range(loop.steps.bit_length())} | lengths
        self._snapshots: dict[int, Tensor] = {}
        self._done = 0
        self.norms = [self._norm()]

    def pull(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Go back by one step."""
        found = pull_back(outputs, inputs, self._cotangents)
        self._cotangents = found[: self._count]
        for n, i in enumerate(self._loop.variables):
            self._add(n, found[self._count + i])
        self._done += 1
        if self._done in self._lengths and self._done < self._loop.steps:
            self._snapshots[self._done] = self._flat()
        self._rescale()
        self.norms.append(self._norm())

    def finish(self) -> tuple[Tensor | None, dict[int, float]]:
        """Return the hypergradient and the bias of each truncation."""
        start = self._cotangents[: len(self._loop.start_slots)]
        for slot, part in zip(self._loop.start_slots, start, strict=True):
            if slot is not None:
                self._add(self._loop.variables.index(slot), part)
        if not self._total:
            return None, {}
        gradient = self._flat()
        biases = {}
        if not self._loop.start_is_upper:  # `Truncated` refuses such a rollout
            biases = {T: distance(part, gradient) for T, part in self._snapshots.items()}
        return gradient * self._unit, biases

    def _wide(self, part: Tensor | None, like: Tensor) -> Tensor:
        """Return a part of the sum, in units of the adjoint's norm."""
        home = self._loop.state.params[0]
        exact = home.device.type != "mps" and like.numel() <= _EXACT
        dtype = torch.float64 if exact else torch.promote_types(like.dtype, torch.float32)
        if part is None:
            return torch.zeros(like.numel(), dtype=dtype, device=home.device)
        return part.detach().reshape(-1).to(home.device, dtype) / self._unit

    def _add(self, place: int, part: Tensor | None) -> None:
        if part is not None:
            total = self._total[place]
            self._total[place] = total + _scaled(part.reshape(-1).to(total.device, total.dtype), self._exponent)

    def _flat(self) -> Tensor:
        return torch.cat(self._total)

    def _norm(self) -> float:
        size = norm(self._cotangents[: len(self._loop.names)])
        return float(_scaled(torch.tensor(size, dtype=torch.float64), self._exponent))

    def _rescale(self) -> None:
        size = norm(self._cotangents)
        if size > 0 and math.isfinite(size):
            shift = math.frexp(size)[1]
            if abs(shift) > _RANGE:
                self._exponent += shift
                self._cotangents = [None if c is None else c * 2.0**-shift for c in self._cotangents]


_EXACT = 2**20
"""The largest number of elements that are summed in float64; log2(K) copies of the sum are kept."""

_RANGE = 10
"""The adjoint's norm stays between 2^-10 and 2^10: float16 ends at 2^16."""


def _scaled(value: Tensor, exponent: int) -> Tensor:
    """Return ``2^exponent value``; it may be infinite, but 0 stays 0."""
    while abs(exponent) > 1000:
        part = 1000 if exponent > 0 else -1000
        value = value * 2.0**part
        exponent -= part
    return value * 2.0**exponent if exponent else value


def distance(value: Tensor, reference: Tensor) -> float:
    """Return the distance of two vectors over the norm of the second."""
    difference = norm([value - reference])
    size = norm([reference])
    if size > 0:
        return difference / size
    return 0.0 if difference == 0 else math.inf


def norm(values: Sequence[Tensor | None]) -> float:
    """Return the norm of all tensors together, in float64 and without overflow.

    >>> norm([torch.tensor([3e30, 4e30]), None])
    5e+30
    """
    present = [v.detach() for v in values if v is not None and v.numel()]
    if not present:
        return 0.0
    wide = torch.float32 if present[0].device.type == "mps" else torch.float64
    size = math.hypot(*(float(torch.linalg.vector_norm(v, dtype=wide)) for v in present))
    if 0 < size < math.inf:
        return size
    largest = max(float(v.abs().max()) for v in present)  # the squares have left the range of float64
    if largest == 0 or not math.isfinite(largest):
        return largest
    return largest * norm([v / largest for v in present])
