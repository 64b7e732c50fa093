"""The soft threshold of the singular values of a matrix, with derivatives of every order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor


def shrink_singular_values(y: Tensor, threshold: Tensor) -> Tensor:
    """Shrink the singular values of a matrix with no more rows than columns.

    With B = Y Y^T and t the threshold, prox(Y) = Y - t max(B, t^2)^{-1/2} Y, where 2 max(B, t^2) = B + t^2 + |B - t^2|
    and |M| = (M^2)^{1/2}. So the derivatives of square roots suffice. Those of singular vectors, which do not exist
    where singular values coincide, are not needed. In the basis U all these matrices are diagonal, with values known
    from sigma, so squaring costs no accuracy.
    """
    basis, sigma, _ = torch.linalg.svd(y.detach(), full_matrices=False)
    # The map is homogeneous: a constant scale keeps the squares in range.
    scale = torch.maximum(sigma.amax(), threshold.detach()).clamp(min=torch.finfo(y.dtype).tiny)
    rows = basis.mT @ y / scale
    t = threshold / scale
    sigma = sigma / scale
    low = t.detach()
    eye = torch.eye(sigma.shape[0], dtype=y.dtype, device=y.device)
    larger = torch.where((sigma == 0) & (low <= 0), 1.0, torch.maximum(sigma, low))
    gram = rows @ rows.mT
    gram = torch.diag_embed(sigma.square()) + (gram - gram.detach())  # its derivatives, without its rounding errors
    gap = gram - t.square() * eye
    distance = _lyapunov(gap @ gap, (sigma.square() - low.square()).abs(), None)
    root = _lyapunov((gram + t.square() * eye + distance) / 2, larger, None)
    kept = torch.where(sigma < low, 0.0, 1 - low / larger)
    weight = eye - t * torch.linalg.inv_ex(root).inverse
    weight = torch.diag_embed(kept) + (weight - weight.detach())
    return torch.mul(basis @ (weight @ rows), scale)


class _Lyapunov(torch.autograd.Function):
    """Returns the X with A X + X A = R, or without A the X with X X = R.

    A, or that X, is diagonal with the given eigenvalues. The derivatives, to every order, are such solutions again.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(right: Tensor, eigenvalues: Tensor, matrix: Tensor | None) -> Tensor:
        if matrix is None:
            return torch.diag_embed(eigenvalues)
        pairs = eigenvalues.unsqueeze(-1) + eigenvalues.unsqueeze(-2)  # 0 only at a kink
        return torch.where(pairs == 0, 0.0, right / torch.where(pairs == 0, 1.0, pairs))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(output, *inputs[1:])
        ctx.save_for_forward(output, *inputs[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        solution, eigenvalues, matrix = ctx.saved_tensors
        right = _lyapunov(grad, eigenvalues, solution if matrix is None else matrix)
        return right, None, None if matrix is None else -(right @ solution.mT + solution.mT @ right)

    @staticmethod
    def jvp(ctx: Any, right: Tensor, _: None, change: Tensor | None) -> Tensor:
        solution, eigenvalues, matrix = ctx.saved_tensors
        right = right if change is None else right - change @ solution - solution @ change
        return _lyapunov(right, eigenvalues, solution if matrix is None else matrix)


_lyapunov = cast("Callable[[Tensor, Tensor, Tensor | None], Tensor]", _Lyapunov.apply)
