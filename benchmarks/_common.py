"""How the benchmarks measure, print and write.

Time: all contestants run in one process, one after the other in every round, in an order that rotates. What is compared
is CPU time (`time.process_time`), as the median over rounds of the ratio within a round: load from elsewhere hits the
contestants of a round alike. The first call, which compiles, is reported separately, in seconds on the clock.

Memory: every contestant runs in a process of its own. After a warm-up of a few steps (imports, data and compilation are
over then) the peak of the resident memory is reset; what is reported is how far it rises above the value at that point.

One thread and float32 throughout.

On another device (``--device cuda``) a call is timed on the clock, from an idle device to an idle device, and memory is
the peak that the device's allocator reports (`torch.cuda.max_memory_allocated`). JAX stays on the CPU and is left out.
"""

from __future__ import annotations

import os

# Before torch and JAX load; child processes inherit it.
os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", JAX_PLATFORMS="cpu")
os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
os.environ.setdefault("MPLBACKEND", "Agg")

import argparse
import contextlib
import ctypes
import dataclasses
import datetime
import gc
import json
import math
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results"
MIB = 2**20

SAMPLE = 0.05
"""Seconds that one measurement should take at least; quick contestants are called several times."""

TOLERANCE = 1e-3
"""How far a hypergradient in float32 may be from the reference, relative to its norm."""

PACKAGES = ("torch", "higher", "torchopt", "jax", "boat-torch", "learn2learn")
"""Whose versions are recorded."""

Run = Callable[[], Any]

torch.set_num_threads(1)


class Place:
    """Where the benchmarks of this process run."""

    device = torch.device("cpu")

    @classmethod
    def choose(cls, name: str) -> None:
        """Let torch make tensors on a device; exit with a sentence if it is not there."""
        try:
            there = torch.ones(1, device=name).tolist() == [1.0]
        except (RuntimeError, AssertionError, NotImplementedError):  # of torch builds without such a device
            there = False
        if not there:
            sys.exit(f"there is no device {name!r} here; nothing was run.")
        cls.device = torch.ones(1, device=name).device
        if not cls.is_host():  # there it is the default, and to set it costs time in every call of torch
            torch.set_default_device(cls.device)

    @classmethod
    def is_host(cls) -> bool:
        """Whether it is the CPU."""
        return cls.device.type == "cpu"

    @classmethod
    def ask(cls, name: str) -> float:
        """Call a function of the device's module that returns a number of bytes or nothing; NaN if there is none."""
        function = getattr(torch.get_device_module(cls.device), name, None)
        return math.nan if function is None else function() or 0.0


def seconds() -> float:
    """Return the time: the process's own on the CPU, else that of the clock when the device has done its work."""
    if Place.is_host():
        return time.process_time()
    Place.ask("synchronize")
    return time.perf_counter()


@dataclasses.dataclass
class Entry:
    """What was measured of one contestant.

    Attributes:
        name: The contestant.
        first: Seconds on the clock of the first call, compilation included.
        error: The distance to the reference hypergradient, relative to its norm.
        times: Seconds of CPU time of one call, per round.
        memory: Bytes by which the peak rose over the start.
        note: What is to be said about it, such as that it ran uncompiled.
        tolerance: The largest error that is taken for rounding.
    """

    name: str
    first: float = math.nan
    error: float = math.nan
    times: list[float] = dataclasses.field(default_factory=list)
    memory: float = math.nan
    note: str = ""
    tolerance: float = TOLERANCE

    @property
    def time(self) -> float:
        """The median time."""
        return statistics.median(self.times) if self.times else math.nan

    @property
    def agrees(self) -> bool:
        """Whether it returned the right hypergradient."""
        return not self.error > self.tolerance

    def plain(self) -> dict[str, Any]:
        """Return it for JSON."""
        return dict(
            name=self.name,
            first_call_s=round(self.first, 3),
            cpu_ms=round(self.time * 1e3, 4),
            cpu_ms_rounds=[round(t * 1e3, 4) for t in self.times],
            peak_growth_mib=round(self.memory / MIB, 2),
            relative_error=float(f"{self.error:.2e}"),
            note=self.note,
        )


def ratio(entry: Entry, base: Entry) -> float:
    """Return the median over rounds of the ratio of two contestants' times."""
    if not entry.times or not base.times:
        return math.nan
    return statistics.median(a / b for a, b in zip(entry.times, base.times, strict=True))


def options(
    doc: str | None, names: Sequence[str], argv: Sequence[str] | None = None, *, on_cpu: bool = False
) -> argparse.Namespace:
    """Read the command line that all benchmarks share; `on_cpu`: this one runs nowhere else."""
    parser = argparse.ArgumentParser(description=(doc or "").split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=None, help="rounds of timing (default: 15; smoke: 1)")
    parser.add_argument("--only", nargs="+", choices=names, default=list(names), metavar="NAME", help=", ".join(names))
    parser.add_argument("--out", type=Path, default=RESULTS, help="the folder for JSON and PNG files")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, one round: does it run?")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=None, help="(not in smoke)")
    parser.add_argument("--memory", action=argparse.BooleanOptionalAction, default=True, help="measure memory too")
    parser.add_argument("--device", default="cpu", help="where to run: cpu (the default), cuda, mps, xpu")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    Place.choose(args.device)
    if on_cpu and not Place.is_host():
        sys.exit(f"this benchmark runs on the CPU alone; got --device {args.device}. Leave it out.")
    if args.rounds is None:
        args.rounds = 1 if args.smoke else 15
    if args.compile is None:
        args.compile = not args.smoke
    return args


@contextlib.contextmanager
def cold_cache() -> Iterator[None]:
    """Let torch.compile start from an empty cache, so that first calls compile; child processes share it."""
    if "TORCHINDUCTOR_CACHE_DIR" in os.environ:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="bda-benchmarks-", ignore_cleanup_errors=True) as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        try:
            yield
        finally:
            del os.environ["TORCHINDUCTOR_CACHE_DIR"]


def numbers(result: Any) -> np.ndarray:
    """Return a hypergradient (tensors or arrays, in a list or alone) as one vector in float64."""
    parts = result if isinstance(result, list | tuple) else [result]
    arrays = [p.detach().cpu().numpy() if isinstance(p, torch.Tensor) else np.asarray(p) for p in parts]
    return np.concatenate([a.astype(np.float64).ravel() for a in arrays])


def first_calls(
    contestants: dict[str, Run],
    reference: np.ndarray,
    bar: tqdm[Any],
    *,
    biased: tuple[str, ...] = (),
    tolerance: float = TOLERANCE,
) -> dict[str, Entry]:
    """Call every contestant once, and compare what it returns with the reference; `biased` ones may differ."""
    entries = {}
    for name, run in contestants.items():
        bar.set_postfix_str(f"{name}: first call")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            start = time.perf_counter()
            found = numbers(run())
            entry = Entry(name, first=time.perf_counter() - start, tolerance=tolerance)
        entry.error = float(np.linalg.norm(found - reference) / np.linalg.norm(reference))
        entry.note = next((str(w.message) for w in caught if str(w.message).startswith("compile=True")), "")
        if entry.note:
            tqdm.write(f"{name}: {entry.note}", file=sys.stderr)
        if not entry.agrees and not name.startswith(biased):
            tqdm.write(f"{name}: its hypergradient is off by {entry.error:.1e} (relative)", file=sys.stderr)
        entries[name] = entry
        bar.update()
    return entries


def race(contestants: dict[str, Run], entries: dict[str, Entry], rounds: int, bar: tqdm[Any]) -> None:
    """Time the contestants in interleaved rounds; all were called before."""
    names = list(contestants)
    repeats = dict.fromkeys(names, 1)
    if rounds > 1:
        repeats = {name: max(1, math.ceil(SAMPLE / cpu_time(run))) for name, run in contestants.items()}
    for number in range(rounds):
        start = number % len(names)
        for name in names[start:] + names[:start]:
            bar.set_postfix_str(f"{name}: round {number + 1} of {rounds}")
            entries[name].times.append(cpu_time(contestants[name], repeats[name]))
            bar.update()


def cpu_time(run: Run, repeats: int = 1) -> float:
    """Return the time of one call, in seconds; garbage of earlier calls is collected before."""
    gc.collect()
    start = seconds()
    for _ in range(repeats):
        run()
    return (seconds() - start) / repeats


def peak_growth(warm_up: Run, run: Run) -> dict[str, float]:
    """Return by how many bytes the peak of the memory rises in `run`, and its time."""
    warm_up()
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    before = _reset_peak()
    start = seconds()
    run()
    return {"seconds": seconds() - start, "memory": _peak() - before}


def _reset_peak() -> float:
    """Reset the peak where the system allows it (Linux), and return the memory in use now."""
    if not Place.is_host():
        Place.ask("reset_peak_memory_stats")
        return Place.ask("memory_allocated")
    try:
        Path("/proc/self/clear_refs").write_text("5")
        return _status("VmRSS")
    except OSError:
        return _peak()  # the growth over the highest peak so far: too small if the warm-up's was high


def _peak() -> float:
    if not Place.is_host():
        return Place.ask("max_memory_allocated")
    try:
        return _status("VmHWM")
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"no {field}")


def in_child(module: str, *arguments: str, smoke: bool = False) -> dict[str, Any]:
    """Run `module` with ``--child`` in a process of its own, and return what it printed last."""
    where = ["--device", str(Place.device), *(["--smoke"] if smoke else [])]
    command = [sys.executable, "-m", module, *where, "--child", *arguments]
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        tqdm.write(f"{' '.join(arguments)}: {(done.stderr.splitlines() or ['no message'])[-1]}", file=sys.stderr)
        return {"memory": math.nan, "seconds": math.nan}
    return json.loads(done.stdout.splitlines()[-1])


def installed(name: str) -> bool:
    """Whether a peer is there, on the device of this process."""
    if name == "jax" and not Place.is_host():
        return False
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def machine() -> dict[str, str]:
    """Describe where and with what this ran."""
    versions = {n: metadata.version(n) for n in PACKAGES if installed(n)}
    return {
        "date": datetime.date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {_device_name()}, one thread, float32",
        "python": platform.python_version(),
        **versions,
    }


def _device_name() -> str:
    if Place.is_host():
        return "CPU"
    name = getattr(torch.get_device_module(Place.device), "get_device_name", lambda: Place.device.type)()
    return f"{name} (its times are those of the clock)"


def headline() -> str:
    """Return one line for the top of an output."""
    about = machine()
    peers = ", ".join(f"{name} {about[name]}" for name in PACKAGES if name in about)
    return f"{about['date']}; {about['machine']}; {peers}"


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Lay out a table for the terminal: text to the left, numbers to the right."""
    cells = [[_cell(value) for value in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(head, *cells, strict=True)]

    def line(row: Sequence[str]) -> str:
        padded = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        return "  ".join([row[0].ljust(widths[0]), *padded]).rstrip()

    return "\n".join([line(head), *map(line, cells)])


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return "-" if math.isnan(value) else f"{value:.2f}" if abs(value) < 1000 else f"{value:.0f}"
    return str(value)


def verdict(what: str, value: float, limit: float, *, at_least: bool = False) -> dict[str, Any]:
    """Compare a figure with what must be reached."""
    reached = value >= limit if at_least else value <= limit
    return {"what": what, "value": value, "limit": limit, "at_least": at_least, "reached": bool(reached)}


def show_verdicts(verdicts: Sequence[dict[str, Any]], *, smoke: bool) -> str:
    """Return one line per figure that must be reached."""
    if smoke:
        return "(a smoke run: the figures say nothing)"
    lines = []
    for v in verdicts:
        if math.isnan(v["value"]):
            continue
        word = "reached" if v["reached"] else "MISSED "
        lines.append(f"{word}  {v['what']}: {v['value']:.3g} ({'>=' if v['at_least'] else '<='} {v['limit']:g})")
    return "\n".join(lines)


def _without_nan(value: Any) -> Any:
    """Return the same with None for NaN, which JSON does not know."""
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def save(out: Path, name: str, content: dict[str, Any], draw: Callable[[Any], None]) -> None:
    """Write the JSON file and the plot; `draw` gets matplotlib's pyplot."""
    import matplotlib.pyplot as plt

    out.mkdir(parents=True, exist_ok=True)
    text = json.dumps(_without_nan({**machine(), **content}), indent=1, allow_nan=False)
    (out / f"{name}.json").write_text(text + "\n")
    draw(plt)
    plt.savefig(out / f"{name}.png", dpi=120, bbox_inches="tight")
    plt.close("all")
    print(f"\nwritten: {out / f'{name}.json'}, {out / f'{name}.png'}")
