"""By what a training is known again: a sentence for each thing that differs, and none for what does not."""

import json
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import onward as ow
from onward.execute.fingerprints import FINGERPRINTS, differences, of_program, of_reader, of_training

ROOT = Path(__file__).parents[2]
X = np.random.default_rng(0).normal(size=(24, 4)).astype("float32")
Y = X.sum(1, keepdims=True)
TABLE = np.eye(4, dtype="float32")


def network(act=jax.nn.relu, rate=0.5, table=TABLE, name=None, layers=1):
    def net():
        h = ow.data("x", (None, 4)) @ table
        for i in range(layers):
            h = ow.layer.dropout(act(ow.layer.fc(h, 6, name=f"hidden{i}")), rate, name=name)
        return ow.layer.mse(ow.layer.fc(h, 1, name="last"), ow.data("y", (None, 1)))

    return net


def looped(step):
    def net():
        h = jax.lax.fori_loop(0, 3, lambda i, h: step(h), ow.data("x", (None, 4)))
        return ow.layer.mse(ow.layer.fc(h, 1), ow.data("y", (None, 1)))

    return net


def program(make, batch=8):
    return of_program(ow.trace(make, feed={"x": X[:batch], "y": Y[:batch]}))


def decaying(n):
    return 0.1 / (1 + jnp.sqrt(n))


def decaying_faster():
    def decaying(n):
        return 0.1 / (1 + n)

    return decaying


decaying_faster = decaying_faster()
decaying_faster.__qualname__ = "decaying"


def training(optimizer):
    return of_training(optimizer.minimize(lambda w, x: jnp.sum(w["a"] * w["b"] * x), *PARAMETERS))


PARAMETERS = {"a": jnp.ones(2), "b": jnp.ones(2)}, jnp.ones(2)


def reader(count=24, batch=8, **options):
    return of_reader(ow.batches((X[:count], Y[:count]), batch, **options))


def sentence(was, now):
    """The one sentence about what differs, whichever of both was first; none: None."""
    (here, back) = differences(was, now), differences(now, was)
    assert len(here) == len(back) <= 1
    return here[0] if here else None


# ---------------------------------------------------------------------------- the network

RELU = r"relu = relu\(hidden0\)"
NETWORKS = {
    "another activation": (network(jnp.tanh), rf"it was {RELU}, it is tanh = tanh\(hidden0"),
    "another rate": (network(rate=0.25), r"bernoulli\(dropout_0/random_fold_in, 0.5\), it is .*, 0.75\)"),
    "another constant": (network(table=2 * TABLE), r"it was \S+ = constant\(\), it is "),
    "one layer more": (network(layers=2), "it was last/dot_general = "),
    "a custom activation": (network(jax.nn.silu), f"it was {RELU}"),
}


@pytest.mark.parametrize("which", NETWORKS)
def test_another_network_is_told_where_it_parts(which):
    make, words = NETWORKS[which]
    was = {"jax": "1", "program": program(network())}
    for batch in (8, 16):
        now = {"jax": "1", "program": program(make, batch)}
        (told,) = differences(was, now)
        assert sentence(was, now) is not None
        assert told.startswith("The network computes otherwise: it was ")
        assert re.search(words, told)


def test_what_lies_within_a_loop_is_looked_at():
    was, now = ({"jax": "1", "program": program(looped(f))} for f in (jnp.sin, jnp.cos))
    assert re.search(r"sin\(.*, within ", sentence(was, now))


def test_names_lengths_of_a_batch_and_another_trace_are_no_difference():
    was = {"jax": "1", "program": program(network())}
    assert was["program"] == program(network())
    for make, batch in (
        (network(), 16),
        (network(), 3),
        (network(name="other"), 8),
        (network(name="other"), 2),
    ):
        assert sentence(was, {"jax": "1", "program": program(make, batch)}) is None


def test_another_jax_is_told_with_the_difference():
    was, now = ({"jax": str(i), "program": program(network(f))} for i, f in enumerate((jnp.sin, jnp.cos)))
    assert "It was saved under JAX 0, this is JAX 1, which may trace one function in two ways" in sentence(
        was, now
    )


# ---------------------------------------------------------------------------- optimizer, schedule, reader

adopted = ow.from_optax
ADAM = ow.Adam(0.01)
COSINE = ow.SGD(ow.schedule.cosine(0.1, steps=9))
OPTIMIZERS = [
    (ow.Momentum(0.1), ow.Momentum(0.1, nesterov=True), "is another: nesterov was not given, is True."),
    (ADAM, ow.SGD(0.01), "The optimizer is another: it was Adam, it is SGD."),
    (ADAM, ow.Adam(0.01, rules=[ow.ClipByGlobalNorm(1.0)]), "rules/0 was not given, is ClipByGlobalNorm"),
    (ADAM, ow.Adam(0.01, groups=[ow.Group("b", frozen=True)]), r"groups/0 .*, is Group\(b, frozen\)"),
    (ow.SGD(decaying), COSINE, r"learning_rate was decaying, is cosine\(0.1, steps=9\)"),
    (ow.SGD(ow.schedule.cosine(0.1, steps=8)), COSINE, r"steps=8\), is cosine"),
    (ow.SGD(decaying), ow.SGD(decaying_faster), "schedule of learning_rate computes otherwise than the"),
    (adopted(optax.sgd(0.1)), adopted(optax.sgd(0.2)), r"from_optax\(scale\) computes otherwise: a learning"),
    (
        adopted(optax.sgd(0.1)),
        adopted(optax.lion(0.1)),
        r"was from_optax\(scale\), it is from_optax\(scale_by_l",
    ),
]


def grouped(rate):
    return ow.SGD(0.1, groups=[ow.Group("b", learning_rate=rate)], rules=[ow.WeightDecay(rate)])


SAME = [
    (ADAM, ow.Adam(0.5, beta1=0.5)),
    (ow.SGD(decaying), ow.SGD(decaying)),
    (grouped(0.1), grouped(0.2)),
    (adopted(optax.adam(0.1)), adopted(optax.adam(0.1))),
    (adopted(optax.inject_hyperparams(optax.sgd)(0.1)), adopted(optax.inject_hyperparams(optax.sgd)(0.2))),
]


def test_another_optimizer_or_schedule_is_told():
    for was, now, words in OPTIMIZERS:
        assert re.search(words, differences(training(was), training(now))[0])
        assert sentence(training(was), training(now))


def test_numbers_that_are_state_are_no_difference():
    for was, now in SAME:
        assert sentence(training(was), training(now)) is None, (was, now)


@pytest.mark.parametrize(
    ("now", "words"),
    [
        ({"batch": 6}, "batch_size was 8, is 6; batches was 3, is 4"),
        ({"count": 12}, "examples was 24, is 12; batches was 3, is 2"),
        ({"shuffle": True}, "shuffle was False, is True"),
        ({"seed": 3}, "seed was 0, is 3"),
    ],
)
def test_another_reader_is_told(now, words):
    assert sentence({"reader": reader()}, {"reader": reader(**now)}) == f"The reader is another: {words}."
    assert sentence({"reader": reader()}, {"reader": reader()}) is None


# ---------------------------------------------------------------------------- over processes and checkpoints


def everything():
    optimizer = ow.Adam(decaying, rules=[ow.ClipByGlobalNorm(1.0)], groups=[ow.Group("b", ow.SGD(0.1))])
    return json.dumps([program(network(jax.nn.gelu)), training(optimizer), reader()])


def test_another_process_with_another_hash_seed_finds_the_same():
    code = "from tests.execute.test_fingerprints import everything; print(everything())"
    told = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHONHASHSEED": "7", "JAX_PLATFORMS": "cpu"},
    )
    assert told.stdout.strip() == everything()


def test_every_jax_finds_the_same():
    assert program(network(jax.nn.gelu))["digest"] == "dc353ff4df9cb34a"


def trainer(act=jax.nn.relu, optimizer=ADAM):
    return ow.Trainer(ow.Model(network(act), seed=1), optimizer)


def read(batch=8):
    return ow.batches((X, Y), batch)


def test_a_checkpoint_says_what_differs_unless_it_is_of_an_older_release(tmp_path):
    first = trainer()
    first.train(read(), progress=False)
    path = first.checkpoint(tmp_path)
    found = ow.Checkpoints(tmp_path).load()
    old = {name: x for name, x in found.extra.items() if name in ("epoch", "batch", "begun", "position")}
    with ow.Checkpoints(tmp_path / "old") as older:
        older.save(found.arrays, 3, extra=old)
    assert len(json.dumps(found.extra[FINGERPRINTS])) < 3000
    changed = trainer(jnp.tanh, ow.Adam(0.01, maximize=True))
    with pytest.warns(UserWarning, match="restored") as caught:
        report = changed.restore(tmp_path)
    network_, optimizer_ = report.differences
    assert (report.kept, report.left, report.changed) == ((), (), ())
    assert re.search(r"relu\(.*tanh\(", network_)
    assert "maximize was not given, is True" in optimizer_
    assert [str(w.message) for w in caught] == [f"{path}: {report}."]
    with pytest.warns(UserWarning, match="The reader is another: batch_size was 8, is 6"):
        changed.train(read(6), epochs=2, progress=False)
    before = np.array(changed["last/w"])
    with pytest.raises(ow.CheckpointError, match=r"computes otherwise.*strict=True"):
        changed.restore(tmp_path, strict=True)
    assert (changed["last/w"] == before).all()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert changed.restore(tmp_path, strict=False).differences == report.differences
        changed.train(read(6), epochs=2, progress=False)
        assert changed.restore(tmp_path / "old").differences == ()
        changed.train(read(6), epochs=2, progress=False)
        same = trainer(optimizer=ow.Adam(0.01))
        same.restore(tmp_path, strict=True)
        same.train(read(), epochs=2, progress=False)
    same.restore(tmp_path, strict=True)
    with pytest.raises(ow.CheckpointError, match="The reader is another"):
        same.train(read(6), progress=False)
