"""How do the memory and the time of each adjoint grow with K?

    python -m benchmarks.adjoints_vs_k

Softmax regression on 1000 examples of 100 features and 5 classes, with a penalty, and ten upper variables: a weight for
each hundred of the examples (for `FirstOrder`, the initial weights). Memory is the growth of a process of its own. Time
is CPU time over that of K steps without a graph, interleaved.

Latest output (one round on a loaded machine, and K up to 400: preliminary):

2026-11-18; x86_64, 2 cores, CPU, one thread, float32; torch 2.13.0+cpu

adjoint                MiB, K=25  MiB, K=100  MiB, K=400  time, K=25  time, K=100  time, K=400
Unroll()                    1.88        7.44       29.52        1.63         1.56         1.76
Checkpointed()              0.55        0.94        1.90        3.72         3.02         3.69
Checkpointed(slots=8)       0.41        0.50        0.82        4.69         4.97         6.42
Truncated(last=25)          1.90        1.97        2.13        1.71         1.04         1.09
FirstOrder()                0.17        0.33        0.79        1.13         1.00         1.08
ForwardMode()               2.94        4.82       10.00        6.25         6.28         7.12
Implicit()                     -           -        0.53           -            -         1.12
"""

from __future__ import annotations

import dataclasses
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
from ._workloads import Workload, ours

ADJOINTS: dict[str, Any] = {
    "Unroll()": bda.Unroll(),
    "Checkpointed()": bda.Checkpointed(),
    "Checkpointed(slots=8)": bda.Checkpointed(slots=8),
    "Truncated(last=25)": bda.Truncated(last=25),
    "FirstOrder()": bda.FirstOrder(),
    "ForwardMode()": bda.ForwardMode(),
    "Implicit()": bda.Implicit(),
}
SETTLED = {"Implicit()": 400}
"""From this K on the loop has come to rest: before, an adjoint of the fixed point is left out."""

GROUPS = 10

PLAIN = "no hypergradient"
"""K steps without a graph: what times are relative to."""


def lengths(args: Any) -> list[int]:
    return [20, 400] if args.smoke else [25, 100, 400, 1600]


def workload(args: Any, name: str = "") -> Workload:
    """Return the loop that comes to rest, with ten upper variables; for `FirstOrder` those are the initial weights."""
    work = _workloads.settled(smoke=args.smoke)
    size = work.hyper.numel() // GROUPS

    weights = torch.zeros(GROUPS, requires_grad=name != "FirstOrder()")

    def lower(net: Any, hyper: torch.Tensor | None, batch: Any = None) -> torch.Tensor:
        return work.lower(net, (weights if hyper is None else hyper).repeat_interleave(size), batch)

    return dataclasses.replace(work, lower=lower, hyper=weights if weights.requires_grad else None)


def plain(work: Workload) -> Callable[[int], Any]:
    inner = bda.BDAInnerOptimizer(work.model.parameters(), lr=work.lr)

    def run(steps: int) -> list[torch.Tensor]:
        with torch.no_grad():
            fmodel = inner.unroll(work.model, work.lower, work.upper, hyper=work.hyper, steps=steps)
        return list(fmodel.params.values())

    return run


def child(args: Any) -> None:
    """Measure the memory of one adjoint, in this process alone."""
    name, steps = args.child
    run = ours(ADJOINTS[name])(workload(args, name))
    print(json.dumps(_common.peak_growth(lambda: run(3), lambda: run(int(steps)))))


def times(args: Any, steps: int, names: Sequence[str], bar: tqdm[Any]) -> dict[str, float]:
    """Return the median ratio of each adjoint to K plain steps."""
    builds = {PLAIN: plain, **{name: ours(ADJOINTS[name]) for name in names}}
    runs = {name: functools.partial(build(workload(args, name)), steps) for name, build in builds.items()}
    entries = {name: _common.Entry(name) for name in runs}
    for run in runs.values():
        run()
    _common.race(runs, entries, args.rounds, bar)
    return {name: _common.ratio(entries[name], entries[PLAIN]) for name in names}


def draw(content: dict[str, Any], plt: Any) -> None:
    """Memory and time against K."""
    _, axes = plt.subplots(1, 2, figsize=(10, 4))
    for name, row in content["adjoints"].items():
        for axis, key in zip(axes, ("peak_growth_mib", "time"), strict=True):
            points = [(k, v) for k, v in zip(content["steps"], row[key], strict=True) if v == v]
            axis.loglog(*zip(*points, strict=True), "o-", label=name)
    axes[0].set(xlabel="K", ylabel="peak growth, MiB")
    axes[1].set(xlabel="K", ylabel="time over that of K plain steps")
    axes[0].legend(fontsize=7)


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, write."""
    args = _common.options(__doc__, list(ADJOINTS), argv)
    if args.child:
        child(args)
        return 0
    if args.rounds == 15:
        args.rounds = 5  # the longest loop takes seconds
    found: dict[str, dict[str, list[float]]] = {name: {"peak_growth_mib": [], "time": []} for name in args.only}
    with tqdm(disable=None, desc="adjoints against K") as bar:
        for steps in lengths(args):
            names = [name for name in args.only if steps >= SETTLED.get(name, steps)]
            took = times(args, steps, names, bar)
            for name, row in found.items():
                grown = math.nan
                if name in names and args.memory:
                    got = _common.in_child("benchmarks.adjoints_vs_k", name, str(steps), smoke=args.smoke)
                    grown = got["memory"] / _common.MIB
                row["peak_growth_mib"].append(round(grown, 2))
                row["time"].append(round(took.get(name, math.nan), 3))
    heads = ["adjoint", *(f"MiB, K={k}" for k in lengths(args)), *(f"time, K={k}" for k in lengths(args))]
    rows = [[name, *row["peak_growth_mib"], *row["time"]] for name, row in found.items()]
    print("\n\n".join([_common.headline(), _common.table(heads, rows)]))
    content = {"steps": lengths(args), "adjoints": found}
    _common.save(args.out, "adjoints_vs_k", content, functools.partial(draw, content))
    return 0


if __name__ == "__main__":
    sys.exit(main())
