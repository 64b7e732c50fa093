"""The closed second derivatives of layer and group norm: against finite differences, torch, and norms written out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from closed_layers import Layer, check_against_differences, derivatives, distance, is_closed, second_of_sums
from problems import numbers
from torch import Tensor, nn

CASES: dict[str, tuple[Any, tuple[int, ...]]] = {
    "layer": (lambda: nn.LayerNorm(3), (4, 3)),
    "layer, one vector": (lambda: nn.LayerNorm(4, eps=0.1), (4,)),
    "layer, two dimensions": (lambda: nn.LayerNorm((2, 3)), (2, 2, 2, 3)),
    "layer, no bias": (lambda: nn.LayerNorm(3, bias=False), (2, 2, 3)),
    "layer, not affine": (lambda: nn.LayerNorm(3, elementwise_affine=False), (3, 3)),
    "group": (lambda: nn.GroupNorm(2, 4), (2, 4, 2, 2)),
    "group, vectors": (lambda: nn.GroupNorm(2, 4), (3, 4)),
    "group, one": (lambda: nn.GroupNorm(1, 2, eps=0.1), (2, 2, 3)),
    "group, one per channel": (lambda: nn.GroupNorm(2, 2), (2, 2, 1, 2, 2)),
    "group, not affine": (lambda: nn.GroupNorm(2, 4, affine=False), (2, 4, 3)),
}
cases = pytest.mark.parametrize("name", CASES)
PRECISIONS = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])


def pair(case: tuple[Any, tuple[int, ...]], dtype: torch.dtype = torch.float64) -> tuple[Layer, Layer, list[Tensor]]:
    layer = case[0]().to(dtype)
    closed, own = Layer(layer), Layer(layer, closed=False)
    return closed, own, closed.inputs(*case[1], dtype=dtype)


def written_out(layer: Any, x: Tensor, weight: Any = None, bias: Any = None) -> Tensor:
    """The norm of plain operations, right to any order."""
    groups = isinstance(layer, nn.GroupNorm)
    rows = x.reshape(x.shape[0], layer.num_groups, -1) if groups else x.flatten(-len(layer.normalized_shape))
    centred = rows - rows.mean(-1, keepdim=True)
    y = (centred / (centred.square().mean(-1, keepdim=True) + layer.eps).sqrt()).view(x.shape)
    shape = (-1, *[1] * (x.dim() - 2)) if groups else layer.normalized_shape
    y = y if weight is None else y * weight.view(shape)
    return y if bias is None else y + bias.view(shape)


@cases
def test_derivatives_agree_with_finite_differences(name: str) -> None:
    closed, _, inputs = pair(CASES[name])
    check_against_differences(closed, inputs)


@cases
def test_three_orders_agree_with_the_norm_written_out(name: str) -> None:
    closed, _, inputs = pair(CASES[name])
    got = derivatives(closed, inputs, 3)
    want = derivatives(lambda *inputs: written_out(closed.skeleton.root, *inputs), inputs, 3)
    assert [distance(a, b) < 1e-12 for a, b in zip(got, want, strict=True)] == [True] * 3


@cases
@PRECISIONS
def test_values_and_first_gradients_are_torchs_to_the_bit(name: str, dtype: torch.dtype) -> None:
    closed, own, inputs = pair(CASES[name], dtype)
    outputs = [function(*inputs) for function in (closed, own)]
    assert is_closed(outputs[0]) and not is_closed(outputs[1])
    grads = [torch.autograd.grad(y, inputs, numbers(*y.shape).to(dtype)) for y in outputs]
    assert all(torch.equal(a, b) for a, b in zip([outputs[0], *grads[0]], [outputs[1], *grads[1]], strict=True))


def test_torchs_third_derivative_of_layer_norm_is_wrong() -> None:
    _, own, inputs = pair(CASES["layer"])
    got = derivatives(own, inputs, 3)
    want = derivatives(lambda *inputs: written_out(own.skeleton.root, *inputs), inputs, 3)
    errors = [distance(a, b) for a, b in zip(got, want, strict=True)]
    assert errors[0] < 1e-12 and errors[1] < 1e-12 and errors[2] > 0.01


@pytest.mark.parametrize("frozen", [[0], [1], [2], [0, 1], [1, 2], [0, 2]], ids=str)
@pytest.mark.parametrize("name", ["layer", "group"])
def test_inputs_that_need_no_gradient(name: str, frozen: list[int]) -> None:
    closed, own, inputs = pair(CASES[name])
    for i in frozen:
        inputs[i].requires_grad_(False)
    got, want = (derivatives(function, inputs, 2) for function in (closed, own))
    assert all(distance(a, b) < 1e-12 for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize(
    "case",
    [(lambda: nn.LayerNorm(5), (4, 3, 6, 5)), (lambda: nn.GroupNorm(2, 4), (3, 4, 6, 5))],
    ids=["layer", "group"],
)
def test_layouts(case: Any) -> None:
    """Transposed inputs, channels last, and gradients that are expanded."""
    closed, own, inputs = pair(case)
    x = inputs[0].detach()
    for other in (x, x.mT.contiguous().mT, x.contiguous(memory_format=torch.channels_last), x[:1].expand_as(x)):
        given = [other.requires_grad_(), *inputs[1:]]
        assert distance(second_of_sums(closed, given), second_of_sums(own, given)) < 1e-12


@pytest.mark.parametrize("shift", [0.0, 30.0, 1000.0])
@pytest.mark.parametrize(
    "case", [(lambda: nn.LayerNorm(64), (64, 64)), (lambda: nn.GroupNorm(2, 8), (8, 8, 7, 7))], ids=["layer", "group"]
)
def test_rounding_errors_are_those_of_torch(case: Any, shift: float) -> None:
    """In float32, against float64; also where the mean is much larger than the deviation."""
    closed, own, inputs = pair(case, torch.float32)
    exact = Layer(case[0]().double(), False)
    errors = torch.zeros(2, 4)
    for seed in range(8):
        torch.manual_seed(seed)
        given = [(torch.randn(t.shape) + shift * (i == 0)).requires_grad_() for i, t in enumerate(inputs)]
        want = derivatives(exact, [t.detach().double().requires_grad_() for t in given], 2)[1]
        for i, function in enumerate((closed, own)):
            found = derivatives(function, given, 2)[1]
            errors[i] += torch.tensor([distance([a], [b]) ** 2 for a, b in zip(found, want, strict=True)])
    got, torchs = errors.sqrt()
    assert (got <= 2 * torchs).all(), (got, torchs)


def test_what_torch_refuses_is_refused() -> None:
    for make, shape in (
        (lambda: nn.LayerNorm(3), (2, 4)),
        (lambda: nn.GroupNorm(2, 4), (2, 3, 2)),
        (lambda: nn.GroupNorm(2, 4), (4,)),
    ):
        messages = []
        for closed in (True, False):
            function = Layer(make().double(), closed)
            with pytest.raises((RuntimeError, ValueError, IndexError)) as error:
                function(*function.inputs(*shape))
            messages.append(str(error.value))
        assert messages[0] == messages[1]
