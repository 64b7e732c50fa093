"""Functions mapped over tasks, which are the first dimension of every tensor."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .torch_private import vmap_flat
from .tree import map_tensors, replace_tensors, tensors


def over_tasks(function: Callable[..., Any], *trees: Any) -> Any:
    """Map `function` over the first dimension of every tensor of `trees`; other leaves are shared by the tasks.

    What `function` returns may be any tree; its tensors come back with the task dimension in front.
    """
    result: list[Any] = []

    def one(*values: Tensor) -> list[Tensor]:
        result[:] = [function(*replace_tensors(trees, values))]
        return tensors(result)

    # "different": dropout draws one mask per task.
    return replace_tensors(result, vmapped(one, tensors(trees), randomness="different"))[0]


def vmapped(
    function: Callable[..., Sequence[Tensor | None]], values: Sequence[Tensor], *, randomness: str
) -> list[Tensor | None]:
    """Map a function of tensors over their first dimension, which has the same size in all of them."""
    sizes = {value.shape[0] for value in values}
    if len(sizes) != 1:
        raise ValueError(f"tensors must have the same first dimension to be mapped over it; got sizes {sorted(sizes)}.")
    return vmap_flat(function, values, sizes.pop(), randomness)


def one_by_one(function: Callable[..., Any], tasks: int, *trees: Any) -> Any:
    """Do what `over_tasks` does, but in a loop, for a `function` that `vmap` cannot batch."""
    results = [function(*map_tensors(operator.itemgetter(i), trees)) for i in range(tasks)]
    columns = zip(*(tensors(result) for result in results), strict=True)
    return replace_tensors(results[0], [torch.stack(column) for column in columns])
