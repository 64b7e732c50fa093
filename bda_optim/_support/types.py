"""What all rooms share: the state of the inner loop, its items and records, and what a rule is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

from torch import Tensor

Scalar: TypeAlias = float | Tensor
"""A setting: a number, or a tensor (one element, or one per element of the parameter) that may be learned."""

Rate: TypeAlias = float | Tensor | list[Tensor] | Callable[[int], Scalar]
"""What `lr`, `upper_lr` and `alpha` may be: a number, a tensor that may be learned, a list with a tensor for each
parameter of a group, or a function of k = 1, 2, ..."""

Prox: TypeAlias = Callable[[Tensor, Scalar, Any], Tensor]
"""A proximal map, called ``prox(y, step, hyper)``."""

Settings: TypeAlias = Mapping[str, Any]
"""The settings of one parameter group, for example ``{"lr": 0.1, "momentum": 0.9}``."""

RuleState: TypeAlias = dict[str, Any]
"""What a rule remembers of one parameter, under torch.optim's own keys: tensors and plain numbers."""


class Move(NamedTuple):
    """What a rule returns for one parameter: the displacement ``D = scale * direction``.

    The two factors are kept apart, so that a step without a prox is ``torch.add(y, direction, alpha=-scale)``: to the
    bit what torch.optim computes.

    Attributes:
        direction: A tensor of the parameter's shape.
        scale: A number, or a tensor that broadcasts to it.

    A rule that steps by the sign of the gradient, with a rate that falls with the norm of the gradient:

    >>> import torch, bda_optim as bda
    >>> class SignDescent(bda.Rule):
    ...     defaults = {"lr": 0.1}
    ...     def update(self, grads, state, params, settings):
    ...         return [g if g is None else bda.Move(g.sign(), settings["lr"] * g.norm()) for g in grads], state
    >>> lower, upper = (lambda y, x, b: 0.5 * ((y - x) ** 2).sum()), (lambda y, x, b: y.sum())
    >>> x = torch.tensor([3.0, 4.0])
    >>> bda.hypergradient(lower, upper, torch.zeros(2), x, steps=1, rule=SignDescent).grad
    tensor([0.1200, 0.1600])
    """

    direction: Tensor
    scale: Scalar

    def displacement(self) -> Tensor:
        """Return ``scale * direction``."""
        return self.scale * self.direction


class Rule(Protocol):
    """Turns the lower gradients of a parameter group into displacements; pure, and never in place.

    A subclass defines `defaults` and `update`, and whatever else differs from the methods here. Any other object that
    has all of these attributes is a rule, too. Pass the class or an instance as `rule=`. What `update` computes must
    be differentiable by autograd, if gradients are to flow through it.

    Gradient descent that is pulled towards an average of the iterates:

    >>> import torch, bda_optim as bda
    >>> class Anchored(bda.Rule):
    ...     defaults = {"lr": 0.1, "pull": 0.5}
    ...     elementwise = True
    ...     def init(self, params, settings):
    ...         return tuple({"mean": p.clone()} for p in params)
    ...     def update(self, grads, state, params, settings):
    ...         means = [(s["mean"] + p) / 2 for s, p in zip(state, params)]
    ...         pulls = [g + settings["pull"] * (p - m) for g, p, m in zip(grads, params, means)]
    ...         return [bda.Move(d, settings["lr"]) for d in pulls], tuple({"mean": m} for m in means)
    >>> lower, upper = (lambda y, x, b: 0.5 * ((y - x) ** 2).sum()), (lambda y, x, b: y.sum())
    >>> x = torch.tensor([3.0, 4.0])
    >>> bda.hypergradient(lower, upper, torch.zeros(2), x, steps=3, rule=Anchored(), lr=0.5, pull=0.2).grad
    tensor([0.8388, 0.8388])
    """

    @property
    def name(self) -> str:
        """The name that `state_dict` writes and checks; by default that of the class."""
        return type(self).__name__

    @property
    def defaults(self) -> Mapping[str, Any]:
        """Every setting that the rule takes, with its default; `lr` among them."""

    @property
    def elementwise(self) -> bool:
        """Whether each element is treated alone, so that stacked tasks need no `vmap`; by default they do."""
        return False

    def validate(self, settings: Settings) -> None:
        """Raise `ValueError` where a setting cannot be honoured; by default all can."""

    def init(self, params: Sequence[Tensor], settings: Settings) -> Any:
        """Return the group's memory before its first step: a tree of tensors and numbers; by default none.

        A tuple with one dict per parameter is stored per parameter by `BDAInnerOptimizer`, and grows when a setting is
        switched on later.
        """
        return ()

    def point(self, params: Sequence[Tensor], state: Any, settings: Settings) -> Sequence[Tensor]:
        """Return where the gradients are taken: `params`, unless the rule extrapolates."""
        return params

    def update(
        self, grads: Sequence[Tensor | None], state: Any, params: Sequence[Tensor], settings: Settings
    ) -> tuple[list[Move | None], Any]:
        """Return one move per parameter (None if it has no gradient and stays) and the new memory."""


class TensorFields:
    """A frozen dataclass whose fields may be tensors.

    Two are equal if their numbers are equal and their tensors the same objects: comparing values would wait for the
    device.
    """

    def _key(self) -> tuple[Any, ...]:
        return type(self), *(("tensor", id(v)) if isinstance(v, Tensor) else v for v in vars(self).values())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TensorFields) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())


class GradientTransformation(Protocol):
    """What torchopt's transformations have."""

    @property
    def init(self) -> Callable[..., Any]:
        """Return the state before the first update."""

    @property
    def update(self) -> Callable[..., Any]:
        """Return the transformed gradients and the new state."""


RuleLike: TypeAlias = Rule | type[Any] | GradientTransformation | None
"""What `rule=` may be: None for SGD, a class of torch.optim, a rule or its class, or a torchopt transformation."""


class InnerState(NamedTuple):
    """What one inner step takes and returns.

    Attributes:
        params: The lower variables y, flat.
        rule: One entry per parameter group, as the rule made it.
        buffers: The module's buffers, flat; empty without a module.
    """

    params: tuple[Tensor, ...]
    rule: tuple[Any, ...] = ()
    buffers: tuple[Tensor, ...] = ()


class Item(NamedTuple):
    """What changes from step to step: k = 1, 2, ... and the batch."""

    k: int
    batch: Any = None


class Record(NamedTuple):
    """The two losses of one step, detached; None where a loss was not evaluated."""

    lower: Tensor
    upper: Tensor | None
