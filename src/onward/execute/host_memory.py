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
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from onward.core.compiler import AT_HAND
from onward.core.program import Program
from onward.core.show import nbytes

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX, _ARENA_MAX = -1, -2, -4, -8  # as <malloc.h> numbers them
_NEVER = 2**31 - 1
_GROWS_BY = 64 * 2**20
_SETTINGS = {_MMAP_MAX: 0, _TRIM_THRESHOLD: _NEVER, _TOP_PAD: _GROWS_BY, _ARENA_MAX: 1}


LARGE = 16 * 2**20  # bytes of temporary arrays, far more than the C library keeps by itself
_HEAP = 63 * 2**20  # bytes that glibc has room for in one heap of a thread other than the first
_PIECE, _LARGEST_PIECE = 8 * 2**20, 48 * 2**20
_PIECES = "xla_multiheap_size_constraint_per_heap"
_SWITCH = "ONWARD_KEEP_MEMORY"

# When a step is compiled, the threads of an older jaxlib have heaps of their own, which glibc gives back.
CAN_BEGIN_LATE = AT_HAND >= (0, 12)
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
    process keeps the most memory it ever used, a quarter to a half more than before. Call it first, before
    arrays are made; it holds for the whole process and cannot be taken back. ``import onward`` never does it;
    ``compile`` does with jaxlib 0.12 or newer for a step with temporary arrays of 16 MiB or more, unless
    ``keep_memory=False`` or ONWARD_KEEP_MEMORY=0 says no. Of more than 63 MiB it comes too late then, unless
    ``keep_memory=True`` lets XLA ask for pieces. Only the C library of GNU/Linux can be told so;
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


def temporary_bytes(compiled: jax.stages.Compiled) -> int:
    """The bytes of temporary arrays that a run of an executable takes, as far as XLA tells."""
    analysis = compiled.memory_analysis()
    return 0 if analysis is None else int(analysis.temp_size_in_bytes)


def in_pieces(program: Program, wanted: bool | None) -> dict[str, int]:
    """The option by which XLA's CPU compiler takes temporary arrays in pieces that glibc can keep.

    XLA asks for all of them at once, in a thread of its own. The heap of such a thread has 64 MiB in glibc:
    what is larger comes from the system, and goes back to it, whatever was set. In pieces of 8 MiB a step of
    a transformer with 78 MiB of them took 0.68 of its time on two cores. It is done for those who ask:
    programs in 16 bits take up to half as much memory again, XLA writes lines to the error output about
    arrays wider than a piece, and JAX's cache of compiled programs cannot hold them, so that with one there
    are none.

    Args:
        program: what is compiled. No piece is larger than 48 MiB: with a larger array there are none.
        wanted: whether memory is to be kept, as people asked for it.
    """
    settings: Any = jax.config  # the types of JAX 0.10 lack some
    cached = settings.jax_enable_compilation_cache and settings.jax_compilation_cache_dir
    if wanted is not True or jax.default_backend() != "cpu" or not can_keep_host_memory() or cached:
        return {}
    sizes = [nbytes(v) for v in program.variables.values()]
    if program.code is None:
        several = (op.body for op in program.ops if op.primitive.runs or len(op.body.equations) > 1)
        types = (t for body in several for call in body.calls_within for t in call.results)
        sizes += (math.prod(t.shape) * t.dtype.itemsize for t in types)
    largest = max(sizes, default=0)
    return {_PIECES: max(_PIECE, largest)} if largest <= _LARGEST_PIECE else {}


def keep_for_steps(
    compiled: jax.stages.Compiled,
    wanted: bool | None,
    environment: Mapping[str, str] = os.environ,
    is_whole: bool = True,
) -> str:
    """Keep host memory where the steps of an executable gain from it, and say so; empty where they do not.

    Args:
        compiled: the executable.
        wanted: whether to keep it; None: on a CPU, if temporary arrays are large and the environment does
            not forbid it.
        environment: of the process; ONWARD_KEEP_MEMORY=0 forbids.
        is_whole: whether it asks for its temporary arrays as one piece.
    """
    taken = temporary_bytes(compiled)
    if not wanted and (taken < LARGE or jax.default_backend() != "cpu"):
        return ""
    told = f"host memory: {taken / 2**20:,.0f} MiB of temporary arrays"
    if wanted is False or (wanted is None and environment.get(_SWITCH) == "0"):
        return f"{told} go back to the system after each step"
    is_late = is_whole and not _called
    if is_late and not CAN_BEGIN_LATE:
        return f"{told} go back to the system after each step, unless ow.keep_host_memory() is called first"
    if not (kept := _keep()):
        return f"{told}, not kept: {kept.reason}"
    if is_late and taken > _HEAP:
        ways = "ow.keep_host_memory() is called first" + (", or with keep_memory=True" if not wanted else "")
        return f"{told} go back to the system after each step, unless {ways}"
    return f"{told} are kept for the next step"
