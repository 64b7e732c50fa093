"""What new users type: it is right, or the error says what to write instead."""

from __future__ import annotations

import re
import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from problems import double
from torch import Tensor, nn

import bda_optim as bda


def lower(y: Tensor, x: Any, batch: Any) -> Tensor:
    return 0.5 * (y - x).square().sum()


def upper(y: Tensor, x: Any, batch: Any) -> Tensor:
    return y.square().sum()


def hypergradient(**options: Any) -> Any:
    given = {"params": double(1.0), "hyper": double(2.0), "steps": 3, "lr": 0.5}
    return bda.hypergradient(lower, upper, **{**given, **options})


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


INPUTS = torch.linspace(-1, 1, 15, dtype=torch.float64).reshape(5, 3)


def net_lower(fnet: Any, hyper: Any, batch: Any) -> Tensor:
    return (fnet(INPUTS) - hyper).square().mean()


def unroll(**options: Any) -> Any:
    model = options.pop("model", None) or net()
    inner = bda.BDAInnerOptimizer(model.parameters(), lr=0.1)
    loss = options.pop("lower", net_lower)
    hyper = options.pop("hyper", double(0.5).requires_grad_())
    return inner.unroll(model, loss, hyper=hyper, **{"steps": 3, **options})


# What has no gradient among the upper variables.


@pytest.mark.parametrize(
    "hyper", [1.0, 3, np.ones(2), torch.tensor(3), "x"], ids=["float", "int", "array", "long", "text"]
)
def test_a_hyper_without_a_gradient_is_refused(hyper: Any) -> None:
    with pytest.raises(TypeError, match=r"`hyper` must be a floating-point tensor.*Make it a tensor"):
        hypergradient(hyper=hyper)


def test_leaves_of_hyper_without_a_gradient_get_none() -> None:
    hyper = {"w": double(2.0), "lam": 0.1, "count": torch.tensor(3), "array": np.ones(2)}
    out = bda.hypergradient(lambda y, h, b: lower(y, h["w"], b) * h["lam"], upper, double(1.0), hyper, steps=3, lr=0.5)
    assert {name: grad is None for name, grad in out.grad.items()} == {
        "w": False, "lam": True, "count": True, "array": True,
    }  # fmt: skip
    assert out.grad["w"] != 0


# Tensors that are captured although nothing that was passed requires grad.


@pytest.mark.parametrize("adjoint", [bda.Checkpointed(), bda.Checkpointed(slots=2), bda.ForwardMode()], ids=repr)
def test_a_captured_tensor_is_refused_where_nothing_else_requires_grad(adjoint: Any) -> None:
    x = double(2.0).requires_grad_()

    def run() -> Tensor:
        return bda.rollout(lambda y, h, b: lower(y, x, b), None, double(1.0), steps=3, lr=0.5, adjoint=adjoint)

    with pytest.raises(ValueError, match="a loss uses a tensor that requires grad but is neither in `hyper=`"):
        run()
    with torch.no_grad():
        assert run().item() == pytest.approx(2 - 0.5**3)


# Tasks.


def test_losses_of_tasks_need_the_task_dimension() -> None:
    model = net()
    inner = bda.BDAInnerOptimizer(model.parameters(), lr=0.1)
    data = INPUTS.expand(2, 5, 3).contiguous()

    def loss(fnet: Any, hyper: Any, batch: Tensor) -> Tensor:
        return fnet(batch).square().mean()

    fmodel = inner.unroll(model, loss, steps=2, batches=[data] * 2, tasks=2, copy_initial_weights=False)
    with pytest.raises(ValueError, match=r"with tasks=2 every tensor of a batch .*got `batch` .*\(5, 3\)"):
        fmodel.losses(loss, None, INPUTS)


# Changes in place.


@pytest.mark.parametrize("adjoint", [bda.Unroll(), bda.Checkpointed(), bda.ForwardMode(limit=100)], ids=repr)
def test_a_loss_that_changes_a_parameter_is_refused(adjoint: Any) -> None:
    def clamped(fnet: Any, hyper: Any, batch: Any) -> Tensor:
        with torch.no_grad():
            fnet[0].weight.clamp_(-0.1, 0.1)
        return net_lower(fnet, hyper, batch)

    with pytest.raises(RuntimeError, match=r"must not change its arguments in place; got 0\.weight"):
        unroll(lower=clamped, adjoint=adjoint)


def test_a_loss_that_changes_hyper_is_refused() -> None:
    def growing(fnet: Any, hyper: Any, batch: Any) -> Tensor:
        with torch.no_grad():
            hyper.add_(0.1)
        return net_lower(fnet, hyper, batch)

    with pytest.raises(RuntimeError, match=r"must not change its arguments in place; got hyper \(scalar float64"):
        unroll(lower=growing)


# The original module inside a loss.


def test_the_original_module_in_a_loss_is_warned_of_once() -> None:
    model = net()

    def decayed(fnet: Any, hyper: Any, batch: Any) -> Tensor:
        return net_lower(fnet, hyper, batch) + sum(p.square().sum() for p in model.parameters())

    with pytest.warns(UserWarning, match=r"the parameter '[02]\.(weight|bias)' of the original module.*`hyper=`"):
        unroll(model=model, lower=decayed)
    unroll(model=model, lower=decayed)  # a second warning would be an error here


@pytest.mark.parametrize("copy", [True, False])
def test_an_anchor_in_hyper_is_no_mistake(copy: bool) -> None:
    model = net()

    def proximal(fnet: Any, anchor: nn.Module, batch: Any) -> Tensor:
        pairs = zip(fnet.parameters(), anchor.parameters(), strict=True)
        return fnet(INPUTS).square().mean() + sum((p - q).square().sum() for p, q in pairs)

    fmodel = unroll(model=model, lower=proximal, hyper=model, copy_initial_weights=copy)
    fmodel(INPUTS).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


# Losses with another signature.


WRONG_LOSSES = {
    "one argument": (lambda fnet: fnet(INPUTS).sum(), r"got `<lambda>\(fnet\)`"),
    "a criterion": (nn.MSELoss(), r"got `MSELoss\(input"),
    "a tensor": (torch.zeros(()), "must be a function; got Tensor"),
    "four arguments": (lambda a, b, c, d: a, r"got `<lambda>\(a, b, c, d\)`"),
}


@pytest.mark.parametrize("name", WRONG_LOSSES)
def test_a_loss_with_another_signature_is_explained(name: str) -> None:
    loss, got = WRONG_LOSSES[name]
    with pytest.raises(TypeError, match=got + r"(.|\n)*Losses are called `loss\(net, hyper, batch\)`"):
        unroll(lower=loss)
    with pytest.raises(TypeError, match="the upper loss"):
        bda.rollout(lower, loss, double(1.0), double(2.0), steps=2, lr=0.1)


@pytest.mark.skipif(not hasattr(Exception, "add_note"), reason="notes came with Python 3.11")
def test_swapped_arguments_are_explained() -> None:
    with pytest.raises(TypeError) as caught:
        unroll(lower=lambda batch, hyper, fnet: fnet(INPUTS).sum())
    assert "Losses are called `loss(net, hyper, batch)`" in caught.value.__notes__[0]


@pytest.mark.parametrize(
    "loss", [lambda *args: net_lower(*args), lambda f, h, b, scale=1.0: scale * net_lower(f, h, b)]
)
def test_other_signatures_that_take_three_arguments_pass(loss: Any) -> None:
    assert unroll(lower=loss).params["0.weight"].requires_grad


# Things of the wrong kind.


MISTAKES: dict[str, tuple[Any, type[Exception], str]] = {
    "parameters": (lambda: unroll(model=list(net().parameters())), TypeError, ""),
    "adjoint class": (lambda: unroll(adjoint=bda.Checkpointed), TypeError, r"Write `Checkpointed\(\)`"),
    "adjoint text": (lambda: unroll(adjoint="checkpointed"), TypeError, r"Use an object such as `Unroll\(\)`"),
    "within class": (lambda: bda.Truncated(last=2, within=bda.Checkpointed), TypeError, r"Write `Checkpointed\(\)`"),
    "prox class": (lambda: hypergradient(prox=bda.prox.l1), TypeError, r"Call it, as in `prox=l1\(0.5\)`"),
    "schedule class": (
        lambda: hypergradient(alpha=bda.harmonic),
        TypeError,
        r"Call the schedule first, as in `harmonic\(0.5\)`",
    ),
    "lr text": (lambda: hypergradient(lr="0.1"), (TypeError, ValueError), "`lr` must be"),
    "params module": (lambda: hypergradient(params=net()), TypeError, r"BDAInnerOptimizer.*unroll"),
    "steps bool": (lambda: hypergradient(steps=True), ValueError, "`steps` must be a whole number"),
    "steps float": (lambda: hypergradient(steps=3.0), ValueError, "`steps` must be a whole number"),
}


@pytest.mark.parametrize("name", [name for name in MISTAKES if name != "parameters"])
def test_mistakes_say_what_to_write(name: str) -> None:
    call, kind, message = MISTAKES[name]
    with pytest.raises(kind, match=message):
        call()


def test_parameters_instead_of_the_module() -> None:
    model = net()
    inner = bda.BDAInnerOptimizer(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match="`unroll` takes the module itself; got generator"):
        inner.unroll(model.parameters(), net_lower, steps=2)  # type: ignore[arg-type]


def test_options_by_position_say_their_names() -> None:
    model = net()
    inner = bda.BDAInnerOptimizer(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match=r"`unroll` takes model, lower, upper by position.*`hyper=`"):
        inner.unroll(model, net_lower, None, double(0.5), steps=2)  # type: ignore[misc]
    with pytest.raises(TypeError, match=r"`hypergradient` takes lower, upper, params, hyper by position.*`steps=`"):
        bda.hypergradient(lower, upper, double(1.0), double(2.0), 3)  # type: ignore[misc]


@pytest.mark.parametrize("args", [(1,), (1, 2)], ids=["one loss", "two losses"])
def test_losses_given_to_the_optimizer_are_refused(args: Any) -> None:
    inner = bda.BDAInnerOptimizer(net().parameters(), lr=0.1)
    with pytest.raises(TypeError, match=r"`step` takes a closure.*diffopt.step\(lower, upper\)"):
        inner.step(*[torch.ones(()) for _ in args])


def test_zero_grad_of_a_differentiable_optimizer_does_nothing() -> None:
    model = net()
    inner = bda.BDAInnerOptimizer(model.parameters(), lr=0.1)
    with bda.innerloop_ctx(model, inner, copy_initial_weights=False) as (fmodel, diffopt):
        diffopt.zero_grad()
        before = [p.clone() for p in fmodel.parameters()]
        diffopt.step(fmodel(INPUTS).square().mean())
    assert not torch.equal(before[0], next(iter(fmodel.parameters())))


@pytest.mark.parametrize("steps", [np.int64(3), torch.tensor(3)], ids=["numpy", "tensor"])
def test_whole_numbers_of_other_types(steps: Any) -> None:
    assert hypergradient(steps=steps).grad == hypergradient(steps=3).grad
    assert len(unroll(steps=steps).trace.lower) == 3
    adjoint = bda.Truncated(last=steps, within=bda.Checkpointed(every=steps))
    assert hypergradient(adjoint=adjoint).grad == hypergradient().grad


# Rollouts without a graph.


@pytest.mark.parametrize(
    "options", [{"hyper": double(0.5)}, {"adjoint": bda.FirstOrder()}], ids=["hyper", "first order"]
)
def test_a_rollout_that_nothing_differentiates_is_warned_of(options: Any) -> None:
    with pytest.warns(UserWarning, match=r"nothing that this rollout depends on requires grad.*requires_grad_"):
        unroll(**options)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        unroll(**options)


def test_the_warning_names_the_line_of_the_user() -> None:
    with pytest.warns(UserWarning) as caught:
        bda.rollout(lower, None, double(1.0), double(2.0), steps=2, lr=0.1)
    assert caught[0].filename == __file__


# How things print.


def test_reprs() -> None:
    model = net()
    inner = bda.BDAInnerOptimizer(model.parameters(), lr=0.1, rule=torch.optim.Adam)
    assert repr(inner).startswith("BDAInnerOptimizer (rule=Adam\n")
    with bda.innerloop_ctx(model, inner, copy_initial_weights=False) as (_, diffopt):
        assert re.match(r"DiffOptimizer\(rule=Adam, k=0, groups=\[\{'lr': 0.1", repr(diffopt))
    trace = hypergradient().trace
    assert repr(trace) == "Trace(K=3, lower 0.5 ... 0.03125)"


# A start that something else computed.


def test_a_rollout_starts_from_given_parameters() -> None:
    model = net()
    scale = double(0.3).requires_grad_()
    start = {name: scale * p.detach() for name, p in model.named_parameters()}
    fmodel = unroll(model=model, hyper=double(0.5), params=start)
    (grad,) = torch.autograd.grad(fmodel(INPUTS).sum(), scale, retain_graph=True)

    values = dict(start)
    for _ in range(3):
        loss = (torch.func.functional_call(model, values, INPUTS) - 0.5).square().mean()
        slopes = torch.autograd.grad(loss, list(values.values()), create_graph=True)
        values = {name: p - 0.1 * g for (name, p), g in zip(values.items(), slopes, strict=True)}
    (want,) = torch.autograd.grad(torch.func.functional_call(model, values, INPUTS).sum(), scale)
    assert grad.item() == pytest.approx(want.item(), rel=1e-12)


def test_given_parameters_must_match() -> None:
    model = net()
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    with pytest.raises(ValueError, match=r"`params\['0.weight'\]` must have the shape of the parameter, \(4, 3\)"):
        unroll(model=model, params={**start, "0.weight": torch.zeros(2, 2)})
    with pytest.raises(ValueError, match="must have the names of the optimizer's parameters"):
        unroll(model=model, params={"0.weight": start["0.weight"]})


# Rates that are functions of k.


@pytest.mark.parametrize("adjoint", [bda.Unroll(), bda.Checkpointed(), bda.ForwardMode()], ids=repr)
def test_schedules_of_rates(adjoint: Any) -> None:
    out = bda.hypergradient(
        lower, upper, double(0.0), double(3.0), steps=4, lr=lambda k: 0.5 / k, upper_lr=lambda k: 0.1 * k,
        alpha=bda.harmonic(0.3), adjoint=adjoint,
    )  # fmt: skip
    y, slope = 0.0, 0.0
    for k in range(1, 5):
        alpha, rate, upper_rate = 0.3 / k, 0.5 / k, 0.1 * k
        factor = 1 - alpha * upper_rate * 2 - (1 - alpha) * rate
        y, slope = factor * y + (1 - alpha) * rate * 3.0, factor * slope + (1 - alpha) * rate
    assert out.params.item() == pytest.approx(y, rel=1e-12)
    assert out.grad.item() == pytest.approx(2 * y * slope, rel=1e-12)


def test_a_schedule_of_rates_in_the_optimizer() -> None:
    model = net()
    inner = bda.BDAInnerOptimizer(model.parameters(), lr=lambda k: 0.2 / k)
    hyper = double(0.5).requires_grad_()
    fmodel = inner.unroll(model, net_lower, hyper=hyper, steps=3)
    with bda.innerloop_ctx(model, inner) as (other, diffopt):
        for _ in range(3):
            diffopt.step(net_lower(other, hyper, None))
    for _ in range(3):
        inner.zero_grad()
        inner.step(lambda: (net_lower(model, hyper, None), None))
    for name, p in model.named_parameters():
        torch.testing.assert_close(fmodel.params[name], other.params[name], rtol=1e-12, atol=0)
        torch.testing.assert_close(fmodel.params[name], p, rtol=1e-12, atol=0)
    assert "lr" not in inner.state_dict()["param_groups"][0]
    with pytest.raises(ValueError, match=r"`lr` must be at least 0 at every step; got -0.1"):
        bda.rollout(lower, None, double(1.0), double(2.0).requires_grad_(), steps=2, lr=lambda k: 0.3 - 0.2 * k)


def test_a_schedule_of_rates_compiles() -> None:
    options = {"steps": 3, "lr": lambda k: 0.5 / k}
    eager = bda.hypergradient(lower, upper, double(0.0), double(3.0), **options)
    compiled = bda.hypergradient(lower, upper, double(0.0), double(3.0), compile=True, **options)
    assert compiled.grad.item() == pytest.approx(eager.grad.item(), rel=1e-12)


def test_mse_as_a_loss_of_its_own_arguments_is_right() -> None:
    fmodel = unroll(lower=lambda fnet, hyper, batch: F.mse_loss(fnet(INPUTS), hyper.expand(5, 2)))
    assert fmodel.params["0.weight"].requires_grad
