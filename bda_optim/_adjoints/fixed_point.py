"""The linear systems of a fixed point: Newton steps to it, and the cotangents that come back from it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._context.environment import Ambient
from .._step.stationary import StationaryMap, shown
from .._support import autograd_graph
from .._support.checks import user_level
from .._support.tensors import describe
from .._support.torch_private import version_of
from .._support.tree import tensors
from . import krylov
from .base import Cotangents, changed_in_place, refuse_captured
from .carry import Carry
from .linear_solve import HARMLESS, Solution, Vector, combined, norm
from .linearised import Linearised


class FixedPoint:
    """A point that counts as the fixed point of a map, and the derivative of that point.

    Args:
        still: The map.
        hyper: The upper variables.
        item: The data of the map.
        solver: "auto", "minres", "gmres" or "neumann".
        tol: The largest relative residual.
        limit: The largest number of products.
        carry: Where a solve starts, and reports to; or None.
        start: The parameters before the loop.
        names: What messages call the tensors of `hyper`.
    """

    def __init__(
        self, still: StationaryMap, hyper: Sequence[Tensor], item: Any, *, solver: str, tol: float, limit: int,
        carry: Carry | None, start: Sequence[Tensor], names: Sequence[str],
    ) -> None:  # fmt: skip
        """Record the map at the last iterate."""
        self._still = still
        self._given = hyper
        self._tol = tol
        self._limit = limit
        self._carry = carry
        self._symmetric = still.rates is not None and solver in ("auto", "minres")
        self._solver = ("minres" if self._symmetric else "gmres") if solver == "auto" else solver
        self._names = list(names) or [f"hyper[{i}]" for i in range(len(hyper))]
        self._batch = [(t, version_of(t)) for t in tensors(item)]
        self._at = self._recorded(still.params)
        refuse_captured(self._at.outputs, [*self._at.params, *self._at.hyper])
        autograd_graph.refuse_once_differentiable(self._at.outputs)
        self._travelled = norm(self._packed([a - b for a, b in zip(still.params, start, strict=True)]))
        self._rates = self._packed_rates()

    @property
    def params(self) -> list[Tensor]:
        """The point, detached."""
        return [p.detach() for p in self._at.params]

    def refuse_unused(self, anchors: Sequence[int]) -> None:
        """Raise where the map does not depend on a tensor of hyper that the initial parameters are copies of."""
        used = {id(leaf) for leaf in autograd_graph.leaves(self._at.outputs)}
        for i in anchors:
            if id(self._at.hyper[i]) not in used:
                raise ValueError(no_influence(self._given[i]))

    def settle(self, steps: int) -> None:
        """Take Newton steps until the map no longer moves the point, each as long as it brings that nearer."""
        for _ in range(steps):
            moved = norm(self._at.value)
            size = norm(self._packed(self.params))
            far = moved > 8 * torch.finfo(self._at.value[0].dtype).eps * size
            if not bool(far.any()) or not bool(torch.isfinite(moved).all()):
                return
            if not self._newton_step(moved):
                return

    def _newton_step(self, moved: Tensor) -> bool:
        """Try ``y - t M^-1 R`` with t = 1, 1/2, ... for each task; return whether one of them came nearer."""
        direction = self._newton_direction()
        start = self._packed(self.params)
        length = torch.ones_like(moved)
        accepted = torch.zeros_like(moved, dtype=torch.bool)
        best = self._at
        for _ in range(_HALVINGS):
            there = combined(start, direction, -length)
            trial = self._recorded(self._at.packing.tensors(there))
            accepted = norm(trial.value) < moved
            if bool(accepted.all()):
                best = trial
                break
            length = torch.where(accepted, length, length / 2)
        else:
            length = torch.where(accepted, length, 0.0)
            if bool(accepted.any()):
                best = self._recorded(self._at.packing.tensors(combined(start, direction, -length)))
        self._at = best
        return bool(accepted.any())

    def _newton_direction(self) -> Vector:
        """Return ``M^-1 R``, to three digits."""
        at = self._at
        if self._still.rates is None:
            return krylov.gmres(at.push, at.value, tol=_NEWTON, limit=self._limit, transposed=at.pull).vector
        return krylov.minres(self._symmetric_product, self._divided(at.value), tol=_NEWTON, limit=self._limit).vector

    def attached(self, hyper: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the point, differentiable in `hyper`."""
        leaves: tuple[Tensor, ...] = _Attached.apply(self, *hyper)  # type: ignore[no-untyped-call]
        return leaves

    def pull(self, cotangents: Cotangents) -> Cotangents:
        """Return ``(dS/dx)^T v`` with ``M^T v = b``, b being the cotangents of the point."""
        for tensor, before in self._batch:
            if version_of(tensor) != before:
                raise RuntimeError(changed_in_place("a tensor of the batch", tensor))
        b = self._packed(cotangents)
        if not all(bool(torch.isfinite(t).all()) for t in b):
            raise FloatingPointError("dF/dy is not finite at y_K. Check the upper loss for log(0) or 0/0.")
        start = None if self._carry is None else self._carry.start(self._at.params)
        solution = self._solved(b, None if start is None else self._packed(start))
        refuse(solution, self._tol, self._limit, self._solver, self._still.weights)
        v = self._divided(solution.vector) if self._symmetric else solution.vector
        if not all(bool(torch.isfinite(t).all()) for t in v):
            raise FloatingPointError("the solution v of M^T v = dF/dy overflows. Scale the upper loss down.")
        self._report(solution, v)
        return [None if g is None else -g for g in self._at.pull_to_hyper(v)]

    def _solved(self, b: Vector, start: Vector | None) -> Solution:
        options: dict[str, Any] = dict(tol=self._tol, limit=self._limit)
        if self._solver == "gmres":
            return krylov.gmres(self._at.pull, b, start, transposed=self._at.push, **options)
        if self._solver == "neumann":
            return krylov.neumann(self._at.pull, b, start, **options)
        if start is not None and self._rates is not None:
            start = [t * r for t, r in zip(start, self._rates, strict=True)]
        return krylov.minres(self._symmetric_product, b, start, **options)

    def _symmetric_product(self, w: Vector) -> Vector:
        """Return ``M^T D^-1 w``: M is the diagonal D of relative rates times a symmetric matrix."""
        return self._at.pull(self._divided(w))

    def _divided(self, vector: Vector) -> Vector:
        if self._rates is None:
            return vector
        return [t / r for t, r in zip(vector, self._rates, strict=True)]

    def _packed(self, values: Sequence[Tensor | None]) -> Vector:
        return self._at.packing.vector(values)

    def _packed_rates(self) -> Vector | None:
        """Return D as a vector; None if it is the identity."""
        rates = self._still.rates
        if rates is None or all(bool((r == 1).all()) for r in rates):
            return None
        wide = [r.to(p.device, p.real.dtype).expand(p.shape) for r, p in zip(rates, self._still.params, strict=True)]
        doubled = [torch.complex(r, r) if p.is_complex() else r for r, p in zip(wide, self._still.params, strict=True)]
        return self._packed(doubled)

    def _recorded(self, params: Sequence[Tensor]) -> Linearised:
        """Evaluate the map with a graph; it must not draw random numbers, since each step would have other ones."""
        ambient = Ambient(params)
        before = ambient.rng()
        at = Linearised(self._still.displacement, params, self._given, self._still.tasks)
        if ambient.has_drawn(since=before):
            ambient.set_rng(before)
            raise ValueError(
                "`Implicit` differentiates one map, and a loss that draws random numbers (dropout) is another one in "
                "each step; got a step that drew some. Put the module into `eval()`, or use `Checkpointed()`."
            )
        return at

    def _report(self, solution: Solution, v: Vector) -> None:
        """Write to the carry, and warn if the point may be far from the fixed point."""
        carry = self._carry
        moved = norm(self._at.value)
        low = solution.low
        high = solution.high
        if carry is not None and bool(low.isnan().all()):  # the carried solution was good enough
            low = torch.full_like(low, carry.low)
            high = torch.full_like(high, carry.high)
        distance = torch.where(moved == 0, 0.0, norm(self._divided(self._at.value)) / low.clamp(min=0.0))
        if carry is not None:
            carry.v = [t.detach() for t in self._at.packing.tensors(v)]
            carry.iterations = solution.products
            carry.residual = float(solution.residual.max())
            carry.moved = float(moved.max())
            carry.low = float(low.min())
            carry.high = float(high.max())
            carry.distance = float(distance.max())
        self._warn(distance)

    def _warn(self, distance: Tensor) -> None:
        size = norm(self._packed(self.params))
        # A loop that came a million times nearer than it started has converged, even if to 0.
        far = (distance > 0.1 * size) & (distance > 1e-6 * self._travelled)
        if bool(far.any()):
            worst = int(torch.where(far, distance / size, 0.0).argmax())
            warnings.warn(
                "y_K may be far from the fixed point that `Implicit` differentiates: the estimated distance is "
                f"{float(distance[worst]):.2g}, and |y_K| is {float(size[worst]):.2g}. Take more steps, or let Newton "
                "steps follow: `Implicit(settle=8)`.",
                RuntimeWarning,
                stacklevel=user_level(),
            )


_NEWTON = 1e-3
"""The residual of a Newton step's system: eight steps gain 24 digits on a quadratic problem."""

_HALVINGS = 10
"""How often a Newton step is halved until it comes nearer."""


def refuse(solution: Solution, tol: float, limit: int, solver: str, weights: Sequence[Any]) -> None:
    """Raise where a solve did not end with a solution."""
    worst = float(solution.residual.max())
    if not bool(torch.isfinite(solution.residual).all()) or (solver == "neumann" and worst >= 1e3):
        if solver == "neumann":
            raise RuntimeError(
                "the Neumann series diverges: the plain map does not contract at its stationary rate, which momentum "
                f'raises; got a residual of {worst:.2g} after {solution.products} products. Use solver="minres".'
            )
        raise FloatingPointError("a product with the derivative of the step is not finite at y_K. Lower `lr`.")
    eps = max(torch.finfo(t.dtype).eps for t in solution.vector)
    if solver == "minres" and bool((solution.low < -(eps**0.5) * solution.high.abs()).any()):
        raise RuntimeError(
            "y_K is no minimum: the map has negative curvature there; got eigenvalues of M from "
            f"{float(solution.low.min()):.2g} to {float(solution.high.max()):.2g}. Take more steps, or start "
            "elsewhere; if the lower level is not convex, use `Checkpointed()`."
        )
    lost = solution.stalled & (solution.residual > HARMLESS)
    if bool(lost.any()):
        share = float(solution.residual[lost].max())
        alphas = ", ".join(sorted({shown(a) for a in weights}))
        raise RuntimeError(
            f"a share of {share:.2f} of dF/dy lies where the map does not contract: there the lower level leaves y "
            f"open, and its fixed point is that of the start; got a residual that stalls at {share:.2f} with "
            f"alpha={alphas}. Use `alpha` > 0 in the loop, as `alpha=harmonic(0.5)`, or `Implicit(alpha=1e-3)`, "
            "so that the upper level chooses y."
        )
    if math.isfinite(tol) and bool(((solution.residual > tol) & ~solution.stalled).any()):
        raise RuntimeError(
            f"the solve for dF/dy did not converge: its residual is {worst:.2g} after {solution.products} products, "
            f"and tol={tol:g}. Raise `limit` (now {limit}) or `alpha`; if the losses compute in reduced precision, "
            f"raise `tol`; or take `tol=math.inf` for what {limit} products give."
        )


def no_influence(tensor: Tensor) -> str:
    """Say that initial parameters have no implicit derivative."""
    return (
        "a fixed point does not depend on where the loop started, so `Implicit` gives initial parameters no gradient; "
        f"got some that require grad, {describe(tensor)}. Use `copy_initial_weights=True` (or detach them); put them "
        "into `hyper` as the anchor of a term |y - x|^2 of the lower loss; or use `Checkpointed()`."
    )


class _Attached(torch.autograd.Function):
    """The fixed point as one node of the graph: ``_Attached.apply(point, *hyper)``."""

    @staticmethod
    def forward(ctx: Any, point: FixedPoint, *hyper: Tensor) -> tuple[Tensor, ...]:
        """Return the point."""
        ctx.point = point
        ctx.hyper = hyper
        ctx.versions = [version_of(h) for h in hyper]
        ctx.save_for_backward(*hyper)
        ctx.set_materialize_grads(False)
        return tuple(p.clone() for p in point.params)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        """Solve."""
        point: FixedPoint = ctx.point
        for name, tensor, before in zip(point._names, ctx.hyper, ctx.versions, strict=True):
            if version_of(tensor) != before:
                raise RuntimeError(changed_in_place(name, tensor))
        _ = ctx.saved_tensors  # a second backward without retain_graph raises here
        if torch.is_grad_enabled():
            raise RuntimeError(
                "`Implicit` gives no second derivative of the hypergradient; got create_graph=True. "
                "Use `Unroll()` or `Checkpointed()`."
            )
        return None, *point.pull(list(cotangents))
