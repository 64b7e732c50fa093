"""Questions about an autograd graph: which leaves does it reach, and can it be differentiated once more?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

# What torch knows no derivative of, by the name of the node that a first derivative leaves in the graph.
_NO_SECOND_DERIVATIVE = {
    "EmbeddingBagBackwardBackward0": ("EmbeddingBag", "an Embedding followed by mean or sum"),
    "CdistBackwardBackward0": ("cdist", "(a.unsqueeze(-2) - b.unsqueeze(-3)).norm(dim=-1)"),
    "PdistBackwardBackward0": ("pdist", "norms of differences"),
    "CtcLossBackwardBackward0": ("ctc_loss", "another loss"),
}


def nodes(roots: Iterable[Tensor]) -> Iterator[Any]:
    """Yield every node of the graph behind `roots` once."""
    stack = [root.grad_fn for root in roots if root.grad_fn is not None]
    seen = set(stack)
    while stack:
        node = stack.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                stack.append(following)


def leaves(roots: Iterable[Tensor]) -> list[Tensor]:
    """Return the leaf tensors that a graph leads to."""
    return [node.variable for node in nodes(roots) if hasattr(node, "variable")]


def refuse_once_differentiable(roots: Iterable[Tensor]) -> None:
    """Raise where a gradient contains something that torch cannot differentiate again."""
    for node in nodes(roots):
        found = _NO_SECOND_DERIVATIVE.get(node.name())
        if found:
            raise NotImplementedError(
                f"torch has no second derivative of `{found[0]}`, which the inner loss uses, so no hypergradient passes "
                f"through it. Use {found[1]} instead, or `adjoint=FirstOrder()`, which needs none."
            )
