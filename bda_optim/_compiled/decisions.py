"""What was measured of a problem, kept on disk beside its programs, so that the next process decides alike.

A choice that is measured anew in every process may come out differently, and then the programs on disk do not fit.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from .._support.torch_private import cache_folder

Choice = TypeVar("Choice", bool, int, str)


class Decisions:
    """The choices of one problem, by name.

    Args:
        problem: What the choices depend on, as text; the same in every process.
    """

    def __init__(self, problem: str) -> None:
        here = (torch.__version__, torch.get_num_threads(), torch.backends.cpu.get_cpu_capability(), os.cpu_count())
        self._key = hashlib.sha256(f"{here} {problem}".encode()).hexdigest()
        self._known: dict[str, Any] | None = None

    def get(self, name: str, measured: Callable[[], Choice], *, fixed: Callable[[], Choice]) -> Choice:
        """Return a choice: as it was made before, or measured now.

        Args:
            name: Its name.
            measured: Makes it by measurement; JSON can hold the result.
            fixed: Makes it without one, under ``torch.use_deterministic_algorithms(True)``.
        """
        if torch.are_deterministic_algorithms_enabled():
            return fixed()
        if self._known is None:
            self._known = self._read()
        if name not in self._known:
            self._known[name] = measured()
            self._write()
        choice: Choice = self._known[name]
        return choice

    @property
    def _path(self) -> Path:
        return Path(cache_folder()) / "bda_optim" / f"{self._key}.json"

    def _read(self) -> dict[str, Any]:
        with contextlib.suppress(OSError, ValueError):
            found = json.loads(self._path.read_text(encoding="utf-8"))
            if isinstance(found, dict):
                return found
        return {}

    def _write(self) -> None:
        """Write all choices; another process sees the old file or the new one, and without a disk nothing is kept."""
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            draft = self._path.with_suffix(f".{os.getpid()}")
            draft.write_text(json.dumps(self._known), encoding="utf-8")
            draft.replace(self._path)
