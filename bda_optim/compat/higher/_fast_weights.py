"""The fast weights of a patched module: where they are stored, and which of the past ones are kept."""

from __future__ import annotations

import contextlib
import operator
import weakref
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bda_optim._context.forward import refuse_checkpoint, surroundings
from bda_optim._modules.rewire import Place, TupleEntries
from bda_optim._modules.skeleton import Skeleton
from bda_optim._support.torch_private import inside_checkpoint

Spots = list[tuple[Any, Any]]
History = list[list[Tensor] | None]


class FastWeights:
    """The state that all modules of one patched tree share: the weights that calls use, and the earlier ones.

    It refers to the dictionaries that hold the modules' tensors and never to the modules, so that there is no reference
    cycle.

    Attributes:
        history: The weights after each update, in the order of ``module.parameters()``, shared ones once; the last
            entry is the current one. A dropped entry is None.
        track: Whether earlier weights are kept at all; without it there is only the current entry.
        keep: Which weights between the first and the current ones are kept: True for all of them, False for none, None
            for those since the graph was last cut, by weights that are leaves. The graph of the current ones holds
            nearly all of these anyway.
        running: Whether a call of some module of the tree is under way.
    """

    def __init__(self, skeleton: Skeleton, modules: Sequence[nn.Module], *, keep: bool | None) -> None:
        """Record where the skeleton, which has these modules, stores its parameters and buffers."""
        self.history: History = []
        self.track = True
        self.keep = keep
        self.running = False
        owners = {id(module.__dict__): module for module in modules}
        self._spots = [_spots(place, owners) for place in skeleton.params.values()]
        self._buffers = [_spots(place, owners) for place in skeleton.buffers.values()]
        # Not `skeleton.surroundings`: a skeleton refers to the modules.
        self._recurrent = any(isinstance(module, nn.RNNBase) for module in modules)
        self._recomputed = inside_checkpoint()
        self._stored: list[Tensor] = []

    @property
    def now(self) -> list[Tensor] | None:
        """The current weights; None if there are none yet."""
        return (self.history[-1] or None) if self.history else None

    def set(self, values: Iterable[Tensor]) -> None:
        """Make `values` the current weights; this counts as one update."""
        new = self._checked(values)
        if self.track:
            self._drop(new)
            self.history.append(new)
        else:
            self.history[:] = [new]
        self._store()
        self._renew_buffers()

    def replace_history(self, history: Iterable[Iterable[Tensor] | None] | None) -> None:
        """Make `history` the weights of all times; an empty one, or one that ends with an empty list, has none."""
        entries = [list(entry) if entry is not None else None for entry in history or ()]
        if entries and entries[-1]:
            self._checked(entries[-1])
        self.history = entries
        if self.now is not None:
            self._store()

    def replace(self, old: Tensor, new: Tensor) -> None:
        """Put `new` in the place of one of the weights; this counts as one update."""
        now = self.current()
        for i, tensor in enumerate(now):
            if tensor is old:
                return self.set([*now[:i], new, *now[i + 1 :]])
        raise ValueError("this parameter is not one of the fast weights. Set all of them by `update_params`.")

    def current(self) -> list[Tensor]:
        """Return the current weights.

        Raises:
            ValueError: If there are none yet.
        """
        now = self.now
        if now is None:
            raise ValueError(
                "the patched module has no fast weights yet. Pass them as `params=` to the call, or set them by "
                "`update_params`; `monkeypatch` starts with the module's own."
            )
        return now

    def at(self, time: int | None) -> list[Tensor]:
        """Return the weights after `time` updates; None and -1 give the current ones, without tracking also 0."""
        now = self.current()
        if not self.track:
            if time not in (None, -1, 0):
                raise ValueError(
                    f"without higher gradients only the latest weights are available; got time={time}. "
                    "Patch with `track_higher_grads=True`."
                )
            return now
        count = len(self.history)
        index = count - 1 if time is None else operator.index(time)
        index += count if index < 0 else 0
        if not 0 <= index < count:
            raise IndexError(f"`time` must lie in [-{count}, {count}); got {time}.")
        chosen = self.history[index]
        if chosen is None:
            raise ValueError(
                f"the weights at time={time} were dropped: between the first (0) and the last (-1) only those since "
                "the last cut of the graph are kept. Pass `keep_history=True` to `innerloop_ctx` or `monkeypatch`."
            )
        return chosen

    def move(self, function: Callable[[Tensor], Tensor], chosen: Container[int]) -> None:
        """Apply `function`, as `nn.Module.to` makes it, to the weights and buffers whose ids are in `chosen`.

        A leaf stays the same tensor with other data, as in torch; a weight that has a graph is replaced by a function
        of it, so that gradients go through the move.
        """
        with torch.enable_grad():  # modules are moved under `no_grad`
            if self.now is not None:
                self.now[:] = [_moved(p, function) if id(p) in chosen else p for p in self.now]
                self._store()
            for spots in self._buffers:
                container, key = spots[0]
                if id(container[key]) in chosen:
                    _put(spots, function(container[key]))

    def run(self, function: Callable[..., Any], args: Any, kwargs: Any, params: Iterable[Tensor] | None = None) -> Any:
        """Call a module of the tree, or a method of one, as a forward pass of an inner loop must run."""
        if params is not None:
            self.set(params)
        if self.running:
            return function(*args, **kwargs)
        if any(map(operator.is_not, self.current(), self._stored)):  # the user changed the list `fast_params` in place
            self._store()
        if not self._recomputed:
            refuse_checkpoint()
        self.running = True
        try:
            with surroundings(), self._without_cudnn():
                return function(*args, **kwargs)
        finally:
            self.running = False

    def _checked(self, values: Iterable[Tensor]) -> list[Tensor]:
        new = list(values)
        if len(new) != len(self._spots):
            raise ValueError(
                f"the module has {len(self._spots)} parameters, shared ones counted once; got {len(new)} fast weights. "
                "Pass a list in the order of `module.parameters()`."
            )
        for value in new:
            if not isinstance(value, Tensor):
                raise TypeError(f"fast weights are tensors; got {type(value).__name__}. Pass a list of tensors.")
        return new

    def _drop(self, new: list[Tensor]) -> None:
        """Drop the weights after the first that are not kept once `new` follows."""
        if self.keep or (self.keep is None and not all(p.is_leaf for p in new)):
            return
        index = len(self.history) - 1
        while index > 0 and self.history[index] is not None:  # what is before a dropped entry was dropped with it
            self.history[index] = None
            index -= 1

    def _without_cudnn(self) -> contextlib.AbstractContextManager[Any]:
        cudnn = torch.backends.cudnn  # its RNNs have no second derivative
        return cudnn.flags(enabled=False) if self._recurrent and cudnn.is_available() else contextlib.nullcontext()

    def _store(self) -> None:
        self._stored = list(self.current())
        for spots, tensor in zip(self._spots, self._stored, strict=True):
            for container, key in spots:
                container[key] = tensor

    def _renew_buffers(self) -> None:
        """Replace the buffers by copies: a graph may need these values, which the next forward pass overwrites."""
        for spots in self._buffers:
            container, key = spots[0]
            if isinstance(container[key], Tensor):
                _put(spots, container[key].detach().clone())


class _Attributes:
    """The attributes of a module as a container that does not keep the module alive."""

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)

    def __getitem__(self, key: str) -> Any:
        module = self._module()
        return None if module is None else module.__dict__[key]

    def __setitem__(self, key: str, value: Any) -> None:
        module = self._module()
        if module is not None:
            module.__dict__[key] = value


def _spots(place: Place, owners: dict[int, nn.Module]) -> Spots:
    """Return the spots of a tensor, without any that would keep a module of the tree alive."""
    for container, _ in place.spots:
        if isinstance(container, TupleEntries) and id(container.container) in owners:  # a tuple that is an attribute
            container.container = _Attributes(owners[id(container.container)])
    return [(_Attributes(owners[id(c)]) if id(c) in owners else c, key) for c, key in place.spots]


def _put(spots: Spots, tensor: Tensor) -> None:
    for container, key in spots:
        container[key] = tensor


def _moved(tensor: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    if not tensor.is_leaf:
        return function(tensor)
    old = tensor.detach()
    data = function(old)
    if data is old:
        return tensor
    grad = tensor.grad
    tensor.grad = None
    try:
        tensor.data = data
    except RuntimeError:  # between backends of different kinds, as from the CPU to `meta`, torch makes a new tensor too
        tensor = data.requires_grad_(tensor.requires_grad)
    tensor.grad = None if grad is None else function(grad.detach())
    return tensor


def leaf(tensor: Tensor, device: torch.device | str | None = None, *, copy: bool = True) -> Tensor:
    """Return a leaf with the values of `tensor`, on `device`, that requires grad if `tensor` does.

    Without `copy` it shares memory with `tensor`, unless it has to be moved.
    """
    detached = tensor.detach().clone() if copy else tensor.detach()
    moved = detached if device is None else detached.to(device)
    return moved.requires_grad_(tensor.requires_grad)
