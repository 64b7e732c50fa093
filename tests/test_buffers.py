"""Buffers in a rollout, train and eval mode, and `commit`, which writes back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from problems import TIGHT
from torch import Tensor, nn
from zoo import TRAIN, VALID, Noted, noted_lower, noted_upper, untouched

import bda_optim as bda

pytestmark = pytest.mark.usefixtures("doubles")


def running_mean(*batches: Tensor) -> Tensor:
    mean = torch.zeros(3)
    for batch in batches:
        mean = 0.9 * mean + 0.1 * batch.mean(0)
    return mean


@pytest.mark.parametrize(
    "adjoint",
    [bda.Unroll(), bda.Checkpointed(), bda.Checkpointed(slots=2), bda.ForwardMode(), bda.Truncated(last=2)],
    ids=lambda a: type(a).__name__,
)
@pytest.mark.parametrize("momentum", [0.0, 0.5], ids=["in one pass", "by both gradients"])
def test_a_rollout_keeps_the_lower_losses_updates_of_buffers_only(adjoint: Any, momentum: float) -> None:
    module = Noted()
    inner = bda.BDAInnerOptimizer(module.parameters(), lr=0.1, alpha=0.3, momentum=momentum)
    x = torch.tensor(1.0, requires_grad=True)
    with untouched(module):
        fmodel = inner.unroll(
            module, lambda net, x, b: x * noted_lower(net, x, b), noted_upper, hyper=x, steps=5, adjoint=adjoint
        )
        assert fmodel.buffer_dict["norm.num_batches_tracked"].item() == 5
        torch.testing.assert_close(fmodel.buffer_dict["norm.running_mean"], running_mean(*[TRAIN] * 5), **TIGHT)
        noted_upper(fmodel, x, None).backward()  # a replay changes no buffer
        assert fmodel.buffer_dict["norm.num_batches_tracked"].item() == 6  # what the user ran on it
        assert x.grad.abs() > 0
        x.grad = None
    inner.commit(fmodel)
    assert module.norm.num_batches_tracked.item() == 5
    torch.testing.assert_close(module.norm.running_mean, running_mean(*[TRAIN] * 5), **TIGHT)


def test_in_the_users_own_loop_every_call_counts() -> None:
    module = Noted()
    inner = bda.BDAInnerOptimizer(module.parameters(), lr=0.1, alpha=0.3)
    with untouched(module):
        with bda.innerloop_ctx(module, inner) as (fmodel, diffopt):
            for _ in range(3):
                diffopt.step(noted_lower(fmodel, None, None), noted_upper(fmodel, None, None))
            noted_upper(fmodel, None, None)
        expected = running_mean(*[TRAIN, VALID] * 3, VALID)
        torch.testing.assert_close(fmodel.buffer_dict["norm.running_mean"], expected, **TIGHT)
        fmodel.lower_point(noted_lower)  # leaves them as they are
        torch.testing.assert_close(fmodel.buffer_dict["norm.running_mean"], expected, **TIGHT)
    inner.commit(fmodel)
    assert module.norm.num_batches_tracked.item() == 7
    torch.testing.assert_close(module.norm.running_mean, expected, **TIGHT)


def test_flags_are_those_at_entry() -> None:
    module = Noted().eval()
    inner = bda.BDAInnerOptimizer(module.parameters(), lr=0.1)

    def lower(net: Any, hyper: Any, batch: Any) -> Tensor:
        module.train()  # the rollout no longer reads the user's module
        return noted_lower(net, hyper, batch)

    fmodel = inner.unroll(module, lower, steps=2)
    assert fmodel.buffer_dict["norm.num_batches_tracked"].item() == 0
    module.eval()
    with bda.innerloop_ctx(module, inner) as (fmodel, _):
        module.train()
        assert not fmodel.training
        assert not fmodel.norm.training
        fmodel.train()
        module.eval()
        assert fmodel.training
        assert fmodel.norm.training
        fmodel(TRAIN)
        assert fmodel.buffer_dict["norm.num_batches_tracked"].item() == 1
        assert fmodel.eval() is fmodel
        fmodel(TRAIN)
        assert fmodel.buffer_dict["norm.num_batches_tracked"].item() == 1
    assert not any(m.training for m in module.modules())


@pytest.mark.parametrize("form", ["unroll", "innerloop_ctx"])
def test_commit_writes_parameters_buffers_and_the_rules_state(form: str) -> None:
    """Two rounds of two steps with a commit between are four steps of torch.optim.Adam."""
    module, reference = Noted(), Noted()
    reference.load_state_dict(module.state_dict())
    inner = bda.BDAInnerOptimizer(module.parameters(), lr=0.05, rule=torch.optim.Adam)
    identities = [(id(t), t.data_ptr()) for t in (*module.parameters(), *module.buffers())]
    for _ in range(2):
        if form == "unroll":
            fmodel = inner.unroll(module, noted_lower, steps=2)
        else:
            with bda.innerloop_ctx(module, inner) as (fmodel, diffopt):
                for _ in range(2):
                    diffopt.step(noted_lower(fmodel, None, None))
        inner.commit(fmodel)
    assert [(id(t), t.data_ptr()) for t in (*module.parameters(), *module.buffers())] == identities
    optimizer = torch.optim.Adam(reference.parameters(), lr=0.05)
    for _ in range(4):
        optimizer.zero_grad()
        noted_lower(reference, None, None).backward()
        optimizer.step()
    torch.testing.assert_close(module.state_dict(), reference.state_dict(), rtol=1e-12, atol=1e-12)
    for mine, theirs in zip(module.parameters(), reference.parameters(), strict=True):
        assert mine.is_leaf
        assert mine.requires_grad
        assert mine.grad is None
        assert inner.state[mine]["step"] == 4
        assert not inner.state[mine]["exp_avg"].requires_grad
        torch.testing.assert_close(inner.state[mine]["exp_avg"], optimizer.state[theirs]["exp_avg"])


def test_commit_restarts_k_and_refuses_what_is_not_its_own() -> None:
    module = Noted()
    inner = bda.BDAInnerOptimizer(module.parameters(), lr=0.1, alpha=bda.harmonic(0.5))
    inner.step(lambda: (noted_lower(module, None, None), noted_upper(module, None, None)))
    assert inner.param_groups[0]["k"] == 1
    fmodel = inner.unroll(module, noted_lower, noted_upper, steps=3)
    assert inner.param_groups[0]["k"] == 1
    inner.commit(fmodel)
    assert inner.param_groups[0]["k"] == 0
    other = Noted()
    with untouched(module, other):
        strange = bda.BDAInnerOptimizer(other.parameters(), lr=0.1).unroll(other, noted_lower, steps=1)
        with pytest.raises(ValueError, match="got one with other parameters"):
            inner.commit(strange)
        part = bda.BDAInnerOptimizer(module.head.parameters(), lr=0.1).unroll(module, noted_lower, steps=1)
        with pytest.raises(ValueError, match="got one with other parameters"):
            inner.commit(part)
        with pytest.raises(TypeError, match="got Noted"):
            inner.commit(module)
        tasks = inner.unroll(
            module, lambda net, h, b: net(b).square().mean(), noted_upper, steps=1, batches=[TRAIN[None]], tasks=1
        )
        with pytest.raises(ValueError, match=r"parameters of 1 tasks .*as Reptile does"):
            inner.commit(tasks)


class Growing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)
        self.register_buffer("seen", torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = torch.cat([self.seen, x.detach().mean().reshape(1)])
        return self.linear(x)


def test_a_buffer_that_changes_its_shape_stays_out_of_the_module() -> None:
    module = Growing()
    inner = bda.BDAInnerOptimizer(module.parameters(), lr=0.1)
    with untouched(module):
        fmodel = inner.unroll(module, noted_lower, steps=3)
        assert fmodel.buffer_dict["seen"].shape == (3,)
        with pytest.raises(ValueError, match="a buffer changed its shape"):
            inner.commit(fmodel)
