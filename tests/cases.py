"""The check runs every test, and of one with many cases those that together take every way through the code.

    pytest -n 3 --dist loadfile                # the check
    pytest -n 3 --dist loadfile --all-cases    # every case of every test
    pytest tests/derive                        # what is named, by its path, by -k or -m, runs whole

The cases that the check runs stand in ``cases.txt``, for the tests of which it leaves some out. They are
chosen from what a run of all recorded (``tests/faults/choose.py``), not by hand. A test that is not listed
there runs whole: a new one, and one whose cases have other names by now.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.quick import function_of

LIST = Path(__file__).with_name("cases.txt")


def chosen() -> dict[str, set[str]]:
    """For the tests of which some cases are left out, those that run."""
    found: dict[str, set[str]] = {}
    for line in LIST.read_text().split("\n")[:-1] if LIST.exists() else []:
        found.setdefault(function_of(line), set()).add(line)
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
        found = chosen()
        there = {item.nodeid for item in items}
        known = {function: cases & there for function, cases in found.items()}
        run = [item for item in items if item.nodeid in (known.get(function_of(item.nodeid)) or there)]
        ran = {item.nodeid for item in run}
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in ran])
        items[:] = run
