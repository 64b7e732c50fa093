"""A transformation of torchopt as a rule."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..._support.checks import user_level
from ..._support.tree import detach, flatten, tensors, unflatten
from ..._support.types import Move, Rule, RuleState, Settings
from .base import read_only
from .sgd import SGD


class _Form(NamedTuple):
    """What the state of a transformation looks like for given parameters."""

    kind: str
    structure: Any
    types: list[torch.dtype | type]
    needs_graph: bool  # torchopt's `register_hook` takes only gradients that require grad


@dataclass(frozen=True)
class Transformation(Rule):
    """A torchopt transformation as a rule: ``D = -u``, where u is what it makes of the gradients of a parameter group.

    Any object with ``init(params)`` and ``update(updates, state, params=, inplace=)`` is accepted if it is a pure
    function whose state keeps its structure; both are tested. The rate is the transformation's own, so `lr` is left
    out (except as the step of a prox), and alpha > 0 needs an `upper_lr`. A parameter without a gradient keeps its
    value and its state. Derivatives are those of the transformation: torchopt's Adam has NaN at zero gradients, and
    its `clip_grad_norm` treats the norm as a constant. The first use compares a derivative with differences, and warns
    where they disagree.
    """

    transformation: Any
    _forms: dict[Any, _Form] = field(default_factory=dict, init=False, repr=False, compare=False)

    defaults: ClassVar[Mapping[str, Any]] = read_only(lr=None)

    def __deepcopy__(self, memo: Any) -> Transformation:
        return self  # functions have nothing to copy, and torchopt's chains cannot be copied

    def validate(self, settings: Settings) -> None:
        """Raise where `lr`, the step of a prox, is neither a number nor a tensor."""
        SGD().validate({key: value for key, value in settings.items() if key != "lr" or value is not None})

    def init(self, params: Sequence[Tensor], settings: Settings) -> RuleState:
        """Return the leaves of the transformation's state, under the names of its parts."""
        leaves = flatten(self.transformation.init(tuple(params)))[0]
        return {self._form(params).kind: detach(leaves)}

    def update(
        self, grads: Sequence[Tensor | None], state: Any, params: Sequence[Tensor], settings: Settings
    ) -> tuple[list[Move | None], RuleState]:
        """Return one move per parameter (None if it has no gradient and stays) and the new state."""
        form = self._form(params)
        leaves = state.get(form.kind)
        if leaves is None or len(leaves) != len(form.types):
            raise ValueError(f"the transformation's state must be one of {form.kind}; got one of {', '.join(state)}.")
        before = [_restored(leaf, kind) for leaf, kind in zip(leaves, form.types, strict=True)]
        tracked = torch.is_grad_enabled()
        passed = tuple(grads)
        if form.needs_graph and not tracked:
            passed = tuple(None if g is None else g.detach().requires_grad_() for g in grads)
        with torch.set_grad_enabled(tracked or form.needs_graph):
            updates, after = self.transformation.update(
                passed, unflatten(before, form.structure), params=tuple(params), inplace=False
            )
        new = [_kept(*entry) for entry in zip(flatten(after)[0], before, leaves, strict=True)]
        moves = [None if g is None or u is None else Move(u, -1.0) for g, u in zip(grads, updates, strict=True)]
        if not tracked:
            moves, new = detach((moves, new))
        return moves, {form.kind: new}

    def _form(self, params: Sequence[Tensor]) -> _Form:
        key = tuple((p.shape, p.dtype) for p in params)
        if key not in self._forms:
            state = self.transformation.init(tuple(params))
            leaves, structure = flatten(state)
            types = [leaf.dtype if isinstance(leaf, Tensor) else type(leaf) for leaf in leaves]
            zeros = tuple(torch.zeros(shape, dtype=dtype) for shape, dtype in key)
            with torch.random.fork_rng(devices=[]):
                needs_graph = self._needs_graph(zeros)
                self._warn_of_breaks(tuple(p.double() for p in zeros))
            self._forms[key] = _Form("+".join(_parts(state)) or "no state", structure, types, needs_graph)
        return self._forms[key]

    def _needs_graph(self, params: tuple[Tensor, ...]) -> bool:
        """Update twice from the same state, and return whether the gradients must require grad.

        torchopt's momentum remembers its first call and treats it differently: the calls here come before it matters.
        """
        state = self.transformation.init(params)

        def call(graph: bool) -> Any:
            torch.manual_seed(0)
            grads = tuple(torch.ones_like(p).requires_grad_(graph) for p in params)
            with torch.set_grad_enabled(graph):
                result = self.transformation.update(grads, state, params=params, inplace=False)
            return detach(result)

        needs_graph = False
        try:
            first = call(False)
        except RuntimeError:
            needs_graph = True
            first = call(True)
        second = call(needs_graph)
        if repr(flatten(first[1])[1]) != repr(flatten(state)[1]):
            raise ValueError("a transformation's state must keep its structure; got another after an update.")
        pairs = zip(tensors(first), tensors(second), strict=True)
        if not all(torch.equal(a, b) for a, b in pairs if not a.isnan().any()):
            raise ValueError(
                "a transformation must be a pure function, so that a rollout can be replayed; got two results for the "
                "same arguments, as of torchopt's momentum with dampening. Use `rule=torch.optim.SGD` and its "
                "`dampening=`."
            )
        return needs_graph

    def _warn_of_breaks(self, params: tuple[Tensor, ...]) -> None:
        """Warn where the derivative of an update is not that of its values: it reads a number by `float()`, say."""
        for size in (0.1, 10.0):  # below and above a bound, if there is one
            torch.manual_seed(0)
            grads = tuple(size * torch.randn_like(p) for p in params)
            along = tuple(torch.randn_like(p) for p in params)
            weights = tuple(torch.randn_like(p) for p in params)
            with torch.enable_grad(), contextlib.suppress(RuntimeError, TypeError):
                shift = torch.zeros((), dtype=torch.float64, requires_grad=True)
                (slope,) = torch.autograd.grad(self._weighted(grads, along, shift, params, weights), shift)
                h = 1e-5 * size
                ends = [self._weighted(grads, along, shift.detach() + s * h, params, weights) for s in (1, -1)]
                quotient = (ends[0] - ends[1]).detach() / (2 * h)
                scale = self._weighted(grads, along, shift, params, grads).detach().abs() / size
                if (slope - quotient).abs() > 0.01 * (slope.abs() + quotient.abs()) + 1e-4 * scale:
                    warnings.warn(_BREAK.format(slope, quotient), stacklevel=user_level())
                    return

    def _weighted(
        self,
        grads: tuple[Tensor, ...],
        along: tuple[Tensor, ...],
        shift: Tensor,
        params: tuple[Tensor, ...],
        weights: tuple[Tensor, ...],
    ) -> Tensor:
        """Return a weighted sum of the updates from ``grads + shift * along``."""
        moved = tuple(g + shift * a for g, a in zip(grads, along, strict=True))
        updates, _ = self.transformation.update(moved, self.transformation.init(params), params=params, inplace=False)
        return torch.stack([(w * u).sum() for w, u in zip(weights, updates, strict=True)]).sum()


_BREAK = (
    "a transformation cuts the graph: the derivative of its update is {:.3g}, but differences of its values give "
    "{:.3g}, so hypergradients through it are off. torchopt's `clip_grad_norm` does that, since it reads the norm as a "
    "number; use `clip_norm=` (or `clip_value=`) of this library and a rule of torch.optim instead."
)


def _parts(state: Any) -> list[str]:
    """Return the names of the named tuples of a state that are not empty."""
    if not isinstance(state, tuple | list) or not state:
        return []
    own = [type(state).__name__] if hasattr(state, "_fields") else []
    return own + [part for entry in state for part in _parts(entry)]


def _restored(leaf: Any, kind: torch.dtype | type) -> Any:
    """Bring a leaf back to its type: loading a state_dict casts counts to the parameters' dtype."""
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.to(kind) if isinstance(kind, torch.dtype) else kind(leaf)


def _kept(leaf: Any, before: Any, given: Any) -> Any:
    """Return a leaf of the new state; a number that was given as a tensor stays a tensor.

    torchopt puts None into the state of a parameter without a gradient, which then never moves again; so the old leaf
    is kept.
    """
    leaf = before if leaf is None else leaf
    return leaf if isinstance(leaf, Tensor) or not isinstance(given, Tensor) else torch.full_like(given, leaf)
