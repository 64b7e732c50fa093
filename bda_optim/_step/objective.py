"""How a user's loss is evaluated at given tensors: on a tree of them, or in a module."""

from __future__ import annotations

import contextlib
import inspect
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from .._context.forward import refuse_reentrant
from .._modules.skeleton import Skeleton
from .._support import autograd_graph
from .._support.checks import user_level
from .._support.slots import Keyed, Slot, Template
from .._support.torch_private import sequence_number
from .._support.tree import map_tensors, replace_tensors

Loss: TypeAlias = Callable[[Any, Any, Any], Tensor]
"""``loss(params_or_net, hyper, batch)`` -> a scalar."""

Buffers: TypeAlias = tuple[Tensor, ...]

_CALL = "Losses are called `loss(net, hyper, batch)`, or `loss(params, hyper, batch)` without a module"


def check_loss(level: str, loss: Any) -> None:
    """Raise where a loss cannot be called as losses are."""
    if not callable(loss):
        raise TypeError(f"the {level} loss must be a function; got {type(loss).__name__}. {_CALL}.")
    code = getattr(loss, "__code__", None)
    if code is not None and code.co_argcount == 3 and not code.co_kwonlyargcount:
        return  # nearly all: `inspect` takes 20 microseconds
    try:
        signature = inspect.signature(loss.forward if isinstance(loss, nn.Module) else loss)
    except (TypeError, ValueError):  # not every builtin has one
        return
    try:
        signature.bind(None, None, None)
    except TypeError:
        name = getattr(loss, "__name__", type(loss).__name__)
        raise TypeError(
            f"the {level} loss must take three arguments; got `{name}{signature}`. {_CALL}: write "
            "`lambda net, hyper, batch: ...`."
        ) from None


@contextlib.contextmanager
def explained(*losses: Loss | None) -> Iterator[None]:
    """Add to an error that a loss raises how losses are called: its arguments may be in another order."""
    try:
        yield
    except (TypeError, AttributeError, IndexError, KeyError) as error:
        codes = [getattr(loss, "__code__", None) for loss in losses]
        frames = (frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__))
        if hasattr(error, "add_note") and any(code in codes for code in frames):  # from Python 3.11 on
            error.add_note(f"{_CALL}.")
        raise


Objective: TypeAlias = Callable[[Loss, Sequence[Tensor], Buffers, Sequence[Tensor], Any], tuple[Tensor, Buffers]]
"""``objective(loss, params, buffers, hyper, batch)`` -> the loss at flat tensors, and the buffers as it left them."""


_PLACE = torch.empty(0, device="cpu")
"""Stands for a tensor of a tree."""


class TreeObjective(Keyed):
    """Losses of a tree of tensors."""

    def __init__(self, params: Any, hyper: Template) -> None:
        """Remember the shape of both trees."""
        self._params, self._hyper = map_tensors(lambda t: _PLACE, params), hyper

    def key(self) -> Any:
        """Return what a trace depends on."""
        return self._params, self._hyper

    def __call__(
        self, loss: Loss, params: Sequence[Tensor], buffers: Buffers, hyper: Sequence[Tensor], batch: Any
    ) -> tuple[Tensor, Buffers]:
        """Call ``loss(params, hyper, batch)``."""
        return loss(replace_tensors(self._params, params), self._hyper.fill(hyper), batch), buffers


class ModuleObjective(Keyed):
    """Losses of a module; the tensors are laid into its skeleton."""

    def __init__(self, skeleton: Skeleton, names: Sequence[str], others: dict[str, Slot], hyper: Template) -> None:
        """Remember which parameters are the lower variables (`names`) and which are upper ones (`others`)."""
        self._skeleton, self._names, self._others, self._hyper = skeleton, tuple(names), others, hyper
        self._seen: list[Loss] = []
        self._laid: Sequence[Tensor] | None = None  # the others that are in the skeleton

    @property
    def module(self) -> nn.Module:
        """The user's module."""
        return self._skeleton.module

    def key(self) -> Any:
        """Return what a trace depends on."""
        return self._skeleton, self._names, self._others, self._hyper

    def __call__(
        self, loss: Loss, params: Sequence[Tensor], buffers: Buffers, hyper: Sequence[Tensor], batch: Any
    ) -> tuple[Tensor, Buffers]:
        """Call ``loss(net, hyper, batch)``."""
        self._skeleton.lay_params(self._names, params)
        if hyper is not self._laid:
            self._laid = None  # should this be interrupted
            self._skeleton.lay_params(self._others, (slot.fill(hyper) for slot in self._others.values()))
            self._laid = hyper
        self._skeleton.lay_buffers(buffers)
        number = sequence_number()
        with self._skeleton.surroundings():
            value = loss(self._skeleton.root, self._hyper.fill(hyper), batch)
        if all(loss is not seen for seen in self._seen):
            self._seen.append(loss)
            refuse_reentrant(value, number)
            self._warn_of_originals(loss, value, [*params, *hyper])
        return value, self._skeleton.read_buffers()

    def _warn_of_originals(self, loss: Loss, value: Any, known: Sequence[Tensor]) -> None:
        """Warn, once per loss and module, where a loss uses an adapted parameter of the user's module itself."""
        code = getattr(loss, "__code__", loss)
        inspected = _inspected.setdefault(self._skeleton.module, weakref.WeakSet())
        if code in inspected or not isinstance(value, Tensor):
            return
        inspected.add(code)
        owned = {id(self._skeleton.params[name].original): name for name in self._names}
        passed = {id(t) for t in known}
        for leaf in autograd_graph.leaves([value], [t.grad_fn for t in known]):
            if id(leaf) in owned and id(leaf) not in passed:
                warnings.warn(
                    f"a loss uses the parameter {owned[id(leaf)]!r} of the original module, which is a constant in the "
                    "inner loop and contributes nothing to its gradient. Use the `net` that the loss receives. For a "
                    "proximal term around the initial weights pass the module or its parameters in `hyper=`.",
                    stacklevel=user_level(),
                )
                return


_inspected: weakref.WeakKeyDictionary[nn.Module, weakref.WeakSet[Any]] = weakref.WeakKeyDictionary()
"""By module: the codes of the losses that were inspected for parameters of the module itself."""
