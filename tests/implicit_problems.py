"""Bilevel problems whose hypergradient is known otherwise: in closed form, or by dense linear algebra."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from problems import numbers
from torch import Tensor


class Problem(NamedTuple):
    """A lower and an upper loss, where they start, a rate of each level, and phi'(x) where it is known."""

    lower: Callable[..., Tensor]
    upper: Callable[..., Tensor]
    start: Any
    hyper: Tensor
    lr: float
    upper_lr: float
    exact: Tensor | None = None

    @property
    def arguments(self) -> tuple[Any, ...]:
        """What `hypergradient` takes by position."""
        return self.lower, self.upper, self.start, self.hyper


def largest(matrix: Tensor) -> float:
    return float(torch.linalg.eigvalsh(matrix)[-1])


def ridge(size: int, samples: int, seed: int) -> Problem:
    """Ridge regression, whose strength exp(x) is the upper variable."""
    design, targets = numbers(samples, size, seed=seed) / samples**0.5, numbers(samples, seed=seed + 1)
    held, wanted = numbers(samples, size, seed=seed + 2) / samples**0.5, numbers(samples, seed=seed + 3)
    x = torch.tensor(-1.5, dtype=torch.float64)

    def lower(y: Tensor, x: Tensor, batch: Any = None) -> Tensor:
        return 0.5 * (design @ y - targets).square().sum() + 0.5 * x.exp() * y.square().sum()

    def upper(y: Tensor, x: Tensor, batch: Any = None) -> Tensor:
        return 0.5 * (held @ y - wanted).square().sum()

    hessian = design.T @ design + x.exp() * torch.eye(size, dtype=torch.float64)
    y = torch.linalg.solve(hessian, design.T @ targets)
    exact = -(held.T @ (held @ y - wanted)) @ torch.linalg.solve(hessian, x.exp() * y)
    start = numbers(size, seed=seed + 4)
    return Problem(lower, upper, start, x, 1 / largest(hessian), 1 / largest(held.T @ held), exact)


def lasso(samples: int, size: int, support: int, seed: int) -> Problem:
    """Least squares, to which a prox of strength x belongs; `lasso_gradient` has the derivative at a solution."""
    design, held = (numbers(samples, size, seed=seed + i) / samples**0.5 for i in range(2))
    truth = torch.zeros(size, dtype=torch.float64)
    truth[:support] = 2 * numbers(support, seed=seed + 2).sign()
    targets = design @ truth + 0.05 * numbers(samples, seed=seed + 3)
    wanted = held @ truth + 0.05 * numbers(samples, seed=seed + 4)

    def lower(y: Tensor, x: Tensor, batch: Any = None) -> Tensor:
        return 0.5 * (design @ y - targets).square().sum()

    def upper(y: Tensor, x: Tensor, batch: Any = None) -> Tensor:
        return 0.5 * (held @ y - wanted).square().sum()

    x = torch.tensor(0.2, dtype=torch.float64)
    start = torch.zeros(size, dtype=torch.float64)
    return Problem(lower, upper, start, x, 0.9 / largest(design.T @ design), 0.9 / largest(held.T @ held))


def lasso_gradient(problem: Problem, y: Tensor) -> Tensor:
    """phi'(x) in closed form, on the support of y: ``y_S = H_SS^-1 (A_S^T b - x sign)``."""
    hessian = torch.func.hessian(problem.lower)(y, problem.hyper)
    there = y != 0
    slope = torch.func.grad(problem.upper)(y, problem.hyper)
    return -slope[there] @ torch.linalg.solve(hessian[there][:, there], y[there].sign())


def overparametrised(samples: int, size: int, seed: int, *, log_cosh: bool = False, far: float = 1.0) -> Problem:
    """Fewer samples than parameters: y is not unique, and F chooses; phi'(x) by the KKT conditions ``A y = B x``."""
    design = numbers(samples, size, seed=seed) / samples**0.5
    effect = numbers(samples, 3, seed=seed + 1)
    held = numbers(size, size, seed=seed + 2) / size**0.5
    wanted = numbers(size, seed=seed + 3)
    x = numbers(3, seed=seed + 4)

    def lower(y: Tensor, x: Tensor, batch: Any = None) -> Tensor:
        residual = design @ y - effect @ x
        return residual.cosh().log().sum() if log_cosh else 0.5 * residual.square().sum()

    def upper(y: Tensor, x: Tensor, batch: Any = None) -> Tensor:
        return 0.5 * (held @ y - wanted).square().sum() + 0.05 * y.square().sum()

    hessian = held.T @ held + 0.1 * torch.eye(size, dtype=torch.float64)
    zero = torch.zeros(samples, samples, dtype=torch.float64)
    system = torch.cat([torch.cat([hessian, design.T], 1), torch.cat([design, zero], 1)])
    solution = torch.linalg.solve(system, torch.cat([held.T @ wanted, effect @ x]))
    exact = -effect.T @ solution[size:]
    start = far * numbers(size, seed=seed + 5)
    return Problem(lower, upper, start, x, 0.9 / largest(design.T @ design), 1 / largest(hessian), exact)


def cleaning(samples: int, size: int, classes: int, seed: int, *, strength: float = 0.0, held: float = 1e-4) -> Problem:
    """Weights for noisy examples of softmax regression; without a penalty its Hessian is singular, harmlessly."""
    inputs, others = numbers(samples, size, seed=seed), numbers(samples, size, seed=seed + 1)
    truth = numbers(size, classes, seed=seed + 2)
    labels = (inputs @ truth).argmax(1)
    noisy = numbers(samples, seed=seed + 3) > 0.5
    labels = torch.where(noisy, labels.roll(1), labels)
    wanted = (others @ truth).argmax(1)

    def penalty(y: dict[str, Tensor]) -> Tensor:
        return 0.5 * (y["weight"].square().sum() + y["bias"].square().sum())

    def lower(y: dict[str, Tensor], x: Tensor, batch: Any = None) -> Tensor:
        losses = F.cross_entropy(inputs @ y["weight"] + y["bias"], labels, reduction="none")
        return (x.sigmoid() * losses).mean() + strength * penalty(y)

    def upper(y: dict[str, Tensor], x: Tensor, batch: Any = None) -> Tensor:
        return F.cross_entropy(others @ y["weight"] + y["bias"], wanted) + held * penalty(y)

    start = {"weight": numbers(size, classes, seed=seed + 4), "bias": numbers(classes, seed=seed + 5)}
    return Problem(lower, upper, start, torch.zeros(samples, dtype=torch.float64), 4.0, 1.0)


def dense(problem: Problem, y: Tensor, *, alpha: float, rate: float, upper_rate: float) -> Tensor:
    """The implicit hypergradient at y by dense matrices: ``F_x - (a s_u F_yx + (1 - a) s f_yx)^T M^-T F_y``."""
    parts = []
    for loss in (problem.lower, problem.upper):
        second = torch.func.hessian(loss)(y, problem.hyper)
        mixed = torch.func.jacfwd(torch.func.grad(loss), argnums=1)(y, problem.hyper)
        parts.append((second.reshape(y.numel(), -1), mixed.reshape(y.numel(), -1)))
    (f_yy, f_yx), (upper_yy, upper_yx) = parts
    matrix = alpha * upper_rate * upper_yy + (1 - alpha) * rate * f_yy
    mixed = alpha * upper_rate * upper_yx + (1 - alpha) * rate * f_yx
    slope_y, slope_x = torch.func.grad(problem.upper, argnums=(0, 1))(y, problem.hyper)
    v = torch.linalg.solve(matrix.T, slope_y.reshape(-1))
    return slope_x - (mixed.T @ v).reshape(problem.hyper.shape)
