"""A problem that is still what it was finds its engine without a key; whatever changed is noticed."""

from __future__ import annotations

import dataclasses
import functools
import gc
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from bda_optim._compiled import trace_key
from bda_optim._compiled.same import same_as

scale = 2.0


@dataclasses.dataclass
class Options:
    rate: float
    loss: Any = None


class Plain:
    def __init__(self) -> None:
        self.level = 1

    def loss(self, x: Tensor) -> Tensor:
        return self.level * x


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.act, self.weights = torch.tanh, [1.0, 2.0]
        self.register_buffer("shift", torch.zeros(2))
        self.fixed = nn.Parameter(torch.ones(2), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return scale * self.act(x)


settings = types.ModuleType("settings")


class Level:
    height = 1.0


def reads_attributes(x: Tensor) -> Tensor:
    return settings.rate * Level.height * x


def closure(value: Any) -> Callable[..., Any]:
    return lambda x: x * value


def uses_global(x: Tensor) -> Tensor:
    return scale * x


def default(x: Tensor, factor: float = 2.0) -> Tensor:
    return factor * x


TENSOR = torch.ones(2)


@pytest.mark.parametrize(
    "value",
    [1, "a", None, torch.float64, TENSOR, [1, TENSOR], {"a": (1, 2)}, Options(0.1), closure(3), closure(TENSOR),
     closure([1, 2]), uses_global, nn.Linear(2, 2), Plain().loss, functools.partial(default, factor=3.0), torch.tanh],
    ids=lambda value: type(value).__name__,  # the same in every process
)  # fmt: skip
def test_what_is_the_same_is_found(value: Any) -> None:
    same = same_as((value, value))
    assert same((value, value))
    assert not same((value, 17.5)) and not same([value, value]) and not same((value,))


def test_functions_and_dataclasses_made_anew() -> None:
    assert same_as(closure(3))(closure(3)) and not same_as(closure(3))(closure(4))
    assert same_as(Options(0.1))(Options(0.1)) and not same_as(Options(0.1))(Options(0.2))
    assert not same_as(closure(torch.ones(1)))(closure(torch.ones(1)))  # other data: a new look at its layout
    assert not same_as(1)(1.0) and not same_as(closure(3))(lambda x: x)


def changes() -> dict[str, tuple[Any, Callable[[], Any]]]:
    """What is looked at, and how it changes."""
    net, plain, options = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1)), Plain(), Options(0.1, default)
    items, table, tensor, chosen = [1, 2], {"a": 1}, torch.ones(2), {1, 2}
    scaled, level, array, settings.rate = Scaled(), Level(), np.ones(2), 1.0
    handle = net[1].register_forward_hook(lambda *a: None)

    def own(x: Tensor, factor: float = 1.0) -> Tensor:
        return factor * x

    return {
        "a flag of a module": (closure(net), net.eval),
        "a number of a module": (closure(net), lambda: setattr(net[1], "p", 0.2)),
        "a hook": (closure(net), lambda: net[0].register_forward_hook(lambda *a: None)),
        "another hook": (closure(net), lambda: (handle.remove(), net[1].register_forward_hook(lambda *a: None))),
        "a function of a module": (closure(scaled), lambda: setattr(scaled, "act", torch.sigmoid)),
        "a list of a module": (closure(scaled), lambda: scaled.weights.append(3.0)),
        "a forward pass": (closure(scaled), lambda: setattr(scaled, "forward", lambda x: x)),
        "a global of a forward pass": (closure(scaled), lambda: globals().update(scale=globals()["scale"] + 1)),
        "an attribute of a class": (closure(level), lambda: setattr(Level, "height", Level.height + 1)),
        "an attribute of a named class": (reads_attributes, lambda: setattr(Level, "height", Level.height + 1)),
        "an attribute of a Python module": (reads_attributes, lambda: setattr(settings, "rate", 2.0)),
        "an attribute of a function": (default, lambda: setattr(default, "calls", getattr(default, "calls", 0) + 1)),
        "an array": (closure(array), lambda: array.fill(2.0)),
        "a set": (closure(chosen), lambda: chosen.add(3)),
        "a loose tensor": (closure(net), lambda: setattr(net[0], "mask", torch.ones(1))),
        "an attribute": (plain.loss, lambda: setattr(plain, "level", 2)),
        "a field": (closure(options), lambda: setattr(options, "rate", 0.2)),
        "a list": (closure(items), lambda: items.append(3)),
        "an entry": (closure(table), lambda: table.update(a=2)),
        "a key": (closure(table), lambda: table.update(b=2)),
        "a layout": (closure(tensor), lambda: tensor.requires_grad_()),
        "a default": (own, lambda: setattr(own, "__defaults__", (2.0,))),
        "a global": (uses_global, lambda: globals().update(scale=globals()["scale"] + 1)),
    }


@pytest.mark.parametrize("what", changes())
def test_what_changed_is_noticed(what: str) -> None:
    """Where the key of `freeze` changes, the answer is no; also where the object is met at two places."""
    value, change = changes()[what]
    problem = (value, [value])
    same, key = same_as(problem), trace_key.freeze(problem)[0]
    assert same(problem)
    change()
    assert trace_key.freeze(problem)[0] != key
    assert not same(problem)


def test_a_method_that_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, scaled = Plain(), Scaled()
    problem = closure((plain, scaled))
    for kind, name in ((Plain, "loss"), (Scaled, "forward")):
        same, key = same_as(problem), trace_key.freeze(problem)[0]
        assert same(problem)
        monkeypatch.setattr(kind, name, lambda self, x: x)
        assert not same(problem) and trace_key.freeze(problem)[0] != key


@pytest.mark.parametrize("name", ["shift", "fixed"])
def test_another_tensor_of_a_module_is_the_one_that_is_read(name: str) -> None:
    scaled = Scaled()
    problem = closure(scaled)
    same = same_as(problem)
    other = torch.full((2,), 3.0)
    setattr(scaled, name, nn.Parameter(other, requires_grad=False) if name == "fixed" else other)
    assert not same(problem)
    assert any(t is getattr(scaled, name) for t in trace_key.freeze(problem)[1])


def test_tensors_without_a_layout_are_passed_over() -> None:
    module = nn.Sequential(nn.LazyLinear(2), nn.Identity())
    module.register_buffer("sparse", torch.eye(2).to_sparse())
    assert trace_key.freeze(closure(module))[1] == [] and same_as(closure(module))(closure(module))


def test_arrays_are_compared_by_value_up_to_a_size() -> None:
    assert same_as(closure(np.ones(2)))(closure(np.ones(2))) and same_as(np.float32(2.0))(np.float32(2.0))
    assert not same_as(np.ones(2))(np.ones(2, dtype=np.float32)) and not same_as(np.ones(2))([1.0, 1.0])
    large = np.ones(10_000)
    assert same_as(large)(large) and not same_as(large)(large.copy())


def test_an_object_at_two_places_is_the_same_at_both() -> None:
    cell = [1]
    one, other = closure(cell), closure(cell)
    same = same_as((one, one))
    assert same((one, one)) and not same((one, other)) and not same((other, one))


def test_a_container_that_holds_itself() -> None:
    items: list[Any] = [1]
    items.append(items)
    assert not same_as(closure(items))(closure(items))


def test_nothing_is_kept_alive() -> None:
    tensor, net = torch.ones(3), nn.Linear(2, 2)
    function = closure((tensor, net))
    same = same_as(function)
    references = [weakref.ref(x) for x in (tensor, net, function)]
    del tensor, net, function
    gc.collect()
    assert [reference() for reference in references] == [None] * 3
    assert not same(closure((torch.ones(3), nn.Linear(2, 2))))
