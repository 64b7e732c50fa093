"""What the longer examples share: their common options, files that are never half written, and runs that go on.

A run is killed at any moment and started again with ``--resume``: it goes on from its last checkpoint and ends with the
same numbers to the bit. For that a checkpoint holds everything the rest of the run depends on, and a run draws its
random numbers from generators that are in it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import secrets
import subprocess
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from tqdm import tqdm


def arguments(description: str, out: str) -> argparse.ArgumentParser:
    """Return a parser with the options that every script has; `out` is the default folder of its results."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("outputs") / out, help="folder for results and checkpoints")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], metavar="SEED", help="one run per seed")
    parser.add_argument("--device", type=device, default="cpu", help="where to compute: cpu, cuda, cuda:1, mps")
    parser.add_argument("--smoke", action="store_true", help="a tiny run of seconds, to see that all is there")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoints in --out")
    return parser


def device(name: str) -> torch.device:
    """Return the device of that name, or say which ones there are."""
    try:
        found = torch.device(name)
        torch.empty(1, device=found).item()  # the device "meta" has tensors, but no numbers
    except (RuntimeError, AssertionError) as error:
        there = ["cpu", *(kind for kind in ("cuda", "mps") if getattr(torch, kind).is_available())]
        message = f"{name!r} cannot be used here; got: {shorten(error)}. Available: {', '.join(there)}."
        raise argparse.ArgumentTypeError(message) from None
    return found


def shorten(error: BaseException) -> str:
    """Return the beginning of a message: torch's run to thousands of characters."""
    return textwrap.shorten(str(error), 120, placeholder=" ...").rstrip(".")


def wait_while_paused(seconds: float = 2.0) -> None:
    """Wait while there is a file ``PAUSE`` in the current folder: so that something else can be timed meanwhile."""
    while Path("PAUSE").exists():
        time.sleep(seconds)


def provenance() -> dict[str, Any]:
    """Return when and with what a result was made: the date, the commit (with + if files differ), the versions."""
    folder = Path(__file__).parent
    commit = None
    try:
        answers = [
            subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=True).stdout.strip()
            for words in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
        ]
        commit = answers[0] + ("+" if answers[1] else "")
    except (OSError, subprocess.CalledProcessError):  # no git, or not a clone
        pass
    versions = {"python": platform.python_version(), "torch": torch.__version__, "threads": torch.get_num_threads()}
    date = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    return {"date": date, "commit": commit, "versions": versions}


# --- files ------------------------------------------------------------------------------------------------------------


def write_atomically(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Let `write` fill a file beside `path`, then rename it: whoever looks sees the old file or the new one, whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")  # not mkstemp, whose files only the owner can read
    try:
        with beside.open("xb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def write_json(path: Path, content: object) -> None:
    text = json.dumps(content, indent=1, sort_keys=True) + "\n"
    write_atomically(path, lambda file: file.write(text.encode()))


class Checkpoint:
    """A file with the state of a run, and the settings it belongs to.

    Args:
        path: The file.
        settings: What the numbers of the run depend on; plain numbers, strings and containers of them. A checkpoint
            that was made with other settings is refused, since going on from it would mix two runs.
        resume: Whether an existing file is taken up. If not, it is overwritten by the first `save`.

    Attributes:
        seconds: How long `iterations` has run, the time before a `--resume` included.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any], *, resume: bool) -> None:
        self.path, self.resume, self.seconds = path, resume, 0.0
        self.settings = json.loads(json.dumps(settings))  # as it will be read: tuples are lists

    def load(self) -> dict[str, Any] | None:
        """Return the state, or None where the run starts anew."""
        if not self.resume or not self.path.exists():
            return None
        try:
            found = torch.load(self.path, weights_only=True)
            state, settings = dict(found["state"]), dict(found["settings"])
        except Exception as error:
            raise self._refusal(error) from error
        if settings != self.settings:
            keys = sorted(self.settings.keys() | settings.keys())
            changed = [key for key in keys if self.settings.get(key) != settings.get(key)]
            raise SystemExit(
                f"{self.path} was made with other settings: "
                + ", ".join(f"{key} was {settings.get(key)!r} and is {self.settings.get(key)!r}" for key in changed)
                + ". Use those, choose another --out, or run without --resume."
            )
        return state

    def save(self, state: Mapping[str, Any]) -> None:
        """Write tensors, numbers, strings and containers of them; nothing that would have to be unpickled as code."""
        whole = {"state": dict(state), "settings": self.settings}
        write_atomically(self.path, lambda file: torch.save(whole, file))

    def iterations(self, total: int, label: str, *, every: int | None = None, **parts: Any) -> Iterator[int]:
        """Yield 0, ..., total - 1 beside a progress bar, saving now and then; with `resume` only what is left of it.

        Args:
            total: How many iterations the whole run has.
            label: What the progress bar is called.
            every: After how many iterations the parts are saved; they are after the last one. By default a fiftieth.
            **parts: All that an iteration reads and changes: modules, optimizers, generators, tensors (changed in
                place), lists of plain values. With `resume` they are set to what was saved.
        """
        for name, part in parts.items():
            if not isinstance(part, Tensor | list | torch.Generator) and not hasattr(part, "load_state_dict"):
                what = "must be a module, an optimizer, a generator, a tensor or a list"
                raise TypeError(f"`{name}` {what}; got {part!r}. Keep it in a tensor or a list.")
        done, begin = 0, time.perf_counter()
        if (state := self.load()) is not None:
            try:
                for name, part in parts.items():
                    _set_state(part, state[name])
                done, self.seconds = state["done"], state["seconds"]
            except (KeyError, TypeError, ValueError, RuntimeError) as error:
                raise self._refusal(error) from error
        before, every = self.seconds, every or max(1, total // 50)
        for i in tqdm(range(done, total), label, total, initial=done):
            yield i
            self.seconds = before + time.perf_counter() - begin
            if (i + 1) % every == 0 or i + 1 == total:
                states = {name: _state(part) for name, part in parts.items()}
                self.save({**states, "done": i + 1, "seconds": self.seconds})

    def _refusal(self, error: Exception) -> SystemExit:
        got = f"{type(error).__name__}: {shorten(error)}"
        return SystemExit(
            f"{self.path} is not a checkpoint of this script, or is damaged; got: {got}. Delete it, or run without "
            "--resume."
        )


def _state(part: Any) -> Any:
    if isinstance(part, Tensor):
        return part.detach()
    if isinstance(part, list):
        return part
    return part.get_state() if isinstance(part, torch.Generator) else part.state_dict()


def _set_state(part: Any, state: Any) -> None:
    if isinstance(part, Tensor):
        part.detach().copy_(state)
    elif isinstance(part, list):
        part[:] = state
    elif isinstance(part, torch.Generator):
        part.set_state(state)
    else:
        part.load_state_dict(state)
