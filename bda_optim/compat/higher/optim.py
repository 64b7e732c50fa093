"""Differentiable optimizers, as in `higher.optim`: a class for every optimizer of torch.optim that has a derivative."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from bda_optim._optimizer import BDAInnerOptimizer
from bda_optim._step.rules.resolve import resolve

from ._diffopt import DifferentiableOptimizer, GradCallback, Grouped
from ._override import Override, per_group, restored, trainable
from ._rule_optimizer import RuleOptimizer
from .patch import Device, FunctionalModule

__all__ = [
    "DifferentiableASGD",
    "DifferentiableAdadelta",
    "DifferentiableAdafactor",
    "DifferentiableAdagrad",
    "DifferentiableAdam",
    "DifferentiableAdamW",
    "DifferentiableAdamax",
    "DifferentiableBDA",
    "DifferentiableNAdam",
    "DifferentiableOptimizer",
    "DifferentiableRAdam",
    "DifferentiableRMSprop",
    "DifferentiableRprop",
    "DifferentiableSGD",
    "apply_trainable_opt_params",
    "create_diff_optim",
    "get_diff_optim",
    "get_trainable_opt_params",
    "register_optim",
]

# Scripts use these private names of `higher.optim`: the types in annotations, `_add` in updates of their own.
_OverrideType = Override
_GradCallbackType = GradCallback
_GroupedGradsType = Grouped


def _add(tensor: Tensor, a1: float | Tensor, a2: Tensor | None = None) -> Tensor:
    """Return ``tensor + a1``, or ``tensor + a1 * a2``, as a new tensor."""
    return tensor + (a1 if a2 is None else a1 * a2)


class DifferentiableSGD(RuleOptimizer):
    """A differentiable `torch.optim.SGD`."""

    rule = resolve(torch.optim.SGD)


class DifferentiableAdam(RuleOptimizer):
    """A differentiable `torch.optim.Adam`."""

    rule = resolve(torch.optim.Adam)


class DifferentiableAdamW(RuleOptimizer):
    """A differentiable `torch.optim.AdamW`."""

    rule = resolve(torch.optim.AdamW)


class DifferentiableAdamax(RuleOptimizer):
    """A differentiable `torch.optim.Adamax`."""

    rule = resolve(torch.optim.Adamax)


class DifferentiableNAdam(RuleOptimizer):
    """A differentiable `torch.optim.NAdam`."""

    rule = resolve(torch.optim.NAdam)


class DifferentiableRAdam(RuleOptimizer):
    """A differentiable `torch.optim.RAdam`."""

    rule = resolve(torch.optim.RAdam)


class DifferentiableRMSprop(RuleOptimizer):
    """A differentiable `torch.optim.RMSprop`."""

    rule = resolve(torch.optim.RMSprop)


class DifferentiableRprop(RuleOptimizer):
    """A differentiable `torch.optim.Rprop`, whose steps depend on the signs of gradients alone."""

    rule = resolve(torch.optim.Rprop)


class DifferentiableAdagrad(RuleOptimizer):
    """A differentiable `torch.optim.Adagrad`."""

    rule = resolve(torch.optim.Adagrad)


class DifferentiableAdadelta(RuleOptimizer):
    """A differentiable `torch.optim.Adadelta`."""

    rule = resolve(torch.optim.Adadelta)


class DifferentiableASGD(RuleOptimizer):
    """A differentiable `torch.optim.ASGD`."""

    rule = resolve(torch.optim.ASGD)


class DifferentiableAdafactor(RuleOptimizer):
    """A differentiable `torch.optim.Adafactor`."""

    if hasattr(torch.optim, "Adafactor"):  # since torch 2.5
        rule = resolve(torch.optim.Adafactor)


class DifferentiableBDA(RuleOptimizer):
    """The differentiable form of `bda_optim.BDAInnerOptimizer`: ``step(lower, upper_loss=upper)``."""

    aggregates = True


_CLASSES: dict[Any, type[DifferentiableOptimizer]] = {BDAInnerOptimizer: DifferentiableBDA}
_CLASSES.update(
    (getattr(torch.optim, cls.rule.name), cls)
    for cls in RuleOptimizer.__subclasses__()
    if not cls.aggregates and hasattr(cls, "rule")
)


def get_diff_optim(
    opt: Optimizer,
    reference_params: Iterable[Tensor],
    fmodel: FunctionalModule | None = None,
    device: Device = None,
    override: Override | None = None,
    track_higher_grads: bool = True,
    **kwargs: Any,
) -> DifferentiableOptimizer:
    """Return the differentiable form of an optimizer, with its settings and a copy of its state.

    Args:
        opt: A `BDAInnerOptimizer`, an optimizer of torch.optim, or one of a class given to `register_optim`.
        reference_params: The parameters of the module that `opt` works on, as ``module.parameters()`` gives them.
        fmodel: The patched module whose weights `step` updates; without it `step` is given `params`.
        device: The device of the state; by default it stays where it is.
        override: Settings that replace the optimizer's: name to a value, or to a list with one per group. A tensor has
            one element, or broadcasts to the group's parameters.
        track_higher_grads: Whether steps can be differentiated; if False they give leaves.
        **kwargs: `grad_callback`, `first_order`; see `DifferentiableOptimizer`.
    """
    kind = _kind(type(opt))
    return kind(
        opt, reference_params, fmodel=fmodel, device=device, override=override, track_higher_grads=track_higher_grads,
        **kwargs,
    )  # fmt: skip


def create_diff_optim(
    opt_type: type[Optimizer],
    opt_kwargs: dict[str, Any] | None = None,
    params: Iterable[Any] | None = None,
    fmodel: FunctionalModule | None = None,
    device: Device = None,
    override: Override | None = None,
    track_higher_grads: bool = True,
    **kwargs: Any,
) -> DifferentiableOptimizer:
    """Return a differentiable optimizer without an ordinary one to start from.

    Args:
        opt_type: The class, as of `torch.optim`.
        opt_kwargs: Its settings.
        params: Tensors, or groups of them, of the shapes of the weights; not needed with `fmodel`. Tensors of
            ``fmodel.parameters()`` stand for themselves, others for the weights in order.
        fmodel: The patched module whose weights `step` updates.
        device: The device of the state.
        override: Settings that replace those of `opt_kwargs`.
        track_higher_grads: Whether steps can be differentiated.
        **kwargs: `grad_callback`, `first_order`; see `DifferentiableOptimizer`.

    >>> diffopt = create_diff_optim(torch.optim.SGD, {"lr": 0.5}, params=[torch.zeros(1)])
    >>> w = torch.ones(1, requires_grad=True)
    >>> diffopt.step((w**2).sum(), params=[w])
    [tensor([0.], grad_fn=<AddBackward0>)]
    """
    kind = _kind(opt_type)
    if params is None and fmodel is None:
        raise ValueError("`create_diff_optim` needs to know the weights; got neither. Pass `fmodel` or `params`.")
    given = list(fmodel.parameters() if params is None and fmodel is not None else params or ())
    groups: list[dict[str, Any]] = given if given and isinstance(given[0], dict) else [{"params": given}]
    groups = [{**group, "params": _listed(group["params"])} for group in groups]
    weights = [p for group in groups for p in group["params"]]
    stand_ins = {id(p): torch.zeros_like(p, requires_grad=p.is_floating_point()) for p in weights}
    for group in groups:
        group["params"] = [stand_ins[id(p)] for p in group["params"]]
    known = [] if fmodel is None else list(fmodel.parameters())
    if {id(p) for p in known} >= stand_ins.keys():
        weights = known
    reference = [stand_ins.get(id(p), p) for p in weights]
    opt: Any = opt_type
    return kind(
        opt(groups, **(opt_kwargs or {})), reference, fmodel=fmodel, device=device, override=override,
        track_higher_grads=track_higher_grads, **kwargs,
    )  # fmt: skip


def register_optim(optim_type: type[Optimizer], diff_optim_type: type[DifferentiableOptimizer]) -> None:
    """Register the differentiable form of an optimizer of the user's.

    Args:
        optim_type: The class of the optimizer.
        diff_optim_type: A subclass of `DifferentiableOptimizer` that does the same. A subclass of torch.optim.Adam that
            changes nothing about a step may be given `DifferentiableAdam`.
    """
    if not (isinstance(diff_optim_type, type) and issubclass(diff_optim_type, DifferentiableOptimizer)):
        raise TypeError(
            f"`register_optim` takes a subclass of `DifferentiableOptimizer`; got {diff_optim_type!r}. Derive one and "
            "define its `_update`."
        )
    _CLASSES[optim_type] = diff_optim_type


def get_trainable_opt_params(opt: Optimizer, device: Device = None) -> dict[str, list[Any]]:
    """Return the settings of an optimizer as tensors that can be learned, in the form that `override` takes.

    Numbers become tensors, also in tuples; switches, and numbers without a derivative, are left out. As in `higher`, a
    `momentum` or `weight_decay` of 0 is off and gets no gradient: start from a small number to learn it.

    Args:
        opt: The optimizer.
        device: The device of the tensors.

    >>> opt = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    >>> get_trainable_opt_params(opt)["lr"]
    [tensor(0.1000, requires_grad=True)]
    """
    kind = _CLASSES.get(type(opt))
    known = kind.learnable(opt) if kind is not None and issubclass(kind, RuleOptimizer) else None
    learned: dict[str, list[Any]] = {}
    for name in opt.param_groups[0]:
        if name != "params" and (known is None or name in known):
            tensors = [trainable(group[name], device) for group in opt.param_groups]
            if all(tensor is not None for tensor in tensors):
                learned[name] = tensors
    return learned


def apply_trainable_opt_params(opt: Optimizer, override: Override) -> None:
    """Write learned settings into an optimizer; each keeps the type that it has there.

    >>> opt = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    >>> apply_trainable_opt_params(opt, {"lr": [torch.tensor(0.5, requires_grad=True)]})
    >>> opt.param_groups[0]["lr"]
    0.5
    """
    for name, value in override.items():
        for group in opt.param_groups:
            if name not in group:
                raise ValueError(f"{type(opt).__name__} has no setting {name!r}. It has {', '.join(group)}.")
        pair = isinstance(opt.param_groups[0][name], tuple)
        values = per_group(name, value, len(opt.param_groups), pair=pair)
        for group, new in zip(opt.param_groups, values, strict=True):
            group[name] = restored(new, group[name], name)


def _kind(opt_type: Any) -> type[DifferentiableOptimizer]:
    if opt_type in _CLASSES:
        return _CLASSES[opt_type]
    if getattr(torch.optim, getattr(opt_type, "__name__", ""), None) is opt_type:
        resolve(opt_type)  # raises, with the reason why it cannot be differentiated
    raise ValueError(
        f"no differentiable form of {opt_type} is known. Derive one from `DifferentiableOptimizer` and pass both to "
        "`register_optim`."
    )


def _listed(params: Any) -> list[Tensor]:
    return [params] if isinstance(params, Tensor) else list(params)
