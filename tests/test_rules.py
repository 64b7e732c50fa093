"""Every rule against torch.optim: values, adopted states, settings of single parameters, dtypes, tracing, tasks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from rule_cases import (
    CASES,
    EXACT,
    Case,
    Loss,
    Reference,
    X,
    apply,
    assert_equal,
    every_case,
    every_rule,
    flat_start,
    form,
    generic,
    start,
    tensor,
    traced,
    unroll,
    vanishing,
)
from torch import Tensor, optim
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from bda_optim._step.rules.adam import Adam
from bda_optim._step.rules.sgd import SGD
from bda_optim._support.torch_private import trace_graph

pytestmark = pytest.mark.usefixtures("doubles")  # torch.optim keeps some scalars of its state in the default dtype


# Values.


@pytest.mark.parametrize("trace", [False, True], ids=["eager", "traced"])
@pytest.mark.parametrize(("loss", "begin"), [(generic, start), (vanishing, flat_start)], ids=["generic", "vanishing"])
@every_case
def test_values_are_torch_optims(case: Case, loss: Loss, begin: Callable[[], list[Tensor]], trace: bool) -> None:
    case.rule.validate(case.settings())
    found, _ = unroll(case.rule, case.settings(), begin(), loss=loss, trace=trace)
    assert_equal(found, Reference(case, begin(), loss).run(20))


@pytest.mark.parametrize("case", [c for c in CASES if c.kind is optim.SGD and not isinstance(c.options["lr"], Tensor)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_sgd_is_bit_identical(case: Case, dtype: torch.dtype) -> None:
    params = [p.to(dtype) for p in start()]
    found, _ = unroll(case.rule, case.settings(), params, X.to(dtype))
    for a, e in zip(found, Reference(case, params).run(20, X.to(dtype)), strict=True):
        assert torch.equal(a, e)


@every_case
def test_complex_parameters_are_two_real_ones(case: Case) -> None:
    def loss(params: Sequence[Tensor], x: Tensor, k: int) -> Tensor:
        return (params[0] * x - (1 + 2j)).abs().square().sum() + params[0].real.sin().sum()

    params = [torch.tensor([0.5 + 1j, -1.0 - 0.2j])]
    if case.kind is optim.Adafactor:
        with pytest.raises(ValueError, match=r"real parameters; got torch.complex128"):
            case.rule.init(params, case.settings())
        return
    found, state = unroll(case.rule, case.settings(), params, loss=loss, steps=7)
    reference = Reference(case, params, loss)
    assert_equal(found, reference.run(7))
    lr = torch.as_tensor(case.settings()["lr"])
    listed, _ = unroll(case.rule, case.settings(lr=[lr.expand(2).clone()]), params, loss=loss, steps=7)
    assert_equal(listed, found)
    adopted = (case.rule.adopt(reference.optimizer.state[reference.params[0]], params[0], case.settings()),)
    assert form(adopted) == form(state)


@every_case
def test_parameters_without_elements(case: Case) -> None:
    """A mean over no elements would be NaN, and would reach the derivative of the rate."""
    lr = torch.tensor(0.1, requires_grad=True)

    def loss(params: Sequence[Tensor], x: Tensor, k: int) -> Tensor:
        return (params[0] - x).square().sum() + sum(p.sum() for p in params[1:])

    params = [torch.tensor([0.5, -1.0]), torch.zeros(0), torch.zeros(0, 3), torch.zeros(2, 0)]
    found, _ = unroll(case.rule, case.settings(lr=lr), params, loss=loss, steps=3, graph=True)
    assert [p.shape for p in found] == [p.shape for p in params]
    alone, _ = unroll(case.rule, case.settings(lr=lr), params[:1], loss=loss, steps=3, graph=True)
    assert torch.equal(found[0], alone[0])
    slopes = [torch.autograd.grad(sum(p.sum() for p in some), lr)[0] for some in (found, alone)]
    assert torch.equal(*slopes) and slopes[0].isfinite()


@every_case
def test_adopted_state_goes_on_as_torch_does(case: Case) -> None:
    reference = Reference(case, start())
    for steps in (0, 7, 1):  # an empty state, a running one, and a second round
        params, settings = reference.run(steps), case.settings()
        live = reference.optimizer.state
        state = tuple(case.rule.adopt(live.get(p, {}), p, settings, index=i) for i, p in enumerate(reference.params))
        assert form(state) == form(case.rule.init(params, settings))
        first = reference.k
        found, _ = unroll(case.rule, settings, params, state=state, first=first, steps=7)
        assert_equal(found, reference.run(7))


def test_adopted_state_is_a_copy() -> None:
    reference = Reference(Case(optim.Adam, {}), start())
    reference.run(3)
    param = reference.params[0]
    state = Adam().adopt(reference.optimizer.state[param], param, {"lr": 0.1})
    before = state["exp_avg"].clone()
    reference.run(1)
    assert state["step"] == 3 and torch.equal(state["exp_avg"], before) and not state["exp_avg"].requires_grad
    assert SGD().adopt({"momentum_buffer": None}, param, {}) == {}
    buffered = SGD().adopt({"momentum_buffer": None}, param, {"momentum": 0.9, "dampening": 0.5})
    assert buffered["step"] == 0 and not buffered["momentum_buffer"].any()


@pytest.mark.parametrize("case", [c for c in CASES if not isinstance(c.options.get("lr"), Tensor)], ids=str)
def test_rules_of_a_moving_rate_follow_a_scheduler_as_torch_does(case: Case) -> None:
    reference = Reference(case, start())
    scheduler = optim.lr_scheduler.ExponentialLR(reference.optimizer, 0.7)
    params, state = start(), None
    for k in range(6):
        expected = reference.run(1)
        settings = case.settings(lr=scheduler.get_last_lr()[0])
        params, state = unroll(case.rule, settings, params, steps=1, first=k, state=state)
        assert_equal(params, expected)
        scheduler.step()


# Settings of single parameters.


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_list_has_one_tensor_per_parameter(case: Case) -> None:
    rule, params = case.rule, start()
    rates = [0.05, 0.1, 0.02, 0.07]
    lists = {"lr": [torch.tensor([r]) for r in rates]}
    if "weight_decay" in rule.defaults:
        lists["weight_decay"] = [torch.tensor(r) for r in rates]
    if case.settings().get("momentum"):
        lists["momentum"] = [torch.tensor(10 * r) for r in rates]
    settings = case.settings(**lists)
    rule.validate(settings)
    grads = [torch.ones_like(p) for p in params]
    state = rule.init(params, settings)
    alone = case.settings()
    for _ in range(3):
        moves, new = rule.update(grads, state, params, settings)
        for i, (move, param) in enumerate(zip(moves, params, strict=True)):
            own = {**alone, **{key: values[i] for key, values in lists.items()}}
            (expected,), _ = rule.update([grads[i]], (state[i],), [param], own)
            assert move.displacement().shape == param.shape
            torch.testing.assert_close(move.displacement(), expected.displacement(), **EXACT)
        state = new


def test_rates_per_element_are_learned() -> None:
    rates = [torch.full_like(p, 0.1).requires_grad_() for p in start()]

    def run(*lr: Tensor) -> tuple[Tensor, ...]:
        return tuple(unroll(Adam(), {"lr": list(lr)}, start(), steps=3, graph=True)[0])

    assert_equal(run(*rates), unroll(Adam(), {"lr": 0.1}, start(), steps=3)[0])
    assert torch.autograd.gradcheck(run, rates, atol=1e-6, rtol=1e-5)


def test_a_list_that_does_not_fit_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"`lr` of SGD must as a list fit the parameters' shapes \[\(3,\), \(2,\)\]; got"
    ):
        SGD().init([torch.zeros(3), torch.zeros(2)], {"lr": [torch.ones(3)]})
    with pytest.raises(ValueError, match=r"got \[\(3,\), \(3,\)\]"):
        SGD().init([torch.zeros(3), torch.zeros(2)], {"lr": [torch.ones(3), torch.ones(3)]})
    with pytest.raises(ValueError, match="as a list hold one floating-point tensor per parameter"):
        SGD().validate({"lr": [0.1, 0.2]})


# Dtypes, tracing, tasks.


@pytest.mark.parametrize("trace", [False, True], ids=["eager", "traced"])
@pytest.mark.parametrize("lr", [0.1, tensor(0.1), torch.tensor([0.1])], ids=["number", "double", "float"])
@every_rule
def test_float32_stays_float32(rule: Any, lr: Any, trace: bool) -> None:
    torch.set_default_dtype(torch.float32)
    params = [p.float() for p in start()]
    settings: dict[str, Any] = {"lr": lr}
    learned = {"betas": (tensor(0.9), tensor(0.99)), "momentum": tensor(0.9), "weight_decay": tensor(0.1)}
    settings.update({key: v for key, v in learned.items() if key in rule.defaults and isinstance(lr, Tensor)})
    state = rule.init(params, settings)
    state = traced(state) if trace else state
    for _ in range(7):
        points = rule.point(params, state, settings)
        moves, state = rule.update([p * 0.1 + 0.2 for p in points], state, params, settings)
        params = [apply(p, move) for p, move in zip(params, moves, strict=True)]
        assert [p.dtype for p in (*points, *params)] == [torch.float32] * 8
        assert [p.shape for p in params] == [p.shape for p in start()]
    whole = [v for part in state for v in part.values() if isinstance(v, Tensor) and v.dtype != torch.float64]
    assert all(v.dtype == torch.float32 for v in whole)


@every_rule
def test_a_traced_step_is_one_graph_for_every_step_count(rule: Any) -> None:
    options = {"momentum": 0.9, "dampening": 0.5, "amsgrad": True, "centered": True, "weight_decay": 0.1}
    settings = {**rule.defaults, **{key: v for key, v in options.items() if key in rule.defaults}}
    params = start()[:2]
    found, spec = tree_flatten((params, traced(rule.init(params, settings))))

    def step(*flat: Tensor) -> list[Tensor]:
        params, state = tree_unflatten(list(flat), spec)
        points = rule.point(params, state, settings)
        moves, state = rule.update([p.sin() for p in points], state, params, settings)
        return tree_leaves(([apply(p, move) for p, move in zip(params, moves, strict=True)], state))

    graph = trace_graph(step, found)
    eager = found
    for _ in range(3):
        eager, found = step(*eager), graph(*found)
        assert_equal(found, eager)


@every_rule
def test_tasks_are_stacked_or_mapped(rule: Any) -> None:
    tasks = [[p + 0.1 * b for p in start()] for b in range(3)]
    settings = {**rule.defaults, "lr": 0.05}
    alone = [unroll(rule, settings, params, steps=0)[0] for params in tasks]
    states = [rule.init(params, settings) for params in tasks]
    stacked = [torch.stack(parts) for parts in zip(*tasks, strict=True)]
    state = rule.init(stacked, settings)
    if not rule.elementwise:
        state = torch.func.vmap(lambda *p: tuple(_tensors(s) for s in rule.init(p, settings)))(*stacked)
    for k in range(1, 4):
        for b in range(3):
            grads = [p.sin() for p in alone[b]]
            moves, states[b] = rule.update(grads, states[b], alone[b], settings)
            alone[b] = [apply(p, move) for p, move in zip(alone[b], moves, strict=True)]
        if rule.elementwise:
            moves, state = rule.update([p.sin() for p in stacked], state, stacked, settings)
            stacked = [apply(p, move) for p, move in zip(stacked, moves, strict=True)]
        else:

            def one(params: list[Tensor], state: Any, count: int = k) -> Any:
                grads = [p.sin() for p in params]
                moves, new = rule.update(grads, [{"step": count - 1, **s} for s in state], params, settings)
                return [apply(p, m) for p, m in zip(params, moves, strict=True)], tuple(_tensors(s) for s in new)

            stacked, state = torch.func.vmap(one)(list(stacked), state)
    for i, found in enumerate(stacked):
        torch.testing.assert_close(found.detach(), torch.stack([a[i].detach() for a in alone]), **EXACT)


def _tensors(state: dict[str, Any]) -> dict[str, Tensor]:
    return {key: value for key, value in state.items() if isinstance(value, Tensor)}


def test_nothing_is_changed_in_place() -> None:
    for case in CASES:
        params, settings = start(), case.settings()
        state = case.rule.init(params, settings)
        grads = [torch.ones_like(p) for p in params]
        for _ in range(2):
            everything = [*params, *grads, *(v for part in state for v in part.values() if isinstance(v, Tensor))]
            versions = [t._version for t in everything]
            _, new = case.rule.update(grads, state, params, settings)
            assert [t._version for t in everything] == versions
            state = new


@every_rule
def test_a_state_shares_no_memory(rule: Any) -> None:
    params, settings = start(), {"lr": tensor(0.1)}
    state = rule.init(params, settings)
    memory = [v.data_ptr() for part in state for v in part.values() if isinstance(v, Tensor)]
    assert len({*memory, *(p.data_ptr() for p in params), settings["lr"].data_ptr()}) == len(memory) + len(params) + 1


def test_a_gradient_may_be_a_lazy_conjugate() -> None:
    params = [torch.tensor([1.0 + 2j])]
    for grad in (torch.tensor([0.5 - 1j]), torch.tensor([0.5 + 1j]).conj()):
        (move,), _ = Adam().update([grad], Adam().init(params, {}), params, {"lr": 1.0})
        assert move is not None
        torch.testing.assert_close(move.displacement(), torch.tensor([1.0 - 1j]), rtol=1e-6, atol=0.0)


def test_betas_may_be_a_list() -> None:
    learned = [torch.tensor([0.8]), torch.tensor([0.9])]
    Adam().validate({"betas": learned})
    found = unroll(Adam(), {"lr": 0.1, "betas": learned}, start())[0]
    assert_equal(found, unroll(Adam(), {"lr": 0.1, "betas": (0.8, 0.9)}, start())[0])
