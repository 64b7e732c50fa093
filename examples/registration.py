r"""Recover an image and the motion of the camera from too few numbers: where alpha matters.

A camera moves with an unknown velocity x (2 numbers) over an image y (784 pixels). In each of 4 exposures it takes 100
random patterns of what it sees: 400 numbers b for 786 unknowns. The lower level asks that the image explains them, the
upper level that it is smooth:

    min over x of  F(y) = 1/2 |differences of neighbouring pixels|^2 + 0.05/2 |y|^2,
    where y minimises  f(x, y) = 1/2 |A(x) y - b|^2

For every x, f leaves 384 directions of y open. Unrolled gradient steps on f alone (alpha = 0) stay in those directions
where y_0 was, so the x that they return depends on y_0. With alpha_k = c / k the upper level decides there. F is
quadratic, so the exact answer is known, and everything is compared with it:

    phi(x) = min of F over the solutions of the lower level = 1/2 b' (A Q^-1 A')^-1 b,  Q the Hessian of F

No labels occur. The true x and y serve for judging only. c is found by the search of `choose_c`: doubled until y_K has
forgotten y_0.

    python examples/registration.py                     one photograph, three starts, both methods, the figure: minutes
    python examples/registration.py --full --data DIR   eight images of FashionMNIST, controls, noise, another prior

Controls, in --full: alpha = 0 with the lower loss f + lambda F; alpha = 0 with y_0 learned together with x; the steps
of BDA with the adjoint `Implicit` (which refuses alpha = 0 here, since the lower level does not determine y).
"""

from __future__ import annotations

import argparse
import functools
import itertools
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from _figures import write_small
from _registration_report import figure, images_figure, tables
from _run import Checkpoint, arguments, provenance, wait_while_paused, write_atomically, write_json
from _scene import QUADRATIC, TOTAL_VARIATION, Prior, Scene, draw_starts, phi, photographs, scene
from scipy.optimize import minimize
from torch import Tensor

import bda_optim as bda

# --- settings ---------------------------------------------------------------------------------------------------------

STEPS = 400  # K
LOWER_LR = 0.4  # 0.94 / L_f: the eigenvalues of A A' end at 2.36
FORGOTTEN = 0.05  # |dF/dy_0| / |dF/dy_K| at which the search for c stops
LAMBDAS = (1e-3, 1e-2, 1e-1)  # of the control
LEARNED_START_ITERATIONS = 60
PRODUCTS = 1000  # of a solve of `Implicit`, at most
GRADIENT_TOLERANCE = 1e-4  # of BFGS


# --- the two levels ---------------------------------------------------------------------------------------------------

Known = tuple[Tensor, Tensor]  # A(x) and b: A is computed once for all steps, and gradients go through it to x


def lower(y: Tensor, known: Known, batch: None = None) -> Tensor:
    operator, b = known
    return (operator @ y - b).square().sum() / 2


class Method(NamedTuple):
    """How y_K is made of x and y_0."""

    name: str
    alpha: Any = 0.0
    penalty: float = 0.0  # lambda: the lower loss is f + lambda F
    learned_start: bool = False
    adjoint: Any = None  # Unroll
    compile: bool = False  # takes seconds once, and a hypergradient a half (alpha = 0) to a third (BDA) of the time

    def rollout(self, of: Scene, x: Tensor, y0: Tensor, steps: int | None = None) -> Tensor:
        """Return y_K, differentiable in x and y_0; K is STEPS unless given."""
        prior, penalty = of.prior, self.penalty
        rates = {"lr": 1 / (1 / LOWER_LR + penalty * 2 / prior.rate), "upper_lr": prior.rate}
        losses, known = LOSSES[prior.name, penalty], (of.operator(x), of.b)
        options = {"steps": steps or STEPS, "alpha": self.alpha, "adjoint": self.adjoint, "compile": self.compile}
        return bda.rollout(*losses, y0, known, **options, **rates)


def losses_of(prior: Prior, penalty: float) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """Return f + lambda F and F."""

    def penalised(y: Tensor, known: Known, batch: None = None) -> Tensor:
        return lower(y, known) + penalty * prior.value(y)

    def upper(y: Tensor, known: Known, batch: None = None) -> Tensor:
        return prior.value(y)

    return penalised if penalty else lower, upper


# One function per problem, made once: a compiled step belongs to its losses.
LOSSES = {
    (prior.name, penalty): losses_of(prior, penalty)
    for prior, penalty in itertools.product((QUADRATIC, TOTAL_VARIATION), (0.0, *LAMBDAS))
}

# --- the exact answer -------------------------------------------------------------------------------------------------


def joint_optimum(of: Scene, weight: float = 1e4) -> tuple[Tensor, Tensor]:
    """Return x and y of the least weight * f + F, searched from the truth: the stand-in where phi is not known."""

    def value(both: Tensor) -> Tensor:
        x, y = both[:2], both[2:]
        return weight * lower(y, (of.operator(x), of.b)) + of.prior.value(y)

    point = torch.cat((of.velocity, of.image))
    found = torch.from_numpy(search(value, point, method="L-BFGS-B", maxiter=5000).x)
    return found[:2], found[2:]


# --- the search for x -------------------------------------------------------------------------------------------------


def search(value: Callable[[Tensor], Tensor], start: Tensor, method: str = "BFGS", **options: Any) -> Any:
    """Minimise by scipy's quasi-Newton methods, with gradients of autograd."""

    def value_and_gradient(at: np.ndarray) -> tuple[float, np.ndarray]:
        wait_while_paused()
        x = torch.from_numpy(at.copy()).requires_grad_()
        out = value(x)
        (gradient,) = torch.autograd.grad(out, x)
        return out.item(), gradient.numpy().copy()

    return minimize(value_and_gradient, start.numpy(), jac=True, method=method, options=options)


def memory(of: Scene, alpha: Any, y0: Tensor) -> float:
    """Return |dF/dy_0| / |dF/dy_K| at x = 0: how much of y_0 is left in y_K, as far as F can see."""
    y0 = y0.clone().requires_grad_()
    last = Method("", alpha).rollout(of, torch.zeros(2, dtype=y0.dtype), y0)
    at_start, at_end = torch.autograd.grad(of.prior.value(last), (y0, last))
    return (at_start.norm() / at_end.norm()).item()


def choose_c(of: Scene, starts: Iterable[Tensor]) -> tuple[float, list[tuple[float, float]]]:
    """Double c of alpha_k = c / k, from 1/4, until y_K has forgotten each of the starts; return all that was tried."""
    tried = []
    for c in (2.0**power for power in range(-2, 12)):
        tried.append((c, max(memory(of, bda.harmonic(c), y0) for y0 in starts)))
        if tried[-1][1] <= FORGOTTEN:
            break
    return tried[-1][0], tried


def recover(of: Scene, method: Method, y0: Tensor) -> dict[str, Any]:
    """Search x from 0, and y_0 with it where the method learns it; return what came out, as plain numbers."""
    begin = time.process_time()
    x = torch.zeros(2, dtype=y0.dtype)
    if method.learned_start:
        found = search(
            lambda both: of.prior.value(method.rollout(of, both[:2], both[2:])),
            torch.cat((x, y0)),
            maxiter=LEARNED_START_ITERATIONS,
        )
        y0 = torch.from_numpy(found.x[2:])
    else:
        found = search(lambda x: of.prior.value(method.rollout(of, x, y0)), x, gtol=GRADIENT_TOLERANCE)
    x = torch.from_numpy(found.x[:2])
    with torch.no_grad():
        y = method.rollout(of, x, y0)
    return {
        "x": x.tolist(),
        "upper": of.prior.value(y).item(),
        "lower": lower(y, (of.operator(x), of.b)).item(),
        "image_error": ((y - of.image).norm() / of.image.norm()).item(),
        "image": [round(value, 4) for value in y.tolist()],
        "evaluations": int(found.nfev),
        "seconds": round(time.process_time() - begin, 1),
    }


# --- what the figure shows --------------------------------------------------------------------------------------------

LINE = [round(-0.5 + 0.2 * number, 1) for number in range(14)]  # multiples of the optimal x
PLANE = [round(-1.2 + 0.15 * number, 2) for number in range(17)]  # both coordinates of x
COUNTS = (25, 50, 100, 200, 400, 800)  # K


def along_a_line(of: Scene, optimum: Tensor, methods: Iterable[Method], starts: dict[str, Tensor]) -> dict[str, Any]:
    """Return phi and F(y_K) at multiples of the optimal x, for every method and start."""
    points = [t * optimum for t in LINE]
    found: dict[str, Any] = {"t": LINE, "phi": [phi(of, x)[0].item() for x in points]}
    with torch.no_grad():
        for method in methods:
            curves = [[of.prior.value(method.rollout(of, x, y0)).item() for x in points] for y0 in starts.values()]
            found[method.name] = curves
    return found


def in_the_plane(of: Scene) -> dict[str, Any]:
    """Return phi on a grid of x."""
    grid = [[phi(of, torch.tensor([down, right], dtype=of.b.dtype))[0].item() for right in PLANE] for down in PLANE]
    return {"axis": PLANE, "phi": grid}


def hypergradient_errors(of: Scene, alphas: dict[str, Any], starts: dict[str, Tensor]) -> dict[str, Any]:
    """Return the relative error of the hypergradient at x = 0 against that of phi, the worst of the starts."""
    x = torch.zeros(2, dtype=of.b.dtype, requires_grad=True)
    (exact,) = torch.autograd.grad(phi(of, x)[0], x)

    def error(alpha: Any, steps: int, y0: Tensor) -> float:
        wait_while_paused()
        (found,) = torch.autograd.grad(of.prior.value(Method("", alpha).rollout(of, x, y0, steps)), x)
        return ((found - exact).norm() / exact.norm()).item()

    curves = {
        name: [max(error(alpha, steps, y0) for y0 in starts.values()) for steps in COUNTS]
        for name, alpha in alphas.items()
    }
    return {"steps": list(COUNTS), **curves}


# --- what the command does --------------------------------------------------------------------------------------------


class Job(NamedTuple):
    """A scene, the starts to recover it from, and which controls to run."""

    scene: Scene
    starts: dict[str, Tensor]
    controls: bool = False
    learned_start: bool = False  # the dearest control


def jobs(args: argparse.Namespace) -> list[Job]:
    """Return what is to be done; the first job is the figure's."""
    if args.data is None:
        (name, number, image), (_, _, other) = photographs()
        return [Job(scene(name, image, number), draw_starts(3, [other]), controls=args.full)]
    from _data import fashion_mnist

    images = fashion_mnist(args.data)[2].double() / 255
    others = list(images[100:110])
    three = draw_starts(3, others)
    if not args.full:
        return [Job(scene("image 0", images[0], 0), three)]
    found = [Job(scene("image 0, ten starts", images[0], 0), draw_starts(10, others))]
    found += [Job(scene(f"image {n}", images[n], n), three, controls=True, learned_start=n == 0) for n in range(8)]
    found.append(Job(scene("image 0, noise of 5 %", images[0], 0, noise=0.05), three, controls=True))
    found.append(Job(scene("image 0, total variation", images[0], 0, prior=TOTAL_VARIATION), three, controls=True))
    return found


def optimum_of(of: Scene) -> dict[str, Any]:
    """Return the answer that everything is compared with."""
    if of.prior is QUADRATIC:
        x = torch.from_numpy(search(lambda x: phi(of, x)[0], of.velocity, gtol=1e-8).x)
        y = phi(of, x)[1]
    else:
        x, y = joint_optimum(of)
    error = ((y - of.image).norm() / of.image.norm()).item()
    return {"x": x.tolist(), "upper": of.prior.value(y).item(), "image_error": error, "image": y.tolist()}


def saved(args: argparse.Namespace, of: Scene, name: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what `make` makes; with --resume what is finished is read."""
    settings = {"scene": of.name, "steps": STEPS, "lower_lr": LOWER_LR, "forgotten": FORGOTTEN}
    path = args.out / "runs" / f"{of.name}, {name}.pt".replace(" ", "_")
    checkpoint = Checkpoint(path, settings, resume=args.resume)
    state = checkpoint.load() or make()
    checkpoint.save(state)
    return state


def work(job: Job, args: argparse.Namespace) -> dict[str, Any]:
    """Recover one scene from all starts by all methods."""
    of, starts = job.scene, job.starts
    once = functools.partial(saved, args, of)
    chosen = once("c", lambda: dict(zip(("c", "tried"), choose_c(of, starts.values()), strict=True)))
    methods = [Method("alpha = 0"), Method("BDA", bda.harmonic(chosen["c"]))]
    if job.controls:
        methods += [Method(f"f + {penalty:g} F", penalty=penalty) for penalty in LAMBDAS]
        methods.append(Method("BDA, Implicit", methods[1].alpha, adjoint=bda.Implicit(limit=PRODUCTS)))
    if job.learned_start:
        methods.append(Method("y_0 learned", learned_start=True))
    many = args.full and args.data is not None
    methods = [method._replace(compile=many and method.adjoint is None) for method in methods]
    runs = []
    for method, (start, y0) in itertools.product(methods, starts.items()):
        found = once(f"{method.name}, {start}", lambda method=method, y0=y0: recover(of, method, y0))
        runs.append({"method": method.name, "start": start, **found})
        print(f"{of.name}: {method.name} from {start}: x = {found['x'][0]:.3f}, {found['x'][1]:.3f}", flush=True)
    optimum = once("optimum", lambda: optimum_of(of))
    return {"scene": of.name, **chosen, "velocity": of.velocity.tolist(), "optimum": optimum, "runs": runs}


def shown(job: Job, found: dict[str, Any]) -> dict[str, Any]:
    """Return what the figure shows beside the runs of a job."""
    of, starts, c = job.scene, job.starts, found["c"]
    methods = [Method("alpha = 0"), Method("BDA", bda.harmonic(c))]
    schedules = [bda.harmonic(c / 4), bda.constant(0.02)]
    alphas = {"alpha = 0": 0.0, f"{c / 4:g}/k": schedules[0], f"{c:g}/k": methods[1].alpha, "0.02": schedules[1]}
    return {
        "line": along_a_line(of, torch.tensor(found["optimum"]["x"]).to(of.b), methods, starts),
        "plane": in_the_plane(of),
        "errors": hypergradient_errors(of, alphas, dict(itertools.islice(starts.items(), 3))),
        "truth": of.image.tolist(),
    }


def parse() -> argparse.Namespace:
    parser = arguments("An image and a camera's velocity from too few numbers: alpha = 0 and BDA.", "registration")
    parser.add_argument("--data", type=Path, metavar="DIR", help="folder with FashionMNIST/; without it: a photograph")
    parser.add_argument("--full", action="store_true", help="eight images, controls, noise, another prior: an hour")
    return parser.parse_args()


def main() -> None:
    global STEPS, LINE, PLANE, COUNTS
    args = parse()
    if args.smoke:
        STEPS, LINE, PLANE, COUNTS = 100, [0.0, 0.5, 1.0], [-1.2, 0.0, 1.2], (10, 25)
    todo = jobs(args)
    found = [work(job, args) for job in todo]
    picture = saved(args, todo[0].scene, "figure", lambda: shown(todo[0], found[0]))
    write_atomically(args.out / "registration.png", lambda file: write_small(figure(found[0], picture), file))
    images = images_figure(found[0], picture["truth"])
    write_atomically(args.out / "registration_images.png", lambda file: write_small(images, file))
    for result in found:
        for run in (result["optimum"], *result["runs"]):
            del run["image"]
    results = {"steps": STEPS, "lower_lr": LOWER_LR, **provenance(), "scenes": found}
    write_json(args.out / "registration.json", results)
    print(f"\n{tables(results)}\n\nWritten: {args.out / 'registration'}.json and .png")


if __name__ == "__main__":
    main()
