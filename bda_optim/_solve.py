"""What the doors share: from a start and the options of the loop to the last state and the losses."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ._adjoints.base import Adjoint, check_adjoint, differentiates_twice
from ._adjoints.partwise import PartwiseStep
from ._adjoints.unroll import Unroll
from ._compiled.records import JoinedRecords
from ._compiled.step import CompiledStep
from ._compiled.units import with_plain_counts, with_tensor_counts
from ._context.forward import surroundings
from ._rollout.accumulate import Accumulate, check_accumulate, splitter
from ._rollout.divergence import check_choice, watched
from ._rollout.items import Items, in_chunks
from ._rollout.losses import Trace, trace_of
from ._rollout.state import at_home, expand, join
from ._rollout.weights import Weights
from ._step.objective import Loss, ModuleObjective, Objective, check_loss, explained
from ._step.step import BDAStep
from ._step.tasks import TaskMapper, TasksObjective
from ._step.update import Group, Update
from ._support import autograd_graph
from ._support.checks import check_ambient, check_count, check_devices, user_level
from ._support.slots import Slots, Template
from ._support.tensors import refuse_changed
from ._support.torch_private import inside_transform, version_of
from ._support.types import InnerState, Record, Rule

Groups: TypeAlias = Sequence[tuple[tuple[int, ...], Mapping[str, Any]]]
"""Per parameter group: the indices of its members among the flat parameters, and its settings."""


class Start(NamedTuple):
    """Where a rollout starts.

    Attributes:
        objective: Evaluates a loss for one task.
        state: The state before the first step, of one task.
        names: The names of the parameters.
        rule: The rule of all groups.
        groups: The parameter groups.
        hyper: The user's upper variables.
        slots: The tensors of `hyper`, and whatever else is differentiated; settings and batches are added.
        values: The tensors to compute with in the place of the first slots' own; empty for the slots' own.
    """

    objective: Objective
    state: InnerState
    names: Sequence[str]
    rule: Rule
    groups: Groups
    hyper: Template
    slots: Slots
    values: Sequence[Tensor] = ()


@dataclasses.dataclass(frozen=True)
class Loop:
    """How the inner loop runs: the options that `unroll`, `rollout` and `hypergradient` share; see `rollout`."""

    steps: int
    batches: Any = None
    tasks: int | None = None
    adjoint: Adjoint | None = None
    compile: bool | str = False
    chunk_size: int | None = None
    on_divergence: str = "raise"
    accumulate: Accumulate = None

    def __post_init__(self) -> None:
        """Check the options."""
        check_choice(self.on_divergence, self.chunk_size)
        check_adjoint("adjoint", self.adjoint)
        for name in ("steps", "tasks", "chunk_size"):
            if getattr(self, name) is not None or name == "steps":
                object.__setattr__(self, name, check_count(name, getattr(self, name)))
        if self.compile in ("reverse", "mixed"):
            warnings.warn(
                f"compile={self.compile!r} is compile=True: there is one way to compile an adjoint. The names of modes "
                "go in version 0.3.",
                DeprecationWarning,
                stacklevel=user_level(),
            )
            object.__setattr__(self, "compile", True)
        if not isinstance(self.compile, bool):
            raise ValueError(f"`compile` must be True or False; got {self.compile!r}.")
        if self.accumulate is not None and not callable(self.accumulate):
            object.__setattr__(self, "accumulate", check_count("accumulate", self.accumulate))
        check_accumulate(self.accumulate, self.batches, self.tasks, self.adjoint, self.compile)

    @property
    def twice(self) -> bool:
        """Whether forward passes are differentiated twice, or run under `vmap`, which batches no fused attention."""
        return self.tasks is not None or differentiates_twice(self.adjoint)

    def chunks(self) -> list[Loop]:
        """Return one loop per chunk of tasks, or this one."""
        parts = in_chunks(self.batches, self.tasks, self.chunk_size)
        return [dataclasses.replace(self, batches=batches, tasks=tasks, chunk_size=None) for batches, tasks in parts]


class Solution(NamedTuple):
    """The end of a rollout: the last state, the losses, and what maps functions over its tasks."""

    state: InnerState
    trace: Trace
    mapper: TaskMapper | None


def solve(lower: Loss, upper: Loss | None, start: Start, loop: Loop) -> Solution:
    """Run K inner steps, chunk by chunk of tasks."""
    weights = check(lower, upper, start, loop)
    if inside_transform():
        loop = _transformable(loop)
    # A compiled program batches the tasks, whatever an uncompiled rollout chose: it would have B copies of a step.
    module = start.objective.module if isinstance(start.objective, ModuleObjective) and not loop.compile else None
    mapper = TaskMapper(loop.tasks, module=module) if loop.tasks else None
    parts = []
    for part in loop.chunks():
        over = mapper if mapper is None or mapper.tasks == part.tasks else TaskMapper(part.tasks or 1, module=module)
        parts.append(_run(lower, upper, start, part, over, weights))
    return Solution(*join(parts), mapper)


def _transformable(loop: Loop) -> Loop:
    """Return the loop as it runs inside a transform of torch.func: nothing may read a value there.

    Raises:
        ValueError: If it cannot run there.
    """
    if loop.compile or not isinstance(loop.adjoint, Unroll | None):
        got = "compile=True" if loop.compile else f"adjoint={loop.adjoint!r}"
        raise ValueError(
            f"inside a transform of torch.func (grad, vmap, jvp, ...) a rollout runs uncompiled under `Unroll()`; got "
            f"{got}. Use `Unroll()` here, or `tasks=` instead of the transform."
        )
    return dataclasses.replace(loop, on_divergence="ignore")


def warn_without_graph(params: Sequence[Tensor], start: Start) -> None:
    """Warn where y_K leads to no leaf although grad mode is on: `backward` would fail later, or do nothing."""
    if not torch.is_grad_enabled() or params[0].is_meta or inside_transform():
        return
    passed = any(t.requires_grad for t in (*start.state.params, *start.slots.tensors))
    if not any(p.requires_grad for p in params) or not (passed or autograd_graph.leaves(params)):
        warnings.warn(
            "nothing that this rollout depends on requires grad, so `backward` through it will fail. Call "
            "`requires_grad_()` on the upper variables and pass them in `hyper=`, or `copy_initial_weights=False` for "
            "a learned initialisation (`FirstOrder` leaves only that, the rates and alpha). For adaptation without "
            "gradients run it under `torch.no_grad()`.",
            stacklevel=user_level(),
        )


def check(lower: Loss, upper: Loss | None, start: Start, loop: Loop) -> Weights:
    """Raise where a rollout cannot run as it is asked for; return the weights that are still to be looked at."""
    check_ambient()
    check_loss("lower", lower)
    if upper is not None:
        check_loss("upper", upper)
    return Weights([] if inside_transform() else [settings for _, settings in start.groups], upper, loop.steps)


class Prepared(NamedTuple):
    """What an adjoint is called with, and what messages call the tensors `values` of the slots."""

    step: BDAStep
    state: InnerState
    values: tuple[Tensor, ...]
    items: Items
    names: Sequence[str]


def prepare(lower: Loss, upper: Loss | None, start: Start, loop: Loop, mapper: TaskMapper | None = None) -> Prepared:
    """Put the step of a rollout of all tasks at once together."""
    slots = start.slots.copy()
    groups = [Group(members, slots.template(dict(s), f"group {i}")) for i, (members, s) in enumerate(start.groups)]
    update = Update(start.rule, groups, tasks=loop.tasks)
    items = Items(loop.batches, loop.steps, slots, tasks=loop.tasks)
    state = start.state if loop.tasks is None else expand(start.state, loop.tasks, start.rule)
    values = (*start.values, *slots.tensors[len(start.values) :])
    check_devices(state.params, [*zip(slots.names, values, strict=True), *items.constants])
    values = at_home(values, state.params)
    objective = start.objective if mapper is None else TasksObjective(start.objective, mapper)
    step = BDAStep(
        objective, lower, upper, update, start.hyper, names=slots.names, param_names=start.names,
        split=splitter(loop.accumulate, loop.tasks),
    )  # fmt: skip
    return Prepared(step, state, values, items, slots.names)


def _run(
    lower: Loss, upper: Loss | None, start: Start, loop: Loop, mapper: TaskMapper | None, weights: Weights
) -> tuple[InnerState, Trace]:
    """Run K inner steps on all tasks at once."""
    step, state, values, items, names = prepare(lower, upper, start, loop, mapper)
    versions = [] if step.transformed else [version_of(t) for t in values]
    adjoint = loop.adjoint or Unroll()

    def run(items: Items) -> tuple[InnerState, Sequence[Record]]:
        if loop.compile and not state.params[0].is_meta:
            return _run_compiled(adjoint, step, state, values, items)
        return adjoint(step if step.split is None else PartwiseStep(step), state, values, items)

    with surroundings(twice=loop.twice), explained(lower, upper):
        last, records = watched(run, loop.on_divergence, step, state, values, items, start.names, weights)
    if versions:
        refuse_changed(names, values, versions)
    return last, trace_of(records, loop.tasks)


def _run_compiled(
    adjoint: Adjoint, step: BDAStep, state: InnerState, values: tuple[Tensor, ...], items: Items
) -> tuple[InnerState, Sequence[Record]]:
    """Hand a compiled step to the adjoint; it counts in tensors, and its records come in units."""
    tasks = step.update.tasks
    each = tasks is not None and not step.update.rule.elementwise  # a count for each task
    start = with_tensor_counts(state, (tasks or 1,) if each else ())
    last, records = adjoint(CompiledStep(step, start, values), start, values, items)
    return with_plain_counts(last, like=state), JoinedRecords([block for unit in records for block in unit])
