"""Which rule is meant by a class or an object, and which settings are refused."""

from __future__ import annotations

import inspect
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from installed import needs_torch
from rule_cases import (
    CASES,
    RENAMED,
    SWITCHES,
    tensor,
    unroll,
)
from torch import Tensor, optim

from bda_optim._step.rules.base import ParameterRule
from bda_optim._step.rules.fista import FISTA
from bda_optim._step.rules.resolve import REFUSED, RULES, resolve
from bda_optim._step.rules.sgd import SGD
from bda_optim._support.types import Move

YOUNGER: dict[Any, dict[str, Any]] = {optim.Adam: {"decoupled_weight_decay": False}}
"""Settings that torch's class has since 2.7: on an older torch our rule has them all the same."""

STRICTER = {(optim.ASGD, "lambd"), (optim.ASGD, "rule_alpha")}
"""Settings whose negative numbers torch refuses since 2.15, and we on every torch."""

pytestmark = pytest.mark.usefixtures("doubles")  # torch.optim keeps some scalars of its state in the default dtype


def test_every_optimizer_of_torch_is_supported_or_refused() -> None:
    known = {v for v in vars(optim).values() if isinstance(v, type) and issubclass(v, optim.Optimizer)}
    supported, refused = set(RULES), {getattr(optim, name) for name in REFUSED if hasattr(optim, name)}
    assert known - {optim.Optimizer} == supported | refused
    assert supported == {case.kind for case in CASES}
    for kind in supported:
        rule = resolve(kind)
        assert rule.name == kind.__name__ and rule.elementwise == (kind is not optim.Adafactor)
        signature = inspect.signature(kind).parameters.values()
        expected = {RENAMED.get(p.name, p.name): p.default for p in signature if p.name not in {"params", *SWITCHES}}
        assert dict(rule.defaults) == {**YOUNGER.get(kind, {}), **expected}
        rule.validate(rule.defaults)


@pytest.mark.parametrize(
    ("kind", "error", "words"),
    [
        (
            optim.LBFGS,
            ValueError,
            "must be differentiable; got torch.optim.LBFGS: a line search.*Use `bda_optim.FISTA`",
        ),
        (optim.SparseAdam, ValueError, "got torch.optim.SparseAdam: sparse gradients.*Use `torch.optim.Adam`"),
        pytest.param(
            getattr(optim, "Muon", None),
            ValueError,
            "got torch.optim.Muon: it iterates in bfloat16.*Use `torch.optim.AdamW`",
            marks=needs_torch("2.9", "torch.optim.Muon"),
        ),
        (optim.SGD([torch.zeros(1)], 0.1), TypeError, "must be a class.*got an instance of SGD. Pass the class"),
        (type("Mine", (optim.Adam,), {}), TypeError, "got .*Mine, whose `step` cannot be honoured. Use ASGD, Adadelta"),
        (type("LBFGS", (optim.SGD,), {}), TypeError, "LBFGS, whose `step` cannot be honoured"),
        (optim.Optimizer, TypeError, "cannot be honoured"),
        ("adam", TypeError, "a class of torch.optim .ASGD.*got 'adam', which lacks name, defaults.*Derive a rule"),
        (dict, TypeError, "which lacks name, defaults"),
    ],
)
def test_refusals(kind: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        resolve(kind)


def test_rules_resolve_to_themselves() -> None:
    class Sign(ParameterRule):
        defaults = {"lr": 0.1}  # noqa: RUF012

        def _move(self, grad: Tensor, state: Any, param: Tensor, s: Any) -> Any:
            return Move(grad.sign(), s["lr"]), {"step": state["step"] + 1}

    own = Sign()
    assert resolve(own) is own and resolve(Sign) == own and resolve(None) == SGD() == resolve(SGD)
    assert resolve(FISTA) == FISTA() != SGD() and repr(resolve(optim.Adam)) == "Adam()"
    assert pickle.loads(pickle.dumps(FISTA())) == FISTA() and hash(SGD()) == hash(SGD())
    (y,), _ = unroll(own, {"lr": 0.1}, [torch.tensor([1.0])], loss=lambda p, x, k: p[0].square().sum(), steps=3)
    torch.testing.assert_close(y.detach(), torch.tensor([0.7]))
    with pytest.raises(NotImplementedError, match="does not define `_move`"):
        ParameterRule().update([torch.ones(1)], ({},), [torch.ones(1)], {})


@pytest.mark.parametrize(
    ("kind", "settings", "words"),
    [
        (optim.SGD, {"lr": -0.1}, r"`lr` of SGD must be at least 0; got -0.1. The default is 0.001."),
        (optim.SGD, {"lr": math.nan}, "`lr` of SGD must be at least 0; got nan"),
        (optim.SGD, {"lr": "0.1"}, "`lr` of SGD must be at least 0; got 0.1"),
        (optim.SGD, {"lr": True}, "`lr` of SGD must be at least 0; got True"),
        (optim.SGD, {"momentum": -1}, "`momentum` of SGD must be at least 0; got -1"),
        (optim.SGD, {"nesterov": True}, "`nesterov` needs a momentum above 0 and dampening 0; got `momentum`=0.0"),
        (optim.SGD, {"nesterov": True, "momentum": 0.9, "dampening": 0.1}, "`nesterov` needs"),
        (optim.SGD, {"nesterov": 1}, "`nesterov` of SGD must be True or False; got 1"),
        (optim.SGD, {"foreach": True}, "SGD has no such setting; got `foreach`. It takes `lr`, `momentum`"),
        (
            optim.Adam,
            {"eps": torch.ones(2)},
            r"as a tensor be floating-point and have one element; got a .* shape \(2,\)",
        ),
        (optim.SGD, {"lr": torch.tensor(1)}, "got a torch.int64 tensor"),
        (optim.Adam, {"betas": (0.9, 1.0)}, r"`betas` of Adam must lie in \[0, 1\); got 1.0"),
        (optim.Adam, {"betas": 0.9}, "`betas` of Adam must have 2 entries; got 0.9"),
        (optim.Adam, {"betas": (0.9, None)}, "`betas` of Adam must lie in"),
        (optim.Adam, {"eps": -1e-8}, "`eps` of Adam must be at least 0"),
        (optim.AdamW, {"decoupled_weight_decay": True}, "AdamW has no such setting"),
        (optim.NAdam, {"momentum_decay": -1.0}, "`momentum_decay` of NAdam"),
        (optim.RMSprop, {"alpha": 0.9}, "RMSprop has no such setting; got `alpha`. It takes .*`rule_alpha`"),
        (optim.RMSprop, {"rule_alpha": -0.1}, "`rule_alpha` of RMSprop must be at least 0"),
        (
            optim.Rprop,
            {"etas": (0.5, 0.9)},
            r"`etas` of Rprop must satisfy 0 < etas\[0\] < 1 < etas\[1\]; got \(0.5, 0.9\)",
        ),
        (optim.Rprop, {"etas": (tensor(0.5), 1.2)}, "`etas` of Rprop must be a plain number: it cannot be learned"),
        (optim.Adagrad, {"lr_decay": -1.0}, "`lr_decay` of Adagrad"),
        (
            optim.Adagrad,
            {"initial_accumulator_value": -1.0},
            "`initial_accumulator_value` of Adagrad must be at least 0",
        ),
        (optim.Adadelta, {"rho": 1.5}, r"`rho` of Adadelta must lie in \[0, 1\]; got 1.5"),
        (optim.ASGD, {"weight_decay": -1.0}, "`weight_decay` of ASGD must be at least 0"),
        (optim.Adafactor, {"d": 0.5}, "`d` of Adafactor must be at least 1; got 0.5"),
        (optim.Adafactor, {"beta2_decay": 0.1}, "`beta2_decay` of Adafactor must be at most 0; got 0.1"),
        (optim.Adafactor, {"eps": (1e-3, None)}, "`eps` of Adafactor must be at least 0; got None"),
        (
            FISTA,
            {"momentum": 0.9},
            "FISTA has no such setting; got `momentum`. It takes `lr`, `weight_decay`, `maximize`",
        ),
    ],
)
def test_settings_out_of_range(kind: Any, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        resolve(kind).validate(settings)


def test_what_torch_refuses_is_refused() -> None:
    """`validate` rejects exactly the numbers that the constructors of the newest torch.optim reject."""
    for kind in RULES:
        rule = resolve(kind)
        for key, default in rule.defaults.items():
            if isinstance(default, bool):
                continue
            for value in (-1.0, 0.0, 0.5, 1.0, 2.0):
                given = tuple(value for _ in default) if isinstance(default, tuple) else value
                theirs = {"alpha" if key == "rule_alpha" else key: given}
                accepted = not ((kind, key) in STRICTER and value < 0) and _accepts(
                    lambda kind=kind, theirs=theirs: kind([torch.zeros(1)], **theirs)
                )
                ours = _accepts(lambda rule=rule, key=key, given=given: rule.validate({key: given}))
                stricter = (kind, key) in STRICTER and value < 0
                assert ours == (accepted and not stricter), f"{kind.__name__} {theirs}"


def _accepts(call: Callable[[], Any]) -> bool:
    try:
        call()
    except ValueError:
        return False
    return True
