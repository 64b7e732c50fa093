"""The few-shot example: its episodes, the gradients of its six methods, a run that is killed, and the tables."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import itertools
import json
import re
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import scripts
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

pytest.importorskip("matplotlib")
pytest.importorskip("PIL")
pytest.importorskip("tqdm")

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "examples" / "paper" / "few_shot.py"
RESULTS = sorted((ROOT / "examples" / "results").glob("few_shot_*.json"))
CHOICES = sorted((ROOT / "examples" / "results").glob("choice_few_shot_*.json"))


@pytest.fixture(scope="module")
def example() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "examples" / "paper"))
        yield importlib.import_module("few_shot")


@pytest.fixture
def settings(example: ModuleType) -> Any:
    return dataclasses.replace(example.SMOKE, ways=3, shots=2, tasks=3)


def tasks_of(example: ModuleType, settings: Any, count: int = 3) -> Any:
    """Tasks in float64."""
    tasks = example.draw(example.load("made", Path())["train"], count, settings, settings.queries, 0, rotate=True)
    return tasks._replace(support=tasks.support.double(), query=tasks.query.double())


def learner_of(example: ModuleType, settings: Any, method: Any) -> Any:
    torch.manual_seed(1)
    net = example.Conv4((1, 28, 28), (4, 4, 4, 4), settings.ways).double()
    return example.Learner(method, net, settings)


def run_of(example: ModuleType, name: str, data: dict[str, Tensor], out: Path) -> Any:
    """A run that has not begun."""
    args = type("Args", (), {"device": torch.device("cpu"), "out": out, "resume": False})
    return example.Run(name, example.METHODS[name], 1, data, example.SMOKE, args)


# --- episodes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rotate", [False, True])
def test_episodes(example: ModuleType, settings: Any, rotate: bool) -> None:
    images = torch.arange(5 * 7 * 4, dtype=torch.uint8).view(5, 7, 1, 2, 2)  # all images differ
    tasks = example.draw(images, 6, settings, 4, 3, rotate=rotate)
    assert tasks.support.shape == (6, 3 * 2, 1, 2, 2) and tasks.query.shape == (6, 3 * 4, 1, 2, 2)
    assert tasks.count == 6
    again = example.draw(images, 6, settings, 4, 3, rotate=rotate)
    assert all(torch.equal(one, other) for one, other in zip(tasks, again, strict=True))
    assert not torch.equal(tasks.support, example.draw(images, 6, settings, 4, 4, rotate=rotate).support)
    for task in range(6):
        labels = torch.cat((tasks.support_labels[task], tasks.query_labels[task]))
        assert labels.bincount().tolist() == [6, 6, 6]
        drawn = (torch.cat((tasks.support[task], tasks.query[task])) * 255).round().long()
        numbers = drawn.flatten(1).amin(1) // 4  # whatever the rotation: which of the 35 images
        turns = drawn.flatten(1).argmin(1)
        assert rotate or not turns.any()
        characters = {(int(label), int(n) // 7, int(t)) for label, n, t in zip(labels, numbers, turns, strict=True)}
        assert len(characters) == 3 == len({(n, t) for _, n, t in characters})  # a class is one character, one way up
        assert len({(int(n), int(t)) for n, t in zip(numbers, turns, strict=True)}) == 18  # no image twice


def test_the_methods_see_the_same_tasks_and_the_parts_are_disjoint(example: ModuleType, tmp_path: Path) -> None:
    data = example.load("made", Path())
    runs = [run_of(example, name, data, tmp_path) for name in ("maml", "bda")]
    for part in (example.TRAIN, example.VALIDATION, example.TEST):
        first, second = (run.tasks(part, 5, 2) for run in runs)
        assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    starts = [run.learner.net.backbone.state_dict() for run in runs]
    assert all(torch.equal(value, starts[1][name]) for name, value in starts[0].items())
    known = {part: {bytes(image.numpy()) for image in images.flatten(0, 1)} for part, images in data.items()}
    for part, name in ((example.VALIDATION, "val"), (example.TEST, "test")):
        tasks = runs[0].tasks(part, 0, 2)
        for image in torch.cat((tasks.support, tasks.query), 1).flatten(0, 1):
            assert bytes((image * 255).round().to(torch.uint8).numpy()) in known[name]


def test_omniglot_is_divided_at_random(example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = torch.arange(1623, dtype=torch.int32).view(-1, 1, 1, 1).expand(-1, 20, 2, 2)
    parts = dict(zip(("train", "val", "test"), numbers.split((1028, 172, 423)), strict=True))
    monkeypatch.setattr("_data.omniglot", lambda root: parts)
    found = example.load("omniglot", tmp_path)
    assert {part: tuple(images.shape) for part, images in found.items()} == {
        "train": (1100, 20, 1, 2, 2),
        "val": (100, 20, 1, 2, 2),
        "test": (423, 20, 1, 2, 2),
    }
    drawn = {part: set(images[:, 0, 0, 0, 0].tolist()) for part, images in found.items()}
    assert set.union(*drawn.values()) == set(range(1623))  # 1623 in all, so that none is in two parts
    assert len(drawn["test"] & set(range(1028))) > 200  # not the split of the loader, by alphabets
    again = example.load("omniglot", tmp_path)
    assert all(torch.equal(images, again[part]) for part, images in found.items())


# --- gradients --------------------------------------------------------------------------------------------------------


def by_hand(net: Any, task: Any, method: Any, rates: list[Tensor]) -> Tensor:
    """The upper loss of one task, without the library; `rates` are those of Meta-SGD."""
    names = [name for name, _ in net.named_parameters() if method.whole or name.startswith("head")]
    params = dict(net.named_parameters())
    y = {name: params[name] if method.whole else torch.zeros_like(params[name]) for name in names}
    support, support_labels, query, query_labels = task
    cut = method.steps - (method.last or method.steps)
    for k in range(1, method.steps + 1):
        y = {name: value if value.requires_grad else value.requires_grad_() for name, value in y.items()}
        now = {**params, **y}
        scores, query_scores = functional_call(net, now, support), functional_call(net, now, query)
        low, high = F.cross_entropy(scores, support_labels), F.cross_entropy(query_scores, query_labels)
        if method.joint:
            low = F.cross_entropy(torch.cat((scores, query_scores)), torch.cat((support_labels, query_labels)))
        g_low = torch.autograd.grad(low, list(y.values()), create_graph=True)
        g_high = torch.autograd.grad(high, list(y.values()), create_graph=True)
        alpha = method.alpha / k if method.decay else method.alpha
        each = rates or [method.lr] * len(names)
        y = {
            name: value - alpha * method.lr * up - (1 - alpha) * rate * down
            for (name, value), rate, down, up in zip(y.items(), each, g_low, g_high, strict=True)
        }
        if k <= cut:
            y = {name: value.detach() for name, value in y.items()}
    return F.cross_entropy(functional_call(net, {**params, **y}, query), query_labels)


@pytest.mark.parametrize("name", ["maml", "meta-sgd", "rhg", "t-rhg", "bda", "rhg-query"])
def test_gradient_is_that_of_a_loop_by_hand(example: ModuleType, settings: Any, name: str) -> None:
    method = dataclasses.replace(example.METHODS[name], steps=3)
    learner, tasks = learner_of(example, settings, method), tasks_of(example, settings)
    losses = learner.gradient(tasks)
    found = [p.grad.clone() for p in learner.variables]
    expected_losses = torch.stack(
        [by_hand(learner.net, task, method, learner.rates) for task in zip(*tasks, strict=True)]
    )
    expected = torch.autograd.grad(expected_losses.mean(), learner.variables)
    torch.testing.assert_close(losses, expected_losses.detach(), rtol=1e-9, atol=1e-12)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-10)
    assert max(float(g.abs().max()) for g in found) > 1e-4


def test_the_methods_differ(example: ModuleType, settings: Any) -> None:
    """If two agreed, the truncation or the aggregation would have no effect."""
    tasks, found = tasks_of(example, settings), {}
    for name in ("rhg", "t-rhg", "bda", "rhg-query"):
        learner = learner_of(example, settings, example.METHODS[name])
        learner.gradient(tasks)
        found[name] = torch.cat([p.grad.flatten() for p in learner.variables])
    for one, other in itertools.combinations(found, 2):
        assert (found[one] - found[other]).norm() > 1e-3 * found[one].norm()


def test_a_third_set_serves_the_lower_steps_alone(example: ModuleType, settings: Any, tmp_path: Path) -> None:
    """With the query set once more it is BDA; with other images the steps differ; without alpha it is RHG."""
    method = example.METHODS["bda-third"]
    tasks = tasks_of(example, settings)
    images, labels = (t.unflatten(1, (settings.ways, -1)) for t in (tasks.query, tasks.query_labels))
    twice = tasks._replace(
        query=images.repeat(1, 1, 2, 1, 1, 1).flatten(1, 2), query_labels=labels.repeat(1, 1, 2).flatten(1)
    )
    want = learner_of(example, settings, example.METHODS["bda"]).losses(tasks)
    torch.testing.assert_close(learner_of(example, settings, method).losses(twice), want, rtol=1e-10, atol=0)
    other = twice.query.unflatten(1, (settings.ways, 2, -1)).clone()
    other[:, :, 1] = other[:, :, 1].flip(0)
    moved = learner_of(example, settings, method).losses(twice._replace(query=other.flatten(1, 3)))
    plain = learner_of(example, settings, dataclasses.replace(method, alpha=0.0)).losses(twice)
    assert not torch.allclose(moved, want, rtol=1e-6)
    rhg = learner_of(example, settings, example.METHODS["rhg"]).losses(tasks)
    torch.testing.assert_close(plain, rhg, rtol=1e-10, atol=0)

    data = example.load("made", Path())
    first, second = (run_of(example, name, data, tmp_path) for name in ("bda", "bda-third"))
    mine, _ = second.tasks(example.TRAIN, 5, 2).halves(example.SMOKE.ways)
    assert all(torch.equal(a, b) for a, b in zip(first.tasks(example.TRAIN, 5, 2), mine, strict=True))


def test_reptile_moves_to_what_sgd_finds(example: ModuleType, settings: Any) -> None:
    method = example.METHODS["reptile"]
    learner, tasks = learner_of(example, settings, method), tasks_of(example, settings)
    learner.gradient(tasks)
    ends = []
    for support, support_labels, query, query_labels in zip(*tasks, strict=True):
        net = copy.deepcopy(learner.net)
        sgd = torch.optim.SGD(net.parameters(), lr=method.lr)
        images = torch.cat((support.view(3, 2, 1, 28, 28), query.view(3, 2, 1, 28, 28)), 1)
        labels = torch.cat((support_labels.view(3, 2), query_labels.view(3, 2)), 1)
        for step in range(method.steps):
            sgd.zero_grad()
            F.cross_entropy(net(images[:, step % 4]), labels[:, step % 4]).backward()
            sgd.step()
        ends.append([p.detach() for p in net.parameters()])
    for p, *found in zip(learner.net.parameters(), *ends, strict=True):
        torch.testing.assert_close(p.grad, p.detach() - torch.stack(found).mean(0), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", ["maml", "meta-sgd", "reptile", "rhg", "t-rhg", "bda"])
def test_an_upper_iteration_can_be_divided(example: ModuleType, settings: Any, name: str) -> None:
    """The gradient of four tasks is the mean of those of two and two: what several processes would average."""
    learner, tasks = learner_of(example, settings, example.METHODS[name]), tasks_of(example, settings, 4)
    learner.gradient(tasks)
    whole = [p.grad.clone() for p in learner.variables]
    halves = []
    for start in (0, 2):
        learner.gradient(tasks.part(start, start + 2))
        halves.append([p.grad.clone() for p in learner.variables])
    for one, first, second in zip(whole, *halves, strict=True):
        torch.testing.assert_close(one, (first + second) / 2, rtol=1e-8, atol=1e-11)


def test_evaluation_adapts_to_the_support_set_alone(example: ModuleType, settings: Any) -> None:
    """With the same backbone BDA predicts what RHG does, and a task's result does not depend on its neighbours."""
    tasks = tasks_of(example, settings)
    same = dataclasses.replace(example.METHODS["bda"], alpha=0.0)
    found = [learner_of(example, settings, method).evaluate(tasks) for method in (example.METHODS["bda"], same)]
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])
    learner = learner_of(example, settings, example.METHODS["bda"])
    scores = learner.predict(tasks.support, tasks.support_labels, tasks.query)
    alone = learner.predict(tasks.support[1:2], tasks.support_labels[1:2], tasks.query[1:2])
    torch.testing.assert_close(scores[1:2], alone)
    losses, accuracies = learner.evaluate(tasks)
    for task in range(3):
        expected = F.cross_entropy(scores[task], tasks.query_labels[task])
        assert losses[task].item() == pytest.approx(expected.item())
        right = (scores[task].argmax(1) == tasks.query_labels[task]).double().mean()
        assert accuracies[task].item() == pytest.approx(right.item())


@pytest.mark.parametrize("name", ["maml", "bda"])
def test_coloured_images(example: ModuleType, settings: Any, name: str) -> None:
    images = torch.randint(0, 256, (4, 6, 3, 32, 32), dtype=torch.uint8)
    tasks = example.draw(images, 2, settings, 2, 0, rotate=False)
    learner = example.Learner(example.METHODS[name], example.Conv4((3, 32, 32), (4, 4, 4, 4), 3), settings)
    losses = learner.iterate(tasks, 0)
    assert losses.shape == (2,) and losses.isfinite().all()
    assert learner.predict(tasks.support, tasks.support_labels, tasks.query).shape == (2, 6, 3)


@pytest.mark.parametrize("name", ["maml", "meta-sgd", "reptile", "rhg", "t-rhg", "bda"])
def test_every_method_learns(example: ModuleType, name: str) -> None:
    settings = dataclasses.replace(example.SMOKE, iterations=25, tasks=4, upper_lr=0.01, filters=(8, 8, 8, 8))
    torch.manual_seed(0)
    data = example.load("made", Path())
    learner = example.Learner(example.METHODS[name], example.Conv4((1, 28, 28), settings.filters, 5), settings)
    held = example.draw(data["train"], 10, settings, 2, 10**6, rotate=False)
    before = learner.evaluate(held)[0].mean()
    for iteration in range(25):
        learner.iterate(example.draw(data["train"], 4, settings, 2, iteration, rotate=False), iteration)
    assert learner.evaluate(held)[0].mean() < 0.85 * before


# --- the script -------------------------------------------------------------------------------------------------------


def test_a_killed_run_goes_on_and_ends_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    options = ("--smoke", "--methods", "meta-sgd", "reptile", "bda", "--seeds", "3", "4")
    scripts.kill_at("few_shot", killed, "reptile-4.pt", *options)
    paths = sorted(path.name for path in (killed / "checkpoints").iterdir())
    assert paths == ["meta-sgd-3.pt", "meta-sgd-4.pt", "reptile-3.pt", "reptile-4.pt"]  # under way; others not begun
    assert not (killed / "made_5way_1shot.json").exists()

    scripts.run("few_shot", "--out", whole, *options)
    shown = capsys.readouterr().out
    scripts.run("few_shot", "--out", killed, *options, "--resume")
    assert "100%" in capsys.readouterr().err  # the progress bar
    found = [json.loads((out / "made_5way_1shot.json").read_text("utf-8")) for out in (whole, killed)]
    assert scripts.without_times(found[0]) == scripts.without_times(found[1])
    for path in sorted((whole / "checkpoints").iterdir()):
        one, other = (torch.load(out / "checkpoints" / path.name)["state"] for out in (whole, killed))
        assert one["net"].keys() == other["net"].keys()
        assert all(torch.equal(value, other["net"][key]) for key, value in one["net"].items())
        assert all(torch.equal(*pair) for pair in zip(one["rates"], other["rates"], strict=True))

    assert re.search(r"^\| BDA \| \d+\.\d\d ± \d+\.\d\d \|", shown, re.M) and "| MAML" not in shown
    for out in (whole, killed):
        png = (out / "made_5way_1shot.png").read_bytes()
        assert png.startswith(b"\x89PNG\r\n") and len(png) > 20_000
    assert set(found[0]["methods"]) == {"meta-sgd", "reptile", "bda"}
    assert [len(curve) for curve in found[0]["methods"]["bda"]["curves"]] == [2, 2]


def test_missing_data_says_where_to_get_it(
    example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    monkeypatch.setattr(sys, "argv", ["few_shot.py", "--out", str(out), "--data", str(tmp_path / "nothing")])
    with pytest.raises(SystemExit, match=r"(?s)omniglot is not there.*_data.py omniglot"):
        example.main()
    assert not out.exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--methods", "anil"], "invalid choice: 'anil'"),
        (["--ways", "1"], "--ways must be at least 2"),
        (["--dataset", "made"], "invalid choice: 'made'"),
    ],
)
def test_bad_options_are_refused(
    example: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    message: str,
) -> None:
    monkeypatch.setattr(sys, "argv", ["few_shot.py", *options])
    with pytest.raises(SystemExit):
        example.main()
    assert message in capsys.readouterr().err


# --- the choice of network and rates ----------------------------------------------------------------------------------


def test_a_choice_reaches_the_methods(example: ModuleType) -> None:
    choice = example.Choice((4, 4), 0.5, head_lr=0.2, alpha=0.3, maml_lr=0.6, reptile_lr=0.7)
    rates = {name: (method.lr, method.alpha) for name, method in choice.methods().items()}
    whole = {"maml": (0.6, 0.0), "meta-sgd": (0.6, 0.0), "reptile": (0.7, 0.0)}
    plain, aggregated = dict.fromkeys(("rhg", "t-rhg", "rhg-query"), (0.2, 0.0)), ("bda", "bda-third")
    assert rates == {**whole, **plain, **dict.fromkeys(aggregated, (0.2, 0.3))}
    settings = choice.settings(ways=20)
    assert (settings.filters, settings.upper_lr, settings.ways) == ((4, 4), 0.5, 20)
    assert example.Choice().methods() == example.METHODS and example.Choice().settings() == example.Settings()


def test_an_alpha_may_be_given(example: ModuleType, tmp_path: Path) -> None:
    scripts.run("few_shot", "--smoke", "--methods", "rhg", "bda", "--alpha", "0.7", "--out", tmp_path)
    found = json.loads(next(tmp_path.glob("*.json")).read_text())["methods"]
    assert {name: method["method"]["alpha"] for name, method in found.items()} == {"rhg": 0.0, "bda": 0.7}


def test_choice_smoke(example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--smoke", "--network-iterations", "1", "--ways", "3", "--out", tmp_path, "--seeds", "5", "6")
    scripts.run("few_shot_choice", *options)
    results = json.loads((tmp_path / "made_3way_1shot.json").read_text())
    choice = importlib.import_module("few_shot_choice")
    assert choice.table(results) in capsys.readouterr().out
    assert [len(stage) for stage in results["stages"]] == [3, 3, 4, 3, 3]
    assert [{row["iterations"] for row in stage} for stage in results["stages"]] == [{1}, *[{2}] * 4]
    for stage in results["stages"]:
        best = max(stage, key=lambda row: statistics.mean(row["validation"]))
        assert all(results["chosen"][key] == value for key, value in best["change"].items())
    tried = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.pt")}
    assert len(tried) == 2 * (3 + 3 + 4 + 3 + 3)
    scripts.run("few_shot_choice", *options, "--resume")
    assert scripts.without_times(json.loads((tmp_path / "made_3way_1shot.json").read_text())) == scripts.without_times(
        results
    )
    scripts.run("few_shot_choice", *options, "--alphas", "0.05", "2", "--resume")  # two more runs, of BDA
    again = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.pt")}
    assert again.items() >= tried.items() and {path.stem for path in again.keys() - tried.keys()} == {"bda-5", "bda-6"}


@pytest.mark.parametrize("path", CHOICES, ids=lambda path: path.stem)
def test_the_settings_are_those_that_were_chosen(example: ModuleType, path: Path) -> None:
    results = json.loads(path.read_text())
    sizes = results["settings"]["dataset"], results["settings"]["ways"]
    chosen = example.Choice(**{**results["chosen"], "filters": tuple(results["chosen"]["filters"])})
    assert example.CHOSEN[sizes] == chosen
    for run in [json.loads(path.read_text()) for path in RESULTS]:
        if (run["settings"]["dataset"], run["settings"]["ways"]) == sizes:
            assert (tuple(run["settings"]["filters"]), run["settings"]["upper_lr"]) == (chosen.filters, chosen.upper_lr)
            for name, mine in run["methods"].items():
                assert mine["method"] == dataclasses.asdict(chosen.methods()[name])
                assert not set(mine["seeds"]) & set(results["settings"]["seeds"])


# --- results ----------------------------------------------------------------------------------------------------------


def test_upper_iterations_until(example: ModuleType) -> None:
    curve = [[10, 1.0, 0.3], [20, 0.9, 0.5], [30, 0.8, 0.4], [40, 0.7, 0.6]]
    assert [example.until(curve, target) for target in (0.2, 0.45, 0.55, 0.7)] == [10, 20, 40, None]


@pytest.mark.parametrize(("dataset", "paper"), [("omniglot", ["98.70", "98.60"]), ("mini_imagenet", ["", "48.89"])])
def test_table_has_the_papers_numbers_where_there_are_any(example: ModuleType, dataset: str, paper: list[str]) -> None:
    report = importlib.import_module("_few_shot_report")
    mine = {"accuracy": [0.5], "interval": [0.1], "until": [None], "seconds": {"cpu": [1.0]}}
    methods = {name: {"method": {"title": name}, **mine} for name in ("maml", "rhg")}
    found = {"settings": {"dataset": dataset, "ways": 5, "shots": 1}, "target": 0.9, "methods": methods}
    heads, _, *rows = [[cell.strip() for cell in line.split("|")] for line in report.table(found).splitlines()]
    assert [row[heads.index("paper, %")] for row in rows] == paper
    found["settings"]["dataset"] = "cifar_fs"
    assert "paper" not in report.table(found)


def test_curves_of_several_runs(example: ModuleType) -> None:
    """The legend has every method once, in whichever panel it is."""
    report = importlib.import_module("_few_shot_report")
    curves = [[[1, 0.5, 0.5], [2, 0.25, 0.75]]]
    methods = {
        name: {"method": dataclasses.asdict(method), "curves": curves} for name, method in example.METHODS.items()
    }
    settings = {"dataset": "omniglot", "ways": 5, "shots": 1}
    runs = [{"settings": settings, "methods": {name: methods[name]}} for name in ("rhg", "bda", "maml", "bda")]
    fig = report.curves(runs)
    assert [text.get_text() for text in fig.legends[0].get_texts()] == ["RHG", "BDA", "MAML"]
    assert [len(panel.lines) for panel in fig.axes] == [1, 1, 1, 1, 0, 0]


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_the_recorded_runs_had_one_budget(example: ModuleType, path: Path) -> None:
    found = json.loads(path.read_text())
    assert found["settings"]["test_episodes"] == 600
    counts = {curve[-1][0] for method in found["methods"].values() for curve in method["curves"]}
    assert counts == {found["settings"]["iterations"]}  # the same budget for all


def recorded(name: str) -> tuple[dict[str, tuple[float, float]], dict[str, Any]]:
    """The leads over RHG in points, and the methods of a record."""
    methods = json.loads((ROOT / "examples" / "results" / f"{name}.json").read_text())["methods"]
    over_seeds = importlib.import_module("_few_shot_report").over_seeds
    leads = {name: over_seeds(mine["lead"]) for name, mine in methods.items() if name != "rhg"}
    return {name: (round(100 * lead, 2), round(100 * interval, 2)) for name, (lead, interval) in leads.items()}, methods


def test_the_page_says_what_was_recorded_of_omniglot(example: ModuleType) -> None:
    leads, methods = recorded("few_shot_omniglot_5way_1shot")
    assert leads["bda"] == (0.39, 0.08) and abs(leads["t-rhg"][0]) < leads["t-rhg"][1]
    assert (leads["bda-third"], leads["rhg-query"]) == ((0.37, 0.07), (0.43, 0.08))
    assert all(lead > interval for lead, interval in methods["bda"]["lead"])  # ahead in each seed
    losses = [[curve[-1][1] for curve in methods[name]["curves"]] for name in ("rhg", "bda")]
    assert all(rhg < bda for rhg, bda in zip(*losses, strict=True))
    leads, _ = recorded("few_shot_omniglot_20way_1shot")
    assert leads["bda"] == (0.25, 0.09) and abs(leads["t-rhg"][0]) < leads["t-rhg"][1]
    for ways, best in ((5, 2.0), (20, 1.0)):  # validation accuracy grows with c up to there
        choice = json.loads(
            (ROOT / "examples" / "results" / f"choice_few_shot_omniglot_{ways}way_1shot.json").read_text()
        )
        tried = {row["change"]["alpha"]: row["validation"][0] for row in choice["stages"][2]}
        grown = [tried[c] for c in sorted(tried) if c <= best]
        assert grown == sorted(set(grown)) and grown[-1] == max(tried.values())
    assert recorded("few_shot_omniglot_5way_5shot")[0]["bda"] == (0.09, 0.07)
    assert recorded("few_shot_omniglot_20way_5shot")[0]["bda"] == (0.04, 0.03)


@pytest.mark.parametrize("path", [path for path in RESULTS if "omniglot" in path.stem], ids=lambda path: path.stem)
def test_the_page_says_how_the_others_compare_with_rhg(example: ModuleType, path: Path) -> None:
    leads, _ = recorded(path.stem)
    assert abs(leads["t-rhg"][0]) <= 0.05
    assert all(leads[name][0] < -leads[name][1] for name in ("maml", "meta-sgd", "reptile"))


def test_the_page_says_what_was_recorded_of_cifar_fs(example: ModuleType) -> None:
    leads, _ = recorded("few_shot_cifar_fs_5way_1shot")
    assert leads["bda"] == (-0.95, 0.52)
    choice = json.loads((ROOT / "examples" / "results" / "choice_few_shot_cifar_fs_5way_1shot.json").read_text())
    tried = {row["change"]["alpha"]: round(100 * row["validation"][0], 1) for row in choice["stages"][2]}
    assert (tried[0.2], tried[0.5]) == (43.4, 45.7)
    assert round(100 * max(row["validation"][0] for row in choice["stages"][1]), 1) == 50.9
    leads, methods = recorded("control_few_shot_cifar_fs_5way_1shot")
    assert (leads["bda"], leads["bda-third"]) == ((-5.91, 0.58), (0.87, 0.54))
    assert methods["bda"]["method"]["alpha"] == methods["bda-third"]["method"]["alpha"] == 0.5
