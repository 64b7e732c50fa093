"""How long does a hypergradient take, and how much memory, beside higher, torchopt, JAX and code written by hand?

    python -m benchmarks.against_peers

Latest output (--only mlp softmax counterexample counterexample_bda aggregation; other work shared the cores at times):

2026-11-16; x86_64, 2 cores, CPU, one thread, float32; torch 2.13.0+cpu, higher 0.2.1, torchopt 0.7.3, jax 0.10.2

MLP 64-256-256-10, batch 64, K=50  first call s  CPU ms  x higher  memory MiB  error
torch.func by hand                         0.27  241.92      0.93       41.56  2e-07
higher                                     0.28  241.27      1.00       42.87  2e-07
torchopt                                   0.22  227.75      0.93       38.49  2e-07
JAX jit+scan                               4.18  113.29      0.48       27.27  2e-07
ours, Unroll                               0.22  230.81      0.93       36.05  2e-06
ours, Checkpointed                         0.45  362.69      1.57       10.50  1e-06
ours, Unroll, compiled                    38.08  162.47      0.67       29.62  2e-06
ours, Checkpointed, compiled              12.10  215.87      0.97        9.02  2e-07

softmax regression 7000x784, 10 classes, K=20  first call s  CPU ms  x higher  memory MiB  error
torch.func by hand                                     0.76  609.98      1.03       18.49  3e-07
higher                                                 0.65  574.31      1.00       20.90  3e-07
torchopt                                               0.66  597.62      0.99       19.81  3e-07
JAX jit+scan                                           2.74  394.17      0.70       12.83  3e-07
ours, Unroll                                           0.60  595.88      1.01       18.62  3e-07
ours, Checkpointed                                     0.93  922.16      1.58        8.66  3e-07
ours, Unroll, compiled                                11.64  445.41      0.70        9.88  5e-07
ours, Checkpointed, compiled                           8.18  698.82      1.16        6.12  5e-07

the paper's counter-example, alpha=0, K=64  first call s  CPU ms  x higher  memory MiB  error
torch.func by hand                                  0.06   35.81      0.98        0.39  2e-07
higher                                              0.06   28.68      1.00        0.52  2e-07
torchopt                                            0.06   36.53      1.35        0.50  2e-07
JAX jit+scan                                        0.52    0.32      0.01        0.01  8e-09
ours, Unroll                                        0.07   33.45      1.18        0.42  2e-07
ours, Checkpointed                                  0.17   72.39      2.33        0.01  8e-09
ours, Unroll, compiled                             14.90    7.02      0.24        0.00  8e-09
ours, Checkpointed, compiled                       12.48   10.91      0.34        0.01  8e-09

the paper's counter-example, BDA, K=64  first call s  CPU ms  x higher  memory MiB  error
torch.func by hand                              0.08   63.87      0.93        1.26  3e-07
higher                                          0.09   81.51      1.00        1.32  3e-07
torchopt                                        0.09   66.96      0.88        1.34  3e-07
JAX jit+scan                                    0.52    0.65      0.01        0.00  4e-08
ours, Unroll                                    0.09   73.37      0.89        1.48  3e-07
ours, Checkpointed                              0.23  160.67      2.09        0.05  1e-07
ours, Unroll, compiled                         21.25    9.52      0.13        0.01  4e-08
ours, Checkpointed, compiled                   20.91   16.05      0.20        0.00  4e-08

BDA (both gradients) against alpha=0, MLP, K=50  alpha=0 ms  BDA ms  ratio
ours, Unroll                                         234.93  494.21   2.09
ours, Checkpointed                                   432.54  868.04   2.05
ours, Unroll, compiled                               157.93  274.70   1.82
ours, Checkpointed, compiled                         232.46  405.72   1.81

reached  mlp: ours, Unroll, compiled / torchopt: 0.733 (<= 0.8)
MISSED   mlp: ours, Unroll, compiled / JAX: 1.41 (<= 1)
reached  mlp: eager Unroll / higher: 0.929 (<= 1.05)
reached  softmax: ours, Unroll, compiled / higher: 0.704 (<= 0.8)
MISSED   softmax: ours, Unroll, compiled / JAX: 1.09 (<= 1)
reached  softmax: eager Unroll / higher: 1.01 (<= 1.05)
reached  counterexample: ours, Unroll, compiled / higher: 0.243 (<= 0.8)
MISSED   counterexample: ours, Unroll, compiled / JAX: 22.7 (<= 1)
MISSED   counterexample: eager Unroll / higher: 1.18 (<= 1.05)
reached  counterexample_bda: ours, Unroll, compiled / torchopt: 0.152 (<= 0.8)
MISSED   counterexample_bda: ours, Unroll, compiled / JAX: 14.6 (<= 1)
reached  counterexample_bda: eager Unroll / higher: 0.891 (<= 1.05)
reached  BDA / alpha=0, ours, Unroll: 2.09 (<= 2.1)
reached  BDA / alpha=0, ours, Checkpointed: 2.05 (<= 2.1)
reached  BDA / alpha=0, ours, Unroll, compiled: 1.82 (<= 2.1)
reached  BDA / alpha=0, ours, Checkpointed, compiled: 1.81 (<= 2.1)

Conv net and transformer, two hours before, on a core of their own, when a compiled pull-back still repeated its step:

conv net, 3 blocks of 32 filters, 25 images 28x28, K=5  first call s  CPU ms  x higher  memory MiB  error
torch.func by hand                                              0.49  405.19      0.94      128.44  2e-06
higher                                                          0.44  429.52      1.00      124.98  2e-06
torchopt                                                        0.44  411.86      0.98      123.86  2e-06
JAX jit+scan                                                   16.16    1191      2.68      197.86  2e-06
ours, Unroll                                                    0.45  429.23      1.00      132.19  1e-06
ours, Checkpointed                                              0.56  575.04      1.34       77.02  1e-06
ours, Unroll, compiled                                        124.79  535.29      1.24       39.07  7e-06
ours, Checkpointed, compiled                                   61.96  573.90      1.36       33.71  7e-06

transformer, 2 layers of width 64, 16 sequences of 32 tokens, K=10  first call s  CPU ms  x higher  memory MiB  error
torch.func by hand                                                          0.45  421.60      0.95      115.00  1e-07
higher                                                                      0.45  437.63      1.00      115.31  1e-07
torchopt                                                                    0.44  407.39      0.95      112.39  1e-07
JAX jit+scan                                                               17.91  413.95      0.96      127.05  1e-07
ours, Unroll                                                                0.54  430.28      0.95      115.75  1e-07
ours, Checkpointed                                                          0.71  650.25      1.44       37.96  1e-07
ours, Unroll, compiled                                                    141.14  310.76      0.69       25.79  8e-08
ours, Checkpointed, compiled                                               58.42  354.10      0.82       27.34  8e-08

MISSED   conv: ours, Unroll / torchopt: 1.06 (<= 0.8)
reached  conv: ours, Unroll / JAX: 0.368 (<= 1)
reached  conv: eager Unroll / higher: 1 (<= 1.05)
reached  transformer: ours, Unroll, compiled / torchopt: 0.744 (<= 0.8)
reached  transformer: ours, Unroll, compiled / JAX: 0.749 (<= 1)
reached  transformer: eager Unroll / higher: 0.952 (<= 1.05)

Missed:
- Conv net: uncompiled 1.06 times torchopt instead of 0.8, compiled 1.24 times higher. In a profile of the uncompiled
  run convolutions and their derivatives take 38 %, elementwise products 26 %, sums 5 %, max-pooling 4 %. Why the
  compiled run, which fuses the latter, is slower was not found; a divided pull-back did not change it (1.2 to 1.3
  times, single runs). JAX takes 2.7 times higher's time.
- JAX, softmax: 1.09. In a profile 80 products with the data take nearly all the time of a compiled run.
- JAX, MLP: 1.41; products take 49 % of the uncompiled run in a profile. The compiled one was not profiled.
- JAX, counter-example: 23 and 15 times. 64 steps on two numbers take JAX 0.3 ms, a loop inside one program; here ten
  steps share a call, which takes about half a millisecond.
- Uncompiled Unroll, counter-example: 1.18 times higher here, and 1.03 in the quieter run two hours before; with BDA
  0.89 and 1.06. BDA with Checkpointed() was 2.13 times alpha=0 then, and is 2.05 here.
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

from . import _common, _peers, _workloads
from ._common import Entry, ratio
from ._workloads import RunSteps, Workload

BDA = bda.harmonic(0.5)
CONSTANT = bda.constant(0.3)  # BOAT knows constant and geometric schedules only

WORKLOADS: dict[str, Callable[..., Workload]] = {
    "mlp": _workloads.mlp,
    "softmax": _workloads.softmax,
    "conv": _workloads.conv,
    "conv_75": functools.partial(_workloads.conv, images=75),
    "transformer": _workloads.transformer,
    "counterexample": _workloads.counterexample,
    "counterexample_bda": functools.partial(_workloads.counterexample, alpha=BDA),
    "mlp_bda": functools.partial(_workloads.mlp, alpha=CONSTANT),
    "maml": _workloads.maml,
}

TITLES = {
    "mlp": "MLP 64-256-256-10, batch 64, K=50",
    "softmax": "softmax regression 7000x784, 10 classes, K=20",
    "conv": "conv net, 3 blocks of 32 filters, 25 images 28x28, K=5",
    "conv_75": "the same conv net, 75 images, K=5",
    "transformer": "transformer, 2 layers of width 64, 16 sequences of 32 tokens, K=10",
    "counterexample": "the paper's counter-example, alpha=0, K=64",
    "counterexample_bda": "the paper's counter-example, BDA, K=64",
    "mlp_bda": "MLP 64-256-256-10, BDA, alpha=0.3, K=50",
    "maml": "MAML, MLP 8-24-24-3, 15 examples, K=5",
    "aggregation": "BDA (both gradients) against alpha=0, MLP, K=50",
}

EAGER, COMPILED = "ours, Unroll", "ours, Unroll, compiled"
WRAPPED, PLAIN, LOOP = "ours, Unroll, cpp_wrapper", "ours, Unroll, without closed forms", "ours, innerloop_ctx"
PEER, JAX = "the faster of higher and torchopt", "JAX jit+scan"

# What must be reached: ours / another's <= the limit.
LIMITS: dict[str, list[tuple[str, str, float]]] = {
    "mlp": [
        (COMPILED, PEER, 0.65),
        (COMPILED, JAX, 1.1),
        (WRAPPED, PEER, 0.6),
        (WRAPPED, JAX, 1.0),
        (EAGER, "higher", 0.92),
    ],
    "softmax": [(COMPILED, PEER, 0.7), (COMPILED, JAX, 1.0), (EAGER, "higher", 1.0)],
    "conv": [(EAGER, PEER, 0.72), (COMPILED, PEER, 0.62), (PLAIN, "higher", 1.0)],
    "conv_75": [(EAGER, PEER, 0.72), (COMPILED, PEER, 0.62), (PLAIN, "higher", 1.0)],
    "transformer": [(COMPILED, PEER, 0.8), (COMPILED, JAX, 1.0), (EAGER, "higher", 1.0)],
    "counterexample": [(COMPILED, JAX, 6.0), (EAGER, "higher", 0.92)],
    "counterexample_bda": [(COMPILED, PEER, 0.8), (EAGER, "higher", 0.92)],
    "mlp_bda": [(EAGER, "higher", 0.92), (COMPILED, "BOAT", 0.6)],
    "maml": [(LOOP, "learn2learn", 1.0)],
}


def contestants(args: Any, name: str = "") -> dict[str, Callable[[Workload], RunSteps]]:
    """Return the contestants of a workload, peers first."""
    if name == "maml":
        peers = {who: build for who, build in _workloads.PEERS.items() if who != JAX}
        return {**peers, **_peers.LEARN2LEARN, LOOP: _peers.native_loop, EAGER: _workloads.OURS[EAGER]}
    chosen = _workloads.contestants(compile=args.compile)
    if name == "mlp_bda":
        chosen = {**_peers.BOAT, **chosen}
    if name in ("conv", "conv_75"):
        chosen[PLAIN] = _peers.without_closed_forms(chosen[EAGER])
    if name == "mlp" and args.compile:
        chosen[WRAPPED] = _peers.with_cpp_wrapper(chosen[COMPILED])
    if args.smoke:  # JAX compiles too
        chosen.pop(JAX, None)
    return chosen


def compare(name: str, args: Any, bar: tqdm[Any]) -> dict[str, Any]:
    """Run all contestants on one workload."""
    make = functools.partial(WORKLOADS[name], smoke=args.smoke)
    steps = make().steps
    exact = _common.numbers(_workloads.by_hand(make(torch.float64))(steps))
    runs = {who: functools.partial(build(make()), steps) for who, build in contestants(args, name).items()}
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
    rivals = [entries[who] for who in ("higher", "torchopt") if who in entries]
    others = {**entries, **({PEER: min(rivals, key=lambda e: e.time)} if rivals else {})}
    return [
        _common.verdict(f"{name}: {ours} / {other}", ratio(entries[ours], others[other]), limit)
        for ours, other, limit in LIMITS[name]
        if ours in entries and other in others
    ]


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
    args.compile, args.smoke = True, False  # all contestants
    run = contestants(args, name)[who](work)
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
    ours = sum(who.startswith("ours") for who in contestants(args))
    sizes = {name: len(contestants(args, name)) * (args.rounds + 2) for name in WORKLOADS}
    sizes["aggregation"] = 2 * ours * (args.rounds + 1)
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
