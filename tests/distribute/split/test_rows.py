"""Embedding tables whose rows travel alone, against one device with the whole table and the whole batch."""

from functools import cache

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.distribute.split.by_hand import ByHand, compared, parts_of

import onward as ow

LONG, WIDE, ROWS = 60, 3, 12
OPTIMIZERS = {
    "sgd": ow.SGD(0.5),
    "momentum": ow.Momentum(0.2),
    "adagrad": ow.Adagrad(0.2),
    "adamw": ow.AdamW(0.05),  # which is Adam with a decay
}


def random(*shape):
    return np.random.default_rng(7).normal(size=shape).astype("float32")


PARAMS = {"table": random(LONG, WIDE), "w": random(WIDE, 2)}


def ids(seed, low=0, high=LONG, shape=(ROWS,), dtype="int32"):
    return np.random.default_rng(seed).integers(low, high, shape).astype(dtype)


def plain(p, ids):
    return jnp.mean((p["table"][ids] @ p["w"]) ** 2)


def each_its_own(lookups):
    """A loss that looks up in one table by each of these, and its parameters."""

    def loss(p, ids):
        return sum(jnp.mean(lookup(p[name], ids) ** 2) for name, lookup in lookups.items())

    return loss, dict.fromkeys(lookups, PARAMS["table"])


def cut_of(optimizer, servers=2, trainers=2, loss=plain, example=None, params=PARAMS, **options):
    example = ids(0) if example is None else example
    part = example[: len(example) // trainers]
    return ow.split(optimizer.minimize(loss, params, part), servers, trainers, **options)


# ---------------------------------------------------------------- as if the whole table travelled


@pytest.mark.parametrize(("optimizer", "servers"), [("momentum", 2), ("adamw", 3)])
def test_a_table_by_rows_equals_one_device(optimizer, servers):
    with jax.enable_x64(True):
        params = {n: x.astype("float64") for n, x in PARAMS.items()}
        rule = OPTIMIZERS[optimizer]
        batches = [(ids(k),) for k in range(8)]
        cut = cut_of(rule, servers, params=params)
        assert [t.parameter.name for t in cut.tables] == ["table"]
        assert sum(s.parameter.name == "table" for own in cut.shards for s in own) == servers
        compared(cut, rule.minimize(plain, params, ids(0)), params, batches, 2, 1e-9, 1e-12)


LOOKUPS = {
    "brackets": (lambda t, i: t[i], 6),
    "take": (lambda t, i: jnp.take(t, i, axis=0), 6),
    "clip": (lambda t, i: jnp.take(t, i, axis=0, mode="clip"), 6),
    "two": (lambda t, i: t[i] + t[(i * 7) % LONG], 12),
    "the same twice": (lambda t, i: t[i] * t[i], 12),
    "fixed": (
        lambda t, i: (
            t[i] + t[np.array([3, 1, 4, 1, 5, 9])][: i.shape[0]]
            if i.shape[0] < 7
            else t[i] + jnp.tile(t[np.array([3, 1, 4, 1, 5, 9])], (2, 1))
        ),
        12,
    ),
    "slices": (lambda t, i: t[i, :], 6),
    "row by row under vmap": (lambda t, i: jax.vmap(lambda j: t[j])(i), 6),
}


def test_ways_to_look_up():
    loss, params = each_its_own({name: lookup for name, (lookup, _) in LOOKUPS.items()})
    cut = cut_of(ow.SGD(0.5), 3, loss=loss, params=params)
    rows = {name: (count, WIDE) for name, (_, count) in LOOKUPS.items()}
    assert {t.parameter.name: t.rows.shape for t in cut.tables} == rows
    whole = ow.SGD(0.5).minimize(loss, params, ids(0))
    compared(cut, whole, params, [(ids(k),) for k in range(3)], 2, 1e-4, 1e-5)


def halved(loss, params, batch):
    """The training Program for a batch, and for half of it."""
    return (ow.SGD(0.5).minimize(loss, params, *(x[:rows] for x in batch)) for rows in (ROWS, ROWS // 2))


OUTSIDE = {
    "brackets": (lambda t, i: t[i], -90, 90, "int32"),
    "row by row under vmap": (lambda t, i: jax.vmap(lambda j: t[j])(i), -90, 90, "int32"),
    "promised": (lambda t, i: t.at[i].get(mode="promise_in_bounds"), -90, 90, "int32"),
    "negative take": (lambda t, i: jnp.take(t, i, axis=0), -LONG, LONG, "int32"),
    "clip": (lambda t, i: t.at[i].get(mode="clip"), -90, 90, "int32"),
    "fill": (lambda t, i: t.at[i].get(mode="fill", fill_value=0.5), -90, 90, "int32"),
    "fill bytes": (lambda t, i: t.at[i].get(mode="fill", fill_value=0.5), 0, 90, "uint8"),
    "take fills nan": (lambda t, i: jnp.nan_to_num(jnp.take(t, i, axis=0), nan=2.0), -90, 90, "int8"),
    "unsigned": (lambda t, i: t[i], 0, LONG, "uint32"),
}


def test_row_numbers_outside_of_the_table():
    def loss(p, *ids):
        return sum(
            jnp.mean(lookup(p[name], i) ** 2)
            for (name, (lookup, *_)), i in zip(OUTSIDE.items(), ids, strict=True)
        )

    params = dict.fromkeys(OUTSIDE, PARAMS["table"])
    batches = [
        tuple(ids(k, low, high, dtype=dtype) for _, low, high, dtype in OUTSIDE.values()) for k in range(3)
    ]
    assert all(min(b[n].min() for b in batches) < 0 or c[1] == 0 for n, c in enumerate(OUTSIDE.values()))
    whole, half = halved(loss, params, batches[0])
    cut = ow.split(half, 3, 2)
    assert len(cut.tables) == len(OUTSIDE)
    compared(cut, whole, params, batches, 2, 1e-4, 1e-5)


def test_bytes_are_asked_for_as_they_are_in_a_table_with_more_rows_than_they_count():
    """The functions of ``jax.numpy`` make int32 of them, ``lax.gather`` does not."""
    rows = jax.lax.GatherDimensionNumbers((1,), (0,), (0,))

    def loss(p, ids):
        return jnp.mean(jax.lax.gather(p["table"], ids[:, None], rows, (1, WIDE), mode="clip") ** 2)

    params, batch = {"table": random(300, WIDE)}, np.array([3, 255, 60, 44], "uint8")
    hand = ByHand(cut_of(ow.SGD(0.5), loss=loss, example=batch, params=params), params)
    [found] = hand.looked_up({"ids": batch[:2]})
    assert set(found.rows) == {3, 255}


SHAPES = {
    "a vector": ((LONG,), (ROWS,)),
    "pages": ((LONG, 2, 3), (ROWS,)),
    "sentences": ((LONG, WIDE), (ROWS, 3)),
}


@pytest.mark.parametrize("lazy", [(), tuple(SHAPES)])
def test_tables_of_all_ranks(lazy):
    params = {name: random(*table) for name, (table, _) in SHAPES.items()}
    batches = [tuple(ids(k, shape=shape) for _, shape in SHAPES.values()) for k in range(3)]

    def loss(p, *ids):
        return sum(jnp.mean(p[name][i] ** 2) for name, i in zip(SHAPES, ids, strict=True))

    whole, half = halved(loss, params, batches[0])
    cut = ow.split(half, 2, 2, lazy=lazy)
    assert len(cut.tables) == len(SHAPES)
    compared(cut, whole, params, batches, 2, 1e-4, 1e-5)


def test_a_table_in_flax():
    module = nn.Embed(LONG, WIDE)
    params = module.init(jax.random.key(0), ids(0))

    def loss(p, i):
        return jnp.mean(module.apply(p, i) ** 2)

    cut = cut_of(ow.SGD(0.5), loss=loss, params=params)
    assert [t.parameter.name for t in cut.tables] == ["params/embedding"]
    compared(cut, ow.SGD(0.5).minimize(loss, params, ids(0)), params, [(ids(1),)], 2, 1e-4, 1e-5)


def test_an_embedding_of_equinox():
    module = eqx.nn.Embedding(LONG, WIDE, key=jax.random.key(0))

    def loss(m, i):
        return jnp.mean(jax.vmap(m)(i) ** 2)

    cut = cut_of(ow.SGD(0.5), loss=loss, params=module)
    compared(cut, ow.SGD(0.5).minimize(loss, module, ids(0)), module, [(ids(1),)], 2, 1e-4, 1e-5)


MOVED = {
    "brackets": (lambda t, i: t[i], [2, 3]),
    "fill": (lambda t, i: t.at[i].get(mode="fill", fill_value=0.0), [2, 3]),
    "clip": (lambda t, i: t.at[i].get(mode="clip"), [0, 2, 3, LONG - 1]),
    "both": (lambda t, i: t[i] + t.at[i].get(mode="clip"), [0, 2, 3, LONG - 1]),
}


def test_a_lazy_update_leaves_the_row_nearest_to_a_padding_id_alone_unless_it_is_told_to_clip():
    """Momentum goes on moving a row whose gradient is zero, once it has moved."""
    loss, params = each_its_own({name: read for name, (read, _) in MOVED.items()})
    hand = ByHand(cut_of(ow.Momentum(0.2), 1, 1, loss, params=params, lazy=tuple(MOVED)), params)
    hand.step([{"ids": np.tile(np.array([0, LONG - 1], "int32"), ROWS // 2)}])
    before = {name: hand.whole(name) for name in MOVED}
    hand.step([{"ids": np.tile(np.array([3, LONG, 2, -LONG - 1], "int32"), ROWS // 4)}])
    for name, (_, moved) in MOVED.items():
        assert list(np.flatnonzero((hand.whole(name) != before[name]).any(1))) == moved, name


# ---------------------------------------------------------------- what is not a table

WHOLE = {
    "tied": lambda t, i: t[i] @ t.T @ t,
    "read elsewhere": lambda t, i: t[i] + jnp.mean(t),
    "one hot": lambda t, i: jax.nn.one_hot(i, LONG) @ t,
    "columns": lambda t, i: t.T[:, i].T,
    "many rows": lambda t, i: jnp.mean(t[(i[:, None] + np.arange(20)) % LONG], axis=1),
    "places from parameters": lambda t, i: t[(i + t.shape[0] * (t[0, 0] > 0).astype(i.dtype)) % LONG],
    "in a loop": lambda t, i: jax.lax.scan(lambda c, j: (c, t[j]), 0, i)[1],
}


def test_what_travels_whole():
    loss, params = each_its_own(WHOLE)
    cut = cut_of(ow.SGD(0.01), loss=loss, params=params)
    assert ([t.parameter.name for t in cut.tables], cut.places) == ([], None)
    whole = ow.SGD(0.01).minimize(loss, params, ids(0))
    compared(cut, whole, params, [(ids(k),) for k in range(2)], 2, 1e-4, 1e-5)


def test_a_table_whose_rows_another_parameter_chooses_travels_whole():
    def loss(p, ids):
        return plain(p, (ids + (p["w"][0, 0] > 0)) % LONG)

    assert cut_of(ow.SGD(0.5), loss=loss).tables == ()


def test_rows_can_be_declined():
    cut = cut_of(ow.SGD(0.5), rows=False)
    assert cut.tables == ()
    whole = ow.SGD(0.5).minimize(plain, PARAMS, ids(0))
    compared(cut, whole, PARAMS, [(ids(k),) for k in range(2)], 2, 1e-4, 1e-5)


def test_a_frozen_table_stays_with_the_trainer():
    program = ow.SGD(0.1).minimize(plain, PARAMS, ids(0), parameter_list=["w"])
    cut = ow.split(program, 2)
    assert cut.tables == ()
    assert [v.name for v in cut.trainer.state] == ["table"]


def test_a_returned_table_travels_whole():
    program = ow.SGD(0.1).minimize(lambda p, i: (plain(p, i), p["table"]), PARAMS, ids(0), has_aux=True)
    assert ow.split(program, 2).tables == ()


# ---------------------------------------------------------------- lazy

SLOTS = {"sgd": (), "momentum": ("velocity",), "adagrad": ("sum",), "adamw": ("mean", "variance")}


@cache
def rule_on_rows(name, rows):
    """The plain rule as a Program for a table of so many rows whose gradient is fed."""
    like = jnp.zeros((rows, WIDE))
    program = OPTIMIZERS[name].minimize(lambda w, g: jnp.sum(w * g), like, like)
    return ow.compile(program)


gradients = jax.jit(jax.grad(plain))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_lazy_updates_touch_the_rows_that_were_looked_up_and_no_others(optimizer):
    cut = cut_of(OPTIMIZERS[optimizer], 2, lazy=["table"])
    hand = ByHand(cut, PARAMS)
    names = ("", *(f"/{slot}" for slot in SLOTS[optimizer]))
    for k in range(4):
        some = np.random.default_rng(k).permutation(LONG).astype("int32")[:9]
        batch = np.concatenate([some, some[:3]])
        before = {n: hand.whole("table", n) for n in names}
        params = hand.parameters()
        hand.step([{"ids": part} for [part] in parts_of([batch], 2)])
        after = {n: hand.whole("table", n) for n in names}
        touched = np.sort(some)
        others = np.setdiff1d(np.arange(LONG), touched)
        for n in names:
            assert after[n][others].tobytes() == before[n][others].tobytes()
        gradient = np.asarray(gradients(params, batch)["table"])[touched]
        step = rule_on_rows(optimizer, len(touched))
        state = step.init(before[""][touched]).replace(
            {"step": k, **{f"w{n}": before[n][touched] for n in names if n}}
        )
        state, _ = step(state, gradient)
        for n in names:
            np.testing.assert_allclose(after[n][touched], state[f"w{n}"], 1e-4, 1e-6, err_msg=n)
        assert (abs(after[""] - before[""])[touched] > 1e-6).any(1).all()


def test_lazy_and_dense_differ_where_the_rule_has_slots():
    lazy, dense = (ByHand(cut_of(ow.Momentum(0.2), lazy=names), PARAMS) for names in (["table"], ()))
    for hand in (lazy, dense):
        for k in range(3):
            hand.step([{"ids": part} for [part] in parts_of([ids(k)], 2)])
    assert abs(lazy.whole("table") - dense.whole("table")).max() > 1e-3


@pytest.mark.parametrize("options", [{"maximize": True}, {"groups": [ow.Group("*", maximize=True)]}])
def test_a_lazy_update_uphill_is_one_downhill_on_the_negative(options):
    ways = (ow.Momentum(0.2, **options), plain), (ow.Momentum(0.2), lambda p, i: -plain(p, i))
    hands = [ByHand(cut_of(rule, loss=loss, lazy=["table"]), PARAMS) for rule, loss in ways]
    for k in range(2):
        for hand, name in zip(hands, ("ids", "i"), strict=True):
            hand.step([{name: part} for [part] in parts_of([ids(k)], 2)])
    for name in PARAMS:
        np.testing.assert_allclose(hands[0].whole(name), hands[1].whole(name), 1e-5, 1e-6)


class Counting(ow.Optimizer):
    """Gradient descent that counts its steps in a slot without rows."""

    learning_rate: float = 0.5

    def init(self, parameter):
        return {"count": jnp.zeros(())}

    def update(self, parameter, gradient, slots):
        return parameter - self.learning_rate * gradient, {"count": slots["count"] + 1}


def test_a_slot_without_rows_is_updated_whole():
    counting, descent = (ByHand(cut_of(rule, lazy=["table"]), PARAMS) for rule in (Counting(), ow.SGD(0.5)))
    for hand in (counting, descent):
        hand.step([{"ids": part} for [part] in parts_of([ids(0)], 2)])
    np.testing.assert_array_equal(counting.whole("table"), descent.whole("table"))
    assert [x for s in counting.states for n, x in s.items() if n.endswith("/count")] == [1, 1, 1]


def test_lazy_tables_are_those_that_are_named():
    params = {"one": PARAMS["table"], "two": PARAMS["table"], "w": PARAMS["w"]}

    def loss(p, i):
        return jnp.mean(((p["one"][i] * p["two"][i]) @ p["w"]) ** 2)

    cut = cut_of(ow.AdamW(0.05), loss=loss, params=params, lazy=["two"])
    assert ([t.parameter.name for t in cut.tables], cut.lazy) == (["one", "two"], {"two"})
    hand = ByHand(cut, params)
    hand.step([{"i": part} for [part] in parts_of([ids(0)], 2)])
    others = np.setdiff1d(np.arange(LONG), ids(0))
    assert (hand.whole("one")[others] != PARAMS["table"][others]).all()
    assert (hand.whole("two")[others] == PARAMS["table"][others]).all()


@pytest.mark.parametrize("lazy", [(), ("table",)])
def test_a_trainer_without_a_batch_sends_no_rows(lazy):
    cut = cut_of(ow.SGD(0.5), 2, 2, lazy=lazy)
    hand = ByHand(cut, PARAMS)
    part = ids(0)[:6]
    hand.step([None, {"ids": part}], (0.0, 1.0))
    gradient = gradients(PARAMS, part)
    for name, value in hand.parameters().items():
        np.testing.assert_allclose(value, PARAMS[name] - 0.5 * gradient[name], 1e-5, 1e-6)


@pytest.mark.parametrize("lazy", [(), ("table",)])
@pytest.mark.parametrize("count", [0, 1, 200])
def test_servers_for_other_numbers_of_rows(lazy, count):
    cut = cut_of(ow.Adam(0.5), 2, 2, lazy=lazy)
    for i in range(2):
        part = cut.server_part(i, {"table": count})
        assert {at.shape for trainer in part.rows for at, _ in trainer} == {(count,)}
        assert [v.name for v in part.program.state] == [v.name for v in cut.servers[i].state]


def test_data_of_another_length():
    cut = cut_of(ow.SGD(0.5), 2, 2)
    for n in (1, 9, 300):
        other = cut.at([np.zeros(n, "int32")])
        assert [t.rows.shape for t in other.tables] == [(n, WIDE)]
        assert [v.name for v in other.trainer.inputs] == [v.name for v in cut.trainer.inputs]
        assert [v.name for v in other.trainer.outputs] == [v.name for v in cut.trainer.outputs]
        assert [len(p.tables) for p in other.server_parts] == [len(p.tables) for p in cut.server_parts]
        if n == 9:
            continue
        batches = [(ids(k, shape=(2 * n,)),) for k in range(2)]
        whole = ow.SGD(0.5).minimize(plain, PARAMS, batches[0][0])
        compared(other, whole, PARAMS, batches, 2, 1e-4, 1e-5)
