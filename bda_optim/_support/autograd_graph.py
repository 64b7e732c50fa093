"""Questions about an autograd graph: which leaves does it reach, and can it be differentiated once more?"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# What torch knows no derivative of, by the name of the node that a first derivative leaves in the graph.
_NO_SECOND_DERIVATIVE = {
    "EmbeddingBagBackwardBackward0": ("EmbeddingBag", "an Embedding followed by mean or sum"),
    "CdistBackwardBackward0": ("cdist", "(a.unsqueeze(-2) - b.unsqueeze(-3)).norm(dim=-1)"),
    "PdistBackwardBackward0": ("pdist", "norms of differences"),
    "MovingSingularVectorsBackward": ("spectral_norm in training mode", "it in eval mode (that sub-module suffices)"),
}
_NO_FORMULA = "torch::autograd::NotImplemented"  # the node of any operation whose derivative torch does not have
# A function marked so leaves a node that leads nowhere (or none): `autograd.grad` passes it by, without an error.
_ONCE_NODE, _ONCE = "torch::autograd::Error", once_differentiable(lambda ctx: None).__code__


def nodes(roots: Iterable[Tensor], ends: Iterable[Any] = ()) -> Iterator[Any]:
    """Yield every node of the graph behind `roots` once, as far as the nodes `ends`, which are left out."""
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
    """Return the leaf tensors that a graph leads to and that somebody holds.

    A leaf that was made inside a loss (where a loop takes a gradient, or a gradient penalty) and is held by the graph
    alone has a gradient that nobody can look at.
    """
    orphan = _references_of_an_orphan()
    found = (node for node in nodes(roots, ends) if hasattr(node, "variable"))
    return [node.variable for node in found if sys.getrefcount(node.variable) > orphan]


@functools.cache
def _references_of_an_orphan() -> int:
    """Return what `sys.getrefcount` says of a leaf that only a graph holds."""
    with torch.enable_grad():
        node: Any = torch.zeros((), device="cpu", requires_grad=True).neg().grad_fn
    return sys.getrefcount(node.next_functions[0][0].variable)


def refuse_once_differentiable(roots: Iterable[Tensor]) -> None:
    """Raise where a gradient contains something that torch cannot differentiate again."""
    for node in nodes(roots):
        found = _NO_SECOND_DERIVATIVE.get(node.name())
        if node.name() == _NO_FORMULA:
            near = [following.name() for following, _ in node.next_functions if following is not None]
            found = ("an operation near " + ", ".join(near), "another one")
            if "CtcLossBackward0" in near:
                found = ("ctc_loss", "another loss")
        backward = getattr(getattr(node, "_forward_cls", None), "backward", None)
        if node.name() == _ONCE_NODE or getattr(backward, "__code__", None) is _ONCE:
            found = ("a function marked once_differentiable", "one whose backward can be differentiated")
        if found:
            raise NotImplementedError(
                f"torch has no second derivative of `{found[0]}`, which the inner loss uses, so no hypergradient "
                f"passes through it. Use {found[1]} instead, or `adjoint=FirstOrder()` (in `innerloop_ctx` "
                "`first_order=True`), which needs none."
            )
