"""BDA as a torchopt transformation, against `rollout` and in torchopt's own optimizers."""

from __future__ import annotations

import copy
import importlib
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torchopt_cases import RULES, STEPS, Outcome, Problem, error, ours, theirs, torchopt, with_torchopt

import bda_optim as bda
from bda_optim.compat.torchopt import BDAState, FuncBDA, MetaBDA, with_upper
from bda_optim.compat.torchopt import bda as transformation

# torchopt computes bias corrections in the default dtype, so 1e-12 can only be had in this one.
pytestmark = pytest.mark.usefixtures("doubles")

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
