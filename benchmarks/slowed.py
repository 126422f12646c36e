"""An op that takes time and takes no core: so more devices compute at once than there are cores.

The op is a handler of XLA's foreign function interface, in C++. One in Python will not do: JAX runs an
executable with a Python callback in the thread that calls it, which then issues nothing else.

>>> from benchmarks.slowed import slowed
>>> slow = slowed(microseconds=20_000)  # None where there is no C++ compiler
>>> slow is None or slow(jax.numpy.ones(3)).tolist() == [1, 1, 1]
True
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import jax
import numpy as np
from jax import Array

_TARGET = "onward_benchmarks_sleep"
_SOURCE = """
#include <chrono>
#include <thread>
#include "xla/ffi/api/c_api.h"

extern "C" XLA_FFI_Error* Sleep(XLA_FFI_CallFrame* frame) {
  auto* asked = frame->extension_start;
  if (asked != nullptr && asked->type == XLA_FFI_Extension_Metadata) {
    auto* told = reinterpret_cast<XLA_FFI_Metadata_Extension*>(asked)->metadata;
    told->api_version.major_version = XLA_FFI_API_MAJOR;
    told->api_version.minor_version = XLA_FFI_API_MINOR;
  } else if (frame->stage == XLA_FFI_ExecutionStage_EXECUTE) {
    auto* microseconds = static_cast<XLA_FFI_Scalar*>(frame->attrs.attrs[0])->value;
    std::this_thread::sleep_for(std::chrono::microseconds(*static_cast<int64_t*>(microseconds)));
  }
  return nullptr;
}
"""


def slowed(microseconds: int) -> Callable[[Array], Array] | None:
    """The function that returns its array after so long; None where it cannot be built, or is no CPU."""
    if jax.default_backend() != "cpu" or not _registered():
        return None

    def slow(x: Array) -> Array:
        call = jax.ffi.ffi_call(_TARGET, jax.ShapeDtypeStruct(x.shape, x.dtype), input_output_aliases={0: 0})
        made: Array = call(x, microseconds=np.int64(microseconds))
        return made

    return slow


def compiler() -> str | None:
    """The C++ compiler that is found; None if there is none."""
    return next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)


@cache
def _registered() -> bool:
    """Build the handler, and make it known to XLA."""
    if (found := compiler()) is None:
        return False
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "sleep.cc"), Path(folder, "sleep.so")
        source.write_text(_SOURCE)
        headers = f"-I{jax.ffi.include_dir()}"
        subprocess.run([found, "-std=c++17", "-shared", "-fPIC", headers, source, "-o", library], check=True)
        handler = ctypes.CDLL(str(library)).Sleep
    jax.ffi.register_ffi_target(_TARGET, jax.ffi.pycapsule(handler), platform="cpu")
    return True
