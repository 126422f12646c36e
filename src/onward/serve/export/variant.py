"""One form in which a file holds a Program: its graph and its executable, for free lengths or for fixed ones.

Most files hold one variant, for any batch. A network that cannot be traced without knowing how long its batch
is has one for each length that was saved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from onward.core.check import check
from onward.core.errors import ArgumentError, RecipeError
from onward.core.program import Code, Program, Recipe
from onward.core.structure import Structure
from onward.serve.export.dimensions import evaluated
from onward.serve.export.executable import reads_of
from onward.serve.export.graph import Template


@dataclass(frozen=True, eq=False)
class Variant:
    """A Program for all batches that fit.

    Attributes:
        template: its graph.
        sizes: the free lengths, by name, each with its size when the Program was traced.
        call: what computes all its Variables.
        constants: the arrays in it, by name.
        file: where it stands.
        lacks: why it has no derivative; empty if it has one.
    """

    template: Template
    sizes: Mapping[str, int]
    call: Callable[..., Sequence[Any]]
    constants: Mapping[str, Any]
    file: str
    lacks: str

    def program(self, sizes: Mapping[str, int]) -> Program:
        """The Program where its free lengths have these sizes."""
        program = self.template.program(sizes)
        constants = {v: self.constants[v.name] for v in program.constants}
        program = replace(program, constants=constants)
        gives = tuple(v.name for op in program.ops for v in op.outputs)
        ops = frozenset(program.ops)
        code = Code(self.call, reads_of(program), gives, ops, self.file, self.lacks)
        return check(replace(program, code=code))

    def sizes_of(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int] | None:
        """The sizes of the free lengths with which the data has these shapes; None if there are none."""
        sizes: dict[str, int] = {}
        inputs = dict(self.template.lengths("inputs"))
        for name, lengths in inputs.items():
            if len(lengths) != len(shapes[name]):
                return None
            pairs = zip(lengths, shapes[name], strict=True)
            sizes |= {n: found for n, found in pairs if n in self.sizes and isinstance(n, str)}
        if sizes.keys() != self.sizes.keys() or 0 in sizes.values():
            return None
        fits = all(
            tuple(evaluated(n, sizes) for n in lengths) == shapes[name] for name, lengths in inputs.items()
        )
        return sizes if fits else None

    def __str__(self) -> str:
        shown = [f"{name}[{', '.join(map(str, shape))}]" for name, shape in self.template.lengths("inputs")]
        least = f" with {' and '.join(self.sizes)} of at least 1" if self.sizes else ""
        return ", ".join(shown) + least


@dataclass(frozen=True, eq=False)
class Loaded:
    """The origin of a Program from a file: in place of a function, the variants of that file.

    Attributes:
        variants: what the file holds.
        training: whether it is a training step, or a network as it is when it is trained.
        fixed_data: the data that has a length of its own, not that of the batch.
        test: of a network that is trained otherwise than it answers, how it answers.
        asks_training: taken for granted, for the function is not in the file.
        makers: none, for names in a file are what people know a Variable by.
    """

    variants: tuple[Variant, ...]
    training: bool
    fixed_data: frozenset[str]
    test: Loaded | None = None
    assumes_batch: bool = False
    asks_training: bool = True
    makers: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def free_lengths(self) -> Mapping[str, tuple[int | str, ...]]:
        """The shape of every Variable, a word for each length that is free; none where lengths are fixed."""
        first = self.variants[0]
        return first.template.shapes if first.sizes else {}

    def program(self) -> Program:
        """The Program as it was when it was saved."""
        first = self.variants[0]
        return self._remembering(first.program(first.sizes))

    def trace(self, data: tuple[Any, ...]) -> Program:
        """The Program for data of these types.

        Raises:
            RecipeError: the file holds none for such shapes.
        """
        shapes = dict(self._shapes(data))
        for variant in self.variants:
            if (sizes := variant.sizes_of(shapes)) is not None:
                return self._remembering(variant.program(sizes))
        given = ", ".join(f"{name}[{', '.join(map(str, shape))}]" for name, shape in shapes.items())
        taken = "; or ".join(map(str, self.variants))
        raise RecipeError(
            f"{self.variants[0].file}, from which it was loaded, takes {taken}. It was given {given}."
        )

    def for_test(self) -> Program:
        """The same Program, if it is none that trains.

        Raises:
            RecipeError: it trains, and the network without that is not in the file.
        """
        if self.test is not None:
            return self.test.program()
        if self.training:
            raise RecipeError(
                "This Program was loaded from the file of a training step, in which the test Program is not. "
                "Save the Model as well: save(model, path)."
            )
        return self.program()

    def _remembering(self, program: Program) -> Program:
        return replace(program, recipe=Recipe(self, program.ops))

    def _shapes(self, data: tuple[Any, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
        """The shape of each data Variable, from the arguments in the containers of the signature."""
        for structure, argument in zip(self._data, data, strict=True):
            arrays = structure.flatten(argument, "data")
            yield from ((v.name, tuple(x.shape)) for v, x in zip(structure.variables, arrays, strict=True))

    @property
    def _data(self) -> tuple[Structure, ...]:
        first = self.variants[0]
        signature = first.template.program(first.sizes).signature
        if signature is None:
            raise ArgumentError("A Program without a signature takes no data.")
        return signature.data
