"""Many ops as one Body, and a Body as one call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import jax
import numpy as np
from jax.extend import core as jex
from jax.extend import source_info_util

from onward.core.jaxprs.body import Body
from onward.core.jaxprs.equations import close, nothing, nowhere
from onward.core.jaxprs.scopes import outermost_scope
from onward.core.program import Op, Variable


def joined(
    ops: Iterable[Op],
    given: Sequence[Variable],
    wanted: Sequence[Variable],
    scopes: Mapping[Op, str] | None = None,
    is_inner: bool = False,
    numbers: Mapping[Variable, Any] | None = None,
) -> Body:
    """The equations of all these ops in a row, as one Body from given Variables to wanted ones.

    Nothing is traced for it: a Program of thousands of ops takes milliseconds. The equations stand in the
    scopes of their ops, or those given for them, below the pass that made them; those of the inside of a loop
    stand below the pass of the loop. ``numbers`` stand in the equations in place of Variables.
    """
    row = _GrowingJaxpr(given)
    for v, number in (numbers or {}).items():
        row.env[v] = jex.Literal(np.asarray(number, v.dtype)[()], jax.core.ShapedArray(v.shape, v.dtype))
    for op in ops:
        scope = op.scope if scopes is None else scopes[op]
        row.append(op, scope if is_inner else "/".join(filter(None, (op.made_by, scope))))
    return row.body([row.env[v] for v in wanted])


class _GrowingJaxpr:
    """A jaxpr that grows by the equations of one op after the other."""

    def __init__(self, given: Sequence[Variable]) -> None:
        self.invars = [jex.Var(jax.core.ShapedArray(v.shape, v.dtype)) for v in given]
        self.env: dict[Variable, Any] = dict(zip(given, self.invars, strict=True))
        self.consts: dict[int, tuple[Any, Any]] = {}
        self.eqns: list[Any] = []
        self.stacks: dict[str, Any] = {}

    def append(self, op: Op, scope: str) -> None:
        constvars, consts, invars, eqns, outvars = op.body.unscoped
        atoms = dict(zip(invars, map(self.env.__getitem__, op.inputs), strict=True))
        atoms.update(zip(constvars, map(self.constant, constvars, consts), strict=True))
        stack = self.stack(scope)

        def read(v: Any) -> Any:
            return v if isinstance(v, jex.Literal) else atoms[v]

        for eqn in eqns:
            made = [v if isinstance(v, jex.DropVar) else jex.Var(v.aval) for v in eqn.outvars]
            place = eqn.source_info.replace(name_stack=stack + eqn.source_info.name_stack)
            used = [read(v) for v in eqn.invars]
            self.eqns.append(eqn.replace(invars=used, outvars=made, source_info=place))
            atoms.update(zip(eqn.outvars, made, strict=True))
        self.env.update(zip(op.outputs, map(read, outvars), strict=True))

    def constant(self, v: Any, value: Any) -> Any:
        """The variable of a constant; one for each array object."""
        return self.consts.setdefault(id(value), (jex.Var(v.aval), value))[0]

    def stack(self, scope: str) -> Any:
        """JAX's own form of the scope of an op."""
        if scope not in self.stacks:
            with outermost_scope(), jax.named_scope(scope) if scope else nullcontext():
                self.stacks[scope] = source_info_util.current_name_stack()
        return self.stacks[scope]

    def body(self, outvars: list[Any]) -> Body:
        effects = frozenset[Any]().union(*(eqn.effects for eqn in self.eqns))
        constvars = [v for v, _ in self.consts.values()]
        jaxpr = jex.Jaxpr(constvars, self.invars, outvars, self.eqns, effects, nothing().jaxpr.debug_info)
        return Body(close(jaxpr, [value for _, value in self.consts.values()]))


def as_one_call(body: Body, name: str) -> Callable[..., list[Any]]:
    """A function that calls a Body as ``jax.jit`` does: whatever traces it does not look inside.

    Tracing a Program op by op costs JAX about as much as tracing the function behind it; one call costs
    nothing, and compiles to the same.
    """
    eqn, jaxpr = _some_call(), body.closed.jaxpr
    invars, outvars = ([jex.Var(v.aval) for v in group] for group in (jaxpr.invars, jaxpr.outvars))
    call = eqn.replace(
        invars=[*invars],
        outvars=outvars,
        params={**_stretched(eqn.params, len(invars), len(outvars)), "jaxpr": body.closed, "name": name},
        effects=jaxpr.effects,
        source_info=nowhere(),
    )
    whole = jex.Jaxpr([], invars, outvars, [call], call.effects, nothing().jaxpr.debug_info)
    function: Callable[..., list[Any]] = jex.jaxpr_as_fun(close(whole, []))
    return function


_TAKES, _GIVES = 5, 7  # of the pattern; what JAX notes of each argument and each result is as long


def _some_call() -> Any:
    """An equation that calls what ``jax.jit`` made, of a few arguments: thousands would have to be traced."""
    with jax.disable_jit(False):
        pattern = jax.make_jaxpr(jax.jit(lambda *_: [np.float32(0)] * _GIVES))(*[np.float32(0)] * _TAKES)
    (eqn,) = pattern.jaxpr.eqns
    return eqn


def _stretched(params: Mapping[str, Any], takes: int, gives: int) -> dict[str, Any]:
    """The parameters of the pattern for as many arguments and results."""
    counts = {_TAKES: takes, _GIVES: gives}

    def stretched(value: Any) -> Any:
        is_for_each = isinstance(value, tuple) and len(value) in counts
        return value[:1] * counts[len(value)] if is_for_each else value

    return {name: stretched(value) for name, value in params.items()}
