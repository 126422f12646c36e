"""``save``: a model, or a training step with its state, as one file that needs none of the user's code."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from os import PathLike
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import export

from onward.core.errors import ArgumentError, OnwardError
from onward.core.program import Program, Variable
from onward.core.show import short_type
from onward.core.source import user_level
from onward.core.structure import describe
from onward.core.transform import replayed
from onward.execute.checkpoint.encoding import encode
from onward.execute.feeds import data_names
from onward.execute.model import Model
from onward.execute.state import State
from onward.execute.step import Step
from onward.serve.export import container
from onward.serve.export.executable import Written, exported
from onward.serve.export.graph import described

FORMAT = 1
BATCH = "b"
GRAPH, EXECUTABLE, CONSTANT = "onward:graph:", "onward:executable:", "onward:constant:"
Shapes = Mapping[str, Sequence[int | str]]


def save(
    what: Model | Step,
    path: str | PathLike[str],
    state: State | None = None,
    *,
    batch: int | Iterable[int] | None = None,
    shapes: Shapes | None = None,
    license: str | None = None,  # noqa: A002
    about: Mapping[str, str] | None = None,
) -> Path:
    """Write a model to one file, from which it answers on a machine without the code that made it.

    The file holds the test Program as StableHLO (``jax.export``) and as a graph that can be printed, the
    parameters, names and shapes of what goes in and comes out, versions, and a checksum of every byte. It is
    a safetensors file without pickle, and appears whole or not at all. Of a compiled step it holds the
    training Program and its State, so that training goes on elsewhere: ``load_step``.

    Args:
        what: a Model, or a step that ``compile`` returned.
        path: the file, such as ``"trained.model"``.
        state: the State of a step; a Model has its own.
        batch: the lengths of batches that it shall take. None: any; a network that cannot be traced without
            knowing the length takes the one it was traced with, and 1, and a warning says so.
        shapes: for data with more free lengths than that of the batch, by name, its shape with names for what
            is free: ``{"tokens": ("b", "t")}``.
        license: under which license others may use the parameters, such as ``"Apache-2.0"``.
        about: further words, kept as they are.

    Raises:
        ArgumentError: neither a Model nor a step, a network that calls Python back, or a replicated step.
        ModelFileError: the file cannot be written.

    Example:
        >>> import tempfile, numpy as np, onward as ow
        >>> def network():
        ...     return ow.layer.fc(ow.data("x", (None, 4)), 2)
        >>> path = ow.save(ow.Model(network, seed=1), tempfile.mkdtemp() + "/trained.model")
        >>> evaluator = ow.Evaluator(ow.load(path))
        >>> evaluator.forward(x=np.ones((3, 4))).value.shape
        (3, 2)
    """
    program, values, kind = _taken(what, state)
    variants = _variants(program, batch, shapes)
    arrays = {v.name: encode(v.name, value) for v, value in values.items()}
    said = {
        "format": FORMAT,
        "kind": kind,
        "name": program.name,
        "onward": version("onward"),
        "jax": jax.__version__,
        "license": license,
        "about": _words(about or {}),
        "fetch": list(what.fetch) if isinstance(what, Step) else [],
        "inputs": [f"{v.name} {short_type(v)}" for v in variants[0].program.inputs],
        "outputs": [f"{v.name} {short_type(v)}" for v in variants[0].program.outputs],
        "arrays": {name: vars(form) for name, (form, _) in arrays.items()},
        "variants": [variant.said for variant in variants],
    }
    stored = {name: bits for name, (_, bits) in arrays.items()}
    for i, variant in enumerate(variants):
        stored |= variant.arrays(i, program)
    container.write(Path(path), said, stored)
    return Path(path)


@dataclass(frozen=True, eq=False)
class _Variant:
    """A Program on its way into the file, some of its lengths free."""

    program: Program
    sizes: Mapping[str, int]
    executable: Written

    @property
    def said(self) -> dict[str, Any]:
        """What the header says of it."""
        written = self.executable
        return {
            "sizes": dict(self.sizes),
            "platforms": list(written.platforms),
            "convention": written.convention,
            "constants": {v.name: vars(encode(v.name, x)[0]) for v, x in self.program.constants.items()},
        }

    def arrays(self, i: int, example: Program) -> dict[str, np.ndarray]:
        """Its graph, its executable and its constants as arrays."""
        graph = json.dumps(described(self.program, example), allow_nan=False).encode()
        constants = self.program.constants.items()
        return {
            f"{GRAPH}{i}": np.frombuffer(graph, np.uint8),
            f"{EXECUTABLE}{i}": np.frombuffer(self.executable.data, np.uint8),
            **{f"{CONSTANT}{i}:{v.name}": encode(v.name, x)[1] for v, x in constants},
        }


def _taken(what: Any, state: State | None) -> tuple[Program, dict[Variable, Any], str]:
    """The Program to save, the values of its state, and the word for what it is."""
    if isinstance(what, Model):
        if state is not None:
            raise ArgumentError("save was given a Model and a State; a Model has its own: save(model, path).")
        current = what.state
        return what.test_program, {v: current[v.name] for v in what.test_program.state}, "model"
    if not isinstance(what, Step):
        raise ArgumentError(
            f"save was given {describe(what)}; expected a Model, save(model, path), or a compiled step with "
            "its State, save(step, path, state)."
        )
    if not isinstance(state, State):
        raise ArgumentError(
            f"The State of a step is needed and {describe(state)} was given: save(step, path, state)."
        )
    if what.program.replicas is not None:
        raise ArgumentError(
            f"{what.program.name!r} is a Program for {what.program.replicas.count} devices, which a file "
            "cannot hold. Compile the Program as it was before replicate, and save that step with the State."
        )
    return what.program, {v: state[v.name] for v in what.program.state}, "training"


def _words(about: Mapping[str, str]) -> dict[str, str]:
    if wrong := [
        key for key, value in about.items() if not (isinstance(key, str) and isinstance(value, str))
    ]:
        raise ArgumentError(f"about={{...}} holds {wrong[0]!r}, which is no text; expected names and texts.")
    return dict(about)


def _variants(program: Program, batch: Any, shapes: Shapes | None) -> list[_Variant]:
    if batch is not None:
        return [_fixed(program, n) for n in _lengths(batch)]
    try:
        return [_free(program, shapes or {})]
    except (OnwardError, ValueError, TypeError, NotImplementedError) as error:
        if shapes:
            raise ArgumentError(f"{program.name!r} cannot be saved with these shapes: {error}") from error
        length = _batch_length(program)
        found = [_fixed(program, None)]
        if length not in (None, 1):
            found += _attempted(program, 1)
        if length is not None:
            _warn(program, [length, 1][: len(found)], error)
        return found


def _lengths(batch: Any) -> list[int]:
    found = [batch] if isinstance(batch, int) else list(batch)
    if not found or not all(type(n) is int and n > 0 for n in found):
        raise ArgumentError(f"batch={batch!r}; expected a length such as 1, or several, (1, 8, 64).")
    return list(dict.fromkeys(found))


def _warn(program: Program, lengths: list[int], error: Exception) -> None:
    said = " ".join(str(error).split())[:300]
    warnings.warn(
        f"{program.name!r} cannot be exported for a batch of any length; the file takes batches of "
        f"{' or '.join(map(str, lengths))}. save(..., batch=(1, 8, 64)) chooses. The reason: {said}",
        stacklevel=user_level(),
    )


def _attempted(program: Program, length: int) -> list[_Variant]:
    try:
        return [_fixed(program, length)]
    except OnwardError:
        return []


def _free(program: Program, shapes: Shapes) -> _Variant:
    """The Program with free lengths: that of the batch, and those that are named."""
    if not program.inputs:
        return _fixed(program, None)
    wanted = _wanted(program, shapes)
    names = sorted({n for shape in wanted.values() for n in shape if isinstance(n, str)})
    if not names:
        return _fixed(program, None)
    symbols: dict[Any, Any] = dict(zip(names, export.symbolic_shape(", ".join(names)), strict=True))
    whole = {name: tuple(symbols.get(n, n) for n in shape) for name, shape in wanted.items()}
    found = _replayed(program, whole)
    lengths = [pair for v in program.inputs for pair in zip(wanted[v.name], v.shape, strict=True)]
    return _variant(program, found, {n: size for n, size in lengths if isinstance(n, str)})


def _fixed(program: Program, length: int | None) -> _Variant:
    """The Program for batches of one length; None: the one that it has."""
    if length is None or length == _batch_length(program):
        return _variant(program, program, {})
    shapes = {
        name: tuple(length if n == BATCH else n for n in shape)
        for name, shape in _wanted(program, {}).items()
    }
    return _variant(program, _replayed(program, shapes), {})


def _variant(program: Program, found: Program, sizes: Mapping[str, int]) -> _Variant:
    if [v.name for v in found.state] != [v.name for v in program.state]:
        raise ArgumentError("another length of the batch gives it another state")
    return _Variant(found, sizes, exported(found, [v for op in found.ops for v in op.outputs]))


def _replayed(program: Program, shapes: Mapping[str, tuple[Any, ...]]) -> Program:
    assert program.signature is not None
    types = tuple(
        s.unflatten(jax.ShapeDtypeStruct(shapes[v.name], v.dtype) for v in s.variables)
        for s in program.signature.data
    )
    return replayed(program, types)


def _wanted(program: Program, shapes: Shapes) -> dict[str, tuple[int | str, ...]]:
    """The shape of each data Variable of the signature, free lengths by name."""
    assert program.signature is not None
    data = [v for s in program.signature.data for v in s.variables]
    known = {v.name: v for v in data}
    if unknown := sorted(shapes.keys() - known.keys()):
        raise ArgumentError(f"shapes= names {unknown[0]!r}; the data is {', '.join(known)}.")
    length, fixed = _batch_length(program), _fixed_data(program)

    def shape(v: Variable) -> tuple[int | str, ...]:
        if v.name in shapes:
            return _checked(v, tuple(shapes[v.name]))
        follows = v.shape[:1] == (length,) and v.name not in fixed
        return (BATCH, *v.shape[1:]) if follows else v.shape

    return {v.name: shape(v) for v in data}


def _checked(v: Variable, shape: tuple[int | str, ...]) -> tuple[int | str, ...]:
    fits = len(shape) == len(v.shape) and all(
        isinstance(n, str) or n == m for n, m in zip(shape, v.shape, strict=False)
    )
    if not fits or not all(n.isidentifier() for n in shape if isinstance(n, str)):
        raise ArgumentError(
            f"shapes= gives {v.name!r} the shape {shape}; it was traced as {v.type}. Give a name for each "
            'length that is free, and leave the others: ("b", 16).'
        )
    return shape


def _batch_length(program: Program) -> int | None:
    """How long the batch was when the Program was traced."""
    fixed = _fixed_data(program)
    lengths = (v.shape[0] for v in program.inputs if v.shape and v.name not in fixed and v.size)
    return next(lengths, None)


def _fixed_data(program: Program) -> frozenset[str]:
    declared = frozenset() if program.recipe is None else program.recipe.origin.fixed_data
    return declared & {*data_names(program)}
