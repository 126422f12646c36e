"""The numbers that a step or a test reports by name: the loss, and every single number beside it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from onward.core.errors import ArgumentError
from onward.core.program import Program, Variable
from onward.core.structure import path_name
from onward.core.walk import producers
from onward.execute.loop.history import expect_metrics
from onward.execute.out import Out


def metrics_of(out: Out) -> dict[str, Any]:
    """The loss and every other single number that the traced function returned, by name."""
    found = numbers_of(out.results.loss, out.results.signature)
    return {name: out[v] for name, v in found.items() if name == "loss" or v.name in out.results.position}


def scalars_of(program: Program, values: Mapping[str, Any]) -> dict[str, float]:
    """The loss and every other single number that a traced function returned, from values by name."""
    found = numbers_of(program.loss, program.signature)
    return {n: float(values[v.name]) for n, v in found.items() if v.shape == () and v.name in values}


def numbers_of(loss: Variable | None, signature: Any) -> dict[str, Variable]:
    """Every number that is returned beside the loss, by name, and the loss."""
    found = {} if loss is None else {"loss": loss}
    if signature is not None and signature.has_aux:
        found |= {path or "aux": v for path, v in _aux(signature) if v.shape == ()}
    return found if loss is None else {**found, "loss": loss}


def expect_names(program: Program, is_tested: bool) -> None:
    """Raise ``ArgumentError`` where a number of a step has no place of its own in its history."""
    names = numbers_of(program.loss, program.signature)
    expect_metrics(names)
    expect_one_loss(program)
    expect_real(program, names)
    if is_tested and (twice := names.keys() & {f"test_{name}" for name in names}):
        name = min(twice)
        raise ArgumentError(
            f"A number that {program.name} returns is named {name!r}, as that of the test of "
            f"{name.removeprefix('test_')!r} is. Give it another name."
        )


def expect_one_loss(program: Program) -> None:
    """Raise ``ArgumentError`` where a number beside the loss has its name, and is not that number again."""
    has_aux = program.signature is not None and program.signature.has_aux
    beside = _aux(program.signature) if has_aux else []
    named = [v for path, v in beside if path == "loss" and v.shape == ()]
    if program.loss is None or not named:
        return
    makers, v = producers(program), named[0]
    while v is not program.loss:
        op = makers.get(v)
        if op is None or not op.primitive.keeps_places or len(op.inputs) != 1:
            raise ArgumentError(
                f"{program.name} returns a number beside the loss that is named 'loss', and is another one. "
                "Give it another name, such as 'cross_entropy'."
            )
        (v,) = op.inputs


def _aux(signature: Any) -> list[tuple[str, Variable]]:
    numbered = jax.tree.unflatten(signature.result.treedef, list(range(len(signature.result.leaves))))
    paths = jax.tree_util.tree_flatten_with_path(numbered[1])[0]
    pairs = [(path_name(path), signature.result.leaves[i]) for path, i in paths]
    return [(path, v) for path, v in pairs if isinstance(v, Variable)]


def expect_real(program: Program, numbers: Mapping[str, Variable]) -> None:
    """Raise ``ArgumentError`` for a number that is complex: a history holds real ones."""
    for name, v in numbers.items():
        if jnp.issubdtype(v.dtype, np.complexfloating):
            raise ArgumentError(
                f"{name!r}, which {program.name} returns, is {v.dtype}; expected a real number, as the "
                "history of steps and tests holds. Return jnp.abs(z) of it; or z.real and z.imag, each under "
                "a name of its own."
            )
