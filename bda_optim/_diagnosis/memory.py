"""How many bytes each adjoint will hold, from what two recorded steps save."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from .._adjoints.revolve import segments
from .._context.environment import Ambient
from .._context.forward import surroundings
from .._support.tree import replace_tensors, tensors
from .._support.types import InnerState
from .inner_loop import InnerLoop

EVALUATED = 2
"""How many steps `step_bytes` evaluates."""


def forecast(graph: int, state: int, *, steps: int, scalars: int) -> dict[str, int]:
    """Return adjoint -> bytes that a rollout holds at its peak, beyond the problem itself.

    Args:
        graph: The bytes of the graph of one step.
        state: The bytes of a state.
        steps: K.
        scalars: P, the number of upper scalars.

    >>> forecast(100, 10, steps=16, scalars=2)["Unroll"]
    1600
    """
    starts = segments(steps, 2.25)
    lengths = [stop - start for start, stop in zip(starts, [*starts[1:], steps], strict=True)]
    return {
        "Unroll": steps * graph,
        "Checkpointed": max(i * state + length * graph for i, length in enumerate(lengths, 1)),
        "ForwardMode": 2 * scalars * state + graph,
        "Implicit": graph + 4 * state,
    }


def step_bytes(loop: InnerLoop) -> int:
    """Return how many bytes the graph of one step holds.

    It is what the second of two recorded steps saves and the first did not: data and captured tensors are saved by
    both.
    """
    ambient = Ambient(loop.state.params)
    rng = ambient.rng()
    saved: list[list[weakref.ref[_Saved]]] = []

    def pack(tensor: Tensor) -> _Saved:
        held = _Saved(tensor)
        saved[-1].append(weakref.ref(held))
        return held

    hyper = tuple(t.detach().requires_grad_(i in loop.variables) for i, t in enumerate(loop.hyper))
    state = replace_tensors(loop.state, [t.detach().clone() for t in tensors(loop.state)])
    try:
        # The hooks come first: inside a rollout they are refused, since a checkpoint of the user's would be wrong.
        with torch.enable_grad(), saved_tensors_hooks(pack, lambda held: held.tensor), surroundings():
            for number in range(EVALUATED):
                saved.append([])
                state, _ = loop.step(state, hyper, loop.items[min(number, loop.steps - 1)])
    finally:
        ambient.set_rng(rng)
    # The graph behind `state` is alive: what it has let go of (the inner gradients' own graphs) does not count.
    first, second = ([held.tensor for ref in refs if (held := ref()) is not None] for refs in saved)
    batches = tensors([item.batch for item in loop.items[:EVALUATED]])
    known = {_place(t) for t in (*first, *loop.hyper, *batches)}
    storages = {_place(t): t.untyped_storage().nbytes() for t in second}
    return sum(size for place, size in storages.items() if place not in known)


class _Saved:
    """A tensor that a graph holds; it dies with the graph."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def state_bytes(state: InnerState) -> int:
    """Return the size of a state: parameters, what the rule remembers, and buffers."""
    return sum(t.numel() * t.element_size() for t in tensors(state))
