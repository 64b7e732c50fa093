r"""How the rates of hyper_cleaning.py were chosen: by validation samples that the search itself does not see.

A fifth of the validation set is held out: 1400 of the 7000 samples on MNIST. The methods run on the rest, as long as
in the final runs, and the setting whose y_K is most accurate on the held-out samples is taken; the test set plays no
part. The lower rate and Adam's on x are chosen for RHG, and are those of all methods. Then BDA's two constants are.

    python examples/paper/hyper_cleaning_choice.py --data DIR --seeds 0

The seeds used here should not be among those of the final runs.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hyper_cleaning as example
import torch
from _run import Checkpoint, arguments, provenance, write_json
from hyper_cleaning import Data, Method, Part
from tqdm import tqdm

# 1/L_f is 3.7 at the start, where all weights are 1/2 and L_f is 0.5 * 0.1 * 5.4: the rates stay below it.
RATES = [{"lower_lr": lower, "x_lr": x} for lower, x in itertools.product((1.0, 2.0), (0.5, 1.0, 2.0))]
CONSTANTS = [{"c": c, "upper_lr": rate} for c, rate in itertools.product((0.5, 1.0, 2.0, 5.0, 10.0), (1.0, 2.0))]
STAGES = {"RHG": RATES, "BDA": CONSTANTS}


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


def choose(name: str, base: Method, splits: Sequence[tuple[int, Data, Part]], args: Any, bar: Any) -> dict[str, Any]:
    """Run all candidates of a method and return the best with the whole list."""
    tried = []
    for method in [base._replace(**change) for change in STAGES[name]]:
        found = []
        for seed, data, held in splits:
            label = "-".join(str(value) for value in method)
            what = {**method._asdict(), "steps": args.steps, "iterations": args.iterations, "seed": seed}
            checkpoint = Checkpoint(args.out / "tried" / f"{name}-{label}-{seed}.pt", what, resume=args.resume)
            found.append(measure(method, data, held, checkpoint, args, bar))
        tried.append({**method._asdict(), "held_out": found})
        bar.write(f"{name} {method}: {statistics.mean(found):.2f}")
    best = max(tried, key=lambda row: statistics.mean(row["held_out"]))
    return {"chosen": {key: best[key] for key in Method._fields}, "tried": tried}


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
    parser.add_argument("--steps", type=int, default=100, metavar="K", help="lower steps")
    parser.add_argument("--iterations", type=int, default=example.ITERATIONS, help="upper iterations, at most")
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
    total = sum(len(stage) for stage in STAGES.values()) * len(splits) * args.iterations
    found: dict[str, Any] = {}
    base = Method()
    with tqdm(total=total, unit="iteration", disable=None) as bar:
        for name in STAGES:
            found[name] = choose(name, base, splits, args, bar)
            base = Method(**{key: found[name]["chosen"][key] for key in ("lower_lr", "x_lr")})
    settings = {"dataset": dataset, "steps": args.steps, "iterations": args.iterations, "seeds": args.seeds}
    results = {"settings": settings, **provenance(), "methods": found}
    write_json(args.out / f"{dataset}.json", results)
    print(f"\n{table(results)}\n\nWritten: {args.out / dataset}.json")


if __name__ == "__main__":
    main()
