"""The values that all updates of a Program share: the step counter, hyperparameters, and schedules."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from onward.core.errors import HyperparameterError
from onward.core.jaxprs.body import body_of
from onward.core.jaxprs.equations import Type
from onward.core.marks import COUNT, SCHEDULE
from onward.core.program import Variable
from onward.core.words import UpdateType
from onward.define.trace import explaining
from onward.derive.rule import Rule, expect_held
from onward.derive.schedules.base import Schedule
from onward.derive.update.draft import UpdateDraft
from onward.derive.update.groups import Route, Routing, own_fields

STEP = "step"
LAST = 2**31 - 128
"""Where the step counter stays: rules may still add to it, and float32 holds it."""


def hyperparameters(
    draft: UpdateDraft, routing: Routing, rules: Sequence[Rule]
) -> dict[Any, dict[str, Variable]]:
    """For each route and rule, by its number, the Variables of its hyperparameters by name."""
    owners: list[tuple[Any, str, Rule, frozenset[str]]] = [
        (key, key.name, key.optimizer, own) for key, own in own_fields(routing.routes).items()
    ]
    owners += [(i, rule.name, rule, frozenset(rule.hyperparameters)) for i, rule in enumerate(rules)]
    values: dict[Any, dict[str, Variable]] = {}
    for key, prefix, rule, own in owners:
        values[key] = {
            k: draft.hyperparameter(
                f"{prefix}/{k}" if prefix else k, v, routing.real, 1.0 if k in rule.below_one else None
            )
            for k, v in rule.hyperparameters.items()
            if k in own and not callable(v)
        }
    step = _count(draft)
    for key, prefix, rule, own in owners:
        for name, schedule in rule.hyperparameters.items():
            if callable(schedule) and name in own:
                full = f"{prefix}/{name}" if prefix else name
                values[key][name] = _scheduled(draft, full, schedule, step, routing.real)
        base = values.get(key.base, {}) if isinstance(key, Route) else {}
        known = {**base, **values[key], STEP: step}
        values[key] = {k: known[k] for k in (STEP, *rule.hyperparameters) if k in known}
    return values


def _count(draft: UpdateDraft) -> Variable:
    """The step counter: the number of updates made so far, at most ``LAST``."""
    step = draft.carry(STEP, lambda: jnp.int32(0))
    body = body_of(lambda n: [jnp.minimum(n, LAST - 1) + 1], Type((), step.dtype))
    draft.add(COUNT, [step], [], body, UpdateType.BOOKKEEPING, replaces=[step])
    return step


def _scheduled(
    draft: UpdateDraft, name: str, schedule: Callable[[Any], Any], step: Variable, dtype: Any
) -> Variable:
    """A hyperparameter that a schedule computes from the step."""
    result = explaining(f"The schedule of {name}", jax.eval_shape, schedule, Type((), step.dtype))
    if getattr(result, "shape", None) != ():
        raise HyperparameterError(
            f"The schedule of {name} returns {result} for a step; it must return one number."
        )
    _expect_real(name, result.dtype)
    if not isinstance(schedule, Schedule):
        _expect_begun(name, schedule, dtype)
    body = body_of(lambda n: [jnp.asarray(schedule(n), dtype)], Type((), step.dtype))
    return draft.add(SCHEDULE, [step], [name], body, UpdateType.BOOKKEEPING)[0]


def _expect_real(name: str, dtype: Any) -> None:
    if not (jnp.issubdtype(dtype, np.integer) or jnp.issubdtype(dtype, np.floating)):
        raise HyperparameterError(
            f"The schedule of {name} returns {dtype} for a step; it must return one real number, such as "
            "float32."
        )


def _expect_begun(name: str, schedule: Callable[[Any], Any], dtype: Any) -> None:
    """Raise ``HyperparameterError`` for a first value that no hyperparameter can have."""
    with jax.ensure_compile_time_eval():
        first = schedule(jnp.int32(0))
    if isinstance(first, jax.core.Tracer):
        return
    value = float(first)
    if not (math.isfinite(value) and value >= 0):
        raise HyperparameterError(
            f"The schedule of {name} returns {value} for step 0, the first one; it must be a finite "
            "number of at least 0. If it divides by the step, count from 1: step + 1."
        )
    expect_held(f"The schedule of {name} at step 0", value, dtype)
