"""The Ops of a traced jaxpr, one per equation; nested ``jit`` is inlined and kept as a scope."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import is_
from typing import Any
from weakref import WeakKeyDictionary

import jax
from jax.extend import core as jex

from onward.core.errors import TraceError
from onward.core.graph import Op, Program
from onward.core.jaxprs.body import Body, EquationBody
from onward.core.jaxprs.differentiated import is_differentiated, is_entered
from onward.core.jaxprs.equations import (
    Type,
    function_run_by,
    has_rule_of_its_own,
    inputs_of,
    is_inlined,
    jaxprs_in,
    literal_value,
    shape_of,
)
from onward.core.jaxprs.scopes import entries, transforms_around
from onward.core.names import Names
from onward.core.source import Source, is_library
from onward.core.variable import Variable, holds_keys
from onward.core.words import Kind, Pass

_declare = jex.Primitive("declare")
_declare.def_abstract_eval(lambda *, name, type: jax.core.ShapedArray(type.shape, type.dtype))  # noqa: A006


@dataclass(frozen=True)
class Differentiation:
    """A call of ``jax.grad`` that was left open.

    Attributes:
        line: of the call.
        loss: the value.
        wanted: what it is differentiated for.
        entered: the same as the differentiated function reads it.
        gradients: one for each.
    """

    line: str
    loss: Variable
    wanted: tuple[Variable, ...]
    entered: tuple[Variable, ...]
    gradients: tuple[Variable, ...]


@dataclass(frozen=True)
class Reading:
    """The result of ``read_jaxpr``; with ``apart``, for each op the transforms around its equation."""

    ops: tuple[Op, ...]
    outputs: tuple[Variable, ...]
    constants: Mapping[Variable, Any]
    under: tuple[frozenset[str], ...]
    differentiations: tuple[Differentiation, ...] = ()


def declared(name: str, kind: Type) -> Any:
    """Inside a trace, the value of the Variable that ``read_jaxpr`` is given under this name."""
    return _declare.bind(name=name, type=kind)


_within: WeakKeyDictionary[Body, dict[str, Program]] = WeakKeyDictionary()


def programs_in(body: Body) -> Mapping[str, Program]:
    """The Programs inside a control flow primitive, by the name of the parameter; the same ones each time."""
    if body not in _within:
        found: dict[str, Program] = {}
        for eqn in body.equations if len(body.equations) == 1 else ():
            for key, value in eqn.params.items():
                inner = jaxprs_in(value)
                for i, closed in enumerate(inner):
                    name = key if len(inner) == 1 else f"{key}[{i}]"
                    found[name] = program_of(closed, name)
        _within[body] = found
    return _within[body]


def program_of(closed: Any, name: str) -> Program:
    """A jaxpr (such as the body of a scan) as a Program of its own, with the backward passes within."""
    names = Names()
    inputs = tuple(
        Variable(names.new(f"input_{i}"), *shape_of(v.aval), Kind.DATA)
        for i, v in enumerate(closed.jaxpr.invars)
    )
    read = read_jaxpr(closed, inputs, names, apart=True)
    ops = (
        replace(op, made_by=Pass.BACKWARD) if "transpose" in marks else op
        for op, marks in zip(read.ops, read.under, strict=True)
    )
    return Program(name, inputs, constants=read.constants, ops=tuple(ops), outputs=read.outputs)


def read_jaxpr(
    closed: Any,
    inputs: Sequence[Variable],
    names: Names,
    declarations: Mapping[str, Variable] | None = None,
    labels: Mapping[int, str] | None = None,
    apart: bool = False,
) -> Reading:
    """The Ops of a traced jaxpr, one per equation, nested ``jit`` inlined and kept as a scope.

    ``declarations`` holds the Variables that stand for ``declared`` values, ``labels`` the names that some
    of the outputs should have, by position. With ``apart`` a scope is what a person wrote, without what JAX
    wrapped around it: transforms, calls of its own functions, a ``jit`` around everything.
    """
    reader = Reader(names, declarations or {}, apart)
    reader.env.update(zip(closed.jaxpr.invars, inputs, strict=True))
    reader.labels = {
        closed.jaxpr.outvars[i]: name
        for i, name in (labels or {}).items()
        if not isinstance(closed.jaxpr.outvars[i], jex.Literal)
    }
    reader.read(closed, scope="", caller=None)
    outputs = tuple(reader.value(v) for v in closed.jaxpr.outvars)
    under, open_ = tuple(reader.under), tuple(reader.differentiations)
    return Reading(tuple(reader.ops), outputs, reader.constants, under, open_)


class Reader:
    """One walk over a jaxpr."""

    def __init__(self, names: Names, declarations: Mapping[str, Variable], apart: bool) -> None:
        self.names, self.declarations, self.apart = names, declarations, apart
        self.within: frozenset[str] = frozenset()
        self.under: list[frozenset[str]] = []
        self.env: dict[Any, Any] = {}
        self.labels: dict[Any, str] = {}
        self.ops: list[Op] = []
        self.differentiations: list[Differentiation] = []
        self.entered: dict[Variable, Variable] = {}
        self.constants: dict[Variable, Any] = {}
        self.stacks: dict[int, tuple[Any, str, str]] = {}
        self._by_identity: dict[int, Variable] = {}

    def read(self, closed: Any, scope: str, caller: Source | None) -> None:
        """Read every equation of this jaxpr; ``caller`` is the place of the ``jit`` around it."""
        jaxpr = closed.jaxpr
        for v, const in zip(jaxpr.constvars, closed.consts, strict=True):
            self.env[v] = self.constant(const)
        in_library = is_library(jaxpr.debug_info.func_filename or "<frozen ")
        unnamed = jaxpr.debug_info.with_unknown_names()
        for eqn in jaxpr.eqns:
            stack, marks = self.shown(eqn.source_info.name_stack)
            place = caller if caller is not None and in_library else _place(eqn, caller, marks)
            here = _below(scope, stack)
            if eqn.primitive is _declare:
                self.env[eqn.outvars[0]] = self.declarations[eqn.params["name"]]
            elif is_entered(eqn):
                self.enter(eqn)
            elif is_differentiated(eqn):
                self.differentiate(eqn)
            elif is_inlined(eqn) and not _draws(eqn):
                if self.apart and not here and len(jaxpr.eqns) == 1:
                    self.inline(eqn, "", None)
                else:
                    self.inline(eqn, _below(here, self.named(eqn)), place)
            else:
                self.append(eqn, here, place, unnamed)

    def named(self, eqn: Any) -> str:
        """The scope that a call of a jitted function opens: its name; with ``apart`` only a person's."""
        (inner,) = jaxprs_in(tuple(eqn.params.values()))
        if self.apart and is_library(inner.jaxpr.debug_info.func_filename or "<frozen "):
            return ""
        return str(eqn.params.get("name", "call"))

    def shown(self, stack: Any) -> tuple[str, str]:
        """The scopes of an equation in one text, and those of a person; many equations share one stack."""
        known = self.stacks.get(id(stack))
        if known is None:
            marks = entries(stack, "Scope")
            known = self.stacks[id(stack)] = stack, marks if self.apart else str(stack), marks
        return known[1:]

    def inline(self, eqn: Any, scope: str, place: Source | None) -> None:
        """Read the function that an equation calls, as if its equations stood here."""
        inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
        for v, outer in zip(inner.jaxpr.invars, eqn.invars, strict=True):
            self.env[v] = self.resolve(outer)
        outputs = list(zip(inner.jaxpr.outvars, eqn.outvars, strict=True))
        outside, within = self.labels, self.within
        self.within = within | transforms_around(eqn)
        self.labels = {v: outside[o] for v, o in outputs if o in outside and not isinstance(v, jex.Literal)}
        self.read(inner, scope, place)
        self.labels, self.within = outside, within
        for v, outer in outputs:
            self.env[outer] = self.resolve(v)

    def enter(self, eqn: Any) -> None:
        """Give what a differentiated function is given Variables of their own, that no op gives."""
        for old, new in zip(map(self.value, eqn.invars), eqn.outvars, strict=True):
            self.env[new] = Variable(self.names.new(old.name), old.shape, old.dtype, old.kind)
            self.entered[self.env[new]] = old

    def differentiate(self, eqn: Any) -> None:
        """Note a call of ``jax.grad`` that was left open; its gradients are Variables that no op gives."""
        loss, *entered = map(self.value, eqn.invars)
        wanted = tuple(self.entered[v] for v in entered)
        gradients = tuple(
            Variable(self.names.new(f"gradient {i}"), *shape_of(v.aval), Kind.GRADIENT)
            for i, v in enumerate(eqn.outvars)
        )
        self.env.update(zip(eqn.outvars, gradients, strict=True))
        line = eqn.params["line"]
        self.differentiations.append(Differentiation(line, loss, wanted, tuple(entered), gradients))

    def append(self, eqn: Any, scope: str, source: Source, debug_info: Any) -> None:
        """Make the Op of an equation, and the Variables that it gives."""
        eqn = self.with_literals(eqn)
        read = inputs_of(eqn)
        written = [v for v in eqn.outvars if not isinstance(v, jex.DropVar)]
        kind = _kind(eqn)
        _refuse_references(eqn, source)
        given = eqn.params.get("name") if kind == "name" else None
        label = given or (f"{scope}/{kind}" if scope else kind)
        outputs = []
        for v in written:
            outputs.append(Variable(self.names.new(self.labels.get(v, label)), *shape_of(v.aval)))
            self.env[v] = outputs[-1]
        self.ops.append(
            Op(
                type=kind,
                inputs=tuple(self.env[v] for v in read),
                outputs=tuple(outputs),
                body=EquationBody(eqn, read, written, debug_info),
                scope=scope,
                source=source,
            )
        )
        if self.apart:
            self.under.append(self.within | transforms_around(eqn))

    def resolve(self, v: Any) -> Any:
        """The Variable of a jaxpr's variable, or the literal it stands for."""
        return v if isinstance(v, jex.Literal) else self.env[v]

    def with_literals(self, eqn: Any) -> Any:
        """The equation with the literals that reached it through the call of an inlined function."""
        known = [v if isinstance(v, jex.Literal) else self.env[v] for v in eqn.invars]
        invars = [k if isinstance(k, jex.Literal) else v for k, v in zip(known, eqn.invars, strict=True)]
        return eqn if all(map(is_, invars, eqn.invars)) else eqn.replace(invars=invars)

    def value(self, v: Any) -> Variable:
        """The Variable of a jaxpr's variable; a literal becomes a constant."""
        known = self.resolve(v)
        if isinstance(known, jex.Literal):
            return self.constant(literal_value(known))
        found: Variable = known
        return found

    def constant(self, value: Any) -> Variable:
        """The constant Variable that holds this array; one for each array object."""
        if isinstance(value, jax.core.Tracer):
            raise TraceError(
                f"The function uses {value.aval}, a value of another trace, which no step can know. Some "
                "function stored it outside itself, or trace was called inside jax.jit or jax.grad on what "
                "these pass: give it to the function as an argument."
            )
        found = self._by_identity.get(id(value))
        if found is None or self.constants[found] is not value:
            found = Variable(self.names.new("constant"), *shape_of(jax.typeof(value)), Kind.CONSTANT)
            self._by_identity[id(value)] = found
            self.constants[found] = value
        return found


def _below(scope: str, name: str) -> str:
    return f"{scope}/{name}" if scope and name else scope or name


def _place(eqn: Any, caller: Source | None, marks: str) -> Source:
    """The place of an equation within a call."""
    around = caller.marks if caller is not None else ""
    return Source(eqn.source_info.traceback, caller, _below(around, marks), function_run_by(eqn))


def _draws(eqn: Any) -> bool:
    """Whether this is a call of ``jax.random`` that draws numbers from a key: one op, not its many."""
    if not eqn.invars or not eqn.params.get("name", "").startswith("_"):
        return False
    (inner,) = jaxprs_in(tuple(eqn.params.values()))
    if not is_library(inner.jaxpr.debug_info.func_filename or "<frozen "):
        return False
    return holds_keys(eqn.invars[0].aval.dtype)


def _kind(eqn: Any) -> str:
    """The type of the op: the primitive's name, or that of the function with a rule of its own."""
    if is_inlined(eqn):
        return str(eqn.params["name"]).strip("_")
    call = eqn.params.get("call_jaxpr") if has_rule_of_its_own(eqn) else None
    name = call.jaxpr.debug_info.func_name if call is not None else ""
    return name if name.isidentifier() else eqn.primitive.name


def _refuse_references(eqn: Any, source: Source) -> None:
    for v in (*eqn.invars, *eqn.outvars):
        if hasattr(v.aval, "inner_aval"):
            raise TraceError(
                f"{eqn.primitive.name} at {source.file}:{source.line} uses a mutable array (jax.new_ref). A "
                "Program gives every Variable its value once: return new arrays instead of changing old ones."
            )
