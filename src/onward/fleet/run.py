"""A training on trainers and parameter servers that is under way, or has ended."""

from __future__ import annotations

import atexit
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from time import monotonic, sleep, time
from typing import Any, Self

import jax
import numpy as np

from onward.core.errors import ClusterError, GraphError, NonFiniteError
from onward.core.program import Program
from onward.core.words import Kind
from onward.derive.watch.reading import Watched
from onward.derive.watch.watch import watching_of
from onward.distribute.split.shards import Shard
from onward.distribute.split.split import Split
from onward.distribute.split.trainer import as_typed, plain
from onward.execute.loop.history import History
from onward.execute.loop.watch_history import WatchHistory
from onward.fit.model import Model
from onward.fit.progress import Progress
from onward.fleet.blueprint import Blueprint
from onward.fleet.desk import ServerSpec
from onward.fleet.fence import claim_driver, only_driver
from onward.fleet.link import Unreachable
from onward.fleet.messages import HistoryRow, Reply, Sender, ServerStatus, ServerWord, Told, TrainerStatus
from onward.fleet.modes import Local, in_rounds
from onward.fleet.servers import TrainerSpec
from onward.fleet.settings import Settings, check_same_training
from onward.fleet.supervisor import Supervisor

_LOOK = 0.1  # seconds between two looks at servers and trainers
_LOAD = 1.0  # seconds between two records of the servers' load
_HOLD = 30.0  # seconds that a snapshot may hold up the next round
_LEAVE = 20.0  # seconds that taking it down may take when the interpreter ends


class Run:
    """A training on trainers and parameter servers.

    Attributes:
        history: one record for each step of a trainer: ``trainer``, ``loss`` and what else the function
            returned, ``staleness`` (updates between reading parameters and applying the gradient), ``lag``
            (steps ahead of the slowest trainer), ``examples``, ``sent`` and ``received`` (bytes),
            ``seconds``, ``waited``, and ``time`` (seconds since the beginning, by the trainer's clock). A
            step that was made again has one record, and so has one whose trainer died before it told of it
            (unless the first server died with it). Hyperparameters that changed when a folder was resumed
            stand there by their names.
        watched: for each trainer, what ``watch`` made it look at; ``history.watched`` is that of the first.
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
        self._stack = ExitStack()
        self._stopping, self._leaving = threading.Event(), False
        self._reading, self._closed = threading.Lock(), False
        self._loads: dict[int, tuple[float, ServerStatus]] = {}
        self._busy: dict[int, float] = {}
        self.blueprint = Blueprint.of(
            program, settings.servers, settings.merged, settings.lazy, settings.rows, settings.outer
        )
        self.blueprint = self.blueprint.over(settings.devices, settings.takes_all)
        self.cut: Split = self.blueprint.split()
        self.cut.over(settings.devices)  # raises what trainers would
        if not in_rounds(settings.mode):
            _expect_no_exchange(self.cut)
            _expect_one_order(self.cut, settings.trainers)
        self._fingerprint = self.cut.fingerprint
        looking = program if isinstance(settings.mode, Local) else self.cut.trainer
        self._looks = [*(w.cells for w, *_ in watching_of(looking)), *(w.cells for w in self.cut.joined)]
        state = model.state
        self._given = {v.name: np.asarray(plain(state[v])) for v in state.layout.variables}
        with ExitStack() as stack:
            self.engine = stack.enter_context(hosting)
            folder = self._folder(stack)
            self.supervisor = self._supervisor(reader, folder)
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
        with self._reading, jax.enable_x64(self.blueprint.x64):
            if not self._closed:
                model = self.model.copy()
                model.replace(self._read())
                return model
        return self.wait().model

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
        now = _hyperparameters(self.cut.source)
        *before, _ = check_same_training(folder, self._told, self._driver, now)
        last = before[-1] if before else now
        self._changed = {n: x for n, x in now.items() if any(b.get(n) != x for b in before)}
        for name in (n for n, x in now.items() if last.get(n) != x):
            self._say(f"{name} is {now[name]:g} from here on; before it was {last.get(name)}.")

    @property
    def _told(self) -> dict[str, Any]:
        """The properties that two trainings must share if one is to continue in the folder of the other."""
        s = self.settings
        return {"graph": self.cut.continued, "trainers": s.trainers, "mode": repr(s.mode), "sums": s.sums}

    def _supervisor(self, reader: Any, folder: str | None) -> Supervisor:
        s = self.settings
        servers = [
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
                driver=self._driver,
            )
            for i in range(s.servers)
        ]
        kept = {v.name: self._given[v.name] for v in self.cut.trainer.state}
        kept = self._given if isinstance(s.mode, Local) else kept
        trainers = [
            TrainerSpec(
                blueprint=self.blueprint,
                trainer=t,
                incarnation=1,
                trainers=s.trainers,
                mode=s.mode,
                servers=(),
                reader=reader,
                epochs=s.epochs,
                given=kept,
                deadline=s.patience,
                check=s.check,
                faults=s.faults,
                driver=self._driver,
            )
            for t in range(s.trainers)
        ]
        return Supervisor(
            self.engine,
            servers,
            trainers,
            self._fingerprint,
            restarts=s.restarts,
            deadline=s.deadline,
            start_limit=s.start_limit,
            options=s.options,
            say=self._say,
            row=self._row,
        )

    def _owned(self, i: int) -> dict[str, np.ndarray]:
        """The first values of what a server owns."""
        found = {str(s): s.of(self._given[s.parameter.name]) for s in self.cut.shards[i]}
        return found | ({v.name: self._given[v.name] for v in self.cut.carried} if i == 0 else {})

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

    def _end(self) -> None:
        """Take the parameters, of the last update that was made, and what the servers say in the end."""
        for i, asked in enumerate(self.supervisor.servers):
            asked.answer = self._call(i, "status")
        self._note_load(always=True)
        with self._reading, jax.enable_x64(self.blueprint.x64):
            self.model.replace(self._read())

    def _read(self) -> dict[str, Any]:
        """Collect the values of all servers by name; in rounds, all of one version."""
        replies = self._all_pulled()
        if self.settings.durability.every is None:
            for i in range(len(replies)):
                self.supervisor.heard_of_server(i, self._call(i, "status"))
        pieces: dict[str, list[tuple[Shard, np.ndarray]]] = {}
        found: dict[str, Any] = {}
        for i, reply in enumerate(replies):
            part, values = self.cut.server_parts[i], reply.values
            assert values is not None
            by_name = {v.name: x for v, x in zip(part.given, values.arrays, strict=True)} | dict(values.rows)
            for shard in self.cut.shards[i]:
                pieces.setdefault(shard.parameter.name, []).append((shard, by_name[str(shard)]))
            found |= {v.name: by_name[v.name] for v in self.cut.carried} if i == 0 else {}
        for name, parts in pieces.items():
            ordered = [x for _, x in sorted(parts, key=lambda part: part[0].begin)]
            found[name] = ordered[0] if len(ordered) == 1 else np.concatenate(ordered)
        layout = self.model.state.layout
        kept = [v for v in layout.variables if v.name in found]
        return {v.name: as_typed(found[v.name], v) for v in kept}

    def _all_pulled(self) -> list[Reply]:
        """Pull the values of all servers; pull again if one of them went back meanwhile."""
        end = monotonic() + self.settings.patience
        while monotonic() < end:
            try:
                first: ServerStatus = self._call(0, "hold", _HOLD)
                replies = [self._pulled(0, first, end, Told())]
                others = range(1, self.settings.servers)
                replies += [self._pulled(i, first, end, replies[0].told) for i in others]
            finally:
                with suppress(ClusterError):
                    self._call(0, "hold", 0.0)
            versions = {r.version for r in replies} if in_rounds(self.settings.mode) else {first.version}
            if all(r.word is ServerWord.DONE for r in replies) and versions == {first.version}:
                return replies
            sleep(_LOOK)
        raise ClusterError(f"The servers did not come to one version within {self.settings.patience:g} s.")

    def _pulled(self, i: int, first: ServerStatus, end: float, told: Told) -> Reply:
        """Pull the values of one server, tables whole, at the version of the first."""
        wanted = {v.name: np.arange(v.shape[0]) for v in self.cut.server_parts[i].tables}
        while True:
            asker = Sender(-1, 0, first.generation, self._driver)
            given = (told,) if self.cut.exchanges else ()
            reply: Reply = self._call(i, "pull", asker, first.version, wanted, *given)
            if reply.word is not ServerWord.WAIT or monotonic() > end:
                return reply

    def _call(self, i: int, method: str, *arguments: Any) -> Any:
        """Call a server; again, while it is away."""
        end = monotonic() + self.settings.patience
        link = self.supervisor.servers[i].link
        while True:
            try:
                return link.call(method, *arguments).result(max(0.1, end - monotonic()))
            except (Unreachable, TimeoutError) as error:
                if monotonic() > end:
                    raise ClusterError(f"Server {i} did not answer ({method}): {error}") from error
                sleep(_LOOK)

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
            staleness=row.staleness,
            lag=row.lag,
            examples=row.examples,
            sent=row.sent,
            received=row.received,
            seconds=row.seconds,
            waited=row.waited,
            time=row.ended - self._begun,
        )
        for seen in row.seen:
            found = Watched(
                [(cells, at, numbers) for cells, (at, numbers) in zip(self._looks, seen, strict=False)]
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
                pushes=status.pushes,
                duplicates=status.duplicates,
                received=status.received,
                sent=status.sent,
                written=status.written,
            )

    def __repr__(self) -> str:
        s = self.settings
        how = "running" if self.is_running else "ended"
        return f"Run({s.trainers} trainers, {s.servers} servers, {s.mode}, {how}, {self.history})"


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


def _hyperparameters(program: Program) -> dict[str, float]:
    """The numbers of the state that no step changes, by name."""
    fixed = {v for v in program.state if v.kind is Kind.STATE and v not in program.next_state}
    made = (op for op in program.initializers if not op.inputs and fixed.issuperset(op.outputs))
    values = {v.name: x for op in made for v, x in zip(op.outputs, op.body(), strict=True)}
    return {name: float(x) for name, x in values.items() if np.ndim(x) == 0}


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
