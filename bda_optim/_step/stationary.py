r"""The plain map whose fixed point an inner loop settles at, whatever its rule remembers on the way.

.. math:: S_a(y; x) = y - \big[ a s_u \nabla_y F + (1 - a) (y - \mathrm{prox}_{s_l g}(y - s \nabla_y f)) \big]

with the stationary rate ``s = lr (1 - dampening) / (1 - momentum)`` of gradient descent, ``s = lr`` of FISTA: once y
rests, a momentum buffer holds ``(1 - dampening) / (1 - momentum)`` times the gradient. With ``a > 0`` the gradient
does not vanish at the fixed point, so the rate of the buffer matters: with `lr` alone the derivative is wrong by 15 %
at momentum 0.9 and a = 0.05. The prox keeps its step `lr`, as in the loop itself.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._support.tree import replace_tensors, tensors
from .._support.types import InnerState, Item, Move, Scalar, Settings
from .aggregation import displacement, is_zero
from .clipping import CLIPPING, clip
from .gradients import Grads
from .step import BDAStep
from .update import Update

DESCENT = ("SGD", "FISTA")
"""Rules whose displacement is, at rest, a rate times the gradient."""

SCALE_FREE = (
    "ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop",
)  # fmt: skip
"""Rules that come to rest only where the gradient vanishes (ASGD: as its rate does)."""


class StationaryMap(NamedTuple):
    """``R(y; x) = y - S(y; x)`` of a step: zero at the fixed point.

    Attributes:
        displacement: ``displacement(params, hyper)`` gives R, None where a parameter does not move.
        params: The lower variables at which the loop ended, flat and detached.
        replaced: ``replaced(params)`` gives the state of the loop with other parameters in it.
        tasks: The size of the leading dimension of tasks, or None.
        rates: For each parameter the relative rate by which its row of ``dR/dy`` has to be divided for the matrix to
            be symmetric; None if it is not, or cannot be known to be.
        weights: The values of a, for messages.
    """

    displacement: Callable[[Sequence[Tensor], Sequence[Tensor]], list[Tensor | None]]
    params: list[Tensor]
    replaced: Callable[[Sequence[Tensor]], Any]
    tasks: int | None = None
    rates: list[Tensor] | None = None
    weights: tuple[Any, ...] = (0.0,)


def stationary_map(step: Any, state: Any, hyper: Sequence[Tensor], item: Any, alpha: float | None) -> StationaryMap:
    """Return the map of a step at a state, with the data of `item`.

    Args:
        step: The step of an inner loop; or a plain function, which is its own map.
        state: Where the loop ended.
        hyper: The tensors of the slots.
        item: k, whose settings are taken, and the batch.
        alpha: The weight of all groups; None for the one of step k.

    Raises:
        ValueError: If the rule has no fixed point that a plain map shares.
    """
    if isinstance(step, BDAStep):
        return _map_of_step(step, state, hyper, item, alpha)
    if isinstance(state, InnerState) or alpha is not None:
        raise TypeError(
            f"the fixed point of a {type(step).__name__} is not known; got one around the step of an inner loop, or "
            "`alpha` for a plain function. Use the step itself."
        )

    def plain(params: Sequence[Tensor], hyper: Sequence[Tensor]) -> list[Tensor | None]:
        after = step(replace_tensors(state, params), tuple(hyper), item)[0]
        return [y - z for y, z in zip(params, tensors(after), strict=True)]

    return StationaryMap(plain, [t.detach() for t in tensors(state)], lambda params: replace_tensors(state, params))


def _map_of_step(
    step: BDAStep, state: InnerState, hyper: Sequence[Tensor], item: Item, alpha: float | None
) -> StationaryMap:
    settings = _settings(step.update, hyper, item.k, alpha)
    for chosen in settings:
        check_rule(step.update.rule.name, chosen)
    still = copy.copy(step)
    still.update = _Still(step.update.rule, step.update.groups, tasks=step.update.tasks)

    def at(params: Sequence[Tensor], hyper: Sequence[Tensor]) -> list[Tensor | None]:
        start = InnerState(tuple(params), state.rule, state.buffers)
        after, _ = still.apply(start, hyper, item, _settings(still.update, hyper, item.k, alpha))
        return list(after.params)

    return StationaryMap(
        at,
        [p.detach() for p in state.params],
        lambda params: state._replace(params=tuple(params)),
        step.update.tasks,
        _relative_rates(step.update, state.params, settings),
        tuple(chosen["alpha"] for chosen in settings),
    )


def _settings(update: Update, hyper: Sequence[Tensor], k: int, alpha: float | None) -> list[Settings]:
    """Return the settings of step k, with another weight if one is given."""
    settings = update.settings(hyper, k)
    return settings if alpha is None else [{**chosen, "alpha": alpha} for chosen in settings]


class _Still(Update):
    """What the plain map makes of the gradients; the parameters of the state that it returns are displacements."""

    def points(self, state: InnerState, settings: Sequence[Settings]) -> list[Tensor]:
        """Return the parameters: at rest nothing is extrapolated."""
        return list(state.params)

    def __call__(
        self,
        state: InnerState,
        lower: Grads,
        upper: Grads,
        settings: Sequence[Settings],
        hyper: Any,
    ) -> InnerState:
        """Return the displacements, None where a parameter has no gradient."""
        moves: list[Any] = [None] * len(state.params)
        for group, chosen in zip(self.groups, settings, strict=True):
            grads = clip([lower[i] for i in group.members], chosen, self.tasks)
            for place, (i, grad) in enumerate(zip(group.members, grads, strict=True)):
                y = state.params[i]
                moved = displacement(
                    y,
                    None if grad is None else Move(_direction(grad, y, chosen, place), stationary_rate(chosen, place)),
                    upper[i],
                    alpha=_nth(chosen["alpha"], place),
                    upper_lr=_upper_rate(chosen, place),
                    prox=self._bind(chosen["prox"], _nth(chosen["lr"], place), hyper),
                )
                moves[i] = None if moved is None else moved.to(y.dtype)
        return InnerState(tuple(moves), state.rule, state.buffers)


def stationary_rate(settings: Settings, place: int) -> Scalar:
    """Return ``lr (1 - dampening) / (1 - momentum)`` of the parameter at `place` of a group.

    >>> round(stationary_rate({"lr": 0.1, "momentum": 0.9, "dampening": 0.5}, 0), 12)
    0.5
    """
    rate: Scalar = _nth(settings["lr"], place)
    momentum = _nth(settings.get("momentum", 0.0), place)
    if not is_zero(momentum):
        rate = rate * (1 - settings.get("dampening", 0.0)) / (1 - momentum)
    return rate


def _upper_rate(settings: Settings, place: int) -> Scalar:
    rate: Scalar = _nth(settings["lr"] if settings["upper_lr"] is None else settings["upper_lr"], place)
    return rate


def _direction(grad: Tensor, y: Tensor, settings: Settings, place: int) -> Tensor:
    """Return the lower gradient with its sign and the weight decay that belongs to it (ASGD has two)."""
    direction = -grad if settings["maximize"] else grad
    for name in ("weight_decay", "lambd"):
        decay = _nth(settings.get(name, 0.0), place)
        if not is_zero(decay):
            direction = direction + decay * y
    return direction


def check_rule(name: str, settings: Settings) -> None:
    """Raise where the loop of a rule does not come to rest where the plain map does."""
    alpha = settings["alpha"]
    if name in DESCENT:
        momentum = settings.get("momentum", 0.0)
        if isinstance(momentum, int | float) and momentum >= 1:
            raise ValueError(f"a loop with momentum >= 1 has no fixed point; got momentum={momentum}. Use 0.9, say.")
        return
    if name not in SCALE_FREE:
        raise ValueError(
            f"`Implicit` must know where a rule comes to rest, and of a {name} it does not; got rule={name}. Use "
            f"{', '.join(DESCENT)}, or another adjoint, such as `Checkpointed()`."
        )
    if not is_zero(alpha):
        raise ValueError(
            f"{name} has no fixed point that depends on the upper variables where alpha > 0: its steps do not shrink "
            f"with the gradient, so both levels balance at a point that its rate sets; got rule={name} and "
            f"alpha={shown(alpha)}. Use SGD (with momentum, if you like) or FISTA, alpha=0, or `Checkpointed()`."
        )
    if settings["prox"] is not None:
        raise ValueError(
            f"{name} with a prox comes to rest where its scaled steps balance the prox, not at the solution; got "
            f"rule={name} and prox={settings['prox']!r}. Use SGD or FISTA, or `Checkpointed()`."
        )
    decay = settings.get("weight_decay", 0.0)
    decoupled = name in ("AdamW", "Adafactor") or settings.get("decoupled_weight_decay", False)
    if decoupled and not is_zero(decay):
        raise ValueError(
            "decoupled weight decay balances steps of another scale than the gradient, so the loop does not come to "
            f"rest at the solution; got rule={name} with weight_decay={shown(decay)}. Use weight_decay=0 and put "
            "the term into the lower loss, or `Checkpointed()`."
        )


def shown(value: Any) -> str:
    """Show a setting in a message: a tensor of one element as its number."""
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_meta:
        return f"{value.item():g}"
    return f"{value:g}" if isinstance(value, float) else "a tensor" if isinstance(value, Tensor | list) else str(value)


def _relative_rates(update: Update, params: Sequence[Tensor], settings: Sequence[Settings]) -> list[Tensor] | None:
    """Return what each row of ``dR/dy`` has as a factor, relative to the largest; None if rows mix both levels apart.

    A row is ``a s_u F_yy + (1 - a) s f_yy``. Where the ratio of the two factors is the same in all rows, the matrix is
    a diagonal one times a symmetric one. A prox and clipping have Jacobians of their own.
    """
    if any(s[name] is not None for s in settings for name in ("prox", *CLIPPING)):
        return None
    if len({s["maximize"] for s in settings}) > 1:
        return None
    lower: list[Tensor] = [torch.zeros((), device="cpu")] * len(params)
    upper = list(lower)
    for group, chosen in zip(update.groups, settings, strict=True):
        for place, i in enumerate(group.members):
            a = _nth(chosen["alpha"], place)
            lower[i] = _number((1 - a) * stationary_rate(chosen, place))
            upper[i] = _number(0.0 if is_zero(a) else a * _upper_rate(chosen, place))
    total = [a + b for a, b in zip(lower, upper, strict=True)]
    if any(bool((t <= 0).any()) for t in total):
        raise ValueError(
            "`Implicit` differentiates a fixed point, and with a rate of 0 y stays where it starts; got lr=0. Use a "
            "rate above 0, or leave such parameters out of the optimizer."
        )
    share = [a / t for a, t in zip(upper, total, strict=True)]
    first = share[0].reshape(-1)[0]
    if not all(torch.allclose(s, first.to(s.device).expand_as(s), rtol=1e-9, atol=0.0) for s in share):
        return None
    largest = max(float(t.max()) for t in total)
    return [t / largest for t in total]


def _number(value: Scalar) -> Tensor:
    """Return a rate as a float64 tensor, a plain one on the host; entries of lists have their parameter's shape."""
    device = value.device if isinstance(value, Tensor) else "cpu"
    return torch.as_tensor(value, dtype=torch.float64, device=device).detach()


def _nth(setting: Any, place: int) -> Any:
    """Return a setting of the parameter at `place`; one element becomes a scalar, which cannot change a shape."""
    chosen = setting[place] if isinstance(setting, list) else setting
    return chosen.reshape(()) if isinstance(chosen, Tensor) and chosen.numel() == 1 else chosen
