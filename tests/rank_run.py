"""A run of ten upper iterations with a checkpoint after each, for `torchrun`: ``rank_run.py FOLDER [DYING_RANK]``.

The given rank kills itself in the middle of the sixth iteration, after it wrote down the time.
"""

from __future__ import annotations

import datetime
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from rank_checks import Net, adapt, tasks

from bda_optim import distributed

ITERATIONS, TASKS = 10, 3


def main(folder: Path, dying: int | None) -> None:
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    model = Net()
    averager, outer = distributed.Averager(model), torch.optim.Adam(model.parameters(), lr=0.01)
    found = distributed.load(folder / "checkpoints", model, outer)
    first = 0 if found is None else found["iteration"]
    for i in range(first, ITERATIONS):
        outer.zero_grad()
        mine = distributed.shard(tasks(TASKS, seed=i))
        with averager(weight=len(mine[0])):
            adapt(model, mine)
            if i == 5 and dist.get_rank() == dying:
                (folder / "died").write_text(str(time.time()))
                os.kill(os.getpid(), signal.SIGKILL)
        outer.step()
        distributed.save(folder / "checkpoints", model, outer, iteration=i + 1)
    if dist.get_rank() == 0:
        torch.save([first, *model.parameters()], folder / "final.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else None)
