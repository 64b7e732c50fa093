"""What to choose: rates, alpha, K and the adjoint, each with its reason."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from .._adjoints.base import Adjoint
from .._adjoints.checkpointed import Checkpointed
from .._adjoints.forward_mode import ForwardMode
from .._adjoints.implicit import Implicit
from .._adjoints.unroll import Truncated, Unroll
from .._step.schedules import Schedule, harmonic
from .findings import EXPLODED, QUESTION, REMEMBERED, Measured, lower_rate, upper_rate
from .inner_loop import Build
from .memory import EVALUATED, predicted
from .progress import Progress
from .rates import is_scale_free
from .search import LONGEST, TOLERABLE, Choice, Search

ROOM = 2**30
"""A forecast of so many bytes is taken to fit."""

FEW = 16
"""Up to so many upper scalars are carried forward where nothing else fits."""

SLOW = 0.03
"""Above this error of the best K the lower level counts as slow."""

NEWTON = 8
"""The Newton steps that a slow lower level is given."""

PRODUCTS = 1000
"""The products that each of their linear systems may take."""

SMALL = 3e-3
"""The bias that the weight of the fixed point may have."""

UNBIASED = 0.01
"""The largest bias of a truncation that is suggested."""


@dataclasses.dataclass(frozen=True)
class Suggestion:
    """Settings to take over, and why.

    Attributes:
        settings: Keyword arguments of `hypergradient`: `steps`, `lr`, `upper_lr`, `alpha`, `adjoint`, and what else was
            given to `diagnose`.
        reasons: Name -> a sentence.
        error: The estimated relative error of the hypergradient against that of the optimistic problem, if known.
        question: What to ask before alpha > 0 is taken over; None where alpha stays 0.
        optimized: What a `BDAInnerOptimizer` is made from, as code; None for the lines of `hypergradient`.
        evaluations: How many steps the search evaluated.
    """

    settings: Mapping[str, Any]
    reasons: Mapping[str, str]
    error: float | None
    question: str | None
    optimized: str | None
    evaluations: int

    def __str__(self) -> str:
        """Return the lines to paste, with the reasons as comments."""
        shown = {name: code(value, name) for name, value in self.settings.items()}
        lines = [f"# {name}: {reason}" for name, reason in self.reasons.items()]
        if self.question is not None:
            lines.append(f"# {self.question}")
        if self.optimized is None:
            return "\n".join([*lines, f"bda.hypergradient(lower, upper, params, hyper, {_listed(shown)})"])
        loop = {name: value for name, value in shown.items() if name in ("steps", "batches", "adjoint")}
        shown = {name: value for name, value in shown.items() if name not in loop}
        lines.append(f"inner = bda.BDAInnerOptimizer({self.optimized}, {_listed(shown)})")
        lines.append(f"fmodel = inner.unroll(model, lower, upper, hyper=hyper, {_listed(loop)})")
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain values; objects become the code that makes them."""
        found = dataclasses.asdict(dataclasses.replace(self, settings={}, reasons={}))
        return {
            **found, "settings": {n: v if isinstance(v, int | float) else code(v, n) for n, v in self.settings.items()},
            "reasons": dict(self.reasons), "text": str(self),
        }  # fmt: skip


def suggest(
    build: Build, measured: Measured, given: Mapping[str, Any], progress: Progress, rewind: Callable[[], None], *,
    scalars: int, optimized: str | None,
) -> Suggestion:  # fmt: skip
    """Search for settings.

    Args:
        build: Makes the inner loop with other settings.
        measured: The measurements at the settings given.
        given: What the user passed on to the rollout; the suggestion starts from it.
        progress: Is called with every trial.
        rewind: Sets the random state to what it was at first.
        scalars: P, the number of upper scalars.
        optimized: What a `BDAInnerOptimizer` is made from, as code; None for `hypergradient`.
    """
    reasons: dict[str, str] = {}
    rates = _rates(measured, reasons)
    search = Search(build, rates, measured, progress, rewind, extendable=given.get("batches") is None)
    choice = _choice(search, measured, rates)
    settings = {**given, **rates, "steps": choice.steps}
    if choice.c is not None:
        settings["alpha"] = harmonic(choice.c) if choice.c else 0.0
    if not choice.c and "upper_lr" in rates:
        del rates["upper_lr"], reasons["upper_lr"]
        settings["upper_lr"] = given.get("upper_lr")
    loop = build(**rates, **({} if choice.c is None else {"alpha": settings["alpha"]}))
    bytes_of = predicted(loop, choice.steps, scalars)
    settings["adjoint"], reasons["adjoint"] = _adjoint(measured, choice, search, bytes_of, scalars)
    if choice.error is not None and choice.error > SLOW and _settles(measured, given):
        choice, settings["adjoint"], reasons["adjoint"] = _settled(measured, choice)
        settings["steps"] = choice.steps
    reasons |= _reasons(measured, choice)
    order = ("steps", "lr", "upper_lr", "alpha", "adjoint")
    ordered = {name: settings[name] for name in order if settings.get(name) is not None}
    rest = {name: value for name, value in settings.items() if name not in order}
    return Suggestion(
        {**ordered, **rest}, {name: reasons[name] for name in (*order, "error") if name in reasons}, choice.error,
        QUESTION if choice.c else None, optimized, search.evaluated + EVALUATED,
    )  # fmt: skip


def _choice(search: Search, measured: Measured, rates: dict[str, Any]) -> Choice:
    """Return alpha and K; `rates` loses an lr with which the loop diverges."""
    loop = measured.loop
    if loop.start_is_upper:
        return Choice(None, loop.steps, None, measured.sweep.start, measured.sweep.start)
    try:
        whole, half = search.without()
    except FloatingPointError:
        if "lr" not in rates:
            raise
        del rates["lr"]
        whole, half = search.without()
    if whole.growth > EXPLODED:
        return search.shorter(whole)
    settled = whole.start <= REMEMBERED or measured.steps_to_forget <= search.longest
    if settled or is_scale_free(loop):
        return search.regular(whole, half)
    return search.aggregated(whole.start)


def _rates(measured: Measured, reasons: dict[str, str]) -> dict[str, Any]:
    """Return the rates that should change, with reasons for all."""
    found: dict[str, Any] = {}
    lr = common(measured, "lr")
    factor, limit = lower_rate(measured)
    unsettled = measured.sweep.start > REMEMBERED or (measured.change or 0.0) > TOLERABLE
    if lr is not None and factor is not None and factor > 0:
        if factor > limit * (1 + 1e-3):
            found["lr"] = _floored(0.9 * limit * lr / factor)
            reasons["lr"] = f"0.9 of what L_f allows; {lr:.3g} is beyond it."
        elif factor < 0.1 and unsettled and not measured.not_convex:
            found["lr"] = _floored(0.9 * lr / factor)
            reasons["lr"] = f"0.9 / L_f; {lr:.3g} is {factor:.2g} / L_f, and K steps do not settle."
        else:
            reasons["lr"] = f"as given: lr L_f = {factor:.2g} lies within its limit {limit:.3g}."
    upper_lr = common(measured, "upper_lr")
    bound = upper_rate(measured)[1]
    if math.isfinite(bound) and (upper_lr is None or not bound / 10 <= upper_lr <= bound * (1 + 1e-3)):
        if upper_lr is not None or not _differ(measured, "upper_lr"):
            found["upper_lr"] = _floored(bound)
            reasons["upper_lr"] = "2 / (L_F + sigma), the limit of the theory."
    elif upper_lr is not None:
        reasons["upper_lr"] = f"as given: it lies below 2 / (L_F + sigma) = {bound:.3g}."
    return found


def common(measured: Measured, name: str) -> float | None:
    """Return a setting that is the same plain number in all groups; None otherwise."""
    values = [group[name] for _, group in measured.loop.groups]
    plain = all(isinstance(v, int | float) for v in values)
    return float(values[0]) if plain and len(set(values)) == 1 else None


def _differ(measured: Measured, name: str) -> bool:
    return any(group[name] is not None for _, group in measured.loop.groups)


def _floored(value: float) -> float:
    """Round down to three digits."""
    digits = 10.0 ** (math.floor(math.log10(value)) - 2)
    return float(f"{math.floor(value / digits) * digits:.3g}")


def _adjoint(
    measured: Measured, choice: Choice, search: Search, forecasts: Mapping[str, int], scalars: int
) -> tuple[Adjoint, str]:
    """Return the adjoint, and why.

    `Unroll` comes first: measured on two networks, `Checkpointed` takes 1.6 to 2 times its CPU time and `ForwardMode` 2
    to 9 times (P = 1 to 16).
    """
    room = f"{ROOM / 2**30:.0f} GiB"
    if forecasts["Unroll"] <= ROOM:
        return Unroll(), f"K graphs need {amount(forecasts['Unroll'])}, which fits."
    sentence = f"K graphs would need {amount(forecasts['Unroll'])}, over {room}"
    if choice.steps == search.steps:
        for last, bias in sorted(search.sweep.truncation.items()):
            if bias < UNBIASED and forecasts["Unroll"] * last / choice.steps <= ROOM:
                return Truncated(last=last), f"{sentence}; the last {last} steps are off by {bias:.1g} only."
    if forecasts["Checkpointed"] <= ROOM or scalars > FEW:
        return Checkpointed(), f"{sentence}; exact, with {amount(forecasts['Checkpointed'])}."
    return ForwardMode(), f"{sentence}; {scalars} tangents need {amount(forecasts['ForwardMode'])}."


def _settles(measured: Measured, given: Mapping[str, Any]) -> bool:
    """Whether Newton steps lead from y_K to a fixed point, whose derivative `Implicit` has."""
    batches = given.get("batches")
    return (
        measured.curvature.flat is not None
        and not measured.not_convex
        and not measured.loop.start_is_upper
        and measured.precision <= torch.finfo(torch.float32).eps
        and given.get("prox") is None
        and (batches is None or (isinstance(batches, list | tuple) and all(b is batches[0] for b in batches)))
    )


def _settled(measured: Measured, choice: Choice) -> tuple[Choice, Adjoint, str]:
    """Return the hand-over to `Implicit`: its bias is about a kappa_f, whatever K is."""
    sentence = f"no K up to {LONGEST} settles, so Newton steps lead to the fixed point"
    given = measured.loop.steps
    if not choice.c:
        adjoint = Implicit(settle=NEWTON, limit=PRODUCTS)
        return choice._replace(steps=given, error=0.0), adjoint, f"{sentence}, where the lower level is solved."
    flat = measured.curvature.flat
    assert flat is not None
    level = max(1e-6, 100 * measured.precision) * flat.steepest
    condition = flat.steepest / min((value for value, _ in flat.density if value > level), default=flat.steepest)
    a = float(f"{min(1e-3, max(SMALL / condition, math.sqrt(measured.precision) / 100)):.1g}")
    adjoint = Implicit(alpha=a, settle=NEWTON, limit=PRODUCTS)
    return choice._replace(steps=given, error=a * condition), adjoint, f"{sentence} with the weight {a:g}."


def _reasons(measured: Measured, choice: Choice) -> dict[str, str]:
    """Say why alpha and K are what they are."""
    reasons: dict[str, str] = {}
    given, memory = measured.loop.steps, f"{choice.memory:.2g}"
    if choice.c is None and measured.loop.start_is_upper:
        reasons["alpha"] = "as given: the start is an upper variable, so y_K should remember it."
    elif choice.c is None:
        reasons["alpha"] = (
            f"as given: no harmonic(c) that was tried makes y_K forget its start; {memory} of it is left."
        )
    elif choice.c:
        reasons["alpha"] = (
            f"with alpha=0, |dF/dy_0| / |dF/dy_K| = {choice.without:.2g}: the start chooses y. c was doubled from "
            f"0.25 until y_K forgets it: {memory}{' (predicted)' if choice.steps != given else ''}."
        )
    else:
        reasons["alpha"] = f"y_K forgets its start without it: |dF/dy_0| / |dF/dy_K| = {memory}."
        if choice.without > REMEMBERED:
            reasons["alpha"] = f"y_K remembers its start ({memory}), but alpha cannot help here."
        if measured.steps_to_forget < math.inf and choice.steps > given:
            reasons["alpha"] = "the lower level has a single solution, which more steps reach."
    if choice.steps > given:
        reasons["steps"] = f"K = {given} leaves an estimated error above {TOLERABLE:g}."
    elif choice.steps < given:
        reasons["steps"] = f"with K = {given} adjoints explode."
    else:
        reasons["steps"] = "as given."
    if choice.error is not None:
        reasons["error"] = f"{choice.error:.1g} is estimated, against the hypergradient of the optimistic problem."
        if choice.error > SLOW:
            reasons["error"] += f" The lower level is slow, and no K up to {LONGEST} settles it."
    return reasons


def amount(size: float) -> str:
    """Return a number of bytes as people read it.

    >>> amount(3 * 2**20)
    '3.0 MiB'
    """
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def code(value: Any, name: str = "") -> str:
    """Return the code that makes a setting; what has none is called by its name.

    >>> code(harmonic(0.5)), code(Truncated(last=8))
    ('bda.harmonic(0.5)', 'bda.Truncated(last=8)')
    """
    if isinstance(value, Schedule):
        return f"bda.{value.name}({', '.join(f'{v!r}' for v in vars(value).values())})"
    if isinstance(value, type):
        return (
            f"torch.optim.{value.__name__}" if value.__module__.startswith("torch.optim") else f"bda.{value.__name__}"
        )
    if dataclasses.is_dataclass(value) and type(value).__module__.startswith("bda_optim._adjoints"):
        fields = [f for f in dataclasses.fields(value) if getattr(value, f.name) != f.default]
        return f"bda.{type(value).__name__}({', '.join(f'{f.name}={code(getattr(value, f.name))}' for f in fields)})"
    plain = isinstance(value, bool | int | float | str | None) or (isinstance(value, tuple) and len(value) <= 4)
    return repr(value) if plain else name or "..."


def _listed(settings: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in settings.items())
