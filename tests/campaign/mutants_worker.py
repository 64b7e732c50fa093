"""The process that forks a child for each mutant; it has imported torch, and not the package."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from types import ModuleType

os.environ.setdefault("OMP_NUM_THREADS", "1")

# What the children need, imported once.
import numpy  # noqa: F401
import pytest  # noqa: F401
import torch
import torch._dynamo
import torch._inductor
import torch.fx.experimental.proxy_tensor
import torch.nn.attention
import torch.nn.utils.parametrizations
import torch.utils.checkpoint

HERE = Path(__file__).parent


def load() -> ModuleType:
    """Import `mutants` without what the package `tests.campaign` imports: a stand-in for `registry` suffices."""
    package = ModuleType("mutation")
    package.__path__ = [str(HERE)]
    sys.modules["mutation"] = package
    stand_in = ModuleType("mutation.registry")
    stand_in.Result = dict
    sys.modules["mutation.registry"] = package.registry = stand_in
    spec = importlib.util.spec_from_file_location("mutation.mutants", HERE / "mutants.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["mutation.mutants"] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    torch.set_num_threads(1)
    mutants = load()
    for name in sys.argv[1:]:
        print(json.dumps([name, *mutants.attempt(None if name == "none" else name)]), flush=True)
