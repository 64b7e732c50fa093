"""The mean of hypergradients over ranks: of a tree, or of the `.grad` of upper variables."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .._modules.rewire import unwrap
from .._support.tensors import describe, is_sharded
from .._support.tree import flatten, map_leaves, map_tensors, named_leaves, replace_tensors, tensors
from ._ranks import divide, pack, place, unpack


def average(grads: Any, *, weight: float, group: Any = None, bucket_mb: float = 25.0) -> Any:
    r"""Return the mean over ranks of a tree of hypergradients, as `bda_optim.hypergradient` returns it.

    .. math:: g = \sum_r n_r g_r \Big/ \sum_r n_r

    Args:
        grads: This rank's hypergradient: the mean over its tasks. Where the weight is 0 only the shapes count, so that
            a rank without tasks passes `hyper` itself.
        weight: n_r, the number of this rank's tasks.
        group: The process group; all ranks by default.
        bucket_mb: As in `Averager`.

    Returns:
        The same tree, the same numbers on every rank.

    >>> average({"w": torch.ones(2)}, weight=3)
    {'w': tensor([1., 1.])}
    """
    _check_weight(weight)
    given = [t.detach() for t in tensors(grads)]
    if place(group)[1] == 1 or not given:
        return map_tensors(lambda t: t.detach().clone(), grads)
    share = _Share(weight, given[0], group)
    parts = divide(given, bucket_mb)
    buckets = [_Bucket([given[i] for i in part]) for part in parts]
    for bucket in buckets:
        bucket.launch(bucket.like, share, group)
    means: dict[int, Tensor | None] = {}
    for part, bucket in zip(parts, buckets, strict=True):
        means |= zip(part, bucket.wait(), strict=True)
    return replace_tensors(grads, [torch.zeros_like(t) if means[i] is None else means[i] for i, t in enumerate(given)])


class Averager:
    r"""Averages the `.grad` of the upper variables over ranks, once per upper iteration.

    .. math:: g = \sum_r n_r g_r \Big/ \sum_r n_r

    It is made once; at that point the upper variables of the first rank are copied to all others. Around the inner
    loops and backward passes of an upper iteration it is called with the number n_r of this rank's tasks; the `.grad`
    that these passes leave is the *mean* over the tasks. On leaving, every rank has the mean over all tasks, the same
    to the bit. What was in `.grad` before, the same on all ranks, stays added to it. A variable that no rank used keeps
    `.grad = None`, as it would in a single process.

    A DistributedDataParallel module does not reduce inside; this does, once. Of a module that `fully_shard` has cut up
    the inner loops use a plain copy, `local`: its parameters are gathered on entering, and the averaged gradients are
    cut up again on leaving, so that optimizer states and resting parameters stay sharded.

    Args:
        upper: The upper variables: a module, a leaf tensor that requires grad, or a tree of them. What is frozen is
            left out.
        local: The same tree with a plain copy of every sharded module, made before `fully_shard`.
        group: The process group; all ranks by default.
        bucket_mb: Gradients travel in buckets of about so many MiB: large ones use the network better, small ones start
            earlier.

    Attributes:
        local: What the inner loops and losses use: `local`, or `upper` without its DistributedDataParallel wrappers.

    >>> from bda_optim.distributed import shard
    >>> model = nn.Linear(2, 1)
    >>> averager = Averager(model)
    >>> mine = shard([torch.ones(2), torch.zeros(2)])
    >>> with averager(weight=len(mine)):
    ...     for task in mine:
    ...         (model(task).sum() / len(mine)).backward()
    >>> model.weight.grad
    tensor([[0.5000, 0.5000]])
    """

    def __init__(self, upper: Any, *, local: Any = None, group: Any = None, bucket_mb: float = 25.0) -> None:
        """Collect the upper variables, and make them equal on all ranks."""
        modules = [leaf for leaf in flatten(upper)[0] if isinstance(leaf, nn.Module)]
        self._group = group
        self._parallel = [part for m in modules for part in m.modules() if isinstance(part, DistributedDataParallel)]
        self.local = map_leaves(unwrap, nn.Module, upper) if local is None else local
        self._own, self._used = _variables(upper), _variables(self.local)
        _check(self._own, self._used)
        pairs = zip(self._own.values(), self._used.values(), strict=True)
        self._copied: list[tuple[Any, Tensor]] = [(p, q) for p, q in pairs if p is not q]
        self._bucket_mb, self._layout = bucket_mb, self._arranged(bucket_mb, idle=())
        if place(group)[1] > 1:
            self._broadcast()

    @contextlib.contextmanager
    def __call__(self, weight: float, *, backwards: int | None = None) -> Iterator[None]:
        """Surround the inner loops and backward passes of one upper iteration.

        An exception inside leaves `.grad` as it is and is raised. The other ranks then wait for this one until it ends
        (under `torchrun` that ends them all) or the process group's timeout has passed.

        Args:
            weight: n_r, the number of this rank's tasks; 0 if it has none.
            backwards: How many times `backward()` will be called on this rank. If given, each bucket of gradients is
                sent in the last of these calls as soon as it is complete, while the rest is still computed; if not, all
                are sent on leaving.
        """
        _check_weight(weight)
        if backwards is not None and backwards < 0:
            raise ValueError(f"`backwards` counts the calls of `backward()`; got {backwards}. Leave it out if unknown.")
        self._gather()
        if place(self._group)[1] == 1:
            yield
        else:
            share = _Share(weight, self._layout[0][0], self._group)
            flight = _Flight([_Bucket(params) for params in self._layout], share, self._group, backwards)
            with contextlib.ExitStack() as stack:
                for module in self._parallel:
                    stack.enter_context(module.no_sync())
                stack.enter_context(flight.hooks())
                yield
            idle = flight.land()
            self._layout = self._arranged(self._bucket_mb, idle)
        self._scatter()

    def _arranged(self, bucket_mb: float, idle: Iterable[Tensor]) -> list[list[Tensor]]:
        """Divide the variables among buckets; those that nobody used last time come last, and hold up no other.

        The last parameters of a module have their gradients first, as DistributedDataParallel supposes too.
        """
        late = set(map(id, idle))
        groups = [[t for t in self._used.values() if (id(t) in late) == yes] for yes in (False, True)]
        return [[ts[i] for i in part] for ts in groups for part in divide(ts, bucket_mb, reverse=True)]

    @torch.no_grad()
    def _gather(self) -> None:
        """Bring the plain copies up to date."""
        for p, q in self._copied:
            q.copy_(p.full_tensor() if is_sharded(p) else p)

    @torch.no_grad()
    def _scatter(self) -> None:
        """Hand the averaged gradients of the plain copies to the originals, each rank its part of sharded ones."""
        for p, q in self._copied:
            grad: Any = q.grad
            if grad is not None and is_sharded(p):
                kinds = sys.modules["torch.distributed.tensor"]
                whole = kinds.DTensor.from_local(grad, p.device_mesh, [kinds.Replicate()] * p.device_mesh.ndim)
                grad = whole.redistribute(placements=p.placements)  # nothing is sent
            if grad is not None:
                p.grad = grad if p.grad is None else p.grad + grad
            q.grad = None

    @torch.no_grad()
    def _broadcast(self) -> None:
        """Give every rank the variables and buffers of the first one; sharded ones are one tensor anyway."""
        modules = [leaf for leaf in flatten(self.local)[0] if isinstance(leaf, nn.Module)]
        alike = [t for t in self._own.values() if not is_sharded(t)]
        alike += [buffer for module in modules for buffer in module.buffers()]
        everyone: Any = dist.group.WORLD
        first = dist.get_global_rank(self._group or everyone, 0)
        for part in divide(alike, 25.0):
            flat = torch.cat([alike[i].reshape(-1) for i in part])
            dist.broadcast(flat, src=first, group=self._group)
            for i, new in zip(part, flat.split([alike[i].numel() for i in part]), strict=True):
                alike[i].copy_(new.view_as(alike[i]))


class _Share:
    """n_r / sum of all n. The sum is asked for at once, and arrives while the inner loops run."""

    def __init__(self, weight: float, like: Tensor, group: Any) -> None:
        kind = torch.float64 if like.device.type in ("cpu", "cuda") else torch.float32
        self.weight = weight
        self._total = torch.tensor(weight, dtype=kind, device=like.device)
        self._work: Any = dist.all_reduce(self._total, group=group, async_op=True)

    def get(self) -> Tensor:
        """Wait for the sum. Where all n are 0 nothing is averaged, and 0 will do."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        return torch.where(self._total > 0, self.weight / self._total, 0.0)


class _Bucket:
    """Gradients of one dtype and device that travel as one vector."""

    def __init__(self, like: Sequence[Tensor]) -> None:
        self.like = list(like)
        self._work: Any = None

    @torch.no_grad()
    def launch(self, grads: Sequence[Tensor | None], share: _Share, group: Any) -> None:
        """Send gradients, times the rank's share; None stands for one that this rank does not have."""
        self._sent = [None] * len(grads) if share.weight == 0 else list(grads)
        self._flat = pack(self._sent, self.like)
        self._flat[: -len(grads)] *= share.get()
        self._work = dist.all_reduce(self._flat, group=group, async_op=True)

    def wait(self) -> list[Tensor | None]:
        """Return the means; None where no rank had a gradient."""
        self._work.wait()
        return unpack(self._flat, self._sent, self.like)


class _Flight:
    """The buckets of one upper iteration, sent in order: each as soon as it and those before it are complete."""

    def __init__(self, buckets: Sequence[_Bucket], share: _Share, group: Any, backwards: int | None) -> None:
        self._buckets, self._share, self._group, self._backwards = buckets, share, group, backwards
        self._next = 0
        self._due = [{id(p): backwards or 0 for p in bucket.like} for bucket in buckets]

    @contextlib.contextmanager
    def hooks(self) -> Iterator[None]:
        """Watch the gradients come in."""
        handles = []
        if self._backwards:
            for i, bucket in enumerate(self._buckets):
                handles += [p.register_post_accumulate_grad_hook(self._arrival(i)) for p in bucket.like]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _arrival(self, i: int) -> Callable[[Tensor], None]:
        def note(p: Tensor) -> None:
            due = self._due[i]
            if not due.get(id(p)):
                raise RuntimeError(
                    f"`backward()` was called more often than announced by backwards={self._backwards}, so gradients "
                    "may have been sent too early. Announce all calls, or leave it out."
                )
            due[id(p)] -= 1
            while self._next < len(self._due) and not any(self._due[self._next].values()):
                self._launch()

        return note

    def _launch(self) -> None:
        bucket = self._buckets[self._next]
        self._next += 1
        bucket.launch([p.grad for p in bucket.like], self._share, self._group)

    def land(self) -> list[Tensor]:
        """Send what has not been sent yet, put the means into `.grad`, and return the variables that nobody used."""
        while self._next < len(self._buckets):
            self._launch()
        idle = []
        for bucket in self._buckets:
            for p, mean in zip(bucket.like, bucket.wait(), strict=True):
                if mean is None:
                    idle.append(p)
                elif p.grad is None:
                    p.grad = mean
                else:
                    p.grad.copy_(mean)
        return idle


def _variables(tree: Any) -> dict[str, Tensor]:
    """Return the tensors of a tree of tensors and modules by name, the same object once."""
    found: dict[str, Tensor] = {}
    for name, leaf in named_leaves(tree, "upper")[0]:
        if isinstance(leaf, nn.Module):
            found |= {f"{name}.{key}": p for key, p in unwrap(leaf).named_parameters()}
        elif isinstance(leaf, Tensor):
            found[name] = leaf
    return {name: t for name, t in found.items() if t.requires_grad}


def _check(own: dict[str, Tensor], used: dict[str, Tensor]) -> None:
    """Refuse upper variables that cannot be averaged, or a copy that is none."""
    for name, t in used.items():
        if is_sharded(t):
            raise ValueError(
                f"inner loops cannot compute with a parameter that `fully_shard` has cut up; got {name!r}. Make a "
                "plain copy of the module before (copy.deepcopy), pass it as `local=`, and use it in the inner loops."
            )
        if not t.is_leaf:
            raise ValueError(
                f"upper variables are leaf tensors, whose `.grad` a backward pass fills; got {name!r}, the result of a "
                "computation. Pass what it was computed from."
            )
    if not used:
        raise ValueError("`upper` has no variable that requires grad. Pass the module or the tensors to be learned.")
    mine, copy = ({f"{name} ({describe(t)})": None for name, t in tree.items()} for tree in (own, used))
    if list(mine) != list(copy):
        differing = sorted(mine.keys() ^ copy.keys()) or list(copy)
        raise ValueError(f"`local` must be a copy of `upper`; got other variables: {differing[:4]}. Copy it again.")


def _check_weight(weight: float) -> None:
    if not (math.isfinite(weight) and weight >= 0):
        raise ValueError(f"`weight` is the number of this rank's tasks, at least 0; got {weight}.")
