"""torchopt: its transformations as our rules, BDA as its transformation, each against the installed torchopt."""

from __future__ import annotations

import contextlib
import copy
import importlib
import io
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import scripts
import torch
from problems import mlp
from torch import Tensor, nn, optim
from torch.nn.attention import SDPBackend, sdpa_kernel

import bda_optim as bda
from bda_optim._step.rules.resolve import resolve
from bda_optim._step.rules.transformation import Transformation

torchopt = pytest.importorskip("torchopt")

from bda_optim.compat.torchopt import BDAState, FuncBDA, MetaBDA, with_upper  # noqa: E402
from bda_optim.compat.torchopt import bda as transformation  # noqa: E402

STEPS = 5


@pytest.fixture(autouse=True)
def _in_float64() -> None:
    """torchopt computes bias corrections in the default dtype, so 1e-12 can only be had in this one."""
    torch.set_default_dtype(torch.float64)


# torchopt's name of a rule -> the settings that it and torch.optim share, torch's class, settings of each alone.
# `initial_scale` and Adadelta's eps keep derivatives of roots moderate: torchopt's are not safe at 0.
Case = tuple[Callable[..., Any], type[optim.Optimizer], dict[str, Any]]
RULES: dict[str, Case] = {
    "sgd": (torchopt.sgd, optim.SGD, {"lr": 0.1}),
    "sgd_weight_decay": (torchopt.sgd, optim.SGD, {"lr": 0.1, "weight_decay": 0.1}),
    "sgd_maximize": (torchopt.sgd, optim.SGD, {"lr": 0.01, "weight_decay": 0.1, "maximize": True}),
    "sgd_momentum": (torchopt.sgd, optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.05}),
    "sgd_nesterov": (torchopt.sgd, optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    "adam": (torchopt.adam, optim.Adam, {"lr": 0.01, "betas": (0.8, 0.95)}),
    "adam_weight_decay": (torchopt.adam, optim.Adam, {"lr": 0.01, "weight_decay": 0.1}),
    "adamw": (torchopt.adamw, optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "adamax": (torchopt.adamax, optim.Adamax, {"lr": 0.01, "eps": 1e-6}),
    "adagrad": (torchopt.adagrad, optim.Adagrad, {"lr": 0.02, "lr_decay": 0.1, "initial_accumulator_value": 0.1}),
    "adadelta": (torchopt.adadelta, optim.Adadelta, {"lr": 0.5, "rho": 0.9, "eps": 1e-4}),
    "rmsprop": (torchopt.rmsprop, optim.RMSprop, {"lr": 0.005, "alpha": 0.9, "eps": 1e-4}),
    "rmsprop_centered": (
        torchopt.rmsprop,
        optim.RMSprop,
        {"lr": 0.005, "centered": True, "momentum": 0.9, "eps": 1e-2},
    ),
    "radam": (torchopt.radam, optim.RAdam, {"lr": 0.01, "betas": (0.9, 0.6), "eps": 1e-6}),
}


def theirs(name: str, **changes: Any) -> Any:
    factory, _, settings = RULES[name]
    return factory(**{**settings, **changes})


def ours(name: str) -> dict[str, Any]:
    """The keyword arguments of BDAInnerOptimizer that mean the same, with our own rule."""
    _, kind, settings = RULES[name]
    return {"rule": kind, **{"rule_alpha" if key == "alpha" else key: value for key, value in settings.items()}}


# --- networks ---------------------------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x.reshape(len(x), 4, 3))[0][:, -1])


class Attentive(nn.Module):
    """Without biases: those of the keys have gradients that are rounding errors, on which Adam is chaotic."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, activation="gelu", batch_first=True, bias=False)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x.reshape(len(x), 3, 4)).mean(1))


def convolutional() -> nn.Module:
    conv = nn.Conv2d(1, 3, 2, bias=False)
    return nn.Sequential(nn.Unflatten(1, (1, 3, 4)), conv, nn.BatchNorm2d(3), nn.Tanh(), nn.Flatten(), nn.Linear(18, 2))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: mlp(12, 6, 2),
    "conv_batchnorm": convolutional,
    "lstm": Recurrent,
    "transformer": Attentive,
}


class Problem:
    """Training data whose samples are weighted by x (the upper variables), and clean data."""

    def __init__(self, network: str = "mlp") -> None:
        torch.manual_seed(1)
        self.net = NETWORKS[network]()
        self.x = (0.3 * torch.randn(8)).requires_grad_()
        self.data = torch.randn(2, 8, 12), torch.randn(2, 8, 2)

    def lower(self, net: Callable[[Tensor], Tensor], x: Tensor, batch: Any = None) -> Tensor:
        return (x.exp() * (net(self.data[0][0]) - self.data[1][0]).square().sum(1)).mean()

    def upper(self, net: Callable[[Tensor], Tensor], x: Any = None, batch: Any = None) -> Tensor:
        return (net(self.data[0][1]) - self.data[1][1]).square().mean()


Outcome = tuple[list[Tensor], list[Tensor]]


def with_torchopt(problem: Problem, impl: Any, *more: Tensor, steps: int = STEPS) -> Outcome:
    """y_K, and the derivatives of F(y_K) by x, by y_0 and by what else is given, all by torchopt's MetaOptimizer."""
    net = copy.deepcopy(problem.net)
    start = [*net.parameters()]
    optimizer = torchopt.MetaOptimizer(net, impl)
    with sdpa_kernel(SDPBackend.MATH):  # the other kernels have no second derivative
        for _ in range(steps):
            optimizer.step(problem.lower(net, problem.x))
        grads = torch.autograd.grad(problem.upper(net), [problem.x, *start, *more])
    return [*net.parameters()], list(grads)


def unrolled(problem: Problem, *more: Tensor, steps: int = STEPS, adjoint: Any = None, **settings: Any) -> Outcome:
    """The same by `unroll`."""
    inner = bda.BDAInnerOptimizer(problem.net.parameters(), **settings)
    fmodel = inner.unroll(
        problem.net, problem.lower, hyper=problem.x, steps=steps, adjoint=adjoint, copy_initial_weights=False
    )
    wanted = [problem.x, *problem.net.parameters(), *more]
    grads = torch.autograd.grad(problem.upper(fmodel), wanted, allow_unused=True, materialize_grads=True)
    return [*fmodel.params.values()], list(grads)


def error(got: Outcome, want: Outcome) -> float:
    """The largest difference of iterates and derivatives, relative to the largest number of each kind."""
    found = []
    for mine, other in zip(got, want, strict=True):
        a, b = (torch.cat([t.detach().flatten() for t in tensors]) for tensors in (mine, other))
        assert torch.isfinite(b).all() and b.abs().max() > 1e-6, "a comparison with nothing proves nothing"
        found.append(float((a - b).abs().max() / b.abs().max()))
    return max(found)


# --- torchopt transformations as rules --------------------------------------------------------------------------------


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("name", RULES)
def test_a_transformation_as_a_rule_gives_torchopts_numbers(name: str, network: str) -> None:
    problem = Problem(network)
    before = copy.deepcopy(problem.net.state_dict())
    want = with_torchopt(problem, theirs(name))
    assert error(unrolled(problem, rule=theirs(name)), want) < 1e-12
    after = problem.net.state_dict()
    assert all(torch.equal(after[key], value) for key, value in before.items())


@pytest.mark.parametrize("name", RULES)
def test_our_rules_give_torchopts_numbers(name: str) -> None:
    problem = Problem()
    assert error(unrolled(problem, **ours(name)), with_torchopt(problem, theirs(name))) < 1e-10


@pytest.mark.parametrize("name", ["sgd", "sgd_momentum", "adam", "rmsprop", "adamw"])
def test_in_float32(name: str) -> None:
    torch.set_default_dtype(torch.float32)
    problem = Problem()
    assert error(unrolled(problem, rule=theirs(name)), with_torchopt(problem, theirs(name))) < 1e-6


@pytest.mark.parametrize("name", ["sgd", "sgd_momentum", "adam", "adamax"])
def test_a_learnable_rate_inside_a_transformation(name: str) -> None:
    problem, lr = Problem(), torch.tensor(0.02, requires_grad=True)
    want = with_torchopt(problem, theirs(name, lr=lr), lr)
    assert error(unrolled(problem, lr, rule=theirs(name, lr=lr)), want) < 1e-12
    with pytest.raises(ValueError, match="hyper="):  # replaying would lose its derivative
        unrolled(problem, rule=theirs(name, lr=lr), adjoint=bda.Checkpointed())


def chains() -> dict[str, Callable[[], Any]]:
    halving = torchopt.schedule.exponential_decay(0.1, transition_steps=1, decay_rate=0.5)
    hook = torchopt.register_hook(torchopt.hook.zero_nan_hook)
    return {
        "clipped": lambda: torchopt.chain(torchopt.clip_grad_norm(0.1), torchopt.sgd(0.1)),
        "clipped_late": lambda: torchopt.chain(torchopt.adam(0.01), torchopt.clip_grad_norm(0.01)),
        "nan_to_num": lambda: torchopt.chain(torchopt.nan_to_num(0.0), torchopt.adam(0.01)),
        "hooked": lambda: torchopt.chain(hook, torchopt.adam(0.01)),
        "flat": lambda: torchopt.chain.flat(torchopt.clip_grad_norm(1.0), torchopt.sgd(0.1, momentum=0.5)),
        "scheduled": lambda: torchopt.sgd(halving),
        "masked": lambda: torchopt.chain(  # torchopt.adamw(mask=...) raises AttributeError in 0.7.3
            torchopt.transform.scale_by_adam(),
            torchopt.transform.add_decayed_weights(
                0.5, mask=lambda ps: tuple(p is not None and p.ndim > 1 for p in ps)
            ),
            torchopt.transform.scale(-0.01),
        ),
        "accelerated": lambda: torchopt.adam(0.01, use_accelerated_op=True),
        "grown_moments": lambda: torchopt.adam(0.01, moment_requires_grad=True),
    }


@pytest.mark.parametrize("name", chains())
def test_chains(name: str) -> None:
    problem, make = Problem(), chains()[name]
    want = with_torchopt(problem, make())
    assert error(unrolled(problem, rule=make()), want) < 1e-12
    assert error(unrolled(problem, rule=make(), adjoint=bda.Checkpointed()), want) < 1e-12


@pytest.mark.parametrize("name", [*RULES, *chains()])
def test_all_adjoints_agree(name: str) -> None:
    rule = theirs(name) if name in RULES else chains()[name]()
    start = {"a": torch.tensor([0.7, -0.4]), "b": torch.tensor(0.3)}
    x = torch.tensor([0.5, -0.2])

    def lower(y: Any, x: Tensor, scale: Any) -> Tensor:
        return (1 if scale is None else scale) * ((y["a"] - x).square().sum() + (y["b"] * y["a"].sum() - x[0]).cosh())

    def upper(y: Any, x: Tensor, batch: Any) -> Tensor:
        return (y["a"] - 1).square().sum() + (y["b"] - x[1]).square()

    def grad(adjoint: Any, **more: Any) -> Tensor:
        settings = dict(steps=7, rule=rule, alpha=bda.harmonic(0.4), upper_lr=0.05, adjoint=adjoint, **more)
        return bda.hypergradient(lower, upper, start, x, **settings).grad

    want = grad(bda.Unroll())
    adjoints: list[Any] = [bda.Checkpointed(), bda.Checkpointed(slots=2), bda.Truncated(last=7)]
    if name != "accelerated":  # torchopt's fused operation cannot be differentiated a third time
        adjoints.append(bda.ForwardMode())
    for adjoint in adjoints:
        torch.testing.assert_close(grad(adjoint), want, rtol=1e-11, atol=1e-12)
    many = grad(bda.Unroll(), tasks=2, batches=[torch.tensor([1.0, 0.5])] * 7)
    one_by_one = [grad(bda.Unroll(), batches=[torch.tensor(scale)] * 7) for scale in (1.0, 0.5)]
    torch.testing.assert_close(many, sum(one_by_one), rtol=1e-11, atol=1e-12)


def test_the_hypergradient_of_a_transformation_is_that_of_finite_differences() -> None:
    problem = Problem()
    rule = torchopt.adam(0.05, eps_root=1e-8)
    (_, (grad, *_)), direction = unrolled(problem, rule=rule), torch.randn(8)

    def value(shift: float) -> Tensor:
        inner = bda.BDAInnerOptimizer(problem.net.parameters(), rule=rule)
        return problem.upper(
            inner.unroll(problem.net, problem.lower, hyper=problem.x.detach() + shift * direction, steps=STEPS)
        )

    quotient = (value(1e-5) - value(-1e-5)) / 2e-5
    torch.testing.assert_close(grad @ direction, quotient.detach(), rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("name", RULES)
def test_first_order_and_truncation(name: str) -> None:
    problem = Problem()
    got, want = (unrolled(problem, adjoint=bda.FirstOrder(), **rule) for rule in ({"rule": theirs(name)}, ours(name)))
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)
    grads = []
    for rule in ({"rule": theirs(name)}, ours(name)):
        inner = bda.BDAInnerOptimizer(problem.net.parameters(), **rule)
        fmodel = inner.unroll(problem.net, problem.lower, hyper=problem.x, steps=5, adjoint=bda.Truncated(last=2))
        grads.append(torch.autograd.grad(problem.upper(fmodel), problem.x)[0])
    torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-14)


def test_innerloop_ctx_takes_a_transformation() -> None:
    problem = Problem()
    want = with_torchopt(problem, theirs("adam"))
    inner = bda.BDAInnerOptimizer(problem.net.parameters(), rule=theirs("adam"))
    with bda.innerloop_ctx(problem.net, inner, copy_initial_weights=False) as (fmodel, diffopt):
        for _ in range(STEPS):
            diffopt.step(problem.lower(fmodel, problem.x))
        grads = torch.autograd.grad(problem.upper(fmodel), [problem.x, *problem.net.parameters()])
    assert error(([*fmodel.params.values()], list(grads)), want) < 1e-12


@pytest.mark.parametrize("name", ["sgd", "sgd_momentum", "adam", "radam"])
def test_the_in_place_step_is_that_of_torchopts_optimizer(name: str) -> None:
    problem = Problem()
    other = copy.deepcopy(problem.net)
    inner = bda.BDAInnerOptimizer(problem.net.parameters(), rule=theirs(name))
    reference = torchopt.Optimizer(other.parameters(), theirs(name))
    for _ in range(3):
        for net, optimizer in ((problem.net, inner), (other, reference)):
            optimizer.zero_grad()
            problem.lower(net, problem.x.detach()).backward()
            optimizer.step()
    for p, q in zip(problem.net.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("name", ["sgd", "sgd_momentum", "adam", "radam", "adagrad"])
def test_the_state_is_saved_loaded_and_carried_over_windows(name: str) -> None:
    torch.set_default_dtype(torch.float32)  # a state_dict casts to this; the counts are integers and must stay so
    problem = Problem()
    inner = bda.BDAInnerOptimizer(problem.net.parameters(), rule=theirs(name))
    for _ in range(2):
        inner.commit(inner.unroll(problem.net, problem.lower, hyper=problem.x.detach(), steps=2))
    stored = io.BytesIO()
    torch.save((problem.net.state_dict(), inner.state_dict()), stored)
    stored.seek(0)
    whole = with_torchopt(Problem(), theirs(name), steps=6)[0]
    second = Problem()
    other = bda.BDAInnerOptimizer(second.net.parameters(), rule=theirs(name))
    for net, optimizer, loaded in (
        (second.net, other, torch.load(stored, weights_only=True)),
        (problem.net, inner, None),
    ):
        if loaded is not None:
            net.load_state_dict(loaded[0])
            optimizer.load_state_dict(loaded[1])
        fmodel = optimizer.unroll(net, problem.lower, hyper=problem.x.detach(), steps=2)
        for got, want in zip(fmodel.params.values(), whole, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-7)


def test_a_state_of_another_transformation_is_refused() -> None:
    problem = Problem()
    first = bda.BDAInnerOptimizer(problem.net.parameters(), rule=theirs("sgd_momentum"))
    first.commit(first.unroll(problem.net, problem.lower, hyper=problem.x.detach(), steps=1))
    second = bda.BDAInnerOptimizer(problem.net.parameters(), rule=theirs("adam"))
    second.load_state_dict(first.state_dict())
    with pytest.raises(ValueError, match="ScaleByAdamState; got one of TraceState"):
        second.unroll(problem.net, problem.lower, hyper=problem.x, steps=1)


def test_groups_copies_and_equality() -> None:
    problem, rule = Problem(), torchopt.chain(torchopt.clip_grad_norm(1.0), torchopt.sgd(0.1))
    groups = [{"params": layer.parameters()} for layer in (problem.net[0], problem.net[2])]
    inner = bda.BDAInnerOptimizer([*groups[:1], {**groups[1], "alpha": 0.5, "upper_lr": 0.1}], rule=rule)
    fmodel = inner.unroll(problem.net, problem.lower, problem.upper, hyper=problem.x, steps=2)
    assert torch.autograd.grad(problem.upper(fmodel), problem.x)[0].norm() > 0
    twin = copy.deepcopy(inner)
    assert twin.rule is inner.rule and [group["alpha"] for group in twin.param_groups] == [0.0, 0.5]
    assert resolve(rule) == Transformation(rule) != Transformation(torchopt.sgd(0.1))


def test_an_optax_like_object_will_do() -> None:
    class Signs:
        def init(self, params: Any) -> tuple[()]:
            return ()

        def update(self, updates: Any, state: Any, *, params: Any, inplace: bool) -> Any:
            return tuple(-0.5 * g.sign() for g in updates), state

    y = bda.rollout(lambda y, x, b: (y * y).sum(), None, torch.tensor([3.0, -4.0]), steps=2, rule=Signs())
    assert y.tolist() == [2.0, -3.0]


def test_a_prox_takes_lr_as_its_step() -> None:
    start, x = torch.tensor([0.5, -0.3, 0.01]), torch.tensor(0.2)
    common = dict(steps=4, lr=0.1, upper_lr=0.3, alpha=0.2, prox=bda.prox.l1(0.5))
    losses = (lambda y, x, b: (y - x).square().sum(), lambda y, x, b: (y * x).sum())
    got = bda.hypergradient(*losses, start, x, rule=torchopt.sgd(0.1), **common)
    want = bda.hypergradient(*losses, start, x, **common)
    torch.testing.assert_close((got.params, got.grad), (want.params, want.grad), rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"lr": 0.1}, "has its own rate"),
        ({"alpha": 0.5}, "Pass `upper_lr`"),
        ({"alpha": bda.harmonic(0.5)}, "Pass `upper_lr`"),
        ({"prox": bda.prox.l1(0.1)}, "Pass it as `lr` too"),
        ({"lr": -1.0, "prox": bda.prox.l1(0.1)}, "at least 0"),
        ({"rule": torchopt.sgd(0.1, momentum=0.9, dampening=0.5)}, "pure function"),
        ({"rule": torchopt.base.GradientTransformation(lambda p: 0, lambda g, s, **_: (g, (s, s)))}, "structure"),
        ({"momentum": 0.9}, "no setting `momentum`"),
        ({"rule": torchopt.adam}, r"such as `torchopt.adam\(lr=0.1\)`"),
        ({"rule": torchopt.MetaAdam}, r"such as `torchopt.adam\(lr=0.1\)`"),
    ],
)
def test_what_a_transformation_refuses(settings: dict[str, Any], match: str) -> None:
    problem = Problem()
    with pytest.raises((TypeError, ValueError), match=match):
        inner = bda.BDAInnerOptimizer(problem.net.parameters(), **{"rule": torchopt.sgd(0.1), **settings})
        inner.unroll(problem.net, problem.lower, problem.upper, hyper=problem.x, steps=1)


def test_the_lower_point_needs_a_rate() -> None:
    problem = Problem()
    inner = bda.BDAInnerOptimizer(problem.net.parameters(), rule=torchopt.sgd(0.1))
    fmodel = inner.unroll(problem.net, problem.lower, hyper=problem.x, steps=1)
    with pytest.raises(ValueError, match=r"bda_optim\.lower_point"):
        fmodel.lower_point(problem.lower, problem.x)


# --- BDA as a torchopt transformation ---------------------------------------------------------------------------------

Y0, X = (0.7, -0.4, 1.1), 0.3


def f(y: Tensor, x: Tensor, batch: Any = None) -> Tensor:
    return (y[0] - x).square() + (y[1] * x).sin() + 0.5 * y[:2].square().sum() + (y[2] * y[0]).cosh()


def big_f(y: Tensor, x: Tensor, batch: Any = None) -> Tensor:
    return (y - 1).square().sum() + (x * y[2]).exp()


BDA_SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"lr": 0.1},
    "harmonic": {"lr": 0.1, "upper_lr": 0.2, "alpha": bda.harmonic(0.5)},
    "follows_lr": {"lr": 0.1, "alpha": 0.3},
    "momentum": {"lr": 0.1, "alpha": 0.3, "momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1},
    "prox": {"lr": 0.1, "alpha": bda.harmonic(0.9), "prox": bda.prox.l1(0.7)},
    "simplex": {"lr": 0.1, "alpha": 0.1, "prox": bda.prox.simplex()},
    "per_element": {"lr": [torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64)], "upper_lr": 0.1, "alpha": 0.5},
    **{
        kind.__name__: {"lr": 0.1, "upper_lr": 0.2, "alpha": bda.harmonic(0.5), "rule": kind}
        for kind in (
            optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam, optim.RMSprop, optim.Rprop, optim.Adagrad,
            optim.Adadelta, optim.ASGD, optim.Adafactor,
        )
    },
    **{
        f"torchopt_{name}": {"rule": theirs(name), "upper_lr": 0.2, "alpha": bda.harmonic(0.5)}
        for name in ("sgd_momentum", "adam", "radam")
    },
}  # fmt: skip


def by_rollout(x: Tensor, y: Tensor, settings: dict[str, Any]) -> Tensor:
    return bda.rollout(f, big_f, y, x, steps=STEPS, **settings)


def by_hand(x: Tensor, y: Tensor, impl: Any) -> Tensor:
    params = {"y": y}
    state = impl.init(params)
    for _ in range(STEPS):
        lower, upper = (
            {"y": torch.autograd.grad(loss(params["y"], x), params["y"], create_graph=True)[0]} for loss in (f, big_f)
        )
        updates, state = impl.update(lower, state, params=params, inplace=False, upper_updates=upper)
        params = torchopt.apply_updates(params, updates, inplace=False)
    return params["y"]


def by_func(x: Tensor, y: Tensor, impl: Any) -> Tensor:
    optimizer, params = FuncBDA(impl), (y,)
    for _ in range(STEPS):
        params = optimizer.step(f(params[0], x), params, upper_loss=big_f(params[0], x))
    return params[0]


class Vector(nn.Module):
    def __init__(self, y: Tensor) -> None:
        super().__init__()
        self.y = nn.Parameter(y)


def by_meta(x: Tensor, y: Tensor, impl: Any) -> Tensor:
    net = Vector(torch.zeros(3))
    net._parameters["y"] = y
    optimizer = MetaBDA(net, impl)
    for _ in range(STEPS):
        optimizer.step(f(net.y, x), big_f(net.y, x))
    return net.y


@pytest.mark.parametrize("name", BDA_SETTINGS)
def test_bda_by_hand_functional_and_meta_give_the_rollout(name: str) -> None:
    settings = BDA_SETTINGS[name]
    x, y0 = torch.tensor(X, requires_grad=True), torch.tensor(Y0, requires_grad=True)

    def outcome(y: Tensor) -> Outcome:
        return [y], list(torch.autograd.grad(big_f(y, x), (x, y0)))

    want = outcome(by_rollout(x, y0, settings))
    for road in (by_hand, by_func, by_meta):
        assert error(outcome(road(x, y0 * 1, transformation(**settings))), want) < 1e-12, road.__name__


def test_bda_reaches_the_papers_hypergradient() -> None:
    x, y = torch.zeros((), requires_grad=True), torch.tensor([2.0, 2.0], requires_grad=True)

    def upper(y: Tensor) -> Tensor:
        return 0.5 * (x - y[1]) ** 2 + 0.5 * (y[0] - 1) ** 2

    optimizer, params = FuncBDA(transformation(0.2, upper_lr=0.7, alpha=bda.harmonic(0.5))), (y,)
    for _ in range(16):
        params = optimizer.step(0.5 * params[0][0] ** 2 - x * params[0][0], params, upper_loss=upper(params[0]))
    (grad,) = torch.autograd.grad(upper(*params), x)
    assert grad.item() == pytest.approx(-0.862081933783990, abs=1e-14)


def test_plain_bda_is_torchopts_sgd_to_the_bit() -> None:
    torch.set_default_dtype(torch.float32)
    problem = Problem()
    got, want = (with_torchopt(problem, impl) for impl in (transformation(0.1), torchopt.sgd(0.1)))
    for a, b in zip([*got[0], *got[1]], [*want[0], *want[1]], strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", RULES)
def test_bda_without_an_upper_level_fits_torchopts_own_classes(name: str) -> None:
    settings = ours(name)
    problem = Problem()
    want = with_torchopt(problem, theirs(name))
    assert error(with_torchopt(problem, transformation(**settings)), want) < 1e-10
    nets = [copy.deepcopy(problem.net) for _ in range(2)]
    for net, impl in zip(nets, (transformation(**settings), theirs(name)), strict=True):
        optimizer = torchopt.Optimizer(net.parameters(), impl)
        for _ in range(2):
            optimizer.zero_grad()
            problem.lower(net, problem.x.detach()).backward()
            optimizer.step()
    for p, q in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("flat", [False, True])
def test_what_stands_before_and_after_bda_in_a_chain(flat: bool) -> None:
    chain = torchopt.chain.flat if flat else torchopt.chain
    middle = transformation(0.1, upper_lr=0.2, alpha=0.25)
    impl = chain(torchopt.clip_grad_norm(1.0), middle, torchopt.transform.scale(2.0))
    params = {"b": torch.zeros(2), "a": torch.zeros(1), "c": torch.zeros(1), "none": None, "still": torch.zeros(1)}
    lower = {"b": torch.tensor([3.0, 0.0]), "a": torch.tensor([4.0]), "c": None, "none": None, "still": None}
    upper = {"b": None, "a": torch.tensor([10.0]), "c": torch.tensor([1.0]), "none": None, "still": None}
    state = with_upper(impl.init(params), upper)
    updates, state = impl.update(lower, state, params=params, inplace=False)
    want = {
        "b": [-2 * 0.75 * 0.1 * 3 / 5, 0.0],
        "a": [-2 * (0.25 * 0.2 * 10 + 0.75 * 0.1 * 4 / 5)],
        "c": [-2 * 0.25 * 0.2],
    }
    assert updates.keys() == params.keys() and updates["none"] is updates["still"] is None
    for key, value in want.items():
        torch.testing.assert_close(updates[key], torch.tensor(value), rtol=1e-5, atol=0.0)
    with pytest.raises(ValueError, match="upper gradients are needed"):  # they are used once
        impl.update(lower, state, params=params, inplace=False)


def test_chains_of_bda_in_the_optimizers() -> None:
    def impl() -> Any:
        return torchopt.chain(torchopt.clip_grad_norm(1e3), transformation(0.1, upper_lr=0.2, alpha=bda.harmonic(0.5)))

    x, y0 = torch.tensor(X, requires_grad=True), torch.tensor(Y0, requires_grad=True)
    want = by_rollout(x, y0, BDA_SETTINGS["harmonic"])
    for road in (by_func, by_meta):
        torch.testing.assert_close(road(x, y0 * 1, impl()), want, rtol=1e-12, atol=0.0)


def test_learnable_settings_and_schedules_of_rates() -> None:
    x, y0 = torch.tensor(X), torch.tensor(Y0, requires_grad=True)
    leaves = [torch.tensor(value, requires_grad=True) for value in (0.1, 0.2, 0.4, 0.05)]

    def settings() -> dict[str, Any]:
        lr, upper_lr, c, strength = leaves
        return {"lr": lr, "upper_lr": upper_lr, "alpha": bda.harmonic(c), "prox": bda.prox.l1(strength)}

    outcomes = []
    for y in (by_rollout(x, y0, settings()), by_func(x, y0, transformation(**settings()))):
        outcomes.append(([y], list(torch.autograd.grad(big_f(y, x), leaves))))
    assert error(*outcomes) < 1e-12
    rate = torchopt.schedule.linear_schedule(0.1, 0.02, 4)
    got = by_func(x, y0, transformation(rate, upper_lr=rate, alpha=0.3))
    y = y0
    for k in range(STEPS):
        y = bda.rollout(f, big_f, y, x, steps=1, lr=float(rate(k)), alpha=0.3)
    torch.testing.assert_close(got, y, rtol=1e-12, atol=0.0)


def test_several_modules_and_parameters_that_a_loss_does_not_use() -> None:
    torch.manual_seed(0)
    nets = nn.ModuleList([nn.Linear(2, 1), nn.Linear(2, 1)])
    start = copy.deepcopy(nets)
    optimizer = MetaBDA(nets[0], transformation(0.1, upper_lr=0.2, alpha=0.5))
    optimizer.add_param_group(nets[1])
    ones = torch.ones(2)
    optimizer.step(nets[0](ones).sum(), nets[1](ones).sum())
    torch.testing.assert_close(nets[0].weight, start[0].weight - 0.05, rtol=1e-13, atol=0.0)
    torch.testing.assert_close(nets[1].weight, start[1].weight - 0.1, rtol=1e-13, atol=0.0)


def test_the_upper_loss_may_be_left_out_where_alpha_is_0() -> None:
    x, y0 = torch.tensor(X, requires_grad=True), torch.tensor(Y0, requires_grad=True)
    net, impl = Vector(torch.tensor(Y0)), transformation(0.1)
    MetaBDA(net, impl).step(f(net.y, x))
    (y,) = FuncBDA(impl).step(f(y0, x), (y0,))
    (plain,) = torchopt.FuncOptimizer(impl).step(f(y0, x), (y0,))
    want = bda.rollout(f, None, y0, x, steps=1, lr=0.1)
    torch.testing.assert_close((y, plain, net.y), (want, want, want), rtol=1e-13, atol=0.0)


def test_in_place_updates() -> None:
    optimizer = FuncBDA(transformation(0.1, upper_lr=0.2, alpha=0.5), inplace=True)
    y = torch.tensor(Y0, requires_grad=True)
    (after,) = optimizer.step(y.sum(), (y,), upper_loss=2 * y.sum())
    assert after is y
    torch.testing.assert_close(y.detach(), torch.tensor(Y0) - 0.25)


# --- torchopt's helpers on the state ----------------------------------------------------------------------------------


def _tensors(tree: Any) -> list[Tensor]:
    leaves = torchopt.pytree.tree_leaves(tree)
    assert all(isinstance(leaf, Tensor) for leaf in leaves), "torchopt takes a state to be a tree of tensors"
    return leaves


@pytest.mark.parametrize("by", ["reference", "copy", "deepcopy"])
@pytest.mark.parametrize("name", ["harmonic", "momentum", "Adam", "NAdam", "torchopt_adam", "torchopt_radam"])
def test_extract_and_recover(name: str, by: str) -> None:
    x, impl = torch.tensor(X, requires_grad=True), transformation(**BDA_SETTINGS[name])
    net = Vector(torch.tensor(Y0))
    optimizer = MetaBDA(net, impl)

    def step() -> Tensor:
        optimizer.step(f(net.y, x), big_f(net.y, x))
        return net.y

    step()
    module, state = (torchopt.extract_state_dict(target, by=by) for target in (net, optimizer))
    _tensors(state)
    first = [step() for _ in range(2)][-1]
    assert int(optimizer.state_dict()[0].k) == 3
    torchopt.recover_state_dict(net, module)
    torchopt.recover_state_dict(optimizer, state)
    assert int(optimizer.state_dict()[0].k) == 1
    second = [step() for _ in range(2)][-1]
    assert torch.equal(first, second)
    if by != "deepcopy":
        grads = [torch.autograd.grad(big_f(y, x), x, retain_graph=True)[0] for y in (first, second)]
        torch.testing.assert_close(*grads, rtol=1e-13, atol=0.0)


@pytest.mark.parametrize("name", ["momentum", "Adam", "torchopt_adam"])
def test_stop_gradient_and_clones(name: str) -> None:
    x, y = torch.tensor(X, requires_grad=True), torch.tensor(Y0, requires_grad=True)
    optimizer = FuncBDA(transformation(**BDA_SETTINGS[name]))
    params = optimizer.step(f(y, x), (y,), upper_loss=big_f(y, x))
    state = optimizer.state_dict()
    assert any(t.grad_fn is not None for t in _tensors(state))
    clone = torchopt.module_clone(state, by="deepcopy")
    assert isinstance(clone, BDAState) and not any(t.grad_fn for t in _tensors(clone))
    torchopt.stop_gradient((params, state))
    assert not any(t.grad_fn for t in _tensors((params, state)))
    loss = f(params[0], x)
    after = optimizer.step(loss, params, upper_loss=big_f(params[0], x))
    optimizer.load_state_dict(clone)
    again = optimizer.step(loss, params, upper_loss=big_f(params[0], x))
    assert torch.equal(after[0], again[0]) and int(optimizer.state_dict().k) == 2
    net = Vector(torch.tensor(Y0))
    meta = MetaBDA(net, transformation(**BDA_SETTINGS[name]))
    meta.step(f(net.y, x), big_f(net.y, x))
    torchopt.stop_gradient(meta)
    torchopt.stop_gradient(net)
    assert not any(t.grad_fn for t in _tensors(meta.state_dict()))
    assert isinstance(torchopt.module_clone(meta), MetaBDA)


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"lr": -0.1}, "at least 0"),
        ({"lr": 0.1, "alpha": 1.5}, r"\[0, 1\)"),
        ({"lr": 0.1, "adjoint": bda.Checkpointed()}, "no setting `adjoint`"),
        ({"lr": 0.1, "upper_lr": -1.0}, "upper_lr"),
        ({"lr": 0.1, "prox": "l1"}, "proximal map"),
        ({"lr": 0.1, "rule": torchopt.sgd(0.1)}, "has its own rate"),
        ({"rule": torchopt.sgd(0.1), "alpha": 0.5}, "Pass `upper_lr`"),
        ({"rule": optim.LBFGS}, "LBFGS"),
    ],
)
def test_what_bda_refuses(settings: dict[str, Any], match: str) -> None:
    with pytest.raises((TypeError, ValueError), match=match):
        transformation(**settings)


def test_what_updates_refuse() -> None:
    params, grads = (torch.ones(2),), (torch.ones(2),)
    impl = transformation(0.1, alpha=0.5)
    state = impl.init(params)
    with pytest.raises(ValueError, match="params=params"):
        impl.update(grads, state)
    with pytest.raises(ValueError, match=r"k=1, so the upper gradients are needed.*MetaBDA"):
        torchopt.MetaOptimizer(Vector(torch.ones(2)), impl).step(
            torch.ones(2).sum() + 0 * params[0].sum().requires_grad_()
        )
    with pytest.raises(ValueError, match="same tree"):
        impl.update(grads, state, params=params, upper_updates=(*grads, *grads))
    with pytest.raises(ValueError, match="extrapolated point"):
        fista = transformation(0.1, rule=bda.FISTA)
        fista.update(grads, fista.init(params), params=params)
    with pytest.raises(ValueError, match="function of hyper"):
        shrinking = transformation(0.1, prox=bda.prox.l1(lambda hyper: hyper))
        shrinking.update(grads, shrinking.init(params), params=params)
    with pytest.raises(ValueError, match="one tensor per parameter"):
        transformation([torch.ones(3)]).init(params)
    with pytest.raises(ValueError, match="with 0 of them"):
        MetaBDA(Vector(torch.ones(2)), torchopt.sgd(0.1)).step(torch.ones(()))
    with pytest.raises(ValueError, match="with 2 of them"):
        with_upper((state, state), grads)
    net = Vector(torch.ones(2))
    with pytest.raises(ValueError, match="upper loss must be a scalar"):
        MetaBDA(net, impl).step(net.y.sum(), net.y)
    with pytest.raises(TypeError, match="not a GradientTransformation"):
        MetaBDA(net, 0.1)


def test_without_torchopt_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "bda_optim.compat.torchopt")
    for name in [name for name in sys.modules if name.split(".")[0] == "torchopt"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torchopt", None)
    with pytest.raises(ImportError, match=r"bda_optim\[torchopt\]"):
        importlib.import_module("bda_optim.compat.torchopt")


# --- what torchopt cannot do here, and we can -------------------------------------------------------------------------


class Two(nn.Module):
    """Two parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))


def tied_weights() -> tuple[str, str]:
    def net() -> nn.Module:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Tanh(), nn.Linear(2, 2, bias=False))
        net[2].weight = net[0].weight
        return net

    def loss(net: nn.Module) -> Tensor:
        return (net(torch.ones(2)) - 3).square().sum()

    first = net()
    optimizer = torchopt.MetaSGD(first, lr=0.1)
    for _ in range(2):
        optimizer.step(loss(first))
    assert not torch.equal(first[0].weight, first[2].weight)
    second = net()
    fmodel = bda.BDAInnerOptimizer(second.parameters(), rule=torchopt.sgd(0.1)).unroll(
        second, lambda net, x, b: loss(net), steps=2
    )
    assert fmodel[0].weight is fmodel[2].weight
    return "come apart", "stay one tensor"


def unused_at_first() -> tuple[str, str]:
    def losses(net: Any) -> Iterator[Tensor]:
        yield net.a.square().sum()
        yield net.a.square().sum() + net.b.square().sum()

    net = Two()
    optimizer = torchopt.MetaSGD(net, lr=0.1, momentum=0.9)
    for loss in losses(net):
        optimizer.step(loss)
    assert torch.equal(net.b, torch.ones(2))
    net = Two()
    inner = bda.BDAInnerOptimizer(net.parameters(), rule=torchopt.sgd(0.1, momentum=0.9))
    with bda.innerloop_ctx(net, inner) as (fmodel, diffopt):
        for loss in losses(fmodel):
            diffopt.step(loss)
    torch.testing.assert_close(fmodel.b.detach(), torch.full((2,), 0.8))
    return "never moves again", "moves"


def zero_gradients() -> tuple[str, str]:
    def loss(net: Any, x: Tensor, batch: Any = None) -> Tensor:
        return x * (net.a.square().sum() + (net.b - 1).square().sum())  # b is where it should be

    x, net = torch.ones((), requires_grad=True), Two()
    optimizer = torchopt.MetaAdam(net, lr=0.1)
    for _ in range(2):
        optimizer.step(loss(net, x))
    assert torch.autograd.grad(net.a.sum() + net.b.sum(), x)[0].isnan()
    net = Two()
    inner = bda.BDAInnerOptimizer(net.parameters(), lr=0.1, rule=optim.Adam)
    fmodel = inner.unroll(net, loss, hyper=x, steps=2)
    assert torch.autograd.grad(fmodel.a.sum() + fmodel.b.sum(), x)[0].isfinite()
    return "hypergradient NaN", "finite"


def frozen_and_integer() -> tuple[str, str]:
    def net() -> Any:
        net = Two()
        net.b.requires_grad_(False)
        net.count = nn.Parameter(torch.ones(2, dtype=torch.int64), requires_grad=False)
        return net

    first = net()
    with pytest.raises(RuntimeError, match="does not require grad"):
        torchopt.MetaSGD(first, lr=0.1).step(first.a.sum())
    second = net()
    fmodel = bda.BDAInnerOptimizer(second.parameters(), rule=torchopt.sgd(0.1)).unroll(
        second, lambda net, x, b: (net.a * net.b * net.count).sum(), steps=1
    )
    assert [*fmodel.params] == ["a"]
    return "RuntimeError", "stay as they are"


def interrupted() -> tuple[str, str]:
    net = Two()
    before = dict(net._parameters)
    with contextlib.suppress(KeyboardInterrupt):
        torchopt.MetaSGD(net, lr=0.1).step(net.a.sum() + net.b.sum())
        raise KeyboardInterrupt
    assert net.a is not before["a"]
    net = Two()
    before = dict(net._parameters)
    with contextlib.suppress(KeyboardInterrupt):
        inner = bda.BDAInnerOptimizer(net.parameters(), rule=torchopt.sgd(0.1))
        with bda.innerloop_ctx(net, inner) as (fmodel, diffopt):
            diffopt.step(fmodel.a.sum() + fmodel.b.sum())
            raise KeyboardInterrupt
    assert net.a is before["a"] and torch.equal(net.a, torch.ones(2))
    return "module stays changed", "module untouched"


def parameter_groups() -> tuple[str, str]:
    net = Two()
    groups = [{"params": [net.a], "lr": 0.1}, {"params": [net.b], "lr": 0.2}]
    with pytest.raises(RuntimeError, match="Unexpected class"):
        torchopt.MetaSGD(groups, lr=0.1)
    inner = bda.BDAInnerOptimizer(groups)
    fmodel = inner.unroll(net, lambda net, x, b: net.a.sum() + net.b.sum(), steps=1)
    torch.testing.assert_close((fmodel.a[0], fmodel.b[0]), (torch.tensor(0.9), torch.tensor(0.8)), check_stride=False)
    return "RuntimeError", "a rate per group"


def recovered_momentum() -> tuple[str, str]:
    def loss(net: Any) -> Tensor:
        return (net.a - 3).square().sum() + net.b.square().sum()

    def run(renew: bool) -> Tensor:
        net = Two()
        optimizer = torchopt.MetaSGD(net, lr=0.1, momentum=0.5)
        for k in range(4):
            if renew and k == 2:
                state, optimizer = torchopt.extract_state_dict(optimizer), torchopt.MetaSGD(net, lr=0.1, momentum=0.5)
                torchopt.recover_state_dict(optimizer, state)
            optimizer.step(loss(net))
        return net.a

    assert not torch.allclose(run(False), run(True))
    net = Two()
    first, second = (bda.BDAInnerOptimizer(net.parameters(), rule=torchopt.sgd(0.1, momentum=0.5)) for _ in range(2))
    first.commit(first.unroll(net, lambda net, x, b: loss(net), steps=2))
    second.load_state_dict(first.state_dict())
    second.commit(second.unroll(net, lambda net, x, b: loss(net), steps=2))
    torch.testing.assert_close(net.a.detach(), run(False).detach())
    return "first step without decay", "goes on exactly"


def dampening_twice() -> tuple[str, str]:
    settings = {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}
    impl, x = torchopt.sgd(**settings), torch.ones(())

    def loop() -> Tensor:
        optimizer, params = torchopt.FuncOptimizer(impl), (torch.zeros(2, requires_grad=True),)
        for _ in range(2):
            params = optimizer.step((params[0] - 1).square().sum(), params)
        return params[0].detach()

    assert not torch.allclose(loop(), loop())
    ys = [
        bda.rollout(lambda y, x, b: (y - x).square().sum(), None, torch.zeros(2), x, steps=2, **settings)
        for _ in range(2)
    ]
    assert torch.equal(*ys)
    return "another result", "the same result"


def undecayed_biases() -> tuple[str, str]:
    net = nn.Linear(2, 1)
    optimizer = torchopt.MetaAdamW(net, lr=0.1, mask=lambda ps: [p.ndim > 1 for p in ps])
    with pytest.raises(AttributeError, match="MaskedNode"):
        optimizer.step(net(torch.ones(2)).sum())
    groups = [{"params": [net.weight], "weight_decay": 0.5}, {"params": [net.bias], "weight_decay": 0.0}]
    inner = bda.BDAInnerOptimizer(groups, lr=0.1, rule=optim.AdamW)
    fmodel = inner.unroll(net, lambda net, x, b: net(torch.ones(2)).sum(), steps=1)
    torch.testing.assert_close(fmodel.bias, net.bias - 0.1, rtol=1e-6, atol=0.0)
    return "AttributeError", "a decay per group"


def long_loops() -> tuple[str, str]:
    def lower(y: Tensor, x: Tensor, batch: Any = None) -> Tensor:
        return (y - x).square().sum()

    x = torch.ones((), requires_grad=True)

    def theirs(steps: int) -> Tensor:
        optimizer, params = torchopt.FuncOptimizer(torchopt.adam(0.1)), (torch.zeros(3, requires_grad=True),)
        for _ in range(steps):
            params = optimizer.step(lower(params[0], x), params)
        return params[0]

    def ours(steps: int) -> Tensor:
        checkpointed = {"rule": torchopt.adam(0.1), "adjoint": bda.Checkpointed()}
        return bda.rollout(lower, None, torch.zeros(3), x, steps=steps, **checkpointed)

    assert _nodes(theirs(100)) > 9 * _nodes(theirs(10))
    assert _nodes(ours(100)) == _nodes(ours(10))
    grads = [torch.autograd.grad(road(100).sum(), x)[0] for road in (theirs, ours)]
    torch.testing.assert_close(*grads, rtol=1e-10, atol=0.0)
    return "a graph of all K steps", "Checkpointed(), also with its rules"


def _nodes(tensor: Tensor) -> int:
    """How many operations autograd keeps for a tensor."""
    seen, todo = set(), [tensor.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            todo += [parent for parent, _ in node.next_functions]
    return len(seen)


CANNOT = {
    "tied weights": tied_weights,
    "a parameter unused in the first step, momentum": unused_at_first,
    "Adam at zero gradients": zero_gradients,
    "frozen and integer parameters": frozen_and_integer,
    "Ctrl-C inside the loop": interrupted,
    "parameter groups": parameter_groups,
    "momentum recovered into a new optimizer": recovered_momentum,
    "momentum with dampening, a second loop": dampening_twice,
    "AdamW without decay of the biases": undecayed_biases,
    "long inner loops": long_loops,
}


def test_what_torchopt_cannot_do(record_property: Callable[[str, object], None]) -> None:
    rows = [("", f"torchopt {torchopt.__version__}", "bda_optim")]
    rows += [(what, *show()) for what, show in CANNOT.items()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    record_property("table", table)
    print(table)


def test_the_example_agrees(capsys: pytest.CaptureFixture[str]) -> None:
    torch.set_default_dtype(torch.float32)
    threads = torch.get_num_threads()
    scripts.run("migrate_torchopt", "--seed", 1)
    torch.set_num_threads(threads)
    assert "largest difference" in capsys.readouterr().out
