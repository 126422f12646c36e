"""The computation of a Program as JSON data that another process can compare with its own.

It depends on operators, how they are wired, the numbers in them, the constants and the names of state; not on
other names, places in the code, or lengths of activations. ``difference`` says where two part, for people.

>>> import jax.numpy as jnp, onward as ow
>>> def outlined(f):
...     return outline(ow.trace(f, jnp.ones(3), jnp.ones(3)))
>>> mul = outlined(lambda w, x: jnp.sum(w * x * 2))
>>> difference(mul, outlined(lambda w, v: jnp.sum(w * v * 2)))
>>> difference(mul, outlined(lambda w, x: jnp.sum(w * x * 3)))
('mul_1 = mul(mul, 2.0)', 'mul_1 = mul(mul, 3.0)')
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from itertools import zip_longest
from math import isclose
from typing import Any

import numpy as np

from onward.core.jaxprs.body import Body
from onward.core.jaxprs.reading import program_of
from onward.core.program import Op, Program, Variable, programs_within
from onward.core.show import short_type

Outline = Mapping[str, Any]
_QUIET = {"accuracy", "new_sizes", "num_consts", "num_carry", "shape", "sizes", "unroll"}
_TELLING = re.compile(r"True|[-+\d.,() e]*\d[-+\d.,() e]*")
_NUMBER = re.compile(r"(-?\d+\.?\d*(?:e[-+]?\d+)?)")
_LARGEST = 2**20  # bytes of a constant that are looked at


def outline(program: Program) -> Outline:
    """Describe the computation of a Program as JSON data.

    Returns:
        ``given``: the names of data and constants; ``lines``: for each constant and op what it is, its
        operands (the number of a Variable, the name of state in a list, or a number as text), how many
        results it has, a name, and what it holds.
    """
    given = [*program.inputs, *program.constants]
    number: dict[Variable, Any] = {v: i for i, v in enumerate(given)} | {v: [v.name] for v in program.state}
    count = len(given)
    lines = [[_constant(v, x), [], 0, v.name, {}] for v, x in program.constants.items()]
    for op in program.ops:
        body = op.primal or op.body
        operands = [number[op.inputs[o]] if isinstance(o, int) else str(o) for o in body.operands]
        parts = {name: outline(part) for name, part in _parts(op, body).items()}
        name = "".join(v.name for v in op.outputs[:1])
        lines.append([_what(op, body), operands, len(op.outputs), name, parts])
        number |= {v: i for i, v in enumerate(op.outputs, count)}
        count += len(op.outputs)
    lines.append(["return", [number[v] for v in program.outputs if v in number], 0, "", {}])
    return {"given": [v.name for v in given], "lines": lines}


def anonymous(told: Outline) -> list[Any]:
    """The same without the names: equal where two Programs compute the same."""
    return [
        len(told["given"]),
        *(
            [what, operands, n, {k: anonymous(p) for k, p in parts.items()}]
            for what, operands, n, _, parts in told["lines"]
        ),
    ]


def difference(was: Outline, now: Outline, ratio: float = 1.0) -> tuple[str, str] | None:
    """The first line that differs, of both; None if there is none.

    Args:
        was: an outline.
        now: another.
        ratio: how many times as long the batch is now: numbers may differ by it, as those of means do.
    """
    for i, (a, b) in enumerate(zip_longest(was["lines"], now["lines"])):
        if a is None or b is None:
            return _shown(was, i), _shown(now, i)
        alike = _alike(a[0], b[0], ratio) and len(a[1]) == len(b[1]) and a[4].keys() == b[4].keys()
        if not alike or not all(_same(x, y, ratio) for x, y in zip(a[1], b[1], strict=True)):
            return _shown(was, i), _shown(now, i)
        for name, part in a[4].items():
            if found := difference(part, b[4][name], ratio):
                within = f", within {b[3]} = {b[0].split(' ')[0]}(...)"
                return found[0] + within, found[1] + within
    return None


def _what(op: Op, body: Body) -> str:
    told = [
        f"{key}={value}"
        for key, value in sorted(body.attributes.items())
        if key not in _QUIET and value != "()" and _TELLING.fullmatch(value)
    ]
    return " ".join([str(op.type), *(str(v.dtype) for v in op.outputs), *told])


def _parts(op: Op, body: Body) -> Mapping[str, Program]:
    within = programs_within(body)
    return within if within or len(body.equations) < 2 else {"body": program_of(body.closed, op.type)}


def _constant(v: Variable, value: Any) -> str:
    here = getattr(value, "is_fully_addressable", True)
    small = here and v.size <= _LARGEST and not v.is_key
    return f"constant {short_type(v)}" + (f" {zlib.crc32(np.asarray(value).tobytes())}" if small else "")


def _same(a: Any, b: Any, ratio: float) -> bool:
    return _alike(a, b, ratio) if isinstance(a, str) and isinstance(b, str) else bool(a == b)


def _alike(a: str, b: str, ratio: float) -> bool:
    """Whether two texts are equal, but for numbers that may be ``ratio`` times as large or small."""
    if a == b or ratio == 1:
        return a == b
    first, second = _NUMBER.split(a), _NUMBER.split(b)
    if first[::2] != second[::2]:
        return False
    pairs = [(float(x), float(y)) for x, y in zip(first[1::2], second[1::2], strict=True)]
    return all(any(isclose(x * r, y, rel_tol=1e-5) for r in (1, ratio, 1 / ratio)) for x, y in pairs)


def _shown(told: Outline, i: int) -> str:
    """A line for people."""
    if i >= len(told["lines"]):
        return "nothing more"
    names = list(told["given"])
    for _, _, results, name, _ in told["lines"][:i]:
        names += [name] * results
    what, operands, _, name, _ = told["lines"][i]
    word = what.split(" ")[0]
    shown = (names[o] if isinstance(o, int) else o if isinstance(o, str) else o[0] for o in operands)
    call = f"{word}({', '.join(shown)})"
    return f"{name} = {call}" if name else call
