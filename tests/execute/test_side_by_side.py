"""Executables that threads compile: all are there at the end of the block, or the error of one is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from onward.execute.side_by_side import CompilerPool


def lowered(n: int) -> Any:
    return jax.jit(lambda x: n * x).lower(jnp.float32(0))


def test_each_call_is_of_the_executable_that_it_was_given() -> None:
    with CompilerPool({"xla_backend_optimization_level": 0}) as beside:
        calls = [beside.compiled(lowered(n)) for n in range(1, 6)]
    assert [float(call(jnp.float32(2))) for call in calls] == [2, 4, 6, 8, 10]


def with_unknown_option(then: Callable[[], Any]) -> None:
    with CompilerPool({"no_such_option": 1}) as beside:
        beside.compiled(lowered(1))
        then()


def test_what_cannot_be_compiled_is_an_error_at_the_end_of_the_block() -> None:
    done: list[str] = []
    with pytest.raises(jax.errors.JaxRuntimeError, match="no_such_option"):
        with_unknown_option(lambda: done.append("lowered"))
    assert done == ["lowered"]


def test_an_error_of_the_block_itself_is_raised_as_it_is() -> None:
    with pytest.raises(ZeroDivisionError):
        with_unknown_option(lambda: 1 / 0)
