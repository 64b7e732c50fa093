"""The rule that `rule=` stands for."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch

from ..._support.types import Rule
from .adam import Adam, Adamax, AdamW, NAdam, RAdam
from .adaptive import ASGD, Adadelta, Adafactor, Adagrad, RMSprop, Rprop
from .base import ParameterRule
from .sgd import SGD
from .transformation import Transformation

RULES: Mapping[Any, ParameterRule] = {
    getattr(torch.optim, rule.__name__): rule()
    for rule in (SGD, Adam, AdamW, Adamax, NAdam, RAdam, RMSprop, Rprop, Adagrad, Adadelta, ASGD, Adafactor)
    if hasattr(torch.optim, rule.__name__)  # torch below 2.5 has no Adafactor
}
REFUSED: Mapping[str, str] = {
    "LBFGS": "a line search and several evaluations per step have no derivative here. Use `bda_optim.FISTA`",
    "SparseAdam": "sparse gradients are not differentiable. Use `torch.optim.Adam` and dense gradients",
    "Muon": "it iterates in bfloat16, where a derivative means nothing. Use `torch.optim.AdamW`",
}
_PARTS = ("name", "defaults", "elementwise", "validate", "init", "point", "update")


@functools.lru_cache(maxsize=64)
def _transformation(transformation: Any) -> Transformation:
    """Return a transformation as a rule, the same one each time: it is tried out once."""
    return Transformation(transformation)


def resolve(rule: Any) -> Rule:
    """Return the rule that `rule=` stands for.

    Args:
        rule: None (SGD), a class of torch.optim, a `Rule` (a class such as `FISTA`, or an instance), or a torchopt
            transformation such as ``torchopt.adam(lr=0.1)``.

    Raises:
        ValueError: If it is a class of torch.optim without a meaningful derivative.
        TypeError: If it is none of the above.

    >>> resolve(torch.optim.Adam)
    Adam()
    """
    if isinstance(rule, torch.optim.Optimizer):
        kind = type(rule).__name__
        raise TypeError(f"`rule` must be a class, not an optimizer; got an instance of {kind}. Pass the class.")
    if isinstance(rule, type) and issubclass(rule, torch.optim.Optimizer):
        return _of_torch(rule)
    if not isinstance(rule, type) and hasattr(rule, "init") and hasattr(rule, "update"):
        if not hasattr(rule, "defaults"):
            return _transformation(rule)
    chosen = SGD if rule is None else rule
    if missing := [part for part in _PARTS if not hasattr(chosen, part)]:
        raise TypeError(
            f"`rule` must be a class of torch.optim ({_known()}), a torchopt transformation such as "
            f"`torchopt.adam(lr=0.1)`, or a `bda_optim.Rule`; got {rule!r}, which lacks {', '.join(missing)}. Derive a "
            "rule of your own from `bda_optim.Rule`, and define `defaults` and `update`."
        )
    resolved: Rule = chosen() if isinstance(chosen, type) else chosen
    if not isinstance(resolved.defaults, Mapping) or "lr" not in resolved.defaults:
        raise TypeError(
            f"`defaults` of a rule must be a dict of its settings, `lr` among them; got {resolved.defaults!r} of "
            f'{resolved.name}. Write `defaults = {{"lr": 0.1}}`.'
        )
    return resolved


def _of_torch(rule: type) -> Rule:
    if rule in RULES:
        return RULES[rule]
    if rule.__name__ in REFUSED and rule is getattr(torch.optim, rule.__name__, None):
        name = rule.__name__
        raise ValueError(f"`rule` must be differentiable; got torch.optim.{name}: {REFUSED[name]}.")
    raise TypeError(
        f"`rule` must be a class of torch.optim itself; got {rule.__module__}.{rule.__qualname__}, whose `step` cannot "
        f"be honoured. Use {_known()}, or derive a class from `bda_optim.Rule`."
    )


def _known() -> str:
    return ", ".join(sorted(own.name for own in RULES.values()))
