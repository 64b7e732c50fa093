"""What the examples share: options, files that are whole whatever happens, and checkpoints that fit or are refused."""

from __future__ import annotations

import argparse
import json
import os
import pickle
import random
import subprocess
import sys
from pathlib import Path

import _run
import pytest
import torch

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
SETTINGS = {"lr": 0.1, "sizes": (3, 4), "name": "a"}


def checkpoint(path: Path, *, resume: bool = True, **changed: object) -> _run.Checkpoint:
    return _run.Checkpoint(path, {**SETTINGS, **changed}, resume=resume)


# --- options ----------------------------------------------------------------------------------------------------------


def test_common_options(capsys: pytest.CaptureFixture[str]) -> None:
    parser = _run.arguments("What it does.", "name")
    args = parser.parse_args([])
    assert args.out == Path("outputs/name") and args.seeds == [0] and args.device == torch.device("cpu")
    assert not args.smoke and not args.resume
    args = parser.parse_args(["--out", "there", "--seeds", "3", "4", "--device", "cpu", "--smoke", "--resume"])
    assert args.out == Path("there") and args.seeds == [3, 4] and args.smoke and args.resume
    with pytest.raises(SystemExit) as stop:
        parser.parse_args(["--help"])
    shown = capsys.readouterr().out
    assert stop.value.code == 0 and "What it does." in shown
    assert all(option in shown for option in ("--out", "--seeds", "--device", "--smoke", "--resume"))


@pytest.mark.parametrize("name", ["nonsense", "meta", "cuda:99"])
def test_a_device_that_is_not_there(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=rf"^'{name}' cannot be used here; got: .*Available: cpu"):
        _run.device(name)
    with pytest.raises(SystemExit) as stop:
        _run.arguments("", "name").parse_args(["--device", name])
    shown = capsys.readouterr().err
    assert stop.value.code == 2 and f"argument --device: '{name}' cannot be used here" in shown and len(shown) < 500


# --- files ------------------------------------------------------------------------------------------------------------


def test_json_is_written_readable_and_sorted(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "results.json"
    before = os.umask(0o022)
    try:
        _run.write_json(path, {"b": [1, 2.5], "a": None})
    finally:
        os.umask(before)
    assert json.loads(path.read_text("utf-8")) == {"a": None, "b": [1, 2.5]}
    assert path.read_text("utf-8").index('"a"') < path.read_text("utf-8").index('"b"')
    assert path.stat().st_mode & 0o777 == 0o644  # readable by others, like any file
    assert [*path.parent.iterdir()] == [path]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_leaves_the_old_file_and_no_other(tmp_path: Path, error: type[BaseException]) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def fail(file: object) -> None:
        file.write(b"half of the n")
        raise error

    with pytest.raises(error):
        _run.write_atomically(path, fail)
    assert path.read_bytes() == b"old"
    assert [*tmp_path.iterdir()] == [path]
    with pytest.raises(TypeError):
        _run.write_json(path, object())
    with pytest.raises(Exception, match="pickle"):
        checkpoint(path).save({"code": lambda: None})
    assert path.read_bytes() == b"old"
    assert [*tmp_path.iterdir()] == [path]


KILLED = """
import os, random, signal, sys, time
from pathlib import Path
import torch
from _run import Checkpoint

torch.set_num_threads(1)
path, kills = Path(sys.argv[1]), int(sys.argv[2])
checkpoint = Checkpoint(path, {}, resume=True)
random.seed(0)

def beside():
    return [*path.parent.glob(f".{path.name}.*")]

def stamp():
    return path.stat().st_mtime_ns if path.exists() else None

last, moved, torn = -1, 0, 0
for kill in range(kills):
    before = stamp()
    child = os.fork()
    if not child:
        number = last
        while True:  # a state whose parts must belong together
            number += 1
            checkpoint.save({"number": number, "tensor": torch.full((50_000,), float(number)), "again": number})
    while stamp() == before if kill % 2 == 0 else not beside():
        pass  # until a file was written, or until one is being written
    time.sleep(random.uniform(0, 0.004) * (kill % 3))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    torn += len(beside())
    [leftover.unlink() for leftover in beside()]
    state = checkpoint.load()
    assert state["number"] == state["again"] >= last, (last, state["number"])
    assert (state["tensor"] == state["number"]).all()
    moved += state["number"] > last
    last = state["number"]
print(moved, torn)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills a forked process")
def test_kill_9_while_saving_leaves_the_old_file_or_the_new_one(tmp_path: Path) -> None:
    """One process that forks, since starting Python and torch takes longer than a hundred saves."""
    command = [sys.executable, "-c", KILLED, str(tmp_path / "state.pt"), "30"]
    env = {**os.environ, "PYTHONPATH": str(EXAMPLES)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    moved, torn = map(int, done.stdout.split())
    assert moved >= 10  # saves did go on from one kill to the next
    assert torn >= 5  # and these kills came while a file was being written


# --- checkpoints ------------------------------------------------------------------------------------------------------


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "new" / "state.pt"
    assert checkpoint(path).load() is None  # no checkpoint yet
    generator = torch.Generator().manual_seed(7)
    net = torch.nn.Linear(2, 3)
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    saved = {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "random": generator.get_state()}
    checkpoint(path).save({**saved, "iteration": 5, "losses": [1.0, 0.1 + 0.2], "who": "me", "nothing": None})
    numbers = torch.rand(4, generator=generator)

    state = checkpoint(path).load()
    assert state is not None
    assert (state["iteration"], state["losses"], state["who"], state["nothing"]) == (5, [1.0, 0.1 + 0.2], "me", None)
    assert all(torch.equal(state["net"][name], value) for name, value in net.state_dict().items())
    torch.optim.Adam(net.parameters()).load_state_dict(state["optimizer"])
    generator.manual_seed(0)
    generator.set_state(state["random"])
    assert torch.equal(torch.rand(4, generator=generator), numbers)
    assert [*path.parent.iterdir()] == [path]


def test_without_resume_a_checkpoint_is_left_alone_until_the_next_save(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    checkpoint(path).save({"iteration": 5})
    anew = checkpoint(path, resume=False, lr=0.2)
    assert anew.load() is None
    assert checkpoint(path).load() == {"iteration": 5}
    anew.save({"iteration": 1})
    assert checkpoint(path, lr=0.2).load() == {"iteration": 1}


def test_other_settings_are_refused_and_named(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    checkpoint(path, gone=1).save({"iteration": 5})
    with pytest.raises(SystemExit) as stop:
        checkpoint(path, lr=0.2, new=[2]).load()
    message = str(stop.value)
    assert "lr was 0.1 and is 0.2" in message and "gone was 1 and is None" in message
    assert "new was None and is [2]" in message and "sizes" not in message and "name" not in message
    assert str(path) in message and "--out" in message and "--resume" in message
    assert checkpoint(path, gone=1).load() == {"iteration": 5}  # still there


def test_tuples_and_lists_are_the_same_settings(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    checkpoint(path).save({"iteration": 5})
    assert checkpoint(path, sizes=[3, 4]).load() == {"iteration": 5}


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 0.999])
def test_a_cut_off_file_is_refused(tmp_path: Path, share: float) -> None:
    path = tmp_path / "state.pt"
    checkpoint(path).save({"tensor": torch.rand(1000)})
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    refused(path)


def test_a_foreign_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    for content in (b"", b"not a checkpoint", random.Random(0).randbytes(2000)):
        path.write_bytes(content)
        refused(path)
    for found in ({"weight": torch.zeros(3)}, [1, 2], torch.zeros(3), {"state": {}}, {"state": 1, "settings": 2}):
        torch.save(found, path)
        refused(path)


class Touch:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("save", [torch.save, lambda content, path: path.write_bytes(pickle.dumps(content))])
def test_code_in_a_checkpoint_is_not_run(tmp_path: Path, save: object) -> None:
    path, touched = tmp_path / "state.pt", tmp_path / "touched"
    save({"state": {"x": Touch(touched)}, "settings": {}}, path)
    refused(path)
    assert not touched.exists()
    torch.load(path, weights_only=False) if save is torch.save else pickle.loads(path.read_bytes())
    assert touched.exists()  # unpickling would have written it


def refused(path: Path) -> None:
    before = path.read_bytes()
    with pytest.raises(SystemExit) as stop:
        checkpoint(path).load()
    message = str(stop.value)
    assert message.startswith(f"{path} is not a checkpoint of this script, or is damaged; got: ")
    assert message.endswith("Delete it, or run without --resume.") and len(message) < len(str(path)) + 400
    assert path.read_bytes() == before


# --- runs that go on --------------------------------------------------------------------------------------------------


class Parts:
    """A run that depends on one part of each kind."""

    def __init__(self, path: Path, *, resume: bool) -> None:
        torch.manual_seed(0)
        self.net = torch.nn.Linear(3, 1)
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=0.1)
        self.random = torch.Generator().manual_seed(0)
        self.mean = torch.zeros(3, requires_grad=True)
        self.losses: list[float] = []
        self.checkpoint = checkpoint(path, resume=resume)

    def run(self, total: int, stop: int | None = None, every: int | None = None) -> list[int]:
        parts = {name: part for name, part in vars(self).items() if name != "checkpoint"}
        seen = []
        for i in self.checkpoint.iterations(total, "label", every=every, **parts):
            seen.append(i)
            x = torch.rand(5, 3, generator=self.random)
            self.mean.data.lerp_(x.mean(0), 0.1)
            self.optimizer.zero_grad()
            loss = (self.net(x - self.mean.detach()) - 1).square().mean()
            loss.backward()
            self.optimizer.step()
            self.losses.append(loss.item())
            if i + 1 == stop:
                break
        return seen


@pytest.mark.parametrize("stop", [1, 2, 7, 20])
def test_a_run_that_was_cut_off_ends_the_same(tmp_path: Path, stop: int) -> None:
    whole = Parts(tmp_path / "whole.pt", resume=False)
    assert whole.run(20, every=2) == [*range(20)]
    cut = Parts(tmp_path / "cut.pt", resume=False)
    assert cut.run(20, stop=stop, every=2) == [*range(stop)]
    again = Parts(tmp_path / "cut.pt", resume=True)
    saved = (stop - 1) // 2 * 2  # the loop ends within iteration `stop`, before that is saved
    assert again.run(20, every=2) == [*range(saved, 20)]
    assert again.losses == whole.losses and torch.equal(again.mean, whole.mean)
    assert all(map(torch.equal, again.net.parameters(), whole.net.parameters()))
    assert torch.equal(again.random.get_state(), whole.random.get_state())
    assert again.checkpoint.seconds > 0


def test_a_finished_run_has_nothing_left_to_do(tmp_path: Path) -> None:
    first = Parts(tmp_path / "state.pt", resume=False)
    first.run(5)
    again = Parts(tmp_path / "state.pt", resume=True)
    assert again.run(5) == [] and again.losses == first.losses
    assert again.checkpoint.seconds == first.checkpoint.seconds
    assert Parts(tmp_path / "state.pt", resume=False).run(5) == [*range(5)]


def test_a_part_that_the_checkpoint_does_not_have(tmp_path: Path) -> None:
    checkpoint(tmp_path / "state.pt").save({"done": 1, "seconds": 0.0})
    with pytest.raises(SystemExit, match="is not a checkpoint of this script, or is damaged; got: KeyError: 'mean'"):
        [*checkpoint(tmp_path / "state.pt").iterations(3, "label", mean=torch.zeros(2))]


def test_a_part_without_a_state(tmp_path: Path) -> None:
    with pytest.raises(
        TypeError, match="`count` must be a module, an optimizer, a generator, a tensor or a list; got 3"
    ):
        [*checkpoint(tmp_path / "state.pt").iterations(3, "label", count=3)]
