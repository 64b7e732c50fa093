"""The public interface of `higher`, on this library's engine: ``import bda_optim.compat.higher as higher``.

A script written for `higher` runs with this import changed and nothing else, and gives the same numbers; where `higher`
departs from today's torch.optim it gives torch.optim's. `higher` itself need not be installed.

What is different:

- ``fmodel.parameters(time=t)`` gives the weights after each update until the graph is cut, by `update_params` with
  detached weights: those between the first and the cut are dropped. ``keep_history=True`` keeps all.
- Forward hooks run; a patched module can be copied and pickled, and is freed without the garbage collector.
- `innerloop_ctx` warns on leaving if the loop diverged.
- Added: ``first_order=True``; `diffopt.accumulate` for micro-batches; `diffopt.state_dict` in the middle of a loop, in
  the form that the optimizer loads; learning-rate schedulers on a diffopt; for a `BDAInnerOptimizer`
  ``diffopt.step(lower, upper_loss=upper)``.

`register` is for scripts that keep the real `higher`: it makes that one accept a `BDAInnerOptimizer`.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from bda_optim._support.checks import check_ambient

from . import optim, patch, utils
from ._override import Override
from ._register import register
from .optim import (
    DifferentiableOptimizer,
    apply_trainable_opt_params,
    create_diff_optim,
    get_diff_optim,
    get_trainable_opt_params,
    register_optim,
)
from .patch import Device, FunctionalModule, make_functional, monkeypatch

__all__ = [
    "apply_trainable_opt_params",
    "create_diff_optim",
    "get_diff_optim",
    "get_trainable_opt_params",
    "innerloop_ctx",
    "make_functional",
    "monkeypatch",
    "optim",
    "patch",
    "register",
    "register_optim",
    "utils",
]


@contextlib.contextmanager
def innerloop_ctx(
    model: nn.Module,
    opt: Optimizer,
    device: Device = None,
    copy_initial_weights: bool = True,
    override: Override | None = None,
    track_higher_grads: bool = True,
    *,
    first_order: bool = False,
    keep_history: bool | None = None,
) -> Iterator[tuple[FunctionalModule, DifferentiableOptimizer]]:
    """Open an inner loop on a patched version of `model`; the model and the optimizer are not touched.

    Args:
        model: The module.
        opt: A `BDAInnerOptimizer`, an optimizer of torch.optim, or one of a class given to `register_optim`. Its live
            state (momentum, moments, settings of each group) is copied.
        device: The device of the loop; by default that of the module.
        copy_initial_weights: Whether the first weights are constants; if False gradients reach the module's parameters.
        override: Settings to use instead of the optimizer's: name to a value, or to a list with one per group; tensors
            that require grad are learned.
        track_higher_grads: Whether steps can be differentiated; False for adaptation at test time.
        first_order: Whether the inner gradients count as constants (first-order MAML).
        keep_history: Whether ``fmodel.parameters(time=t)`` reaches the weights of every step: True for all, False for
            the first and the last only, None for those since the graph was last cut (with `first_order`, whose graph
            holds no weights, as False).

    Yields:
        The patched module and the differentiable optimizer.

    >>> model = nn.Linear(1, 1)
    >>> opt = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with innerloop_ctx(model, opt, copy_initial_weights=False) as (fmodel, diffopt):
    ...     for _ in range(3):
    ...         _ = diffopt.step((fmodel(torch.ones(1)) - 1).square().sum())
    ...     (fmodel(torch.ones(1)) - 2).square().sum().backward()
    >>> model.weight.grad is not None
    True
    """
    check_ambient()
    if first_order and keep_history is None:
        keep_history = False
    fmodel = monkeypatch(
        model, device, copy_initial_weights=copy_initial_weights, track_higher_grads=track_higher_grads,
        keep_history=keep_history,
    )  # fmt: skip
    more = {"first_order": True} if first_order else {}  # a class of the user's may not accept it
    diffopt = get_diff_optim(
        opt, model.parameters(), fmodel=fmodel, device=device, override=override,
        track_higher_grads=track_higher_grads, **more,
    )  # fmt: skip
    yield fmodel, diffopt
    if not _finite(list(fmodel.parameters())):
        warnings.warn(
            "the inner loop diverged: its last weights are not finite. Lower `lr`, or look for log(0) in the loss.",
            RuntimeWarning,
            stacklevel=3,
        )


@torch.no_grad()
def _finite(weights: list[Tensor]) -> bool:
    """Whether all weights are finite; one value is read, whatever their number."""
    checked = [p for p in weights if p.numel() and not p.is_meta and (p.is_floating_point() or p.is_complex())]
    largest = [torch.linalg.vector_norm(p, torch.inf).to(checked[0].device) for p in checked]
    return not largest or bool(torch.isfinite(torch.stack(largest)).all())
