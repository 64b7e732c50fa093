"""An adjoint whose second-order products are central differences of first-order gradients."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

from torch import Tensor

from .._step.step import BDAStep
from .._support.checks import check_count
from .base import Adjoint, Items, Result, as_step, check_adjoint, layers
from .central import Central
from .checkpointed import Checkpointed
from .forward_mode import ForwardMode
from .implicit import Implicit
from .partwise import PartwiseStep
from .unroll import FirstOrder, Truncated


@dataclasses.dataclass(frozen=True)
class Differences:
    r"""Take second-order products as central differences of first-order gradients: for large smooth networks.

    A step :math:`y_{k+1} = S(y_k, x, g)` with :math:`g = \nabla_y f(y_k, x)` is pulled back in two stages. Rule, prox
    and aggregation are differentiated exactly, which gives :math:`v = (\partial S / \partial g)^T \lambda_{k+1}`. The
    derivatives of the gradient are then

    .. math:: \nabla_{(y, x)} \nabla_y f \, v \approx
              \frac{\nabla_{(y, x)} f(y_k + h v, x) - \nabla_{(y, x)} f(y_k - h v, x)}{2 h},

    the same for the upper loss where alpha is not 0. No second derivative is taken, so fused attention,
    `torch.utils.checkpoint` with ``use_reentrant=False`` (also in the returned module) and operations that have none
    (`nn.EmbeddingBag`) are allowed. States are stored as `within` says, each with its gradient. Random numbers are the
    same on both sides.

    h is chosen for each task from the norms of the tensors of y and v, and from the coarsest precision that the loss
    computes in. Relative errors of hypergradients that were measured, on smooth networks and K = 10: 2e-5 to 1e-4 in
    float32 (8e-4 on a GPT-2 at K = 50, where the exact one loses digits, too), 1e-11 to 1e-9 in float64, 5e-3 to 6e-2
    under autocast to bfloat16, where ``scale=0.3`` serves transformers better.

    Not recommended where `Checkpointed()` fits: that one is exact, and takes any loss. This one refuses what it cannot
    do. Losses whose gradient is not that of a function (`detach`, `no_grad`, a straight-through estimator, a gradient
    reversal) raise in the backward pass: once for each loss function and module, products with four random directions
    are compared. Define a loss once, and not anew in every round. (Where a loss detaches, and its gradient is one of a
    function all the same, as with ``c * c.detach()``, the derivative of the step as it is comes out; autograd leaves a
    part of it away.) Operations whose derivative jumps (ReLU, max-pooling,
    abs, clamp, max) are refused by name: errors of 3e-2 to 0.15 were measured with ReLU in float32, 0.3 to 2 with
    max-pooling, and larger ones in float64. A kink that is written as a comparison (`torch.where`) is not seen. There
    is no ``create_graph=True`` and no compiled step.

    Args:
        last: T, the number of steps to differentiate: short for ``Truncated(last=T, within=Differences(...))``. With
            ``last=1`` this is the hypergradient of DARTS.
        within: The adjoint that stores and replays states; ``Unroll()`` stores all of them.
        scale: Multiplies h. If it is given, kinked operations are allowed; large values (30) suit them better.

    References: Liu et al., "DARTS", ICLR 2019, section 2.3.

    >>> import torch
    >>> import bda_optim as bda
    >>> x = torch.tensor(3.0, dtype=torch.float64, requires_grad=True)
    >>> lower = lambda y, x, batch: torch.cosh(y - x)
    >>> y0 = torch.tensor(0.0, dtype=torch.float64)
    >>> def gradient(adjoint):
    ...     return torch.autograd.grad(bda.rollout(lower, None, y0, x, steps=4, lr=0.1, adjoint=adjoint), x)[0]
    >>> exact = gradient(bda.Unroll())
    >>> bool((gradient(bda.Differences()) - exact).abs() < 1e-8 * exact.abs())
    True
    """

    last: int | None = None
    within: Adjoint = dataclasses.field(default_factory=Checkpointed)
    scale: float | None = None
    twice: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Check the options."""
        if self.last is not None:
            object.__setattr__(self, "last", check_count("last", self.last))
        if self.scale is not None and not (
            isinstance(self.scale, int | float) and self.scale > 0 and math.isfinite(self.scale)
        ):
            raise ValueError(f"`scale` must be a positive number or None; got {self.scale!r}.")
        check_adjoint("within", self.within)
        for inside in layers(self.within):
            if isinstance(inside, ForwardMode | FirstOrder | Implicit | Differences):
                raise ValueError(
                    "`Differences` takes the products of adjoints that pull steps back; got "
                    f"within={self.within!r}. Use `Checkpointed(...)` or `Unroll()`."
                )

    def __call__(self, step: Any, state: Any, hyper: tuple[Tensor, ...], items: Items) -> Result:
        """Hand a step to `within` that is pulled back by differences."""
        if self.last is not None:
            return Truncated(self.last, dataclasses.replace(self, last=None))(step, state, hyper, items)
        step = as_step(step)
        if not step.single:
            raise ValueError("compiled steps have exact products only; got compile=True. Use compile=False.")
        products = Central(self.scale)
        return self.within(step.changed(lambda function: _by(products, function)), state, hyper, items)


def _by(products: Central, function: Any) -> PartwiseStep:
    if not isinstance(function, BDAStep):
        raise TypeError(
            f"differences are taken of the gradients of losses; got a step that is {function!r:.80}. Use "
            "`Checkpointed()`."
        )
    return PartwiseStep(function, products)
