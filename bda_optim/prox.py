r"""Proximal maps of the lower level's nonsmooth term g; users see them as ``bda_optim.prox``.

.. math:: \mathrm{prox}_{s g}(y) = \arg\min_z\ s\,g(z) + \tfrac12 \|z - y\|^2

(Parikh & Boyd, "Proximal Algorithms", Foundations and Trends in Optimization 1(3), 2014.) The lower objective is
h = f + g with a smooth f; the lower direction is d^h = y - prox(y - s_l grad f(y)), the step being s_l. In the paper's
nonsmooth appendix a_k stands before d^h. That is a slip: with a_k -> 0 the upper level would win, and the stated limit
would not hold. Here the vanishing weight belongs to the upper level, with a prox and without.

With alpha > 0, y_K itself is **neither sparse nor feasible**, because the upper direction is added after the prox. The
paper's y~ = prox(y_K - s_l grad f(y_K)) is: read supports and ranks from that.

Every map is a frozen dataclass that is called as ``prox(y, step, hyper)``, tensor by tensor:

- `step` is the rate: a number or a tensor with one element; for a `separable` map also a tensor that broadcasts to y,
  with one rate per element. Projections do not depend on it.
- A strength is a number, a tensor (of such a shape again: one strength per feature, say), or a function of `hyper` that
  returns either. Numbers are checked; the values of tensors are not, since that would wait for the device: keep a
  learned strength positive by ``exp`` or ``softplus``.
- Gradients flow into y, the rate and the strengths. At a kink the derivative is a limit of nearby derivatives or a mean
  of such limits, never NaN or infinite.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Any, ClassVar, TypeAlias, cast

import torch
from torch import Tensor

from ._support.types import Scalar

__all__ = [
    "NO_HYPER", "box", "elastic_net", "group_lasso", "l1", "l1_ball", "l2_ball", "nonnegative", "nuclear", "simplex",
]  # fmt: skip

_Strength: TypeAlias = float | Tensor | Callable[[Any], Scalar]


class NO_HYPER:
    """Stands, itself, for the `hyper` of an inner loop that has none; None is a hyper like any other."""


@dataclass(frozen=True, eq=False)
class _Prox:
    """What the maps share. Equal are maps with equal numbers and the same tensors and functions."""

    separable: ClassVar[bool] = True  # each element is treated alone

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            self._check(name, value)

    def __call__(self, y: Tensor, step: Scalar, hyper: Any = NO_HYPER) -> Tensor:
        """Return the proximal point of `y`, of the same shape and type."""
        if not y.is_floating_point():
            raise TypeError(f"`{type(self).__name__}` needs a real floating-point tensor; got {y.dtype}. Convert it.")
        if y.numel() == 0:
            return y
        wide = y if self.separable else y.to(torch.promote_types(y.dtype, torch.float32))  # 16 bits are no use in sums
        return self._point(wide, self._fit("the rate", step, wide), hyper).to(y.dtype)

    def _point(self, y: Tensor, step: Any, hyper: Any) -> Tensor:
        raise NotImplementedError

    def _strength(self, name: str, y: Tensor, hyper: Any) -> Any:
        value = getattr(self, name)
        if callable(value) and not isinstance(value, Tensor):
            if hyper is NO_HYPER:
                raise ValueError(
                    f"`{name}` of `{type(self).__name__}` is a function of hyper; got an inner loop that has none. Use "
                    "`unroll(...)` or `hypergradient(...)` with `hyper=`, or pass a tensor instead of the function."
                )
            value = value(hyper)
            self._check(name, value)
        return self._fit(f"`{name}`", value, y)

    def _fit(self, what: str, value: Scalar, y: Tensor) -> Scalar:
        """Return a number or a tensor of y's type that broadcasts to y; a 0-dim tensor if the map is not separable."""
        if not isinstance(value, Tensor):
            return value if self.separable else y.new_full((), value)
        if value.numel() == 1:
            return value.reshape(()).to(y.dtype)
        allowed = f"broadcast to {tuple(y.shape)}" if self.separable else "have one element (it is not separable)"
        sizes = zip(reversed(value.shape), reversed(y.shape), strict=False)
        if not self.separable or value.dim() > y.dim() or any(size not in (1, full) for size, full in sizes):
            what = f"{what} of `{type(self).__name__}` must {allowed}; got the shape {tuple(value.shape)}"
            raise ValueError(f"{what}. Use a scalar, or a separable map such as `l1`.")
        return value.to(y.dtype)

    def _check(self, name: str, value: Any) -> None:
        what = f"`{name}` of `{type(self).__name__}`"
        if not isinstance(value, Tensor | Real) and not callable(value):
            raise TypeError(f"{what} must be a number, a tensor or a function of hyper; got {value!r}. Use a number.")
        if isinstance(value, Real) and not 0 <= float(value) < math.inf:
            raise ValueError(f"{what} must be finite and not negative; got {value}. Use a number >= 0.")

    def _key(self) -> tuple[Any, ...]:
        return type(self), *(("tensor", id(v)) if isinstance(v, Tensor) else v for v in vars(self).values())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Prox) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())


@dataclass(frozen=True, eq=False)
class l1(_Prox):
    r"""Soft threshold: sparse solutions (Parikh & Boyd 2014, section 6.5.2).

    .. math:: g(y) = s \|y\|_1, \qquad \mathrm{prox}(y)_i = \mathrm{sign}(y_i) \max(|y_i| - \mathrm{step}\, s,\ 0)

    Args:
        s: The strength.

    >>> l1(lambda hyper: hyper.exp())(torch.tensor([2.0, -0.3]), step=0.5, hyper=torch.tensor(0.0))
    tensor([1.5000, 0.0000])
    """

    s: _Strength

    def _point(self, y: Tensor, step: Any, hyper: Any) -> Tensor:
        return _soft(y, step * self._strength("s", y, hyper))


@dataclass(frozen=True, eq=False)
class elastic_net(_Prox):
    r"""Soft threshold, then shrinkage: prox = soft(y, step l1) / (1 + step l2) (Parikh & Boyd 2014, section 6.5.3).

    .. math:: g(y) = l_1 \|y\|_1 + \tfrac{l_2}{2} \|y\|^2

    Args:
        l1: The strength of the absolute values.
        l2: The strength of the squares.

    >>> elastic_net(0.5, 2.0)(torch.tensor([2.0, -0.3]), step=1.0)
    tensor([0.5000, 0.0000])
    """

    l1: _Strength
    l2: _Strength

    def _point(self, y: Tensor, step: Any, hyper: Any) -> Tensor:
        return _soft(y, step * self._strength("l1", y, hyper)).div(1 + step * self._strength("l2", y, hyper))


@dataclass(frozen=True, eq=False)
class group_lasso(_Prox):
    r"""Shrink the norm of each group: whole groups vanish (Yuan & Lin, J. R. Stat. Soc. B 68, 2006).

    .. math:: g(y) = s \sum_G \|y_G\|_2, \qquad \mathrm{prox}(y)_G = \max(1 - \mathrm{step}\, s / \|y_G\|,\ 0)\; y_G

    Args:
        s: The strength.
        dim: One group per index of this dimension. In the weight of a linear layer 0 groups the outputs, 1 the inputs.

    >>> group_lasso(1.0)(torch.tensor([[3.0, 4.0]]), step=1.0)
    tensor([[2.4000, 3.2000]])
    """

    separable = False
    s: _Strength
    dim: int = 0

    def __post_init__(self) -> None:
        self._check("s", self.s)

    def _point(self, y: Tensor, step: Any, hyper: Any) -> Tensor:
        if not isinstance(self.dim, int) or not -y.dim() <= self.dim < y.dim():
            raise ValueError(f"`dim` must be one dimension of {tuple(y.shape)}; got {self.dim}. Use another group.")
        threshold = step * self._strength("s", y, hyper)
        norm = _norm(y.movedim(self.dim, -1).reshape(-1, y.shape[self.dim]).mT)
        norm = norm.reshape([-1 if d == self.dim % y.dim() else 1 for d in range(y.dim())])
        gone = norm < threshold
        return torch.where(gone, 0.0, y * (1 - threshold / torch.where(gone | (norm == 0), 1.0, norm)))


@dataclass(frozen=True, eq=False)
class nuclear(_Prox):
    r"""Soft threshold of the singular values: matrices of low rank (Cai, Candès & Shen, SIAM J. Optim. 20, 2010).

    .. math:: g(Y) = s \sum_i \sigma_i, \qquad \mathrm{prox}(U \Sigma V^\top) = U (\Sigma - \mathrm{step}\, s)_+ V^\top

    Derivatives of every order are right, also where singular values coincide or are zero; at a singular value equal to
    the threshold the first one is the mean of both sides. A tensor of more than two dimensions counts as the matrix
    ``reshape(shape[0], -1)``. On CUDA the decomposition itself waits for the device.

    Args:
        s: The strength.

    >>> nuclear(1.0)(torch.ones(1, 4), step=1.0)
    tensor([[0.5000, 0.5000, 0.5000, 0.5000]])
    """

    separable = False
    s: _Strength

    def __new__(cls, *_: Any, **__: Any) -> nuclear:
        """Hide the map from torch.compile."""
        # Inlined by torch.compile (2.13), `_shrink` loses tangents, in silence. Not done on import: that takes 1.3 s.
        if not torch.compiler.is_dynamo_compiling():
            torch.compiler.allow_in_graph(_shrink)
        return super().__new__(cls)

    def _point(self, y: Tensor, step: Any, hyper: Any) -> Tensor:
        if y.dim() < 2:
            raise ValueError(f"`nuclear` needs two dimensions or more; got {tuple(y.shape)}. Use another group.")
        matrix, threshold = y.reshape(y.shape[0], -1), step * self._strength("s", y, hyper)
        tall = matrix.shape[0] > matrix.shape[1]
        return (_shrink(matrix.mT, threshold).mT if tall else _shrink(matrix, threshold)).reshape(y.shape)


@dataclass(frozen=True, eq=False)
class nonnegative(_Prox):
    r"""Projection on :math:`y \ge 0`.

    >>> nonnegative()(torch.tensor([2.0, -0.3]), step=1.0)
    tensor([2., 0.])
    """

    def _point(self, y: Tensor, step: Any, hyper: Any) -> Tensor:
        return torch.where(y < 0, 0.0, y)


@dataclass(frozen=True, eq=False)
class box(_Prox):
    r"""Projection on :math:`\mathrm{low} \le y \le \mathrm{high}`.

    Args:
        low: The lower bound, may be ``-inf``.
        high: The upper bound, may be ``inf``.

    >>> box(-1.0, 1.0)(torch.tensor([2.0, -0.3]), step=1.0)
    tensor([ 1.0000, -0.3000])
    """

    low: _Strength
    high: _Strength

    def __post_init__(self) -> None:
        super().__post_init__()
        low, high = (bound if isinstance(bound, Real) else math.nan for bound in (self.low, self.high))
        if float(low) > float(high):
            raise ValueError(f"`low` of `box` must not exceed `high`; got {self.low} > {self.high}. Exchange them.")

    def _check(self, name: str, value: Any) -> None:
        if not isinstance(value, Real) or math.isnan(value):
            super()._check(name, value)

    def _point(self, y: Tensor, step: Any, hyper: Any) -> Tensor:
        low, high = self._strength("low", y, hyper), self._strength("high", y, hyper)
        return torch.where(y < low, low, torch.where((y > high) | (low >= high), high, y))


@dataclass(frozen=True, eq=False)
class l2_ball(_Prox):
    r"""Projection of the whole tensor on :math:`\|y\|_2 \le r`, which is :math:`y \min(1,\ r / \|y\|_2)`.

    Args:
        r: The radius.

    >>> l2_ball(1.0)(torch.tensor([3.0, 4.0]), step=1.0)
    tensor([0.6000, 0.8000])
    """

    separable = False
    r: _Strength

    def _point(self, y: Tensor, step: Any, hyper: Any) -> Tensor:
        radius, norm = self._strength("r", y, hyper), _norm(y.reshape(-1)).reshape(())
        inside = norm < radius
        return torch.where(inside, y, y * (radius / torch.where(inside | (norm == 0), 1.0, norm)))


@dataclass(frozen=True, eq=False)
class l1_ball(_Prox):
    r"""Projection of the whole tensor on :math:`\|y\|_1 \le r` (Duchi et al., ICML 2008).

    .. math:: \mathrm{prox}(y)_i = \mathrm{sign}(y_i) \max(|y_i| - \theta,\ 0), \qquad \theta \ge 0 \text{ minimal}

    Args:
        r: The radius.

    >>> l1_ball(1.0)(torch.tensor([2.0, -1.5, 0.1]), step=1.0)
    tensor([ 0.7500, -0.2500,  0.0000])
    """

    separable = False
    r: _Strength

    def _point(self, y: Tensor, step: Any, hyper: Any) -> Tensor:
        level, point = _waterline(y.abs().reshape(-1), self._strength("r", y, hyper))
        return torch.where(level < 0, y, y.sign() * point.reshape(y.shape))


@dataclass(frozen=True, eq=False)
class simplex(_Prox):
    r"""Projection of the whole tensor on :math:`y \ge 0,\ \sum_i y_i = \mathrm{total}` (Duchi et al., ICML 2008).

    .. math:: \mathrm{prox}(y)_i = \max(y_i - \theta,\ 0), \qquad \theta \text{ such that the sum is right}

    Args:
        total: The sum.

    >>> simplex()(torch.tensor([2.0, 1.5, 0.1]), step=1.0)
    tensor([0.7500, 0.2500, 0.0000])
    """

    separable = False
    total: _Strength = 1.0

    def _point(self, y: Tensor, step: Any, hyper: Any) -> Tensor:
        # A common shift changes neither point nor derivative; without it large elements would swallow the total.
        shifted = (y - y.detach().amax()).reshape(-1)
        return _waterline(shifted, self._strength("total", y, hyper))[1].reshape(y.shape)


def _soft(y: Tensor, threshold: Scalar) -> Tensor:
    # So written, NaN stays NaN, and a threshold of 0 is the identity at y = 0 too, with derivative 1.
    return torch.where(y.abs() < threshold, 0.0, y - threshold * y.sign())


def _norm(rows: Tensor) -> Tensor:
    """Return the Euclidean norms over the last dimension, which is kept; the derivatives at 0 are 0, to every order."""
    scale = rows.detach().abs().amax(-1, keepdim=True)  # the norm is homogeneous: so no square can underflow
    square = (rows / torch.where(scale == 0, 1.0, scale)).square().sum(-1, keepdim=True)
    return scale * torch.where(scale == 0, 1.0, square).sqrt()


def _waterline(v: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """Return theta with sum(max(v - theta, 0)) = total, and max(v - theta, 0); differentiated with a fixed support."""
    top = v.detach().sort(descending=True).values
    rank = torch.arange(1, v.numel() + 1, dtype=v.dtype, device=v.device)
    count = (top * rank > top.cumsum(0) - total.detach()).sum().clamp(min=1)
    active = ~(v < top.gather(0, count.reshape(1) - 1))  # so written, NaN is active, and spreads
    count = active.sum()
    level = (torch.where(active, v, 0.0).sum() - total) / count
    # Where the total is 0 the set is one point, whatever v is.
    return level, torch.where(active, torch.where(total > 0, (v - level).clamp(min=0), total / count), 0.0)


def _shrink(y: Tensor, threshold: Tensor) -> Tensor:
    """Shrink the singular values of a matrix with no more rows than columns.

    With B = Y Y^T and t the threshold, prox(Y) = Y - t max(B, t^2)^{-1/2} Y, where 2 max(B, t^2) = B + t^2 + |B - t^2|
    and |M| = (M^2)^{1/2}. So the derivatives of square roots suffice; singular vectors have none where singular values
    coincide. In the basis U all these matrices are diagonal, with values known from sigma: squaring costs no accuracy.
    """
    basis, sigma, _ = torch.linalg.svd(y.detach(), full_matrices=False)
    # The map is homogeneous: a constant scale keeps the squares in range.
    scale = torch.maximum(sigma.amax(), threshold.detach()).clamp(min=torch.finfo(y.dtype).tiny)
    rows, t, sigma = basis.mT @ y / scale, threshold / scale, sigma / scale
    low, eye = t.detach(), torch.eye(sigma.shape[0], dtype=y.dtype, device=y.device)
    larger = torch.where((sigma == 0) & (low <= 0), 1.0, torch.maximum(sigma, low))
    gram = rows @ rows.mT
    gram = torch.diag_embed(sigma.square()) + (gram - gram.detach())  # its derivatives, but not its rounding
    gap = gram - t.square() * eye
    distance = _lyapunov(gap @ gap, (sigma.square() - low.square()).abs(), None)
    root = _lyapunov((gram + t.square() * eye + distance) / 2, larger, None)
    kept = torch.where(sigma < low, 0.0, 1 - low / larger)
    weight = eye - t * torch.linalg.inv_ex(root).inverse
    weight = torch.diag_embed(kept) + (weight - weight.detach())
    return torch.mul(basis @ (weight @ rows), scale)


class _Lyapunov(torch.autograd.Function):
    """The X with A X + X A = R, or without A the X with X X = R; A, or that X, is diagonal, with these eigenvalues."""

    generate_vmap_rule = True  # and the derivatives, to every order, are such solutions again

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
