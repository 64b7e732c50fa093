"""A differentiable optimizer whose steps are those of a rule of this library."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from bda_optim._step.aggregation import at_step, is_zero, weight
from bda_optim._step.packing import check_rule_name, pack, unpack
from bda_optim._step.proximal import NO_HYPER
from bda_optim._step.rules.base import FIXED, ParameterRule
from bda_optim._step.rules.memory import complete_entry
from bda_optim._step.settings import AGGREGATION, check_group
from bda_optim._step.update import Group, Update, refuse_extrapolation
from bda_optim._support.slots import Template
from bda_optim._support.types import InnerState, Rule

from ._diffopt import DifferentiableOptimizer, Grouped
from ._override import Override

_HOW = {"foreach", "fused", "capturable", "differentiable"}  # how torch.optim computes a step, not what
_PASSED = Template.constant({})  # a placeholder: the settings are passed to each call
_OFF_AT_0 = ("momentum", "weight_decay")


class RuleOptimizer(DifferentiableOptimizer):
    """Takes the steps of `rule`; with `aggregates` they also follow the upper level, as in `BDAInnerOptimizer`."""

    rule: Rule
    aggregates: ClassVar[bool] = False
    _state: list[dict[Any, Any]]
    _complete_for: list[Any]  # for each group, the form of the settings that its state is complete for
    _foreign: list[bool]  # for each group, whether its state comes from another optimizer

    def __init__(self, other: Optimizer, *args: Any, **kwargs: Any) -> None:
        """Use the rule of a BDAInnerOptimizer; otherwise it is the class's own."""
        if self.aggregates:
            self.rule = other.rule  # type: ignore[attr-defined]
        self._update_by: tuple[Any, Update] | None = None
        super().__init__(other, *args, **kwargs)
        for state in self._state:
            whole = next((entry["group"] for entry in state.values() if "group" in entry), None)
            if self.aggregates and whole is not None:
                state.clear()
                state["group"] = whole

    @property
    def state(self) -> Any:
        """The state of each group, in torch.optim's layout: ``opt.state[p] = diffopt.state[g][i]`` hands it over.

        Steps count in plain numbers, which become torch.optim's tensors only here. Changes hold from the next step on.
        """
        if not self.aggregates and self.rule.name != "SGD":  # torch.optim's SGD keeps no numbers
            for state in self._state:
                for entry in state.values():
                    _numbers_to_tensors(entry)
        self._complete_for = [None] * len(self._state)
        return self._state

    @state.setter
    def state(self, value: Any) -> None:
        self._state = value
        self._complete_for = [None] * len(value)
        self._foreign = [True] * len(value)

    @classmethod
    def learnable(cls, opt: Optimizer) -> set[str]:
        """Return the names, in torch.optim's spelling, of the settings of an optimizer that have a derivative."""
        rule = opt.rule if cls.aggregates else cls.rule  # type: ignore[attr-defined]
        names = {name for name, value in rule.defaults.items() if name not in FIXED and not isinstance(value, bool)}
        if any(group.get("nesterov") for group in opt.param_groups):
            names.discard("dampening")  # Nesterov's form requires it to be 0
        return names | {"alpha", "upper_lr"} if cls.aggregates else {cls._spelled(name) for name in names}

    @classmethod
    def _spelled(cls, name: str) -> str:
        """Return torch.optim's name of a setting: the `alpha` of RMSprop and ASGD is `rule_alpha` in a rule."""
        return "alpha" if name == "rule_alpha" and not cls.aggregates else name

    def _defaults(self) -> dict[str, Any]:
        """Return the defaults of all settings, by their names in `param_groups`."""
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
        self._complete_for = [None] * len(self.param_groups)

    def _settings(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings of a group as the rule names them."""
        settings = {name: group.get(self._spelled(name), default) for name, default in self.rule.defaults.items()}
        for name, value in settings.items():
            if isinstance(value, Tensor):
                if isinstance(self.rule.defaults[name], bool):
                    settings[name] = bool(value)
                elif name in _OFF_AT_0 and not self.aggregates and value.numel() == 1 and not value:
                    settings[name] = 0.0  # as in higher: what is 0 is off, and is not learned
        for name, default in AGGREGATION.items():
            settings[name] = group.get(name, default) if self.aggregates else default
        return settings

    def _mixes(self) -> bool:
        return self.aggregates and not all(is_zero(weight(g["alpha"], self.k + 1)) for g in self.param_groups)

    def _takes_upper(self) -> bool:
        return self.aggregates

    def _update(self, grouped_grads: Grouped, upper: Grouped | None = None, **kwargs: Any) -> None:
        settings = []
        memories = []
        groups: list[tuple[int, ...]] = []
        lives: list[list[int]] = []
        params: list[Tensor] = []
        lower: list[Any] = []
        above: list[Any] = []
        for index, (group, grads) in enumerate(zip(self.param_groups, grouped_grads, strict=True)):
            live = [i for i, p in enumerate(group["params"]) if p.requires_grad]
            own = [group["params"][i] for i in live]
            chosen = self._settings(group)
            if len(live) < len(group["params"]):
                chosen = {name: self._selected(name, value, live) for name, value in chosen.items()}
            lives.append(live)
            settings.append(chosen)
            memories.append(self._memory(index, live, own, chosen))
            groups.append(tuple(range(len(params), len(params) + len(live))))
            params += own
            lower += [grads[i] for i in live]
            above += [None if upper is None else upper[index][i] for i in live]
        update = self._with_members(tuple(groups))
        state = InnerState(tuple(params), tuple(memories))
        if self.k == 0:
            refuse_extrapolation(update, state, settings, "innerloop_ctx")
        new = update(state, lower, above, [at_step(chosen, self.k + 1) for chosen in settings], NO_HYPER)
        self._write(new, lives, groups)

    def _write(self, new: InnerState, lives: list[list[int]], groups: list[tuple[int, ...]]) -> None:
        """Put the new weights into `param_groups`, and the rule's new memory into the state."""
        for index, (live, members, memory) in enumerate(zip(lives, groups, new.rule, strict=True)):
            weights = self.param_groups[index]["params"]
            for i, number in zip(live, members, strict=True):
                weights[i] = new.params[number]
            if isinstance(memory, tuple):
                self._state[index].update(zip(live, memory, strict=True))
            else:
                self._state[index]["group"] = memory

    def _memory(self, index: int, live: list[int], params: list[Tensor], settings: Mapping[str, Any]) -> Any:
        """Return the rule's memory of a group, complete for its settings: one that was turned on needs its buffers."""
        state = self._state[index]
        form = (len(live), *map(_form, settings.values()))
        if self._complete_for[index] != form:
            check_group(self.rule, settings, params)
            fresh = self.rule.init([p.detach() for p in params], settings)
            if isinstance(fresh, tuple):
                for place, (i, start) in enumerate(zip(live, fresh, strict=True)):
                    state[i] = self._completed(index, place, state.get(i), start, params[place], settings)
            else:
                state.setdefault("group", fresh)
            self._complete_for[index] = form
            self._foreign[index] = False
        return state["group"] if "group" in state else tuple(state[i] for i in live)

    def _completed(self, index: int, place: int, entry: Any, start: Any, param: Tensor, settings: Any) -> Any:
        """Return the memory of one parameter: its present state in the form of the rule, or `start` without one.

        The state of another optimizer is copied and detached; that of this one stays in the graph.
        """
        if not entry:
            return start
        if self._foreign[index] and isinstance(self.rule, ParameterRule):
            return self.rule.adopt(entry, param, settings, index=place)
        completed = complete_entry(start, entry)
        return {name: _restored(completed[name], value) for name, value in start.items()}

    def _selected(self, name: str, value: Any, live: list[int]) -> Any:
        """Return a list with one entry per parameter without those of the frozen ones."""
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
            for entry in packed["state"].values() if self.rule.name == "SGD" else ():
                entry.pop("step", None)  # torch.optim's SGD counts no steps
            return packed
        for group in packed["param_groups"]:
            group["k"] = self.k
        return pack(packed, self.rule)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over a state_dict; see `DifferentiableOptimizer.load_state_dict`."""
        groups = [dict(group) for group in state_dict["param_groups"]]
        if self.aggregates:
            check_rule_name(state_dict, self.rule)
            for group, missing in zip(groups, unpack(groups, self.param_groups, self.rule), strict=True):
                group.update(missing)
        super().load_state_dict({**state_dict, "param_groups": groups})
        if self.aggregates:
            self.k = groups[0]["k"]


def _listed(value: Any) -> list[Any]:
    """Return the entries of a list or tuple, and of those in it."""
    if isinstance(value, list | tuple):
        return [entry for item in value for entry in _listed(item)]
    return [value]


def _form(value: Any) -> Any:
    """Return what a check of a setting depends on: the shape of a tensor, or whether a number is on."""
    return value.shape if isinstance(value, Tensor) else isinstance(value, list) or bool(value)


def _numbers_to_tensors(entry: dict[str, Any]) -> None:
    """Write the numbers of a state as torch.optim does, in double precision, except `step`, which is whole."""
    for name, value in entry.items():
        if not isinstance(value, Tensor):
            entry[name] = torch.tensor(float(value), dtype=None if name == "step" else torch.float64)


def _restored(value: Any, start: Any) -> Any:
    """Return an entry of a state in the form of the rule: a number that `_numbers_to_tensors` wrote, or as it is."""
    if isinstance(start, Tensor) or (isinstance(value, Tensor) and value.requires_grad):
        return value
    return type(start)(value)
