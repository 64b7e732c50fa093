"""What may be diagnosed: modules, groups, dtypes, scales, shapes; and nothing of it changes."""

from __future__ import annotations

import copy
from typing import Any

import diagnosed
import pytest
import torch
from diagnosed import Problem
from torch import Tensor, nn
from torch.nn import functional

import bda_optim as bda


def codes(report: bda.Diagnosis) -> set[str]:
    return {finding.code for finding in report.findings}


class Net(nn.Module):
    """A frozen layer, batch statistics, dropout and two trained layers."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(4, 4)
        self.first = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.3)
        self.last = nn.Linear(6, 3)
        self.frozen.requires_grad_(False)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.drop(torch.tanh(self.norm(self.first(self.frozen(inputs))))))


INPUTS = torch.randn(2, 12, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
TARGETS = torch.randint(0, 3, (2, 12), generator=torch.Generator().manual_seed(1))


def lower(net: nn.Module, x: Tensor, batch: Any) -> Tensor:
    rows = slice(None) if batch is None else batch
    losses = functional.cross_entropy(net(INPUTS[0, rows]), TARGETS[0, rows], reduction="none")
    return (x[rows].sigmoid() * losses).mean()


def upper(net: nn.Module, x: Tensor, batch: Any) -> Tensor:
    return functional.cross_entropy(net(INPUTS[1]), TARGETS[1])


def network() -> tuple[Net, Tensor]:
    torch.manual_seed(3)
    return Net().double(), torch.zeros(12, dtype=torch.float64, requires_grad=True)


def test_nothing_is_changed() -> None:
    model, x = network()
    inner = bda.BDAInnerOptimizer((p for p in model.parameters() if p.requires_grad), lr=0.1, momentum=0.5)
    inner.step(lambda: (lower(model, x, None), None)[0].backward() or torch.zeros(()))
    for p in model.parameters():
        p.grad = torch.ones_like(p) if p.requires_grad else None
    x.grad = torch.ones_like(x)
    before = copy.deepcopy((model.state_dict(), inner.state_dict(), [p.grad for p in model.parameters()], x.grad))
    flags = [module.training for module in model.modules()]
    rng = torch.get_rng_state()
    first = inner.diagnose(model, lower, upper, hyper=x, steps=8)
    assert torch.equal(torch.get_rng_state(), rng)
    after = (model.state_dict(), inner.state_dict(), [p.grad for p in model.parameters()], x.grad)
    assert str(after) == str(before)
    for a, b in zip(before[0].values(), after[0].values(), strict=True):
        assert torch.equal(a, b)
    assert flags == [module.training for module in model.modules()]
    assert first.as_dict() == inner.diagnose(model, lower, upper, hyper=x, steps=8).as_dict()  # with dropout
    with pytest.raises(FloatingPointError):
        inner.diagnose(model, lambda net, x, b: lower(net, x, b) / 0, upper, hyper=x, steps=8)
    assert torch.equal(torch.get_rng_state(), rng)


def test_an_optimizer_sees_what_the_functions_see() -> None:
    """The same problem by `inner.diagnose` and by `bda.diagnose`."""
    weight = torch.randn(3, 4, dtype=torch.float64)
    bias = torch.randn(3, dtype=torch.float64)
    model = nn.Linear(4, 3).double()
    model.load_state_dict({"weight": weight, "bias": bias})
    x = torch.zeros(12, dtype=torch.float64, requires_grad=True)

    def flat(loss: Any) -> Any:
        return lambda y, x, batch: loss(lambda inputs: functional.linear(inputs, y["w"], y["b"]), x, batch)

    settings = {"lr": 0.3, "upper_lr": 0.2, "alpha": bda.harmonic(0.5)}
    inner = bda.BDAInnerOptimizer(model.parameters(), **settings)
    batches = [slice(0, 6), slice(6, 12)] * 5
    one = inner.diagnose(model, lower, upper, hyper=x, steps=10, batches=batches).as_dict()
    other = bda.diagnose(flat(lower), flat(upper), {"w": weight, "b": bias}, x, steps=10, batches=batches, **settings)
    two = other.as_dict()
    for key in ("start", "truncation", "lower_smoothness", "upper_strong_convexity", "flat_share", "change"):
        assert one[key] == pytest.approx(two[key], rel=1e-9)


def test_groups_with_different_rates_flatten_by_their_own() -> None:
    """Curvatures 1 and 1 with rates 0.5 and 1e-4: after 20 steps the second direction is flat, the first is not."""
    model = nn.Module()
    model.fast = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))
    model.slow = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))
    x = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    inner = bda.BDAInnerOptimizer([{"params": [model.fast], "lr": 0.5}, {"params": [model.slow], "lr": 1e-4}])
    report = inner.diagnose(
        model,
        lambda net, x, b: 0.5 * (net.fast - x) ** 2 + 0.5 * (net.slow - x) ** 2,
        lambda net, x, b: 0.5 * (net.fast - 2) ** 2 + (net.slow - 2) ** 2,
        hyper=x, steps=20, suggest=False,
    )  # fmt: skip
    assert report.lower_smoothness == pytest.approx(1.0)
    assert report.flat_directions == 1
    assert report.lower_rate == pytest.approx(0.5)
    assert "start" in codes(report)
    text = str(inner.diagnose(model, lambda net, x, b: (net.fast - x) ** 2 + (net.slow - x) ** 2,
                              lambda net, x, b: net.fast**2 + net.slow**2, hyper=x, steps=4).suggestion)  # fmt: skip
    assert "BDAInnerOptimizer(groups" in text


def test_weight_decay_and_momentum_count() -> None:
    """Decay fills the null direction; momentum 0.9 makes steps ten times as long."""
    problem = diagnosed.counterexample()
    plain = problem.call(bda.diagnose, steps=40, suggest=False)
    decayed = problem.call(bda.diagnose, steps=40, weight_decay=0.5, suggest=False)
    assert plain.flat_directions == 1 and decayed.flat_directions == 0
    assert decayed.lower_lowest == pytest.approx(0.5) and decayed.lower_smoothness == pytest.approx(1.5)
    assert decayed.start < 0.1
    fast = problem.call(bda.diagnose, steps=40, momentum=0.9, suggest=False)
    assert fast.flat_threshold == pytest.approx(plain.flat_threshold / 10)
    falling = problem.call(bda.diagnose, steps=40, lr=lambda k: 0.2 / k, suggest=False)
    assert falling.flat_threshold == pytest.approx(plain.flat_threshold * 40 / sum(1 / k for k in range(1, 41)))


@pytest.mark.parametrize("maximize", [False, True])
def test_maximisation_turns_the_lower_level_over(maximize: bool) -> None:
    problem = diagnosed.counterexample()
    sign = -1 if maximize else 1
    turned = problem._replace(lower=lambda y, x, b: sign * problem.lower(y, x))
    report = turned.call(bda.diagnose, steps=20, maximize=maximize, suggest=False)
    assert report.lower_smoothness == pytest.approx(1.0) and "not-convex" not in codes(report)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_dtypes(dtype: torch.dtype) -> None:
    eps = torch.finfo(dtype).eps
    exact = diagnosed.counterexample(0.25)
    narrow = exact._replace(params=exact.params.to(dtype), hyper=exact.hyper.to(dtype))
    report, want = (p.call(bda.diagnose, steps=16, suggest=False) for p in (narrow, exact))
    assert report.start == pytest.approx(want.start, rel=20 * eps)
    assert report.flat_share == pytest.approx(want.flat_share, rel=20 * eps)
    assert report.lower_smoothness == pytest.approx(1.0, rel=10 * eps)
    assert report.flat_directions == 1
    assert codes(report) == codes(want)
    suggested = narrow.call(bda.diagnose, steps=16).suggestion.settings
    assert suggested["alpha"] == bda.harmonic(1.0)
    if dtype is torch.float32:
        assert exact.error(narrow.call(bda.hypergradient, **suggested).grad.double()) < 0.02


@pytest.mark.parametrize("scale", [1e-25, 1e25])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_upper_loss_of_any_scale(scale: float, dtype: torch.dtype) -> None:
    """Every ratio stays; L_F and the limit of upper_lr scale."""
    problem = diagnosed.least_squares(6, 15, 2, seed=900)
    to = {"params": problem.params.to(dtype), "hyper": problem.hyper.to(dtype)}

    def scaled(factor: float) -> Problem:
        def lower(y: Tensor, x: Tensor, b: Any) -> Tensor:
            return problem.lower(y.double(), x.double()).to(dtype)

        def upper(y: Tensor, x: Tensor, b: Any) -> Tensor:
            return (problem.upper(y.double(), x.double()) * factor).to(dtype)

        settings = {**problem.settings, "upper_lr": problem.settings["upper_lr"] / factor}
        return problem._replace(lower=lower, upper=upper, settings=settings, **to)

    one, other = (scaled(factor).call(bda.diagnose, steps=60) for factor in (1.0, scale))
    rel = 1e-3 if dtype is torch.float32 else 1e-8
    assert other.start == pytest.approx(one.start, rel=rel)
    assert other.flat_share == pytest.approx(one.flat_share, rel=rel)
    assert other.truncation == pytest.approx(one.truncation, rel=rel, abs=1e-5 if dtype is torch.float32 else 1e-9)
    assert other.upper_smoothness == pytest.approx(scale * one.upper_smoothness, rel=rel)
    assert other.upper_strong_convexity == pytest.approx(scale * one.upper_strong_convexity, rel=rel)
    assert codes(other) == codes(one)
    assert other.suggestion.settings["alpha"] == one.suggestion.settings["alpha"]
    assert other.suggestion.settings["steps"] == one.suggestion.settings["steps"]


def test_a_scalar_y() -> None:
    for shape in ((), (1,)):
        problem = Problem(
            lambda y, x, b: 0.5 * ((y - x) ** 2).sum(), lambda y, x, b: 0.5 * (y**2).sum(),
            torch.zeros(shape, dtype=torch.float64), torch.tensor(2.0, dtype=torch.float64), {"lr": 0.5},
        )  # fmt: skip
        report = problem.call(bda.diagnose, steps=20)
        assert report.start == pytest.approx(0.5**20)
        assert report.lower_smoothness == report.lower_lowest == pytest.approx(1.0)
        assert report.parameters == 1 and report.flat_directions == 0
        assert report.suggestion.settings["alpha"] == 0.0


def test_a_slope_that_vanishes() -> None:
    """F does not depend on y: nothing is remembered, and nothing is wrong."""
    problem = diagnosed.ridge()
    report = problem._replace(upper=lambda y, x, b: (x**2).sum() + 0 * y.sum()).call(bda.diagnose, steps=10)
    assert report.start == 0 and report.flat_share == 0 and set(report.truncation.values()) == {0.0}
    assert "start" not in codes(report)
    linear = problem._replace(lower=lambda y, x, b: (x * y).sum()).call(bda.diagnose, steps=10, suggest=False)
    assert linear.lower_smoothness == 0 and linear.flat_directions == 20


def test_a_learned_initialisation_of_a_module() -> None:
    model, x = network()
    inner = bda.BDAInnerOptimizer((p for p in model.parameters() if p.requires_grad), lr=0.1)
    report = inner.diagnose(model, lower, upper, hyper=x, steps=6, copy_initial_weights=False)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert report.upper_scalars == trained + 12
    assert "start" not in codes(report) and report.truncation == {}


def test_a_backbone_is_an_upper_variable() -> None:
    model, x = network()
    model.eval()
    inner = bda.BDAInnerOptimizer(model.last.parameters(), lr=0.5)
    report = inner.diagnose(model, lower, upper, hyper=x, steps=16, suggest=False)
    backbone = sum(p.numel() for m in (model.first, model.norm) for p in m.parameters())
    assert report.upper_scalars == 12 + backbone
    fmodel = inner.unroll(model, lower, upper, hyper=x, steps=16)
    variables = [x, *model.first.parameters(), *model.norm.parameters()]
    exact = torch.autograd.grad(upper(fmodel, x, None), variables)
    fmodel = inner.unroll(model, lower, upper, hyper=x, steps=16, adjoint=bda.Truncated(last=4))
    cut = torch.autograd.grad(upper(fmodel, x, None), variables)
    error = sum(float((a - b).square().sum()) for a, b in zip(cut, exact, strict=True))
    size = sum(float(a.square().sum()) for a in exact)
    assert report.truncation[4] == pytest.approx((error / size) ** 0.5, rel=1e-9)


def test_a_prox_and_fista() -> None:
    problem = diagnosed.ridge()
    for options in ({"prox": bda.prox.l1(0.01)}, {"rule": bda.FISTA}, {"rule": bda.FISTA, "prox": bda.prox.l1(0.01)}):
        report = problem.call(bda.diagnose, steps=60, **options)
        assert report.start < 0.1 and not codes(report) - {"short-K"}
        out = bda.hypergradient(
            problem.lower, problem.upper, problem.params, problem.hyper, **report.suggestion.settings
        )
        assert torch.isfinite(out.grad).all()


def test_a_transformation_of_torchopt() -> None:
    torchopt = pytest.importorskip("torchopt")
    problem = diagnosed.ridge()
    settings = {"upper_lr": 0.1}
    plain = problem._replace(settings=settings).call(
        bda.diagnose, steps=20, rule=torchopt.sgd(lr=0.2), alpha=0.1, suggest=False
    )
    assert "scale-free-rule" not in codes(plain)
    adaptive = problem._replace(settings=settings).call(
        bda.diagnose, steps=20, rule=torchopt.adam(lr=0.02), alpha=0.1, suggest=False
    )
    assert "scale-free-rule" in codes(adaptive)
