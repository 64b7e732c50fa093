"""What does each adjoint cost, in time and memory, and how far is its result from the exact hypergradient?

    python -m benchmarks.adjoints

No run is recorded yet.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

from tqdm import tqdm

import bda_optim as bda

from . import _common, _workloads
from ._common import ratio
from ._workloads import Workload, ours

EAGER: dict[str, Callable[[Workload], Any]] = {
    "Unroll()": ours(bda.Unroll()),
    "Checkpointed()": ours(bda.Checkpointed()),
    "Checkpointed(every=10)": ours(bda.Checkpointed(every=10)),
    "Checkpointed(slots=4)": ours(bda.Checkpointed(slots=4)),
    "ForwardMode()": ours(bda.ForwardMode()),
    "Truncated(last=10)": ours(bda.Truncated(last=10)),
    "Truncated(last=10, within=Checkpointed())": ours(bda.Truncated(last=10, within=bda.Checkpointed())),
    "FirstOrder()": ours(bda.FirstOrder()),
}

COMPILED: dict[str, Callable[[Workload], Any]] = {
    f"{name}, compile={mode!r}": ours(adjoint, compile=mode)
    for name, adjoint in {
        "Unroll()": bda.Unroll(),
        "Checkpointed()": bda.Checkpointed(),
        "Checkpointed(slots=4)": bda.Checkpointed(slots=4),
        "Truncated(last=10)": bda.Truncated(last=10),
    }.items()
    for mode in ("reverse", "mixed")
}

BIASED = ("Truncated", "FirstOrder")
SLOW = ("ForwardMode()",)
"""One tangent for each of the 64 upper scalars: timed in two rounds only."""


def contestants(args: Any) -> dict[str, Callable[[Workload], Any]]:
    found = {**EAGER, **COMPILED} if args.compile else EAGER
    return {name: build for name, build in found.items() if name in args.only}


def child(args: Any) -> None:
    """Measure the memory of one contestant, in this process alone."""
    work = _workloads.mlp(smoke=args.smoke)
    run = {**EAGER, **COMPILED}[args.child[0]](work)
    print(json.dumps(_common.peak_growth(lambda: run(work.steps), lambda: run(work.steps))))


def draw(entries: Sequence[dict[str, Any]], plt: Any) -> None:
    """Time against memory."""
    _, axis = plt.subplots(figsize=(6, 4.5))
    for e in entries:
        if e["peak_growth_mib"] > 0 and e["cpu_ms"] > 0:  # not where one is NaN
            axis.plot(e["peak_growth_mib"], e["cpu_ms"], "s" if "compile" in e["name"] else "o", label=e["name"])
    axis.set(xscale="log", yscale="log", xlabel="peak growth, MiB", ylabel="CPU ms", title="MLP, K=50")
    if axis.lines:
        axis.legend(fontsize=6, bbox_to_anchor=(1, 1))


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, write; the status is 1 if an exact adjoint is not exact."""
    args = _common.options(__doc__, [*EAGER, *COMPILED], argv)
    if args.child:
        child(args)
        return 0
    make = functools.partial(_workloads.mlp, smoke=args.smoke)
    steps = make().steps
    runs = {name: functools.partial(build(make()), steps) for name, build in contestants(args).items()}
    quick = {name: run for name, run in runs.items() if name not in SLOW}
    slow = {name: run for name, run in runs.items() if name in SLOW}
    few = min(2, args.rounds)
    total = 2 * len(runs) + args.rounds * len(quick) + few * len(slow)
    with _common.cold_cache(), tqdm(total=total, disable=None, desc="adjoints") as bar:
        exact = _common.numbers(EAGER["Unroll()"](make())(steps))
        entries = _common.first_calls(runs, exact, bar, biased=BIASED)
        _common.race(quick, entries, args.rounds, bar)
        if slow:
            _common.race(slow, entries, few, bar)
        for name, entry in entries.items():
            if args.memory:
                bar.set_postfix_str(f"{name}: memory")
                entry.memory = _common.in_child("benchmarks.adjoints", name, smoke=args.smoke)["memory"]
            bar.update()

    base = entries.get("Unroll()", next(iter(entries.values())))
    title = f"MLP 64-256-256-10, batch 64, K={steps}"
    head = [title, "first call s", "CPU ms", f"x {base.name}", "memory MiB", "error"]
    rows = []
    for name, e in entries.items():
        share = e.time / base.time if name in SLOW else ratio(e, base)
        rows.append([name, e.first, e.time * 1e3, share, e.memory / _common.MIB, f"{e.error:.0e}"])
    print(_common.headline() + "\n\n" + _common.table(head, rows))
    plain = [e.plain() for e in entries.values()]
    _common.save(args.out, "adjoints", {"steps": steps, "entries": plain}, functools.partial(draw, plain))
    return 0 if all(e.agrees for name, e in entries.items() if not name.startswith(BIASED)) else 1


if __name__ == "__main__":
    sys.exit(main())
