"""Closed derivatives in inner loops: the switch, what becomes of a module's layers, and hypergradients."""

from __future__ import annotations

import copy
import io
import re
import threading
from typing import Any

import pytest
import torch
from campaign import awkward, layers, matrix
from closed_layers import distance, is_closed
from problems import difference_quotients, numbers
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import bda_optim as bda
from bda_optim._compiled.trace_key import freeze
from bda_optim._modules.closed import chosen
from bda_optim._modules.skeleton import Skeleton

pytestmark = pytest.mark.usefixtures("doubles")

CLOSED = (nn.BatchNorm1d, nn.BatchNorm2d, nn.Conv2d, nn.GroupNorm, nn.LayerNorm)


def net() -> nn.Sequential:
    """Two blocks with everything that has a closed derivative."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1),
        nn.BatchNorm2d(3),
        nn.Tanh(),
        nn.Conv2d(3, 2, 2, stride=2),
        nn.BatchNorm2d(2, affine=False, track_running_stats=False),
        nn.Tanh(),
        nn.Flatten(),
        nn.LayerNorm(8),
        nn.Linear(8, 8),
        nn.GroupNorm(2, 8),
        nn.Linear(8, 4),
        nn.BatchNorm1d(4, momentum=None),
        nn.Linear(4, 2),
    )


X = numbers(5, 1, 4, 4, seed=3)


def lower(fmodel: Any, hyper: Tensor, batch: Any = None) -> Tensor:
    out = fmodel(X if batch is None else batch)
    return hyper[0] * (out - 0.3).square().mean() + hyper[1] * out.sin().mean()


def upper(fmodel: Any, hyper: Tensor, batch: Any = None) -> Tensor:
    return (fmodel(X.flip(0) * 0.7) - 0.1).square().mean() + 0.1 * hyper.prod()


def hypergradient(module: nn.Module, **options: Any) -> tuple[list[Tensor], Any]:
    """The derivative by hyper and by the initial weights, and the functional module."""
    hyper = torch.tensor([1.0, 0.4], requires_grad=True)
    settings = {"lr": 0.1, "upper_lr": 0.05, "alpha": bda.harmonic(0.4)} | options.pop("settings", {})
    inner = bda.BDAInnerOptimizer(module.parameters(), **settings)
    fmodel = inner.unroll(module, lower, upper, hyper=hyper, steps=3, copy_initial_weights=False, **options)
    value = upper(fmodel, hyper)
    return list(torch.autograd.grad(value, [hyper, *module.parameters()], allow_unused=True)), fmodel


def compare(**options: Any) -> None:
    found = []
    for enabled in (True, False):
        with bda.closed_derivatives(enabled):
            grads, fmodel = hypergradient(net(), **copy.copy(options))
            found.append([g for g in grads if g is not None] + [b.double() for b in fmodel.buffer_dict.values()])
    assert distance(*found) < 1e-12


# Hypergradients.


@pytest.mark.parametrize(
    "adjoint", [bda.Unroll(), bda.Checkpointed(), bda.ForwardMode(), bda.Truncated(last=3)], ids=str
)
def test_hypergradients_are_those_of_torchs_own_derivatives(adjoint: Any) -> None:
    compare(adjoint=adjoint)


@pytest.mark.parametrize("rule", [torch.optim.Adam, torch.optim.RMSprop], ids=["Adam", "RMSprop"])
def test_with_other_rules(rule: Any) -> None:
    compare(settings={"rule": rule, "lr": 0.01, "eps": 0.1})


def test_tasks() -> None:
    batches = [numbers(2, 5, 1, 4, 4)] * 3
    found = []
    for enabled in (True, False):
        hyper = torch.tensor([1.0, 0.4], requires_grad=True)
        module = net()
        module[11].momentum = 0.1  # the cumulative average reads a number, which vmap cannot batch
        inner = bda.BDAInnerOptimizer(module.parameters(), lr=0.1)
        with bda.closed_derivatives(enabled):
            fmodel = inner.unroll(module, lower, hyper=hyper, steps=3, batches=batches, tasks=2)
        found.append(torch.autograd.grad(fmodel.losses(lower, hyper, batches[0]).sum(), hyper))
    assert distance(*found) < 1e-12


def test_hypergradients_agree_with_differences() -> None:
    module, hyper = net(), torch.tensor([1.0, 0.4], requires_grad=True)
    inner = bda.BDAInnerOptimizer(module.parameters(), lr=0.1)

    def value() -> Tensor:
        with bda.closed_derivatives(True):
            fmodel = inner.unroll(module, lower, hyper=hyper, steps=3)
        return upper(fmodel, hyper)

    got = torch.autograd.grad(value(), hyper)
    assert distance(got, difference_quotients(value, [hyper])) < 1e-7


@pytest.mark.parametrize("adjoint", [bda.Unroll(), bda.Checkpointed()], ids=str)
def test_loops_nest(adjoint: Any) -> None:
    """A loop inside the loss of another one takes third derivatives, where torch's own batch norm is wrong."""
    module, x = net(), torch.tensor([0.8, 0.4], requires_grad=True)
    inner = bda.BDAInnerOptimizer(module.parameters(), lr=0.3)

    def middle(y: Tensor, x: Tensor, batch: Any) -> Tensor:
        fmodel = inner.unroll(module, lower, hyper=y * x, steps=2, adjoint=adjoint)
        return upper(fmodel, y) + 0.5 * (y - 1).square().sum()

    def value() -> Tensor:
        y = bda.rollout(middle, None, torch.tensor([0.9, 0.5]), x, steps=2, lr=0.3, adjoint=adjoint)
        return y.square().sum()

    want = difference_quotients(value, [x])
    assert distance(torch.autograd.grad(value(), x), want) < 1e-6
    with bda.closed_derivatives(False):
        assert distance(torch.autograd.grad(value(), x), want) > 1e-4


CASES = {**layers.CASES, **awkward.CASES}


@pytest.mark.parametrize(
    "name", [name for name in CASES if re.search("BatchNorm|batch norm|Conv|LayerNorm|GroupNorm", name)]
)
def test_the_layers_of_the_campaign_with_every_adjoint(name: str) -> None:
    with bda.closed_derivatives(True):
        verdict = matrix.judge(CASES[name], others=True)
    assert not verdict.failure, verdict


# The switch.


def test_the_choice_holds_inside_the_context_and_for_its_thread() -> None:
    assert chosen() is None
    off = bda.closed_derivatives(False)
    seen: list[Any] = []
    with off:
        with bda.closed_derivatives():
            assert chosen() is True
            with off, off:
                assert chosen() is False
            assert chosen() is True
        thread = threading.Thread(target=lambda: seen.append(chosen()))
        thread.start()
        thread.join()
        assert chosen() is False and seen == [None]
    with pytest.raises(ZeroDivisionError), off:
        _ = 1 / 0
    assert chosen() is None


def test_only_booleans_are_a_choice() -> None:
    with pytest.raises(TypeError, match=r"`enabled` is True or False; got 'auto'"):
        bda.closed_derivatives("auto")  # type: ignore[arg-type]


def test_the_choice_stays_with_the_loop() -> None:
    module = net()
    inner = bda.BDAInnerOptimizer(module.parameters(), lr=0.1)
    with bda.closed_derivatives(True), bda.innerloop_ctx(module, inner) as (fmodel, diffopt):
        with bda.closed_derivatives(False):
            assert is_closed(fmodel[1](fmodel[0](X)))
            diffopt.step(lower(fmodel, torch.ones(2)))
            assert is_closed(fmodel[1](fmodel[0](X)))


def test_a_program_is_compiled_for_each_choice() -> None:
    module, keys = net(), []
    for enabled in (True, False, True):
        with bda.closed_derivatives(enabled):
            keys.append(freeze(Skeleton(module))[0])
    assert keys[0] == keys[2] != keys[1]


# The layers of a twin.


def test_layers_keep_their_name_class_hooks_and_the_users_module_is_untouched() -> None:
    module, calls = net(), []
    module[1].register_forward_hook(lambda layer, inputs, output: calls.append(type(output.grad_fn).__name__))
    before = [type(layer) for layer in module]
    with bda.closed_derivatives(True):
        twin = Skeleton(module).root
    twin(X)
    assert len(calls) == 1 and "Closed" in calls[0]
    assert [type(layer) for layer in module] == before
    for layer, own in zip(twin, module, strict=True):
        assert isinstance(layer, type(own)) and repr(layer) == repr(own)
        assert (type(layer) is not type(own)) == isinstance(own, CLOSED)
    again = copy.deepcopy(twin)
    file = io.BytesIO()
    torch.save(twin[4], file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert torch.equal(again[4](X.expand(5, 2, 4, 4)), loaded(X.expand(5, 2, 4, 4)))


def test_a_module_of_a_loop_can_enter_another_one_with_another_choice() -> None:
    with bda.closed_derivatives(True):
        first = Skeleton(net()).root
    with bda.closed_derivatives(False):
        second = Skeleton(first).root
    third = Skeleton(first).root
    assert type(second[1]) is nn.BatchNorm2d and type(third[1]) is type(first[1])
    assert first[1].closed_from == 0 < third[1].closed_from


class Own(nn.BatchNorm2d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


def test_subclasses_and_replaced_methods_are_left_alone() -> None:
    module = nn.Sequential(Own(1), nn.BatchNorm2d(1), nn.SyncBatchNorm(1).eval(), nn.InstanceNorm2d(1, affine=True))
    module[1].forward = lambda input: input * 3
    with bda.closed_derivatives(True):
        twin = Skeleton(module).root
    assert type(twin[0]) is Own and type(twin[2]) is nn.SyncBatchNorm
    assert torch.equal(twin(X), module(X))
    assert torch.equal(twin[1](X), X * 3)


def test_functional_calls_are_torchs() -> None:
    module = net()
    with bda.closed_derivatives(True):
        twin = Skeleton(module).root
    weight = twin[1].weight
    assert not is_closed(torch.nn.functional.batch_norm(X.expand(5, 3, 4, 4), None, None, weight, training=True))


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


@pytest.mark.parametrize(
    "change",
    [
        parametrizations.weight_norm,
        nn.utils.weight_norm,
        lambda layer: parametrizations.spectral_norm(layer).eval(),
        lambda layer: nn.utils.spectral_norm(layer).eval(),
        lambda layer: parametrize.register_parametrization(layer, "weight", Doubled()),
    ],
    ids=["weight norm", "weight norm by hook", "spectral norm", "spectral norm by hook", "of the user's"],
)
@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_parametrized_layers(change: Any) -> None:
    found = []
    for enabled in (True, False):
        module = net()
        change(module[3])
        with bda.closed_derivatives(enabled):
            found.append(hypergradient(module)[0])
    assert distance(*[[g for g in grads if g is not None] for grads in found]) < 1e-12
