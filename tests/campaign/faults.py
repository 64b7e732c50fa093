"""Faults: an error at any step, in any loss or gradient, forwards or backwards, leaves everything as it was."""

from __future__ import annotations

import argparse
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .state import FORMS, STEPS, Fault, Setting, differences, same, switches

PHASES = ("lower", "upper", "lower gradient", "upper gradient", "backward")


class Interrupted(BaseException):
    """Not an Exception, as KeyboardInterrupt is not."""


def out_of_memory() -> BaseException:
    """The error that torch raises when memory runs out, provoked by asking for an exabyte."""
    try:
        torch.empty(2**60, dtype=torch.uint8)
    except RuntimeError as error:
        return error.with_traceback(None)
    raise AssertionError("an exabyte was there")


ERRORS: dict[str, Callable[[], BaseException]] = {
    "ValueError": lambda: ValueError("a fault"),
    "KeyboardInterrupt": lambda: KeyboardInterrupt("a fault"),
    "OutOfMemoryError": lambda: torch.OutOfMemoryError("a fault"),
    "no memory": out_of_memory,
    "BaseException": lambda: Interrupted("a fault"),
}


class Trial:
    """A form of inner loop with its own setting, into which one fault after another is injected."""

    def __init__(self, form: str) -> None:
        self.switches = switches()  # before the library has run
        self.form, self.setting = form, Setting()
        self.want = self._run()
        self.before = self.setting.snapshot()

    def _run(self) -> list[Tensor]:
        torch.manual_seed(1)
        return FORMS[self.form](self.setting)

    def inject(self, phase: str, k: int, error: str) -> tuple[bool, list[str]]:
        """Run with a fault; return whether it was reached, and what is wrong afterwards."""
        setting = self.setting
        setting.fault = Fault(phase, k, ERRORS[error])
        raised, rng = None, None
        try:
            self._run()
        except BaseException as caught:
            raised, rng = type(caught), torch.get_rng_state()
        if not setting.fault.raised:
            return False, []
        wrong = []
        if setting.w.grad is not None:  # autograd writes it when all of it is there, which may be before the fault
            if not torch.equal(setting.w.grad, self.want[0]):
                wrong.append("a part of a gradient was written")
            setting.w.grad = None
        wrong += differences(self.before, setting.snapshot())
        if raised is not type(ERRORS[error]()):
            wrong.append(f"got {raised}")
        if self.switches != switches():
            wrong.append(f"switches: {self.switches} became {switches()}")
        if phase == "backward" and self.form != "trees" and not torch.equal(rng, setting.rng_before_backward):
            wrong.append("the random state was changed by a backward pass")
        return True, wrong

    def finish(self) -> list[str]:
        """Run without a fault: the numbers are those of the first run."""
        self.setting.fault = Fault()
        return [] if same(self._run(), self.want) else ["a run after all faults gives other numbers"]


def campaign(forms: list[str], errors: list[str]) -> dict[str, Any]:
    failures: list[str] = []
    reached: dict[str, int] = dict.fromkeys(forms, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for form, error in itertools.product(forms, errors):
            trial = Trial(form)
            command = f"python -m tests.campaign faults --forms '{form}' --errors '{error}'"
            for phase, k in itertools.product(PHASES, range(1, STEPS + 1)):
                done, wrong = trial.inject(phase, k, error)
                reached[form] += done
                failures += [f"{command} ({phase}, k={k}): {what}" for what in wrong]
            failures += [f"{command}: {what}" for what in trial.finish()]
    missed = [form for form in forms if reached[form] < len(errors) * STEPS]
    failures += [f"{form}: only {reached[form]} faults were reached" for form in missed]
    return {
        "count": sum(reached.values()), "reached": reached, "steps": STEPS, "errors": errors, "failures": failures,
    }  # fmt: skip


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--forms", nargs="+", default=list(FORMS), choices=FORMS)
    parser.add_argument("--errors", nargs="+", default=list(ERRORS), choices=ERRORS)


def run(args: argparse.Namespace) -> dict[str, Any]:
    return campaign(args.forms, args.errors)


def smoke() -> dict[str, Any]:
    return campaign(list(FORMS), ["KeyboardInterrupt"])


def row(result: dict[str, Any]) -> str:
    return (
        f"{result['count']} faults ({len(result['errors'])} kinds of errors, at each of {result['steps']} steps, in "
        f"both losses, their gradients and the backward pass; {len(result['reached'])} forms): all as before"
    )
