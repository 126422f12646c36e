"""A pytest plugin: which functions each test enters, which branches all of them take, how long each takes.

It writes lines of JSON into the folder ``.faults``: one for each test, and one for each file's new branches.
A branch is a jump in the bytecode of ``src/onward`` and where it leads. ``sys.monitoring`` calls back once
for each of them and each test, which costs a few per cent. Processes that tests start are not seen.
"""

import json
import os
import sys
import time
from pathlib import Path

import pytest

FOLDER = Path(os.environ.get("ONWARD_FAULTS", ".faults"))
INSIDE = f"{os.sep}src{os.sep}onward{os.sep}"
MONITORING = getattr(sys, "monitoring", None)  # Python 3.12 and newer
TOOL = 2  # that of profilers

entered: set[str] = set()
taken: dict[tuple[str, int, str, int], set[int]] = {}
written: set[tuple[object, ...]] = set()


def _file(code):
    _, inside, file = code.co_filename.rpartition(INSIDE)
    return file if inside else None


def _entered(code, _offset):
    if file := _file(code):
        entered.add(f"{file}:{code.co_firstlineno}")
    return MONITORING.DISABLE


def _taken(code, offset, destination):
    """Not asked again where both ways have been taken, or where the code is not ours."""
    if not (file := _file(code)):
        return MONITORING.DISABLE
    ways = taken.setdefault((file, code.co_firstlineno, code.co_qualname, offset), set())
    ways.add(destination)
    return MONITORING.DISABLE if len(ways) == 2 else None


def _write(row):
    with (FOLDER / f"{os.getpid()}.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")


def pytest_configure():
    if MONITORING is None:
        raise pytest.UsageError("tests.faults.record needs Python 3.12 or newer")
    FOLDER.mkdir(exist_ok=True)
    events = MONITORING.events
    MONITORING.use_tool_id(TOOL, "faults")
    MONITORING.register_callback(TOOL, events.PY_START, _entered)
    MONITORING.register_callback(TOOL, events.BRANCH, _taken)
    MONITORING.set_events(TOOL, events.PY_START | events.BRANCH)


def pytest_unconfigure():
    MONITORING.set_events(TOOL, 0)
    MONITORING.free_tool_id(TOOL)
    _write_branches()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item, nextitem):
    entered.clear()
    MONITORING.restart_events()
    start = time.perf_counter()
    result = yield
    took = time.perf_counter() - start
    _write({"test": item.nodeid, "seconds": round(took, 4), "functions": sorted(entered)})
    if nextitem is None or nextitem.path != item.path:
        _write_branches()
    return result


def _write_branches():
    found = {(*site, way) for site, ways in list(taken.items()) for way in ways} - written
    written.update(found)
    if found:
        _write({"branches": sorted(found)})
