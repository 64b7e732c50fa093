"""Recorded results as Markdown: the tables and numbers of the pages, and those of the README.

    python docs/_ext/tables.py            # write the README's numbers anew, from benchmarks/results

Every number comes from a JSON file that a benchmark, an example or the campaign has written.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from experiments import experiment, hyperopt_difference, script
from records import ABSENT, BENCHMARKS, CAMPAIGN, EXPERIMENTS, README, number, read, table

# --- benchmarks -------------------------------------------------------------------------------------------------------


def entries(name: str, workload: str) -> dict[str, dict[str, Any]]:
    """Return what was measured of one workload, by contestant."""
    found = next(w for w in read(BENCHMARKS / f"{name}.json")["workloads"] if w["name"] == workload)
    return {entry["name"]: entry for entry in found["entries"]}


WORKLOADS = {
    "mlp": "MLP 64-256-256-10, K = 50",
    "softmax": "softmax regression, K = 20",
    "conv": "conv net, 25 images, K = 5",
    "conv_75": "conv net, 75 images, K = 5",
    "transformer": "transformer, K = 10",
    "maml": "MAML, net of 24 units, K = 5",
    "mlp_bda": "MLP, BDA, K = 50",
    "counterexample": "counter-example, alpha = 0, K = 64",
    "counterexample_bda": "counter-example, BDA, K = 64",
}


def peers() -> str:
    """Return the time of one hypergradient over that of higher; this library's columns come first."""
    found = {work["name"]: work["entries"] for work in read(BENCHMARKS / "against_peers.json")["workloads"]}
    ratios = {name: {e["name"]: e["ratio"] for e in found[name]} for name in WORKLOADS if name in found}
    order = list(dict.fromkeys(e["name"] for name in ratios for e in found[name] if e["name"] != "higher"))
    columns = sorted(order, key=lambda who: "ours" not in who)
    rows = [[WORKLOADS[name], *(number(row.get(who)) for who in columns)] for name, row in ratios.items()]
    return table(["time over that of higher", *map(_short, columns)], rows)


def _short(name: str) -> str:
    """Write a contestant as the pages write it."""
    return re.sub(r"^ours, ([^,]+)", r"`\1`", name).replace("JAX jit+scan", "JAX")


def _first_calls() -> dict[str, dict[str, dict[str, Any]]]:
    """Return the first calls that were recorded: workload -> contestant -> entry; none before the first record."""
    path = BENCHMARKS / "first_call.json"
    found = read(path)["workloads"] if path.exists() else []
    return {work["name"]: {entry["name"]: entry for entry in work["entries"]} for work in found}


def first_calls() -> str:
    """Return how long the first compiled call takes: with an empty cache, and in a second process."""
    titles = {**WORKLOADS, "heads": "32 linear heads, K = 20"}
    rows = []
    for name, entries in _first_calls().items():
        mine, jax = entries["ours, compiled"], entries.get("JAX jit+scan")
        seconds = [mine["cold"]["seconds"], mine["second"]["seconds"], jax and jax["cold"]["seconds"]]
        rows.append([titles[name], *(number(value, 1) for value in seconds)])
    return table(["seconds of the first call", "empty cache", "second process", "JAX"], rows) if rows else ABSENT


def _first_call_range() -> str:
    cold = [entries["ours, compiled"]["cold"]["seconds"] for entries in _first_calls().values()]
    return f"{min(cold):.0f} to {max(cold):.0f} seconds" if cold else "seconds to minutes"


def memory() -> str:
    """Return the growth of memory with K, beside higher and torchopt."""
    part = next(p for p in read(BENCHMARKS / "memory_vs_k.json")["parts"] if p["name"] == "memory")
    rows = [[_short(name), *(number(v, 0) for v in grown)] for name, grown in part["peak_growth_mib"].items()]
    return table(["peak growth, MiB", *(f"K = {k}" for k in part["steps"])], rows)


def adjoints() -> str:
    """Return memory and time of each adjoint against K."""
    found = read(BENCHMARKS / "adjoints_vs_k.json")
    lengths = found["steps"]
    head = ["adjoint", *(f"MiB, K = {k}" for k in lengths), *(f"time, K = {k}" for k in lengths)]
    rows = [
        [f"`{name}`", *(number(v, 1) for v in row["peak_growth_mib"]), *(number(v) for v in row["time"])]
        for name, row in found["adjoints"].items()
    ]
    return table(head, rows)


def large_models() -> str:
    """Return memory and time of a hypergradient of GPT-2 over those of `Checkpointed(slots=4)`."""
    path = BENCHMARKS / "large_models.json"
    rows = [
        [f"`{e['name']}`", part["name"], number(e["peak_growth_mib"], 0)]
        + [number(e[key]) for key in ("memory_over_exact", "time_over_exact")]
        for part in (read(path)["parts"] if path.exists() else [])
        for e in part.get("entries", ())
    ]
    head = ["adjoint", "rule", "peak growth, MiB", "over `Checkpointed(slots=4)`", "time over its time"]
    return table(head, rows, text_columns=2) if rows else ABSENT


def tasks() -> str:
    """Return how many times faster tasks run at once than one after the other with higher."""
    titles = {
        "heads": "32 linear heads, 5-way 1-shot, K = 20",
        "mlps": "16 MLPs, 10-way 1-shot, K = 5",
        "mlps_5_shot": "16 MLPs, 10-way 5-shot, K = 5",
    }
    names = ("ours, tasks=B", "ours, tasks=B, compiled", "JAX jit+vmap+scan")
    rows = []
    for workload, title in titles.items():
        found = entries("tasks", workload)
        rows.append([title, *(number(found[name]["times_faster"], 1) if name in found else "-" for name in names)])
    return table(["times as fast as a loop over higher", "`tasks=B`", "`tasks=B`, compiled", "JAX"], rows)


def implicit() -> str:
    """Return the error of implicit solvers on problems whose hypergradient is known."""
    found = read(BENCHMARKS / "implicit_peers.json")["errors"]
    problems = list(next(iter(found.values())))

    def cell(value: float | str | None) -> str:
        return "fails" if value is None or isinstance(value, str) else f"{value:.0e}"

    return table(["relative error", *problems], [[name, *map(cell, row.values())] for name, row in found.items()])


def recorded_on(name: str) -> str:
    """Return when and on what a benchmark ran."""
    about = read(BENCHMARKS / f"{name}.json")
    return f"*Recorded on {about['date']}: {about['machine']}; torch {about['torch']}.*"


# --- reliability ------------------------------------------------------------------------------------------------------


def _outcomes(result: Mapping[str, Any]) -> str:
    found = dict(result["outcomes"])
    alone = {key.removeprefix("torch alone: "): found.pop(key) for key in list(found) if key.startswith("torch alone")}
    words = {"zero": "zero by definition", "diverged": "diverged in both loops", "kink": "too rough for differences"}
    found["right"] += found.pop("right, compiled", 0)
    text = ", ".join(f"{count:,} {words.get(name, name)}" for name, count in found.items())
    return text + (f" (torch alone: {', '.join(f'{count} {name}' for name, count in alone.items())})" if alone else "")


def _campaign() -> dict[str, tuple[str, Callable[[Any], str]]]:
    return {
        "fuzz": ("random configurations against a naive loop and finite differences", _outcomes),
        "fuzz_later": ("the same, with the options of version 0.2", _outcomes),
        "compiled": (
            "random configurations, really compiled, against a naive loop",
            lambda r: f"{len(r['failures'])} wrong; {r['outcomes']['uncompiled']} more ran uncompiled, after a warning",
        ),
        "mutants": ("faults put into the package on purpose", lambda r: f"{r['caught']} caught by the tests"),
        "layers": ("layers and functions of `torch.nn` in an inner loop", _outcomes),
        "awkward": ("awkward modules: tied, shared, frozen, hooked, parametrized", _outcomes),
        "faults": (
            "errors raised at every step, in both losses, their gradients and the backward pass",
            lambda r: f"{len(r['failures'])} changes of module, optimizer, `.grad` or global state",
        ),
        "interrupts": (
            "Ctrl-C at lines of the library and by signals",
            lambda r: f"{len(r['failures'])} changes; parameters identical",
        ),
        "kills": ("SIGKILL while a checkpoint is saved", lambda r: f"{len(r['failures'])} damaged files"),
        "threads": ("uses of one module and one optimizer by several threads", lambda r: f"{r['wrong']} wrong"),
        "memory": (
            "upper iterations without the garbage collector",
            lambda r: (
                f"{max(s['cyclic'] for s in r['styles'].values())} cyclic objects; the process grew by at most "
                f"{max(s['grown'] for s in r['styles'].values()):.2f} MB"
            ),
        ),
    }


def reliability() -> str:
    """Return what the campaign tried, and what came of it."""
    rows = []
    for name, (title, result) in _campaign().items():
        found = read(CAMPAIGN / f"{name}.json")
        tried = found["outcomes"]["compiled"] if name == "compiled" else found["count"]
        rows.append([title, f"{tried:,}", result(found)])
    head = ["what", "tried", "result"]
    return table(head, rows).replace("|---:|---:|", "|---:|---|").replace("| ---: | ---: |", "| ---: | --- |")


def versions() -> str:
    """Return the versions of torch and Python on which the core tests ran."""
    path = CAMPAIGN / "versions.json"
    found = sorted(read(path).values(), key=_order) if path.exists() else []
    rows = [
        [
            row["torch"],
            row["python"],
            f"{row['passed']:,}",
            str(sum(row["skipped"].values())),
            str(len(row["failures"])),
        ]
        for row in found
    ]
    return table(["torch", "Python", "passed", "skipped", "failed"], rows) if rows else ABSENT


def _order(row: Mapping[str, Any]) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", row["torch"].split("+")[0] + "." + row["python"])]


def compositions() -> str:
    """Return which adjoint works with which option; tests/test_composition.py checks every entry."""
    composition = script("composition")
    return composition.table(composition.entry)


# --- what pages and the README ask for --------------------------------------------------------------------------------

TABLES: dict[str, Callable[[], str]] = {
    "adjoints": adjoints,
    "compositions": compositions,
    "first calls": first_calls,
    "hyperopt difference": hyperopt_difference,
    "implicit": implicit,
    "large models": large_models,
    "memory": memory,
    "peers": peers,
    "reliability": reliability,
    "tasks": tasks,
    "versions": versions,
}


FILES = {
    "adjoints": "adjoints_vs_k",
    "first calls": "first_call",
    "implicit": "implicit_peers",
    "large models": "large_models",
    "memory": "memory_vs_k",
    "peers": "against_peers",
    "tasks": "tasks",
}
"""The benchmark behind a table; the page says when it ran, and on what."""


def sources(name: str) -> list[Path]:
    """Return the files of examples/results whose names match."""
    return [] if name in TABLES else sorted(EXPERIMENTS.glob(f"{name}.json"))


def markdown(name: str) -> str:
    """Return the table of that name, or those of every recorded run that matches."""
    if name in TABLES:
        text = TABLES[name]()
        return f"{text}\n\n{recorded_on(FILES[name])}" if name in FILES and text != ABSENT else text
    found = sources(name)
    return "\n\n".join(map(experiment, found)) if found else ABSENT


def _grown(name: str, steps: int) -> float:
    part = next(p for p in read(BENCHMARKS / "memory_vs_k.json")["parts"] if p["name"] == "memory")
    return part["peak_growth_mib"][name][part["steps"].index(steps)]


def _bda_cost(mode: str) -> float:
    found = entries("against_peers", "aggregation")
    return found[f"ours, {mode}, BDA"]["cpu_ms"] / found[f"ours, {mode}, alpha=0"]["cpu_ms"]


def _ratio(workload: str, name: str) -> float:
    return entries("against_peers", workload)[name]["ratio"]


NUMBERS: dict[str, Callable[[], str]] = {
    "mlp eager": lambda: number(_ratio("mlp", "ours, Unroll")),
    "mlp compiled": lambda: number(_ratio("mlp", "ours, Unroll, compiled")),
    "memory higher": lambda: f"{_grown('higher', 1000):.0f} MiB",
    "memory checkpointed": lambda: f"{_grown('ours, Checkpointed', 1000):.0f} MiB",
    "memory ratio": lambda: f"{_grown('higher', 1000) / _grown('ours, Checkpointed', 1000):.0f}",
    "checkpointed eager": lambda: number(_ratio("mlp", "ours, Checkpointed")),
    "heads compiled": lambda: number(entries("tasks", "heads")["ours, tasks=B, compiled"]["times_faster"], 0),
    "heads eager": lambda: number(entries("tasks", "heads")["ours, tasks=B"]["times_faster"], 0),
    "bda eager": lambda: number(_bda_cost("Unroll"), 1),
    "bda compiled": lambda: number(_bda_cost("Unroll, compiled"), 1),
    "conv compiled": lambda: number(_ratio("conv", "ours, Unroll, compiled")),
    "first call": _first_call_range,
    "jax compiled": lambda: number(
        entries("against_peers", "mlp")["ours, Unroll, compiled"]["cpu_ms"]
        / entries("against_peers", "mlp")["JAX jit+scan"]["cpu_ms"],
        1,
    ),
}


def measured() -> str:
    """Return the numbers of the README: three ratios, and what they cost."""
    n = {name: number() for name, number in NUMBERS.items()}
    ratios = [
        ["time of one hypergradient, MLP, K = 50", f"{n['mlp eager']} of its time; compiled {n['mlp compiled']}"],
        ["memory, MLP, K = 1000, `Checkpointed()`", f"{n['memory checkpointed']} instead of {n['memory higher']}"],
        ["32 few-shot heads, `tasks=32`", f"{n['heads eager']} times as fast; compiled {n['heads compiled']} times"],
    ]
    costs = [
        f"It has its costs. `Checkpointed()` takes {n['checkpointed eager']} times as long as `higher`.",
        f"A step with `alpha > 0` takes {n['bda eager']} times as long as one without.",
        f"The first compiled call takes {n['first call']}.",
    ]
    if float(n["conv compiled"]) > 1:
        costs.append(f"A compiled convolutional network takes {n['conv compiled']} times as long as with `higher`.")
    if float(n["jax compiled"]) > 1:
        costs.append(f"The compiled MLP takes {n['jax compiled']} times as long as with JAX.")
    rows = table(["against `higher`, one CPU thread", ""], ratios)
    return rows + "\n\n" + textwrap.fill(" ".join(costs), 120, break_long_words=False, break_on_hyphens=False)


MARKED = re.compile(r"(<!-- measured -->\n).*?(<!-- /measured -->)", re.DOTALL)


def readme() -> str:
    """Return the README with its numbers as they are recorded now."""
    return MARKED.sub(lambda m: f"{m[1]}{measured()}\n{m[2]}", README.read_text("utf-8"))


if __name__ == "__main__":
    README.write_text(readme(), "utf-8")
