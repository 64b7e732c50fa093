r"""Few-shot classification by bilevel optimisation: the paper's Tables 3 and 4 and its Figure 4.

A task (episode) has N classes with M labelled images each, the support set, and further images of the same classes, the
query set. The lower loss of a task is the cross-entropy of the support set, the upper loss that of the query set:

    min over x of  sum over tasks j of  F(x, y^j),  where y^j comes from K steps on  f(x, .) = loss of support set j

| method   | lower variables y   | upper variables x             | a lower step              | adjoint       |
|----------|---------------------|-------------------------------|---------------------------|---------------|
| MAML     | the whole network   | its initial weights           | SGD                       | Unroll        |
| Meta-SGD | the whole network   | those, and a rate per weight  | SGD with those rates      | Unroll        |
| Reptile  | the whole network   | its initial weights           | SGD, on all images alike  | none: x - y_K |
| RHG      | the head, from zero | the backbone                  | SGD                       | Unroll        |
| T-RHG    | the head, from zero | the backbone                  | SGD                       | Truncated     |
| BDA      | the head, from zero | the backbone                  | aggregated, alpha > 0     | Unroll        |

The last three compute the backbone's features once per upper iteration and hand them to the lower loop as `batches`,
through which the hypergradient reaches the backbone.

In training BDA's lower steps see the query labels, as its aggregation says. In validation and test they must not: those
labels are what is to be predicted. There every method, BDA too, adapts to the support set alone (alpha = 0). The paper
does not say what it does at this point; anything else would read the answers. Two controls ask what the query labels
do in training's lower steps. `bda-third` has a third set of images there, as large as the query set, for the upper
direction. `rhg-query` is RHG whose lower loss in training has the query set as well (docs/experiments.md).

The protocol is MAML's, as in the paper. Omniglot's characters are divided at random, and turned by 90, 180 and 270
degrees they count as further classes. Batch normalisation uses the statistics of the set at hand, support or query, of
one task: there are no running statistics, and the images of a query set are classified together.

    python examples/paper/few_shot.py --data DATA                                       # Omniglot, 5-way 1-shot
    python examples/paper/few_shot.py --data DATA --dataset cifar_fs --methods bda rhg t-rhg
    python examples/paper/few_shot.py --smoke                                           # seconds, on made images
    torchrun --nproc-per-node 2 examples/paper/few_shot.py --data DATA --distributed    # tasks divided among processes
    accelerate launch --multi_gpu --num_processes 2 examples/paper/few_shot.py --data DATA --distributed

All methods get the same episodes, the same initial backbone and the same number of upper iterations; they take turns,
so that a run which is stopped has brought all of them equally far. Each has a checkpoint of its own: --resume goes on,
also with further methods.

Reference: Liu, Mu, Yuan, Zeng, Zhang, "A Generic First-Order Algorithmic Framework for Bi-Level Programming Beyond
Lower-Level Singleton", ICML 2020: the experiments on meta learning.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import _above  # noqa: F401
import torch
import torch.nn.functional as F
from _episodes import Tasks, draw, load
from _few_shot_report import TARGETS, figure, table, until
from _ranks import first, joined, processes
from _run import Checkpoint, arguments, provenance, wait_while_paused, write_atomically, write_json
from torch import Tensor, nn
from tqdm import tqdm

import bda_optim as bda
from bda_optim import distributed

# --- settings ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Settings:
    """What all methods share, and what the numbers of a run depend on, beside its method and seed."""

    dataset: str = "omniglot"
    ways: int = 5  # N, classes per task
    shots: int = 1  # M, support images per class
    iterations: int = 2000  # upper ones
    tasks: int = 4  # per upper iteration: B
    queries: int = 5  # per class, in training and validation
    filters: tuple[int, ...] = (16, 32, 64, 128)  # of the convolutions
    upper_lr: float = 3e-3  # Adam's, falling to 0 along a cosine
    every: int = 200  # upper iterations between validations
    validation_episodes: int = 100
    test_episodes: int = 600
    test_queries: int = 15  # per class


@dataclasses.dataclass(frozen=True)
class Method:
    """The settings of one method; those of the lower level are `BDAInnerOptimizer`'s."""

    title: str
    whole: bool  # lower variables: the whole network, or the head
    lr: float
    steps: int  # K, in training
    test_steps: int  # K, in validation and test
    alpha: float = 0.0
    decay: bool = False  # whether alpha falls as 1 / k
    last: int | None = None  # Truncated(last=...)
    learned_rates: bool = False
    reptile: bool = False
    third: bool = False  # whether the upper direction of the lower steps has images of its own
    joint: bool = False  # whether the lower loss of training has the query set as well

    @property
    def control(self) -> bool:
        return self.third or self.joint


METHODS = {
    "maml": Method("MAML", whole=True, lr=0.4, steps=1, test_steps=3),
    "meta-sgd": Method("Meta-SGD", whole=True, lr=0.4, steps=1, test_steps=1, learned_rates=True),
    "reptile": Method("Reptile", whole=True, lr=0.1, steps=5, test_steps=5, reptile=True),
    "rhg": Method("RHG", whole=False, lr=0.1, steps=5, test_steps=20),
    "t-rhg": Method("T-RHG", whole=False, lr=0.1, steps=5, test_steps=20, last=2),
    "bda": Method("BDA", whole=False, lr=0.1, steps=5, test_steps=20, alpha=0.05, decay=True),
}
METHODS["bda-third"] = dataclasses.replace(METHODS["bda"], title="BDA, third set", third=True)
METHODS["rhg-query"] = dataclasses.replace(METHODS["rhg"], title="RHG+query", joint=True)

REPTILE_IMAGES = 1  # of each class, per lower step


class Choice(NamedTuple):
    """What few_shot_choice.py chose on validation episodes: the network, and the rates."""

    filters: tuple[int, ...] = Settings.filters
    upper_lr: float = Settings.upper_lr
    head_lr: float = METHODS["rhg"].lr  # of RHG, T-RHG and BDA
    alpha: float = METHODS["bda"].alpha
    maml_lr: float = METHODS["maml"].lr  # of MAML, and the first rates of Meta-SGD
    reptile_lr: float = METHODS["reptile"].lr

    def methods(self) -> dict[str, Method]:
        """Return the methods with these rates."""
        found = {}
        for name, method in METHODS.items():
            lr = self.reptile_lr if method.reptile else self.maml_lr if method.whole else self.head_lr
            alpha = self.alpha if method.alpha else 0.0
            found[name] = dataclasses.replace(method, lr=lr, alpha=alpha)
        return found

    def settings(self, **others: Any) -> Settings:
        return Settings(filters=self.filters, upper_lr=self.upper_lr, **others)


CHOSEN = {  # by data set and number of classes
    ("omniglot", 5): Choice(head_lr=0.03, alpha=2.0),
    ("omniglot", 20): Choice(alpha=1.0, maml_lr=1.0, reptile_lr=0.3),
    ("cifar_fs", 5): Choice(filters=(64, 64, 64, 64), alpha=0.05),
}

# --- the network ------------------------------------------------------------------------------------------------------


class Conv4(nn.Module):
    """Blocks of convolution, halving, batch normalisation and ReLU, and a linear head that starts from zero.

    Halving before the normalisation leaves it a quarter of the work. The filters grow from block to block as the images
    shrink: for the time that 32 everywhere take, the head sees 128 features. The last block has no ReLU, so that these
    are centred: a head that starts from zero learns far faster from them.
    """

    def __init__(self, shape: Sequence[int], filters: Sequence[int], ways: int) -> None:
        super().__init__()
        blocks: list[nn.Module] = []
        for channels, width in zip((shape[0], *filters), filters, strict=False):
            norm = nn.BatchNorm2d(width, track_running_stats=False)
            blocks += [nn.Conv2d(channels, width, 3, padding=1), nn.MaxPool2d(2), norm, nn.ReLU()]
        self.backbone = nn.Sequential(*blocks[:-1], nn.Flatten())
        self.head = nn.Linear(filters[-1] * (shape[1] // 16) * (shape[2] // 16), ways)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.backbone(images))


# --- the methods ------------------------------------------------------------------------------------------------------


def lower(net: Any, hyper: None, batch: tuple[Tensor, ...]) -> Tensor:
    inputs, labels, *_ = batch
    return F.cross_entropy(net(inputs), labels)


def upper(net: Any, hyper: None, batch: tuple[Tensor, ...]) -> Tensor:
    *_, inputs, labels = batch
    return F.cross_entropy(net(inputs), labels)


class Learner:
    """A network and the method that trains it."""

    def __init__(self, method: Method, net: Conv4, settings: Settings) -> None:
        self.method, self.net, self.settings = method, net, settings
        self.lower_module: nn.Module = net if method.whole else net.head
        learned = list(net.parameters()) if method.learned_rates else []
        self.rates = [torch.full_like(p, method.lr).requires_grad_() for p in learned]
        lr = self.rates or method.lr
        alpha = bda.harmonic(method.alpha) if method.decay else method.alpha
        self.inner = bda.BDAInnerOptimizer(self.lower_module.parameters(), lr=lr, alpha=alpha)
        self.test_inner = bda.BDAInnerOptimizer(self.lower_module.parameters(), lr=lr)
        self.variables = [*(net if method.whole else net.backbone).parameters(), *self.rates]
        self.optimizer = torch.optim.Adam(self.variables, lr=settings.upper_lr)
        self.averager = distributed.Averager(self.variables)

    def features(self, images: Tensor) -> Tensor:
        """What the lower variables are applied to: the images themselves, or what the backbone makes of them."""
        if self.method.whole:
            return images
        return torch.stack([self.net.backbone(one) for one in images])  # batch statistics of each task by itself

    def losses(self, tasks: Tasks) -> Tensor:
        """Return the B upper losses F(x, y_K), differentiable in x."""
        method = self.method
        others = tasks
        if method.third:
            tasks, others = tasks.halves(self.settings.ways)
        batch = tasks._replace(support=self.features(tasks.support), query=self.features(tasks.query))
        inside = batch._replace(query=self.features(others.query)) if method.third else batch
        if method.joint:
            both = torch.cat((batch.support, batch.query), 1), torch.cat((batch.support_labels, batch.query_labels), 1)
            inside = inside._replace(support=both[0], support_labels=both[1])
        fmodel = self.inner.unroll(
            self.lower_module,
            lower,
            upper,
            steps=method.steps,
            batches=[inside] * method.steps,
            tasks=tasks.count,
            adjoint=bda.Truncated(last=method.last) if method.last else bda.Unroll(),
            copy_initial_weights=not method.whole,
        )
        return fmodel.losses(upper, None, batch)

    def displacement(self, tasks: Tasks) -> Tensor:
        """Write Reptile's mean of x - y_K into `.grad`, and return the last lower losses of the B tasks."""
        ways = self.settings.ways
        pairs = (tasks.support, tasks.query), (tasks.support_labels, tasks.query_labels)
        images, labels = (torch.cat([t.unflatten(1, (ways, -1)) for t in pair], 2) for pair in pairs)
        batches = []
        for step in range(self.method.steps):  # in turns
            these = (step * REPTILE_IMAGES + torch.arange(REPTILE_IMAGES)) % images.shape[2]
            batches.append((images[:, :, these].flatten(1, 2), labels[:, :, these].flatten(1, 2)))
        with torch.no_grad():
            fmodel = self.inner.unroll(self.net, lower, steps=len(batches), batches=batches, tasks=tasks.count)
            for p, adapted in zip(self.variables, fmodel.params.values(), strict=True):
                p.grad = p - adapted.mean(0)
        return fmodel.trace.lower[-1]

    def gradient(self, tasks: Tasks) -> Tensor:
        """Write the mean gradient of the tasks into `.grad`, and return their losses (of this process's tasks)."""
        self.optimizer.zero_grad()
        mine = distributed.shard(tasks)
        with self.averager(weight=mine.count):
            if mine.count == 0:
                return torch.zeros(0)
            if self.method.reptile:
                return self.displacement(mine)
            losses = self.losses(mine)
            losses.mean().backward()
            return losses.detach()

    def iterate(self, tasks: Tasks, iteration: int) -> Tensor:
        """One upper iteration."""
        losses = self.gradient(tasks)
        decay = 0.5 * (1 + math.cos(math.pi * iteration / self.settings.iterations))
        self.optimizer.param_groups[0]["lr"] = self.settings.upper_lr * decay
        self.optimizer.step()
        return losses

    @torch.no_grad()
    def predict(self, support: Tensor, labels: Tensor, query: Tensor) -> Tensor:
        """Adapt to B support sets, and return the scores of the query images, whose labels are not to be seen here."""
        support, query = self.features(support), self.features(query)
        fmodel = self.test_inner.unroll(
            self.lower_module,
            lower,
            steps=self.method.test_steps,
            batches=[(support, labels)] * self.method.test_steps,
            tasks=len(support),
        )
        return fmodel(query)

    def evaluate(self, tasks: Tasks) -> tuple[Tensor, Tensor]:
        """Return loss and accuracy of the B query sets."""
        scores, labels = self.predict(tasks.support, tasks.support_labels, tasks.query), tasks.query_labels
        losses = F.cross_entropy(scores.flatten(0, 1), labels.flatten(), reduction="none").unflatten(0, labels.shape)
        return losses.mean(1), (scores.argmax(-1) == labels).float().mean(1)


# --- a run ------------------------------------------------------------------------------------------------------------

TRAIN, VALIDATION, TEST = range(3)  # every iteration and every part has its own episodes, which all methods see


class Run:
    """One method with one seed, which goes on from where its checkpoint is."""

    def __init__(
        self, name: str, method: Method, seed: int, data: Mapping[str, Tensor], settings: Settings, args: Any
    ) -> None:
        self.data, self.settings, self.seed, self.device = data, settings, seed, args.device
        torch.manual_seed(seed)
        net = Conv4(data["train"].shape[2:], settings.filters, settings.ways)
        net.to(args.device, memory_format=torch.channels_last)  # on a CPU twice as fast
        self.learner = Learner(method, net, settings)
        what = {**dataclasses.asdict(settings), **dataclasses.asdict(method), "method": name, "seed": seed}
        self.checkpoint = Checkpoint(args.out / "checkpoints" / f"{name}-{seed}.pt", what, resume=args.resume)
        self.state: dict[str, Any] = {"iteration": 0, "wall": 0.0, "cpu": 0.0, "curve": [], "test": None}
        found = self.checkpoint.load()
        if found is not None:
            self.state = found["state"]
            net.load_state_dict(found["net"])
            self.learner.optimizer.load_state_dict(found["optimizer"])
            with torch.no_grad():
                for rate, value in zip(self.learner.rates, found["rates"], strict=True):
                    rate.copy_(value)

    def tasks(self, part: int, number: int, count: int) -> Tasks:
        settings, name = self.settings, ("train", "val", "test")[part]
        seed = (self.seed * 3 + part) * 10**9 + number
        queries = settings.test_queries if part == TEST else settings.queries
        if part == TRAIN and self.learner.method.third:
            queries *= 2  # the first half is that of the other methods
        tasks = draw(self.data[name], count, settings, queries, seed, rotate=settings.dataset == "omniglot")
        return Tasks(*(tensor.to(self.device) for tensor in tasks))

    def evaluate(self, part: int, episodes: int) -> tuple[Tensor, Tensor]:
        size = self.settings.tasks
        found = [
            torch.stack(self.learner.evaluate(self.tasks(part, start, min(size, episodes - start)))).cpu()
            for start in distributed.shard(range(0, episodes, size))
        ]
        losses, accuracies = torch.cat(joined(found), 1)
        return losses, accuracies

    def train(self, bar: Any) -> None:
        """Go on to the next validation."""
        state, settings = self.state, self.settings
        wait_while_paused()
        wall, cpu = time.perf_counter(), time.process_time()
        while state["iteration"] < settings.iterations:
            tasks = self.tasks(TRAIN, state["iteration"], settings.tasks)
            self.learner.iterate(tasks, state["iteration"])
            state["iteration"] += 1
            bar.update()
            if state["iteration"] % settings.every == 0 or state["iteration"] == settings.iterations:
                break
        state["wall"] += time.perf_counter() - wall
        state["cpu"] += time.process_time() - cpu
        losses, accuracies = self.evaluate(VALIDATION, settings.validation_episodes)
        state["curve"].append([state["iteration"], losses.mean().item(), accuracies.mean().item()])

    def advance(self, bar: Any) -> None:
        """Go on to the next validation, and save; after the last one, test."""
        self.train(bar)
        if self.state["iteration"] == self.settings.iterations:
            self.state["test"] = self.evaluate(TEST, self.settings.test_episodes)[1]
        self.save()

    def save(self) -> None:
        net, optimizer = self.learner.net.state_dict(), self.learner.optimizer.state_dict()
        rates = [rate.detach() for rate in self.learner.rates]
        if first():
            self.checkpoint.save({"state": self.state, "net": net, "optimizer": optimizer, "rates": rates})


# --- what the command does --------------------------------------------------------------------------------------------

SMOKE = Settings(
    "made",
    iterations=4,
    tasks=2,
    queries=2,
    filters=(4, 4, 8, 8),
    every=2,
    validation_episodes=3,
    test_episodes=4,
    test_queries=3,
)


def estimate(values: Tensor) -> tuple[float, float]:
    """Return the mean and half the width of its 95 % interval."""
    return values.mean().item(), 1.96 * values.std().item() / len(values) ** 0.5


def results(runs: dict[str, list[Run]], settings: Settings) -> dict[str, Any]:
    """What goes into the JSON file; all but `seconds` and `date` is the same when the run is repeated."""
    target = TARGETS[settings.dataset]
    found = {}
    for name, mine in runs.items():
        accuracies, intervals = zip(*(estimate(run.state["test"]) for run in mine), strict=True)
        found[name] = {
            "method": dataclasses.asdict(mine[0].learner.method),
            "seeds": [run.seed for run in mine],
            "accuracy": accuracies,
            "interval": intervals,
            "until": [until(run.state["curve"], target) for run in mine],
            "curves": [run.state["curve"] for run in mine],
            "seconds": {clock: [round(run.state[clock], 1) for run in mine] for clock in ("wall", "cpu")},
        }
        if name != "rhg" and "rhg" in runs:  # episode by episode: the test episodes are the same
            pairs = zip(mine, runs["rhg"], strict=True)
            found[name]["lead"] = [estimate(one.state["test"] - rhg.state["test"]) for one, rhg in pairs]
    return {"settings": dataclasses.asdict(settings), "target": target, "methods": found, **provenance()}


def compare(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    chosen = {name: getattr(args, name) for name in ("dataset", "ways", "shots", "iterations", "tasks")}
    if min(args.ways - 1, args.shots, args.iterations, args.tasks) < 1:
        parser.error("--ways must be at least 2; --shots, --iterations and --tasks at least 1")
    choice = Choice() if args.smoke else CHOSEN.get((args.dataset, args.ways), Choice())
    if args.alpha is not None:
        choice = choice._replace(alpha=args.alpha)
    settings = SMOKE if args.smoke else choice.settings(**chosen)
    methods = choice.methods()

    data = load(settings.dataset, args.data)
    runs = {
        name: [Run(name, methods[name], seed, data, settings, args) for seed in args.seeds] for name in args.methods
    }
    waiting = [run for mine in runs.values() for run in mine if run.state["test"] is None]
    done = sum(run.state["iteration"] for mine in runs.values() for run in mine)
    total = settings.iterations * len(args.seeds) * len(runs)
    with tqdm(total=total, initial=done, unit="it", disable=not first()) as bar:
        while waiting:
            run = min(waiting, key=lambda run: run.state["iteration"])  # the one that is furthest behind
            bar.set_description(run.learner.method.title)
            run.advance(bar)
            waiting = [run for run in waiting if run.state["test"] is None]

    if not first():
        return
    found = results(runs, settings)
    name = f"{settings.dataset}_{settings.ways}way_{settings.shots}shot"
    write_json(args.out / f"{name}.json", found)
    write_atomically(args.out / f"{name}.png", lambda file: figure(found).savefig(file, dpi=120))
    print(table(found))
    print(f"\n{args.out / name}.json and .png")


def main() -> None:
    parser = arguments(__doc__.splitlines()[0], "few_shot")
    default = Settings()
    parser.add_argument("--data", type=Path, default=Path("data"), help="folder that holds the data sets")
    parser.add_argument("--dataset", choices=[name for name in TARGETS if name != "made"], default=default.dataset)
    parser.add_argument("--ways", type=int, default=default.ways, help="classes per task")
    parser.add_argument("--shots", type=int, default=default.shots, help="support images per class")
    parser.add_argument(
        "--methods",
        nargs="+",
        choices=list(METHODS),
        default=[name for name, method in METHODS.items() if not method.control],
        metavar="METHOD",
        help="some of " + ", ".join(METHODS),
    )
    parser.add_argument("--iterations", type=int, default=default.iterations, help="upper iterations")
    parser.add_argument("--tasks", type=int, default=default.tasks, help="tasks per upper iteration")
    parser.add_argument("--alpha", type=float, metavar="C", help="alpha_k = C / k of BDA, if not the chosen one")
    with processes(parser) as args:
        compare(parser, args)


if __name__ == "__main__":
    main()
