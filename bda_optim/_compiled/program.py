"""A function of tensors, traced and compiled."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._context.environment import Ambient
from .._support.tensors import layout
from .._support.torch_private import announced_compilation, call_and_enter, trace_graph, version_of
from .._support.tree import detach
from .compiling import Choices
from .failure import reads_a_value
from .functional import functional
from .inductor import compile_graph, reshape_views, scale_terms
from .matmul import narrow, spell_out
from .partition import draws_numbers, partition
from .pooling import pool_with_channels_last

if TYPE_CHECKING:
    from torch.fx import GraphModule

Function = Callable[..., list[Tensor | None]]


@dataclasses.dataclass
class Program:
    """A compiled graph.

    Attributes:
        call: The graph; takes and gives flat tensors.
        constants: What it takes beside its arguments: tensors of closures, by position, or fixed ones.
        present: Which outputs there are.
    """

    call: Callable[..., Any]
    constants: list[int | Tensor]
    present: list[bool]

    def __post_init__(self) -> None:
        """Prepare: after the first call the program is entered directly, where that is the same."""
        self._enter: Callable[..., Any] | None = None
        self._fresh = True

    def extra(self, captured: Sequence[Tensor]) -> list[Tensor]:
        """Return the constants, given the tensors of closures as they are now."""
        return [captured[c].detach() if isinstance(c, int) else c for c in self.constants]

    def __call__(self, inputs: Sequence[Tensor], extra: Sequence[Tensor]) -> list[Any]:
        """Run it; outputs that do not exist are None."""
        if self._enter is not None:
            outputs = self._enter([*inputs, *extra])
        elif self._fresh:
            self._fresh = False
            outputs, self._enter = call_and_enter(self.call, [*inputs, *extra])
        else:
            outputs = self.call(*inputs, *extra)
        if len(outputs) == len(self.present):
            return list(outputs)
        rest = iter(outputs)
        return [next(rest) if present else None for present in self.present]


def trace(function: Function, inputs: Sequence[Tensor]) -> tuple[GraphModule, list[Tensor | None]]:
    """Return a function as a graph of tensor operations, and its result; the random state is as before.

    A trace cannot read the value of a tensor. Libraries that read some only where they are not being compiled, as
    `transformers` does of its masks, are traced a second time with ``torch.compiler.is_compiling()``; what the graph
    is compared with comes from an ordinary call then.
    """
    result: list[Tensor | None] = []

    def present(*flat: Tensor) -> list[Tensor]:
        result[:] = function(*flat)
        return [t for t in result if t is not None]

    ambient = Ambient(inputs)
    before = ambient.rng()
    try:
        graph = trace_graph(present, inputs)
    except RuntimeError as error:
        if not reads_a_value(error):
            raise
        ambient.set_rng(before)
        with announced_compilation():
            graph = trace_graph(present, inputs)
        ambient.set_rng(before)
        result[:] = function(*inputs)
    finally:
        ambient.set_rng(before)
    return graph, detach(result)


def build(
    function: Function, inputs: Sequence[Tensor], captured: Sequence[Tensor], choices: Choices
) -> tuple[Program, list[Tensor | None]]:
    """Trace and compile a function; return the program, and what the traced run gave.

    Random numbers are drawn as uncompiled code draws them, so that both can be compared, and replayed.
    """
    graph, result = trace(function, inputs)
    constants = _lift_constants(graph)
    graph = functional(graph, [*inputs, *constants])
    call = _compiled(graph, [*inputs, *constants], choices)
    return Program(call, _places(constants, captured), [t is not None for t in result]), result


@dataclasses.dataclass
class Pair:
    """A function and its pull-back, which takes what the function saved for it."""

    ahead: Program
    back: Program
    steady: bool
    """Whether the state after it is laid out as the one before, so that it can follow itself."""

    draws: bool
    """Whether random numbers are drawn."""

    def versions(self, captured: Sequence[Tensor]) -> list[tuple[Tensor, int]]:
        """Return the tensors beside their arguments that both parts read, with their versions."""
        held = [captured[c] if isinstance(c, int) else c for c in self.ahead.constants]
        return [(t, version_of(t)) for t in held]


def build_pair(
    function: Function,
    inputs: Sequence[Tensor],
    tangents: Sequence[Tensor],
    *,
    state: int,
    first: int,
    captured: Sequence[Tensor],
    choices: Choices,
) -> Pair | None:
    """Trace a step and its pull-back as one function, divide it, and compile both parts.

    Args:
        function: Gives the state after the step, its losses, and the cotangents.
        inputs: Its first arguments, the state before the step first.
        tangents: Its last arguments, on which only the cotangents depend.
        state: How many tensors the state has.
        first: How many outputs do not depend on the tangents.
        captured: The tensors of closures.
        choices: How to compile.

    Returns:
        None if it cannot be divided, or if the parts together give something else than the whole.
    """
    graph, result = trace(function, [*inputs, *tangents])
    constants = _lift_constants(graph)
    graph = functional(graph, [*inputs, *tangents, *constants])
    there = [t is not None for t in result]
    divided = partition(graph, sum(there[:first]), range(len(inputs), len(inputs) + len(tangents)))
    if divided is None:
        return None
    places = _places(constants, captured)
    *parts, count = divided
    ahead = Program(_compiled(parts[0], [*inputs, *constants], choices), places, there[:first] + [True] * count)
    extra = ahead.extra(captured)
    outputs = ahead(inputs, extra)
    saved = outputs[first:]
    back = Program(_compiled(parts[1], [*inputs, *saved, *tangents, *constants], choices), places, there[first:])
    if not agree([*outputs[:first], *back([*inputs, *saved, *tangents], extra)], result):
        return None
    steady = all(layout(a) == layout(b) for a, b in zip(outputs, inputs[:state], strict=False))
    return Pair(ahead, back, steady, any(map(draws_numbers, graph.graph.nodes)))


def _compiled(graph: GraphModule, inputs: Sequence[Tensor], choices: Choices) -> Callable[..., Any]:
    spell_out(graph)
    narrow(graph)
    pool_with_channels_last(graph)
    scale_terms(graph)
    reshape_views(graph)
    graph.recompile()
    return compile_graph(graph, inputs, choices)


def _places(constants: Sequence[Tensor], captured: Sequence[Tensor]) -> list[int | Tensor]:
    """Return the positions of constants among the tensors of closures, or themselves."""
    return [next((i for i, t in enumerate(captured) if _is_same(t, c)), c) for c in constants]


def agree(got: Sequence[Tensor | None], want: Sequence[Tensor | None]) -> bool:
    """Whether two results agree up to rounding, relative to the largest entry of each tensor.

    A gradient that vanishes in theory (of a bias before a normalisation) consists of rounding errors of the others.
    """
    pairs = [(a, b) for a, b in zip(got, want, strict=True) if a is not None and b is not None and b.numel()]
    pairs = [(a, b) for a, b in pairs if b.is_floating_point()]
    sizes = [float(b.abs().max()) for _, b in pairs]
    noise = max((size for size in sizes if math.isfinite(size)), default=0.0)
    for (a, b), size in zip(pairs, sizes, strict=True):
        eps = torch.finfo(b.dtype).eps
        allowed = 10 * eps**0.5 * size + 100 * eps * noise
        if not torch.allclose(a, b, rtol=0, atol=allowed if math.isfinite(allowed) else 0.0, equal_nan=True):
            return False
    return True


def _lift_constants(graph: GraphModule) -> list[Tensor]:
    """Turn the tensors that a trace reads beside its arguments into arguments."""
    last = next(node for node in reversed(graph.graph.nodes) if node.op == "placeholder")
    captured: list[Tensor] = []
    for node in list(graph.graph.nodes):
        if node.op == "get_attr" and isinstance(value := getattr(graph, node.target, None), Tensor):
            with graph.graph.inserting_after(last):
                last = graph.graph.placeholder(f"captured_{len(captured)}")
            node.replace_all_uses_with(last)
            graph.graph.erase_node(node)
            last.meta["val"] = value.detach()
            captured.append(value.detach())
    graph.recompile()
    return captured


def _is_same(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and layout(a.detach()) == layout(b)
