"""The optimizers of `bda_optim.compat.higher`: states, settings, errors. `higher` is not needed."""

from __future__ import annotations

import copy
import importlib
import pickle
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from higher_cases import data, linear, stepped
from installed import skip_without
from torch import Tensor, nn
from torch.nn import functional as F

import bda_optim as bda
import bda_optim.compat.higher as higher
from bda_optim.compat.higher.optim import DifferentiableAdam, DifferentiableOptimizer, DifferentiableSGD

O = torch.optim  # noqa: E741
pytestmark = pytest.mark.usefixtures("doubles")


@pytest.mark.parametrize(
    "cls, settings",
    [
        (O.SGD, {"momentum": 0.9, "dampening": 0.3, "maximize": True}),
        (O.Adam, {"amsgrad": True, "weight_decay": 0.1, "decoupled_weight_decay": True, "eps": 1e-2}),
        (O.AdamW, {"weight_decay": 0.5}),
        (O.Adamax, {"maximize": True}),
        (O.NAdam, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
        (O.RAdam, {"betas": (0.5, 0.6)}),
        (O.RMSprop, {"centered": True, "momentum": 0.5}),
        (O.Rprop, {}),
        (O.Adagrad, {"initial_accumulator_value": 0.1, "lr_decay": 0.1}),
        (O.Adadelta, {"maximize": True}),
        (O.ASGD, {"lambd": 0.1}),
        (O.Adafactor, {"weight_decay": 0.1}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_loop_goes_on_where_the_optimizer_was_and_back(cls: Any, settings: dict[str, Any]) -> None:
    """Two steps of torch.optim, two inner steps, their state loaded into torch.optim, two steps more: as six of it."""
    skip_without(cls, settings)
    x, y = data()
    nets = [linear(), linear()]
    opts = [cls(net.parameters(), lr=0.01, **settings) for net in nets]

    def ordinary(which: int, steps: int) -> None:
        for _ in range(steps):
            opts[which].zero_grad()
            F.mse_loss(nets[which](x), y).backward()
            opts[which].step()

    ordinary(0, 6)
    ordinary(1, 2)
    fnet, diffopt = stepped(nets[1], opts[1], 2)
    assert type(diffopt).__name__ == f"Differentiable{cls.__name__}"
    packed = pickle.loads(pickle.dumps(diffopt.state_dict()))
    opts[1].load_state_dict(packed)
    with torch.no_grad():
        for p, q in zip(nets[1].parameters(), fnet.parameters(), strict=True):
            p.copy_(q)
    ordinary(1, 2)
    # torch.optim keeps counts in float32 in some of these, and so does what it loads
    for p, q in zip(*(net.parameters() for net in nets), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-8)


def test_a_state_dict_in_the_middle_of_a_loop() -> None:
    net, (x, y) = linear(), data()
    opt = O.Adam(net.parameters(), lr=0.1)
    fnet, diffopt = stepped(net, opt, 2)
    saved, weights = pickle.loads(pickle.dumps((diffopt.state_dict(), fnet)))
    again = higher.get_diff_optim(opt, net.parameters(), fmodel=weights)
    again.load_state_dict(saved)
    for f, d in ((fnet, diffopt), (weights, again)):
        d.step(F.mse_loss(f(x), y))
    for p, q in zip(fnet.parameters(), weights.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=0)
    with pytest.raises(ValueError, match="groups of"):
        again.load_state_dict({"state": {}, "param_groups": [{"params": [0]}]})


def test_a_scheduler_changes_the_rate_between_steps() -> None:
    net, (x, y) = linear(), data()
    plain = copy.deepcopy(net)
    opt = O.SGD(plain.parameters(), lr=0.3)
    ordinary = O.lr_scheduler.ExponentialLR(opt, 0.5)
    with higher.innerloop_ctx(net, O.SGD(net.parameters(), lr=0.3)) as (fnet, diffopt):
        scheduler = O.lr_scheduler.ExponentialLR(diffopt, 0.5)
        for _ in range(3):
            diffopt.step(F.mse_loss(fnet(x), y))
            scheduler.step()
            opt.zero_grad()
            F.mse_loss(plain(x), y).backward()
            opt.step()
            ordinary.step()
    assert diffopt.param_groups[0]["lr"] == opt.param_groups[0]["lr"] == 0.3 / 8
    for p, q in zip(fnet.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.detach(), q.detach())


@pytest.mark.parametrize("first_order", [False, True])
def test_micro_batches_make_one_step(first_order: bool) -> None:
    net, (x, y) = linear(), data()
    results = []
    for parts in (1, 3):
        net.zero_grad()
        opt = O.SGD(net.parameters(), lr=0.3, momentum=0.5)
        with higher.innerloop_ctx(net, opt, copy_initial_weights=False, first_order=first_order) as (fnet, diffopt):
            for _ in range(2):
                for piece in zip(x.chunk(parts), y.chunk(parts), strict=True):
                    diffopt.accumulate(F.mse_loss(fnet(piece[0]), piece[1]) / parts)
                diffopt.step()
            F.mse_loss(fnet(x), -y).backward()
        results.append([p.grad.clone() for p in net.parameters()])
    torch.testing.assert_close(*results)
    with pytest.raises(ValueError, match="needs a loss"):
        diffopt.step()
    diffopt.accumulate(F.mse_loss(fnet(x), y))
    fnet.update_params([p.detach().requires_grad_() for p in fnet.parameters()])
    with pytest.raises(ValueError, match="weights changed"):
        diffopt.step(F.mse_loss(fnet(x), y))


def test_first_order_takes_gradients_as_constants() -> None:
    net, (x, y) = linear(), data()
    lr = torch.tensor(0.3, requires_grad=True)
    opt = O.SGD(net.parameters(), lr=0.3)
    with higher.innerloop_ctx(net, opt, copy_initial_weights=False, first_order=True, override={"lr": lr}) as (
        fnet,
        diffopt,
    ):
        for _ in range(3):
            diffopt.step(F.mse_loss(fnet(x), y))
        loss = F.mse_loss(fnet(x), -y)
    expected = torch.autograd.grad(loss, fnet.fast_params, retain_graph=True)
    loss.backward()
    torch.testing.assert_close([p.grad for p in net.parameters()], list(expected))
    assert lr.grad is not None


def test_bda_mixes_both_levels_as_the_library_does() -> None:
    net, (x, y) = linear(), data()
    results = []
    for which in (higher, bda):
        net.zero_grad()
        target = torch.zeros(6, 2, requires_grad=True)
        inner = bda.BDAInnerOptimizer(
            net.parameters(), lr=0.2, upper_lr=0.5, alpha=bda.harmonic(0.5), rule=O.Adam, prox=bda.prox.l1(0.01)
        )
        with which.innerloop_ctx(net, inner, copy_initial_weights=False) as (fnet, diffopt):
            for _ in range(4):
                losses = F.mse_loss(fnet(x), y), F.mse_loss(fnet(x), target)
                diffopt.step(losses[0], upper_loss=losses[1]) if which is higher else diffopt.step(*losses)
            F.mse_loss(fnet(x), target).backward()
        results.append([*(p.grad for p in net.parameters()), target.grad])
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)
    inner = bda.BDAInnerOptimizer(net.parameters(), lr=0.2, alpha=bda.harmonic(0.5), momentum=0.9)
    fnet = higher.monkeypatch(net)
    diffopt = higher.get_diff_optim(inner, net.parameters(), fmodel=fnet)
    for _ in range(2):
        diffopt.step(F.mse_loss(fnet(x), y), upper_loss=F.mse_loss(fnet(x), -y))
    inner.load_state_dict(diffopt.state_dict())
    assert inner.param_groups[0]["k"] == 2 and inner.param_groups[0]["alpha"] == bda.harmonic(0.5)
    torch.testing.assert_close(
        inner.state[net[0].weight]["momentum_buffer"], diffopt.state[0][0]["momentum_buffer"].detach()
    )
    again = higher.get_diff_optim(inner, net.parameters(), fmodel=fnet)
    again.load_state_dict(diffopt.state_dict())
    assert again.k == 2
    assert set(higher.get_trainable_opt_params(inner)) == {"lr", "momentum", "dampening", "weight_decay"}


def test_torchopt_rules_keep_their_state() -> None:
    torchopt = pytest.importorskip("torchopt")
    net, (x, y) = linear(), data()
    inner = bda.BDAInnerOptimizer(net.parameters(), rule=torchopt.adam(lr=0.1))
    with higher.innerloop_ctx(net, inner, copy_initial_weights=False) as (fnet, diffopt):
        for _ in range(2):
            diffopt.step(F.mse_loss(fnet(x), y))
        F.mse_loss(fnet(x), y).backward()
    expected, _ = stepped(net, O.Adam(net.parameters(), lr=0.1), 2)
    torch.testing.assert_close([p.detach() for p in fnet.parameters()], [p.detach() for p in expected.parameters()])
    again = higher.get_diff_optim(inner, net.parameters(), fmodel=fnet)
    again.load_state_dict(diffopt.state_dict())
    again.step(F.mse_loss(fnet(x), y))


def test_frozen_parameters_stay_and_groups_keep_their_settings() -> None:
    net, (x, y) = linear(), data()
    net[0].weight.requires_grad_(False)
    opt = O.SGD([{"params": net[0].parameters()}, {"params": net[2].parameters(), "lr": 0.0}], lr=0.5, momentum=0.9)
    for track in (True, False):
        fnet, _ = stepped(net, opt, 3, track_higher_grads=track)
        moved = [not torch.equal(p, q) for p, q in zip(fnet.parameters(), net.parameters(), strict=True)]
        assert moved == [False, True, False, False]
        assert [p.requires_grad for p in fnet.parameters()] == [False, True, True, True]
    rates = [[torch.full_like(p, 0.1).requires_grad_() for p in net[i].parameters()] for i in (0, 2)]
    with higher.innerloop_ctx(net, opt, override={"lr": rates}) as (fnet, diffopt):
        diffopt.step(F.mse_loss(fnet(x), y))
        F.mse_loss(fnet(x), -y).backward()
    assert rates[0][0].grad is None and rates[0][1].grad is not None and rates[1][0].grad is not None


def test_a_setting_turned_on_in_the_middle_of_a_loop() -> None:
    net, (x, y) = linear(), data()
    momentum = torch.tensor(0.5, requires_grad=True)
    with higher.innerloop_ctx(net, O.SGD(net.parameters(), lr=0.1)) as (fnet, diffopt):
        diffopt.step(F.mse_loss(fnet(x), y))
        diffopt.step(F.mse_loss(fnet(x), y), override={"momentum": momentum})
        diffopt.step(F.mse_loss(fnet(x), y))
        F.mse_loss(fnet(x), -y).backward()
    assert momentum.grad is not None and bool(momentum.grad != 0)


def test_learned_settings_are_the_derivative() -> None:
    """Where higher takes square roots of numbers: the betas of Adam."""
    net, (x, y) = linear(), data()

    def upper(lr: Tensor, beta1: Tensor, beta2: Tensor, eps: Tensor) -> Tensor:
        override = {"lr": [lr], "betas": [(beta1, beta2)], "eps": [eps]}
        with higher.innerloop_ctx(net, O.Adam(net.parameters()), override=override) as (fnet, diffopt):
            for _ in range(3):
                diffopt.step(F.mse_loss(fnet(x), y))
            return F.mse_loss(fnet(x), -y)

    values = [torch.tensor(v, requires_grad=True) for v in (0.1, 0.8, 0.9, 1e-2)]
    assert torch.autograd.gradcheck(upper, values)


def test_trainable_settings_and_back() -> None:
    params = [torch.zeros(2, requires_grad=True) for _ in range(2)]
    opt = O.RMSprop([{"params": params[:1]}, {"params": params[1:], "lr": 1}], lr=0.1, alpha=0.9)
    override = higher.get_trainable_opt_params(opt)
    assert set(override) == {"lr", "alpha", "eps", "weight_decay", "momentum"}
    assert all(len(values) == 2 and all(v.requires_grad for v in values) for values in override.values())
    higher.apply_trainable_opt_params(opt, {**override, "lr": [torch.tensor(0.5)], "momentum": [torch.tensor(2.0)]})
    assert [group["lr"] for group in opt.param_groups] == [0.5, 0.5] and type(opt.param_groups[0]["lr"]) is float
    assert [type(group["momentum"]) for group in opt.param_groups] == [int, int]
    adam = O.Adam(params, lr=torch.tensor(0.1), betas=(0.9, 0.99))
    override = higher.get_trainable_opt_params(adam, device="cpu")
    assert isinstance(override["betas"][0], tuple) and "amsgrad" not in override
    rate = adam.param_groups[0]["lr"]
    higher.apply_trainable_opt_params(adam, {"betas": [(torch.tensor(0.5), 0.75)], "lr": [torch.tensor(0.2)]})
    assert adam.param_groups[0]["betas"] == (0.5, 0.75)
    assert adam.param_groups[0]["lr"] is rate and float(rate) == 0.2
    for wrong in ({"beta": [0.1]}, {"lr": [0.1, 0.2, 0.3]}, {"betas": [(0.1,)]}, {"eps": [torch.ones(2)]}):
        with pytest.raises(ValueError, match=r"no setting|one per parameter group|entries|one element"):
            higher.apply_trainable_opt_params(adam, wrong)


@pytest.mark.parametrize("cls", [*(k for k in higher.optim._CLASSES if k is not bda.BDAInnerOptimizer)])
def test_all_trainable_settings_together(cls: Any) -> None:
    net, (x, y) = linear(), data()
    settings = {O.SGD: {"lr": 0.1, "momentum": 0.9, "nesterov": True}, O.Adafactor: {"eps": (1e-8, 1e-3)}}.get(cls, {})
    opt = cls(net.parameters(), **settings)
    override = higher.get_trainable_opt_params(opt)
    plain, _ = stepped(net, opt, 3)
    fnet, _ = stepped(net, opt, 3, override=override)
    for p, q in zip(fnet.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-9)
    F.mse_loss(fnet(x), -y).backward()
    assert override["lr"][0].grad is not None
    higher.apply_trainable_opt_params(opt, override)
    assert opt.param_groups[0]["lr"] == pytest.approx(cls(net.parameters(), **settings).param_groups[0]["lr"])


def test_an_optimizer_of_the_users_own_class() -> None:
    class SignSGD(O.SGD):
        pass

    class DifferentiableSignSGD(DifferentiableOptimizer):
        def _update(self, grouped_grads: Any, **kwargs: Any) -> None:
            for index, (group, grads) in enumerate(zip(self.param_groups, grouped_grads, strict=True)):
                for i, (p, g) in enumerate(zip(group["params"], grads, strict=True)):
                    self.state[index][i]["count"] = self.state[index][i].get("count", 0) + 1
                    group["params"][i] = p - group["lr"] * g.sign()

    net, (x, y) = linear(), data()
    opt = SignSGD(net.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="register_optim"):
        higher.get_diff_optim(opt, net.parameters())
    higher.register_optim(SignSGD, DifferentiableSignSGD)
    lr = torch.tensor(0.1, requires_grad=True)
    fnet, diffopt = stepped(net, opt, 2, override={"lr": [lr]})
    F.mse_loss(fnet(x), y).backward()
    assert lr.grad is not None and diffopt.state[0][0]["count"] == 2
    higher.register_optim(SignSGD, DifferentiableSGD)
    assert type(higher.get_diff_optim(opt, net.parameters())) is DifferentiableSGD
    with pytest.raises(TypeError, match="subclass of `DifferentiableOptimizer`"):
        higher.register_optim(SignSGD, O.SGD)  # type: ignore[arg-type]


def test_create_diff_optim_with_groups() -> None:
    net, (x, y) = linear(), data()
    fnet = higher.monkeypatch(net)
    weights = list(fnet.parameters())
    groups = [{"params": iter(weights[2:]), "lr": 0.0}, {"params": weights[:2]}]
    diffopt = higher.create_diff_optim(O.Adagrad, {"lr": 0.1}, params=groups, fmodel=fnet)
    diffopt.step(F.mse_loss(fnet(x), y))
    moved = [not torch.equal(p, q) for p, q in zip(fnet.parameters(), net.parameters(), strict=True)]
    assert moved == [True, True, False, False]
    assert isinstance(higher.create_diff_optim(O.Adam, fmodel=fnet), DifferentiableAdam)
    with pytest.raises(ValueError, match="`fmodel` or `params`"):
        higher.create_diff_optim(O.Adam)


def test_the_caller_may_be_under_no_grad() -> None:
    net, (x, y) = linear(), data()
    with torch.no_grad(), higher.innerloop_ctx(net, O.SGD(net.parameters(), lr=0.1)) as (fnet, diffopt):
        for _ in range(2):
            with torch.enable_grad():
                loss = F.mse_loss(fnet(x), y)
            diffopt.step(loss)
        with torch.enable_grad():
            F.mse_loss(fnet(x), y).backward()
    assert all(p.grad is not None for p in fnet.init_fast_params)
    with torch.inference_mode(), pytest.raises(RuntimeError, match="no_grad"):
        stepped(net, O.SGD(net.parameters(), lr=0.1))


def test_two_loops_on_one_module_in_two_threads() -> None:
    net, (x, y) = linear(), data()
    expected, _ = stepped(net, O.SGD(net.parameters(), lr=0.1), 5)
    found: list[Any] = []

    def work() -> None:
        for _ in range(10):
            with higher.innerloop_ctx(net, O.SGD(net.parameters(), lr=0.1)) as (fnet, diffopt):
                for _ in range(5):
                    diffopt.step(F.mse_loss(fnet(x), y))
            found.append(fnet)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 20
    for fnet in found:
        torch.testing.assert_close(list(fnet.parameters()), list(expected.parameters()), rtol=0, atol=0)


def test_a_diverged_loop_is_reported() -> None:
    net = linear()
    with pytest.warns(RuntimeWarning, match="diverged"):
        stepped(net, O.SGD(net.parameters(), lr=1e300), 4)


# Refusals.


@pytest.fixture
def diffopt() -> Iterator[Any]:
    net = linear()
    fnet = higher.monkeypatch(net)
    opt = O.SGD(net.parameters(), lr=0.1)
    yield higher.get_diff_optim(opt, net.parameters(), fmodel=fnet)


@pytest.mark.parametrize(
    "call, error, words",
    [
        (lambda d, loss: d.step(loss, upper_loss=loss), TypeError, "BDAInnerOptimizer"),
        (lambda d, loss: d.step(loss, upper=loss), TypeError, "upper"),
        (lambda d, loss: d.step(loss, override={"rl": [0.1]}), ValueError, "It has lr"),
        (lambda d, loss: d.step(loss, override={"foreach": [True]}), ValueError, "no effect"),
        (lambda d, loss: d.step(loss, override={"lr": [0.1, 0.2]}), ValueError, "one per parameter group"),
        (lambda d, loss: d.step(loss, override={"lr": [-0.1]}), ValueError, "at least 0"),
        (
            lambda d, loss: d.step(loss, override={"nesterov": [torch.tensor(1.0, requires_grad=True)]}),
            ValueError,
            "True or False",
        ),
        (lambda d, loss: d.step(loss, grad_callback=lambda grads: grads[1:]), ValueError, "must return 4"),
        (lambda d, loss: d.step(loss, params=[]), ValueError, "Pass all"),
        (lambda d, loss: d.step(loss.expand(2)), ValueError, "scalar"),
        (lambda d, loss: d.step(torch.ones((), requires_grad=True)), ValueError, "does not depend"),
        (lambda d, loss: d.add_param_group({"params": []}), NotImplementedError, "get_diff_optim"),
        (lambda d, loss: d.register_state_dict_pre_hook(print), NotImplementedError, "state_dict"),
        (lambda d, loss: copy.deepcopy(d), NotImplementedError, "state_dict"),
    ],
)
def test_what_is_refused(diffopt: Any, call: Any, error: Any, words: str) -> None:
    x, y = data()
    with pytest.raises(error, match=words):
        call(diffopt, F.mse_loss(diffopt._fmodel(x), y))


def test_optimizers_without_a_derivative_are_refused() -> None:
    net = linear()
    for opt in (O.LBFGS(net.parameters()), O.SparseAdam(net.parameters())):
        with pytest.raises(ValueError, match="Use"):
            higher.get_diff_optim(opt, net.parameters())
    with pytest.raises(ValueError, match=r"`parameters\(\)` of the module"):
        higher.get_diff_optim(O.SGD(net.parameters(), lr=0.1), linear().parameters())
    with pytest.raises(ValueError, match="Pass `params=`"):
        higher.get_diff_optim(O.SGD(net.parameters(), lr=0.1), net.parameters()).step(torch.ones(()))
    inner = bda.BDAInnerOptimizer(net.parameters(), lr=0.1, rule=bda.FISTA)
    with pytest.raises(ValueError, match="unroll"):
        stepped(net, inner, 1)


def test_step_hooks_run(diffopt: Any) -> None:
    (x, y), calls = data(), []
    diffopt.register_step_pre_hook(lambda *_: calls.append("pre"))
    diffopt.register_step_post_hook(lambda *_: calls.append("post"))
    diffopt.step(F.mse_loss(diffopt._fmodel(x), y))
    assert calls == ["pre", "post"]
    diffopt.register_step_pre_hook(lambda *_: ((), {}))
    with pytest.raises(ValueError, match="override"):
        diffopt.step(F.mse_loss(diffopt._fmodel(x), y))
    diffopt._fmodel.init_fast_params[0].grad = torch.ones(5, 4)
    diffopt.zero_grad()


def test_higher_is_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    package = higher.__name__
    for name in [name for name in sys.modules if name == package or name.startswith(package + ".")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys.modules[package.rpartition(".")[0]], "higher", None)
    monkeypatch.setitem(sys.modules, "higher", None)  # importing it would raise
    fresh = importlib.import_module(package + ".patch")
    assert fresh.make_functional is not higher.make_functional


def test_an_error_leaves_nothing_behind() -> None:
    net, (x, y) = linear(), data()
    inner = bda.BDAInnerOptimizer(net.parameters(), lr=0.1, alpha=0.5)
    results = []
    for fails in (False, True):
        fnet = higher.monkeypatch(net)
        diffopt = higher.get_diff_optim(inner, net.parameters(), fmodel=fnet)
        lower, upper = F.mse_loss(fnet(x), y), F.mse_loss(fnet(x), -y)
        if fails:
            for settings in ({}, {"upper_loss": upper.expand(2)}, {"upper_loss": upper, "override": {"lr": [-1.0]}}):
                with pytest.raises(ValueError, match=r"upper|at least 0"):
                    diffopt.step(lower, **settings)
        results.append(diffopt.step(lower, upper_loss=upper))
    torch.testing.assert_close(*results, rtol=0, atol=0)


@pytest.mark.parametrize("wrap", ["parallel", "traced", "spectral", "orthogonal"])
def test_unusual_modules(wrap: str) -> None:
    x, y = data()
    net = linear()
    if wrap == "spectral":
        nn.utils.parametrizations.spectral_norm(net[0]).eval()  # in training mode it is refused
    if wrap == "orthogonal":
        nn.utils.parametrizations.orthogonal(net[0])
    shown: Any = {"parallel": nn.DataParallel, "traced": torch.fx.symbolic_trace}.get(wrap, lambda n: n)(net)
    opt = O.SGD(shown.parameters(), lr=0.1)
    with higher.innerloop_ctx(shown, opt, copy_initial_weights=False) as (fnet, diffopt):
        for _ in range(2):
            diffopt.step(F.mse_loss(fnet(x), y))
        F.mse_loss(fnet(x), y).backward()
    assert all(p.grad is not None for p in net.parameters())
    torch.testing.assert_close(copy.deepcopy(fnet).eval()(x), fnet.eval()(x))
