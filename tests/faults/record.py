"""A pytest plugin: which functions each test enters, which branches all of them take, how long each takes.

It writes lines of JSON into the folder ``.faults``: one for each test, and one for the branches that nobody
took before it in this process, which are numbered in that order. A branch is a jump in the bytecode of
``src/onward`` and where it leads. ``sys.monitoring`` calls back once for each of them and each test, which
costs a few per cent. Processes that tests start are not seen.
"""

import json
import os
import sys
import time
from pathlib import Path
from types import CodeType

import pytest

FOLDER = Path(os.environ.get("ONWARD_FAULTS", ".faults"))
INSIDE = f"{os.sep}src{os.sep}onward{os.sep}"
MONITORING = getattr(sys, "monitoring", None)  # Python 3.12 and newer
TOOL = 2  # that of profilers

entered: set[str] = set()
taken: dict[tuple[int, int], set[int]] = {}
codes: dict[int, CodeType] = {}  # by their identity: to hash one takes long
numbers: dict[tuple[int, int, int], int] = {}


def _file(code):
    _, inside, file = code.co_filename.rpartition(INSIDE)
    return file if inside else None


def _entered(code, _offset):
    if file := _file(code):
        entered.add(f"{file}:{code.co_firstlineno}")
    return MONITORING.DISABLE


def _taken(code, offset, destination):
    """Not asked again in this test where both ways have been taken, or where the code is not ours."""
    ways = taken.get((id(code), offset))
    if ways is None:
        if _file(code) is None:
            return MONITORING.DISABLE
        codes[id(code)] = code
        ways = taken[id(code), offset] = set()
    ways.add(destination)
    return MONITORING.DISABLE if len(ways) == 2 else None


def _write(row):
    with (FOLDER / f"{os.getpid()}.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")


def pytest_configure(config):
    config.option.all_cases = True
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


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    entered.clear()
    taken.clear()
    MONITORING.restart_events()
    start, before = time.perf_counter(), os.times()
    result = yield
    took, (own, system, children, theirs) = time.perf_counter() - start, os.times()[:4]
    row = {
        "test": item.nodeid,
        "seconds": round(took, 4),
        "cpu": round(own + system - before[0] - before[1], 2),
        "cpu of processes": round(children + theirs - before[2] - before[3], 2),
        "functions": sorted(entered),
        "branches": _numbers_of_ways(),
    }
    _write(row)
    return result


def _numbers_of_ways():
    """The numbers, in this process, of the ways that the test took; what is new is written down."""
    found, new = [], []
    for (identity, offset), ways in list(taken.items()):
        code = codes[identity]
        for way in list(ways):
            key = (identity, offset, way)
            if key not in numbers:
                numbers[key] = len(numbers)
                new.append([_file(code), code.co_firstlineno, code.co_qualname, offset, way])
            found.append(numbers[key])
    if new:
        _write({"ways": new})  # numbered in the order of the file
    return sorted(found)
