"""Adam and its variants."""

from __future__ import annotations

import torch
from torch import Tensor

from ..._support.types import Move, RuleState, Settings
from .arithmetic import decoupled, descent, lerp, moments, pick, power, root
from .base import ParameterRule, read_only


class Adam(ParameterRule):
    """Descent scaled by the moments of the gradient, with their bias corrected.

    ``m = b1 m + (1 - b1) g``, ``v = b2 v + (1 - b2) g^2``,
    ``D = lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)``; `amsgrad` replaces v by the largest v so far.
    References: Kingma & Ba, Adam, ICLR 2015; Reddi et al., On the convergence of Adam and beyond, ICLR 2018.
    """

    defaults = read_only(
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
        new = moments(descent(grad, param, s), state, s["betas"])
        square = new["exp_avg_sq"]
        if s["amsgrad"]:
            square = new["max_exp_avg_sq"] = torch.maximum(state["max_exp_avg_sq"], square)
        c1, c2 = (1 - power(beta, new["step"]) for beta in s["betas"])
        direction = new["exp_avg"] / (root(square) * (c1 / c2**0.5) + c1 * s["eps"])
        return decoupled(direction, param, s), new


class AdamW(Adam):
    """Adam with decoupled weight decay: ``D = D_Adam + lr weight_decay y``.

    Reference: Loshchilov & Hutter, Decoupled weight decay regularization, ICLR 2019.
    """

    defaults = read_only(lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2, amsgrad=False, maximize=False)

    def _move(self, grad: Tensor, state: RuleState, param: Tensor, s: Settings) -> tuple[Move, RuleState]:
        return super()._move(grad, state, param, {**s, "decoupled_weight_decay": True})


class Adamax(ParameterRule):
    """Adam with the infinity norm of the past gradients.

    ``m = b1 m + (1 - b1) g``, ``u = max(b2 u, |g| + eps)``, ``D = lr m / ((1 - b1^t) u)``.
    Reference: Kingma & Ba, Adam, section 7.1, ICLR 2015.
    """

    defaults = read_only(lr=2e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, maximize=False)
    _zeros = ("exp_avg", "exp_inf")

    def _move(self, grad: Tensor, state: RuleState, param: Tensor, s: Settings) -> tuple[Move, RuleState]:
        beta1, beta2 = s["betas"]
        step = state["step"] + 1
        grad = descent(grad, param, s)
        mean = lerp(state["exp_avg"], grad, 1 - beta1)
        norm = torch.maximum(beta2 * state["exp_inf"], grad.abs() + s["eps"])
        direction = mean / (norm * (1 - power(beta1, step)))
        return Move(direction, s["lr"]), {"step": step, "exp_avg": mean, "exp_inf": norm}


class NAdam(ParameterRule):
    """Adam with Nesterov's momentum.

    ``mu_t = b1 (1 - 0.96^(t momentum_decay) / 2)``, m and v as in Adam, ``P_t = mu_1 ... mu_t``,
    ``D = lr [(1 - mu_t) g / (1 - P_t) + mu_{t+1} m / (1 - P_{t+1})] / (sqrt(v / (1 - b2^t)) + eps)``.
    Reference: Dozat, Incorporating Nesterov momentum into Adam, ICLR workshop 2016.
    """

    defaults = read_only(
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
        beta1, beta2 = s["betas"]
        decay = s["momentum_decay"]
        grad = descent(grad, param, s)
        new = moments(grad, state, s["betas"])
        mu, mu_next = (beta1 * (1 - 0.5 * 0.96 ** (t * decay)) for t in (new["step"], new["step"] + 1))
        product = new["mu_product"] = state["mu_product"] * mu
        ahead = grad * ((1 - mu) / (1 - product)) + new["exp_avg"] * (mu_next / (1 - product * mu_next))
        direction = ahead / (root(new["exp_avg_sq"]) / (1 - power(beta2, new["step"])) ** 0.5 + s["eps"])
        return decoupled(direction, param, s), new


class RAdam(ParameterRule):
    """Adam that is not adaptive until the variance of its step has settled.

    ``rho_inf = 2 / (1 - b2) - 1``, ``rho = rho_inf - 2 t b2^t / (1 - b2^t)``, ``D = lr (m / (1 - b1^t)) l`` with
    ``l = sqrt((rho-4)(rho-2) rho_inf / ((rho_inf-4)(rho_inf-2) rho)) sqrt(1 - b2^t) / (sqrt(v) + eps)`` once rho > 5,
    and ``l = 1`` before.
    Reference: Liu et al., On the variance of the adaptive learning rate and beyond, ICLR 2020.
    """

    defaults = read_only(
        lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, decoupled_weight_decay=False, maximize=False
    )
    _zeros = ("exp_avg", "exp_avg_sq")

    def _move(self, grad: Tensor, state: RuleState, param: Tensor, s: Settings) -> tuple[Move, RuleState]:
        new = moments(descent(grad, param, s), state, s["betas"])
        power1, power2 = (power(beta, new["step"]) for beta in s["betas"])
        limit = 2 / (1 - s["betas"][1]) - 1
        length = limit - 2 * new["step"] * power2 / (1 - power2)
        settled = length > 5
        # Until then 6 takes its place: were the square root of the unused branch NaN, so would be its derivative.
        limit = pick(settled, limit, 6.0)
        length = pick(settled, length, 6.0)
        rectifier = ((length - 4) * (length - 2) * limit / ((limit - 4) * (limit - 2) * length)) ** 0.5
        factor = pick(settled, rectifier * (1 - power2) ** 0.5 / (root(new["exp_avg_sq"]) + s["eps"]), 1.0)
        return decoupled(new["exp_avg"] / (1 - power1) * factor, param, s), new
