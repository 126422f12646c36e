"""``fission``: loops whose turns compute only what has to wait for the turn before.

In a recurrent network the product of the data with a weight waits for nothing, and the gradient of a weight
is only added up from turn to turn. Each is one product over all turns, before the loop or after it: one long
product is faster than many short ones, and the sums need not pass through memory at every turn.

Source: loop fission (distribution) as in Allen and Kennedy, *Optimizing Compilers for Modern Architectures*
(2001), section 5.2; for recurrent networks Appleyard, Kocisky and Blunsom, arXiv:1604.01946, section 3.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from onward.core.check import expect_program
from onward.core.jaxprs.body import Body, body_of
from onward.core.jaxprs.edited import in_place_of
from onward.core.jaxprs.loops import result_of
from onward.core.jaxprs.reading import program_of
from onward.core.lower import lower
from onward.core.marks import ACCUMULATE
from onward.core.primitives.table import of
from onward.core.primitives.traits import Runs
from onward.core.program import Op, Program
from onward.core.transform import transform
from onward.core.turn import ScanTurn
from onward.develop.fission.loop import LoopApart
from onward.develop.fission.parts import Parts
from onward.develop.roll.build import Layers


@transform
def fission(program: Program) -> Program:
    """Compute before and after a loop what its turns need not compute one by one.

    Looks at each ``jax.lax.scan``, forward and backward, those within other loops as well. Before it: the
    product of what each turn is given with a weight that is the same in all, and the transpose of a weight
    that turns would multiply few rows with. After it: the sums of products that turns only add up, such as
    the gradient of a weight, each as one product. The results are equal but for the order of sums. A product
    leaves its loop where the weight is at least four times as large as what a turn stacks for it: a small
    batch, a wide layer. A loop stacks at most as much again as it does anyhow, or 64 MiB. The loop of
    ``accumulate``, which is there to save memory, stays as it is, and so do layers rolled to a loop; loops
    within them do not.

    Args:
        program: a Program, with or without backward and update; of a backward pass that is derived later
            nothing leaves its loops, so it comes last.

    Example:
        >>> import jax, jax.numpy as jnp, onward as ow
        >>> def loss(params, xs):
        ...     def turn(h, x):
        ...         return jnp.tanh(x @ params["in"] + h @ params["on"]), None
        ...     return jnp.mean(jax.lax.scan(turn, jnp.zeros((2, 8)), xs)[0] ** 2)
        >>> params = {"in": jnp.ones((8, 8)), "on": jnp.ones((8, 8))}
        >>> program = ow.SGD(0.1).minimize(loss, params, jnp.ones((9, 2, 8)))
        >>> print(*ow.graph.fissions(program), sep=chr(10))
        scan: of 9 turns 1 before them
        scan_grad: of 9 turns 2 after them
        >>> ow.graph.fissions(ow.fission(program))
        ()
    """
    return replace(program, ops=tuple(map(_apart, program.ops)))


def fissions(program: Program) -> tuple[str, ...]:
    """The products and sums that ``fission`` would take out of loops: a line for each loop.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> ow.graph.fissions(ow.trace(lambda w, x: jnp.sum(w * x), jnp.ones(3), jnp.ones(3)))
        ()
    """
    expect_program(program, "fissions")
    return tuple(f"{op.type}: {parts}" for op in program.ops for parts in _parts_in(op))


def _parts_in(op: Op) -> list[Parts]:
    """The parts of the loop that an op is, and of those within it."""
    if not _loops(op.body):
        return []
    turn = ScanTurn.of(op.body)
    inner = turn.program if turn else _whole(op.body)
    own = [Parts(turn)] if turn and _may_change(op) else []
    return [*filter(None, own), *(parts for deeper in inner.ops for parts in _parts_in(deeper))]


def _apart(op: Op) -> Op:
    if not _parts_in(op):
        return op
    turn = ScanTurn.of(op.body)
    inner = turn.program if turn else _whole(op.body)
    program = replace(inner, ops=tuple(map(_apart, inner.ops)))
    if turn is None:
        body = body_of(lambda *values: lower(program, program.outputs)((), values), *op.body.in_types)
    else:
        body = body_of(_loop(op, replace(turn, program=program)), *op.body.in_types)
    return replace(op, body=in_place_of(op.body, body))


def _loop(op: Op, turn: ScanTurn) -> Callable[..., list[Any]]:
    """The function that computes a loop in parts, or with this turn in one."""
    apart = LoopApart(Parts(turn)) if _may_change(op) else None
    given = [result_of(op.body, i) for i in range(len(op.outputs))]

    def run(*values: Any) -> list[Any]:
        results = apart.run(values) if apart else turn.scan(turn.once, values)
        return [results[i] for i in given]

    return run


def _loops(body: Body) -> bool:
    return any(of(p).runs is Runs.SCAN for p in body.primitives)


def _may_change(op: Op) -> bool:
    return op.type is not ACCUMULATE and not isinstance(op.body, Layers)


def _whole(body: Body) -> Program:
    """A Body of several equations as a Program; an empty one for an equation that is not a loop."""
    return program_of(body.closed, "body") if len(body.equations) > 1 else Program("body")
