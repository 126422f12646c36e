"""Host memory that a step used stays with the process, for the next step.

A step on CPU takes its temporary arrays from the C library, which returns large ones to the operating system
as soon as they are free; the next step asks again, and the system clears page after page for it. That can
be half the time of a step. ``keep_host_memory`` tells the C library to keep what it has; ``compile`` does so
for a step on CPU that takes much.
"""

from __future__ import annotations

import ctypes
import math
import os
import platform
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax

from onward.core.jaxprs.equations import results_within
from onward.core.program import Program

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX, _ARENA_MAX = -1, -2, -4, -8  # as <malloc.h> numbers them
_NEVER = 2**31 - 1
_GROWS_BY = 64 * 2**20
_SETTINGS = {_MMAP_MAX: 0, _TRIM_THRESHOLD: _NEVER, _TOP_PAD: _GROWS_BY, _ARENA_MAX: 1}


LARGE = 16 * 2**20  # bytes of temporary arrays, far more than the C library keeps by itself
_HEAP = 63 * 2**20  # bytes that glibc has room for in one heap of a thread other than the first
_PIECE = 48 * 2**20
_PART = 16  # of the memory of a machine: what all arrays of a step take at most, if it is kept unasked
_PIECES = "xla_multiheap_size_constraint_per_heap"
_SWITCH = "ONWARD_KEEP_MEMORY"
_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
_called: list[bool] = []  # whether it was asked for before a step was compiled, and done


class KeptMemory(NamedTuple):
    """Whether host memory is kept from now on, and why in words; true or false as a whole."""

    done: bool
    reason: str

    def __bool__(self) -> bool:
        return self.done


def keep_host_memory() -> KeptMemory:
    """Let this process keep the memory that a step has used, so that the next step need not ask for it.

    It pays for steps on CPU with large temporary arrays, such as those of a transformer. In exchange the
    process keeps the most memory it ever used. Call it first, before
    arrays are made; it holds for the whole process and cannot be taken back. ``import onward`` never does it;
    ``compile`` does for a step with temporary arrays of 16 MiB or more, unless ``keep_memory=False`` or
    ONWARD_KEEP_MEMORY=0 says no, and has XLA ask for more than 63 MiB in pieces, which are kept, too. Only
    where they cannot be had, as with JAX's compilation cache, does an early call keep more. Only the C
    library of GNU/Linux can be told so; elsewhere nothing happens, and ``reason`` says why.

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
    if kept := _keep():
        _called.append(True)
    return kept


def _keep() -> KeptMemory:
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


def bytes_of_machine() -> int | None:
    """The bytes of memory of this machine, or those that a container leaves; None where the system is silent.

    Example:
        >>> (bytes_of_machine() or 2**40) > 2**20
        True
    """
    names = getattr(os, "sysconf_names", {})
    if not {"SC_PHYS_PAGES", "SC_PAGE_SIZE"} <= names.keys():
        return None
    limits = (int(text) for file in _LIMITS if (text := _read(file)).isdigit())
    return min(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), *limits)


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def temporary_bytes(compiled: jax.stages.Compiled) -> int:
    """The bytes of temporary arrays that a run of an executable takes, as far as XLA tells."""
    analysis = compiled.memory_analysis()
    return 0 if analysis is None else int(analysis.temp_size_in_bytes)


def in_pieces(
    arrays: Iterable[Any], wanted: bool | None, environment: Mapping[str, str] = os.environ
) -> dict[str, int]:
    """The option by which XLA's CPU compiler takes temporary arrays in pieces that glibc can keep.

    XLA asks for all of them at once, in a thread of its own. The heap of such a thread has 64 MiB in glibc:
    what is larger comes from the system, and goes back to it, whatever was set. In pieces of 48 MiB a step of
    a transformer with 78 MiB of them took 0.68 of its time on two cores, in as much memory; in 18 other
    programs they were 0 to 4 % more. Each thread that runs steps keeps its own: with 2 cores and with 32
    that was 4 to 5 times the temporary arrays. So unasked it is done only where all arrays of a step
    together, some eight times the temporary ones, are at most a sixteenth of the machine's memory.

    JAX's cache of compiled programs cannot hold such an executable, so that with one there are no pieces. Nor
    are there with an array that is larger than a piece, for which XLA would write a line to the error output
    and take up to half as much memory again.

    Args:
        arrays: the types of all that may be temporary; those of 16 bits count as 32, as which XLA computes.
        wanted: whether memory is to be kept; None: if the environment does not forbid it.
        environment: of the process; ONWARD_KEEP_MEMORY=0 forbids, and XLA_FLAGS may have a size of their own.
    """
    settings: Any = jax.config  # the types of JAX 0.10 lack some
    cached = settings.jax_enable_compilation_cache and settings.jax_compilation_cache_dir
    is_set = _PIECES in environment.get("XLA_FLAGS", "")
    if cached or is_set or not is_wanted(wanted, environment) or jax.default_backend() != "cpu":
        return {}
    sizes = [math.prod(x.shape) * max(4, x.dtype.itemsize) for x in arrays]
    most = math.inf if wanted else (bytes_of_machine() or 0) / _PART
    is_large = _HEAP < sum(sizes) <= most and max(sizes) <= _PIECE
    return {_PIECES: _PIECE} if is_large and can_keep_host_memory() else {}


def arrays_of(program: Program) -> Iterator[Any]:
    """The types of all that a Program computes, also within the ops that run others.

    One that was loaded has no bodies: of it, what its ops give.
    """
    if program.code is not None:
        return (v for op in program.ops for v in op.outputs)
    return (t for op in program.ops for eqn in op.body.equations for t in results_within(eqn))


def is_wanted(wanted: bool | None, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether large temporary arrays are to be kept: as people ask, or if the environment does not forbid it.

    Example:
        >>> is_wanted(None, {}), is_wanted(None, {"ONWARD_KEEP_MEMORY": "0"}), is_wanted(False, {})
        (True, False, False)
    """
    return environment.get(_SWITCH) != "0" if wanted is None else wanted


def keep_for_steps(
    compiled: jax.stages.Compiled,
    wanted: bool | None,
    options: Mapping[str, Any],
    environment: Mapping[str, str] = os.environ,
) -> str:
    """Keep host memory where the steps of an executable gain from it, and say so; empty where they do not.

    Args:
        compiled: the executable.
        wanted: whether to keep it; None: on a CPU, if temporary arrays are large and the environment does
            not forbid it.
        options: those of XLA that it was compiled with.
        environment: of the process; ONWARD_KEEP_MEMORY=0 forbids.
    """
    taken = temporary_bytes(compiled)
    if not wanted and (taken < LARGE or jax.default_backend() != "cpu"):
        return ""
    told = f"host memory: {taken / 2**20:,.0f} MiB of temporary arrays"
    if not is_wanted(wanted, environment):
        return f"{told} go back to the system after each step"
    if not (kept := _keep()):
        return f"{told}, not kept: {kept.reason}"
    if not (options.get(_PIECES) or _called) and taken > _HEAP:
        return f"{told} go back to the system after each step, unless ow.keep_host_memory() is called first"
    return f"{told} are kept for the next step"
