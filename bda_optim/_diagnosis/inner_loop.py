"""What is diagnosed: an inner loop with its step, its start, its upper variables and its two losses in reach."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from .._step.aggregation import is_zero, weight
from .._support.types import InnerState, Item, Record, Rule, Settings


@dataclasses.dataclass(frozen=True)
class InnerLoop:
    """One rollout, ready to run.

    Attributes:
        step: ``step(state, hyper, item) -> (state, record)``.
        state: The state before the first step, detached.
        hyper: The tensors in the slots: upper variables, settings and batches that are tensors.
        variables: The indices in `hyper` of the upper variables.
        items: k = 1..K, each with its batch.
        lower: The lower loss, ``lower(params, buffers, hyper, item)``.
        upper: The upper loss that ends the rollout, ``upper(params, buffers, hyper)``.
        rule: The rule of all groups.
        groups: Per group, the members' indices among the parameters, and the settings.
        names: What messages call the parameters.
        start_slots: Per parameter, the index in `hyper` of the upper variable that y_0 is; None where it is a constant.
    """

    step: Callable[[InnerState, Sequence[Tensor], Item], tuple[InnerState, Record]]
    state: InnerState
    hyper: tuple[Tensor, ...]
    variables: tuple[int, ...]
    items: Sequence[Item]
    lower: Callable[[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor], Item], Tensor]
    upper: Callable[[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]], Tensor]
    rule: Rule
    groups: tuple[tuple[tuple[int, ...], Settings], ...]
    names: tuple[str, ...]
    start_slots: tuple[int | None, ...]

    @property
    def steps(self) -> int:
        """K."""
        return len(self.items)

    @property
    def start_is_upper(self) -> bool:
        """Whether some y_0 is an upper variable."""
        return any(slot is not None for slot in self.start_slots)

    def shortened(self, steps: int) -> InnerLoop:
        """Return the first `steps` steps as a rollout of their own."""
        return dataclasses.replace(self, items=self.items[:steps])

    def weights(self, k: int) -> list[Any]:
        """Return alpha_k of each group."""
        return [weight(settings["alpha"], k) for _, settings in self.groups]

    def aggregates(self) -> bool:
        """Whether some step mixes in the upper direction."""
        return not all(is_zero(alpha) for item in (1, self.steps) for alpha in self.weights(item))


class Build(Protocol):
    """Makes the inner loop, with some settings replaced: those of the suggestion that is being tried."""

    def __call__(self, steps: int | None = None, **changes: Any) -> InnerLoop:
        """Return a new rollout; `steps` is K, and `changes` replace settings of every group."""
