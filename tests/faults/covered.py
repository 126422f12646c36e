"""How many branches of ``src/onward`` the recorded tests take, by folder: two for each jump of the bytecode.

python -m tests.faults.covered [.faults]      # with the Python that recorded
"""

import dis
import json
import sys
from collections import Counter
from pathlib import Path
from types import CodeType

SOURCE = Path(__file__).parents[2] / "src" / "onward"
JUMPS = ("POP_JUMP_IF_FALSE", "POP_JUMP_IF_TRUE", "POP_JUMP_IF_NONE", "POP_JUMP_IF_NOT_NONE", "FOR_ITER")


def main(folder: str = ".faults") -> None:
    taken = _taken(Path(folder))
    there, reached = Counter(), Counter()
    for path in sorted(SOURCE.rglob("*.py")):
        file = path.relative_to(SOURCE).as_posix()
        room = file.split("/")[0]
        for site in _sites(compile(path.read_text(), str(path), "exec"), file):
            there[room] += 2
            reached[room] += min(2, len(taken.get(site, ())))
    for room in there:
        print(f"{room:14} {reached[room]:6} of {there[room]:6}  {reached[room] / there[room]:7.2%}")
    print(f"{'all':14} {reached.total():6} of {there.total():6}  {reached.total() / there.total():7.2%}")


def _taken(folder: Path) -> dict[tuple[str, int, str, int], set[int]]:
    taken: dict[tuple[str, int, str, int], set[int]] = {}
    for path in folder.glob("*.jsonl"):
        for line in path.read_text().splitlines():
            for *site, way in json.loads(line).get("ways", ()):
                taken.setdefault(tuple(site), set()).add(way)
    return taken


def _sites(code: CodeType, file: str):
    """Each jump of a code object and of those in it, as the recorder names it."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in JUMPS:
            yield file, code.co_firstlineno, code.co_qualname, instruction.offset
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _sites(constant, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
