"""Data distillation: F by its moments, images that are optimal for the optimistic problem, and what they teach."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("sklearn")
pytest.importorskip("tqdm")

import _data
import distillation
import scripts

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def data() -> distillation.Data:
    return distillation.load(None)


def test_upper_is_the_mean_over_the_training_set(data: distillation.Data) -> None:
    """But for its constant; at two classifiers."""
    images, labels = _data.digits()
    pixels = images[:1000].flatten(1).double() / 16
    pixels = pixels - pixels.mean(0)
    pixels = pixels / pixels.square().sum(1).mean().sqrt()
    targets = torch.nn.functional.one_hot(labels[:1000], 10).double() - 0.1
    constant = targets.square().sum(1).mean() / 2
    for seed in (0, 1):
        y = distillation.fresh_start(data, seed)
        direct = (pixels @ y - targets).square().sum(1).mean() / 2 + distillation.DECAY / 2 * y.square().sum()
        torch.testing.assert_close(distillation.upper(y, y, data) + constant, direct)


def test_optimistic_images_have_the_best_classifier_among_their_minimisers(data: distillation.Data) -> None:
    x, best = distillation.optimistic(data, 0, 30.0)
    assert distillation.lower(best, x, data).item() < 1e-20
    best.requires_grad_()
    (gradient,) = torch.autograd.grad(distillation.upper(best, x, data), best)
    assert gradient.abs().max() < 1e-10
    assert distillation.accuracy(best.detach(), data) > 85


def test_only_alpha_0_teaches(data: distillation.Data) -> None:
    plain, aggregated = (distillation.judge(distillation.distil(data, c, 0, 40), data) for c in (0.0, 10.0))
    assert min(plain) > max(aggregated) + 10


def test_the_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = scripts.results("distillation", tmp_path, "--smoke")
    assert distillation.table(results) in capsys.readouterr().out
    with pytest.raises(SystemExit):
        scripts.run("distillation", "--resume")
