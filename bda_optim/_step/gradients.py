"""The gradients of both losses with respect to the lower variables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from .._support.autograd_graph import refuse_once_differentiable
from .._support.torch_private import run_backward

Grads: TypeAlias = Sequence[Tensor | None]
"""One gradient per parameter; None where a loss does not depend on it."""


def both_gradients(
    lower: Any,
    upper: Any,
    points: Sequence[Tensor],
    k: Any,
    *,
    create_graph: bool = False,
    retain_graph: bool | None = None,
    tasks: int | None = None,
) -> tuple[Grads, Grads]:
    """Return the gradients of the lower and of the upper loss at `points`; an upper loss of None has none.

    Args:
        lower: The lower loss; with tasks the losses of all tasks.
        upper: The upper loss, or None where the step does not evaluate it.
        points: Where the gradients are taken.
        k: The number of the step, for messages.
        create_graph: Whether the gradients can be differentiated again.
        retain_graph: Whether the graph of the lower loss is kept, as it must be if both losses share one.
        tasks: The number of tasks, or None.
    """
    lower_grads = gradient(lower, points, "lower", k, create_graph=create_graph, retain_graph=retain_graph, tasks=tasks)
    if upper is None:
        return lower_grads, no_gradient(points)
    return lower_grads, gradient(upper, points, "upper", k, create_graph=create_graph, tasks=tasks)


def gradient(
    loss: Any,
    points: Sequence[Tensor],
    level: str,
    k: Any,
    *,
    create_graph: bool = False,
    retain_graph: bool | None = None,
    tasks: int | None = None,
) -> Grads:
    """Return the gradient of one loss (of the sum of the tasks' losses) at `points`.

    Raises:
        TypeError: If the loss is not a tensor.
        ValueError: If the loss is not a scalar, or the lower loss depends on no parameter at all.
    """
    check_scalar(loss, level, k, tasks)
    return slope(loss, points, level, k, create_graph=create_graph, retain_graph=retain_graph)


def slope(
    loss: Tensor,
    points: Sequence[Tensor],
    level: str,
    k: Any,
    *,
    create_graph: bool = False,
    retain_graph: bool | None = None,
) -> Grads:
    """Return what `gradient` does, of a loss that was looked at already."""
    grads = no_gradient(points)
    if loss.requires_grad:
        if loss.is_complex():
            raise TypeError(f"the {level} loss must be real; got {loss.dtype} at step k={k}. Take `.real` or `.abs()`.")
        seed = torch.ones_like(loss)
        retain_graph = create_graph if retain_graph is None else retain_graph
        grads = run_backward((loss,), (seed,), tuple(points), create_graph=create_graph, retain_graph=retain_graph)
        check_dense(grads, f"{level} loss", k)
        if create_graph and any(g is not None and not g.requires_grad for g in grads):
            refuse_once_differentiable([loss])  # a gradient without a graph: otherwise the loss is linear
    if level == "lower":
        check_depends(grads, k)
    return grads


def check_dense(grads: Grads, what: str, k: Any) -> None:
    """Raise where a gradient is sparse."""
    if any([g is not None and g.layout is not torch.strided for g in grads]):
        raise NotImplementedError(
            f"torch differentiates sparse gradients incorrectly; got one from the {what} at step k={k}. Use "
            "`F.embedding(..., sparse=False)`. An nn.Embedding inside the module is handled already."
        )


def check_depends(grads: Grads, k: Any) -> None:
    """Raise where the lower loss has no gradient at all."""
    if not any([g is not None for g in grads]):
        raise ValueError(
            f"the lower loss does not depend on any parameter that the optimizer adapts; got a loss at step k={k} "
            "whose graph reaches none of them. Compute it with the `net` (or `params`) that the function receives, "
            "not with the original module, and without `.detach()` or `no_grad()`."
        )


def no_gradient(points: Sequence[Tensor]) -> Grads:
    """Return the gradient of a loss that depends on nothing."""
    return [None] * len(points)


def add(first: Grads, second: Grads) -> list[Tensor | None]:
    """Add tensors pairwise; None is zero."""
    return [b if a is None else a if b is None else a + b for a, b in zip(first, second, strict=True)]


def check_scalar(loss: Any, level: str, k: Any, tasks: int | None) -> None:
    """Raise where a loss is not a scalar tensor (of each task)."""
    if not isinstance(loss, Tensor):
        raise TypeError(
            f"the {level} loss must be a scalar tensor; got {type(loss).__name__} at step k={k}. "
            "Return the loss itself, not `.item()`."
        )
    if loss.numel() != (tasks or 1):
        shape = tuple(loss.shape[1:] if tasks else loss.shape)
        raise ValueError(
            f"the {level} loss must be a scalar; got shape {shape} at step k={k}. Reduce it, for example by `.mean()`."
        )
