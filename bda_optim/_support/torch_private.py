"""Every private part of torch that the package uses, with the versions that have it and the public alternative.

No other file touches a private name of torch (`tests/test_architecture.py`); for each name, a test says what breaks if
torch changes it (`tests/test_torch_private.py`). "Since" gives the first release from 2.0 on whose wheel has the name.
"""

from __future__ import annotations

import contextlib
import functools
import re
import sys
import traceback
import types
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch._C import _autograd, _functorch
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable
from torch.nn.utils.parametrizations import _SpectralNorm, _WeightNorm
from torch.overrides import has_torch_function
from torch.utils import _pytree, checkpoint
from torch.utils.hooks import RemovableHandle

if TYPE_CHECKING:
    from torch.fx import GraphModule

P = ParamSpec("P")
R = TypeVar("R")

# The two parametrizations whose second derivative torch has wrong. Since 2.1 and 2.0; the public functions
# `weight_norm` and `spectral_norm` make instances, and the classes have no other name.
WeightNorm = _WeightNorm
SpectralNorm = _SpectralNorm


# Trees.


REGISTERED = _pytree.SUPPORTED_NODES
"""The classes that are registered as nodes of a tree: since 2.0. torch has no public pytree module, but a class that is
registered for `torch.func` or `torch.export` is registered here."""


def registered_children(node: Any) -> list[tuple[str, Any]]:
    """Return the children of a node of a registered class, each with the end of its path, such as ``[0]``."""
    definition = REGISTERED[type(node)]
    if with_keys := getattr(definition, "flatten_with_keys_fn", None):  # since 2.3, and optional
        return [(str(key), child) for key, child in with_keys(node)[0]]
    return [(f"[{i}]", child) for i, child in enumerate(definition.flatten_fn(node)[0])]


def registered_like(node: Any, children: list[Any]) -> Any:
    """Return a node like `node`, of a registered class, with other children."""
    definition = REGISTERED[type(node)]
    return definition.unflatten_fn(children, definition.flatten_fn(node)[1])


# Tensors.


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor was changed in place; -1 for an inference tensor, which does not count.

    `Tensor._version`: since before 2.0; no public alternative.
    """
    return -1 if tensor.is_inference() else tensor._version


# The autograd graph.


def sequence_number() -> int:
    """Return the number of the next node that this thread adds to the autograd graph.

    `torch._C._autograd._get_sequence_nr`: since 2.1; no public alternative.
    """
    return _autograd._get_sequence_nr()


def recent_nodes(root: Any, since: int, ends: Collection[Any] = ()) -> Iterator[Any]:
    """Yield the nodes of a graph behind `root`, itself included, each once.

    Nodes before number `since` are left out, and the graph is not followed beyond those of `ends`, which are yielded
    whatever their number. `Node._sequence_nr`: since 2.1; no public alternative. The nodes of leaves have the highest
    number.
    """
    stack = [] if root is None else [root]
    seen = {*stack}
    while stack:
        node = stack.pop()
        yield node
        if node in ends:
            continue
        for following, _ in node.next_functions:
            if following is None or following in seen:
                continue
            if following in ends or following._sequence_nr() >= since:
                seen.add(following)
                stack.append(following)


def has_reentrant_checkpoint(root: Any, since: int) -> bool:
    """Whether a ``torch.utils.checkpoint(..., use_reentrant=True)`` is among the nodes behind `root`, itself included.

    Only nodes from number `since` on are visited. The name of the checkpoint's node: since before 2.0.
    """
    return any(node.name() == "CheckpointFunctionBackward" for node in recent_nodes(root, since))


def has_padded_embedding(root: Any, since: int) -> bool:
    """Whether an embedding with a row for padding is among the nodes behind `root`, from number `since` on.

    `Node._saved_padding_idx`: since before 2.0. Some nodes give -1, which stands for no padding, as the largest number.
    """
    none = (-1, 2**64 - 1)
    return any(getattr(node, "_saved_padding_idx", -1) not in none for node in recent_nodes(root, since))


_SECOND_ORDER_NODES = {
    "EmbeddingBagBackwardBackward0": "EmbeddingBag",
    "CdistBackwardBackward0": "cdist",
    "PdistBackwardBackward0": "pdist",
}
_ONCE_DIFFERENTIABLE = once_differentiable(lambda ctx: None).__code__
_DIFFERENTIABLE: set[type] = set()


def forward_class(node: Any) -> Any:
    """Return the `torch.autograd.Function` whose node this is; None for an operation of torch's own.

    `Node._forward_cls`: since 2.0. The public name of a node, `node.name()`, is not unique.
    """
    return getattr(node, "_forward_cls", None)


def node_dtypes(node: Any) -> list[torch.dtype]:
    """Return the dtypes of the tensors that the operation of a node gave. `Node._input_metadata`: since 2.1."""
    return [entry.dtype for entry in node._input_metadata]


_KINKED = frozenset(
    "Abs AdaptiveMaxPool2D AdaptiveMaxPool3D Amax Amin Aminmax Ceil Clamp ClampMax ClampMin Cummax Cummin Floor Fmax "
    "Fmin Fmod Frac FractionalMaxPool2D FractionalMaxPool3D GridSampler2D GridSampler3D Hardshrink Hardsigmoid "
    "Hardswish Hardtanh Kthvalue LeakyRelu Max Maximum MaxPool2D MaxPool2DWithIndices MaxPool3DWithIndices Median Min "
    "Minimum MkldnnMaxPool2D MkldnnMaxPool3D Mode MultilabelMarginLoss MultiMarginLoss Nanmedian PreluKernel Relu "
    "Remainder Renorm Round RreluWithNoise Sgn Sign Softshrink Sort Threshold Topk Trunc".split()
)
_EXPONENTS = {"Cdist": "p", "Dist": "p", "LinalgVectorNorm": "ord", "Norm": "p", "Pdist": "p"}
_NODE = re.compile(r"(\w+)Backward\d*")


def kink(node: Any) -> str | None:
    """Return what a node of a loss's graph stands for if its derivative jumps somewhere; None if it does not.

    The names of the nodes, and the numbers that they save (`Node._saved_alpha`): since before 2.0. A derivative that is
    continuous and has a kink itself (ELU with alpha=1, the Huber loss) does not count, nor does a norm that has its
    only kink at 0. A kink that is written as a comparison (`torch.where`) has no name.
    """
    found = _NODE.fullmatch(node.name())
    name = found.group(1) if found else ""
    if name == "Elu":  # the slope left of 0 is so many times that right of it
        return name if node._saved_alpha * node._saved_input_scale != 1 else None
    if name in _EXPONENTS:
        exponent = getattr(node, f"_saved_{_EXPONENTS[name]}")
        return name if exponent in (0, 1) or abs(exponent) == float("inf") else None
    return name if name in _KINKED else None


def undifferentiable(node: Any) -> str | None:
    """Return what a node of a gradient's graph stands for if torch has no derivative of it; None if it has one.

    The names of the nodes: since before 2.0. torch raises in the backward pass of some of these, and gives wrong
    numbers for others: a function that is marked `once_differentiable` leaves a node that leads nowhere.
    """
    if type(node) in _DIFFERENTIABLE:
        return None
    name = node.name()
    function = forward_class(node)
    backward = getattr(function, "backward", None)
    if name == "torch::autograd::Error" or getattr(backward, "__code__", None) is _ONCE_DIFFERENTIABLE:
        return "a function marked once_differentiable"
    if name == "torch::autograd::NotImplemented":
        near = [following.name() for following, _ in node.next_functions if following is not None]
        return "ctc_loss" if "CtcLossBackward0" in near else "an operation near " + ", ".join(near)
    known = _SECOND_ORDER_NODES.get(name)
    if known is None and function is None and name.rpartition("::")[2] == type(node).__name__:
        _DIFFERENTIABLE.add(type(node))  # a class of nodes of its own: most have one
    return known


def takes_weighted_seed(node: Any) -> bool:
    """Whether the backward pass through a node scales with its seed, and its gradient needs no look of its own.

    A function of the user's may do anything in its backward pass; those of this package are linear. A cast may lead to
    half precision. A matrix exponential's is a series whose length follows the size of the seed: it scales to ten
    digits only. Sparse gradients and ones that cannot be differentiated again are refused elsewhere. Names of nodes:
    since before 2.0. `Node._saved_sparse` and `Node._saved_sparse_grad`: since 2.0; no public alternative.
    """
    function = forward_class(node)
    if function is not None:
        owner: str = function.__module__.partition(".")[0]
        return owner == __name__.partition(".")[0]
    if node.name() in ("ToCopyBackward0", "LinalgMatrixExpBackward0") or undifferentiable(node) is not None:
        return False
    return not (getattr(node, "_saved_sparse", False) or getattr(node, "_saved_sparse_grad", False))


def has_hooks(tensor: Tensor) -> bool:
    """Whether `tensor.register_hook` was called. `Tensor._backward_hooks`: since before 2.0; no public alternative."""
    return bool(tensor._backward_hooks)


def hook_number() -> int:
    """Return the number of the next hook, on a tensor, a node or a module. `RemovableHandle.next_id`: since before 2.0.

    A hook on a tensor inside of a loss cannot be read from the graph.
    """
    number: int = RemovableHandle.next_id
    return number


def run_backward(
    outputs: tuple[Tensor, ...],
    seeds: tuple[Tensor, ...],
    inputs: tuple[Tensor, ...],
    *,
    create_graph: bool,
    retain_graph: bool,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of `outputs` with respect to `inputs`, None where there is none.

    The engine behind the public `torch.autograd.grad`, which takes as long to look at its arguments as the backward
    pass of a small loss. `Variable._execution_engine`: since before 2.0. It is called for plain tensors on the CPU;
    other devices have threads of their own, for which the public function prepares.
    """
    if outputs[0].is_cpu and not has_torch_function((*outputs, *inputs)):
        found: tuple[Tensor | None, ...] = _ENGINE.run_backward(
            outputs, seeds, retain_graph, create_graph, inputs, True, accumulate_grad=False
        )
        return found
    return torch.autograd.grad(
        outputs, inputs, seeds, create_graph=create_graph, retain_graph=retain_graph, allow_unused=True
    )


_ENGINE: Any = torch.autograd.Variable._execution_engine


# Transformations of what a program computes.


def are_transformed(*tensors: Tensor | None) -> bool:
    """Whether forward-mode derivatives, `torch.func` or ``autograd.grad(is_grads_batched=True)`` are at work.

    The levels of dual tensors and of `torch.func`, and the class of batched gradients, which only the tensors show:
    since 2.0; no public alternative. An autograd function without rules for them raises, or is silently left out.
    """
    return (
        forward_ad._current_level >= 0
        or _functorch.peek_interpreter_stack() is not None
        or any(t is not None and _functorch.is_legacy_batchedtensor(t) for t in tensors)
    )


def is_watched() -> bool:
    """Whether a mode, of the user's or of `trace_graph`, or `torch.jit.trace` sees the calls of torch's functions.

    The stack of modes and the state of the tracer: since 2.0. The public `torch.jit.is_tracing` reads the latter only.
    """
    return torch._C._len_torch_function_stack() > 0 or torch._C._get_tracing_state() is not None


def is_traced() -> bool:
    """Whether `trace_graph` is recording operations. The key of its mode: since 2.1."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None


# Hooks on saved tensors.

_top_hooks: Callable[[bool], Any] | None = getattr(_autograd, "_top_saved_tensors_default_hooks", None)  # since 2.8


def has_saved_tensor_hooks() -> bool:
    """Whether hooks on saved tensors are active, of a checkpoint or of the user.

    Before 2.8 the public context manager that forbids hooks is asked: it raises where there are some.
    """
    if _top_hooks is not None:
        return bool(_top_hooks(False))
    try:
        with torch.autograd.graph.disable_saved_tensors_hooks("hooks are active"):
            return False
    except RuntimeError:
        return True


def inside_checkpoint() -> bool:
    """Whether a torch.utils.checkpoint is recording what it will recompute later.

    Before 2.8 the hooks cannot be read, but torch's function is among the callers.
    """
    if _top_hooks is not None:
        hooks = _top_hooks(False)
        return bool(hooks) and getattr(hooks[0], "__module__", "") == checkpoint.__name__
    callers = (frame.f_globals.get("__name__") for frame, _ in traceback.walk_stack(None))
    return has_saved_tensor_hooks() and checkpoint.__name__ in callers


def hooks_are_forbidden() -> bool:
    """Whether hooks on saved tensors raise now.

    This and the next two are what the public `torch.autograd.graph.disable_saved_tensors_hooks` does, since 2.0; that
    one is a generator, which an interrupt can leave half-way.
    """
    return _autograd._saved_tensors_hooks_get_disabled_error_message() is not None


def forbid_hooks(message: str) -> None:
    """Make hooks on saved tensors raise."""
    _autograd._saved_tensors_hooks_disable(message)


def allow_hooks() -> None:
    """Allow hooks on saved tensors."""
    _autograd._saved_tensors_hooks_enable()


# vmap.


def vmap_flat(
    function: Callable[..., Sequence[Tensor | None]], values: Sequence[Tensor], size: int, randomness: str
) -> list[Tensor | None]:
    """Map a function of tensors over their first dimension, of `size` entries.

    This is the public `torch.func.vmap` without the trees of its arguments: flattening them takes longer than small
    operations do, and leaves reference cycles behind. The five functions of `torch._C._functorch`: since 2.0.
    """
    _load_decompositions()
    outside = _functorch.maybe_current_level()
    try:
        level = _functorch._vmap_increment_nesting(size, randomness)
        results = function(*[_functorch._add_batch_dim(value, 0, level) for value in values])
        return [None if t is None else _functorch._remove_batch_dim(t, level, size, 0) for t in results]
    finally:
        if _functorch.maybe_current_level() != outside:  # an interrupt may come before the level is there
            _functorch._vmap_decrement_nesting()


def inside_transform() -> bool:
    """Whether the caller runs inside a transform of `torch.func`, such as `grad` or `vmap`.

    `torch._C._functorch.maybe_current_level`: since 2.0; no public alternative.
    """
    return _functorch.maybe_current_level() is not None


def inside_vmap() -> bool:
    """Whether a `vmap` is among the transforms that the caller runs inside of.

    `torch._C._functorch.get_interpreter_stack` and the keys of its entries: since 2.0; no public alternative.
    """
    return any(level.key() == _functorch.TransformType.Vmap for level in _functorch.get_interpreter_stack() or ())


@functools.cache
def _load_decompositions() -> None:
    """Make known to `vmap` how it batches some operations: a first call of the public one does so."""
    torch.func.vmap(torch.neg)(torch.zeros(1, device="cpu"))


# Dynamo.


def _skip(code: Any) -> None:
    """Keep Dynamo from compiling the frames of a code object, but not those that it calls.

    `torch._C._dynamo.eval_frame`: `skip_code` from 2.1 to 2.6, `set_code_exec_strategy` since 2.7.
    """
    frames = torch._C._dynamo.eval_frame
    if hasattr(frames, "set_code_exec_strategy"):
        strategy = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.DEFAULT)
        frames.set_code_exec_strategy(code, strategy)
    elif hasattr(frames, "skip_code"):
        frames.skip_code(code)


_compiler: Callable[[], Any] | None = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", None)


def opaque(function: Callable[P, R]) -> Callable[P, R]:
    """Keep the user's `torch.compile` out of a function: the graph breaks at the call, and inside nothing is compiled.

    `torch.compiler.disable` does this, but importing Dynamo for it takes over a second. The attributes that it sets are
    enough until somebody else has imported Dynamo: `_torchdynamo_disable` since 2.0, `_torchdynamo_disable_msg` since
    2.7. Where no frame is being compiled, there is nothing to keep out: `get_eval_frame_callback`, since 2.5.
    """
    disabled: list[Callable[P, R]] = []

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if "torch._dynamo" not in sys.modules or (_compiler is not None and _compiler() is None):
            return function(*args, **kwargs)
        if not disabled:
            disabled.append(torch.compiler.disable(function))
        result: R = disabled[0](*args, **kwargs)
        return result

    _skip(call.__code__)  # type: ignore[attr-defined]
    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    call._torchdynamo_disable_msg = (  # type: ignore[attr-defined]
        "bda_optim runs an inner loop as it would without torch.compile; use its own `compile=True`"
    )
    return call


# Modules.

BatchNorm = nn.modules.batchnorm._BatchNorm
"""What batch norms of one, two and three dimensions have in common: since before 2.0."""

Convolution = nn.modules.conv._ConvNd
ConvolutionTranspose = nn.modules.conv._ConvTransposeNd
"""What convolutions of one, two and three dimensions have in common: since before 2.0."""

PARAMETERS = "_parameters"
MODULE_DICTS = (PARAMETERS, "_buffers", "_modules")
"""The attributes in which a module keeps its tensors and sub-modules: since before 2.0; no public alternative."""

COMPILED_CALL = "_compiled_call_impl"
"""The attribute that `module.compile()` sets: since 2.1. It is bound to the module."""


def own_parameters(module: nn.Module) -> dict[str, Any]:
    """Return the dictionary of a module's own parameters, into which any tensor can be put."""
    return module._parameters


def own_buffers(module: nn.Module) -> dict[str, Any]:
    """Return the dictionary of a module's own buffers."""
    return module._buffers


def own_children(module: nn.Module) -> dict[str, Any]:
    """Return the dictionary of a module's own sub-modules."""
    return module._modules


def compiled_original(module: nn.Module) -> Any:
    """Return the module inside the one that `torch.compile` makes, since 2.0; None of any other."""
    return module.__dict__.get("_modules", {}).get("_orig_mod")


def hook_numbers(module: nn.Module) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the numbers of the hooks behind and before a module's forward pass, which torch gives out once each.

    Both dictionaries: since before 2.0.
    """
    return tuple(module._forward_hooks), tuple(module._forward_pre_hooks)


def own_tensors(module: nn.Module) -> dict[str, Any]:
    """Return a module's own parameters and buffers, those that are None among them. Both: since before 2.0."""
    return {**module._parameters, **module._buffers}


def pre_hooks(module: nn.Module) -> dict[int, Any]:
    """Return the hooks before a module's forward pass."""
    return module._forward_pre_hooks


def replace_pre_hooks(module: nn.Module, hooks: dict[int, Any]) -> None:
    """Give a module other hooks before its forward pass.

    The public `register_forward_pre_hook` would change the dictionary, which a twin shares with the user's module.
    """
    module.__dict__["_forward_pre_hooks"] = OrderedDict(hooks)


# The compiler.


def trace_graph(function: Callable[..., Any], inputs: Sequence[Tensor], *, fake: bool = False) -> GraphModule:
    """Return the operations of a function of tensors as a graph; if `fake`, nothing is computed.

    `make_fx`, of an experimental module: since 2.0.
    """
    from torch.fx.experimental.proxy_tensor import make_fx  # with the compiler, this doubles the time of the import

    return make_fx(function, tracing_mode="fake" if fake else "real")(*inputs)


def compile_graph(graph: GraphModule, inputs: Sequence[Tensor], options: dict[str, Any]) -> Callable[..., Any]:
    """Compile a graph of tensor operations with options of Inductor's configuration.

    `torch._inductor.compile`: since 2.1. The public `torch.compile` would trace the graph once more and guard it. The
    cache on disk asks for a shape environment and a tracing context: `ShapeEnv`, `FakeTensorMode` and `TracingContext`,
    since 2.1. Without them a program is compiled anew in every process.
    """
    import torch._inductor
    from torch._guards import TracingContext, tracing
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    fake = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    examples = [fake.from_tensor(value, static_shapes=True) for value in inputs]
    with tracing(TracingContext(fake)):
        compiled: Callable[..., Any] = torch._inductor.compile(graph, list(examples), options=options)
    return compiled


def call_and_enter(compiled: Callable[..., Any], inputs: Sequence[Tensor]) -> tuple[Any, Callable[..., Any] | None]:
    """Call what `compile_graph` returned; return the result, and the program inside that takes a list of the inputs.

    AOTAutograd's layers around the program take as long as a small program does. They do nothing where the program is
    given the very inputs and its results are handed on; otherwise, and where there is no single `CompiledFxGraph`
    (since 2.1, with a `current_callable` since 2.2), the second result is None.
    """
    try:
        from torch._inductor.output_code import CompiledFxGraph
    except ImportError:  # before 2.6
        from torch._inductor.codecache import CompiledFxGraph  # type: ignore[attr-defined]

    found = _inside(compiled, CompiledFxGraph)
    kinds = {"cpu", *(t.device.type for t in inputs)}
    if len(found) != 1 or any(map(torch.is_autocast_enabled, kinds)):  # the layers switch it off
        return compiled(*inputs), None
    entry = found[0].current_callable
    seen: list[Any] = []

    def watched(given: Sequence[Any]) -> Any:
        seen.append(list(given))
        seen.append(entry(given))
        return seen[-1]

    found[0].current_callable = watched
    try:
        result = compiled(*inputs)
    finally:
        found[0].current_callable = entry
    same = len(seen) == 2 and _are_the_same(seen[0], inputs) and _are_the_same(seen[1], result)
    return result, entry if same else None


def _are_the_same(first: Sequence[Any], second: Sequence[Any]) -> bool:
    return len(first) == len(second) and all(a is b for a, b in zip(first, second, strict=True))


def _inside(function: Any, kind: type, depth: int = 8) -> list[Any]:
    """Return the objects of a class that a function reaches through the closures of functions, each once."""
    found: dict[int, Any] = {}
    waiting: list[tuple[Any, int]] = [(function, depth)]
    seen: set[int] = set()
    while waiting:
        value, left = waiting.pop()
        if isinstance(value, kind):
            found[id(value)] = value
        elif left and callable(value) and id(value) not in seen:
            seen.add(id(value))
            filled = [c for c in getattr(value, "__closure__", None) or () if c != types.CellType()]
            cells = [cell.cell_contents for cell in filled]
            waiting += [(inner, left - 1) for inner in (*cells, getattr(value, "compiled_fn", None))]
    return list(found.values())


@contextlib.contextmanager
def tagged_cache(tag: str) -> Iterator[None]:
    """Add a tag to the key of Inductor's cache on disk.

    The public `torch.compiler.config.cache_key_tag` does this, since 2.6. Before, every setting is part of the key, and
    `profile_bandwidth_regex` carries the tag: nothing reads it unless the bandwidth is profiled.
    """
    import torch._inductor.config

    config: Any = getattr(torch.compiler, "config", None)
    name = "cache_key_tag"
    if not hasattr(config, name):
        config, name = torch._inductor.config, "profile_bandwidth_regex"
    before = getattr(config, name)
    setattr(config, name, f"{before} {tag}")
    try:
        yield
    finally:
        setattr(config, name, before)


@contextlib.contextmanager
def announced_compilation() -> Iterator[None]:
    """Let ``torch.compiler.is_compiling()`` be true, as it is while `torch.compile` and `torch.export` trace.

    The flag behind it: since 2.3, before which the public function is always false outside of Dynamo.
    """
    before = getattr(torch.compiler, "_is_compiling_flag", False)
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


def operator_tables() -> tuple[dict[Any, Any], dict[Any, Any]]:
    """Return Inductor's tables of lowerings and of decompositions, by operator: since 2.0.

    The key of its cache on disk leaves them out.
    """
    from torch._inductor import decomposition, lowering

    return lowering.lowerings, decomposition.decompositions


def async_compile() -> Any:
    """Return the class whose methods generated modules call to build their kernels: since 2.0."""
    from torch._inductor.async_compile import AsyncCompile

    return AsyncCompile


def load_extension(source: str) -> Any:
    """Compile a C++ source and load it as a Python module called ``kernel``. `CppPythonBindingsCodeCache`: since 2.2.

    The public `torch.utils.cpp_extension` includes all of torch's headers, and takes ten times as long.
    """
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    return CppPythonBindingsCodeCache.load(source, "cpu")


def is_of_the_toolchain(error: BaseException | None) -> bool:
    """Whether an error, or one that it came from, says that C++ could not be compiled (since 2.0) or loaded."""
    from torch._inductor.exc import CppCompileError

    while error is not None:
        if isinstance(error, CppCompileError | OSError | ImportError):
            return True
        error = error.__cause__ or error.__context__
    return False


def forget_instruction_sets() -> None:
    """Let Inductor try anew which vector instructions its compiler knows. `cpu_vec_isa`: since 2.5."""
    from torch._inductor import cpu_vec_isa

    kinds = [kind for kind in vars(cpu_vec_isa).values() if isinstance(kind, type)]
    for function in (cpu_vec_isa.valid_vec_isa_list, *(vars(kind).get("__bool__") for kind in kinds)):
        forget: Callable[[], None] | None = getattr(function, "cache_clear", None)
        if forget is not None:
            forget()


def cache_folder() -> str:
    """Return the folder of Inductor's cache on disk: since 2.5. TORCHINDUCTOR_CACHE_DIR is the public way to set it."""
    from torch._inductor.runtime import runtime_utils

    folder: str = runtime_utils.cache_dir()  # type: ignore[attr-defined]  # its own module came with 2.6
    return folder


def schema(operator: Any) -> Any:
    """Return what an operator says about its arguments and results; None of a plain function.

    `OpOverload._schema`: since 2.0; no public alternative.
    """
    return getattr(operator, "_schema", None)


def has_onednn_linear() -> bool:
    """Whether there is `onednn_linear`: not in a build of torch without oneDNN."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def onednn_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Return ``x @ weight.T``, computed by oneDNN. `torch.ops.mkldnn._linear_pointwise`: since 2.0."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    return product
