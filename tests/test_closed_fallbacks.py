"""Where a closed derivative cannot be used, torch's own operations are called, with the same results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from closed_layers import Layer, distance, is_closed, weights
from problems import numbers
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

import bda_optim as bda
from bda_optim._support import torch_private

LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "batch norm": (lambda: nn.BatchNorm2d(2), (3, 2, 2, 2)),
    "batch norm in eval mode": (lambda: nn.BatchNorm1d(2).eval(), (3, 2)),
    "batch norm without statistics": (lambda: nn.BatchNorm1d(2, track_running_stats=False), (3, 2, 2)),
    "layer norm": (lambda: nn.LayerNorm((2, 3)), (2, 2, 3)),
    "group norm": (lambda: nn.GroupNorm(2, 4), (2, 4, 3)),
    "convolution": (lambda: nn.Conv2d(2, 4, 2, padding=1, groups=2), (2, 2, 3, 3)),
    "transposed convolution": (lambda: nn.ConvTranspose1d(2, 3, 2, stride=2), (2, 2, 4)),
    "max-pooling": (lambda: nn.Sequential(nn.Tanh(), nn.MaxPool2d(2)), (2, 2, 4, 4)),
}
layers = pytest.mark.parametrize("name", LAYERS)


def pair(name: str, dtype: torch.dtype = torch.float64) -> tuple[Layer, Layer, list[Tensor]]:
    """A layer with a closed derivative, the same with torch's own, and inputs."""
    make, shape = LAYERS[name]
    layer = make().to(dtype)
    closed, own = Layer(layer), Layer(layer, closed=False)
    inputs = closed.inputs(*shape, dtype=torch.float64)
    return closed, own, [t.detach().to(dtype).requires_grad_() for t in inputs]


def before_pass(order: int, function: Any, inputs: list[Tensor]) -> Any:
    """What a first or second backward pass starts from: an output, or its gradients."""
    output = function(*inputs)
    if order == 1:
        return [output]
    cotangents = [w.requires_grad_() for w in weights([output], seed=5)]
    return torch.autograd.grad(output, inputs, cotangents, create_graph=True)


def second(function: Any, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    """The gradient of half the squared norm of a gradient."""
    first = before_pass(2, function, inputs)
    return torch.autograd.grad(sum(f.square().sum() for f in first), inputs, materialize_grads=True)


@layers
def test_without_anything_special_the_closed_form_is_used(name: str) -> None:
    closed, own, inputs = pair(name)
    assert is_closed(closed(*inputs)) and not is_closed(own(*inputs))
    assert distance(second(closed, inputs), second(own, inputs)) < 1e-12


@layers
def test_nothing_is_recorded_without_a_graph(name: str) -> None:
    closed, own, inputs = pair(name)
    with torch.no_grad():
        assert torch.equal(closed(*inputs), own(*inputs)) and closed(*inputs).grad_fn is None
    constants = [t.detach() for t in inputs]
    assert closed(*constants).grad_fn is None
    with torch.inference_mode():
        assert closed(*constants).is_inference()


@layers
def test_vmap(name: str) -> None:
    """Over inputs, parameters and buffers, as tasks are mapped, and its gradient."""
    closed, own, inputs = pair(name)
    stacked = [torch.stack([t.detach(), t.detach() * 0.5 + 0.1]).requires_grad_() for t in inputs]
    buffers = [torch.stack([b, b]) for b in closed.buffers]
    found = []
    for function in (closed, own):

        def one(buffers: list[Tensor], *given: Tensor, function: Layer = function) -> Any:
            function.buffers = buffers
            return function(*given), function.skeleton.read_buffers()

        values, after = torch.func.vmap(one)(buffers, *stacked)
        first = torch.autograd.grad(values.sin().sum(), stacked, create_graph=True)
        second = torch.autograd.grad(sum(f.square().sum() for f in first), stacked)
        found.append([values, *after, *second])
    assert distance(*found) < 1e-12


@layers
def test_functional_gradients(name: str) -> None:
    closed, own, inputs = pair(name)
    if any(torch.is_tensor(b) for b in closed.buffers) and closed.skeleton.root.training:
        pytest.skip("torch refuses to write captured buffers inside `torch.func`")
    grads = [torch.func.grad(lambda x, f=f: f(x, *inputs[1:]).sin().sum())(inputs[0].detach()) for f in (closed, own)]
    assert torch.equal(*grads)


def skip_without_forward_mode(name: str) -> None:
    if name == "group norm":
        pytest.skip("torch cannot differentiate the gradient of group norm in forward mode")


@layers
def test_dual_tensors(name: str) -> None:
    """Forward over reverse: the derivative of a gradient along a direction."""
    skip_without_forward_mode(name)
    closed, own, inputs = pair(name)
    tangents = weights(inputs, seed=40)
    found = []
    for function in (closed, own):
        with forward_ad.dual_level():
            duals = [forward_ad.make_dual(t, d) for t, d in zip(inputs, tangents, strict=True)]
            output = function(*duals)
            assert not is_closed(output)
            grads = torch.autograd.grad(output.sin().sum(), duals)
            found.append([t for t in (forward_ad.unpack_dual(g).tangent for g in grads) if t is not None])
    assert len(found[0]) == len(found[1]) and distance(*found) < 1e-12


@layers
@pytest.mark.parametrize("order", [1, 2])
def test_a_dual_cotangent(name: str, order: int) -> None:
    """The level begins after the forward pass: in the first backward pass, or in the second."""
    skip_without_forward_mode(name)
    closed, own, inputs = pair(name)
    found = []
    for function in (closed, own):
        values = before_pass(order, function, inputs)
        with forward_ad.dual_level():
            ends = zip(weights(values, seed=6), weights(values, seed=9), strict=True)
            duals = [forward_ad.make_dual(c, t) for c, t in ends]
            grads = torch.autograd.grad(values, inputs, duals, allow_unused=True)
            tangents = [None if g is None else forward_ad.unpack_dual(g).tangent for g in grads]
            found.append([t for t in tangents if t is not None])
    assert found[0] and distance(*found) < 1e-12


@layers
@pytest.mark.parametrize("order", [1, 2])
def test_batched_cotangents(name: str, order: int) -> None:
    """``is_grads_batched=True``, and `torch.func.vmap` around a backward pass."""
    closed, own, inputs = pair(name)
    found = []
    for function in (closed, own):
        values = before_pass(order, function, inputs)
        many = [numbers(3, *v.shape, seed=i) for i, v in enumerate(values)]
        one_by_one = [
            torch.autograd.grad(values, inputs, [m[i] for m in many], retain_graph=True, allow_unused=True)
            for i in range(3)
        ]
        together = torch.autograd.grad(values, inputs, many, is_grads_batched=True, allow_unused=True)
        found.append([t for t in together if t is not None])
        assert distance(found[-1], [torch.stack(t) for t in zip(*one_by_one, strict=True) if t[0] is not None]) < 1e-12
    assert distance(*found) < 1e-12


@layers
def test_autocast(name: str) -> None:
    closed, own, inputs = pair(name, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = [function(*inputs) for function in (closed, own)]
        grads = [second(function, inputs) for function in (closed, own)]
    assert not is_closed(outputs[0]) and torch.equal(*outputs)
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@layers
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision(name: str, dtype: torch.dtype) -> None:
    closed, own, inputs = pair(name, dtype)
    outputs = [function(*inputs) for function in (closed, own)]
    assert not is_closed(outputs[0]) and torch.equal(*outputs)


@layers
def test_other_devices_and_classes(name: str) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    make, shape = LAYERS[name]
    meta = Layer(make().to("meta"))
    on_meta = meta(*(t.detach().to("meta").requires_grad_() for t in meta.inputs(*shape, dtype=torch.float32)))
    assert on_meta.is_meta and not is_closed(on_meta)
    closed, own, inputs = pair(name)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = [mode.from_tensor(t.detach()).requires_grad_() for t in inputs]
        output = closed(*fakes)
    assert type(output).__name__ == "FakeTensor" and not is_closed(output)

    class Tagged(Tensor):
        pass

    tagged = closed(inputs[0].detach().as_subclass(Tagged), *inputs[1:])
    assert type(tagged) is Tagged and torch.equal(tagged, own(*inputs))


class Watched(TorchFunctionMode):
    """Notes the functions of torch that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(getattr(function, "__name__", ""))
        return function(*args, **(kwargs or {}))


@layers
def test_modes_of_the_user_see_torchs_functions(name: str) -> None:
    closed, own, inputs = pair(name)
    seen = []
    for function in (closed, own):
        with Watched() as mode:
            output = function(*inputs)
        seen.append({*mode.names})
        assert not is_closed(output)
    assert seen[0] >= seen[1]


@layers
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_tracers_see_torchs_functions(name: str) -> None:
    closed, _, inputs = pair(name)
    graph = torch.jit.trace(lambda *inputs: closed(*inputs), tuple(inputs), check_trace=False).inlined_graph
    assert "Closed" not in str(graph) and "aten::" in str(graph)


@layers
def test_a_program_contains_the_formula_whatever_the_size(name: str) -> None:
    make, shape = LAYERS[name]
    layer = make().double()
    found = []
    for function in (Layer(layer, None), Layer(layer, False)):
        inputs = function.inputs(*shape)

        def program(*inputs: Tensor, function: Layer = function) -> list[Tensor]:
            leaves = [t.detach().requires_grad_() for t in inputs]
            return list(second(function, leaves))

        graph = torch_private.trace_graph(program, inputs)
        found.append((graph(*(t.detach() for t in inputs)), len(graph.graph.nodes)))
    assert distance(found[0][0], found[1][0]) < 1e-12
    assert found[0][1] < found[1][1], "the closed form has fewer operations"


@pytest.fixture(autouse=True)
def _no_level_is_left() -> Iterator[None]:
    yield
    assert not torch_private.are_transformed() and not torch_private.is_watched() and not torch_private.is_traced()


@layers
def test_small_activations_are_left_to_torch(name: str) -> None:
    make, shape = LAYERS[name]
    layer = make().double()
    function = Layer(layer, None)
    inputs = function.inputs(*shape)
    assert not is_closed(function(*inputs))
    large = [numbers(250_000 // inputs[0][0].numel(), *shape[1:]).requires_grad_(), *inputs[1:]]
    assert is_closed(function(*large))
    with bda.closed_derivatives(False):
        assert is_closed(function(*large)), "the choice is made when a loop starts"
