"""Where a rollout stores its states: segments that are replayed once, or the binomial reversal with few states."""

from __future__ import annotations

import functools
import math


def reevaluations(steps: int, slots: int) -> int:
    """Return t(K, s), the optimal number of steps evaluated again after the first sweep with s stored states.

    >>> [reevaluations(10, s) for s in (1, 2, 3, 10)]
    [45, 20, 15, 9]
    """
    r = _repetitions(steps, slots)
    return r * steps - (math.comb(slots + r, r - 1) if r else 0)


def _repetitions(steps: int, slots: int) -> int:
    return next(r for r in range(steps + 1) if math.comb(slots + r, r) >= steps)


@functools.lru_cache(maxsize=4096)
def split(steps: int, slots: int) -> int:
    """Return after how many of `steps` the next state is stored: then the work is ``reevaluations(steps, slots)``."""
    if slots == 1:
        return steps - 1
    r = _repetitions(steps, slots)
    most = math.comb(slots + r - 1, slots)  # what `slots` can reverse in r - 1 repetitions
    return min(most, steps - math.comb(slots + r - 2, slots - 1))


def segments(steps: int, cost: float) -> list[int]:
    """Return where segments start so that the stored states and the graphs of one segment stay below a common bound M.

    The unit is a state, and `cost` the size of a step's graph. Segments are replayed from the last one to the first and
    their states dropped on the way; so the first, beside which fewer states are left, may be longer. With i states
    beside segment i, its length is (M - i) / cost, and M about sqrt(2 cost K). Equal ones would need sqrt(4 cost K).

    >>> segments(10, 1.0)
    [0, 4, 7, 9]
    """
    bound = max(1, math.isqrt(int(2 * cost * steps)) - 1)
    while True:
        starts: list[int] = []
        at = 0
        while at < steps and len(starts) < bound:
            length = max(1, int((bound - len(starts)) / cost))
            starts.append(at)
            at += length
        if at >= steps:
            return starts
        bound += 1
