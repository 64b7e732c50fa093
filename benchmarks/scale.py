"""How many tasks per second do 1 and 2 ranks adapt, and where would more ranks stop helping?

    python -m benchmarks.scale

Latest output (25 rounds; the machine's two cores had a load of 6 from other work, so that the rates say little; the
third row is what two processes reached there without communication):

2026-11-16; x86_64, 2 cores, CPU, one thread, float32; torch 2.13.0+cpu, higher 0.2.1, torchopt 0.7.3, jax 0.10.2

MLP 64-256-256-10, all weights, K=5, 16 tasks per rank  tasks/s  ms per upper iteration  efficiency
1 rank                                                    53.77                  297.56        1.00
2 ranks                                                   74.46                  429.75        0.72
2 processes that do not communicate                       75.45                  424.14        0.72
averaging alone: 4.11 ms for 0.34 MB of upper variables; the second row over the third, within rounds: 1.04

3 convolutions, adapted head, K=5, 8 tasks per rank  tasks/s  ms per upper iteration  efficiency
1 rank                                                 45.87                  174.42        1.00
2 ranks                                                61.84                  258.74        0.72
2 processes that do not communicate                    64.85                  246.74        0.73
averaging alone: 2.79 ms for 0.09 MB of upper variables; the second row over the third, within rounds: 0.96

on paper: ms that averaging takes              8 GPUs  64 GPUs  1024 GPUs
0.1 M upper variables (Conv-4), 2 ms per task    0.03     0.22       0.34
25 M (ResNet-50), 50 ms per task                 0.94    10.18      10.30
1 G (transformer), 2 s per task                 35.07   395.64     400.30

on paper: ms of inner loops per GPU that make it 90 % efficient  8 GPUs  64 GPUs  1024 GPUs
0.1 M upper variables (Conv-4), 2 ms per task                      0.31     2.02       3.10
25 M (ResNet-50), 50 ms per task                                   8.51    91.62      92.70
1 G (transformer), 2 s per task                                  315.63     3561       3603

on paper: efficiency with 1024 tasks in all    8 GPUs  64 GPUs  1024 GPUs
0.1 M upper variables (Conv-4), 2 ms per task    1.00     0.99       0.85
25 M (ResNet-50), 50 ms per task                 1.00     0.99       0.83
1 G (transformer), 2 s per task                  1.00     0.99       0.83

All of it comes from one start of two ranks: in every round one rank works alone, then both without communication, then
both with it, in an order that rotates; each has the same number of tasks (weak scaling). Times are on the clock, since
ranks wait. Two ranks are as fast as two processes that do not communicate, within the noise: averaging takes 3 to 4 ms
of 250 to 430.

The model on paper: nodes of 8 GPUs, 200 GB/s and 5 us per message inside a node, 20 GB/s and 15 us between nodes; ring
or tree, whichever is faster; equal tasks, float32, and nothing overlapped (`backwards=` sends earlier). The seconds per
task, used in the last table alone, are assumptions too. What it says: the exchange does not depend on K, so longer
inner loops scale better; latency decides for small upper variables (below some MB), bandwidth for large ones, and from
64 to 1024 GPUs little changes; what ends scaling is the number of tasks: more GPUs than tasks per upper iteration have
nothing to do.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

import bda_optim as bda
from bda_optim import distributed

from . import _common

LR = 0.1
Batch = tuple[Tensor, Tensor]


@dataclasses.dataclass
class Work:
    """Tasks whose hypergradient one rank computes in one upper iteration.

    Attributes:
        model: All its parameters are upper variables.
        inner: Owns those that the tasks adapt.
        support: Inputs and labels of the lower losses, with the tasks in front.
        query: Those of the upper losses.
        steps: K.
    """

    model: nn.Module
    inner: bda.BDAInnerOptimizer
    support: Batch
    query: Batch
    steps: int

    @property
    def count(self) -> int:
        """How many tasks there are."""
        return len(self.support[0])

    def backward(self) -> None:
        """Leave the mean hypergradient in `.grad`."""
        fmodel = self.inner.unroll(
            self.model,
            loss,
            steps=self.steps,
            batches=[self.support] * self.steps,
            tasks=self.count,
            copy_initial_weights=False,
        )
        fmodel.losses(loss, None, self.query).mean().backward()


def loss(net: Any, hyper: Any, batch: Batch) -> Tensor:
    inputs, labels = batch
    return F.cross_entropy(net(inputs), labels)


def mlp(*, smoke: bool) -> Work:
    """MAML: all weights of an MLP are adapted, and all are upper variables."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    inner = bda.BDAInnerOptimizer(model.parameters(), lr=LR)
    count = 2 if smoke else 16
    return Work(model, inner, _draw(count, 10, 1, (64,)), _draw(count, 10, 15, (64,)), 2 if smoke else 5)


def conv(*, smoke: bool) -> Work:
    """A convolutional network; the tasks adapt its last layer, the rest is an upper variable."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for channels in (1, 32, 32):
        layers += [nn.Conv2d(channels, 32, 3, stride=2, padding=1), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(512, 5))
    inner = bda.BDAInnerOptimizer(model[-1].parameters(), lr=LR)
    count = 2 if smoke else 8
    return Work(model, inner, _draw(count, 5, 1, (1, 28, 28)), _draw(count, 5, 5, (1, 28, 28)), 2 if smoke else 5)


def _draw(count: int, ways: int, shots: int, shape: tuple[int, ...]) -> Batch:
    labels = torch.arange(ways).repeat_interleave(shots).expand(count, -1).contiguous()
    return torch.randn(count, ways * shots, *shape), labels


WORKLOADS: dict[str, Callable[..., Work]] = {"mlp": mlp, "conv": conv}

TITLES = {
    "mlp": "MLP 64-256-256-10, all weights, K=5, 16 tasks per rank",
    "conv": "3 convolutions, adapted head, K=5, 8 tasks per rank",
}

# ----------------------------------------------------------------------------------------------------------- measuring

KINDS = ("one", "apart", "together", "exchange")


def child(name: str, rounds: int, *, smoke: bool) -> None:
    """On each rank: alternate between one rank alone, both without communication, both with it, and that alone."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    work = WORKLOADS[name](smoke=smoke)
    averager = distributed.Averager(work.model)
    calls = 1 if smoke else max(1, math.ceil(0.5 / _seconds(work.backward, 1)))
    shared = torch.tensor(calls)
    dist.broadcast(shared, 0)
    calls = int(shared)

    def together() -> None:
        with averager(weight=work.count, backwards=1):
            work.backward()

    def exchange() -> None:
        with averager(weight=work.count):
            pass

    runs: dict[str, Callable[[], None]] = {"one": work.backward, "apart": work.backward}
    runs |= {"together": together, "exchange": exchange}
    together()
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for number in range(rounds):
        start = number % len(KINDS)
        for kind in KINDS[start:] + KINDS[:start]:
            dist.barrier()
            begin = time.perf_counter()
            if kind != "one" or rank == 0:
                _seconds(runs[kind], calls)
            dist.barrier()  # a rank that waits here sleeps
            times[kind].append((time.perf_counter() - begin) / calls)
    if rank == 0:
        bytes_moved = sum(p.numel() * p.element_size() for p in work.model.parameters())
        print(json.dumps({"times": times, "tasks": work.count, "upper_bytes": bytes_moved, "calls": calls}))
    dist.destroy_process_group()


def _seconds(run: Callable[[], None], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        run()
    return time.perf_counter() - start


def measure(name: str, rounds: int, *, smoke: bool) -> dict[str, Any]:
    """Start two ranks and return what they measured."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"]
    command += ["benchmarks.scale", "--rounds", str(rounds), *(["--smoke"] if smoke else []), "--child", name]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(_common.ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, cwd=_common.ROOT, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"the ranks failed: {done.stderr[-2000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    seconds = {kind: statistics.median(values) for kind, values in found["times"].items()}

    def ratio(a: str, b: str) -> float:
        """Within a round, so that load from elsewhere hits both alike."""
        return statistics.median(x / y for x, y in zip(found["times"][a], found["times"][b], strict=True))

    efficiency = {"efficiency": ratio("one", "together"), "without_communication": ratio("one", "apart")}
    efficiency["of_communication"] = ratio("apart", "together")
    return {"name": name, "seconds": seconds, **efficiency, **found}


def show(found: dict[str, Any]) -> str:
    """Return the table of one workload."""
    tasks, seconds = found["tasks"], found["seconds"]
    rows = [
        ["1 rank", tasks / seconds["one"], seconds["one"] * 1e3, 1.0],
        ["2 ranks", 2 * tasks / seconds["together"], seconds["together"] * 1e3, found["efficiency"]],
        [
            "2 processes that do not communicate",
            2 * tasks / seconds["apart"],
            seconds["apart"] * 1e3,
            found["without_communication"],
        ],
    ]
    head = [TITLES[found["name"]], "tasks/s", "ms per upper iteration", "efficiency"]
    alone = f"{seconds['exchange'] * 1e3:.2f} ms for {found['upper_bytes'] / 1e6:.2f} MB of upper variables"
    share = f"the second row over the third, within rounds: {found['of_communication']:.2f}"
    return _common.table(head, rows) + f"\naveraging alone: {alone}; {share}"


# ----------------------------------------------------------------------------------------------------- a model on paper


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Assumptions: nodes of 8 GPUs; what one GPU can send, and how long one message takes to arrive.

    Attributes:
        near_bandwidth: Bytes per second and GPU inside a node (NVLink, as NCCL reaches it).
        far_bandwidth: The same between nodes (one adapter of 200 Gb/s per GPU, at 80 per cent).
        near_latency: Seconds per message inside a node.
        far_latency: The same between nodes.
    """

    near_bandwidth: float = 200e9
    far_bandwidth: float = 20e9
    near_latency: float = 5e-6
    far_latency: float = 15e-6

    def all_reduce(self, size: float, ranks: int) -> float:
        """Return the seconds of one all-reduce: by a ring or by a tree, whichever is faster, as NCCL chooses.

        A ring sends 2 (W - 1)/W of the bytes in 2 (W - 1) messages, a tree twice the bytes in 2 log2 W.
        """
        near = ranks <= 8
        bandwidth = self.near_bandwidth if near else self.far_bandwidth
        latency = self.near_latency if near else self.far_latency
        ring = 2 * (ranks - 1) / ranks * size / bandwidth + 2 * (ranks - 1) * latency
        tree = 2 * size / bandwidth + 2 * math.log2(ranks) * latency
        return min(ring, tree)


RANKS = (8, 64, 1024)
TASKS = 1024
"""Tasks per upper iteration, divided among all GPUs."""

# name, upper scalars, assumed seconds that a GPU computes per task
PROBLEMS = (
    ("0.1 M upper variables (Conv-4), 2 ms per task", 0.11e6, 2e-3),
    ("25 M (ResNet-50), 50 ms per task", 25e6, 50e-3),
    ("1 G (transformer), 2 s per task", 1e9, 2.0),
)


def paper(cluster: Cluster) -> list[dict[str, Any]]:
    """Return what the model predicts: equal tasks, float32, and nothing sent before the last task is done."""
    rows = []
    for name, scalars, task in PROBLEMS:
        sent = {w: cluster.all_reduce(4 * scalars, w) for w in RANKS}
        rows.append(
            {
                "problem": name,
                "upper_bytes": 4 * scalars,
                "task_s": task,
                "exchange_s": sent,
                "enough_s": {w: 9 * sent[w] for w in RANKS},  # c / (c + sent) = 0.9
                "efficiency": {w: 1 / (1 + sent[w] / (TASKS / w * task)) for w in RANKS},
            }
        )
    return rows


def show_paper(rows: Sequence[dict[str, Any]]) -> str:
    """Return the model's three tables."""
    tables = []
    for title, key, scale in (
        ("on paper: ms that averaging takes", "exchange_s", 1e3),
        ("on paper: ms of inner loops per GPU that make it 90 % efficient", "enough_s", 1e3),
        (f"on paper: efficiency with {TASKS} tasks in all", "efficiency", 1.0),
    ):
        cells = [[row["problem"], *(row[key][w] * scale for w in RANKS)] for row in rows]
        tables.append(_common.table([title, *(f"{w} GPUs" for w in RANKS)], cells))
    return "\n\n".join(tables)


def draw(results: Sequence[dict[str, Any]], rows: Sequence[dict[str, Any]], plt: Any) -> None:
    """Measured tasks per second, and the model's efficiency."""
    figure, axes = plt.subplots(1, len(results) + 1, figsize=(4 * (len(results) + 1), 3))
    for axis, found in zip(axes, results, strict=False):
        rates = [found["tasks"] / found["seconds"]["one"], 2 * found["tasks"] / found["seconds"]["together"]]
        axis.bar(["1 rank", "2 ranks"], rates, color=["tab:grey", "tab:blue"], width=0.5)
        axis.axhline(2 * rates[0], color="black", linewidth=0.8, linestyle="--", label="twice one rank")
        axis.set(ylabel="tasks per second", ylim=(0, 2.6 * rates[0]))
        axis.set_title(TITLES[found["name"]].split(",")[0], fontsize=8)
        axis.legend(fontsize=7)
    many = [2**n for n in range(1, 13)]
    for row in rows:
        enough = [9e3 * Cluster().all_reduce(row["upper_bytes"], w) for w in many]
        axes[-1].loglog(many, enough, marker="o", markersize=3, label=row["problem"].split(",")[0])
    axes[-1].set(xlabel="GPUs", title="on paper: ms of inner loops per GPU for 90 %", ylim=(1e-2, 1e6))
    axes[-1].title.set_fontsize(8)
    axes[-1].set_xticks([2, *RANKS], ["2", *map(str, RANKS)])
    axes[-1].legend(fontsize=7)
    figure.tight_layout()


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, write."""
    args = _common.options(__doc__, list(WORKLOADS), argv, on_cpu=True)
    if args.child:
        child(args.child[0], args.rounds, smoke=args.smoke)
        return 0
    load = os.getloadavg()[0]
    results = [measure(name, args.rounds, smoke=args.smoke) for name in tqdm(args.only, disable=None)]
    rows = paper(Cluster())
    print(_common.headline() + f"; load before: {load:.1f}")
    for found in results:
        print("\n" + show(found))
    print("\n" + show_paper(rows))
    if args.smoke:
        print("(a smoke run: the figures say nothing)")
    content = {"load_before": round(load, 2), "workloads": results, "assumptions": dataclasses.asdict(Cluster())}
    _common.save(args.out, "scale", {**content, "paper": rows}, functools.partial(draw, results, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
