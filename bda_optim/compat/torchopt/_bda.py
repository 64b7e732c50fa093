"""BDA as a torchopt transformation: `bda`, its state, and the upper gradients that travel in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torchopt import pytree
from torchopt.base import GradientTransformation

from bda_optim._step.aggregation import aggregate, displacement, is_zero, weight
from bda_optim._step.clipping import clip
from bda_optim._step.proximal import NO_HYPER
from bda_optim._step.rules.resolve import resolve
from bda_optim._step.settings import check_group, complete
from bda_optim._support.tree import map_tensors
from bda_optim._support.types import Move, Rule


class BDAState(NamedTuple):
    """The state of `bda`: a tree of tensors, as torchopt's helpers expect it.

    Attributes:
        k: The number of steps taken.
        rule: The memory of the rule; its counts are tensors too.
        upper: The upper gradients of the next update, flat; None after it.
    """

    k: Tensor
    rule: Any
    upper: tuple[Tensor | None, ...] | None = None


def bda(
    lr: Any = None, *, upper_lr: Any = None, alpha: Any = 0.0, prox: Any = None, rule: Any = None, **settings: Any
) -> GradientTransformation:
    r"""Return Bi-level Descent Aggregation as a torchopt transformation.

    .. math:: u_k = - [ \alpha_k s_u \nabla_y F + (1 - \alpha_k) (y_k - \mathrm{prox}(y_k - D_k)) ]

    ``D_k`` is the rule's displacement from the lower gradient. With the defaults this is ``torchopt.sgd(lr)``. Tensors
    among the settings may require grad, and gradients flow into them. Updates and states are always new tensors, also
    with torchopt's ``inplace=True``.

    Args:
        lr: s_l, by default the rule's own; a number, a tensor, or a torchopt schedule (a function of the steps taken).
        upper_lr: s_u, likewise; None follows `lr`.
        alpha: The weight of the upper direction, in [0, 1): a number, a tensor, or a schedule of `bda_optim`, which is
            called with k = 1, 2, ...; k is kept in the state.
        prox: A proximal map of `bda_optim.prox`; its step is `lr`.
        rule: None for SGD, a class of torch.optim, or another torchopt transformation (then without `lr`).
        **settings: The rule's own, such as `momentum` or `betas`.

    Returns:
        A `GradientTransformation` whose `update` also takes ``upper_updates=``.

    Reference: Liu et al., "A Generic First-Order Algorithmic Framework for Bi-Level Programming Beyond Lower-Level
    Singleton", ICML 2020.

    >>> from bda_optim import harmonic
    >>> transformation = bda(0.1, upper_lr=1.0, alpha=harmonic(0.5))
    >>> params = (torch.tensor([1.0, 2.0]),)
    >>> state = transformation.init(params)
    >>> lower, upper = (torch.tensor([1.0, 0.0]),), (torch.tensor([0.0, 1.0]),)
    >>> for _ in range(2):
    ...     updates, state = transformation.update(lower, state, params=params, upper_updates=upper)
    ...     updates
    (tensor([-0.0500, -0.5000]),)
    (tensor([-0.0750, -0.2500]),)
    """
    chosen = resolve(rule)
    given = dict(lr=lr, upper_lr=upper_lr, alpha=alpha, prox=prox, **settings)
    return transformation(chosen, complete(chosen, given))


def transformation(
    rule: Rule, settings: Mapping[str, Any], *, moment_requires_grad: bool = False
) -> GradientTransformation:
    """Return a rule with its complete settings as a torchopt transformation; the first moments may require grad."""
    made = BDA(rule, settings, moment_requires_grad)
    made.check(())
    return GradientTransformation(made.init, made.update)


@dataclass(frozen=True)
class BDA:
    """The functions of the transformation, with the rule and its settings."""

    rule: Rule
    settings: Mapping[str, Any]
    moment_requires_grad: bool

    def __deepcopy__(self, memo: Any) -> BDA:
        """Return the same object: a learned setting must stay the tensor that it is."""
        return self

    def init(self, params: Any) -> BDAState:
        """Return the state before the first step."""
        ys = [y for y in _flat(params) if y is not None]
        self.check(ys)
        count = torch.zeros((), dtype=torch.int64)
        memory = self.rule.init([y.detach() for y in ys], self._at(count))
        if self.moment_requires_grad:
            memory = map_tensors(Tensor.requires_grad_, memory)
        return BDAState(count, _as_tensors(memory))

    def update(
        self, updates: Any, state: Any, *, params: Any = None, inplace: bool = True, upper_updates: Any = None
    ) -> tuple[Any, BDAState]:
        """Return the tree that is added to `params`, and the new state."""
        if params is None:
            raise ValueError("`bda` needs the parameters; got params=None. Call `update(grads, state, params=params)`.")
        if upper_updates is not None:
            state = with_upper(state, upper_updates)
        totals, new = self._map(_change, _flat(params), _flat(updates), state)
        return pytree.tree_unflatten(pytree.tree_structure(updates, none_is_leaf=True), totals), new

    def advance(self, params: Sequence[Tensor], grads: Sequence[Any], state: Any) -> tuple[list[Tensor], BDAState]:
        """Return the next parameters and the next state: `update` with its result added, in one operation each."""
        return self._map(aggregate, params, grads, state)

    def _map(
        self, function: Callable[..., Any], ys: Sequence[Any], lower: Sequence[Any], state: BDAState
    ) -> tuple[list[Any], BDAState]:
        """Apply `function`, which has the arguments of `aggregate`, to each parameter; None stays None."""
        chosen = self._at(state.k)
        chosen["alpha"] = weight(chosen["alpha"], int(state.k) + 1)
        upper = self._checked_upper(ys, lower, state, chosen["alpha"])
        places = [i for i, y in enumerate(ys) if y is not None]
        present = [ys[i] for i in places]
        memory = _as_numbers(state.rule)
        if any(point is not y for point, y in zip(self.rule.point(present, memory, chosen), present, strict=True)):
            raise ValueError(
                f"the rule {self.rule.name} takes its gradients at an extrapolated point, torchopt at the parameters. "
                "Use `bda_optim.hypergradient` or `unroll`."
            )
        grads = clip([lower[i] for i in places], chosen)
        moves, memory = self.rule.update(grads, memory, present, chosen)
        results: list[Any] = [None] * len(ys)
        shared = None if any(isinstance(chosen[name], list) for name in _BOUND) else _bound(chosen, 0)
        for place, (i, move) in enumerate(zip(places, moves, strict=True)):
            result = function(ys[i], move, upper[i], **(shared or _bound(chosen, place)))
            results[i] = result if result is None or result.dtype == ys[i].dtype else result.to(ys[i].dtype)
        return results, BDAState(state.k + 1, _as_tensors(memory))

    def _checked_upper(self, ys: Sequence[Any], lower: Sequence[Any], state: BDAState, alpha: Any) -> Sequence[Any]:
        """Return the upper gradients, after a check that all trees fit."""
        if state.upper is None and not is_zero(alpha):
            raise ValueError(
                f"`alpha` is not 0 at step k={int(state.k) + 1}, so the upper gradients are needed; got none. Use "
                "`MetaBDA`, `FuncBDA`, `with_upper(state, grads)` or `update(..., upper_updates=grads)`; or alpha=0.0."
            )
        upper = state.upper or (None,) * len(ys)
        if not len(ys) == len(lower) == len(upper):
            raise ValueError(
                f"parameters and gradients must be the same tree; got {len(ys)} parameters, {len(lower)} lower and "
                f"{len(upper)} upper gradients. Put None where a parameter has no gradient."
            )
        return upper

    def check(self, params: Sequence[Tensor]) -> None:
        """Raise where the settings cannot be honoured; lists (one tensor per parameter) wait for the parameters."""
        chosen = self._at(torch.zeros((), dtype=torch.int64))
        if params or not any(isinstance(value, list) for value in chosen.values()):
            check_group(self.rule, chosen, params)

    def _at(self, count: Tensor) -> dict[str, Any]:
        """Return the settings after `count` steps, as torchopt's schedules count."""
        rates = {name: self.settings[name] for name in ("lr", "upper_lr")}
        return {**self.settings, **{name: rate(count) if callable(rate) else rate for name, rate in rates.items()}}


_BOUND = ("lr", "upper_lr", "alpha", "prox")


def _bound(chosen: Mapping[str, Any], place: int) -> dict[str, Any]:
    """Return the arguments of `aggregate` that are settings, for the parameter at `place`."""
    lr, upper_lr, alpha, prox = (_nth(chosen[name], place) for name in _BOUND)
    bound = None if prox is None else lambda point: prox(point, lr, NO_HYPER)
    return {"alpha": alpha, "upper_lr": lr if upper_lr is None else upper_lr, "prox": bound}


def _change(y: Tensor, move: Move | None, upper_grad: Tensor | None, **settings: Any) -> Tensor | None:
    """Return what a step adds to y; None where nothing moves it."""
    total = displacement(y, move, upper_grad, **settings)
    return None if total is None else -total


def with_upper(state: Any, upper_updates: Any) -> Any:
    """Return a state with the upper gradients of the next update inside.

    Args:
        state: The state of `bda(...)`, or of a chain that has it as a part.
        upper_updates: A tree like the parameters, with None where there is no gradient; or None, for no upper level.

    Returns:
        The same tree, a new one.

    >>> import torchopt
    >>> chain = torchopt.chain(torchopt.clip_grad_norm(1.0), bda(0.1, upper_lr=1.0, alpha=0.5))
    >>> params, lower, upper = (torch.zeros(2),), (torch.tensor([0.0, 5.0]),), (torch.tensor([1.0, 0.0]),)
    >>> chain.update(lower, with_upper(chain.init(params), upper), params=params, inplace=False)[0]
    (tensor([-0.5000, -0.0500]),)
    """
    flat = None if upper_updates is None else tuple(_flat(upper_updates))
    bda_state(state)
    return pytree.tree_map(
        lambda part: part._replace(upper=flat) if isinstance(part, BDAState) else part, state, is_leaf=_is_bda
    )


def _is_bda(part: Any) -> bool:
    return isinstance(part, BDAState)


def bda_state(state: Any) -> BDAState:
    """Return the only state of `bda` in a tree."""
    parts = [part for part in pytree.tree_leaves(state, is_leaf=_is_bda) if _is_bda(part)]
    if len(parts) != 1:
        raise ValueError(f"the upper gradients are for one `bda(...)`; got a state with {len(parts)} of them.")
    only: BDAState = parts[0]
    return only


def _flat(tree: Any) -> list[Any]:
    """Return the leaves of a tree, the Nones among them."""
    return list(pytree.tree_leaves(tree, none_is_leaf=True))


def _nth(setting: Any, place: int) -> Any:
    return setting[place] if isinstance(setting, list) else setting


_NUMBERS = ("step", "mu", "eta", "mu_product")  # the entries of a memory that are numbers unless they are learned


def _as_tensors(memory: Any) -> Any:
    """Return a memory whose numbers are tensors: torchopt clones and moves everything in a state."""
    if isinstance(memory, tuple):
        return tuple({name: _tensor(v) if name in _NUMBERS else v for name, v in entry.items()} for entry in memory)
    return pytree.tree_map(_tensor, memory)


def _as_numbers(memory: Any) -> Any:
    """Return a memory with plain numbers again, with which a rule computes faster than with tensors."""
    if isinstance(memory, tuple):
        return tuple({name: _number(v) if name in _NUMBERS else v for name, v in entry.items()} for entry in memory)
    return memory  # of a torchopt transformation


def _tensor(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value
    return torch.tensor(value, dtype=torch.int64 if isinstance(value, int) else torch.float64)


def _number(value: Tensor) -> Any:
    return value if value.requires_grad or value.numel() != 1 else value.item()
