"""What surrounds an inner step: attention kernels, autocast, the random state."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import _autograd as _hooks
from torch.backends import cuda, mha
from torch.utils import checkpoint as torch_checkpoint

from .._support.tree import is_differentiable

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


class surroundings:
    """Make inner forward passes differentiable twice, and keep them from leaving anything behind.

    Fused attention has no second derivative, so its plain form is chosen. Autocast would keep a cast copy
    of the parameters of every step alive. A checkpoint inside the module is refused: it would recompute with parameters
    that are there no longer.

    Not a generator: one that is interrupted on entering lives, with all it has switched, as long as the traceback does.
    """

    def __enter__(self) -> None:
        """Turn the switches."""
        self._cache, self._user = torch.is_autocast_cache_enabled(), object()
        self._allowed = not _hooks._saved_tensors_hooks_get_disabled_error_message()
        try:
            torch.set_autocast_cache_enabled(False)
            _PLAIN_ATTENTION.enter(self._user)
            self._allowed = self._allowed and not _hooks._top_saved_tensors_default_hooks(False)
            if self._allowed:
                _hooks._saved_tensors_hooks_disable(_NO_HOOKS)
        except BaseException:
            _surely(self._tidy)
            raise

    def __exit__(self, *_: object) -> None:
        """Turn them back."""
        _surely(self._tidy)

    def _tidy(self) -> None:
        if self._allowed:
            _hooks._saved_tensors_hooks_enable()
        torch.set_autocast_cache_enabled(self._cache)
        _PLAIN_ATTENTION.leave(self._user)


class Ambient:
    """The autocast settings and the random state of a rollout, to be restored in a replay."""

    def __init__(self, sample: Sequence[Tensor]) -> None:
        """Note autocast (for the CPU and the devices of `sample`) and the default dtype as they are now."""
        self._sample = [t for t in sample if t.device.type not in ("cpu", "meta")]
        kinds = {"cpu", *(t.device.type for t in self._sample)}
        self._autocast = [(k, torch.get_autocast_dtype(k), torch.is_autocast_enabled(k)) for k in sorted(kinds)]
        self._dtype = torch.get_default_dtype()
        self._astray: dict[torch.device, Tensor] = {}
        self._changed: list[tuple[int, Tensor]] = []
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
        outside, dtype, self._astray, self._changed = self.rng(), torch.get_default_dtype(), {}, []

        def tidy() -> None:
            torch.set_default_dtype(dtype)
            self.set_rng(outside)

        try:
            torch.set_default_dtype(self._dtype)
            with contextlib.ExitStack() as stack:
                for kind, precision, enabled in self._autocast:
                    stack.enter_context(torch.autocast(kind, dtype=precision, enabled=enabled))
                stack.enter_context(surroundings())
                yield
        finally:
            _surely(tidy)
        changed = [number for number, flag in self._changed if not flag.is_meta and bool(flag)]
        if changed or any(bool(flag) for flag in self._astray.values() if not flag.is_meta):
            where = f" (in call {min(changed)} of the step)" if changed else ""
            raise RuntimeError(
                f"a replayed step gave another result than the first time{where}, so the hypergradient would be wrong; "
                "the loss or the batches depend on something that is not restored (a torch.Generator, `random`, numpy, "
                "a counter, a data set that shuffles). Draw such numbers beforehand and pass them in `batches=`, or "
                "use `Unroll()`."
            )

    def compare(self, replayed: Sequence[Tensor], stored: Sequence[Tensor]) -> None:
        """Note, on the device, whether a replay met the state of the first sweep, up to rounding.

        With and without a graph other kernels may run (of an LSTM in float32, say), so bits may differ.
        """
        for new, old in zip(replayed, stored, strict=True):
            if is_differentiable(new) and new.numel():
                bound = torch.finfo(new.dtype).eps ** 0.5 * (1 + old.abs().max())
                far = ~((new.detach() - old).abs().max() <= bound) & torch.isfinite(bound)  # NaN is far, too
                self._astray.setdefault(far.device, far).logical_or_(far)  # one flag, not one for each replay

    def compare_prints(self, replayed: Sequence[Tensor], stored: Sequence[Tensor], number: int) -> None:
        """Note whether the state of a replay is that of the first sweep after call `number`, to the bit."""
        self._changed += [(number, new != old) for new, old in zip(replayed, stored, strict=True)]


def fingerprints(values: Sequence[Tensor]) -> list[Tensor]:
    """Return for each tensor the sum of its bits taken as whole numbers: a tensor of one element, on the device."""
    found = []
    for value in values:
        plain = torch.view_as_real(value) if value.is_complex() else value
        bits = plain.detach().contiguous().view(_WHOLE[plain.element_size()])
        found.append(bits.sum(dtype=torch.int64))
    return found


_WHOLE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _surely(tidy: Callable[[], None]) -> None:
    """Tidy up, and if an interrupt comes meanwhile, once more: `tidy` may run twice."""
    try:
        tidy()
    except BaseException:
        tidy()
        raise
