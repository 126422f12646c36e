"""From the instructions of a compiled step back to the pass and the scope that asked for them.

XLA keeps, with each instruction, the scopes that were open where JAX traced it; the ops of a Program open one
for their pass and below it their own. An instruction that fuses several has the name of its last one.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from onward.core.homes import own_scopes
from onward.core.program import Op, Program
from onward.core.words import Pass

_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?(?P<name>[\w.\-]+) = .*?\s(?P<kind>[a-z][\w\-]*)\(")
_PLACE = re.compile(r'op_name="(?P<place>[^"]*)"')
_PASSES = {str(made_by): made_by for made_by in Pass}
_AROUND = frozenset({"while", "conditional", "call"})


class InstructionOrigin(NamedTuple):
    """Where an instruction comes from; ``made_by`` None: the compiler put it in by itself."""

    made_by: Pass | None
    scope: str


def places(text: str, program: Program, scopes: Mapping[Op, str]) -> Mapping[str, InstructionOrigin]:
    """For each instruction of a compiled step, by name, where it comes from; its ops were in these scopes.

    Loops, branches and calls are left out: what runs within them is named by itself.
    """
    known = frozenset((*scopes_of(program), *filter(None, scopes.values())))
    found: dict[str, InstructionOrigin] = {}
    for line in text.splitlines():
        if (shape := _INSTRUCTION.match(line)) and shape["kind"] not in _AROUND:
            named = _PLACE.search(line)
            found[shape["name"]] = place_of(named["place"] if named else "", known)
    return found


def place_of(path: str, known: Collection[str]) -> InstructionOrigin:
    """The pass and the scope in the scopes of an instruction.

    Within a loop the pass is that of the loop, the scope that of the op in its body. A scope may have the
    name of a pass.

    >>> place_of("jit(f)/backward/a/while/body/forward/a/fc/dot_general", {"a", "a/fc"})
    InstructionOrigin(made_by=<Pass.BACKWARD: 'backward'>, scope='a/fc')
    """
    words = path.split("/")
    marked = next((i for i, word in enumerate(words) if word in _PASSES), None)
    if marked is None:
        return InstructionOrigin(None, "")
    made_by, scope = _PASSES[words[marked]], ""
    at: int | None = marked
    while at is not None:
        length = _longest(words[at + 1 :], known)
        scope = "/".join(words[at + 1 : at + 1 + length])
        later = range(at + 1 + length, len(words))
        at = next((i for i in later if words[i] in _PASSES), None)
    return InstructionOrigin(made_by, scope)


def _longest(words: Sequence[str], known: Collection[str]) -> int:
    """How many words the longest known scope takes that these begin with."""
    return next((n for n in range(len(words), 0, -1) if "/".join(words[:n]) in known), 0)


def scopes_of(program: Program) -> Iterator[str]:
    """The scopes of a Program and of the Programs inside its loops."""
    for op, scope in own_scopes(program).items():
        if scope:
            yield scope
        for inner in op.subprograms.values():
            yield from scopes_of(inner)


def module_of(text: str) -> str:
    """The name of a compiled computation.

    >>> module_of("HloModule jit_loss, is_scheduled=true")
    'jit_loss'
    """
    return text.split(None, 1)[1].split(",", 1)[0] if text.startswith("HloModule ") else ""
