"""BDAInnerOptimizer: a torch.optim.Optimizer whose inner loop can be differentiated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ._adjoints.base import Adjoint
from ._diagnose import diagnose_module
from ._diagnosis.progress import Callback
from ._diagnosis.report import Diagnosis
from ._functional_module import FunctionalModule
from ._modules.skeleton import Skeleton, module_slot
from ._rollout.accumulate import Accumulate
from ._rollout.state import in_master, matching
from ._solve import Loop, Start, solve, warn_without_graph
from ._step.aggregation import at_step, needs_upper
from ._step.gradients import Grads, both_gradients, no_gradient
from ._step.objective import Loss, ModuleObjective
from ._step.packing import check_rule_name, pack, unpack
from ._step.proximal import NO_HYPER
from ._step.rules.memory import complete_memory, stored_entries
from ._step.rules.resolve import resolve
from ._step.settings import check_group, complete
from ._step.update import Group, Update, refuse_extrapolation
from ._support.checks import check_ambient, door
from ._support.slots import Slots, Template
from ._support.tensors import is_differentiable
from ._support.tree import detach, map_tensors, tensors
from ._support.types import InnerState, Prox, Rate, RuleLike, Settings


class BDAInnerOptimizer(Optimizer):
    r"""The lower level's optimizer: it mixes the gradients of both levels, in place or functionally.

    .. math:: y_{k+1} = y_k - [ \alpha_k s_u \nabla_y F + (1 - \alpha_k) (y_k - \mathrm{prox}(y_k - D_k)) ]

    ``D_k`` is the rule's displacement from the lower gradient; with plain SGD it is ``s_l grad f``. With the defaults
    this is torch.optim.SGD. Every setting may differ from group to group; `lr`, `upper_lr`, `alpha`, `momentum` and
    `weight_decay` may be tensors that require grad (with one element, or that broadcast to the group's parameters, or a
    list with a tensor for each of these, of its shape), and gradients flow into them.

    Reference: Liu et al., "A Generic First-Order Algorithmic Framework for Bi-Level Programming Beyond Lower-Level
    Singleton", ICML 2020.

    Args:
        params: The lower variables: parameters, named parameters or groups, as in torch.optim.
        lr: s_l, the rate of the lower direction; by default the rule's own (SGD: 1e-3).
        upper_lr: s_u, the rate of the upper direction; None follows `lr` at each step.
        alpha: The weight of the upper direction, in [0, 1): a number, a schedule such as `harmonic(0.5)`, or a tensor.
            0.0 is plain unrolling (RHG): the upper loss is then not evaluated.
        prox: A proximal map of `bda_optim.prox`, for a nonsmooth term of the lower level. Its step is `lr`; under
            momentum or Adam that is a heuristic.
        rule: None for SGD, a class of torch.optim, `FISTA`, or a torchopt transformation, as ``torchopt.adam(0.1)``;
            the last has its own rate, so that `lr` is left out.
        **settings: The rule's own: for SGD `momentum`, `dampening`, `weight_decay`, `nesterov`, `maximize`; for others
            what their class takes (the `alpha` of RMSprop and ASGD is called `rule_alpha`).

    >>> import bda_optim as bda
    >>> model = nn.Linear(2, 1)
    >>> inner = bda.BDAInnerOptimizer(model.parameters(), lr=0.1, upper_lr=0.5, alpha=bda.harmonic(0.5))
    >>> x, target = torch.zeros((), requires_grad=True), torch.ones(4, 1)
    >>> lower = lambda net, x, batch: ((net(torch.ones(4, 2)) - x) ** 2).mean()
    >>> upper = lambda net, x, batch: ((net(torch.ones(4, 2)) - target) ** 2).mean()
    >>> fmodel = inner.unroll(model, lower, upper, hyper=x, steps=5)
    >>> upper(fmodel, x, None).backward()
    >>> bool(x.grad != 0)
    True
    """

    def __init__(
        self,
        params: Any,
        lr: Rate | None = None,
        *,
        upper_lr: Rate | None = None,
        alpha: Rate = 0.0,
        prox: Prox | None = None,
        rule: RuleLike = None,
        **settings: Any,
    ) -> None:
        """Check the settings and make the groups."""
        self.rule = resolve(rule)
        given = dict(lr=lr, upper_lr=upper_lr, alpha=alpha, prox=prox, **settings)
        super().__init__(params, complete(self.rule, given))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, after a check of its settings; k of the in-place `step` starts at 0."""
        super().add_param_group(param_group)
        try:
            check_group(self.rule, self._settings(self.param_groups[-1]), self.param_groups[-1]["params"])
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise
        self.param_groups[-1].setdefault("k", 0)

    @door("self model lower upper", then="hyper")
    def unroll(
        self,
        model: nn.Module,
        lower: Loss,
        upper: Loss | None = None,
        *,
        steps: int,
        hyper: Any = None,
        batches: Any = None,
        tasks: int | None = None,
        adjoint: Adjoint | None = None,
        compile: bool | str = False,
        copy_initial_weights: bool = True,
        chunk_size: int | None = None,
        on_divergence: str = "raise",
        accumulate: Accumulate = None,
        master: torch.dtype | None = None,
        params: Mapping[str, Tensor] | None = None,
    ) -> FunctionalModule:
        """Run K inner steps on `model` and return it with y_K inside, differentiable as the adjoint decides.

        Losses are called ``loss(net, hyper, batch)``; `net` is the module with y_k inside. Parameters of the module
        that this optimizer does not own are upper variables by themselves. The module, this optimizer and every
        `.grad` stay as they are.

        Args:
            model: The module.
            lower: The lower loss f.
            upper: The upper loss F; may be None where alpha is 0.
            steps: K, the number of inner steps.
            hyper: The upper variables: a tensor, a module, or a tree of them.
            batches: One batch per step.
            tasks: B tasks at once: every tensor of a batch has B in front, and so has the result.
            adjoint: How the backward pass is obtained; `Unroll()` by default.
            compile: Whether to compile the step and its adjoint.
            copy_initial_weights: Whether y_0 is a constant; if False, gradients reach the module's own parameters.
            chunk_size: How many tasks run at once; fewer need less memory, if the adjoint is `Checkpointed`.
            on_divergence: "raise", "stop" or "ignore": what becomes of a loop that is not finite (see `rollout`).
            accumulate: M parts of each batch, or a function that divides it; see `rollout`.
            master: A wider dtype to keep and update y in, as torch.float32, while the module computes in its own.
            params: y_0, name to tensor, instead of the module's own parameters: what a hyper-network computed, say.
                Gradients flow into these tensors.

        Returns:
            A module that is called like `model`; `params`, `buffer_dict` and `trace` show what is inside.
        """
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"`unroll` takes the module itself; got {type(model).__name__}. Write "
                "`inner.unroll(model, lower, upper, steps=K)`; the optimizer knows which parameters it owns."
            )
        loop = Loop(
            steps=steps, batches=batches, tasks=tasks, adjoint=adjoint, compile=compile, chunk_size=chunk_size,
            on_divergence=on_divergence, accumulate=accumulate,
        )  # fmt: skip
        start = self._start(model, hyper, params, copy_initial_weights=copy_initial_weights, master=master)
        end = solve(lower, upper, start, loop)
        warn_without_graph(end.state.params, start)
        # Not the skeleton of the loop: an adjoint that replays steps lays other iterates into that one, and holds it.
        fmodel = FunctionalModule(
            Skeleton(model), start.names, end.state, self._update(tasks), end.mapper, twice=loop.twice,
            traced=(lower, upper) if loop.compile else (),
        )  # fmt: skip
        fmodel.__dict__["trace"] = end.trace  # a parameter of the module may have this name
        return fmodel

    @door("self model lower upper", then="hyper")
    def diagnose(
        self,
        model: nn.Module,
        lower: Loss,
        upper: Loss,
        *,
        steps: int,
        hyper: Any = None,
        params: Mapping[str, Tensor] | None = None,
        batches: Any = None,
        upper_batch: Any = None,
        tasks: int | None = None,
        adjoint: Adjoint | None = None,
        copy_initial_weights: bool = True,
        master: torch.dtype | None = None,
        products: int | None = None,
        probes: int = 4,
        seed: int = 0,
        suggest: bool = True,
        progress: bool | Callback | None = None,
    ) -> Diagnosis:
        """Measure the rollout that `unroll` would run, and suggest settings; see `bda_optim.diagnose`.

        The arguments are those of `unroll`, `upper_batch`, which the upper loss is given at y_K, and those of
        `bda_optim.diagnose`. The module, this optimizer, every `.grad` and the random state stay as they are.
        """
        return diagnose_module(
            self, model, lower, upper, steps=steps, hyper=hyper, params=params, batches=batches,
            upper_batch=upper_batch, tasks=tasks, adjoint=adjoint, copy_initial_weights=copy_initial_weights,
            master=master, products=products, probes=probes, seed=seed, suggest=suggest, progress=progress,
        )  # fmt: skip

    @torch.no_grad()
    def commit(self, fmodel: FunctionalModule) -> None:
        """Write y_K, the buffers and the rule's state back into the module and this optimizer, in place.

        The rule's count goes on (Adam's bias correction, say); k of the schedules restarts at 1.
        """
        if not isinstance(fmodel, FunctionalModule):
            raise TypeError(f"`commit` takes what `unroll` or `innerloop_ctx` gave; got {type(fmodel).__name__}.")
        if fmodel._tasks is not None:
            raise ValueError(
                f"the parameters of {fmodel._tasks} tasks cannot be written into one module. "
                "Average `fmodel.params` over its first dimension yourself, as Reptile does."
            )
        places = [fmodel._skeleton.params[name] for name in fmodel._names]
        own = [id(p) for p in self._adapted()]
        part = next((x for x in fmodel._parts if [id(place.original) for place in places[x.params]] == own), None)
        if part is None:
            raise ValueError("`commit` takes a module that this optimizer unrolled; got one with other parameters.")
        state = part.of(fmodel._state)
        pairs = list(zip(places[part.params], state.params, strict=True))
        # After `unroll` the rollout's: an upper loss that ran on it since then must not leak into the statistics.
        buffers = fmodel._skeleton.read_buffers() if fmodel.trace is None else fmodel._state.buffers
        pairs += zip(fmodel._skeleton.buffers.values(), buffers, strict=True)
        for place, value in pairs:
            if place.original.shape != value.shape:
                raise ValueError(
                    f"a buffer changed its shape in the loop, from {place.original.shape} to {value.shape}."
                )
        for place, value in pairs:
            place.original.copy_(value)
        self._store(state.rule)
        for group in self.param_groups:
            group["k"] = 0

    def step(self, closure: Callable[[], Any] | None = None, *losses: Any) -> Any:
        """Take one ordinary step in place.

        Args:
            closure: None: `p.grad` is the lower gradient. Or it returns one tensor: it has called `backward()` and
                `p.grad` is read, as in torch.optim. Both need alpha = 0. Or it returns ``(lower, upper)`` without
                calling `backward()`; then no `.grad` is touched.
            *losses: Refused: losses are passed to `diffopt.step`.

        Returns:
            What the closure returned.
        """
        check_ambient()
        if losses or isinstance(closure, Tensor):
            raise TypeError(
                "`step` takes a closure, as in torch.optim; got a loss. Write `inner.step(lambda: (lower, upper))` for "
                "a step in place, or `diffopt.step(lower, upper)` inside `innerloop_ctx`."
            )
        with torch.enable_grad():
            value = None if closure is None else closure()
        params = self._adapted()
        update = self._update()
        state = InnerState(tuple(params), self._memory())
        settings = [at_step(s, g["k"] + 1) for (_, s), g in zip(self._groups(), self.param_groups, strict=True)]
        refuse_extrapolation(update, state, settings, "step")
        grads = self._gradients(value, params, settings)
        with torch.no_grad():
            new = update(state, *grads, settings, NO_HYPER)
            for p, y in zip(params, new.params, strict=True):
                p.copy_(y)
        self._store(new.rule)
        for group in self.param_groups:
            group["k"] += 1
        return value

    def state_dict(self) -> dict[str, Any]:
        """Return torch's state_dict, with a schedule as a name and numbers, and without callables and prox."""
        return pack(super().state_dict(), self.rule)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over a state_dict; tensors are copied.

        A callable `alpha` and a `prox`, which it leaves out, stay as they are here; other settings that are missing, as
        in one written before they existed, get their defaults.
        """
        check_rule_name(state_dict, self.rule)
        loaded = map_tensors(lambda t: t.detach().clone().requires_grad_(t.requires_grad), dict(state_dict))
        loaded["param_groups"] = [dict(group) for group in loaded["param_groups"]]
        missing = unpack(loaded["param_groups"], self.param_groups, self.rule)
        super().load_state_dict(loaded)
        for group, own in zip(self.param_groups, missing, strict=True):
            group.update(own)  # only now: torch copies what it loads, and a learned strength would be another tensor

    def __repr__(self) -> str:
        """Show the rule and the groups."""
        return super().__repr__().replace("(", f"(rule={self.rule.name}", 1)

    def __getstate__(self) -> dict[str, Any]:
        """Return what pickle and deepcopy carry: torch's part and the rule."""
        return {**super().__getstate__(), "rule": self.rule}

    def _settings(self, group: Mapping[str, Any]) -> dict[str, Any]:
        # Not `self.defaults`, to which torch adds `differentiable` when a state_dict is loaded.
        return {name: group[name] for name in complete(self.rule, {})}

    def _adapted(self) -> list[Tensor]:
        """Return the parameters that steps change: floating point and not frozen."""
        return [p for group in self.param_groups for p in group["params"] if _adapts(p)]

    def _groups(self) -> list[tuple[tuple[int, ...], dict[str, Any]]]:
        """Return each group's indices among the adapted parameters, and its settings."""
        groups: list[tuple[tuple[int, ...], dict[str, Any]]] = []
        count = 0
        for group in self.param_groups:
            keep = [place for place, p in enumerate(group["params"]) if _adapts(p)]
            settings = self._settings(group)
            if "initial_lr" in group and any(t.requires_grad for t in tensors(settings["lr"])):
                raise ValueError(
                    "a torch scheduler overwrites `lr`, which cannot be learned then; got an `lr` that requires grad. "
                    "Learn it without a scheduler, or schedule a number."
                )
            for name, value in settings.items():
                if isinstance(value, list) and not isinstance(self.rule.defaults.get(name), tuple):
                    settings[name] = [value[place] for place in keep]
            groups.append((tuple(range(count, count + len(keep))), settings))
            count += len(keep)
        return groups

    def _update(self, tasks: int | None = None) -> Update:
        """Return the update with the groups' settings as they are now."""
        return Update(self.rule, [Group(m, Template.constant(s)) for m, s in self._groups()], tasks=tasks)

    def _memory(self) -> tuple[Any, ...]:
        """Return the rule's state of each group, detached copies; new where there is none yet."""
        params = self._adapted()
        memories = []
        for members, settings in self._groups():
            own = [params[i] for i in members]
            entries = tuple(self.state.get(p, {}) for p in own)
            memory = next((entry["group"] for entry in entries if "group" in entry), entries if any(entries) else None)
            memory = complete_memory(self.rule.init([p.detach() for p in own], settings), memory)
            memories.append(map_tensors(lambda t: t.detach().clone(), memory))
        return tuple(memories)

    def _store(self, memories: Sequence[Any]) -> None:
        """Keep the rule's state: per parameter, or whole with the first parameter of a group."""
        params = self._adapted()
        for i, entry in stored_entries(self._groups(), detach(tuple(memories))).items():
            self.state[params[i]] = entry

    def _owned(self, model: nn.Module) -> tuple[list[str], list[Tensor]]:
        """Return the names in `model` of the adapted parameters, and the parameters."""
        params = self._adapted()
        if not params:
            raise ValueError("the optimizer owns no parameter that requires grad. Give it some, or unfreeze them.")
        names = {id(p): name for name, p in model.named_parameters()}
        for p in params:
            if id(p) not in names:
                raise ValueError(
                    f"the optimizer owns a parameter that is not in the module; got one of shape {tuple(p.shape)}. "
                    "Make the optimizer from this module's `parameters()`."
                )
        return [names[id(p)] for p in params], params

    def _start(
        self, model: nn.Module, hyper: Any, params: Any, *, copy_initial_weights: bool, master: torch.dtype | None
    ) -> Start:
        """Return where a rollout of `model` starts: at its parameters, or at the tensors `params` of their names."""
        skeleton = Skeleton(model)
        names, originals = self._owned(model)
        slots = Slots()
        template = slots.template(hyper, "hyper", module_slot(slots))
        owned = {id(p) for group in self.param_groups for p in group["params"]}
        others = {
            name: slots.put(place.original, f"parameter {name!r}")
            for name, place in skeleton.params.items()
            if id(place.original) not in owned and place.original.requires_grad
        }
        if params is not None:
            originals = matching(params, dict(zip(names, originals, strict=True)))
            copy_initial_weights = False
        state = in_master(self._initial(originals, skeleton, copy_initial_weights=copy_initial_weights), master)
        objective = ModuleObjective(skeleton, names, others, template)
        return Start(objective, state, names, self.rule, self._groups(), template, slots)

    def _initial(
        self, params: Sequence[Tensor], skeleton: Skeleton, *, copy_initial_weights: bool, device: Any = None
    ) -> InnerState:
        """Return the state before the first step: y_0 cloned, the rule's state and the buffers copied."""
        ys = [p.detach().clone() if copy_initial_weights else p.clone() for p in params]
        buffers = [place.original.detach().clone() for place in skeleton.buffers.values()]
        state = InnerState(tuple(ys), self._memory(), tuple(buffers))
        return state if device is None else map_tensors(lambda t: t.to(device), state)

    def _gradients(self, value: Any, params: Sequence[Tensor], settings: Sequence[Settings]) -> tuple[Grads, Grads]:
        """Return the gradients of both losses, by what a closure returned."""
        k = self.param_groups[0]["k"] + 1
        if isinstance(value, tuple):
            if len(value) != 2:
                raise ValueError(f"the closure must return the lower loss or (lower, upper); got {len(value)} values.")
            upper = value[1] if needs_upper(settings, value[1], k) else None
            return both_gradients(value[0], upper, params, k, retain_graph=upper is not None)
        needs_upper(settings, None, k, "Pass a closure that returns (lower, upper) and does not call `backward()`.")
        return [p.grad for p in params], no_gradient(params)


def _adapts(p: Tensor) -> bool:
    return p.requires_grad and is_differentiable(p)
