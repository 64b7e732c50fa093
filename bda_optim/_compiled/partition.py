"""A step and its pull-back as one graph, divided so that the second half need not do the work of the first again.

Compiled apart from each other, they take 4.6 times as long on the counter-example, 1.9 times on an MLP and 1.7 times on
a conv net (`benchmarks/passes.py`).
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from .._support.torch_private import schema
from .functional import changes_arguments

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node

_MADE = ("full", "zeros", "ones", "scalar_tensor", "arange", "eye", "clone", "_to_copy", "lift_fresh_copy")
"""Operations that fill or copy memory; with `new_` before or `_like` behind them too."""


def partition(joint: GraphModule, first: int, tangents: Sequence[int]) -> tuple[GraphModule, GraphModule, int] | None:
    """Divide a graph into a part without its tangents and one with them; None if that cannot be done.

    It cannot where an operation changes its arguments, or where the second part draws random numbers.

    Saved for the second part are results that are neither elementwise nor views, such as products and sums; what is
    elementwise is computed again, fused with what uses it.

    Args:
        joint: The graph.
        first: How many of its outputs belong to the first part.
        tangents: Which of its inputs only the second part takes.

    Returns:
        The first part, which gives its outputs and the saved tensors; the second, which takes the inputs as the graph
        does, with the saved tensors before the tangents; and how many are saved.
    """
    nodes = list(joint.graph.nodes)
    if any(map(changes_arguments, nodes)):
        return None
    inputs = [node for node in nodes if node.op == "placeholder"]
    later = {inputs[i] for i in tangents}
    for node in nodes:
        if node.op == "call_function" and not later.isdisjoint(node.all_input_nodes):
            later.add(node)
    drawn = [node for node in nodes if draws_numbers(node)]
    if not later.isdisjoint(drawn):
        return None
    outputs = list(nodes[-1].args[0])
    before = [node for node in inputs if node not in later]
    wanted = {node for one in later for node in one.all_input_nodes if node not in later}
    wanted.update(node for node in outputs[first:] if node not in later)
    saved = []
    for node in reversed(nodes):
        if node in wanted and node.op == "call_function":
            if _is_cheap(node):
                wanted.update(node.all_input_nodes)
            else:
                saved.append(node)
    ahead = _extract(joint, before, [*outputs[:first], *saved], also=drawn)  # as many numbers as uncompiled code draws
    start = min(tangents, default=len(inputs))
    back = _extract(joint, [*inputs[:start], *saved, *inputs[start:]], outputs[first:])
    return ahead, back, len(saved)


def draws_numbers(node: Node) -> bool:
    """Whether an operation draws random numbers."""
    return torch.Tag.nondeterministic_seeded in _tags(node)


def _extract(
    joint: GraphModule, inputs: Sequence[Node], outputs: Sequence[Node], also: Sequence[Node] = ()
) -> GraphModule:
    """Return the part of a graph that leads from inputs to outputs, and to other nodes that must not be lost."""
    from torch import fx

    graph, copies = fx.Graph(), {}
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = node.meta
    needed, waiting = set(copies), [*outputs, *also]
    while waiting:
        node = waiting.pop()
        if node not in needed:
            needed.add(node)
            waiting += node.all_input_nodes
    for node in joint.graph.nodes:
        if node in needed and node not in copies:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output([copies[node] for node in outputs])
    return fx.GraphModule(joint, graph)


def _is_cheap(node: Node) -> bool:
    """Whether a result is had again for nothing, or nearly so."""
    if node.target is operator.getitem:
        return _is_cheap(node.all_input_nodes[0])
    signature = schema(node.target)
    if signature is None or draws_numbers(node):
        return False
    if any(result.alias_info is not None for result in signature.returns):
        return True
    name = signature.name.removeprefix("aten::").removeprefix("new_").removesuffix("_like")
    return name in _MADE or torch.Tag.pointwise in _tags(node)


def _tags(node: Node) -> Iterable[Any]:
    return getattr(node.target, "tags", ())
