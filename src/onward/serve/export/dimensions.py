"""Lengths of axes that depend on the batch, as text: ``"b"``, ``"4*b"``, ``"floordiv(b, 2) + 1"``.

JAX writes a symbolic length so; here it is given its value again, by arithmetic on whole numbers and nothing
else. Numbers stay small, whatever the text says.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from functools import lru_cache
from operator import add, floordiv, mod, mul, neg, sub
from typing import Any

_LONGEST = 500
_LARGEST = 2**62
_BINARY: Mapping[type[ast.operator], Callable[[int, int], int]] = {ast.Add: add, ast.Sub: sub, ast.Mult: mul}
_CALLS: Mapping[str, Callable[..., int]] = {"floordiv": floordiv, "mod": mod, "max": max, "min": min}


def written(length: Any) -> int | str:
    """A length as it is stored: a number, or the expression that JAX prints."""
    return length if isinstance(length, int) else str(length)


def evaluated(length: int | str, sizes: Mapping[str, Any]) -> int:
    """A stored length where the free lengths have these sizes: numbers, or symbols of another trace.

    Raises:
        ValueError: no expression in these sizes, or one whose value is not a length.

    Example:
        >>> evaluated("floordiv(b, 2) + 3*b", {"b": 5}), evaluated(7, {})
        (17, 7)
    """
    value = length if isinstance(length, int) else valued(length, sizes)
    if isinstance(value, int) and not 0 <= value <= _LARGEST:
        raise ValueError(f"{str(length)[:40]!r} is {value}, which is the length of nothing")
    return value


def valued(expression: str, sizes: Mapping[str, Any]) -> Any:
    """The value of an expression, also one below 0, which no length has.

    >>> valued("b - 5", {"b": 2})
    -3
    """
    return _value(_parsed(expression), sizes)


def names_in(length: int | str) -> set[str]:
    """The free lengths in an expression.

    >>> sorted(names_in("max(b, 2*t)"))
    ['b', 't']
    """
    if isinstance(length, int):
        return set()
    found = {node.id for node in ast.walk(_parsed(length)) if isinstance(node, ast.Name)}
    return found - _CALLS.keys()


@lru_cache(4096)
def _parsed(text: str) -> ast.expr:
    if len(text) > _LONGEST:
        raise ValueError("a length is described in more than 500 characters")
    try:
        return ast.parse(text.replace("^", "**"), mode="eval").body
    except (SyntaxError, MemoryError, RecursionError) as error:
        raise ValueError(f"{text[:40]!r} is not a length") from error


def _value(node: ast.expr, sizes: Mapping[str, Any]) -> Any:
    found = _computed(node, sizes)
    if isinstance(found, int) and abs(found) > _LARGEST:
        raise ValueError(f"{ast.unparse(node)[:40]!r} is larger than any length")
    return found


def _computed(node: ast.expr, sizes: Mapping[str, Any]) -> Any:
    match node:
        case ast.Constant(value=int() as number) if type(number) is int:
            return number
        case ast.Name(id=name) if name in sizes:
            return sizes[name]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return neg(_value(operand, sizes))
        case ast.BinOp(left=left, op=ast.Pow(), right=ast.Constant(value=int() as power)) if 0 <= power <= 8:
            return _value(left, sizes) ** power
        case ast.BinOp(left=left, op=operator, right=right) if type(operator) in _BINARY:
            return _BINARY[type(operator)](_value(left, sizes), _value(right, sizes))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _CALLS and len(args) == 2:
            first, second = (_value(argument, sizes) for argument in args)
            if second == 0 and name in ("floordiv", "mod"):
                raise ValueError("a length is divided by 0")
            return _CALLS[name](first, second)
    raise ValueError(f"{ast.unparse(node)[:40]!r} is not a length in {', '.join(sizes) or 'numbers'}")
