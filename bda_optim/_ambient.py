"""What surrounds an inner step: attention kernels, autocast, the random state."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.backends import cuda, mha
from torch.utils import checkpoint as torch_checkpoint

from ._tree import is_differentiable

_NO_HOOKS = (
    "the module uses torch.utils.checkpoint (or saved-tensor hooks) inside an inner step, whose recomputation would "
    "see the parameters of another step. Switch it off in the module and let `adjoint=Checkpointed()` save the memory."
)


class _PlainAttention:
    """torch's `sdpa_kernel(SDPBackend.MATH)`, at a fifth of its cost: small modules are called in 20 microseconds.

    The switches are those of the whole process: the first of several threads turns them, the last turns them back. Both
    `enter` and `leave` may be interrupted anywhere, if `leave` follows; so `enter` belongs inside the `try`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users: set[object] = set()
        self._before: list[bool] | None = None

    def enter(self, user: object) -> None:
        with self._lock:
            self._users.add(user)
            if self._before is None:
                self._before = [is_on() for is_on, _ in _ATTENTION]
                for (_, switch), wanted in zip(_ATTENTION, (True, False, False, False, False), strict=True):
                    switch(wanted)

    def leave(self, user: object) -> None:
        with self._lock:
            self._users.discard(user)
            if not self._users and self._before is not None:
                for (_, switch), before in zip(_ATTENTION, self._before, strict=True):
                    switch(before)
                self._before = None


_ATTENTION: tuple[tuple[Callable[[], bool], Callable[[bool], None]], ...] = (
    (cuda.math_sdp_enabled, cuda.enable_math_sdp),  # the switches hold for every device, whatever their module's name
    (cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
    (cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
    (cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
    (mha.get_fastpath_enabled, mha.set_fastpath_enabled),  # has no derivative at all, and `vmap` hides that one is due
)
_PLAIN_ATTENTION = _PlainAttention()


def inside_checkpoint() -> bool:
    """Whether a torch.utils.checkpoint is recording what it will recompute later."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return bool(hooks) and getattr(hooks[0], "__module__", "") == torch_checkpoint.__name__


def refuse_checkpoint() -> None:
    """Raise inside a torch.utils.checkpoint."""
    if inside_checkpoint():
        raise RuntimeError(_NO_HOOKS)


def sequence_number() -> int:
    """Return the number of the next node that this thread adds to the autograd graph."""
    return torch._C._autograd._get_sequence_nr()


def refuse_reentrant(loss: Any, since: int) -> None:
    """Raise where a loss contains a reentrant checkpoint: `autograd.grad` passes the parameters inside it by, silently.

    Only nodes from number `since` on are looked at: a checkpoint outside the inner loop is none of its business.
    """
    stack = [loss.grad_fn] if isinstance(loss, Tensor) and loss.grad_fn is not None else []
    seen: set[Any] = set(stack)
    while stack:
        node = stack.pop()
        if node.name() == "CheckpointFunctionBackward":
            raise RuntimeError(_NO_HOOKS)
        new = {n for n, _ in node.next_functions if n is not None and n._sequence_nr() >= since} - seen
        seen |= new
        stack.extend(new)


@contextlib.contextmanager
def surroundings() -> Iterator[None]:
    """Make inner forward passes differentiable twice, and keep them from leaving anything behind.

    Fused attention has no second derivative, so its plain form is chosen. Autocast would keep a cast copy
    of the parameters of every step alive. A checkpoint inside the module is refused: it would recompute with parameters
    that are there no longer.
    """
    cache, user = torch.is_autocast_cache_enabled(), object()
    try:
        torch.set_autocast_cache_enabled(False)
        _PLAIN_ATTENTION.enter(user)
        if torch._C._autograd._top_saved_tensors_default_hooks(False):
            yield
        else:
            with torch.autograd.graph.disable_saved_tensors_hooks(_NO_HOOKS):
                yield
    finally:
        _PLAIN_ATTENTION.leave(user)
        torch.set_autocast_cache_enabled(cache)


class Ambient:
    """The autocast settings and the random state of a rollout, to be restored in a replay."""

    def __init__(self, sample: Sequence[Tensor]) -> None:
        """Note autocast as it is now, for the CPU and the devices of `sample`."""
        self._sample = [t for t in sample if t.device.type not in ("cpu", "meta")]
        kinds = {"cpu", *(t.device.type for t in self._sample)}
        self._autocast = [(k, torch.get_autocast_dtype(k), torch.is_autocast_enabled(k)) for k in sorted(kinds)]
        self._astray: dict[torch.device, Tensor] = {}
        self._known: Tensor | None = None

    def rng(self) -> Any:
        """Return the global random state of the CPU and of the devices in use."""
        state = torch.get_rng_state()
        if self._known is None or not torch.equal(self._known, state):
            self._known = state  # where nothing is drawn, all stored states share these 5 kB
        # Without a device to ask, torch's function takes 40 microseconds to say nothing.
        return self._known, *(torch_checkpoint.get_device_states(*self._sample) if self._sample else ([], []))

    def set_rng(self, state: Any) -> None:
        """Set it."""
        torch.set_rng_state(state[0])
        if self._sample:
            torch_checkpoint.set_device_states(*state[1:])

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Surround a replay; afterwards the random state is as it was, and a replay that went astray raises."""
        outside, self._astray = self.rng(), {}
        try:
            with contextlib.ExitStack() as stack:
                for kind, dtype, enabled in self._autocast:
                    stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
                stack.enter_context(surroundings())
                yield
        finally:
            self.set_rng(outside)
        if any(bool(flag) for flag in self._astray.values() if not flag.is_meta):
            raise RuntimeError(
                "a replayed step gave another result than the first time, so the hypergradient would be wrong; the "
                "loss or the batches depend on something that is not restored (a torch.Generator, `random`, numpy, a "
                "counter, a data set that shuffles). Draw such numbers beforehand and pass them in `batches=`, or use "
                "`Unroll()`."
            )

    def compare(self, replayed: Sequence[Tensor], stored: Sequence[Tensor]) -> None:
        """Note, on the device, whether a replay met the state of the first sweep, up to rounding."""
        for new, old in zip(replayed, stored, strict=True):
            if is_differentiable(new) and new.numel():
                tolerance = torch.finfo(new.dtype).eps ** 0.5
                far = (new.detach() - old).abs().max() > tolerance * (1 + old.abs().max())
                self._astray.setdefault(far.device, far).logical_or_(far)  # one flag, not one for each replay
