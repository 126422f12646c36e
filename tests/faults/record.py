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
TOOL = sys.monitoring.PROFILER_ID
EVENTS = sys.monitoring.events
DISABLE = sys.monitoring.DISABLE

entered: set[str] = set()
taken: dict[tuple[str, int, str, int], set[int]] = {}
written: set[tuple[object, ...]] = set()


def _file(code):
    _, inside, file = code.co_filename.rpartition(INSIDE)
    return file if inside else None


def _entered(code, _offset):
    if file := _file(code):
        entered.add(f"{file}:{code.co_firstlineno}")
    return DISABLE


def _taken(code, offset, destination):
    """Not asked again where both ways have been taken, or where the code is not ours."""
    if not (file := _file(code)):
        return DISABLE
    ways = taken.setdefault((file, code.co_firstlineno, code.co_qualname, offset), set())
    ways.add(destination)
    return DISABLE if len(ways) == 2 else None


def _write(row):
    with (FOLDER / f"{os.getpid()}.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")


def pytest_configure():
    FOLDER.mkdir(exist_ok=True)
    sys.monitoring.use_tool_id(TOOL, "faults")
    sys.monitoring.register_callback(TOOL, EVENTS.PY_START, _entered)
    sys.monitoring.register_callback(TOOL, EVENTS.BRANCH, _taken)
    sys.monitoring.set_events(TOOL, EVENTS.PY_START | EVENTS.BRANCH)


def pytest_unconfigure():
    sys.monitoring.set_events(TOOL, 0)
    sys.monitoring.free_tool_id(TOOL)
    _write_branches()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item, nextitem):
    entered.clear()
    sys.monitoring.restart_events()
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
