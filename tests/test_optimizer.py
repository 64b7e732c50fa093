"""BDAInnerOptimizer as a torch.optim.Optimizer: the in-place step, its forms, hooks, groups, refusals."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from installed import needs_torch
from optimizers import EXACT, descend, every_rule, lower, make, unchanged, upper
from problems import mlp, numbers
from torch import Tensor, nn, optim

import bda_optim as bda

pytestmark = pytest.mark.usefixtures("doubles")


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
            if a.is_complex() and settings:  # torch multiplies complex numbers, this package pairs of real ones
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
    plain.step(lambda: (lower(model), None))  # alpha is 0: the upper loss is ignored
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


# Hooks, groups and names, as of any Optimizer.


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


@needs_torch("2.6", "an optimizer of named parameters")
def test_named_parameters_are_taken() -> None:
    model = mlp()
    inner = bda.BDAInnerOptimizer(model.named_parameters(), lr=0.1)
    assert inner.param_groups[0]["param_names"] == [name for name, _ in model.named_parameters()]
    descend(model, inner, 2)
    inner.load_state_dict(inner.state_dict())
    assert list(inner.unroll(model, lower, steps=1).params) == [name for name, _ in model.named_parameters()]


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
    "text as rule": ({"rule": "Adam"}, TypeError, "`rule` must be a class of torch.optim"),
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


def test_a_schedule_that_leaves_its_range_is_reported_with_its_step() -> None:
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


class Interrupted(BaseException):
    """Not an Exception, as KeyboardInterrupt is not."""


def failing(after: int, error: type[BaseException]) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """Both losses; call number `after` of either raises in the middle of a forward pass."""
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
                for _ in range(after):  # the first calls return without a step
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
