"""``onward bench``: the benchmarks, which stand in a checkout of Onward, not in what pip installs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from onward.core.errors import MissingExtraError

HELP = """usage: onward bench [name ...] [options]

Measure what Onward costs and gains, beside the step by hand and other libraries. The benchmarks
are not part of the installed package; they run in a checkout, which has more help:

  pip install -e ".[bench,plot]" && onward bench --help"""


def bench(arguments: Sequence[str]) -> int:
    """Run ``python -m benchmarks`` of the checkout that this package, or the working directory, belongs to.

    Args:
        arguments: as for ``python -m benchmarks``; paths are relative to the working directory.

    Returns:
        Its exit status.

    Raises:
        MissingExtraError: there is no checkout.
    """
    folders = (Path(__file__).parents[3], Path.cwd())
    if {"-h", "--help"} & set(arguments) and not any(map(is_checkout, folders)):
        print(HELP)
        return 0
    root = str(checkout(folders))
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-m", "benchmarks", *arguments]
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": path}).returncode


def checkout(folders: Sequence[Path]) -> Path:
    """The first of some folders that holds the benchmarks of Onward.

    Raises:
        MissingExtraError: none does.
    """
    for folder in filter(is_checkout, folders):
        return folder
    raise MissingExtraError(
        f"The benchmarks are not part of the installed package, and there is no checkout of Onward in "
        f"{' or '.join(map(str, folders))}. Fetch the sources, and in their folder: "
        'pip install -e ".[bench,plot]" && onward bench'
    )


def is_checkout(folder: Path) -> bool:
    """Whether a folder holds the sources of Onward, with the benchmarks."""
    return (folder / "benchmarks" / "contest.py").is_file() and (folder / "src" / "onward").is_dir()
