"""Rules outside Adam's family that adapt the rate of each element, or let it decay."""

from __future__ import annotations

from types import MappingProxyType

import torch
from torch import Tensor

from ..._support.types import Move, RuleState, Settings
from .arithmetic import add, descent, is_on, lerp, mean_square, pick, rms, root
from .base import AT_LEAST_0, RANGES, ParameterRule, read_only


class RMSprop(ParameterRule):
    """Descent scaled by the root mean square of the gradient; `rule_alpha` is torch.optim's `alpha`.

    ``v = rule_alpha v + (1 - rule_alpha) g^2``, centered: minus the square of the mean gradient;
    ``b = momentum b + g / (sqrt(v) + eps)``, ``D = lr b``.
    References: Tieleman & Hinton, Lecture 6.5, 2012; Graves, Generating sequences with recurrent neural networks, 2013.
    """

    defaults = read_only(
        lr=1e-2, rule_alpha=0.99, eps=1e-8, weight_decay=0.0, momentum=0.0, centered=False, maximize=False
    )
    _zeros = ("square_avg",)
    _optional = (("momentum_buffer", "momentum"), ("grad_avg", "centered"))
    _ranges = MappingProxyType({**RANGES, "rule_alpha": AT_LEAST_0})

    def _move(self, grad: Tensor, state: RuleState, param: Tensor, s: Settings) -> tuple[Move, RuleState]:
        alpha = s["rule_alpha"]
        grad = descent(grad, param, s)
        variance = mean_square(state["square_avg"], grad, alpha)
        new = {"step": state["step"] + 1, "square_avg": variance}
        if s["centered"]:
            mean = new["grad_avg"] = lerp(state["grad_avg"], grad, 1 - alpha)
            variance = torch.addcmul(variance, mean, mean, value=-1)
        direction = grad / (root(variance) + s["eps"])
        if is_on(s["momentum"]):
            direction = new["momentum_buffer"] = state["momentum_buffer"] * s["momentum"] + direction
        return Move(direction, s["lr"]), new


class Rprop(ParameterRule):
    """Steps by the sign of the gradient, with a step size per element that grows while the sign stays.

    ``e = clip(e eta, *step_sizes)`` with eta equal to `etas[1]`, `etas[0]` or 1 by the sign of ``g g_previous``, and
    `lr` as the first e; ``D = e sign(g)``, where g counts as 0 after a change of sign. This is piecewise constant in g,
    so a hypergradient passes through `lr` and the initial parameters only.
    Reference: Riedmiller & Braun, A direct adaptive method for faster backpropagation learning, ICNN 1993.
    """

    defaults = read_only(lr=1e-2, etas=(0.5, 1.2), step_sizes=(1e-6, 50.0), maximize=False)
    _zeros = ("prev", "step_size")

    def validate(self, settings: Settings) -> None:
        """Check the ranges, and that one eta shrinks and the other grows."""
        super().validate(settings)
        low, high = settings.get("etas", self.defaults["etas"])
        if not 0 < low < 1 < high:
            raise self._error("etas", "satisfy 0 < etas[0] < 1 < etas[1]", (low, high))

    def _move(self, grad: Tensor, state: RuleState, param: Tensor, s: Settings) -> tuple[Move, RuleState]:
        shrink, grow = s["etas"]
        grad = -grad if s["maximize"] else grad
        agreement = grad * state["prev"]
        turned = agreement < 0
        eta = torch.ones_like(grad).masked_fill(agreement > 0, grow).masked_fill(turned, shrink)
        size = (eta * pick(state["step"] == 0, s["lr"], state["step_size"])).clamp(*s["step_sizes"])
        grad = grad.masked_fill(turned, 0.0)
        return Move(grad.sign() * size, 1.0), {"step": state["step"] + 1, "prev": grad, "step_size": size}


class Adagrad(ParameterRule):
    """Descent scaled by the root of the sum of all squared gradients.

    ``v = v + g^2``, ``D = lr / (1 + (t - 1) lr_decay) g / (sqrt(v) + eps)``.
    Reference: Duchi et al., Adaptive subgradient methods for online learning and stochastic optimization, JMLR 2011.
    """

    defaults = read_only(
        lr=1e-2, lr_decay=0.0, weight_decay=0.0, initial_accumulator_value=0.0, eps=1e-10, maximize=False
    )

    def _start(self, param: Tensor, s: Settings) -> RuleState:
        return {"step": 0, "sum": torch.full_like(param, s["initial_accumulator_value"])}

    def _move(self, grad: Tensor, state: RuleState, param: Tensor, s: Settings) -> tuple[Move, RuleState]:
        step = state["step"]
        grad = descent(grad, param, s)
        total = torch.addcmul(state["sum"], grad, grad)
        rate = s["lr"] / (1 + step * s["lr_decay"])
        return Move(grad / (root(total) + s["eps"]), rate), {"step": step + 1, "sum": total}


class Adadelta(ParameterRule):
    """Descent scaled by the ratio of the root mean squares of past steps and gradients.

    ``v = rho v + (1 - rho) g^2``, ``d = sqrt(a + eps) / sqrt(v + eps) g``, ``a = rho a + (1 - rho) d^2``, ``D = lr d``.
    Reference: Zeiler, ADADELTA: an adaptive learning rate method, arXiv:1212.5701, 2012.
    """

    defaults = read_only(lr=1.0, rho=0.9, eps=1e-6, weight_decay=0.0, maximize=False)
    _zeros = ("square_avg", "acc_delta")

    def _move(self, grad: Tensor, state: RuleState, param: Tensor, s: Settings) -> tuple[Move, RuleState]:
        grad = descent(grad, param, s)
        square = mean_square(state["square_avg"], grad, s["rho"])
        delta = root(state["acc_delta"] + s["eps"]) / root(square + s["eps"]) * grad
        past = mean_square(state["acc_delta"], delta, s["rho"])
        return Move(delta, s["lr"]), {"step": state["step"] + 1, "square_avg": square, "acc_delta": past}


class ASGD(ParameterRule):
    """Descent at a decaying rate, with an average of the iterates; `rule_alpha` is torch.optim's `alpha`.

    ``D = eta (g + lambd y)``, ``ax = ax + mu (y - D - ax)``, then ``eta = lr / (1 + lambd lr t)^rule_alpha`` and
    ``mu = 1 / max(1, t - t0)``. The average `ax` is kept in the state and does not act on the iterates.
    Reference: Polyak & Juditsky, Acceleration of stochastic approximation by averaging, SIAM J. Control Optim. 1992.
    """

    defaults = read_only(lr=1e-2, lambd=1e-4, rule_alpha=0.75, t0=1e6, weight_decay=0.0, maximize=False)
    _zeros = ("ax",)
    _ranges = MappingProxyType({**RANGES, "lambd": AT_LEAST_0, "rule_alpha": AT_LEAST_0})  # as in torch since 2.15

    def _start(self, param: Tensor, s: Settings) -> RuleState:
        lr = s["lr"]
        eta = lr.detach().to(torch.float64, copy=True) if isinstance(lr, Tensor) else float(lr)
        return {**super()._start(param, s), "eta": eta, "mu": 1.0}

    def _move(self, grad: Tensor, state: RuleState, param: Tensor, s: Settings) -> tuple[Move, RuleState]:
        lr = s["lr"]
        step = state["step"] + 1
        grad = descent(grad, param, s)
        eta = pick(state["step"] == 0, lr, state["eta"])
        direction = add(grad, param, s["lambd"])
        average = lerp(state["ax"], add(param, direction, -eta), state["mu"])
        eta_next = lr / (1 + s["lambd"] * lr * step) ** s["rule_alpha"]
        mu_next = 1 / pick(step - s["t0"] > 1, step - s["t0"], 1.0)
        return Move(direction, eta), {"step": step, "ax": average, "eta": eta_next, "mu": mu_next}


class Adafactor(ParameterRule):
    """Adam without a mean: the second moment is factored into rows and columns, the step relative and clipped.

    R is the mean of g^2 over each row, averaged over time with the weight ``t^beta2_decay``, C the same over columns,
    ``U = g / max(sqrt(R C / max(mean R, eps1)), eps1)`` (a vector has a plain v in place of the quotient),
    ``D = max(eps2, RMS(y)) min(lr, 1/sqrt(t)) U / max(1, RMS(U) / d) + lr weight_decay y``.
    The derivative includes that of RMS(y) and of the clipping.
    Reference: Shazeer & Stern, Adafactor: adaptive learning rates with sublinear memory cost, ICML 2018.
    """

    defaults = read_only(lr=1e-2, beta2_decay=-0.8, eps=(None, 1e-3), d=1.0, weight_decay=0.0, maximize=False)
    elementwise = False

    def _start(self, param: Tensor, s: Settings) -> RuleState:
        if param.dim() < 2:
            return {"step": 0, "variance": torch.zeros_like(param)}
        *front, height, width = param.shape
        rows = param.new_zeros(*front, height, 1)
        return {"step": 0, "row_var": rows, "col_var": param.new_zeros(*front, 1, width)}

    def _move(self, grad: Tensor, state: RuleState, param: Tensor, s: Settings) -> tuple[Move, RuleState]:
        eps1, eps2 = s["eps"]
        lr = s["lr"]
        step = state["step"] + 1
        eps1 = torch.finfo(param.dtype).eps if eps1 is None else eps1
        grad = -grad if s["maximize"] else grad
        weight = step ** s["beta2_decay"]
        slowest = step**-0.5
        size = rms(param).clamp(min=eps2) * pick(lr < slowest, lr, slowest)
        square = grad * grad
        new = {"step": step}
        if grad.dim() < 2:
            variance = new["variance"] = lerp(state["variance"], square, weight)
        else:
            rows = new["row_var"] = lerp(state["row_var"], square.mean(-1, keepdim=True), weight)
            columns = new["col_var"] = lerp(state["col_var"], square.mean(-2, keepdim=True), weight)
            variance = rows @ columns / rows.mean(-2, keepdim=True).clamp(min=eps1)
        unclipped = grad * variance.clamp(min=eps1 * eps1).rsqrt()
        displacement = unclipped * (size / (rms(unclipped) / s["d"]).clamp(min=1.0))
        if is_on(s["weight_decay"]):
            displacement = add(displacement, param, lr * s["weight_decay"])
        return Move(displacement, 1.0), new
