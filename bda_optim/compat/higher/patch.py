"""Modules whose parameters are results of an inner loop: `monkeypatch` and `make_functional`, as in `higher.patch`.

The patched module is a twin of the user's: it has the same attributes and hooks, its own dictionaries of tensors, and a
class that is derived from the user's. A derived class, and not a wrapper, because scripts rely on what only inheritance
gives: ``isinstance(fmodel, Net)``, an overridden `train`, attributes that methods set and read. There is one such class
for each of the user's, made when it is first needed; unlike those of `higher` it can be copied and pickled.
"""

from __future__ import annotations

import copy
import functools
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from bda_optim._modules.skeleton import Skeleton
from bda_optim._support.torch_private import MODULE_DICTS, PARAMETERS, own_buffers, own_parameters

from ._fast_weights import FastWeights, leaf

__all__ = ["FunctionalModule", "buffer_sync", "make_functional", "monkeypatch"]

Device = torch.device | str | None
Encapsulator = Callable[["FunctionalModule", nn.Module], None]

_WEIGHTS = "_fast_weights"  # the attribute that every module of a patched tree has


class _Patched(nn.Module):
    """What the classes of all modules in a patched tree derive from, before the user's class."""

    _original: type[nn.Module]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Keep derived classes out of registries that the user's class may have."""

    def __call__(self, *args: Any, params: Iterable[Tensor] | None = None, **kwargs: Any) -> Any:
        """Call the module with the fast weights; `params` (those of the whole tree) become the fast weights first."""
        weights: FastWeights = self.__dict__[_WEIGHTS]
        if weights.running and params is None:
            return super().__call__(*args, **kwargs)
        return weights.run(super().__call__, args, kwargs, params)

    def forward(self, *args: Any, params: Iterable[Tensor] | None = None, **kwargs: Any) -> Any:
        """Do the same without hooks."""
        weights: FastWeights = self.__dict__[_WEIGHTS]
        if weights.running and params is None:
            return super().forward(*args, **kwargs)
        return weights.run(super().forward, args, kwargs, params)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; a tensor in the place of a parameter becomes one of the fast weights."""
        old = self.__dict__.get(PARAMETERS, {}).get(name)
        if old is not None and isinstance(value, Tensor):
            self.__dict__[_WEIGHTS].replace(old, value)
        else:
            super().__setattr__(name, value)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        raise NotImplementedError(
            "a patched module cannot be moved or cast: its parameters are results of the inner loop. Pass `device=` to "
            "`innerloop_ctx` or `monkeypatch`, or move the module before."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return a copy of this part of the tree, as an ordinary module of the user's class."""
        return copy.deepcopy(_plain(self), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the same."""
        return _itself, (_plain(self),)


def _registering(name: str) -> Any:
    """Return a method of nn.Module that registers something, on dictionaries that the user's module does not share."""

    @functools.wraps(getattr(nn.Module, name))
    def register(self: _Patched, *args: Any, **kwargs: Any) -> Any:
        for key, value in self.__dict__.items():
            if (
                isinstance(value, dict | set) and key.startswith("_") and key not in MODULE_DICTS
            ):  # a twin has its own anyway
                self.__dict__[key] = copy.copy(value)
        return getattr(super(_Patched, self), name)(*args, **kwargs)

    return register


for _name in dir(nn.Module):
    if _name.startswith("register_"):
        setattr(_Patched, _name, _registering(_name))


class FunctionalModule(_Patched):
    """A module that computes with its fast weights; made by `monkeypatch` or `make_functional`.

    Everything else is as in the user's module, of whose class it is an instance: attributes, methods, hooks, and
    sub-modules, which may be called by themselves. The user's module is not touched.
    """

    def parameters(self, recurse: bool = True, time: int | None = None) -> Iterator[Any]:
        """Go through the fast weights, in the order of the module's parameters, shared ones once.

        Args:
            recurse: Whether those of sub-modules are included.
            time: After how many changes: 0 for the first, None or -1 for the last. Others need `keep_history=True`.
                With `track_higher_grads=False` there are only the last, also at time 0.
        """
        weights: FastWeights = self.__dict__[_WEIGHTS]
        chosen = weights.at(time)
        if recurse:
            return iter(chosen)
        own = [id(tensor) for tensor in own_parameters(self).values()]
        pairs = zip(weights.current(), chosen, strict=True)
        return iter([tensor for now, tensor in pairs if id(now) in own])

    @property
    def fast_params(self) -> list[Tensor] | None:
        """The fast weights; assigning a list sets them and counts as a step."""
        weights: FastWeights = self.__dict__[_WEIGHTS]
        return weights.now

    @fast_params.setter
    def fast_params(self, value: Iterable[Tensor]) -> None:
        self.update_params(value)

    @property
    def init_fast_params(self) -> list[Tensor]:
        """The first fast weights."""
        if not self.track_higher_grads:
            raise RuntimeError("the initial weights are not kept without higher gradients. Use `fast_params`.")
        weights: FastWeights = self.__dict__[_WEIGHTS]
        return weights.at(0)

    @property
    def track_higher_grads(self) -> bool:
        """Whether the first weights are kept beside the last."""
        weights: FastWeights = self.__dict__[_WEIGHTS]
        return weights.track

    @track_higher_grads.setter
    def track_higher_grads(self, value: bool) -> None:
        if not isinstance(value, bool):
            raise ValueError(f"`track_higher_grads` must be True or False; got {type(value).__name__}.")
        self.__dict__[_WEIGHTS].track = value

    def update_params(self, params: Iterable[Tensor]) -> None:
        """Make `params` the fast weights."""
        self.__dict__[_WEIGHTS].set(params)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the `.grad` of the weights that are leaves; others have none."""
        for p in self.parameters():
            if p.is_leaf and p.grad is not None:
                p.grad = None if set_to_none else torch.zeros_like(p)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return a copy whose weights are leaves."""
        function, arguments = self.__reduce_ex__(2)
        return function(*copy.deepcopy(arguments, memo))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the module with its weights, and the past ones that are kept, as leaves."""
        weights: FastWeights = self.__dict__[_WEIGHTS]
        past, times = weights.history()
        detached = [[leaf(tensor) for tensor in entry] for entry in past]
        now = None if weights.now is None else [leaf(tensor) for tensor in weights.now]
        return _restore, (_plain(self), now, detached, times, weights.track, weights.keep)


_MonkeyPatchBase = FunctionalModule  # annotations of scripts use higher's private name


def make_functional(
    module: nn.Module, encapsulator: Encapsulator | None = None, *, keep_history: bool = False
) -> FunctionalModule:
    """Return a version of `module` that is given its parameters: ``fmodel(x, params=list)``.

    Args:
        module: The module; it is not touched.
        encapsulator: Called as ``encapsulator(fmodel, module)``, to set initial weights.
        keep_history: Whether `parameters(time=...)` is to reach every past list of weights, which keeps them alive.

    >>> fmodel = make_functional(nn.Linear(2, 1))
    >>> fmodel(torch.ones(2), params=[torch.ones(1, 2), torch.zeros(1)])
    tensor([2.])
    """
    fmodel: FunctionalModule = _fresh(module, keep_history=keep_history)[0]
    if encapsulator is not None:
        encapsulator(fmodel, module)
    return fmodel


def monkeypatch(
    module: nn.Module,
    device: Device = None,
    copy_initial_weights: bool = True,
    track_higher_grads: bool = True,
    *,
    keep_history: bool = False,
) -> FunctionalModule:
    """Return a version of `module` with fast weights of its own, which start from the module's parameters.

    Args:
        module: The module; it is not touched, its buffers neither.
        device: Where weights and buffers are to be; where they were, by default.
        copy_initial_weights: Whether the first weights are leaves of their own; if False they are functions of the
            module's parameters, which gradients reach.
        track_higher_grads: Whether the first weights are kept beside the last; False at test time.
        keep_history: Whether `parameters(time=...)` is to reach every past list of weights, which keeps them alive.

    >>> model = nn.Linear(1, 1)
    >>> fmodel = monkeypatch(model, copy_initial_weights=False)
    >>> fmodel(torch.ones(1)).sum().backward()
    >>> model.weight.grad
    tensor([[1.]])
    """
    fmodel: FunctionalModule
    fmodel, params = _fresh(module, device, keep_history=keep_history)
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


def _fresh(module: nn.Module, device: Device = None, *, keep_history: bool) -> tuple[Any, list[Tensor]]:
    """Return a patched module without weights, with copies of the buffers, and the parameters of the original."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"a module is patched; got {type(module).__name__}. Pass a torch.nn.Module.")
    skeleton = Skeleton(module)
    fmodel, _ = _patch(skeleton, keep=keep_history)
    buffers = [place.original for place in skeleton.buffers.values()]
    skeleton.lay_buffers(buffers if device is None else [buffer.to(device) for buffer in buffers])
    return fmodel, [place.original for place in skeleton.params.values()]


def _patch(skeleton: Skeleton, *, keep: bool) -> tuple[Any, FastWeights]:
    """Turn the twins of a skeleton into patched modules; they share the weights that are returned with the root."""
    root, modules = skeleton.root, list(skeleton.root.modules())
    if any(isinstance(module, _Patched) for module in modules):
        raise ValueError(
            "a patched module cannot be patched again; got one, or a module that contains one. Patch the original, or "
            "set the weights of the patched one by `update_params`."
        )
    weights = FastWeights(skeleton, modules, keep=keep)
    for twin in modules:
        twin.__dict__[_WEIGHTS] = weights
        twin.__class__ = _derived(type(twin), FunctionalModule if twin is root else _Patched)
    return root, weights


_CLASSES: dict[type[_Patched], weakref.WeakKeyDictionary[type[nn.Module], weakref.ref[type[nn.Module]]]] = {
    _Patched: weakref.WeakKeyDictionary(),
    FunctionalModule: weakref.WeakKeyDictionary(),
}


_LASTING: list[type[nn.Module]] = []


def _derived(original: type[nn.Module], base: type[_Patched]) -> type[nn.Module]:
    """Return the class of patched modules for a class of the user's.

    That of a class which can be imported lives on; that of a passing one (parametrizations make one per module) lives
    as long as somebody uses it.
    """
    known = _CLASSES[base].get(original)
    found = None if known is None else known()
    if found is None:
        prefix = "Functional" if base is FunctionalModule else "InnerFunctional"
        content: dict[str, Any] = {"_original": original, "__module__": original.__module__, **_methods(original, base)}
        found = types.new_class(prefix + original.__name__, (base, original), {}, lambda space: space.update(content))
        _CLASSES[base][original] = weakref.ref(found)
        if getattr(sys.modules.get(original.__module__), original.__qualname__, None) is original:
            _LASTING.append(found)
    return found


def _methods(original: type[nn.Module], base: type[_Patched]) -> dict[str, Any]:
    """Return the user's own methods, made to run as a forward pass does: differentiable twice, never checkpointed."""
    found: dict[str, Any] = {}
    for cls in original.__mro__:
        if cls.__module__.startswith("torch."):
            continue
        for name, value in vars(cls).items():
            if isinstance(value, types.FunctionType) and getattr(original, name) is value and not hasattr(base, name):
                found[name] = _running(value)
    if issubclass(original, nn.RNNBase):
        found["flatten_parameters"] = _flatten_nothing
    return found


def _running(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        weights: FastWeights = self.__dict__[_WEIGHTS]
        return weights.run(functools.partial(method, self), args, kwargs)

    return run


def _flatten_nothing(self: nn.Module) -> None:
    """Leave the fast weights where they are: cuDNN's flat form would cut them off their graph."""


def _itself(module: nn.Module) -> nn.Module:
    return module


def _plain(module: nn.Module) -> nn.Module:
    """Return the module as one of the user's class, its parameters copied."""
    skeleton = Skeleton(module)
    for twin in skeleton.root.modules():
        content = twin.__dict__
        content.pop(_WEIGHTS, None)
        for name, value in content.items():
            if isinstance(value, Tensor) and not value.is_leaf:  # what the old form of weight_norm computed last
                content[name] = value.detach()
        twin.__class__ = getattr(type(twin), "_original", type(twin))
    for place in skeleton.params.values():
        place.put(nn.Parameter(place.original.detach().clone(), requires_grad=place.original.requires_grad))
    skeleton.lay_buffers([place.original for place in skeleton.buffers.values()])
    return skeleton.root


def _restore(
    plain: nn.Module, now: list[Tensor] | None, past: list[list[Tensor]], times: int, track: bool, keep: bool
) -> Any:
    skeleton = Skeleton(plain)
    fmodel, weights = _patch(skeleton, keep=keep)
    skeleton.lay_buffers([place.original for place in skeleton.buffers.values()])
    weights.track = track
    if now is not None:
        weights.restore(now, past, times)
    return fmodel
