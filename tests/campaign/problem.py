"""A configuration as an inner loop: data, parameters, losses and settings, for the package and for the witness."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrizations
from torch.utils import _pytree as pytree

import bda_optim as bda

from . import draw, later, naive
from .draw import Config

ROWS, OUT = 4, 2
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh, "relu": F.relu, "softplus": F.softplus, "gelu": F.gelu, "sin": torch.sin,
}  # fmt: skip
STRENGTHS = {"l1": 0.05, "elastic_net": 0.05, "group_lasso": 0.05, "nuclear": 0.05, "box": 0.4, "l2_ball": 0.7,
             "l1_ball": 0.8, "simplex": 1.0}  # fmt: skip


class Net(nn.Module):
    """The modules of all families: a body, an activation, a head."""

    def __init__(self, body: nn.Module, width: int, activation: Callable[[Tensor], Tensor], take: str = "") -> None:
        super().__init__()
        self.body, self.head, self.activation, self.take = body, nn.Linear(width, OUT), activation, take

    def forward(self, x: Tensor) -> Tensor:
        out = self.body(x, x, x, need_weights=False) if self.take == "attention" else self.body(x)
        if self.take in ("lstm", "attention"):
            out = out[0]
        return self.head(
            self.activation(out if self.take == "" else out.flatten(1) if self.take == "conv" else out[:, -1])
        )


class Tied(nn.Module):
    def __init__(self, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(3, 3, bias=False), nn.Linear(3, 3), nn.Linear(3, OUT)
        self.second.weight, self.activation = self.first.weight, activation

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.activation(self.first(x))))


class Frozen(nn.Module):
    """A frozen layer, an unused one, an integer parameter, and a backbone that the optimizer does not own."""

    def __init__(self, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.backbone, self.frozen, self.head = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, OUT)
        self.unused, self.activation = nn.Linear(2, 2), activation
        self.frozen.requires_grad_(False)
        self.count = nn.Parameter(torch.tensor([1, 2]), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.activation(self.frozen(self.backbone(x)))) + 0.1 * self.count


class Odd(nn.Module):
    """Parameters without dimensions, without elements, and one that only later steps use."""

    def __init__(self, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.gain, self.activation = nn.Linear(3, OUT), nn.Parameter(torch.tensor(0.8)), activation
        self.empty, self.nothing = nn.Parameter(torch.zeros(0)), nn.Parameter(torch.zeros(0, 3))
        self.register_parameter("missing", None)

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * self.activation(self.linear(x)) + self.empty.sum() + (x @ self.nothing.mT).sum()


class Shared(nn.Module):
    """A sub-module under two names, and reached through a plain list."""

    def __init__(self, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.one, self.head = nn.Linear(3, 3), nn.Linear(3, OUT)
        self.two, self.activation, self.order = self.one, activation, [self.one, self.one]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.order:
            x = self.activation(layer(x))
        return self.head(x)

    def by_hand(self, params: dict[str, Tensor], x: Tensor) -> Tensor:
        """The same as a formula."""
        for _ in range(2):
            x = self.activation(x @ params["one.weight"].mT + params["one.bias"])
        return x @ params["head.weight"].mT + params["head.bias"]


def module(family: str, act: Callable[[Tensor], Tensor]) -> nn.Module:
    """Return a fresh module of a family."""
    if family == "conv":
        return Net(nn.Sequential(nn.Conv2d(1, 2, 2), nn.BatchNorm2d(2)), 8, act, "conv")
    if family == "lstm":
        return Net(nn.LSTM(3, 2, batch_first=True), 2, act, "lstm")
    if family == "attention":
        return Net(nn.MultiheadAttention(4, 2, batch_first=True), 4, act, "attention")
    if family == "dropout":
        return Net(nn.Sequential(nn.Linear(3, 6), nn.Dropout(0.4)), 6, act)
    if family == "spectral":
        return Net(parametrizations.spectral_norm(nn.Linear(3, 3)), 3, act).eval()
    simple = {"tied": Tied, "frozen": Frozen, "odd module": Odd, "shared": Shared}
    return simple[family](act) if family in simple else Net(nn.Linear(3, 4), 4, act)


SHAPES = {"conv": (1, 3, 3), "lstm": (3, 3), "attention": (3, 4)}


class Group:
    """A parameter group, for both sides: the package's settings, and what the witness makes of them."""

    def __init__(self, rule: str, names: list[str], settings: dict[str, Any], alpha: Any, weight: Any) -> None:
        self.rule, self.names, self.settings = rule, names, settings
        self.alpha, self._weight = alpha, weight  # the package's, and a function of k
        self.prox: Callable[[Tensor, Any], Tensor] | None = None
        self.map: Any = None

    def of(self, name: str, k: int) -> dict[str, Any]:
        """The settings of one parameter in step k."""
        at = self.names.index(name)
        settings = {key: value[at] if isinstance(value, list) else value for key, value in self.settings.items()}
        return {key: value(k) if callable(value) else value for key, value in settings.items()}

    def weight(self, k: int, name: str = "") -> Any:
        """The weight of the upper direction; None where it is plainly absent."""
        return None if self._weight is None else self._weight(k)


class Problem:
    """A configuration with its tensors; `leaves` are those to differentiate."""

    def __init__(self, config: Config, dtype: torch.dtype | None = None) -> None:
        self.config, self.rule, self.style = config, config.rule, config.style
        self.steps, self.tasks = config.steps, config.tasks
        self.low = getattr(torch, config.dtype)
        self.dtype = dtype or self.low
        self._numbers = torch.Generator().manual_seed(config.number * 7919 + config.seed)
        self.leaves: dict[str, Tensor] = {}
        truncated = config.adjoint == "Truncated" and config.last < config.steps
        self.cut = config.steps - config.last if truncated else 0
        self.first_order = config.adjoint == "FirstOrder"
        self.learns_start = "start" in config.learn
        self.act = ACTIVATIONS[config.activation]
        self.module = self._module() if config.family in draw.MODULES else None
        self._make_start()
        self._make_data()
        self._make_hyper()
        self.groups = self._make_groups()
        self._wrap_hyper()
        self.arguments: dict[str, Any] = {}  # further ones of the call: rollout, hypergradient, unroll, innerloop_ctx
        self.adjoint: dict[str, Any] = {}  # further settings of the adjoint
        self.wrap: Callable[[Any], Any] = lambda how: how  # what is made of the adjoint
        self.tolerance = 1e-7  # of the naive loop
        later.apply(self)

    def _new(self, *shape: int, scale: float = 1.0) -> Tensor:
        wide = scale * torch.randn(shape, generator=self._numbers, dtype=torch.float64)
        return wide.to(self.low).to(self.dtype)

    def _leaf(self, name: str, value: Tensor) -> Tensor:
        self.leaves[name] = value.detach().requires_grad_()
        return self.leaves[name]

    def _number(self, value: float) -> Tensor:
        return torch.tensor(value, dtype=torch.float64).to(self.low).to(self.dtype)

    def _module(self) -> nn.Module:
        made = module(self.config.family, self.act)
        made.train(self.config.training and self.config.family != "spectral")
        for p in made.parameters():
            if p.is_floating_point():
                p.data = self._new(*p.shape, scale=0.6)
        for b in made.buffers():
            if b.is_floating_point():
                b.data = b.data.to(self.low).to(self.dtype)
        if self.config.family == "spectral":
            norm = made.body.parametrizations.weight[0]
            for b in norm.buffers():
                b.data = F.normalize(self._new(*b.shape), dim=0)
        return made

    def _make_start(self) -> None:
        kind, net = self.config.family, self.module
        if net is not None:
            owned = [(n, p) for n, p in net.named_parameters() if p.requires_grad and not n.startswith("backbone")]
            self.start = dict(owned)
            if kind == "frozen":
                self.leaves |= {n: p for n, p in net.named_parameters() if n.startswith("backbone")}
            if self.learns_start:
                self.leaves |= self.start
            return
        if kind == "complex":
            self.tree: Any = {"z": torch.complex(self._new(3), self._new(3))}
        elif kind == "odd tree":
            empties = self._new(0), [self._new(0, 3)]
            self.tree = {"empty": empties[0], "none": empties[1], "scalar": self._new(), "v": self._new(3, OUT)}
        elif kind == "tree":
            self.tree = {"a": [self._new(3, OUT, scale=0.7), self._new(OUT)], "c": (self._new(1),)}
        else:
            self.tree = self._new(3, OUT)
        flat, self._spec = pytree.tree_flatten(self.tree)
        if self.learns_start:
            flat = [self._leaf(f"start {i}", t) for i, t in enumerate(flat)]
            self.tree = pytree.tree_unflatten(flat, self._spec)
        self.start = {str(i): t for i, t in enumerate(flat)}

    def _out(self, net: Any, x: Tensor) -> Tensor:
        if isinstance(net, nn.Module) or callable(net):
            return net(x)
        if isinstance(net, Tensor):
            return self.act(x @ net)
        if "z" in net:
            z = x.to(net["z"].dtype) @ net["z"]
            return torch.stack([self.act(z.real), self.act(z.imag)], -1)
        if "v" in net:
            return self.act(x @ net["v"] + net["scalar"]) + net["empty"].sum() + (x @ net["none"][0].mT).sum()
        return self.act(x @ net["a"][0] + net["a"][1]) * net["c"][0]

    def _make_data(self) -> None:
        front = () if self.tasks is None else (self.tasks,)
        shape = SHAPES.get(self.config.family, (3,))
        targets = (*front, ROWS, OUT)
        self.data = [self._new(*front, ROWS, *shape), self._new(*targets)]
        self.test = {"tx": self._new(*front, ROWS, *shape), "tt": self._new(*targets)}
        kind = self.config.batches
        shift = self._new(*front, 1, OUT, scale=0.3)
        many = [{"x": self._new(*front, ROWS, *shape), "t": self._new(*targets)} for _ in range(self.steps)]
        if kind == "learned":
            shifts = [self._leaf("batch a", shift), self._leaf("batch b", self._new(*front, 1, OUT, scale=0.3))]
            many = [{**batch, "s": shifts[i % 2]} for i, batch in enumerate(many)]
        elif kind == "same":
            many = many[:1] * self.steps
        if self.tasks is not None:
            many = [{**batch, **self.test} for batch in many]
        self.batches = None if kind == "none" else many

    def batch(self, k: int, task: int) -> Any:
        """The batch of step k."""
        found = None if self.batches is None else self.batches[k - 1]
        return found if self.tasks is None else {key: value[task] for key, value in found.items()}

    def last_batch(self, task: int | None = None) -> Any:
        """The batch of the last upper loss."""
        if self.tasks is None:
            return None
        return self.test if task is None else {key: value[task] for key, value in self.test.items()}

    def _make_hyper(self) -> None:
        kind = self.config.hyper
        if kind == "module":
            with torch.random.fork_rng():
                torch.manual_seed(0)
                self.hyper: Any = nn.Linear(OUT, OUT).to(self.dtype)
            for name, p in self.hyper.named_parameters():
                p.data = self._new(*p.shape, scale=0.5)
                self.leaves[f"hyper {name}"] = p
            return
        weights = self._leaf("weights", self._new(ROWS)) if kind != "none" else None
        shift = self._leaf("shift", self._new(scale=0.3)) if kind == "dict" else None
        self.hyper = {"w": weights, "rest": [shift, "a name"]} if kind == "dict" else weights

    def _wrap_hyper(self) -> None:
        """In `hypergradient` every leaf is a part of `hyper`; a strength that is a function of it must be."""
        log = self.leaves.get("log strength")
        if log is not None or self.style == "hypergradient":
            self.hyper = {"main": self.hyper, "log": log, "extra": list(self.leaves.values())}

    def _parts(self, hyper: Any) -> tuple[Any, Any, Any]:
        if isinstance(hyper, dict) and "main" in hyper:
            hyper = hyper["main"]
        if isinstance(hyper, dict):
            return hyper["w"], hyper["rest"][0], None
        return (None, None, hyper) if isinstance(hyper, nn.Module) else (hyper, None, None)

    def lower(self, net: Any, hyper: Any, batch: Any) -> Tensor:
        """A weighted square error, with a nonlinear term."""
        weights, shift, change = self._parts(hyper)
        x, target = self.data if batch is None else (batch["x"], batch["t"])
        if batch is not None and "s" in batch:
            target = target + batch["s"]
        target = target if change is None else change(target)
        out = self._out(net, x)
        error = (out - target - (0.0 if shift is None else shift)).square()
        if weights is not None:
            error = torch.sigmoid(weights)[:, None] * error
        return error.mean() + 0.1 * torch.sin(out).mean()

    def upper(self, net: Any, hyper: Any, batch: Any) -> Tensor:
        """Another error, on other data, and a term of the upper variables alone."""
        weights, shift, change = self._parts(hyper)
        data = self.test if self.tasks is None else batch
        out = self._out(net, data["tx"])
        own = sum((0.01 * t.square().sum() for t in (weights, shift) if t is not None), start=0.0)
        if change is not None:
            own = own + 0.01 * change(data["tt"]).square().sum()
        return (out - data["tt"]).square().mean() + 0.05 * torch.cos(out).mean() + own

    def net(self, params: dict[str, Tensor], buffers: dict[str, Tensor]) -> Any:
        """What the losses receive from the witness: a tree, or the module as a function."""
        if self.module is None:
            return pytree.tree_unflatten([params[str(i)] for i in range(len(params))], self._spec)
        if self.config.family == "shared":  # functional_call would leave its tensors in the module (pytorch#164759)
            return lambda x: self.module.by_hand(params, x)
        return lambda x: functional_call(self.module, {**params, **buffers}, (x,))

    def fresh_buffers(self) -> dict[str, Tensor]:
        """Copies of the module's buffers."""
        return {} if self.module is None else {n: b.clone() for n, b in self.module.named_buffers()}

    def _make_groups(self) -> list[Group]:
        config, names = self.config, list(self.start)
        parts = [names]
        if len(config.alpha) == 2:
            wide = [n for n in names if self.start[n].dim() > 1]
            parts = [wide, [n for n in names if n not in wide]]
        return [self._group(i, part) for i, part in enumerate(parts)]

    def _group(self, index: int, names: list[str]) -> Group:
        config, first = self.config, index == 0
        lr = draw.RATES.get(self.rule, 0.25) * (0.5 if config.options.get("momentum") else 1.0) * (1 - 0.4 * index)
        settings: dict[str, Any] = {**config.options, "lr": lr, "upper_lr": config.upper_lr}
        if first:
            for name in config.learn:
                self._learn(settings, name, names)
        kind = config.alpha[index]
        alpha, weight = self._alpha(kind, learned=first and "alpha" in config.learn)
        group = Group(self.rule, names, settings, alpha, weight)
        self._prox(group, config.prox[index], learned=first)
        return group

    def _learn(self, settings: dict[str, Any], name: str, names: list[str]) -> None:
        if name == "lr list":
            spread = [settings["lr"] * (0.5 + self._new(*self.start[n].shape).sigmoid()) for n in names]
            settings["lr"] = [self._leaf(f"lr {i}", t.to(self.low).to(self.dtype)) for i, t in enumerate(spread)]
        elif name == "betas":
            betas = [self._leaf(f"beta {i}", self._number(b)) for i, b in enumerate(settings["betas"])]
            settings["betas"] = tuple(betas)
        elif name == "upper_lr":
            settings["upper_lr"] = self._leaf("upper_lr", self._number(settings["upper_lr"] or 0.1))
        elif name in settings:
            settings[name] = self._leaf(name, self._number(settings[name]))

    def _alpha(self, kind: str, *, learned: bool) -> tuple[Any, Any]:
        """The package's schedule, and the same as a function of k."""
        c: Any = self._leaf("alpha", self._number(0.4)) if learned else 0.4
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # some schedules warn that their sum is finite
            pairs: dict[str, tuple[Any, Any]] = {
                "0": (0.0, None),
                "number": (c, lambda k: c),
                "constant": (bda.constant(c), lambda k: c),
                "harmonic": (bda.harmonic(c), lambda k: c / k),
                "polynomial": (bda.polynomial(c, 0.5), lambda k: c / math.sqrt(k)),
                "geometric": (bda.geometric(c, 0.7), lambda k: c * 0.7 ** (k - 1)),
                "theory": (
                    bda.theory(0.5, 0.4, 1.2),
                    lambda k: min(2 / (k * (1 - math.sqrt(1 - 2 * 0.5 * 0.4 * 1.2 / 1.6))), 1 - 1e-6),
                ),
                "function": (lambda k: 0.3 / (1 + k), lambda k: 0.3 / (1 + k)),
            }
        return pairs[kind]

    def _prox(self, group: Group, kind: str, *, learned: bool) -> None:
        least = min((self.start[n].dim() for n in group.names if self.start[n].numel()), default=0)
        if kind in ("nuclear", "group_lasso") and least < (2 if kind == "nuclear" else 1):
            kind = "l2_ball"
        if not kind:
            return
        of_hyper = learned and "strength of hyper" in self.config.learn
        s: Any = STRENGTHS.get(kind, 0.0)
        given: Any = s
        if of_hyper:
            log = self._leaf("log strength", self._number(math.log(s)))
            s, given = log, lambda hyper: hyper["log"].exp()
        elif learned and "strength" in self.config.learn:
            given = s = self._leaf("strength", self._number(s))

        def strength() -> Any:
            return s.exp() if of_hyper else s

        maps: dict[str, tuple[Any, Callable[[Tensor, Any], Tensor]]] = {
            "l1": (lambda: bda.prox.l1(given), lambda y, h: naive.soft(y, h * strength())),
            "elastic_net": (
                lambda: bda.prox.elastic_net(given, 0.2),
                lambda y, h: naive.soft(y, h * strength()) / (1 + h * 0.2),
            ),
            "nonnegative": (bda.prox.nonnegative, lambda y, h: torch.relu(y)),
            "box": (
                lambda: bda.prox.box(-0.3, given),
                lambda y, h: torch.minimum(y.clamp(min=-0.3), strength() * torch.ones_like(y)),
            ),
            "l2_ball": (lambda: bda.prox.l2_ball(given), lambda y, h: naive.into_ball(y, strength())),
            "l1_ball": (lambda: bda.prox.l1_ball(given), lambda y, h: naive.into_l1_ball(y, strength())),
            "simplex": (lambda: bda.prox.simplex(given), lambda y, h: naive.onto_simplex(y, strength())),
            "group_lasso": (
                lambda: bda.prox.group_lasso(given),
                lambda y, h: naive.shrink_rows(y, h * strength()),
            ),
            "nuclear": (lambda: bda.prox.nuclear(given), lambda y, h: naive.shrink_spectrum(y, h * strength())),
        }
        make, group.prox = maps[kind]
        group.map = make()
