"""BDAInnerOptimizer as a torch.optim.Optimizer: the in-place step, schedulers, state_dict, copies, refusals."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from problems import mlp, numbers
from torch import Tensor, nn, optim
from torch.optim import lr_scheduler, swa_utils

import bda_optim as bda
from bda_optim._support.types import Move

EXACT = {"rtol": 1e-12, "atol": 1e-12}
pytestmark = pytest.mark.usefixtures("doubles")


def lower(net: Any, hyper: Any = None, batch: Any = None) -> Tensor:
    return (net(numbers(5, 3)) - 0.5).square().mean()


def upper(net: Any, hyper: Any = None, batch: Any = None) -> Tensor:
    return (net(numbers(5, 3, seed=2)) - 1).abs().pow(3).mean()


class Odd(nn.Module):
    """Parameters of every kind: frozen, an integer, a scalar, without a gradient at some steps or at all."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.x = numbers(4, 3).to(dtype)
        self.matrix, self.scalar = nn.Parameter(numbers(3, 2).to(dtype)), nn.Parameter(numbers().to(dtype))
        self.sometimes, self.never = nn.Parameter(numbers(2).to(dtype)), nn.Parameter(numbers(2).to(dtype))
        self.frozen = nn.Parameter(numbers(2).to(dtype), requires_grad=False)
        self.whole = nn.Parameter(torch.arange(2), requires_grad=False)
        self.complex = nn.Parameter(torch.complex(numbers(2), numbers(2, seed=2)).to(torch.complex64))

    def loss(self, k: int) -> Tensor:
        out = self.x @ self.matrix * self.scalar + self.frozen + self.whole
        if k % 3:
            out = out + self.sometimes
        return out.square().mean() + (self.complex.abs() - 1).square().sum()

    def groups(self, second: dict[str, Any]) -> list[dict[str, Any]]:
        first = [self.matrix, self.sometimes, self.frozen, self.whole]
        return [{"params": first}, {"params": [self.scalar, self.never, self.complex], **second}]


SGDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "weight decay": {"weight_decay": 0.1},
    "maximize": {"maximize": True},
    "momentum": {"momentum": 0.9},
    "dampening": {"momentum": 0.9, "dampening": 0.3},
    "nesterov": {"momentum": 0.9, "nesterov": True},
    "all": {"momentum": 0.9, "dampening": 0.2, "weight_decay": 0.1, "maximize": True},
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("settings", SGDS.values(), ids=SGDS.keys())
def test_with_the_defaults_it_is_sgd_to_the_bit(settings: dict[str, Any], dtype: torch.dtype) -> None:
    mine = Odd(dtype)
    theirs = copy.deepcopy(mine)
    ours = bda.BDAInnerOptimizer(mine.groups({"lr": 0.02}), lr=0.1, **settings)
    torchs = optim.SGD(theirs.groups({"lr": 0.02}), lr=0.1, **settings)
    for k in range(8):
        for model, optimizer in ((mine, ours), (theirs, torchs)):
            optimizer.zero_grad()
            model.loss(k).backward()
            assert optimizer.step() is None
        for (name, a), b in zip(mine.named_parameters(), theirs.parameters(), strict=True):
            if a.is_complex() and settings:  # torch multiplies complex numbers, we pairs of real ones
                torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
            else:
                assert torch.equal(a, b), (name, k)
        assert mine.never.grad is None


def test_the_default_rate_is_sgds() -> None:
    model, other = mlp(), mlp()
    other.load_state_dict(model.state_dict())
    for net, kind in ((model, bda.BDAInnerOptimizer), (other, optim.SGD)):
        optimizer = kind(net.parameters())
        lower(net).backward()
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_sparse_gradients_are_those_of_sgd() -> None:
    pair = [nn.Embedding(6, 2, sparse=True), nn.Embedding(6, 2, sparse=True)]
    pair[1].load_state_dict(pair[0].state_dict())
    for net, kind in zip(pair, (bda.BDAInnerOptimizer, optim.SGD), strict=True):
        optimizer = kind(net.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            net(torch.tensor([1, 1, 4])).square().sum().backward()
            optimizer.step()
    assert torch.equal(pair[0].weight, pair[1].weight)


RULES: dict[str, tuple[type[optim.Optimizer], dict[str, Any]]] = {
    "SGD": (optim.SGD, {"lr": 0.1, "momentum": 0.5}),
    "Adam": (optim.Adam, {"lr": 0.05, "amsgrad": True, "weight_decay": 0.1}),
    "AdamW": (optim.AdamW, {"lr": 0.05}),
    "Adamax": (optim.Adamax, {"lr": 0.05}),
    "NAdam": (optim.NAdam, {"lr": 0.05}),
    "RAdam": (optim.RAdam, {"lr": 0.05, "betas": (0.8, 0.9)}),
    "RMSprop": (optim.RMSprop, {"lr": 0.02, "alpha": 0.8, "centered": True, "momentum": 0.6}),
    "Rprop": (optim.Rprop, {"lr": 0.05}),
    "Adagrad": (optim.Adagrad, {"lr": 0.1, "lr_decay": 0.1}),
    "Adadelta": (optim.Adadelta, {}),
    "ASGD": (optim.ASGD, {"lr": 0.1, "lambd": 0.1, "t0": 3.0}),
    "Adafactor": (optim.Adafactor, {"lr": 0.05}),
}
every_rule = pytest.mark.parametrize(("kind", "settings"), RULES.values(), ids=RULES.keys())


def make(model: nn.Module, kind: Any, settings: dict[str, Any], **more: Any) -> bda.BDAInnerOptimizer:
    """A BDAInnerOptimizer with a rule of torch.optim, whose `alpha` is called `rule_alpha`."""
    own = {"rule_alpha" if name == "alpha" else name: value for name, value in settings.items()}
    return bda.BDAInnerOptimizer(model.parameters(), rule=kind, **own, **more)


def descend(model: nn.Module, optimizer: optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        lower(model).backward()
        optimizer.step()


@every_rule
def test_a_rule_in_place_is_torchs_optimizer(kind: type[optim.Optimizer], settings: dict[str, Any]) -> None:
    model = mlp()
    other = copy.deepcopy(model)
    optimizer = make(model, kind, settings)
    descend(model, optimizer, 12)
    descend(other, kind(other.parameters(), **settings), 12)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a.detach(), b.detach(), **EXACT)
    assert optimizer.param_groups[0]["k"] == 12
    assert all(not p.grad_fn and p.is_leaf for p in model.parameters())


# Schedulers of torch.

LR = 0.2
Make = Callable[[optim.Optimizer], Any]
SCHEDULERS: dict[str, Make] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda epoch: 0.8 + 0.01 * epoch),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 3, 0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 5], 0.5),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, 4),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.3, 1.0, 5),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.9)], milestones=[3]
    ),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 6),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.3, step_size_up=3, mode="triangular2"),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3, 2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=[0.3, 0.1], total_steps=12),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 8, 2.0),
    "SWALR": lambda o: swa_utils.SWALR(o, swa_lr=0.05, anneal_epochs=4),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=1),
}


def test_the_table_has_every_scheduler_of_torch() -> None:
    assert set(lr_scheduler.__all__) - {"LRScheduler"} <= SCHEDULERS.keys()


@pytest.mark.parametrize("tensor_lr", [False, True], ids=["number", "tensor"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_act_as_on_sgd(name: str, tensor_lr: bool) -> None:
    model = mlp()
    other = copy.deepcopy(model)
    runs = []
    for net, kind in ((model, bda.BDAInnerOptimizer), (other, optim.SGD)):
        rates = [torch.tensor(rate) if tensor_lr else rate for rate in (LR, LR / 2)]
        groups = [{"params": net[0].parameters()}, {"params": net[2].parameters(), "lr": rates[1]}]
        optimizer = kind(groups, lr=rates[0], momentum=0.9)
        runs.append((net, optimizer, SCHEDULERS[name](optimizer)))
    rates = set()
    for _ in range(10):
        for net, optimizer, scheduler in runs:
            optimizer.zero_grad()
            lower(net).backward()
            optimizer.step()
            scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
        for mine, theirs in zip(runs[0][1].param_groups, runs[1][1].param_groups, strict=True):
            assert float(mine["lr"]) == float(theirs["lr"])
            assert mine["momentum"] == theirs["momentum"]
        rates.add(float(runs[0][1].param_groups[0]["lr"]))
        for a, b in zip(model.parameters(), other.parameters(), strict=True):
            if tensor_lr:
                torch.testing.assert_close(a.detach(), b.detach(), **EXACT)
            else:
                assert torch.equal(a, b)
    assert len(rates) > 1


@pytest.mark.parametrize("lr", [0.2, torch.tensor(0.2, dtype=torch.float64)], ids=["number", "tensor"])
def test_upper_lr_none_follows_lr_at_each_step(lr: Any) -> None:
    results = []
    for follows in (True, False):
        torch.manual_seed(0)
        model = mlp()
        rate = lr.clone() if isinstance(lr, Tensor) else lr
        inner = bda.BDAInnerOptimizer(model.parameters(), lr=rate, alpha=0.3)
        scheduler = lr_scheduler.ExponentialLR(inner, 0.5)
        for _ in range(4):
            if not follows:
                inner.param_groups[0]["upper_lr"] = float(inner.param_groups[0]["lr"])
            inner.step(lambda model=model: (lower(model), upper(model)))
            scheduler.step()
            assert (inner.param_groups[0]["upper_lr"] is None) == follows
        if not follows:
            inner.param_groups[0]["upper_lr"] = float(inner.param_groups[0]["lr"])
        fmodel = inner.unroll(model, lower, upper, steps=2)
        results.append([*model.parameters(), *fmodel.params.values()])
    torch.testing.assert_close(results[0], results[1], **EXACT)


@pytest.mark.parametrize("name", [name for name in SCHEDULERS if name != "ReduceLROnPlateau"])
def test_a_scheduler_on_a_learned_rate_raises(name: str) -> None:
    model = mlp()
    leaf = torch.tensor(0.1, requires_grad=True)
    inner = bda.BDAInnerOptimizer(model.parameters(), lr=leaf, momentum=0.5)
    one_group: dict[str, Make] = {"OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.3, 12)}
    make_scheduler = one_group.get(name, SCHEDULERS[name])
    with pytest.raises((RuntimeError, ValueError), match="requires grad"):
        make_scheduler(inner)
        inner.unroll(model, lower, steps=1)


def test_a_scheduler_on_a_rate_with_a_graph_raises_when_the_rate_is_used() -> None:
    """torch overwrites such a rate without complaint, and its gradient would be lost."""
    model = mlp()
    raw = torch.tensor(1.0, requires_grad=True)
    inner = bda.BDAInnerOptimizer(model.parameters(), lr=0.1 * raw)
    lr_scheduler.StepLR(inner, 1, 0.5)
    lower(model).backward()
    for use in (
        inner.step,
        lambda: inner.unroll(model, lower, steps=1),
        lambda: bda.innerloop_ctx(model, inner).__enter__(),
    ):
        with pytest.raises(ValueError, match="a torch scheduler overwrites `lr`, which cannot be learned"):
            use()


# The three forms of a step.


def test_a_closure_that_calls_backward_is_as_in_torch() -> None:
    model = mlp()
    other = copy.deepcopy(model)
    for net, kind in ((model, bda.BDAInnerOptimizer), (other, optim.SGD)):
        optimizer = kind(net.parameters(), lr=0.1, momentum=0.9)

        def closure(net: nn.Module = net, optimizer: optim.Optimizer = optimizer) -> Tensor:
            assert torch.is_grad_enabled()
            optimizer.zero_grad()
            loss = lower(net)
            loss.backward()
            return loss

        for _ in range(3):
            with torch.no_grad():
                loss = optimizer.step(closure)
            assert isinstance(loss, Tensor)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_a_closure_with_both_losses_takes_the_papers_step_and_touches_no_gradient() -> None:
    model = mlp()
    inner = bda.BDAInnerOptimizer(
        [{"params": model[0].parameters()}, {"params": model[2].parameters(), "alpha": 0.0, "lr": 0.3}],
        lr=0.2,
        upper_lr=0.7,
        alpha=bda.harmonic(0.5),
    )
    for p in model.parameters():
        p.grad = torch.full_like(p, 7.0)
    kept = [p.grad for p in model.parameters()]
    for k in range(1, 4):
        y = [p.detach().clone() for p in model.parameters()]
        g_f = torch.autograd.grad(lower(model), list(model.parameters()))
        g_big = torch.autograd.grad(upper(model), list(model.parameters()))
        value = inner.step(lambda: (lower(model), upper(model)))
        assert isinstance(value, tuple)
        a = 0.5 / k
        expected = [p - (a * 0.7 * u + (1 - a) * 0.2 * low) for p, u, low in zip(y[:2], g_big, g_f, strict=False)]
        expected += [p - 0.3 * low for p, low in zip(y[2:], g_f[2:], strict=True)]
        torch.testing.assert_close([p.detach() for p in model.parameters()], expected, **EXACT)
        assert [group["k"] for group in inner.param_groups] == [k, k]
    assert all(p.grad is g and bool((g == 7).all()) for p, g in zip(model.parameters(), kept, strict=True))


def test_both_losses_may_share_a_graph_and_the_upper_one_may_be_left_alone() -> None:
    model = mlp()
    inner = bda.BDAInnerOptimizer(model.parameters(), lr=0.1, alpha=0.3)

    def shared() -> tuple[Tensor, Tensor]:
        out = model(numbers(5, 3))
        return out.square().mean(), (out - 1).square().mean()

    inner.step(shared)
    plain = bda.BDAInnerOptimizer(model.parameters(), lr=0.1)
    before = model[0].weight.detach().clone()
    plain.step(lambda: (lower(model), None))  # alpha is 0: the upper loss is not looked at
    assert not torch.equal(before, model[0].weight)


def test_steps_in_place_are_the_steps_of_unroll() -> None:
    model = mlp()
    rates = [torch.full_like(p, 0.1).requires_grad_() for p in model.parameters()]
    settings = dict(lr=rates, upper_lr=torch.tensor(0.3), alpha=bda.harmonic(0.5), prox=bda.prox.l1(0.01), momentum=0.5)
    inner = bda.BDAInnerOptimizer(model.parameters(), **settings)
    fmodel = inner.unroll(model, lower, upper, steps=5)
    for _ in range(5):
        inner.step(lambda: (lower(model), upper(model)))
    torch.testing.assert_close([p.detach() for p in model.parameters()], [*fmodel.params.values()], **EXACT)
    assert all(p.is_leaf and p.grad is None for p in model.parameters())
    assert all(rate.grad is None for rate in rates)


WRONG_STEPS: dict[str, tuple[dict[str, Any], Callable[[Any], Any], type[Exception], str]] = {
    "no closure with alpha": ({"alpha": 0.3}, lambda m: None, ValueError, r"a closure that returns \(lower, upper\)"),
    "one loss with alpha": ({"alpha": 0.3}, lambda m: lambda: lower(m), ValueError, "the step needs the upper loss"),
    "a schedule": ({"alpha": bda.harmonic(0.5)}, lambda m: None, ValueError, "`alpha` is not 0"),
    "a learned alpha": ({"alpha": torch.tensor(0.0)}, lambda m: None, ValueError, "`alpha` is not 0"),
    "three losses": ({}, lambda m: lambda: (lower(m),) * 3, ValueError, r"the lower loss or \(lower, upper\); got 3"),
    "not a scalar": ({}, lambda m: lambda: (m(numbers(5, 3)), None), ValueError, "the lower loss must be a scalar"),
    "upper missing": ({"alpha": 0.3}, lambda m: lambda: (lower(m), None), ValueError, "the step needs the upper loss"),
    "no graph": ({}, lambda m: lambda: (lower(m).detach(), None), ValueError, "does not depend on any parameter"),
    "FISTA": ({"rule": bda.FISTA}, lambda m: None, ValueError, r"extrapolated point, which `step` cannot evaluate"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_STEPS)
def test_steps_that_cannot_be_taken_say_what_to_do(name: str) -> None:
    settings, closure, error, message = WRONG_STEPS[name]
    model = mlp()
    inner = bda.BDAInnerOptimizer(model.parameters(), lr=0.1, **settings)
    lower(model).backward()
    with unchanged(model, inner), pytest.raises(error, match=message):
        inner.step(closure(model))


def test_inference_mode_is_refused() -> None:
    model = mlp()
    inner = bda.BDAInnerOptimizer(model.parameters(), lr=0.1)
    with torch.inference_mode(), pytest.raises(RuntimeError, match=r"inference_mode.*Use `torch.no_grad\(\)`"):
        inner.step(lambda: (lower(model), None))


# What an Optimizer has besides.


def test_hooks_zero_grad_and_added_groups() -> None:
    model = mlp()
    inner = bda.BDAInnerOptimizer(model[0].parameters(), lr=0.1, alpha=0.2)
    calls: list[Any] = []
    before = inner.register_step_pre_hook(lambda opt, args, kwargs: calls.append(("pre", opt is inner)))
    inner.register_step_post_hook(lambda opt, args, kwargs: calls.append(("post", opt is inner)))
    inner.step(lambda: (lower(model), upper(model)))
    assert calls == [("pre", True), ("post", True)]
    before.remove()
    calls.clear()
    inner.add_param_group({"params": model[2].parameters(), "lr": 0.5, "alpha": bda.constant(0.1)})
    assert [group["k"] for group in inner.param_groups] == [1, 0]
    assert inner.param_groups[1]["upper_lr"] is None
    moved = model[2].weight.detach().clone()
    inner.step(lambda: (lower(model), upper(model)))
    assert calls == [("post", True)]
    assert not torch.equal(moved, model[2].weight)
    assert [group["k"] for group in inner.param_groups] == [2, 1]
    lower(model).backward()
    inner.zero_grad(set_to_none=False)
    assert all(bool((p.grad == 0).all()) for p in model.parameters())
    inner.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    assert isinstance(inner, optim.Optimizer)
    assert "BDAInnerOptimizer" in repr(inner)


def test_a_group_that_fails_leaves_the_optimizer_as_before() -> None:
    model = mlp()
    inner = bda.BDAInnerOptimizer(model[0].parameters(), lr=0.1)
    for wrong in (
        {"lr": -1.0},
        {"alpha": 1.0},
        {"alpha": "a"},
        {"upper_lr": "a"},
        {"lr": [torch.ones(3)]},
        {"prox": 3},
        {"momentum": 0.0, "nesterov": True},
    ):
        with unchanged(model, inner), pytest.raises((TypeError, ValueError)):
            inner.add_param_group({"params": list(model[2].parameters()), **wrong})
        assert len(inner.param_groups) == 1
    with unchanged(model, inner), pytest.raises(ValueError, match="more than one parameter group"):
        inner.add_param_group({"params": list(model[0].parameters())})
    inner.add_param_group({"params": list(model[2].parameters())})
    lower(model).backward()
    inner.step()


def test_named_parameters_are_taken() -> None:
    model = mlp()
    inner = bda.BDAInnerOptimizer(model.named_parameters(), lr=0.1)
    assert inner.param_groups[0]["param_names"] == [name for name, _ in model.named_parameters()]
    descend(model, inner, 2)
    inner.load_state_dict(inner.state_dict())
    assert list(inner.unroll(model, lower, steps=1).params) == [name for name, _ in model.named_parameters()]


# state_dict, pickle, deepcopy.


def saved(state: dict[str, Any]) -> dict[str, Any]:
    """What `torch.save` and a careful `torch.load` make of it."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


THROUGH: dict[str, Callable[[Any], Any]] = {
    "dict": lambda state: state,
    "torch": saved,
    "pickle": lambda state: pickle.loads(pickle.dumps(state)),
}


@pytest.mark.parametrize("through", THROUGH.values(), ids=THROUGH.keys())
@every_rule
def test_a_state_dict_goes_on_where_it_was(
    kind: type[optim.Optimizer], settings: dict[str, Any], through: Callable[[Any], Any]
) -> None:
    model = mlp()
    inner = make(model, kind, settings)
    descend(model, inner, 3)
    other = copy.deepcopy(model)
    fresh = make(other, kind, {})
    fresh.load_state_dict(through(inner.state_dict()))
    mine, theirs = (
        {t.data_ptr() for state in o.state.values() for t in state.values() if isinstance(t, Tensor)}
        for o in (inner, fresh)
    )
    assert not mine & theirs
    assert len(mine) == len(theirs)
    descend(model, inner, 3)
    descend(other, fresh, 3)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
    assert fresh.param_groups[0]["k"] == 6


@pytest.mark.filterwarnings("ignore:the weights of .geometric.:UserWarning")
@pytest.mark.parametrize(
    "alpha",
    [
        bda.constant(0.3),
        bda.harmonic(0.5),
        bda.polynomial(0.5, 0.5),
        bda.theory(0.5, 0.5, 1.0),
        "geometric",
        0.25,
        0.0,
        torch.tensor(0.3, requires_grad=True),
        bda.harmonic(torch.tensor(0.5, requires_grad=True)),
    ],
    ids=str,
)
def test_schedules_and_k_are_in_the_state_dict(alpha: Any) -> None:
    alpha = bda.geometric(0.5, 0.5) if alpha == "geometric" else alpha
    model = mlp()
    inner = bda.BDAInnerOptimizer(model.parameters(), lr=0.1, upper_lr=0.3, alpha=alpha)
    for _ in range(2):
        inner.step(lambda: (lower(model), upper(model)))
    for through in (lambda s: s, saved):
        other = copy.deepcopy(model)
        fresh = bda.BDAInnerOptimizer(other.parameters(), alpha=bda.constant(0.9))
        fresh.load_state_dict(through(inner.state_dict()))
        group = fresh.param_groups[0]
        assert (group["k"], group["upper_lr"], group["lr"]) == (2, 0.3, 0.1)
        loaded = group["alpha"]
        assert type(loaded) is type(alpha)
        constant, original = (getattr(a, "c", a) for a in (loaded, alpha))
        if isinstance(original, Tensor):
            assert constant.requires_grad
            assert constant.is_leaf
            assert constant.data_ptr() != original.data_ptr()
        else:
            assert loaded == alpha
        twin = copy.deepcopy(model)
        reference = bda.BDAInnerOptimizer(twin.parameters(), lr=0.1, upper_lr=0.3, alpha=alpha)
        reference.param_groups[0]["k"] = 2
        fresh.step(lambda other=other: (lower(other), upper(other)))
        reference.step(lambda twin=twin: (lower(twin), upper(twin)))
        assert all(torch.equal(a, b) for a, b in zip(other.parameters(), twin.parameters(), strict=True))


def test_what_cannot_be_written_is_left_out_and_stays_live() -> None:
    model = mlp()

    def alpha(k: int) -> float:
        return 0.1 * k

    prox = bda.prox.l1(lambda hyper: hyper)
    inner = bda.BDAInnerOptimizer(model.parameters(), lr=0.1, alpha=alpha, prox=prox)
    state = saved(inner.state_dict())
    assert "prox" not in state["param_groups"][0]
    assert "alpha" not in state["param_groups"][0]
    assert state["rule"] == "SGD"
    live = bda.prox.l1(torch.tensor(0.1, requires_grad=True) * 2)  # a strength that has a graph
    schedule = bda.harmonic(torch.tensor(0.2, requires_grad=True))
    fresh = bda.BDAInnerOptimizer(model.parameters(), lr=0.5, alpha=schedule, prox=live)
    fresh.load_state_dict(state)
    assert fresh.param_groups[0]["prox"] is live
    assert fresh.param_groups[0]["alpha"] is schedule
    assert fresh.param_groups[0]["lr"] == 0.1
    assert inner.param_groups[0]["prox"] is prox  # writing left the live one alone
    assert inner.param_groups[0]["alpha"] is alpha


def test_learned_rates_are_loaded_as_copies() -> None:
    model = mlp()
    settings = {
        "lr": [torch.full_like(p, 0.1).requires_grad_() for p in model.parameters()],
        "momentum": torch.tensor(0.9, requires_grad=True),
        "upper_lr": torch.tensor(0.2),
    }
    inner = bda.BDAInnerOptimizer(model.parameters(), **settings)
    descend(model, inner, 2)
    for through in (lambda s: s, saved):
        fresh = bda.BDAInnerOptimizer(copy.deepcopy(model).parameters())
        fresh.load_state_dict(through(inner.state_dict()))
        group = fresh.param_groups[0]
        for old, new in [*zip(settings["lr"], group["lr"], strict=True), (settings["momentum"], group["momentum"])]:
            assert torch.equal(old, new)
            assert new.requires_grad
            assert new.is_leaf
            assert old.data_ptr() != new.data_ptr()
        assert not group["upper_lr"].requires_grad
    with torch.no_grad():
        settings["momentum"].fill_(0.0)
    assert group["momentum"] == 0.9


def test_a_state_dict_of_another_kind_is_refused_and_changes_nothing() -> None:
    model = mlp()
    inner = bda.BDAInnerOptimizer(model.parameters(), lr=0.1, rule=optim.Adam)
    descend(model, inner, 2)
    wrong = {
        "belongs to the rule SGD; got an optimizer with Adam": bda.BDAInnerOptimizer(model.parameters()).state_dict(),
        "not written by a BDAInnerOptimizer": optim.Adam(model.parameters()).state_dict(),
        "different number of parameter groups": bda.BDAInnerOptimizer(
            [{"params": [p]} for p in model.parameters()], rule=optim.Adam
        ).state_dict(),
        "doesn't match the size": bda.BDAInnerOptimizer([model[0].weight], rule=optim.Adam).state_dict(),
    }
    for message, state in wrong.items():
        with unchanged(model, inner), pytest.raises(ValueError, match=message):
            inner.load_state_dict(state)


class Halved:
    """A rule of one's own: half of the gradient. At the top of the module, so that it can be pickled."""

    name, defaults, elementwise = "Halved", {"lr": 0.1}, True

    def validate(self, settings: Any) -> None:
        pass

    def init(self, params: Any, settings: Any) -> Any:
        return {"count": torch.zeros(())}

    def point(self, params: Any, state: Any, settings: Any) -> Any:
        return params

    def update(self, grads: Any, state: Any, params: Any, settings: Any) -> Any:
        moves = [None if g is None else Move(g / 2, settings["lr"]) for g in grads]
        return moves, {"count": state["count"] + 1}


@pytest.mark.parametrize("way", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["deepcopy", "pickle"])
def test_copies_carry_the_rule_the_prox_the_schedules_and_the_state(way: Callable[[Any], Any]) -> None:
    for settings in (
        {"rule": optim.Adam, "alpha": bda.harmonic(0.5), "prox": bda.prox.l1(0.1), "upper_lr": 0.3},
        {"momentum": torch.tensor(0.9, requires_grad=True), "alpha": torch.tensor(0.2, requires_grad=True)},
        {"rule": Halved(), "alpha": 0.1},
    ):
        model = mlp()
        inner = bda.BDAInnerOptimizer(model.parameters(), lr=0.1, **settings)
        inner.step(lambda model=model, inner=inner: (lower(model), upper(model)))
        twin, other = way((model, inner))
        assert other.rule.name == inner.rule.name
        assert other.param_groups[0]["prox"] == inner.param_groups[0]["prox"]
        assert other.param_groups[0]["k"] == 1
        for _ in range(2):
            inner.step(lambda model=model: (lower(model), upper(model)))
            other.step(lambda twin=twin: (lower(twin), upper(twin)))
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
        fmodel, copied = (o.unroll(m, lower, upper, steps=2) for o, m in ((inner, model), (other, twin)))
        torch.testing.assert_close(fmodel.params, copied.params, rtol=0, atol=0)


def test_a_rule_whose_state_is_of_the_whole_group_is_kept() -> None:
    model = mlp()
    inner = bda.BDAInnerOptimizer(model.parameters(), rule=Halved())
    other = copy.deepcopy(model)
    descend(model, inner, 3)
    descend(other, optim.SGD(other.parameters(), lr=0.05), 3)
    torch.testing.assert_close(
        [p.detach() for p in model.parameters()], [p.detach() for p in other.parameters()], **EXACT
    )
    assert inner.state[model[0].weight]["group"]["count"] == 3
    fmodel = inner.unroll(model, lower, steps=2)
    inner.commit(fmodel)
    assert inner.state[model[0].weight]["group"]["count"] == 5
    fresh = bda.BDAInnerOptimizer(copy.deepcopy(model).parameters(), rule=Halved())
    fresh.load_state_dict(saved(inner.state_dict()))
    assert next(iter(fresh.state.values()))["group"]["count"] == 5


# What is refused, with the reason.


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "alpha of 1": ({"alpha": 1.0}, ValueError, r"`alpha` must lie in \[0, 1\) at every step; got 1.0 at k=1. Use"),
    "alpha below 0": ({"alpha": -0.1}, ValueError, r"`alpha` must lie in \[0, 1\) .*got -0.1"),
    "alpha NaN": ({"alpha": float("nan")}, ValueError, r"`alpha` must lie in \[0, 1\) .*got nan"),
    "alpha True": ({"alpha": True}, TypeError, "`alpha` must be a number, a schedule or a tensor; got True"),
    "alpha of text": ({"alpha": "a"}, TypeError, "`alpha` must be a number, a schedule or a tensor; got 'a'"),
    "alpha of many": ({"alpha": torch.ones(2)}, ValueError, r"`alpha` as a tensor must have one element.*\(2,\)"),
    "upper_lr below 0": ({"upper_lr": -1.0}, ValueError, "`upper_lr` must be a number of at least 0; got -1.0"),
    "upper_lr NaN": ({"upper_lr": float("nan")}, ValueError, "`upper_lr` must be a number of at least 0; got nan"),
    "upper_lr infinite": ({"upper_lr": float("inf")}, ValueError, "`upper_lr` must be a number of at least 0; got inf"),
    "upper_lr of text": ({"upper_lr": "a"}, TypeError, "`upper_lr` must be a number, a schedule or a tensor; got 'a'"),
    "upper_lr True": ({"upper_lr": True}, TypeError, "`upper_lr` must be a number, a schedule or a tensor; got True"),
    "lr below 0": ({"lr": -0.1}, ValueError, "`lr` of SGD must be at least 0; got -0.1. The default is 0.001"),
    "lr of many": ({"lr": torch.ones(2)}, ValueError, "one element"),
    "lr of integers": ({"lr": torch.tensor(1)}, ValueError, "floating-point"),
    "too few rates": ({"lr": [torch.ones(4, 3)]}, ValueError, "`lr` as a list must have one tensor per parameter"),
    "rates of wrong shape": ({"lr": [torch.ones(3)] * 4}, ValueError, "of its shape"),
    "rates of numbers": ({"lr": [0.1] * 4}, ValueError, "one (floating-point )?tensor per parameter"),
    "upper rates of wrong shape": ({"upper_lr": [torch.ones(3)] * 4}, ValueError, "`upper_lr` as a list"),
    "alphas of wrong shape": ({"alpha": [torch.ones(3)] * 4}, ValueError, "`alpha` as a list"),
    "unknown setting": ({"momentun": 0.9}, TypeError, "the rule SGD has no setting `momentun`; it takes .*momentum"),
    "setting of another rule": ({"betas": (0.9, 0.99)}, TypeError, "the rule SGD has no setting `betas`"),
    "betas out of range": ({"rule": optim.Adam, "betas": (0.9, 1.0)}, ValueError, r"`betas` of Adam must lie in"),
    "nesterov alone": ({"nesterov": True}, ValueError, "`nesterov` needs a momentum"),
    "prox of text": ({"prox": "l1"}, TypeError, r"`prox` must be a proximal map; got 'l1'.*`prox.l1\(0.1\)`"),
    "coupled prox with rates": (
        {"prox": bda.prox.group_lasso(0.1), "lr": [torch.ones(4, 3), torch.ones(4), torch.ones(2, 4), torch.ones(2)]},
        ValueError,
        "a prox that couples the elements has no meaning with one rate per element",
    ),
    "LBFGS": ({"rule": optim.LBFGS}, ValueError, "LBFGS"),
    "an instance": ({"rule": optim.SGD([torch.zeros(1)])}, TypeError, "must be a class, not an optimizer"),
    "text as rule": ({"rule": "Adam"}, TypeError, "`rule` must have"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_settings_that_cannot_be_honoured_are_refused(name: str) -> None:
    settings, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        bda.BDAInnerOptimizer(mlp().parameters(), **{"lr": 0.1} | settings)


def test_settings_that_are_allowed() -> None:
    model = mlp()
    rates = [torch.full_like(p, 0.1) for p in model.parameters()]
    scalars = [torch.tensor(0.1) for _ in rates]
    for settings in (
        {"lr": 0.0},
        {"lr": rates, "prox": bda.prox.l1(0.1)},
        {"lr": scalars, "alpha": scalars, "upper_lr": rates},
        {"lr": torch.tensor([0.1])},
        {"rule": optim.Adam, "betas": [0.5, 0.9]},
        {"alpha": lambda k: 0.5 / k},
        {"alpha": 0},
    ):
        inner = bda.BDAInnerOptimizer(model.parameters(), **settings)
        inner.step(lambda: (lower(model), upper(model)))
        inner.unroll(model, lower, upper, steps=2)


def test_a_schedule_that_leaves_its_range_is_told_with_its_step() -> None:
    model = mlp()
    inner = bda.BDAInnerOptimizer(model.parameters(), lr=0.1, alpha=lambda k: 0.5 * k)
    inner.step(lambda: (lower(model), upper(model)))
    with unchanged(model, inner), pytest.raises(ValueError, match=r"got 1.0 at k=2"):
        inner.step(lambda: (lower(model), upper(model)))
    with pytest.raises(ValueError, match=r"got 1.5 at k=3"):
        inner.unroll(model, lower, upper, steps=3)
    learned = bda.BDAInnerOptimizer(model.parameters(), lr=0.1, alpha=torch.tensor(1.5))
    with pytest.raises(ValueError, match=r"got 1.5 at k=1. Learn it through a sigmoid"):
        learned.unroll(model, lower, upper, steps=1)


def test_lists_of_settings_skip_frozen_parameters() -> None:
    model = mlp()
    model[0].bias.requires_grad_(False)
    rates = [torch.full_like(p, 0.1 * (i + 1)) for i, p in enumerate(model.parameters())]
    inner = bda.BDAInnerOptimizer(model.parameters(), lr=rates)
    other = copy.deepcopy(model)
    groups = [{"params": [p], "lr": 0.1 * (i + 1)} for i, p in enumerate(other.parameters())]
    reference = bda.BDAInnerOptimizer(groups)
    descend(model, inner, 3)
    descend(other, reference, 3)
    torch.testing.assert_close(
        [p.detach() for p in model.parameters()], [p.detach() for p in other.parameters()], **EXACT
    )


# Nothing is left half done.


@contextlib.contextmanager
def unchanged(model: nn.Module, inner: bda.BDAInnerOptimizer) -> Iterator[None]:
    """The module, the optimizer and torch's global switches are the same afterwards, to the bit."""

    def objects() -> list[Any]:
        found: list[Any] = [torch.is_grad_enabled(), torch.is_autocast_cache_enabled()]
        found += torch.nn.attention._cur_sdpa_kernel_backends()
        for t in (*model.parameters(), *model.buffers()):
            found += [id(t), t._version, id(t.grad), t.requires_grad]
        for m in model.modules():
            found += [m.training, [(k, id(v)) for k, v in m.__dict__.items()], list(m._forward_hooks)]
        for group in inner.param_groups:
            found.append({k: v if isinstance(v, int | float | str | bool) else id(v) for k, v in group.items()})
        found += [(id(p), [(k, id(v)) for k, v in s.items()]) for p, s in inner.state.items()]
        return found

    def tensors() -> list[Tensor]:
        held = [v for s in inner.state.values() for v in s.values() if isinstance(v, Tensor)]
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        return [t.detach().clone() for t in (*model.parameters(), *model.buffers(), *held, *grads)]

    before, values = objects(), tensors()
    yield
    assert objects() == before
    assert all(torch.equal(a, b) for a, b in zip(tensors(), values, strict=True))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):  # allowed again
        torch.ones(1, requires_grad=True).exp()


class Interrupted(BaseException):
    """Not an Exception, as KeyboardInterrupt is not."""


def failing(after: int, error: type[BaseException]) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """Both losses; the call number `after` of either raises, in the middle of a forward pass."""
    count = 0

    def counted(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(net: Any, hyper: Any = None, batch: Any = None) -> Tensor:
            nonlocal count
            count += 1
            value = loss(net)
            if count == after:
                raise error("stop")
            return value

        return run

    return counted(lower), counted(upper)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, Interrupted])
@pytest.mark.parametrize(
    "form", ["unroll", "checkpointed", "forward", "truncated", "first", "backward", "innerloop", "step"]
)
def test_an_exception_in_a_loss_leaves_everything_as_it_was(form: str, error: type[BaseException]) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.1), nn.Linear(3, 2))
    model[2].eval()
    model[0].register_forward_hook(lambda *_: None)
    inner = bda.BDAInnerOptimizer(model.parameters(), lr=0.05, alpha=bda.harmonic(0.3), rule=optim.Adam)
    inner.step(lambda: (lower(model), upper(model)))
    lower(model).backward()
    adjoints = {
        "unroll": bda.Unroll(),
        "checkpointed": bda.Checkpointed(),
        "forward": bda.ForwardMode(),
        "truncated": bda.Truncated(last=1),
        "first": bda.FirstOrder(),
        "backward": bda.Checkpointed(every=1),
    }
    x = torch.tensor(1.0, requires_grad=True)
    for after in (1, 2, 5):
        first, second = failing(after + (6 if form == "backward" else 0), error)
        if form == "step":
            model.eval()  # the user's own call of a module in training updates its buffers
        with unchanged(model, inner), pytest.raises(error, match="stop"):
            if form == "step":
                for _ in range(after):  # the first calls return, and are not steps
                    inner.step(lambda a=first, b=second: (a(model), b(model))) if after < 3 else first(model)
            elif form == "innerloop":
                with bda.innerloop_ctx(model, inner) as (fmodel, diffopt):
                    for _ in range(3):
                        diffopt.step(first(fmodel), second(fmodel))
            else:
                fmodel = inner.unroll(
                    model, lambda n, x, b, f=first: x * f(n), second, hyper=x, steps=3, adjoint=adjoints[form]
                )
                torch.autograd.grad(upper(fmodel), x)
