"""The inner loop that the user writes: `innerloop_ctx` and `diffopt.step`, as in `higher`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ._context.forward import refuse_reentrant
from ._from_torch import from_torch
from ._functional_module import FunctionalModule, Part
from ._modules.skeleton import Skeleton
from ._optimizer import BDAInnerOptimizer
from ._rollout.divergence import check_choice
from ._rollout.losses import check_finite
from ._rollout.state import in_master
from ._step.aggregation import needs_upper
from ._step.gradients import both_gradients, check_scalar
from ._step.proximal import NO_HYPER
from ._step.rules.memory import complete_memory, stored_entries
from ._step.settings import check_group
from ._step.sweep import Opening, Sweep, moved
from ._step.update import Group, Update, refuse_extrapolation
from ._support.autograd_graph import refuse_once_differentiable
from ._support.checks import check_ambient, check_count
from ._support.slots import Template
from ._support.torch_private import opaque
from ._support.tree import detach
from ._support.types import InnerState, Record, Settings

Override = Mapping[str, Any]
GradCallback = Callable[[list[Tensor | None]], Sequence[Tensor | None]]


@contextlib.contextmanager
def innerloop_ctx(
    model: nn.Module,
    opt: Optimizer | Sequence[Optimizer],
    device: torch.device | str | None = None,
    copy_initial_weights: bool = True,
    override: Override | None = None,
    track_higher_grads: bool = True,
    *,
    steps: int | None = None,
    last: int | None = None,
    first_order: bool = False,
    on_divergence: str = "raise",
    master: torch.dtype | None = None,
) -> Iterator[tuple[FunctionalModule, Any]]:
    """Open an inner loop on a functional copy of `model`; the model and the optimizer are not touched.

    Args:
        model: The module.
        opt: A `BDAInnerOptimizer`, or an optimizer of torch.optim (then alpha is 0). Its state is copied. Or a list of
            optimizers for different parameters of the module.
        device: Where the loop runs; where the module is, by default.
        copy_initial_weights: Whether y_0 is a constant; if False, gradients reach the module's own parameters.
        override: Settings to use instead of the optimizer's: name to a value, or to a list with one per group.
        track_higher_grads: Whether steps are differentiated at all; False for adaptation at test time.
        steps: K, needed with `last`.
        last: Differentiate only the last T of K steps; the others keep no graph.
        first_order: Take the inner gradients as constants (first-order MAML).
        on_divergence: "raise" checks once, on leaving, that all losses and the parameters are finite; "ignore" does not
            check. (`diffopt.check()` checks at any time.)
        master: A wider dtype to keep and update y in, as torch.float32, while the module computes in its own.

    Yields:
        The functional module and the differentiable optimizer, whose `step` takes the losses; for a list of optimizers
        a list.

    Raises:
        FloatingPointError: On leaving, if a loss was not finite; says at which step.

    >>> model = nn.Linear(1, 1)
    >>> inner = BDAInnerOptimizer(model.parameters(), lr=0.1)
    >>> with innerloop_ctx(model, inner, copy_initial_weights=False) as (fmodel, diffopt):
    ...     for _ in range(3):
    ...         _ = diffopt.step((fmodel(torch.ones(1)) - 1).square().sum())
    ...     (fmodel(torch.ones(1)) - 2).square().sum().backward()
    >>> model.weight.grad is not None
    True
    """
    several = not isinstance(opt, Optimizer)
    optimizers = [opt] if isinstance(opt, Optimizer) else list(opt)
    fmodel, diffopts = _open(
        model, optimizers, device, copy_initial_weights, override, track_higher_grads, steps, last, first_order,
        on_divergence, master,
    )  # fmt: skip
    yield fmodel, diffopts if several else diffopts[0]
    if on_divergence == "raise":
        for diffopt in diffopts:
            diffopt.check()


@opaque
def _open(
    model: nn.Module,
    optimizers: Sequence[Any],
    device: torch.device | str | None,
    copy_initial_weights: bool,
    override: Override | None,
    track_higher_grads: bool,
    steps: int | None,
    last: int | None,
    first_order: bool,
    on_divergence: str,
    master: torch.dtype | None,
) -> tuple[FunctionalModule, list[DiffOptimizer]]:
    """Open an inner loop; the arguments are those of `innerloop_ctx`."""
    check_ambient()
    if check_choice(on_divergence) == "stop":
        raise ValueError(
            'on_divergence="stop" needs a loop that is handed over, as `unroll` takes it; a loop of your own ends '
            'where you end it. Call `diffopt.check()` in it, or use "raise" or "ignore".'
        )
    cut = _cut(steps, last, copy_initial_weights)
    inners = [from_torch(opt) for opt in optimizers]
    skeleton = Skeleton(model)
    names: list[str] = []
    parts: list[Part] = []
    states = []
    for inner in inners:
        own, originals = inner._owned(model)
        if set(own) & set(names):
            raise ValueError(
                f"each parameter belongs to one optimizer; got {sorted(set(own) & set(names))[0]!r} in two. Make the "
                "optimizers from different parameters."
            )
        state = inner._initial(originals, skeleton, copy_initial_weights=copy_initial_weights, device=device)
        states.append(in_master(state, master))
        parts.append(Part.after(parts, len(own), len(state.rule)))
        names += own
    if device is not None:
        for place in skeleton.params.values():
            place.put(place.original.to(device))
    params = tuple(p if p.requires_grad else p.requires_grad_() for state in states for p in state.params)
    memory = tuple(group for state in states for group in state.rule)
    start = InnerState(params, memory, states[0].buffers)
    fmodel = FunctionalModule(skeleton, names, start, inners[0]._update(), parts=parts)
    diffopts = [
        DiffOptimizer(
            fmodel, inner, part, override=override, track=track_higher_grads, cut=cut, steps=steps,
            first_order=first_order,
        )
        for inner, part in zip(inners, parts, strict=True)
    ]  # fmt: skip
    return fmodel, diffopts


class DiffOptimizer:
    """Takes differentiable steps on a functional module.

    Attributes:
        k: How many steps were taken.
    """

    def __init__(
        self,
        fmodel: FunctionalModule,
        inner: BDAInnerOptimizer,
        part: Part,
        *,
        override: Override | None = None,
        track: bool = True,
        cut: int = 0,
        steps: int | None = None,
        first_order: bool = False,
    ) -> None:
        """Start at k = 0 from the state inside `fmodel`, of which this optimizer changes a part."""
        self.k = 0
        self._fmodel = fmodel
        self._inner = inner
        self._rule = inner.rule
        self._part = part
        self._groups = [(members, dict(settings)) for members, settings in inner._groups()]
        self._track = track
        self._cut = cut
        self._steps = steps
        self._first_order = first_order
        self._records: list[Record] = []
        self._opened = Opening.now()
        self._sweep = Sweep(inner.rule)
        self._apply(override)
        refuse_extrapolation(self._update, self._state(), self._update.settings((), 1), "innerloop_ctx")

    def _state(self) -> InnerState:
        """Return the part of the state that this optimizer changes."""
        state: InnerState = self._fmodel._state
        return self._part.of(state) if len(self._fmodel._parts) > 1 else state

    @opaque
    def step(
        self,
        lower: Tensor,
        upper: Tensor | None = None,
        *,
        override: Override | None = None,
        grad_callback: GradCallback | None = None,
    ) -> tuple[Tensor, ...]:
        """Take one step; the functional module has the new parameters afterwards.

        Args:
            lower: The lower loss, computed with the functional module.
            upper: The upper loss; may be left out where alpha is 0.
            override: Settings that replace the optimizer's from this step on.
            grad_callback: Is shown the list of lower gradients (None where there is none) and returns those to use.

        Returns:
            The new parameters.
        """
        if self._steps is not None and self.k == self._steps:
            raise ValueError(
                f"the loop was opened with steps={self._steps}; got one step more. Open it with more steps."
            )
        if override:
            self._apply(override)
        k = self.k + 1
        state = self._state()
        settings = self._update.settings((), k)
        aggregates = needs_upper(settings, upper, k, "Write `diffopt.step(lower, upper)`, or set alpha=0.0.")
        if k == 1:
            refuse_reentrant(lower, self._opened.node)
            refuse_reentrant(upper, self._opened.node)
        track = self._track and k > self._cut
        new = self._next(k, (lower, upper if aggregates else None), state, settings, track, grad_callback)
        if not track:
            new = detach(new)
        elif k == self._cut + 1:
            refuse_once_differentiable(new.params)
        buffers = self._fmodel._skeleton.read_buffers()
        params = tuple(p if p.requires_grad else p.detach().requires_grad_() for p in new.params)
        own = InnerState(params, new.rule, buffers)
        self._fmodel._lay(self._part.put(self._fmodel._state, own) if len(self._fmodel._parts) > 1 else own)
        self._records.append(Record(lower.detach(), None if upper is None else upper.detach()))
        self.k = k
        self._opened = Opening.now()
        return params

    def _next(
        self, k: int, losses: tuple[Tensor, Tensor | None], state: InnerState, settings: Sequence[Settings],
        track: bool, grad_callback: GradCallback | None,
    ) -> InnerState:  # fmt: skip
        """Return the next state: plain gradient descent in one backward pass, anything else by both gradients."""
        graph = track and not self._first_order
        kept = graph or len(self._fmodel._parts) > 1
        moves = None
        check_scalar(losses[0], "lower", k, None)
        if losses[1] is not None:
            check_scalar(losses[1], "upper", k, None)
        with torch.enable_grad():  # the caller may be under no_grad
            weights = None if grad_callback else self._sweep.weights(settings, constant=self._first_order)
            if weights is not None:
                moves = self._sweep.moves(
                    *losses, state.params, weights, k, self._opened, create_graph=graph, retain_graph=kept
                )
            if moves is None:
                kept = kept or losses[1] is not None
                both = both_gradients(*losses, state.params, k, create_graph=graph, retain_graph=kept)
        with torch.set_grad_enabled(track):
            if weights is not None and moves is not None:
                return state._replace(params=moved(state.params, moves, weights))
            lower_grads = list(both[0])
            return self._update(
                state, grad_callback(lower_grads) if grad_callback else lower_grads, both[1], settings, NO_HYPER
            )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: steps take gradients without `.grad`, so there is nothing to reset."""

    def __repr__(self) -> str:
        """Show the rule, the step and the settings of each group."""
        groups = ", ".join(str({n: v for n, v in settings.items() if v is not None}) for _, settings in self._groups)
        return f"{type(self).__name__}(rule={self._rule.name}, k={self.k}, groups=[{groups}])"

    @opaque
    def check(self) -> None:
        """Raise `FloatingPointError` if a loss so far, or the parameters, are not finite."""
        if self._records:
            check_finite(self._records, self._state().params, self._fmodel._names[self._part.params])

    def state_dict(self) -> dict[str, Any]:
        """Return what the optimizer's `state_dict` would be after these steps: load it there to carry moments over.

        >>> model = nn.Linear(1, 1)
        >>> inner = BDAInnerOptimizer(model.parameters(), lr=0.1, momentum=0.9)
        >>> with innerloop_ctx(model, inner, track_higher_grads=False) as (fmodel, diffopt):
        ...     _ = diffopt.step(fmodel(torch.ones(1)).square().sum())
        >>> inner.load_state_dict(diffopt.state_dict())
        >>> "momentum_buffer" in inner.state[model.weight]
        True
        """
        packed = self._inner.state_dict()
        numbers = [number for group in packed["param_groups"] for number in group["params"]]
        owned = [p for group in self._inner.param_groups for p in group["params"]]
        number_of = {id(p): number for p, number in zip(owned, numbers, strict=True)}
        adapted = self._inner._adapted()
        entries = stored_entries(self._groups, detach(self._state().rule))
        packed["state"] = {number_of[id(adapted[i])]: entry for i, entry in entries.items()}
        for group in packed["param_groups"]:
            group["k"] = self.k
        return packed

    def _apply(self, override: Override | None) -> None:
        groups = [(members, dict(settings)) for members, settings in self._groups]  # as before, should this raise
        for name, value in (override or {}).items():
            values = value if isinstance(value, list) else [value]
            if len(values) not in (1, len(self._groups)):
                raise ValueError(
                    f"`override[{name!r}]` must be one value or a list with one per group ({len(self._groups)}); got "
                    f"{len(values)}. For one tensor per parameter write a list of lists."
                )
            for i, (_, settings) in enumerate(groups):
                if name not in settings:
                    raise ValueError(
                        f"`override` names settings of {self._rule.name}; got {name!r}, not in {list(settings)}."
                    )
                settings[name] = values[i % len(values)]
        state = self._state()
        memories = []
        for (members, settings), memory in zip(groups, state.rule, strict=True):
            params = [state.params[i].detach() for i in members]
            check_group(self._rule, settings, params)
            memories.append(complete_memory(self._rule.init(params, settings), memory) if override else memory)
        self._groups = groups
        self._update = Update(self._rule, [Group(m, Template.constant(s)) for m, s in groups])
        whole = self._part.put(self._fmodel._state, state._replace(rule=tuple(memories)))
        self._fmodel.__dict__.update(_update=self._update, _state=whole)


def _cut(steps: int | None, last: int | None, copy_initial_weights: bool) -> int:
    """Return how many steps at the start keep no graph."""
    if steps is not None:
        check_count("steps", steps)
    if last is None:
        return 0
    check_count("last", last)
    if steps is None:
        raise ValueError(f"`last` needs `steps`, to know which steps are the last; got last={last}. Pass both.")
    if last < steps and not copy_initial_weights:
        raise ValueError(
            f"no gradient reaches the initial weights through a truncated loop; got last={last} of steps={steps} with "
            "copy_initial_weights=False. Drop `last`, or copy them."
        )
    return max(steps - last, 0)
