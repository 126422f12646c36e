"""Several threads train one Model at once, each with a GradientMachine of its own.

A thread takes a batch, computes gradients with the parameters as it finds them, and applies them, one thread
at a time, to the parameters as they are then: no update is lost, though it may be made with gradients that
are a few steps old (Recht et al., Hogwild!, 2011, with a lock around the update).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from queue import SimpleQueue
from typing import Any

from onward.core.errors import ArgumentError, UnknownNameError, nearest
from onward.core.structure import describe
from onward.core.walk import name_of
from onward.develop.seam import update_pass
from onward.execute.loop.prefetch import END, PATIENCE
from onward.execute.step import Step
from onward.fit.gradient_machine import GradientMachine
from onward.fit.trainer_parts import TrainerParts
from onward.fit.training import NumberedBatch, Training


class Crew:
    """The threads of one training run."""

    def __init__(
        self,
        trainer: TrainerParts,
        apply: Callable[[Mapping[str, Any]], None],
        threads: int,
        training: Training,
    ) -> None:
        if not isinstance(threads, int) or threads < 1:
            raise ArgumentError(f"threads is {describe(threads)}; expected a whole number, at least 1.")
        trainer.expect_one_place(f"threads={threads}")
        self.trainer, self.apply, self.training = trainer, apply, training
        names = [p.name for p, _ in trainer.program.gradients]
        if trainer.program.replicas is not None and trainer.program.replicas.count > 1:
            raise ArgumentError(
                f"threads is {threads}, and {trainer.program.name} trains on "
                f"{trainer.program.replicas.count} devices. Train by threads on one device, or by devices in "
                "one thread."
            )
        first = trainer.step * threads + 1  # so that no random key comes twice, whenever a crew is formed
        self.machines = [GradientMachine(trainer.model, names, number=first + n) for n in range(threads)]
        self._reading = threading.Lock()
        self._stop = threading.Event()
        self._ended: SimpleQueue[bool] = SimpleQueue()
        self._errors: list[BaseException] = []

    def loop(self, batches: Iterator[NumberedBatch]) -> None:
        """Train on the batches of one epoch with all threads; returns when all are done."""
        self._stop.clear()
        self._errors.clear()
        self._ended = SimpleQueue()
        threads = [
            threading.Thread(
                target=self._work, args=(machine, batches), name=f"trainer-{machine.number}", daemon=True
            )
            for machine in self.machines
        ]
        try:
            with self.training.uninterrupted:
                for thread in threads:
                    thread.start()
            for _ in threads:
                self._ended.get()  # an interrupted Thread.join takes a thread for dead (CPython 3.11)
        finally:
            self._end(threads)
        if self._errors:
            raise self._errors[0]

    def _end(self, threads: list[threading.Thread]) -> None:
        """Wait until every thread has finished its step; one that hangs in the reader is left behind."""
        with self.training.uninterrupted:
            self._stop.set()
            for thread in threads:
                if thread.ident is not None:
                    thread.join(PATIENCE)

    def _work(self, machine: GradientMachine, batches: Iterator[NumberedBatch]) -> None:
        try:
            while not self._stop.is_set():
                with self._reading:
                    item = next(batches, END)
                if item is END or self._stop.is_set():
                    return
                try:
                    out = machine.backward(**item.fed)
                except ArgumentError as error:
                    raise self.training.blaming(item, error) from error
                with self.trainer.model.lock:
                    self.apply(machine.gradients)
                    self.training.done(out, item)
                    self.training.after()
        except BaseException as error:
            self._errors.append(error)
            self._stop.set()
        finally:
            self._ended.put(True)


class Applier:
    """Applies gradients that were computed elsewhere to the parameters as they are now."""

    def __init__(self, trainer: TrainerParts) -> None:
        trainer.expect_one_place("apply")
        self.trainer = trainer
        part = update_pass(trainer.program)
        self.names = GradientMachine(trainer.model, [p.name for p, _ in trainer.program.gradients]).names
        kept = {v.name for v in trainer.model.state.layout.variables}
        donated = [old.name for old in part.next_state if old.name not in kept]
        self._step = Step(part, (), donate=donated, ahead=False)

    def __call__(self, gradients: Mapping[str, Any]) -> None:
        """One update with the gradients by parameter; to be called by one thread at a time."""
        given = self._named(gradients)
        feed = {gradient: given[name] for name, gradient in self.names.items()}
        state, _ = self._step(self.trainer.joined(), **feed)
        self.trainer.take(state)
        self.trainer.standing.step += 1

    def _named(self, gradients: Any) -> dict[str, Any]:
        """The gradients by the name of their parameter: of each that is trained, and of no other."""
        if not isinstance(gradients, Mapping):
            raise ArgumentError(
                f"apply was given {describe(gradients)}; expected the gradients by the name of their "
                "parameter, as a GradientMachine has them: trainer.apply(machine.gradients)."
            )
        given = {str(name_of(parameter)): gradient for parameter, gradient in gradients.items()}
        if unknown := [name for name in given if name not in self.names]:
            raise UnknownNameError(
                f"apply was given the gradient of {unknown[0]!r}, which this Trainer does not train. "
                f"{nearest(unknown[0], self.names)} A GradientMachine leaves others out: "
                "GradientMachine(model, parameter_list=[...])."
            )
        if missing := [name for name in self.names if name not in given]:
            raise ArgumentError(
                f"apply was given no gradient of {', '.join(map(repr, missing[:5]))}; an update needs one of "
                "each parameter that is trained: trainer.apply(machine.gradients)."
            )
        return given
