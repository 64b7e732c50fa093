"""The bounded part of the campaign (`tests/campaign`), and a look at the records of its full runs."""

from __future__ import annotations

from typing import Any

import pytest
from campaign import registry


@pytest.mark.parametrize("name", registry.PARTS)
def test_bounded_part(name: str, record_property: Any) -> None:
    result = registry.smoke(name)
    record_property("table", registry.table({name: result}))
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
