"""`Differences`: second-order products as central differences of first-order gradients, against `Unroll`."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from problems import difference_quotients, relative_error
from row_weights import ROWS, Y0, D, batches, draw, lower, upper
from torch import Tensor, optim

import bda_optim as bda
from bda_optim._context.precision import measured_unit, unit_of, unit_of_product

K = 6


BATCHES = batches(K)


RULES: dict[str, dict[str, Any]] = {
    "sgd": {},
    "momentum": {"momentum": 0.9},
    "nesterov": {"momentum": 0.9, "nesterov": True},
    "adamw": {"rule": optim.AdamW, "lr": 0.05},
    "amsgrad": {"rule": optim.Adam, "amsgrad": True, "lr": 0.05},
    "rmsprop": {"rule": optim.RMSprop, "lr": 0.02},
    "fista": {"rule": bda.FISTA},
    "adafactor": {"rule": optim.Adafactor, "lr": 0.05},
}
VARIANTS = ("plain", "alpha", "l1", "all")
ADJOINTS = {
    "default": bda.Differences(),
    "slots": bda.Differences(within=bda.Checkpointed(slots=2)),
    "every": bda.Differences(within=bda.Checkpointed(every=1)),
    "unroll": bda.Differences(within=bda.Unroll()),
    "check": bda.Differences(within=bda.Checkpointed(check=True)),
    "offload": bda.Differences(within=bda.Checkpointed(slots=3, offload="cpu")),
}


def gradients(rule: str = "momentum", variant: str = "plain", **options: Any) -> list[Tensor]:
    """Return dF/dx of rows, of the strength of the l1 norm and of the rate."""
    x = {"rows": draw(ROWS, seed=30), "l1": torch.tensor(0.02, dtype=D), "lr": torch.tensor(0.04, dtype=D)}
    chosen: dict[str, Any] = {"lr": 0.2, **RULES[rule]}
    if variant in ("alpha", "all"):
        chosen |= {"alpha": bda.harmonic(0.5), "upper_lr": 0.3}
    if variant in ("l1", "all") and rule != "adafactor":
        chosen["prox"] = bda.prox.l1(lambda hyper: hyper["l1"])
    if variant == "all":
        chosen["lr"] = x["lr"].requires_grad_()
    chosen = {"steps": K, "batches": BATCHES, **chosen, **options}
    out = bda.hypergradient(lower, upper, Y0, x, **chosen)
    return list(out.grad.values())


@functools.cache
def exact(rule: str, variant: str) -> list[Tensor]:
    return gradients(rule, variant)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("rule", RULES)
def test_every_rule(rule: str, variant: str) -> None:
    assert relative_error(gradients(rule, variant, adjoint=bda.Differences()), exact(rule, variant)) < 1e-9


@pytest.mark.parametrize("adjoint", ADJOINTS.values(), ids=ADJOINTS.keys())
@pytest.mark.parametrize("rule", ["sgd", "nesterov"])
def test_every_way_to_store_states(rule: str, adjoint: Any) -> None:
    assert relative_error(gradients(rule, "all", adjoint=adjoint), exact(rule, "all")) < 1e-9


@pytest.mark.parametrize("parts", [3, 5])
def test_parts(parts: int) -> None:
    assert (
        relative_error(
            gradients("nesterov", "all", adjoint=bda.Differences(), accumulate=parts), exact("nesterov", "all")
        )
        < 1e-9
    )


def test_against_finite_differences() -> None:
    x = {"rows": draw(ROWS, seed=30)}
    found = bda.hypergradient(lower, upper, Y0, x, steps=K, lr=0.2, batches=BATCHES, adjoint=bda.Differences())

    def value() -> Tensor:
        return bda.hypergradient(lower, upper, Y0, x, steps=K, lr=0.2, batches=BATCHES).value

    assert relative_error([found.grad["rows"]], difference_quotients(value, [x["rows"]])) < 1e-7


# Tasks.

SCALES = torch.logspace(-4, 4, 3, dtype=D)
"""Residuals of the tasks over eight decades: each needs a step of its own."""


def scaled(y: Any, x: Any, batch: Any) -> Tensor:
    scale, inputs, targets = batch
    return (torch.sigmoid(x) * (scale[0] * (torch.tanh(inputs @ y) - targets)).square()).mean() / scale[0]


@pytest.mark.parametrize("options", [{}, {"chunk_size": 2}, {"accumulate": 4}], ids=["whole", "chunks", "parts"])
@pytest.mark.parametrize("adjoint", ["default", "slots", "unroll"])
def test_tasks(adjoint: str, options: dict[str, Any]) -> None:
    batch = (SCALES[:, None].expand(3, ROWS), draw(3, ROWS, 4, seed=1), draw(3, ROWS, seed=2))

    def run(adjoint: Any, **options: Any) -> list[Tensor]:
        x = draw(seed=3).requires_grad_()
        y0 = 0.2 * draw(4, seed=4)
        chosen: dict[str, Any] = {"lr": 0.1 / SCALES.max(), "batches": [batch] * 4, "tasks": 3, **options}
        y = bda.rollout(scaled, None, y0, x, steps=4, adjoint=adjoint, **chosen)
        return [torch.autograd.grad(row.sum(), x, retain_graph=True)[0] for row in y]

    for got, want in zip(run(ADJOINTS[adjoint], **options), run(bda.Unroll()), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=0.0)


# Other adjoints around it and within.


@pytest.mark.parametrize("last", [1, 2, K + 1])
def test_the_last_steps(last: int) -> None:
    want = gradients("momentum", "all", adjoint=bda.Truncated(last=last))
    for adjoint in (
        bda.Differences(last=last),
        bda.Truncated(last=last, within=bda.Differences()),
        bda.Differences(within=bda.Truncated(last=last, within=bda.Checkpointed(slots=2))),
        bda.Differences(within=bda.Truncated(last=last)),
    ):
        assert relative_error(gradients("momentum", "all", adjoint=adjoint), want) < 1e-9


def test_one_step_is_the_hypergradient_of_darts() -> None:
    y, x = draw(3), draw(3, seed=1).requires_grad_()
    f = lambda y, x, batch: (torch.cosh(y - x) * (1 + x.square())).sum()  # noqa: E731
    y1 = bda.rollout(f, None, y, x, steps=1, lr=0.1, adjoint=bda.Differences(last=1))
    v = 2 * y1.detach()
    (found,) = torch.autograd.grad(y1, x, v)
    _, mixed = torch.func.jvp(lambda y: torch.func.grad(f, argnums=1)(y, x, None), (y,), (v,))
    assert relative_error([found], [-0.1 * mixed]) < 1e-9


@pytest.mark.parametrize("clip", [None, 1e-3])
def test_guarded(clip: float | None) -> None:
    options: dict[str, Any] = {"limit": 1e6, "clip": clip}
    want = gradients("nesterov", "alpha", adjoint=bda.Guarded(bda.Checkpointed(), **options))
    for adjoint in (
        bda.Guarded(bda.Differences(), **options),
        bda.Guarded(bda.Differences(within=bda.Unroll()), **options),
        bda.Differences(within=bda.Guarded(bda.Checkpointed(slots=3), **options)),
        bda.Guarded(bda.Differences(within=bda.Checkpointed(every=4)), **options),
    ):
        assert relative_error(gradients("nesterov", "alpha", adjoint=adjoint), want) < 1e-9


def test_an_adjoint_of_the_user() -> None:
    def mine(step: Any, state: Any, hyper: Any, items: Any) -> Any:
        return bda.Differences()(step, state, hyper, items)

    assert relative_error(gradients("nesterov", "all", adjoint=mine), exact("nesterov", "all")) < 1e-9
    recording = bda.Differences(within=lambda step, state, hyper, items: step(state, hyper, items[0]))
    with pytest.raises(RuntimeError, match="an adjoint that records steps"):
        gradients(adjoint=recording, steps=1, batches=BATCHES[:1])


@pytest.mark.parametrize("adjoint", ["default", "slots", "every", "unroll"])
def test_a_second_backward_pass(adjoint: str) -> None:
    x = {"rows": draw(ROWS, seed=30).requires_grad_()}
    y = bda.rollout(lower, None, Y0, x, steps=K, lr=0.2, batches=BATCHES, adjoint=ADJOINTS[adjoint])
    first, second = (torch.autograd.grad(y["w"].sum(), x["rows"], retain_graph=keep)[0] for keep in (True, False))
    assert torch.equal(first, second)


def test_a_learned_initialisation() -> None:
    def run(adjoint: Any) -> Tensor:
        y0 = draw(3).requires_grad_()
        y = bda.rollout(lambda y, x, b: torch.cosh(y).sum(), None, y0, steps=3, lr=0.1, adjoint=adjoint)
        return torch.autograd.grad(y.square().sum(), y0)[0]

    assert relative_error([run(bda.Differences())], [run(bda.Unroll())]) < 1e-9


def test_complex_variables() -> None:
    def f(y: Tensor, x: Tensor, batch: Any) -> Tensor:
        return (torch.cosh(y.real - x) + (y * y).real.cos()).sum()

    y0, x = torch.complex(draw(3), draw(3, seed=1)), draw(3, seed=2)
    upper = lambda y, x, b: (y * y.conj()).real.sum()  # noqa: E731
    got, want = (bda.hypergradient(f, upper, y0, x, steps=3, lr=0.1, adjoint=a).grad for a in (bda.Differences(), None))
    assert relative_error([got], [want]) < 1e-8


# Numbers.


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_cotangents_of_any_size(size: float) -> None:
    x = draw(3, seed=1).float().requires_grad_()
    f = lambda y, x, batch: torch.cosh(y - x).sum()  # noqa: E731
    y = bda.rollout(f, None, draw(3).float(), x, steps=3, lr=0.1, adjoint=bda.Differences())
    (one,) = torch.autograd.grad(y, x, torch.ones(3), retain_graph=True)
    (other,) = torch.autograd.grad(y, x, torch.full((3,), size))
    assert relative_error([other / size], [one]) < 1e-4


def test_a_cotangent_of_zero_gives_zero() -> None:
    calls = []

    def f(y: Tensor, x: Tensor, batch: Any) -> Tensor:
        calls.append(0)
        return torch.cosh(y - x).sum()

    x = draw(3, seed=1).requires_grad_()
    y = bda.rollout(f, None, draw(3), x, steps=2, lr=0.1, adjoint=bda.Differences())
    (none,) = torch.autograd.grad(y, x, torch.zeros(3, dtype=D), retain_graph=True)
    assert torch.equal(none, torch.zeros(3, dtype=D))
    calls.clear()
    torch.autograd.grad(y, x, torch.ones(3, dtype=D))
    assert len(calls) > 18, "a direction of zero shows nothing: the loss is probed later"


def test_gradients_are_kept_beside_the_states() -> None:
    """K gradients forward, two for each product, and none again where every state is stored."""
    calls = []

    def f(y: Tensor, x: Tensor, batch: Any) -> Tensor:
        calls.append(0)
        return torch.cosh(y - x).sum()

    def count(within: Any) -> int:
        x = draw(3, seed=1).requires_grad_()
        y = bda.rollout(f, None, draw(3), x, steps=16, lr=0.1, adjoint=bda.Differences(within=within))
        calls_before = len(calls)
        torch.autograd.grad(y.sum(), x)
        return len(calls) - calls_before

    count(bda.Unroll())  # the probe
    assert count(bda.Unroll()) == count(bda.Checkpointed(every=1)) == 2 * 16 + 1
    assert count(bda.Checkpointed(slots=4)) <= 2 * 16 + 1 + 16


@pytest.mark.parametrize("alpha", [0.0, 0.3])
def test_no_numbers_without_data(alpha: float) -> None:
    y0, x = draw(3).to("meta"), draw(3, seed=1).to("meta").requires_grad_()
    f = lambda y, x, batch: torch.cosh(y - x).sum()  # noqa: E731
    y = bda.rollout(f, f, y0, x, steps=2, lr=0.1, alpha=alpha, adjoint=bda.Differences())
    assert torch.autograd.grad(y.sum(), x)[0].shape == (3,)


def reduced(bits: int) -> Any:
    """A product of matrices that rounds float32 to so many bits first, as TF32 and bfloat16 do."""

    def product(a: Tensor, b: Tensor) -> Tensor:
        if a.dtype is torch.float32:
            a, b = (torch.ldexp(torch.round(torch.frexp(t)[0] * 2**bits) / 2**bits, torch.frexp(t)[1]) for t in (a, b))
        return a @ b

    return product


def test_the_unit_of_rounding_is_measured() -> None:
    cpu = torch.device("cpu")
    assert unit_of_product(torch.matmul, cpu) == measured_unit(cpu, convolution=True) == 2.0**-23
    assert unit_of_product(reduced(11), cpu) == 2.0**-11
    assert unit_of_product(reduced(8), cpu) == unit_of([torch.float32, torch.bfloat16]) == 2.0**-8
    assert unit_of([torch.int64]) == 2.0**-52
