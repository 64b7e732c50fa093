"""The lasso with a learned strength per feature: problems, rates and readings are right, and the support comes out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("sklearn")

import lasso
import scripts
from _run import Checkpoint
from sklearn.linear_model import Lasso
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
SHORT = {"steps": 30, "iterations": 60}
FEATURES = 40


@pytest.fixture(scope="module")
def problem() -> lasso.Problem:
    return lasso.synthetic(0, FEATURES)


@pytest.fixture(scope="module")
def paths(problem: lasso.Problem, tmp_path_factory: pytest.TempPathFactory) -> dict[str, lasso.Path]:
    folder = tmp_path_factory.mktemp("lasso")
    return {
        method: lasso.learn(problem, method, Checkpoint(folder / method, {}, resume=False), **SHORT)
        for method in lasso.METHODS
    }


def weighted_lasso(data: lasso.Data, strengths: Tensor) -> Tensor:
    """The minimiser of the lower level by coordinate descent: strengths become scales of the columns."""
    inputs, targets = data
    model = Lasso(alpha=1.0, fit_intercept=False, tol=1e-10, max_iter=100_000)
    return torch.tensor(model.fit((inputs / strengths).numpy(), targets.numpy()).coef_) / strengths


# --- the parts --------------------------------------------------------------------------------------------------------


def test_the_synthetic_problem(problem: lasso.Problem) -> None:
    assert [len(targets) for _, targets in problem[:3]] == [100, 100, 1000]
    assert problem.relevant.sum() == lasso.RELEVANT and len(problem.names) == FEATURES
    inputs, targets = problem.test
    correlation = torch.corrcoef(inputs.T)
    assert correlation.diagonal(1).mean().item() == pytest.approx(lasso.CORRELATION, abs=0.05)
    assert correlation.diagonal(2).mean().item() == pytest.approx(lasso.CORRELATION**2, abs=0.05)
    inputs = inputs[:, problem.relevant]
    coefficients = torch.linalg.lstsq(inputs, targets[:, None]).solution[:, 0]
    assert (coefficients.abs() > 0.4).all() and (coefficients.abs() < 2.1).all()
    assert (inputs @ coefficients - targets).std().item() == pytest.approx(lasso.NOISE, rel=0.1)
    again, other = lasso.synthetic(0, FEATURES), lasso.synthetic(1, FEATURES)
    assert torch.equal(again.test[0], problem.test[0]) and not torch.equal(other.test[0], problem.test[0])


def test_the_diabetes_problem() -> None:
    found = lasso.diabetes(0)
    assert [len(targets) for _, targets in found[:3]] == [150, 150, 142] and found.relevant is None
    assert list(found.names[:3]) == ["age", "sex", "bmi"]
    inputs, targets = found.both()
    assert torch.allclose(inputs.mean(0), torch.zeros(10, dtype=torch.float64), atol=1e-12)
    assert torch.allclose(inputs.std(0), torch.ones(10, dtype=torch.float64))
    assert abs(targets.mean()) < 1e-12 and targets.std().item() == pytest.approx(1)
    assert found.test[0].mean(0).abs().max() > 0.01  # the test data took no part in it
    rows = {tuple(row) for inputs, _ in found[:3] for row in inputs.tolist()}
    assert len(rows) == 442  # every patient once
    assert not torch.equal(lasso.diabetes(1).test[0], found.test[0])


def test_rate_and_strongest(problem: lasso.Problem) -> None:
    inputs, targets = problem.train
    curvature = torch.linalg.eigvalsh(inputs.T @ inputs / len(targets)).max().item()
    assert lasso.rate(problem.train) == pytest.approx(1 / curvature, rel=1e-9)
    strength = torch.full((FEATURES,), lasso.strongest(problem.train), dtype=torch.float64)
    assert (weighted_lasso(problem.train, 1.001 * strength) == 0).all()
    assert (weighted_lasso(problem.train, 0.99 * strength) != 0).sum() == 1


def test_readings(problem: lasso.Problem) -> None:
    y = problem.relevant.double()
    irrelevant = int(problem.relevant.int().argmin())
    y[irrelevant] = -1.0
    y[problem.relevant.nonzero()[:2]] = 0.0
    assert lasso.found(problem, y) == {"kept": 9, "precision": 8 / 9, "recall": 0.8}
    assert lasso.found(problem, torch.zeros_like(y)) == {"kept": 0, "precision": 0.0, "recall": 0.0}
    assert lasso.found(lasso.diabetes(0), torch.eye(10)[2])["support"] == ["bmi"]
    inputs, targets = problem.test
    assert lasso.error(y, problem.test) == pytest.approx((inputs @ y - targets).square().mean().item())
    assert lasso.refitted(problem, problem.relevant.double()) == pytest.approx(lasso.NOISE**2, rel=0.15)


def test_the_table() -> None:
    head = {"problem": "p", "method": "m", "error": 0.5, "kept": 3}
    runs = [{**head, "seed": 0}, {**head, "seed": 1, "error": 0.7, "kept": 5}, {**head, "method": "n", "seed": 0}]
    runs += [{**head, "problem": "q", "seed": 0, "precision": 1.0}]
    assert lasso.table(runs, "p").splitlines() == [
        "| | test error | features kept |",
        "|---|---:|---:|",
        "| m | 0.600 ± 0.141 | 4.0 ± 1.4 |",
        "| n | 0.500 | 3.0 |",
    ]


# --- what is learned --------------------------------------------------------------------------------------------------


def test_the_support_is_recovered(problem: lasso.Problem, paths: dict[str, lasso.Path]) -> None:
    reports = {method: lasso.judge(problem, path.point[-1]) for method, path in paths.items()}
    cv, _ = lasso.cross_validated(problem)
    reports["LassoCV"] = lasso.judge(problem, cv)
    assert all(report["recall"] == 1 for report in reports.values())
    for method in ("BDA", "prox"):
        assert reports[method]["precision"] > 0.75
        assert reports[method]["refitted_error"] < reports["LassoCV"]["refitted_error"]
    assert reports["subgradient"]["precision"] < 0.6 and reports["LassoCV"]["precision"] < 0.6
    # With alpha > 0, y_K has no zeros, and neither has it after subgradient steps.
    assert (paths["BDA"].last != 0).all() and (paths["subgradient"].last != 0).all()
    assert torch.equal(paths["prox"].last != 0, paths["prox"].point[-1] != 0)


def test_the_validation_loss_falls(problem: lasso.Problem, paths: dict[str, lasso.Path]) -> None:
    for path in paths.values():
        first, last = (lasso.error(point, problem.validation) for point in (path.point[0], path.point[-1]))
        assert last < 0.8 * first


def test_subgradients_solve_the_same_lower_problem(problem: lasso.Problem, paths: dict[str, lasso.Path]) -> None:
    solution = weighted_lasso(problem.train, paths["subgradient"].x[0].exp())
    assert (paths["subgradient"].point[0] - solution).abs().max() < 0.15


@pytest.mark.parametrize("method", ["BDA", "prox"])
def test_the_reading_is_close_to_the_lower_solution(
    problem: lasso.Problem, paths: dict[str, lasso.Path], method: str
) -> None:
    path = paths[method]
    solution = weighted_lasso(problem.train, path.x[-1].exp())
    assert (path.point[-1] - solution).abs().max() < 0.02
    assert torch.equal(path.point[-1] != 0, solution != 0)


def test_strengths_of_relevant_features_fall(problem: lasso.Problem, paths: dict[str, lasso.Path]) -> None:
    change = paths["BDA"].x[-1] - paths["BDA"].x[0]
    assert change[problem.relevant].mean() < -0.5 < change[~problem.relevant].mean()


# --- the script -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_script_and_a_killed_one_end_alike(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = scripts.results("lasso", tmp_path / "whole", "--smoke", "--seeds", 3)
    assert [run["method"] for run in whole["runs"]] == 2 * [*lasso.METHODS, "LassoCV"]
    shown = capsys.readouterr().out
    for name in lasso.PROBLEMS:
        assert lasso.table(whole["runs"], name) in shown
        assert (tmp_path / "whole" / f"lasso_{name}.png").read_bytes().startswith(b"\x89PNG\r\n")

    scripts.kill_at("lasso", tmp_path / "killed", "synthetic_prox_3.pt", "--smoke", "--seeds", 3)
    assert not (tmp_path / "killed" / "lasso.json").exists()
    again = scripts.results("lasso", tmp_path / "killed", "--smoke", "--seeds", 3, "--resume")
    assert scripts.without_times(again) == scripts.without_times(whole)


def test_wrong_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        scripts.run("lasso", "--start", "0")
    assert "--start above 0" in capsys.readouterr().err


def test_the_recorded_runs_start_where_the_page_says() -> None:
    for name, start in (("lasso", lasso.START), ("lasso_start", 0.4)):
        found = json.loads((ROOT / "examples" / "results" / f"{name}.json").read_text("utf-8"))
        assert found["settings"]["start"] == start
