"""torch.utils.checkpoint and hooks on saved tensors, in and around an inner loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from problems import TIGHT, numbers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from zoo import ZOO, Case, K, Problem, untouched

import bda_optim as bda

pytestmark = pytest.mark.usefixtures("doubles")


class Recomputing(nn.Module):
    """Checkpoints its body, as a memory-saving backbone does."""

    def __init__(self, reentrant: bool = False) -> None:
        super().__init__()
        self.body, self.head, self.reentrant = nn.Sequential(nn.Linear(3, 3), nn.Tanh()), nn.Linear(3, 2), reentrant
        self.inner = nn.ModuleDict({"deep": nn.Identity()})

    def features(self, x: Tensor) -> Tensor:
        return checkpoint(self.body, x, use_reentrant=self.reentrant)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


REFUSED_CALLS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "inside the module": lambda net, x: net(x),
    "inside a method": lambda net, x: net.head(net.features(x)),
    "around the module": lambda net, x: checkpoint(net, x, use_reentrant=False),
    "around a sub-module": lambda net, x: net.head(checkpoint(net.body, x, use_reentrant=False)),
    "around a part": lambda net, x: net.head(checkpoint(net.body[:1], x, use_reentrant=False)),
    "around a loop": lambda net, x: net.head(checkpoint(lambda x: net.body[0](x), x, use_reentrant=False)),
}


@pytest.mark.parametrize("call", REFUSED_CALLS.values(), ids=REFUSED_CALLS.keys())
def test_a_checkpoint_that_would_recompute_with_other_parameters_is_refused(call: Callable[..., Tensor]) -> None:
    module = Recomputing()
    inner = bda.BDAInnerOptimizer(module.parameters(), lr=0.1)
    x = numbers(4, 3)

    def lower(net: Any, hyper: Any, batch: Any) -> Tensor:
        return call(net, x).square().mean()

    message = r"torch.utils.checkpoint .*`adjoint=Checkpointed\(\)`"
    with untouched(module):
        with pytest.raises(RuntimeError, match=message):
            inner.unroll(module, lower, steps=2)
        with bda.innerloop_ctx(module, inner) as (fmodel, _), pytest.raises(RuntimeError, match=message):
            lower(fmodel, None, None)


def test_a_reentrant_checkpoint_inside_the_module_raises() -> None:
    """`torch.autograd.grad` silently skips the parameters inside it."""
    module, x = Recomputing(reentrant=True), numbers(4, 3).requires_grad_()
    inner = bda.BDAInnerOptimizer(module.parameters(), lr=0.1)

    def lower(net: Any, hyper: Any, batch: Any) -> Tensor:
        return net(x).square().mean()

    for adjoint in (bda.Unroll(), bda.Checkpointed(), bda.FirstOrder()):
        with pytest.raises(RuntimeError, match=r"the module uses torch\.utils\.checkpoint"):
            inner.unroll(module, lower, steps=2, adjoint=adjoint)
    with bda.innerloop_ctx(module, inner) as (fmodel, diffopt):
        with pytest.raises(RuntimeError, match=r"the module uses torch\.utils\.checkpoint"):
            diffopt.step(lower(fmodel, None, None))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_outside_the_inner_loop_is_fine(reentrant: bool) -> None:
    backbone, problem = Recomputing(reentrant), Problem(Case(lambda: nn.Linear(2, 2), lambda: (None,)))
    x = numbers(4, 3).requires_grad_()

    def run(features: Tensor) -> Tensor:
        problem.case = Case(problem.case.make, call=lambda net, _: net(features))
        with bda.innerloop_ctx(problem.module, problem.optimizer()) as (fmodel, diffopt):
            for _ in range(K):
                diffopt.step(problem.lower(fmodel, problem.hyper, None), problem.upper(fmodel, problem.hyper, None))
            value = problem.upper(fmodel, problem.hyper, None)
            value.backward()
        return value

    values, grads = [], []
    for features in (lambda: backbone(x), lambda: backbone.head(backbone.body(x))):
        problem.hyper.grad, _ = None, backbone.zero_grad()
        values.append(run(features()).item())
        grads.append([problem.hyper.grad, *(p.grad for p in backbone.parameters())])
    assert values[0] == values[1]
    torch.testing.assert_close(grads[0], grads[1], **TIGHT)


def test_a_checkpoint_around_the_whole_loop_is_right() -> None:
    problem = Problem(ZOO["mlp"])

    def whole(hyper: Tensor) -> Tensor:
        with bda.innerloop_ctx(problem.module, problem.optimizer()) as (fmodel, diffopt):
            for _ in range(K):
                diffopt.step(problem.lower(fmodel, hyper, None), problem.upper(fmodel, hyper, None))
        return problem.upper(fmodel, hyper, None)

    plain, around = (
        torch.autograd.grad(whole(problem.hyper), problem.hyper)[0],
        torch.autograd.grad(checkpoint(whole, problem.hyper, use_reentrant=False), problem.hyper)[0],
    )
    torch.testing.assert_close(around, plain, **TIGHT)


def test_saving_tensors_elsewhere_is_allowed() -> None:
    problem = Problem(ZOO["mlp"])
    expected = problem.gradient(problem.unroll())
    with torch.autograd.graph.save_on_cpu():
        found = problem.gradient(problem.unroll())
    torch.testing.assert_close(found, expected, **TIGHT)
