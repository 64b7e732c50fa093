"""Idioms of public scripts written for `higher`, run with `bda_optim.compat.higher` and with `higher` itself."""

from __future__ import annotations

import copy
import gc
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import bda_optim.compat.higher as ours

O = torch.optim  # noqa: E741
pytestmark = pytest.mark.usefixtures("doubles")


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))


def data() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(6, 4), torch.randn(6, 2)


def one_group_each(net: nn.Module) -> list[dict[str, Any]]:
    return [{"params": [p]} for p in net.parameters()]


# Each idiom takes a library and returns what must be the same with both.


def update_by_add(hi: Any) -> list[Any]:
    """A hand-written inner loop around the private `_add`, whose arguments scripts name."""
    net, (x, y) = network(), data()
    fnet = hi.monkeypatch(net, copy_initial_weights=False)
    for _ in range(3):
        params = list(fnet.parameters())
        grads = torch.autograd.grad(F.mse_loss(fnet(x), y), params, create_graph=True)
        pairs = zip(params, grads, strict=True)
        fnet.update_params([hi.optim._add(tensor=p, a1=-0.1, a2=g) for p, g in pairs])
    F.mse_loss(fnet(x), -y).backward()
    return [hi.optim._add(x, y[0, 0]), *(p.grad for p in net.parameters())]


class Scaled(O.Optimizer):
    """Gradient descent with a dictionary among its settings."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "info": {"scale": 1.0, "seen": []}})


def registered(hi: Any) -> list[Any]:
    """An optimizer of the script's own; its settings hold a dictionary that the inner loop writes to."""

    class DifferentiableScaled(hi.optim.DifferentiableOptimizer):  # type: ignore[name-defined, misc]
        def _update(self, grouped_grads: hi.optim._GroupedGradsType, **kwargs: Any) -> None:  # type: ignore[name-defined]
            for group, grads in zip(self.param_groups, grouped_grads, strict=True):
                for i, (p, g) in enumerate(zip(group["params"], grads, strict=True)):
                    group["params"][i] = hi.optim._add(p, -group["lr"] * group["info"]["scale"], g)

    hi.register_optim(Scaled, DifferentiableScaled)
    net, (x, y) = network(), data()
    opt = Scaled(net.parameters(), lr=0.1)
    with hi.innerloop_ctx(net, opt, copy_initial_weights=False) as (fnet, diffopt):
        for k in range(3):
            diffopt.param_groups[0]["info"]["scale"] = 1.0 / (k + 1)
            diffopt.param_groups[0]["info"]["seen"].append(k)
            diffopt.step(F.mse_loss(fnet(x), y))
        F.mse_loss(fnet(x), -y).backward()
    assert opt.param_groups[0]["info"] == opt.defaults["info"] == {"scale": 1.0, "seen": []}
    return [p.grad for p in net.parameters()]


def own_step(hi: Any) -> list[Any]:
    """A `step` that the script replaces: two losses, and the private names that higher's `step` uses."""

    def step(self: Any, losses: list[Tensor]) -> None:
        params = list(self._fmodel.fast_params)
        parts = [torch.autograd.grad(loss, params, create_graph=self._track_higher_grads) for loss in losses]
        grads = [sum(part) / len(parts) for part in zip(*parts, strict=True)]
        grouped = []
        for group, members in zip(self.param_groups, self._group_to_param_list, strict=True):
            for i, index in enumerate(members):
                group["params"][i] = params[index]
            grouped.append([grads[index] for index in members])
        self._update(grouped)
        for group, members in zip(self.param_groups, self._group_to_param_list, strict=True):
            for p, index in zip(group["params"], members, strict=True):
                params[index] = p
        self._fmodel.update_params(params)

    net, (x, y) = network(), data()
    groups = [{"params": net[2].parameters(), "lr": 0.2}, {"params": net[0].parameters()}]
    opt = O.SGD(groups, lr=0.1, momentum=0.9)
    with hi.innerloop_ctx(net, opt, copy_initial_weights=False) as (fnet, diffopt):
        diffopt.step = types.MethodType(step, diffopt)
        for _ in range(3):
            diffopt.step([F.mse_loss(fnet(x), y), fnet(x).square().mean()])
        F.mse_loss(fnet(x), -y).backward()
    return [p.grad for p in net.parameters()]


def helpers(hi: Any) -> list[Any]:
    """Copies of weights, and a function mapped over nested settings."""
    net = network()
    copies = [hi.utils._copy_tensor(p, safe_copy=True) for p in net.parameters()]
    shared = hi.utils._copy_tensor(net[0].weight, False)
    assert all(p.is_leaf and p.requires_grad for p in [*copies, shared])
    assert copies[0].data_ptr() != net[0].weight.data_ptr() == shared.data_ptr()
    doubled = hi.utils._recursive_map({"a": [1, (2, 3)], "b": {4}}, lambda value: 2 * value)
    assert doubled == {"a": [2, (4, 6)], "b": {8}}
    net.note = "mine"
    own = [name for name in vars(net) if name not in hi.patch._internal_attrs]
    assert "note" in own and not {"_parameters", "_buffers", "_modules", "_forward_hooks"} & set(own)
    return [*copies, shared]


def rate_per_element(hi: Any) -> list[Any]:
    """Meta-SGD: one group per parameter, and a learned rate for each element."""
    net, (x, y) = network(), data()
    rates = [torch.full_like(p, 0.1 + 0.01 * i).requires_grad_() for i, p in enumerate(net.parameters())]
    opt = O.SGD(one_group_each(net), lr=0.1)
    with hi.innerloop_ctx(net, opt, copy_initial_weights=False, override={"lr": rates}) as (fnet, diffopt):
        for _ in range(3):
            diffopt.step(F.mse_loss(fnet(x), y))
        F.mse_loss(fnet(x), -y).backward()
    return [*(rate.grad for rate in rates), *(p.grad for p in net.parameters())]


def rate_in_a_group(hi: Any) -> list[Any]:
    """Rates written into `param_groups`: one that broadcasts along rows, one for a group of two parameters."""
    net, (x, y) = network(), data()
    groups = [{"params": [net[0].weight]}, {"params": [net[0].bias, net[2].weight]}, {"params": [net[2].bias]}]
    rates = [torch.rand(5, 1), torch.rand(5), torch.tensor([0.1])]
    opt = O.Adam(groups, lr=0.01, eps=1e-18)
    with hi.innerloop_ctx(net, opt, copy_initial_weights=False) as (fnet, diffopt):
        for group, rate in zip(diffopt.param_groups, rates, strict=True):
            group["lr"] = rate.requires_grad_()
        for _ in range(3):
            diffopt.step(F.mse_loss(fnet(x), y))
        F.mse_loss(fnet(x), -y).backward()
    return [*(rate.grad for rate in rates), *(p.grad for p in net.parameters())]


def moved_without_effect(hi: Any) -> list[Any]:
    """`.to` of a patched module, of its parts, and of a module that contains it, as Lightning does it."""
    net, (x, y) = network(), data()
    fnet = hi.monkeypatch(net, copy_initial_weights=False).to("cpu")
    holder = nn.ModuleDict({"functional": fnet}).to(torch.device("cpu"), torch.float64).double()
    fnet[0].to("cpu")
    first = list(fnet.parameters())
    diffopt = hi.get_diff_optim(O.SGD(net.parameters(), lr=0.1), net.parameters(), fmodel=fnet)
    diffopt.step(F.mse_loss(holder["functional"](x), y))
    holder.to("cpu").cpu()
    F.mse_loss(holder["functional"](x), -y).backward()
    assert all(a is b for a, b in zip(first, fnet.parameters(time=0), strict=True))
    return [p.grad for p in net.parameters()]


def cast_before_the_loop(hi: Any) -> list[Any]:
    """A real change, of the dtype: the weights are the module's, in the other one, and still leaves."""
    net, (x, y) = network().float(), data()
    fnet = hi.monkeypatch(net).double()
    first = list(fnet.parameters())
    diffopt = hi.get_diff_optim(O.SGD(net.parameters(), lr=0.1), net.parameters(), fmodel=fnet)
    for _ in range(2):
        diffopt.step(F.mse_loss(fnet(x), y))
    F.mse_loss(fnet(x), -y).backward()
    assert all(p.is_leaf for p in first) and net[0].weight.dtype is torch.float32
    return [p.grad for p in first]


def weights_at_every_time(hi: Any) -> list[Any]:
    """The best of the losses along the way, and gradients with respect to the weights after each step."""
    net, (x, y) = network(), data()
    opt = O.SGD(net.parameters(), lr=0.1, momentum=0.5)
    with hi.innerloop_ctx(net, opt, copy_initial_weights=False) as (fnet, diffopt):
        for _ in range(4):
            diffopt.step(F.mse_loss(fnet(x), y))
        loss = F.mse_loss(fnet(x), -y)
        grads = [torch.autograd.grad(loss, list(fnet.parameters(time=t)), retain_graph=True) for t in range(5)]
        weights = [list(fnet.parameters(time=t)) for t in range(5)]
        middle = F.mse_loss(fnet(x, params=fnet.parameters(time=2)), -y)
        middle.backward()
    return [*(g for some in (*grads, *weights) for g in some), middle, *(p.grad for p in net.parameters())]


def no_weights_yet(hi: Any) -> list[Any]:
    """A base network that a hyper-network gives its weights: neither history nor tracking."""
    net, (x, _) = network(), data()
    fnet = hi.patch.make_functional(net)
    fnet.track_higher_grads = False
    fnet._fast_params = [[]]
    scale = torch.ones((), requires_grad=True)
    for _ in range(2):
        out = fnet(x, params=[scale * p.detach() for p in net.parameters()])
    assert len(fnet._fast_params) == 1
    return [out, *torch.autograd.grad(out.sum(), scale)]


def history_replaced(hi: Any) -> list[Any]:
    """The graph cut in the middle of a run: the weights copied, the history deleted, the copies set."""
    net, (x, y) = network(), data()
    fnet = hi.monkeypatch(net)
    diffopt = hi.get_diff_optim(O.SGD(net.parameters(), lr=0.1), net.parameters(), fmodel=fnet)
    lengths = []
    for how in range(3):
        for _ in range(2):
            diffopt.step(F.mse_loss(fnet(x), y))
        lengths.append(len(fnet._fast_params))
        copies = [hi.utils._copy_tensor(p, safe_copy=True) for p in fnet.parameters()]
        if how == 0:
            fnet._fast_params = []
        elif how == 1:
            del fnet._fast_params
            fnet._fast_params = None
        else:
            fnet._fast_params = [fnet._fast_params[-1]]
            assert len(fnet._fast_params) == 1
            fnet._fast_params = []
        fnet.update_params(copies)
    assert lengths == [3, 3, 3]
    diffopt.step(F.mse_loss(fnet(x), y))
    return [*torch.autograd.grad(F.mse_loss(fnet(x), -y), list(fnet.parameters(time=0))), *fnet.parameters(time=1)]


IDIOMS = [
    update_by_add,
    registered,
    own_step,
    helpers,
    rate_per_element,
    rate_in_a_group,
    moved_without_effect,
    cast_before_the_loop,
    weights_at_every_time,
    no_weights_yet,
    history_replaced,
]


@pytest.mark.parametrize("idiom", IDIOMS, ids=lambda idiom: idiom.__name__)
def test_an_idiom_gives_what_higher_gives(idiom: Callable[[Any], list[Any]]) -> None:
    higher = pytest.importorskip("higher")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # higher's own, of deprecated calls
        expected = idiom(higher)
    for got, want in zip(idiom(ours), expected, strict=True):
        torch.testing.assert_close(got.detach(), want.detach(), rtol=1e-12, atol=1e-12)


# Moves.


def test_gradients_go_through_a_real_move() -> None:
    net, (x, y) = network().float(), data()
    fnet = ours.monkeypatch(net, copy_initial_weights=False).double()
    F.mse_loss(fnet(x), y).backward()
    twin = copy.deepcopy(net).double()
    F.mse_loss(twin(x), y).backward()
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad.float(), rtol=1e-6, atol=1e-7)


def test_a_real_move_takes_buffers_and_gradients_along() -> None:
    net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.LSTM(3, 2))
    fnet = ours.monkeypatch(net)
    fnet(torch.randn(6, 4))[0].sum().backward()
    fnet.float()
    assert {t.dtype for t in [*fnet.parameters(), *fnet[1].buffers()] if t.is_floating_point()} == {torch.float32}
    assert all(p.grad.dtype is torch.float32 for p in fnet.parameters())
    assert all(p is q for p, q in zip(fnet[2].parameters(), fnet[2]._flat_weights, strict=True))
    assert fnet(torch.randn(6, 4, dtype=torch.float32))[0].dtype is torch.float32
    assert {p.dtype for p in net.parameters()} == {torch.float64}
    fnet[0].to("meta")
    assert [p.is_meta for p in fnet.parameters()] == [True, True, *([False] * 6)]


def test_a_patched_module_without_weights_moves_its_buffers() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    fnet = ours.make_functional(net).float()
    assert fnet[1].running_mean.dtype is torch.float32 and net[0].weight.dtype is torch.float64
    weights = [p.detach().float() for p in net.parameters()]
    assert fnet(torch.ones(3, 2, dtype=torch.float32), params=weights).dtype is torch.float32


# The history.


def test_weights_before_a_cut_are_dropped() -> None:
    net, (x, y) = network(), data()
    with ours.innerloop_ctx(net, O.SGD(net.parameters(), lr=0.1)) as (fnet, diffopt):
        for _ in range(3):
            diffopt.step(F.mse_loss(fnet(x), y))
        seen = [weakref.ref(p) for t in (1, 2, 3) for p in fnet.parameters(time=t)]
        fnet.update_params([p.detach().requires_grad_() for p in fnet.parameters()])
        diffopt.step(F.mse_loss(fnet(x), y))
    assert all(ref() is None for ref in seen)
    assert next(fnet.parameters(time=4)) is fnet._fast_params[4][0]  # type: ignore[index]
    with pytest.raises(ValueError, match="keep_history=True"):
        fnet.parameters(time=2)


def test_a_cleared_history_frees_its_graph() -> None:
    net, (x, y) = network(), data()
    fnet = ours.monkeypatch(net)
    diffopt = ours.get_diff_optim(O.SGD(net.parameters(), lr=0.1), net.parameters(), fmodel=fnet)
    gc.disable()
    try:
        for _ in range(3):
            diffopt.step(F.mse_loss(fnet(x), y))
        seen = [weakref.ref(p) for t in range(4) for p in fnet.parameters(time=t)]
        leaves = [p.detach().requires_grad_() for p in fnet.parameters()]
        fnet._fast_params = []
        fnet.update_params(leaves)
        assert all(ref() is None for ref in seen)
    finally:
        gc.enable()


def test_a_history_is_checked() -> None:
    fnet = ours.monkeypatch(network())
    with pytest.raises(ValueError, match="4 parameters"):
        fnet._fast_params = [[torch.ones(2)]]
    assert len(list(fnet.parameters())) == 4
    fnet._fast_params = []
    for read in (fnet.parameters, lambda: fnet(torch.ones(4))):
        with pytest.raises(ValueError, match="no fast weights yet"):
            read()


# The state.

OPTIMIZERS: list[tuple[Any, dict[str, Any]]] = [
    (O.SGD, {"momentum": 0.9, "dampening": 0.3}),
    (O.Adam, {"amsgrad": True}),
    (O.AdamW, {}),
    (O.Adamax, {}),
    (O.NAdam, {}),
    (O.RAdam, {"betas": (0.5, 0.6)}),
    (O.RMSprop, {"centered": True, "momentum": 0.5}),
    (O.Rprop, {}),
    (O.Adagrad, {}),
    (O.Adadelta, {}),
    (O.ASGD, {"lambd": 0.1}),
    (O.Adafactor, {}),
]
each_optimizer = pytest.mark.parametrize("cls, settings", OPTIMIZERS, ids=lambda value: getattr(value, "__name__", ""))


@pytest.mark.parametrize("foreach", [False, True])
@each_optimizer
def test_the_state_is_written_back_by_hand(cls: Any, settings: dict[str, Any], foreach: bool) -> None:
    """Three inner steps, the state assigned to the optimizer, one step of it: as four inner steps."""
    net, (x, y) = network(), data()
    opt = cls(net.parameters(), lr=0.01, foreach=foreach, **settings)
    with ours.innerloop_ctx(net, opt) as (fnet, diffopt):
        for _ in range(3):
            diffopt.step(F.mse_loss(fnet(x), y))
        weights = [p.detach().clone() for p in fnet.parameters()]
        state = [dict(diffopt.state[0][i]) for i in range(4)]
        diffopt.step(F.mse_loss(fnet(x), y))
    for i, (p, w) in enumerate(zip(net.parameters(), weights, strict=True)):
        p.data.copy_(w)
        opt.state[p] = state[i]
    opt.zero_grad()
    F.mse_loss(net(x), y).backward()
    opt.step()
    for p, q in zip(net.parameters(), fnet.parameters(), strict=True):
        torch.testing.assert_close(p.detach(), q.detach(), rtol=1e-12, atol=1e-12)


@each_optimizer
def test_reading_the_state_changes_nothing(cls: Any, settings: dict[str, Any]) -> None:
    net, (x, y) = network(), data()
    opt = cls(net.parameters(), lr=0.01, **settings)
    results = []
    for read in (False, True):
        with ours.innerloop_ctx(net, opt, copy_initial_weights=False) as (fnet, diffopt):
            for _ in range(4):
                diffopt.step(F.mse_loss(fnet(x), y))
                if read:
                    held = diffopt.state[0][0]
                    assert diffopt.state[0][0] is held
            loss = F.mse_loss(fnet(x), -y)
        results.append([*torch.autograd.grad(loss, list(net.parameters())), *(p.detach() for p in fnet.parameters())])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
    numbers = {name for name, value in diffopt.state[0][0].items() if not isinstance(value, Tensor)}
    assert numbers <= ({"step"} if cls is O.SGD else set())


def test_a_state_changed_by_hand_is_used() -> None:
    """Moments detached between windows, and the state of another optimizer assigned in the middle of a loop."""
    net, (x, y) = network(), data()
    opt = O.Adam(net.parameters(), lr=0.01)
    with ours.innerloop_ctx(net, opt) as (fnet, diffopt):
        for _ in range(2):
            diffopt.step(F.mse_loss(fnet(x), y))
        for entry in diffopt.state[0].values():
            entry.update({name: value.detach() for name, value in entry.items()})
        fnet.update_params([p.detach().requires_grad_() for p in fnet.parameters()])
        start = list(fnet.parameters())
        diffopt.step(F.mse_loss(fnet(x), y))
        assert int(diffopt.state[0][0]["step"]) == 3
        grads = torch.autograd.grad(fnet.fast_params[0].sum(), start[0])
        assert bool(grads[0].any())
    other = O.SGD(net.parameters(), lr=0.1, momentum=0.5, dampening=0.5)
    F.mse_loss(net(x), y).backward()
    other.step()
    fnet = ours.monkeypatch(net)
    diffopt = ours.get_diff_optim(O.SGD(net.parameters(), lr=0.1, momentum=0.5, dampening=0.5), net.parameters(), fnet)
    diffopt.step(F.mse_loss(fnet(x), y))
    fnet.update_params([p.detach().clone().requires_grad_() for p in net.parameters()])
    for i, p in enumerate(net.parameters()):
        diffopt.state[0][i] = dict(other.state[p])
    diffopt.step(F.mse_loss(fnet(x), y))
    other.zero_grad()
    F.mse_loss(net(x), y).backward()
    other.step()
    for p, q in zip(net.parameters(), fnet.parameters(), strict=True):
        torch.testing.assert_close(p.detach(), q.detach(), rtol=1e-12, atol=1e-12)


# Rates per element.


@each_optimizer
def test_a_rate_per_element_is_the_rate(cls: Any, settings: dict[str, Any]) -> None:
    """Equal rates for all elements give what one rate gives, and their gradients add up to its gradient."""
    net, (x, y) = network(), data()
    opt = cls(one_group_each(net), lr=0.01, **settings)

    def loop(override: Any) -> Iterator[Tensor]:
        with ours.innerloop_ctx(net, opt, copy_initial_weights=False, override=override) as (fnet, diffopt):
            for _ in range(3):
                diffopt.step(F.mse_loss(fnet(x), y))
            loss = F.mse_loss(fnet(x), -y)
        yield from (p.detach() for p in fnet.parameters())
        yield torch.stack([g.sum() for g in torch.autograd.grad(loss, override["lr"])])

    single = [torch.tensor(0.01, requires_grad=True) for _ in net.parameters()]
    whole = [torch.full_like(p, 0.01, requires_grad=True) for p in net.parameters()]
    for got, want in zip(loop({"lr": whole}), loop({"lr": single}), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


def test_a_rate_that_would_change_a_shape_is_refused() -> None:
    net, (x, y) = network(), data()
    opt = O.SGD(one_group_each(net), lr=0.1)
    rates = [torch.full_like(p, 0.1) for p in net.parameters()]
    fnet = ours.monkeypatch(net)
    diffopt = ours.get_diff_optim(opt, net.parameters(), fmodel=fnet, override={"lr": rates})
    diffopt.step(F.mse_loss(fnet(x), y))
    diffopt.param_groups[3]["lr"] = torch.full((3, 2), 0.1)
    with pytest.raises(ValueError, match=r"broadcast to every parameter.*\(3, 2\)"):
        diffopt.step(F.mse_loss(fnet(x), y))
    with pytest.raises(ValueError, match="one per parameter group"):
        diffopt.step(F.mse_loss(fnet(x), y), override={"lr": torch.ones(3)})
