"""From higher to bda_optim: a MAML script written for higher, run with both, and the largest difference.

A network learns to fit a new sine wave after a few inner steps. The script below is as one writes it for `higher`; the
library is an argument, so that the only line that differs between the two runs is the import:

    import higher                              ->  import bda_optim.compat.higher as higher

    python examples/migrate_higher_maml.py

prints the losses of both and the largest difference of losses and weights, in float32 and float64, and fails where it
is above 1e-6 or 1e-12. The last line shows what the new import makes possible: the same script with another inner
optimizer, whose steps also look at the query set. The script takes seconds and writes no files.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import higher
import torch
from torch import Tensor, nn

import bda_optim as bda
import bda_optim.compat.higher as compat

TASKS = 4  # sine waves in one meta-batch
STEPS = 5  # inner steps
META_STEPS = 20
INNER_LR, META_LR = 0.05, 0.01
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}

Optimizer = Callable[[Any], torch.optim.Optimizer]


def wave(dtype: torch.dtype) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return the support and the query set of one task; the numbers are the same in every dtype."""
    amplitude, phase = 1 + torch.rand(2, dtype=torch.float64)
    x = 4 * torch.rand(2, 10, 1, dtype=torch.float64) - 2
    x, y = x.to(dtype), (amplitude * torch.sin(x + phase)).to(dtype)
    return (x[0], y[0]), (x[1], y[1])


def loss(net: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = data
    return (net(inputs) - targets).square().mean()


def maml(higher: Any, dtype: torch.dtype, optimizer: Optimizer, seed: int) -> tuple[list[float], list[Tensor]]:
    """Return the query losses and the meta-learned weights. `higher` is the library."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 1)).to(dtype)
    meta, inner = torch.optim.Adam(net.parameters(), lr=META_LR), optimizer(net.parameters())
    losses = []
    for _ in range(META_STEPS):
        meta.zero_grad()
        total = 0.0
        for _ in range(TASKS):
            support, query = wave(dtype)
            with higher.innerloop_ctx(net, inner, copy_initial_weights=False) as (fnet, diffopt):
                for _ in range(STEPS):
                    if isinstance(inner, bda.BDAInnerOptimizer):
                        diffopt.step(loss(fnet, support), upper_loss=loss(fnet, query))
                    else:
                        diffopt.step(loss(fnet, support))
                query_loss = loss(fnet, query) / TASKS
                query_loss.backward()
            total += query_loss.item()
        meta.step()
        losses.append(total)
    return losses, [p.detach() for p in net.parameters()]


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=INNER_LR, momentum=0.9)


def aggregated(params: Any) -> torch.optim.Optimizer:
    return bda.BDAInnerOptimizer(params, lr=INNER_LR, momentum=0.9, alpha=bda.harmonic(0.5))


def difference(dtype: torch.dtype, seed: int) -> float:
    """Return the largest difference of the losses and weights of both libraries."""
    results = [maml(library, dtype, sgd, seed) for library in (higher, compat)]
    for name, (losses, _) in zip(("higher", "bda_optim.compat.higher"), results, strict=True):
        print(f"{name:24} {dtype!s:14} query loss {losses[0]:.6f} -> {losses[-1]:.6f}")
    pairs = [*zip(*(weights for _, weights in results), strict=True)]
    pairs += [(torch.tensor(a), torch.tensor(b)) for a, b in zip(*(losses for losses, _ in results), strict=True)]
    return max(float((a - b).abs().max()) for a, b in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description="One MAML script with higher and with bda_optim.compat.higher.")
    parser.add_argument("--seed", type=int, default=0, help="of the network and the tasks (%(default)s)")
    seed = parser.parse_args().seed
    for dtype, tolerance in TOLERANCE.items():
        largest = difference(dtype, seed)
        print(f"largest difference in {dtype}: {largest:.1e}")
        if largest > tolerance:
            raise SystemExit(f"the libraries differ by more than {tolerance}")
    losses, _ = maml(compat, torch.float64, aggregated, seed)
    print(f"with BDA in the inner loop: query loss {losses[0]:.6f} -> {losses[-1]:.6f}")


if __name__ == "__main__":
    main()
