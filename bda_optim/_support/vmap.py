"""Functions mapped over the tasks, which are the first dimension of every tensor."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch
from torch._functorch import vmap as torch_vmap

from .tree import map_tensors, replace_tensors, tensors


def over_tasks(function: Callable[..., Any], *trees: Any) -> Any:
    """Map `function` over the first dimension of every tensor of `trees`; other leaves are shared by the tasks.

    What `function` returns may be any tree; its tensors come back with the task dimension in front.
    """
    given = tensors(trees)
    result: list[Any] = []

    def one(*values: Tensor) -> list[Tensor]:
        result[:] = [function(*replace_tensors(trees, values))]
        return tensors(result)

    # Dropout draws a mask of its own for each task.
    return replace_tensors(result, vmapped(one, given, randomness="different"))[0]


def vmapped(
    function: Callable[..., Sequence[Tensor | None]], values: Sequence[Tensor], *, randomness: str
) -> list[Tensor | None]:
    """Map a function of flat tensors over their first dimension, which is of the same size in all of them.

    This is `torch.func.vmap` without the trees of its arguments: flattening them takes longer than small operations
    do, and leaves reference cycles behind.
    """
    sizes = {value.shape[0] for value in values}
    if len(sizes) != 1:
        raise ValueError(f"tensors must have the same first dimension to be mapped over it; got sizes {sorted(sizes)}.")
    size = sizes.pop()
    _load_decompositions()
    outside = _functorch.maybe_current_level()
    try:
        level = _functorch._vmap_increment_nesting(size, randomness)
        found = function(*[_functorch._add_batch_dim(value, 0, level) for value in values])
        return [None if t is None else _functorch._remove_batch_dim(t, level, size, 0) for t in found]
    finally:
        if _functorch.maybe_current_level() != outside:  # an interrupt may come before the level is there
            _functorch._vmap_decrement_nesting()


# What `vmap` needs of some operations.
_load_decompositions = functools.cache(torch_vmap.lazy_load_decompositions)  # type: ignore[attr-defined]


def one_by_one(function: Callable[..., Any], tasks: int, *trees: Any) -> Any:
    """Do what `over_tasks` does in a loop, for a `function` that `vmap` cannot batch."""
    results = [function(*map_tensors(operator.itemgetter(i), trees)) for i in range(tasks)]
    columns = zip(*(tensors(result) for result in results), strict=True)
    return replace_tensors(results[0], [torch.stack(column) for column in columns])
