"""A compiled step as XLA prints it: its instructions, the loops they run in, the user's lines.

    %all-reduce.1 = f32[4,16]{1,0} all-reduce(%dot), replica_groups={{0,1},{2,3}},
        metadata={op_name="jit(step)/jvp()/dot_general" stack_frame_id=4}

The call stacks stand in tables at the top; older versions print ``source_file`` and ``source_line`` instead.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from onward.core.source import is_library, named

_COMPUTATION = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(
    r"^\s+(?P<root>ROOT )?%?(?P<name>[\w.\-]+) = (?P<type>\(.*?\)|\S+) (?P<kind>[a-z][\w\-]*)\((?P<rest>.*)$"
)
_CALLED = re.compile(r"\b(body|condition|calls|to_apply|branch_computations)=(\{[^}]*\}|%?[\w.\-]+)")
_REFERENCE = re.compile(r"%([\w.\-]+)")
_PLACE = re.compile(r'op_name="([^"]*)"')
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_FILE, _LINE = re.compile(r'source_file="([^"]*)"'), re.compile(r"source_line=(\d+)")
_TRIPS = re.compile(r"known_trip_count\W+n\W+(\d+)")
_INDEX = re.compile(r"\bindex=(\d+)")
_ROW = re.compile(r'^(\d+) (?:"(.*)"|\{(.*)\})$')
CallerOf = tuple[str, int | None]
"""A computation that runs another one, and how often it does; None where that is not known."""

_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")


@dataclass(frozen=True)
class Instruction:
    """An instruction: its name, the type of its result, its kind, and the rest of its line."""

    name: str
    type: str
    kind: str
    rest: str
    computation: str
    is_root: bool

    @property
    def operands(self) -> list[str]:
        """The names of the instructions that it reads."""
        return _REFERENCE.findall(self.rest.split(")", 1)[0])

    @property
    def place(self) -> str:
        """The scopes that were open where it was traced, and its primitive; empty where XLA put it in."""
        found = _PLACE.search(self.rest)
        return found[1] if found else ""

    @property
    def index(self) -> int | None:
        """Which of several results it takes."""
        found = _INDEX.search(self.rest)
        return int(found[1]) if found else None

    @property
    def called(self) -> Iterator[tuple[str, str]]:
        """The computations that it runs, each with what as."""
        for role, names in _CALLED.findall(self.rest):
            for name in re.findall(r"[\w.\-]+", names):
                yield role, name


@dataclass(frozen=True)
class CompiledText:
    """The text of a compiled step, read."""

    text: str
    instructions: Mapping[str, Instruction] = field(default_factory=dict)

    @classmethod
    def of(cls, text: str) -> CompiledText:
        """Read the text; names of instructions are unique in it."""
        found: dict[str, Instruction] = {}
        computation = ""
        for line in text.splitlines():
            if head := _COMPUTATION.match(line):
                computation = head["name"]
            elif row := _INSTRUCTION.match(line):
                found[row["name"]] = Instruction(
                    row["name"], row["type"], row["kind"], row["rest"], computation, bool(row["root"])
                )
        return cls(text, found)

    @cached_property
    def times(self) -> Mapping[str, int | None]:
        """For each computation that runs in a loop, how often; None where that is not known."""
        runs: dict[str, list[CallerOf]] = {}
        for instruction in self.instructions.values():
            trips = _TRIPS.search(instruction.rest)
            turns = (int(trips[1]) if trips else None) if instruction.kind == "while" else 1
            for _, name in instruction.called:
                runs.setdefault(name, []).append((instruction.computation, turns))
        return {name: self._times(name, runs, ()) for name in runs}

    def _times(
        self, name: str, runs: Mapping[str, list[tuple[str, int | None]]], open_: tuple[str, ...]
    ) -> int | None:
        """How often a computation runs: by the first that calls it, and how often that runs."""
        if name not in runs or name in open_:
            return 1
        (caller, turns), *_ = runs[name]
        outer = self._times(caller, runs, (*open_, name))
        return None if turns is None or outer is None else turns * outer

    @cached_property
    def roots(self) -> Mapping[str, Instruction]:
        """The last instruction of each computation."""
        return {i.computation: i for i in self.instructions.values() if i.is_root}

    def place_of(self, name: str) -> str:
        """Where an instruction was traced; where a fusion does not say, the place of its last one."""
        instruction = self.instructions.get(name)
        if instruction is None or instruction.place:
            return "" if instruction is None else instruction.place
        roots = (self.roots[c] for role, c in instruction.called if role == "calls" and c in self.roots)
        return next((root.place for root in roots), "")

    def line_of(self, instruction: Instruction) -> str:
        """The user's ``file:line``; empty where none is known."""
        found = _FRAME.search(instruction.rest)
        if found is None:
            file, line = _FILE.search(instruction.rest), _LINE.search(instruction.rest)
            return f"{_short(file[1])}:{line[1]}" if file and line else ""
        for file_name, number in self._stack(int(found[1])):
            if not is_library(file_name):
                return f"{_short(file_name)}:{number}"
        return ""

    def _stack(self, frame: int) -> Iterator[tuple[str, int]]:
        """The files and lines of a call stack, innermost first."""
        frames, locations, files = (self._tables[t] for t in ("StackFrames", "FileLocations", "FileNames"))
        # Some versions count parents from 1 with 0 for none, others from 2 with 1 for none.
        shift = int(any(_number(row, "parent_frame_id") == i for i, row in frames.items()))
        while frame in frames:
            location = locations.get(_number(frames[frame], "file_location_id"), "")
            yield files.get(_number(location, "file_name_id"), ""), _number(location, "line")
            parent = _number(frames[frame], "parent_frame_id") - shift
            frame = parent if parent < frame else 0

    @cached_property
    def _tables(self) -> Mapping[str, Mapping[int, str]]:
        tables: dict[str, dict[int, str]] = {name: {} for name in _TABLES}
        current: dict[int, str] | None = None
        for line in self.text.splitlines():
            if line in tables:
                current = tables[line]
            elif current is not None and (row := _ROW.match(line)):
                current[int(row[1])] = row[2] if row[2] is not None else row[3]
            elif _COMPUTATION.match(line):
                break
        return tables


def _number(row: str, key: str) -> int:
    found = re.search(rf"\b{key}=(\d+)", row)
    return int(found[1]) if found else 0


def _short(file: str) -> str:
    return os.path.basename(named(file))
