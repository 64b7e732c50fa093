"""Implicit differentiation of the fixed point that an inner loop settles at."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._step.stationary import StationaryMap
from .._support import autograd_graph
from .._support.checks import check_count
from .._support.slots import Slot
from .._support.tensors import any_requires_grad, describe
from .._support.tree import detach, flatten, map_tensors, tensors
from .._support.types import Item
from .base import Items, Result, Step, as_step
from .carry import Carry
from .fixed_point import FixedPoint, no_influence
from .node import without_graph
from .storage import Ledger

SOLVERS = ("auto", "minres", "gmres", "neumann")


@dataclasses.dataclass(frozen=True)
class Implicit:
    r"""Differentiate the fixed point of the aggregated step: memory and backward pass do not depend on K.

    `limit` counts the products with the derivative of one step that a solve may take.

    K steps run without a graph. Then y_K is taken for the fixed point of the plain map S of the step at its stationary
    rate s (with momentum ``lr (1 - dampening) / (1 - momentum)``), and the implicit function theorem gives

    .. math:: M^T v = \partial_y F, \quad G = \partial_x F + (\partial_x S)^T v, \quad
        M = I - \partial_y S = a s_u F_{yy} + (1 - a) s f_{yy}

    without a prox. A lower Hessian that is singular does no harm if the weight a is positive. One recorded step serves
    all products. Against the derivative of the optimistic value function the bias is O(a), plus what y_K lacks to the
    fixed point; `settle` removes the latter. Initial parameters have no influence, and buffers count as constants.

    Not recommended for few steps, because y_K is then far from the fixed point (a warning says so), nor where the
    initialisation is to be learned or batches differ much from step to step.

    References: Rajeswaran et al., "Meta-Learning with Implicit Gradients", NeurIPS 2019; Lorraine et al., "Optimizing
    Millions of Hyperparameters by Implicit Differentiation", AISTATS 2020; Paige & Saunders, "Solution of Sparse
    Indefinite Systems of Linear Equations", SIAM J. Numer. Anal. 1975.

    Args:
        alpha: The weight a of the map; None for that of step K.
        solver: "minres" (M symmetric), "gmres" (any M; 30 vectors), "neumann" (a truncated series; not recommended), or
            "auto", which takes MINRES without a prox and where all groups weight both levels alike, else GMRES.
        tol: The largest ``|b - M^T v| / |b|``; None for 1e-6, in float32 1e-4. More is an error. With ``math.inf``
            exactly `limit` products are taken and their result is returned, biased by about its residual.
        limit: The largest number of products in a solve, without those that compute its first and its last residual.
        settle: The largest number of Newton steps from y_K to the fixed point; y_K becomes that point.
        batch: The data of the map, required where the batches of the steps differ.
        carry: A `Carry`, which keeps v for the next solve to start from, and shows what was met.

    >>> import bda_optim as bda
    >>> lower = lambda y, x, b: 0.5 * y[0] ** 2 - x * y[0]
    >>> upper = lambda y, x, b: 0.5 * (x - y[1]) ** 2 + 0.5 * (y[0] - 1) ** 2
    >>> y0, x = torch.tensor([2.0, 2.0], dtype=torch.float64), torch.tensor(3.0, dtype=torch.float64)
    >>> settings = dict(steps=256, lr=0.2, upper_lr=0.7, alpha=bda.harmonic(0.5))
    >>> round(bda.hypergradient(lower, upper, y0, x, adjoint=bda.Implicit(), **settings).grad.item(), 4)
    1.9727
    """

    alpha: float | None = None
    solver: str = "auto"
    tol: float | None = None
    limit: int = 100
    settle: int = 0
    batch: Any = dataclasses.field(default=None, compare=False, repr=False)
    carry: Carry | None = dataclasses.field(default=None, compare=False)

    def __post_init__(self) -> None:
        """Check the options."""
        if self.alpha is not None and not (_is_number(self.alpha) and 0 <= self.alpha < 1):
            raise ValueError(
                f"`alpha` of `Implicit` must be a number in [0, 1), or None for that of the last step; got "
                f"{self.alpha!r}. To learn it, pass it to the inner loop."
            )
        if self.solver not in SOLVERS:
            names = ", ".join(f'"{name}"' for name in SOLVERS)
            raise ValueError(f"`solver` must be one of {names}; got {self.solver!r}.")
        if self.tol is not None and not (_is_number(self.tol) and self.tol > 0):
            raise ValueError(f"`tol` must be a positive number; got {self.tol!r}. Leave it out for 1e-6.")
        object.__setattr__(self, "limit", check_count("limit", self.limit))
        if not isinstance(self.settle, int) or isinstance(self.settle, bool) or self.settle < 0:
            raise ValueError(f"`settle` must be a whole number of at least 0; got {self.settle!r}. Pass an integer.")
        if self.carry is not None and not isinstance(self.carry, Carry):
            raise TypeError(f"`carry` must be a `Carry`; got {type(self.carry).__name__}. Use `carry=bda.Carry()`.")

    def __call__(self, step: Any, state: Any, hyper: tuple[Tensor, ...], items: Items) -> Result:
        """Run the steps without a graph, then attach the derivative of the fixed point to the last iterate."""
        step = as_step(step)
        wanted = any_requires_grad((state, hyper))
        if not wanted and not self.settle:
            return without_graph(step, state, hyper, step.units(items))
        anchors = _anchors(state, hyper) if wanted else []
        item = self._item(items, hyper)
        start = step.stationary(detach(state), hyper, item, self.alpha)
        self._check(start)  # before the loop runs
        state, records = _swept(step, detach(state), hyper, items)
        still = step.stationary(state, hyper, item, self.alpha)
        point = FixedPoint(
            still, hyper, item, solver=self.solver, tol=self._tolerance(still), limit=self.limit, carry=self.carry,
            start=start.params, names=step.names,
        )  # fmt: skip
        point.settle(self.settle)
        if not wanted:
            return still.replaced([p.detach() for p in point.params]), records
        point.refuse_unused(anchors)
        return still.replaced(point.attached(hyper)), records

    def _item(self, items: Items, hyper: Sequence[Tensor]) -> Any:
        """Return the item of the map: that of step K, with `batch` if it is given."""
        if self.batch is not None:
            place = {id(h): i for i, h in enumerate(hyper)}
            slots = map_tensors(lambda t: Slot(place[id(t)]) if id(t) in place else t, self.batch)
            return Item(getattr(items, "first_k", 1) + len(items) - 1, slots)
        if not getattr(items, "eager", True):
            raise ValueError(
                "`Implicit` differentiates one map, and a sequence that makes its batches when they are asked for may "
                "make a different one each time; got batches that are no list or tuple. Pass the data of the map as "
                "`Implicit(batch=...)`."
            )
        last = items[len(items) - 1]
        for number, item in enumerate(items):
            if not _same(getattr(item, "batch", None), getattr(last, "batch", None)):
                raise ValueError(
                    "`Implicit` differentiates one map, and every batch has a map of its own; got batches that differ, "
                    f"those of steps k={number + 1} and k={len(items)}. Pass the data of the map (all data, if that is "
                    "possible) as `Implicit(batch=...)`, or use `Checkpointed()`."
                )
        return last

    def _check(self, still: StationaryMap) -> None:
        """Raise where the options, or what they are applied to, leave nothing to solve."""
        for p in still.params:
            if p.dtype in (torch.float16, torch.bfloat16):
                raise ValueError(
                    "`Implicit` solves a linear system, for which the three digits of half precision do not suffice; "
                    f"got parameters of {describe(p)}. Use float32 parameters, or `Checkpointed()`."
                )
        if self.solver == "minres" and still.rates is None:
            raise ValueError(
                "MINRES solves symmetric systems, which a prox, or groups that weight the two levels differently, "
                'make unsymmetric; got solver="minres". Use solver="gmres" or "auto".'
            )
        for t in tensors(self.batch):
            if still.tasks is not None and (t.dim() == 0 or t.shape[0] != still.tasks):
                raise ValueError(
                    f"with tasks={still.tasks} every tensor of `Implicit(batch=...)` has a leading dimension of that "
                    f"size; got one of shape {tuple(t.shape)}. Stack the tasks' tensors, and leave `chunk_size` out."
                )

    def _tolerance(self, still: StationaryMap) -> float:
        if self.tol is not None:
            return self.tol
        return 1e-6 if all(p.real.dtype == torch.float64 for p in still.params) else 1e-4


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _swept(step: Step, state: Any, hyper: tuple[Tensor, ...], items: Items) -> Result:
    """Run all steps without a graph."""
    units = step.units(items)
    ledger = Ledger(len(units))
    with torch.no_grad():
        for unit in units:
            state, record = step(state, hyper, unit)
            ledger.append(record)
    return state, ledger.records()


def _same(batch: Any, other: Any) -> bool:
    """Whether two batches consist of the same objects, or of equal plain values."""
    if batch is other:
        return True
    leaves, shape = flatten(batch)
    others, other_shape = flatten(other)
    if len(leaves) != len(others) or repr(shape) != repr(other_shape):
        return False
    plain = (bool, int, float, str, Slot)
    pairs = zip(leaves, others, strict=True)
    return all(a is b or (isinstance(a, plain) and type(a) is type(b) and a == b) for a, b in pairs)


def _anchors(state: Any, hyper: Sequence[Tensor]) -> list[int]:
    """Return which tensors of `hyper` the initial parameters are copies of; raise if they require grad otherwise."""
    origins = []
    for t in tensors(state):
        if t.requires_grad:
            origin = _origin(t, hyper)
            if origin is None:
                raise ValueError(no_influence(t))
            origins.append(origin)
    return origins


def _origin(t: Tensor, hyper: Sequence[Tensor]) -> int | None:
    """Return which tensor of `hyper` has the values of `t` and is all that `t` depends on."""
    for i, h in enumerate(hyper):
        if t is h or (h.requires_grad and _leads_to(t, h) and _copies(t, h)):
            return i
    return None


def _leads_to(t: Tensor, h: Tensor) -> bool:
    """Whether the graph of `t` ends at `h`, and nowhere else."""
    ends = [] if h.grad_fn is None else [h.grad_fn]
    leaves = autograd_graph.leaves([t], ends)
    if h.is_leaf:
        return len(leaves) == 1 and leaves[0] is h
    following = (node for behind in autograd_graph.nodes([t], ends) for node, _ in behind.next_functions)
    return not leaves and any(node is h.grad_fn for node in following)


def _copies(t: Tensor, h: Tensor) -> bool:
    same_shape = t.shape[t.dim() - h.dim() :] == h.shape
    return same_shape and torch.equal(t.detach(), h.detach().to(t.dtype).expand_as(t))
