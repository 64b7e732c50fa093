"""The programs of a problem: which there are, how they are made, and what is decided by measurement."""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._adjoints.base import Cotangents
from .._context.devices import accelerators, finish
from .._context.environment import Ambient
from .._step.step import BDAStep
from .._support.checks import user_level
from .._support.tensors import layout
from .cache import Engine
from .decisions import Decisions
from .failure import reason
from .functions import Functions
from .program import Function, Pair, agree, build, build_pair, trace
from .units import Form, Part

_MOST_STEPS, _MOST_OPERATIONS = 10, 200
"""How many steps share a call at most, and about how many operations; compilation takes longer than in proportion.

With 500 operations the first call of 32 heads takes 13.5 s instead of 9.8, the next ones as long; those of the
counter-example take 0.95 of the time, and the first 7.1 s instead of 5.9. With one step per call the counter-example
takes 1.5 times as long (`benchmarks/passes.py`).
"""

_SMALL = 20_000
"""With deterministic algorithms steps share calls where no tensor has more numbers than this; nothing is measured."""

_CALL, _OPERATION = 40e-6, 6e-6
"""Seconds that a compiled call takes beside its kernels, and that an uncompiled operation takes beside its own."""

_SHARE = 0.1
"""The largest share of the time that calls should take."""

_MOST_PROGRAMS = 16
"""The maximum number of layouts of batches compiled for one problem; with more it runs uncompiled."""


class Programs:
    """Finds the programs of a problem, and compiles those that are new.

    Args:
        step: The step.
        functions: The step as functions of flat tensors.
        engine: The programs that there are.
        captured: The tensors of closures.
        where: Which tensors of the state can have a cotangent.
        wanted: Which tensors of hyper require grad.
    """

    def __init__(
        self,
        step: BDAStep,
        functions: Functions,
        engine: Engine,
        captured: Sequence[Tensor],
        where: Sequence[bool],
        wanted: tuple[bool, ...],
    ) -> None:
        self._step = step
        self._functions = functions
        self._engine = engine
        self._captured = captured
        self._where = where
        self._wanted = wanted

    def most_steps(self, part: Part, values: Sequence[Tensor], hyper: Sequence[Tensor]) -> int:
        """Return how many steps should share a call, so that calls take a small share of the time."""
        flat = _flat(part, values, hyper)
        sweep = self._functions.sweep(part.form)

        def chosen(*, measured: bool) -> int:
            try:
                with self._engine.compiling():
                    graph, _ = trace(sweep, flat)
            except Exception:  # it will be met again, and reported, when the step is compiled
                return 1
            operations: int = sum(node.op == "call_function" for node in graph.graph.nodes)
            most = max(1, min(_MOST_STEPS, _MOST_OPERATIONS // operations))
            if not measured:
                return most if max(t.numel() for t in (*flat, *self._captured)) <= _SMALL else 1
            # The graph, not the step: `vmap` and autograd take longer than small kernels do.
            with torch.no_grad():
                seconds = max(_seconds(graph, flat) - operations * _OPERATION, 1e-9)
            return max(1, min(most, round(_CALL / (_SHARE * seconds))))

        decisions = self._decisions(part.form, flat)
        return decisions.get("steps", lambda: chosen(measured=True), fixed=lambda: chosen(measured=False))

    def _decisions(self, form: Form, flat: Sequence[Tensor]) -> Decisions:
        """Return the choices of this problem, which a process may have made before."""
        step = self._step
        codes = [getattr(getattr(loss, "__code__", None), "co_code", b"").hex() for loss in (step.lower, step.upper)]
        shapes = [layout(t) for t in (*flat, *self._captured)]
        rule = (step.update.rule.name, step.update.tasks, form.modes, step.constant_gradients)
        limits = (_MOST_STEPS, _MOST_OPERATIONS, _CALL, _OPERATION, _SHARE)
        return Decisions(f"graph {codes} {shapes} {rule} {limits}")

    def pair(self, part: Part, values: Sequence[Tensor], hyper: Sequence[Tensor]) -> Pair | None:
        """Return a program of the steps and its pull-back; None if they are not compiled together."""
        engine = self._engine
        if engine.broken or engine.exact:
            return None
        key = (self.number(part.form), tuple(map(layout, values)), tuple(map(layout, hyper)), self._wanted)
        if key not in engine.pairs:
            if len(engine.pairs) >= _MOST_PROGRAMS:
                self._give_up(f"more than {_MOST_PROGRAMS} layouts of batches or states were met")
                return None
            ambient = Ambient(values)
            before = ambient.rng()
            try:
                with engine.compiling():
                    engine.pairs[key] = self._built_pair(part, values, hyper)
            except Exception:  # the two programs are tried one by one then, and what is wrong is reported
                engine.pairs[key] = None
            finally:
                ambient.set_rng(before)
            pairs = engine.pairs.values()
            engine.exact = engine.exact or None in pairs
            engine.draws = any(pair is None or pair.draws for pair in pairs)
        return engine.pairs[key]

    def _built_pair(self, part: Part, values: Sequence[Tensor], hyper: Sequence[Tensor]) -> Pair | None:
        generator = torch.Generator().manual_seed(0)
        tangents = [
            torch.randn(t.shape, dtype=t.dtype, generator=generator, device="cpu").to(t.device)
            for t, there in zip(values, self._where, strict=True)
            if there
        ]
        flat = _flat(part, values, hyper)
        joint = self._functions.pull(part.form, self._wanted, self._where, whole=True)
        return build_pair(
            joint, flat, tangents, state=len(values), first=len(values) + 2, captured=self._captured,
            choices=self._engine.choices,
        )  # fmt: skip

    def number(self, form: Form) -> int:
        """Return a short name for the form of a part's batches: it is hashed in every call."""
        if form.number is None:
            form.number = self._engine.forms.setdefault(form.key, len(self._engine.forms))
        return form.number

    def run(
        self, kind: str, part: Part, values: Sequence[Tensor], hyper: Sequence[Tensor], cotangents: Cotangents
    ) -> list[Any] | None:
        """Run a program of a kind, compiling it if it is new; None if that cannot be done."""
        engine = self._engine
        where = [c is not None for c in cotangents]
        flat = [*_flat(part, values, hyper), *(c.detach().contiguous() for c in cotangents if c is not None)]
        key = (kind, self.number(part.form), tuple(map(layout, flat)), self._wanted, tuple(where))
        program = engine.programs.get(key)
        if program is not None:
            return program(flat, program.extra(self._captured))
        if len(engine.programs) >= _MOST_PROGRAMS:
            self._give_up(f"more than {_MOST_PROGRAMS} layouts of batches or states were met")
            return None
        ambient = Ambient(flat)
        before = ambient.rng()
        try:
            with engine.compiling():
                function = self._function_of(kind, part.form, where)
                program, want = build(function, flat, self._captured, engine.choices)
            result = program(flat, program.extra(self._captured))
            same = agree(result, want)
        except Exception as error:  # whatever the compiler stumbled over, the uncompiled step is right
            ambient.set_rng(before)
            self._give_up(f"the step could not be compiled ({reason(error)})")
            return None
        if not same:
            ambient.set_rng(before)
            self._give_up("the compiled step gives other numbers than the uncompiled one")
            return None
        engine.programs[key] = program
        return result

    def _function_of(self, kind: str, form: Form, where: Sequence[bool]) -> Function:
        """Return what a program of a kind computes."""
        if kind == "sweep":
            return self._functions.sweep(form)
        if kind == "push":
            return self._functions.push(form, where)
        return self._functions.pull(form, self._wanted, where)

    def _give_up(self, reason: str) -> None:
        """Run this problem uncompiled from now on, and say so."""
        self._engine.broken = reason
        warnings.warn(f"compile=True: {reason}; this problem runs uncompiled from now on.", stacklevel=user_level())


def _flat(part: Part, values: Sequence[Tensor], hyper: Sequence[Tensor]) -> list[Tensor]:
    """Return the arguments of a program, without cotangents."""
    return [t.detach() for t in (*values, *hyper, *part.form.tensors, part.rows)]


def _seconds(function: Function, inputs: Sequence[Tensor], rounds: int = 5) -> float:
    """Return the shortest time of some calls; the random state is as before.

    With one thread the time of this thread counts, whatever else the machine does meanwhile; on a device the time until
    it has done its work.
    """
    devices = accelerators(inputs)
    clock = time.thread_time if torch.get_num_threads() == 1 and not devices else time.perf_counter
    ambient = Ambient(inputs)
    before = ambient.rng()
    times = []
    for _ in range(rounds):
        finish(devices)
        start = clock()
        function(*inputs)
        finish(devices)
        times.append(clock() - start)
        ambient.set_rng(before)
    return min(times)
