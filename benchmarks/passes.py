"""What does each pass of the compiler gain, and on which workload?

    python -m benchmarks.passes

Every row leaves one pass out; the ratio is its time divided by that with all passes. A pass without 3 % anywhere has to
go.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import sys
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

from tqdm import tqdm

from bda_optim import _functional_module
from bda_optim._compiled import cache, inductor, matmul, pooling, program, programs

from . import _common, first_call, tasks
from ._common import ratio

LEAST = 1.03
"""What a run without a pass must take, on some workload, times the one with it."""


class Without(NamedTuple):
    """How a pass is left out: by another value of a name in a module."""

    module: Any = None
    name: str = ""
    value: Any = None


WITHOUT = {
    "all passes": Without(),
    "small batched products spelled out": Without(matmul, "_SMALL_PRODUCT", -1),
    "narrow products by oneDNN": Without(matmul, "_LARGE_MATRIX", math.inf),
    "several steps per call": Without(programs, "_MOST_STEPS", 1),
    "a step and its pull-back divided": Without(program, "partition", lambda *arguments: None),
    "max-pooling with channels last": Without(pooling, "pays_as_channels_last", lambda x: False),
    "layouts left as they are": Without(inductor, "_OPTIONS", {**inductor._OPTIONS, "layout_optimization": True}),
    "no assertions of sizes": Without(inductor, "_OPTIONS", {**inductor._OPTIONS, "size_asserts": True}),
    "losses of tasks": Without(_functional_module, "traced_losses", lambda *arguments: None),
}

WORKLOADS: dict[str, tuple[str, ...]] = {
    "heads": ("small batched products spelled out", "several steps per call", "losses of tasks"),
    "softmax": ("narrow products by oneDNN", "a step and its pull-back divided"),
    "counterexample": ("several steps per call", "a step and its pull-back divided", "no assertions of sizes"),
    "mlp": ("several steps per call", "a step and its pull-back divided"),
    "conv": (
        "a step and its pull-back divided", "max-pooling with channels last", "layouts left as they are",
    ),
}  # fmt: skip


def contestant(name: str, without: Without, *, smoke: bool) -> _common.Run:
    """Return what computes a hypergradient with programs of its own."""
    if name == "heads":
        run = tasks.at_once(tasks.heads(smoke=smoke), compile=not smoke)
    else:
        run = first_call.unrolled(name, compile=not smoke, smoke=smoke)
    engines: tuple[Any, Any] = weakref.WeakKeyDictionary(), weakref.WeakKeyDictionary()

    def call() -> Any:
        with mock.patch.multiple(cache, _engines=engines[0], _recent=engines[1]), _left_out(without):
            return run()

    return call


@contextlib.contextmanager
def _left_out(without: Without) -> Iterator[None]:
    if without.module is None:
        yield
        return
    with mock.patch.object(without.module, without.name, without.value):
        yield


def compare(name: str, args: Any, bar: tqdm[Any]) -> dict[str, Any]:
    """Time one workload with all passes, and without each that matters to it."""
    chosen = {who: WITHOUT[who] for who in ("all passes", *WORKLOADS[name])}
    runs = {who: contestant(name, without, smoke=args.smoke) for who, without in chosen.items()}
    entries = _common.first_calls(runs, first_call.exact(name, smoke=args.smoke), bar)
    _common.race(runs, entries, args.rounds, bar)
    base = entries["all passes"]
    rows = [[who if e is base else f"without: {who}", e.first, e.time * 1e3, ratio(e, base), f"{e.error:.0e}"]
            for who, e in entries.items()]  # fmt: skip
    return {
        "name": name,
        "table": _common.table([first_call.TITLES[name], "first call s", "CPU ms", "x all", "error"], rows),
        "entries": [{**e.plain(), "ratio": round(ratio(e, base), 4)} for e in entries.values()],
        "agree": all(e.agrees for e in entries.values()),
    }


def verdicts(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return, for each pass, the workload on which it gains most."""
    found = []
    for who in list(WITHOUT)[1:]:
        gains = [(e["ratio"], r["name"]) for r in results for e in r["entries"] if e["name"] == who]
        if gains:
            gain, name = max(gains)
            found.append(_common.verdict(f"{name} without: {who}", gain, LEAST, at_least=True))
    return found


def draw(results: Sequence[dict[str, Any]], plt: Any) -> None:
    """Bars: the time without a pass, divided by that with all."""
    rows = [(f"{r['name']}: {e['name']}", e["ratio"]) for r in results for e in r["entries"][1:]]
    figure, axis = plt.subplots(figsize=(6, 0.4 * len(rows) + 1))
    axis.barh([label for label, _ in rows], [value or math.nan for _, value in rows], color="tab:blue")
    axis.axvline(1, color="black", linewidth=0.8)
    axis.set_xlabel("CPU time without the pass / with all", fontsize=8)
    axis.tick_params(labelsize=7)
    axis.invert_yaxis()
    figure.tight_layout()


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, write; the status is 1 if a hypergradient is wrong."""
    args = _common.options(__doc__, list(WORKLOADS), argv)
    logging.getLogger("bda_optim").setLevel(logging.ERROR)
    results = []
    total = sum((len(WORKLOADS[name]) + 1) * (args.rounds + 1) for name in args.only)
    with _common.cold_cache(), tqdm(total=total, disable=None) as bar:
        for name in args.only:
            bar.set_description(name)
            results.append(compare(name, args, bar))
    print(_common.headline())
    for result in results:
        print("\n" + result.pop("table"))
    found = verdicts(results)
    print("\n" + _common.show_verdicts(found, smoke=args.smoke))
    _common.save(args.out, "passes", {"workloads": results, "verdicts": found}, functools.partial(draw, results))
    return 0 if all(r["agree"] for r in results) else 1


if __name__ == "__main__":
    sys.exit(main())
