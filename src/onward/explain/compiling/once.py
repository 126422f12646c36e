"""The facts about a Program compiled as ``compile`` does: told again without compiling it again.

What is remembered holds no Program, so that it goes when the Program does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

from onward.core.homes import own_scopes
from onward.core.program import Op, Program
from onward.execute.executable import Executable
from onward.execute.storage.plan import plan as storage_of
from onward.execute.tuning import Tuning
from onward.explain.compiling.measured import fresh_name


@dataclass(frozen=True)
class Marks:
    """Scopes for the ops of a Program, each with a last one of its own, by which it is found again."""

    ops: dict[str, Op] = field(default_factory=dict)

    def __call__(self, program: Program) -> Mapping[Op, str]:
        """The scope of each op; what it is asked for, it holds."""
        scopes = own_scopes(program)
        self.ops.update((f"op_{i}_of_program", op) for i, op in enumerate(program.ops))
        return {op: "/".join(filter(None, (scopes[op], mark))) for mark, op in self.ops.items()}


@dataclass(frozen=True)
class CompiledFacts:
    """Facts about a compiled Program.

    Attributes:
        text: as XLA prints it.
        shardings: where it takes its arguments from.
        ops: by the last scope in which each was lowered.
        names: of state and data, by those that the arguments have in the text.
        memory: the bytes that XLA plans to take on each device.
    """

    text: str
    shardings: Sequence[Any]
    ops: Mapping[str, Op]
    names: Mapping[str, str]
    memory: Any


_known: WeakKeyDictionary[Program, CompiledFacts] = WeakKeyDictionary()


def compiled_once(program: Program) -> CompiledFacts:
    """The facts about a Program, which is compiled the first time.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> program = ow.trace(lambda w: jnp.sum(w), jnp.ones(3))
        >>> compiled_once(program) is compiled_once(program)
        True
    """
    if program not in _known:
        marks = Marks()
        tuned = Tuning()(program, ()).program
        named = replace(tuned, name=fresh_name(program.name))
        storage, donated = storage_of(tuned, ()), {v.name for v in tuned.next_state}
        executable = Executable(named, (), donated, storage=storage, scopes=marks, keep_memory=False)
        executable.compile()
        _known[program] = CompiledFacts(
            executable.text, executable.shardings, marks.ops, executable.argument_names, executable.memory
        )
    return _known[program]
