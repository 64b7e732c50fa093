"""`bda_optim.compat.torchopt` in the place of torchopt: Meta-optimizers, helpers, and scripts written for torchopt."""

from __future__ import annotations

import copy
import inspect
import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torchopt_cases import NETWORKS, STEPS, Outcome, Problem, error, torchopt

import bda_optim as bda
import bda_optim.compat.torchopt as ours

# torchopt computes bias corrections in the default dtype, so 1e-12 can only be had in this one.
pytestmark = pytest.mark.usefixtures("doubles")


def halving() -> Any:
    return torchopt.schedule.exponential_decay(0.05, transition_steps=1, decay_rate=0.5)


# Settings keep derivatives of roots moderate, since torchopt's are not safe at 0.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd": ("MetaSGD", {"lr": 0.1}),
    "sgd momentum": ("MetaSGD", {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.05}),
    "sgd nesterov": ("MetaSGD", {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    "sgd dampening": ("MetaSGD", {"lr": 0.05, "momentum": 0.9, "dampening": 0.3, "moment_requires_grad": False}),
    "sgd maximize": ("MetaSGD", {"lr": 0.01, "weight_decay": 0.1, "maximize": True}),
    "sgd schedule": ("MetaSGD", {"lr": halving(), "momentum": 0.5}),
    "adam": ("MetaAdam", {"lr": 0.01, "betas": [0.8, 0.95]}),
    "adam weight decay": ("MetaAdam", {"lr": 0.01, "weight_decay": 0.1, "moment_requires_grad": False}),
    "adam maximize": ("MetaAdam", {"lr": 0.01, "maximize": True, "eps": 1e-4}),
    "adam eps_root": ("MetaAdam", {"lr": 0.01, "eps_root": 1e-6}),
    "adam schedule": ("MetaAdam", {"lr": halving()}),
    "adamw": ("MetaAdamW", {"lr": 0.01, "weight_decay": 0.1}),
    "adamw eps_root": ("MetaAdamW", {"lr": 0.01, "eps_root": 1e-6, "moment_requires_grad": True}),
    "adamax": ("MetaAdaMax", {"lr": 0.01, "eps": 1e-6}),
    "radam": ("MetaRAdam", {"lr": 0.01, "betas": (0.9, 0.6), "eps": 1e-6}),
    "adadelta": ("MetaAdaDelta", {"lr": 0.5, "eps": 1e-4}),
    "adagrad": ("MetaAdaGrad", {"lr": 0.02, "lr_decay": 0.1, "initial_accumulator_value": 0.1}),
    "rmsprop": ("MetaRMSProp", {"lr": 0.005, "alpha": 0.9, "eps": 1e-4}),
    "rmsprop centered": ("MetaRMSProp", {"lr": 0.005, "centered": True, "momentum": 0.9, "eps": 1e-2}),
    "rmsprop nesterov": ("MetaRMSProp", {"lr": 0.005, "momentum": 0.9, "nesterov": True, "initial_scale": 0.1}),
}


def outcome(library: Any, problem: Problem, name: str, settings: dict[str, Any], *more: Tensor) -> Outcome:
    """y_K, and the derivatives of F(y_K) by x, by y_0 and by the tensors given."""
    net = copy.deepcopy(problem.net)
    start = [*net.parameters()]
    optimizer = getattr(library, name)(net, **settings)
    with sdpa_kernel(SDPBackend.MATH):  # the other kernels have no second derivative
        for _ in range(STEPS):
            optimizer.step(problem.lower(net, problem.x))
        grads = torch.autograd.grad(problem.upper(net), [problem.x, *start, *more])
    return [*net.parameters()], list(grads)


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("case", CASES)
def test_a_meta_optimizer_gives_torchopts_numbers(case: str, network: str) -> None:
    name, settings = CASES[case]
    problem = Problem(network)
    assert error(outcome(ours, problem, name, settings), outcome(torchopt, problem, name, settings)) < 1e-12


@pytest.mark.parametrize("case", ["sgd", "sgd momentum", "adam", "adamw", "rmsprop", "adadelta"])
def test_the_rate_may_be_learned(case: str) -> None:
    name, settings = CASES[case]
    problem, lr = Problem(), torch.tensor(0.02, requires_grad=True)
    changed = {**settings, "lr": lr}
    assert error(outcome(ours, problem, name, changed, lr), outcome(torchopt, problem, name, changed, lr)) < 1e-12


def test_a_transformation_of_torchopt_takes_its_own_steps() -> None:
    problem = Problem()
    for make in (
        lambda: torchopt.chain(torchopt.nan_to_num(0.0), torchopt.adam(0.01)),
        lambda: torchopt.sgd(0.05, momentum=0.9, dampening=0.3),
        lambda: torchopt.chain(torchopt.clip_grad_norm(0.1), torchopt.sgd(0.1)),
    ):
        want = outcome(torchopt, problem, "MetaOptimizer", {"impl": make()})
        assert error(outcome(ours, problem, "MetaOptimizer", {"impl": make()}), want) < 1e-12


# The namespace.


def test_every_name_of_torchopt_is_there() -> None:
    meta = {name for name in dir(torchopt) if name.startswith("Meta")}
    for name in {*dir(torchopt), *torchopt.__all__}:
        assert name in dir(ours)
        if name in meta:
            assert getattr(ours, name).__module__.startswith("bda_optim.") and name in ours.__all__
            assert issubclass(getattr(ours, name), torchopt.MetaOptimizer)
        elif not name.startswith("__"):
            assert getattr(ours, name) is getattr(torchopt, name)
    everything: dict[str, Any] = {}
    exec("from bda_optim.compat.torchopt import *", everything)
    assert everything["MetaAdam"] is ours.MetaAdam and everything["adam"] is torchopt.adam and "bda" in everything
    with pytest.raises(AttributeError, match="no attribute 'MetaNothing'"):
        _ = ours.MetaNothing


@pytest.mark.parametrize("name", sorted(name for name in dir(torchopt) if name.startswith("Meta")))
def test_signatures_are_those_of_torchopt(name: str) -> None:
    def described(library: Any) -> list[Any]:
        parameters = inspect.signature(getattr(library, name)).parameters.values()
        return [(parameter.name, parameter.kind, parameter.default) for parameter in parameters]

    assert described(ours) == described(torchopt)


# Scripts: each takes the library, and returns what must be the same with both.


def maml(library: Any) -> list[Tensor]:
    """Several tasks from one start; the states of network and optimizer are extracted once and recovered for each."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 4, bias=False), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1))
    inner, outer = library.MetaAdam(net, lr=0.05), library.Adam(net.parameters(), lr=0.01)
    history = []
    for _ in range(2):
        outer.zero_grad()
        net_state = library.extract_state_dict(net, by="reference", detach_buffers=True)
        optim_state = library.extract_state_dict(inner, by="reference")
        losses = []
        for task in range(3):
            torch.manual_seed(task)
            x, y = torch.randn(2, 6, 2), torch.randn(2, 6, 1)
            for _ in range(3):
                inner.step((net(x[0]) - y[0]).square().mean())
            losses.append((net(x[1]) - y[1]).square().mean())
            library.recover_state_dict(net, net_state)
            library.recover_state_dict(inner, optim_state)
        loss = torch.stack(losses).mean()
        loss.backward()
        outer.step()
        history.append(loss.detach())
    return [*history, *(p.detach().clone() for p in net.parameters()), net[1].running_mean]


def online(library: Any) -> list[Tensor]:
    """A long run in windows: an upper step after each, and the graph of network and optimizer stopped."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
    x, y = torch.randn(2, 6, 2), torch.randn(2, 6, 1)
    weights = torch.zeros(6, 1, requires_grad=True)
    inner, outer = library.MetaSGD(net, lr=0.1, momentum=0.9), torch.optim.SGD([weights], lr=0.5)
    for _ in range(3):
        for _ in range(2):
            inner.step((torch.sigmoid(weights) * (net(x[0]) - y[0]).square()).mean())
        outer.zero_grad()
        (net(x[1]) - y[1]).square().mean().backward()
        outer.step()
        library.stop_gradient(net)
        library.stop_gradient(inner)
    return [weights.detach(), *(p.detach() for p in net.parameters())]


def two_modules(library: Any) -> list[Tensor]:
    """One optimizer for two networks, and a clone of both networks that goes on by itself."""
    torch.manual_seed(0)
    nets = nn.ModuleList([nn.Linear(3, 2), nn.Linear(2, 1)])
    start = [*nets.parameters()]
    inner = library.MetaRMSProp(nets[0], lr=0.01, eps=1e-3)
    inner.add_param_group(nets[1])
    x = torch.randn(5, 3)
    for _ in range(2):
        inner.step(nets[1](nets[0](x).tanh()).square().mean())
    clone = library.module_clone(nets, by="copy")
    loss = clone[1](clone[0](x).tanh()).sum()
    return [loss.detach(), *torch.autograd.grad(loss, start)]


@pytest.mark.parametrize("script", [maml, online, two_modules], ids=lambda script: script.__name__)
def test_a_script_runs_with_another_import(script: Any) -> None:
    torch.testing.assert_close(script(ours), script(torchopt), rtol=1e-11, atol=1e-13)


# The helpers, on both kinds of optimizers.


@pytest.mark.parametrize("by", ["reference", "copy", "deepcopy"])
@pytest.mark.parametrize("library", [ours, torchopt], ids=["ours", "torchopt"])
def test_the_helpers_accept_both_kinds(library: Any, by: str) -> None:
    problem = Problem()
    net = copy.deepcopy(problem.net)
    optimizer = library.MetaAdam(net, lr=0.01)
    start = ours.extract_state_dict(net, by=by), ours.extract_state_dict(optimizer, by=by)
    runs = []
    for _ in range(2):
        for _ in range(2):
            optimizer.step(problem.lower(net, problem.x))
        runs.append([p.detach().clone() for p in net.parameters()])
        state = ours.extract_state_dict(optimizer, by=by)
        leaves = torchopt.pytree.tree_leaves(state)
        assert leaves and all(isinstance(leaf, Tensor) for leaf in leaves)
        ours.recover_state_dict(net, start[0])
        ours.recover_state_dict(optimizer, start[1])
    torch.testing.assert_close(*runs, rtol=0, atol=0)
    ours.recover_state_dict(optimizer, state)
    ours.stop_gradient(optimizer)
    assert not any(leaf.grad_fn for leaf in torchopt.pytree.tree_leaves(optimizer.state_dict()))


def test_initial_moments_can_be_differentiated() -> None:
    """With `moment_requires_grad` the first moments are leaves that gradients reach; torchopt's MetaSGD agrees.

    One step, since torchopt does not decay the first moment in its first one: the factor is the momentum.
    """
    grads = []
    for library in (ours, torchopt):
        problem = Problem()
        net = copy.deepcopy(problem.net)
        optimizer = library.MetaSGD(net, lr=0.1, momentum=0.5)
        optimizer.step(0 * sum(p.sum() for p in net.parameters()))
        moments = [t for t in torchopt.pytree.tree_leaves(optimizer.state_groups[0]) if t.requires_grad]
        optimizer.step(problem.lower(net, problem.x))
        grads.append(torch.autograd.grad(problem.upper(net), moments))
    torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-14)
    assert len(grads[0]) == 4 and all(bool(g.any()) for g in grads[0])
    for cls, wanted in ((ours.MetaAdam, True), (ours.MetaAdamW, False)):
        first = cls(nn.Linear(2, 1)).impl.init((torch.ones(2),)).rule[0]
        assert {name: t.requires_grad for name, t in first.items()} == {
            "step": False,
            "exp_avg": wanted,
            "exp_avg_sq": wanted,
        }


def test_a_clone_keeps_a_learned_rate() -> None:
    lr = torch.tensor(0.1, requires_grad=True)
    net = nn.Linear(2, 1)
    optimizer = ours.MetaSGD(net, lr=2 * lr)
    clone = ours.module_clone(optimizer)
    clone.step(sum(p.square().sum() for p in clone.param_containers_groups[0][0].values()))
    torch.autograd.grad(clone.param_containers_groups[0][0]["weight"].sum(), lr)


# What a step needs, and what it leaves alone.


def test_a_step_that_fails_leaves_the_module_as_it_was() -> None:
    nets = nn.ModuleList([nn.Linear(2, 1), nn.Linear(2, 1)])
    calls = []

    def update(grads: Any, state: Any, **kwargs: Any) -> Any:
        calls.append(len(grads))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return torchopt.sgd(0.1).update(grads, state, **kwargs)

    optimizer = ours.MetaOptimizer(nets[0], torchopt.base.GradientTransformation(torchopt.sgd(0.1).init, update))
    optimizer.add_param_group(nets[1])
    before = [dict(net._parameters) for net in nets]
    with pytest.raises(KeyboardInterrupt):
        optimizer.step(nets[0](torch.ones(2)).sum() + nets[1](torch.ones(2)).sum())
    assert calls == [2, 2]
    for net, tensors in zip(nets, before, strict=True):
        assert all(net._parameters[name] is tensor for name, tensor in tensors.items())


def test_a_parameter_that_two_modules_share_stays_shared() -> None:
    nets = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    nets[1].weight = nets[0].weight
    start = nets[0].weight
    optimizer = ours.MetaSGD(nets[0], lr=0.1)
    optimizer.add_param_group(nets[1])
    optimizer.step(nets[1](nets[0](torch.ones(2))).square().sum())
    assert nets[0].weight is nets[1].weight is not start
    (grad,) = torch.autograd.grad(nets[0].weight.sum(), start)
    assert bool(grad.any())


def test_the_caller_may_be_under_no_grad() -> None:
    net = nn.Linear(2, 1)
    start = net.weight
    optimizer = ours.MetaAdam(net, lr=0.1)
    with torch.no_grad():
        for _ in range(2):
            with torch.enable_grad():
                loss = net(torch.ones(2)).square().sum()
            optimizer.step(loss)
    torch.autograd.grad(net.weight.sum(), start)
    with torch.inference_mode(), pytest.raises(RuntimeError, match="inference_mode"):
        optimizer.step(loss)


def test_what_a_step_refuses() -> None:
    net = nn.Linear(2, 1)
    optimizer = ours.MetaSGD(net, lr=0.1)
    with pytest.raises(ValueError, match=r"does not depend on any parameter .*k=1"):
        optimizer.step(torch.ones((), requires_grad=True))
    with pytest.raises(ValueError, match="scalar"):
        optimizer.step(net(torch.ones(3, 2)))
    with pytest.raises(NotImplementedError, match=r"`mask` fails in torchopt.*weight_decay"):
        ours.MetaAdamW(net, mask=lambda params: params)
    with pytest.raises(ValueError, match="at least 0"):
        ours.MetaAdam(net, lr=-1.0)
    with pytest.raises(TypeError, match="not a GradientTransformation"):
        ours.MetaOptimizer(net, torch.optim.SGD)
    with pytest.raises(TypeError, match="no_such_setting"):
        ours.MetaAdam(net, no_such_setting=1)


# Where torchopt itself is off, with the Meta-optimizers of both.


class Two(nn.Module):
    """Two parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.ones(2))
        self.b = nn.Parameter(torch.ones(2))


def tied_weights(library: Any) -> str:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Tanh(), nn.Linear(2, 2, bias=False))
    net[2].weight = net[0].weight
    optimizer = library.MetaSGD(net, lr=0.1)
    for _ in range(2):
        optimizer.step((net(torch.ones(2)) - 3).square().sum())
    return "stay one tensor" if net[0].weight is net[2].weight else "come apart"


def unused_at_first(library: Any) -> str:
    net = Two()
    optimizer = library.MetaSGD(net, lr=0.1, momentum=0.9)
    optimizer.step(net.a.square().sum())
    optimizer.step(net.a.square().sum() + net.b.square().sum())
    return "never moves again" if torch.equal(net.b, torch.ones(2)) else "moves"


def unused_in_the_middle(library: Any) -> str:
    """Plain transformations of torchopt in both libraries; torch.optim keeps the momentum of such a parameter."""
    net = Two()
    optimizer = library.MetaOptimizer(net, torchopt.sgd(lr=0.1, momentum=0.9))
    plain = Two()
    expected = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for k in range(3):
        optimizer.step(net.a.square().sum() + (0 if k == 1 else net.b.square().sum()))
        expected.zero_grad()
        (plain.a.square().sum() + (0 if k == 1 else plain.b.square().sum())).backward()
        expected.step()
    return "goes on" if torch.allclose(net.b, plain.b) else "is lost"


def zero_gradients(name: str) -> Any:
    def show(library: Any) -> str:
        x, net = torch.ones((), requires_grad=True), Two()
        optimizer = getattr(library, name)(net, lr=0.1)
        for _ in range(2):
            optimizer.step(x * (net.a.square().sum() + (net.b - 1).square().sum()))  # b is where it should be
        return "finite" if torch.autograd.grad(net.a.sum() + net.b.sum(), x)[0].isfinite() else "NaN"

    return show


def relu_network(library: Any) -> str:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
    with torch.no_grad():
        net[0].bias[0] = -10.0  # a unit that is never active
    start = [*net.parameters()]
    x, y = torch.randn(8, 4), torch.randn(8, 1)
    optimizer = library.MetaAdam(net, lr=0.05)
    for _ in range(5):
        optimizer.step((net(x) - y).square().mean())
    grads = torch.autograd.grad((net(x) + y).square().mean(), start)
    return "finite" if all(bool(g.isfinite().all()) for g in grads) else "NaN"


def accelerated(library: Any) -> str:
    """The derivative by the initial parameter, against finite differences."""

    def loss(start: Tensor) -> Tensor:
        net = nn.Linear(1, 1, bias=False)
        net._parameters["weight"] = start
        optimizer = library.MetaAdam(net, lr=0.1, eps=0.1, use_accelerated_op=True)
        for _ in range(3):
            optimizer.step((net(torch.ones(1)) - 2).square().sum() + net.weight.sin().sum())
        return net.weight.square().sum()

    start = torch.full((1, 1), 0.3, requires_grad=True)
    (grad,) = torch.autograd.grad(loss(start), start)
    moved = [loss((start + h).detach().requires_grad_()) for h in (1e-5, -1e-5)]
    off = float((grad - (moved[0] - moved[1]).detach() / 2e-5).abs() / grad.abs())
    return "right" if off < 1e-7 else f"off by {off:.0e}"


def frozen_and_integer(library: Any) -> str:
    net = Two()
    net.b.requires_grad_(False)
    net.count = nn.Parameter(torch.ones(2, dtype=torch.int64), requires_grad=False)
    try:
        library.MetaSGD(net, lr=0.1, momentum=0.5).step((net.a * net.b * net.count).sum())
    except RuntimeError:
        return "RuntimeError"
    assert not torch.equal(net.a, torch.ones(2)) and torch.equal(net.b, torch.ones(2))
    return "stay as they are"


def recovered_momentum(library: Any) -> str:
    def run(renew: bool) -> Tensor:
        net = Two()
        optimizer = library.MetaSGD(net, lr=0.1, momentum=0.5)
        for k in range(4):
            if renew and k == 2:
                state = library.extract_state_dict(optimizer)
                optimizer = library.MetaSGD(net, lr=0.1, momentum=0.5)
                library.recover_state_dict(optimizer, state)
            optimizer.step((net.a - 3).square().sum() + net.b.square().sum())
        return net.a

    return "goes on exactly" if torch.equal(run(False), run(True)) else "first step without decay"


def dampening_twice(library: Any) -> str:
    net = Two()
    optimizer = library.MetaSGD(net, lr=0.1, momentum=0.9, dampening=0.5)
    start = library.extract_state_dict(net), library.extract_state_dict(optimizer)
    results = []
    for _ in range(2):
        for _ in range(2):
            optimizer.step((net.a - 3).square().sum() + net.b.square().sum())
        results.append(net.a.detach().clone())
        library.recover_state_dict(net, start[0])
        library.recover_state_dict(optimizer, start[1])
    return "the same result" if torch.equal(*results) else "another result"


def single_precision(library: Any) -> str:
    """The first step of Adam is lr by definition, up to eps."""
    torch.set_default_dtype(torch.float32)
    net = Two()
    try:
        library.MetaAdam(net, lr=1.0, eps=0.0).step(net.a.sum() + net.b.sum())
    finally:
        torch.set_default_dtype(torch.float64)
    off = float((1 - net.a.detach().double()).sub(1).abs().max())
    return f"first step off by {off:.0e}" if off > 1e-6 else "first step exact"


def interrupted(library: Any) -> str:
    nets = nn.ModuleList([Two(), Two()])
    optimizer = library.MetaSGD(nets[0], lr=0.1)
    optimizer.add_param_group(nets[1])
    whole = optimizer.impl.update
    calls = []

    def update(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return whole(*args, **kwargs)

    optimizer.impl = types.SimpleNamespace(init=optimizer.impl.init, update=update)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step(sum(net.a.sum() + net.b.sum() for net in nets))
    moved = [isinstance(net.a, nn.Parameter) for net in nets]
    return "module untouched" if all(moved) else "half of the module is changed"


OFF: dict[str, tuple[Any, str, str]] = {
    "tied weights": (tied_weights, "come apart", "stay one tensor"),
    "momentum, a parameter unused in the first step": (unused_at_first, "never moves again", "moves"),
    "momentum, a parameter unused in between": (unused_in_the_middle, "is lost", "goes on"),
    "hypergradient at zero gradients, MetaAdam": (zero_gradients("MetaAdam"), "NaN", "finite"),
    "hypergradient at zero gradients, MetaAdamW": (zero_gradients("MetaAdamW"), "NaN", "finite"),
    "hypergradient at zero gradients, MetaRMSProp": (zero_gradients("MetaRMSProp"), "NaN", "finite"),
    "hypergradient at zero gradients, MetaAdaGrad": (zero_gradients("MetaAdaGrad"), "NaN", "finite"),
    "hypergradient of a ReLU network with an inactive unit, MetaAdam": (relu_network, "NaN", "finite"),
    "hypergradient with use_accelerated_op": (accelerated, "off by", "right"),
    "frozen and integer parameters": (frozen_and_integer, "RuntimeError", "stay as they are"),
    "momentum recovered into a new optimizer": (recovered_momentum, "first step without decay", "goes on exactly"),
    "dampening, a second loop after recovering": (dampening_twice, "another result", "the same result"),
    "Adam in float32": (single_precision, "first step off by", "first step exact"),
    "Ctrl-C inside a step": (interrupted, "half of the module is changed", "module untouched"),
}


@pytest.mark.parametrize("what", OFF)
def test_where_torchopt_is_off(what: str, record_property: Any) -> None:
    show, theirs, right = OFF[what]
    found = show(torchopt), show(ours)
    record_property("table", f"{what}: torchopt {torchopt.__version__}: {found[0]}; bda_optim: {found[1]}")
    assert found[0].startswith(theirs) and found[1] == right


def test_bda_is_a_meta_optimizer_of_this_module() -> None:
    net = Two()
    optimizer = ours.MetaBDA(net, ours.bda(0.1, upper_lr=0.2, alpha=bda.harmonic(0.5)))
    assert isinstance(optimizer, ours.MetaOptimizer) and isinstance(optimizer, torchopt.MetaOptimizer)
    optimizer.step(net.a.sum() + net.b.sum(), net.b.sum())
    torch.testing.assert_close(net.b.detach(), torch.full((2,), 1 - 0.5 * 0.1 - 0.5 * 0.2))
