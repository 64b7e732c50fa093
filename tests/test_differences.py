"""`Differences`: second-order products as central differences of first-order gradients, against `Unroll`."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from problems import relative_error
from torch import Tensor, optim

import bda_optim as bda

D = torch.float64
K = 6
ROWS = 12


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=D, generator=torch.Generator().manual_seed(seed))


BATCHES = [(torch.arange(ROWS), draw(ROWS, 3, seed=k), draw(ROWS, 2, seed=10 + k)) for k in range(K)]
Y0 = {"w": 0.3 * draw(3, 2, seed=20), "b": torch.zeros(2, dtype=D)}


def lower(y: Any, x: Any, batch: Any) -> Tensor:
    rows, inputs, targets = batch
    residuals = torch.tanh(inputs @ y["w"] + y["b"]) - targets
    return (torch.sigmoid(x["rows"][rows]) * residuals.square().sum(-1)).mean()


def upper(y: Any, x: Any, batch: Any) -> Tensor:
    _, inputs, targets = BATCHES[0] if batch is None else batch
    return (torch.tanh(inputs @ y["w"] + y["b"]) - x["rows"].mean() * targets.cos()).square().mean()


RULES: dict[str, dict[str, Any]] = {
    "sgd": {},
    "momentum": {"momentum": 0.9},
    "nesterov": {"momentum": 0.9, "nesterov": True},
    "adamw": {"rule": optim.AdamW, "lr": 0.05},
    "amsgrad": {"rule": optim.Adam, "amsgrad": True, "lr": 0.05},
    "rmsprop": {"rule": optim.RMSprop, "lr": 0.02},
    "fista": {"rule": bda.FISTA},
    "adafactor": {"rule": optim.Adafactor, "lr": 0.05},
}
VARIANTS = ("plain", "alpha", "l1", "all")
ADJOINTS = {
    "default": bda.Differences(),
    "slots": bda.Differences(within=bda.Checkpointed(slots=2)),
    "every": bda.Differences(within=bda.Checkpointed(every=1)),
    "unroll": bda.Differences(within=bda.Unroll()),
    "check": bda.Differences(within=bda.Checkpointed(check=True)),
    "offload": bda.Differences(within=bda.Checkpointed(slots=3, offload="cpu")),
}


def gradients(rule: str = "momentum", variant: str = "plain", **options: Any) -> list[Tensor]:
    """Return dF/dx of rows, of the strength of the l1 norm and of the rate."""
    x = {"rows": draw(ROWS, seed=30), "l1": torch.tensor(0.02, dtype=D), "lr": torch.tensor(0.04, dtype=D)}
    chosen: dict[str, Any] = {"lr": 0.2, **RULES[rule]}
    if variant in ("alpha", "all"):
        chosen |= {"alpha": bda.harmonic(0.5), "upper_lr": 0.3}
    if variant in ("l1", "all") and rule != "adafactor":
        chosen["prox"] = bda.prox.l1(lambda hyper: hyper["l1"])
    if variant == "all":
        chosen["lr"] = x["lr"].requires_grad_()
    chosen = {"steps": K, "batches": BATCHES, **chosen, **options}
    out = bda.hypergradient(lower, upper, Y0, x, **chosen)
    return list(out.grad.values())


@functools.cache
def exact(rule: str, variant: str) -> list[Tensor]:
    return gradients(rule, variant)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("rule", RULES)
def test_every_rule(rule: str, variant: str) -> None:
    assert relative_error(gradients(rule, variant, adjoint=bda.Differences()), exact(rule, variant)) < 1e-9


@pytest.mark.parametrize("adjoint", ADJOINTS.values(), ids=ADJOINTS.keys())
@pytest.mark.parametrize("rule", ["sgd", "nesterov"])
def test_every_way_to_store_states(rule: str, adjoint: Any) -> None:
    assert relative_error(gradients(rule, "all", adjoint=adjoint), exact(rule, "all")) < 1e-9


@pytest.mark.parametrize("parts", [3, 5])
def test_parts(parts: int) -> None:
    assert (
        relative_error(
            gradients("nesterov", "all", adjoint=bda.Differences(), accumulate=parts), exact("nesterov", "all")
        )
        < 1e-9
    )
