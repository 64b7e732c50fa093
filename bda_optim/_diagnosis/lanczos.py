r"""Eigenvalues and spectral densities of an operator that is known by its products alone.

.. math:: H Q_m = Q_m T_m + \beta_m q_{m+1} e_m^T, \qquad T_m = S \, \mathrm{diag}(\theta) \, S^T

The Ritz values :math:`\theta_i` approach the extreme eigenvalues first, and the weights :math:`S_{1i}^2` say how much
of the start lies near each of them: that is Gauss quadrature of the start's spectral measure.

`torch.lobpcg` takes no operator, and scipy's `eigsh(which="SA")` did not converge on singular matrices and gives no
tridiagonal matrix; hence the 25 lines of `lanczos`.

Reference: Golub & Meurant, "Matrices, Moments and Quadrature", 1994; Ghorbani et al., "An Investigation into Neural Net
Optimization via Hessian Eigenvalue Density", ICML 2019.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

Operator = Callable[[Tensor], Tensor]
"""``H v`` for a flat v; symmetric."""


class Spectrum(NamedTuple):
    """What Lanczos found, on the CPU in float64.

    Attributes:
        values: The Ritz values, ascending.
        weights: How much of the start lies there; they add up to 1.
        residuals: ``beta_m |S_mi|``: an eigenvalue lies at most so far from each Ritz value.
    """

    values: Tensor
    weights: Tensor
    residuals: Tensor

    @property
    def products(self) -> int:
        """How many products it took."""
        return len(self.values)

    def below(self, threshold: float) -> float:
        """Return the share of the start below a threshold."""
        return float(self.weights[self.values <= threshold].sum())


def lanczos(product: Operator, start: Tensor, limit: int, eps: float = 0.0) -> Spectrum:
    """Run Lanczos with full reorthogonalisation, until the space is exhausted or after `limit` products.

    Args:
        product: The operator.
        start: A vector that is not 0.
        limit: The largest number of products.
        eps: The relative rounding error of a product, where that is larger than the start's own.

    >>> spectrum = lanczos(lambda v: torch.tensor([1.0, 2.0, 2.0]) * v, torch.ones(3), 10)
    >>> spectrum.values.tolist(), spectrum.weights.tolist()
    ([1.0, 2.0], [0.3333, 0.6667])
    """
    size = min(limit, start.numel())
    eps = 100 * max(eps, torch.finfo(start.dtype).eps)
    basis = torch.empty(size, start.numel(), dtype=start.dtype, device=start.device)
    basis[0] = start / start.norm()
    diagonal: list[float] = []
    off_diagonal: list[float] = []
    for m in range(size):
        new = product(basis[m])
        diagonal.append(float(basis[m] @ new))
        for _ in range(2):  # twice is enough (Parlett)
            new = new - basis[: m + 1].T @ (basis[: m + 1] @ new)
        off_diagonal.append(float(new.norm()))
        largest = max(map(abs, [*diagonal, *off_diagonal[:-1]]))
        if m + 1 == start.numel() or off_diagonal[-1] <= eps * largest:
            off_diagonal[-1] = 0.0
            break
        if m + 1 < size:
            basis[m + 1] = new / off_diagonal[-1]
    return _spectrum(diagonal, off_diagonal)


def _spectrum(diagonal: list[float], off_diagonal: list[float]) -> Spectrum:
    matrix = torch.diag(torch.tensor(diagonal, dtype=torch.float64))
    between = torch.tensor(off_diagonal[:-1], dtype=torch.float64)
    matrix += torch.diag(between, 1) + torch.diag(between, -1)
    values, vectors = torch.linalg.eigh(matrix)
    return Spectrum(values, vectors[0] ** 2, off_diagonal[-1] * vectors[-1].abs())


def dense(product: Operator, size: int, like: Tensor) -> Tensor:
    """Return the whole matrix of an operator, by one product per dimension; symmetric, on the CPU and in float64."""
    identity = torch.eye(size, dtype=like.dtype, device=like.device)
    matrix = torch.stack([product(row) for row in identity]).double().cpu()
    return (matrix + matrix.T) / 2
