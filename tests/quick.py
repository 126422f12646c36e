"""``pytest -m quick``: one case of every test function that takes no time, for the minute after each change.

The first case of each function is quick, unless the function stands in ``not_quick.txt``: it takes longer
than ``LIMIT``, or starts a process. That list is measured, not written:

    pytest -n 3 --dist loadfile --list-not-quick

A quick test that starts a process all the same fails and says so.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

LIMIT = 0.15  # seconds of the first case, with its fixtures
LIST = Path(__file__).with_name("not_quick.txt")
STARTS = ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "os.exec")
PROCESS = ("starts", "a process")


def function_of(nodeid: str) -> str:
    """A test without its parameters."""
    return nodeid.partition("[")[0]


def listed() -> list[str]:
    return LIST.read_text().split("\n")[:-1] if LIST.exists() else []


class Quick:
    """The plugin: marks what is quick, and measures which functions are not where that is asked for."""

    def __init__(self, config: pytest.Config) -> None:
        self.only = config.option.markexpr == "quick"
        self.measures = config.option.list_not_quick and not hasattr(config, "workerinput")
        self.running: pytest.Item | None = None
        self.seconds: dict[str, float] = {}
        self.started: set[str] = set()
        if self.only or config.option.list_not_quick:  # JAX alone makes thousands of events a second
            sys.addaudithook(self.heard)

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        passed = set(listed())
        for item in items:
            function = function_of(item.nodeid)
            if function not in passed:
                passed.add(function)
                item.add_marker("quick")

    def heard(self, event: str, _: object) -> None:
        if event in STARTS and self.running is not None:
            if self.only:
                name = function_of(self.running.nodeid)
                pytest.fail(f"a quick test starts a process: {name} belongs in {LIST.name}")
            if PROCESS not in self.running.user_properties:
                self.running.user_properties.append(PROCESS)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> object:
        self.running = item
        try:
            return (yield)
        finally:
            self.running = None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration
        if PROCESS in map(tuple, report.user_properties):
            self.started.add(function_of(report.nodeid))

    def pytest_sessionfinish(self) -> None:
        if not self.measures:
            return
        first: dict[str, float] = {}
        for nodeid, seconds in self.seconds.items():
            first.setdefault(function_of(nodeid), seconds)
        slow = {function for function, seconds in first.items() if seconds > LIMIT}
        LIST.write_text("".join(f"{function}\n" for function in sorted(slow | self.started)))
