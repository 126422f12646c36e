"""Each program of the cookbook learns, at small size, in this process; three compute what plain JAX computes.

The index, ``docs/cookbook.md``, has all of them. They take their size as arguments of ``main``.
"""

import importlib.util
import re
from contextlib import nullcontext
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from tests.compiled import optimized
from tests.fleet.hosting import Threads, release

import onward as ow

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "notebooks" / "cookbook"
PROGRAMS = sorted(path.stem for path in FOLDER.glob("*.py"))
PARTS = ("Trained:", "Data:", "You see:", "Source:", "Time:")


def program(name):
    """The module of a program: its ``main`` is not called."""
    spec = importlib.util.spec_from_file_location(f"cookbook_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def fell(losses, share, mean=1):
    """Whether the last losses are below this share of the first."""
    return np.mean(losses[-mean:]) < share * np.mean(losses[:mean])


SMALL = {
    "adopted_vae": (
        {"epochs": 3, "compared": 1},
        lambda r: r["after"] < 0.75 * r["before"] and r["difference"] < 1e-4,
    ),
    "diffusion": (
        {"epochs": 12, "decay": 0.9},
        lambda r: fell(r["losses"], 0.6, 10) and r["drawings"] < 0.6 * r["noise"],
    ),
    "digits": ({"epochs": 2}, lambda r: r["accuracy"] > 0.8),
    "factorisation": (
        {"most": 1000, "epochs": 1, "size": 512},
        lambda r: fell(r["losses"], 0.6, 10) and r["explained"] > 0.2,
    ),
    "gnn": ({}, lambda r: r["right"] >= 30),
    "lora": (
        {"epochs": 3, "adapted_epochs": 4},
        lambda r: (
            r["before"][0] > 0.8 > 0.5 > r["before"][1]
            and r["after"] > 0.7
            and all(jax.tree.leaves(r["frozen"]))
        ),
    ),
    "lstm": (
        {"epochs": 2, "names": ("tokenize",), "stride": 32},
        lambda r: fell(r["losses"], 0.75, 5) and r["accuracy"] > 0.5,
    ),
    "pinn": ({"adam_steps": 150, "lbfgs_steps": 40, "hidden": (16,)}, lambda r: r["error"] < 0.05),
    "ppo": ({"rounds": 5}, lambda r: r["upright"][-1] > 2 * r["upright"][0]),
    "small_gpt": (
        {"width": 32, "layers": 1, "steps": 40, "size": 8, "count": 5},
        lambda r: fell(r["losses"], 0.85, 5) and r["tested"] < 5.3,
    ),
}  # the arguments, and what shows that it learned


@pytest.fixture(scope="module")
def results():
    return {}


@pytest.mark.parametrize("name", PROGRAMS)
def test_it_learns(name, results, capsys):
    arguments, learned = SMALL[name]
    engine = {"engine": Threads()} if name == "factorisation" else {}
    with optimized() if name == "digits" else nullcontext():  # there is pooling in it
        results[name] = result = program(name).main(**arguments, **engine)
    release()
    assert learned(result), result
    assert capsys.readouterr().out


def test_the_index_has_each_with_its_line():
    page = (ROOT / "docs" / "cookbook.md").read_text()
    assert sorted(re.findall(r"^\| \[`(\w+)\.py`\]", page, re.MULTILINE)) == PROGRAMS == sorted(SMALL)


def test_each_says_what_it_trains_and_shows_and_is_short():
    for path in FOLDER.glob("*.py"):
        text = path.read_text()
        said = text.split('"""')[1]
        assert [part for part in PARTS if part not in said] == [], path
        assert 45 <= sum(1 for line in text.split("\n") if line) <= 120, path


def by_hand(loss, params, optimizer, batches):
    """The losses of the loop that one writes with JAX and optax."""

    @jax.jit
    def step(params, state, batch):
        value, gradients = jax.value_and_grad(loss)(params, *batch)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    state, losses = optimizer.init(params), []
    for batch in batches:
        params, state, value = step(params, state, batch)
        losses.append(float(value))
    return losses


def graph_network():
    module = program("gnn")
    optimizer = optax.chain(optax.add_decayed_weights(5e-4), optax.adam(1e-2))
    return module.loss, module.initial(), optimizer, [module.read_club()] * 200


def physics():
    module, (arguments, _) = program("pinn"), SMALL["pinn"]
    rng, steps = np.random.default_rng(0), arguments["adam_steps"]
    inside, edge = module.points(rng, 512)
    data = inside, edge, module.solution(*edge)
    params = module.initial(rng, (2, *arguments["hidden"], 1))
    return module.loss, params, optax.adam(optax.cosine_decay_schedule(5e-3, steps)), [data] * steps


def letters():
    module, (arguments, _) = program("small_gpt"), SMALL["small_gpt"]
    steps = arguments["steps"]
    known, ids = module.read_text()
    reader = ow.batches(module.windows(ids[:-30_000], 7), arguments["size"], shuffle=True, drop_last=True)
    rate = optax.warmup_cosine_decay_schedule(0.0, 6e-3, steps // 20, steps)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, weight_decay=0.1))
    batches = [tuple(batch.values()) for _, batch in zip(range(steps), reader, strict=False)]
    params = module.initial(len(known), arguments["width"], arguments["layers"])
    return module.loss, params, optimizer, batches


IN_JAX = {"gnn": graph_network, "pinn": physics, "small_gpt": letters}


@pytest.mark.parametrize("name", IN_JAX)
def test_losses_are_those_of_plain_jax(name, results):
    """Of the program as it ran above; it runs here if it did not."""
    if name not in results:
        results[name] = program(name).main(**SMALL[name][0])
    theirs = by_hand(*IN_JAX[name]())
    np.testing.assert_allclose(results[name]["losses"][: len(theirs)], theirs, rtol=1e-2)
