"""Plants faults one at a time in a copy of the tree, and runs the tests that enter the changed function.

    python -m tests.faults.plant [--count 120] [--seed 0] [--seconds 90] [--record .faults] [--out FILE]
                                 [--first FILE] [--only FILE] [--check]

Tests of the file that mirrors the changed one come first, then those of its folder, then the quickest; the
first that fails ends the search. ``--seconds`` bounds what the tests tried for one fault took when they were
recorded. ``--first FILE`` tries what found each fault in an earlier run before anything else, and ``--only``
goes on with those that a run did not find. ``--check`` tries the cases that the check runs, and no others.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue

from tests.cases import chosen
from tests.faults.places import Fault, sample
from tests.quick import function_of

ROOT = Path(__file__).parents[2]
SOURCE = Path("src/onward")

# A process that Ray starts would take another onward that is installed before the one with the fault.
START = """
import os, sys, pytest
sys.path[:] = [p for p in sys.path if p == os.environ["PYTHONPATH"] or not os.path.isdir(f"{p}/onward")]
sys.exit(pytest.main())
"""


def main() -> int:
    options = _options()
    tests = _recorded(options.record, chosen() if options.check else {})
    before = {row["fault"]: row["by"] for row in _rows(options.first)} if options.first else {}
    faults = sample(ROOT / SOURCE, options.count, options.seed)
    if options.only:
        left = {row["fault"] for row in _rows(options.only) if not row["by"]}
        faults = [fault for fault in faults if _name(fault) in left]
    trees: Queue[Path] = Queue()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.workers) as pool:
        for n in range(options.workers):
            trees.put(_copied(Path(folder) / str(n)))

        def tried(fault: Fault) -> dict[str, str]:
            tree = trees.get()
            try:
                chosen = list(_chosen(fault, tests, options.seconds, before.get(_name(fault))))
                patience = 60 + 5 * options.seconds
                return _tried(fault, tree, chosen, Path(folder) / "compiled", patience)
            finally:
                trees.put(tree)

        rows = []
        with options.out.open("w") as out:
            for row in pool.map(tried, faults):
                rows.append(row)
                print(row["fault"], "|", row["by"] or "NOT FOUND", flush=True)
                out.write(json.dumps(row) + "\n")
                out.flush()
    _report(rows)
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.plant")
    parser.add_argument("--count", type=int, default=120)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=90.0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--record", type=Path, default=Path(".faults"))
    parser.add_argument("--first", type=Path)
    parser.add_argument("--only", type=Path)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--out", type=Path, default=Path(".faults/found.json"))
    return parser.parse_args()


def _rows(path: Path) -> Iterator[dict]:
    for line in path.read_text().splitlines():
        yield json.loads(line)


def _recorded(folder: Path, some: dict[str, set[str]]) -> dict[str, dict[str, float]]:
    """For each function the tests that enter it, with their seconds; of some tests, some of their cases.

    Of a test with several cases all are meant: what the first one computes the others may find in a cache.
    """
    rows = [row for path in folder.glob("*.jsonl") for row in _rows(path) if "test" in row]
    cases: dict[str, dict[str, float]] = {}
    for row in rows:
        function = function_of(row["test"])
        if row["test"] in some.get(function, [row["test"]]):
            cases.setdefault(function, {})[row["test"]] = row["seconds"]
    tests: dict[str, dict[str, float]] = {}
    for row in rows:
        for function in row["functions"]:
            tests.setdefault(function, {}).update(cases.get(function_of(row["test"]), {}))
    if not tests:
        sys.exit(f"no recorded tests in {folder}: pytest -n 3 --dist loadfile -p tests.faults.record")
    return tests


def _name(fault: Fault) -> str:
    return f"{fault} -> {' '.join(fault.text.split())}"


def _chosen(
    fault: Fault, tests: dict[str, dict[str, float]], seconds: float, first: str | None
) -> Iterator[str]:
    """The tests to try: an earlier finder, then those of the same folder, then the quickest, within a bound.

    A function that no test enters in its own process runs in one that a test starts: the files of its folder.
    """
    entering = tests.get(f"{fault.file}:{fault.function}", {})
    if first:
        yield first
    folder, *words = fault.file.removesuffix(".py").split("/")
    if not entering:
        for path in sorted((ROOT / "tests" / folder).rglob("test_*.py")):
            if any(word in path.as_posix() for word in words):
                yield path.relative_to(ROOT).as_posix()
        return

    def distance(test: str) -> int:
        file = test.partition("::")[0]
        if not file.startswith(f"tests/{folder}/"):
            return 2
        return 1 - any(word in file for word in words)

    for test, took in sorted(entering.items(), key=lambda e: (distance(e[0]), e[1])):
        seconds -= took
        if seconds < 0:
            return
        yield test


def _copied(tree: Path) -> Path:
    """The files that git knows, in a folder of their own."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
    return tree


def _tried(fault: Fault, tree: Path, tests: list[str], compiled: Path, patience: float) -> dict[str, str]:
    path = tree / SOURCE / fault.file
    original = path.read_bytes()
    path.write_bytes(fault.planted_in(original))
    try:
        by = _first_failing(tree, tests, compiled, patience) if tests else ""
    finally:
        path.write_bytes(original)
    line = original.splitlines()[fault.line - 1].decode().strip()
    return {"fault": _name(fault), "kind": fault.kind, "by": by, "was": line, "tried": str(len(tests))}


def _first_failing(tree: Path, tests: list[str], compiled: Path, patience: float) -> str:
    """The first test that fails, "hangs", or nothing."""
    (tree / "chosen").write_text("\n".join(dict.fromkeys(tests)))
    environment = {
        **os.environ,
        "PYTHONPATH": str(tree / "src"),
        "PYTHONDONTWRITEBYTECODE": "1",
        "JAX_COMPILATION_CACHE_DIR": str(compiled),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    command = [sys.executable, "-c", START, "-x", "-q", "-p", "no:cacheprovider", "--tb=no", "@chosen"]
    try:
        done = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, text=True, timeout=patience, check=False
        )
    except subprocess.TimeoutExpired:
        return "hangs"
    if done.returncode == 0:
        return ""
    for line in done.stdout.splitlines():
        if line.startswith(("FAILED ", "ERROR ")):
            return line.split(" ", 1)[1].split(" - ")[0]
    return "at import: " + (done.stderr or done.stdout).strip()[-200:]


def _report(rows: list[dict[str, str]]) -> None:
    print(f"\n{sum(bool(r['by']) for r in rows)} of {len(rows)} found")
    for name in ("kind", "folder"):
        table: dict[str, list[bool]] = {}
        for row in rows:
            key = row["kind"] if name == "kind" else row["fault"].split("/")[0]
            table.setdefault(key, []).append(bool(row["by"]))
        print("\n".join(f"{key:12} {sum(found):3} of {len(found):3}" for key, found in sorted(table.items())))
    for row in rows:
        if not row["by"]:
            print(f"\nnot found by {row['tried']} tests: {row['fault']}\n    {row['was']}")


if __name__ == "__main__":
    sys.exit(main())
