"""Awkward modules (tied, shared, frozen, hooked, parametrized, ...): right to 1e-5 or refused, never silently wrong."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

from . import matrix, registry
from .matrix import Case, numbers


class Made(nn.Module):
    """A module from two functions: `build(self)` makes its parts, `compute(self, x)` is its forward pass."""

    def __init__(self, build: Callable[[Any], None], compute: Callable[..., Any]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 2)
        build(self)
        self.compute = compute

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.compute(self, *args, **kwargs)


def two(self: Any, x: Tensor) -> Tensor:
    return self.b(torch.tanh(self.a(x)))


def nothing(self: Any) -> None:
    pass


def made(build: Callable[[Any], None] = nothing, compute: Callable[..., Any] = two, **more: Any) -> Case:
    return Case(lambda: Made(build, compute), **more)


def setting(**values: Callable[[Any], Any]) -> Callable[[Any], None]:
    """Return a function that sets attributes, each computed from the module."""

    def build(self: Any) -> None:
        for name, value in values.items():
            setattr(self, name, value(self))

    return build


def by_hand(params: dict[str, Tensor], x: Tensor) -> Tensor:
    """`two` as a formula."""
    return torch.tanh(x @ params["a.weight"].mT + params["a.bias"]) @ params["b.weight"].mT + params["b.bias"]


def thrice(params: dict[str, Tensor], x: Tensor) -> Tensor:
    for _ in range(3):
        x = torch.tanh(x @ params["a.weight"].mT + params["a.bias"])
    return x @ params["b.weight"].mT + params["b.bias"]


def tie(self: Any) -> None:
    self.c = nn.Linear(3, 3)
    self.c.weight = self.a.weight


def freeze(name: str) -> Callable[[Any], None]:
    return lambda self: self.get_parameter(name).requires_grad_(False)


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).mT


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(1.3))

    def forward(self, weight: Tensor) -> Tensor:
        return self.gain * weight


def parametrized(*parts: Callable[[], nn.Module]) -> Callable[[Any], None]:
    def build(self: Any) -> None:
        for part in parts:
            parametrize.register_parametrization(self.a, "weight", part())

    return build


def late(self: Any, x: Tensor) -> Tensor:
    """The second layer joins in from the second step on."""
    self.calls.add_(1)
    return torch.tanh(self.a(x))[:, :2] + (self.b(x) if int(self.calls) > 1 else 0.0)


def counts(self: Any) -> None:
    self.register_buffer("calls", torch.zeros(()))


def in_place(self: Any, x: Tensor) -> Tensor:
    hidden = self.a(x)
    hidden.mul_(0.5)
    hidden[:, 0] += 1.0
    return self.b(hidden.tanh_())


class Sine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.saved_tensors[0].cos()


class Once(Sine):
    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.saved_tensors[0].cos()


@dataclasses.dataclass
class Record:
    layer: nn.Module
    weight: Tensor


class Layers(NamedTuple):
    first: nn.Module
    second: nn.Module


class Slotted(Made):
    """Keeps a number, a layer and a parameter in slots, past nn.Module's own attributes."""

    __slots__ = ("layer", "scale", "weight")

    def __init__(self) -> None:
        super().__init__(
            nothing, lambda self, x: self.scale * self.layer(torch.tanh(F.linear(x, self.weight, self.a.bias)))
        )
        for name, value in {"scale": 0.7, "layer": self.b, "weight": self.a.weight}.items():
            object.__setattr__(self, name, value)


class WithProperty(Made):
    @property
    def kernel(self) -> Tensor:
        return self.a.weight.exp() * 0.3


class Delegating(nn.Module):
    """Delegates attributes to the module that it wraps."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = Made(nothing, two)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inside"), name)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


class Own(nn.Parameter):
    """A subclass of a parameter."""


def closure(self: Any) -> None:
    self.body = lambda x: torch.tanh(self.a(x))  # holds the user's module, not the one it is called on


def method(self: Any) -> None:
    self.body = self.encode


class Encoding(Made):
    def encode(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return torch.tanh(scale * self.a(x))


def encoding(build: Callable[[Any], None], **more: Any) -> Case:
    return Case(lambda: Encoding(build, lambda self, x: self.b(self.body(x))), **more)


def lstm_tied() -> nn.Module:
    module = nn.LSTM(3, 3, num_layers=2)
    module.weight_ih_l1 = module.weight_ih_l0
    return module


def recomputing(reentrant: bool) -> Case:
    def compute(self: Any, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        return self.b(checkpoint(lambda z: torch.tanh(self.a(z)), x, use_reentrant=reentrant))

    return made(compute=compute, refused="torch.utils.checkpoint")


def scripted() -> nn.Module:
    return torch.jit.script(nn.Linear(3, 2))


CHECKPOINT = "torch.utils.checkpoint"
CASES: dict[str, Case] = {
    "tied weights": made(tie, lambda self, x: self.b(torch.tanh(self.c(torch.tanh(self.a(x)))))),
    "tied to its transpose": made(compute=lambda self, x: torch.tanh(self.a(x)) @ self.a.weight),
    "tied inside an LSTM": Case(lstm_tied, lambda: (numbers(4, 2, 3),)),
    "a sub-module under two names": made(
        setting(c=lambda s: s.a),
        lambda self, x: self.b(torch.tanh(self.c(torch.tanh(self.a(torch.tanh(self.c(x))))))),
        by_hand=thrice,
    ),
    "a sub-module twice in a Sequential": made(
        setting(body=lambda s: nn.Sequential(s.a, nn.Tanh(), s.a, nn.Tanh(), s.a, nn.Tanh())),
        lambda self, x: self.b(self.body(x)),
        by_hand=thrice,
    ),
    "a frozen layer": made(lambda self: self.a.requires_grad_(False)),
    "a frozen bias": made(freeze("a.bias")),
    "an integer parameter": made(
        setting(n=lambda s: nn.Parameter(torch.tensor([2, 3]), requires_grad=False)),
        lambda self, x: two(self, x) * self.n,
    ),
    "an unused layer": made(setting(c=lambda s: nn.Linear(5, 5))),
    "a missing parameter": made(lambda self: self.register_parameter("c", None)),
    "used from the second step on": made(counts, late, own_loop=False),  # there the upper forward counts too
    "a parameter without dimensions": made(
        setting(g=lambda s: nn.Parameter(torch.tensor(0.8))), lambda self, x: self.g * two(self, x)
    ),
    "a parameter without elements": made(
        setting(e=lambda s: nn.Parameter(torch.zeros(0, 3))), lambda self, x: two(self, x) + self.e.sum()
    ),
    "a transposed parameter": made(
        setting(w=lambda s: nn.Parameter(numbers(3, 2).mT)), lambda self, x: F.linear(torch.tanh(self.a(x)), self.w)
    ),
    "two parameters in one storage": made(
        setting(w=lambda s: nn.Parameter(s.a.weight.detach()[0])), lambda self, x: two(self, x) * self.w.sum()
    ),
    "a subclass of Parameter": made(setting(w=lambda s: Own(torch.ones(2))), lambda self, x: two(self, x) * self.w),
    "a complex parameter": made(
        lambda self: None, lambda self, x: (x @ torch.view_as_complex(self.w)).abs() * two(self, x)[:, 0]
    )._replace(
        make=lambda: Made(
            setting(w=lambda s: nn.Parameter(numbers(3, 2))),
            lambda self, x: (x.to(torch.complex128) @ torch.view_as_complex(self.w)).abs() * two(self, x)[:, 0],
        )
    ),
    "a parametrized weight": made(parametrized(Symmetric)),
    "two parametrizations, one with a parameter": made(parametrized(Symmetric, Scaled)),
    "a parametrized weight that is tied": made(
        lambda self: (tie(self), parametrize.register_parametrization(self.a, "weight", Symmetric())) and None,
        lambda self, x: self.b(torch.tanh(self.c(torch.tanh(self.a(x))))),
    ),
    "orthogonal": made(lambda self: parametrizations.orthogonal(self.a) and None),
    "weight norm": made(lambda self: parametrizations.weight_norm(self.a) and None),
    "weight norm by hook": made(lambda self: nn.utils.weight_norm(self.a) and None),
    "spectral norm in eval": Case(
        lambda: Made(lambda self: parametrizations.spectral_norm(self.a) and None, two).eval()
    ),
    "spectral norm in training": made(
        lambda self: parametrizations.spectral_norm(self.a) and None, refused="spectral_norm in training mode"
    ),
    "a hook that changes the output": made(
        lambda self: self.a.register_forward_hook(lambda m, args, out: out * m.bias.sum()) and None
    ),
    "a hook that changes the input": made(
        lambda self: self.a.register_forward_pre_hook(lambda m, args: (args[0] * 2,)) and None
    ),
    "a hook with keyword arguments": made(
        lambda self: self.a.register_forward_hook(lambda m, args, kw, out: out + 1, with_kwargs=True) and None
    ),
    "a backward hook": made(lambda self: self.a.register_full_backward_hook(lambda *_: None) and None),
    "a hook that is a method": Case(
        lambda: [m := Encoding(nothing, two), m.a.register_forward_hook(lambda layer, x, out: out.sin())][0]
    ),
    "an activation in place": made(
        setting(act=lambda s: nn.ReLU(inplace=True)), lambda self, x: self.b(self.act(self.a(x)))
    ),
    "dropout in place": made(
        setting(drop=lambda s: nn.Dropout(0.4, inplace=True)), lambda self, x: self.b(torch.tanh(self.drop(self.a(x))))
    ),
    "arithmetic in place": made(compute=in_place),
    "its own checkpoint": recomputing(False),
    "its own reentrant checkpoint": recomputing(True),
    "a plain list of layers": made(
        setting(order=lambda s: [s.a, torch.tanh, s.b]),
        lambda self, x: functools.reduce(lambda z, layer: layer(z), self.order, x),
        by_hand=by_hand,
    ),
    "a plain dict of layers": made(
        setting(table=lambda s: {"x": {"a": s.a, "b": s.b}}),
        lambda self, x: self.table["x"]["b"](torch.tanh(self.table["x"]["a"](x))),
        by_hand=by_hand,
    ),
    "a tuple of parameters": made(
        setting(both=lambda s: (s.a.weight, s.a.bias)),
        lambda self, x: self.b(torch.tanh(F.linear(x, *self.both))),
        by_hand=by_hand,
    ),
    "a named tuple of layers": made(
        setting(layers=lambda s: Layers(s.a, s.b)),
        lambda self, x: self.layers.second(torch.tanh(self.layers.first(x))),
        by_hand=by_hand,
    ),
    "a dataclass": made(
        setting(record=lambda s: Record(s.b, s.a.weight)),
        lambda self, x: self.record.layer(torch.tanh(F.linear(x, self.record.weight, self.a.bias))),
        by_hand=by_hand,
    ),
    "a deque": made(
        setting(queue=lambda s: collections.deque([s.a, s.b])),
        lambda self, x: self.queue[1](torch.tanh(self.queue[0](x))),
        by_hand=by_hand,
    ),
    "ParameterList and ParameterDict": made(
        setting(
            l=lambda s: nn.ParameterList([nn.Parameter(torch.ones(2))]),
            d=lambda s: nn.ParameterDict({"w": nn.Parameter(torch.ones(2))}),
        ),
        lambda self, x: two(self, x) * self.l[0] + self.d["w"],
    ),
    "ModuleList and ModuleDict": made(
        setting(l=lambda s: nn.ModuleList([nn.Linear(3, 3)]), d=lambda s: nn.ModuleDict({"h": nn.Linear(2, 2)})),
        lambda self, x: self.d["h"](two(self, torch.tanh(self.l[0](x)))),
    ),
    "a bound method": encoding(method),
    "a partial of a bound method": encoding(
        lambda self: setattr(self, "body", functools.partial(self.encode, scale=0.5))
    ),
    "a closure over itself": encoding(closure),
    "a closure over a parameter": encoding(
        lambda self: setattr(
            self, "body", (lambda w, b: lambda x: torch.tanh(F.linear(x, w, b)))(*self.a.parameters())
        ),
        by_hand=by_hand,
    ),
    "a property": Case(lambda: WithProperty(nothing, lambda self, x: self.b(torch.tanh(x @ self.kernel)))),
    "__getattr__": Case(Delegating),
    "__slots__": Case(Slotted, by_hand=lambda params, x: 0.7 * by_hand(params, x)),
    "an attribute that keeps an output": made(
        compute=lambda self, x: setattr(self, "last", torch.tanh(self.a(x))) or self.b(self.last)
    ),
    "a buffer that is assigned": made(counts, lambda self, x: setattr(self, "calls", self.calls + 1) or two(self, x)),
    "a batch norm shared by two branches": made(
        setting(n=lambda s: nn.BatchNorm1d(3)), lambda self, x: self.b(self.n(self.a(x)) + self.n(x))
    ),
    "an old autograd function": made(compute=lambda self, x: self.b(Sine.apply(self.a(x)))),
    "a function that is once differentiable": made(
        compute=lambda self, x: self.b(Once.apply(self.a(x))), refused="once_differentiable"
    ),
    "a number read with .item()": made(compute=lambda self, x: two(self, x) * (1.0 if x.sum().item() > 9 else 0.5)),
    "a dictionary as output": made(
        compute=lambda self, x, *, scale: {"out": two(self, x) * scale}, call=lambda net, x: net(x, scale=0.5)["out"]
    ),
    "an embedding with max_norm": Case(  # renormalises its weight in place, which no derivative by y_0 would see
        lambda: nn.Sequential(nn.Embedding(6, 3, max_norm=0.5), nn.Tanh()),
        lambda: (torch.tensor([[0, 1], [2, 5]]),),
        refused="must not change its arguments in place",
    ),
    "an embedding with sparse gradients": Case(
        lambda: nn.Sequential(nn.Embedding(6, 3, sparse=True), nn.Tanh()),
        lambda: (torch.tensor([[0, 1], [2, 5]]),),
    ),
    "a traced graph": Case(lambda: torch.fx.symbolic_trace(nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2)))),
    "compiled": Case(lambda: torch.compile(nn.Sequential(nn.Linear(3, 3), nn.Tanh()), backend="eager")),
    "data parallel": Case(lambda: nn.DataParallel(nn.Sequential(nn.Linear(3, 3), nn.Tanh()))),
    "scripted": Case(scripted, refused="scripted module"),
    "lazy": Case(lambda: nn.Sequential(nn.Linear(3, 3), nn.LazyLinear(2)), refused="lazy module"),
}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", help="the name of a single module")


def run(args: argparse.Namespace) -> registry.Result:
    found = matrix.result(matrix.only(CASES, args.only), "awkward", others=True)
    print("\n".join(found["table"]))
    return found


def smoke() -> registry.Result:
    return matrix.result(CASES, "awkward", others=False)


row = matrix.row
