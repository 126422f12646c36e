"""One Ray for all tests of this folder."""

import pytest

from onward.execute.cluster.engine import Engine


@pytest.fixture(scope="session")
def ray_here():
    """Ray, started once; a training joins it and leaves it running."""
    pytest.importorskip("ray")
    with Engine(memory=300 * 2**20):
        yield
