"""What every test starts from: one thread, one seed, the default dtype."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

# Before torch and matplotlib load, and inherited by the scripts that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "Agg")

import numpy as np
import pytest
import torch

torch.set_num_threads(1)  # pytest runs two processes, which also run the package's doctests

collect_ignore = ["device_cases.py"]  # it registers a device when it is imported; test_device.py runs it in processes


@pytest.fixture(autouse=True)
def _same_start() -> Iterator[None]:
    """Seed every generator, and undo what a test does to torch's global state."""
    dtype, grad_enabled = torch.get_default_dtype(), torch.is_grad_enabled()
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(dtype)
    torch.set_grad_enabled(grad_enabled)


@pytest.fixture
def doubles(_same_start: None) -> None:
    """Compute in float64; `_same_start` restores the default dtype."""
    torch.set_default_dtype(torch.float64)


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder with the complete data sets of the examples; tests on them are skipped where it is not there."""
    path = Path(os.environ.get("BDA_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))
    if not (path / "MNIST" / "raw").is_dir():
        pytest.skip(f"no data sets in {path}; set BDA_DATA to the folder that holds MNIST/, omniglot-py/, ...")
    return path


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what tests recorded with ``record_property("table", text)``; what workers print themselves is lost."""
    for report in terminalreporter.getreports("passed"):
        for name, text in getattr(report, "user_properties", ()):
            if name == "table":
                terminalreporter.section(report.nodeid)
                terminalreporter.write_line(text)
