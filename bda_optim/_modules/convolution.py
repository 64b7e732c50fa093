r"""Convolution with a closed second derivative.

A convolution :math:`y = x * w + b` is linear in x and in w, whatever its stride, padding, dilation and groups, and
whether it is transposed or not. For the gradients :math:`(g_x, g_w, g_b)` that :math:`g`, the gradient of y, gives, and
cotangents :math:`(v, v_w, v_b)` of these three,

.. math:: \partial_g = v * w + x * v_w + v_b,

and :math:`(\partial_x, \partial_w)` are the gradients that g gives of the convolution :math:`v * v_w`: two convolutions
and one call of their gradient, which differentiate on to any order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._support import torch_private
from .closed import is_plain, is_small, is_usable, wanted_only


class _Settings(NamedTuple):
    """The arguments of `torch.convolution` after input, weight and bias."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    output_padding: tuple[int, ...]
    groups: int


def _convolve(x: Tensor, weight: Tensor, bias: Tensor | None, settings: _Settings) -> Tensor:
    return torch.convolution(x, weight, bias, *settings)


def _gradients(
    grad: Tensor, x: Tensor, weight: Tensor, settings: _Settings, wanted: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """Return the gradients of input, weight and bias, those that are wanted."""
    found = torch.ops.aten.convolution_backward.default(grad, x, weight, [grad.shape[1]], *settings, wanted)
    return wanted_only(found, wanted)


class ClosedConvolution(torch.autograd.Function):
    """The layer; its gradient is `ClosedConvolutionGradient`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, settings: _Settings) -> Tensor:
        """Convolve as torch does."""
        ctx.save_for_backward(x, weight)
        ctx.settings = settings
        return _convolve(x, weight, bias, settings)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Return the gradients of input, weight and bias."""
        x, weight = ctx.saved_tensors
        inputs = (grad, x, weight, ctx.settings, ctx.needs_input_grad[:3])
        if is_plain(grad):
            return *ClosedConvolutionGradient.apply(*inputs), None  # type: ignore[no-untyped-call]
        return *_gradients(*inputs), None


class ClosedConvolutionGradient(torch.autograd.Function):
    """The gradients of input, weight and bias; their derivative is the formula above."""

    @staticmethod
    def forward(
        ctx: Any, grad: Tensor, x: Tensor, weight: Tensor, settings: _Settings, wanted: Sequence[bool]
    ) -> tuple[Tensor | None, ...]:
        """Call torch's kernels."""
        ctx.save_for_backward(grad, x, weight)
        ctx.set_materialize_grads(False)
        ctx.settings = settings
        return _gradients(grad, x, weight, settings, wanted)

    @staticmethod
    def backward(ctx: Any, v: Tensor | None, vw: Tensor | None, vb: Tensor | None) -> Any:
        """Return the derivatives by the gradient of the output, the input and the weight."""
        grad, x, weight = ctx.saved_tensors
        found = None
        if vw is not None:
            found = _convolve(x, vw, vb, ctx.settings)
        elif vb is not None:
            found = vb.view(-1, *[1] * (x.dim() - 2)).expand_as(grad)
        if v is not None:
            through = _convolve(v, weight, None, ctx.settings)
            if found is not None:
                through = through.add_(found) if is_plain(grad, v, vw, vb) else through + found
            found = through
        wanted = (vw is not None and ctx.needs_input_grad[1], v is not None and ctx.needs_input_grad[2], False)
        pair = (x if v is None else v, weight if vw is None else vw)
        by_x, by_weight, _ = _gradients(grad, *pair, ctx.settings, wanted)
        return found, by_x, by_weight, None, None


_LEAST = 100_000
"""Activations, of the input or of the output, from which on the closed form saves time.

Of nets without a norm, 125,000 take 1.03 and 157,000 take 1.01 of torch's time; layers with a constant input take 0.66.
"""


def _is_small(layer: Any, x: Tensor) -> bool:
    channels = layer.in_channels
    return is_small(x, layer.closed_from * channels // max(channels, layer.out_channels))


def _closed(layer: Any, x: Tensor, settings: _Settings | None) -> Tensor | None:
    """Convolve with a closed second derivative; None where torch has to do it."""
    weight, bias = layer.weight, layer.bias
    if settings is None or x.dim() != weight.dim() or not is_usable(x, weight, bias):  # an input without a batch, say
        return None
    found: Tensor = ClosedConvolution.apply(x, weight, bias, settings)  # type: ignore[no-untyped-call]
    return found


class _Closed(torch_private.Convolution):
    """What the convolutions of torch become in a module's twin."""

    closed_from = _LEAST

    def forward(self, input: Tensor) -> Tensor:
        """Convolve; where a closed derivative is not possible, as torch does."""
        found = None if _is_small(self, input) else _closed(self, input, self._settings())
        result: Tensor = super().forward(input) if found is None else found
        return result

    def _settings(self) -> _Settings | None:
        """Return the arguments of the call, or None if torch pads by other values than zeros, or unevenly."""
        padding: Any = self.padding
        if self.padding_mode != "zeros":
            return None
        if padding == "valid":
            padding = (0,) * len(self.stride)
        elif padding == "same":
            total = [d * (k - 1) for d, k in zip(self.dilation, self.kernel_size, strict=True)]
            if any(size % 2 for size in total):
                return None
            padding = tuple(size // 2 for size in total)
        return _Settings(self.stride, padding, self.dilation, False, (0,) * len(self.stride), self.groups)


class _ClosedTransposed(torch_private.ConvolutionTranspose):
    """The same for transposed convolutions."""

    closed_from = _LEAST

    def forward(self, input: Tensor, output_size: Any = None) -> Tensor:
        """Convolve; where a closed derivative is not possible, as torch does."""
        found = None
        if output_size is None and self.padding_mode == "zeros" and not _is_small(self, input):
            padding: Any = self.padding
            settings = _Settings(self.stride, padding, self.dilation, True, self.output_padding, self.groups)
            found = _closed(self, input, settings)
        result: Tensor = super().forward(input, output_size) if found is None else found
        return result


class Conv1d(_Closed, nn.Conv1d):
    """`torch.nn.Conv1d` in a module's twin."""


class Conv2d(_Closed, nn.Conv2d):
    """`torch.nn.Conv2d` in a module's twin."""


class Conv3d(_Closed, nn.Conv3d):
    """`torch.nn.Conv3d` in a module's twin."""


class ConvTranspose1d(_ClosedTransposed, nn.ConvTranspose1d):
    """`torch.nn.ConvTranspose1d` in a module's twin."""


class ConvTranspose2d(_ClosedTransposed, nn.ConvTranspose2d):
    """`torch.nn.ConvTranspose2d` in a module's twin."""


class ConvTranspose3d(_ClosedTransposed, nn.ConvTranspose3d):
    """`torch.nn.ConvTranspose3d` in a module's twin."""
