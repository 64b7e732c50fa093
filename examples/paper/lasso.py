r"""One l1 strength per feature, learned: a lower level that is not smooth (the paper's appendix on nonsmooth problems).

    min over x of  F(y) = 1/2 mean (A_val y - b_val)^2,  where y minimises  1/2 mean (A y - b)^2 + sum_j exp(x_j) |y_j|

A lasso with one strength for all features, chosen by cross-validation, shrinks the features that matter in order to get
rid of those that do not, and still keeps many of these. With a strength per feature the validation loss can lower the
ones and raise the others; but there are as many hyper-parameters as features, which only a hypergradient can tune.

- BDA: proximal steps (`bda.prox.l1`), with a share alpha_k = 0.5/k of the upper direction.
- prox: the same with alpha = 0, plain unrolling of proximal gradient descent.
- subgradient: the l1 term is part of the lower loss, and autograd differentiates |y| as sign(y): no prox.
- LassoCV: scikit-learn's; one strength for all, by five-fold cross-validation on training and validation data together.

Supports are read from the paper's y~, one proximal step of the lower level from y_K (`bda.lower_point`): with alpha > 0
y_K itself has no zeros. With alpha = 0 a feature that is off in all K steps has no hypergradient and stays off, and the
upper direction seldom brings one back: so all strengths start at a tenth of the least one that switches everything off.

    python examples/paper/lasso.py --seeds 10 11 12

prints a table and writes it as JSON, with one figure per problem: strengths and coefficients over the upper iterations.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import _above  # noqa: F401
import matplotlib
import torch
from _run import Checkpoint, arguments, write_atomically, write_json
from matplotlib.figure import Figure
from sklearn.datasets import load_diabetes
from sklearn.linear_model import LassoCV
from torch import Tensor

import bda_optim as bda

# --- settings ---------------------------------------------------------------------------------------------------------

STEPS = 50  # K; y_K is the start of the next upper iteration
ITERATIONS = 80  # of Adam on x
X_LR = 0.1
START = 0.1  # exp(x) at the start, in units of the strength that switches every feature off
BDA = bda.harmonic(0.5)  # alpha_k = 0.5 / k
METHODS = ("BDA", "prox", "subgradient")

FEATURES, RELEVANT = 100, 10  # of the synthetic problem
SAMPLES, TEST_SAMPLES = 100, 1000  # for training and for validation each; for the test
CORRELATION, NOISE = 0.5, 0.5  # of neighbouring features; standard deviation
DIABETES = (150, 150, 142)  # samples for training, validation and test

# --- the problems -----------------------------------------------------------------------------------------------------

Data = tuple[Tensor, Tensor]  # inputs, targets


class Problem(NamedTuple):
    train: Data
    validation: Data
    test: Data
    names: Sequence[str]
    relevant: Tensor | None  # which features are, where that is known

    def both(self) -> Data:
        """Return training and validation data together."""
        (a, b), (c, d) = self.train, self.validation
        return torch.cat((a, c)), torch.cat((b, d))


def synthetic(seed: int, features: int = FEATURES) -> Problem:
    """Few of many correlated features matter, by coefficients of 0.5 to 2 and either sign."""
    random = torch.Generator().manual_seed(seed)
    place = torch.arange(features)
    covariance = CORRELATION ** (place[:, None] - place).abs().double()
    sizes = [SAMPLES, SAMPLES, TEST_SAMPLES]
    inputs = torch.randn(sum(sizes), features, generator=random, dtype=torch.float64)
    inputs = inputs @ torch.linalg.cholesky(covariance).T
    relevant = torch.zeros(features, dtype=torch.bool)
    relevant[torch.randperm(features, generator=random)[:RELEVANT]] = True
    size = 0.5 + 1.5 * torch.rand(features, generator=random, dtype=torch.float64)
    sign = 2.0 * torch.randint(2, (features,), generator=random) - 1
    noise = NOISE * torch.randn(sum(sizes), generator=random, dtype=torch.float64)
    targets = inputs @ (relevant * sign * size) + noise
    parts = zip(inputs.split(sizes), targets.split(sizes), strict=True)
    return Problem(*parts, [f"{j}" for j in range(features)], relevant)


def diabetes(seed: int) -> Problem:
    """Ten measurements of 442 patients and the progression of their disease a year later; zero mean, unit variance."""
    bunch = load_diabetes(scaled=False)
    order = torch.randperm(len(bunch.target), generator=torch.Generator().manual_seed(seed))
    table = torch.cat([torch.tensor(bunch.data), torch.tensor(bunch.target)[:, None]], 1)[order]
    seen = table[: sum(DIABETES[:2])]  # the test data take no part in the scaling
    table = (table - seen.mean(0)) / seen.std(0)
    return Problem(*((part[:, :-1], part[:, -1]) for part in table.split(DIABETES)), bunch.feature_names, None)


PROBLEMS: dict[str, Callable[[int], Problem]] = {"synthetic": synthetic, "diabetes": diabetes}


def moved(problem: Problem, device: torch.device) -> Problem:
    dtype = torch.float32 if device.type == "mps" else torch.float64  # which has no float64
    return Problem(*(tuple(t.to(device, dtype) for t in data) for data in problem[:3]), *problem[3:])


# --- the bilevel problem ----------------------------------------------------------------------------------------------

PROX = bda.prox.l1(lambda x: x.exp())


def half_mse(y: Tensor, data: Data) -> Tensor:
    inputs, targets = data
    return 0.5 * (inputs @ y - targets).square().mean()


def rate(data: Data) -> float:
    """Return 1/L, L being the largest curvature of `half_mse`."""
    return len(data[1]) / torch.linalg.matrix_norm(data[0], 2).item() ** 2


def strongest(data: Data) -> float:
    """Return the least strength that makes every coefficient 0."""
    inputs, targets = data
    return (inputs.T @ targets).abs().max().item() / len(targets)


class Path(NamedTuple):
    """What a run went through: x and y~ at the upper iterations 0, 1, 2, ..., and the last y_K."""

    x: Tensor
    point: Tensor
    last: Tensor


def learn(
    problem: Problem,
    method: str,
    checkpoint: Checkpoint,
    *,
    label: str = "",
    steps: int = STEPS,
    iterations: int = ITERATIONS,
    start: float = START,
) -> Path:
    """Minimise the validation loss over x, by Adam; y is carried over from one upper iteration to the next."""

    def lower(y: Tensor, x: Tensor, batch: None) -> Tensor:
        return half_mse(y, problem.train)

    def penalised(y: Tensor, x: Tensor, batch: None) -> Tensor:
        return lower(y, x, batch) + (x.exp() * y.abs()).sum()

    def upper(y: Tensor, x: Tensor, batch: None) -> Tensor:
        return half_mse(y, problem.validation)

    lr = rate(problem.train)
    options: dict[str, Any] = {"steps": steps, "lr": lr, "upper_lr": rate(problem.validation)}
    options |= {"prox": None if method == "subgradient" else PROX, "alpha": BDA if method == "BDA" else 0.0}
    inner = penalised if method == "subgradient" else lower

    inputs = problem.train[0]
    y = inputs.new_zeros(inputs.shape[1])
    x = torch.full_like(y, math.log(start * strongest(problem.train))).requires_grad_()
    adam = torch.optim.Adam([x], lr=X_LR)
    path = Path(x.new_zeros(iterations, len(x)), x.new_zeros(iterations, len(x)), y)
    parts = {"x": x, "adam": adam, "y": y, "xs": path.x, "points": path.point}
    for i in checkpoint.iterations(iterations, label, **parts):
        out = bda.hypergradient(inner, upper, y, x, **options)
        y.copy_(out.params)
        path.x[i] = x.detach()
        path.point[i] = bda.lower_point(lower, y, x.detach(), lr=lr, prox=PROX)
        x.grad = out.grad
        adam.step()
    return path


# --- what is reported -------------------------------------------------------------------------------------------------


def found(problem: Problem, y: Tensor) -> dict[str, Any]:
    """Describe a support."""
    kept = y != 0
    report: dict[str, Any] = {"kept": int(kept.sum())}
    if problem.relevant is not None:
        right = int((kept & problem.relevant.to(y.device)).sum())
        report["precision"] = right / max(1, report["kept"])
        report["recall"] = right / int(problem.relevant.sum())
    else:
        report["support"] = [name for name, on in zip(problem.names, kept.tolist(), strict=True) if on]
    return report


def error(y: Tensor, data: Data) -> float:
    return 2 * half_mse(y, data).item()


def refitted(problem: Problem, y: Tensor) -> float:
    """Return the test error of least squares on the kept features alone, fitted to training and validation data."""
    inputs, targets = problem.both()
    kept = y != 0
    q, r = torch.linalg.qr(inputs[:, kept])  # `lstsq` gives other last digits from one call to the next
    y = torch.zeros_like(y)
    y[kept] = torch.linalg.solve_triangular(r, (q.T @ targets)[:, None], upper=True)[:, 0]
    return error(y, problem.test)


def judge(problem: Problem, y: Tensor) -> dict[str, Any]:
    return {**found(problem, y), "error": error(y, problem.test), "refitted_error": refitted(problem, y)}


def cross_validated(problem: Problem) -> tuple[Tensor, float]:
    """Return LassoCV's coefficients, and how many seconds they took."""
    begin = time.perf_counter()
    inputs, targets = (t.cpu().numpy() for t in problem.both())
    coefficients = LassoCV(cv=5, fit_intercept=False, max_iter=10_000).fit(inputs, targets).coef_
    return torch.tensor(coefficients).to(problem.train[0]), time.perf_counter() - begin


COLUMNS = {
    "error": "test error",
    "refitted_error": "refitted",
    "kept": "features kept",
    "precision": "precision",
    "recall": "recall",
    "nonzero": "nonzero in y_K",
    "seconds": "seconds",
}


def table(runs: Sequence[dict[str, Any]], problem: str) -> str:
    """Return means and standard deviations over the seeds, as a Markdown table."""
    chosen = [run for run in runs if run["problem"] == problem]
    keys = [key for key in COLUMNS if any(key in run for run in chosen)]
    lines = [f"| | {' | '.join(COLUMNS[key] for key in keys)} |", "|---" + "|---:" * len(keys) + "|"]
    for method in dict.fromkeys(run["method"] for run in chosen):
        cells = []
        for key in keys:
            values = [run[key] for run in chosen if run["method"] == method and key in run]
            digits = {"kept": 1, "nonzero": 1, "seconds": 1, "precision": 2, "recall": 2}.get(key, 3)
            mean = f"{statistics.mean(values):.{digits}f}" if values else ""
            cells.append(f"{mean} ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else mean)
        lines.append(f"| {method} | {' | '.join(cells)} |")
    return "\n".join(lines)


# --- the figures ------------------------------------------------------------------------------------------------------

STYLE = {"font.size": 11, "axes.spines.top": False, "axes.spines.right": False}


def figure(name: str, problem: Problem, paths: dict[str, Path], cv: Tensor) -> Figure:
    """Strengths above and coefficients below, one column per method; LassoCV's coefficients as dots at the right."""
    if problem.relevant is not None:
        colors = ["#D55E00" if on else "#b0b0b0" for on in problem.relevant.tolist()]
        labels = {int(problem.relevant.int().argmax()): "relevant", int(problem.relevant.int().argmin()): "irrelevant"}
    else:
        colors = [f"C{j}" for j in range(len(problem.names))]
        labels = dict(enumerate(problem.names))
    order = sorted(range(len(colors)), key=lambda j: problem.relevant is not None and bool(problem.relevant[j]))
    with matplotlib.rc_context(STYLE):
        fig = Figure(figsize=(13, 7), layout="constrained")
        axes = fig.subplots(2, len(paths), sharex=True, sharey="row")
        for column, (method, path) in zip(axes.T, paths.items(), strict=True):
            for j in order:
                column[0].semilogy(path.x[:, j].exp().cpu(), color=colors[j], linewidth=1.2, label=labels.get(j))
                column[1].plot(path.point[:, j].cpu(), color=colors[j], linewidth=1.2)
            column[1].scatter([1.04 * len(path.x)] * len(order), cv.cpu()[order], 9, [colors[j] for j in order])
            column[0].set_title(f"{method}: {int((path.point[-1] != 0).sum())} of {len(colors)} features kept")
            column[1].set_xlabel("upper iteration")
        axes[0, 0].set_ylabel("strength $\\exp(x_j)$")
        axes[1, 0].set_ylabel("coefficient $\\tilde y_j$ (dots: LassoCV)")
        fig.suptitle(f"{name}: one l1 strength per feature, learned on the validation data")
        fig.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside right center", frameon=False)
    return fig


# --- what the command does --------------------------------------------------------------------------------------------


def parse() -> argparse.Namespace:
    parser = arguments(
        "One l1 strength per feature: BDA with a prox against LassoCV and subgradient unrolling.", "lasso"
    )
    parser.add_argument("--problems", nargs="+", choices=PROBLEMS, default=list(PROBLEMS))
    parser.add_argument("--steps", type=int, default=STEPS, help="K, lower steps")
    parser.add_argument("--iterations", type=int, default=ITERATIONS, help="upper iterations")
    parser.add_argument("--start", type=float, default=START, help="strength at the start; at 1 every feature is off")
    args = parser.parse_args()
    if min(args.steps, args.iterations) < 1 or args.start <= 0:
        parser.error("--steps and --iterations must be at least 1, and --start above 0")
    if args.smoke:
        args.steps, args.iterations = 5, 12
    return args


def main() -> None:
    args = parse()
    options = {"steps": args.steps, "iterations": args.iterations, "start": args.start}
    settings = {**options, "device": str(args.device)}
    runs: list[dict[str, Any]] = []
    for name in args.problems:
        for seed in args.seeds:
            problem = moved(PROBLEMS[name](seed), args.device)
            paths, head = {}, {"problem": name, "seed": seed}
            for method in METHODS:
                checkpoint = Checkpoint(args.out / f"{name}_{method}_{seed}.pt", settings, resume=args.resume)
                path = learn(problem, method, checkpoint, label=f"{name}, {method}, seed {seed}", **options)
                extra = {"nonzero": int((path.last != 0).sum()), "seconds": checkpoint.seconds}
                runs.append({**head, "method": method, **judge(problem, path.point[-1]), **extra})
                paths[method] = path
            cv, seconds = cross_validated(problem)
            runs.append({**head, "method": "LassoCV", **judge(problem, cv), "seconds": seconds})
            if seed == args.seeds[0]:
                fig = figure(name, problem, paths, cv)
                write_atomically(args.out / f"lasso_{name}.png", lambda file, fig=fig: fig.savefig(file, dpi=120))
        print(f"\n{name}, mean ± standard deviation over {len(args.seeds)} seeds:\n\n{table(runs, name)}\n")
    write_json(args.out / "lasso.json", {"settings": {**settings, "seeds": args.seeds}, "runs": runs})
    print(f"written to {args.out}")


if __name__ == "__main__":
    main()
