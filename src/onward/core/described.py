"""A Body without a jaxpr, only a description: that of an op of a Program loaded from a file.

It has types, attributes and operands, so that a Program can be printed, drawn, checked and pruned; it has no
jaxpr, so that it can neither be run alone nor differentiated. ``Program.code`` computes the Program.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NoReturn

from onward.core.errors import GraphError
from onward.core.jaxprs.body import Body
from onward.core.jaxprs.equations import Type
from onward.core.jaxprs.signature import BodySignature, interned
from onward.core.program import Program, programs_within


@dataclass(frozen=True, eq=False)
class Description:
    """The description of a Body: its types, attributes, operands, subprograms and cost.

    Attributes:
        type: the word for what it computes.
        inputs: the types that it takes.
        outputs: the types that it gives.
        attributes: its parameters in words.
        operands: positions of inputs, and literal numbers as text.
        subprograms: the Programs within a loop or a branch.
        cost: the fields of its ``Cost``, where they are known.
    """

    type: str
    inputs: tuple[Type, ...]
    outputs: tuple[Type, ...]
    attributes: Mapping[str, str]
    operands: tuple[int | str, ...]
    subprograms: Mapping[str, Program]
    cost: Mapping[str, Any] = field(default_factory=dict)


class DescribedBody(Body):
    """A Body made of its description."""

    def __init__(self, description: Description) -> None:
        self.description = description

    @property
    def closed(self) -> NoReturn:
        """There is none; asking for it raises ``GraphError``."""
        raise GraphError(
            f"This {self.description.type!r} was loaded from a file, in which ops have no code of their own: "
            "the Program runs as a whole; nothing can be differentiated, rewritten or run op by op. For "
            "that, trace the function again; to train on, save a compiled step: save(step, path, state)."
        )

    @property
    def text(self) -> str:
        """The text shown in place of a jaxpr."""
        return f"{self.description.type}, loaded from a file"

    @cached_property
    def in_avals(self) -> Sequence[Any]:
        """For every input its type."""
        return self.description.inputs

    @cached_property
    def out_avals(self) -> Sequence[Any]:
        """For every output its type."""
        return self.description.outputs

    @cached_property
    def signature(self) -> BodySignature:
        """Equal for bodies of the same description."""
        d = self.description
        types = tuple((t.shape, t.dtype) for t in (*d.inputs, *d.outputs))
        named = tuple(d.attributes.items()), d.operands, tuple(d.cost.items())
        inner = tuple((name, id(part)) for name, part in d.subprograms.items())
        return interned((d.type, len(d.inputs), types, named, inner))

    @property
    def has_effects(self) -> bool:
        """None, as no file can hold any."""
        return False

    @cached_property
    def primitives(self) -> frozenset[str]:
        """The word for what it computes."""
        return frozenset((self.description.type,))

    def computes(self, primitive: str) -> bool:
        """Whether that is the word for what it computes."""
        return self.description.type == primitive

    @property
    def equations(self) -> Sequence[Any]:
        """None."""
        return ()

    def depending_on(self, inputs: Iterable[int]) -> set[int]:
        """All outputs, if there is an input among these."""
        return set(range(len(self.description.outputs))) if set(inputs) else set()

    def same_everywhere(self, inputs: frozenset[int]) -> frozenset[int]:
        """All outputs, if these are all inputs."""
        all_inputs = set(range(len(self.description.inputs)))
        return frozenset(range(len(self.description.outputs)) if all_inputs <= inputs else ())

    @property
    def attributes(self) -> Mapping[str, str]:
        """Its parameters in words."""
        return self.description.attributes

    @property
    def operands(self) -> tuple[int | str, ...]:
        """Its operands: positions of inputs, and literal numbers as text."""
        return self.description.operands


@programs_within.register
def _programs_within(body: DescribedBody) -> Mapping[str, Program]:
    return body.description.subprograms
