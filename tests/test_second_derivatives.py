"""Modules whose second derivative is missing or wrong in torch: refused, or built from operations that have one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from problems import EXACT, TIGHT, numbers
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.utils import parametrizations
from zoo import Attention, Case, K, OldCube, Problem, linear_with, sequences, untouched

import bda_optim as bda

pytestmark = [
    pytest.mark.usefixtures("doubles"),
    pytest.mark.filterwarnings("ignore:dropout option adds dropout:UserWarning"),
]


class Distances(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.centres = nn.Parameter(numbers(2, 3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cdist(x, self.centres)


class Connectionist(nn.Module):
    """A sequence model under the CTC loss."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.linear(x).log_softmax(-1)
        targets, lengths = torch.tensor([[1, 2], [3, 1]]), (torch.tensor([5, 5]), torch.tensor([2, 2]))
        return F.ctc_loss(scores, targets, *lengths)


# torch has a second derivative, which takes the singular vectors as constants, although the forward pass moves them.
MOVING = {
    "spectral norm": Case(linear_with(parametrizations.spectral_norm)),
    "spectral norm by hook": Case(linear_with(nn.utils.spectral_norm)),
    "converged spectral norm": Case(linear_with(lambda m: parametrizations.spectral_norm(m, n_power_iterations=100))),
    "spectral norm under a linear loss": Case(linear_with(nn.utils.spectral_norm), call=lambda net, x: net[0](x)),
}
ONCE = {
    "EmbeddingBag": Case(lambda: nn.EmbeddingBag(6, 3, mode="sum"), lambda: (torch.tensor([[0, 1], [2, 5]]),)),
    "cdist": Case(Distances),
    "ctc_loss": Case(Connectionist, lambda: (numbers(5, 2, 3),)),
}


def check_refused(problem: Problem, message: str, *adjoints: Any) -> None:
    """With each adjoint, and in `innerloop_ctx`; the module stays as it is."""
    with untouched(problem.module):
        for adjoint in adjoints:
            with pytest.raises(NotImplementedError, match=message):
                problem.unroll(adjoint=adjoint)
        with (
            bda.innerloop_ctx(problem.module, problem.optimizer()) as (fmodel, diffopt),
            pytest.raises(NotImplementedError, match=message),
        ):
            diffopt.step(problem.lower(fmodel, problem.hyper, None), problem.upper(fmodel, problem.hyper, None))


@pytest.mark.parametrize("name", ONCE)
def test_without_a_second_derivative_there_is_a_clear_error_and_first_order_works(name: str) -> None:
    problem = Problem(ONCE[name])
    message = rf"no second derivative of `{name}`.*`adjoint=FirstOrder\(\)`"
    check_refused(problem, message, bda.Unroll(), bda.Checkpointed())
    first = problem.unroll(adjoint=bda.FirstOrder(), copy_initial_weights=False)
    problem.upper(first, problem.hyper, None).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in problem.module.parameters())


@pytest.mark.parametrize("name", MOVING)
def test_a_spectral_norm_in_training_mode_is_refused_and_first_order_works(name: str) -> None:
    problem = Problem(MOVING[name])
    problem.lower = lambda net, hyper, batch: hyper[0] * problem.case.call(net, *problem.args).sum()
    message = r"no second derivative of `spectral_norm in training mode`.*in eval mode"
    check_refused(problem, message, *EXACT)
    before = [b.clone() for b in problem.module.buffers()]
    first = problem.unroll(adjoint=bda.FirstOrder(), copy_initial_weights=False)
    problem.upper(first, problem.hyper, None).backward()
    assert all(p.grad is not None for p in problem.module[0].parameters())
    if name != "converged spectral norm":
        after = first.buffer_dict.values()
        assert all((a - b).abs().max() > 1e-9 for a, b in zip(after, before, strict=True)), "the vectors moved"


class Once(OldCube):
    """Its derivative is computed without a graph: `autograd.grad` would silently treat it as a constant."""

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return OldCube.backward(ctx, grad)


@pytest.mark.parametrize("bend", [lambda out: out, torch.square], ids=["linear", "square"])
def test_a_function_that_is_once_differentiable_is_refused(bend: Any) -> None:
    module, x = nn.Linear(3, 2), numbers(4, 3)
    hyper = torch.ones((), requires_grad=True)
    inner = bda.BDAInnerOptimizer(module.parameters(), lr=0.1)

    def lower(net: Any, hyper: Tensor, batch: Any) -> Tensor:
        return bend(Once.apply(net(x))).sum() + hyper * net.bias.square().sum()

    for adjoint in (bda.Unroll(), bda.Checkpointed(), bda.ForwardMode()):
        with pytest.raises(NotImplementedError, match="a function marked once_differentiable"):
            inner.unroll(module, lower, hyper=hyper, steps=2, adjoint=adjoint)
    with bda.innerloop_ctx(module, inner) as (fmodel, diffopt):
        with pytest.raises(NotImplementedError, match="a function marked once_differentiable"):
            diffopt.step(lower(fmodel, hyper, None))
    inner.unroll(module, lower, hyper=hyper, steps=2, adjoint=bda.FirstOrder())


@pytest.mark.parametrize("adjoint", [bda.Unroll(), bda.Checkpointed(), bda.ForwardMode()], ids=type)
def test_an_embedding_with_sparse_gradients_equals_a_dense_one(adjoint: Any) -> None:
    indices, found = torch.tensor([[0, 1], [2, 5]]), []
    hyper = torch.tensor([1.0, 0.3], requires_grad=True)

    def lower(net: Any, hyper: Tensor, batch: Any) -> Tensor:
        return hyper[0] * (net(indices).tanh() - 0.3).square().mean() + hyper[1] * net(indices).sin().mean()

    def bare(net: Any, hyper: Tensor, batch: Any) -> Tensor:
        return F.embedding(indices, net.weight, sparse=True).square().sum()

    for sparse in (False, True):
        torch.manual_seed(0)
        module = nn.Embedding(6, 3, sparse=sparse)
        inner = bda.BDAInnerOptimizer(module.parameters(), lr=0.3, rule=torch.optim.Adam, alpha=0.3)
        fmodel = inner.unroll(module, lower, lower, hyper=hyper, steps=K, adjoint=adjoint)
        found.append(torch.autograd.grad(lower(fmodel, hyper, None), hyper)[0])
        assert module.sparse is sparse
    assert torch.equal(*found)
    with pytest.raises(
        NotImplementedError, match="sparse gradients incorrectly; got one from the lower loss at step k=1"
    ):
        inner.unroll(module, bare, lower, hyper=hyper, steps=1, adjoint=adjoint)


def test_tasks_with_attention_in_eval_mode() -> None:
    """Under `vmap` no tensor reports that it requires grad, and torch would take a path without a derivative."""
    for make in (Attention, lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)):
        problem = Problem(Case(lambda make=make: make().eval(), sequences))
        x = torch.stack([numbers(3, 5, 4, seed=s) for s in (1, 2)])

        def lower(net: Any, hyper: Tensor, batch: Tensor) -> Tensor:
            return hyper[0] * net(batch).square().mean() + hyper[1] * net(batch).sin().mean()

        inner = problem.optimizer(alpha=0.0)
        together = inner.unroll(problem.module, lower, hyper=problem.hyper, steps=K, batches=[x] * K, tasks=2)
        got = torch.autograd.grad(together.losses(lower, problem.hyper, x).sum(), problem.hyper)[0]
        want = torch.zeros(3)
        for task in x:
            alone = inner.unroll(problem.module, lower, hyper=problem.hyper, steps=K, batches=[task] * K)
            want += torch.autograd.grad(lower(alone, problem.hyper, task), problem.hyper)[0]
        torch.testing.assert_close(got, want, **TIGHT)
        assert torch.backends.mha.get_fastpath_enabled()
