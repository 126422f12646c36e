"""``keep_host_memory``: in processes of their own, since it cannot be taken back."""

import subprocess
import sys

import pytest

from onward.execute.host_memory import can_keep_host_memory, keep_host_memory

FAULTS = """
import resource, sys
import numpy as np
if sys.argv[1] == "keep":
    from onward.execute.host_memory import keep_host_memory
    assert keep_host_memory()
def use():
    return np.ones(8_000_000, np.int8).sum()
use()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    use()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how):
    made = subprocess.run([sys.executable, "-c", FAULTS, how], capture_output=True, text=True, check=True)
    return int(made.stdout)


@pytest.mark.skipif(not can_keep_host_memory(), reason="only glibc can be told so")
def test_memory_that_was_used_is_not_asked_for_again():
    assert faults("keep") < 0.1 * faults("leave")


def test_it_says_why_not_on_other_systems(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    kept = keep_host_memory()
    assert not kept
    assert kept.reason == "on darwin there is no mallopt; the system's own allocator decides"


def test_it_says_why_not_with_another_c_library(monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr("platform.libc_ver", lambda: ("", ""))
    kept = keep_host_memory()
    assert not kept
    assert "GNU" in kept.reason
