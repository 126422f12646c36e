"""The part of a model file that computes: a Program as StableHLO, written and read by ``jax.export``.

It takes state, data and constants as one flat list and gives every Variable that the Program computes; what
is not asked for is left out when it is compiled, so that asking for one activation costs what it costs.

StableHLO can call functions of the process that runs it (custom calls). A file is not run if it calls others
than those that JAX itself emits for its primitives.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax import export

from onward.core.errors import ArgumentError, ModelFileError
from onward.core.extras import require
from onward.core.lower import lower
from onward.core.program import Program, Variable
from onward.serve.export.dimensions import written
from onward.serve.export.kinds import name_of

Type = jax.ShapeDtypeStruct
PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
_CALL = re.compile(r"custom_call\s*@(?:\"([^\"]*)\"|([\w.$-]+))")
_HARMLESS = re.compile(
    r"shape_assertion|Sharding|SPMDFullToShardShape|SPMDShardToFullShape|annotate_device_placement"
    r"|lapack_\w+|(?:cu|hip)(?:solver|blas|sparse)?_\w+"
    r"|LuDecomposition|Eigh|Qr|ProductOfElementaryHouseholderReflectors|ApproxTopK"
    r"|stablehlo\.dynamic_\w+"
)


@dataclass(frozen=True)
class Written:
    """An executable as bytes, and for which platforms it is."""

    data: bytes
    platforms: tuple[str, ...]
    convention: int


def exported(program: Program, gives: Sequence[Variable], derivable: bool) -> Written:
    """The executable of a Program, for all platforms if JAX can lower it for all.

    Args:
        program: the Program.
        gives: what it computes.
        derivable: write its derivative as well.

    Raises:
        ArgumentError: it cannot be exported at all; the message holds what JAX says.
    """
    require("flatbuffers", "serve")
    reads = reads_of(program)
    state = (*program.state, *program.constants)  # constants as well are arrays of the file, not of the code
    run = lower(replace(program, state=state, constants={}), gives, at_once=True)

    def function(*values: Any) -> list[Any]:
        return run(values[: len(state)], values[len(state) :])

    types = [v.aval for v in reads]
    try:
        return _written(function, types, PLATFORMS, derivable)
    except Exception as first:
        try:
            return _written(function, types, (jax.default_backend(),), derivable)
        except Exception:
            raise ArgumentError(_reason(program, first)) from first


def reads_of(program: Program) -> tuple[Variable, ...]:
    """The Variables that the executable of a Program takes, in order."""
    return (*program.state, *program.constants, *program.inputs)


def _written(
    function: Callable[..., Any], types: Sequence[Type], platforms: Sequence[str], derivable: bool
) -> Written:
    found = export.export(jax.jit(function), platforms=platforms)(*types)
    if foreign := foreign_in(found.mlir_module()):
        raise ValueError(f"it calls {foreign[0]!r}, a kernel, which load would refuse to run")
    data = bytes(found.serialize(vjp_order=int(derivable)))
    if derivable and (foreign := foreign_in(_derivative_of(data))):
        raise ValueError(f"its derivative calls {foreign[0]!r}, a kernel, which load would refuse to run")
    return Written(data, tuple(found.platforms), found.calling_convention_version)


def _derivative_of(data: bytes) -> str:
    """The derivative as it is written: to ask for it before is to derive it twice."""
    text: str = export.deserialize(bytearray(data)).vjp().mlir_module()
    return text


def _reason(program: Program, error: Exception) -> str:
    said = " ".join(str(error).split())[:300]
    effects = [op for op in program.ops if op.body.has_effects or "callback" in " ".join(op.body.primitives)]
    if effects:
        (op, *_) = effects
        return (
            f"{program.name!r} cannot be exported: {op.type!r}{op.at} calls Python while it runs, which no "
            "file can hold. Take the print or the callback out of the network."
        )
    variables = program.variables.values() if isinstance(error, KeyError) else ()
    if unknown := next((v for v in variables if v.dtype in error.args), None):
        return (
            f"{program.name!r} cannot be exported: {unknown.name!r} is {unknown.dtype}, which jax.export of "
            f"JAX {jax.__version__} does not write. Keep it in another dtype, such as int8; ow.Checkpoints "
            "takes it as it is."
        )
    return f"{program.name!r} cannot be exported: {said}"


@dataclass(frozen=True)
class ExportedFunction:
    """The function of an executable, and the types that it takes and gives, free lengths as text."""

    call: Callable[..., Sequence[Any]]
    takes: tuple[str, ...]
    gives: tuple[str, ...]
    derivable: bool
    platforms: tuple[str, ...]


def loaded(data: bytes, what: str) -> ExportedFunction:
    """An executable that can be called.

    Raises:
        ModelFileError: no executable, or one that calls what it must not.
    """
    require("flatbuffers", "serve")
    try:
        found = export.deserialize(bytearray(data))
        text = found.mlir_module()
        derivative = found.vjp().mlir_module() if found.has_vjp() else ""
    except Exception as error:
        raise ModelFileError(
            f"{what}: its executable is not one that jax.export of JAX {jax.__version__} reads "
            f"({type(error).__name__}: {' '.join(str(error).split())[:200]})."
        ) from error
    if foreign := foreign_in(text) or foreign_in(derivative):
        raise ModelFileError(
            f"{what}: its executable calls {foreign[0][:60]!r} in the process that runs it, which no model "
            "needs. It is not run."
        )
    takes, gives = (tuple(map(_type, avals)) for avals in (found.in_avals, found.out_avals))
    return ExportedFunction(found.call, takes, gives, found.has_vjp(), tuple(found.platforms))


def expect_lowered(found: ExportedFunction, program: Program) -> None:
    """Raise ``ValueError`` for an executable that XLA does not take, where this machine could run it."""
    wide = {v.dtype for v in reads_of(program) if v.dtype in (np.float64, np.int64, np.uint64, np.complex128)}
    settings: Any = jax.config
    if jax.default_backend() not in found.platforms or (wide and not settings.jax_enable_x64):
        return
    try:
        jax.jit(found.call).lower(*(v.aval for v in reads_of(program)))
    except Exception as error:
        said = " ".join(str(error).split())[:200]
        raise ValueError(f"its executable is none that XLA takes ({said})") from error


def _type(aval: Any) -> str:
    return type_text(name_of(aval.dtype), list(map(written, aval.shape)))


def type_text(dtype: str, shape: Sequence[int | str]) -> str:
    """A type whose lengths may be free.

    >>> type_text("float32", ["b", 10])
    'float32[b, 10]'
    """
    return f"{dtype}[{', '.join(map(str, shape))}]"


def foreign_in(text: str) -> list[str]:
    """The functions that a module calls and that JAX does not emit for its own primitives."""
    return sorted(call for call in calls_in(text) if not _HARMLESS.fullmatch(call))


def calls_in(text: str) -> set[str]:
    """The functions outside of a StableHLO module, given as text, that it calls.

    >>> sorted(calls_in('%0 = stablehlo.custom_call @Sharding(%1) %2 = stablehlo.custom_call @"a b"(%1)'))
    ['Sharding', 'a b']
    """
    found = [quoted or plain for quoted, plain in _CALL.findall(text)]
    unread = text.count("custom_call") - len(found)
    return {*found, *(["a function without a readable name"] if unread > 0 else [])}
