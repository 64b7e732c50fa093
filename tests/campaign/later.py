"""Options that came after the frozen list of `draw.py`: each configuration of the list gets some of them in addition.

An option is a row of `OPTIONS`: the configurations that it fits, its value, and what it does to a problem. Each option
draws by itself, so that a new row leaves the values of the others as they are. What a problem offers to a row:

- ``problem.arguments``: further arguments of the call (`rollout`, `hypergradient`, `unroll`, `innerloop_ctx`);
- ``problem.adjoint``: further settings of the adjoint, and ``problem.wrap``, what is made of it;
- ``group.settings`` of ``problem.groups``: settings of a parameter group, also functions of k; the witness sees them,
  and a new one needs its formula in `naive.py`;
- ``problem.batches``, ``problem.lower``, ``problem.upper``: what the package and the witness are given;
- ``problem.tolerance``: how far the package may be from the witness.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import bda_optim as bda

from . import draw
from .draw import Config


class Option(NamedTuple):
    """One later option."""

    fits: Callable[[Config], bool]
    values: Sequence[Any]
    apply: Callable[[Any, Any], None]  # of a problem and a value


class Lazy(Sequence[Any]):
    """Batches that are made when they are read."""

    def __init__(self, items: Sequence[Any]) -> None:
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: Any) -> Any:
        return self._items[index]


def _replays(config: Config) -> bool:
    return config.adjoint in ("Checkpointed", "every", "slots")


def _may_stop(config: Config) -> bool:
    return config.style != "innerloop" and config.chunk is None


def _in_parts(config: Config) -> bool:
    """Whether two passes over a batch give what one gives: neither random numbers nor buffers differ."""
    if config.style == "innerloop" or config.batches == "none" or config.compile:
        return False
    return config.family not in ("conv", "dropout", "spectral")


def _is_smooth(config: Config) -> bool:
    """Whether products by differences are right to 1e-7."""
    smooth = config.activation != "relu" and config.family != "spectral"
    return _replays(config) and smooth and config.dtype == "float64" and not config.compile


def _twice(batch: Any) -> list[tuple[float, Any]]:
    """The batch as two parts of different weights; their mean is the loss on the batch, whatever the loss is."""
    return [(1.0, batch), (2.0, batch)]


def _accumulated(problem: Any, value: Any) -> None:
    problem.arguments["accumulate"] = _twice


def _by_differences(problem: Any, value: Any) -> None:
    problem.wrap = lambda how: bda.Differences(within=how, scale=value)
    problem.tolerance = max(problem.tolerance, 1e-6)


def _to_adjoint(name: str) -> Callable[[Any, Any], None]:
    return lambda problem, value: problem.adjoint.update({name: value})


def _to_call(name: str) -> Callable[[Any, Any], None]:
    return lambda problem, value: problem.arguments.update({name: value})


def _make_lazy(problem: Any, value: Any) -> None:
    problem.batches = Lazy(problem.batches)


OPTIONS: dict[str, Option] = {
    "offload": Option(_replays, ("cpu",), _to_adjoint("offload")),
    "check": Option(_replays, (True,), _to_adjoint("check")),
    "lazy": Option(lambda c: c.batches in ("list", "same") and c.style != "innerloop", (True,), _make_lazy),
    "accumulate": Option(_in_parts, ("twice",), _accumulated),
    "differences": Option(_is_smooth, (None,), _by_differences),
    "on_divergence": Option(_may_stop, ("stop", "ignore"), _to_call("on_divergence")),
}


def draw_later(seed: int, number: int) -> Config:
    """Return the configuration of a number with later options; each that fits takes part in every second one."""
    config = draw.draw(seed, number)
    chosen = {}
    for name, option in OPTIONS.items():
        dice = random.Random(f"{seed}:{number}:{name}")
        if not config.spoil and option.fits(config) and dice.random() < 0.5:
            chosen[name] = dice.choice(option.values)
    return dataclasses.replace(config, later=chosen)


def apply(problem: Any) -> None:
    """Do to a problem what its configuration's later options say."""
    for name, value in problem.config.later.items():
        OPTIONS[name].apply(problem, value)
