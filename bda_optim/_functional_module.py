"""The module that an inner loop gives back: the user's module with other parameters inside."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ._compiled.losses import traced_losses
from ._context.forward import refuse_checkpoint, surroundings
from ._modules.skeleton import Skeleton
from ._rollout.items import check_task_dimension
from ._rollout.losses import Trace
from ._step.gradients import gradient
from ._step.objective import Loss, Objective
from ._step.tasks import TaskMapper, TasksObjective
from ._step.update import Update
from ._support.torch_private import MODULE_DICTS, inside_checkpoint, opaque, pre_hooks, replace_pre_hooks
from ._support.tree import tensors
from ._support.types import InnerState


class Part(NamedTuple):
    """Which parameters, and which groups' memories, of a state belong to one optimizer."""

    params: slice
    groups: slice

    @classmethod
    def after(cls, others: Sequence[Part], params: int, groups: int) -> Part:
        """Return the part of so many parameters and groups that follows others."""
        first_param = others[-1].params.stop if others else 0
        first_group = others[-1].groups.stop if others else 0
        return cls(slice(first_param, first_param + params), slice(first_group, first_group + groups))

    def of(self, state: InnerState) -> InnerState:
        """Return this part of a state."""
        return InnerState(state.params[self.params], state.rule[self.groups], state.buffers)

    def put(self, state: InnerState, own: InnerState) -> InnerState:
        """Return a state with this part replaced, and its buffers."""
        params = (*state.params[: self.params.start], *own.params, *state.params[self.params.stop :])
        memory = (*state.rule[: self.groups.start], *own.rule, *state.rule[self.groups.stop :])
        return InnerState(params, memory, own.buffers)


class FunctionalModule(nn.Module):
    """The user's module with the iterate y in place of the parameters that the optimizer owns.

    It is called like the module, and has its attributes, methods, sub-modules and hooks; the user's module itself is
    not touched. With tasks=B every tensor argument is mapped over its first dimension, of size B, and the outputs have
    it in front.

    Attributes:
        trace: After `unroll`, the losses of the K steps.
    """

    trace: Trace | None

    def __init__(
        self,
        skeleton: Skeleton,
        names: Sequence[str],
        state: InnerState,
        update: Update,
        mapper: TaskMapper | None = None,
        *,
        parts: Sequence[Part] = (),
        twice: bool = True,
        traced: Sequence[Loss | None] = (),
    ) -> None:
        """Lay `state` into `skeleton`.

        Args:
            skeleton: The twin of the user's module.
            names: The names of its parameters.
            state: What is laid into it.
            update: What changes the parameters.
            mapper: What maps functions over tasks.
            parts: Which parts of the state belong to which optimizer.
            twice: Whether a call is differentiated twice; otherwise fused attention and checkpoints are allowed.
            traced: The losses that a compiled rollout traced.
        """
        super().__init__()
        content = self.__dict__
        for key in MODULE_DICTS:
            content[key] = skeleton.root.__dict__[key]
        content.update(
            _skeleton=skeleton,
            _names=tuple(names),
            _tasks=update.tasks,
            _update=update,
            _mapper=mapper,
            _twice=twice,
            _traced=tuple(traced),
            _parts=tuple(parts) or (Part.after((), len(names), len(state.rule)),),
            training=skeleton.root.training,
        )
        # Past nn.Module's `__setattr__`: the user's module may have a parameter of this name.
        content.update(trace=None, _state=state, _recomputed=not twice or inside_checkpoint())
        self._lay(state)

    @property
    def params(self) -> dict[str, Tensor]:
        """Name to y: the parameters that the optimizer owns; with tasks=B the task dimension is in front."""
        return dict(zip(self._names, self._state.params, strict=True))

    @property
    def buffer_dict(self) -> dict[str, Tensor]:
        """Name to buffer, as the last forward pass left it."""
        if self._tasks is not None:
            return dict(zip(self._skeleton.buffers, self._state.buffers, strict=True))
        return dict(zip(self._skeleton.buffers, self._skeleton.read_buffers(), strict=True))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        return self._call(self._skeleton.root, args, kwargs)

    @opaque
    def _call(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call the module, or a method of it, for one task or for many."""
        if not self._recomputed:
            refuse_checkpoint()
        with surroundings(twice=self._twice), self._skeleton.surroundings():
            if self._tasks is None:
                return function(*args, **kwargs)
            for tensor in tensors((args, kwargs)):
                if tensor.dim() == 0 or tensor.shape[0] != self._tasks:
                    raise ValueError(
                        f"every tensor given to a module with tasks={self._tasks} has a leading dimension of that "
                        f"size; got shape {tuple(tensor.shape)}. Stack the tasks' inputs."
                    )

            def one(state: InnerState, args: Any, kwargs: Any) -> Any:
                self._lay_tensors(state)
                return function(*args, **kwargs), self._skeleton.read_buffers()

            shown = InnerState(self._state.params, (), self._state.buffers)
            buffers = self._state.buffers
            try:
                result, buffers = self._mapper(one, shown, args, kwargs)
            finally:
                self._lay(self._state._replace(buffers=buffers))
            return result

    @opaque
    def losses(self, loss: Loss, hyper: Any = None, batch: Any = None) -> Tensor:
        """Return the B losses ``loss(net, hyper, batch)`` of B tasks, every tensor of `batch` with B in front.

        After a compiled rollout its losses are traced here too: what they read beside their arguments, their closures
        and the module is read once.
        """
        if self._tasks is None:
            return loss(self, hyper, batch).reshape(1)
        check_task_dimension(batch, self._tasks, "`batch`")
        if any(loss is known for known in self._traced) and not self._state.buffers:
            trees = (self._state.params, hyper, batch)
            called = functools.partial(self._called, loss)
            value = traced_losses(loss, called, self._skeleton, self._names, self._tasks, trees)
            if value is not None:
                return value
        return self._losses(loss, self._state.params, hyper, batch)

    def _called(self, loss: Loss, trees: tuple[Any, Any, Any]) -> Tensor:
        return self._losses(loss, *trees)

    def _losses(self, loss: Loss, params: Sequence[Tensor], hyper: Any, batch: Any) -> Tensor:
        """Call a loss on all tasks."""
        buffers = self._state.buffers
        try:
            with surroundings(twice=self._twice), self._skeleton.surroundings():
                value, buffers = self._objective(hyper)(loss, params, buffers, (), batch)
        finally:
            self._lay(self._state._replace(buffers=buffers))
        return value

    def lower_point(self, lower: Loss, hyper: Any = None, batch: Any = None) -> dict[str, Tensor]:
        """Return the paper's y~ = prox(y - lr grad f), name to tensor: what is sparse, or feasible, with alpha > 0."""
        if len(self._parts) > 1:
            raise ValueError(
                "a lower point needs the settings of one optimizer; got a loop with several. Use "
                "`bda_optim.lower_point(..., lr=...)` on `fmodel.params`."
            )
        points = [p.detach().requires_grad_() for p in self._state.params]
        buffers = tuple(self.buffer_dict.values())
        try:
            with torch.enable_grad(), surroundings(twice=self._twice), self._skeleton.surroundings():
                value, _ = self._objective(hyper)(lower, points, buffers, (), batch)
                grads = gradient(value, points, "lower", 1, tasks=self._tasks)
        finally:
            self._lay(self._state._replace(buffers=buffers))
        with torch.no_grad():
            settings = self._update.settings((), 1)
            values = self._update.lower_point([p.detach() for p in points], grads, settings, hyper)
        return dict(zip(self._names, values, strict=True))

    def train(self, mode: bool = True) -> FunctionalModule:
        """Set training mode, as the module would."""
        self._skeleton.root.train(mode)
        self.training = mode
        return self

    def _objective(self, hyper: Any) -> Objective:
        def one(loss: Loss, params: Sequence[Tensor], buffers: Any, hyper_: Any, batch: Any) -> tuple[Tensor, Any]:
            self._lay_tensors(InnerState(tuple(params), (), buffers))
            return loss(self._skeleton.root, hyper, batch), self._skeleton.read_buffers()

        return one if self._tasks is None else TasksObjective(one, self._mapper)

    def _lay(self, state: InnerState) -> None:
        """Make `state` the one that calls see."""
        self.__dict__["_state"] = state
        self._lay_tensors(state)

    def _lay_tensors(self, state: InnerState) -> None:
        self._skeleton.lay_params(self._names, state.params)
        self._skeleton.lay_buffers(state.buffers)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> FunctionalModule:
        raise NotImplementedError(
            "a functional module cannot be moved or cast: its parameters are results of the inner loop. "
            "Move the module before the loop."
        )

    def __getattr__(self, name: str) -> Any:
        """Find the module's own tensors, sub-modules, attributes and methods."""
        skeleton = self.__dict__.get("_skeleton")
        if skeleton is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return self._shown(getattr(skeleton.root, name))

    def _shown(self, value: Any) -> Any:
        """Return a part of the module for the user: a method runs as the module does, a sub-module takes care."""
        if isinstance(value, types.MethodType) and value.__self__ is self._skeleton.root:
            return functools.wraps(value)(lambda *args, **kwargs: self._call(value, args, kwargs))
        if isinstance(value, nn.Module) and not self._recomputed:
            for part in value.modules():
                hooks = pre_hooks(part)
                if _GUARD not in hooks:
                    replace_pre_hooks(part, {_GUARD: _refuse_checkpoint, **hooks})
        return value

    def __getitem__(self, index: Any) -> Any:
        """Index a Sequential or ModuleList."""
        return self._shown(self._skeleton.root[index])

    def __len__(self) -> int:
        """Return the length of a Sequential or ModuleList."""
        return len(self._skeleton.root)

    def __iter__(self) -> Iterator[Any]:
        """Go through a Sequential or ModuleList."""
        return map(self._shown, self._skeleton.root)

    def __bool__(self) -> bool:
        """Return True, whatever the length."""
        return True

    def __repr__(self) -> str:
        """Show the module inside."""
        return f"{type(self).__name__}({self._skeleton.root!r})"


_GUARD = -1  # no hook of torch's has this number


def _refuse_checkpoint(module: nn.Module, inputs: Any) -> None:
    """Refuse, before a sub-module is called, to be recomputed later with the parameters of another step."""
    refuse_checkpoint()
