"""`unroll` and `innerloop_ctx` on modules of every kind, against functional_call and finite differences."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from installed import attention_kernels
from problems import TIGHT, mlp, numbers
from torch import Tensor, nn
from zoo import ZOO, Case, K, Problem, sequences, square, untouched

import bda_optim as bda

every_case = pytest.mark.parametrize("case", ZOO.values(), ids=ZOO.keys())
pytestmark = [
    pytest.mark.usefixtures("doubles"),
    pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:dropout option adds dropout:UserWarning"),
]


@pytest.mark.parametrize("name", [name for name, case in ZOO.items() if case.reference])
def test_unroll_equals_a_loop_of_functional_calls(name: str) -> None:
    problem = Problem(ZOO[name])
    params, buffers, gradient = problem.loop()
    with untouched(problem.module):
        fmodel = problem.unroll()
        torch.testing.assert_close(list(fmodel.params.values()), params, **TIGHT)
        torch.testing.assert_close(list(fmodel.buffer_dict.values()), buffers, **TIGHT)
        torch.testing.assert_close(problem.gradient(fmodel), gradient, **TIGHT)
    assert gradient.abs().min() > 1e-8


@pytest.mark.parametrize("name", ZOO)
def test_hypergradient_by_finite_differences(name: str) -> None:
    problem, eps = Problem(ZOO[name]), 1e-5
    gradient = problem.gradient(problem.unroll())

    def value(hyper: Tensor) -> Tensor:
        net = problem.unroll(hyper)
        torch.manual_seed(7)
        return problem.upper(net, hyper, None)

    direction = torch.tensor([0.5, -0.8, 0.3])
    with torch.no_grad():
        moved = [value(problem.hyper + sign * eps * direction) for sign in (1, -1)]
    torch.testing.assert_close(gradient @ direction, (moved[0] - moved[1]) / (2 * eps), rtol=1e-6, atol=1e-9)


@every_case
def test_checkpointed_equals_unroll(case: Case) -> None:
    problem = Problem(case)
    exact = problem.unroll()
    buffers = {name: b.clone() for name, b in exact.buffer_dict.items()}
    expected = problem.gradient(exact)
    with untouched(problem.module):
        for adjoint in (bda.Checkpointed(every=2), bda.Checkpointed(slots=2)):
            other = problem.unroll(adjoint=adjoint)
            torch.testing.assert_close(other.params, exact.params, **TIGHT)
            torch.testing.assert_close(other.buffer_dict, buffers, **TIGHT)
            torch.testing.assert_close(tuple(other.trace), tuple(exact.trace), **TIGHT)
            torch.testing.assert_close(problem.gradient(other), expected, **TIGHT)


@every_case
def test_innerloop_equals_unroll(case: Case) -> None:
    problem = Problem(case)
    exact = problem.unroll()
    expected = problem.gradient(exact)
    with untouched(problem.module):
        torch.manual_seed(5)
        with bda.innerloop_ctx(problem.module, problem.optimizer()) as (fmodel, diffopt):
            for _ in range(K):
                diffopt.step(problem.lower(fmodel, problem.hyper, None), problem.upper(fmodel, problem.hyper, None))
            torch.testing.assert_close(fmodel.params, exact.params, **TIGHT)
            torch.testing.assert_close(problem.gradient(fmodel), expected, **TIGHT)


@pytest.mark.filterwarnings("ignore:.torch.jit.:DeprecationWarning")
@pytest.mark.parametrize("form", ["unroll", "innerloop_ctx"])
def test_modules_that_cannot_be_given_other_parameters_are_refused(form: str) -> None:
    def run(module: nn.Module, inner: bda.BDAInnerOptimizer) -> None:
        if form == "unroll":
            inner.unroll(module, lambda net, hyper, batch: net(numbers(4, 3)).sum(), steps=1)
        else:
            with bda.innerloop_ctx(module, inner):
                raise AssertionError("the context must not open")

    scripted, some = torch.jit.script(nn.Linear(3, 2)), nn.Linear(3, 2)
    with pytest.raises(TypeError, match=r"scripted module .*Pass the Python module"):
        run(scripted, bda.BDAInnerOptimizer(scripted.parameters(), lr=0.1))
    lazy = nn.Sequential(nn.Linear(3, 3), nn.LazyLinear(2))
    with pytest.raises(ValueError, match=r"'1.weight' of a lazy module .*Run the module once"):
        run(lazy, bda.BDAInnerOptimizer(lazy[0].parameters(), lr=0.1))
    with pytest.raises(ValueError, match=r"not in the module; got one of shape \(2, 3\)"):
        run(nn.Linear(3, 2), bda.BDAInnerOptimizer(some.parameters(), lr=0.1))
    some.requires_grad_(False)
    with pytest.raises(ValueError, match="owns no parameter that requires grad"):
        run(some, bda.BDAInnerOptimizer(some.parameters(), lr=0.1))


def test_hooks_run_once_for_each_call() -> None:
    module, calls = mlp(), []
    module.register_forward_pre_hook(lambda *_: calls.append("pre"))
    module.register_forward_hook(lambda *_: calls.append("root"))
    module[0].register_forward_hook(lambda *_, **__: calls.append("first"), with_kwargs=True)
    module[2].register_full_backward_hook(lambda *_: calls.append("back"))
    inner, x = bda.BDAInnerOptimizer(module.parameters(), lr=0.1), numbers(4, 3)
    fmodel = inner.unroll(module, lambda net, hyper, batch: net(x).square().mean(), steps=2)
    assert calls == ["pre", "first", "root", "back"] * 2
    calls.clear()
    fmodel(x)
    assert calls == ["pre", "first", "root"]
    calls.clear()
    with bda.innerloop_ctx(module, inner) as (fmodel, diffopt):
        diffopt.step(fmodel(x).square().mean())
        own = []
        handle = fmodel.register_forward_hook(lambda *_: own.append(1))
        fmodel(x)
        handle.remove()
        fmodel(x)
    assert own == [1]
    assert [c for c in calls if c != "back"] == ["pre", "first", "root"] * 3


def test_four_threads_may_unroll_one_module_at_once() -> None:
    problem = Problem(Case(lambda: nn.Sequential(*(ZOO[n].make() for n in ("transformer", "attention"))), sequences))
    problem.module.append(nn.BatchNorm1d(5))
    hypers = [torch.tensor([1.0 + 0.1 * i, 0.3, 0.1], requires_grad=True) for i in range(4)]
    expected = [problem.gradient(problem.unroll(hyper), hyper) for hyper in hypers]
    kernels = attention_kernels()
    found: list[Any] = [None] * 4
    barrier = threading.Barrier(4)

    def work(i: int) -> None:
        barrier.wait()
        try:
            results = []
            for _ in range(5):
                fmodel = problem.optimizer().unroll(
                    problem.module, problem.lower, problem.upper, hyper=hypers[i], steps=K
                )
                results.append(torch.autograd.grad(problem.upper(fmodel, hypers[i], None), hypers[i])[0])
            found[i] = results
        except Exception as error:
            found[i] = error

    with untouched(problem.module):
        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for results, exact in zip(found, expected, strict=True):
        assert isinstance(results, list), results
        assert all(torch.equal(result, exact) for result in results)
    assert attention_kernels() == kernels


def test_a_distributed_module_is_unwrapped() -> None:
    plain = mlp()
    wrapped = object.__new__(nn.parallel.DistributedDataParallel)  # its __init__ needs a process group
    nn.Module.__init__(wrapped)
    wrapped.module = plain
    inner = bda.BDAInnerOptimizer(wrapped.parameters(), lr=0.3)
    expected = bda.BDAInnerOptimizer(plain.parameters(), lr=0.3).unroll(plain, square, steps=K).params
    with untouched(plain):
        fmodel = inner.unroll(wrapped, square, steps=K)
        with bda.innerloop_ctx(wrapped, inner) as (other, diffopt):
            for _ in range(K):
                diffopt.step(square(other, None, None))
    for net in (fmodel, other):
        torch.testing.assert_close(list(net.params.values()), list(expected.values()), **TIGHT)
    inner.commit(fmodel)
    assert torch.equal(plain[0].weight, expected["0.weight"])
