"""Each program of the cookbook learns, at small size, in this process; three compute what plain JAX computes.

The index, ``docs/cookbook.md``, has all of them. They take their size as arguments of ``main``.
"""

import importlib.util
import re
from contextlib import nullcontext
from pathlib import Path

import jax
import numpy as np
import pytest
from tests.compiled import optimized
from tests.fleet.hosting import Threads, release

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
    "diffusion": ({"epochs": 20}, lambda r: fell(r["losses"], 0.6, 20) and r["drawings"] < 0.3 * r["noise"]),
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
    "lstm": ({"epochs": 1, "names": ("ast",)}, lambda r: r["accuracy"] > r["alone"]),
    "pinn": ({"adam_steps": 150, "lbfgs_steps": 40, "hidden": (16,)}, lambda r: r["error"] < 0.05),
    "ppo": ({"rounds": 5}, lambda r: r["upright"][-1] > 2 * r["upright"][0]),
    "small_gpt": (
        {"width": 32, "layers": 2, "steps": 40, "size": 8, "count": 5},
        lambda r: fell(r["losses"], 0.75, 10) and r["tested"] < 4.8,
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
