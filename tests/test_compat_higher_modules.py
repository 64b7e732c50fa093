"""The patched modules of `bda_optim.compat.higher`, and their memory. `higher` is not needed."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from higher_cases import Net, data, linear, stepped
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import bda_optim.compat.higher as higher

O = torch.optim  # noqa: E741
pytestmark = pytest.mark.usefixtures("doubles")


def test_a_patched_module_is_one_of_the_users_class() -> None:
    net, (x, _) = Net(), data()
    fnet = higher.monkeypatch(net)
    assert isinstance(fnet, Net) and isinstance(fnet, nn.Module) and isinstance(fnet.body[0], nn.Linear)
    assert list(dict(fnet.named_parameters())) == list(dict(net.named_parameters()))
    assert list(fnet.state_dict()) == list(net.state_dict())
    fnet.scale = 2.0
    torch.testing.assert_close(fnet(x), 2 * net(x))
    before = {key: value.clone() for key, value in net.state_dict().items()}
    assert fnet.calls == 1 and net.calls == 1 and net.scale == 1.0
    fnet.train()
    assert fnet.training and not fnet.body[1].training and net.body[1].training
    fnet.eval()
    assert net.training and not fnet.head.training
    fnet.body[1].train()(torch.randn(6, 6))
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())


def test_parts_and_methods_follow_the_fast_weights() -> None:
    net, (x, _) = Net().eval(), data()
    fnet = higher.monkeypatch(net, copy_initial_weights=False)
    fnet.update_params([2 * p for p in fnet.parameters()])
    expected = F.linear(x, 2 * net.body[0].weight, 2 * net.body[0].bias)
    torch.testing.assert_close(fnet.body[0](x), expected)
    torch.testing.assert_close(fnet.features(x), fnet.body(x))
    torch.testing.assert_close(fnet.head.forward(fnet.features(x)), fnet(x))
    assert fnet.head.weight is fnet.fast_params[4] and next(fnet.head.parameters()) is fnet.head.weight
    fnet.features(x).sum().backward()
    assert net.body[0].weight.grad is not None
    torch.testing.assert_close(fnet.head(torch.ones(6), params=list(net.parameters())), net.head(torch.ones(6)))


def test_rnns_follow_the_fast_weights() -> None:
    for cls in (nn.RNN, nn.LSTM, nn.GRU):
        rnn, x = cls(3, 4), torch.randn(5, 2, 3)
        fast = [2 * p.detach() for p in rnn.parameters()]
        frnn = higher.monkeypatch(rnn)
        frnn.flatten_parameters()
        out = frnn(x, params=fast)[0]
        with torch.no_grad():
            for p in rnn.parameters():
                p.mul_(2)
        torch.testing.assert_close(out, rnn(x)[0])


def test_params_of_a_call_become_the_fast_weights_shared_ones_once() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    net[1].weight = net[0].weight
    fnet = higher.make_functional(net)
    assert fnet.fast_params is None
    with pytest.raises(ValueError, match="no fast weights yet"):
        fnet(torch.ones(4))
    with pytest.raises(ValueError, match="no fast weights yet"):
        fnet.parameters()
    new = [torch.eye(4), torch.ones(4), torch.zeros(4)]
    torch.testing.assert_close(fnet(torch.ones(4), params=new), 2 * torch.ones(4))
    assert fnet[0].weight is fnet[1].weight is new[0]
    torch.testing.assert_close(fnet(torch.zeros(4)), torch.ones(4))
    with pytest.raises(ValueError, match="3 parameters, shared ones counted once; got 4"):
        fnet(torch.ones(4), params=[*new, torch.zeros(4)])
    with pytest.raises(TypeError, match="fast weights are tensors"):
        fnet.update_params([1, 2, 3])


def test_assigning_a_parameter_or_an_entry_of_the_list() -> None:
    net, x = nn.Sequential(nn.Linear(4, 2)), torch.ones(4)
    fnet = higher.monkeypatch(net, keep_history=True)
    fnet[0].weight = torch.zeros(2, 4)
    torch.testing.assert_close(fnet(x), net[0].bias.detach())
    fnet.fast_params[1] = torch.ones(2)
    torch.testing.assert_close(fnet(x), torch.ones(2))
    assert len([*fnet.parameters(time=0)]) == 2
    with pytest.raises(IndexError, match="time"):
        fnet.parameters(time=2)


def test_the_weights_of_a_copy_are_leaves_that_the_forward_pass_uses() -> None:
    net, (x, y) = linear(), data()
    net[2].bias.requires_grad_(False)
    fnet = higher.monkeypatch(net, device="cpu")
    F.mse_loss(fnet(x), y).backward()
    assert [p.grad is None for p in fnet.parameters()] == [False, False, False, True]
    assert all(p.grad is None for p in net.parameters())
    fnet.zero_grad()
    assert all(p.grad is None for p in fnet.parameters())


def test_the_history_is_kept_on_demand() -> None:
    net = linear()
    fnet, _ = stepped(net, O.SGD(net.parameters(), lr=0.1), 3, keep_history=True)
    lists = [list(fnet.parameters(time=t)) for t in range(4)]
    assert all(a is b for a, b in zip(lists[3], fnet.fast_params, strict=True))
    assert all(a is b for a, b in zip(lists[0], fnet.init_fast_params, strict=True))
    assert lists[-2][0] is next(fnet.parameters(time=-2)) is next(fnet.parameters(time=2))
    torch.autograd.grad(fnet(data()[0]).sum(), lists[1])
    fnet, _ = stepped(net, O.SGD(net.parameters(), lr=0.1), 3, keep_history=False)
    assert [p.shape for p in fnet.parameters(time=0)] == [p.shape for p in fnet.parameters(time=3)]
    with pytest.raises(ValueError, match="keep_history=True"):
        fnet.parameters(time=1)
    assert [p.shape for p in higher.monkeypatch(net[0]).parameters(recurse=False)] == [(5, 4), (5,)]
    assert [*fnet.parameters(recurse=False)] == []


def test_without_tracking_there_are_only_the_present_weights() -> None:
    net = linear()
    fnet, _ = stepped(net, O.SGD(net.parameters(), lr=0.1), 2, track_higher_grads=False)
    assert all(p.is_leaf and p.requires_grad for p in fnet.parameters())
    assert next(fnet.parameters(time=0)) is fnet.fast_params[0] is next(fnet.parameters(time=-1))
    with pytest.raises(ValueError, match="track_higher_grads=True"):
        fnet.parameters(time=1)
    with pytest.raises(RuntimeError, match="fast_params"):
        _ = fnet.init_fast_params
    with pytest.raises(ValueError, match="True or False"):
        fnet.track_higher_grads = 1


def test_hooks_run_once_and_new_ones_stay_with_the_patched_module() -> None:
    net, (x, _) = Net(), data()
    calls: list[str] = []
    net.register_forward_pre_hook(lambda *_: calls.append("pre"))
    net.register_forward_hook(lambda *_: calls.append("root"))
    net.head.register_forward_hook(lambda *_: calls.append("head"))
    fnet = higher.monkeypatch(net)
    fnet(x)
    assert calls == ["pre", "head", "root"]
    handle = fnet.head.register_forward_hook(lambda *_: calls.append("new"))
    fnet(x)
    assert calls[3:] == ["pre", "head", "new", "root"]
    net(x)
    assert calls[7:] == ["pre", "head", "root"]
    handle.remove()
    fnet.head(torch.ones(6))
    assert calls[10:] == ["head"]


@pytest.mark.parametrize("make", [Net, linear, lambda: nn.LSTM(4, 3)], ids=["net", "sequential", "lstm"])
@pytest.mark.parametrize("how", [copy.deepcopy, lambda f: pickle.loads(pickle.dumps(f))], ids=["deepcopy", "pickle"])
def test_copies_are_independent(make: Callable[[], nn.Module], how: Callable[[Any], Any]) -> None:
    net, (x, _) = make(), data()
    fnet = higher.monkeypatch(net, copy_initial_weights=False)
    fnet.update_params([p * 2 + 1 for p in fnet.parameters()])
    other = how(fnet)
    assert type(other) is type(fnet) and all(p.is_leaf and p.requires_grad for p in other.parameters())
    result, expected = (f(x) if isinstance(f(x), Tensor) else f(x)[0] for f in (other, fnet))
    torch.testing.assert_close(result.detach(), expected.detach())
    torch.testing.assert_close(list(other.parameters(time=0)), [p.detach() for p in net.parameters()], check_dtype=True)
    other.update_params([torch.zeros_like(p) for p in other.parameters()])
    assert all(bool(p.any()) for p in fnet.parameters())
    for part in fnet.children():
        assert type(how(part)) in (nn.Sequential, nn.Linear, nn.Tanh)


def test_a_patched_module_cannot_be_patched_again() -> None:
    fnet = higher.monkeypatch(linear())
    for module in (fnet, nn.Sequential(nn.Linear(2, 4), fnet), copy.deepcopy(fnet)):
        with pytest.raises(ValueError, match="cannot be patched again"):
            higher.monkeypatch(module)
    with pytest.raises(TypeError, match=r"torch\.nn\.Module"):
        higher.monkeypatch(lambda x: x)  # type: ignore[arg-type]


def test_buffers_are_copied_and_can_be_synchronised() -> None:
    net, (x, y) = nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2)), data()
    with higher.innerloop_ctx(net, O.SGD(net.parameters(), lr=0.1)) as (fnet, diffopt):
        for _ in range(3):
            fnet.train()
            lower = F.mse_loss(fnet(x), y)
            fnet.eval()
            upper = F.mse_loss(fnet(x), -y)  # its graph needs statistics that the next pass in train mode overwrites
            diffopt.step(lower + upper)
        F.mse_loss(fnet(x), y).backward()
    assert int(fnet[1].num_batches_tracked) == 3 and int(net[1].num_batches_tracked) == 0
    higher.patch.buffer_sync(net, fnet)
    assert int(fnet[1].num_batches_tracked) == 0
    with pytest.raises(KeyError, match="sub-module"):
        higher.patch.buffer_sync(nn.Sequential(net), fnet)


def test_a_checkpoint_in_the_module_is_refused() -> None:
    class Saving(nn.Module):
        def __init__(self, reentrant: bool) -> None:
            super().__init__()
            self.block, self.head, self.reentrant = nn.Linear(4, 4), nn.Linear(4, 2), reentrant

        def features(self, x: Tensor) -> Any:
            return checkpoint(self.block, x, use_reentrant=self.reentrant)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.features(x))

    x, y = data()
    for reentrant in (False, True):
        net = Saving(reentrant)
        with (
            higher.innerloop_ctx(net, O.SGD(net.parameters(), lr=0.1)) as (fnet, diffopt),
            pytest.raises(RuntimeError, match="checkpoint"),
        ):
            diffopt.step(F.mse_loss(fnet(x.requires_grad_()), y))
        if not reentrant:
            with pytest.raises(RuntimeError, match="checkpoint"):
                fnet.features(x)


def test_attention_can_be_differentiated_twice_also_by_parts() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.attention(x, x, x, need_weights=False)[0]

    net, x = Block(), torch.randn(2, 3, 4)
    calls: tuple[Callable[[Any], Tensor], ...] = (lambda f: f(x), lambda f: f.attention(x, x, x, need_weights=False)[0])
    for call in calls:
        net.zero_grad()
        with higher.innerloop_ctx(net, O.SGD(net.parameters(), lr=0.1), copy_initial_weights=False) as (fnet, diffopt):
            diffopt.step(call(fnet).square().mean())
            call(fnet).sum().backward()
        assert net.attention.in_proj_weight.grad is not None
    assert torch.backends.cuda.flash_sdp_enabled()


def test_registries_of_the_users_class_are_left_alone() -> None:
    class Base(nn.Module):
        known: list[str] = []  # noqa: RUF012

        def __init_subclass__(cls, *, key: str) -> None:
            Base.known.append(key)

    class Child(Base, key="child"):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(2))

        def forward(self, x: Tensor) -> Tensor:
            return self.w * x

    assert isinstance(higher.monkeypatch(Child()), Child) and Base.known == ["child"]


# Memory.


def test_a_patched_module_is_freed_without_the_garbage_collector() -> None:
    class Odd(Net):
        """Holds its parameters in a tuple and a list besides."""

        def __init__(self) -> None:
            super().__init__()
            self.own = nn.Parameter(torch.ones(2))
            self.pair, self.many = (self.own, self.head.bias), [self.head.weight]

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.pair[0] + self.pair[1] + self.many[0].sum()

    (x, y), net = data(), Odd()
    gc.collect()
    gc.disable()
    try:
        fnet = higher.monkeypatch(net, copy_initial_weights=False)
        diffopt = higher.get_diff_optim(O.Adam(net.parameters(), lr=0.1), net.parameters(), fmodel=fnet)
        for _ in range(2):
            diffopt.step(F.mse_loss(fnet(x), y))
        assert fnet.pair[0] is fnet.own and fnet.many[0] is fnet.head.weight
        fnet(x).sum().backward()
        gone = [weakref.ref(o) for o in (fnet, fnet.head, fnet.own, diffopt, fnet.__dict__["_fast_weights"])]
        del fnet, diffopt
        assert [o() for o in gone] == [None] * 5
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "settings", [{"keep_history": False}, {"first_order": True}, {"track_higher_grads": False}], ids=str
)
def test_weights_of_past_steps_are_not_kept(settings: dict[str, bool]) -> None:
    net, (x, y) = nn.Linear(4, 2), data()  # no graph needs the weights of a linear model
    seen = []
    with higher.innerloop_ctx(net, O.SGD(net.parameters(), lr=0.1), **settings) as (fnet, diffopt):
        for _ in range(4):
            diffopt.step(F.mse_loss(fnet(x), y))
            seen.append(weakref.ref(fnet.fast_params[0]))
    assert [ref() is None for ref in seen] == [True, True, True, False]


def test_truncation_frees_what_was_before() -> None:
    net, (x, y) = linear(), data()
    fnet = higher.monkeypatch(net)
    diffopt = higher.get_diff_optim(O.SGD(net.parameters(), lr=0.1, momentum=0.9), net.parameters(), fmodel=fnet)
    seen = []
    for _ in range(3):
        for _ in range(2):
            diffopt.step(F.mse_loss(fnet(x), y))
        seen.append(weakref.ref(fnet.fast_params[2]))
        fnet.update_params([p.detach().requires_grad_() for p in fnet.fast_params])
        diffopt.load_state_dict(diffopt.state_dict())
    assert [ref() for ref in seen] == [None] * 3
    assert diffopt.k == 6 and not diffopt.state[0][0]["momentum_buffer"].requires_grad
