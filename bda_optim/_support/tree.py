"""Trees of tensors: dicts, lists and tuples, and the nodes that are registered with torch."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

# torch's own pytree serves only for the kinds of nodes that others have registered with it: it takes six times as long
# on a rule's state, and each call of its `tree_flatten` leaves a reference cycle behind.


def tensors(tree: Any) -> list[Tensor]:
    """Return the tensors of a tree of dicts, lists and tuples, in order."""
    found: list[Tensor] = []
    _collect(tree, found)
    return found


def _collect(tree: Any, found: list[Tensor]) -> None:
    if isinstance(tree, Tensor):
        found.append(tree)
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            _collect(item, found)
    elif isinstance(tree, dict):
        for item in tree.values():
            _collect(item, found)
    elif type(tree) in pytree.SUPPORTED_NODES:
        found.extend(leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor))


def map_leaves(function: Callable[[Any], Any], kind: type | tuple[type, ...], tree: Any) -> Any:
    """Apply `function` to every leaf of a kind; other leaves stay."""
    if isinstance(tree, kind):
        return function(tree)
    own = type(tree)
    if own is tuple or own is list:
        return own([map_leaves(function, kind, item) for item in tree])
    if own is dict:
        return {key: map_leaves(function, kind, item) for key, item in tree.items()}
    if isinstance(tree, tuple) and hasattr(own, "_fields"):
        return own(*[map_leaves(function, kind, item) for item in tree])
    if _is_node(tree):
        return _like(tree, [map_leaves(function, kind, item) for item in _items(tree)])
    return pytree.tree_map_only(kind, function, tree) if own in pytree.SUPPORTED_NODES else tree


def _is_node(tree: Any) -> bool:
    """Whether something is a tuple, list or dict, of whatever class; a shape is a value."""
    return isinstance(tree, tuple | list | dict) and not isinstance(tree, torch.Size)


def _items(node: Any) -> Iterable[Any]:
    return node.values() if isinstance(node, dict) else node


def _like(node: Any, items: list[Any]) -> Any:
    """Return a container like `node`, of its class, with other items."""
    own = type(node)
    if own is tuple or own is list:
        return own(items)
    if isinstance(node, tuple):
        return own(*items) if hasattr(own, "_fields") else own(items)
    new = copy.copy(node)
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
    if type(tree) in pytree.SUPPORTED_NODES:
        return pytree.tree_map(lambda leaf: _structure(leaf, leaves), tree)
    leaves.append(tree)
    return Leaf(len(leaves) - 1)


def unflatten(leaves: Sequence[Any], structure: Any) -> Any:
    """Return a tree of that structure."""
    return map_leaves(lambda leaf: leaves[leaf.index], Leaf, structure)


def map_tensors(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """Apply `function` to every tensor of a tree; other leaves stay."""
    return map_leaves(function, Tensor, tree)


def detach(tree: Any) -> Any:
    """Cut every tensor of a tree off its graph."""
    return map_tensors(Tensor.detach, tree)


def replace_tensors(tree: Any, values: Sequence[Any]) -> Any:
    """Put `values` where the tensors of a tree stand, in order."""
    source = iter(values)
    return map_leaves(lambda _: next(source), Tensor, tree)


def named_leaves(tree: Any, name: str) -> tuple[list[tuple[str, Any]], Any]:
    """Flatten a tree and name every leaf by its path, for example ``hyper['w'][0]``."""
    leaves, structure = flatten(tree)
    return list(zip(_names(tree, name), leaves, strict=True)), structure


def _names(tree: Any, name: str) -> Iterator[str]:
    if isinstance(tree, dict):
        for key, item in tree.items():
            yield from _names(item, f"{name}[{key!r}]")
    elif _is_node(tree):
        for i, item in enumerate(tree):
            yield from _names(item, f"{name}.{tree._fields[i]}" if hasattr(tree, "_fields") else f"{name}[{i}]")
    elif type(tree) in pytree.SUPPORTED_NODES:
        for path, item in pytree.tree_flatten_with_path(tree)[0]:
            yield from _names(item, name + pytree.keystr(path))
    else:
        yield name
