"""How a module is checked: its hypergradient by the package, by torch alone, and by differences.

A case is a module, the arguments of a call and the call. The inner loop has K = 3 steps in which both losses take part.
The judge is a central difference of a naive loop (`torch.func.functional_call`, attention in its plain form), which
needs no second derivative; the naive loop's own derivative, taken with torch's defaults, shows what torch alone gives.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.stateless import _reparametrize_module

import bda_optim as bda

STEPS, LR, UPPER_LR, WEIGHT = 3, 0.1, 0.05, 0.4
SWEEP = (1e-5, 1e-6, 1e-4, 1e-7, 1e-8, 1e-9)
TOLERANCE = 1e-7  # the demand is 1e-5; differences reach 1e-9, and torch's weight_norm is off by 7e-6 here
NAMED = (NotImplementedError, RuntimeError, ValueError, TypeError)


def numbers(*shape: int, seed: int = 1) -> Tensor:
    """Random numbers, the same in every run."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Case(NamedTuple):
    """A module, the arguments of a call, the call; and what must become of it."""

    make: Callable[[], nn.Module]
    args: Callable[[], tuple[Any, ...]] = lambda: (numbers(4, 3),)
    call: Callable[..., Any] = lambda net, *args: net(*args)
    refused: str = ""  # a part of the message, where an error is right
    own_loop: bool = True  # whether the user's own loop gives the same
    by_hand: Callable[..., Any] | None = None  # the call as a formula of (params, *args), where functional_call fails


class Verdict(NamedTuple):
    """What became of a case."""

    package: str
    torch: str
    failure: str


class Trial:
    """A case with its two losses; three upper variables weigh the terms of the lower one."""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(3)
        self.case, self.module = case, case.make().double()
        self.args = case.args()
        self.hyper = torch.tensor([1.0, 0.3, 0.1], dtype=torch.float64, requires_grad=True)
        self.direction = torch.tensor([0.5, -0.8, 0.33], dtype=torch.float64)

    def _out(self, net: Any) -> Tensor:
        out = self.case.call(net, *self.args)
        while isinstance(out, tuple):
            out = out[0]
        return out.real if out.is_complex() else out

    def lower(self, net: Any, hyper: Tensor, batch: Any = None) -> Tensor:
        out = self._out(net)
        return hyper[0] * (out - 0.3).square().mean() + hyper[1] * out.sin().mean() + hyper[2] * out.mean()

    def upper(self, net: Any, hyper: Tensor, batch: Any = None) -> Tensor:
        out = self._out(net)
        return (out + 0.1 * out.square()).square().mean() + 0.1 * hyper.prod()

    def package(self, adjoint: Any, style: str = "unroll") -> tuple[Tensor, Tensor]:
        """F and its derivative, by the package."""
        owned = [p for p in self.module.parameters() if p.requires_grad]
        inner = bda.BDAInnerOptimizer(owned, lr=LR, upper_lr=UPPER_LR, alpha=bda.harmonic(WEIGHT))
        torch.manual_seed(5)
        if style == "unroll":
            net: Any = inner.unroll(self.module, self.lower, self.upper, hyper=self.hyper, steps=STEPS, adjoint=adjoint)
        else:
            with bda.innerloop_ctx(self.module, inner) as (net, diffopt):
                for _ in range(STEPS):
                    diffopt.step(self.lower(net, self.hyper), self.upper(net, self.hyper))
        value = self.upper(net, self.hyper)
        return value.detach(), torch.autograd.grad(value, self.hyper)[0]

    def naive(self, graph: bool, plain_attention: bool = True) -> Tensor:
        """F by a naive loop on a copy of the module."""
        torch.manual_seed(3)
        module = self.case.make().double()
        torch.manual_seed(5)
        module = getattr(module, "_orig_mod", getattr(module, "module", module))
        y = {n: p.detach().clone().requires_grad_() for n, p in module.named_parameters() if p.requires_grad}
        buffers = {n: b.clone() for n, b in module.named_buffers()}
        backends = [SDPBackend.MATH] if plain_attention else list(SDPBackend.__members__.values())[1:]

        def at(loss: Any, y: dict[str, Tensor], state: dict[str, Tensor]) -> Tensor:
            with sdpa_kernel(backends), torch.enable_grad():
                if self.case.by_hand is not None:
                    trial = copy.copy(self)
                    trial.case = self.case._replace(call=self.case.by_hand)
                    return getattr(trial, loss.__name__)(y, self.hyper)
                with _reparametrize_module(module, {**y, **state}, tie_weights=True):
                    return loss(module, self.hyper)

        for k in range(1, STEPS + 1):
            before = {n: b.clone() for n, b in buffers.items()}
            values = at(self.lower, y, buffers), at(self.upper, y, before)
            low, up = (
                torch.autograd.grad(v, list(y.values()), create_graph=graph, allow_unused=True, retain_graph=True)
                for v in values
            )
            a = WEIGHT / k
            y = {
                name: p - a * UPPER_LR * (0.0 if u is None else u) - (1 - a) * LR * (0.0 if g is None else g)
                for (name, p), g, u in zip(y.items(), low, up, strict=True)
            }
            if not graph:
                y = {name: p.detach().requires_grad_() for name, p in y.items()}
            buffers = {n: b.detach() for n, b in buffers.items()}
        return at(self.upper, y, {n: b.clone() for n, b in buffers.items()})

    def differences(self) -> list[float]:
        """The derivative along a direction, for every step of a sweep."""
        found = []
        for h in SWEEP:
            ends = []
            for sign in (1, -1):
                with torch.no_grad():
                    self.hyper.add_(sign * h * self.direction)
                ends.append(float(self.naive(graph=False).detach()))
                with torch.no_grad():
                    self.hyper.sub_(sign * h * self.direction)
            found.append((ends[0] - ends[1]) / (2 * h))
            if h == SWEEP[1] and abs(found[0] - found[1]) <= 1e-7 * (abs(found[0]) + 1e-3):
                break  # both agree, so they are right
        return found

    def error(self, gradient: Tensor, slopes: list[float]) -> float:
        """How far a gradient is from the best of the differences, relative to its own norm."""
        slope = float(gradient @ self.direction)
        if slope != slope:
            return float("inf")
        return min(abs(slope - s) for s in slopes) / max(float(gradient.norm()), 1e-6)


def judge(case: Case, *, others: bool = False) -> Verdict:
    """Try a case; `others`: also with the other exact adjoints and in the user's own loop."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trial = Trial(case)
        try:
            value, gradient = trial.package(None)
        except NAMED as error:
            said = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            expected = bool(case.refused) and case.refused in str(error)
            failure = "" if expected else f"refused with {said!r}, expected {case.refused!r}"
            return Verdict(f"refused ({said[:60]}...)", _torch_alone(trial), failure)
        slopes = trial.differences()
        error = trial.error(gradient, slopes)
        right = error <= TOLERANCE and abs(value - trial.naive(graph=False)) <= 1e-9 * (1 + abs(value))
        failure = "" if right else f"WRONG by {error:.1e}"
        if case.refused:
            failure = f"not refused, although {case.refused!r} is due (off by {error:.1e})"
        for how in (bda.Checkpointed(), bda.ForwardMode(), "own loop") if others and not failure else ():
            own = how == "own loop"
            if own and not case.own_loop:
                continue
            try:
                _, other = trial.package(None if own else how, "loop" if own else "unroll")
            except NAMED:  # `ForwardMode` and replays may refuse what `Unroll` can do
                continue
            if (other - gradient).norm() > 1e-7 * (gradient.norm() + 1e-3):
                failure = f"{how} differs by {float((other - gradient).norm()):.1e}"
        return Verdict(
            f"right ({error:.0e})" if right else f"WRONG ({error:.0e})", _torch_alone(trial, slopes), failure
        )


def _torch_alone(trial: Trial, slopes: list[float] | None = None) -> str:
    """What the naive loop with torch's defaults gives."""
    try:
        value = trial.naive(graph=True, plain_attention=False)
        gradient = torch.autograd.grad(value, trial.hyper)[0]
        error = trial.error(gradient, slopes or trial.differences())
    except Exception as error:
        return f"raises {type(error).__name__}"
    return "right" if error <= TOLERANCE else f"silently off by {error:.0e}"


def run_all(cases: dict[str, Case], *, others: bool) -> tuple[dict[str, Verdict], list[str]]:
    """Judge all cases; return the verdicts and the failures."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        found = {name: judge(case, others=others) for name, case in cases.items()}
    finally:
        torch.set_default_dtype(before)
    return found, [f"{name}: {verdict.failure}" for name, verdict in found.items() if verdict.failure]


def result(cases: dict[str, Case], part: str, *, others: bool) -> dict[str, Any]:
    """Judge all cases, and count."""
    found, failures = run_all(cases, others=others)
    count = {
        "right": sum(v.package.startswith("right") for v in found.values()),
        "refused": sum(v.package.startswith("refused") for v in found.values()),
        "wrong": sum(v.package.startswith("WRONG") for v in found.values()),
        "torch alone: right": sum(v.torch == "right" for v in found.values()),
        "torch alone: raises": sum(v.torch.startswith("raises") for v in found.values()),
        "torch alone: silently wrong": sum(v.torch.startswith("silently") for v in found.values()),
    }
    width = max(map(len, found))
    lines = [f"{name:{width}}  {v.package:75}  {v.torch}" for name, v in found.items()]
    return {
        "count": len(found),
        "outcomes": count,
        "table": lines,
        "failures": [f"python -m tests.campaign {part} --only '{line.split(':')[0]}'  # {line}" for line in failures],
    }


def only(cases: dict[str, Case], name: str | None) -> dict[str, Case]:
    """All cases, or the one of a name."""
    return cases if name is None else {name: cases[name]}


def row(outcome: dict[str, Any]) -> str:
    """The line of the table of parts."""
    parts = ", ".join(f"{n} {name}" for name, n in outcome["outcomes"].items())
    return f"{outcome['count']} modules: {parts}"
