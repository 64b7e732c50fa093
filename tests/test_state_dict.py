"""BDAInnerOptimizer saved, loaded, copied and pickled."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from optimizers import EXACT, descend, every_rule, lower, make, unchanged, upper
from problems import mlp
from torch import Tensor, optim

import bda_optim as bda
from bda_optim._support.types import Move

pytestmark = pytest.mark.usefixtures("doubles")


def saved(state: dict[str, Any]) -> dict[str, Any]:
    """The state after `torch.save` and `torch.load(weights_only=True)`."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


THROUGH: dict[str, Callable[[Any], Any]] = {
    "dict": lambda state: state,
    "torch": saved,
    "pickle": lambda state: pickle.loads(pickle.dumps(state)),
}


@pytest.mark.parametrize("through", THROUGH.values(), ids=THROUGH.keys())
@every_rule
def test_a_state_dict_goes_on_where_it_was(
    kind: type[optim.Optimizer], settings: dict[str, Any], through: Callable[[Any], Any]
) -> None:
    model = mlp()
    inner = make(model, kind, settings)
    descend(model, inner, 3)
    other = copy.deepcopy(model)
    fresh = make(other, kind, {})
    fresh.load_state_dict(through(inner.state_dict()))
    mine, theirs = (
        {t.data_ptr() for state in o.state.values() for t in state.values() if isinstance(t, Tensor)}
        for o in (inner, fresh)
    )
    assert not mine & theirs
    assert len(mine) == len(theirs)
    descend(model, inner, 3)
    descend(other, fresh, 3)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
    assert fresh.param_groups[0]["k"] == 6


@pytest.mark.filterwarnings("ignore:the weights of .geometric.:UserWarning")
@pytest.mark.parametrize(
    "alpha",
    [
        bda.constant(0.3),
        bda.harmonic(0.5),
        bda.polynomial(0.5, 0.5),
        bda.theory(0.5, 0.5, 1.0),
        "geometric",
        0.25,
        0.0,
        torch.tensor(0.3, requires_grad=True),
        bda.harmonic(torch.tensor(0.5, requires_grad=True)),
    ],
    ids=str,
)
def test_schedules_and_k_are_in_the_state_dict(alpha: Any) -> None:
    alpha = bda.geometric(0.5, 0.5) if alpha == "geometric" else alpha
    model = mlp()
    inner = bda.BDAInnerOptimizer(model.parameters(), lr=0.1, upper_lr=0.3, alpha=alpha)
    for _ in range(2):
        inner.step(lambda: (lower(model), upper(model)))
    for through in (lambda s: s, saved):
        other = copy.deepcopy(model)
        fresh = bda.BDAInnerOptimizer(other.parameters(), alpha=bda.constant(0.9))
        fresh.load_state_dict(through(inner.state_dict()))
        group = fresh.param_groups[0]
        assert (group["k"], group["upper_lr"], group["lr"]) == (2, 0.3, 0.1)
        loaded = group["alpha"]
        assert type(loaded) is type(alpha)
        constant, original = (getattr(a, "c", a) for a in (loaded, alpha))
        if isinstance(original, Tensor):
            assert constant.requires_grad
            assert constant.is_leaf
            assert constant.data_ptr() != original.data_ptr()
        else:
            assert loaded == alpha
        twin = copy.deepcopy(model)
        reference = bda.BDAInnerOptimizer(twin.parameters(), lr=0.1, upper_lr=0.3, alpha=alpha)
        reference.param_groups[0]["k"] = 2
        fresh.step(lambda other=other: (lower(other), upper(other)))
        reference.step(lambda twin=twin: (lower(twin), upper(twin)))
        assert all(torch.equal(a, b) for a, b in zip(other.parameters(), twin.parameters(), strict=True))


def test_what_cannot_be_written_is_left_out_and_stays_live() -> None:
    model = mlp()

    def alpha(k: int) -> float:
        return 0.1 * k

    prox = bda.prox.l1(lambda hyper: hyper)
    inner = bda.BDAInnerOptimizer(model.parameters(), lr=0.1, alpha=alpha, prox=prox)
    state = saved(inner.state_dict())
    assert "prox" not in state["param_groups"][0]
    assert "alpha" not in state["param_groups"][0]
    assert state["rule"] == "SGD"
    live = bda.prox.l1(torch.tensor(0.1, requires_grad=True) * 2)  # a strength that has a graph
    schedule = bda.harmonic(torch.tensor(0.2, requires_grad=True))
    fresh = bda.BDAInnerOptimizer(model.parameters(), lr=0.5, alpha=schedule, prox=live)
    fresh.load_state_dict(state)
    assert fresh.param_groups[0]["prox"] is live
    assert fresh.param_groups[0]["alpha"] is schedule
    assert fresh.param_groups[0]["lr"] == 0.1
    assert inner.param_groups[0]["prox"] is prox  # writing does not change the live one
    assert inner.param_groups[0]["alpha"] is alpha


def test_learned_rates_are_loaded_as_copies() -> None:
    model = mlp()
    settings = {
        "lr": [torch.full_like(p, 0.1).requires_grad_() for p in model.parameters()],
        "momentum": torch.tensor(0.9, requires_grad=True),
        "upper_lr": torch.tensor(0.2),
    }
    inner = bda.BDAInnerOptimizer(model.parameters(), **settings)
    descend(model, inner, 2)
    for through in (lambda s: s, saved):
        fresh = bda.BDAInnerOptimizer(copy.deepcopy(model).parameters())
        fresh.load_state_dict(through(inner.state_dict()))
        group = fresh.param_groups[0]
        for old, new in [*zip(settings["lr"], group["lr"], strict=True), (settings["momentum"], group["momentum"])]:
            assert torch.equal(old, new)
            assert new.requires_grad
            assert new.is_leaf
            assert old.data_ptr() != new.data_ptr()
        assert not group["upper_lr"].requires_grad
    with torch.no_grad():
        settings["momentum"].fill_(0.0)
    assert group["momentum"] == 0.9


def test_a_state_dict_of_another_kind_is_refused_and_changes_nothing() -> None:
    model = mlp()
    inner = bda.BDAInnerOptimizer(model.parameters(), lr=0.1, rule=optim.Adam)
    descend(model, inner, 2)
    wrong = {
        "belongs to the rule SGD; got an optimizer with Adam": bda.BDAInnerOptimizer(model.parameters()).state_dict(),
        "not written by a BDAInnerOptimizer": optim.Adam(model.parameters()).state_dict(),
        "different number of parameter groups": bda.BDAInnerOptimizer(
            [{"params": [p]} for p in model.parameters()], rule=optim.Adam
        ).state_dict(),
        "doesn't match the size": bda.BDAInnerOptimizer([model[0].weight], rule=optim.Adam).state_dict(),
    }
    for message, state in wrong.items():
        with unchanged(model, inner), pytest.raises(ValueError, match=message):
            inner.load_state_dict(state)


class Halved:
    """A custom rule: half of the gradient. It is at module level, so that it can be pickled."""

    name, defaults, elementwise = "Halved", {"lr": 0.1}, True

    def validate(self, settings: Any) -> None:
        pass

    def init(self, params: Any, settings: Any) -> Any:
        return {"count": torch.zeros(())}

    def point(self, params: Any, state: Any, settings: Any) -> Any:
        return params

    def update(self, grads: Any, state: Any, params: Any, settings: Any) -> Any:
        moves = [None if g is None else Move(g / 2, settings["lr"]) for g in grads]
        return moves, {"count": state["count"] + 1}


@pytest.mark.parametrize("way", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["deepcopy", "pickle"])
def test_copies_carry_the_rule_the_prox_the_schedules_and_the_state(way: Callable[[Any], Any]) -> None:
    for settings in (
        {"rule": optim.Adam, "alpha": bda.harmonic(0.5), "prox": bda.prox.l1(0.1), "upper_lr": 0.3},
        {"momentum": torch.tensor(0.9, requires_grad=True), "alpha": torch.tensor(0.2, requires_grad=True)},
        {"rule": Halved(), "alpha": 0.1},
    ):
        model = mlp()
        inner = bda.BDAInnerOptimizer(model.parameters(), lr=0.1, **settings)
        inner.step(lambda model=model, inner=inner: (lower(model), upper(model)))
        twin, other = way((model, inner))
        assert other.rule.name == inner.rule.name
        assert other.param_groups[0]["prox"] == inner.param_groups[0]["prox"]
        assert other.param_groups[0]["k"] == 1
        for _ in range(2):
            inner.step(lambda model=model: (lower(model), upper(model)))
            other.step(lambda twin=twin: (lower(twin), upper(twin)))
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
        fmodel, copied = (o.unroll(m, lower, upper, steps=2) for o, m in ((inner, model), (other, twin)))
        torch.testing.assert_close(fmodel.params, copied.params, rtol=0, atol=0)


def test_a_rule_whose_state_is_of_the_whole_group_is_kept() -> None:
    model = mlp()
    inner = bda.BDAInnerOptimizer(model.parameters(), rule=Halved())
    other = copy.deepcopy(model)
    descend(model, inner, 3)
    descend(other, optim.SGD(other.parameters(), lr=0.05), 3)
    torch.testing.assert_close(
        [p.detach() for p in model.parameters()], [p.detach() for p in other.parameters()], **EXACT
    )
    assert inner.state[model[0].weight]["group"]["count"] == 3
    fmodel = inner.unroll(model, lower, steps=2)
    inner.commit(fmodel)
    assert inner.state[model[0].weight]["group"]["count"] == 5
    fresh = bda.BDAInnerOptimizer(copy.deepcopy(model).parameters(), rule=Halved())
    fresh.load_state_dict(saved(inner.state_dict()))
    assert next(iter(fresh.state.values()))["group"]["count"] == 5
