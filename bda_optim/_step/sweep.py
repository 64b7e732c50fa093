r"""Plain gradient descent: a step that is one weighted sum of the gradients of both losses.

.. math:: y_{k+1} = y_k - \big[ (1 - \alpha_k) s_l \nabla_y f + \alpha_k s_u \nabla_y F \big]

The two gradients are not needed apart: one backward pass from both losses, seeded with their negative weights, gives
the whole move. A step of the lower level alone is seeded with 1, and is torch.optim.SGD to the bit.

A backward pass that is not linear in its seed (a function of the user's that clips gradients), that runs in half
precision (where a gradient times a small rate vanishes), or whose gradients must be looked at one by one (sparse ones)
is not seeded with weights: the graphs of the losses are looked through at the first step, and again where they have
another number of nodes, or end in others. A hook may do anything with a gradient too: a step in which one was
registered is not seeded with weights either.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._support.torch_private import (
    has_hooks,
    hook_number,
    recent_nodes,
    run_backward,
    sequence_number,
    takes_weighted_seed,
)
from .._support.types import Rule, Scalar, Settings
from .aggregation import is_zero
from .gradients import Grads, check_dense, check_depends, slope
from .rules.arithmetic import is_on
from .rules.sgd import SGD

_ABSENT = ("prox", "clip_norm", "clip_value")
_OFF = ("momentum", "weight_decay")
_RATES = ("lr", "upper_lr", "alpha", "maximize")
_EXACT = {torch.float32: (torch.float32, torch.complex64), torch.float64: (torch.float64, torch.complex128)}
"""The dtypes of losses that are seeded with weights, and those of the parameters that they move."""


class Weights(NamedTuple):
    """What a step is made of: ``y + lower grad f + upper grad F``, or ``y - lower grad f`` where `upper` is None."""

    lower: Scalar
    upper: Scalar | None


class Opening(NamedTuple):
    """Where the graphs of a step's losses begin: the numbers of their first node, and of the first hook on them."""

    node: int
    hook: int

    @classmethod
    def now(cls) -> Opening:
        """Return the numbers of the next node and of the next hook."""
        return cls(sequence_number(), hook_number())


def weights_of(rule: Rule, settings: Sequence[Settings]) -> Weights | None:
    """Return the weights of both gradients; None if a step is not such a sum, with the same weights in all groups."""
    first = settings[0]
    if type(rule) is not SGD or any(_differ(first[name], chosen[name]) for chosen in settings[1:] for name in _RATES):
        return None
    for chosen in settings:
        if any(chosen[name] is not None for name in _ABSENT) or any(is_on(chosen[name]) for name in _OFF):
            return None
    lr, alpha = first["lr"], first["alpha"]
    upper_lr = lr if first["upper_lr"] is None else first["upper_lr"]
    if not all(map(_is_one, (lr, alpha, upper_lr))):
        return None
    lr, alpha, upper_lr = (x.reshape(()) if isinstance(x, Tensor) else x for x in (lr, alpha, upper_lr))
    if is_zero(alpha):
        return Weights(-lr if first["maximize"] else lr, None)
    return Weights((1 - alpha if first["maximize"] else alpha - 1) * lr, -alpha * upper_lr)


def _differ(one: Any, other: Any) -> bool:
    return one is not other and (isinstance(one, Tensor | list) or isinstance(other, Tensor | list) or one != other)


def _is_one(rate: Any) -> bool:
    """Whether a rate is a single number, known or learned."""
    return rate.numel() == 1 if isinstance(rate, Tensor) else isinstance(rate, int | float)


class Sweep:
    """Takes the steps of a rollout in one backward pass each, where they are plain gradient descent.

    Args:
        rule: The rule of all groups.
    """

    def __init__(self, rule: Rule) -> None:
        """Start with nothing looked through."""
        self._rule = rule
        self._settings: Sequence[Settings] | None = None
        self._weights: Weights | None = None
        self._allowed: dict[Any, bool] = {}

    def weights(self, settings: Sequence[Settings], *, constant: bool = False) -> Weights | None:
        """Return what `weights_of` does; the same list is looked at once, unless its tensors may change.

        Gradients that count as constants have no graph, through which weights of both losses could be learned.
        """
        weights = self._weights
        if settings is not self._settings:
            weights = weights_of(self._rule, settings)
            if weights is None or not any(isinstance(weight, Tensor) for weight in weights):
                self._settings, self._weights = settings, weights
        return None if constant and weights is not None and weights.upper is not None else weights

    def moves(
        self,
        lower: Any,
        upper: Any,
        points: Sequence[Tensor],
        weights: Weights,
        k: Any,
        since: Opening,
        *,
        create_graph: bool,
        retain_graph: bool | None = None,
    ) -> Grads | None:
        """Return what a step adds to the points, or the lower gradients alone where there is no upper loss.

        Args:
            lower: The lower loss, a scalar; with tasks the losses of all tasks.
            upper: The upper loss, or None where the step does not evaluate it.
            points: The lower variables.
            weights: The weights of both gradients.
            k: The number of the step, for messages.
            since: Where the graphs of the losses begin.
            create_graph: Whether the moves can be differentiated again.
            retain_graph: Whether the graphs of the losses are kept.

        Returns:
            The moves; None where the two gradients must be taken one by one.
        """
        if upper is None:
            return slope(lower, points, "lower", k, create_graph=create_graph, retain_graph=retain_graph)
        if hook_number() != since.hook or any(map(has_hooks, points)) or not self._allows(lower, upper, points, since):
            return None
        seeds = (_seed(weights.lower, lower), _seed(weights.upper, upper))
        retain_graph = create_graph if retain_graph is None else retain_graph
        moves = run_backward((lower, upper), seeds, tuple(points), create_graph=create_graph, retain_graph=retain_graph)
        check_dense(moves, "losses", k)
        check_depends(moves, k)
        return moves

    def _allows(self, lower: Tensor, upper: Tensor, points: Sequence[Tensor], since: Opening) -> bool:
        """Whether one pass gives what two gradients would; losses that look the same are looked through once."""
        if not (lower.requires_grad and upper.requires_grad):
            return False
        nodes = sequence_number() - since.node
        look = (nodes, type(lower.grad_fn), type(upper.grad_fn), lower.dtype, upper.dtype)
        if look not in self._allowed:
            self._allowed[look] = _allows(lower, upper, points, since.node)
        return self._allowed[look]


def moved(params: Sequence[Tensor], moves: Grads, weights: Weights) -> tuple[Tensor, ...]:
    """Return the parameters after a step; a None stays where it is."""
    if weights.upper is not None:
        return tuple(y if move is None else y + move for y, move in zip(params, moves, strict=True))
    rate = weights.lower
    if isinstance(rate, Tensor):
        return tuple(y if g is None else y - rate.to(y.dtype) * g for y, g in zip(params, moves, strict=True))
    return tuple(y if g is None else torch.add(y, g, alpha=-rate) for y, g in zip(params, moves, strict=True))


def _seed(weight: Scalar | None, loss: Tensor) -> Tensor:
    if isinstance(weight, Tensor):
        return weight.to(loss.device, loss.dtype).expand(loss.shape)
    assert weight is not None
    return torch.full_like(loss, weight, requires_grad=False)


def _allows(lower: Tensor, upper: Tensor, points: Sequence[Tensor], since: int) -> bool:
    """Whether one pass with weighted seeds gives what two gradients would, by the graphs of both losses."""
    dtypes = _EXACT.get(lower.dtype, ()) if lower.dtype == upper.dtype else ()
    if not all(p.dtype in dtypes for p in points):
        return False
    ends = {p.grad_fn for p in points} - {None}
    ours = {id(p) for p in points}
    reached = False
    for loss in (lower, upper):
        for node in recent_nodes(loss.grad_fn, since, ends):
            if node in ends or id(getattr(node, "variable", None)) in ours:
                reached = reached or loss is lower
            elif not takes_weighted_seed(node):
                return False
    return reached
