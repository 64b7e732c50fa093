"""Why a step could not be compiled, in terms of the user's own lines."""

from __future__ import annotations

import linecache
import traceback
from pathlib import Path

import torch

_OURS = tuple(str(Path(file).resolve().parent) for file in (torch.__file__, Path(__file__).parent))
"""The folders of torch and of this package."""


def reason(error: BaseException) -> str:
    """Say what went wrong, and in which line of the user's loss.

    >>> try:
    ...     torch.ones(2).view(3)
    ... except RuntimeError as error:
    ...     print(reason(error))
    RuntimeError: shape '[3]' is invalid for input of size 2, raised by ...
    """
    said = (str(error).splitlines() or [""])[0]
    if reads_a_value(error):
        said = "the value of a tensor is read, as `.item()`, `float()`, `bool()` or an `if` do, and a trace has none"
    return f"{type(error).__name__}: {said}{_place(error)}"


def reads_a_value(error: BaseException) -> bool:
    """Whether a trace failed because the value of a tensor was read."""
    return "_local_scalar_dense" in str(error)


def _place(error: BaseException) -> str:
    """Return the deepest line that is neither torch's nor this package's, or nothing if there is none."""
    found = ""
    for frame, number in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        if not str(Path(file).resolve()).startswith(_OURS):
            line = linecache.getline(file, number, frame.f_globals).strip()
            found = f", raised by `{line}`" if line else ", raised"
            found += f" ({Path(file).name}:{number}, in {frame.f_code.co_name})"
    return found
