"""Makes an installed `higher` accept a `BDAInnerOptimizer`."""

from __future__ import annotations

from bda_optim._optimizer import BDAInnerOptimizer

from .optim import DifferentiableBDA


def register() -> None:
    """Make `BDAInnerOptimizer` known to an installed `higher`.

    Afterwards ``higher.innerloop_ctx``, ``higher.get_diff_optim`` and ``higher.create_diff_optim`` accept one, and the
    differentiable optimizer that they return takes the upper loss: ``diffopt.step(lower, upper_loss=upper)``. The
    patched module is still higher's own. It may be called several times.

    Raises:
        ImportError: If `higher` cannot be imported.
    """
    try:
        import higher
    except ImportError as error:
        raise ImportError(
            "`register()` is for an installed higher, which cannot be imported. Install `bda_optim[higher]`, or use "
            "`bda_optim.compat.higher`, which does not need it."
        ) from error

    class DifferentiableBDAForHigher(DifferentiableBDA, higher.optim.DifferentiableOptimizer):  # type: ignore[misc]
        """`DifferentiableBDA`, and an instance of higher's class."""

    higher.register_optim(BDAInnerOptimizer, DifferentiableBDAForHigher)
