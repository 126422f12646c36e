"""``onward doctor``: what is here to compute with, and what would make it faster, in words.

It looks and changes nothing; every line it gives advice on says what to write.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any, NamedTuple

import jax

from onward.execute.host_memory import can_keep_host_memory

EXTRAS = {
    "cluster": ("ray",),
    "demo": ("sklearn",),
    "orbax": ("orbax",),
    "plot": ("igraph", "matplotlib"),
    "serve": ("flatbuffers", "starlette", "uvicorn"),
    "tensorboard": ("tensorboardX",),
}
_DEVICE_COUNT = re.compile(r"--xla_force_host_platform_device_count=(\d+)")
_WIDTH = 12


class Finding(NamedTuple):
    """One line of the report: what was looked at, what was found, and what could be done about it."""

    what: str
    found: str
    advice: str = ""


def doctor() -> None:
    """Print the findings, each advice below what it is about."""
    for finding in examine(os.environ):
        print(f"{finding.what:{_WIDTH}}{finding.found}")
        for line in filter(None, finding.advice.split("\n")):
            print(f"{'':{_WIDTH}}-> {line}")


def examine(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Everything that the speed of a step depends on and a Program does not show.

    Example:
        >>> findings = {finding.what: finding for finding in examine({})}
        >>> findings["python"].found == platform.python_version()
        True
    """
    yield Finding("onward", _version("onward"))
    yield Finding("python", platform.python_version())
    yield Finding("jax", _version("jax"))
    yield _devices(environment.get("XLA_FLAGS", ""))
    yield _extras()
    yield _host_memory()
    yield _compilation_cache()
    yield _precision()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed as a package"


def _devices(flags: str) -> Finding:
    devices = jax.devices()
    found = f"{len(devices)} x {devices[0].device_kind}, {os.cpu_count()} cores"
    forced = _DEVICE_COUNT.search(flags)
    if forced:
        advice = (
            f"XLA_FLAGS makes {forced[1]} devices of one CPU: right to test replicate, slower to train with."
        )
    elif devices[0].platform == "cpu":
        advice = "For several host devices: XLA_FLAGS=--xla_force_host_platform_device_count=2"
    else:
        advice = ""
    return Finding("devices", found, advice)


def _extras() -> Finding:
    lacking = [extra for extra, modules in EXTRAS.items() if not all(map(find_spec, modules))]
    present = [extra for extra in EXTRAS if extra not in lacking]
    advice = f"pip install 'onward[{','.join(lacking)}]'" if lacking else ""
    return Finding("extras", ", ".join(present) or "none", advice)


def _host_memory() -> Finding:
    can, reason = can_keep_host_memory()
    if jax.default_backend() != "cpu" or not can:
        return Finding("host memory", reason if not can else "steps run on a device with memory of its own")
    advice = "Large steps on CPU gain from onward.keep_host_memory(), called before arrays are made."
    return Finding("host memory", "goes back to the system after each step", advice)


def _compilation_cache() -> Finding:
    settings: Any = jax.config
    folder = settings.jax_compilation_cache_dir
    if folder:
        return Finding("compiled", f"kept between processes in {folder}")
    advice = (
        "To compile a step once, not in every process: JAX_COMPILATION_CACHE_DIR=~/.cache/jax,\n"
        'or jax.config.update("jax_compilation_cache_dir", folder)'
    )
    return Finding("compiled", "anew in every process", advice)


def _precision() -> Finding:
    settings: Any = jax.config
    if settings.jax_enable_x64:
        advice = "float64 takes twice the memory and time; JAX_ENABLE_X64=0 unless you need it."
        return Finding("numbers", "float64 where NumPy has it (JAX_ENABLE_X64)", advice)
    return Finding("numbers", "float32")
