"""``onward doctor``: what is here to compute with, what is missing, and what would make it faster, in words.

It looks and changes nothing; every line it gives advice on says what to write.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jaxlib import version as jaxlib

from onward.core import compiler
from onward.execute.host_memory import can_keep_host_memory, is_wanted

EXTRAS = {
    "cluster": "trainers and parameter servers",
    "demo": "the digits of onward demo",
    "orbax": "checkpoints of arrays sharded over hosts",
    "plot": "drawings and curves",
    "png": "pictures as PNG files",
    "serve": "answers over HTTP",
    "tensorboard": "curves for TensorBoard",
    "bench": "the libraries that onward bench compares with",
}
"""What each extra is for, in the order in which they are told."""

_REQUIREMENT = re.compile(r"([\w.-]+)[^;]*?(?:>=\s*([\d.]+))?[^;]*?(?:;.*extra == ['\"](\w+)['\"].*)?")
_DEVICE_COUNT = re.compile(r"--xla_force_host_platform_device_count=(\d+)")
_NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
_WIDTH = 14


class Finding(NamedTuple):
    """One line of the report: what was looked at, what was found, and what could be done about it."""

    what: str
    found: str
    advice: str = ""


class Requirement(NamedTuple):
    """A package that is needed, its least version, and the extra that it belongs to, if any."""

    package: str
    least: str
    extra: str


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
    needed = requirements(requires("onward") or ())
    yield Finding("onward", version("onward"))
    yield Finding("python", platform.python_version())
    yield from (_package(r) for r in needed if not r.extra)
    yield _devices(environment)
    yield from extras(needed)
    yield _host_memory(environment)
    yield _compiler(environment)
    yield _compilation_cache()
    yield _precision()


def requirements(lines: Iterable[str]) -> list[Requirement]:
    """Parse the requirements in the metadata of a package.

    Example:
        >>> requirements(["jax>=0.10.2", "ray>=2.60; extra == 'cluster'"])[1]
        Requirement(package='ray', least='2.60', extra='cluster')
    """
    found = (_REQUIREMENT.fullmatch(line) for line in lines)
    return [Requirement(m[1], m[2] or "0", m[3] or "") for m in found if m]


def extras(needed: Iterable[Requirement]) -> Iterator[Finding]:
    """For each extra the versions of what belongs to it, or what is missing or too old."""
    everything = list(needed)
    for extra, purpose in EXTRAS.items():
        packages = [r for r in everything if r.extra == extra]
        found = ", ".join(_said(r) for r in packages)
        right = all(_is_there(r) for r in packages)
        yield Finding(f"[{extra}]", found, "" if right else f"{purpose}: pip install 'onward[{extra}]'")


def _package(needed: Requirement) -> Finding:
    advice = f"pip install -U '{needed.package}>={needed.least}'"
    return Finding(needed.package, _said(needed), "" if _is_there(needed) else advice)


def _said(needed: Requirement) -> str:
    """A package with its version and what is wrong with it."""
    found = _version(needed.package)
    if found is None:
        return f"no {needed.package}"
    shown = f"{needed.package} {found}" if needed.extra else found
    return shown if _is_there(needed) else f"{shown} (too old: Onward needs {needed.least})"


def _is_there(needed: Requirement) -> bool:
    found = _version(needed.package)
    return found is not None and _numbers(found) >= _numbers(needed.least)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _numbers(text: str) -> tuple[int, ...]:
    """The numbers that a version begins with."""
    return tuple(int(n) for n in re.findall(r"\d+", re.split(r"[^\d.]", text)[0]))


def devices_in_words() -> str:
    """The devices of JAX and how many there are; or why there are none."""
    try:
        devices = jax.devices()
    except RuntimeError as error:
        return f"no device ({str(error).splitlines()[0]})"
    return f"{len(devices)} x {devices[0].device_kind}"


def _devices(environment: Mapping[str, str]) -> Finding:
    devices = jax.devices()
    found = f"{devices_in_words()}, {os.cpu_count()} cores"
    forced = _DEVICE_COUNT.search(environment.get("XLA_FLAGS", ""))
    is_cpu = devices[0].platform == "cpu"
    if forced:
        advice = (
            f"XLA_FLAGS makes {forced[1]} devices of one CPU: right to test replicate, slower to train with."
        )
    elif is_cpu and _NVIDIA_DRIVER.exists() and not environment.get("JAX_PLATFORMS"):
        advice = (
            "This machine has an NVIDIA driver, and this JAX computes on the CPU: pip install 'jax[cuda13]'"
        )
    elif is_cpu:
        advice = "For several host devices: XLA_FLAGS=--xla_force_host_platform_device_count=2"
    else:
        advice = ""
    return Finding("devices", found, advice)


def _host_memory(environment: Mapping[str, str]) -> Finding:
    can, reason = can_keep_host_memory()
    if jax.default_backend() != "cpu" or not can:
        return Finding("host memory", reason if not can else "steps run on a device with memory of its own")
    if not is_wanted(None, environment):
        advice = (
            "Large steps on CPU are faster without ONWARD_KEEP_MEMORY=0; the process then keeps more memory."
        )
        return Finding("host memory", "goes back to the system after each step", advice)
    return Finding("host memory", "stays with the process once a step of 16 MiB and more is compiled")


def _compiler(environment: Mapping[str, str]) -> Finding:
    found = f"jaxlib {jaxlib.__version__}"
    if not compiler.AFFECTED or jax.default_backend() != "cpu":
        return Finding("compiler", f"no known faults of {found} here")
    if compiler.is_cured_by(environment):
        return Finding("compiler", f"XLA_FLAGS sets {compiler.OPTION} for the whole process")
    advice = (
        "Plain jax.jit has them. Take Python 3.12 or newer with pip install -U jax, or set\n"
        f"XLA_FLAGS={compiler.CURE}"
    )
    return Finding("compiler", f"{found} gets some sums wrong; cured in what Onward compiles", advice)


def _compilation_cache() -> Finding:
    settings: Any = jax.config
    folder = settings.jax_compilation_cache_dir
    if folder:
        return Finding("compiled", f"kept between processes in {folder}")
    advice = (
        "To compile a step once, not in every process: JAX_COMPILATION_CACHE_DIR=~/.cache/jax,\n"
        'or jax.config.update("jax_compilation_cache_dir", folder)'
    )
    return Finding("compiled", "again in every process", advice)


def _precision() -> Finding:
    settings: Any = jax.config
    if settings.jax_enable_x64:
        advice = "float64 takes twice the memory and time; JAX_ENABLE_X64=0 unless you need it."
        return Finding("numbers", "float64 where NumPy has it (JAX_ENABLE_X64)", advice)
    return Finding("numbers", "float32")
