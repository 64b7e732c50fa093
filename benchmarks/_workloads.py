"""The problems, and the contestants that differentiate them.

A workload is a module, two losses and upper variables. The lower loss weights examples by `sigmoid(hyper)`, or has no
`hyper`, and then the initial weights are the upper variables, as in MAML. A contestant is a function that takes a
workload and returns ``run(steps)``, which gives the hypergradient as a list of tensors.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import bda_optim as bda

from . import _common

RunSteps = Callable[[int], list[Any]]


@dataclasses.dataclass
class Workload:
    """One bilevel problem.

    Attributes:
        model: The module whose parameters are the lower variables.
        lower: The lower loss, ``lower(net, hyper, batch)``.
        upper: The upper loss.
        hyper: The upper variables; None stands for the initial weights.
        steps: K.
        lr: The rate of the lower direction.
        upper_lr: The rate of the upper one.
        alpha: The weight of the upper one.
        jax: Returns both losses as functions of a dict of parameters and of hyper, for JAX.
    """

    model: nn.Module
    lower: Callable[..., Tensor]
    upper: Callable[..., Tensor]
    hyper: Tensor | None
    steps: int
    lr: float
    upper_lr: float | None = None
    alpha: Any = 0.0
    jax: Callable[[], tuple[Callable[..., Any], Callable[..., Any]]] | None = None

    @property
    def variables(self) -> list[Tensor]:
        """The tensors whose hypergradient is wanted."""
        return list(self.model.parameters()) if self.hyper is None else [self.hyper]

    def objective(self, net: Any, k: int) -> Tensor:
        """Return the loss whose plain gradient step with rate `step_size` is the (aggregated) step k."""
        f = self.lower(net, self.hyper, None)
        if self.alpha == 0.0:
            return f
        a, s_u = self.alpha(k), self.lr if self.upper_lr is None else self.upper_lr
        return a * s_u * self.upper(net, self.hyper, None) + (1 - a) * self.lr * f

    @property
    def step_size(self) -> float:
        """The rate that belongs to `objective`."""
        return self.lr if self.alpha == 0.0 else 1.0


# ---------------------------------------------------------------------------------------------------------- workloads


def mlp(dtype: torch.dtype = torch.float32, *, smoke: bool = False, alpha: Any = 0.0) -> Workload:
    """Reweight the examples of an MLP 64-256-256-10 with batches of 64, K = 50."""
    width = 16 if smoke else 256
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))
    data = _labelled((64, 64), 10), _labelled((64, 64), 10)
    steps = 5 if smoke else 50
    return _reweighting(model, *data, torch.randn(64), dtype, steps=steps, lr=0.1, alpha=alpha, jax=jax_mlp)


def softmax(dtype: torch.dtype = torch.float32, *, smoke: bool = False) -> Workload:
    """Clean 7000 examples of 784 pixels and 10 classes with softmax regression, K = 20."""
    count, pixels = (50, 20) if smoke else (7000, 784)
    torch.manual_seed(0)
    model = nn.Linear(pixels, 10)
    data = _labelled((count, pixels), 10), _labelled((count, pixels), 10)
    return _reweighting(model, *data, torch.randn(count), dtype, steps=5 if smoke else 20, lr=0.1, jax=jax_linear)


def settled(dtype: torch.dtype = torch.float32, *, smoke: bool = False) -> Workload:
    """Clean 1000 examples of 100 features and 5 classes, with a penalty: 400 steps reach the solution to 1e-6."""
    count, features = (60, 10) if smoke else (1000, 100)
    generator = torch.Generator(torch.get_default_device()).manual_seed(0)
    inputs, others = (torch.randn(count, features, generator=generator).to(dtype) for _ in range(2))
    truth = torch.randn(features, 5, generator=generator).to(dtype)
    labels, wanted = (inputs @ truth).argmax(1), (others @ truth).argmax(1)
    wrong = torch.rand(count, generator=generator) < 0.3
    labels = torch.where(wrong, torch.randint(5, (count,), generator=generator), labels)
    torch.manual_seed(0)
    model = nn.Linear(features, 5).to(dtype)

    def lower(net: Any, weights: Tensor, batch: Any = None) -> Tensor:
        losses = F.cross_entropy(net(inputs), labels, reduction="none")
        penalty = net.weight.square().sum() + net.bias.square().sum()
        return (torch.sigmoid(weights) * losses).mean() + 0.005 * penalty

    def upper(net: Any, weights: Tensor, batch: Any = None) -> Tensor:
        return F.cross_entropy(net(others), wanted)

    hyper = torch.zeros(count, dtype=dtype, requires_grad=True)
    return Workload(model, lower, upper, hyper, 400, lr=2.0)


def head(dtype: torch.dtype = torch.float32, *, smoke: bool = False) -> Workload:
    """Reweight the 25 examples of a softmax-regression head with 64 features and 5 classes; for very long K."""
    torch.manual_seed(0)
    data = _labelled((25, 64), 5), _labelled((25, 64), 5)
    return _reweighting(nn.Linear(64, 5), *data, torch.randn(25), dtype, steps=100_000, lr=0.1, jax=jax_linear)


def maml(dtype: torch.dtype = torch.float32, *, smoke: bool = False) -> Workload:
    """Learn the initial weights of an MLP 8-24-24-3 on 15 examples, K = 5: so small that only the calls count."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 3))
    data = _labelled((15, 8), 3), _labelled((15, 8), 3)
    return _reweighting(model, *data, None, dtype, steps=2 if smoke else 5, lr=0.1, jax=None)


def conv(dtype: torch.dtype = torch.float32, *, smoke: bool = False, images: int = 25) -> Workload:
    """Learn the initial weights of a three-block conv net on 25 (or 75) images of 28x28 in 5 classes, K = 5."""
    filters = 4 if smoke else 32
    torch.manual_seed(0)
    blocks: list[nn.Module] = []
    for channels in (1, filters, filters):
        norm = nn.BatchNorm2d(filters, track_running_stats=False)
        blocks += [nn.Conv2d(channels, filters, 3, padding=1), norm, nn.ReLU(), nn.MaxPool2d(2)]
    model = nn.Sequential(*blocks, nn.Flatten(), nn.Linear(9 * filters, 5))
    data = _labelled((images, 1, 28, 28), 5), _labelled((images, 1, 28, 28), 5)
    return _reweighting(model, *data, None, dtype, steps=2 if smoke else 5, lr=0.1, jax=_jax_conv)


class Transformer(nn.Module):
    """Two encoder layers of width 64 over embedded tokens; gives logits of a class per token."""

    def __init__(self, width: int = 64, heads: int = 4, words: int = 64, length: int = 32) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Parameter(0.1 * torch.randn(length, width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(2)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.places
        for layer in self.layers:
            x = layer(x)
        return self.head(x).transpose(1, 2)


def transformer(dtype: torch.dtype = torch.float32, *, smoke: bool = False) -> Workload:
    """Reweight 16 sequences of 32 tokens for a two-layer transformer of width 64, K = 10."""
    torch.manual_seed(0)
    model = Transformer(width=8, heads=2) if smoke else Transformer()
    data = [(torch.randint(64, (16, 32)), torch.randint(10, (16, 32))) for _ in range(2)]
    return _reweighting(
        model, *data, torch.randn(16), dtype, steps=2 if smoke else 10, lr=0.1, jax=_jax_transformer(2 if smoke else 4)
    )


class Point(nn.Module):
    """A lower variable that is no network; calling it gives y."""

    def __init__(self, *values: float) -> None:
        super().__init__()
        self.y = nn.Parameter(torch.tensor(values))

    def forward(self) -> Tensor:
        return self.y


def counterexample(dtype: torch.dtype = torch.float32, *, smoke: bool = False, alpha: Any = 0.0) -> Workload:
    """The paper's counter-example: two lower numbers and one upper, K = 64."""

    def lower(net: Any, x: Any, batch: Any = None) -> Any:
        y = net()
        return 0.5 * y[0] ** 2 - x * y[0]

    def upper(net: Any, x: Any, batch: Any = None) -> Any:
        y = net()
        return 0.5 * (x - y[1]) ** 2 + 0.5 * (y[0] - 1) ** 2

    def in_jax() -> Any:
        return (lambda p, x: lower(lambda: p["y"], x)), (lambda p, x: upper(lambda: p["y"], x))

    model = Point(2.0, 2.0).to(dtype)
    hyper = torch.zeros((), dtype=dtype, requires_grad=True)
    return Workload(model, lower, upper, hyper, 8 if smoke else 64, lr=0.2, upper_lr=0.7, alpha=alpha, jax=in_jax)


def _labelled(shape: tuple[int, ...], classes: int) -> tuple[Tensor, Tensor]:
    return torch.randn(shape), torch.randint(classes, shape[:1])


def _reweighting(
    model: nn.Module, train: Any, test: Any, hyper: Tensor | None, dtype: torch.dtype, *, jax: Any, **settings: Any
) -> Workload:
    """Return the workload with weighted cross entropy below, and plain cross entropy above."""
    (x, labels), (x_test, labels_test) = [(_cast(a, dtype), b) for a, b in (train, test)]

    def lower(net: Any, weights: Tensor | None, batch: Any = None) -> Tensor:
        if weights is None:
            return F.cross_entropy(net(x), labels)
        losses = F.cross_entropy(net(x), labels, reduction="none").flatten(1 if labels.dim() > 1 else 0)
        losses = losses.mean(1) if labels.dim() > 1 else losses
        return (torch.sigmoid(weights) * losses).mean()

    def upper(net: Any, weights: Tensor | None, batch: Any = None) -> Tensor:
        return F.cross_entropy(net(x_test), labels_test)

    def in_jax() -> Any:
        return _jax_losses(jax, (x, labels), (x_test, labels_test))

    hyper = None if hyper is None else hyper.to(dtype).requires_grad_()
    return Workload(model.to(dtype), lower, upper, hyper, jax=in_jax, **settings)


def _cast(t: Tensor, dtype: torch.dtype) -> Tensor:
    return t.to(dtype) if t.is_floating_point() else t


# ------------------------------------------------------------------------------------------------ the networks in JAX


def _jax_losses(forward: Callable[..., Any], train: Any, test: Any) -> Any:
    import jax
    import jax.numpy as jnp

    (x, labels), (x_test, labels_test) = [(jnp.asarray(a.numpy()), jnp.asarray(b.numpy())) for a, b in (train, test)]

    def cross_entropy(logits: Any, targets: Any) -> Any:  # one number per example
        found = -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)[..., 0]
        return found.mean(-1) if found.ndim > 1 else found

    def lower(params: Any, weights: Any) -> Any:
        losses = cross_entropy(forward(params, x), labels)
        return (losses if weights is None else jax.nn.sigmoid(weights) * losses).mean()

    def upper(params: Any, weights: Any) -> Any:
        return cross_entropy(forward(params, x_test), labels_test).mean()

    return lower, upper


def jax_linear(p: Any, x: Any) -> Any:
    return x @ p["weight"].T + p["bias"]


def jax_mlp(p: Any, x: Any) -> Any:
    import jax

    for i in (0, 2):
        x = jax.nn.relu(x @ p[f"{i}.weight"].T + p[f"{i}.bias"])
    return x @ p["4.weight"].T + p["4.bias"]


def _jax_conv(p: Any, x: Any) -> Any:
    """Convolve as a product with shifted copies: 4 times faster here than XLA's own convolution and its derivatives."""
    import jax
    import jax.numpy as jnp

    x = x.transpose(0, 2, 3, 1)
    for i in (0, 4, 8):
        side = x.shape[1]
        padded = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
        shifted = [padded[:, a : a + side, b : b + side] for a in range(3) for b in range(3)]
        kernel = p[f"{i}.weight"].transpose(2, 3, 1, 0).reshape(9 * x.shape[3], -1)
        x = jnp.concatenate(shifted, axis=-1) @ kernel + p[f"{i}.bias"]
        centred = x - x.mean((0, 1, 2))
        x = centred * jax.lax.rsqrt((centred**2).mean((0, 1, 2)) + 1e-5) * p[f"{i + 1}.weight"] + p[f"{i + 1}.bias"]
        x = jax.nn.relu(x)[:, : side // 2 * 2, : side // 2 * 2]
        # `max` would divide the derivative among equal entries, of which float32 has some; torch takes the first.
        first, *others = [x[:, a::2, b::2] for a in range(2) for b in range(2)]
        x = functools.reduce(lambda best, new: jnp.where(best >= new, best, new), others, first)
    x = x.transpose(0, 3, 1, 2).reshape(x.shape[0], -1)
    return x @ p["13.weight"].T + p["13.bias"]


def _jax_transformer(heads: int) -> Callable[[Any, Any], Any]:
    def forward(p: Any, tokens: Any) -> Any:
        import jax
        import jax.numpy as jnp

        def norm(x: Any, name: str) -> Any:
            centred = x - x.mean(-1, keepdims=True)
            scaled = centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
            return scaled * p[f"{name}.weight"] + p[f"{name}.bias"]

        def linear(x: Any, name: str) -> Any:
            return x @ p[f"{name}.weight"].T + p[f"{name}.bias"]

        x = p["words.weight"][tokens] + p["places"]
        n, length, width = x.shape
        for i in range(2):
            h = norm(x, f"layers.{i}.norm1")
            h = h @ p[f"layers.{i}.self_attn.in_proj_weight"].T + p[f"layers.{i}.self_attn.in_proj_bias"]
            q, k, v = (t.reshape(n, length, heads, -1).transpose(0, 2, 1, 3) for t in jnp.split(h, 3, axis=-1))
            share = jax.nn.softmax(q @ k.transpose(0, 1, 3, 2) / (width // heads) ** 0.5)
            h = (share @ v).transpose(0, 2, 1, 3).reshape(n, length, width)
            x = x + linear(h, f"layers.{i}.self_attn.out_proj")
            h = jax.nn.relu(linear(norm(x, f"layers.{i}.norm2"), f"layers.{i}.linear1"))
            x = x + linear(h, f"layers.{i}.linear2")
        return linear(x, "head")

    return forward


# --------------------------------------------------------------------------------------------------------- contestants


def ours(adjoint: Any = None, *, compile: bool | str = False) -> Callable[[Workload], RunSteps]:
    """Return a contestant of this library: `unroll` with an adjoint, compiled or not."""

    def contestant(work: Workload) -> RunSteps:
        settings = dict(lr=work.lr, upper_lr=work.upper_lr, alpha=work.alpha)
        if isinstance(work.model, Point):
            return _without_module(work, adjoint=adjoint, compile=compile, **settings)
        inner = bda.BDAInnerOptimizer(work.model.parameters(), **settings)

        def run(steps: int) -> list[Tensor]:
            fmodel = inner.unroll(
                work.model,
                work.lower,
                work.upper,
                hyper=work.hyper,
                steps=steps,
                adjoint=adjoint,
                compile=compile,
                copy_initial_weights=work.hyper is not None,
            )
            loss = work.upper(fmodel, work.hyper, None)
            if not loss.requires_grad:  # `FirstOrder`, where hyper acts through the lower loss only
                return [torch.zeros_like(v) for v in work.variables]
            return list(torch.autograd.grad(loss, work.variables, materialize_grads=True))

        return run

    return contestant


def _without_module(work: Workload, **options: Any) -> RunSteps:
    """Return `hypergradient`, which takes the lower variables as they are."""
    (start,) = work.model.parameters()
    start = start.detach()

    def lower(y: Tensor, x: Tensor, batch: Any) -> Tensor:
        return work.lower(lambda: y, x)

    def upper(y: Tensor, x: Tensor, batch: Any) -> Tensor:
        return work.upper(lambda: y, x)

    def run(steps: int) -> list[Tensor]:
        return [bda.hypergradient(lower, upper, start, work.hyper, steps=steps, **options).grad]

    return run


def with_higher(work: Workload) -> RunSteps:
    """Return `higher`: `innerloop_ctx` around torch.optim.SGD."""
    import higher

    optimizer = torch.optim.SGD(work.model.parameters(), lr=work.step_size)

    def run(steps: int) -> list[Tensor]:
        copy = work.hyper is not None
        with _math(), higher.innerloop_ctx(work.model, optimizer, copy_initial_weights=copy) as (fmodel, diffopt):
            for k in range(1, steps + 1):
                diffopt.step(work.objective(fmodel, k))
            return list(torch.autograd.grad(work.upper(fmodel, work.hyper, None), work.variables))

    return run


def with_torchopt(work: Workload) -> RunSteps:
    """Return `torchopt`: `MetaSGD`, and the module restored afterwards."""
    import torchopt

    optimizer = torchopt.MetaSGD(work.model, lr=work.step_size)
    start = [torchopt.extract_state_dict(part, by="reference") for part in (work.model, optimizer)]
    variables = work.variables

    def run(steps: int) -> list[Tensor]:
        with _math():
            for k in range(1, steps + 1):
                optimizer.step(work.objective(work.model, k))
            grads = torch.autograd.grad(work.upper(work.model, work.hyper, None), variables)
        for part, state in zip((work.model, optimizer), start, strict=True):
            torchopt.recover_state_dict(part, state)
        return list(grads)

    return run


def by_hand(work: Workload) -> RunSteps:
    """Return what one writes without a library: `torch.func.functional_call` and `torch.autograd.grad`."""
    model, rate = work.model, work.step_size

    def run(steps: int) -> list[Tensor]:
        params = {name: p if work.hyper is None else p.detach() for name, p in model.named_parameters()}
        with _math():
            for k in range(1, steps + 1):
                if k == 1 and work.hyper is not None:
                    params = {name: p.requires_grad_() for name, p in params.items()}
                grads = torch.autograd.grad(work.objective(_net(model, params), k), params.values(), create_graph=True)
                params = {name: p - rate * g for (name, p), g in zip(params.items(), grads, strict=True)}
            return list(torch.autograd.grad(work.upper(_net(model, params), work.hyper, None), work.variables))

    return run


def with_jax(work: Workload) -> RunSteps:
    """Return JAX: `jit` of the gradient of a `scan`."""
    import jax
    import jax.numpy as jnp

    assert work.jax is not None
    lower, upper = work.jax()
    params = {name: jnp.asarray(p.detach().numpy()) for name, p in work.model.named_parameters()}
    hyper = None if work.hyper is None else jnp.asarray(work.hyper.detach().numpy())
    s_u = work.lr if work.upper_lr is None else work.upper_lr

    def objective(variables: Any, weights: Any) -> Any:
        start, x = (variables, None) if hyper is None else (params, variables)

        def step(p: Any, a: Any) -> Any:
            direction = jax.tree.map(lambda g: (1 - a) * work.lr * g, jax.grad(lower)(p, x))
            if work.alpha != 0.0:
                add = jax.grad(upper)(p, x)
                direction = jax.tree.map(lambda d, g: d + a * s_u * g, direction, add)
            return jax.tree.map(jnp.subtract, p, direction), None

        last, _ = jax.lax.scan(step, start, weights)
        return upper(last, x)

    compiled = jax.jit(jax.grad(objective))

    def run(steps: int) -> list[Any]:
        weights = [0.0 if work.alpha == 0.0 else work.alpha(k) for k in range(1, steps + 1)]
        found = compiled(params if hyper is None else hyper, jnp.asarray(weights, dtype=jnp.float32))
        jax.block_until_ready(found)
        return [found[name] for name in params] if hyper is None else [found]

    return run


def _net(model: nn.Module, params: dict[str, Tensor]) -> Callable[..., Tensor]:
    return lambda *inputs: torch.func.functional_call(model, params, inputs)


def _math() -> contextlib.AbstractContextManager[Any]:
    """Return the context that attention needs to have a second derivative; this library enters it by itself."""
    return sdpa_kernel(SDPBackend.MATH)


PEERS: dict[str, Callable[[Workload], RunSteps]] = {
    "torch.func by hand": by_hand,
    **({"higher": with_higher} if _common.installed("higher") else {}),
    **({"torchopt": with_torchopt} if _common.installed("torchopt") else {}),
    **({"JAX jit+scan": with_jax} if _common.installed("jax") else {}),
}

OURS: dict[str, Callable[[Workload], RunSteps]] = {
    "ours, Unroll": ours(bda.Unroll()),
    "ours, Checkpointed": ours(bda.Checkpointed()),
}

COMPILED: dict[str, Callable[[Workload], RunSteps]] = {
    "ours, Unroll, compiled": ours(bda.Unroll(), compile=True),
    "ours, Checkpointed, compiled": ours(bda.Checkpointed(), compile=True),
}


def contestants(*, compile: bool) -> dict[str, Callable[[Workload], RunSteps]]:
    """Return all contestants by name, peers first."""
    return {**PEERS, **OURS, **(COMPILED if compile else {})}
