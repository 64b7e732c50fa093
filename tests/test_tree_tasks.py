"""Many tasks at once on trees of tensors (`tasks=B`), against a loop over the tasks; and chunks of tasks."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Any, NamedTuple

import pytest
import torch
from problems import difference_quotients, double, exact, leaf, relative_error
from torch import Tensor, optim

import bda_optim as bda

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

    with pytest.warns(UserWarning, match="cannot batch the loss over tasks .*the 3 tasks run one after another"):
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


def test_a_loss_of_tasks_must_be_a_scalar_each() -> None:
    start, x, batches, _ = task_problem()
    with pytest.raises(ValueError, match=r"the lower loss must be a scalar; got shape \(4, 2\) at step k=1"):
        bda.rollout(
            lambda y, x, b: b[0] @ y["w"], None, start, x, steps=4, lr=0.3, batches=batches, tasks=TASKS
        )  # fmt: skip


@pytest.mark.parametrize("adjoint", [bda.Unroll(), bda.Checkpointed()], ids=str)
@pytest.mark.parametrize("rule", [torch.optim.Adam, torch.optim.Adafactor])
def test_chunks_of_tasks_give_the_same_result(adjoint: Any, rule: Any) -> None:
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
