"""Modules whose parameters are results of an inner loop: `monkeypatch` and `make_functional`, as in `higher.patch`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from bda_optim._modules.skeleton import Skeleton
from bda_optim._support.torch_private import MODULE_DICTS, own_buffers

from ._fast_weights import leaf
from ._patched import FunctionalModule, patch_tree

__all__ = ["FunctionalModule", "buffer_sync", "make_functional", "monkeypatch"]

Device = torch.device | str | None
Encapsulator = Callable[["FunctionalModule", nn.Module], None]

# Scripts use these private names of `higher.patch`: the first in annotations and `isinstance`, the second to tell the
# dictionaries that nn.Module makes for itself from the user's attributes.
_MonkeyPatchBase = FunctionalModule
_internal_attrs = {"_backend", *MODULE_DICTS, *(name for name in vars(nn.Module()) if name.endswith("_hooks"))}


def make_functional(
    module: nn.Module, encapsulator: Encapsulator | None = None, *, keep_history: bool = False
) -> FunctionalModule:
    """Return a version of `module` that is given its parameters: ``fmodel(x, params=list)``.

    Args:
        module: The module; it is not touched.
        encapsulator: Called as ``encapsulator(fmodel, module)``, to set initial weights.
        keep_history: Whether `parameters(time=...)` reaches every past list of weights, which keeps them alive.

    >>> fmodel = make_functional(nn.Linear(2, 1))
    >>> fmodel(torch.ones(2), params=[torch.ones(1, 2), torch.zeros(1)])
    tensor([2.])
    """
    fmodel: FunctionalModule = _unset(module, keep_history=keep_history)[0]
    if encapsulator is not None:
        encapsulator(fmodel, module)
    return fmodel


def monkeypatch(
    module: nn.Module,
    device: Device = None,
    copy_initial_weights: bool = True,
    track_higher_grads: bool = True,
    *,
    keep_history: bool | None = None,
) -> FunctionalModule:
    """Return a version of `module` with fast weights of its own, which start from the module's parameters.

    Args:
        module: The module; neither it nor its buffers are touched.
        device: The device of weights and buffers; by default they stay where they are.
        copy_initial_weights: Whether the first weights are leaves of their own; if False they are functions of the
            module's parameters, which gradients reach.
        track_higher_grads: Whether earlier weights are kept beside the last; False at test time.
        keep_history: Whether `parameters(time=...)` reaches the weights of every update: True for all, False for the
            first and the last only, None for those since the graph was last cut, by weights that are leaves.

    >>> model = nn.Linear(1, 1)
    >>> fmodel = monkeypatch(model, copy_initial_weights=False)
    >>> fmodel(torch.ones(1)).sum().backward()
    >>> model.weight.grad
    tensor([[1.]])
    """
    fmodel: FunctionalModule
    fmodel, params = _unset(module, device, keep_history=keep_history)
    fmodel.track_higher_grads = track_higher_grads
    if copy_initial_weights:
        first = [leaf(p, device) for p in params]
    else:
        with torch.enable_grad():  # a validation loop may run under no_grad
            first = [p.clone() if device is None else p.clone().to(device) for p in params]
    fmodel.update_params(first)
    return fmodel


def buffer_sync(module: nn.Module, fmodule: nn.Module, device: Device = None) -> None:
    """Copy the buffers of `module` into the patched module made of it."""
    target = dict(fmodule.named_modules(remove_duplicate=False))
    for path, source in module.named_modules(remove_duplicate=False):
        if path not in target:
            raise KeyError(f"the patched module has no sub-module {path!r}. Pass the module that it was made of.")
        for name, value in own_buffers(source).items():
            copied = value if value is None else value.detach().clone().to(device or value.device)
            own_buffers(target[path])[name] = copied


def _unset(module: nn.Module, device: Device = None, *, keep_history: bool | None) -> tuple[Any, list[Tensor]]:
    """Return a patched module without weights, with copies of the buffers, and the parameters of the original."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"a module is patched; got {type(module).__name__}. Pass a torch.nn.Module.")
    skeleton = Skeleton(module)
    fmodel, _ = patch_tree(skeleton, keep=keep_history)
    buffers = [place.original for place in skeleton.buffers.values()]
    skeleton.lay_buffers(buffers if device is None else [buffer.to(device) for buffer in buffers])
    return fmodel, [place.original for place in skeleton.params.values()]
