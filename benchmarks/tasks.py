"""How much faster are B few-shot tasks adapted at once than one after the other with higher?

    python -m benchmarks.tasks

Latest output (--no-memory, on a core of its own; another program ran on the other):

2026-11-18; x86_64, 2 cores, CPU, one thread, float32; torch 2.13.0+cpu, higher 0.2.1, torchopt 0.7.3, jax 0.10.2,
boat-torch 1.1.1, learn2learn 0.2.0

32 tasks, linear head on 64 features, 5-way 1-shot, K=20  first call s  CPU ms  times faster  memory MiB  error
loop over higher                                                  0.19  212.18          1.00           -  3e-07
torch.func vmap by hand                                           0.02   25.97          7.71           -  3e-07
JAX jit+vmap+scan                                                 0.91    1.81        112.47           -  3e-07
ours, loop over tasks                                             0.19  198.77          1.04           -  3e-07
ours, tasks=B                                                     0.02   18.43         11.69           -  3e-07
ours, tasks=B, compiled                                          12.76    3.25         62.32           -  3e-07

16 tasks, whole MLP 64-256-256-10, 10-way 1-shot, K=5  first call s  CPU ms  times faster  memory MiB  error
loop over higher                                               0.20  150.44          1.00           -  2e-07
torch.func vmap by hand                                        0.21  141.06          1.09           -  2e-07
JAX jit+vmap+scan                                              1.73   89.59          1.68           -  2e-07
ours, loop over tasks                                          0.14  151.57          0.98           -  2e-07
ours, tasks=B                                                  0.11  115.51          1.30           -  2e-07
ours, tasks=B, compiled                                       10.96  112.24          1.34           -  2e-07

16 tasks, whole MLP 64-256-256-10, 10-way 5-shot, K=5  first call s  CPU ms  times faster  memory MiB  error
loop over higher                                               0.19  194.42          1.00           -  1e-07
torch.func vmap by hand                                        0.14  153.83          1.28           -  1e-07
JAX jit+vmap+scan                                              1.58  157.35          1.26           -  1e-07
ours, loop over tasks                                          0.19  196.53          1.01           -  1e-07
ours, tasks=B                                                  0.16  168.12          1.13           -  1e-07
ours, tasks=B, compiled                                        7.19  135.25          1.44           -  1e-07

4 tasks, whole Conv-4 of 32 filters, 28x28, 5-way 5-shot, K=5  first call s  CPU ms  times faster  memory MiB  error
loop over higher                                                       1.04    1044          1.00           -  3e-06
torch.func vmap by hand                                                1.32    1249          0.83           -  3e-06
ours, loop over tasks                                                  0.85  793.03          1.34           -  3e-06
ours, tasks=B                                                          0.87  774.72          1.33           -  3e-06

reached  heads: loop over higher / ours, tasks=B, compiled: 62.3 (>= 60)
reached  mlps: loop over higher / ours, tasks=B, compiled: 1.34 (>= 1)
reached  mlps_5_shot: loop over higher / ours, tasks=B, compiled: 1.44 (>= 1)
reached  convs: loop over higher / ours, tasks=B: 1.33 (>= 1)

Whole MLPs gain less than heads: their kernels cost the same either way, and only the overhead of the calls is saved.
Tasks of a whole Conv-4 run one after another inside `tasks=4`, since vmap keeps layers from their closed derivatives.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

import bda_optim as bda

from . import _common, _workloads
from ._common import Entry, ratio

LR = 0.1
Batch = tuple[Tensor, Tensor]


@dataclasses.dataclass
class Tasks:
    """B tasks with a shared initialisation, whose gradient of the summed upper losses is wanted.

    Attributes:
        model: Gives the initial weights.
        support: Inputs and labels of the lower losses, with B in front.
        query: Those of the upper losses.
        steps: K.
        forward: The model in JAX, if it is written there.
    """

    model: nn.Module
    support: Batch
    query: Batch
    steps: int
    forward: Callable[..., Any] | None

    @property
    def count(self) -> int:
        """B."""
        return self.support[0].shape[0]

    def __iter__(self) -> Any:
        """Yield the support and the query set of each task."""
        for task in range(self.count):
            yield tuple(t[task] for t in self.support), tuple(t[task] for t in self.query)


def heads(dtype: torch.dtype = torch.float32, *, smoke: bool = False) -> Tasks:
    """Linear heads on 64 features, 5-way 1-shot."""
    count = 4 if smoke else 32
    return _few_shot(lambda: nn.Linear(64, 5), dtype, count=count, steps=20, forward=_workloads.jax_linear)


def mlps(dtype: torch.dtype = torch.float32, *, smoke: bool = False, shots: int = 1) -> Tasks:
    """All weights of an MLP 64-256-256-10, 10-way."""

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))

    count = 2 if smoke else 16
    return _few_shot(build, dtype, count=count, steps=5, ways=10, shots=shots, forward=_workloads.jax_mlp)


def convs(dtype: torch.dtype = torch.float32, *, smoke: bool = False) -> Tasks:
    """All weights of Conv-4: four blocks of 32 filters on images of 28x28; 5-way 5-shot."""

    def build() -> nn.Module:
        blocks: list[nn.Module] = []
        for channels in (1, 32, 32, 32):
            norm = nn.BatchNorm2d(32, track_running_stats=False)
            blocks += [nn.Conv2d(channels, 32, 3, padding=1), norm, nn.ReLU(), nn.MaxPool2d(2)]
        return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(32, 5))

    count, steps = (2, 1) if smoke else (4, 5)
    return _few_shot(build, dtype, count=count, steps=steps, shots=5, forward=None, shape=(1, 28, 28))


def _few_shot(
    build: Callable[[], nn.Module],
    dtype: torch.dtype,
    *,
    count: int,
    ways: int = 5,
    shots: int = 1,
    shape: tuple[int, ...] = (64,),
    **rest: Any,
) -> Tasks:
    """Draw tasks: gaussian classes with 15 queries each."""
    torch.manual_seed(0)
    model = build().to(dtype)
    centres = torch.randn(count, ways, 1, *shape)

    def draw(number: int) -> Batch:
        inputs = centres + torch.randn(count, ways, number, *shape)
        labels = torch.arange(ways).repeat_interleave(number).expand(count, -1)
        return inputs.flatten(1, 2).to(dtype), labels.contiguous()

    return Tasks(model, draw(shots), draw(15), **rest)


WORKLOADS: dict[str, Callable[..., Tasks]] = {
    "heads": heads,
    "mlps": mlps,
    "mlps_5_shot": functools.partial(mlps, shots=5),
    "convs": convs,
}

TITLES = {
    "heads": "32 tasks, linear head on 64 features, 5-way 1-shot, K=20",
    "mlps": "16 tasks, whole MLP 64-256-256-10, 10-way 1-shot, K=5",
    "mlps_5_shot": "16 tasks, whole MLP 64-256-256-10, 10-way 5-shot, K=5",
    "convs": "4 tasks, whole Conv-4 of 32 filters, 28x28, 5-way 5-shot, K=5",
}

LEAST = {"heads": 60.0, "mlps": 1.0, "mlps_5_shot": 1.0, "convs": 1.0}


def loss(net: Any, hyper: Any, batch: Batch) -> Tensor:
    inputs, labels = batch
    return F.cross_entropy(net(inputs), labels)


# --------------------------------------------------------------------------------------------------------- contestants


def loop_over_higher(work: Tasks) -> _common.Run:
    import higher

    optimizer = torch.optim.SGD(work.model.parameters(), lr=LR)
    variables = list(work.model.parameters())

    def run() -> list[Tensor]:
        total = [torch.zeros_like(v) for v in variables]
        for support, query in work:
            with higher.innerloop_ctx(work.model, optimizer, copy_initial_weights=False) as (fmodel, diffopt):
                for _ in range(work.steps):
                    diffopt.step(loss(fmodel, None, support))
                found = torch.autograd.grad(loss(fmodel, None, query), variables)
            total = [t + g for t, g in zip(total, found, strict=True)]
        return total

    return run


def loop_over_ours(work: Tasks) -> _common.Run:
    inner = bda.BDAInnerOptimizer(work.model.parameters(), lr=LR)
    variables = list(work.model.parameters())

    def run() -> list[Tensor]:
        total = [torch.zeros_like(v) for v in variables]
        for support, query in work:
            batches = [support] * work.steps
            fmodel = inner.unroll(work.model, loss, steps=work.steps, batches=batches, copy_initial_weights=False)
            found = torch.autograd.grad(loss(fmodel, None, query), variables)
            total = [t + g for t, g in zip(total, found, strict=True)]
        return total

    return run


def at_once(work: Tasks, *, compile: bool = False) -> _common.Run:
    inner = bda.BDAInnerOptimizer(work.model.parameters(), lr=LR)
    variables = list(work.model.parameters())

    def run() -> list[Tensor]:
        fmodel = inner.unroll(
            work.model,
            loss,
            steps=work.steps,
            batches=[work.support] * work.steps,
            tasks=work.count,
            compile=compile,
            copy_initial_weights=False,
        )
        return list(torch.autograd.grad(fmodel.losses(loss, None, work.query).sum(), variables))

    return run


def vmap_by_hand(work: Tasks) -> _common.Run:
    """`torch.func`: the gradient of K functional steps, under vmap."""
    from torch.func import functional_call, grad, vmap

    params = {name: p.detach() for name, p in work.model.named_parameters()}

    def lower(p: dict[str, Tensor], batch: Batch) -> Tensor:
        return F.cross_entropy(functional_call(work.model, p, (batch[0],)), batch[1])

    def upper(p: dict[str, Tensor], support: Batch, query: Batch) -> Tensor:
        for _ in range(work.steps):
            g = grad(lower)(p, support)
            p = {name: p[name] - LR * g[name] for name in p}
        return lower(p, query)

    mapped = vmap(grad(upper), in_dims=(None, 0, 0))
    return lambda: [g.sum(0) for g in mapped(params, work.support, work.query).values()]


def vmap_in_jax(work: Tasks) -> _common.Run:
    import jax
    import jax.numpy as jnp

    params = {name: jnp.asarray(p.detach().numpy()) for name, p in work.model.named_parameters()}
    data = [tuple(jnp.asarray(t.numpy()) for t in batch) for batch in (work.support, work.query)]

    def lower(p: Any, batch: Any) -> Any:
        found = jax.nn.log_softmax(work.forward(p, batch[0]))
        return -jnp.take_along_axis(found, batch[1][:, None], axis=1).mean()

    def upper(p: Any, support: Any, query: Any) -> Any:
        def step(now: Any, _: Any) -> Any:
            return jax.tree.map(lambda a, g: a - LR * g, now, jax.grad(lower)(now, support)), None

        return lower(jax.lax.scan(step, p, None, length=work.steps)[0], query)

    compiled = jax.jit(jax.grad(lambda p, a, b: jax.vmap(upper, in_axes=(None, 0, 0))(p, a, b).sum()))

    def run() -> list[Any]:
        found = jax.block_until_ready(compiled(params, *data))
        return [found[name] for name in params]

    return run


def contestants(args: Any, name: str) -> dict[str, Callable[[Tasks], _common.Run]]:
    found: dict[str, Callable[[Tasks], _common.Run]] = {"torch.func vmap by hand": vmap_by_hand}
    if _common.installed("higher"):
        found = {"loop over higher": loop_over_higher, **found}
    if _common.installed("jax") and args.compile and name != "convs":
        found["JAX jit+vmap+scan"] = vmap_in_jax
    found |= {"ours, loop over tasks": loop_over_ours, "ours, tasks=B": at_once}
    if args.compile and name != "convs":  # four networks in one program: minutes of compilation
        found["ours, tasks=B, compiled"] = functools.partial(at_once, compile=True)
    return found


# --------------------------------------------------------------------------------------------------------------- runs


def compare(name: str, args: Any, bar: tqdm[Any]) -> dict[str, Any]:
    """Run all contestants on one workload."""
    make = functools.partial(WORKLOADS[name], smoke=args.smoke)
    exact = _common.numbers(vmap_by_hand(make(torch.float64))())
    runs = {who: build(make()) for who, build in contestants(args, name).items()}
    entries = _common.first_calls(runs, exact, bar)
    _common.race(runs, entries, args.rounds, bar)
    for who, entry in entries.items():
        if args.memory:
            bar.set_postfix_str(f"{who}: memory")
            entry.memory = _common.in_child("benchmarks.tasks", name, who, smoke=args.smoke)["memory"]
        bar.update()
    base = entries.get("loop over higher", entries["ours, loop over tasks"])
    head = [TITLES[name], "first call s", "CPU ms", "times faster", "memory MiB", "error"]
    rows = [
        [who, e.first, e.time * 1e3, 1 / ratio(e, base), e.memory / _common.MIB, f"{e.error:.0e}"]
        for who, e in entries.items()
    ]
    mine: list[Entry] = [e for who, e in entries.items() if who.startswith("ours")]
    best = min(mine, key=lambda e: e.time)
    return {
        "name": name,
        "table": _common.table(head, rows),
        "entries": [{**e.plain(), "times_faster": round(1 / ratio(e, base), 3)} for e in entries.values()],
        "verdicts": [
            _common.verdict(f"{name}: {base.name} / {best.name}", 1 / ratio(best, base), LEAST[name], at_least=True)
        ],
        "agree": all(e.agrees for e in entries.values()),
    }


def child(args: Any) -> None:
    """Measure the memory of one contestant, in this process alone."""
    name, who = args.child
    args.compile = True
    run = contestants(args, name)[who](WORKLOADS[name](smoke=args.smoke))
    print(json.dumps(_common.peak_growth(run, run)))


def draw(results: Sequence[dict[str, Any]], plt: Any) -> None:
    """Bars: how many times faster than the loop over higher."""
    figure, axes = plt.subplots(1, len(results), figsize=(4.2 * len(results), 3), squeeze=False)
    for axis, result in zip(axes[0], results, strict=True):
        names = [e["name"] for e in result["entries"]]
        colours = ["tab:blue" if name.startswith("ours") else "tab:grey" for name in names]
        axis.barh(names, [e["times_faster"] for e in result["entries"]], color=colours)
        axis.set_title(TITLES[result["name"]], fontsize=7)
        axis.set_xlabel("times faster than a loop over higher", fontsize=8)
        axis.tick_params(labelsize=7)
        axis.invert_yaxis()
    figure.tight_layout()


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, write; the status is 1 if a contestant's hypergradient is wrong."""
    args = _common.options(__doc__, list(WORKLOADS), argv)
    if args.child:
        child(args)
        return 0
    results = []
    total = sum(len(contestants(args, name)) * (args.rounds + 2) for name in args.only)
    with _common.cold_cache(), tqdm(total=total, disable=None) as bar:
        for name in args.only:
            bar.set_description(name)
            results.append(compare(name, args, bar))
    print(_common.headline())
    for result in results:
        print("\n" + result.pop("table"))
    print("\n" + _common.show_verdicts([v for r in results for v in r["verdicts"]], smoke=args.smoke))
    _common.save(args.out, "tasks", {"workloads": results}, functools.partial(draw, results))
    return 0 if all(r["agree"] for r in results) else 1


if __name__ == "__main__":
    sys.exit(main())
