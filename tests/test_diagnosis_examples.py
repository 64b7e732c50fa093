"""The examples of the diagnosis and of the learned initialisation run, and their records say what the pages say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import scripts
import torch

pytest.importorskip("matplotlib")
pytest.importorskip("tqdm")

import diagnosis
import learned_initialisation

ROOT = Path(__file__).resolve().parent.parent


def recorded(name: str) -> Any:
    return json.loads((ROOT / "examples" / "results" / f"{name}.json").read_text("utf-8"))


def test_diagnosis_as_a_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = scripts.results("diagnosis", tmp_path, "--smoke")
    assert set(found["problems"]) == {"ridge", "counterexample", "least_squares"}
    shown = capsys.readouterr().out
    assert shown.count("diagnosis of K=8 steps") == 3
    for name in found["problems"]:
        assert json.loads((tmp_path / f"diagnosis_{name}.json").read_text("utf-8"))["steps"] == 8
        for path in (tmp_path / f"diagnosis_{name}.png", tmp_path / f"diagnosis_{name}_suggested.png"):
            assert path.read_bytes().startswith(b"\x89PNG\r\n") and str(path) in shown


def test_the_diagnoses_that_were_recorded() -> None:
    found = recorded("diagnosis")["problems"]
    assert found["ridge"]["findings"] == [] and found["ridge"]["error of alpha=0"] < 1e-6
    for name in ("counterexample", "least_squares"):
        assert "start" in found[name]["findings"] and found[name]["findings with the suggestion"] == []
        assert found[name]["error of alpha=0"] > 0.2 and found[name]["error of the suggestion"] < 0.02


@pytest.mark.parametrize("name", ["ridge", "counterexample", "least_squares"])
def test_the_closed_forms(name: str) -> None:
    """phi'(x) against a lower level that is solved with a small share of F: f + 1e-7 F has one minimiser."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        problem = getattr(diagnosis, name)(torch.Generator().manual_seed(3))

        def solved(x: torch.Tensor) -> torch.Tensor:
            def loss(y: torch.Tensor) -> torch.Tensor:
                return problem.lower(y, x, None) + 1e-7 * problem.upper(y, x, None)

            y = problem.start
            return problem.upper(y - torch.linalg.solve(torch.func.hessian(loss)(y), torch.func.grad(loss)(y)), x, None)

        found, want = (torch.func.grad(function)(problem.x) for function in (problem.phi, solved))
        torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-6)
    finally:
        torch.set_default_dtype(before)


def test_learned_initialisation_as_a_script(tmp_path: Path) -> None:
    found = scripts.results("learned_initialisation", tmp_path, "--smoke")
    assert found["iterations"] == 5
    assert (tmp_path / "learned_initialisation.png").read_bytes().startswith(b"\x89PNG\r\n")
    fixed, learned = (run["x"] for run in found["runs"].values())
    assert fixed != learned


def test_the_learned_initialisations_that_were_recorded() -> None:
    runs = {
        name: learned_initialisation.Run(torch.tensor([run["x"]]), torch.tensor([run["F"]]))
        for name, run in recorded("learned_initialisation")["runs"].items()
    }
    fixed, learned = runs.values()
    assert ((fixed.x[0] - learned_initialisation.X_STAR).abs() > 0.2).all()
    assert ((learned.x[0] - learned_initialisation.X_STAR).abs() < 0.1).all()


@pytest.mark.slow
def test_the_learned_initialisation_again() -> None:
    """The table of the four starts, to its last digit."""
    fixed, learned = (learned_initialisation.descend(how).x[-1].tolist() for how in (False, True))
    assert [round(x, 3) for x in fixed] == [1.0, 1.0, 1.0, 8.883]
    assert learned == pytest.approx([8.726, 8.629, 8.737, 8.633], abs=2e-3)
