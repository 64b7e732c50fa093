"""Rules and proximal maps of a user's own, and what the package says where one is incomplete."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import bda_optim as bda
from bda_optim._step.rules.memory import complete_entry, complete_memory
from bda_optim._step.rules.resolve import resolve

pytestmark = pytest.mark.usefixtures("doubles")


class HeavyBall(bda.Rule):
    """``b = momentum b + g``, ``D = lr b``: SGD with momentum."""

    defaults: ClassVar = {"lr": 0.1, "momentum": 0.9}

    def init(self, params: Sequence[Tensor], settings: Any) -> Any:
        return tuple({"b": torch.zeros_like(p)} for p in params)

    def update(self, grads: Any, state: Any, params: Any, settings: Any) -> Any:
        new = [s["b"] if g is None else settings["momentum"] * s["b"] + g for g, s in zip(grads, state, strict=True)]
        moves = [None if g is None else bda.Move(b, settings["lr"]) for g, b in zip(grads, new, strict=True)]
        return moves, tuple({"b": b} for b in new)


class Plain(bda.Rule):
    """Gradient descent, which remembers nothing."""

    defaults: ClassVar = {"lr": 0.1}
    elementwise = True

    def update(self, grads: Any, state: Any, params: Any, settings: Any) -> Any:
        return [None if g is None else bda.Move(g, settings["lr"]) for g in grads], state


class Foreign:
    """A rule that derives from nothing."""

    name = "Foreign"
    defaults: ClassVar = {"lr": 0.1}
    elementwise = True

    def validate(self, settings: Any) -> None:
        if settings["lr"] == 13:
            raise ValueError("unlucky")

    def init(self, params: Any, settings: Any) -> Any:
        return {"count": 0}

    def point(self, params: Any, state: Any, settings: Any) -> Any:
        return params

    def update(self, grads: Any, state: Any, params: Any, settings: Any) -> Any:
        return [None if g is None else bda.Move(g, settings["lr"]) for g in grads], {"count": state["count"] + 1}


def lower(y: Any, x: Tensor, batch: Any) -> Tensor:
    return 0.5 * ((y["a"] - x) ** 2).sum() + (y["b"] * x).cos().sum()


def upper(y: Any, x: Tensor, batch: Any) -> Tensor:
    return (y["a"] * y["b"]).sum() + x.square().sum()


def hypergradient(rule: Any, adjoint: Any = None, **options: Any) -> bda.Hypergradient:
    y = {"a": torch.tensor([0.3, -1.0]), "b": torch.tensor([0.7, 0.2])}
    x = torch.tensor([1.0, 2.0])
    chosen = {"steps": 5, "alpha": bda.harmonic(0.5), "upper_lr": 0.05, **options}
    return bda.hypergradient(lower, upper, y, x, rule=rule, adjoint=adjoint or bda.Unroll(), **chosen)


ADJOINTS = [bda.Unroll(), bda.Checkpointed(), bda.ForwardMode()]


@pytest.mark.parametrize("adjoint", ADJOINTS, ids=lambda a: type(a).__name__)
@pytest.mark.parametrize(
    ("own", "built_in", "settings"),
    [
        (HeavyBall, torch.optim.SGD, {"lr": 0.2, "momentum": 0.8}),
        (HeavyBall(), torch.optim.SGD, {"lr": 0.2, "momentum": 0.8}),
        (Plain, None, {"lr": 0.2}),
        (Foreign(), None, {"lr": 0.2}),
    ],
)
def test_rules_of_the_users_own(own: Any, built_in: Any, settings: Any, adjoint: Any) -> None:
    got = hypergradient(own, adjoint, **settings)
    want = hypergradient(built_in, **settings)
    torch.testing.assert_close(got.value, want.value)
    torch.testing.assert_close(got.grad, want.grad)


@pytest.mark.parametrize("own", [HeavyBall, Plain, Foreign], ids=lambda rule: rule.__name__)
def test_over_tasks_and_with_a_learned_rate(own: Any) -> None:
    lr = torch.tensor(0.2, requires_grad=True)
    batches = [torch.randn(3, 2)] * 4
    options: dict[str, Any] = {"steps": 4, "lr": lr, "rule": own}
    together = bda.rollout(task_loss, None, torch.ones(2), batches=batches, tasks=3, **options)
    alone = [bda.rollout(task_loss, None, torch.ones(2), batches=[b[i] for b in batches], **options) for i in range(3)]
    torch.testing.assert_close(together, torch.stack(alone))
    grads = [torch.autograd.grad(y.square().sum(), lr)[0] for y in (together, torch.stack(alone))]
    torch.testing.assert_close(*grads)


def task_loss(y: Tensor, x: Any, batch: Tensor) -> Tensor:
    return ((y - batch) ** 2).sum() + y.sin().sum()


@pytest.mark.parametrize("own", [HeavyBall, Plain, Foreign], ids=lambda rule: rule.__name__)
def test_in_an_optimizer(own: Any) -> None:
    """Steps in place, a rollout that is committed and a state_dict go on where the rule was."""
    module = nn.Linear(2, 1)
    data = torch.randn(5, 2)
    inner = bda.BDAInnerOptimizer(module.parameters(), lr=0.1, rule=own)

    def loss(net: Any, hyper: Any = None, batch: Any = None) -> Tensor:
        return net(data).square().mean()

    want = bda.rollout(
        lambda y, x, b: torch.func.functional_call(module, y, (data,)).square().mean(),
        None,
        {name: p.detach().clone() for name, p in module.named_parameters()},
        steps=4,
        lr=0.1,
        rule=own,
    )
    inner.step(lambda: (loss(module), loss(module)))
    inner.commit(inner.unroll(module, loss, None, hyper=None, steps=2))
    again = bda.BDAInnerOptimizer(module.parameters(), lr=0.1, rule=own)
    again.load_state_dict(inner.state_dict())
    again.step(lambda: (loss(module), loss(module)))
    for name, p in module.named_parameters():
        torch.testing.assert_close(p.detach(), want[name])
    other = bda.BDAInnerOptimizer(module.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=rf"belongs to the rule {own.__name__}; got an optimizer with SGD"):
        other.load_state_dict(inner.state_dict())


def test_what_a_rule_lacks_is_named() -> None:
    class Half:
        defaults: ClassVar = {"lr": 0.1}

        def init(self, params: Any, settings: Any) -> Any:
            return ()

        def update(self, grads: Any, state: Any, params: Any, settings: Any) -> Any:
            return [], ()

    class NoRate(bda.Rule):
        defaults: ClassVar = {"speed": 1.0}

    class NoDefaults(bda.Rule):
        pass

    with pytest.raises(TypeError, match=r"which lacks name, elementwise, validate, point. Derive a rule of your own"):
        hypergradient(Half())
    with pytest.raises(TypeError, match=r"`lr` among them; got {'speed': 1.0} of NoRate. Write `defaults = "):
        hypergradient(NoRate)
    with pytest.raises(TypeError, match="got None of NoDefaults"):
        hypergradient(NoDefaults())
    with pytest.raises(TypeError, match=r"HeavyBall has no setting `dampening`; it takes alpha, .*lr, momentum"):
        hypergradient(HeavyBall, dampening=0.1)
    with pytest.raises(ValueError, match="unlucky"):
        hypergradient(Foreign(), lr=13)


def test_a_transformation_is_still_one() -> None:
    torchopt = pytest.importorskip("torchopt")
    assert resolve(torchopt.sgd(lr=0.1)).name == "Transformation"


# What a rule remembers.


def test_a_memory_is_completed() -> None:
    fresh = {"step": 0, "momentum_buffer": 0.0}
    assert complete_entry(fresh, {}) == fresh
    assert complete_entry(fresh, {"momentum_buffer": 2.0}) == {"step": 1, "momentum_buffer": 2.0}
    assert complete_entry(fresh, {"step": 7}) == {"step": 7, "momentum_buffer": 0.0}
    assert complete_entry({}, {"momentum_buffer": 2.0}) == {"momentum_buffer": 2.0}, "momentum is off for a while"
    assert complete_memory((fresh, fresh), None) == (fresh, fresh)
    assert complete_memory((fresh, fresh), ({}, {"step": 7})) == (fresh, {"step": 7, "momentum_buffer": 0.0})
    assert complete_memory({"count": [0]}, {"count": [5]}) == {"count": [5]}
    assert complete_memory((), ()) == ()
    count = torch.tensor(5)
    assert complete_memory(torch.tensor(0), count) is count


@pytest.mark.parametrize(
    ("kind", "first", "then"),
    [
        (torch.optim.SGD, {"momentum": 0.9}, {"dampening": 0.5}),
        (torch.optim.SGD, {"momentum": 0.0}, {"momentum": 0.9}),
        (torch.optim.SGD, {"momentum": 0.9}, {"momentum": 0.0}),
        (torch.optim.Adam, {"amsgrad": True}, {"amsgrad": False}),
        (torch.optim.RMSprop, {"centered": True, "momentum": 0.5}, {"momentum": 0.0}),
    ],
)
def test_a_setting_is_switched_while_the_optimizer_runs(kind: Any, first: Any, then: Any) -> None:
    """As torch.optim goes on: with the buffers that are there, and new ones where there are none."""
    data = torch.randn(5, 2)
    results = []
    for own in (False, True):
        p = nn.Parameter(torch.tensor([1.0, -2.0]))
        make = (lambda *a, **k: bda.BDAInnerOptimizer(*a, rule=kind, **k)) if own else kind
        optimizer = make([p], lr=0.1, **first)
        for step in range(6):
            if step in (2, 4):
                optimizer.param_groups[0].update(then if step == 2 else first)
            optimizer.zero_grad()
            ((data @ p).square().mean() + p.sin().sum()).backward()
            optimizer.step()
        results.append(p.detach())
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-14)


# Proximal maps.


def test_the_module_of_proximal_maps() -> None:
    from bda_optim.prox import l1

    assert bda.prox.l1 is l1
    names: dict[str, Any] = {}
    exec("from bda_optim.prox import *", names)
    assert {name for name in names if not name.startswith("__")} == set(dir(bda.prox)) == set(bda.prox.__all__)
    for name in ("math", "torch", "Any", "NO_HYPER"):
        assert name not in dir(bda.prox)


def test_a_function_is_a_proximal_map() -> None:
    built_in = hypergradient(None, lr=0.2, prox=bda.prox.l1(0.3))
    own = hypergradient(None, lr=0.2, prox=lambda y, step, hyper: y.sign() * (y.abs() - 0.3 * step).clamp(min=0))
    torch.testing.assert_close(own.grad, built_in.grad)
