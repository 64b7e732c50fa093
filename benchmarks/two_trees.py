"""Did something become slower than in another version?

    python -m benchmarks.two_trees --old FOLDER

FOLDER is a checkout of the version to compare with. The two alternate, in two processes on the same core, and run the
workloads of this checkout. The figure is the median of the ratios of neighbouring runs, with the interval that a
bootstrap gives it.

Latest output (version 0.1, 79bfe52, --rounds 30, on a core of its own; another program ran on the other):

2026-11-18; x86_64, 2 cores, CPU, one thread, float32; torch 2.13.0+cpu, higher 0.2.1, torchopt 0.7.3, jax 0.10.2,
boat-torch 1.1.1, learn2learn 0.2.0

                                old, CPU ms     new  new / old            95 %
unroll, MLP                          101.51   96.65       0.96  0.939 to 0.969
unroll, MLP, BDA                     212.32  182.74       0.86  0.854 to 0.877
unroll, softmax regression           463.51  444.01       0.95  0.942 to 0.978
unroll, conv net                     267.44  179.18       0.68  0.660 to 0.705
unroll, transformer                  230.33  237.04       1.03  0.991 to 1.044
unroll, counter-example               12.99   10.36       0.79  0.756 to 0.800
unroll, MLP of 24 units                4.76    4.57       0.93  0.890 to 0.981
innerloop_ctx, MLP of 24 units         4.58    4.18       0.93  0.887 to 0.965
innerloop_ctx, conv net              281.18  207.39       0.74  0.695 to 0.752
compat.higher, MLP                   111.09  111.91       1.01  0.983 to 1.033
compat.higher, MLP of 24 units         4.38    4.49       1.02  0.974 to 1.046
compat.higher, conv net              296.44  209.39       0.70  0.688 to 0.731
compat.higher, counter-example        18.14   17.21       0.90  0.850 to 1.020

reached  unroll, MLP: new / old, end of its interval: 0.969 (<= 1.05)
reached  unroll, MLP, BDA: new / old, end of its interval: 0.877 (<= 1.05)
reached  unroll, softmax regression: new / old, end of its interval: 0.978 (<= 1.05)
reached  unroll, conv net: new / old, end of its interval: 0.705 (<= 1.05)
reached  unroll, transformer: new / old, end of its interval: 1.04 (<= 1.05)
reached  unroll, counter-example: new / old, end of its interval: 0.8 (<= 1.05)
reached  unroll, MLP of 24 units: new / old, end of its interval: 0.981 (<= 1.05)
reached  innerloop_ctx, MLP of 24 units: new / old, end of its interval: 0.965 (<= 1.05)
reached  innerloop_ctx, conv net: new / old, end of its interval: 0.752 (<= 1.05)
reached  compat.higher, MLP: new / old, end of its interval: 1.03 (<= 1.05)
reached  compat.higher, MLP of 24 units: new / old, end of its interval: 1.05 (<= 1.05)
reached  compat.higher, conv net: new / old, end of its interval: 0.731 (<= 1.05)
reached  compat.higher, counter-example: new / old, end of its interval: 1.02 (<= 1.05)
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from . import _common, _peers, _workloads

LIMIT = 1.05
"""Where the interval of a ratio must end."""

BOOTSTRAP = 2000


def unrolled(make: Callable[..., Any], *, smoke: bool, **options: Any) -> _common.Run:
    """Return a hypergradient through `unroll`."""
    work = make(smoke=smoke, **options)
    return functools.partial(_workloads.ours()(work), work.steps)


def native(make: Callable[..., Any], *, smoke: bool) -> _common.Run:
    """Return a hypergradient through `innerloop_ctx`."""
    work = make(smoke=smoke)
    return functools.partial(_peers.native_loop(work), work.steps)


def in_compat(make: Callable[..., Any], *, smoke: bool) -> _common.Run:
    """Return a hypergradient through the loop of `compat.higher`."""
    from bda_optim.compat import higher

    work = make(smoke=smoke)
    optimizer = torch.optim.SGD(work.model.parameters(), lr=work.step_size)
    variables = work.variables

    def run() -> Any:
        copy = work.hyper is not None
        with higher.innerloop_ctx(work.model, optimizer, copy_initial_weights=copy) as (fmodel, diffopt):
            for k in range(1, work.steps + 1):
                diffopt.step(work.objective(fmodel, k))
            return list(torch.autograd.grad(work.upper(fmodel, work.hyper, None), variables))

    return run


def _schedule(k: int) -> float:
    return 0.3


WORKLOADS: dict[str, Callable[..., _common.Run]] = {
    "unroll, MLP": functools.partial(unrolled, _workloads.mlp),
    "unroll, MLP, BDA": functools.partial(unrolled, _workloads.mlp, alpha=_schedule),
    "unroll, softmax regression": functools.partial(unrolled, _workloads.softmax),
    "unroll, conv net": functools.partial(unrolled, _workloads.conv),
    "unroll, transformer": functools.partial(unrolled, _workloads.transformer),
    "unroll, counter-example": functools.partial(unrolled, _workloads.counterexample),
    "unroll, MLP of 24 units": functools.partial(unrolled, _workloads.maml),
    "innerloop_ctx, MLP of 24 units": functools.partial(native, _workloads.maml),
    "innerloop_ctx, conv net": functools.partial(native, _workloads.conv),
    "compat.higher, MLP": functools.partial(in_compat, _workloads.mlp),
    "compat.higher, MLP of 24 units": functools.partial(in_compat, _workloads.maml),
    "compat.higher, conv net": functools.partial(in_compat, _workloads.conv),
    "compat.higher, counter-example": functools.partial(in_compat, _workloads.counterexample),
}


def child(*, smoke: bool) -> None:
    """Time the workloads whose names come line by line, with the package that is on the path."""
    runs: dict[str, tuple[_common.Run, int]] = {}
    for line in sys.stdin:
        name = line.strip()
        if name not in runs:
            run = WORKLOADS[name](smoke=smoke)
            run()
            runs[name] = run, 1 if smoke else max(1, math.ceil(_common.SAMPLE / _common.cpu_time(run)))
        print(json.dumps(_common.cpu_time(*runs[name])), flush=True)


@contextlib.contextmanager
def process(tree: Path, *, smoke: bool) -> Iterator[Callable[[str], float]]:
    """Start a process with the package of a checkout; gives what times a workload in it."""
    # The package is imported first: the benchmarks are those of this checkout, whatever the package.
    code = f"""
import sys
sys.path.insert(0, {str(tree)!r})
import bda_optim
sys.path[0] = {str(_common.ROOT)!r}
from benchmarks import two_trees
two_trees.child(smoke={smoke})
"""
    command = [sys.executable, "-c", code]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, cwd=_common.ROOT, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as running:

        def timed(name: str) -> float:
            assert running.stdin and running.stdout
            running.stdin.write(f"{name}\n")
            running.stdin.flush()
            return float(json.loads(running.stdout.readline()))

        try:
            yield timed
        finally:
            running.kill()


def interval(ratios: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of the median, by a bootstrap."""
    dice = random.Random(0)
    medians = sorted(statistics.median(dice.choices(ratios, k=len(ratios))) for _ in range(BOOTSTRAP))
    return medians[round(0.025 * BOOTSTRAP)], medians[round(0.975 * BOOTSTRAP) - 1]


def compare(name: str, old: Callable[[str], float], new: Callable[[str], float], rounds: int) -> dict[str, Any]:
    """Return the times of both, run in turns, and the ratio."""
    old(name), new(name)  # what is made at first
    pairs = []
    for number in range(rounds):
        times = {who: who(name) for who in ((old, new) if number % 2 else (new, old))}
        pairs.append((times[old], times[new]))
    ratios = [later / before for before, later in pairs]
    low, high = interval(ratios)
    before, later = (statistics.median(column) for column in zip(*pairs, strict=True))
    return {"name": name, "old": before, "new": later, "ratio": statistics.median(ratios), "low": low, "high": high}


def draw(results: Sequence[dict[str, Any]], plt: Any) -> None:
    """Bars: the ratio of each workload, with its interval."""
    figure, axis = plt.subplots(figsize=(6, 0.35 * len(results) + 1))
    ends = [[r["ratio"] - r["low"] for r in results], [r["high"] - r["ratio"] for r in results]]
    axis.barh([r["name"] for r in results], [r["ratio"] for r in results], xerr=ends, color="tab:blue")
    axis.axvline(1, color="black", linewidth=0.8)
    axis.set_xlabel("CPU time, new / old", fontsize=8)
    axis.tick_params(labelsize=7)
    axis.invert_yaxis()
    figure.tight_layout()


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, write; the status is 1 if a workload became slower."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--old", type=Path, required=True, metavar="FOLDER", help="a checkout of the other version")
    parser.add_argument("--rounds", type=int, default=40, help="pairs of runs of each workload")
    parser.add_argument("--only", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS), metavar="NAME")
    parser.add_argument("--smoke", action="store_true", help="one tiny pair of each")
    parser.add_argument("--out", type=Path, default=_common.RESULTS)
    args = parser.parse_args(argv)
    rounds = 1 if args.smoke else args.rounds
    results = []
    with process(args.old.resolve(), smoke=args.smoke) as old, process(_common.ROOT, smoke=args.smoke) as new:
        for name in tqdm(args.only, disable=None):
            results.append(compare(name, old, new, rounds))
    rows = [
        [r["name"], r["old"] * 1e3, r["new"] * 1e3, r["ratio"], f"{r['low']:.3f} to {r['high']:.3f}"] for r in results
    ]
    print(_common.headline())
    print("\n" + _common.table(["", "old, CPU ms", "new", "new / old", "95 %"], rows))
    verdicts = [_common.verdict(f"{r['name']}: new / old, end of its interval", r["high"], LIMIT) for r in results]
    print("\n" + _common.show_verdicts(verdicts, smoke=args.smoke))
    _common.save(args.out, "two_trees", {"workloads": results, "verdicts": verdicts}, functools.partial(draw, results))
    return 0 if args.smoke or all(v["reached"] for v in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
