"""torchopt's transformations as our rules, against the installed torchopt."""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import scripts
import torch
from torch import Tensor
from torchopt_cases import NETWORKS, RULES, STEPS, Problem, error, ours, theirs, torchopt, unrolled, with_torchopt

import bda_optim as bda
from bda_optim._step.rules.resolve import resolve
from bda_optim._step.rules.transformation import Transformation

# torchopt computes bias corrections in the default dtype, so 1e-12 can only be had in this one.
pytestmark = pytest.mark.usefixtures("doubles")


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


@pytest.mark.filterwarnings("ignore:a transformation cuts the graph:UserWarning")  # as it does in torchopt
@pytest.mark.parametrize("name", chains())
def test_chains(name: str) -> None:
    problem, make = Problem(), chains()[name]
    want = with_torchopt(problem, make())
    assert error(unrolled(problem, rule=make()), want) < 1e-12
    assert error(unrolled(problem, rule=make(), adjoint=bda.Checkpointed()), want) < 1e-12


@pytest.mark.filterwarnings("ignore:a transformation cuts the graph:UserWarning")  # as it does in torchopt
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
    looped = name in ("clipped", "clipped_late", "hooked", "flat", "scheduled", "accelerated")
    with pytest.warns(UserWarning, match="one after another") if looped else contextlib.nullcontext() as warned:
        many = grad(bda.Unroll(), tasks=2, batches=[torch.tensor([1.0, 0.5])] * 7)
    assert warned is None or len(warned) == 1
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


@pytest.mark.filterwarnings("ignore:a transformation cuts the graph:UserWarning")  # as it does in torchopt
def test_groups_copies_and_equality() -> None:
    problem, rule = Problem(), torchopt.chain(torchopt.clip_grad_norm(1.0), torchopt.sgd(0.1))
    groups = [{"params": layer.parameters()} for layer in (problem.net[0], problem.net[2])]
    inner = bda.BDAInnerOptimizer([*groups[:1], {**groups[1], "alpha": 0.5, "upper_lr": 0.1}], rule=rule)
    fmodel = inner.unroll(problem.net, problem.lower, problem.upper, hyper=problem.x, steps=2)
    assert torch.autograd.grad(problem.upper(fmodel), problem.x)[0].norm() > 0
    twin = copy.deepcopy(inner)
    assert twin.rule is inner.rule and [group["alpha"] for group in twin.param_groups] == [0.0, 0.5]
    assert resolve(rule) == Transformation(rule) != Transformation(torchopt.sgd(0.1))


def test_an_optax_like_object_is_accepted() -> None:
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


def test_the_example_agrees(capsys: pytest.CaptureFixture[str]) -> None:
    torch.set_default_dtype(torch.float32)
    threads = torch.get_num_threads()
    scripts.run("migrate_torchopt", "--seed", 1)
    torch.set_num_threads(threads)
    assert "largest difference" in capsys.readouterr().out
