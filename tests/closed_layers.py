"""What the tests of closed second derivatives share: a layer as a function, its derivatives, and two witnesses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from problems import numbers
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck

import bda_optim as bda
from bda_optim._modules.skeleton import Skeleton

Function = Callable[..., Tensor]


class Layer:
    """A layer as a function of its input and parameters; every call starts from the layer's own buffers.

    Args:
        layer: The layer; it is not changed.
        closed: Whether it gets a closed derivative, whatever the size; None leaves it to the size.
    """

    def __init__(self, layer: nn.Module, closed: bool | None = True) -> None:
        if closed is None:
            self.skeleton = Skeleton(layer)
        else:
            with bda.closed_derivatives(closed):
                self.skeleton = Skeleton(layer)
        self.buffers = [place.original for place in self.skeleton.buffers.values()]

    def __call__(self, x: Tensor, *params: Tensor) -> Tensor:
        self.skeleton.lay_params(self.skeleton.params, params)
        self.skeleton.lay_buffers(self.buffers)
        return self.skeleton.root(x)

    def inputs(self, *shape: int, **options: Any) -> list[Tensor]:
        """Leaves: an input of this shape, and numbers in the place of the parameters."""
        shapes = [shape, *(place.original.shape for place in self.skeleton.params.values())]
        return [numbers(*s, seed=i).to(**options).requires_grad_() for i, s in enumerate(shapes, start=1)]


def is_closed(output: Tensor) -> bool:
    """Whether a closed form made a tensor."""
    return "Closed" in output.grad_fn.name()


def weights(values: Sequence[Tensor], seed: int) -> list[Tensor]:
    """Numbers of the shapes of some tensors, the cotangents of a derivative."""
    return [numbers(*v.shape, seed=seed + i).to(v.dtype) for i, v in enumerate(values)]


def derivatives(function: Function, inputs: Sequence[Tensor], orders: int) -> list[list[Tensor]]:
    """The derivatives of a function by its inputs, of each order up to the last, along fixed directions.

    From the second order on they are also taken by the cotangent of the output.
    """
    values: Sequence[Tensor] = [function(*inputs)]
    variables = [t for t in inputs if t.requires_grad]
    cotangents = [w.requires_grad_() for w in weights(values, seed=20)]
    first = cotangents
    found = []
    for order in range(1, orders + 1):
        by = variables if order == 1 else [*variables, *first]
        cotangents = [c for v, c in zip(values, cotangents, strict=True) if v.requires_grad]
        ends = [v for v in values if v.requires_grad]
        values = [torch.zeros_like(t) for t in by]
        if ends:  # else the last derivative is constant
            values = torch.autograd.grad(ends, by, cotangents, create_graph=order < orders, materialize_grads=True)
        found.append([v.detach() for v in values])
        cotangents = weights(values, seed=20 + 10 * order)
    return found


def second_of_sums(function: Function, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """A second derivative whose cotangents are expanded scalars in part, as a sum makes them."""
    y = function(*inputs)
    first = torch.autograd.grad(y.sum() + y.square().sum(), inputs, create_graph=True)
    return torch.autograd.grad([f.sum() + f.square().sum() for f in first], inputs)


def check_against_differences(function: Function, inputs: Sequence[Tensor]) -> None:
    """Compare the first, second and third derivatives with finite differences; also gradients in batches."""
    assert is_closed(function(*inputs))
    assert gradcheck(function, inputs, check_batched_grad=True)
    assert gradgradcheck(function, inputs, check_batched_grad=True)
    assert gradgradcheck(gradient_of(function), inputs, fast_mode=True)


def gradient_of(function: Function) -> Callable[..., tuple[Tensor, ...]]:
    """The first derivative as a function of the same inputs."""

    def gradient(*inputs: Tensor) -> tuple[Tensor, ...]:
        output = function(*inputs)
        by = [t for t in inputs if t.requires_grad]
        return torch.autograd.grad(output, by, weights([output], seed=20), create_graph=True)

    return gradient


def distance(got: Sequence[Tensor], want: Sequence[Tensor]) -> float:
    """The relative distance of two lists of tensors, in float64."""
    a, b = (torch.cat([t.detach().double().flatten() for t in values]) for values in (got, want))
    return float((a - b).norm() / b.norm().clamp_min(1e-30))
