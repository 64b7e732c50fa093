"""Every rule against torch.optim, finite differences and forward mode; one table of configurations drives the tests."""

from __future__ import annotations

import inspect
import math
import pickle
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, optim
from torch.autograd import forward_ad

from bda_optim._step.rules.adam import Adam
from bda_optim._step.rules.base import ParameterRule, _root
from bda_optim._step.rules.fista import FISTA
from bda_optim._step.rules.resolve import _REFUSED, _RULES, resolve
from bda_optim._step.rules.sgd import SGD
from bda_optim._support.types import Move, Rule

SWITCHES = {"foreach", "fused", "capturable", "differentiable"}
RENAMED = {"alpha": "rule_alpha"}
EXACT = {"rtol": 1e-12, "atol": 1e-12}
pytestmark = pytest.mark.usefixtures("doubles")  # torch.optim keeps some scalars of its state in the default dtype
Loss = Callable[[Sequence[Tensor], Tensor, int], Tensor]


class Case(NamedTuple):
    """A configuration, in torch.optim's words."""

    kind: Any
    options: dict[str, Any]

    @property
    def rule(self) -> Any:
        return resolve(self.kind)

    def settings(self, **more: Any) -> dict[str, Any]:
        return {**self.rule.defaults, **{RENAMED.get(key, key): v for key, v in self.options.items()}, **more}

    def __str__(self) -> str:
        options = "-".join(f"{key}={v.item() if isinstance(v, Tensor) else v}" for key, v in self.options.items())
        return f"{self.kind.__name__}-{options}".rstrip("-").replace(" ", "")


def tensor(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


CASES = [
    Case(kind, options)
    for kind, table in {
        optim.SGD: [
            {"lr": 0.1},
            {"lr": 0.1, "weight_decay": 0.1, "maximize": True},
            {"lr": 0.1, "momentum": 0.9},
            {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1},
            {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
            {"lr": tensor(0.1), "momentum": 0.5},
        ],
        optim.Adam: [
            {"lr": 0.05},
            {"lr": 0.05, "amsgrad": True, "betas": (0.5, 0.6)},
            {"lr": 0.05, "weight_decay": 0.1, "maximize": True},
            {"lr": 0.05, "weight_decay": 0.1, "decoupled_weight_decay": True},
            {"lr": 0.05, "eps": 1e-2, "betas": (0.3, 0.9)},
            {"lr": tensor(0.05)},
        ],
        optim.AdamW: [{"lr": 0.05}, {"lr": 0.05, "amsgrad": True, "weight_decay": 0.2, "maximize": True}],
        optim.Adamax: [{"lr": 0.05}, {"lr": 0.05, "betas": (0.5, 0.7), "weight_decay": 0.1, "maximize": True}],
        optim.NAdam: [
            {"lr": 0.05},
            {"lr": 0.05, "weight_decay": 0.1, "momentum_decay": 0.5},
            {"lr": 0.05, "weight_decay": 0.1, "decoupled_weight_decay": True, "maximize": True},
        ],
        optim.RAdam: [
            {"lr": 0.05},
            {"lr": 0.05, "betas": (0.8, 0.9), "weight_decay": 0.1},
            {"lr": 0.05, "betas": (0.8, 0.6), "weight_decay": 0.1, "decoupled_weight_decay": True},
            {"lr": 0.05, "betas": (0.8, 0.3), "maximize": True},
        ],
        optim.RMSprop: [
            {"lr": 0.02},
            {"lr": 0.02, "alpha": 0.8, "centered": True},
            {"lr": 0.02, "momentum": 0.6, "weight_decay": 0.1},
            {"lr": 0.02, "centered": True, "momentum": 0.6, "maximize": True},
        ],
        optim.Rprop: [{"lr": 0.05}, {"lr": 0.3, "etas": (0.4, 1.5), "step_sizes": (0.1, 0.5), "maximize": True}],
        optim.Adagrad: [
            {"lr": 0.1},
            {"lr": 0.1, "lr_decay": 0.1, "weight_decay": 0.1},
            {"lr": tensor(0.1), "initial_accumulator_value": 0.2, "maximize": True},
        ],
        optim.Adadelta: [{}, {"lr": 0.5, "rho": 0.7, "eps": 1e-3, "weight_decay": 0.1, "maximize": True}],
        optim.ASGD: [
            {"lr": 0.1},
            {"lr": 0.1, "lambd": 0.3, "t0": 3.0, "alpha": 0.6, "weight_decay": 0.1, "maximize": True},
            {"lr": tensor(0.1), "lambd": 0.1, "t0": 0.0},
        ],
        optim.Adafactor: [
            {"lr": 0.05},
            {"lr": 0.9, "beta2_decay": -0.5, "eps": (1e-4, 1e-2), "weight_decay": 0.1},
            {"lr": tensor(0.05), "d": 1.5, "maximize": True},
        ],
    }.items()
    for options in table
]
every_case = pytest.mark.parametrize("case", CASES, ids=str)
every_rule = pytest.mark.parametrize("rule", [*_RULES.values(), FISTA()], ids=lambda rule: rule.name)


def start() -> list[Tensor]:
    """A matrix, a vector, a scalar and a vector that has no gradient at some steps."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((3, 2), (3,), (), (2,))]


X = torch.tensor([0.3, -0.8], dtype=torch.float64)


def generic(params: Sequence[Tensor], x: Tensor, k: int) -> Tensor:
    """A bounded-below loss that couples everything, `x` included; the last parameter is absent from some steps."""
    weight, bias, scale, idle = params
    loss = torch.tanh(weight @ x + bias).square().sum() + 0.5 * (scale - x.sum()).square() + 0.1 * weight.square().sum()
    loss = loss + (bias * torch.arange(1.0, 4.0)).sin().sum() * scale.cos()
    return loss if k % 3 == 0 else loss + (idle.sin() * x).sum() + 0.3 * idle.square().sum()


def vanishing(params: Sequence[Tensor], x: Tensor, k: int) -> Tensor:
    """A loss whose gradient vanishes where a parameter equals `x[0]`, and everywhere in the idle one."""
    weight, bias, scale, idle = params
    target = x[0]
    return sum((p - target).square().sum() for p in (weight, bias, scale)) + 0.0 * idle.sum()  # type: ignore[return-value]


def flat_start() -> list[Tensor]:
    """Where the gradient of `vanishing` is zero: everywhere but in one row of the matrix."""
    params = [torch.full_like(p, X[0].item()) for p in start()]
    params[0][1] += 1.0
    params[3] = torch.zeros_like(params[3])
    return params


def apply(param: Tensor, move: Move | None) -> Tensor:
    if move is None:
        return param
    if isinstance(move.scale, Tensor):
        return param - move.displacement()
    return torch.add(param, move.direction, alpha=-move.scale)


def traced(state: Any) -> Any:
    """The state as it is while a step is traced: numbers are 0-dim float64 tensors."""
    return tuple(
        {key: v if isinstance(v, Tensor) else torch.tensor(float(v), dtype=torch.float64) for key, v in part.items()}
        for part in state
    )


def form(state: Any) -> Any:
    return [
        {k: (tuple(v.shape), v.dtype) if isinstance(v, Tensor) else type(v) for k, v in part.items()} for part in state
    ]


def unroll(
    rule: Rule,
    settings: dict[str, Any],
    params: Sequence[Tensor],
    x: Tensor = X,
    *,
    loss: Loss = generic,
    steps: int = 20,
    state: Any = None,
    first: int = 0,
    graph: bool = False,
    trace: bool = False,
) -> tuple[list[Tensor], Any]:
    """Run the rule as the library does; with a graph, or step by step without."""
    state = rule.init(params, settings) if state is None else state
    state = traced(state) if trace else state
    params = [p if graph and p.requires_grad else p.detach().requires_grad_() for p in params]
    for k in range(first, first + steps):
        before = form(state)
        points = rule.point(params, state, settings)
        points = points if graph else [p.detach().requires_grad_() for p in points]
        grads = torch.autograd.grad(loss(points, x, k), points, create_graph=graph, allow_unused=True)
        moves, state = rule.update(grads, state, params, settings)
        assert form(state) == before, "keys, shapes and dtypes of a state stay"
        params = [apply(p, move) for p, move in zip(params, moves, strict=True)]
        if not graph:
            params = [p.detach().requires_grad_() for p in params]
            state = tuple({k: v.detach() if isinstance(v, Tensor) else v for k, v in part.items()} for part in state)
    return list(params), state


class Reference:
    """The same loop with torch.optim."""

    def __init__(self, case: Case, params: Sequence[Tensor], loss: Loss = generic, **more: Any) -> None:
        self.params, self.loss, self.k = [p.detach().clone().requires_grad_() for p in params], loss, 0
        options = {k: v.clone() if isinstance(v, Tensor) else v for k, v in case.options.items()}
        self.optimizer = case.kind(self.params, **options, foreach=False, **more)

    def run(self, steps: int, x: Tensor = X) -> list[Tensor]:
        for _ in range(steps):
            self.optimizer.zero_grad(set_to_none=True)
            self.loss(self.params, x, self.k).backward()
            self.optimizer.step()
            self.k += 1
        return [p.detach().clone() for p in self.params]


def assert_equal(actual: Sequence[Tensor], expected: Sequence[Tensor], **tolerance: float) -> None:
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a.detach(), e.detach(), **(tolerance or EXACT))


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
def test_parameters_without_elements_are_no_trouble(case: Case) -> None:
    """Means over nothing would be NaN, and would reach the derivative of the rate."""
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
    for steps in (0, 7, 1):  # an empty state; a running one; and another round
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


def test_rules_of_a_moving_rate_follow_a_scheduler_as_torch_does() -> None:
    for case in CASES:
        if isinstance(case.options.get("lr"), Tensor):
            continue
        reference = Reference(case, start())
        scheduler = optim.lr_scheduler.ExponentialLR(reference.optimizer, 0.7)
        params, state = start(), None
        for k in range(6):
            expected = reference.run(1)
            settings = case.settings(lr=scheduler.get_last_lr()[0])
            params, state = unroll(case.rule, settings, params, steps=1, first=k, state=state)
            assert_equal(params, expected)
            scheduler.step()


# Derivatives.


def final(case: Case, steps: int, settings: dict[str, Any], loss: Loss = generic) -> Callable[..., tuple[Tensor, ...]]:
    """The last iterate as a function of the initial one, of lr and of the loss's own variable."""

    def run(weight: Tensor, bias: Tensor, scale: Tensor, idle: Tensor, lr: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        params = [weight, bias, scale, idle]
        return tuple(unroll(case.rule, {**settings, "lr": lr}, params, x, loss=loss, steps=steps, graph=True)[0])

    return run


def inputs(case: Case, begin: Callable[[], list[Tensor]] = start) -> list[Tensor]:
    lr = torch.as_tensor(case.settings()["lr"]).clone()
    return [t.detach().clone().requires_grad_() for t in (*begin(), lr, X)]


def horizon(case: Case) -> int:
    return 8 if case.kind is optim.RAdam else 5  # its second branch begins at step 6


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
@every_case
def test_derivatives_have_two_witnesses(case: Case) -> None:
    function, points = final(case, horizon(case), case.settings()), inputs(case)
    assert torch.autograd.gradcheck(function, points, atol=1e-6, rtol=1e-5)
    generator = torch.Generator().manual_seed(2)
    tangents = [torch.randn(p.shape, generator=generator) for p in points]
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(p, t) for p, t in zip(points, tangents, strict=True)]
        out = [forward_ad.unpack_dual(y) for y in function(*duals)]
        weights = [torch.randn(o.primal.shape, generator=generator) for o in out]
        forward = sum((w * o.tangent).sum() for w, o in zip(weights, out, strict=True) if o.tangent is not None)
    value = sum((w * y).sum() for w, y in zip(weights, function(*points), strict=True))
    grads = torch.autograd.grad(value, points, allow_unused=True)
    reverse = sum((g * t).sum() for g, t in zip(grads, tangents, strict=True) if g is not None)
    torch.testing.assert_close(forward.detach(), reverse, rtol=1e-9, atol=1e-9)


@every_case
def test_tracing_leaves_the_derivative_alone(case: Case) -> None:
    grads = []
    for trace in (False, True):
        points = inputs(case)
        *params, lr, x = points
        out, _ = unroll(case.rule, case.settings(lr=lr), params, x, steps=horizon(case), graph=True, trace=trace)
        grads.append(torch.autograd.grad(sum(y.sin().sum() for y in out), points))
    assert_equal(grads[1], grads[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("trace", [False, True], ids=["eager", "traced"])
@every_case
def test_derivatives_are_finite_where_gradients_vanish(case: Case, trace: bool) -> None:
    points = inputs(case, flat_start)
    *params, lr, x = points
    steps = horizon(case)
    out, _ = unroll(case.rule, case.settings(lr=lr), params, x, loss=vanishing, steps=steps, graph=True, trace=trace)
    first = torch.autograd.grad(sum(y.sum() for y in out), points, create_graph=True)
    assert all(torch.isfinite(g).all() for g in first)
    if any(g.requires_grad for g in first):
        second = torch.autograd.grad(sum(g.sum() for g in first), points, allow_unused=True)
        assert all(torch.isfinite(g).all() for g in second if g is not None)


def test_adams_derivative_at_a_zero_gradient_is_one_over_eps() -> None:
    grad = torch.zeros(3, requires_grad=True)
    for rule, expected in ((Adam(), 1 / 1e-3), (resolve(optim.RMSprop), 1 / 1e-3), (resolve(optim.Adagrad), 1 / 1e-3)):
        params, settings = [torch.ones(3)], {"eps": 1e-3, "lr": 1.0}
        moves, _ = rule.update([grad], rule.init(params, settings), params, settings)
        assert moves[0] is not None
        (found,) = torch.autograd.grad(moves[0].displacement().sum(), grad)
        torch.testing.assert_close(found, torch.full((3,), expected))


def test_centered_variance_below_zero_counts_as_zero() -> None:
    rule, params = resolve(optim.RMSprop), [torch.zeros(1)]
    settings = {"centered": True, "rule_alpha": 0.5, "eps": 0.1, "lr": 1.0}
    state = ({"step": 5, "square_avg": torch.tensor([1.0 - 1e-9]), "grad_avg": torch.tensor([1.0])},)
    grad = torch.ones(1, requires_grad=True)
    moves, _ = rule.update([grad], state, params, settings)
    assert moves[0] is not None
    torch.testing.assert_close(moves[0].direction.detach(), torch.tensor([10.0]))
    assert torch.isfinite(torch.autograd.grad(moves[0].direction.sum(), grad)[0]).all()


def test_the_safe_root() -> None:
    x = torch.tensor([4.0, 0.0, -1e-9], requires_grad=True)
    assert _root(x).tolist() == [2.0, 0.0, 0.0] and _root(torch.tensor(math.nan)).isnan()
    assert torch.autograd.grad(_root(x).sum(), x)[0].tolist() == [0.25, 0.0, 0.0]


def test_learned_betas_in_float32_are_corrected_in_double() -> None:
    params, grads, found = [torch.ones(3, dtype=torch.float32)], [torch.full((3,), 0.5, dtype=torch.float32)], []
    for betas in ((0.9, 0.999), (torch.tensor(0.9, dtype=torch.float32), torch.tensor(0.999, dtype=torch.float32))):
        settings = {"lr": 1.0, "betas": betas}
        state = Adam().init(params, settings)
        for _ in range(2):
            (move,), state = Adam().update(grads, state, params, settings)
        assert move is not None
        found.append(move.displacement())
    torch.testing.assert_close(found[1], found[0], rtol=1e-6, atol=0.0)


def test_a_diverged_gradient_is_not_hidden() -> None:
    for case in CASES:
        if case.kind is optim.Rprop:
            continue
        params = [torch.ones(2)]
        moves, _ = case.rule.update(
            [torch.full((2,), math.nan)], case.rule.init(params, case.settings()), params, case.settings()
        )
        assert moves[0].displacement().isnan().all(), case


LEARNED = [
    (optim.SGD, {"momentum": 0.8, "weight_decay": 0.2, "dampening": 0.3}),
    (optim.SGD, {"momentum": 0.8, "nesterov": True}),
    (optim.Adam, {"betas": (0.7, 0.8), "eps": 0.1, "weight_decay": 0.2}),
    (optim.Adam, {"betas": (0.7, 0.8), "amsgrad": True, "weight_decay": 0.2, "decoupled_weight_decay": True}),
    (optim.AdamW, {"betas": (0.7, 0.8), "weight_decay": 0.2}),
    (optim.Adamax, {"betas": (0.7, 0.8), "eps": 0.1, "weight_decay": 0.2}),
    (optim.NAdam, {"betas": (0.7, 0.8), "momentum_decay": 0.3, "weight_decay": 0.2}),
    (optim.RAdam, {"betas": (0.7, 0.9), "eps": 0.1, "weight_decay": 0.2}),
    (optim.RAdam, {"betas": (0.7, 0.6)}),
    (optim.RMSprop, {"rule_alpha": 0.8, "eps": 0.1, "momentum": 0.5, "centered": True, "weight_decay": 0.2}),
    (optim.Adagrad, {"lr_decay": 0.3, "eps": 0.1, "weight_decay": 0.2}),
    (optim.Adadelta, {"rho": 0.7, "eps": 0.1, "weight_decay": 0.2}),
    (optim.ASGD, {"lambd": 0.3, "rule_alpha": 0.6, "weight_decay": 0.2, "lr": 0.1}),
    (optim.Adafactor, {"beta2_decay": -0.7, "d": 1.2, "eps": (0.1, 0.2), "weight_decay": 0.2}),
    (FISTA, {"lr": 0.1, "weight_decay": 0.2}),
]


@pytest.mark.parametrize(("kind", "numbers"), LEARNED, ids=lambda v: "-".join(v) if isinstance(v, dict) else v.__name__)
def test_any_number_can_be_learned(kind: Any, numbers: dict[str, Any]) -> None:
    rule, flags = resolve(kind), {key: v for key, v in numbers.items() if isinstance(v, bool)}
    keys = [key for key in numbers if key not in flags]
    sizes = [len(numbers[key]) if isinstance(numbers[key], tuple) else 1 for key in keys]
    values = [v for key in keys for v in (numbers[key] if isinstance(numbers[key], tuple) else (numbers[key],))]

    def settings(*learned: Any) -> dict[str, Any]:
        source = iter(learned)
        parts = [tuple(next(source) for _ in range(size)) for size in sizes]
        return {
            key: part if isinstance(numbers[key], tuple) else part[0] for key, part in zip(keys, parts, strict=True)
        }

    def run(*learned: Tensor) -> tuple[Tensor, ...]:
        full = {"lr": 0.05, **settings(*learned), **flags}
        rule.validate(full)
        return tuple(unroll(rule, full, start(), steps=8, graph=True)[0])

    learned = [torch.tensor([v]).requires_grad_() for v in values]  # one element, but not 0-dim
    expected, _ = unroll(rule, {"lr": 0.05, **numbers}, start(), steps=8)
    assert_equal(run(*learned), expected)
    assert torch.autograd.gradcheck(run, learned, atol=1e-6, rtol=1e-5)


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
def test_a_traced_step_compiles_in_one_graph(rule: Any) -> None:
    options = {"momentum": 0.9, "dampening": 0.5, "amsgrad": True, "centered": True, "weight_decay": 0.1}
    settings = {**rule.defaults, **{key: v for key, v in options.items() if key in rule.defaults}}
    params = start()[:2]
    state = traced(rule.init(params, settings))

    def step(params: list[Tensor], state: Any) -> Any:
        points = rule.point(params, state, settings)
        moves, state = rule.update([p.sin() for p in points], state, params, settings)
        return [apply(p, move) for p, move in zip(params, moves, strict=True)], state

    torch._dynamo.reset()
    compiled = torch.compile(step, backend="eager", fullgraph=True)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    eager, eager_state, found, found_state = params, state, params, state
    for _ in range(3):
        eager, eager_state = step(eager, eager_state)
        found, found_state = compiled(found, found_state)
    assert_equal(found, eager)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs + 1, "compiled anew for another step count"
    torch._dynamo.reset()


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


# FISTA.


def fista_by_the_book(y: Tensor, matrix: Tensor, rhs: Tensor, lr: float, threshold: float, steps: int) -> Tensor:
    """Beck & Teboulle's constant step size algorithm for ``|A y - b|^2 / 2 + threshold |y|_1``, in their notation."""
    x_old, z, t = y, y, 1.0
    for _ in range(steps):
        forward = z - lr * matrix.T @ (matrix @ z - rhs)
        x = forward.sign() * (forward.abs() - lr * threshold).clamp(min=0)
        t_next = (1 + math.sqrt(1 + 4 * t * t)) / 2
        z = x + (t - 1) / t_next * (x - x_old)
        x_old, t = x, t_next
    return x_old


@pytest.mark.parametrize("trace", [False, True], ids=["eager", "traced"])
@pytest.mark.parametrize("threshold", [0.0, 0.3])
def test_fista_is_the_textbook_loop(threshold: float, trace: bool) -> None:
    matrix, rhs, y = torch.randn(6, 4), torch.randn(6), torch.randn(4)
    lr = 1 / torch.linalg.matrix_norm(matrix, 2).item() ** 2
    rule, settings = resolve(FISTA), {"lr": lr}
    state = rule.init([y], settings)
    state = traced(state) if trace else state
    found = y
    for _ in range(15):
        (z,) = rule.point([found], state, settings)
        (move,), state = rule.update([matrix.T @ (matrix @ z - rhs)], state, [found], settings)
        assert move is not None and move.scale == 1.0
        forward = apply(found, move)
        found = forward.sign() * (forward.abs() - lr * threshold).clamp(min=0)
    torch.testing.assert_close(found, fista_by_the_book(y, matrix, rhs, lr, threshold, 15), **EXACT)


def test_fista_is_faster_than_descent_and_keeps_its_bound() -> None:
    curvature = torch.logspace(-4, 0, 50)
    y0 = torch.ones(50)

    def loss(params: Sequence[Tensor], x: Tensor, k: int) -> Tensor:
        return 0.5 * (curvature * params[0].square()).sum()

    for steps in (50, 200):
        values = {}
        for rule in (FISTA(), SGD()):
            (y,), _ = unroll(rule, {"lr": 1.0}, [y0], loss=loss, steps=steps)
            values[rule.name] = loss([y], X, 0).item()
        assert values["FISTA"] <= 2 * y0.square().sum().item() / (steps + 1) ** 2
        assert values["FISTA"] < values["SGD"] / 5


def test_fistas_weight_decay_is_a_quadratic_of_the_loss() -> None:
    def decayed(params: Sequence[Tensor], x: Tensor, k: int) -> Tensor:
        return generic(params, x, 1) + 0.1 * sum(p.square().sum() for p in params)

    found, _ = unroll(FISTA(), {"lr": 0.1, "weight_decay": 0.2}, start(), loss=lambda p, x, k: generic(p, x, 1))
    assert_equal(found, unroll(FISTA(), {"lr": 0.1}, start(), loss=decayed)[0])


def test_fista_is_differentiable_from_the_first_step() -> None:
    case = Case(FISTA, {"lr": 0.1, "weight_decay": 0.1, "maximize": True})
    for steps in (1, 2, 5):
        assert torch.autograd.gradcheck(final(case, steps, case.settings()), inputs(case), atol=1e-6, rtol=1e-5)


# Which rule is meant, and what is refused.


def test_every_optimizer_of_torch_is_supported_or_refused() -> None:
    known = {v for v in vars(optim).values() if isinstance(v, type) and issubclass(v, optim.Optimizer)}
    supported, refused = set(_RULES), {getattr(optim, name) for name in _REFUSED if hasattr(optim, name)}
    assert known - {optim.Optimizer} == supported | refused
    assert supported == {case.kind for case in CASES}
    for kind in supported:
        rule = resolve(kind)
        assert rule.name == kind.__name__ and rule.elementwise == (kind is not optim.Adafactor)
        signature = inspect.signature(kind).parameters.values()
        expected = {RENAMED.get(p.name, p.name): p.default for p in signature if p.name not in {"params", *SWITCHES}}
        assert dict(rule.defaults) == expected
        rule.validate(rule.defaults)


@pytest.mark.parametrize(
    ("kind", "error", "words"),
    [
        (
            optim.LBFGS,
            ValueError,
            "must be differentiable; got torch.optim.LBFGS: a line search.*Use `bda_optim.FISTA`",
        ),
        (optim.SparseAdam, ValueError, "got torch.optim.SparseAdam: sparse gradients.*Use `torch.optim.Adam`"),
        (optim.Muon, ValueError, "got torch.optim.Muon: it iterates in bfloat16.*Use `torch.optim.AdamW`"),
        (optim.SGD([torch.zeros(1)], 0.1), TypeError, "must be a class.*got an instance of SGD. Pass the class"),
        (type("Mine", (optim.Adam,), {}), TypeError, "got .*Mine, whose `step` cannot be honoured. Use ASGD, Adadelta"),
        (type("LBFGS", (optim.SGD,), {}), TypeError, "LBFGS, whose `step` cannot be honoured"),
        (optim.Optimizer, TypeError, "cannot be honoured"),
        ("adam", TypeError, "must have name, defaults.*got 'adam'. Use a class of torch.optim"),
        (dict, TypeError, "must have name"),
    ],
)
def test_refusals(kind: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        resolve(kind)


def test_rules_resolve_to_themselves() -> None:
    class Sign(ParameterRule):
        defaults = {"lr": 0.1}  # noqa: RUF012

        def _move(self, grad: Tensor, state: Any, param: Tensor, s: Any) -> Any:
            return Move(grad.sign(), s["lr"]), {"step": state["step"] + 1}

    own = Sign()
    assert resolve(own) is own and resolve(Sign) == own and resolve(None) == SGD() == resolve(SGD)
    assert resolve(FISTA) == FISTA() != SGD() and repr(resolve(optim.Adam)) == "Adam()"
    assert pickle.loads(pickle.dumps(FISTA())) == FISTA() and hash(SGD()) == hash(SGD())
    (y,), _ = unroll(own, {"lr": 0.1}, [torch.tensor([1.0])], loss=lambda p, x, k: p[0].square().sum(), steps=3)
    torch.testing.assert_close(y.detach(), torch.tensor([0.7]))
    with pytest.raises(NotImplementedError, match="does not define `_move`"):
        ParameterRule().update([torch.ones(1)], ({},), [torch.ones(1)], {})


@pytest.mark.parametrize(
    ("kind", "settings", "words"),
    [
        (optim.SGD, {"lr": -0.1}, r"`lr` of SGD must be at least 0; got -0.1. The default is 0.001."),
        (optim.SGD, {"lr": math.nan}, "`lr` of SGD must be at least 0; got nan"),
        (optim.SGD, {"lr": "0.1"}, "`lr` of SGD must be at least 0; got 0.1"),
        (optim.SGD, {"lr": True}, "`lr` of SGD must be at least 0; got True"),
        (optim.SGD, {"momentum": -1}, "`momentum` of SGD must be at least 0; got -1"),
        (optim.SGD, {"nesterov": True}, "`nesterov` needs a momentum above 0 and dampening 0; got `momentum`=0.0"),
        (optim.SGD, {"nesterov": True, "momentum": 0.9, "dampening": 0.1}, "`nesterov` needs"),
        (optim.SGD, {"nesterov": 1}, "`nesterov` of SGD must be True or False; got 1"),
        (optim.SGD, {"foreach": True}, "SGD has no such setting; got `foreach`. It takes `lr`, `momentum`"),
        (
            optim.Adam,
            {"eps": torch.ones(2)},
            r"as a tensor be floating-point and have one element; got a .* shape \(2,\)",
        ),
        (optim.SGD, {"lr": torch.tensor(1)}, "got a torch.int64 tensor"),
        (optim.Adam, {"betas": (0.9, 1.0)}, r"`betas` of Adam must lie in \[0, 1\); got 1.0"),
        (optim.Adam, {"betas": 0.9}, "`betas` of Adam must have 2 entries; got 0.9"),
        (optim.Adam, {"betas": (0.9, None)}, "`betas` of Adam must lie in"),
        (optim.Adam, {"eps": -1e-8}, "`eps` of Adam must be at least 0"),
        (optim.AdamW, {"decoupled_weight_decay": True}, "AdamW has no such setting"),
        (optim.NAdam, {"momentum_decay": -1.0}, "`momentum_decay` of NAdam"),
        (optim.RMSprop, {"alpha": 0.9}, "RMSprop has no such setting; got `alpha`. It takes .*`rule_alpha`"),
        (optim.RMSprop, {"rule_alpha": -0.1}, "`rule_alpha` of RMSprop must be at least 0"),
        (
            optim.Rprop,
            {"etas": (0.5, 0.9)},
            r"`etas` of Rprop must satisfy 0 < etas\[0\] < 1 < etas\[1\]; got \(0.5, 0.9\)",
        ),
        (optim.Rprop, {"etas": (tensor(0.5), 1.2)}, "`etas` of Rprop must be a plain number: it cannot be learned"),
        (optim.Adagrad, {"lr_decay": -1.0}, "`lr_decay` of Adagrad"),
        (
            optim.Adagrad,
            {"initial_accumulator_value": -1.0},
            "`initial_accumulator_value` of Adagrad must be at least 0",
        ),
        (optim.Adadelta, {"rho": 1.5}, r"`rho` of Adadelta must lie in \[0, 1\]; got 1.5"),
        (optim.ASGD, {"weight_decay": -1.0}, "`weight_decay` of ASGD must be at least 0"),
        (optim.Adafactor, {"d": 0.5}, "`d` of Adafactor must be at least 1; got 0.5"),
        (optim.Adafactor, {"beta2_decay": 0.1}, "`beta2_decay` of Adafactor must be at most 0; got 0.1"),
        (optim.Adafactor, {"eps": (1e-3, None)}, "`eps` of Adafactor must be at least 0; got None"),
        (
            FISTA,
            {"momentum": 0.9},
            "FISTA has no such setting; got `momentum`. It takes `lr`, `weight_decay`, `maximize`",
        ),
    ],
)
def test_settings_out_of_range(kind: Any, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        resolve(kind).validate(settings)


def test_what_torch_refuses_is_refused() -> None:
    """Whatever number torch.optim's constructor rejects, `validate` rejects too, and the other way round."""
    for kind in _RULES:
        rule = resolve(kind)
        for key, default in rule.defaults.items():
            if isinstance(default, bool):
                continue
            for value in (-1.0, 0.0, 0.5, 1.0, 2.0):
                given = tuple(value for _ in default) if isinstance(default, tuple) else value
                theirs = {"alpha" if key == "rule_alpha" else key: given}
                accepted = _accepts(lambda kind=kind, theirs=theirs: kind([torch.zeros(1)], **theirs))
                ours = _accepts(lambda rule=rule, key=key, given=given: rule.validate({key: given}))
                assert ours == accepted, f"{kind.__name__} {theirs}"


def _accepts(call: Callable[[], Any]) -> bool:
    try:
        call()
    except ValueError:
        return False
    return True
