"""`accumulate=M`: the losses of a step as means over parts of its batch."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from row_weights import ROWS, Y0, D, batches, draw, lower, upper
from torch import Tensor, nn

import bda_optim as bda

K = 4


BATCHES = batches(K)


def upper_variables() -> dict[str, Tensor]:
    return {
        "rows": draw(ROWS, seed=30).requires_grad_(),
        "l1": torch.tensor(0.02, dtype=D, requires_grad=True),
        "lr": torch.tensor(0.2, dtype=D, requires_grad=True),
    }


RULES: dict[str, dict[str, Any]] = {
    "sgd": {},
    "momentum": {"momentum": 0.9},
    "nesterov": {"momentum": 0.9, "nesterov": True},
    "adam": {"rule": torch.optim.Adam, "eps": 0.01},
    "fista": {"rule": bda.FISTA},
}
VARIANTS = ("plain", "alpha", "l1", "learned lr")
ADJOINTS = [bda.Unroll(), bda.Checkpointed(), bda.Checkpointed(slots=2)]


def gradients(rule: str = "momentum", variant: str = "plain", **options: Any) -> list[Tensor]:
    """Return y_K and the hypergradient, flat."""
    x = upper_variables()
    chosen: dict[str, Any] = {"lr": 0.2, **RULES[rule]}
    if variant == "alpha":
        chosen |= {"alpha": bda.harmonic(0.5), "upper_lr": 0.3}
    if variant == "l1":
        chosen["prox"] = bda.prox.l1(lambda hyper: hyper["l1"])
    if variant == "learned lr":
        chosen["lr"] = x["lr"]
    chosen = {"steps": K, "batches": BATCHES, **chosen, **options}
    out = bda.hypergradient(lower, upper, Y0, x, **chosen)
    return [out.value, *out.params.values(), *out.grad.values(), *(t for t in out.trace if t is not None)]


@functools.cache
def whole(rule: str, variant: str) -> list[Tensor]:
    return gradients(rule, variant)


def close(first: Any, second: Any, tolerance: float = 1e-10) -> None:
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("parts", [3, 5])
@pytest.mark.parametrize("adjoint", ADJOINTS, ids=["unroll", "checkpointed", "slots"])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("rule", RULES)
def test_equals_the_whole_batch(rule: str, variant: str, adjoint: Any, parts: int) -> None:
    close(gradients(rule, variant, adjoint=adjoint, accumulate=parts), whole(rule, variant))


@pytest.mark.parametrize(
    "adjoint",
    [
        bda.ForwardMode(),
        bda.FirstOrder(),
        bda.Truncated(last=2),
        bda.Truncated(last=2, within=bda.Checkpointed()),
        bda.Guarded(within=bda.Checkpointed(), clip=1e-3),
        bda.Checkpointed(check=True),
        bda.Checkpointed(every=1, offload="cpu"),
    ],
    ids=repr,
)
def test_every_adjoint_of_steps_takes_it(adjoint: Any) -> None:
    close(
        gradients("nesterov", "alpha", adjoint=adjoint, accumulate=5), gradients("nesterov", "alpha", adjoint=adjoint)
    )


def test_one_part_is_the_present_way() -> None:
    for a, b in zip(gradients(accumulate=1), gradients(), strict=True):
        assert torch.equal(a, b)


def test_against_finite_differences() -> None:
    def last(rows: Tensor, inputs: Tensor, lr: Tensor) -> Tensor:
        x = {"rows": rows}
        batches = [(batch[0], inputs, batch[2]) for batch in BATCHES[:2]]
        options: dict[str, Any] = {"lr": lr, "alpha": 0.3, "adjoint": bda.Checkpointed(), "accumulate": 5}
        y = bda.rollout(lower, upper, Y0, x, steps=2, batches=batches, momentum=0.9, nesterov=True, **options)
        return y["w"].sin().sum() + y["b"].sum()

    inputs = (draw(ROWS, seed=30), draw(ROWS, 3, seed=1), torch.tensor(0.2, dtype=D))
    assert torch.autograd.gradcheck(last, [t.requires_grad_() for t in inputs])


@pytest.mark.parametrize("adjoint", ADJOINTS[:2], ids=["unroll", "checkpointed"])
def test_second_derivatives(adjoint: Any) -> None:
    def second(**options: Any) -> Tensor:
        x = upper_variables()
        y = bda.rollout(lower, None, Y0, x, steps=K, lr=0.2, batches=BATCHES, **options)
        (first,) = torch.autograd.grad(upper(y, x, None), x["rows"], create_graph=True)
        return torch.autograd.grad(first.square().sum(), x["rows"])[0]

    close([second(adjoint=adjoint, accumulate=5)], [second()])


def test_inside_a_transform() -> None:
    def last(rows: Tensor, **options: Any) -> Tensor:
        out: Tensor = bda.rollout(lower, None, Y0, {"rows": rows}, steps=K, lr=0.2, batches=BATCHES, **options)["w"]
        return out

    rows = draw(ROWS, seed=30)
    close([torch.func.jacrev(functools.partial(last, accumulate=5))(rows)], [torch.func.jacrev(last)(rows)])


@pytest.mark.parametrize("adjoint", ADJOINTS, ids=["unroll", "checkpointed", "slots"])
@pytest.mark.parametrize("chunk_size", [None, 2])
def test_tasks_are_cut_along_the_second_dimension(adjoint: Any, chunk_size: int | None) -> None:
    rows = torch.arange(ROWS).expand(3, -1)
    batches = [(rows, draw(3, ROWS, 3, seed=k), draw(3, ROWS, 2, seed=10 + k)) for k in range(K)]
    options = {"variant": "alpha", "batches": batches, "tasks": 3, "upper_batch": batches[0]}
    expected = gradients("adam", **options)
    close(gradients("adam", **options, adjoint=adjoint, accumulate=5, chunk_size=chunk_size), expected)


def test_the_last_upper_loss_is_cut_too() -> None:
    sizes: list[int] = []

    def noted(y: Any, x: Any, batch: Any) -> Tensor:
        sizes.append(len(batch[1]))
        return upper(y, x, batch)

    x = upper_variables()
    options: dict[str, Any] = {"steps": K, "lr": x["lr"], "batches": BATCHES, "upper_batch": BATCHES[1]}
    expected = bda.hypergradient(lower, upper, Y0, x, **options)
    out = bda.hypergradient(lower, noted, Y0, x, **options, accumulate=5)
    assert sizes == [3, 3, 2, 2, 2]
    close([out.value, *out.grad.values()], [expected.value, *expected.grad.values()])
    sizes.clear()
    bda.hypergradient(lower, noted, Y0, x, **(options | {"upper_batch": [t[:4] for t in BATCHES[1]]}), accumulate=5)
    assert sizes == [4]


def test_a_function_divides_data_of_different_lengths() -> None:
    batch = {"lower": BATCHES[0], "upper": tuple(t[:6] for t in BATCHES[1])}

    def thirds(batch: Any) -> list[tuple[float, Any]]:
        pieces = {key: [t.chunk(3) for t in values] for key, values in batch.items()}
        return [(4, {key: tuple(t[i] for t in values) for key, values in pieces.items()}) for i in range(3)]

    def solve(**options: Any) -> list[Tensor]:
        f = lambda y, x, b: lower(y, x, b["lower"])  # noqa: E731
        big_f = lambda y, x, b: upper(y, x, b["upper"])  # noqa: E731
        options = {"steps": K, "lr": 0.2, "alpha": 0.3, "batches": [batch] * K, "upper_batch": batch, **options}
        return list(bda.hypergradient(f, big_f, Y0, upper_variables(), **options).grad.values())

    for adjoint in ADJOINTS:
        close(solve(adjoint=adjoint, accumulate=thirds), solve())


def test_a_function_may_compute_with_batches_that_require_grad() -> None:
    features = draw(ROWS, 3, seed=5).requires_grad_()
    batches = [(BATCHES[0][0], features, BATCHES[0][2])] * K

    def thirds(batch: Any) -> list[tuple[float, Any]]:
        rows, inputs, targets = batch
        scaled = inputs.exp()  # one graph for all parts
        return [(1, part) for part in zip(rows.chunk(3), scaled.chunk(3), targets.chunk(3), strict=True)]

    found = []
    for adjoint in ADJOINTS:
        y = bda.rollout(
            lower, None, Y0, upper_variables(), steps=K, lr=0.1, batches=batches, adjoint=adjoint, accumulate=thirds
        )
        found.append(torch.autograd.grad(y["w"].square().sum(), features)[0])
    close(found[1:], found[:1] * 2)


class Net(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.backbone = nn.Linear(3, 5)
        self.head = nn.Sequential(*layers, nn.Linear(5, 2))

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.backbone(inputs)))
        return out


def unrolled(net: Net, **options: Any) -> list[Tensor]:
    """Adapt the head; return the gradients of the backbone and of the row weights, and the buffers."""

    def loss(net: Any, x: Any, batch: Any) -> Tensor:
        rows, inputs, targets = batch
        return (torch.sigmoid(x["rows"][rows]) * (net(inputs) - targets).square().sum(-1)).mean()

    x = upper_variables()
    torch.manual_seed(3)
    inner = bda.BDAInnerOptimizer(net.head.parameters(), lr=0.1, momentum=0.9, alpha=0.3)
    fmodel = inner.unroll(net, loss, loss, hyper=x, steps=K, batches=BATCHES, **options)
    value = (fmodel.eval()(BATCHES[0][1]) - BATCHES[0][2]).square().mean()
    grads = torch.autograd.grad(value, [*net.backbone.parameters(), x["rows"]])
    return [*grads, *fmodel.buffer_dict.values(), fmodel.trace.lower]


@pytest.mark.parametrize("adjoint", ADJOINTS, ids=["unroll", "checkpointed", "slots"])
def test_a_module_with_a_backbone(adjoint: Any) -> None:
    net = Net(nn.Tanh()).double()
    close(unrolled(net, adjoint=adjoint, accumulate=5), unrolled(net))


def test_buffers_and_random_numbers_run_through_the_parts() -> None:
    net = Net(nn.BatchNorm1d(5), nn.Dropout(0.5)).double()
    expected = unrolled(net, accumulate=3)
    assert int(next(t for t in expected if t.dtype == torch.int64)) == 3 * K
    for adjoint in ADJOINTS[1:]:
        close(unrolled(net, adjoint=adjoint, accumulate=3), expected)


def test_a_rule_that_draws_random_numbers() -> None:
    class Noisy(bda.Rule):
        defaults = {"lr": 0.1}  # noqa: RUF012

        def update(self, grads: Any, state: Any, params: Any, settings: Any) -> Any:
            return [bda.Move(g * (1 + 0.3 * torch.randn_like(g)), settings["lr"]) for g in grads], state

    def noisy(y: Any, x: Any, batch: Any) -> Tensor:
        return lower(y, x, batch) * torch.rand((), dtype=D)

    def solve(adjoint: Any) -> Any:
        torch.manual_seed(0)
        options: dict[str, Any] = {"alpha": 0.3, "rule": Noisy, "batches": BATCHES, "accumulate": 3}
        return bda.hypergradient(
            noisy, noisy, Y0, upper_variables(), steps=K, adjoint=adjoint, upper_batch=BATCHES[0], **options
        ).grad

    for adjoint in ADJOINTS[1:]:
        close(solve(adjoint).values(), solve(bda.Unroll()).values())


class _Noted(torch.autograd.Function):
    """The identity, whose node in the graph holds a token."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, token: Any) -> Tensor:
        ctx.token = token
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class Meter:
    """Counts the rows of the batches whose graphs are alive."""

    class Token:
        def __init__(self, rows: int) -> None:
            self.rows = rows

    def __init__(self) -> None:
        self.alive: weakref.WeakSet[Meter.Token] = weakref.WeakSet()
        self.peak = 0

    def __call__(self, loss: Callable[..., Tensor]) -> Callable[[Any, Any, Any], Tensor]:
        def metered(y: Any, x: Any, batch: Any) -> Tensor:
            token = Meter.Token(len(batch[1]))
            self.alive.add(token)
            self.peak = max(self.peak, sum(t.rows for t in self.alive))
            return loss(y | {"w": _Noted.apply(y["w"], token)}, x, batch)  # type: ignore[no-untyped-call]

        return metered


@pytest.mark.parametrize("alpha", [0.0, 0.3])
@pytest.mark.parametrize("adjoint", ADJOINTS[1:], ids=["checkpointed", "slots"])
def test_the_graph_of_one_part_is_alive_at_a_time(adjoint: Any, alpha: float) -> None:
    def peak(**options: Any) -> int:
        meter = Meter()
        options = {"steps": K, "lr": 0.1, "alpha": alpha, "batches": BATCHES, "upper_batch": BATCHES[0], **options}
        bda.hypergradient(meter(lower), meter(upper), Y0, upper_variables(), **options)
        return meter.peak

    both = 1 if alpha == 0 else 2
    assert peak(adjoint=adjoint) >= both * ROWS
    assert peak(adjoint=adjoint, accumulate=4) <= both * ROWS // 4  # the first step is inspected with both levels
    assert peak(adjoint=bda.Unroll(), accumulate=4) >= both * K * ROWS


def solve(f: Any = lower, **options: Any) -> Any:
    options = {"steps": K, "lr": 0.1, "batches": BATCHES, "accumulate": 3, "adjoint": bda.Checkpointed(), **options}
    return bda.rollout(f, None, Y0, upper_variables(), **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"accumulate": 13}, r"accumulate=13 .*batches\[0\] with a tensor of shape \(12,\)"),
        ({"batches": [*BATCHES[:3], [t[:2] for t in BATCHES[3]]]}, r"batches\[3\] with a tensor of shape \(2,\)"),
        ({"batches": [(draw(12), draw(11))] * K}, r"shapes \(12,\) and \(11,\)"),
        ({"batches": [(draw(12), torch.tensor(1.0))] * K}, r"a tensor of shape \(\)"),
        ({"batches": ["text"] * K}, "of type str without tensors"),
        ({"batches": None}, "batches=None"),
        ({"compile": True}, "compile=True"),
        ({"adjoint": bda.Implicit()}, "`Implicit`"),
        ({"accumulate": 0}, "`accumulate` must be a whole number"),
        ({"accumulate": True}, "`accumulate` must be a whole number"),
        ({"accumulate": lambda batch: []}, "list of pairs"),
        ({"accumulate": lambda batch: [(0.5, batch), (-0.5, batch)]}, r"weights \[0.5, -0.5\]"),
        ({"accumulate": lambda batch: batch}, "list of pairs"),
    ],
)
def test_refusals(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        solve(**options)


def test_a_loader_is_checked_when_it_is_read() -> None:
    with pytest.raises(ValueError, match="a batch with a tensor of shape"):
        solve(batches=iter([tuple(t[:2] for t in BATCHES[0])] * K), adjoint=None)


@pytest.mark.parametrize("where", ["loss", "prox"])
def test_captured_tensors_are_refused(where: str) -> None:
    captured = torch.tensor(0.1, dtype=D, requires_grad=True)
    with pytest.raises(ValueError, match="neither in `hyper=`"):
        if where == "loss":
            solve(lambda y, x, b: lower(y, x, b) + captured * y["w"].square().sum())
        else:
            solve(prox=bda.prox.l1(lambda hyper: captured))


def test_operations_without_a_second_derivative_are_refused() -> None:
    def loss(y: Any, x: Any, batch: Any) -> Tensor:
        return lower(y, x, batch) + torch.cdist(batch[1] @ y["w"], batch[2]).mean()

    with pytest.raises(NotImplementedError, match="cdist"):
        solve(loss)


def test_a_part_must_give_a_scalar() -> None:
    with pytest.raises(ValueError, match="must be a scalar"):
        solve(lambda y, x, b: (b[1] @ y["w"]).sum(-1))
