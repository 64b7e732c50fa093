"""Diagnosis of an inner loop: check what is asked, lay the loop open, hand it to the room that measures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ._adjoints.base import Adjoint
from ._diagnosis.examine import examine
from ._diagnosis.inner_loop import Build, InnerLoop
from ._diagnosis.progress import Callback
from ._diagnosis.report import Diagnosis
from ._hypergradient import _check_hyper, _check_value, _lower_variables, _start
from ._modules.skeleton import module_slot
from ._solve import Loop, Start, check, prepare
from ._step.objective import Loss, explained
from ._step.settings import complete
from ._support.checks import check_count, door
from ._support.slots import Slots, fill
from ._support.tensors import is_differentiable
from ._support.torch_private import inside_transform
from ._support.tree import detach
from ._support.types import Item

if TYPE_CHECKING:
    from ._optimizer import BDAInnerOptimizer

_FEWEST_PRODUCTS = 60


@door("lower upper params hyper", then="steps")
def diagnose(
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
    products: int | None = None,
    probes: int = 4,
    seed: int = 0,
    suggest: bool = True,
    progress: bool | Callback | None = None,
    **settings: Any,
) -> Diagnosis:
    r"""Measure an inner loop: is plain unrolling wrong here, and which alpha, K and adjoint should be chosen?

    One exact backward sweep gives the memory of the start and the bias of every truncation,

    .. math:: \frac{|dF/dy_0|}{|dF/dy_K|}, \qquad
              \frac{|G_T - G|}{|G|}, \quad G_T = \partial_x F + \sum_{k > K - T} (\partial_x S_k)^T \frac{dF}{dy_k}

    and products with the Hessians of both levels give their curvature, the directions in which K steps leave the lower
    level where it started, and the part of :math:`|\partial_y F|^2` that lies in them. A singular lower Hessian
    alone decides nothing: what counts is whether F slopes along the flat directions.

    The arguments are those of `hypergradient`. Nothing is changed: neither `.grad`, nor a module, nor the random state.
    The curvature is that of the last batch. It costs at most 6 K steps and 120 + 5 max(24, 1.5 sqrt(K)) products; the
    search for the suggestion adds 2 K steps for each constant of alpha that it tries, at most eight.

    Args:
        lower: ``f(params, hyper, batch)``, the lower loss.
        upper: ``F(params, hyper, batch)``; it is needed, also where alpha is 0.
        params: y_0, a tensor or a tree of tensors.
        hyper: x, a tensor, a module, or a tree of them.
        steps: K, the number of inner steps.
        lr: s_l; by default the rule's own.
        upper_lr: s_u; the same as `lr` if None.
        alpha: The weight of the upper direction.
        rule: The rule, as in `hypergradient`.
        prox: A proximal map; the curvature is that of the smooth part.
        batches: One batch per step; K is then not raised by the suggestion.
        upper_batch: What the last evaluation of `upper` is given.
        tasks: Refused: diagnose one task.
        adjoint: What the hypergradient is to be computed with. The sweep is exact whatever it is; of a `Truncated` the
            bias is among the findings where it exceeds 1 %.
        products: How many products with Hessians may be taken, by default as above; at least 60.
        probes: How many random vectors estimate the number of flat directions, from 256 parameters on.
        seed: Of those vectors.
        suggest: Whether to search for settings.
        progress: True for a bar of tqdm, or a function of (stage, done, total).
        **settings: The rule's own, such as `momentum`.

    Returns:
        A `Diagnosis`: numbers, `findings`, `suggestion`, `as_dict()`, `plot(path)`; it prints as a report.

    >>> lower = lambda y, x, b: 0.5 * y[0] ** 2 - x * y[0]
    >>> upper = lambda y, x, b: 0.5 * (x - y[1]) ** 2 + 0.5 * (y[0] - 1) ** 2
    >>> y0, x = torch.tensor([2.0, 2.0]), torch.tensor(0.0)
    >>> report = diagnose(lower, upper, y0, x, steps=64, lr=0.2, upper_lr=0.7)
    >>> report
    Diagnosis(steps=64, start=0.894, findings=['start'])
    >>> report.suggestion.settings["alpha"], report.suggestion.settings["steps"]
    (harmonic(c=1.0), 840)

    Reference: Ghorbani et al., "An Investigation into Neural Net Optimization via Hessian Eigenvalue Density", ICML
    2019, for the quadrature; Liu et al., ICML 2020, for alpha.
    """
    given = dict(
        steps=steps, lr=lr, upper_lr=upper_lr, alpha=alpha, rule=rule, prox=prox, batches=batches,
        upper_batch=upper_batch, **settings,
    )  # fmt: skip
    _check(upper, tasks, products, probes)
    _check_hyper(hyper)
    _refuse_complex(_lower_variables(params))
    chosen = dict(lr=lr, upper_lr=upper_lr, alpha=alpha, prox=prox, **settings)
    build = tree_loop(
        lower, upper, params, hyper, settings=chosen, steps=steps, rule=rule, batches=batches, upper_batch=upper_batch
    )
    with explained(lower, upper):
        return examine(
            build, _present(given), adjoint=adjoint, products=products, probes=probes, seed=seed,
            search=suggest, progress=progress,
        )  # fmt: skip


def diagnose_module(
    inner: BDAInnerOptimizer, model: nn.Module, lower: Loss, upper: Loss, *, steps: int, hyper: Any,
    params: Mapping[str, Tensor] | None, batches: Any, upper_batch: Any, tasks: int | None, adjoint: Adjoint | None,
    copy_initial_weights: bool, master: torch.dtype | None, products: int | None, probes: int, seed: int,
    suggest: bool, progress: bool | Callback | None,
) -> Diagnosis:  # fmt: skip
    """Diagnose the rollout of `inner.unroll`."""
    _check(upper, tasks, products, probes)
    _refuse_complex(inner._owned(model)[1])
    build = module_loop(
        inner, model, lower, upper, steps=steps, hyper=hyper, params=params, batches=batches, upper_batch=upper_batch,
        copy_initial_weights=copy_initial_weights, master=master,
    )  # fmt: skip
    given = {"steps": steps, **_shared(inner), "batches": batches}
    with explained(lower, upper):
        return examine(
            build, _present(given), optimized=_optimized(inner, model), adjoint=adjoint, products=products,
            probes=probes, seed=seed, search=suggest, progress=progress,
        )  # fmt: skip


def tree_loop(
    lower: Loss, upper: Loss, params: Any, hyper: Any, *, settings: Mapping[str, Any], steps: int, rule: Any,
    batches: Any, upper_batch: Any,
) -> Build:  # fmt: skip
    """Return what makes the inner loop of `hypergradient` with these arguments."""
    default = steps

    def build(steps: int | None = None, **changes: Any) -> InnerLoop:
        slots = Slots()
        template = slots.template(hyper, "hyper", module_slot(slots))
        variables = tuple(i for i, t in enumerate(slots.tensors) if is_differentiable(t))
        ys = _lower_variables(params)
        place = {id(t): i for i, t in enumerate(slots.tensors)}
        starts = tuple(place.get(id(y)) for y in ys)
        start = _start(params, [y.detach().clone() for y in ys], template, slots, rule, {**settings, **changes})
        return _opened(lower, upper, start, Loop(steps or default, batches), variables, upper_batch, starts)

    return build


def module_loop(
    inner: BDAInnerOptimizer, model: nn.Module, lower: Loss, upper: Loss, *, steps: int, hyper: Any,
    params: Mapping[str, Tensor] | None, batches: Any, upper_batch: Any, copy_initial_weights: bool,
    master: torch.dtype | None,
) -> Build:  # fmt: skip
    """Return what makes the inner loop of `inner.unroll` with these arguments."""
    default = steps

    def build(steps: int | None = None, **changes: Any) -> InnerLoop:
        start = inner._start(model, hyper, params, copy_initial_weights=True, master=master)
        ys = inner._owned(model)[1] if params is None else [params[name] for name in start.names]
        learned = not copy_initial_weights or params is not None
        starts = [
            start.slots.put(y, f"parameter {name!r}").index if learned and y.requires_grad else None
            for name, y in zip(start.names, ys, strict=True)
        ]
        hypers = Slots()
        hypers.template(hyper, "hyper", module_slot(hypers))
        every = not any(t.requires_grad for t in hypers.tensors)
        variables = tuple(
            i
            for i, t in enumerate(start.slots.tensors)
            if t.requires_grad or (every and i < len(hypers.tensors) and is_differentiable(t))
        )
        groups = [(members, {**settings, **changes}) for members, settings in start.groups]
        loop = Loop(steps or default, batches)
        state = detach(start.state)
        start = start._replace(groups=groups, state=state)
        return _opened(lower, upper, start, loop, variables, upper_batch, tuple(starts), more=True)

    return build


def _opened(
    lower: Loss, upper: Loss, start: Start, loop: Loop, variables: tuple[int, ...], upper_batch: Any,
    start_slots: tuple[int | None, ...], *, more: bool = False,
) -> InnerLoop:  # fmt: skip
    """Lay a rollout open that `solve` would run; with `more`, settings and batches may be upper variables too."""
    if inside_transform():
        raise ValueError("`diagnose` reads values, which a transform of torch.func, as `vmap`, hides. Call it outside.")
    check(lower, upper, start, loop)
    step, state, values, items, _ = prepare(lower, upper, start, loop)
    if items.once:
        raise TypeError(
            "`diagnose` reads the batches several times; got an iterable that can be read once. Pass a list, as in "
            "`list(itertools.islice(loader, steps))`."
        )
    if more:
        count = len(start.slots.tensors)
        variables += tuple(i for i, t in enumerate(values) if i >= count and t.requires_grad)
    values = tuple(t.detach() for t in values)

    def lower_loss(params: Sequence[Tensor], buffers: Any, hyper: Sequence[Tensor], item: Item) -> Tensor:
        return start.objective(lower, params, buffers, hyper, fill(item.batch, hyper))[0]

    def upper_loss(params: Sequence[Tensor], buffers: Any, hyper: Sequence[Tensor]) -> Tensor:
        value = start.objective(upper, params, buffers, hyper, upper_batch)[0]
        _check_value(value, None)
        return value

    groups = tuple((group.members, group.settings.fill(values)) for group in step.update.groups)
    return InnerLoop(
        step, state, values, variables, items, lower_loss, upper_loss, start.rule, groups, tuple(start.names),
        start_slots,
    )  # fmt: skip


def _check(upper: Any, tasks: Any, products: Any, probes: int) -> None:
    if upper is None:
        raise TypeError(
            "`diagnose` measures how the upper loss sees the inner loop; got upper=None. Pass the loss that y_K is "
            "judged by, also where alpha=0."
        )
    if tasks is not None:
        raise ValueError(f"`diagnose` looks at one task; got tasks={tasks}. Pass one task's batches, without `tasks`.")
    check_count("probes", probes)
    if products is not None and check_count("products", products) < _FEWEST_PRODUCTS:
        raise ValueError(
            f"`products` must be at least {_FEWEST_PRODUCTS}, or nothing is resolved; got {products}. Leave it out."
        )


def _refuse_complex(params: Sequence[Tensor]) -> None:
    for p in params:
        if p.is_complex():
            raise ValueError(
                f"`diagnose` takes real parameters; got one of {p.dtype}. Write it as `torch.view_as_real(p)`."
            )


def _present(given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if value is not None}


def _shared(inner: BDAInnerOptimizer) -> dict[str, Any]:
    """Return the settings that all groups share and that are not the rule's defaults."""
    groups = [inner._settings(group) for group in inner.param_groups]
    known = complete(inner.rule, {})
    always = ("lr", "upper_lr", "alpha")
    rule = {} if inner.rule.name == "SGD" else {"rule": getattr(torch.optim, inner.rule.name, type(inner.rule))}
    return rule | {
        name: value
        for name, value in groups[0].items()
        if all(group[name] is value or group[name] == value for group in groups[1:])
        and (name in always or not (value is known[name] or value == known[name]))
    }


def _optimized(inner: BDAInnerOptimizer, model: nn.Module) -> str:
    """Return what the optimizer was made from, as code."""
    if len(inner.param_groups) > 1:
        return "groups"
    whole = {id(p) for p in model.parameters()} == {id(p) for p in inner.param_groups[0]["params"]}
    return "model.parameters()" if whole else "params"
