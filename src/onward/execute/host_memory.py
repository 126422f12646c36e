"""Host memory that a step used stays with the process, for the next step.

A step on CPU takes its temporary arrays from the C library, which returns large ones to the operating system
as soon as they are free; the next step asks again, and the system clears page after page for it. That can
be half the time of a step. ``keep_host_memory`` tells the C library to keep what it has.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from typing import NamedTuple

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX, _ARENA_MAX = -1, -2, -4, -8  # as <malloc.h> numbers them
_NEVER = 2**31 - 1
_GROWS_BY = 64 * 2**20
_SETTINGS = {_MMAP_MAX: 0, _TRIM_THRESHOLD: _NEVER, _TOP_PAD: _GROWS_BY, _ARENA_MAX: 1}


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
    arrays are made; it holds for the whole process and cannot be taken back. ``import onward`` never does
    it; ``onward demo`` and ``onward launch`` do. Only the C library of GNU/Linux can be told so; elsewhere
    nothing happens, and ``reason`` says why.

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
