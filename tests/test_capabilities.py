"""One table of what can be combined: rules x upper variables x aggregation x prox x adjoints, against differences.

Every hypergradient has two witnesses: finite differences of rollouts without a graph, and other adjoints. Not the whole
product is run, but every pair of capabilities meets in some case. Biased adjoints are compared with loops written out
by hand, and networks with `higher` and `torchopt`, where those are right.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from problems import DTYPE, difference_quotients, double, leaf, relative_error
from torch import Tensor, nn, optim
from torch.func import functional_call

import bda_optim as bda
from bda_optim._step.rules.resolve import RULES

# The capability table: rules.


class Row(NamedTuple):
    """A rule with settings under which it moves by about as much as the others."""

    name: str
    rule: Any
    settings: dict[str, Any]
    steps: int = 4
    learns: tuple[str, ...] = ("weight_decay",)  # the settings, beside `lr`, that may be tensors


ROWS = [
    Row("SGD", None, {"lr": 0.3}),
    Row("momentum", optim.SGD, {"lr": 0.2, "momentum": 0.8, "dampening": 0.3}, learns=("momentum", "weight_decay")),
    Row("nesterov", optim.SGD, {"lr": 0.2, "momentum": 0.7, "nesterov": True}, learns=("momentum", "weight_decay")),
    Row("Adam", optim.Adam, {"lr": 0.1, "betas": (0.7, 0.8), "eps": 1e-3}),
    Row("amsgrad", optim.Adam, {"lr": 0.1, "betas": (0.5, 0.4), "eps": 1e-3, "amsgrad": True}),
    Row("AdamW", optim.AdamW, {"lr": 0.1, "betas": (0.7, 0.8), "eps": 1e-3, "weight_decay": 0.1}),
    Row("RMSprop", optim.RMSprop, {"lr": 0.03, "rule_alpha": 0.7, "eps": 1e-2}),
    Row(
        "centered",
        optim.RMSprop,
        {"lr": 0.01, "rule_alpha": 0.7, "eps": 1e-2, "momentum": 0.6, "centered": True},
        learns=("momentum", "weight_decay"),
    ),
    Row("Adagrad", optim.Adagrad, {"lr": 0.2, "lr_decay": 0.1, "eps": 1e-3}),
    Row("NAdam", optim.NAdam, {"lr": 0.1, "betas": (0.7, 0.8), "eps": 1e-3}),
    Row("RAdam", optim.RAdam, {"lr": 0.1, "betas": (0.7, 0.9), "eps": 1e-3}, steps=7),  # rectified from step 6 on
    Row("Adamax", optim.Adamax, {"lr": 0.1, "betas": (0.7, 0.8), "eps": 1e-3}),
    Row("Adadelta", optim.Adadelta, {"lr": 1.0, "rho": 0.7, "eps": 1e-2}),
    Row("ASGD", optim.ASGD, {"lr": 0.3, "lambd": 0.1, "t0": 1}),
    Row("Rprop", optim.Rprop, {"lr": 0.05}, learns=()),
    Row("Adafactor", optim.Adafactor, {"lr": 0.3, "weight_decay": 0.1}),
    Row("FISTA", bda.FISTA, {"lr": 0.3}, steps=5),
]


def test_every_rule_has_a_row() -> None:
    assert {row.rule for row in ROWS} - {None} == {*RULES, bda.FISTA}


# The capability table: what is differentiated.


class Kind(NamedTuple):
    """An upper variable: what makes it, and what it needs."""

    make: Callable[[Row], Upper]
    needs: str = ""  # "aggregation", "prox", or the name of a setting that the rule must learn


class Upper(NamedTuple):
    """The tensors to differentiate, and where they go."""

    leaves: Sequence[Tensor]
    hyper: Any = None
    settings: dict[str, Any] = {}  # noqa: RUF012
    start: dict[str, Tensor] | None = None
    batches: Callable[[], Any] = lambda: None


def per_element(scale: float) -> list[Tensor]:
    """One tensor for each parameter, of its shape."""
    shapes = [p.shape for p in initial().values()]
    return [(scale * (0.5 + torch.rand(shape, dtype=DTYPE))).requires_grad_() for shape in shapes]


def of_setting(name: str, value: float | None = None) -> Callable[[Row], Upper]:
    def make(row: Row) -> Upper:
        tensor = leaf(row.settings.get(name, 0.2) if value is None else value)
        return Upper([tensor], settings={name: tensor})

    return make


def of_elements(name: str, value: float | None = None) -> Callable[[Row], Upper]:
    def make(row: Row) -> Upper:
        tensors = per_element(row.settings.get(name, 0.2) if value is None else value)
        return Upper(tensors, settings={name: tensors})

    return make


def of_tensor(row: Row) -> Upper:
    shift = leaf(0.4, -0.3)
    return Upper([shift], shift)


def of_tree(row: Row) -> Upper:
    shift, decay = leaf(0.4, -0.3), leaf(-1.0)
    return Upper([shift, decay], {"shift": shift, "rest": [decay, "a name", None]})


def of_module(row: Row) -> Upper:
    module = nn.Linear(2, 2).to(DTYPE)
    return Upper(list(module.parameters()), module)


def of_start(row: Row) -> Upper:
    start = {name: p.requires_grad_() for name, p in initial().items()}
    return Upper(list(start.values()), start=start)


def of_schedule(row: Row) -> Upper:
    c = leaf(0.4)
    return Upper([c], settings={"alpha": bda.harmonic(c)})


def of_prox(row: Row) -> Upper:
    strength = leaf(0.05)
    return Upper([strength], settings={"prox": bda.prox.l1(strength)})


def of_prox_of_hyper(row: Row) -> Upper:
    decay = leaf(-3.0)
    hyper = {"shift": double(0.4, -0.3), "decay": decay}
    return Upper([decay], hyper, settings={"prox": bda.prox.elastic_net(0.02, lambda h: torch.exp(h["decay"]))})


def of_batches(row: Row) -> Upper:
    """A tensor at several k, one at a single k, one that was computed from a leaf, and one that needs no gradient."""
    often, once, source = leaf(0.1, 0.2), leaf(-0.3, 0.1), leaf(0.5, 0.7)

    def batches() -> list[Any]:
        shifts = [often, torch.sin(source), often, once] + [double(0.2, 0.2)] * row.steps
        return [{"shift": shift, "name": "shifted"} for shift in shifts[: row.steps]]

    return Upper([often, once, source], batches=batches)


KINDS = {
    "tensor": Kind(of_tensor),
    "tree": Kind(of_tree),
    "module": Kind(of_module),
    "y_0": Kind(of_start),
    "batches": Kind(of_batches),
    "lr": Kind(of_setting("lr")),
    "lr per element": Kind(of_elements("lr")),
    "upper_lr": Kind(of_setting("upper_lr", 0.2), "aggregation"),
    "upper_lr per element": Kind(of_elements("upper_lr", 0.2), "aggregation"),
    "alpha": Kind(of_setting("alpha", 0.3), "aggregation"),
    "alpha per element": Kind(of_elements("alpha", 0.3), "aggregation"),
    "schedule": Kind(of_schedule, "aggregation"),
    "momentum": Kind(of_setting("momentum"), "momentum"),
    "momentum per element": Kind(of_elements("momentum"), "momentum"),
    "weight_decay": Kind(of_setting("weight_decay"), "weight_decay"),
    "weight_decay per element": Kind(of_elements("weight_decay"), "weight_decay"),
    "prox": Kind(of_prox, "prox"),
    "prox of hyper": Kind(of_prox_of_hyper, "prox"),
}

# The capability table: aggregation, prox, adjoints.

AGGREGATIONS: dict[str, dict[str, Any]] = {
    "alone": {},
    "aggregated": {"alpha": bda.harmonic(0.5), "upper_lr": 0.2},
}
PROXES = {
    "smooth": None,
    "l1": bda.prox.l1(0.03),
    "group_lasso": bda.prox.group_lasso(0.05),
    "l2_ball": bda.prox.l2_ball(0.9),
}
ADJOINTS = [
    bda.Checkpointed(),
    bda.Checkpointed(every=2),
    bda.Checkpointed(slots=2),
    bda.ForwardMode(),
    bda.Truncated(last=7),
    bda.Truncated(last=8, within=bda.Checkpointed()),
]


class Case(NamedTuple):
    row: Row
    kind: str
    aggregation: str
    prox: str
    adjoints: tuple[Any, ...]

    def __str__(self) -> str:
        return f"{self.row.name}-{self.kind}-{self.aggregation}-{self.prox}"


def cases() -> Iterator[Case]:
    """Every rule with every upper variable that it can have; the other capabilities take turns."""
    aggregations, proxes = list(AGGREGATIONS), list(PROXES)
    for (i, row), (j, (name, kind)) in itertools.product(enumerate(ROWS), enumerate(KINDS.items())):
        if kind.needs in ("momentum", "weight_decay") and kind.needs not in row.learns:
            continue
        if (row.name, name) == ("Rprop", "batches"):
            continue  # signs of gradients have no derivative, so there would be nothing to compare
        aggregation = "aggregated" if kind.needs == "aggregation" else aggregations[(i + j) % 2]
        prox = proxes[(i + j // 2) % len(proxes)]
        if kind.needs == "prox":
            prox = "smooth"  # the kind has a prox of its own
        elif name == "lr per element" and prox in ("group_lasso", "l2_ball"):
            prox = "l1"  # the others have no meaning with a rate per element
        chosen = (ADJOINTS[(i + j) % len(ADJOINTS)], ADJOINTS[(i + 2 * j + 3) % len(ADJOINTS)])
        yield Case(row, name, aggregation, prox, tuple(dict.fromkeys(chosen)))


CASES = list(cases())
IMPOSSIBLE = {("lr per element", "group_lasso"), ("lr per element", "l2_ball"), ("Rprop", "batches")}


def test_every_pair_of_capabilities_meets() -> None:
    met: set[frozenset[str]] = set()
    for case in CASES:
        for adjoint in case.adjoints:
            parts = (case.row.name, case.kind, case.aggregation, case.prox, str(adjoint))
            met |= {frozenset(pair) for pair in itertools.combinations(parts, 2)}
    rows, kinds = [row.name for row in ROWS], [name for name, kind in KINDS.items() if not kind.needs]
    everything = [rows, kinds, list(AGGREGATIONS), list(PROXES), list(map(str, ADJOINTS))]
    missing = [
        pair
        for left, right in itertools.combinations(everything, 2)
        for pair in itertools.product(left, right)
        if frozenset(pair) not in met and pair not in IMPOSSIBLE
    ]
    assert not missing
    bound = [(name, str(adjoint)) for name, kind in KINDS.items() if kind.needs for adjoint in ADJOINTS]
    few_rows = {"momentum", "momentum per element"}
    assert not [pair for pair in bound if frozenset(pair) not in met and pair[0] not in few_rows]


# The problem: one layer, its targets shifted or mapped by the upper variables.

GENERATOR = torch.Generator().manual_seed(7)
INPUTS, TEST_INPUTS = torch.randn(2, 5, 3, generator=GENERATOR, dtype=DTYPE)
TARGETS, TEST_TARGETS = 0.8 * torch.randn(2, 5, 2, generator=GENERATOR, dtype=DTYPE)
WEIGHT, BIAS = 0.7 * torch.randn(3, 2, generator=GENERATOR, dtype=DTYPE), double(0.2, -0.4)


def initial() -> dict[str, Tensor]:
    return {"weight": WEIGHT.clone(), "bias": BIAS.clone()}


def targets(hyper: Any, batch: Any) -> Tensor:
    shift = 0.0 if batch is None else batch["shift"]
    if isinstance(hyper, nn.Module):
        return hyper(TARGETS) + shift
    if isinstance(hyper, dict):
        hyper = hyper["shift"]
    return TARGETS + shift + (0.0 if hyper is None else hyper)


def lower(params: dict[str, Tensor], hyper: Any, batch: Any) -> Tensor:
    decay = hyper["rest"][0] if isinstance(hyper, dict) and "rest" in hyper else double(-2.0)
    error = torch.tanh(INPUTS @ params["weight"] + params["bias"]) - targets(hyper, batch)
    return error.square().mean() + 0.5 * torch.exp(decay) * params["weight"].square().sum()


def upper(params: dict[str, Tensor], hyper: Any, batch: Any) -> Tensor:
    error = torch.tanh(TEST_INPUTS @ params["weight"] + params["bias"]) - TEST_TARGETS
    return error.square().mean() + 0.01 * targets(hyper, None).square().sum()


class Setup:
    """A case with its tensors."""

    def __init__(self, case: Case) -> None:
        self.row, self.upper = case.row, KINDS[case.kind].make(case.row)
        aggregation, prox = AGGREGATIONS[case.aggregation], PROXES[case.prox]
        self.settings = {**case.row.settings, **aggregation, "prox": prox, **self.upper.settings}

    def value(self, adjoint: Any = None) -> Tensor:
        """F(x, y_K) from the leaves as they are now."""
        y = bda.rollout(
            lower, upper, self.upper.start or initial(), self.upper.hyper, steps=self.row.steps, rule=self.row.rule,
            batches=self.upper.batches(), adjoint=adjoint, **self.settings,
        )  # fmt: skip
        return upper(y, self.upper.hyper, None)

    def grads(self, adjoint: Any = None) -> tuple[Tensor, ...]:
        return torch.autograd.grad(self.value(adjoint), self.upper.leaves, materialize_grads=True)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_hypergradient(case: Case) -> None:
    setup = Setup(case)
    grads = setup.grads()
    assert relative_error(grads, difference_quotients(setup.value, setup.upper.leaves)) < 1e-6
    for adjoint in case.adjoints:
        assert relative_error(setup.grads(adjoint), grads) < 1e-10, f"{adjoint} differs from Unroll()"


@pytest.mark.parametrize("adjoint", [bda.Unroll(), *ADJOINTS], ids=str)
def test_settings_inside_hyper(adjoint: Any) -> None:
    """A tensor that is both a setting and a part of `hyper` is the same variable: `grad` has its derivative."""
    lr, c, shift = leaf(0.3), leaf(0.4), leaf(0.4, -0.3)
    hyper = {"shift": shift, "rates": [lr, c], "rest": [double(-2.0)]}

    def out() -> bda.Hypergradient:
        return bda.hypergradient(
            lower, upper, initial(), hyper, steps=4, lr=lr, upper_lr=0.2, alpha=bda.harmonic(c), adjoint=adjoint
        )

    found = out().grad
    got = [found["shift"], *found["rates"]]
    assert relative_error(got, difference_quotients(lambda: out().value, [shift, lr, c])) < 1e-6


# Biased adjoints, against loops written out by hand.


class Loop(NamedTuple):
    """A lower level with everything in it: aggregation, momentum, prox."""

    shift: Tensor
    lr: Tensor
    start: Tensor

    STEPS, MOMENTUM, STRENGTH, UPPER_LR, C = 7, 0.6, 0.01, 0.15, 0.5

    def lower(self, y: Tensor) -> Tensor:
        return (torch.tanh(INPUTS @ y) - TARGETS[:, 0] - self.shift).square().mean()

    def upper(self, y: Tensor) -> Tensor:
        return (torch.tanh(TEST_INPUTS @ y) - TEST_TARGETS[:, 0]).square().mean() + 0.1 * self.shift.square().sum()

    def states(self, *, graph: bool = True, cut: int = 0) -> list[Tensor]:
        """y_0, ..., y_K by autograd; before step `cut` + 1 everything becomes a constant."""
        y, velocity, found = self.start, torch.zeros_like(self.start), [self.start]
        for k in range(1, self.STEPS + 1):
            if k <= cut or k == cut + 1 > 1:
                y, velocity = y.detach(), velocity.detach()
            at = y if graph and y.requires_grad else y.detach().requires_grad_()
            g_lower, g_upper = (
                torch.autograd.grad(loss(at), at, create_graph=graph)[0] for loss in (self.lower, self.upper)
            )
            velocity = self.MOMENTUM * velocity + g_lower
            moved = y - self.lr * velocity
            soft = moved.sign() * torch.relu(moved.abs() - self.lr * self.STRENGTH)
            weight = self.C / k
            y = y - (weight * self.UPPER_LR * g_upper + (1 - weight) * (y - soft))
            found.append(y)
        return found

    def rollout(self, adjoint: Any) -> Tensor:
        def lower(y: Tensor, x: Tensor, batch: Any) -> Tensor:
            return self._replace(shift=x).lower(y)

        def upper(y: Tensor, x: Tensor, batch: Any) -> Tensor:
            return self._replace(shift=x).upper(y)

        return bda.rollout(
            lower, upper, self.start, self.shift, steps=self.STEPS, lr=self.lr, upper_lr=self.UPPER_LR,
            alpha=bda.harmonic(self.C), momentum=self.MOMENTUM, prox=bda.prox.l1(self.STRENGTH), adjoint=adjoint,
        )  # fmt: skip


def loop(*, from_start: bool) -> Loop:
    return Loop(leaf(0.1, -0.2, 0.0, 0.3, -0.1), leaf(0.3), WEIGHT[:, 0].clone().requires_grad_(from_start))


def slopes(problem: Loop, y: Tensor) -> list[Tensor]:
    wanted = [t for t in problem if t.requires_grad]
    return list(torch.autograd.grad(problem.upper(y), wanted, materialize_grads=True))


@pytest.mark.parametrize("adjoint", [bda.Unroll(), *ADJOINTS], ids=str)
def test_exact_adjoints_equal_a_loop_by_hand(adjoint: Any) -> None:
    problem = loop(from_start=True)
    got, want = problem.rollout(adjoint), problem.states()[-1]
    assert relative_error([got], [want]) < 1e-14
    assert relative_error(slopes(problem, got), slopes(problem, want)) < 1e-12


WITHIN = [bda.Unroll(), bda.Checkpointed(), bda.Checkpointed(slots=2), bda.ForwardMode()]


@pytest.mark.parametrize("within", WITHIN, ids=str)
@pytest.mark.parametrize("last", [1, 3, 6])
def test_truncated_equals_a_loop_that_is_cut_by_hand(last: int, within: Any) -> None:
    problem = loop(from_start=False)
    got, want = problem.rollout(bda.Truncated(last=last, within=within)), problem.states(cut=Loop.STEPS - last)[-1]
    assert relative_error([got], [want]) < 1e-14
    assert relative_error(slopes(problem, got), slopes(problem, want)) < 1e-12


@pytest.mark.parametrize("last", [1, 3, 6])
def test_truncation_is_biased_by_what_the_first_steps_contribute(last: int) -> None:
    """A step with momentum and a prox depends on y and on the velocity, so plain descent shows it more simply."""
    x, y0 = leaf(0.3, -0.2), double(0.5, 0.1)

    def f(y: Tensor, x: Tensor, batch: Any = None) -> Tensor:
        return (y**4).sum() / 4 + (y - x).square().sum() / 2

    def run(y0: Tensor, x: Tensor, steps: int, adjoint: Any = None) -> Tensor:
        return bda.rollout(f, None, y0, x, steps=steps, lr=0.2, adjoint=adjoint)

    def grad(y: Tensor, of: Tensor) -> Tensor:
        return torch.autograd.grad(torch.sin(y).sum(), of)[0]

    exact, truncated = grad(run(y0, x, 6 + last), x), grad(run(y0, x, 6 + last, bda.Truncated(last=last)), x)
    middle = run(y0, x, 6)
    constant = middle.detach().requires_grad_()
    cotangent = grad(run(constant, x.detach(), last), constant)
    (missing,) = torch.autograd.grad(middle, x, cotangent)
    assert relative_error([exact - truncated], [missing]) < 1e-12
    assert missing.norm() > 1e-3 * exact.norm()


def test_first_order_equals_a_loop_with_constant_gradients() -> None:
    problem = loop(from_start=True)
    got, want = problem.rollout(bda.FirstOrder()), problem.states(graph=False)[-1]
    assert relative_error([got], [want]) < 1e-14
    found, exact = slopes(problem, got), slopes(problem, problem.states()[-1])
    assert relative_error(found, slopes(problem, want)) < 1e-12
    for first_order, full in zip(found, exact, strict=True):
        assert (first_order - full).norm() > 1e-3 * full.norm(), "not biased at all"


def test_first_order_maml_is_the_upper_gradient_at_the_end() -> None:
    """dF/dy_0 = grad F(y_K) and dF/dlr = -<sum of inner gradients, grad F(y_K)>, for plain descent."""
    problem = loop(from_start=True)
    y0, lr = problem.start, problem.lr
    y = bda.rollout(lambda y, x, b: problem.lower(y), None, y0, steps=5, lr=lr, adjoint=bda.FirstOrder())
    got = torch.autograd.grad(problem.upper(y), (y0, lr))
    end = y.detach().requires_grad_()
    (slope,) = torch.autograd.grad(problem.upper(end), end)
    total = (y0 - y).detach() / lr.detach()
    assert relative_error(got, [slope, -(total @ slope)]) < 1e-12


@pytest.mark.parametrize("adjoint", [bda.FirstOrder(), bda.Truncated(last=1)], ids=str)
def test_biased_adjoints_run_the_same_steps(adjoint: Any) -> None:
    problem = loop(from_start=False)
    assert torch.equal(problem.rollout(adjoint), problem.rollout(None))


# Other libraries, where they are right: alpha = 0, double precision.


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 3, 3, bias=False), nn.BatchNorm2d(3), nn.Tanh(), nn.AvgPool2d(2))
        self.head = nn.Linear(12, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.features(inputs).flatten(1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.lstm(inputs)[0][:, -1])


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "MLP": (lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)), (8, 4)),
    "conv net with BatchNorm": (Conv, (8, 1, 6, 6)),
    "LSTM": (Recurrent, (8, 5, 3)),
}
STEPS = 4


class Network:
    """A network on eight examples whose weights are learned, and the same loop in three libraries."""

    def __init__(self, name: str) -> None:
        make, shape = NETWORKS[name]
        torch.manual_seed(1)
        self.net = make().to(DTYPE)
        self.inputs = torch.randn(2, *shape, dtype=DTYPE)
        self.labels = torch.randint(0, 3, (2, 8))
        self.logits = torch.randn(8, dtype=DTYPE, requires_grad=True)

    def lower(self, net: Any, logits: Tensor | None = None, batch: Any = None) -> Tensor:
        weights = torch.sigmoid(self.logits if logits is None else logits)
        return (weights * nn.functional.cross_entropy(net(self.inputs[0]), self.labels[0], reduction="none")).mean()

    def upper(self, net: Any) -> Tensor:
        return nn.functional.cross_entropy(net(self.inputs[1]), self.labels[1])

    def gradient(self, loss: Tensor) -> list[Tensor]:
        """With respect to the weights of the examples, and to the initial parameters."""
        return list(torch.autograd.grad(loss, [self.logits, *self.net.parameters()]))

    def ours(self, optimizer: Any, adjoint: Any, **settings: Any) -> list[Tensor]:
        inner = bda.BDAInnerOptimizer(self.net.parameters(), rule=optimizer, **settings)
        fmodel = inner.unroll(
            self.net, self.lower, hyper=self.logits, steps=STEPS, adjoint=adjoint, copy_initial_weights=False
        )
        return self.gradient(self.upper(fmodel))

    def ours_step_by_step(self, optimizer: Any, **settings: Any) -> list[Tensor]:
        inner = bda.BDAInnerOptimizer(self.net.parameters(), rule=optimizer, **settings)
        with bda.innerloop_ctx(self.net, inner, copy_initial_weights=False) as (fmodel, diffopt):
            for _ in range(STEPS):
                diffopt.step(self.lower(fmodel))
            return self.gradient(self.upper(fmodel))

    def by_higher(self, optimizer: Any, **settings: Any) -> list[Tensor]:
        with imported("higher") as higher:
            opt = optimizer(self.net.parameters(), **settings)
            with higher.innerloop_ctx(self.net, opt, copy_initial_weights=False) as (fmodel, diffopt):
                for _ in range(STEPS):
                    diffopt.step(self.lower(fmodel))
                return self.gradient(self.upper(fmodel))

    def by_torchopt(self, name: str, **settings: Any) -> list[Tensor]:
        with imported("torchopt") as torchopt:
            names, params = zip(*self.net.named_parameters(), strict=True)
            buffers = {name: buffer.clone() for name, buffer in self.net.named_buffers()}

            def call(inputs: Tensor) -> Any:
                return functional_call(self.net, (dict(zip(names, params, strict=True)), buffers), inputs)

            torch.set_default_dtype(torch.float64)  # torchopt's bias correction is in that type; conftest resets it
            opt = torchopt.FuncOptimizer(getattr(torchopt, name)(**settings))
            for _ in range(STEPS):
                params = opt.step(self.lower(call), params)
            return self.gradient(self.upper(call))


@contextlib.contextmanager
def imported(name: str) -> Iterator[Any]:
    """A library that may be missing, and whose own warnings are not ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip(name)
        yield importlib.import_module(name)


every_network = pytest.mark.parametrize("name", NETWORKS)
WITNESSES = [bda.Unroll(), bda.Checkpointed(), bda.Checkpointed(slots=2)]


def check_against(want: list[Tensor], network: Network, optimizer: Any, **settings: Any) -> None:
    for adjoint in WITNESSES:
        assert relative_error(network.ours(optimizer, adjoint, **settings), want) < 1e-10, adjoint
    assert relative_error(network.ours_step_by_step(optimizer, **settings), want) < 1e-10


@every_network
@pytest.mark.parametrize(
    "optimizer, settings",
    [
        (optim.SGD, {"lr": 0.3}),
        (optim.SGD, {"lr": 0.2, "momentum": 0.8, "weight_decay": 0.01}),
        (optim.Adam, {"lr": 0.02, "eps": 1e-30}),  # higher puts another eps into the root
    ],
    ids=["SGD", "momentum", "Adam"],
)
def test_higher_agrees(name: str, optimizer: Any, settings: dict[str, Any]) -> None:
    network = Network(name)
    check_against(network.by_higher(optimizer, **settings), network, optimizer, **settings)


@every_network
@pytest.mark.parametrize(
    "transformation, optimizer, settings",
    [
        ("sgd", optim.SGD, {"lr": 0.3}),
        ("sgd", optim.SGD, {"lr": 0.2, "momentum": 0.8, "weight_decay": 0.01}),
        ("adam", optim.Adam, {"lr": 0.02}),
    ],
    ids=["SGD", "momentum", "Adam"],
)
def test_torchopt_agrees(name: str, transformation: str, optimizer: Any, settings: dict[str, Any]) -> None:
    network = Network(name)
    check_against(network.by_torchopt(transformation, **settings), network, optimizer, **settings)


@every_network
def test_forward_mode_agrees_on_networks(name: str) -> None:
    network = Network(name)
    inner = bda.BDAInnerOptimizer(network.net.parameters(), lr=0.3)

    def grad(adjoint: Any) -> Sequence[Tensor]:
        fmodel = inner.unroll(network.net, network.lower, hyper=network.logits, steps=STEPS, adjoint=adjoint)
        return torch.autograd.grad(network.upper(fmodel), network.logits)

    assert relative_error(grad(bda.ForwardMode()), grad(bda.Unroll())) < 1e-10
