"""A problem as the package solves it, in the style that the configuration names."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, optim
from torch.utils import _pytree as pytree

import bda_optim as bda
from bda_optim._compiled import programs as compiled_programs

from .problem import Problem


def adjoint(problem: Problem) -> Any:
    """The adjoint that the configuration names."""
    config = problem.config
    within = {0: bda.Unroll(), 1: bda.Checkpointed(), 2: bda.Checkpointed(slots=2)}[config.number % 3]
    how = {
        "Unroll": bda.Unroll(),
        "Checkpointed": bda.Checkpointed(),
        "every": bda.Checkpointed(every=1 + config.number % 3),
        "slots": bda.Checkpointed(slots=1 + config.number % 3),
        "ForwardMode": bda.ForwardMode(),
        "Truncated": bda.Truncated(last=config.last, within=within),
        "FirstOrder": bda.FirstOrder(),
        "Guarded": bda.Guarded(within, limit=1e12),
    }[config.adjoint]
    return problem.wrap(dataclasses.replace(how, **problem.adjoint))


def value(problem: Problem, how: Any) -> tuple[Tensor, list[dict[str, Tensor]]]:
    """Return F(x, y_K), summed over the tasks, and each task's y_K."""
    if problem.style == "unroll":
        return _unrolled(problem, how)
    if problem.style == "innerloop":
        return _own_loop(problem)
    y = bda.rollout(problem.lower, _upper(problem), problem.tree, problem.hyper, adjoint=how, **_arguments(problem))
    total, ends = torch.zeros((), dtype=problem.dtype), []
    for task in range(problem.tasks or 1):
        one = y if problem.tasks is None else pytree.tree_map(lambda t, i=task: t[i], y)
        total = total + problem.upper(one, problem.hyper, problem.last_batch(task))
        ends.append(dict(zip(problem.start, pytree.tree_leaves(one), strict=True)))
    return total, ends


def gradients(problem: Problem, how: Any) -> tuple[Tensor, list[Tensor], list[dict[str, Tensor]]]:
    """Return F, its derivatives with respect to the leaves, and y_K."""
    leaves = list(problem.leaves.values())
    if problem.style != "hypergradient":
        total, ends = value(problem, how)
        return total.detach(), derivatives(total, leaves), ends
    out = bda.hypergradient(
        problem.lower, problem.upper, problem.tree, problem.hyper, adjoint=how, upper_batch=problem.last_batch(),
        **_arguments(problem),
    )  # fmt: skip
    flat = pytree.tree_leaves(out.params)
    ends = [
        dict(zip(problem.start, (t if problem.tasks is None else t[task] for t in flat), strict=True))
        for task in range(problem.tasks or 1)
    ]
    return out.value.sum(), out.grad["extra"], ends


def derivatives(value: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    """Return the derivatives of a value, zeros where it does not depend on a leaf."""
    if not value.requires_grad:  # first order, and nothing but the losses depends on the leaves
        return [torch.zeros_like(leaf) for leaf in leaves]
    return list(torch.autograd.grad(value, leaves, materialize_grads=True))


def _upper(problem: Problem) -> Any:
    return problem.upper if any(group.alpha != 0.0 for group in problem.groups) else None


def _rule(problem: Problem) -> Any:
    return bda.FISTA if problem.rule == "FISTA" else getattr(optim, problem.rule)


def _arguments(problem: Problem) -> dict[str, Any]:
    (group,) = problem.groups
    return {
        **group.settings, "alpha": group.alpha, "prox": group.map, "rule": _rule(problem), "steps": problem.steps,
        "batches": problem.batches, "tasks": problem.tasks, "compile": _compile(problem),
        "chunk_size": problem.config.chunk, **problem.arguments,
    }  # fmt: skip


def _compile(problem: Problem) -> Any:
    return bool(problem.config.compile)  # the frozen list has the names of modes that there were


def _optimizer(problem: Problem) -> bda.BDAInnerOptimizer:
    groups = [
        {"params": [problem.start[n] for n in g.names], **g.settings, "alpha": g.alpha, "prox": g.map}
        for g in problem.groups
        if g.names
    ]
    return bda.BDAInnerOptimizer(groups, rule=_rule(problem))


def _unrolled(problem: Problem, how: Any) -> tuple[Tensor, list[dict[str, Tensor]]]:
    fmodel = _optimizer(problem).unroll(
        problem.module, problem.lower, _upper(problem), hyper=problem.hyper, steps=problem.steps,
        batches=problem.batches, tasks=problem.tasks, adjoint=how, compile=_compile(problem),
        copy_initial_weights=not problem.learns_start, chunk_size=problem.config.chunk, **problem.arguments,
    )  # fmt: skip
    total = fmodel.losses(problem.upper, problem.hyper, problem.last_batch()).sum()
    params = fmodel.params
    if problem.tasks is None:
        return total, [{n: params[n] for n in problem.start}]
    return total, [{n: params[n][task] for n in problem.start} for task in range(problem.tasks)]


def _own_loop(problem: Problem) -> tuple[Tensor, list[dict[str, Tensor]]]:
    config, options = problem.config, {}
    if config.adjoint == "Truncated":
        options = {"steps": config.steps, "last": config.last}
    if problem.first_order:
        options = {"first_order": True}
    tracked = torch.is_grad_enabled()
    with (
        torch.enable_grad(),
        bda.innerloop_ctx(
            problem.module, _optimizer(problem), copy_initial_weights=not problem.learns_start,
            track_higher_grads=tracked, **options, **problem.arguments,
        ) as (fmodel, diffopt),
    ):  # fmt: skip
        for k in range(1, problem.steps + 1):
            batch = problem.batch(k, 0)
            lower = problem.lower(fmodel, problem.hyper, batch)
            needed = any(group.weight(k) is not None for group in problem.groups)
            diffopt.step(lower, problem.upper(fmodel, problem.hyper, batch) if needed else None)
    total = problem.upper(fmodel, problem.hyper, None)
    return total, [fmodel.params]


@contextlib.contextmanager
def traced() -> Iterator[None]:
    """Run traced graphs as they are: compiling one takes some twenty seconds."""
    import torch._inductor

    compile, steps = torch._inductor.compile, compiled_programs._MOST_STEPS
    torch._inductor.compile, compiled_programs._MOST_STEPS = lambda graph, inputs, options: graph, 2
    try:
        yield
    finally:
        torch._inductor.compile, compiled_programs._MOST_STEPS = compile, steps
