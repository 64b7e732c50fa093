"""How long does a hypergradient take, and how much memory, beside higher, torchopt, JAX and code written by hand?

    python -m benchmarks.against_peers

Latest output (--rounds 9 --no-memory, on a core of its own, nothing beside it):

2026-11-18; x86_64, 2 cores, CPU, one thread, float32; torch 2.13.0+cpu, higher 0.2.1, torchopt 0.7.3, jax 0.10.2,
boat-torch 1.1.1, learn2learn 0.2.0

MLP 64-256-256-10, batch 64, K=50  first call s  CPU ms  x higher  memory MiB  error
torch.func by hand                         0.10  106.14      0.92           -  2e-07
higher                                     0.11  114.99      1.00           -  2e-07
torchopt                                   0.10  109.44      0.95           -  2e-07
JAX jit+scan                               1.48   64.90      0.57           -  2e-07
ours, Unroll                               0.10  102.95      0.91           -  2e-07
ours, Checkpointed                         0.18  173.77      1.53           -  2e-07
ours, Unroll, compiled                    10.23   70.72      0.62           -  1e-07
ours, Checkpointed, compiled               0.78  105.25      0.89           -  1e-07
ours, Unroll, cpp_wrapper                 10.15   68.21      0.59           -  1e-07

softmax regression 7000x784, 10 classes, K=20  first call s  CPU ms  x higher  memory MiB  error
torch.func by hand                                     0.46  399.92      1.01           -  3e-07
higher                                                 0.48  400.32      1.00           -  3e-07
torchopt                                               0.45  393.16      0.98           -  3e-07
JAX jit+scan                                           1.41  190.34      0.48           -  3e-07
ours, Unroll                                           0.44  384.36      0.98           -  3e-07
ours, Checkpointed                                     0.69  594.29      1.51           -  3e-07
ours, Unroll, compiled                                 4.55  218.62      0.54           -  5e-07
ours, Checkpointed, compiled                           1.19  340.11      0.84           -  5e-07

conv net, 3 blocks of 32 filters, 25 images 28x28, K=5  first call s  CPU ms  x higher  memory MiB  error
torch.func by hand                                              0.19  187.95      0.98           -  2e-06
higher                                                          0.19  190.89      1.00           -  2e-06
torchopt                                                        0.19  188.68      0.98           -  2e-06
JAX jit+scan                                                    7.36  304.95      1.60           -  2e-06
ours, Unroll                                                    0.16  136.60      0.71           -  1e-06
ours, Checkpointed                                              0.21  195.54      1.03           -  1e-06
ours, Unroll, compiled                                         12.62  110.70      0.57           -  1e-06
ours, Checkpointed, compiled                                    3.54  154.61      0.82           -  1e-06
ours, Unroll, without closed forms                              0.19  191.39      0.99           -  2e-06

the same conv net, 75 images, K=5   first call s  CPU ms  x higher  memory MiB  error
torch.func by hand                          0.59  608.80      0.99           -  3e-06
higher                                      0.57  612.17      1.00           -  3e-06
torchopt                                    0.58  598.72      0.99           -  3e-06
JAX jit+scan                                8.10    1034      1.71           -  2e-06
ours, Unroll                                0.41  397.12      0.65           -  3e-06
ours, Checkpointed                          0.54  574.46      0.93           -  3e-06
ours, Unroll, compiled                     11.82  331.60      0.55           -  3e-06
ours, Checkpointed, compiled                1.51  463.77      0.77           -  3e-06
ours, Unroll, without closed forms          0.58  602.88      0.99           -  3e-06

transformer, 2 layers of width 64, 16 sequences of 32 tokens, K=10  first call s  CPU ms  x higher  memory MiB  error
torch.func by hand                                                          0.22  240.77      0.98           -  1e-07
higher                                                                      0.22  250.99      1.00           -  1e-07
torchopt                                                                    0.21  238.85      0.97           -  1e-07
JAX jit+scan                                                                8.10  289.74      1.16           -  1e-07
ours, Unroll                                                                0.23  237.91      1.02           -  1e-07
ours, Checkpointed                                                          0.37  378.10      1.54           -  1e-07
ours, Unroll, compiled                                                     26.42  157.28      0.63           -  7e-08
ours, Checkpointed, compiled                                                2.79  224.97      0.96           -  7e-08

the paper's counter-example, alpha=0, K=64  first call s  CPU ms  x higher  memory MiB  error
torch.func by hand                                  0.01   12.60      0.97           -  2e-07
higher                                              0.01   13.09      1.00           -  2e-07
torchopt                                            0.01   12.15      0.92           -  2e-07
JAX jit+scan                                        0.16    0.12      0.01           -  8e-09
ours, Unroll                                        0.01   10.94      0.85           -  2e-07
ours, Checkpointed                                  0.03   30.41      2.40           -  8e-09
ours, Unroll, compiled                              2.72    1.66      0.12           -  8e-09
ours, Checkpointed, compiled                        0.21    4.58      0.36           -  8e-09

the paper's counter-example, BDA, K=64  first call s  CPU ms  x higher  memory MiB  error
torch.func by hand                              0.03   26.47      0.89           -  3e-07
higher                                          0.03   29.65      1.00           -  3e-07
torchopt                                        0.03   25.02      0.85           -  3e-07
JAX jit+scan                                    0.20    0.27      0.01           -  4e-08
ours, Unroll                                    0.02   23.10      0.84           -  3e-07
ours, Checkpointed                              0.05   52.76      1.92           -  7e-08
ours, Unroll, compiled                          3.10    2.17      0.08           -  1e-07
ours, Checkpointed, compiled                    0.27    6.84      0.25           -  1e-07

MLP 64-256-256-10, BDA, alpha=0.3, K=50  first call s  CPU ms  x higher  memory MiB  error
BOAT                                             0.19  221.85      1.01           -  4e-05
torch.func by hand                               0.19  206.20      0.97           -  4e-05
higher                                           0.19  218.56      1.00           -  4e-05
torchopt                                         0.18  203.97      0.93           -  4e-05
JAX jit+scan                                     1.68  162.79      0.74           -  2e-07
ours, Unroll                                     0.18  190.39      0.92           -  4e-05
ours, Checkpointed                               0.28  318.42      1.49           -  4e-05
ours, Unroll, compiled                           6.57  135.57      0.62           -  2e-07
ours, Checkpointed, compiled                     0.67  205.22      0.94           -  2e-07

MAML, MLP 8-24-24-3, 15 examples, K=5  first call s  CPU ms  x higher  memory MiB  error
torch.func by hand                             0.00    4.13      0.80           -  2e-07
higher                                         0.00    5.07      1.00           -  2e-07
torchopt                                       0.00    4.05      0.81           -  2e-07
learn2learn                                    0.00    4.03      0.80           -  2e-07
ours, innerloop_ctx                            0.00    4.75      0.91           -  3e-07
ours, Unroll                                   0.00    4.72      0.92           -  3e-07

BDA (both gradients) against alpha=0, MLP, K=50  alpha=0 ms  BDA ms  ratio
ours, Unroll                                         104.89  196.98   1.84
ours, Checkpointed                                   170.61  293.61   1.75
ours, Unroll, compiled                                68.53  131.12   1.90
ours, Checkpointed, compiled                         102.91  202.77   1.88

reached  mlp: ours, Unroll, compiled / the faster of higher and torchopt: 0.646 (<= 0.65)
reached  mlp: ours, Unroll, compiled / JAX jit+scan: 1.09 (<= 1.1)
MISSED   mlp: ours, Unroll, cpp_wrapper / the faster of higher and torchopt: 0.626 (<= 0.6)
MISSED   mlp: ours, Unroll, cpp_wrapper / JAX jit+scan: 1.05 (<= 1)
reached  mlp: ours, Unroll / higher: 0.91 (<= 0.92)
reached  softmax: ours, Unroll, compiled / the faster of higher and torchopt: 0.553 (<= 0.7)
MISSED   softmax: ours, Unroll, compiled / JAX jit+scan: 1.12 (<= 1)
reached  softmax: ours, Unroll / higher: 0.979 (<= 1)
MISSED   conv: ours, Unroll / the faster of higher and torchopt: 0.724 (<= 0.72)
reached  conv: ours, Unroll, compiled / the faster of higher and torchopt: 0.588 (<= 0.62)
reached  conv: ours, Unroll, without closed forms / higher: 0.991 (<= 1)
reached  conv_75: ours, Unroll / the faster of higher and torchopt: 0.661 (<= 0.72)
reached  conv_75: ours, Unroll, compiled / the faster of higher and torchopt: 0.554 (<= 0.62)
reached  conv_75: ours, Unroll, without closed forms / higher: 0.994 (<= 1)
reached  transformer: ours, Unroll, compiled / the faster of higher and torchopt: 0.669 (<= 0.8)
reached  transformer: ours, Unroll, compiled / JAX jit+scan: 0.536 (<= 1)
MISSED   transformer: ours, Unroll / higher: 1.02 (<= 1)
MISSED   counterexample: ours, Unroll, compiled / JAX jit+scan: 12.9 (<= 6)
reached  counterexample: ours, Unroll / higher: 0.847 (<= 0.92)
reached  counterexample_bda: ours, Unroll, compiled / the faster of higher and torchopt: 0.0856 (<= 0.8)
reached  counterexample_bda: ours, Unroll / higher: 0.843 (<= 0.92)
MISSED   mlp_bda: ours, Unroll / higher: 0.922 (<= 0.92)
MISSED   mlp_bda: ours, Unroll, compiled / BOAT: 0.623 (<= 0.6)
MISSED   maml: ours, innerloop_ctx / learn2learn: 1.12 (<= 1)
reached  BDA / alpha=0, ours, Unroll: 1.84 (<= 2.1)
reached  BDA / alpha=0, ours, Checkpointed: 1.75 (<= 2.1)
reached  BDA / alpha=0, ours, Unroll, compiled: 1.9 (<= 2.1)
reached  BDA / alpha=0, ours, Checkpointed, compiled: 1.88 (<= 2.1)

Notes:
- Conv net: a profile of the compiled one had the compiler's own max-pooling at 4.5 ms a call, where torch takes 1.0
  with channels last, and copies to channels last around every convolution. Without both, compiled / best peer went from
  0.85 to 0.59; the kernel for pooling also serves uncompiled loops (0.81 to 0.72). Convolutions are half of the rest.
- In float32 a unit of a ReLU or a max-pooling may change sides by rounding: earlier programs of the net with 75 images
  were off by 0.1, and by 5e-14 in float64.
- Counter-example: 13 times JAX, which runs the loop inside one program: 0.1 ms, where 32 calls of ours take 1.7 ms.
- MAML on 24 units: 1.1 times learn2learn, which checks nothing: finite results, operations without a second derivative,
  the module as it was. Most of the difference is the opening of a loop, not its steps.
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
