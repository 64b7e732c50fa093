"""Trees of tensors: dicts, lists and tuples, and classes that are registered as nodes with torch."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .torch_private import REGISTERED, registered_children, registered_like

# torch's own pytree functions are not used: they take six times as long on a rule's memory, and each call of
# `tree_flatten` leaves a reference cycle behind.


def tensors(tree: Any) -> list[Tensor]:
    """Return the tensors of a tree, in order."""
    collected: list[Tensor] = []
    _collect(tree, collected)
    return collected


def _collect(tree: Any, collected: list[Tensor]) -> None:
    if isinstance(tree, Tensor):
        collected.append(tree)
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            _collect(item, collected)
    elif isinstance(tree, dict):
        for item in tree.values():
            _collect(item, collected)
    elif type(tree) in REGISTERED:
        for _, item in registered_children(tree):
            _collect(item, collected)


def map_leaves(function: Callable[[Any], Any], kind: type | tuple[type, ...], tree: Any) -> Any:
    """Apply `function` to every leaf that is an instance of `kind`; other leaves stay."""
    if isinstance(tree, kind):
        return function(tree)
    own = type(tree)
    if own is tuple or own is list:
        return own([map_leaves(function, kind, item) for item in tree])
    if own is dict:
        return {key: map_leaves(function, kind, item) for key, item in tree.items()}
    if _is_node(tree):
        return _like(tree, [map_leaves(function, kind, item) for item in _items(tree)])
    return tree


def _is_node(tree: Any) -> bool:
    """Whether something has children: a tuple, list or dict of any class, or a registered node. A shape is a leaf."""
    return (isinstance(tree, tuple | list | dict) or type(tree) in REGISTERED) and not isinstance(tree, torch.Size)


def _items(node: Any) -> Iterable[Any]:
    if isinstance(node, dict):
        return node.values()
    return node if isinstance(node, tuple | list) else [child for _, child in registered_children(node)]


def _like(node: Any, items: list[Any]) -> Any:
    """Return a node of the class of `node` with other items."""
    own = type(node)
    if isinstance(node, tuple):
        return own(*items) if hasattr(own, "_fields") else own(items)
    if own is list:
        return items
    if not isinstance(node, dict | list):
        return registered_like(node, items)
    new: Any = copy.copy(node)
    if isinstance(node, dict):
        new.update(zip(node, items, strict=True))
    else:
        new[:] = items
    return new


@dataclasses.dataclass(frozen=True)
class Leaf:
    """Stands for a leaf of a tree; a tree of them is the structure that `flatten` returns."""

    index: int


def flatten(tree: Any) -> tuple[list[Any], Any]:
    """Return the leaves of a tree, and its structure."""
    leaves: list[Any] = []
    return leaves, _structure(tree, leaves)


def _structure(tree: Any, leaves: list[Any]) -> Any:
    if _is_node(tree):
        return _like(tree, [_structure(item, leaves) for item in _items(tree)])
    leaves.append(tree)
    return Leaf(len(leaves) - 1)


def unflatten(leaves: Sequence[Any], structure: Any) -> Any:
    """Return the tree of that structure with these leaves."""
    return map_leaves(lambda leaf: leaves[leaf.index], Leaf, structure)


def map_tensors(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """Apply `function` to every tensor of a tree; other leaves stay."""
    return map_leaves(function, Tensor, tree)


def detach(tree: Any) -> Any:
    """Detach every tensor of a tree."""
    return map_tensors(Tensor.detach, tree)


def replace_tensors(tree: Any, values: Sequence[Any]) -> Any:
    """Replace the tensors of a tree by `values`, in order."""
    source = iter(values)
    return map_leaves(lambda _: next(source), Tensor, tree)


def named_leaves(tree: Any, name: str) -> tuple[list[tuple[str, Any]], Any]:
    """Flatten a tree and name every leaf by its path, for example ``hyper['w'][0]``."""
    leaves, structure = flatten(tree)
    return list(zip(_names(tree, name), leaves, strict=True)), structure


def _names(tree: Any, name: str) -> Iterator[str]:
    if not _is_node(tree):
        yield name
        return
    if isinstance(tree, dict):
        paths = [f"[{key!r}]" for key in tree]
    elif isinstance(tree, tuple | list):
        paths = [f".{field}" for field in getattr(tree, "_fields", ())] or [f"[{i}]" for i in range(len(tree))]
    else:
        paths = [path for path, _ in registered_children(tree)]
    for path, item in zip(paths, _items(tree), strict=True):
        yield from _names(item, name + path)
