r"""Which data should a language model be fine-tuned on? Learn one weight per source, by the loss on wanted text.

    min over x of  F(y_K) = mean cross-entropy on validation text,
    where y_1, ..., y_K are AdamW's steps on  f(x, y) = mean over a batch of w_i cross-entropy_i(y),  w = n softmax(x)

A small GPT-2 over characters is trained on docstrings and comments of Python's standard library. It is then to be
fine-tuned for the language reference, with LoRA adapters y, on six sources: the reference itself, more docstrings, more
comments, and three that are made of the reference and spoiled: the letters of its words shuffled, its letters replaced
by others (another language), a few of its lines over and over. x has one number per source (``--per sample``: one per
window of text), and the hypergradient goes through K steps of AdamW by `bda.Checkpointed`, in parts of a batch by
`accumulate`.

Judged is the loss on other text of the reference, which neither level has seen, after fine-tuning from the same start
with the learned weights, with uniform ones, and with those of an oracle that leaves the spoiled sources out.

    python examples/language_model_data_weights.py --seeds 0 1 2
    python examples/language_model_data_weights.py --per sample
    python examples/language_model_data_weights.py --shuffled words      (their order, not their letters)

It needs `transformers` and `peft`, and downloads nothing. The text, so every number too, belongs to one version of
Python (_language_text.py). The settings were chosen on seed 100.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import time
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from _figures import write_small
from _language_report import figure, table
from _language_text import CLEAN, SHUFFLED, SPOILED, VOCABULARY, Data, divide, read
from _run import Checkpoint, arguments, provenance, wait_while_paused, write_atomically, write_json
from torch import Tensor, nn

import bda_optim as bda

# --- settings ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Settings:
    # the text
    length: int = 64  # characters of a window
    windows: int = 256  # of each source
    held_out: int = 256  # windows of validation text; there are twice as many for the test
    # the model, and its training from nothing
    layers: int = 2
    width: int = 64
    heads: int = 2
    pretraining_steps: int = 1500
    pretraining_batch: int = 32
    pretraining_lr: float = 3e-3  # falling to 0 along a line
    # the lower level
    rank: int = 8  # of the adapters
    steps: int = 8  # K
    rows: int = 4  # windows of each source in a batch
    parts: int = 2  # of a batch, whose graphs are held one at a time
    lower_lr: float = 3e-3
    eps: float = 1e-4  # of AdamW: with 1e-8 the hypergradient in float32 is noise
    # the upper level
    iterations: int = 30
    upper_lr: float = 0.25  # of Adam on x
    validation_rows: int = 48
    # fine-tuning with fixed weights
    fine_tuning_steps: int = 200
    every: int = 20  # steps between two looks at the test loss


SMOKE = Settings(windows=8, held_out=8, layers=1, width=16, pretraining_steps=4, pretraining_batch=4, steps=2, rows=2,
                 iterations=3, validation_rows=4, fine_tuning_steps=4, every=2)  # fmt: skip
BETAS = (0.9, 0.99)  # of every AdamW
SOURCES = len(CLEAN) + len(SPOILED)

# --- the model --------------------------------------------------------------------------------------------------------


def language_model(settings: Settings) -> nn.Module:
    """Return an untrained GPT-2 over characters."""
    try:
        import peft  # noqa: F401
        from transformers import GPT2Config, GPT2LMHeadModel
    except ImportError as error:
        raise SystemExit(f"This example needs two more packages: pip install transformers peft ({error}).") from None
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=settings.length, n_embd=settings.width, n_layer=settings.layers,
        n_head=settings.heads, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
        use_cache=False, activation_function="gelu_pytorch_tanh",  # GPT-2's own GELU, as one operation
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def with_adapters(model: nn.Module, settings: Settings) -> nn.Module:
    """Return the model with LoRA adapters, whose parameters are the only ones that require grad."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=settings.rank, lora_alpha=2 * settings.rank, target_modules=["c_attn", "c_fc", "c_proj"], fan_in_fan_out=True
    )
    with warnings.catch_warnings():  # peft 0.21 asks transformers 5.23 by a deprecated name
        warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)
        return get_peft_model(model, config)


def adapters(model: nn.Module) -> list[Tensor]:
    return [p for p in model.parameters() if p.requires_grad]


# --- the two levels ---------------------------------------------------------------------------------------------------


def cross_entropy(net: nn.Module, tokens: Tensor) -> Tensor:
    """Return one loss per window: the mean over its characters, in nats."""
    logits = net(input_ids=tokens[:, :-1]).logits
    return F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none").mean(1)


def weights_of(x: Tensor) -> Tensor:
    """Return positive weights with the mean 1. Their common scale is left out, since AdamW hardly sees it."""
    return len(x) * torch.softmax(x, 0)


Batch = tuple[Tensor, Tensor]  # windows, and the places of their weights in x


def weighted(net: nn.Module, weights: Tensor, batch: Batch) -> Tensor:
    tokens, places = batch
    return (weights[places] * cross_entropy(net, tokens)).mean()


def lower(net: nn.Module, x: Tensor, batch: Batch) -> Tensor:
    return weighted(net, weights_of(x), batch)


def upper(net: nn.Module, x: Tensor, tokens: Tensor) -> Tensor:
    return cross_entropy(net, tokens).mean()


def draw_batch(data: Data, rows: int, per: str, generator: torch.Generator) -> Batch:
    """Return as many random windows of every source, in an order that gives every part of a batch all sources."""
    sources, windows = data.sources.shape[:2]
    source = torch.arange(sources).repeat(rows)
    window = torch.randint(windows, source.shape, generator=generator)
    places = source if per == "source" else source * windows + window
    return data.sources[source, window], places.to(data.sources.device)


def hypergradient(model: nn.Module, x: Tensor, batches: list[Batch], validation: Tensor, settings: Settings) -> float:
    """Add dF/dx to x.grad, and return F(y_K)."""
    inner = bda.BDAInnerOptimizer(
        adapters(model), lr=settings.lower_lr, rule=torch.optim.AdamW, betas=BETAS, eps=settings.eps
    )
    fmodel = inner.unroll(
        model, lower, hyper=x, steps=len(batches), batches=batches, adjoint=bda.Checkpointed(),
        accumulate=settings.parts,
    )  # fmt: skip
    value = upper(fmodel, x, validation)
    value.backward()
    return value.item()


# --- one seed ---------------------------------------------------------------------------------------------------------


class Clock:
    """CPU seconds in a list, which a checkpoint can keep."""

    def __init__(self) -> None:
        self.total, self.last = [0.0], time.process_time()

    def tick(self) -> None:
        now = time.process_time()
        self.total[0] += now - self.last
        self.last = now


class Run:
    """One seed. Each of its stages has a checkpoint of its own."""

    def __init__(self, seed: int, settings: Settings, data: Data, known: Any, args: argparse.Namespace) -> None:
        self.seed, self.settings, self.data, self.args = seed, settings, data, args
        self.known = {**dataclasses.asdict(settings), **known, "seed": seed}
        self.seconds: dict[str, float] = {}
        torch.manual_seed(seed)
        self.model = language_model(settings).to(args.device)

    def stage(self, name: str, total: int, **parts: Any) -> Any:
        """Yield the iterations of a stage, which goes on from its checkpoint; note its CPU time."""
        path = self.args.out / "checkpoints" / f"{name}-{self.seed}.pt"
        checkpoint, clock = Checkpoint(path, self.known, resume=self.args.resume), Clock()
        for i in checkpoint.iterations(total, f"{name}, seed {self.seed}", cpu=clock.total, **parts):
            wait_while_paused()
            yield i
            clock.tick()
        self.seconds[name] = round(clock.total[0], 1)

    def pretrain(self) -> None:
        settings, text = self.settings, self.data.pretraining
        generator = torch.Generator().manual_seed(self.seed)
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=settings.pretraining_lr, betas=BETAS)
        total = settings.pretraining_steps
        for i in self.stage("pretraining", total, model=self.model, optimizer=optimizer, generator=generator):
            optimizer.param_groups[0]["lr"] = settings.pretraining_lr * (1 - i / total)
            starts = torch.randint(len(text) - settings.length, (settings.pretraining_batch, 1), generator=generator)
            loss = cross_entropy(self.model, text[starts + torch.arange(settings.length + 1)]).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def learn(self) -> dict[str, Any]:
        """Run Adam on x, from uniform weights; every iteration fine-tunes anew, with new batches."""
        settings, data = self.settings, self.data
        sources, windows = data.sources.shape[:2]
        size = sources if self.args.per == "source" else sources * windows
        x = torch.zeros(size, device=self.args.device, requires_grad=True)
        optimizer = torch.optim.Adam([x], lr=settings.upper_lr)
        generator, curve, values = torch.Generator().manual_seed(self.seed), [], []
        parts = {"x": x, "optimizer": optimizer, "generator": generator, "curve": curve, "values": values}
        for _ in self.stage("weights", settings.iterations, **parts):
            curve.append(self.by_source(x))
            batches = [draw_batch(data, settings.rows, self.args.per, generator) for _ in range(settings.steps)]
            rows = torch.randperm(len(data.validation), generator=generator)[: settings.validation_rows]
            optimizer.zero_grad()
            values.append(hypergradient(self.model, x, batches, data.validation[rows], settings))
            optimizer.step()
        return {"x": x.detach(), "curve": [*curve, self.by_source(x)], "upper": values}

    def by_source(self, x: Tensor) -> list[float]:
        """Return the mean weight of every source."""
        return weights_of(x.detach()).view(SOURCES, -1).mean(1).tolist()

    def fine_tune(self, name: str, weights: Tensor) -> list[float]:
        """Return the test loss along plain fine-tuning with fixed weights, from the same start, on the same batches."""
        settings, data, start = self.settings, self.data, [p.detach().clone() for p in adapters(self.model)]
        optimizer = torch.optim.AdamW(adapters(self.model), lr=settings.lower_lr, betas=BETAS, eps=settings.eps)
        generator, losses = torch.Generator().manual_seed(self.seed + 10**6), [self.test_loss()]
        parts = {"model": self.model, "optimizer": optimizer, "generator": generator, "losses": losses}
        for i in self.stage(name, settings.fine_tuning_steps, **parts):
            optimizer.zero_grad()
            batch = draw_batch(data, settings.rows, self.args.per, generator)
            weighted(self.model, weights, batch).backward()
            optimizer.step()
            if (i + 1) % settings.every == 0:
                losses.append(self.test_loss())
        with torch.no_grad():
            for p, value in zip(adapters(self.model), start, strict=True):
                p.copy_(value)
        return losses

    @torch.no_grad()
    def test_loss(self) -> float:
        return torch.cat([cross_entropy(self.model, part) for part in self.data.test.split(64)]).mean().item()

    def result(self) -> dict[str, Any]:
        self.pretrain()
        torch.manual_seed(self.seed + 1)
        self.model = with_adapters(self.model, self.settings).to(self.args.device)
        learned = self.learn()
        uniform = torch.ones_like(learned["x"])
        oracle = uniform.view(SOURCES, -1).clone()
        oracle[len(CLEAN) :] = 0
        choices = {"uniform": uniform, "learned": weights_of(learned["x"]), "oracle": oracle.flatten() / oracle.mean()}
        losses = {name: self.fine_tune(name, weights) for name, weights in choices.items()}
        return {
            "seed": self.seed,
            "weights": learned["curve"],
            "upper": learned["upper"],
            "test": losses,
            "seconds": self.seconds,
        }


def versions() -> dict[str, Any]:
    found = provenance()
    found["versions"] |= {name: importlib.metadata.version(name) for name in ("transformers", "peft")}
    return found


# --- what the command does --------------------------------------------------------------------------------------------


def main() -> None:
    parser = arguments("Weights of the sources of text that a language model is fine-tuned on.", "language_model")
    parser.add_argument("--per", choices=("source", "sample"), default="source", help="what has a weight of its own")
    parser.add_argument("--shuffled", choices=SHUFFLED, default="letters", help="what is out of order in one source")
    args = parser.parse_args()
    settings, texts = SMOKE if args.smoke else Settings(), read()
    spoiled = [f"shuffled {args.shuffled}", *SPOILED[1:]]
    known = {"per": args.per, "sources": [*CLEAN, *spoiled], "spoiled": spoiled, "text": texts.digest}
    runs = []
    for seed in args.seeds:
        data = divide(texts, settings.length + 1, settings.windows, settings.held_out, seed, args.shuffled)
        runs.append(Run(seed, settings, Data(*(part.to(args.device) for part in data)), known, args).result())
    results = {"settings": {**dataclasses.asdict(settings), "betas": BETAS}, **known, **versions(), "runs": runs}
    path = args.out / "language_model_data_weights.json"
    write_json(path, results)
    write_atomically(path.with_suffix(".png"), lambda file: write_small(figure(results), file))
    print(f"\n{table(results)}\n\n{path} and .png")


if __name__ == "__main__":
    main()
