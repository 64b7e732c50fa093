"""Configurations spoilt on purpose: each must be refused with an error that names the fault; none gives a number."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import torch
from torch import Tensor

import bda_optim as bda

from . import package
from .draw import Config
from .problem import Problem

EXPECTED: dict[str, tuple[type[Exception], str]] = {
    "truncated start": (ValueError, "no gradient reaches the initial"),
    "coupled prox": (ValueError, "one rate per element"),
    "alpha": (ValueError, r"`alpha` must lie in \[0, 1\)"),
    "batches": (ValueError, "one batch per step"),
    "captured": (ValueError, "neither in `hyper=` nor in `batches=`"),
    "not finite": (FloatingPointError, "not finite at step k=1"),
    "inference": (RuntimeError, "inference_mode"),
    "no upper": (ValueError, "upper"),
}


def check(config: Config) -> str:
    """Spoil a problem and return "refused", or raise what went wrong."""
    kind, message = EXPECTED[config.spoil]
    if config.spoil == "not finite" and "nuclear" in config.prox:
        kind, message = torch.linalg.LinAlgError, "not finite|non-finite"  # torch's decomposition sees it first
    try:
        _run(dataclasses.replace(config, compile="", dtype="float64"))
    except kind as error:
        if re.search(message, str(error)):
            return "refused"
        raise
    raise AssertionError(f"spoilt by {config.spoil!r}, and no error was raised")


def _run(config: Config) -> Any:
    kind, style = config.spoil, config.style
    if kind in ("batches", "captured") and style == "innerloop":
        style, config = "unroll", dataclasses.replace(config, style="unroll", adjoint="Checkpointed")
    if kind == "truncated start":
        steps = max(config.steps, 2)
        config = dataclasses.replace(
            config, learn=("start", *config.learn), adjoint="Truncated", steps=steps, last=steps - 1
        )
    if kind == "captured":
        config = dataclasses.replace(config, adjoint="ForwardMode" if config.number % 2 else "Checkpointed")
    problem = Problem(config)
    group = problem.groups[0]
    if kind == "coupled prox":
        if config.family == "complex" or config.rule in ("Adafactor", "Rprop", "ASGD"):
            group.settings = {"lr": 0.1, "upper_lr": None}
            problem.rule = "SGD"
            problem.groups = [group] * len(problem.groups) if style in ("rollout", "hypergradient") else [group]
        group.settings["lr"] = [torch.full_like(problem.start[n].real, 0.1) for n in group.names]
        group.map = bda.prox.l2_ball(0.5)
    elif kind == "alpha":
        group.alpha, group._weight = 1.3, lambda k: 1.3
    elif kind == "batches":
        problem.batches = [problem.batches[0] if problem.batches else None] * (config.steps + 1)
    elif kind == "captured":
        stray, lower = torch.ones((), dtype=torch.float64, requires_grad=True), problem.lower
        problem.lower = lambda net, hyper, batch: stray * lower(net, hyper, batch)
    elif kind == "not finite":
        whole = problem.lower
        problem.lower = lambda net, hyper, batch: whole(net, hyper, batch) * torch.inf
    elif kind == "no upper":
        return _without_upper(problem)
    if kind == "inference":
        with torch.inference_mode():
            return package.gradients(problem, package.adjoint(problem))
    return package.gradients(problem, package.adjoint(problem))


def _without_upper(problem: Problem) -> Tensor:
    """Aggregate in a loop that has no upper loss."""
    problem.groups[0].alpha, problem.groups[0]._weight = 0.3, lambda k: 0.3
    if problem.style == "innerloop":
        with bda.innerloop_ctx(problem.module, package._optimizer(problem)) as (fmodel, diffopt):
            diffopt.step(problem.lower(fmodel, problem.hyper, problem.batch(1, 0)))
        return torch.zeros(())
    problem.upper = None  # type: ignore[assignment]
    return package.value(problem, None)[0]
