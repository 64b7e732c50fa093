"""What an adjoint is, and what it knows about a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from .._step.stationary import StationaryMap, stationary_map
from .._support import autograd_graph
from .._support.tensors import describe, is_differentiable
from .._support.tree import detach, replace_tensors, tensors
from .tangents import push_forward

Cotangents: TypeAlias = list[Tensor | None]
"""One cotangent (or tangent) per tensor; None stands for zero."""

Items: TypeAlias = Sequence[Any]
Result: TypeAlias = tuple[Any, list[Any]]


class Adjoint(Protocol):
    """Runs the inner loop and decides how it is differentiated.

    An adjoint is called ``adjoint(step, state, hyper, items)``. It runs ``step(state, hyper, item)`` for each item and
    returns the last state, differentiable in `hyper` and in the initial state as it sees fit, and the list of the
    steps' records. The state is a tree of tensors and numbers, `hyper` a tuple of tensors; `items` may be read once.

    An adjoint of your own is any such function. This one differentiates the last step alone, as DARTS does:

    >>> import bda_optim as bda
    >>> def last_step(step, state, hyper, items):
    ...     with torch.no_grad():
    ...         state, first = bda.Unroll()(step, state, hyper, items[:-1])
    ...     state, last = bda.Unroll()(step, state, hyper, items[-1:])
    ...     return state, first + last
    >>> x = torch.tensor(3.0, requires_grad=True)
    >>> lower = lambda y, x, batch: 0.5 * (y - x) ** 2
    >>> y = bda.rollout(lower, None, torch.tensor(0.0), x, steps=4, lr=0.5, adjoint=last_step)
    >>> torch.autograd.grad(y, x)[0]
    tensor(0.5000)
    """

    def __call__(self, step: Any, state: Any, hyper: tuple[Tensor, ...], items: Items) -> Result:
        """Return the last state and the records of all steps."""


class Tape(NamedTuple):
    """A step that autograd recorded."""

    inputs: list[Tensor]
    outputs: list[Tensor]


class Step:
    """A step as adjoints see it: a function and its derivatives. By default autograd records the step.

    Args:
        function: ``function(state, hyper, item) -> (state, record)``. It builds a graph if, and only if, grad mode is
            on.

    Attributes:
        names: What messages call the tensors of `hyper`.
        taped: Whether autograd can record several steps in a row; otherwise they are pulled back one by one.
        draws: Whether steps may draw random numbers, so that a replay needs their random state.
        single: Whether an item is one step, and not a unit of several.
        twice: Whether the losses are differentiated twice.
        keeps: Whether `record` saves little beside a state, with which `advance` takes the step once more.
    """

    taped: bool = True
    draws: bool = True
    single: bool = True
    twice: bool = True
    keeps: bool = False

    def __init__(self, function: Any) -> None:
        """Store the function."""
        self._function = function
        self._inspected = False
        self.names: Sequence[str] = getattr(function, "names", ())

    @property
    def repeats(self) -> bool:
        """Whether `pull` evaluates the step again, from the state and the random numbers before it; a tape does not."""
        return not self.taped

    def __call__(self, state: Any, hyper: Sequence[Tensor], item: Any) -> tuple[Any, Any]:
        """Take the step."""
        result: tuple[Any, Any] = self._function(state, hyper, item)
        return result

    @property
    def function(self) -> Any:
        """What takes a step in a plain loop: without this object in between, where it adds nothing."""
        return self._function if type(self) is Step else self

    def units(self, items: Items, *, joined: bool = False) -> Items:
        """Divide items into those that are taken by one call; `joined`: no state between them is needed."""
        return items

    def first_order(self) -> Step:
        """Return the same step with the gradients of both losses treated as constants."""
        return Step(self._function.first_order())

    def changed(self, change: Callable[[Any], Step]) -> Step:
        """Return the same step around what ``change(function)`` makes of its innermost function."""
        return change(self._function)

    def tape(self, state: Any, hyper: Sequence[Tensor], item: Any) -> tuple[Any, Any, Tape]:
        """Take the step and let autograd record it; `hyper` are leaves.

        Raises:
            ValueError: If the step depends on a tensor that requires grad and is not among its inputs.
            NotImplementedError: If torch cannot differentiate the step's gradients.
        """
        with torch.enable_grad():
            start = fresh(tensors(state))
            after, record = self(replace_tensors(state, start), hyper, item)
        tape = Tape([*start, *hyper], tensors(after))
        if not self._inspected:
            autograd_graph.refuse_once_differentiable(tape.outputs)
            self._inspected = True
        refuse_captured(tape.outputs, tape.inputs)
        return detach(after), record, tape

    def record(self, state: Any, hyper: Sequence[Tensor], item: Any) -> tuple[Any, Any, Any]:
        """Take the step; return also what saves `pull` from evaluating it again, or None."""
        return self.tape(state, hyper, item)

    def advance(self, state: Any, hyper: Sequence[Tensor], item: Any, saved: Any) -> tuple[Any, Any]:
        """Take a recorded step once more, if the step `keeps`; ``saved`` is what `record` returned."""
        raise NotImplementedError

    def pull(
        self, state: Any, hyper: Sequence[Tensor], item: Any, cotangents: Cotangents, saved: Any = None
    ) -> Cotangents:
        """Pull cotangents of the state after the step back to the state before it, and to `hyper`."""
        tape = saved if isinstance(saved, Tape) else self.tape(state, hyper, item)[2]
        return pull_back(tape.outputs, tape.inputs, cotangents)

    def pull_saved(self, saved: Any, cotangents: Cotangents) -> Cotangents | None:
        """Do what `pull` does with what was saved alone; None where autograd or user code would have to run."""
        return None

    def push(self, state: Any, hyper: Sequence[Tensor], item: Any, tangents: Cotangents) -> tuple[Any, Any, Cotangents]:
        """Take the step and push the tangents of state and `hyper` forward; return those of the new state too."""
        after, record, tape = self.tape(state, hyper, item)
        return after, record, push_forward(tape.outputs, tape.inputs, tangents)

    def stationary(self, state: Any, hyper: Sequence[Tensor], item: Any, alpha: float | None) -> StationaryMap:
        """Return the plain map at whose fixed point a loop of such steps comes to rest, uncompiled."""
        return stationary_map(self._function, state, hyper, item, alpha)


def check_adjoint(name: str, adjoint: Any) -> None:
    """Raise where something is passed as an adjoint that is not one; None is the default."""
    if isinstance(adjoint, type):
        raise TypeError(f"`{name}` must be an adjoint; got the class {adjoint.__name__}. Write `{adjoint.__name__}()`.")
    if adjoint is not None and not callable(adjoint):
        raise TypeError(
            f"`{name}` must be an adjoint; got {adjoint!r}. Use an object such as `Unroll()` or `Checkpointed()`."
        )


def layers(adjoint: Any) -> Iterator[Any]:
    """Yield an adjoint, the one within it, and so on."""
    while adjoint is not None:
        yield adjoint
        adjoint = getattr(adjoint, "within", None)


def differentiates_twice(adjoint: Any) -> bool:
    """Whether an adjoint differentiates the losses of a step twice."""
    return all(getattr(layer, "twice", True) for layer in layers(adjoint))


def as_step(step: Any) -> Step:
    """Return a step as adjoints see it; a plain function is adapted."""
    return step if isinstance(step, Step) else Step(step)


def fresh(values: Sequence[Tensor]) -> list[Tensor]:
    """Return leaves with the same values, which require grad where they can."""
    return [value.detach().requires_grad_(is_differentiable(value)) for value in values]


def as_leaves(hyper: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return leaves with the same values, which require grad where the originals do."""
    return tuple(t.detach().requires_grad_(t.requires_grad) for t in hyper)


def pull_back(
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    cotangents: Sequence[Tensor | None],
    *,
    create_graph: bool = False,
    retain_graph: bool = False,
) -> Cotangents:
    """Return the vector-Jacobian products with respect to `inputs`; None where there is none."""
    pairs = [(o, c) for o, c in zip(outputs, cotangents, strict=True) if c is not None and o.requires_grad]
    wanted = [x for x in inputs if x.requires_grad]
    if not pairs or not wanted:
        return [None] * len(inputs)
    results, seeds = zip(*pairs, strict=True)
    retain = retain_graph or create_graph
    found = torch.autograd.grad(
        results, wanted, seeds, allow_unused=True, create_graph=create_graph, retain_graph=retain
    )
    products = iter(found)
    return [next(products) if x.requires_grad else None for x in inputs]


def refuse_captured(outputs: Sequence[Tensor], inputs: Sequence[Tensor], ends: Sequence[Any] = ()) -> None:
    """Raise where a step depends on a leaf that is not among its inputs: its gradient would be lost silently.

    Args:
        outputs: What the step returned.
        inputs: Its inputs.
        ends: The graph nodes of those inputs that are not leaves.
    """
    known = {id(t) for t in inputs}
    for leaf in autograd_graph.leaves(outputs, ends):
        if id(leaf) not in known:
            raise ValueError(
                "a loss uses a tensor that requires grad but is neither in `hyper=` nor in `batches=` (or it is, and a "
                "closure holds it all the same, as that of a torchopt transformation does); got one of "
                f"{describe(leaf)}. Its gradient would be lost: pass it in `hyper=` and take it from the loss "
                "function's second argument, detach it, or use `adjoint=Unroll()`."
            )


def changed_in_place(name: str, tensor: Tensor) -> str:
    """Return the message about a tensor that was changed between forward and backward."""
    return (
        f"{name} ({describe(tensor)}) was changed in place between the rollout and its backward pass, as an "
        "`optimizer.step()` or a `commit()` does. Call `.backward()` first, or change a copy."
    )
