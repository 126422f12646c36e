"""What do the guarantees of our parameter servers cost, and what does a step send?

    moving      one flat parameter to a server and back, updated by SGD, against an ordinary Ray actor with a
                buffer of that size: it copies what is pushed, and returns it when it is pulled. ``both`` is
                push and pull in one call, on both sides; below it stands what each durability adds
    training    a transformer that reads 256 or 30,000 words, SGD, against the example of Ray's
                documentation: one actor with a list of arrays, workers that compute gradients, a driver that
                passes the references on; and what our trainers sent and got at a step, against the plan
    records     a transformer of 5 million parameters, trained by Adam on one server that writes a record for
                every update, against one that writes none
    rows        a recommender with a large embedding, lazily updated by Adagrad on two servers: what a step
                sends and what the records take, for batches that touch ever more rows

Two sides take turns and do the same work: as many processes, the same model, data and rule, and after as
many steps the same parameters. Ray is needed: ``pip install "onward[cluster]"``. With a choice:

    python -m benchmarks.parameter_server --parts moving,training,records,rows --rounds 20 --json results.json
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import onward as ow
from benchmarks import models
from benchmarks.harness import Row, compare
from benchmarks.models import Model
from benchmarks.report import environment, table
from onward.core.extras import require
from onward.fleet.blueprint import Blueprint
from onward.fleet.desk import ServerSpec
from onward.fleet.engine import Engine
from onward.fleet.holding import Gradients
from onward.fleet.messages import Push, Reply, Sender, ServerWord
from onward.fleet.server import serve

_ME = Sender(0, 1)
_RATE = 1e-3
_MOVING_TARGET, _TRAINING_TARGET, _RECORDS_TARGET = 1.25, 0.5, 1.5
_PUSHES = 10  # of a round: the coarsest durability writes once in so many
_DURABILITIES = {
    "every push": ow.cluster.Durability(1),
    "every push, fsync": ow.cluster.Durability(1, fsync=True),
    "every 10, fsync": ow.cluster.Durability(10, fsync=True),
}
_PARTS = ("moving", "training", "records", "rows")
_TRANSFORMER = {"layers": 4, "d": 256, "heads": 4, "seq": 16, "batch": 1}
_DENSE = _TRANSFORMER | {"d": 320}


@dataclass(frozen=True)
class Sent:
    """What each trainer sent and got at a step, in bytes, beside what the plan says; seconds of computing."""

    case: str
    up: int
    planned_up: int
    down: int
    planned_down: int
    computing: float


@dataclass(frozen=True)
class Touched:
    """What batches of one size cost a recommender, in bytes, means over the steps.

    Attributes:
        batch: examples of a step.
        rows: how many rows of the table a step touched.
        up: what went to all servers; ``planned_up``: by the plan.
        down: what came from them; ``planned_down``: by the plan.
        record: what all servers wrote for one update.
        table: what the whole table takes, with what the optimizer keeps for it.
    """

    batch: int
    rows: float
    up: float
    planned_up: float
    down: float
    planned_down: float
    record: float
    table: int


@dataclass
class Results:
    """All that was measured."""

    rows: list[Row] = field(default_factory=list)
    mib: list[float] = field(default_factory=list)
    sent: list[Sent] = field(default_factory=list)
    touched: list[Touched] = field(default_factory=list)


def run(rounds: int | None = None, quick: bool = False) -> list[Row]:
    """All comparisons; none where Ray is not installed."""
    try:
        require("ray", "cluster")
    except ow.MissingExtraError as error:
        print(f"\n{error}")
        return []
    results = measure(_PARTS, rounds, quick)
    print(f"\n{tables(results)}")
    return results.rows


def measure(parts: Sequence[str], rounds: int | None = None, quick: bool = False) -> Results:
    """What was chosen, one after the other, on one Ray."""
    rounds = rounds or (2 if quick else 15)
    results = Results()
    with tempfile.TemporaryDirectory(prefix="onward-benchmark-") as folder, Engine() as engine:
        bench = _Bench(engine, Path(folder), rounds, quick, results)
        for part in parts:
            getattr(bench, part)()
    return results


class _Bench:
    """The parts, which share the processes of one Engine."""

    def __init__(self, engine: Engine, folder: Path, rounds: int, quick: bool, results: Results) -> None:
        self.engine, self.folder, self.rounds, self.quick, self.results = (
            engine,
            folder,
            rounds,
            quick,
            results,
        )

    def moving(self) -> None:
        """Push, pull, both at once, and both with records."""
        kinds = list(_DURABILITIES.items())[: 1 if self.quick else None]
        for mib in (0.25,) if self.quick else (1, 10, 100):
            peer = _Bare(mib)
            self.moved(mib, peer, None, "push", "pull", "both")
            for name, durability in kinds:
                self.moved(mib, peer, (name, durability), "both")
            peer.close()

    def moved(self, mib: float, peer: _Bare, records: tuple[str, Any] | None, *ways: str) -> None:
        """One server against the actor, in these ways."""
        name, durability = records or ("none", ow.cluster.Durability(None))
        folder = self.folder / f"{mib} MiB, {name}"
        ours = _Ours(self.engine, mib, durability, folder)
        for way in ways:
            sides = [partial(side.seconds, way) for side in (ours, peer)]
            for side in sides:
                side()
            aims = way == "both" and records is None and not self.quick
            case = f"{mib:g} MiB, {f'record {name}' if records else way}"
            row = compare(case, "bare actor", *sides, self.rounds, _MOVING_TARGET if aims else None)
            self.results.rows.append(row)
            self.results.mib.append(mib * (2 if way == "both" else 1))
        ours.close()

    def training(self) -> None:
        """A transformer with one and two trainers, its bytes on the way."""
        sizes = {"layers": 1, "d": 8, "heads": 2, "seq": 4, "batch": 2} if self.quick else _TRANSFORMER
        steps = 3 if self.quick else 20
        words = 64 if self.quick else 30_000
        every = ((1, {}), (2, {}), (1, {"words": words}), (2, {"words": words}))
        for trainers, more in every[:: 3 if self.quick else 1]:
            many = f" of {words:,} words" if more else ""
            case = f"transformer{many}, {trainers} trainer{'s' if trainers > 1 else ''}"
            model = models.transformer(**sizes, **more)
            folder = self.folder / case
            folder.mkdir()
            job = _Job(model, trainers, steps, self.rounds + 1, folder)
            ours, peer = _Trained(self.engine, job), _Documented(job)
            ours.seconds(), peer.seconds()
            target = None if self.quick else _TRAINING_TARGET
            self.results.rows.append(
                compare(case, "Ray's example", ours.seconds, peer.seconds, self.rounds, target)
            )
            self.results.mib.append(0.0)
            self.results.sent.append(replace(ours.sent(case), computing=peer.alone()))
            _check_agreement(ours, peer)
            peer.close()

    def records(self) -> None:
        """Adam with a record for every update, and with none."""
        sizes = {"layers": 1, "d": 8, "heads": 2, "seq": 4, "batch": 2} if self.quick else _DENSE
        case, model = "5 M parameters, Adam, record every push", models.transformer(**sizes)
        sides = []
        for durability in (1, None):
            folder = self.folder / f"{case} {durability}"
            folder.mkdir()
            job = _Job(model, 1, 3 if self.quick else 20, self.rounds + 1, folder)
            sides.append(_Trained(self.engine, job, ow.Adam(_RATE), durability))
        logged, bare = sides
        logged.seconds(), bare.seconds()
        target = None if self.quick else _RECORDS_TARGET
        times = logged.seconds, bare.seconds
        self.results.rows.append(compare(case, "no record", *times, self.rounds, target))
        self.results.mib.append(0.0)
        for side in sides:
            side.run.wait()
        for ours, theirs in zip(logged.parameters(), bare.parameters(), strict=True):
            np.testing.assert_array_equal(ours, theirs)

    def rows(self) -> None:
        """A recommender, batch after batch size."""
        count, d = (1000, 4) if self.quick else (1_000_000, 16)
        for batch in (8, 16) if self.quick else (64, 256, 1024):
            self.results.touched.append(
                _recommend(self.engine, count, d, batch, self.folder / f"rows {batch}")
            )


# ---------------------------------------------------------------------------- one flat parameter


def _first(w: Any, x: Any) -> Any:
    return jnp.sum(w[:1] * x)


class _Ours:
    """A server with one flat parameter, and a trainer's side of the talk."""

    def __init__(self, engine: Engine, mib: float, durability: Any, folder: Path) -> None:
        self.engine, self.version = engine, 0
        values, one = np.zeros(int(mib * 2**18), np.float32), np.ones(1, np.float32)
        blueprint = Blueprint.of(ow.SGD(_RATE).minimize(_first, values, one), 1, 1, rows=False)
        mode, given = ow.cluster.Sync(), {"w": values}
        spec = ServerSpec(blueprint, 0, 1, mode, given=given, folder=str(folder), durability=durability)
        self.link = engine.spawn(partial(serve), spec, name="server")
        self.link.call("hello", _ME, blueprint.split().fingerprint).result(120.0)
        self.gradients = Gradients((np.ones_like(values),))

    def seconds(self, way: str) -> float:
        """How long a push, a pull, or both take."""
        return sum(getattr(self, way)() for _ in range(_PUSHES)) / _PUSHES

    def push(self) -> float:
        """The gradient goes there."""
        return self.timed(1, "push", self.next_push())

    def pull(self) -> float:
        """The parameter comes back."""
        return self.timed(0, "pull", _ME, self.version, {})

    def both(self) -> float:
        """The gradient goes there and what the update made of the parameter comes back."""
        return self.timed(1, "exchange", self.next_push(), {})

    def next_push(self) -> Push:
        """The gradient as it travels."""
        return Push(_ME, self.version, self.version, 1.0, self.gradients)

    def timed(self, updates: int, method: str, *arguments: Any) -> float:
        """One call, whose answer must be that of a finished update."""
        begun = perf_counter()
        reply: Reply = self.link.call(method, *arguments).result(120.0)
        taken = perf_counter() - begun
        self.version += updates
        assert (reply.word, reply.version) == (ServerWord.DONE, self.version)
        return taken

    def close(self) -> None:
        """End the server."""
        self.engine.kill(self.link)


class _Buffer:
    """What an ordinary actor does with one flat buffer."""

    def __init__(self, size: int) -> None:
        self.buffer = np.zeros(size, np.float32)

    def push(self, values: np.ndarray) -> None:
        np.copyto(self.buffer, values)

    def pull(self) -> np.ndarray:
        return self.buffer

    def both(self, values: np.ndarray) -> np.ndarray:
        np.copyto(self.buffer, values)
        return self.buffer


class _Bare:
    """The ordinary actor as its caller sees it."""

    def __init__(self, mib: float) -> None:
        self.ray = require("ray", "cluster")
        self.values = np.ones(int(mib * 2**18), np.float32)
        self.actor = self.ray.remote(_Buffer).remote(self.values.size)

    def seconds(self, way: str) -> float:
        """How long a push, a pull, or both take."""
        arguments = () if way == "pull" else (self.values,)
        begun = perf_counter()
        for _ in range(_PUSHES):
            self.ray.get(getattr(self.actor, way).remote(*arguments))
        return (perf_counter() - begun) / _PUSHES

    def close(self) -> None:
        """End the actor."""
        self.ray.kill(self.actor)


# ---------------------------------------------------------------------------- a transformer


@dataclass(frozen=True)
class _Job:
    """What both sides train: so many steps in each round."""

    model: Model
    trainers: int
    steps: int
    rounds: int
    folder: Path

    @property
    def data(self) -> tuple[np.ndarray, ...]:
        """One batch."""
        return tuple(map(np.asarray, self.model.data))

    @property
    def params(self) -> Any:
        """The first values."""
        return jax.tree.map(np.asarray, self.model.params)


@dataclass(frozen=True)
class _Gated:
    """A reader that yields the batches of a round once a file is there, then writes how long a step took."""

    data: tuple[np.ndarray, ...]
    steps: int
    rounds: int
    folder: Path

    def __call__(self, trainer: int, trainers: int) -> Iterator[tuple[np.ndarray, ...]]:
        for number in range(self.rounds):
            while not (self.folder / f"{number}").exists():
                sleep(0.002)
            begun = perf_counter()
            for _ in range(self.steps):
                yield self.data
            part = self.folder / f"part-{trainer}"
            part.write_text(str((perf_counter() - begun) / self.steps))
            os.replace(part, self.folder / f"{number}-{trainer}")


class _Trained:
    """Our training, a round at a time."""

    def __init__(self, engine: Engine, job: _Job, rule: Any = None, durability: int | None = None) -> None:
        self.job, self.round = job, 0
        self.program = (rule or ow.SGD(_RATE)).minimize(job.model.loss, job.params, *job.data)
        self.run = ow.cluster.start(
            self.program,
            _Gated(job.data, job.steps, job.rounds, job.folder),
            parameters=job.params,
            trainers=job.trainers,
            durability=durability,
            progress=False,
            engine=engine,
        )

    def seconds(self) -> float:
        """How long a step of the next round takes the slowest trainer."""
        (self.job.folder / f"{self.round}").touch()
        told = [self.job.folder / f"{self.round}-{t}" for t in range(self.job.trainers)]
        while not all(path.exists() for path in told):
            if not self.run.is_running:
                self.run.wait()
            sleep(0.005)
        self.round += 1
        return max(float(path.read_text()) for path in told)

    def sent(self, case: str) -> Sent:
        """What every step sent and got, which must be the same for all; the training ends."""
        history, cut = self.run.wait().history, ow.split(self.program, 1, self.job.trainers)
        (up,), (down,) = (np.unique(history[name]).astype(int).tolist() for name in ("sent", "received"))
        planned_up, planned_down = _planned(cut, {t.parameter.name: self.job.data[0] for t in cut.tables})
        return Sent(case, up, planned_up, down, planned_down, 0.0)

    def parameters(self) -> list[Any]:
        """Those at the end."""
        return [self.run.model.state[p] for p in self.program.parameters]


class _Weights:
    """The server of Ray's example: a list of arrays, gradients of all workers at once."""

    def __init__(self, weights: list[np.ndarray], rate: float) -> None:
        self.weights, self.rate = [w.copy() for w in weights], rate

    def apply_gradients(self, *gradients: list[np.ndarray]) -> list[np.ndarray]:
        summed = [np.stack(parts).sum(axis=0) for parts in zip(*gradients, strict=True)]
        for weight, gradient in zip(self.weights, summed, strict=True):
            weight -= self.rate / len(gradients) * gradient
        return self.get_weights()

    def get_weights(self) -> list[np.ndarray]:
        return self.weights


class _Worker:
    """A worker of Ray's example, its gradients by JAX."""

    def __init__(self, loss: Callable[..., Any], tree: Any, data: tuple[np.ndarray, ...]) -> None:
        self.gradient, self.tree, self.data = jax.jit(jax.grad(loss)), tree, data

    def compute_gradients(self, weights: list[np.ndarray]) -> list[np.ndarray]:
        found = self.gradient(jax.tree.unflatten(self.tree, weights), *self.data)
        return [np.asarray(g) for g in jax.tree.leaves(found)]

    def alone(self, weights: list[np.ndarray], count: int) -> float:
        begun = perf_counter()
        for _ in range(count):
            self.compute_gradients(weights)
        return (perf_counter() - begun) / count


class _Documented:
    """The synchronous training of Ray's example: the driver passes references on."""

    def __init__(self, job: _Job) -> None:
        self.ray, self.job = require("ray", "cluster"), job
        weights, tree = jax.tree.flatten(job.params)
        self.server = self.ray.remote(_Weights).remote(weights, _RATE)
        worker = self.ray.remote(_Worker)
        self.workers = [worker.remote(job.model.loss, tree, job.data) for _ in range(job.trainers)]
        self.weights = self.server.get_weights.remote()

    def seconds(self) -> float:
        """How long a step takes, over a round of them."""
        begun = perf_counter()
        for _ in range(self.job.steps):
            gradients = [worker.compute_gradients.remote(self.weights) for worker in self.workers]
            self.weights = self.server.apply_gradients.remote(*gradients)
        self.ray.wait([self.weights])
        return (perf_counter() - begun) / self.job.steps

    def alone(self) -> float:
        """How long a worker computes for a step, when nothing is sent."""
        taken: float = self.ray.get(self.workers[0].alone.remote(self.weights, self.job.steps))
        return taken

    def parameters(self) -> list[np.ndarray]:
        """Those at the end."""
        found: list[np.ndarray] = self.ray.get(self.weights)
        return found

    def close(self) -> None:
        """End all actors."""
        for actor in (self.server, *self.workers):
            self.ray.kill(actor)


def _check_agreement(ours: _Trained, peer: _Documented) -> None:
    """Both have made as many steps, and must be at the same place, as far as the way to it was long."""
    first = jax.tree.leaves(ours.job.params)
    places = list(zip(ours.parameters(), peer.parameters(), first, strict=True))
    apart = sum(float(np.sum(np.square(mine - theirs))) for mine, theirs, _ in places)
    way = sum(float(np.sum(np.square(theirs - begin))) for _, theirs, begin in places)
    assert apart <= 0.1**2 * way, f"both sides are {apart**0.5} apart after {way**0.5}"


# ---------------------------------------------------------------------------- a recommender


def _dislike(params: Any, ids: Any, liked: Any) -> Any:
    """Two lookups in one table, the user's and the item's, and two dense layers."""
    x = params["table"][ids].reshape(ids.shape[0], -1)
    scores = jax.nn.relu(x @ params["hidden"]) @ params["last"]
    return jnp.mean(jax.nn.softplus(-liked * scores))


def _recommend(engine: Engine, count: int, d: int, batch: int, folder: Path, steps: int = 8) -> Touched:
    """Some steps with batches of one size, on two servers with a record for every push."""
    rng = np.random.default_rng(batch)
    params = {
        "table": rng.normal(0, 0.1, (count, d)).astype(np.float32),
        "hidden": rng.normal(0, 0.1, (2 * d, 32)).astype(np.float32),
        "last": rng.normal(0, 0.1, 32).astype(np.float32),
    }
    ids = rng.integers(0, count, (steps, batch, 2), np.int32)
    data = [(some, np.sign(rng.normal(size=batch)).astype(np.float32)) for some in ids]
    program = ow.Adagrad(0.1).minimize(_dislike, params, *data[0])
    run = ow.cluster.train(
        program,
        data,
        parameters=params,
        trainers=1,
        servers=2,
        lazy=("table",),
        folder=folder,
        progress=False,
        engine=engine,
    )
    cut = ow.split(program, 2, lazy=("table",))
    planned = [_planned(cut, {"table": some}) for some in ids]
    written = sum(_log(folder / f"server-{i}") for i in (0, 1))
    return Touched(
        batch=batch,
        rows=float(np.mean([len(np.unique(some)) for some in ids])),
        up=float(np.mean(run.history["sent"])),
        planned_up=float(np.mean([up for up, _ in planned])),
        down=float(np.mean(run.history["received"])),
        planned_down=float(np.mean([down for _, down in planned])),
        record=written / steps,
        table=2 * params["table"].nbytes,
    )


def _planned(cut: ow.typing.Split, read: Mapping[str, np.ndarray]) -> tuple[int, int]:
    """The bytes that a step sends to all servers and gets, which reads these rows of tables."""
    plan, up, down = ow.plan(cut), 0, 0
    for server, one in enumerate(plan.servers):
        own = {str(shard): shard for shard in cut.shards[server]}
        touched = {}
        for t in one.tables:
            ids = np.unique(read[t.table])
            touched[t.table] = int(np.sum((ids >= own[t.shard].begin) & (ids < own[t.shard].end)))
        up += plan.up(server, touched)
        down += plan.down(server, touched) - plan.asked(server, touched)
    return up, down


def _log(folder: Path) -> int:
    """The bytes that a server has written behind its first record."""
    return sum(path.stat().st_size for path in folder.glob("**/record-*.log"))


# ---------------------------------------------------------------------------- what is printed


def tables(results: Results) -> str:
    """What is not a comparison, as plain text in columns."""
    parts = [_rates(results), _exchanged(results), _by_rows(results)]
    return "\n\n".join(part for part in parts if part)


def _rates(results: Results) -> str:
    lines = [["moving", "onward", "bare actor"]]
    for row, mib in zip(results.rows, results.mib, strict=True):
        if mib:
            rates = (f"{mib / 2**10 / taken:.2f} GiB/s" for taken in (row.time, row.peer))
            lines.append([row.case, *rates])
    return _columns(lines) if len(lines) > 1 else ""


def _exchanged(results: Results) -> str:
    head = ["bytes of a step", "sent", "planned", "got", "planned", "computing"]
    lines = [
        [s.case, *map(str, (s.up, s.planned_up, s.down, s.planned_down)), f"{s.computing * 1e3:.3g} ms"]
        for s in results.sent
    ]
    return _columns([head, *lines]) if lines else ""


def _by_rows(results: Results) -> str:
    if not results.touched:
        return ""
    head = ["rows", "batch", "touched", "sent", "planned", "got", "planned", "record", "table and slots"]
    numbers = (
        (t.rows, t.up, t.planned_up, t.down, t.planned_down, t.record, t.table) for t in results.touched
    )
    lines = [
        ["", str(t.batch), *(f"{n:.0f}" for n in found)]
        for t, found in zip(results.touched, numbers, strict=True)
    ]
    fits = [f"{name}: {_line(results.touched, name)}" for name in ("up", "down", "record")]
    return "\n".join([_columns([head, *lines]), *fits])


def _line(touched: Sequence[Touched], name: str) -> str:
    """The straight line through the points, and how far they are from it."""
    x, y = (np.array([getattr(t, of) for t in touched]) for of in ("rows", name))
    slope, start = np.polyfit(x, y, 1)
    worst = np.max(np.abs(slope * x + start - y) / y)
    return f"{start:.0f} B + {slope:.1f} B for each row touched, at most {worst:.1%} beside it"


def _columns(lines: Sequence[Sequence[str]]) -> str:
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def _chosen(text: str) -> list[str]:
    names = text.split(",")
    if unknown := set(names) - set(_PARTS):
        raise argparse.ArgumentTypeError(f"no {', '.join(sorted(unknown))}; there are {', '.join(_PARTS)}")
    return names


def main(arguments: Sequence[str] | None = None) -> Results:
    """Measure what was chosen, print the tables, write JSON if asked to."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.parameter_server", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--parts", type=_chosen, default=[*_PARTS], help=f"of {', '.join(_PARTS)}")
    parser.add_argument("--rounds", type=int, help="how often to compare the two sides of each row")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that everything runs")
    parser.add_argument("--json", metavar="PATH", help="write the numbers to this file as well")
    chosen = parser.parse_args(arguments)
    print(", ".join(f"{key} {value}" for key, value in environment().items()), flush=True)
    results = measure(chosen.parts, chosen.rounds, chosen.quick)
    print(f"\n{tables(results)}\n\n{table(results.rows)}")
    if chosen.json:
        found = {"environment": environment(), "results": asdict(results)}
        Path(chosen.json).write_text(json.dumps(found, indent=2) + "\n")
    return results


if __name__ == "__main__":
    main()
