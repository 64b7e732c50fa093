"""The bounded part of the campaign (`tests/campaign`), and a look at the records of its full runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from campaign import awkward, layers, matrix, registry

from bda_optim._context import forward
from bda_optim._modules import skeleton


@pytest.mark.parametrize("name", registry.PARTS)
def test_bounded_part(name: str, record_property: Any) -> None:
    result = registry.smoke(name)
    record_property("table", "\n".join([*result.get("table", ()), registry.table({name: result})]))
    assert result["count"] > 0
    assert not result["failures"], "\n".join(result["failures"])


@pytest.mark.parametrize("name", registry.PARTS)
def test_full_run_is_recorded_and_found_nothing(name: str) -> None:
    """What the README says was measured: by `python -m tests.campaign NAME --record`."""
    result = registry.read(name)
    assert result is not None, f"run `python -m tests.campaign {name} --record`"
    assert result["count"] > 0 and result["failures"] == []
    assert {"torch", "python", "bda_optim"} <= result["versions"].keys()
    assert registry.load(name).row(result)


def test_the_matrices_are_large_enough() -> None:
    assert len(layers.CASES) >= 84
    assert len(awkward.CASES) >= 40


@pytest.mark.parametrize(
    ("name", "says"),
    [("spectral_norm", "not refused"), ("Linear", ""), ("MultiheadAttention without weights", "refused with")],
)
def test_the_matrix_notices_a_fault(name: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the package's own care torch is wrong in silence, or raises; a plain layer is right all the same."""
    torch.set_default_dtype(torch.float64)
    assert matrix.judge(layers.CASES[name]).failure == ""
    monkeypatch.setattr(skeleton, "recompose", lambda twin: None)
    idle = ((lambda: True, lambda on: None),) * len(forward._ATTENTION)
    monkeypatch.setattr(forward, "_ATTENTION", idle)
    failure = matrix.judge(layers.CASES[name]).failure
    assert says in failure and bool(says) == bool(failure)
