"""The interface of `torchopt` on this library's engine, and BDA in it.

A script written for `torchopt` runs after one change: ``import bda_optim.compat.torchopt as torchopt``. The
Meta-optimizers (`MetaSGD`, `MetaAdam`, ..., `MetaOptimizer`) are this library's: they have torchopt's signatures and
numbers, and are right where torchopt is not (zero gradients, tied weights, frozen parameters, parameters that a loss
does not use). Everything else is the installed torchopt's; its `extract_state_dict`, `recover_state_dict`,
`stop_gradient` and `module_clone` accept both kinds.

BDA is the transformation `bda(...)`; `FuncBDA` and `MetaBDA` give it both gradients. A torchopt update carries one tree
of gradients, here that of the lower loss; the upper gradients travel in the state, so that they also pass through a
`torchopt.chain`:

- By hand: ``transformation.update(lower_grads, state, params=params, upper_updates=upper_grads)``.
- By hand, in a chain: ``chain.update(lower_grads, with_upper(state, upper_grads), params=params)``.
- With a functional optimizer: ``FuncBDA(transformation).step(lower_loss, params, upper_loss=upper_loss)``.
- With a meta-optimizer: ``MetaBDA(module, transformation).step(lower_loss, upper_loss)``.
- With alpha = 0 there are none, and torchopt's own `FuncOptimizer`, `MetaOptimizer` and `Optimizer` suffice.

What stands before `bda` in a chain sees the lower gradients only, what stands after it the whole aggregated step. Like
`torchopt.sgd`, `bda` contains the rates and the sign: what it returns is added to the parameters.

The other direction needs nothing of this module: ``BDAInnerOptimizer(params, rule=torchopt.adam(lr=0.1))``, `rollout`
and `hypergradient` take any torchopt transformation as `rule=`, under every adjoint.

>>> import torch
>>> import bda_optim.compat.torchopt as torchopt
>>> net = torch.nn.Linear(2, 1)
>>> optimizer = torchopt.MetaAdam(net, lr=0.1)
>>> start = torchopt.extract_state_dict(net), torchopt.extract_state_dict(optimizer)
>>> for _ in range(3):
...     optimizer.step(net(torch.ones(2)).square().sum())
>>> net(torch.zeros(2)).sum().backward()
>>> torchopt.recover_state_dict(net, start[0])
>>> torchopt.recover_state_dict(optimizer, start[1])
>>> net.bias.grad is not None
True
"""

from __future__ import annotations

from typing import Any

try:
    import torchopt
except ImportError as error:
    raise ImportError(
        "`bda_optim.compat.torchopt` needs torchopt, which cannot be imported. Install `bda_optim[torchopt]`."
    ) from error

from ._bda import BDAState, bda, with_upper
from ._meta import FuncBDA, MetaBDA, MetaOptimizer
from ._optimizers import (
    MetaAdaDelta,
    MetaAdadelta,
    MetaAdaGrad,
    MetaAdagrad,
    MetaAdam,
    MetaAdaMax,
    MetaAdamax,
    MetaAdamW,
    MetaRAdam,
    MetaRMSProp,
    MetaRMSprop,
    MetaSGD,
)

__all__ = [
    "BDAState",
    "FuncBDA",
    "MetaAdaDelta",
    "MetaAdaGrad",
    "MetaAdaMax",
    "MetaAdadelta",
    "MetaAdagrad",
    "MetaAdam",
    "MetaAdamW",
    "MetaAdamax",
    "MetaBDA",
    "MetaOptimizer",
    "MetaRAdam",
    "MetaRMSProp",
    "MetaRMSprop",
    "MetaSGD",
    "bda",
    "with_upper",
]
__all__ += torchopt.__all__


def __getattr__(name: str) -> Any:
    """Return what the installed torchopt has under a name."""
    return getattr(torchopt, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *dir(torchopt)})
