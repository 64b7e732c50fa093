"""A differentiable optimizer whose steps are those of a rule of this library."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from bda_optim._optimizer import refuse_extrapolation
from bda_optim._step.aggregation import at_step, is_zero, weight
from bda_optim._step.rules.base import _FIXED
from bda_optim._step.schedules import from_plain, to_plain
from bda_optim._step.settings import AGGREGATION, check_group
from bda_optim._step.update import Group, Update
from bda_optim._support.slots import Template
from bda_optim._support.types import InnerState, Rule
from bda_optim.prox import NO_HYPER

from ._diffopt import DifferentiableOptimizer, Grouped
from ._override import Override

_HOW = {"foreach", "fused", "capturable", "differentiable"}  # how torch.optim computes a step, not what
_PASSED = Template.constant({})  # in the place of settings, which are passed to each call
_OFF_AT_0 = ("momentum", "weight_decay")


class RuleOptimizer(DifferentiableOptimizer):
    """Steps by `rule`; with `aggregates` also by the upper level, as a `BDAInnerOptimizer` does."""

    rule: Rule
    aggregates: ClassVar[bool] = False

    def __init__(self, other: Optimizer, *args: Any, **kwargs: Any) -> None:
        """Take over the rule of a BDAInnerOptimizer; otherwise it is the class's own."""
        if self.aggregates:
            self.rule = other.rule  # type: ignore[attr-defined]
        self._known: list[Any] = [None] * len(other.param_groups)  # which settings were on when the state was completed
        self._foreign = [True] * len(other.param_groups)  # whether the state comes from another optimizer
        self._update_by: tuple[Any, Update] | None = None
        super().__init__(other, *args, **kwargs)
        if self.aggregates:
            for state in self.state:
                whole = next((entry["group"] for entry in state.values() if "group" in entry), None)
                if whole is not None:
                    state.clear()
                    state["group"] = whole

    @classmethod
    def learnable(cls, opt: Optimizer) -> set[str]:
        """Return the names, in torch.optim's spelling, of the settings of an optimizer that have a derivative."""
        rule = opt.rule if cls.aggregates else cls.rule  # type: ignore[attr-defined]
        names = {name for name, value in rule.defaults.items() if name not in _FIXED and not isinstance(value, bool)}
        if any(group.get("nesterov") for group in opt.param_groups):
            names.discard("dampening")  # Nesterov's form wants it to be 0
        return names | {"alpha", "upper_lr"} if cls.aggregates else {cls._spelled(name) for name in names}

    @classmethod
    def _spelled(cls, name: str) -> str:
        """The `alpha` of RMSprop and ASGD is `rule_alpha` in a rule: it is not the weight of the upper level."""
        return "alpha" if name == "rule_alpha" and not cls.aggregates else name

    def _defaults(self) -> dict[str, Any]:
        """Return every setting there is, by the name that it has in `param_groups`."""
        own = {self._spelled(name): value for name, value in self.rule.defaults.items()}
        return {**own, **AGGREGATION} if self.aggregates else own

    def _apply_override(self, override: Override) -> None:
        known = self._defaults()
        for name, value in override.items():
            if name in _HOW:
                raise ValueError(f"`{name}` chooses how torch computes a step and has no effect here. Leave it out.")
            if name not in known:
                raise ValueError(
                    f"`override` must name settings of {self.rule.name}; got {name!r}. It has {', '.join(known)}."
                )
            learned = isinstance(value, Tensor) and value.requires_grad
            learned = learned or any(isinstance(v, Tensor) and v.requires_grad for v in _listed(value))
            if isinstance(known[name], bool) and learned:
                raise ValueError(f"`{name}` is a switch and cannot be learned; got a tensor. Pass True or False.")
        before = [dict(group) for group in self.param_groups]
        super()._apply_override(override)
        try:
            for group in self.param_groups:
                settings = self._settings(group)
                self.rule.validate({name: settings[name] for name in self.rule.defaults})
        except (TypeError, ValueError):
            self.param_groups[:] = before
            raise
        self._known = [None] * len(self.param_groups)  # complete the state for the new ones

    def _settings(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings of a group as the rule names them."""
        found = {name: group.get(self._spelled(name), default) for name, default in self.rule.defaults.items()}
        for name, value in found.items():
            if isinstance(value, Tensor):
                if isinstance(self.rule.defaults[name], bool):
                    found[name] = bool(value)
                elif name in _OFF_AT_0 and not self.aggregates and value.numel() == 1 and not value:
                    found[name] = 0.0  # as in higher: what is 0 is off, and is not learned
        for name, default in AGGREGATION.items():
            found[name] = group.get(name, default) if self.aggregates else default
        return found

    def _mixes(self) -> bool:
        return self.aggregates and not all(is_zero(weight(g["alpha"], self.k + 1)) for g in self.param_groups)

    def _takes_upper(self) -> bool:
        return self.aggregates

    def _update(self, grouped_grads: Grouped, upper: Grouped | None = None, **kwargs: Any) -> None:
        k, settings, memories = self.k + 1, [], []
        groups: list[tuple[int, ...]] = []
        lives: list[list[int]] = []
        flat, lower, above = list[Tensor](), list[Any](), list[Any]()
        for index, (group, grads) in enumerate(zip(self.param_groups, grouped_grads, strict=True)):
            live = [i for i, p in enumerate(group["params"]) if p.requires_grad]
            params = [group["params"][i] for i in live]
            chosen = self._settings(group)
            if len(live) < len(group["params"]):
                chosen = {name: self._selected(name, value, live) for name, value in chosen.items()}
            lives.append(live)
            settings.append(chosen)
            memories.append(self._memory(index, live, params, chosen))
            groups.append(tuple(range(len(flat), len(flat) + len(live))))
            flat += params
            lower += [grads[i] for i in live]
            above += [None if upper is None else upper[index][i] for i in live]
        update = self._with_members(tuple(groups))
        state = InnerState(tuple(flat), tuple(memories))
        if k == 1:
            refuse_extrapolation(update, state, settings, "innerloop_ctx")
        new = update(state, lower, above, [at_step(s, k) for s in settings], NO_HYPER)
        for index, (live, members, memory) in enumerate(zip(lives, groups, new.rule, strict=True)):
            group = self.param_groups[index]
            for i, number in zip(live, members, strict=True):
                group["params"][i] = new.params[number]
            if isinstance(memory, tuple):
                self.state[index].update(zip(live, memory, strict=True))
            else:
                self.state[index]["group"] = memory

    def _memory(self, index: int, live: list[int], params: list[Tensor], settings: Mapping[str, Any]) -> Any:
        """Return the rule's state of a group, complete for the settings: one that was turned on needs its buffers."""
        state = self.state[index]
        form = (len(live), *(isinstance(value, Tensor | list) or bool(value) for value in settings.values()))
        if self._known[index] != form:
            check_group(self.rule, settings, params)
            self._known[index] = form
            fresh = self.rule.init([p.detach() for p in params], settings)
            if not isinstance(fresh, tuple):
                state.setdefault("group", fresh)
            else:
                for place, (i, start) in enumerate(zip(live, fresh, strict=True)):
                    entry = state.get(i)
                    if entry and self._foreign[index]:
                        state[i] = self.rule.adopt(entry, params[place], settings, index=place)  # type: ignore[attr-defined]
                    else:
                        state[i] = {
                            name: value if not entry else entry.get(name, value) for name, value in start.items()
                        }
            self._foreign[index] = False
        return state["group"] if "group" in state else tuple(state[i] for i in live)

    def _selected(self, name: str, value: Any, live: list[int]) -> Any:
        """Pick the entries of the parameters that are not frozen out of a list with one per parameter."""
        if not isinstance(value, list) or isinstance(self.rule.defaults.get(name), tuple):
            return value
        return [value[i] for i in live]

    def _with_members(self, members: tuple[tuple[int, ...], ...]) -> Update:
        if self._update_by is None or self._update_by[0] != members:
            self._update_by = members, Update(self.rule, [Group(m, _PASSED) for m in members])
        return self._update_by[1]

    def state_dict(self) -> dict[str, Any]:
        """Return settings and state, detached; see `DifferentiableOptimizer.state_dict`."""
        packed = super().state_dict()
        if not self.aggregates:
            packed["state"] = {key: self._as_torch(entry) for key, entry in packed["state"].items()}
            return packed
        packed["rule"] = self.rule.name
        for group in packed["param_groups"]:
            group.pop("prox")
            group["k"] = self.k
            if callable(group["alpha"]):
                plain = to_plain(group.pop("alpha"))
                if plain is not None:
                    group["alpha"] = plain
        return packed

    def _as_torch(self, entry: dict[str, Any]) -> dict[str, Any]:
        """Write counts as torch.optim does: as tensors; SGD has none."""
        if self.rule.name == "SGD":
            return {name: value for name, value in entry.items() if name != "step"}
        return {name: v if isinstance(v, Tensor) else torch.tensor(float(v)) for name, v in entry.items()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over a state_dict; see `DifferentiableOptimizer.load_state_dict`."""
        groups = [dict(group) for group in state_dict["param_groups"]]
        if self.aggregates:
            if state_dict.get("rule") != self.rule.name:
                raise ValueError(
                    f"this state_dict belongs to the rule {state_dict.get('rule')}; got one with {self.rule.name}."
                )
            for group in groups:
                if isinstance(group.get("alpha"), dict):
                    group["alpha"] = from_plain(group["alpha"])
        super().load_state_dict({**state_dict, "param_groups": groups})
        if self.aggregates:
            self.k = groups[0]["k"]
        self._known, self._foreign = [None] * len(groups), [True] * len(groups)


def _listed(value: Any) -> list[Any]:
    """Return the entries of a list or tuple, and of those in it."""
    if isinstance(value, list | tuple):
        return [entry for item in value for entry in _listed(item)]
    return [value]
