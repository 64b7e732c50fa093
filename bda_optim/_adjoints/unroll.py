"""Adjoints that let autograd record the steps: all of them, the last ones, or their first-order part.

| adjoint | hypergradient | steps evaluated | memory | choose it |
|---|---|---|---|---|
| `Unroll()` | exact | K | K graphs | by default, while memory suffices |
| `Checkpointed()` | exact | 2 K | that of about 2.1 sqrt(K) states | for long K |
| `Checkpointed(slots=s)` | exact | K + t(K, s) | s states | for very long K |
| `ForwardMode()` | exact | K | P states | for a handful (P) of upper scalars and any K |
| `Truncated(last=T)` | biased | K | T graphs | where old steps matter little |
| `Differences()` | nearly | 2 K, 2 gradients each | as `Checkpointed()`, no double graph | for large smooth networks |
| `Implicit()` | of the fixed point | K + 1 | 1 graph | where the loop has converged, or alpha > 0 |
| `FirstOrder()` | biased | K | K small graphs | first-order MAML |
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from .._support import autograd_graph
from .._support.checks import check_count
from .._support.tensors import any_requires_grad
from .._support.tree import detach, tensors
from .base import Adjoint, Items, Result, as_step, check_adjoint
from .implicit import Implicit
from .node import replayed


@dataclasses.dataclass(frozen=True)
class Unroll:
    """Let autograd record every step: exact, simple, and the memory of K graphs.

    Tensors that a loss captures by closure are differentiated too, as autograd does.

    >>> x = torch.tensor(3.0, requires_grad=True)
    >>> y, _ = Unroll()(lambda y, x, k: (x[0] * y, None), torch.ones(()), (x,), [1, 2])
    >>> y
    tensor(9., grad_fn=<MulBackward0>)
    """

    def __call__(self, step: Any, state: Any, hyper: tuple[Tensor, ...], items: Items) -> Result:
        """Run the loop in the caller's grad mode; steps that autograd cannot record are pulled back one by one."""
        step = as_step(step)
        items = step.units(items, joined=True)
        if not step.taped and any_requires_grad((state, hyper)):
            return replayed(step, state, hyper, items, starts=range(len(items)), record=True)
        records = []
        take = step.function
        for number, item in enumerate(items):
            state, record = take(state, hyper, item)
            records.append(record)
            if number == 0 and torch.is_grad_enabled():
                autograd_graph.refuse_once_differentiable(tensors(state))
        return state, records


@dataclasses.dataclass(frozen=True)
class FirstOrder:
    """Treat the inner gradients as constants: no second derivatives are taken (first-order MAML).

    Not recommended for hyper-parameters that act through the lower loss only: their gradient is zero. What remains are
    the derivatives of the update itself: with respect to the initial parameters (the identity, for plain SGD), to the
    rates, to alpha and to the strength of a prox.

    Reference: Finn et al., "Model-Agnostic Meta-Learning", ICML 2017, section 5.2.

    >>> import bda_optim as bda
    >>> y0 = torch.tensor(1.0, requires_grad=True)
    >>> y = bda.rollout(lambda y, x, b: 0.5 * y**2, None, y0, steps=3, lr=0.5, adjoint=bda.FirstOrder())
    >>> torch.autograd.grad(y, y0)[0]  # the exact derivative is 0.5 ** 3
    tensor(1.)
    """

    def __call__(self, step: Any, state: Any, hyper: tuple[Tensor, ...], items: Items) -> Result:
        """Unroll the step with constant gradients."""
        return Unroll()(as_step(step).first_order(), state, hyper, items)


@dataclasses.dataclass(frozen=True)
class Truncated:
    r"""Differentiate the last T of K steps only; the first K - T run without a graph.

    The state after step K - T counts as a constant, so the hypergradient is that of the last T steps,

    .. math:: \frac{d y_K}{dx} \approx \sum_{k > K - T} \Big( \prod_{j > k} \partial_y S_j \Big) \partial_x S_k .

    It lacks what the first steps would have contributed, which fades as the lower level contracts. k runs on across
    the cut.

    Reference: Shaban et al., "Truncated Back-propagation for Bilevel Optimization", AISTATS 2019.

    Args:
        last: T, the number of steps to differentiate; all of them if T >= K.
        within: The adjoint of those steps.

    >>> import bda_optim as bda
    >>> x = torch.tensor(3.0, requires_grad=True)
    >>> lower = lambda y, x, batch: 0.5 * (y - x) ** 2
    >>> y = bda.rollout(lower, None, torch.tensor(0.0), x, steps=4, lr=0.5, adjoint=bda.Truncated(last=2))
    >>> torch.autograd.grad(y, x)[0]  # 1 - 0.5 ** 2 instead of 1 - 0.5 ** 4
    tensor(0.7500)
    """

    last: int
    within: Adjoint = Unroll()

    def __post_init__(self) -> None:
        """Check the options."""
        object.__setattr__(self, "last", check_count("last", self.last))
        check_adjoint("within", self.within)
        if isinstance(self.within, Implicit):
            raise ValueError(
                "`Implicit` differentiates the fixed point and no step, so that there is nothing to truncate; got "
                f"within={self.within!r}. Use `Implicit()` alone."
            )

    def __call__(self, step: Any, state: Any, hyper: tuple[Tensor, ...], items: Items) -> Result:
        """Run K - T steps without a graph, then hand over to `within`."""
        cut = len(items) - self.last
        if cut <= 0:
            return self.within(step, state, hyper, items)
        if any_requires_grad(state):
            raise ValueError(
                f"no gradient reaches the initial parameters through a truncated rollout; got last={self.last} of "
                f"{len(items)} steps and initial parameters that require grad. Use `copy_initial_weights=True` (or "
                "detach them), or an adjoint that differentiates all steps."
            )
        with torch.no_grad():
            state, first = Unroll()(step, state, hyper, items[:cut])
        state, rest = self.within(step, detach(state), hyper, items[cut:])
        return state, first + rest
