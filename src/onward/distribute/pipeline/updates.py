"""The update pass, cut by the stages that own the parameters.

An update stands in the stage of its gradient. What reads several stages, such as the norm of all gradients,
is taken apart into its equations, so that numbers travel in place of arrays: each stage adds up its squares,
the first one adds these up. What stages need of each other divides an update into phases: in each, every
stage computes what it can from what the phases before have made.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from onward.core.cost import size
from onward.core.names import Names
from onward.core.program import Op, Program, Variable
from onward.core.words import Kind
from onward.distribute.pipeline.parts import taken_apart


class UpdatePlacing:
    """Where each op of the update runs and in which phase, and where state lies.

    Args:
        program: the whole Program.
        ops: those of the update.
        given: the stage of what the micro-batches make.
        reading: for what the forward pass reads of the state, by name, the first stage that does.

    Attributes:
        groups: the ops of each phase and stage.
        constants: those of ops that were taken apart.
        homes: the stage of each Variable.
    """

    def __init__(
        self, program: Program, ops: Iterable[Op], given: Mapping[Variable, int], reading: Mapping[str, int]
    ) -> None:
        self.program = program
        self.constants = dict(program.constants)
        self.homes: dict[Variable, int] = dict(given)
        self.homes.update({v: reading[v.name] for v in program.state if v.name in reading})
        self.groups: dict[tuple[int, int], list[Op]] = {}
        self._names = Names(program.variables)
        self._phases: dict[Variable, tuple[int, int]] = {}
        self._free: dict[Variable, Op] = {}
        self._local: dict[tuple[Variable, int], Variable] = {}
        for op in ops:
            self._add(op)
        for v in program.state:
            self.homes.setdefault(v, 0)

    def _add(self, op: Op) -> None:
        if len(op.body.equations) > 1 and len({self.homes[v] for v in op.inputs if self._counts(v)}) > 1:
            for part in taken_apart(op, self._names, self.constants):
                if all(v in self._free for v in part.inputs):
                    self._free.update(dict.fromkeys(part.outputs, part))
                else:
                    self._place(part)
        else:
            self._place(op)

    def _counts(self, v: Variable) -> bool:
        """Whether an op is where this Variable is, and not the other way round."""
        return v in self.homes and (v.size > 1 or v.kind in (Kind.PARAMETER, Kind.GRADIENT))

    def _place(self, op: Op) -> None:
        """Put an op where the largest of what it reads lies, and what it alone keeps beside it."""
        known = [v for v in op.inputs if v in self.homes]
        heavy = [v for v in known if self._counts(v)] or known
        stage = min((-(v.kind is Kind.PARAMETER), -size(v), self.homes[v]) for v in heavy)[-1] if heavy else 0
        op = replace(op, inputs=tuple(self._in_stage(v, stage) for v in op.inputs))
        phase = 0
        for v in op.inputs:
            self.homes.setdefault(v, stage)
            if v in self._phases:
                made, of = self._phases[v]
                phase = max(phase, made + (of != stage))
        self.homes.update(dict.fromkeys(op.outputs, stage))
        self._phases.update(dict.fromkeys(op.outputs, (phase, stage)))
        self.groups.setdefault((phase, stage), []).append(op)

    def _in_stage(self, v: Variable, stage: int) -> Variable:
        """A Variable as a stage reads it: a number that depends on nothing, each stage makes for itself."""
        if v not in self._free:
            return v
        if (v, stage) not in self._local:
            op = self._free[v]
            outputs = tuple(replace(o, name=self._names.new(o.name)) for o in op.outputs)
            self._local.update(((o, stage), new) for o, new in zip(op.outputs, outputs, strict=True))
            inputs = tuple(self._in_stage(i, stage) for i in op.inputs)
            self._phases.update(dict.fromkeys(outputs, (0, stage)))
            self.groups.setdefault((0, stage), []).append(replace(op, inputs=inputs, outputs=outputs))
        return self._local[v, stage]

    @property
    def source(self) -> Program:
        """The whole Program with the constants of what was taken apart."""
        return replace(self.program, constants=self.constants)
