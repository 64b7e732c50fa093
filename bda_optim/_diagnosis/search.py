r"""The search for alpha: the constant c of ``harmonic(c)`` and the number of steps K that go with it.

Two things make the hypergradient differ from that of the optimistic problem, and both are measured:

- the memory of the start, m = |dF/dy_0| / |dF/dy_K|, falls with c and, as a power of K, with K;
- the bias of the last weight alpha_K = c/K is about the change b of the hypergradient from K/2 to K steps.

c is doubled from 0.25 until m <= 0.05. Where m + b is still above 1.5 %, c is doubled once more, and the pair (c, K) is
taken that needs the fewest steps to bring the predicted sum below 1 %. On twenty least-squares problems and
counter-examples the sum was 0.7 to 3 times the true error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from .._step.schedules import harmonic
from .findings import BIASED, EXPLODED, FORGOTTEN, Measured, change
from .inner_loop import Build, InnerLoop
from .progress import Progress
from .sweep import Sweep, sweep

TOLERABLE = 0.015
"""An estimated error up to this is left alone."""

AIM = 0.01
"""What the estimated error is brought down to, if steps are added at all."""

LONGEST = 2000
"""The largest K that is suggested to somebody who uses fewer."""

FIRST = 0.25
"""The first c."""

ALLOWED = 16
"""The search evaluates at most this many times K steps: eight sweeps."""


class Trial(NamedTuple):
    """A constant c that was tried.

    Attributes:
        c: The constant of `harmonic`.
        memory: m, at the K that was tried.
        power: Memory falls as K to the minus this.
        bias: b, at that K.
    """

    c: float
    memory: float
    power: float
    bias: float

    def error(self, ratio: float) -> float:
        """Return the predicted error after `ratio` times as many steps."""
        return self.remembered(ratio) + self.bias / ratio

    def remembered(self, ratio: float) -> float:
        """Return the predicted memory after `ratio` times as many steps."""
        return self.memory * math.pow(ratio, -self.power)


class Choice(NamedTuple):
    """What the search settled on.

    Attributes:
        c: The constant of `harmonic`; 0 for alpha = 0, None where alpha stays as given.
        steps: K, the number of inner steps.
        error: The estimated relative error of the hypergradient; None where nothing is known of it.
        memory: The memory of the start that is left, predicted where K is not the one that was tried.
        without: The memory with alpha = 0.
    """

    c: float | None
    steps: int
    error: float | None
    memory: float
    without: float


class Search:
    """Tries constants on one inner loop, and counts the steps.

    Args:
        build: Makes the inner loop.
        changes: Settings that differ from the user's in every trial: the rates.
        measured: The report's measurements.
        progress: Is called with every trial.
        rewind: Sets the random state to what it was at first, so that all trials draw the same numbers.
        extendable: Whether K may be raised; with given batches it may not.
    """

    def __init__(
        self, build: Build, changes: dict[str, Any], measured: Measured, progress: Progress,
        rewind: Callable[[], None], *, extendable: bool,
    ) -> None:  # fmt: skip
        """Store them."""
        self._build = build
        self._changes = changes
        self._measured = measured
        self._progress = progress
        self._rewind = rewind
        self.steps = measured.loop.steps
        self.longest = max(self.steps, LONGEST) if extendable else self.steps
        self.evaluated = 0
        self.sweep: Sweep = measured.sweep
        """The sweep of the constant that was chosen, at the K that was tried."""

    def without(self) -> tuple[Sweep, Sweep | None]:
        """Return the sweeps of K and K/2 steps with alpha = 0."""
        if "lr" not in self._changes and not self._measured.loop.aggregates():
            return self._measured.sweep, self._measured.half
        loop = self._build(alpha=0.0, **self._changes)
        return self._sweep(loop, "alpha=0"), self._half(loop, "alpha=0, K/2")

    def regular(self, whole: Sweep, half: Sweep | None) -> Choice:
        """Return how many steps alpha = 0 needs on a lower level with a single solution."""
        self.sweep = whole
        moved = None if half is None else change(half, whole)
        error = None if moved is None else moved**2  # the error falls as rho^K, and `moved` is about rho^(K/2)
        steps = self.steps
        if error is not None and moved is not None and error > TOLERABLE:
            slowest = self._measured.steps_to_forget * math.log(AIM / 10) / math.log(FORGOTTEN)
            wanted = math.inf if moved >= 1 else steps * math.log(AIM) / (2 * math.log(moved))
            steps = self._rounded(max(wanted, slowest if math.isfinite(slowest) else 0.0))
            error = min(1.0, moved) ** (2 * steps / self.steps)
        if whole.start > FORGOTTEN and math.isfinite(self._measured.steps_to_forget):
            steps = max(steps, self._rounded(self._measured.steps_to_forget))
        return Choice(0.0, steps, error, whole.start, whole.start)

    def shorter(self, whole: Sweep) -> Choice:
        """Halve K until adjoints no longer explode."""
        steps, found = self.steps, whole
        while found.growth > EXPLODED and steps > 1 and self._affordable(steps):
            steps //= 2
            loop = self._build(alpha=0.0, **self._changes).shortened(steps)
            found = self._sweep(loop, f"alpha=0, K={steps}")
        self.sweep = found
        return Choice(0.0, steps, None, found.start, whole.start)

    def aggregated(self, without: float) -> Choice:
        """Double c until the start is forgotten; then, where the error is too large, look at more steps as well."""
        tried: list[tuple[float, Sweep]] = []
        c = FIRST
        while self._affordable(3 * self.steps):
            found = self._attempt(c)
            if found is None:
                break
            tried.append((c, found))
            if found.start <= FORGOTTEN:
                break
            c *= 2
        if not tried or tried[-1][1].start > FORGOTTEN:
            remembered = tried[-1][1].start if tried else without
            return Choice(None, self.steps, None, remembered, without)
        trials = [self._trial(*tried[-1])]
        if trials[0].error(1.0) > TOLERABLE and self._affordable(3 * self.steps):
            found = self._attempt(2 * c)
            if found is not None:
                tried.append((2 * c, found))
                trials.append(self._trial(2 * c, found))
        return self._longer(trials, dict(tried), without)

    def _trial(self, c: float, found: Sweep) -> Trial:
        """Measure the bias too, and read off the adjoint norms how fast the memory falls.

        That is between K/4 and K/2, where the steep directions are gone.
        """
        half = self._half(self._build(alpha=harmonic(c), **self._changes), f"harmonic({c:g}), K/2")
        bias = None if half is None else change(half, found)
        late, early = found.norms[self.steps // 2], found.norms[self.steps // 4]
        power = math.log2(late / early) if self.steps >= 4 and 0 < early < late < math.inf else 0.0
        return Trial(c, found.start, power, 1.0 if bias is None else bias)

    def _longer(self, trials: Sequence[Trial], sweeps: dict[float, Sweep], without: float) -> Choice:
        """Return the pair of c and K that needs the fewest steps; the K given, and the smallest error, if none does."""
        ranked = []
        for trial in trials:
            ratio = 1.0
            while not self._good(trial, ratio) and ratio * self.steps < self.longest:
                ratio = min(1.1 * ratio, self.longest / self.steps)
            good = self._good(trial, ratio)
            ranked.append((0.0, ratio, trial) if good else (self._error(trial, 1.0), 1.0, trial))
        _, ratio, trial = min(ranked)
        self.sweep = sweeps[trial.c]
        steps = self.steps if ratio == 1 else self._rounded(ratio * self.steps)
        ratio = steps / self.steps
        return Choice(trial.c, steps, self._error(trial, ratio), trial.remembered(ratio), without)

    def _good(self, trial: Trial, ratio: float) -> bool:
        limit = TOLERABLE if ratio == 1 else AIM
        return trial.error(ratio) <= limit and self._weight(trial, ratio) <= 0.9 * BIASED

    def _error(self, trial: Trial, ratio: float) -> float:
        return max(trial.error(ratio), self._weight(trial, ratio) if ratio > 1 else 0.0)

    def _weight(self, trial: Trial, ratio: float) -> float:
        """Return alpha_K kappa_f after `ratio` times as many steps, when fewer directions are flat."""
        flat = self._measured.curvature.flat
        if flat is None or self._measured.not_convex:
            return 0.0
        sloped = [value for value, _ in flat.density if value > flat.threshold / ratio]
        return trial.c / (ratio * self.steps) * flat.steepest / min(sloped, default=math.inf)

    def _attempt(self, c: float) -> Sweep | None:
        """Return the sweep with harmonic(c); None where y diverges."""
        try:
            return self._sweep(self._build(alpha=harmonic(c), **self._changes), f"harmonic({c:g})")
        except FloatingPointError:
            self.evaluated += self.steps
            return None

    def _half(self, loop: InnerLoop, name: str) -> Sweep | None:
        return self._sweep(loop.shortened(self.steps // 2), name) if self.steps > 1 else None

    def _sweep(self, loop: InnerLoop, name: str) -> Sweep:
        self._rewind()
        found = sweep(loop, advance=self._progress.stage(name, 2 * loop.steps))
        self.evaluated += found.evaluated
        return found

    def _affordable(self, steps: int) -> bool:
        return self.evaluated + steps <= ALLOWED * self.steps

    def _rounded(self, steps: float) -> int:
        """Return a number of steps with two digits, at least as large as K and at most the longest."""
        if steps >= self.longest:
            return self.longest
        digits = int(10 ** max(0, math.floor(math.log10(max(1.0, steps))) - 1))
        return max(self.steps, min(self.longest, math.ceil(steps / digits) * digits))
