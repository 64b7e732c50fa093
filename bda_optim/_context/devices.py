"""What devices other than the CPU need: random states of their own, an order between copies, an end of their work."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor


def accelerators(values: Iterable[Tensor]) -> list[torch.device]:
    """Return the devices of some tensors, each once, without the CPU and meta."""
    return [device for device in dict.fromkeys(t.device for t in values) if device.type not in ("cpu", "meta")]


def random_states(devices: Sequence[torch.device]) -> list[Tensor]:
    """Return the state of each device's global generator; a state lies in the host's memory."""
    return [_module(device).get_rng_state(*_number(device)) for device in devices]


def set_random_states(devices: Sequence[torch.device], states: Sequence[Tensor]) -> None:
    """Set the states that `random_states` returned."""
    for device, state in zip(devices, states, strict=True):
        _module(device).set_rng_state(state, *_number(device))


def pinned(size: int, dtype: torch.dtype) -> Tensor:
    """Return memory of the host that devices read and write by themselves; plain memory where there is none such."""
    try:
        return torch.empty(size, dtype=dtype, device="cpu", pin_memory=True)
    except RuntimeError:  # of a device that has no such memory
        return torch.empty(size, dtype=dtype, device="cpu")


def sent(values: Tensor, device: torch.device) -> Tensor:
    """Return a copy of a tensor of the host on a device; the host does not wait for it."""
    if device.type == "cpu":
        return values
    staged = pinned(values.numel(), values.dtype).copy_(values.reshape(-1))
    return staged.to(device, non_blocking=True).reshape(values.shape)


def mark(device: torch.device) -> Any:
    """Return an event behind all work that the device's current stream has been given; None where it has one stream."""
    module = _module(device)
    if device.type == "cpu" or not hasattr(module, "current_stream"):
        return None
    event = module.Event()
    event.record(module.current_stream(device))
    return event


def wait(event: Any, device: torch.device) -> None:
    """Let the device's current stream wait for an event of `mark`; the host does not wait."""
    if event is not None:
        _module(device).current_stream(device).wait_event(event)


def finish(devices: Iterable[torch.device]) -> None:
    """Wait until devices have done all their work, for measurements of time."""
    for device in devices:
        _module(device).synchronize(*_number(device))


def _module(device: torch.device) -> Any:
    """Return torch.cuda, torch.xpu, torch.mps, ..."""
    return torch.get_device_module(device)


def _number(device: torch.device) -> tuple[torch.device, ...]:
    """Return the argument that names a device; torch.mps knows one device and takes none."""
    return () if device.type == "mps" else (device,)
