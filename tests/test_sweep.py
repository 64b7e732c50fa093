"""Plain gradient descent takes one backward pass per step; the way by two gradients is the witness."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

import bda_optim as bda
from bda_optim._step import sweep
from bda_optim._step.rules.sgd import SGD

pytestmark = pytest.mark.usefixtures("double")


@pytest.fixture
def double() -> Any:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


class ByGradients(SGD):
    """The same rule by another name: it takes both gradients one by one."""


def lower(y: Any, x: Tensor, batch: Any) -> Tensor:
    return ((y["a"] - x).sin() ** 2).sum() + (y["a"].sum() * y["b"]).square().mean()


def upper(y: Any, x: Tensor, batch: Any) -> Tensor:
    return (y["a"] * y["b"]).sum().cos() + (x * y["a"]).square().sum()


def start() -> dict[str, Tensor]:
    return {"a": torch.tensor([0.3, -0.7, 1.1]), "b": torch.tensor([0.5])}


def seeds_of(loss: Callable[..., Tensor], seen: list[float]) -> Callable[..., Tensor]:
    """The same loss; what its backward passes are seeded with is noted."""

    def noted(y: Any, x: Any, batch: Any) -> Tensor:
        value: Tensor = Noted.apply(loss(y, x, batch), seen)
        return value

    return noted


class Noted(torch.autograd.Function):
    """The identity; it notes its seeds, and counts as a function of the package."""

    __module__ = "bda_optim.noted"

    @staticmethod
    def forward(ctx: Any, loss: Tensor, seen: list[float]) -> Tensor:
        ctx.seen = seen
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, seed: Tensor) -> tuple[Tensor, None]:
        ctx.seen.append(float(seed))
        return seed, None


def test_a_step_is_one_pass_from_both_losses_with_weighted_seeds() -> None:
    low: list[float] = []
    up: list[float] = []
    losses = seeds_of(lower, low), seeds_of(upper, up)
    with torch.no_grad():
        bda.rollout(*losses, start(), torch.ones(3), steps=2, lr=0.1, upper_lr=0.3, alpha=bda.harmonic(0.5))
    assert low == pytest.approx([-0.5 * 0.1, -0.75 * 0.1]) and up == pytest.approx([-0.5 * 0.3, -0.25 * 0.3])


@pytest.mark.parametrize("rule", [ByGradients, torch.optim.Adam])
def test_other_rules_take_both_gradients(rule: Any) -> None:
    seen: list[float] = []
    with torch.no_grad():
        bda.rollout(seeds_of(lower, seen), upper, start(), torch.ones(3), steps=2, lr=0.1, alpha=0.5, rule=rule)
    assert seen == [1.0, 1.0]


@pytest.mark.parametrize(
    "settings",
    [
        dict(momentum=0.9),
        dict(weight_decay=0.1),
        dict(clip_norm=1.0),
        dict(clip_value=1.0),
        dict(prox=bda.prox.l1(0.1)),
        dict(alpha=0.0),
        dict(alpha=[torch.full((3,), 0.5), torch.full((1,), 0.5)]),
        dict(lr=[torch.full((3,), 0.1), torch.full((1,), 0.2)]),
    ],
    ids=lambda settings: "-".join(settings),
)
def test_other_settings_are_seeded_with_1(settings: dict[str, Any]) -> None:
    seen: list[float] = []
    settings = {"lr": 0.1, "alpha": 0.5, **settings}
    with torch.no_grad():
        bda.rollout(seeds_of(lower, seen), upper, start(), torch.ones(3), steps=1, **settings)
    assert seen == [1.0]


ADJOINTS = [bda.Unroll(), bda.Checkpointed(), bda.ForwardMode(), bda.FirstOrder(), bda.Checkpointed(slots=2)]


@pytest.mark.parametrize("adjoint", ADJOINTS, ids=repr)
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("alpha", ["number", "schedule", "learned", "absent"])
def test_both_ways_agree(adjoint: Any, maximize: bool, alpha: str) -> None:
    def run(rule: Any) -> list[Tensor]:
        x = torch.tensor([0.2, 0.1, -0.4], requires_grad=True)
        lr = torch.tensor([0.1], requires_grad=True)
        upper_lr = torch.tensor(0.3, requires_grad=True)
        learned = torch.tensor(0.25, requires_grad=True)
        weight = {"number": 0.25, "schedule": bda.harmonic(0.5), "learned": learned, "absent": 0.0}[alpha]
        y0 = {name: p.requires_grad_() for name, p in start().items()}
        y = bda.rollout(
            lower, upper, y0, x, steps=5, lr=lr, upper_lr=upper_lr, alpha=weight, maximize=maximize, rule=rule,
            adjoint=adjoint,
        )  # fmt: skip
        value = upper(y, x, None)
        grads = torch.autograd.grad(value, [x, lr, upper_lr, learned, *y0.values()], allow_unused=True)
        return [*y.values(), *(torch.zeros(1) if g is None else g for g in grads)]

    for one, other in zip(run(SGD), run(ByGradients), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


def test_gradients_of_all_rates_by_finite_differences() -> None:
    def value(x: Tensor, lr: Tensor, upper_lr: Tensor, alpha: Tensor) -> Tensor:
        y = bda.rollout(lower, upper, start(), x, steps=4, lr=lr, upper_lr=upper_lr, alpha=alpha)
        return upper(y, x, None)

    inputs = [torch.tensor([0.2, 0.1, -0.4]), torch.tensor(0.1), torch.tensor([0.3]), torch.tensor(0.25)]
    assert torch.autograd.gradcheck(value, [t.requires_grad_() for t in inputs])
    assert torch.autograd.gradgradcheck(value, inputs)


def test_tasks() -> None:
    batches = [torch.randn(4, 3)] * 3

    def run(rule: Any) -> list[Tensor]:
        x = torch.tensor([0.2, 0.1, -0.4], requires_grad=True)
        lr = torch.tensor(0.1, requires_grad=True)
        out = bda.rollout(
            lambda y, x, b: lower(y, x, None) * b.square().sum(), lambda y, x, b: upper(y, x * b, None),
            start(), x, steps=3, lr=lr, alpha=0.3, tasks=4, batches=batches, rule=rule,
        )  # fmt: skip
        return [*out.values(), *torch.autograd.grad(sum(t.square().sum() for t in out.values()), [x, lr])]

    for one, other in zip(run(SGD), run(ByGradients), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("first_order", [False, True])
@pytest.mark.parametrize("track", [False, True])
def test_innerloop(first_order: bool, track: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    inputs = torch.randn(5, 3)

    def run(callback: Any) -> list[Tensor]:
        lr = torch.tensor(0.1, requires_grad=True)
        alpha = torch.tensor(0.4, requires_grad=True)
        inner = bda.BDAInnerOptimizer(model.parameters(), lr=lr, upper_lr=0.2, alpha=alpha)
        options: dict[str, Any] = dict(copy_initial_weights=False, first_order=first_order, track_higher_grads=track)
        with bda.innerloop_ctx(model, inner, **options) as (fmodel, diffopt):
            for _ in range(3):
                out = fmodel(inputs)
                diffopt.step(out.square().mean(), (out - 1).square().mean(), grad_callback=callback)
            end = fmodel(inputs).sum()
        wanted = [*model.parameters(), lr, alpha] if track else list(fmodel.params.values())
        return [*fmodel.params.values(), *torch.autograd.grad(end, wanted)]

    for one, other in zip(run(None), run(lambda grads: grads), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


def test_a_callback_sees_the_lower_gradient() -> None:
    model = nn.Linear(1, 1, bias=False)
    inner = bda.BDAInnerOptimizer(model.parameters(), lr=0.1, alpha=0.5)
    shown: list[Any] = []
    with bda.innerloop_ctx(model, inner) as (fmodel, diffopt):
        weight = fmodel.weight
        diffopt.step(3 * weight.sum(), 7 * weight.sum(), grad_callback=lambda grads: shown.extend(grads) or grads)
    assert [g.item() for g in shown] == [3.0]


def test_rates_that_change_in_place_between_steps() -> None:
    model = nn.Linear(1, 1, bias=False)
    lr = torch.tensor(0.5)
    inner = bda.BDAInnerOptimizer(model.parameters(), lr=lr, upper_lr=0.0, alpha=0.5)
    with bda.innerloop_ctx(model, inner, track_higher_grads=False) as (fmodel, diffopt):
        points = [fmodel.weight.item()]
        for _ in range(2):
            diffopt.step(fmodel.weight.sum(), fmodel.weight.sum())
            points.append(fmodel.weight.item())
            lr.mul_(4.0)
    assert points[0] - points[1] == pytest.approx(0.25) and points[1] - points[2] == pytest.approx(1.0)


def test_groups_with_the_same_rates_are_one_pass_and_others_two() -> None:
    model = nn.Linear(2, 1)
    inputs = torch.randn(4, 2)

    def seeds(**second: Any) -> list[float]:
        groups = [{"params": [model.weight]}, {"params": [model.bias], **second}]
        seen: list[float] = []
        inner = bda.BDAInnerOptimizer(groups, lr=0.1, alpha=0.5)
        loss = seeds_of(lambda net, x, b: net(inputs).square().mean(), seen)
        with torch.no_grad():
            inner.unroll(model, loss, lambda net, x, b: net(inputs).sum(), steps=1)
        return seen

    assert seeds() == [pytest.approx(-0.05)]
    assert seeds(lr=0.2) == seeds(alpha=0.2) == seeds(upper_lr=0.3) == seeds(momentum=0.1) == [1.0]
    assert seeds(lr=torch.tensor(0.1)) == [1.0]  # another tensor may be learned to another value


# What is looked for at the first step.


@pytest.mark.parametrize("first", [0.5, 0.0], ids=["at once", "later"])
def test_a_lower_loss_without_the_parameters_is_refused(first: float) -> None:
    x = torch.ones(3, requires_grad=True)
    schedule = lambda k: first if k == 1 else 0.5  # noqa: E731
    with pytest.raises(ValueError, match=r"does not depend on any parameter.*at step k=1"):
        bda.rollout(lambda y, x, b: x.square().sum(), upper, start(), x, steps=2, lr=0.1, alpha=schedule)


def test_a_loss_that_is_a_parameter_itself() -> None:
    y = bda.rollout(lambda y, x, b: y, lambda y, x, b: 2 * y, torch.tensor(1.0), steps=2, lr=0.1, alpha=0.5)
    assert y.item() == pytest.approx(1.0 - 2 * (0.05 + 0.1))


def test_an_upper_loss_without_the_parameters() -> None:
    x = torch.ones(3, requires_grad=True)
    for far in (lambda y, x, b: x.sum(), lambda y, x, b: torch.zeros(())):
        y = bda.rollout(lower, far, start(), x, steps=2, lr=0.1, alpha=0.5)
        other = bda.rollout(lower, None, start(), x, steps=2, lr=0.05)
        torch.testing.assert_close(y, other)


class ClippedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.clamp(-0.5, 0.5)


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


def test_a_backward_pass_that_is_not_linear_is_not_weighted() -> None:
    y = bda.rollout(
        lambda y, x, b: ClippedGradient.apply(y) * 3, lambda y, x, b: 0.1 * y, torch.tensor(1.0), steps=1, lr=0.1,
        alpha=0.5,
    )  # fmt: skip
    assert y.item() == pytest.approx(1.0 - (0.05 * 0.5 + 0.05 * 0.1))


def test_hooks_on_parameters_see_their_gradients() -> None:
    model = nn.Linear(1, 1, bias=False)
    inner = bda.BDAInnerOptimizer(model.parameters(), lr=0.1, alpha=0.5)
    seen: list[float] = []
    with bda.innerloop_ctx(model, inner) as (fmodel, diffopt):
        fmodel.weight.register_hook(lambda grad: seen.append(float(grad)))
        diffopt.step(3 * fmodel.weight.sum(), 7 * fmodel.weight.sum())
    assert seen == [3.0, 7.0]


class Refused(NamedTuple):
    error: type[Exception]
    message: str


@pytest.mark.parametrize(
    ("later", "expected"),
    [
        (lambda y: 3 * ClippedGradient.apply(y), 0.5),
        (lambda y: (3 * y).float().double(), 3.0),
        (lambda y: 3 * y * (1 + 1j), Refused(TypeError, "the lower loss must be real; got torch.complex128")),
        (lambda y: 3 * y.detach().requires_grad_().exp(), Refused(ValueError, "does not depend on any parameter")),
    ],
    ids=["clipped", "cast", "complex", "another tensor"],
)
@pytest.mark.parametrize("alone", [False, True], ids=["rollout", "innerloop_ctx"])
def test_a_later_loss_that_is_made_otherwise_is_looked_at_too(alone: bool, later: Any, expected: Any) -> None:
    def run() -> float:
        lower, upper = (lambda y, x, b: later(y) if b else 3 * y), (lambda y, x, b: 0.1 * y)
        if alone:
            return own_loop(lower, upper)
        return bda.rollout(lower, upper, torch.tensor(1.0), steps=2, lr=0.1, alpha=0.5, batches=[0, 1]).item()

    if isinstance(expected, Refused):
        with pytest.raises(expected.error, match=expected.message):
            run()
    else:
        assert run() == pytest.approx(1.0 - 0.05 * (3 + 0.1) - 0.05 * (expected + 0.1))


def own_loop(lower: Any, upper: Any) -> float:
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    inner = bda.BDAInnerOptimizer(model.parameters(), lr=0.1, alpha=0.5)
    with bda.innerloop_ctx(model, inner) as (fmodel, diffopt):
        for batch in (0, 1):
            y = fmodel.weight.sum()
            diffopt.step(lower(y, None, batch), upper(y, None, batch))
        return float(fmodel.weight.item())


def test_losses_that_stay_the_same_are_looked_through_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[Any] = []
    nodes = sweep.recent_nodes
    monkeypatch.setattr(sweep, "recent_nodes", lambda *args: looked.append(args) or nodes(*args))
    bda.rollout(lower, upper, start(), torch.ones(3, requires_grad=True), steps=5, lr=0.1, alpha=0.5)
    assert len(looked) == 2
    own_loop(lambda y, x, b: 3 * y, lambda y, x, b: 0.1 * y)
    assert len(looked) == 4


def clipping(value: Tensor) -> Tensor:
    """The same tensor; a hook clips its gradient, as is done against exploding gradients."""
    value.register_hook(lambda grad: grad.clamp(-0.5, 0.5))
    return value


def test_hooks_inside_of_losses_see_their_gradients() -> None:
    """In the second step alone: a hook is noticed in any step."""
    lower = lambda y, x, b: 3 * (clipping(y * 1) if b else y)  # noqa: E731
    y = bda.rollout(lower, lambda y, x, b: 0.1 * y, torch.tensor(1.0), steps=2, lr=0.1, alpha=0.5, batches=[0, 1])
    assert y.item() == pytest.approx(1.0 - 0.05 * (3 + 0.1) - 0.05 * (0.5 + 0.1))


def test_hooks_inside_of_losses_see_their_gradients_in_a_loop_of_ones_own() -> None:
    model = nn.Linear(1, 1, bias=False)
    inner = bda.BDAInnerOptimizer(model.parameters(), lr=0.1, alpha=0.5)
    seen: list[float] = []
    with bda.innerloop_ctx(model, inner) as (fmodel, diffopt):
        for hooked in (False, True, False):
            before = fmodel.weight.item()
            lower, upper = (Noted.apply(c * fmodel.weight.sum(), seen) for c in (3, 7))
            diffopt.step(clipping(lower * 1) if hooked else lower, upper)
            moved = 0.05 * (3 * (0.5 if hooked else 1) + 7)
            assert before - fmodel.weight.item() == pytest.approx(moved)
    assert sorted(seen) == pytest.approx([-0.05] * 4 + [0.5, 1.0])


def test_half_precision_is_not_weighted() -> None:
    """In half precision the gradient of 1e-3 times the rate of 1e-5 is 0, or has three bits."""
    y = bda.rollout(
        lambda y, x, b: (y.half() * 1e-3).float().sum(), lambda y, x, b: y.sum(), torch.ones(2, dtype=torch.float32),
        steps=1, lr=2e-5, upper_lr=0.0, alpha=0.5,
    )  # fmt: skip
    assert (1.0 - y).abs().max() < 1e-6
    seen: list[float] = []
    loss = seeds_of(lambda y, x, b: (y.half() * 1e-3).float().sum(), seen)
    bda.rollout(loss, lambda y, x, b: y.sum(), torch.ones(2, dtype=torch.float32), steps=1, lr=1e-5, alpha=0.5)
    assert seen == [1.0]


def test_a_loss_of_another_dtype_is_not_weighted() -> None:
    seen: list[float] = []
    single = seeds_of(lambda y, x, b: y.sum().float(), seen)
    bda.rollout(single, lambda y, x, b: y.sum(), torch.ones(2), steps=1, lr=0.1, alpha=0.5)
    assert seen == [1.0]


def test_a_sparse_gradient_beside_a_dense_one_is_refused() -> None:
    x = torch.ones((), requires_grad=True)
    indices = torch.tensor([0, 2])
    sparse = lambda y, x, b: (x * F.embedding(indices, y, sparse=True)).square().sum()  # noqa: E731
    dense = lambda y, x, b: y.square().sum()  # noqa: E731
    for losses, level in (((sparse, dense), "lower"), ((dense, sparse), "upper")):
        with pytest.raises(NotImplementedError, match=f"sparse gradients incorrectly; got one from the {level} loss"):
            bda.rollout(*losses, torch.ones(3, 2), x, steps=1, lr=0.1, alpha=0.5)


def test_a_function_without_second_derivative_beside_a_smooth_one_is_refused() -> None:
    once = lambda y, x, b: Once.apply(y).sum()  # noqa: E731
    smooth = lambda y, x, b: (x * y).square().sum()  # noqa: E731
    x = torch.ones(3, requires_grad=True)
    for losses in ((once, smooth), (smooth, once)):
        with pytest.raises(NotImplementedError, match="no second derivative"):
            bda.rollout(*losses, torch.ones(3), x, steps=2, lr=0.1, alpha=0.5)
        first = bda.rollout(*losses, torch.ones(3), x, steps=2, lr=0.1, alpha=0.5, adjoint=bda.FirstOrder())
        assert torch.isfinite(first).all()


@pytest.mark.parametrize("alpha", [0.0, 0.5])
def test_a_complex_loss_is_refused(alpha: float) -> None:
    start = torch.ones(2, dtype=torch.complex128)
    with pytest.raises(TypeError, match=r"the lower loss must be real; got torch.complex128 at step k=1"):
        bda.rollout(lambda y, x, b: y.sum(), lambda y, x, b: y.abs().sum(), start, steps=1, lr=0.1, alpha=alpha)
    y = bda.rollout(lambda y, x, b: y.abs().sum(), lambda y, x, b: y.real.sum(), start, steps=1, lr=0.1, alpha=alpha)
    torch.testing.assert_close(y, start - 0.1)


def test_both_losses_may_be_the_same_tensor() -> None:
    model = nn.Linear(1, 1, bias=False)
    inner = bda.BDAInnerOptimizer(model.parameters(), lr=0.1, upper_lr=0.3, alpha=0.5)
    with bda.innerloop_ctx(model, inner) as (fmodel, diffopt):
        before = fmodel.weight.item()
        loss = fmodel.weight.sum()
        diffopt.step(loss, loss)
        assert before - fmodel.weight.item() == pytest.approx(0.05 + 0.15)
