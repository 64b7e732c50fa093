"""The compiled engine: step and adjoint as two pure functions of tensors, each traced and compiled once.

The step of the core is traced into a graph of tensor operations, gradients included, and that graph is compiled; the
same is done with its vector-Jacobian product. Rates, weights and counts enter as tensors, so neither k nor a scheduler
recompiles anything. Several steps go into one call where a call's overhead would dominate. The first result of each
program is compared with the uncompiled one; where they differ, or where something cannot be traced, the step runs
uncompiled, after a warning.

A trace holds as long as the losses are functions of their arguments, of their closures and of the module: what they
read elsewhere (a counter, `random`) is read once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._adjoints.base import Cotangents, Step, changed_in_place
from .._adjoints.tangents import Tangents
from .._context.devices import accelerators, sent
from .._context.environment import Ambient
from .._step.aggregation import at_step, is_zero
from .._step.step import BDAStep
from .._support.tensors import any_requires_grad, is_differentiable
from .._support.torch_private import version_of
from .._support.tree import detach, replace_tensors, tensors
from .._support.types import Item, Settings
from .cache import engine_of
from .functions import Functions
from .program import Pair
from .programs import Programs
from .records import Losses, losses_of
from .units import Part, Table, Unit, Units, is_number, made_of

_MOST_MISSES = 3
"""After so many pull-backs in a row in which zeros for missing cotangents gave infinite numbers, none are put in."""


_MOST_TABLES = 8
"""The maximum number of tables kept for one problem, as K or the rates change."""


class _Link(NamedTuple):
    """A compiled call, kept for its pull-back: its programs, its inputs, and what it saved."""

    pair: Pair
    inputs: list[Tensor]
    saved: list[Tensor]


class _Chain(NamedTuple):
    """The calls of a unit, and the tensors of closures that they read, with their versions."""

    links: list[_Link]
    versions: list[tuple[Tensor, int]]


class CompiledStep(Step):
    """A step that takes units of one or more items; compiled without a graph, uncompiled with one.

    A problem has two programs: several steps, which also give what their pull-back needs, and that pull-back. A unit
    is a chain of calls of them. What is left over after all whole calls runs uncompiled.
    """

    single = False

    def __init__(self, step: BDAStep, state: Any, hyper: Sequence[Tensor]) -> None:
        """Find the engine of the problem, which earlier rollouts may have left; `state` and `hyper` are examples."""
        super().__init__(step)
        self._step = step
        self._differentiated = any_requires_grad((state, hyper))
        self._state = detach(state)
        self._where = [is_differentiable(t) for t in tensors(state)]
        self._hyper = hyper
        self._wanted = tuple(h.requires_grad for h in hyper)
        self._engine, self._captured = engine_of(step, accelerators(tensors(state)))
        self._functions = Functions(step, self._state, hyper)
        self._programs = Programs(step, self._functions, self._engine, self._captured, self._where, self._wanted)
        self._device = tensors(state)[0].device

    def first_order(self) -> CompiledStep:
        """Return the same step with the gradients of both losses treated as constants."""
        other = CompiledStep(self._step.first_order(), self._state, self._hyper)
        other._differentiated = self._differentiated
        return other

    @property
    def taped(self) -> bool:  # type: ignore[override]
        """Whether autograd records the steps, because they run uncompiled."""
        return self._engine.broken is not None

    # Units.

    def units(self, items: Sequence[Item], *, joined: bool = False) -> Sequence[Unit]:
        """Divide items into units: one for each call, or one for all calls."""
        engine = self._engine
        engine.pulled |= joined  # by `Unroll`: these steps are recorded, or `Truncated` records those that follow
        joined = joined and not engine.exact
        table = self._table(items)
        if engine.most is None:
            part = Units(items, table).part(0, 1)
            engine.most = self._programs.most_steps(part, tensors(self._state), self._hyper)
        size = engine.steps_per_call(len(items))
        if getattr(items, "has_batches", True):
            return Units(items, table).divided(size, joined=joined)
        if (size, joined) not in table.plans:
            bare = [Item(item.k) for item in items]  # a plan must not hold what belongs to a rollout
            table.plans[size, joined] = Units(bare, table).divided(size, joined=joined)
        return table.plans[size, joined]

    def _table(self, items: Sequence[Item]) -> Table:
        """Return the numbers of each step: those of an earlier rollout, if they are the same."""
        groups = [group.settings.fill(self._hyper) for group in self._step.update.groups]
        first = getattr(items, "first_k", 1)  # the items themselves are read later, each once
        columns = tuple(map(made_of, groups))
        key = (first, len(items), self._device, columns)
        known = self._engine.tables
        if None not in columns and key in known:
            return known[key]
        table = Table(*self._rows(groups, range(first, first + len(items))))
        if None not in columns:
            while len(known) >= _MOST_TABLES:
                del known[next(iter(known))]
            known[key] = table
        return table

    def _rows(self, groups: Sequence[Settings], steps: range) -> tuple[Tensor, list[tuple[str, ...]]]:
        rows = []
        modes = []
        for k in steps:
            settings = [at_step(group, k) for group in groups]
            weights = [chosen["alpha"] for chosen in settings]
            rates = [float(s[name]) for s, names in zip(settings, self._functions.plain, strict=True) for name in names]
            modes.append(tuple("0" if is_zero(w) else "number" if is_number(w) else "tensor" for w in weights))
            rows.append([float(k), *rates, *(float(w) if is_number(w) else 0.0 for w in weights)])
        return sent(torch.tensor(rows, dtype=torch.float64, device="cpu"), self._device), modes

    # What adjoints call.

    def __call__(self, state: Any, hyper: Sequence[Tensor], unit: Unit) -> tuple[Any, list[Losses]]:
        """Take the steps of a unit."""
        if torch.is_grad_enabled() or self._engine.broken or not unit.plan.compiled:
            return self._uncompiled(state, hyper, unit.plan.parts)
        values, losses, _ = self._forward(state, hyper, unit, keep=False)
        return replace_tensors(state, values), losses

    def record(self, state: Any, hyper: Sequence[Tensor], unit: Unit) -> tuple[Any, list[Losses], Any]:
        """Take the steps of a unit; return also what `pull` needs of their work, or None."""
        if self._engine.broken or not unit.plan.compiled:
            return self.tape(state, hyper, unit)
        self._inspect(state, hyper, unit)
        self._engine.pulled = True
        values, losses, chain = self._forward(state, hyper, unit, keep=True)
        return replace_tensors(state, values), losses, chain

    def _inspect(self, state: Any, hyper: Sequence[Tensor], unit: Unit) -> None:
        """Record the first step of a problem uncompiled, to see what it depends on."""
        if not self._engine.inspected:
            ambient = Ambient(tensors(state))
            rng = ambient.rng()
            self.tape(state, hyper, unit.first())
            ambient.set_rng(rng)
            self._engine.inspected = True

    def pull(
        self, state: Any, hyper: Sequence[Tensor], unit: Unit, cotangents: Cotangents, saved: Any = None
    ) -> Cotangents:
        """Pull cotangents of the state after a unit back to the state before it and to hyper."""
        pulled: Cotangents | None = None
        if isinstance(saved, _Chain) and saved.links:
            pulled = self._backward(saved, cotangents)
        elif saved is None and unit.plan.compiled and len(unit.plan.parts) == 1 and not self._engine.broken:
            pulled = self._programs.run("pull", unit.plan.parts[0], tensors(state), hyper, cotangents)
        return super().pull(state, hyper, unit, cotangents, saved) if pulled is None else pulled

    def pull_saved(self, saved: Any, cotangents: Cotangents) -> Cotangents | None:
        """Pull cotangents back by compiled calls alone; None where user code would have to run."""
        return self._backward(saved, cotangents) if isinstance(saved, _Chain) and saved.links else None

    @property
    def draws(self) -> bool:  # type: ignore[override]
        """Whether the steps draw random numbers, as far as is known."""
        return self._engine.draws

    def push(
        self, state: Any, hyper: Sequence[Tensor], unit: Unit, tangents: Tangents
    ) -> tuple[Any, list[Losses], Tangents]:
        """Take the steps of a unit with the tangents of state and hyper."""
        result = None
        if self._engine.inspected and unit.plan.compiled and not self._engine.broken:
            (part,) = unit.plan.parts
            result = self._programs.run("push", part, tensors(state), hyper, tangents)
        if result is None:
            self._engine.inspected = True  # by `tape`, which raises otherwise
            return super().push(state, hyper, unit, tangents)
        count = len(self._where)
        return replace_tensors(state, result[:count]), [_losses(part, result, count)], result[count + 2 :]

    def _uncompiled(self, state: Any, hyper: Sequence[Tensor], parts: Sequence[Part]) -> tuple[Any, list[Losses]]:
        losses = []
        for part in parts:
            records = []
            for item in part.items:
                state, record = self._step(state, hyper, item)
                records.append(record)
            losses.append(losses_of(records))
        return state, losses

    # Chains of calls.

    def _forward(
        self, state: Any, hyper: Sequence[Tensor], unit: Unit, *, keep: bool
    ) -> tuple[list[Tensor], list[Losses], _Chain | None]:
        """Take the steps of a unit; return the tensors of the new state, the losses, and the calls if all are kept."""
        values = [t.detach() for t in tensors(state)]
        fixed = [h.detach() for h in hyper]
        count = len(values)
        losses: list[Losses] = []
        chain = _Chain([], []) if keep else None
        paired = self._differentiated and self._engine.pulled
        pair = known = None
        for part in unit.plan.parts:
            number = self._programs.number(part.form)
            if pair is None or not pair.steady or number != known:
                pair = self._programs.pair(part, values, fixed) if paired else None
                known = number
                extra = [] if pair is None else pair.ahead.extra(self._captured)
                if pair is not None and chain is not None:
                    chain.versions.extend(pair.versions(self._captured))
            if pair is None:
                values, more = self._advance(part, values, hyper)
                losses += more
                chain = None
                continue
            inputs = [*values, *fixed, *part.form.tensors, part.rows]
            outputs = pair.ahead(inputs, extra)
            values = outputs[:count]
            losses.append(_losses(part, outputs, count))
            if chain is not None:
                chain.links.append(_Link(pair, inputs, outputs[count + 2 :]))
        return values, losses, chain

    def _advance(self, part: Part, values: list[Tensor], hyper: Sequence[Tensor]) -> tuple[list[Tensor], list[Losses]]:
        """Take the steps of a part whose pull-back is not compiled with it; return new values, and the losses."""
        result = None if self._engine.broken else self._programs.run("sweep", part, values, hyper, [])
        if result is not None:
            return result[: len(values)], [_losses(part, result, len(values))]
        state, losses = self._uncompiled(replace_tensors(self._state, values), hyper, [part])
        return tensors(state), losses

    def _backward(self, chain: _Chain, cotangents: Cotangents) -> Cotangents | None:
        """Pull cotangents back through a chain of calls.

        A cotangent that is missing is zero. Zeros in its place give the same result, unless they meet a derivative
        that is infinite; None is returned then.
        """
        for tensor, version in chain.versions:
            if version_of(tensor) != version:
                raise RuntimeError(changed_in_place("a tensor from the closure of a loss", tensor))
        count = len(self._where)
        total: Cotangents = [None] * len(self._wanted)
        replaced = False
        extra: list[Tensor] = []
        last: Pair | None = None
        for pair, inputs, saved in reversed(chain.links):
            if pair is not last:
                last = pair
                extra = pair.back.extra(self._captured)
            given = []
            for value, cotangent, there in zip(inputs, cotangents, self._where, strict=False):
                if there:
                    replaced = replaced or cotangent is None
                    given.append(torch.zeros_like(value) if cotangent is None else cotangent.contiguous())
            pulled = pair.back([*inputs, *saved, *given], extra)
            cotangents = pulled[:count]
            for i, grad in enumerate(pulled[count:]):
                known = total[i]
                total[i] = grad if known is None else known if grad is None else known + grad
        pulled = [*cotangents, *total]
        if replaced and not _are_finite([t for t in pulled if t is not None]):
            self._engine.misses += 1
            self._engine.exact = self._engine.misses > _MOST_MISSES
            chain.links.clear()  # it is of no use
            return None
        self._engine.misses = 0
        return pulled


def _losses(part: Part, outputs: Sequence[Any], first: int) -> Losses:
    """Return the losses of a part among the outputs of its program."""
    return Losses(outputs[first], outputs[first + 1], part.form.evaluated)


def _are_finite(values: Sequence[Tensor]) -> bool:
    """Whether all numbers are finite: one look at the device."""
    return not values or bool(torch.stack([value.isfinite().all() for value in values]).all())
