"""A run of ten upper iterations with a checkpoint after each, for `torchrun`: ``rank_run.py FOLDER [DYING_RANK]``.

The given rank kills itself in the middle of the sixth iteration.
"""

from __future__ import annotations

import datetime
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from rank_checks import Net, adapt, tasks

from bda_optim import distributed

ITERATIONS, TASKS = 10, 3
TIMEOUT = datetime.timedelta(seconds=1200)  # longer than the test waits, so that a rank which hangs is noticed


def main(folder: Path, dying: int | None) -> None:
    dist.init_process_group("gloo", timeout=TIMEOUT)
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
                os.kill(os.getpid(), signal.SIGKILL)
        outer.step()
        distributed.save(folder / "checkpoints", model, outer, iteration=i + 1)
    if dist.get_rank() == 0:
        torch.save([first, *model.parameters()], folder / "final.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else None)
