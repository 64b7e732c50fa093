"""The settings of parameter groups as a state_dict holds them: plain values, which `torch.load` accepts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .._support.types import Rule
from .schedules import from_plain, to_plain
from .settings import complete

SCHEDULED = ("alpha", "lr", "upper_lr")
"""The settings that may be functions of k."""


def pack(state_dict: dict[str, Any], rule: Rule) -> dict[str, Any]:
    """Write the rule's name into a state_dict, built-in schedules as names and numbers; leave out other callables."""
    state_dict["rule"] = rule.name
    for group in state_dict["param_groups"]:
        group.pop("prox")
        for name in SCHEDULED:
            if callable(group[name]):
                plain = to_plain(group.pop(name))
                if plain is not None:
                    group[name] = plain
    return state_dict


def check_rule_name(state_dict: Mapping[str, Any], rule: Rule) -> None:
    """Raise where a state_dict was written by another kind of optimizer, or for another rule."""
    if "rule" not in state_dict:
        raise ValueError(
            "this state_dict was not written by a BDAInnerOptimizer; got one without `rule`. To go on from an "
            "optimizer of torch.optim, load it into that and pass the optimizer itself to `innerloop_ctx`."
        )
    if state_dict["rule"] != rule.name:
        raise ValueError(
            f"this state_dict belongs to the rule {state_dict['rule']}; got an optimizer with {rule.name}. "
            f"Make it with `rule=` {state_dict['rule']}."
        )


def unpack(groups: Sequence[dict[str, Any]], live: Sequence[Mapping[str, Any]], rule: Rule) -> list[dict[str, Any]]:
    """Make the schedules of loaded groups, in place; return for each group the settings that it lacks.

    A prox and a callable come from the live group; whatever else is missing, as in a state_dict written before it
    existed, gets its default.
    """
    missing = []
    for group, own in zip(groups, live, strict=False):
        kept = {name: own[name] for name in ("prox", *SCHEDULED)}
        defaults = {**complete(rule, {}), "k": 0, **kept}
        missing.append({name: value for name, value in defaults.items() if name not in group})
        group.update({name: from_plain(group[name]) for name in SCHEDULED if isinstance(group.get(name), dict)})
    return missing
