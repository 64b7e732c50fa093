"""A table of rules with their settings, losses to run them on, and the loop of torch.optim beside ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from installed import skip_without
from torch import Tensor, optim

from bda_optim._step.rules.fista import FISTA
from bda_optim._step.rules.resolve import RULES, resolve
from bda_optim._support.types import Move, Rule

SWITCHES = {"foreach", "fused", "capturable", "differentiable"}
RENAMED = {"alpha": "rule_alpha"}
EXACT = {"rtol": 1e-12, "atol": 1e-12}
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
every_rule = pytest.mark.parametrize("rule", [*RULES.values(), FISTA()], ids=lambda rule: rule.name)


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
        skip_without(case.kind, case.options)
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


def final(case: Case, steps: int, settings: dict[str, Any], loss: Loss = generic) -> Callable[..., tuple[Tensor, ...]]:
    """The last iterate as a function of the initial one, of lr and of the loss's own variable."""

    def run(weight: Tensor, bias: Tensor, scale: Tensor, idle: Tensor, lr: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        params = [weight, bias, scale, idle]
        return tuple(unroll(case.rule, {**settings, "lr": lr}, params, x, loss=loss, steps=steps, graph=True)[0])

    return run


def inputs(case: Case, begin: Callable[[], list[Tensor]] = start) -> list[Tensor]:
    lr = torch.as_tensor(case.settings()["lr"]).clone()
    return [t.detach().clone().requires_grad_() for t in (*begin(), lr, X)]
