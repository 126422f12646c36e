"""One Ray for all tests of this folder, and one compilation of each program."""

import pytest
from tests.compiled import compiled_once

from onward.execute.cluster.engine import Engine


@pytest.fixture(scope="session")
def ray_here():
    """Ray, started once; a training joins it and leaves it running."""
    pytest.importorskip("ray")
    with Engine(memory=300 * 2**20):
        yield


@pytest.fixture(scope="module", autouse=True)
def programs_compiled_once(tmp_path_factory):
    """Servers and trainers in threads of this process compile one program each, and so do all their tests."""
    with compiled_once(tmp_path_factory.getbasetemp() / "compiled"):
        yield
