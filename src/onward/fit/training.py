"""One run of a training loop: epochs, tests, events, progress, checkpoints, and what ends it."""

from __future__ import annotations

import sys
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from math import nan
from threading import current_thread, main_thread
from typing import Any, NamedTuple

import jax
import numpy as np

from onward.core.errors import ArgumentError, NonFiniteError, OnwardError
from onward.core.source import user_level
from onward.core.structure import describe
from onward.develop.guard import is_guarded
from onward.execute.feeds import data_names, unshared
from onward.execute.fingerprints import of_reader
from onward.execute.loop.events import Event, EventKind, StopTraining
from onward.execute.loop.generators import expect_told
from onward.execute.loop.interrupt import Interruptible, Terminated
from onward.execute.loop.prefetch import prefetched
from onward.execute.loop.reader import LoopReader
from onward.execute.out import Out
from onward.execute.peers.deadline import deadline_of
from onward.execute.processes import place_among_processes
from onward.fit.evaluator import as_feed, batch_size
from onward.fit.finite import check_numbers, not_finite
from onward.fit.progress import Progress
from onward.fit.reported import expect_names, metrics_of
from onward.fit.telling import Telling
from onward.fit.trainer_parts import TrainerParts

_LOOK_BACK = 64


class NumberedBatch(NamedTuple):
    """A batch by name, its number in the epoch, and the reader's position after it."""

    fed: Mapping[str, Any]
    number: int
    position: Any


Loop = Callable[[Iterator[NumberedBatch]], None]


class Training:
    """One run of a Trainer's ``train``: everything around its steps."""

    def __init__(
        self,
        trainer: TrainerParts,
        reader: Any,
        epochs: int,
        test: Any,
        callbacks: Callable[[Event], Any] | Sequence[Callable[[Event], Any]],
        progress: bool | None,
        prefetch: int,
        check: bool,
    ) -> None:
        self.trainer, self.reading, self.test = trainer, LoopReader(reader), test
        self.telling, self.prefetch, self.check = Telling(callbacks, trainer.telling), prefetch, check
        self.guarded, self.check_tests = is_guarded(trainer.program), check
        is_alone = place_among_processes()[1] == 1  # or another one may have all of the test
        if test is not None and is_alone and LoopReader(test, test=True).length == 0:
            raise ArgumentError("The test reader has no batch. Leave test= out, or give one that has some.")
        expect_names(trainer.program, test is not None)
        if not isinstance(epochs, int) or isinstance(epochs, bool) or epochs < 0:
            raise ArgumentError(f"epochs is {describe(epochs)}; expected a whole number, at least 0.")
        self.saved = trainer.step if trainer.standing.resumed else -1
        self._again = trainer.standing.resumed
        if self._again:
            self.telling.restore(trainer.telling, trainer, trainer.standing.strict)
        if self._again or trainer.checkpoints is not None:
            expect_told(reader)
        self.last = trainer.standing.begin(epochs, of_reader(reader))
        trainer.telling = self.telling
        length = self.reading.length
        total = None if length is None else max(0, (self.last - trainer.epoch) * length - trainer.batch)
        self.progress = Progress(total, progress, "train")
        self.interrupts = Interruptible(None if trainer.checkpoints is None else trainer.checkpoints.grace)
        self.tested: dict[str, float] = {}
        self.tested_at = -1
        self._ahead: dict[int, Any] = {}
        self._recent: deque[tuple[int, int, int, Any]] = deque()

    @property
    def uninterrupted(self) -> AbstractContextManager[None]:
        """The part of the loop that Ctrl-C may not interrupt; it reaches the main thread only."""
        return self.interrupts.uninterrupted if current_thread() is main_thread() else nullcontext()

    def run(self, loop: Loop) -> None:
        """Train epoch by epoch; ``loop`` takes the batches of one."""
        trainer = self.trainer
        with self.interrupts, self.together(), trainer.checkpoints or nullcontext(), closing(self.progress):
            if trainer.checkpoints is not None:
                trainer.checkpoints.claim(trainer.identity)
            try:
                self.to_the_end(loop)
            except (KeyboardInterrupt, SystemExit) as interrupt:
                with self.uninterrupted:
                    self.rescue(interrupt)
                    raise

    @contextmanager
    def together(self) -> Iterator[None]:
        """Where several processes make the steps, no signal ends one before all know the last step."""
        part = self.interrupts.uninterrupted
        several = self.trainer.is_spread and place_among_processes()[1] > 1
        before = part.is_shared
        part.is_shared = before or (several and current_thread() is main_thread())
        try:
            yield
        finally:
            part.is_shared = before

    def before(self) -> None:
        """Between two steps: end here if all processes do, of which one got Ctrl-C or SIGTERM."""
        if (part := self.interrupts.uninterrupted).waits and current_thread() is main_thread():
            part.agree(deadline_of(None))

    def tested_batches(self) -> Iterator[Any]:
        """The batches of a test; processes that were asked to end do so between two of them, too."""
        names = data_names(self.trainer.model.test_program)
        for number, (batch, _) in enumerate(LoopReader(self.test, test=True).epoch(0)):
            self.before()
            if self.check_tests and (found := not_finite(as_feed(batch, names))):
                message = f"Batch {number} of the test reader (counted from 0): {found}. {_TESTED}"
                warnings.warn(message, stacklevel=user_level())
                self.check_tests = False
            yield batch

    def to_the_end(self, loop: Loop) -> None:
        """All epochs, and what comes after the last one."""
        trainer = self.trainer
        try:
            self.event(EventKind.BEGIN)
            if trainer.standing.to_test:
                self.tests()
            while trainer.epoch < self.last:
                self.epoch(loop)
        except StopTraining as reason:
            trainer.standing.to_test = False
            self.progress.message(f"Stopped: {reason}")
        with suppress(StopTraining):
            self.save()
        with suppress(StopTraining):
            self.event(EventKind.END)
        self.wait()

    def epoch(self, loop: Loop) -> None:
        """One epoch, or the rest of one, and the test after it."""
        trainer = self.trainer
        self.progress.epoch(trainer.epoch, self.last)
        batches = self.batches()
        try:
            loop(batches)
        finally:
            with suppress(ValueError):  # it is being read, by a thread that hangs in the reader
                batches.close()
        self.look_for_nan(0)
        with self.uninterrupted:
            standing = trainer.standing
            standing.epoch, standing.batch, standing.position = trainer.epoch + 1, 0, self.reading.end
            trainer.standing.to_test = self.test is not None
            self.note(EventKind.EPOCH)
        self.telling.tell()
        self.tests()

    def tests(self) -> None:
        """The test after an epoch."""
        trainer = self.trainer
        if self.test is None:
            return
        found = trainer.evaluator.over(self.tested_batches())
        tested = {f"test_{name}": x for name, x in found.items()}
        with self.uninterrupted:
            self.tested, self.tested_at, trainer.standing.to_test = tested, trainer.step, False
            if len(trainer.history):
                trainer.history.amend(**tested)
            else:  # resumed at the end of an epoch: its last step was made by the process before
                trainer.history.record(step=trainer.step, epoch=trainer.epoch - 1, **tested)
            self.note(EventKind.TEST, tested)
        shown = ", ".join(f"{name} {value:.4g}" for name, value in tested.items())
        self.progress.message(f"epoch {trainer.epoch}: {shown}")
        if trainer.checkpoints is not None and trainer.checkpoints.best in tested:
            self.save(again=True)
        else:
            self.saved = -1  # without what was tested, so that the last save does not pass this step over
        self.telling.tell()

    def batches(self) -> Generator[NumberedBatch, None, None]:
        """The batches of this epoch by name, checked, read ahead by a thread."""
        trainer = self.trainer
        skip = 0
        if trainer.batch and trainer.standing.position is not None:
            self.reading.restore(trainer.standing.position)
        elif trainer.batch:
            skip = trainer.batch
        elif self._again:
            self.reading.restore(trainer.standing.position, ended=True)
        self._again = False
        pairs = self.reading.epoch(trainer.epoch, skip)
        numbered = (
            NumberedBatch(batch, n, position) for n, (batch, position) in enumerate(pairs, trainer.batch)
        )
        return prefetched(numbered, self.prefetch, self.prepared, self.before)

    def prepared(self, batch: NumberedBatch) -> NumberedBatch:
        """A batch as the step takes it, its arrays copied; raises ``ArgumentError`` naming the batch."""
        self.trainer.expect_one_training(batch.fed)
        try:
            given = as_feed(batch.fed, self.trainer.names)
            fed = {name: unshared(value) for name, value in given.items()}
            if self.check:
                self.trainer.examples.expect_some(fed)
                check_numbers(fed)
        except ArgumentError as error:
            raise self.blaming(batch, error) from None
        stays = jax.default_backend() == "cpu" or self.trainer.program.replicas is not None
        return batch._replace(fed=fed if stays else self.placed(fed))

    def placed(self, fed: Mapping[str, Any]) -> Mapping[str, Any]:
        """The data on the device, but for what the step still checks or converts on the host."""
        bounded = {v.name for v in self.trainer.program.bounds}
        return {n: x if n in bounded or not _is_settled(x) else jax.device_put(x) for n, x in fed.items()}

    def blaming(self, batch: NumberedBatch, error: ArgumentError) -> ArgumentError:
        """The same error, naming the batch."""
        return ArgumentError(
            f"Batch {batch.number} of epoch {self.trainer.epoch} (both counted from 0): {error}"
        )

    def loop(self, batches: Iterable[NumberedBatch]) -> None:
        """How one thread trains on the batches of an epoch."""
        trainer = self.trainer
        for batch in batches:
            self.before()
            with self.uninterrupted:
                try:
                    with trainer.model.lock:
                        out = trainer.advance((), batch.fed)
                except ArgumentError as error:
                    raise self.blaming(batch, error) from error
                self.done(out, batch)
            self.after()

    def done(self, out: Out, batch: NumberedBatch) -> None:
        """Note that a step was made.

        Threads finish batches out of order. Where the training stands is before the first unfinished one.
        """
        trainer = self.trainer
        self._ahead[batch.number] = batch.position
        while trainer.batch in self._ahead:
            trainer.standing.position = self._ahead.pop(trainer.batch)
            trainer.standing.batch += 1
        trainer.standing.metrics = metrics_of(out)
        trainer.history.record(step=trainer.step, epoch=trainer.epoch, **trainer.standing.metrics)
        trainer.history.watched.record(out.watched, step=trainer.step, epoch=trainer.epoch)
        if "loss" in trainer.standing.metrics:
            self._recent.append((trainer.step, trainer.epoch, batch.number, trainer.standing.metrics["loss"]))
        self.progress.advance(batch_size(batch.fed), **trainer.standing.metrics)
        self.note(EventKind.STEP)

    def after(self) -> None:
        """Between two steps: look at old losses, save, tell the callbacks."""
        trainer = self.trainer
        if len(self._recent) >= 2 * _LOOK_BACK:
            self.look_for_nan(_LOOK_BACK)
        if trainer.checkpoints is not None and trainer.checkpoints.due(trainer.step):
            self.save()
        self.telling.tell()

    def look_for_nan(self, leave: int) -> None:
        """Raise ``NonFiniteError`` if a loss was not finite; the newest ones may still be computing."""
        if self.guarded and not leave:
            self.trainer.expect_going()
        while len(self._recent) > leave:
            step, epoch, batch, loss = self._recent.popleft()
            if self.check and not self.guarded and not np.isfinite(loss):
                raise NonFiniteError(
                    f"The loss was {float(loss)} at step {step}: batch {batch} of epoch {epoch} (counted "
                    "from 0). The parameters are not to be trusted since then. Restore a checkpoint "
                    "(trainer.restore()), and look at the learning rate and at that batch."
                )

    def save(self, again: bool = False) -> None:
        """Save a checkpoint, if any are configured and this step was not saved, or is to be ``again``.

        Raises:
            NonFiniteError: the loss was not a finite number, so the parameters are not worth it.
        """
        trainer = self.trainer
        if trainer.checkpoints is None or (self.saved == trainer.step and not again):
            return
        self.look_for_nan(0)
        with self.uninterrupted:
            path = trainer.save(trainer.checkpoints, self._numbers(trainer.checkpoints.best))
            self.saved = trainer.step
        self.event(EventKind.CHECKPOINT, {"path": path})

    def rescue(self, interrupt: BaseException) -> None:
        """Save before Ctrl-C, SIGTERM or ``sys.exit`` ends the training; if that fails, say why.

        The interrupt carries the Trainer as its attribute ``trainer``.
        """
        if self.interrupts.uninterrupted.termination is not None:
            self.interrupts.uninterrupted.termination.answer()
        interrupt.trainer = self.trainer  # type: ignore[attr-defined]
        if self.trainer.checkpoints is None:
            interrupt.add_note(_KEPT.format(step=self.trainer.step))
        try:
            with suppress(StopTraining):
                self.save()
            self.wait()
        except OnwardError as error:
            said = f"No checkpoint was saved: {error}"
            interrupt.add_note(said)
        else:
            said = f"step {self.trainer.step} is saved in {getattr(self.trainer.checkpoints, 'folder', None)}"
        if isinstance(interrupt, Terminated):  # nobody prints the notes of a SystemExit
            print(f"onward: SIGTERM: {said}", file=sys.stderr, flush=True)

    def wait(self) -> None:
        """Let what is being written be written: an interrupted ``Thread.join`` takes it for done."""
        if self.trainer.checkpoints is not None:
            with self.uninterrupted:
                self.trainer.checkpoints.wait()

    def _numbers(self, best: str | None) -> dict[str, float]:
        """The metrics of this moment; the best's is NaN while no test of these parameters was made."""
        numbers = {name: float(value) for name, value in self.trainer.standing.metrics.items()}
        if self.tested_at == self.trainer.step:
            numbers |= self.tested
        to_come = not numbers or best in self.tested or (self.test is not None and not self.tested)
        if best is not None and best not in numbers:
            numbers |= {best: nan} if to_come else self.tested  # all names, for the message
        return numbers

    def event(self, kind: EventKind, metrics: Mapping[str, Any] | None = None) -> None:
        """Call every callback."""
        self.note(kind, metrics)
        self.telling.tell()

    def note(self, kind: EventKind, metrics: Mapping[str, Any] | None = None) -> None:
        """Let every callback hear of this when it is told."""
        if self.telling.callbacks:
            trainer = self.trainer
            values = trainer.standing.metrics if metrics is None else metrics
            self.telling.note(Event(kind, trainer.epoch, trainer.batch, trainer.step, values, trainer))


_TESTED = (
    "What is computed of it is likely NaN in the history, and stops no training. Clean the data, or train "
    "with check=False if the network expects it."
)
_KEPT = (
    "The Trainer stands at step {step}, and is kept: except KeyboardInterrupt as interrupt: trainer = "
    "interrupt.trainer; in a notebook: import sys; trainer = sys.last_value.trainer. Its train(...) goes on."
)


def _is_settled(value: Any) -> bool:
    """Whether an array has a dtype that JAX keeps."""
    return isinstance(value, np.ndarray) and value.dtype == jax.dtypes.canonicalize_dtype(value.dtype)
