"""How figures are written that pages show."""

from __future__ import annotations

import io
from typing import IO

from matplotlib.figure import Figure
from PIL import Image


def write_small(fig: Figure, file: IO[bytes]) -> None:
    """Write a PNG of 128 colors: half of the size."""
    picture = io.BytesIO()
    fig.savefig(picture, dpi=110)
    Image.open(picture).convert("RGB").quantize(128, dither=Image.Dither.NONE).save(file, "png", optimize=True)
