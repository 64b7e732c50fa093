"""Trees of tensors, and slots: the tensors that a rollout differentiates, each counted once."""

from __future__ import annotations

import copy
import dataclasses
import functools
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch
from torch._functorch import vmap as torch_vmap
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


class Frozen:
    """Something that says itself what a trace of it depends on."""

    def frozen(self) -> Any:
        """Return it."""
        raise NotImplementedError


class Filler:
    """A leaf that becomes a value once the tensors of the slots are known."""

    def fill(self, values: Sequence[Tensor]) -> Any:
        """Return the value."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Slot(Filler):
    """Stands for the tensor number `index`."""

    index: int

    def fill(self, values: Sequence[Tensor]) -> Tensor:
        """Return that tensor."""
        return values[self.index]


@dataclasses.dataclass(frozen=True)
class _Fields(Filler):
    """A dataclass (a schedule, a prox) some of whose fields are slots."""

    value: Any
    slots: dict[str, Slot]

    def fill(self, values: Sequence[Tensor]) -> Any:
        return dataclasses.replace(self.value, **{name: slot.fill(values) for name, slot in self.slots.items()})


_PLAIN = frozenset({bool, int, float, str, type(None)})


class Template(Frozen):
    """A tree with slots in the place of tensors."""

    def __init__(self, leaves: list[Any], spec: Any) -> None:
        """Remember the leaves and which of them are to be filled."""
        self._leaves, self._spec = leaves, spec
        self._fillers = [(i, leaf) for i, leaf in enumerate(leaves) if isinstance(leaf, Filler)]
        self._constant = None if self._fillers else unflatten(leaves, spec)

    @classmethod
    def constant(cls, tree: Any) -> Template:
        """Return a template that has no slots: `fill` gives `tree` itself, whatever tensors it holds."""
        return cls([tree], Leaf(0))

    def frozen(self) -> Any:
        """Return what a trace of something filled depends on."""
        return self._leaves, repr(self._spec)

    def unfilled(self) -> Any:
        """Return the tree with its slots."""
        return unflatten(self._leaves, self._spec)

    def fill(self, values: Sequence[Tensor]) -> Any:
        """Return the tree with the slots' tensors in place."""
        if not self._fillers:
            return self._constant
        leaves = list(self._leaves)
        for i, filler in self._fillers:
            leaves[i] = filler.fill(values)
        return unflatten(leaves, self._spec)


def fill(tree: Any, values: Sequence[Tensor]) -> Any:
    """Return a tree with the slots that are its leaves replaced by their tensors."""
    return map_leaves(lambda slot: slot.fill(values), Slot, tree)


class Slots:
    """Collects tensors, the same object once, and remembers a name for messages."""

    def __init__(self) -> None:
        """Start empty."""
        self.tensors: list[Tensor] = []
        self.names: list[str] = []
        self._index: dict[int, int] = {}

    def copy(self) -> Slots:
        """Return slots for the same tensors, to which others can be added."""
        other = Slots()
        for tensor, name in zip(self.tensors, self.names, strict=True):
            other.put(tensor, name)
        return other

    def put(self, tensor: Tensor, name: str) -> Slot:
        """Return the slot of `tensor`, a new one unless it has one already."""
        refuse_sharded(name, tensor)
        index = self._index.setdefault(id(tensor), len(self.tensors))
        if index == len(self.tensors):
            self.tensors.append(tensor)
            self.names.append(name)
        return Slot(index)

    def template(self, tree: Any, name: str, special: Callable[[Any, str], Any] | None = None) -> Template:
        """Turn every tensor of a tree, and of the dataclasses in it, into a slot.

        Args:
            tree: Dicts, lists and tuples of tensors, dataclasses and anything else.
            name: What messages call the tree.
            special: Is shown each other leaf with its name, and returns what stands in its place.
        """
        if type(tree) in _PLAIN or (type(tree) is dict and all(type(value) in _PLAIN for value in tree.values())):
            return Template.constant(tree)  # most settings; a path for every leaf takes ten times as long
        leaves, spec = named_leaves(tree, name)
        return Template([self._leaf(leaf, path, special) for path, leaf in leaves], spec)

    def _leaf(self, leaf: Any, name: str, special: Callable[[Any, str], Any] | None) -> Any:
        if isinstance(leaf, Tensor):
            return self.put(leaf, name)
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            found = {field.name: getattr(leaf, field.name) for field in dataclasses.fields(leaf) if field.init}
            slots = {key: self.put(value, f"{name}.{key}") for key, value in found.items() if isinstance(value, Tensor)}
            return _Fields(leaf, slots) if slots else leaf
        return special(leaf, name) if special else leaf


def is_differentiable(tensor: Tensor) -> bool:
    """Whether a tensor's dtype can carry a gradient at all."""
    return tensor.is_floating_point() or tensor.is_complex()


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is cut up and lies on several ranks."""
    module = sys.modules.get("torch.distributed.tensor")  # two seconds to import; whoever has a DTensor has done so
    return module is not None and isinstance(tensor, module.DTensor)


def refuse_sharded(name: str, tensor: Tensor) -> None:
    """Raise where an inner loop is given a tensor that lies on several ranks."""
    if is_sharded(tensor):
        raise TypeError(
            f"an inner loop cannot compute with a DTensor, of which `fully_shard` makes parameters; got {name}. Use a "
            "plain copy of the module, `bda_optim.distributed.Averager(module, local=copy)`, or `tensor.full_tensor()`."
        )


def describe(tensor: Tensor) -> str:
    """Say what a tensor is, for messages: shape, dtype and device."""
    shape = "x".join(map(str, tensor.shape)) or "scalar"
    return f"{shape} {str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"


def layout(tensor: Tensor) -> tuple[Any, ...]:
    """Return all of a tensor that a compiled program depends on, but its values."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad


def any_requires_grad(tree: Any) -> bool:
    """Whether grad mode is on and some tensor of the tree requires grad."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors(tree))


def over_tasks(function: Callable[..., Any], *trees: Any) -> Any:
    """Map `function` over the first dimension of every tensor of `trees`; other leaves are shared by the tasks.

    What `function` returns may be any tree; its tensors come back with the task dimension in front.
    """
    given = tensors(trees)
    result: list[Any] = []

    def one(*values: Tensor) -> list[Tensor]:
        result[:] = [function(*replace_tensors(trees, values))]
        return tensors(result)

    # Dropout draws a mask of its own for each task.
    return replace_tensors(result, vmapped(one, given, randomness="different"))[0]


def vmapped(
    function: Callable[..., Sequence[Tensor | None]], values: Sequence[Tensor], *, randomness: str
) -> list[Tensor | None]:
    """Map a function of flat tensors over their first dimension, which is of the same size in all of them.

    This is `torch.func.vmap` without the trees of its arguments: flattening them takes longer than small operations
    do, and leaves reference cycles behind.
    """
    sizes = {value.shape[0] for value in values}
    if len(sizes) != 1:
        raise ValueError(f"tensors must have the same first dimension to be mapped over it; got sizes {sorted(sizes)}.")
    size = sizes.pop()
    _load_decompositions()
    outside = _functorch.maybe_current_level()
    try:
        level = _functorch._vmap_increment_nesting(size, randomness)
        found = function(*[_functorch._add_batch_dim(value, 0, level) for value in values])
        return [None if t is None else _functorch._remove_batch_dim(t, level, size, 0) for t in found]
    finally:
        if _functorch.maybe_current_level() != outside:  # an interrupt may come before the level is there
            _functorch._vmap_decrement_nesting()


# What `vmap` needs of some operations.
_load_decompositions = functools.cache(torch_vmap.lazy_load_decompositions)  # type: ignore[attr-defined]


def one_by_one(function: Callable[..., Any], tasks: int, *trees: Any) -> Any:
    """Do what `over_tasks` does in a loop, for a `function` that `vmap` cannot batch."""
    results = [function(*map_tensors(operator.itemgetter(i), trees)) for i in range(tasks)]
    columns = zip(*(tensors(result) for result in results), strict=True)
    return replace_tensors(results[0], [torch.stack(column) for column in columns])
