"""Numerical guard rails: loops that are not finite, adjoints that explode, replays that differ from the first pass."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import problems
import pytest
import torch
from problems import double
from torch import Tensor, nn, optim

import bda_optim as bda
from bda_optim._adjoints.base import Step

EXACT = [*problems.EXACT, bda.Checkpointed(every=2)]
exact = pytest.mark.parametrize("adjoint", EXACT, ids=str)


class Problem:
    """Two tensors under Adam, whose step k is made to fail in a given way; a loss draws random numbers."""

    def __init__(self, what: str, k: int, steps: int = 7) -> None:
        self.start = {"w": double(1.0, -2.0), "b": double(0.5)}
        self.x = double(0.7)
        self.options: dict[str, Any] = dict(
            steps=steps, lr=0.1, rule=optim.Adam, batches=[what if i + 1 == k else "" for i in range(steps)]
        )

    @staticmethod
    def lower(y: Any, x: Tensor, what: str) -> Tensor:
        value = ((y["w"] - x) ** 2 * torch.rand(2, dtype=torch.float64)).sum() + (y["b"] + x) ** 2
        if what == "loss":
            return value * math.nan
        if what == "gradient":  # the derivative of a root at zero
            return value + (y["b"] - y["b"].detach()).abs().sqrt()
        return value

    @staticmethod
    def upper(y: Any, x: Tensor, batch: Any) -> Tensor:
        return (y["w"] * y["b"]).sum() + x * y["b"]

    def run(self, **options: Any) -> bda.Hypergradient:
        torch.manual_seed(3)
        return bda.hypergradient(self.lower, self.upper, self.start, self.x, **{**self.options, **options})


@exact
@pytest.mark.parametrize("k", [1, 2, 4, 7])
@pytest.mark.parametrize(
    "what, told",
    [("loss", "the lower loss is not finite at"), ("gradient", r"the lower gradient of `params\['b'\]` is not")],
)
def test_the_error_names_the_step_the_parameter_and_the_last_losses(adjoint: Any, k: int, what: str, told: str) -> None:
    with pytest.raises(FloatingPointError, match=rf"diverged: {told}.* step k={k} of 7\. Lower `lr`") as caught:
        Problem(what, k).run(adjoint=adjoint)
    good = Problem("", 0).run(adjoint=adjoint, on_divergence="ignore").trace.lower[:k].tolist()
    if what == "loss":
        good[-1] = math.nan
    shown = ", ".join(f"{loss:.4g}" for loss in good[-5:])
    assert str(caught.value).endswith(f"The last lower losses, up to k={k}: {shown}.")


def test_an_iterate_that_overflows_is_named_with_its_step() -> None:
    def f(y: Any, x: Any, b: Any) -> Tensor:
        return y["b"].pow(4).sum() + y["a"].square().sum()

    start = {"a": double(1.0), "b": double(1e60, 1.0)}
    with pytest.raises(FloatingPointError, match=r"diverged: `params\['b'\]` is not finite after step k=1 of 3\."):
        bda.rollout(f, None, start, steps=3, lr=1e200)
    start["a"] = double(1e120)
    with pytest.raises(FloatingPointError, match=r"`params\['a'\]`, `params\['b'\]` are not finite after step k=1 of"):
        bda.rollout(f, None, start, steps=3, lr=1e200)


def test_the_upper_gradient_is_told_apart() -> None:
    def upper(y: Tensor, x: Any, batch: Any) -> Tensor:
        return y.sqrt().sum()  # at 0 its value is 0, and its derivative is not finite

    with pytest.raises(FloatingPointError, match=r"the upper gradient of `params` is not finite at step k=1 of 4"):
        bda.rollout(lambda y, x, b: (y - 1).square().sum(), upper, double(0.0, 1.0), steps=4, lr=0.1, alpha=0.3)


def test_parameters_of_a_module_are_named_and_tasks_counted() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    inner = bda.BDAInnerOptimizer(model.parameters(), lr=0.1)

    def lower(net: Any, hyper: Any, batch: Any) -> Tensor:
        weight = net[1].weight
        return net(torch.ones(1, 2)).square().sum() * batch + (weight - weight.detach()).abs().sqrt().sum()

    with pytest.raises(FloatingPointError, match=r"the lower gradient of `1\.weight` is not finite at step k=1 of 3"):
        inner.unroll(model, lower, steps=3, batches=[1.0] * 3)
    ones = torch.ones(3)
    batches = [ones, ones, torch.tensor([1.0, math.nan, 1.0]), ones]
    with pytest.raises(FloatingPointError, match=r"step k=3 of 4.* The last lower losses of task 1, up to k=3: .* nan"):
        inner.unroll(
            model, lambda n, h, b: n(torch.ones(1, 2)).square().sum() * b, steps=4, batches=batches, tasks=3
        )  # fmt: skip


def same(got: bda.Hypergradient, want: bda.Hypergradient) -> None:
    """Both agree to the bit."""
    assert torch.equal(got.grad, want.grad) and torch.equal(got.value, want.value)
    assert all(torch.equal(got.params[name], want.params[name]) for name in want.params)
    assert torch.equal(got.trace.lower, want.trace.lower)


STOPPED = [*EXACT, bda.FirstOrder(), bda.Truncated(last=2), bda.Truncated(last=2, within=bda.Checkpointed())]


@pytest.mark.parametrize("adjoint", STOPPED, ids=str)
@pytest.mark.parametrize("what", ["loss", "gradient"])
@pytest.mark.parametrize("k", [2, 4, 7])
def test_stop_is_a_rollout_of_one_step_less(adjoint: Any, what: str, k: int) -> None:
    problem = Problem(what, k)
    with pytest.warns(RuntimeWarning, match=rf"step k={k} of 7.* It was stopped after {k - 1} steps\."):
        got = problem.run(adjoint=adjoint, on_divergence="stop")
    after = torch.rand(())
    same(got, problem.run(adjoint=adjoint, steps=k - 1, batches=[""] * (k - 1)))
    assert torch.equal(after, torch.rand(())), "random numbers go on as after the shorter rollout"


def test_stop_of_a_module_leaves_the_buffers_of_the_shorter_loop_and_gradients_of_everything() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Linear(4, 1)).double()
    data, x = torch.randn(8, 3, dtype=torch.float64), double(0.5).requires_grad_()
    inner = bda.BDAInnerOptimizer(model.parameters(), lr=0.05, alpha=bda.harmonic(0.5))

    def lower(net: Any, x: Tensor, batch: float) -> Tensor:
        return batch * x * (net(data) - 1).square().mean()

    def upper(net: Any, x: Tensor, batch: Any) -> Tensor:
        return (net(data.flip(0)) + x).square().mean()

    def run(batches: list[float], **options: Any) -> list[Tensor]:
        torch.manual_seed(1)
        fmodel = inner.unroll(
            model, lower, upper, hyper=x, steps=len(batches), batches=batches, copy_initial_weights=False, **options
        )
        assert fmodel.trace is not None
        grads = torch.autograd.grad(upper(fmodel, x, None), [x, *model.parameters()])
        return [*grads, *fmodel.params.values(), *fmodel.buffer_dict.values(), fmodel.trace.lower]

    with pytest.warns(RuntimeWarning, match="stopped after 3 steps"):
        got = run([1.0, 1.0, 1.0, math.inf, 1.0], on_divergence="stop")
    assert all(torch.equal(a, b) for a, b in zip(got, run([1.0, 1.0, 1.0]), strict=True))


def test_stop_with_tasks_ends_all_of_them() -> None:
    def lower(y: Tensor, x: Tensor, batch: Tensor) -> Tensor:
        return (y - x).square() * batch

    bad = [torch.ones(3).double(), torch.ones(3).double(), torch.tensor([1.0, 1.0, math.nan]).double()]
    x, options = double(0.3).requires_grad_(), {"lr": 0.1, "tasks": 3}
    with pytest.warns(RuntimeWarning, match="stopped after 2 steps"):
        got = bda.rollout(lower, None, double(1.0), x, steps=3, batches=bad, on_divergence="stop", **options)
    want = bda.rollout(lower, None, double(1.0), x, steps=2, batches=bad[:2], **options)
    assert torch.equal(got, want)
    assert torch.equal(*(torch.autograd.grad(y.sum(), x)[0] for y in (got, want)))


def test_without_a_single_good_step_stop_raises() -> None:
    with pytest.raises(FloatingPointError, match="at step k=1 of 7"):
        Problem("loss", 1).run(on_divergence="stop")


@exact
def test_ignore_returns_what_there_is(adjoint: Any) -> None:
    out = Problem("loss", 3).run(adjoint=adjoint, on_divergence="ignore")
    assert out.trace.lower.isfinite().tolist() == [True, True, *[False] * 5] and out.value.isnan()


def test_a_finite_loop_is_the_same_for_every_choice() -> None:
    outs = [Problem("", 0).run(on_divergence=choice) for choice in ("raise", "stop", "ignore")]
    same(outs[0], outs[1])
    same(outs[0], outs[2])


def test_large_losses_of_many_tasks_are_no_divergence() -> None:
    huge = torch.full((64,), 3e38)
    y = bda.rollout(lambda y, x, b: y * b, None, torch.tensor(1.0), steps=1, lr=1e-38, batches=[huge], tasks=64)
    assert y.isfinite().all()


def test_a_loss_that_does_not_repeat_is_told_by_its_first_value() -> None:
    values = iter([1.0, 1.0, math.nan] + [1.0] * 100)
    with pytest.raises(FloatingPointError, match="the lower loss is not finite at step k=3 of 5"):
        bda.rollout(lambda y, x, b: y.square() * next(values), None, double(1.0), steps=5, lr=0.1)
    values = iter([1.0] * 4 + [math.nan] + [1.0] * 100)
    with pytest.raises(FloatingPointError, match="the lower loss is not finite at step k=5 of 5"):
        bda.rollout(lambda y, x, b: y.square() * next(values), None, double(1.0), steps=5, lr=0.1)


def test_random_numbers_after_an_error_go_on_as_after_the_loop() -> None:
    with pytest.raises(FloatingPointError):
        Problem("loss", 5).run()
    after = torch.rand(())
    Problem("loss", 5).run(on_divergence="ignore")
    assert torch.equal(after, torch.rand(()))


def test_wrong_choices_are_refused() -> None:
    with pytest.raises(ValueError, match=r'`on_divergence` must be "raise", "stop" or "ignore"; got \'warn\''):
        Problem("", 0).run(on_divergence="warn")
    model = nn.Linear(1, 1)
    inner = bda.BDAInnerOptimizer(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="`on_divergence` must be"):
        inner.unroll(model, lambda n, h, b: n(torch.ones(1)).sum(), steps=1, on_divergence=None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"chunk_size=1.*Leave `chunk_size` out"):
        inner.unroll(
            model, lambda n, h, b: n(b).sum(), steps=1, batches=[torch.ones(2, 1)], tasks=2, chunk_size=1,
            on_divergence="stop",
        )  # fmt: skip
    with (
        pytest.raises(ValueError, match=r"ends where you end it.*`diffopt\.check\(\)`"),
        bda.innerloop_ctx(model, inner, on_divergence="stop"),
    ):
        pass


def test_innerloop_names_what_is_not_finite_or_ignores_it() -> None:
    model = nn.Linear(2, 1)
    inner = bda.BDAInnerOptimizer(model.parameters(), lr=0.1)

    def run(**options: Any) -> None:
        with bda.innerloop_ctx(model, inner, **options) as (fmodel, diffopt):
            for _ in range(2):
                bias = fmodel.bias
                diffopt.step(fmodel(torch.ones(2)).square().sum(), grad_callback=lambda g: [g[0], g[1] * math.inf])
            assert bias is not None

    with pytest.raises(FloatingPointError, match=r"the lower loss is not finite at step k=2 of 2.*up to k=2: .*, inf"):
        run()
    run(on_divergence="ignore")
    with (
        pytest.raises(FloatingPointError, match=r"the parameters are not finite after the last step, k=1: `bias`\."),
        bda.innerloop_ctx(model, inner) as (fmodel, diffopt),
    ):
        diffopt.step(fmodel(torch.ones(2)).square().sum(), grad_callback=lambda g: [g[0], g[1] * math.inf])


# Adjoints that explode.


def growing(y: Tensor, x: Tensor, batch: Any) -> Tensor:
    """With lr = 9 a step multiplies y by 10."""
    return -0.5 * y.square().sum() + 1e-6 * x * y.sum()


GUARDED = [
    bda.Unroll(),
    bda.Checkpointed(),
    bda.Checkpointed(every=3),
    bda.Checkpointed(slots=2),
    bda.Truncated(last=7),
    bda.Truncated(last=7, within=bda.Checkpointed()),
]


def exploding(adjoint: Any, steps: int = 8, **options: Any) -> bda.Hypergradient:
    return bda.hypergradient(
        growing, lambda y, x, b: 3 * y[0] + 4 * y[1], double(0.0, 0.0), double(1.0), steps=steps, lr=9.0,
        adjoint=adjoint, **options,
    )  # fmt: skip


@pytest.mark.parametrize("within", GUARDED, ids=str)
def test_exploding_adjoints_are_reported_with_their_step(within: Any) -> None:
    # The adjoint after step 8 is (3, 4); after step k its norm is 5 * 10 ** (8 - k).
    with pytest.raises(FloatingPointError, match=r"norm is 5e\+04 at step k=4 of 8 .* beyond limit=10000;"):
        exploding(bda.Guarded(within, limit=1e4))
    plain = exploding(within)
    assert torch.equal(exploding(bda.Guarded(within, limit=1e9)).grad, plain.grad)


@pytest.mark.parametrize("within", GUARDED, ids=str)
def test_clipped_adjoints(within: Any) -> None:
    steps = getattr(within, "last", 8)
    adjoint, want = double(3.0, 4.0), 0.0
    for _ in range(steps):
        adjoint = adjoint * min(1.0, 20.0 / float(adjoint.norm()))
        want += -9e-6 * float(adjoint.sum())
        adjoint = 10 * adjoint
    assert exploding(bda.Guarded(within, clip=20.0)).grad.item() == pytest.approx(want, rel=1e-12)
    assert exploding(within).grad.item() != pytest.approx(want, rel=0.1)
    assert torch.equal(exploding(bda.Guarded(within, clip=1e12)).grad, exploding(within).grad)


def test_guarded_first_order() -> None:
    def run(adjoint: Any) -> Tensor:
        lr = double(0.5).requires_grad_()
        y = bda.rollout(growing, None, double(1.0, 1.0), double(1.0), steps=4, lr=lr, adjoint=adjoint)
        return torch.autograd.grad(y.sum(), lr)[0]

    assert torch.equal(run(bda.Guarded(bda.FirstOrder(), limit=1e6)), run(bda.FirstOrder()))


def test_guarded_adam_on_a_module_changes_nothing_and_finds_nan() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
    inner = bda.BDAInnerOptimizer(model.parameters(), lr=0.05, rule=optim.Adam, alpha=0.2)
    data, x = torch.randn(6, 3, dtype=torch.float64), double(0.5).requires_grad_()

    def lower(net: Any, x: Tensor, batch: Any) -> Tensor:
        return x * (net(data) - 1).square().mean()

    def upper(net: Any, x: Tensor, batch: Any) -> Tensor:
        return (net(data.flip(0)) + x).square().mean()

    def run(adjoint: Any, factor: float = 1.0) -> Tensor:
        fmodel = inner.unroll(model, lower, upper, hyper=x, steps=5, adjoint=adjoint)
        return torch.autograd.grad(factor * upper(fmodel, x, None), x)[0]

    for within in (bda.Unroll(), bda.Checkpointed()):
        assert torch.equal(run(bda.Guarded(within, limit=1e6)), run(within))
        with pytest.raises(FloatingPointError, match="norm is nan at step k=5 of 5"):
            run(bda.Guarded(within, limit=1e6), math.nan)


@pytest.mark.parametrize("within", [bda.Unroll(), bda.Checkpointed()], ids=str)
def test_guarded_second_derivatives(within: Any) -> None:
    def slope(adjoint: Any) -> Tensor:
        x = double(0.4).requires_grad_()
        y = bda.rollout(
            lambda y, x, b: (y.square() * x).sum() + y.pow(4).sum(), None, double(0.3, 0.8), x, steps=3, lr=0.1,
            adjoint=adjoint,
        )  # fmt: skip
        (first,) = torch.autograd.grad((y.square() * x).sum(), x, create_graph=True)
        return torch.autograd.grad(first, x)[0]

    torch.testing.assert_close(slope(bda.Guarded(within, limit=1e6, clip=1e6)), slope(bda.Unroll()))


def test_a_backward_pass_that_was_broken_off_is_forgotten() -> None:
    def stop(grad: Tensor) -> None:
        if broken:
            raise KeyboardInterrupt

    def f(y: Tensor, x: Tensor, batch: Any) -> Tensor:
        if batch:
            y.register_hook(stop)  # after the adjoints of the later steps were noted
        return growing(y, x, None)

    x, broken = double(1.0).requires_grad_(), False
    y = bda.rollout(f, None, double(0.0, 0.0), x, steps=4, lr=9.0, batches=[0, 0, 1, 0], adjoint=bda.Guarded(limit=1e4))
    broken = True
    with pytest.raises(KeyboardInterrupt):
        torch.autograd.grad(1e5 * y.sum(), x, retain_graph=True)
    broken = False
    assert torch.autograd.grad(y.sum(), x)[0].isfinite()


@pytest.mark.parametrize(
    "options, message",
    [
        ({}, "`Guarded` needs a `limit`"),
        ({"limit": 0.0}, "`limit` must be a positive number; got 0.0"),
        ({"clip": -1}, "`clip` must be a positive number; got -1"),
        ({"clip": math.nan}, "`clip` must be a positive number; got nan"),
        ({"limit": 1.0, "within": bda.ForwardMode()}, "has no adjoints to guard"),
        ({"limit": 1.0, "within": bda.Truncated(2, within=bda.ForwardMode())}, "has no adjoints to guard"),
    ],
)
def test_guards_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bda.Guarded(**options)


def test_compiled_steps_cannot_be_guarded() -> None:
    with pytest.raises(ValueError, match=r"compile=True\. Use compile=False"):
        exploding(bda.Guarded(limit=1.0), compile=True)


# Replays that differ from the first pass.

REPLAYED = [bda.Checkpointed(check=True), bda.Checkpointed(every=1, check=True), bda.Checkpointed(slots=2, check=True)]


class Drawing(nn.Module):
    """Random numbers of several kinds, and buffers that a forward pass changes.

    Not an LSTM in float32: torch rounds differently there with and without a graph of the gradient.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 6), nn.BatchNorm1d(6), nn.GRU(6, 2, dropout=0.3, num_layers=2)
        self.dropout, self.slope = nn.Dropout(0.4), nn.RReLU()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.slope(self.dropout(self.norm(self.first(x))) + torch.randn(()) * torch.rand(6))
        return self.last(torch.bernoulli(torch.full_like(hidden, 0.5)) * hidden)[0]


@pytest.mark.parametrize("adjoint", REPLAYED, ids=str)
@pytest.mark.parametrize("precision", [torch.float64, torch.float32, torch.bfloat16])
def test_replays_are_the_first_pass_to_the_bit(adjoint: Any, precision: torch.dtype) -> None:
    model = Drawing().double() if precision is torch.float64 else Drawing()
    data = torch.randn(5, 3, dtype=next(model.parameters()).dtype)
    w = torch.zeros(5, dtype=data.dtype, requires_grad=True)
    inner = bda.BDAInnerOptimizer(model.parameters(), lr=0.05, momentum=0.9, alpha=bda.harmonic(0.5))

    def lower(net: Any, w: Tensor, batch: Any) -> Tensor:
        return (torch.sigmoid(w) * net(data).square().mean(1)).sum() * (1 + torch.rand(()))

    def upper(net: Any, w: Tensor, batch: Any) -> Tensor:
        return (net(data.flip(0)) - 1).square().mean()

    def slope(adjoint: Any) -> Tensor:
        torch.manual_seed(5)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision is torch.bfloat16):
            fmodel = inner.unroll(model, lower, upper, hyper=w, steps=5, adjoint=adjoint)
            value = upper(fmodel, w, None)
        return torch.autograd.grad(value, w)[0]

    torch.testing.assert_close(slope(adjoint), slope(bda.Unroll()))


def drifting(amount: float, at: int, times: int = 1) -> Any:
    """A loss that differs slightly when its step `at` is run again."""
    seen = [0] * 10

    def lower(y: Tensor, x: Tensor, k: int) -> Tensor:
        seen[k] += 1
        return ((y - x) ** 2).sum() * (1 + (amount if k == at and seen[k] > times else 0.0))

    return lower


def replay(lower: Any, adjoint: Any, **options: Any) -> Tensor:
    x = double(0.5).requires_grad_()
    y = bda.rollout(lower, None, double(1.0, 2.0), x, steps=6, lr=0.1, batches=list(range(6)), adjoint=adjoint)
    return torch.autograd.grad(y.sum(), x, **options)[0]


@pytest.mark.parametrize("adjoint", REPLAYED[:2], ids=str)
def test_a_drift_within_rounding_is_found_by_the_check(adjoint: Any) -> None:
    forgiving = dataclasses.replace(adjoint, check=False)
    assert replay(drifting(1e-12, at=3), forgiving).isfinite()
    with pytest.raises(RuntimeError, match=r"another result than the first time.*in call 4 of the step"):
        replay(drifting(1e-12, at=3), adjoint)
    assert torch.equal(replay(drifting(0.0, at=3), adjoint), replay(drifting(0.0, at=3), bda.Unroll()))


@pytest.mark.parametrize("adjoint", [bda.Checkpointed(), bda.Checkpointed(slots=3)], ids=str)
def test_a_replay_with_create_graph_is_compared_too(adjoint: Any) -> None:
    assert replay(drifting(0.0, at=3), adjoint, create_graph=True).isfinite()
    for amount in (0.5, math.nan):
        with pytest.raises(RuntimeError, match="another result than the first time"):
            replay(drifting(amount, at=3), adjoint, create_graph=True)


@pytest.mark.parametrize("adjoint", [bda.Checkpointed(), bda.Checkpointed(slots=3)], ids=str)
def test_a_replay_that_is_not_finite_is_found(adjoint: Any) -> None:
    with pytest.raises(RuntimeError, match="another result than the first time"):
        replay(drifting(math.nan, at=3), adjoint)


def test_the_default_dtype_is_restored_in_a_replay() -> None:
    x = double(0.5).requires_grad_()

    def lower(y: Tensor, x: Tensor, batch: Any) -> Tensor:
        return ((y - x) * torch.rand(2)).square().sum()  # float32 and float64 draw different numbers

    def slope(later: torch.dtype) -> Tensor:
        torch.manual_seed(0)
        torch.set_default_dtype(torch.float64)
        y = bda.rollout(lower, None, double(1.0, 2.0), x, steps=4, lr=0.1, adjoint=bda.Checkpointed(check=True))
        torch.set_default_dtype(later)
        (found,) = torch.autograd.grad(y.sum(), x)
        assert torch.get_default_dtype() == later
        return found

    assert torch.equal(slope(torch.float32), slope(torch.float64))


def test_a_context_of_the_users_own_that_is_left_before_the_backward_pass_is_noticed() -> None:
    scale = [1.0]

    @contextlib.contextmanager
    def scaled(factor: float) -> Iterator[None]:
        before, scale[0] = scale[0], factor
        yield
        scale[0] = before

    x = double(0.5).requires_grad_()
    for inside in (True, False):
        with scaled(2.0):
            y = bda.rollout(
                lambda y, x, b: ((y - x) * scale[0]).square().sum(), None, double(1.0, 2.0), x, steps=4, lr=0.1,
                adjoint=bda.Checkpointed(),
            )  # fmt: skip
            if inside:
                assert torch.autograd.grad(y.sum(), x)[0].isfinite()
    with pytest.raises(RuntimeError, match="another result than the first time"):
        torch.autograd.grad(y.sum(), x)


class Wavering(Step):
    """Stands in for a compiled program whose results change from the fourth call on."""

    taped = False

    def __init__(self, drift: float) -> None:
        super().__init__(None)
        self.calls, self.drift = 0, drift

    def __call__(self, state: Any, hyper: Any, unit: Any) -> Any:
        self.calls += 1
        new = state * hyper[0] + self.drift * (self.calls > 4)
        return new, [new.detach()]

    def pull(self, state: Any, hyper: Any, unit: Any, cotangents: Any, saved: Any = None) -> Any:
        return [cotangents[0] * hyper[0].detach(), (cotangents[0] * state).sum()]

    def record(self, state: Any, hyper: Any, unit: Any) -> Any:
        return *self(state, hyper, unit), None


def test_replays_of_compiled_steps_are_compared() -> None:
    def slope(adjoint: Any, drift: float) -> Tensor:
        x = double(1.1).requires_grad_()
        y, _ = adjoint(Wavering(drift), double(1.0), (x,), range(4))
        return torch.autograd.grad(y, x)[0]

    assert slope(bda.Checkpointed(check=True), 0.0).item() == pytest.approx(4 * 1.1**3)
    assert slope(bda.Checkpointed(), 1e-12).item() == pytest.approx(4 * 1.1**3)
    for adjoint, drift in ((bda.Checkpointed(), 1.0), (bda.Checkpointed(check=True), 1e-12)):
        with pytest.raises(RuntimeError, match="another result than the first time"):
            slope(adjoint, drift)
