"""The witness: an inner loop written out naively, which shares no code with the package.

Autograd records everything, tasks run one after another, and each rule and each proximal map is its formula. A biased
adjoint is a loop in which something counts as a constant; `Tape` keeps such constants, so that differences of the
loop with the same constants can be taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

Params = dict[str, Tensor]


class Tape:
    """What counts as a constant: recorded in the first run of a loop, and replayed in later runs."""

    def __init__(self) -> None:
        self._found: list[Any] = []
        self._source: Iterator[Any] | None = None

    def constant(self, value: Any) -> Any:
        if self._source is None:
            self._found.append(_map(Tensor.detach, value))
            return _map(Tensor.detach, value)
        return _map(Tensor.detach, next(self._source))  # a copy: the loop goes on to change its dictionaries

    def rewind(self) -> None:
        self._source = iter(self._found)


def unroll(problem: Any, tape: Tape) -> tuple[Tensor, list[Params]]:
    """Return F(x, y_K), summed over the tasks, and each task's y_K; `problem` is a `problems.Problem`."""
    total, ends = torch.zeros((), dtype=torch.float64), []
    with sdpa_kernel(SDPBackend.MATH), torch.enable_grad():
        for task in range(problem.tasks or 1):
            y = {name: p if problem.learns_start else p.detach() for name, p in problem.start.items()}
            memory: dict[str, dict[str, Any]] = {name: {"t": 0} for name in y}
            buffers = problem.fresh_buffers()
            for k in range(1, problem.steps + 1):
                at = {name: _ahead(problem, name, y[name], memory[name]) for name in y}
                at = {name: p if p.requires_grad else p.detach().requires_grad_() for name, p in at.items()}
                before = {name: b.clone() for name, b in buffers.items()}
                f = problem.lower(problem.net(at, buffers), problem.hyper, problem.batch(k, task))
                lower = _gradients(f, at)
                upper: dict[str, Tensor | None] = dict.fromkeys(y)
                if any(group.weight(k) is not None for group in problem.groups):
                    seen = buffers if problem.style == "innerloop" else before  # there every call counts
                    upper = _gradients(problem.upper(problem.net(at, seen), problem.hyper, problem.batch(k, task)), at)
                if problem.first_order:
                    lower, upper = tape.constant((lower, upper))
                for group in problem.groups:
                    for name in group.names:
                        y[name], memory[name] = _step(group, k, name, y[name], memory[name], lower[name], upper[name])
                if k == problem.cut:
                    y, memory = tape.constant((y, memory))
            value = problem.upper(problem.net(y, buffers), problem.hyper, problem.last_batch(task))
            total = total + value
            ends.append(y)
    return total, ends


def _step(
    group: Any, k: int, name: str, y: Tensor, memory: dict[str, Any], lower: Tensor | None, upper: Tensor | None
) -> tuple[Tensor, dict[str, Any]]:
    """y - [a s_u g_F + (1 - a) (y - prox(y - D))]."""
    memory, moved = dict(memory), y
    settings = group.of(name, k)
    if lower is not None:
        memory["t"] += 1
        if y.is_complex():
            parts = RULES[group.rule](torch.view_as_real(lower), memory, torch.view_as_real(y), settings)
            moved = y - torch.view_as_complex(parts.contiguous())
        else:
            moved = y - RULES[group.rule](lower, memory, y, settings)
    if group.prox is not None and y.numel():
        moved = group.prox(moved, settings["lr"])
    weight = group.weight(k, name)
    if weight is None:
        return moved.to(y.dtype), memory
    rate = settings["lr"] if settings["upper_lr"] is None else settings["upper_lr"]
    above = 0.0 if upper is None else rate * upper
    return (y - (weight * above + (1 - weight) * (y - moved))).to(y.dtype), memory


def _gradients(loss: Tensor, at: Params) -> dict[str, Tensor | None]:
    found = torch.autograd.grad(loss, list(at.values()), create_graph=True, allow_unused=True)
    return dict(zip(at, found, strict=True))


def _ahead(problem: Any, name: str, y: Tensor, memory: dict[str, Any]) -> Tensor:
    """Where FISTA takes its gradients; elsewhere the iterate."""
    if problem.rule != "FISTA" or memory["t"] == 0:
        return y
    t, previous = memory["theta"], memory["previous"]
    if y.is_complex():
        previous = torch.view_as_complex(previous.contiguous())
    return y + (t - 1) / _next_theta(t) * (y - previous)


def _next_theta(t: float) -> float:
    return (1 + math.sqrt(1 + 4 * t * t)) / 2


def _map(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, dict):
        return {key: _map(function, value) for key, value in tree.items()}
    return tuple(_map(function, value) for value in tree) if isinstance(tree, tuple) else tree


# Rules: the displacement D of one parameter. `m` is its memory, m["t"] the number of this step.


def _root(x: Tensor) -> Tensor:
    """The square root, flat at 0."""
    return torch.where(x > 0, torch.where(x > 0, x, torch.ones_like(x)).sqrt(), torch.zeros_like(x))


def _zero(m: dict[str, Any], key: str, like: Tensor) -> Tensor:
    return m.get(key, torch.zeros_like(like))


def _decayed(g: Tensor, y: Tensor, s: Any) -> Tensor:
    return (-g if s.get("maximize") else g) + s.get("weight_decay", 0.0) * y


def sgd(g: Tensor, m: dict[str, Any], y: Tensor, s: Any) -> Tensor:
    g, mu = _decayed(g, y, s), s.get("momentum", 0.0)
    if not isinstance(mu, Tensor) and mu == 0:
        return s["lr"] * g
    m["b"] = g if m["t"] == 1 else mu * m["b"] + (1 - s.get("dampening", 0.0)) * g
    return s["lr"] * (g + mu * m["b"] if s.get("nesterov") else m["b"])


def _averages(g: Tensor, m: dict[str, Any], s: Any) -> tuple[Tensor, Tensor]:
    b1, b2 = s["betas"]
    m["m"] = b1 * _zero(m, "m", g) + (1 - b1) * g
    m["v"] = b2 * _zero(m, "v", g) + (1 - b2) * g**2
    return m["m"], m["v"]


def adam(g: Tensor, m: dict[str, Any], y: Tensor, s: Any) -> Tensor:
    mean, square = _averages(_decayed(g, y, s), m, s)
    if s.get("amsgrad"):
        square = m["top"] = torch.maximum(_zero(m, "top", g), square)
    (b1, b2), t = s["betas"], m["t"]
    return s["lr"] * (mean / (1 - b1**t)) / (_root(square / (1 - b2**t)) + s["eps"])


def adamw(g: Tensor, m: dict[str, Any], y: Tensor, s: Any) -> Tensor:
    return adam(g, m, y, {**s, "weight_decay": 0.0}) + s["lr"] * s["weight_decay"] * y


def adamax(g: Tensor, m: dict[str, Any], y: Tensor, s: Any) -> Tensor:
    g, (b1, b2) = _decayed(g, y, s), s["betas"]
    m["m"] = b1 * _zero(m, "m", g) + (1 - b1) * g
    m["u"] = torch.maximum(b2 * _zero(m, "u", g), g.abs() + s["eps"])
    return s["lr"] / (1 - b1 ** m["t"]) * m["m"] / m["u"]


def nadam(g: Tensor, m: dict[str, Any], y: Tensor, s: Any) -> Tensor:
    g, (b1, b2), t = _decayed(g, y, s), s["betas"], m["t"]
    mean, square = _averages(g, m, s)
    mu, then = (b1 * (1 - 0.5 * 0.96 ** (n * s["momentum_decay"])) for n in (t, t + 1))
    m["product"] = m.get("product", 1.0) * mu
    ahead = then * mean / (1 - m["product"] * then) + (1 - mu) * g / (1 - m["product"])
    return s["lr"] * ahead / (_root(square / (1 - b2**t)) + s["eps"])


def radam(g: Tensor, m: dict[str, Any], y: Tensor, s: Any) -> Tensor:
    mean, square = _averages(_decayed(g, y, s), m, s)
    (b1, b2), t = s["betas"], m["t"]
    longest = 2 / (1 - b2) - 1
    length = longest - 2 * t * b2**t / (1 - b2**t)
    mean = mean / (1 - b1**t)
    if length <= 5:
        return s["lr"] * mean
    rectified = (length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length)
    return s["lr"] * mean * rectified**0.5 * (1 - b2**t) ** 0.5 / (_root(square) + s["eps"])


def rmsprop(g: Tensor, m: dict[str, Any], y: Tensor, s: Any) -> Tensor:
    g, a = _decayed(g, y, s), s["rule_alpha"]
    variance = m["v"] = a * _zero(m, "v", g) + (1 - a) * g**2
    if s.get("centered"):
        m["m"] = a * _zero(m, "m", g) + (1 - a) * g
        variance = variance - m["m"] ** 2
    m["b"] = s.get("momentum", 0.0) * _zero(m, "b", g) + g / (_root(variance) + s["eps"])
    return s["lr"] * m["b"]


def adagrad(g: Tensor, m: dict[str, Any], y: Tensor, s: Any) -> Tensor:
    g = _decayed(g, y, s)
    m["v"] = _zero(m, "v", g) + g**2
    return s["lr"] / (1 + (m["t"] - 1) * s["lr_decay"]) * g / (_root(m["v"]) + s["eps"])


def adadelta(g: Tensor, m: dict[str, Any], y: Tensor, s: Any) -> Tensor:
    g, rho = _decayed(g, y, s), s["rho"]
    m["v"] = rho * _zero(m, "v", g) + (1 - rho) * g**2
    delta = (_zero(m, "d", g) + s["eps"]).sqrt() / (m["v"] + s["eps"]).sqrt() * g
    m["d"] = rho * _zero(m, "d", g) + (1 - rho) * delta**2
    return s["lr"] * delta


def asgd(g: Tensor, m: dict[str, Any], y: Tensor, s: Any) -> Tensor:
    rate = s["lr"] if m["t"] == 1 else m["eta"]
    m["eta"] = s["lr"] / (1 + s["lambd"] * s["lr"] * m["t"]) ** s["rule_alpha"]  # a part of the state, as in torch
    return rate * (_decayed(g, y, s) + s["lambd"] * y)


def rprop(g: Tensor, m: dict[str, Any], y: Tensor, s: Any) -> Tensor:
    g = -g if s.get("maximize") else g
    product = g * _zero(m, "g", g)
    factor = torch.ones_like(g).masked_fill(product > 0, 1.2).masked_fill(product < 0, 0.5)
    m["e"] = factor * (s["lr"] * torch.ones_like(g) if m["t"] == 1 else m["e"])
    m["g"] = torch.where(product < 0, torch.zeros_like(g), g)
    return m["e"] * m["g"].sign()


def adafactor(g: Tensor, m: dict[str, Any], y: Tensor, s: Any) -> Tensor:
    g, t, small = -g if s.get("maximize") else g, m["t"], torch.finfo(g.dtype).eps
    rho = min(s["lr"], 1 / math.sqrt(t)) if not isinstance(s["lr"], Tensor) else s["lr"].clamp(max=1 / math.sqrt(t))
    size = torch.clamp(_root((y**2).mean()), min=1e-3) * rho
    new = t**-0.8
    if g.dim() < 2:
        v = m["v"] = (1 - new) * _zero(m, "v", g) + new * g**2
    else:
        rows, columns = (g**2).mean(-1, keepdim=True), (g**2).mean(-2, keepdim=True)
        m["r"] = (1 - new) * _zero(m, "r", rows) + new * rows
        m["c"] = (1 - new) * _zero(m, "c", columns) + new * columns
        v = m["r"] * m["c"] / m["r"].mean(-2, keepdim=True).clamp(min=small)
    update = g / v.clamp(min=small**2).sqrt()
    update = update / torch.clamp(_root((update**2).mean()), min=1.0)
    return s["lr"] * s["weight_decay"] * y + size * update


def fista(g: Tensor, m: dict[str, Any], y: Tensor, s: Any) -> Tensor:
    """D = y - z + lr g(z): the step leaves from the extrapolated point z."""
    z = y
    if m["t"] > 1:
        z = y + (m["theta"] - 1) / _next_theta(m["theta"]) * (y - m["previous"])
    m["theta"] = 1.0 if m["t"] == 1 else _next_theta(m["theta"])
    m["previous"] = y
    return y - z + s["lr"] * _decayed(g, z, s)


RULES: dict[str, Callable[[Tensor, dict[str, Any], Tensor, Any], Tensor]] = {
    "SGD": sgd, "Adam": adam, "AdamW": adamw, "Adamax": adamax, "NAdam": nadam, "RAdam": radam, "RMSprop": rmsprop,
    "Adagrad": adagrad, "Adadelta": adadelta, "ASGD": asgd, "Rprop": rprop, "Adafactor": adafactor, "FISTA": fista,
}  # fmt: skip


# Proximal maps, as formulas.


def soft(y: Tensor, threshold: Any) -> Tensor:
    return y.sign() * torch.relu(y.abs() - threshold)


def shrink_rows(y: Tensor, threshold: Any) -> Tensor:
    return torch.stack([row * (1 - threshold / row.norm()) if row.norm() > threshold else 0 * row for row in y])


def shrink_spectrum(y: Tensor, threshold: Any) -> Tensor:
    u, values, v = torch.linalg.svd(y.reshape(y.shape[0], -1), full_matrices=False)
    return (u @ torch.diag(torch.relu(values - threshold)) @ v).reshape(y.shape)


def into_ball(y: Tensor, radius: Any) -> Tensor:
    norm = (y**2).sum().sqrt()
    return y * radius / norm if norm > radius else y


def onto_simplex(y: Tensor, total: Any) -> Tensor:
    flat = y.reshape(-1)
    ordered, _ = flat.sort(descending=True)
    levels = [(ordered[: i + 1].sum() - total) / (i + 1) for i in range(len(flat))]
    level = [t for t, value in zip(levels, ordered, strict=True) if value > t][-1]
    return torch.relu(flat - level).reshape(y.shape)


def into_l1_ball(y: Tensor, radius: Any) -> Tensor:
    return y if y.abs().sum() <= radius else y.sign() * onto_simplex(y.abs(), radius)
