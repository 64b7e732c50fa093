"""`unroll` and `commit` on modules of every kind, against functional_call and finite differences; and `fmodel`."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrizations
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils.checkpoint import checkpoint

import bda_optim as bda

K = 3
TIGHT = {"rtol": 1e-10, "atol": 1e-13}
ALPHA = bda.harmonic(0.4)


@pytest.fixture(autouse=True)
def _doubles(_same_start: None) -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield


def numbers(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


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


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


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
every_case = pytest.mark.parametrize("case", ZOO.values(), ids=ZOO.keys())
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:dropout option adds dropout:UserWarning"),
]


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
        """The hypergradient; the last evaluation, too, starts from a seed."""
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


# Every module of the zoo: values, derivatives, adjoints, and what is left behind.


@pytest.mark.parametrize("name", [name for name, case in ZOO.items() if case.reference])
def test_unroll_equals_a_loop_of_functional_calls(name: str) -> None:
    problem = Problem(ZOO[name])
    params, buffers, gradient = problem.loop()
    with untouched(problem.module):
        fmodel = problem.unroll()
        torch.testing.assert_close(list(fmodel.params.values()), params, **TIGHT)
        torch.testing.assert_close(list(fmodel.buffer_dict.values()), buffers, **TIGHT)
        torch.testing.assert_close(problem.gradient(fmodel), gradient, **TIGHT)
    assert gradient.abs().min() > 1e-8


@pytest.mark.parametrize("name", ZOO)
def test_hypergradient_by_finite_differences(name: str) -> None:
    problem, eps = Problem(ZOO[name]), 1e-5
    gradient = problem.gradient(problem.unroll())

    def value(hyper: Tensor) -> Tensor:
        net = problem.unroll(hyper)
        torch.manual_seed(7)
        return problem.upper(net, hyper, None)

    direction = torch.tensor([0.5, -0.8, 0.3])
    with torch.no_grad():
        moved = [value(problem.hyper + sign * eps * direction) for sign in (1, -1)]
    torch.testing.assert_close(gradient @ direction, (moved[0] - moved[1]) / (2 * eps), rtol=1e-6, atol=1e-9)


@every_case
def test_checkpointed_equals_unroll(case: Case) -> None:
    problem = Problem(case)
    exact = problem.unroll()
    buffers = {name: b.clone() for name, b in exact.buffer_dict.items()}
    expected = problem.gradient(exact)
    with untouched(problem.module):
        for adjoint in (bda.Checkpointed(every=2), bda.Checkpointed(slots=2)):
            other = problem.unroll(adjoint=adjoint)
            torch.testing.assert_close(other.params, exact.params, **TIGHT)
            torch.testing.assert_close(other.buffer_dict, buffers, **TIGHT)
            torch.testing.assert_close(tuple(other.trace), tuple(exact.trace), **TIGHT)
            torch.testing.assert_close(problem.gradient(other), expected, **TIGHT)


@every_case
def test_innerloop_equals_unroll(case: Case) -> None:
    problem = Problem(case)
    exact = problem.unroll()
    expected = problem.gradient(exact)
    with untouched(problem.module):
        torch.manual_seed(5)
        with bda.innerloop_ctx(problem.module, problem.optimizer()) as (fmodel, diffopt):
            for _ in range(K):
                diffopt.step(problem.lower(fmodel, problem.hyper, None), problem.upper(fmodel, problem.hyper, None))
            torch.testing.assert_close(fmodel.params, exact.params, **TIGHT)
            torch.testing.assert_close(problem.gradient(fmodel), expected, **TIGHT)


# What torch cannot do, and what would give a wrong number.


class Distances(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.centres = nn.Parameter(numbers(2, 3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cdist(x, self.centres)


class Connectionist(nn.Module):
    """A sequence model under the CTC loss."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.linear(x).log_softmax(-1)
        targets, lengths = torch.tensor([[1, 2], [3, 1]]), (torch.tensor([5, 5]), torch.tensor([2, 2]))
        return F.ctc_loss(scores, targets, *lengths)


# torch has a second derivative, which takes the singular vectors as constants, although the forward pass moves them.
MOVING = {
    "spectral norm": Case(linear_with(parametrizations.spectral_norm)),
    "spectral norm by hook": Case(linear_with(nn.utils.spectral_norm)),
    "converged spectral norm": Case(linear_with(lambda m: parametrizations.spectral_norm(m, n_power_iterations=100))),
    "spectral norm under a linear loss": Case(linear_with(nn.utils.spectral_norm), call=lambda net, x: net[0](x)),
}
ONCE = {
    "EmbeddingBag": Case(lambda: nn.EmbeddingBag(6, 3, mode="sum"), lambda: (torch.tensor([[0, 1], [2, 5]]),)),
    "cdist": Case(Distances),
    "ctc_loss": Case(Connectionist, lambda: (numbers(5, 2, 3),)),
}


@pytest.mark.parametrize("name", ONCE)
def test_without_a_second_derivative_there_is_a_clear_error_and_first_order_works(name: str) -> None:
    problem = Problem(ONCE[name])
    message = rf"no second derivative of `{name}`.*`adjoint=FirstOrder\(\)`"
    with untouched(problem.module):
        for adjoint in (bda.Unroll(), bda.Checkpointed()):
            with pytest.raises(NotImplementedError, match=message):
                problem.unroll(adjoint=adjoint)
        with (
            bda.innerloop_ctx(problem.module, problem.optimizer()) as (fmodel, diffopt),
            pytest.raises(NotImplementedError, match=message),
        ):
            diffopt.step(problem.lower(fmodel, problem.hyper, None), problem.upper(fmodel, problem.hyper, None))
    first = problem.unroll(adjoint=bda.FirstOrder(), copy_initial_weights=False)
    problem.upper(first, problem.hyper, None).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in problem.module.parameters())


@pytest.mark.parametrize("name", MOVING)
def test_a_spectral_norm_in_training_mode_is_refused_and_first_order_works(name: str) -> None:
    problem = Problem(MOVING[name])
    problem.lower = lambda net, hyper, batch: hyper[0] * problem.case.call(net, *problem.args).sum()
    message = r"no second derivative of `spectral_norm in training mode`.*in eval mode"
    with untouched(problem.module):
        for adjoint in (bda.Unroll(), bda.Checkpointed(), bda.Checkpointed(slots=2), bda.ForwardMode()):
            with pytest.raises(NotImplementedError, match=message):
                problem.unroll(adjoint=adjoint)
        with (
            bda.innerloop_ctx(problem.module, problem.optimizer()) as (fmodel, diffopt),
            pytest.raises(NotImplementedError, match=message),
        ):
            diffopt.step(problem.lower(fmodel, problem.hyper, None), problem.upper(fmodel, problem.hyper, None))
    before = [b.clone() for b in problem.module.buffers()]
    first = problem.unroll(adjoint=bda.FirstOrder(), copy_initial_weights=False)
    problem.upper(first, problem.hyper, None).backward()
    assert all(p.grad is not None for p in problem.module[0].parameters())
    if name != "converged spectral norm":
        after = first.buffer_dict.values()
        assert all((a - b).abs().max() > 1e-9 for a, b in zip(after, before, strict=True)), "the vectors moved"


class Once(OldCube):
    """Its derivative is computed without a graph: `autograd.grad` would pass it by, without a word."""

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return OldCube.backward(ctx, grad)


@pytest.mark.parametrize("bend", [lambda out: out, torch.square], ids=["linear", "square"])
def test_a_function_that_is_once_differentiable_is_refused(bend: Any) -> None:
    module, x = nn.Linear(3, 2), numbers(4, 3)
    hyper = torch.ones((), requires_grad=True)
    inner = bda.BDAInnerOptimizer(module.parameters(), lr=0.1)

    def lower(net: Any, hyper: Tensor, batch: Any) -> Tensor:
        return bend(Once.apply(net(x))).sum() + hyper * net.bias.square().sum()

    for adjoint in (bda.Unroll(), bda.Checkpointed(), bda.ForwardMode()):
        with pytest.raises(NotImplementedError, match="a function marked once_differentiable"):
            inner.unroll(module, lower, hyper=hyper, steps=2, adjoint=adjoint)
    with bda.innerloop_ctx(module, inner) as (fmodel, diffopt):
        with pytest.raises(NotImplementedError, match="a function marked once_differentiable"):
            diffopt.step(lower(fmodel, hyper, None))
    inner.unroll(module, lower, hyper=hyper, steps=2, adjoint=bda.FirstOrder())


@pytest.mark.parametrize("adjoint", [bda.Unroll(), bda.Checkpointed(), bda.ForwardMode()], ids=type)
def test_an_embedding_with_sparse_gradients_is_as_one_without(adjoint: Any) -> None:
    indices, found = torch.tensor([[0, 1], [2, 5]]), []
    hyper = torch.tensor([1.0, 0.3], requires_grad=True)

    def lower(net: Any, hyper: Tensor, batch: Any) -> Tensor:
        return hyper[0] * (net(indices).tanh() - 0.3).square().mean() + hyper[1] * net(indices).sin().mean()

    def bare(net: Any, hyper: Tensor, batch: Any) -> Tensor:
        return F.embedding(indices, net.weight, sparse=True).square().sum()

    for sparse in (False, True):
        torch.manual_seed(0)
        module = nn.Embedding(6, 3, sparse=sparse)
        inner = bda.BDAInnerOptimizer(module.parameters(), lr=0.3, rule=torch.optim.Adam, alpha=0.3)
        fmodel = inner.unroll(module, lower, lower, hyper=hyper, steps=K, adjoint=adjoint)
        found.append(torch.autograd.grad(lower(fmodel, hyper, None), hyper)[0])
        assert module.sparse is sparse
    assert torch.equal(*found)
    with pytest.raises(NotImplementedError, match=r"a sparse gradient wrongly; got one of the lower loss at step k=1"):
        inner.unroll(module, bare, lower, hyper=hyper, steps=1, adjoint=adjoint)


def test_tasks_with_attention_in_eval_mode() -> None:
    """Under `vmap` nothing seems to require grad, and torch would take a path that has no derivative."""
    for make in (Attention, lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)):
        problem = Problem(Case(lambda make=make: make().eval(), sequences))
        x = torch.stack([numbers(3, 5, 4, seed=s) for s in (1, 2)])

        def lower(net: Any, hyper: Tensor, batch: Tensor) -> Tensor:
            return hyper[0] * net(batch).square().mean() + hyper[1] * net(batch).sin().mean()

        inner = problem.optimizer(alpha=0.0)
        together = inner.unroll(problem.module, lower, hyper=problem.hyper, steps=K, batches=[x] * K, tasks=2)
        got = torch.autograd.grad(together.losses(lower, problem.hyper, x).sum(), problem.hyper)[0]
        want = torch.zeros(3)
        for task in x:
            alone = inner.unroll(problem.module, lower, hyper=problem.hyper, steps=K, batches=[task] * K)
            want += torch.autograd.grad(lower(alone, problem.hyper, task), problem.hyper)[0]
        torch.testing.assert_close(got, want, **TIGHT)
        assert torch.backends.mha.get_fastpath_enabled()


class Recomputing(nn.Module):
    """Checkpoints its body, as a memory-saving backbone does."""

    def __init__(self, reentrant: bool = False) -> None:
        super().__init__()
        self.body, self.head, self.reentrant = nn.Sequential(nn.Linear(3, 3), nn.Tanh()), nn.Linear(3, 2), reentrant
        self.inner = nn.ModuleDict({"deep": nn.Identity()})

    def features(self, x: Tensor) -> Tensor:
        return checkpoint(self.body, x, use_reentrant=self.reentrant)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


REFUSED_CALLS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "inside the module": lambda net, x: net(x),
    "inside a method": lambda net, x: net.head(net.features(x)),
    "around the module": lambda net, x: checkpoint(net, x, use_reentrant=False),
    "around a sub-module": lambda net, x: net.head(checkpoint(net.body, x, use_reentrant=False)),
    "around a part": lambda net, x: net.head(checkpoint(net.body[:1], x, use_reentrant=False)),
    "around a loop": lambda net, x: net.head(checkpoint(lambda x: net.body[0](x), x, use_reentrant=False)),
}


@pytest.mark.parametrize("call", REFUSED_CALLS.values(), ids=REFUSED_CALLS.keys())
def test_a_checkpoint_that_would_recompute_with_other_parameters_is_refused(call: Callable[..., Tensor]) -> None:
    module = Recomputing()
    inner = bda.BDAInnerOptimizer(module.parameters(), lr=0.1)
    x = numbers(4, 3)

    def lower(net: Any, hyper: Any, batch: Any) -> Tensor:
        return call(net, x).square().mean()

    message = r"torch.utils.checkpoint .*`adjoint=Checkpointed\(\)`"
    with untouched(module):
        with pytest.raises(RuntimeError, match=message):
            inner.unroll(module, lower, steps=2)
        with bda.innerloop_ctx(module, inner) as (fmodel, _), pytest.raises(RuntimeError, match=message):
            lower(fmodel, None, None)


def test_a_reentrant_checkpoint_inside_the_module_raises() -> None:
    """`torch.autograd.grad` would pass by the parameters inside it, without a word."""
    module, x = Recomputing(reentrant=True), numbers(4, 3).requires_grad_()
    inner = bda.BDAInnerOptimizer(module.parameters(), lr=0.1)

    def lower(net: Any, hyper: Any, batch: Any) -> Tensor:
        return net(x).square().mean()

    for adjoint in (bda.Unroll(), bda.Checkpointed(), bda.FirstOrder()):
        with pytest.raises(RuntimeError, match=r"the module uses torch\.utils\.checkpoint"):
            inner.unroll(module, lower, steps=2, adjoint=adjoint)
    with bda.innerloop_ctx(module, inner) as (fmodel, diffopt):
        with pytest.raises(RuntimeError, match=r"the module uses torch\.utils\.checkpoint"):
            diffopt.step(lower(fmodel, None, None))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_outside_the_inner_loop_is_fine(reentrant: bool) -> None:
    backbone, problem = Recomputing(reentrant), Problem(Case(lambda: nn.Linear(2, 2), lambda: (None,)))
    x = numbers(4, 3).requires_grad_()

    def run(features: Tensor) -> Tensor:
        problem.case = Case(problem.case.make, call=lambda net, _: net(features))
        with bda.innerloop_ctx(problem.module, problem.optimizer()) as (fmodel, diffopt):
            for _ in range(K):
                diffopt.step(problem.lower(fmodel, problem.hyper, None), problem.upper(fmodel, problem.hyper, None))
            value = problem.upper(fmodel, problem.hyper, None)
            value.backward()
        return value

    values, grads = [], []
    for features in (lambda: backbone(x), lambda: backbone.head(backbone.body(x))):
        problem.hyper.grad, _ = None, backbone.zero_grad()
        values.append(run(features()).item())
        grads.append([problem.hyper.grad, *(p.grad for p in backbone.parameters())])
    assert values[0] == values[1]
    torch.testing.assert_close(grads[0], grads[1], **TIGHT)


def test_a_checkpoint_around_the_whole_loop_is_right() -> None:
    problem = Problem(ZOO["mlp"])

    def whole(hyper: Tensor) -> Tensor:
        with bda.innerloop_ctx(problem.module, problem.optimizer()) as (fmodel, diffopt):
            for _ in range(K):
                diffopt.step(problem.lower(fmodel, hyper, None), problem.upper(fmodel, hyper, None))
        return problem.upper(fmodel, hyper, None)

    plain, around = (
        torch.autograd.grad(whole(problem.hyper), problem.hyper)[0],
        torch.autograd.grad(checkpoint(whole, problem.hyper, use_reentrant=False), problem.hyper)[0],
    )
    torch.testing.assert_close(around, plain, **TIGHT)


def test_saving_tensors_elsewhere_is_allowed() -> None:
    problem = Problem(ZOO["mlp"])
    expected = problem.gradient(problem.unroll())
    with torch.autograd.graph.save_on_cpu():
        found = problem.gradient(problem.unroll())
    torch.testing.assert_close(found, expected, **TIGHT)


@pytest.mark.filterwarnings("ignore:.torch.jit.:DeprecationWarning")
@pytest.mark.parametrize("form", ["unroll", "innerloop_ctx"])
def test_modules_that_cannot_be_given_other_parameters_are_refused(form: str) -> None:
    def run(module: nn.Module, inner: bda.BDAInnerOptimizer) -> None:
        if form == "unroll":
            inner.unroll(module, lambda net, hyper, batch: net(numbers(4, 3)).sum(), steps=1)
        else:
            with bda.innerloop_ctx(module, inner):
                raise AssertionError("the context must not open")

    scripted, some = torch.jit.script(nn.Linear(3, 2)), nn.Linear(3, 2)
    with pytest.raises(TypeError, match=r"scripted module .*Pass the Python module"):
        run(scripted, bda.BDAInnerOptimizer(scripted.parameters(), lr=0.1))
    lazy = nn.Sequential(nn.Linear(3, 3), nn.LazyLinear(2))
    with pytest.raises(ValueError, match=r"'1.weight' of a lazy module .*Run the module once"):
        run(lazy, bda.BDAInnerOptimizer(lazy[0].parameters(), lr=0.1))
    with pytest.raises(ValueError, match=r"not in the module; got one of shape \(2, 3\)"):
        run(nn.Linear(3, 2), bda.BDAInnerOptimizer(some.parameters(), lr=0.1))
    some.requires_grad_(False)
    with pytest.raises(ValueError, match="owns no parameter that requires grad"):
        run(some, bda.BDAInnerOptimizer(some.parameters(), lr=0.1))


def test_hooks_run_once_for_each_call() -> None:
    module, calls = mlp(), []
    module.register_forward_pre_hook(lambda *_: calls.append("pre"))
    module.register_forward_hook(lambda *_: calls.append("root"))
    module[0].register_forward_hook(lambda *_, **__: calls.append("first"), with_kwargs=True)
    module[2].register_full_backward_hook(lambda *_: calls.append("back"))
    inner, x = bda.BDAInnerOptimizer(module.parameters(), lr=0.1), numbers(4, 3)
    fmodel = inner.unroll(module, lambda net, hyper, batch: net(x).square().mean(), steps=2)
    assert calls == ["pre", "first", "root", "back"] * 2
    calls.clear()
    fmodel(x)
    assert calls == ["pre", "first", "root"]
    calls.clear()
    with bda.innerloop_ctx(module, inner) as (fmodel, diffopt):
        diffopt.step(fmodel(x).square().mean())
        own = []
        handle = fmodel.register_forward_hook(lambda *_: own.append(1))
        fmodel(x)
        handle.remove()
        fmodel(x)
    assert own == [1]
    assert [c for c in calls if c != "back"] == ["pre", "first", "root"] * 3


def test_four_threads_may_unroll_one_module_at_once() -> None:
    problem = Problem(Case(lambda: nn.Sequential(*(ZOO[n].make() for n in ("transformer", "attention"))), sequences))
    problem.module.append(nn.BatchNorm1d(5))
    hypers = [torch.tensor([1.0 + 0.1 * i, 0.3, 0.1], requires_grad=True) for i in range(4)]
    expected = [problem.gradient(problem.unroll(hyper), hyper) for hyper in hypers]
    backends = torch.nn.attention._cur_sdpa_kernel_backends()
    found: list[Any] = [None] * 4
    barrier = threading.Barrier(4)

    def work(i: int) -> None:
        barrier.wait()
        try:
            results = []
            for _ in range(5):
                fmodel = problem.optimizer().unroll(
                    problem.module, problem.lower, problem.upper, hyper=hypers[i], steps=K
                )
                results.append(torch.autograd.grad(problem.upper(fmodel, hypers[i], None), hypers[i])[0])
            found[i] = results
        except Exception as error:
            found[i] = error

    with untouched(problem.module):
        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for results, exact in zip(found, expected, strict=True):
        assert isinstance(results, list), results
        assert all(torch.equal(result, exact) for result in results)
    assert torch.nn.attention._cur_sdpa_kernel_backends() == backends


# Buffers, and writing back.


class Noted(nn.Module):
    """Batch normalisation on two kinds of data: the running mean tells which were seen."""

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


def running_mean(*batches: Tensor) -> Tensor:
    mean = torch.zeros(3)
    for batch in batches:
        mean = 0.9 * mean + 0.1 * batch.mean(0)
    return mean


@pytest.mark.parametrize(
    "adjoint",
    [bda.Unroll(), bda.Checkpointed(), bda.Checkpointed(slots=2), bda.ForwardMode(), bda.Truncated(last=2)],
    ids=lambda a: type(a).__name__,
)
def test_a_rollout_keeps_the_lower_losses_updates_of_buffers_only(adjoint: Any) -> None:
    module = Noted()
    inner = bda.BDAInnerOptimizer(module.parameters(), lr=0.1, alpha=0.3)
    x = torch.tensor(1.0, requires_grad=True)
    with untouched(module):
        fmodel = inner.unroll(
            module, lambda net, x, b: x * noted_lower(net, x, b), noted_upper, hyper=x, steps=5, adjoint=adjoint
        )
        assert fmodel.buffer_dict["norm.num_batches_tracked"].item() == 5
        torch.testing.assert_close(fmodel.buffer_dict["norm.running_mean"], running_mean(*[TRAIN] * 5), **TIGHT)
        noted_upper(fmodel, x, None).backward()  # a replay writes nowhere
        assert fmodel.buffer_dict["norm.num_batches_tracked"].item() == 6  # what the user ran on it
        assert x.grad.abs() > 0
        x.grad = None
    inner.commit(fmodel)
    assert module.norm.num_batches_tracked.item() == 5
    torch.testing.assert_close(module.norm.running_mean, running_mean(*[TRAIN] * 5), **TIGHT)


def test_in_the_users_own_loop_every_call_counts() -> None:
    module = Noted()
    inner = bda.BDAInnerOptimizer(module.parameters(), lr=0.1, alpha=0.3)
    with untouched(module):
        with bda.innerloop_ctx(module, inner) as (fmodel, diffopt):
            for _ in range(3):
                diffopt.step(noted_lower(fmodel, None, None), noted_upper(fmodel, None, None))
            noted_upper(fmodel, None, None)
        expected = running_mean(*[TRAIN, VALID] * 3, VALID)
        torch.testing.assert_close(fmodel.buffer_dict["norm.running_mean"], expected, **TIGHT)
        fmodel.lower_point(noted_lower)  # leaves them as they are
        torch.testing.assert_close(fmodel.buffer_dict["norm.running_mean"], expected, **TIGHT)
    inner.commit(fmodel)
    assert module.norm.num_batches_tracked.item() == 7
    torch.testing.assert_close(module.norm.running_mean, expected, **TIGHT)


def test_flags_are_those_at_entry() -> None:
    module = Noted().eval()
    inner = bda.BDAInnerOptimizer(module.parameters(), lr=0.1)

    def lower(net: Any, hyper: Any, batch: Any) -> Tensor:
        module.train()  # the rollout does not look at the user's module any more
        return noted_lower(net, hyper, batch)

    fmodel = inner.unroll(module, lower, steps=2)
    assert fmodel.buffer_dict["norm.num_batches_tracked"].item() == 0
    module.eval()
    with bda.innerloop_ctx(module, inner) as (fmodel, _):
        module.train()
        assert not fmodel.training
        assert not fmodel.norm.training
        fmodel.train()
        module.eval()
        assert fmodel.training
        assert fmodel.norm.training
        fmodel(TRAIN)
        assert fmodel.buffer_dict["norm.num_batches_tracked"].item() == 1
        assert fmodel.eval() is fmodel
        fmodel(TRAIN)
        assert fmodel.buffer_dict["norm.num_batches_tracked"].item() == 1
    assert not any(m.training for m in module.modules())


@pytest.mark.parametrize("form", ["unroll", "innerloop_ctx"])
def test_commit_writes_parameters_buffers_and_the_rules_state(form: str) -> None:
    """Two rounds of two steps with a commit between are four steps of torch.optim.Adam."""
    module, reference = Noted(), Noted()
    reference.load_state_dict(module.state_dict())
    inner = bda.BDAInnerOptimizer(module.parameters(), lr=0.05, rule=torch.optim.Adam)
    identities = [(id(t), t.data_ptr()) for t in (*module.parameters(), *module.buffers())]
    for _ in range(2):
        if form == "unroll":
            fmodel = inner.unroll(module, noted_lower, steps=2)
        else:
            with bda.innerloop_ctx(module, inner) as (fmodel, diffopt):
                for _ in range(2):
                    diffopt.step(noted_lower(fmodel, None, None))
        inner.commit(fmodel)
    assert [(id(t), t.data_ptr()) for t in (*module.parameters(), *module.buffers())] == identities
    optimizer = torch.optim.Adam(reference.parameters(), lr=0.05)
    for _ in range(4):
        optimizer.zero_grad()
        noted_lower(reference, None, None).backward()
        optimizer.step()
    torch.testing.assert_close(module.state_dict(), reference.state_dict(), rtol=1e-12, atol=1e-12)
    for mine, theirs in zip(module.parameters(), reference.parameters(), strict=True):
        assert mine.is_leaf
        assert mine.requires_grad
        assert mine.grad is None
        assert inner.state[mine]["step"] == 4
        assert not inner.state[mine]["exp_avg"].requires_grad
        torch.testing.assert_close(inner.state[mine]["exp_avg"], optimizer.state[theirs]["exp_avg"])


def test_commit_restarts_k_and_refuses_what_is_not_its_own() -> None:
    module = Noted()
    inner = bda.BDAInnerOptimizer(module.parameters(), lr=0.1, alpha=bda.harmonic(0.5))
    inner.step(lambda: (noted_lower(module, None, None), noted_upper(module, None, None)))
    assert inner.param_groups[0]["k"] == 1
    fmodel = inner.unroll(module, noted_lower, noted_upper, steps=3)
    assert inner.param_groups[0]["k"] == 1
    inner.commit(fmodel)
    assert inner.param_groups[0]["k"] == 0
    other = Noted()
    with untouched(module, other):
        strange = bda.BDAInnerOptimizer(other.parameters(), lr=0.1).unroll(other, noted_lower, steps=1)
        with pytest.raises(ValueError, match="got one with other parameters"):
            inner.commit(strange)
        part = bda.BDAInnerOptimizer(module.head.parameters(), lr=0.1).unroll(module, noted_lower, steps=1)
        with pytest.raises(ValueError, match="got one with other parameters"):
            inner.commit(part)
        with pytest.raises(TypeError, match="got Noted"):
            inner.commit(module)
        tasks = inner.unroll(
            module, lambda net, h, b: net(b).square().mean(), noted_upper, steps=1, batches=[TRAIN[None]], tasks=1
        )
        with pytest.raises(ValueError, match=r"parameters of 1 tasks .*as Reptile does"):
            inner.commit(tasks)


class Growing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)
        self.register_buffer("seen", torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = torch.cat([self.seen, x.detach().mean().reshape(1)])
        return self.linear(x)


def test_a_buffer_that_changes_its_shape_stays_out_of_the_module() -> None:
    module = Growing()
    inner = bda.BDAInnerOptimizer(module.parameters(), lr=0.1)
    with untouched(module):
        fmodel = inner.unroll(module, noted_lower, steps=3)
        assert fmodel.buffer_dict["seen"].shape == (3,)
        with pytest.raises(ValueError, match="a buffer changed its shape"):
            inner.commit(fmodel)


# Upper variables: a backbone, y_0, a module, the anchor.


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


@pytest.mark.parametrize("adjoint", [bda.Unroll(), bda.Checkpointed(), bda.ForwardMode()], ids=type)
def test_parameters_that_the_optimizer_does_not_own_are_upper_variables(adjoint: Any) -> None:
    module = Backboned()
    inner = bda.BDAInnerOptimizer(module.head.parameters(), lr=0.3, upper_lr=0.1, alpha=0.2)
    fmodel = inner.unroll(module, square, cubic, steps=K, adjoint=adjoint)
    assert list(fmodel.params) == ["head.weight", "head.bias"]
    cubic(fmodel, None, None).backward()
    assert all(p.grad is None for p in (*module.head.parameters(), *module.frozen.parameters()))
    weight = module.backbone.weight
    found, eps, numeric = weight.grad, 1e-6, torch.zeros(4, 3)
    for i in range(2):
        ends = []
        for sign in (1, -1):
            with torch.no_grad():
                weight[i, i] += sign * eps
                ends.append(cubic(inner.unroll(module, square, cubic, steps=K), None, None))
                weight[i, i] -= sign * eps
        numeric[i, i] = (ends[0] - ends[1]) / (2 * eps)
        torch.testing.assert_close(found[i, i], numeric[i, i], rtol=1e-6, atol=1e-10)
    assert module.backbone.bias.grad.abs().sum() > 0


def test_initial_weights_are_copied_or_reached() -> None:
    module = Backboned()
    inner = bda.BDAInnerOptimizer(module.head.parameters(), lr=0.3)
    y0 = {name: p for name, p in module.named_parameters() if name.startswith("head")}
    fixed = inner.unroll(module, square, steps=K)
    cubic(fixed, None, None).backward()
    assert all(p.grad is None for p in y0.values())
    module.zero_grad()
    live = inner.unroll(module, square, steps=K, copy_initial_weights=False)
    torch.testing.assert_close(live.params, fixed.params, rtol=0, atol=0)
    cubic(live, None, None).backward()
    found = {name: p.grad for name, p in y0.items()}

    def phi(weight: Tensor, bias: Tensor) -> Tensor:
        params = [weight, bias]
        features = module.frozen(torch.tanh(module.backbone(numbers(4, 3)))).detach()
        for _ in range(K):
            f = (F.linear(features, *params) - 0.5).square().mean()
            grads = torch.autograd.grad(f, params, create_graph=True)
            params = [p - 0.3 * g for p, g in zip(params, grads, strict=True)]
        features = module.frozen(torch.tanh(module.backbone(numbers(4, 3, seed=2)))).detach()
        return (F.linear(features, *params) - 1).abs().pow(3).mean()

    expected = torch.autograd.grad(phi(*y0.values()), list(y0.values()))
    torch.testing.assert_close(list(found.values()), list(expected), **TIGHT)


def test_an_owned_parameter_in_hyper_is_the_anchor() -> None:
    """The proximal term of iMAML: |y - y_0|^2 with y_0 an upper variable, while the start of the loop is a constant."""
    module, strength = nn.Linear(3, 2, bias=False), 0.7
    inner = bda.BDAInnerOptimizer(module.parameters(), lr=0.2)
    x = numbers(4, 3)

    def lower(net: Any, hyper: Any, batch: Any) -> Tensor:
        return net(x).square().mean() + strength * (net.weight - hyper["anchor"]).square().sum()

    def upper(net: Any, hyper: Any, batch: Any) -> Tensor:
        return (net(x) - 1).square().mean()

    for adjoint in (bda.Unroll(), bda.Checkpointed(), bda.ForwardMode()):
        module.zero_grad()
        fmodel = inner.unroll(module, lower, hyper={"anchor": module.weight}, steps=K, adjoint=adjoint)
        upper(fmodel, None, None).backward()
        anchor = module.weight.detach().clone().requires_grad_()
        y = module.weight.detach().clone().requires_grad_()
        for _ in range(K):
            f = (x @ y.T).square().mean() + strength * (y - anchor).square().sum()
            y = y - 0.2 * torch.autograd.grad(f, y, create_graph=True)[0]
        (expected,) = torch.autograd.grad((x @ y.T - 1).square().mean(), anchor)
        torch.testing.assert_close(fmodel.weight, y, **TIGHT)
        torch.testing.assert_close(module.weight.grad, expected, **TIGHT)


@pytest.mark.parametrize("adjoint", [bda.Unroll(), bda.Checkpointed()], ids=type)
def test_hyper_may_be_a_module(adjoint: Any) -> None:
    """A network that weights the examples, with batch normalisation in it."""
    module = nn.Linear(3, 1)
    weigh = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
    x, y = numbers(6, 3), numbers(6, 1, seed=4)
    inner = bda.BDAInnerOptimizer(module.parameters(), lr=0.2)
    shown: list[Any] = []

    def lower(net: Any, hyper: Any, batch: Any) -> Tensor:
        shown.append(hyper["net"])
        return (hyper["net"](x).sigmoid() * (net(x) - y).square()).mean() * hyper["scale"]

    def upper(net: Any, hyper: Any, batch: Any) -> Tensor:
        return (net(x) - 1).square().mean()

    scale = torch.tensor(1.5, requires_grad=True)
    with untouched(module, weigh):
        fmodel = inner.unroll(module, lower, upper, hyper={"net": weigh, "scale": scale}, steps=K, adjoint=adjoint)
        assert all(net is not weigh and type(net) is type(weigh) for net in shown)
        grads = torch.autograd.grad(upper(fmodel, None, None), [*weigh.parameters(), scale])
    params = [module.weight, module.bias]
    for _ in range(K):
        with _reparametrize_module(weigh, {name: b.clone() for name, b in weigh.named_buffers()}):
            weights = weigh(x).sigmoid()
        f = (weights * (F.linear(x, *params) - y).square()).mean() * scale
        steps = torch.autograd.grad(f, params, create_graph=True)
        params = [p - 0.2 * g for p, g in zip(params, steps, strict=True)]
    expected = torch.autograd.grad((F.linear(x, *params) - 1).square().mean(), [*weigh.parameters(), scale])
    torch.testing.assert_close(grads, expected, **TIGHT)


@pytest.mark.parametrize("adjoint", [bda.Unroll(), bda.Checkpointed()], ids=type)
def test_a_tensor_in_several_places_counts_once(adjoint: Any) -> None:
    """The module itself as hyper: its backbone acts inside the net and beside it, its head is the anchor."""
    module = Backboned()
    inner = bda.BDAInnerOptimizer(module.head.parameters(), lr=0.3)
    x = numbers(4, 3)

    def lower(net: Any, hyper: Any, batch: Any) -> Tensor:
        pull = sum((p - q).square().sum() for p, q in zip(net.head.parameters(), hyper.head.parameters(), strict=True))
        return (net(x) - hyper.backbone(x)[:, :2]).square().mean() + pull

    fmodel = inner.unroll(module, lower, hyper=module, steps=K, adjoint=adjoint)
    cubic(fmodel, None, None).backward()
    found = [p.grad for p in module.parameters() if p.requires_grad]
    anchor = [module.head.weight, module.head.bias]
    params = [p.detach().clone().requires_grad_() for p in anchor]

    def features(x: Tensor) -> Tensor:
        return module.frozen(torch.tanh(module.backbone(x)))

    for _ in range(K):
        pull = sum((p - q).square().sum() for p, q in zip(params, anchor, strict=True))
        f = (F.linear(features(x), *params) - module.backbone(x)[:, :2]).square().mean() + pull
        steps = torch.autograd.grad(f, params, create_graph=True)
        params = [p - 0.3 * g for p, g in zip(params, steps, strict=True)]
    value = (F.linear(features(numbers(4, 3, seed=2)), *params) - 1).abs().pow(3).mean()
    expected = torch.autograd.grad(value, [p for p in module.parameters() if p.requires_grad])
    torch.testing.assert_close(found, list(expected), **TIGHT)


def test_a_distributed_module_is_unwrapped() -> None:
    plain = mlp()
    wrapped = object.__new__(nn.parallel.DistributedDataParallel)  # its __init__ wants a process group
    nn.Module.__init__(wrapped)
    wrapped.module = plain
    inner = bda.BDAInnerOptimizer(wrapped.parameters(), lr=0.3)
    expected = bda.BDAInnerOptimizer(plain.parameters(), lr=0.3).unroll(plain, square, steps=K).params
    with untouched(plain):
        fmodel = inner.unroll(wrapped, square, steps=K)
        with bda.innerloop_ctx(wrapped, inner) as (other, diffopt):
            for _ in range(K):
                diffopt.step(square(other, None, None))
    for net in (fmodel, other):
        torch.testing.assert_close(list(net.params.values()), list(expected.values()), **TIGHT)
    inner.commit(fmodel)
    assert torch.equal(plain[0].weight, expected["0.weight"])


# fmodel: the module with y_K inside.


def test_fmodel_shows_the_iterate_under_the_modules_own_names() -> None:
    module = Backboned()
    module.note = "text"
    inner = bda.BDAInnerOptimizer(module.head.parameters(), lr=0.3, alpha=bda.harmonic(0.5))
    fmodel = inner.unroll(module, square, cubic, steps=K)
    assert isinstance(fmodel, nn.Module)
    assert isinstance(fmodel, bda.FunctionalModule)
    assert fmodel.head.weight is fmodel.params["head.weight"]
    assert fmodel.params["head.weight"].grad_fn is not None
    assert not torch.equal(fmodel.head.weight, module.head.weight)
    assert fmodel.backbone.weight is module.backbone.weight
    assert fmodel.note == "text"
    assert type(fmodel.head) is nn.Linear
    names = [name for name, _ in module.named_parameters()]
    assert [name for name, _ in fmodel.named_parameters()] == names
    assert list(fmodel.parameters())[-1] is fmodel.params["head.bias"]
    assert list(fmodel.buffers()) == []
    assert fmodel.buffer_dict == {}
    state = fmodel.state_dict()
    assert list(state) == list(module.state_dict())
    other = Backboned()
    other.load_state_dict(state)
    torch.testing.assert_close(other(numbers(4, 3)), fmodel(numbers(4, 3)).detach(), rtol=0, atol=0)
    assert repr(fmodel).startswith("FunctionalModule(Backboned(")
    with pytest.raises(AttributeError, match="nothing"):
        _ = fmodel.nothing
    assert bool(fmodel)


def test_fmodel_of_a_sequential_is_indexed_and_iterated() -> None:
    module, x = mlp(), numbers(4, 3)
    fmodel = bda.BDAInnerOptimizer(module.parameters(), lr=0.3).unroll(module, square, steps=K)
    assert len(fmodel) == 3
    assert bool(fmodel)
    assert [type(layer) for layer in fmodel] == [nn.Linear, nn.Tanh, nn.Linear]
    assert fmodel[0].weight is fmodel.params["0.weight"]
    torch.testing.assert_close(fmodel[2](fmodel[1](fmodel[0](x))), fmodel(x), rtol=0, atol=0)
    torch.testing.assert_close(fmodel[1:](fmodel[0](x)), fmodel(x), rtol=0, atol=0)


@pytest.mark.parametrize("move", ["cpu", "float", "double", "half", "cuda"])
def test_fmodel_is_not_moved_or_cast(move: str) -> None:
    module = mlp()
    fmodel = bda.BDAInnerOptimizer(module.parameters(), lr=0.3).unroll(module, square, steps=1)
    with pytest.raises(NotImplementedError, match="Move the module before the loop"):
        getattr(fmodel, move)()
    with pytest.raises(NotImplementedError, match="Move the module before the loop"):
        fmodel.to(torch.float32)


def test_trace_has_the_losses_of_every_step() -> None:
    module = mlp()
    settings = dict(lr=0.3, upper_lr=0.1)
    fmodel = bda.BDAInnerOptimizer(module.parameters(), **settings).unroll(module, square, cubic, steps=K)
    assert fmodel.trace.upper is None
    assert fmodel.trace.lower.shape == (K,)
    assert not fmodel.trace.lower.requires_grad
    reference = copy.deepcopy(module)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.3)
    for value in fmodel.trace.lower:
        optimizer.zero_grad()
        loss = square(reference, None, None)
        torch.testing.assert_close(loss.detach(), value, **TIGHT)
        loss.backward()
        optimizer.step()

    def alpha(k: int) -> float:
        return 0.5 if k == 2 else 0.0

    fmodel = bda.BDAInnerOptimizer(module.parameters(), alpha=alpha, **settings).unroll(module, square, cubic, steps=K)
    assert torch.isnan(fmodel.trace.upper).tolist() == [True, False, True]
    full = bda.BDAInnerOptimizer(module.parameters(), alpha=0.5, **settings).unroll(module, square, cubic, steps=K)
    assert torch.isfinite(full.trace.upper).all()
    torch.testing.assert_close(full.trace.upper[0], cubic(module, None, None).detach(), **TIGHT)
    with bda.innerloop_ctx(module, torch.optim.SGD(module.parameters(), lr=0.1)) as (fmodel, _):
        assert fmodel.trace is None


def test_losses_of_a_single_task() -> None:
    module = mlp()
    fmodel = bda.BDAInnerOptimizer(module.parameters(), lr=0.3).unroll(module, square, steps=K)
    losses = fmodel.losses(lambda net, h, b: h * net(b).sum(), 2.0, numbers(4, 3))
    torch.testing.assert_close(losses, 2 * fmodel(numbers(4, 3)).sum().reshape(1))


def test_lower_point_is_sparse_where_the_iterate_is_not() -> None:
    module, target = nn.Linear(6, 1, bias=False), torch.tensor([[1.0, 0, 0, 0, 0, -1.0]])
    strength = torch.tensor(0.3, requires_grad=True)
    inner = bda.BDAInnerOptimizer(
        module.parameters(), lr=0.5, upper_lr=0.1, alpha=bda.harmonic(0.5), prox=bda.prox.l1(lambda x: x)
    )

    def lower(net: Any, x: Any, batch: Any) -> Tensor:
        return 0.5 * (net.weight - target).square().sum()

    def upper(net: Any, x: Any, batch: Any) -> Tensor:
        return 0.5 * (net.weight - 1).square().sum()

    fmodel = inner.unroll(module, lower, upper, hyper=strength, steps=40)
    assert (fmodel.params["weight"] == 0).sum() == 0
    point = fmodel.lower_point(lower, strength)
    assert list(point) == ["weight"]
    assert (point["weight"] == 0).sum() == 4
    assert not point["weight"].requires_grad
    assert fmodel.weight is fmodel.params["weight"]

    def tree(loss: Any) -> Any:
        class Net:
            def __init__(self, weight: Tensor) -> None:
                self.weight = weight

        return lambda y, x, b: loss(Net(y), x, b)

    settings = dict(lr=0.5, prox=bda.prox.l1(lambda x: x))
    y = bda.rollout(
        tree(lower), tree(upper), module.weight.detach(), strength, steps=40, upper_lr=0.1, alpha=bda.harmonic(0.5),
        **settings,
    )  # fmt: skip
    torch.testing.assert_close(y, fmodel.params["weight"], **TIGHT)
    torch.testing.assert_close(bda.lower_point(tree(lower), y, strength, **settings), point["weight"], **TIGHT)


def test_a_loss_that_fails_leaves_fmodel_as_it_was() -> None:
    module = Noted()
    fmodel = bda.BDAInnerOptimizer(module.parameters(), lr=0.1).unroll(module, noted_lower, steps=2)
    before = {name: t.clone() for name, t in (fmodel.params | fmodel.buffer_dict).items()}

    def broken(net: Any, hyper: Any, batch: Any) -> Tensor:
        net(TRAIN)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fmodel.lower_point(broken)
    assert fmodel.norm.weight is fmodel.params["norm.weight"]
    for name, t in (fmodel.params | fmodel.buffer_dict).items():
        assert torch.equal(t, before[name])


# Many tasks at once.

B = 3


class TaskCase(NamedTuple):
    make: Callable[[], nn.Module]
    shape: tuple[int, ...] = (4, 3)  # of one task's inputs
    owned: Callable[[nn.Module], Any] = lambda module: module.parameters()
    settings: dict[str, Any] = {}  # noqa: RUF012
    call: Callable[..., Tensor] = lambda net, x: net(x)
    loops: bool = False  # vmap cannot batch it


def rates(module: nn.Module) -> list[Tensor]:
    return [torch.full_like(p, 0.1).requires_grad_() for p in module.parameters()]


class Peeking(nn.Module):
    """Looks at a number, which vmap cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        out = self.linear(x)
        return out if out.sum().item() > 0 else 2 * out


def transformer() -> nn.Module:
    return nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)


TASKS: dict[str, TaskCase] = {
    "head": TaskCase(Backboned, owned=lambda module: module.head.parameters()),
    "mlp": TaskCase(mlp),
    "mlp with momentum": TaskCase(mlp, settings={"momentum": 0.9, "weight_decay": 0.1, "nesterov": True}),
    "mlp with Adam": TaskCase(mlp, settings={"rule": torch.optim.Adam}),
    "mlp with Adafactor": TaskCase(mlp, settings={"rule": torch.optim.Adafactor}),
    "mlp with FISTA": TaskCase(mlp, settings={"rule": bda.FISTA}),
    "mlp with l1": TaskCase(mlp, settings={"prox": bda.prox.l1(0.05)}),
    "mlp with group lasso": TaskCase(mlp, settings={"prox": bda.prox.group_lasso(0.05)}),
    "conv and batch norm": TaskCase(conv, shape=(5, 1, 3, 3)),
    "conv and batch norm in eval": TaskCase(lambda: conv().eval(), shape=(5, 1, 3, 3)),
    "tied": TaskCase(Tied),
    "transformer": TaskCase(transformer, shape=(2, 5, 4)),
    "weight norm": TaskCase(linear_with(parametrizations.weight_norm)),
    "lstm": TaskCase(lambda: nn.LSTM(4, 3), shape=(3, 5, 4), call=last_state, loops=True),
    "old autograd function": TaskCase(WithFunction, loops=True),
    "a number read": TaskCase(Peeking, loops=True),
}


@pytest.mark.parametrize("adjoint", [bda.Unroll(), bda.Checkpointed()], ids=lambda a: type(a).__name__)
@pytest.mark.parametrize("case", TASKS.values(), ids=TASKS.keys())
def test_many_tasks_equal_a_loop_over_them(case: TaskCase, adjoint: Any) -> None:
    torch.manual_seed(3)
    module = case.make()
    settings = dict(lr=0.1, upper_lr=0.05, alpha=bda.harmonic(0.3)) | case.settings
    inner = bda.BDAInnerOptimizer(case.owned(module), **settings)
    inputs = [numbers(B, *case.shape, seed=k).requires_grad_() for k in range(K)]
    batches = [(x, 0.5, {"target": numbers(B, seed=9)}) for x in inputs]
    hyper = torch.tensor([1.0, 0.1], requires_grad=True)

    def lower(net: Any, hyper: Tensor, batch: Any) -> Tensor:
        x, shift, more = batch
        assert x.dim() == len(case.shape)  # no task dimension is seen
        residual = case.call(net, x) - shift - more["target"]
        return hyper[0] * residual.square().mean() + hyper[1] * sum(p.square().sum() for p in net.parameters())

    def upper(net: Any, hyper: Tensor, batch: Any) -> Tensor:
        return case.call(net, batch[0]).sin().mean()

    names = [name for name, p in module.named_parameters() if p.requires_grad]
    wanted = [hyper, *inputs, *(module.get_parameter(name) for name in names)]

    def gradients(value: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(value, wanted, allow_unused=True, materialize_grads=True)

    options = dict(hyper=hyper, steps=K, adjoint=adjoint, copy_initial_weights=False)
    expect = (
        pytest.warns(UserWarning, match="3 tasks run one after another") if case.loops else contextlib.nullcontext()
    )
    with untouched(module):
        with expect as warned:
            fmodel = inner.unroll(module, lower, upper, batches=batches, tasks=B, **options)
            values = fmodel.losses(upper, hyper, batches[0])
        assert warned is None or len(warned) == 1
        params = {name: p.detach() for name, p in fmodel.params.items()}
        buffers = {name: b.detach() for name, b in fmodel.buffer_dict.items()}
        found = gradients(values.sum())
        total = [torch.zeros_like(t) for t in wanted]
        for task in range(B):
            own = [(x[task], shift, {"target": more["target"][task]}) for x, shift, more in batches]
            alone = inner.unroll(module, lower, upper, batches=own, **options)
            torch.testing.assert_close(fmodel.trace.lower[:, task], alone.trace.lower, **TIGHT)
            torch.testing.assert_close({n: p[task] for n, p in params.items()}, dict(alone.params), **TIGHT)
            value = upper(alone, hyper, own[0])
            torch.testing.assert_close({n: b[task] for n, b in buffers.items()}, alone.buffer_dict, **TIGHT)
            torch.testing.assert_close(values[task], value, **TIGHT)
            total = [t + g for t, g in zip(total, gradients(value), strict=True)]
    torch.testing.assert_close(list(found), total, **TIGHT)
    assert all(t.abs().sum() > 0 for t in (total[0], total[1]))


def test_rates_of_every_element_are_learned_from_many_tasks() -> None:
    module = mlp()
    lr = rates(module)
    inner = bda.BDAInnerOptimizer(module.parameters(), lr=lr)
    x = numbers(B, 4, 3)

    def loss(net: Any, hyper: Any, batch: Tensor) -> Tensor:
        return (net(batch) - 1).square().mean()

    fmodel = inner.unroll(module, loss, steps=K, batches=[x] * K, tasks=B)
    found = torch.autograd.grad(fmodel.losses(loss, None, x).sum(), lr)
    alone = [inner.unroll(module, loss, steps=K, batches=[x[i]] * K) for i in range(B)]
    expected = torch.autograd.grad(sum(loss(net, None, x[i]) for i, net in enumerate(alone)), lr)
    torch.testing.assert_close(found, expected, **TIGHT)


def task_loss(net: Any, hyper: Any, batch: Tensor) -> Tensor:
    return (net(batch) - 1).square().mean()


def test_dropout_draws_a_mask_for_each_task() -> None:
    module = nn.Sequential(nn.Linear(3, 16), nn.Dropout(0.5), nn.Linear(16, 1))
    inner = bda.BDAInnerOptimizer(module.parameters(), lr=0.1)
    same = numbers(4, 3).expand(B, 4, 3)
    hyper = torch.tensor(1.0, requires_grad=True)

    def lower(net: Any, hyper: Tensor, batch: Tensor) -> Tensor:
        return hyper * task_loss(net, None, batch)

    results = []
    for adjoint in (bda.Unroll(), bda.Checkpointed(every=2)):
        torch.manual_seed(1)
        fmodel = inner.unroll(module, lower, hyper=hyper, steps=K, batches=[same] * K, tasks=B, adjoint=adjoint)
        weights = fmodel.params["2.weight"]
        assert not torch.equal(weights[0], weights[1])
        fmodel.eval()
        results.append(torch.autograd.grad(fmodel.losses(task_loss, None, same).sum(), hyper)[0])
    torch.testing.assert_close(results[0], results[1], **TIGHT)  # the replay draws the same masks
    module.eval()
    weights = inner.unroll(module, task_loss, steps=K, batches=[same] * K, tasks=B).params["2.weight"]
    torch.testing.assert_close(weights[0], weights[1], **TIGHT)


def test_dropout_before_what_vmap_cannot_batch_is_replayed_with_the_same_masks() -> None:
    module = nn.Sequential(nn.Dropout(0.5), WithFunction())
    inner = bda.BDAInnerOptimizer(module.parameters(), lr=0.1)
    x, hyper = numbers(B, 4, 3), torch.tensor(1.0, requires_grad=True)

    def lower(net: Any, hyper: Tensor, batch: Tensor) -> Tensor:
        return hyper * task_loss(net, None, batch)

    results = []
    for adjoint in (bda.Unroll(), bda.Checkpointed(every=2)):
        torch.manual_seed(1)
        with pytest.warns(UserWarning, match="one after another"):
            fmodel = inner.unroll(module, lower, hyper=hyper, steps=K, batches=[x] * K, tasks=B, adjoint=adjoint)
        fmodel.eval()
        results.append(torch.autograd.grad(fmodel.losses(task_loss, None, x).sum(), hyper)[0])
    torch.testing.assert_close(results[0], results[1], **TIGHT)


def test_fmodel_of_many_tasks_maps_calls_and_methods() -> None:
    module = Methods()
    inner = bda.BDAInnerOptimizer(module.parameters(), lr=0.1)
    x = numbers(B, 4, 3)

    def loss(net: Any, hyper: Any, batch: Tensor) -> Tensor:
        return net.head(net.encode(batch, scale=0.5)).square().mean()

    fmodel = inner.unroll(module, loss, steps=K, batches=[x] * K, tasks=B)
    assert {name: tuple(p.shape) for name, p in fmodel.params.items()} == {
        "body.weight": (B, 3, 3),
        "body.bias": (B, 3),
        "head.weight": (B, 2, 3),
        "head.bias": (B, 2),
    }
    assert fmodel.body.weight is fmodel.params["body.weight"]
    encoded = fmodel.encode(x, scale=0.5)
    assert fmodel.body.weight is fmodel.params["body.weight"]  # nothing of the mapping is left behind
    assert dict(fmodel.named_parameters()).keys() == fmodel.params.keys()
    for i in range(B):
        weight, bias = fmodel.body.weight[i], fmodel.body.bias[i]
        torch.testing.assert_close(encoded[i], torch.tanh(0.5 * F.linear(x[i], weight, bias)), **TIGHT)
    with pytest.raises(ValueError, match=r"tasks=3 has a leading dimension .*got shape \(4, 3\)"):
        fmodel.encode(x[0], scale=0.5)
    assert fmodel.losses(loss, None, x).shape == (B,)
    assert fmodel.trace.lower.shape == (K, B)


def test_fmodel_of_many_tasks_is_called_with_stacked_inputs_and_keeps_their_buffers() -> None:
    module = Noted()
    inner = bda.BDAInnerOptimizer(module.parameters(), lr=0.1)
    x = numbers(B, 8, 3)
    fmodel = inner.unroll(module, task_loss, steps=K, batches=[x] * K, tasks=B)
    assert fmodel.buffer_dict["norm.num_batches_tracked"].tolist() == [K] * B
    out = fmodel(x)
    assert out.shape == (B, 8, 1)
    assert fmodel.buffer_dict["norm.num_batches_tracked"].tolist() == [K + 1] * B
    assert fmodel.norm.running_mean.shape == (B, 3)
    with pytest.raises(ValueError, match=r"Stack the tasks' inputs"):
        fmodel(x[:2])
    with pytest.raises(ValueError, match=r"got shape \(\)"):
        fmodel(torch.tensor(1.0))
    point = fmodel.lower_point(task_loss, None, x)
    assert point["head.weight"].shape == (B, 1, 3)
    torch.testing.assert_close(
        point["head.bias"][1] - fmodel.params["head.bias"][1],
        -0.2 * (fmodel(x)[1] - 1).mean().reshape(1),
        **TIGHT,
    )
    assert module.norm.num_batches_tracked.item() == 0


def test_a_call_that_vmap_cannot_batch_runs_task_by_task() -> None:
    module = nn.LSTM(4, 3)
    inner = bda.BDAInnerOptimizer(module.parameters(), lr=0.1)
    x = numbers(B, 3, 5, 4)

    def loss(net: Any, hyper: Any, batch: Tensor) -> Tensor:
        return net(batch)[0].square().mean()

    with pytest.warns(UserWarning, match="one after another") as warned:
        fmodel = inner.unroll(module, loss, steps=K, batches=[x] * K, tasks=B)
        out, (hidden, _) = fmodel(x)
        fmodel.losses(loss, None, x)
    assert len(warned) == 1
    assert out.shape == (B, 3, 5, 3)
    assert hidden.shape == (B, 1, 5, 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tasks": 0, "batches": [TRAIN]}, r"`tasks` must be a whole number of at least 1; got 0"),
        ({"tasks": 2.0, "batches": [TRAIN]}, r"`tasks` must be a whole number of at least 1; got 2.0"),
        ({"tasks": 5, "batches": [TRAIN]}, r"tasks=5 every tensor of a batch .*batches\[0\] .*\(8, 3\)"),
    ],
)
def test_wrong_tasks_are_refused(options: dict[str, Any], message: str) -> None:
    module = mlp()
    with pytest.raises(ValueError, match=message):
        bda.BDAInnerOptimizer(module.parameters(), lr=0.1).unroll(module, task_loss, steps=1, **options)
