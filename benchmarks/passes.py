"""What does each pass of the compiler gain, and on which workload?

    python -m benchmarks.passes

Every row leaves one pass out; the ratio is its time divided by that with all passes. A pass without 3 % anywhere has to
go.

Latest output (--rounds 9, on a core of its own; another program ran on the other):

2026-11-18; x86_64, 2 cores, CPU, one thread, float32; torch 2.13.0+cpu, higher 0.2.1, torchopt 0.7.3, jax 0.10.2,
boat-torch 1.1.1, learn2learn 0.2.0

32 tasks, linear head on 64 features, K=20   first call s  CPU ms  x all  error
all passes                                          11.39    2.90   1.00  3e-07
without: small batched products spelled out          5.14    4.36   1.57  3e-07
without: several steps per call                      3.85    3.16   1.10  3e-07
without: losses of tasks                             0.38    3.60   1.24  3e-07

softmax regression 7000x784, 10 classes, K=20  first call s  CPU ms  x all  error
all passes                                             4.04  263.34   1.00  5e-07
without: narrow products by oneDNN                     3.66  394.29   1.49  5e-07
without: a step and its pull-back divided              3.00  459.09   1.76  3e-07

the paper's counter-example, alpha=0, K=64  first call s  CPU ms  x all  error
all passes                                          2.90    1.44   1.00  8e-09
without: several steps per call                     1.83    2.31   1.50  8e-09
without: a step and its pull-back divided           1.65    6.74   4.59  8e-09
without: no assertions of sizes                     1.61    1.64   1.08  8e-09

MLP 64-256-256-10, batch 64, K=50          first call s  CPU ms  x all  error
all passes                                         4.70   73.33   1.00  2e-07
without: several steps per call                    0.46   73.50   1.00  2e-07
without: a step and its pull-back divided          2.60  139.44   1.90  2e-07

conv net, 3 blocks of 32 filters, 25 images 28x28, K=5  first call s  CPU ms  x all  error
all passes                                                     12.90  123.90   1.00  1e-06
without: a step and its pull-back divided                       5.55  207.07   1.66  2e-06
without: max-pooling with channels last                         6.94  143.55   1.17  1e-06
without: layouts left as they are                              15.85  159.78   1.29  8e-06

reached  heads without: small batched products spelled out: 1.57 (>= 1.03)
reached  softmax without: narrow products by oneDNN: 1.49 (>= 1.03)
reached  counterexample without: several steps per call: 1.5 (>= 1.03)
reached  counterexample without: a step and its pull-back divided: 4.59 (>= 1.03)
reached  conv without: max-pooling with channels last: 1.17 (>= 1.03)
reached  conv without: layouts left as they are: 1.29 (>= 1.03)
reached  counterexample without: no assertions of sizes: 1.08 (>= 1.03)
reached  heads without: losses of tasks: 1.24 (>= 1.03)
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
