# ruff: noqa: E501  (an edit is a row of a table)
"""The list of mutants: which text replaces which, and the tests that must fail then."""

from __future__ import annotations

from typing import NamedTuple


class Edit(NamedTuple):
    """One fault. `tests` are arguments of pytest (+ stands for a space); "" is the bounded fuzzing."""

    file: str
    old: str
    new: str
    tests: str = ""


EDITS: dict[str, Edit] = {
    # The step.
    "both weights are alpha": Edit("_step/aggregation.py", "(1 - alpha) * lower", "alpha * lower"),
    "upper direction with the wrong sign": Edit(
        "_step/aggregation.py", "upper = alpha * upper_lr * upper_grad", "upper = -alpha * upper_lr * upper_grad"
    ),
    "ascent instead of descent": Edit("_step/aggregation.py", "else y - total", "else y + total"),
    "plain step with the wrong sign": Edit("_step/aggregation.py", "alpha=-move.scale", "alpha=move.scale"),
    "alpha off by one": Edit("_step/aggregation.py", "alpha(k) if callable", "alpha(k + 1) if callable"),
    "prox forgotten where alpha is 0": Edit(
        "_step/aggregation.py", "return moved if prox is None else prox(moved)", "return moved"
    ),
    "prox forgotten where alpha is not 0": Edit(
        "_step/aggregation.py", "lower: Tensor | None = y - prox(y if move", "lower: Tensor | None = y - (y if move"
    ),
    "displacement without its rate": Edit("_support/types.py", "return self.scale * self.direction", "return self.direction"),
    "upper_lr ignored": Edit('_step/update.py', 'chosen["lr"] if chosen["upper_lr"] is None else chosen["upper_lr"]', 'chosen["lr"]'),
    "lower gradient detached": Edit('_step/gradients.py', 'lower, points, "lower", k, create_graph=create_graph', 'lower, points, "lower", k, create_graph=False'),
    "upper gradient detached": Edit('_step/gradients.py', 'gradient(upper, points, "upper", k, create_graph=create_graph', 'gradient(upper, points, "upper", k, create_graph=False'),
    "the two gradients exchanged": Edit('_step/step.py', 'self.update(state, *found.grads, settings', 'self.update(state, *reversed(found.grads), settings'),
    "first order differentiates twice": Edit(
        "_step/step.py", "torch.is_grad_enabled() and not self.constant_gradients", "torch.is_grad_enabled()"
    ),
    "one pass: both weights are alpha": Edit("_step/sweep.py", "else alpha - 1) * lr", "else -alpha) * lr"),
    "one pass: upper direction with the wrong sign": Edit("_step/sweep.py", "-alpha * upper_lr)", "alpha * upper_lr)"),
    "one pass: upper_lr ignored": Edit("_step/sweep.py", 'lr if first["upper_lr"] is None else first["upper_lr"]', "lr"),
    "one pass: moves detached": Edit("_step/sweep.py", "seeds, tuple(points), create_graph=create_graph", "seeds, tuple(points), create_graph=False"),
    "one pass: ascent": Edit("_step/sweep.py", "alpha=-rate)", "alpha=rate)"),
    "one pass: whatever the rates of other groups": Edit(
        "_step/sweep.py", "for chosen in settings[1:] for name in _RATES", "for chosen in settings[1:] for name in ()", "tests/test_sweep.py -k same_rates"
    ),
    "one pass: whatever the graph": Edit("_step/sweep.py", "return False\n    return reached", "pass\n    return True", "tests/test_sweep.py"),
    "one pass: rates read once": Edit(
        "_step/sweep.py", "if weights is None or not any(isinstance(weight, Tensor) for weight in weights):", "if True:", "tests/test_sweep.py -k change_in_place"
    ),
    "one pass: buffers dropped": Edit(
        "_step/step.py", "moves, weights), state.rule, buffers)", "moves, weights), state.rule, state.buffers)", "tests/test_buffers.py -k keeps_the_lower"
    ),
    "iterate detached": Edit('_step/update.py', 'old = [state.params[i] for i in group.members]', 'old = [state.params[i].detach() for i in group.members]'),
    "buffers of a step dropped": Edit(
        "_step/step.py",
        "state = InnerState(state.params, state.rule, found.buffers)",
        "pass",
        "tests/test_buffers.py -k keeps_the_lower",
    ),
    "validation leaks into the statistics": Edit(
        "_step/step.py",
        "big_f, _ = self._mean(\"upper\", points, buffers, hyper, batch, item.k)",
        "big_f, kept = self._mean(\"upper\", points, kept, hyper, batch, item.k)",
        "tests/test_buffers.py -k keeps_the_lower",
    ),
    "a loss that is once differentiable passes": Edit(
        "_step/gradients.py", "refuse_once_differentiable([loss])", "pass", "tests/test_second_derivatives.py -k once_differentiable"
    ),
    # Adjoints.
    "truncation restarts k": Edit("_adjoints/unroll.py", "hyper, items[cut:])", "hyper, items[: len(items) - cut])"),
    "truncation one step too short": Edit(
        "_adjoints/unroll.py", "cut = len(items) - self.last", "cut = len(items) - self.last + 1"
    ),
    "truncation keeps the graph before the cut": Edit(
        "_adjoints/unroll.py",
        "        with torch.no_grad():\n            state, first = Unroll()",
        "        with torch.enable_grad():\n            state, first = Unroll()",
        "tests/test_adjoint.py -k keep_no_graph",
    ),
    "first order is unrolling": Edit("_adjoints/unroll.py", "Unroll()(as_step(step).first_order(), state", "Unroll()(as_step(step), state"),
    "partial derivatives overwrite each other": Edit(
        "_adjoints/replay.py", "grad if known is None else known + grad", "grad"
    ),
    "a step replayed with stale parameters": Edit(
        "_adjoints/replay.py", "            state = self._shelf.get(source.kept)\n        ledger", "            state = self._state\n        ledger"
    ),
    "a replay draws other random numbers": Edit(
        "_adjoints/replay.py",
        "            self._set_rng(source.rng)\n            state",
        "            state",
        "tests/test_adjoint.py -k dropout",
    ),
    "a replay is not compared": Edit(
        "_context/environment.py", "eps ** 0.5", "eps ** -9", "tests/test_adjoint.py -k differs_from_the_first_pass"
    ),
    "a change in place passes": Edit(
        "_adjoints/node.py",
        "raise RuntimeError(changed_in_place(name, tensor))",
        "pass",
        "tests/test_changes_in_place.py -k change_in_place",
    ),
    "a captured tensor passes": Edit(
        "_adjoints/base.py", "if id(leaf) not in known:", "if False:", "tests/test_wrong_use.py -k captured"
    ),
    "total derivative instead of the partial one": Edit(
        "_adjoints/replay.py", "t.view_as(t) if t.requires_grad else t", "t", "tests/test_adjoint.py -k depend_on_each_other"
    ),
    "states stored at the wrong places": Edit(
        "_adjoints/revolve.py", "return min(most, steps - ", "return max(1, steps - ", "tests/test_adjoint.py -k optimal"
    ),
    "tangents of all inputs in one row": Edit("_adjoints/tangents.py", "offset += count", "offset += 0"),
    "complex tangents lose their imaginary part": Edit(
        "_adjoints/tangents.py",
        "_real(tangent).reshape(len(tangent), -1) @ _real(cotangent).reshape(-1)",
        "(tangent.reshape(len(tangent), -1) @ cotangent.reshape(-1)).real",
        "tests/test_adjoint.py -k complex",
    ),
    "steps in parts forget a loss": Edit(
        "_adjoints/stages.py", "at_points = add(at_points, by_points)", "at_points = by_points", "tests/test_accumulate.py"
    ),
    "wrong compiled numbers pass": Edit(
        "_compiled/program.py", "            return False\n", "            pass\n", "tests/test_engine.py -k wrong_numbers"
    ),
    # Rules.
    "first momentum buffer detached, as torch does": Edit(
        "_step/rules/sgd.py", '{**state, "momentum_buffer": buffer}', '{**state, "momentum_buffer": buffer.detach()}'
    ),
    "nesterov ignored": Edit(
        "_step/rules/sgd.py", 's["momentum"]) if s["nesterov"] else buffer', 's["momentum"]) if False else buffer'
    ),
    "dampening ignored": Edit("_step/rules/sgd.py", 'weight = 1 - s["dampening"]', "weight = 1.0"),
    "maximize ignored": Edit(
        "_step/rules/arithmetic.py", 'grad = -grad if s["maximize"] else grad\n    coupled', "grad = grad\n    coupled"
    ),
    "weight decay with the wrong sign": Edit(
        "_step/rules/arithmetic.py", 'return add(grad, y, s["weight_decay"])', 'return add(grad, y, -s["weight_decay"])'
    ),
    "Adam's bias correction off by one": Edit(
        "_step/rules/adam.py",
        'power(beta, new["step"]) for beta in s["betas"])\n        direction',
        'power(beta, new["step"] + 1) for beta in s["betas"])\n        direction',
    ),
    "Adam's eps where higher has it": Edit("_step/rules/adam.py", 'c1 * s["eps"]', 's["eps"]'),
    "amsgrad forgets": Edit(
        "_step/rules/adam.py", 'torch.maximum(state["max_exp_avg_sq"], square)', "square", "tests/test_rules.py -k amsgrad"
    ),
    "AdamW is Adam": Edit("_step/rules/adam.py", '"decoupled_weight_decay": True}', '"decoupled_weight_decay": False}'),
    "roots with an infinite slope at 0": Edit(
        "_step/rules/arithmetic.py", "zero = x <= 0", "zero = x < 0", "tests/test_rule_derivatives.py -k vanish"
    ),
    "centred variance is not": Edit("_step/rules/adaptive.py", "mean, mean, value=-1", "mean, mean, value=0"),
    "Adagrad's decay one step early": Edit("_step/rules/adaptive.py", '1 + step * s["lr_decay"]', '1 + (step + 1) * s["lr_decay"]'),
    "Adamax without its eps": Edit("_step/rules/adam.py", 'grad.abs() + s["eps"]', "grad.abs()"),
    "NAdam's product does not grow": Edit("_step/rules/adam.py", 'state["mu_product"] * mu', "mu"),
    "RAdam never rectifies": Edit("_step/rules/adam.py", "settled = length > 5", "settled = length > 500"),
    "Adadelta remembers gradients": Edit(
        "_step/rules/adaptive.py", 'mean_square(state["acc_delta"], delta', 'mean_square(state["acc_delta"], grad'
    ),
    "ASGD's rate stays": Edit("_step/rules/adaptive.py", '"eta": eta_next', '"eta": eta'),
    "Rprop grows at a turn": Edit("_step/rules/adaptive.py", "masked_fill(turned, shrink)", "masked_fill(turned, grow)"),
    "FISTA extrapolates from the first step on": Edit(
        "_step/rules/fista.py", "pick(before > 1, before - 1, 0.0) / now", "pick(before > 0, before, 0.5) / now"
    ),
    "Adafactor does not clip": Edit(
        "_step/rules/adaptive.py", 'clamp(min=1.0))\n        if is_on', 'clamp(min=0.5))\n        if is_on'
    ),
    "a mean over no elements": Edit(
        "_step/rules/base.py", "if grad is None or param.numel() == 0:", "if grad is None:",
        "tests/test_rules.py -k without_elements"
    ),
    # Proximal maps and schedules.
    "soft threshold grows": Edit("_step/proximal.py", "0.0, y - threshold * y.sign()", "0.0, y + threshold * y.sign()"),
    "elastic net without its shrinkage": Edit("prox.py", ".div(1 + step *", ".div(1 + 0 * step *"),
    "group lasso without its norms": Edit("prox.py", "y * (1 - threshold / torch", "y * (1 - 0 * threshold / torch"),
    "radius of a ball is a constant": Edit("prox.py", "y * (radius / torch", "y * (radius.detach() / torch"),
    "water level is a constant": Edit("_step/proximal.py", "level = (torch.where(active, v, 0.0).sum() - total) / count",
                                      "level = ((torch.where(active, v, 0.0).sum() - total) / count).detach()"),
    "harmonic off by one": Edit("_step/schedules.py", "return _scalar(self.c) / k\n", "return _scalar(self.c) / (k + 1)\n"),
    "geometric off by one": Edit("_step/schedules.py", "_scalar(self.decay) ** (k - 1)", "_scalar(self.decay) ** k"),
    "weights are not cut off below 1": Edit(
        "_step/schedules.py", "return float(min(alpha, largest))", "return float(alpha)"
    ),
    # Modules, rollouts, the optimizer.
    "buffers laid without a copy": Edit(
        "_modules/skeleton.py", "place.put(value.detach().clone() if copy else value)", "place.put(value)",
        "tests/test_buffers.py -k keeps_the_lower",
    ),
    "weight norm as torch has it": Edit(
        "_modules/second_order.py", "twin.__class__ = _WeightNorm", "pass", "tests/test_functional.py -k weight_norm"
    ),
    "moving singular vectors pass": Edit(
        "_modules/second_order.py", "map(_Marked.apply, inputs)", "inputs", "tests/test_second_derivatives.py -k spectral"
    ),
    "sparse embeddings stay sparse": Edit(
        "_modules/second_order.py", 'twin.__dict__["sparse"] = False', "pass", "tests/test_second_derivatives.py -k sparse"
    ),
    "closures hold the user's module": Edit(
        "_modules/rewire.py",
        "return self._rebound(value)",
        "return value",
        "tests/test_functional.py -k closures",
    ),
    "slots are left out": Edit(
        "_modules/rewire.py", "if hasattr(module, name):", "if False:", "tests/test_modules.py -k slots"
    ),
    "fused attention": Edit(
        "_context/forward.py", "(True, False, False, False, False)", "(True, True, False, False, True)",
        "tests/test_modules.py -k attention",
    ),
    "once differentiable operations pass": Edit(
        "_support/autograd_graph.py", "if operation is not None:", "if False:", "tests/test_second_derivatives.py -k without_a_second"
    ),
    "a tensor that is hyper and a setting counts half": Edit(
        "_hypergradient.py", "for p in (a, b) if p is not None)", "for p in (a,) if p is not None)",
        "tests/test_hyper.py -k depend"
    ),
    "the start is a constant though it is hyper": Edit(
        "_hypergradient.py", "copies.get(id(p), y).clone()", "y.clone()"
    ),
    "initial weights are never reached": Edit(
        "_optimizer.py", "p.detach().clone() if copy_initial_weights else p.clone()", "p.detach().clone()"
    ),
    "commit goes on counting k": Edit(
        "_optimizer.py", '            group["k"] = 0\n', '            group["k"] += 1\n',
        "tests/test_buffers.py -k commit_restarts"
    ),
    "commit forgets the rule's state": Edit(
        "_optimizer.py", "self._store(state.rule)", "pass", "tests/test_buffers.py -k commit_writes"
    ),
    "own loop cut one step late": Edit("_innerloop.py", "k > self._cut", "k >= self._cut"),
    "own loop counts from 2": Edit("_innerloop.py", "        k = self.k + 1\n", "        k = self.k + 2\n"),
    "divergence passes": Edit(
        "_rollout/divergence.py", "if all_finite(records, last.params, weights.flags):", "if True:", "tests/test_wrong_use.py -k finite"
    ),
}  # fmt: skip
