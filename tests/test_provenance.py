"""What long runs of the examples share beside checkpoints: they wait on request, and say what they were made with."""

from __future__ import annotations

import re
import threading
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("tqdm")

import _run


def test_a_run_waits_while_it_is_paused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _run.wait_while_paused()  # nothing to wait for
    pause = tmp_path / "PAUSE"
    pause.touch()
    run = threading.Thread(target=_run.wait_while_paused, args=(0.001,), daemon=True)
    run.start()
    time.sleep(0.1)
    assert run.is_alive()
    pause.unlink()
    run.join(60)
    assert not run.is_alive()


def test_provenance(monkeypatch: pytest.MonkeyPatch) -> None:
    found = _run.provenance()
    assert found["versions"]["torch"] == torch.__version__
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", found["date"])
    assert found["commit"] is None or re.fullmatch(r"[0-9a-f]{40}\+?", found["commit"])
    monkeypatch.setenv("PATH", "")  # no git
    assert _run.provenance()["commit"] is None
