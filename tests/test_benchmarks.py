"""Every benchmark runs, checks its contestants against each other, and writes what it found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("tqdm")

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ["against_peers", "memory_vs_k", "tasks", "adjoints", "implicit_peers", "large_models", "scale", "first_call"]
SCRIPTS += ["passes", "two_trees"]


def smoke(script: str, out: Path, *options: str) -> dict[str, object]:
    """Run a benchmark in its smallest form, without compilation; return its JSON file."""
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{script}", "--smoke", "--out", str(out), *options],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") > 5
    assert (out / f"{script}.png").read_bytes().startswith(b"\x89PNG\r\n")
    return json.loads((out / f"{script}.json").read_text("utf-8"))


@pytest.mark.slow
def test_against_peers(tmp_path: Path) -> None:
    chosen = ["mlp", "softmax", "conv", "transformer", "counterexample", "counterexample_bda", "mlp_bda", "maml"]
    chosen.append("aggregation")
    found = smoke("against_peers", tmp_path, "--no-memory", "--only", *chosen)
    assert [workload["name"] for workload in found["workloads"]] == chosen
    for workload in found["workloads"]:
        assert workload["agree"]
        assert all(entry["relative_error"] < 1e-3 and entry["cpu_ms"] > 0 for entry in workload["entries"])


@pytest.mark.slow
def test_memory_vs_k(tmp_path: Path) -> None:
    found = smoke("memory_vs_k", tmp_path)
    memory, duration, long = found["parts"]
    assert all(value is not None for values in memory["peak_growth_mib"].values() for value in values)
    assert duration["agree"] and len(duration["entries"]) == 2
    assert long["entries"][0]["peak_growth_mib"] < 1024


@pytest.mark.slow
def test_tasks(tmp_path: Path) -> None:
    found = smoke("tasks", tmp_path, "--no-memory")
    assert [workload["name"] for workload in found["workloads"]] == ["heads", "mlps", "mlps_5_shot", "convs"]
    assert all(workload["agree"] for workload in found["workloads"])


def test_adjoints(tmp_path: Path) -> None:
    found = smoke("adjoints", tmp_path, "--no-memory", "--device", "cpu")
    assert all(e["relative_error"] < 1e-3 for e in found["entries"] if not e["name"].startswith("FirstOrder"))
    settled = {e["name"]: e["relative_error"] for e in found["at_rest"]["entries"]}
    assert settled["Implicit(), at rest"] < 1e-3 < 1e-2 < settled["Truncated(last=25), at rest"]


@pytest.mark.slow
def test_adjoints_vs_k(tmp_path: Path) -> None:
    found = smoke("adjoints_vs_k", tmp_path)
    assert found["steps"] == [20, 400]
    memory, time = ({name: row[key] for name, row in found["adjoints"].items()} for key in ("peak_growth_mib", "time"))
    assert memory["Unroll()"][1] > 4 * memory["Checkpointed()"][1] > 0
    assert memory["Implicit()"][0] is None, "before it comes to rest"
    assert all(row[-1] > 0 for row in time.values())


def test_implicit_peers(tmp_path: Path) -> None:
    found = smoke("implicit_peers", tmp_path)
    ours, plain = (found["errors"][f"{name}, alpha=1e-3, K=100"] for name in ("Implicit(settle=16)", "Unroll()"))
    for problem in ("n=10 < d=30", "the same, log-cosh"):
        assert ours[problem] < 1e-2 < 0.5 < plain[problem]
        assert found["errors"]["Implicit(), alpha=0, K=4000"][problem] == "RuntimeError"


@pytest.mark.slow
def test_large_models(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the extra `transformers` is not installed")
    found = smoke("large_models", tmp_path)
    *rules, loops = found["parts"]
    assert [part["name"] for part in rules] == ["SGD", "AdamW(eps=1e-5)"] and found["malloc"]
    for part in rules:
        assert all(e["relative_error"] < 1e-2 and e["one_minus_cosine"] < 1e-5 for e in part["entries"])
        assert all(e["cpu_ms"] > 0 for e in part["entries"])
    assert all(model["entries"][1]["relative_error"] < 1e-3 for model in loops["models"])


@pytest.mark.slow
def test_scale(tmp_path: Path) -> None:
    found = smoke("scale", tmp_path, "--only", "mlp")
    (work,) = found["workloads"]
    assert all(second > 0 for second in work["seconds"].values()) and work["efficiency"] > 0
    for row in found["paper"]:
        sent = list(row["exchange_s"].values())
        assert sent == sorted(sent), "more ranks never send faster"
        efficiency = list(row["efficiency"].values())
        assert efficiency == sorted(efficiency, reverse=True) and 0 < efficiency[-1] < efficiency[0] < 1


@pytest.mark.slow
def test_first_call(tmp_path: Path) -> None:
    found = smoke("first_call", tmp_path, "--only", "counterexample", "heads")
    for workload in found["workloads"]:
        (entry,) = workload["entries"]
        assert workload["agree"] and all(entry[turn]["cpu_s"] > 0 for turn in ("cold", "second"))


@pytest.mark.slow
def test_passes(tmp_path: Path) -> None:
    found = smoke("passes", tmp_path)
    assert all(workload["agree"] for workload in found["workloads"])
    assert len(found["verdicts"]) == 8, "one per pass"


@pytest.mark.slow
def test_two_trees(tmp_path: Path) -> None:
    chosen = ["unroll, counter-example", "innerloop_ctx, MLP of 24 units", "compat.higher, MLP"]
    found = smoke("two_trees", tmp_path, "--old", str(ROOT), "--only", *chosen)
    assert [work["name"] for work in found["workloads"]] == chosen
    assert all(0.1 < work["low"] <= work["ratio"] <= work["high"] < 10 for work in found["workloads"])


@pytest.mark.parametrize("script", SCRIPTS)
def test_header_is_question_and_output(script: str) -> None:
    header = (ROOT / "benchmarks" / f"{script}.py").read_text("utf-8").split('"""')[1]
    assert header.splitlines()[0].endswith("?")
    recorded = (ROOT / "benchmarks" / "results" / f"{script}.json").exists()
    assert recorded == ("one thread" in header and "torch 2." in header), "the header shows the run of results/"


def test_a_device_that_is_not_there_is_refused_in_a_sentence() -> None:
    command = [sys.executable, "-m", "benchmarks", "--smoke", "--device", "cuda:99"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and not done.stdout
    assert done.stderr.splitlines() == ["there is no device 'cuda:99' here; nothing was run."]
