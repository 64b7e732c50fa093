"""The skeleton: a twin of a module whose tensors can be replaced, made without touching or copying anything."""

from __future__ import annotations

import dataclasses
import functools
import gc
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils._python_dispatch import TorchDispatchMode

from bda_optim._modules.rewire import unwrap
from bda_optim._modules.second_order import torch_class
from bda_optim._modules.skeleton import Skeleton, module_slot
from bda_optim._support.slots import Slots

X = torch.linspace(-1, 1, 6).reshape(2, 3)


class Tied(nn.Module):
    """One weight under two names, in a list, a dict and a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3, bias=False)
        self.second = nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight
        self.in_list = [self.first.weight, "text"]
        self.in_dict = {"w": self.first.weight, "deeper": [self.first.weight]}
        self.in_tuple = ("text", self.first.weight)
        self.__dict__["alias"] = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        weights = [self.in_list[0], self.in_dict["w"], self.in_dict["deeper"][0], self.in_tuple[1], self.alias]
        return self.second(self.first(x)) + sum(x @ w for w in weights)


class Pair(NamedTuple):
    layer: nn.Module
    weight: Tensor


@dataclasses.dataclass(frozen=True)
class Record:
    layer: nn.Module
    weight: Tensor
    more: Any = None


class Recorded(nn.Module):
    """Holds a sub-module and a parameter in every kind of container."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.weight = nn.Linear(3, 3), nn.Parameter(torch.eye(3) / 2)
        self.ordered = OrderedDict(layer=self.layer, weight=self.weight)
        self.default = defaultdict(list, layer=self.layer, weight=self.weight)
        self.queue = deque([self.layer, self.weight], maxlen=2)
        self.pair = Pair(self.layer, self.weight)
        self.space = types.SimpleNamespace(layer=self.layer, weight=self.weight)
        self.record = Record(self.layer, self.weight, {"deep": [Pair(self.layer, self.weight)]})
        self.itself: list[Any] = [self.layer]
        self.itself.append(self.itself)

    def holders(self) -> list[tuple[nn.Module, Tensor]]:
        pairs = [(table["layer"], table["weight"]) for table in (self.ordered, self.default)]
        pairs += [(h.layer, h.weight) for h in (self.pair, self.space, self.record, self.record.more["deep"][0])]
        return [*pairs, tuple(self.queue), (self.itself[0], self.weight)]

    def forward(self, x: Tensor) -> Tensor:
        return sum((layer(x) @ weight for layer, weight in self.holders()), torch.zeros(()))


class Referring(nn.Module):
    """Refers to its sub-modules and methods other than through `_modules`."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3)
        self.b = self.a
        self.parts = [self.a, {"again": self.a}]
        self.__dict__["hidden"] = self.a
        self.method = self._double
        self.of_child = self.a.forward
        self.partial = functools.partial(self._scaled, factor=3.0)

    def _double(self, x: Tensor) -> Tensor:
        return 2 * self.a(x)

    def _scaled(self, x: Tensor, factor: float) -> Tensor:
        return factor * self.a(x)

    def forward(self, x: Tensor) -> Tensor:
        calls = [self.b, self.parts[0], self.parts[1]["again"], self.hidden, self.method, self.of_child, self.partial]
        return sum((call(x) for call in calls), torch.zeros(()))


class HookedByMethod(nn.Module):
    """Its own methods are the hooks of a child, and use its own tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Linear(3, 3)
        self.shift = nn.Parameter(torch.ones(3))
        self.child.register_forward_pre_hook(self.before)
        self.child.register_forward_hook(self.after, with_kwargs=True)

    def before(self, module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        return (args[0] + self.shift,)

    def after(self, module: nn.Module, args: Any, kwargs: Any, out: Tensor) -> Tensor:
        return out * self.shift

    def forward(self, x: Tensor) -> Tensor:
        return self.child(x)


class Closures(nn.Module):
    """Holds functions that hold it, one of its layers, one of its parameters, and one another."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.gain = nn.Linear(3, 3), nn.Parameter(torch.rand(3))
        self.head = layer = nn.Linear(3, 3)
        gain = self.gain

        def scaled(x: Tensor) -> Tensor:
            return x * gain

        self.encode = lambda x: torch.tanh(self.body(x))
        self.last = lambda x, *, scale=2.0: scale * layer(scaled(x))
        self.body.register_forward_hook(lambda m, args, out: out + self.gain)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.encode(x), scale=0.5)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "closures": Closures,
    "linear": lambda: nn.Linear(3, 3),
    "mlp": lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)),
    "tied": Tied,
    "referring": Referring,
    "recorded": Recorded,
    "hooked by a method": HookedByMethod,
    "lstm": lambda: nn.LSTM(3, 3),
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(3, 3)),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(3, 3)),
    "nested": lambda: nn.Sequential(nn.ModuleDict({"a": nn.Linear(3, 3)})["a"], Tied(), nn.Identity()),
    "none": lambda: nn.Sequential(nn.Linear(3, 3, bias=False), nn.BatchNorm1d(3, affine=False)),
}
every_module = pytest.mark.parametrize("make", MODULES.values(), ids=MODULES.keys())


@pytest.fixture
def no_gc() -> Iterator[None]:
    """What reference counting alone does not free stays alive."""
    gc.disable()
    yield
    gc.enable()


def output(net: nn.Module) -> Tensor:
    found = net(X)
    return found[0] if isinstance(found, tuple) else found


@every_module
def test_twin_has_the_same_classes_and_the_modules_own_tensors(make: Callable[[], nn.Module]) -> None:
    module = make()
    skeleton = Skeleton(module)
    mine, theirs = dict(skeleton.root.named_modules()), dict(module.named_modules())
    assert list(mine) == list(theirs)
    for name, twin in mine.items():
        assert twin is not theirs[name]
        if "_WeightNorm" not in type(theirs[name]).__name__:  # this one is written out
            assert torch_class(type(twin)) is type(theirs[name])
    for ours, originals in [
        (skeleton.root.named_parameters(), module.named_parameters()),
        (skeleton.root.named_buffers(), module.named_buffers()),
    ]:
        for (name, tensor), (expected, original) in zip(ours, originals, strict=True):
            assert name == expected
            assert tensor is original
    assert [place.original for place in skeleton.params.values()] == list(module.parameters())
    assert list(skeleton.params) == [name for name, _ in module.named_parameters()]
    assert list(skeleton.buffers) == [name for name, _ in module.named_buffers()]


class Operations(TorchDispatchMode):
    """Counts what torch computes."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@every_module
def test_building_and_laying_parameters_copies_no_tensor(make: Callable[[], nn.Module]) -> None:
    module = make()
    values = [p.detach() + 1 for p in module.parameters()]
    with Operations() as operations:
        skeleton = Skeleton(module)
        skeleton.lay_params(skeleton.params, values)
        skeleton.lay_buffers([place.original for place in skeleton.buffers.values()], copy=False)
    assert operations.names == []
    laid = dict(skeleton.root.named_parameters(remove_duplicate=False))
    assert {t.data_ptr() for t in laid.values()} == {t.data_ptr() for t in values}


@every_module
def test_laid_tensors_are_what_a_call_uses_and_the_module_keeps_its_own(make: Callable[[], nn.Module]) -> None:
    module, other = make().eval(), make().eval()
    expected, untouched = output(other), output(module).clone()
    before = {id(m): dict(m.__dict__) for m in module.modules()}
    skeleton = Skeleton(module)
    skeleton.lay_params(skeleton.params, list(other.parameters()))
    skeleton.lay_buffers(list(other.buffers()))
    assert torch.equal(output(skeleton.root), expected)
    assert torch.equal(output(module), untouched)
    for m in module.modules():
        now = m.__dict__
        assert now.keys() == before[id(m)].keys()
        skip = "_flat_weight"  # an RNN refreshes these lists at every call
        assert all(now[k] is v for k, v in before[id(m)].items() if not k.startswith(skip) and k != "weight")


@every_module
def test_gradients_reach_every_laid_tensor_and_none_of_the_modules(make: Callable[[], nn.Module]) -> None:
    module = make()
    skeleton = Skeleton(module)
    values = [(p.detach() + 0.1).requires_grad_() for p in module.parameters()]
    skeleton.lay_params(skeleton.params, values)
    skeleton.lay_buffers([b + 0.0 for b in module.buffers()])
    output(skeleton.root).square().sum().backward()
    assert all(v.grad is not None and v.grad.abs().sum() > 0 for v in values)
    assert all(p.grad is None for p in module.parameters())


def test_a_tied_weight_is_one_place_with_many_spots() -> None:
    skeleton = Skeleton(Tied())
    assert list(skeleton.params) == ["first.weight"]
    place, new = skeleton.params["first.weight"], torch.eye(3)
    place.put(new)
    root: Any = skeleton.root
    spots = [
        root.first.weight,
        root.second.weight,
        root.in_list[0],
        root.in_dict["w"],
        root.in_dict["deeper"][0],
        root.in_tuple[1],
        root.alias,
    ]
    assert all(spot is new for spot in spots)
    assert place.get() is new
    assert root.in_list[1] == root.in_tuple[0] == "text"


def test_sub_modules_and_methods_lead_into_the_twin() -> None:
    module = Referring()
    root: Any = Skeleton(module).root
    assert root.a is root.b is root.parts[0] is root.parts[1]["again"] is root.hidden is not module.a
    assert root.method.__self__ is root
    assert root.of_child.__self__ is root.a
    assert root.partial.func.__self__ is root
    assert root.partial.keywords == {"factor": 3.0}
    assert module.method.__self__ is module
    assert module.parts[0] is module.a


def test_containers_and_records_are_rebuilt_as_they_were() -> None:
    module = Recorded()
    skeleton = Skeleton(module)
    root: Any = skeleton.root
    new = torch.ones(3, 3)
    skeleton.params["weight"].put(new)
    assert all(layer is root.layer and weight is new for layer, weight in root.holders())
    assert all(layer is module.layer and weight is module.weight for layer, weight in module.holders())
    for name in ("ordered", "default", "queue", "pair", "space", "record"):
        assert type(getattr(root, name)) is type(getattr(module, name))
    assert root.default["missing"] == []
    assert "missing" not in module.default
    assert root.queue.maxlen == 2
    assert root.pair._fields == ("layer", "weight")


def test_hooks_are_shared_unless_they_are_methods_of_the_tree() -> None:
    called = []
    plain = nn.Linear(3, 3)
    plain.register_forward_hook(lambda *_: called.append(1))
    assert Skeleton(plain).root._forward_hooks is plain._forward_hooks

    class Watcher:
        def see(self, *_: Any) -> None:
            called.append(2)

    plain.register_forward_hook(Watcher().see)
    root = Skeleton(plain).root
    assert root._forward_hooks is plain._forward_hooks
    root(X)
    assert called == [1, 2]
    module = HookedByMethod()
    hooks = [*Skeleton(module).root.child._forward_hooks.values()]
    assert hooks[0].__self__ is not module
    assert next(iter(module.child._forward_hooks.values())).__self__ is module


def test_user_attributes_are_shared_not_copied() -> None:
    module = nn.Linear(3, 3)
    module.log, module.table, module.pair, module.my_hooks = [1], {"a": [2]}, (3, [4]), [5]
    root: Any = Skeleton(module).root
    for name in ("log", "table", "pair", "my_hooks"):
        assert getattr(root, name) is getattr(module, name)


def test_training_flags_are_a_snapshot() -> None:
    module = nn.Sequential(nn.Dropout(), nn.Linear(3, 3))
    module[0].eval()
    root = Skeleton(module).root
    module.eval()
    assert [m.training for m in root.modules()] == [True, False, True]
    root.train()
    assert not any(m.training for m in module.modules())


def test_buffers_are_laid_as_copies_and_read_as_the_call_left_them() -> None:
    module = nn.BatchNorm1d(3)
    skeleton = Skeleton(module)
    start = skeleton.read_buffers()
    assert [t.data_ptr() for t in start] == [b.data_ptr() for b in module.buffers()]
    skeleton.lay_buffers(start)
    skeleton.root(X)
    mean, var, count = skeleton.read_buffers()
    torch.testing.assert_close(mean, 0.1 * X.mean(0))
    assert count.item() == 1
    assert module.num_batches_tracked.item() == 0
    assert module.running_mean.abs().sum().item() == 0
    own = [mean, var, count]
    skeleton.lay_buffers(own, copy=False)
    skeleton.root(X)
    assert own[2].item() == 2


class Counting(nn.Module):
    """Assigns a new tensor to a buffer that is held elsewhere too."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.held, self.also = (self.count,), [self.count]

    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + 1
        return x + self.count


def test_a_buffer_is_what_its_name_says_wherever_else_it_is_held() -> None:
    module = Counting()
    skeleton = Skeleton(nn.ModuleList([module]))
    for expected in (1, 2):
        skeleton.root[0](X)
        assert [b.item() for b in skeleton.read_buffers()] == [expected]
        skeleton.lay_buffers(skeleton.read_buffers())
        root: Any = skeleton.root[0]
        assert root.count is root.held[0] is root.also[0]
    assert module.count.item() == 0


def test_a_module_compiled_in_place_runs_with_the_laid_tensors() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    module[0].compile(backend="eager")
    before = module[0]._compiled_call_impl
    skeleton = Skeleton(module)
    skeleton.params["0.weight"].put(torch.zeros(3, 3))
    expected = module[1](module[0].bias.expand(2, 3))
    torch.testing.assert_close(skeleton.root(X), expected)
    assert module[0]._compiled_call_impl is before is not None


@pytest.mark.parametrize(
    "wrap",
    [
        lambda m: torch.compile(m, backend="eager"),
        nn.DataParallel,
        lambda m: nn.DataParallel(torch.compile(m, backend="eager")),
    ],
    ids=["compile", "DataParallel", "both"],
)
def test_wrappers_are_removed_at_the_root_and_inside(wrap: Callable[[nn.Module], nn.Module]) -> None:
    plain = nn.Linear(3, 3)
    assert unwrap(wrap(plain)) is plain
    assert unwrap(plain) is plain
    assert type(Skeleton(wrap(plain)).root) is nn.Linear
    inside = nn.Sequential(wrap(plain), nn.ReLU())
    skeleton = Skeleton(inside)
    assert [type(m) for m in skeleton.root] == [nn.Linear, nn.ReLU]
    assert list(skeleton.params) == [name for name, _ in inside.named_parameters()]
    for place in skeleton.params.values():
        place.put(torch.zeros_like(place.original))
    assert skeleton.root(X).abs().sum().item() == 0


@pytest.mark.filterwarnings("ignore:.torch.jit.:DeprecationWarning")
def test_scripted_and_lazy_modules_are_refused() -> None:
    with pytest.raises(TypeError, match=r"scripted module .*Pass the Python module"):
        Skeleton(nn.Sequential(torch.jit.script(nn.Linear(3, 3))))
    with pytest.raises(ValueError, match=r"'0.weight' of a lazy module .*Run the module once"):
        Skeleton(nn.Sequential(nn.LazyLinear(3)))
    with pytest.raises(ValueError, match=r"'running_mean' of a lazy module"):
        Skeleton(nn.LazyBatchNorm1d(affine=False))


# A module that keeps methods bound to itself, or functions that hold it, is a cycle, and so is its twin.
@pytest.mark.parametrize("name", sorted(MODULES.keys() - {"referring", "hooked by a method", "closures"}))
@pytest.mark.usefixtures("no_gc")
def test_a_skeleton_is_freed_without_the_garbage_collector(name: str) -> None:
    module = MODULES[name]()
    skeleton = Skeleton(module)
    value = torch.zeros_like(next(iter(skeleton.params.values())).original).requires_grad_()
    next(iter(skeleton.params.values())).put(value)
    output(skeleton.root).sum().backward()
    seen = [weakref.ref(m) for m in skeleton.root.modules()] + [weakref.ref(value)]
    del skeleton, value
    assert [ref() for ref in seen] == [None] * len(seen)


def test_two_skeletons_of_one_module_are_independent() -> None:
    module = Tied()
    one, two = Skeleton(module), Skeleton(module)
    one.params["first.weight"].put(torch.zeros(3, 3))
    assert two.params["first.weight"].get() is module.first.weight
    assert torch.equal(two.root(X), module(X))


def test_lay_params_wants_one_value_per_name() -> None:
    with pytest.raises(ValueError, match="zip"):
        Skeleton(nn.Linear(3, 3)).lay_params(["weight", "bias"], [torch.zeros(3, 3)])


def test_a_module_among_upper_variables_becomes_a_twin_filled_with_the_slots_tensors() -> None:
    module, slots = nn.BatchNorm1d(3), Slots()
    template = slots.template({"net": module, "x": X, "name": "text"}, "hyper", module_slot(slots))
    assert slots.names == ["hyper['net'].weight", "hyper['net'].bias", "hyper['x']"]
    assert slots.tensors[0] is module.weight
    weight, bias = torch.full((3,), 2.0), torch.ones(3)
    tree = template.fill([weight, bias, X])
    assert tree["net"].weight is weight
    assert tree["x"] is X
    assert tree["name"] == "text"
    tree["net"](X)
    assert module.num_batches_tracked.item() == 0  # its buffers are a copy
    assert tree["net"].num_batches_tracked.item() == 1


def test_weight_norm_of_higher_and_lower_dimensions() -> None:
    for dim in range(3):
        conv = parametrizations.weight_norm(nn.Conv1d(3, 2, 2), dim=dim)
        torch.testing.assert_close(
            Skeleton(conv).root(X[..., None].expand(2, 3, 4)), conv(X[..., None].expand(2, 3, 4))
        )
    bias = parametrizations.weight_norm(nn.Linear(3, 2), name="bias", dim=0)
    torch.testing.assert_close(Skeleton(bias).root(X), bias(X))


@pytest.mark.parametrize("dim", [0, 1, None])
@pytest.mark.parametrize("form", ["parametrization", "hook"])
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_weight_norm_is_written_out_with_the_same_value(form: str, dim: int | None) -> None:
    make = parametrizations.weight_norm if form == "parametrization" else nn.utils.weight_norm
    module = make(nn.Linear(3, 2), dim=dim).double()
    skeleton = Skeleton(module)
    torch.testing.assert_close(skeleton.root(X.double()), module(X.double()), rtol=0, atol=1e-14)
    values = [(p.detach() + 0.3).requires_grad_() for p in module.parameters()]

    def f(*tensors: Tensor) -> Tensor:
        skeleton.lay_params(skeleton.params, tensors)
        return skeleton.root(X.double())

    assert torch.autograd.gradgradcheck(f, values)
    if form == "parametrization":
        assert parametrize.is_parametrized(module)
        assert type(module.parametrizations.weight[0]).__name__ == "_WeightNorm"
    else:
        assert any(type(hook).__name__ == "WeightNorm" for hook in module._forward_pre_hooks.values())
