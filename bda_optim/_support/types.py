"""The words the layers share: the state of the inner loop, and what a rule is."""

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
    """A displacement ``D = scale * direction``, kept apart: a plain step is ``torch.add(y, direction, -scale)``."""

    direction: Tensor
    scale: Scalar

    def displacement(self) -> Tensor:
        """Multiply out."""
        return self.scale * self.direction


class Rule(Protocol):
    """What makes a displacement of the lower gradients of one parameter group; pure, and never in place."""

    @property
    def name(self) -> str:
        """The name that `state_dict` writes and checks."""

    @property
    def defaults(self) -> Mapping[str, Any]:
        """Every setting the rule takes, with its default; `lr` among them."""

    @property
    def elementwise(self) -> bool:
        """Whether each element is treated alone, so that stacked tasks need no `vmap`."""

    def validate(self, settings: Settings) -> None:
        """Raise `ValueError` where a setting cannot be honoured."""

    def init(self, params: Sequence[Tensor], settings: Settings) -> Any:
        """Return the group's state before its first step."""

    def point(self, params: Sequence[Tensor], state: Any, settings: Settings) -> Sequence[Tensor]:
        """Return where the gradients are taken: `params`, unless the rule extrapolates."""

    def update(
        self, grads: Sequence[Tensor | None], state: Any, params: Sequence[Tensor], settings: Settings
    ) -> tuple[list[Move | None], Any]:
        """Return one move per parameter (None: it had no gradient and stays) and the new state."""


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
    """What one inner step takes and gives.

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
