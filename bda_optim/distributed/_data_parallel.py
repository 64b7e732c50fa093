"""A loss whose data are spread over ranks, as one differentiable function of variables that all ranks share.

Two functions of autograd do it, each the transpose of the other: `_Copy` hands a shared variable to the ranks (its
pull-back adds up what they send back), `_Sum` adds up what the ranks have (its pull-back hands every rank the shared
cotangent). Each is the other's derivative, so derivatives of any order are right. torch's own do not serve:
`torch.distributed.nn.functional.all_reduce` has a sum in both directions, which counts a shared loss once per rank, and
redistributing a DTensor loses the second derivative (torch 2.13).
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .._context.forward import surroundings
from .._functional_module import FunctionalModule
from .._modules.skeleton import Skeleton
from .._step.objective import Loss
from .._support.autograd_graph import leaves
from .._support.tensors import any_requires_grad, describe
from .._support.torch_private import own_buffers
from .._support.tree import flatten, unflatten
from ._ranks import divide, pack, place, unpack


@dataclasses.dataclass(frozen=True)
class DataParallel:
    r"""The mean over ranks of a loss, each rank with its own part of the data.

    .. math:: f(x, y) = \sum_r n_r f_r(x, y) \Big/ \sum_r n_r

    It is called like the loss, and used in its place as `lower` or `upper`, in `unroll`, `rollout` and `hypergradient`
    or by itself. All ranks have the same variables and call it together; its value and its gradients (also the
    hypergradient through it) are those of the whole data, on every rank. Each evaluation sums one number over the
    ranks, each gradient one pass over the variables: for big inner problems, where the tasks cannot be divided instead.

    The ranks must take the same way through the loss, as everywhere in torch.distributed: a rank that has no examples
    left passes some all the same, with weight 0. Gradients are summed for the variables that come through the loss's
    first two arguments; a tensor that requires grad and comes by another way (the batch, a closure) is refused, since
    its gradient would be that of one rank only. Buffers, as batch statistics, are each rank's own.

    Args:
        loss: ``loss(net_or_params, hyper, batch)``, the mean over the examples of this rank's `batch`.
        weight: n_r, the number of these examples, or a function of the batch that returns it; the ranks count alike by
            default.
        group: The process group; all ranks by default.

    >>> f = DataParallel(lambda y, x, batch: ((y - batch) ** 2).mean(), weight=len)
    >>> f(torch.zeros(()), None, torch.tensor([1.0, 3.0]))  # without a process group
    tensor(5.)
    """

    loss: Loss
    weight: float | Callable[[Any], float] = 1.0
    group: Any = None

    def __call__(self, net: Any, hyper: Any, batch: Any) -> Tensor:
        """Return the loss of the whole data."""
        if place(self.group)[1] == 1:
            return self.loss(net, hyper, batch)
        if any_requires_grad(batch):
            raise ValueError(
                "a batch of a data-parallel loss is one rank's own, and a gradient into it would miss the other ranks; "
                "got a tensor of the batch that requires grad. Detach it, or compute it inside the loss from `hyper`."
            )
        weight = float(self.weight(batch) if callable(self.weight) else self.weight)
        group = self.group
        with _shared(net, group) as (own_net, ys), _shared(hyper, group) as (own_hyper, xs):
            value = self.loss(own_net, own_hyper, batch)
        _refuse_others(value, [*ys, *xs])
        value = value.reshape(())
        pair = torch.stack([weight * value, value.new_tensor(weight)])
        (summed,) = _Sum.apply(group, [pair.detach()], pair)  # type: ignore[no-untyped-call]
        mean: Tensor = summed[0] / summed[1].detach()
        return mean


@contextlib.contextmanager
def _shared(tree: Any, group: Any) -> Iterator[tuple[Any, list[Tensor]]]:
    """Yield a tree whose variables are this rank's copies, and the copies; modules are copied without their tensors."""
    parts, spec = flatten(tree)
    skeletons = {i: Skeleton(_plain(part)) for i, part in enumerate(parts) if isinstance(part, nn.Module)}
    found: dict[int, Tensor] = {}
    for i, part in enumerate(parts):
        inside = [place.get() for place in skeletons[i].params.values()] if i in skeletons else [part]
        found |= {id(t): t for t in inside if isinstance(t, Tensor) and t.requires_grad}
    copies: dict[int, Tensor] = {}
    if found and torch.is_grad_enabled():
        copies = dict(zip(found, _Copy.apply(group, *found.values()), strict=True))  # type: ignore[no-untyped-call]
    for i, part in enumerate(parts):
        if i in skeletons:
            parts[i] = skeletons[i].root
            for spot in skeletons[i].params.values():
                spot.put(copies.get(id(spot.original), spot.original))
        else:
            parts[i] = copies.get(id(part), part)
    with surroundings():
        yield unflatten(parts, spec), list(copies.values())
    for skeleton in skeletons.values():  # a forward pass may assign another tensor to a buffer's name
        for name, spot in skeleton.buffers.items():
            if spot.get() is not spot.original:
                path, _, key = name.rpartition(".")
                own_buffers(skeleton.module.get_submodule(path))[key] = spot.get()


def _plain(module: nn.Module) -> nn.Module:
    if not isinstance(module, FunctionalModule):
        return module
    if module._tasks is not None:
        raise ValueError(
            f"a data-parallel loss takes one task at a time; got a module with tasks={module._tasks}. Divide the tasks "
            "among the ranks instead (`shard`, `Averager`)."
        )
    root: nn.Module = module._skeleton.root
    return root


def _refuse_others(value: Any, copies: Sequence[Tensor]) -> None:
    """Raise where a loss is no scalar, or depends on more than the copies."""
    if not isinstance(value, Tensor) or value.numel() != 1:
        got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(
            f"a data-parallel loss must be a scalar tensor; got {got}. Reduce it, for example by `.mean()`."
        )
    others = leaves([value], [t.grad_fn for t in copies if t.grad_fn is not None])
    if others:
        raise ValueError(
            "a data-parallel loss uses a tensor that requires grad but came by another way than its arguments; got one "
            f"of {describe(others[0])}. Its gradient would be that of one rank only: pass it in `hyper=`."
        )


class _Copy(torch.autograd.Function):
    """Shared variables as this rank sees them: ``_Copy.apply(group, *tensors)``."""

    @staticmethod
    def forward(ctx: Any, group: Any, *given: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the same."""
        ctx.group, ctx.like = group, [None if t is None else t.detach() for t in given]
        ctx.set_materialize_grads(False)
        return tuple(None if t is None else t.view_as(t) for t in given)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        """Add up what the ranks send back."""
        return None, *_Sum.apply(ctx.group, ctx.like, *grads)  # type: ignore[no-untyped-call]


class _Sum(torch.autograd.Function):
    """Sums over the ranks: ``_Sum.apply(group, like, *tensors)``; None where no rank has a tensor."""

    @staticmethod
    def forward(ctx: Any, group: Any, like: Sequence[Tensor | None], *given: Tensor | None) -> tuple[Any, ...]:
        """Add up, in one vector for each dtype."""
        ctx.group = group
        ctx.set_materialize_grads(False)
        there = [i for i, t in enumerate(like) if t is not None]
        known = [t for t in like if t is not None]
        summed: list[Tensor | None] = [None] * len(given)
        for part in divide(known, math.inf):
            own, shapes = [given[there[i]] for i in part], [known[i] for i in part]
            flat = pack(own, shapes)
            dist.all_reduce(flat, group=group)  # not the functional one, which aborts where another raises
            for i, total in zip(part, unpack(flat, own, shapes), strict=True):
                summed[there[i]] = None if total is None else total.clone()
        return tuple(summed)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        """Hand every rank what is shared."""
        return None, None, *_Copy.apply(ctx.group, *grads)  # type: ignore[no-untyped-call]
