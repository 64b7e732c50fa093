r"""Tune the 19 settings of a training loop by hypergradients, beside Optuna's TPE and random search.

The training loop is that of hyperopt_plain.py: 100 steps of SGD. Its settings are a rate, a momentum and a weight decay
for each of the six parameter tensors, and the label smoothing. They become tensors, and the loop a rollout:

    x: the settings;  y: the weights;  F: the loss on the validation set;  f: that of the training batches
    y_K = 100 steps of SGD on f from the given initial weights;  x goes down dF(y_K)/dx, by Adam

alpha is 0: the trained weights are what training alone gives, and the validation labels choose the settings only. The
adjoint is `Checkpointed`, so the memory does not grow with the number of steps.

All methods search the same box, have the same CPU time, and tune one training run: the initial weights and the order
of the batches are those of the seed. What they find is judged on three other runs, with other weights and orders.

    python examples/hyperopt.py --data DIR --seeds 1 2 3        (needs Optuna for TPE; without it TPE is left out)
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import hyperopt_plain
import torch
import torch.nn.functional as F
from _hyperopt_report import figure, table
from _run import Checkpoint, arguments, provenance, wait_while_paused, write_atomically, write_json
from hyperopt_plain import STEPS, Part, Settings, accuracy, batches, load, network
from torch import Tensor, nn

import bda_optim as bda

# --- settings ---------------------------------------------------------------------------------------------------------

BOX = {  # low, high, and whether the scale is logarithmic
    "lr": (1e-3, 1.0, True),
    "momentum": (0.0, 0.98, False),
    "weight_decay": (1e-6, 1e-1, True),
    "label_smoothing": (0.0, 0.3, False),
}
TENSORS = 6  # of the network
SIZE = 3 * TENSORS + 1
SECONDS = 60.0  # of CPU time, for each method
OUTER_LR = 0.2  # of Adam, at first
WORSE = 1.1  # times the best loss: Adam goes on from a point up to there,
PATIENCE = 5  # for so many points without a better one
METHODS = ("hypergradient", "TPE", "random")
DIVERGED = 1e3  # the loss that TPE is told of a run that is not finite
JUDGES = (100, 101, 102)  # seeds of the runs that judge

# --- the training loop as a rollout -----------------------------------------------------------------------------------


def lower(net: nn.Module, smoothing: Tensor, batch: Part) -> Tensor:
    """Return the cross-entropy with label smoothing, as torch's, but differentiable in the smoothing."""
    scores = F.log_softmax(net(batch.images), dim=1)
    return (1 - smoothing) * F.nll_loss(scores, batch.labels) - smoothing * scores.mean()


def train(model: nn.Module, data: list[Part], settings: Settings) -> nn.Module:
    """Take a step on every batch, and return the trained model, differentiable in the settings."""
    lr, momentum, weight_decay, smoothing = settings
    groups = [
        {"params": [p], "lr": lr[i], "momentum": momentum[i], "weight_decay": weight_decay[i]}
        for i, p in enumerate(model.parameters())
    ]
    optimizer = bda.BDAInnerOptimizer(groups)
    return optimizer.unroll(
        model, lower, hyper=smoothing, steps=len(data), batches=data, adjoint=bda.Checkpointed(), on_divergence="ignore"
    )


def settings_of(point: Tensor) -> Settings:
    """Return the settings at a point of the unit cube of 19 dimensions."""

    def inside(name: str, part: Tensor) -> Tensor:
        low, high, logarithmic = BOX[name]
        return low * (high / low) ** part if logarithmic else low + (high - low) * part

    lr, momentum, decay, smoothing = point.split([TENSORS, TENSORS, TENSORS, 1])
    lists = [list(inside(name, part)) for name, part in (("lr", lr), ("momentum", momentum), ("weight_decay", decay))]
    return Settings(*lists, inside("label_smoothing", smoothing)[0])


def validation_loss(model: nn.Module, data: dict[str, Part]) -> Tensor:
    return F.cross_entropy(model(data["val"].images), data["val"].labels)


# --- the three searches -----------------------------------------------------------------------------------------------


class Task(NamedTuple):
    """The training run that is tuned."""

    data: dict[str, Part]
    seed: int
    steps: int

    def differentiable(self, point: Tensor) -> Tensor:
        """Return the validation loss after training with the settings at a point, differentiable in the point."""
        wait_while_paused()
        model = train(network(self.seed), batches(self.data["train"], self.seed, self.steps), settings_of(point))
        return validation_loss(model, self.data)

    def plain(self, point: Tensor) -> tuple[float, nn.Module]:
        """Return the same as a number, by the plain loop, which takes less time, and the trained model."""
        wait_while_paused()
        lr, momentum, decay, smoothing = settings_of(point)
        numbers = Settings(*([value.item() for value in values] for values in (lr, momentum, decay)), smoothing.item())
        run = batches(self.data["train"], self.seed, self.steps)
        model = hyperopt_plain.train(network(self.seed), run, numbers)
        with torch.no_grad():
            return validation_loss(model, self.data).item(), model


def hypergradient(task: Task) -> Iterator[tuple[Tensor, float]]:
    """Yield points and their losses: Adam, from the middle of the cube.

    A rate that is a little too large ends the training at a loss of ln 10, where the hypergradient says nothing. So
    after a point that is much worse than the best one, or after five that are not better, the search goes back to the
    best, with half of Adam's rate.
    """
    free = torch.zeros(SIZE, requires_grad=True)
    best, best_loss, lr, stale = free.detach().clone(), math.inf, OUTER_LR, 0
    optimizer = torch.optim.Adam([free], lr=lr)
    while True:
        point = torch.sigmoid(free)
        loss = task.differentiable(point)
        yield point.detach(), loss.item()
        stale += 1
        if loss.item() < best_loss:  # not where it is nan
            best, best_loss, stale = free.detach().clone(), loss.item(), 0
        if loss.item() < WORSE * best_loss and stale < PATIENCE:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        else:
            lr, stale = lr / 2, 0
            free.data.copy_(best)
            optimizer = torch.optim.Adam([free], lr=lr)


def random(task: Task) -> Iterator[tuple[Tensor, float]]:
    """Yield points and their losses: the middle of the cube, then uniformly drawn ones."""
    draw = torch.Generator().manual_seed(task.seed)
    point = torch.full((SIZE,), 0.5)
    while True:
        yield point, task.plain(point)[0]
        point = torch.rand(SIZE, generator=draw)


def tpe(task: Task) -> Iterator[tuple[Tensor, float]]:
    """Yield points and their losses: the middle of the cube, then what Optuna's TPE asks for."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    names = [str(number) for number in range(SIZE)]
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=task.seed))
    study.enqueue_trial(dict.fromkeys(names, 0.5))
    while True:
        trial = study.ask()
        point = torch.tensor([trial.suggest_float(name, 0.0, 1.0) for name in names])
        loss = task.plain(point)[0]
        study.tell(trial, loss if math.isfinite(loss) else DIVERGED)
        yield point, loss


SEARCHES = {"hypergradient": hypergradient, "TPE": tpe, "random": random}

# --- one run ----------------------------------------------------------------------------------------------------------


def tune(method: str, task: Task, seconds: float) -> dict[str, Any]:
    """Search until the CPU time is over; return the best point, and the best loss against the time."""
    best, curve = math.inf, []
    chosen = torch.full((SIZE,), 0.5)
    begin = time.process_time()
    for point, loss in SEARCHES[method](task):
        if loss < best:  # not where it is nan: the run diverged
            best, chosen = loss, point
        curve.append([round(time.process_time() - begin, 3), best])
        if curve[-1][0] > seconds:
            break
    return {"point": chosen.tolist(), "best": best, "curve": thinned(curve), "evaluations": len(curve)}


def thinned(curve: list[list[float]]) -> list[list[float]]:
    """Return the points where the best loss changes, the first and the last."""
    ends = (0, len(curve) - 1)
    return [row for i, row in enumerate(curve) if i in ends or row[1] != curve[i - 1][1]]


def judge(point: list[float], data: dict[str, Part], steps: int) -> dict[str, Any]:
    """Train three times with other initial weights and batches; return the losses and test accuracies."""
    found = [Task(data, seed, steps).plain(torch.tensor(point)) for seed in JUDGES]
    return {
        "fresh_loss": statistics.mean(loss for loss, _ in found),
        "test": [round(accuracy(model, data["test"]), 3) for _, model in found],
    }


def parse() -> argparse.Namespace:
    parser = arguments("Hypergradients, Optuna's TPE and random search on the settings of a training loop.", "hyperopt")
    parser.add_argument("--data", type=Path, metavar="DIR", help="folder with FashionMNIST/; without it: digits")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), help="which ones to run")
    parser.add_argument("--steps", type=int, default=STEPS, metavar="K", help="steps of training")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="CPU time of each method and seed")
    if parser.parse_known_args()[0].smoke:
        parser.set_defaults(steps=5, seconds=1.0)
    args = parser.parse_args()
    if "TPE" in args.methods and importlib.util.find_spec("optuna") is None:
        print("TPE is left out: Optuna is not installed (pip install optuna).")
        args.methods.remove("TPE")
    return args


def main() -> None:
    args = parse()
    data = load(args.data)
    middle = [0.5] * SIZE
    runs = []
    for seed in args.seeds:
        for method in args.methods:
            settings = {"method": method, "seed": seed, "steps": args.steps, "seconds": args.seconds}
            checkpoint = Checkpoint(args.out / "runs" / f"{method}-{seed}.pt", settings, resume=args.resume)
            state = checkpoint.load()
            if state is None:
                state = tune(method, Task(data, seed, args.steps), args.seconds)
                state |= judge(state["point"], data, args.steps)
                checkpoint.save(state)
            runs.append({"method": method, "seed": seed, **state})
            print(f"{method}, seed {seed}: {state['best']:.4f} after {state['evaluations']} evaluations", flush=True)
    settings = {"steps": args.steps, "seconds": args.seconds, "outer_lr": OUTER_LR, "box": BOX, "seeds": args.seeds}
    start = judge(middle, data, args.steps)
    results = {"settings": settings, **provenance(), "start": start, "runs": runs}
    write_json(args.out / "hyperopt.json", results)
    write_atomically(args.out / "hyperopt.png", lambda file: figure(results).savefig(file, dpi=110))
    print(f"\n{table(results)}\n\nWritten: {args.out / 'hyperopt'}.json and .png")


if __name__ == "__main__":
    main()
