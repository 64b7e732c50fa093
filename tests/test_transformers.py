"""Language models of `transformers` and `peft` as inner models, against the loop by hand with `functional_call`."""

from __future__ import annotations

import warnings

import pytest
import torch
from language_models import (
    LOOSE,
    MODELS,
    ROWS,
    STEPS,
    TIGHT,
    Problem,
    gpt2,
    needs_transformers,
    text,
    upper,
)
from torch import Tensor

import bda_optim as bda

pytestmark = needs_transformers

every_model = pytest.mark.parametrize("name", MODELS)
B = 2

CHECKPOINTS = "activation_checkpointing_enable"
"""What `gradient_checkpointing_enable` is called since transformers 5.23."""

REVERSE = [bda.Unroll(), bda.Checkpointed(every=2), bda.Checkpointed(slots=2)]


@every_model
def test_exact_adjoints_give_what_the_loop_by_hand_gives(name: str) -> None:
    problem = Problem.of(name)
    expected = problem.expected()
    assert expected[0].abs().min() > 0
    for adjoint in REVERSE:
        torch.testing.assert_close(problem.hypergradient(adjoint), expected, **TIGHT)
    torch.testing.assert_close(problem.hypergradient(bda.ForwardMode()), expected, **LOOSE)


@every_model
def test_biased_adjoints_are_biased_by_what_they_leave_out(name: str) -> None:
    problem = Problem.of(name)
    for adjoint in (bda.Truncated(last=2), bda.Truncated(last=2, within=bda.Checkpointed())):
        torch.testing.assert_close(problem.hypergradient(adjoint), problem.expected(last=2), **TIGHT)
    start = list(problem.adapted.values())
    fmodel = problem.unroll(bda.FirstOrder(), copy_initial_weights=False)
    found = torch.autograd.grad(upper(fmodel, problem.weights, problem.batches[0]), start)
    value, (_, *inputs), _ = problem.by_hand(constant=True)
    torch.testing.assert_close(found, torch.autograd.grad(value, inputs), **TIGHT)
    value, (_, *inputs), _ = problem.by_hand()
    exact = torch.autograd.grad(value, inputs)
    assert max(float((a - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True) if b.norm() > 0) > 1e-3


@every_model
def test_a_learned_initialisation(name: str) -> None:
    """`copy_initial_weights=False`: the upper variables are the weights that the loop starts from, tied or not."""
    problem = Problem.of(name)
    start = list(problem.adapted.values())
    value, (_, *inputs), _ = problem.by_hand()
    expected = torch.autograd.grad(value, inputs)
    for adjoint in (bda.Unroll(), bda.Checkpointed(every=1)):
        fmodel = problem.unroll(adjoint, copy_initial_weights=False)
        found = torch.autograd.grad(upper(fmodel, problem.weights, problem.batches[0]), start)
        torch.testing.assert_close(found, expected, **TIGHT)


@every_model
def test_a_batch_in_parts_gives_the_same(name: str) -> None:
    problem = Problem.of(name)
    expected = problem.expected()
    torch.testing.assert_close(problem.expected(parts=2), expected, **LOOSE)
    for adjoint, parts in ((bda.Checkpointed(slots=2), 2), (bda.Checkpointed(), ROWS), (bda.Unroll(), 2)):
        torch.testing.assert_close(problem.hypergradient(adjoint, accumulate=parts), expected, **LOOSE)


@every_model
def test_many_tasks_equal_a_loop_over_them(name: str) -> None:
    problem = Problem.of(name)
    batches = [text(seed=k, tasks=B) for k in range(STEPS)]
    totals = []
    for task in range(B):
        problem.batches = [
            {"inputs": {key: words[task] for key, words in batch["inputs"].items()}, "row": batch["row"][task]}
            for batch in batches
        ]
        totals.append(problem.expected())
    for adjoint in (bda.Unroll(), bda.Checkpointed()):
        fmodel = problem.unroll(adjoint, batches=batches, tasks=B)
        value = fmodel.losses(upper, problem.weights, batches[0]).sum()
        found = torch.autograd.grad(value, problem.weights)[0]
        torch.testing.assert_close(found, totals[0][0] + totals[1][0], **LOOSE)
        for task, (_, *expected) in enumerate(totals):
            torch.testing.assert_close([p[task].detach() for p in fmodel.params.values()], expected, **LOOSE)


@every_model
def test_autocast_to_bfloat16(name: str) -> None:
    """Replayed as it ran; near to the loop by hand under autocast, and not far from float32."""
    problem = Problem.of(name, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        by_hand = problem.expected()
        found, *again = (problem.hypergradient(adjoint) for adjoint in REVERSE)
    for other in again:
        # Not to the bit: with a graph torch composes the gradient of SiLU of operations that each round to bfloat16.
        torch.testing.assert_close(other[1:], found[1:], rtol=0, atol=1e-4)
        assert distance(other, found) < 1e-2
    assert distance(found, by_hand) < 1e-2
    assert 0 < distance(found, problem.expected()) < 0.2


def distance(found: list[Tensor], expected: list[Tensor]) -> float:
    """The relative distance of two hypergradients."""
    return float((found[0] - expected[0]).norm() / expected[0].norm())


def test_dropout_is_replayed() -> None:
    problem = Problem.of("GPT-2", gpt2(dropout=0.3))
    without = problem.expected()
    problem.model.train()
    results = []
    for adjoint in (None, *REVERSE):
        torch.manual_seed(5)
        results.append(problem.expected() if adjoint is None else problem.hypergradient(adjoint))
    for found in results[1:]:
        torch.testing.assert_close(found, results[0], **TIGHT)
    assert distance(results[0], without) > 0.1


def test_parameters_that_are_not_adapted_are_upper_variables() -> None:
    """One block is adapted; the gradient by the rest, and by the tied embedding, is that of the loop by hand."""
    problem = Problem.of("GPT-2")
    problem.adapted = {n: p for n, p in problem.adapted.items() if n.startswith("transformer.h.1.")}
    rest = [p for n, p in problem.model.named_parameters() if n not in problem.adapted]
    value, _, _ = problem.by_hand()
    expected = torch.autograd.grad(value, rest)
    for adjoint in REVERSE:
        found = torch.autograd.grad(upper(problem.unroll(adjoint), problem.weights, problem.batches[0]), rest)
        torch.testing.assert_close(found, expected, **TIGHT)


def test_tied_weights_stay_tied() -> None:
    problem = Problem.of("GPT-2")
    fmodel = problem.unroll()
    assert "lm_head.weight" not in fmodel.params
    assert fmodel.lm_head.weight is fmodel.transformer.wte.weight is fmodel.params["transformer.wte.weight"]
    assert problem.model.lm_head.weight is problem.model.transformer.wte.weight


@pytest.mark.parametrize("name", ["GPT-2", "Llama", "T5", "LoRA"])
def test_generation_uses_the_adapted_weights(name: str) -> None:
    problem = Problem.of(name)
    options = dict(max_new_tokens=3, do_sample=False, pad_token_id=0)
    prompt = {"input_ids": problem.batches[0]["inputs"]["input_ids"][:2, :3]}
    prompt["attention_mask"] = torch.ones_like(prompt["input_ids"])
    fmodel = problem.unroll()
    with torch.no_grad():
        found = fmodel.generate(**prompt, **options)
        kept = {n: p.clone() for n, p in problem.adapted.items()}
        for name, value in fmodel.params.items():
            problem.adapted[name].copy_(value)
        expected = problem.model.generate(**prompt, **options)
        for name, value in kept.items():
            problem.adapted[name].copy_(value)
    assert torch.equal(found, expected) and found.shape[0] == 2


def with_checkpoints(name: str) -> Problem:
    """A model that recomputes its activations, which `transformers` does in training mode only."""
    problem = Problem.of(name)
    getattr(problem.model, CHECKPOINTS, problem.model.gradient_checkpointing_enable)()
    problem.model.train()
    return problem


@every_model
def test_activation_checkpoints_are_refused_with_what_saves_memory(name: str) -> None:
    problem = with_checkpoints(name)
    message = r"torch\.utils\.checkpoint .*`adjoint=Checkpointed\(\)`.*`accumulate=M`.*`adjoint=Differences\(\)`"
    for adjoint in (bda.Unroll(), bda.Checkpointed()):
        with pytest.raises(RuntimeError, match=message):
            problem.unroll(adjoint)


@pytest.mark.parametrize("name", ["GPT-2", "Llama", "BERT", "LoRA"])
def test_differences_allow_activation_checkpoints(name: str) -> None:
    problem = with_checkpoints(name)
    for batch in problem.batches:
        batch["inputs"]["input_ids"].clamp_(min=1)  # the next test says why
    plain = Problem.of(name)
    plain.batches = problem.batches
    expected = plain.expected()
    for options in ({}, {"accumulate": 2}):
        found = problem.hypergradient(bda.Differences(within=bda.Checkpointed(slots=2)), **options)
        torch.testing.assert_close(found[1:], expected[1:], **LOOSE)
        assert 0 < distance(found, expected) < 2e-3


def test_differences_refuse_padding_that_a_loss_depends_on() -> None:
    """BERT's embedding stops the gradient of word 0, which its output layer, tied to it, has."""
    with pytest.raises(ValueError, match="not that of a function"):
        Problem.of("BERT").hypergradient(bda.Differences())


def test_differences_refuse_the_relu_of_t5() -> None:
    with pytest.raises(ValueError, match=r"derivative jumps \(Relu\)"):
        Problem.of("T5").hypergradient(bda.Differences())


def test_output_objects_and_methods_of_the_module() -> None:
    problem = Problem.of("GPT-2")
    fmodel = problem.unroll()
    batch = problem.batches[0]["inputs"]
    out = fmodel(**batch, output_hidden_states=True)
    assert out.logits is out["logits"] and len(out.hidden_states) == 3 and out.loss.grad_fn is not None
    (grad,) = torch.autograd.grad(out.loss, problem.weights)
    assert grad.abs().sum() > 0
    assert torch.equal(fmodel.get_input_embeddings().weight, fmodel.params["transformer.wte.weight"])
    assert fmodel.config is problem.model.config


@pytest.mark.slow
@pytest.mark.parametrize("name", ["GPT-2", "Llama", "BERT"])
def test_compiled_without_falling_back(name: str) -> None:
    problem = Problem.of(name)
    expected = problem.hypergradient(bda.Checkpointed(every=1))
    with warnings.catch_warnings(), bda.compiling(quiet=True):
        warnings.simplefilter("error")
        for adjoint in (bda.Unroll(), bda.Checkpointed(every=1)):
            for _ in range(2):
                torch.testing.assert_close(problem.hypergradient(adjoint, compile=True), expected, **LOOSE)
