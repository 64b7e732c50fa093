"""The order of a diagnosis: sweep, half sweep, curvature, memory, findings, suggestion."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from .._adjoints.unroll import Truncated
from .._context.environment import Ambient
from .curvature import curvature
from .findings import Measured, findings
from .inner_loop import Build
from .memory import EVALUATED, predicted
from .progress import Progress
from .report import Diagnosis, report
from .suggestion import code, suggest
from .sweep import sweep


def examine(
    build: Build, given: Mapping[str, Any], *, optimized: str | None = None, adjoint: Any, products: int | None,
    probes: int, seed: int, search: bool, progress: Any,
) -> Diagnosis:  # fmt: skip
    """Measure an inner loop and report; the random state is afterwards what it was.

    Args:
        build: Makes the inner loop.
        given: What the user passed on to the rollout.
        optimized: What a `BDAInnerOptimizer` is made from, as code for the suggestion; None for `hypergradient`.
        adjoint: What the user means to differentiate with, or None.
        products: The allowance of products, or None.
        probes: The number of random vectors.
        seed: Of the random vectors.
        search: Whether to search for a suggestion.
        progress: None, True or a callback.
    """
    loop = build()
    ambient = Ambient(loop.state.params)
    rng = ambient.rng()
    shown = {name: _shown(given[name], name) for name in ("lr", "upper_lr", "alpha", "rule") if name in given}
    try:
        with Progress(progress) as bar:
            K = loop.steps
            lengths = (adjoint.last,) if isinstance(adjoint, Truncated) else ()
            whole = sweep(loop, keep={0, K // 4, K // 2}, lengths=lengths, advance=bar.stage("sweep", 2 * K))
            ambient.set_rng(rng)
            half = sweep(loop.shortened(K // 2), advance=bar.stage("half", K)) if K > 1 else None
            curved = curvature(loop, whole.states, products=products, probes=probes, seed=seed, stage=bar.stage)
            measured = Measured(loop, whole, half, curved, adjoint)
            scalars = 0 if whole.gradient is None else whole.gradient.numel()
            memory = predicted(loop, K, scalars)
            evaluated = whole.evaluated + (half.evaluated if half else 0) + EVALUATED
            found = report(measured, shown, memory, scalars, findings(measured), evaluated)
            if not search:
                return found
            suggestion = suggest(
                build, measured, given, bar, lambda: ambient.set_rng(rng), scalars=scalars, optimized=optimized
            )
            return dataclasses.replace(found, suggestion=suggestion)
    finally:
        ambient.set_rng(rng)


def _shown(value: Any, name: str) -> str:
    """Return a setting as the report prints it."""
    return f"{value:.4g}" if isinstance(value, int | float) else code(value, name)
