"""Products of matrices in a traced graph, written so that they are fast on a CPU."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._support.torch_private import has_onednn_linear, onednn_linear
from .decisions import Decisions

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node

_SMALL_PRODUCT = 4096
"""Products of matrices with up to so many multiplications each are spelled out."""

_LARGE_MATRIX, _NARROW = 200_000, 64
"""A product of a matrix with at least so many entries and one of at most so many rows, transposed, is looked at."""

_TURNS = 5


def spell_out(graph: GraphModule) -> None:
    """Write products of small batched matrices as sums, which the compiler fuses with what surrounds them.

    A call of the library for 32 products of 5 x 64 with 64 x 5 numbers takes 24 us on a CPU. With them a rollout of 32
    heads and its adjoint take 1.6 times as long (`benchmarks/passes.py`).
    """
    aten = torch.ops.aten
    for node in list(graph.graph.nodes):
        if node.op != "call_function" or node.target is not aten.bmm.default:
            continue
        left, right = node.args
        shape = left.meta["val"].shape
        if left.meta["val"].device.type != "cpu" or math.prod(shape[1:]) * right.meta["val"].shape[2] > _SMALL_PRODUCT:
            continue
        with graph.graph.inserting_before(node):
            rows = graph.graph.call_function(aten.unsqueeze.default, (left, 3))
            columns = graph.graph.call_function(aten.unsqueeze.default, (right, 1))
            terms = graph.graph.call_function(aten.mul.Tensor, (rows, columns))
            product = graph.graph.call_function(aten.sum.dim_IntList, (terms, [2]))
        product.meta = dict(node.meta)  # the next product may ask for its shape
        node.replace_all_uses_with(product)
        graph.graph.erase_node(node)


def narrow(graph: GraphModule) -> None:
    """Let oneDNN multiply large matrices by narrow ones, X W^T, where it is faster than the BLAS of torch.

    On an AMD EPYC it takes 0.55 to 0.65 of the time for 7000 x 784 by 784 x 10 to 32 numbers, and 1.1 for smaller ones.
    Without it softmax regression on such data takes 1.5 times as long (`benchmarks/passes.py`).
    """
    aten = torch.ops.aten
    for node in list(graph.graph.nodes):
        if node.op != "call_function" or node.kwargs or node.target not in (aten.mm.default, aten.addmm.default):
            continue
        *bias, left, right = node.args
        if not _fits(left, right) or not _is_faster(
            *left.meta["val"].shape, right.meta["val"].shape[1], torch.get_num_threads()
        ):
            continue
        with graph.graph.inserting_before(node):
            weight = graph.graph.call_function(aten.t.default, (right,))
            product = graph.graph.call_function(_operator(), (left, weight))
            for term in bias:
                product = graph.graph.call_function(aten.add.Tensor, (product, term))
        product.meta = dict(node.meta)
        node.replace_all_uses_with(product)
        graph.graph.erase_node(node)


def _fits(left: Node, right: Node) -> bool:
    x, w = left.meta["val"], right.meta["val"]
    on_cpu = x.device.type == w.device.type == "cpu" and x.dtype == w.dtype == torch.float32
    large = x.numel() >= _LARGE_MATRIX and w.shape[1] <= _NARROW
    return bool(on_cpu and large and x.is_contiguous() and w.t().is_contiguous() and has_onednn_linear())


@functools.cache
def _is_faster(rows: int, inner: int, columns: int, threads: int) -> bool:
    """Return whether oneDNN is faster: as a measurement says, once per machine."""
    decisions = Decisions(f"product {rows} x {inner} x {columns}")
    return decisions.get("oneDNN", lambda: _measured(rows, inner, columns), fixed=lambda: False)


def _measured(rows: int, inner: int, columns: int) -> bool:
    """Measure both ways, in turns."""
    x, w = (torch.ones(size, inner, dtype=torch.float32, device="cpu") for size in (rows, columns))
    best: dict[str, float] = {}
    ways: dict[str, Callable[[], Tensor]] = {"BLAS": lambda: x @ w.t(), "oneDNN": lambda: onednn_linear(x, w)}
    for _ in range(_TURNS):
        for name, product in ways.items():
            start = time.perf_counter()
            with torch.autocast("cpu", enabled=False):
                product()
            best[name] = min(best.get(name, math.inf), time.perf_counter() - start)
    return best["oneDNN"] < 0.9 * best["BLAS"]


@functools.cache
def _operator() -> Any:
    """Return the product as an operator of its own, which the compiler calls as it is."""
    found = torch.library.custom_op("bda_optim::narrow_product", onednn_linear, mutates_args=())
    found.register_fake(lambda x, weight: x.new_empty(x.shape[0], weight.shape[0]))
    return torch.ops.bda_optim.narrow_product.default
