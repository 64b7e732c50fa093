"""`innerloop_ctx` and `diffopt.step`: the loop that the user writes, as in `higher`."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from problems import TIGHT, mlp, numbers
from torch import Tensor, nn, optim

import bda_optim as bda
from bda_optim._support.types import Move

K = 4
pytestmark = pytest.mark.usefixtures("doubles")


def lower(net: Any, hyper: Any = None, batch: Any = None) -> Tensor:
    return (net(numbers(5, 3)) - 0.5).square().mean() * (1.0 if hyper is None else hyper)


def upper(net: Any, hyper: Any = None, batch: Any = None) -> Tensor:
    return (net(numbers(5, 3, seed=2)) - 1).abs().pow(3).mean()


def run(
    model: nn.Module, opt: Any, hyper: Any = None, *, both: bool = False, loss: Any = lower, **options: Any
) -> bda.FunctionalModule:
    """K steps in a context with the given options."""
    with bda.innerloop_ctx(model, opt, **options) as (fmodel, diffopt):
        for _ in range(K):
            value = loss(fmodel, hyper)
            diffopt.step(value, upper(fmodel)) if both else diffopt.step(value)
    return fmodel


def grads(model: nn.Module, fmodel: nn.Module) -> list[Tensor | None]:
    return list(torch.autograd.grad(upper(fmodel), list(model.parameters()), allow_unused=True))


# What the context means.


def test_the_loop_is_the_papers_step() -> None:
    model = mlp()
    inner = bda.BDAInnerOptimizer(model.parameters(), lr=0.2, upper_lr=0.7, alpha=bda.harmonic(0.5))
    names = [name for name, _ in model.named_parameters()]
    with bda.innerloop_ctx(model, inner) as (fmodel, diffopt):
        assert diffopt.k == 0
        for k in range(1, K + 1):
            f, big_f = lower(fmodel), upper(fmodel)
            y = list(fmodel.params.values())
            g_f, g_big = torch.autograd.grad(f, y, retain_graph=True), torch.autograd.grad(big_f, y, retain_graph=True)
            new = diffopt.step(f, big_f)
            assert diffopt.k == k
            a = 0.5 / k
            expected = [p - (a * 0.7 * u + (1 - a) * 0.2 * low) for p, u, low in zip(y, g_big, g_f, strict=True)]
            torch.testing.assert_close(list(new), expected, **TIGHT)
            assert all(fmodel.params[name] is p for name, p in zip(names, new, strict=True))
            assert all(fmodel.get_submodule(n.split(".")[0]).weight is fmodel.params[n] for n in names if "weight" in n)


def test_initial_weights_are_copied_unless_asked_otherwise() -> None:
    model = mlp()
    inner = bda.BDAInnerOptimizer(model.parameters(), lr=0.2)
    assert grads(model, run(model, inner)) == [None] * 4
    found = grads(model, run(model, inner, copy_initial_weights=False))
    fmodel = inner.unroll(model, lower, steps=K, copy_initial_weights=False)
    torch.testing.assert_close(found, grads(model, fmodel), **TIGHT)
    eps, direction = 1e-6, numbers(4, 3, seed=5)
    ends = []
    for sign in (1, -1):
        with torch.no_grad():
            model[0].weight += sign * eps * direction
            ends.append(upper(inner.unroll(model, lower, steps=K)).item())
            model[0].weight -= sign * eps * direction
    assert (found[0] * direction).sum().item() == pytest.approx((ends[0] - ends[1]) / (2 * eps), rel=1e-7)


def test_without_tracking_the_iterates_are_leaves() -> None:
    model = mlp()
    inner = bda.BDAInnerOptimizer(model.parameters(), lr=0.2, momentum=0.9)
    tracked = run(model, inner)
    for options in ({}, {"copy_initial_weights": False}):
        plain = run(model, inner, track_higher_grads=False, **options)
        for name, p in plain.params.items():
            assert p.is_leaf
            assert p.requires_grad
            assert torch.equal(p, tracked.params[name])
        upper(plain).backward()
        assert all(p.grad is not None for p in plain.params.values())
        assert all(p.grad is None for p in model.parameters())
        memory = plain._state.rule[0]
        assert not any(m["momentum_buffer"].requires_grad for m in memory)


def test_what_is_not_needed_is_freed_without_the_garbage_collector() -> None:
    """Without tracking only the last iterate is alive; with it, all are freed with fmodel."""
    gc.disable()
    try:
        model = mlp()
        alive = []
        with bda.innerloop_ctx(model, bda.BDAInnerOptimizer(model.parameters(), lr=0.1), track_higher_grads=False) as (
            fmodel,
            diffopt,
        ):
            for _ in range(K):
                diffopt.step(lower(fmodel))
                alive.append(weakref.ref(fmodel.params["0.weight"]))
            assert [ref() is not None for ref in alive] == [False] * (K - 1) + [True]
        tracked = run(model, bda.BDAInnerOptimizer(model.parameters(), lr=0.1), copy_initial_weights=False)
        seen = [weakref.ref(p) for p in tracked.params.values()]
        upper(tracked).backward()
        del tracked
        assert [ref() for ref in seen] == [None] * 4
        del fmodel, diffopt
        assert alive[-1]() is None
    finally:
        gc.enable()


def test_a_device_may_be_named() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    model[0].requires_grad_(False)
    inner = bda.BDAInnerOptimizer(model.parameters(), lr=0.2, momentum=0.5)
    expected = run(model, inner, copy_initial_weights=False)
    for device in ("cpu", torch.device("cpu")):
        found = run(model, inner, device=device, copy_initial_weights=False)
        torch.testing.assert_close(found.params, expected.params, rtol=0, atol=0)
        wanted = [p for p in model.parameters() if p.requires_grad]
        torch.testing.assert_close(
            torch.autograd.grad(upper(found), wanted),
            torch.autograd.grad(upper(expected), wanted, retain_graph=True),
            **TIGHT,
        )
    with bda.innerloop_ctx(model, inner, device="meta") as (fmodel, diffopt):  # every tensor of the module moves
        diffopt.step(fmodel(torch.ones(2, 3, device="meta")).sum())
        assert all(t.is_meta for t in (*fmodel.parameters(), *fmodel.buffers()))
    assert not any(t.is_meta for t in (*model.parameters(), *model.buffers()))


def test_the_module_and_the_optimizer_stay_as_they_are() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    inner = bda.BDAInnerOptimizer(model.parameters(), lr=0.1, rule=optim.Adam)
    lower(model).backward()
    inner.step()
    state = copy.deepcopy(inner.state_dict())
    before = [(id(t), t._version, t.detach().clone()) for t in (*model.parameters(), *model.buffers())]
    gradients = [p.grad for p in model.parameters()]
    keys = [list(m.__dict__) for m in model.modules()]
    fmodel = run(model, inner, copy_initial_weights=False)
    torch.autograd.grad(upper(fmodel), list(model.parameters()))
    for (identity, version, value), t in zip(before, (*model.parameters(), *model.buffers()), strict=True):
        assert identity == id(t)
        assert version == t._version
        assert torch.equal(value, t)
    assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))
    assert [list(m.__dict__) for m in model.modules()] == keys
    now = inner.state_dict()
    assert now["param_groups"] == state["param_groups"]
    torch.testing.assert_close(now["state"], state["state"], rtol=0, atol=0)


def test_no_grad_outside_or_inside_the_loss_is_a_clear_error() -> None:
    model = mlp()
    inner = bda.BDAInnerOptimizer(model.parameters(), lr=0.1)
    with bda.innerloop_ctx(model, inner) as (fmodel, diffopt), torch.no_grad():
        with pytest.raises(ValueError, match=r"without `.detach\(\)` or `no_grad\(\)`"):
            diffopt.step(lower(fmodel))
        with torch.enable_grad():
            value = lower(fmodel)
        diffopt.step(value)  # a step enables what it needs
    assert all(p.requires_grad for p in fmodel.params.values())
    with torch.inference_mode(), pytest.raises(RuntimeError, match=r"Use `torch.no_grad\(\)` instead"):
        run(model, inner)


# Overrides and callbacks.


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    return [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.05}]


@pytest.mark.parametrize(
    ("override", "settings"),
    [
        ({"lr": 0.3}, [{"lr": 0.3}, {"lr": 0.3}]),
        ({"lr": [0.3]}, [{"lr": 0.3}, {"lr": 0.3}]),
        ({"lr": [0.3, 0.4]}, [{"lr": 0.3}, {"lr": 0.4}]),
        ({"momentum": [0.9, 0.5]}, [{"momentum": 0.9}, {"momentum": 0.5, "lr": 0.05}]),
        ({"weight_decay": 0.1, "maximize": True}, [{"weight_decay": 0.1, "maximize": True}] * 2),
    ],
)
def test_an_override_is_one_value_or_one_per_group(override: dict[str, Any], settings: list[dict[str, Any]]) -> None:
    model = mlp()
    inner = bda.BDAInnerOptimizer(two_groups(model), lr=0.1)
    parts = [{**group, **{"lr": 0.1} | own} for group, own in zip(two_groups(model), settings, strict=True)]
    if "lr" not in override:
        parts[1]["lr"] = 0.05
    expected = run(model, bda.BDAInnerOptimizer(parts))
    torch.testing.assert_close(run(model, inner, override=override).params, expected.params, rtol=0, atol=0)
    with bda.innerloop_ctx(model, inner) as (fmodel, diffopt):
        diffopt.step(lower(fmodel), override=override)
        for _ in range(K - 1):
            diffopt.step(lower(fmodel))  # it persists
    torch.testing.assert_close(fmodel.params, expected.params, rtol=0, atol=0)
    assert inner.param_groups[0]["lr"] == 0.1
    assert inner.param_groups[0]["momentum"] == 0.0


def test_an_override_may_change_from_step_to_step() -> None:
    model = mlp()
    reference = copy.deepcopy(model)
    optimizer = optim.SGD(reference.parameters(), lr=0.1)
    with bda.innerloop_ctx(model, bda.BDAInnerOptimizer(model.parameters(), lr=0.1)) as (fmodel, diffopt):
        for lr in (0.1, 0.3, 0.3, 0.2):
            diffopt.step(lower(fmodel), override={"lr": lr})
            optimizer.param_groups[0]["lr"] = lr
            optimizer.zero_grad()
            lower(reference).backward()
            optimizer.step()
    for mine, theirs in zip(fmodel.params.values(), reference.parameters(), strict=True):
        assert torch.equal(mine, theirs)


LEARNED = {
    "lr": 0.1,
    "momentum": 0.8,
    "weight_decay": 0.1,
    "dampening": 0.3,
    "upper_lr": 0.2,
    "alpha": 0.3,
}


@pytest.mark.parametrize("name", LEARNED)
@pytest.mark.parametrize("where", ["context", "step", "groups"])
def test_an_override_may_be_learned(name: str, where: str) -> None:
    model = mlp()
    inner = bda.BDAInnerOptimizer(model.parameters(), **{"lr": 0.1, "alpha": 0.2, "momentum": 0.5} | {name: 0.0})

    def phi(value: Tensor) -> Tensor:
        override = {name: [value] if where == "groups" else value}
        with bda.innerloop_ctx(model, inner, override=None if where == "step" else override) as (fmodel, diffopt):
            for k in range(K):
                more = {"override": override} if where == "step" and k == 0 else {}
                diffopt.step(lower(fmodel), upper(fmodel), **more)
        return upper(fmodel)

    value = torch.tensor(LEARNED[name], requires_grad=True)
    (found,) = torch.autograd.grad(phi(value), value)
    eps = 1e-6
    numeric = (phi(value.detach() + eps) - phi(value.detach() - eps)) / (2 * eps)
    assert abs(found) > 1e-6
    torch.testing.assert_close(found, numeric.detach(), rtol=1e-6, atol=1e-10)


def test_rates_of_every_element_may_be_learned_by_an_override() -> None:
    model = mlp()
    inner = bda.BDAInnerOptimizer(model.parameters(), lr=0.1)
    rates = [torch.full_like(p, 0.1).requires_grad_() for p in model.parameters()]
    fmodel = run(model, inner, override={"lr": [rates]})
    torch.testing.assert_close(fmodel.params, run(model, inner).params, **TIGHT)
    found = torch.autograd.grad(upper(fmodel), rates)
    single = torch.tensor(0.1, requires_grad=True)
    (total,) = torch.autograd.grad(upper(run(model, inner, override={"lr": single})), single)
    torch.testing.assert_close(sum(g.sum() for g in found), total, **TIGHT)


def test_an_override_keeps_the_memory_of_a_custom_rule() -> None:
    class Counted:
        """Plain descent that counts its steps, for the whole group."""

        name, defaults, elementwise = "Counted", {"lr": 0.1}, True

        def validate(self, settings: Any) -> None:
            pass

        def init(self, params: Any, settings: Any) -> Any:
            return torch.zeros(())

        def point(self, params: Any, state: Any, settings: Any) -> Any:
            return params

        def update(self, grads: Any, state: Any, params: Any, settings: Any) -> Any:
            return [Move(g, settings["lr"]) for g in grads], state + 1

    model = mlp()
    inner = bda.BDAInnerOptimizer(model.parameters(), rule=Counted())
    with bda.innerloop_ctx(model, inner) as (fmodel, diffopt):
        for lr in (0.1, 0.2):
            diffopt.step(lower(fmodel), override={"lr": lr})
    inner.commit(fmodel)
    assert inner.state[model[0].weight]["group"].item() == 2


@pytest.mark.parametrize(
    ("override", "error", "message"),
    [
        ({"rate": 0.1}, ValueError, r"`override` names settings of SGD; got 'rate', not in \['lr'"),
        ({"lr": [0.1, 0.2, 0.3]}, ValueError, r"one value or a list with one per group \(2\); got 3"),
        ({"lr": -1.0}, ValueError, "`lr` of SGD must be at least 0; got -1.0"),
        ({"alpha": 1.0}, ValueError, r"`alpha` must lie in \[0, 1\)"),
        ({"lr": torch.ones(3)}, ValueError, "one element"),
    ],
)
def test_wrong_overrides_are_refused_and_forgotten(
    override: dict[str, Any], error: type[Exception], message: str
) -> None:
    model = mlp()
    inner = bda.BDAInnerOptimizer(two_groups(model), lr=0.1)
    with pytest.raises(error, match=message), bda.innerloop_ctx(model, inner, override=override):
        raise AssertionError("the context must not open")
    expected = run(model, inner)
    with bda.innerloop_ctx(model, inner) as (fmodel, diffopt):
        with pytest.raises(error, match=message):
            diffopt.step(lower(fmodel), override=override)
        assert diffopt.k == 0
        for _ in range(K):
            diffopt.step(lower(fmodel))
    torch.testing.assert_close(fmodel.params, expected.params, rtol=0, atol=0)


def test_gradients_may_be_clipped_by_a_callback() -> None:
    model = mlp()
    model.extra = nn.Parameter(torch.ones(2))  # no gradient reaches it
    inner = bda.BDAInnerOptimizer(model.parameters(), lr=0.5, momentum=0.9)
    limit, seen = 0.05, []

    def clip(gradients: list[Tensor | None]) -> list[Tensor | None]:
        seen.append([g is None for g in gradients])
        total = torch.stack([g.square().sum() for g in gradients if g is not None]).sum().sqrt()
        return [None if g is None else g * (limit / (total + 1e-6)).clamp(max=1) for g in gradients]

    def net(x: Tensor) -> Tensor:  # the network without the parameter that has no gradient
        return fmodel[:3](x)

    def phi(hyper: Tensor) -> Tensor:
        nonlocal fmodel
        with bda.innerloop_ctx(model, inner) as (fmodel, diffopt):
            for _ in range(K):
                diffopt.step(lower(net, hyper) + hyper * net(numbers(2, 3)).mean(), grad_callback=clip)
        return upper(net)

    fmodel: Any = None
    hyper, eps = torch.tensor(1.3, requires_grad=True), 1e-5
    (found,) = torch.autograd.grad(phi(hyper), hyper)
    iterate = {name: p.detach() for name, p in fmodel.params.items()}
    assert seen == [[False] * 4 + [True]] * K or seen == [[True] + [False] * 4] * K
    numeric = (phi(hyper.detach() + eps) - phi(hyper.detach() - eps)) / (2 * eps)
    torch.testing.assert_close(found, numeric.detach(), rtol=1e-6, atol=1e-9)  # the derivative goes through it

    reference = copy.deepcopy(model)
    optimizer = optim.SGD(reference.parameters(), lr=0.5, momentum=0.9)
    for _ in range(K):
        optimizer.zero_grad()
        (lower(reference[:3], 1.3) + 1.3 * reference[:3](numbers(2, 3)).mean()).backward()
        assert torch.nn.utils.clip_grad_norm_(reference.parameters(), limit) > limit
        optimizer.step()
    for name, p in reference.named_parameters():
        torch.testing.assert_close(iterate[name], p.detach(), rtol=1e-12, atol=1e-14)


# Truncation and first order.


@pytest.mark.parametrize("last", [1, 2, K, K + 3])
@pytest.mark.parametrize("rule", [None, optim.Adam])
def test_the_last_steps_equal_the_truncated_adjoint(last: int, rule: Any) -> None:
    model = mlp()
    inner = bda.BDAInnerOptimizer(model.parameters(), lr=0.1, upper_lr=0.1, alpha=bda.harmonic(0.5), rule=rule)
    hyper = torch.tensor(1.3, requires_grad=True)
    fmodel = run(model, inner, hyper, both=True, steps=K, last=last)
    exact = inner.unroll(model, lower, upper, hyper=hyper, steps=K, adjoint=bda.Truncated(last=last))
    torch.testing.assert_close(fmodel.params, exact.params, **TIGHT)
    found, expected = (torch.autograd.grad(upper(net), hyper)[0] for net in (fmodel, exact))
    torch.testing.assert_close(found, expected, **TIGHT)
    full = inner.unroll(model, lower, upper, hyper=hyper, steps=K)
    biased = abs(torch.autograd.grad(upper(full), hyper)[0] - found) > 1e-6 * abs(found)
    assert biased == (last < K)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"last": 2}, "`last` needs `steps`"),
        ({"steps": 0}, "`steps` must be a whole number of at least 1; got 0"),
        ({"steps": 3, "last": 0}, "`last` must be a whole number of at least 1; got 0"),
        ({"steps": 3, "last": 1.5}, "`last` must be a whole number of at least 1; got 1.5"),
        ({"steps": 3, "last": 2, "copy_initial_weights": False}, "no gradient reaches the initial weights"),
    ],
)
def test_wrong_truncations_are_refused(options: dict[str, Any], message: str) -> None:
    model = mlp()
    with pytest.raises(ValueError, match=message):
        run(model, bda.BDAInnerOptimizer(model.parameters(), lr=0.1), **options)


def test_more_steps_than_announced_are_refused() -> None:
    model = mlp()
    with bda.innerloop_ctx(model, bda.BDAInnerOptimizer(model.parameters(), lr=0.1), steps=2) as (fmodel, diffopt):
        diffopt.step(lower(fmodel))
        diffopt.step(lower(fmodel))
        with pytest.raises(ValueError, match="opened with steps=2; got one step more"):
            diffopt.step(lower(fmodel))


@pytest.mark.parametrize("settings", [{}, {"momentum": 0.9}, {"alpha": 0.3, "upper_lr": 0.2}])
def test_first_order_equals_the_first_order_adjoint(settings: dict[str, Any]) -> None:
    model = mlp()
    rate = torch.tensor(0.1, requires_grad=True)
    inner = bda.BDAInnerOptimizer(model.parameters(), lr=rate, **settings)
    options = dict(copy_initial_weights=False)
    fmodel = run(model, inner, both=True, first_order=True, **options)
    exact = inner.unroll(model, lower, upper, steps=K, adjoint=bda.FirstOrder(), **options)
    torch.testing.assert_close(fmodel.params, exact.params, **TIGHT)
    wanted = [*model.parameters(), rate]
    found, expected = (torch.autograd.grad(upper(net), wanted) for net in (fmodel, exact))
    torch.testing.assert_close(found, expected, **TIGHT)
    if not settings:  # plain first-order MAML: the derivative at y_K is passed on to y_0
        fresh = run(model, inner, first_order=True)
        at_end = torch.autograd.grad(upper(fresh), list(fresh.params.values()))
        torch.testing.assert_close(found[:-1], at_end, **TIGHT)


# Optimizers of torch.optim, with what they remember.


OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "SGD": lambda p: optim.SGD(p, lr=0.1),
    "SGD momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9),
    "SGD dampening": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5, weight_decay=0.1),
    "SGD nesterov": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, maximize=True),
    "Adam": lambda p: optim.Adam(p, lr=0.05),
    "Adam amsgrad": lambda p: optim.Adam(p, lr=0.05, amsgrad=True, betas=(0.5, 0.9), weight_decay=0.1),
    "AdamW": lambda p: optim.AdamW(p, lr=0.05),
    "RMSprop": lambda p: optim.RMSprop(p, lr=0.01, alpha=0.8, centered=True, momentum=0.5),
    "Adagrad": lambda p: optim.Adagrad(p, lr=0.1, lr_decay=0.1),
    "Adadelta": lambda p: optim.Adadelta(p),
    "NAdam": lambda p: optim.NAdam(p, lr=0.01),
    "RAdam": lambda p: optim.RAdam(p, lr=0.05),
    "Rprop": lambda p: optim.Rprop(p, lr=0.01),
    "ASGD": lambda p: optim.ASGD(p, lr=0.05, lambd=0.1, t0=3),
    "Adamax": lambda p: optim.Adamax(p, lr=0.05),
    "Adafactor": lambda p: optim.Adafactor(p, lr=0.05),
}


@pytest.mark.parametrize("before", [0, 3])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_an_optimizer_of_torch_goes_on_from_its_state(make: Callable[[Any], optim.Optimizer], before: int) -> None:
    model = mlp()
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.02}]
    optimizer = make(groups)

    def steps(model: nn.Module, optimizer: optim.Optimizer, count: int) -> None:
        for _ in range(count):
            optimizer.zero_grad()
            lower(model).backward()
            optimizer.step()

    steps(model, optimizer, before)
    state, reference = copy.deepcopy(optimizer.state_dict()), copy.deepcopy((model, optimizer))
    fmodel = run(model, optimizer, copy_initial_weights=False)
    assert all(g is not None for g in grads(model, fmodel))
    torch.testing.assert_close(optimizer.state_dict(), state, rtol=0, atol=0)
    steps(*reference, K)
    for mine, theirs in zip(fmodel.params.values(), reference[0].parameters(), strict=True):
        torch.testing.assert_close(mine.detach(), theirs.detach(), rtol=1e-12, atol=1e-12)


def test_frozen_parameters_and_unused_ones_of_a_torch_optimizer_stay() -> None:
    model = mlp()
    model.unused = nn.Linear(2, 2)
    model[0].requires_grad_(False)
    optimizer = optim.Adam(model.parameters(), lr=0.1)
    with bda.innerloop_ctx(model, optimizer) as (fmodel, diffopt):
        diffopt.step((fmodel[:3](numbers(5, 3)) - 1).square().mean())
    assert list(fmodel.params) == ["2.weight", "2.bias", "unused.weight", "unused.bias"]
    assert fmodel[0].weight is model[0].weight
    assert torch.equal(fmodel.params["unused.weight"], model.unused.weight)
    assert not torch.equal(fmodel.params["2.weight"], model[2].weight)


def test_optimizers_that_cannot_be_differentiated_here_are_refused() -> None:
    model = mlp()
    with pytest.raises(ValueError, match=r"extrapolated point, which `innerloop_ctx` cannot evaluate. Use `unroll`"):
        run(model, bda.BDAInnerOptimizer(model.parameters(), lr=0.1, rule=bda.FISTA))
    with pytest.raises(ValueError, match="LBFGS"):
        run(model, optim.LBFGS(model.parameters()))
    with pytest.raises(ValueError, match="SparseAdam"):
        run(model, optim.SparseAdam(list(model.parameters())))

    class Own(optim.SGD):
        pass

    with pytest.raises(TypeError, match=r"must be a class of torch\.optim itself"):
        run(model, Own(model.parameters(), lr=0.1))


# Wrong use.


def test_the_upper_loss_is_needed_where_alpha_is_not_zero() -> None:
    model = mlp()

    def late(k: int) -> float:
        return 0.0 if k < 3 else 0.5

    with bda.innerloop_ctx(model, bda.BDAInnerOptimizer(model.parameters(), lr=0.1, alpha=late)) as (fmodel, diffopt):
        diffopt.step(lower(fmodel))
        diffopt.step(lower(fmodel))
        with pytest.raises(ValueError, match=r"`alpha` is not 0 at step k=3.*Write `diffopt.step\(lower, upper\)`"):
            diffopt.step(lower(fmodel))
        assert diffopt.k == 2
        diffopt.step(lower(fmodel), upper(fmodel))
        assert diffopt.k == 3


WRONG_LOSSES: dict[str, tuple[Callable[[Any, Any], Any], type[Exception], str]] = {
    "of the original module": (lambda fmodel, model: lower(model), ValueError, "does not depend on any parameter"),
    "detached": (lambda fmodel, model: lower(fmodel).detach(), ValueError, "does not depend on any parameter"),
    "not a scalar": (lambda fmodel, model: fmodel(numbers(5, 3)), ValueError, r"must be a scalar; got shape \(5, 2\)"),
    "a number": (lambda fmodel, model: lower(fmodel).item(), TypeError, r"must be a scalar tensor; got float .*k=1"),
}


@pytest.mark.parametrize("name", WRONG_LOSSES)
def test_wrong_losses_are_refused(name: str) -> None:
    make, error, message = WRONG_LOSSES[name]
    model = mlp()
    for settings in ({}, {"alpha": 0.3}):
        with bda.innerloop_ctx(model, bda.BDAInnerOptimizer(model.parameters(), lr=0.1, **settings)) as (
            fmodel,
            diffopt,
        ):
            with pytest.raises(error, match=message):
                diffopt.step(make(fmodel, model), upper(fmodel))
            assert diffopt.k == 0


def test_a_loss_that_is_not_finite_is_reported_with_its_step_on_leaving() -> None:
    model = mlp()
    inner = bda.BDAInnerOptimizer(model.parameters(), lr=0.1, alpha=0.2)
    with (
        pytest.raises(FloatingPointError, match="the lower loss is not finite at step k=2 of 3"),
        bda.innerloop_ctx(model, inner) as (fmodel, diffopt),
    ):
        for k in range(3):
            diffopt.step(lower(fmodel) * (float("nan") if k == 1 else 1.0), upper(fmodel))
    with (
        pytest.raises(FloatingPointError, match="the upper loss is not finite at step k=1 of 2"),
        bda.innerloop_ctx(model, inner) as (fmodel, diffopt),
    ):
        for k in range(2):
            diffopt.step(lower(fmodel), upper(fmodel) * (float("inf") if k == 0 else 1.0))
    with (
        pytest.raises(FloatingPointError, match="the parameters are not finite after the last step, k=1"),
        bda.innerloop_ctx(model, inner) as (fmodel, diffopt),
    ):
        diffopt.step(lower(fmodel), upper(fmodel), grad_callback=lambda gs: [g * float("inf") for g in gs])
    with bda.innerloop_ctx(model, inner) as (fmodel, diffopt):
        diffopt.check()  # nothing yet


@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt, StopIteration])
def test_an_exception_in_the_body_is_not_masked(error: type[BaseException]) -> None:
    model = mlp()
    with (
        pytest.raises((error, RuntimeError) if error is StopIteration else error) as caught,
        bda.innerloop_ctx(model, bda.BDAInnerOptimizer(model.parameters(), lr=0.1)) as (fmodel, diffopt),
    ):
        diffopt.step(lower(fmodel) * float("nan"))
        raise error("mine")
    assert not isinstance(caught.value, FloatingPointError)


def test_a_step_that_fails_leaves_the_iterate() -> None:
    model = mlp()
    inner = bda.BDAInnerOptimizer(model.parameters(), lr=0.1, rule=optim.Adam)
    with bda.innerloop_ctx(model, inner) as (fmodel, diffopt):
        diffopt.step(lower(fmodel))
        params, memory = fmodel.params, fmodel._state.rule

        def broken(gradients: Any) -> Any:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            diffopt.step(lower(fmodel), grad_callback=broken)
        assert all(fmodel.params[name] is p for name, p in params.items())
        assert fmodel._state.rule is memory
        assert diffopt.k == 1
        diffopt.step(lower(fmodel))
    assert diffopt.k == 2


# `higher` itself.


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x.unsqueeze(-1).expand(*x.shape, 3))[0][:, -1])


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv1d(1, 4, 2), nn.BatchNorm1d(4), nn.ReLU(), nn.Conv1d(4, 3, 2))
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x.unsqueeze(1)).flatten(1))


@pytest.mark.parametrize("make", [mlp, Convolutional, Recurrent], ids=["mlp", "conv", "lstm"])
@pytest.mark.parametrize(
    "settings",
    [
        {"lr": 0.1},
        {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1},
        {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    ],
    ids=["plain", "momentum", "nesterov"],
)
def test_hypergradients_equal_those_of_higher(make: Callable[[], nn.Module], settings: dict[str, Any]) -> None:
    higher = pytest.importorskip("higher")
    model = make()
    hyper, rate = torch.tensor(1.3, requires_grad=True), torch.tensor(0.1, requires_grad=True)
    wanted = [*model.parameters(), hyper, rate]
    results = []
    for context in (higher.innerloop_ctx, bda.innerloop_ctx):
        optimizer = optim.SGD(model.parameters(), **settings)
        if context is bda.innerloop_ctx:
            optimizer = bda.BDAInnerOptimizer(model.parameters(), **settings)
        with context(model, optimizer, copy_initial_weights=False, override={"lr": [rate]}) as (fmodel, diffopt):
            for _ in range(K):
                diffopt.step(lower(fmodel, hyper))
            results.append((list(fmodel.parameters()), torch.autograd.grad(upper(fmodel), wanted)))
    torch.testing.assert_close(results[1][0], results[0][0], **TIGHT)
    torch.testing.assert_close(results[1][1], results[0][1], **TIGHT)


def test_hypergradients_of_adam_equal_those_of_higher_where_it_is_right() -> None:
    """higher places eps differently: both agree as eps becomes small."""
    higher = pytest.importorskip("higher")
    model = mlp()
    wanted = list(model.parameters())
    results = []
    for context in (higher.innerloop_ctx, bda.innerloop_ctx):
        optimizer = optim.Adam(model.parameters(), lr=0.01, eps=1e-14)
        with context(model, optimizer, copy_initial_weights=False) as (fmodel, diffopt):
            for _ in range(K):
                diffopt.step(lower(fmodel))
            results.append(torch.autograd.grad(upper(fmodel), wanted))
    torch.testing.assert_close(results[1], results[0], rtol=1e-8, atol=1e-10)
