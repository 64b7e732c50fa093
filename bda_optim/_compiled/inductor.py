"""A traced graph becomes machine code: Inductor with its cache on disk, without its probes of the processor."""

from __future__ import annotations

import hashlib
import inspect
import logging
import types
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._support import torch_private
from .compiling import Choices
from .one_source import one_source
from .trace_key import cell_is_filled

if TYPE_CHECKING:
    from torch.fx import GraphModule

log = logging.getLogger("bda_optim")


class _Processor:
    """Whether the vector instructions that the processor has are used without a trial of the C++ compiler.

    Inductor compiles and loads a trial program per instruction set: 7 to 10 s with an empty cache, and 0.8 s in every
    further process. Here the program itself is the trial; if it cannot be built, Inductor makes its trials after all.
    """

    def __init__(self) -> None:
        self.trusted = True

    def distrust(self) -> None:
        """Forget what was taken for granted."""
        self.trusted = False
        torch_private.forget_instruction_sets()


PROCESSOR = _Processor()


_OPTIONS: dict[str, Any] = {
    "fallback_random": True,  # as uncompiled code draws, so that both can be compared
    "layout_optimization": False,  # activations copied to channels last, and back: 1.29 times as long on a conv net
    "size_asserts": False,  # programs are found by the layout of what they are given; 1.08 times as long with them
}


def compile_graph(graph: GraphModule, inputs: Sequence[Tensor], choices: Choices) -> Callable[..., Any]:
    """Return a graph of tensor operations as a compiled function of flat tensors."""
    options = {**_OPTIONS, "cpp_wrapper": choices.cpp_wrapper}
    if PROCESSOR.trusted:
        spare = _copy(graph)  # the compiler changes what it is given
        try:
            return _compile(graph, inputs, {**options, "cpp.vec_isa_ok": True})
        except Exception as error:
            if not torch_private.is_of_the_toolchain(error):
                raise
            log.debug("the C++ compiler failed; its instruction sets are tried one by one", exc_info=True)
            graph = spare
            PROCESSOR.distrust()
    return _compile(graph, inputs, options)


def _copy(graph: GraphModule) -> GraphModule:
    """Return a copy that shares what its nodes know of their values: `deepcopy` fails on tensors inside of `vmap`."""
    from torch import fx

    nodes = fx.Graph()
    nodes.output(nodes.graph_copy(graph.graph, {}))
    return fx.GraphModule(graph, nodes)


def reshape_views(graph: GraphModule) -> None:
    """Replace views by reshapes: the compiler lays out some results otherwise than torch, and they have no such view.

    A `cat` with an empty tensor is dense in torch, while Inductor returns the other tensor as it is laid out. The cache
    of keys and values in `transformers` starts in this way.
    """
    aten = torch.ops.aten
    for node in graph.graph.find_nodes(op="call_function", target=aten.view.default):
        node.target = aten.reshape.default


def scale_terms(graph: GraphModule) -> None:
    """Write ``add(x, y, alpha=a)`` as ``x + a y``: Inductor loses `alpha` where x or y is a product of matrices.

    So it is in torch 2.13, where weight decay after a linear layer would be compiled with a decay of 1. The first
    comparison noticed, and the step ran uncompiled.
    """
    aten = torch.ops.aten
    for node in graph.graph.find_nodes(op="call_function", target=aten.add.Tensor):
        alpha = node.kwargs.get("alpha", 1)
        if alpha == 1 or not hasattr(node.args[1], "meta"):
            continue
        left, right = node.args
        with graph.graph.inserting_before(node):
            scaled = graph.graph.call_function(aten.mul.Tensor, (right, alpha))
        scaled.meta = dict(right.meta)
        node.args, node.kwargs = (left, scaled), {}


def _compile(graph: GraphModule, inputs: Sequence[Tensor], options: dict[str, Any]) -> Callable[..., Any]:
    # torch leaves the tables of lowerings and decompositions out of the key of its cache.
    with torch.no_grad(), one_source(), torch_private.tagged_cache(f"bda_optim {TABLES.digest()}"):
        return torch_private.compile_graph(graph, inputs, options)


class _Tables:
    """A digest of what Inductor makes of each operator, as it is now: it may have been patched."""

    def __init__(self) -> None:
        self._seen: list[Any] = []
        self._digest = ""

    def digest(self) -> str:
        """Return it; made anew (in 75 ms) only where an entry is another one."""
        now = [entry for table in torch_private.operator_tables() for entry in table.items()]
        if now != self._seen:
            kept = [(operator, function) for operator, function in now if not _only_calls(function)]
            text = "\n".join(sorted(f"{_name(operator)}: {_code(function)}" for operator, function in kept))
            self._seen, self._digest = now, hashlib.sha256(text.encode()).hexdigest()
        return self._digest


TABLES = _Tables()


def _name(operator: Any) -> str:
    """Return the name of an operator or a function; what has none is not in a traced graph."""
    return str(operator) if torch_private.schema(operator) else getattr(operator, "__name__", "")


def _only_calls(function: Any) -> bool:
    """Whether an entry says that an operator is called as it is, which holds without it too.

    The compiler makes such entries as it meets operators. They would give the second program of a problem another key
    in the process that compiles the first than in one that finds it on disk.
    """
    return getattr(inspect.unwrap(function), "__qualname__", "") == "fallback_handler.<locals>.handler"


def _code(function: Any, depth: int = 3) -> str:
    """Return what is written in a function, and in those of its closure: the same in every process."""
    while not isinstance(function, types.FunctionType):
        inner = getattr(function, "func", None) or getattr(function, "__func__", None)
        if inner is None:
            return f"{type(function).__name__} {getattr(function, '__name__', '')}"
        function = inner
    function = inspect.unwrap(function)
    code = getattr(function, "__code__", None)
    if code is None:
        return _code(function, depth)
    inside = [_constant(const) for const in code.co_consts]
    if depth:
        cells = [cell.cell_contents for cell in function.__closure__ or () if cell_is_filled(cell)]
        inside += [_code(cell, depth - 1) if callable(cell) else _constant(cell) for cell in cells]
    return f"{function.__module__}.{function.__qualname__} {code.co_code.hex()} {inside}"


def _constant(value: Any) -> str:
    """Return a plain value as text, without an address and in a fixed order."""
    if isinstance(value, types.CodeType):
        return f"{value.co_code.hex()} {[_constant(const) for const in value.co_consts]}"
    if isinstance(value, tuple | list | set | frozenset):
        return str(sorted(_constant(item) for item in value))
    plain = (bool, int, float, complex, str, bytes, type(None), torch.dtype)
    return repr(value) if isinstance(value, plain) else type(value).__name__
