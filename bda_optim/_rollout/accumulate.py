"""Gradient accumulation: a batch in weighted parts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from .._adjoints.base import layers
from .._adjoints.implicit import Implicit
from .._step.gradients import add
from .._step.step import Split
from .._support.tree import map_tensors, tensors

Accumulate: TypeAlias = int | Callable[[Any], Sequence[tuple[float, Any]]] | None
"""The number M of parts, or a function ``batch -> [(weight, part), ...]``."""


@dataclasses.dataclass(frozen=True)
class EvenParts:
    """Cuts every tensor of a batch into parts along one dimension; a weight is the part's share of the size.

    Args:
        count: M.
        dim: The dimension: 0, or 1 behind a task dimension.

    >>> EvenParts(2, 0)(torch.arange(3))
    [(0.6666666666666666, tensor([0, 1])), (0.3333333333333333, tensor([2]))]
    """

    count: int
    dim: int

    def __call__(self, batch: Any) -> list[tuple[float, Any]]:
        """Return the parts, with weights that sum to 1."""
        size = self.size(batch)
        short, longer = divmod(size, self.count)
        parts = []
        start = 0
        for number in range(self.count):
            length = short + (number < longer)
            parts.append((length / size, map_tensors(_cut(self.dim, start, length), batch)))
            start += length
        return parts

    def size(self, batch: Any, name: str = "a batch") -> int:
        """Return the size of the dimension to cut.

        Raises:
            ValueError: If a tensor is too small, or the tensors have different sizes.
        """
        shapes = [tuple(t.shape) for t in tensors(batch)]
        which = "second (behind the tasks)" if self.dim else "first"
        problem = ""
        if not shapes:
            problem = f"{name} of type {type(batch).__name__} without tensors"
        for shape in shapes:
            if len(shape) <= self.dim or shape[self.dim] < self.count:
                problem = problem or f"{name} with a tensor of shape {shape}"
            elif len(shapes[0]) > self.dim and shape[self.dim] != shapes[0][self.dim]:
                problem = problem or f"{name} with tensors of shapes {shapes[0]} and {shape}"
        if problem:
            raise ValueError(
                f"accumulate={self.count} cuts the {which} dimension of every tensor of a batch into {self.count} "
                f"parts, which needs the same size of at least {self.count} in all of them; got {problem}. Use fewer "
                "parts, or pass a function `batch -> [(weight, part), ...]`."
            )
        return shapes[0][self.dim]


@dataclasses.dataclass(frozen=True)
class GivenParts:
    """Divides a batch by a user's function, and normalises the weights."""

    function: Callable[[Any], Sequence[tuple[float, Any]]]

    def __call__(self, batch: Any) -> list[tuple[float, Any]]:
        """Return the parts, with weights that sum to 1."""
        parts = self.function(batch)
        pairs = isinstance(parts, list | tuple) and all(isinstance(p, list | tuple) and len(p) == 2 for p in parts)
        weights = [weight for weight, _ in parts] if pairs else []
        if not weights or not all(isinstance(w, int | float) and w > 0 for w in weights):
            got = f"weights {weights}" if weights else f"{parts!r:.80}"
            raise ValueError(
                "`accumulate` must return a list of pairs (weight, part) with positive numbers as weights; "
                f"got {got}. Return `[(len(part), part), ...]`, for example."
            )
        total = sum(weights)
        return [(weight / total, part) for weight, part in parts]


def splitter(accumulate: Accumulate, tasks: int | None) -> EvenParts | GivenParts | None:
    """Return what divides a batch into parts; None if it stays whole."""
    if accumulate is None or accumulate == 1:
        return None
    return GivenParts(accumulate) if callable(accumulate) else EvenParts(accumulate, 0 if tasks is None else 1)


def check_accumulate(accumulate: Accumulate, batches: Any, tasks: int | None, adjoint: Any, compiled: Any) -> None:
    """Raise where a rollout cannot run in parts."""
    split = splitter(accumulate, tasks)
    if split is None:
        return
    shown = f"accumulate={accumulate}" if isinstance(accumulate, int) else "a function `accumulate`"
    if batches is None:
        raise ValueError(
            f"`accumulate` divides batches; got {shown} and batches=None. Pass the data as `batches=[data] * steps`."
        )
    if compiled:
        raise ValueError(
            f"compiled steps cannot run in parts yet; got {shown} and compile={compiled!r}. Leave one of them out."
        )
    if any(isinstance(layer, Implicit) for layer in layers(adjoint)):
        raise ValueError(
            f"`Implicit` takes all its products from one graph of a whole batch; got {shown}. Use "
            "`Checkpointed()`, or leave `accumulate` out."
        )
    if isinstance(split, EvenParts) and isinstance(batches, list | tuple):
        for number, batch in enumerate(batches):
            split.size(batch, f"batches[{number}]")


def parts_of_last(split: Split | None, batch: Any) -> Sequence[tuple[float, Any]]:
    """Return the parts of the batch of the last upper loss, which stays whole where M parts cannot be cut."""
    if split is None or batch is None:
        return [(1.0, batch)]
    if isinstance(split, EvenParts):
        sizes = {t.shape[split.dim] if t.dim() > split.dim else 0 for t in tensors(batch)}
        if len(sizes) != 1 or min(sizes) < split.count:
            return [(1.0, batch)]
    return split(batch)


def mean(
    loss: Callable[[Sequence[Tensor], Any], Tensor], params: Sequence[Tensor], parts: Sequence[tuple[float, Any]]
) -> Tensor:
    """Return the mean of ``loss(params, part)`` over parts; a single part has the weight 1."""
    if len(parts) == 1:
        return loss(params, parts[0][1])
    values = [weight * loss(params, part) for weight, part in parts]
    return sum(values[1:], start=values[0])


def mean_with_slopes(
    loss: Callable[[Sequence[Tensor], Any], Tensor],
    params: Sequence[Tensor],
    others: Sequence[Tensor],
    parts: Sequence[tuple[float, Any]],
) -> tuple[Tensor, Tensor]:
    """Return the mean of a loss over parts, summed over tasks and as it is; one graph of a part is held at a time.

    Args:
        loss: ``loss(params, part)``.
        params: Where the loss is taken.
        others: What else it may depend on.
        parts: The parts, with weights.

    Returns:
        The sum, which is differentiable once in `params` and `others`, and the detached loss itself.
    """
    leaves = [p.detach().requires_grad_() for p in params]
    wanted = [*leaves, *(t for t in others if t.requires_grad)]

    def one(part: Any) -> tuple[Tensor, Sequence[Tensor | None]]:  # its frame holds the graph
        value = loss(leaves, part)
        if not value.requires_grad:
            return value, [None] * len(wanted)
        # Parts may share what the caller computed beforehand.
        return value.detach(), torch.autograd.grad(value.sum(), wanted, allow_unused=True, retain_graph=True)

    values = []
    slopes: list[Tensor | None] = [None] * len(wanted)
    for weight, part in parts:
        value, grads = one(part)
        values.append(weight * value)
        slopes = add(slopes, [None if g is None else weight * g for g in grads])
    value = sum(values[1:], start=values[0])
    total: Tensor = _Sloped.apply(value.sum(), slopes, *params, *wanted[len(leaves) :])  # type: ignore[no-untyped-call]
    return total, value


class _Sloped(torch.autograd.Function):
    """Gives a scalar a known gradient: ``_Sloped.apply(value, slopes, *inputs)``."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, slopes: Sequence[Tensor | None], *inputs: Tensor) -> Tensor:
        ctx.slopes = slopes
        return value.clone()

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *(None if slope is None else slope * cotangent for slope in ctx.slopes)


def _cut(dim: int, start: int, length: int) -> Callable[[Tensor], Tensor]:
    return lambda t: t.narrow(dim, start, length)
