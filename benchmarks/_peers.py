"""Contestants from libraries for special cases: BOAT, which has BDA, and learn2learn, which has MAML.

Neither belongs to an extra of this package. BOAT pins other versions of its dependencies: `pip install --no-deps
boat-torch`. The C sources of learn2learn 0.2.0 are older than Python 3.11, so its Cython files have to be compiled anew
(`cython -3 learn2learn/data/*.pyx` in its source distribution, then `pip install --no-deps --no-build-isolation .`).
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import bda_optim as bda

from . import _common
from ._workloads import RunSteps, Workload


def with_boat(work: Workload) -> RunSteps:
    """Return BOAT: its operations NGD and GDA, with reverse-mode differentiation through higher.

    GDA multiplies alpha by a constant from step to step; the constant is 1 here, so that alpha is the workload's.
    """
    from boat_torch.boat_opt import Problem

    assert work.hyper is not None
    # BOAT imports losses by name; this module hands out those of the workload at hand.
    losses = types.ModuleType("_boat_losses")
    losses.lower = lambda feed, upper_model, net, **_: work.lower(net, work.hyper)
    losses.upper = lambda feed, upper_model, net, **_: work.upper(net, work.hyper)
    losses.mixed = lambda feed, other, upper_model, net, **_: work.objective(net, 1)
    sys.modules[losses.__name__] = losses
    settings = {
        "fo_op": None,
        "gm_op": ["NGD", "GDA"],
        "na_op": ["RAD"],
        "lower_level_model": work.model,
        "upper_level_model": nn.ParameterList([work.hyper]),
        "lower_level_var": list(work.model.parameters()),
        "upper_level_var": [work.hyper],
        "lower_level_opt": torch.optim.SGD(work.model.parameters(), lr=work.step_size),
        "upper_level_opt": torch.optim.SGD([work.hyper], lr=0.0),  # not used: the hypergradient is returned
        "device": "cpu",
        "loss_log_path": os.devnull,  # it evaluates both losses once more, and writes them
        "GDA": {"alpha_init": work.alpha(1), "alpha_decay": 1.0},
        "RGT": {"truncate_iter": 0},
        "accumulate_grad": False,
        "copy_last_param": False,
        "return_grad": True,
    }
    names = {"lower_level_loss": "lower", "upper_level_loss": "upper", "gda_loss": "mixed"}
    functions = {key: {"function": f"{losses.__name__}.{name}", "params": {}} for key, name in names.items()}

    def run(steps: int) -> list[Tensor]:
        problem = Problem({**settings, "lower_iters": steps}, functions).build_ll_solver().build_ul_solver()
        work.hyper.grad = None
        (found,), _ = problem.run_iter({}, {}, 0)
        return [found]

    return run


def with_learn2learn(work: Workload) -> RunSteps:
    """Return learn2learn: `MAML.clone` and `adapt`."""
    learner = _maml()(work.model, lr=work.lr, first_order=False)
    variables = list(work.model.parameters())

    def run(steps: int) -> list[Tensor]:
        clone = learner.clone()
        for _ in range(steps):
            clone.adapt(work.lower(clone, None))
        return list(torch.autograd.grad(work.upper(clone, None), variables))

    return run


def _maml() -> Callable[..., Any]:
    """Return learn2learn's MAML without importing the whole package, which needs gym and torchvision."""
    if "learn2learn" not in sys.modules:
        (folder,) = importlib.util.find_spec("learn2learn").submodule_search_locations
        for name, path in (("learn2learn", folder), ("learn2learn.algorithms", os.path.join(folder, "algorithms"))):
            sys.modules[name] = types.ModuleType(name)
            sys.modules[name].__path__ = [path]
    return importlib.import_module("learn2learn.algorithms.maml").MAML


def native_loop(work: Workload) -> RunSteps:
    """Return this library's `innerloop_ctx`, one step after the other."""
    inner = bda.BDAInnerOptimizer(work.model.parameters(), lr=work.lr)
    variables = list(work.model.parameters())

    def run(steps: int) -> list[Tensor]:
        with bda.innerloop_ctx(work.model, inner, copy_initial_weights=False) as (fmodel, diffopt):
            for _ in range(steps):
                diffopt.step(work.lower(fmodel, None))
            return list(torch.autograd.grad(work.upper(fmodel, None), variables))

    return run


def without_closed_forms(contestant: Callable[[Workload], RunSteps]) -> Callable[[Workload], RunSteps]:
    """Return a contestant that leaves all second derivatives to torch."""

    def build(work: Workload) -> RunSteps:
        run = contestant(work)

        def plain(steps: int) -> list[Tensor]:
            with bda.closed_derivatives(False):
                return run(steps)

        return plain

    return build


def with_cpp_wrapper(contestant: Callable[[Workload], RunSteps]) -> Callable[[Workload], RunSteps]:
    """Return a contestant whose programs call their kernels from C++."""

    def build(work: Workload) -> RunSteps:
        run = contestant(work)

        def wrapped(steps: int) -> list[Tensor]:
            with bda.compiling(cpp_wrapper=True, quiet=True):
                return run(steps)

        return wrapped

    return build


BOAT: dict[str, Callable[[Workload], RunSteps]] = {"BOAT": with_boat} if _common.installed("boat-torch") else {}
LEARN2LEARN: dict[str, Callable[[Workload], RunSteps]] = (
    {"learn2learn": with_learn2learn} if _common.installed("learn2learn") else {}
)
