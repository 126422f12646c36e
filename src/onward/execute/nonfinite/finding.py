"""The report on the first value that was not finite."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from onward.core.columns import columns
from onward.core.jaxprs.body import Body
from onward.core.primitives.table import of
from onward.core.program import Op, Program, Variable, programs_within
from onward.core.source import Source
from onward.core.words import Kind, Pass, some
from onward.develop.roll.literals import numbers
from onward.execute.nonfinite.inside import Inside
from onward.execute.nonfinite.numbers import Numbers

ADVICE = {
    "div": "A division by zero, or of two infinities: keep the divisor away from 0, or mask before dividing.",
    "log": "The logarithm of 0 is minus infinity, that of a negative number NaN: add a small number before.",
    "log2": "The logarithm of 0 is minus infinity, that of a negative number NaN: add a small number before.",
    "log1p": "log1p of -1 is minus infinity, of less NaN: keep what it reads above -1.",
    "sqrt": "The root of a negative number is NaN, and its derivative at 0 infinite: add a small number.",
    "rsqrt": "1 / sqrt(x) is infinite at 0 and NaN below: add a small number before.",
    "pow": "A power of a negative number is NaN, and near 0 its derivative infinite: keep the base above 0.",
    "integer_pow": "A negative power of 0 is infinite: keep what it reads away from 0.",
    "exp": "What it reads is too large for its dtype: subtract the maximum before, as jax.nn.softmax does.",
    "exp2": "What it reads is too large for its dtype: subtract the maximum before.",
    "atan2": "The derivative of arctan2(0, 0) does not exist: keep one of the two away from 0.",
    "sub": "Infinity minus infinity is NaN: a row that is masked everywhere, or a sum that overflowed.",
    "gather": "An index lies outside of the array, which reads as NaN: look at the indices.",
    "acos": "It is NaN outside of [-1, 1], and its derivative is infinite at the ends: clip what it reads.",
    "asin": "It is NaN outside of [-1, 1], and its derivative is infinite at the ends: clip what it reads.",
    "convert_element_type": "The number is too large for this dtype: scale it down, or keep it wider.",
}
_ELSEWHERE = {
    Pass.UPDATE: "Look at the hyperparameters: a learning rate, an epsilon of 0, a schedule.",
    Pass.COLLECTIVE: "Each device's part is finite, their sum is not: scale the loss down.",
}
_GIVEN = {
    Kind.DATA: "It was not finite before the step: look at where this batch comes from.",
    Kind.PARAMETER: "It was not finite before the step: look at the step before this one, or the checkpoint.",
    Kind.CONSTANT: "It stands in the function itself.",
}
_BEFORE = "It was not finite before the step."
_UNDEFINED = "It is not defined for what this op reads, of which the range stands above."
_OVERFLOW = "Numbers became too large for their dtype: lower the learning rate, or clip the gradients."


@dataclass(frozen=True)
class NonFinite:
    """The first value of a step that is not finite and spoils the loss, a gradient or the next state.

    Attributes:
        variable: the value; ``numbers`` says what it holds.
        op: what made it; None if it was given: data, a parameter, other state.
        forward: of a gradient op, the op whose gradient it computes.
        inside: where within the op, from the outermost loop, branch or call to the innermost op.
        reads: what the op read.
        device: on which of several devices, counted from 0; None where it ran on one.
        reaches: the names of what it spoils, of all that was looked at.
        of_derivative: whether the forward op computed it for the backward pass only.
        is_written: whether it stands in the function itself: a ``jnp.inf``, a ``jnp.nan``.
        source: the user's line, as far inside as it is known.
    """

    variable: Variable
    numbers: Numbers
    op: Op | None
    forward: Op | None
    inside: tuple[Inside, ...]
    reads: tuple[Numbers, ...]
    device: int | None
    reaches: tuple[str, ...]
    of_derivative: bool
    is_written: bool
    source: Source | None

    @property
    def type(self) -> str:
        """The type of the innermost op that is known, such as ``log``; ``""`` of what was given."""
        op, _ = self._innermost
        return op.type if op is not None else ""

    @property
    def made_by(self) -> Pass | None:
        """The pass it was computed in; what an op computes for its gradient belongs to the backward pass."""
        if self.op is None:
            return None
        return Pass.BACKWARD if self.of_derivative else _pass_within(self.op, self.inside)

    @property
    def scope(self) -> str:
        """The scope of the op."""
        return self.op.scope if self.op is not None else ""

    @property
    def file(self) -> str:
        """The user's file, or an empty string."""
        return self.source.file if self.source is not None else ""

    @property
    def line(self) -> int:
        """The line in it; 0 where none is known."""
        return self.source.line if self.source is not None else 0

    @property
    def advice(self) -> str:
        """The remedy that usually helps."""
        if self.op is None:
            return _GIVEN.get(self.variable.kind, _BEFORE)
        if self.is_written:
            return _GIVEN[Kind.CONSTANT]
        known = (kind for kind in ((self.forward or self.op).type, self.type) if kind in ADVICE)
        fitting = (kind for kind in known if not of(kind).fails_at_zero or self._reads_zero(kind))
        rest = _UNDEFINED if self.numbers.nan and self._reads_finite() else _OVERFLOW
        return ADVICE.get(next(fitting, ""), _ELSEWHERE.get(self.made_by or self.op.made_by, rest))

    @property
    def _innermost(self) -> tuple[Op | None, tuple[Numbers, ...]]:
        """The innermost op that is known, and what it read."""
        return (self.inside[-1].op, self.inside[-1].reads) if self.inside else (self.op, self.reads)

    def _reads_finite(self) -> bool:
        return all(numbers.is_finite for numbers in self._innermost[1])

    def _reads_zero(self, kind: str) -> bool:
        """Whether an op reads a number of 0 or less, or nothing is known of what it reads."""
        ops = [op for op in (self.forward, self.op, *(step.op for step in self.inside)) if op is not None]
        if kind == "integer_pow" and all(int(op.attributes.get("y", 0)) > 0 for op in ops):
            return False
        op, read = self._innermost
        assert op is not None
        if kind == "div" and len(op.body.equations) == 1:
            return next(op.body.calls).primitive == "div" and _divides_by_zero(op.body, read)
        lowest = [x.low for x in read if x.low is not None]
        return not lowest or min(lowest) <= 0

    def __str__(self) -> str:
        return "\n".join([self._title, *(f"  {word:<8}{text}" for word, text in self._rows())])

    @property
    def _title(self) -> str:
        name = self.variable.name
        if self.op is None:
            return f"The {_word(self.variable)} {name!r} is not finite: {self.numbers.bad}."
        return f"{name!r} is the first value that is not finite: {self.numbers.bad}."

    def _rows(self) -> Iterator[tuple[str, str]]:
        if self.op is not None:
            pass_ = "what it saves for backward" if self.of_derivative else str(self.made_by)
            yield "op", ", ".join(filter(None, (self.op.type, pass_, self.scope and f"scope {self.scope}")))
        for step in self.inside:
            yield "inside", " ".join(filter(None, (step.where and f"{step.where}:", step.op.type)))
        if self.source is not None and self.source.file:
            yield "line", f"{self.source} in {self.source.function}"
        if self.device is not None:
            yield "device", str(self.device)
        _, reads = self._innermost
        table = columns([(x.name, x.type, x.words) for x in reads]) if reads else ""
        for i, line in enumerate(table.splitlines()):
            yield "" if i else "reads", line
        yield "reaches", some(self.reaches, 3)
        yield "advice", self.advice


def _divides_by_zero(body: Body, reads: tuple[Numbers, ...]) -> bool:
    """Whether the range of the divisor holds 0, or it is not finite itself."""
    divisor = body.operands[-1]
    if not isinstance(divisor, int):
        return bool(np.any(numbers(body)[-1] == 0)) if numbers(body) else True
    x = reads[divisor]
    return x.low is None or x.high is None or not x.is_finite or x.low <= 0 <= x.high


def _pass_within(op: Op, inside: tuple[Inside, ...]) -> Pass:
    """The pass of the innermost op, where one op holds both."""
    own, saving = _alike(op, inside)
    if own or saving:
        return own[0].made_by if own else Pass.BACKWARD
    for step in inside:
        parts = [p.ops for p in op.subprograms.values() if step.op in p.ops]
        if not any(len({o.made_by for o in ops}) > 1 for ops in parts):
            break
        op = step.op
    return op.made_by


def _alike(op: Op, inside: tuple[Inside, ...]) -> tuple[list[Op], list[Op]]:
    """Of an op that holds both passes, the ops that what is inside may be: themselves, or what they save."""
    for part in op.subprograms.values():
        for step in inside if len({o.made_by for o in part.ops}) > 1 else ():
            here = [
                o for o in part.ops if step.op.scope == (f"{o.made_by}/{o.scope}" if o.scope else o.made_by)
            ]
            own = [o for o in here if step.op.type in (o.primal or o.body).primitives]
            saving = [o for o in here if o not in own and step.op.type in o.body.primitives]
            if own or saving:
                return own, saving
    return [], []


def forward_of(program: Program, op: Op) -> Op | None:
    """The op whose gradient this one computes; None if it computes none."""
    return next((o for o in program.ops if op.of is not None and op.of in o.outputs), None)


def source_of(op: Op, forward: Op | None, inside: tuple[Inside, ...]) -> Source | None:
    """The user's line, as far inside as it is known.

    Derived ops that compute the same share a body, whose lines are those of the first of them: a line counts
    only if it stands in the forward op as well, or in a rule of the user's own.
    """
    origin = forward or op
    body = origin.primal or origin.body
    known = {_place(source) for source in _sources(programs_within(body).values())}
    own_rule = op.made_by is Pass.UPDATE or body.has_custom_rule
    for step in reversed(inside):
        source = step.op.source
        if source is not None and source.file and (own_rule or _place(source) in known):
            return source
    own, saving = _alike(op, inside)
    alike = {_place(o.source): o.source for o in own or saving if o.source is not None}
    return next(iter(alike.values())) if len(alike) == 1 else op.source


def _sources(programs: Iterable[Program]) -> Iterator[Source]:
    for program in programs:
        for op in program.ops:
            if op.source is not None and op.source.file:
                yield op.source
            yield from _sources(op.subprograms.values())


def _place(source: Source) -> tuple[str, int]:
    return source.file, source.line


def _word(v: Variable) -> str:
    return {Kind.DATA: "data", Kind.PARAMETER: "parameter", Kind.CONSTANT: "constant"}.get(v.kind, "state")
