"""Problems to diagnose: five kinds, each with other sizes and seeds, and with phi'(x) where it has a closed form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

Loss = Callable[[Any, Any, Any], Tensor]


class Problem(NamedTuple):
    """Arguments of `bda.diagnose`, and the derivative of the optimistic value function."""

    lower: Loss
    upper: Loss
    params: Any
    hyper: Tensor
    settings: dict[str, Any]
    slope: Tensor | None = None

    def call(self, function: Callable[..., Any], **changes: Any) -> Any:
        return function(self.lower, self.upper, self.params, self.hyper, **{**self.settings, **changes})

    def error(self, gradient: Tensor) -> float:
        """The relative error of a hypergradient against phi'(x)."""
        assert self.slope is not None
        return float((gradient - self.slope).norm() / self.slope.norm())


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=generator(seed))


def derivative(value: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    leaf = x.detach().clone().requires_grad_()
    return torch.autograd.grad(value(leaf), leaf)[0]


def counterexample(x: float = 0.3, scale: float = 1.0, start: tuple[float, float] = (2.0, 2.0)) -> Problem:
    """The paper's: f says nothing about y_2. phi(x) = (x - 1)^2 / 2; with `scale` c, f is scaled by c."""

    def lower(y: Tensor, x: Tensor, batch: Any = None) -> Tensor:
        return scale * (0.5 * y[0] ** 2 - x * y[0])

    def upper(y: Tensor, x: Tensor, batch: Any = None) -> Tensor:
        return 0.5 * (x - y[1]) ** 2 + 0.5 * (y[0] - 1) ** 2

    y0, hyper = torch.tensor(start, dtype=torch.float64), torch.tensor(x, dtype=torch.float64)
    return Problem(lower, upper, y0, hyper, {"lr": 0.2 / scale, "upper_lr": 0.7}, hyper - 1)


def ridge(n: int = 40, d: int = 20, seed: int = 0) -> Problem:
    """A strongly convex lower level: ridge regression with one strength per feature."""
    a, b = randn(n, d, seed=seed), randn(n, seed=seed + 1)
    a_val, b_val = randn(n, d, seed=seed + 2), randn(n, seed=seed + 3)
    x = torch.full((d,), -1.5, dtype=torch.float64)

    def lower(y: Tensor, x: Tensor, batch: Any = None) -> Tensor:
        return 0.5 * ((a @ y - b) ** 2).sum() / n + 0.5 * (x.exp() * y**2).sum()

    def upper(y: Tensor, x: Tensor, batch: Any = None) -> Tensor:
        return 0.5 * ((a_val @ y - b_val) ** 2).sum() / n

    def value(x: Tensor) -> Tensor:
        return upper(torch.linalg.solve(a.T @ a / n + torch.diag(x.exp()), a.T @ b / n), x)

    largest = float(torch.linalg.eigvalsh(a.T @ a / n).max()) + float(x.exp().max())
    settings = {"lr": 0.9 / largest, "upper_lr": 0.5}
    return Problem(lower, upper, torch.zeros(d, dtype=torch.float64), x, settings, derivative(value, x))


def least_squares(n: int = 10, d: int = 30, p: int = 5, seed: int = 0) -> Problem:
    """Fewer samples than parameters: d - n directions of y are the upper level's choice."""
    a, b = randn(n, d, seed=seed) / d**0.5, randn(n, p, seed=seed + 1)
    root = randn(3 * d, d, seed=seed + 2)
    metric = root.T @ root / (3 * d)
    target, x = randn(d, seed=seed + 3), randn(p, seed=seed + 4)

    def lower(y: Tensor, x: Tensor, batch: Any = None) -> Tensor:
        return 0.5 * ((a @ y - b @ x) ** 2).sum()

    def upper(y: Tensor, x: Tensor, batch: Any = None) -> Tensor:
        return 0.5 * (y - target) @ metric @ (y - target) + 0.05 * (x**2).sum()

    null = torch.linalg.svd(a)[2][n:].T
    inverse = torch.linalg.pinv(a)

    def value(x: Tensor) -> Tensor:
        fitted = inverse @ b @ x
        free = torch.linalg.solve(null.T @ metric @ null, null.T @ metric @ (target - fitted))
        return upper(fitted + null @ free, x)

    settings = {
        "lr": 0.9 / float(torch.linalg.eigvalsh(a @ a.T).max()),
        "upper_lr": 2 / float(torch.linalg.eigvalsh(metric)[[0, -1]].sum()),
    }
    return Problem(lower, upper, randn(d, seed=seed + 5), x, settings, derivative(value, x))


def cleaning(n: int = 500, features: int = 20, classes: int = 3, seed: int = 0) -> Problem:
    """Softmax regression with a weight per sample: many null directions, along which F does not slope."""
    centres = randn(classes, features, seed=seed)
    labels = torch.randint(classes, (2, n), generator=generator(seed + 1))
    inputs = centres[labels] + randn(2, n, features, seed=seed + 2)
    wrong = torch.rand(n, generator=generator(seed + 3)) < 0.3
    noisy = torch.where(wrong, torch.randint(classes, (n,), generator=generator(seed + 4)), labels[0])

    def logits(y: dict[str, Tensor], level: int) -> Tensor:
        return inputs[level] @ y["w"] + y["b"]

    def lower(y: dict[str, Tensor], x: Tensor, batch: Any = None) -> Tensor:
        return (x.sigmoid() * functional.cross_entropy(logits(y, 0), noisy, reduction="none")).mean()

    def upper(y: dict[str, Tensor], x: Tensor, batch: Any = None) -> Tensor:
        return functional.cross_entropy(logits(y, 1), labels[1]) + 1e-4 * sum((t**2).sum() for t in y.values())

    y0 = {"w": torch.zeros(features, classes, dtype=torch.float64), "b": torch.zeros(classes, dtype=torch.float64)}
    return Problem(lower, upper, y0, torch.zeros(n, dtype=torch.float64), {"lr": 0.5, "upper_lr": 0.5})


def mlp(samples: int = 20, width: int = 8, classes: int = 3, features: int = 9, seed: int = 0) -> Problem:
    """A small network with a weight per sample: not convex, and most directions are flat."""
    inputs = randn(2, samples, features, seed=seed)
    targets = torch.randint(classes, (2, samples), generator=generator(seed + 1))
    y0 = {
        "w1": randn(features, width, seed=seed + 2) / features**0.5, "b1": torch.zeros(width, dtype=torch.float64),
        "w2": randn(width, classes, seed=seed + 3) / width**0.5, "b2": torch.zeros(classes, dtype=torch.float64),
    }  # fmt: skip

    def logits(y: dict[str, Tensor], level: int) -> Tensor:
        return torch.tanh(inputs[level] @ y["w1"] + y["b1"]) @ y["w2"] + y["b2"]

    def lower(y: dict[str, Tensor], x: Tensor, batch: Any = None) -> Tensor:
        return (x.sigmoid() * functional.cross_entropy(logits(y, 0), targets[0], reduction="none")).mean()

    def upper(y: dict[str, Tensor], x: Tensor, batch: Any = None) -> Tensor:
        return functional.cross_entropy(logits(y, 1), targets[1])

    return Problem(lower, upper, y0, torch.zeros(samples, dtype=torch.float64), {"lr": 0.5, "upper_lr": 0.3})
