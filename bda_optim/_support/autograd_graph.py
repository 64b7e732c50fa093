"""Questions about an autograd graph: which leaves does it reach, and can it be differentiated once more?"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from .torch_private import forward_class, undifferentiable

_ALTERNATIVES = {
    "EmbeddingBag": "an Embedding followed by mean or sum",
    "cdist": "(a.unsqueeze(-2) - b.unsqueeze(-3)).norm(dim=-1)",
    "pdist": "norms of differences",
    "ctc_loss": "another loss",
    "a function marked once_differentiable": "one whose backward can be differentiated",
}


def nodes(roots: Iterable[Tensor], ends: Iterable[Any] = ()) -> Iterator[Any]:
    """Yield every node of the graph behind `roots` once, up to the nodes `ends`, which are left out."""
    seen = {*ends}
    stack = [root.grad_fn for root in roots if root.grad_fn is not None and root.grad_fn not in seen]
    seen.update(stack)
    while stack:
        node = stack.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                stack.append(following)


def leaves(roots: Iterable[Tensor], ends: Iterable[Any] = ()) -> list[Tensor]:
    """Return the leaf tensors that a graph leads to, except those that only the graph itself refers to.

    Such a leaf was made inside a loss (by a loop that takes a gradient, or by a gradient penalty): nobody can read its
    gradient.
    """
    orphan = _references_of_an_orphan()
    ends_of_graph = (node for node in nodes(roots, ends) if hasattr(node, "variable"))
    return [node.variable for node in ends_of_graph if sys.getrefcount(node.variable) > orphan]


@functools.cache
def _references_of_an_orphan() -> int:
    """Return the reference count of a leaf that only a graph refers to."""
    with torch.enable_grad():
        node: Any = torch.zeros((), device="cpu", requires_grad=True).neg().grad_fn
    return sys.getrefcount(node.next_functions[0][0].variable)


class WithoutSecondDerivative(torch.autograd.Function):
    """A function in the graph of a gradient that marks the gradient as one that must not be differentiated again.

    Attributes:
        operation: The operation that has no second derivative, for messages.
        alternative: What to use instead.
    """

    operation: str
    alternative: str


class BeforeMovingConstants(torch.autograd.Function):
    """A function in the graph of a loss that marks what follows: a loss with constants that its own forward pass moves.

    Attributes:
        operation: The operation whose constants move, for messages.
        alternative: What to use instead.
    """

    operation: str
    alternative: str


def refuse_moving_constants(roots: Iterable[Tensor]) -> None:
    """Raise where gradients at two points would be those of two functions."""
    for node in nodes(roots):
        function = forward_class(node)
        if isinstance(function, type) and issubclass(function, BeforeMovingConstants):
            raise NotImplementedError(
                f"`{function.operation}` changes the loss with every forward pass, so that differences of its "
                f"gradients are not its second derivative. Use {function.alternative} instead."
            )


def refuse_once_differentiable(roots: Iterable[Tensor]) -> None:
    """Raise where a gradient contains something that torch cannot differentiate again."""
    for node in nodes(roots):
        operation = undifferentiable(node)
        alternative = _ALTERNATIVES.get(operation or "", "another one")
        function = forward_class(node)
        if isinstance(function, type) and issubclass(function, WithoutSecondDerivative):
            operation = function.operation
            alternative = function.alternative
        if operation is not None:
            raise NotImplementedError(
                f"torch has no second derivative of `{operation}`, which the inner loss uses, so no hypergradient "
                f"passes through it. Use {alternative} instead, or `adjoint=FirstOrder()` (in `innerloop_ctx` "
                "`first_order=True`), which needs none."
            )
