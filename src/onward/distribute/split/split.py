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

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import sha256
from typing import Any

from onward.core.check import expect_program
from onward.core.errors import ArgumentError, GraphError, UnknownNameError, UnreachedWarning
from onward.core.jaxprs.tracing import along
from onward.core.marks import Mark
from onward.core.program import Op, Program, Variable
from onward.core.recipe import Applied, Phase, Recipe, build, recipe_of, with_steps
from onward.core.structure import expect_flag
from onward.core.walk import Where, ancestors, listed, name_of, select
from onward.core.words import UpdateType
from onward.derive.accumulation.accumulate import accumulated, accumulation_of
from onward.derive.accumulation.micro_batches import Accumulation
from onward.derive.backward import append_backward
from onward.derive.batch import data_types
from onward.derive.mixed.loss_scale import scale_loss
from onward.derive.optimizer import Optimizer
from onward.derive.rule import GradientRule
from onward.derive.update.groups import Routing
from onward.derive.update.precision import is_low
from onward.derive.update.update import append_update, optimizer_of
from onward.derive.watch.watch import Watch, counter_of, watched
from onward.distribute.merge import is_count
from onward.distribute.replicate import unreplicated
from onward.distribute.split.across import Across, across_of
from onward.distribute.split.devices import TrainerDevices
from onward.distribute.split.guarding import GUARDS, Guarding, looking, scale_of, verdict_of
from onward.distribute.split.in_words import in_words
from onward.distribute.split.looks import expect_seen, looked_at
from onward.distribute.split.rows import Table, by_rows, places_of, tables_in
from onward.distribute.split.server import Duties, ServerPart, server_part, shared_part
from onward.distribute.split.shards import Shard, Shards, balanced, is_by_number, rows_of
from onward.distribute.split.trainer import TrainerPart, carried_by, trainer_part


@dataclass(frozen=True, eq=False)
class Split:
    """The Programs of a trainer and of each server, and the rows of parameters that each server owns.

    Attributes:
        source: the training Program that was cut.
        forward: its forward pass.
        base: its forward and backward pass, as a trainer runs them.
        optimizer: what the servers update with.
        shards: for each server, what it owns.
        tables: what travels by rows.
        lazy: the names of the tables whose untouched rows an update leaves alone.
        count: how many trainers' gradients a server merges at an update.
        recipe: how the source was made; None where the trainer makes steps of its own.
        local: where it does so, by the name of each of its feeds, whose value that is.
        accumulation: how a trainer takes its batch in parts; None: in one.
        guarding: what is done about a step that is not finite; None: nothing.
        watches: what trainers look at.
        devices: those that each trainer takes its batch over; None: one.
    """

    source: Program
    forward: Program
    base: Program
    optimizer: Optimizer
    shards: Shards
    tables: tuple[Table, ...]
    lazy: frozenset[str]
    count: int
    recipe: Recipe | None
    local: Mapping[str, str] = field(default_factory=dict)
    accumulation: Accumulation | None = None
    guarding: Guarding | None = None
    watches: tuple[Watch, ...] = ()
    devices: TrainerDevices | None = None

    @property
    def advice(self) -> str:
        """The advice for a call that expects a Program and is given a Split."""
        return (
            "A Split is several already: trainer, servers. A trainer on several devices is "
            "split(replicate(program, devices), servers)."
        )

    @property
    def trainer(self) -> Program:
        """The Program of a trainer."""
        return self.trainer_part.program

    @property
    def servers(self) -> tuple[Program, ...]:
        """The Program of each server."""
        return tuple(part.program for part in self.server_parts)

    @cached_property
    def trainer_part(self) -> TrainerPart:
        """The Program of a trainer, and which of its feeds and outputs travel."""
        own = self.own
        finite = None if self.guarding is None else verdict_of(own)
        sent = [a for a in self.across if a.by_trainer]
        with along(own.replicas):
            base, told = looked_at(own, self.watches, counter_of(self.source))
        told = told if self.scale is None else (own[self.scale.name], *told)
        return trainer_part(base, self.shards, self.tables, finite, told, sent)

    @cached_property
    def own(self) -> Program:
        """Forward and backward pass on the devices of a trainer."""
        if self.devices is None or self.recipe is None:
            return self.base
        types = data_types(self.forward, (), 0)
        looks = self.guarding is not None
        return _cut(self.source, self.recipe, types, [], False, self.accumulation, looks, self.devices)[1]

    @cached_property
    def server_parts(self) -> tuple[ServerPart, ...]:
        """The Program of each server if trainers touch as many rows as they can, and what of it travels."""
        most = {t.parameter.name: t.rows.shape[0] for t in self.tables}
        return tuple(self.server_part(i, most) for i in range(len(self.shards)))

    def server_part(self, index: int, touched: Mapping[str, int]) -> ServerPart:
        """The part of one server if each trainer sends so many rows of each table."""
        by_row = {t.parameter for t in self.tables}
        own = self.shards[index]
        duties = Duties(
            index,
            tuple(s for s in own if s.parameter not in by_row),
            {s: touched[s.parameter.name] for s in own if s.parameter in by_row},
            () if index else self.carried,
            self.lazy,
            self.guarding,
            None if index else self.scale,
            self.across,
            bool(self.watches) and not index,
        )
        return server_part(self.base, duties, self.routing, self.count)

    @cached_property
    def routing(self) -> Routing:
        """Which optimizer updates which parameter."""
        return Routing.of(self.optimizer, self.source.parameters, self.source)

    @cached_property
    def across(self) -> tuple[Across, ...]:
        """The gradient rules that look across parameters of several servers."""
        return across_of(self.source, self.routing, self.shards, self.count)

    @property
    def exchanges(self) -> bool:
        """Whether servers tell each other sums over their gradients before they update."""
        return any(a.exchanged for a in self.across)

    @cached_property
    def shared(self) -> Program | None:
        """The Program of the values that trainers bring others from the first server; None if it is alone."""
        first, *others = self.server_parts
        return shared_part(first, others) if others else None

    @cached_property
    def places(self) -> Program | None:
        """From data to the rows that are looked up; None where nothing travels by rows."""
        return places_of(self.forward, self.tables) if self.tables else None

    @property
    def carried(self) -> tuple[Variable, ...]:
        """The state that the forward pass replaces, which the first server keeps."""
        return carried_by(self.base)

    @cached_property
    def scale(self) -> Variable | None:
        """The loss scale, which the first server keeps; None where nothing is scaled."""
        return scale_of(self.base) if self.guarding is not None and self.guarding.growth else None

    def over(self, devices: TrainerDevices | None) -> Split:
        """The same cut for trainers that take their batches over these devices; servers do not notice.

        Raises:
            ArgumentError: a batch that the devices do not divide.
            GraphError: gradients are merged in a way that needs more than a trainer has.
        """
        spread = replace(self, devices=devices)
        if devices is not None:
            devices.expect_nothing_kept(spread.own)
        return spread

    def at(self, data: Sequence[Any]) -> Split:
        """The same cut for data of these types; what servers own and run stays."""
        if self.recipe is None:
            return self
        by_row = [t.parameter.name for t in self.tables]
        forward, base, tables = _cut(
            self.source,
            self.recipe,
            tuple(data),
            by_row,
            always=True,
            how=self.accumulation,
            looks=self.guarding is not None,
        )
        return replace(self, forward=forward, base=base, tables=tables).over(self.devices)

    @cached_property
    def fingerprint(self) -> str:
        """A digest that peers compare before they talk: equal for cuts of the same graph, in any process.

        How many devices a trainer has is its own matter.
        """
        return self._digest(beginning=True)

    @property
    def continued(self) -> str:
        """A digest, equal for cuts that can continue each other: with any first values, and rates."""
        return self._digest(beginning=False)

    def __repr__(self) -> str:
        return f"Split({self.source!r}, {len(self.shards)} servers, {self.count} trainers)"

    def _digest(self, beginning: bool) -> str:
        if self.devices is not None:
            return replace(self, devices=None)._digest(beginning)
        text = "\n".join(in_words(p, beginning) for p in (self.trainer, *self.servers))
        owned = "|".join(",".join(map(str, own)) for own in self.shards)
        return sha256(f"{text}\n{owned}\n{sorted(self.lazy)}".encode()).hexdigest()[:16]


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
    parameters, and gradients where each trainer's is an update of its own.

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
            replicated Program, a merge of devices that is more than the gradients', a thing to watch that no
            trainer has, or fewer parameters than servers.
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
    for what, count in (("servers", servers), ("trainers", trainers)):
        if not is_count(count):
            raise ArgumentError(f"split: {what} is {count!r}; expected how many, at least 1.")
    expect_program(program, "split")
    expect_flag(rows, "split: rows")
    if program.replicas is not None:
        devices = TrainerDevices.of(program)
        devices.expect_whole_tables(lazy := tuple(listed(lazy)))
        return split(unreplicated(program), servers, trainers, rows=False, lazy=lazy).over(devices)
    how = accumulation_of(program)
    whole = recipe_of(program, "without its update", "Build it with optimizer.minimize")
    recipe = whole.without(accumulated).without(watched)
    optimizer = _optimizer(program, recipe)
    routing = Routing.of(optimizer, program.parameters, program)
    check_rules(routing, servers)
    _check_between(program, recipe, trainers)
    trained = [p.name for p, _ in program.gradients]
    guarding = Guarding.of(recipe.steps, servers)
    forward, base, tables = _cut(
        program,
        recipe,
        data_types(program, (), 0),
        trained if rows and how is None else [],
        how=how,
        looks=guarding is not None,
    )
    full = [program[p.name] for p, _ in base.gradients]
    watches = tuple(step.arguments[0] for step in whole.of(watched))
    expect_seen(base, watches, tables, trainers)
    chosen = _chosen(lazy, tables)
    _check_lazy(chosen, routing, guarding)
    cut = Split(
        program,
        forward,
        base,
        optimizer,
        balanced(full, routing, servers),
        tables,
        frozenset(v.name for v in chosen),
        trainers,
        recipe,
        accumulation=how,
        guarding=guarding,
        watches=watches,
    )
    return check_landing(cut)


def _chosen(lazy: Iterable[Where], tables: Sequence[Table]) -> tuple[Variable, ...]:
    """The tables that shall be updated lazily."""
    wanted = tuple(listed(lazy))
    if wanted and not tables:
        raise UnknownNameError(
            f"split, lazy: {', '.join(str(name_of(w)) for w in wanted)}: no parameter of this Program goes "
            "by rows. One does whose rows alone are read (table[ids]), fewer in a batch than it has."
        )
    return select([t.parameter for t in tables], wanted, "split, lazy") if wanted else ()


def _check_lazy(tables: Sequence[Variable], routing: Routing, guarding: Guarding | None) -> None:
    """Refuse lazy updates by what needs more than the rows that were sent."""
    if tables and guarding is not None:
        raise GraphError(
            f"split: lazy updates of {tables[0].name!r} touch the rows that were sent, and what leaves an "
            "update out (guard, check_finite, a loss scale) keeps or replaces whole tables. Leave one of the "
            "two out; without lazy= the table still travels by rows."
        )
    for table in tables:
        optimizer = routing[table].optimizer
        if not is_by_number(optimizer):
            raise GraphError(
                f"split: lazy updates look at single rows, and {optimizer.title} looks at each "
                "parameter as a whole. Leave lazy= out, or take an optimizer that looks at each number by "
                "itself."
            )
        if optimizer.apart is not None:
            raise GraphError(
                f"split: lazy updates of {table.name!r} run the rule on the rows that were sent, and "
                f"{optimizer.title} was traced for the whole table. Leave lazy= out (the table still travels "
                "by rows), or take an optimizer of Onward, such as Adagrad(0.1)."
            )
        acting = [r for r in optimizer.rules if routing.applies(r, table)]
        if acting or is_low(table.dtype):
            what = type(acting[0]).__name__ if acting else f"a parameter of {table.dtype}"
            raise GraphError(
                f"split: lazy updates of {table.name!r} are the optimizer's alone, and {what} needs more "
                "than the rows that were sent. Leave lazy= out, or keep the rule away from the table with "
                "where=."
            )


def check_landing(cut: Split) -> Split:
    """Return the Split if every row of every parameter is updated exactly once, by its rule, else raise.

    Raises:
        GraphError: a row without an owner or with two, an update op that is missing, double or of another
            type, or a counter or schedule outside the first server.
    """
    for p, _ in cut.base.gradients:
        owned = sorted((s.begin, s.end) for own in cut.shards for s in own if s.parameter.name == p.name)
        ends = [0, *(end for _, end in owned)]
        rows = rows_of(cut.source[p.name])
        if [begin for begin, _ in owned] != ends[:-1] or ends[-1] != rows:
            raise GraphError(
                f"split: of {p.name!r} the servers own the rows {owned}; expected 0 to {rows}, once."
            )
    for part, own in zip(cut.server_parts, cut.shards, strict=True):
        _check_updates(part.update, own, cut.routing)
    for program in (part.update for part in cut.server_parts[1:]):
        if counting := [op for op in program.ops if op.update is UpdateType.BOOKKEEPING]:
            raise GraphError(f"split: {program.name} has {counting[0]!r}, which belongs to the first server.")
    return cut


def _check_updates(program: Program, own: Sequence[Shard], routing: Routing) -> None:
    """Raise ``GraphError`` unless each part of a parameter is updated by one op of its rule."""
    following = {old.name: new for old, new in program.next_state.items()}
    made: dict[str, list[Op]] = {}
    for op in program.ops:
        if not isinstance(op.type, Mark):
            made.setdefault(op.type, []).append(op)
    landed: dict[str, set[Op]] = {}
    for shard in own:
        rule = routing[shard.parameter].optimizer
        before = ancestors(program, [following[str(shard)]]) if str(shard) in following else set()
        ops = [op for op in made.get(rule.name, ()) if not before.isdisjoint(op.outputs)]
        double = rule.type is not UpdateType.ACROSS and not landed.setdefault(rule.name, set()).isdisjoint(
            ops
        )
        landed.setdefault(rule.name, set()).update(ops)
        if len(ops) != 1 or double:
            raise GraphError(
                f"split: {program.name} updates {str(shard)!r} by {len(ops)} ops of type {rule.name}"
                f"{', one of which updates another parameter too' if double else ''}; expected one for each."
            )
    for name, ops_landed in landed.items():
        if len(ops_landed) < len(made[name]):
            raise GraphError(f"split: {program.name} has an op {name} that updates none of its parameters.")


def check_rules(routing: Routing, servers: int) -> None:
    """Refuse by name what needs data, or more of the other servers' parameters than sums of gradients."""
    for rule in routing.all_rules():
        if rule.evaluates_loss:
            raise GraphError(
                f"{type(rule).__name__} evaluates the loss in its update, and servers have no data. Take one "
                "that needs the gradient alone, or replicate(program, devices)."
            )
        if rule.type is UpdateType.ACROSS and servers > 1 and not getattr(rule, "shares", False):
            how = (
                ", or give it sums and update_share (GradientRule)" if isinstance(rule, GradientRule) else ""
            )
            raise GraphError(
                f"{rule.title} looks at all parameters at once, and {servers} servers have a part "
                f"of them each. Take one server, or one that looks at each parameter by itself{how}."
            )


def _check_between(program: Program, recipe: Recipe, trainers: int) -> None:
    """Refuse what stays with the trainers and would have to look at what is merged on servers."""
    steps = recipe.steps[_place_of_backward(recipe) + 1 : _place_of_update(recipe)]
    between = [step.function.__name__ for step in steps if step.function is not scale_loss]
    if between and trainers > 1:
        raise GraphError(
            f"{between[0]} stands between the backward pass and the update of {program.name!r}, so it stays "
            f"with each trainer, and the gradients of {trainers} trainers are merged after it: that is not "
            f"{between[0]} of what is merged. Give the optimizer a rule in its place, as "
            "rules=[ClipByGlobalNorm(1.0)], or take one trainer, asynchronous updates, or replicate(program, "
            "devices)."
        )


def _place_of_backward(recipe: Recipe) -> int:
    """Which of the transforms made the gradients."""
    places = [i for i, step in enumerate(recipe.steps) if step.function is append_backward]
    return max(places, default=0)


def _place_of_update(recipe: Recipe) -> int:
    """Which of the transforms made the update, as far as there is one."""
    places = [i for i, step in enumerate(recipe.steps) if step.function is append_update]
    return max(places, default=-1)


def _optimizer(program: Program, recipe: Recipe) -> Optimizer:
    """The optimizer that made the update, which only what guards it may follow."""
    places = [i for i, step in enumerate(recipe.steps) if step.function is append_update]
    steps = [step.function for step in recipe.steps[max(places, default=-1) + 1 :]]
    after = [function.__name__.strip("_") for function in steps if function not in GUARDS]
    if len(places) != 1 or after:
        what = f"{', '.join(after)} after its update" if len(places) == 1 else f"{len(places)} updates"
        raise GraphError(
            f"Program {program.name!r} has {what}; split cuts a Program whose last transform is its update: "
            "optimizer.minimize(loss, ...). Leave out what comes after it."
        )
    return optimizer_of(recipe.steps[places[0]])


def _cut(
    source: Program,
    recipe: Recipe,
    data: tuple[Any, ...],
    candidates: Sequence[str],
    always: bool = False,
    how: Accumulation | None = None,
    looks: bool = False,
    devices: TrainerDevices | None = None,
) -> tuple[Program, Program, tuple[Table, ...]]:
    """The forward pass, forward and backward pass as a trainer runs them, and the tables of the source."""
    forward = recipe.origin.trace(data)
    tables = tables_in(forward, [forward[name] for name in candidates], always)
    base = by_rows(forward, tables)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnreachedWarning)  # minimize has told it
        before = recipe.steps[: _place_of_update(recipe)]
        layouts = [] if devices is None else [devices.step]
        if how is not None:
            layouts.append(Applied(accumulated, (how,), {}, Phase.MICRO_BATCHES, lays_out_batch=True))
        if layouts:
            base = build(replace(recipe, steps=(*before, *layouts)), data)
        else:
            base = with_steps(base, before)
        base = looking(base) if looks else base
    return forward, base, tuple(replace(t, parameter=source[t.parameter.name]) for t in tables)
