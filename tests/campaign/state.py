"""What must be as it was after an inner loop that failed: shared by `faults` and `interrupts`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bda_optim as bda
import bda_optim.compat.higher as higher

STEPS = 4


class Fault:
    """Raises something once, when a place has been reached for the n-th time: ``fault.reach(phase, k)``."""

    def __init__(self, phase: str = "", k: int = 0, error: Callable[[], BaseException] | None = None) -> None:
        self._phase, self._k, self._error = phase, k, error
        self.backward, self.raised = False, False

    def reach(self, phase: str, k: int) -> None:
        """Raise if this is the chosen place; in the user's backward pass every phase counts as "backward"."""
        if self._error is not None and (("backward" if self.backward else phase), k) == (self._phase, self._k):
            self.raised = True
            raise self._error()


class Setting:
    """A module with everything that a failed loop could change, and its optimizers."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.fault = Fault()
        normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 2))
        self.model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.2), normed, nn.Linear(2, 2))
        self.model[4].bias.requires_grad_(False)
        self.model[2].eval()
        self.model[0].register_forward_hook(lambda *_: None)
        self.data, self.labels = torch.randn(6, 3), torch.randint(2, (6,))
        self.w = torch.zeros(6, requires_grad=True)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.inner = bda.BDAInnerOptimizer(trained, lr=0.01, alpha=bda.harmonic(0.3), rule=torch.optim.Adam)
        self.plain = bda.BDAInnerOptimizer(trained, lr=0.01)
        self.torch_opt = torch.optim.SGD(trained, lr=0.01, momentum=0.9)
        self.inner.step(lambda: (self.lower(self.model, self.w, 0), self.upper(self.model, self.w, 0)))
        self.lower(self.model, self.w, 0).backward()  # every `.grad` is there, and the state of two optimizers
        self.torch_opt.step()
        self.w.grad = None

    def _loss(self, net: Any, w: Any, k: int, phase: str) -> Tensor:
        self.fault.reach(phase, k)
        hidden = net(self.data)
        if hidden.requires_grad:
            hidden.register_hook(lambda grad: self.fault.reach(phase + " gradient", k))
        self.fault.reach(phase, k)
        each = F.cross_entropy(hidden + 0.1 * torch.rand(()), self.labels, reduction="none") * (1 + torch.rand(()))
        return (torch.sigmoid(w) * each).mean() if w is not None else each.mean()

    def lower(self, net: Any, w: Tensor, batch: Any) -> Tensor:
        return self._loss(net, w, batch, "lower")

    def upper(self, net: Any, w: Tensor, batch: Any) -> Tensor:
        return self._loss(net, None, batch, "upper")

    def _finish(self, loss: Tensor) -> list[Tensor]:
        self.fault.backward = True
        self.rng_before_backward = torch.get_rng_state()
        loss.backward()
        self.fault.backward = False
        assert self.w.grad is not None
        grad, self.w.grad = self.w.grad, None
        return [grad]

    def unroll(self, adjoint: Any, **options: Any) -> list[Tensor]:
        batches: Any = list(range(1, STEPS + 1))
        fmodel = self.inner.unroll(
            self.model, self.lower, self.upper, hyper=self.w, steps=STEPS, batches=batches, adjoint=adjoint, **options
        )
        return self._finish(self.upper(fmodel, self.w, 0))

    def tasks(self, adjoint: Any, **options: Any) -> list[Tensor]:
        def lower(net: Any, w: Tensor, batch: Any) -> Tensor:
            number, share = batch  # vmap shows numbers as they are, and of tensors a task's part
            return self._loss(net, w, number, "lower") * share

        batches = [(k, torch.tensor([0.3, 0.7])) for k in range(1, STEPS + 1)]
        fmodel = self.plain.unroll(
            self.model, lower, hyper=self.w, steps=STEPS, batches=batches, tasks=2, adjoint=adjoint, **options
        )
        return self._finish(fmodel.losses(lambda net, w, b: b * self.upper(net, w, 0), self.w, torch.ones(2)).sum())

    def loop(self) -> list[Tensor]:
        with bda.innerloop_ctx(self.model, self.inner) as (fmodel, diffopt):
            for k in range(1, STEPS + 1):
                diffopt.step(self.lower(fmodel, self.w, k), self.upper(fmodel, self.w, k))
            return self._finish(self.upper(fmodel, self.w, 0))

    def compat(self) -> list[Tensor]:
        with higher.innerloop_ctx(self.model, self.torch_opt) as (fmodel, diffopt):
            for k in range(1, STEPS + 1):
                diffopt.step(self.lower(fmodel, self.w, k))
            return self._finish(self.upper(fmodel, self.w, 0))

    def trees(self) -> list[Tensor]:
        out = bda.hypergradient(
            lambda y, x, k: self.lower(lambda inputs: inputs @ y["a"] + torch.rand(2), x, k),
            lambda y, x, k: self.upper(lambda inputs: inputs @ y["a"], x, k or 0),
            {"a": torch.ones(3, 2)}, self.w, steps=STEPS, lr=0.1, alpha=0.2, batches=list(range(1, STEPS + 1)),
            adjoint=bda.Checkpointed(every=2),
        )  # fmt: skip
        return [out.grad, out.params["a"]]

    def snapshot(self) -> list[Any]:
        """Everything that an inner loop must leave alone; tensors by identity, version and value."""
        found: list[Any] = []
        for t in (*self.model.parameters(), *self.model.buffers(), self.w):
            found += [id(t), t._version, t.requires_grad, id(t.grad), t.detach().tolist()]
            found.append(None if t.grad is None else t.grad.tolist())
        for m in self.model.modules():
            found += [m.training, type(m), [(key, id(value)) for key, value in m.__dict__.items()]]
            for hooks in (m._forward_hooks, m._forward_pre_hooks, m._backward_hooks, m._parameters, m._buffers):
                found.append([(key, id(value)) for key, value in hooks.items()])
        for opt in (self.inner, self.plain, self.torch_opt):
            for group in opt.param_groups:
                plain = {k: v if isinstance(v, int | float | str | bool) else id(v) for k, v in group.items()}
                found += [plain, [id(p) for p in group["params"]]]
            for p, state in opt.state.items():
                found += [id(p), {k: v.tolist() if isinstance(v, Tensor) else v for k, v in state.items()}]
        return found


def switches() -> dict[str, Any]:
    """torch's global switches that a rollout touches."""
    cpu = torch.get_autocast_dtype("cpu"), torch.is_autocast_enabled("cpu")
    return {
        "grad mode": torch.is_grad_enabled(),
        "autocast": cpu,
        "autocast cache": torch.is_autocast_cache_enabled(),
        "attention": [int(b.value) for b in torch.nn.attention._cur_sdpa_kernel_backends()],
        "fast path": torch.backends.mha.get_fastpath_enabled(),
        "saved-tensor hooks": torch._C._autograd._saved_tensors_hooks_is_enabled(),
        "vmap level": torch._C._functorch.maybe_current_level(),
        "default dtype": torch.get_default_dtype(),
    }


FORMS: dict[str, Callable[[Setting], list[Tensor]]] = {
    "loop": Setting.loop,
    "unroll": lambda s: s.unroll(bda.Unroll()),
    "checkpointed": lambda s: s.unroll(bda.Checkpointed()),
    "slots": lambda s: s.unroll(bda.Checkpointed(slots=2)),
    "forward mode": lambda s: s.unroll(bda.ForwardMode()),
    "truncated": lambda s: s.unroll(bda.Truncated(last=2)),
    "guarded": lambda s: s.unroll(bda.Guarded(bda.Checkpointed(), limit=1e9)),
    "tasks": lambda s: s.tasks(bda.Unroll()),
    "tasks, checkpointed": lambda s: s.tasks(bda.Checkpointed(), chunk_size=1),
    "trees": Setting.trees,
    "compat": Setting.compat,
}


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def differences(before: list[Any], after: list[Any]) -> Iterator[str]:
    for i, (old, new) in enumerate(zip(before, after, strict=True)):
        if old != new:
            yield f"entry {i}: {str(old)[:60]} became {str(new)[:60]}"
