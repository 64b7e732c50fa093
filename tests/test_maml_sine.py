"""The sine regression of MAML: the script runs, goes on after a kill, and learns."""

from __future__ import annotations

from argparse import Namespace
from copy import deepcopy
from pathlib import Path

import maml_sine
import pytest
import scripts
import torch

ROOT = Path(__file__).resolve().parent.parent
CPU = torch.device("cpu")


def test_the_template_is_short() -> None:
    assert len((ROOT / "examples" / "maml_sine.py").read_text("utf-8").splitlines()) <= 80


def test_waves_are_sines_in_the_stated_ranges() -> None:
    (x, y), (others, _) = maml_sine.waves(2000, torch.Generator().manual_seed(0), CPU)
    assert x.shape == y.shape == others.shape == (2000, 10, 1)
    assert -5 <= x.min() < -4.9 and 4.9 < x.max() <= 5 and not torch.equal(x, others)
    # amplitude sin(x - phase) is spanned by sin x and cos x; the coefficients give both back
    basis = torch.cat((x.sin(), x.cos()), 2).double()
    coefficients = torch.linalg.lstsq(basis, y.double()).solution[..., 0]
    assert (basis @ coefficients[..., None] - y).abs().max() < 1e-4
    amplitude = coefficients.norm(dim=1)
    phase = torch.atan2(-coefficients[:, 1], coefficients[:, 0])
    assert 0.1 <= amplitude.min() + 1e-4 < 0.2 and 4.9 < amplitude.max() < 5 + 1e-4
    assert -1e-3 < phase.min() < 0.1 and 3.0 < phase.max() < torch.pi + 1e-3


def arguments(out: Path, iterations: int) -> Namespace:
    return Namespace(out=out, iterations=iterations, device=CPU, resume=False)


def test_adapting_many_waves_is_adapting_each(tmp_path: Path) -> None:
    net, _ = maml_sine.train("pretrained", 0, arguments(tmp_path, 3))
    support, query = maml_sine.waves(4, torch.Generator().manual_seed(0), CPU)
    together = maml_sine.loss(maml_sine.adapt(net, support, 3), None, query)
    alone = []
    for x, y, other_x, other_y in zip(*support, *query, strict=True):
        copy = deepcopy(net)
        sgd = torch.optim.SGD(copy.parameters(), lr=maml_sine.INNER_LR)
        for _ in range(3):
            sgd.zero_grad()
            (copy(x) - y).square().mean().backward()
            sgd.step()
        alone.append((copy(other_x) - other_y).square().mean())
    assert together.item() == pytest.approx(torch.stack(alone).mean().item(), rel=1e-5)


def test_it_learns_to_learn(tmp_path: Path) -> None:
    """After 400 meta-batches one step on a new wave helps; it does not help the pretrained network."""
    lower, upper = maml_sine.waves(300, torch.Generator().manual_seed(99), CPU)
    gain = {}
    for method in maml_sine.METHODS:
        net, seconds = maml_sine.train(method, 0, arguments(tmp_path, 400))
        assert seconds > 0
        before, after = (maml_sine.loss(maml_sine.adapt(net, lower, n), None, upper).item() for n in (0, 1))
        gain[method] = after / before
    assert gain["MAML"] < 0.75 and gain["pretrained"] > 0.85


def test_the_script_and_a_killed_one_end_alike(tmp_path: Path) -> None:
    options = ["--smoke", "--seeds", 3, 4]
    whole = scripts.results("maml_sine", tmp_path / "whole", *options)
    assert [(run["method"], run["seed"]) for run in whole["runs"]] == [
        ("MAML", 3), ("MAML", 4), ("pretrained", 3), ("pretrained", 4),
    ]  # fmt: skip
    assert all(len(run["losses"]) == len(whole["steps"]) and run["seconds"] > 0 for run in whole["runs"])
    assert (tmp_path / "whole" / "maml_sine.png").read_bytes().startswith(b"\x89PNG\r\n")

    scripts.kill_at("maml_sine", tmp_path / "killed", "MAML_4.pt", *options)
    assert not (tmp_path / "killed" / "maml_sine.json").exists()
    assert torch.load(tmp_path / "killed" / "MAML_4.pt", weights_only=True)["state"]["done"] < 40
    again = scripts.results("maml_sine", tmp_path / "killed", *options, "--resume")
    assert scripts.without_times(again) == scripts.without_times(whole)

    with pytest.raises(SystemExit, match="iterations was 40 and is 50"):
        scripts.run("maml_sine", "--out", tmp_path / "killed", "--seeds", 3, "--iterations", 50, "--resume")
