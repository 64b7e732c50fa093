"""The examples run and say what is true."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import scripts

pytest.importorskip("matplotlib")

ROOT = Path(__file__).resolve().parent.parent

# K: (argmin phi_K of RHG, of BDA), (dphi_K/dx at 0 of RHG, of BDA), from y0 = (2, 2)
COUNTEREXAMPLE = {
    8: ((1.508314854315, 1.137076083542), (-2.552978515342131, -0.624011700227637)),
    16: ((1.500203724024, 1.083240150351), (-2.917142070237089, -0.862081933783990)),
    64: ((1.500000000000, 1.029095608589), (-2.999998116870268, -0.999969526796144)),
}


@pytest.fixture(scope="module")
def example() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("counterexample", ROOT / "examples" / "counterexample.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    module.descend.cache_clear()


@pytest.mark.parametrize("steps", COUNTEREXAMPLE)
def test_counterexample_table(example: ModuleType, steps: int) -> None:
    found = example.row(steps)
    argmin, slope = COUNTEREXAMPLE[steps]
    assert found.steps == steps
    assert found.argmin == pytest.approx(argmin, abs=1e-9, rel=0)
    assert found.slope == pytest.approx(slope, abs=1e-9, rel=0)
    assert found.warm[0] > 1.49  # RHG does not get there, BDA does
    assert found.warm[1] == pytest.approx(1.0, abs=1e-5)
    text = example.table([found])
    assert all(f"{value:.12f}" in text for pair in (found.argmin, found.slope, found.warm) for value in pair)


def test_counterexample_warm_start(example: ModuleType) -> None:
    rhg, aggregated = example.row(16, iterations=50).warm
    assert rhg == pytest.approx(1.507, abs=5e-4)
    assert aggregated == pytest.approx(0.9999999989, abs=1e-10)


def test_counterexample_cold_start_ends_at_the_minimiser(example: ModuleType) -> None:
    for alpha, end in zip((example.RHG, example.BDA), COUNTEREXAMPLE[16][0], strict=True):
        run = example.descend(0.0, (2.0, 2.0), 16, alpha, warm=False, iterations=50)
        assert run.x[-1].item() == pytest.approx(end, abs=1e-9)


@pytest.mark.parametrize("warm", [False, True])
def test_counterexample_is_symmetric(example: ModuleType, warm: bool) -> None:
    """A start reflected at the solution gives the reflected run: from y0 = (0, 0) every value v becomes 2 - v."""
    run = example.descend(0.0, (2.0, 2.0), 8, example.BDA, warm=warm, iterations=5)
    mirrored = example.descend(2.0, (0.0, 0.0), 8, example.BDA, warm=warm, iterations=5)
    assert (run.x + mirrored.x - 2).abs().max() < 1e-12
    assert (run.y + mirrored.y - 2).abs().max() < 1e-12


def test_what_the_figures_show(example: ModuleType) -> None:
    def end(problem: tuple[object, ...], warm: bool, iteration: int = 14) -> float:
        """The error in x."""
        run = example.descend(*problem, warm=warm, iterations=14)
        return list(example.errors(run).values())[2][iteration].item()

    for start in example.STARTS:
        for warm in (False, True):
            assert end((*start, 16, example.RHG), warm) > 0.2
        assert end((*start, 16, example.BDA), False) < 0.01
        assert end((*start, 16, example.BDA), True) < 1e-4

    start = (0.0, (2.0, 2.0))
    for warm in (False, True):
        assert all(end((*start, steps, example.RHG), warm) > 0.2 for steps in example.STEPS)
        closer = [end((*start, steps, example.BDA), warm) for steps in example.STEPS]
        assert closer[0] > closer[1] > closer[2]
        fixed, vanishing = (end((*start, 16, alpha), warm, 10) for alpha in (0.5, example.bda.harmonic(0.9)))
        assert fixed > 0.5 and vanishing < 1e-2


def test_errors_vanish_at_the_solution(example: ModuleType) -> None:
    found = example.errors(example.Run(example.X_STAR[None], example.Y_STAR[None]))
    assert len(found) == 4
    assert all(error.shape == (1,) and error.item() == 0 for error in found.values())


def test_counterexample_as_a_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "figures"
    monkeypatch.chdir(tmp_path)
    scripts.run("counterexample", "--out", out, "--smoke")
    shown = capsys.readouterr()
    assert "100%" in shown.err  # the progress bar
    assert [path.name for path in tmp_path.iterdir()] == ["figures"]
    assert re.search(r"^ +2 \|( +-?\d+\.\d{12}){2} \|( +-?\d+\.\d{12}){2} \|( +-?\d+\.\d{12}){2}$", shown.out, re.M)
    names = ["counterexample_initialisations.png", "counterexample_lower_steps.png", "counterexample_weights.png"]
    assert sorted(path.name for path in out.iterdir()) == ["counterexample.json", *names]
    found = json.loads((out / "counterexample.json").read_text("utf-8"))
    assert (found["iterations"], found["order"], [row["steps"] for row in found["rows"]]) == (2, ["RHG", "BDA"], [2, 3])
    printed = [value for row in found["rows"] for key in ("argmin", "slope", "warm") for value in row[key]]
    assert len(printed) == 12 and all(f"{value:.12f}" in shown.out for value in printed)
    for name in names:
        assert str(out / name) in shown.out
        png = (out / name).read_bytes()
        assert png.startswith(b"\x89PNG\r\n") and len(png) > 20_000


def test_the_script_for_higher_agrees(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("higher")
    scripts.run("migrate_higher_maml", "--seed", 1)
    shown = capsys.readouterr().out
    assert len(re.findall(r"largest difference in torch\.float(?:32|64): \d\.\de-", shown)) == 2
    before, after = map(float, re.search(r"with BDA in the inner loop: query loss (\S+) -> (\S+)", shown).groups())
    assert after < before / 2


LONGER = [name for name, path in scripts.SCRIPTS.items() if path.parent.name != "start"]


@pytest.mark.parametrize("script", LONGER)
def test_every_script_has_help(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        scripts.run(script, "--help")
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    assert "--seed" in shown or script == "counterexample"
    assert "--smoke" in shown or script.startswith("migrate_")


def test_the_readme_names_every_script() -> None:
    text = (ROOT / "examples" / "README.md").read_text("utf-8")
    named = re.findall(r"^\| `python (examples/[\w/]+\.py)", text, re.MULTILINE)
    assert sorted(named) == sorted(str(path.relative_to(ROOT)) for path in scripts.SCRIPTS.values())


def test_the_numbers_of_the_counterexample_in_the_readme(example: ModuleType) -> None:
    """Plain unrolling of 64 steps ends at 1.5, BDA at 1.03, and at 1.000 with a warm start."""
    readme = (ROOT / "README.md").read_text("utf-8")
    plain, aggregated = example.row(64).argmin
    assert f"plain unrolling of 64 steps ends at {plain:.1f}, BDA at {aggregated:.2f}, and at 1.000" in readme
    assert f"{example.row(64).warm[1]:.3f}" == "1.000"


# --- the scripts to copy ----------------------------------------------------------------------------------------------

START = sorted((ROOT / "examples" / "start").glob("*.py"))


@pytest.mark.parametrize("path", START, ids=lambda path: path.stem)
def test_scripts_to_copy_are_short_and_need_little(path: Path) -> None:
    text = path.read_text("utf-8")
    assert len(text.splitlines()) <= 50
    needed = set(re.findall(r"^(?:import|from) (\w+)", text, re.MULTILINE))
    assert needed == {"torch", "bda_optim", "matplotlib"}


@pytest.mark.filterwarnings("ignore:FigureCanvasAgg is non-interactive")
def test_the_sample_weights_find_wrong_labels(capsys: pytest.CaptureFixture[str]) -> None:
    scripts.run("sample_weights")
    found, wrong, false = map(int, re.findall(r"\d+", capsys.readouterr().out))
    assert found > 0.85 * wrong and false < 0.3 * wrong


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:FigureCanvasAgg is non-interactive")
@pytest.mark.parametrize("script", ["maml", "learning_rate"])
def test_what_the_scripts_to_copy_learn(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    scripts.run(script)
    before, after = map(float, re.findall(r"\d+\.\d+", capsys.readouterr().out)[-2:])
    assert after < before / 5
