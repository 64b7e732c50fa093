r"""How the rates of hyper_cleaning.py were chosen: by validation samples that the search itself does not see.

A fifth of the validation set is held out: 1400 of the 7000 samples on MNIST. The methods run on the rest, and the
setting whose y_K is most accurate on the held-out samples is taken; the test set plays no part. Each method has its
own choice, made in the same way: of the lower rate and Adam's on x, and for BDA, one pair after the other, of its
two constants too.

    python examples/hyper_cleaning_choice.py --data DIR --seeds 0

The seeds used here should not be among those of the final runs.
"""

from __future__ import annotations

import datetime
import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hyper_cleaning as example
import torch
from _run import Checkpoint, arguments, write_json
from hyper_cleaning import METHODS, Data, Method, Part
from tqdm import tqdm

RATES = [{"lower_lr": lower, "x_lr": x} for lower, x in itertools.product((2.0, 4.0), (1.0, 2.0))]
CONSTANTS = [{"c": c, "upper_lr": rate} for c, rate in itertools.product((10.0, 20.0, 40.0), (2.0, 4.0))]
START = {"lower_lr": 2.0, "x_lr": 2.0}  # not the rates of METHODS: those are what was chosen here
STAGES = {"RHG": [RATES], "T-RHG": [RATES], "BDA": [CONSTANTS, RATES], "RHG+val": [RATES]}


def hold_out(data: Data, part: float = 0.2) -> tuple[Data, Part]:
    """Take the last fifth of every class out of the validation set."""
    labels = data.val.labels
    held = torch.zeros_like(labels, dtype=torch.bool)
    for label in labels.unique():
        (these,) = torch.where(labels == label)
        held[these[round(len(these) * (1 - part)) :]] = True
    kept, out = (Part(data.val.images[which], labels[which]) for which in (~held, held))
    return data._replace(val=kept), out


def measure(method: Method, data: Data, held: Part, checkpoint: Checkpoint, args: Any, bar: Any) -> float:
    """Return the accuracy of y_K on the held-out samples after a whole run."""
    problem = example.Problem(data, method, args.steps, recorded=args.steps)
    state = example.solve(problem, checkpoint, args.iterations, 1, bar.update)
    with torch.no_grad():
        return example.accuracy(problem.rollout(state["x"]), held)


def choose(name: str, splits: Sequence[tuple[int, Data, Part]], args: Any, bar: Any) -> tuple[Method, list[Any]]:
    """Run all candidates, stage by stage, and return the best with the whole list."""
    best, scores, tried = METHODS[name]._replace(**START), {}, []
    for stage in STAGES[name]:
        for method in [best._replace(**change) for change in stage]:
            if method in scores:
                continue
            found = []
            for seed, data, held in splits:
                label = "-".join(str(value) for value in method)
                what = {**method._asdict(), "steps": args.steps, "iterations": args.iterations, "seed": seed}
                checkpoint = Checkpoint(args.out / "tried" / f"{name}-{label}-{seed}.pt", what, resume=args.resume)
                found.append(measure(method, data, held, checkpoint, args, bar))
            scores[method] = statistics.mean(found)
            tried.append({**method._asdict(), "held_out": found})
            bar.write(f"{name} {method}: {scores[method]:.2f}")
        best = max(scores, key=scores.__getitem__)
    return best, tried


def table(results: dict[str, Any]) -> str:
    """Return all that was tried, in Markdown; what was taken is bold."""
    lines = ["| method | lower rate | rate of x | c of alpha_k | upper rate | accuracy on held-out samples, % |"]
    lines.append("|---|---:|---:|---:|---:|---:|")
    for name in [name for name in STAGES if name in results["methods"]]:
        found = results["methods"][name]
        for row in found["tried"]:
            score = f"{statistics.mean(row['held_out']):.2f}"
            taken = all(row[key] == found["chosen"][key] for key in ("lower_lr", "x_lr", "c", "upper_lr"))
            constants = (f"{row['c']:g}", f"{row['upper_lr']:g}") if row["c"] else ("-", "-")
            cells = (name, f"{row['lower_lr']:g}", f"{row['x_lr']:g}", *constants, f"**{score}**" if taken else score)
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = arguments(__doc__.splitlines()[0], "hyper_cleaning_choice")
    parser.add_argument("--data", type=Path, metavar="DIR", help="folder with MNIST/; without it: digits")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), help="which ones to choose for")
    parser.add_argument("--steps", type=int, default=200, metavar="K", help="lower steps")
    parser.add_argument("--iterations", type=int, default=example.ITERATIONS, help="upper iterations")
    if parser.parse_known_args()[0].smoke:
        parser.set_defaults(steps=2, iterations=1)
    args = parser.parse_args()
    if min(args.steps, args.iterations) < 1:
        parser.error("--steps and --iterations must be at least 1")
    dataset = "mnist" if args.data else "digits"
    whole = example.load(dataset, args.data)
    splits = []
    for seed in args.seeds:
        splits.append((seed, *hold_out(example.split(whole, example.PER_CLASS[dataset], seed, args.device))))
    total = sum(len(stage) for name in args.methods for stage in STAGES[name]) * len(splits) * args.iterations
    found = {}
    with tqdm(total=total, unit="iteration", disable=None) as bar:
        for name in args.methods:
            best, tried = choose(name, splits, args, bar)
            found[name] = {"chosen": best._asdict(), "tried": tried}
    settings = {"dataset": dataset, "steps": args.steps, "iterations": args.iterations, "seeds": args.seeds}
    results = {"settings": settings, "date": datetime.date.today().isoformat(), "methods": found}
    write_json(args.out / f"{dataset}.json", results)
    print(f"\n{table(results)}\n\nWritten: {args.out / dataset}.json")


if __name__ == "__main__":
    main()
