"""Lanczos against dense eigenvalues."""

from __future__ import annotations

import pytest
import torch
from problems import numbers
from torch import Tensor

from bda_optim._diagnosis.curvature import Allowance
from bda_optim._diagnosis.lanczos import dense, lanczos


def symmetric(values: Tensor, seed: int) -> Tensor:
    """A matrix with these eigenvalues."""
    basis = torch.linalg.qr(numbers(len(values), len(values), seed=seed))[0]
    return basis @ torch.diag(values) @ basis.T


@pytest.mark.parametrize("seed", [0, 1])
def test_run_to_its_end_it_has_all_eigenvalues(seed: int) -> None:
    values = numbers(30, seed=seed + 10).sort().values
    matrix = symmetric(values, seed)
    found = lanczos(lambda v: matrix @ v, numbers(30, seed=seed + 20), 100)
    assert found.products == 30
    torch.testing.assert_close(found.values, values, rtol=0, atol=1e-10)
    assert found.residuals.max() < 1e-10
    assert float(found.weights.sum()) == pytest.approx(1)


@pytest.mark.parametrize("seed", [3, 4])
def test_weights_are_the_spectral_measure_of_the_start(seed: int) -> None:
    values = torch.cat([torch.zeros(12, dtype=torch.float64), torch.linspace(1, 3, 18, dtype=torch.float64)])
    matrix, start = symmetric(values, seed), numbers(30, seed=seed + 1)
    found = lanczos(lambda v: matrix @ v, start, 100)
    assert found.products <= 21  # the null space counts once; rounding may add to it
    vectors = torch.linalg.eigh(matrix)[1]
    share = float((vectors[:, :12].T @ start).square().sum() / start.square().sum())
    assert found.below(0.5) == pytest.approx(share, abs=1e-10)


def test_extremes_come_first_and_residuals_bound_them() -> None:
    values = torch.cat([torch.tensor([-2.0, 5.0], dtype=torch.float64), torch.rand(398, dtype=torch.float64)])
    matrix = symmetric(values, 7)
    found = lanczos(lambda v: matrix @ v, numbers(400, seed=8), 24)
    assert found.products == 24
    assert float(found.values[-1]) == pytest.approx(5.0, abs=1e-8)
    assert float(found.values[0]) == pytest.approx(-2.0, abs=1e-8)
    exact = torch.linalg.eigvalsh(matrix)
    distance = (found.values[:, None] - exact).abs().min(1).values
    assert bool((distance <= found.residuals + 1e-10).all())


def test_reorthogonalisation_leaves_no_ghosts() -> None:
    """Without it, an eigenvalue far from the others appears several times."""
    values = torch.cat([torch.tensor([1e6], dtype=torch.float64), torch.linspace(0, 1, 99, dtype=torch.float64)])
    matrix = symmetric(values, 9)
    found = lanczos(lambda v: matrix @ v, numbers(100, seed=10), 60)
    assert int((found.values > 10).sum()) == 1


def test_special_operators() -> None:
    zero = lanczos(lambda v: 0 * v, torch.ones(5, dtype=torch.float64), 10)
    assert zero.values.tolist() == [0.0] and zero.weights.tolist() == [1.0]
    single = lanczos(lambda v: 3 * v, torch.tensor([2.0], dtype=torch.float64), 10)
    assert single.values.tolist() == [3.0] and single.residuals.tolist() == [0.0]
    matrix = symmetric(numbers(6), 2)
    torch.testing.assert_close(dense(lambda v: matrix @ v, 6, torch.empty(0, dtype=torch.float64)), matrix)


@pytest.mark.parametrize("products", [None, 60, 100, 1000])
@pytest.mark.parametrize("size", [2, 100, 144, 200, 216, 217, 255, 256, 10_000])
@pytest.mark.parametrize("steps", [1, 256, 2000])
def test_the_allowance_is_kept(products: int | None, size: int, steps: int) -> None:
    points = min(3, steps)
    given = Allowance.divide(products, size=size, steps=steps, probes=4, points=points)
    used = given.lower + given.upper + 2 * points * given.earlier + 5 * given.run
    allowed = products or 120 + 5 * max(24, 1.5 * steps**0.5)
    assert used <= allowed
    assert given.upper >= 2 and (given.dense or given.run >= 2)
    if products is None and size <= 216:
        assert given.dense
