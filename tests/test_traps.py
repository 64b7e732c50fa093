"""Known traps of torch, and known faults of higher and torchopt: which test shows that this package avoids each.

- torch 1: the first momentum buffer is detached with `differentiable=True`:
    test_traps.py::test_the_first_momentum_buffer
- torch 2: `torch.utils.checkpoint` replays a segment once per inner gradient:
    test_adjoint.py::test_segments_are_replayed_once
- torch 3: `torch.func.grad` refuses old-style functions and BatchNorm:
    test_modules.py::test_hypergradient_by_finite_differences
- torch 4: validation data leaks into running statistics:
    test_buffers.py::test_a_rollout_keeps_the_lower_losses_updates_of_buffers_only
- torch 4: recomputation updates buffers a second time:
    test_adjoint.py::test_buffers_are_updated_once_a_step
- torch 5: a captured tensor gets no gradient through a Function:
    test_wrong_use.py::test_a_captured_tensor_must_be_in_hyper
- torch 5: in whatever step it is captured:
    test_adjoint.py::test_a_captured_tensor_is_found_in_any_step
- torch 6: compiled steps may be wrong:
    test_engine.py::test_wrong_numbers_are_noticed
- torch 7: torch.compile has no double backward:
    test_traps.py::test_a_compiled_module_is_differentiated_twice
- torch 7: a compiled rollout has one:
    test_engine.py::test_second_derivative_of_a_compiled_hypergradient
- torch 8: Adam at a zero second moment:
    test_rule_derivatives.py::test_derivatives_are_finite_where_gradients_vanish
- torch 9: a checkpoint inside the module recomputes with other parameters:
    test_activation_checkpoints.py::test_a_checkpoint_that_would_recompute_with_other_parameters_is_refused
- torch 10: functional_call is not thread-safe:
    test_modules.py::test_four_threads_may_unroll_one_module_at_once
- torch 10: it leaves its tensors where a sub-module has two names:
    test_traps.py::test_a_sub_module_with_two_names_stays_as_it_was
- torch 11: weight_norm has a wrong second derivative:
    test_traps.py::test_weight_norm_twice
- torch 12: attention has no second derivative:
    test_modules.py::test_unroll_equals_a_loop_of_functional_calls
- torch 12: EmbeddingBag, cdist, pdist and ctc_loss have none at all:
    test_second_derivatives.py::test_without_a_second_derivative_there_is_a_clear_error_and_first_order_works
- torch 12: cuDNN's RNNs have none either:
    test_traps.py::test_recurrent_layers_run_without_cudnn
- torch 13: in-place errors of `differentiable=True`:
    test_traps.py::test_rules_that_raise_in_torch
- torch 14: generators, `random` and numpy are not restored:
    test_adjoint.py::test_a_replay_that_differs_from_the_first_pass_raises
- torch 15: reference cycles of `.backward(create_graph=True)`:
    test_adjoint.py::test_no_reference_cycles_with_create_graph
- torch 16: a step under no_grad:
    test_rollout.py::test_a_hypergradient_under_no_grad
- torch 16: inference mode:
    test_adjoint.py::test_inference_mode_is_refused
- torch 17: load_state_dict shares storage:
    test_state_dict.py::test_a_state_dict_goes_on_where_it_was
- torch, found here: spectral_norm moves in training:
    test_second_derivatives.py::test_a_spectral_norm_in_training_mode_is_refused_and_first_order_works
- torch, found here: once_differentiable passes in silence:
    test_second_derivatives.py::test_a_function_that_is_once_differentiable_is_refused
- torch, found here: sparse gradients lose derivatives:
    test_second_derivatives.py::test_an_embedding_with_sparse_gradients_equals_a_dense_one
- truncation with stale parameters, by a factor:
    test_paper.py::test_truncation
- higher: maximize, decoupled weight decay, eps, hooks, weight_norm, missing rules, kept weights, scheduler,
  state_dict, deepcopy, pickle, compile, divergence:
    test_compat_higher.py::test_what_higher_cannot_do_here
- higher: complex Adam:
    test_rules.py::test_complex_parameters_are_two_real_ones
- higher: parallel modules:
    test_functional.py::test_wrappers_are_removed_at_the_root_and_inside
- torchopt: tied weights, unused parameters, zero gradients, frozen and integer parameters, Ctrl-C, groups:
    test_compat_torchopt_limits.py::test_what_torchopt_cannot_do
- torchopt: NaN of a ReLU network at K = 100:
    test_traps.py::test_adam_on_a_relu_network_for_a_hundred_steps
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from problems import difference_quotients, double, relative_error
from torch import Tensor, nn, optim

import bda_optim as bda


def test_every_test_named_above_exists() -> None:
    named = re.findall(r"(test_\w+\.py)::(test_\w+)", __doc__ or "")
    assert len(named) > 30
    folder = Path(__file__).parent
    missing = [f"{file}::{name}" for file, name in named if f"def {name}(" not in (folder / file).read_text("utf-8")]
    assert not missing


def lower(y: Tensor, x: Tensor, batch: Any = None) -> Tensor:
    return (y**2).sum() + 0.3 * (y * x).sin().sum()


def upper(y: Tensor, x: Tensor, batch: Any = None) -> Tensor:
    return (y - 0.5).square().sum()


def torch_loop(kind: Any, x: Tensor, steps: int, **settings: Any) -> Tensor:
    """The hypergradient by torch's own `differentiable=True`."""
    y = double(1.0, -2.0, 0.5).requires_grad_().clone()
    optimizer = kind([y], differentiable=True, **settings)
    for _ in range(steps):
        y.grad = torch.autograd.grad(lower(y.clone(), x), y, create_graph=True)[0]  # steps are in place
        optimizer.step()
    return torch.autograd.grad(upper(y, x), x)[0]


def ours(kind: Any, x: Tensor, steps: int, **settings: Any) -> bda.Hypergradient:
    return bda.hypergradient(lower, upper, double(1.0, -2.0, 0.5), x, steps=steps, rule=kind, **settings)


def by_differences(kind: Any, x: Tensor, steps: int, **settings: Any) -> list[Tensor]:
    return difference_quotients(lambda: ours(kind, x, steps, **settings).value, [x])


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_the_first_momentum_buffer() -> None:
    x = double(0.7).requires_grad_()
    settings = {"lr": 0.1, "momentum": 0.9}
    want = by_differences(optim.SGD, x.detach(), 5, **settings)
    assert relative_error([ours(optim.SGD, x, 5, **settings).grad], want) < 1e-7
    assert relative_error([torch_loop(optim.SGD, x, 5, **settings)], want) > 1e-2, "torch has been mended"


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (optim.Adam, {"lr": 0.1, "amsgrad": True, "eps": 1e-2}),
        (optim.RMSprop, {"lr": 0.02, "centered": True, "momentum": 0.5, "eps": 1e-2}),
        (optim.Adamax, {"lr": 0.1, "eps": 1e-2}),
        (optim.Rprop, {"lr": 0.05}),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_rules_that_raise_in_torch(kind: Any, settings: dict[str, Any]) -> None:
    x = double(0.7).requires_grad_()
    if kind is not optim.Rprop:  # whose steps do not depend on the size of a gradient
        want = by_differences(kind, x.detach(), 4, **settings)
        assert relative_error([ours(kind, x, 4, **settings).grad], want) < 1e-6
    assert ours(kind, x, 4, **settings).grad.isfinite()
    with pytest.raises(RuntimeError):
        torch_loop(kind, x, 4, **settings)


def test_a_compiled_module_is_differentiated_twice() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    x, inputs = double(0.7).requires_grad_(), torch.randn(5, 3, dtype=torch.float64)
    found = []
    for module in (plain, torch.compile(plain, backend="aot_eager")):
        inner = bda.BDAInnerOptimizer(module.parameters(), lr=0.1)
        fmodel = inner.unroll(
            module, lambda net, x, b: (net(inputs) - x).square().mean(), hyper=x, steps=3, adjoint=bda.Unroll()
        )
        found.append(torch.autograd.grad(fmodel(inputs).sum(), x)[0])
    assert torch.equal(*found) and found[0] != 0


class TwoNames(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.second = self.first

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


def test_a_sub_module_with_two_names_stays_as_it_was() -> None:
    module = TwoNames()
    before = {name: id(p) for name, p in module.named_parameters(remove_duplicate=False)}
    inner = bda.BDAInnerOptimizer(module.parameters(), lr=0.1)
    inner.unroll(module, lambda net, x, b: net(torch.ones(3, 2)).square().mean(), steps=2)
    assert {name: id(p) for name, p in module.named_parameters(remove_duplicate=False)} == before
    assert len(before) == 4 and module.first is module.second


def _normed(form: str) -> nn.Module:
    torch.manual_seed(1)
    make = nn.utils.parametrizations.weight_norm if form == "parametrization" else nn.utils.weight_norm
    return nn.Sequential(make(nn.Linear(4, 5)), nn.Tanh(), make(nn.Linear(5, 3))).double()


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("form", ["parametrization", "hook"])
def test_weight_norm_twice(form: str) -> None:
    """All parts of the second derivative: the rates of single elements are learned, so that every entry counts."""
    module, inputs = _normed(form), torch.randn(6, 4, dtype=torch.float64)
    rates = [torch.full_like(p, 0.3).requires_grad_() for p in module.parameters()]
    inner = bda.BDAInnerOptimizer(module.parameters(), lr=rates)

    def loss(net: Any, x: Any, batch: Any) -> Tensor:
        return (net(inputs) ** 2).sum() + net(inputs).sin().sum()

    def value() -> Tensor:
        return loss(inner.unroll(module, loss, steps=3), None, None)

    found = torch.autograd.grad(value(), rates)
    assert relative_error(found, difference_quotients(value, rates)) < 1e-6


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_run_without_cudnn(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """No device of the tests has cuDNN; the flag that a forward pass sees is checked instead."""
    module, seen = kind(2, 2), []
    module.register_forward_hook(lambda *_: seen.append(torch.backends.cudnn.enabled))
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    inner = bda.BDAInnerOptimizer(module.parameters(), lr=0.1)
    before = torch.backends.cudnn.enabled
    fmodel = inner.unroll(module, lambda net, x, b: net(torch.ones(3, 1, 2))[0].square().sum(), steps=2)
    fmodel(torch.ones(3, 1, 2))
    assert seen == [False] * 3 and torch.backends.cudnn.enabled is before


def test_adam_on_a_relu_network_for_a_hundred_steps() -> None:
    """Dead units have zero gradients from the first step on."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 1)).double()
    with torch.no_grad():
        module[0].bias[:4] = -100.0
    x, inputs = double(0.7).requires_grad_(), torch.randn(8, 3, dtype=torch.float64)
    inner = bda.BDAInnerOptimizer(module.parameters(), lr=0.01, rule=optim.Adam)
    fmodel = inner.unroll(module, lambda net, x, b: (net(inputs) - x).square().mean(), hyper=x, steps=100)
    grad = torch.autograd.grad((fmodel(inputs) - 1).square().mean(), x)[0]
    assert grad.isfinite() and grad != 0
