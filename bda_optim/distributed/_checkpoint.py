"""Checkpoints of runs over ranks, by torch.distributed.checkpoint: every rank writes its part, any number may read."""

from __future__ import annotations

import contextlib
import io
import shutil
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from .._support.tree import map_tensors
from ._ranks import place

_PART = ".part"


def save(folder: str | Path, model: nn.Module, optimizers: Optimizer | Iterable[Optimizer], **extra: Any) -> None:
    """Write a checkpoint that `load` finds; an earlier one in `folder` is deleted once the new one is whole.

    All ranks call it together, and see the same file system. Of a module that `fully_shard` has cut up every rank
    writes its own shards; of others each tensor is written once. A run that is killed meanwhile leaves the earlier
    checkpoint.

    Args:
        folder: For checkpoints of this run alone; made if it is not there.
        model: The upper variables, with or without a wrapper for parallelism.
        optimizers: The optimizers of its parameters.
        **extra: What else the run depends on, the same on all ranks: tensors, numbers, strings and containers of them,
            as ``step=7, inner=inner.state_dict()``.
    """
    # They take seconds to import, and few runs need them.
    from torch.distributed.checkpoint import state_dict_saver
    from torch.distributed.checkpoint.state_dict import get_state_dict

    home, rank = Path(folder), place(None)[0]
    before = _complete(home)
    target = home / str(int(before[-1].name) + 1 if before else 1)
    part = target.with_suffix(_PART)
    _together()  # nobody writes before everybody has looked
    if rank == 0:
        shutil.rmtree(part, ignore_errors=True)  # of a run that was killed
        part.mkdir(parents=True)
    _together()
    weights, states = get_state_dict(model, optimizers)
    file = io.BytesIO()
    torch.save(extra, file)
    content = torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)
    with _one_process_will_do():
        state_dict_saver.save({"model": weights, "optimizers": states, "extra": content}, checkpoint_id=part)
    if rank == 0:
        part.rename(target)
        for old in before:
            shutil.rmtree(old, ignore_errors=True)
    _together()


def load(folder: str | Path, model: nn.Module, optimizers: Optimizer | Iterable[Optimizer]) -> dict[str, Any] | None:
    """Take up the last checkpoint in `folder`, whatever the number of ranks that wrote it.

    All ranks call it together. Gradients are cleared. If it fails, the model and the optimizers are as they were. Load
    only what you trust: torch's own index of a checkpoint is a pickle.

    Args:
        folder: As in `save`.
        model: The same model, sharded over any number of ranks or not at all.
        optimizers: The same optimizers.

    Returns:
        What `save` was given as `extra`; None, and nothing is changed, if there is no checkpoint yet.
    """
    from torch.distributed.checkpoint import filesystem, state_dict_loader
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

    found = _complete(Path(folder))
    if not found:
        return None
    all_optimizers = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
    new = [optimizer for optimizer in all_optimizers if not optimizer.state]
    for optimizer in all_optimizers:
        optimizer.zero_grad()  # where there are gradients, torch makes no place for the states of a new optimizer
    try:
        reader = filesystem.FileSystemReader(found[-1])
        index: dict[str, Any] = reader.read_metadata().state_dict_metadata
        weights, states = map_tensors(Tensor.clone, get_state_dict(model, all_optimizers))
        stored = {key.rpartition(".")[0] for key in index}
        # A parameter that never had a gradient has no state.
        states["state"] = {name: s for name, s in states["state"].items() if f"optimizers.state.{name}" in stored}
        state = {"model": weights, "optimizers": states, "extra": torch.empty(index["extra"].size, dtype=torch.uint8)}
        with _one_process_will_do():
            state_dict_loader.load(state, storage_reader=reader)
        extra: dict[str, Any] = torch.load(io.BytesIO(state["extra"].numpy().tobytes()), weights_only=True)
    except BaseException as error:
        for optimizer in new:
            optimizer.state.clear()
        if not isinstance(error, Exception | CheckpointException):  # the latter is none of torch's `Exception`s
            raise
        reason = (str(error).strip().splitlines() or [repr(error)])[-1]
        raise RuntimeError(
            f"the checkpoint {found[-1]} is damaged, or belongs to another model or optimizer; got: {reason} Delete it "
            "to start anew, or pass what it was made with."
        ) from error
    options = StateDictOptions(strict=False)  # for those states; what else is missing has raised by now
    set_state_dict(model, all_optimizers, model_state_dict=weights, optim_state_dict=states, options=options)
    return extra


@contextlib.contextmanager
def _one_process_will_do() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield


def _complete(home: Path) -> list[Path]:
    """Return the checkpoints of a folder, oldest first; what is half written has another name."""
    names = [path for path in home.iterdir() if path.name.isdecimal()] if home.is_dir() else []
    return sorted(names, key=lambda path: int(path.name))


def _together() -> None:
    if place(None)[1] > 1:
        dist.barrier()
