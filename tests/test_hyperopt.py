"""Tuning a training loop: the rollout is the plain loop, its hypergradient is right, the searches keep to the rules."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytest.importorskip("matplotlib")
pytest.importorskip("sklearn")
pytest.importorskip("tqdm")

import _hyperopt_report as report
import hyperopt
import scripts
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
MIDDLE = torch.full((hyperopt.SIZE,), 0.5)


@pytest.fixture(scope="module")
def task() -> hyperopt.Task:
    return hyperopt.Task(hyperopt.load(None), seed=0, steps=4)


def test_the_data_are_divided(task: hyperopt.Task) -> None:
    sizes = {name: len(part.labels) for name, part in task.data.items()}
    assert sizes == {"train": 600, "val": 600, "test": 597}
    first, second = (hyperopt.batches(task.data["train"], seed, 8) for seed in (0, 1))
    assert len(first) == 8 and first[0].images.shape == (100, 1, 28, 28)
    assert not torch.equal(first[0].labels, second[0].labels)
    assert torch.cat([batch.labels for batch in first[:6]]).bincount().equal(task.data["train"].labels.bincount())


def test_the_rollout_is_the_plain_loop(task: hyperopt.Task) -> None:
    point = torch.rand(hyperopt.SIZE, generator=torch.Generator().manual_seed(0))
    loss, _ = task.plain(point)
    assert task.differentiable(point).item() == pytest.approx(loss, rel=1e-5)


def test_hypergradient_against_differences() -> None:
    """In float64, in all 19 directions; with tanh, since differences cross the kinks of ReLU."""
    data = {
        name: part._replace(images=part.images[:100].double(), labels=part.labels[:100])
        for name, part in hyperopt.load(None).items()
    }
    run = hyperopt.batches(data["train"], 0, 3)

    def loss(point: Tensor) -> Tensor:
        net = hyperopt.network(0).double()
        net[1] = net[3] = torch.nn.Tanh()
        model = hyperopt.train(net, run, hyperopt.settings_of(point))
        return hyperopt.validation_loss(model, data)

    point = MIDDLE.double().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(point), point)
    for number, step in enumerate(1e-4 * torch.eye(hyperopt.SIZE, dtype=torch.float64)):
        with torch.no_grad():
            slope = (loss(point + step) - loss(point - step)).item() / 2e-4
        assert slope == pytest.approx(gradient[number].item(), rel=1e-5, abs=1e-9)


def test_the_box() -> None:
    low, high = (hyperopt.settings_of(torch.full((hyperopt.SIZE,), end)) for end in (0.0, 1.0))
    for name, (bottom, top, _) in hyperopt.BOX.items():
        ends = [torch.as_tensor(getattr(settings, name)).flatten() for settings in (low, high)]
        assert torch.allclose(ends[0], torch.tensor(bottom)) and torch.allclose(ends[1], torch.tensor(top))
    assert len(low.lr) == len(list(hyperopt.network(0).parameters()))
    assert hyperopt.settings_of(MIDDLE).lr[0].item() == pytest.approx(10**-1.5)


class Valley:
    """A task without training: the loss is given by a function, and differentiable in the point."""

    def __init__(self, loss: Callable[[Tensor], Tensor]) -> None:
        self.differentiable = loss


def test_a_bad_point_is_left_with_half_of_the_rate() -> None:
    """The loss falls towards 1 in every direction, and is not finite, or ln 10, from 0.6 on."""
    for bad in (math.nan, math.log(10)):
        valley = Valley(lambda point, bad=bad: (1 - point).mean() if point.max() < 0.6 else 0 * point.mean() + bad)
        found = list(itertools.islice(hyperopt.hypergradient(valley), 12))
        points = [point.max().item() for point, _ in found]
        assert points[0] == 0.5 and sum(point >= 0.6 for point in points) >= 1
        good = [loss for point, loss in found if point.max() < 0.6]
        assert good == sorted(good, reverse=True) or good[-1] < 0.45


def test_random_search_begins_in_the_middle(task: hyperopt.Task) -> None:
    points = [point for point, _ in itertools.islice(hyperopt.random(task), 3)]
    assert torch.equal(points[0], MIDDLE) and not torch.equal(points[1], points[2])


def test_tpe_begins_in_the_middle(task: hyperopt.Task) -> None:
    pytest.importorskip("optuna", reason="TPE is Optuna's")
    points = [point for point, _ in itertools.islice(hyperopt.tpe(task), 3)]
    assert torch.equal(points[0], MIDDLE) and not torch.equal(points[1], points[2])


def test_thinned() -> None:
    assert hyperopt.thinned([[0, 3], [1, 3], [2, 2], [3, 2], [4, 2]]) == [[0, 3], [2, 2], [4, 2]]


def test_smoke_without_optuna(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    results = scripts.results("hyperopt", tmp_path, "--smoke")
    shown = capsys.readouterr().out
    assert "TPE is left out: Optuna is not installed" in shown and report.table(results) in shown
    assert [run["method"] for run in results["runs"]] == ["hypergradient", "random"]
    assert all(run["curve"][0][1] >= run["best"] == run["curve"][-1][1] for run in results["runs"])
    assert (tmp_path / "hyperopt.png").read_bytes().startswith(b"\x89PNG\r\n")
