"""The class of a patched module.

The patched module is a copy of the user's module tree: it has the same attributes and hooks, its own dictionaries of
tensors, and a class derived from the user's. It is a derived class and not a wrapper because scripts rely on
inheritance: ``isinstance(fmodel, Net)``, an overridden `train`, attributes that methods set and read. There is one such
class for each of the user's, made when it is first needed; unlike those of `higher`, its instances can be copied and
pickled.
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

from bda_optim._modules.second_order import torch_class
from bda_optim._modules.skeleton import Skeleton
from bda_optim._support.torch_private import MODULE_DICTS, PARAMETERS, own_buffers, own_parameters

from ._fast_weights import FastWeights, History, leaf

_WEIGHTS = "_fast_weights"  # the attribute that every module of a patched tree has


class _Patched(nn.Module):
    """The base of the classes of all modules in a patched tree; it comes before the user's class."""

    _original: type[nn.Module]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Keep derived classes out of registries that the user's class may have."""

    def __call__(self, *args: Any, params: Iterable[Tensor] | None = None, **kwargs: Any) -> Any:
        """Call the module with the fast weights; `params`, those of the whole tree, become the fast weights first."""
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
        """Move or cast the fast weights and the buffers; `to`, `cuda`, `float` and the like end here."""
        parts = self.modules() if recurse else (self,)
        held = [t for part in parts for t in (*own_parameters(part).values(), *own_buffers(part).values())]
        self.__dict__[_WEIGHTS].move(fn, {id(tensor) for tensor in held if tensor is not None})
        return self

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
        shared = {key: value for key, value in self.__dict__.items() if key.startswith("_") and key not in MODULE_DICTS}
        for key, value in shared.items():
            if isinstance(value, dict | set):
                self.__dict__[key] = copy.copy(value)
        return getattr(super(_Patched, self), name)(*args, **kwargs)

    return register


for _name in dir(nn.Module):
    if _name.startswith("register_"):
        setattr(_Patched, _name, _registering(_name))


class FunctionalModule(_Patched):
    """A module that computes with its fast weights; `monkeypatch` and `make_functional` return it.

    Everything else is as in the user's module, of whose class it is an instance: attributes, methods, hooks, and
    sub-modules, which may be called by themselves. The user's module is not touched.
    """

    def parameters(self, recurse: bool = True, time: int | None = None) -> Iterator[Any]:
        """Iterate over the fast weights, in the order of the module's parameters, shared ones once.

        Args:
            recurse: Whether those of sub-modules are included.
            time: After how many updates: 0 for the first, None or -1 for the last. Those between are there since the
                graph was last cut, or with `keep_history=True` all. With `track_higher_grads=False` there are only the
                last, also at time 0.
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
        """The fast weights; assigning a list sets them and counts as an update."""
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
    def _fast_params(self) -> History:
        """The fast weights of all times: the list itself, since scripts clear, shorten and replace it."""
        weights: FastWeights = self.__dict__[_WEIGHTS]
        return weights.history

    @_fast_params.setter
    def _fast_params(self, value: Iterable[Iterable[Tensor] | None] | None) -> None:
        self.__dict__[_WEIGHTS].replace_history(value)

    @_fast_params.deleter
    def _fast_params(self) -> None:
        self.__dict__[_WEIGHTS].replace_history(None)

    @property
    def track_higher_grads(self) -> bool:
        """Whether earlier weights are kept beside the last."""
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
        """Pickle the module with its weights of all times that are kept, as leaves."""
        weights: FastWeights = self.__dict__[_WEIGHTS]
        history = [entry and [leaf(tensor) for tensor in entry] for entry in weights.history]
        return _restore, (_plain(self), history, weights.track, weights.keep)


def patch_tree(skeleton: Skeleton, *, keep: bool | None) -> tuple[Any, FastWeights]:
    """Turn the modules of a skeleton into patched ones, and return the root and the weights that they share."""
    root = skeleton.root
    modules = list(root.modules())
    if any(isinstance(module, _Patched) for module in modules):
        raise ValueError(
            "a patched module cannot be patched again; got one, or a module that contains one. Patch the original, or "
            "set the weights of the patched one by `update_params`."
        )
    weights = FastWeights(skeleton, modules, keep=keep)
    for module in modules:
        module.__dict__[_WEIGHTS] = weights
        module.__class__ = _derived(type(module), FunctionalModule if module is root else _Patched)
    return root, weights


_CLASSES: dict[type[_Patched], weakref.WeakKeyDictionary[type[nn.Module], weakref.ref[type[nn.Module]]]] = {
    _Patched: weakref.WeakKeyDictionary(),
    FunctionalModule: weakref.WeakKeyDictionary(),
}
_PERMANENT: list[type[nn.Module]] = []


def _derived(original: type[nn.Module], base: type[_Patched]) -> type[nn.Module]:
    """Return the class of patched modules for a class of the user's.

    The one for a class that can be imported is kept for good; the one for a temporary class (parametrizations make one
    per module) lives as long as it is used.
    """
    reference = _CLASSES[base].get(original)
    known = None if reference is None else reference()
    if known is not None:
        return known
    prefix = "Functional" if base is FunctionalModule else "InnerFunctional"
    own = torch_class(original)
    content: dict[str, Any] = {"_original": own, "__module__": own.__module__, **_methods(original, base)}
    derived = types.new_class(prefix + original.__name__, (base, original), {}, lambda space: space.update(content))
    _CLASSES[base][original] = weakref.ref(derived)
    if getattr(sys.modules.get(original.__module__), original.__qualname__, None) is original:
        _PERMANENT.append(derived)
    return derived


def _methods(original: type[nn.Module], base: type[_Patched]) -> dict[str, Any]:
    """Return the user's own methods, made to run as a forward pass does: differentiable twice, never checkpointed."""
    methods: dict[str, Any] = {}
    for cls in original.__mro__:
        if cls.__module__.startswith(("torch.", "bda_optim.")):
            continue
        for name, value in vars(cls).items():
            if isinstance(value, types.FunctionType) and getattr(original, name) is value and not hasattr(base, name):
                methods[name] = _running(value)
    if issubclass(original, nn.RNNBase):
        methods["flatten_parameters"] = _flatten_nothing
    return methods


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
    for part in skeleton.root.modules():
        content = part.__dict__
        content.pop(_WEIGHTS, None)
        for name, value in content.items():
            if isinstance(value, Tensor) and not value.is_leaf:  # the last result of the old form of weight_norm
                content[name] = value.detach()
        part.__class__ = getattr(type(part), "_original", type(part))
    for place in skeleton.params.values():
        place.put(nn.Parameter(place.original.detach().clone(), requires_grad=place.original.requires_grad))
    skeleton.lay_buffers([place.original for place in skeleton.buffers.values()])
    return skeleton.root


def _restore(plain: nn.Module, history: History, track: bool, keep: bool | None) -> Any:
    skeleton = Skeleton(plain)
    fmodel, weights = patch_tree(skeleton, keep=keep)
    skeleton.lay_buffers([place.original for place in skeleton.buffers.values()])
    weights.track = track
    weights.replace_history(history)
    return fmodel
