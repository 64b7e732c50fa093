"""Schedules of alpha: values, clipping, learnable constants, warnings, and a round trip through a state dict."""

from __future__ import annotations

import copy
import dataclasses
import io
import math
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from bda_optim._step import schedules
from bda_optim._step.schedules import (
    EPS,
    Schedule,
    constant,
    from_plain,
    geometric,
    harmonic,
    polynomial,
    theory,
    to_plain,
)

TOP = 1 - 1e-6


def quiet(make: Callable[..., Schedule], *args: Any) -> Schedule:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return make(*args)


# name -> the factory, its constants, and a_k written out
TABLE: dict[str, tuple[Callable[..., Schedule], tuple[float, ...], Callable[..., Any]]] = {
    "constant": (constant, (0.3,), lambda k, c: c + 0 * k),
    "harmonic": (harmonic, (0.5,), lambda k, c: c / k),
    "polynomial": (polynomial, (0.5, 0.7), lambda k, c, p: c / k**p),
    "geometric": (geometric, (0.5, 0.8), lambda k, c, q: c * q ** (k - 1)),
    "theory": (
        theory,
        (0.4, 0.9, 2.0, 0.1),
        lambda k, s, sigma, big, gamma: 2 * gamma / (k * (1 - (1 - 2 * s * sigma * big / (sigma + big)) ** 0.5)),
    ),
}
ALL = pytest.mark.parametrize("name", TABLE)


def build(name: str, *constants: Any) -> Schedule:
    make, plain, _ = TABLE[name]
    return quiet(make, *(constants or plain))


@ALL
@pytest.mark.parametrize("k", [1, 2, 3, 10, 1000])
def test_values(name: str, k: int) -> None:
    _, plain, formula = TABLE[name]
    value = build(name)(k)
    assert type(value) is float
    assert value == pytest.approx(min(formula(k, *plain), TOP), rel=1e-14)


@pytest.mark.parametrize("c", [1.0, 1.5, 7, 1e9])
def test_clipped_below_one(c: float) -> None:
    for schedule in (constant(c), harmonic(c), polynomial(c, 1.0), quiet(geometric, c, 0.5)):
        assert schedule(1) == TOP == 1 - EPS
        assert type(schedule(1)) is float
    assert harmonic(4)(8) == 0.5


@pytest.mark.parametrize("zero", [0, 0.0, -0.0])
@pytest.mark.parametrize("k", [1, 5, torch.tensor(5.0, dtype=torch.float64)])
def test_a_plain_zero_stays_plain(zero: float, k: Any) -> None:
    power = torch.tensor(0.5)
    for schedule in (constant(zero), harmonic(zero), polynomial(zero, power), quiet(geometric, zero, power)):
        value = schedule(k)
        assert type(value) is float
        assert value == 0
        assert math.copysign(1, value) == 1


def test_a_zero_tensor_is_not_plainly_zero() -> None:
    c = torch.zeros((), requires_grad=True)
    (slope,) = torch.autograd.grad(harmonic(c)(4), c)
    assert slope == 0.25


@ALL
@pytest.mark.parametrize("k", [1, 2, 7])
def test_learnable_constants(name: str, k: int) -> None:
    """Reverse mode against central differences (gradcheck), and values against the plain schedule."""
    _, plain, _ = TABLE[name]
    constants = tuple(torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in plain)
    value = build(name, *constants)(k)
    assert isinstance(value, Tensor)
    assert value.shape == ()
    torch.testing.assert_close(value.item(), build(name)(k), rtol=1e-14, atol=0)
    if value < TOP:
        assert torch.autograd.gradcheck(lambda *c: build(name, *c)(k), constants)


def test_gradients_written_out() -> None:
    c, p = (torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in (0.5, 0.7))
    slopes = torch.autograd.grad(polynomial(c, p)(3), (c, p))
    torch.testing.assert_close(slopes[0].item(), 3**-0.7)
    torch.testing.assert_close(slopes[1].item(), -0.5 * 3**-0.7 * math.log(3))


@ALL
def test_gradient_is_zero_where_clipped(name: str) -> None:
    _, plain, _ = TABLE[name]
    constants = [torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in plain]
    large = (0.4, 0.9, 2.0, 1.0) if name == "theory" else (1.4, *plain[1:])
    with torch.no_grad():
        for tensor, v in zip(constants, large, strict=True):
            tensor.fill_(v)
    value = build(name, *constants)(1)
    assert value == TOP
    for slope in torch.autograd.grad(value, constants, allow_unused=True):
        assert slope is None or slope == 0


@ALL
def test_k_may_be_a_tensor(name: str) -> None:
    schedule = build(name)
    for k in (1, 3, 50):
        for tensor in (torch.tensor(k, dtype=torch.float64), torch.tensor(k)):
            value = schedule(tensor)
            assert isinstance(value, Tensor)
            assert value.dtype == torch.float64
            assert value.shape == ()
            torch.testing.assert_close(value.item(), schedule(k), rtol=1e-14, atol=0)


@ALL
def test_traced_in_k_and_on_meta(name: str) -> None:
    """No value is read: vmap over k and the meta device both work."""
    schedule = build(name)
    steps = torch.arange(1, 6, dtype=torch.float64)
    mapped = torch.func.vmap(schedule)(steps)
    torch.testing.assert_close(mapped.tolist(), [schedule(k) for k in range(1, 6)], rtol=1e-14, atol=0)
    _, plain, _ = TABLE[name]
    learned = build(name, *(torch.tensor(v, device="meta") for v in plain))
    assert learned(3).device.type == "meta"


def test_types_and_shapes_of_constants() -> None:
    c = torch.tensor([0.5], requires_grad=True)
    value = harmonic(c)(2)
    assert isinstance(value, Tensor)
    assert value.shape == ()
    assert value.dtype == torch.float32
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        clipped = constant(torch.tensor(3.0, dtype=dtype))(1)
        assert isinstance(clipped, Tensor)
        assert clipped.dtype == dtype
        assert clipped < 1


def test_theory_at_its_limits() -> None:
    # sigma = L_F and s_u = 2 / (L_F + sigma): beta is 0, though 1 - drop may round below it.
    for smooth in (1.0, 3.0, 0.1, 7.3):
        schedule = theory(2 / (smooth + smooth), smooth, smooth)
        assert schedule(1) == TOP
        assert schedule(10) == pytest.approx(0.2)
    # A tiny rate: 1 - beta is 5e-18, and must not vanish.
    assert theory(1e-17, 1.0, 1.0)(10**18) == pytest.approx(2 / (10**18 * 5e-18), rel=1e-12)
    assert theory(1.0, 1.0, 1.0, eps=0.25)(1) == 0.75
    assert theory(1.0, 1.0, 1.0, 0.5)(4) == 0.25
    assert to_plain(theory(1.0, 1.0, 1.0))["eps"] == EPS


@pytest.mark.parametrize("k", [1, 10])
def test_theory_has_finite_slopes_at_beta_zero(k: int) -> None:
    rate = torch.ones((), dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(theory(rate, 1.0, 1.0)(k), rate)
    assert slope.isfinite()


REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: constant(-0.1), "`c` of `constant` must not be negative; got -0.1"),
    (lambda: harmonic(-1), "`c` of `harmonic`"),
    (lambda: harmonic(float("nan")), "`c` of `harmonic`"),
    (lambda: harmonic(float("inf")), "`c` of `harmonic`"),
    (lambda: polynomial(-1, 0.5), "`c` of `polynomial`"),
    (lambda: polynomial(0.5, -1), "`power` of `polynomial`"),
    (lambda: quiet(geometric, -1, 0.5), "`c` of `geometric`"),
    (lambda: quiet(geometric, 0.5, 1.0), r"`decay` of `geometric` must lie in \[0, 1\); got 1.0. Use `constant"),
    (lambda: quiet(geometric, 0.5, -0.5), "`decay` of `geometric`"),
    (lambda: theory(0.0, 1.0, 1.0), "`upper_lr` of `theory` must be positive"),
    (lambda: theory(-0.1, 1.0, 1.0), "`upper_lr` of `theory` must be positive"),
    (lambda: theory(1.01, 1.0, 1.0), r"`upper_lr` must lie in .*\(0, 1\]; got 1.01"),
    (lambda: theory(0.1, 2.0, 1.0), "`upper_strong_convexity` must not exceed `upper_smoothness`"),
    (lambda: theory(torch.tensor(9.0), 2.0, 1.0), "`upper_strong_convexity` must not exceed"),
    (lambda: theory(0.1, 0.0, 1.0), "`upper_strong_convexity` of `theory` must be positive"),
    (lambda: theory(0.1, 1.0, 1.0, 1.1), "`gamma` of `theory`"),
    (lambda: theory(0.1, 1.0, 1.0, 0.0), "`gamma` of `theory`"),
    (lambda: theory(0.1, 1.0, 1.0, 1.0, 0.0), "`eps` of `theory`"),
    (lambda: theory(0.1, 1.0, 1.0, 1.0, 1.0), "`eps` of `theory`"),
    (lambda: harmonic(torch.ones(2)), r"`c` of `harmonic` must be a floating-point tensor with one element"),
    (lambda: harmonic(torch.tensor(1)), "floating-point tensor with one element"),
    (lambda: harmonic(0.5)(0), "`k` counts the steps from 1; got 0"),
    (lambda: from_plain({"schedule": "linear", "c": 1.0}), "`schedule` must be one of constant, harmonic"),
    (lambda: from_plain({"c": 1.0}), "`schedule` must be one of"),
    (lambda: from_plain({"schedule": "harmonic"}), r"`harmonic` has the constants \['c'\]; got \[\]"),
    (lambda: from_plain({"schedule": "harmonic", "c": 1.0, "d": 2}), "`harmonic` has the constants"),
]


@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_refusals_say_what_and_what_to_do(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_wrong_kinds_are_type_errors() -> None:
    with pytest.raises(TypeError, match=r"`c` of `harmonic` must be a number or a tensor; got str"):
        harmonic("0.5")
    with pytest.raises(TypeError, match=r"`eps` of `theory` must be a number; got Tensor"):
        theory(0.1, 1.0, 1.0, 1.0, torch.tensor(1e-6))


def test_tensors_are_not_checked() -> None:
    bad = torch.tensor(-1.0)
    quiet(geometric, bad, torch.tensor(2.0))
    polynomial(bad, bad)
    theory(bad, bad, bad, bad)


def test_finite_sums_warn() -> None:
    with pytest.warns(UserWarning, match="finite sum.*lower-level singleton.*harmonic") as caught:
        geometric(0.5, 0.9)
    assert caught[0].filename == __file__  # the user's line
    with pytest.warns(UserWarning, match="finite sum"):
        geometric(torch.tensor(0.5), torch.tensor(0.9))
    with pytest.warns(UserWarning, match=r"polynomial\(power=1.01\).*finite sum"):
        polynomial(0.5, 1.01)


def test_nothing_else_warns() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        polynomial(0.5, 1)
        polynomial(0.5, torch.tensor(2.0))
        harmonic(0.5)
    schedule = build("geometric")
    with warnings.catch_warnings():  # nor when rebuilt
        warnings.simplefilter("error")
        assert from_plain(to_plain(schedule) or {}) == schedule
        assert pickle.loads(pickle.dumps(schedule)) == schedule
        assert copy.deepcopy(schedule) == schedule
        assert isinstance(dataclasses.replace(schedule, c=torch.tensor(0.1)), Schedule)


def test_print_compare_hash() -> None:
    assert repr(harmonic(0.5)) == "harmonic(c=0.5)"
    assert repr(build("geometric")) == "geometric(c=0.5, decay=0.8)"
    assert harmonic(0.5) == harmonic(0.5)
    assert harmonic(1) == harmonic(1.0)
    assert harmonic(0.5) != harmonic(0.6)
    assert harmonic(0.5) != constant(0.5)
    assert harmonic(0.5) != 0.5
    assert len({harmonic(0.5), harmonic(0.5), constant(0.5)}) == 2
    c = torch.tensor(0.5)
    assert harmonic(c) == harmonic(c)
    assert hash(harmonic(c)) == hash(harmonic(c))
    assert harmonic(c) != harmonic(c.clone())
    assert harmonic(c) != harmonic(0.5)
    assert harmonic(torch.tensor(0.5, device="meta")) != harmonic(c)
    with pytest.raises(dataclasses.FrozenInstanceError):
        harmonic(0.5).c = 1.0


@ALL
def test_pickle_and_copy(name: str) -> None:
    schedule = build(name)
    assert pickle.loads(pickle.dumps(schedule)) == schedule
    assert copy.deepcopy(schedule) == schedule
    _, plain, _ = TABLE[name]
    learned = build(name, *(torch.tensor(v, requires_grad=True) for v in plain))
    for other in (pickle.loads(pickle.dumps(learned)), copy.deepcopy(learned)):
        assert other(3) == learned(3)
        assert other(3).requires_grad


@ALL
def test_replace_with_tensors(name: str) -> None:
    schedule = build(name)
    fields = [field for field in dataclasses.fields(schedule) if field.name != "eps"]
    tensors = {f.name: torch.tensor(getattr(schedule, f.name), dtype=torch.float64) for f in fields}
    replaced = dataclasses.replace(schedule, **tensors)
    torch.testing.assert_close(replaced(3).item(), schedule(3))


def through_a_file(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@ALL
def test_plain_round_trip(name: str) -> None:
    schedule = build(name)
    plain = to_plain(schedule)
    assert plain is not None
    assert plain["schedule"] == name
    assert all(type(value) is float for key, value in plain.items() if key != "schedule")
    assert from_plain(through_a_file(plain)) == schedule


@ALL
@pytest.mark.parametrize("wrap", [lambda t: t.requires_grad_(), torch.nn.Parameter])
def test_plain_round_trip_of_tensors(name: str, wrap: Callable[[Tensor], Tensor]) -> None:
    _, plain, _ = TABLE[name]
    schedule = build(name, *(wrap(torch.tensor(v)) for v in plain))
    loaded = from_plain(through_a_file(to_plain(schedule)))
    value = loaded(3)
    assert isinstance(value, Tensor)
    assert value.requires_grad
    assert value == schedule(3)


def test_plain_form() -> None:
    assert to_plain(harmonic(0.5)) == {"schedule": "harmonic", "c": 0.5}
    c = torch.tensor(0.5)
    written = to_plain(harmonic(c))
    assert written is not None
    assert written["c"] is c
    plain = {"schedule": "harmonic", "c": 0.5}
    from_plain(plain)
    assert plain == {"schedule": "harmonic", "c": 0.5}  # untouched
    for other in (lambda k: 0.5 / k, 0.5, None, torch.tensor(0.5)):
        assert to_plain(other) is None

    class Mine(type(harmonic(0.5))):
        def __call__(self, k: Any) -> float:
            return 0.1

    assert to_plain(Mine(0.5)) is None


def test_public_names() -> None:
    assert set(schedules.__all__) >= {"constant", "harmonic", "polynomial", "geometric", "theory"}
    assert all(hasattr(schedules, name) for name in schedules.__all__)
