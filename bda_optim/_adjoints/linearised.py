"""The Jacobian of a map at a point, as products with vectors, from one recorded evaluation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from .base import Cotangents, as_leaves
from .linear_solve import Vector

Map: TypeAlias = Callable[[Sequence[Tensor], Sequence[Tensor]], list[Tensor | None]]


class Packing:
    """Between the parameters of a loop and the vectors of a solver: all of one device and dtype in one matrix.

    Args:
        params: The parameters; with tasks they have B in front.
        tasks: B, or None.
    """

    def __init__(self, params: Sequence[Tensor], tasks: int | None) -> None:
        """Group the parameters."""
        self._like = [p.detach() for p in params]
        self._rows = tasks or 1
        self._groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for i, p in enumerate(params):
            self._groups.setdefault((p.device, p.real.dtype), []).append(i)

    def vector(self, values: Sequence[Tensor | None]) -> Vector:
        """Return tensors as a vector; None counts as 0, and a complex number as two real ones."""
        return [torch.cat([self._matrix(i, values[i]) for i in members], 1) for members in self._groups.values()]

    def _matrix(self, i: int, value: Tensor | None) -> Tensor:
        like = self._like[i]
        value = torch.zeros_like(like) if value is None else value.to(like.dtype)
        real = torch.view_as_real(value.resolve_conj()) if value.is_complex() else value
        return real.reshape(self._rows, -1)

    def tensors(self, vector: Vector) -> list[Tensor]:
        """Undo `vector`."""
        values: list[Tensor] = list(self._like)
        for matrix, members in zip(vector, self._groups.values(), strict=True):
            sizes = [values[i].numel() * (2 if values[i].is_complex() else 1) // self._rows for i in members]
            for i, part in zip(members, matrix.split(sizes, 1), strict=True):
                like = values[i]
                if like.is_complex():
                    values[i] = torch.view_as_complex(part.reshape(*like.shape, 2).contiguous())
                else:
                    values[i] = part.reshape(like.shape)
        return values


class Linearised:
    """A map ``R(y; x)`` recorded at one point; every product goes through the same graph.

    Args:
        function: R, of parameters and hyper; None stands for 0.
        params: y.
        hyper: x; products with ``dR/dx`` are taken for those that require grad.
        tasks: The number of rows of a vector, or None.
    """

    def __init__(self, function: Map, params: Sequence[Tensor], hyper: Sequence[Tensor], tasks: int | None) -> None:
        """Evaluate the map with a graph."""
        with torch.enable_grad():
            self.params = [p.detach().requires_grad_() for p in params]
            self.hyper = as_leaves(hyper)
            values = function(self.params, self.hyper)
        self.outputs = [torch.zeros_like(p) if v is None else v for v, p in zip(values, params, strict=True)]
        self.packing = Packing(params, tasks)
        self.value = self.packing.vector([v.detach() for v in self.outputs])

    def pull(self, v: Vector) -> Vector:
        """Return ``(dR/dy)^T v``."""
        return self.packing.vector(_pulled(self.outputs, self.params, self.packing.tensors(v)))

    def pull_to_hyper(self, v: Vector) -> Cotangents:
        """Return ``(dR/dx)^T v``; None where R does not depend on a tensor."""
        return _pulled(self.outputs, self.hyper, self.packing.tensors(v))

    def push(self, v: Vector) -> Vector:
        """Return ``(dR/dy) v``: the pull-back is linear in its cotangent, so its own pull-back is the transpose."""
        with torch.enable_grad():
            duals = [torch.zeros_like(output, requires_grad=True) for output in self.outputs]
            pulled = _pulled(self.outputs, self.params, duals, create_graph=True)
        ends = [torch.zeros_like(p) if g is None else g for g, p in zip(pulled, self.params, strict=True)]
        return self.packing.vector(_pulled(ends, duals, self.packing.tensors(v)))


def _pulled(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], seeds: Sequence[Tensor], *, create_graph: bool = False
) -> Cotangents:
    """Return vector-Jacobian products, and keep the graph for the next ones."""
    pairs = [(output, seed) for output, seed in zip(outputs, seeds, strict=True) if output.requires_grad]
    wanted = [x for x in inputs if x.requires_grad]
    if not pairs or not wanted:
        return [None] * len(inputs)
    results, cotangents = zip(*pairs, strict=True)
    grads = iter(
        torch.autograd.grad(
            results, wanted, cotangents, retain_graph=True, create_graph=create_graph, allow_unused=True
        )
    )
    return [next(grads) if x.requires_grad else None for x in inputs]
