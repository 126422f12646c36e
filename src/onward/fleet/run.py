"""A training on trainers and parameter servers that is under way, or has ended."""

from __future__ import annotations

import atexit
import shutil
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from time import monotonic, sleep, time
from typing import Any, Self

import jax

from onward.core.errors import ClusterError, GraphError, NonFiniteError
from onward.core.lower import lower
from onward.core.program import Program
from onward.develop.watch.reading import Watched
from onward.execute.loop.history import History
from onward.execute.loop.watch_history import WatchHistory
from onward.fit.model import Model
from onward.fit.progress import Progress
from onward.fleet.collect import Collector
from onward.fleet.fence import claim_driver, only_driver
from onward.fleet.job import ClusterJob
from onward.fleet.messages import HistoryRow, ServerStatus, TrainerStatus
from onward.fleet.modes import Local, Sync
from onward.fleet.settings import Settings, check_same_training
from onward.fleet.supervisor import Supervisor

_OF_ROW = ("staleness", "lag", "examples", "sent", "received", "seconds", "waited")
_OF_STATUS = ("pushes", "duplicates", "received", "sent", "written")
_LOOK = 0.1  # seconds between two looks at servers and trainers
_LOAD = 1.0  # seconds between two records of the servers' load
_LEAVE = 20.0  # seconds that taking it down may take when the interpreter ends


class Run:
    """A training on trainers and parameter servers.

    Attributes:
        history: one record for each step of a trainer: ``trainer``, ``loss`` and what else the function
            returned, ``staleness`` (updates between reading parameters and applying the gradient), ``lag``
            (steps ahead of the slowest trainer), ``examples``, ``sent`` and ``received`` (bytes),
            ``seconds``, ``waited``, and ``time`` (seconds since the beginning, by the trainer's clock). A
            step that was made again has one record, and so has one whose trainer died before it told of it
            (unless the first server died with it). While it trains, in the order in which it hears of them;
            then in that of rounds and trainers, or of the time where each goes at its own pace.
            Hyperparameters that changed when a folder was resumed stand there by their names.
        watched: for each trainer, what ``watch`` made it and the servers look at; ``history.watched`` is that
            of the first.
        load: about once a second for each server: ``server``, ``queue``, ``busy`` (share of the time),
            ``pushes``, ``duplicates``, ``received``, ``sent``, ``written`` (bytes so far).
        events: what happened besides, in words: who died, and what was done about it.
        model: the network; it has the trained parameters once the training has ended.
    """

    def __init__(
        self,
        hosting: AbstractContextManager[Any],
        program: Program,
        reader: Any,
        model: Model,
        settings: Settings,
    ) -> None:
        self.settings, self.model = settings, model
        self.history, self.load = History(), History()
        self.watched = [self.history.watched, *(WatchHistory() for _ in range(settings.trainers - 1))]
        self.events: list[str] = []
        self.progress = Progress(None, settings.progress, "train")
        self._error: BaseException | None = None
        self._begun = time()
        self._driver = 0
        self._changed: dict[str, Any] = {}
        self._last: Mapping[str, Any] = {}
        self._stack = ExitStack()
        self._stopping, self._leaving = threading.Event(), False
        self._reading, self._closed = threading.Lock(), False
        self._loads: dict[int, tuple[float, ServerStatus]] = {}
        self._busy: dict[int, float] = {}
        self.job = ClusterJob(program, settings, model.state)
        with ExitStack() as stack:
            self.engine = stack.enter_context(hosting)
            folder = self._folder(stack)
            self.supervisor = self._supervised(reader, folder)
            self.collector = Collector(self.job, model.state.layout, self.supervisor, self._driver)
            stack.callback(self.supervisor.close)
            self.supervisor.begin()
            self._stack = stack.pop_all()
        self._thread = threading.Thread(target=self._watch, name="onward cluster", daemon=True)
        atexit.register(self._leave)
        self._thread.start()

    def wait(self, timeout: float | None = None) -> Self:
        """Wait until the training has ended; then the parameters are in ``model``.

        Raises:
            ClusterError: it cannot go on; servers and trainers have been ended.
            TimeoutError: it has not ended in time; it goes on.
        """
        try:
            self._thread.join(timeout)
        except BaseException:
            self.stop()
            raise
        if self._thread.is_alive():
            raise TimeoutError(f"The training has not ended within {timeout} s.")
        if self._error is not None:
            raise self._error
        return self

    def stop(self) -> None:
        """End the training now; the parameters are then those of the last update."""
        self._stopping.set()
        self._thread.join(120.0)

    def _leave(self) -> None:
        """End it because the interpreter ends: Ray is next, and ends the process of who calls it later."""
        self._leaving = True
        self._stopping.set()
        self._thread.join(_LEAVE)

    @property
    def is_running(self) -> bool:
        """Whether it has not ended yet."""
        return self._thread.is_alive()

    def snapshot(self) -> Model:
        """A Model with the parameters as they are now, while training goes on.

        In rounds they are one version of all servers; otherwise each server's are whole, of the version that
        ``versions`` tells.

        Raises:
            ClusterError: no server answers.
        """
        with self._reading, jax.enable_x64(self.job.blueprint.x64):
            if not self._closed:
                model = self.model.copy()
                model.replace(self.collector.read())
                return model
        return self.wait().model

    def averaged(self) -> Model:
        """A Model with the parameters to evaluate as they are now; see ``Trainer.averaged``.

        They are the averages that ``EMA``, ``SWA``, ``PolyakAverage`` or a schedule-free optimizer keeps on
        the servers, and the parameters themselves where there are none.

        Raises:
            ClusterError: no server answers.
            GraphError: each trainer has its own, as in ``Local``.
        """
        with self._reading, jax.enable_x64(self.job.blueprint.x64):
            if not self._closed:
                return self._evaluated(self.collector.read(self.job.averages))
        return self.wait()._evaluated(self._last)

    def _evaluated(self, values: Mapping[str, Any]) -> Model:
        model, state = self.model.copy(), self.job.evaluated.state
        if missing := [v.name for v in self.job.averages if v.name not in values]:
            raise GraphError(
                f"{self.job.program.name}: the servers have no {missing[0]!r}, for with "
                f"{self.settings.mode} each trainer keeps its own. Take mode='sync' or 'async'."
            )
        found = lower(self.job.evaluated, self.job.evaluated.outputs)(
            [values[v.name] if v.name in values else model[v.name] for v in state], ()
        )
        model.replace({p.name: x for p, x in zip(self.job.program.parameters, found, strict=True)})
        return model

    @property
    def versions(self) -> tuple[int, ...]:
        """How many updates each server has made, as far as is known."""
        return tuple(0 if a.answer is None else a.answer.version for a in self.supervisor.servers)

    @property
    def servers(self) -> list[ServerStatus]:
        """The last word of each server."""
        return [a.answer for a in self.supervisor.servers if a.answer is not None]

    @property
    def skipped(self) -> int:
        """How many updates ``guard``, or a loss scale, left out because they were not finite."""
        return max((status.skipped for status in self.servers), default=0)

    @property
    def trainers(self) -> list[TrainerStatus]:
        """The last word of each trainer."""
        return [a.answer for a in self.supervisor.trainers if a.answer is not None]

    def _folder(self, stack: ExitStack) -> str | None:
        """Where records are kept; a temporary folder is removed once nobody writes to it any more."""
        s = self.settings
        if s.folder is not None:
            stack.enter_context(only_driver(Path(s.folder)))
            self._enter(Path(s.folder))
        if s.folder is not None or s.durability.every is None:
            return s.folder
        if getattr(self.engine, "machines", 1) > 1:
            raise ClusterError(
                "The cluster has several machines, and a server that moves to another needs its record "
                "there. Give a folder that all of them reach, folder=..., or durability=None."
            )
        inside = getattr(self.engine, "folder", None)
        return stack.enter_context(_temporary(inside))

    def _enter(self, folder: Path) -> None:
        """Take the folder over, and note which hyperparameters have changed since the training began."""
        self._driver = claim_driver(folder)
        now = self.job.hyperparameters
        *before, _ = check_same_training(folder, self.job.told, self._driver, now)
        last = before[-1] if before else now
        self._changed = {n: x for n, x in now.items() if any(b.get(n) != x for b in before)}
        for name in (n for n, x in now.items() if last.get(n) != x):
            self._say(f"{name} is {now[name]:g} from here on; before it was {last.get(name)}.")

    def _supervised(self, reader: Any, folder: str | None) -> Supervisor:
        s = self.settings
        return Supervisor(
            self.engine,
            self.job.servers(folder, self._driver),
            self.job.trainers(reader, self._driver),
            self.job.fingerprint,
            restarts=s.restarts,
            deadline=s.deadline,
            start_limit=s.start_limit,
            options=s.options,
            say=self._say,
            row=self._row,
        )

    def _watch(self) -> None:
        """Look after the training until it has ended, then take it down."""
        try:
            while not self.supervisor.look() and not self._stopping.is_set():
                self._note_load()
                sleep(_LOOK)
            if not self._leaving:
                self._end()
        except NonFiniteError as error:
            self._error = error
            with suppress(Exception):
                self._end()
        except BaseException as error:
            self._error = error
        finally:
            atexit.unregister(self._leave)
            with self._reading:
                self._closed = True
            self.progress.close()
            with suppress(Exception):
                self._stack.close()
            if self.history:
                is_in_rounds = isinstance(self.settings.mode, Sync | Local)
                self.history.arrange(*(("step", "trainer") if is_in_rounds else ("time",)))

    def _end(self) -> None:
        """Take the parameters, of the last update that was made, and what the servers say in the end."""
        for i, asked in enumerate(self.supervisor.servers):
            asked.answer = self.collector.call(i, "status")
        self._note_load(always=True)
        with self._reading, jax.enable_x64(self.job.blueprint.x64):
            self._last = self.collector.read(self.job.averages)
            known = {v.name for v in self.collector.layout.variables}
            self.model.replace({name: x for name, x in self._last.items() if name in known})

    def _say(self, text: str) -> None:
        self.events.append(text)
        self.progress.message(text)

    def _row(self, row: HistoryRow) -> None:
        shown = dict(row.metrics)
        self.history.record(
            step=row.sequence + 1,
            epoch=0,
            trainer=row.trainer,
            **self._changed,
            **shown,
            **{name: getattr(row, name) for name in _OF_ROW},
            time=row.ended - self._begun,
        )
        for seen in row.seen:
            found = Watched(
                [(cells, at, numbers) for cells, (at, numbers) in zip(self.job.watched, seen, strict=False)]
            )
            self.watched[row.trainer].record(found, step=found.step or row.sequence + 1)
        busiest = max(self._busy.values(), default=0.0)
        self.progress.advance(
            row.examples,
            **shown,
            staleness=row.staleness,
            bytes=row.sent + row.received,
            queue=sum(s.queue for s in self.servers),
            busy=busiest,
        )

    def _note_load(self, always: bool = False) -> None:
        now = monotonic()
        for status in self.servers:
            before, old = self._loads.get(status.index, (now - _LOAD, status))
            if not always and now - before < _LOAD and status.index in self._loads:
                continue
            self._loads[status.index] = (now, status)
            busy = max(0.0, status.busy - old.busy) / max(now - before, 1e-9)
            self._busy[status.index] = busy
            self.load.record(
                step=status.version,
                epoch=0,
                server=status.index,
                queue=status.queue,
                busy=busy,
                **{name: getattr(status, name) for name in _OF_STATUS},
            )

    def __repr__(self) -> str:
        s = self.settings
        how = "running" if self.is_running else "ended"
        return f"Run({s.trainers} trainers, {s.servers} servers, {s.mode}, {how}, {self.history})"


@contextmanager
def _temporary(inside: str | None) -> Iterator[str]:
    """A folder that is removed at the end, also if a host that was ended is writing its last file."""
    folder = Path(tempfile.mkdtemp(prefix="onward-records-", dir=inside))
    try:
        yield str(folder)
    finally:
        for _ in range(20):
            shutil.rmtree(folder, ignore_errors=True)
            if not folder.exists():
                break
            sleep(0.05)
