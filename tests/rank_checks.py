"""What `test_distributed.py` runs on every rank; each function is called with a folder that the ranks share."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from problems import relative_error
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import bda_optim as bda
from bda_optim import distributed

EXACT = 1e-12
Task = tuple[Tensor, Tensor]


class Net(nn.Module):
    """A backbone, which is an upper variable, a head, which the tasks adapt, and a layer that nobody uses."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.backbone = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh())
        self.head = nn.Linear(4, 2)
        self.spare = nn.Linear(2, 2)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x))


def loss(net: nn.Module, hyper: Any, batch: Task) -> Tensor:
    inputs, labels = batch
    return F.cross_entropy(net(inputs), labels)


def tasks(count: int, seed: int = 1, examples: int = 6) -> Task:
    """The inputs and labels of `count` tasks, the same on all ranks."""
    random = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, examples, 3, dtype=torch.float64, generator=random)
    return inputs, torch.randint(2, (count, examples), generator=random)


def adapt(model: nn.Module, mine: Task, *, together: bool = False, steps: int = 3, total: int | None = None) -> None:
    """Leave the mean hypergradient of some tasks in `.grad`; `together` in one backward pass, else in one per task."""
    inner = bda.BDAInnerOptimizer(model.head.parameters(), lr=0.3, upper_lr=0.2, alpha=bda.harmonic(0.5))
    count = len(mine[0])
    if together and count:
        fmodel = inner.unroll(model, loss, loss, steps=steps, batches=[mine] * steps, tasks=count)
        fmodel.losses(loss, None, mine).mean().backward()
        return
    for batch in zip(*mine, strict=True):
        fmodel = inner.unroll(model, loss, loss, steps=steps, batches=[batch] * steps, copy_initial_weights=False)
        (loss(fmodel, None, batch) / (total or count)).backward()


def grads(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def same_on_all(found: Sequence[Tensor]) -> None:
    """Fail unless tensors have the same bits on every rank."""
    flat = torch.cat([t.detach().reshape(-1) for t in found])
    everywhere = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(everywhere, flat)
    assert all(torch.equal(flat, other) for other in everywhere)


def alone(count: int, **options: Any) -> list[Tensor]:
    """The hypergradient of all tasks in one process."""
    model = Net()
    adapt(model, tasks(count), **options)
    return grads(model)


class Collectives(TorchDispatchMode):
    """Notes the collective operations and the numbers of elements they move."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, int]] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op.namespace in ("c10d", "_c10d_functional") and "wait" not in str(op):
            size = sum(t.numel() for t in torch.utils._pytree.tree_leaves(args[0]) if isinstance(t, Tensor))
            self.found.append((op._schema.name.split("::")[1], size))
        return op(*args, **(kwargs or {}))


# --- tasks over ranks -------------------------------------------------------------------------------------------------


def parts_are_whole(folder: Path) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    for count in (0, 1, world - 1, world, 2 * world + 1):
        parts: list[Any] = [None] * world
        dist.all_gather_object(
            parts, (distributed.shard(range(count)), distributed.shard(torch.arange(count)).tolist())
        )
        assert [i for part, _ in parts for i in part] == list(range(count))
        assert [i for _, part in parts for i in part] == list(range(count))
        assert max(len(part) for part, _ in parts) - min(len(part) for part, _ in parts) <= 1
    group = dist.new_group([0])
    if rank == 0:
        assert distributed.shard([1, 2, 3], group=group) == [1, 2, 3]
    else:
        with pytest.raises(ValueError, match="not a member"):
            distributed.shard([1, 2, 3], group=group)


def hypergradient_is_that_of_one_process(folder: Path) -> None:
    world = dist.get_world_size()
    for count in (world - 1, world, 2 * world + 1):  # a rank without tasks, even, uneven
        for together in (False, True):
            want = alone(count, together=together)
            for announced in (False, True):
                model = Net()
                averager = distributed.Averager(model, bucket_mb=1e-4 if announced else 25.0)
                mine = distributed.shard(tasks(count))
                calls = min(1, len(mine[0])) if together else len(mine[0])
                with averager(weight=len(mine[0]), backwards=calls if announced else None):
                    adapt(model, mine, together=together)
                got = grads(model)
                assert [g.shape for g in got] == [g.shape for g in want], "a variable that nobody used has no gradient"
                assert relative_error(got, want) < EXACT
                same_on_all(got)


def gradients_accumulate(folder: Path) -> None:
    world = dist.get_world_size()
    want = [2 * g for g in alone(world - 1)]
    model = Net()
    averager = distributed.Averager(model)
    mine = distributed.shard(tasks(world - 1))
    for _ in range(2):
        with averager(weight=len(mine[0])):
            adapt(model, mine)
    assert relative_error(grads(model), want) < EXACT
    before = [g.clone() for g in grads(model)]
    with averager(weight=0):
        pass  # no rank has a task: nothing changes
    assert all(map(torch.equal, before, grads(model)))


def a_tree_of_hypergradients(folder: Path) -> None:
    world, hyper = dist.get_world_size(), {"x": torch.tensor(0.3).double(), "w": [torch.ones(3).double()]}
    starts = torch.linspace(-1, 2, 3 * (2 * world - 1)).double().reshape(-1, 3)

    def lower(y: Tensor, h: Any, batch: Any) -> Tensor:
        return (h["w"][0] * (y - h["x"]) ** 2).sum() + 0.1 * (y**4).sum()

    def upper(y: Tensor, h: Any, batch: Any) -> Tensor:
        return ((y - 1) ** 2).sum() + h["x"] ** 2

    def mean(some: Tensor) -> Any:
        found = [bda.hypergradient(lower, upper, start, hyper, steps=4, lr=0.1).grad for start in some]
        return {"x": sum(g["x"] for g in found) / len(found), "w": [sum(g["w"][0] for g in found) / len(found)]}

    for count in (world - 1, 2 * world - 1):
        want = mean(starts[:count])
        mine = distributed.shard(starts[:count])
        got = distributed.average(mean(mine) if len(mine) else hyper, weight=len(mine))
        assert relative_error([got["x"], got["w"][0]], [want["x"], want["w"][0]]) < EXACT
        same_on_all([got["x"], got["w"][0]])


def any_dtype_travels(folder: Path) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    dtypes = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex128)
    kinds = [torch.full((2, 3), rank + 1.0, dtype=dtype) for dtype in dtypes] + [torch.zeros(0), torch.ones(()) * rank]
    got = distributed.average(kinds, weight=rank)
    total = sum(range(world))
    mean = sum(r * (r + 1) for r in range(world)) / total
    for dtype, value in zip(dtypes, got, strict=False):
        assert value.dtype == dtype and value.shape == (2, 3)
        assert (value - mean).abs().max() <= 4 * torch.finfo(dtype).eps * mean
    assert got[-2].numel() == 0 and got[-1].shape == () and abs(got[-1] - (mean - 1)) < 1e-6


def train(model: nn.Module, averager: Any, outer: Any, iterations: int, count: int, first: int = 0) -> None:
    for i in range(first, first + iterations):
        outer.zero_grad()
        mine = distributed.shard(tasks(count, seed=i))
        with averager(weight=len(mine[0])):
            adapt(model, mine)
        outer.step()


def trained_alone(iterations: int, count: int) -> nn.Module:
    """The model after upper iterations in one process that has all tasks."""
    reference = Net()
    outer = torch.optim.Adam(reference.parameters(), lr=0.01)
    for i in range(iterations):
        outer.zero_grad()
        adapt(reference, tasks(count, seed=i))
        outer.step()
    return reference


def twenty_iterations_end_alike(folder: Path) -> None:
    world = dist.get_world_size()
    reference = trained_alone(20, world + 1)
    model = Net(seed=dist.get_rank())  # the ranks start from different weights: those of rank 0 are used
    train(model, distributed.Averager(model), torch.optim.Adam(model.parameters(), lr=0.01), 20, world + 1)
    same_on_all(list(model.parameters()))
    assert relative_error(list(model.parameters()), list(reference.parameters())) < EXACT
    moved = relative_error(list(model.parameters()), list(Net().parameters()))
    assert moved > 0.01, "nothing was learned, so nothing was compared"


def communication_is_one_pass(folder: Path) -> None:
    found = []
    model = Net()
    sizes = [p.numel() for p in model.parameters()]
    for mib in (25.0, 1e-4):
        averager = distributed.Averager(model, bucket_mb=mib)
        for steps in (2, 1, 7):
            mine = distributed.shard(tasks(dist.get_world_size() + 1))
            with Collectives() as seen, averager(weight=len(mine[0])):
                adapt(model, mine, steps=steps)
            found.append(seen.found)
        found.pop(-3)  # the first time nobody knows which variables are never used
    assert found[0] == found[1] and found[2] == found[3], "communication does not depend on K"
    assert {name for calls in found for name, _ in calls} == {"allreduce_"}
    one = 1 + sum(sizes) + len(sizes)  # the number of tasks; the variables; a flag for each
    assert [sum(size for _, size in calls) for calls in found] == [one] * 4, "one pass over the upper variables"
    assert len(found[0]) == 3 and len(found[2]) > 4, "one bucket for what is used and one for the rest, or several"


def an_announced_pass_sends_early(folder: Path) -> None:
    """The first bucket leaves in the middle of the backward pass, not at its end."""
    model, order = Net(), []
    averager = distributed.Averager(model, bucket_mb=1e-6)
    first = model.backbone[0].weight  # its gradient comes last
    mine = distributed.shard(tasks(2 * dist.get_world_size()))
    for _ in range(2):  # the first time nobody knows that the head, copied for each task, has no gradient
        with Collectives() as seen, averager(weight=2, backwards=1):
            handle = first.register_hook(lambda grad: order.append(len(seen.found)))
            adapt(model, mine, together=True)
        handle.remove()
    assert len(seen.found) == 1 + len(list(model.parameters()))
    assert order[0] == 1 and order[1] > 1, f"the number of tasks, and then the second layer's gradients: {order}"
    with pytest.raises(RuntimeError, match="more often than announced"), averager(weight=2, backwards=1):
        adapt(model, mine)
    dist.barrier()


def an_error_changes_nothing(folder: Path) -> None:
    model = Net()
    averager = distributed.Averager(model)
    with pytest.raises(ZeroDivisionError), averager(weight=1, backwards=1):
        raise ZeroDivisionError
    assert not grads(model)
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters() if p._post_accumulate_grad_hooks)


# --- wrapped modules --------------------------------------------------------------------------------------------------


def modules_in_ddp(folder: Path) -> None:
    world = dist.get_world_size()
    want = alone(world + 1)
    model = Net()
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    averager = distributed.Averager(wrapped)
    assert averager.local is model
    mine = distributed.shard(tasks(world + 1))
    with averager(weight=len(mine[0])):
        adapt(model, mine)
    assert relative_error(grads(model), want) < EXACT

    # A pass through the wrapper itself would be reduced by it, with another weight, were it not for the averager.
    reference = Net()
    loss(reference, None, tuple(t.flatten(0, 1) for t in tasks(world + 1))).backward()
    model.zero_grad()
    with Collectives() as seen, averager(weight=len(mine[0])):
        loss(wrapped, None, tuple(t.flatten(0, 1) for t in mine)).backward()
    assert relative_error(grads(model), grads(reference)) < EXACT
    assert len(seen.found) == 3  # the number of tasks, what is used, what is not

    # `autograd.grad` passes DDP's hooks by; the wrapped module is a hyper module like any other.
    def lower(y: Tensor, features: nn.Module, batch: Task) -> Tensor:
        return F.cross_entropy(features(batch[0]) @ y, batch[1])

    def mean(features: nn.Module, some: Task) -> dict[str, Tensor]:
        start, found = torch.zeros(2, 2).double(), []
        for task in zip(*some, strict=True):
            options = dict(steps=2, lr=0.3, batches=[task] * 2, upper_batch=task)
            found.append(bda.hypergradient(lower, lower, start, features, **options).grad)
        return {name: sum(g[name] for g in found) / len(found) for name in found[0]}

    got = distributed.average(mean(wrapped, mine), weight=len(mine[0]))
    exact = mean(model, tasks(world + 1))
    assert relative_error(list(got.values()), list(exact.values())) < EXACT
    assert len(grads(model)) == len(want), "nothing wrote to .grad"


def modules_in_fsdp(folder: Path) -> None:
    world = dist.get_world_size()
    reference = trained_alone(5, world + 1)
    sharded, averager, outer = fsdp()
    train(averager.local, averager, outer, 5, world + 1)
    found = [p.full_tensor() for p in sharded.parameters()]
    assert relative_error(found, list(reference.parameters())) < EXACT
    same_on_all(found)
    states = [s["exp_avg"] for s in outer.state.values()]
    assert states and all(s.to_local().numel() < s.numel() for s in states), "the optimizer's states are sharded"
    sharded, averager, outer = fsdp()
    for _ in range(2):
        mine = distributed.shard(tasks(world + 1))
        with averager(weight=len(mine[0])):
            adapt(averager.local, mine)
    assert relative_error([g.full_tensor() for g in grads(sharded)], [2 * g for g in alone(world + 1)]) < EXACT
    with pytest.raises(ValueError, match=r"pass it as `local=`"):
        distributed.Averager(sharded)
    with pytest.raises(ValueError, match="must be a copy"):
        distributed.Averager(sharded, local=nn.Linear(2, 2).double())
    with pytest.raises(TypeError, match=r"cannot compute with a DTensor.*'backbone\.0\.weight'"):
        adapt(sharded, tasks(1))
    with pytest.raises(TypeError, match=r"DTensor.*got hyper.*full_tensor\(\)"):
        bda.hypergradient(lambda y, x, b: y.sum(), lambda y, x, b: y.sum(), torch.ones(2), sharded.head.weight, steps=1)
    with pytest.raises(ValueError, match="must be a copy"):
        distributed.Averager(sharded, local=Net().float())


def fsdp(seed: int = 0) -> tuple[nn.Module, distributed.Averager, torch.optim.Optimizer]:
    model = Net(seed)
    local = copy.deepcopy(model)
    from torch.distributed.fsdp import fully_shard  # takes seconds, and most runs do without

    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model.backbone, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, distributed.Averager(model, local=local), torch.optim.Adam(model.parameters(), lr=0.01)


# --- data over ranks --------------------------------------------------------------------------------------------------


def lower_loss(net: nn.Module, log_l2: Tensor, batch: Task) -> Tensor:
    return loss(net, None, batch) + log_l2.exp() * net.head.weight.square().sum()


def data_parallel_hypergradient(folder: Path) -> None:
    world, examples = dist.get_world_size(), 3 * dist.get_world_size() - 1
    inputs, labels = tasks(1, examples=examples)
    whole = inputs[0], labels[0]
    few = whole[0][: world - 1], whole[1][: world - 1]
    for everything in (whole, few):
        mine = distributed.shard(everything)
        weight = len(mine[0])
        if weight == 0:
            mine = whole  # a rank without examples takes part with any
        parallel = [distributed.DataParallel(f, weight=weight) for f in (lower_loss, loss)]
        for adjoint in (bda.Unroll(), bda.Checkpointed(), bda.Checkpointed(slots=2)):
            for momentum in (0.0, 0.9):
                want = solve(lower_loss, loss, everything, adjoint, momentum)
                got = solve(*parallel, mine, adjoint, momentum)
                assert len(got) == len(want)
                assert max(relative_error([a], [b]) for a, b in zip(got, want, strict=True)) < EXACT
                same_on_all(got)


def solve(lower: Any, upper: Any, batch: Task, adjoint: Any, momentum: float) -> list[Tensor]:
    """Hypergradients, y_K and the losses; `spare` has no gradient, so weight decay must not move it."""
    model, log_l2 = Net(), torch.tensor(-1.0, dtype=torch.float64, requires_grad=True)
    inner = bda.BDAInnerOptimizer(
        [*model.head.parameters(), *model.spare.parameters()], lr=0.3, upper_lr=0.2, alpha=bda.harmonic(0.5),
        momentum=momentum, weight_decay=0.1,
    )  # fmt: skip
    fmodel = inner.unroll(
        model, lower, upper, hyper=log_l2, steps=3, batches=[batch] * 3, adjoint=adjoint, copy_initial_weights=False
    )
    upper(fmodel, log_l2, batch).backward()
    return [log_l2.grad, *grads(model), *fmodel.params.values(), fmodel.trace.lower]


def data_parallel_derivatives_of_any_order(folder: Path) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()

    def value(y: Tensor, x: Tensor, r: int) -> Tensor:
        return ((y**3).sum() * (r + 1) + x * (y[0] * y[1]) ** 2 * (r + 2)).sin()

    def derivatives(f: Any) -> list[Tensor]:
        y = torch.tensor([0.3, 0.7], dtype=torch.float64, requires_grad=True)
        x = torch.tensor(0.9, dtype=torch.float64, requires_grad=True)
        found, current = [], f(y, x)
        for _ in range(4):
            a, b = torch.autograd.grad(current, [y, x], create_graph=True)
            found += [a, b]
            current = (a**2).sum() + b**2
        return found

    got = derivatives(lambda y, x: distributed.DataParallel(lambda y, x, b: value(y, x, rank), rank + 1)(y, x, None))
    shares = [(r + 1) / sum(range(world + 1)) for r in range(world)]
    want = derivatives(lambda y, x: sum(share * value(y, x, r) for r, share in enumerate(shares)))
    assert max(relative_error([a], [b]) for a, b in zip(got, want, strict=True)) < EXACT


def data_parallel_over_tasks(folder: Path) -> None:
    """`vmap` cannot batch a sum over ranks; the tasks run one after another, with a warning."""
    model, both = Net(), tasks(2, examples=2 * dist.get_world_size())
    mine = tuple(t.tensor_split(dist.get_world_size(), 1)[dist.get_rank()] for t in both)
    inner = bda.BDAInnerOptimizer(model.head.parameters(), lr=0.3)
    want = inner.unroll(model, loss, steps=2, batches=[both] * 2, tasks=2)
    with pytest.warns(UserWarning, match="cannot batch .* over tasks"):
        got = inner.unroll(model, distributed.DataParallel(loss), steps=2, batches=[mine] * 2, tasks=2)
    assert relative_error(list(got.params.values()), list(want.params.values())) < EXACT


def copies_of_plain_modules(folder: Path) -> None:
    """`local` may also be a copy of a module that is not sharded: it is filled, and its gradients are handed over."""
    want, model, local = alone(3), Net(), Net(seed=4)
    averager = distributed.Averager(model, local=local)
    mine = distributed.shard(tasks(3))
    with averager(weight=len(mine[0])):
        adapt(local, mine)
    assert relative_error(grads(model), want) < EXACT and not grads(local)


def data_parallel_refusals(folder: Path) -> None:
    captured, y = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    with pytest.raises(ValueError, match=r"came by another way than its arguments; got one of 2 float32"):
        distributed.DataParallel(lambda y, x, b: (y * captured).sum())(y, None, None)
    with pytest.raises(ValueError, match="got a tensor of the batch that requires grad"):
        distributed.DataParallel(lambda y, x, b: (y * b).sum())(y, None, captured)
    for wrong, got in ((lambda y, x, b: 1.0, "float"), (lambda y, x, b: y, "shape")):
        with pytest.raises(TypeError, match=f"must be a scalar tensor; got {got}"):
            distributed.DataParallel(wrong)(y, None, None)
    with torch.no_grad():
        rank, world = dist.get_rank(), dist.get_world_size()
        mean = distributed.DataParallel(lambda y, x, b: y.sum() * b, weight=lambda b: b)(y, None, rank)
    assert mean.item() == pytest.approx(2 * sum(r * r for r in range(world)) / sum(range(world)))
    model = Net()
    inner = bda.BDAInnerOptimizer(model.head.parameters(), lr=0.3)
    fmodel = inner.unroll(model, loss, steps=1, batches=[tasks(2)], tasks=2)
    with pytest.raises(ValueError, match="one task at a time; got a module with tasks=2"):
        distributed.DataParallel(loss)(fmodel, None, tasks(2))


class Counting(nn.Module):
    """Its buffers change in both ways: in place, and by assignment."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(3, 2).double(), nn.BatchNorm1d(2).double()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return self.norm(self.linear(x))


def data_parallel_buffers(folder: Path) -> None:
    model = Counting()
    inner = bda.BDAInnerOptimizer(model.parameters(), lr=0.1)
    inputs, labels = tasks(1, examples=4)
    batch = inputs[0] + dist.get_rank(), labels[0]
    fmodel = inner.unroll(model, distributed.DataParallel(loss), steps=3, batches=[batch] * 3)
    assert fmodel.buffer_dict["calls"] == 3 and fmodel.buffer_dict["norm.num_batches_tracked"] == 3
    inner.commit(fmodel)
    assert model.calls == 3 and model.norm.running_mean.abs().sum() > 0


# --- precision, files -------------------------------------------------------------------------------------------------


def an_overflow_on_one_rank_is_seen_by_all(folder: Path) -> None:
    """GradScaler: gradients are averaged before they are looked at, so the ranks skip a step together."""
    torch.manual_seed(0)
    model = Net().float()
    averager = distributed.Averager(model)
    outer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=2.0**10)
    inner = bda.BDAInnerOptimizer(model.head.parameters(), lr=0.3)
    for overflows in (False, True):
        outer.zero_grad()
        before, scale = [p.detach().clone() for p in model.parameters()], scaler.get_scale()
        mine = distributed.shard(tasks(dist.get_world_size(), seed=3))
        with averager(weight=1):
            for inputs, labels in zip(mine[0].float(), mine[1], strict=True):
                batch = inputs, labels
                with torch.autocast("cpu", dtype=torch.float16):
                    fmodel = inner.unroll(model, loss, steps=2, batches=[batch] * 2, adjoint=bda.Checkpointed())
                    value = loss(fmodel, None, batch)
                if overflows and dist.get_rank() == dist.get_world_size() - 1:
                    value = value * torch.inf
                scaler.scale(value).backward()
        scaler.step(outer)
        scaler.update()
        stayed = all(map(torch.equal, before, model.parameters()))
        assert stayed == overflows
        assert scaler.get_scale() == (scale / 2 if overflows else scale)
    same_on_all(list(model.parameters()))


def writes_a_checkpoint(folder: Path) -> None:
    """Five iterations, a checkpoint of shards, then five more, whose result is kept for those who resume."""
    model, averager, outer = fsdp()
    train(averager.local, averager, outer, 3, 4)
    distributed.save(folder / "checkpoints", model, outer, iteration=3)
    train(averager.local, averager, outer, 2, 4, first=3)
    distributed.save(folder / "checkpoints", model, outer, iteration=5, drawn=torch.arange(3), name="a")
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["2"]
    train(averager.local, averager, outer, 5, 4, first=5)
    final = [p.full_tensor() for p in model.parameters()]
    if dist.get_rank() == 0:
        torch.save(final, folder / "final.pt")


def resumes_a_checkpoint(folder: Path) -> None:
    model, averager, outer = fsdp(seed=5)
    assert distributed.load(folder / "nothing", model, outer) is None
    extra = distributed.load(folder / "checkpoints", model, outer)
    assert extra is not None and extra["drawn"].tolist() == [0, 1, 2] and extra["name"] == "a"
    train(averager.local, averager, outer, 5, 4, first=extra["iteration"])
    want = torch.load(folder / "final.pt", weights_only=True)
    assert relative_error([p.full_tensor() for p in model.parameters()], want) < EXACT
