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
does not say what it does at this point; anything else would read the answers. This is also why alpha has to be small:
a backbone that is trained for heads which know the query labels may unlearn to do without them (examples/README.md).

The protocol is MAML's, as in the paper. Omniglot's characters are divided at random, and turned by 90, 180 and 270
degrees they count as further classes. Batch normalisation uses the statistics of the set at hand, support or query, of
one task: there are no running statistics, and the images of a query set are classified together.

    python examples/few_shot.py --data DATA                                       # Omniglot, 5-way 1-shot
    python examples/few_shot.py --data DATA --dataset cifar_fs --methods bda rhg t-rhg
    python examples/few_shot.py --smoke                                           # seconds, on made images
    torchrun --nproc-per-node 2 examples/few_shot.py --data DATA --distributed    # tasks divided among processes
    accelerate launch --multi_gpu --num_processes 2 examples/few_shot.py --data DATA --distributed

All methods get the same episodes, the same initial backbone and the same number of upper iterations; they take turns,
so that a run which is stopped has brought all of them equally far. Each has a checkpoint of its own: --resume goes on,
also with further methods.

Reference: Liu, Mu, Yuan, Zeng, Zhang, "A Generic First-Order Algorithmic Framework for Bi-Level Programming Beyond
Lower-Level Singleton", ICML 2020: the experiments on meta learning.
"""

from __future__ import annotations

import dataclasses
import datetime
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import _data
import matplotlib
import torch
import torch.nn.functional as F
from _ranks import first, joined, processes
from _run import Checkpoint, arguments, write_atomically, write_json
from matplotlib.figure import Figure
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
    iterations: int = 1200  # upper ones
    tasks: int = 4  # per upper iteration: B
    queries: int = 5  # per class, in training and validation
    filters: int = 32  # of each convolution
    upper_lr: float = 3e-3  # Adam's, falling to 0 along a cosine
    every: int = 100  # upper iterations between validations
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


METHODS = {
    "maml": Method("MAML", whole=True, lr=0.4, steps=1, test_steps=3),
    "meta-sgd": Method("Meta-SGD", whole=True, lr=0.4, steps=1, test_steps=1, learned_rates=True),
    "reptile": Method("Reptile", whole=True, lr=0.1, steps=5, test_steps=5, reptile=True),
    "rhg": Method("RHG", whole=False, lr=0.4, steps=5, test_steps=20),
    "t-rhg": Method("T-RHG", whole=False, lr=0.4, steps=5, test_steps=20, last=2),
    "bda": Method("BDA", whole=False, lr=0.4, steps=5, test_steps=20, alpha=0.05, decay=True),
}

REPTILE_IMAGES = 1  # of each class, per lower step

TARGETS = {"omniglot": 0.9, "cifar_fs": 0.44, "mini_imagenet": 0.44, "made": 0.5}  # accuracies of the paper's Table 4

# --- tasks ------------------------------------------------------------------------------------------------------------


class Tasks(NamedTuple):
    """B tasks; every tensor has B in front. Slices are tasks again, so that they can be divided among processes."""

    support: Tensor
    support_labels: Tensor
    query: Tensor
    query_labels: Tensor

    @property
    def count(self) -> int:
        return self.support.shape[0]

    def part(self, start: int, stop: int) -> Tasks:
        return Tasks(*(tensor[start:stop] for tensor in self))


def draw(images: Tensor, count: int, settings: Settings, queries: int, seed: int, *, rotate: bool) -> Tasks:
    """Draw tasks from images (classes, images per class, channels, height, width); the same seed, the same tasks."""
    generator = torch.Generator().manual_seed(seed)
    turns = 4 if rotate else 1
    each, found = settings.shots + queries, []
    for _ in range(count):
        classes = torch.randperm(images.shape[0] * turns, generator=generator)[: settings.ways]
        for chosen in classes.tolist():  # a character turned by 90, 180 or 270 degrees is another one
            these = torch.randperm(images.shape[1], generator=generator)[:each]
            found.append(images[chosen // turns, these].rot90(chosen % turns, (-2, -1)))
    stacked = torch.stack(found).unflatten(0, (count, settings.ways)).float() / 255
    support, query = stacked[:, :, : settings.shots], stacked[:, :, settings.shots :]
    labels = (torch.arange(settings.ways).repeat_interleave(n).repeat(count, 1) for n in (settings.shots, queries))
    return Tasks(support.flatten(1, 2), next(labels), query.flatten(1, 2), next(labels))


def made(classes: int = 24) -> dict[str, Tensor]:
    """Images for --smoke: a pattern per class, and noise."""
    generator = torch.Generator().manual_seed(0)
    patterns = torch.rand(classes, 1, 1, 7, 7, generator=generator).repeat_interleave(4, -1).repeat_interleave(4, -2)
    images = 0.7 * patterns + 0.3 * torch.rand(classes, 20, 1, 28, 28, generator=generator)
    parts = (images * 255).to(torch.uint8).split(classes // 3)
    return dict(zip(("train", "val", "test"), parts, strict=True))


OMNIGLOT = {"train": 1100, "val": 100, "test": 423}  # characters, as in MAML


def load(dataset: str, root: Path) -> dict[str, Tensor]:
    """Read the images; Omniglot's characters are divided at random, as in MAML, and not by alphabets."""
    if dataset == "made":
        return made()
    found = getattr(_data, dataset)(root)
    if dataset != "omniglot":
        return found
    characters = torch.cat(list(found.values())).unsqueeze(2)
    order = torch.randperm(len(characters), generator=torch.Generator().manual_seed(0))
    parts = characters[order].split(list(OMNIGLOT.values()))
    return dict(zip(OMNIGLOT, parts, strict=True))


# --- the network ------------------------------------------------------------------------------------------------------


class Conv4(nn.Module):
    """Four blocks of convolution, halving, batch normalisation and ReLU, and a linear head that starts from zero.

    The first block halves by stride 2, the others by max-pooling. Pooling alone costs a third more; stride 2 alone, as
    in MAML, learns far more slowly. Halving before the normalisation leaves it a quarter of the work.
    """

    def __init__(self, shape: Sequence[int], filters: int, ways: int) -> None:
        super().__init__()
        blocks: list[nn.Module] = []
        for channels, stride in ((shape[0], 2), (filters, 1), (filters, 1), (filters, 1)):
            blocks.append(nn.Conv2d(channels, filters, 3, stride=stride, padding=1))
            blocks += [] if stride == 2 else [nn.MaxPool2d(2)]
            blocks += [nn.BatchNorm2d(filters, track_running_stats=False), nn.ReLU()]
        self.backbone = nn.Sequential(*blocks, nn.Flatten())
        self.head = nn.Linear(filters * (shape[1] // 16) * (shape[2] // 16), ways)
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
        batch = tasks._replace(support=self.features(tasks.support), query=self.features(tasks.query))
        fmodel = self.inner.unroll(
            self.lower_module,
            lower,
            upper,
            steps=method.steps,
            batches=[batch] * method.steps,
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

    def __init__(self, name: str, seed: int, data: dict[str, Tensor], settings: Settings, args: Any) -> None:
        self.data, self.settings, self.seed, self.device = data, settings, seed, args.device
        torch.manual_seed(seed)
        net = Conv4(data["train"].shape[2:], settings.filters, settings.ways)
        net.to(args.device, memory_format=torch.channels_last)  # on a CPU twice as fast
        self.learner = Learner(METHODS[name], net, settings)
        what = {**dataclasses.asdict(settings), **dataclasses.asdict(METHODS[name]), "method": name, "seed": seed}
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

    def advance(self, bar: Any) -> None:
        """Go on to the next validation, and save; after the last one, test."""
        state, settings = self.state, self.settings
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
        if state["iteration"] == settings.iterations:
            _, accuracies = self.evaluate(TEST, settings.test_episodes)
            state["test"] = [accuracies.mean().item(), 1.96 * accuracies.std().item() / len(accuracies) ** 0.5]
        net, optimizer = self.learner.net.state_dict(), self.learner.optimizer.state_dict()
        rates = [rate.detach() for rate in self.learner.rates]
        if first():
            self.checkpoint.save({"state": state, "net": net, "optimizer": optimizer, "rates": rates})


# --- results ----------------------------------------------------------------------------------------------------------

PAPER = {  # test accuracies in percent: its Tables 3 and 4
    ("omniglot", 5, 1): (98.70, 97.97, 97.68, 98.60, 98.74, 99.04),
    ("omniglot", 5, 5): (99.91, 98.96, 99.48, 99.50, 99.52, 99.62),
    ("omniglot", 20, 1): (95.80, 93.98, 89.43, 95.50, 95.82, 96.50),
    ("omniglot", 20, 5): (98.90, 98.40, 97.12, 98.40, 98.95, 99.10),
    ("mini_imagenet", 5, 1): (None, None, None, 48.89, 47.67, 49.08),
}


def until(curve: Sequence[Sequence[float]], accuracy: float) -> float | None:
    """Return the upper iteration at which the validation accuracy is first reached."""
    return next((iteration for iteration, _, found in curve if found >= accuracy), None)


def results(runs: dict[str, list[Run]], settings: Settings) -> dict[str, Any]:
    """What goes into the JSON file; all but `seconds` and `date` is the same when the run is repeated."""
    target = TARGETS[settings.dataset]
    found = {}
    for name, mine in runs.items():
        found[name] = {
            "method": dataclasses.asdict(METHODS[name]),
            "seeds": [run.seed for run in mine],
            "accuracy": [run.state["test"][0] for run in mine],
            "interval": [run.state["test"][1] for run in mine],
            "until": [until(run.state["curve"], target) for run in mine],
            "curves": [run.state["curve"] for run in mine],
            "seconds": {clock: [round(run.state[clock], 1) for run in mine] for clock in ("wall", "cpu")},
        }
    versions = {"torch": torch.__version__, "threads": torch.get_num_threads()}
    date = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    return {"settings": dataclasses.asdict(settings), "target": target, "methods": found, "date": date, **versions}


def mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if len(known) == len(values) else None


def table(found: dict[str, Any]) -> str:
    """As in examples/README.md."""
    settings = found["settings"]
    paper = PAPER.get((settings["dataset"], settings["ways"], settings["shots"]), (None,) * len(METHODS))
    heads = ("method", "accuracy, %", "paper, %", f"upper iterations until {found['target']:.0%}", "CPU s")
    lines = ["| " + " | ".join(heads) + " |", "|---" + "|---:" * (len(heads) - 1) + "|"]
    for (name, method), published in zip(METHODS.items(), paper, strict=True):
        if name in found["methods"]:
            mine = found["methods"][name]
            interval = math.sqrt(sum(i * i for i in mine["interval"])) / len(mine["interval"])
            until = mean(mine["until"])
            cells = (
                method.title,
                f"{100 * mean(mine['accuracy']):.2f} ± {100 * interval:.2f}",
                "" if published is None else f"{published:.2f}",
                "not reached" if until is None else f"{until:.0f}",
                f"{mean(mine['seconds']['cpu']):.0f}",
            )
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


COLORS = ("#56B4E9", "#009E73", "#CC79A7", "#0072B2", "#E69F00", "#D55E00")  # told apart with any colour vision
STYLE = {
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
}


def figure(found: dict[str, Any]) -> Figure:
    """Validation loss and accuracy against the upper iteration (the paper's Figure 4), and the test accuracy."""
    settings = found["settings"]
    with matplotlib.rc_context(STYLE):
        fig = Figure(figsize=(14, 4.8), layout="constrained")
        left, middle, right = fig.subplots(1, 3)
        names = [name for name in METHODS if name in found["methods"]]
        for place, name in enumerate(names):
            mine, color = found["methods"][name], COLORS[list(METHODS).index(name)]
            curve = torch.tensor(mine["curves"]).mean(0)
            style = {"color": color, "label": METHODS[name].title, "linewidth": 2.4 if name == "bda" else 1.5}
            style["linestyle"] = "dashed" if METHODS[name].whole else "solid"
            left.plot(curve[:, 0], curve[:, 1], **style)
            middle.plot(curve[:, 0], 100 * curve[:, 2], **style)
            accuracy, interval = 100 * mean(mine["accuracy"]), 100 * mean(mine["interval"])
            right.errorbar(accuracy, place, xerr=interval, color=color, fmt="o", capsize=4)
        middle.axhline(100 * found["target"], color="#999999", linewidth=1)
        right.set(yticks=range(len(names)), yticklabels=[METHODS[name].title for name in names], ylim=(len(names), -1))
        right.locator_params(axis="x", nbins=5)
        left.set(xlabel="upper iteration", title="validation loss")
        middle.set(xlabel="upper iteration", title="validation accuracy, %")
        right.set(xlabel="%", title=f"test accuracy, {settings['test_episodes']} episodes, 95 % intervals")
        fig.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=6, frameon=False)
        fig.suptitle(f"{settings['dataset']}, {settings['ways']}-way {settings['shots']}-shot")
    return fig


# --- what the command does --------------------------------------------------------------------------------------------

SMOKE = Settings(
    "made", iterations=4, tasks=2, queries=2, filters=8, every=2, validation_episodes=3, test_episodes=4, test_queries=3
)


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
        default=list(METHODS),
        metavar="METHOD",
        help="some of " + ", ".join(METHODS),
    )
    parser.add_argument("--iterations", type=int, default=default.iterations, help="upper iterations")
    parser.add_argument("--tasks", type=int, default=default.tasks, help="tasks per upper iteration")
    args = processes(parser)
    chosen = {name: getattr(args, name) for name in ("dataset", "ways", "shots", "iterations", "tasks")}
    if min(args.ways - 1, args.shots, args.iterations, args.tasks) < 1:
        parser.error("--ways must be at least 2; --shots, --iterations and --tasks at least 1")
    settings = SMOKE if args.smoke else dataclasses.replace(default, **chosen)

    data = load(settings.dataset, args.data)
    runs = {name: [Run(name, seed, data, settings, args) for seed in args.seeds] for name in args.methods}
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


if __name__ == "__main__":
    main()
