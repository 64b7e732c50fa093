"""The scenes of registration.py: images, the moving camera, the priors, and the exact answer for the quadratic one."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

SIDE = 28  # pixels
EXPOSURES = 4
PATTERNS = 100  # per exposure
SPEED = 0.8  # of the camera, in pixels per exposure
RIDGE = 0.05  # of F
SMOOTHING = 0.1  # of the total variation

# --- the priors -------------------------------------------------------------------------------------------------------


class Prior(NamedTuple):
    """F as a function of the image, with the largest step for it: 2 / (L_F + sigma)."""

    name: str
    value: Callable[[Tensor], Tensor]
    rate: float


def differences(y: Tensor) -> tuple[Tensor, Tensor]:
    image = y.view(SIDE, SIDE)
    return image - image.roll(1, 0), image - image.roll(1, 1)


def smoothness(y: Tensor) -> Tensor:
    down, right = differences(y)
    return (down.square() + right.square()).sum() / 2 + RIDGE / 2 * y.square().sum()


def total_variation(y: Tensor) -> Tensor:
    down, right = differences(y)
    return (down.square() + right.square() + SMOOTHING**2).sqrt().sum() + RIDGE / 2 * y.square().sum()


QUADRATIC = Prior("quadratic", smoothness, 2 / (8 + 2 * RIDGE))
TOTAL_VARIATION = Prior("total variation", total_variation, 2 / (8 / SMOOTHING + 2 * RIDGE))

# --- the camera -------------------------------------------------------------------------------------------------------


def shift(images: Tensor, by: Tensor) -> Tensor:
    """Displace (..., 28, 28) circularly by (..., 2) pixels, which need not be whole: a phase in Fourier space."""
    down = torch.fft.fftfreq(SIDE, dtype=by.dtype)[:, None]
    right = torch.fft.rfftfreq(SIDE, dtype=by.dtype)
    phase = -2 * math.pi * (by[..., 0, None, None] * down + by[..., 1, None, None] * right)
    moved = torch.fft.rfft2(images) * torch.polar(torch.ones_like(phase), phase)
    return torch.fft.irfft2(moved, s=(SIDE, SIDE))


class Scene(NamedTuple):
    """What is to be recovered, and what is known of it: the patterns and b."""

    name: str
    image: Tensor  # the truth, for judging only
    velocity: Tensor  # the truth, for judging only
    patterns: Tensor  # (exposures, patterns, 28, 28)
    b: Tensor
    prior: Prior

    def operator(self, x: Tensor) -> Tensor:
        """Return A(x), (400, 784): exposure j sees y displaced by j x, or y sees the patterns displaced by -j x."""
        displacement = -torch.arange(EXPOSURES, dtype=x.dtype)[:, None] * x
        return shift(self.patterns, displacement[:, None]).reshape(-1, SIDE * SIDE)


def scene(name: str, image: Tensor, number: int, noise: float = 0.0, prior: Prior = QUADRATIC) -> Scene:
    """Take the exposures of an image; its number seeds the patterns, 1000 more the velocity, 2000 more the noise."""
    draw = torch.Generator().manual_seed(number)
    gaussian = [torch.randn(SIDE**2, PATTERNS, generator=draw, dtype=torch.float64) for _ in range(EXPOSURES)]
    rows = torch.stack([torch.linalg.qr(matrix).Q.T for matrix in gaussian])
    angle = 2 * math.pi * torch.rand((), generator=torch.Generator().manual_seed(1000 + number), dtype=torch.float64)
    velocity = SPEED * torch.stack([angle.sin(), angle.cos()])
    patterns = rows.view(EXPOSURES, PATTERNS, SIDE, SIDE)
    blank = Scene(name, image.flatten(), velocity, patterns, torch.empty(0), prior)
    b = blank.operator(velocity) @ blank.image
    white = torch.randn(len(b), generator=torch.Generator().manual_seed(2000 + number), dtype=torch.float64)
    return blank._replace(b=b + noise * b.norm() * white / len(b) ** 0.5)


# --- the exact answer ------------------------------------------------------------------------------------------------


def divide_by_hessian(images: Tensor) -> Tensor:
    """Apply Q^-1 to (n, 784): Q is a circular convolution, with 4 - 2 cos - 2 cos + 0.05 for its spectrum."""
    down = torch.fft.fftfreq(SIDE, dtype=images.dtype)[:, None]
    right = torch.fft.rfftfreq(SIDE, dtype=images.dtype)
    spectrum = 4 - 2 * torch.cos(2 * math.pi * down) - 2 * torch.cos(2 * math.pi * right) + RIDGE
    return torch.fft.irfft2(torch.fft.rfft2(images.view(-1, SIDE, SIDE)) / spectrum, s=(SIDE, SIDE)).flatten(1)


def phi(of: Scene, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the least F among the solutions of the lower level at x, and that solution."""
    operator = of.operator(x)
    smoothed = divide_by_hessian(operator)
    multipliers = torch.linalg.solve(smoothed @ operator.T, of.b)
    return of.b @ multipliers / 2, multipliers @ smoothed


# --- images and starts ------------------------------------------------------------------------------------------------


def photographs() -> list[tuple[str, int, Tensor]]:
    """Return the middle of scikit-learn's two photographs in grey, averaged to 28 x 28."""
    from sklearn.datasets import load_sample_image

    found = []
    for number, name in enumerate(("flower", "china")):
        grey = torch.from_numpy(load_sample_image(f"{name}.jpg").astype(np.float64)).mean(2) / 255
        top, left = (grey.shape[0] - 420) // 2, (grey.shape[1] - 420) // 2
        blocks = grey[top : top + 420, left : left + 420].reshape(SIDE, 15, SIDE, 15)
        found.append((name, number, blocks.mean((1, 3))))
    return found


def draw_starts(count: int, others: list[Tensor]) -> dict[str, Tensor]:
    """Return zero, and then uniform noise and other images in turns."""
    found = {"zero": torch.zeros(SIDE**2, dtype=torch.float64)}
    for number in range(1, count):
        if number % 2:
            draw = torch.Generator().manual_seed(3000 + number)
            found[f"noise {number}"] = torch.rand(SIDE**2, generator=draw, dtype=torch.float64)
        else:
            found[f"image {number}"] = others[number // 2 - 1].flatten()
    return found
