"""The bounded part of the campaign (`tests/campaign`), and a look at the records of its full runs."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

import pytest
import torch
from campaign import awkward, compiled, fuzz, later, layers, matrix, package, registry
from campaign.draw import draw

from bda_optim._context import forward
from bda_optim._modules import skeleton


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name == "compiled" else ()) for name in registry.PARTS]
)
def test_bounded_part(name: str, record_property: Any) -> None:
    result = registry.smoke(name)
    record_property("table", "\n".join([*result.get("table", ()), registry.table({name: result})]))
    assert result["count"] > 0
    assert not result["failures"], "\n".join(result["failures"])


@pytest.mark.parametrize("name", registry.PARTS)
def test_full_run_is_recorded_and_found_nothing(name: str) -> None:
    """What the page on reliability says was measured: by `python -m tests.campaign NAME --record`."""
    result = registry.read(name)
    assert result is not None, f"run `python -m tests.campaign {name} --record`"
    assert result["count"] > 0 and result["failures"] == []
    assert {"torch", "python", "bda_optim"} <= result["versions"].keys()
    assert registry.load(name).row(result)


def test_500_configurations_were_really_compiled() -> None:
    """By four runs of `python -m tests.campaign compiled --seed S`, two of them before the sums were spelled out."""
    result = registry.read("compiled")
    assert result is not None and result["outcomes"]["compiled"] >= 500
    assert sum(part["outcomes"]["compiled"] for part in result["parts"]) == result["outcomes"]["compiled"]


def test_the_full_run_with_later_options_is_recorded_and_found_nothing() -> None:
    """By `python -m tests.campaign fuzz --later --record`."""
    result = registry.read("fuzz_later")
    assert result is not None and result["count"] >= 1000 and result["failures"] == []
    assert fuzz.row(result)


def test_compiled_configurations_are_those_of_the_frozen_list() -> None:
    drawn = [compiled.draw_compiled(compiled.BOUNDED_SEED, number) for number in range(60)]
    configs = [config for config in drawn if config is not None]
    assert len(configs) > 30 and all(config.compile for config in configs)
    for config in configs:
        frozen = draw(config.seed, config.number)
        assert dataclasses.replace(config, compile=frozen.compile, dtype=frozen.dtype, chunk=frozen.chunk) == frozen


def test_a_wrong_compiled_number_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The campaign compares with its own loop, not with the uncompiled steps of the package."""
    config = next(c for n in range(99) if (c := compiled.draw_compiled(0, n)) and c.style == "hypergradient")
    gradients = package.gradients
    off = lambda problem, how: (lambda value, grads, ends: (value, [1.01 * g for g in grads], ends))(  # noqa: E731
        *gradients(problem, how)
    )
    monkeypatch.setattr(compiled, "LARGEST", 10_000)  # a trace takes no time
    with package.traced():
        assert compiled.check(config) == "compiled"
        monkeypatch.setattr(package, "gradients", off)
        with pytest.raises(fuzz.Wrong, match="derivative"):
            compiled.check(config)


@pytest.mark.parametrize(
    ("seed", "count", "digest"),
    [
        (0, 10_000, "59a9d4e2d85198a600d4c5ff9c05db7daccd9fb60c3ebeb943d9ebc120406556"),
        (fuzz.BOUNDED_SEED, fuzz.BOUNDED, "a1790827f83aa6c48e8f2ff7eb972b3162f9cdbbcaa78fa76028f18b4fd28dcd"),
    ],
)
def test_the_drawn_configurations_are_a_frozen_list(seed: int, count: int, digest: str) -> None:
    """Later options are drawn by `later.draw_later`; a change of `draw` would make the recorded numbers meaningless."""
    lines = "".join(f"{draw(seed, number)}\n" for number in range(count))
    assert hashlib.sha256(lines.encode()).hexdigest() == digest


def test_later_options_are_added_to_the_frozen_list(monkeypatch: pytest.MonkeyPatch) -> None:
    configs = [later.draw_later(fuzz.LATER_SEED, number) for number in range(fuzz.BOUNDED_LATER)]
    assert [dataclasses.replace(c, later={}) for c in configs] == [draw(c.seed, c.number) for c in configs]
    assert {name for config in configs for name in config.later} == later.OPTIONS.keys(), "each is in the bounded part"
    new = later.Option(lambda config: True, (1, 2), lambda problem, value: None)
    monkeypatch.setattr(later, "OPTIONS", {"new": new, **later.OPTIONS})
    again = [later.draw_later(fuzz.LATER_SEED, number) for number in range(fuzz.BOUNDED_LATER)]
    assert any("new" in config.later for config in again)
    assert [{k: v for k, v in c.later.items() if k != "new"} for c in again] == [c.later for c in configs]


def test_the_matrices_are_large_enough() -> None:
    assert len(layers.CASES) >= 84
    assert len(awkward.CASES) >= 40


@pytest.mark.parametrize(
    ("name", "says"),
    [("spectral_norm", "not refused"), ("Linear", ""), ("MultiheadAttention without weights", "refused with")],
)
def test_the_matrix_notices_a_fault(name: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the package's precautions torch is silently wrong, or raises; a plain layer is right either way."""
    torch.set_default_dtype(torch.float64)
    assert matrix.judge(layers.CASES[name]).failure == ""
    monkeypatch.setattr(skeleton, "recompose", lambda twin: None)
    idle = ((lambda: True, lambda on: None),) * len(forward._ATTENTION)
    monkeypatch.setattr(forward, "_ATTENTION", idle)
    failure = matrix.judge(layers.CASES[name]).failure
    assert says in failure and bool(says) == bool(failure)
