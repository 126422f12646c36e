"""A folder of checkpoints: saved while training goes on, whole or not at all, refused when damaged.

>>> import tempfile, jax.numpy as jnp
>>> with Checkpoints(tempfile.mkdtemp(), keep=2) as checkpoints:
...     for step in range(1, 5):
...         path = checkpoints.save({"w": jnp.full(2, step / 2)}, step)
>>> [entry.path.name for entry in checkpoints.entries()]
['000003-step-3', '000004-step-4']
>>> checkpoints.load().arrays
{'w': array([2., 2.], dtype=float32)}
"""

from __future__ import annotations

import operator
import os
import warnings
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from onward.core.errors import ArgumentError, CheckpointError, nearest
from onward.core.source import user_level
from onward.core.structure import describe
from onward.execute.checkpoint.archive import (
    Content,
    FoundFolder,
    last_sequence,
    look,
    name_of,
    newest_first,
    read,
    write,
)
from onward.execute.checkpoint.backends import BACKENDS, Backend, BackendName
from onward.execute.checkpoint.contents import contents
from onward.execute.checkpoint.given import expect_numbers, expect_word, folder_of, is_whole, json_data, named
from onward.execute.checkpoint.identity import Identity
from onward.execute.checkpoint.loaded import Checkpoint, CheckpointEntry
from onward.execute.checkpoint.refusal import NO_LOCKS, of_another_run, of_another_writer
from onward.execute.checkpoint.retention import Inspection, superfluous
from onward.execute.checkpoint.selection import Selection
from onward.execute.disk.background import WritingThread
from onward.execute.disk.durable import discard, make_folder, sweep, sync
from onward.execute.disk.encoding import encode
from onward.execute.disk.lock import Lock, LockedError
from onward.execute.loop.history import History
from onward.execute.processes import gathered, place_among_processes, reading_whole
from onward.execute.state import State

WRITER = ".writer"  # the file that its writer locks


class Checkpoints:
    """The checkpoints of one training in one folder; one writer at a time, any number may read.

    The first ``save``, or ``claim``, locks the folder until the ``with`` block, the object or the process
    ends. It is refused where another writes, and where there are checkpoints of another run: go on with that
    one (``load``, ``train(resume=True)``) or take another folder. Nobody removes what another run wrote.

    Where several processes train together, all of them call ``save``, and the first one writes.

    ``save`` copies the arrays and returns; a thread writes them to ``folder/000007-step-120/``. An error of
    that thread is raised by the next ``save``, by ``wait``, or at the end of a ``with`` block; end with one
    of them. (An interpreter that exits without them writes on until it is done, but Orbax cannot.)

    Args:
        folder: where the checkpoints are; made by the first save.
        every: how many steps apart ``due`` says that a checkpoint is due; None for never.
        keep: how many of this run's newest stay, each of them whole; None for all.
        best: the metric whose best checkpoint stays as well.
        mode: whether the best metric is the smallest or the largest.
        backend: ``"safetensors"``, or ``"orbax"``, an optional extra.
        asynchronous: whether to write in a thread of its own.
        grace: seconds after SIGTERM in which a training may end its step and save; then the process ends with
            what was saved before. See ``Trainer.train``.

    Attributes:
        identity: of the run that is written: a random id, and when it began.

    Raises:
        CheckpointError: a file in place of the folder.

    Example:
        >>> import tempfile, numpy as np
        >>> with Checkpoints(tempfile.mkdtemp(), keep=1, best="loss") as checkpoints:
        ...     for step, loss in enumerate([3.0, 0.5, 1.0], start=1):
        ...         path = checkpoints.save({"w": np.float32(step)}, step, metrics={"loss": loss})
        >>> checkpoints.load().step, checkpoints.load("best").step
        (3, 2)
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        every: int | None = None,
        keep: int | None = 3,
        best: str | None = None,
        mode: Literal["min", "max"] = "min",
        backend: BackendName = "safetensors",
        asynchronous: bool = True,
        grace: float = 25.0,
    ) -> None:
        expect_numbers(every, keep, grace)
        expect_word("mode", mode, ("min", "max"))
        expect_word("backend", backend, BACKENDS)
        self.folder = folder_of(folder)
        self.every, self.keep, self.best, self.mode = every, keep, best, mode
        self.grace = grace
        self.identity = Identity.new()
        self._backend: Backend = BACKENDS[backend]()
        self._background = WritingThread(asynchronous)
        self._newest = 0  # the sequence number up to which the checkpoints there are known
        self._depth = 0
        self._adds = False
        self._lock = Lock(self.folder / WRITER)
        self._inspection = Inspection(self._background.note)
        weakref.finalize(self, self._lock.release)

    @classmethod
    def adding(cls, folder: str | os.PathLike[str], own: Checkpoints | None = None) -> Checkpoints:
        """A store for a single checkpoint beside whatever is there, of which nothing is removed.

        Args:
            folder: where to.
            own: a store that may be of this very folder; then it is the one.
        """
        if own is not None and own.is_at(folder):
            return own
        store = cls(folder, keep=None)
        store._adds = True
        return store

    def claim(self, identity: Identity | None = None, *, resume: bool = False) -> None:
        """Become the one writer of the folder now, and not only with the first save.

        Args:
            identity: the run that will be written; the store's own unless given.
            resume: go on with the run that is there, if one is.

        Raises:
            CheckpointError: another writes there, or checkpoints of another run are there.

        Example:
            >>> import tempfile, numpy as np
            >>> folder = tempfile.mkdtemp()
            >>> with Checkpoints(folder) as checkpoints:
            ...     path = checkpoints.save({"w": np.ones(2)}, 1)
            >>> try:
            ...     Checkpoints(folder).claim()
            ... except CheckpointError as error:
            ...     print("holds 1 checkpoint of another run, of step 1;" in str(error))
            True
            >>> Checkpoints(folder).claim(resume=True)
        """
        is_mine = identity in (None, self.identity)
        if place_among_processes()[0] > 0 or (is_mine and not resume and self._lock.is_held):
            self.identity = identity or self.identity
            return
        was_held = self._lock.is_held
        self._acquire()
        found = look(self.folder)
        if not (resume or self._adds or last_sequence(found) <= (self._newest if is_mine else 0)):
            if not was_held:
                self._lock.release()
            raise CheckpointError(of_another_run(self.folder, found))
        self.identity = identity or self.identity
        self._newest = last_sequence(found)
        if resume:
            self.identity = next(
                (f.manifest.identity for f in newest_first(found) if f.manifest), self.identity
            )

    def follow(self, found: Checkpoint) -> None:
        """Go on with the run of a checkpoint that was loaded from this folder."""
        self.identity, self._newest = found.identity, found.newest

    def is_at(self, folder: str | os.PathLike[str]) -> bool:
        """Whether this is the folder of the store."""
        return Path(folder).resolve() == self.folder.resolve()

    def is_empty(self) -> bool:
        """Whether there is nothing to load, not even something damaged."""
        return not look(self.folder)

    def save(
        self,
        arrays: State | Mapping[str, Any],
        step: int,
        *,
        metrics: Mapping[str, float] | None = None,
        extra: Mapping[str, Any] | None = None,
        reader: Any = None,
        key: Any = None,
        history: History | None = None,
    ) -> Path:
        """Copy the arrays, which may be donated as soon as this returns, and write them as a new checkpoint.

        Args:
            arrays: a State, as ``step.restore`` gives it back; or name -> array of numbers, booleans or typed
                random keys, of any dtype and shape.
            step: the step after which they were taken.
            metrics: numbers by which a person, or ``best``, tells checkpoints apart.
            extra: JSON data that comes back as it is: the position of a reader, the epoch.
            reader: what the loop reads, whose position is kept: ``step.restore(..., reader=reader)`` sets it.
            key: a random key of the loop, which comes back as ``load().key``.
            history: the numbers of the loop, which come back as ``load().history``.

        Returns:
            The folder that holds the checkpoint once it is written.

        Raises:
            ArgumentError: something that cannot be stored, or no metric named ``best``.
            StateError: a State that was given to a step.
            CheckpointError: this one or the one before could not be written, or the folder is another's: see
                ``claim``.
        """
        if not is_whole(step) or step < 0:
            raise ArgumentError(
                f"Checkpoints.save: step is {describe(step)}; expected a whole number, at least 0."
            )
        step = operator.index(step)
        arrays, extra = contents(arrays, extra or {}, reader, key, history)
        metrics = {named("metrics", name): float(value) for name, value in (metrics or {}).items()}
        if self.best is not None and self.best not in metrics:
            raise ArgumentError(
                f"Checkpoints.save: best={self.best!r}, and metrics= has no such number. "
                f"{nearest(self.best, metrics)}"
            )
        extra = json_data(extra)
        self.wait()
        self.claim()
        encoded = reading_whole(
            f"the checkpoint of step {step}",
            arrays.values(),
            lambda: {named("arrays", name): encode(name, gathered(x)) for name, x in arrays.items()},
        )
        sequence, path = self._next(step)
        self._newest = max(self._newest, sequence)
        index, _ = place_among_processes()
        if index > 0:
            return path
        content = Content(encoded, sequence, step, metrics, extra, self.identity)
        self._background.run(lambda: self._write(path, content))
        return path

    def wait(self) -> None:
        """Return when everything is written; raises the ``CheckpointError`` of a write that failed.

        What else went wrong, such as an old checkpoint that could not be removed, comes as a ``UserWarning``.
        """
        self._background.wait()

    def due(self, step: int) -> bool:
        """Whether a checkpoint is due after this step.

        >>> [step for step in range(10) if Checkpoints("runs", every=4).due(step)]
        [4, 8]
        """
        return self.every is not None and step > 0 and step % self.every == 0

    def entries(self) -> tuple[CheckpointEntry, ...]:
        """The checkpoints, oldest first; those whose manifest is damaged are left out."""
        return self._selection.entries()

    @property
    def _selection(self) -> Selection:
        return Selection(self.folder, self.best, self.mode)

    def load(
        self, which: Literal["latest", "best"] | str | os.PathLike[str] = "latest", *, fallback: bool = False
    ) -> Checkpoint:
        """Read a checkpoint, every bit as it was saved, or none of it.

        Args:
            which: ``"latest"``, ``"best"``, or the path of one.
            fallback: take the one before if this one is damaged, with a ``UserWarning`` for each left out.

        Raises:
            CheckpointError: there is none, or it is damaged; the message names the file and the variables.
        """
        self._background.join()
        if not isinstance(which, str | os.PathLike):
            raise ArgumentError(
                f"Checkpoints.load was given {describe(which)}; expected 'latest', 'best', or the "
                "path of one, such as checkpoints.entries()[-1].path."
            )
        newest = last_sequence(look(self.folder))
        *others, path = self._selection.candidates(which)
        while True:
            try:
                manifest, arrays = read(path)
                found = Checkpoint.of(path, manifest, arrays, newest)
                if self.is_at(path.parent):
                    self.follow(found)
                return found
            except CheckpointError as error:
                if not fallback:
                    raise
                if not others:
                    raise CheckpointError(f"No checkpoint is left to fall back to. {error}") from error
                warnings.warn(f"Left out: {error}", UserWarning, stacklevel=2)
            path = others.pop()

    def __enter__(self) -> Checkpoints:
        """The store itself."""
        self._depth += 1
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Wait, and let others write; an error of the block carries that of the write as a note."""
        try:
            self.wait()
        except CheckpointError as failed:
            if error is None:
                raise
            error.add_note(str(failed))
        finally:
            self._depth -= 1
            if not self._depth:
                self._lock.release()

    def _acquire(self) -> None:
        """Lock the folder, and make it if it is not there."""
        try:
            make_folder(self.folder)
            unsupported = self._lock.acquire()
        except LockedError as locked:
            raise CheckpointError(of_another_writer(self.folder, locked.holder)) from None
        except OSError as error:
            raise CheckpointError(f"{self.folder} cannot be written to: {error}.") from error
        if unsupported is not None:
            warnings.warn(NO_LOCKS.format(folder=self.folder, error=unsupported), stacklevel=user_level())

    def _next(self, step: int) -> tuple[int, Path]:
        """The next sequence number, and a path that nothing has yet."""
        sequence = last_sequence(look(self.folder)) + 1
        while os.path.lexists(path := self.folder / name_of(sequence, step)):
            sequence += 1
        return sequence, path

    def _write(self, path: Path, content: Content) -> None:
        try:
            make_folder(self.folder)
            sweep(self.folder)
            write(path, content, self._backend)
        except Exception as error:
            message = FAILED.format(step=content.step, folder=self.folder, error=error)
            raise CheckpointError(message) from error
        try:
            sync(self.folder)
        except OSError as error:
            self._background.note(UNSURE.format(path=path, error=error))
        else:
            self._retain(path)

    def _retain(self, written: Path) -> None:
        """Remove what is of this run, and neither among the newest that are whole nor the best."""
        if self.keep is None:
            return
        found = {f.path: f for f in look(self.folder) if f.manifest and f.manifest.identity == self.identity}
        best = [found[e.path] for e in reversed(self._selection.ranked()) if e.path in found]

        def is_whole(f: FoundFolder) -> bool:
            assert f.manifest is not None
            return f.path == written or self._inspection.is_whole(f.path, f.manifest)

        for old in superfluous(newest_first(found.values()), best, self.keep, is_whole):
            try:
                discard(old.path)
            except OSError as error:
                self._background.note(STAYS.format(path=old.path, error=error))
        self._inspection.keep_only(set(found))


def store_of(checkpoints: Any) -> Checkpoints | None:
    """The store for ``checkpoints=``: the given one, or one made from a folder; None if none was given.

    Raises:
        ArgumentError: anything else.
    """
    if checkpoints is None or isinstance(checkpoints, Checkpoints):
        return checkpoints
    if isinstance(checkpoints, str | os.PathLike):
        return Checkpoints(checkpoints)
    raise ArgumentError(
        f"checkpoints= is {describe(checkpoints)}; expected a folder, 'runs/one', or "
        "Checkpoints('runs/one', every=100)."
    )


FAILED = "Saving step {step} to {folder} failed: {error}. The checkpoints written before are as they were."
UNSURE = (
    "{path} is written and whole, but the folder could not be forced to the disk ({error}): it may not "
    "outlive a power cut. Older ones were not removed, in case of that."
)
STAYS = "{path} is no longer needed, and could not be removed: {error}. Remove it yourself if it takes room."
