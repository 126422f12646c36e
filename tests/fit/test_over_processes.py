"""Trainings and tests over two processes: one model of all, the numbers of all, errors of all."""

import json

import pytest
from tests.execute.test_processes import launch

SCRIPT = """
import json, sys
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

def made(**options):
    return ow.Trainer(ow.Model(ow.trace(loss, W, X[:4]), W), ow.SGD(0.1), **options)

attempt("train", lambda: made(checkpoints=folder).train(ow.batches((X,), 4), progress=False))
attempt("update", lambda: made(devices=1).update(X[:4]))
over_all = jax.NamedSharding(jax.make_mesh((2,), ("data",)), jax.P("data"))
laid = jax.make_array_from_process_local_data(over_all, X[:4] + index)
attempt("laid by hand", lambda: float(made().update(laid).loss))

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
