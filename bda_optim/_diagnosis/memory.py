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


def predicted(loop: InnerLoop, steps: int, scalars: int) -> dict[str, int]:
    """Return `forecast` for a rollout of `steps` steps, after evaluating two of them."""
    sizes = step_bytes(loop), state_bytes(loop.state)
    return forecast(*sizes, steps=steps, scalars=scalars, overhead=overhead_of(loop.state))


def forecast(graph: int, state: int, *, steps: int, scalars: int, overhead: float = 1.0) -> dict[str, int]:
    """Return adjoint -> bytes by which a hypergradient grows at its peak, beyond the problem itself.

    Beside what an adjoint stores there are always the first and the last state, cotangents, and what one step needs
    while it is evaluated: 3 to 5 states and one and a half graphs, measured on three networks. `Checkpointed` stores
    its states in blocks of four.

    Args:
        graph: The bytes of the graph of one step.
        state: The bytes of a state.
        steps: K, the number of inner steps.
        scalars: P, the number of upper scalars.
        overhead: The growth of the process over the bytes of its tensors.

    >>> forecast(100, 10, steps=16, scalars=2)["Unroll"]
    1780
    """
    starts = segments(steps, 2.25)
    lengths = [stop - start for start, stop in zip(starts, [*starts[1:], steps], strict=True)]
    stored = max(4 * -(-i // 4) * state + length * graph for i, length in enumerate(lengths))
    working = 3 * state + 3 * graph // 2
    found = {
        "Unroll": steps * graph + working,
        "Checkpointed": stored + 2 * state + working,
        "ForwardMode": 2 * scalars * state + working,
        "Implicit": graph + 4 * state + working,
    }
    return {name: int(overhead * size) for name, size in found.items()}


def overhead_of(state: InnerState) -> float:
    """Return by how much a process grows for a byte of tensors.

    On the CPU that is 1.2 to 1.4, measured on four networks: the gaps of glibc's allocator, and the graph's nodes.
    """
    return 1.25 if state.params[0].device.type == "cpu" else 1.0


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
