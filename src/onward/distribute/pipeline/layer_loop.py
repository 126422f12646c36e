"""A loop over layers in the Program of one micro-batch, and that Program with a loop for each stage.

What is stacked along the turns, as parameters, what is saved for the backward pass and gradients are, is cut
into as many pieces; so is all that is computed of stacks number by number, and a sum over a stack is the sum
of those over its pieces. What reads a stack in another way is given all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jax import lax

from onward.core.check import check
from onward.core.cost import cost
from onward.core.jaxprs.body import Body, body_of
from onward.core.jaxprs.loops import result_of
from onward.core.names import Names
from onward.core.primitives.table import of
from onward.core.primitives.traits import Reduces, Runs
from onward.core.program import Op, Program, Variable
from onward.core.turn import ScanTurn
from onward.core.walk import producers
from onward.core.words import Kind, Pass
from onward.distribute.pipeline.parts import taken_apart


@dataclass(frozen=True, eq=False)
class LayerLoop:
    """A forward loop over layers, how many they are, and the state that is stacked along them."""

    op: Op
    count: int
    stacks: frozenset[Variable]


def main_loop(ops: Sequence[Op]) -> Op | None:
    """The loop that does more than half of the work of these ops, if one does."""
    work = {op: cost(op).flops for op in ops}
    op = max((op for op in ops if op.primitive.runs is Runs.SCAN), key=work.__getitem__, default=None)
    return op if op is not None and 2 * work[op] > sum(work.values()) else None


def layer_loop(turn: Program, ahead: Collection[Op] = ()) -> LayerLoop | None:
    """The loop that does most of the forward pass, if each of its turns reads parameters of its own.

    Stages share out no other loops: not one that runs backwards, is within another op, or takes its
    parameters by their number.
    """
    op = main_loop([op for op in turn.ops if op.made_by is Pass.FORWARD and op not in ahead])
    if op is None:
        return None
    scan = ScanTurn.of(op.primal or op.body)
    if scan is None or scan.backwards:
        return None
    made, begin = producers(turn), scan.first_carried + scan.count_carried
    cut = (op.inputs[x] for x in scan.operands[begin:] if isinstance(x, int))
    found = frozenset().union(*(_behind(v, scan.length, made) for v in cut))
    stacks = frozenset(v for v in found if v.kind in (Kind.PARAMETER, Kind.FROZEN))
    return LayerLoop(op, scan.length, stacks) if stacks else None


def _behind(v: Variable, count: int, made: Mapping[Variable, Op]) -> frozenset[Variable]:
    """The stacks that a stack is computed of, number by number."""
    if v.shape[:1] != (count,):
        return frozenset()
    if (op := made.get(v)) is None:
        return frozenset([v])
    if not _is_each(op):
        return frozenset()
    return frozenset().union(*(_behind(x, count, made) for x in op.inputs))


def _is_each(op: Op) -> bool:
    """Whether each number of its results is computed of those in the same place of what it reads."""
    return all(of(call.primitive).is_elementwise for call in op.body.calls)


def _is_sum(op: Op) -> bool:
    """Whether it adds up the numbers of a stack along the layers, and maybe more."""
    found = [call for call in op.body.calls if of(call.primitive).reduces is Reduces.SUM]
    return len(op.body.equations) == len(found) == 1 and 0 in found[0].params["axes"]


class LayerCut:
    """A turn of the loop over micro-batches, whose loop over layers is cut.

    Attributes:
        begins: the loops over layers of the forward pass.
        pieces: of stacks.
        alike: for each new Variable that is a piece of another or stands in its place, that one.
    """

    def __init__(self, turn: Program, layers: LayerLoop, stages: int) -> None:
        self._turn, self._layers, self._stages = turn, layers, stages
        self._each = layers.count // stages
        self._names = Names(turn.variables)
        self._constants = dict(turn.constants)
        self._ops: list[Op] = []
        self._of: dict[Variable, tuple[Variable, ...]] = {}  # of a forward op that was cut
        self._summed: dict[Variable, tuple[Variable, ...]] = {}  # sums over stacks, and those of their pieces
        self._whole: dict[Variable, Variable] = {}  # stacks that are there in one piece
        self.begins: list[Op] = []
        self.pieces: dict[Variable, tuple[Variable, ...]] = {}
        self.alike: dict[Variable, Variable] = {}
        for v in sorted(layers.stacks, key=lambda v: v.name):
            self.pieces[v] = self._new_pieces(v)
        for op in turn.ops:
            self._add(op)

    def turn(self, outputs: Sequence[Variable]) -> Program:
        """The turn with these outputs."""
        old = self._turn
        stacks = self._layers.stacks
        state = tuple(piece for v in old.state for piece in (self.pieces[v] if v in stacks else (v,)))
        made = producers(old)
        own = {v: self._as_whole(v, made[v]) for v in outputs if v in self.pieces}
        read = {v for op in self._ops for v in op.inputs}.union(outputs)
        return check(
            replace(
                old,
                state=state,
                constants={v: x for v, x in self._constants.items() if v in read},
                ops=tuple(self._ops),
                outputs=tuple(own.get(v, v) for v in outputs),
                gradients=(),
                hyperparameters=tuple(v for v in old.hyperparameters if v not in self.pieces),
            )
        )

    def _add(self, op: Op) -> None:
        if op is self._layers.op or op.of is self._layers.op.outputs[0]:
            self._add_apart(op)
        else:
            self._add_one(op)

    def _add_apart(self, op: Op) -> None:
        """Add the ops of the loop, or of its backward pass: with it stands what is the same in all turns."""
        for part in taken_apart(op, self._names, self._constants):
            scan = ScanTurn.of(part.body) if part.primitive.runs is Runs.SCAN else None
            if scan is not None and any(v in self.pieces for v in self._cut_by(part, scan)):
                self._add_loop(part, scan, op.type)
            else:
                self._add_one(part)

    def _add_one(self, op: Op) -> None:
        """Add an op: where it computes each number of a stack by itself, one for each piece."""
        arrays = [v for v in op.inputs if v.ndim]
        is_cut = all(map(self._is_stack, arrays)) and any(v in self.pieces for v in arrays)
        if is_cut and _is_each(op) and len({v.shape for v in arrays}) == 1:
            self._add_each(op)
        elif is_cut and _is_sum(op):
            self._add_sum(op)
        elif op.of in self._summed and not arrays and all(map(self._is_stack, op.outputs)):
            self._add_spread(op, self._summed[op.of])
        else:
            inputs = tuple(self._as_whole(v, op) for v in op.inputs)
            self._ops.append(op if inputs == op.inputs else replace(op, inputs=inputs))

    def _add_each(self, op: Op) -> None:
        inputs = [self._in_pieces(v, op) if v.ndim else (v,) * self._stages for v in op.inputs]
        self.pieces.update((v, self._new_pieces(v)) for v in op.outputs)
        for k, given in enumerate(zip(*inputs, strict=True)):
            made = tuple(self.pieces[v][k] for v in op.outputs)
            body = body_of(op.body, *(v.aval for v in given))
            self._ops.append(replace(op, inputs=given, outputs=made, body=body, of=self._of_piece(op, k)))
        self._of[op.outputs[0]] = self.pieces[op.outputs[0]]

    def _add_sum(self, op: Op) -> None:
        """Add the sum of all numbers of a stack as the sum of those of its pieces."""
        (v,), pieces = op.outputs, self.pieces[op.inputs[0]]
        parts = tuple(replace(v, name=self._names.new(f"{v.name}_of_{piece.name}")) for piece in pieces)
        self.alike.update(dict.fromkeys(parts, v))
        for piece, part in zip(pieces, parts, strict=True):
            body = body_of(op.body, piece.aval)
            self._ops.append(replace(op, inputs=(piece,), outputs=(part,), body=body, primal=None))
        body = body_of(lambda *x: [sum(x[1:], x[0])], *(part.aval for part in parts))
        self._ops.append(replace(op, type="sum", inputs=parts, body=body, primal=None))
        self._summed[v] = parts

    def _add_spread(self, op: Op, parts: Sequence[Variable]) -> None:
        """Add what spreads the gradient of such a sum, of these parts, over the stack: each piece of it."""
        self.pieces.update((v, self._new_pieces(v)) for v in op.outputs)
        for k, part in enumerate(parts):

            def of_piece(*values: Any, k: int = k) -> list[Any]:
                return [x[k * self._each : (k + 1) * self._each] for x in op.body(*values)]

            made = tuple(self.pieces[v][k] for v in op.outputs)
            body = body_of(of_piece, *(v.aval for v in op.inputs))
            self._ops.append(replace(op, outputs=made, body=body, of=part))

    def _add_loop(self, op: Op, scan: ScanTurn, kind: str) -> None:
        """Add a loop over layers as one for each stage, of this type."""
        begin, end = scan.first_carried, scan.first_carried + scan.count_carried
        stacks = {v: self._in_pieces(v, op) for v in self._cut_by(op, scan)}
        given: list[Any] = [op.inputs[x] if isinstance(x, int) else x for x in scan.operands]
        given[:end] = [self._as_whole(x, op) if isinstance(x, Variable) else x for x in given[:end]]
        results = {result_of(op.body, j): v for j, v in enumerate(op.outputs)}
        for i, v in results.items():
            if i >= scan.count_carried:
                self.pieces[v] = self._new_pieces(v)
        order = range(self._stages)
        firsts: dict[int, Variable] = {}
        carried = given[begin:end]
        for k in reversed(order) if scan.backwards else order:
            is_last = k == (0 if scan.backwards else self._stages - 1)
            cut = [stacks[x][k] if isinstance(x, Variable) else x for x in given[end:]]
            operands = [*given[:begin], *carried, *cut]
            place = f"before_{k * self._each}" if scan.backwards else f"after_{(k + 1) * self._each}"
            carried = [
                self._carried(v, results.get(i), "" if is_last else place) for i, v in enumerate(scan.carried)
            ]
            made = (*carried, *(self.pieces[v][k] for i, v in results.items() if i >= scan.count_carried))
            kept = (*range(scan.count_carried), *(i for i in results if i >= scan.count_carried))
            loop = _loop(op, operands, made, kept, replace(scan, length=self._each))
            self._ops.append(replace(loop, type=kind, of=self._of_piece(op, k)))
            firsts[k] = made[0]
            if op.made_by is Pass.FORWARD:
                self.begins.append(self._ops[-1])
        self._of[op.outputs[0]] = tuple(firsts[k] for k in order)

    @staticmethod
    def _cut_by(op: Op, scan: ScanTurn) -> list[Variable]:
        """The stacks of which each turn of a loop gets its own."""
        begin = scan.first_carried + scan.count_carried
        return [op.inputs[x] for x in scan.operands[begin:] if isinstance(x, int)]

    def _is_stack(self, v: Variable) -> bool:
        return v.shape[:1] == (self._layers.count,)

    def _carried(self, like: Variable, result: Variable | None, place: str) -> Variable:
        """A result that a loop hands on, named by the layers that are done; the last one gives it."""
        if not place and result is not None:
            return result
        name = like.name if result is None else result.name
        new = Variable(self._names.new(f"{name}_{place}".strip("_")), like.shape, like.dtype)
        if result is not None:
            self.alike[new] = result
        return new

    def _of_piece(self, op: Op, k: int) -> Variable | None:
        """The forward op that a backward op belongs to, in the stage of a piece."""
        if op.of is None or op.of not in self._of:
            return op.of
        return self._of[op.of][k]

    def _new_pieces(self, v: Variable) -> tuple[Variable, ...]:
        found = []
        for k in range(self._stages):
            name = self._names.new(f"{v.name}[{k * self._each}:{(k + 1) * self._each}]")
            found.append(replace(v, name=name, shape=(self._each, *v.shape[1:])))
        self.alike.update(dict.fromkeys(found, v))
        return tuple(found)

    def _in_pieces(self, v: Variable, reader: Op) -> tuple[Variable, ...]:
        """A stack in pieces, cut for an op unless it is."""
        if v not in self.pieces:
            self.pieces[v], self._whole[v] = self._new_pieces(v), v
            for k, piece in enumerate(self.pieces[v]):
                body = body_of(_slicing(k * self._each, (k + 1) * self._each), v.aval)
                self._ops.append(_beside(reader, "slice", (v,), piece, body))
        return self.pieces[v]

    def _as_whole(self, v: Variable, reader: Op) -> Variable:
        """A stack in one piece, as an op reads it."""
        if v not in self.pieces:
            return v
        if v not in self._whole:
            is_state = v.kind is not Kind.ACTIVATION
            name = self._names.new(f"{v.name}_whole") if is_state else v.name
            self._whole[v] = whole = Variable(name, v.shape, v.dtype) if is_state else v
            body = body_of(_joining, *(piece.aval for piece in self.pieces[v]))
            self._ops.append(_beside(reader, "concatenate", self.pieces[v], whole, body))
        return self._whole[v]


def _loop(
    op: Op, operands: Sequence[Any], made: Sequence[Variable], kept: Sequence[int], scan: ScanTurn
) -> Op:
    """A loop of fewer turns, of other operands; ``kept`` are those of its results that it gives."""
    inputs = tuple(x for x in operands if isinstance(x, Variable))
    places = iter(range(len(inputs)))
    scan = replace(scan, operands=tuple(next(places) if isinstance(x, Variable) else x for x in operands))

    def run(*values: Any) -> list[Any]:
        found = scan.scan(scan.once, values)
        return [found[i] for i in kept]

    body = body_of(run, *(v.aval for v in inputs))
    return replace(op, inputs=inputs, outputs=tuple(made), body=body)


def _beside(reader: Op, kind: str, inputs: Sequence[Variable], output: Variable, body: Body) -> Op:
    """An op that makes what another one reads."""
    return Op(kind, tuple(inputs), (output,), body, reader.made_by, reader.scope, reader.source)


def _joining(*pieces: Any) -> list[Any]:
    return [lax.concatenate(pieces, 0)]


def _slicing(begin: int, end: int) -> Callable[[Any], list[Any]]:
    return lambda x: [lax.slice_in_dim(x, begin, end)]
