"""The closed second derivative of batch norm: against finite differences, torch, and batch norm written out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from closed_layers import Layer, check_against_differences, derivatives, distance, is_closed, second_of_sums
from problems import numbers
from torch import Tensor, nn

SHAPES = {nn.BatchNorm1d: [(4, 2), (2, 2, 3)], nn.BatchNorm2d: [(2, 2, 2, 2)], nn.BatchNorm3d: [(2, 2, 1, 2, 2)]}
OPTIONS: dict[str, dict[str, Any]] = {
    "running statistics": {},
    "cumulative average": {"momentum": None},
    "no running statistics": {"track_running_stats": False},
    "not affine": {"affine": False},
    "neither": {"affine": False, "track_running_stats": False, "eps": 0.1},
}
CASES = [
    pytest.param(kind, shape, options, training, id=f"{kind.__name__}-{len(shape)}d-{name}-{mode}")
    for kind, shapes in SHAPES.items()
    for shape in shapes
    for name, options in OPTIONS.items()
    if len(shape) % 2 == 0 or name in ("running statistics", "neither")
    for mode, training in (("train", True), ("eval", False))
]
cases = pytest.mark.parametrize(("kind", "shape", "options", "training"), CASES)


def make(kind: Any, options: dict[str, Any], training: bool, dtype: torch.dtype = torch.float64) -> nn.Module:
    """A layer that has seen a batch, so that its running statistics are not the first ones."""
    layer = kind(2, **options).to(dtype)
    layer(numbers(*SHAPES[kind][0], seed=7).to(dtype) * 2 + 1)
    return layer.train(training)


def written_out(layer: Any, x: Tensor, *params: Tensor) -> Tensor:
    """Batch norm of plain operations, right to any order."""
    dims = [0, *range(2, x.dim())]
    shape = [-1, *[1] * (x.dim() - 2)]
    mean = x.mean(dims)
    var = (x - mean.view(shape)).square().mean(dims)
    if not layer.training and layer.running_mean is not None:
        mean, var = layer.running_mean, layer.running_var
    y = (x - mean.view(shape)) / (var.view(shape) + layer.eps).sqrt()
    return y * params[0].view(shape) + params[1].view(shape) if params else y


@cases
def test_derivatives_agree_with_finite_differences(
    kind: Any, shape: tuple[int, ...], options: dict[str, Any], training: bool
) -> None:
    function = Layer(make(kind, options, training))
    check_against_differences(function, function.inputs(*shape))


@cases
def test_three_orders_agree_with_batch_norm_written_out(
    kind: Any, shape: tuple[int, ...], options: dict[str, Any], training: bool
) -> None:
    layer = make(kind, options, training)
    function = Layer(layer)
    inputs = function.inputs(5, *shape[1:])
    got = derivatives(function, inputs, 3)
    want = derivatives(lambda *inputs: written_out(layer, *inputs), inputs, 3)
    assert [distance(a, b) < 1e-12 for a, b in zip(got, want, strict=True)] == [True] * 3


@cases
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_values_buffers_and_first_gradients_are_torchs_to_the_bit(
    kind: Any, shape: tuple[int, ...], options: dict[str, Any], training: bool, dtype: torch.dtype
) -> None:
    layer = make(kind, options, training, dtype)
    closed, own = Layer(layer), Layer(layer, closed=False)
    inputs = closed.inputs(6, *shape[1:], dtype=dtype)
    outputs = [function(*inputs) for function in (closed, own)]
    assert is_closed(outputs[0]) and not is_closed(outputs[1])
    for _ in range(2):  # the buffers move on
        outputs += [function.skeleton.root(inputs[0].square()) for function in (closed, own)]
    buffers = [function.skeleton.read_buffers() for function in (closed, own)]
    grads = [torch.autograd.grad(y, inputs, numbers(*y.shape).to(dtype)) for y in outputs[:2]]
    for got, want in (outputs[::2], outputs[1::2]), buffers, grads:
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_torchs_third_derivative_is_wrong() -> None:
    """The reason why a closed form computes the statistics anew for it."""
    layer = make(nn.BatchNorm2d, {}, training=True)
    own = Layer(layer, closed=False)
    inputs = own.inputs(4, 2, 3, 3)
    got = derivatives(own, inputs, 3)
    want = derivatives(lambda *inputs: written_out(layer, *inputs), inputs, 3)
    errors = [distance(a, b) for a, b in zip(got, want, strict=True)]
    assert errors[0] < 1e-12 and errors[1] < 1e-12 and errors[2] > 0.01


@pytest.mark.parametrize("shift", [0.0, 1.0, 30.0, 1000.0])
@pytest.mark.parametrize("shape", [(16, 8), (8, 8, 14, 14)], ids=str)
def test_rounding_errors_are_those_of_torch(shape: tuple[int, ...], shift: float) -> None:
    """In float32, against float64; also where the mean is much larger than the deviation."""
    kind = nn.BatchNorm1d if len(shape) == 2 else nn.BatchNorm2d
    closed, own, exact = Layer(kind(shape[1])), Layer(kind(shape[1]), False), Layer(kind(shape[1]).double(), False)
    errors = torch.zeros(2, 4)
    for seed in range(8):
        torch.manual_seed(seed)
        x = torch.randn(shape) + shift
        inputs = [x.requires_grad_(), *(torch.randn(shape[1]).requires_grad_() for _ in range(2))]
        doubles = [t.detach().double().requires_grad_() for t in inputs]
        want = derivatives(exact, doubles, 2)[1]
        for i, function in enumerate((closed, own)):
            found = derivatives(function, inputs, 2)[1]
            errors[i] += torch.tensor([distance([a], [b]) ** 2 for a, b in zip(found, want, strict=True)])
    got, torchs = errors.sqrt()
    assert (got <= 2 * torchs).all(), (got, torchs)


def test_what_torch_refuses_is_refused() -> None:
    for kind, shape, message in (
        (nn.BatchNorm1d, (1, 2), "more than 1 value per channel"),
        (nn.BatchNorm2d, (3, 2), "4D input"),
        (nn.BatchNorm1d, (2,), "2D or 3D input"),
    ):
        function = Layer(kind(2).double())
        with pytest.raises(ValueError, match=message):
            function(*function.inputs(*shape))


def test_an_empty_batch_is_torchs() -> None:
    function = Layer(nn.BatchNorm1d(2).double().eval())
    output = function(*function.inputs(0, 2))
    assert output.shape == (0, 2) and not is_closed(output)


def test_channels_last_and_expanded_gradients() -> None:
    layer = nn.BatchNorm2d(3).double()
    closed, own = Layer(layer), Layer(layer, closed=False)
    inputs = closed.inputs(4, 3, 5, 5)
    last = [inputs[0].detach().contiguous(memory_format=torch.channels_last).requires_grad_(), *inputs[1:]]
    for given in (inputs, last):
        assert distance(second_of_sums(closed, given), second_of_sums(own, given)) < 1e-12


@pytest.mark.parametrize("frozen", [[0], [1], [2], [0, 1], [1, 2], [0, 2]], ids=str)
def test_inputs_that_need_no_gradient(frozen: list[int]) -> None:
    layer = nn.BatchNorm1d(3).double()
    closed, own = Layer(layer), Layer(layer, closed=False)
    inputs = closed.inputs(6, 3)
    for i in frozen:
        inputs[i].requires_grad_(False)
    got, want = (derivatives(function, inputs, 2) for function in (closed, own))
    assert all(distance(a, b) < 1e-12 for a, b in zip(got, want, strict=True))
