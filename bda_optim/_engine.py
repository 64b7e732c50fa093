"""The compiled engine: step and adjoint as two pure functions of tensors, each traced and compiled once.

The step of the core is traced into a graph of tensor operations, gradients included, and that graph is compiled; the
same is done with its vector-Jacobian product. Rates, weights and counts enter as tensors, so neither k nor a scheduler
recompiles anything. Several steps go into one call where a call's overhead would dominate. The first result of each
program is compared with the uncompiled one; where they differ, or where something cannot be traced, the step runs
uncompiled, after a warning.

A trace holds as long as the losses are functions of their arguments, of their closures and of the module: what they
read elsewhere (a counter, `random`) is read once.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch._inductor
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from ._aggregation import is_zero, weight
from ._freeze import freeze, layout
from ._replay import fresh, pull_back
from ._step import BDAStep
from ._tree import Filler, Slot, detach, replace_tensors, tensors
from ._types import Item, Record

_SMALL = 20_000
"""Up to so many numbers in the state several steps share one call: the call costs more than a step then."""

_MOST_STEPS, _MOST_OPERATIONS = 10, 500
"""How many steps share a call at most, and about how many operations; compilation takes longer than in proportion."""

_FEW = 100
"""Steps with more operations than this have a call of their own."""

_MOST_PROGRAMS = 16
"""So many layouts of batches are compiled for one problem before it runs uncompiled."""

_MOST_ENGINES = 8
"""So many problems with the same lower loss are kept."""

Cotangents = Sequence[Tensor | None]


class Unit(NamedTuple):
    """Steps that share a call: their items, one row of numbers (k, rates, weights) for each, and their form."""

    items: tuple[Item, ...]
    rows: Tensor
    form: _Form


@dataclasses.dataclass
class Program:
    """A compiled graph.

    Attributes:
        call: The graph; takes and gives flat tensors.
        constants: What it takes beside its arguments: tensors of closures, by position, or fixed ones.
        present: Which outputs there are.
    """

    call: Callable[..., Any]
    constants: list[int | Tensor]
    present: list[bool]

    def __call__(self, inputs: Sequence[Tensor], captured: Sequence[Tensor]) -> list[Tensor | None]:
        """Run it; outputs that do not exist are None."""
        extra = [captured[c].detach() if isinstance(c, int) else c for c in self.constants]
        found = iter(self.call(*inputs, *extra))
        return [next(found) if present else None for present in self.present]


class Engine:
    """The programs of one problem."""

    def __init__(self) -> None:
        """Start without any."""
        self.programs: dict[Hashable, Program] = {}
        self.broken: str | None = None
        self.size: int | None = None
        self.inspected = False


_engines: weakref.WeakKeyDictionary[Any, dict[Hashable, Engine]] = weakref.WeakKeyDictionary()


class CompiledStep:
    """A step that takes units of one or more items; compiled without a graph, uncompiled with one."""

    def __init__(self, step: BDAStep, state: Any, hyper: Sequence[Tensor]) -> None:
        """Find the engine of the problem, which earlier rollouts may have left; `state` and `hyper` are examples."""
        self._step, self._state, self._hyper, self.names = step, detach(state), hyper, step.names
        self._engine, self._captured = _engine(step)
        settings = step.update.settings(hyper)
        self._plain = [[name for name in ("lr", "upper_lr") if _is_number(s[name])] for s in settings]
        self._numbers = [float(s[name]) for s, names in zip(settings, self._plain, strict=True) for name in names]
        self._alphas = [s["alpha"] for s in settings]
        self._device = next((t.device for t in hyper if t.dim()), None)

    def first_order(self) -> CompiledStep:
        """Return the same with the gradients of both losses taken as constants."""
        return CompiledStep(self._step.first_order(), self._state, self._hyper)

    @property
    def inspected(self) -> bool:
        """Whether it was looked at what the step depends on."""
        return self._engine.inspected

    @inspected.setter
    def inspected(self, value: bool) -> None:
        self._engine.inspected = value

    def units(self, items: Sequence[Item]) -> Sequence[Unit]:
        """Divide items into units; what is left over goes one by one."""
        rows, modes = [], []
        for item in items:
            weights = [weight(alpha, item.k) for alpha in self._alphas]
            modes.append(tuple("0" if is_zero(w) else "number" if _is_number(w) else "tensor" for w in weights))
            rows.append([float(item.k), *self._numbers, *(float(w) if _is_number(w) else 0.0 for w in weights)])
        table = torch.tensor(rows, dtype=torch.float64, device=self._device)

        units = _Units(items, table, modes)
        if self._engine.size is None:
            self._engine.size = self._steps_per_call(units.between(0, 1), len(items))
        return units.divided(self._engine.size)

    def _steps_per_call(self, unit: Unit, steps: int) -> int:
        """Return how many steps should share a call, from the operations that one has: a divisor of K, if possible."""
        if sum(t.numel() for t in tensors(self._state)) > _SMALL:
            return 1
        flat = [t.detach() for t in (*tensors(self._state), *self._hyper, *unit.form.tensors, unit.rows)]
        sweep = self._sweep(unit.form, self._state, self._hyper)
        rng = torch.get_rng_state()
        try:
            graph = make_fx(lambda *inputs: [t for t in sweep(*inputs) if t is not None])(*flat)
        except Exception:  # it will be met again, and reported, when the step is compiled
            return 1
        finally:
            torch.set_rng_state(rng)
        operations = sum(node.op == "call_function" for node in graph.graph.nodes)
        most = max(1, min(_MOST_STEPS, _MOST_OPERATIONS // operations)) if operations <= _FEW else 1
        return next((size for size in range(most, most // 2, -1) if steps % size == 0), most)

    def __call__(self, state: Any, hyper: Sequence[Tensor], unit: Unit) -> tuple[Any, list[Record]]:
        """Take the steps of a unit."""
        if not torch.is_grad_enabled() and not self._engine.broken:
            result = self._run("sweep", unit, state, hyper, ())
            if result is not None:
                count = len(result) - 2 * len(unit.items)
                losses = result[count:]
                records = [Record(*pair) for pair in zip(losses[::2], losses[1::2], strict=True)]
                return replace_tensors(state, result[:count]), records
        records = []
        for item in unit.items:
            state, record = self._step(state, hyper, item)
            records.append(record)
        return state, records

    def pull(self, state: Any, hyper: Sequence[Tensor], unit: Unit, cotangents: Cotangents) -> list[Tensor | None]:
        """Pull cotangents of the state after a unit back to the state before it and to hyper."""
        if not self._engine.broken:
            result = self._run("pull", unit, state, hyper, cotangents)
            if result is not None:
                return result
        with torch.enable_grad():
            inputs = [*fresh(tensors(state)), *(h.detach().requires_grad_(h.requires_grad) for h in hyper)]
            count = len(inputs) - len(hyper)
            after, _ = self(replace_tensors(state, inputs[:count]), inputs[count:], unit)
        return pull_back(tensors(after), inputs, cotangents)

    def _run(
        self, kind: str, unit: Unit, state: Any, hyper: Sequence[Tensor], cotangents: Cotangents
    ) -> list[Any] | None:
        """Run a program, compiling it if it is new; None if that cannot be done."""
        form = unit.form
        wanted, where = [h.requires_grad for h in hyper], [c is not None for c in cotangents]
        given = [c.contiguous() for c in cotangents if c is not None]
        flat = [t.detach() for t in (*tensors(state), *hyper, *form.tensors, unit.rows, *given)]
        key = (kind, form.key, tuple(map(layout, flat)), tuple(wanted), tuple(where))
        program = self._engine.programs.get(key)
        if program is not None:
            return program(flat, self._captured)
        if len(self._engine.programs) >= _MOST_PROGRAMS:
            return self._without(f"more than {_MOST_PROGRAMS} layouts of batches or states were met")
        function = self._sweep(form, state, hyper) if kind == "sweep" else self._pull(form, state, wanted, where)
        try:
            program, result = _build(function, flat, self._captured)
            same = _agree(program(flat, self._captured), result)
        except Exception as error:  # whatever the compiler stumbled over, the uncompiled step is right
            reason = (str(error).splitlines() or [""])[0]
            return self._without(f"the step could not be compiled ({type(error).__name__}: {reason})")
        if not same:
            return self._without("the compiled step gives other numbers than the uncompiled one")
        self._engine.programs[key] = program
        return result

    def _sweep(self, form: _Form, state: Any, hyper: Sequence[Tensor]) -> Callable[..., list[Tensor | None]]:
        """Return the steps of a unit as a function of flat tensors."""
        count = len(tensors(state))

        def sweep(*flat: Tensor) -> list[Tensor | None]:
            with torch.no_grad():
                rest = flat[count + len(hyper) :]
                now, records = self._apply(form, replace_tensors(state, flat[:count]), flat[count:][: len(hyper)], rest)
            return [*tensors(now), *itertools.chain.from_iterable(records)]

        return sweep

    def _pull(
        self, form: _Form, state: Any, wanted: Sequence[bool], where: Sequence[bool]
    ) -> Callable[..., list[Tensor | None]]:
        """Return their vector-Jacobian product as a function of flat tensors."""
        count, ends = len(tensors(state)), sum(where)

        def pull(*flat: Tensor) -> list[Tensor | None]:
            given = iter(flat[len(flat) - ends :])
            cotangents = [next(given) if present else None for present in where]
            with torch.enable_grad():
                leaves = fresh(flat[:count])
                hyper = [h.detach().requires_grad_(w) for h, w in zip(flat[count:], wanted, strict=False)]
                rest = flat[count + len(hyper) : len(flat) - ends]
                now, _ = self._apply(form, replace_tensors(state, leaves), hyper, rest)
            return pull_back(tensors(now), [*leaves, *hyper], cotangents)

        return pull

    def _apply(self, form: _Form, state: Any, hyper: Sequence[Tensor], rest: Sequence[Tensor]) -> Any:
        """Take the steps of a unit; `rest` are the tensors of its batches, and its rows."""
        *batches, rows = rest
        records = []
        for batch, modes, row in zip(form.filled(batches), form.modes, rows.unbind(0), strict=True):
            k, *numbers = row.unbind(0)
            source = iter(numbers)
            settings = [dict(s) for s in self._step.update.settings(hyper)]
            for chosen, names in zip(settings, self._plain, strict=True):
                chosen.update({name: next(source) for name in names})
            weights = [
                {"0": 0.0, "number": number, "tensor": None}[mode] for mode, number in zip(modes, source, strict=True)
            ]
            weights = [weight(s["alpha"], k) if w is None else w for s, w in zip(settings, weights, strict=True)]
            state, record = self._step.apply(state, hyper, Item(k, batch), settings, weights)  # type: ignore[arg-type]
            records.append(record)
        return state, records

    def _without(self, reason: str) -> list[Any] | None:
        """Run this problem uncompiled from now on, and say so."""
        self._engine.broken = reason
        warnings.warn(f"compile=True: {reason}; this problem runs uncompiled from now on.", stacklevel=2)
        return None


@dataclasses.dataclass(frozen=True)
class _Nth:
    """Stands for a distinct tensor of a unit's batches."""

    index: int


class _Units(Sequence[Unit]):
    """Items divided into units; a batch is read when its unit is asked for, and known units are kept."""

    def __init__(self, items: Sequence[Item], table: Tensor, modes: Sequence[tuple[str, ...]]) -> None:
        self._items, self._table, self._modes = items, table, modes
        self._bounds: list[tuple[int, int]] = []
        self._known: dict[int, Unit] = {}

    def between(self, start: int, stop: int) -> Unit:
        """Return the unit of these steps."""
        items = tuple(self._items[i] for i in range(start, stop))
        return Unit(items, self._table[start:stop], _Form(items, tuple(self._modes[start:stop])))

    def divided(self, size: int) -> _Units:
        """Divide into units of `size` steps, and the rest into single ones."""
        whole = len(self._items) - len(self._items) % size
        starts = [*range(0, whole, size), *range(whole, len(self._items)), len(self._items)]
        self._bounds = list(itertools.pairwise(starts))
        return self

    def __len__(self) -> int:
        return len(self._bounds)

    def __getitem__(self, index: Any) -> Any:
        unit = self._known.get(index) or self.between(*self._bounds[index])
        if getattr(self._items, "eager", True):  # the batches are held by their list anyway
            self._known[index] = unit
        return unit


class _Form:
    """The batches of a unit taken apart: their distinct tensors, and a key for all the rest."""

    def __init__(self, items: Sequence[Item], modes: tuple[tuple[str, ...], ...]) -> None:
        self.tensors: list[Tensor] = []
        self.modes = modes
        known: dict[int, _Nth] = {}
        self._batches = []
        for item in items:
            leaves, spec = pytree.tree_flatten(item.batch)
            self._batches.append(([self._place(leaf, known) for leaf in leaves], spec))
        shapes = [(tuple(map(_comparable, leaves)), spec) for leaves, spec in self._batches]
        self.key = (tuple(shapes), self.modes)

    def _place(self, leaf: Any, known: dict[int, _Nth]) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) not in known:
            known[id(leaf)] = _Nth(len(self.tensors))
            self.tensors.append(leaf)
        return known[id(leaf)]

    def filled(self, values: Sequence[Tensor]) -> Iterator[Any]:
        """Yield each batch, with `values` for its tensors."""
        for leaves, spec in self._batches:
            filled = [values[leaf.index] if isinstance(leaf, _Nth) else leaf for leaf in leaves]
            yield pytree.tree_unflatten(filled, spec)


def with_tensor_counts(state: Any) -> Any:
    """Turn the plain numbers of a rule's state (Adam's step) into tensors, and lay every tensor out densely."""
    device = tensors(state)[0].device

    def leaf(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.contiguous()
        return torch.tensor(float(value), dtype=torch.float64, device=device) if _is_number(value) else value

    return pytree.tree_map(leaf, state)


def with_plain_counts(state: Any, like: Any) -> Any:
    """Undo `with_tensor_counts`: what is a number in `like` becomes one again."""
    leaves, spec = pytree.tree_flatten(like)
    found = zip(pytree.tree_leaves(state), leaves, strict=True)
    return pytree.tree_unflatten([type(old)(new.item()) if _is_number(old) else new for new, old in found], spec)


def _engine(step: BDAStep) -> tuple[Engine, list[Tensor]]:
    """Return the engine of a problem, and the tensors that its functions hold."""
    update = step.update
    groups = [(group.members, _without_numbers(group.settings.unfilled())) for group in update.groups]
    parts = (step.lower, step.upper, step.objective, step.hyper, update.rule, groups, update.tasks)
    key, captured = freeze((*parts, step.constant_gradients))
    owner = getattr(step.lower, "__func__", step.lower)
    owner = getattr(owner, "__code__", owner)  # a lambda made anew in every upper iteration has the same code
    family = _engines.setdefault(owner, {})
    if key not in family:
        while len(family) >= _MOST_ENGINES:
            del family[next(iter(family))]
        family[key] = Engine()
    return family[key], captured


def _without_numbers(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings without the rates and weights that enter a program as tensors."""
    changing = ("lr", "upper_lr", "alpha")
    free = {n for n in changing if settings[n] is not None and not isinstance(settings[n], Filler | list)}
    return {name: "a number" if name in free else value for name, value in settings.items()}


def _build(
    function: Callable[..., list[Tensor | None]], inputs: Sequence[Tensor], captured: Sequence[Tensor]
) -> tuple[Program, list[Tensor | None]]:
    """Trace and compile a function of tensors; return the program, and what the run that was traced gave."""
    result: list[Tensor | None] = []

    def there(*flat: Tensor) -> list[Tensor]:
        result[:] = function(*flat)
        return [t for t in result if t is not None]

    before = torch.get_rng_state()
    graph = make_fx(there)(*inputs)
    torch.set_rng_state(before)  # the program is compared with this run, and must draw the same numbers
    constants = _lift_constants(graph)
    with torch.no_grad():
        call = torch._inductor.compile(graph, [*inputs, *constants], options={"fallback_random": True})
    places = [next((i for i, t in enumerate(captured) if _is_same(t, c)), c) for c in constants]
    return Program(call, places, [t is not None for t in result]), detach(result)


def _lift_constants(graph: GraphModule) -> list[Tensor]:
    """Turn the tensors that a trace found outside its arguments into arguments."""
    last = next(node for node in reversed(graph.graph.nodes) if node.op == "placeholder")
    found: list[Tensor] = []
    for node in list(graph.graph.nodes):
        if node.op == "get_attr" and isinstance(value := getattr(graph, node.target, None), Tensor):
            with graph.graph.inserting_after(last):
                last = graph.graph.placeholder(f"captured_{len(found)}")
            node.replace_all_uses_with(last)
            graph.graph.erase_node(node)
            found.append(value.detach())
    graph.recompile()
    return found


def _is_same(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and layout(a.detach()) == layout(b)


def _agree(got: Sequence[Tensor | None], want: Sequence[Tensor | None]) -> bool:
    """Whether two results agree up to rounding, relative to the largest entry of each tensor.

    A gradient that vanishes in theory (of a bias before a normalisation) consists of rounding errors of the others.
    """
    pairs = [(a, b) for a, b in zip(got, want, strict=True) if a is not None and b is not None and b.numel()]
    pairs = [(a, b) for a, b in pairs if b.is_floating_point()]
    sizes = [float(b.abs().max()) for _, b in pairs]
    noise = max((size for size in sizes if math.isfinite(size)), default=0.0)
    for (a, b), size in zip(pairs, sizes, strict=True):
        eps = torch.finfo(b.dtype).eps
        allowed = 10 * eps**0.5 * size + 100 * eps * noise
        if not torch.allclose(a, b, rtol=0, atol=allowed if math.isfinite(allowed) else 0.0, equal_nan=True):
            return False
    return True


def _comparable(leaf: Any) -> Hashable:
    return leaf if isinstance(leaf, _Nth | Slot) else freeze(leaf)[0]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
