"""The ops between the logits and what is left of them, and the product that makes the logits.

A value is large if it holds about as many numbers as the logits. The region is the product, every op that
reads something large which was computed of it, every op between two of these, and what makes their other
large inputs, such as labels that are written out as one-hot rows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from onward.core.jaxprs.body import Body
from onward.core.names import Names
from onward.core.primitives.traits import Moves
from onward.core.program import Op, Program, Variable
from onward.core.walk import ancestors, consumers, descendants, producers
from onward.develop.chunk.numbered import is_numbering

_LARGE = 4  # what is computed of each row is small if the row of the logits is longer than this


@dataclass(frozen=True)
class Region:
    """The ops from a product to what is left of it.

    Attributes:
        logits: what the product makes.
        ops: those of the region, in order.
        inputs: what they read from outside.
        results: what is read of them outside.
        gone: those of the ops that nothing outside needs any more.
    """

    logits: Variable
    ops: tuple[Op, ...]
    inputs: tuple[Variable, ...]
    results: tuple[Variable, ...]
    gone: frozenset[Op]

    @property
    def product(self) -> Op:
        """The op that makes the logits."""
        return next(op for op in self.ops if self.logits in op.outputs)

    @property
    def saves(self) -> bool:
        """Whether less leaves the region than the logits hold."""
        return sum(v.size for v in self.results) * _LARGE <= self.logits.size

    @property
    def is_between_products(self) -> bool:
        """Whether all that leaves it is made by products, as in attention."""
        return all(op.primitive.is_product or not {*self.results}.intersection(op.outputs) for op in self.ops)


def heads(program: Program, of_data: Collection[Variable], others: Collection[Op] = ()) -> list[Op]:
    """The products of data with parameters, and other ops, that no other of these comes after.

    >>> import jax.numpy as jnp, onward as ow
    >>> def loss(params, x):
    ...     return jnp.mean(jnp.tanh(x @ params[0]) @ params[1])
    >>> program = ow.trace(loss, [jnp.ones((3, 9)), jnp.ones((9, 5))], jnp.ones((4, 3)))
    >>> [op.outputs for op in heads(program, descendants(program, program.inputs))]
    [(Variable('dot_general_1', float32[4,5], activation),)]
    """
    read = ancestors(program, program.outputs if program.loss is None else [program.loss])
    found = [
        op
        for op in program.ops
        if not read.isdisjoint(op.outputs) and (op in others or _is_with_parameter(op, of_data))
    ]
    earlier = {v for op in found for v in ancestors(program, op.inputs)}
    return [op for op in found if earlier.isdisjoint(op.outputs)]


def _is_with_parameter(op: Op, of_data: Collection[Variable]) -> bool:
    is_product = op.primitive.is_product and op.outputs[0].is_float
    return is_product and len(op.inputs) == 2 and sum(v in of_data for v in op.inputs) == 1


def scores(program: Program, of_data: Collection[Variable]) -> list[Variable]:
    """The results of products of two values that both depend on data, which are larger than either.

    >>> import jax, jax.numpy as jnp, onward as ow
    >>> def attention(w, x):
    ...     return jax.nn.softmax(x @ w @ x.T) @ x
    >>> program = ow.trace(attention, jnp.ones((3, 3)), jnp.ones((9, 3)))
    >>> scores(program, descendants(program, program.inputs))
    [Variable('dot_general_1', float32[9,9], activation)]
    """
    return [
        op.outputs[0]
        for op in program.ops
        if op.primitive.is_product and op.outputs[0].is_float and all(v in of_data for v in op.inputs)
        if len(op.inputs) == 2 and op.outputs[0].size > max(v.size for v in op.inputs)
    ]


def counted_apart(program: Program) -> Program:
    """The Program with numbers counted from 0 once for each op that reads them.

    One ``jnp.arange`` for both sides of a mask would tie each query to its key.
    """
    names, readers = Names(program.variables), consumers(program)
    ops: list[Op] = []
    instead: dict[Op, dict[Variable, Variable]] = {}
    for op in program.ops:
        if op in instead:
            op = replace(op, inputs=tuple(instead[op].get(v, v) for v in op.inputs))
        ops.append(op)
        if is_numbering(op):
            (v,) = op.outputs
            for reader in readers[v][1:]:
                copy = replace(v, name=names.new(v.name))
                ops.append(replace(op, outputs=(copy,)))
                instead.setdefault(reader, {})[v] = copy
    return replace(program, ops=tuple(ops))


def counted_together(program: Program, before: Program, region: Op) -> Program:
    """The Program with copies made by ``counted_apart`` as one again, but for those that a region reads.

    Args:
        program: where the region is one op.
        before: the Program without copies.
        region: the op.
    """
    first: dict[Body, Variable] = {}
    stands: dict[Variable, Variable] = {}
    ops: list[Op] = []
    for op in program.ops:
        if is_numbering(op):
            (v,) = op.outputs
            one = first.setdefault(op.body, v)
            if one is not v and v.name not in before.variables and v not in region.inputs:
                stands[v] = one
                continue
        reads = not stands.keys().isdisjoint(op.inputs)
        ops.append(replace(op, inputs=tuple(stands.get(v, v) for v in op.inputs)) if reads else op)
    return replace(program, ops=tuple(ops))


def region_of(program: Program, logits: Variable) -> Region:
    """The region that begins with the product of these logits."""
    core = _between(program, _readers(program, logits))
    product = producers(program)[logits]
    ops = _grown(program, core, ancestors(program, product.inputs), logits)
    inside = [op for op in program.ops if op in ops]
    made = {v for op in inside for v in op.outputs}
    of_core = [v for op in inside if op in core for v in op.outputs]
    read = _read_outside(program, ops)
    inputs = dict.fromkeys(v for op in inside for v in op.inputs if v not in made)
    results = tuple(v for v in of_core if v in read)
    return Region(logits, tuple(inside), tuple(inputs), results, _gone(inside, core, read))


def _gone(ops: Sequence[Op], core: Collection[Op], read: Collection[Variable]) -> frozenset[Op]:
    """Those of the ops that nothing outside needs, nor what stays for it."""
    needed, gone = set(read), set()
    for op in reversed(ops):
        if op in core or needed.isdisjoint(op.outputs):
            gone.add(op)
        else:
            needed.update(op.inputs)
    return frozenset(gone)


def _readers(program: Program, logits: Variable) -> set[Op]:
    """The product, and the ops that read something large that is computed of the logits."""
    large = {v for v in _reached(program, logits) if v.size * _LARGE > logits.size}
    return {op for op in program.ops if logits in op.outputs or not large.isdisjoint(op.inputs)}


def _reached(program: Program, logits: Variable) -> set[Variable]:
    """The values computed of the logits up to a small product, such as that of attention with its values.

    Behind that something else begins, the attention of the next layer or a loss.
    """
    reached = {logits}
    for op in program.ops:
        if not reached.isdisjoint(op.inputs):
            ends = op.primitive.is_product
            reached.update(v for v in op.outputs if not ends or v.size * _LARGE > logits.size)
    return reached


def _between(program: Program, ops: Collection[Op]) -> set[Op]:
    """These ops, and those that stand between any two of them."""
    after = descendants(program, [v for op in ops for v in op.outputs])
    before = ancestors(program, [v for op in ops for v in op.inputs])
    return {
        op
        for op in program.ops
        if op in ops or not (after.isdisjoint(op.inputs) or before.isdisjoint(op.outputs))
    }


def _grown(program: Program, core: set[Op], apart: set[Variable], logits: Variable) -> set[Op]:
    """The ops with those that make their large inputs, or number rows.

    ``apart`` is what the logits are computed of: it is there already.
    """
    ops, makers, readers = set(core), producers(program), consumers(program)
    counting = _counting(program)
    waiting = [v for op in program.ops if op in core for v in op.inputs]
    while waiting:
        v = waiting.pop()
        maker = makers.get(v)
        if maker is None or maker in ops or v in apart:
            continue
        if maker.primitive.is_product and not all(op in ops for op in readers[v]):
            continue
        if v.size * 2 >= logits.size or v in counting:
            ops.add(maker)
            apart = apart | ancestors(program, maker.inputs) if maker.primitive.is_product else apart
            waiting.extend(maker.inputs)
    return ops


def _counting(program: Program) -> set[Variable]:
    """The integers that are computed of numbers counted from 0, place by place."""
    found: set[Variable] = set()
    for op in program.ops:
        moved = op.primitive.is_elementwise or op.primitive.moves not in (None, Moves.LOOKS_UP)
        counts = moved and not found.isdisjoint(op.inputs)
        if (counts or is_numbering(op)) and not any(v.is_float for v in op.outputs):
            found.update(op.outputs)
    return found


def _read_outside(program: Program, ops: Collection[Op]) -> set[Variable]:
    """The Variables that something other than these ops needs."""
    return {*read_behind(program), *(v for op in program.ops if op not in ops for v in op.inputs)}


def read_behind(program: Program) -> Iterator[Variable]:
    """The values that are read when all ops have run."""
    yield from program.outputs
    yield from program.next_state.values()
    yield from () if program.loss is None else (program.loss,)
