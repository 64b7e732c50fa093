"""Proximal maps: their definition, their derivatives (also at kinks), their arguments and errors.

How each map is compared with its definition, the minimiser of step g(z) + |z - y|^2 / 2:

- separable maps: a ternary search for the minimum, element by element;
- norms (group lasso, nuclear) and sets (balls, simplex): the optimality condition y - p in step dg(p), necessary and
  sufficient. For a norm it says: the dual norm of y - p is at most the threshold t, and <y - p, p> = t |p|. For a set:
  p lies in it, and no point of it has a larger inner product with y - p than p has.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.func import grad, jacfwd, jacrev, jvp, vmap

from bda_optim import prox
from bda_optim._step.proximal import NO_HYPER

with warnings.catch_warnings():  # torch's forward mode scripts its decompositions, with a warning, at its first use
    warnings.simplefilter("ignore")
    jvp(torch.sin, (torch.ones(()),), (torch.ones(()),))


class Case(NamedTuple):
    make: Callable[..., Any]
    strengths: tuple[float, ...]
    shape: tuple[int, ...]
    projection: bool = False


CASES = {
    "l1": Case(prox.l1, (0.8,), (4, 3)),
    "elastic_net": Case(prox.elastic_net, (0.8, 0.6), (4, 3)),
    "group_lasso": Case(prox.group_lasso, (2.4,), (4, 3)),
    "group_lasso_1": Case(lambda s: prox.group_lasso(s, dim=-1), (2.4,), (2, 3, 3)),
    "nuclear": Case(prox.nuclear, (2.0,), (4, 3)),
    "nuclear_wide": Case(prox.nuclear, (3.0,), (3, 2, 2)),
    "nonnegative": Case(prox.nonnegative, (), (4, 3), True),
    "box": Case(prox.box, (-0.5, 0.7), (4, 3), True),
    "l2_ball": Case(prox.l2_ball, (1.5,), (4, 3), True),
    "l2_ball_inside": Case(prox.l2_ball, (50.0,), (4, 3), True),
    "l1_ball": Case(prox.l1_ball, (2.5,), (4, 3), True),
    "l1_ball_inside": Case(prox.l1_ball, (50.0,), (4, 3), True),
    "simplex": Case(prox.simplex, (1.3,), (4, 3), True),
}
ALL = pytest.mark.parametrize("name", CASES)
STEP = 0.7


def build(name: str, *strengths: Any) -> Any:
    case = CASES[name]
    return case.make(*(strengths or case.strengths))


def point(name: str, **options: Any) -> Tensor:
    return 1.5 * torch.randn(CASES[name].shape, dtype=torch.float64).to(**options)


def tensors(*values: float, **options: Any) -> tuple[Tensor, ...]:
    return tuple(torch.tensor(v, **{"dtype": torch.float64, "requires_grad": True, **options}) for v in values)


def jacobian(map_: Any, y: Tensor, step: Any = STEP) -> Tensor:
    return jacrev(lambda z: map_(z, step))(y).reshape(y.numel(), y.numel())


def is_clarke_like(matrix: Tensor) -> bool:
    """Whether it is symmetric with eigenvalues in [0, 1], as every generalised derivative of a prox is."""
    values = torch.linalg.eigvalsh(matrix)
    return bool(torch.allclose(matrix, matrix.mT, atol=1e-9) and values[0] > -1e-9 and values[-1] < 1 + 1e-9)


# --- the definition ---------------------------------------------------------------------------------------------------


def ternary(objective: Callable[[Tensor], Tensor], low: Tensor, high: Tensor) -> Tensor:
    for _ in range(200):
        a, b = low + (high - low) / 3, high - (high - low) / 3
        right = objective(a) > objective(b)
        low, high = torch.where(right, a, low), torch.where(right, high, b)
    return (low + high) / 2


@pytest.mark.parametrize(
    ("name", "penalty", "low", "high"),
    [
        ("l1", lambda z: 0.8 * z.abs(), -9.0, 9.0),
        ("elastic_net", lambda z: 0.8 * z.abs() + 0.3 * z.square(), -9.0, 9.0),
        ("nonnegative", torch.zeros_like, 0.0, 9.0),
        ("box", torch.zeros_like, -0.5, 0.7),
    ],
)
def test_separable_maps_minimise(name: str, penalty: Callable[[Tensor], Tensor], low: float, high: float) -> None:
    y, rate = point(name), torch.rand(CASES[name].shape, dtype=torch.float64) + 0.2
    for step in (STEP, rate):

        def objective(z: Tensor, step: Any = step) -> Tensor:
            return step * penalty(z) + (z - y).square() / 2

        found = ternary(objective, torch.full_like(y, low), torch.full_like(y, high))
        torch.testing.assert_close(build(name)(y, step), found, atol=1e-7, rtol=0)  # flat minima: root of the precision


def nuclear_norm(z: Tensor) -> Tensor:
    return torch.linalg.svdvals(z.reshape(z.shape[0], -1)).sum()


NORMS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {  # the norm, the dual norm
    "group_lasso": (lambda z: z.norm(dim=1).sum(), lambda z: z.norm(dim=1).max()),
    "group_lasso_1": (lambda z: z.norm(dim=(0, 1)).sum(), lambda z: z.norm(dim=(0, 1)).max()),
    "nuclear": (nuclear_norm, lambda z: torch.linalg.svdvals(z).max()),
    "nuclear_wide": (nuclear_norm, lambda z: torch.linalg.svdvals(z.reshape(3, -1)).max()),
}


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("scale", [0.05, 1.0, 10.0])
def test_norms_minimise(name: str, scale: float) -> None:
    norm, dual = NORMS[name]
    y, threshold = scale * point(name), STEP * CASES[name].strengths[0]
    p = build(name)(y, STEP)
    assert dual(y - p) <= threshold * (1 + 1e-12)
    torch.testing.assert_close(((y - p) * p).sum(), threshold * norm(p), atol=1e-11, rtol=1e-11)
    for _ in range(100):
        z = p + 10 ** (-4 * torch.rand(())) * torch.randn_like(p)
        better = (threshold * norm(z) + (z - y).square().sum() / 2) - (threshold * norm(p) + (p - y).square().sum() / 2)
        assert better > -1e-12


SETS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Tensor], Any]]] = {  # the size, the largest inner product
    "l2_ball": (lambda z: z.norm(), lambda v: 1.5 * v.norm()),
    "l2_ball_inside": (lambda z: z.norm(), lambda v: 50 * v.norm()),
    "l1_ball": (lambda z: z.abs().sum(), lambda v: 2.5 * v.abs().max()),
    "l1_ball_inside": (lambda z: z.abs().sum(), lambda v: 50 * v.abs().max()),
    "simplex": (lambda z: z.sum(), lambda v: 1.3 * v.max()),
}


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("scale", [0.01, 1.0, 10.0])
def test_projections_minimise(name: str, scale: float) -> None:
    size, largest = SETS[name]
    y = scale * point(name)
    p = build(name)(y, STEP)
    assert size(p) <= CASES[name].strengths[0] * (1 + 1e-12)
    if name == "simplex":
        assert (p >= 0).all()
        torch.testing.assert_close(p.sum().item(), 1.3)
    torch.testing.assert_close(((y - p) * p).sum(), largest(y - p), atol=1e-11, rtol=1e-11)


def test_values_by_hand() -> None:
    y = torch.tensor([3.0, -0.2, 0.5, -2.0], dtype=torch.float64)
    expected = torch.tensor([2.5, 0.0, 0.0, -1.5], dtype=torch.float64)
    torch.testing.assert_close(prox.l1(1.0)(y, 0.5), expected)
    torch.testing.assert_close(prox.elastic_net(1.0, 2.0)(y, 0.5), expected / 2)
    torch.testing.assert_close(prox.group_lasso(1.0)(y, 0.5), expected)  # a group per element
    inside = torch.tensor([0.1, -0.2, 0.3, 0.0], dtype=torch.float64)
    assert torch.equal(prox.l1_ball(1.0)(inside, 0.5), inside)
    assert torch.equal(prox.l2_ball(1.0)(inside, 0.5), inside)
    assert torch.equal(prox.nuclear(9.0)(torch.eye(3), 1.0), torch.zeros(3, 3))  # exactly
    diagonal = torch.tensor([5.0, 3.0, 1.0, 0.0], dtype=torch.float64)
    torch.testing.assert_close(prox.nuclear(2.0)(diagonal.diag(), 1.0), (diagonal - 2).clamp(min=0).diag())
    assert torch.linalg.matrix_rank(prox.nuclear(2.0)(diagonal.diag(), 1.0)) == 2
    y4 = torch.randn(3, 2, 2, 2, dtype=torch.float64)
    torch.testing.assert_close(prox.nuclear(1.0)(y4, 0.5).flatten(1), prox.nuclear(1.0)(y4.flatten(1), 0.5))
    assert torch.equal(prox.box(-math.inf, 1.0)(y, 1.0), y.clamp(max=1.0))


# --- derivatives ------------------------------------------------------------------------------------------------------


@ALL
def test_derivatives(name: str) -> None:
    """Reverse mode, forward mode and central differences agree, in y, the rate and the strengths; twice."""
    y, strengths = point(name).requires_grad_(), tensors(*CASES[name].strengths)
    (step,) = tensors(STEP)

    def function(y: Tensor, step: Tensor, *strengths: Tensor) -> Tensor:
        return build(name, *strengths)(y, step)

    options = {"atol": 1e-6, "check_undefined_grad": False}
    assert gradcheck(function, (y, step, *strengths), check_forward_ad=True, **options)
    assert gradgradcheck(function, (y, step, *strengths), check_fwd_over_rev=True, fast_mode=True, **options)


@pytest.mark.parametrize("name", [name for name in CASES if build(name).separable])
def test_derivatives_of_elementwise_rates_and_strengths(name: str) -> None:
    case = CASES[name]
    y = point(name).requires_grad_()
    rates = (torch.rand(case.shape, dtype=torch.float64) + 0.2).requires_grad_()
    features = [torch.full((3,), s, dtype=torch.float64, requires_grad=True) for s in case.strengths]
    assert gradcheck(lambda y, r, *s: build(name, *s)(y, r), (y, rates, *features))
    alone = torch.stack([build(name)(y[i], rates[i]) for i in range(4)])
    torch.testing.assert_close(build(name, *features)(y, rates), alone)
    tasks = torch.stack([y, 2 * y])  # a dimension in front
    torch.testing.assert_close(build(name, *features)(tasks, rates)[0], alone)


def spectrum(rows: int, columns: int, values: list[float]) -> Tensor:
    left, right = (torch.linalg.qr(torch.randn(n, n, dtype=torch.float64))[0] for n in (rows, columns))
    return (left[:, : len(values)] * torch.tensor(values, dtype=torch.float64)) @ right[:, : len(values)].mT


SPECTRA = {
    "distinct": (3, 4, [3.0, 2.0, 0.5]),
    "equal": (4, 3, [2.0, 2.0, 2.0]),
    "equal above": (3, 3, [2.0, 2.0, 0.5]),
    "equal below": (3, 4, [2.0, 0.3, 0.3]),
    "equal and zero": (4, 4, [2.0, 2.0, 0.0, 0.0]),
    "all below": (2, 3, [0.1, 0.2]),
    "zero": (2, 3, [0.0, 0.0]),
}


@pytest.mark.parametrize("name", SPECTRA)
def test_nuclear_where_singular_values_coincide(name: str) -> None:
    y = spectrum(*SPECTRA[name]).requires_grad_()
    step, s = tensors(0.5, 2.0)

    def function(y: Tensor, step: Tensor, s: Tensor) -> Tensor:
        return prox.nuclear(s)(y, step)

    def slope(y: Tensor, s: Tensor) -> Any:
        return torch.autograd.grad(prox.nuclear(s)(y, 0.5).pow(3).sum(), (y, s), create_graph=True)

    options = {"atol": 1e-6, "check_undefined_grad": False}
    assert gradcheck(function, (y, step, s), check_forward_ad=True, **options)
    assert gradgradcheck(function, (y, step, s), check_fwd_over_rev=True, fast_mode=True, **options)
    assert gradgradcheck(slope, (y, s), fast_mode=True, **options)  # the third derivative
    assert is_clarke_like(jacobian(prox.nuclear(2.0), y.detach(), 0.5))


def test_nuclear_against_autograd_through_the_decomposition() -> None:
    """Another way to the derivative; it exists where the singular values differ."""
    y = point("nuclear").requires_grad_()
    weights = torch.randn_like(y)
    u, sigma, vh = torch.linalg.svd(y, full_matrices=False)
    direct = (u * (sigma - 1.4).clamp(min=0)) @ vh
    ours = prox.nuclear(2.0)(y, 0.7)
    torch.testing.assert_close(ours, direct)
    expected, got = (torch.autograd.grad((weights * out).sum(), y)[0] for out in (direct, ours))
    torch.testing.assert_close(got, expected)


def test_nuclear_at_its_kink_is_the_mean_of_both_sides() -> None:
    y = torch.diag(torch.tensor([3.0, 1.0], dtype=torch.float64))
    up, down = (jacobian(prox.nuclear(1.0 + h), y, 1.0) for h in (-1e-9, 1e-9))
    torch.testing.assert_close(jacobian(prox.nuclear(1.0), y, 1.0), (up + down) / 2, atol=1e-7, rtol=0)


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e12])
def test_nuclear_in_any_unit(scale: float) -> None:
    y = point("nuclear").float()
    unit = prox.nuclear(2.0)(y, 0.7)
    torch.testing.assert_close(prox.nuclear(2.0 * scale)(y * scale, 0.7) / scale, unit, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        jacobian(prox.nuclear(2.0 * scale), y * scale), jacobian(prox.nuclear(2.0), y), atol=1e-4, rtol=1e-4
    )


ZERO = torch.zeros(2, 3, dtype=torch.float64)
TIE = torch.tensor([[1.0, -1.0, 1.0], [0.5, 0.0, 0.5]], dtype=torch.float64)
TINY = 1e-160 * TIE  # the squares underflow
KINKS = {
    "l1 at the threshold": (prox.l1, (1.0,), TIE),
    "l1 of zero at zero": (prox.l1, (0.0,), ZERO),
    "elastic_net at the threshold": (prox.elastic_net, (1.0, 0.0), TIE),
    "group_lasso at zero": (prox.group_lasso, (1.0,), ZERO),
    "group_lasso of zero at zero": (prox.group_lasso, (0.0,), ZERO),
    "group_lasso at the threshold": (prox.group_lasso, (math.sqrt(3.0),), TIE),
    "group_lasso of tiny": (prox.group_lasso, (0.0,), TINY),
    "nuclear at zero": (prox.nuclear, (1.0,), ZERO),
    "nuclear of zero at zero": (prox.nuclear, (0.0,), ZERO),
    "nuclear of zero at low rank": (prox.nuclear, (0.0,), torch.ones(2, 3, dtype=torch.float64)),
    "nuclear at a double kink": (prox.nuclear, (1.0,), torch.eye(2, 3, dtype=torch.float64)),
    "nonnegative at zero": (prox.nonnegative, (), ZERO),
    "box at both bounds": (prox.box, (-1.0, 1.0), TIE),
    "box of one point": (prox.box, (0.0, 0.0), ZERO),
    "l2_ball at zero": (prox.l2_ball, (1.0,), ZERO),
    "l2_ball of zero at zero": (prox.l2_ball, (0.0,), ZERO),
    "l2_ball of zero": (prox.l2_ball, (0.0,), TIE),
    "l2_ball at its border": (prox.l2_ball, (TIE.norm().item(),), TIE),
    "l2_ball of tiny": (prox.l2_ball, (1.0,), TINY),
    "l1_ball at zero": (prox.l1_ball, (1.0,), ZERO),
    "l1_ball of zero at zero": (prox.l1_ball, (0.0,), ZERO),
    "l1_ball of zero": (prox.l1_ball, (0.0,), TIE),
    "l1_ball at its border": (prox.l1_ball, (4.0,), TIE),
    "l1_ball with ties": (prox.l1_ball, (1.5,), TIE),
    "simplex at zero": (prox.simplex, (1.0,), ZERO),
    "simplex of zero": (prox.simplex, (0.0,), TIE),
    "simplex of zero at zero": (prox.simplex, (0.0,), ZERO),
    "simplex with ties": (prox.simplex, (1.0,), TIE),
    "simplex at its border": (prox.simplex, (4.0,), TIE.abs()),
}


@pytest.mark.parametrize("name", KINKS)
def test_kinks(name: str) -> None:
    """First and second derivatives are finite, and the first is one that a prox can have: symmetric, within [0, 1]."""
    make, values, y = KINKS[name]
    strengths, (step,) = tensors(*values), tensors(1.0)
    leaf = y.clone().requires_grad_()
    out = make(*strengths)(leaf, step)
    assert out.isfinite().all()
    inputs = (leaf, step, *strengths)
    weights = torch.randn_like(out)
    first = torch.autograd.grad((weights * out).sum() + out.pow(3).sum(), inputs, create_graph=True, allow_unused=True)
    first = tuple(slope for slope in first if slope is not None)
    assert all(slope.isfinite().all() for slope in first)
    total = sum((slope.sum() for slope in first), torch.zeros(()))
    second = torch.autograd.grad(total, inputs, allow_unused=True) if total.requires_grad else ()
    assert all(slope.isfinite().all() for slope in second if slope is not None)
    matrix = jacobian(make(*values), y, 1.0)
    assert is_clarke_like(matrix)
    forward = jacfwd(lambda z: make(*values)(z, 1.0))(y).reshape(matrix.shape)
    torch.testing.assert_close(forward, matrix)


@pytest.mark.parametrize("name", [name for name in KINKS if " of zero at " in name])
def test_degenerate_strengths_have_the_right_slope(name: str) -> None:
    """A penalty of strength 0 is the identity, a set of one point a constant: also at the kink itself."""
    make, values, y = KINKS[name]
    is_set = make in (prox.l2_ball, prox.l1_ball, prox.simplex)
    expected = torch.zeros(6, 6) if is_set else torch.eye(6)
    torch.testing.assert_close(jacobian(make(*values), y, 1.0), expected.double())


def test_one_sided_slopes() -> None:
    (s,) = tensors(0.0)
    y = torch.tensor([0.0, 2.0, -2.0], dtype=torch.float64)
    slope = jacrev(lambda s: prox.l1(s)(y, 1.0))(s.detach())
    assert slope.tolist() == [0.0, -1.0, 1.0]  # s grows from 0: the zero stays, the others shrink
    slope = jacrev(lambda r: prox.simplex(r)(y, 1.0))(s.detach())
    assert slope.tolist() == [0.0, 1.0, 0.0]  # the total goes to the largest
    slope = jacrev(lambda r: prox.l2_ball(r)(y, 1.0))(s.detach())
    torch.testing.assert_close(slope, y / y.norm())
    assert jacobian(prox.box(0.0, 0.0), y).abs().max() == 0


# --- transformations, types, devices ----------------------------------------------------------------------------------


@ALL
def test_vmap_is_a_loop(name: str) -> None:
    map_, batch = build(name), torch.stack([scale * point(name) for scale in (0.1, 1.0, 3.0)])
    weights = torch.randn(CASES[name].shape, dtype=torch.float64)

    def loss(y: Tensor, step: Any) -> Tensor:
        return (weights * map_(y, step)).sum()

    torch.testing.assert_close(vmap(lambda y: map_(y, STEP))(batch), torch.stack([map_(y, STEP) for y in batch]))
    steps = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    pairs = list(zip(batch, steps, strict=True))
    both = vmap(grad(loss, argnums=(0, 1)))(batch, steps)
    each = [grad(loss, argnums=(0, 1))(y, step) for y, step in pairs]
    torch.testing.assert_close(both, tuple(torch.stack(slopes) for slopes in zip(*each, strict=True)))
    tangents = torch.randn_like(batch)
    mapped = vmap(lambda y, t: jvp(grad(loss), (y, steps[0]), (t, steps[1]))[1])(batch, tangents)
    looped = [jvp(grad(loss), (y, steps[0]), (t, steps[1]))[1] for y, t in zip(batch, tangents, strict=True)]
    torch.testing.assert_close(mapped, torch.stack(looped))


@ALL
def test_meta_device(name: str) -> None:
    """No value is read from a tensor."""
    y = torch.empty(CASES[name].shape, device="meta", requires_grad=True)
    strengths = tensors(*CASES[name].strengths, device="meta")
    for map_ in (build(name), build(name, *strengths)):
        for step in (STEP, torch.empty((), device="meta", requires_grad=True)):
            out = map_(y, step)
            assert (out.shape, out.dtype, out.device.type) == (y.shape, y.dtype, "meta")
            out.sum().backward()


@ALL
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_dtype_is_kept(name: str, dtype: torch.dtype) -> None:
    y = point(name)
    exact = build(name)(y.to(dtype).double(), STEP)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 4e-2, torch.float16: 5e-3}[dtype]
    for strengths in (CASES[name].strengths, tensors(*CASES[name].strengths)):
        for step in (STEP, torch.tensor(STEP, dtype=torch.float64), torch.tensor([STEP], dtype=torch.float64)):
            out = build(name, *strengths)(y.to(dtype), step)
            assert out.dtype == dtype
            assert out.shape == y.shape
            torch.testing.assert_close(out.double(), exact, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("name", ["l1", "elastic_net", "nonnegative", "box", "l2_ball", "l1_ball", "simplex"])
def test_scalars_and_empty_tensors(name: str) -> None:
    y = torch.tensor(2.0)
    out = build(name)(y, torch.tensor([STEP]))
    assert (out.shape, out.dtype) == ((), torch.float32)
    torch.testing.assert_close(out, build(name)(y.reshape(1), STEP)[0])
    assert build(name)(torch.empty(0, 3), STEP).shape == (0, 3)


@pytest.mark.parametrize("name", [name for name in CASES if "nuclear" not in name])
def test_nan_is_not_hidden(name: str) -> None:
    y = point(name)
    y.reshape(-1)[0] = math.nan
    assert build(name)(y, STEP).isnan().any()


def test_large_offsets_do_not_swallow_the_total() -> None:
    y = torch.tensor([1e6, 1e6 + 0.25, 0.0])
    torch.testing.assert_close(prox.simplex()(y, 1.0), torch.tensor([0.375, 0.625, 0.0]))
    torch.testing.assert_close(prox.simplex()(torch.full((1000,), 1e7), 1.0), torch.full((1000,), 1e-3))
    masked = torch.tensor([1.0, -math.inf, 0.5], requires_grad=True)
    out = prox.simplex()(masked, 1.0)
    torch.testing.assert_close(out, torch.tensor([0.75, 0.0, 0.25]))
    assert torch.autograd.grad(out.square().sum(), masked)[0].isfinite().all()


def test_long_vectors() -> None:
    y = torch.randn(20_000, dtype=torch.float64)
    for map_, norm in ((prox.simplex(3.0), 1), (prox.l1_ball(7.0), 1), (prox.l2_ball(2.0), 2)):
        expected = getattr(map_, "total", None) or map_.r
        torch.testing.assert_close(torch.linalg.vector_norm(map_(y, 1.0), norm).item(), expected)


def itself(hyper: Tensor) -> Tensor:
    return hyper


@pytest.mark.parametrize("mode", ["reverse", "forward", "forward over reverse", "mapped"])
def test_nuclear_compiles(mode: str) -> None:
    """Dynamo would inline the decomposition and lose tangents; `nuclear` tells it not to."""

    def value(y: Tensor, s: Tensor) -> Tensor:
        return map_(y, 0.7, s).pow(3).sum()

    functions: dict[str, Callable[[Tensor, Tensor], Any]] = {
        "reverse": grad(value, argnums=(0, 1)),
        "forward": lambda y, s: jvp(value, (y, s), (torch.ones_like(y), s))[1],
        "forward over reverse": lambda y, s: jvp(grad(value), (y, s), (torch.ones_like(y), s))[1],
        "mapped": vmap(grad(value), in_dims=(0, None)),
    }
    map_ = pickle.loads(pickle.dumps(prox.nuclear(itself)))
    y, (s,) = point("nuclear"), tensors(2.0, requires_grad=False)
    y = torch.stack([y, 2 * y]) if mode == "mapped" else y
    torch._dynamo.reset()
    compiled = torch.compile(functions[mode], backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(y, s), functions[mode](y, s))


# --- properties -------------------------------------------------------------------------------------------------------


@ALL
def test_firmly_nonexpansive(name: str) -> None:
    map_ = build(name)
    for scale in (0.1, 1.0, 5.0):
        a, b = scale * point(name), scale * point(name)
        moved = map_(a, STEP) - map_(b, STEP)
        assert moved.square().sum() <= (moved * (a - b)).sum() * (1 + 1e-12) + 1e-12


@pytest.mark.parametrize("name", [name for name in CASES if CASES[name].projection])
def test_projections_are_idempotent_and_ignore_the_rate(name: str) -> None:
    map_, y = build(name), point(name)
    once = map_(y, STEP)
    torch.testing.assert_close(map_(once, STEP), once, atol=1e-14, rtol=1e-14)
    assert torch.equal(map_(y, 100.0), once)
    assert is_clarke_like(jacobian(map_, once))  # on the border, or next to it


@ALL
def test_y_is_not_changed(name: str) -> None:
    y = point(name)
    before = y.clone()
    build(name)(y, STEP)
    assert torch.equal(y, before)


# --- strengths --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in CASES if CASES[name].strengths])
def test_functions_of_hyper(name: str) -> None:
    values = CASES[name].strengths
    y = point(name)
    hyper = torch.tensor(values, dtype=torch.float64, requires_grad=True)
    functions = [lambda hyper, i=i: 2 * hyper[i] / 2 for i in range(len(values))]
    out = build(name, *functions)(y, STEP, hyper)
    torch.testing.assert_close(out, build(name)(y, STEP))
    weights = torch.randn_like(out)
    (slope,) = torch.autograd.grad((weights * out).sum(), hyper)
    direct = tensors(*values)
    expected = torch.autograd.grad((weights * build(name, *direct)(y, STEP)).sum(), direct)
    torch.testing.assert_close(slope, torch.stack(expected))
    numbers = build(name, *(lambda hyper, v=v: v for v in values))  # a function may return a number
    torch.testing.assert_close(numbers(y, STEP, None), out)  # and None is a valid hyper


def test_functions_need_a_hyper() -> None:
    y = torch.randn(3)
    for hyper in ((), (NO_HYPER,)):
        with pytest.raises(ValueError, match=r"`s` of `l1` is a function of hyper.*unroll.*hyper=.*tensor"):
            prox.l1(lambda s: s)(y, 0.1, *hyper)
    assert prox.l1(0.5)(y, 0.1, NO_HYPER).shape == (3,)
    assert prox.l1(lambda hyper: 0.5 if hyper is None else 0.0)(torch.ones(1), 1.0, None).item() == 0.5
    assert pickle.loads(pickle.dumps(NO_HYPER)) is copy.deepcopy(NO_HYPER) is NO_HYPER
    with pytest.raises(ValueError, match="`s` of `l1` must be finite and not negative; got -1"):
        prox.l1(lambda hyper: -1)(y, 0.1, None)


REFUSED: list[tuple[type[Exception], Callable[[], object], str]] = [
    (ValueError, lambda: prox.l1(-0.1), "`s` of `l1` must be finite and not negative; got -0.1. Use"),
    (ValueError, lambda: prox.l1(math.nan), "`s` of `l1`"),
    (ValueError, lambda: prox.l1(math.inf), "`s` of `l1`"),
    (ValueError, lambda: prox.elastic_net(0.1, -1), "`l2` of `elastic_net`"),
    (ValueError, lambda: prox.group_lasso(-1), "`s` of `group_lasso`"),
    (ValueError, lambda: prox.nuclear(-1), "`s` of `nuclear`"),
    (ValueError, lambda: prox.l2_ball(-1), "`r` of `l2_ball`"),
    (ValueError, lambda: prox.l1_ball(-1), "`r` of `l1_ball`"),
    (ValueError, lambda: prox.simplex(-1), "`total` of `simplex`"),
    (ValueError, lambda: prox.box(1.0, 0.0), "`low` of `box` must not exceed `high`; got 1.0 > 0.0. Exchange"),
    (ValueError, lambda: prox.box(math.nan, 0.0), "`low` of `box`"),
    (TypeError, lambda: prox.l1("1"), "`s` of `l1` must be a number, a tensor or a function of hyper; got '1'"),
    (TypeError, lambda: prox.box(None, 1.0), "`low` of `box` must be a number"),
    (TypeError, lambda: prox.l1(1.0)(torch.ones(2, dtype=torch.long), 0.1), "floating-point tensor; got torch.int64"),
    (TypeError, lambda: prox.l1(1.0)(torch.ones(2, dtype=torch.complex64), 0.1), "floating-point"),
    (ValueError, lambda: prox.l1(torch.ones(4))(torch.ones(2, 3), 0.1), r"`s` of `l1` must broadcast to \(2, 3\)"),
    (ValueError, lambda: prox.l1(torch.ones(2, 2, 3))(torch.ones(2, 3), 0.1), "must broadcast"),
    (ValueError, lambda: prox.l1(1.0)(torch.ones(2, 3), torch.ones(2)), r"the rate of `l1` must broadcast"),
    (ValueError, lambda: prox.l2_ball(torch.ones(3))(torch.ones(2, 3), 0.1), "`r` of `l2_ball` must have one element"),
    (ValueError, lambda: prox.nuclear(1.0)(torch.ones(3), 0.1), r"`nuclear` needs two dimensions or more; got \(3,\)"),
    (ValueError, lambda: prox.nuclear(1.0)(torch.ones(()), 0.1), "`nuclear` needs two dimensions"),
    (ValueError, lambda: prox.group_lasso(1.0)(torch.ones(()), 0.1), "`dim` must be one dimension"),
    (ValueError, lambda: prox.group_lasso(1.0, dim=2)(torch.ones(2, 3), 0.1), r"one dimension of \(2, 3\)"),
    (ValueError, lambda: prox.group_lasso(1.0, dim=(0, 1))(torch.ones(2, 3), 0.1), "`dim` must be one dimension"),
]


@pytest.mark.parametrize(("error", "make", "message"), REFUSED)
def test_refusals(error: type[Exception], make: Callable[[], object], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize("name", [name for name in CASES if not build(name).separable])
def test_elementwise_rates_are_refused_where_elements_depend_on_each_other(name: str) -> None:
    y = point(name)
    with pytest.raises(ValueError, match=r"the rate of .* must have one element \(it is not separable\).*l1"):
        build(name)(y, torch.ones_like(y))


def test_which_maps_are_separable() -> None:
    separable = {name for name in prox.__all__ if getattr(getattr(prox, name), "separable", False)}
    assert separable == {"l1", "elastic_net", "nonnegative", "box"}
    assert all(type(build(name)).separable == build(name).separable for name in CASES)


def test_tensors_are_not_checked() -> None:
    bad = torch.tensor(-1.0)
    for make in (prox.l1, prox.group_lasso, prox.nuclear, prox.l2_ball, prox.l1_ball, prox.simplex):
        make(bad)
    prox.elastic_net(bad, bad)
    prox.box(torch.ones(()), -torch.ones(()))
    prox.box(torch.ones(()), -1.0)


# --- dataclasses ------------------------------------------------------------------------------------------------------


def test_print_compare_hash() -> None:
    assert repr(prox.l1(0.5)) == "l1(s=0.5)"
    assert repr(prox.group_lasso(0.5)) == "group_lasso(s=0.5, dim=0)"
    assert repr(prox.simplex()) == "simplex(total=1.0)"
    assert repr(prox.nonnegative()) == "nonnegative()"
    assert prox.l1(0.5) == prox.l1(0.5)
    assert prox.l1(1) == prox.l1(1.0)
    assert prox.l1(0.5) != prox.l1(0.6)
    assert prox.l1(0.5) != prox.nuclear(0.5)
    assert prox.l1(0.5) != 0.5
    assert prox.nonnegative() == prox.nonnegative()
    assert len({prox.l1(0.5), prox.l1(0.5), prox.l2_ball(0.5)}) == 2
    s = torch.ones(3)
    assert prox.l1(s) == prox.l1(s)
    assert hash(prox.l1(s)) == hash(prox.l1(s))
    assert prox.l1(s) != prox.l1(s.clone())
    assert prox.l1(abs) == prox.l1(abs)
    with pytest.raises(dataclasses.FrozenInstanceError):
        prox.l1(0.5).s = 1.0


@ALL
def test_pickle_and_copy(name: str) -> None:
    map_, y = build(name), point(name)
    learned = build(name, *tensors(*CASES[name].strengths))
    for other in (pickle.loads(pickle.dumps(map_)), copy.deepcopy(map_), copy.copy(map_)):
        assert other == map_
    for other in (pickle.loads(pickle.dumps(learned)), copy.deepcopy(learned)):
        assert torch.equal(other(y, STEP), learned(y, STEP))
        assert other(y, STEP).requires_grad == bool(CASES[name].strengths)


@ALL
def test_replace_with_tensors(name: str) -> None:
    map_, y = build(name), point(name)
    fields = [field.name for field in dataclasses.fields(map_) if field.init and field.name != "dim"]
    assert len(fields) == len(CASES[name].strengths)
    replaced = dataclasses.replace(map_, **dict(zip(fields, tensors(*CASES[name].strengths), strict=True)))
    torch.testing.assert_close(replaced(y, STEP), map_(y, STEP))
    dataclasses.replace(replaced, **{field: lambda hyper: hyper for field in fields})
    dataclasses.replace(replaced, **{field: torch.tensor(-1.0) for field in fields})


def test_public_names() -> None:
    maps = {"l1", "elastic_net", "group_lasso", "nuclear", "nonnegative", "box", "l2_ball", "l1_ball", "simplex"}
    assert set(prox.__all__) == set(dir(prox)) == maps
    assert all(getattr(prox, name).__doc__ for name in prox.__all__)
