"""Ranks: which one this is, its part of the tasks, and sums over all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._support.tree import map_tensors, tensors

MIB = 2**20


def place(group: Any) -> tuple[int, int]:
    """Return the number of this rank in the group, and how many there are; 0 of 1 without a process group."""
    if not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError("this process is not a member of `group`. Call this on the ranks of the group only.")
    return rank, dist.get_world_size(group)


def shard(tasks: Any, *, group: Any = None) -> Any:
    """Return this rank's part of some tasks; the parts differ in size by one at most, and may be empty.

    Args:
        tasks: A list, tuple, range or another sequence that can be sliced; or a tree of tensors with the tasks (or the
            examples of a batch) along their first dimension.
        group: The process group; all ranks by default.

    Returns:
        The part, of the same kind: contiguous, in order, and a view where `tasks` are tensors.

    >>> shard([1, 2, 3])  # without a process group
    [1, 2, 3]
    """
    found = tensors(tasks)
    sizes = {len(t) for t in found} if found else {len(tasks)}
    if len(sizes) > 1:
        raise ValueError(
            f"every tensor has the tasks along its first dimension, of the same size; got sizes {sorted(sizes)}."
        )
    rank, ranks = place(group)
    (count,) = sizes
    part = slice(rank * count // ranks, (rank + 1) * count // ranks)
    return map_tensors(lambda t: t[part], tasks) if found else tasks[part]


def divide(like: Sequence[Tensor], mib: float, *, reverse: bool = False) -> list[list[int]]:
    """Return the indices of tensors in buckets: each of one dtype and device, of about `mib` MiB, the same object once.

    >>> divide([torch.zeros(3), torch.zeros(3).int(), torch.zeros(2)], 25.0)
    [[0, 2], [1]]
    """
    if not mib > 0:
        raise ValueError(f"`bucket_mb` is the size of a bucket in MiB, above 0; got {mib}. The default is 25.")
    order = range(len(like) - 1, -1, -1) if reverse else range(len(like))
    different = {id(like[i]): i for i in order}
    full: list[list[int]] = []
    filling: dict[Any, list[int]] = {}
    for i in different.values():
        key = like[i].dtype, like[i].device
        bucket = filling.setdefault(key, [])
        bucket.append(i)
        if sum(like[j].numel() * like[j].element_size() for j in bucket) >= mib * MIB:
            full.append(filling.pop(key))
    return full + list(filling.values())


def pack(grads: Sequence[Tensor | None], like: Sequence[Tensor]) -> Tensor:
    """Return gradients as one vector, zeros for those that are missing, with a flag for each at its end."""
    for grad in grads:
        if grad is not None and grad.layout != torch.strided:
            raise TypeError(f"only dense gradients travel between ranks; got layout {grad.layout}. Use `sparse=False`.")
    parts = [(t.new_zeros(t.shape) if g is None else g).reshape(-1) for g, t in zip(grads, like, strict=True)]
    missing = any(grad is None for grad in grads)
    flags = parts[0].new_tensor([float(g is not None) for g in grads]) if missing else parts[0].new_ones(len(grads))
    return torch.cat([*parts, flags])


def unpack(flat: Tensor, grads: Sequence[Tensor | None], like: Sequence[Tensor]) -> list[Tensor | None]:
    """Return the tensors of a summed `pack`; None where no rank had one."""
    *parts, flags = flat.split([*(t.numel() for t in like), len(like)])
    # Only a rank that lacked one has to look, which makes a GPU wait.
    missing = any(grad is None for grad in grads)
    there = (flags.real > 0).tolist() if missing else [True] * len(parts)
    return [part.view(t.shape) if yes else None for part, t, yes in zip(parts, like, there, strict=True)]
