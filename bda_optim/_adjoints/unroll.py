"""Adjoints: how the backward pass of a rollout is obtained.

Each one is called ``adjoint(step, state, hyper, items)`` and runs ``step(state, hyper, item)`` for each item. It
returns the last state, differentiable as its docstring says, and the list of records. An adjoint knows the step only
as a function, the state as a tree of tensors and numbers, and `hyper` as a tuple of tensors.

| adjoint | hypergradient | steps evaluated | memory | choose it |
|---|---|---|---|---|
| `Unroll()` | exact | K | K graphs | by default, while memory suffices |
| `Checkpointed()` | exact | 2 K | that of about 2.1 sqrt(K) states | for long K |
| `Checkpointed(slots=s)` | exact | K + t(K, s) | s states | for very long K |
| `ForwardMode()` | exact | K | P states | for a handful (P) of upper scalars and any K |
| `Truncated(last=T)` | biased | K | T graphs | where old steps matter little |
| `FirstOrder()` | biased | K | K small graphs | first-order MAML |
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from .._support import autograd_graph
from .._support.tensors import any_requires_grad
from .._support.tree import detach, replace_tensors, tensors
from .._support.types import Step
from .forward_mode import Attached, identity, push, scalars
from .replay import CompiledStep, Replay, Replayed, fresh, refuse_captured
from .revolve import segments

Items = Sequence[Any]
Result = tuple[Any, list[Any]]


class Adjoint(Protocol):
    """Runs the inner loop, and decides how it is differentiated."""

    def __call__(self, step: Step, state: Any, hyper: tuple[Tensor, ...], items: Items) -> Result:
        """Return the last state and the records of all steps."""


@dataclasses.dataclass(frozen=True)
class Unroll:
    """Let autograd record every step: exact, simple, and the memory of K graphs.

    Tensors that a loss captures by closure are differentiated too, as autograd does.

    >>> x = torch.tensor(3.0, requires_grad=True)
    >>> y, _ = Unroll()(lambda y, x, k: (x[0] * y, None), torch.ones(()), (x,), [1, 2])
    >>> y
    tensor(9., grad_fn=<MulBackward0>)
    """

    def __call__(self, step: Step, state: Any, hyper: tuple[Tensor, ...], items: Items) -> Result:
        """Run the loop in the caller's grad mode; a compiled step is not recorded, but pulled back from every state."""
        if isinstance(step, CompiledStep):
            items = step.units(items)
            if any_requires_grad((state, hyper)) and not step.broken:
                return _replayed(step, state, hyper, items, starts=range(len(items)), record=True)
        records = []
        for number, item in enumerate(items):
            state, record = step(state, hyper, item)
            records.append(record)
            if number == 0 and torch.is_grad_enabled():
                autograd_graph.refuse_once_differentiable(tensors(state))
        return state, records


@dataclasses.dataclass(frozen=True)
class FirstOrder:
    """Take the inner gradients as constants: no second derivatives (first-order MAML).

    Not recommended for hyper-parameters that act through the lower loss only: their gradient is zero. What is left are
    the derivatives of the update itself: with respect to the initial parameters (the identity, for plain SGD), to the
    rates, to alpha and to the strength of a prox.

    Reference: Finn et al., "Model-Agnostic Meta-Learning", ICML 2017, section 5.2.
    """

    def __call__(self, step: Step, state: Any, hyper: tuple[Tensor, ...], items: Items) -> Result:
        """Unroll the step with constant gradients."""
        return Unroll()(step.first_order(), state, hyper, items)  # type: ignore[attr-defined]


@dataclasses.dataclass(frozen=True)
class Truncated:
    r"""Differentiate the last T of K steps only; the first K - T run without any graph.

    The state after step K - T counts as a constant, so the hypergradient is that of the last T steps; it is biased by
    what the first steps would have contributed, which fades as the lower level contracts. k runs on across the cut.

    Reference: Shaban et al., "Truncated Back-propagation for Bilevel Optimization", AISTATS 2019.

    Args:
        last: T, the number of steps to differentiate; all of them if T >= K.
        within: The adjoint of those steps.
    """

    last: int
    within: Adjoint = Unroll()

    def __post_init__(self) -> None:
        """Check `last`."""
        _require_positive("last", self.last)

    def __call__(self, step: Step, state: Any, hyper: tuple[Tensor, ...], items: Items) -> Result:
        """Run K - T steps without a graph, then hand over to `within`."""
        cut = len(items) - self.last
        if cut <= 0:
            return self.within(step, state, hyper, items)
        if any_requires_grad(state):
            raise ValueError(
                f"no gradient reaches the initial parameters through a truncated rollout; got last={self.last} of "
                f"{len(items)} steps and initial parameters that require grad. Use `copy_initial_weights=True` (or "
                "detach them), or an adjoint that differentiates all steps."
            )
        with torch.no_grad():
            state, first = Unroll()(step, state, hyper, items[:cut])
        state, rest = self.within(step, detach(state), hyper, items[cut:])
        return state, first + rest


@dataclasses.dataclass(frozen=True)
class Checkpointed:
    r"""Store few states on the way forward, and replay from them on the way back: exact, for long K.

    By default states are stored at about 2 sqrt(K) places and each segment between them is replayed once, so that a
    hypergradient costs 2 K steps. A state is dropped once its segment was replayed; so segments are long at the start
    (0.95 sqrt(K) steps) and short at the end, and at no time is there more than 2.1 sqrt(K) states need. With `slots`
    = s at most s states (the initial one included) and one graph are alive; the reversal is binomial and evaluates as
    few steps again as can be,

    .. math:: t(K, s) = r K - \binom{s + r}{r - 1}, \quad r = \min \{ r : \binom{s + r}{r} \ge K \}.

    The global random state (dropout) and autocast are restored in a replay; a `torch.Generator` of one's own, `random`
    and numpy are not. With ``create_graph=True`` the whole loop is replayed on the tape: the memory of `Unroll`.

    Reference: Griewank & Walther, "Algorithm 799: revolve", ACM TOMS 26, 2000.

    Args:
        every: The length of a segment, if all are to be equal.
        slots: How many states may be stored at once; excludes `every`.
        offload: "cpu" stores the states in the host's (pinned) memory; they are copied without waiting for them. On the
            CPU they are there anyway.
        check: Whether every replayed state is compared with the first one to the bit, which takes a sum over the state
            in every step. By default the losses and the states that are stored anyway are compared, up to rounding.
    """

    every: int | None = None
    slots: int | None = None
    offload: str | None = None
    check: bool = False

    def __post_init__(self) -> None:
        """Check the options."""
        if self.every is not None and self.slots is not None:
            raise ValueError(
                f"`every` and `slots` exclude each other; got every={self.every}, slots={self.slots}. Give one of them."
            )
        if self.offload not in (None, "cpu"):
            raise ValueError(f'`offload` must be None or "cpu"; got {self.offload!r}. Other places are not supported.')
        for name in ("every", "slots"):
            if getattr(self, name) is not None:
                _require_positive(name, getattr(self, name))

    def __call__(self, step: Step, state: Any, hyper: tuple[Tensor, ...], items: Items) -> Result:
        """Run the loop inside one autograd function."""
        if not any_requires_grad((state, hyper)):
            with torch.no_grad():
                return Unroll()(step, state, hyper, items)
        steps = len(items)
        if isinstance(step, CompiledStep):
            items = step.units(items)
        starts: Sequence[int] | None = None
        if self.every is not None:
            starts = range(0, len(items), max(1, self.every * len(items) // steps))
        elif self.slots is None:
            # Each segment costs a stored state, and each of its steps a graph, of two or three times the size of a
            # state (0.75 against 0.33 MiB in an MLP).
            starts = segments(len(items), 2.25)
        return _replayed(
            step, state, hyper, items, starts=starts, slots=self.slots or 0, offload=self.offload == "cpu",
            check=self.check,
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class ForwardMode:
    r"""Carry the derivatives along with the state: exact, any K, and a cost that grows with the number P of scalars.

    .. math:: \dot y_{k+1} = \partial_y S \, \dot y_k + \partial_x S

    Not recommended for more than a few upper variables: each step costs P tangents, and P copies of the state are kept.
    The tangents of a step share its primal evaluation.

    Reference: Franceschi et al., "Forward and Reverse Gradient-Based Hyperparameter Optimization", ICML 2017.

    Args:
        limit: The largest number P of scalars that require grad; more is an error.
    """

    limit: int = 256

    def __call__(self, step: Step, state: Any, hyper: tuple[Tensor, ...], items: Items) -> Result:
        """Run the loop with its tangents, then attach them to the last state."""
        if not any_requires_grad((state, hyper)):
            with torch.no_grad():
                return Unroll()(step, state, hyper, items)
        given = [*tensors(state), *hyper]
        inputs = [t for t in given if t.requires_grad]
        size = sum(map(scalars, inputs))
        if size > self.limit:
            raise ValueError(
                f"`ForwardMode` carries one tangent per scalar that requires grad and takes at most {self.limit}; "
                f"got {size}. Use `Checkpointed()`, or raise `limit=` if the memory suffices."
            )
        flows, count, records = identity(given, size), len(given) - len(hyper), []
        for item in step.units(items) if isinstance(step, CompiledStep) else items:
            state, record, moved = _push(step, state, hyper, item, flows)
            flows = moved + flows[count:]
            records.append(record)
        last: tuple[Tensor, ...] = Attached.apply(  # type: ignore[no-untyped-call]
            tensors(state), flows[:count], *inputs
        )
        return replace_tensors(state, last), records


def _push(
    step: Step, state: Any, hyper: tuple[Tensor, ...], item: Any, flows: list[Tensor | None]
) -> tuple[Any, Any, list[Tensor | None]]:
    """Take a step with the tangents of state and hyper; return state, record, and the tangents of the new state."""
    if isinstance(step, CompiledStep) and step.inspected:
        pushed = step.push(state, hyper, item, flows)
        if pushed is not None:
            return pushed
    with torch.enable_grad():
        inputs = fresh([*tensors(state), *hyper])
        count = len(inputs) - len(hyper)
        after, record = step(replace_tensors(state, inputs[:count]), tuple(inputs[count:]), item)
    refuse_captured(tensors(after), inputs)
    autograd_graph.refuse_once_differentiable(tensors(after))
    if isinstance(step, CompiledStep):
        step.inspected = True
    return detach(after), record, push(tensors(after), inputs, flows)


def _replayed(
    step: Step,
    state: Any,
    hyper: tuple[Tensor, ...],
    items: Items,
    *,
    starts: Sequence[int] | None,
    slots: int = 0,
    **options: Any,
) -> Result:
    replay = Replay(step, state, hyper, items, starts=starts, slots=slots, **options)
    leaves: tuple[Tensor, ...] = Replayed.apply(replay, *tensors(state), *hyper)  # type: ignore[no-untyped-call]
    return replace_tensors(replay.last, leaves), replay.records


def _require_positive(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"`{name}` must be a whole number of at least 1; got {value!r}. Count steps from 1.")
