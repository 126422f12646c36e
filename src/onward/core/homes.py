"""The scope in which people look for an op: where a layer is computed, its gradients and its updates belong.

Forward ops say their scope, gradient ops that of the op they differentiate. An update op says none: it
belongs where its parameter is first read. So all that is done for a layer stands together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from onward.core.program import Op, Program, Variable
from onward.core.walk import consumers, producers
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
    found = {op: op.scope for op in program.ops}
    made = producers(program)
    first: dict[Variable, str] = {}
    for op in program.ops:
        if op.made_by is Pass.FORWARD and op.scope:
            first.update((v, op.scope) for v in op.inputs if v not in made and v not in first)
    movable = [op for op in program.ops if not op.scope and op.of is None and op.made_by is not Pass.FORWARD]
    _move_in_with_readers(program, [op for op in movable if op.made_by is Pass.BACKWARD], found)
    for op in movable:
        scopes = (found[made[v]] if v in made else first.get(v, "") for v in op.inputs)
        found[op] = found[op] or _common(scope for scope in scopes if scope)
    _move_in_with_readers(program, [op for op in movable if op.made_by is Pass.UPDATE], found)
    return found


def _move_in_with_readers(program: Program, homeless: Iterable[Op], found: dict[Op, str]) -> None:
    """Give ops the home of the ops that read what they compute, if these live together."""
    read_by = consumers(program)
    for op in reversed([op for op in homeless if not found[op]]):
        found[op] = _common(found[reader] for v in op.outputs for reader in read_by.get(v, ()))


def _common(scopes: Iterable[str]) -> str:
    """The one scope that all of these are; empty if they differ."""
    different = set(scopes)
    return different.pop() if len(different) == 1 else ""
