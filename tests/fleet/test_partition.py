"""Two machines of a Ray cluster, which are network namespaces of this one, and a cable that is cut."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.fleet.two_machines import can_be_made

ROOT = Path(__file__).parents[2]
LONGEST = 360.0  # seconds; some 30 on a machine with nothing else to do


def test_a_machine_that_is_cut_off_in_a_step_and_comes_back_counts_nothing_twice():
    """Its server is replaced meanwhile, and ends when it wakes up: by name, unless Ray ended it before."""
    pytest.importorskip("ray")
    if not can_be_made():
        pytest.skip("this system makes no network namespaces for us")
    how = ["--partitions", "1", "--first", "both ways", "sync", "during write"]
    found = subprocess.run(
        [sys.executable, "-m", "tests.torture.partitions", *how],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])},
        capture_output=True,
        text=True,
        timeout=LONGEST,
        check=False,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    assert "1 partitions: 0 lost, 0 doubled; 1 servers and 1 trainers replaced" in found.stdout
