"""Trainings and tests over two processes: one model of all, the numbers of all, errors of all."""

import json

import numpy as np
import pytest
from tests.execute.test_processes import launch

SCRIPT = """
import json, os, sys, time, warnings
import jax, jax.numpy as jnp, numpy as np, onward as ow

folder, index, told = sys.argv[1], jax.process_index(), {}
W, X = np.ones((3, 2), "float32"), np.arange(24, dtype="float32").reshape(8, 3) / 24

def loss(w, x):
    return jnp.mean((x @ w) ** 2)

def attempt(name, work):
    try:
        told[name] = work()
    except Exception as error:
        told[name] = f"{type(error).__name__}: {error}"

def two(w, x, y):
    return jnp.mean(x @ w), {"other": jnp.mean(y)}

def made(**options):
    return ow.Trainer(ow.Model(ow.trace(loss, W, X[:4]), W), ow.SGD(0.1), **options)

attempt("train", lambda: made(checkpoints=folder).train(ow.batches((X,), 4), progress=False))
attempt("update", lambda: made(devices=1).update(X[:4]))
over_all = jax.NamedSharding(jax.make_mesh((2,), ("data",)), jax.P("data"))
laid = jax.make_array_from_process_local_data(over_all, X[:4] + index)
attempt("laid by hand", lambda: float(made().update(laid).loss))

# A test: a reader that fails in one process, and then one of a share, no share, and no share of anybody.
shared = ow.Trainer(ow.Model(ow.trace(loss, W, X[:4]), W), ow.SGD(0.1), devices=None)

def broken():
    yield (X[:2],)
    if index:
        raise OSError("bad file")
    yield (X[2:4],)

attempt("broken", lambda: shared.test(broken))
attempt("broken at once", lambda: shared.test(map(int, ["one"])) if index else shared.test(broken))
attempt("after it", lambda: shared.test([(X[5 * index : 5 + 3 * index],)]))
attempt("no share", lambda: shared.test([] if index else [(X[:5],), (X[5:],)]))
attempt("only empty ones", lambda: shared.test([(X[:0],)] if index else [(X[:5],), (X[5:],)]))
attempt("none", lambda: shared.test([]))
attempt("all empty", lambda: shared.test([(X[:0],)]))
shares = [(X,)] if index else []
attempt("in training", lambda: shared.train([(X[:4],)], test=shares, progress=False)["test_loss"].tolist())

def texts(w, t, m):
    errors = w[t] ** 2 * m
    mean = jnp.sum(errors) / jnp.sum(m)
    return mean, {"tokens": jnp.sum(m), "worst": jnp.max(errors), "rows": jnp.mean(errors.sum(1) / m.sum(1)),
                  "by length": jnp.mean(errors)}

def text(rows, length, seed):
    rng = np.random.default_rng(seed)
    counts = np.arange(length) < rng.integers(1, length, (rows, 1))
    return rng.integers(0, 7, (rows, length)), counts.astype("float32")

vector = np.arange(7, dtype="float32") / 7
lengths = [[(4, 8, 0), (3, 9, 1), (1, 4, 2)], [(2, 5, 3)]]
mine = [text(*of) for of in lengths[index]]
evaluator = ow.Evaluator(ow.Model(ow.trace(texts, vector, *text(4, 6, 4), has_aux=True), vector))
with warnings.catch_warnings(record=True) as found:
    warnings.simplefilter("always")
    attempt("texts", lambda: evaluator.test(mine))
told["warned of"] = [str(warning.message) for warning in found]
t, m = (np.concatenate([np.pad(x[i], ((0, 0), (0, 9 - x[i].shape[1])))
        for x in (text(*of) for of in sum(lengths, []))]) for i in range(2))
loss_of_all, aux = texts(vector, t, m)
told["of all"] = {"loss": float(loss_of_all), **{name: float(x) for name, x in aux.items()}}
loose = ow.Evaluator(ow.Model(ow.trace(two, W, X, X, has_aux=True), W))
attempt("other data", lambda: loose.test([{"x": X, "y": X} if index else {"x": X}]))
factor = np.float32(1 + index)
other = ow.Model(ow.trace(lambda w, x: factor * loss(w, x), W, X), W)
attempt("other networks", lambda: ow.Evaluator(other).test([(X,)]))

# The last one, for no step goes on after it: one process alone.
os.environ["ONWARD_DEADLINE"] = "1"
if index == 0:
    attempt("alone", lambda: shared.test([(X,)]))
    attempt("afterwards", lambda: shared.test([(X,)]))
    open(f"{folder}/over", "w").close()
until = time.monotonic() + 60
while index and not os.path.exists(f"{folder}/over") and time.monotonic() < until:
    time.sleep(0.05)

with open(f"{folder}/{index}.json", "w") as file:
    json.dump(told, file)
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """What each of two processes tells."""
    folder = tmp_path_factory.mktemp("told")
    script = folder / "script.py"
    script.write_text(SCRIPT)
    status, said = launch(script, folder, "-n", "2", "--devices", "1", "--deadline", "10")
    assert status == 0, said
    return [json.loads((folder / f"{index}.json").read_text()) for index in range(2)]


def test_a_trainer_of_one_device_does_not_train_in_each_of_several_processes(told):
    for of_one in told:
        for name in ("train", "update"):
            assert of_one[name].startswith("ArgumentError: This is one of 2 processes of one computation")
            assert "write Trainer(..., devices=None)" in of_one[name]
        assert of_one["laid by hand"] == told[0]["laid by hand"]
        assert isinstance(of_one["laid by hand"], float)


WHOLE = pytest.approx(float(np.mean((np.arange(24).reshape(8, 3) / 24 @ np.ones((3, 2))) ** 2)), rel=1e-6)


def test_an_error_in_the_test_of_one_process_is_one_in_all_and_they_can_go_on(told):
    ended = "PeerError: An error in process 1 ended the {}test of loss, which needs all of them: {}"
    assert told[1]["broken"] == "OSError: bad file"
    assert told[0]["broken"].startswith(ended.format("numbers of the ", "OSError: bad file. Mend it there."))
    assert told[1]["broken at once"].startswith("ValueError: invalid literal")
    assert told[0]["broken at once"].startswith(ended.format("", "ValueError: invalid literal"))
    assert all(of_one["after it"] == {"loss": WHOLE} for of_one in told)


def test_a_process_without_a_test_batch_has_a_part_of_0(told):
    for of_one in told:
        assert of_one["no share"] == of_one["only empty ones"] == {"loss": WHOLE}
        assert of_one["in training"] == [pytest.approx(of_one["in training"][0])]
        assert of_one["none"].startswith("ArgumentError: The test reader yielded no batch. If it can be")
        assert "the reader has no example: all batches are empty" in of_one["all empty"]
    assert told[0]["in training"] == told[1]["in training"]


def test_numbers_that_no_length_changes_are_exact_over_processes(told):
    """Texts are of other lengths in each process; the mean over examples and time alone counts it."""
    for of_one in told:
        found, of_all = of_one["texts"], of_one["of all"]
        assert found == told[0]["texts"]
        for name in ("loss", "tokens", "worst", "rows"):
            assert found[name] == pytest.approx(of_all[name], rel=1e-6), name
        [warning] = of_one["warned of"]
        assert "'by length' of a reader cannot be told from that of each batch: 't' has another" in warning


def test_processes_that_test_something_else_are_told(told):
    for of_one in told:
        assert "the test reader yields x in process 0 and x, y in process 1" in of_one["other data"]
        assert "the processes test different networks" in of_one["other networks"]


def test_one_that_tests_alone_is_told_within_the_deadline(told):
    alone = told[0]["alone"]
    assert alone.startswith("PeerError: The test of loss did not end within 1 s. Process 1 (pid ")
    assert "is alive and has not begun the test of loss, which this one waits in" in alone
    assert "none does it alone, such as under `if jax.process_index() == 0`" in alone
    assert told[0]["afterwards"].startswith("PeerError: This process can take no further step. The test of")
