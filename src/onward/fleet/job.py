"""The setup of a training on a cluster: graph, cut, first values, the specs of servers and trainers."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np

from onward.core.errors import GraphError
from onward.core.program import Program, Variable
from onward.core.words import Kind
from onward.derive.for_evaluation import evaluated_parameters
from onward.develop.watch.watch import watching_of
from onward.distribute.split.cut import Split
from onward.distribute.split.trainer import plain
from onward.execute.state import State
from onward.fleet.blueprint import Blueprint
from onward.fleet.desk import ServerSpec
from onward.fleet.modes import Local, in_rounds
from onward.fleet.servers import TrainerSpec
from onward.fleet.settings import Settings


class ClusterJob:
    """A training on a cluster before it runs.

    Args:
        program: what is trained.
        settings: how.
        state: the first values.

    Raises:
        GraphError: the Program cannot be cut so.
    """

    def __init__(self, program: Program, settings: Settings, state: State) -> None:
        self.program = program
        s = self.settings = settings
        blueprint = Blueprint.of(program, s.servers, s.merged, s.lazy, s.rows, s.outer)
        self.blueprint = blueprint.over(s.devices, s.takes_all)
        self.cut: Split = self.blueprint.split()
        self.cut.over(s.devices)  # raises what trainers would
        if not in_rounds(s.mode):
            _expect_no_exchange(self.cut)
            _expect_one_order(self.cut, s.trainers)
        self.fingerprint = self.cut.fingerprint
        looking = program if isinstance(s.mode, Local) else self.cut.trainer
        own = [watching.cells for watching, *_ in watching_of(looking)]
        self.watched = [*own, *(joined.cells for joined in self.cut.joined)]
        self.given = {v.name: np.asarray(plain(state[v])) for v in state.layout.variables}

    @cached_property
    def evaluated(self) -> Program:
        """The Program from state to the parameters to evaluate."""
        return evaluated_parameters(self.program)

    @property
    def averages(self) -> tuple[Variable, ...]:
        """The state that it reads beside the parameters."""
        return tuple(v for v in self.evaluated.state if v not in self.evaluated.parameters)

    @property
    def told(self) -> dict[str, Any]:
        """The properties that two trainings must share if one is to continue in the folder of the other."""
        s = self.settings
        return {
            "servers": s.servers,
            "trainers": s.trainers,
            "mode": repr(s.mode),
            "sums": s.sums,
            "graph": self.cut.continued,
        }

    @property
    def hyperparameters(self) -> dict[str, float]:
        """The numbers of the state that no step changes, by name."""
        program = self.cut.source
        fixed = {v for v in program.state if v.kind is Kind.STATE and v not in program.next_state}
        made = (op for op in program.initializers if not op.inputs and fixed.issuperset(op.outputs))
        values = {v.name: x for op in made for v, x in zip(op.outputs, op.body(), strict=True)}
        return {name: float(x) for name, x in values.items() if np.ndim(x) == 0}

    def servers(self, folder: str | None, driver: int) -> list[ServerSpec]:
        """The spec of each server, whose record is kept in the folder."""
        s = self.settings
        return [
            ServerSpec(
                blueprint=self.blueprint,
                index=i,
                trainers=s.trainers,
                mode=s.mode,
                sums=s.sums,
                given=self._owned(i),
                folder=None if folder is None else f"{folder}/server-{i}",
                durability=s.durability,
                faults=s.faults,
                driver=driver,
            )
            for i in range(s.servers)
        ]

    def trainers(self, reader: Any, driver: int) -> list[TrainerSpec]:
        """The spec of each trainer, but for the links to the servers."""
        s = self.settings
        kept = {v.name: self.given[v.name] for v in self.cut.trainer.state}
        return [
            TrainerSpec(
                blueprint=self.blueprint,
                trainer=t,
                incarnation=1,
                trainers=s.trainers,
                mode=s.mode,
                servers=(),
                reader=reader,
                epochs=s.epochs,
                given=self.given if isinstance(s.mode, Local) else kept,
                deadline=s.patience,
                check=s.check,
                batch=s.batch,
                faults=s.faults,
                driver=driver,
            )
            for t in range(s.trainers)
        ]

    def _owned(self, i: int) -> dict[str, np.ndarray]:
        """The first values of what a server owns."""
        found = {str(s): s.of(self.given[s.parameter.name]) for s in self.cut.shards[i]}
        return found | ({v.name: self.given[v.name] for v in self.cut.carried} if i == 0 else {})


def _expect_no_exchange(cut: Split) -> None:
    """Raise ``GraphError`` where servers would tell each other sums, and each updates whenever it can."""
    for a in cut.across:
        if a.exchanged:
            raise GraphError(
                f"cluster: {a.rule!r} looks across the gradients of all servers after another rule has "
                "changed them there, and without rounds no two servers are at the same update. Put it first "
                "in rules=, where each trainer knows the sums of its own gradient, or take mode='sync', or "
                "one server."
            )


def _expect_one_order(cut: Split, trainers: int) -> None:
    """Raise ``GraphError`` where servers would look at updates that each makes in an order of its own."""
    if cut.joined and trainers > 1 and len(cut.shards) > 1:
        raise GraphError(
            f"cluster: {cut.joined[0].cells[0].label!r} is watched on {len(cut.shards)} servers, and without "
            f"rounds each takes the gradients of {trainers} trainers in its own order: no update is the same "
            "on all. Take mode='sync', one server, or one trainer."
        )
