"""A Program from a file runs as a whole: what that forbids, and how it becomes one op with a derivative."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from onward.core.described import DescribedBody
from onward.core.errors import GraphError, LossError
from onward.core.jaxprs.body import body_of
from onward.core.program import Code, Op, Program, Variable
from onward.core.words import Pass

LOADED = "loaded"


def expect_whole(program: Program) -> None:
    """Raise ``GraphError`` where a Program from a file asks for other numbers than its ops gave in there.

    Its ops are computed together, of what they read when they were saved. What stands behind them is free.
    """
    code = program.code
    if code is None:
        return
    moved = next(
        (op for op in program.ops if isinstance(op.body, DescribedBody) and op not in code.ops), None
    )
    fed = next((v for v in program.inputs if v.name in code.gives), None)
    added = (op for op in program.ops if op not in code.ops)
    own = {v for op in code.ops for v in op.outputs}
    again = next((op for op in added if not own.isdisjoint(op.outputs)), None)
    if moved is not None:
        what = f"{moved!r} cannot read what it did not read then"
    elif fed is not None:
        what = f"{fed.name!r} cannot be fed, which it computes"
    elif again is not None:
        what = f"{again!r} cannot compute what it computes"
    else:
        return
    raise GraphError(
        f"{program.name!r} was loaded from {code.file} and runs as a whole, so {what}: "
        "only what is added behind its ops has an effect. Apply the transform "
        "before save; or save the model with trainable=True, and minimize a loss of your own: "
        "minimize(lambda p, x, y: loss(model(p, x), y), model.parameters, x, y)."
    )


def opened(program: Program) -> Program:
    """The Program whose ops from a file are one op that computes all their Variables.

    It can be differentiated if the file holds the derivative: ``expect_derivative``.
    """
    code = program.code
    if code is None:
        return program
    given = {v.name: v for v in (*program.inputs, *program.state, *program.constants)}
    reads = tuple(given[v.name] for v in code.reads if v.name in given)
    wanted = tuple(v for op in program.ops if op in code.ops for v in op.outputs)
    ops = (_loaded(code, reads, wanted), *(op for op in program.ops if op not in code.ops))
    return replace(program, ops=ops, code=None)


def expect_derivative(program: Program) -> None:
    """Raise ``LossError`` for a Program whose file holds no derivative of it."""
    code = program.code
    if code is not None and code.lacks:
        raise LossError(f"{program.name!r} has no gradient: {without_derivative(code.file, code.lacks)}")


def _loaded(code: Code, reads: tuple[Variable, ...], wanted: tuple[Variable, ...]) -> Op:
    """The one op: from what the Program still reads to what it still computes."""
    place = {v.name: i for i, v in enumerate(reads)}
    chosen = [code.gives.index(v.name) for v in wanted]

    def computed(*values: Any) -> list[Any]:
        found = code.called([values[place[v.name]] if v.name in place else None for v in code.reads])
        return [found[i] for i in chosen]

    return Op(LOADED, reads, wanted, body_of(computed, *(v.aval for v in reads)), Pass.FORWARD)


def without_derivative(file: str, lacks: str) -> str:
    """The sentence for a file that can only be run."""
    return (
        f"{file} holds no derivative: {lacks}. Save the model again from the code of the network, with this "
        "version of Onward: save(model, path, trainable=True)."
    )
