"""Max-pooling in a module's twin: torch's numbers to the bit, by a faster kernel, and no derivative of zeros."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from closed_layers import Layer, check_against_differences, derivatives, is_closed
from problems import numbers
from torch import Tensor, nn

import bda_optim as bda
from bda_optim._compiled import pooling
from bda_optim._modules import max_pool

OPTIONS: dict[str, dict[str, Any]] = {
    "2x2": {"kernel_size": 2},
    "overlapping, padded": {"kernel_size": 3, "stride": 2, "padding": 1},
    "dilated": {"kernel_size": (2, 1), "stride": (1, 2), "dilation": (2, 1)},
    "ceil": {"kernel_size": 2, "stride": 3, "ceil_mode": True},
}
options = pytest.mark.parametrize("given", OPTIONS.values(), ids=list(OPTIONS))


@pytest.fixture(params=["torch's kernel", "channels last"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With channels last, however few numbers there are."""
    if request.param == "channels last":
        monkeypatch.setattr(max_pool, "_LEAST", 0)
        monkeypatch.setattr(max_pool, "_LEAST_CHANNELS", 1)
    return request.param


def spread(*shape: int) -> Tensor:
    """Numbers no two of which are close, so that differences do not change what is largest."""
    count = torch.Size(shape).numel()
    return torch.linspace(-1, 1, count, dtype=torch.float64)[torch.randperm(count)].view(shape).requires_grad_()


@options
def test_derivatives_agree_with_finite_differences(given: dict[str, Any], kernel: str) -> None:
    torch.manual_seed(0)
    curved = nn.Sequential(nn.Tanh(), nn.MaxPool2d(**given))  # pooling alone has no second derivative
    check_against_differences(Layer(curved), [spread(2, 2, 5, 6)])


@options
def test_three_orders_are_torchs_to_the_bit(given: dict[str, Any], kernel: str) -> None:
    layer = nn.MaxPool2d(**given)
    x = numbers(2, 5, 7, 6).round(decimals=1).requires_grad_()  # many ties
    closed, own = Layer(layer), Layer(layer, closed=False)

    def found(function: Any) -> list[Tensor]:
        orders = derivatives(lambda x: function(x.square()), [x], 3)
        return [function(x), *(t for order in orders for t in order)]

    assert all(torch.equal(a, b) for a, b in zip(found(closed), found(own), strict=True))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")], ids=str)
def test_numbers_that_are_not_finite(value: float, kernel: str) -> None:
    x = numbers(2, 5, 6, 6)
    x[0, :, 1, 2] = value
    x[1, 2] = value
    settings = max_pool.Settings([2, 2], [2, 2], [0, 0], [1, 1], False)
    got = max_pool.pooled(x, *settings)
    want = torch.ops.aten.max_pool2d_with_indices(x, *settings)
    assert torch.equal(got[0].nan_to_num(7.0), want[0].nan_to_num(7.0)) and torch.equal(got[1], want[1])


def test_which_kernel_is_called() -> None:
    """That with channels last: for many numbers of several channels, with a graph or without; torch's own otherwise."""
    layer = Layer(nn.MaxPool2d(2), closed=None)
    large = numbers(20, 8, 16, 16).requires_grad_()
    few, narrow = numbers(2, 8, 16, 16).requires_grad_(), numbers(200, 2, 16, 16).requires_grad_()
    last = large.detach().contiguous(memory_format=torch.channels_last).requires_grad_()
    with mock.patch.object(max_pool, "pooled", wraps=max_pool.pooled) as pooled:
        outputs = {id(x): layer(x) for x in (few, narrow, last)}
        assert not pooled.called
        layer(large)
        with torch.no_grad():
            layer(large)
        assert pooled.call_count == 2
    assert not is_closed(outputs[id(few)]) and is_closed(outputs[id(narrow)])
    for x, output in zip((few, narrow, last), outputs.values(), strict=True):
        assert torch.equal(output, nn.functional.max_pool2d(x, 2))


def test_what_the_closed_form_does_not_do_is_left_to_torch() -> None:
    indices = Layer(nn.MaxPool2d(2, return_indices=True))(numbers(2, 2, 4, 4))
    assert len(indices) == 2
    single = Layer(nn.MaxPool2d(2))(numbers(2, 4, 4).requires_grad_())  # without a batch
    assert single.shape == (2, 2, 2) and not is_closed(single)
    with pytest.raises(RuntimeError, match=r"[Oo]utput size is too small"):
        Layer(nn.MaxPool2d(5))(numbers(2, 2, 4, 4).requires_grad_())


def test_sizes_of_numpy() -> None:
    numpy = pytest.importorskip("numpy")
    x = numbers(2, 2, 4, 4).requires_grad_()
    assert torch.equal(Layer(nn.MaxPool2d(numpy.int64(2)))(x), nn.functional.max_pool2d(x, 2))


def test_the_operator_says_how_its_results_are_laid_out(kernel: str) -> None:
    x = numbers(2, 5, 6, 6).contiguous(memory_format=torch.channels_last)
    settings = max_pool.Settings([2, 2], [2, 2], [0, 0], [1, 1], False)
    torch.library.opcheck(pooling._operator(), (x, *settings), test_utils=("test_schema", "test_faketensor"))


def traced(function: Any, x: Tensor) -> Any:
    """The graph of a function with what its nodes are in `meta`."""
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(function, tracing_mode="fake")(x)


@options
def test_the_compilers_graph_gets_the_same_kernel(given: dict[str, Any], kernel: str) -> None:
    """And the same numbers; arguments that were left out are filled in."""
    x = numbers(2, 5, 7, 6)
    graph = traced(lambda x: nn.functional.max_pool2d(x, **given, return_indices=True), x)
    want = graph(x)
    pooling.pool_with_channels_last(graph)
    graph.recompile()
    assert ("bda_optim.max_pool" in graph.code) == (kernel == "channels last")
    assert all(torch.equal(a, b) for a, b in zip(graph(x), want, strict=True))


@pytest.mark.slow
def test_a_compiled_rollout_calls_it(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 1)).double()
    x = numbers(220, 1, 8, 8)
    weight = torch.ones((), dtype=torch.float64, requires_grad=True)

    def loss(net: Any, weight: Tensor, batch: None = None) -> Tensor:
        return weight * net(x).square().mean()

    found = []
    with mock.patch.object(max_pool, "pooled", wraps=max_pool.pooled) as pooled:
        monkeypatch.setattr(pooling, "pooled", pooled)
        pooling._operator.cache_clear()
        for compile in (False, True):
            pooled.reset_mock()
            inner = bda.BDAInnerOptimizer(module.parameters(), lr=0.1)
            net = inner.unroll(module, loss, hyper=weight, steps=4, compile=compile)
            found.append(torch.autograd.grad(loss(net, weight), weight))
            assert pooled.call_count >= 4
    torch.testing.assert_close(*found, rtol=1e-10, atol=0)
