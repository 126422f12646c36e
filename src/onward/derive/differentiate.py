"""The gradient rule of one op, taken from JAX's own rules by ``jax.vjp`` of that op alone.

A rule says what the forward op must save, what the gradient op reads and what it computes. It depends
only on what the op computes and on which inputs and outputs take part, so it is derived once and
remembered: the twelfth layer of a network costs a look-up.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any, NamedTuple

import jax

from onward.core.jaxprs.body import Body, Wire, body_of
from onward.core.jaxprs.tracing import current_axis, since

_REMEMBERED = 4096
_REMEMBERED_BY_IDENTITY = 256


class GradientRead(NamedTuple):
    """One value that a gradient op reads: ``position`` counts among the values of that ``source``."""

    source: str  # "input", "output", "residual", or "cotangent"
    position: int


@dataclass(frozen=True, eq=False)
class DerivativeRule:
    """How one op is differentiated.

    ``forward`` computes the op's outputs and then its residuals; it is None where the gradient needs
    nothing beyond the op's inputs and outputs. (A function with a rule of its own may compute its outputs
    otherwise when it is differentiated, so it always has one.) ``writes`` are the inputs that get a
    gradient.
    """

    forward: Body | None
    backward: Body
    reads: tuple[GradientRead, ...]
    writes: tuple[int, ...]


class _RuleCache:
    """The rules used last, safe to use from many threads."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.rules: OrderedDict[Any, DerivativeRule] = OrderedDict()
        self.lock = Lock()

    def get(self, key: Any) -> DerivativeRule | None:
        rule = self.rules.get(key)
        if rule is not None and 2 * len(self.rules) > self.size:  # some are soon to be forgotten
            with self.lock:
                if key in self.rules:
                    self.rules.move_to_end(key)
        return rule

    def put(self, key: Any, rule: DerivativeRule) -> None:
        with self.lock:
            self.rules[key] = rule
            if len(self.rules) > self.size:
                self.rules.popitem(last=False)


_rules = _RuleCache(_REMEMBERED)
_rules_by_identity = _RuleCache(_REMEMBERED_BY_IDENTITY)  # they hold functions, and what these captured


def rule_for(body: Body, wanted: Sequence[int], given: Sequence[int]) -> DerivativeRule:
    """The rule for the gradients of the ``wanted`` inputs from those of the ``given`` outputs.

    >>> import jax.numpy as jnp
    >>> from onward.core.jaxprs.body import body_of
    >>> body = body_of(lambda x, y: [x * y], jnp.ones(3), jnp.ones(3))
    >>> rule_for(body, wanted=[0], given=[0]).reads
    (GradientRead(source='input', position=1), GradientRead(source='cotangent', position=0))
    """
    settings: Any = jax.config  # what JAX's own rules may depend on beside the op
    ambient = settings.jax_enable_x64, settings.jax_default_matmul_precision, current_axis(), since()
    key = (body.signature, tuple(wanted), tuple(given), ambient)
    rule = _rules.get(key) or _rules_by_identity.get(key)
    if rule is None:
        rule = _derive(body.anonymous(), tuple(wanted), tuple(given))
        memory = _rules_by_identity if body.holds_functions else _rules
        memory.put(key, rule)
    return rule


def flows(body: Body, wanted: Sequence[int], given: Sequence[int]) -> list[int]:
    """Those of the ``given`` outputs from which a gradient flows to any of the ``wanted`` inputs.

    >>> import jax, jax.numpy as jnp
    >>> from onward.core.jaxprs.body import body_of
    >>> body = body_of(lambda x: [jnp.sin(x), jax.lax.stop_gradient(x)], jnp.ones(3))
    >>> flows(body, wanted=[0], given=[0, 1])
    [0]
    """
    together = rule_for(body, wanted, given)
    if not together.writes or len(given) == 1:
        return list(given) if together.writes else []
    return [j for j in given if rule_for(body, wanted, [j]).writes]


def _derive(body: Body, wanted: tuple[int, ...], given: tuple[int, ...]) -> DerivativeRule:
    forward, pullback = _forward(body, wanted, given)
    count = len(body.out_types)
    residuals = [_origin(forward, j, count) for j in range(count, len(forward.out_types))]
    reads = list(dict.fromkeys(r for r in residuals if isinstance(r, GradientRead)))
    backward = _backward(forward, pullback, residuals, reads, [body.out_types[j] for j in given])
    cotangents = [GradientRead("cotangent", j) for j in given]
    live = sorted(backward.depending_on(range(len(reads), len(reads) + len(given))))
    backward, kept = backward.restricted(live)
    used = [(*reads, *cotangents)[i] for i in kept]
    saved = [r.position for r in used if r.source == "residual"]
    numbered = {j: i for i, j in enumerate(saved)}
    return DerivativeRule(
        forward=forward.restricted([*range(count), *saved], keep_inputs=True)[0]
        if saved or body.has_custom_rule
        else None,
        backward=backward,
        reads=tuple(
            GradientRead(r.source, numbered[r.position]) if r.source == "residual" else r for r in used
        ),
        writes=tuple(wanted[i] for i in live),
    )


def _forward(body: Body, wanted: tuple[int, ...], given: tuple[int, ...]) -> tuple[Body, _Pullback]:
    """The body that also returns what JAX's rule saves, and the pullback without those values."""
    pullbacks: list[_Pullback] = []

    def forward(*inputs: Any) -> list[Any]:
        def primal(*chosen: Any) -> tuple[list[Any], list[Any]]:
            values = list(inputs)
            for i, value in zip(wanted, chosen, strict=True):
                values[i] = value
            outputs = body(*values)
            return [outputs[j] for j in given], outputs

        _, pull, outputs = jax.vjp(primal, *(inputs[i] for i in wanted), has_aux=True)
        leaves, treedef = jax.tree.flatten(pull)
        traced = [isinstance(leaf, jax.core.Tracer) for leaf in leaves]
        fixed = [None if is_traced else leaf for leaf, is_traced in zip(leaves, traced, strict=True)]
        pullbacks.append(_Pullback(treedef, traced, fixed))
        return [*outputs, *(leaf for leaf, is_traced in zip(leaves, traced, strict=True) if is_traced)]

    return body_of(forward, *body.in_types), pullbacks[0]


@dataclass(frozen=True)
class _Pullback:
    """The pullback that ``jax.vjp`` returns, with its traced leaves taken out."""

    treedef: Any
    traced: list[bool]
    fixed: list[Any]

    def __call__(self, leaves: Sequence[Any], cotangents: list[Any]) -> Any:
        supply = iter(leaves)
        filled = [next(supply) if t else f for t, f in zip(self.traced, self.fixed, strict=True)]
        return jax.tree.unflatten(self.treedef, filled)(cotangents)


def _origin(forward: Body, j: int, count: int) -> GradientRead | Wire:
    """Where the gradient op can read what output ``j`` of the forward body holds."""
    wire = forward.wires[j]
    if isinstance(wire, Wire):
        return wire if wire.input is None else GradientRead("input", wire.input)
    if wire is None:
        return GradientRead("residual", j)
    return GradientRead("output" if wire < count else "residual", wire)


def _backward(
    forward: Body,
    pullback: _Pullback,
    residuals: list[GradientRead | Wire],
    reads: list[GradientRead],
    given: list[Any],
) -> Body:
    def backward(*values: Any) -> list[Any]:
        env = dict(zip(reads, values, strict=False))
        leaves = [env[r] if isinstance(r, GradientRead) else r.value for r in residuals]
        return list(pullback(leaves, list(values[len(reads) :])))

    types = [
        forward.in_types[r.position] if r.source == "input" else forward.out_types[r.position] for r in reads
    ]
    return body_of(backward, *types, *given)
