"""Winners of ``tune`` on disk: one small file for each Program, machine and version of JAX.

The folder is ONWARD_CACHE, or ``onward`` in the folder that the system has for caches: ~/.cache (or
XDG_CACHE_HOME), on macOS ~/Library/Caches, on Windows %LOCALAPPDATA%. It may be removed at any time.
"""

from __future__ import annotations

import json
import os
import platform
import re
import sys
from collections.abc import Mapping
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any

import jax
from jaxlib import version as jaxlib

from onward.core.errors import OnwardError
from onward.core.program import Program
from onward.distribute.split.in_words import in_words
from onward.execute.disk.durable import appearing
from onward.execute.options import OptionSet, option_set

_FORMAT = 1


def cache_folder(environment: Mapping[str, str] = os.environ, system: str = sys.platform) -> Path:
    """The folder of what was found out about this machine, and may be found out again.

    >>> print(cache_folder({"ONWARD_CACHE": "/tmp/found"}).as_posix())
    /tmp/found
    """
    if own := environment.get("ONWARD_CACHE"):
        return Path(own)
    if system == "darwin":
        return Path.home() / "Library" / "Caches" / "onward"
    if system == "win32":
        return Path(environment.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "onward" / "Cache"
    return Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "onward"


def machine() -> dict[str, str]:
    """By which options are known again that were found here: processor, cores, devices, versions."""
    return {
        "processor": _processor(),
        "cores": str(os.cpu_count()),
        "devices": f"{jax.device_count()} {jax.default_backend()}",
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
    }


def file_of(program: Program, cores: int = 1) -> Path:
    """The file for what is remembered of a Program on so many cores as devices here."""
    told = json.dumps([in_words(program), cores, machine()])
    return cache_folder() / "tuned" / f"{sha256(told.encode()).hexdigest()[:24]}.json"


def remember(program: Program, found: OptionSet, about: Mapping[str, Any], cores: int = 1) -> Path:
    """Write the options for a Program on this machine; returns the file."""
    file = file_of(program, cores)
    file.parent.mkdir(parents=True, exist_ok=True)
    told = {"format": _FORMAT, "program": program.name, "options": asdict(found), **machine(), **about}
    with appearing(file, durable=False) as part:
        part.write_text(json.dumps(told, indent=1), encoding="utf-8")
    return file


def remembered(program: Program, cores: int = 1) -> OptionSet | None:
    """The options that were remembered of a Program; None if there are none, or the file is no such."""
    try:
        told = json.loads(file_of(program, cores).read_text(encoding="utf-8"))
        if told["format"] != _FORMAT:
            return None
        found = told["options"]
        compiler = option_set(found["compiler"], "tune").compiler
        flags = (_flag(found.get(name)) for name in ("fission", "keep_memory", "attention"))
        return OptionSet(str(found["name"]), compiler, *flags)
    except (OSError, ValueError, KeyError, TypeError, OnwardError):
        return None


def _flag(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None


def _processor() -> str:
    """The model of the processor, as far as the system tells it."""
    try:
        found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    except OSError:
        found = None
    return found[1] if found else platform.processor() or platform.machine()
