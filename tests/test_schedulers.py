"""The learning rate schedulers of torch on BDAInnerOptimizer."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from optimizers import EXACT, lower, upper
from problems import mlp
from torch import Tensor, optim
from torch.optim import lr_scheduler, swa_utils

import bda_optim as bda

pytestmark = pytest.mark.usefixtures("doubles")


LR = 0.2
Make = Callable[[optim.Optimizer], Any]
SCHEDULERS: dict[str, Make] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda epoch: 0.8 + 0.01 * epoch),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 3, 0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 5], 0.5),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, 4),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.3, 1.0, 5),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.9)], milestones=[3]
    ),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 6),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.3, step_size_up=3, mode="triangular2"),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3, 2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=[0.3, 0.1], total_steps=12),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 8, 2.0),
    "SWALR": lambda o: swa_utils.SWALR(o, swa_lr=0.05, anneal_epochs=4),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=1),
}


def test_the_table_has_every_scheduler_of_torch() -> None:
    assert set(lr_scheduler.__all__) - {"LRScheduler"} <= SCHEDULERS.keys()


@pytest.mark.parametrize("tensor_lr", [False, True], ids=["number", "tensor"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_act_as_on_sgd(name: str, tensor_lr: bool) -> None:
    model = mlp()
    other = copy.deepcopy(model)
    runs = []
    for net, kind in ((model, bda.BDAInnerOptimizer), (other, optim.SGD)):
        rates = [torch.tensor(rate) if tensor_lr else rate for rate in (LR, LR / 2)]
        groups = [{"params": net[0].parameters()}, {"params": net[2].parameters(), "lr": rates[1]}]
        optimizer = kind(groups, lr=rates[0], momentum=0.9)
        runs.append((net, optimizer, SCHEDULERS[name](optimizer)))
    rates = set()
    for _ in range(10):
        for net, optimizer, scheduler in runs:
            optimizer.zero_grad()
            lower(net).backward()
            optimizer.step()
            scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
        for mine, theirs in zip(runs[0][1].param_groups, runs[1][1].param_groups, strict=True):
            assert float(mine["lr"]) == float(theirs["lr"])
            assert mine["momentum"] == theirs["momentum"]
        rates.add(float(runs[0][1].param_groups[0]["lr"]))
        for a, b in zip(model.parameters(), other.parameters(), strict=True):
            if tensor_lr:
                torch.testing.assert_close(a.detach(), b.detach(), **EXACT)
            else:
                assert torch.equal(a, b)
    assert len(rates) > 1


@pytest.mark.parametrize("lr", [0.2, torch.tensor(0.2, dtype=torch.float64)], ids=["number", "tensor"])
def test_upper_lr_none_follows_lr_at_each_step(lr: Any) -> None:
    results = []
    for follows in (True, False):
        torch.manual_seed(0)
        model = mlp()
        rate = lr.clone() if isinstance(lr, Tensor) else lr
        inner = bda.BDAInnerOptimizer(model.parameters(), lr=rate, alpha=0.3)
        scheduler = lr_scheduler.ExponentialLR(inner, 0.5)
        for _ in range(4):
            if not follows:
                inner.param_groups[0]["upper_lr"] = float(inner.param_groups[0]["lr"])
            inner.step(lambda model=model: (lower(model), upper(model)))
            scheduler.step()
            assert (inner.param_groups[0]["upper_lr"] is None) == follows
        if not follows:
            inner.param_groups[0]["upper_lr"] = float(inner.param_groups[0]["lr"])
        fmodel = inner.unroll(model, lower, upper, steps=2)
        results.append([*model.parameters(), *fmodel.params.values()])
    torch.testing.assert_close(results[0], results[1], **EXACT)


@pytest.mark.parametrize("name", [name for name in SCHEDULERS if name != "ReduceLROnPlateau"])
def test_a_scheduler_on_a_learned_rate_raises(name: str) -> None:
    model = mlp()
    leaf = torch.tensor(0.1, requires_grad=True)
    inner = bda.BDAInnerOptimizer(model.parameters(), lr=leaf, momentum=0.5)
    one_group: dict[str, Make] = {"OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.3, 12)}
    make_scheduler = one_group.get(name, SCHEDULERS[name])
    with pytest.raises((RuntimeError, ValueError), match="requires grad"):
        make_scheduler(inner)
        inner.unroll(model, lower, steps=1)


def test_a_scheduler_on_a_rate_with_a_graph_raises_when_the_rate_is_used() -> None:
    """torch overwrites such a rate without complaint, and its gradient would be lost."""
    model = mlp()
    raw = torch.tensor(1.0, requires_grad=True)
    inner = bda.BDAInnerOptimizer(model.parameters(), lr=0.1 * raw)
    lr_scheduler.StepLR(inner, 1, 0.5)
    lower(model).backward()
    for use in (
        inner.step,
        lambda: inner.unroll(model, lower, steps=1),
        lambda: bda.innerloop_ctx(model, inner).__enter__(),
    ):
        with pytest.raises(ValueError, match="a torch scheduler overwrites `lr`, which cannot be learned"):
            use()
