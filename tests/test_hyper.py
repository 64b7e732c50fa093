"""What `hyper` may be: a tensor, a tree, a module, the start of the loop, or nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from problems import EXACT, START, difference_quotients, double, exact, leaf, lower, relative_error, run, upper
from torch import Tensor, nn

import bda_optim as bda


class Mixed(nn.Module):
    """Two parameters in use, one that is not, a frozen one and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.shift = nn.Parameter(double(0.7)), nn.Parameter(double(0.1))
        self.idle, self.frozen = nn.Parameter(double(5.0, 6.0)), nn.Parameter(double(1.5), requires_grad=False)
        self.register_buffer("scale", double(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * torch.tanh(self.weight * x + self.shift) * self.frozen


def through(module: nn.Module) -> float:
    """dphi/dweight by differences, for phi with x = module(0.4)."""
    values = difference_quotients(
        lambda: run(hyper=module(double(0.4)).detach()).value, [p for _, p in module.named_parameters()]
    )
    return dict(zip((name for name, _ in module.named_parameters()), values, strict=True))


def test_hyper_none() -> None:
    out = bda.hypergradient(
        lambda y, x, b: lower(y, double(0.3)), lambda y, x, b: upper(y, double(0.3)), START, None, steps=3, lr=0.2
    )
    assert out.grad is None and out.value.shape == ()


def test_hyper_as_a_tree() -> None:
    hyper = {"a": double(0.1), "rest": [double(0.2), "a name", (double(3.0, 4.0), None, 7)]}

    def x_of(hyper: Any) -> Tensor:
        assert hyper["rest"][1:] == ["a name", (hyper["rest"][2][0], None, 7)]
        return hyper["a"] + hyper["rest"][0]

    out = run(lambda y, h, b: lower(y, x_of(h)), lambda y, h, b: upper(y, x_of(h)), hyper)
    want = run(hyper=double(0.1) + double(0.2)).grad
    assert torch.equal(out.grad["a"], want) and torch.equal(out.grad["rest"][0], want)
    assert out.grad["rest"][1] is None and out.grad["rest"][2][1:] == (None, None), "what is no tensor has no gradient"
    assert torch.equal(out.grad["rest"][2][0], double(0.0, 0.0)), "an unused tensor gets zeros"


def test_hyper_as_a_list_and_as_a_tuple() -> None:
    def call(hyper: Any) -> Any:
        return run(lambda y, h, b: lower(y, h[0]), lambda y, h, b: upper(y, h[0]), hyper).grad

    for kind in (list, tuple):
        found = call(kind([double(0.3), torch.tensor([1, 2])]))
        assert type(found) is kind and torch.equal(found[0], run().grad)
        assert found[1] is None, "integers have no gradient"


@exact
def test_hyper_as_a_module(adjoint: Any) -> None:
    module = Mixed()

    def f(y: Tensor, net: Any, batch: Any) -> Tensor:
        assert isinstance(net, Mixed)
        return lower(y, net(double(0.4)))

    out = run(f, lambda y, net, b: upper(y, net(double(0.4))), module, adjoint=adjoint)
    want = through(module)
    assert list(out.grad) == ["weight", "shift", "idle", "frozen"]
    for name in ("weight", "shift", "frozen"):
        assert out.grad[name].item() == pytest.approx(want[name].item(), rel=1e-7)
    assert torch.equal(out.grad["idle"], double(0.0, 0.0))
    assert all(p.grad is None for p in module.parameters()) and not module.frozen.requires_grad


@exact
def test_a_module_inside_a_tree(adjoint: Any) -> None:
    module, offset = Mixed(), double(0.05)
    hyper = {"net": module, "more": [offset]}

    def x_of(h: Any) -> Tensor:
        return h["net"](double(0.4)) + h["more"][0]

    out = run(lambda y, h, b: lower(y, x_of(h)), lambda y, h, b: upper(y, x_of(h)), hyper, adjoint=adjoint)
    assert out.grad["net"]["weight"].item() != 0
    want = run(hyper=module(double(0.4)).detach() + offset).grad
    assert out.grad["more"][0].item() == pytest.approx(want.item(), abs=1e-13)


def test_the_buffers_of_a_hyper_module_are_a_copy() -> None:
    norm = nn.BatchNorm1d(2).double()

    def f(y: Tensor, net: Any, batch: Any) -> Tensor:
        return lower(y, net(torch.ones(3, 2, dtype=torch.float64) * y[0]).mean())

    run(f, lambda y, net, b: upper(y, double(0.1)), norm)
    assert norm.num_batches_tracked.item() == 0 and torch.equal(norm.running_mean, torch.zeros(2).double())


@exact
def test_a_tensor_in_several_places_counts_once(adjoint: Any) -> None:
    x = double(0.3)

    def f(y: Tensor, h: Any, batch: Any) -> Tensor:
        return lower(y, 2 * h["a"] - h["b"][0])

    out = run(f, lambda y, h, b: upper(y, h["b"][0]), {"a": x, "b": [x]}, adjoint=adjoint)
    assert out.grad["a"].item() == out.grad["b"][0].item() == pytest.approx(run().grad.item(), abs=1e-14)


def test_a_module_that_shares_a_tensor_with_the_tree() -> None:
    module = Mixed()
    hyper = {"net": module, "weight": module.weight}
    out = run(
        lambda y, h, b: lower(y, h["net"](double(0.4)) + h["weight"]), lambda y, h, b: upper(y, double(0.1)), hyper
    )
    assert torch.equal(out.grad["net"]["weight"], out.grad["weight"]) and out.grad["weight"] != 0


@pytest.mark.parametrize("alpha", [0.0, bda.harmonic(0.5)], ids=str)
def test_hyper_that_nothing_depends_on(alpha: Any) -> None:
    out = run(
        lambda y, h, b: lower(y, double(0.3)), lambda y, h, b: upper(y, double(0.3)), double(1.0, 2.0), alpha=alpha
    )
    assert torch.equal(out.grad, double(0.0, 0.0))


def test_nothing_is_written_to_grad() -> None:
    x, lr, alpha, y0, batch = leaf(0.3), leaf(0.2), leaf(0.4), leaf(2.0, 2.0), leaf(0.1)
    run(lambda y, x, b: lower(y, x + b), hyper=x, lr=lr, alpha=alpha, params=y0, batches=[batch] * 3)
    assert all(t.grad is None for t in (x, lr, alpha, y0, batch))


def test_hyper_captured_by_a_loss_is_still_hyper() -> None:
    """Unrolling differentiates captured tensors; being in `hyper` as well must not make one a constant."""
    x = leaf(0.3)
    assert run(lambda y, h, b: lower(y, x), hyper=x).grad.item() == pytest.approx(run().grad.item(), abs=1e-14)
    assert run(lambda y, h, b: lower(y, h), lambda y, h, b: upper(y, x), hyper=x).grad.item() == pytest.approx(
        run().grad.item(), abs=1e-14
    )


def test_batches_that_depend_on_hyper() -> None:
    """Computed from x outside the loop, like features: the gradient flows through them into x, twice if asked twice."""
    x = leaf(0.3)

    def out(batch: Tensor) -> bda.Hypergradient:
        return run(lambda y, h, b: lower(y, b), hyper=x, batches=[batch] * 3)

    want = difference_quotients(lambda: out(torch.sin(x)).value, [x])
    batch = torch.sin(x)
    assert relative_error([out(batch).grad], want) < 1e-8
    assert relative_error([out(batch).grad], want) < 1e-8


@exact
def test_settings_that_depend_on_hyper(adjoint: Any) -> None:
    """A rate that is learned through its logarithm."""
    hyper = {"x": leaf(0.3), "log_lr": leaf(-1.6)}
    leaves = list(hyper.values())

    def out() -> bda.Hypergradient:
        lr = torch.exp(hyper["log_lr"])
        return run(
            lambda y, h, b: lower(y, h["x"]),
            lambda y, h, b: upper(y, h["x"]),
            hyper,
            lr=lr,
            upper_lr=0.7,
            adjoint=adjoint,
        )

    assert relative_error(list(out().grad.values()), difference_quotients(lambda: out().value, leaves)) < 1e-8


# y_0 as an upper variable.


@exact
def test_hyper_that_is_the_start(adjoint: Any) -> None:
    """The anchor of implicit MAML: the same tensor is y_0 and pulls y back; both derivatives count."""
    y0 = leaf(0.4, -0.3)

    def f(y: Tensor, anchor: Tensor, batch: Any) -> Tensor:
        return (y**4).sum() + (y - anchor).square().sum() + (y[0] - 1) ** 2

    def big_f(y: Tensor, anchor: Tensor, batch: Any) -> Tensor:
        return torch.cos(y).sum() + anchor.prod()

    def out() -> bda.Hypergradient:
        return bda.hypergradient(f, big_f, y0, y0, steps=4, lr=0.1, alpha=0.2, adjoint=adjoint)

    want = difference_quotients(lambda: out().value, [y0])
    assert relative_error([out().grad], want) < 1e-8
    y = bda.rollout(f, big_f, y0, y0, steps=4, lr=0.1, alpha=0.2, adjoint=adjoint)
    assert relative_error(torch.autograd.grad(big_f(y, y0, None), y0), want) < 1e-8


def test_the_start_is_constant_unless_it_is_hyper() -> None:
    y0, x = leaf(2.0, 2.0), leaf(0.3)
    assert run(hyper=x, params=y0).grad.item() == pytest.approx(run().grad.item(), abs=1e-15)
    y = bda.rollout(lower, None, y0, x, steps=3, lr=0.2)
    assert torch.autograd.grad(y.sum(), y0)[0].tolist() == pytest.approx([0.8**3, 1.0])


def test_the_start_may_change_afterwards() -> None:
    """y_0 is cloned, so that an upper step may change it."""
    for adjoint in EXACT:
        y0 = leaf(2.0, 2.0)
        y = bda.rollout(lower, None, y0, double(0.3), steps=3, lr=0.2, adjoint=adjoint)
        with torch.no_grad():
            y0.zero_()
        assert torch.autograd.grad(y.sum(), y0)[0].tolist() == pytest.approx([0.8**3, 1.0])
