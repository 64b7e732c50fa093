"""The compiled programs of each problem, kept from one upper iteration to the next."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .._step.step import BDAStep
from .._support.slots import Filler
from .compiling import Choices, Progress, current, undisturbed
from .program import Pair, Program
from .same import Same, same_as
from .trace_key import freeze
from .units import Table

_MOST_ENGINES = 8
"""The maximum number of problems kept that share a lower loss."""


_MOST_SIZES = 3
"""The maximum number of different steps per call compiled for one problem, as K changes."""

_MOST_MISSES = 16
"""After so many problems of a family in a row that were not met again, no more of them are remembered."""

_LEFT_OVER = 0.25
"""The largest share of K steps that may be left over and run uncompiled, if another number of steps divides K."""


class Engine:
    """The programs of one problem, and what is known of it.

    Attributes:
        choices: How it is compiled.
        programs: Programs of a single kind.
        pairs: Programs of steps and their pull-backs; None where they could not be compiled together.
        forms: A number for each form of batches.
        broken: Why it runs uncompiled, or None.
        most: The maximum number of steps per call.
        sizes: The numbers of steps per call that are in use.
        pulled: Whether there is a backward pass, so that steps are compiled together with their pull-back.
        exact: Whether a cotangent that is missing may not be replaced by zeros.
        misses: How often in a row zeros in its place gave numbers that are not finite.
        inspected: Whether it is known what its steps depend on.
        draws: Whether its steps draw random numbers, as far as is known.
        tables: The numbers of whole rollouts, by what they are made from.
    """

    def __init__(self, choices: Choices) -> None:
        self.choices = choices
        self._progress = Progress(choices)
        self.programs: dict[Hashable, Program] = {}
        self.pairs: dict[Hashable, Pair | None] = {}
        self.forms: dict[Hashable, int] = {}
        self.broken: str | None = None
        self.most: int | None = None
        self.sizes: list[int] = []
        self.pulled = False
        self.exact = False
        self.misses = 0
        self.inspected = False
        self.draws = True
        self.tables: dict[Hashable, Table] = {}

    def steps_per_call(self, steps: int) -> int:
        """Return how many of K steps share a call: a number that is compiled already, or one that divides K."""
        fitting = [size for size in self.sizes if steps % size <= _LEFT_OVER * steps]
        if fitting:
            return min(fitting, key=lambda size: (steps % size, -size))
        if len(self.sizes) >= _MOST_SIZES:
            return max((size for size in self.sizes if size <= steps), default=min(self.sizes))
        most = min(self.most or 1, steps)
        size = next((size for size in range(most, most // 2, -1) if steps % size == 0), most)
        if size not in self.sizes:
            self.sizes.append(size)
        return size

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        """Surround whatever traces, measures or compiles a program."""
        with self._progress.running(), undisturbed():
            yield


_engines: weakref.WeakKeyDictionary[Any, dict[Hashable, Engine]] = weakref.WeakKeyDictionary()


class _Recent:
    """The last problems of a family, so that the next rollout of one finds its engine without a key."""

    def __init__(self) -> None:
        self._entries: list[tuple[Same, Engine, list[weakref.ref[Tensor]]]] = []
        self._misses = 0

    def find(self, problem: Any) -> tuple[Engine, list[Tensor]] | None:
        """Return the engine of a problem that is what it was, and the tensors that its functions hold."""
        for same, engine, references in self._entries:
            if same(problem):
                self._misses = 0
                return engine, [t for reference in references if (t := reference()) is not None]  # all are alive
        return None

    def add(self, problem: Any, engine: Engine, captured: Sequence[Tensor]) -> None:
        """Remember a problem; after many that never came back, as with new data in each closure, none."""
        self._misses += 1
        if self._misses <= _MOST_MISSES:
            self._entries = [(same_as(problem), engine, [weakref.ref(t) for t in captured]), *self._entries][
                :_MOST_ENGINES
            ]


_recent: weakref.WeakKeyDictionary[Any, _Recent] = weakref.WeakKeyDictionary()


def engine_of(step: BDAStep, devices: Sequence[torch.device] = ()) -> tuple[Engine, list[Tensor]]:
    """Return the engine of a step on some devices beside the CPU, and the tensors that its functions hold."""
    update = step.update
    groups = [(group.members, _without_numbers(group.settings.unfilled())) for group in update.groups]
    parts = (step.lower, step.upper, step.objective, step.hyper, update.rule, groups, update.tasks)
    return engine_for(step.lower, (*parts, step.constant_gradients), devices)


def engine_for(loss: Any, parts: tuple[Any, ...], devices: Sequence[torch.device] = ()) -> tuple[Engine, list[Tensor]]:
    """Return the engine of a problem, and the tensors that its functions hold.

    Args:
        loss: A loss of it; the engine is kept as long as its code.
        parts: All that it depends on beside the arguments of its programs.
        devices: Where it runs beside the CPU.
    """
    kinds = ("cpu", "cuda", *(device.type for device in devices))
    casts = tuple((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds)
    choices = current()
    flags = (torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled())
    problem = (*parts, casts, flags, choices.cpp_wrapper)
    owner = getattr(loss, "__func__", loss)
    owner = getattr(owner, "__code__", owner)  # a lambda made anew in every upper iteration has the same code
    family = _engines.setdefault(owner, {})
    if not family:
        _recent[owner] = _Recent()
    found = _recent[owner].find(problem)
    if found is not None:
        return found
    key, captured = freeze(problem)
    if key not in family:
        while len(family) >= _MOST_ENGINES:
            del family[next(iter(family))]
            _recent[owner] = _Recent()
        family[key] = Engine(choices)
    _recent[owner].add(problem, family[key], captured)
    return family[key], captured


def _without_numbers(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings without the rates and weights that enter a program as tensors."""
    changing = ("lr", "upper_lr", "alpha")
    free = {n for n in changing if settings[n] is not None and not isinstance(settings[n], Filler | list)}
    return {name: "a number" if name in free else value for name, value in settings.items()}
