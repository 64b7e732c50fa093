"""MAML on sine waves: initial weights from which one gradient step on ten points fits a new wave (Finn et al. 2017).

For comparison the same network is trained without inner steps ("pretrained"). examples/start/maml.py is the short form.
"""

import argparse
import itertools

import torch
from _run import Checkpoint, arguments, write_atomically, write_json
from matplotlib.figure import Figure
from torch import Tensor, nn

import bda_optim as bda

METHODS, TEST_STEPS = {"MAML": 1, "pretrained": 0}, (0, 1, 2, 3, 5, 10)  # inner steps in training, in the test
TASKS, POINTS, INNER_LR, META_LR = 25, 10, 0.01, 1e-3  # waves in a meta-batch, points to adapt to, rates


def waves(number: int, random: torch.Generator, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """Return points x and y for the lower and the upper loss: amplitude in [0.1, 5], phase in [0, pi], x in [-5, 5]."""
    amplitude, phase = torch.rand(2, number, 1, 1, generator=random)
    x = 10 * torch.rand(2, number, POINTS, 1, generator=random) - 5
    y = (0.1 + 4.9 * amplitude) * torch.sin(x - torch.pi * phase)
    return [(x[level].to(device), y[level].to(device)) for level in (0, 1)]


def loss(net: nn.Module, hyper: None, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.mse_loss(net(batch[0]), batch[1])


def adapt(net: nn.Module, batch: tuple[Tensor, Tensor], steps: int) -> nn.Module:
    """Fit all waves at once: each has weights of its own, which start at those of `net` and are functions of them."""
    inner = bda.BDAInnerOptimizer(net.parameters(), lr=INNER_LR)
    options = {"batches": [batch] * steps, "tasks": len(batch[0]), "copy_initial_weights": False}
    return inner.unroll(net, loss, steps=steps, **options) if steps else net


def train(method: str, seed: int, args: argparse.Namespace) -> tuple[nn.Module, float]:
    torch.manual_seed(seed)
    random = torch.Generator().manual_seed(seed)
    net = nn.Sequential(nn.Linear(1, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 1)).to(args.device)
    meta = torch.optim.Adam(net.parameters(), lr=META_LR)
    settings = {"iterations": args.iterations, "device": str(args.device)}
    checkpoint = Checkpoint(args.out / f"{method}_{seed}.pt", settings, resume=args.resume)
    for _ in checkpoint.iterations(args.iterations, f"{method}, seed {seed}", net=net, meta=meta, random=random):
        support, query = waves(TASKS, random, args.device)
        meta.zero_grad()
        loss(adapt(net, support, METHODS[method]), None, query).backward()
        meta.step()
    return net, checkpoint.seconds


def main() -> None:
    parser = arguments(__doc__.splitlines()[0], "maml_sine")
    parser.add_argument("--iterations", type=int, default=10_000, help="meta-batches")
    args = parser.parse_args()
    args.iterations = 40 if args.smoke else args.iterations
    lower, upper = waves(600, torch.Generator().manual_seed(2**40), args.device)  # new ones
    line, runs = torch.linspace(-5, 5, 200, device=args.device)[:, None].expand(600, 200, 1), []
    figure = Figure(figsize=(12, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    for method, seed in itertools.product(METHODS, args.seeds):
        net, seconds = train(method, seed, args)
        with torch.no_grad():
            losses = [loss(adapt(net, lower, steps), None, upper).item() for steps in TEST_STEPS]
            left.plot(line[0].cpu(), adapt(net, lower, 1)(line)[0].cpu(), color=f"C{METHODS[method]}")
        right.semilogy(TEST_STEPS, losses, "o-", color=f"C{METHODS[method]}", label=f"{method}, seed {seed}")
        print(f"{method}, seed {seed}, error after {TEST_STEPS} steps:", *(f"{value:.3f}" for value in losses))
        runs.append({"method": method, "seed": seed, "seconds": seconds, "losses": losses})
    left.plot(*(t[0].cpu() for t in lower), "k^")
    left.set(xlabel="x", title="Fits of a new wave after one step on ten points (triangles)")
    right.set(xlabel="gradient steps on ten points", title="Mean squared error on other points of 600 new waves")
    right.legend()
    write_json(args.out / "maml_sine.json", {"iterations": args.iterations, "steps": TEST_STEPS, "runs": runs})
    write_atomically(args.out / "maml_sine.png", lambda file: figure.savefig(file, dpi=120))


if __name__ == "__main__":
    main()
