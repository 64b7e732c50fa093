"""Every cell of the table of what composes with what is right, or refused with a sentence."""

from __future__ import annotations

import pytest
import torch
from campaign import package
from composition import KINDS, OPTIONS, REFUSED, by_hand, entry, hypergradient, table


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_cell_is_right_or_refused(kind: str, option: str) -> None:
    message = REFUSED.get((kind, option))
    if message is not None:
        with pytest.raises((ValueError, TypeError, RuntimeError, NotImplementedError), match=message):
            hypergradient(KINDS[kind], OPTIONS[option])
        return
    with package.traced():  # as compiled, without the C++ compiler
        got = hypergradient(KINDS[kind], OPTIONS[option])
    want = by_hand(KINDS[kind], OPTIONS[option])
    tolerance = KINDS[kind].tolerance
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def test_the_table_prints() -> None:
    lines = table(entry).splitlines()
    assert len(lines) == len(KINDS) + 2
    assert all(line.count("|") == len(OPTIONS) + 2 for line in lines)
