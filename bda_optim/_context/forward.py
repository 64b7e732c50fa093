"""What surrounds an inner forward pass: plain attention kernels, and no checkpoints."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.backends import cuda, mha

from .._support import torch_private
from .._support.torch_private import inside_checkpoint

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


def refuse_checkpoint() -> None:
    """Raise inside a torch.utils.checkpoint."""
    if inside_checkpoint():
        raise RuntimeError(_NO_HOOKS)


def refuse_reentrant(loss: Any, since: int) -> None:
    """Raise where a loss contains a reentrant checkpoint: `autograd.grad` passes the parameters inside it by, silently.

    Only nodes from number `since` on are looked at: a checkpoint outside the inner loop is none of its business.
    """
    stack = [loss.grad_fn] if isinstance(loss, Tensor) and loss.grad_fn is not None else []
    seen: set[Any] = set(stack)
    while stack:
        node = stack.pop()
        if node.name() == torch_private.REENTRANT_CHECKPOINT:
            raise RuntimeError(_NO_HOOKS)
        new = {n for n, _ in node.next_functions if n is not None and torch_private.number_of(n) >= since} - seen
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
        self._allowed = not torch_private.hooks_are_forbidden()
        try:
            torch.set_autocast_cache_enabled(False)
            _PLAIN_ATTENTION.enter(self._user)
            self._allowed = self._allowed and not torch_private.has_saved_tensor_hooks()
            if self._allowed:
                torch_private.forbid_hooks(_NO_HOOKS)
        except BaseException:
            _surely(self._tidy)
            raise

    def __exit__(self, *_: object) -> None:
        """Turn them back."""
        _surely(self._tidy)

    def _tidy(self) -> None:
        if self._allowed:
            torch_private.allow_hooks()
        torch.set_autocast_cache_enabled(self._cache)
        _PLAIN_ATTENTION.leave(self._user)


def _surely(tidy: Callable[[], None]) -> None:
    """Tidy up, and if an interrupt comes meanwhile, once more: `tidy` may run twice."""
    try:
        tidy()
    except BaseException:
        tidy()
        raise
