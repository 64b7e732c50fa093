"""Progress on long work: a bar of tqdm, or a function of the caller's."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeAlias

Callback: TypeAlias = Callable[[str, int, int], object]
"""Is called with the name of a stage, and how much of how much is done."""


class Progress:
    """Says how far each stage of a diagnosis is.

    Args:
        report: None for silence, True for a bar of tqdm, or a callback ``(stage, done, total)``.
    """

    def __init__(self, report: bool | Callback | None) -> None:
        """Check that it can be honoured."""
        if report is True and importlib.util.find_spec("tqdm") is None:
            raise ImportError(
                "progress=True shows a bar of tqdm, which is not installed. Install it, or pass a function of "
                "(stage, done, total)."
            )
        if not (report is None or isinstance(report, bool) or callable(report)):
            raise TypeError(f"`progress` must be True, None or a function; got {report!r}. Pass progress=True.")
        self._report = report
        self._stage, self._done, self._total = "", 0, 0
        self._bar: Any = None

    def stage(self, name: str, total: int) -> Callable[[int], None]:
        """Begin a stage; return what is to be called with the number of steps done since its last call."""
        self.close()
        self._stage, self._done, self._total = name, 0, total
        if self._report is True:
            self._bar = importlib.import_module("tqdm").tqdm(total=total, desc=name)
        return self._advance

    def close(self) -> None:
        """End the bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _advance(self, steps: int) -> None:
        self._done += steps
        if self._bar is not None:
            self._bar.update(steps)
        elif callable(self._report):
            self._report(self._stage, self._done, self._total)

    def __enter__(self) -> Progress:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the bar, also after an error."""
        self.close()
