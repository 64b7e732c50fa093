"""A canary per private name of torch: if one fails, its message says what the package would do wrong."""

from __future__ import annotations

import ast
import collections
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils import checkpoint

import bda_optim as bda
from bda_optim._context.forward import surroundings
from bda_optim._support import torch_private as private
from bda_optim._support.autograd_graph import nodes

OLD_AND_NEW = pytest.mark.parametrize("old", [False, True], ids=["as installed", "as before 2.8"])


@pytest.fixture
def torch_of_age(monkeypatch: pytest.MonkeyPatch, old: bool) -> None:
    if old:
        monkeypatch.setattr(private, "_top_hooks", None)
    elif private._top_hooks is None:
        pytest.skip("this torch cannot read the hooks on saved tensors")


# Trees.


def test_registered_nodes() -> None:
    tree = collections.deque([torch.ones(1), {"a": 2}], maxlen=5)
    assert type(tree) in private.REGISTERED
    children = private.registered_children(tree)
    assert [name for name, _ in children] == ["[0]", "[1]"], "names of leaves in messages are wrong"
    assert children[1][1] == {"a": 2}, "batches in classes of the user's lose their tensors"
    same = private.registered_like(tree, [1, 2])
    assert same == collections.deque([1, 2]) and same.maxlen == 5, "trees of the user's own classes are not rebuilt"


# Tensors.


def test_version_of_a_tensor() -> None:
    y = torch.ones(2)
    before = private.version_of(y)
    y.add_(1)
    assert private.version_of(y) > before, "a change in place between rollout and backward pass goes unnoticed"
    with torch.inference_mode():
        assert private.version_of(torch.ones(1)) == -1, "inference tensors in a batch raise"


# The autograd graph.


def test_reentrant_checkpoints() -> None:
    x = torch.ones(1, requires_grad=True)
    outside = checkpoint.checkpoint(torch.exp, x, use_reentrant=True).exp()
    number = private.sequence_number()
    assert not private.has_reentrant_checkpoint(outside.exp().grad_fn, number), "one outside the inner loop is refused"
    inside = checkpoint.checkpoint(torch.exp, outside, use_reentrant=True).exp()
    assert private.has_reentrant_checkpoint(inside.grad_fn, number), "the gradients inside a reentrant one are lost"
    assert not private.has_reentrant_checkpoint(x.exp().exp().grad_fn, 0)


def test_recent_nodes() -> None:
    x = torch.ones(1, requires_grad=True)
    old = x.exp()
    number = private.sequence_number()
    new = old.sin() + x
    names = [node.name() for node in private.recent_nodes(new.grad_fn, number)]
    assert sorted(names)[1:] == ["SinBackward0", "torch::autograd::AccumulateGrad"], "a graph is walked beyond a loop"
    assert old.grad_fn in private.recent_nodes(new.grad_fn, number, {old.grad_fn}), "parameters are not found"
    assert not list(private.recent_nodes(None, 0))


class Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.clone()


class Once(Identity):
    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.clone()


def test_function_of_a_node() -> None:
    x = torch.ones(1, requires_grad=True)
    assert private.forward_class(Identity.apply(x).grad_fn) is Identity, "a moving spectral norm is not refused"
    assert private.forward_class(x.exp().grad_fn) is None


def test_backward_pass() -> None:
    x, y = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    loss = x.pow(3).sum()
    found = private.run_backward((loss,), (torch.tensor(2.0),), (x, y), create_graph=True, retain_graph=True)
    assert found[1] is None and torch.equal(found[0], 6 * x), "every step is wrong"
    assert found[0].requires_grad and x.grad is None, "no hypergradient, or one that is written into `.grad`"
    (found,) = private.run_backward((loss,), (torch.tensor(1.0),), (x,), create_graph=False, retain_graph=False)
    assert not found.requires_grad
    with pytest.raises(RuntimeError, match="second time"):
        private.run_backward((loss,), (torch.tensor(1.0),), (x,), create_graph=False, retain_graph=False)
    with torch.overrides.BaseTorchFunctionMode():
        loss = x.pow(3).sum()
        (found,) = private.run_backward((loss,), (torch.tensor(1.0),), (x,), create_graph=False, retain_graph=False)
        assert torch.equal(found, torch.full_like(x, 3.0)), "the public way is not taken where a mode watches"


def test_weighted_seeds() -> None:
    x = torch.randn(3, 2, requires_grad=True)
    index = torch.tensor([[0, 1]])
    assert private.takes_weighted_seed(x.exp().grad_fn)
    assert private.takes_weighted_seed(nn.functional.embedding(index, x).grad_fn)
    for value in (
        Identity.apply(x),
        x.half(),
        torch.linalg.matrix_exp(x @ x.T),
        nn.functional.embedding(index, x, sparse=True),
        torch.gather(x, 0, index, sparse_grad=True),
        torch.matrix_exp(x @ x.mT),
    ):
        assert not private.takes_weighted_seed(value.grad_fn), "BDA takes a wrong step, or none of its checks"


@pytest.mark.parametrize("padding", [None, 0, 1, -1])
def test_padded_embeddings_are_found(padding: int | None) -> None:
    tables, words = torch.ones(2, 3, 2, requires_grad=True), torch.zeros(2, 4, dtype=torch.long)
    number = private.sequence_number()
    found = torch.func.vmap(lambda table, w: nn.functional.embedding(w, table, padding_idx=padding))(tables, words)
    answer = private.has_padded_embedding(found.sum().grad_fn, number)
    assert answer is (padding is not None), "tasks move a row for padding"
    loss, _ = embedding_bag()
    assert not private.has_padded_embedding(loss.grad_fn, number), "tasks run one after another for no reason"


def test_hooks_of_a_tensor() -> None:
    x = torch.ones(1, requires_grad=True)
    assert not private.has_hooks(x)
    x.register_hook(lambda grad: None)
    assert private.has_hooks(x), "a hook sees a weighted gradient"


@pytest.mark.parametrize("register", ["tensor", "node", "before the node", "several tensors"])
def test_every_hook_has_a_number(register: str) -> None:
    y = torch.ones(1, requires_grad=True) * 2
    number = private.hook_number()
    assert y.grad_fn is not None
    {
        "tensor": lambda: y.register_hook(print),
        "node": lambda: y.grad_fn.register_hook(print),
        "before the node": lambda: y.grad_fn.register_prehook(print),
        "several tensors": lambda: torch.autograd.graph.register_multi_grad_hook([y], print),
    }[register]()
    assert private.hook_number() > number, "a hook sees a weighted gradient"


def embedding_bag() -> tuple[Tensor, Tensor]:
    weight = torch.randn(4, 3, requires_grad=True)
    return nn.functional.embedding_bag(torch.tensor([[0, 1]]), weight, mode="sum").square().sum(), weight


def cdist() -> tuple[Tensor, Tensor]:
    x = torch.randn(3, 2, requires_grad=True)
    return torch.cdist(x, torch.randn(2, 2)).square().sum(), x


def pdist() -> tuple[Tensor, Tensor]:
    x = torch.randn(3, 2, requires_grad=True)
    return torch.pdist(x).square().sum(), x


def ctc_loss() -> tuple[Tensor, Tensor]:
    x = torch.randn(5, 1, 4, requires_grad=True)
    length = torch.tensor([5])
    return nn.functional.ctc_loss(x.log_softmax(-1), torch.tensor([[1, 2]]), length, torch.tensor([2])), x


def once() -> tuple[Tensor, Tensor]:
    x = torch.randn(3, requires_grad=True)
    return Once.apply(x.square()).sum(), x


@pytest.mark.parametrize(
    ("make", "operation"),
    [
        (embedding_bag, "EmbeddingBag"),
        (cdist, "cdist"),
        (pdist, "pdist"),
        (ctc_loss, "ctc_loss"),
        (once, "a function marked once_differentiable"),
    ],
)
def test_operations_without_a_second_derivative(make: Any, operation: str) -> None:
    """torch may learn a derivative: then the operation is refused without need, and its row can go."""
    torch.manual_seed(0)
    loss, x = make()
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    nodes = [*walk(loss.grad_fn), *walk(grad.grad_fn)]
    assert operation in {private.undifferentiable(node) for node in nodes}, (
        f"the second derivative of {operation} is silently wrong, or raises without a name"
    )


def walk(root: Any) -> Iterator[Any]:
    stack, seen = [root], {root}
    while stack:
        node = stack.pop()
        yield node
        following = {n for n, _ in node.next_functions if n is not None} - seen
        seen |= following
        stack.extend(following)


def test_plain_operations_have_a_second_derivative() -> None:
    x = torch.randn(3, requires_grad=True)
    (grad,) = torch.autograd.grad(Identity.apply(x.exp()).sum(), x, create_graph=True)
    assert {private.undifferentiable(node) for node in walk(grad.grad_fn)} == {None}


# Transformations of what a program computes.


def test_transformations_are_noticed() -> None:
    seen: list[bool] = []

    def look(x: Tensor) -> Tensor:
        seen.append(private.are_transformed(x))
        return x.sum()

    class Looking(Identity):
        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            look(grad)
            return grad

    x = torch.ones(2, requires_grad=True)
    look(x)
    assert seen == [False], "closed derivatives are never used"
    torch.func.vmap(look)(torch.ones(2, 2))
    torch.func.grad(look)(torch.ones(2))
    with torch.autograd.forward_ad.dual_level():
        look(torch.ones(1))
    torch.autograd.grad(Looking.apply(x), x, torch.eye(2), is_grads_batched=True)
    assert seen == [False, True, True, True, True], "a closed derivative is used where it has no rule"


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_observers_of_functions_are_noticed() -> None:
    seen: list[tuple[bool, bool]] = []

    def look(x: Tensor) -> Tensor:
        seen.append((private.is_watched(), private.is_traced()))
        return x.sin()

    look(torch.ones(1))
    with torch.device("cpu"):  # a mode, too
        look(torch.ones(1))
    torch.jit.trace(look, torch.ones(1), check_trace=False)
    private.trace_graph(lambda x: [look(x)], [torch.ones(1)])
    assert [watched for watched, _ in seen[:3]] == [False, True, True], "modes of the user's do not see a layer"
    assert [traced for _, traced in seen] == [False, False, False, True], "compiled programs lack closed derivatives"


# Hooks on saved tensors.


@OLD_AND_NEW
@pytest.mark.usefixtures("torch_of_age")
def test_hooks_are_noticed() -> None:
    assert not private.has_saved_tensor_hooks() and not private.inside_checkpoint()
    with torch.autograd.graph.save_on_cpu():
        assert private.has_saved_tensor_hooks(), "hooks of the user's are forbidden in an inner step"
        assert not private.inside_checkpoint(), "hooks of the user's count as a checkpoint"
    assert not private.has_saved_tensor_hooks() and not private.hooks_are_forbidden()
    with torch.autograd.graph.disable_saved_tensors_hooks("no"):
        assert not private.has_saved_tensor_hooks()
        assert private.hooks_are_forbidden(), "asking for hooks changed whether they are allowed"


@OLD_AND_NEW
@pytest.mark.usefixtures("torch_of_age")
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_is_noticed(reentrant: bool) -> None:
    inside = []

    def function(x: Tensor) -> Tensor:
        inside.append(private.inside_checkpoint())
        return x.exp()

    checkpoint.checkpoint(function, torch.ones(1, requires_grad=True), use_reentrant=reentrant).backward()
    assert inside == [not reentrant] * 2, "a checkpoint recomputes with the parameters of another step"


@OLD_AND_NEW
@pytest.mark.usefixtures("torch_of_age")
def test_hypergradients_with_hooks_and_checkpoints() -> None:
    """Hooks around a rollout are allowed, and so is a checkpoint; a checkpoint inside a loss is refused."""

    def value(w: Tensor) -> Tensor:
        y = torch.ones(2, dtype=torch.float64)
        f = bda.rollout(lambda y, x, b: (x * y).square().sum(), None, y, w, steps=2, lr=0.1)
        return f.square().sum()

    w = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    want = torch.autograd.grad(value(w), w)
    with torch.autograd.graph.save_on_cpu():
        assert torch.equal(torch.autograd.grad(value(w), w)[0], want[0])
    again = checkpoint.checkpoint(value, w, use_reentrant=False)
    assert torch.equal(torch.autograd.grad(again, w)[0], want[0])

    def lower(y: Tensor, x: Tensor, batch: Any) -> Tensor:
        return checkpoint.checkpoint(lambda y: (x * y).square().sum(), y, use_reentrant=False)

    with pytest.raises(RuntimeError, match=r"torch\.utils\.checkpoint"):
        bda.rollout(lower, None, torch.ones(2, dtype=torch.float64), w, steps=2, lr=0.1)


def test_hooks_can_be_forbidden() -> None:
    private.forbid_hooks("not here")
    try:
        with pytest.raises(RuntimeError, match="not here"), torch.autograd.graph.save_on_cpu():
            pass
        assert private.hooks_are_forbidden()
    finally:
        private.allow_hooks()
    with torch.autograd.graph.save_on_cpu(), surroundings():  # nothing to forbid: the user's hooks are there first
        assert private.has_saved_tensor_hooks()
    assert not private.hooks_are_forbidden(), "after an inner step no checkpoint can be used any more"


# vmap.


def test_vmap_over_flat_tensors() -> None:
    x, w = torch.randn(3, 4), torch.randn(3, 4)
    got = private.vmap_flat(lambda x, w: [x @ w, None, torch.zeros(2)], [x, w], 3, "error")
    want = torch.func.vmap(torch.dot)(x, w)
    assert torch.equal(got[0], want) and got[1] is None, "tasks are computed wrongly"
    assert got[2].shape == (3, 2), "what does not depend on the task lacks the task dimension"
    with pytest.raises(ZeroDivisionError):
        private.vmap_flat(lambda x: [1 / 0], [x], 3, "error")
    assert torch._C._functorch.maybe_current_level() is None, "after an error everything runs inside a vmap"


def test_vmap_knows_its_decompositions() -> None:
    x = torch.randn(3, 4, 5)
    (got,) = private.vmap_flat(lambda x: [torch.nn.functional.huber_loss(x, x + 2)], [x], 3, "error")
    assert got.shape == (3,)


# Modules.


def test_dictionaries_of_a_module() -> None:
    module = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1))
    assert all(isinstance(vars(module)[key], dict) for key in private.MODULE_DICTS), "modules cannot be given tensors"
    assert private.PARAMETERS in vars(module), "patched modules of `compat.higher` do not notice an assignment"
    assert private.own_parameters(module[1])["weight"] is module[1].weight
    assert private.own_buffers(module[0])["running_mean"] is module[0].running_mean
    assert private.own_children(module)["1"] is module[1]
    other = torch.zeros(1, 2)
    private.own_parameters(module[1])["weight"] = other  # no Parameter
    assert module[1].weight is other and module[1](torch.ones(1, 2)) == module[1].bias


def test_compiled_modules() -> None:
    module = nn.Linear(1, 1)
    assert private.compiled_original(module) is None
    assert private.compiled_original(torch.compile(module, backend="eager")) is module, "compiled modules are refused"
    module.compile(backend="eager")
    assert private.COMPILED_CALL in vars(module), "an inner loop calls the user's compiled module, with its parameters"


def test_own_tensors_of_a_module() -> None:
    module = nn.BatchNorm1d(2, affine=False)
    module.register_parameter("scale", nn.Parameter(torch.ones(1)))
    names = {"scale", "weight", "bias", "running_mean", "running_var", "num_batches_tracked"}
    assert set(private.own_tensors(module)) == names, "a compiled step does not notice another parameter"


def test_hooks_before_a_forward_pass() -> None:
    module = nn.Linear(1, 1)
    calls: list[str] = []
    module.register_forward_pre_hook(lambda module, inputs: calls.append("registered"))
    handle = module.register_forward_hook(lambda module, inputs, output: None)
    before = private.hook_numbers(module)
    handle.remove()
    module.register_forward_hook(lambda module, inputs, output: 2 * output)
    after = private.hook_numbers(module)
    assert list(map(len, before)) == [1, 1] and after != before, "a compiled step does not notice another hook"
    registered = private.pre_hooks(module)
    private.replace_pre_hooks(module, {-1: lambda module, inputs: calls.append("first"), **registered})
    module(torch.ones(1, 1))
    assert calls == ["first", "registered"], "checkpoints in sub-modules and moving spectral norms are not refused"
    assert len(registered) == 1, "a hook for the inner loop is left in the user's module"


def test_families_of_layers() -> None:
    for kind in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d):
        assert issubclass(kind, private.BatchNorm), "batch norms cannot be given a closed derivative"
    for kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d):
        assert issubclass(kind, private.Convolution), "convolutions cannot be given a closed derivative"
    for kind in (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d):
        assert issubclass(kind, private.ConvolutionTranspose), "transposed convolutions cannot be given one"


def test_parametrizations() -> None:
    parametrizations = nn.utils.parametrizations
    weight = parametrizations.weight_norm(nn.Linear(2, 2)).parametrizations.weight[0]
    assert isinstance(weight, private.WeightNorm) and weight.dim == 0, "weight_norm's second derivative is wrong"
    spectral = parametrizations.spectral_norm(nn.Linear(2, 2)).parametrizations.weight[0]
    assert isinstance(spectral, private.SpectralNorm), "spectral_norm's second derivative is wrong"


# The compiler.


def test_graphs_are_traced() -> None:
    graph = private.trace_graph(lambda x: [x.sin().cos()], [torch.ones(2)])
    operators = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert operators == [torch.ops.aten.sin.default, torch.ops.aten.cos.default], "`compile=True` falls back"
    assert private.schema(operators[0]).name == "aten::sin", "a compiled step cannot be divided"
    assert not private.schema(operators[0]).is_mutable and private.schema(len) is None
    assert private.schema(torch.ops.aten.view.default).returns[0].alias_info is not None


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # the compiler's own imports
def test_graphs_are_compiled() -> None:
    x = torch.randn(3)
    graph = private.trace_graph(lambda x: [x.exp() + torch.rand_like(x)], [x])
    compiled = private.compile_graph(graph, [x], {"fallback_random": True})
    torch.manual_seed(0)
    want = x.exp() + torch.rand_like(x)
    torch.manual_seed(0)
    torch.testing.assert_close(compiled(x)[0], want, msg="dropout of a compiled step is not that of an uncompiled one")


def test_a_trace_computes_nothing() -> None:
    ran = []
    private.trace_graph(lambda x: [ran.append(type(x)) or x.exp()], [torch.ones(2)], fake=True)
    assert ran and ran[0] is not Tensor, "functionalising a large step computes it once more"


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_the_cache_is_tagged() -> None:
    from torch._inductor.codecache import compiled_fx_graph_hash

    graph = private.trace_graph(lambda x: [x.exp()], [torch.ones(2)])
    keys = []
    for tag in ("one", "two", "one"):
        with private.tagged_cache(tag):
            keys.append(compiled_fx_graph_hash(graph, [torch.ones(2)], {}, [])[0])
    assert keys[0] == keys[2], "a program is compiled anew in every process"
    assert keys[0] != keys[1], "a program of other lowerings is taken from the cache"


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_the_tag_before_2_6(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._inductor.config as settings

    monkeypatch.setattr(torch.compiler, "config", None, raising=False)
    before = settings.save_config_portable()
    with private.tagged_cache("one"):
        assert settings.save_config_portable() != before, "a program of other lowerings is taken from the cache"
    assert settings.save_config_portable() == before


def test_compilation_is_announced() -> None:
    with private.announced_compilation():
        assert torch.compiler.is_compiling(), "models of `transformers` run uncompiled: their masks are read"
    assert not torch.compiler.is_compiling()


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_tables_of_operators() -> None:
    for table in private.operator_tables():
        assert len(table) > 100 and any(private.schema(operator) is not None for operator in table), "patched lowerings"


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_kernels_are_built_by_two_methods() -> None:
    methods = private.async_compile()
    assert list(inspect.signature(methods.cpp_pybinding).parameters)[1:] == ["argtypes", "source_code"], "slow: 1 file"
    assert list(inspect.signature(methods.wait).parameters)[1:] == ["scope"], "kernels are compiled one by one"


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_errors_of_the_toolchain(tmp_path: Path) -> None:
    assert not private.is_of_the_toolchain(ValueError())
    with pytest.raises(Exception) as caught:
        private.load_extension("this is no C++")
    assert private.is_of_the_toolchain(caught.value), "a processor that is taken for another one is not noticed"
    private.forget_instruction_sets()  # and this is what is done about it


def test_folder_of_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    assert private.cache_folder() == str(tmp_path), "what was measured is written somewhere else"


def test_products_by_onednn() -> None:
    if not private.has_onednn_linear():
        pytest.skip("this torch has no oneDNN")
    x, weight = torch.randn(5, 3), torch.randn(4, 3)
    torch.testing.assert_close(private.onednn_linear(x, weight), x @ weight.T)


def test_transforms_are_noticed() -> None:
    inside = []
    torch.func.vmap(lambda x: inside.append(private.inside_transform()) or x)(torch.ones(2))
    assert inside == [True] and not private.inside_transform(), "rollouts do not compose with torch.func"


def test_vmap_is_told_from_other_transforms() -> None:
    found: list[bool] = []

    def look(x: Tensor) -> Tensor:
        found.append(private.inside_vmap())
        return x.sum()

    look(torch.ones(2))
    torch.func.grad(look)(torch.ones(2))
    torch.func.jvp(look, (torch.ones(2),), (torch.ones(2),))
    torch.func.vmap(torch.func.grad(look))(torch.ones(2, 2))
    assert found == [False, False, False, True], "a module with padding is refused for no reason, or is wrong"


def test_dynamo_stays_outside() -> None:
    compiled = []

    @private.opaque
    def function(x: Tensor) -> Tensor:
        compiled.append(torch.compiler.is_dynamo_compiling())
        return x + 1

    assert torch.compile(lambda x: function(x) * 2, backend="eager")(torch.ones(1)) == 4
    assert compiled == [False], "torch.compile traces through the inner loop"


def test_dtypes_of_nodes() -> None:
    weight = torch.ones(3, 3, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        product = (weight @ weight).float()
    found = {dtype for node in nodes([product]) for dtype in private.node_dtypes(node)}
    assert found == {torch.float32, torch.bfloat16}, "`Differences` would choose a step for another precision"


def test_kinks() -> None:
    x = torch.randn(4, 4, requires_grad=True)
    kinked = {
        "Relu": x.relu(),
        "MaxPool2DWithIndices": nn.functional.max_pool2d(x[None], 2),
        "Elu": nn.functional.selu(x),
        "LinalgVectorNorm": torch.linalg.vector_norm(x, 1),
        "Dist": torch.dist(x, x + 1, 1),
        "Pdist": nn.functional.pdist(x, 1.0),
        "Norm": nn.functional.pairwise_distance(x, x + 1, p=1),
    }
    smooth = [nn.functional.elu(x), x.norm(), torch.dist(x, x + 1), nn.functional.pdist(x), x.tanh(), x.norm(p=3)]
    message = "`Differences` would let a kink pass, or refuse a smooth operation"
    for name, value in kinked.items():
        assert name in {private.kink(node) for node in nodes([value])}, message
    assert not any(private.kink(node) for node in nodes(smooth)), message


def test_every_name_has_a_canary() -> None:
    source = Path(private.__file__).read_text(encoding="utf-8")
    canaries = Path(__file__).read_text(encoding="utf-8")
    names = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef):
            names.append(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names += [target.id for target in targets if isinstance(target, ast.Name)]
    missing = [name for name in names if not name.startswith("_") and f"private.{name}" not in canaries]
    assert len(names) > 20 and not missing


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_compiled_program_is_entered_directly() -> None:
    """Otherwise small compiled steps take twice as long; where the layers around a program matter, it is not."""
    inputs = [torch.randn(4, 4), torch.randn(4, 4)]

    def enter(function: Any) -> tuple[Any, Any]:
        return private.call_and_enter(private.compile_graph(private.trace_graph(function, inputs), inputs, {}), inputs)

    result, entry = enter(lambda x, w: [(x.tanh() @ w).tanh(), x.sum()])
    assert entry is not None, "compiled programs are called through all layers of torch"
    torch.testing.assert_close(list(entry(list(inputs))), list(result), rtol=0, atol=0)
    result, entry = enter(lambda x, w: [x.tanh(), x.view(-1)])  # the layers make the view
    assert entry is None and result[1].data_ptr() == inputs[0].data_ptr()


def test_other_functions_are_called_as_they_are() -> None:
    assert private.call_and_enter(lambda x: [x], [torch.ones(1)]) == ([torch.ones(1)], None)
