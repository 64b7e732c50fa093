"""Optimizers that put the next parameters into a module, as torchopt's `MetaOptimizer` does, and BDA among them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torchopt
from torch import Tensor
from torchopt import pytree
from torchopt.base import UninitializedState

from bda_optim._step.gradients import Grads, gradient
from bda_optim._support.checks import check_ambient
from bda_optim._support.tensors import is_differentiable

from ._bda import BDA, bda_state, with_upper


class _Parameter(NamedTuple):
    """A tensor of a module and every place where it occurs: tied weights have several."""

    tensor: Tensor
    places: list[tuple[Any, str]]


class MetaOptimizer(torchopt.MetaOptimizer):
    """torchopt's `MetaOptimizer`: `step` puts the next parameters, differentiable, into the module itself.

    It is made in the same way, from a module and a transformation, and torchopt's `extract_state_dict`,
    `recover_state_dict`, `stop_gradient` and `module_clone` accept it. Unlike torchopt's it keeps tied weights tied,
    leaves frozen and integer parameters as they are, keeps the state of a parameter that a loss does not use, and
    changes the module only once all new parameters are there.

    >>> net = torch.nn.Linear(2, 1)
    >>> optimizer = MetaOptimizer(net, torchopt.adam(lr=0.1))
    >>> optimizer.step(net(torch.ones(2)).square().sum())
    >>> net.weight.grad_fn is not None
    True
    """

    _k = 0  # the number of steps taken, for messages

    def step(self, loss: Tensor) -> None:
        """Put the next parameters into the module.

        Args:
            loss: The loss, computed with the module.
        """
        self._take(loss, None)

    def _take(self, loss: Tensor, upper_loss: Tensor | None) -> None:
        """Take one step; with an upper loss the state of each group is given its gradients first."""
        check_ambient()
        groups = self._parameters()
        tensors = [parameter.tensor for group in groups for parameter in group]
        self.state_groups = [self._started(i, group) for i, group in enumerate(groups)]
        with torch.enable_grad():  # the caller may be under no_grad
            lower = _gradients(loss, tensors, "lower", self._k + 1)
            upper = None if upper_loss is None else _gradients(upper_loss, tensors, "upper", self._k + 1)
            results = []
            start = 0
            for state, group in zip(self.state_groups, groups, strict=True):
                part = slice(start, start + len(group))
                if upper is not None:
                    state = with_upper(state, upper[part])
                results.append(self._updated(state, tensors[part], lower[part]))
                start += len(group)
        self._k += 1
        for i, (group, (new, state)) in enumerate(zip(groups, results, strict=True)):
            self.state_groups[i] = state
            for parameter, tensor in zip(group, new, strict=True):
                for container, name in parameter.places:
                    container[name] = tensor

    def _parameters(self) -> list[list[_Parameter]]:
        """Return the parameters of each group in torchopt's order, each once, with all their places."""
        known: dict[int, _Parameter] = {}
        groups = []
        for containers in self.param_containers_groups:
            group = []
            for container in containers:
                for name in _names(container):
                    tensor = container[name]
                    if isinstance(tensor, Tensor) and is_differentiable(tensor):
                        if id(tensor) not in known:
                            known[id(tensor)] = _Parameter(tensor, [])
                            group.append(known[id(tensor)])
                        known[id(tensor)].places.append((container, name))
            groups.append(group)
        return groups

    def _started(self, index: int, group: Sequence[_Parameter]) -> Any:
        state = self.state_groups[index]
        if isinstance(state, UninitializedState):
            return self.impl.init(tuple(parameter.tensor for parameter in group))
        return state

    def _updated(self, state: Any, params: list[Tensor], grads: Grads) -> tuple[list[Tensor], Any]:
        """Return the next parameters and the next state of a group."""
        own = getattr(self.impl.update, "__self__", None)
        if isinstance(own, BDA):
            return own.advance(params, grads, state)
        updates, new = self.impl.update(tuple(grads), state, params=tuple(params), inplace=False)
        if any(grad is None for grad in grads):
            new = _without_gaps(new, state)
        pairs = zip(params, updates, strict=True)
        return [p if update is None else p + update for p, update in pairs], new


class MetaBDA(MetaOptimizer):
    """A `MetaOptimizer` with two losses, from a module and `bda(...)` or a chain that contains it.

    >>> from bda_optim.compat.torchopt import bda
    >>> net = torch.nn.Linear(2, 1)
    >>> optimizer = MetaBDA(net, bda(0.1, upper_lr=0.1, alpha=0.5))
    >>> optimizer.step(net(torch.ones(2)).square().sum(), net(torch.ones(2)).abs().sum())
    >>> net.weight.grad_fn is not None, optimizer.state_dict()[0].k
    (True, tensor(1))
    """

    def step(self, loss: Tensor, upper_loss: Tensor | None = None) -> None:
        """Put the next parameters into the module.

        Args:
            loss: The lower loss.
            upper_loss: The upper loss; may be left out where alpha is 0.
        """
        self._take(loss, upper_loss)

    def _started(self, index: int, group: Sequence[_Parameter]) -> Any:
        state = super()._started(index, group)
        bda_state(state)  # raises where there is none
        return state


class FuncBDA(torchopt.FuncOptimizer):
    """torchopt's `FuncOptimizer` with two losses; made in the same way, from `bda(...)` or a chain that contains it.

    >>> from bda_optim import harmonic
    >>> from bda_optim.compat.torchopt import bda
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
        k = int(bda_state(self.optim_state).k) + 1
        tensors = pytree.tree_leaves(params)
        upper = None if upper_loss is None else gradient(upper_loss, tensors, "upper", k, create_graph=True)
        self.optim_state = with_upper(self.optim_state, upper)
        return super().step(loss, params, inplace)


def _gradients(loss: Tensor, tensors: list[Tensor], level: str, k: int) -> Grads:
    """Return a gradient, with its graph, for each tensor; None for frozen ones."""
    live = [i for i, tensor in enumerate(tensors) if tensor.requires_grad]
    grads: list[Tensor | None] = [None] * len(tensors)
    points = [tensors[i] for i in live]
    for i, grad in zip(live, gradient(loss, points, level, k, create_graph=True), strict=True):
        grads[i] = grad
    return grads


def _names(container: Any) -> list[str]:
    """Return the names in a container in the order in which torchopt flattens it."""
    return sorted(container) if type(container) is dict else list(container)


def _without_gaps(new: Any, old: Any) -> Any:
    """Return a new state with the old entries where torchopt put None, for a parameter without a gradient.

    torchopt goes on with None, and never moves the parameter again.
    """
    structures = [pytree.tree_structure(state, none_is_leaf=True) for state in (new, old)]
    if structures[0] != structures[1]:
        return new
    return pytree.tree_map(lambda after, before: before if after is None else after, new, old, none_is_leaf=True)
