"""Store a few states on the way forward, and replay the steps between them on the way back."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .._support.checks import check_count
from .._support.tensors import any_requires_grad
from .base import Items, Result, as_step
from .node import replayed, without_graph
from .revolve import segments

_GRAPH_SIZE = 2.25
"""The size of a step's graph, in states: 0.75 against 0.33 MiB in an MLP."""


@dataclasses.dataclass(frozen=True)
class Checkpointed:
    r"""Store a few states on the way forward, and replay from them on the way back: exact, for long K.

    By default about 2 sqrt(K) states are stored, and each segment between them is replayed once: a hypergradient costs
    2 K steps. A state is dropped once its segment has been replayed. Segments are therefore long at the start (0.95
    sqrt(K) steps) and short at the end, and the peak memory is that of about 2.1 sqrt(K) states. With ``slots=s`` at
    most s states (the initial one included) and one graph are alive at a time. The reversal is then binomial, which
    needs the minimum number of repeated steps,

    .. math:: t(K, s) = r K - \binom{s + r}{r - 1}, \quad r = \min \{ r : \binom{s + r}{r} \ge K \}.

    A replay restores the global random state (dropout) and autocast, but not a `torch.Generator` of your own, `random`
    or numpy. With ``create_graph=True`` the whole loop is replayed on the tape, which takes the memory of `Unroll`.

    Reference: Griewank & Walther, "Algorithm 799: revolve", ACM TOMS 26, 2000.

    Args:
        every: The length of a segment, if all are to be equal.
        slots: The maximum number of states stored at once; excludes `every`.
        offload: "cpu" stores the states in the host's pinned memory, with asynchronous copies. It has no effect for
            parameters on the CPU.
        check: Whether every replayed state is compared to the bit with that of the first sweep. This takes a sum over
            the state in every step. By default the losses and the stored states are compared, up to rounding.

    >>> import torch
    >>> import bda_optim as bda
    >>> x = torch.tensor(3.0, requires_grad=True)
    >>> lower = lambda y, x, batch: 0.5 * (y - x) ** 2
    >>> y = bda.rollout(lower, None, torch.tensor(0.0), x, steps=1000, lr=0.01, adjoint=bda.Checkpointed())
    >>> round(torch.autograd.grad(y, x)[0].item(), 4)  # 1 - 0.99 ** 1000
    1.0
    """

    every: int | None = None
    slots: int | None = None
    offload: str | None = None
    check: bool = False

    def __post_init__(self) -> None:
        """Check the options."""
        if self.every is not None and self.slots is not None:
            raise ValueError(
                f"`every` and `slots` exclude each other; got every={self.every}, slots={self.slots}. Give one of them."
            )
        if self.offload not in (None, "cpu"):
            raise ValueError(f'`offload` must be None or "cpu"; got {self.offload!r}. Other places are not supported.')
        for name in ("every", "slots"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, check_count(name, getattr(self, name)))

    def __call__(self, step: Any, state: Any, hyper: tuple[Tensor, ...], items: Items) -> Result:
        """Run the loop inside one autograd function."""
        step = as_step(step)
        steps = len(items)
        items = step.units(items)
        if not any_requires_grad((state, hyper)):
            return without_graph(step, state, hyper, items)
        starts: Sequence[int] | None = None
        if self.every is not None:
            starts = range(0, len(items), max(1, self.every * len(items) // steps))
        elif self.slots is None:
            starts = segments(len(items), _GRAPH_SIZE)
        offload = self.offload == "cpu"
        slots = self.slots or 0
        return replayed(step, state, hyper, items, starts=starts, slots=slots, offload=offload, check=self.check)
