"""The second-order products of a step as central differences of first-order gradients, and when they are refused."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._context.environment import another_result, without_autocast
from .._context.precision import measured_unit, unit_of
from .._step.aggregation import needs_upper
from .._step.gradients import Grads, add, no_gradient
from .._step.objective import Buffers
from .._step.step import BDAStep
from .._support.autograd_graph import nodes, refuse_moving_constants
from .._support.checks import user_level
from .._support.torch_private import kink, node_dtypes
from .._support.tree import replace_tensors, tensors
from .._support.types import InnerState, Item
from .base import Cotangents, fresh, pull_back, refuse_captured
from .partwise import LossAt, shares_graph
from .quotient import Gradient, difference
from .symmetry import Asymmetry, asymmetry, known


class _Seen(NamedTuple):
    """What the graph of a loss shows: operations whose derivative jumps, and the unit of rounding."""

    kinks: list[str]
    unit: float


class Central:
    """Second-order products of a rollout, as central differences of first-order gradients.

    Args:
        scale: Multiplies the step of the differences; None stands for 1 and refuses kinked operations.
    """

    twice = False

    def __init__(self, scale: float | None) -> None:
        """Start without knowing any loss."""
        self._scale = scale
        self._seen: dict[str, _Seen] = {}  # by level
        self._repeated: set[str] = set()
        self._probed: set[str] = set()

    def inspect(self, step: BDAStep, state: InnerState, hyper: Sequence[Tensor], item: Item) -> None:
        """Look at the graphs of both losses and of the update."""
        with torch.enable_grad():
            leaves = fresh(tensors(state))
            now = replace_tensors(state, leaves)
            settings = step.update.settings(hyper, item.k)
            points = fresh(step.update.points(now, settings))
            both = needs_upper(settings, step.upper, item.k)
            for level in ("lower", "upper") if both else ("lower",):
                self._look(LossAt(step, level, points, state.buffers, hyper, item, None, lambda: None))
            grads = [torch.zeros_like(p, requires_grad=True) for p in points]
            new = step.update(now, grads, grads if both else no_gradient(points), settings, step.hyper.fill(hyper))
            refuse_captured(tensors(new), [*leaves, *hyper, *grads])

    def __call__(self, loss: LossAt, directions: Grads) -> tuple[Grads, Grads]:
        """Return the second derivatives of a loss along directions of the points: by points, and by hyper."""
        count = len(loss.points)
        values = [*loss.points, *loss.hyper]
        along = [*directions, *no_gradient(loss.hyper)]

        def gradient(values: Sequence[Tensor], seeds: Tensor | None) -> Cotangents:
            return self._gradient(loss._replace(points=values[:count], hyper=values[count:]), seeds)

        if loss.level not in self._repeated:
            self._repeat(loss)
            self._repeated.add(loss.level)
        if loss.level not in self._probed and self._probe(loss, values, along, gradient):
            self._probed.add(loss.level)
        length = (self._scale or 1.0) * _cube_root(self._seen[loss.level].unit)
        found, _ = difference(gradient, values, along, length, loss.step.update.tasks)
        return found[:count], found[count:]

    def _gradient(self, loss: LossAt, seeds: Tensor | None) -> Cotangents:
        """Return the gradient of a loss by points and hyper; one graph of a part is alive at a time."""
        inputs = [*loss.points, *loss.hyper]

        def one(part: Any, buffers: Buffers) -> tuple[Cotangents, Buffers]:  # its frame holds the graph
            value, kept = self._evaluate(loss, part, buffers)
            seed = torch.ones_like(value) if seeds is None else seeds.to(value.device, value.dtype).view_as(value)
            return pull_back([value], inputs, [seed], retain_graph=shares_graph(part)), kept

        total: Cotangents = [None] * len(inputs)
        buffers = loss.buffers
        loss.rewind()
        with torch.enable_grad():
            for weight, part in loss.parts():
                found, buffers = one(part, buffers)
                total = add(total, found if weight == 1 else [None if g is None else weight * g for g in found])
        return total

    def _evaluate(self, loss: LossAt, part: Any, buffers: Buffers) -> tuple[Tensor, Buffers]:
        """Return a loss on a part of the batch, and the buffers after it; refuse kinks."""
        value, kept = loss.on(part, buffers)
        refuse_moving_constants([value])
        if self._scale is None:
            _refuse_kinks(loss.level, _kinks(nodes([value])))
        return value, kept

    def _look(self, loss: LossAt) -> _Seen:
        """Look at the graph of a loss on the first part of the batch."""
        (_, part), *_ = loss.parts()
        value, _ = self._evaluate(loss, part, loss.buffers)
        graph = list(nodes([value]))
        unit = unit_of(dtype for node in graph for dtype in node_dtypes(node))
        if unit == torch.finfo(torch.float32).eps and not value.is_meta:
            unit = measured_unit(value.device, convolution=any("conv" in node.name().lower() for node in graph))
        seen = _Seen(_kinks(graph), unit)
        self._seen.setdefault(loss.level, seen)
        return seen

    def _repeat(self, loss: LossAt) -> None:
        """Evaluate a loss where it was evaluated before.

        Raises:
            RuntimeError: If it gives another value.
        """
        values = []
        buffers = loss.buffers
        loss.rewind()
        with torch.enable_grad():
            if loss.level not in self._seen:
                self._look(loss)
                loss.rewind()
            for weight, part in loss.parts():
                value, buffers = self._evaluate(loss, part, buffers)
                values.append(weight * value.detach())
        assert loss.value is not None
        bound = self._seen[loss.level].unit ** 0.5 * (1 + loss.value.abs().max())
        difference = (sum(values[1:], start=values[0]) - loss.value).abs().max()
        if not loss.value.is_meta and bool(difference > bound):
            raise RuntimeError(another_result())

    def _probe(self, loss: LossAt, values: Sequence[Tensor], directions: Grads, gradient: Gradient) -> bool:
        """Probe whether the derivative of a gradient is symmetric, once per loss and module; False along a zero.

        Raises:
            ValueError: If it is not, or is computed too coarsely to tell; with a `scale` it is a warning where kinks or
                the precision may be the reason.
        """
        step = loss.step
        function = step.lower if loss.level == "lower" else step.upper
        units = known.units(function, getattr(step.objective, "module", None))
        if loss.points[0].is_meta or self._seen[loss.level].unit in units:
            return True
        if not any(bool(v.any()) for v in directions if v is not None):
            return False
        with without_autocast(loss.points):  # in bfloat16 every derivative looks asymmetric
            seen = self._look_finely(loss)
            scale = self._scale or 1.0
            length = _cube_root(seen.unit) * (scale if seen.kinks else min(scale, 1.0))
            found = asymmetry(gradient, values, directions, length, seen.unit)
        if not found.gap <= found.allowed:  # or it is not a number
            _report(loss.level, found, seen)
        if found.noise < 0.1:  # otherwise it shows nothing, and another round may
            units.add(self._seen[loss.level].unit)
        return True

    def _look_finely(self, loss: LossAt) -> _Seen:
        """Look at the graph of a loss without autocast; refuse what is computed more coarsely than in float32."""
        loss.rewind()
        reason = None
        try:
            with torch.enable_grad():
                seen = self._look(loss)
        except RuntimeError as error:  # dtypes that only autocast brings together
            reason, seen = error, self._seen[loss.level]
        if seen.unit > _COARSE and self._scale is None:
            raise ValueError(
                f"the {loss.level} loss is computed more coarsely than in float32, also without autocast, so that the "
                "probe whether its gradient is that of a function shows nothing. Keep parameters and batches in "
                "float32 and use `torch.autocast`, or pass `Differences(scale=0.3)` if the loss detaches nothing."
            ) from reason
        return seen


_COARSE = 1e-6
"""Units of rounding beyond this are those of TF32, float16 and bfloat16."""


def _report(level: str, found: Asymmetry, seen: _Seen) -> None:
    """Raise about an asymmetric derivative, or warn where kinks or the precision may be the reason."""
    message = (
        f"the gradient of the {level} loss is not that of a function: its derivative is not symmetric (<u, G'v> and "
        f"<v, G'u> differ by {found.gap:.1e} of |G'v|; rounding explains {found.allowed:.0e}), so that differences of "
        "gradients give a wrong hypergradient. "
    )
    if seen.kinks or seen.unit > _COARSE:
        why = f"Its kinks ({', '.join(seen.kinks)})" if seen.kinks else "Its precision"
        warnings.warn(f"{message}{why} may be the reason. Use `Checkpointed()`.", stacklevel=user_level())
        return
    raise ValueError(
        f"{message}A `detach()`, a `no_grad` block, a stop-gradient, a straight-through estimator or a gradient "
        "reversal does this, and so do random numbers that are not restored, and a loss that bends much between both "
        "gradients (try a smaller `scale`). Use `adjoint=Checkpointed()`, which differentiates as autograd does."
    )


def _cube_root(unit: float) -> float:
    root: float = unit ** (1 / 3)
    return root


def _kinks(graph: Iterable[Any]) -> list[str]:
    return sorted({name for node in graph if (name := kink(node))})


def _refuse_kinks(level: str, found: Sequence[str]) -> None:
    """Raise where there are some."""
    if found:
        raise ValueError(
            f"the {level} loss uses operations whose derivative jumps ({', '.join(found)}), and differences of "
            "gradients are wrong where a unit changes sides between them. Use smooth ones (GELU, SiLU, tanh, average "
            "pooling) or `adjoint=Checkpointed()`. If no unit comes near its kink (the floor of a norm, say), or "
            "errors of some per cent do not matter, `Differences(scale=1.0)` lets them pass."
        )
