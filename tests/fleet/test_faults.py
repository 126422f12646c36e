"""Exactly once, whoever dies: processes that are killed, messages that are lost, disks that are full."""

import asyncio
import os
import shutil
import tempfile
import threading
import time
from dataclasses import replace
from itertools import product

import jax.numpy as jnp
import numpy as np
import pytest
from tests.fleet.breaking import MESSAGES, Breaking, applied, counted, counted_rows, tally
from tests.fleet.hosting import Threads
from tests.fleet.on_threads import equal

import onward as ow
from onward.core.errors import CheckpointError, ClusterError
from onward.fleet import record, supervisor
from onward.fleet.blueprint import Blueprint
from onward.fleet.desk import ServerSpec
from onward.fleet.faults import EDGES, MEANWHILE
from onward.fleet.holding import Gradients
from onward.fleet.keeper import Durability
from onward.fleet.messages import Push, Sender, ServerWord
from onward.fleet.modes import Async, Sync
from onward.fleet.server import serve

MODES = {
    "sync": "sync",
    "async": "async",
    "bounded": ow.cluster.Bounded(2),
    "local": ow.cluster.Local(2, ow.SGD(1.0)),
}
WAIT = 60.0
EXACT = (0, 0)  # lost, doubled

pytestmark = pytest.mark.usefixtures("graphs_made_once", "short_pauses")


def begun(mode, place, batches=12, reader=None, faults=None, engine=None, program=None, **options):
    """A training that counts how often each batch was applied."""
    program, parameters, read = program or counted(getattr(reader, "batches", batches))
    options = {"trainers": 2, "servers": 2, "deadline": 20.0, **options}
    return ow.cluster.start(
        program,
        read if reader is None else reader,
        parameters=parameters,
        mode=MODES.get(mode, mode),
        merge=ow.Sum(),
        engine=Threads() if engine is None else engine,
        settings={"faults": faults or Breaking(place / "faults")},
        **options,
    )


def trained(mode, place, kills=(), rates=None, how="kill", **options):
    """Such a training that has ended, and what was broken in it."""
    faults = Breaking(place / "faults", kills, rates, seed=3, how=how)
    run = begun(mode, place, faults=faults, **options)
    try:
        return run.wait(WAIT), faults.injected
    finally:
        run.stop()


def nothing_is_left(run):
    """Whether all hosts are dead, and the temporary folder for records is gone."""
    return not run.is_running and not any(host.alive for host in run.engine.hosts)


def own(counts, pause=0.0, slow=None):
    """A reader of so many batches for each trainer, which together are all batches."""

    def read(trainer, trainers):
        first = sum(counts[:trainer])
        for n in range(first, first + counts[trainer]):
            time.sleep(pause if slow in (None, trainer) else 0.0)
            yield np.eye(sum(counts), dtype=np.float32)[[n]]

    read.batches = sum(counts)
    return read


# ---------------------------------------------------------------------------- processes that die


@pytest.mark.parametrize(
    ("mode", "edge"),
    [
        *product(["sync", "async"], EDGES),
        *product(["bounded"], ["after send", "during write", "before reply"]),
    ],
)
def test_a_kill_at_every_edge(tmp_path, mode, edge):
    who = "trainer" if edge.endswith("send") else "server"
    run, injected = trained(mode, tmp_path, [(f"{who} 0", edge, 3), (f"{who} 1", edge, 4)])
    assert tally(run.model) == EXACT
    assert injected == {edge: 2}


@pytest.mark.parametrize("who", ["trainer", "server"])
def test_a_kill_at_every_edge_between_local_steps(tmp_path, who):
    edges = [edge for edge in EDGES if edge.endswith("send") == (who == "trainer")]
    kills = [(f"{who} {n % 2}", edge, 2) for n, edge in enumerate(edges)]
    run, injected = trained("local", tmp_path, kills)
    assert tally(run.model) == EXACT
    assert injected.total() == len(kills)


@pytest.mark.parametrize(("mode", "lazy"), [("sync", []), ("async", []), ("async", ["table"])])
def test_a_kill_while_a_whole_record_is_written_beside_the_work(tmp_path, monkeypatch, mode, lazy):
    """What was logged meanwhile is found behind the record before it."""
    monkeypatch.setattr(record, "MOST_UPDATES", 2)
    monkeypatch.setattr(record, "MOST_ROOM", 0.1 if lazy else 3)
    kills = [(f"server {i}", MEANWHILE, n) for i in (0, 1) for n in (1, 2)]
    options = {"program": counted_rows(9, 2), "lazy": lazy} if lazy else {"batches": 24}
    run, injected = trained(mode, tmp_path, kills, **options)
    assert tally(run.model, ["dense"] if lazy else "abc") == EXACT
    assert injected == {MEANWHILE: 4}


TRAINERS_DIE = [(f"trainer {t}", "after send", n) for t, n in ((0, 3), (0, 6), (1, 4), (1, 9))]
SERVERS_DIE = [
    ("server 0", "before reply", 9),
    ("server 0", "after apply", 5),
    ("server 1", "after apply", 3),
]


@pytest.mark.parametrize(
    ("mode", "kills"), [*product(["sync", "async"], [TRAINERS_DIE]), ("sync", SERVERS_DIE)]
)
def test_the_history_has_each_step_once_whoever_dies(tmp_path, mode, kills):
    """Trainers die before they told of a step that was applied, or make a step again."""
    run, injected = trained(mode, tmp_path, kills, restarts=20)
    assert tally(run.model) == EXACT
    assert injected.total() == len(kills)
    steps = zip(run.history["trainer"], run.history["step"], strict=True)
    assert sorted(steps) == [(t, n) for t in range(2) for n in range(1, 7)]


@pytest.mark.parametrize("lazy", [[], ["table"]])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_kill_of_servers_of_rows(tmp_path, mode, lazy):
    kills = [("server 0", "during write", 4), ("server 1", "during write", 5), ("server 1", "after apply", 3)]
    program = counted_rows(9, 2)
    run, injected = trained(mode, tmp_path, kills, program=program, lazy=lazy)
    assert injected.total() == 3
    assert tally(run.model, ["dense"]) == EXACT
    np.testing.assert_array_equal(run.model["table"], -np.ones((18, 64)))


@pytest.mark.parametrize("servers", [1, 3])
def test_a_server_and_a_trainer_that_die_in_the_same_round(tmp_path, servers):
    last = f"server {servers - 1}"
    kills = [
        (last, "before apply", 3),
        ("trainer 0", "after send", 3 * servers),
        ("trainer 2", "before send", 7),
    ]
    run, injected = trained("sync", tmp_path, kills, trainers=3, servers=servers, batches=24)
    assert tally(run.model) == EXACT
    assert injected.total() == 3


def test_a_start_that_takes_long_says_what_it_waits_for_and_ends_when_it_is_too_long(tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor, "PATIENCE", 0.1)
    monkeypatch.setattr(supervisor, "_SOON", 0.05)
    late = threading.Event()
    monkeypatch.setattr(supervisor, "serve", lambda spec: late.wait(0.5) or serve(spec))
    run, _ = trained("async", tmp_path)
    assert any("has been starting for 0 s: it has yet to make its graph" in line for line in run.events)
    monkeypatch.setattr(supervisor, "serve", lambda spec: late.wait(WAIT))
    with pytest.raises(ClusterError, match=r"Server 0 did not start within 0\.3 s: .*\(start_limit=\)"):
        begun("async", tmp_path, start_limit=0.3)
    late.set()


def test_a_trainer_that_dies_too_often(tmp_path):
    kills = [("trainer 1", "before send", n) for n in range(2, 9)]
    run = begun("async", tmp_path, faults=Breaking(tmp_path / "faults", kills), restarts=2)
    with pytest.raises(ClusterError, match=r"Trainer 1 .*died.*was replaced 2 times already \(restarts=2\)"):
        run.wait(WAIT)
    assert nothing_is_left(run)


def test_a_trainer_that_dies_when_it_has_finished(tmp_path):
    engine = Threads()
    engine.dies_after = "run"
    run, _ = trained("async", tmp_path, engine=engine, reader=own([2, 10]))
    assert tally(run.model) == EXACT


@pytest.mark.parametrize(
    ("mode", "who"),
    [("sync", "trainer 0"), ("sync", "server 0"), ("sync", "server 1"), ("async", "server 0")],
)
def test_a_stopped_process_is_named_and_replaced(tmp_path, mode, who):
    edge = "after send" if who == "trainer 0" else "before apply"
    run, injected = trained(mode, tmp_path, [(who, edge, 3)], how="stop", deadline=1.0, restarts=20)
    assert tally(run.model) == EXACT
    assert injected == {edge: 1}
    assert any(line.startswith(who.capitalize()) and "said nothing for 1 s" in line for line in run.events)


# ---------------------------------------------------------------------------- messages


@pytest.mark.parametrize("mode", MODES)
def test_messages_that_are_lost_doubled_late_and_out_of_order(tmp_path, mode):
    rates = dict.fromkeys(MESSAGES, 0.08)
    run, injected = trained(mode, tmp_path, rates=rates, servers=3, trainers=3, batches=24)
    assert tally(run.model) == EXACT
    assert injected.total() >= 10


def test_messages_and_processes_at_once(tmp_path):
    rates = dict.fromkeys(MESSAGES, 0.05)
    kills = [("server 0", "before reply", 9), ("server 1", "during write", 4), ("trainer 1", "after send", 5)]
    run, injected = trained("sync", tmp_path, kills, rates)
    assert tally(run.model) == EXACT
    assert injected.total() >= 6


# ---------------------------------------------------------------------------- durability


def real(p, x, y):
    return jnp.mean((jnp.tanh(x @ p["w"]) @ p["v"] + p["b"] - y) ** 2)


@pytest.mark.parametrize("every", [1, 3])
def test_rounds_that_are_made_again_end_bit_equal(tmp_path, every):
    rng = np.random.default_rng(0)
    data = [rng.normal(size=(32, n)).astype(np.float32) for n in (5, 2)]
    parameters = {
        n: rng.normal(size=s).astype(np.float32) for n, s in (("w", (5, 7)), ("v", (7, 2)), ("b", 2))
    }
    program = ow.Adam(0.01).minimize(real, parameters, *(x[:2] for x in data))
    read = program, parameters, ow.batches(data, 2)
    kills = [
        ("server 0", "before apply", 5),
        ("server 1", "after apply", 7),
        ("server 1", "before reply", 15),
    ]
    calm, _ = trained("sync", tmp_path / "calm", program=read, durability=every)
    shaken, injected = trained("sync", tmp_path / "shaken", kills, program=read, durability=every)
    assert injected.total() == 3
    for name in parameters:
        np.testing.assert_array_equal(np.asarray(calm.model[name]), np.asarray(shaken.model[name]))


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_server_without_a_record_cannot_be_replaced(tmp_path, mode):
    faults = Breaking(tmp_path / "faults", [("server 1", "after apply", 3)])
    run = begun(mode, tmp_path, faults=faults, durability=None)
    with pytest.raises(ClusterError, match=r"Server 1 .*with durability=None no record is written"):
        run.wait(WAIT)
    assert nothing_is_left(run)


def test_a_server_without_a_record_that_dies_at_the_end(tmp_path):
    engine = Threads()
    run = begun("sync", tmp_path, durability=None, servers=1, engine=engine)
    look = run.supervisor.look

    def look_and_lose():
        done = look()
        if done:
            engine.lose(engine.hosts[0])
        return done

    run.supervisor.look = look_and_lose
    with pytest.raises(ClusterError, match="durability=None"):
        run.wait(WAIT)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_full_disk_ends_the_training_and_nothing_is_applied_twice(tmp_path, mode):
    faults = Breaking(tmp_path / "full", [("server 1", "during write", 4)], how="full")
    run = begun(mode, tmp_path, faults=faults, folder=tmp_path / "records")
    with pytest.raises((CheckpointError, ClusterError), match="No space left on device"):
        run.wait(WAIT)
    assert nothing_is_left(run)
    again, _ = trained(mode, tmp_path, folder=tmp_path / "records")
    assert tally(again.model) == EXACT


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_training_that_was_stopped_goes_on_from_its_folder(tmp_path, mode):
    records = tmp_path / "records"
    kills = [("trainer 0", "before send", 3), ("server 1", "after apply", 2)]
    faults = Breaking(tmp_path / "first", kills)
    run = begun(mode, tmp_path, reader=own([6, 6], pause=0.2), faults=faults, folder=records)
    while max(run.versions) < 3 and run.is_running:
        time.sleep(0.02)
    run.stop()
    made = applied(run.model)
    assert 0 < made.sum() < made.size
    again, _ = trained(mode, tmp_path, reader=own([6, 6]), folder=records)
    assert tally(again.model) == EXACT


def test_a_record_of_another_training_is_refused(tmp_path):
    trained("async", tmp_path, folder=tmp_path / "records")
    with pytest.raises(
        ClusterError, match=r"records? of another training|record of server . is one of another"
    ):
        begun("async", tmp_path, folder=tmp_path / "records", batches=5)


# ---------------------------------------------------------------------------- readers


@pytest.mark.parametrize("mode", MODES)
def test_trainers_with_different_numbers_of_batches(tmp_path, mode):
    run, _ = trained(mode, tmp_path, reader=own([4, 8]))
    assert tally(run.model) == EXACT
    assert run.events == []


def test_fewer_batches_than_trainers(tmp_path):
    run, _ = trained("sync", tmp_path, batches=1, trainers=3)
    assert tally(run.model) == EXACT


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_reader_without_a_batch_is_named(tmp_path, mode):
    run = begun(mode, tmp_path, reader=own([0, 4]))
    with pytest.raises(ClusterError, match="The reader of trainer 0"):
        run.wait(WAIT)
    assert nothing_is_left(run)


def failing(trainer, trainers):
    for n in range(6):
        if trainer == 1 and n == 3:
            raise OSError("the tape is torn")
        yield np.eye(12, dtype=np.float32)[[6 * trainer + n]]


def misfit(trainer, trainers):
    for n in range(6):
        yield np.ones((1, 12 + (trainer == 1 and n == 3)), np.float32)


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize(
    ("reader", "told"),
    [
        (failing, r"reader of trainer 1 raised OSError: the tape is torn.*3"),
        (misfit, r"Trainer 1, batch 3 \(counted from 0\)"),
    ],
)
def test_a_reader_that_fails_ends_the_training(tmp_path, monkeypatch, mode, reader, told):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    run = begun(mode, tmp_path, reader=reader)
    with pytest.raises(ClusterError, match=told):
        run.wait(WAIT)
    assert nothing_is_left(run)
    assert list(tmp_path.glob("onward-records-*")) == []


# ---------------------------------------------------------------------------- while it runs


def test_a_snapshot_in_rounds_is_one_version_of_all_servers(tmp_path):
    kills = [
        ("server 1", "after apply", 5),
        ("server 0", "before reply", 40),
        ("trainer 0", "after send", 12),
    ]
    faults = Breaking(tmp_path / "faults", kills)
    run = begun("sync", tmp_path, faults=faults, servers=3, reader=own([20, 20], pause=0.03))
    seen = []
    while run.is_running:
        first, *others = applied(run.snapshot())
        for other in others:
            np.testing.assert_array_equal(first, other)
        seen.append(first.sum())
    run.wait(WAIT)
    assert tally(run.model) == EXACT
    assert seen == sorted(seen)
    assert len(set(seen)) >= 5
    assert faults.injected.total() == 3


def test_a_snapshot_is_whole_while_servers_go_back(tmp_path):
    kills = [("server 1", "after apply", n) for n in (5, 14)] + [("server 0", "after apply", 9)]
    faults = Breaking(tmp_path / "faults", kills)
    run = begun("sync", tmp_path, faults=faults, reader=own([12, 12], pause=0.03), durability=3)
    while run.is_running:
        first, other = applied(run.snapshot(), "ab")
        np.testing.assert_array_equal(first, other)
    run.wait(WAIT)
    assert tally(run.model) == EXACT
    assert any("go back to version" in line for line in run.events)


@pytest.mark.parametrize(("mode", "keeps"), [(ow.cluster.Bounded(2), True), ("async", False)])
def test_the_bound_holds_with_a_slow_trainer(tmp_path, mode, keeps):
    run, _ = trained(mode, tmp_path, reader=own([3, 9], pause=0.1, slow=0))
    assert tally(run.model) == EXACT
    assert (max(run.history["lag"]) <= 2) == keeps


def test_the_bound_holds_when_the_server_that_keeps_it_dies(tmp_path):
    kills = [("server 0", "after apply", 6), ("server 0", "after write", 10)]
    run, _ = trained("bounded", tmp_path, kills, reader=own([4, 8], pause=0.1, slow=0))
    assert tally(run.model) == EXACT
    assert max(run.history["lag"]) <= 2


# ---------------------------------------------------------------------------- what a server refuses


class Desk:
    """A server without a process, and pushes to it."""

    def __init__(self, mode, folder, program=None, index=0, servers=1, every=1):
        program, parameters, _ = program or counted(4)
        merged = 2 if mode == Sync() else 1
        blueprint = Blueprint.of(program, servers, merged)
        self.cut = blueprint.split()
        given = {str(s): s.of(parameters[s.parameter.name]) for s in self.cut.shards[index]}
        self.spec = ServerSpec(blueprint, index, 2, mode, True, given, str(folder), Durability(every))
        self.start()

    def start(self):
        self.server = serve(self.spec)
        self.part = self.cut.server_parts[self.spec.index]

    def call(self, method, *arguments):
        return asyncio.run(getattr(self.server, method)(*arguments))

    def push(self, trainer, sequence, incarnation=1, ones=True, generation=0, **changes):
        arrays = tuple(np.ones(v.shape, v.dtype) for v in self.part.received[0])
        rows = {
            v.name: (np.array([1], np.int32), np.ones((1, *v.shape[1:]), v.dtype)) for v in self.part.tables
        }
        needed = [v for v in self.part.shared if v in self.part.program.inputs]
        shared = {v.name: np.zeros(v.shape, v.dtype) for v in needed}
        gradients = Gradients(arrays, rows, shared) if ones else None
        sender = Sender(trainer, incarnation, generation)
        push = Push(sender, sequence, sequence, 1.0 if ones else 0.0, gradients)
        return replace(push, **changes)

    def state(self):
        keeper = self.server.desk.keeper
        return keeper.version, {n: x.copy() for n, x in keeper.holding.arrays.items()}


@pytest.mark.parametrize("mode", [Sync(), Async()])
def test_a_trainer_whose_place_was_taken_is_refused(tmp_path, mode):
    desk = Desk(mode, tmp_path)
    desk.call("hello", Sender(0, 2), desk.cut.fingerprint)
    assert desk.call("exchange", desk.push(0, 0, incarnation=1), {}).word is ServerWord.SUPERSEDED
    assert desk.call("pull", Sender(0, 1), 0, {}).word is ServerWord.SUPERSEDED
    assert desk.state()[0] == 0
    assert desk.server.desk.pushes == 0


def test_a_newer_trainer_replaces_what_an_older_one_staged(tmp_path):
    desk = Desk(Sync(), tmp_path)
    assert desk.call("push", desk.push(0, 0)).word is ServerWord.DONE
    assert desk.call("push", desk.push(0, 0, incarnation=2)).word is ServerWord.DONE
    assert desk.call("push", desk.push(1, 0)).word is ServerWord.DONE
    assert desk.server.desk.keeper.ledger == {0: (2, 0), 1: (1, 0)}


@pytest.mark.parametrize("mode", [Sync(), Async()])
def test_another_graph_is_refused(tmp_path, mode):
    desk = Desk(mode, tmp_path)
    with pytest.raises(ClusterError, match="Trainer 1 runs the graph 0123, server 0 the graph"):
        desk.call("hello", Sender(1, 1), "0123")
    with pytest.raises(ClusterError, match="graph"):
        desk.call("check", "0123")


def wrong(push, v):
    """Pushes that are none of the graph."""
    arrays, rows = push.gradients.arrays, push.gradients.rows
    table = next(iter(rows))
    at, values = rows[table]

    def rowwise(at, values):
        return Gradients(arrays, {table: (np.asarray(at), values)})

    return {
        "shape": Gradients((arrays[0][:-1], *arrays[1:]), rows),
        "dtype": Gradients((arrays[0].astype(np.float64), *arrays[1:]), rows),
        "fewer": Gradients(arrays[1:], rows),
        "more": Gradients((*arrays, arrays[0]), rows),
        "no rows": Gradients(arrays),
        "other table": Gradients(arrays, {"other": rows[table]}),
        "row below 0": rowwise(np.array([-1], np.int32), values),
        "row too high": rowwise(np.array([v.shape[0]], np.int32), values),
        "row numbers": rowwise(np.array([0.0], np.float32), values),
        "one row more": rowwise(np.array([0, 1], np.int32), values),
        "row shape": rowwise(at, values[:, :-1]),
    }


@pytest.mark.parametrize("mode", [Sync(), Async()])
def test_what_is_no_gradient_of_the_graph_is_refused(tmp_path, mode):
    desk = Desk(mode, tmp_path, counted_rows(4, 1))
    good = desk.push(0, 0)
    before = desk.state()
    for gradients in wrong(good, desk.part.tables[0]).values():
        with pytest.raises(ClusterError, match="Nothing was applied"):
            desk.call("exchange", replace(good, gradients=gradients), {})
    with pytest.raises(ClusterError, match="sent a gradient by trainer 7"):
        desk.call("exchange", desk.push(7, 0), {})
    version, arrays = desk.state()
    assert version == before[0]
    for name, x in arrays.items():
        np.testing.assert_array_equal(x, before[1][name])


def test_shared_values_of_another_graph_are_refused(tmp_path):
    p = {n: np.zeros(4, np.float32) for n in "ab"}
    program = ow.Adam(lambda step: 0.1 / (1 + step)).minimize(
        lambda p, x: jnp.sum((p["a"] + p["b"]) * x), p, np.ones((1, 4), np.float32)
    )
    desk = Desk(Async(), tmp_path, (program, p, None), index=1, servers=2)
    good = desk.push(0, 0)
    assert good.gradients.shared
    for shared in ({}, {n: np.zeros(3) for n in good.gradients.shared}):
        with pytest.raises(ClusterError, match="shared values"):
            desk.call("exchange", replace(good, gradients=replace(good.gradients, shared=shared)), {})
    assert desk.state()[0] == 0


def test_a_push_that_is_sent_again_after_the_server_came_back(tmp_path):
    desk = Desk(Async(), tmp_path)
    desk.call("exchange", desk.push(0, 0), {})
    before = desk.state()
    desk.start()
    reply = desk.call("exchange", desk.push(0, 0), {})
    assert (reply.word, reply.version, desk.server.desk.duplicates) == (ServerWord.DONE, 1, 1)
    for name, x in desk.state()[1].items():
        np.testing.assert_array_equal(x, before[1][name])


def test_a_write_that_failed_is_not_built_upon(tmp_path):
    desk = Desk(Sync(), tmp_path / "records")
    desk.server.desk.keeper.store.reach = full
    desk.call("push", desk.push(0, 0))
    with pytest.raises(CheckpointError):
        desk.call("push", desk.push(1, 0))
    desk.server.desk.keeper.store.reach = lambda edge: None
    for method, arguments in (
        ("status", ()),
        ("exchange", (desk.push(1, 0), {})),
        ("pull", (Sender(1, 1), 0, {})),
    ):
        with pytest.raises(ClusterError, match="makes no further one"):
            desk.call(method, *arguments)
    desk.start()
    assert desk.state()[0] == 0


def adam(guarded):
    """A program with slots, which is worth a log of gradients."""
    p = {n: np.arange(4, dtype=np.float32) for n in "ab"}
    program = ow.Adam(0.1).minimize(
        lambda p, x: jnp.sum((p["a"] + p["b"]) * x), p, np.ones((1, 4), np.float32)
    )
    return ow.guard(program) if guarded else program, p, None


@pytest.mark.parametrize("guarded", [False, True])
def test_a_log_of_gradients_brings_every_bit_back(tmp_path, monkeypatch, guarded):
    """Of both trainers or of one, spoilt or not; whole records bound how many updates are made again."""
    monkeypatch.setattr(record, "MOST_UPDATES", 3)
    folder = tmp_path / "server"
    desk, states, rng = Desk(Sync(), folder, adam(guarded)), {}, np.random.default_rng(0)
    for n in range(9):
        for t in range(2):
            push = desk.push(t, n, ones=not (n == 4 and t))
            if push.gradients is not None:
                drawn = [rng.normal(size=x.shape).astype(x.dtype) for x in push.gradients.arrays[:2]]
                told = [np.asarray(n == 5, x.dtype) for x in push.gradients.arrays[2:]]
                push = replace(push, gradients=replace(push.gradients, arrays=(*drawn, *told)))
            desk.call("push", push)
        states[n + 1] = desk.state()[1]
        desk.server.desk.keeper.store.settle()
        copy = shutil.copytree(folder, tmp_path / str(n))
        again = serve(replace(desk.spec, folder=str(copy))).desk.keeper
        equal(again.holding.arrays, states[n + 1], states[n + 1])
    kept = ["record-00000003-6", "record-00000003-6.log", "record-00000004-9"]
    assert sorted(path.name for path in desk.server.desk.keeper.place.folder.iterdir()) == kept
    desk.start()
    assert desk.state()[0] == 9
    assert desk.server.desk.keeper.ledger == {0: (1, 8), 1: (1, 8)}
    assert desk.server.desk.keeper.holding.skipped == guarded
    desk.call("go_back", 8, 1)
    equal(desk.state()[1], states[8], states[8])


def full(edge):
    raise OSError(28, "No space left on device")


def test_an_old_order_to_go_back_is_ignored(tmp_path):
    desk = Desk(Sync(), tmp_path)
    for sequence in range(2):
        for trainer in range(2):
            desk.call("push", desk.push(trainer, sequence))
    desk.call("go_back", 1, 5)
    desk.call("go_back", 0, 4)
    assert (desk.state()[0], desk.server.desk.keeper.generation) == (1, 5)
    assert desk.call("push", desk.push(0, 1)).word is ServerWord.STALE


@pytest.mark.parametrize("index", [0, 1])
def test_the_last_version_is_written_whatever_the_durability(tmp_path, index):
    desk = Desk(Sync(), tmp_path, index=index, servers=2, every=100)
    for trainer in range(2):
        desk.call("push", desk.push(trainer, 0))
    if index:
        desk.call("pull", Sender(0, 1), 1, {})
        assert desk.call("end", Sender(0, 1), 1).word is ServerWord.DONE
        assert desk.call("end", Sender(0, 1), 2).word is ServerWord.BEHIND
    else:
        desk.call("push", desk.push(0, 1, ones=False))
        assert desk.call("exchange", desk.push(1, 1, ones=False), {}).word is ServerWord.OVER
    desk.start()
    assert desk.state()[0] == 1


def test_trainers_are_told_that_all_is_over_by_a_first_server_that_came_back(tmp_path):
    desk = Desk(Sync(), tmp_path)
    desk.call("push", desk.push(0, 0, ones=False))
    assert desk.call("exchange", desk.push(1, 0, ones=False), {}).word is ServerWord.OVER
    desk.start()
    desk.call("finish", [1])
    assert desk.call("exchange", desk.push(0, 0, ones=False), {}).word is ServerWord.OVER


# ---------------------------------------------------------------------------- real processes


KILLS = [("server 0", "after apply", 3), ("server 1", "during write", 5), ("trainer 1", "after send", 4)]
STOPS = [("trainer 0", "after send", 3), ("server 1", "before apply", 3)]


def test_real_processes_that_are_killed_and_stopped(tmp_path, ray_here):
    faults = Breaking(tmp_path / "faults", KILLS, dict.fromkeys(MESSAGES, 0.04), stops=STOPS)
    run = real_run(faults)
    assert tally(run.model) == EXACT
    assert all(faults.injected[edge] == 1 for _, edge, _ in [*KILLS[:2], STOPS[1]])
    assert faults.injected["after send"] == 2
    silent = [line for line in run.events if "said nothing for 3 s" in line]
    assert all(any(line.startswith(who.capitalize()) for line in silent) for who, _, _ in STOPS)
    assert nobody_lives(run)


def real_run(faults):
    program, parameters, read = counted(12)
    run = ow.cluster.start(
        program,
        read,
        parameters=parameters,
        servers=2,
        merge=ow.Sum(),
        settings={"faults": faults},
        deadline=3.0,
        restarts=20,
    )
    try:
        return run.wait(120.0)
    finally:
        run.stop()


def nobody_lives(run, seconds=20.0):
    """Whether all processes have ended soon after the training."""
    asked = (*run.supervisor.servers, *run.supervisor.trainers)
    end = time.monotonic() + seconds
    while any(a.answer is not None and os.path.exists(f"/proc/{a.answer.pid}") for a in asked):
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def test_no_thread_of_a_run_is_left(tmp_path):
    run, _ = trained("sync", tmp_path)
    assert not any(t.name == "onward cluster" for t in threading.enumerate())
    assert nothing_is_left(run)
