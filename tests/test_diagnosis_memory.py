"""The forecast of memory, against the growth of a process of its own."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from memory import Memory
from torch import Tensor, nn

import bda_optim as bda
from bda_optim._diagnose import module_loop
from bda_optim._diagnosis.memory import step_bytes

ROOT = Path(__file__).resolve().parent.parent
MIB = 2**20

WORKLOAD = """
import ctypes, gc, json, pathlib, sys
import torch
from torch import nn
import bda_optim as bda

name, adjoint, steps = sys.argv[1], getattr(bda, sys.argv[2])(), int(sys.argv[3])
torch.manual_seed(0)
x = torch.zeros(64, requires_grad=True)
if name.startswith("conv"):
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.Tanh(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(16 * 49, 10))
    inputs = torch.randn(64, 3, 16, 16)
else:
    width = 512 if name == "wide" else 256
    model = nn.Sequential(nn.Linear(64, width), nn.Tanh(), nn.Linear(width, 256), nn.Tanh(), nn.Linear(256, 10))
    inputs = torch.randn(64, 64)
targets = torch.randint(0, 10, (64,))

def lower(net, x, batch):
    return (x.sigmoid() * nn.functional.cross_entropy(net(inputs), targets, reduction="none")).mean()

def upper(net, x, batch):
    return nn.functional.cross_entropy(net(inputs.flip(0)), targets)

def status(field):
    return int(pathlib.Path("/proc/self/status").read_text().split(field + ":")[1].split()[0]) * 1024

def run(steps):
    fmodel = inner.unroll(model, lower, upper, hyper=x, steps=steps, adjoint=adjoint)
    torch.autograd.grad(upper(fmodel, x, None), x)

rule = {"rule": torch.optim.Adam} if name == "adam" else {}
inner = bda.BDAInnerOptimizer(model.parameters(), lr=0.01, **rule)
from bda_optim._diagnosis.memory import predicted
from bda_optim._diagnose import module_loop
loop = module_loop(inner, model, lower, upper, steps=steps, hyper=x, params=None, batches=None, upper_batch=None,
                   copy_initial_weights=True, master=None)()
found = predicted(loop, steps, 64)[sys.argv[2]]
run(2)
gc.collect()
ctypes.CDLL("libc.so.6").malloc_trim(0)
pathlib.Path("/proc/self/clear_refs").write_text("5")
before = status("VmRSS")
run(steps)
print(json.dumps([found, status("VmHWM") - before]))
"""


def test_the_bytes_of_a_graph() -> None:
    """Against all bytes that operations make and keep, counted from outside; data and upper variables do not count."""
    model = nn.Sequential(nn.Linear(20, 60), nn.Tanh(), nn.Linear(60, 5)).double()
    inputs, targets = torch.randn(40, 20, dtype=torch.float64), torch.randn(40, 5, dtype=torch.float64)
    x = torch.zeros(40, 1, dtype=torch.float64, requires_grad=True)

    def lower(net: nn.Module, x: Tensor, batch: object) -> Tensor:
        return (x.sigmoid() * (net(inputs) - targets) ** 2).mean()

    inner = bda.BDAInnerOptimizer(model.parameters(), lr=0.1)
    options = {"params": None, "batches": None, "upper_batch": None, "copy_initial_weights": True, "master": None}
    loop = module_loop(inner, model, lower, lower, steps=30, hyper=x, **options)()
    live = []
    for steps in (10, 30):
        with Memory() as memory:
            fmodel = inner.unroll(model, lower, hyper=x, steps=steps)
            gc.collect()
            live.append(memory.now)
            del fmodel
    assert step_bytes(loop) == pytest.approx((live[1] - live[0]) / 20, rel=0.02)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak of memory is reset by Linux's /proc")
@pytest.mark.parametrize(
    ("workload", "adjoint", "steps"),
    [
        ("mlp", "Unroll", 100), ("mlp", "Checkpointed", 400), ("wide", "Unroll", 50), ("wide", "Checkpointed", 200),
        ("adam", "Unroll", 60), ("adam", "Checkpointed", 150), ("conv", "Unroll", 60), ("conv", "Checkpointed", 200),
    ],
)  # fmt: skip
def test_forecasts(workload: str, adjoint: str, steps: int, tmp_path: Path) -> None:
    script = tmp_path / "workload.py"
    script.write_text(WORKLOAD, encoding="utf-8")
    command = [sys.executable, str(script), workload, adjoint, str(steps)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    forecast, measured = json.loads(done.stdout)
    assert measured > 16 * MIB
    assert measured / 1.35 < forecast < 1.35 * measured
