"""The check runs the cases of tests that together take every way through the code, and all that are quick.

    pytest -n 3 --dist loadfile                # the check
    pytest -n 3 --dist loadfile --all-cases    # every case of every test
    pytest tests/derive                        # what is named, by its path, by -k or -m, runs whole

The cases that the check runs stand in ``cases.txt``, for the tests of which it leaves some out, or all. They
are chosen from what a run of all recorded (``tests/faults/choose.py``), not by hand. A test that is missing
there runs whole: a new one, and one whose cases have other names by now.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.quick import function_of

LIST = Path(__file__).with_name("cases.txt")
NONE = "- "  # before a test of which no case runs


def chosen() -> dict[str, set[str]]:
    """For the tests of which some cases are left out, those that run."""
    found: dict[str, set[str]] = {}
    for line in LIST.read_text().split("\n")[:-1] if LIST.exists() else []:
        cases = found.setdefault(function_of(line.removeprefix(NONE)), set())
        cases.update([] if line.startswith(NONE) else [line])
    return found


class Cases:
    """The plugin: leaves out the other cases where nothing is named."""

    def __init__(self, config: pytest.Config) -> None:
        if not hasattr(config, "workerinput"):  # a worker is told
            option = config.option
            is_named = config.args_source is not pytest.Config.ArgsSource.TESTPATHS
            option.all_cases |= bool(is_named or option.keyword or option.markexpr or option.list_not_quick)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        if config.option.all_cases:
            return
        there, found = {item.nodeid for item in items}, chosen()
        known = {f: cases & there for f, cases in found.items() if not cases or cases & there}
        run = {nodeid for nodeid in there if nodeid in known.get(function_of(nodeid), there)}
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in run])
        items[:] = [item for item in items if item.nodeid in run]
