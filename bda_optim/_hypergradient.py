"""Rollouts: check what is asked, build the step, hand it to the adjoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._adjoints.unroll import Adjoint, Unroll
from ._compiled.step import CompiledStep
from ._compiled.units import with_plain_counts, with_tensor_counts
from ._context.forward import surroundings
from ._modules.skeleton import module_slot
from ._rollout.divergence import check_choice, watched
from ._rollout.items import Items, in_chunks
from ._rollout.losses import Trace, trace_of
from ._step.aggregation import is_zero, weight
from ._step.objective import Loss, Objective, OverTasks, TasksObjective, TreeObjective
from ._step.rules.resolve import resolve
from ._step.settings import check_group, complete
from ._step.step import BDAStep, Group, Update, gradients
from ._support.checks import check_ambient, check_count, check_devices
from ._support.slots import Slots, Template
from ._support.tensors import describe, is_differentiable
from ._support.tree import map_tensors, named_leaves, replace_tensors, unflatten
from ._support.tree import tensors as tensors_of
from ._support.types import InnerState, Record, Rule


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


class Problem:
    """A rollout with all its parts checked and its tensors collected.

    Args:
        lower: The lower loss.
        upper: The upper loss, or None.
        rule: The rule of all groups.
        groups: Per group, the members' indices and the settings.
        slots: The tensors collected so far; the settings' and the batches' are added.
        hyper: The user's upper variables.
        steps: K.
        batches: One batch per step, or None.
        tasks: B, or None.
        names: The names of the parameters.
        on_divergence: What becomes of a loop that is not finite.
    """

    def __init__(
        self,
        lower: Loss,
        upper: Loss | None,
        *,
        rule: Rule,
        groups: Sequence[tuple[tuple[int, ...], Mapping[str, Any]]],
        slots: Slots,
        hyper: Template,
        steps: int,
        batches: Any,
        tasks: int | None,
        names: Sequence[str],
        on_divergence: str,
    ) -> None:
        """Check and collect."""
        check_ambient()
        check_count("steps", steps)
        if tasks is not None:
            check_count("tasks", tasks)
        self.lower, self.upper, self.slots, self.hyper, self.tasks = lower, upper, slots, hyper, tasks
        self.names, self.on_divergence = tuple(names), on_divergence
        _check_upper(upper, [settings for _, settings in groups], steps)
        built = [Group(members, slots.template(dict(s), f"group {i}")) for i, (members, s) in enumerate(groups)]
        self.update = Update(rule, built, tasks=tasks)
        self.items = Items(batches, steps, slots, tasks=tasks)
        self.over_tasks = OverTasks(tasks) if tasks else None

    def run(
        self,
        objective: Objective,
        state: InnerState,
        values: Sequence[Tensor],
        adjoint: Adjoint,
        *,
        compile: bool | str,
    ) -> tuple[InnerState, Trace]:
        """Roll out from `state`, with `values` in the slots."""
        check_devices(state.params, [*zip(self.slots.names, values, strict=True), *self.items.constants])
        if self.tasks is not None:
            objective = TasksObjective(objective, self.tasks, self.over_tasks)
        step = BDAStep(objective, self.lower, self.upper, self.update, self.hyper, names=self.slots.names)
        with surroundings():
            if compile and not state.params[0].is_meta:
                each = self.tasks is not None and not self.update.rule.elementwise  # a count for each task
                start = with_tensor_counts(state, (self.tasks or 1,) if each else ())
                run: Any = CompiledStep(step, start, values, _mode(compile))
            else:
                run, start = step, state

            def once(items: Items) -> tuple[InnerState, list[Record]]:
                last, records = adjoint(run, start, tuple(values), items)
                if start is state:
                    return last, records
                return with_plain_counts(last, like=state), [record for unit in records for record in unit]

            last, records = watched(once, self.on_divergence, step, state, values, self.items, self.names)
        return last, trace_of(records, self.tasks)


def rollout(
    lower: Loss,
    upper: Loss | None,
    params: Any,
    hyper: Any = None,
    *,
    steps: int,
    lr: Any = None,
    upper_lr: Any = None,
    alpha: Any = 0.0,
    rule: Any = None,
    prox: Any = None,
    batches: Any = None,
    tasks: int | None = None,
    adjoint: Adjoint | None = None,
    compile: bool | str = False,
    chunk_size: int | None = None,
    on_divergence: str = "raise",
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
        steps: K.
        lr: s_l; by default the rule's own.
        upper_lr: s_u; the same as `lr` if None.
        alpha: The weight of the upper direction: a number, a schedule or a tensor.
        rule: None for SGD, a class of torch.optim, `FISTA`, or a torchopt transformation (then without `lr`).
        prox: A proximal map of `bda_optim.prox`.
        batches: One batch per step.
        tasks: The number B of tasks; every tensor of a batch then has it as its first dimension, and so has the result.
        adjoint: `Unroll()` by default.
        compile: Whether to compile the step and its adjoint; "reverse" or "mixed" chooses the adjoint's mode, which is
            measured otherwise.
        chunk_size: How many tasks run at once; fewer need less memory, if the adjoint is `Checkpointed`.
        on_divergence: What becomes of a loop in which a loss, or y, is not finite from step k on. "raise" is an error
            that names k, the parameter and the last losses; "stop" warns, and returns y_{k-1}, differentiable, as
            ``steps=k-1`` would (for all tasks; an error if k = 1); "ignore" returns y_K as it is. The values are looked
            at once, after the loop.
        **settings: The rule's own, such as `momentum` or `betas`.

    Returns:
        y_K, in the same tree as `params`.

    >>> x = torch.tensor(3.0, requires_grad=True)
    >>> y = rollout(lambda y, x, b: 0.5 * (y - x) ** 2, None, torch.tensor(0.0), x, steps=2, lr=0.5)
    >>> y.item(), torch.autograd.grad(y, x)[0].item()
    (2.25, 0.75)
    """
    slots = Slots()
    template = slots.template(hyper, "hyper", module_slot(slots))
    start = [p.clone() for p in _lower_variables(params)]
    state, _ = _run_tree(
        lower, upper, params, start, slots, template, list(slots.tensors), steps=steps, batches=batches, tasks=tasks,
        rule=rule, adjoint=adjoint, compile=compile, chunk_size=chunk_size, on_divergence=on_divergence,
        settings=dict(lr=lr, upper_lr=upper_lr, alpha=alpha, prox=prox, **settings),
    )  # fmt: skip
    return replace_tensors(params, state.params)


def hypergradient(
    lower: Loss,
    upper: Loss,
    params: Any,
    hyper: Any,
    *,
    steps: int,
    lr: Any = None,
    upper_lr: Any = None,
    alpha: Any = 0.0,
    rule: Any = None,
    prox: Any = None,
    batches: Any = None,
    upper_batch: Any = None,
    tasks: int | None = None,
    adjoint: Adjoint | None = None,
    compile: bool | str = False,
    chunk_size: int | None = None,
    on_divergence: str = "raise",
    **settings: Any,
) -> Hypergradient:
    r"""Return F(x, y_K(x)), its derivative with respect to x, and y_K.

    .. math:: \frac{d\varphi_K}{dx} = \partial_x F(x, y_K) + \Big(\frac{d y_K}{dx}\Big)^T \partial_y F(x, y_K)

    Nothing is written to any `.grad`. A tensor of `hyper` that is also `params` itself stands for y_0. The arguments
    are those of `rollout`, and `upper_batch`, which the last evaluation of `upper` is given.

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
    slots = Slots()
    template = slots.template(hyper, "hyper", module_slot(slots))
    given = [t.detach().requires_grad_(is_differentiable(t)) for t in slots.tensors]
    place = {id(t): i for i, t in enumerate(slots.tensors)}
    with torch.enable_grad():
        start = [
            given[place[id(p)]].clone() if id(p) in place else p.detach().clone() for p in _lower_variables(params)
        ]
        state, trace = _run_tree(
            lower, upper, params, start, slots, template, given, steps=steps, batches=batches, tasks=tasks,
            rule=rule, adjoint=adjoint, compile=compile, chunk_size=chunk_size, on_divergence=on_divergence,
            settings=dict(lr=lr, upper_lr=upper_lr, alpha=alpha, prox=prox, **settings),
        )  # fmt: skip
        objective: Objective = TreeObjective(params, template)
        if tasks is not None:
            objective = TasksObjective(objective, tasks)
        with surroundings():
            value, _ = objective(upper, state.params, (), given, upper_batch)
        _check_value(value, tasks)
        grads = _total_derivatives(value.sum(), given, slots.tensors[: len(given)])
    last = replace_tensors(params, [p.detach() for p in state.params])
    return Hypergradient(value.detach(), _mirror(hyper, slots, grads), last, trace)


def lower_point(
    lower: Loss, params: Any, hyper: Any = None, batch: Any = None, *, lr: float | Tensor, prox: Any = None
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
        grads = gradients(lower(replace_tensors(params, points), hyper, batch), points, "lower", 1, create_graph=False)
    with torch.no_grad():
        update = Update(resolve(None), [Group(tuple(range(len(ys))), Template.constant(settings))])
        return replace_tensors(params, update.lower_point(ys, grads, update.settings(()), hyper))


def expand(state: InnerState, tasks: int, rule: Rule) -> InnerState:
    """Give every tensor of a state a task dimension in front; numbers of an elementwise rule are shared."""

    def grow(t: Tensor) -> Tensor:
        return t.expand(tasks, *t.shape)

    memory = map_tensors(lambda t: t if rule.elementwise and t.dim() == 0 else grow(t), state.rule)
    return InnerState(tuple(map(grow, state.params)), memory, tuple(map(grow, state.buffers)))


def join(parts: Sequence[tuple[InnerState, Trace]]) -> tuple[InnerState, Trace]:
    """Put the results of chunks of tasks together."""
    if len(parts) == 1:
        return parts[0]
    columns = zip(*(tensors_of(state) for state, _ in parts), strict=True)
    joined = [column[0] if column[0].dim() == 0 else torch.cat(column) for column in columns]
    lower = torch.cat([trace.lower for _, trace in parts], dim=1)
    upper = [trace.upper for _, trace in parts if trace.upper is not None]
    return replace_tensors(parts[0][0], joined), Trace(lower, torch.cat(upper, dim=1) if upper else None)


def _run_tree(
    lower: Loss, upper: Loss | None, params: Any, start: list[Tensor], slots: Slots, template: Template,
    given: list[Tensor], *, steps: int, batches: Any, tasks: int | None, rule: Any, adjoint: Adjoint | None,
    compile: bool | str, chunk_size: int | None, on_divergence: str, settings: dict[str, Any],
) -> tuple[InnerState, Trace]:  # fmt: skip
    """Roll out from the tensors `start` of the tree `params`."""
    check_choice(on_divergence, chunk_size)
    chosen = resolve(rule)
    settings = complete(chosen, settings)
    check_group(chosen, settings, start)
    members = tuple(range(len(start)))
    names = [name for name, leaf in named_leaves(params, "params")[0] if isinstance(leaf, Tensor)]
    parts = []
    for some, size in in_chunks(batches, tasks, chunk_size):
        problem = Problem(
            lower, upper, rule=chosen, groups=[(members, settings)], slots=slots.copy(), hyper=template,
            steps=steps, batches=some, tasks=size, names=names, on_divergence=on_divergence,
        )  # fmt: skip
        state = InnerState(tuple(start), (chosen.init([p.detach() for p in start], settings),))
        if size is not None:
            state = expand(state, size, chosen)
        values = given + problem.slots.tensors[len(given) :]
        parts.append(problem.run(TreeObjective(params, template), state, values, adjoint or Unroll(), compile=compile))
    return join(parts)


def _mode(compile: bool | str) -> str:
    if compile is not True and compile not in ("reverse", "mixed"):
        raise ValueError(f'`compile` must be True, False, "reverse" or "mixed"; got {compile!r}.')
    return "auto" if compile is True else str(compile)


def _lower_variables(params: Any) -> list[Tensor]:
    found = tensors_of(params)
    if not found:
        raise ValueError(f"`params` must be a tensor or a tree of tensors; got {type(params).__name__} without any. ")
    for name, leaf in named_leaves(params, "params")[0]:
        if isinstance(leaf, Tensor) and not is_differentiable(leaf):
            raise ValueError(
                f"lower variables must be floating point; got {name}, {describe(leaf)}. Keep it in `hyper`."
            )
    return found


def _total_derivatives(value: Tensor, given: Sequence[Tensor], originals: Sequence[Tensor]) -> list[Tensor]:
    """Return the derivatives with respect to the tensors of `hyper`, zeros where there are none.

    The losses are `given` copies; but a loss may have captured the original, and a setting or a batch may be computed
    from it (``lr=log_lr.exp()``): that counts as well.
    """
    wanted = [t for t in (*given, *originals) if t.requires_grad]
    found: dict[int, Tensor | None] = {}
    if wanted and value.requires_grad:
        # The graph behind the originals is the user's, who may need it again.
        outside = any(t.requires_grad for t in originals)
        slopes = torch.autograd.grad(value, wanted, allow_unused=True, retain_graph=outside)
        found = dict(zip(map(id, wanted), slopes, strict=True))
    pairs = ((found.get(id(new)), found.get(id(old)), new) for new, old in zip(given, originals, strict=True))
    return [sum((p for p in (a, b) if p is not None), start=torch.zeros_like(t)) for a, b, t in pairs]


def _check_upper(upper: Loss | None, groups: Sequence[Mapping[str, Any]], steps: int) -> None:
    for settings in groups:
        for k in (1, steps):
            alpha = weight(settings["alpha"], k)
            for value in alpha if isinstance(alpha, list) else [alpha]:
                if isinstance(value, Tensor) and not value.is_meta and not bool(((value >= 0) & (value < 1)).all()):
                    shown = value.item() if value.numel() == 1 else "a tensor beyond"
                    raise ValueError(
                        f"`alpha` must lie in [0, 1) at every step; got {shown} at k={k}. Learn it through a sigmoid."
                    )
            if upper is None and not is_zero(alpha):
                raise ValueError(
                    f"`alpha` is not 0 at step k={k}, so the upper loss is needed in the inner loop; got upper=None. "
                    "Pass it, or set alpha=0.0."
                )


def _check_value(value: Any, tasks: int | None) -> None:
    if not isinstance(value, Tensor) or value.numel() != (tasks or 1):
        got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"the upper loss must be a scalar; got {got}. Reduce it, for example by `.mean()`.")


def _mirror(hyper: Any, slots: Slots, grads: Sequence[Tensor]) -> Any:
    """Lay gradients out as `hyper` is."""
    index = {id(t): i for i, t in enumerate(slots.tensors)}

    def leaf(value: Any) -> Any:
        if isinstance(value, torch.nn.Module):
            return {name: grads[index[id(p)]] for name, p in value.named_parameters()}
        return grads[index[id(value)]] if isinstance(value, Tensor) else value

    leaves, spec = named_leaves(hyper, "hyper")
    return unflatten([leaf(value) for _, value in leaves], spec)
