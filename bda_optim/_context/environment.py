"""What a replay restores and checks: the random state, autocast, and whether it computes the same numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .._support.tensors import is_differentiable
from .devices import accelerators, random_states, set_random_states
from .forward import surroundings, undo_despite_interrupts

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Ambient:
    """The autocast settings and the random state of a rollout, to be restored in a replay."""

    def __init__(self, sample: Sequence[Tensor], *, twice: bool = True) -> None:
        """Record autocast (for the CPU and the devices of `sample`) and the default dtype as they are now.

        `twice` says whether forward passes are differentiated twice.
        """
        self._twice = twice
        self._devices = accelerators(sample)
        self._kinds = sorted({"cpu", *(device.type for device in self._devices)})
        self._autocast = self._casts()
        self._dtype = torch.get_default_dtype()
        self._far: dict[torch.device, Tensor] = {}
        self._changed: list[tuple[int, Tensor]] = []
        self._last_rng: Tensor | None = None

    def _casts(self) -> list[tuple[str, torch.dtype, bool]]:
        return [(k, torch.get_autocast_dtype(k), torch.is_autocast_enabled(k)) for k in self._kinds]

    def holds(self) -> bool:
        """Whether autocast is as it was."""
        return self._casts() == self._autocast

    def rng(self) -> Any:
        """Return the global random state of the CPU and of the devices in use."""
        state = torch.get_rng_state()
        if self._last_rng is None or not torch.equal(self._last_rng, state):
            self._last_rng = state  # where nothing is drawn, all stored states share these 5 kB
        return self._last_rng, random_states(self._devices)

    def set_rng(self, state: Any) -> None:
        """Set the state that `rng` returned."""
        torch.set_rng_state(state[0])
        set_random_states(self._devices, state[1])

    def has_drawn(self, since: Any) -> bool:
        """Whether random numbers were drawn since `rng` returned a state."""
        (host, away), (host_before, away_before) = self.rng(), since
        pairs = zip((host, *away), (host_before, *away_before), strict=True)
        return not all(torch.equal(now, before) for now, before in pairs)

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """The context of a replay: afterwards the random state is as before, and a replay that differed raises."""
        rng = self.rng()
        dtype = torch.get_default_dtype()
        self._far = {}
        self._changed = []

        def undo() -> None:
            torch.set_default_dtype(dtype)
            self.set_rng(rng)

        try:
            torch.set_default_dtype(self._dtype)
            with contextlib.ExitStack() as stack:
                for kind, precision, enabled in self._autocast:
                    stack.enter_context(torch.autocast(kind, dtype=precision, enabled=enabled))
                stack.enter_context(surroundings(twice=self._twice))
                yield
        finally:
            undo_despite_interrupts(undo)
        changed, far = self._differences()
        if changed or far:
            where = f" (in call {min(changed)} of the step)" if changed else ""
            raise RuntimeError(another_result(where))

    def _differences(self) -> tuple[list[int], bool]:
        """Return the calls whose state changed, and whether some state is far: one look at each device."""
        flags = [(number, flag) for number, flag in self._changed if not flag.is_meta]
        flags += [(0, flag) for flag in self._far.values() if not flag.is_meta]
        found: list[int] = []
        for device in {flag.device for _, flag in flags}:
            own = [(number, flag) for number, flag in flags if flag.device == device]
            raised = torch.stack([flag for _, flag in own]).tolist()
            found += [number for (number, _), differs in zip(own, raised, strict=True) if differs]
        return [number for number in found if number], 0 in found

    def compare(self, replayed: Sequence[Tensor], stored: Sequence[Tensor]) -> None:
        """Record on the device whether a replay reached the state of the first sweep, up to rounding.

        Bits may differ: with and without a graph different kernels may run (of an LSTM in float32, for example).
        """
        for new, old in zip(replayed, stored, strict=True):
            if is_differentiable(new) and new.numel():
                bound = torch.finfo(new.dtype).eps ** 0.5 * (1 + old.abs().max())
                far = ~((new.detach() - old).abs().max() <= bound) & torch.isfinite(bound)  # NaN is far
                self._far.setdefault(far.device, far).logical_or_(far)  # one flag for all replays

    def compare_prints(self, replayed: Sequence[Tensor], stored: Sequence[Tensor], number: int) -> None:
        """Record whether the state of a replay is that of the first sweep after call `number`, to the bit."""
        self._changed += [(number, new != old) for new, old in zip(replayed, stored, strict=True)]


@contextlib.contextmanager
def without_autocast(sample: Sequence[Tensor]) -> Iterator[None]:
    """Switch autocast off, for the CPU and the devices of `sample`."""
    with contextlib.ExitStack() as stack:
        for kind in {"cpu", *(t.device.type for t in sample if not t.is_meta)}:
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def another_result(where: str = "") -> str:
    """Return the message about a step that gave another result the second time."""
    return (
        f"a replayed step gave another result than the first time{where}, so the hypergradient would be wrong; "
        "the loss or the batches depend on something that is not restored (a torch.Generator, `random`, numpy, "
        "a counter, a data set that shuffles). Draw such numbers beforehand and pass them in `batches=`, or "
        "use `Unroll()`."
    )


def fingerprints(values: Sequence[Tensor]) -> list[Tensor]:
    """Return for each tensor the sum of its elements' bits read as integers: one number, on the device."""
    real = [torch.view_as_real(value) if value.is_complex() else value for value in values]
    return [t.detach().contiguous().view(_INTEGERS[t.element_size()]).sum(dtype=torch.int64) for t in real]
