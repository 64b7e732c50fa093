"""Closed derivatives in `compat.higher`: hypergradients are those of `higher`, and updates those of torch.optim."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from closed_layers import distance, is_closed
from problems import numbers
from torch import Tensor, nn

import bda_optim as bda
from bda_optim.compat import higher as ours

X, LABELS = numbers(6, 1, 6, 6), torch.tensor([0, 1, 2, 0, 1, 2])


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 3, 3, stride=2),
        nn.BatchNorm2d(3, track_running_stats=False),
        nn.Flatten(),
        nn.Linear(12, 3),
    ).double()


def hypergradient(library: Any, module: nn.Module) -> tuple[tuple[Tensor, ...], nn.Module]:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    with library.innerloop_ctx(module, optimizer, copy_initial_weights=False) as (fmodel, diffopt):
        for _ in range(3):
            diffopt.step(F.cross_entropy(fmodel(X), LABELS))
        return torch.autograd.grad(F.cross_entropy(fmodel(X.flip(0)), LABELS), list(module.parameters())), fmodel


def test_hypergradients_are_those_of_higher() -> None:
    higher = pytest.importorskip("higher")
    want, _ = hypergradient(higher, net())
    for enabled in (True, False):
        with bda.closed_derivatives(enabled):
            got, fmodel = hypergradient(ours, net())
        assert is_closed(fmodel[1](fmodel[0](X))) is enabled
        assert distance(got, want) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_updates_are_those_of_sgd_to_the_bit(dtype: torch.dtype) -> None:
    module, x = net().to(dtype), X.to(dtype)
    plain = copy.deepcopy(module)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    with bda.closed_derivatives(True):
        fmodel = ours.monkeypatch(module)
    diffopt = ours.get_diff_optim(torch.optim.SGD(module.parameters(), lr=0.1), module.parameters(), fmodel)
    for _ in range(4):
        assert is_closed(fmodel[1](fmodel[0](x.detach())))
        plain[1](plain[0](x))  # moves the running statistics as well
        diffopt.step(F.cross_entropy(fmodel(x), LABELS))
        optimizer.zero_grad()
        F.cross_entropy(plain(x), LABELS).backward()
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(fmodel.parameters(), plain.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(fmodel.buffers(), plain.buffers(), strict=True))


def test_patched_layers_are_instances_of_torchs_classes_and_copies_are_plain() -> None:
    with bda.closed_derivatives(True):
        fmodel = ours.monkeypatch(net())
    assert isinstance(fmodel[1], nn.BatchNorm2d) and "InnerFunctionalBatchNorm2d(4," in repr(fmodel)
    again = copy.deepcopy(fmodel[1])
    assert type(again) is nn.BatchNorm2d and type(copy.deepcopy(fmodel)[1]) is type(fmodel[1])
    assert torch.equal(again(X.expand(6, 4, 6, 6)), fmodel[1](X.expand(6, 4, 6, 6)))
    assert torch.equal(fmodel[1].forward(X.expand(6, 4, 6, 6)), fmodel[1](X.expand(6, 4, 6, 6)))


def test_parameters_for_one_call() -> None:
    module = net()
    with bda.closed_derivatives(True):
        fmodel = ours.make_functional(module)
    params = [p.detach() * 1.1 for p in module.parameters()]
    with torch.no_grad():
        for p, new in zip(module.parameters(), params, strict=True):
            p.copy_(new)
    assert torch.equal(fmodel(X, params=params), module(X))
