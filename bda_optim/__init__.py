"""bda_optim: differentiable inner loops for bilevel optimisation in PyTorch, with Bi-level Descent Aggregation."""

from importlib import metadata as _metadata

from . import _prox as prox
from ._adjoint import Checkpointed, FirstOrder, ForwardMode, Truncated, Unroll
from ._guard import Guarded
from ._innerloop import DiffOptimizer, innerloop_ctx
from ._module import FunctionalModule
from ._optimizer import BDAInnerOptimizer
from ._rollout import Hypergradient, hypergradient, lower_point, rollout
from ._rules import FISTA
from ._schedules import constant, geometric, harmonic, polynomial, theory
from ._trace import Trace

try:
    __version__ = _metadata.version("bda_optim")
except _metadata.PackageNotFoundError:  # used from a checkout that is not installed
    __version__ = "unknown"

__all__ = [
    "FISTA",
    "BDAInnerOptimizer",
    "Checkpointed",
    "DiffOptimizer",
    "FirstOrder",
    "ForwardMode",
    "FunctionalModule",
    "Guarded",
    "Hypergradient",
    "Trace",
    "Truncated",
    "Unroll",
    "constant",
    "geometric",
    "harmonic",
    "hypergradient",
    "innerloop_ctx",
    "lower_point",
    "polynomial",
    "prox",
    "rollout",
    "theory",
]
