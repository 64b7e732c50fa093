"""From what a user calls a rule to the rule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..._support.types import Rule
from .adam import Adam, Adamax, AdamW, NAdam, RAdam
from .adaptive import ASGD, Adadelta, Adafactor, Adagrad, RMSprop, Rprop
from .base import ParameterRule
from .sgd import SGD
from .transformation import Transformation

_RULES: Mapping[Any, ParameterRule] = {
    getattr(torch.optim, rule.__name__): rule()
    for rule in (SGD, Adam, AdamW, Adamax, NAdam, RAdam, RMSprop, Rprop, Adagrad, Adadelta, ASGD, Adafactor)
    if hasattr(torch.optim, rule.__name__)  # a torch older than 2.5 has no Adafactor
}
_REFUSED: Mapping[str, str] = {
    "LBFGS": "a line search and several evaluations per step have no derivative here. Use `bda_optim.FISTA`",
    "SparseAdam": "sparse gradients are not differentiable. Use `torch.optim.Adam` and dense gradients",
    "Muon": "it iterates in bfloat16, where a derivative means nothing. Use `torch.optim.AdamW`",
}
_PROTOCOL = ("name", "defaults", "elementwise", "validate", "init", "point", "update")


def resolve(rule: Any) -> Rule:
    """Return the update rule that is meant.

    Args:
        rule: None (SGD), a class of torch.optim, a rule class such as `FISTA`, an object with the methods of a rule, or
            a torchopt transformation such as ``torchopt.adam(lr=0.1)``.

    Raises:
        ValueError: It is a class of torch.optim without a meaningful derivative.
        TypeError: It is none of the above.

    Example:
        >>> resolve(torch.optim.Adam)
        Adam()
    """
    known = ", ".join(sorted(own.name for own in _RULES.values()))
    if isinstance(rule, torch.optim.Optimizer):
        kind = type(rule).__name__
        raise TypeError(f"`rule` must be a class, not an optimizer; got an instance of {kind}. Pass the class.")
    if isinstance(rule, type) and issubclass(rule, torch.optim.Optimizer):
        name, full_name = rule.__name__, f"{rule.__module__}.{rule.__qualname__}"
        if rule in _RULES:
            return _RULES[rule]
        if name in _REFUSED and rule is getattr(torch.optim, name, None):
            raise ValueError(f"`rule` must be differentiable; got torch.optim.{name}: {_REFUSED[name]}.")
        raise TypeError(
            f"`rule` must be a class of torch.optim itself; got {full_name}, whose `step` cannot be honoured. "
            f"Use {known}, or an object with {', '.join(_PROTOCOL)}."
        )
    found: Any = SGD if rule is None else rule
    if not isinstance(rule, type) and hasattr(rule, "init") and hasattr(rule, "update") and not hasattr(rule, "point"):
        return Transformation(rule)
    if not all(hasattr(found, part) for part in _PROTOCOL):
        raise TypeError(
            f"`rule` must have {', '.join(_PROTOCOL)}; got {rule!r}. Use a class of torch.optim: {known}; or a "
            "torchopt transformation, such as `torchopt.adam(lr=0.1)`."
        )
    resolved: Rule = found() if isinstance(found, type) else found
    return resolved
