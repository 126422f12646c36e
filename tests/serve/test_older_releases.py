"""Files of every release load forever; ``files/write.py`` adds those of a new one."""

from pathlib import Path

import numpy as np
import pytest
from tests.serve.files.write import batch

import onward as ow

FOLDERS = sorted(p for p in (Path(__file__).parent / "files").iterdir() if (p / "network.model").exists())


def _answers(folder):
    with np.load(folder / "answers.npz") as kept:
        return dict(kept)


def test_this_release_has_its_files():
    assert ow.__version__ in [folder.name for folder in FOLDERS]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda p: p.name)
def test_a_model(folder):
    kept = _answers(folder)
    model = ow.load(folder / "network.model")
    for name in model.parameters:
        np.testing.assert_array_equal(model[name], kept[f"parameter:{name}"])
    assert ow.check(model.topology)
    assert {"conv_0", "batch_norm_0", "output"} <= model.topology.variables.keys()
    assert model.about["about"] == {"made": "for the tests"}
    evaluator = ow.Evaluator(model, ["output"])
    for n in (1, 4, 7):
        found = evaluator.forward(*batch(n))["output"]
        np.testing.assert_allclose(found, kept[f"output_{n}"], atol=1e-5)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda p: p.name)
def test_a_training_step(folder):
    step, state = ow.load_step(folder / "step.model")
    losses = []
    for _ in range(3):
        state, out = step(state, *batch(4))
        losses.append(float(out.loss))
    np.testing.assert_allclose(losses, _answers(folder)["losses"], rtol=1e-4)
