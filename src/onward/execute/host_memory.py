"""Host memory that a step used stays with the process, for the next step.

A step on CPU takes its temporary arrays from the C library, which returns large ones to the operating system
as soon as they are free; the next step asks again, and the system clears page after page for it. That can
be half the time of a step. ``keep_host_memory`` tells the C library to keep what it has; ``compile`` does so
for a step on CPU that takes much.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import sys
from collections.abc import Mapping
from importlib.metadata import version
from typing import NamedTuple

import jax

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX, _ARENA_MAX = -1, -2, -4, -8  # as <malloc.h> numbers them
_NEVER = 2**31 - 1
_GROWS_BY = 64 * 2**20
_SETTINGS = {_MMAP_MAX: 0, _TRIM_THRESHOLD: _NEVER, _TOP_PAD: _GROWS_BY, _ARENA_MAX: 1}


LARGE = 16 * 2**20  # bytes of temporary arrays, far more than the C library keeps by itself
_SWITCH = "ONWARD_KEEP_MEMORY"

# When a step is compiled, the threads of an older jaxlib have heaps of their own, which glibc gives back.
CAN_BEGIN_LATE = tuple(int(n) for n in re.findall(r"\d+", version("jaxlib"))[:2]) >= (0, 12)


class KeptMemory(NamedTuple):
    """Whether host memory is kept from now on, and why in words; true or false as a whole."""

    done: bool
    reason: str

    def __bool__(self) -> bool:
        return self.done


def keep_host_memory() -> KeptMemory:
    """Let this process keep the memory that a step has used, so that the next step need not ask for it.

    It pays for steps on CPU with large temporary arrays, such as those of a transformer. In exchange the
    process keeps the most memory it ever used, a quarter to a half more than before. Call it first, before
    arrays are made; it holds for the whole process and cannot be taken back. ``import onward`` never does it;
    ``compile`` does with jaxlib 0.12 or newer for a step with temporary arrays of 16 MiB or more, unless
    ``keep_memory=False`` or ONWARD_KEEP_MEMORY=0 says no. Only the C library of GNU/Linux can be told so;
    elsewhere nothing happens, and ``reason`` says why.

    Source: mallopt(3) of the GNU C library: M_MMAP_MAX, M_TRIM_THRESHOLD, M_TOP_PAD, M_ARENA_MAX.

    Returns:
        Something true if memory is kept; ``.reason`` says in words what was done, or why nothing was.

    Example:
        >>> import onward as ow
        >>> def main():
        ...     if not (kept := ow.keep_host_memory()):
        ...         print(kept.reason)
        ...     # make arrays, compile, train
    """
    can, reason = can_keep_host_memory()
    if not can:
        return KeptMemory(False, reason)
    library = ctypes.CDLL(None)
    refused = [name for name, value in _SETTINGS.items() if not library.mallopt(name, value)]
    return KeptMemory(
        not refused, f"mallopt refused settings {refused}" if refused else "glibc keeps what it has"
    )


def can_keep_host_memory() -> KeptMemory:
    """Whether ``keep_host_memory`` can do anything on this system, and why not.

    Example:
        >>> can_keep_host_memory().done in (True, False)
        True
    """
    if not sys.platform.startswith("linux"):
        return KeptMemory(False, f"on {sys.platform} there is no mallopt; the system's own allocator decides")
    if platform.libc_ver()[0] != "glibc":
        return KeptMemory(
            False, "the C library is not GNU's, which alone can be told so (Alpine Linux has musl)"
        )
    return KeptMemory(True, "glibc can be told to keep what it has")


def temporary_bytes(compiled: jax.stages.Compiled) -> int:
    """The bytes of temporary arrays that a run of an executable takes, as far as XLA tells."""
    analysis = compiled.memory_analysis()
    return 0 if analysis is None else int(analysis.temp_size_in_bytes)


def keep_for_steps(
    compiled: jax.stages.Compiled, wanted: bool | None, environment: Mapping[str, str] = os.environ
) -> str:
    """Keep host memory where the steps of an executable gain from it, and say so; empty where they do not.

    Args:
        compiled: the executable.
        wanted: whether to keep it; None: on a CPU, if temporary arrays are large and the environment does
            not forbid it.
        environment: of the process; ONWARD_KEEP_MEMORY=0 forbids.
    """
    taken = temporary_bytes(compiled)
    if not wanted and (taken < LARGE or jax.default_backend() != "cpu"):
        return ""
    told = f"host memory: {taken / 2**20:,.0f} MiB of temporary arrays"
    if wanted is False or (wanted is None and environment.get(_SWITCH) == "0"):
        return f"{told} go back to the system after each step"
    if not CAN_BEGIN_LATE:
        return f"{told} go back to the system after each step, unless ow.keep_host_memory() is called first"
    kept = keep_host_memory()
    return f"{told} are kept for the next step" if kept else f"{told}, not kept: {kept.reason}"
