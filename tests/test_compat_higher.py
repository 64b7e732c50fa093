"""`bda_optim.compat.higher` beside the installed `higher`: one script, two imports, the same numbers."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import io
import pickle
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import problems
import pytest
import torch
from installed import lacking, older_than
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import bda_optim as bda
import bda_optim.compat.higher as ours

higher = pytest.importorskip("higher")

O = torch.optim  # noqa: E741
STEPS = 5


@pytest.fixture(autouse=True)
def _attention_with_a_second_derivative(doubles: None) -> Iterator[None]:
    with sdpa_kernel(SDPBackend.MATH):  # without which higher has no second derivative of attention
        yield


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(3, 5, batch_first=True), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0][:, -1])


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # Without biases: that of the keys, like one before BatchNorm, has a gradient of mere rounding errors.
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True, activation="gelu", bias=False)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x).mean(1))


def conv() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, bias=False), nn.BatchNorm2d(3), nn.Tanh(), nn.Flatten(), nn.Linear(3 * 16, 2)
    )


mlp = functools.partial(problems.mlp, 4, 6, 2)
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (mlp, (7, 4)),
    "conv": (conv, (7, 1, 6, 6)),
    "lstm": (Recurrent, (7, 4, 3)),
    "transformer": (Attention, (7, 3, 4)),
}
# Adam's eps is tiny, since higher puts it elsewhere than torch.optim. Then: settings whose gradient higher gets right.
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "sgd": (O.SGD, {"lr": 0.1}, {"lr": 0.07}),
    "momentum": (
        O.SGD,
        {"lr": 0.1, "momentum": 0.9, "dampening": 0.2, "weight_decay": 0.01},
        {"lr": 0.07, "momentum": 0.8, "dampening": 0.1, "weight_decay": 0.02},
    ),
    "nesterov": (O.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}, {"lr": 0.05, "momentum": 0.7}),
    "adam": (O.Adam, {"lr": 0.05, "eps": 1e-18}, {"lr": 0.03}),
    "amsgrad": (O.Adam, {"lr": 0.05, "eps": 1e-18, "amsgrad": True, "weight_decay": 0.1}, {"weight_decay": 0.05}),
    "adagrad": (O.Adagrad, {"lr": 0.1, "lr_decay": 0.1, "weight_decay": 0.1}, {"lr": 0.05, "lr_decay": 0.2}),
    "adadelta": (O.Adadelta, {"lr": 0.5}, {"lr": 0.3, "rho": 0.8, "eps": 1e-5}),
    "adamax": (O.Adamax, {"lr": 0.05, "weight_decay": 0.1}, {"lr": 0.03, "weight_decay": 0.05}),
    "asgd": (O.ASGD, {"lr": 0.1, "lambd": 1e-2, "weight_decay": 0.1}, {"weight_decay": 0.05}),
    "rmsprop": (O.RMSprop, {"lr": 0.01, "weight_decay": 0.1}, {"lr": 0.02, "alpha": 0.9, "eps": 1e-7}),
    "centered": (O.RMSprop, {"lr": 0.01, "centered": True, "momentum": 0.5}, {"lr": 0.02, "momentum": 0.3}),
    "rprop": (O.Rprop, {"lr": 0.01}, {}),
}


def quiet(function: Callable[..., Any], *args: Any) -> Any:
    """Without higher's warnings about RMSprop and Rprop, and torch's about what higher does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(*args)


def close(one: Any, other: Any, tolerance: float = 1e-12) -> None:
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def loop(hi: Any, model: str, optimizer: str, learned: bool) -> list[Any]:
    """Two ordinary steps, so that there is a live state; then an inner loop and its hypergradient."""
    torch.manual_seed(3)
    make, shape = MODELS[model]
    cls, settings, learnable = OPTIMIZERS[optimizer]
    net, x, y, target = make(), torch.randn(shape), torch.randn(shape[0], 2), torch.randn(shape[0], 2)
    opt = cls(net.parameters(), **settings)
    for _ in range(2):
        opt.zero_grad()
        F.mse_loss(net(x), y).backward()
        opt.step()
    opt.zero_grad()
    weight = torch.zeros(7, requires_grad=True)
    override = {name: [torch.tensor(value, requires_grad=True)] for name, value in learnable.items()} if learned else {}
    with hi.innerloop_ctx(net, opt, copy_initial_weights=False, override=override or None) as (fnet, diffopt):
        for _ in range(STEPS):
            diffopt.step((weight.exp() * F.mse_loss(fnet(x), y, reduction="none").mean(1)).mean())
        F.mse_loss(fnet(x), target).backward()
    iterates = [p.detach() for p in fnet.parameters()]
    buffers = [b for module in fnet.modules() for b in module._buffers.values() if b is not None]
    return [
        *iterates,
        *buffers,
        *(p.grad for p in net.parameters()),
        weight.grad,
        *(v[0].grad for v in override.values()),
    ]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("model", MODELS)
def test_iterates_and_hypergradients_are_those_of_higher(model: str, optimizer: str) -> None:
    close(loop(ours, model, optimizer, False), quiet(loop, higher, model, optimizer, False))


@pytest.mark.parametrize("optimizer", [name for name, (_, _, learnable) in OPTIMIZERS.items() if learnable])
def test_learned_settings_get_the_gradients_of_higher(optimizer: str) -> None:
    expected = quiet(loop, higher, "mlp", optimizer, True)
    assert all(value is not None for value in expected)
    close(loop(ours, "mlp", optimizer, True), expected)


# Scripts, as people write them for higher. Each returns what is to be the same.


def data(seed: int = 0, n: int = 6) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    return torch.randn(n, 4), torch.randn(n, 2)


def maml(hi: Any) -> list[Any]:
    torch.manual_seed(0)
    net = mlp()
    outer, inner = O.Adam(net.parameters(), lr=0.01), O.SGD(net.parameters(), lr=0.1)
    history = []
    for iteration in range(3):
        outer.zero_grad()
        for task in range(2):
            (x, y), (qx, qy) = data(10 * iteration + task), data(100 + 10 * iteration + task)
            with hi.innerloop_ctx(net, inner, copy_initial_weights=False) as (fnet, diffopt):
                for _ in range(3):
                    diffopt.step(F.mse_loss(fnet(x), y))
                loss = F.mse_loss(fnet(qx), qy)
                history.append(loss.detach())
                loss.backward()
        outer.step()
    return history + [p.detach() for p in net.parameters()]


def bare(hi: Any) -> list[Any]:
    """`monkeypatch` and `get_diff_optim` by hand, with an override per step."""
    torch.manual_seed(0)
    net, (x, y) = mlp(), data()
    opt = O.SGD(
        [{"params": net[0].parameters(), "lr": 0.1}, {"params": net[2].parameters(), "lr": 0.2}], lr=1.0, momentum=0.5
    )
    fnet = hi.monkeypatch(net, copy_initial_weights=True)
    diffopt = hi.get_diff_optim(opt, net.parameters(), fmodel=fnet, track_higher_grads=True)
    rates = [torch.tensor(0.05, requires_grad=True), torch.tensor(0.3, requires_grad=True)]
    diffopt.step(F.mse_loss(fnet(x), y))
    diffopt.step(F.mse_loss(fnet(x), y), override={"lr": rates})
    diffopt.step(F.mse_loss(fnet(x), y))  # the override persists
    grads = torch.autograd.grad(F.mse_loss(fnet(x), -y), [*rates, *fnet.parameters(time=0)])
    return [*grads, *(p.detach() for p in fnet.parameters()), *(p.detach() for p in fnet.init_fast_params)]


def params_by_hand(hi: Any) -> list[Any]:
    """A patched module and an optimizer that do not know of each other."""
    torch.manual_seed(0)
    net, (x, y) = mlp(), data()
    fnet = hi.patch.make_functional(net)
    weights = hi.utils.get_func_params(net)
    diffopt = hi.create_diff_optim(O.Adam, {"lr": 0.1, "eps": 1e-18}, params=weights)
    first = weights
    for _ in range(3):
        weights = diffopt.step(F.mse_loss(fnet(x, params=weights), y), params=weights)
    loss = F.mse_loss(fnet(x, params=weights), y)
    return [loss.detach(), *torch.autograd.grad(loss, first), *(p.detach() for p in fnet.fast_params)]


def patch_alone(hi: Any) -> list[Any]:
    """A hand-written update, and the weights set in three ways."""
    torch.manual_seed(0)
    net, (x, y) = mlp(), data()
    fnet = hi.monkeypatch(net, copy_initial_weights=False)
    for how in range(3):
        grads = torch.autograd.grad(F.mse_loss(fnet(x), y), fnet.parameters(), create_graph=True)
        new = [p - 0.1 * g for p, g in zip(fnet.parameters(), grads, strict=True)]
        if how == 0:
            fnet.update_params(new)
        elif how == 1:
            fnet.fast_params = new
            assert all(a is b for a, b in zip(fnet.fast_params, new, strict=True))
        else:
            fnet(x, params=new)
    F.mse_loss(fnet(x), -y).backward()
    return [p.grad for p in net.parameters()]


def nested(hi: Any) -> list[Any]:
    """An inner loop in an inner loop: a learned initial rate, and weights of the examples learned in between."""
    torch.manual_seed(0)
    net, (x, y), (qx, qy) = mlp(), data(1), data(2)
    weigher = nn.Linear(2, 1)
    middle = O.SGD(weigher.parameters(), lr=0.5)
    inner = O.SGD(net.parameters(), lr=0.1, momentum=0.5)
    with hi.innerloop_ctx(weigher, middle, copy_initial_weights=False) as (fweigher, diffmiddle):
        for _ in range(2):
            with hi.innerloop_ctx(net, inner, copy_initial_weights=False) as (fnet, diffinner):
                for _ in range(2):
                    losses = F.mse_loss(fnet(x), y, reduction="none").mean(1, keepdim=True)
                    diffinner.step((torch.sigmoid(fweigher(y)) * losses).mean())
                diffmiddle.step(F.mse_loss(fnet(qx), qy))
        with hi.innerloop_ctx(net, inner, copy_initial_weights=False) as (fnet, diffinner):
            diffinner.step((torch.sigmoid(fweigher(y)) * F.mse_loss(fnet(x), y, reduction="none")).mean())
            F.mse_loss(fnet(qx), qy).backward()
    return [p.grad for p in [*weigher.parameters(), *net.parameters()]]


def third_order(hi: Any) -> list[Any]:
    torch.manual_seed(0)
    net, (x, y) = mlp(), data()
    with hi.innerloop_ctx(net, O.SGD(net.parameters(), lr=0.3), copy_initial_weights=False) as (fnet, diffopt):
        for _ in range(2):
            diffopt.step(F.mse_loss(fnet(x), y))
        loss = F.mse_loss(fnet(x), -y)
    params = list(net.parameters())
    first = torch.autograd.grad(loss, params, create_graph=True)
    second = torch.autograd.grad(sum((g**2).sum() for g in first), params, create_graph=True)
    third = torch.autograd.grad(sum(g.sum() for g in second), params)
    return [*(g.detach() for g in (*first, *second)), *third]


def adaptation(hi: Any) -> list[Any]:
    """Test time: no higher gradients, the weights are leaves, and `time=0` gives the present ones."""
    torch.manual_seed(0)
    net, (x, y) = conv(), (torch.randn(5, 1, 6, 6), torch.randn(5, 2))
    net.train()
    opt = O.Adam(net.parameters(), lr=0.01, eps=1e-18)
    with hi.innerloop_ctx(net, opt, track_higher_grads=False) as (fnet, diffopt):
        for _ in range(4):
            diffopt.step(F.mse_loss(fnet(x), y))
            assert all(p.is_leaf and p.requires_grad for p in fnet.parameters())
        fnet.eval()
        loss = F.mse_loss(fnet(x), y)
        grads = torch.autograd.grad(loss, list(fnet.parameters(time=0)))
    assert net.training
    return [loss.detach(), *grads, fnet[1].running_mean, *net.state_dict().values()]


def learned_optimizer(hi: Any) -> list[Any]:
    """Settings learned by an outer optimizer, and written back."""
    torch.manual_seed(0)
    net, (x, y) = mlp(), data()
    opt = O.SGD(net.parameters(), lr=0.1, momentum=0.5)
    override = hi.optim.get_trainable_opt_params(opt)
    outer = O.SGD(hi.utils.flatten([override[name] for name in ("lr", "momentum", "weight_decay")]), lr=0.01)
    for _ in range(3):
        outer.zero_grad()
        with hi.innerloop_ctx(
            net, opt, override={name: override[name] for name in ("lr", "momentum", "weight_decay")}
        ) as (
            fnet,
            diffopt,
        ):
            for _ in range(3):
                diffopt.step(F.mse_loss(fnet(x), y))
            F.mse_loss(fnet(x), -y).backward()
        outer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        hi.optim.apply_trainable_opt_params(opt, {"lr": override["lr"], "momentum": override["momentum"]})
    group = opt.param_groups[0]
    assert type(group["lr"]) is float and type(group["momentum"]) is float
    return [torch.tensor(group["lr"]), torch.tensor(group["momentum"]), override["weight_decay"][0].grad]


def clipped(hi: Any) -> list[Any]:
    """Gradients changed on the way, by default and for one step."""
    torch.manual_seed(0)
    net, (x, y) = mlp(), data()
    net[0].bias.requires_grad_(False)
    fnet = hi.monkeypatch(net)

    def clip(grads: Any) -> list[Any]:
        return [None if g is None else g.clamp(-0.05, 0.05) for g in grads]

    opt = O.SGD([p for p in net.parameters() if p.requires_grad], lr=0.5)
    diffopt = hi.get_diff_optim(opt, net.parameters(), fmodel=fnet, grad_callback=clip)
    diffopt.step(F.mse_loss(fnet(x), y))
    diffopt.step(F.mse_loss(fnet(x), y), grad_callback=lambda grads: [None if g is None else 2 * g for g in grads])
    diffopt.step(F.mse_loss(fnet(x), y))
    F.mse_loss(fnet(x), y).backward()
    grads = [p.grad for p in fnet.init_fast_params]
    assert grads[1] is None
    return [*(p.detach() for p in fnet.parameters()), *grads]


class Shared(nn.Module):
    """Tied weights, a parameter in two places, a method that is not forward."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(4, 3), nn.Linear(3, 4)
        self.decode.bias = self.encode_back = nn.Parameter(torch.zeros(4))
        self.again = self.encode

    def code(self, x: Tensor) -> Tensor:
        return self.again(x).tanh()

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.decode(self.code(x)) * scale + self.encode_back


def tied(hi: Any) -> list[Any]:
    torch.manual_seed(0)
    net, (x, _) = Shared(), data()
    fnet = hi.monkeypatch(net, copy_initial_weights=False)
    diffopt = hi.get_diff_optim(O.SGD(net.parameters(), lr=0.1), net.parameters(), fmodel=fnet)
    assert len(fnet.fast_params) == len(list(net.parameters())) == 4
    for _ in range(3):
        diffopt.step(F.mse_loss(fnet(x, scale=0.5), x))
    out = fnet.code(x) if hi is ours else fnet.again(x).tanh()  # higher's methods see the weights of the last call
    out.sum().backward()
    return [p.grad for p in net.encode.parameters()]


STYLES = [maml, bare, params_by_hand, patch_alone, nested, third_order, adaptation, learned_optimizer, clipped, tied]


@pytest.mark.parametrize("style", STYLES, ids=lambda style: style.__name__)
def test_a_script_runs_with_another_import(style: Callable[[Any], list[Any]]) -> None:
    close(style(ours), quiet(style, higher))


@pytest.mark.parametrize("style", [maml, bare, adaptation], ids=lambda style: style.__name__)
def test_a_script_in_single_precision(style: Callable[[Any], list[Any]]) -> None:
    torch.set_default_dtype(torch.float32)
    close(style(ours), quiet(style, higher), 1e-5 if style is adaptation else 1e-6)


def test_the_names_of_higher_are_all_there() -> None:
    for mine, theirs in (
        (ours, higher),
        (ours.optim, higher.optim),
        (ours.patch, higher.patch),
        (ours.utils, higher.utils),
    ):
        names = [name for name in vars(theirs) if not name.startswith("_")]
        assert [name for name in names if not hasattr(mine, name)] == []
    assert hasattr(ours.patch, "_MonkeyPatchBase") and hasattr(ours.optim, "_OverrideType")


def test_register_teaches_the_installed_higher() -> None:
    ours.register()
    ours.register()
    results = []
    for hi in (higher, ours):
        torch.manual_seed(0)
        net, (x, y) = mlp(), data()
        target = torch.zeros(6, 2, requires_grad=True)
        alpha = torch.tensor(0.3, requires_grad=True)
        inner = bda.BDAInnerOptimizer(net.parameters(), lr=0.2, upper_lr=0.5, alpha=bda.harmonic(0.5), momentum=0.5)
        with hi.innerloop_ctx(net, inner, copy_initial_weights=False) as (fnet, diffopt):
            for k in range(4):
                override = {"alpha": [alpha]} if k == 3 else None
                diffopt.step(F.mse_loss(fnet(x), y), upper_loss=F.mse_loss(fnet(x), target), override=override)
            F.mse_loss(fnet(x), target).backward()
        assert isinstance(diffopt, hi.optim.DifferentiableOptimizer)
        results.append([*(p.grad for p in net.parameters()), target.grad, alpha.grad])
        with pytest.raises(ValueError, match="upper_loss=upper"):
            diffopt.step(F.mse_loss(fnet(x), y))
    close(*results)


def test_register_without_higher_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "higher", None)
    with pytest.raises(ImportError, match=r"bda_optim\[higher\]"):
        ours.register()


# What higher cannot do here, and this can; each is tried with both.


def _steps(hi: Any, opt: Any, net: nn.Module, x: Tensor, y: Tensor, steps: int = 3) -> Any:
    with hi.innerloop_ctx(net, opt, copy_initial_weights=False) as (fnet, diffopt):
        for _ in range(steps):
            diffopt.step(F.mse_loss(fnet(x), y))
    return fnet, diffopt


def _as_torch(hi: Any, cls: Any, **settings: Any) -> None:
    """The iterates are those of torch.optim."""
    net, (x, y) = mlp(), data()
    fnet, _ = _steps(hi, cls(net.parameters(), **settings), net, x, y)
    opt = cls(net.parameters(), **settings)
    for _ in range(3):
        opt.zero_grad()
        F.mse_loss(net(x), y).backward()
        opt.step()
    for p, q in zip(fnet.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(p.detach(), q.detach(), rtol=1e-12, atol=1e-12)


def _hooks(hi: Any) -> None:
    calls: list[int] = []
    net, (x, _) = mlp(), data()
    net[0].register_forward_hook(lambda *_: calls.append(0))
    net.register_forward_hook(lambda *_: calls.append(1))
    hi.monkeypatch(net)(x)
    assert calls == [0, 1]


def _weight_norm(hi: Any) -> None:
    net = nn.utils.weight_norm(nn.Linear(4, 2))
    x, y = data()
    fnet, _ = _steps(hi, O.SGD(net.parameters(), lr=0.1), net, x, y)
    bias, g, v = fnet.parameters()
    assert not torch.equal(g, net.weight_g)
    torch.testing.assert_close(fnet(x), F.linear(x, g * v / v.norm(dim=1, keepdim=True), bias))


def _second_derivative_of_weight_norm(hi: Any) -> None:
    """The fused one of torch is wrong on the CPU; finite differences tell."""
    net, (x, y) = nn.utils.parametrizations.weight_norm(nn.Linear(4, 2)), data()
    shift = torch.zeros(2, requires_grad=True)

    def upper(shift: Tensor) -> Tensor:
        with hi.innerloop_ctx(net, O.SGD(net.parameters(), lr=0.5)) as (fnet, diffopt):
            for _ in range(3):
                diffopt.step(F.mse_loss(fnet(x), y + shift))
            return F.mse_loss(fnet(x), -y)

    assert torch.autograd.gradcheck(upper, shift)


def _compiled(hi: Any) -> None:
    net, (x, y) = mlp(), data()
    _steps(hi, O.SGD(net.parameters(), lr=0.1), torch.compile(net), x, y)


def _attention(hi: Any) -> None:
    net = Attention()
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
        fnet, _ = _steps(hi, O.SGD(net.parameters(), lr=0.1), net, torch.randn(2, 3, 4), torch.randn(2, 2))
        fnet(torch.randn(2, 3, 4)).sum().backward()


def _memory(hi: Any) -> None:
    """Weights of a step that a truncated loop has left behind are freed."""
    net, (x, y) = nn.Linear(4, 2), data()
    fnet = hi.monkeypatch(net)
    diffopt = hi.get_diff_optim(O.SGD(net.parameters(), lr=0.1), net.parameters(), fmodel=fnet)
    diffopt.step(F.mse_loss(fnet(x), y))
    old = weakref.ref(fnet.fast_params[0])
    fnet.update_params([p.detach().requires_grad_() for p in fnet.fast_params])
    diffopt.step(F.mse_loss(fnet(x), y))
    assert old() is None


def _freed(hi: Any) -> None:
    """A loop and its module are gone with their last reference."""
    net, (x, y) = mlp(), data()
    opt = O.Adam(net.parameters(), lr=0.1)
    _steps(hi, opt, net, x, y)  # what is made once (classes) stays
    gc.collect()
    gc.disable()
    try:
        fnet, _ = _steps(hi, opt, net, x, y)
        fnet(x).sum().backward()
        del fnet, _
        assert gc.collect() == 0
    finally:
        gc.enable()


def _scheduler(hi: Any) -> None:
    net = mlp()
    diffopt = hi.get_diff_optim(O.SGD(net.parameters(), lr=0.1), net.parameters())
    O.lr_scheduler.StepLR(diffopt, 1)


def _state(hi: Any) -> None:
    net, (x, y) = mlp(), data()
    opt = O.Adam(net.parameters(), lr=0.1)
    _, diffopt = _steps(hi, opt, net, x, y)
    opt.load_state_dict(diffopt.state_dict())
    assert float(opt.state[net[0].weight]["step"]) == 3


def _diverged(hi: Any) -> None:
    net, (x, y) = mlp(), data()
    with pytest.warns(RuntimeWarning, match="diverged"):
        _steps(hi, O.SGD(net.parameters(), lr=float("inf")), net, x, y)


def _upper(hi: Any) -> None:
    """Without `register`, of course."""
    net, (x, y) = mlp(), data()
    inner = type("Mine", (bda.BDAInnerOptimizer,), {})(net.parameters(), lr=0.1)
    if hi is ours:
        inner = bda.BDAInnerOptimizer(net.parameters(), lr=0.1, alpha=0.5)
    diffopt = hi.get_diff_optim(inner, net.parameters(), fmodel=hi.monkeypatch(net))
    diffopt.step(F.mse_loss(diffopt._fmodel(x), y), upper_loss=F.mse_loss(diffopt._fmodel(x), -y))


def _ignored(hi: Any) -> None:
    net = mlp()
    with pytest.raises((TypeError, ValueError)):
        hi.get_diff_optim(O.SGD(net.parameters(), lr=0.1), net.parameters(), override={"rl": [0.1]})


CANNOT: dict[str, Callable[[Any], None]] = {
    **{
        name: lambda hi, name=name: _as_torch(hi, getattr(O, name), lr=0.01)  # type: ignore[misc]
        for name in ("AdamW", "NAdam", "RAdam", "Adafactor")
    },
    "maximize": lambda hi: _as_torch(hi, O.SGD, lr=0.1, maximize=True),
    "Adam, decoupled weight decay": lambda hi: _as_torch(
        hi, O.Adam, lr=0.1, weight_decay=0.5, decoupled_weight_decay=True
    ),
    "Adam, eps as in torch": lambda hi: _as_torch(hi, O.Adam, lr=0.1, eps=1e-2),
    "forward hooks run": _hooks,
    "weight_norm, hook form": _weight_norm,
    "weight_norm, second derivative": _second_derivative_of_weight_norm,
    "torch.compile'd module": _compiled,
    "default attention, second derivative": _attention,
    "deepcopy of an fmodel": lambda hi: copy.deepcopy(hi.monkeypatch(mlp())),
    "pickle of an fmodel": lambda hi: pickle.loads(pickle.dumps(hi.monkeypatch(mlp()))),
    "left weights are freed": _memory,
    "no work for the garbage collector": _freed,
    "lr scheduler on a diffopt": _scheduler,
    "state_dict of a diffopt": _state,
    "a diverged loop is reported": _diverged,
    "upper_loss= (BDA)": _upper,
    "a misspelt override is refused": _ignored,
}


def test_what_higher_cannot_do_here(capsys: pytest.CaptureFixture[str]) -> None:
    rows, surprises = [], []
    for name, attempt in CANNOT.items():
        if name == "Adam, decoupled weight decay" and lacking(O.Adam, ["decoupled_weight_decay"]):
            continue
        can = name == "torch.compile'd module" and older_than("2.13")
        answers = []
        for hi in (higher, ours):
            torch.manual_seed(0)
            try:
                with contextlib.redirect_stderr(io.StringIO()):
                    quiet(attempt, hi)
                answers.append("yes")
            except (Exception, pytest.fail.Exception) as error:
                answers.append(f"no ({type(error).__name__})")
        rows.append(f"  {name:38} {answers[0]:28} {answers[1]}")
        if answers[1] != "yes" or (answers[0] == "yes" and not can):
            surprises.append(rows[-1])
    with capsys.disabled():
        print(f"\n  {'what':38} {'higher 0.2.1':28} bda_optim.compat.higher", *rows, sep="\n")
    assert not surprises, "\n".join(surprises)
