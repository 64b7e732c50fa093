"""The settings of a parameter group: their defaults, and whether they can be honoured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from .._support.tensors import broadcasts
from .._support.types import Rule
from .aggregation import is_zero, weight
from .clipping import CLIPPING, check_clipping

AGGREGATION: Mapping[str, Any] = {"upper_lr": None, "alpha": 0.0, "prox": None, **CLIPPING}
"""The settings of the aggregated step, which every rule has, with their defaults."""


def complete(rule: Rule, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return all settings of a group: the given ones, and defaults for the others and for ``lr=None``.

    Raises:
        TypeError: If the rule has no such setting.
    """
    known = {**rule.defaults, **AGGREGATION}
    for name in given:
        if name not in known:
            names = ", ".join(sorted(known))
            raise TypeError(f"the rule {rule.name} has no setting `{name}`; it takes {names}. Check the spelling.")
    chosen = {name: value for name, value in given.items() if not (name == "lr" and value is None)}
    return {**known, **chosen}


def check_group(rule: Rule, settings: Mapping[str, Any], params: Sequence[Tensor]) -> None:
    """Raise where the settings of a group cannot be honoured for its parameters; schedules are checked at k = 1."""
    for name in ("lr", "upper_lr", "alpha", "prox"):
        if isinstance(settings[name], type):
            raise TypeError(
                f"`{name}` must be a value; got the class {settings[name].__name__}. Call it, as in "
                f"`{name}={settings[name].__name__}(0.5)`."
            )
    values = {n: settings[n](1) if callable(settings[n]) else settings[n] for n in ("lr", "upper_lr", "alpha")}
    for name, value in values.items():
        absent = value is None and name != "alpha"
        if isinstance(value, bool) or not (absent or isinstance(value, int | float | Tensor | list)):
            hint = "Call the schedule first, as in `harmonic(0.5)`" if callable(value) else "Convert it by `float()`"
            raise TypeError(f"`{name}` must be a number, a schedule or a tensor; got {value!r}. {hint}.")
    settings = {**settings, **{n: values[n] for n in ("lr", "upper_lr")}}
    for name, value in settings.items():
        if isinstance(value, list) and not isinstance(rule.defaults.get(name), tuple) and name not in CLIPPING:
            _check_list(name, value, params)
        elif isinstance(value, Tensor) and value.numel() != 1:
            _check_broadcast(name, value, params)
    rule.validate({name: settings[name] for name in rule.defaults})
    upper_lr = settings["upper_lr"]
    if isinstance(upper_lr, int | float) and not (math.isfinite(upper_lr) and upper_lr >= 0):
        raise ValueError(f"`upper_lr` must be a number of at least 0; got {upper_lr}. Leave it out to follow `lr`.")
    weight(values["alpha"], 1)  # raises outside [0, 1)
    check_clipping(settings)
    if rule.defaults["lr"] is None:
        _check_own_rate(rule, settings)
    if settings["prox"] is not None:
        _check_prox(settings["prox"], settings["lr"])


def _check_prox(prox: Any, lr: Any) -> None:
    if not callable(prox):
        raise TypeError(
            f"`prox` must be a proximal map; got {prox!r}. Use one of `bda_optim.prox`, such as `prox.l1(0.1)`."
        )
    per_element = isinstance(lr, list) or (isinstance(lr, Tensor) and lr.numel() != 1)
    if per_element and not getattr(prox, "separable", False):
        raise ValueError(
            f"a prox that couples the elements has no meaning with one rate per element; got {prox!r} and a list or a "
            "tensor of several elements as `lr`. Use one rate per group, or a separable prox such as `prox.l1`."
        )


def _check_own_rate(rule: Rule, settings: Mapping[str, Any]) -> None:
    """Raise if a rule with a rate of its own (a torchopt transformation) gets a useless rate, or lacks a needed one."""
    lr = settings["lr"]
    if settings["prox"] is None and lr is not None:
        raise ValueError(
            f"a {rule.name} has its own rate, and `lr` would have no effect; got lr={lr}. Write it into the "
            "transformation, as in `rule=torchopt.sgd(lr=0.1)`, and leave `lr` out."
        )
    if settings["prox"] is not None and lr is None:
        raise ValueError(f"the prox needs a step, and a {rule.name} does not expose its rate. Pass it as `lr` too.")
    if settings["upper_lr"] is None and not is_zero(settings["alpha"]):
        raise ValueError(
            f"the upper direction needs a rate where `alpha` is not 0, and a {rule.name} does not expose its own; got "
            "upper_lr=None. Pass `upper_lr`."
        )


def _check_list(name: str, value: list[Any], params: Sequence[Tensor]) -> None:
    shapes = [tuple(p.shape) for p in params]
    got = [tuple(v.shape) if isinstance(v, Tensor) else type(v).__name__ for v in value]
    if len(got) != len(shapes) or not all(g in (s, ()) for g, s in zip(got, shapes, strict=True)):
        raise ValueError(
            f"`{name}` as a list must have one tensor per parameter of the group, of its shape (or one element); got "
            f"{got} for parameters of {shapes}. Write `{name}=[torch.full_like(p, 0.1) for p in params]`."
        )


def _check_broadcast(name: str, value: Tensor, params: Sequence[Tensor]) -> None:
    shapes = [tuple(p.shape) for p in params]
    if not all(broadcasts(value.shape, shape) for shape in shapes):
        raise ValueError(
            f"`{name}` as a tensor must have one element, or broadcast to every parameter of the group; got shape "
            f"{tuple(value.shape)} for parameters of {shapes}. Write "
            f"`{name}=[torch.full_like(p, 0.1) for p in params]` for a rate per element."
        )
