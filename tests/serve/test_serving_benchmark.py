"""The benchmark of serving runs, and every answer in it is compared; how fast is never asked here."""

from __future__ import annotations

import pytest
from benchmarks import serving


@pytest.mark.usefixtures("earlier_objects_frozen")
def test_quick_run(capsys: pytest.CaptureFixture[str]) -> None:
    rows = serving.run(rounds=2, quick=True)
    cases = ["1 client", "8 clients", "64 clients"]
    assert [(row.case, row.against) for row in rows] == [
        (case, peer) for case in cases for peer in ("plain", "threads")
    ]
    assert all(row.rounds == 2 and row.ratio is not None and row.ratio > 0 for row in rows)
    printed = capsys.readouterr().out
    assert "times that" in printed
    assert printed.count("requests/s") == 9
