"""From torchopt to bda_optim: two small scripts, each written for both, and the largest difference of their results.

MAML: a network that fits a new sine wave after a few inner steps; torchopt's MetaSGD, with momentum.
Weighting: one weight per training sample, learned so that the network that was trained with them does well on clean
data; torchopt's MetaAdam. This one is also run with ``rule=torchopt.adam(...)``, the transformation kept as it is.

    python examples/migrate_torchopt.py

prints the differences in float32 and float64, relative to the largest number, and fails where one is above 1e-6 or
1e-12. One is: in float32 torchopt's Adam computes 1 - 0.999^t with an error of 3e-5, so there both libraries are
measured by the result in float64. The script takes seconds and writes no files.
"""

from __future__ import annotations

import argparse

import torch
import torchopt
from torch import Tensor, nn

import bda_optim as bda

TASKS = 4  # sine waves in one meta-batch
STEPS = 5  # inner steps
META_STEPS = 3
INNER_LR, MOMENTUM, META_LR = 0.05, 0.9, 0.1
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}


def network() -> nn.Module:
    sizes = (1, 20), (20, 20), (20, 1)
    first, second, last = (nn.Linear(*size, dtype=torch.float64) for size in sizes)
    return nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), last).to(torch.get_default_dtype())


def uniform(*size: int) -> Tensor:
    """Return random numbers that are the same in every dtype."""
    return torch.rand(size, dtype=torch.float64).to(torch.get_default_dtype())


def loss(net: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = data
    return (net(inputs) - targets).square().mean()


# --- MAML -------------------------------------------------------------------------------------------------------------


def waves(seed: int) -> list[tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]]:
    """Return one meta-batch: per task a support and a query set."""
    torch.manual_seed(seed)
    tasks = []
    for _ in range(TASKS):
        amplitude, phase = 1 + uniform(1), uniform(1)
        x = 4 * uniform(2, 10, 1) - 2
        y = amplitude * torch.sin(x + phase)
        tasks.append(((x[0], y[0]), (x[1], y[1])))
    return tasks


def maml_with_torchopt(net: nn.Module) -> list[Tensor]:
    meta = torch.optim.SGD(net.parameters(), lr=META_LR)
    for seed in range(META_STEPS):
        inner = torchopt.MetaSGD(net, lr=INNER_LR, momentum=MOMENTUM)
        net_state = torchopt.extract_state_dict(net, by="reference")
        inner_state = torchopt.extract_state_dict(inner, by="reference")
        total = torch.zeros(())
        for support, query in waves(seed):
            for _ in range(STEPS):
                inner.step(loss(net, support))
            total = total + loss(net, query) / TASKS
            torchopt.recover_state_dict(net, net_state)
            torchopt.recover_state_dict(inner, inner_state)
        meta.zero_grad()
        total.backward()
        meta.step()
    return [*net.parameters()]


def maml_with_bda_optim(net: nn.Module) -> list[Tensor]:
    meta = torch.optim.SGD(net.parameters(), lr=META_LR)
    inner = bda.BDAInnerOptimizer(net.parameters(), lr=INNER_LR, momentum=MOMENTUM)
    for seed in range(META_STEPS):
        total = torch.zeros(())
        for support, query in waves(seed):
            with bda.innerloop_ctx(net, inner, copy_initial_weights=False) as (fnet, diffopt):
                for _ in range(STEPS):
                    diffopt.step(loss(fnet, support))
                total = total + loss(fnet, query) / TASKS
        meta.zero_grad()
        total.backward()
        meta.step()
    return [*net.parameters()]


# --- weights of samples -----------------------------------------------------------------------------------------------


def noisy_and_clean() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    x = 4 * uniform(2, 30, 1) - 2
    y = torch.sin(x)
    y[0, :10] += 4 * uniform(10, 1) - 2  # a third of the training targets is noise
    return (x[0], y[0]), (x[1], y[1])


def weighted(net: nn.Module, logits: Tensor, data: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = data
    return (logits.sigmoid() * (net(inputs) - targets).square()).mean()


def weighting_with_torchopt(net: nn.Module) -> list[Tensor]:
    train, clean = noisy_and_clean()
    logits = torch.zeros(30, 1, requires_grad=True)
    for _ in range(META_STEPS):
        inner = torchopt.MetaAdam(net, lr=INNER_LR)
        net_state = torchopt.extract_state_dict(net, by="reference")
        for _ in range(STEPS):
            inner.step(weighted(net, logits, train))
        (grad,) = torch.autograd.grad(loss(net, clean), logits)
        torchopt.recover_state_dict(net, net_state)
        logits = (logits - META_LR * grad).detach().requires_grad_()
    return [logits]


def weighting_with_bda_optim(net: nn.Module, inner: bda.BDAInnerOptimizer | None = None) -> list[Tensor]:
    train, clean = noisy_and_clean()
    logits = torch.zeros(30, 1, requires_grad=True)
    inner = inner or bda.BDAInnerOptimizer(net.parameters(), lr=INNER_LR, rule=torch.optim.Adam)
    for _ in range(META_STEPS):
        fnet = inner.unroll(net, lambda net, logits, _: weighted(net, logits, train), hyper=logits, steps=STEPS)
        (grad,) = torch.autograd.grad(loss(fnet, clean), logits)
        logits = (logits - META_LR * grad).detach().requires_grad_()
    return [logits]


def weighting_with_a_torchopt_rule(net: nn.Module) -> list[Tensor]:
    return weighting_with_bda_optim(net, bda.BDAInnerOptimizer(net.parameters(), rule=torchopt.adam(lr=INNER_LR)))


# --- the comparison ---------------------------------------------------------------------------------------------------

PAIRS = {
    "MAML, MetaSGD with momentum": (maml_with_torchopt, maml_with_bda_optim),
    "weights, MetaAdam": (weighting_with_torchopt, weighting_with_bda_optim),
    "weights, torchopt.adam as the rule": (weighting_with_torchopt, weighting_with_a_torchopt_rule),
}
ROUGH = "weights, MetaAdam", torch.float32  # where torchopt's own rounding is above the tolerance


def results(dtype: torch.dtype, seed: int) -> dict[str, list[Tensor]]:
    """Run all scripts; return per pair what torchopt and bda_optim ended with."""
    # The default dtype, since torchopt's Adam computes its bias correction in it, whatever the parameters' dtype is.
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        found = {}
        for name, scripts in PAIRS.items():
            found[name] = []
            for script in scripts:
                torch.manual_seed(seed)
                found[name].append(torch.cat([t.detach().flatten() for t in script(network())]).double())
        return found
    finally:
        torch.set_default_dtype(before)


def distance(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


def main() -> None:
    parser = argparse.ArgumentParser(description="Two scripts with torchopt and with bda_optim.")
    parser.add_argument("--seed", type=int, default=0, help="of the networks (%(default)s)")
    seed = parser.parse_args().seed
    torch.set_num_threads(1)  # more only get in each other's way on tensors this small
    found = {dtype: results(dtype, seed) for dtype in TOLERANCE}
    print(f"{'largest difference':36}" + "".join(f"{dtype!s:>16}" for dtype in TOLERANCE))
    for name in PAIRS:
        print(f"{name:36}" + "".join(f"{distance(*found[dtype][name]):16.1e}" for dtype in TOLERANCE))
    name, dtype = ROUGH
    exact = found[torch.float64][name][0]
    theirs, ours = (distance(result, exact) for result in found[dtype][name])
    print(f"{name}, {dtype}, distance from the float64 result: torchopt {theirs:.1e}, bda_optim {ours:.1e}")
    assert ours < 1e-5, "bda_optim is the one that differs"
    for name in PAIRS:
        for dtype, tolerance in TOLERANCE.items():
            assert (name, dtype) == ROUGH or distance(*found[dtype][name]) <= tolerance, f"{name} differs in {dtype}"


if __name__ == "__main__":
    main()
