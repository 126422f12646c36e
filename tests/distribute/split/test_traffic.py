"""What ``plan`` says that a Split sends and keeps, against the arrays that travel and lie there."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.distribute.split.by_hand import ByHand, parts_of, shaped
from tests.pairs import pairs

import onward as ow

LONG, WIDE = 60, 5


def random(*shape):
    return np.random.default_rng(3).normal(size=shape).astype("float32")


def ids(seed, rows=12):
    return np.random.default_rng(seed).integers(0, LONG, rows).astype("int32")


PARAMS = {"table": random(LONG, WIDE), "pages": random(LONG, 2, 3), "w": random(WIDE, 7), "b": random(7)}
HALF = {n: jnp.asarray(x, "bfloat16") for n, x in PARAMS.items()}


def loss(p, i):
    both = jnp.mean((p["table"][i] @ p["w"] + p["b"]) ** 2) + jnp.mean(p["pages"][(i * 7) % LONG] ** 2)
    return both.astype("float32")


def network():
    x = ow.data("x", (None, 6))
    return jnp.mean(ow.layer.fc(ow.layer.dropout(ow.layer.batch_norm(x), 0.5), 2))


def cut_of(servers, trainers, params=PARAMS, optimizer=None, **options):
    optimizer = optimizer or ow.Momentum(0.1)
    return ow.split(optimizer.minimize(loss, params, ids(0, 12 // trainers)), servers, trainers, **options)


# ---------------------------------------------------------------- against what travels


OPTIONS = {
    "plain": {"optimizer": ow.Adam(0.1)},
    "lazy": {"lazy": "table"},
    "no rows": {"rows": False},
    "half": {"params": HALF},
}


@pytest.mark.parametrize(("options", "servers", "trainers"), pairs(OPTIONS, (1, 2, 3), (1, 2)))
def test_bytes_are_those_of_the_arrays_that_travel(options, servers, trainers):
    cut = cut_of(servers, trainers, **OPTIONS[options])
    told, hand = ow.plan(cut), ByHand(cut, OPTIONS[options].get("params", PARAMS), run=shaped)
    for k in range(2):
        hand.step([{"i": part} for [part] in parts_of([ids(k)], trainers)])
        for t in range(trainers):
            for i in range(servers):
                touched = hand.touched[t][i]
                assert told.up(i, touched) == hand.up[t][i]
                assert told.down(i, touched) == hand.down[t][i]
                assert told.asked(i, touched) == hand.asked[t][i]
            assert bool(sum(sum(x.values()) for x in hand.touched[t])) == (options != "no rows")


@pytest.mark.parametrize("servers", [1, 2])
def test_carried_state_goes_to_and_from_the_first_server(servers):
    cut = ow.split(ow.SGD(0.1).minimize(ow.trace(network, batch_size=4)), servers, 2)
    told, hand = ow.plan(cut), ByHand(cut)
    hand.step([{"x": random(4, 6)}] * 2)
    for i in range(servers):
        assert [told.up(i)] * 2 == [hand.up[t][i] for t in range(2)]
        assert [told.down(i)] * 2 == [hand.down[t][i] for t in range(2)]
    key = jax.random.key_data(jax.random.key(0)).nbytes
    parameters = 4 * sum(int(np.prod(p.shape)) for p in cut.source.parameters)
    rate = 4 * (servers - 1)
    assert told.pushed == parameters + key + 2 * 6 * 4 + rate
    assert told.pulled == parameters + key + 2 * 6 * 4 + (4 if servers > 1 else 0)


@pytest.mark.parametrize("servers", [1, 2, 3])
@pytest.mark.parametrize(
    "optimizer",
    [ow.SGD(0.1), ow.Adam(lambda step: 0.1 / (step + 1))],
    ids=["sgd", "scheduled adam"],
)
def test_what_is_kept_takes_that_memory(servers, optimizer):
    cut = cut_of(servers, 2, optimizer=optimizer)
    told, hand = ow.plan(cut), ByHand(cut, PARAMS)
    for one, state in zip(told.servers, hand.states, strict=True):
        assert one.kept == sum(x.nbytes for x in state.values())
    whole = sum(x.nbytes for x in PARAMS.values())
    assert sum(s.parameters for s in told.servers) == whole
    sizes = [s.kept for s in told.servers]
    assert told.kept == sum(sizes)
    assert told.balance == pytest.approx(max(sizes) / np.mean(sizes))
    assert 1 <= told.balance < 1.2


# ---------------------------------------------------------------- closed forms


def test_bytes_of_what_travels_whole():
    w = random(100)
    program = ow.SGD(0.1).minimize(lambda w, x: jnp.mean(x @ w), w, random(8, 100))
    one, three = (ow.plan(ow.split(program, n)) for n in (1, 3))
    assert (one.pushed, one.pulled, one.balance) == (400, 400, 1.0)
    assert (three.pushed, three.pulled) == (400 + 2 * 4, 400 + 4)
    assert [(s.told, s.tells) for s in three.servers] == [(0, 4), (4, 0), (4, 0)]
    assert [s.state for s in three.servers] == [8, 0, 0]


@pytest.mark.parametrize(("params", "width"), [(PARAMS, 4), (HALF, 2)])
def test_bytes_are_in_proportion_to_the_rows_touched(params, width):
    told = ow.plan(cut_of(2, 1, params))
    of = {r.table: (i, r) for i, s in enumerate(told.servers) for r in s.tables}
    assert sum(r.rows for s in told.servers for r in s.tables) == 2 * LONG
    for name, numbers in (("table", WIDE), ("pages", 6)):
        i, row = of[name]
        assert (row.pushed, row.pulled) == (4 + width * numbers,) * 2
        for count in (0, 1, 10):
            assert told.up(i, {name: count}) - told.up(i) == count * (4 + width * numbers)
            assert told.down(i, {name: count}) - told.down(i) == count * (4 + width * numbers)
            assert told.asked(i, {name: count}) == 4 * count


def test_tables_add_up():
    told = ow.plan(cut_of(1, 1))
    assert told.up(0, {"table": 2, "pages": 3}) == told.pushed + 2 * (4 + 4 * WIDE) + 3 * (4 + 4 * 6)


# ---------------------------------------------------------------- refusals and text


def test_rows_of_a_table_that_is_not_there():
    with pytest.raises(ow.UnknownNameError, match=r"Of 'tabel' no rows travel to or from server 0.*'table'"):
        ow.plan(cut_of(1, 1)).up(0, {"tabel": 1})
    with pytest.raises(ow.UnknownNameError, match="Of 'w' no rows travel to or from server 0"):
        ow.plan(cut_of(1, 1)).down(0, {"w": 1})


def test_a_plain_program_is_told_of_both():
    with pytest.raises(
        ow.GraphError, match=r"plan\(replicate\(program, devices\)\), or split it: plan\(split"
    ):
        ow.plan(ow.SGD(0.1).minimize(loss, PARAMS, ids(0)))


TEXT = """\
Traffic of lambda: 2 servers, 1 trainer; each trainer sends 12.0 KiB and gets 12.0 KiB at a step

server     keeps  parameters     state  from a trainer  to a trainer
0       12.0 KiB     6.0 KiB   6.0 KiB         6.0 KiB       6.0 KiB
1       12.0 KiB     6.0 KiB   6.0 KiB         6.0 KiB       6.0 KiB
all     24.0 KiB    12.0 KiB  12.0 KiB        12.0 KiB      12.0 KiB  the largest keeps 1.00 of the mean"""


def test_the_text():
    program = ow.Momentum(0.1).minimize(lambda w, x: jnp.mean(x @ w), random(64, 48), random(8, 64))
    assert str(ow.plan(ow.split(program, 2))) == TEXT


def test_the_text_lists_tables():
    lines = str(ow.plan(cut_of(2, 3))).splitlines()
    assert lines[0].startswith("Traffic of loss: 2 servers, 3 trainers; each trainer sends ")
    assert lines[0].endswith(" at a step, and rows")
    head = next(k for k, line in enumerate(lines) if line.startswith("by rows"))
    names = [str(s) for own in cut_of(2, 3).shards for s in own if s.parameter.name in ("table", "pages")]
    assert sorted(line.split()[0] for line in lines[head + 1 :]) == sorted(names)
