"""How long does a hypergradient take, and how much memory, beside higher, torchopt, JAX and code written by hand?

    python -m benchmarks.against_peers

No run is recorded yet.
"""

from __future__ import annotations

import functools
import json
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from tqdm import tqdm

import bda_optim as bda

from . import _common, _workloads
from ._common import Entry, ratio
from ._workloads import Workload

BDA = bda.harmonic(0.5)

WORKLOADS: dict[str, Callable[..., Workload]] = {
    "mlp": _workloads.mlp,
    "softmax": _workloads.softmax,
    "conv": _workloads.conv,
    "transformer": _workloads.transformer,
    "counterexample": _workloads.counterexample,
    "counterexample_bda": functools.partial(_workloads.counterexample, alpha=BDA),
}

TITLES = {
    "mlp": "MLP 64-256-256-10, batch 64, K=50",
    "softmax": "softmax regression 7000x784, 10 classes, K=20",
    "conv": "conv net, 3 blocks of 32 filters, 25 images 28x28, K=5",
    "transformer": "transformer, 2 layers of width 64, 16 sequences of 32 tokens, K=10",
    "counterexample": "the paper's counter-example, alpha=0, K=64",
    "counterexample_bda": "the paper's counter-example, BDA, K=64",
    "aggregation": "BDA (both gradients) against alpha=0, MLP, K=50",
}


def contestants(args: Any) -> dict[str, Callable[[Workload], Any]]:
    chosen = _workloads.contestants(compile=args.compile)
    if args.smoke:  # JAX compiles too
        chosen.pop("JAX jit+scan", None)
    return chosen


def compare(name: str, args: Any, bar: tqdm[Any]) -> dict[str, Any]:
    """Run all contestants on one workload."""
    make = functools.partial(WORKLOADS[name], smoke=args.smoke)
    steps = make().steps
    exact = _common.numbers(_workloads.by_hand(make(torch.float64))(steps))
    runs = {who: functools.partial(build(make()), steps) for who, build in contestants(args).items()}
    entries = _common.first_calls(runs, exact, bar)
    _common.race(runs, entries, args.rounds, bar)
    for who, entry in entries.items():
        if args.memory:
            bar.set_postfix_str(f"{who}: memory")
            entry.memory = _common.in_child("benchmarks.against_peers", name, who, smoke=args.smoke)["memory"]
        bar.update()

    base = entries.get("higher", entries["torch.func by hand"])
    head = [TITLES[name], "first call s", "CPU ms", f"x {base.name}", "memory MiB", "error"]
    rows = [
        [who, e.first, e.time * 1e3, ratio(e, base), e.memory / _common.MIB, f"{e.error:.0e}"]
        for who, e in entries.items()
    ]
    return {
        "name": name,
        "table": _common.table(head, rows),
        "entries": [{**e.plain(), "ratio": round(ratio(e, base), 4)} for e in entries.values()],
        "verdicts": judge(name, entries),
        "agree": all(e.agrees for e in entries.values()),
    }


def judge(name: str, entries: dict[str, Entry]) -> list[dict[str, Any]]:
    """Compare the ratios with what must be reached."""
    found = []
    mine = [e for who, e in entries.items() if who.startswith("ours")]
    best = min(mine, key=lambda e: e.time)
    rivals = [entries[who] for who in ("higher", "torchopt") if who in entries]
    if rivals:
        rival = min(rivals, key=lambda e: e.time)
        found.append(_common.verdict(f"{name}: {best.name} / {rival.name}", ratio(best, rival), 0.8))
    if "JAX jit+scan" in entries:
        found.append(_common.verdict(f"{name}: {best.name} / JAX", ratio(best, entries["JAX jit+scan"]), 1.0))
    if "higher" in entries:
        value = ratio(entries["ours, Unroll"], entries["higher"])
        found.append(_common.verdict(f"{name}: eager Unroll / higher", value, 1.05))
    return found


def aggregation(args: Any, bar: tqdm[Any]) -> dict[str, Any]:
    """Compare BDA, which takes both gradients in every step, with alpha = 0 in each of our modes."""
    modes = {who: build for who, build in contestants(args).items() if who.startswith("ours")}
    found: list[tuple[str, Entry, Entry]] = []
    for who, build in modes.items():
        pair = {}
        entries: dict[str, Entry] = {}
        for label, alpha in (("alpha=0", 0.0), ("BDA", BDA)):
            make = functools.partial(_workloads.mlp, smoke=args.smoke, alpha=alpha)
            pair[label] = functools.partial(build(make()), make().steps)
            exact = _common.numbers(_workloads.by_hand(make(torch.float64))(make().steps))
            entries |= _common.first_calls({label: pair[label]}, exact, bar)
        _common.race(pair, entries, args.rounds, bar)
        found.append((who, entries["alpha=0"], entries["BDA"]))
    rows = [[who, a.time * 1e3, b.time * 1e3, ratio(b, a)] for who, a, b in found]
    return {
        "name": "aggregation",
        "table": _common.table([TITLES["aggregation"], "alpha=0 ms", "BDA ms", "ratio"], rows),
        "entries": [{**e.plain(), "name": f"{who}, {e.name}"} for who, *both in found for e in both],
        "verdicts": [_common.verdict(f"BDA / alpha=0, {who}", ratio(b, a), 2.1) for who, a, b in found],
        "agree": all(e.agrees for _, *both in found for e in both),
    }


def child(args: Any) -> None:
    """Measure the memory of one contestant, in this process alone."""
    name, who = args.child
    work = WORKLOADS[name](smoke=args.smoke)
    run = _workloads.contestants(compile=True)[who](work)
    # The same K: an engine that takes several steps per call divides K by what it saw first.
    print(json.dumps(_common.peak_growth(lambda: run(work.steps), lambda: run(work.steps))))


def draw(results: Sequence[dict[str, Any]], plt: Any) -> None:
    """Bars of time and memory per workload, divided by higher's."""
    panels = [r for r in results if r["name"] != "aggregation"]
    figure, axes = plt.subplots(1, max(1, len(panels)), figsize=(3.4 * max(1, len(panels)), 3.2), squeeze=False)
    for axis, result in zip(axes[0], panels, strict=False):
        names = [e["name"] for e in result["entries"]]
        colours = ["tab:blue" if name.startswith("ours") else "tab:grey" for name in names]
        axis.barh(names, [e["ratio"] or math.nan for e in result["entries"]], color=colours)
        axis.axvline(1, color="black", linewidth=0.8)
        axis.set_title(TITLES[result["name"]].split(", K")[0], fontsize=7)
        axis.set_xlabel("CPU time / higher's", fontsize=8)
        axis.tick_params(labelsize=7)
        axis.invert_yaxis()
    figure.tight_layout()


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, write; the status is 1 if a contestant's hypergradient is wrong."""
    args = _common.options(__doc__, list(TITLES), argv)
    if args.child:
        child(args)
        return 0
    count = len(contestants(args))
    ours = sum(who.startswith("ours") for who in contestants(args))
    sizes = {name: count * (args.rounds + 2) for name in WORKLOADS} | {"aggregation": 2 * ours * (args.rounds + 1)}
    results = []
    with _common.cold_cache(), tqdm(total=sum(sizes[name] for name in args.only), disable=None) as bar:
        for name in args.only:
            bar.set_description(name)
            results.append(aggregation(args, bar) if name == "aggregation" else compare(name, args, bar))
    print(_common.headline())
    for result in results:
        print("\n" + result.pop("table"))
    print("\n" + _common.show_verdicts([v for r in results for v in r["verdicts"]], smoke=args.smoke))
    _common.save(args.out, "against_peers", {"workloads": results}, functools.partial(draw, results))
    return 0 if all(r["agree"] for r in results) else 1


if __name__ == "__main__":
    sys.exit(main())
