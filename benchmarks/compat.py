"""What does the higher-compatible interface cost: beside this library's own `innerloop_ctx`, and beside `higher`?

    python -m benchmarks.compat [--rounds 41] [--smoke]

The same inner loop and its hypergradient with `bda_optim.compat.higher`, `bda_optim.innerloop_ctx` and `higher`, in
interleaved rounds; ratios are medians over rounds of the ratio of CPU times. Below 1 is quicker. Torch's
kernels, which are the same, take most of the time in the larger ones; the small modules show the overhead.

Latest output, 21 rounds beside other jobs on both cores, of which runs differ by up to 5 % either way (an earlier one,
25 rounds: 0.96, 1.01, 0.96, 1.01, 0.96, 0.96 by the own `innerloop_ctx`, 0.96, 1.01, 1.00, 0.99, 0.99, 1.00 by higher):

    2026-11-16; x86_64, 2 cores, CPU, one thread, float32; torch 2.13.0+cpu, higher 0.2.1, torchopt 0.7.3, jax 0.10.2
    inner loop                      CPU ms  by own innerloop_ctx  by higher
    sine MLP 1-40-40-1, SGD           5.76                 0.981      0.932
    sine MLP, Adam                   11.55                 0.967      0.847
    sine MLP, SGD, no tracking        3.94                 1.050      0.973
    MLP 64-256-256-10, SGD, K=20     62.86                 0.991      0.946
    MLP 64-256-256-10, Adam, K=20   127.31                 1.007      0.963
    conv-BN x 3, 5-way 5-shot, SGD  187.93                 1.068      0.985
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

import bda_optim as bda
import bda_optim.compat.higher as compat

from . import _common
from ._common import Entry

OWN, COMPAT, HIGHER = "own innerloop_ctx", "compat.higher", "higher"
LIMITS = {OWN: 1.05, HIGHER: 1.0}  # what must be reached


@dataclasses.dataclass
class Case:
    """One inner loop.

    Attributes:
        model: The module.
        inputs: Its inputs.
        optimizer: The class of the inner optimizer.
        steps: K.
        track: Whether the loop is differentiated.
    """

    model: nn.Module
    inputs: Tensor
    optimizer: type[torch.optim.Optimizer]
    steps: int = 5
    track: bool = True

    def run(self, library: Any) -> list[Tensor]:
        """Return the hypergradient with respect to the initial weights, or the adapted weights."""
        opt = self.optimizer(self.model.parameters(), lr=0.01)  # type: ignore[call-arg]
        context = library.innerloop_ctx(
            self.model, opt, copy_initial_weights=not self.track, track_higher_grads=self.track
        )
        with context as (fmodel, diffopt):
            for _ in range(self.steps):
                diffopt.step(fmodel(self.inputs).square().mean())
            if not self.track:
                return [p.detach() for p in fmodel.parameters()]
            return list(torch.autograd.grad((fmodel(self.inputs) - 1).square().mean(), list(self.model.parameters())))


def mlp(*sizes: int) -> nn.Module:
    layers = [layer for pair in itertools.pairwise(sizes) for layer in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def conv() -> nn.Module:
    blocks: list[nn.Module] = []
    for channels in (1, 16, 16):
        blocks += [nn.Conv2d(channels, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(16 * 9, 5))


SGD, ADAM = torch.optim.SGD, torch.optim.Adam
CASES: dict[str, Callable[[], Case]] = {
    "sine MLP 1-40-40-1, SGD": lambda: Case(mlp(1, 40, 40, 1), torch.randn(10, 1), SGD),
    "sine MLP, Adam": lambda: Case(mlp(1, 40, 40, 1), torch.randn(10, 1), ADAM),
    "sine MLP, SGD, no tracking": lambda: Case(mlp(1, 40, 40, 1), torch.randn(10, 1), SGD, track=False),
    "MLP 64-256-256-10, SGD, K=20": lambda: Case(mlp(64, 256, 256, 10), torch.randn(64, 64), SGD, 20),
    "MLP 64-256-256-10, Adam, K=20": lambda: Case(mlp(64, 256, 256, 10), torch.randn(64, 64), ADAM, 20),
    "conv-BN x 3, 5-way 5-shot, SGD": lambda: Case(conv(), torch.randn(25, 1, 28, 28), SGD),
}


def libraries() -> dict[str, Any]:
    found: dict[str, Any] = {COMPAT: compat, OWN: bda}
    if _common.installed("higher"):
        import higher

        found[HIGHER] = higher
    return found


def measure(case: Case, rounds: int, bar: tqdm[Any]) -> dict[str, Entry]:
    runs = {name: (lambda library=library: case.run(library)) for name, library in libraries().items()}
    reference = _common.numbers(runs[OWN]())
    entries = _common.first_calls(runs, reference, bar)
    _common.race(runs, entries, rounds, bar)
    return entries


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    args = _common.options(__doc__, list(CASES), argv)
    print(_common.headline())
    rows, verdicts = [], []
    with tqdm(total=len(args.only) * len(libraries()) * (args.rounds + 1), file=sys.stderr) as bar:
        for name in args.only:
            torch.manual_seed(0)
            entries = measure(CASES[name](), args.rounds, bar)
            ours = entries[COMPAT]
            ratios = {other: _common.ratio(ours, entry) for other, entry in entries.items() if other != COMPAT}
            rows.append([name, ours.time * 1e3, *(f"{value:.3f}" for value in ratios.values())])
            verdicts += [_common.verdict(f"{name}, by {other}", ratios[other], LIMITS[other]) for other in ratios]
    head = ["inner loop", "CPU ms", *(f"by {other}" for other in libraries() if other != COMPAT)]
    print(_common.table(head, rows))
    print(_common.show_verdicts(verdicts, smoke=args.smoke))
    return verdicts


if __name__ == "__main__":
    main()
