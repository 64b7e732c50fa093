"""Rules that treat each parameter alone: what torch.optim's optimizers make of a gradient, as pure functions.

Every rule has the settings, defaults and state keys of torch.optim. Nothing is done in place, and square roots have the
derivative 0 at 0, so that a rollout is differentiable also where gradients vanish. Numbers that depend on the step
count are doubles: plain ones, or 0-dim float64 tensors while a step is traced (then nothing branches on them).
torch.optim keeps NAdam's `mu_product` and ASGD's `eta` in torch's default dtype: if that is float32, these two rules
differ from it in the eighth digit, whatever the dtype of the parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from types import MappingProxyType
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor

from ..._support.types import Move, Rule, RuleState, Settings
from .arithmetic import is_on
from .memory import complete_entry

PER_PARAMETER = ("lr", "momentum", "weight_decay")
"""Settings that may differ from element to element, as in Meta-SGD: a list with one tensor per parameter, or a tensor
that broadcasts."""

FIXED = ("etas", "step_sizes", "initial_accumulator_value", "t0")
"""Settings that are plain numbers and cannot be learned."""

Range: TypeAlias = tuple[str, Callable[[float], bool]]
AT_LEAST_0: Range = ("be at least 0", lambda x: x >= 0)
RANGES: Mapping[str, Range] = {
    **dict.fromkeys(("lr", "momentum", "weight_decay", "eps", "lr_decay", "momentum_decay"), AT_LEAST_0),
    "initial_accumulator_value": AT_LEAST_0,
    "betas": ("lie in [0, 1)", lambda x: 0 <= x < 1),
    "rho": ("lie in [0, 1]", lambda x: 0 <= x <= 1),
    "beta2_decay": ("be at most 0", lambda x: x <= 0),
    "d": ("be at least 1", lambda x: x >= 1),
}


def read_only(**settings: Any) -> Mapping[str, Any]:
    """Return settings as a mapping that cannot be changed."""
    return MappingProxyType(settings)


@dataclass(frozen=True)
class ParameterRule(Rule):
    """A rule that treats each parameter of a group alone.

    A subclass sets `defaults` and defines `_move`, the equation of one parameter. `_start` is its state before the
    first step: by default a `step` count of 0, the buffers that `_zeros` names, and those of `_optional` whose setting
    is on. Keys and shapes of a state never change. A parameter without a gradient keeps its state, as in torch.optim.
    """

    defaults: ClassVar[Mapping[str, Any]] = read_only(lr=1e-3)
    elementwise: ClassVar[bool] = True
    _zeros: ClassVar[tuple[str, ...]] = ()
    _optional: ClassVar[tuple[tuple[str, str], ...]] = ()
    _ranges: ClassVar[Mapping[str, Range]] = RANGES

    def validate(self, settings: Settings) -> None:
        """Raise `ValueError` for an unknown setting or a value out of range; tensors are checked for kind only."""
        for key, value in settings.items():
            if key not in self.defaults:
                known = ", ".join(f"`{name}`" for name in self.defaults)
                raise ValueError(f"{self.name} has no such setting; got `{key}`. It takes {known}.")
            default = self.defaults[key]
            if isinstance(default, bool):
                if not isinstance(value, bool):
                    raise self._error(key, "be True or False", value)
            elif isinstance(default, tuple):
                if not isinstance(value, tuple | list) or len(value) != len(default):
                    raise self._error(key, f"have {len(default)} entries", value)
                for entry, standard in zip(value, default, strict=True):
                    if entry is not None or standard is not None:
                        self._check(key, entry)
            elif isinstance(value, list) and key in PER_PARAMETER:
                if not all(isinstance(entry, Tensor) and entry.is_floating_point() for entry in value):
                    raise self._error(key, "as a list hold one floating-point tensor per parameter", value)
            else:
                self._check(key, value)

    def _check(self, key: str, value: Any) -> None:
        if isinstance(value, Tensor):
            kind = f"a {value.dtype} tensor of shape {tuple(value.shape)}"
            if key in FIXED:
                raise self._error(key, "be a plain number: it cannot be learned", kind)
            if not value.is_floating_point() or (value.numel() != 1 and key not in PER_PARAMETER):
                raise self._error(key, "as a tensor be floating-point and have one element", kind)
            return
        words, holds = self._ranges.get(key, ("be a number", lambda x: True))
        if isinstance(value, bool) or not isinstance(value, Real) or not holds(float(value)):
            raise self._error(key, words, value)

    def _error(self, key: str, words: str, value: Any) -> ValueError:
        return ValueError(f"`{key}` of {self.name} must {words}; got {value}. The default is {self.defaults[key]}.")

    def init(self, params: Sequence[Tensor], settings: Settings) -> tuple[RuleState, ...]:
        """Return one state per parameter, before the first step."""
        full = self._complete(settings)
        for key in PER_PARAMETER:
            if isinstance(entries := full.get(key), list):
                got = [tuple(entry.shape) for entry in entries]
                want = [tuple(param.shape) for param in params]
                # A stacked parameter has a dimension of tasks in front.
                fit = (math.prod(g) == 1 or w[len(w) - len(g) :] == g for g, w in zip(got, want, strict=False))
                if len(got) != len(want) or not all(fit):
                    raise self._error(key, f"as a list fit the parameters' shapes {want}", got)
        return tuple(self._fresh(param, self._local(full, i, param)) for i, param in enumerate(params))

    def update(
        self, grads: Sequence[Tensor | None], state: Any, params: Sequence[Tensor], settings: Settings
    ) -> tuple[list[Move | None], tuple[RuleState, ...]]:
        """Return one move per parameter (None if it has no gradient and stays) and the new states."""
        full = self._complete(settings)
        varies = any(map(_varies, map(full.get, PER_PARAMETER)))
        moves: list[Move | None] = []
        states: list[RuleState] = []
        for i, (grad, before, param) in enumerate(zip(grads, state, params, strict=True)):
            if grad is None or param.numel() == 0:  # a mean over nothing would be NaN, in Adafactor
                moves.append(None)
                states.append(before)
                continue
            local = self._local(full, i, param) if varies else full
            if not param.is_complex():
                (direction, scale), after = self._move(grad, before, param, local)
            else:
                real = {key: _real(value) for key, value in before.items()}
                (direction, scale), after = self._move(_real(grad), real, _real(param), local)
                if isinstance(scale, Tensor):
                    direction = scale * direction
                    scale = 1.0
            scale = scale.to(param.dtype) if isinstance(scale, Tensor) else scale
            moves.append(Move(_like(direction, param), scale))
            states.append({key: _like(after.get(key, value), value) for key, value in before.items()})
        return moves, tuple(states)

    def adopt(self, torch_state: Mapping[str, Any], param: Tensor, settings: Settings, *, index: int = 0) -> RuleState:
        """Turn what a torch.optim optimizer holds for one parameter into this rule's state, copied and detached.

        Args:
            torch_state: ``optimizer.state[param]``; it may be empty, before the first step.
            param: The parameter.
            settings: Those of its group.
            index: The parameter's place in the group, for settings given as a list.

        Returns:
            The state from which the rule goes on as torch.optim would.
        """
        fresh = self._fresh(param, self._local(self._complete(settings), index, param))
        known = {key: value for key, value in torch_state.items() if key in fresh and value is not None}
        return complete_entry(fresh, {key: _converted(value, fresh[key]) for key, value in known.items()})

    def _complete(self, settings: Settings) -> dict[str, Any]:
        """Return all settings of the rule; a group has more (`alpha`, `prox`, ...)."""
        return {key: _flat(settings.get(key, default)) for key, default in self.defaults.items()}

    def _local(self, full: dict[str, Any], index: int, param: Tensor) -> Settings:
        """Return the settings of one parameter: its entries of the lists, and tensors that broadcast to it."""
        local = {key: full[key] for key in PER_PARAMETER if _varies(full.get(key))}
        if not local:
            return full
        local = {key: value[index] if isinstance(value, list) else value for key, value in local.items()}
        if param.is_complex():  # `_move` sees a last dimension of size 2, for the real and the imaginary part
            local = {key: value.unsqueeze(-1) if value.dim() else value for key, value in local.items()}
        return {**full, **local}

    def _fresh(self, param: Tensor, s: Settings) -> RuleState:
        if not param.is_complex():
            return self._start(param.detach(), s)
        if not self.elementwise:
            raise ValueError(f"{self.name} takes real parameters; got {param.dtype}. Use an elementwise rule, as Adam.")
        real = _real(param.detach())
        state = self._start(real, s)
        whole = {key for key, value in state.items() if isinstance(value, Tensor) and value.shape == real.shape}
        return {key: torch.view_as_complex(value) if key in whole else value for key, value in state.items()}

    def _start(self, param: Tensor, s: Settings) -> RuleState:
        buffers = (*self._zeros, *(key for key, setting in self._optional if is_on(s[setting])))
        return {"step": 0, **{key: torch.zeros_like(param) for key in buffers}}

    def _move(self, grad: Tensor, state: RuleState, param: Tensor, s: Settings) -> tuple[Move, RuleState]:
        raise NotImplementedError(f"{type(self).__name__} does not define `_move`.")


def _varies(value: Any) -> bool:
    """Whether a setting may differ from element to element."""
    return isinstance(value, list) or (isinstance(value, Tensor) and value.dim() > 0)


def _flat(value: Any) -> Any:
    """Make tensors of one element 0-dim, so that they cannot change a parameter's shape."""
    if isinstance(value, tuple | list):
        return type(value)(map(_flat, value))
    return value.reshape(()) if isinstance(value, Tensor) and value.dim() and value.numel() == 1 else value


def _real(value: Any) -> Any:
    """Return a complex tensor as two real ones, which is how torch.optim treats it."""
    if isinstance(value, Tensor) and value.is_complex():
        return torch.view_as_real(value.resolve_conj())
    return value


def _like(value: Any, example: Any) -> Any:
    """Bring what `_move` returned back to the dtype of the tensor that it replaces."""
    if not isinstance(example, Tensor) or value.dtype == example.dtype:
        return value
    return (torch.view_as_complex(value.contiguous()) if example.is_complex() else value).to(example.dtype)


def _converted(value: Any, example: Any) -> Any:
    """Return a copy of a value of torch.optim's state in the form of `example`."""
    if not isinstance(example, Tensor):
        return type(example)(value)
    return torch.as_tensor(value).detach().to(example.device, example.dtype).expand_as(example).clone()
