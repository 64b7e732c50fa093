"""What does each adjoint cost, in time and memory, and how far is its result from the exact hypergradient?

    python -m benchmarks.adjoints

Latest output (15 rounds, ForwardMode 2; nothing else ran on the machine; before a compiled pull-back took over the
work of its step, and Checkpointed() dropped states on the way: memory_vs_k.py has these; the two modes are one now):

2026-11-16; x86_64, 2 cores, CPU, one thread, float32; torch 2.13.0+cpu, higher 0.2.1, torchopt 0.7.3, jax 0.10.2

MLP 64-256-256-10, batch 64, K=50          first call s  CPU ms  x Unroll()  memory MiB  error
Unroll()                                           0.14  139.82        1.00       34.98  0e+00
Checkpointed()                                     0.25  231.20        1.61       14.00  2e-07
Checkpointed(every=10)                             0.21  216.19        1.52       14.14  2e-07
Checkpointed(slots=4)                              0.31  384.99        2.63        8.20  0e+00
ForwardMode()                                      6.25    6488       46.40      233.23  4e-07
Truncated(last=10)                                 0.09   74.28        0.55        9.08  5e-01
Truncated(last=10, within=Checkpointed())          0.09   96.55        0.70        8.52  5e-01
FirstOrder()                                       0.06   58.89        0.41        2.78  1e+00
Unroll(), compile='reverse'                        5.54  128.10        0.85       19.88  1e-06
Unroll(), compile='mixed'                          3.64  138.24        0.95       19.27  1e-06
Checkpointed(), compile='reverse'                  3.11  158.63        1.06       10.18  2e-06
Checkpointed(), compile='mixed'                    4.36  158.57        1.13        9.36  1e-06
Checkpointed(slots=4), compile='reverse'           3.69  185.38        1.31        6.82  2e-06
Checkpointed(slots=4), compile='mixed'             4.76  201.56        1.45        7.21  2e-06
Truncated(last=10), compile='reverse'              3.34   55.59        0.38        7.17  5e-01
Truncated(last=10), compile='mixed'                4.79   59.36        0.40        6.81  5e-01

The error is the distance to Unroll(), relative to its norm. Truncated and FirstOrder are biased: half of the
hypergradient comes from the first 40 steps, and FirstOrder sees nothing of weights that act through the lower loss.
Reverse over reverse is the faster mode on this network (0.85 against 0.95 with Unroll()); the memory of both is alike.

2026-11-18; 7 rounds on a loaded machine, so that times are preliminary; otherwise as above

Softmax regression 1000x100x5, K=400  CPU ms  x Unroll(), at rest  memory MiB  at K=1600  error
Unroll(), at rest                     394.46                 1.00       27.68     111.98  6e-07
Checkpointed(), at rest               761.49                 1.93        1.64       4.12  6e-07
Truncated(last=25), at rest           255.95                 0.65        1.94       3.54  7e-02
Implicit(), at rest                   267.97                 0.68        0.45       2.43  6e-05
Implicit(solver='neumann'), at rest   325.58                 0.83        0.58       2.45  1e-04

Here the loop comes to rest, and the error is the distance to 3000 steps in float64. `Implicit` costs the 400 steps
without a graph and a solve of a twentieth of that; its error is its tolerance, 1e-4 in float32.
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
    f"{name}, compiled": ours(adjoint, compile=True)
    for name, adjoint in {
        "Unroll()": bda.Unroll(),
        "Checkpointed()": bda.Checkpointed(),
        "Checkpointed(slots=4)": bda.Checkpointed(slots=4),
        "Truncated(last=10)": bda.Truncated(last=10),
    }.items()
}

SETTLED: dict[str, Callable[[Workload], Any]] = {
    "Unroll(), at rest": ours(bda.Unroll()),
    "Checkpointed(), at rest": ours(bda.Checkpointed()),
    "Truncated(last=25), at rest": ours(bda.Truncated(last=25)),
    "Implicit(), at rest": ours(bda.Implicit()),
    "Implicit(solver='neumann'), at rest": ours(bda.Implicit(solver="neumann", limit=2000)),
}
"""The contestants on a problem whose inner loop comes to rest."""

LONG = 4
"""How many times longer the loop is in which memory is measured once more."""

BIASED = ("Truncated", "FirstOrder")
SLOW = ("ForwardMode()",)
"""One tangent for each of the 64 upper scalars: timed in two rounds only."""


def contestants(args: Any) -> dict[str, Callable[[Workload], Any]]:
    found = {**EAGER, **COMPILED} if args.compile else EAGER
    return {name: build for name, build in found.items() if name in args.only}


def child(args: Any) -> None:
    """Measure the memory of one contestant, in this process alone."""
    name, *longer = args.child
    work = _workloads.settled(smoke=args.smoke) if name in SETTLED else _workloads.mlp(smoke=args.smoke)
    run = {**EAGER, **COMPILED, **SETTLED}[name](work)
    steps = work.steps * int(longer[0]) if longer else work.steps
    print(json.dumps(_common.peak_growth(lambda: run(work.steps), lambda: run(steps))))


def measured(args: Any, runs: dict[str, Callable[[], Any]], reference: Any, title: str) -> dict[str, _common.Entry]:
    """Call, time and weigh all contestants of a table."""
    quick = {name: run for name, run in runs.items() if name not in SLOW}
    slow = {name: run for name, run in runs.items() if name in SLOW}
    few = min(2, args.rounds)
    total = 2 * len(runs) + args.rounds * len(quick) + few * len(slow)
    with tqdm(total=total, disable=None, desc=title) as bar:
        entries = _common.first_calls(runs, reference, bar, biased=BIASED)
        _common.race(quick, entries, args.rounds, bar)
        if slow:
            _common.race(slow, entries, few, bar)
        for name, entry in entries.items():
            if args.memory:
                bar.set_postfix_str(f"{name}: memory")
                entry.memory = _common.in_child("benchmarks.adjoints", name, smoke=args.smoke)["memory"]
            bar.update()
    return entries


def on_the_mlp(args: Any) -> tuple[str, dict[str, Any], bool]:
    """Return the table of 50 steps on an MLP, what is written of it, and whether exact adjoints are exact."""
    make = functools.partial(_workloads.mlp, smoke=args.smoke)
    steps = make().steps
    runs = {name: functools.partial(build(make()), steps) for name, build in contestants(args).items()}
    with _common.cold_cache():
        entries = measured(args, runs, _common.numbers(EAGER["Unroll()"](make())(steps)), "adjoints")
    base = entries.get("Unroll()", next(iter(entries.values())))
    title = f"MLP 64-256-256-10, batch 64, K={steps}"
    head = [title, "first call s", "CPU ms", f"x {base.name}", "memory MiB", "error"]
    rows = []
    for name, e in entries.items():
        share = e.time / base.time if name in SLOW else ratio(e, base)
        rows.append([name, e.first, e.time * 1e3, share, e.memory / _common.MIB, f"{e.error:.0e}"])
    return _common.table(head, rows), {"steps": steps, "entries": [e.plain() for e in entries.values()]}, exact(entries)


def at_rest(args: Any) -> tuple[str, dict[str, Any], bool]:
    """Return the table of a loop that comes to rest; the error is the distance to 3000 steps in float64."""
    make = functools.partial(_workloads.settled, smoke=args.smoke)
    steps = make().steps
    reference = SETTLED["Checkpointed(), at rest"](make(torch.float64))(1000 if args.smoke else 3000)
    runs = {name: functools.partial(SETTLED[name](make()), steps) for name in SETTLED if name in args.only}
    entries = measured(args, runs, _common.numbers(reference), "adjoints at rest")
    base = next(iter(entries.values()))
    title = f"Softmax regression 1000x100x5, K={steps}"
    head = [title, "CPU ms", f"x {base.name}", "memory MiB", f"at K={LONG * steps}", "error"]
    rows, plain = [], []
    for name, e in entries.items():
        longer = math.nan
        if args.memory:
            longer = _common.in_child("benchmarks.adjoints", name, str(LONG), smoke=args.smoke)["memory"] / _common.MIB
        rows.append([name, e.time * 1e3, ratio(e, base), e.memory / _common.MIB, longer, f"{e.error:.0e}"])
        plain.append({**e.plain(), f"peak_growth_mib_{LONG}_times_longer": round(longer, 2)})
    return _common.table(head, rows), {"steps": steps, "entries": plain, **_common.machine()}, exact(entries)


def exact(entries: dict[str, _common.Entry]) -> bool:
    return all(e.agrees for name, e in entries.items() if not name.startswith(BIASED))


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
    """Run, print, write; the status is 1 if an exact adjoint is not exact.

    With ``--only`` a table none of whose contestants is named stays as it was written before.
    """
    args = _common.options(__doc__, [*EAGER, *COMPILED, *SETTLED], argv)
    if args.child:
        child(args)
        return 0
    before = args.out / "adjoints.json"
    content = json.loads(before.read_text("utf-8")) if before.exists() else {"entries": []}
    tables, good = [], True
    if contestants(args):
        text, found, agree = on_the_mlp(args)
        content.update(**found, **_common.machine())
        tables.append(text)
        good = good and agree
    if any(name in SETTLED for name in args.only):
        text, content["at_rest"], agree = at_rest(args)
        tables.append(text)
        good = good and agree
    print("\n\n".join([_common.headline(), *tables]))
    kept = {name: content[name] for name in _common.machine() if name in content}
    _common.save(args.out, "adjoints", {**content, **kept}, functools.partial(draw, content["entries"]))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
