"""One way of asking a model: which data goes in, which Variables come out.

>>> import numpy as np, onward as ow
>>> def network():
...     return ow.layer.fc(ow.data("x", (None, 4)), 2)
>>> plan = RequestPlan.of(ow.Model(network), ())
>>> plan.fetch, [str(x) for x in plan.inputs]
(('fc_0',), ['x float32[n,4]'])
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import jax
import numpy as np

from onward.core.errors import ArgumentError
from onward.core.program import Program, Variable
from onward.core.walk import descendants
from onward.develop.batch import WEIGHT, batch_names
from onward.execute.feeds import Feeds, data_names
from onward.fit.evaluator import Evaluator
from onward.fit.model import EvaluationRequest, Model
from onward.serve.endpoint.compiled import CompiledByLengths, Lengths
from onward.serve.export.variant import Loaded

Arrays = Mapping[str, np.ndarray]
ROWS = "n"


@dataclass(frozen=True)
class Input:
    """One array of a request.

    Attributes:
        variable: which the Program reads.
        batched: whether its first axis runs over the examples.
        shape: its lengths, with a word for each that may be any: ``n`` for the number of examples.
    """

    variable: Variable
    batched: bool
    shape: tuple[int | str, ...]

    @property
    def name(self) -> str:
        """The name by which a request gives it."""
        return self.variable.name

    @property
    def example(self) -> tuple[int, ...]:
        """The shape of one example, as it was traced."""
        return (1, *self.variable.shape[1:]) if self.batched else self.variable.shape

    def takes(self, shape: tuple[int, ...]) -> bool:
        """Whether an array of this shape may be given for it; no length that is free is 0, but for rows."""
        lengths = list(zip(self.shape, shape, strict=False))[self.batched :]
        fits = all(found > 0 if isinstance(n, str) else found == n for n, found in lengths)
        return len(shape) == len(self.shape) and fits

    @property
    def type(self) -> str:
        """Its dtype and shape, in words."""
        return f"{self.variable.dtype}[{','.join(map(str, self.shape))}]"

    def __str__(self) -> str:
        return f"{self.name} {self.type}"


@dataclass(frozen=True, eq=False)
class RequestPlan:
    """The computation of some Variables of a Model, from the data that they need and from no other.

    Attributes:
        model: whose parameters are read as they are when a batch is computed.
        fetch: the names of what comes out, in order.
        inputs: what goes in.
        feeds: what turns a request's values into arrays of the right dtypes, or says what is wrong.
        shapes: those of all Variables, with a word for each length that may be any.
    """

    model: Model
    fetch: tuple[str, ...]
    inputs: tuple[Input, ...]
    feeds: Feeds
    shapes: Mapping[str, tuple[int | str, ...]]

    @classmethod
    def of(cls, model: Model, fetch: Iterable[str]) -> RequestPlan:
        """The plan for these names; for none, what the network returns for each example.

        Raises:
            UnknownNameError: no Variable has such a name.
            ArgumentError: nothing is named and the network returns nothing for each example, or no array.
        """
        whole = model.test_program
        split = _batched(whole)
        names = tuple(whole[name].name for name in dict.fromkeys(fetch)) or _returned(whole, split)
        program = EvaluationRequest(names, only=True).program(whole)
        for v in (*program.inputs, *(program[name] for name in names)):
            _expect_numbers(v)
        shapes = _shapes(whole, split)
        inputs = tuple(Input(v, v.name in split, shapes[v.name]) for v in program.inputs)
        return cls(model, names, inputs, Feeds(program), shapes)

    @cached_property
    def by_name(self) -> Mapping[str, Input]:
        """The inputs by name."""
        return {x.name: x for x in self.inputs}

    @property
    def expected(self) -> str:
        """The inputs, in words."""
        return ", ".join(map(str, self.inputs)) or "nothing"

    @cached_property
    def batch_sizes(self) -> tuple[int, ...]:
        """How many examples the model's file takes, in ascending order; nothing if it takes any number."""
        recipe = self.model.test_program.recipe
        origin = recipe.origin if recipe is not None else None
        batched = [x.name for x in self.inputs if x.batched][:1]
        if not isinstance(origin, Loaded) or any(variant.sizes for variant in origin.variants):
            return ()
        shapes = [dict(variant.template.lengths("inputs")) for variant in origin.variants]
        return tuple(sorted({int(shape[name][0]) for shape in shapes for name in batched}))

    def outputs(self) -> list[Variable]:
        """The Variables that come out."""
        return [self.model.test_program[name] for name in self.fetch]

    def run(self, feed: Arrays) -> list[np.ndarray]:
        """Compute on arrays of the right names, shapes and dtypes, with an Evaluator made for the purpose."""
        model = self._compiled.model_for(self.lengths_of(feed))
        out = Evaluator(model, self.fetch).forward(**self._arguments(feed))
        return [np.asarray(out[name]) for name in self.fetch]

    def lengths_of(self, feed: Arrays) -> Lengths:
        """The lengths of each input but for the number of examples."""
        return tuple(feed[x.name].shape[x.batched :] for x in self.inputs)

    @cached_property
    def traced_lengths(self) -> Lengths:
        """Those lengths as they were traced."""
        return tuple(x.variable.shape[x.batched :] for x in self.inputs)

    @cached_property
    def _compiled(self) -> CompiledByLengths:
        return CompiledByLengths(self.model)

    def _arguments(self, feed: Arrays) -> Mapping[str, Any]:
        """The data arguments that the inputs are part of, in their containers."""
        program = self.model.test_program
        assert program.signature is not None
        arguments = {}
        for structure, name in zip(program.signature.data, data_names(program), strict=True):
            if any(v.name in feed for v in structure.variables):
                arguments[name] = structure.unflatten(_value(feed, v) for v in structure.variables)
        return arguments


def _value(feed: Arrays, v: Variable) -> Any:
    """The array of a Variable; what nothing asked for reads may be anything."""
    return feed[v.name] if v.name in feed else np.zeros(v.shape, v.dtype)


def _batched(program: Program) -> tuple[str, ...]:
    """The names of the data that has a row for each example."""
    fixed = program.recipe.origin.fixed_data if program.recipe is not None else frozenset()
    names, free = batch_names(program, (), WEIGHT, fixed), _free(program)
    return tuple(n for n in names if not free or free[n][0] == free[names[0]][0])


def _shapes(program: Program, split: tuple[str, ...]) -> Mapping[str, tuple[int | str, ...]]:
    """The shape of every Variable, with a word for each length that may be any."""
    free = _free(program)
    shapes: dict[str, tuple[int | str, ...]] = {n: free.get(n, v.shape) for n, v in program.variables.items()}
    whole = {v.name for v in program.inputs}.difference(split)
    rows = {shapes[name][0] for name in split if ROWS not in chain(*free.values())}

    def is_rows(axis: int, length: int | str) -> bool:
        """Whether it is the number of examples: a word is, along any axis; a number only along the first."""
        return length in rows and (isinstance(length, str) or not axis)

    return {
        name: shape if name in whole else tuple(ROWS if is_rows(i, n) else n for i, n in enumerate(shape))
        for name, shape in shapes.items()
    }


def _free(program: Program) -> Mapping[str, tuple[int | str, ...]]:
    """The shapes of the Variables of a file with free lengths, each of which has a word there."""
    return program.recipe.origin.free_lengths if program.recipe is not None else {}


def _per_example(program: Program, split: tuple[str, ...]) -> set[Variable]:
    """The Variables that depend on the examples and have one row for each of them."""
    read = [v for v in program.inputs if v.name in split]
    rows = {v.shape[0] for v in read}
    return {v for v in descendants(program, read) if v.shape and v.shape[0] in rows} - set(read)


def _returned(program: Program, split: tuple[str, ...]) -> tuple[str, ...]:
    rows = _per_example(program, split)
    names = tuple(dict.fromkeys(v.name for v in program.outputs if v in rows))
    if not names:
        raise ArgumentError(_nothing_returned(program, rows))
    return names


def _nothing_returned(program: Program, rows: set[Variable]) -> str:
    scoped = {op.scope for op in program.ops}
    layers = [v.name for v in program.variables.values() if v in rows and v.name in scoped]
    names = layers or [v.name for v in program.variables.values() if v in rows]
    shown = ", ".join(map(repr, names[-8:]))
    returned = ", ".join(f"{v.name} {v.type}" for v in program.outputs) or "nothing"
    if not names:
        return (
            f"{program.name} takes no batch of examples: no value in it has a row for each. "
            "Nothing can be served."
        )
    return (
        f"{program.name} returns {returned}, and nothing with a row for each example that could be served. "
        f"Name what is to be answered, outputs=[...], of {shown}{' and others' if len(names) > 8 else ''}."
    )


def _expect_numbers(v: Variable) -> None:
    kinds = (jax.numpy.integer, jax.numpy.floating, jax.numpy.bool_)
    if not any(jax.numpy.issubdtype(v.dtype, kind) for kind in kinds):
        raise ArgumentError(f"{v.name!r} is {v.type}; only real numbers and booleans can be served.")
