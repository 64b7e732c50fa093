"""Random configurations, really compiled, against a naive loop.

The configurations are those of `draw.py` that a compiled rollout can take. Each runs twice: the first rollout compiles,
measures and compares, the second one finds programs, numbers and plans again. F, y_K and the hypergradient of both must
equal those of `naive.unroll` leaf by leaf. (The part `fuzz` compares the same configurations with differences.)

A configuration counts as compiled if its programs ran: where the package fell back to uncompiled steps, with a warning
that says why, it is listed by number and reason.

What one costs is nearly all Inductor and the C++ compiler: 25 ms per operation. So one step makes a call, or two in
every fourth configuration, and a step that has with its pull-back more than `LARGEST` operations is left out: three of
four.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import json
import subprocess
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from bda_optim._compiled import cache, program, programs
from bda_optim._compiled.functional import functional

from . import fuzz, naive, package, registry
from .draw import Config, draw
from .problem import Problem

BOUNDED_SEED, BOUNDED = 3, 4  # what the ordinary tests run
LARGEST = 300  # operations of a call with its pull-back
EVERY = 5  # configurations, after which progress is written


def draw_compiled(seed: int, number: int) -> Config | None:
    """Return the configuration of a number, to be compiled; None if that cannot be done."""
    config = draw(seed, number)
    if config.style == "innerloop" or config.adjoint == "Guarded" or config.spoil:
        return None
    return dataclasses.replace(config, compile="trace", dtype="float64", chunk=None)


class TooLarge(BaseException):
    """Takes longer to compile than it is worth; passes by those who catch what cannot be compiled."""


def _within(graph: Any, largest: float) -> Any:
    if sum(node.op == "call_function" for node in graph.graph.nodes) > largest:
        raise TooLarge
    return graph


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    """Stop at what is too large: when a step alone is traced, which comes first, or its call with the pull-back."""

    def step(function: Any, inputs: Any) -> Any:
        graph, result = program.trace(function, inputs)
        return _within(graph, 0.4 * LARGEST), result

    def call(graph: Any, inputs: Any) -> Any:
        return functional(_within(graph, LARGEST), inputs)

    with mock.patch.object(programs, "trace", step), mock.patch.object(program, "functional", call):
        yield


def check(config: Config) -> str:
    """Try one configuration; return what became of it, or raise `fuzz.Wrong`."""
    cache._engines.clear()
    steps = 1 if config.number % 4 else 2
    with (
        warnings.catch_warnings(record=True) as caught,
        mock.patch.object(programs, "_MOST_STEPS", steps),
        _limited(),
    ):
        warnings.simplefilter("always")
        try:
            outcome = _check(config)
        except TooLarge:
            return "large"
    engines = [engine for family in cache._engines.values() for engine in family.values()]
    cache._engines.clear()
    if outcome != "right":
        return outcome
    if any(engine.broken for engine in engines):
        said = [str(w.message) for w in caught if str(w.message).startswith("compile=True")]
        return f"uncompiled: {said[0][:100] if said else 'no reason given'}"
    ran = any(engine.programs or any(engine.pairs.values()) for engine in engines)
    return "compiled" if ran else "uncompiled: fewer steps than a call takes"


def _check(config: Config) -> str:
    problem = Problem(config, torch.float64)
    fuzz._seed(config)
    value, ends = naive.unroll(problem, naive.Tape())
    if not value.isfinite() or value.abs() > fuzz.HUGE or max(fuzz._size(e) for e in ends) > fuzz.HUGE:
        return "diverged"
    want = package.derivatives(value, list(problem.leaves.values()))
    how = package.adjoint(problem)
    for turn in ("first", "second"):
        fuzz._seed(config)
        found, got, states = package.gradients(problem, how)
        try:
            fuzz._compare(f"F of the {turn} rollout", [found], [value], problem.tolerance)
            for task, (mine, theirs) in enumerate(zip(states, ends, strict=True)):
                names = list(theirs)
                what = f"y_K of task {task}, {turn} rollout"
                fuzz._compare(what, [mine[n] for n in names], [theirs[n] for n in names], problem.tolerance)
            for name, mine, theirs in zip(problem.leaves, got, want, strict=True):
                what = f"the derivative by {name!r}, {turn} rollout"
                fuzz._compare(what, [mine], [theirs], problem.tolerance, 0.1 * fuzz._norm(want))
        except fuzz.Wrong:
            if fuzz._rounding_decides(config, float(value)):
                return "kink"
            raise
    return "right"


# The campaign.


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=500, help="how many configurations must have been compiled")
    parser.add_argument("--only", type=int, help="the number of a single configuration")
    parser.add_argument("--resume", action="store_true", help="go on where an interrupted run stopped")
    parser.add_argument("--minutes", type=float, default=1e9, help="stop then, and report what was done")


def run(args: argparse.Namespace) -> registry.Result:
    if args.only is not None:
        print(draw_compiled(args.seed, args.only))
        return _campaign(args.seed, 1, first=args.only)
    return _campaign(args.seed, args.count, keep=True, resume=args.resume, minutes=args.minutes)


def smoke() -> registry.Result:
    return _campaign(BOUNDED_SEED, BOUNDED)


def row(result: registry.Result) -> str:
    parts = ", ".join(f"{n} {name}" for name, n in sorted(result["outcomes"].items(), key=lambda item: -item[1]))
    return f"{result['count']} configurations: {parts}"


def _campaign(
    seed: int, wanted: int, *, first: int = 0, keep: bool = False, resume: bool = False, minutes: float = 1e9
) -> registry.Result:
    """Go through the list until so many configurations were compiled, or the time is up."""
    progress = registry.RESULTS / "compiled.part"
    done: dict[str, Any] = {"next": first, "count": 0, "outcomes": {}, "special": [], "failures": [], "seconds": 0.0}
    if resume and progress.exists():
        done = json.loads(progress.read_text(encoding="utf-8"))
    outcomes = collections.Counter(done["outcomes"])
    start, before = time.perf_counter(), done["seconds"]
    while outcomes["compiled"] + outcomes["FAILED"] < wanted and time.perf_counter() - start < 60 * minutes:
        number = done["next"]
        done["next"] += 1
        config = draw_compiled(seed, number)
        if config is None:
            if first:
                break
            continue
        outcome = _tried(config, done)
        done["count"] += 1
        outcomes[outcome.split(":")[0]] += 1
        if outcome not in ("compiled", "large"):
            done["special"].append(f"{number} {outcome}")
        done |= {"outcomes": dict(outcomes), "seconds": round(before + time.perf_counter() - start, 1)}
        if keep and done["count"] % EVERY == 0:
            progress.write_text(json.dumps(done), encoding="utf-8")
            print(done["next"], dict(outcomes), f"{done['seconds']:.0f} s", flush=True)
        if first:
            break
    if keep:
        progress.unlink(missing_ok=True)
    return {"seed": seed, "commit": _commit(), **done}


def _tried(config: Config, done: dict[str, Any]) -> str:
    try:
        return check(config)
    except Exception as error:  # whatever it is, it is reported
        said = f"{type(error).__name__}: {str(error).splitlines()[0][:160] if str(error) else ''}"
        command = f"python -m tests.campaign compiled --seed {config.seed} --only {config.number}"
        done["failures"].append(f"{command}  # {said} | {config}")
        print("FAILED", done["failures"][-1], flush=True)
        return "FAILED"


def _commit() -> str:
    """The commit that was tried, if there is one."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    found = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return found.stdout.strip()
