"""Trainer = {Model, Evaluator, GradientMachine, Optimizer}: trains, tests, saves.

trainer = Trainer(Model(network), Adam(1e-3))
trainer.train(reader, epochs=10, test=test_reader)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from onward.core.errors import answering
from onward.execute.averaged import averages
from onward.execute.loop.history import History
from onward.execute.loop.interrupt import Interruptible
from onward.execute.out import Out
from onward.fit.concurrent import Applier, Crew
from onward.fit.model import Model
from onward.fit.trainer_parts import TrainerParts
from onward.fit.training import Training


class Trainer(TrainerParts):
    """Trains a Model with an Optimizer.

    The parameters stay the Model's: each step publishes new ones. The slots, the hyperparameters and the step
    counter are the Trainer's.

    Args:
        model: what to train.
        optimizer: an Optimizer, a training Program that ``minimize`` made of the model's network, or the
            Pipeline that one was cut into, which takes batches of the length that it was traced for.
        parameter_list: the parameters to train; all unless given. A Program or Pipeline has chosen already.
        share: other threads may use the model while it is trained. Without it a step reuses the buffers of
            the parameters, which saves their memory once.
        checkpoints: where, how often and how many to save; a folder saves at the end, at Ctrl-C and SIGTERM.
        devices: how many devices to train on, each on its part of every batch; None for all, those of other
            processes too. Several processes train one model: on devices of all of them, or not at all.
        merge: how their gradients become one; see ``replicate``.
        check_finite: raise ``NonFiniteError`` where a step is not finite, and name the op; see ``compile``.
            Such a step changes nothing, and the Trainer can go on.

    Attributes:
        history: loss and metrics of every step, and of every test. Checkpoints keep it, and ``restore``
            brings it back, in place of what this Trainer recorded; not what ``watch`` looked at.
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

    def update(self, *data: Any, **feed: Any) -> Out:
        """Train on one batch; ``out.loss`` is the loss before the update.

        Raises:
            ArgumentError: data of the wrong name, number, shape or dtype, or without an example, whatever the
                loss is; or one of several processes that would train a model of its own. Nothing is changed
                then.
        """
        self.expect_one_training((data, feed))
        self.examples.expect_some({**dict(zip(self.names, data, strict=False)), **feed})
        with self.model.lock, Interruptible() as interrupts, interrupts.uninterrupted:
            return self.advance(data, feed)

    def apply(self, gradients: Mapping[str, Any]) -> None:
        """One update with gradients that were computed elsewhere, such as by other threads.

        They are applied to the parameters as they are now, whatever they were computed with; any thread may
        call it, and no update is lost. ``train(threads=...)`` does all of it.

        Args:
            gradients: by the name of their parameter, one for each that is trained: ``machine.gradients``.

        Raises:
            ArgumentError, UnknownNameError: one is missing, too many, or has another shape or dtype, or the
                Trainer trains a Pipeline. Nothing is changed then.
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

    @cached_property
    def _applier(self) -> Applier:
        return Applier(self)

    def applied(self, gradients: Mapping[str, Any]) -> None:
        """One update, to be called where nothing interrupts it, by one thread."""
        with self._kept():
            self._applier(gradients)

    @answering
    def train(
        self,
        reader: Any,
        *,
        epochs: int = 1,
        test: Any = None,
        callbacks: Callable[[Any], Any] | Sequence[Callable[[Any], Any]] = (),
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
            check: refuse data that is NaN or infinite, and batches without an example, naming the batch;
                arrays on an accelerator are not looked at for NaN. In a test it is a warning.

        Returns:
            ``trainer.history``.

        Raises:
            ArgumentError: an empty reader, an empty batch, one of the wrong structure, shape or dtype, or bad
                numbers in it. The state before that batch is kept. Or one of several processes that would
                train a model of its own.
            NonFiniteError: the loss was not a finite number; the message names the batch.
            CheckpointError: the folder holds another run, or another process writes to it: ``Checkpoints``.
        """
        training = Training(self, reader, epochs, test, callbacks, progress, prefetch, check)
        training.run(training.loop if threads == 1 else Crew(self, self.applied, threads, training).loop)
        return self.history

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
        with self.model.lock:
            state, model = self.joined(), self.model.copy()
            values = averages(self.program, state)
        model.replace({p.name: x for p, x in zip(self.program.parameters, values, strict=True)})
        return model
