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

import functools
import itertools
import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .._adjoints.base import Cotangents, Step, Tape, changed_in_place, fresh, pull_back
from .._adjoints.tangents import Tangents, push_forward
from .._context.environment import Ambient
from .._step.aggregation import at_step, is_zero
from .._step.step import BDAStep
from .._support.checks import user_level
from .._support.tensors import is_differentiable, layout
from .._support.torch_private import forward_gradients
from .._support.tree import detach, replace_tensors, tensors
from .._support.types import Item, Record
from .cache import engine_of
from .failure import reason
from .mixed_mode import add, pull_mixed
from .program import Function, Pair, agree, build, build_pair, trace
from .units import Form, Unit, Units, is_number

_SMALL = 20_000
"""Up to so many numbers in the state several steps share one call: the call costs more than a step then."""

_LARGE = 100_000
"""Where a batch has a tensor of more numbers than this, a step takes longer than its call."""

_MOST_STEPS, _MOST_OPERATIONS = 10, 500
"""How many steps share a call at most, and about how many operations; compilation takes longer than in proportion."""

_FEW = 100
"""Steps with more operations than this have a call of their own."""

_MOST_MISSES = 3  # pull-backs in a row that lacked a cotangent, as buffers do: then nothing is saved for them

_MOST_PROGRAMS = 16
"""So many layouts of batches are compiled for one problem before it runs uncompiled."""


class CompiledStep(Step):
    """A step that takes units of one or more items; compiled without a graph, uncompiled with one."""

    single = False

    def __init__(self, step: BDAStep, state: Any, hyper: Sequence[Tensor], mode: str = "auto") -> None:
        """Find the engine of the problem, which earlier rollouts may have left; `state` and `hyper` are examples."""
        super().__init__(step)
        self._step = step
        self._state = detach(state)
        self._hyper = hyper
        self._mode = mode
        self._engine, self._captured = engine_of(step, mode)
        settings = step.update.settings(hyper, 1)
        self._plain = [[name for name in ("lr", "upper_lr") if is_number(s[name])] for s in settings]
        self._device = next((t.device for t in hyper if t.dim()), None)

    def first_order(self) -> CompiledStep:
        """Return the same step with the gradients of both losses treated as constants."""
        return CompiledStep(self._step.first_order(), self._state, self._hyper, self._mode)

    @property
    def taped(self) -> bool:  # type: ignore[override]
        """Whether autograd records the steps, because they run uncompiled."""
        return self._engine.broken is not None

    def units(self, items: Sequence[Item]) -> Sequence[Unit]:
        """Divide items into units; what is left over goes one by one."""
        rows = []
        modes = []
        groups = [group.settings.fill(self._hyper) for group in self._step.update.groups]
        first = getattr(items, "first_k", 1)  # the items themselves are read later, each once
        for k in range(first, first + len(items)):
            settings = [at_step(group, k) for group in groups]
            weights = [chosen["alpha"] for chosen in settings]
            rates = [float(s[name]) for s, names in zip(settings, self._plain, strict=True) for name in names]
            modes.append(tuple("0" if is_zero(w) else "number" if is_number(w) else "tensor" for w in weights))
            rows.append([float(k), *rates, *(float(w) if is_number(w) else 0.0 for w in weights)])
        table = torch.tensor(rows, dtype=torch.float64, device=self._device)
        units = Units(items, table, modes)
        if self._engine.size is None:
            self._engine.size = self._steps_per_call(units.between(0, 1), len(items))
        return units.divided(self._engine.size)

    def _steps_per_call(self, unit: Unit, steps: int) -> int:
        """Return how many steps should share a call, from the operations that one has: a divisor of K, if possible."""
        if sum(t.numel() for t in tensors(self._state)) > _SMALL:
            return 1
        flat = [t.detach() for t in (*tensors(self._state), *self._hyper, *unit.form.tensors, unit.rows)]
        if max(t.numel() for t in (*flat, *self._captured)) > _LARGE:
            return 1
        try:
            with self._engine.compiling():
                graph, _ = trace(self._sweep(unit.form, self._state, self._hyper), flat)
        except Exception:  # it will be met again, and reported, when the step is compiled
            return 1
        operations = sum(node.op == "call_function" for node in graph.graph.nodes)
        most = max(1, min(_MOST_STEPS, _MOST_OPERATIONS // operations)) if operations <= _FEW else 1
        return next((size for size in range(most, most // 2, -1) if steps % size == 0), most)

    def __call__(self, state: Any, hyper: Sequence[Tensor], unit: Unit) -> tuple[Any, list[Record]]:
        """Take the steps of a unit."""
        if not torch.is_grad_enabled() and not self._engine.broken:
            result = self._run("sweep", unit, state, hyper, [])
            if result is not None:
                count = len(result) - 2 * len(unit.items)
                return replace_tensors(state, result[:count]), _records(result[count:])
        records = []
        for item in unit.items:
            state, record = self._step(state, hyper, item)
            records.append(record)
        return state, records

    def record(self, state: Any, hyper: Sequence[Tensor], unit: Unit) -> tuple[Any, list[Record], Any]:
        """Take the steps of a unit; return also what `pull` needs of their work, or None."""
        if self._engine.broken:
            return self.tape(state, hyper, unit)
        self._inspect(state, hyper, unit)
        pair, flat = self._pair(state, hyper, unit)
        if pair is None or pair.misses > _MOST_MISSES:
            return *self(state, hyper, unit), None
        result = pair.ahead(flat, self._captured)
        count = len(tensors(state))
        end = count + 2 * len(unit.items)
        saved = (pair, flat, result[end:], pair.versions(self._captured))
        return replace_tensors(state, result[:count]), _records(result[count:end]), saved

    def _inspect(self, state: Any, hyper: Sequence[Tensor], unit: Unit) -> None:
        """Record the first unit of a problem uncompiled, to see what its steps depend on."""
        if not self._engine.inspected:
            ambient = Ambient(tensors(state))
            rng = ambient.rng()
            self.tape(state, hyper, unit)
            ambient.set_rng(rng)
            self._engine.inspected = True

    def pull(
        self, state: Any, hyper: Sequence[Tensor], unit: Unit, cotangents: Cotangents, saved: Any = None
    ) -> Cotangents:
        """Pull cotangents of the state after a unit back to the state before it and to hyper."""
        if saved is not None and not isinstance(saved, Tape):
            pair, flat, kept, versions = saved
            for (tensor, now), (_, then) in zip(pair.versions(self._captured), versions, strict=True):
                if now != then:
                    raise RuntimeError(changed_in_place("a tensor from the closure of a loss", tensor))
            pairs = zip(cotangents, tensors(state), strict=True)
            given = [c for c, t in pairs if c is not None and is_differentiable(t)]
            missing = sum(map(is_differentiable, tensors(state))) - len(given)
            pair.misses = pair.misses + 1 if missing else 0
            if not missing:  # else zeros would do, but for derivatives that are infinite
                pulled: Cotangents = pair.back([*flat, *kept, *(c.contiguous() for c in given)], self._captured)
                return pulled
        if not self._engine.broken:
            result = self._run("pull", unit, state, hyper, cotangents)
            if result is not None:
                return result
        return super().pull(state, hyper, unit, cotangents, saved)

    def push(
        self, state: Any, hyper: Sequence[Tensor], unit: Unit, tangents: Tangents
    ) -> tuple[Any, list[Record], Tangents]:
        """Take the steps of a unit with the tangents of state and hyper."""
        inspected = self._engine.inspected and not self._engine.broken
        result = self._run("push", unit, state, hyper, tangents) if inspected else None
        if result is None:
            self._engine.inspected = True  # by `tape`, which raises otherwise
            return super().push(state, hyper, unit, tangents)
        count = len(tensors(state))
        end = count + 2 * len(unit.items)
        return replace_tensors(state, result[:count]), _records(result[count:end]), result[end:]

    def _pair(self, state: Any, hyper: Sequence[Tensor], unit: Unit) -> tuple[Pair | None, list[Tensor]]:
        """Return a program of the steps and its pull-back, and the inputs; None if they cannot be compiled together."""
        if self._engine.broken:
            return None, []
        form, wanted, start = unit.form, [h.requires_grad for h in hyper], tensors(state)
        flat = [t.detach() for t in (*start, *hyper, *form.tensors, unit.rows)]
        key = (self._number(form), tuple(map(layout, flat)), tuple(wanted))
        if key not in self._engine.pairs:
            if len(self._engine.pairs) >= _MOST_PROGRAMS:
                self._without(f"more than {_MOST_PROGRAMS} layouts of batches or states were met")
                return None, []
            where = [is_differentiable(t) for t in start]
            before, generator = torch.get_rng_state(), torch.Generator().manual_seed(0)
            try:
                tangents = [
                    torch.randn(t.shape, dtype=t.dtype, generator=generator, device="cpu").to(t.device)
                    for t, there in zip(start, where, strict=True)
                    if there
                ]
                # This runs inside of an autograd function, which disables forward mode.
                with self._engine.compiling(), forward_gradients(True):
                    mixed = self._is_mixed(form, state, wanted, where, [*flat, *tangents])
                    joint = self._pull(form, state, wanted, where, mixed=mixed, whole=True)
                    first = len(start) + 2 * len(unit.items)
                    self._engine.pairs[key] = build_pair(
                        joint, flat, tangents, first, self._captured, self._engine.choices
                    )
            except Exception:  # the two programs are tried one by one then, and what is wrong is reported
                self._engine.pairs[key] = None
            finally:
                torch.set_rng_state(before)
        return self._engine.pairs[key], flat

    def _number(self, form: Form) -> int:
        """Return a short name for the form of a unit's batches: it is hashed in every call."""
        if form.number is None:
            form.number = self._engine.forms.setdefault(form.key, len(self._engine.forms))
        return form.number

    def _run(
        self, kind: str, unit: Unit, state: Any, hyper: Sequence[Tensor], cotangents: Cotangents
    ) -> list[Any] | None:
        """Run a program, compiling it if it is new; None if that cannot be done."""
        form = unit.form
        wanted, where = [h.requires_grad for h in hyper], [c is not None for c in cotangents]
        given = [c.contiguous() for c in cotangents if c is not None]
        flat = [t.detach() for t in (*tensors(state), *hyper, *form.tensors, unit.rows, *given)]
        key = (kind, self._number(form), tuple(map(layout, flat)), tuple(wanted), tuple(where))
        program = self._engine.programs.get(key)
        if program is not None:
            return program(flat, self._captured)
        if len(self._engine.programs) >= _MOST_PROGRAMS:
            return self._without(f"more than {_MOST_PROGRAMS} layouts of batches or states were met")
        try:
            with self._engine.compiling():
                function = self._of_kind(kind, form, state, hyper, wanted, where, flat)
                program, want = build(function, flat, self._captured, self._engine.choices)
            result = program(flat, self._captured)
            same = agree(result, want)
        except Exception as error:  # whatever the compiler stumbled over, the uncompiled step is right
            return self._without(f"the step could not be compiled ({reason(error)})")
        if not same:
            return self._without("the compiled step gives other numbers than the uncompiled one")
        self._engine.programs[key] = program
        return result

    def _of_kind(
        self,
        kind: str,
        form: Form,
        state: Any,
        hyper: Sequence[Tensor],
        wanted: Sequence[bool],
        where: Sequence[bool],
        flat: Sequence[Tensor],
    ) -> Function:
        """Return what a program of a kind computes."""
        if kind == "sweep":
            return self._sweep(form, state, hyper)
        if kind == "push":
            return self._push(form, state, len(hyper), where)
        return self._pull(form, state, wanted, where, mixed=self._is_mixed(form, state, wanted, where, flat))

    def _sweep(self, form: Form, state: Any, hyper: Sequence[Tensor]) -> Function:
        """Return the steps of a unit as a function of flat tensors."""
        count = len(tensors(state))

        def sweep(*flat: Tensor) -> list[Tensor | None]:
            with torch.no_grad():
                rest = flat[count + len(hyper) :]
                now, records = self._apply(form, replace_tensors(state, flat[:count]), flat[count:][: len(hyper)], rest)
            return [*tensors(now), *itertools.chain.from_iterable(records)]

        return sweep

    def _pull(
        self,
        form: Form,
        state: Any,
        wanted: Sequence[bool],
        where: Sequence[bool],
        *,
        mixed: bool,
        whole: bool = False,
    ) -> Function:
        """Return their vector-Jacobian product as a function of flat tensors; `whole`: after what `_sweep` returns."""
        count, ends = len(tensors(state)), sum(where)

        def pull(*flat: Tensor) -> list[Tensor | None]:
            given = iter(flat[len(flat) - ends :])
            cotangents = [next(given) if present else None for present in where]
            leaves = fresh(flat[:count])
            hyper = [h.detach().requires_grad_(w) for h, w in zip(flat[count:], wanted, strict=False)]
            rest = flat[count + len(hyper) : len(flat) - ends]
            start = replace_tensors(state, leaves)
            if mixed:
                known = self._sweep(form, state, hyper)(*flat[: len(flat) - ends]) if whole else []
                return known + self._pull_mixed(form, detach(start), hyper, rest, cotangents)
            with torch.enable_grad():
                now, records = self._apply(form, start, hyper, rest)
            known = [*detach(tensors(now)), *detach(list(itertools.chain.from_iterable(records)))] if whole else []
            return known + pull_back(tensors(now), [*leaves, *hyper], cotangents)

        return pull

    def _push(self, form: Form, state: Any, inputs: int, where: Sequence[bool]) -> Function:
        """Return the steps of a unit, with their tangents, as a function of flat tensors."""
        count, ends = len(tensors(state)), sum(where)

        def pushed(*flat: Tensor) -> list[Tensor | None]:
            given = iter(flat[len(flat) - ends :])
            tangents: Tangents = [next(given) if present else None for present in where]
            fixed, rest = fresh(flat[count : count + inputs]), flat[count + inputs : len(flat) - ends]
            leaves: Sequence[Tensor] = flat[:count]
            records: list[Record] = []
            for item, resolve in self._resolved(form, rest):
                before = fresh(leaves)
                with torch.enable_grad():
                    now, record = self._step.apply(replace_tensors(state, before), fixed, item, resolve(fixed))
                leaves = tensors(now)
                tangents = push_forward(leaves, [*before, *fixed], tangents) + tangents[count:]
                records.append(record)
            return [*map(Tensor.detach, leaves), *itertools.chain.from_iterable(records), *tangents[:count]]

        return pushed

    def _apply(self, form: Form, state: Any, hyper: Sequence[Tensor], rest: Sequence[Tensor]) -> Any:
        """Take the steps of a unit; `rest` are the tensors of its batches, and its rows."""
        records = []
        for item, resolve in self._resolved(form, rest):
            state, record = self._step.apply(state, hyper, item, resolve(hyper))
            records.append(record)
        return state, records

    def _pull_mixed(
        self, form: Form, state: Any, hyper: Sequence[Tensor], rest: Sequence[Tensor], cotangents: Cotangents
    ) -> list[Tensor | None]:
        """Pull cotangents back through the steps of a unit, each in mixed mode."""
        way: list[Any] = []
        total: list[Tensor | None] = [None] * len(hyper)
        for item, resolve in self._resolved(form, rest):
            way.append((state, item, resolve))
            if len(way) < len(form.modes):
                with torch.no_grad():
                    state, _ = self._step.apply(state, hyper, item, resolve(hyper))
        for state, item, resolve in reversed(way):
            found = pull_mixed(self._step, state, hyper, item, resolve, cotangents)
            count = len(found) - len(hyper)
            cotangents = found[:count]
            total = add(total, found[count:])
        return [*cotangents, *total]

    def _resolved(self, form: Form, rest: Sequence[Tensor]) -> Iterator[tuple[Item, Callable[..., Any]]]:
        """Yield each item, and what gives its settings and weights, with all that may change as tensors."""
        *batches, rows = rest
        for batch, modes, row in zip(form.filled(batches), form.modes, rows.unbind(0), strict=True):
            yield Item(row[0], batch), functools.partial(self._settings, modes, row)  # type: ignore[arg-type]

    def _settings(self, modes: tuple[str, ...], row: Tensor, hyper: Sequence[Tensor]) -> list[Any]:
        """Return the settings of a step, with its row of numbers in the place of rates and weights."""
        k, *numbers = row.unbind(0)
        source = iter(numbers)
        settings = [dict(group.settings.fill(hyper)) for group in self._step.update.groups]
        for chosen, names in zip(settings, self._plain, strict=True):
            chosen.update({name: next(source) for name in names})
        for chosen, mode, number in zip(settings, modes, source, strict=True):
            if mode != "tensor":
                chosen["alpha"] = 0.0 if mode == "0" else number
        return [at_step(chosen, k) for chosen in settings]

    def _is_mixed(
        self, form: Form, state: Any, wanted: Sequence[bool], where: Sequence[bool], flat: Sequence[Tensor]
    ) -> bool:
        """Whether the adjoint is taken in mixed mode: as asked for, or as a measurement of both says."""
        if self._engine.mode is None:
            pulls = {
                mode: self._pull(form, state, wanted, where, mixed=mode == "mixed") for mode in ("reverse", "mixed")
            }
            before = torch.get_rng_state()
            pulls["reverse"](*flat)
            draws = not torch.equal(before, torch.get_rng_state())
            torch.set_rng_state(before)
            if draws and self._mode == "mixed":
                warnings.warn(
                    'compile="mixed" evaluates a loss twice, and this one draws random numbers; it runs in '
                    '"reverse" mode instead.',
                    stacklevel=user_level(),
                )
            self._engine.mode = "reverse" if draws else self._mode if self._mode != "auto" else _faster(pulls, flat)
        return self._engine.mode == "mixed"

    def _without(self, reason: str) -> list[Any] | None:
        """Run this problem uncompiled from now on, and say so."""
        self._engine.broken = reason
        warnings.warn(f"compile=True: {reason}; this problem runs uncompiled from now on.", stacklevel=user_level())
        return None


def _records(losses: Sequence[Any]) -> list[Record]:
    """Return the records of lower and upper losses in turns."""
    return [Record(*pair) for pair in zip(losses[::2], losses[1::2], strict=True)]


def _faster(functions: dict[str, Function], inputs: Sequence[Tensor]) -> str:
    """Measure functions, uncompiled, and return the name of the fastest."""
    times = dict.fromkeys(functions, math.inf)
    for name in (*functions, *functions, *functions):
        start = time.perf_counter()
        try:
            functions[name](*inputs)
        except (RuntimeError, NotImplementedError):  # not every operation has a forward derivative
            continue
        times[name] = min(times[name], time.perf_counter() - start)
    return min(times, key=lambda name: times[name])
