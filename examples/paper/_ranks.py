"""What an example needs to run on several processes: the option --distributed, and lists that are put together."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT = datetime.timedelta(seconds=60)  # of the others, where a process hangs; one that dies ends them at once


@contextlib.contextmanager
def processes(parser: argparse.ArgumentParser) -> Iterator[argparse.Namespace]:
    """Read the options with one more, --distributed; inside the context the processes of a launcher are one group.

    They leave together: a process that ends while its group still has threads may abort ("terminate called without an
    active exception"), and one that ends early closes the connections of the others.
    """
    text = "divide the work among the processes that torchrun or accelerate launch started"
    parser.add_argument("--distributed", action="store_true", help=text)
    args = parser.parse_args()
    if args.distributed and "RANK" not in os.environ:
        parser.error("--distributed needs several processes; start the script by torchrun or accelerate launch")
    if not args.distributed and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        parser.error("several processes were started, and each would do all the work; add --distributed")
    if not args.distributed:
        yield args
        return
    on_gpu = args.device.type == "cuda"
    if on_gpu:
        args.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(args.device)
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=TIMEOUT)
    try:
        yield args
        dist.barrier()
    finally:
        dist.destroy_process_group()


def first() -> bool:
    """Whether this process is the one that writes files."""
    return not dist.is_initialized() or dist.get_rank() == 0


def joined(mine: list[Any]) -> list[Any]:
    """Return the lists of all processes as one, in the order of the processes."""
    if not dist.is_initialized():
        return mine
    parts: list[list[Any]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(parts, mine)
    return [item for part in parts for item in part]
