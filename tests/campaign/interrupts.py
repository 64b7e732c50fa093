"""Interrupts: Ctrl-C at hundreds of points inside the library leaves the user's objects as they were.

Two ways. Lines: a trace function counts the lines of the library that a run passes, and raises KeyboardInterrupt at
chosen ones. Signals: a timer raises it wherever the interpreter happens to be, in the library, in torch or in the loss.
After each, the module, its buffers, flags and hooks, every `.grad` and the optimizers are the same objects with the
same values, and torch's global switches are as before. (Lines of a `finally` or an `__exit__` are left out for the
switches: an interrupt while a switch is being reset may leave it changed, as torch's own context managers do.)
"""

from __future__ import annotations

import argparse
import ast
import functools
import random
import signal
import sys
import time
import traceback
import warnings
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import bda_optim

from .state import FORMS, Setting, differences, same, switches

PACKAGE = str(Path(bda_optim.__file__).parent)


class Lines:
    """Counts the lines of the library that run, and raises KeyboardInterrupt at the line number `at` of them."""

    def __init__(self, at: int | None = None) -> None:
        self.count, self._at, self.where = 0, at, ("", 0)
        self.first: dict[tuple[str, int], int] = {}

    def _in_call(self, frame: FrameType, event: str, arg: Any) -> Any:
        return self._in_line if frame.f_code.co_filename.startswith(PACKAGE) else None

    def _in_line(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line":
            self.count += 1
            self.first.setdefault((frame.f_code.co_filename, frame.f_lineno), self.count)
            if self.count == self._at:
                self.where = frame.f_code.co_filename, frame.f_lineno
                raise KeyboardInterrupt
        return self._in_line

    def __enter__(self) -> Lines:
        self._before = sys.gettrace()  # a coverage measurement's, say
        sys.settrace(self._in_call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)


UNDOING = ("__exit__", "leave", "undo", "_undo", "undo_despite_interrupts")


@functools.cache
def tidying(path: str) -> set[int]:
    """The lines of a file that run on the way out: of `finally` and of `__exit__`."""
    found: set[int] = set()
    for node in ast.walk(ast.parse(Path(path).read_text(encoding="utf-8"))):
        bodies: list[ast.stmt] = []
        if isinstance(node, ast.Try):
            bodies = node.finalbody
        elif isinstance(node, ast.FunctionDef) and node.name in UNDOING:
            bodies = [node]
        elif isinstance(node, ast.With):  # leaving it is an event of its first line
            found.add(node.lineno)
        for body in bodies:
            found.update(range(body.lineno, (body.end_lineno or body.lineno) + 1))
    return found


class Trial:
    """A form of inner loop that is interrupted again and again."""

    def __init__(self, form: str) -> None:
        self.switches = switches()  # before the library has run
        self.form, self.setting = form, Setting()
        self.run()  # so that what is built once exists already
        self.want = self.run()
        self.before = self.setting.snapshot()

    def run(self) -> list[Any]:
        torch.manual_seed(1)
        return FORMS[self.form](self.setting)

    def points(self, most: int) -> list[int]:
        """Choose lines that a run passes: each different one once, and others in between; or fewer, spread evenly."""
        with Lines() as lines:
            self.run()
        different = sorted(lines.first.values())
        more = max(0, most - len(different))
        points = sorted({*different, *(1 + i * lines.count // more for i in range(more))})
        return points if most >= len(points) else [points[i * len(points) // most] for i in range(most)]

    def at_line(self, number: int) -> list[str]:
        tidied = False
        lines = Lines(number)
        try:
            with lines:
                self.run()
        except KeyboardInterrupt:
            path, line = lines.where
            tidied = line in tidying(path)
        return [f"line {lines.where}: {what}" for what in self.wrong(tidied)]

    def at_time(self, seconds: float) -> tuple[bool, list[str]]:
        """Interrupt by a signal; return whether it came in time, and what is wrong."""
        before = signal.signal(signal.SIGALRM, signal.default_int_handler)
        try:
            signal.setitimer(signal.ITIMER_REAL, seconds)
            self.run()
            signal.setitimer(signal.ITIMER_REAL, 0)
            came, tidied = False, False
        except KeyboardInterrupt as caught:
            path, line, *_ = traceback.extract_tb(caught.__traceback__)[-1]
            came, tidied = True, path.startswith(PACKAGE) and line in tidying(path)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        return came, self.wrong(tidied)

    def wrong(self, tidied: bool = False) -> list[str]:
        found = []
        self.setting.fault.backward = False
        if self.setting.w.grad is not None:
            if not torch.equal(self.setting.w.grad, self.want[0]):
                found.append("a part of a gradient was written")
            self.setting.w.grad = None
        found += differences(self.before, self.setting.snapshot())
        if self.switches != switches():
            if not tidied:
                found.append(f"switches: {self.switches} became {switches()}")
            reset()
        return found

    def finish(self) -> list[str]:
        return [] if same(self.run(), self.want) else ["a run after all interrupts gives other numbers"]


def reset() -> None:
    """Set torch's switches to their defaults."""
    torch.set_grad_enabled(True)
    torch.set_autocast_cache_enabled(True)
    for name in ("math", "flash", "mem_efficient", "cudnn"):
        getattr(torch.backends.cuda, f"enable_{name}_sdp")(True)
    torch.backends.mha.set_fastpath_enabled(True)
    torch._C._autograd._saved_tensors_hooks_enable()
    while torch._C._functorch.maybe_current_level() is not None:
        torch._C._functorch._vmap_decrement_nesting()
    bda_optim._context.forward._PLAIN_ATTENTION.__init__()  # type: ignore[misc]


def campaign(forms: list[str], lines: int, signals: int, seed: int) -> dict[str, Any]:
    """Interrupt each form at `lines` lines, evenly spread, and at `signals` random moments."""
    draw, failures, at_lines, at_times = random.Random(seed), [], 0, 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for form in forms:
            trial = Trial(form)
            command = f"python -m tests.campaign interrupts --forms '{form}' --seed {seed}"
            for point in trial.points(lines):
                failures += [f"{command}: {what}" for what in trial.at_line(point)]
                at_lines += 1
            start = time.perf_counter()
            trial.run()
            duration = time.perf_counter() - start
            for _ in range(signals):
                came, wrong = trial.at_time(draw.uniform(1e-4, duration))
                at_times += came
                failures += [f"{command}: signal: {what}" for what in wrong]
            failures += [f"{command}: {what}" for what in trial.finish()]
    return {
        "count": at_lines + at_times, "lines": at_lines, "signals": at_times, "forms": forms, "seed": seed,
        "failures": failures,
    }  # fmt: skip


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--forms", nargs="+", default=list(FORMS), choices=FORMS)
    parser.add_argument("--lines", type=int, default=1000, help="lines of each form")
    parser.add_argument("--signals", type=int, default=100, help="signals for each form")
    parser.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> dict[str, Any]:
    return campaign(args.forms, args.lines, args.signals, args.seed)


def smoke() -> dict[str, Any]:
    """More than 200 points; signals would come at other moments in every run."""
    return campaign(list(FORMS), 24, 0, 0)


def row(result: dict[str, Any]) -> str:
    return (
        f"KeyboardInterrupt at {result['lines']} lines of the library and by {result['signals']} signals, in "
        f"{len(result['forms'])} forms: parameters identical, nothing else changed"
    )
