"""How long does the first compiled call take: with an empty cache, in the next process, and beside JAX?

    python -m benchmarks.first_call

Latest output (on a core of its own; another program ran on the other):

2026-11-18; x86_64, 2 cores, CPU, one thread, float32; torch 2.13.0+cpu, higher 0.2.1, torchopt 0.7.3, jax 0.10.2,
boat-torch 1.1.1, learn2learn 0.2.0
The first process of all, which may have built the precompiled header: 7.5 s.

MLP 64-256-256-10, batch 64, K=50  cold s  second s  cold CPU s  second CPU s  next call ms
ours, compiled                       8.32      1.83        8.22          1.81         70.91
ours, compiled, cpp_wrapper         14.16      2.30       13.94          2.28         69.44
JAX jit+scan                         1.80      1.60        1.79          1.59         79.97

softmax regression 7000x784, 10 classes, K=20  cold s  second s  cold CPU s  second CPU s  next call ms
ours, compiled                                   8.29      1.84        7.56          1.81        247.87
JAX jit+scan                                     1.48      1.37        1.47          1.36        217.37

the paper's counter-example, alpha=0, K=64  cold s  second s  cold CPU s  second CPU s  next call ms
ours, compiled                                6.34      2.41        6.27          2.37          2.04
JAX jit+scan                                  0.18      0.16        0.16          0.15          0.33

32 tasks, linear head on 64 features, K=20  cold s  second s  cold CPU s  second CPU s  next call ms
ours, compiled                               12.54      1.67       12.34          1.62          4.22
JAX jit+scan                                  0.88      0.87        0.88          0.87          1.99

conv net, 3 blocks of 32 filters, 25 images 28x28, K=5  cold s  second s  cold CPU s  second CPU s  next call ms
ours, compiled                                           18.16      2.88       17.99          2.84        171.16
JAX jit+scan                                              9.74      8.88        9.64          8.81        328.58

transformer, 2 layers of width 64, K=10  cold s  second s  cold CPU s  second CPU s  next call ms
ours, compiled                            28.91      4.16       28.06          4.13        154.05
JAX jit+scan                               8.93      8.24        8.74          8.17        289.02

MISSED   mlp: cold: 8.32 (<= 6)
reached  mlp: second process: 1.83 (<= 2)
MISSED   softmax: cold: 8.29 (<= 6)
reached  softmax: second process: 1.84 (<= 2)
MISSED   counterexample: cold: 6.34 (<= 6)
MISSED   counterexample: second process: 2.41 (<= 2)
MISSED   heads: cold: 12.5 (<= 6)
reached  heads: second process: 1.67 (<= 2)
reached  conv: cold: 18.2 (<= 20)
reached  conv: second process: 2.88 (<= 4)
MISSED   transformer: cold: 28.9 (<= 20)
MISSED   transformer: second process: 4.16 (<= 4)

Most of a cold call is Inductor in Python, 25 ms per operation of the two programs, and the C++ compiler. The heads have
four programs: for the steps, for the losses, and for the pull-backs of both.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import os
import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import torch
from tqdm import tqdm

import bda_optim as bda

from . import _common, _workloads, tasks

OURS, WRAPPED, JAX = "ours, compiled", "ours, compiled, cpp_wrapper", "JAX jit+scan"

TITLES = {
    "mlp": "MLP 64-256-256-10, batch 64, K=50",
    "softmax": "softmax regression 7000x784, 10 classes, K=20",
    "counterexample": "the paper's counter-example, alpha=0, K=64",
    "heads": "32 tasks, linear head on 64 features, K=20",
    "conv": "conv net, 3 blocks of 32 filters, 25 images 28x28, K=5",
    "transformer": "transformer, 2 layers of width 64, K=10",
}

LARGE = ("conv", "transformer")
COLD, SECOND = {True: 20.0, False: 6.0}, {True: 4.0, False: 2.0}
"""What must be reached, in seconds: of large workloads, and of the others."""


def calls(name: str, who: str, *, smoke: bool) -> _common.Run:
    """Return what computes one hypergradient; nothing is compiled yet."""
    if name == "heads":
        work = tasks.heads(smoke=smoke)
        return tasks.vmap_in_jax(work) if who == JAX else tasks.at_once(work, compile=not smoke)
    if who == JAX:
        work = getattr(_workloads, name)(smoke=smoke)
        return functools.partial(_workloads.with_jax(work), work.steps)
    return unrolled(name, compile=not smoke, smoke=smoke)


def unrolled(name: str, *, compile: bool, smoke: bool) -> _common.Run:
    """Return our contestant on a workload of one task."""
    work = getattr(_workloads, name)(smoke=smoke)
    return functools.partial(_workloads.ours(compile=compile)(work), work.steps)


def exact(name: str, *, smoke: bool) -> Any:
    """Return the hypergradient in float64, without compilation."""
    if name == "heads":
        return _common.numbers(tasks.vmap_by_hand(tasks.heads(torch.float64, smoke=smoke))())
    work = getattr(_workloads, name)(torch.float64, smoke=smoke)
    return _common.numbers(_workloads.by_hand(work)(work.steps))


def child(args: Any) -> None:
    """Call one contestant twice in this process; JAX's own cache on disk is off, as it is by default."""
    name, who = args.child
    logging.getLogger("bda_optim").setLevel(logging.ERROR)
    with bda.compiling(cpp_wrapper=who == WRAPPED):
        run = calls(name, who, smoke=args.smoke)
        if who != JAX and not args.smoke:
            _warm_up()
        start = time.perf_counter(), _cpu_time()
        found = _common.numbers(run())
        first = time.perf_counter() - start[0], _cpu_time() - start[1]
        start = time.perf_counter(), 0.0
        run()
        again = time.perf_counter() - start[0]
    reference = exact(name, smoke=args.smoke)
    error = float(((found - reference) ** 2).sum() ** 0.5 / ((reference**2).sum() ** 0.5))
    print(json.dumps({"seconds": first[0], "cpu_s": first[1], "again": again, "error": error}))


def _cpu_time() -> float:
    """Return the CPU time of this process and of the compilers that it has run."""
    spent = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in spent)


def _warm_up() -> None:
    """Load what every process that uses torch's autograd and its matrix products has loaded already."""
    x = torch.ones(8, 8, requires_grad=True)
    (x @ x).sum().backward()


def build_header() -> float:
    """Compile something small, so that the precompiled header is there (once per machine); return the seconds."""
    with tempfile.TemporaryDirectory(prefix="bda-first-call-", ignore_cleanup_errors=True) as folder:
        return _in_cache(folder, "counterexample", OURS, smoke=False)["seconds"]


def _in_cache(folder: str, name: str, who: str, *, smoke: bool) -> dict[str, Any]:
    """Run a child with a folder for compiled programs."""
    before = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    try:
        return _common.in_child("benchmarks.first_call", name, who, smoke=smoke)
    finally:
        del os.environ["TORCHINDUCTOR_CACHE_DIR"]
        if before is not None:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = before


def contestants(name: str, *, smoke: bool) -> list[str]:
    """Return who is measured; `cpp_wrapper`, which takes longer to compile and less to run, on the MLP alone."""
    found = [OURS, *([WRAPPED] if name == "mlp" else []), *([JAX] if _common.installed("jax") else [])]
    return found[:1] if smoke else found


def compare(name: str, args: Any, bar: tqdm[Any]) -> dict[str, Any]:
    """Measure one workload: each contestant in a cold and in a second process."""
    rows, entries = [], []
    for who in contestants(name, smoke=args.smoke):
        with tempfile.TemporaryDirectory(prefix="bda-first-call-", ignore_cleanup_errors=True) as folder:
            found = []
            for turn in ("cold", "second process"):
                bar.set_postfix_str(f"{name}, {who}: {turn}")
                found.append(_in_cache(folder, name, who, smoke=args.smoke))
                bar.update()
        cold, second = found
        times = [one.get(key, math.nan) for key in ("seconds", "cpu_s") for one in found]
        rows.append([who, *times, second.get("again", math.nan) * 1e3])
        entries.append({"name": who, "cold": cold, "second": second})
    mine = entries[0]
    large = name in LARGE
    return {
        "name": name,
        "table": _common.table(
            [TITLES[name], "cold s", "second s", "cold CPU s", "second CPU s", "next call ms"], rows
        ),
        "entries": entries,
        "verdicts": [
            _common.verdict(f"{name}: cold", mine["cold"]["seconds"], COLD[large]),
            _common.verdict(f"{name}: second process", mine["second"]["seconds"], SECOND[large]),
        ],
        "agree": all(
            e[turn].get("error", math.inf) <= _common.TOLERANCE for e in entries for turn in ("cold", "second")
        ),
    }


def draw(results: Sequence[dict[str, Any]], plt: Any) -> None:
    """Bars: seconds of the first call."""
    figure, axes = plt.subplots(1, len(results), figsize=(2.6 * len(results), 2.6), squeeze=False)
    for axis, result in zip(axes[0], results, strict=True):
        for at, entry in enumerate(result["entries"]):
            axis.bar(at - 0.2, entry["cold"]["seconds"], 0.4, color="tab:grey" if entry["name"] == JAX else "tab:blue")
            axis.bar(at + 0.2, entry["second"]["seconds"], 0.4, color="silver" if entry["name"] == JAX else "skyblue")
        axis.set_xticks(
            range(len(result["entries"])), [e["name"].split(" jit")[0] for e in result["entries"]], fontsize=6
        )
        axis.set_title(result["name"], fontsize=8)
        axis.tick_params(axis="y", labelsize=7)
    axes[0][0].set_ylabel("seconds of the first call: cold, second process", fontsize=7)
    figure.tight_layout()


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, write; the status is 1 if a hypergradient is wrong."""
    args = _common.options(__doc__, list(TITLES), argv)
    if args.child:
        child(args)
        return 0
    results = []
    header = math.nan if args.smoke else build_header()
    total = sum(2 * len(contestants(name, smoke=args.smoke)) for name in args.only)
    with tqdm(total=total, disable=None) as bar:
        for name in args.only:
            bar.set_description(name)
            results.append(compare(name, args, bar))
    print(_common.headline())
    print(f"The first process of all, which may have built the precompiled header: {header:.1f} s.")
    for result in results:
        print("\n" + result.pop("table"))
    print("\n" + _common.show_verdicts([v for r in results for v in r["verdicts"]], smoke=args.smoke))
    content = {"header_s": header, "workloads": results}
    _common.save(args.out, "first_call", content, functools.partial(draw, results))
    return 0 if all(r["agree"] for r in results) else 1


if __name__ == "__main__":
    sys.exit(main())
