"""The context of an inner forward pass: plain attention kernels, no autocast cache, no checkpoints."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.backends import cuda, mha

from .._support import torch_private

_NO_HOOKS = (
    "the module uses torch.utils.checkpoint (or saved-tensor hooks) inside an inner step, whose recomputation would "
    "see the parameters of another step. Switch it off in the module and let `adjoint=Checkpointed()` save the memory, "
    "with `accumulate=M` if a single step is too large; or use `adjoint=Differences()`, under which a checkpoint with "
    "`use_reentrant=False` is allowed (without `tasks`)."
)


class _PlainAttention:
    """Switches fused attention off, as torch's `sdpa_kernel(SDPBackend.MATH)` does, at a fifth of its cost.

    Small modules are called in 20 microseconds. The switches belong to the whole process: the first of several threads
    turns them, the last turns them back. An interrupt may come at any point of `enter` or `leave` if `leave` is called
    afterwards; so `enter` belongs inside the `try`.
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


# The switches of `torch.backends.cuda` hold for every device. The fast path of nn.TransformerEncoder has no derivative
# at all, and inside `vmap` torch does not notice that one is needed.
_ATTENTION: tuple[tuple[Callable[[], bool], Callable[[bool], None]], ...] = (
    (cuda.math_sdp_enabled, cuda.enable_math_sdp),
    (cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
    (cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
    (cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
    (mha.get_fastpath_enabled, mha.set_fastpath_enabled),
)
_PLAIN_ATTENTION = _PlainAttention()


def refuse_checkpoint() -> None:
    """Raise inside a torch.utils.checkpoint."""
    if torch_private.inside_checkpoint():
        raise RuntimeError(_NO_HOOKS)


def refuse_reentrant(loss: Any, since: int) -> None:
    """Raise if a loss contains a reentrant checkpoint: `autograd.grad` silently ignores the parameters inside it.

    Only nodes from number `since` on count, so that a checkpoint outside the inner loop is allowed.
    """
    root = loss.grad_fn if isinstance(loss, Tensor) else None
    if root is not None and torch_private.has_reentrant_checkpoint(root, since):
        raise RuntimeError(_NO_HOOKS)


class surroundings:
    """The context of inner forward passes: they can be differentiated twice, and leave nothing behind.

    Fused attention has no second derivative, so the plain form is chosen. Autocast would keep a cast copy of the
    parameters of every step alive, so its cache is off. A checkpoint inside the module is refused, because it would
    recompute with parameters that have since been replaced. Where nothing is differentiated twice, neither is needed:
    a checkpoint recomputes within the step that it belongs to.

    Not a generator: one that is interrupted while it is entered keeps everything switched as long as the traceback
    lives.
    """

    def __init__(self, *, twice: bool = True) -> None:
        """Remember whether the forward passes are differentiated twice."""
        self._twice = twice

    def __enter__(self) -> None:
        """Turn the switches."""
        self._user = object()
        self._cache = torch.is_autocast_cache_enabled()
        self._forbids = self._twice and not torch_private.hooks_are_forbidden()
        try:
            torch.set_autocast_cache_enabled(False)
            if self._twice:
                _PLAIN_ATTENTION.enter(self._user)
            self._forbids = self._forbids and not torch_private.has_saved_tensor_hooks()
            if self._forbids:
                torch_private.forbid_hooks(_NO_HOOKS)
        except BaseException:
            undo_despite_interrupts(self._undo)
            raise

    def __exit__(self, *_: object) -> None:
        """Turn them back."""
        undo_despite_interrupts(self._undo)

    def _undo(self) -> None:
        if self._forbids:
            torch_private.allow_hooks()
        torch.set_autocast_cache_enabled(self._cache)
        _PLAIN_ATTENTION.leave(self._user)


def undo_despite_interrupts(undo: Callable[[], None]) -> None:
    """Run `undo`, and once more if an interrupt comes meanwhile: it may run twice."""
    try:
        undo()
    except BaseException:
        undo()
        raise
