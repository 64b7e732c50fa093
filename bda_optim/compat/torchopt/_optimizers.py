"""torchopt's Meta-optimizers, with its signatures, on the update rules of this library.

Where torchopt has a setting that these rules do not know (`eps_root`, `initial_scale`, RMSProp's `nesterov`),
torchopt's own transformation takes the steps. `use_accelerated_op` chooses how torchopt computes a step and not what:
it is accepted, and makes no difference. (With torchopt 0.7.3 it does: the derivative of its accelerated Adam is wrong,
by 0.8 % in `tests/test_compat_torchopt_meta.py`.)
"""

from __future__ import annotations

from typing import Any

import torchopt
from torch import nn, optim

from bda_optim._step.rules.resolve import resolve
from bda_optim._step.settings import complete

from ._bda import transformation
from ._meta import MetaOptimizer


class MetaSGD(MetaOptimizer):
    """torchopt's `MetaSGD`: gradient descent with momentum."""

    def __init__(
        self,
        module: nn.Module,
        lr: Any,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        dampening: float = 0.0,
        nesterov: bool = False,
        moment_requires_grad: bool = True,
        maximize: bool = False,
    ) -> None:
        """Take torchopt's arguments."""
        settings = dict(momentum=momentum, weight_decay=weight_decay, dampening=dampening, nesterov=nesterov)
        super().__init__(module, _of_rule(optim.SGD, moment_requires_grad, lr=lr, maximize=maximize, **settings))


class MetaAdam(MetaOptimizer):
    """torchopt's `MetaAdam`; its derivative is finite also where a gradient is 0."""

    def __init__(
        self,
        module: nn.Module,
        lr: Any = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        eps_root: float = 0.0,
        moment_requires_grad: bool = True,
        maximize: bool = False,
        use_accelerated_op: bool = False,
    ) -> None:
        """Take torchopt's arguments."""
        settings = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, maximize=maximize)
        if eps_root:
            impl = torchopt.adam(**settings, eps_root=eps_root, moment_requires_grad=moment_requires_grad)
        else:
            impl = _of_rule(optim.Adam, moment_requires_grad, **settings)
        super().__init__(module, impl)


class MetaAdamW(MetaOptimizer):
    """torchopt's `MetaAdamW`: Adam with decoupled weight decay."""

    def __init__(
        self,
        module: nn.Module,
        lr: Any = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        eps_root: float = 0.0,
        mask: Any = None,
        moment_requires_grad: bool = False,
        maximize: bool = False,
        use_accelerated_op: bool = False,
    ) -> None:
        """Take torchopt's arguments."""
        if mask is not None:
            raise NotImplementedError(
                "`mask` fails in torchopt 0.7.3 and is not available here; got one. Use `bda_optim.BDAInnerOptimizer` "
                "with `rule=torch.optim.AdamW` and a `weight_decay` per parameter group."
            )
        settings = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, maximize=maximize)
        if eps_root:
            impl = torchopt.adamw(**settings, eps_root=eps_root, moment_requires_grad=moment_requires_grad)
        else:
            impl = _of_rule(optim.AdamW, moment_requires_grad, **settings)
        super().__init__(module, impl)


class MetaAdaMax(MetaOptimizer):
    """torchopt's `MetaAdaMax`: Adam with the infinity norm."""

    def __init__(
        self,
        module: nn.Module,
        lr: Any = 2e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        moment_requires_grad: bool = True,
    ) -> None:
        """Take torchopt's arguments."""
        settings = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        super().__init__(module, _of_rule(optim.Adamax, moment_requires_grad, **settings))


class MetaRAdam(MetaOptimizer):
    """torchopt's `MetaRAdam`: Adam with a rectified variance."""

    def __init__(
        self,
        module: nn.Module,
        lr: Any = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        moment_requires_grad: bool = True,
    ) -> None:
        """Take torchopt's arguments."""
        settings = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        super().__init__(module, _of_rule(optim.RAdam, moment_requires_grad, **settings))


class MetaAdaDelta(MetaOptimizer):
    """torchopt's `MetaAdaDelta`."""

    def __init__(
        self,
        module: nn.Module,
        lr: Any = 1.0,
        rho: float = 0.9,
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        *,
        moment_requires_grad: bool = True,
    ) -> None:
        """Take torchopt's arguments."""
        settings = dict(lr=lr, rho=rho, eps=eps, weight_decay=weight_decay)
        super().__init__(module, _of_rule(optim.Adadelta, moment_requires_grad, **settings))


class MetaAdaGrad(MetaOptimizer):
    """torchopt's `MetaAdaGrad`; its derivative is finite also where a gradient is 0."""

    def __init__(
        self,
        module: nn.Module,
        lr: Any = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        *,
        maximize: bool = False,
    ) -> None:
        """Take torchopt's arguments."""
        settings = dict(lr=lr, lr_decay=lr_decay, weight_decay=weight_decay, eps=eps, maximize=maximize)
        settings["initial_accumulator_value"] = initial_accumulator_value
        super().__init__(module, _of_rule(optim.Adagrad, False, **settings))


class MetaRMSProp(MetaOptimizer):
    """torchopt's `MetaRMSProp`; its derivative is finite also where a gradient is 0."""

    def __init__(
        self,
        module: nn.Module,
        lr: Any = 1e-2,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        momentum: float = 0.0,
        centered: bool = False,
        *,
        initial_scale: float = 0.0,
        nesterov: bool = False,
        maximize: bool = False,
    ) -> None:
        """Take torchopt's arguments."""
        settings: dict[str, Any] = dict(lr=lr, eps=eps, weight_decay=weight_decay, momentum=momentum, centered=centered)
        if initial_scale or nesterov:
            more: dict[str, Any] = dict(alpha=alpha, initial_scale=initial_scale, nesterov=nesterov, maximize=maximize)
            impl = torchopt.rmsprop(**settings, **more)
        else:
            impl = _of_rule(optim.RMSprop, False, rule_alpha=alpha, maximize=maximize, **settings)
        super().__init__(module, impl)


MetaAdamax = MetaAdaMax
MetaAdadelta = MetaAdaDelta
MetaAdagrad = MetaAdaGrad
MetaRMSprop = MetaRMSProp


def _of_rule(kind: Any, moment_requires_grad: bool, **settings: Any) -> Any:
    """Return the rule of a class of torch.optim as a torchopt transformation."""
    rule = resolve(kind)
    return transformation(rule, complete(rule, settings), moment_requires_grad=moment_requires_grad)
