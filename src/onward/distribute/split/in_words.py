"""A Program in words that are the same in every process, for peers that compare what they were given."""

from __future__ import annotations

import re
from hashlib import sha256
from typing import Any

import jax
import numpy as np

from onward.core.jaxprs.body import Body
from onward.core.program import Op, Program
from onward.core.variable import holds_keys

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def in_words(program: Program, beginning: bool = True) -> str:
    """The types, names and wiring of a Program, and what each of its ops computes, constants included.

    Without ``beginning``, all but the first values of its state, hyperparameters among them.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> twice, thrice = (ow.trace(lambda w: jnp.sum(w * n), jnp.ones(3), name="f") for n in (2, 3))
        >>> in_words(twice) == in_words(thrice)
        False
    """
    head = (*program.inputs, *program.state, *program.outputs)
    lines = [f"{v.name}:{v.type}" for v in head]
    lines += [f"{old.name}<-{new.name}" for old, new in program.next_state.items()]
    lines += [f"{v.name}={_digest(value)}" for v, value in program.constants.items()]
    told: dict[Body, str] = {}
    ops = (*(program.initializers if beginning else ()), *program.ops)
    return "\n".join((program.name, *lines, *(_line(op, told) for op in ops)))


def fingerprint(program: Program) -> str:
    """Equal for Programs that compute the same from the same, in any process."""
    return sha256(in_words(program).encode()).hexdigest()[:8]


def _line(op: Op, told: dict[Body, str]) -> str:
    names = (" ".join(v.name for v in side) for side in (op.outputs, op.inputs))
    if op.body not in told:
        told[op.body] = _computed(op.body)
    return f"{op.type}|{'|'.join(names)}|{told[op.body]}"


def _computed(body: Body) -> str:
    """The jaxpr without the addresses of functions in it, and what it holds fixed."""
    fixed = " ".join(map(_digest, body.closed.consts))
    return f"{_ADDRESS.sub('', body.text)} {fixed}"


def _digest(value: Any) -> str:
    if holds_keys(value.dtype):
        value = jax.random.key_data(value)
    array = np.asarray(value)
    return f"{array.dtype}{list(array.shape)}:{sha256(array.tobytes()).hexdigest()}"
