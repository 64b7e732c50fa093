"""The implicit adjoint in modules, trees, tasks and groups; learned settings; anchors (iMAML); cost; carrying on."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch._inductor
import torch.nn.functional as F
from implicit_problems import lasso, ridge
from memory import Memory
from problems import difference_quotients, double, numbers, relative_error
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import bda_optim as bda

pytestmark = pytest.mark.usefixtures("doubles")

TIGHT = bda.Implicit(tol=1e-12)
INPUTS, TARGETS = numbers(24, 4, seed=1), numbers(24, 2, seed=2)
OTHERS, WANTED = numbers(24, 4, seed=3), numbers(24, 2, seed=4)


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))


def lower(net: Any, x: Tensor, batch: Any) -> Tensor:
    losses = (net(INPUTS) - TARGETS).square().mean(1)
    return (x.sigmoid() * losses).mean() + 0.3 * sum(p.square().sum() for p in net[2].parameters())


def upper(net: Any, x: Tensor, batch: Any) -> Tensor:
    return (net(OTHERS) - WANTED).square().mean()


def gradients(adjoint: Any, groups: Callable[[nn.Module], Any], *, steps: int = 120, **settings: Any) -> list[Tensor]:
    """The derivatives with respect to the weights of the examples, and to the backbone."""
    compile = settings.pop("compile", False)
    net, x = network(), torch.zeros(24, requires_grad=True)
    inner = bda.BDAInnerOptimizer(groups(net), **{"lr": 0.5, "upper_lr": 0.3, **settings})
    fmodel = inner.unroll(net, lower, upper, hyper=x, steps=steps, adjoint=adjoint, compile=compile)
    wanted = [x, *net[0].parameters(), *(p for p in net[2].parameters() if not p.requires_grad)]
    return list(torch.autograd.grad(upper(fmodel, x, None), [w for w in wanted if w.requires_grad]))


def whole_head(net: nn.Module) -> Any:
    return net[2].parameters()


def two_rates(net: nn.Module) -> Any:
    return [{"params": [net[2].weight], "lr": 0.5}, {"params": [net[2].bias], "lr": 0.2}]


def two_weights(net: nn.Module) -> Any:
    return [{"params": [net[2].weight], "alpha": 0.05}, {"params": [net[2].bias], "alpha": 0.0}]


def frozen_bias(net: nn.Module) -> Any:
    net[2].bias.requires_grad_(False)
    return net[2].parameters()


@pytest.mark.parametrize("alpha", [0.0, 0.1])
@pytest.mark.parametrize("groups", [whole_head, two_rates, two_weights, frozen_bias])
def test_modules_groups_and_backbones(groups: Callable[[nn.Module], Any], alpha: float) -> None:
    want = gradients(bda.Checkpointed(), groups, alpha=alpha)
    for solver in ("auto", "gmres"):
        got = gradients(bda.Implicit(tol=1e-12, solver=solver), groups, alpha=alpha)
        assert relative_error(got, want) < 1e-9


def test_one_ratio_of_the_levels_keeps_the_system_symmetric() -> None:
    """Groups of different rates: MINRES divides by them; where the ratio of the levels differs, it cannot."""
    minres = bda.Implicit(tol=1e-12, solver="minres")
    want = gradients(bda.Checkpointed(), two_rates, alpha=0.1, upper_lr=None)
    assert relative_error(gradients(minres, two_rates, alpha=0.1, upper_lr=None), want) < 1e-9
    with pytest.raises(ValueError, match="unsymmetric"):
        gradients(minres, two_rates, alpha=0.1)
    with pytest.raises(ValueError, match="unsymmetric"):
        gradients(minres, two_weights)


def test_compiled_steps_lead_to_an_uncompiled_map(monkeypatch: pytest.MonkeyPatch) -> None:
    """The traced steps run as they are here: compiling them takes some twenty seconds."""
    traced = []
    monkeypatch.setattr(torch._inductor, "compile", lambda graph, inputs, options: traced.append(1) or graph)
    want = gradients(bda.Checkpointed(), whole_head, alpha=0.1, momentum=0.5)
    got = gradients(TIGHT, whole_head, alpha=0.1, momentum=0.5, compile=True)
    assert relative_error(got, want) < 1e-9 and len(traced) == 1


def test_the_module_stays_as_it_is() -> None:
    net, x = network(), torch.zeros(24, requires_grad=True)
    before, rng = copy.deepcopy(net.state_dict()), torch.get_rng_state()
    inner = bda.BDAInnerOptimizer(net[2].parameters(), lr=0.5)
    fmodel = inner.unroll(net, lower, upper, hyper=x, steps=60, adjoint=bda.Implicit(settle=3))
    upper(fmodel, x, None).backward()
    assert all(torch.equal(a, b) for a, b in zip(before.values(), net.state_dict().values(), strict=True))
    assert all(p.grad is None for p in net[2].parameters()) and net[0].weight.grad is not None
    assert not inner.state and torch.equal(rng, torch.get_rng_state())
    assert len(fmodel.trace.lower) == 60 and fmodel.trace.lower[-1] < fmodel.trace.lower[0]
    inner.commit(fmodel)
    assert torch.equal(net[2].weight, fmodel.params["2.weight"])


def test_buffers_are_held() -> None:
    """Statistics of the batch are part of the map; the running ones of the loop are not."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
    found = []
    for adjoint in (bda.Checkpointed(), TIGHT):
        x = torch.zeros(24, requires_grad=True)
        inner = bda.BDAInnerOptimizer(net[2].parameters(), lr=0.3)
        fmodel = inner.unroll(net, lower, upper, hyper=x, steps=150, adjoint=adjoint)
        found.append(torch.autograd.grad(upper(fmodel, x, None), x)[0])
        assert int(fmodel.buffer_dict["1.num_batches_tracked"]) >= 150
    assert relative_error(found[1:], found[:1]) < 1e-9


# Trees, and settings that are learned.


def tree_problem() -> tuple[Any, Any, Any, Any]:
    design, held = numbers(20, 6, seed=5) / 4, numbers(20, 6, seed=6) / 4
    targets, wanted = numbers(20, 2, seed=7), numbers(20, 2, seed=8)

    def lower(y: Any, x: Any, batch: Any) -> Tensor:
        penalty = x["log"].exp() * y["w"][0].square().sum() + 0.4 * y["b"].square().sum()
        return (design @ y["w"][0] + y["b"] - targets).square().sum() / 20 + penalty

    def upper(y: Any, x: Any, batch: Any) -> Tensor:
        return (held @ y["w"][0] + y["b"] - x["shift"] * wanted).square().sum() / 20

    start = {"w": [torch.zeros(6, 2)], "b": torch.zeros(2)}
    return lower, upper, start, {"log": double(-1.0), "shift": double(0.7)}


def test_trees() -> None:
    lower, upper, start, hyper = tree_problem()
    options: dict[str, Any] = dict(steps=150, lr=0.3, upper_lr=0.2, alpha=0.2)
    want = bda.hypergradient(lower, upper, start, hyper, adjoint=bda.Checkpointed(), **options).grad
    got = bda.hypergradient(lower, upper, start, hyper, adjoint=TIGHT, **options).grad
    assert relative_error(list(got.values()), list(want.values())) < 1e-9

    # Differences of F at the fixed point that Newton steps lead to.
    def value() -> Tensor:
        return bda.hypergradient(lower, upper, start, hyper, adjoint=bda.Implicit(settle=3, tol=1e-12), **options).value

    differences = difference_quotients(value, list(hyper.values()), h=1e-4)
    assert relative_error(list(got.values()), differences) < 1e-8


LEARNED: dict[str, dict[str, Any]] = {
    "lr": {"lr": double(0.3)},
    "upper_lr": {"upper_lr": double(0.25)},
    "alpha": {"alpha": double(0.2)},
    "schedule": {"alpha": bda.constant(double(0.2))},
    "momentum": {"momentum": double(0.5)},
    "weight_decay": {"weight_decay": double(0.3)},
    "one rate per element": {"lr": [0.3 * torch.ones(6, 2, dtype=torch.float64), double(0.2)]},
    "prox": {"prox": bda.prox.l1(double(0.05))},
}


def settings_of(options: dict[str, Any]) -> list[Tensor]:
    found: list[Tensor] = []
    for value in options.values():
        inside = list(vars(value).values()) if hasattr(value, "__dict__") and not isinstance(value, Tensor) else [value]
        found += [t for t in tree_leaves(inside) if isinstance(t, Tensor)]
    return found


@pytest.mark.parametrize("name", LEARNED)
def test_learned_settings(name: str) -> None:
    lower, upper, start, hyper = tree_problem()
    options: dict[str, Any] = {"lr": 0.3, "upper_lr": 0.2, "alpha": 0.2, **LEARNED[name]}
    learned = [t.requires_grad_() for t in settings_of(options)]
    found = []
    for adjoint in (bda.Checkpointed(), TIGHT):
        y = bda.rollout(lower, upper, start, hyper, steps=150, adjoint=adjoint, **options)
        found.append(torch.autograd.grad(upper(y, hyper, None), learned))
    assert relative_error(found[1], found[0]) < 1e-8


def test_rates_that_are_functions_of_k() -> None:
    """The map has the rates of the last step."""
    lower, upper, start, hyper = tree_problem()
    options: dict[str, Any] = dict(steps=150, alpha=0.2, adjoint=TIGHT)
    plain = bda.hypergradient(lower, upper, start, hyper, lr=0.3, upper_lr=0.2, **options).grad
    rates: dict[str, Any] = {"lr": lambda k: min(0.3, 0.1 * k), "upper_lr": lambda k: max(0.2, 1 / k)}
    varied = bda.hypergradient(lower, upper, start, hyper, **rates, **options).grad
    assert relative_error(list(varied.values()), list(plain.values())) < 1e-9


def test_a_learned_rate_has_no_influence_without_alpha() -> None:
    problem = ridge(8, 20, seed=0)
    lr = double(problem.lr).requires_grad_()
    y = bda.rollout(problem.lower, None, problem.start, problem.hyper, steps=800, lr=lr, adjoint=TIGHT)
    assert abs(torch.autograd.grad(problem.upper(y, problem.hyper), lr)[0].item()) < 1e-12


def test_gradients_flow_into_batches() -> None:
    inputs = numbers(12, 4, seed=3).requires_grad_()
    targets = numbers(12, 2, seed=4)

    def loss(net: Any, x: Any, batch: Any) -> Tensor:
        return (net(batch[0]) - batch[1]).square().mean() + 0.1 * (net.weight.square().sum() + net.bias.square().sum())

    found = []
    for adjoint in (bda.Checkpointed(), TIGHT, bda.Implicit(tol=1e-12, batch=(inputs, targets))):
        torch.manual_seed(0)
        head = nn.Linear(4, 2)
        inner = bda.BDAInnerOptimizer(head.parameters(), lr=0.2)
        fmodel = inner.unroll(head, loss, None, steps=500, batches=[(inputs, targets)] * 500, adjoint=adjoint)
        found.append(torch.autograd.grad((fmodel(OTHERS) - WANTED).square().mean(), inputs)[0])
    assert relative_error(found[1:2], found[:1]) < 1e-9 and torch.equal(found[1], found[2])


@pytest.mark.parametrize("prox", [bda.prox.l1(0.05), bda.prox.group_lasso(0.2), bda.prox.box(-0.1, 0.3)], ids=str)
@pytest.mark.parametrize("alpha", [0.0, 0.1])
def test_proximal_maps(prox: Any, alpha: float) -> None:
    lower, upper, _, hyper = tree_problem()
    settings: dict[str, Any] = dict(steps=150, lr=0.3, upper_lr=0.2, alpha=alpha, prox=prox, momentum=0.3)
    tree = lambda y, x, b: lower({"w": [y], "b": torch.zeros(2)}, x, b)  # noqa: E731
    above = lambda y, x, b: upper({"w": [y], "b": torch.zeros(2)}, x, b)  # noqa: E731
    exact = bda.hypergradient(tree, above, torch.zeros(6, 2), hyper, adjoint=bda.Checkpointed(), **settings)
    got = bda.hypergradient(tree, above, torch.zeros(6, 2), hyper, adjoint=TIGHT, **settings)
    assert relative_error(list(got.grad.values()), list(exact.grad.values())) < 1e-9


def test_newton_steps_through_a_prox() -> None:
    problem = lasso(60, 40, 6, seed=1)
    options: dict[str, Any] = dict(lr=problem.lr, prox=bda.prox.l1(lambda x: x))
    exact = bda.hypergradient(*problem.arguments, steps=2000, adjoint=TIGHT, **options)
    short, carry = dict(steps=25, **options), bda.Carry()
    settled = bda.hypergradient(*problem.arguments, adjoint=bda.Implicit(settle=8, tol=1e-12, carry=carry), **short)
    torch.testing.assert_close(settled.params, exact.params, rtol=1e-10, atol=1e-12)
    assert relative_error([settled.grad], [exact.grad]) < 1e-9
    assert carry.moved < 1e-12
    before = bda.hypergradient(*problem.arguments, adjoint=bda.Implicit(tol=1e-12), **short)
    assert (before.params - exact.params).norm() > 1e-4


def test_complex_parameters() -> None:
    design = torch.complex(numbers(9, 4, seed=1), numbers(9, 4, seed=2)) / 4
    targets = torch.complex(numbers(9, seed=3), numbers(9, seed=4))
    wanted = torch.complex(numbers(4, seed=5), numbers(4, seed=6))

    def lower(y: Tensor, x: Tensor, batch: Any) -> Tensor:
        return (design @ y - x * targets).abs().square().sum() + 0.6 * y.abs().square().sum()

    def upper(y: Tensor, x: Tensor, batch: Any) -> Tensor:
        return (y - wanted).abs().square().sum()

    start = torch.zeros(4, dtype=torch.complex128)
    options: dict[str, Any] = dict(steps=200, lr=0.1, upper_lr=0.1, alpha=0.1)
    want = bda.hypergradient(lower, upper, start, double(0.7), adjoint=bda.Checkpointed(), **options).grad
    got = bda.hypergradient(lower, upper, start, double(0.7), adjoint=TIGHT, **options).grad
    assert relative_error([got], [want]) < 1e-9


# Tasks.


def task_problem(tasks: int, size: int, seed: int) -> tuple[Any, Any, Any]:
    batch = numbers(tasks, 9, size, seed=seed), numbers(tasks, 9, seed=seed + 1)

    def lower(y: Tensor, x: Any, batch: Any) -> Tensor:
        return (batch[0] @ y - batch[1]).square().mean() + 0.5 * x["log"].exp() * (y - x["anchor"]).square().sum()

    def upper(y: Tensor, x: Any, batch: Any) -> Tensor:
        return (batch[0].flip(0) @ y - batch[1]).square().mean()

    return lower, upper, batch


@pytest.mark.parametrize(("tasks", "size", "seed"), [(4, 5, 0), (3, 7, 20)])
@pytest.mark.parametrize("settings", [{}, {"alpha": 0.1, "momentum": 0.5}, {"prox": bda.prox.l1(0.02)}], ids=str)
def test_tasks_and_the_anchor_they_start_from(tasks: int, size: int, seed: int, settings: dict[str, Any]) -> None:
    lower, upper, batch = task_problem(tasks, size, seed)
    anchor = numbers(size, seed=seed + 2)
    hyper = {"anchor": anchor, "log": double(1.0)}
    options: dict[str, Any] = dict(steps=80, lr=0.12, upper_lr=0.1, **settings)

    def gradient(adjoint: Any, part: slice = slice(None), **more: Any) -> list[Tensor]:
        some = tuple(t[part] for t in batch)
        batches = {"batches": [some] * 80, "upper_batch": some, "tasks": len(some[0]), **more}
        return list(bda.hypergradient(lower, upper, anchor, hyper, adjoint=adjoint, **batches, **options).grad.values())

    carry = bda.Carry()
    got = gradient(bda.Implicit(tol=1e-12, carry=carry))
    assert relative_error(got, gradient(bda.Checkpointed())) < 1e-8
    alone, products = [torch.zeros_like(t) for t in got], []
    for i in range(tasks):
        own = bda.Carry()
        for total, part in zip(alone, gradient(bda.Implicit(tol=1e-12, carry=own), slice(i, i + 1)), strict=True):
            total += part
        products.append(own.iterations)
    assert relative_error(got, alone) < 1e-10
    assert carry.iterations <= max(products) + 1, "each task has coefficients of its own"
    assert carry.v is not None and carry.v[0].shape == (tasks, size)
    assert relative_error(gradient(TIGHT, chunk_size=2), got) < 1e-10


def test_newton_steps_of_tasks() -> None:
    lower, upper, batch = task_problem(4, 5, 0)
    anchor = numbers(5, seed=2)
    hyper = {"anchor": anchor, "log": double(-0.5)}

    def curved(y: Tensor, x: Any, batch: Any) -> Tensor:
        return lower(y, x, batch) + (y - 0.3).cosh().log().sum()

    def out(steps: int, adjoint: Any) -> bda.Hypergradient:
        batches: dict[str, Any] = {"batches": [batch] * steps, "upper_batch": batch, "tasks": 4}
        return bda.hypergradient(curved, upper, anchor, hyper, steps=steps, lr=0.15, adjoint=adjoint, **batches)

    near, settled = out(150, TIGHT), out(5, bda.Implicit(settle=8, tol=1e-12))
    torch.testing.assert_close(settled.params, near.params, rtol=1e-10, atol=1e-11)
    assert relative_error(list(settled.grad.values()), list(near.grad.values())) < 1e-9


# iMAML: the start is a constant, the anchor an upper variable.


def anchored(net: Any, meta: Any, batch: Any) -> Tensor:
    pairs = zip(net.parameters(), meta.parameters(), strict=True)
    return (net(INPUTS) - TARGETS).square().mean() + 0.5 * sum((p - q).square().sum() for p, q in pairs)


@pytest.mark.parametrize("copy_initial_weights", [True, False])
@pytest.mark.parametrize("seed", [0, 1])
def test_imaml_in_unroll(copy_initial_weights: bool, seed: int) -> None:
    found = []
    for adjoint in (bda.Checkpointed(), TIGHT):
        net = network(seed)
        inner = bda.BDAInnerOptimizer(net.parameters(), lr=0.2)
        fmodel = inner.unroll(
            net, anchored, None, hyper=net, steps=200, adjoint=adjoint, copy_initial_weights=copy_initial_weights
        )
        upper(fmodel, net, None).backward()
        found.append([p.grad for p in net.parameters()])
    assert relative_error(found[1], found[0]) < 1e-9


@pytest.mark.parametrize(("size", "strength", "seed"), [(6, 0.5, 0), (9, 2.0, 30)])
@pytest.mark.parametrize("door", ["hypergradient", "rollout"])
def test_imaml_in_closed_form(size: int, strength: float, seed: int, door: str) -> None:
    """y* = argmin |A y - b|^2 / 2 + lambda |y - x|^2 / 2, so dF/dx = lambda (A^T A + lambda)^-1 F_y."""
    design, targets, wanted = numbers(12, size, seed=seed), numbers(12, seed=seed + 1), numbers(size, seed=seed + 2)
    anchor = numbers(size, seed=seed + 3).requires_grad_()

    def lower(y: Tensor, x: Any, batch: Any) -> Tensor:
        return 0.5 * (design @ y - targets).square().sum() + 0.5 * strength * (y - x).square().sum()

    def upper(y: Tensor, x: Any, batch: Any) -> Tensor:
        return 0.5 * (y - wanted).square().sum()

    hessian = design.T @ design + strength * torch.eye(size)
    y = torch.linalg.solve(hessian, design.T @ targets + strength * anchor.detach())
    want = strength * torch.linalg.solve(hessian, y - wanted)
    options: dict[str, Any] = dict(steps=400, lr=1 / float(torch.linalg.eigvalsh(hessian)[-1]), adjoint=TIGHT)
    if door == "hypergradient":
        got = bda.hypergradient(lower, upper, anchor, anchor, **options).grad
    else:
        end = bda.rollout(lower, None, anchor, anchor, **options)
        (got,) = torch.autograd.grad(upper(end, anchor, None), anchor)
    assert relative_error([got], [want]) < 1e-10


def test_an_anchor_that_is_no_leaf() -> None:
    w = numbers(3, seed=0).requires_grad_()
    x = w * 2
    lower = lambda y, x, b: 0.5 * (y - 1).square().sum() + 0.5 * (y - x).square().sum()  # noqa: E731
    y = bda.rollout(lower, None, x, x, steps=100, lr=0.4, adjoint=TIGHT)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), w)[0], torch.ones(3))


# Cost, and going on.


@pytest.mark.parametrize("size", [400, 900])
def test_memory_does_not_depend_on_the_number_of_steps(size: int) -> None:
    targets = numbers(size, seed=0)

    def peak(steps: int) -> float:
        x = double(0.5).requires_grad_()
        with Memory() as memory:
            y = bda.rollout(
                lambda y, x, b: 0.5 * (y - x * targets).square().sum(), None, torch.zeros(size), x, steps=steps,
                lr=0.3, adjoint=bda.Implicit(),
            )  # fmt: skip
            torch.autograd.grad(y.sum(), x)
        return memory.peak

    peaks = [peak(steps) for steps in (50, 200)]
    assert peaks[1] - peaks[0] <= 150 * 8 + 256, "the losses alone"
    assert peaks[1] < 30 * 8 * size


def test_one_evaluation_more_than_steps() -> None:
    calls = []

    def lower(y: Tensor, x: Tensor, batch: Any) -> Tensor:
        calls.append(1)
        return 0.5 * (y - x).square().sum() + 0.1 * y.square().sum()

    bda.hypergradient(
        lower, lambda y, x, b: y.square().sum(), torch.zeros(4), numbers(4), steps=50, lr=0.5, adjoint=TIGHT
    )
    assert len(calls) == 51


def test_the_distance_is_an_upper_estimate() -> None:
    for problem in (ridge(10, 30, seed=0), ridge(15, 40, seed=30)):
        exact = bda.hypergradient(*problem.arguments, steps=1000, lr=problem.lr, adjoint=TIGHT).params
        for steps in (30, 60, 120):
            carry = bda.Carry()
            adjoint = bda.Implicit(tol=1e-10, carry=carry)
            out = bda.hypergradient(*problem.arguments, steps=steps, lr=problem.lr, adjoint=adjoint)
            true = float((out.params - exact).norm())
            assert 1 - 1e-6 <= carry.distance / true <= 8
            moved = problem.lr * torch.func.grad(problem.lower)(out.params, problem.hyper)
            assert carry.moved == pytest.approx(float(moved.norm()), rel=1e-9)


def test_a_point_that_is_far_warns() -> None:
    problem = ridge(10, 30, seed=0)
    with pytest.warns(RuntimeWarning, match="far from the fixed point.*settle"):
        bda.hypergradient(*problem.arguments, steps=1, lr=problem.lr, adjoint=bda.Implicit())
    bda.hypergradient(*problem.arguments, steps=1, lr=problem.lr, adjoint=bda.Implicit(settle=3))


def test_a_carry_is_resumed_to_the_bit() -> None:
    problem = ridge(10, 30, seed=0)

    def iterate(carry: bda.Carry, x: Tensor, y: Tensor, count: int) -> tuple[Tensor, Tensor]:
        for _ in range(count):
            adjoint = bda.Implicit(carry=carry, tol=1e-3)
            out = bda.hypergradient(problem.lower, problem.upper, y, x, steps=20, lr=problem.lr, adjoint=adjoint)
            x, y = x - 0.1 * out.grad, out.params
        return x, y

    first = bda.Carry()
    whole = iterate(first, *iterate(first, problem.hyper, problem.start, 4), 4)
    second = bda.Carry()
    middle = iterate(second, problem.hyper, problem.start, 4)
    file = io.BytesIO()
    torch.save(second.state_dict(), file)
    file.seek(0)
    third = bda.Carry()
    third.load_state_dict(torch.load(file, weights_only=True))
    assert all(torch.equal(a, b) for a, b in zip(whole, iterate(third, *middle, 4), strict=True))
    assert third.iterations == first.iterations and third.residual == first.residual
    with pytest.raises(ValueError, match=r"has distance, high.*got v"):
        third.load_state_dict({"v": None})


def test_a_carry_of_another_shape_is_dropped() -> None:
    carry = bda.Carry()
    for problem in (ridge(10, 30, seed=0), ridge(6, 30, seed=10)):
        adjoint = bda.Implicit(carry=carry, tol=1e-12)
        out = bda.hypergradient(*problem.arguments, steps=700, lr=problem.lr, adjoint=adjoint)
        assert relative_error([out.grad], [problem.exact]) < 1e-9
        assert carry.v is not None and carry.v[0].shape == problem.start.shape
    again = carry.iterations
    bda.hypergradient(*problem.arguments, steps=700, lr=problem.lr, adjoint=adjoint)
    assert carry.iterations == 1 < again, "one product shows that nothing is left to do"
    assert carry.low > 0 and carry.distance < 1e-10


def test_without_a_graph_the_loop_just_runs() -> None:
    problem = ridge(10, 30, seed=0)
    options: dict[str, Any] = dict(steps=20, lr=problem.lr)
    with torch.no_grad():
        plain = bda.rollout(problem.lower, None, problem.start, problem.hyper, adjoint=bda.Implicit(), **options)
        settled = bda.rollout(
            problem.lower, None, problem.start, problem.hyper, adjoint=bda.Implicit(settle=3), **options
        )
    want = bda.rollout(problem.lower, None, problem.start, problem.hyper, **options)
    assert torch.equal(plain, want) and not plain.requires_grad and not settled.requires_grad
    slope = torch.func.grad(problem.lower)
    assert slope(settled, problem.hyper).norm() < 1e-10 < slope(plain, problem.hyper).norm()


def test_a_second_backward_pass() -> None:
    problem = ridge(8, 20, seed=0)
    x = problem.hyper.clone().requires_grad_()
    y = bda.rollout(problem.lower, None, problem.start, x, steps=900, lr=problem.lr, adjoint=TIGHT)
    value = problem.upper(y, x)
    first = torch.autograd.grad(value, x, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(value, x)[0])
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(value, x)


@pytest.mark.parametrize("tensors", [1, 3])
def test_a_plain_function_is_its_own_map(tensors: int) -> None:
    """The adjoint knows a step by its protocol alone: a contraction will do."""
    x = double(0.4).requires_grad_()

    def step(state: Any, hyper: Sequence[Tensor], k: int) -> tuple[Any, None]:
        return tuple(0.5 * (y + hyper[0] * (i + 1)).sin() for i, y in enumerate(state)), None

    start = tuple(torch.zeros(2) for _ in range(tensors))
    found = []
    for adjoint in (bda.Unroll(), TIGHT):
        end, _ = adjoint(step, start, (x,), range(1, 80))
        found.append(torch.autograd.grad(sum(F.softplus(y).sum() for y in end), x)[0])
    assert relative_error(found[1:], found[:1]) < 1e-11
