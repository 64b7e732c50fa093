"""What do `accumulate` and `Differences` save where the inner model is a transformer, and what does a loop cost there?

    python -m benchmarks.large_models

Latest output (another benchmark ran on the other core):

2026-11-18; x86_64, 2 cores, CPU, one thread, float32; torch 2.13.0+cpu,
transformers 5.23.0; malloc: glibc 2.36, as it is

GPT-2, SGD, K=16                            peak growth MiB  x exact  CPU s  x exact  error  1 - cos
Unroll()                                               6417     7.24  15.10     0.87  0e+00  0.0e+00
Checkpointed(slots=4)                                885.88     1.00  17.36     1.00  0e+00  0.0e+00
Checkpointed(slots=4), accumulate=4                  313.69     0.35  21.08     1.21  1e-05  3.2e-11
Checkpointed(slots=4), accumulate=8                  236.11     0.27  24.48     1.41  7e-06  6.9e-12
Differences, fused                                   364.52     0.41  14.61     0.84  2e-03  2.9e-06
Differences, fused, every state                      481.25     0.54  11.83     0.68  2e-03  2.9e-06
Differences, fused, accumulate=8                     177.80     0.20  20.44     1.18  3e-03  3.3e-06
Differences, fused, activation checkpoints           311.88     0.35  18.94     1.09  2e-03  2.9e-06

GPT-2, AdamW(eps=1e-5), K=16                peak growth MiB  x exact  CPU s  x exact  error  1 - cos
Unroll()                                               6391     6.95  15.94     0.85  0e+00  1.1e-16
Checkpointed(slots=4)                                920.18     1.00  18.66     1.00  0e+00  1.1e-16
Checkpointed(slots=4), accumulate=4                  464.15     0.50  23.15     1.24  3e-05  4.8e-10
Checkpointed(slots=4), accumulate=8                  397.79     0.43  26.55     1.42  4e-05  5.5e-10
Differences, fused                                   521.57     0.57  15.97     0.86  4e-03  6.5e-06
Differences, fused, every state                      810.97     0.88  12.11     0.65  4e-03  6.5e-06
Differences, fused, accumulate=8                     339.67     0.37  20.39     1.09  3e-03  4.5e-06
Differences, fused, activation checkpoints           488.63     0.53  19.93     1.07  4e-03  6.5e-06

2 layers, width 64, 4 x 32, K=10  by hand, CPU ms  Unroll(), CPU ms  x by hand  error
BERT                                       157.32            154.17       0.95  2e-07
Llama                                      166.49            169.03       0.99  2e-07
GPT-2, one block                            87.74             98.84       1.15  1e-07
GPT-2, all                                 162.50            166.66       0.98  4e-07

reached  accumulate=8, memory / exact: 0.267 (<= 0.3)
reached  accumulate=8, memory / Unroll: 0.0368 (<= 0.05)
reached  accumulate=8, time / exact: 1.41 (<= 1.5)
reached  accumulate=4, time / exact: 1.21 (<= 1.3)
reached  Differences, time / exact: 0.841 (<= 0.85)
reached  Differences, memory / exact: 0.411 (<= 0.7)
MISSED   Differences, every state, time / exact: 0.683 (<= 0.65)
reached  Differences, accumulate=8, memory / exact: 0.201 (<= 0.5)
reached  Differences, activation checkpoints, memory / exact: 0.352 (<= 0.5)
reached  Differences, 1 - cos: 3.3e-06 (<= 1e-05)
reached  BERT: Unroll / by hand: 0.945 (<= 1.05)
reached  Llama: Unroll / by hand: 0.988 (<= 1.05)
MISSED   GPT-2, one block: Unroll / by hand: 1.15 (<= 1.05)
reached  GPT-2, all: Unroll / by hand: 0.975 (<= 1.05)

Missed: with every state stored `Differences` takes 0.68 of the exact time instead of 0.65. Where one block of GPT-2 is
adapted, `Unroll` takes 1.15 of the loop by hand; an earlier run of three rounds on a busy machine gave 0.97, so this
row wants a repetition before a reason is looked for.

The first two tables: data weights for a GPT-2 (8 layers, width 128, vocabulary 256, batches of 8 x 128), K = 16, the
upper loss on one row. Every row of a table is a fresh process per round, in turns: the growth of its resident memory
after a warm-up of two steps, and the CPU time of one hypergradient. "exact" is `Checkpointed(slots=4)`. "fused" is what
`Differences` may use and the others may not: attention without a second derivative.

The last table: eager `Unroll` against the loop that one writes by hand with `torch.func.functional_call`, K = 10, both
in one process in turns.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import math
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from tqdm import tqdm

import bda_optim as bda

from . import _common
from ._common import Entry, ratio

WORDS = 256
SLOTS = 4
WARM_UP = 2
"""Steps of the warm-up: kernels are chosen, and `Differences` has looked at the losses."""


@dataclasses.dataclass(frozen=True)
class Way:
    """How a hypergradient is obtained."""

    adjoint: bda.Adjoint
    accumulate: int = 1
    checkpoints: bool = False


EXACT = f"Checkpointed(slots={SLOTS})"
STORED = bda.Checkpointed(slots=SLOTS)
WAYS: dict[str, Way] = {
    "Unroll()": Way(bda.Unroll()),
    EXACT: Way(STORED),
    f"{EXACT}, accumulate=4": Way(STORED, 4),
    f"{EXACT}, accumulate=8": Way(STORED, 8),
    "Differences, fused": Way(bda.Differences(within=STORED)),
    "Differences, fused, every state": Way(bda.Differences(within=bda.Checkpointed(every=1))),
    "Differences, fused, accumulate=8": Way(bda.Differences(within=STORED), 8),
    "Differences, fused, activation checkpoints": Way(bda.Differences(within=STORED), checkpoints=True),
}
"""In the order of the tables; `Differences` stores states as the exact adjoint does, unless it says otherwise."""

SMOKE = (EXACT, f"{EXACT}, accumulate=8", "Differences, fused, activation checkpoints")

RULES: dict[str, dict[str, Any]] = {
    "SGD": dict(lr=0.1),
    "AdamW(eps=1e-5)": dict(lr=1e-3, rule=torch.optim.AdamW, eps=1e-5),
}
ROUNDS = {"SGD": 2, "AdamW(eps=1e-5)": 1}


def gpt2(layers: int, width: int, length: int) -> nn.Module:
    import transformers

    drop = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    sizes = dict(vocab_size=WORDS, n_layer=layers, n_embd=width, n_head=max(2, width // 32), n_positions=length)
    also = dict(use_cache=False, bos_token_id=0, eos_token_id=0)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **drop, **also))


def llama(layers: int, width: int, length: int) -> nn.Module:
    import transformers

    heads = dict(num_attention_heads=max(2, width // 32), num_key_value_heads=1, max_position_embeddings=length)
    sizes = dict(vocab_size=WORDS, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads, use_cache=False))


def bert(layers: int, width: int, length: int) -> nn.Module:
    import transformers

    drop = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    sizes = dict(vocab_size=WORDS, hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers)
    also = dict(num_attention_heads=max(2, width // 32), max_position_embeddings=length)
    return transformers.BertForMaskedLM(transformers.BertConfig(**sizes, **drop, **also))


def text(rows: int, length: int, first: int = 0) -> dict[str, Tensor]:
    """Words that a model can learn: each is at most three further than the one before; and the numbers of the rows."""
    generator = torch.Generator().manual_seed(first)
    start = torch.randint(WORDS, (rows, 1), generator=generator)
    words = (start + torch.randint(4, (rows, length), generator=generator).cumsum(1)) % WORDS
    return {"words": words, "row": torch.arange(first, first + rows)}


def lower(net: Any, weights: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """The mean over rows of a weight times the loss of the row."""
    logits = net(input_ids=batch["words"]).logits[:, :-1]
    losses = F.cross_entropy(logits.transpose(1, 2), batch["words"][:, 1:], reduction="none").mean(1)
    return (2 * torch.sigmoid(weights[batch["row"]]) * losses).mean()


def upper(net: Any, batch: dict[str, Tensor]) -> Tensor:
    """The model's own loss on one row."""
    return net(input_ids=batch["words"][:1], labels=batch["words"][:1]).loss


class Problem:
    """Data weights for a language model, some of whose parameters are adapted."""

    def __init__(self, model: nn.Module, adapted: str, steps: int, rows: int, length: int) -> None:
        """Make the batches; parameters whose name starts with `adapted` are."""
        self.model = model
        self.adapted = {n: p for n, p in model.named_parameters() if n.startswith(adapted)}
        for name, p in model.named_parameters():
            p.requires_grad_(name in self.adapted)
        self.batches = [text(rows, length, rows * k) for k in range(steps)]
        self.held_out = text(1, length, rows * steps)
        self.weights = torch.zeros(rows * steps, requires_grad=True)

    def ours(self, way: Way, rule: dict[str, Any], steps: int) -> Tensor:
        """Return the hypergradient through the library."""
        inner = bda.BDAInnerOptimizer(self.adapted.values(), **rule)
        options = {"accumulate": way.accumulate} if way.accumulate > 1 else {}
        net = inner.unroll(
            self.model, lower, hyper=self.weights, steps=steps, batches=self.batches[:steps],
            adjoint=way.adjoint, **options,
        )  # fmt: skip
        return torch.autograd.grad(upper(net, self.held_out), self.weights)[0]

    def by_hand(self, rule: dict[str, Any], steps: int) -> Tensor:
        """Return the same through a loop of plain descent, as one writes it with torch alone."""
        y = {name: p.detach().clone().requires_grad_() for name, p in self.adapted.items()}

        def net(**inputs: Any) -> Any:
            return functional_call(self.model, y, (), inputs)

        with sdpa_kernel(SDPBackend.MATH):
            for batch in self.batches[:steps]:
                grads = torch.autograd.grad(lower(net, self.weights, batch), list(y.values()), create_graph=True)
                y = {name: p - rule["lr"] * g for (name, p), g in zip(y.items(), grads, strict=True)}
            return torch.autograd.grad(upper(net, self.held_out), self.weights)[0]


def large(smoke: bool, checkpoints: bool = False) -> Problem:
    """The GPT-2 of the first tables."""
    torch.manual_seed(0)
    layers, width, steps, length = (1, 16, 4, 8) if smoke else (8, 128, 16, 128)
    model = gpt2(layers, width, length)
    if checkpoints:  # in training mode only; there is no dropout
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
        model.train()
    return Problem(model, "", steps, 8, length)


def child(args: Any) -> None:
    """Measure one way under one rule, in this process alone; the hypergradient goes into a file."""
    name, rule, file = args.child
    way = WAYS[name]
    problem = large(args.smoke, way.checkpoints)
    found: list[Tensor] = []

    def run(steps: int) -> None:
        found[:] = [problem.ours(way, RULES[rule], steps)]

    growth = _common.peak_growth(lambda: run(WARM_UP), lambda: run(len(problem.batches)))
    np.save(file, found[0].numpy())
    print(json.dumps(growth))


def measured(args: Any, rule: str, bar: tqdm[Any]) -> dict[str, Entry]:
    """Run every way in processes of its own; return growth, times and errors."""
    names = [name for name in WAYS if not args.smoke or name in SMOKE]
    entries = {name: Entry(name, memory=math.nan) for name in names}
    rounds = 1 if args.smoke else ROUNDS[rule]
    found: dict[str, np.ndarray] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds):
            for name in names[number % len(names) :] + names[: number % len(names)]:
                bar.set_postfix_str(f"{rule}, {name}: round {number + 1} of {rounds}")
                file = Path(folder) / f"{names.index(name)}.npy"
                got = _common.in_child("benchmarks.large_models", name, rule, str(file), smoke=args.smoke)
                entries[name].times.append(got["seconds"])
                entries[name].memory = max(got["memory"], entries[name].memory) if number else got["memory"]
                if file.exists():
                    found[name] = np.load(file).astype(np.float64)
                bar.update()
    exact = found[EXACT]
    for name, grad in found.items():
        entries[name].error = float(np.linalg.norm(grad - exact) / np.linalg.norm(exact))
        cosine = float(grad @ exact / (np.linalg.norm(grad) * np.linalg.norm(exact)))
        entries[name].note = f"{max(0.0, 1 - cosine):.1e}"
    return entries


def saving(args: Any, rule: str, bar: tqdm[Any]) -> dict[str, Any]:
    """Compare memory, time and errors on the large GPT-2."""
    entries = measured(args, rule, bar)
    base = entries[EXACT]
    head = [f"GPT-2, {rule}, K=16", "peak growth MiB", "x exact", "CPU s", "x exact", "error", "1 - cos"]
    rows = [
        [n, e.memory / _common.MIB, e.memory / base.memory, e.time, ratio(e, base), f"{e.error:.0e}", e.note]
        for n, e in entries.items()
    ]
    return {
        "name": rule,
        "table": _common.table(head, rows),
        "entries": [
            {
                **e.plain(),
                "memory_over_exact": e.memory / base.memory,
                "time_over_exact": ratio(e, base),
                "one_minus_cosine": float(e.note or "nan"),
            }
            for e in entries.values()
        ],
        "verdicts": limits(entries, base) if rule == "SGD" and not args.smoke else [],
        "agree": all(not e.error > 0.05 for e in entries.values()),
    }


def limits(entries: dict[str, Entry], base: Entry) -> list[dict[str, Any]]:
    """Compare with what must be reached under SGD."""
    four, eight = (entries[f"{EXACT}, accumulate={parts}"] for parts in (4, 8))
    plain, every, parts, recomputed = (e for name, e in entries.items() if name.startswith("Differences"))
    found = [
        ("accumulate=8, memory / exact", eight.memory / base.memory, 0.3),
        ("accumulate=8, memory / Unroll", eight.memory / entries["Unroll()"].memory, 1 / 20),
        ("accumulate=8, time / exact", ratio(eight, base), 1.5),
        ("accumulate=4, time / exact", ratio(four, base), 1.3),
        ("Differences, time / exact", ratio(plain, base), 0.85),
        ("Differences, memory / exact", plain.memory / base.memory, 0.7),
        ("Differences, every state, time / exact", ratio(every, base), 0.65),
        ("Differences, accumulate=8, memory / exact", parts.memory / base.memory, 0.5),
        ("Differences, activation checkpoints, memory / exact", recomputed.memory / base.memory, 0.5),
        ("Differences, 1 - cos", max(float(e.note) for e in (plain, every, parts, recomputed)), 1e-5),
    ]
    return [_common.verdict(*line) for line in found]


LOOPS: dict[str, tuple[Callable[..., nn.Module], str]] = {
    "BERT": (bert, ""),
    "Llama": (llama, ""),
    "GPT-2, one block": (gpt2, "transformer.h.1."),
    "GPT-2, all": (gpt2, ""),
}
"""A model, and how the names of its adapted parameters start."""


def loops(args: Any, bar: tqdm[Any]) -> dict[str, Any]:
    """Time eager `Unroll` and the loop by hand, in turns."""
    layers, width, steps, length = (2, 16, 2, 8) if args.smoke else (2, 64, 10, 32)
    rows, plain, verdicts, agree = [], [], [], True
    for name, (make, adapted) in LOOPS.items():
        torch.manual_seed(0)
        problem = Problem(make(layers, width, length).eval(), adapted, steps, 4, length)
        rule = RULES["SGD"]
        runs = {
            "by hand": functools.partial(problem.by_hand, rule, steps),
            "Unroll()": functools.partial(problem.ours, Way(bda.Unroll()), rule, steps),
        }
        entries = _common.first_calls(runs, _common.numbers(problem.by_hand(rule, steps)), bar)
        _common.race(runs, entries, args.rounds, bar)
        hand, ours = entries.values()
        quotient = ratio(ours, hand)
        agree = agree and ours.agrees
        rows.append([name, hand.time * 1e3, ours.time * 1e3, quotient, f"{ours.error:.0e}"])
        plain.append({"model": name, "unroll_over_by_hand": quotient, "entries": [hand.plain(), ours.plain()]})
        verdicts.append(_common.verdict(f"{name}: Unroll / by hand", quotient, 1.05))
    title = f"{layers} layers, width {width}, 4 x {length}, K={steps}"
    head = [title, "by hand, CPU ms", "Unroll(), CPU ms", "x by hand", "error"]
    table = _common.table(head, rows)
    return {"name": "loops", "table": table, "models": plain, "verdicts": verdicts, "agree": agree}


PARTS: dict[str, Callable[..., dict[str, Any]]] = {
    **{rule: functools.partial(saving, rule=rule) for rule in RULES},
    "loops": loops,
}


def malloc() -> str:
    """Say which allocator the memory was measured with."""
    set_by_hand = {k: v for k, v in os.environ.items() if k.startswith(("MALLOC_", "LD_PRELOAD", "GLIBC_TUNABLES"))}
    return f"{' '.join(platform.libc_ver()) or platform.system()}, {set_by_hand or 'as it is'}"


def draw(results: Sequence[dict[str, Any]], plt: Any) -> None:
    """Time against memory."""
    _, axis = plt.subplots(figsize=(6, 4.5))
    for result in results:
        for e in result.get("entries", ()):
            mark = "o" if result["name"] == "SGD" else "s"
            axis.plot(e["peak_growth_mib"], e["cpu_ms"] / 1e3, mark, label=f"{e['name']}; {result['name']}")
    axis.set(xscale="log", yscale="log", xlabel="peak growth, MiB", ylabel="CPU s", title="GPT-2, K=16")
    if axis.lines:
        axis.legend(fontsize=6, bbox_to_anchor=(1, 1))


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, write; with ``--only`` the other tables stay as they were written before."""
    args = _common.options(__doc__, list(PARTS), argv)
    if importlib.util.find_spec("transformers") is None:
        print("transformers is not installed; `pip install bda_optim[transformers]`", file=sys.stderr)
        return 0
    if args.child:
        child(args)
        return 0
    ways = len(SMOKE) if args.smoke else len(WAYS)
    sizes = {rule: ways * (1 if args.smoke else rounds) for rule, rounds in ROUNDS.items()}
    sizes["loops"] = 2 * len(LOOPS) * (1 + args.rounds)
    results = []
    with tqdm(total=sum(sizes[name] for name in args.only), disable=None) as bar:
        for name in args.only:
            bar.set_description(name)
            results.append(PARTS[name](args, bar=bar))
    about = {"malloc": malloc(), "transformers": metadata.version("transformers")}
    print(f"{_common.headline()}, transformers {about['transformers']}; malloc: {about['malloc']}")
    for result in results:
        print("\n" + result.pop("table"))
    print("\n" + _common.show_verdicts([v for r in results for v in r["verdicts"]], smoke=args.smoke))
    file = args.out / "large_models.json"
    before = json.loads(file.read_text("utf-8"))["parts"] if file.exists() else []
    known = {part["name"]: part for part in (*before, *results)}
    parts = [known[name] for name in PARTS if name in known]
    _common.save(args.out, "large_models", {**about, "parts": parts}, functools.partial(draw, parts))
    return 0 if all(r["agree"] for r in results) else 1


if __name__ == "__main__":
    sys.exit(main())
