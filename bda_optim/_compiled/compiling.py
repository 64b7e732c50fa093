"""What the user chooses about compilation, and what surrounds it: a progress line, no warnings of torch's own."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import gc
import logging
import threading
import time
import warnings
from collections.abc import Iterator

log = logging.getLogger("bda_optim")

_PATIENCE = 3.0
"""Seconds of compilation after which the user is told what is going on."""


@dataclasses.dataclass(frozen=True)
class Choices:
    """What `compiling` was given."""

    cpp_wrapper: bool = False
    quiet: bool = False


_DEFAULT = Choices()
_choices: contextvars.ContextVar[Choices] = contextvars.ContextVar("bda_optim_compiling", default=_DEFAULT)


@contextlib.contextmanager
def compiling(*, cpp_wrapper: bool = False, quiet: bool = False) -> Iterator[None]:
    """Choose how rollouts that start inside this context are compiled, if they have ``compile=True``.

    The choice belongs to the rollout: what its backward pass compiles, even outside of the context, follows it.

    Args:
        cpp_wrapper: Whether the calls of the kernels are compiled too, and not only the kernels. A call takes less
            time (an MLP 64-256-256-10 with five steps per call: 4 %), the first one about twice as long.
        quiet: Whether to leave out the line that tells, once per problem, that compilation takes longer than three
            seconds. It goes to the logger ``bda_optim``, so that ``logging`` can direct it elsewhere as well.

    >>> import bda_optim as bda
    >>> with bda.compiling(quiet=True):
    ...     pass  # inner.unroll(..., compile=True)
    """
    token = _choices.set(Choices(cpp_wrapper, quiet))
    try:
        yield
    finally:
        _choices.reset(token)


def current() -> Choices:
    """Return the choices that hold here."""
    return _choices.get()


class Progress:
    """Says once that compilation is going on, when it has taken long enough."""

    def __init__(self, choices: Choices) -> None:
        self._told, self._spent = choices.quiet, 0.0

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Surround a part of the compilation; the times of all parts add up."""
        start = time.perf_counter()
        timer = threading.Timer(max(0.0, _PATIENCE - self._spent), self._tell)
        timer.daemon = True
        if not self._told:
            timer.start()
        try:
            yield
        finally:
            timer.cancel()
            self._spent += time.perf_counter() - start

    def _tell(self) -> None:
        if not self._told:
            self._told = True
            log.warning(
                "compile=True: a step and its adjoint are being compiled, once for this problem; the next process "
                "finds them on disk. (`bda_optim.compiling(quiet=True)` leaves this line out.)"
            )


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Silence the deprecations that torch reports of itself, and let the garbage collector rest.

    Importing the compiler, tracing and lowering make many objects and no garbage: without the collector the import
    alone takes 1.3 instead of 1.8 s (AMD EPYC, torch 2.13).
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"torch(\.|$)")
            yield
    finally:
        if collecting:
            gc.enable()
