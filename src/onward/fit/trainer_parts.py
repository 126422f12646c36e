"""The parts of a training and a step of it: what a Trainer trains with, and a checkpoint holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property, partial
from math import nan
from os import PathLike
from typing import Any

import jax
import numpy as np

from onward.core.errors import (
    ArgumentError,
    ByName,
    NonFiniteError,
    NotPickled,
    UnknownNameError,
    nearest,
)
from onward.core.pointing import Pointing
from onward.core.program import Program, Variable
from onward.core.walk import Where
from onward.derive.optimizer import Optimizer
from onward.distribute.merge import Merge
from onward.distribute.pipeline.cut import Pipeline
from onward.execute.checkpoint.checkpoints import Checkpoints, store_of
from onward.execute.checkpoint.identity import Identity
from onward.execute.feeds import data_names
from onward.execute.fingerprints import FINGERPRINTS, of_program, of_training
from onward.execute.initialize import initialized
from onward.execute.layout import Layout
from onward.execute.loop.history import History
from onward.execute.out import Out
from onward.execute.pipelined import PipelineStep
from onward.execute.processes import lies_over_processes, place_among_processes
from onward.execute.restore import Restored, begun_anew, compared, loaded, matched
from onward.execute.saved_values import apart
from onward.execute.state import State
from onward.execute.step import Step
from onward.execute.tuning import StepPlan, Tuning
from onward.fit.evaluator import Evaluator
from onward.fit.examples import Examples
from onward.fit.model import Model, expect_model
from onward.fit.standing import Standing
from onward.fit.telling import CALLBACKS, Telling
from onward.fit.training_program import training_program

_EACH_ITS_OWN = (
    "This is one of {count} processes of one computation, and {program} computes on one device: each process "
    "would train a model of its own, on its part of the data, and checkpoints have that of process 0 alone. "
    "To train one model on all devices, write Trainer(..., devices=None), or train(..., devices=None), or "
    "give a training Program that replicate, partition or pipeline laid out. To train another model in each, "
    "start them apart, without onward launch or jax.distributed."
)


class TrainerParts(ByName, NotPickled, Pointing):
    """The Model, the training Program, their State, where the training stands; see ``Trainer``."""

    unpickled = (
        "A Trainer",
        "trainer.checkpoint(folder) saves all of it, restore(folder) of a new Trainer reads it; "
        "trainer.model.copy() is a copy of the model.",
    )

    def __init__(
        self,
        model: Model,
        optimizer: Optimizer | Program | Pipeline,
        *,
        parameter_list: Iterable[Where] | None = None,
        share: bool = True,
        checkpoints: Checkpoints | str | PathLike[str] | None = None,
        devices: int | None = 1,
        merge: Merge | None = None,
        check_finite: bool = False,
    ) -> None:
        expect_model(model, "Trainer")
        self.model = model
        self.program = training_program(model, optimizer, parameter_list, devices, merge, check_finite)
        self.evaluator = Evaluator(model)
        self.checkpoints = store_of(checkpoints)
        self.identity = Identity.new()
        self.history = History()
        self.names = data_names(self.program)
        self.standing = Standing()
        self.telling = Telling()
        layout = Layout.of(self.program)
        mine = model.state.layout.position
        given = {v: model.state[v] for v in layout.variables if v.name in mine}
        values = initialized(self.program, given, 0)
        self._given = {v.name: float(values[v]) for v in layout.hyperparameters}
        donated = [v.name for v in layout.changed if not share or v.name not in mine]
        self._step: Step | PipelineStep
        if isinstance(optimizer, Pipeline):
            self._step = PipelineStep(optimizer, donated)
        else:
            self._step = Step(self.program, (), donate=donated, ahead=False, tuning=Tuning(), apart=mine)
        self._state = State(self._step.layout, [values[v] for v in self._step.layout.variables])
        self._taken: State | None = model.state
        self._is_one = False  # whether it is known to be one training, of however many processes

    @cached_property
    def examples(self) -> Examples:
        """The data that has a row for each example."""
        return Examples(self.program)

    def advance(self, data: tuple[Any, ...], feed: Mapping[str, Any]) -> Out:
        """One step, to be called where nothing interrupts it, by one thread."""
        with self._kept():
            state, out = self._step(self.joined(), *data, **feed)
        self.take(state)
        self.standing.step += 1
        return out

    def expect_going(self) -> None:
        """Raise ``NonFiniteError`` if a check, or ``guard(program, "stop")``, stopped the training."""
        if isinstance(self._step, Step):  # nothing stops a pipeline
            with self._kept():
                self._step.expect_going(self.joined())

    @property
    def is_spread(self) -> bool:
        """Whether a step computes on several devices."""
        replicas = self.program.replicas
        is_meshed = isinstance(self._step, PipelineStep) or self.program.partition is not None
        return is_meshed or (replicas is not None and replicas.count > 1)

    def expect_one_training(self, fed: Any) -> None:
        """Raise ``ArgumentError`` if each of several processes would train a model of its own on this data.

        Where the arrays of a step lie over all of them, even if only one of the data, it is one step of all.
        """
        if self._is_one or (count := place_among_processes()[1]) == 1:
            return
        arrays = (*self._state.values, *self.model.state.values, *jax.tree.leaves(fed))
        if not self.is_spread and not any(map(lies_over_processes, arrays)):
            raise ArgumentError(_EACH_ITS_OWN.format(program=self.program.name, count=count))
        self._is_one = True

    def expect_one_place(self, what: str) -> None:
        """Raise ``ArgumentError`` if what is trained lies in the stages of a pipeline."""
        if isinstance(self._step, PipelineStep):
            raise ArgumentError(
                f"{what} updates all parameters in one place, and {self.program.name} is a pipeline, whose "
                "stages have theirs apart. Train with trainer.update(*batch), or trainer.train(reader)."
            )

    @contextmanager
    def _kept(self) -> Iterator[None]:
        """Go on from the state that an error kept; steps that changed nothing do not count."""
        try:
            yield
        except NonFiniteError as error:
            if error.state is not None:
                self.take(error.state)
                self.standing.step -= error.undone
            raise

    def test(self, reader: Any) -> dict[str, float]:
        """The loss and metrics of all examples of a reader, with the parameters as they are now."""
        return self.evaluator.test(reader)

    def __getitem__(self, name: str | Variable) -> Any:
        """The value of any state Variable: parameters, slots, hyperparameters."""
        name = getattr(name, "name", name)
        if name in self.model.state.layout.position:
            return self.model[name]
        if name not in self._state.layout.position:
            known = nearest(str(name), self._state.layout.position)
            raise UnknownNameError(f"The trainer keeps nothing named {name!r}. {known}")
        return self._state[name]

    def plan(self) -> StepPlan | Pipeline:
        """The changes made to the training Program before it was compiled; see ``Step.plan``."""
        return self._step.plan()

    def replace(self, values: Mapping[str, Any]) -> None:
        """Set state Variables: ``trainer.replace({"learning_rate": 1e-4})``. Nothing is compiled again.

        Raises:
            UnknownNameError, ArgumentError, HyperparameterError: see ``State.replace``.
        """
        with self.model.lock:
            self.take(self.joined().replace(values))

    def take(self, state: State) -> None:
        """Go on from this State of the training Program."""
        self._state = state
        own = partial(apart, state) if state.layout.copies else tuple
        self.model.publish(state.part(self.model.state.layout), own)
        self._taken = self.model.state

    @property
    def epoch(self) -> int:
        """How many epochs are done."""
        return self.standing.epoch

    @property
    def batch(self) -> int:
        """How many batches of this epoch are done."""
        return self.standing.batch

    @property
    def step(self) -> int:
        """How many steps were made in all."""
        return self.standing.step

    @property
    def state(self) -> State:
        """Everything the next step needs, in buffers of its own."""
        with self.model.lock:
            return self.joined().copy()

    def joined(self) -> State:
        """The Model's values and the Trainer's own as the State of the training Program; no copy.

        Where each device has parameters of its own, they follow values that others gave the model.
        """
        model, before = self.model.state, self._taken
        if model is before:
            return self._state
        own = self._state
        state = State(own.layout, [(model if n in model.layout.position else own)[n] for n in own])
        if not own.layout.copies:
            return state
        self._taken = model
        names = self._step.layout.copies
        if before is None:
            return state
        given = [n for n in names if not np.array_equal(state[n], before[n], equal_nan=True)]
        return state.replace({n: state[n] for n in given})

    def checkpoint(self, folder: str | PathLike[str] | None = None) -> Any:
        """Save everything now; returns the path once it is on disk.

        Args:
            folder: the folder of checkpoints; the one that the Trainer was made with unless given.
        """
        target = self.checkpoints if folder is None else Checkpoints.adding(folder, self.checkpoints)
        if target is None:
            raise ArgumentError(
                "There is no folder to save to: trainer.checkpoint('runs/one'), or Trainer(..., "
                "checkpoints='runs/one')."
            )
        with target:
            return self.save(target, {} if target.best is None else {target.best: nan})

    def save(self, target: Checkpoints, metrics: Mapping[str, float] | None = None) -> Any:
        """Hand everything to a store, which may write while training goes on.

        Raises:
            ArgumentError: ``target`` is not a store, but a path for example.
        """
        if not isinstance(target, Checkpoints):
            raise ArgumentError(
                f"trainer.save takes the Checkpoints to save to, not {target!r}. Write "
                "trainer.checkpoint(folder) to resume later, or ow.save(trainer.model, path) for a file that "
                "answers without your code."
            )
        target.claim(self.identity)
        with self.model.lock:
            state = self.joined()
            extra = {**self.standing.record(), CALLBACKS: self.telling.record()}
            words = dict(self.standing.words)
            extra[FINGERPRINTS] = {**self._fingerprints, "reader": words, "given": self._given}
            return target.save(state, self.step, metrics=metrics or {}, extra=extra, history=self.history)

    def restore(
        self,
        source: Checkpoints | str | PathLike[str] | None = None,
        *,
        which: Any = "latest",
        fallback: bool = False,
        strict: bool | None = None,
    ) -> Restored:
        """Continue from a checkpoint: parameters, slots, hyperparameters, random keys, place in the data.

        What the checkpoint lacks, or holds with another shape, keeps the value it has; a parameter must be
        there. What was kept, what not, is returned, and warned about where the two differ. The history
        is that of the checkpoint then, in place of what this Trainer recorded; an older checkpoint has none.

        Args:
            source: the folder of checkpoints, or one of them; the Trainer's own folder unless given.
            which: ``"latest"``, ``"best"``, or the path of one.
            fallback: where one is damaged, take the one before.
            strict: what to do where the checkpoint is of another training: other Variables, another network,
                optimizer or schedule here; another reader or other callbacks once ``train`` is called. None:
                a warning; True: an error; False: nothing. A new number for a hyperparameter, such as the
                learning rate, is not an error: it is as saved, and ``replace`` sets it.

        Raises:
            CheckpointError: nothing whole is there, or a parameter does not fit; nothing is changed then.
        """
        if source is None and self.checkpoints is None:
            raise ArgumentError("There is no folder to restore from: trainer.restore('runs/one').")
        found = loaded(self.checkpoints if source is None else source, which, fallback)
        with self.model.lock:
            state = self.joined()
            values, report = matched(state, self.model.state.layout.variables, found)
            report = compared(report, found.extra.get(FINGERPRINTS, {}), self._fingerprints, self._given)
            if strict:
                report.expect_all(found.path)
            values = begun_anew(self.program, state.layout, values, report.kept)
            history = found.history
            history.watched = self.history.watched
            self.take(State(state.layout, values))
            words = found.extra.get(FINGERPRINTS, {}).get("reader", {})
            self.standing = Standing.restored(found.extra, found.step, words, strict)
            self.telling.expect(found.extra.get(CALLBACKS))
            self.history = history
        if self.checkpoints is not None and self.checkpoints.is_at(found.path.parent):
            self.checkpoints.follow(found)
            self.identity = found.identity
        if strict is None:
            report.warn(found.path)
        return report

    @cached_property
    def _fingerprints(self) -> Mapping[str, Any]:
        return {"program": of_program(self.model.topology), **of_training(self.program)}

    def __repr__(self) -> str:
        return f"Trainer({self.model!r}, step {self.step})"
