"""A zoo of modules with their losses, for the tests of `unroll`, `innerloop_ctx`, `commit` and `fmodel`."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from problems import mlp, numbers
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrizations
from torch.nn.utils.stateless import _reparametrize_module

import bda_optim as bda

K = 3
ALPHA = bda.harmonic(0.4)


# A zoo of modules. Each case has a module, the arguments of a call, and the call.


class Case(NamedTuple):
    make: Callable[[], nn.Module]
    args: Callable[[], tuple[Any, ...]] = lambda: (numbers(4, 3),)
    call: Callable[..., Tensor] = lambda net, *args: net(*args)
    reference: bool = True  # False: torch's own second derivative is wrong, or functional_call cannot do it


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(3, 4, bias=False), nn.Linear(4, 3)
        self.decoder.weight = nn.Parameter(numbers(3, 4) / 2)
        self.encoder.weight = nn.Parameter(numbers(4, 3) / 2)
        self.again = nn.Linear(3, 4, bias=False)
        self.again.weight = self.encoder.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.again(self.decoder(torch.tanh(self.encoder(x))))


class FrozenAndUnused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.used, self.unused = nn.Linear(3, 3), nn.Linear(3, 2), nn.Linear(5, 5)
        self.frozen.requires_grad_(False)
        self.register_parameter("missing", None)
        self.count = nn.Parameter(torch.tensor([1, 2]), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.used(torch.tanh(self.frozen(x)))) + self.count


class Containers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.items = nn.ParameterList([nn.Parameter(numbers(3, 3) / 2), nn.Parameter(numbers(3) / 2)])
        self.table = nn.ParameterDict({"w": nn.Parameter(numbers(3, 2)), "b": nn.Parameter(numbers(2))})

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(x @ self.items[0] + self.items[1])
        return hidden @ self.table["w"] + self.table["b"]


class PlainLists(nn.Module):
    """Reaches registered sub-modules and parameters through a plain list, dict and tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.shift = nn.Parameter(numbers(2))
        self.order = [self.one, torch.tanh, self.two]
        self.heads = {"main": (self.three, self.shift)}
        self.pair = (self.shift, 2.0)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.order:
            x = layer(x)
        head, shift = self.heads["main"]
        return torch.tanh(head(x) + shift) + self.pair[0] * self.pair[1]


class BoundMethods(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.gain = nn.Linear(3, 2), nn.Parameter(torch.ones(2))
        self.activation = self.scaled
        self.linear.register_forward_hook(self.hook)

    def scaled(self, x: Tensor) -> Tensor:
        return torch.tanh(x) * self.gain

    def hook(self, module: nn.Module, args: Any, out: Tensor) -> Tensor:
        return out + self.gain

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.linear(x))


class Shared(nn.Module):
    """A sub-module under two names, and inside another one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = self.first
        self.block = nn.Sequential(self.first, nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.block(torch.tanh(self.first(x))))


class Closures(nn.Module):
    """Holds functions that hold it, one of its layers, and one of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.gain, layer, gain = nn.Linear(3, 3), nn.Parameter(torch.ones(3)), nn.Linear(3, 2), None
        self.head, gain = layer, self.gain
        self.encode = lambda x: torch.tanh(self.body(x))
        self.last = lambda x, *, scale=2.0: scale * layer(x * gain)
        self.body.register_forward_hook(lambda m, args, out: out + self.gain)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.encode(x), scale=0.5)


class Slotted(nn.Module):
    """Keeps a number, a layer and a parameter in slots."""

    __slots__ = ("layer", "scale", "weight")

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 3), nn.Linear(3, 2)
        for name, value in {"scale": 0.7, "layer": self.head, "weight": self.body.weight}.items():
            object.__setattr__(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.tanh(F.linear(x, self.weight, self.body.bias)) * self.scale)


class Arguments(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x: Tensor, scale: float = 1.0, *rest: Tensor, mask: Tensor | None = None, **extra: Any) -> Any:
        out = scale * self.linear(x) + sum(rest) + extra["shift"]
        return {"out": out if mask is None else out * mask, "extra": (x, None)}


class Methods(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 3), nn.Linear(3, 2)

    def encode(self, x: Tensor, *, scale: float) -> Tensor:
        return torch.tanh(scale * self.body(x))

    def forward(self, x: Tensor) -> Tensor:
        raise AssertionError("only `encode` and `head` are called")


class OldCube(torch.autograd.Function):
    """Written in the old style: no `setup_context`, so torch.func refuses it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x * x * grad


class WithFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return OldCube.apply(self.linear(x))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


class Direct(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(self.q(x), self.k(x), x, is_causal=True)


class OwnName(nn.Module):
    """Has parameters, buffers and sub-modules with the names that fmodel uses itself."""

    def __init__(self) -> None:
        super().__init__()
        self.trace, self.params, self.losses = nn.Parameter(torch.ones(2)), nn.Linear(3, 2), nn.Linear(2, 2)
        self.register_buffer("_state", torch.ones(2))
        self._names = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.losses(torch.tanh(self.params(x) * self.trace + self._state)) * self._names


def conv() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 2, 2), nn.BatchNorm2d(2), nn.Tanh(), nn.Flatten(), nn.Linear(8, 2))


def linear_with(change: Callable[[nn.Module], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(change(nn.Linear(3, 3)), nn.Tanh(), nn.Linear(3, 2))


def images() -> tuple[Tensor]:
    return (numbers(5, 1, 3, 3),)


def sequences() -> tuple[Tensor]:
    return (numbers(3, 5, 4),)


def last_state(net: nn.Module, x: Tensor) -> Tensor:
    return net(x)[0][-1]


ZOO: dict[str, Case] = {
    "mlp": Case(mlp),
    "relu mlp": Case(lambda: nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))),
    "conv and batch norm": Case(conv, images),
    "conv and batch norm in eval": Case(lambda: conv().eval(), images),
    "batch norm, cumulative": Case(lambda: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, momentum=None))),
    "group and layer norm": Case(
        lambda: nn.Sequential(nn.Conv2d(1, 4, 2), nn.GroupNorm(2, 4), nn.Flatten(), nn.LayerNorm(16), nn.Linear(16, 2)),
        images,
    ),
    "lstm": Case(lambda: nn.LSTM(4, 3), sequences, last_state),
    "lstm of two layers, both ways": Case(
        lambda: nn.LSTM(4, 2, num_layers=2, bidirectional=True, proj_size=1), sequences, last_state
    ),
    "gru": Case(lambda: nn.GRU(4, 3, batch_first=True), sequences, last_state),
    "rnn cell": Case(lambda: nn.RNNCell(3, 4)),
    "multihead attention": Case(Attention, sequences),
    "attention": Case(Direct, sequences),
    "transformer": Case(lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True), sequences),
    "transformer in eval": Case(lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True).eval(), sequences),
    "embedding": Case(
        lambda: nn.Sequential(nn.Embedding(6, 3, padding_idx=0), nn.Tanh(), nn.Linear(3, 2)),
        lambda: (torch.tensor([[0, 1], [2, 5]]),),
    ),
    "dropout": Case(lambda: nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 2))),
    "tied weights": Case(Tied),
    "frozen and unused": Case(FrozenAndUnused),
    "spectral norm in eval": Case(lambda: linear_with(parametrizations.spectral_norm)().eval()),
    "spectral norm by hook in eval": Case(lambda: linear_with(nn.utils.spectral_norm)().eval()),
    "orthogonal": Case(linear_with(parametrizations.orthogonal)),
    "weight norm": Case(linear_with(parametrizations.weight_norm), reference=False),
    "weight norm by hook": Case(linear_with(nn.utils.weight_norm), reference=False),
    "parameter list and dict": Case(Containers),
    "plain lists": Case(PlainLists, reference=False),
    "bound methods": Case(BoundMethods),
    "closures": Case(Closures, reference=False),
    "slots": Case(Slotted, reference=False),
    "shared sub-modules": Case(Shared),
    "many arguments": Case(
        Arguments,
        lambda: (numbers(4, 3), 0.5, numbers(4, 2), numbers(2)),
        lambda net, *args: net(*args, mask=torch.tensor([1.0, 0.5]), shift=0.1)["out"],
    ),
    "other methods": Case(Methods, call=lambda net, x: net.head(net.encode(x, scale=0.5))),
    "indexed sequential": Case(mlp, call=lambda net, x: net[2](net[0](x).sin()) + len(net) + net[1:](net[0](x))),
    "iterated sequential": Case(mlp, call=lambda net, x: [x := layer(x) for layer in net][-1]),
    "old autograd function": Case(WithFunction),
    "graph module": Case(lambda: torch.fx.symbolic_trace(mlp())),
    "names of our own": Case(OwnName),
    "compiled": Case(lambda: torch.compile(mlp(), backend="eager")),
    "compiled in place": Case(lambda: [m := mlp(), m[0].compile(backend="eager")][0], reference=False),
    "data parallel": Case(lambda: nn.DataParallel(mlp()), call=lambda net, x: net(x)),
}


class Problem:
    """A case with both losses: the weights `hyper` act on three terms of the lower one, the third being the norm."""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(3)
        self.case, self.module = case, case.make()
        self.args, self.hyper = case.args(), torch.tensor([1.0, 0.3, 0.1], requires_grad=True)

    def lower(self, net: Any, hyper: Tensor, batch: Any) -> Tensor:
        out = self.case.call(net, *self.args) - 0.3
        norm = sum(p.square().sum() for p in net.parameters() if p.is_floating_point())
        return hyper[0] * out.square().mean() + hyper[1] * out.sin().mean() + hyper[2] * norm

    def upper(self, net: Any, hyper: Tensor, batch: Any) -> Tensor:
        out = self.case.call(net, *self.args)
        return (out + 0.1 * out**3).square().mean() + 0.1 * hyper.prod()

    def optimizer(self, **settings: Any) -> bda.BDAInnerOptimizer:
        return bda.BDAInnerOptimizer(self.module.parameters(), **dict(lr=0.2, upper_lr=0.1, alpha=ALPHA) | settings)

    def unroll(self, hyper: Tensor | None = None, **options: Any) -> bda.FunctionalModule:
        torch.manual_seed(5)
        hyper = self.hyper if hyper is None else hyper
        return self.optimizer().unroll(self.module, self.lower, self.upper, hyper=hyper, steps=K, **options)

    def gradient(self, net: Any, hyper: Tensor | None = None) -> Tensor:
        """The hypergradient; the last evaluation starts from a seed, too."""
        torch.manual_seed(7)
        hyper = self.hyper if hyper is None else hyper
        return torch.autograd.grad(self.upper(net, hyper, None), hyper)[0]

    def loop(self) -> tuple[list[Tensor], list[Tensor], Tensor]:
        """The same loop by torch's own means, on a copy of the module: y_K, the buffers and the hypergradient."""
        module = copy.deepcopy(self.module)
        module = getattr(module, "_orig_mod", getattr(module, "module", module))
        params = {n: p.detach().clone().requires_grad_() for n, p in module.named_parameters() if p.requires_grad}
        buffers = {n: b.clone() for n, b in module.named_buffers()}

        def at(loss: Any, y: dict[str, Tensor], state: dict[str, Tensor]) -> Tensor:
            with _reparametrize_module(module, y | state, tie_weights=True), sdpa_kernel(SDPBackend.MATH):
                return loss(module, self.hyper, None)

        torch.manual_seed(5)
        for k in range(1, K + 1):
            before = {n: b.clone() for n, b in buffers.items()}
            grads = []
            for loss, state in ((self.lower, buffers), (self.upper, before)):
                value = at(loss, params, state)
                grads.append(torch.autograd.grad(value, params.values(), create_graph=True, allow_unused=True))
            buffers = {n: b.detach() for n, b in buffers.items()}
            zero = torch.zeros(())
            weight = 0.4 / k
            params = {
                name: y
                - weight * 0.1 * (zero if up is None else up)
                - (1 - weight) * 0.2 * (zero if low is None else low)
                for (name, y), low, up in zip(params.items(), *grads, strict=True)
            }
        torch.manual_seed(7)
        value = at(self.upper, params, {n: b.clone() for n, b in buffers.items()})
        return list(params.values()), list(buffers.values()), torch.autograd.grad(value, self.hyper)[0]


@contextlib.contextmanager
def untouched(*modules: nn.Module) -> Iterator[None]:
    """The modules have the same objects, versions, values, flags and attributes afterwards."""

    def state() -> list[Any]:
        found: list[Any] = []
        for module in modules:
            for part in module.modules():
                found.append((part.training, [(k, id(v)) for k, v in part.__dict__.items() if k not in ("_modules",)]))
                for table in (part._parameters, part._buffers):
                    found += [(n, id(t), None if t is None else (t._version, t.grad)) for n, t in table.items()]
                found.append([(name, id(child)) for name, child in part._modules.items()])
        return found

    values = [t.detach().clone() for m in modules for t in (*m.parameters(), *m.buffers())]
    before = state()
    yield
    assert state() == before
    now = [t.detach() for m in modules for t in (*m.parameters(), *m.buffers())]
    assert all(torch.equal(a, b) for a, b in zip(now, values, strict=True))


# Two modules with plain losses: one with buffers, one with a backbone.


class Noted(nn.Module):
    """Batch normalisation on two kinds of data: the running mean shows which were seen."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(3), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x))


TRAIN, VALID = numbers(8, 3), numbers(8, 3, seed=2) + 10


def noted_lower(net: Any, hyper: Any, batch: Any) -> Tensor:
    return (net(TRAIN) - 1).square().mean()


def noted_upper(net: Any, hyper: Any, batch: Any) -> Tensor:
    return (net(VALID) - 2).square().mean()


class Backboned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.frozen, self.head = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.frozen(torch.tanh(self.backbone(x))))


def square(net: Any, hyper: Any, batch: Any) -> Tensor:
    return (net(numbers(4, 3)) - 0.5).square().mean()


def cubic(net: Any, hyper: Any, batch: Any) -> Tensor:
    return (net(numbers(4, 3, seed=2)) - 1).abs().pow(3).mean()
