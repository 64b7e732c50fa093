r"""BDA for torchopt: `bda(...)` is a torchopt transformation, and `FuncBDA`, `MetaBDA` give it both gradients.

A torchopt update carries one tree of gradients: here that of the lower loss. The upper gradients travel in the state,
so that they also pass through a `torchopt.chain`:

| where | how the upper gradients enter |
|---|---|
| by hand | ``transformation.update(lower_grads, state, params=params, upper_updates=upper_grads)`` |
| by hand, in a chain | ``chain.update(lower_grads, with_upper(state, upper_grads), params=params)`` |
| functional optimizer | ``FuncBDA(transformation).step(lower_loss, params, upper_loss=upper_loss)`` |
| meta-optimizer | ``MetaBDA(module, transformation).step(lower_loss, upper_loss)`` |
| alpha = 0 | there is none: torchopt's own `FuncOptimizer`, `MetaOptimizer` and `Optimizer` will do |

What stands before `bda` in a chain sees the lower gradients only, what stands after it the whole aggregated step. Like
`torchopt.sgd`, `bda` contains the rates and the sign: what it returns is added to the parameters.

The other direction needs nothing of this module: ``BDAInnerOptimizer(params, rule=torchopt.adam(lr=0.1))``, `rollout`
and `hypergradient` take any torchopt transformation as `rule=`, under every adjoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bda_optim._step.aggregation import aggregate, is_zero, weight
from bda_optim._step.clipping import clip
from bda_optim._step.gradients import gradient
from bda_optim._step.proximal import NO_HYPER
from bda_optim._step.rules.resolve import resolve
from bda_optim._step.settings import check_group, complete
from bda_optim._support.types import Move, Rule

try:
    import torchopt
    from torchopt import pytree
    from torchopt.base import GradientTransformation, UninitializedState
except ImportError as error:
    raise ImportError(
        "`bda_optim.compat.torchopt` needs torchopt, which cannot be imported. Install `bda_optim[torchopt]`."
    ) from error

__all__ = ["BDAState", "FuncBDA", "MetaBDA", "bda", "with_upper"]


class BDAState(NamedTuple):
    """The state of `bda`: a tree of tensors, as torchopt's helpers expect it.

    Attributes:
        k: How many steps were taken.
        rule: What the rule remembers; its counts are tensors too.
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

    ``D_k`` is what the rule makes of the lower gradient. With the defaults this is ``torchopt.sgd(lr)``. Tensors among
    the settings may require grad, and gradients flow into them. Updates and states are always new tensors, also with
    torchopt's ``inplace=True``.

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
    made = _BDA(chosen, complete(chosen, given))
    made.check(())
    return GradientTransformation(made.init, made.update)


@dataclass(frozen=True)
class _BDA:
    """The two functions of the transformation, with what they know."""

    rule: Rule
    settings: Mapping[str, Any]

    def init(self, params: Any) -> BDAState:
        """Return the state before the first step."""
        ys = [y for y in _flat(params) if y is not None]
        self.check(ys)
        memory = self.rule.init([y.detach() for y in ys], self._at(1))
        return BDAState(torch.zeros((), dtype=torch.int64), _as_tensors(memory))

    def update(
        self, updates: Any, state: Any, *, params: Any = None, inplace: bool = True, upper_updates: Any = None
    ) -> tuple[Any, BDAState]:
        """Return what is to be added to `params`, and the new state."""
        if params is None:
            raise ValueError("`bda` needs the parameters; got params=None. Call `update(grads, state, params=params)`.")
        if upper_updates is not None:
            state = with_upper(state, upper_updates)
        k = int(state.k) + 1
        chosen = self._at(k)
        chosen["alpha"] = weight(chosen["alpha"], k)
        leaves = self._leaves(params, updates, state, chosen["alpha"])
        ys = [y for y, _, _ in leaves if y is not None]
        if any(point is not y for point, y in zip(self.rule.point(ys, state.rule, chosen), ys, strict=True)):
            raise ValueError(
                f"the rule {self.rule.name} takes its gradients at an extrapolated point, torchopt at the parameters. "
                "Use `bda_optim.hypergradient` or `unroll`."
            )
        grads = clip([g for y, g, _ in leaves if y is not None], chosen)
        moves, memory = self.rule.update(grads, state.rule, ys, chosen)
        numbered = iter(enumerate(moves))
        new = [None if y is None else _change(y, upper, chosen, *next(numbered)) for y, _, upper in leaves]
        found = pytree.tree_unflatten(pytree.tree_structure(updates, none_is_leaf=True), new)
        return found, BDAState(state.k + 1, memory)

    def _leaves(self, params: Any, updates: Any, state: BDAState, alpha: Any) -> list[tuple[Any, Any, Any]]:
        """Return each parameter with its lower and its upper gradient."""
        ys, lower, upper = _flat(params), _flat(updates), state.upper
        if upper is None and not is_zero(alpha):
            raise ValueError(
                f"`alpha` is not 0 at step k={int(state.k) + 1}, so the upper gradients are needed; got none. Use "
                "`MetaBDA`, `FuncBDA`, `with_upper(state, grads)` or `update(..., upper_updates=grads)`; or alpha=0.0."
            )
        upper = upper or (None,) * len(ys)
        if not len(ys) == len(lower) == len(upper):
            raise ValueError(
                f"parameters and gradients must be the same tree; got {len(ys)} parameters, {len(lower)} lower and "
                f"{len(upper)} upper gradients. Put None where a parameter has no gradient."
            )
        return list(zip(ys, lower, upper, strict=True))

    def check(self, params: Sequence[Tensor]) -> None:
        """Raise where the settings cannot be honoured; lists (one tensor per parameter) wait for the parameters."""
        chosen = self._at(1)
        if params or not any(isinstance(value, list) for value in chosen.values()):
            check_group(self.rule, chosen, params)

    def _at(self, k: int) -> dict[str, Any]:
        """Return the settings of step k; torchopt's schedules count from 0."""
        rates = {name: self.settings[name] for name in ("lr", "upper_lr")}
        return {**self.settings, **{name: rate(k - 1) if callable(rate) else rate for name, rate in rates.items()}}


def _change(y: Tensor, upper: Tensor | None, chosen: Mapping[str, Any], place: int, move: Move | None) -> Tensor | None:
    """Return what a step adds to y, the parameter at `place`; None where nothing moves it."""
    lr, upper_lr, alpha, prox = (_nth(chosen[name], place) for name in ("lr", "upper_lr", "alpha", "prox"))
    if prox is None and move is None and (upper is None or is_zero(alpha)):
        return None
    bound = None if prox is None else lambda point: prox(point, lr, NO_HYPER)
    # From 0, unless a prox has to see y: the difference of two iterates would lose digits.
    start = y if prox else torch.zeros_like(y)
    upper_lr = lr if upper_lr is None else upper_lr
    end = aggregate(start, move, upper, alpha=alpha, upper_lr=upper_lr, prox=bound)
    return (end - y if prox else end).to(y.dtype)


def with_upper(state: Any, upper_updates: Any) -> Any:
    """Return a state with the upper gradients of the next update inside.

    Args:
        state: The state of `bda(...)`, or of a chain that has it as a part.
        upper_updates: A tree like the parameters, with None where there is no gradient; or None, for no upper level.

    Returns:
        The same tree, a new one.

    >>> chain = torchopt.chain(torchopt.clip_grad_norm(1.0), bda(0.1, upper_lr=1.0, alpha=0.5))
    >>> params, lower, upper = (torch.zeros(2),), (torch.tensor([0.0, 5.0]),), (torch.tensor([1.0, 0.0]),)
    >>> chain.update(lower, with_upper(chain.init(params), upper), params=params, inplace=False)[0]
    (tensor([-0.5000, -0.0500]),)
    """
    flat = None if upper_updates is None else tuple(_flat(upper_updates))
    _only(state)
    return pytree.tree_map(
        lambda part: part._replace(upper=flat) if isinstance(part, BDAState) else part, state, is_leaf=_is_bda
    )


class FuncBDA(torchopt.FuncOptimizer):
    """torchopt's `FuncOptimizer` with two losses; made in the same way, from `bda(...)` or a chain that has it.

    >>> from bda_optim import harmonic
    >>> x, y = torch.zeros((), requires_grad=True), torch.tensor([2.0, 2.0], requires_grad=True)
    >>> upper_loss = lambda y: 0.5 * (x - y[1]) ** 2 + 0.5 * (y[0] - 1) ** 2
    >>> optimizer, params = FuncBDA(bda(0.2, upper_lr=0.7, alpha=harmonic(0.5))), (y,)
    >>> for _ in range(16):
    ...     (y,) = params
    ...     params = optimizer.step(0.5 * y[0] ** 2 - x * y[0], params, upper_loss=upper_loss(y))
    >>> torch.autograd.grad(upper_loss(*params), x)[0]
    tensor(-0.8621)
    """

    def step(self, loss: Tensor, params: Any, inplace: bool | None = None, *, upper_loss: Tensor | None = None) -> Any:
        """Return the next parameters, differentiable unless `inplace`.

        Args:
            loss: The lower loss.
            params: The parameters, a tuple of tensors.
            inplace: As in torchopt.
            upper_loss: The upper loss; may be left out where alpha is 0.
        """
        if isinstance(self.optim_state, UninitializedState):
            self.optim_state = self.impl.init(params)
        self.optim_state = with_upper(self.optim_state, _gradients(upper_loss, params, self.optim_state))
        return super().step(loss, params, inplace)


class MetaBDA(torchopt.MetaOptimizer):
    """torchopt's `MetaOptimizer` with two losses; made in the same way, from a module and `bda(...)` or a chain.

    As in torchopt the module's own parameters are replaced, tied weights come apart, and frozen parameters raise;
    `bda_optim.innerloop_ctx` has none of this.

    >>> net = torch.nn.Linear(2, 1)
    >>> optimizer = MetaBDA(net, bda(0.1, upper_lr=0.1, alpha=0.5))
    >>> optimizer.step(net(torch.ones(2)).square().sum(), net(torch.ones(2)).abs().sum())
    >>> net.weight.grad_fn is not None, optimizer.state_dict()[0].k
    (True, tensor(1))
    """

    def step(self, loss: Tensor, upper_loss: Tensor | None = None) -> None:
        """Put the next parameters into the module, differentiable.

        Args:
            loss: The lower loss.
            upper_loss: The upper loss; may be left out where alpha is 0.
        """
        for i, containers in enumerate(self.param_containers_groups):
            params = _tensors(containers)
            if isinstance(self.state_groups[i], UninitializedState):
                self.state_groups[i] = self.impl.init(tuple(params))
            self.state_groups[i] = with_upper(
                self.state_groups[i], _gradients(upper_loss, params, self.state_groups[i])
            )
        super().step(loss)


def _gradients(upper_loss: Tensor | None, params: Any, state: Any) -> Sequence[Tensor | None] | None:
    """Return the upper gradients, with their graph."""
    k = int(_only(state).k) + 1
    if upper_loss is None:
        return None
    return gradient(upper_loss, _tensors(params), "upper", k, create_graph=True)


def _is_bda(part: Any) -> bool:
    return isinstance(part, BDAState)


def _only(state: Any) -> BDAState:
    """Return the one state of `bda` in a tree."""
    found = [part for part in pytree.tree_leaves(state, is_leaf=_is_bda) if isinstance(part, BDAState)]
    if len(found) != 1:
        raise ValueError(f"the upper gradients are for one `bda(...)`; got a state with {len(found)} of them.")
    return found[0]


def _tensors(tree: Any) -> list[Tensor]:
    return list(pytree.tree_leaves(tree))


def _flat(tree: Any) -> list[Any]:
    """Return the leaves of a tree, the Nones among them."""
    return list(pytree.tree_leaves(tree, none_is_leaf=True))


def _nth(setting: Any, place: int) -> Any:
    return setting[place] if isinstance(setting, list) else setting


def _as_tensors(memory: Any) -> Any:
    """Turn the counts of a rule into tensors: torchopt clones and moves whatever a state holds."""
    return pytree.tree_map(
        lambda leaf: leaf if isinstance(leaf, Tensor) else torch.tensor(leaf, dtype=torch.float64), memory
    )
