"""The compiled engine. Most tests trace, and run the traced graph as it is: compiling it takes some twenty seconds."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import problems
import pytest
import torch
import torch._inductor
import torch.nn.functional as F
from problems import lower, mlp, upper
from torch import Tensor, nn

import bda_optim as bda
from bda_optim._compiled import cache, inductor, matmul, partition, program
from bda_optim._compiled import programs as compiled_programs
from bda_optim._support import torch_private

EXACT = [*problems.EXACT, bda.Checkpointed(every=2), bda.Truncated(last=100, within=bda.Checkpointed())]


@pytest.fixture(autouse=True)
def _fresh_engines() -> Iterator[None]:
    cache._engines.clear()
    yield
    cache._engines.clear()


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Run traced graphs without compiling them; the list counts how many were built."""
    monkeypatch.setattr(compiled_programs, "_MOST_STEPS", 2)  # tracing takes as long as there are steps in a call
    built: list[int] = []

    def compile(graph: Any, inputs: Any, options: Any) -> Any:
        built.append(len(graph.graph.nodes))
        return graph

    monkeypatch.setattr(torch._inductor, "compile", compile)
    return built


def counterexample(steps: int = 9, **options: Any) -> bda.Hypergradient:
    settings = {"lr": 0.2, "upper_lr": 0.7, "alpha": bda.harmonic(0.5), **options}
    y0, x = torch.tensor([2.0, 2.0], dtype=torch.float64), torch.tensor(0.3, dtype=torch.float64)
    return bda.hypergradient(lower, upper, y0, x, steps=steps, **settings)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.1), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layer(x).mean(1))


def conv() -> nn.Module:
    block = (nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2))
    return nn.Sequential(*block, nn.Flatten(), nn.Linear(36, 3))


def dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 3))


def weighted(net: Any, hyper: Tensor, batch: Any) -> Tensor:
    return (torch.sigmoid(hyper) * F.cross_entropy(net(batch[0]), batch[1], reduction="none")).mean()


def plain(net: Any, hyper: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(net(batch[0].flip(0)), batch[1])


def module_problem(
    make: Callable[[], nn.Module], shape: tuple[int, ...], tasks: int | None = None, **options: Any
) -> list[Tensor]:
    """Return every gradient, the buffers and the trace of a rollout of a module."""
    torch.manual_seed(0)
    model, hyper = make().double(), torch.zeros(6, dtype=torch.float64, requires_grad=True)
    front = () if tasks is None else (tasks,)
    data = torch.randn(*front, 6, *shape, dtype=torch.float64), torch.randint(0, 3, (*front, 6))
    run = {name: options.pop(name) for name in ("compile", "adjoint", "copy_initial_weights") if name in options}
    settings = {"lr": 0.05, "upper_lr": 0.1, "alpha": bda.harmonic(0.5), **options}
    inner = bda.BDAInnerOptimizer(model.parameters(), **settings)
    torch.manual_seed(1)
    fmodel = inner.unroll(
        model, weighted, plain, hyper=hyper, steps=4, batches=[data] * 4, tasks=tasks,
        **{"copy_initial_weights": False, **run},
    )  # fmt: skip
    assert fmodel.trace is not None and fmodel.trace.upper is not None
    values = [fmodel.trace.lower, fmodel.trace.upper, *(b.double() for b in fmodel.buffer_dict.values())]
    torch.manual_seed(2)
    fmodel.losses(plain, hyper, data).sum().backward()
    assert hyper.grad is not None
    return [hyper.grad, *(p.grad for p in model.parameters() if p.grad is not None), *values]


def close(got: list[Tensor], want: list[Tensor], tolerance: float = 1e-12) -> None:
    for a, b in zip(got, want, strict=True):
        assert (a - b).abs().max() <= tolerance


@pytest.mark.parametrize("adjoint", EXACT, ids=str)
def test_compiled_steps_give_the_same_under_every_adjoint(adjoint: Any, traced: list[int]) -> None:
    want = counterexample()
    got = counterexample(adjoint=adjoint, compile=True)
    close([got.grad, got.value, got.params, got.trace.lower], [want.grad, want.value, want.params, want.trace.lower])
    again = counterexample(adjoint=adjoint, compile=True)
    assert torch.equal(again.params, got.params) and traced


@pytest.mark.parametrize("adjoint", [bda.FirstOrder(), bda.Truncated(last=4)], ids=str)
def test_compiled_steps_leave_biased_adjoints_equally_biased(adjoint: Any, traced: list[int]) -> None:
    close([counterexample(adjoint=adjoint, compile=True).grad], [counterexample(adjoint=adjoint).grad])


def small_mlp() -> nn.Module:
    return mlp(4, 8, 3)


MODULES: dict[str, tuple[Any, tuple[int, ...], dict[str, Any]]] = {
    "mlp": (small_mlp, (4,), {}),
    "adam": (small_mlp, (4,), {"rule": torch.optim.Adam}),
    "fista": (small_mlp, (4,), {"rule": bda.FISTA, "prox": bda.prox.l1(0.01)}),
    "tasks-prox": (small_mlp, (4,), {"prox": bda.prox.group_lasso(0.01), "tasks": 3}),
    "tasks-adafactor": (small_mlp, (4,), {"rule": torch.optim.Adafactor, "tasks": 3}),
    "tasks-conv": (conv, (1, 6, 6), {"tasks": 2}),
}


@pytest.mark.parametrize("name", MODULES)
def test_compiled_modules_equal_uncompiled_ones(name: str, traced: list[int]) -> None:
    make, shape, options = MODULES[name]
    want = module_problem(make, shape, **options)
    close(module_problem(make, shape, compile=True, **options), want)
    assert len(traced) >= 2


@pytest.mark.parametrize("make", [dropout, pytest.param(Encoder, marks=pytest.mark.slow)])
def test_random_steps_draw_the_same_numbers_again(make: Any, traced: list[int]) -> None:
    shape, adjoint = ((4,), bda.Checkpointed(every=2)) if make is dropout else ((5, 8), bda.Unroll())
    want = module_problem(make, shape, adjoint=adjoint)
    close(module_problem(make, shape, adjoint=adjoint, compile=True), want)


def test_learnable_settings(traced: list[int]) -> None:
    def run(compile: bool) -> list[Tensor]:
        lr, c, alpha = (torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in (0.2, 0.4, 0.3))
        y0 = torch.tensor([2.0, 2.0], dtype=torch.float64, requires_grad=True)
        found = []
        for chosen in (bda.harmonic(c), alpha):
            y = bda.rollout(lower, upper, y0, torch.ones(()), steps=7, lr=lr, alpha=chosen, compile=compile)
            found += torch.autograd.grad(upper(y, torch.ones(()), None), [y0, lr, c if chosen is not alpha else alpha])
        return found

    close(run(True), run(False))


def test_changing_numbers_or_steps_compiles_nothing_new(traced: list[int]) -> None:
    counterexample(6, compile=True)
    before = len(traced)
    for options in ({"lr": 0.1}, {"alpha": bda.harmonic(0.3)}, {"alpha": bda.constant(0.2)}, {"steps": 8}):
        got = counterexample(**{"steps": 6, **options}, compile=True)
        close([got.grad], [counterexample(**{"steps": 6, **options}).grad])
    assert len(traced) == before
    counterexample(6, alpha=0.0, compile=True)  # another program: the upper loss is absent
    assert len(traced) > before


def test_functions_made_anew_and_other_data_compile_nothing_new(traced: list[int]) -> None:
    counts = []
    for value in (1.0, 2.0, 3.0):
        target = torch.full((3,), value, dtype=torch.float64)
        lower = lambda y, x, b: ((y - x * target) ** 2).sum()  # noqa: B023, E731
        upper = lambda y, x, b: (y**2).sum()  # noqa: E731
        args = (lower, upper, torch.zeros(3, dtype=torch.float64), torch.ones((), dtype=torch.float64))
        got = bda.hypergradient(*args, steps=4, lr=0.1, compile=True)
        close([got.grad], [bda.hypergradient(*args, steps=4, lr=0.1).grad])
        counts.append(len(traced))
    assert counts[0] == counts[-1]


def test_tasks_with_upper_variables_compile_nothing_new(traced: list[int]) -> None:
    """Nested one level deeper than a single task: what is too deep is compared by identity, so it would never match."""

    def run() -> bda.Hypergradient:
        return bda.hypergradient(
            lambda y, x, b: ((y["a"] - x["w"][0]) ** 2).sum() * b, lambda y, x, b: y["a"].sum(), {"a": torch.ones(3)},
            {"w": [torch.tensor(0.5)]}, steps=2, lr=0.1, tasks=4, batches=[torch.ones(4)] * 2, compile=True,
        )  # fmt: skip

    first, _ = run(), run()  # the first looks at an uncompiled step
    count = len(traced)
    assert torch.equal(run().grad["w"][0], first.grad["w"][0])
    assert len(traced) == count > 0


def test_another_flag_or_number_in_a_closure_is_another_problem(traced: list[int]) -> None:
    for power in (2, 4):
        lower = lambda y, x, b: ((y - x) ** power).sum()  # noqa: B023, E731
        args = (
            lower,
            lambda y, x, b: y.sum(),
            torch.zeros(3, dtype=torch.float64),
            torch.ones((), dtype=torch.float64),
        )
        close(
            [bda.hypergradient(*args, steps=4, lr=0.1, compile=True).grad],
            [bda.hypergradient(*args, steps=4, lr=0.1).grad],
        )


def test_training_mode_is_part_of_the_problem(traced: list[int]) -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3)).double()
    data = torch.randn(6, 4, dtype=torch.float64), torch.randint(0, 3, (6,))
    inner = bda.BDAInnerOptimizer(model.parameters(), lr=0.05)
    for mode in (True, False):
        model.train(mode)
        found = []
        for compile in (False, True):
            hyper = torch.zeros(6, dtype=torch.float64, requires_grad=True)
            fmodel = inner.unroll(model, weighted, hyper=hyper, steps=3, batches=[data] * 3, compile=compile)
            found.append(torch.autograd.grad(plain(fmodel, hyper, data), hyper)[0])
        close(found[1:], found[:1])


def test_what_cannot_be_traced_runs_uncompiled_with_one_warning(traced: list[int]) -> None:
    def lower(y: Tensor, x: Tensor, batch: Any) -> Tensor:
        return ((y - x) ** 2).sum() * (2.0 if y.sum().item() > 0 else 1.0)

    args = (lower, lambda y, x, b: y.sum(), torch.zeros(3, dtype=torch.float64), torch.ones((), dtype=torch.float64))
    want = bda.hypergradient(*args, steps=4, lr=0.1)
    with pytest.warns(UserWarning, match=r"compile=True: the step could not be compiled .*runs uncompiled") as caught:
        got = bda.hypergradient(*args, steps=4, lr=0.1, compile=True)
        bda.hypergradient(*args, steps=4, lr=0.1, compile=True)
    close([got.grad], [want.grad])
    assert len(caught) == 1


def test_wrong_numbers_are_noticed(traced: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(graph: Any, inputs: Any, options: Any) -> Any:
        return lambda *flat: [t * 1.001 for t in graph(*flat)]

    monkeypatch.setattr(torch._inductor, "compile", wrong)
    with pytest.warns(UserWarning, match="gives other numbers"):
        got = counterexample(compile=True)
    close([got.grad], [counterexample().grad])


def test_agreement_is_relative_to_each_tensor_and_tolerates_noise() -> None:
    big, tiny = torch.ones(3, dtype=torch.float64), torch.full((3,), 1e-17, dtype=torch.float64)
    assert program.agree([big, -tiny], [big, tiny])
    assert not program.agree([big * (1 + 1e-6)], [big])
    assert not program.agree([torch.full((3,), torch.nan)], [torch.ones(3)])


def test_many_layouts_end_in_uncompiled_steps(traced: list[int]) -> None:
    batches = [torch.randn(n, dtype=torch.float64) for n in range(1, 40)]
    lower = lambda y, x, b: ((y - x) ** 2).sum() + (b * y[0]).mean()  # noqa: E731
    args = (lower, lambda y, x, b: y.sum(), torch.zeros(3, dtype=torch.float64), torch.ones((), dtype=torch.float64))
    with pytest.warns(UserWarning, match="layouts of batches"):
        got = bda.hypergradient(*args, steps=39, lr=0.1, batches=batches, compile=True)
    close([got.grad], [bda.hypergradient(*args, steps=39, lr=0.1, batches=batches).grad])


def test_a_captured_tensor_that_requires_grad_is_refused(traced: list[int]) -> None:
    captured = torch.ones(3, dtype=torch.float64, requires_grad=True)
    lower = lambda y, x, b: ((y - x * captured) ** 2).sum()  # noqa: E731
    args = (lower, lambda y, x, b: y.sum(), torch.zeros(3, dtype=torch.float64), torch.ones((), dtype=torch.float64))
    for adjoint in (bda.Unroll(), bda.ForwardMode()):
        with pytest.raises(ValueError, match="neither in `hyper=`"):
            bda.hypergradient(*args, steps=4, lr=0.1, adjoint=adjoint, compile=True)


def test_anything_but_true_or_false_is_refused() -> None:
    with pytest.raises(ValueError, match="must be True or False; got 'fast'"):
        counterexample(compile="fast")


@pytest.mark.parametrize("mode", ["reverse", "mixed"])
def test_modes_of_earlier_versions_are_deprecated(mode: str, traced: list[int]) -> None:
    want = counterexample(compile=True)
    with pytest.warns(DeprecationWarning, match="is compile=True"):
        found = counterexample(compile=mode)
    assert torch.equal(found.grad, want.grad)


def test_second_derivative_of_a_compiled_hypergradient(traced: list[int]) -> None:
    found = []
    for compile in (False, True):
        x = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
        y0 = torch.tensor([2.0, 2.0], dtype=torch.float64)
        y = bda.rollout(lambda y, x, b: (y**4).sum() - x**2 * y.sum(), None, y0, x, steps=6, lr=0.01, compile=compile)
        (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        found.append(torch.autograd.grad(grad, x)[0])
    close(found[1:], found[:1])


def test_no_grad_and_meta(traced: list[int]) -> None:
    with torch.no_grad():
        want = bda.rollout(lower, upper, torch.ones(2), torch.ones(()), steps=9, lr=0.1, alpha=0.3)
        got = bda.rollout(lower, upper, torch.ones(2), torch.ones(()), steps=9, lr=0.1, alpha=0.3, compile=True)
    assert not got.requires_grad and torch.allclose(got, want)
    y0, x = torch.ones(2, device="meta"), torch.ones((), device="meta")
    assert bda.rollout(lower, None, y0, x, steps=3, lr=0.1, compile=True).is_meta


def test_commit_after_a_compiled_rollout_keeps_plain_counts(traced: list[int]) -> None:
    model = small_mlp().double()
    inner = bda.BDAInnerOptimizer(model.parameters(), lr=0.01, rule=torch.optim.Adam)
    data = torch.randn(6, 4, dtype=torch.float64), torch.randint(0, 3, (6,))
    hyper = torch.zeros(6, dtype=torch.float64)
    inner.commit(inner.unroll(model, weighted, hyper=hyper, steps=3, batches=[data] * 3, compile=True))
    assert inner.state[model[0].weight]["step"] == 3 and type(inner.state[model[0].weight]["step"]) is int


def trees_of_tasks(count: int, **options: Any) -> Any:
    tasks = torch.ones(count, 3, dtype=torch.float64)
    hyper = {"a": [torch.ones((), dtype=torch.float64), {"b": torch.zeros(3, dtype=torch.float64)}]}
    y0 = {"y": torch.zeros(3, dtype=torch.float64)}
    return bda.hypergradient(
        lambda y, x, b: ((y["y"] - x["a"][0] * b - x["a"][1]["b"]) ** 2).sum(), lambda y, x, b: y["y"].sum(), y0, hyper,
        steps=2, batches=[tasks] * 2, tasks=count, compile=True, **options,
    )  # fmt: skip


def head_of_tasks() -> Any:
    torch.manual_seed(0)
    model = HEADED
    inner = bda.BDAInnerOptimizer(model[2].parameters(), lr=0.1)
    data = torch.randn(2, 5, 4), torch.randint(0, 3, (2, 5))
    fmodel = inner.unroll(
        model, lambda net, x, b: F.cross_entropy(net(b[0]), b[1]), steps=2, batches=[data] * 2, tasks=2,
        compile=True,
    )  # fmt: skip
    return fmodel.losses(lambda net, x, b: F.cross_entropy(net(b[0]), b[1]), None, data).sum().backward()


class Headed(nn.Sequential):
    frozen = "the first layer"  # a name that this package uses, too


HEADED = Headed(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


@pytest.mark.parametrize(
    "once",
    [
        lambda: trees_of_tasks(2, lr=0.1),
        lambda: trees_of_tasks(2, lr=torch.tensor(0.1), alpha=bda.harmonic(torch.tensor(0.5))),
        lambda: trees_of_tasks(2, lr=0.1, prox=bda.prox.l1(lambda x: x["a"][0])),
        head_of_tasks,
        lambda: counterexample(6, alpha=bda.harmonic(torch.tensor(0.5)), compile=True),
    ],
    ids=["trees", "learned settings", "prox", "head", "counter-example"],
)
def test_nothing_is_built_twice(once: Callable[[], Any], traced: list[int]) -> None:
    """An upper iteration makes its losses, batches and settings anew; the programs are those of the first two.

    (The very first call of a step is recorded, not compiled, to find out what the step depends on.)
    """
    once()
    once()
    built = len(traced)
    assert built
    once()
    assert len(traced) == built


def test_engines_are_freed_with_their_loss(traced: list[int]) -> None:
    def problem() -> weakref.ref[Any]:
        scope: dict[str, Any] = {}
        exec("def lower(y, x, b):\n    return ((y - x) ** 2).sum()", scope)
        args = (scope["lower"], upper, torch.zeros(2, dtype=torch.float64), torch.ones((), dtype=torch.float64))
        bda.hypergradient(*args, steps=3, lr=0.1, compile=True)
        return weakref.ref(next(iter(cache._engines[scope["lower"].__code__].values())))

    engine = problem()
    gc.collect()
    assert engine() is None and not len(cache._engines)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_really_compiled() -> None:
    """The only test here that compiles: a module, both levels, Adam."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="compile=True")
        got = module_problem(lambda: nn.Linear(4, 3), (4,), rule=torch.optim.Adam, compile=True)
    close(got, module_problem(lambda: nn.Linear(4, 3), (4,), rule=torch.optim.Adam))


# --- a step and its pull-back, divided --------------------------------------------------------------------------------


def operations(graph: Any) -> list[str]:
    return [node.target.name().split("::")[1] for node in graph.graph.nodes if node.op == "call_function"]


def traced_joint(function: Callable[..., list[Any]], inputs: list[Tensor]) -> Any:
    graph, _ = program.trace(function, inputs)
    return graph


def test_the_second_part_repeats_no_product() -> None:
    """X W^T and the sums of a softmax are saved, what is elementwise is not; both parts together are the whole."""
    torch.manual_seed(0)
    x, w, v = (torch.randn(shape, dtype=torch.float64) for shape in ((6, 4), (3, 4), (3, 4)))

    def joint(x: Tensor, w: Tensor, v: Tensor) -> list[Any]:
        with torch.enable_grad():
            w = w.detach().requires_grad_()
            (slope,) = torch.autograd.grad((x @ w.t()).tanh().logsumexp(1).sum(), w, create_graph=True)
            new = w - 0.1 * slope
            return [new.detach(), *torch.autograd.grad(new, w, v)]

    whole = traced_joint(joint, [x, w, v])
    ahead, back, count = partition.partition(whole, 1, [2])
    new, *saved = ahead(x, w)
    assert len(saved) == count > 0
    torch.testing.assert_close([new, *back(x, w, *saved, v)], joint(x, w, v))
    assert operations(ahead).count("mm") == 2 and operations(back).count("mm") == 2
    assert operations(whole).count("mm") == 4
    assert "tanh" in operations(back)  # elementwise: computed again, not saved


def test_operations_that_change_their_arguments_are_not_divided() -> None:
    graph = traced_joint(lambda x, v: [x.clone().mul_(2), x * v], [torch.ones(3), torch.ones(3)])
    assert partition.partition(graph, 1, [1]) is None


def test_compiled_steps_save_their_work(traced: list[int]) -> None:
    """Unroll and Checkpointed evaluate no loss in the backward pass of a step again."""
    for adjoint in (bda.Unroll(), bda.Checkpointed(every=2)):
        cache._engines.clear()
        counterexample(compile=True, adjoint=adjoint)
        (engine,) = next(iter(cache._engines.values())).values()
        assert engine.pairs and all(pair is not None for pair in engine.pairs.values())
        assert not any(key[0] == "pull" for key in engine.programs)


def test_narrow_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """X W^T is computed by oneDNN where that was measured to be faster, with and without a bias; the results stay."""
    if not torch.backends.mkldnn.is_available():
        pytest.skip("torch has no oneDNN here")
    assert matmul._is_faster(100, 20, 3, 1) in (True, False)  # one real measurement
    torch.manual_seed(0)
    x, w, b = torch.randn(1000, 250), torch.randn(10, 250), torch.randn(10)
    for faster in (True, False):
        monkeypatch.setattr(matmul, "_is_faster", lambda *shape, faster=faster: faster)
        graph = traced_joint(lambda x, w, b: [F.linear(x, w, b), x @ w.t(), w @ x.t(), x[:3] @ w.t()], [x, w, b])
        want = graph(x, w, b)
        matmul.narrow(graph)
        graph.recompile()
        assert operations(graph).count("narrow_product") == 2 * faster
        torch.testing.assert_close(graph(x, w, b), want, rtol=1e-4, atol=1e-4)


def noisy(y: Tensor, x: Tensor, batch: Any) -> Tensor:
    torch.randn(2)  # drawn, though not used
    return ((y + 0.1 * torch.randn_like(y) - x) ** 2).sum()


@pytest.mark.parametrize("adjoint", [bda.Unroll(), bda.Checkpointed(), bda.Checkpointed(every=2)], ids=str)
def test_random_numbers_are_those_of_uncompiled_steps(adjoint: Any, traced: list[int]) -> None:
    """In the rollout that compiles and in the next one; numbers that are not used are drawn too."""

    def run(**options: Any) -> list[Tensor]:
        torch.manual_seed(0)
        start, x = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
        args = (noisy, lambda y, x, b: (y * y).sum(), start, x)
        return [bda.hypergradient(*args, steps=12, lr=0.1, adjoint=adjoint, **options).grad, torch.rand(2).double()]

    want = run()
    for _ in range(2):
        close(run(compile=True), want)


@pytest.mark.parametrize("adjoint", [bda.Unroll(), bda.Checkpointed(every=2)], ids=str)
def test_a_missing_cotangent_is_not_a_zero(adjoint: Any, traced: list[int]) -> None:
    """|a x|^1.5 has an infinite second derivative at a = 0, where nothing depends on a."""

    def lower(y: Any, x: Tensor, batch: Any) -> Tensor:
        return ((y["w"] - x) ** 2).sum() + ((y["a"] * x).abs() ** 1.5).sum()

    start = {"w": torch.ones(2, dtype=torch.float64), "a": torch.zeros(2, dtype=torch.float64)}
    args = (lower, lambda y, x, b: (y["w"] ** 2).sum(), start, torch.tensor(0.5, dtype=torch.float64))
    want = bda.hypergradient(*args, steps=6, lr=0.1)
    for _ in range(4):
        close([bda.hypergradient(*args, steps=6, lr=0.1, adjoint=adjoint, compile=True).grad], [want.grad])


def test_a_captured_tensor_that_changes_is_refused(traced: list[int]) -> None:
    data, x = torch.rand(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64, requires_grad=True)

    def lower(y: Tensor, x: Tensor, batch: Any) -> Tensor:
        return ((y * data).tanh() * x).sum() + (y * y).sum()

    for _ in range(2):
        y = bda.rollout(lower, None, torch.ones(3, dtype=torch.float64), x, steps=8, lr=0.1, compile=True)
    data.mul_(2)
    with pytest.raises(RuntimeError, match=r"from the closure of a loss .* was changed in place"):
        torch.autograd.grad(y.sum(), x)


def test_saved_tensors_are_freed_by_the_backward_pass(traced: list[int]) -> None:
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)

    def lower(y: Tensor, x: Tensor, batch: Any) -> Tensor:
        return ((y - x) ** 2).sum().exp()

    y = bda.rollout(lower, None, torch.zeros(3, dtype=torch.float64), x, steps=8, lr=0.01, compile=True)
    replay = y.grad_fn.replay
    assert any(saved is not None for saved in replay._saved.values())
    first = torch.autograd.grad(y.sum(), x, retain_graph=True)
    assert not replay._saved
    close(list(torch.autograd.grad(y.sum(), x)), list(first))


def test_products_may_follow_each_other() -> None:
    a, b = torch.rand(3, 2, 2), torch.rand(3, 2, 2)
    graph = traced_joint(lambda a, b: [torch.bmm(torch.bmm(a, b), b)], [a, b])
    matmul.spell_out(graph)
    graph.recompile()
    assert "bmm" not in operations(graph)
    torch.testing.assert_close(graph(a, b), [a @ b @ b])


def test_autocast_is_part_of_the_problem(traced: list[int]) -> None:
    def lower(y: Tensor, x: Tensor, batch: Any) -> Tensor:
        return ((y @ x) ** 2).sum()

    args = (lower, lambda y, x, b: y.sum(), torch.rand(4, 4), torch.rand(4, 4))
    for enabled in (True, False):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            got, want = (bda.hypergradient(*args, steps=4, lr=0.01, compile=c).grad for c in (True, False))
        torch.testing.assert_close(got, want, rtol=2e-2 if enabled else 1e-5, atol=1e-2 if enabled else 1e-6)


def test_views_become_reshapes_which_other_layouts_allow() -> None:
    """Inductor lays out a `cat` with an empty tensor otherwise than torch: keys of attention in `transformers`."""
    keys = torch.randn(2, 3, 4)
    graph, _ = program.trace(lambda x: [x.view(6, 4).sin()], [keys])
    inductor.reshape_views(graph)
    graph.recompile()
    turned = keys.transpose(0, 1).contiguous().transpose(0, 1)
    with pytest.raises(RuntimeError, match="view"):
        turned.view(6, 4)
    assert torch.equal(graph(turned)[0], keys.reshape(6, 4).sin())


def noisy_upper(y: Tensor, x: Tensor, _: Any) -> Tensor:
    return ((y - 1) ** 2 * (1 + 0.3 * torch.rand_like(y))).sum() + (x * y).sum()


@pytest.mark.parametrize("adjoint", [bda.Unroll(), bda.Checkpointed(every=2), bda.Checkpointed(slots=2)], ids=str)
@pytest.mark.parametrize("late", [False, True], ids=["next", "late"])
def test_random_numbers_that_no_earlier_step_drew(adjoint: Any, late: bool, traced: list[int]) -> None:
    """The upper loss draws, and first runs in a later rollout, or only in the step that is left over."""

    def lower_alone(y: Tensor, x: Tensor, _: Any) -> Tensor:
        return ((y - x) ** 2).sum()

    def weight(k: Any) -> float:
        return 0.5 if k == 7 else 0.0

    def rollout(alpha: Any, *, compile: bool) -> bda.Hypergradient:
        y0, x = torch.tensor([2.0, 2.0], dtype=torch.float64), torch.tensor(0.3, dtype=torch.float64)
        torch.manual_seed(1)
        return bda.hypergradient(
            lower_alone, noisy_upper, y0, x, steps=7 if late else 6, lr=0.1, upper_lr=0.2, alpha=alpha,
            adjoint=adjoint, compile=compile,
        )  # fmt: skip

    for alpha in [weight] * 3 if late else [0.0, 0.0, 0.5]:
        got, want = rollout(alpha, compile=True), rollout(alpha, compile=False)
        close([got.grad, got.params, got.value], [want.grad, want.params, want.value])
    assert traced


def test_a_tensor_that_no_key_reaches_is_watched(traced: list[int]) -> None:
    """It lies too deep to be found among the closures; a change in place before the backward pass is noticed."""
    deep: Any = torch.ones(2, dtype=torch.float64)
    for _ in range(5):
        deep = SimpleNamespace(inner=deep)

    def weigh(y: Tensor, x: Tensor, _: Any) -> Tensor:
        return (deep.inner.inner.inner.inner.inner * (y - x) ** 2).sum()

    y0, x = torch.tensor([2.0, 2.0], dtype=torch.float64), torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    for change in (False, True):
        y = bda.rollout(weigh, None, y0, x, steps=4, lr=0.1, alpha=0.0, compile=True)
        if change:
            deep.inner.inner.inner.inner.inner.mul_(2)
            with pytest.raises(RuntimeError, match="changed in place"):
                y.sum().backward()
        else:
            y.sum().backward()


def test_deterministic_algorithms_have_programs_of_their_own(traced: list[int]) -> None:
    counterexample(compile=True)
    before = len(traced)
    torch.use_deterministic_algorithms(True)
    try:
        counterexample(compile=True)
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(traced) > before


def test_another_tensor_in_a_module_of_a_closure(traced: list[int]) -> None:
    teacher = nn.Linear(2, 1).double().requires_grad_(False)

    def imitate(y: Tensor, x: Tensor, _: Any) -> Tensor:
        return (teacher(y - x) ** 2).sum() + (y**2).sum()

    def rolled(*, compile: bool) -> bda.Hypergradient:
        y0, x = torch.tensor([2.0, 2.0], dtype=torch.float64), torch.tensor(0.3, dtype=torch.float64)
        return bda.hypergradient(imitate, imitate, y0, x, steps=4, lr=0.1, alpha=0.0, compile=compile)

    close([rolled(compile=True).grad], [rolled(compile=False).grad])
    built = len(traced)
    teacher.weight = nn.Parameter(torch.tensor([[1.0, 3.0]], dtype=torch.float64), requires_grad=False)
    close([rolled(compile=True).grad], [rolled(compile=False).grad])
    assert len(traced) == built  # the same programs, which are given the other tensor


@pytest.mark.parametrize("adjoint", [bda.Unroll(), bda.Checkpointed(), bda.ForwardMode(), bda.Truncated(2)], ids=str)
def test_a_step_that_cannot_be_compiled_draws_as_one_that_was_never_tried(
    adjoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compile(graph: Any, inputs: Any, options: Any) -> Any:
        return lambda *flat: tuple(t + 1 for t in graph(*flat))

    monkeypatch.setattr(torch._inductor, "compile", compile)
    monkeypatch.setattr(compiled_programs, "_MOST_STEPS", 2)

    def rolled(**options: Any) -> tuple[Tensor, Tensor]:
        y0, x = torch.tensor([2.0, 2.0], dtype=torch.float64), torch.tensor(0.3, dtype=torch.float64)
        torch.manual_seed(1)
        result = bda.hypergradient(
            noisy_upper, noisy_upper, y0, x, steps=4, lr=0.1, alpha=0.0, adjoint=adjoint, **options
        )
        return result.grad, torch.rand(1)

    with pytest.warns(UserWarning, match="other numbers than the uncompiled one"):
        got = rolled(compile=True)
    close(list(got), list(rolled()))


@pytest.mark.slow
def test_weight_decay_of_a_linear_layer_is_compiled(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor of torch 2.13 loses `alpha` in the sum of a product of matrices and another tensor."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch.manual_seed(0)
    y0, data = torch.randn(3, 2, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)
    x = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    args = (lambda y, x, b: x * (data @ y).sin().sum(), lambda y, x, b: y.square().sum(), y0, x)
    settings = {"steps": 4, "lr": 0.1, "weight_decay": 0.1}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = bda.hypergradient(*args, compile=True, **settings).grad
    close([found], [bda.hypergradient(*args, **settings).grad])


def test_a_weighted_sum_is_spelled_out() -> None:
    x, y = torch.randn(3), torch.randn(3)
    graph = torch_private.trace_graph(lambda x, y: [torch.add(x, y, alpha=0.1), torch.add(x, y), x.add(2.0)], [x, y])
    want = graph(x, y)
    inductor.scale_terms(graph)
    graph.recompile()
    assert "alpha" not in graph.code and graph.code.count("aten.mul.Tensor") == 1
    for a, b in zip(graph(x, y), want, strict=True):
        torch.testing.assert_close(a, b)
