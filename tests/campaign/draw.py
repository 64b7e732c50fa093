"""Random configurations of an inner loop: the problem, the rule, the aggregation, the adjoint, what is learned."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

TREES = ("vector", "tree", "odd tree", "complex")
MODULES = ("mlp", "conv", "lstm", "attention", "tied", "frozen", "odd module", "dropout", "spectral", "shared")
ACTIVATIONS = ("tanh", "relu", "softplus", "gelu", "sin")
RULES: dict[str, dict[str, Any]] = {
    "SGD": {},
    "Adam": {"betas": (0.7, 0.8), "eps": 0.01},
    "AdamW": {"betas": (0.7, 0.8), "eps": 0.01, "weight_decay": 0.1},
    "Adamax": {"betas": (0.7, 0.8), "eps": 0.01},
    "NAdam": {"betas": (0.7, 0.8), "eps": 0.01, "momentum_decay": 0.1},
    "RAdam": {"betas": (0.7, 0.9), "eps": 0.01},
    "RMSprop": {"rule_alpha": 0.7, "eps": 0.02},
    "Adagrad": {"lr_decay": 0.1, "eps": 0.01},
    "Adadelta": {"rho": 0.7, "eps": 0.01},
    "ASGD": {"lambd": 0.1, "rule_alpha": 0.75, "t0": 1.0},
    "Rprop": {},
    "Adafactor": {"weight_decay": 0.1},
    "FISTA": {},
}
RATES = {"Adam": 0.1, "AdamW": 0.1, "Adamax": 0.1, "NAdam": 0.1, "RAdam": 0.1, "RMSprop": 0.03, "Adagrad": 0.2,
         "Adadelta": 0.8, "ASGD": 0.3, "Rprop": 0.05, "Adafactor": 0.2, "FISTA": 0.2}  # fmt: skip
ADJOINTS = ("Checkpointed", "every", "slots", "ForwardMode", "Truncated", "FirstOrder", "Guarded")
SEPARABLE = ("l1", "elastic_net", "nonnegative", "box")
COUPLED = ("l2_ball", "l1_ball", "simplex", "group_lasso", "nuclear")
SCHEDULES = ("constant", "harmonic", "polynomial", "geometric", "theory", "function")
SPOILS = ("truncated start", "coupled prox", "alpha", "batches", "captured", "not finite", "inference", "no upper")


@dataclasses.dataclass(frozen=True)
class Config:
    """One configuration; its `str` lists the fields that differ from their defaults."""

    seed: int
    number: int
    family: str
    style: str
    steps: int
    rule: str
    options: dict[str, Any]
    alpha: tuple[str, ...]
    prox: tuple[str, ...]
    adjoint: str
    learn: tuple[str, ...]
    hyper: str = "dict"
    dtype: str = "float64"
    batches: str = "none"
    tasks: int | None = None
    chunk: int | None = None
    compile: str = ""
    activation: str = "tanh"
    training: bool = True
    upper_lr: float | None = None
    last: int = 0
    spoil: str = ""
    later: dict[str, Any] = dataclasses.field(default_factory=dict)  # options of `later.py`, by name

    def __str__(self) -> str:
        fields = [(f.name, getattr(self, f.name), f.default) for f in dataclasses.fields(self) if f.name != "later"]
        fields.append(("later", self.later, {}))
        return " ".join(f"{name}={value}" for name, value, default in fields if value != default and name != "seed")


def draw(seed: int, number: int) -> Config:
    """Return the configuration of a number.

    The list is frozen: a number means the same configuration in every version. `later.py` draws what is new.
    """
    dice = random.Random(f"{seed}:{number}")
    chance = dice.random
    family = dice.choice(TREES * 2 + MODULES)
    module = family in MODULES
    style = dice.choice(("unroll", "unroll", "innerloop") if module else ("rollout", "rollout", "hypergradient"))
    steps = dice.choice((1, 2, 2, 3, 3, 4, 5))
    rule = dice.choice(("SGD",) * 8 + ("Adam",) * 3 + tuple(RULES))
    if (rule == "FISTA" and style == "innerloop") or (rule == "Adafactor" and family == "complex"):
        rule = "SGD"
    if rule in ("Adafactor", "Rprop") and family in ("conv", "attention"):
        rule = "SGD"  # a bias whose gradient vanishes in theory has one of rounding errors, which these two blow up
    if rule == "RAdam":
        steps += 4  # it rectifies from the sixth step on
    count = 2 if style in ("unroll", "innerloop") and chance() < 0.35 else 1

    tasks = dice.choice((2, 3)) if style != "innerloop" and chance() < 0.12 else None
    if family in ("dropout", "lstm") or (tasks and family == "spectral"):
        tasks = None  # masks of tasks are drawn at once there, and an LSTM runs task by task anyway
    adjoint = dice.choice(("Unroll", "Unroll", *ADJOINTS))
    if style == "innerloop":
        adjoint = dice.choice(("Unroll", "Unroll", "Unroll", "Truncated", "FirstOrder"))
    last = dice.randint(1, steps + 1)

    fields: dict[str, Any] = {
        "options": _options(dice, rule),
        "alpha": tuple(_alpha(dice) for _ in range(count)),
        "prox": tuple(_prox(dice, family, rule) for _ in range(count)),
        "hyper": dice.choice(("dict", "dict", "tensor", "module", "none")),
        "batches": dice.choice(("none", "list", "same", "learned")) if not tasks else dice.choice(("list", "learned")),
        "activation": dice.choice(ACTIVATIONS),
        "training": chance() < 0.8,
        "upper_lr": dice.choice((None, 0.05, 0.2)),
        "last": last,
    }
    fields["learn"] = _learn(dice, family, style, rule, adjoint == "Truncated" and last < steps, fields)
    fields["dtype"] = _dtype(dice, family, rule, adjoint, fields)
    if style != "innerloop" and adjoint != "Guarded" and fields["dtype"] == "float64" and chance() < 0.007:
        fields["compile"] = dice.choice(("trace", "reverse", "mixed"))
    if tasks and chance() < 0.3:
        fields["chunk"] = dice.randint(1, tasks)
    if chance() < 0.02:
        fields["spoil"] = dice.choice(SPOILS)
    return Config(seed, number, family, style, steps, rule, adjoint=adjoint, tasks=tasks, **fields)


def _options(dice: random.Random, rule: str) -> dict[str, Any]:
    found = dict(RULES[rule])
    if rule == "SGD" and dice.random() < 0.5:
        found["momentum"] = dice.choice((0.5, 0.9))
        form = dice.choice(("plain", "nesterov", "dampened"))
        found |= {"nesterov": True} if form == "nesterov" else {"dampening": 0.3} if form == "dampened" else {}
    if rule == "RMSprop":
        found |= dice.choice(({}, {"centered": True}, {"momentum": 0.5}, {"centered": True, "momentum": 0.5}))
    if rule in ("Adam", "AdamW") and dice.random() < 0.3:
        found["amsgrad"] = True
    if rule not in ("Rprop", "AdamW", "Adafactor") and dice.random() < 0.25:
        found["weight_decay"] = 0.1
    if dice.random() < 0.05:
        found["maximize"] = True
    return found


def _alpha(dice: random.Random) -> str:
    return "0" if dice.random() < 0.4 else dice.choice(("number", *SCHEDULES))


def _prox(dice: random.Random, family: str, rule: str) -> str:
    if family == "complex" or rule == "Rprop" or dice.random() < 0.7:
        return ""
    return dice.choice(SEPARABLE + COUPLED)


def _learn(
    dice: random.Random, family: str, style: str, rule: str, cut: bool, fields: dict[str, Any]
) -> tuple[str, ...]:
    """What is differentiated besides `hyper`: settings of the first group, the start, batches, a backbone."""
    options, found = fields["options"], []
    if dice.random() < 0.3 and not cut:
        found.append("start")
    if dice.random() < 0.25:
        found.append("lr list" if dice.random() < 0.3 and family not in ("complex", "odd tree") else "lr")
        if found[-1] == "lr list" and (fields["prox"][0] in COUPLED or rule in ("ASGD", "Adafactor", "Rprop")):
            found[-1] = "lr"
    if fields["alpha"][0] != "0" and dice.random() < 0.3:
        found.append("upper_lr")
    if fields["alpha"][0] in ("number", "constant", "harmonic", "polynomial", "geometric") and dice.random() < 0.3:
        found.append("alpha")
    for name in ("momentum", "weight_decay", "eps", "betas"):
        if name in options and dice.random() < 0.2 and (name, rule) != ("betas", "RAdam"):
            found.append(name)
    if fields["prox"][0] not in ("", "nonnegative") and dice.random() < 0.4:
        found.append("strength of hyper" if style != "innerloop" and dice.random() < 0.4 else "strength")
    if family == "frozen":
        found.append("backbone")
    if fields["batches"] == "learned":
        found.append("batches")
    if fields["hyper"] == "none" and not found:
        fields["hyper"] = "tensor"
    return tuple(found)


def _dtype(dice: random.Random, family: str, rule: str, adjoint: str, fields: dict[str, Any]) -> str:
    """Low precision where the loop is smooth: on the two sides of a kink rounding decides."""
    smooth = fields["activation"] != "relu" and not any(fields["prox"]) and not fields["options"].get("amsgrad")
    if not smooth or family == "complex" or rule in ("Rprop", "Adamax", "RMSprop", "Adafactor"):
        return "float64"
    draw = dice.random()
    if draw < 0.1:
        return "float32"
    plain = family in ("vector", "tree", "odd tree", "mlp", "tied") and rule in ("SGD", "Adam", "FISTA")
    return "bfloat16" if draw < 0.14 and plain and "lr list" not in fields["learn"] else "float64"
