"""The products that read a weight, and which of its axes are inputs and outputs there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import NoReturn

from onward.core.errors import GraphError
from onward.core.jaxprs.body import Call
from onward.core.primitives.traits import Runs, Work
from onward.core.program import Op, Program, Variable
from onward.core.turn import ScanTurn
from onward.derive.low_rank.view import WeightView, moved


@dataclass(frozen=True)
class Product:
    """An op that multiplies something with a weight.

    Attributes:
        op: the op.
        call: its equation.
        side: which operand is the weight.
        view: the weight as this operand.
    """

    op: Op
    call: Call
    side: int
    view: WeightView

    @property
    def other(self) -> Variable:
        """The value that is multiplied with the weight."""
        place = self.op.body.operands[1 - self.side]
        assert isinstance(place, int)
        return self.op.inputs[place]

    @property
    def weight(self) -> Variable:
        """The weight as it is read here."""
        place = self.op.body.operands[self.side]
        assert isinstance(place, int)
        return self.op.inputs[place]

    def dimensions(self, side: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The axes of an operand that are summed over, and those along which there are many products."""
        contracted, batch = self.call.params["dimension_numbers"]
        return tuple(contracted[side]), tuple(batch[side])

    @property
    def free(self) -> tuple[int, ...]:
        """The axes of the weight as it is read here that the result has, besides those of many products."""
        contracted, batch = self.dimensions(self.side)
        return tuple(i for i in range(self.weight.ndim) if i not in (*contracted, *batch))


@dataclass(frozen=True)
class Axes:
    """The axes of a weight by what they are for: many products side by side, inputs, outputs."""

    batch: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    def stacked(self) -> Axes:
        """Those of the weights of many layers in one array, layer by layer."""
        batch, inputs, outputs = (
            tuple(i + 1 for i in axes) for axes in (self.batch, self.inputs, self.outputs)
        )
        return Axes((0, *batch), inputs, outputs)

    def count(self, shape: Sequence[int], axes: Sequence[int]) -> int:
        """How many numbers these axes of a weight count."""
        return prod(shape[i] for i in axes)


@dataclass(frozen=True)
class ReadingRun:
    """An op that runs what reads a weight: ``jax.checkpoint``, or a loop.

    The turns of a loop read each its layer of stacked ones, or all the same.

    Attributes:
        op: the op.
        turn: one turn of a loop; None for ``jax.checkpoint``.
        program: what is run.
        weight: the weight within.
        readers: read it there.
        axes: those of the weight within.
    """

    op: Op
    turn: ScanTurn | None
    program: Program
    weight: Variable
    readers: tuple[Reader, ...]
    axes: Axes

    @property
    def is_stacked(self) -> bool:
        """Whether each turn gets a layer of its own."""
        return self.turn is not None and self.weight in self.turn.cut


Reader = Product | ReadingRun


def products_of(readers: Iterable[Reader]) -> Iterator[Product]:
    """The products among readers, however deep."""
    for reader in readers:
        if isinstance(reader, Product):
            yield reader
        else:
            yield from products_of(reader.readers)


def readers_of(program: Program, weight: Variable, known: Variable | None = None) -> list[Reader]:
    """The products that read a weight, through ops that only move or cast it, and what runs such products.

    Args:
        program: the Program, or what an op runs.
        weight: the weight there.
        known: the weight as a person knows it.

    Raises:
        GraphError: something else reads it, or it is returned.
    """
    known = known or weight
    views = {weight: WeightView.of(weight.shape)}
    found: list[Reader] = []
    for op in program.ops:
        read = [v for v in op.inputs if v in views]
        if not read:
            continue
        if (product := _product(op, read, views)) is not None:
            found.append(product)
        elif (view := moved(op, views[read[0]])) is not None:
            views[op.outputs[0]] = view
        elif len(read) == 1 and (run := _run(op, read[0], views[read[0]], known)) is not None:
            found.append(run)
        else:
            _refuse(known, op)
    if returned := [v for v in (*program.outputs, *program.next_state.values()) if v in views]:
        raise GraphError(
            f"low_rank: the function returns {known.name!r} itself, as {returned[0].name!r}. Only products "
            "with a weight are adapted: leave it out of where=, or out of what the function returns."
        )
    return found


def _product(op: Op, read: Sequence[Variable], views: dict[Variable, WeightView]) -> Product | None:
    """The product of one weight with something else that an op is; None for other ops."""
    if op.primitive.work is not Work.PRODUCT or len(op.inputs) != 2 or len(read) != 1:
        return None
    (call,) = op.body.calls
    return Product(op, call, op.body.operands.index(op.inputs.index(read[0])), views[read[0]])


def _run(op: Op, read: Variable, view: WeightView, weight: Variable) -> ReadingRun | None:
    """The loop or ``jax.checkpoint`` that reads the weight in products; None for other ops."""
    if op.primitive.runs not in (Runs.SCAN, Runs.AGAIN) or view != WeightView.of(read.shape):
        return None
    turn = ScanTurn.of(op.body) if op.primitive.runs is Runs.SCAN else None
    if turn is None and op.primitive.runs is Runs.SCAN:
        return None
    program = next(iter(op.subprograms.values())) if turn is None else turn.program
    operands = op.body.operands if turn is None else turn.operands
    place = op.inputs.index(read)
    at = [i for i, x in enumerate(operands) if isinstance(x, int) and x == place]
    if len(at) != 1 or (turn is not None and program.inputs[at[0]] in turn.carried):
        return None
    within = program.inputs[at[0]]
    readers = readers_of(program, within, weight)
    if not readers:
        return None
    axes = axes_of(readers, replace(weight, shape=within.shape))
    return ReadingRun(op, turn, program, within, tuple(readers), axes)


def _refuse(weight: Variable, op: Op) -> NoReturn:
    raise GraphError(
        f"low_rank: {weight.name!r} ({weight.type}) is read by {op.type}{op.at}; expected products alone "
        f"(@, jnp.dot, einsum), beside which its factors can stand. {_advice(op)}"
    )


def _advice(op: Op) -> str:
    """Advice on what to write instead, by the op that reads the weight."""
    row = op.primitive
    if row.work is Work.CONVOLUTION:
        return "Convolutions are not adapted: leave it out of where=, or train it as a whole, train=[...]."
    if row.work is Work.LOOKUP:
        return (
            "An embedding table, also one that is tied to the output, is looked up in: leave it out of "
            "where=, or train it as a whole, train=[...]."
        )
    if row.runs is Runs.SCAN:
        return (
            "In a loop those weights are adapted that its turns take as they are, or layer by layer, and "
            "read in products: cast and reshape them within the turn. Or write layers one after another: "
            "ow.compile rolls them into one loop by itself."
        )
    if row.runs is Runs.AGAIN:
        return (
            "Within jax.checkpoint those weights are adapted that it takes as they are, each as one "
            "argument, and reads in products: reshape them within."
        )
    if row.stops_gradient:
        return "What is stopped there would be stopped for its factors too: leave it out of where=."
    if row.work is Work.PRODUCT:
        return "Both operands of the product are made of it: leave it out of where=."
    return "Leave it out of where=; what is trained as a whole is named in train=[...]."


def axes_of(readers: Sequence[Reader], weight: Variable) -> Axes:
    """The axes of a weight by what they are for, inputs and outputs as the first reader has them.

    Raises:
        GraphError: products that do not agree, or read one part of an axis otherwise than the rest.
    """
    stacked = [r for r in readers if isinstance(r, ReadingRun) and r.is_stacked]
    if stacked and len(readers) == 1:
        return stacked[0].axes.stacked()
    if stacked:
        raise GraphError(
            f"low_rank: {weight.name!r} ({weight.type}) is read by a loop over layers and by others as well; "
            "expected one loop, or products alone. Leave it out of where=."
        )
    first, *others = [r.axes if isinstance(r, ReadingRun) else _axes(r, weight) for r in readers]
    for reader, found in zip(readers[1:], others, strict=True):
        same = found.batch == first.batch and {found.inputs, found.outputs} == {first.inputs, first.outputs}
        if not same:
            raise GraphError(
                f"low_rank: {weight.name!r} ({weight.type}) is summed over its axes {list(first.inputs)} by "
                f"{readers[0].op.type}{readers[0].op.at}, and over {list(found.inputs)} by "
                f"{reader.op.type}{reader.op.at}; expected products that part its axes alike, for which "
                "one pair of factors serves. Leave it out of where=."
            )
    return first


def _axes(product: Product, weight: Variable) -> Axes:
    """The axes of a weight as one product has them."""
    contracted, batch = product.dimensions(product.side)
    inner = {atom.axis for atom in product.view.atoms(contracted)}
    many = {atom.axis for atom in product.view.atoms(batch)}
    outer = {atom.axis for atom in product.view.atoms(product.free)}
    if inner & many or inner & outer or many & outer:
        raise GraphError(
            f"low_rank: {weight.name!r} ({weight.type}) is reshaped so that {product.op.type}{product.op.at} "
            "sums over a part of one of its axes only; expected a product that reads each axis as a whole. "
            "Leave it out of where=."
        )
    outputs = (i for i in range(weight.ndim) if i not in inner | many)
    return Axes(tuple(sorted(many)), tuple(sorted(inner)), tuple(outputs))
