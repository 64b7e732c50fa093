"""The losses of tasks after a compiled rollout: traced once with their pull-back, and compiled as the steps are.

`vmap` takes longer to batch a small loss than its kernels take: with it a rollout of 32 heads and its backward pass
take 2.9 ms, without it 2.4 ms. As graphs that are not compiled the losses would gain nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .._adjoints.base import changed_in_place
from .._context.devices import accelerators
from .._context.environment import Ambient
from .._modules.skeleton import Skeleton
from .._support.tensors import layout
from .._support.torch_private import are_transformed, is_traced, version_of
from .._support.tree import map_tensors, replace_tensors, tensors
from .cache import Engine, engine_for
from .program import Function, Pair, build_pair
from .trace_key import CONTAINERS, PLAIN, address, configuration, contents

_PLACE = torch.empty(0, device="cpu")
"""Stands for a tensor of a tree."""

_MOST_LAYOUTS = 16
"""The maximum number of layouts of arguments traced for one loss."""

Evaluate = Callable[[Any], Tensor]
"""Takes parameters, upper variables and a batch; gives one loss per task."""


@dataclasses.dataclass
class _Call:
    """What a call has beside its tensors: the two programs, their constants, and the loss itself.

    Attributes:
        pair: The programs.
        captured: The tensors of closures, and of the module.
        evaluate: Calls the loss.
        form: The arguments of it, with placeholders for tensors.
        modules: The parts of the module, each with its mode.
    """

    pair: Pair
    captured: Sequence[Tensor]
    evaluate: Evaluate
    form: Any
    modules: list[tuple[nn.Module, bool]]

    def again(self, flat: Sequence[Tensor], cotangents: Tensor) -> list[Tensor | None]:
        """Call the loss once more, in the modes of the first call, and pull cotangents back on the tape."""
        now = [(module, module.training) for module, _ in self.modules]
        create_graph = torch.is_grad_enabled()
        try:
            for module, mode in self.modules:
                module.training = mode
            with torch.enable_grad(), _without_autocast(flat):
                leaves = [t.view_as(t) for t in flat]  # one may depend on another, as y_K on the upper variables
                losses = self.evaluate(replace_tensors(self.form, leaves))
                return _pulled(losses, leaves, cotangents, create_graph=create_graph)
        finally:
            for module, mode in now:
                module.training = mode


def traced_losses(
    loss: Any,
    evaluate: Evaluate,
    skeleton: Skeleton,
    names: Sequence[str],
    tasks: int,
    trees: tuple[Any, Any, Any],
) -> Tensor | None:
    """Return one loss per task by a program; None where the loss itself has to be called.

    That is so where no gradient is wanted, where it would go to a tensor that the loss finds elsewhere, where something
    else watches or casts the operations, and where the trace draws random numbers or cannot be made.

    Args:
        loss: The user's loss.
        evaluate: The same for all tasks; takes `trees`.
        skeleton: The module.
        names: The names of the parameters.
        tasks: The number of tasks.
        trees: Parameters, upper variables and batch.
    """
    flat = tensors(trees)
    wanted = tuple(t.requires_grad for t in flat)
    if not torch.is_grad_enabled() or not any(wanted) or not _is_plain(trees[1:]) or _is_special(flat):
        return None
    root = skeleton.root
    given = {id(t) for t in flat}
    others = {name: value for name, value in contents(root).items() if id(value) not in given}
    form = map_tensors(lambda t: _PLACE, trees)
    parts = ("losses", loss, skeleton, tuple(configuration(root)), others, tuple(names), tasks, form)
    engine, captured = engine_for(loss, parts, accelerators(flat))
    pair = _pair(engine, captured, evaluate, trees, flat, wanted)
    if pair is None or _loses_gradients(pair, captured):
        return None
    call = _Call(pair, captured, evaluate, form, [(module, module.training) for module in root.modules()])
    result: Tensor = TracedLosses.apply(call, *flat)  # type: ignore[no-untyped-call]
    return result


def _is_special(flat: Sequence[Tensor]) -> bool:
    """Whether a transform, a tracer or autocast is at work."""
    return are_transformed(*flat) or is_traced() or any(map(torch.is_autocast_enabled, _kinds(flat)))


def _kinds(flat: Sequence[Tensor]) -> set[str]:
    return {"cpu", *(t.device.type for t in flat)}


@contextlib.contextmanager
def _without_autocast(flat: Sequence[Tensor]) -> Iterator[None]:
    """As in the first call: with autocast no program is used."""
    with contextlib.ExitStack() as stack:
        for kind in _kinds(flat):
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def _loses_gradients(pair: Pair, captured: Sequence[Tensor]) -> bool:
    """Whether a constant of a program requires grad, or shares its memory with a tensor that does."""
    live = {address(t) for t in captured if t.requires_grad}
    return any(address(captured[c]) in live for c in pair.ahead.constants if isinstance(c, int))


def _is_plain(tree: Any) -> bool:
    """Whether a tree has nothing but tensors and plain values: a module, say, has tensors that `tensors` passes by."""
    if isinstance(tree, dict):
        return all(map(_is_plain, tree.values()))
    return isinstance(tree, (Tensor, *PLAIN)) or (isinstance(tree, CONTAINERS) and all(map(_is_plain, tree)))


def _pair(
    engine: Engine,
    captured: Sequence[Tensor],
    evaluate: Evaluate,
    trees: Any,
    flat: Sequence[Tensor],
    wanted: Sequence[bool],
) -> Pair | None:
    """Return the loss and its pull-back as graphs, traced if they are new."""
    key = (tuple(map(layout, flat)), wanted)
    if key in engine.pairs:
        return engine.pairs[key]
    if len(engine.pairs) >= _MOST_LAYOUTS:
        return None
    values = [t.detach() for t in flat]
    ambient = Ambient(values)
    rng = ambient.rng()
    try:
        with engine.compiling():
            with torch.no_grad():
                found = evaluate(replace_tensors(trees, values))
            ones = torch.ones_like(found, memory_format=torch.contiguous_format)
            function = _with_pull_back(evaluate, trees, wanted)
            pair = build_pair(function, values, [ones], state=0, first=1, captured=captured, choices=engine.choices)
    except Exception:  # the loss is called, and says by itself what is wrong
        pair = None
    finally:
        ambient.set_rng(rng)
    if pair is not None and (pair.draws or any(isinstance(c, Tensor) for c in pair.ahead.constants)):
        pair = None
    engine.pairs[key] = pair
    return pair


def _with_pull_back(evaluate: Evaluate, trees: Any, wanted: Sequence[bool]) -> Function:
    """Return a function of flat tensors, and of cotangents of the losses: the losses, and what is pulled back."""

    def function(*given: Tensor) -> list[Tensor | None]:
        *values, cotangents = given
        leaves = [t.detach().requires_grad_(w) for t, w in zip(values, wanted, strict=True)]
        with torch.enable_grad():
            found = evaluate(replace_tensors(trees, leaves))
            pulled = _pulled(found, leaves, cotangents, create_graph=False)
        return [found.detach(), *pulled]

    return function


def _pulled(losses: Tensor, leaves: Sequence[Tensor], cotangents: Tensor, *, create_graph: bool) -> list[Tensor | None]:
    """Return the cotangents of the leaves that require grad, and None for the others."""
    by = [leaf for leaf in leaves if leaf.requires_grad]
    found = iter(torch.autograd.grad(losses, by, cotangents, create_graph=create_graph, allow_unused=True))
    return [next(found) if leaf.requires_grad else None for leaf in leaves]


class TracedLosses(torch.autograd.Function):
    """The losses as one node of the autograd graph."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *flat: Tensor) -> Tensor:
        """Run the first graph."""
        losses, *saved = call.pair.ahead([t.detach() for t in flat], call.pair.ahead.extra(call.captured))
        ctx.call, ctx.versions = call, call.pair.versions(call.captured)
        ctx.save_for_backward(*flat, *saved)
        found: Tensor = losses
        return found

    @staticmethod
    def backward(ctx: Any, cotangents: Tensor) -> Any:
        """Run the second graph; call the loss anew if the caller wants a graph of the backward pass."""
        call: _Call = ctx.call
        for tensor, version in ctx.versions:
            if version_of(tensor) != version:
                raise RuntimeError(changed_in_place("a tensor from the closure of a loss", tensor))
        count = len(ctx.needs_input_grad) - 1
        flat, saved = ctx.saved_tensors[:count], ctx.saved_tensors[count:]
        if torch.is_grad_enabled() or are_transformed(cotangents) or is_traced():
            return None, *call.again(flat, cotangents)
        inputs = [*(t.detach() for t in flat), *saved, cotangents.contiguous()]
        return None, *call.pair.back(inputs, call.pair.back.extra(call.captured))
