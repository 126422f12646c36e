"""A pytest plugin: which functions of the library does each test enter, and how long does it take?

It writes one line of JSON a test into the folder ``.faults``. ``sys.monitoring`` calls back once for each
function and test, which costs next to nothing.
"""

import json
import os
import sys
import time
from pathlib import Path

import pytest

FOLDER = Path(".faults")
INSIDE = f"{os.sep}src{os.sep}onward{os.sep}"
DISABLE = sys.monitoring.DISABLE
entered: set[str] = set()


def _entered(code, _offset):
    _, inside, file = code.co_filename.rpartition(INSIDE)
    if inside:
        entered.add(f"{file}:{code.co_firstlineno}")
    return DISABLE


def pytest_configure():
    FOLDER.mkdir(exist_ok=True)
    sys.monitoring.use_tool_id(sys.monitoring.PROFILER_ID, "faults")
    sys.monitoring.register_callback(sys.monitoring.PROFILER_ID, sys.monitoring.events.PY_START, _entered)
    sys.monitoring.set_events(sys.monitoring.PROFILER_ID, sys.monitoring.events.PY_START)


def pytest_unconfigure():
    sys.monitoring.free_tool_id(sys.monitoring.PROFILER_ID)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    entered.clear()
    sys.monitoring.restart_events()
    start = time.perf_counter()
    result = yield
    row = {"test": item.nodeid, "seconds": time.perf_counter() - start, "functions": sorted(entered)}
    with (FOLDER / f"{os.getpid()}.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    return result
