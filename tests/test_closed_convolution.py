"""The closed second derivative of convolutions: against finite differences and against torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from closed_layers import Layer, check_against_differences, derivatives, distance, is_closed, second_of_sums
from problems import numbers
from torch import Tensor, nn

CASES: dict[str, tuple[Any, tuple[int, ...]]] = {
    "1d": (lambda: nn.Conv1d(2, 3, 2), (2, 2, 4)),
    "1d, stride, padding, dilation": (lambda: nn.Conv1d(2, 2, 2, stride=2, padding=1, dilation=2), (2, 2, 5)),
    "2d": (lambda: nn.Conv2d(2, 3, 2), (2, 2, 3, 3)),
    "2d, no bias": (lambda: nn.Conv2d(1, 2, 3, padding=1, bias=False), (2, 1, 3, 3)),
    "2d, stride, padding": (lambda: nn.Conv2d(1, 2, (2, 3), stride=(2, 1), padding=(0, 1)), (2, 1, 4, 3)),
    "2d, a stride that leaves a rest": (lambda: nn.Conv2d(1, 2, 2, stride=3), (2, 1, 4, 3)),
    "2d, dilation": (lambda: nn.Conv2d(1, 2, 2, dilation=2), (2, 1, 4, 3)),
    "2d, groups": (lambda: nn.Conv2d(4, 2, 2, groups=2), (2, 4, 3, 2)),
    "2d, a group per channel": (lambda: nn.Conv2d(2, 4, 2, groups=2, padding=1), (2, 2, 2, 2)),
    "2d, padding same": (lambda: nn.Conv2d(1, 2, 3, padding="same", dilation=(1, 2)), (2, 1, 3, 3)),
    "2d, padding valid": (lambda: nn.Conv2d(1, 2, 2, padding="valid"), (2, 1, 3, 3)),
    "3d": (lambda: nn.Conv3d(1, 2, 2), (1, 1, 2, 3, 3)),
    "3d, stride, padding, groups": (lambda: nn.Conv3d(2, 2, 2, stride=2, padding=1, groups=2), (1, 2, 2, 2, 2)),
    "transposed 1d": (lambda: nn.ConvTranspose1d(2, 3, 2), (2, 2, 3)),
    "transposed 2d": (lambda: nn.ConvTranspose2d(2, 2, 2, stride=2, padding=1, output_padding=1), (2, 2, 3, 2)),
    "transposed 2d, groups": (lambda: nn.ConvTranspose2d(2, 4, 2, groups=2, dilation=2, bias=False), (2, 2, 2, 2)),
    "transposed 3d": (lambda: nn.ConvTranspose3d(1, 2, 2, stride=(1, 2, 1)), (1, 1, 2, 2, 2)),
}
OPEN: dict[str, tuple[Any, tuple[int, ...]]] = {
    "padding by reflection": (lambda: nn.Conv2d(1, 2, 3, padding=1, padding_mode="reflect"), (2, 1, 3, 3)),
    "circular padding": (lambda: nn.Conv1d(1, 2, 3, padding=1, padding_mode="circular"), (2, 1, 4)),
    "uneven padding": (lambda: nn.Conv2d(1, 2, 2, padding="same"), (2, 1, 3, 3)),
    "no batch dimension": (lambda: nn.Conv2d(1, 2, 2), (1, 3, 3)),
    "an empty batch": (lambda: nn.Conv2d(1, 2, 2), (0, 1, 3, 3)),
}
cases = pytest.mark.parametrize("name", CASES)


def pair(case: tuple[Any, tuple[int, ...]], dtype: torch.dtype = torch.float64) -> tuple[Layer, Layer, list[Tensor]]:
    layer = case[0]().to(dtype)
    closed, own = Layer(layer), Layer(layer, closed=False)
    return closed, own, closed.inputs(*case[1], dtype=dtype)


@cases
def test_derivatives_agree_with_finite_differences(name: str) -> None:
    closed, _, inputs = pair(CASES[name])
    check_against_differences(closed, inputs)


@cases
def test_three_orders_agree_with_torch(name: str) -> None:
    closed, own, inputs = pair(CASES[name])
    orders = 2 if name == "transposed 2d" else 3  # torch raises in the third, because of `output_padding`
    got, want = (derivatives(function, inputs, orders) for function in (closed, own))
    assert [distance(a, b) < 1e-12 for a, b in zip(got, want, strict=True)] == [True] * orders


@cases
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_values_and_first_gradients_are_torchs_to_the_bit(name: str, dtype: torch.dtype) -> None:
    closed, own, inputs = pair(CASES[name], dtype)
    outputs = [function(*inputs) for function in (closed, own)]
    assert is_closed(outputs[0]) and not is_closed(outputs[1])
    grads = [torch.autograd.grad(y, inputs, numbers(*y.shape).to(dtype)) for y in outputs]
    assert all(torch.equal(a, b) for a, b in zip([outputs[0], *grads[0]], [outputs[1], *grads[1]], strict=True))


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")
@pytest.mark.parametrize("name", OPEN)
def test_what_is_left_to_torch(name: str) -> None:
    closed, own, inputs = pair(OPEN[name])
    output = closed(*inputs)
    assert not is_closed(output) and torch.equal(output, own(*inputs))


def test_an_output_size_is_torchs() -> None:
    closed, own, inputs = pair(CASES["transposed 2d"])
    found = []
    for function in (closed, own):
        function(*inputs)
        found.append(function.skeleton.root(inputs[0], output_size=(4, 3)))
    assert found[0].shape[2:] == (4, 3) and torch.equal(*found) and not is_closed(found[0])


def test_what_torch_refuses_is_refused() -> None:
    closed, own, _ = pair(CASES["2d"])
    for shape in ((2, 5, 3, 3), (2, 2, 1, 1), (2, 2)):
        messages = []
        for function in (closed, own):
            with pytest.raises(RuntimeError) as error:
                function(*function.inputs(*shape))
            messages.append(str(error.value))
        assert messages[0] == messages[1]


@pytest.mark.parametrize("frozen", [[0], [1], [2], [0, 1], [1, 2], [0, 2]], ids=str)
@pytest.mark.parametrize("name", ["2d", "transposed 1d"])
def test_inputs_that_need_no_gradient(name: str, frozen: list[int]) -> None:
    closed, own, inputs = pair(CASES[name])
    for i in frozen:
        inputs[i].requires_grad_(False)
    got, want = (derivatives(function, inputs, 3) for function in (closed, own))
    assert all(distance(a, b) < 1e-12 for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("used", [[0], [1], [2], [0, 2], [1, 2]], ids=str)
def test_gradients_that_are_not_used(used: list[int]) -> None:
    """Only some of the three gradients of a layer enter the second derivative."""
    closed, own, inputs = pair(CASES["2d"])
    found = []
    for function in (closed, own):
        cotangent = numbers(2, 3, 2, 2).requires_grad_()
        first = torch.autograd.grad(function(*inputs), inputs, cotangent, create_graph=True)
        value = sum(first[i].square().sum() for i in used)
        found.append(torch.autograd.grad(value, [cotangent, *inputs], materialize_grads=True))
    assert distance(*found) < 1e-12


def test_channels_last_and_expanded_gradients() -> None:
    closed, own, inputs = pair((lambda: nn.Conv2d(3, 4, 3, padding=1), (4, 3, 5, 5)))
    last = [t.detach().contiguous(memory_format=torch.channels_last).requires_grad_() for t in inputs[:2]]
    for given in (inputs, [*last, inputs[2]]):
        assert distance(second_of_sums(closed, given), second_of_sums(own, given)) < 1e-12


def test_rounding_errors_are_those_of_torch() -> None:
    """In float32, against float64."""
    errors = torch.zeros(2, 4)
    for seed in range(8):
        torch.manual_seed(seed)
        closed, own, _ = pair((lambda: nn.Conv2d(4, 8, 3, padding=1), (8, 4, 14, 14)), torch.float32)
        exact = Layer(nn.Conv2d(4, 8, 3, padding=1).double(), False)
        inputs = [torch.randn(s).requires_grad_() for s in ((8, 4, 14, 14), (8, 4, 3, 3), (8,))]
        want = derivatives(exact, [t.detach().double().requires_grad_() for t in inputs], 2)[1]
        for i, function in enumerate((closed, own)):
            found = derivatives(function, inputs, 2)[1]
            errors[i] += torch.tensor([distance([a], [b]) ** 2 for a, b in zip(found, want, strict=True)])
    got, torchs = errors.sqrt()
    assert (got <= 2 * torchs).all(), (got, torchs)
