"""`hypergradient` and `rollout` on trees of tensors: what goes in, what comes out, and what is refused."""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from problems import difference_quotients, double, lower, relative_error, upper
from torch import Tensor, nn, optim
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

import bda_optim as bda
from bda_optim._adjoints.storage import Ledger, Shelf
from bda_optim._support.types import Record

EXACT = [bda.Unroll(), bda.Checkpointed(), bda.Checkpointed(slots=2), bda.ForwardMode()]
exact = pytest.mark.parametrize("adjoint", EXACT, ids=str)
START = double(2.0, 2.0)


def leaf(*values: Any) -> Tensor:
    return double(*values).requires_grad_()


def run(lower: Any = lower, upper: Any = upper, hyper: Any = None, **options: Any) -> bda.Hypergradient:
    """The counter-example, three steps of BDA, unless told otherwise."""
    hyper = double(0.3) if hyper is None else hyper
    defaults = {"params": START, "steps": 3, "lr": 0.2, "upper_lr": 0.7, "alpha": bda.harmonic(0.5)}
    return bda.hypergradient(lower, upper, hyper=hyper, **{**defaults, **options})


# What comes out.


def test_the_parts_of_a_hypergradient() -> None:
    out = run(steps=5)
    assert out._fields == ("value", "grad", "params", "trace")
    assert out.value.shape == out.grad.shape == () and out.params.shape == (2,)
    assert out.trace.lower.shape == out.trace.upper.shape == (5,)
    assert not any(t.requires_grad for t in (out.value, out.grad, out.params, out.trace.lower, out.trace.upper))


def test_values_equal_the_equation() -> None:
    """y_{k+1} = y_k - [a_k s_u grad F + (1 - a_k) s_l grad f], written out with the gradients known."""
    y, x, f, big_f = START.clone(), 0.3, [], []
    for k in range(1, 6):
        f.append(0.5 * y[0] ** 2 - x * y[0])
        big_f.append(0.5 * (x - y[1]) ** 2 + 0.5 * (y[0] - 1) ** 2)
        g_lower, g_upper = torch.stack([y[0] - x, y[0] * 0]), torch.stack([y[0] - 1, y[1] - x])
        y = y - (0.5 / k * 0.7 * g_upper + (1 - 0.5 / k) * 0.2 * g_lower)
    out = run(steps=5)
    torch.testing.assert_close(out.params, y, rtol=0, atol=1e-15)
    torch.testing.assert_close(out.trace.lower, torch.stack(f), rtol=0, atol=1e-15)
    torch.testing.assert_close(out.trace.upper, torch.stack(big_f), rtol=0, atol=1e-15)
    assert out.value.item() == pytest.approx(upper(y, x).item(), abs=1e-15)


@exact
def test_trace_is_the_same_for_every_adjoint(adjoint: Any) -> None:
    want, got = run(steps=6).trace, run(steps=6, adjoint=adjoint).trace
    assert torch.equal(got.lower, want.lower) and torch.equal(got.upper, want.upper)


def test_trace_without_aggregation_has_no_upper_losses() -> None:
    assert run(alpha=0.0).trace.upper is None


def test_trace_is_nan_where_a_step_skipped_the_upper_loss() -> None:
    trace = run(alpha=lambda k: 0.3 if k == 2 else 0.0).trace
    assert trace.upper.isnan().tolist() == [True, False, True]
    assert trace.lower.isfinite().all()


def test_rollout_is_the_differentiable_part() -> None:
    x, out = leaf(0.3), run()
    y = bda.rollout(lower, upper, START, x, steps=3, lr=0.2, upper_lr=0.7, alpha=bda.harmonic(0.5))
    assert torch.equal(y, out.params) and y.requires_grad
    (grad,) = torch.autograd.grad(upper(y, x), x)
    assert grad.item() == pytest.approx(out.grad.item(), abs=1e-15)


def test_arguments_stay_as_they_are() -> None:
    x, y0 = leaf(0.3), leaf(2.0, 2.0)
    for out in (run(hyper=x, params=y0).params, bda.rollout(lower, None, y0, x, steps=3, lr=0.2)):
        assert out is not y0
    assert torch.equal(y0, START) and x.item() == 0.3
    assert x.grad is None and y0.grad is None and x.requires_grad and y0.requires_grad


def test_default_rates_are_those_of_the_rule() -> None:
    plain = bda.rollout(lower, None, START, double(0.3), steps=2)
    assert torch.equal(plain, bda.rollout(lower, None, START, double(0.3), steps=2, lr=1e-3))
    adam = bda.rollout(lower, None, START, double(0.3), steps=2, rule=optim.Adagrad)
    assert torch.equal(adam, bda.rollout(lower, None, START, double(0.3), steps=2, rule=optim.Adagrad, lr=1e-2))


def test_upper_lr_follows_lr() -> None:
    assert torch.equal(run(upper_lr=None).params, run(upper_lr=0.2).params)
    assert not torch.equal(run(upper_lr=None).params, run(upper_lr=0.7).params)


def test_a_hypergradient_under_no_grad() -> None:
    with torch.no_grad():
        assert torch.equal(run().grad, run().grad)
        inside = run().grad
    assert torch.equal(inside, run().grad)


def test_parameters_keep_their_dtype() -> None:
    y = bda.rollout(lower, upper, START.float(), torch.tensor(0.3), steps=3, lr=double(0.2), alpha=double(0.3))
    assert y.dtype == torch.float32


def test_params_may_be_a_tree() -> None:
    params = {"a": [START.clone(), double(1.0)], "b": (double(3.0),)}

    def f(y: Any, x: Tensor, batch: Any) -> Tensor:
        assert isinstance(y["a"], list) and isinstance(y["b"], tuple)
        return lower(y["a"][0], x) + (y["a"][1] * y["b"][0] - x).square()

    out = run(f, lambda y, x, b: upper(y["a"][0], x), params=params)
    assert out.params["a"][0].shape == (2,) and out.params["b"][0].shape == ()
    assert torch.equal(out.params["a"][0], run().params)


# What hyper may be.


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
    assert out.grad["rest"][1] == "a name" and out.grad["rest"][2][1:] == (None, 7)
    assert torch.equal(out.grad["rest"][2][0], double(0.0, 0.0)), "an unused tensor gets zeros"


def test_hyper_as_a_list_and_as_a_tuple() -> None:
    def call(hyper: Any) -> Any:
        return run(lambda y, h, b: lower(y, h[0]), lambda y, h, b: upper(y, h[0]), hyper).grad

    for kind in (list, tuple):
        found = call(kind([double(0.3), torch.tensor([1, 2])]))
        assert type(found) is kind and torch.equal(found[0], run().grad)
        assert torch.equal(found[1], torch.tensor([0, 0])), "integers have no gradient"


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
    """Unrolling differentiates what a loss captures; that it is in `hyper` as well must not make it a constant."""
    x = leaf(0.3)
    assert run(lambda y, h, b: lower(y, x), hyper=x).grad.item() == pytest.approx(run().grad.item(), abs=1e-14)
    assert run(lambda y, h, b: lower(y, h), lambda y, h, b: upper(y, x), hyper=x).grad.item() == pytest.approx(
        run().grad.item(), abs=1e-14
    )


def test_batches_that_depend_on_hyper() -> None:
    """Computed outside from x, as features are: what flows into them flows on into x, and twice if asked twice."""
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
    """y_0 is cloned, so that an upper step on it does no harm."""
    for adjoint in EXACT:
        y0 = leaf(2.0, 2.0)
        y = bda.rollout(lower, None, y0, double(0.3), steps=3, lr=0.2, adjoint=adjoint)
        with torch.no_grad():
            y0.zero_()
        assert torch.autograd.grad(y.sum(), y0)[0].tolist() == pytest.approx([0.8**3, 1.0])


# Batches.


class Listed(Sequence[Any]):
    """A sequence of one's own; it counts how often it is read."""

    def __init__(self, items: list[Any]) -> None:
        self.items, self.reads = items, 0

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: Any) -> Any:
        self.reads += 1
        return self.items[index]


def test_batches_are_shown_in_order() -> None:
    seen = []

    def note(level: str, loss: Any) -> Any:
        def noted(y: Tensor, x: Tensor, batch: Any) -> Tensor:
            seen.append((level, batch))
            return loss(y, x)

        return noted

    run(note("lower", lower), note("upper", upper), batches=["a", "b", "c"], upper_batch="last")
    assert seen == [(level, batch) for batch in "abc" for level in ("lower", "upper")] + [("upper", "last")]


@pytest.mark.parametrize("kind", [list, tuple, torch.stack, Listed])
@exact
def test_kinds_of_batches(kind: Any, adjoint: Any) -> None:
    shifts = [double(0.1), double(0.2), double(-0.1)]
    want = run(lambda y, x, b: lower(y, x + b), batches=shifts).grad
    got = run(lambda y, x, b: lower(y, x + b), batches=kind(shifts), adjoint=adjoint).grad
    assert got.item() == pytest.approx(want.item(), abs=1e-14)
    assert abs(want.item() - run().grad.item()) > 1e-3


def test_a_sequence_is_read_when_it_is_needed() -> None:
    batches = Listed([double(0.1)] * 9)
    run(lambda y, x, b: lower(y, x + b), steps=9, batches=batches)
    assert batches.reads == 9


@exact
def test_gradients_flow_into_batches(adjoint: Any) -> None:
    """One tensor at k = 1 and 3, one at k = 2, inside whatever tree; the same object counts once."""
    often, once, idle = leaf(0.1), leaf(-0.2), double(3.0)

    def value() -> Tensor:
        batches = [{"b": [often], "more": idle}, {"b": (once,), "more": None}, {"b": [often], "more": "text"}]
        y = bda.rollout(
            lambda y, x, b: lower(y, x + b["b"][0]), lambda y, x, b: upper(y, x * b["b"][0]), START, double(0.3),
            steps=3, lr=0.2, alpha=0.3, batches=batches, adjoint=adjoint,
        )  # fmt: skip
        return upper(y, double(0.3))

    got = torch.autograd.grad(value(), (often, once))
    assert relative_error(got, difference_quotients(value, [often, once])) < 1e-8


@exact
def test_a_batch_that_is_also_hyper(adjoint: Any) -> None:
    x = leaf(0.3)
    got = run(lambda y, h, b: lower(y, b), hyper=x, batches=[x] * 3, adjoint=adjoint).grad
    assert got.item() == pytest.approx(run().grad.item(), abs=1e-14)


@exact
def test_the_list_of_batches_may_change_afterwards(adjoint: Any) -> None:
    x, batches = leaf(0.3), [double(1.0), double(2.0), double(3.0)]

    def grad(change: Callable[[list[Tensor]], Any]) -> Tensor:
        mine = list(batches)
        y = bda.rollout(lambda y, x, b: lower(y, x * b), None, START, x, steps=3, lr=0.2, batches=mine, adjoint=adjoint)
        change(mine)
        return torch.autograd.grad(y[0], x)[0]

    want = grad(lambda mine: None)
    for change in (list.reverse, list.clear, lambda mine: mine.append(double(4.0))):
        assert torch.equal(grad(change), want)


def test_lazy_batches_carry_no_gradients() -> None:
    with pytest.raises(ValueError, match=r"as a list or tuple; got Listed whose batch 1 requires grad\. Pass `list\("):
        run(lambda y, x, b: lower(y, x + b), batches=Listed([double(0.1), leaf(0.1), double(0.1)]))


@pytest.mark.parametrize(
    "batches, kind",
    [
        (iter([1, 2, 3]), "list_iterator"),
        ((b for b in (1, 2, 3)), "generator"),
        (DataLoader(TensorDataset(torch.zeros(3, 1))), "DataLoader"),
        ({0: 1, 1: 2, 2: 3}, "dict"),
        ("abc", "str"),
        (3, "int"),
    ],
)
def test_batches_must_be_a_sequence(batches: Any, kind: str) -> None:
    with pytest.raises(TypeError, match=rf"read twice; got {kind}\. Pass a list, for example `list\(itertools"):
        run(batches=batches)


@pytest.mark.parametrize("batches", [[], [1, 2], [1, 2, 3, 4], torch.zeros(2, 3)], ids=str)
def test_one_batch_per_step(batches: Any) -> None:
    with pytest.raises(
        ValueError, match=rf"got {len(batches)} batches for steps=3\. Pass as many .*`\[batch\] \* steps`"
    ):
        run(batches=batches)


# The upper loss costs nothing where alpha is 0.


class Counted:
    def __init__(self, loss: Callable[..., Tensor]) -> None:
        self.loss, self.calls = loss, 0

    def __call__(self, y: Tensor, x: Tensor, batch: Any) -> Tensor:
        self.calls += 1
        return self.loss(y, x)


@pytest.mark.parametrize(
    "alpha", [0.0, 0, bda.constant(0.0), lambda k: 0.0], ids=["float", "int", "schedule", "function"]
)
@exact
def test_upper_is_not_called_in_the_loop(alpha: Any, adjoint: Any) -> None:
    big_f = Counted(upper)
    run(upper=big_f, alpha=alpha, steps=5, adjoint=adjoint)
    assert big_f.calls == 1


def test_upper_is_called_where_it_counts() -> None:
    f, big_f = Counted(lower), Counted(upper)
    run(f, big_f, steps=5)
    assert (f.calls, big_f.calls) == (5, 6)
    big_f.calls = 0
    run(f, big_f, steps=5, alpha=lambda k: 0.3 * (k <= 2))
    assert big_f.calls == 3


def test_upper_may_be_left_out() -> None:
    assert torch.equal(bda.rollout(lower, None, START, double(0.3), steps=3, lr=0.2), run(alpha=0.0).params)


# Many tasks at once.


TASKS = 3


def task_problem() -> tuple[dict[str, Tensor], Tensor, list[tuple[Tensor, Tensor]], tuple[Tensor, Tensor]]:
    start = {"w": 0.5 * torch.randn(3, 2, dtype=torch.float64), "b": torch.randn(2, dtype=torch.float64)}
    data = [torch.randn(2, TASKS, 4, n, dtype=torch.float64) for n in (3, 2)]
    batches = [(data[0][0], data[1][0])] * 4
    return start, torch.randn(2, dtype=torch.float64), batches, (data[0][1], data[1][1])


def task_lower(y: Any, x: Tensor, batch: Any) -> Tensor:
    inputs, wanted = batch
    assert inputs.dim() == 2, "no task dimension is seen inside a loss"
    return (torch.tanh(inputs @ y["w"] + y["b"]) - wanted - x).square().mean()


def task_upper(y: Any, x: Tensor, batch: Any) -> Tensor:
    inputs, wanted = batch
    return (inputs @ y["w"] + y["b"] - wanted).square().mean() + 0.1 * x.square().sum()


def one_by_one(start: Any, x: Tensor, batches: Any, upper_batch: Any, **options: Any) -> list[bda.Hypergradient]:
    return [
        bda.hypergradient(
            task_lower, task_upper, start, x, batches=[tuple(t[i] for t in b) for b in batches],
            upper_batch=tuple(t[i] for t in upper_batch), steps=len(batches), **options,
        )
        for i in range(TASKS)
    ]  # fmt: skip


TASK_SETTINGS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.3},
    "aggregated": {"lr": 0.3, "upper_lr": 0.1, "alpha": bda.harmonic(0.5)},
    "l1": {"lr": 0.3, "prox": bda.prox.l1(0.1)},
    "l2_ball": {"lr": 0.3, "prox": bda.prox.l2_ball(0.8), "alpha": 0.3},
    "simplex": {"lr": 0.3, "prox": bda.prox.simplex(1.5)},
    "group_lasso": {"lr": 0.3, "prox": bda.prox.group_lasso(0.2), "alpha": 0.2},
    "Adam": {"lr": 0.1, "rule": optim.Adam},
    "Adafactor": {"lr": 0.3, "rule": optim.Adafactor},
    "Adafactor with a prox": {"lr": 0.3, "rule": optim.Adafactor, "prox": bda.prox.l2_ball(0.8), "alpha": 0.3},
    "FISTA": {"lr": 0.3, "rule": bda.FISTA},
}


@pytest.mark.parametrize("settings", TASK_SETTINGS.values(), ids=TASK_SETTINGS)
@pytest.mark.parametrize("adjoint", [bda.Unroll(), bda.Checkpointed(), bda.ForwardMode()], ids=str)
def test_tasks_equal_a_loop(settings: dict[str, Any], adjoint: Any) -> None:
    start, x, batches, upper_batch = task_problem()
    out = bda.hypergradient(
        task_lower, task_upper, start, x, batches=batches, upper_batch=upper_batch, steps=4, tasks=TASKS,
        adjoint=adjoint, **settings,
    )  # fmt: skip
    alone = one_by_one(start, x, batches, upper_batch, **settings)
    assert out.value.shape == (TASKS,) and out.trace.lower.shape == (4, TASKS)
    assert relative_error([out.value], [torch.stack([o.value for o in alone])]) < 1e-10
    assert relative_error([out.grad], [torch.stack([o.grad for o in alone]).sum(0)]) < 1e-10
    assert relative_error([out.trace.lower], [torch.stack([o.trace.lower for o in alone], dim=1)]) < 1e-10
    for name in start:
        assert out.params[name].shape == (TASKS, *start[name].shape)
        assert relative_error([out.params[name]], [torch.stack([o.params[name] for o in alone])]) < 1e-10


@exact
def test_tasks_share_the_start(adjoint: Any) -> None:
    """MAML on plain tensors: y_0 is hyper, and the tasks' derivatives add."""
    start, x, batches, upper_batch = task_problem()

    def f(y: Any, y0: Any, batch: Any) -> Tensor:
        return task_lower(y, x, batch)

    def big_f(y: Any, y0: Any, batch: Any) -> Tensor:
        return task_upper(y, x, batch)

    together = bda.hypergradient(
        f, big_f, start, start, batches=batches, upper_batch=upper_batch, steps=4, lr=0.3, tasks=TASKS, adjoint=adjoint
    )
    alone = [
        bda.hypergradient(
            f, big_f, start, start, batches=[tuple(t[i] for t in b) for b in batches],
            upper_batch=tuple(t[i] for t in upper_batch), steps=4, lr=0.3,
        )
        for i in range(TASKS)
    ]  # fmt: skip
    for name in start:
        assert relative_error([together.grad[name]], [torch.stack([o.grad[name] for o in alone]).sum(0)]) < 1e-10


def test_gradients_flow_into_the_batches_of_tasks() -> None:
    start, x, batches, _ = task_problem()
    features = batches[0][0].clone().requires_grad_()

    def value(adjoint: Any = None) -> Tensor:
        batches_ = [(features, wanted) for _, wanted in batches]
        y = bda.rollout(
            task_lower, None, start, x, steps=4, lr=0.3, batches=batches_, tasks=TASKS, adjoint=adjoint
        )  # fmt: skip
        return (y["w"] ** 2).sum()

    (got,) = torch.autograd.grad(value(), features)
    assert got.shape == features.shape
    assert relative_error([got], difference_quotients(value, [features])) < 1e-7
    assert relative_error(torch.autograd.grad(value(bda.Checkpointed()), features), [got]) < 1e-10


class Renamed(dict):  # type: ignore[type-arg]
    """A dict of the user's own class, as batches of some data sets are."""


@pytest.mark.parametrize("kind", [Renamed, OrderedDict, lambda d: [deque(d.values())], lambda d: Pair(*d.values())])
def test_containers_of_any_class_are_looked_through(kind: Any) -> None:
    def lower(y: Tensor, x: Tensor, batch: Any) -> Tensor:
        a, b = batch.values() if isinstance(batch, dict) else batch[0] if isinstance(batch, list) else batch
        assert a.shape == (3,) and b.dim() == 0, "a task is seen alone"
        return ((y * a - x) ** 2).sum() * b

    def run(kind: Any) -> list[Tensor]:
        torch.manual_seed(0)
        a, x = torch.randn(2, 3).double().requires_grad_(), leaf(0.5)
        batches = [kind({"a": a, "b": torch.tensor([1.0, 2.0]).double()})] * 3
        y = bda.rollout(
            lower, None, double(1.0, 2.0, 3.0), x, steps=3, lr=0.1, batches=batches, tasks=2, adjoint=bda.Checkpointed()
        )
        return [y, *torch.autograd.grad(y.sum(), [a, x])]

    assert all(torch.equal(a, b) for a, b in zip(run(kind), run(dict), strict=True))


class Pair(NamedTuple):
    a: Tensor
    b: Tensor


def test_tasks_that_cannot_be_batched_run_one_after_another() -> None:
    start, x, batches, _ = task_problem()

    def stubborn(y: Any, x: Tensor, batch: Any) -> Tensor:
        return task_lower(y, x, batch) * (1.0 if batch[0].sum().item() > 0 else 0.5)

    with pytest.warns(UserWarning, match="cannot be batched over tasks .*the 3 tasks run one after another"):
        y = bda.rollout(stubborn, None, start, x, steps=4, lr=0.3, batches=batches, tasks=TASKS)
    for i in range(TASKS):
        mine = [tuple(t[i] for t in b) for b in batches]
        alone = bda.rollout(stubborn, None, start, x, steps=4, lr=0.3, batches=mine)
        assert relative_error([y["w"][i], y["b"][i]], [alone["w"], alone["b"]]) < 1e-12


@pytest.mark.parametrize("wrong", [torch.zeros(2, 4), torch.zeros(())], ids=["size", "scalar"])
def test_batches_of_tasks_have_a_task_dimension(wrong: Tensor) -> None:
    start, x, batches, _ = task_problem()
    batches[2] = (batches[2][0], wrong)
    with pytest.raises(ValueError, match=r"with tasks=3 every tensor of a batch .* got batches\[2\] .*Stack the tasks"):
        bda.rollout(task_lower, None, start, x, steps=4, lr=0.3, batches=batches, tasks=TASKS)


# No value is read back from the device: on `meta` there is none.


META: dict[str, dict[str, Any]] = {
    "plain": {"lr": 0.1},
    "aggregated": {"lr": 0.1, "alpha": bda.harmonic(0.5), "upper_lr": 0.2},
    "learned": {
        "lr": torch.zeros((), device="meta", requires_grad=True),
        "alpha": torch.zeros((), device="meta", requires_grad=True),
        "momentum": torch.zeros((), device="meta", requires_grad=True),
    },
    "schedule": {"lr": 0.1, "alpha": bda.harmonic(torch.zeros((), device="meta", requires_grad=True))},
    "prox": {"lr": 0.1, "alpha": 0.3, "prox": bda.prox.l1(torch.zeros((), device="meta", requires_grad=True))},
    "Adam": {"lr": 0.1, "alpha": 0.3, "rule": optim.Adam, "amsgrad": True},
    "l2_ball": {"lr": 0.1, "prox": bda.prox.l2_ball(1.0)},
}


@pytest.mark.parametrize("settings", META.values(), ids=META)
@pytest.mark.parametrize("adjoint", [bda.Unroll(), bda.Checkpointed(), bda.Checkpointed(slots=2)], ids=str)
def test_nothing_is_read_back(settings: dict[str, Any], adjoint: Any) -> None:
    x, y0 = torch.zeros(3, device="meta"), torch.zeros(4, 3, device="meta")

    def f(y: Tensor, x: Tensor, batch: Any) -> Tensor:
        return (torch.tanh(y) * x + batch).square().mean()

    out = bda.hypergradient(
        f, lambda y, x, b: (y @ x).square().mean(), y0, x, steps=5, batches=[torch.ones(3, device="meta")] * 5,
        adjoint=adjoint, **settings,
    )  # fmt: skip
    assert out.grad.shape == (3,) and out.params.shape == (4, 3) and out.trace.lower.shape == (5,)
    assert all(t.is_meta for t in (out.value, out.grad, out.params, out.trace.lower))


class Reads(TorchDispatchMode):
    """Counts how often a value is read back from the device."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("rule", [None, optim.Adam, optim.RAdam, bda.FISTA])
@exact
def test_values_are_read_once_and_not_in_every_step(adjoint: Any, rule: Any) -> None:
    def reads(steps: int, alpha: Any) -> int:
        with Reads() as mode:
            run(
                hyper=leaf(0.3),
                steps=steps,
                lr=leaf(0.1),
                alpha=alpha,
                prox=bda.prox.l1(0.01),
                adjoint=adjoint,
                rule=rule,
            )
        return mode.count

    forward_and_backward = 2 if isinstance(adjoint, bda.Checkpointed) else 1
    assert reads(3, 0.3) == reads(12, 0.3) == forward_and_backward
    assert reads(3, leaf(0.3)) == reads(12, leaf(0.3))


# Wrong use: what, got, do.


def vector(y: Tensor, x: Tensor, batch: Any) -> Tensor:
    return y * x


def number(y: Tensor, x: Tensor, batch: Any) -> Any:
    return lower(y, x).item()


@exact
@pytest.mark.parametrize("level", ["lower", "upper"])
def test_a_loss_must_be_a_scalar(level: str, adjoint: Any) -> None:
    with pytest.raises(
        ValueError, match=rf"the {level} loss must be a scalar; got shape \(2,\) at step k=1\. Reduce it"
    ):
        run(**{level: vector}, adjoint=adjoint)
    with pytest.raises(TypeError, match=rf"the {level} loss must be a scalar tensor; got float at step k=1\. Return"):
        run(**{level: number}, adjoint=adjoint)


@pytest.mark.parametrize("wrong, got", [(vector, r"\(2,\)"), (number, "float"), (lambda y, x, b: None, "NoneType")])
def test_the_last_upper_loss_must_be_a_scalar_too(wrong: Any, got: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"the upper loss must be a scalar.*got.*{got}"):
        run(upper=wrong, alpha=0.0)


def test_a_loss_of_tasks_must_be_a_scalar_each() -> None:
    start, x, batches, _ = task_problem()
    with pytest.raises(ValueError, match=r"the lower loss must be a scalar; got shape \(4, 2\) at step k=1"):
        bda.rollout(
            lambda y, x, b: b[0] @ y["w"], None, start, x, steps=4, lr=0.3, batches=batches, tasks=TASKS
        )  # fmt: skip


@exact
def test_the_lower_loss_must_depend_on_y(adjoint: Any) -> None:
    for wrong in (lambda y, x, b: x**2, lambda y, x, b: lower(y.detach(), x), lambda y, x, b: double(1.0)):
        with pytest.raises(ValueError, match=r"does not depend on any parameter .*step k=1.* without `\.detach\(\)`"):
            run(wrong, adjoint=adjoint)


def test_the_upper_loss_need_not_depend_on_y() -> None:
    out = run(upper=lambda y, x, b: x**2)
    assert out.grad.item() == pytest.approx(0.6)


@exact
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_names_the_step(adjoint: Any, bad: float) -> None:
    factors = [1.0, 1.0, bad, 1.0]
    with pytest.raises(
        FloatingPointError, match=r"diverged: the lower loss is not finite at step k=3 of 4\. Lower `lr`"
    ):
        run(lambda y, x, b: b * lower(y, x), steps=4, batches=factors, adjoint=adjoint)
    with pytest.raises(
        FloatingPointError, match=r"diverged: the upper loss is not finite at step k=3 of 4\. Lower `lr`"
    ):
        run(upper=lambda y, x, b: (b or 1.0) * upper(y, x), steps=4, batches=factors, adjoint=adjoint)


def test_parameters_that_are_not_finite_at_the_end() -> None:
    with pytest.raises(FloatingPointError, match=r"`params` is not finite after step k=1 of 1"):
        bda.rollout(lambda y, x, b: y.pow(4).sum(), None, double(1e60, 1.0), steps=1, lr=1e200)


@pytest.mark.parametrize("alpha", [1.0, 1.3, -0.1, math.nan])
def test_alpha_lies_below_one(alpha: float) -> None:
    message = rf"`alpha` must lie in \[0, 1\) at every step; got {alpha} at k="
    with pytest.raises(ValueError, match=message + r"1\. Use `harmonic\(0\.5\)` or clip it"):
        run(alpha=alpha)
    with pytest.raises(ValueError, match=message + "2"):
        run(alpha=lambda k: alpha if k == 2 else 0.5)
    with pytest.raises(ValueError, match=message + "3"):
        run(alpha=lambda k: alpha if k == 3 else 0.0)


@pytest.mark.parametrize("alpha", [1.0, 1.5, -0.25])
def test_a_tensor_alpha_lies_below_one(alpha: float) -> None:
    message = rf"`alpha` must lie in \[0, 1\) at every step; got {alpha} at k=1\. Learn it through a sigmoid"
    for wrong in (leaf(alpha), double(alpha), lambda k: double(alpha)):
        with pytest.raises(ValueError, match=message):
            run(alpha=wrong)
    with pytest.raises(ValueError, match=r"`alpha` must lie in \[0, 1\) at every step; got a tensor beyond"):
        run(alpha=[double(0.5, alpha)])


def test_a_negative_constant_in_a_tensor_schedule() -> None:
    with pytest.raises(ValueError, match=r"`alpha` must lie in \[0, 1\)"):
        run(alpha=bda.harmonic(leaf(-0.5)))


@pytest.mark.parametrize("alpha", ["0.5", None, True, (0.5,)])
def test_alpha_of_a_wrong_kind(alpha: Any) -> None:
    with pytest.raises(TypeError, match=r"`alpha` must be a number, a schedule or a tensor; got"):
        run(alpha=alpha)


@pytest.mark.parametrize("alpha", [0.3, bda.harmonic(0.5), leaf(0.2)], ids=["number", "schedule", "tensor"])
def test_aggregation_needs_the_upper_loss(alpha: Any) -> None:
    with pytest.raises(ValueError, match=r"`alpha` is not 0 at step k=1.*got upper=None\. Pass it, or set alpha=0\.0"):
        bda.rollout(lower, None, START, double(0.3), steps=3, lr=0.2, alpha=alpha)


def test_aggregation_in_the_middle_needs_the_upper_loss() -> None:
    with pytest.raises(ValueError, match=r"`alpha` is not 0 at step k=2.*got upper=None"):
        bda.rollout(lower, None, START, double(0.3), steps=3, lr=0.2, alpha=lambda k: 0.3 * (k == 2))


def test_a_hypergradient_needs_the_upper_loss() -> None:
    with pytest.raises(TypeError, match=r"got upper=None\. Use `rollout` for y_K alone"):
        run(upper=None, alpha=0.0)


@pytest.mark.parametrize("adjoint", [a for a in EXACT if a != bda.Unroll()], ids=str)
def test_a_captured_tensor_must_be_in_hyper(adjoint: Any) -> None:
    captured = torch.zeros(4, 3, dtype=torch.float64, requires_grad=True)
    for f, big_f in (
        (lambda y, x, b: lower(y, x) + captured.sum() * y[0], upper),
        (lower, lambda y, x, b: upper(y, x) + captured.sum() * y[0]),
    ):
        with pytest.raises(ValueError, match=r"neither in `hyper=` nor in `batches=`; got one of 4x3 float64 on cpu"):
            run(f, big_f, adjoint=adjoint)


def test_unrolling_differentiates_captured_tensors() -> None:
    captured = leaf(0.3)
    y = bda.rollout(lambda y, x, b: lower(y, captured), None, START, steps=3, lr=0.2)
    want = torch.autograd.grad(bda.rollout(lower, None, START, captured, steps=3, lr=0.2)[0], captured)
    assert torch.autograd.grad(y[0], captured) == want


@pytest.mark.parametrize("steps", [0, -1, 2.5, True, "3", None])
def test_steps_is_a_count(steps: Any) -> None:
    with pytest.raises(
        ValueError, match=r"`steps` must be a whole number of at least 1; got .*Ask for one step or more"
    ):
        run(steps=steps)


@pytest.mark.parametrize("tasks", [0, -2, 1.0, True])
def test_tasks_is_a_count(tasks: Any) -> None:
    with pytest.raises(
        ValueError, match=r"`tasks` must be a whole number of at least 1; got .*Ask for one task or more"
    ):
        run(tasks=tasks)


@pytest.mark.parametrize("params", [None, 1.0, [], {"a": "b"}], ids=str)
def test_params_must_hold_tensors(params: Any) -> None:
    with pytest.raises(ValueError, match="`params` must be a tensor or a tree of tensors; got"):
        run(params=params)


def test_params_must_be_floating_point() -> None:
    with pytest.raises(
        ValueError, match=r"must be floating point; got params\['n'\]\[0\], 2 int64 on cpu\. Keep it in"
    ):
        run(params={"y": START, "n": [torch.tensor([1, 2])]})


FAR = torch.zeros(2, device="meta", dtype=torch.float64)


@pytest.mark.parametrize(
    "name, options",
    [
        (r"hyper\['x'\]\[1\]", {"hyper": {"x": [double(0.3), FAR]}}),
        ("lr", {"lr": torch.zeros((), device="meta")}),
        (r"batches\[1\]", {"batches": [START, FAR, START]}),
        (r"batches\[1\]", {"batches": [START, FAR.clone().requires_grad_(), START]}),
    ],
    ids=["hyper", "setting", "batch", "batch with grad"],
)
def test_everything_is_on_one_device(name: str, options: dict[str, Any]) -> None:
    message = rf"must be on the device of the parameters \(cpu\); got .*{name}.* on meta\. Move it there with `\.to"
    with pytest.raises(ValueError, match=message):
        run(lambda y, x, b: y.sum(), lambda y, x, b: y.sum(), **options)


def test_single_numbers_may_stay_on_the_cpu() -> None:
    y0 = torch.zeros(2, device="meta")
    y = bda.rollout(lower, upper, y0, torch.tensor(0.3), steps=2, lr=torch.tensor(0.2), alpha=torch.tensor(0.4))
    assert y.is_meta


@pytest.mark.parametrize(
    "options, message",
    [
        ({"momentun": 0.9}, r"SGD has no setting `momentun`; it takes .*momentum.*Check the spelling"),
        ({"betas": (0.9, 0.9)}, r"SGD has no setting `betas`; it takes .*momentum"),
        ({"rule": optim.Adam, "momentum": 0.9}, r"Adam has no setting `momentum`; it takes .*betas"),
        ({"hypr": 1}, r"SGD has no setting `hypr`"),
    ],
    ids=str,
)
def test_unknown_settings(options: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        run(**options)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"lr": -0.1}, r"`lr` of SGD must be at least 0; got -0\.1"),
        ({"lr": double(0.1, 0.2)}, r"`lr` must be a tensor with one element, or a list .*got a tensor of shape \(2,\)"),
        (
            {"lr": [double(0.1, 0.2, 0.3)]},
            r"`lr` as a list must have one tensor per parameter .*got \[\(3,\)\] for .*\(2,\)",
        ),
        ({"lr": [double(0.1), double(0.1)]}, r"`lr` as a list must have one tensor per parameter"),
        ({"upper_lr": -1.0}, r"`upper_lr` must be a number of at least 0; got -1\.0\. Leave it out to follow `lr`"),
        ({"upper_lr": math.nan}, r"`upper_lr` must be a number of at least 0; got nan"),
        (
            {"lr": [double(0.1, 0.2)], "prox": bda.prox.l2_ball(1.0)},
            r"one rate per element; got l2_ball.*separable prox",
        ),
    ],
)
def test_settings_that_cannot_be_honoured(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(**options)


def test_prox_must_be_a_map() -> None:
    with pytest.raises(TypeError, match=r"`prox` must be a proximal map; got 0\.1\. Use one of `bda_optim\.prox`"):
        run(prox=0.1)


# Tensors that change between a rollout and its backward pass.


REPLAYED = [bda.Checkpointed(), bda.Checkpointed(every=1), bda.Checkpointed(slots=2)]
replayed = pytest.mark.parametrize("adjoint", REPLAYED, ids=str)


def product(y: Tensor, x: Any, batch: Tensor) -> Tensor:
    """A loss whose derivative needs the values of all that it is given."""
    return (y * x["w"][0] * batch).square().sum() + (y - 1).square().sum()


def changing() -> tuple[dict[str, Any], Tensor, list[Tensor], Tensor]:
    return {"w": [leaf(0.3)]}, leaf(0.2), [double(1.0), double(2.0), leaf(3.0), double(4.0)], leaf(0.4)


def rolled(x: Any, lr: Tensor, batches: list[Tensor], alpha: Tensor, adjoint: Any) -> Tensor:
    return bda.rollout(
        product, product, START, x, steps=4, lr=lr, upper_lr=0.01, alpha=alpha, batches=batches, adjoint=adjoint
    ).prod()


CHANGES: dict[str, tuple[Callable[..., Tensor], str]] = {
    "hyper": (lambda x, lr, batches, alpha: x["w"][0], r"hyper\['w'\]\[0\] \(scalar float64 on cpu\)"),
    "batch": (lambda x, lr, batches, alpha: batches[1], r"a tensor of the batch of step k=2 \(scalar float64 on cpu\)"),
    "batch with grad": (
        lambda x, lr, batches, alpha: batches[2],
        r"a tensor of batches\[2\] \(scalar float64 on cpu\)",
    ),
    "lr": (lambda x, lr, batches, alpha: lr, r"lr.* \(scalar float64 on cpu\)"),
    "alpha": (lambda x, lr, batches, alpha: alpha, r"alpha.* \(scalar float64 on cpu\)"),
}


@pytest.mark.parametrize("which", CHANGES)
@replayed
def test_a_change_in_place_is_named(adjoint: Any, which: str) -> None:
    parts = changing()
    loss = rolled(*parts, adjoint)
    find, name = CHANGES[which]
    with torch.no_grad():
        find(*parts).mul_(2)
    with pytest.raises(
        RuntimeError, match=name + r" was changed in place .*Call `\.backward\(\)` first, or change a copy"
    ):
        loss.backward()


@pytest.mark.parametrize("which", [name for name in CHANGES if name != "alpha"])  # whose value no derivative needs
def test_a_change_in_place_of_an_unrolled_loop_is_found_by_torch(which: str) -> None:
    parts = changing()
    loss = rolled(*parts, bda.Unroll())
    with torch.no_grad():
        CHANGES[which][0](*parts).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@replayed
def test_a_change_in_place_is_named_with_create_graph(adjoint: Any) -> None:
    parts = changing()
    loss = rolled(*parts, adjoint)
    with torch.no_grad():
        parts[2][1].mul_(2)
    with pytest.raises(RuntimeError, match="the batch of step k=2"):
        torch.autograd.grad(loss, parts[1], create_graph=True)


def test_forward_mode_has_its_derivatives_already() -> None:
    parts = changing()
    (want,) = torch.autograd.grad(rolled(*parts, bda.Unroll()), parts[0]["w"])
    loss = rolled(*parts, bda.ForwardMode())
    with torch.no_grad():
        parts[0]["w"][0].mul_(2)
        parts[2][1].mul_(2)
    assert torch.autograd.grad(loss, parts[0]["w"])[0].item() == pytest.approx(want.item(), rel=1e-12)


@replayed
def test_a_change_that_is_undone_before_the_rollout_is_none(adjoint: Any) -> None:
    """Only what happens between the two passes counts: an upper step after `backward` is what everybody does."""
    parts = changing()
    for _ in range(2):
        rolled(*parts, adjoint).backward()
        with torch.no_grad():
            parts[0]["w"][0].sub_(0.01)


# The lower point.


def test_lower_point_is_one_proximal_step() -> None:
    params, x = {"y": double(3.0, 0.2, -1.0)}, double(1.0)

    def f(y: Any, x: Tensor, batch: Any) -> Tensor:
        return 0.5 * (y["y"] - x * batch).square().sum()

    got = bda.lower_point(f, params, x, double(2.0), lr=0.5, prox=bda.prox.l1(lambda hyper: 0.8 * hyper))
    # y - lr (y - 2) = (2.5, 1.1, 0.5), and a threshold of 0.4
    assert got["y"].tolist() == pytest.approx([2.1, 0.7, 0.1]) and not got["y"].requires_grad
    plain = bda.lower_point(f, params, x, double(2.0), lr=double(0.5))
    assert plain["y"].tolist() == pytest.approx([2.5, 1.1, 0.5])
    assert params["y"].tolist() == [3.0, 0.2, -1.0]


def test_lower_point_is_sparse_where_y_is_not() -> None:
    """With alpha > 0 the iterate has a part of the upper direction in it."""

    def f(y: Tensor, x: Any, batch: Any) -> Tensor:
        return 0.5 * (y - double(2.0, 0.05)).square().sum()

    prox = bda.prox.l1(0.3)
    y = bda.rollout(f, lambda y, x, b: (y - 1).square().sum(), START, steps=30, lr=0.5, alpha=0.1, prox=prox)
    assert y[1].abs() > 1e-3
    assert bda.lower_point(f, y, lr=0.5, prox=prox)[1] == 0


@pytest.mark.parametrize("adjoint", [bda.Unroll(), bda.Checkpointed()], ids=str)
@pytest.mark.parametrize("rule", [torch.optim.Adam, torch.optim.Adafactor])
def test_chunks_of_tasks_give_the_same(adjoint: Any, rule: Any) -> None:
    found = []
    for chunk_size in (None, 2, 5):
        features = torch.linspace(-1, 1, 30, dtype=torch.float64).reshape(5, 3, 2).requires_grad_()
        x = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
        y = bda.rollout(
            lambda y, x, b: ((b @ y - x) ** 2).mean(), lambda y, x, b: (y**2).sum(),
            torch.ones(2, dtype=torch.float64), x, steps=3, lr=0.1, alpha=0.2, rule=rule, tasks=5,
            batches=[features] * 3, adjoint=adjoint, chunk_size=chunk_size,
        )  # fmt: skip
        found.append([y, *torch.autograd.grad((y**2).sum(), (x, features))])
    for other in found[1:]:
        for a, b in zip(other, found[0], strict=True):
            assert a.shape == b.shape and (a - b).abs().max() < 1e-12


def test_chunks_of_tasks_of_a_module() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1)).double()
    inner = bda.BDAInnerOptimizer(model[2].parameters(), lr=0.1, alpha=0.3)
    batch = torch.randn(5, 4, 2, dtype=torch.float64)
    loss = lambda net, hyper, batch: (net(batch) - 1).square().mean()  # noqa: E731
    found = []
    for chunk_size in (None, 2):
        fmodel = inner.unroll(model, loss, loss, steps=3, batches=[batch] * 3, tasks=5, chunk_size=chunk_size)
        model.zero_grad()
        fmodel.losses(loss, None, batch).sum().backward()
        assert fmodel.trace is not None and fmodel.trace.upper is not None
        found.append([model[0].weight.grad, fmodel.trace.lower, fmodel.trace.upper, *fmodel.buffer_dict.values()])
    for a, b in zip(*found, strict=True):
        assert a.shape == b.shape and torch.allclose(a.double(), b.double(), rtol=0, atol=1e-12)


def test_chunks_need_tasks() -> None:
    with pytest.raises(ValueError, match="`chunk_size` divides tasks"):
        bda.rollout(lambda y, x, b: y.sum(), None, torch.ones(2), steps=2, lr=0.1, chunk_size=2)
    with pytest.raises(ValueError, match="`chunk_size` must be a whole number"):
        bda.rollout(lambda y, x, b: y.sum(), None, torch.ones(2), steps=2, lr=0.1, tasks=2, chunk_size=0)


def test_shelf_stores_copies_in_blocks() -> None:
    """What is stored does not change with the original or with other places, and keeps its layout."""
    state = (torch.arange(6.0).view(2, 3), torch.ones(1, 2, 3, 4).to(memory_format=torch.channels_last), 7)
    shelf = Shelf(state, 2, offload=False)
    first = shelf.put(state)
    state[0].zero_()
    second = shelf.put((torch.full((2, 3), 5.0), state[1], 8))
    assert torch.equal(first.state[0], torch.arange(6.0).view(2, 3)) and first.state[2] == 7
    assert first.state[1].stride() == state[1].stride() and first.state[0]._version == 1
    assert first.state[0].untyped_storage().data_ptr() == second.state[0].untyped_storage().data_ptr()
    third = shelf.put(state)  # no place is left
    assert third.place is None and third.state[0] is state[0]
    shelf.drop(first)
    fourth = shelf.put((torch.full((2, 3), 9.0), state[1], 9))
    assert fourth.place == first.place and float(first.state[0][0, 0]) == 9.0
    assert torch.equal(second.state[0], torch.full((2, 3), 5.0)) and second.state[0]._version == 1


def test_shelf_gives_blocks_back() -> None:
    """The memory of dropped states is free when all of a block are, and tensors start where an allocator's would."""
    states = [(torch.full((3, 5), float(i)), torch.full((7,), i), torch.full((), i + 0.5)) for i in range(10)]
    shelf = Shelf(states[0], 10, offload=False)
    kept = [shelf.put(state) for state in states]
    for state, one in zip(states, kept, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one.state, state, strict=True))
        assert all(t.data_ptr() % 64 == 0 for t in one.state)
    places = {t.untyped_storage().data_ptr() for one in kept for t in one.state}
    assert len(places) == 6  # three blocks for float32, three for int64
    while kept:
        shelf.drop(kept.pop())
    assert not shelf._blocks
    again = [shelf.put(state) for state in states]
    assert [float(one.state[0][0, 0]) for one in again] == [float(i) for i in range(10)]


def test_shelf_keeps_what_does_not_fit() -> None:
    """Another shape than the first, an expanded tensor: stored as they are."""
    shelf = Shelf((torch.zeros(2),), 3, offload=False)
    shelf.put((torch.zeros(2),))
    other, wide = torch.ones(3), torch.ones(()).expand(4)
    assert shelf.put((other,)).state[0] is other
    assert Shelf((wide,), 1, offload=False).put((wide,)).state[0] is wide


def test_ledger_returns_records_as_they_came() -> None:
    ledger = Ledger(4)
    told = [
        Record(torch.tensor(1.0), None),
        Record(torch.tensor(2.0), torch.tensor(3.0)),
        Record(torch.tensor([4.0, 5.0]), torch.tensor(6.0, dtype=torch.float64)),  # another shape, another type
        None,
    ]
    for record in told:
        ledger.append(record)
    got = ledger.records()
    assert got[0] == (1.0, None) and got[1] == (2.0, 3.0) and got[3] is None
    assert torch.equal(got[2].lower, torch.tensor([4.0, 5.0])) and got[2].upper.dtype == torch.float64
    assert isinstance(got[0], Record) and got[0].lower.untyped_storage().nbytes() == 4 * 4


@pytest.mark.parametrize("options", [{"every": 2}, {"slots": 2}, {}], ids=str)
def test_offloaded_states(options: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    moved, put = [], Shelf.put
    monkeypatch.setattr(Shelf, "put", lambda shelf, state: moved.append(state) or put(shelf, state))
    args = (lambda y, x, b: ((y - x) ** 4).sum(), lambda y, x, b: y.sum(), torch.zeros(2), torch.ones(()))
    got = bda.hypergradient(*args, steps=7, lr=0.1, adjoint=bda.Checkpointed(offload="cpu", **options))
    assert moved and torch.equal(
        got.grad, bda.hypergradient(*args, steps=7, lr=0.1, adjoint=bda.Checkpointed(**options)).grad
    )
    with pytest.raises(ValueError, match="`offload` must be None or"):
        bda.Checkpointed(offload="disk")
