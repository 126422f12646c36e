"""The conditions under which a training Program can be cut, and the proof that every row is updated once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from onward.core.errors import GraphError, UnknownNameError
from onward.core.marks import Mark
from onward.core.program import Op, Program, Recipe, Variable
from onward.core.recipe import called
from onward.core.walk import Where, ancestors, listed, select
from onward.core.words import UpdateType
from onward.derive.backward import append_backward
from onward.derive.rule import GradientRule
from onward.derive.update.foreign import append_foreign_update
from onward.derive.update.groups import OptimizerRule, Routing
from onward.derive.update.precision import is_low
from onward.derive.update.update import append_update, optimizer_of
from onward.develop.mixed.loss_scale import scale_loss
from onward.distribute.split.cut import Split, place_of_update
from onward.distribute.split.guarding import GUARDS, Guarding
from onward.distribute.split.rows import Table
from onward.distribute.split.shards import Shard, is_by_number, rows_of


def tables_named(
    lazy: Iterable[Where], tables: Sequence[Table], program: Program, why: Callable[[Variable], str]
) -> tuple[Variable, ...]:
    """The tables that should be updated lazily.

    Args:
        lazy: which parameters.
        tables: those that travel by rows.
        program: the training Program.
        why: tells of any other parameter why it travels whole.

    Raises:
        UnknownNameError: one that travels whole.
    """
    wanted, by_row = tuple(listed(lazy)), [t.parameter for t in tables]
    for where in wanted:
        chosen = select(program.parameters, [where], "split, lazy")
        if set(by_row).isdisjoint(chosen):
            raise UnknownNameError(
                f"split, lazy: {chosen[0].name!r} travels whole: {why(chosen[0])}. An update is lazy "
                "where rows alone are sent. Leave lazy= out."
            )
    return select(by_row, wanted, "split, lazy") if wanted else ()


def check_lazy(tables: Sequence[Variable], routing: Routing, guarding: Guarding | None) -> None:
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
    routing.expect_gradients_only(
        "in its update, and servers have no data. Take one that needs the gradient alone, or "
        "replicate(program, devices)."
    )
    for rule in routing.all_rules():
        if rule.type is UpdateType.ACROSS and servers > 1 and not getattr(rule, "shares", False):
            how = (
                ", or give it sums and update_share (GradientRule)" if isinstance(rule, GradientRule) else ""
            )
            raise GraphError(
                f"{rule.title} looks at all parameters at once, and {servers} servers have a part "
                f"of them each. Take one server, or one that looks at each parameter by itself{how}."
            )


def check_between(program: Program, recipe: Recipe, trainers: int) -> None:
    """Refuse what stays with the trainers and would have to look at what is merged on servers."""
    steps = recipe.steps[_place_of_backward(recipe) + 1 : place_of_update(recipe)]
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


def optimizer_before_guards(program: Program, recipe: Recipe) -> OptimizerRule:
    """The optimizer that made the update, which only what guards it may follow."""
    if recipe.of(append_foreign_update):
        raise GraphError(
            f"Program {program.name!r} is updated by a function of its own, and servers have to know the "
            "optimizer's rule. Let optimizer.minimize(loss, ...) make the update; ow.from_optax(optimizer) "
            "takes one of optax."
        )
    places = [i for i, step in enumerate(recipe.steps) if step.function is append_update]
    steps = recipe.steps[max(places, default=-1) + 1 :]
    after = [called(step) for step in steps if step.function not in GUARDS]
    if len(places) != 1 or after:
        what = f"{', '.join(after)} after its update" if len(places) == 1 else f"{len(places)} updates"
        raise GraphError(
            f"Program {program.name!r} has {what}; split cuts a Program whose last transform is its update: "
            "optimizer.minimize(loss, ...). Leave out what comes after it."
        )
    return optimizer_of(recipe.steps[places[0]])
