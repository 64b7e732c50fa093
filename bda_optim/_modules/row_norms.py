r"""Layer and group normalisation with closed second derivatives.

A sample is divided into rows of n values, each of which gets mean 0 and variance 1: :math:`\hat x = (x - \mu) s` with
:math:`s = (\sigma^2 + \epsilon)^{-1/2}`, and :math:`y = w \hat x + b`. Let

.. math:: P z = s \, (z - \mathrm{mean}(z) - \hat x \, \mathrm{mean}(z \hat x)),

with the means of a row, and :math:`h = w g` for the gradient g of the output. The gradients of input, weight and bias
are :math:`P h`, and the sums of :math:`g \hat x` and of g over the rows. For cotangents :math:`v, v_w, v_b` of these
three and :math:`u = P v`,

.. math::
    \partial_g = w u + v_w \hat x + v_b, \qquad \partial_w = \textstyle\sum g u, \\
    \partial_x = P \left( v_w g - s \, \mathrm{mean}(v \hat x) \, h - s \, \mathrm{mean}(h \hat x) \, v \right)
        - s \, \mathrm{mean}(h u) \, \hat x.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .closed import is_plain, is_small, is_usable, sum_of_products, wanted_only


class _Rows(NamedTuple):
    """How a tensor is divided into rows.

    Attributes:
        shape: The shape in which the formula sees it.
        row: The dimensions that a row has.
        shared: The dimensions along which a weight is the same.
        weight: The shape of the weight.
        length: The number of values in a row.
    """

    shape: tuple[int, ...]
    row: tuple[int, ...]
    shared: tuple[int, ...]
    weight: tuple[int, ...]
    length: int


class _LayerNorm(NamedTuple):
    """What a layer norm is given beside tensors."""

    shape: tuple[int, ...]
    eps: float

    def rows(self, x: Tensor) -> _Rows:
        """A row has the last dimensions; every one of its values has a weight."""
        length = math.prod(self.shape)
        return _Rows((x.numel() // length, length), (1,), (0,), (length,), length)

    def normalise(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return the output, the means and the inverse standard deviations."""
        return torch.native_layer_norm(x, self.shape, weight, bias, self.eps)

    def gradients(
        self, grad: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, scale: Tensor, wanted: Sequence[bool]
    ) -> Sequence[Tensor | None]:
        """Return the gradients of input, weight and bias."""
        bias = weight  # only its presence counts
        found: Sequence[Tensor | None] = torch.ops.aten.native_layer_norm_backward.default(
            grad, x, self.shape, mean, scale, weight, bias, wanted
        )
        return found


class _GroupNorm(NamedTuple):
    """What a group norm is given beside tensors."""

    groups: int
    eps: float

    def rows(self, x: Tensor) -> _Rows:
        """A row has the channels of a group, each of which has a weight, and their pixels."""
        channels = x.shape[1] // self.groups
        pixels = x[0, 0].numel()
        shape = (x.shape[0], self.groups, channels, pixels)
        return _Rows(shape, (2, 3), (0, 3), (self.groups, channels, 1), channels * pixels)

    def normalise(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return the output, the means and the inverse standard deviations."""
        return torch.native_group_norm(x, weight, bias, *self._sizes(x), self.groups, self.eps)

    def gradients(
        self, grad: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, scale: Tensor, wanted: Sequence[bool]
    ) -> Sequence[Tensor | None]:
        """Return the gradients of input, weight and bias."""
        found: Sequence[Tensor | None] = torch.ops.aten.native_group_norm_backward.default(
            grad.contiguous(), x, mean, scale, weight, *self._sizes(x), self.groups, wanted
        )
        return found

    def _sizes(self, x: Tensor) -> tuple[int, int, int]:
        return x.shape[0], x.shape[1], x[0, 0].numel()


_Norm = _LayerNorm | _GroupNorm


class ClosedRowNorm(torch.autograd.Function):
    """The layer; its gradient is `ClosedRowNormGradient`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, norm: _Norm) -> Tensor:
        """Normalise as torch does."""
        y, mean, scale = norm.normalise(x, weight, bias)
        ctx.save_for_backward(x, weight, mean, scale)
        ctx.norm = norm
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Return the gradients of input, weight and bias."""
        x, weight, mean, scale = ctx.saved_tensors
        wanted = ctx.needs_input_grad[:3]
        if is_plain(grad):
            return *ClosedRowNormGradient.apply(grad, x, weight, mean, scale, ctx.norm, wanted), None  # type: ignore[no-untyped-call]
        formula = _Formula(x, weight, mean, scale, ctx.norm, composed=True)
        return *wanted_only(formula.gradients(grad), wanted), None


class ClosedRowNormGradient(torch.autograd.Function):
    """The gradients of input, weight and bias; their derivative is the formula above."""

    @staticmethod
    def forward(
        ctx: Any,
        grad: Tensor,
        x: Tensor,
        weight: Tensor | None,
        mean: Tensor,
        scale: Tensor,
        norm: _Norm,
        wanted: Sequence[bool],
    ) -> Any:
        """Call torch's kernel."""
        ctx.save_for_backward(grad, x, weight, mean, scale)
        ctx.set_materialize_grads(False)
        ctx.norm = norm
        return wanted_only(norm.gradients(grad, x, weight, mean, scale, wanted), wanted)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        """Return the derivatives by the gradient of the output, the input and the weight."""
        grad, x, weight, mean, scale = ctx.saved_tensors
        composed = torch.is_grad_enabled() or not is_plain(grad, *cotangents)
        formula = _Formula(x, weight, mean, scale, ctx.norm, composed=composed)
        found = formula.second(grad, cotangents)
        return *wanted_only(found, ctx.needs_input_grad[:3]), None, None, None, None


class _Formula:
    """The formulas.

    Args:
        x: The input.
        weight: The weight, or None for ones.
        mean: The mean of every row.
        scale: The inverse standard deviation of every row.
        norm: The kind of normalisation.
        composed: Whether to use differentiable operations only, and statistics computed anew from `x`.
    """

    def __init__(
        self, x: Tensor, weight: Tensor | None, mean: Tensor, scale: Tensor, norm: _Norm, *, composed: bool
    ) -> None:
        self._rows, self._composed, self._whole = norm.rows(x), composed, x.shape
        self._x = x.reshape(self._rows.shape)
        self._weight = None if weight is None else weight.view(self._rows.weight)
        self._own = self._rows.weight if weight is None else weight.shape
        if composed:  # torch's own formula takes the statistics as constants: its third derivative is wrong
            self._mean = self._average(self._x)
            self._scale = (self._average((self._x - self._mean).square()) + norm.eps).rsqrt()
        else:
            narrow = [1 if i in self._rows.row else size for i, size in enumerate(self._rows.shape)]
            self._mean, self._scale = mean.view(narrow), scale.view(narrow)
        self._hat = (self._x - self._mean) * self._scale
        self._minus = self._scale * (-1 / self._rows.length)

    def gradients(self, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of input, weight and bias."""
        g = grad.reshape(self._rows.shape)
        h = self._weighted(g)
        by_weight = (g * self._hat).sum(self._rows.shared).view(self._own)
        by_x = self._project(h, self._share(h))
        return by_x.view(self._whole), by_weight, g.sum(self._rows.shared).view(self._own)

    def second(self, grad: Tensor, cotangents: Sequence[Tensor | None]) -> tuple[Tensor, Tensor, Tensor]:
        """Return the derivatives by `grad`, input and weight, given cotangents of the gradients."""
        g = grad.reshape(self._rows.shape)
        v = torch.zeros_like(g) if cotangents[0] is None else cotangents[0].reshape(self._rows.shape)
        vw, vb = (None if t is None else t.view(self._rows.weight) for t in cotangents[1:])
        hat, h = self._hat, self._weighted(g)
        of_v, of_h = self._share(v), self._share(h)
        u = self._project(v, of_v)
        inner = sum_of_products((h, of_v), (v, of_h), *self._pairs(g, vw), composed=self._composed)
        by_x = self._project(inner, self._share(inner))
        by_x = sum_of_products((hat, self._share(h, u)), plus=by_x, composed=self._composed)
        by_weight = (g * u).sum(self._rows.shared).view(self._own)
        by_grad = u
        if self._weight is not None:
            by_grad = sum_of_products((u, self._weight), *self._pairs(hat, vw), plus=vb, composed=self._composed)
        return by_grad.view(self._whole), by_x.view(self._whole), by_weight

    def _share(self, z: Tensor, other: Tensor | None = None) -> Tensor:
        """Return -s mean(z x_hat), or with another tensor in the place of x_hat, for every row."""
        product = z * (self._hat if other is None else other)
        return product.sum(self._rows.row, keepdim=True) * self._minus

    def _project(self, z: Tensor, share: Tensor) -> Tensor:
        """Return P z, given `_share(z)`; torch's kernel would not subtract the mean of x first, and lose digits."""
        level = z.sum(self._rows.row, keepdim=True) * self._minus
        return sum_of_products((z, self._scale), (self._hat, share), plus=level, composed=self._composed)

    def _pairs(self, values: Tensor, vector: Tensor | None) -> list[tuple[Tensor, Tensor]]:
        return [] if vector is None else [(values, vector)]

    def _average(self, values: Tensor) -> Tensor:
        return values.mean(self._rows.row, keepdim=True)

    def _weighted(self, values: Tensor) -> Tensor:
        return values if self._weight is None else values * self._weight


class LayerNorm(nn.LayerNorm):
    """`torch.nn.LayerNorm` in a module's twin."""

    # Two norms in an MLP: 131,072 activations take 0.95 of torch's time, 524,288 take 0.84. Transformers spend little
    # time in norms: 131,072 take 1.01 and 262,144 take 0.99 (width 256).
    closed_from = 200_000

    def forward(self, input: Tensor) -> Tensor:
        """Normalise; where a closed derivative is not possible, as torch does."""
        if is_small(input, self.closed_from):
            return super().forward(input)
        learned = (input, self.weight, self.bias)
        is_valid = tuple(input.shape[-len(self.normalized_shape) :]) == self.normalized_shape  # else torch raises
        if not (is_valid and is_usable(*learned)):
            return super().forward(input)
        norm = _LayerNorm(self.normalized_shape, self.eps)
        found: Tensor = ClosedRowNorm.apply(*learned, norm)  # type: ignore[no-untyped-call]
        return found


class GroupNorm(nn.GroupNorm):
    """`torch.nn.GroupNorm` in a module's twin."""

    closed_from = 40_000  # the conv net of the benchmarks, with group norm, takes 0.94 of torch's time

    def forward(self, input: Tensor) -> Tensor:
        """Normalise; where a closed derivative is not possible, as torch does."""
        learned = (input, self.weight, self.bias)
        is_valid = input.dim() > 1 and input.shape[1] == self.num_channels and input.is_contiguous()
        if is_small(input, self.closed_from) or not (is_valid and is_usable(*learned)):
            return super().forward(input)
        norm = _GroupNorm(self.num_groups, self.eps)
        found: Tensor = ClosedRowNorm.apply(*learned, norm)  # type: ignore[no-untyped-call]
        return found
