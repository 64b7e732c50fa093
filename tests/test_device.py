"""The numerical core on a device that needs no hardware; see `tests/device_cases.py` and `tests/fake_device.py`."""

from __future__ import annotations

import types
from typing import Any

import fake_device
import pytest
import torch
from device import ABSENT, main, run_cases

from bda_optim._context import devices


@pytest.mark.skipif(not fake_device.is_possible(), reason=f"torch {torch.__version__} has no devices in Python")
@pytest.mark.parametrize("cases", ["test_table", "not test_table"])
def test_on_the_fake_device(cases: str) -> None:
    """A device is registered for the life of a process, so that each half has one of its own."""
    done = run_cases("toy", "-k", cases)
    assert not done.returncode, done.stdout[-6000:] + done.stderr[-2000:]


def test_a_device_that_is_not_there_is_refused_in_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("nonsense", "meta", "cuda:99"):
        assert main([name]) == 2
        assert capsys.readouterr().err.splitlines() == [ABSENT.format(name=name)]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Modules like torch.cuda and torch.mps, which note how they are called: the second takes no device."""
    noted: list[Any] = []

    def function(name: str, result: Any = None) -> Any:
        return lambda *args: noted.append((name, *args)) or result

    state = torch.zeros(3)
    names = ("set_rng_state", "synchronize")
    plain = {"get_rng_state": function("get_rng_state", state), **{name: function(name) for name in names}}
    stream = types.SimpleNamespace(wait_event=function("wait_event"))
    event = types.SimpleNamespace(record=function("record"))
    streams = {"current_stream": function("current_stream", stream), "Event": lambda: event}
    modules = {"mps": types.SimpleNamespace(**plain), "cuda": types.SimpleNamespace(**plain, **streams)}
    monkeypatch.setattr(torch, "get_device_module", lambda device: modules[device.type])
    return noted


@pytest.mark.parametrize("name", ["mps", "cuda:1"])
def test_how_the_module_of_a_device_is_called(name: str, calls: list[Any]) -> None:
    device = torch.device(name)
    given = () if name == "mps" else (device,)
    (state,) = devices.random_states([device])
    devices.set_random_states([device], [state])
    devices.finish([device])
    assert [call[0] for call in calls] == ["get_rng_state", "set_rng_state", "synchronize"]
    assert calls[0][1:] == given and calls[1][2:] == given and calls[2][1:] == given
    calls.clear()
    event = devices.mark(device)
    devices.wait(event, device)
    assert [call[0] for call in calls] == (
        [] if name == "mps" else ["current_stream", "record", "current_stream", "wait_event"]
    )


def test_memory_that_cannot_be_pinned_is_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty

    def refusing(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        if pin_memory:
            raise RuntimeError("no pinned memory here")
        return empty(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", refusing)
    assert devices.pinned(3, torch.float64).shape == (3,)
    values = torch.arange(4.0).reshape(2, 2)
    assert devices.sent(values, torch.device("cpu")) is values
    assert devices.sent(values, torch.device("meta")).shape == (2, 2)
