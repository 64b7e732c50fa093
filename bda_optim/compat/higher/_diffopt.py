"""`DifferentiableOptimizer`, as in `higher`, with `accumulate`, `state_dict`, hooks and schedulers besides."""

from __future__ import annotations

import abc
import operator
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.optim import Optimizer

from bda_optim._context.forward import refuse_reentrant
from bda_optim._step.gradients import Grads, gradient
from bda_optim._support.checks import check_ambient
from bda_optim._support.torch_private import sequence_number
from bda_optim._support.tree import map_tensors

from ._override import Override, per_group
from .utils import _recursive_map

GradCallback = Callable[[list[Tensor | None]], Sequence[Tensor | None]]
Grouped = list[list[Tensor | None]]


class DifferentiableOptimizer(Optimizer, abc.ABC):
    """Takes steps that can be differentiated, from the settings and a copy of the state of another optimizer.

    It is a `torch.optim.Optimizer`, so learning-rate schedulers accept it; settings that a scheduler or the user writes
    into `param_groups` hold from the next step on. A subclass of the user's defines `_update`.

    Args:
        other: The optimizer.
        reference_params: The parameters of its module, as ``module.parameters()`` gives them.
        fmodel: The patched module whose weights `step` updates; without it `step` is given `params`.
        device: The device of the state; by default it stays where it is.
        override: Settings that replace the optimizer's: name to a value, or to a list with one per group.
        grad_callback: Receives the list of gradients in the order of `reference_params` (None where there is none), and
            returns those to use.
        track_higher_grads: Whether steps can be differentiated; if False they give leaves.
        first_order: Whether the gradients count as constants (first-order MAML): initial weights and settings get
            gradients, and no second derivative is taken.

    Attributes:
        param_groups: The settings of each group; `params` are its weights, but only during an update.
        state: For each group, a dictionary from a parameter's place in the group to its state.
        k: The number of steps taken.
    """

    def __init__(
        self,
        other: Optimizer,
        reference_params: Iterable[Tensor],
        fmodel: Any = None,
        device: torch.device | str | None = None,
        override: Override | None = None,
        grad_callback: GradCallback | None = None,
        track_higher_grads: bool = True,
        *,
        first_order: bool = False,
    ) -> None:
        # Not Optimizer.__init__: it takes leaves only, and keeps state by parameter, and here each step has new ones.
        place = {id(p): i for i, p in enumerate(reference_params)}
        self.defaults = dict(other.defaults)
        self._optimizer_step_pre_hooks = OrderedDict()
        self._optimizer_step_post_hooks = OrderedDict()
        self.k = 0
        self.param_groups = [_without_params(group) for group in other.param_groups]
        self._group_to_param_list = [_places(group["params"], place) for group in other.param_groups]
        self.state: Any = [_copied_state(group["params"], other.state, device) for group in other.param_groups]
        self._fmodel = fmodel
        self._grad_callback = grad_callback
        self._track_higher_grads = track_higher_grads
        self._first_order = first_order
        self._opened = sequence_number()
        self._sums: dict[str, Grads] = {}
        self._seen: list[Tensor] = []
        if override is not None:
            self._apply_override(override)

    def step(  # type: ignore[override]  # the signature is higher's, not torch.optim's
        self,
        loss: Tensor | None = None,
        params: Iterable[Tensor] | None = None,
        override: Override | None = None,
        grad_callback: GradCallback | None = None,
        *,
        upper_loss: Tensor | None = None,
    ) -> list[Tensor]:
        """Take one step; the patched module has the new weights afterwards.

        Args:
            loss: The loss (of the lower level). It may be left out after `accumulate`.
            params: The weights that the loss was computed with; by default those of the patched module.
            override: Settings that replace the present ones from this step on.
            grad_callback: Replaces the one given at the start, in this step.
            upper_loss: The upper loss, for a `BDAInnerOptimizer`; may be left out where its alpha is 0.

        Returns:
            The new weights.
        """
        check_ambient()
        for hook in self._optimizer_step_pre_hooks.values():
            if hook(self, (loss,), {}) is not None:
                raise ValueError(
                    "a hook cannot change the arguments of a step. Change them in the call, or use `override`."
                )
        if override is not None:
            self._apply_override(override)
        weights = self._weights(params)
        self._require(loss, upper_loss)
        self._collect(weights, loss, upper_loss)
        lower = list(self._sums.pop("lower"))
        upper = self._sums.pop("upper", None)
        self._seen = []
        new = self._updated(weights, lower, upper, grad_callback or self._grad_callback)
        self.k += 1
        if self._fmodel is not None:
            self._fmodel.update_params(new)
        for hook in self._optimizer_step_post_hooks.values():
            hook(self, (loss,), {})
        return new

    def accumulate(
        self, loss: Tensor | None, params: Iterable[Tensor] | None = None, *, upper_loss: Tensor | None = None
    ) -> None:
        """Add the gradient of a loss to those of the next step: the micro-batches of one inner step.

        With `first_order=True` or without tracking each loss's graph is freed here.

        Args:
            loss: A part of the loss; divide by the number of micro-batches for a mean.
            params: As in `step`.
            upper_loss: As in `step`.
        """
        check_ambient()
        self._collect(self._weights(params), loss, upper_loss)

    def _updated(
        self, weights: list[Tensor], lower: list[Tensor | None], upper: Grads | None, callback: GradCallback | None
    ) -> list[Tensor]:
        """Return the weights after an update along these gradients."""
        places = self._group_to_param_list
        for group, members in zip(self.param_groups, places, strict=True):
            group["params"] = [weights[i] for i in members]
        extra = {} if upper is None else {"upper": self._grouped(upper)}
        with torch.set_grad_enabled(self._track_higher_grads):
            if callback is not None:
                lower = list(callback(lower))
                if len(lower) != len(weights):
                    raise ValueError(f"`grad_callback` must return {len(weights)} gradients; got {len(lower)}.")
            self._update(self._grouped(lower), **extra)
        new = list(weights)
        for group, members in zip(self.param_groups, places, strict=True):
            for i, tensor in zip(members, group["params"], strict=True):
                new[i] = tensor
                if not self._track_higher_grads:
                    new[i] = tensor.detach().requires_grad_(weights[i].requires_grad)
            group["params"] = [None] * len(members)  # a graph that the user releases must not stay alive here
        return new

    def _collect(self, weights: list[Tensor], lower: Tensor | None, upper: Tensor | None) -> None:
        if self._seen and any(map(operator.is_not, self._seen, weights)):
            self._sums = {}
            self._seen = []
            raise ValueError("the weights changed after `accumulate`. Take the step at the same weights.")
        if upper is not None and not self._takes_upper():
            raise TypeError(
                f"{type(self).__name__} has no use for `upper_loss`. Mix both levels with a "
                "`bda_optim.BDAInnerOptimizer`."
            )
        mixes = self._mixes()
        graph = self._track_higher_grads and not self._first_order
        collected = {}
        if lower is not None:
            collected["lower"] = self._gradients(lower, weights, "lower", graph=graph, retain=mixes)
        if upper is not None and mixes:
            collected["upper"] = self._gradients(upper, weights, "upper", graph=graph, retain=False)
        for level, grads in collected.items():  # only now, so that a call that raised has left nothing behind
            self._sums[level] = _plus(self._sums.get(level), grads)
        self._seen = weights

    def _require(self, lower: Tensor | None, upper: Tensor | None) -> None:
        """Raise where a gradient is missing for a step."""
        if lower is None and "lower" not in self._sums:
            raise ValueError("a step needs a loss; got none. Write `diffopt.step(loss)`, or `accumulate` before.")
        if upper is None and self._mixes() and "upper" not in self._sums:
            raise ValueError(
                f"`alpha` is not 0 at step k={self.k + 1}, so the step needs the upper loss too; got the lower one. "
                "Write `diffopt.step(lower, upper_loss=upper)`, or set alpha=0.0."
            )

    @abc.abstractmethod
    def _update(self, grouped_grads: Grouped, **kwargs: Any) -> None:
        """Replace the entries of ``param_groups[g]["params"]`` by the new weights, and change `state`.

        Nothing may be done in place. ``grouped_grads[g][i]`` belongs to ``param_groups[g]["params"][i]``, and is None
        where the loss does not depend on that.
        """

    def _mixes(self) -> bool:
        """Whether the next step needs the gradient of the upper loss."""
        return False

    def _takes_upper(self) -> bool:
        return False

    def _apply_override(self, override: Override) -> None:
        for name, value in override.items():
            pair = isinstance(self.param_groups[0].get(name), tuple)
            values = per_group(name, value, len(self.param_groups), pair=pair)
            for group, new in zip(self.param_groups, values, strict=True):
                group[name] = new

    def _weights(self, params: Iterable[Tensor] | None) -> list[Tensor]:
        if params is None and self._fmodel is not None:
            params = self._fmodel.fast_params
        if params is None:
            raise ValueError("a step without a patched module needs to be given the weights. Pass `params=`.")
        weights = list(params)
        if any(not 0 <= i < len(weights) for members in self._group_to_param_list for i in members):
            raise ValueError(f"the optimizer has more than {len(weights)} weights. Pass all, as `parameters()` does.")
        return weights

    def _gradients(self, loss: Any, weights: list[Tensor], level: str, *, graph: bool, retain: bool) -> Grads:
        if self.k == 0:
            refuse_reentrant(loss, self._opened)
        live = [i for i, p in enumerate(weights) if p.requires_grad]
        with torch.enable_grad():  # the caller may be under no_grad
            points = [weights[i] for i in live]
            grads = gradient(loss, points, level, self.k + 1, create_graph=graph, retain_graph=retain or graph)
        every: list[Tensor | None] = [None] * len(weights)
        for i, grad in zip(live, grads, strict=True):
            every[i] = grad
        return every

    def _grouped(self, grads: Grads) -> Grouped:
        return [[grads[i] for i in members] for members in self._group_to_param_list]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the `.grad` of the patched module's weights that are leaves."""
        for p in self._weights(None):
            if p.is_leaf and p.grad is not None:
                p.grad = None if set_to_none else torch.zeros_like(p)

    def state_dict(self) -> dict[str, Any]:
        """Return settings and state, detached, in the form of torch.optim: ``opt.load_state_dict`` takes it.

        Tensors of one element among the settings are written as numbers. This carries the state over to `opt` after the
        loop, or to the next window: ``diffopt.load_state_dict(diffopt.state_dict())`` cuts it off the graph.
        """
        packed = []
        states = {}
        count = 0
        for group, state in zip(self.param_groups, self.state, strict=True):
            numbers = list(range(count, count + len(group["params"])))
            count += len(numbers)
            packed.append({**{k: _plain(v) for k, v in group.items() if k != "params"}, "params": numbers})
            for i, entry in state.items():
                if entry:
                    key = numbers[0] if i == "group" else numbers[i]
                    detached = map_tensors(lambda t: t.detach().clone(), entry)
                    states[key] = {"group": detached} if i == "group" else detached
        return {"state": states, "param_groups": packed}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over what `state_dict`, here or of the optimizer in torch.optim, returned; tensors are copied."""
        groups = state_dict["param_groups"]
        sizes = [len(group["params"]) for group in groups]
        expected = [len(group["params"]) for group in self.param_groups]
        if sizes != expected:
            raise ValueError(f"the state_dict has groups of {sizes} parameters; got an optimizer with {expected}.")
        loaded_states = []
        for group, loaded in zip(self.param_groups, groups, strict=True):
            group.update({name: value for name, value in loaded.items() if name != "params"})
            states: dict[Any, Any] = defaultdict(dict)
            for i, number in enumerate(loaded["params"]):
                entry = state_dict["state"].get(number)
                if entry:
                    copied = map_tensors(lambda t: t.detach().clone(), dict(entry))
                    states["group" if "group" in copied else i] = copied.get("group", copied)
            loaded_states.append(states)
        self.state = loaded_states

    def add_param_group(self, param_group: dict[str, Any]) -> NoReturn:
        """Refuse: the weights are those of the optimizer that this one was made of."""
        raise NotImplementedError("add the group to the optimizer, before `get_diff_optim` or `innerloop_ctx`.")

    def __getstate__(self) -> dict[str, Any]:
        """Refuse to be copied: the weights of a graph cannot be."""
        raise NotImplementedError(
            "a differentiable optimizer cannot be copied or pickled, because its weights are part of a graph. Save its "
            "`state_dict()`, and the patched module, which can be pickled."
        )


def _refused(name: str) -> Any:
    def refuse(self: DifferentiableOptimizer, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"`{name}` is not available here. Call the function on what `state_dict()` returns.")

    return refuse


for _name in ("state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post"):
    setattr(DifferentiableOptimizer, f"register_{_name}_hook", _refused(f"register_{_name}_hook"))


def _without_params(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a group's settings: containers are copied at every depth, what they hold is shared."""
    copied = {name: _recursive_map(value, lambda entry: entry) for name, value in group.items() if name != "params"}
    return {**copied, "params": [None] * len(group["params"])}


def _places(params: Iterable[Tensor], place: Mapping[int, int]) -> list[int]:
    """Return the places of a group's parameters among the reference parameters."""
    for p in params:
        if id(p) not in place:
            raise ValueError(
                f"the optimizer owns a parameter that is not among the reference parameters; got one of shape "
                f"{tuple(p.shape)}. Pass the `parameters()` of the module that the optimizer was made for."
            )
    return [place[id(p)] for p in params]


def _copied_state(params: Iterable[Tensor], state: Mapping[Any, Any], device: Any) -> dict[Any, Any]:
    states: dict[Any, Any] = defaultdict(dict)
    for i, p in enumerate(params):
        if state.get(p):
            states[i] = map_tensors(lambda t: t.detach().clone().to(device or t.device), dict(state[p]))
    return states


def _plus(total: Grads | None, grads: Grads) -> Grads:
    if total is None:
        return grads
    pairs = zip(total, grads, strict=True)
    return [b if a is None else a if b is None else a + b for a, b in pairs]


def _plain(value: Any) -> Any:
    """Return tensors of one element as numbers, others detached; containers at every depth."""

    def plain(entry: Any) -> Any:
        if not isinstance(entry, Tensor):
            return entry
        return entry.item() if entry.numel() == 1 else entry.detach().clone()

    return _recursive_map(value, plain)
