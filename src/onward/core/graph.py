"""Programs, their Ops and their Recipes as data; ``core/program.py`` is where others take them from.

They refer to each other, so that they stand in one file. Their text and the Programs inside of an op are told
by functions above.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import cached_property, partial, singledispatch
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from onward.core.errors import ByName, UnknownNameError, nearest
from onward.core.jaxprs.body import Body
from onward.core.pointing import Pointing
from onward.core.primitives.table import of
from onward.core.primitives.traits import Primitive, Runs
from onward.core.source import Source
from onward.core.structure import Signature
from onward.core.traces import Traces
from onward.core.treescope_view import foldable_text
from onward.core.variable import Partition, Replicas, Variable
from onward.core.words import Kind, Pass, UpdateType


@dataclass(frozen=True, eq=False, repr=False)
class Op:
    """One step of the computation: outputs from inputs, by a small closed jaxpr.

    ``of`` is set on gradient ops: the first output of the forward op they belong to.
    ``primal`` is set on forward ops that save residuals for the backward pass: the body they had
    before, which computes the first outputs only.
    ``again`` is set on forward ops that run again for the backward pass: it keeps nothing that they compute.
    """

    type: str
    inputs: tuple[Variable, ...]
    outputs: tuple[Variable, ...]
    body: Body
    made_by: Pass = Pass.FORWARD
    scope: str = ""
    source: Source | None = None
    of: Variable | None = None
    primal: Body | None = None
    update: UpdateType | None = None
    again: bool = False

    @property
    def primitive(self) -> Primitive:
        """The traits of the primitive that it computes; opaque for a function that only has such a name."""
        return of(self.type if (self.primal or self.body).computes(self.type) else "")

    @property
    def attributes(self) -> Mapping[str, str]:
        """The op's parameters in words, such as ``{'axes': '(0,)'}``."""
        return (self.primal or self.body).attributes

    @property
    def at(self) -> str:
        """The user's line behind it, as it stands after its name, `` at model.py:12``; empty if unknown."""
        return f" at {self.source}" if self.source is not None and self.source.file else ""

    @property
    def subprograms(self) -> Mapping[str, Program]:
        """The Programs inside a control flow op, by the name of the branch or body."""
        return programs_within(self.primal or self.body)

    def __repr__(self) -> str:
        return shown(self)


@dataclass(frozen=True)
class Target:
    """An op together with the Program it belongs to: something a Session can be asked to run."""

    program: Program
    op: Op


@dataclass(frozen=True, eq=False)
class Code:
    """The code of a loaded Program as a whole; its ops describe themselves, and have no code of their own.

    Attributes:
        call: from the values of ``reads``, in this order, to those of ``gives``.
        reads: all state, data and constants that it takes.
        gives: the names of all Variables that it computes. What nobody asks for, a compiler leaves out.
        ops: the ops that it computes. What a transform adds behind them has code of its own.
        file: the file that it was loaded from.
        lacks: why the file holds no derivative of it; empty if it does.
    """

    call: Callable[..., Sequence[Any]]
    reads: tuple[Variable, ...]
    gives: tuple[str, ...]
    ops: frozenset[Op]
    file: str = "a file"
    lacks: str = ""

    def called(self, values: Sequence[Any | None]) -> Sequence[Any]:
        """The values of ``gives``; a value that nothing requested depends on may be None."""
        pairs = zip(self.reads, values, strict=True)
        return self.call(*(jnp.empty(v.shape, v.dtype) if x is None else x for v, x in pairs))


class Phase(IntEnum):
    """When a transform acts."""

    REWRITE = 0  # parts of the function become others
    ADAPT = 1  # what is trained in place of the parameters
    PRECISION = 2  # the dtype of each op of the forward pass
    FORWARD = 3
    ROLL = 4  # repeated layers become loops
    KEEP = 5  # what such loops keep for the backward pass
    BACKWARD = 6
    GRADIENT = 7
    UPDATE = 8
    HOST = 9  # which activations lie in host memory until the backward pass reads them
    LOOK = 10  # what is watched
    DEVICES = 11  # one Program for many devices
    MICRO_BATCHES = 12
    STEP = 13  # decides about a step as a whole: guards, checks
    MEMORY = 14  # where state lies between two steps


class Origin(Protocol):
    """The traced function behind a Program."""

    @property
    def training(self) -> bool:
        """Whether it is traced as it is when it is trained."""

    @property
    def asks_training(self) -> bool:
        """Whether the function asks if it is being trained."""

    @property
    def fixed_data(self) -> frozenset[str]:
        """The data that is declared with a length of its own, not that of the batch."""

    @property
    def free_lengths(self) -> Mapping[str, tuple[int | str, ...]]:
        """The shapes of Variables by name, with a word for each length that is free; none if nobody said."""

    @property
    def makers(self) -> Mapping[str, Any]:
        """The layer outside of a function that declared a Variable, by the Variable's name."""

    @property
    def assumes_batch(self) -> bool:
        """Whether nothing showed how long a batch is, so that some length was taken."""

    def trace(self, data: tuple[Any, ...]) -> Program:
        """The forward Program for data of these types; parameters and model state stay as they were."""

    def for_test(self) -> Program:
        """The forward Program as it is when nothing is trained."""


@dataclass(frozen=True)
class Applied:
    """One transform with its arguments, Variables among them replaced by their names.

    ``function`` takes the Program. What lays out the batch, over devices or micro-batches, takes the recipe
    so far and the types of the data instead, for it builds the Program of a part.
    """

    function: Callable[..., Program]
    arguments: tuple[Any, ...]
    options: Mapping[str, Any]
    phase: Phase
    lays_out_batch: bool = False

    def __call__(self, *given: Any) -> Program:
        """The Program it makes."""
        return self.function(*given, *self.arguments, **self.options)


@dataclass(frozen=True)
class Recipe:
    """How a Program is made.

    Attributes:
        origin: the traced function.
        ops: those of the Program, as the last step left them.
        steps: the transforms, in the order in which they act.
        updates: what rules were traced to, which are the same wherever these steps are taken again.
    """

    origin: Origin
    ops: tuple[Op, ...] = ()
    steps: tuple[Applied, ...] = ()
    updates: Traces = field(default_factory=partial(Traces, 64), compare=False, repr=False)

    @property
    def phase(self) -> Phase:
        """That of the last step."""
        return self.steps[-1].phase if self.steps else Phase.REWRITE

    def including(self, step: Applied) -> Recipe:
        """The recipe with one more transform, behind those of its phase."""
        at = next((i for i, s in enumerate(self.steps) if s.phase > step.phase), len(self.steps))
        return replace(self, steps=(*self.steps[:at], step, *self.steps[at:]))

    def without(self, function: Callable[..., Program]) -> Recipe:
        """The recipe without this transform."""
        return replace(self, steps=tuple(step for step in self.steps if step.function is not function))

    def until(self, phase: Phase) -> Recipe:
        """The recipe of what is made before this phase."""
        return replace(self, steps=tuple(step for step in self.steps if step.phase < phase))

    def of(self, function: Callable[..., Program]) -> tuple[Applied, ...]:
        """Where this transform was applied."""
        return tuple(step for step in self.steps if step.function is function)


@dataclass(frozen=True, eq=False, repr=False)
class Program(ByName, Pointing):
    """A training program, or a part of one.

    ``outputs`` come in the order of the traced function's results. ``gradients`` is the seam: the
    pairs (parameter, gradient) along which data parallelism averages, clipping acts and a parameter
    server cuts. ``initializers`` compute the first value of the state that nobody passes in, some from
    ``SEED``. ``limits`` holds, for hyperparameters such as the decay of an average, the number below which
    they must stay. ``bounds`` holds, for integer data such as labels and embedding ids, the number below
    which they must lie, and what they are for. A step of someone else with several losses, as a GAN has them,
    has no ``loss``: ``losses`` holds each with the parameters that it trains. With ``replicas`` the types are
    those on one device; what is placed ``sharded`` is one device's part, laid end to end along the first
    axis. With ``partition`` they are those of whole arrays, which JAX splits over a mesh. ``code`` is what
    computes a Program that was loaded from a file.
    """

    name: str
    inputs: tuple[Variable, ...] = ()
    state: tuple[Variable, ...] = ()
    constants: Mapping[Variable, jax.Array] = field(default_factory=dict)
    ops: tuple[Op, ...] = ()
    outputs: tuple[Variable, ...] = ()
    next_state: Mapping[Variable, Variable] = field(default_factory=dict)
    gradients: tuple[tuple[Variable, Variable], ...] = ()
    initializers: tuple[Op, ...] = ()
    loss: Variable | None = None
    losses: Mapping[Variable, tuple[Variable, ...]] = field(default_factory=dict)
    hyperparameters: tuple[Variable, ...] = ()
    limits: Mapping[Variable, float] = field(default_factory=dict)
    bounds: Mapping[Variable, tuple[int, str]] = field(default_factory=dict)
    signature: Signature | None = None
    recipe: Recipe | None = None
    replicas: Replicas | None = None
    partition: Partition | None = None
    code: Code | None = None

    @property
    def parameters(self) -> tuple[Variable, ...]:
        """The state Variables that can be trained; within a loop over steps, those that it is given."""
        return tuple(v for v in (*self.state, *self.inputs) if v.kind is Kind.PARAMETER)

    @property
    def updates(self) -> tuple[Target, ...]:
        """The ops that update, each with this Program, fit as targets of a Session.

        On many devices a collective op may be what makes the next value of state.
        """
        following = set(self.next_state.values())
        made = (
            op for op in self.ops if op.made_by is Pass.COLLECTIVE and not following.isdisjoint(op.outputs)
        )
        collective = set(made)
        return tuple(Target(self, op) for op in self.ops if op.made_by is Pass.UPDATE or op in collective)

    @cached_property
    def variables(self) -> Mapping[str, Variable]:
        """Every Variable by its name, in the order in which they get their values."""
        given = (*self.inputs, *self.state, *self.constants)
        computed = (v for op in self.ops for v in op.outputs)
        return {v.name: v for v in (*given, *computed)}

    def __getitem__(self, name: str | Variable) -> Variable:
        """The Variable of this name; ``"loss"`` is the loss, unless a Variable has that name."""
        name = name.name if isinstance(name, Variable) else name
        if name == "loss" and name not in self.variables and self.loss is not None:
            return self.loss
        try:
            return self.variables[name]
        except KeyError:
            loops = any(op.primitive.runs is Runs.SCAN for op in self.ops)
            within = " What a loop computes within has no name outside of it: " * loops
            advice = "roll(program, keep=[...]) hands it out." if loops else ""
            raise UnknownNameError(
                f"Program {self.name!r} has no Variable named {name!r}. "
                f"{nearest(name, self.variables)} print(program) lists them all.{within}{advice}"
            ) from None

    def __copy__(self) -> Program:
        return self

    def __deepcopy__(self, memo: Any) -> Program:
        return self

    def __repr__(self) -> str:
        return f"Program({self.name!r}, {len(self.ops)} ops)"

    def __str__(self) -> str:
        return shown(self)

    def __treescope_repr__(self, path: str | None, subtree_renderer: Any) -> Any:
        return foldable_text(shown(self), path)


@singledispatch
def programs_within(body: Body) -> Mapping[str, Program]:
    """The Programs inside of a Body, by name; the file of each kind of Body registers how they are found."""
    raise NotImplementedError(type(body).__name__)


@singledispatch
def shown(thing: Op | Program) -> str:
    """An Op or a Program as text."""
    raise NotImplementedError(type(thing).__name__)
