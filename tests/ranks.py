"""Runs a function on several ranks: the calling process is rank 0, the others are started as ``python ranks.py``."""

from __future__ import annotations

import contextlib
import datetime
import importlib
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

TESTS = Path(__file__).resolve().parent
TIMEOUT = datetime.timedelta(seconds=300)  # starting a rank takes seconds, on a loaded machine a minute


def over_ranks(world: int, folder: Path, module: str, *names: str) -> None:
    """Call ``module.name(folder)`` for each of `names` on `world` ranks of gloo, this process among them."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = os.pathsep.join([str(TESTS.parent), str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "PYTHONPATH": paths}
    outputs = [folder / f"rank{rank}.txt" for rank in range(1, world)]
    with contextlib.ExitStack() as stack:
        children = []
        for rank, output in enumerate(outputs, start=1):
            command = [sys.executable, __file__, str(rank), str(world), str(folder), module, *names]
            file = stack.enter_context(output.open("w"))
            children.append(subprocess.Popen(command, env=env, stdout=file, stderr=subprocess.STDOUT))
        try:
            with _group(0, world, folder):
                _call(module, names, folder)
            codes = [child.wait(timeout=TIMEOUT.total_seconds()) for child in children]
        except BaseException as error:
            _let_end(children)
            said = [f"rank {rank}: {path.read_text()[-3000:]}" for rank, path in enumerate(outputs, start=1)]
            raise AssertionError("\n".join(["rank 0 failed; the others said:", *said])) from error
        finally:
            for child in children:
                child.kill()
                child.wait()
    assert codes == [0] * len(codes), [path.read_text()[-3000:] for path in outputs]


def _let_end(children: list[Any]) -> None:
    """Give the others time to fail by themselves: their own messages say more than that they were killed."""
    end = time.monotonic() + 5
    while time.monotonic() < end and any(child.poll() is None for child in children):
        time.sleep(0.1)


@contextlib.contextmanager
def _group(rank: int, world: int, folder: Path) -> Any:
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # whatever the machine calls itself
    store = dist.FileStore(str(folder / "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=TIMEOUT)
    try:
        yield
        dist.barrier()  # nobody closes its connections while another still needs them
    finally:
        dist.destroy_process_group()
        os.environ.pop("GLOO_SOCKET_IFNAME", None)


def _call(module: str, names: Any, folder: Path) -> None:
    found = importlib.import_module(module)
    for name in names:
        torch.manual_seed(0)
        try:
            getattr(found, name)(folder)
        except BaseException as error:
            error.add_note(f"in {module}.{name} on rank {dist.get_rank()}") if hasattr(error, "add_note") else None
            raise


if __name__ == "__main__":
    torch.set_num_threads(1)
    with _group(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])):
        _call(sys.argv[4], sys.argv[5:], Path(sys.argv[3]))
