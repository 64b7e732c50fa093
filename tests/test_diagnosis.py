"""What `diagnose` measures, against other ways to the same number, on two problems of each kind."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import diagnosed
import pytest
import torch
from diagnosed import Problem
from torch import Tensor

import bda_optim as bda

HALF = bda.harmonic(0.5)

PROBLEMS: dict[str, tuple[Problem, int, Any]] = {
    "counter-example": (diagnosed.counterexample(0.0), 16, 0.0),
    "counter-example, scaled": (diagnosed.counterexample(-0.4, scale=3.0, start=(1.0, -3.0)), 25, 0.0),
    "counter-example, BDA": (diagnosed.counterexample(0.0), 16, HALF),
    "counter-example, scaled, BDA": (diagnosed.counterexample(0.7, scale=0.5), 40, bda.polynomial(0.4, 0.7)),
    "ridge": (diagnosed.ridge(), 128, 0.0),
    "ridge, BDA": (diagnosed.ridge(60, 35, seed=50), 90, HALF),
    "least squares": (diagnosed.least_squares(), 256, 0.0),
    "least squares, larger": (diagnosed.least_squares(14, 50, 7, seed=200), 150, HALF),
    "cleaning": (diagnosed.cleaning(), 100, 0.0),
    "cleaning, smaller": (diagnosed.cleaning(200, 12, 4, seed=40), 130, 0.0),
    "mlp": (diagnosed.mlp(), 150, 0.0),
    "mlp, wider": (diagnosed.mlp(30, 12, 2, 6, seed=60), 80, 0.0),
}

each = pytest.mark.parametrize("name", PROBLEMS)


@pytest.fixture(scope="module")
def reports() -> dict[str, bda.Diagnosis]:
    found = {}
    for name, (problem, steps, alpha) in PROBLEMS.items():
        found[name] = problem.call(bda.diagnose, steps=steps, alpha=alpha, suggest=False)
    return found


def flat(tree: Any) -> Tensor:
    values = tree.values() if isinstance(tree, dict) else [tree]
    return torch.cat([value.detach().reshape(-1) for value in values])


def rolled(name: str, **options: Any) -> bda.Hypergradient:
    problem, steps, alpha = PROBLEMS[name]
    return problem.call(bda.hypergradient, steps=steps, alpha=alpha, **options)


def dense(name: str, level: str) -> tuple[Tensor, Tensor]:
    """The whole Hessian of a level at y_K, and its gradient, by torch's own functions."""
    problem, _, _ = PROBLEMS[name]
    last = rolled(name).params
    shapes = [last.shape] if isinstance(last, Tensor) else [value.shape for value in last.values()]

    def loss(vector: Tensor) -> Tensor:
        parts = vector.split([math.prod(shape) for shape in shapes])
        parts = [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]
        params = parts[0] if isinstance(last, Tensor) else dict(zip(last, parts, strict=True))
        return getattr(problem, level)(params, problem.hyper, None)

    point = flat(last)
    return torch.func.hessian(loss)(point), torch.func.grad(loss)(point)


# --- the sweep --------------------------------------------------------------------------------------------------------


def test_the_numbers_of_the_counterexample(reports: dict[str, bda.Diagnosis]) -> None:
    plain, aggregated = reports["counter-example"], reports["counter-example, BDA"]
    assert plain.start == pytest.approx(0.904, abs=1e-3)
    assert plain.flat_share == pytest.approx(0.8179, abs=1e-3)
    assert aggregated.start == pytest.approx(0.148, abs=1e-3)
    assert aggregated.flat_share == pytest.approx(0.2946, abs=1e-3)
    assert {T: round(bias, 3) for T, bias in plain.truncation.items()} == {1: 0.25, 2: 0.198, 4: 0.123, 8: 0.045}


@each
def test_the_memory_of_the_start_is_a_derivative(name: str, reports: dict[str, bda.Diagnosis]) -> None:
    """dF/dy_0 by an unrolled rollout whose start requires grad."""
    problem, steps, alpha = PROBLEMS[name]
    start = {"": problem.params} if isinstance(problem.params, Tensor) else problem.params
    leaves = {key: value.clone().requires_grad_() for key, value in start.items()}
    given = leaves[""] if isinstance(problem.params, Tensor) else leaves
    options = {**problem.settings, "steps": steps, "alpha": alpha}
    last = bda.rollout(problem.lower, problem.upper, given, problem.hyper, **options)
    value = problem.upper(last, problem.hyper, None)
    ends = [last] if isinstance(last, Tensor) else list(last.values())
    first = torch.autograd.grad(value, list(leaves.values()), retain_graph=True)
    end = torch.autograd.grad(value, ends)
    want = float(torch.cat([g.reshape(-1) for g in first]).norm() / torch.cat([g.reshape(-1) for g in end]).norm())
    report = reports[name]
    assert report.start == pytest.approx(want, rel=1e-10)
    assert report.adjoint_norms[0] == report.start
    assert report.adjoint_norms[-1] == pytest.approx(1.0)
    assert len(report.adjoint_norms) == steps + 1
    assert report.max_growth == max(report.adjoint_norms)
    assert report.value == pytest.approx(float(value.detach()), rel=1e-12)


@each
def test_the_bias_of_every_truncation(name: str, reports: dict[str, bda.Diagnosis]) -> None:
    exact = flat(rolled(name).grad)
    report = reports[name]
    assert list(report.truncation) == [2**j for j in range(12) if 2**j < report.steps]
    for last, bias in report.truncation.items():
        cut = flat(rolled(name, adjoint=bda.Truncated(last=last)).grad)
        assert bias == pytest.approx(float((cut - exact).norm() / exact.norm()), abs=1e-10)


def test_truncation_cannot_be_read_off_the_adjoint_norms(reports: dict[str, bda.Diagnosis]) -> None:
    """On least squares the norms stay high although the bias of Truncated(64) is small; on the network they do too."""
    report = reports["least squares"]
    assert min(report.adjoint_norms) > 0.3
    assert report.truncation[64] < 1e-4
    assert reports["mlp"].truncation[64] > 0.5


@each
def test_the_change_from_half_the_steps(name: str, reports: dict[str, bda.Diagnosis]) -> None:
    problem, steps, alpha = PROBLEMS[name]
    half = flat(problem.call(bda.hypergradient, steps=steps // 2, alpha=alpha).grad)
    whole = flat(rolled(name).grad)
    assert reports[name].change == pytest.approx(float((half - whole).norm() / whole.norm()), rel=1e-9, abs=1e-12)


# --- curvature --------------------------------------------------------------------------------------------------------


@each
def test_curvature_is_that_of_the_dense_hessians(name: str, reports: dict[str, bda.Diagnosis]) -> None:
    report = reports[name]
    lower, _ = dense(name, "lower")
    upper, slope = dense(name, "upper")
    values, vectors = torch.linalg.eigh(lower)
    above = torch.linalg.eigvalsh(upper)
    assert report.lower_smoothness == pytest.approx(float(values[-1]), rel=1e-3)
    assert report.lower_lowest == pytest.approx(float(values[0]), abs=1e-6 * float(values[-1]))
    assert report.upper_smoothness == pytest.approx(float(above[-1]), rel=1e-3)
    assert report.upper_strong_convexity_interval[0] <= above[0] <= report.upper_strong_convexity_interval[1]
    assert report.upper_strong_convexity == pytest.approx(float(above[0]), abs=2e-4 * float(above[-1]))
    assert report.flat_threshold is not None
    shares = (vectors.T @ slope) ** 2 / slope.norm() ** 2
    lr = PROBLEMS[name][0].settings["lr"]
    assert report.flat_threshold == pytest.approx(math.log(2) / (report.steps * lr))
    assert report.flat_directions == int((values <= report.flat_threshold).sum())
    assert report.flat_directions_error == 0
    assert report.flat_share == pytest.approx(float(shares[values <= report.flat_threshold].sum()), abs=1e-6)
    assert report.condition == pytest.approx(float(values[-1] / values[values > report.flat_threshold][0]), rel=1e-6)


@pytest.mark.parametrize(
    ("problem", "steps"),
    [(diagnosed.least_squares(100, 300, 5, seed=500), 100), (diagnosed.cleaning(300, 100, 3, seed=510), 120)],
    ids=["least squares", "cleaning"],
)
def test_above_256_parameters_lanczos_estimates_what_is_flat(problem: Problem, steps: int) -> None:
    report = problem.call(bda.diagnose, steps=steps, suggest=False)
    assert report.flat_directions_error is not None and report.flat_directions_error > 0
    last = problem.call(bda.hypergradient, steps=steps).params
    shapes = {"": last.shape} if isinstance(last, Tensor) else {key: value.shape for key, value in last.items()}

    def loss(vector: Tensor, level: Any) -> Tensor:
        parts = vector.split([math.prod(shape) for shape in shapes.values()])
        tree = {key: part.reshape(shape) for part, (key, shape) in zip(parts, shapes.items(), strict=True)}
        return level(tree.get("", tree), problem.hyper, None)

    point = flat(last)
    values, vectors = torch.linalg.eigh(torch.func.hessian(loss)(point, problem.lower))
    above = torch.linalg.eigvalsh(torch.func.hessian(loss)(point, problem.upper))
    shares = (vectors.T @ torch.func.grad(loss)(point, problem.upper)) ** 2
    is_flat = values <= report.flat_threshold
    assert report.lower_smoothness == pytest.approx(float(values[-1]), rel=1e-3)
    assert report.upper_smoothness == pytest.approx(float(above[-1]), rel=1e-3)
    assert report.upper_strong_convexity_interval[0] <= above[0] <= report.upper_strong_convexity_interval[1]
    assert report.flat_share == pytest.approx(float(shares[is_flat].sum() / shares.sum()), abs=0.02)
    number, size = int(is_flat.sum()), len(values)
    assert report.flat_directions == pytest.approx(number, abs=3 * math.sqrt(2 * number * (1 - number / size) / 4))


def test_the_threshold_knows_how_long_the_rollout_is() -> None:
    """A continuum of curvatures: what is flat at K = 1000 is not what is flat at K = 50."""
    curvatures = torch.logspace(-4, 0, 200, dtype=torch.float64)
    problem = Problem(
        lambda y, x, b: 0.5 * (curvatures * (y - x) ** 2).sum(),
        lambda y, x, b: 0.5 * ((y - 1) ** 2).sum(),
        torch.zeros(200, dtype=torch.float64),
        torch.tensor(0.5, dtype=torch.float64),
        {"lr": 1.0},
    )
    for steps in (50, 400):
        report = problem.call(bda.diagnose, steps=steps, suggest=False)
        assert report.flat_directions == int((curvatures <= math.log(2) / steps).sum())


# --- findings ---------------------------------------------------------------------------------------------------------


def codes(report: bda.Diagnosis) -> set[str]:
    return {finding.code for finding in report.findings}


def test_a_singular_hessian_is_no_verdict(reports: dict[str, bda.Diagnosis]) -> None:
    for name in ("cleaning", "cleaning, smaller"):
        assert reports[name].flat_directions > 10
        assert reports[name].flat_share < 1e-3
        assert "start" not in codes(reports[name])
    for name in ("counter-example", "counter-example, scaled", "least squares", "mlp", "mlp, wider"):
        assert "start" in codes(reports[name])
    assert not codes(reports["ridge"])
    assert "weak-alpha" in codes(reports["counter-example, BDA"])
    assert {"not-convex", "sigma"} <= codes(reports["mlp"])


def test_a_start_that_more_steps_forget_is_not_blamed_on_alpha() -> None:
    report = diagnosed.ridge().call(bda.diagnose, steps=5, suggest=False)
    (finding,) = [finding for finding in report.findings if finding.code == "start"]
    assert "single solution" in finding.advice and "harmonic" not in finding.advice


@pytest.mark.parametrize(
    ("lr", "steps", "growth"), [pytest.param(0.01, 800, 1e77, marks=pytest.mark.slow), (0.05, 300, 1e47)]
)
def test_adjoints_that_explode(lr: float, steps: int, growth: float) -> None:
    """RMSprop divides by eps once y has arrived; the exact hypergradient is then no number to use."""
    problem = Problem(
        lambda y, x, b: 0.5 * ((y - x) ** 2).sum(),
        lambda y, x, b: 0.5 * ((y - 3) ** 2).sum(),
        torch.zeros(2, dtype=torch.float64),
        torch.tensor([1.0, 0.5], dtype=torch.float64),
        {"lr": lr, "rule": torch.optim.RMSprop},
    )
    report = problem.call(bda.diagnose, steps=steps)
    assert growth < report.max_growth < 10 * growth
    assert "explodes" in codes(report)
    wrong = problem.call(bda.hypergradient, steps=steps).grad
    want = torch.tensor([-2.0, -2.5], dtype=torch.float64)
    assert (wrong - want).abs().max() > 1
    settings = report.suggestion.settings
    assert settings["steps"] < steps
    assert "explodes" not in codes(problem.call(bda.diagnose, suggest=False, **settings))
    assert problem.call(bda.hypergradient, **settings).grad == pytest.approx(want, rel=1e-2)
    json.dumps(report.as_dict(), allow_nan=False)


@pytest.mark.parametrize("rule", [torch.optim.Adam, torch.optim.RMSprop])
def test_a_scale_free_rule_with_alpha(rule: Any) -> None:
    """y settles where both levels' steps balance, whatever x is: the hypergradient tends to 0 where SGD's is not."""
    problem = Problem(
        lambda y, x, b: 0.5 * (y - x) ** 2,
        lambda y, x, b: 0.5 * (y - 3) ** 2,
        torch.tensor(0.0, dtype=torch.float64),
        torch.tensor(1.0, dtype=torch.float64),
        {"lr": 0.01, "upper_lr": 0.1, "alpha": 0.1},
    )
    report = problem.call(bda.diagnose, steps=60, rule=rule, suggest=False)
    assert "scale-free-rule" in codes(report)
    assert report.flat_directions is None and "not measured" in str(report)
    assert "scale-free-rule" not in codes(problem.call(bda.diagnose, steps=60, suggest=False))
    assert "scale-free-rule" not in codes(problem.call(bda.diagnose, steps=60, rule=rule, alpha=0.0, suggest=False))


def test_rates_beyond_their_limits() -> None:
    problem = diagnosed.counterexample()
    for rate, level in ((1.5, "warning"), (2.5, "error")):
        report = problem.call(bda.diagnose, steps=20, lr=rate, suggest=False)
        assert [(f.code, f.level) for f in report.findings if f.code == "rate"] == [("rate", level)]
        assert report.lower_rate == pytest.approx(rate)
    assert "rate" not in codes(problem.call(bda.diagnose, steps=20, lr=1.0, suggest=False))
    report = problem.call(bda.diagnose, steps=20, alpha=HALF, upper_lr=1.2, suggest=False)
    assert "rate" in codes(report) and report.upper_rate_limit == pytest.approx(1.0)
    with_momentum = problem.call(bda.diagnose, steps=20, lr=1.5, momentum=0.5, suggest=False)
    assert "rate" not in codes(with_momentum) and with_momentum.lower_rate_limit == pytest.approx(3.0)


def test_a_last_weight_that_biases() -> None:
    report = diagnosed.ridge().call(bda.diagnose, steps=128, alpha=0.3, suggest=False)
    assert "strong-alpha" in codes(report)
    assert report.last_weight == 0.3
    problem = diagnosed.ridge()
    assert problem.error(problem.call(bda.hypergradient, steps=128, alpha=0.3).grad) > 0.1


def test_a_truncation_of_the_users_own() -> None:
    problem = diagnosed.ridge()
    report = problem.call(bda.diagnose, steps=128, adjoint=bda.Truncated(last=10), suggest=False)
    assert "truncated" in codes(report) and 10 in report.truncation
    assert "truncated" not in codes(
        problem.call(bda.diagnose, steps=128, adjoint=bda.Truncated(last=100), suggest=False)
    )


# --- the report -------------------------------------------------------------------------------------------------------


@each
def test_the_report_is_plain_and_prints(name: str, reports: dict[str, bda.Diagnosis]) -> None:
    report = reports[name]
    content = json.loads(json.dumps(report.as_dict(), allow_nan=False))
    assert content["start"] == report.start
    assert content["memory"] == report.memory
    assert [finding["code"] for finding in content["findings"]] == [finding.code for finding in report.findings]
    text = str(report)
    assert text.startswith(f"diagnosis of K={report.steps} steps, lr=")
    assert all(finding.sentence in text and finding.advice in text for finding in report.findings)
    assert ("not evaluated in the inner loop" in text) == (PROBLEMS[name][2] == 0.0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.start = 0.0  # type: ignore[misc]


@each
def test_two_runs_agree_to_the_bit(name: str, reports: dict[str, bda.Diagnosis]) -> None:
    problem, steps, alpha = PROBLEMS[name]
    torch.manual_seed(99)
    again = problem.call(bda.diagnose, steps=steps, alpha=alpha, suggest=False)
    assert again.as_dict() == reports[name].as_dict()


def test_the_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted from outside: calls of the lower loss, and backward passes through a recorded gradient."""
    for problem, steps in ((diagnosed.ridge(), 40), (diagnosed.mlp(), 30), (diagnosed.least_squares(100, 300), 400)):
        calls = {"lower": 0, "products": 0}

        def lower(*args: Any, problem: Problem = problem, calls: dict[str, int] = calls) -> Tensor:
            calls["lower"] += 1
            return problem.lower(*args)

        original = bda._diagnosis.curvature.Hessian.__call__

        def counted(self: Any, v: Tensor, original: Any = original, calls: dict[str, int] = calls) -> Tensor:
            calls["products"] += 1
            return original(self, v)

        with monkeypatch.context() as patch:
            patch.setattr(bda._diagnosis.curvature.Hessian, "__call__", counted)
            report = bda.diagnose(
                lower, problem.upper, problem.params, problem.hyper, steps=steps, suggest=False, **problem.settings
            )
        assert report.products == calls["products"] <= 120 + 5 * max(24, 1.5 * math.sqrt(steps))
        assert report.step_evaluations <= calls["lower"] <= 6 * steps
        few = problem.call(bda.diagnose, steps=steps, products=60, suggest=False)
        assert few.products <= 60
        if few.parameters >= 256:
            more = problem.call(bda.diagnose, steps=steps, products=600, suggest=False)
            assert report.products < more.products <= 600


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_very_short_rollouts(steps: int) -> None:
    report = diagnosed.counterexample().call(bda.diagnose, steps=steps)
    assert report.step_evaluations <= 6 * steps
    assert (report.change is None) == (steps == 1)
    assert len(report.truncation) == (0, 1, 2)[steps - 1]
    json.dumps(report.as_dict(), allow_nan=False)


def test_progress_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    stages: dict[str, list[tuple[int, int]]] = {}

    def note(stage: str, done: int, total: int) -> None:
        stages.setdefault(stage, []).append((done, total))

    diagnosed.counterexample().call(bda.diagnose, steps=16, progress=note)
    assert {"sweep", "half", "curvature", "harmonic(0.25)"} <= set(stages)
    assert all(told[-1][0] == told[-1][1] for told in stages.values())
    pytest.importorskip("tqdm")
    diagnosed.counterexample().call(bda.diagnose, steps=16, progress=True, suggest=False)
    assert "sweep: 100%" in capsys.readouterr().err
    with pytest.raises(TypeError, match="progress"):
        diagnosed.counterexample().call(bda.diagnose, steps=16, progress="yes")


def test_the_figure(tmp_path: Any, reports: dict[str, bda.Diagnosis]) -> None:
    pytest.importorskip("matplotlib")
    for name in ("counter-example", "ridge, BDA", "mlp"):
        path = tmp_path / f"{name}.png"
        reports[name].plot(path)
        assert path.read_bytes().startswith(b"\x89PNG\r\n") and path.stat().st_size > 20_000
    adaptive = diagnosed.ridge().call(bda.diagnose, steps=20, rule=torch.optim.Adam, suggest=False)
    adaptive.plot(tmp_path / "adaptive.png")


def test_what_is_refused() -> None:
    problem = diagnosed.counterexample()
    with pytest.raises(TypeError, match="upper=None"):
        problem._replace(upper=None).call(bda.diagnose, steps=4)
    with pytest.raises(ValueError, match="one task; got tasks=3"):
        problem.call(bda.diagnose, steps=4, tasks=3)
    with pytest.raises(ValueError, match="`products` must be at least 60"):
        problem.call(bda.diagnose, steps=4, products=5)
    with pytest.raises(ValueError, match="`probes`"):
        problem.call(bda.diagnose, steps=4, probes=0)
    with pytest.raises(ValueError, match="real parameters"):
        problem._replace(params=torch.zeros(2, dtype=torch.complex128)).call(bda.diagnose, steps=4)
    with pytest.raises(FloatingPointError, match="diverged"):
        problem.call(bda.diagnose, steps=2000, lr=3.0)
    with pytest.raises(TypeError, match="by position"):
        bda.diagnose(problem.lower, problem.upper, problem.params, problem.hyper, 4)  # type: ignore[misc]
    captured = torch.ones((), dtype=torch.float64, requires_grad=True)
    with pytest.raises(ValueError, match="neither in `hyper=`"):
        problem._replace(lower=lambda y, x, b: captured * problem.lower(y, x)).call(bda.diagnose, steps=4)
    with pytest.raises(TypeError, match="read once"):
        problem.call(bda.diagnose, steps=4, batches=iter([None] * 4))
    with pytest.raises(ValueError, match=r"torch\.func"):
        torch.func.vmap(lambda x: problem._replace(hyper=x).call(bda.diagnose, steps=4))(torch.zeros(2))
