"""What the installed torch can do: the rest is skipped, with the reason."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import pytest
import torch


def older_than(version: str) -> bool:
    """Whether torch is older than a version, such as "2.9"."""
    return _numbers(torch.__version__) < _numbers(version)


def needs_torch(version: str, what: str) -> pytest.MarkDecorator:
    """Skip below a version of torch, which is the first that has `what`."""
    return pytest.mark.skipif(older_than(version), reason=f"{what}: since torch {version}")


def lacking(kind: Any, settings: Iterable[str]) -> list[str]:
    """Return the settings that a class of torch.optim does not take."""
    return [name for name in settings if name not in inspect.signature(kind).parameters]


def skip_without(kind: Any, settings: Iterable[str]) -> None:
    """Skip the test where a class of torch.optim lacks a setting."""
    if lacks := lacking(kind, settings):
        pytest.skip(f"{kind.__name__} of torch {torch.__version__} has no {', '.join(lacks)}")


def attention_kernels() -> list[bool]:
    """Which kernels of attention are on: a public form of what torch has as one private function since 2.6."""
    cuda = torch.backends.cuda
    kinds = (cuda.math_sdp_enabled, cuda.flash_sdp_enabled, cuda.mem_efficient_sdp_enabled, cuda.cudnn_sdp_enabled)
    return [enabled() for enabled in kinds]


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("+")[0].split(".")[:2])
