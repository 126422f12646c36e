"""A training Program that is cut: its parts, and what of them travels; see ``split``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import sha256
from typing import Any

from onward.core.jaxprs.tracing import along
from onward.core.program import Applied, Phase, Program, Recipe, Variable
from onward.core.recipe import build, with_steps
from onward.derive.update.groups import OptimizerRule, Routing
from onward.derive.update.update import append_update
from onward.develop.accumulation.accumulate import accumulated
from onward.develop.accumulation.micro_batches import Accumulation
from onward.develop.batch import data_types
from onward.develop.watch.watch import Watch, counter_of
from onward.distribute.split.across import Across, across_of
from onward.distribute.split.devices import TrainerDevices
from onward.distribute.split.guarding import Guarding, looking, scale_of, verdict_of
from onward.distribute.split.in_words import in_words
from onward.distribute.split.joined import Joined
from onward.distribute.split.looks import Looks, looked_at
from onward.distribute.split.rows import Table, by_rows, places_of, tables_in
from onward.distribute.split.server import Duties, ServerPart, server_part, shared_part
from onward.distribute.split.shards import Shards
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
        watches: what is watched, and whether after updates were left out.
        devices: those that each trainer takes its batch over; None: one.
    """

    source: Program
    forward: Program
    base: Program
    optimizer: OptimizerRule
    shards: Shards
    tables: tuple[Table, ...]
    lazy: frozenset[str]
    count: int
    recipe: Recipe | None
    local: Mapping[str, str] = field(default_factory=dict)
    accumulation: Accumulation | None = None
    guarding: Guarding | None = None
    watches: tuple[tuple[Watch, bool], ...] = ()
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
            base, told = looked_at(own, self.looks.trainer, counter_of(self.source))
        told = told if self.scale is None else (own[self.scale.name], *told)
        return trainer_part(base, self.shards, self.tables, finite, told, sent)

    @cached_property
    def own(self) -> Program:
        """Forward and backward pass on the devices of a trainer."""
        if self.devices is None or self.recipe is None:
            return self.base
        types = data_types(self.forward, (), 0)
        looks = self.guarding is not None
        return cut_passes(self.source, self.recipe, types, [], False, self.accumulation, looks, self.devices)[
            1
        ]

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
            self.looks,
        )
        return server_part(self.base, duties, self.routing, self.count)

    @cached_property
    def looks(self) -> Looks:
        """The watched values, divided between trainers and servers."""
        by_row = frozenset(t.parameter.name for t in self.tables)
        return Looks.of(self.base, self.watches, by_row, self.count)

    @cached_property
    def joined(self) -> tuple[Joined, ...]:
        """For each watch on servers, how what they see becomes what one device would see."""
        return self.looks.joined([part.program for part in self.server_parts])

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
        forward, base, tables = cut_passes(
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


def cut_passes(
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
    before = recipe.steps[: place_of_update(recipe)]
    layouts = [] if devices is None else [devices.step]
    if how is not None:
        layouts.append(Applied(accumulated, (how,), {}, Phase.MICRO_BATCHES, lays_out_batch=True))
    base = build(replace(recipe, steps=(*before, *layouts)), data) if layouts else with_steps(base, before)
    base = looking(base) if looks else base
    return forward, base, tuple(replace(t, parameter=source[t.parameter.name]) for t in tables)


def place_of_update(recipe: Recipe) -> int:
    """Which of the transforms made the update, as far as there is one."""
    places = [i for i, step in enumerate(recipe.steps) if step.function is append_update]
    return max(places, default=-1)
