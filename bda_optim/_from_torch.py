"""A BDAInnerOptimizer in the place of an optimizer of torch.optim."""

from __future__ import annotations

from torch.optim import Optimizer

from ._optimizer import BDAInnerOptimizer
from ._step.rules.resolve import resolve

_NO_SETTINGS = {"foreach", "fused", "capturable", "differentiable"}  # how torch computes a step, not what


def from_torch(optimizer: Optimizer) -> BDAInnerOptimizer:
    """Return a BDAInnerOptimizer with the rule, the groups, the settings and the live state of one of torch.optim.

    >>> import torch
    >>> p = torch.nn.Parameter(torch.zeros(2))
    >>> from_torch(torch.optim.Adam([p], lr=0.1, betas=(0.5, 0.9))).param_groups[0]["betas"]
    (0.5, 0.9)
    """
    if isinstance(optimizer, BDAInnerOptimizer):
        return optimizer
    rule = resolve(type(optimizer))
    groups = []
    for group in optimizer.param_groups:
        own = {"rule_alpha" if name == "alpha" else name: value for name, value in group.items()}
        known = {"params", *rule.defaults}
        groups.append({name: value for name, value in own.items() if name in known and name not in _NO_SETTINGS})
    inner = BDAInnerOptimizer(groups, rule=type(optimizer))
    for group in inner.param_groups:
        for i, p in enumerate(group["params"]):
            if optimizer.state.get(p):
                inner.state[p] = rule.adopt(optimizer.state[p], p, group, index=i)  # type: ignore[attr-defined]
    return inner
