"""What one implicit solve leaves for the next."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from .._support.tree import map_tensors


@dataclasses.dataclass(eq=False)
class Carry:
    """What one implicit solve leaves for the next: its solution, and what is known of the fixed point.

    The only mutable part of `Implicit`. A solution whose shapes do not fit the next problem is dropped.

    Attributes:
        v: The solution of the last system, one tensor per parameter, where the next solve starts; None at first.
        iterations: The number of products with the derivative of the step.
        residual: ``|b - M^T v| / |b|``, with tasks the largest.
        moved: ``|S(y_K) - y_K|``, how far a further step would go.
        low: The smallest eigenvalue of M that the solver met (a singular value, with a prox).
        high: The largest.
        distance: ``moved / low``, an estimate of the distance of y_K to the fixed point.

    >>> import torch
    >>> carry = Carry()
    >>> carry.load_state_dict(Carry(v=[torch.ones(2)], iterations=3).state_dict())
    >>> carry.v, carry.iterations
    ([tensor([1., 1.])], 3)
    """

    v: list[Tensor] | None = dataclasses.field(default=None, repr=False)
    iterations: int = 0
    residual: float = math.nan
    moved: float = math.nan
    low: float = math.nan
    high: float = math.nan
    distance: float = math.nan

    def state_dict(self) -> dict[str, Any]:
        """Return all attributes, with copies of the tensors."""
        return {f.name: _copied(getattr(self, f.name)) for f in dataclasses.fields(self)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned; tensors are copied."""
        names = {f.name for f in dataclasses.fields(self)}
        if set(state_dict) != names:
            raise ValueError(
                f"the state of a `Carry` has {', '.join(sorted(names))}; got {', '.join(sorted(state_dict)) or 'none'}."
                " Pass what `state_dict()` returned."
            )
        for name, value in state_dict.items():
            setattr(self, name, _copied(value))

    def start(self, params: Sequence[Tensor]) -> list[Tensor] | None:
        """Return the last solution if it fits these parameters."""
        if self.v is not None and [t.shape for t in self.v] != [p.shape for p in params]:
            self.v = None
        return None if self.v is None else [t.to(p.device, p.dtype) for t, p in zip(self.v, params, strict=True)]


def _copied(value: Any) -> Any:
    return map_tensors(lambda t: t.detach().clone(), value)
