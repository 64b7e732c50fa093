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
from dataclasses import dataclass, field
from numbers import Real
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..._support.tree import detach
from ..._support.types import Move, Rule, RuleState, Scalar, Settings

_PER_PARAMETER = ("lr", "momentum", "weight_decay")  # these may be a list with one tensor per parameter (Meta-SGD)
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
            if not value.is_floating_point() or value.numel() != 1:
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
        lists = any(isinstance(full.get(key), list) for key in _PER_PARAMETER)
        moves: list[Move | None] = []
        states: list[RuleState] = []
        for i, (grad, before, param) in enumerate(zip(grads, state, params, strict=True)):
            if grad is None or param.numel() == 0:  # a mean over nothing would be NaN, in Adafactor
                moves.append(None)
                states.append(before)
                continue
            local = self._local(full, i, param) if lists else full
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
        """The settings of one parameter, picked out of the lists."""
        lists = [key for key in _PER_PARAMETER if isinstance(full.get(key), list)]
        if not lists:
            return full
        local = {key: full[key][index] for key in lists}
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


class SGD(ParameterRule):
    """Gradient descent with momentum; without it there is no state.

    ``b = momentum b + (1 - dampening) g``, the first b being g; ``D = lr b``, with `nesterov` ``lr (g + momentum b)``.
    Reference: Sutskever et al., On the importance of initialization and momentum in deep learning, ICML 2013.
    """

    defaults = _settings(lr=1e-3, momentum=0.0, dampening=0.0, weight_decay=0.0, nesterov=False, maximize=False)

    def validate(self, settings: Settings) -> None:
        """Check ranges, and that Nesterov's form has a momentum and no dampening."""
        super().validate(settings)
        s = {**self.defaults, **settings}
        if s["nesterov"] and (not _is_on(s["momentum"]) or _is_on(s["dampening"])):
            got = f"`momentum`={s['momentum']} and `dampening`={s['dampening']}"
            raise ValueError(f"`nesterov` needs a momentum above 0 and dampening 0; got {got}. Use momentum=0.9, say.")

    def adopt(self, torch_state: Mapping[str, Any], param: Tensor, settings: Settings, *, index: int = 0) -> RuleState:
        """As for every rule; torch.optim keeps no count here, but a buffer shows that the first step is over."""
        state = super().adopt(torch_state, param, settings, index=index)
        if "step" in state and torch_state.get("momentum_buffer") is not None:
            state["step"] = max(state["step"], 1)
        return state

    def _start(self, param: Tensor, s: Settings) -> RuleState:
        # A zero buffer gives torch.optim's iterates, and the right derivative: torch detaches the first buffer.
        buffer = {"momentum_buffer": torch.zeros_like(param)} if _is_on(s["momentum"]) else {}
        return {**buffer, "step": 0} if buffer and _is_on(s["dampening"]) else buffer

    def _move(self, grad: Tensor, state: RuleState, param: Tensor, s: Settings) -> tuple[Move, RuleState]:
        grad = _lower(grad, param, s)
        if not _is_on(s["momentum"]):
            return Move(grad, s["lr"]), state
        weight = 1 - s["dampening"]
        if "step" in state:
            weight = _pick(state["step"] > 0, weight, 1.0)
            state = {**state, "step": state["step"] + 1}
        buffer = _add(state["momentum_buffer"] * s["momentum"], grad, weight)
        direction = _add(grad, buffer, s["momentum"]) if s["nesterov"] else buffer
        return Move(direction, s["lr"]), {**state, "momentum_buffer": buffer}


class Adam(ParameterRule):
    """Descent scaled by the moments of the gradient, with their bias corrected.

    ``m = b1 m + (1 - b1) g``, ``v = b2 v + (1 - b2) g^2``,
    ``D = lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)``; amsgrad puts the largest v so far in place of v.
    References: Kingma & Ba, Adam, ICLR 2015; Reddi et al., On the convergence of Adam and beyond, ICLR 2018.
    """

    defaults = _settings(
        lr=1e-3,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=0.0,
        amsgrad=False,
        decoupled_weight_decay=False,
        maximize=False,
    )
    _zeros = ("exp_avg", "exp_avg_sq")
    _optional = (("max_exp_avg_sq", "amsgrad"),)

    def _move(self, grad: Tensor, state: RuleState, param: Tensor, s: Settings) -> tuple[Move, RuleState]:
        new = _moments(_lower(grad, param, s), state, s["betas"])
        square = new["exp_avg_sq"]
        if s["amsgrad"]:
            square = new["max_exp_avg_sq"] = torch.maximum(state["max_exp_avg_sq"], square)
        c1, c2 = (1 - _power(beta, new["step"]) for beta in s["betas"])
        direction = new["exp_avg"] / (_root(square) * (c1 / c2**0.5) + c1 * s["eps"])
        return _decoupled(direction, param, s), new


class AdamW(Adam):
    """Adam with decoupled weight decay: ``D = D_Adam + lr weight_decay y``.

    Reference: Loshchilov & Hutter, Decoupled weight decay regularization, ICLR 2019.
    """

    defaults = _settings(lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2, amsgrad=False, maximize=False)

    def _move(self, grad: Tensor, state: RuleState, param: Tensor, s: Settings) -> tuple[Move, RuleState]:
        return super()._move(grad, state, param, {**s, "decoupled_weight_decay": True})


class Adamax(ParameterRule):
    """Adam with the infinity norm of the past gradients.

    ``m = b1 m + (1 - b1) g``, ``u = max(b2 u, |g| + eps)``, ``D = lr m / ((1 - b1^t) u)``.
    Reference: Kingma & Ba, Adam, section 7.1, ICLR 2015.
    """

    defaults = _settings(lr=2e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, maximize=False)
    _zeros = ("exp_avg", "exp_inf")

    def _move(self, grad: Tensor, state: RuleState, param: Tensor, s: Settings) -> tuple[Move, RuleState]:
        (beta1, beta2), step = s["betas"], state["step"] + 1
        grad = _lower(grad, param, s)
        mean = _lerp(state["exp_avg"], grad, 1 - beta1)
        norm = torch.maximum(beta2 * state["exp_inf"], grad.abs() + s["eps"])
        direction = mean / (norm * (1 - _power(beta1, step)))
        return Move(direction, s["lr"]), {"step": step, "exp_avg": mean, "exp_inf": norm}


class NAdam(ParameterRule):
    """Adam with Nesterov's momentum.

    ``mu_t = b1 (1 - 0.96^(t momentum_decay) / 2)``, m and v as in Adam, ``P_t = mu_1 ... mu_t``,
    ``D = lr [(1 - mu_t) g / (1 - P_t) + mu_{t+1} m / (1 - P_{t+1})] / (sqrt(v / (1 - b2^t)) + eps)``.
    Reference: Dozat, Incorporating Nesterov momentum into Adam, ICLR workshop 2016.
    """

    defaults = _settings(
        lr=2e-3,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=0.0,
        momentum_decay=4e-3,
        decoupled_weight_decay=False,
        maximize=False,
    )
    _zeros = ("exp_avg", "exp_avg_sq")

    def _start(self, param: Tensor, s: Settings) -> RuleState:
        learned = isinstance(s["betas"][0], Tensor) or isinstance(s["momentum_decay"], Tensor)
        product = torch.ones((), dtype=torch.float64, device=param.device) if learned else 1.0
        return {**super()._start(param, s), "mu_product": product}

    def _move(self, grad: Tensor, state: RuleState, param: Tensor, s: Settings) -> tuple[Move, RuleState]:
        (beta1, beta2), decay = s["betas"], s["momentum_decay"]
        grad = _lower(grad, param, s)
        new = _moments(grad, state, s["betas"])
        mu, mu_next = (beta1 * (1 - 0.5 * 0.96 ** (t * decay)) for t in (new["step"], new["step"] + 1))
        product = new["mu_product"] = state["mu_product"] * mu
        ahead = grad * ((1 - mu) / (1 - product)) + new["exp_avg"] * (mu_next / (1 - product * mu_next))
        direction = ahead / (_root(new["exp_avg_sq"]) / (1 - _power(beta2, new["step"])) ** 0.5 + s["eps"])
        return _decoupled(direction, param, s), new


class RAdam(ParameterRule):
    """Adam that waits for the variance of its step to settle.

    ``rho_inf = 2 / (1 - b2) - 1``, ``rho = rho_inf - 2 t b2^t / (1 - b2^t)``, ``D = lr (m / (1 - b1^t)) l`` with
    ``l = sqrt((rho-4)(rho-2) rho_inf / ((rho_inf-4)(rho_inf-2) rho)) sqrt(1 - b2^t) / (sqrt(v) + eps)`` once rho > 5,
    and ``l = 1`` before.
    Reference: Liu et al., On the variance of the adaptive learning rate and beyond, ICLR 2020.
    """

    defaults = _settings(
        lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, decoupled_weight_decay=False, maximize=False
    )
    _zeros = ("exp_avg", "exp_avg_sq")

    def _move(self, grad: Tensor, state: RuleState, param: Tensor, s: Settings) -> tuple[Move, RuleState]:
        new = _moments(_lower(grad, param, s), state, s["betas"])
        power1, power2 = (_power(beta, new["step"]) for beta in s["betas"])
        limit = 2 / (1 - s["betas"][1]) - 1
        length = limit - 2 * new["step"] * power2 / (1 - power2)
        settled = length > 5
        # 6 stands in before: the square root of the unused branch must not be NaN, whose derivative times 0 is NaN.
        limit, length = _pick(settled, limit, 6.0), _pick(settled, length, 6.0)
        rectifier = ((length - 4) * (length - 2) * limit / ((limit - 4) * (limit - 2) * length)) ** 0.5
        factor = _pick(settled, rectifier * (1 - power2) ** 0.5 / (_root(new["exp_avg_sq"]) + s["eps"]), 1.0)
        return _decoupled(new["exp_avg"] / (1 - power1) * factor, param, s), new


class RMSprop(ParameterRule):
    """Descent scaled by the root mean square of the gradient; `rule_alpha` is torch.optim's `alpha`.

    ``v = rule_alpha v + (1 - rule_alpha) g^2``, centered: minus the square of the mean gradient;
    ``b = momentum b + g / (sqrt(v) + eps)``, ``D = lr b``.
    References: Tieleman & Hinton, Lecture 6.5, 2012; Graves, Generating sequences with recurrent neural networks, 2013.
    """

    defaults = _settings(
        lr=1e-2, rule_alpha=0.99, eps=1e-8, weight_decay=0.0, momentum=0.0, centered=False, maximize=False
    )
    _zeros = ("square_avg",)
    _optional = (("momentum_buffer", "momentum"), ("grad_avg", "centered"))
    _ranges = MappingProxyType({**_RANGES, "rule_alpha": _AT_LEAST_0})

    def _move(self, grad: Tensor, state: RuleState, param: Tensor, s: Settings) -> tuple[Move, RuleState]:
        alpha = s["rule_alpha"]
        grad = _lower(grad, param, s)
        variance = _mean_square(state["square_avg"], grad, alpha)
        new = {"step": state["step"] + 1, "square_avg": variance}
        if s["centered"]:
            mean = new["grad_avg"] = _lerp(state["grad_avg"], grad, 1 - alpha)
            variance = torch.addcmul(variance, mean, mean, value=-1)
        direction = grad / (_root(variance) + s["eps"])
        if _is_on(s["momentum"]):
            direction = new["momentum_buffer"] = state["momentum_buffer"] * s["momentum"] + direction
        return Move(direction, s["lr"]), new


class Rprop(ParameterRule):
    """A step size per element, which grows while the gradient keeps its sign; its size does not matter.

    ``e = clip(e eta, *step_sizes)``, eta being `etas[1]`, `etas[0]` or 1 by the sign of ``g g_previous``, the first e
    `lr`; ``D = e sign(g)``, where g counts as 0 after a change of sign. This is piecewise constant in g, so that a
    hypergradient passes through `lr` and the initial parameters only.
    Reference: Riedmiller & Braun, A direct adaptive method for faster backpropagation learning, ICNN 1993.
    """

    defaults = _settings(lr=1e-2, etas=(0.5, 1.2), step_sizes=(1e-6, 50.0), maximize=False)
    _zeros = ("prev", "step_size")

    def validate(self, settings: Settings) -> None:
        """Check ranges, and that one eta shrinks and the other grows."""
        super().validate(settings)
        low, high = settings.get("etas", self.defaults["etas"])
        if not 0 < low < 1 < high:
            raise self._error("etas", "satisfy 0 < etas[0] < 1 < etas[1]", (low, high))

    def _move(self, grad: Tensor, state: RuleState, param: Tensor, s: Settings) -> tuple[Move, RuleState]:
        (shrink, grow), (smallest, largest) = s["etas"], s["step_sizes"]
        grad = -grad if s["maximize"] else grad
        agreement = grad * state["prev"]
        turned = agreement < 0
        eta = torch.ones_like(grad).masked_fill(agreement > 0, grow).masked_fill(turned, shrink)
        size = eta * _pick(state["step"] == 0, s["lr"], state["step_size"])
        size, grad = size.clamp(smallest, largest), grad.masked_fill(turned, 0.0)
        return Move(grad.sign() * size, 1.0), {"step": state["step"] + 1, "prev": grad, "step_size": size}


class Adagrad(ParameterRule):
    """Descent scaled by the root of the sum of all squared gradients.

    ``v = v + g^2``, ``D = lr / (1 + (t - 1) lr_decay) g / (sqrt(v) + eps)``.
    Reference: Duchi et al., Adaptive subgradient methods for online learning and stochastic optimization, JMLR 2011.
    """

    defaults = _settings(
        lr=1e-2, lr_decay=0.0, weight_decay=0.0, initial_accumulator_value=0.0, eps=1e-10, maximize=False
    )

    def _start(self, param: Tensor, s: Settings) -> RuleState:
        return {"step": 0, "sum": torch.full_like(param, s["initial_accumulator_value"])}

    def _move(self, grad: Tensor, state: RuleState, param: Tensor, s: Settings) -> tuple[Move, RuleState]:
        step = state["step"]
        grad = _lower(grad, param, s)
        total = torch.addcmul(state["sum"], grad, grad)
        rate = s["lr"] / (1 + step * s["lr_decay"])
        return Move(grad / (_root(total) + s["eps"]), rate), {"step": step + 1, "sum": total}


class Adadelta(ParameterRule):
    """Descent scaled by the ratio of the root mean squares of past steps and gradients.

    ``v = rho v + (1 - rho) g^2``, ``d = sqrt(a + eps) / sqrt(v + eps) g``, ``a = rho a + (1 - rho) d^2``, ``D = lr d``.
    Reference: Zeiler, ADADELTA: an adaptive learning rate method, arXiv:1212.5701, 2012.
    """

    defaults = _settings(lr=1.0, rho=0.9, eps=1e-6, weight_decay=0.0, maximize=False)
    _zeros = ("square_avg", "acc_delta")

    def _move(self, grad: Tensor, state: RuleState, param: Tensor, s: Settings) -> tuple[Move, RuleState]:
        grad = _lower(grad, param, s)
        square = _mean_square(state["square_avg"], grad, s["rho"])
        delta = _root(state["acc_delta"] + s["eps"]) / _root(square + s["eps"]) * grad
        past = _mean_square(state["acc_delta"], delta, s["rho"])
        return Move(delta, s["lr"]), {"step": state["step"] + 1, "square_avg": square, "acc_delta": past}


class ASGD(ParameterRule):
    """Descent at a decaying rate, beside which the iterates are averaged; `rule_alpha` is torch.optim's `alpha`.

    ``D = eta (g + lambd y)``, ``ax = ax + mu (y - D - ax)``, then ``eta = lr / (1 + lambd lr t)^rule_alpha`` and
    ``mu = 1 / max(1, t - t0)``. The average `ax` is kept in the state and does not act on the iterates.
    Reference: Polyak & Juditsky, Acceleration of stochastic approximation by averaging, SIAM J. Control Optim. 1992.
    """

    defaults = _settings(lr=1e-2, lambd=1e-4, rule_alpha=0.75, t0=1e6, weight_decay=0.0, maximize=False)
    _zeros = ("ax",)

    def _start(self, param: Tensor, s: Settings) -> RuleState:
        lr = s["lr"]
        eta = lr.detach().to(torch.float64, copy=True) if isinstance(lr, Tensor) else float(lr)
        return {**super()._start(param, s), "eta": eta, "mu": 1.0}

    def _move(self, grad: Tensor, state: RuleState, param: Tensor, s: Settings) -> tuple[Move, RuleState]:
        lr, step = s["lr"], state["step"] + 1
        grad = _lower(grad, param, s)
        eta = _pick(state["step"] == 0, lr, state["eta"])
        direction = _add(grad, param, s["lambd"])
        average = _lerp(state["ax"], _add(param, direction, -eta), state["mu"])
        eta_next = lr / (1 + s["lambd"] * lr * step) ** s["rule_alpha"]
        mu_next = 1 / _pick(step - s["t0"] > 1, step - s["t0"], 1.0)
        return Move(direction, eta), {"step": step, "ax": average, "eta": eta_next, "mu": mu_next}


class Adafactor(ParameterRule):
    """Adam without a mean, its second moment factored into rows and columns, and its step clipped and relative.

    ``R = RMS over each row of g, squared and averaged over time with the weight t^beta2_decay``, C the same of columns,
    ``U = g / max(sqrt(R C / max(mean R, eps1)), eps1)`` (a vector has a plain v in place of the quotient),
    ``D = max(eps2, RMS(y)) min(lr, 1/sqrt(t)) U / max(1, RMS(U) / d) + lr weight_decay y``.
    The derivative includes that of RMS(y) and of the clipping.
    Reference: Shazeer & Stern, Adafactor: adaptive learning rates with sublinear memory cost, ICML 2018.
    """

    defaults = _settings(lr=1e-2, beta2_decay=-0.8, eps=(None, 1e-3), d=1.0, weight_decay=0.0, maximize=False)
    elementwise = False

    def _start(self, param: Tensor, s: Settings) -> RuleState:
        if param.dim() < 2:
            return {"step": 0, "variance": torch.zeros_like(param)}
        *front, height, width = param.shape
        rows, columns = param.new_zeros(*front, height, 1), param.new_zeros(*front, 1, width)
        return {"step": 0, "row_var": rows, "col_var": columns}

    def _move(self, grad: Tensor, state: RuleState, param: Tensor, s: Settings) -> tuple[Move, RuleState]:
        (eps1, eps2), lr, step = s["eps"], s["lr"], state["step"] + 1
        eps1 = torch.finfo(param.dtype).eps if eps1 is None else eps1
        grad = -grad if s["maximize"] else grad
        weight, slowest = step ** s["beta2_decay"], step**-0.5
        size = _rms(param).clamp(min=eps2) * _pick(lr < slowest, lr, slowest)
        square, new = grad * grad, {"step": step}
        if grad.dim() < 2:
            variance = new["variance"] = _lerp(state["variance"], square, weight)
        else:
            rows = new["row_var"] = _lerp(state["row_var"], square.mean(-1, keepdim=True), weight)
            columns = new["col_var"] = _lerp(state["col_var"], square.mean(-2, keepdim=True), weight)
            variance = rows @ columns / rows.mean(-2, keepdim=True).clamp(min=eps1)
        unclipped = grad * variance.clamp(min=eps1 * eps1).rsqrt()
        displacement = unclipped * (size / (_rms(unclipped) / s["d"]).clamp(min=1.0))
        if _is_on(s["weight_decay"]):
            displacement = _add(displacement, param, lr * s["weight_decay"])
        return Move(displacement, 1.0), new


class FISTA(ParameterRule):
    """Accelerated (proximal) gradient descent: the gradient is taken at an extrapolated point.

    ``t_k = (1 + sqrt(1 + 4 t_{k-1}^2)) / 2`` with ``t_1 = 1``, ``z = y + ((t_{k-1} - 1) / t_k) (y - y_previous)``,
    ``D = y - z + lr g(z)``, so that ``prox(y - D) = prox(z - lr g(z))``. The rate is ``O(1 / k^2)`` on convex losses,
    for ``lr <= 1 / L``; not recommended with noisy gradients, whose errors accumulate.
    Reference: Beck & Teboulle, A fast iterative shrinkage-thresholding algorithm, SIAM J. Imaging Sci. 2009.
    """

    defaults = _settings(lr=1e-3, weight_decay=0.0, maximize=False)

    def point(self, params: Sequence[Tensor], state: Any, settings: Settings) -> Sequence[Tensor]:
        """Return the extrapolated points z."""
        return [self._extrapolate(y, s)[0].to(y.dtype) for y, s in zip(params, state, strict=True)]

    def _extrapolate(self, y: Tensor, state: RuleState) -> tuple[Tensor, Scalar]:
        before = state["t"]
        now = (1 + (1 + 4 * before * before) ** 0.5) / 2
        # 0 in the first step: there y_previous is a copy of y, and a weight would give z the wrong derivative.
        weight = _pick(before > 1, before - 1, 0.0) / now
        return _add(y, y - state["prev"], weight), now

    def _start(self, param: Tensor, s: Settings) -> RuleState:
        return {"prev": param.clone(), "t": 0.0}

    def _move(self, grad: Tensor, state: RuleState, param: Tensor, s: Settings) -> tuple[Move, RuleState]:
        z, t = self._extrapolate(param, state)
        displacement = _add(param - z, _lower(grad, z, s), s["lr"])
        return Move(displacement, 1.0), {"prev": param, "t": t}


class _Form(NamedTuple):
    """What the state of a transformation looks like for given parameters."""

    kind: str
    spec: pytree.TreeSpec
    types: list[torch.dtype | type]
    needs_graph: bool  # torchopt's `register_hook` takes only gradients that require grad


@dataclass(frozen=True)
class Transformation:
    """A torchopt transformation as a rule: ``D = -u``, u being what it makes of the gradients of one parameter group.

    Any object with ``init(params)`` and ``update(updates, state, params=, inplace=)`` will do, if it is a pure function
    whose state keeps its structure; both are tried out. The rate is the transformation's own, so that `lr` is left out
    (except for the step of a prox) and alpha > 0 needs an `upper_lr`. A parameter without a gradient stays, and so does
    its state. Derivatives are those of the transformation: torchopt's Adam has NaN at zero gradients, and its
    `clip_grad_norm` takes the norm as a constant.
    """

    transformation: Any
    _forms: dict[Any, _Form] = field(default_factory=dict, init=False, repr=False, compare=False)

    name: ClassVar[str] = "Transformation"
    defaults: ClassVar[Mapping[str, Any]] = _settings(lr=None)
    elementwise: ClassVar[bool] = False

    def __deepcopy__(self, memo: Any) -> Transformation:
        return self  # functions have nothing to copy; torchopt's chains fail at it

    def validate(self, settings: Settings) -> None:
        """Raise where `lr`, the step of a prox, is neither a number nor a tensor."""
        _PLAIN.validate({key: value for key, value in settings.items() if key != "lr" or value is not None})

    def init(self, params: Sequence[Tensor], settings: Settings) -> RuleState:
        """Return the leaves of the transformation's state, under the names of its parts."""
        leaves = pytree.tree_leaves(self.transformation.init(tuple(params)))
        return {self._form(params).kind: [_detached(leaf) for leaf in leaves]}

    def point(self, params: Sequence[Tensor], state: Any, settings: Settings) -> Sequence[Tensor]:
        """Return where the gradients are taken: at the parameters themselves."""
        return params

    def update(
        self, grads: Sequence[Tensor | None], state: Any, params: Sequence[Tensor], settings: Settings
    ) -> tuple[list[Move | None], RuleState]:
        """Return one move per parameter (None: it had no gradient and stays) and the new state."""
        form = self._form(params)
        leaves = state.get(form.kind)
        if leaves is None or len(leaves) != len(form.types):
            raise ValueError(f"the transformation's state is one of {form.kind}; got one of {', '.join(state)}.")
        before = [_restored(leaf, kind) for leaf, kind in zip(leaves, form.types, strict=True)]
        tracked = torch.is_grad_enabled()
        shown = tuple(grads)
        if form.needs_graph and not tracked:
            shown = tuple(None if g is None else g.detach().requires_grad_() for g in grads)
        with torch.set_grad_enabled(tracked or form.needs_graph):
            updates, after = self.transformation.update(
                shown, pytree.tree_unflatten(before, form.spec), params=tuple(params), inplace=False
            )
        new = [_kept(*entry) for entry in zip(pytree.tree_leaves(after), before, leaves, strict=True)]
        moves = [None if g is None or u is None else Move(u, -1.0) for g, u in zip(grads, updates, strict=True)]
        if not tracked:
            moves, new = detach((moves, new))
        return moves, {form.kind: new}

    def _form(self, params: Sequence[Tensor]) -> _Form:
        key = tuple((p.shape, p.dtype) for p in params)
        if key not in self._forms:
            state = self.transformation.init(tuple(params))
            leaves, spec = pytree.tree_flatten(state)
            types = [leaf.dtype if isinstance(leaf, Tensor) else type(leaf) for leaf in leaves]
            small = tuple(torch.zeros([min(size, 1) for size in shape], dtype=dtype) for shape, dtype in key)
            with torch.random.fork_rng(devices=[]):
                needs_graph = self._needs_graph(small)
            self._forms[key] = _Form("+".join(_parts(state)) or "no state", spec, types, needs_graph)
        return self._forms[key]

    def _needs_graph(self, params: tuple[Tensor, ...]) -> bool:
        """Update twice from the same state, and return whether the gradients must require grad.

        torchopt's momentum remembers its first call, and treats that differently: this one is over before it matters.
        """
        state = self.transformation.init(params)

        def call(graph: bool) -> Any:
            torch.manual_seed(0)
            grads = tuple(torch.ones_like(p).requires_grad_(graph) for p in params)
            with torch.set_grad_enabled(graph):
                result = self.transformation.update(grads, state, params=params, inplace=False)
            return pytree.tree_map(_detached, result)

        needs_graph = False
        try:
            first = call(False)
        except RuntimeError:
            needs_graph, first = True, call(True)
        second = call(needs_graph)
        if pytree.tree_structure(first[1]) != pytree.tree_structure(state):
            raise ValueError("a transformation's state must keep its structure; got another after an update.")
        pairs = zip(pytree.tree_leaves(first), pytree.tree_leaves(second), strict=True)
        if not all(torch.equal(a, b) for a, b in pairs if isinstance(a, Tensor) and not a.isnan().any()):
            raise ValueError(
                "a transformation must be a pure function, for a rollout to be replayed; got two results for the same "
                "arguments, as of torchopt's momentum with dampening. Use `rule=torch.optim.SGD` and its `dampening=`."
            )
        return needs_graph


def _parts(state: Any) -> list[str]:
    """The names of the named tuples of a state that hold anything."""
    if not isinstance(state, tuple | list) or not state:
        return []
    own = [type(state).__name__] if hasattr(state, "_fields") else []
    return own + [part for entry in state for part in _parts(entry)]


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _restored(leaf: Any, kind: torch.dtype | type) -> Any:
    """Bring a leaf back to its type: loading a state_dict casts counts to the parameters' dtype."""
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.to(kind) if isinstance(kind, torch.dtype) else kind(leaf)


def _kept(leaf: Any, before: Any, given: Any) -> Any:
    """A leaf of the new state; a number that was given as a tensor stays one.

    torchopt puts None into the state of a parameter without a gradient, and never moves it again: keep what was there.
    """
    leaf = before if leaf is None else leaf
    return leaf if isinstance(leaf, Tensor) or not isinstance(given, Tensor) else torch.full_like(given, leaf)


_PLAIN = SGD()

_RULES: Mapping[Any, ParameterRule] = {
    getattr(torch.optim, rule.__name__): rule()
    for rule in (SGD, Adam, AdamW, Adamax, NAdam, RAdam, RMSprop, Rprop, Adagrad, Adadelta, ASGD, Adafactor)
    if hasattr(torch.optim, rule.__name__)  # a torch older than 2.5 has no Adafactor
}
_REFUSED: Mapping[str, str] = {
    "LBFGS": "a line search and several evaluations per step have no derivative here. Use `bda_optim.FISTA`",
    "SparseAdam": "sparse gradients are not differentiable. Use `torch.optim.Adam` and dense gradients",
    "Muon": "it iterates in bfloat16, where a derivative means nothing. Use `torch.optim.AdamW`",
}
_PROTOCOL = ("name", "defaults", "elementwise", "validate", "init", "point", "update")


def resolve(rule: Any) -> Rule:
    """Return the update rule that is meant.

    Args:
        rule: None (SGD), a class of torch.optim, a rule class such as `FISTA`, an object with the methods of a rule, or
            a torchopt transformation such as ``torchopt.adam(lr=0.1)``.

    Raises:
        ValueError: It is a class of torch.optim without a meaningful derivative.
        TypeError: It is none of the above.

    Example:
        >>> resolve(torch.optim.Adam)
        Adam()
    """
    known = ", ".join(sorted(own.name for own in _RULES.values()))
    if isinstance(rule, torch.optim.Optimizer):
        kind = type(rule).__name__
        raise TypeError(f"`rule` must be a class, not an optimizer; got an instance of {kind}. Pass the class.")
    if isinstance(rule, type) and issubclass(rule, torch.optim.Optimizer):
        name, full_name = rule.__name__, f"{rule.__module__}.{rule.__qualname__}"
        if rule in _RULES:
            return _RULES[rule]
        if name in _REFUSED and rule is getattr(torch.optim, name, None):
            raise ValueError(f"`rule` must be differentiable; got torch.optim.{name}: {_REFUSED[name]}.")
        raise TypeError(
            f"`rule` must be a class of torch.optim itself; got {full_name}, whose `step` cannot be honoured. "
            f"Use {known}, or an object with {', '.join(_PROTOCOL)}."
        )
    found: Any = SGD if rule is None else rule
    if not isinstance(rule, type) and hasattr(rule, "init") and hasattr(rule, "update") and not hasattr(rule, "point"):
        return Transformation(rule)
    if not all(hasattr(found, part) for part in _PROTOCOL):
        raise TypeError(
            f"`rule` must have {', '.join(_PROTOCOL)}; got {rule!r}. Use a class of torch.optim: {known}; or a "
            "torchopt transformation, such as `torchopt.adam(lr=0.1)`."
        )
    resolved: Rule = found() if isinstance(found, type) else found
    return resolved
