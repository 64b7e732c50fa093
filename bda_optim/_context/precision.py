"""How coarsely numbers are rounded where a loss is computed: by its dtypes, and by TF32 or bfloat16 behind float32."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

_UNITS = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
_TF32 = 2.0**-11


def unit_of(dtypes: Iterable[torch.dtype]) -> float:
    """Return the unit of rounding of the coarsest floating-point type; that of float64 if there is none.

    >>> unit_of([torch.float64, torch.float32, torch.int64]) == torch.finfo(torch.float32).eps
    True
    """
    floating = [dtype for dtype in dtypes if dtype.is_floating_point or dtype.is_complex]
    return max((_UNITS.get(dtype, torch.finfo(dtype).eps) for dtype in floating), default=2.0**-52)


def measured_unit(device: torch.device, *, convolution: bool) -> float:
    """Return the unit of rounding of products of float32 matrices on a device, and of convolutions.

    `torch.set_float32_matmul_precision`, and cuDNN by default, let them be computed in TF32 or bfloat16. Several
    switches, which changed with torch's versions, allow this, and not every device does it; so one product is measured.
    """
    functions: list[Callable[[Tensor, Tensor], Tensor]] = [torch.matmul]
    if convolution:
        functions.append(lambda a, b: F.conv2d(a.view(1, 16, 32, 32), b.view(64, 16, 4, 4)))
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        return max(unit_of_product(function, device) for function in functions)


def unit_of_product(product: Callable[[Tensor, Tensor], Tensor], device: torch.device) -> float:
    """Return the unit of rounding of a bilinear function of two float32 matrices, by its error."""
    generator = torch.Generator("cpu").manual_seed(0)
    a, b = torch.randn(2, 128, 128, generator=generator, dtype=torch.float32, device="cpu")
    exact = product(a.double(), b.double())
    found = product(a.to(device), b.to(device)).cpu().double()
    error = float((found - exact).norm() / exact.norm())
    if error > 1e-3:  # bfloat16: 2e-3, TF32: 3e-4, float32: 1e-7
        return _UNITS[torch.bfloat16]
    return _TF32 if error > 1e-5 else torch.finfo(torch.float32).eps
