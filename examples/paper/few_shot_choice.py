r"""How the network and the rates of few_shot.py were chosen: by validation episodes, on a seed of their own.

A validation episode has classes that training does not see; the test classes play no part. One stage after the other
runs all its candidates, and hands the one with the highest validation accuracy on:

| stage | method  | candidates                                                               |
|-------|---------|--------------------------------------------------------------------------|
| 1     | RHG     | networks x rates of the head, which are those of T-RHG and BDA too       |
| 2     | RHG     | Adam's rate on x, which is that of all methods                           |
| 3     | BDA     | c of alpha_k = c / k                                                     |
| 4     | MAML    | the rate of its lower step, from which Meta-SGD's rates start            |
| 5     | Reptile | the rate of its lower steps                                              |

    python examples/paper/few_shot_choice.py --data DATA --seeds 100
    python examples/paper/few_shot_choice.py --data DATA --seeds 100 --ways 20 --iterations 1000
    python examples/paper/few_shot_choice.py --data DATA --seeds 100 --dataset cifar_fs --methods rhg bda \
        --iterations 3000 --network-iterations 500

The seeds used here should not be among those of the final runs. The number of upper iterations should be theirs: a c
that is best after a quarter of them need not be best in the end.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import few_shot as example
from _few_shot_report import TARGETS
from _run import arguments, provenance, write_json
from few_shot import Choice, Method, Settings
from torch import Tensor
from tqdm import tqdm

NETWORKS: dict[str, list[tuple[int, ...]]] = {
    "omniglot": [(16, 32, 64, 128)],
    "cifar_fs": [(16, 32, 64, 128), (32, 32, 32, 32), (64, 64, 64, 64), (32, 64, 128, 256)],
    "mini_imagenet": [(16, 32, 64, 128), (32, 32, 32, 32)],
    "made": [(4, 4, 8, 8)],
}
RATES = {  # the candidates, unless the command has others
    "head_lr": (0.03, 0.1, 0.4),
    "upper_lr": (1e-3, 3e-3, 1e-2),
    "alpha": (0.05, 0.2, 0.5, 1.0),
    "maml_lr": (0.1, 0.4, 1.0),
    "reptile_lr": (0.03, 0.1, 0.3),
}


def stages(dataset: str, rates: Mapping[str, Sequence[float]]) -> list[tuple[str, list[dict[str, Any]]]]:
    """Return the method of each stage, and what its candidates change."""
    heads = itertools.product(NETWORKS[dataset], rates["head_lr"])
    first = ("rhg", [{"filters": filters, "head_lr": lr} for filters, lr in heads])
    others = {"upper_lr": "rhg", "alpha": "bda", "maml_lr": "maml", "reptile_lr": "reptile"}
    return [first, *((name, [{key: value} for value in rates[key]]) for key, name in others.items())]


class Search:
    """Validation accuracies of candidates; a run that was met before is not repeated."""

    def __init__(self, data: Mapping[str, Tensor], args: argparse.Namespace, bar: Any) -> None:
        self.data, self.args, self.bar = data, args, bar
        self.known: dict[tuple[Method, Settings, int], float] = {}

    def accuracy(self, name: str, choice: Choice, iterations: int, seed: int) -> float:
        args, method = self.args, choice.methods()[name]
        sizes = {"dataset": args.dataset, "ways": args.ways, "shots": args.shots}
        budget = {"iterations": iterations, "every": iterations, "validation_episodes": args.episodes}
        settings = choice.settings(**sizes, **budget)
        key = method, settings, seed
        if key not in self.known:
            self.known[key] = self.run(name, *key)
        return self.known[key]

    def run(self, name: str, method: Method, settings: Settings, seed: int) -> float:
        rates = settings.filters, settings.upper_lr, method.lr, method.alpha, settings.iterations
        folder = self.args.out / "tried" / "-".join(str(value).replace(" ", "") for value in rates)
        beside = argparse.Namespace(**{**vars(self.args), "out": folder})
        run = example.Run(name, method, seed, self.data, settings, beside)
        if run.state["iteration"] < settings.iterations:
            run.train(self.bar)
            run.save()
        return run.state["curve"][-1][2]

    def choose(
        self, name: str, base: Choice, changes: Sequence[dict[str, Any]], iterations: int
    ) -> tuple[Choice, list[dict[str, Any]]]:
        """Return the best candidate and the whole list."""
        candidates = [base._replace(**change) for change in changes]
        scores = [[self.accuracy(name, choice, iterations, seed) for seed in self.args.seeds] for choice in candidates]
        means = [statistics.mean(found) for found in scores]
        tried = [
            {"method": name, "change": change, "iterations": iterations, "validation": found}
            for change, found in zip(changes, scores, strict=True)
        ]
        for row, mean in zip(tried, means, strict=True):
            self.bar.write(f"{name} {row['change']}: {100 * mean:.2f}")
        return candidates[means.index(max(means))], tried


NAMES = {
    "filters": "filters",
    "head_lr": "rate of the head",
    "upper_lr": "rate of x",
    "alpha": "c of alpha_k",
    "maml_lr": "rate of MAML",
    "reptile_lr": "rate of Reptile",
}


def shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else ", ".join(map(str, value))  # a tuple, or a list from JSON


def table(results: dict[str, Any]) -> str:
    """Return all that was tried, in Markdown; what was taken is bold."""
    heads = "| stage | method | candidate | upper iterations | validation accuracy, % |"
    lines = [heads, "|---:|---|---|---:|---:|"]
    for number, stage in enumerate(results["stages"], 1):
        for row in stage:
            score = f"{100 * statistics.mean(row['validation']):.2f}"
            if all(shown(results["chosen"][key]) == shown(value) for key, value in row["change"].items()):
                score = f"**{score}**"
            what = "; ".join(f"{NAMES[key]} {shown(value)}" for key, value in row["change"].items())
            cells = number, example.METHODS[row["method"]].title, what, row["iterations"], score
            lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = arguments(__doc__.splitlines()[0], "few_shot_choice")
    parser.add_argument("--data", type=Path, default=Path("data"), help="folder that holds the data sets")
    parser.add_argument("--dataset", choices=[name for name in TARGETS if name != "made"], default="omniglot")
    parser.add_argument("--ways", type=int, default=5, help="classes per task")
    parser.add_argument("--shots", type=int, default=1, help="support images per class")
    default = Settings.iterations
    parser.add_argument("--iterations", type=int, default=default, help="upper iterations of a candidate")
    parser.add_argument("--network-iterations", type=int, help="those of stage 1, if they are fewer", metavar="NUMBER")
    parser.add_argument("--episodes", type=int, default=300, help="validation episodes")
    searched = ["rhg", "bda", "maml", "reptile"]
    parser.add_argument("--methods", nargs="+", choices=searched, default=searched, help="whose rates to choose")
    for key, values in RATES.items():
        option = f"--{key.replace('_', '-')}s"
        parser.add_argument(option, type=float, nargs="+", default=values, help=f"candidates: {NAMES[key]}")
    args = parser.parse_args()
    if args.smoke:
        args.dataset, args.iterations, args.episodes = "made", 2, 2
    first = args.iterations if args.network_iterations is None else args.network_iterations
    if min(args.ways - 1, args.shots, args.iterations, first, args.episodes) < 1:
        parser.error("--ways must be at least 2; --shots, --episodes and the numbers of iterations at least 1")
    data = example.load(args.dataset, args.data)
    rates = {key: getattr(args, f"{key}s") for key in RATES}
    wanted = [stage for stage in stages(args.dataset, rates) if stage[0] in args.methods]
    choice, found = Choice(), []
    with tqdm(unit="it", disable=None) as bar:
        search = Search(data, args, bar)
        for name, changes in wanted:
            iterations = first if "filters" in changes[0] else args.iterations
            choice, tried = search.choose(name, choice, changes, iterations)
            found.append(tried)
    settings = {key: getattr(args, key) for key in ("dataset", "ways", "shots", "episodes", "seeds")}
    results = {"settings": settings, **provenance(), "chosen": choice._asdict(), "stages": found}
    name = f"{args.dataset}_{args.ways}way_{args.shots}shot.json"
    write_json(args.out / name, results)
    print(f"\n{table(results)}\n\nWritten: {args.out / name}")


if __name__ == "__main__":
    main()
