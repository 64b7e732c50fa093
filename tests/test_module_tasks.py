"""Many tasks at once on modules (`tasks=B`), against a loop over the tasks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from problems import TIGHT, mlp, numbers
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from zoo import TRAIN, Backboned, K, Methods, Noted, Tied, WithFunction, conv, last_state, linear_with, untouched

import bda_optim as bda
from bda_optim._step import tasks

pytestmark = pytest.mark.usefixtures("doubles")

B = 3


class TaskCase(NamedTuple):
    make: Callable[[], nn.Module]
    shape: tuple[int, ...] = (4, 3)  # of one task's inputs
    owned: Callable[[nn.Module], Any] = lambda module: module.parameters()
    settings: dict[str, Any] = {}  # noqa: RUF012
    call: Callable[..., Tensor] = lambda net, x: net(x)
    loops: bool = False  # vmap cannot batch it


def rates(module: nn.Module) -> list[Tensor]:
    return [torch.full_like(p, 0.1).requires_grad_() for p in module.parameters()]


class Peeking(nn.Module):
    """Reads a number from a tensor, which vmap cannot do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        out = self.linear(x)
        return out if out.sum().item() > 0 else 2 * out


class Scaled(nn.Embedding):
    """An embedding with a forward pass of its own, as some language models have."""

    def forward(self, words: Tensor) -> Tensor:
        return 2 * super().forward(words)


class Functional(nn.Embedding):
    """An embedding that is no layer of torch's: its forward pass calls the function."""

    def __init__(self) -> None:
        super().__init__(4, 2)

    def forward(self, words: Tensor) -> Tensor:
        return nn.functional.embedding(words, self.weight, padding_idx=1)


def words(net: Any, x: Tensor) -> Tensor:
    """Look up words, padding among them, that depend on the inputs."""
    return net((2 * x.detach()).round().abs().clamp(max=3).long()).tanh() + x.mean()


def transformer() -> nn.Module:
    return nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)


TASKS: dict[str, TaskCase] = {
    "head": TaskCase(Backboned, owned=lambda module: module.head.parameters()),
    "mlp": TaskCase(mlp),
    "mlp with momentum": TaskCase(mlp, settings={"momentum": 0.9, "weight_decay": 0.1, "nesterov": True}),
    "mlp with Adam": TaskCase(mlp, settings={"rule": torch.optim.Adam}),
    "mlp with Adafactor": TaskCase(mlp, settings={"rule": torch.optim.Adafactor}),
    "mlp with FISTA": TaskCase(mlp, settings={"rule": bda.FISTA}),
    "mlp with l1": TaskCase(mlp, settings={"prox": bda.prox.l1(0.05)}),
    "mlp with group lasso": TaskCase(mlp, settings={"prox": bda.prox.group_lasso(0.05)}),
    "conv and batch norm": TaskCase(conv, shape=(5, 1, 3, 3)),
    "conv and batch norm in eval": TaskCase(lambda: conv().eval(), shape=(5, 1, 3, 3)),
    "tied": TaskCase(Tied),
    "transformer": TaskCase(transformer, shape=(2, 5, 4)),
    "weight norm": TaskCase(linear_with(parametrizations.weight_norm)),
    "embedding": TaskCase(lambda: nn.Embedding(4, 2), call=words),
    "padded embedding": TaskCase(lambda: nn.Embedding(4, 2, padding_idx=0), call=words),
    "padded and scaled embedding": TaskCase(lambda: Scaled(4, 2, padding_idx=1), call=words, loops=True),
    "padded embedding by a function": TaskCase(Functional, call=words, loops=True),
    "lstm": TaskCase(lambda: nn.LSTM(4, 3), shape=(3, 5, 4), call=last_state, loops=True),
    "old autograd function": TaskCase(WithFunction, loops=True),
    "a number read": TaskCase(Peeking, loops=True),
}


@pytest.mark.parametrize("adjoint", [bda.Unroll(), bda.Checkpointed()], ids=lambda a: type(a).__name__)
@pytest.mark.parametrize("case", TASKS.values(), ids=TASKS.keys())
def test_many_tasks_equal_a_loop_over_them(case: TaskCase, adjoint: Any) -> None:
    torch.manual_seed(3)
    module = case.make()
    settings = dict(lr=0.1, upper_lr=0.05, alpha=bda.harmonic(0.3)) | case.settings
    inner = bda.BDAInnerOptimizer(case.owned(module), **settings)
    inputs = [numbers(B, *case.shape, seed=k).requires_grad_() for k in range(K)]
    batches = [(x, 0.5, {"target": numbers(B, seed=9)}) for x in inputs]
    hyper = torch.tensor([1.0, 0.1], requires_grad=True)

    def lower(net: Any, hyper: Tensor, batch: Any) -> Tensor:
        x, shift, more = batch
        assert x.dim() == len(case.shape)  # no task dimension is seen
        residual = case.call(net, x) - shift - more["target"]
        return hyper[0] * residual.square().mean() + hyper[1] * sum(p.square().sum() for p in net.parameters())

    def upper(net: Any, hyper: Tensor, batch: Any) -> Tensor:
        return case.call(net, batch[0]).sin().mean()

    names = [name for name, p in module.named_parameters() if p.requires_grad]
    wanted = [hyper, *inputs, *(module.get_parameter(name) for name in names)]

    def gradients(value: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(value, wanted, allow_unused=True, materialize_grads=True)

    options = dict(hyper=hyper, steps=K, adjoint=adjoint, copy_initial_weights=False)
    expect = (
        pytest.warns(UserWarning, match="3 tasks run one after another") if case.loops else contextlib.nullcontext()
    )
    with untouched(module):
        with expect as warned:
            fmodel = inner.unroll(module, lower, upper, batches=batches, tasks=B, **options)
            values = fmodel.losses(upper, hyper, batches[0])
        assert warned is None or len(warned) == 1
        params = {name: p.detach() for name, p in fmodel.params.items()}
        buffers = {name: b.detach() for name, b in fmodel.buffer_dict.items()}
        found = gradients(values.sum())
        total = [torch.zeros_like(t) for t in wanted]
        for task in range(B):
            own = [(x[task], shift, {"target": more["target"][task]}) for x, shift, more in batches]
            alone = inner.unroll(module, lower, upper, batches=own, **options)
            torch.testing.assert_close(fmodel.trace.lower[:, task], alone.trace.lower, **TIGHT)
            torch.testing.assert_close({n: p[task] for n, p in params.items()}, dict(alone.params), **TIGHT)
            value = upper(alone, hyper, own[0])
            torch.testing.assert_close({n: b[task] for n, b in buffers.items()}, alone.buffer_dict, **TIGHT)
            torch.testing.assert_close(values[task], value, **TIGHT)
            total = [t + g for t, g in zip(total, gradients(value), strict=True)]
    torch.testing.assert_close(list(found), total, **TIGHT)
    assert all(t.abs().sum() > 0 for t in (total[0], total[1]))


def test_rates_of_every_element_are_learned_from_many_tasks() -> None:
    module = mlp()
    lr = rates(module)
    inner = bda.BDAInnerOptimizer(module.parameters(), lr=lr)
    x = numbers(B, 4, 3)

    def loss(net: Any, hyper: Any, batch: Tensor) -> Tensor:
        return (net(batch) - 1).square().mean()

    fmodel = inner.unroll(module, loss, steps=K, batches=[x] * K, tasks=B)
    found = torch.autograd.grad(fmodel.losses(loss, None, x).sum(), lr)
    alone = [inner.unroll(module, loss, steps=K, batches=[x[i]] * K) for i in range(B)]
    expected = torch.autograd.grad(sum(loss(net, None, x[i]) for i, net in enumerate(alone)), lr)
    torch.testing.assert_close(found, expected, **TIGHT)


def task_loss(net: Any, hyper: Any, batch: Tensor) -> Tensor:
    return (net(batch) - 1).square().mean()


def test_dropout_draws_a_mask_for_each_task() -> None:
    module = nn.Sequential(nn.Linear(3, 16), nn.Dropout(0.5), nn.Linear(16, 1))
    inner = bda.BDAInnerOptimizer(module.parameters(), lr=0.1)
    same = numbers(4, 3).expand(B, 4, 3)
    hyper = torch.tensor(1.0, requires_grad=True)

    def lower(net: Any, hyper: Tensor, batch: Tensor) -> Tensor:
        return hyper * task_loss(net, None, batch)

    results = []
    for adjoint in (bda.Unroll(), bda.Checkpointed(every=2)):
        torch.manual_seed(1)
        fmodel = inner.unroll(module, lower, hyper=hyper, steps=K, batches=[same] * K, tasks=B, adjoint=adjoint)
        weights = fmodel.params["2.weight"]
        assert not torch.equal(weights[0], weights[1])
        fmodel.eval()
        results.append(torch.autograd.grad(fmodel.losses(task_loss, None, same).sum(), hyper)[0])
    torch.testing.assert_close(results[0], results[1], **TIGHT)  # the replay draws the same masks
    module.eval()
    weights = inner.unroll(module, task_loss, steps=K, batches=[same] * K, tasks=B).params["2.weight"]
    torch.testing.assert_close(weights[0], weights[1], **TIGHT)


def test_dropout_before_what_vmap_cannot_batch_is_replayed_with_the_same_masks() -> None:
    module = nn.Sequential(nn.Dropout(0.5), WithFunction())
    inner = bda.BDAInnerOptimizer(module.parameters(), lr=0.1)
    x, hyper = numbers(B, 4, 3), torch.tensor(1.0, requires_grad=True)

    def lower(net: Any, hyper: Tensor, batch: Tensor) -> Tensor:
        return hyper * task_loss(net, None, batch)

    results = []
    for adjoint in (bda.Unroll(), bda.Checkpointed(every=2)):
        torch.manual_seed(1)
        with pytest.warns(UserWarning, match="one after another"):
            fmodel = inner.unroll(module, lower, hyper=hyper, steps=K, batches=[x] * K, tasks=B, adjoint=adjoint)
        fmodel.eval()
        results.append(torch.autograd.grad(fmodel.losses(task_loss, None, x).sum(), hyper)[0])
    torch.testing.assert_close(results[0], results[1], **TIGHT)


def large_conv() -> nn.Module:
    """A network whose activations are many enough for closed second derivatives, with dropout."""
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(16, track_running_stats=False)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, bias=False), norm, nn.Dropout(0.3), nn.Flatten(), nn.Linear(16 * 26 * 26, 2)
    )


def images(net: nn.Module, hyper: None, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.mse_loss(net(batch[0]), batch[1])


@pytest.mark.parametrize("dropout", [True, False])
def test_tasks_run_one_by_one_where_vmap_keeps_layers_from_closed_derivatives(
    dropout: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = large_conv().train(dropout)
    module[1].train()
    inner = bda.BDAInnerOptimizer(module.parameters(), lr=0.01)
    batch = torch.randn(B, 12, 1, 28, 28), torch.randn(B, 12, 2)
    calls: list[int] = []
    one_by_one = tasks.one_by_one
    monkeypatch.setattr(tasks, "one_by_one", lambda *args: calls.append(1) or one_by_one(*args))

    def gradient(adjoint: Any) -> list[Tensor]:
        torch.manual_seed(1)
        options = {"adjoint": adjoint, "copy_initial_weights": False}
        fmodel = inner.unroll(module, images, steps=2, batches=[batch] * 2, tasks=B, **options)
        return list(torch.autograd.grad(fmodel.losses(images, None, batch).sum(), list(module.parameters())))

    found = gradient(bda.Unroll())
    assert calls
    torch.testing.assert_close(gradient(bda.Checkpointed(every=1)), found, **TIGHT)  # remembered, with the same masks
    calls.clear()
    with bda.closed_derivatives(False):
        batched = gradient(bda.Unroll())
    assert not calls  # nothing is forgone
    if not dropout:
        assert all((a - b).norm() <= 1e-10 * b.norm() for a, b in zip(batched, found, strict=True))


def test_fmodel_of_many_tasks_maps_calls_and_methods() -> None:
    module = Methods()
    inner = bda.BDAInnerOptimizer(module.parameters(), lr=0.1)
    x = numbers(B, 4, 3)

    def loss(net: Any, hyper: Any, batch: Tensor) -> Tensor:
        return net.head(net.encode(batch, scale=0.5)).square().mean()

    fmodel = inner.unroll(module, loss, steps=K, batches=[x] * K, tasks=B)
    assert {name: tuple(p.shape) for name, p in fmodel.params.items()} == {
        "body.weight": (B, 3, 3),
        "body.bias": (B, 3),
        "head.weight": (B, 2, 3),
        "head.bias": (B, 2),
    }
    assert fmodel.body.weight is fmodel.params["body.weight"]
    encoded = fmodel.encode(x, scale=0.5)
    assert fmodel.body.weight is fmodel.params["body.weight"]  # the mapping leaves nothing behind
    assert dict(fmodel.named_parameters()).keys() == fmodel.params.keys()
    for i in range(B):
        weight, bias = fmodel.body.weight[i], fmodel.body.bias[i]
        torch.testing.assert_close(encoded[i], torch.tanh(0.5 * F.linear(x[i], weight, bias)), **TIGHT)
    with pytest.raises(ValueError, match=r"tasks=3 has a leading dimension .*got shape \(4, 3\)"):
        fmodel.encode(x[0], scale=0.5)
    assert fmodel.losses(loss, None, x).shape == (B,)
    assert fmodel.trace.lower.shape == (K, B)


def test_fmodel_of_many_tasks_is_called_with_stacked_inputs_and_keeps_their_buffers() -> None:
    module = Noted()
    inner = bda.BDAInnerOptimizer(module.parameters(), lr=0.1)
    x = numbers(B, 8, 3)
    fmodel = inner.unroll(module, task_loss, steps=K, batches=[x] * K, tasks=B)
    assert fmodel.buffer_dict["norm.num_batches_tracked"].tolist() == [K] * B
    out = fmodel(x)
    assert out.shape == (B, 8, 1)
    assert fmodel.buffer_dict["norm.num_batches_tracked"].tolist() == [K + 1] * B
    assert fmodel.norm.running_mean.shape == (B, 3)
    with pytest.raises(ValueError, match=r"Stack the tasks' inputs"):
        fmodel(x[:2])
    with pytest.raises(ValueError, match=r"got shape \(\)"):
        fmodel(torch.tensor(1.0))
    point = fmodel.lower_point(task_loss, None, x)
    assert point["head.weight"].shape == (B, 1, 3)
    torch.testing.assert_close(
        point["head.bias"][1] - fmodel.params["head.bias"][1],
        -0.2 * (fmodel(x)[1] - 1).mean().reshape(1),
        **TIGHT,
    )
    assert module.norm.num_batches_tracked.item() == 0


def test_a_call_that_vmap_cannot_batch_runs_task_by_task() -> None:
    module = nn.LSTM(4, 3)
    inner = bda.BDAInnerOptimizer(module.parameters(), lr=0.1)
    x = numbers(B, 3, 5, 4)

    def loss(net: Any, hyper: Any, batch: Tensor) -> Tensor:
        return net(batch)[0].square().mean()

    with pytest.warns(UserWarning, match="one after another") as warned:
        fmodel = inner.unroll(module, loss, steps=K, batches=[x] * K, tasks=B, copy_initial_weights=False)
        out, (hidden, _) = fmodel(x)
        fmodel.losses(loss, None, x)
    assert len(warned) == 1
    assert out.shape == (B, 3, 5, 3)
    assert hidden.shape == (B, 1, 5, 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tasks": 0, "batches": [TRAIN]}, r"`tasks` must be a whole number of at least 1; got 0"),
        ({"tasks": 2.0, "batches": [TRAIN]}, r"`tasks` must be a whole number of at least 1; got 2.0"),
        ({"tasks": 5, "batches": [TRAIN]}, r"tasks=5 every tensor of a batch .*batches\[0\] .*\(8, 3\)"),
    ],
)
def test_wrong_tasks_are_refused(options: dict[str, Any], message: str) -> None:
    module = mlp()
    with pytest.raises(ValueError, match=message):
        bda.BDAInnerOptimizer(module.parameters(), lr=0.1).unroll(module, task_loss, steps=1, **options)
