"""Linear systems by products alone, against dense solves."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from bda_optim._adjoints.krylov import gmres, minres, neumann
from bda_optim._adjoints.linear_solve import Product, Solution, Vector


def rotated(eigenvalues: Tensor, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """A symmetric matrix with these eigenvalues."""
    generator = torch.Generator().manual_seed(seed)
    q, _ = torch.linalg.qr(torch.randn(len(eigenvalues), len(eigenvalues), generator=generator, dtype=torch.float64))
    return (q * eigenvalues.double() @ q.T).to(dtype)


def numbers(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def times(matrix: Tensor) -> Product:
    """Products with one matrix, or with one matrix per row."""
    return lambda v: [torch.einsum("...ij,...j->...i", matrix, v[0])]


def symmetric(matrix: Tensor, b: Tensor, start: Vector | None = None, **options: float) -> Solution:
    return minres(times(matrix), [b], start, **{"tol": 1e-10, "limit": 500, **options})


def general(matrix: Tensor, b: Tensor, start: Vector | None = None, **options: float) -> Solution:
    other = times(matrix.transpose(-1, -2))
    return gmres(times(matrix), [b], start, transposed=other, **{"tol": 1e-10, "limit": 500, **options})


SOLVERS = {"minres": symmetric, "gmres": general}
each_solver = pytest.mark.parametrize("solve", SOLVERS.values(), ids=SOLVERS)


@each_solver
@pytest.mark.parametrize(("size", "lowest"), [(1, 1.0), (2, 0.5), (20, 0.1), (45, 0.01)])
def test_a_dense_solve(solve: Callable[..., Solution], size: int, lowest: float) -> None:
    matrix, b = rotated(torch.linspace(lowest, 1.0, size), seed=size), numbers(1, size, seed=size + 1)
    found = solve(matrix, b)
    torch.testing.assert_close(found.vector[0], torch.linalg.solve(matrix, b[0])[None], rtol=1e-7, atol=1e-8)
    assert found.residual.item() <= 1e-10
    true = torch.linalg.vector_norm(b - found.vector[0] @ matrix) / b.norm()
    assert found.residual.item() == pytest.approx(true.item(), abs=1e-14), "the residual is the true one"
    assert found.high.item() == pytest.approx(1.0 if size > 1 else lowest, rel=1e-6)
    assert found.low.item() == pytest.approx(lowest, rel=1e-3)
    assert len(found.history) <= found.products <= (size + 2 if size < 30 else 500)
    assert all(b <= a * (1 + 1e-12) for a, b in zip(found.history, found.history[1:], strict=False))


def test_gmres_needs_no_symmetry_and_goes_on_after_its_restarts() -> None:
    matrix = rotated(torch.linspace(0.2, 1.0, 80), seed=0) + 0.1 * numbers(80, 80, seed=1) / 80**0.5
    b = numbers(1, 80, seed=2)
    found = general(matrix, b, tol=1e-12)
    assert found.products > 31, "more than one cycle"
    torch.testing.assert_close(found.vector[0][0], torch.linalg.solve(matrix, b[0]), rtol=1e-9, atol=1e-10)
    # MINRES takes the matrix for symmetric; the true residual shows that it is not.
    assert symmetric(matrix, b, limit=100).residual.item() > 1e-6


@each_solver
def test_systems_side_by_side_are_solved_as_each_alone(solve: Callable[..., Solution]) -> None:
    """Coefficients are per system: an easy one is done early, a zero one at once, and stay as they are."""
    spectra = [torch.linspace(low, 1.0, 12) for low in (1.0, 0.3, 0.02, 0.5)]
    matrix = torch.stack([rotated(s, seed) for seed, s in enumerate(spectra)])
    b = numbers(4, 12, seed=9) * torch.tensor([1.0, 1e3, 1e-3, 0.0])[:, None]
    found = solve(matrix, b)
    for i in range(3):
        alone = solve(matrix[i : i + 1], b[i : i + 1])
        torch.testing.assert_close(found.vector[0][i], alone.vector[0][0], rtol=1e-9, atol=1e-12)
        assert found.low[i].item() == pytest.approx(alone.low.item(), rel=1e-6)
    assert torch.equal(found.vector[0][3], torch.zeros(12, dtype=torch.float64))
    assert found.products <= 14, "no more than the hardest alone, and the true residual"


def test_a_joint_krylov_space_would_take_more_products() -> None:
    spectra = [torch.linspace(0.1 * (i + 1), 1.0, 12) for i in range(4)]
    blocks = [rotated(s, seed) for seed, s in enumerate(spectra)]
    b = numbers(4, 12, seed=9)
    apart = symmetric(torch.stack(blocks), b, tol=1e-8).products
    joint = symmetric(torch.block_diag(*blocks), b.reshape(1, -1), tol=1e-8).products
    assert joint > 1.5 * apart


@each_solver
@pytest.mark.parametrize("scale", [1e-25, 1.0, 1e25])
def test_the_scale_of_the_right_hand_side_does_not_matter(solve: Callable[..., Solution], scale: float) -> None:
    matrix, b = rotated(torch.linspace(0.2, 1.0, 10), seed=0, dtype=torch.float32), numbers(1, 10, seed=1).float()
    found = solve(matrix, b * scale, tol=1e-5)
    want = torch.linalg.solve(matrix, b[0]) * scale
    torch.testing.assert_close(found.vector[0][0] / want, torch.ones(10), rtol=3e-4, atol=0.0)


@each_solver
def test_one_product_suffices_in_one_dimension(solve: Callable[..., Solution]) -> None:
    """Two libraries leave their loop before they store the iterate, and return 0 here."""
    found = solve(torch.tensor([[0.25]], dtype=torch.float64), torch.tensor([[2.0]], dtype=torch.float64))
    assert found.vector[0].item() == 8.0
    assert len(found.history) == 1


@each_solver
def test_a_start_saves_products(solve: Callable[..., Solution]) -> None:
    matrix, b = rotated(torch.logspace(-2, 0, 25), seed=3), numbers(1, 25, seed=4)
    want = torch.linalg.solve(matrix, b[0])[None]
    cold = solve(matrix, b, tol=1e-6)
    warm = solve(matrix, b, [want * (1 + 1e-5)], tol=1e-6)
    assert warm.products < cold.products / 2
    torch.testing.assert_close(warm.vector[0], want, rtol=1e-4, atol=1e-3)
    done = solve(matrix, b, [want], tol=1e-6)
    assert done.products == 1 and done.low.isnan().all()
    assert torch.equal(done.vector[0], want) or torch.allclose(done.vector[0], want, rtol=1e-14)


@each_solver
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("share", [1e-3, 0.9])
def test_the_residual_stalls_at_what_lies_outside_the_range(
    solve: Callable[..., Solution], dtype: torch.dtype, share: float
) -> None:
    spectrum = torch.cat([torch.zeros(8), torch.linspace(0.2, 1.0, 16)]).double()
    vectors, values = torch.linalg.eigh(rotated(spectrum, seed=5))[::-1]
    matrix = rotated(spectrum, seed=5, dtype=dtype)
    inside, outside = vectors[:, 8:] @ numbers(16, seed=6), vectors[:, :8] @ numbers(8, seed=7)
    b = inside / inside.norm() * (1 - share**2) ** 0.5 + outside / outside.norm() * share
    found = solve(matrix, b[None].to(dtype), tol=1e-5)
    assert bool(found.stalled.all())
    assert found.residual.item() == pytest.approx(share, rel=2e-2)
    solution = vectors[:, 8:].T @ found.vector[0][0].double()
    torch.testing.assert_close(solution, (vectors[:, 8:].T @ b) / values[8:], rtol=0.0, atol=5e-3)
    if solve is symmetric:
        assert found.low.item() == pytest.approx(0.2, rel=0.2), "null directions are left out"


@each_solver
def test_a_right_hand_side_that_is_altogether_outside_the_range(solve: Callable[..., Solution]) -> None:
    """A product with it is rounding, in which a solver must not find a direction."""
    generator = torch.Generator().manual_seed(0)
    q, _ = torch.linalg.qr(torch.randn(6, 6, generator=generator, dtype=torch.float64))
    matrix = q[:, :3] @ torch.diag(torch.tensor([1.0, 0.5, 0.2], dtype=torch.float64)) @ q[:, :3].T
    found = solve(matrix, q[:, 4][None])
    assert bool(found.stalled.all()) and found.residual.item() == pytest.approx(1.0)
    assert found.vector[0].norm() < 1e3


@pytest.mark.parametrize("ratio", [1e-3, 1e-5, 1e-8])
def test_small_eigenvalues_are_not_taken_for_zeros(ratio: float) -> None:
    spectrum = torch.cat([torch.full((5,), ratio), torch.linspace(0.3, 1.0, 10)])
    matrix, b = rotated(spectrum, seed=1), numbers(1, 15, seed=2)
    found = symmetric(matrix, b, tol=1e-9)
    assert not found.stalled.any() and found.residual.item() <= 1e-9
    torch.testing.assert_close(found.vector[0][0], torch.linalg.solve(matrix, b[0]), rtol=1e-5, atol=0.0)


def test_negative_eigenvalues_show() -> None:
    matrix, b = rotated(torch.tensor([-0.3, 0.5, 0.8, 1.0], dtype=torch.float64), seed=0), numbers(1, 4, seed=1)
    found = symmetric(matrix, b)
    assert found.low.item() == pytest.approx(-0.3, rel=1e-9) and found.high.item() == pytest.approx(1.0, rel=1e-9)


@pytest.mark.parametrize("solve", [symmetric, general, lambda m, b, **o: neumann(times(m), [b], **o)])
@pytest.mark.parametrize("limit", [1, 3])
def test_without_a_tolerance_exactly_the_limit_is_used(solve: Callable[..., Solution], limit: int) -> None:
    matrix, b = rotated(torch.linspace(0.1, 1.0, 10), seed=0), numbers(1, 10, seed=1)
    found = solve(matrix, b, tol=math.inf, limit=limit)
    assert found.products == limit
    true = (b - found.vector[0] @ matrix).norm() / b.norm()
    assert 0 < true < 1 and not found.vector[0].isnan().any()
    if solve in SOLVERS.values():
        assert found.residual.item() == pytest.approx(true.item(), rel=1e-9)


@pytest.mark.parametrize("solve", [symmetric, general, lambda m, b, s, **o: neumann(times(m), [b], s, **o)])
def test_one_product_at_a_time_gets_there(solve: Callable[..., Solution]) -> None:
    """As with a carried solution: each solve starts where the last one ended."""
    matrix, b = rotated(torch.linspace(0.3, 1.0, 10), seed=0), numbers(1, 10, seed=1)
    start, residuals = None, []
    for _ in range(30):
        found = solve(matrix, b, start, tol=math.inf, limit=1)
        start = found.vector
        residuals.append(float((b - start[0] @ matrix).norm() / b.norm()))
    assert found.products == 2
    assert all(later < earlier for earlier, later in itertools.pairwise(residuals))
    assert residuals[-1] < 1e-3


def test_the_neumann_series_by_hand() -> None:
    matrix, b = rotated(torch.linspace(0.2, 1.5, 7), seed=0), numbers(1, 7, seed=1)
    total, term = b.clone(), b.clone()
    for products in range(1, 6):
        term = term - term @ matrix
        total = total + term
        found = neumann(times(matrix), [b], tol=math.inf, limit=products)
        torch.testing.assert_close(found.vector[0], total, rtol=1e-14, atol=1e-14)
    whole = neumann(times(matrix), [b], tol=1e-12, limit=1000)
    torch.testing.assert_close(whole.vector[0][0], torch.linalg.solve(matrix, b[0]), rtol=1e-10, atol=1e-10)
    assert whole.low.item() == pytest.approx(0.2, rel=1e-3)


def test_a_series_that_diverges_ends() -> None:
    found = neumann(times(torch.eye(3).double() * 3.0), [numbers(1, 3, seed=0)], tol=1e-6, limit=1000)
    assert found.residual.item() >= 1e3 and found.products < 20


@pytest.mark.parametrize("solve", [symmetric, general, lambda m, b: neumann(times(m), [b], tol=1e-6, limit=9)])
def test_what_is_not_finite_stays_so(solve: Callable[..., Solution]) -> None:
    """One library turns NaN into 0."""
    found = solve(torch.full((2, 2), math.nan, dtype=torch.float64), numbers(1, 2, seed=0))
    assert not torch.isfinite(found.residual).any()
    found = solve(torch.eye(2).double(), torch.tensor([[math.nan, 1.0]], dtype=torch.float64))
    assert not torch.isfinite(found.residual).any()


def test_vectors_may_have_several_parts() -> None:
    matrix, b = rotated(torch.linspace(0.2, 1.0, 9), seed=0), numbers(1, 9, seed=1)

    def product(v: Vector) -> Vector:
        whole = torch.cat(v, 1) @ matrix
        return [whole[:, :4], whole[:, 4:]]

    found = minres(product, [b[:, :4], b[:, 4:]], tol=1e-12, limit=50)
    torch.testing.assert_close(torch.cat(found.vector, 1)[0], torch.linalg.solve(matrix, b[0]), rtol=1e-10, atol=1e-10)
