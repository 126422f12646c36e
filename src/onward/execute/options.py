"""How an executable is compiled: options of XLA, and the transformations that one can do without.

Options decide more on a CPU than most rewriting does, and no set of them is best for every Program: ``tune``
tries some, ``compile(program, options=...)`` takes them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
from jaxlib import version as jaxlib

from onward.core.compiler import compiler_options
from onward.core.errors import ArgumentError
from onward.core.structure import describe

Value = str | bool | int | float

_REFUSED = re.compile(r"No such compile option: '([^']*)'|While setting option (\w+), (.*)")


@dataclass(frozen=True)
class OptionSet:
    """Options under which a Program is compiled; what is not said is as ``compile`` has it by default.

    Attributes:
        name: for people.
        compiler: options of XLA by name, over those that Onward gives by itself.
        fission: False leaves loops as they are.
        keep_memory: as of ``compile``.
        attention: True computes attention as ``fuse_attention`` does, where that leaves something out.

    Example:
        >>> print(OptionSet("wide", {"xla_cpu_prefer_vector_width": 512}, fission=False))
        xla_cpu_prefer_vector_width=512, no fission
    """

    name: str = "default"
    compiler: Mapping[str, Value] = field(default_factory=dict)
    fission: bool | None = None
    keep_memory: bool | None = None
    attention: bool | None = None

    @property
    def words(self) -> tuple[str, ...]:
        """Its options and switches, each in words."""
        switches = {
            (self.fission, "fission"),
            (self.keep_memory, "memory kept"),
            (self.attention, "fused attention"),
        }
        told = sorted(f"{'' if value else 'no '}{word}" for value, word in switches if value is not None)
        return (*(f"{name}={value}" for name, value in self.compiler.items()), *told)

    def __str__(self) -> str:
        return ", ".join(self.words) or "as compile has it"


def option_set(given: Any, what: str = "compile: options", name: str = "given") -> OptionSet:
    """The options that people gave, checked as far as that can be done without XLA.

    Raises:
        ArgumentError: neither options of XLA by name nor an OptionSet.
    """
    if given is None:
        return OptionSet()
    if isinstance(given, OptionSet):
        return given
    if not isinstance(given, Mapping):
        raise ArgumentError(
            f"{what} is {describe(given)}; expected options of XLA by name, such as "
            "{'xla_cpu_prefer_vector_width': 512}, what tune found, or 'tuned'."
        )
    for option, value in given.items():
        if not (isinstance(option, str) and isinstance(value, Value)):
            raise ArgumentError(
                f"{what} holds {option!r}: {describe(value)}; expected names of options, each with a text, a "
                "number, True or False."
            )
    return OptionSet(name, dict(given))


def all_options(given: Mapping[str, Value]) -> dict[str, Any]:
    """Options of XLA over those that Onward gives by itself."""
    return {**compiler_options(), **given}


def refusal(error: Exception) -> ArgumentError | None:
    """The sentence for an option that XLA refuses; None if the error is another."""
    if (found := _REFUSED.search(str(error))) is None:
        return None
    unknown, name, reason = found.groups()
    here = f"XLA of jaxlib {jaxlib.__version__}, on {jax.default_backend()}"
    if unknown is None:
        return ArgumentError(f"options: {here}, does not take this value of {name!r}: {reason}")
    return ArgumentError(
        f"options: {here}, knows no option {unknown!r}. Options are those of XLA_FLAGS without the dashes; "
        "some flags hold for a whole process only and are none: set these in XLA_FLAGS."
    )
