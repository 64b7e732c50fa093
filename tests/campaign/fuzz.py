"""Random configurations against two witnesses: a naive loop, and finite differences.

Each configuration is built in float64. The hypergradient must equal that of `naive.unroll` leaf by leaf, F and y_K
must equal those of the naive loop, and the derivative along a random direction must equal a central difference of
rollouts without a graph, for some step of 1e-4 ... 1e-9. (Of a biased adjoint the naive loop is differenced, with what
counts as a constant held fixed.)

Kinks (of a ReLU, a prox, a sign) are no excuse by themselves: small steps of the sweep do not reach them. Only where
all steps disagree, the two witnesses of the derivative are asked again: it is called a kink if the naive loop agrees
with the package and the two one-sided differences over 1e-7 do not agree with each other (a kink at this very point,
or a slope that changes within 1e-7). An iterate may lie on a kink as well, so that rounding errors decide on which side
it goes on: it is called a kink if the naive loop itself goes elsewhere from starts that differ by rounding errors. Such
cases are listed by number; so are those that diverged in the naive loop too, and those whose hypergradient is zero by
definition (first order, and only the losses depend on what is learned).

In float32 and bfloat16 differences are of no use: there the hypergradient may be no further from the float64 one of
the same numbers than ten times what the naive loop in that type is, or 50 roundings.

Some configurations are spoilt, and must be refused with the right error.

The configurations of `draw.py` are a frozen list. With ``--later`` each gets options of `later.py` in addition.
"""

from __future__ import annotations

import argparse
import collections
import json
import time
import warnings
from typing import Any

import torch
from torch import Tensor

from . import naive, package, registry, spoil
from .draw import Config, draw
from .later import draw_later
from .problem import Problem

STEPS = (1e-5, 1e-6, 1e-4, 1e-7, 1e-8, 1e-9)  # the likeliest first: the sweep ends where one agrees
TOLERANCE = 1e-5  # of the differences
HUGE = 1e8
BOUNDED_SEED, BOUNDED = 1, 150  # what the ordinary tests run
LATER_SEED, BOUNDED_LATER = 2, 60  # and of the configurations with later options


class Wrong(AssertionError):
    """The package and a witness disagree."""


def check(config: Config, *, really: bool = False) -> str:
    """Try one configuration; return what became of it, or raise `Wrong`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if config.spoil:
            return spoil.check(config)
        if not config.compile or really:
            return _check(config)
        with package.traced():
            return _check(config)


def _check(config: Config) -> str:
    problem = Problem(config, torch.float64)
    how, tape = package.adjoint(problem), naive.Tape()
    _seed(config)
    want_value, want_ends = naive.unroll(problem, tape)
    if not want_value.isfinite() or want_value.abs() > HUGE or max(_size(e) for e in want_ends) > HUGE:
        return "diverged"
    leaves = list(problem.leaves.values())
    want = package.derivatives(want_value, leaves)
    _seed(config)
    value, got, ends = package.gradients(problem, how)
    try:
        _compare("F", [value], [want_value], problem.tolerance)
        for task, (mine, theirs) in enumerate(zip(ends, want_ends, strict=True)):
            _compare(f"y_K of task {task}", [mine[n] for n in theirs], list(theirs.values()), problem.tolerance)
        whole = _norm(want)
        for name, mine, theirs in zip(problem.leaves, got, want, strict=True):
            _compare(f"the derivative by {name!r}", [mine], [theirs], problem.tolerance, 0.1 * whole)
    except Wrong:
        if _rounding_decides(config, float(want_value)):
            return "kink"
        raise
    outcome = _differences(config, problem, float(value), got, tape)
    if config.dtype != "float64":
        _low_precision(config, got)
    return outcome


def _rounding_decides(config: Config, value: float) -> bool:
    """Whether the naive loop ends elsewhere from starts that differ by rounding errors."""
    numbers = torch.Generator().manual_seed(config.number)
    for _ in range(4):
        problem = Problem(config, torch.float64)
        with torch.no_grad():
            for t in problem.start.values():
                t.add_(1e-14 * torch.randn(t.shape, generator=numbers, dtype=t.dtype))
        _seed(config)
        other, _ = naive.unroll(problem, naive.Tape())
        if abs(float(other) - value) > 1e-8 * (abs(value) + 1):
            return True
    return False


def _differences(config: Config, problem: Problem, middle: float, got: list[Tensor], tape: naive.Tape) -> str:
    leaves = list(problem.leaves.values())
    numbers = torch.Generator().manual_seed(config.number)
    direction = [torch.randn(t.shape, generator=numbers, dtype=t.dtype) for t in leaves]
    length = _norm(direction)
    direction = [d / length for d in direction]
    slope = float(sum((g.conj() * d).real.sum() for g, d in zip(got, direction, strict=True)))
    biased = bool(problem.cut or problem.first_order)

    def at(h: float) -> float:
        before = [leaf.detach().clone() for leaf in leaves]
        with torch.no_grad():
            for leaf, d in zip(leaves, direction, strict=True):
                leaf.add_(h * d)
            _seed(config)
            if biased:
                tape.rewind()
                value, _ = naive.unroll(problem, tape)
            else:
                value, _ = package.value(problem, None)
            for leaf, old in zip(leaves, before, strict=True):
                leaf.copy_(old)
        return float(value)

    allowed = TOLERANCE * (_norm(got) + 1e-4 * abs(middle))
    errors = []
    for h in STEPS:
        errors.append(abs((at(h) - at(-h)) / (2 * h) - slope))
        if errors[-1] <= allowed:
            return "right" if _norm(got) > 0 else "zero"
    sides = [(sign * (at(sign * 1e-7) - middle)) / 1e-7 for sign in (1, -1)]
    if abs(sides[0] - sides[1]) > 10 * TOLERANCE * (_norm(got) + abs(middle)):
        return "kink"
    raise Wrong(f"differences: {min(errors):.2e} from the slope {slope:.6e}, allowed {allowed:.2e}")


def _low_precision(config: Config, exact: list[Tensor]) -> None:
    low = Problem(config)
    _seed(config)
    naive_value, _ = naive.unroll(low, naive.Tape())
    leaves = list(low.leaves.values())
    theirs = package.derivatives(naive_value, leaves)
    _seed(config)
    _, mine, ends = package.gradients(low, package.adjoint(low))
    wrong = {t.dtype for end in ends for t in end.values()} - {low.dtype}
    if wrong:
        raise Wrong(f"y_K is {wrong}, not {low.dtype}")
    errors = [_norm([a.double() - b for a, b in zip(some, exact, strict=True)]) for some in (mine, theirs)]
    allowed = 10 * errors[1] + 50 * torch.finfo(low.dtype).eps * _norm(exact)
    if not errors[0] <= allowed:
        raise Wrong(f"{low.dtype}: off by {errors[0]:.2e}, the naive loop by {errors[1]:.2e}")


def _compare(what: str, got: list[Any], want: list[Any], tolerance: float, scale: float = 0.0) -> None:
    if [t.shape for t in got] != [t.shape for t in want]:
        raise Wrong(f"{what}: shapes {[tuple(t.shape) for t in got]}, not {[tuple(t.shape) for t in want]}")
    error = _norm([a.detach() - b.detach() for a, b in zip(got, want, strict=True)])
    if not error <= tolerance * (_norm(want) + scale + 1e-6):
        raise Wrong(f"{what}: off by {error:.2e} of {_norm(want):.2e}")


def _norm(tensors: Any) -> float:
    return float(sum(t.detach().abs().double().square().sum() for t in tensors)) ** 0.5


def _size(tensors: dict[str, Tensor]) -> float:
    return max((float(t.detach().abs().max()) for t in tensors.values() if t.numel()), default=0.0)


def _seed(config: Config) -> None:
    if config.family == "dropout":
        torch.manual_seed(config.number)


# The campaign.


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--only", type=int, help="the number of a single configuration")
    parser.add_argument("--really", type=int, default=0, help="how many of the traced configurations to compile")
    parser.add_argument("--later", action="store_true", help="add the options that came after the frozen list")
    parser.add_argument("--resume", action="store_true", help="go on where an interrupted run stopped")


def run(args: argparse.Namespace) -> registry.Result:
    if args.only is not None:
        print((draw_later if args.later else draw)(args.seed, args.only))
        return _campaign(args.seed, range(args.only, args.only + 1), later=args.later, really=args.really)
    return _campaign(
        args.seed, range(args.count), later=args.later, really=args.really, keep=True, resume=args.resume
    )  # fmt: skip


def smoke() -> registry.Result:
    frozen, later = _campaign(BOUNDED_SEED, range(BOUNDED)), _campaign(LATER_SEED, range(BOUNDED_LATER), later=True)
    outcomes = collections.Counter(frozen["outcomes"]) + collections.Counter(later["outcomes"])
    return {
        "seed": BOUNDED_SEED,
        "count": frozen["count"] + later["count"],
        "outcomes": dict(outcomes),
        "failures": frozen["failures"] + later["failures"],
    }


def row(result: registry.Result) -> str:
    parts = ", ".join(f"{n} {name}" for name, n in sorted(result["outcomes"].items(), key=lambda item: -item[1]))
    return f"{result['count']} configurations: {parts}"


def _campaign(
    seed: int, numbers: range, *, later: bool = False, really: int = 0, keep: bool = False, resume: bool = False
) -> registry.Result:
    name, option = ("fuzz_later", "--later ") if later else ("fuzz", "")
    progress = registry.RESULTS / f"{name}.part"
    done: dict[str, Any] = {"next": numbers.start, "outcomes": {}, "special": [], "failures": [], "seconds": 0.0}
    if resume and progress.exists():
        done = json.loads(progress.read_text(encoding="utf-8"))
    outcomes, compiled = collections.Counter(done["outcomes"]), 0
    start = time.perf_counter() - done["seconds"]
    for number in range(done["next"], numbers.stop):
        config = (draw_later if later else draw)(seed, number)
        real = bool(config.compile) and compiled < really
        compiled += real
        try:
            outcome = check(config, really=real)
        except Exception as error:  # whatever it is, it is reported
            outcome = "FAILED"
            said = f"{type(error).__name__}: {str(error).splitlines()[0][:160] if str(error) else ''}"
            command = f"python -m tests.campaign fuzz {option}--seed {seed} --only {number}"
            done["failures"].append(f"{command}  # {said} | {config}")
            print("FAILED", done["failures"][-1], flush=True)
        outcomes[f"{outcome}, compiled" if real else outcome] += 1
        if outcome in ("kink", "diverged", "zero"):
            done["special"].append(f"{number} {outcome}")
        if keep and (number + 1) % 100 == 0:
            done |= {"next": number + 1, "outcomes": dict(outcomes), "seconds": time.perf_counter() - start}
            registry.RESULTS.mkdir(exist_ok=True)
            progress.write_text(json.dumps(done), encoding="utf-8")
            print(number + 1, dict(outcomes), f"{done['seconds']:.0f} s", flush=True)
    if keep:
        progress.unlink(missing_ok=True)
    return {
        "record": name,
        "seed": seed,
        "count": len(numbers),
        "outcomes": dict(outcomes),
        "special": done["special"],
        "failures": done["failures"],
        "seconds": round(time.perf_counter() - start, 1),
    }
