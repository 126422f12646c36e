"""The scope in which people look for an op: where a layer is computed, its gradients and its updates belong.

Forward ops say their scope, gradient ops that of the op they differentiate. An update op says none: it
belongs where its parameter is first read. So all that is done for a layer stands together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from onward.core.program import Op, Program, Variable
from onward.core.words import Pass


def homes(program: Program) -> Mapping[Op, str]:
    """For each op the scope it belongs to; an empty one where several are as good as each other.

    Args:
        program: at any stage.

    Example:
        >>> import jax, jax.numpy as jnp, onward as ow
        >>> def loss(params, x):
        ...     with jax.named_scope("layer"):
        ...         y = x @ params
        ...     return jnp.sum(y)
        >>> program = ow.SGD(0.1).minimize(loss, jnp.ones((3, 2)), jnp.ones((4, 3)))
        >>> [(op.type, home) for op, home in homes(program).items() if op.made_by is not ow.Pass.BACKWARD]
        [('dot_general', 'layer'), ('reduce_sum', ''), ('count', ''), ('sgd', 'layer')]
    """
    found: dict[Op, str] = {}
    of_value: dict[Variable, str] = {}
    for op in program.ops:
        found[op] = op.scope or _common(of_value.get(v, "") for v in op.inputs if _tells(op, v, of_value))
        if op.made_by is Pass.FORWARD and op.scope:
            for v in op.inputs:
                of_value.setdefault(v, op.scope)
        for v in op.outputs:
            of_value[v] = found[op]
    return _from_readers(program, found)


def _tells(op: Op, v: Variable, of_value: Mapping[Variable, str]) -> bool:
    """Whether the home of a value says something about that of an op which reads it."""
    return op.made_by is not Pass.FORWARD and bool(of_value.get(v))


def _common(scopes: Iterable[str]) -> str:
    """The one scope that all of these are; empty if they differ."""
    different = set(scopes)
    return different.pop() if len(different) == 1 else ""


def _from_readers(program: Program, found: dict[Op, str]) -> Mapping[Op, str]:
    """What is still homeless in the update moves in with the ops that read it, if these live together."""
    readers: dict[Variable, set[str]] = {}
    for op in reversed(program.ops):
        if op.made_by is Pass.UPDATE and not found[op]:
            found[op] = _common(home for v in op.outputs for home in readers.get(v, ()))
        for v in op.inputs:
            readers.setdefault(v, set()).add(found[op])
    return found
