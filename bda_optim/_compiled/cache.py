"""The compiled programs of each problem, kept from one upper iteration to the next."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch import Tensor

from .._step.step import BDAStep
from .._support.slots import Filler
from .compiling import Choices, Progress, current, undisturbed
from .program import Pair, Program
from .trace_key import freeze

_MOST_ENGINES = 8
"""So many problems with the same lower loss are kept."""


class Engine:
    """The programs of one problem."""

    def __init__(self, choices: Choices) -> None:
        """Start without any."""
        self.choices, self.progress = choices, Progress(choices)
        self.programs: dict[Hashable, Program] = {}
        self.pairs: dict[Hashable, Pair | None] = {}
        self.forms: dict[Hashable, int] = {}
        self.broken: str | None = None
        self.size: int | None = None
        self.mode: str | None = None
        self.inspected = False

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        """Surround whatever traces, measures or compiles a program."""
        with self.progress.running(), undisturbed():
            yield


_engines: weakref.WeakKeyDictionary[Any, dict[Hashable, Engine]] = weakref.WeakKeyDictionary()


def engine_of(step: BDAStep, mode: str) -> tuple[Engine, list[Tensor]]:
    """Return the engine of a problem, and the tensors that its functions hold."""
    update = step.update
    groups = [(group.members, _without_numbers(group.settings.unfilled())) for group in update.groups]
    parts = (step.lower, step.upper, step.objective, step.hyper, update.rule, groups, update.tasks)
    casts = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]
    choices = current()
    also = (step.constant_gradients, mode, str(casts), str(torch.get_default_dtype()), choices.cpp_wrapper)
    key, captured = freeze((*parts, *also))
    owner = getattr(step.lower, "__func__", step.lower)
    owner = getattr(owner, "__code__", owner)  # a lambda made anew in every upper iteration has the same code
    family = _engines.setdefault(owner, {})
    if key not in family:
        while len(family) >= _MOST_ENGINES:
            del family[next(iter(family))]
        family[key] = Engine(choices)
    return family[key], captured


def _without_numbers(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings without the rates and weights that enter a program as tensors."""
    changing = ("lr", "upper_lr", "alpha")
    free = {n for n in changing if settings[n] is not None and not isinstance(settings[n], Filler | list)}
    return {name: "a number" if name in free else value for name, value in settings.items()}
