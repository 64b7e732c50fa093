"""The first call of a compiled rollout: what is built, how often, what is found on disk, and what the user is told."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor
import torch.nn.functional as F
from torch import Tensor, nn

import bda_optim as bda
from bda_optim._compiled import cache, compiling, functional, inductor, one_source, program
from bda_optim._support import torch_private

aten = torch.ops.aten
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")


@pytest.fixture(autouse=True)
def _fresh_engines() -> Iterator[None]:
    cache._engines.clear()
    yield
    cache._engines.clear()


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Run traced graphs as they are; the list has the options of each."""
    built: list[dict[str, Any]] = []
    monkeypatch.setattr(torch._inductor, "compile", lambda graph, inputs, options: built.append(options) or graph)
    return built


def quadratic(**options: Any) -> bda.Hypergradient:
    y0, x = torch.zeros(3, dtype=torch.float64), torch.ones((), dtype=torch.float64)
    settings = {"steps": 4, "lr": 0.1, "compile": True, **options}
    return bda.hypergradient(lambda y, x, b: ((y - x) ** 2).sum(), lambda y, x, b: y.sum(), y0, x, **settings)


# --- one source per program -------------------------------------------------------------------------------------------

KERNEL = '#include <cmath>\nextern "C"  void  kernel(const float* in, float* out)\n{ out[0] = in[0]; }\n'


def test_kernels_are_joined() -> None:
    kernels = [one_source.Kernel(["const float*", "float*"], KERNEL)] * 2
    source = one_source.joined(kernels)
    assert source.count("#include <cmath>") == 1 and "namespace kernel_1" in source
    assert 'extern "C"' not in source  # else two functions would have one name
    with pytest.raises(ValueError, match="only pointers"):
        one_source.joined([one_source.Kernel(["int64_t"], KERNEL)])


def test_kernels_that_cannot_be_joined_are_built_one_by_one() -> None:
    kernels = [one_source.Kernel(["int64_t"], "first"), one_source.Kernel(["int64_t"], "second")]
    assert one_source._built(kernels, lambda argtypes, source: source) == ["first", "second"]


def test_another_thread_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What somebody else compiles meanwhile is compiled as torch does it."""
    methods = torch_private.async_compile()
    with one_source.one_source():
        assert isinstance(methods().cpp_pybinding([], "source"), one_source.Kernel)
    monkeypatch.setattr(methods, "pool", None)
    with pytest.raises(Exception):  # noqa: B017  # whatever the C++ compiler says about this
        kernel = methods().cpp_pybinding([], "this is no C++")
        kernel.result()


def waves(x: Tensor, w: Tensor) -> list[Any]:
    """Two kernels with a product between them."""
    return [((x.tanh() @ w).tanh() + 1) @ w]


def compile_waves(inputs: list[Tensor]) -> Callable[..., Any]:
    graph, _ = program.trace(waves, inputs)
    return inductor.compile_graph(graph, inputs, compiling.Choices())


def test_cache_on_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One C++ file per program; the second time it is found; after a lowering was patched it is not."""
    from torch._dynamo.utils import counters

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    inputs = [torch.randn(4, 4), torch.randn(4, 4)]
    outcomes = []

    def compile() -> Tensor:
        counters.clear()
        found: Tensor = compile_waves(inputs)(*inputs)[0]
        outcomes.append([name for name in counters["aot_autograd"] if name.startswith("autograd_cache_")])
        return found

    torch.testing.assert_close(compile(), waves(*inputs)[0])
    assert len(list(tmp_path.rglob("*.main.cpp"))) == 1  # of two kernels
    torch.testing.assert_close(compile(), waves(*inputs)[0])
    lowerings, _ = torch_private.operator_tables()
    monkeypatch.setitem(lowerings, aten.tanh.default, lowerings[aten.sin.default])
    x, w = inputs
    torch.testing.assert_close(compile(), ((x.sin() @ w).sin() + 1) @ w)
    assert [any(name.endswith("hit") for name in names) for names in outcomes] == [False, True, False]


def test_an_operator_that_is_met_does_not_change_the_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler notes that it is called as it is; in place of a lowering the same entry is a change."""
    from torch._inductor import lowering

    before = inductor.TABLES.digest()
    unknown = torch.library.custom_op(
        "bda_optim_tests::identity", lambda x: x.clone(), mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    assert unknown is not None
    met = torch.ops.bda_optim_tests.identity.default
    assert met not in lowering.lowerings
    monkeypatch.setitem(lowering.lowerings, met, lowering.fallback_handler(met))
    assert inductor.TABLES.digest() == before
    add = torch.ops.aten.add.Tensor
    monkeypatch.setitem(lowering.lowerings, add, lowering.fallback_handler(add))
    assert inductor.TABLES.digest() != before


def test_digest_of_the_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    before = inductor.TABLES.digest()
    assert inductor.TABLES.digest() == before == inductor._Tables().digest()
    lowerings, decompositions = torch_private.operator_tables()
    with monkeypatch.context() as patch:
        patch.setitem(lowerings, aten.exp.default, lambda x: x)
        patched = inductor.TABLES.digest()
        patch.setitem(lowerings, aten.exp.default, lambda x: -x)
        assert len({before, patched, inductor.TABLES.digest()}) == 3
    with monkeypatch.context() as patch:
        patch.setitem(decompositions, aten.exp.default, lambda x: x)
        assert inductor.TABLES.digest() != before
    assert inductor.TABLES.digest() == before


# --- the processor ----------------------------------------------------------------------------------------------------


def test_a_compiler_that_does_not_know_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program is the trial: where it cannot be built, torch looks for itself what can."""
    tried = []

    def compile(graph: Any, inputs: Any, options: dict[str, Any]) -> Any:
        tried.append(options.get("cpp.vec_isa_ok"))
        for node in list(graph.graph.nodes)[:-1]:
            node.name += "_changed"  # the compiler owns what it is given
        if tried[-1]:
            raise RuntimeError("a backend failed") from OSError("undefined symbol: Sleef_tanhf16")
        return graph

    monkeypatch.setattr(inductor, "PROCESSOR", inductor._Processor())
    monkeypatch.setattr(torch_private, "compile_graph", compile)
    inputs = [torch.randn(2, 2), torch.randn(2, 2)]
    for _ in range(2):
        torch.testing.assert_close(compile_waves(inputs)(*inputs), waves(*inputs))
    assert tried == [True, None, None]


def test_other_errors_are_not_blamed_on_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile(graph: Any, inputs: Any, options: Any) -> Any:
        raise NotImplementedError("no lowering")

    monkeypatch.setattr(torch_private, "compile_graph", compile)
    with pytest.raises(NotImplementedError):
        compile_waves([torch.randn(2, 2), torch.randn(2, 2)])
    assert inductor.PROCESSOR.trusted


# --- what the user is told --------------------------------------------------------------------------------------------


def test_progress_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, traced: list[Any]
) -> None:
    monkeypatch.setattr(compiling, "_PATIENCE", 0.0)
    with caplog.at_level(logging.WARNING, logger="bda_optim"):
        with bda.compiling(quiet=True):
            quadratic()
        assert not caplog.records
        cache._engines.clear()
        quadratic()
        quadratic()
    assert [record.name for record in caplog.records] == ["bda_optim"]


def test_short_compilations_are_not_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The parts add up."""
    monkeypatch.setattr(compiling, "_PATIENCE", 0.3)
    progress = compiling.Progress(compiling.Choices())
    for told in (0, 1):
        with progress.running():
            time.sleep(0.2)
        assert len(caplog.records) == told


def test_only_warnings_of_torch_are_silenced() -> None:
    with pytest.warns(DeprecationWarning, match="of the user") as caught, compiling.undisturbed():
        warnings.warn_explicit("of torch", DeprecationWarning, "file.py", 1, module="torch.jit._script")
        warnings.warn_explicit("of the user", DeprecationWarning, "file.py", 1, module="torchlike")
    assert len(caught) == 1


def test_a_fall_back_names_the_line(traced: list[Any]) -> None:
    def lower(y: Tensor, x: Tensor, batch: Any) -> Tensor:
        scale = 2.0 if y.sum().item() > 0 else 1.0
        return scale * ((y - x) ** 2).sum()

    args = (lower, lambda y, x, b: y.sum(), torch.zeros(3, dtype=torch.float64), torch.ones((), dtype=torch.float64))
    with pytest.warns(UserWarning, match="could not be compiled") as caught:
        bda.hypergradient(*args, steps=4, lr=0.1, compile=True)
    (warning,) = caught
    assert "y.sum().item() > 0" in str(warning.message) and "test_first_call.py" in str(warning.message)
    assert "_local_scalar_dense" not in str(warning.message)


def test_choices_belong_to_the_rollout(traced: list[dict[str, Any]]) -> None:
    """The backward pass compiles as the rollout was asked to, also outside of the context."""
    x = torch.ones((), dtype=torch.float64, requires_grad=True)
    start = torch.zeros(3, dtype=torch.float64)
    adjoint = bda.Checkpointed()
    with bda.compiling(cpp_wrapper=True):
        y = bda.rollout(
            lambda y, x, b: ((y - x) ** 2).sum(), None, start, x, steps=4, lr=0.1, compile=True, adjoint=adjoint
        )
    before = len(traced)
    y.sum().backward()
    assert len(traced) >= before and all(options["cpp_wrapper"] for options in traced)
    quadratic()
    assert not traced[-1]["cpp_wrapper"]


# --- graphs without mutation ------------------------------------------------------------------------------------------


def test_a_permuted_dropout_draws_the_same_numbers() -> None:
    def drop(x: Tensor) -> list[Any]:
        return [x * torch.empty_like(x).bernoulli_(0.5)]

    x = torch.rand(3, 4, 5).permute(2, 0, 1)
    graph, _ = program.trace(drop, [x])
    found = functional.functional(graph, [x])
    assert not any(map(functional.changes_arguments, found.graph.nodes))
    results = []
    for function in (graph, found):
        torch.manual_seed(3)
        results.append(function(x)[0])
    assert torch.equal(*results)


def conv() -> nn.Module:
    block = (nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2))
    return nn.Sequential(*block, nn.Flatten(), nn.Linear(36, 3)).double()


def test_a_convolutional_step_is_divided(traced: list[Any]) -> None:
    model = conv()
    inner = bda.BDAInnerOptimizer(model.parameters(), lr=0.05)
    data = torch.randn(6, 1, 6, 6, dtype=torch.float64), torch.randint(0, 3, (6,))
    loss = lambda net, x, b: F.cross_entropy(net(b[0]), b[1])  # noqa: E731
    grads = []
    for compile in (False, True):
        fmodel = inner.unroll(model, loss, steps=3, batches=[data] * 3, compile=compile, copy_initial_weights=False)
        grads.append(torch.autograd.grad(loss(fmodel, None, data), list(model.parameters())))
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-10, atol=1e-12)
    (engine,) = next(iter(cache._engines.values())).values()
    assert engine.pairs and all(pair is not None for pair in engine.pairs.values())
