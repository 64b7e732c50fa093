"""The steps of a unit, and their derivatives, as pure functions of flat tensors: what is traced and compiled.

The arguments are the tensors of the state, those of hyper, the distinct tensors of the batches, the rows of numbers,
and last the cotangents or tangents. The results are lists in which None stands for what does not exist.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .._adjoints.base import fresh, pull_back
from .._adjoints.tangents import Tangents, push_forward
from .._step.aggregation import at_step
from .._step.step import BDAStep
from .._support.tree import detach, replace_tensors, tensors
from .._support.types import Item, Record
from .program import Function
from .records import joined_losses
from .units import Form, is_number


class Functions:
    """Makes functions of flat tensors from a step.

    Args:
        step: The step.
        state: An example of the state.
        hyper: An example of the upper variables.
    """

    def __init__(self, step: BDAStep, state: Any, hyper: Sequence[Tensor]) -> None:
        self._step = step
        self._state = state
        self._count = len(tensors(state))
        self._inputs = len(hyper)
        settings = step.update.settings(hyper, 1)
        self.plain = [[name for name in ("lr", "upper_lr") if is_number(s[name])] for s in settings]

    def sweep(self, form: Form) -> Function:
        """Return the steps; the results are the new state, and the losses of each level in one tensor."""
        count, inputs = self._count, self._inputs

        def sweep(*flat: Tensor) -> list[Tensor | None]:
            with torch.no_grad():
                start = replace_tensors(self._state, flat[:count])
                now, records = self._apply(form, start, flat[count : count + inputs], flat[count + inputs :])
            return [*tensors(now), *joined_losses(records)]

        return sweep

    def pull(self, form: Form, wanted: Sequence[bool], where: Sequence[bool], *, whole: bool = False) -> Function:
        """Return the vector-Jacobian product of the steps.

        Args:
            form: The form of the batches.
            wanted: Which tensors of hyper it is wanted for.
            where: Which tensors of the new state have a cotangent.
            whole: Whether it follows the results of `sweep`.
        """
        count = self._count
        ends = sum(where)

        def pull(*flat: Tensor) -> list[Tensor | None]:
            given = iter(flat[len(flat) - ends :])
            cotangents = [next(given) if present else None for present in where]
            leaves = fresh(flat[:count])
            hyper = [h.detach().requires_grad_(w) for h, w in zip(flat[count:], wanted, strict=False)]
            rest = flat[count + len(hyper) : len(flat) - ends]
            start = replace_tensors(self._state, leaves)
            with torch.enable_grad():
                now, records = self._apply(form, start, hyper, rest)
            known = [*detach(tensors(now)), *joined_losses(records)] if whole else []
            return known + pull_back(tensors(now), [*leaves, *hyper], cotangents)

        return pull

    def push(self, form: Form, where: Sequence[bool]) -> Function:
        """Return the steps with their tangents; `where`: which tensors of state and hyper have some."""
        count, inputs = self._count, self._inputs
        ends = sum(where)

        def pushed(*flat: Tensor) -> list[Tensor | None]:
            given = iter(flat[len(flat) - ends :])
            tangents: Tangents = [next(given) if present else None for present in where]
            fixed = fresh(flat[count : count + inputs])
            rest = flat[count + inputs : len(flat) - ends]
            leaves: Sequence[Tensor] = flat[:count]
            records: list[Record] = []
            for item, resolve in self._resolved(form, rest):
                before = fresh(leaves)
                with torch.enable_grad():
                    now, record = self._step.apply(replace_tensors(self._state, before), fixed, item, resolve(fixed))
                leaves = tensors(now)
                tangents = push_forward(leaves, [*before, *fixed], tangents) + tangents[count:]
                records.append(record)
            return [*map(Tensor.detach, leaves), *joined_losses(records), *tangents[:count]]

        return pushed

    def _apply(self, form: Form, state: Any, hyper: Sequence[Tensor], rest: Sequence[Tensor]) -> Any:
        """Take the steps; `rest` are the tensors of the batches, and the rows."""
        records = []
        for item, resolve in self._resolved(form, rest):
            state, record = self._step.apply(state, hyper, item, resolve(hyper))
            records.append(record)
        return state, records

    def _resolved(self, form: Form, rest: Sequence[Tensor]) -> Iterator[tuple[Item, Callable[..., Any]]]:
        """Yield each item, and what gives its settings and weights, with all that may change as tensors."""
        *batches, rows = rest
        for batch, modes, row in zip(form.filled(batches), form.modes, rows.unbind(0), strict=True):
            yield Item(row[0], batch), functools.partial(self._settings, modes, row)  # type: ignore[arg-type]

    def _settings(self, modes: tuple[str, ...], row: Tensor, hyper: Sequence[Tensor]) -> list[Any]:
        """Return the settings of a step, with its row of numbers in the place of rates and weights."""
        k, *numbers = row.unbind(0)
        source = iter(numbers)
        settings = [dict(group.settings.fill(hyper)) for group in self._step.update.groups]
        for chosen, names in zip(settings, self.plain, strict=True):
            chosen.update({name: next(source) for name in names})
        for chosen, mode, number in zip(settings, modes, source, strict=True):
            if mode != "tensor":
                chosen["alpha"] = 0.0 if mode == "0" else number
        return [at_step(chosen, k) for chosen in settings]
