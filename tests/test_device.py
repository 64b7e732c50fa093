"""The numerical core on a device that needs no hardware; see `tests/device_cases.py` and `tests/fake_device.py`."""

from __future__ import annotations

import pytest
from device import ABSENT, main, run_cases


@pytest.mark.parametrize("cases", ["test_table", "not test_table"])
def test_on_the_fake_device(cases: str) -> None:
    """A device is registered for the life of a process, so that each half has one of its own."""
    done = run_cases("toy", "-k", cases)
    assert not done.returncode, done.stdout[-6000:] + done.stderr[-2000:]


def test_a_device_that_is_not_there_is_refused_in_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("nonsense", "meta", "cuda:99"):
        assert main([name]) == 2
        assert capsys.readouterr().err.splitlines() == [ABSENT.format(name=name)]
