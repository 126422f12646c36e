"""The graph as data: names, types, wiring, attributes, scopes and lines, but no code.

``described`` makes JSON data of a Program, whose lengths may depend on the batch; a ``Template`` gives the
Program back for any batch. What computes it stands elsewhere in the file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from onward.core.cost import cost
from onward.core.described import DescribedBody, Description
from onward.core.marks import MARKS, Mark
from onward.core.program import Op, Program, Variable
from onward.core.source import Source
from onward.core.structure import Signature
from onward.core.words import Kind, Pass, Placement, UpdateType
from onward.serve.export import containers
from onward.serve.export.dimensions import evaluated, written
from onward.serve.export.executable import type_text
from onward.serve.export.kinds import dtype_of, name_of

Type = jax.ShapeDtypeStruct
_LATER: Any = None  # the value of a constant, which is not part of the graph
_COUNTS = ("flops", "read", "written", "exchanged", "transcendentals", "endless")


def described(program: Program, example: Program | None = None) -> dict[str, Any]:
    """A Program as JSON data.

    Args:
        program: the one that is exported, some of whose lengths may be symbolic.
        example: the same one for a batch of known length, which costs are taken from; None: without costs.

    Raises:
        ValueError: a dtype that no file can hold.
    """
    return _Writer(program, example).record()


class _Writer:
    """One Program on its way to JSON: its Variables are numbered."""

    def __init__(self, program: Program, example: Program | None) -> None:
        self.program = program
        made = (v for op in program.ops for v in op.outputs)
        read = (v for op in program.ops for v in op.inputs)  # within a loop, some from around it
        given = (*program.inputs, *program.state, *program.constants)
        self.variables = list(dict.fromkeys((*given, *made, *read, *program.outputs)))
        self.number = {v: i for i, v in enumerate(self.variables)}
        examples = () if example is None else example.ops
        self.examples = {op.outputs[0].name: op for op in examples if op.outputs}

    def record(self) -> dict[str, Any]:
        program, number = self.program, self.number
        pairs = [(a, b) for a, b in program.next_state.items()]
        return {
            "name": program.name,
            "variables": [
                [v.name, name_of(v.dtype), list(map(written, v.shape)), str(v.kind)] for v in self.variables
            ],
            "inputs": self._numbers(program.inputs),
            "state": self._numbers(program.state),
            "constants": self._numbers(program.constants),
            "ops": list(map(self._op, program.ops)),
            "outputs": self._numbers(program.outputs),
            "next_state": [self._numbers(pair) for pair in pairs],
            "gradients": [self._numbers(pair) for pair in program.gradients],
            "loss": None if program.loss is None else number[program.loss],
            "hyperparameters": self._numbers(v for v in program.hyperparameters if v in number),
            "limits": [[number[v], limit] for v, limit in program.limits.items() if v in number],
            "bounds": [[number[v], *bound] for v, bound in program.bounds.items() if v in number],
            "signature": self._signature(program.signature),
        }

    def _numbers(self, variables: Any) -> list[int]:
        return [self.number[v] for v in variables]

    def _op(self, op: Op) -> dict[str, Any]:
        body, like = op.primal or op.body, self._like(op)
        parts = {} if like is None else like.subprograms
        required: dict[str, Any] = {
            "type": str(op.type),
            "inputs": self._numbers(op.inputs),
            "outputs": self._numbers(op.outputs),
            "pass": str(op.made_by),
            "operands": list(body.operands),
        }
        optional = {
            "mark": isinstance(op.type, Mark) or None,
            "scope": op.scope,
            "attributes": dict(op.attributes),
            "line": self._line(op),
            "of": None if op.of is None else self.number.get(op.of),
            "update": op.update and str(op.update),
            "cost": None if like is None else _cost(like),
            "subprograms": {name: described(p, parts.get(name)) for name, p in op.subprograms.items()},
        }
        return required | {key: value for key, value in optional.items() if value not in (None, "", {})}

    def _line(self, op: Op) -> list[Any] | None:
        """Where the op came from: the name of the file, without folders, which tell about the machine."""
        if op.source is None or not op.source.file:
            return None
        return [op.source.name, op.source.line, op.source.function]

    def _like(self, op: Op) -> Op | None:
        """The same op in the example."""
        found = self.examples.get(op.outputs[0].name) if op.outputs else None
        return found if found is not None and found.type == op.type else None

    def _signature(self, signature: Signature | None) -> dict[str, Any] | None:
        if signature is None:
            return None
        state = signature.model_state
        return {
            "parameters": containers.described(signature.parameters, self.number),
            "model_state": None if state is None else containers.described(state, self.number),
            "data": [containers.described(s, self.number) for s in signature.data],
            "names": list(signature.names),
            "result": containers.described(signature.result, self.number),
            "has_aux": signature.has_aux,
        }


@dataclass(frozen=True, eq=False)
class Template:
    """A Program as it stands in a file: JSON data, whose lengths wait for the size of the batch."""

    record: Mapping[str, Any]

    def program(self, sizes: Mapping[str, int]) -> Program:
        """The Program where the free lengths have these sizes; its constants have no values yet.

        Raises:
            ValueError, TypeError, LookupError: the record is none that ``described`` makes.
        """
        return _GraphReader(self.record, sizes).program()

    @property
    def types(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The types of what its executable takes, and of what it gives."""
        record = self.record
        takes = (*record["state"], *record["constants"], *record["inputs"])
        gives = (i for op in record["ops"] for i in op["outputs"])
        return tuple(map(self._type, takes)), tuple(map(self._type, gives))

    def _type(self, number: int) -> str:
        _, dtype, shape, _ = self.record["variables"][number]
        return type_text(dtype, shape)

    @property
    def shapes(self) -> dict[str, tuple[int | str, ...]]:
        """The shape of every Variable by its name, free lengths as text."""
        return {name: tuple(shape) for name, _, shape, _ in self.record["variables"]}

    def lengths(self, field: str) -> list[tuple[str, list[int | str]]]:
        """Name and shape of the Variables in a field such as ``"inputs"``, free lengths as text."""
        listed = (self.record["variables"][i] for i in self.record[field])
        return [(name, shape) for name, _, shape, _ in listed]


class _GraphReader:
    """One Program on its way from JSON."""

    def __init__(self, record: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
        self.record, self.sizes = record, sizes
        self.variables = [self._variable(*fields) for fields in record["variables"]]

    def _variable(self, name: str, dtype: str, shape: list[int | str], kind: str) -> Variable:
        lengths = tuple(evaluated(n, self.sizes) for n in shape)
        return Variable(_text(name), lengths, dtype_of(dtype), Kind(kind), Placement.REPLICATED)

    def program(self) -> Program:
        record = self.record
        return Program(
            name=_text(record["name"]),
            inputs=self._all(record["inputs"]),
            state=self._all(record["state"]),
            constants=dict.fromkeys(self._all(record["constants"]), _LATER),
            ops=tuple(map(self._op, record["ops"])),
            outputs=self._all(record["outputs"]),
            next_state=dict(map(self._pair, record["next_state"])),
            gradients=tuple(map(self._pair, record["gradients"])),
            loss=None if record["loss"] is None else self._one(record["loss"]),
            hyperparameters=self._all(record["hyperparameters"]),
            limits={self._one(i): float(limit) for i, limit in record["limits"]},
            bounds={self._one(i): (int(n), _text(what)) for i, n, what in record["bounds"]},
            signature=self._signature(record["signature"]),
        )

    def _one(self, number: int) -> Variable:
        if type(number) is not int or number < 0:
            raise ValueError(f"{str(number)[:40]} is the number of no Variable")
        return self.variables[number]

    def _all(self, numbers: Sequence[int]) -> tuple[Variable, ...]:
        return tuple(map(self._one, numbers))

    def _pair(self, numbers: Sequence[int]) -> tuple[Variable, Variable]:
        first, second = self._all(numbers)
        return first, second

    def _op(self, record: Mapping[str, Any]) -> Op:
        inputs, outputs = self._all(record["inputs"]), self._all(record["outputs"])
        return Op(
            type=_type_of(record),
            inputs=inputs,
            outputs=outputs,
            body=DescribedBody(self._description(record, inputs, outputs)),
            made_by=Pass(record["pass"]),
            scope=_text(record.get("scope", "")),
            source=_source(record.get("line")),
            of=None if (of := record.get("of")) is None else self._one(of),
            update=None if (update := record.get("update")) is None else UpdateType(update),
        )

    def _description(
        self, record: Mapping[str, Any], inputs: Sequence[Variable], outputs: Sequence[Variable]
    ) -> Description:
        parts = record.get("subprograms", {})
        return Description(
            type=record["type"],
            inputs=tuple(v.aval for v in inputs),
            outputs=tuple(v.aval for v in outputs),
            attributes={_text(key): _text(value) for key, value in record.get("attributes", {}).items()},
            operands=tuple(_operand(o, len(inputs)) for o in record["operands"]),
            subprograms={
                _text(name): _GraphReader(part, self.sizes).program() for name, part in parts.items()
            },
            cost=_known_cost(record.get("cost", {})),
        )

    def _signature(self, record: Mapping[str, Any] | None) -> Signature | None:
        if record is None:
            return None
        state = record["model_state"]
        return Signature(
            parameters=containers.rebuilt(record["parameters"], self.variables),
            model_state=None if state is None else containers.rebuilt(state, self.variables),
            data=tuple(containers.rebuilt(part, self.variables) for part in record["data"]),
            names=tuple(map(_text, record["names"])),
            result=containers.rebuilt(record["result"], self.variables),
            has_aux=bool(record["has_aux"]),
        )


def _cost(op: Op) -> dict[str, int]:
    """The entries of the cost of an op that are not 0."""
    return {field: value for field, value in vars(cost(op)).items() if value}


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{str(value)[:40]!r} is not text")
    return value


def _type_of(record: Mapping[str, Any]) -> str:
    """The type of an op; files of release 0.1.0 do not tell which are marks."""
    text, made_by = _text(record["type"]), record["pass"]
    return Mark(text) if record.get("mark", made_by != Pass.FORWARD and text in MARKS) is True else text


def _known_cost(record: Mapping[str, Any]) -> dict[str, int]:
    """The entries of a cost; files of release 0.1.0 may have negative ones, of a sum over nothing."""
    counts = {field: _count(value) for field, value in record.items() if field in _COUNTS}
    return {field: count for field, count in counts.items() if count >= 0}


def _count(value: Any) -> int:
    if not isinstance(value, int) or abs(value) >= 2**80:
        raise ValueError(f"{str(value)[:40]} is not a cost")
    return value


def _operand(value: Any, count: int) -> int | str:
    if isinstance(value, int) and not 0 <= value < count:
        raise ValueError(f"an op has no input {value}")
    return value if isinstance(value, int) else _text(value)


def _source(line: Any) -> Source | None:
    if line is None:
        return None
    file, number, function = line
    return Source.at(_text(file), int(number), _text(function))
