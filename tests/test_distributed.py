"""Ranks: everything here is checked against one process that has all tasks and all data."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import rank_checks
import torch
from problems import relative_error
from ranks import over_ranks

from bda_optim import distributed
from bda_optim.distributed import _ranks

ROOT = Path(__file__).resolve().parent.parent

CHECKS = (
    "parts_are_whole",
    "hypergradient_is_that_of_one_process",
    "gradients_accumulate",
    "a_tree_of_hypergradients",
    "any_dtype_travels",
    "twenty_iterations_end_alike",
    "communication_is_one_pass",
    "an_announced_pass_sends_early",
    "an_error_changes_nothing",
    "modules_in_ddp",
    "modules_in_fsdp",
    "copies_of_plain_modules",
    "data_parallel_hypergradient",
    "data_parallel_derivatives_of_any_order",
    "data_parallel_over_tasks",
    "data_parallel_refusals",
    "data_parallel_buffers",
    "an_overflow_on_one_rank_is_seen_by_all",
)


@pytest.mark.parametrize("worlds", [(2,), pytest.param((3, 2), marks=pytest.mark.slow)], ids=str)
def test_over_ranks(worlds: tuple[int, ...], tmp_path: Path) -> None:
    """One test, because starting a rank takes seconds; what the first ranks wrote, fewer go on from, and then one."""
    for world in worlds:
        checkpoint = "writes_a_checkpoint" if world == worlds[0] else "resumes_a_checkpoint"
        over_ranks(world, tmp_path, "rank_checks", *CHECKS, checkpoint)
        (tmp_path / "store").unlink()
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
    sparse = torch.eye(2).to_sparse()
    with pytest.raises(TypeError, match="only dense gradients travel"):
        _ranks.pack([sparse], [sparse])
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
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def module(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run ``python -m`` in the checkout; ranks that hang until a collective times out are an error here before that."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]), "OMP_NUM_THREADS": "1"}
    if sys.platform == "linux":
        env["GLOO_SOCKET_IFNAME"] = "lo"  # whatever the machine calls itself
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=False, timeout=600)


@pytest.mark.slow
def test_a_rank_that_dies_ends_the_others_and_a_new_run_resumes(tmp_path: Path) -> None:
    script = str(Path(__file__).with_name("rank_run.py"))
    done = module(*TORCHRUN, script, str(tmp_path), "1")
    assert done.returncode != 0 and not (tmp_path / "final.pt").exists()
    assert re.search(r"rank +: 1 .*\n *exitcode +: -9 ", done.stderr), done.stderr[-3000:]
    done = module(*TORCHRUN, script, str(tmp_path))
    assert done.returncode == 0, done.stderr[-3000:]
    first, *got = torch.load(tmp_path / "final.pt", weights_only=True)
    assert first == 5
    model = rank_checks.Net()
    outer = torch.optim.Adam(model.parameters(), lr=0.01)
    rank_checks.train(model, distributed.Averager(model), outer, 10, 3)
    assert relative_error(got, list(model.parameters())) < rank_checks.EXACT


def few_shot(launch: Sequence[str], out: Path, *options: str) -> torch.Tensor:
    """Run the example's smallest form by a launcher; return the losses and accuracies on the way."""
    done = module(
        *launch, "examples/paper/few_shot.py", "--smoke", "--methods", "maml", "bda", "--out", str(out), *options
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("| BDA |") == 1, "only one process writes"
    found = json.loads((out / "made_5way_1shot.json").read_text())["methods"]
    return torch.tensor([found[name]["curves"] for name in ("maml", "bda")])


def one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """The same in this process, which is quicker."""
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "paper"))
    options = ["few_shot.py", "--smoke", "--methods", "maml", "bda", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", options)
    importlib.import_module("few_shot").main()
    found = json.loads((tmp_path / "made_5way_1shot.json").read_text())["methods"]
    return torch.tensor([found[name]["curves"] for name in ("maml", "bda")])


TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node=2")
ACCELERATE = (
    *("accelerate.commands.launch", "--multi_gpu", "--num_machines=1", "--num_processes=2", "--main_process_port=0"),
    *("--mixed_precision=no", "--dynamo_backend=no"),
)


@pytest.mark.slow
@pytest.mark.parametrize("launch", [TORCHRUN, ACCELERATE], ids=["torchrun", "accelerate"])
def test_few_shot_over_ranks_is_that_of_one_process(
    launch: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    if launch == ACCELERATE:
        pytest.importorskip("accelerate", reason="`accelerate launch` is tested where accelerate is installed")
    got, want = few_shot(launch, tmp_path / "ranks", "--distributed"), one_process(tmp_path / "one", monkeypatch)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=0)


def test_few_shot_says_when_the_option_and_the_start_do_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "paper"))
    main = importlib.import_module("few_shot").main
    monkeypatch.setattr(sys, "argv", ["few_shot.py", "--smoke", "--distributed"])
    with pytest.raises(SystemExit):
        main()
    assert "start the script by torchrun" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["few_shot.py", "--smoke"])
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit):
        main()
    assert "add --distributed" in capsys.readouterr().err
