"""The trace of someone's step: its jaxpr, and the containers of what it returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from onward.core.errors import TraceError
from onward.core.jaxprs.tracing import traced
from onward.core.structure import Static
from onward.define.purity import LeakWatch
from onward.define.trace import explaining
from onward.explain.inspect.call import CalledStep, is_array


@dataclass(frozen=True, eq=False)
class TracedStep:
    """The result of tracing a step.

    Attributes:
        closed: the jaxpr: the arrays of what the step returns, then those of ``in_place``.
        treedef: the containers of what it returns.
        statics: for every leaf in them None for an array, or the value that is none.
        in_place: for every array in the modules that go in, whether they still have it afterwards.
    """

    closed: Any
    treedef: Any
    statics: Sequence[Static | None]
    in_place: Sequence[bool]


_NUMBERS: tuple[tuple[type, ...], ...] = ((bool, int), (bool, int, float, complex))


def traced_call(call: CalledStep) -> tuple[CalledStep, TracedStep]:
    """The trace of a call, and the call as it was traced: with Python numbers fixed that the step looks at.

    Raises:
        TraceError: the step cannot be traced, with its line, as the first attempt found it.
    """
    try:
        return call, _traced(call)
    except TraceError as error:
        for kinds in _NUMBERS if call.has_numbers else ():
            fixed = call.with_fixed(*kinds)
            try:
                return fixed, _traced(fixed)
            except TraceError:
                continue
        raise error


def _traced(call: CalledStep) -> TracedStep:
    found: list[tuple[Any, list[Static | None], list[bool]]] = []
    watch = LeakWatch()

    def flat(*leaves: Any) -> list[Any]:
        watch.begin(leaves)
        returned, modules = call.run(leaves)
        values, treedef = jax.tree.flatten(returned)
        statics = [None if is_array(value) else Static(value) for value in values]
        found.append((treedef, statics, [value is not None for value in modules]))
        return [*filter(is_array, values), *(value for value in modules if value is not None)]

    closed = explaining(
        call.title, partial(traced, flat, of=call.title), *(leaf.type for _, leaf in call.leaves)
    )
    watch.end(call.title, call.step, call)
    return TracedStep(closed, *found[-1])
