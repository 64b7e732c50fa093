"""`Differences` is right, or it raises: losses that are no functions, kinks, captured tensors, coarse numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from problems import relative_error
from test_differences_modules import K, cross_entropy, draw, gradients, lower, mlp
from torch import Tensor, nn

import bda_optim as bda

D = torch.float64


class Statistics(nn.Module):
    """A batch norm that is written out."""

    def __init__(self, detached: bool) -> None:
        super().__init__()
        self.detached = detached

    def forward(self, x: Tensor) -> Tensor:
        mean, variance = x.mean(0), x.var(0)
        if self.detached:
            mean, variance = mean.detach(), variance.detach()
        return torch.tanh((x - mean) / (variance + 0.1).sqrt())


class Reversal(torch.autograd.Function):
    """The identity, with the gradient reversed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return -grad


def weighted(cut: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    def f(net: Any, hyper: Any, batch: Any) -> Tensor:
        losses = cross_entropy(net, batch)
        return (torch.sigmoid(hyper["a"] * torch.tanh(cut(losses)) + hyper["b"]) * losses).mean()

    return f


@torch.no_grad()
def copied(losses: Tensor) -> Tensor:
    return losses.clone()


def focal(net: Any, hyper: Any, batch: Any) -> Tensor:
    losses = cross_entropy(net, batch)
    return (torch.sigmoid(hyper["rows"]) * (1 - torch.exp(-losses)).detach().square() * losses).mean()


def stop_gradient(net: Any, hyper: Any, batch: Any) -> Tensor:
    target = torch.tanh(net[0](batch[0]))[:, :3].detach()
    return (torch.sigmoid(hyper["rows"])[:, None] * (net(batch[0]) - target).square()).mean()


def straight_through(net: Any, hyper: Any, batch: Any) -> Tensor:
    out = net(batch[0])
    rounded = out + (torch.round(out.detach()) - out.detach())
    return (torch.sigmoid(hyper["rows"])[:, None] * (rounded - 0.3).square()).mean()


def reversal(net: Any, hyper: Any, batch: Any) -> Tensor:
    logits = net[2](Reversal.apply(torch.tanh(net[0](batch[0]))))
    return (torch.sigmoid(hyper["rows"]) * F.cross_entropy(logits, batch[1], reduction="none")).mean()


WRONG: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "detached weights": (mlp, weighted(Tensor.detach)),
    "weights without grad mode": (mlp, weighted(copied)),
    "detached statistics": (lambda: mlp(Statistics(True)), lower),
    "detached focal weights": (mlp, focal),
    "stop-gradient": (mlp, stop_gradient),
    "straight-through": (mlp, straight_through),
    "gradient reversal": (mlp, reversal),
}
RIGHT: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "weight net": (mlp, weighted(Tensor.clone)),
    "statistics": (lambda: mlp(Statistics(False)), lower),
    "dropout": (lambda: mlp(nn.GELU(), nn.Dropout(0.2)), lower),
}
PRECISIONS = ["float64", "float32", "autocast"]


def by(adjoint: Any, make: Callable[[], nn.Module], f: Any, precision: str) -> list[Tensor]:
    net = make().to(D if precision == "float64" else torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "autocast"):
        return gradients(net, adjoint, f)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", WRONG)
def test_a_gradient_that_is_not_one_of_a_function_raises(name: str, precision: str) -> None:
    with pytest.raises(ValueError, match=r"not symmetric.*`adjoint=Checkpointed\(\)`"):
        by(bda.Differences(), *WRONG[name], precision)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", RIGHT)
def test_smooth_losses_are_right(name: str, precision: str) -> None:
    bound = {"float64": 1e-8, "float32": 1e-3, "autocast": 0.05}[precision]
    got, want = (by(adjoint, *RIGHT[name], precision) for adjoint in (bda.Differences(), bda.Unroll()))
    assert relative_error(got, want) < bound


def test_a_detached_value_in_the_gradient_of_a_function() -> None:
    """The gradient of c * c.detach() is that of c^2 / 2: the step is one of that loss, and so is its derivative."""

    def detached(y: Tensor, x: Tensor, batch: Any) -> Tensor:
        cost = (torch.cosh(y) + y).sum()
        return cost * cost.detach() + (x * y).sum()

    def plain(y: Tensor, x: Tensor, batch: Any) -> Tensor:
        return (torch.cosh(y) + y).sum().square() / 2 + (x * y).sum()

    options: dict[str, Any] = {"steps": 3, "lr": 0.01}
    upper = lambda y, x, b: y.square().sum()  # noqa: E731
    got = bda.hypergradient(detached, upper, draw(3), draw(3, seed=1), adjoint=bda.Differences(), **options)
    want = bda.hypergradient(plain, upper, draw(3), draw(3, seed=1), **options)
    assert relative_error([got.grad], [want.grad]) < 1e-8


def test_the_upper_loss_is_probed_too() -> None:
    def upper(y: Tensor, x: Tensor, batch: Any) -> Tensor:
        return ((y.detach() * x).cos() * y).sum() ** 2

    options: dict[str, Any] = {"steps": 3, "lr": 0.1, "alpha": 0.3, "adjoint": bda.Differences()}
    with pytest.raises(ValueError, match="the upper loss is not that of a function"):
        bda.hypergradient(lambda y, x, b: ((y - x) ** 4).sum(), upper, draw(3), draw(3, seed=1), **options)


def test_a_loss_is_probed_once() -> None:
    calls = []

    def f(y: Tensor, x: Tensor, batch: Any) -> Tensor:
        calls.append(0)
        return torch.cosh(y - x).sum()

    def run(loss: Any) -> int:
        calls.clear()
        options: dict[str, Any] = {"steps": 3, "lr": 0.1, "adjoint": bda.Differences()}
        bda.hypergradient(loss, lambda y, x, b: y.square().sum(), draw(3), draw(3, seed=1), **options)
        return len(calls)

    first, second = run(f), run(f)
    assert first - second == 1 + 2 + 8 + 8  # a look, two gradients along the cotangent and along each direction
    assert run(lambda *inputs: f(*inputs)) == first
    assert run(f) == second


def test_the_probe_leaves_the_random_numbers_alone() -> None:
    net = mlp(nn.Tanh(), nn.Dropout(0.4))

    def f(*inputs: Any) -> Tensor:
        return lower(*inputs)

    states = []
    for _ in range(2):  # probed in the first round only
        gradients(net, bda.Differences(), f)
        states.append(torch.get_rng_state())
    gradients(net, bda.Unroll(), f)
    assert torch.equal(states[0], states[1]) and torch.equal(states[0], torch.get_rng_state())


def test_directions_out_of_the_domain() -> None:
    def f(y: Tensor, x: Tensor, batch: Any) -> Tensor:
        return (torch.cosh(y) + torch.log(x) * y).sum()

    def detached(y: Tensor, x: Tensor, batch: Any) -> Tensor:
        return (torch.cosh(y) + torch.log(x) * torch.sin(y.detach()) * y).sum()

    x = torch.tensor([1.0, 1e-9], dtype=D)  # a random direction as large as the tensor makes the second one negative
    options: dict[str, Any] = {"steps": 3, "lr": 0.1}
    upper = lambda y, x, b: y.square().sum()  # noqa: E731
    got, want = (bda.hypergradient(f, upper, draw(2), x, adjoint=a, **options).grad for a in (bda.Differences(), None))
    assert relative_error([got], [want]) < 1e-8
    with pytest.raises(ValueError, match="not symmetric"):
        bda.hypergradient(detached, upper, draw(2), x, adjoint=bda.Differences(), **options)


def test_curvature_below_the_rounding_is_no_asymmetry() -> None:
    y0 = torch.tensor([40.0, -40.0], dtype=torch.float32)
    f = lambda y, x, b: F.softplus(-y[0] + y[1]) + 1e3 * (y * x.detach()).sum()  # noqa: E731
    x = torch.ones(2, dtype=torch.float32)
    out = bda.hypergradient(f, lambda y, x, b: (y * x).sum(), y0, x, steps=2, lr=1e-3, adjoint=bda.Differences())
    assert torch.isfinite(out.grad).all()


def test_coarse_parameters_ask_for_a_scale() -> None:
    def f(y: Tensor, x: Tensor, batch: Any) -> Tensor:
        return torch.cosh(y - x).sum()

    y0, x = draw(4).bfloat16(), draw(4, seed=1).bfloat16()
    upper = lambda y, x, b: y.square().sum()  # noqa: E731
    options: dict[str, Any] = {"steps": 2, "lr": 0.1}
    with pytest.raises(ValueError, match="more coarsely than in float32"):
        bda.hypergradient(f, upper, y0, x, adjoint=bda.Differences(), **options)
    out = bda.hypergradient(f, upper, y0, x, adjoint=bda.Differences(scale=1.0), **options)
    want = bda.hypergradient(f, upper, y0, x, **options)
    assert relative_error([out.grad.double()], [want.grad.double()]) < 0.1


KINKS: dict[str, Callable[[Tensor], Tensor]] = {
    "Relu": F.relu,
    "LeakyRelu": F.leaky_relu,
    "Hardtanh": F.relu6,
    "Hardswish": F.hardswish,
    "Hardsigmoid": F.hardsigmoid,
    "Hardshrink": F.hardshrink,
    "Softshrink": F.softshrink,
    "Threshold": lambda x: F.threshold(x, 0.1, 0.0),
    "PreluKernel": lambda x: F.prelu(x, torch.full((), 0.2, dtype=D)),
    "RreluWithNoise": F.rrelu,
    "Elu": F.selu,
    "Abs": torch.abs,
    "Clamp": lambda x: x.clamp(0, 1),
    "ClampMin": lambda x: F.normalize(x),
    "ClampMax": lambda x: torch.clamp_max(x, 1.0),
    "Max": lambda x: x.max(1, keepdim=True)[0] * x,
    "Min": lambda x: x.min() * x,
    "Amax": lambda x: x.amax(1, keepdim=True) * x,
    "Maximum": lambda x: torch.maximum(x, 2 * x),
    "Minimum": lambda x: torch.minimum(x, 2 * x),
    "MaxPool2DWithIndices": lambda x: F.max_pool1d(x, 2).repeat(1, 2),
    "AdaptiveMaxPool2D": lambda x: F.adaptive_max_pool1d(x, 4).repeat(1, 2),
    "Sort": lambda x: x.sort()[0],
    "Topk": lambda x: x.topk(4)[0].repeat(1, 2),
    "Median": lambda x: x.median() * x,
    "Round": lambda x: x.round() + x,
    "Sign": lambda x: x.sign() + x,
    "Remainder": lambda x: x % 2,
    "LinalgVectorNorm": lambda x: x / x.norm(1),
    "Cdist": lambda x: torch.cdist(x, x, p=1)[:, :8],
}
SMOOTH: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "silu": F.silu,
    "elu": F.elu,
    "celu": lambda x: F.celu(x, 2.0),
    "softplus": F.softplus,
    "glu": lambda x: F.glu(x).repeat(1, 2),
    "layer norm": lambda x: F.layer_norm(x, (8,)),
    "norm": lambda x: x / x.norm(),
    "softmax": lambda x: x.softmax(-1),
    "average pooling": lambda x: F.avg_pool1d(x, 2).repeat(1, 2),
}


class Apply(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


@pytest.mark.parametrize("name", KINKS)
def test_kinks_are_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=rf"derivative jumps \(.*\b{name}\b.*\).*`Differences\(scale=1.0\)`"):
        gradients(mlp(Apply(KINKS[name])), bda.Differences())


@pytest.mark.parametrize("name", SMOOTH)
def test_smooth_operations_pass(name: str) -> None:
    net = mlp(Apply(SMOOTH[name]))
    assert relative_error(gradients(net, bda.Differences()), gradients(net, bda.Unroll())) < 1e-7


def test_a_scale_lets_kinks_pass() -> None:
    net = mlp(Apply(F.normalize), nn.Tanh())  # its floor is never reached
    assert relative_error(gradients(net, bda.Differences(scale=1.0)), gradients(net, bda.Unroll())) < 1e-8


def test_kinks_that_show_are_warned_about() -> None:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 3)).float()
    with pytest.warns(UserWarning, match=r"Its kinks \(Relu\) may be the reason"):
        gradients(net, bda.Differences(scale=10.0))


def test_a_kink_of_a_later_step() -> None:
    def f(y: Tensor, x: Tensor, batch: Any) -> Tensor:
        return torch.cosh(y - x).sum() if int(batch) < 2 else (y - x).abs().sum()

    batches = [torch.tensor(k) for k in range(K)]
    with pytest.raises(ValueError, match="Abs"):
        bda.hypergradient(
            f, lambda y, x, b: y.square().sum(), draw(3), draw(3, seed=1), steps=K, lr=0.1, batches=batches,
            adjoint=bda.Differences(),
        )  # fmt: skip


@pytest.mark.parametrize("where", ["loss", "upper loss", "prox", "later"])
def test_captured_tensors_are_refused(where: str) -> None:
    c = torch.tensor(0.3, dtype=D, requires_grad=True)

    def f(y: Tensor, x: Tensor, batch: Any) -> Tensor:
        scale = c if where == "loss" or (where == "later" and int(batch) > 1) else 1.0
        return scale * torch.cosh(y - x).sum()

    def upper(y: Tensor, x: Tensor, batch: Any) -> Tensor:
        return (y * (c if where == "upper loss" and batch is not None else 1.0)).square().sum()

    prox = bda.prox.l1(lambda x: c) if where == "prox" else None
    options: dict[str, Any] = {"batches": [torch.tensor(k) for k in range(3)], "alpha": 0.2, "prox": prox}
    with pytest.raises(ValueError, match="neither in `hyper=`"):
        bda.hypergradient(f, upper, draw(3), draw(3, seed=1), steps=3, lr=0.1, adjoint=bda.Differences(), **options)
    for hyper in (None, draw(3, seed=1)):
        if where == "loss":
            with pytest.raises(ValueError, match="neither in `hyper=`"):
                f0 = lambda y, x, b: c * torch.cosh(y).sum()  # noqa: E731
                bda.rollout(f0, None, draw(3), hyper, steps=3, lr=0.1, adjoint=bda.Differences())


@pytest.mark.parametrize("within", [bda.Checkpointed(), bda.Unroll()], ids=["checkpointed", "unroll"])
def test_random_numbers_that_are_not_restored(within: Any) -> None:
    generator = torch.Generator().manual_seed(0)

    def f(y: Tensor, x: Tensor, batch: Any) -> Tensor:
        return (torch.rand(3, generator=generator, dtype=D) * torch.cosh(y - x)).sum()

    with pytest.raises(RuntimeError, match="gave another result than the first time"):
        bda.hypergradient(
            f, lambda y, x, b: y.square().sum(), draw(3), draw(3, seed=1), steps=3, lr=0.1,
            adjoint=bda.Differences(within=within),
        )  # fmt: skip


def test_a_second_derivative_is_refused() -> None:
    x = draw(3, seed=1).requires_grad_()
    y = bda.rollout(
        lambda y, x, b: torch.cosh(y - x).sum(), None, draw(3), x, steps=3, lr=0.1, adjoint=bda.Differences()
    )
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        torch.autograd.grad(y.square().sum(), x, create_graph=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale": 0.0}, "`scale` must be a positive number"),
        ({"scale": "large"}, "`scale` must be a positive number"),
        ({"last": 0}, "`last`"),
        ({"within": bda.ForwardMode()}, "pull steps back"),
        ({"within": bda.FirstOrder()}, "pull steps back"),
        ({"within": bda.Implicit()}, "pull steps back"),
        ({"within": bda.Truncated(last=1, within=bda.Differences())}, "pull steps back"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bda.Differences(**options)


def test_compiled_and_foreign_steps_are_refused() -> None:
    y, x = draw(), draw(seed=1)
    options: dict[str, Any] = {"steps": 2, "lr": 0.1, "adjoint": bda.Differences(), "compile": True}
    with pytest.raises(ValueError, match="compile=False"):
        bda.hypergradient(lambda y, x, b: y * x, lambda y, x, b: y, y, x, **options)
    with pytest.raises(TypeError, match="differences are taken of the gradients of losses"):
        bda.Differences()(lambda y, x, k: (x[0] * y, None), torch.ones(()), (draw().requires_grad_(),), [1, 2])
