"""Rollouts of tensors and trees of tensors: `rollout`, `hypergradient`, `lower_point`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ._adjoints.base import Adjoint
from ._context.forward import surroundings
from ._modules.skeleton import module_slot
from ._rollout.accumulate import Accumulate, mean, mean_with_slopes, parts_of_last, splitter
from ._rollout.losses import Trace
from ._solve import Loop, Start, solve, warn_without_graph
from ._step.gradients import gradient
from ._step.objective import Loss, TreeObjective
from ._step.rules.resolve import resolve
from ._step.settings import check_group, complete
from ._step.tasks import TasksObjective
from ._step.update import Group, Update
from ._support.checks import door
from ._support.slots import Slots, Template
from ._support.tensors import describe, is_differentiable
from ._support.torch_private import inside_transform
from ._support.tree import Leaf, detach, flatten, named_leaves, replace_tensors, tensors, unflatten
from ._support.types import InnerState, Prox, Rate, RuleLike


class Hypergradient(NamedTuple):
    """What `hypergradient` returns.

    Attributes:
        value: F(x, y_K); with tasks=B the B values.
        grad: dF/dx (of the sum over tasks) in the same tree as `hyper`; a module becomes a dict of names.
        params: y_K, detached; with tasks=B the task dimension is in front.
        trace: The losses on the way.
    """

    value: Tensor
    grad: Any
    params: Any
    trace: Trace


@door("lower upper params hyper", then="steps")
def rollout(
    lower: Loss,
    upper: Loss | None,
    params: Any,
    hyper: Any = None,
    *,
    steps: int,
    lr: Rate | None = None,
    upper_lr: Rate | None = None,
    alpha: Rate = 0.0,
    rule: RuleLike = None,
    prox: Prox | None = None,
    batches: Any = None,
    tasks: int | None = None,
    adjoint: Adjoint | None = None,
    compile: bool | str = False,
    chunk_size: int | None = None,
    on_divergence: str = "raise",
    accumulate: Accumulate = None,
    **settings: Any,
) -> Any:
    r"""Run K inner steps from y_0 and return y_K, differentiable in all that requires grad.

    .. math:: y_{k+1} = y_k - [ \alpha_k s_u \nabla_y F + (1 - \alpha_k) (y_k - \mathrm{prox}(y_k - D_k)) ]

    Gradients flow into `hyper`, into y_0 (which is cloned first), into tensors among the settings (`lr`, `upper_lr`,
    `alpha`, the strength of a prox) and into those of `batches`, as the adjoint decides.

    Args:
        lower: ``f(params, hyper, batch)``, the lower loss.
        upper: ``F(params, hyper, batch)``; may be None where alpha is 0.
        params: y_0, a tensor or a tree of tensors.
        hyper: x, a tensor, a module, or a tree of them.
        steps: K, the number of inner steps.
        lr: s_l; by default the rule's own.
        upper_lr: s_u; the same as `lr` if None.
        alpha: The weight of the upper direction: a number, a schedule or a tensor.
        rule: None for SGD, a class of torch.optim, `FISTA`, or a torchopt transformation (then without `lr`).
        prox: A proximal map of `bda_optim.prox`.
        batches: One batch per step.
        tasks: The number B of tasks; every tensor of a batch then has it as its first dimension, and so has the result.
        adjoint: `Unroll()` by default.
        compile: Whether to compile the step and its adjoint.
        chunk_size: How many tasks run at once; fewer need less memory, if the adjoint is `Checkpointed`.
        on_divergence: What to do if a loss, or y, is not finite from step k on. "raise" raises an error that names k,
            the parameter and the last losses; "stop" warns, and returns y_{k-1}, differentiable, as ``steps=k-1`` would
            (for all tasks; an error if k = 1); "ignore" returns y_K as it is. Values are checked once, after the loop.
        accumulate: M, gradient accumulation: every tensor of a batch is cut into M parts along its first dimension (the
            second with `tasks`), and both losses are the means over the parts, weighted by their sizes. Under
            `Checkpointed` a step then holds the graph of one part at a time; `Unroll` and `ForwardMode` record all
            parts, and save nothing. Or a function ``batch -> [(weight, part), ...]``, whose weights are normalised.
            Losses that are sums, and batch norm in training mode, give another result than the whole batch, as
            with gradient accumulation anywhere. Buffers and random numbers run through the parts in order, lower
            loss first.
        **settings: The rule's own, such as `momentum` or `betas`.

    Returns:
        y_K, in the same tree as `params`.

    >>> x = torch.tensor(3.0, requires_grad=True)
    >>> y = rollout(lambda y, x, b: 0.5 * (y - x) ** 2, None, torch.tensor(0.0), x, steps=2, lr=0.5)
    >>> y.item(), torch.autograd.grad(y, x)[0].item()
    (2.25, 0.75)
    """
    loop = Loop(
        steps=steps, batches=batches, tasks=tasks, adjoint=adjoint, compile=compile, chunk_size=chunk_size,
        on_divergence=on_divergence, accumulate=accumulate,
    )  # fmt: skip
    slots = Slots()
    template = slots.template(hyper, "hyper", module_slot(slots))
    settings |= {"lr": lr, "upper_lr": upper_lr, "alpha": alpha, "prox": prox}
    start = _start(params, [p.clone() for p in _lower_variables(params)], template, slots, rule, settings)
    end = solve(lower, upper, start, loop)
    warn_without_graph(end.state.params, start)
    return replace_tensors(params, end.state.params)


@door("lower upper params hyper", then="steps")
def hypergradient(
    lower: Loss,
    upper: Loss,
    params: Any,
    hyper: Any,
    *,
    steps: int,
    lr: Rate | None = None,
    upper_lr: Rate | None = None,
    alpha: Rate = 0.0,
    rule: RuleLike = None,
    prox: Prox | None = None,
    batches: Any = None,
    upper_batch: Any = None,
    tasks: int | None = None,
    adjoint: Adjoint | None = None,
    compile: bool | str = False,
    chunk_size: int | None = None,
    on_divergence: str = "raise",
    accumulate: Accumulate = None,
    **settings: Any,
) -> Hypergradient:
    r"""Return F(x, y_K(x)), its derivative with respect to x, and y_K.

    .. math:: \frac{d\varphi_K}{dx} = \partial_x F(x, y_K) + \Big(\frac{d y_K}{dx}\Big)^T \partial_y F(x, y_K)

    Nothing is written to any `.grad`. A tensor of `hyper` that is also `params` itself stands for y_0. The arguments
    are those of `rollout`, and `upper_batch`, which the last evaluation of `upper` is given: in the parts of
    `accumulate`, if all its tensors have the same first dimension of at least M, and whole otherwise. Inside a
    transform of `torch.func` the result can be differentiated and mapped further, and x counts where the losses,
    settings and batches are given it directly; what was computed from it beforehand (``lr=x.exp()``) is a constant
    there.

    Returns:
        A `Hypergradient` with `value`, `grad`, `params` and `trace`.

    >>> lower = lambda y, x, b: 0.5 * y[0] ** 2 - x * y[0]
    >>> upper = lambda y, x, b: 0.5 * (x - y[1]) ** 2 + 0.5 * (y[0] - 1) ** 2
    >>> out = hypergradient(lower, upper, torch.tensor([2.0, 2.0]), torch.tensor(0.0), steps=16, lr=0.2)
    >>> round(out.grad.item(), 4)
    -2.9171
    """
    if upper is None:
        raise TypeError("`hypergradient` differentiates the upper loss; got upper=None. Use `rollout` for y_K alone.")
    _check_hyper(hyper)
    loop = Loop(
        steps=steps, batches=batches, tasks=tasks, adjoint=adjoint, compile=compile, chunk_size=chunk_size,
        on_divergence=on_divergence, accumulate=accumulate,
    )  # fmt: skip
    slots = Slots()
    template = slots.template(hyper, "hyper", module_slot(slots))
    settings |= {"lr": lr, "upper_lr": upper_lr, "alpha": alpha, "prox": prox}
    transformed = inside_transform()

    def evaluate(given: Sequence[Tensor]) -> tuple[Tensor, tuple[Tensor, Sequence[Tensor], list[Tensor]]]:
        copies = {id(t): copy for t, copy in zip(slots.tensors, given, strict=True)}
        constants = (p if transformed else p.detach() for p in _lower_variables(params))
        ys = [copies.get(id(p), y).clone() for p, y in zip(tensors(params), constants, strict=True)]
        start = _start(params, ys, template, slots, rule, settings)
        end = solve(lower, upper, start._replace(values=given), loop)
        objective = start.objective if end.mapper is None else TasksObjective(start.objective, end.mapper)
        losses = [losses for losses in end.trace if losses is not None]

        def last_loss(ys: Sequence[Tensor], batch: Any) -> Tensor:
            with surroundings(twice=loop.twice):
                value, _ = objective(upper, ys, (), given, batch)
            _check_value(value, tasks)
            return value

        parts = parts_of_last(splitter(loop.accumulate, tasks), upper_batch)
        if len(parts) == 1 or transformed:
            value = mean(last_loss, end.state.params, parts)
            return value.sum(), (value, end.state.params, losses)
        total, value = mean_with_slopes(last_loss, end.state.params, [*given, *slots.tensors], parts)
        return total, (value, end.state.params, losses)

    if transformed:
        grads, (value, last, losses) = torch.func.grad(evaluate, has_aux=True)(tuple(slots.tensors))
    else:
        given = [t.detach().requires_grad_(is_differentiable(t)) for t in slots.tensors]
        with torch.enable_grad():
            total, (value, last, losses) = evaluate(given)
            grads = _total_derivatives(total, given, slots.tensors)
        value, last = detach((value, last))
    return Hypergradient(value, _mirror(hyper, slots, grads), replace_tensors(params, last), Trace(*losses))


def lower_point(
    lower: Loss, params: Any, hyper: Any = None, batch: Any = None, *, lr: float | Tensor, prox: Prox | None = None
) -> Any:
    r"""Return the paper's y~, one proximal step of the lower level from y: what is sparse, or feasible.

    .. math:: \tilde y = \mathrm{prox}_{s_l g}(y - s_l \nabla_y f(x, y))

    With alpha > 0 the iterate y_K itself carries a part of the upper direction; supports are read from y~.

    >>> from bda_optim import prox
    >>> lower_point(lambda y, x, b: 0.5 * ((y - 1) ** 2).sum(), torch.tensor([3.0, 0.2]), lr=1.0, prox=prox.l1(0.4))
    tensor([0.6000, 0.6000])
    """
    ys = _lower_variables(params)
    settings = complete(resolve(None), {"lr": lr, "prox": prox})
    check_group(resolve(None), settings, ys)
    with torch.enable_grad(), surroundings():
        points = [y.detach().requires_grad_() for y in ys]
        grads = gradient(lower(replace_tensors(params, points), hyper, batch), points, "lower", 1)
    with torch.no_grad():
        update = Update(resolve(None), [Group(tuple(range(len(ys))), Template.constant(settings))])
        return replace_tensors(params, update.lower_point(ys, grads, update.settings((), 1), hyper))


def _start(
    params: Any, ys: Sequence[Tensor], hyper: Template, slots: Slots, rule: Any, settings: Mapping[str, Any]
) -> Start:
    """Return the start of a rollout from the tensors `ys`, laid out as the tree `params`."""
    chosen = resolve(rule)
    group = complete(chosen, settings)
    check_group(chosen, group, ys)
    names = [name for name, leaf in named_leaves(params, "params")[0] if isinstance(leaf, Tensor)]
    state = InnerState(tuple(ys), (chosen.init([y.detach() for y in ys], group),))
    groups = [(tuple(range(len(ys))), group)]
    return Start(TreeObjective(params, hyper), state, names, chosen, groups, hyper, slots)


def _lower_variables(params: Any) -> list[Tensor]:
    if isinstance(params, nn.Module):
        raise TypeError(
            f"`params` must be a tensor or a tree of tensors; got the module {type(params).__name__}. Use "
            "`BDAInnerOptimizer(module.parameters(), ...).unroll(module, ...)`, or pass "
            "`dict(module.named_parameters())`."
        )
    variables = tensors(params)
    if not variables:
        raise ValueError(f"`params` must be a tensor or a tree of tensors; got {type(params).__name__} without any. ")
    for name, leaf in named_leaves(params, "params")[0]:
        if isinstance(leaf, Tensor) and not is_differentiable(leaf):
            raise ValueError(
                f"lower variables must be floating point; got {name}, {describe(leaf)}. Keep it in `hyper`."
            )
    return variables


def _total_derivatives(value: Tensor, given: Sequence[Tensor], originals: Sequence[Tensor]) -> list[Tensor]:
    """Return the derivatives with respect to the tensors of `hyper`, zeros where there are none.

    The losses are `given` copies; but a loss may have captured the original, and a setting or a batch may be computed
    from it (``lr=log_lr.exp()``): that counts as well.
    """
    wanted = [t for t in (*given, *originals) if t.requires_grad]
    derivatives: dict[int, Tensor | None] = {}
    if wanted and value.requires_grad:
        # The graph behind the originals is the user's, who may need it again.
        outside = any(t.requires_grad for t in originals)
        slopes = torch.autograd.grad(value, wanted, allow_unused=True, retain_graph=outside)
        derivatives = dict(zip(map(id, wanted), slopes, strict=True))
    pairs = (
        (derivatives.get(id(new)), derivatives.get(id(old)), new) for new, old in zip(given, originals, strict=True)
    )
    return [sum((p for p in (a, b) if p is not None), start=torch.zeros_like(t)) for a, b, t in pairs]


def _check_hyper(hyper: Any) -> None:
    """Raise where `hyper` as a whole is something that has no gradient."""
    if isinstance(hyper, Tensor):
        accepted = is_differentiable(hyper)
    else:
        accepted = hyper is None or isinstance(hyper, nn.Module) or dataclasses.is_dataclass(hyper)
        accepted = accepted or flatten(hyper)[1] != Leaf(0)
    if not accepted:
        got = describe(hyper) if isinstance(hyper, Tensor) else repr(hyper)
        raise TypeError(
            f"`hyper` must be a floating-point tensor, a module, or a tree of them; got {got}. Make it a tensor, as in "
            "`torch.tensor(0.1)`."
        )


def _check_value(value: Any, tasks: int | None) -> None:
    if not isinstance(value, Tensor) or value.numel() != (tasks or 1):
        got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"the upper loss must be a scalar; got {got}. Reduce it, for example by `.mean()`.")


def _mirror(hyper: Any, slots: Slots, grads: Sequence[Tensor]) -> Any:
    """Lay gradients out as `hyper` is; what is not a floating-point tensor has the gradient None."""
    by_id = {id(t): grad for t, grad in zip(slots.tensors, grads, strict=False)}
    leaves, spec = named_leaves(hyper, "hyper")
    return unflatten([_gradient_of(value, by_id) for _, value in leaves], spec)


def _gradient_of(value: Any, grads: Mapping[int, Tensor]) -> Any:
    if isinstance(value, nn.Module):
        return {name: _gradient_of(p, grads) for name, p in value.named_parameters()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _gradient_of(getattr(value, field.name), grads) for field in dataclasses.fields(value)}
    return grads[id(value)] if isinstance(value, Tensor) and is_differentiable(value) else None
