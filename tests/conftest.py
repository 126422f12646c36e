"""Eight devices on the host, before JAX is imported: what replicates has to have something to run on."""

import gc
import os
import signal

import pytest

DEVICES = "--xla_force_host_platform_device_count"

if DEVICES not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {DEVICES}=8".strip()

# A shell that starts the tests in the background has SIGINT ignored, nohup SIGHUP; tests are about these two.
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)


def pytest_collection_modifyitems(items):
    """The longest file goes to a worker first, so that no other waits for it in the end."""
    items.sort(key=lambda item: "test_notebooks" not in item.nodeid)


def pytest_collection_finish(session):
    """What is there before the first test is not looked through in every collection of garbage."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def earlier_objects_frozen():
    """What tests before left behind is not looked through again: benchmarks collect garbage in each round."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def nothing_frozen():
    """Who looks for what refers to an array finds nothing among frozen objects."""
    gc.unfreeze()
    yield
    gc.freeze()
