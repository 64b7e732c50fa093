"""Small language models from configurations of `transformers` and `peft`, and the inner loop written by hand."""

from __future__ import annotations

import dataclasses
import importlib.util
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

import bda_optim as bda

there = all(map(importlib.util.find_spec, ("transformers", "peft")))  # imported by the tests, not by their collection
needs_transformers = pytest.mark.skipif(not there, reason="the extra `transformers` is not installed")

WORDS, WIDTH, LENGTH, ROWS, STEPS, RATE = 20, 8, 6, 4, 3, 0.3


def gpt2(dropout: float = 0.0) -> nn.Module:
    """GPT-2; its output layer is tied to its embedding."""
    import transformers

    drop = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    sizes = dict(vocab_size=WORDS, n_embd=WIDTH, n_layer=2, n_head=2, n_positions=LENGTH)
    config = transformers.GPT2Config(**sizes, **drop, bos_token_id=0, eos_token_id=0)
    return transformers.GPT2LMHeadModel(config)


def llama() -> nn.Module:
    """Llama, with grouped keys; its norms and its rotations are computed in float32."""
    import transformers

    heads = dict(num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=LENGTH)
    sizes = dict(vocab_size=WORDS, hidden_size=WIDTH, intermediate_size=12, num_hidden_layers=2)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))


def bert() -> nn.Module:
    """BERT with its head for masked words, tied to its embedding."""
    import transformers

    sizes = dict(vocab_size=WORDS, hidden_size=WIDTH, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2)
    drop = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    return transformers.BertForMaskedLM(transformers.BertConfig(**sizes, **drop, max_position_embeddings=LENGTH))


def t5() -> nn.Module:
    """T5: an encoder and a decoder that share an embedding, ReLU, relative positions."""
    import transformers

    sizes = dict(vocab_size=WORDS, d_model=WIDTH, d_kv=4, d_ff=12, num_layers=1, num_heads=2)
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0)
    )


def lora() -> nn.Module:
    """GPT-2 with low-rank adapters, the only parameters that require grad."""
    import peft

    # With the usual initial value, zero, one factor of each adapter has no gradient at first.
    settings = dict(r=2, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft 0.21 reads what transformers 5.23 calls by another name
        return peft.get_peft_model(gpt2(), peft.LoraConfig(**settings))


MODELS: dict[str, Callable[[], nn.Module]] = {"GPT-2": gpt2, "Llama": llama, "BERT": bert, "T5": t5, "LoRA": lora}

TIGHT = {"rtol": 1e-10, "atol": 1e-14}
"""Tolerances of the same operations in another order of bookkeeping."""

LOOSE = {"rtol": 1e-5, "atol": 1e-8}
"""Tolerances where derivatives are computed otherwise: the models' losses, and some norms, are computed in float32."""


def text(rows: int = ROWS, seed: int = 1, tasks: int | None = None) -> dict[str, Any]:
    """Random words, as the keyword arguments of a model, and the numbers of the rows."""
    shape = (rows, LENGTH) if tasks is None else (tasks, rows, LENGTH)
    words = torch.randint(WORDS, shape, generator=torch.Generator().manual_seed(seed))
    return {"inputs": {"input_ids": words, "labels": words}, "row": torch.arange(rows).expand(shape[:-1])}


def lower(net: Any, weights: Tensor, batch: Any) -> Tensor:
    """The model's own loss, and one with a weight for every row."""
    out = net(**batch["inputs"])
    losses = F.cross_entropy(out.logits.transpose(1, 2), batch["inputs"]["labels"], reduction="none").mean(1)
    return 0.5 * out.loss + (torch.sigmoid(weights[batch["row"]]) * losses).mean()


def upper(net: Any, weights: Tensor, batch: Any) -> Tensor:
    """The model's own loss on one row."""
    return net(**{name: words[:1].flip(1) for name, words in batch["inputs"].items()}).loss


@dataclasses.dataclass
class Problem:
    """Data weights for a model that is trained by SGD."""

    name: str
    model: nn.Module
    weights: Tensor
    batches: list[Any]
    adapted: dict[str, nn.Parameter]

    @classmethod
    def of(cls, name: str, model: nn.Module | None = None, dtype: torch.dtype = torch.float64) -> Problem:
        """Return the problem of a model, in evaluation mode."""
        torch.manual_seed(0)
        model = (model or MODELS[name]()).to(dtype).eval()
        adapted = {n: p for n, p in model.named_parameters() if p.requires_grad}
        weights = torch.linspace(-1, 1, ROWS, dtype=dtype).requires_grad_()
        return cls(name, model, weights, [text(seed=k) for k in range(STEPS)], adapted)

    def unroll(self, adjoint: bda.Adjoint | None = None, **options: Any) -> Any:
        """Run the inner loop of the library."""
        inner = bda.BDAInnerOptimizer(self.adapted.values(), lr=options.pop("lr", RATE))
        chosen = {"batches": self.batches, "hyper": self.weights, **options}
        return inner.unroll(self.model, lower, steps=STEPS, adjoint=adjoint or bda.Unroll(), **chosen)

    def hypergradient(self, adjoint: bda.Adjoint | None = None, **options: Any) -> list[Tensor]:
        """Return the gradient by the weights, and y_K."""
        fmodel = self.unroll(adjoint, **options)
        (grad,) = torch.autograd.grad(upper(fmodel, self.weights, self.batches[0]), self.weights)
        return [grad, *(p.detach() for p in fmodel.params.values())]

    def by_hand(
        self, *, last: int = STEPS, constant: bool = False, parts: int = 1, batches: Sequence[Any] | None = None
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Run the loop by hand; return the upper loss, what it depends on, and y_K.

        Args:
            last: The number of steps that are differentiated.
            constant: Whether the inner gradients count as constants.
            parts: In how many parts the rows of a batch come.
            batches: Other batches.
        """
        start = [p.detach().clone().requires_grad_() for p in self.adapted.values()]
        y = list(start)
        with sdpa_kernel(SDPBackend.MATH):  # fused attention has no second derivative
            for k, batch in enumerate(batches or self.batches):
                if 0 < k == STEPS - last:
                    y = [p.detach().requires_grad_() for p in y]
                value = sum(lower(self._net(y), self.weights, part) for part in cut(batch, parts)) / parts
                grads = torch.autograd.grad(value, y, create_graph=not constant)
                y = [p - RATE * g for p, g in zip(y, grads, strict=True)]
            value = upper(self._net(y), self.weights, self.batches[0])
        return value, [self.weights, *start], y

    def expected(self, **options: Any) -> list[Tensor]:
        """Return by hand what `hypergradient` returns."""
        value, (weights, *_), y = self.by_hand(**options)
        (grad,) = torch.autograd.grad(value, weights)
        return [grad, *(p.detach() for p in y)]

    def _net(self, y: Sequence[Tensor]) -> Callable[..., Any]:
        values = dict(zip(self.adapted, y, strict=True))
        return lambda **inputs: functional_call(self.model, values, (), inputs)


def cut(batch: Any, parts: int) -> list[Any]:
    """Return a batch in parts of equally many rows."""
    rows = batch["row"].chunk(parts)
    inputs = {name: words.chunk(parts) for name, words in batch["inputs"].items()}
    return [{"inputs": {name: words[i] for name, words in inputs.items()}, "row": row} for i, row in enumerate(rows)]
