"""Data weights of a language model: its text, its hypergradient, the script, and what was recorded."""

from __future__ import annotations

import dataclasses
import json
import random
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("matplotlib")
pytest.importorskip("tqdm")

import _language_report as report
import _language_text as text
import language_model_data_weights as example
import scripts
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "examples" / "results" / "language_model_data_weights.json"
SMALL = dataclasses.replace(example.SMOKE, length=12, width=8, heads=2, rank=2, steps=4, eps=1e-3)


@pytest.fixture(scope="module")
def texts() -> text.Texts:
    return text.read()


@pytest.fixture
def model() -> Any:
    """A GPT-2 in float64 whose adapters are not at their start, where half of them have no gradient."""
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    torch.manual_seed(0)
    found = example.with_adapters(example.language_model(SMALL), SMALL).double()
    with torch.no_grad():
        for p in example.adapters(found):
            p.copy_(0.3 * torch.randn(p.shape))
    return found


# --- the text ---------------------------------------------------------------------------------------------------------


def test_the_text_is_clean(texts: text.Texts) -> None:
    assert all(kind.isascii() and len(kind) > 200_000 for kind in texts)
    assert texts._replace(comments="").digest != texts.digest
    paragraphs = texts.reference.split("\n\n")
    assert len(set(paragraphs)) == len(paragraphs)  # the topics overlap: a test passage may not be in a source, too
    assert "\n+---" not in texts.reference and "\n****" not in texts.reference


def test_comments_and_docstrings_of_a_source() -> None:
    source = '"""A module."""\n#: of two words\n# -----\nclass A:\n    def f(self):\n        """Do it."""\n'
    assert list(text.docstrings([source])) == ["A module.", "Do it."]
    assert list(text.comments([source])) == ["of two words"]


def test_shuffled_words_keep_the_words_and_the_white_space(texts: text.Texts) -> None:
    before = texts.reference[: 2 * text.PASSAGE]
    after = text.shuffle_words(before, random.Random(0))
    assert after != before and len(after) == len(before)
    for i in (0, text.PASSAGE):
        parts = before[i : i + text.PASSAGE], after[i : i + text.PASSAGE]
        assert sorted(parts[0].split()) == sorted(parts[1].split())
    assert re.findall(r"\s+", after[: text.PASSAGE]) == re.findall(r"\s+", before[: text.PASSAGE])


def test_shuffled_letters_keep_the_letters_of_every_word(texts: text.Texts) -> None:
    before = texts.reference[:2000]
    after = text.shuffle_letters(before, random.Random(0))
    assert after != before and [*map(sorted, after.split())] == [*map(sorted, before.split())]
    assert re.findall(r"\s+", after) == re.findall(r"\s+", before)


def test_another_language_exchanges_every_letter(texts: text.Texts) -> None:
    before = texts.reference[:2000]
    after = text.another_language(before)
    assert all((a != b) == b.isalpha() for a, b in zip(after, before, strict=True))
    assert len(set(zip(before, after, strict=True))) == len(set(before)) == len(set(after))  # a bijection
    assert text.another_language("Ab 1") == "Oy 1"


def test_duplicated_lines(texts: text.Texts) -> None:
    before = texts.reference[:8000]
    after = text.duplicate_lines(before, random.Random(0), count=3)
    lines = after.split("\n")[:-1]
    assert len(after) == len(before) and len(set(lines)) == 3 and set(lines) <= set(before.split("\n"))


def test_the_held_out_text_is_nowhere_else(texts: text.Texts) -> None:
    data = text.divide(texts, 64, 16, 24, seed=1)
    assert data.sources.shape == (6, 16, 64) and data.validation.shape == (24, 64) and data.test.shape == (48, 64)
    again, other = text.divide(texts, 64, 16, 24, seed=1), text.divide(texts, 64, 16, 24, seed=2)
    assert all(torch.equal(a, b) for a, b in zip(data, again, strict=True))
    assert not torch.equal(data.test, other.test)
    kept = [bytes(window.tolist()) for window in (*data.validation, *data.test)]
    assert len(set(kept)) == len(kept)
    seen = bytes([*data.sources.flatten().tolist(), *data.pretraining.tolist()])
    assert not any(window in seen for window in kept)  # judged is text that no level has seen
    with pytest.raises(ValueError, match="too little text"):
        text.divide(texts, 64, 10**4, 24, seed=1)


# --- the hypergradient ------------------------------------------------------------------------------------------------


def draw(per: str) -> tuple[Tensor, list[example.Batch], Tensor]:
    """x, K batches, and validation windows."""
    generator = torch.Generator().manual_seed(3)

    def windows(*shape: int) -> Tensor:
        return torch.randint(text.VOCABULARY, (*shape, SMALL.length + 1), generator=generator)

    data = text.Data(windows(6, 5), windows(4), windows(4), windows(1))
    batches = [example.draw_batch(data, SMALL.rows, per, generator) for _ in range(SMALL.steps)]
    size = 6 if per == "source" else 30
    return torch.randn(size, dtype=torch.float64, generator=generator), batches, data.validation


def by_hand(model: Any, x: Tensor, batches: list[example.Batch], validation: Tensor) -> Tensor:
    """F(y_K) by a loop with `functional_call`, and AdamW as its authors write it."""
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    y = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters() if name in names}

    def loss(y: dict[str, Tensor], tokens: Tensor) -> Tensor:
        out = torch.func.functional_call(model, y, kwargs={"input_ids": tokens[:, :-1]})
        log = out.logits.log_softmax(-1).gather(-1, tokens[:, 1:, None])
        return -log.mean((1, 2))

    first, second = ({name: torch.zeros_like(value) for name, value in y.items()} for _ in range(2))
    (beta1, beta2), lr = example.BETAS, SMALL.lower_lr
    for k, (tokens, places) in enumerate(batches, 1):
        weights = x.exp() / x.exp().sum() * len(x)
        grads = torch.autograd.grad((weights[places] * loss(y, tokens)).mean(), [*y.values()], create_graph=True)
        for name, grad in zip(names, grads, strict=True):
            first[name] = beta1 * first[name] + (1 - beta1) * grad
            second[name] = beta2 * second[name] + (1 - beta2) * grad**2
            scale = (second[name] / (1 - beta2**k)).sqrt() + SMALL.eps
            y[name] = y[name] * (1 - lr * 0.01) - lr * first[name] / (1 - beta1**k) / scale
    return loss(y, validation).mean()


@pytest.mark.parametrize("per", ["source", "sample"])
def test_the_hypergradient_against_a_loop_by_hand_and_differences(model: Any, per: str) -> None:
    x, batches, validation = draw(per)
    x.requires_grad_()
    value = example.hypergradient(model, x, batches, validation, SMALL)
    other = x.detach().clone().requires_grad_()
    with sdpa_kernel(SDPBackend.MATH):  # the fused kernel has no second derivative
        wanted = by_hand(model, other, batches, validation)
        wanted.backward()
    assert value == pytest.approx(wanted.item(), rel=1e-12)
    torch.testing.assert_close(x.grad, other.grad, rtol=1e-8, atol=1e-13)
    direction = torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(1))
    step = 1e-4 * direction
    ends = [by_hand(model, x.detach() + sign * step, batches, validation).item() for sign in (1, -1)]
    assert (ends[0] - ends[1]) / 2e-4 == pytest.approx((x.grad @ direction).item(), rel=1e-5)


def test_every_part_of_a_batch_has_all_sources() -> None:
    for per, size in (("source", 6), ("sample", 30)):
        x, batches, _ = draw(per)
        tokens, places = batches[0]
        assert len(x) == size and len(tokens) == len(places) == 6 * SMALL.rows
        sources = places if per == "source" else places // 5
        for part in sources.chunk(SMALL.parts):
            assert sorted(part.unique().tolist()) == [*range(6)]


def test_weights_have_the_mean_one() -> None:
    weights = example.weights_of(torch.tensor([0.0, 1.0, -2.0]))
    assert weights.mean().item() == pytest.approx(1.0)
    assert (weights[1] / weights[0]).item() == pytest.approx(2.718282)


# --- the script and its results ---------------------------------------------------------------------------------------


def test_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(SystemExit, match="pip install transformers peft"):
        example.language_model(SMALL)


NAME = "language_model_data_weights"


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--per", "sample", "--shuffled", "words")], ids=["source", "sample"])
def test_smoke(tmp_path: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...]) -> None:
    pytest.importorskip("peft")
    found = scripts.results(NAME, tmp_path, "--smoke", *options, "--seeds", 0, 1)
    assert report.table(found) in capsys.readouterr().out
    assert (tmp_path / f"{NAME}.png").read_bytes().startswith(b"\x89PNG\r\n")
    assert found["per"] == ("sample" if options else "source")
    assert ("shuffled words" if options else "shuffled letters") in found["spoiled"]
    first, second = found["runs"]
    assert first["weights"][0] == pytest.approx([1.0] * 6)
    assert first["weights"][-1] != first["weights"][0] and first["weights"] != second["weights"]
    assert len(first["weights"]) == example.SMOKE.iterations + 1 == len(first["upper"]) + 1
    assert len({losses[0] for losses in first["test"].values()}) == 1  # all begin at the same adapters
    assert len({losses[-1] for losses in first["test"].values()}) == 3


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["weights", "learned"])
def test_a_killed_run_goes_on(tmp_path: Path, stage: str) -> None:
    pytest.importorskip("peft")
    scripts.kill_at(NAME, tmp_path, f"{stage}-0.pt", "--smoke")
    resumed = scripts.results(NAME, tmp_path, "--smoke", "--resume")
    whole = scripts.results(NAME, tmp_path / "whole", "--smoke")
    assert scripts.without_times(resumed) == scripts.without_times(whole)


def recorded_settings() -> dict[str, Any]:
    return {**dataclasses.asdict(example.Settings()), "betas": [*example.BETAS]}


def test_what_was_recorded() -> None:
    found = json.loads(RESULTS.read_text("utf-8"))
    assert found["settings"] == recorded_settings()
    assert found["per"] == "source" and found["spoiled"][0] == "shuffled letters"
    assert [run["seed"] for run in found["runs"]] == [3, 4, 5]
    assert sum(sum(run["seconds"].values()) for run in found["runs"]) < 15 * 60
    largest = []
    for run in found["runs"]:
        weights = dict(zip(found["sources"], run["weights"][-1], strict=True))
        shares = [weights[name] / max(weights.values()) for name in found["spoiled"]]
        assert max(shares[:2]) < 0.01
        assert max(weights[name] for name in found["spoiled"]) < min(weights[name] for name in text.CLEAN)
        largest.append(round(shares[2], 3))
        assert run["test"]["learned"][-1] < run["test"]["uniform"][-1] - 0.1
    assert largest == [0.043, 0.018, 0.108]  # docs/experiments.md says so: above a tenth in one seed
