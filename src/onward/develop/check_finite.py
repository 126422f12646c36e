"""Whether a step is finite, told by the step itself, which otherwise changes nothing.

``guard`` looks at what the update reads, and leaves a bad step out or stops. This looks at what the update
made as well, so that nothing that is not finite ever gets into the state, and it says one thing only, which
costs less: whether everything was finite. The caller of the step then asks which op it was.

>>> import jax.numpy as jnp, onward as ow
>>> program = ow.SGD(0.5).minimize(lambda w, x: jnp.sum(jnp.log(w * x)), jnp.ones(2), jnp.ones(2))
>>> [op.type for op in check_finite(program).ops if op.made_by is ow.Pass.UPDATE]
['count', 'sgd', 'check_finite', 'go_on', 'keep', 'keep']
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from onward.core.jaxprs.body import Body
from onward.core.jaxprs.collected import body_over
from onward.core.jaxprs.reading import program_of
from onward.core.jaxprs.signature import BodySignature
from onward.core.marks import CHECK, GO_ON, Mark
from onward.core.program import Phase, Program, Variable
from onward.core.transform import transform
from onward.core.words import Kind, Pass
from onward.develop.guard import Guard, all_finite, is_guarded, watched_by_update

_FEW = 4096  # numbers that are looked at twice without a thought


class Check(NamedTuple):
    """The Variables of a checked Program that tell whether its steps are finite.

    ``finite`` is the state Variable that stays True until a step is not finite, and then False; ``following``
    its next value. ``watched`` are the Variables that are looked at.
    """

    finite: Variable
    following: Variable
    watched: tuple[Variable, ...]


@transform(phase=Phase.STEP)
def check_finite(program: Program) -> Program:
    """Let the state stay as it is from the first step on that is not finite, and tell that.

    Adds ops, changes none. Looked at are the loss, the gradients, and the next value of every state Variable
    of floats; of a Program that leaves out bad steps itself (``guard``, float16 with a loss scale) only the
    latter. A gradient that would show there anyway, because the update does arithmetic on each number by
    itself, is not looked at twice. A state Variable of at most 4,096 numbers that is infinite by design, such
    as the best loss so far, may stay so. The state Variable ``is_finite`` is True until a step is not finite.
    ``compile(program, check_finite=True)`` does this, and raises.

    Args:
        program: a Program, with or without update, replicated or not.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> program = ow.SGD(0.5).minimize(lambda w, x: jnp.sum(jnp.log(w * x)), jnp.ones(2), jnp.ones(2))
        >>> step = ow.compile(check_finite(program)).function
        >>> state = ow.compile(check_finite(program)).init(jnp.ones(2))
        >>> state, out = step(state, jnp.array([1.0, 0.0]))
        >>> state.parameters.tolist(), bool(state["is_finite"])
        ([1.0, 1.0], False)
    """
    if check_of(program) is not None:
        return program
    checked = Guard(program)
    finite = checked.told(CHECK, *looked_at(program))
    state = checked.number("is_finite", (), np.bool_, True)
    checked.count(GO_ON, (state, finite), (state,), lambda before, now: [before & now])
    checked.keep(checked.next_state[state], lambda v: True)
    return checked.program()


def check_of(program: Program) -> Check | None:
    """The Variables that tell whether the steps of a Program are finite; None if none do."""
    made = {op.type: op for op in program.ops if isinstance(op.type, Mark)}
    if CHECK not in made or GO_ON not in made:
        return None
    finite, following = made[GO_ON].inputs[0], made[GO_ON].outputs[0]
    return Check(finite, following, made[CHECK].inputs)


def looked_at(program: Program) -> tuple[tuple[Variable, ...], Body]:
    """The Variables to check, and the body that checks whether all their numbers are finite.

    A Variable for which ``may_be_infinite`` holds passes as well if it was not finite before the step.
    """
    following = {new: old for old, new in program.next_state.items() if new.is_float and new is not old}
    lenient = [(new, old) for new, old in following.items() if may_be_infinite(old)]
    before = () if is_guarded(program) else watched_by_update(program)
    if program.loss is None and not following:
        before = program.outputs
    excepted = {new for new, _ in lenient}
    shown = _shown(program, following.keys() - excepted)
    looked = (v for v in dict.fromkeys((*before, *following)) if v.is_float)
    strict = [v for v in looked if v not in excepted and v not in shown]
    pairs = [v for pair in lenient for v in pair]

    def finite(arrays: Sequence[Any], *pairs: Any) -> list[Any]:
        found = [all_finite(x) for x in arrays]
        before_and_after = zip(pairs[1::2], pairs[::2], strict=True)
        found += [all_finite(new) | ~all_finite(old) for old, new in before_and_after]
        return [jnp.all(jnp.stack([jnp.bool_(True), *found]))]

    return (*strict, *pairs), body_over(finite, *_types(strict, pairs))


def _shown(program: Program, strict: Set[Variable]) -> set[Variable]:
    """The gradients that need no look: the update hands on what is not finite to what is looked at anyway.

    The ops of a file are not looked into, so that all of its gradients are.
    """
    if program.code is not None:
        return set()
    found: dict[tuple[BodySignature, int], set[int]] = {}
    shown: set[Variable] = set()
    for op in program.ops:
        places = [i for i, v in enumerate(op.inputs) if v.kind is Kind.GRADIENT]
        if op.made_by is not Pass.UPDATE or len(places) != 1:
            continue
        key = op.body.signature, places[0]
        if key not in found:
            found[key] = _handed_on(op.body, places[0])
        if any(op.outputs[j] in strict for j in found[key]):
            shown.add(op.inputs[places[0]])
    return shown


def _handed_on(body: Body, place: int) -> set[int]:
    """The outputs that are not finite wherever this input is not: arithmetic on each number by itself."""
    part = program_of(body.closed, "update")
    reached = {part.inputs[place]}
    for op in part.ops:
        divides = op.primitive.divides and op.body.operands[0] == 0
        read = op.inputs[:1] if divides else op.inputs
        if (divides or op.primitive.spreads_nonfinite) and not reached.isdisjoint(read):
            reached.update(v for v in op.outputs if v.is_float)
    return {j for j, v in enumerate(part.outputs) if v in reached}


def _types(strict: Sequence[Variable], pairs: Sequence[Variable]) -> tuple[Any, ...]:
    kinds = [[v.aval for v in group] for group in (strict, pairs)]
    return kinds[0], *kinds[1]


def may_be_infinite(v: Variable) -> bool:
    """Whether it may hold infinity on purpose, and is small enough to be checked before and after a step."""
    return v.kind is Kind.STATE and v.size <= _FEW
