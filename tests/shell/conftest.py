"""Commands that run in this process leave its memory as it is: that cannot be taken back."""

import pytest


@pytest.fixture(autouse=True)
def memory_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onward.shell.main.keep_host_memory", lambda: None)
