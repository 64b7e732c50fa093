"""The fast weights of a patched module: where they lie, and which of the past ones are kept."""

from __future__ import annotations

import contextlib
import operator
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bda_optim._context.forward import refuse_checkpoint, surroundings
from bda_optim._modules.rewire import Place, _Entries
from bda_optim._modules.skeleton import Skeleton
from bda_optim._support.torch_private import inside_checkpoint

Spots = list[tuple[Any, Any]]


class FastWeights:
    """What all modules of one patched tree share: the weights that calls use, and the first ones.

    It refers to the dictionaries that hold the modules' tensors and never to the modules, so that nothing goes round in
    a circle. Weights between the first and the last are kept only if `keep` is set: without it a step that no graph
    needs is freed.

    Attributes:
        now: The weights in the order of ``module.parameters()``, shared ones once; None before there are any.
        track: Whether the first weights (and with `keep` all of them) are kept beside the last.
        keep: Whether the weights of every step are kept.
        running: Whether a call of some module of the tree is under way.
    """

    def __init__(self, skeleton: Skeleton, modules: Sequence[nn.Module], *, keep: bool) -> None:
        """Take note of the spots of the parameters and buffers of a skeleton, which has these modules."""
        self.now: list[Tensor] | None = None
        self.track, self.keep = True, keep
        owners = {id(module.__dict__): module for module in modules}
        self._spots = [_spots(place, owners) for place in skeleton.params.values()]
        self._buffers = [_spots(place, owners) for place in skeleton.buffers.values()]
        # Not `skeleton.surroundings`: a skeleton refers to the modules.
        self._recurrent = any(isinstance(module, nn.RNNBase) for module in modules)
        self._recomputed = inside_checkpoint()
        self._laid: list[Tensor] = []
        self._past: list[list[Tensor]] = []  # with `keep` all, otherwise the first; without `track` nothing
        self._times, self.running = 0, False

    def set(self, values: Iterable[Tensor]) -> None:
        """Make `values` the weights that calls use, one time step further."""
        new = list(values)
        if len(new) != len(self._spots):
            raise ValueError(
                f"the module has {len(self._spots)} parameters, shared ones counted once; got {len(new)} fast weights. "
                "Pass a list in the order of `module.parameters()`."
            )
        for value in new:
            if not isinstance(value, Tensor):
                raise TypeError(f"fast weights are tensors; got {type(value).__name__}. Pass a list of tensors.")
        self.now = new
        if not self.track:
            self._times, self._past = 1, []
        else:
            if self.keep or self._times == 0:
                self._past.append(new)
            self._times += 1
        self._lay()
        self._renew_buffers()

    def replace(self, old: Tensor, new: Tensor) -> None:
        """Put `new` in the place of one of the weights; this counts as a step."""
        now = self.current()
        found = [i for i, tensor in enumerate(now) if tensor is old]
        if not found:
            raise ValueError("this parameter is none of the fast weights. Set them all by `update_params`.")
        self.set([*now[: found[0]], new, *now[found[0] + 1 :]])

    def current(self) -> list[Tensor]:
        """Return the weights that calls use."""
        if self.now is None:
            raise ValueError(
                "the patched module has no fast weights yet. Pass them as `params=` to the call, or set them by "
                "`update_params`; `monkeypatch` starts with the module's own."
            )
        return self.now

    def at(self, time: int | None) -> list[Tensor]:
        """Return the weights after `time` changes; None and -1 are the last ones, as are all without tracking."""
        now = self.current()
        if not self.track:
            if time not in (None, -1, 0):
                raise ValueError(
                    f"without higher gradients only the latest weights are there; got time={time}. "
                    "Patch with `track_higher_grads=True`."
                )
            return now
        index = self._times - 1 if time is None else operator.index(time)
        index += self._times if index < 0 else 0
        if not 0 <= index < self._times:
            raise IndexError(f"`time` must lie in [-{self._times}, {self._times}); got {time}.")
        if index == self._times - 1:
            return now
        if index < len(self._past):
            return self._past[index]
        raise ValueError(
            f"the weights at time={time} were not kept: by default only the first (0) and the last (-1) are, so that "
            "memory does not grow. Pass `keep_history=True` to `innerloop_ctx` or `monkeypatch`."
        )

    def history(self) -> tuple[list[list[Tensor]], int]:
        """Return what is kept of the past, and how many time steps there were."""
        return self._past, self._times

    def restore(self, now: list[Tensor], past: list[list[Tensor]], times: int) -> None:
        """Go on from what `history` returned elsewhere."""
        self.now, self._past, self._times = now, past, times
        self._lay()

    def run(self, function: Callable[..., Any], args: Any, kwargs: Any, params: Iterable[Tensor] | None = None) -> Any:
        """Call a module of the tree, or a method of one, as a forward pass of an inner loop must run."""
        if params is not None:
            self.set(params)
        if self.running:
            return function(*args, **kwargs)
        if any(map(operator.is_not, self.current(), self._laid)):  # the user changed the list `fast_params` in place
            self._lay()
        if not self._recomputed:
            refuse_checkpoint()
        self.running = True
        try:
            with surroundings(), self._without_cudnn():
                return function(*args, **kwargs)
        finally:
            self.running = False

    def _without_cudnn(self) -> contextlib.AbstractContextManager[Any]:
        cudnn = torch.backends.cudnn  # whose RNNs have no second derivative
        return cudnn.flags(enabled=False) if self._recurrent and cudnn.is_available() else contextlib.nullcontext()

    def _lay(self) -> None:
        self._laid = list(self.current())
        for spots, tensor in zip(self._spots, self._laid, strict=True):
            for container, key in spots:
                container[key] = tensor

    def _renew_buffers(self) -> None:
        """Put copies in the place of the buffers: a graph may need these values, which the next pass overwrites."""
        for spots in self._buffers:
            container, key = spots[0]
            if isinstance(container[key], Tensor):
                copy = container[key].detach().clone()
                for container, key in spots:
                    container[key] = copy


class _Attributes:
    """The attributes of a module, which is not kept alive by it."""

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
        if isinstance(container, _Entries) and id(container._container) in owners:  # a tuple that is an attribute
            container._container = _Attributes(owners[id(container._container)])
    return [(_Attributes(owners[id(c)]) if id(c) in owners else c, key) for c, key in place.spots]


def leaf(tensor: Tensor, device: torch.device | str | None = None) -> Tensor:
    """Return a detached copy, on `device`, that requires grad if `tensor` does."""
    copy = tensor.detach().clone()
    copy = copy if device is None else copy.to(device)
    return copy.requires_grad_() if tensor.requires_grad else copy
