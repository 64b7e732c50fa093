"""Adjoints that explode: reported with their step, or clipped."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._support.tree import replace_tensors, tensors
from .base import Adjoint, Cotangents, Items, Result, Step, as_step, check_adjoint, layers
from .forward_mode import ForwardMode
from .implicit import Implicit
from .unroll import Unroll


@dataclasses.dataclass(frozen=True)
class Guarded:
    r"""Watch the adjoints :math:`\lambda_k = dF / d(\text{state after step } k)` on their way back, or clip them.

    `limit` bounds the norm of an adjoint; it counts no steps.

    Where a step is not a contraction, the adjoints may grow from step to step although all iterates are finite; the
    hypergradient is then exact but useless. With `limit` a backward pass in which the norm of an adjoint exceeds it
    (or is not finite) raises `FloatingPointError` and names the first such step on the way back. With `clip` every
    adjoint whose norm exceeds it is scaled down to it,

    .. math:: \lambda_k \leftarrow \lambda_k \min(1, c / \lVert \lambda_k \rVert).

    Not recommended unless needed: a clipped hypergradient is biased, and no longer linear in the upper loss. The
    norm is that of the whole state (with tasks: of all tasks together). Norms stay on the device and are read once,
    when the backward pass arrives at the first step.

    Args:
        within: The adjoint to be guarded; any but `ForwardMode` and `Implicit`, which have no backward sweep.
        limit: The largest norm that is not an error.
        clip: The largest norm that is passed on.

    >>> import bda_optim as bda
    >>> x = torch.tensor(1.0)
    >>> f, F = (lambda y, x, b: -0.5 * y**2 + 1e-6 * x * y), (lambda y, x, b: y)
    >>> bda.hypergradient(f, F, torch.tensor(0.0), x, steps=8, lr=9.0, adjoint=bda.Guarded(limit=1e6))
    Traceback (most recent call last):
        ...
    FloatingPointError: the adjoints exploded: ... 1e+07 at step k=1 of 8 ...
    """

    within: Adjoint = dataclasses.field(default_factory=Unroll)
    limit: float | None = None
    clip: float | None = None

    def __post_init__(self) -> None:
        """Check the options."""
        if self.limit is None and self.clip is None:
            raise ValueError("`Guarded` needs a `limit` (an error beyond it), a `clip` (a scale down to it), or both.")
        for name in ("limit", "clip"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int | float) and value > 0 and math.isfinite(value)):
                raise ValueError(f"`{name}` must be a positive number; got {value!r}.")
        check_adjoint("within", self.within)
        for inside in layers(self.within):
            if isinstance(inside, Implicit):
                raise ValueError(
                    "`Implicit` differentiates the fixed point and no step, so that there are no adjoints to guard; "
                    f"got within={self.within!r}. Use `Implicit()` alone."
                )
            if isinstance(inside, ForwardMode):
                raise ValueError(
                    "`ForwardMode` carries tangents forward and has no adjoints to guard. Use another one."
                )

    def __call__(self, step: Any, state: Any, hyper: tuple[Tensor, ...], items: Items) -> Result:
        """Hand a step to `within` whose every result passes a gate."""
        step = as_step(step)
        if not step.single:
            raise ValueError("the adjoints of compiled steps cannot be guarded; got compile=True. Use compile=False.")
        return self.within(_GatedStep(step, _Gate(self.limit, self.clip, len(items))), state, hyper, items)


class _Gate:
    """What all steps of a rollout share: the bounds, and the norms of a backward pass."""

    def __init__(self, limit: float | None, clip: float | None, steps: int) -> None:
        self._limit = limit
        self._clip = clip
        self._steps = steps
        self._norms: list[tuple[int, Tensor]] = []
        self.first: int | None = None

    def note_first(self, k: int) -> None:
        """Remember the first step, where the backward pass ends."""
        self.first = k if self.first is None else min(self.first, k)

    def pass_back(self, k: int, cotangents: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Note the norm of the adjoint after step k, and clip it."""
        present = [c for c in cotangents if c is not None]
        if not present:
            return list(cotangents)
        device = present[0].device
        norm = torch.stack([torch.linalg.vector_norm(c).double().to(device) for c in present]).norm()
        if self._limit is not None and not norm.is_meta:
            if self._norms and k >= self._norms[-1][0]:
                self._norms = []  # an earlier backward pass was interrupted
            self._norms.append((k, norm.detach()))
            if k == self.first:
                self._look(self._limit)
        if self._clip is None:
            return list(cotangents)
        scale = self._clip / norm.clamp(min=self._clip)
        return [None if c is None else c * scale.to(c.device, c.real.dtype) for c in cotangents]

    def _look(self, limit: float) -> None:
        noted, self._norms = self._norms, []
        norms = torch.stack([norm for _, norm in noted]).tolist()
        for (k, _), norm in zip(noted, norms, strict=True):
            if not norm <= limit:
                raise FloatingPointError(
                    f"the adjoints exploded: their norm is {norm:.3g} at step k={k} of {self._steps} on the way back, "
                    f"beyond limit={limit:g}; it is {norms[-1]:.3g} at k={noted[-1][0]}. Lower `lr`, differentiate "
                    "fewer steps (`Truncated(last=...)`), or clip them (`Guarded(clip=...)`), which is biased."
                )


class _GatedStep(Step):
    """A step whose new state passes a gate on the way back."""

    def __init__(self, step: Step, gate: _Gate) -> None:
        super().__init__(step)
        self._gate = gate
        self.taped = step.taped
        self.twice = step.twice
        self.keeps = step.keeps

    @property
    def repeats(self) -> bool:
        """Whether `pull` evaluates the step again."""
        again: bool = self._function.repeats
        return again

    def first_order(self) -> _GatedStep:
        """Return the same step with the gradients of both losses treated as constants."""
        return _GatedStep(self._function.first_order(), self._gate)

    def changed(self, change: Callable[[Any], Step]) -> _GatedStep:
        """Return the same gate around a changed step."""
        return _GatedStep(self._function.changed(change), self._gate)

    def __call__(self, state: Any, hyper: Sequence[Tensor], item: Any) -> tuple[Any, Any]:
        """Take the step; without a graph there is no gate."""
        after, record = self._function(state, hyper, item)
        values = tensors(after)
        moving = [i for i, value in enumerate(values) if value.requires_grad]
        if moving and torch.is_grad_enabled():
            self._gate.note_first(item.k)
            passed = _Passed.apply(self._gate, item.k, *(values[i] for i in moving))  # type: ignore[no-untyped-call]
            for i, value in zip(moving, passed, strict=True):
                values[i] = value
        return replace_tensors(after, values), record

    def record(self, state: Any, hyper: Sequence[Tensor], item: Any) -> tuple[Any, Any, Any]:
        """Take the step; its cotangents pass the gate in `pull`."""
        self._gate.note_first(item.k)
        after, record, saved = self._function.record(state, hyper, item)
        return after, record, (item.k, saved)

    def advance(self, state: Any, hyper: Sequence[Tensor], item: Any, saved: Any) -> tuple[Any, Any]:
        """Take a recorded step once more."""
        again: tuple[Any, Any] = self._function.advance(state, hyper, item, saved[1])
        return again

    def pull(
        self, state: Any, hyper: Sequence[Tensor], item: Any, cotangents: Cotangents, saved: Any = None
    ) -> Cotangents:
        """Let the cotangents pass the gate, then pull them back."""
        k, inner = (item.k, None) if saved is None else saved
        pulled: Cotangents = self._function.pull(state, hyper, item, self._gate.pass_back(k, cotangents), inner)
        return pulled


class _Passed(torch.autograd.Function):
    """The identity, whose cotangents pass a gate together."""

    @staticmethod
    def forward(ctx: Any, gate: _Gate, k: int, *values: Tensor) -> tuple[Tensor, ...]:
        ctx.gate = gate
        ctx.k = k
        ctx.set_materialize_grads(False)
        return tuple(value.view_as(value) for value in values)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.gate.pass_back(ctx.k, cotangents)
