"""The state of a rollout: in a wider dtype, with a task dimension, joined from chunks of tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from .._support.tensors import is_differentiable
from .._support.tree import map_tensors, replace_tensors, tensors
from .._support.types import InnerState, Rule
from .losses import Trace


def expand(state: InnerState, tasks: int, rule: Rule) -> InnerState:
    """Give every tensor of a state a task dimension in front; numbers of an elementwise rule are shared."""

    def grow(t: Tensor) -> Tensor:
        return t.expand(tasks, *t.shape)

    memory = map_tensors(lambda t: t if rule.elementwise and t.dim() == 0 else grow(t), state.rule)
    return InnerState(tuple(map(grow, state.params)), memory, tuple(map(grow, state.buffers)))


def join(parts: Sequence[tuple[InnerState, Trace]]) -> tuple[InnerState, Trace]:
    """Join the results of chunks of tasks."""
    if len(parts) == 1:
        return parts[0]
    columns = zip(*(tensors(state) for state, _ in parts), strict=True)
    joined = [column[0] if column[0].dim() == 0 else torch.cat(column) for column in columns]
    lower = torch.cat([trace.lower for _, trace in parts], dim=1)
    upper = [trace.upper for _, trace in parts if trace.upper is not None]
    return replace_tensors(parts[0][0], joined), Trace(lower, torch.cat(upper, dim=1) if upper else None)


def at_home(values: Sequence[Tensor], params: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return upper variables on the device of the parameters, if that is one: each is moved once, and not in each step.

    Their gradients come back to where they were, once as well.
    """
    homes = {p.device for p in params}
    if len(homes) > 1:
        return tuple(values)
    (home,) = homes
    return tuple(t if t.device == home else t.to(home, non_blocking=True) for t in values)


def in_master(state: InnerState, master: torch.dtype | None) -> InnerState:
    """Return a state with the parameters and the rule's memory of them in a wider dtype; None leaves them as they are.

    What is wider than `master` already stays.
    """
    if master is None:
        return state
    if not isinstance(master, torch.dtype) or not master.is_floating_point:
        raise TypeError(f"`master` must be a floating-point dtype, as torch.float32, or None; got {master!r}.")

    def widen(t: Tensor) -> Tensor:
        return t.to(master) if is_differentiable(t) and torch.promote_types(t.dtype, master) == master else t

    return state._replace(params=tuple(map(widen, state.params)), rule=map_tensors(widen, state.rule))


def matching(params: Mapping[str, Tensor], originals: Mapping[str, Tensor]) -> list[Tensor]:
    """Return the tensors of `params` in the order of the optimizer's parameters, which they must match."""
    if set(params) != set(originals):
        raise ValueError(
            f"`params` must have the names of the optimizer's parameters, {', '.join(originals)}; got "
            f"{', '.join(params)}."
        )
    for name, original in originals.items():
        if params[name].shape != original.shape:
            raise ValueError(
                f"`params[{name!r}]` must have the shape of the parameter, {tuple(original.shape)}; got "
                f"{tuple(params[name].shape)}."
            )
    return [params[name] for name in originals]
