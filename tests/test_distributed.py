"""Ranks: everything here is checked against one process that has all tasks and all data."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import rank_checks
import torch
from problems import relative_error
from ranks import over_ranks

from bda_optim import distributed

CHECKS = (
    "parts_are_whole",
    "hypergradient_is_that_of_one_process",
    "gradients_accumulate",
    "a_tree_of_hypergradients",
    "twenty_iterations_end_alike",
    "communication_is_one_pass",
    "an_announced_pass_sends_early",
    "an_error_changes_nothing",
    "modules_in_ddp",
    "modules_in_fsdp",
    "data_parallel_hypergradient",
    "data_parallel_derivatives_of_any_order",
    "data_parallel_refusals",
    "data_parallel_buffers",
    "an_overflow_on_one_rank_is_seen_by_all",
)


def test_over_three_two_and_one_ranks(tmp_path: Path) -> None:
    """One test, because starting a rank takes seconds; what three ranks have written, two and one go on from."""
    over_ranks(3, tmp_path, "rank_checks", *CHECKS, "writes_a_checkpoint")
    (tmp_path / "store").unlink()
    over_ranks(2, tmp_path, "rank_checks", *CHECKS, "resumes_a_checkpoint")
    model = rank_checks.Net(seed=7)
    outer = torch.optim.Adam(model.parameters(), lr=0.5)
    extra = distributed.load(tmp_path / "checkpoints", model, outer)
    assert extra is not None and extra["iteration"] == 5
    assert outer.param_groups[0]["lr"] == 0.01
    assert len(outer.state) == 6, "the spare layer was never used"
    rank_checks.train(model, distributed.Averager(model), outer, 5, 4, first=5)
    want = torch.load(tmp_path / "final.pt", weights_only=True)
    assert relative_error(list(model.parameters()), want) < rank_checks.EXACT
    check_damaged(tmp_path / "checkpoints")


def check_damaged(folder: Path) -> None:
    """A checkpoint of which a part is missing, or of another model, is refused, and changes nothing."""
    model, other = rank_checks.Net(seed=7), torch.nn.Linear(2, 2)
    before = [p.detach().clone() for p in model.parameters()]
    outer = torch.optim.Adam(model.parameters(), lr=0.5)
    (folder / "3.part").mkdir()  # of a run that was killed while it wrote
    with pytest.raises(RuntimeError, match=r"another model or optimizer; got: .*model\.weight"):
        distributed.load(folder, other, torch.optim.Adam(other.parameters()))
    for file in (folder / "2").glob("*.distcp"):
        file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(RuntimeError, match="is damaged"):
        distributed.load(folder, model, outer)
    assert all(map(torch.equal, before, model.parameters()))
    assert not outer.state and outer.param_groups[0]["lr"] == 0.5
    distributed.save(folder, model, outer)
    assert sorted(path.name for path in folder.iterdir()) == ["3"]
    assert distributed.load(folder, model, outer) == {}


def test_without_a_process_group() -> None:
    model = rank_checks.Net()
    averager = distributed.Averager(model)
    mine = distributed.shard(rank_checks.tasks(3))
    with averager(weight=len(mine[0]), backwards=3):
        rank_checks.adapt(model, mine)
    assert relative_error(rank_checks.grads(model), rank_checks.alone(3)) == 0
    given = {"a": torch.ones(2), "b": None}
    found = distributed.average(given, weight=2)
    assert torch.equal(found["a"], given["a"]) and found["a"] is not given["a"]
    assert distributed.DataParallel(lambda y, x, b: y + b)(1, None, 2) == 3


def test_bad_arguments_are_named() -> None:
    w = torch.ones(2, requires_grad=True)
    for weight in (-1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="number of this rank's tasks"):
            distributed.average(w, weight=weight)
        with pytest.raises(ValueError, match="number of this rank's tasks"), distributed.Averager(w)(weight):
            pass
    with pytest.raises(ValueError, match="counts the calls"), distributed.Averager(w)(1, backwards=-1):
        pass
    with pytest.raises(ValueError, match=r"leaf tensors.*upper\['a'\]"):
        distributed.Averager({"a": w * 2})
    with pytest.raises(ValueError, match="no variable that requires grad"):
        distributed.Averager(torch.ones(2))
    with pytest.raises(ValueError, match="size of a bucket"):
        distributed.Averager(w, bucket_mb=0.0)
    with pytest.raises(ValueError, match="got sizes"):
        distributed.shard({"x": torch.ones(3), "y": torch.ones(2)})


def test_the_package_itself_does_not_import_it() -> None:
    """`import bda_optim` loads nothing of torch.distributed that torch has not loaded by itself."""
    code = """
import sys, torch
before = {name for name in sys.modules if "distributed" in name}
import bda_optim
after = {name for name in sys.modules if "distributed" in name}
assert after == before, sorted(after - before)
import bda_optim.distributed
assert "torch.distributed.tensor" not in sys.modules and "torch.distributed.checkpoint" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parent.parent)


def torchrun(ranks: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).parent.parent
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *arguments]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), str(root / "tests")]), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=env, cwd=root, capture_output=True, text=True, check=False, timeout=300)


def test_a_rank_that_dies_ends_the_others_and_a_new_run_resumes(tmp_path: Path) -> None:
    script = str(Path(__file__).with_name("rank_run.py"))
    done = torchrun(2, script, str(tmp_path), "1")
    lasted = time.time() - float((tmp_path / "died").read_text())
    assert done.returncode != 0 and not (tmp_path / "final.pt").exists()
    assert lasted < 60
    assert re.search(r"rank +: 1 .*\n *exitcode +: -9 ", done.stderr), done.stderr[-3000:]
    done = torchrun(2, script, str(tmp_path))
    assert done.returncode == 0, done.stderr[-3000:]
    first, *got = torch.load(tmp_path / "final.pt", weights_only=True)
    assert first == 5
    model = rank_checks.Net()
    outer = torch.optim.Adam(model.parameters(), lr=0.01)
    rank_checks.train(model, distributed.Averager(model), outer, 10, 3)
    assert relative_error(got, list(model.parameters())) < rank_checks.EXACT
