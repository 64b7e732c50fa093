"""What a rollout is asked to do, checked before anything runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, overload

from torch import Tensor

from .._adjoints.replay import READ_AGAIN
from .._support.checks import check_count
from .._support.slots import Slots
from .._support.tree import map_tensors, tensors
from .._support.types import Item


class Items(Sequence[Item]):
    """The K items of a rollout: k = 1..K, each with its batch.

    Tensors of the batches that require grad are put into slots, the same object once. A list or tuple is looked through
    beforehand; any other sequence is read when its batch is needed (and again in a replay), and carries no gradients.

    Attributes:
        eager: Whether the batches are held by a list anyway.
        once: Whether each batch can be read only once, in order.
        constants: The tensors of such a list that are not in slots, with a name for messages.
    """

    def __init__(self, batches: Any, steps: int, slots: Slots, *, tasks: int | None = None) -> None:
        """Check `batches` against `steps`."""
        if isinstance(batches, Tensor):
            batches = list(batches.unbind(0))
        if batches is not None:
            batches = _checked(batches, steps)
        if isinstance(batches, list):
            batches = tuple(batches)  # the user's list may change before it is read again
        self._batches = batches
        self._tasks = tasks
        self._slots = slots
        self.once = isinstance(batches, _Stream)
        self._known: dict[int, Any] = {}
        self.constants: list[tuple[str, Tensor]] = []
        self.eager = isinstance(batches, list | tuple | None)
        self._numbers = range(steps)
        if batches is not None and self.eager:
            for number, batch in enumerate(batches):
                if id(batch) not in self._known:
                    self._known[id(batch)] = prepared = self._prepared(batch, number)
                    self.constants += [(f"a tensor of batches[{number}]", t) for t in tensors(prepared)]

    def __len__(self) -> int:
        """Return the number of steps."""
        return len(self._numbers)

    @property
    def has_batches(self) -> bool:
        """Whether there is anything but k in an item."""
        return self._batches is not None

    @property
    def first_k(self) -> int:
        """The number k of the first step."""
        return self._numbers[0] + 1

    @overload
    def __getitem__(self, index: int) -> Item: ...
    @overload
    def __getitem__(self, index: slice) -> Items: ...
    def __getitem__(self, index: int | slice) -> Item | Items:
        """Return one item, or a part of them with k running on."""
        if isinstance(index, slice):
            part = object.__new__(Items)
            part.__dict__.update(self.__dict__, _numbers=self._numbers[index])
            return part
        number = self._numbers[index]
        if self._batches is None:
            return Item(number + 1)
        batch = self._batches[number]
        if self.eager:
            return Item(number + 1, self._known[id(batch)])
        if any(t.requires_grad for t in tensors(batch)):
            raise ValueError(
                f"gradients flow only into batches that are given as a list or tuple; got "
                f"{type(self._batches).__name__} whose batch {number} requires grad. Pass `list(batches)`."
            )
        return Item(number + 1, self._prepared(batch, number))

    def _prepared(self, batch: Any, number: int) -> Any:
        if self._tasks is not None:
            check_task_dimension(batch, self._tasks, f"batches[{number}]")
        return map_tensors(
            lambda t: self._slots.put(t, f"a tensor of batches[{number}]") if t.requires_grad else t, batch
        )


def in_chunks(batches: Any, tasks: int | None, size: int | None) -> list[tuple[Any, int | None]]:
    """Divide the tasks of all batches into chunks; return the batches and the number of tasks of each."""
    if size is None:
        return [(batches, tasks)]
    check_count("chunk_size", size)
    if tasks is None:
        raise ValueError(f"`chunk_size` divides tasks; got chunk_size={size} without `tasks`. Pass `tasks=` too.")
    return [(_part(batches, slice(a, a + size), tasks), min(size, tasks - a)) for a in range(0, tasks, size)]


def _part(batches: Any, part: slice, tasks: int) -> Any:
    if batches is None:
        return None
    if not hasattr(batches, "__getitem__"):
        raise TypeError(f"`chunk_size` reads the batches once per chunk: {READ_AGAIN}")
    if isinstance(batches, Tensor):
        batches = list(batches.unbind(0))
    known: dict[int, Any] = {}
    for number, batch in enumerate(batches):
        if id(batch) not in known:
            check_task_dimension(batch, tasks, f"batches[{number}]")
            known[id(batch)] = map_tensors(lambda t: t[part], batch)
    return [known[id(batch)] for batch in batches]


def check_task_dimension(batch: Any, tasks: int, name: str) -> None:
    """Raise where a tensor of a batch lacks the task dimension."""
    for tensor in tensors(batch):
        if tensor.dim() == 0 or tensor.shape[0] != tasks:
            raise ValueError(
                f"with tasks={tasks} every tensor of a batch has a leading dimension of that size; got {name} with a "
                f"tensor of shape {tuple(tensor.shape)}. Stack the tasks' tensors."
            )


class _Stream:
    """The batches of an iterable, such as a DataLoader: each is read once, in order."""

    def __init__(self, batches: Iterable[Any], steps: int) -> None:
        self._source = iter(batches)
        self._steps = steps
        self._next = 0

    def __getitem__(self, number: int) -> Any:
        """Return the next batch."""
        if number != self._next:
            raise TypeError(READ_AGAIN)
        self._next += 1
        try:
            return next(self._source)
        except StopIteration:
            raise ValueError(
                f"`batches` must have one batch per step; got {number} batches for steps={self._steps}. Pass as many "
                "as there are steps, for example by `itertools.cycle(batches)`."
            ) from None


def _checked(batches: Any, steps: int) -> Any:
    """Return batches that can be read by number; an iterable becomes a stream."""
    numbered = hasattr(batches, "__getitem__") and hasattr(batches, "__len__")  # a torch Dataset has no __iter__
    if isinstance(batches, dict | str) or not (numbered or hasattr(batches, "__iter__")):
        raise TypeError(
            f"`batches` must have one batch per step; got {type(batches).__name__}. Pass a list, for example "
            "`list(itertools.islice(loader, steps))`."
        )
    if not numbered:
        return _Stream(batches, steps)
    if len(batches) != steps:
        raise ValueError(
            f"`batches` must have one batch per step; got {len(batches)} batches for steps={steps}. "
            "Pass as many as there are steps, for example `[batch] * steps`."
        )
    return batches
