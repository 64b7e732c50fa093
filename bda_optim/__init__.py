"""bda_optim: differentiable inner loops for bilevel optimisation in PyTorch, with Bi-level Descent Aggregation."""

from importlib import metadata as _metadata

from . import prox
from ._adjoints.base import Adjoint
from ._adjoints.carry import Carry
from ._adjoints.checkpointed import Checkpointed
from ._adjoints.differences import Differences
from ._adjoints.forward_mode import ForwardMode
from ._adjoints.guarded import Guarded
from ._adjoints.implicit import Implicit
from ._adjoints.unroll import FirstOrder, Truncated, Unroll
from ._compiled.compiling import compiling
from ._diagnose import diagnose
from ._diagnosis.findings import Finding
from ._diagnosis.report import Diagnosis
from ._diagnosis.suggestion import Suggestion
from ._functional_module import FunctionalModule
from ._hypergradient import Hypergradient, hypergradient, lower_point, rollout
from ._innerloop import DiffOptimizer, innerloop_ctx
from ._modules.closed import closed_derivatives
from ._optimizer import BDAInnerOptimizer
from ._rollout.losses import Trace
from ._step.rules.fista import FISTA
from ._step.schedules import constant, geometric, harmonic, polynomial, theory
from ._support.types import Move, Rule

try:
    __version__ = _metadata.version("bda_optim")
except _metadata.PackageNotFoundError:  # used from a checkout that is not installed
    __version__ = "unknown"

__all__ = [
    "FISTA",
    "Adjoint",
    "BDAInnerOptimizer",
    "Carry",
    "Checkpointed",
    "Diagnosis",
    "DiffOptimizer",
    "Differences",
    "Finding",
    "FirstOrder",
    "ForwardMode",
    "FunctionalModule",
    "Guarded",
    "Hypergradient",
    "Implicit",
    "Move",
    "Rule",
    "Suggestion",
    "Trace",
    "Truncated",
    "Unroll",
    "closed_derivatives",
    "compiling",
    "constant",
    "diagnose",
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
