"""One Ray for all tests of a file; where it is asked for, one graph for all hosts in threads."""

import pytest
from tests.fleet import hosting
from tests.fleet.on_threads import remembering

from onward.execute.disk import background
from onward.fleet import collect, run, servers, worker
from onward.fleet.engine import Engine


@pytest.fixture(scope="module")
def ray_here():
    """Ray, started once a file, for it computes while it waits; a training joins it and leaves it running."""
    pytest.importorskip("ray")
    with Engine(memory=300 * 2**20):
        yield


@pytest.fixture(scope="module")
def remembered():
    """What hosts in threads of this process made of one Program, for all tests of a module."""
    return remembering()


@pytest.fixture
def graphs_made_once(monkeypatch, remembered):
    """Hosts in threads make, cut and compile the graph of one Program once, and not each for itself.

    That each process makes the same graph of it is tested where this is not asked for.
    """
    for owner, name, once in remembered:
        monkeypatch.setattr(owner, name, once)


@pytest.fixture
def short_pauses(monkeypatch, request):
    """Threads, unlike processes, are soon there again: so are looks at them, and calls that are repeated."""
    if "ray_here" not in request.fixturenames:
        for module, name in ((run, "_LOOK"), (collect, "PAUSE"), (servers, "PAUSE"), (worker, "PAUSE")):
            monkeypatch.setattr(module, name, 0.03)


@pytest.fixture(autouse=True)
def released(monkeypatch):
    """Threads of hosts stand still with them; those that died hold nothing any more when a test has ended."""
    monkeypatch.setattr(background, "Thread", hosting.Helper)
    yield
    hosting.release()
