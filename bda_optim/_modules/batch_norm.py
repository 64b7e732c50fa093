r"""Batch normalisation with a closed second derivative.

Let :math:`\hat x = (x - \mu) s` with :math:`s = (\sigma^2 + \epsilon)^{-1/2}`, and let :math:`g` be the gradient of the
output. The gradients of input, weight and bias are

.. math:: g_x = w s (g - A - B \hat x), \quad g_w = n B, \quad g_b = n A, \quad
    A = \mathrm{mean}(g), \quad B = \mathrm{mean}(g \hat x),

with means over the n values of a channel. For cotangents :math:`v, v_w, v_b` of these three let
:math:`a = \mathrm{mean}(v), c = \mathrm{mean}(v \hat x), d = \mathrm{mean}(v g)`. Then

.. math::
    k = v_w - w s c, \quad q = d - a A - c B, \\
    \partial_g = w s (v - a) + k \hat x + v_b, \qquad \partial_w = n s q, \\
    \partial_x = s k (g - A - B \hat x) - w s^2 B (v - a - c \hat x) - w s^2 q \hat x.

With fixed statistics (eval mode) a, c, A, B vanish from all but :math:`g_w` and :math:`g_b`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._support import torch_private
from .closed import is_plain, is_small, is_usable, sum_of_products, wanted_only


class _Settings(NamedTuple):
    """How a call normalises: by statistics of the batch or by fixed ones, and what is added to the variance."""

    training: bool
    eps: float


class ClosedBatchNorm(torch.autograd.Function):
    """The layer; its gradient is `ClosedBatchNormGradient`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        settings: _Settings,
        momentum: float,
    ) -> Tensor:
        """Normalise as torch does, running statistics included."""
        training, eps = settings
        y, mean, spread = torch.native_batch_norm(x, weight, bias, running_mean, running_var, training, momentum, eps)
        saved = (mean, spread) if training else (running_mean, running_var)
        ctx.save_for_backward(x, weight, *saved)
        ctx.settings = settings
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Return the gradients of input, weight and bias."""
        x, weight, mean, spread = ctx.saved_tensors
        wanted = ctx.needs_input_grad[:3]
        if is_plain(grad):
            inputs = (grad, x, weight, mean, spread, ctx.settings, wanted)
            return *ClosedBatchNormGradient.apply(*inputs), None, None, None, None  # type: ignore[no-untyped-call]
        formula = _Formula(x, weight, mean, spread, ctx.settings, composed=True)
        return *wanted_only(formula.gradients(grad), wanted), None, None, None, None


class ClosedBatchNormGradient(torch.autograd.Function):
    """The gradients of input, weight and bias; their derivative is the formula above."""

    @staticmethod
    def forward(
        ctx: Any,
        grad: Tensor,
        x: Tensor,
        weight: Tensor | None,
        mean: Tensor,
        spread: Tensor,
        settings: _Settings,
        wanted: Sequence[bool],
    ) -> Any:
        """Call torch's kernel."""
        training, eps = settings
        statistics = (None, None, mean, spread) if training else (mean, spread, None, None)
        mask = [wanted[0], training or wanted[1], training or wanted[2]]  # the formula needs the two sums
        found = torch.ops.aten.native_batch_norm_backward.default(grad, x, weight, *statistics, training, eps, mask)
        ctx.save_for_backward(grad, x, weight, mean, spread, *found[1:])
        ctx.set_materialize_grads(False)
        ctx.settings = settings
        return wanted_only(found, wanted)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        """Return the derivatives by the gradient of the output, the input and the weight."""
        grad, x, weight, mean, spread, *sums = ctx.saved_tensors
        composed = torch.is_grad_enabled() or not is_plain(grad, *cotangents)
        formula = _Formula(x, weight, mean, spread, ctx.settings, composed=composed)
        found = formula.second(grad, sums, cotangents)
        return *wanted_only(found, ctx.needs_input_grad[:3]), None, None, None, None


class _Formula:
    """The formulas, written with sums instead of means; a vector has one number per channel.

    Args:
        x: The input.
        weight: The weight, or None for ones.
        mean: The mean that the layer used.
        spread: The inverse standard deviation in training mode, otherwise the running variance.
        settings: How the layer normalised.
        composed: Whether to use differentiable operations only, and statistics computed anew from `x`.
    """

    def __init__(
        self, x: Tensor, weight: Tensor | None, mean: Tensor, spread: Tensor, settings: _Settings, *, composed: bool
    ) -> None:
        self._x, self._mean, self._settings, self._composed = x, mean, settings, composed
        self._dims = [0, *range(2, x.dim())]
        self._shape = [-1, *[1] * (x.dim() - 2)]
        self._count = x.numel() // x.shape[1]
        self._scale = spread if settings.training else (spread + settings.eps).rsqrt()
        if settings.training and composed:
            # torch's own formula takes the statistics as constants, so its third derivative is wrong (by 67 % on a toy)
            self._mean = x.mean(self._dims)
            variance = self._centred().square().mean(self._dims)
            self._scale = (variance + settings.eps).rsqrt()
        self._gain = self._scale if weight is None else weight * self._scale

    def gradients(self, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of input, weight and bias."""
        gw, gb = self._sums(grad)
        inner = grad
        if self._settings.training:
            slope = gw * self._scale / self._count
            inner = grad - self._wide(gb / self._count) - self._wide(slope) * self._centred()
        return self._wide(self._gain) * inner, gw, gb

    def second(
        self, grad: Tensor, sums: Sequence[Tensor], cotangents: Sequence[Tensor | None]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the derivatives by `grad`, input and weight.

        Args:
            grad: The gradient of the output.
            sums: The gradients of weight and bias.
            cotangents: Those of the gradients of input, weight and bias.
        """
        v = torch.zeros_like(grad) if cotangents[0] is None else cotangents[0]
        vw, vb = (torch.zeros_like(self._mean) if t is None else t for t in cotangents[1:])
        s, gain, share = self._scale, self._gain, 1 / self._count
        centred = self._centred()
        product = (v * grad).sum(self._dims)
        if not self._settings.training:
            k = vw * s
            return self._combine((v, gain), (centred, k), plus=vb), self._wide(k) * grad, product * s
        gw, gb = self._sums(grad) if self._composed else sums
        cw, cb = self._sums(v)
        # `product` becomes n q, `k` is s k; p and r are the coefficients of v and x in the derivative by the input.
        product = torch.addcmul(product, cb, gb, value=-share).addcmul(cw, gw, value=-share)
        k = torch.addcmul(vw, gain, cw, value=-share) * s
        steep = gain * s * -share
        p = steep * gw
        r = torch.addcmul(steep * product, k, gw, value=-share).addcmul(p, cw, value=-share) * s
        by_grad = self._combine((v, gain), (centred, k), plus=torch.addcmul(vb, gain, cb, value=-share))
        level = torch.addcmul(k * gb, p, cb) * -share
        by_x = self._combine((v, p), (grad, k), (centred, r), plus=level)
        return by_grad, by_x, product * s

    def _sums(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sums of values * x_hat, and of values."""
        if self._composed:
            return (values * self._centred()).sum(self._dims) * self._scale, values.sum(self._dims)
        statistics, eps = (None, None, self._mean, self._scale), self._settings.eps
        found = torch.ops.aten.native_batch_norm_backward.default(
            values, self._x, None, *statistics, True, eps, [False, True, True]
        )
        return found[1], found[2]

    def _centred(self) -> Tensor:
        return self._x - self._wide(self._mean)

    def _wide(self, vector: Tensor) -> Tensor:
        return vector.view(self._shape)

    def _combine(self, *terms: tuple[Tensor, Tensor], plus: Tensor) -> Tensor:
        """Return the sum of activations times vectors, plus a vector."""
        wide = [(values, self._wide(vector)) for values, vector in terms]
        return sum_of_products(*wide, plus=self._wide(plus), composed=self._composed)


class _Closed(torch_private.BatchNorm):
    """What the layers of torch become in a module's twin."""

    closed_from = 40_000  # two norms in an MLP: 32,768 activations take 1.04 of torch's time, 65,536 take 0.98

    def forward(self, input: Tensor) -> Tensor:
        """Normalise; where a closed derivative is not possible, as torch does."""
        if is_small(input, self.closed_from):
            return super().forward(input)
        self._check_input_dim(input)  # type: ignore[no-untyped-call]
        used = not self.training or self.track_running_stats
        statistics = (self.running_mean, self.running_var) if used else (None, None)
        learned = (input, self.weight, self.bias)
        is_valid = input.numel() > input.shape[1] and self.eps > 0  # else torch raises
        if not (is_valid and is_usable(*learned, *statistics)):
            return super().forward(input)
        factor = 0.0 if self.momentum is None else self.momentum
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                factor = 1.0 / float(self.num_batches_tracked)
        training = self.training or (self.running_mean is None and self.running_var is None)
        settings = _Settings(training, self.eps)
        found: Tensor = ClosedBatchNorm.apply(*learned, *statistics, settings, factor)  # type: ignore[no-untyped-call]
        return found


class BatchNorm1d(_Closed, nn.BatchNorm1d):
    """`torch.nn.BatchNorm1d` in a module's twin."""


class BatchNorm2d(_Closed, nn.BatchNorm2d):
    """`torch.nn.BatchNorm2d` in a module's twin."""


class BatchNorm3d(_Closed, nn.BatchNorm3d):
    """`torch.nn.BatchNorm3d` in a module's twin."""
