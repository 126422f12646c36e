"""A cut for trainers that make steps of their own: what they send is how far their parameters came.

The trainer's Program has neither forward nor backward pass, for these are in the training Program that it
runs between two meetings. It receives the parameters, and sends ``w - w/local`` as the gradient of an outer
optimizer.

>>> import jax.numpy as jnp, onward as ow
>>> program = ow.AdamW(0.1).minimize(lambda w, x: jnp.mean(x @ w), jnp.ones(6), jnp.ones((8, 6)))
>>> cut = split_local(program, servers=1, trainers=2, outer=ow.SGD(1.0))
>>> [op.type for op in cut.trainer.ops], [op.type for op in cut.servers[0].ops]
(['recv', 'delta', 'send'], ['recv', 'count', 'sgd', 'send'])
"""

from __future__ import annotations

from onward.core.jaxprs.body import body_of
from onward.core.names import Names
from onward.core.program import Op, Program, Variable
from onward.core.words import Kind, Pass
from onward.derive.optimizer import Optimizer
from onward.derive.update.groups import Routing
from onward.develop.seam import forward_pass
from onward.distribute.split.checks import check_landing, check_rules
from onward.distribute.split.cut import Split
from onward.distribute.split.shards import balanced


def split_local(program: Program, servers: int, trainers: int, outer: Optimizer) -> Split:
    """Cut a training Program so that trainers update for themselves, and servers what they agree on.

    Args:
        program: a training Program, as ``minimize`` makes it; each trainer runs all of it.
        servers: how many.
        trainers: how many.
        outer: what servers update with.

    Raises:
        GraphError: the outer optimizer looks across parameters, or evaluates the loss.
    """
    base, local = _differences(program)
    trained = [p for p, _ in base.gradients]
    routing = Routing.of(outer, trained, base)
    check_rules(routing, servers)
    return check_landing(
        Split(
            source=base,
            forward=base,
            base=base,
            optimizer=outer,
            shards=balanced(trained, routing, servers),
            tables=(),
            lazy=frozenset(),
            count=trainers,
            recipe=None,
            local=local,
        )
    )


def _differences(program: Program) -> tuple[Program, dict[str, str]]:
    """The Program from a trainer's own parameters to the differences, and whose value each feed is."""
    names = Names(v.name for v in program.state)
    fed: dict[Variable, Variable] = {}
    pairs, ops, following = [], [], {}
    for p, _ in program.gradients:
        own = fed[p] = Variable(names.new(f"{p.name}/local"), p.shape, p.dtype, Kind.DATA)
        delta = Variable(names.new(f"delta({p.name})"), p.shape, p.dtype, Kind.GRADIENT)
        kind = p.aval
        ops.append(
            Op("delta", (p, own), (delta,), body_of(lambda x, y: [x - y], kind, kind), Pass.COLLECTIVE)
        )
        pairs.append((p, delta))
    carried = forward_pass(program).next_state
    for v in program.state:
        if v in carried:
            following[v] = fed[v] = Variable(names.new(f"{v.name}/local"), v.shape, v.dtype, Kind.DATA)
    base = Program(
        program.name,
        inputs=tuple(fed.values()),
        state=tuple(fed),
        ops=tuple(ops),
        gradients=tuple(pairs),
        next_state=following,
    )
    return base, {own.name: v.name for v, own in fed.items()}
