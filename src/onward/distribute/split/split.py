"""One training Program becomes one for a trainer and several for parameter servers.

The cut runs along ``program.gradients``. A trainer receives parameters, computes gradients and sends them; a
server receives gradients, updates the parameters it owns and sends these.

>>> import jax.numpy as jnp, onward as ow
>>> params = {"w": jnp.ones((4, 2)), "b": jnp.ones(2)}
>>> def loss(p, x):
...     return jnp.mean((x @ p["w"] + p["b"]) ** 2)
>>> cut = ow.split(ow.SGD(0.1).minimize(loss, params, jnp.ones((8, 4))), servers=2)
>>> [[str(shard) for shard in own] for own in cut.shards]
[['b', 'w[0:2]'], ['w[2:4]']]
>>> [op.type for op in cut.servers[0].ops]
['recv', 'count', 'sgd', 'sgd', 'send']
"""

from __future__ import annotations

from collections.abc import Iterable

from onward.core.check import expect_program
from onward.core.errors import GraphError
from onward.core.program import Applied, Program
from onward.core.recipe import recipe_of, undone
from onward.core.structure import expect_count, expect_flag
from onward.core.walk import Where, listed
from onward.core.words import Kind
from onward.derive.update.groups import Routing
from onward.develop.accumulation.accumulate import accumulated, accumulation_of
from onward.develop.batch import data_types
from onward.develop.guard import guard
from onward.develop.mixed.loss_scale import adjust_scale
from onward.develop.watch.watch import Watch, watched
from onward.distribute.replicate import replicated
from onward.distribute.split.checks import (
    check_between,
    check_landing,
    check_lazy,
    check_rules,
    optimizer_before_guards,
    tables_named,
)
from onward.distribute.split.cut import Split, cut_passes
from onward.distribute.split.devices import TrainerDevices
from onward.distribute.split.guarding import Guarding
from onward.distribute.split.looks import Looks
from onward.distribute.split.rows import why_whole
from onward.distribute.split.shards import balanced

_ACCUMULATED = "accumulate adds up the gradients of micro-batches, which read different rows of it"


def split(
    program: Program, servers: int, trainers: int = 1, *, rows: bool = True, lazy: Iterable[Where] = ()
) -> Split:
    """Cut a training Program into one for a trainer and one for each parameter server.

    Parameters are balanced over the servers by the bytes that they and their slots take. Where the optimizer
    looks at each number by itself, a large parameter is cut by rows. The step counter, the schedules and the
    hyperparameters are the first server's; trainers bring the others what they read of them. What the
    forward pass carries from step to step (statistics, random keys) is the first server's too, as the mean
    over the trainers. A gradient rule of the optimizer that looks across parameters (``ClipByGlobalNorm``)
    gets what it needs of other servers' gradients as sums: of one trainer's gradients these come with them,
    of several trainers' the servers' parts are added up between two phases of an update (module ``across``).
    A transform that stands between backward pass and update, such as ``clip_by_global_norm``, stays
    with the trainer. What ``guard``, ``check_finite`` or a loss scale leaves out, all servers leave out: each
    trainer tells them whether its loss and gradients are finite. A table of which a step looks up some rows
    travels by these rows. What ``watch`` looks at, each trainer looks at where it computes it: activations,
    parameters, and gradients where each trainer's is an update of its own. Servers look at what they merge
    and update, each at its part, and ``joined`` makes of it what one device would see; of a parameter whose
    histogram, slots or statistics of your own they watch, one server has all rows.

    Of a replicated Program every trainer takes its batch over several devices, merges their gradients, and
    sends them once; tables then travel whole.

    Args:
        program: a training Program, as ``minimize`` makes it, or ``replicate``.
        servers: how many.
        trainers: how many gradients a server merges before it updates; with 1 it updates for each.
        rows: whether embedding tables travel by the rows that are looked up.
        lazy: tables, by name, pattern or predicate, whose untouched rows an update leaves alone. An
            optimizer with slots (momentum) would move them too, at a cost in proportion to the whole table.

    Raises:
        GraphError: a Program without an update, an optimizer that looks across parameters, a transform that
            clips where several trainers' gradients are merged after it, lazy tables of a guarded or a
            replicated Program, a merge of devices that is more than the gradients', a thing to watch that
            neither trainers nor servers have, factors of low rank, or fewer parameters than servers.
        RecipeError: the Program was not traced, or its ops were changed by hand.
        UnknownNameError: ``lazy`` names no table that travels by rows.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> program = ow.Adam(0.1).minimize(lambda w, x: jnp.mean(x @ w), jnp.ones(6), jnp.ones((8, 6)))
        >>> cut = ow.split(program, servers=2)
        >>> [v.name for v in cut.servers[1].state]
        ['w[3:6]', 'w[3:6]/mean', 'w[3:6]/variance']
        >>> [v.name for v in cut.trainer.outputs]
        ['div', 'to_server_0/grad(w[0:3])', 'to_server_1/grad(w[3:6])']
    """
    _expect(program, servers, trainers, rows)
    if program.replicas is not None:
        devices = TrainerDevices.of(program)
        devices.expect_whole_tables(lazy := tuple(listed(lazy)))
        return split(undone(program, replicated), servers, trainers, rows=False, lazy=lazy).over(devices)
    how = accumulation_of(program)
    whole = recipe_of(program, "without its update", "Build it with optimizer.minimize")
    recipe = whole.without(accumulated).without(watched)
    optimizer = optimizer_before_guards(program, recipe)
    routing = Routing.of(optimizer, program.parameters, program)
    check_rules(routing, servers)
    check_between(program, recipe, trainers)
    by_rows = [p.name for p, _ in program.gradients] if rows and how is None else []
    guarding = Guarding.of(recipe.steps, servers)
    types, looks = data_types(program, (), 0), guarding is not None
    forward, base, tables = cut_passes(program, recipe, types, by_rows, how=how, looks=looks)
    watches = _watches(whole.steps)
    by_row = frozenset(t.parameter.name for t in tables)
    kept_whole = Looks.of(base, watches, by_row, trainers).kept_whole(program)
    never = "" if by_rows else _ACCUMULATED if rows else "rows=False"
    chosen = tables_named(lazy, tables, program, lambda p: never or why_whole(program, forward, p))
    check_lazy(chosen, routing, guarding)
    cut = Split(
        program,
        forward,
        base,
        optimizer,
        balanced([program[p.name] for p, _ in base.gradients], routing, servers, kept_whole),
        tables,
        frozenset(v.name for v in chosen),
        trainers,
        recipe,
        accumulation=how,
        guarding=guarding,
        watches=watches,
    )
    cut.looks.joined([part.program for part in cut.server_parts])  # raises what nobody sees
    return check_landing(cut)


def _expect(program: Program, servers: int, trainers: int, rows: bool) -> None:
    for what, count in (("servers", servers), ("trainers", trainers)):
        expect_count(count, f"split: {what}", of="how many")
    expect_program(program, "split")
    expect_flag(rows, "split: rows")
    if any(v.kind is Kind.FROZEN for v in program.state):
        raise GraphError(
            f"split: {program.name!r} has factors of low rank, and servers hold what the function is given. "
            "Train it on the devices of one machine or mesh: compile, replicate or partition."
        )


def _watches(steps: Iterable[Applied]) -> tuple[tuple[Watch, bool], ...]:
    """Everything that is watched, and whether after updates were left out."""
    guarded, found = False, []
    for step in steps:
        guarded |= step.function in (guard, adjust_scale)
        found += [(step.arguments[0], guarded)] if step.function is watched else []
    return tuple(found)
