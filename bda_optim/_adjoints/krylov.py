"""Linear systems ``A v = b`` by products with A alone: MINRES, GMRES and the Neumann series.

What is returned is the last iterate with its residual; whether that is good enough is for the caller to say.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .linear_solve import Product, Solution, Solve, Vector, combined, dot, inverse, norm, scaled

RESTART = 30
"""How many basis vectors GMRES keeps."""


def minres(product: Product, b: Vector, start: Vector | None = None, *, tol: float, limit: int) -> Solution:
    """Minimise ``|b - A v|`` over Krylov spaces of a symmetric A, which may be singular.

    On a singular A the iterates of conjugate gradients grow without bound; the residual of MINRES stalls at the part
    of b outside the range of A. A solve ends when the true residual is at most `tol`, when it stalls, which means that
    the Rayleigh quotient of the residual vanishes, ``r^T A r <= eps^(2/3) |A| |r|^2``, or at the limit. An infinite
    `tol` takes exactly `limit` products, unless the residual stalls or vanishes.

    Reference: Paige & Saunders, "Solution of sparse indefinite systems of linear equations", SIAM J. Numer. Anal. 1975.

    Args:
        product: ``v -> A v``.
        b: The right-hand side.
        start: Where the iteration starts; 0 by default. To start elsewhere costs one product, which does not count.
        tol: The largest relative residual that is good enough.
        limit: The largest number of products; one more may compute the true residual.

    Returns:
        The last iterate and what is known of it.

    >>> a = torch.diag(torch.tensor([1.0, 2.0, 0.0], dtype=torch.float64))
    >>> b = torch.tensor([[1.0, 4.0, 0.0]], dtype=torch.float64)
    >>> solution = minres(lambda v: [v[0] @ a], [b], tol=1e-9, limit=9)
    >>> solution.vector[0].tolist(), solution.low.item(), solution.high.item()
    ([[1.0, 2.0, 0.0]], 1.0, 2.0)
    """
    solve = Solve(product, b, start, tol, limit)
    while bool(solve.open.any()) and solve.left > 0:
        _lanczos_cycle(solve)
        if math.isinf(tol) and solve.left <= 0:
            break
        solve.verify()
        if bool(solve.open.any()):
            solve.judge_symmetric()
    return solve.solution()


def gmres(
    product: Product,
    b: Vector,
    start: Vector | None = None,
    *,
    tol: float,
    limit: int,
    transposed: Product,
    restart: int = RESTART,
) -> Solution:
    """Minimise ``|b - A v|`` over Krylov spaces of any A, from a new start every `restart` products.

    Whether a residual stalls, ``|A^T r| <= sqrt(eps) |A| |r|``, is looked at before each new start.

    Not recommended for a symmetric A, because it keeps `restart` vectors where MINRES keeps three.

    Reference: Saad & Schultz, "GMRES: a generalized minimal residual algorithm", SIAM J. Sci. Stat. Comput. 1986.

    Args:
        product: ``v -> A v``.
        b: The right-hand side.
        start: Where the iteration starts; 0 by default. To start elsewhere costs one product, which does not count.
        tol: The largest relative residual that is good enough.
        limit: The largest number of products; more may compute true residuals and look at stalls.
        transposed: ``v -> A^T v``.
        restart: The largest number of basis vectors.

    Returns:
        The last iterate and what is known of it.
    """
    solve = Solve(product, b, start, tol, limit)
    progress = solve.open
    while bool((solve.open & progress).any()) and solve.left > 0:
        before = solve.residual
        x = solve.x
        _arnoldi_cycle(solve, restart)
        if math.isinf(tol) and solve.left <= 0:
            break
        solve.verify()
        progress = solve.residual < 0.99 * before
        solve.keep(solve.residual <= before, x)
        if bool(solve.open.any()):
            solve.judge(transposed, progress)
    return solve.solution()


def neumann(product: Product, b: Vector, start: Vector | None = None, *, tol: float, limit: int) -> Solution:
    r"""Sum the series ``v = sum_j (I - A)^j b``; after N products it has N + 1 terms.

    .. math:: r_{j+1} = r_j - A r_j, \quad v_{j+1} = v_j + r_j

    Not recommended, because it takes about 1 / low products, where MINRES takes the square root of that, and because
    it diverges where A has an eigenvalue beyond 2; a residual that grows beyond 1e3 ends it.

    Reference: Lorraine et al., "Optimizing millions of hyperparameters by implicit differentiation", AISTATS 2020.

    Args:
        product: ``v -> A v``.
        b: The right-hand side.
        start: Where the iteration starts; 0 by default. To start elsewhere costs one product, which does not count.
        tol: The largest relative residual that is good enough; infinite for exactly `limit` products.
        limit: The largest number of products.

    Returns:
        The last iterate; its residual is that of the iterate before it, which is not smaller where the series
        converges.
    """
    solve = Solve(product, b, start, tol, limit)
    ones = torch.ones_like(solve.residual)
    solve.x = combined(solve.x, solve.remainder, ones)
    while bool(solve.open.any()) and solve.left > 0:
        active = solve.open.double()
        before = solve.residual
        solve.remainder = combined(solve.remainder, solve.product(solve.remainder), -active)
        solve.residual = norm(solve.remainder)
        solve.x = combined(solve.x, solve.remainder, active)
        solve.history.append(float(solve.residual.max()))
        shrink = torch.where(active > 0, 1 - solve.residual / before, math.inf)
        solve.low = torch.where(shrink < math.inf, shrink, solve.low)
        if not bool((solve.residual < 1e3).all()):
            break
    return solve.solution()


def _lanczos_cycle(solve: Solve) -> None:
    """Run MINRES from the iterate of a solve, whose residual is known: QR of the tridiagonal matrix by rotations."""
    worked = active = solve.open
    zero = torch.zeros_like(solve.residual)
    phibar = solve.residual
    lanczos = _Lanczos(solve, scaled(solve.remainder, inverse(phibar) * active))
    w, w_old = ([torch.zeros_like(t) for t in lanczos.v] for _ in range(2))
    cos = zero - 1
    sin = dbar = epsilon = first = zero
    while bool(active.any()) and solve.left > 0:
        alpha, beta = lanczos.multiply(active)
        delta = cos * dbar + sin * alpha
        gbar = sin * dbar - cos * alpha
        dbar = -cos * beta
        slope = torch.sqrt(gbar**2 + dbar**2)  # |A r| / |r| of the residual before this product
        if len(lanczos.diagonal) == 1:
            first = slope
            active = active & ~_null_from_the_start(solve, slope, active)
        # Where A is singular, gamma vanishes with the slope, and further steps would run away in the null space.
        active = active & ((slope > solve.loss * first) | (slope == first))
        gamma = torch.where(active, torch.sqrt(gbar**2 + beta**2), 1.0)
        direction = scaled(combined(combined(lanczos.v, w_old, -epsilon), w, -delta), 1 / gamma)
        w_old = w
        w = direction
        epsilon = sin * beta
        cos = gbar / gamma
        sin = beta / gamma
        solve.x = combined(solve.x, w, torch.where(active, cos * phibar, zero))
        phibar = torch.where(active, sin * phibar, phibar)
        solve.residual = phibar
        solve.history.append(float(phibar.max()))
        active = active & solve.open
        lanczos.advance(torch.where(active, beta, zero))
    values = lanczos.ritz_values()
    solve.note(values, worked[:, None] & (values.abs() > solve.flat * solve.size[:, None]))


class _Lanczos:
    """Orthonormal vectors v with ``A V = V T``, T tridiagonal; each costs a product.

    Args:
        solve: Counts the products, and learns the size of A.
        v: The first vector.
    """

    def __init__(self, solve: Solve, v: Vector) -> None:
        self._solve = solve
        self._before = [torch.zeros_like(t) for t in v]
        self._beta = torch.zeros_like(solve.residual)
        self._next: Vector = []
        self.v = v
        self.diagonal: list[Tensor] = []
        self._beside: list[Tensor] = []

    def multiply(self, active: Tensor) -> tuple[Tensor, Tensor]:
        """Multiply v by A; return the entry of T on the diagonal, and the one below it."""
        p = self._solve.product(self.v)
        alpha = dot(self.v, p)
        self._next = combined(combined(p, self.v, -alpha), self._before, -self._beta)
        below = norm(self._next)
        size = torch.sqrt(alpha**2 + self._beta**2 + below**2)
        self._solve.size = torch.maximum(self._solve.size, size)
        # A system that is done gets its first entry again, which adds no eigenvalue outside of the others.
        self.diagonal.append(torch.where(active, alpha, self.diagonal[0] if self.diagonal else alpha))
        self._beside.append(torch.where(active, self._beta, 0.0))
        return alpha, below

    def advance(self, beta: Tensor) -> None:
        """Go on to the next vector, whose norm was `beta`; 0 for a system that is done."""
        self._before = self.v
        self.v = scaled(self._next, inverse(beta))
        self._beta = beta

    def ritz_values(self) -> Tensor:
        """Return the eigenvalues of T, NaN if it is not finite."""
        matrix = torch.diag_embed(torch.stack(self.diagonal, 1))
        beside = torch.stack(self._beside[1:], 1) if len(self._beside) > 1 else matrix[:, 0, :0]
        matrix = matrix + torch.diag_embed(beside, 1) + torch.diag_embed(beside, -1)
        if not bool(torch.isfinite(matrix).all()):
            return torch.full_like(matrix[:, 0], math.nan)
        values: Tensor = torch.linalg.eigvalsh(matrix)
        return values


def _null_from_the_start(solve: Solve, slope: Tensor, active: Tensor) -> Tensor:
    """Note and return which residuals lie in the null space altogether, so that they say nothing of the size of A."""
    if bool((active & (slope <= 1e-6)).any()):
        solve.probe()
    null = active & (slope <= 10 * solve.rounding * solve.size)
    solve.stalled |= null
    return null


def _arnoldi_cycle(solve: Solve, restart: int) -> None:
    """Run GMRES from the iterate of a solve, whose residual is known."""
    worked = solve.open
    start = solve.residual
    basis = [scaled(solve.remainder, inverse(start) * worked)]
    steps = min(restart, solve.left)
    columns = torch.zeros(len(start), steps + 1, steps, dtype=torch.float64, device=start.device)
    for k in range(steps):
        p = solve.product(basis[k])
        solve.size = torch.maximum(solve.size, norm(p))
        if k == 0:
            _null_from_the_start(solve, norm(p), worked)
        for _ in range(2):  # orthogonalised twice: once is not enough where A is nearly singular
            for j, v in enumerate(basis):
                share = dot(v, p)
                columns[:, j, k] += share
                p = combined(p, v, -share)
        length = norm(p)
        columns[:, k + 1, k] = length = torch.where(length > 10 * solve.rounding * solve.size, length, 0.0)
        basis.append(scaled(p, inverse(length)))
        square = columns[:, : k + 2, : k + 1]
        if not bool(torch.isfinite(square).all()):
            solve.residual = torch.full_like(start, math.nan)
            return
        weights, values, residual = _least_squares(square, start, 10 * solve.rounding * solve.size)
        solve.residual = torch.where(worked, residual, start)
        solve.history.append(float(solve.residual.max()))
        if not bool((solve.open & (length > 0)).any()):
            break
    for j in range(weights.shape[1]):
        solve.x = combined(solve.x, basis[j], weights[:, j])
    solve.note(values, worked[:, None] & (values > solve.flat * solve.size[:, None]))


def _least_squares(matrix: Tensor, first: Tensor, null: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Minimise ``|first e_1 - matrix w|``, leaving out singular values up to `null`; return w, them and the minimum."""
    u, values, vh = torch.linalg.svd(matrix, full_matrices=False)
    kept = values > null[:, None]
    inside = torch.where(kept, u[:, 0] * first[:, None], 0.0)
    weights = torch.einsum("bji,bj->bi", vh, inside * inverse(torch.where(kept, values, 0.0)))
    rest = -torch.einsum("bji,bi->bj", matrix, weights)
    rest[:, 0] += first
    return weights, values, torch.linalg.vector_norm(rest, dim=1)
