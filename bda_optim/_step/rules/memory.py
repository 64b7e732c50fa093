"""What a rule remembers of a parameter group, and how it grows when a setting is switched on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..._support.types import RuleState


def is_per_parameter(memory: Any, count: int) -> bool:
    """Whether a group of `count` parameters has a memory for each, a tuple of dicts, and not one for all of them."""
    return isinstance(memory, tuple) and len(memory) == count and all(isinstance(entry, dict) for entry in memory)


def stored_entries(groups: Iterable[tuple[Sequence[int], Any]], memories: Iterable[Any]) -> dict[int, dict[str, Any]]:
    """Return what an optimizer's `state` holds, by the number of the parameter.

    A memory of a whole group is stored under "group" with the first parameter of the group.
    """
    entries: dict[int, dict[str, Any]] = {}
    for (members, _), memory in zip(groups, memories, strict=True):
        if is_per_parameter(memory, len(members)):
            entries.update({i: dict(entry) for i, entry in zip(members, memory, strict=True) if entry})
        elif members:
            entries[members[0]] = {"group": memory}
    return entries


def complete_memory(fresh: Any, memory: Any) -> Any:
    """Return a group's memory with everything that its settings need now.

    Args:
        fresh: What `rule.init` returns for these settings.
        memory: What the group remembers; None, or an empty dict per parameter, before the first step.
    """
    if memory is None:
        return fresh
    if not isinstance(fresh, tuple) or not all(is_per_parameter(part, len(fresh)) for part in (fresh, memory)):
        return memory
    return tuple(complete_entry(new, old) for new, old in zip(fresh, memory, strict=True))


def complete_entry(fresh: RuleState, entry: Mapping[str, Any]) -> RuleState:
    """Return what a rule remembers of one parameter, with the buffers that a setting switched on later needs.

    A count that is missing beside other entries starts at 1: the first step is over. (SGD counts only with dampening,
    and only the first step matters to it.)

    >>> complete_entry({"momentum_buffer": 0.0, "step": 0}, {"momentum_buffer": 2.0})
    {'momentum_buffer': 2.0, 'step': 1}
    """
    started = {"step": 1} if entry and "step" in fresh else {}
    return {**fresh, **started, **entry}
