"""Update rules: what torch.optim's optimizers make of a gradient, as pure and differentiable functions.

Every rule is written per parameter, with the settings, defaults and state keys of torch.optim. Nothing is done in
place, and square roots have the derivative 0 at 0: a rollout is differentiable also where gradients vanish. Numbers
that depend on the step count are doubles: plain ones, or 0-dim float64 tensors while a step is traced (then nothing
branches on them). torch.optim keeps NAdam's `mu_product` and ASGD's `eta` in torch's default dtype: if that is float32,
these two rules differ from it in the eighth digit, whatever the parameters' dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..._support.types import Move, RuleState, Scalar, Settings

_PER_PARAMETER = ("lr", "momentum", "weight_decay")  # these may differ from element to element (Meta-SGD)
_FIXED = ("etas", "step_sizes", "initial_accumulator_value", "t0")  # these are plain numbers, never learned


def _settings(**defaults: Any) -> Mapping[str, Any]:
    return MappingProxyType(defaults)


_Range = tuple[str, Callable[[float], bool]]
_AT_LEAST_0: _Range = ("be at least 0", lambda x: x >= 0)
_RANGES: Mapping[str, _Range] = {
    **dict.fromkeys(("lr", "momentum", "weight_decay", "eps", "lr_decay", "momentum_decay"), _AT_LEAST_0),
    "initial_accumulator_value": _AT_LEAST_0,
    "betas": ("lie in [0, 1)", lambda x: 0 <= x < 1),
    "rho": ("lie in [0, 1]", lambda x: 0 <= x <= 1),
    "beta2_decay": ("be at most 0", lambda x: x <= 0),
    "d": ("be at least 1", lambda x: x >= 1),
}


# Pieces of the equations. A scalar is a number or a tensor; the base class casts what a tensor scalar promoted.


def _is_on(value: Any) -> bool:
    """Whether a setting takes effect: a tensor always does, since reading its value would synchronise."""
    return isinstance(value, Tensor | list) or value != 0


def _varies(value: Any) -> bool:
    """Whether a setting may differ from element to element."""
    return isinstance(value, list) or (isinstance(value, Tensor) and value.dim() > 0)


def _add(y: Tensor, x: Tensor, scale: Scalar) -> Tensor:
    """``y + scale x``, in torch.optim's own operation where the scale is a number; a 0-dim y keeps its dtype."""
    return (y + scale * x).to(y.dtype) if isinstance(scale, Tensor) else torch.add(y, x, alpha=scale)


def _lerp(old: Tensor, new: Tensor, weight: Scalar) -> Tensor:
    """``(1 - weight) old + weight new``."""
    return old + weight * (new - old) if isinstance(weight, Tensor) else torch.lerp(old, new, weight)


def _mean_square(old: Tensor, grad: Tensor, beta: Scalar) -> Tensor:
    """``beta old + (1 - beta) grad^2``."""
    if isinstance(beta, Tensor):
        return beta * old + (1 - beta) * grad * grad
    return torch.addcmul(old * beta, grad, grad, value=1 - beta)


def _root(x: Tensor) -> Tensor:
    """``sqrt(x)`` with the derivative 0 at 0, and 0 for an x that rounding made negative; NaN stays NaN."""
    zero = x <= 0
    return x.masked_fill(zero, 1.0).sqrt().masked_fill(zero, 0.0)


def _rms(x: Tensor) -> Tensor:
    return _root((x * x).mean())


def _power(base: Scalar, step: Scalar) -> Any:
    """``base ** step`` in double precision: in float32 ``1 - 0.999 ** 2`` has an error of 3e-5."""
    return (base.double() if isinstance(base, Tensor) else base) ** step


def _pick(condition: bool | Tensor, yes: Scalar, no: Scalar) -> Any:
    """``yes if condition else no``, without branching where the condition is a tensor."""
    if not isinstance(condition, Tensor):
        return yes if condition else no
    device = condition.device
    yes, no = (x if isinstance(x, Tensor) else torch.full((), x, dtype=torch.float64, device=device) for x in (yes, no))
    return torch.where(condition, yes, no)


def _moments(grad: Tensor, state: RuleState, betas: tuple[Scalar, Scalar]) -> RuleState:
    """Count the step, and average the gradient and its square."""
    mean = _lerp(state["exp_avg"], grad, 1 - betas[0])
    square = _mean_square(state["exp_avg_sq"], grad, betas[1])
    return {"step": state["step"] + 1, "exp_avg": mean, "exp_avg_sq": square}


def _lower(grad: Tensor, at: Tensor, s: Settings) -> Tensor:
    """The gradient to descend along: its sign by `maximize`, plus ``weight_decay y`` unless that is decoupled."""
    grad = -grad if s["maximize"] else grad
    coupled = not s.get("decoupled_weight_decay", False)
    return _add(grad, at, s["weight_decay"]) if coupled and _is_on(s["weight_decay"]) else grad


def _decoupled(direction: Tensor, param: Tensor, s: Settings) -> Move:
    """``lr (direction + weight_decay y)``, the second term only if the weight decay is decoupled."""
    if s["decoupled_weight_decay"] and _is_on(s["weight_decay"]):
        direction = _add(direction, param, s["weight_decay"])
    return Move(direction, s["lr"])


# Between a group of parameters and the equations of one of them.


def _flat(value: Any) -> Any:
    """Make tensors of one element 0-dim, so that they cannot change a parameter's shape."""
    if isinstance(value, tuple | list):
        return type(value)(map(_flat, value))
    return value.reshape(()) if isinstance(value, Tensor) and value.dim() and value.numel() == 1 else value


def _real(value: Any) -> Any:
    """A complex tensor counts as two real ones, as in torch.optim."""
    if isinstance(value, Tensor) and value.is_complex():
        return torch.view_as_real(value.resolve_conj())
    return value


def _like(value: Any, example: Any) -> Any:
    """Bring what `_move` returned back to the dtype of the tensor it replaces."""
    if not isinstance(example, Tensor) or value.dtype == example.dtype:
        return value
    return (torch.view_as_complex(value.contiguous()) if example.is_complex() else value).to(example.dtype)


def _taken(value: Any, default: Any) -> Any:
    """A copy of a value of torch.optim's state, in the form of `default`."""
    if value is None:
        return default
    if not isinstance(default, Tensor):
        return type(default)(value)
    return torch.as_tensor(value).detach().to(default.device, default.dtype).expand_as(default).clone()


@dataclass(frozen=True)
class ParameterRule:
    """A rule that treats each parameter of a group alone.

    A subclass sets `defaults` and defines `_move`, the equation of one parameter. `_start` is its state before the
    first step: by default a `step` count of 0, the buffers that `_zeros` names, and those of `_optional` whose setting
    is on. Keys and shapes of a state never change. A parameter without a gradient keeps its state, as in torch.optim.
    """

    defaults: ClassVar[Mapping[str, Any]] = _settings()
    elementwise: ClassVar[bool] = True
    _zeros: ClassVar[tuple[str, ...]] = ()
    _optional: ClassVar[tuple[tuple[str, str], ...]] = ()
    _ranges: ClassVar[Mapping[str, _Range]] = _RANGES

    @property
    def name(self) -> str:
        """The name that `state_dict` writes and checks."""
        return type(self).__name__

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
            elif isinstance(value, list) and key in _PER_PARAMETER:
                if not all(isinstance(entry, Tensor) and entry.is_floating_point() for entry in value):
                    raise self._error(key, "as a list hold one floating-point tensor per parameter", value)
            else:
                self._check(key, value)

    def _check(self, key: str, value: Any) -> None:
        if isinstance(value, Tensor):
            kind = f"a {value.dtype} tensor of shape {tuple(value.shape)}"
            if key in _FIXED:
                raise self._error(key, "be a plain number: it cannot be learned", kind)
            if not value.is_floating_point() or (value.numel() != 1 and key not in _PER_PARAMETER):
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
        for key in _PER_PARAMETER:
            if isinstance(entries := full.get(key), list):
                got, want = [tuple(entry.shape) for entry in entries], [tuple(param.shape) for param in params]
                # A stacked parameter has a dimension of tasks in front.
                fit = (math.prod(g) == 1 or w[len(w) - len(g) :] == g for g, w in zip(got, want, strict=False))
                if len(got) != len(want) or not all(fit):
                    raise self._error(key, f"as a list fit the parameters' shapes {want}", got)
        return tuple(self._fresh(param, self._local(full, i, param)) for i, param in enumerate(params))

    def point(self, params: Sequence[Tensor], state: Any, settings: Settings) -> Sequence[Tensor]:
        """Return where the gradients are taken: here, at the parameters themselves."""
        return params

    def update(
        self, grads: Sequence[Tensor | None], state: Any, params: Sequence[Tensor], settings: Settings
    ) -> tuple[list[Move | None], tuple[RuleState, ...]]:
        """Return one move per parameter (None: it had no gradient and stays) and the new states."""
        full = self._complete(settings)
        varies = any(map(_varies, map(full.get, _PER_PARAMETER)))
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
                    direction, scale = scale * direction, 1.0
            scale = scale.to(param.dtype) if isinstance(scale, Tensor) else scale
            moves.append(Move(_like(direction, param), scale))
            states.append({key: _like(after[key], value) for key, value in before.items()})
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
        return {key: _taken(torch_state.get(key), default) for key, default in fresh.items()}

    def _complete(self, settings: Settings) -> dict[str, Any]:
        """The rule's own settings, all of them; a group has more (`alpha`, `prox`, ...)."""
        return {key: _flat(settings.get(key, default)) for key, default in self.defaults.items()}

    def _local(self, full: dict[str, Any], index: int, param: Tensor) -> Settings:
        """The settings of one parameter: its entries of the lists, and tensors that broadcast to it."""
        local = {key: full[key] for key in _PER_PARAMETER if _varies(full.get(key))}
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
        buffers = (*self._zeros, *(key for key, setting in self._optional if _is_on(s[setting])))
        return {"step": 0, **{key: torch.zeros_like(param) for key in buffers}}

    def _move(self, grad: Tensor, state: RuleState, param: Tensor, s: Settings) -> tuple[Move, RuleState]:
        raise NotImplementedError(f"{type(self).__name__} does not define `_move`.")
