"""Registration: the camera, the exact answer, the search for c, and that BDA's hypergradient is the right one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("matplotlib")
pytest.importorskip("sklearn")
pytest.importorskip("tqdm")

import _registration_report as report
import _scene
import registration
import scripts
from torch import Tensor

import bda_optim as bda

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def flower() -> _scene.Scene:
    (name, number, image), _ = _scene.photographs()
    return _scene.scene(name, image, number)


@pytest.fixture(scope="module")
def starts() -> dict[str, Tensor]:
    return _scene.draw_starts(3, [_scene.photographs()[1][2]])


def double(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


# --- the camera -------------------------------------------------------------------------------------------------------


def test_a_shift_by_whole_pixels_is_a_roll(flower: _scene.Scene) -> None:
    image = flower.image.view(28, 28)
    torch.testing.assert_close(_scene.shift(image, double(2, -3)), image.roll((2, -3), (0, 1)))
    whole = _scene.shift(image, double(0.4, 0.0))
    assert whole.sum().item() == pytest.approx(image.sum().item())
    assert not torch.allclose(whole, image, atol=1e-2)


def test_the_operator_is_what_the_camera_sees(flower: _scene.Scene) -> None:
    x = double(0.3, -0.7)
    seen = [_scene.shift(flower.image.view(28, 28), j * x).flatten() for j in range(4)]
    patterns = flower.patterns.flatten(2)
    measured = torch.cat([rows @ image for rows, image in zip(patterns, seen, strict=True)])
    torch.testing.assert_close(flower.operator(x) @ flower.image, measured)
    torch.testing.assert_close(patterns[2] @ patterns[2].T, torch.eye(100, dtype=torch.float64))  # orthonormal rows
    assert flower.velocity.norm().item() == pytest.approx(0.8)
    torch.testing.assert_close(flower.operator(flower.velocity) @ flower.image, flower.b)


def test_noise_and_other_numbers() -> None:
    image = _scene.photographs()[0][2]
    clean, noisy, other = (_scene.scene("", image, *how) for how in ((0,), (0, 0.05), (1,)))
    assert ((noisy.b - clean.b).norm() / clean.b.norm()).item() == pytest.approx(0.05, rel=0.2)
    assert torch.equal(noisy.patterns, clean.patterns) and not torch.equal(other.patterns, clean.patterns)
    assert not torch.equal(other.velocity, clean.velocity)


def test_the_photographs() -> None:
    for _, _, image in _scene.photographs():
        assert image.shape == (28, 28) and 0 <= image.min() < 0.2 and 0.5 < image.max() <= 1


def test_the_rates_keep_to_the_theory(flower: _scene.Scene) -> None:
    """s_l <= 1 / L_f, and s_u <= 2 / (L_F + sigma) with the true curvature of both priors."""
    largest = torch.linalg.matrix_norm(flower.operator(flower.velocity), 2).square().item()
    assert registration.LOWER_LR <= 1 / largest
    for prior, tight in ((_scene.QUADRATIC, True), (_scene.TOTAL_VARIATION, False)):
        hessian = torch.autograd.functional.hessian(prior.value, flower.image)
        low, high = torch.linalg.eigvalsh(hessian)[[0, -1]].tolist()
        limit = 2 / (high + low)
        assert prior.rate == pytest.approx(limit) if tight else prior.rate <= limit


# --- the exact answer -------------------------------------------------------------------------------------------------


def test_phi_is_the_least_prior_among_the_lower_solutions(flower: _scene.Scene) -> None:
    """Against the optimality system of min F(y) subject to A y = b; and its derivative against differences."""
    x = double(0.2, -0.4).requires_grad_()
    value, y = _scene.phi(flower, x)
    operator = flower.operator(x.detach())
    hessian = torch.autograd.functional.hessian(_scene.smoothness, flower.image)
    system = torch.cat((torch.cat((hessian, operator.T), 1), torch.cat((operator, torch.zeros(400, 400)), 1)))
    solution = torch.linalg.solve(system, torch.cat((torch.zeros(784, dtype=torch.float64), flower.b)))[:784]
    torch.testing.assert_close(y.detach(), solution, rtol=1e-6, atol=1e-8)
    assert value.item() == pytest.approx(_scene.smoothness(solution).item(), rel=1e-9)
    (gradient,) = torch.autograd.grad(value, x)
    for axis in range(2):
        step = 1e-5 * torch.eye(2, dtype=torch.float64)[axis]
        ends = [_scene.phi(flower, x.detach() + sign * step)[0].item() for sign in (1, -1)]
        assert (ends[0] - ends[1]) / 2e-5 == pytest.approx(gradient[axis].item(), rel=1e-5)


def test_joint_optimum_agrees_with_phi(flower: _scene.Scene) -> None:
    """For the quadratic prior, where both are known."""
    x, y = registration.joint_optimum(flower)
    exact = registration.optimum_of(flower)
    assert (x - double(*exact["x"])).norm() < 2e-3
    assert _scene.smoothness(y).item() == pytest.approx(exact["upper"], rel=1e-2)


# --- the methods ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_hypergradient_is_phi_s_only_with_bda(
    flower: _scene.Scene, starts: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registration, "COUNTS", (25, 400))
    c, tried = registration.choose_c(flower, starts.values())
    assert [row[0] for row in tried] == [0.25 * 2**i for i in range(len(tried))]
    assert tried[-1][0] == c and tried[-1][1] <= 0.05 < min(row[1] for row in tried[:-1])
    errors = registration.hypergradient_errors(flower, {"alpha = 0": 0.0, "BDA": bda.harmonic(c)}, starts)
    at = errors["steps"].index(400)
    assert errors["alpha = 0"][at] > 1 > 0.15 > errors["BDA"][at]
    assert errors["BDA"][at] < errors["BDA"][0]


def test_a_penalty_and_a_learned_start_reach_the_losses(flower: _scene.Scene, starts: dict[str, Tensor]) -> None:
    """One step by hand."""
    y0, x = starts["image 2"].clone().requires_grad_(), double(0.1, 0.2)
    penalty = registration.LAMBDAS[1]
    known = (flower.operator(x), flower.b)
    loss = registration.lower(y0, known) + penalty * _scene.smoothness(y0)
    (gradient,) = torch.autograd.grad(loss, y0)
    rate = 1 / (1 / registration.LOWER_LR + penalty * 8.1)
    found = registration.Method("", penalty=penalty).rollout(flower, x, y0, steps=1)
    torch.testing.assert_close(found, y0 - rate * gradient)
    assert torch.autograd.grad(found.sum(), y0)[0].abs().sum() > 0


@pytest.mark.filterwarnings("ignore:y_K may be far from the fixed point")
def test_the_implicit_control(flower: _scene.Scene, starts: dict[str, Tensor]) -> None:
    """With BDA's steps it is as close to phi' as unrolling them; with alpha = 0 it says that y is left open."""
    x = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    (exact,) = torch.autograd.grad(_scene.phi(flower, x)[0], x)
    adjoint = bda.Implicit(limit=registration.PRODUCTS)

    def found(alpha: Any) -> Tensor:
        method = registration.Method("", alpha, adjoint=adjoint)
        return torch.autograd.grad(_scene.smoothness(method.rollout(flower, x, starts["zero"])), x)[0]

    assert (found(bda.harmonic(1.0)) - exact).norm() < 0.15 * exact.norm()
    with pytest.raises(RuntimeError, match="the lower level leaves y open"):
        found(0.0)


# --- the script and its results ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_smoke(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = scripts.results("registration", tmp_path, "--smoke")
    shown = capsys.readouterr().out
    assert report.tables(results) in shown
    (scene,) = results["scenes"]
    plain, aggregated = ([run for run in scene["runs"] if run["method"] == name] for name in ("alpha = 0", "BDA"))
    assert report.spread(aggregated) < 0.2 < 0.5 < report.spread(plain)
    assert (tmp_path / "registration.png").read_bytes().startswith(b"\x89PNG\r\n")
    again = scripts.results("registration", tmp_path, "--smoke", "--resume")  # nothing is left to do
    assert again["scenes"] == results["scenes"]


def test_the_figure_is_small() -> None:
    for path in (ROOT / "examples" / "figures").glob("*.png"):
        assert path.stat().st_size < 150_000


def test_the_page_says_what_was_recorded_of_eight_images() -> None:
    path = ROOT / "examples" / "results" / "registration_fashion_mnist.json"
    scenes = {found["scene"]: found for found in json.loads(path.read_text("utf-8"))["scenes"]}
    alike = [scenes[f"image {number}"] for number in range(8)]

    def runs(found: Any, method: str) -> list[Any]:
        return [run for run in found["runs"] if run["method"] == method]

    def farthest(method: str) -> float:
        return max(report.to_optimum(found, run) for found in alike for run in runs(found, method))

    for found in (*alike, scenes["image 0, noise of 5 %"], scenes["image 0, total variation"]):
        assert report.spread(runs(found, "BDA")) < 0.03 < 0.2 < report.spread(runs(found, "alpha = 0"))
    assert farthest("BDA") < 0.03 and farthest("f + 0.01 F") < 0.03 and 0.55 < farthest("f + 0.1 F") < 0.65
    assert max(report.spread(runs(found, "f + 0.001 F")) for found in alike) > 1
    learned = [report.to_optimum(alike[0], run) for run in runs(alike[0], "y_0 learned")]
    assert sorted(distance > 0.05 for distance in learned) == [False, False, True] and max(learned) < 0.065
