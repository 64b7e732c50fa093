"""`Differences` on modules: what needs no second derivative, what is refused, and what is left behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from problems import relative_error
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import bda_optim as bda

D = torch.float64
K = 4
DIFFERENCES = bda.Differences()


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=D)


X, T = draw(16, 6, seed=1), torch.arange(16) % 3


def cross_entropy(net: Any, batch: Any) -> Tensor:
    return F.cross_entropy(net(batch[0]), batch[1], reduction="none")


def lower(net: Any, hyper: Any, batch: Any) -> Tensor:
    return (torch.sigmoid(hyper["rows"]) * cross_entropy(net, batch)).mean()


def upper(net: Any, hyper: Any, batch: Any) -> Tensor:
    return F.cross_entropy(net(batch[0].flip(0)), batch[1])


def mlp(*middle: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), *(middle or [nn.Tanh()]), nn.Linear(8, 3)).double()


def gradients(net: nn.Module, adjoint: Any, f: Any = lower, inputs: Any = None, **options: Any) -> list[Tensor]:
    """Return the hypergradient by all upper variables and by the parameters that are not adapted."""
    hyper = {"rows": draw(16, seed=2), "a": torch.tensor(0.7, dtype=D), "b": torch.tensor(-0.2, dtype=D)}
    dtype = next(net.parameters()).dtype
    hyper = {name: value.to(dtype).requires_grad_() for name, value in hyper.items()}
    batch = (X.to(dtype) if inputs is None else inputs, T)
    chosen = {"lr": 0.3, "owned": net.parameters(), **options}
    inner = bda.BDAInnerOptimizer(chosen.pop("owned"), lr=chosen.pop("lr"))
    torch.manual_seed(5)
    fmodel = inner.unroll(net, f, upper, hyper=hyper, steps=K, batches=[batch] * K, adjoint=adjoint, **chosen)
    fmodel.eval()
    owned = {id(p) for group in inner.param_groups for p in group["params"]}
    leaves = [*hyper.values(), *(p for p in net.parameters() if id(p) not in owned)]
    found = torch.autograd.grad(upper(fmodel, hyper, batch), leaves, allow_unused=True)
    return [g for g in found if g is not None]


# Smooth modules.


def test_dropout_draws_the_same_numbers_on_both_sides() -> None:
    net = mlp(nn.Tanh(), nn.Dropout(0.4))
    assert relative_error(gradients(net, DIFFERENCES), gradients(net, bda.Unroll())) < 1e-9


def test_batch_statistics() -> None:
    net = mlp(nn.BatchNorm1d(8), nn.GELU())
    assert relative_error(gradients(net, DIFFERENCES), gradients(net, bda.Unroll())) < 1e-9


def test_a_backbone_is_an_upper_variable() -> None:
    net = mlp()
    options = {"owned": net[2].parameters()}
    assert (
        relative_error(gradients(net, DIFFERENCES, **options), gradients(net, bda.Unroll(), owned=net[2].parameters()))
        < 1e-9
    )


class Bags(nn.Module):
    """Sums of embeddings."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bag: nn.Module = nn.EmbeddingBag(7, 3, mode="sum") if fused else nn.Embedding(7, 3)
        self.fused = fused

    def forward(self, rows: Tensor) -> Tensor:
        return torch.tanh(self.bag(rows) if self.fused else self.bag(rows).sum(1))


def test_an_operation_without_a_second_derivative() -> None:
    rows = torch.arange(48).view(16, 3) % 7
    fused = Bags(True).double()
    twin = Bags(False).double()
    twin.load_state_dict(fused.state_dict())
    with pytest.raises(NotImplementedError, match="EmbeddingBag"):
        gradients(fused, bda.Unroll(), inputs=rows)
    assert relative_error(gradients(fused, DIFFERENCES, inputs=rows), gradients(twin, bda.Unroll(), inputs=rows)) < 1e-9


class Attention(nn.Module):
    """A block with attention, whose parts may be checkpointed."""

    def __init__(self, saves: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.head, self.saves = nn.Linear(6, 18), nn.Linear(6, 3), saves

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x.view(4, 1, 4, 6)).chunk(3, -1)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).reshape(16, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.attend, x, use_reentrant=False) if self.saves else self.attend(x))


@pytest.mark.parametrize("within", [bda.Checkpointed(slots=2), bda.Unroll()], ids=["slots", "unroll"])
def test_checkpoints_and_fused_attention_are_allowed(within: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = []

    def spy(*args: Any, **kwargs: Any) -> Tensor:
        kernels.append(torch.backends.cuda.flash_sdp_enabled())
        return attention(*args, **kwargs)

    attention = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    plain, saving = Attention(False).double(), Attention(True).double()
    want = gradients(plain, bda.Unroll())
    assert not any(kernels)
    kernels.clear()
    for net in (plain, saving):
        assert relative_error(gradients(net, bda.Differences(within=within)), want) < 1e-9
    assert all(kernels)
    for adjoint in (bda.Unroll(), bda.Checkpointed()):
        with pytest.raises(
            RuntimeError, match=r"`adjoint=Checkpointed\(\)`.*`accumulate=M`.*`adjoint=Differences\(\)`"
        ):
            gradients(saving, adjoint)


def test_a_reentrant_checkpoint_is_refused() -> None:
    net = mlp()

    def f(net: Any, hyper: Any, batch: Any) -> Tensor:
        return F.cross_entropy(net[2](checkpoint(net[:2], batch[0].requires_grad_(), use_reentrant=True)), batch[1])

    with pytest.raises(RuntimeError, match="`use_reentrant=False`"):
        gradients(net, DIFFERENCES, f, inputs=X.clone())


def test_checkpoints_around_the_module_afterwards() -> None:
    net = mlp()
    hyper = {"rows": draw(16, seed=2).requires_grad_()}
    inner = bda.BDAInnerOptimizer(net.parameters(), lr=0.3)
    fmodel = inner.unroll(net, lower, hyper=hyper, steps=K, batches=[(X, T)] * K, adjoint=bda.Differences(last=2))
    (want,) = torch.autograd.grad(F.cross_entropy(fmodel(X), T), hyper["rows"], retain_graph=True)
    for call in (
        lambda: checkpoint(fmodel, X, use_reentrant=False),
        lambda: fmodel[2](checkpoint(fmodel[0], X, use_reentrant=False).tanh()),
    ):
        (found,) = torch.autograd.grad(F.cross_entropy(call(), T), hyper["rows"], retain_graph=True)
        torch.testing.assert_close(found, want, rtol=1e-12, atol=1e-12)


# Fresh problems.


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(3, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x.view(16, 2, 3))[0][:, -1])


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(6, 2, 16, dropout=0.1, activation="gelu", batch_first=True)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x.view(8, 2, 6)).reshape(16, 6))


def convolution() -> nn.Module:
    layers = [nn.Conv1d(1, 4, 3), nn.BatchNorm1d(4), nn.GELU(), nn.AvgPool1d(2), nn.Flatten(), nn.Linear(8, 3)]
    return nn.Sequential(nn.Unflatten(1, (1, 6)), *layers)


FRESH: dict[str, Callable[[], nn.Module]] = {
    "lstm": Recurrent,
    "encoder": Encoder,
    "convolution": convolution,
    "layer norm": lambda: nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.SiLU(), nn.Linear(16, 3)),
}


@pytest.mark.parametrize("name", FRESH)
def test_fresh_problems(name: str) -> None:
    torch.manual_seed(3)
    net = FRESH[name]().double()
    want = gradients(net, bda.Unroll())
    assert relative_error(gradients(net, DIFFERENCES), want) < 1e-8
    single = gradients(net.float(), DIFFERENCES)
    assert relative_error([g.double() for g in single], want) < 1e-3


# What is refused leaves nothing behind.


def test_spectral_norm_in_training_mode_is_refused() -> None:
    net = mlp()
    net[0] = nn.utils.parametrizations.spectral_norm(net[0])
    with pytest.raises(NotImplementedError, match=r"spectral_norm in training mode.*eval mode"):
        gradients(net, DIFFERENCES)
    net[0].eval()
    assert relative_error(gradients(net, DIFFERENCES), gradients(net, bda.Unroll())) < 1e-8


def surroundings() -> list[Any]:
    switches = torch.backends.cuda
    return [
        switches.flash_sdp_enabled(), switches.mem_efficient_sdp_enabled(), torch.is_autocast_cache_enabled(),
        torch.get_default_dtype(), torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"),
    ]  # fmt: skip


@pytest.mark.parametrize("where", ["kink", "detach", "error"])
def test_after_an_exception_everything_is_as_before(where: str) -> None:
    net = mlp(nn.Dropout(0.2), nn.ReLU() if where == "kink" else nn.Tanh(), nn.BatchNorm1d(8))
    calls = []

    def f(net: Any, hyper: Any, batch: Any) -> Tensor:
        calls.append(0)
        if where == "error" and len(calls) > K + 3:  # in the backward pass
            raise ZeroDivisionError
        losses = cross_entropy(net, batch)
        weights = torch.sigmoid(hyper["rows"])
        return (losses * (weights * losses.detach() if where == "detach" else weights)).mean()

    before = {name: value.clone() for name, value in net.state_dict().items()}
    hyper = {"rows": draw(16, seed=2).requires_grad_()}
    inner = bda.BDAInnerOptimizer(net.parameters(), lr=0.3)
    around = surroundings()
    torch.manual_seed(5)
    options: dict[str, Any] = {"steps": K, "batches": [(X, T)] * K, "copy_initial_weights": False}
    if where == "kink":
        with pytest.raises(ValueError, match="Relu"):
            inner.unroll(net, f, hyper=hyper, adjoint=DIFFERENCES, **options)
    else:
        fmodel = inner.unroll(net, f, hyper=hyper, adjoint=DIFFERENCES, **options)
        state = torch.get_rng_state()
        with pytest.raises(ZeroDivisionError if where == "error" else ValueError):
            fmodel.eval()(X).square().sum().backward()
        assert torch.equal(torch.get_rng_state(), state)
    assert surroundings() == around
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert all(p.grad is None for p in net.parameters()) and hyper["rows"].grad is None
    assert not inner.state
    checkpoint(torch.tanh, draw(2).requires_grad_(), use_reentrant=False).sum().backward()  # hooks are allowed
