"""A tensor of several elements as a setting: it broadcasts to the parameters of its group."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from problems import TIGHT, exact, mlp, numbers
from torch import Tensor, nn

import bda_optim as bda

pytestmark = pytest.mark.usefixtures("doubles")

SETTINGS = ["lr", "upper_lr", "alpha", "momentum", "weight_decay"]
X, Y = numbers(6, 3), numbers(6, 2, seed=2)


def lower(net: Any, hyper: Any = None, batch: Any = None) -> Tensor:
    return (net(X) - Y).square().mean()


def upper(net: Any, hyper: Any = None, batch: Any = None) -> Tensor:
    return (net(X) + Y).square().mean()


def settings(name: str, value: Any) -> dict[str, Any]:
    return {"lr": 0.2, "upper_lr": 0.1, "alpha": 0.3, "momentum": 0.5, "weight_decay": 0.1, name: value}


def of_weights(model: nn.Module) -> list[dict[str, Any]]:
    """Each weight in a group of its own, with a rate per row; both biases in one."""
    return [{"params": [model[0].weight]}, {"params": [model[2].weight]}, {"params": [model[0].bias, model[2].bias]}]


@exact
@pytest.mark.parametrize("name", SETTINGS)
def test_a_tensor_that_broadcasts_is_the_list_of_what_it_broadcasts_to(name: str, adjoint: Any) -> None:
    """The same iterates, and the gradient of the list's entries summed over what the tensor was spread to."""
    model = mlp()
    rows = (0.1 + 0.1 * torch.rand(4, 1)).requires_grad_()
    results = []
    for spread in (False, True):
        value = [rows.expand(4, 3)] if spread else rows
        groups = [{"params": [model[0].weight], name: value}, {"params": [*model[2].parameters(), model[0].bias]}]
        inner = bda.BDAInnerOptimizer(groups, **settings(name, 0.15))
        fmodel = inner.unroll(model, lower, upper, steps=3, adjoint=adjoint)
        results.append((*fmodel.params.values(), *torch.autograd.grad(upper(fmodel), rows)))
    torch.testing.assert_close(*results, **TIGHT)


@pytest.mark.parametrize("name", SETTINGS)
def test_the_gradient_is_that_of_finite_differences(name: str) -> None:
    model = mlp()

    def value(row: Tensor) -> Tensor:
        groups = [{"params": [p for p in model.parameters() if p.dim() == 2][:1], name: row}]
        inner = bda.BDAInnerOptimizer(groups, **settings(name, 0.15))
        return upper(inner.unroll(model, lower, upper, steps=3))

    assert torch.autograd.gradcheck(value, (0.1 + 0.1 * torch.rand(3)).requires_grad_())


def test_an_override_broadcasts_to_every_group() -> None:
    model = mlp()
    each = torch.tensor([[0.1], [0.2], [0.3], [0.4]], requires_grad=True)
    inner = bda.BDAInnerOptimizer([model[0].weight], lr=0.1)
    with bda.innerloop_ctx(model, inner, override={"lr": each}) as (fmodel, diffopt):
        (new,) = diffopt.step(lower(fmodel))
    (grad,) = torch.autograd.grad(lower(model), [model[0].weight])
    torch.testing.assert_close(new, model[0].weight - each * grad, **TIGHT)
    inner = bda.BDAInnerOptimizer(of_weights(model), lr=0.1)
    with bda.innerloop_ctx(model, inner, override={"lr": [each, torch.full((2, 4), 0.1), 0.1]}) as (fmodel, diffopt):
        diffopt.step(lower(fmodel))
        torch.autograd.grad(upper(fmodel), each)


def test_tasks_and_the_step_in_place() -> None:
    model = mlp()
    rates = torch.rand(4, 1)
    inner = bda.BDAInnerOptimizer([{"params": [model[0].weight], "lr": rates}], lr=0.1, rule=torch.optim.Adam)

    def task(net: Any, hyper: Any, batch: Tensor) -> Tensor:
        return (net(X) - batch).square().mean()

    targets = numbers(3, 6, 2)
    together = inner.unroll(model, task, steps=2, batches=[targets] * 2, tasks=3)
    for i in range(3):
        alone = inner.unroll(model, task, steps=2, batches=[targets[i]] * 2)
        torch.testing.assert_close(together.params["0.weight"][i], alone.params["0.weight"], **TIGHT)
    for _ in range(2):
        inner.zero_grad()
        task(model, None, targets[2]).backward()
        inner.step()
    torch.testing.assert_close(model[0].weight.detach(), alone.params["0.weight"].detach(), **TIGHT)


def test_a_complex_parameter() -> None:
    start = torch.complex(numbers(2, 3), numbers(2, 3, seed=3))
    rate = torch.rand(3)

    def loss(y: Tensor, x: Any, batch: Any) -> Tensor:
        return (y - 1).abs().square().sum()

    y = bda.rollout(loss, None, start, steps=1, lr=rate)
    torch.testing.assert_close(y, start - rate * 2 * (start - 1), **TIGHT)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"lr": torch.ones(4)}, r"`lr` as a tensor must have one element, or broadcast .*\(4,\) for .*\(2, 3\)"),
        ({"lr": torch.ones(1, 2, 3)}, r"`lr` as a tensor must have one element, or broadcast .*\(1, 2, 3\)"),
        ({"upper_lr": torch.ones(3, 1)}, r"`upper_lr` as a tensor must have one element"),
        ({"rule": torch.optim.Adam, "eps": torch.ones(3)}, "`eps` of Adam must as a tensor .* have one element"),
        ({"lr": torch.ones(3), "prox": bda.prox.l2_ball(1.0)}, "one rate per element"),
    ],
    ids=str,
)
def test_what_does_not_broadcast_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        bda.BDAInnerOptimizer([nn.Parameter(torch.ones(2, 3))], **{"lr": 0.1, **options})
