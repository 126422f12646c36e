"""Trainer = {Model, Evaluator, GradientMachine, Optimizer}: trains, tests, saves.

trainer = Trainer(Model(network), Adam(1e-3))
trainer.train(reader, epochs=10, test=test_reader)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from math import nan
from os import PathLike
from typing import Any, NoReturn

import numpy as np

from onward.core.errors import ArgumentError, NonFiniteError, UnknownNameError, nearest, not_pickled
from onward.core.lower import lower
from onward.core.program import Program, Variable
from onward.core.structure import describe
from onward.core.walk import Where
from onward.derive.for_evaluation import evaluated_parameters
from onward.derive.optimizer import Optimizer
from onward.distribute.merge import Merge
from onward.execute.checkpoint.checkpoints import Checkpoints, store_of
from onward.execute.checkpoint.identity import Identity
from onward.execute.feeds import data_names
from onward.execute.fingerprints import FINGERPRINTS, of_program, of_training
from onward.execute.initialize import initialized
from onward.execute.loop.history import History
from onward.execute.loop.interrupt import Interruptible
from onward.execute.out import Out
from onward.execute.restore import Restored, begun_anew, compared, loaded, matched
from onward.execute.state import Layout, State
from onward.execute.step import Step
from onward.execute.tuning import StepPlan, Tuning
from onward.fit.concurrent import Applier, Crew
from onward.fit.evaluator import Evaluator
from onward.fit.model import Model
from onward.fit.standing import Standing
from onward.fit.telling import CALLBACKS, Telling
from onward.fit.training import Training
from onward.fit.training_program import training_program


class Trainer:
    """Trains a Model with an Optimizer.

    The parameters stay the Model's: each step publishes new ones. The slots, the hyperparameters and the step
    counter are the Trainer's.

    Args:
        model: what to train.
        optimizer: an Optimizer, or a training Program that ``minimize`` made of the model's network.
        parameter_list: the parameters to train; all unless given.
        share: other threads may use the model while it is trained. Without it a step reuses the buffers of
            the parameters, which saves their memory once.
        checkpoints: where, how often and how many to save; a folder saves at the end, at Ctrl-C and SIGTERM.
        devices: how many devices to train on, each on its part of every batch; None for all.
        merge: how their gradients become one; see ``replicate``.
        check_finite: raise ``NonFiniteError`` where a step is not finite, and name the op; see ``compile``.
            Such a step changes nothing, and the Trainer can go on.

    Attributes:
        history: loss and metrics of every step, and of every test.
        identity: who this training is; what it resumes gives it another.
        standing: where the training stands, beside its State.
        epoch, batch, step: of it: epochs and batches of this epoch done, steps in all.

    Example:
        >>> import numpy as np, onward as ow
        >>> def network():
        ...     return ow.layer.mse(ow.layer.fc(ow.data("x", (None, 3)), 1), ow.data("y", (None, 1)))
        >>> x = np.random.default_rng(0).normal(size=(256, 3)).astype("float32")
        >>> reader = ow.batches((x, x.sum(1, keepdims=True)), 32, shuffle=True)
        >>> trainer = ow.Trainer(ow.Model(network), ow.Adam(0.05))
        >>> history = trainer.train(reader, epochs=20)
        >>> history["loss"].shape, bool(history["loss"][-1] < 1e-3)
        ((160,), True)
    """

    def __init__(
        self,
        model: Model,
        optimizer: Optimizer | Program,
        *,
        parameter_list: Iterable[Where] | None = None,
        share: bool = True,
        checkpoints: Checkpoints | str | PathLike[str] | None = None,
        devices: int | None = 1,
        merge: Merge | None = None,
        check_finite: bool = False,
    ) -> None:
        if not isinstance(model, Model):
            raise ArgumentError(f"Trainer was given {describe(model)}; expected a Model: Model(network).")
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
        self._step = Step(self.program, (), donate=donated, ahead=False, tuning=Tuning(), apart=mine)
        self._state = State(self._step.layout, [values[v] for v in self._step.layout.variables])
        self._taken: State | None = model.state
        self._applier: Applier | None = None

    def update(self, *data: Any, **feed: Any) -> Out:
        """Train on one batch; ``out.loss`` is the loss before the update.

        Raises:
            ArgumentError: data of the wrong name, number, shape or dtype. Nothing is changed then.
        """
        with self.model.lock, Interruptible() as interrupts, interrupts.uninterrupted:
            return self.advance(data, feed)

    def advance(self, data: tuple[Any, ...], feed: Mapping[str, Any]) -> Out:
        """One step, to be called where nothing interrupts it, by one thread."""
        with self._kept():
            state, out = self._step(self.joined(), *data, **feed)
        self.take(state)
        self.standing.step += 1
        return out

    def apply(self, gradients: Mapping[str, Any]) -> None:
        """One update with gradients that were computed elsewhere, such as by other threads.

        They are applied to the parameters as they are now, whatever they were computed with; any thread may
        call it, and no update is lost. ``train(threads=...)`` does all of it.

        Args:
            gradients: by the name of their parameter, one for each that is trained: ``machine.gradients``.

        Raises:
            ArgumentError, UnknownNameError: one is missing, too many, or has another shape or dtype. Nothing
                is changed then.
            GraphError: the Trainer trains on several devices, or its update evaluates the loss again.

        Example:
            >>> import numpy as np, onward as ow
            >>> def network():
            ...     return ow.layer.mse(ow.layer.fc(ow.data("x", (None, 3)), 1), ow.data("y", (None, 1)))
            >>> trainer = ow.Trainer(ow.Model(network), ow.SGD(0.1))
            >>> machine = ow.GradientMachine(trainer.model)
            >>> out = machine.backward(x=np.ones((4, 3)), y=np.ones((4, 1)))
            >>> trainer.apply(machine.gradients)
            >>> bool(machine.backward(x=np.ones((4, 3)), y=np.ones((4, 1))).loss < out.loss)
            True
        """
        with self.model.lock, Interruptible() as interrupts, interrupts.uninterrupted:
            self.applied(gradients)

    def applied(self, gradients: Mapping[str, Any]) -> None:
        """One update, to be called where nothing interrupts it, by one thread."""
        if self._applier is None:
            self._applier = Applier(self)
        with self._kept():
            self._applier(gradients)

    def expect_going(self) -> None:
        """Raise ``NonFiniteError`` if a check, or ``guard(program, "stop")``, stopped the training."""
        with self._kept():
            self._step.expect_going(self.joined())

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

    def train(
        self,
        reader: Any,
        *,
        epochs: int = 1,
        test: Any = None,
        callbacks: Sequence[Callable[[Any], Any]] = (),
        progress: bool | None = None,
        prefetch: int = 2,
        threads: int = 1,
        check: bool = True,
    ) -> History:
        """Train for some epochs.

        Ctrl-C finishes the step, saves a checkpoint if any are configured, and is raised again; the
        model is whole, and ``train`` can be called again. SIGTERM, with which machines are taken away, does
        the same where checkpoints are configured, and ends the process with status 143; what takes longer
        than their ``grace`` is given up. Of several processes that train together one that gets either is
        enough: all end so, after the same step.

        Args:
            reader: any iterable of batches, or a callable that returns one for each epoch. A batch is a
                tuple of arrays in the order of the declarations, or a dict by name. The last one may be
                shorter.
            epochs: how many more; after ``restore``, how many in all, counted from where the interrupted
                training began.
            test: a reader to test on after each epoch; its means go to the history as ``test_loss``...
            callbacks: functions of an Event. One ends the training by raising ``StopTraining``. What one with
                ``state_dict`` and ``load_state_dict`` remembers is part of the checkpoints; it is known again
                by its class, and which one of that class it is.
            progress: show a bar; None: in a terminal or a notebook.
            prefetch: how many batches a thread reads ahead. Each is copied, so that a reader may fill the
                same NumPy array again and again.
            threads: how many threads train at once, each on batches of its own, with the gradients of the
                parameters as it finds them. These are a few steps old, which momentum amplifies: take a
                smaller learning rate.
            check: refuse data that is NaN or infinite, naming the batch; arrays on an accelerator are not
                looked at.

        Returns:
            ``trainer.history``.

        Raises:
            ArgumentError: an empty reader, a batch of the wrong structure, shape or dtype, or bad numbers in
                it. The state before that batch is kept.
            NonFiniteError: the loss was no finite number; the message names the batch.
            CheckpointError: the folder holds another run, or another process writes to it: ``Checkpoints``.
        """
        training = Training(self, reader, epochs, test, callbacks, progress, prefetch, check)
        training.run(training.loop if threads == 1 else Crew(self, threads, training).loop)
        return self.history

    def test(self, reader: Any) -> dict[str, float]:
        """The means of loss and metrics over a reader, with the parameters as they are now."""
        return self.evaluator.test(reader)

    def averaged(self) -> Model:
        """A Model of its own with the parameters to evaluate: averages, where an optimizer or rule has some.

        Without ``EMA``, ``SWA``, ``PolyakAverage`` or a schedule-free optimizer it is a copy of the model.

        Raises:
            GraphError: every device keeps a part of the averages, or its own.

        Example:
            >>> import numpy as np, onward as ow
            >>> def network():
            ...     return ow.layer.mse(ow.layer.fc(ow.data("x", (None, 3)), 1), ow.data("y", (None, 1)))
            >>> trainer = ow.Trainer(ow.Model(network), ow.Adam(0.05, rules=[ow.EMA(0.9)]))
            >>> x = np.ones((8, 3), "float32")
            >>> history = trainer.train([(x, x[:, :1])], epochs=5, progress=False)
            >>> model = trainer.averaged()
            >>> bool((model["fc_0/b"] == trainer["fc_0/b/average"]).all())
            True
        """
        program = evaluated_parameters(self.program)
        with self.model.lock:
            state, model = self.joined(), self.model.copy()
            values = lower(program, program.outputs)([state[v] for v in program.state], ())
        model.replace({p.name: x for p, x in zip(self.program.parameters, values, strict=True)})
        return model

    def __getitem__(self, name: str | Variable) -> Any:
        """The value of any state Variable: parameters, slots, hyperparameters."""
        name = getattr(name, "name", name)
        if name in self.model.state.layout.position:
            return self.model[name]
        if name not in self._state.layout.position:
            known = nearest(str(name), self._state.layout.position)
            raise UnknownNameError(f"The trainer keeps nothing named {name!r}. {known}")
        return self._state[name]

    def plan(self) -> StepPlan:
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
        self.model.publish(state.part(self.model.state.layout))
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
        """Hand everything to a store, which may write while training goes on."""
        target.claim(self.identity)
        with self.model.lock:
            state = self.joined()
            extra = {**self.standing.record(), CALLBACKS: self.telling.record()}
            words = dict(self.standing.words)
            extra[FINGERPRINTS] = {**self._fingerprints, "reader": words, "given": self._given}
            return target.save(state, self.step, metrics=metrics or {}, extra=extra)

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
        there. What was kept, what not, is returned, and warned about where the two differ.

        Args:
            source: the folder of checkpoints, or one of them; the Trainer's own folder unless given.
            which: ``"latest"``, ``"best"``, or the path of one.
            fallback: where one is damaged, take the one before.
            strict: what to do where the checkpoint is of another training: other Variables, another network,
                optimizer or schedule here; another reader or other callbacks once ``train`` is called. None:
                a warning; True: an error; False: nothing. A new number for a hyperparameter, such as the
                learning rate, is no error: it is as saved, and ``replace`` sets it.

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
            self.take(State(state.layout, values))
            words = found.extra.get(FINGERPRINTS, {}).get("reader", {})
            self.standing = Standing.restored(found.extra, found.step, words, strict)
            self.telling.expect(found.extra.get(CALLBACKS))
        if self.checkpoints is not None and self.checkpoints.is_at(found.path.parent):
            self.checkpoints.follow(found)
            self.identity = found.identity
        if strict is None:
            report.warn(found.path)
        return report

    @cached_property
    def _fingerprints(self) -> Mapping[str, Any]:
        return {"program": of_program(self.model.topology), **of_training(self.program)}

    def __reduce__(self) -> NoReturn:
        raise not_pickled(
            "A Trainer",
            "trainer.checkpoint(folder) saves all of it, restore(folder) of a new Trainer reads it; "
            "trainer.model.copy() is a copy of the model.",
        )

    def __repr__(self) -> str:
        return f"Trainer({self.model!r}, step {self.step})"
