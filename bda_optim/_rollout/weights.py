"""Whether learned weights of the upper direction lie in [0, 1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from .._step.aggregation import at_step, needs_upper
from .._step.objective import Loss


class _Weight(NamedTuple):
    value: Tensor
    k: int
    fits: Tensor


class Weights:
    """The weights `alpha` that are tensors, at the first and at the last step.

    Those of the host are looked at when this is made. Others would make the host wait for their device: they are looked
    at together with the result of the rollout.

    Args:
        groups: The settings of the groups.
        upper: The upper loss.
        steps: K, the number of inner steps.

    Raises:
        ValueError: If a weight lies outside of [0, 1), or needs an upper loss that is not there.
    """

    def __init__(self, groups: Sequence[Mapping[str, Any]], upper: Loss | None, steps: int) -> None:
        """Look at what the host knows."""
        self._away: list[_Weight] = []
        for settings in groups:
            for k in (1, steps):
                chosen = at_step(settings, k)
                self._add(chosen["alpha"], k)
                needs_upper([chosen], upper, k)

    def _add(self, alpha: Any, k: int) -> None:
        for value in alpha if isinstance(alpha, list) else [alpha]:
            if not isinstance(value, Tensor) or value.is_meta or any(value is known.value for known in self._away):
                continue
            weight = _Weight(value, k, ((value >= 0) & (value < 1)).all())
            if value.device.type == "cpu":
                _check(weight)
            else:
                self._away.append(weight)

    @property
    def flags(self) -> list[Tensor]:
        """Whether each weight on a device fits; on its device."""
        return [weight.fits for weight in self._away]

    def check(self) -> None:
        """Look at the weights on devices, and wait for them."""
        for weight in self._away:
            _check(weight)


def _check(weight: _Weight) -> None:
    if not bool(weight.fits):
        shown = weight.value.item() if weight.value.numel() == 1 else "a tensor beyond"
        raise ValueError(
            f"`alpha` must lie in [0, 1) at every step; got {shown} at k={weight.k}. Learn it through a sigmoid."
        )
