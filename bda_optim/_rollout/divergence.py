"""A rollout that diverged: at which step, in which parameter, and what is returned instead.

Nothing is looked at in the loop itself, so that no device is waited for: after it, the losses and the last iterate are
looked at once. Only if they are not finite are the steps run once more, without a graph, to find the first one at
which something is not.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from .._adjoints.replay import READ_AGAIN
from .._context.environment import Ambient
from .._step.gradients import both_gradients
from .._step.step import BDAStep
from .._support.checks import user_level
from .._support.tree import detach
from .._support.types import InnerState, Item, Record
from .losses import all_finite, diverged, first_bad_loss
from .weights import Weights

Result: TypeAlias = tuple[InnerState, Sequence[Record]]

CHOICES = ("raise", "stop", "ignore")
"""What becomes of a rollout that diverged at step k: an error, y_{k-1}, or y_K as it is."""


def check_choice(value: Any, chunk_size: int | None = None) -> str:
    """Return a choice, if it is one and can be honoured."""
    if value not in CHOICES:
        raise ValueError(f'`on_divergence` must be "raise", "stop" or "ignore"; got {value!r}.')
    if value == "stop" and chunk_size is not None:
        raise ValueError(
            f'on_divergence="stop" ends all tasks after the same step; got chunk_size={chunk_size}, which runs them '
            "one chunk after another. Leave `chunk_size` out."
        )
    return str(value)


class Divergence(NamedTuple):
    """The first step at which something was not finite, and a text that says so."""

    k: int
    message: str  # not an error: one that the frame raising it also holds is freed by the garbage collector only


def watched(
    once: Callable[[Any], Result], choice: str, step: BDAStep, state: InnerState, hyper: Sequence[Tensor], items: Any,
    names: Sequence[str], weights: Weights,
) -> Result:  # fmt: skip
    """Return ``once(items)``, if it is finite and its `weights` are such; otherwise do what was chosen.

    To stop means to run the k - 1 good steps by themselves: the graph, the random numbers and the number of steps that
    an adjoint sees are those of a rollout that was never longer.
    """
    if choice == "ignore":
        weights.check()
        return once(items)
    if choice == "stop" and getattr(items, "once", False):
        raise TypeError(f'on_divergence="stop" may run the loop again: {READ_AGAIN}')
    ambient = Ambient(state.params)
    rng = ambient.rng()
    while True:
        last, records = once(items)
        if all_finite(records, last.params, weights.flags):
            return last, records
        weights.check()
        del last  # and its graph
        k, message = locate(step, state, hyper, items, names, records, ambient, rng)
        if choice == "raise" or k == 1:
            raise FloatingPointError(message)
        warnings.warn(f"{message} It was stopped after {k - 1} steps.", RuntimeWarning, stacklevel=user_level())
        items = items[: k - 1]
        ambient.set_rng(rng)


def locate(
    step: BDAStep, state: InnerState, hyper: Sequence[Tensor], items: Sequence[Item], names: Sequence[str],
    records: Sequence[Record], ambient: Ambient, rng: Any,
) -> Divergence:  # fmt: skip
    """Find where a rollout diverged, by its steps once more; `records` are those of the first time, `rng` its start.

    Where the steps cannot be repeated (a loss with a generator of its own, batches that are read once), the first loss
    that was not finite is named.
    """
    outside, state, steps, again = ambient.rng(), detach(state), len(items), []
    ambient.set_rng(rng)
    try:
        with torch.no_grad():
            for item in () if getattr(items, "once", False) else items:
                before, drawn = state, ambient.rng()
                state, record = step(state, hyper, item)
                again.append(record)
                bad = _not_finite(state.params, names)
                if bad or first_bad_loss([record]) is not None:
                    ambient.set_rng(drawn)
                    what = _what(step, before, hyper, item, record, names, bad)
                    return Divergence(item.k, diverged(f"{what} step k={item.k} of {steps}", again))
    finally:
        ambient.set_rng(outside)
    k, level = first_bad_loss(records) or (steps, "")
    what = f"the {level} loss is not finite at" if level else "the parameters are not finite after"
    return Divergence(k, diverged(f"{what} step k={k} of {steps}", records[:k]))


def _what(
    step: BDAStep, state: InnerState, hyper: Sequence[Tensor], item: Item, record: Record, names: Sequence[str],
    after: list[str],
) -> str:  # fmt: skip
    """Say what is not finite: a loss, the gradients of parameters, or the parameters `after` the step."""
    bad = first_bad_loss([record])
    if bad is not None:
        return f"the {bad[1]} loss is not finite at"
    settings = step.update.settings(hyper, item.k)
    with torch.enable_grad():
        points = [p.detach().requires_grad_() for p in step.update.points(state, settings)]
        f, big_f, _ = step.losses(points, state.buffers, hyper, item, settings)
        both = both_gradients(f, big_f, points, item.k, retain_graph=True, tasks=step.update.tasks)
    for level, grads in zip(("lower", "upper"), both, strict=True):
        wrong = _not_finite([torch.zeros(()) if g is None else g for g in grads], names)
        if wrong:
            return f"the {level} gradient of {', '.join(wrong)} is not finite at"
    return f"{', '.join(after)} {'is' if len(after) == 1 else 'are'} not finite after"


def _not_finite(values: Sequence[Tensor], names: Sequence[str]) -> list[str]:
    return [f"`{name}`" for name, value in zip(names, values, strict=True) if not bool(torch.isfinite(value).all())]
