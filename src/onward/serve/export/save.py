"""``save``: a model, or a training step with its state, as one file that needs none of the user's code."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from os import PathLike
from pathlib import Path
from typing import Any

import jax

from onward.core.errors import ArgumentError, NonFiniteError
from onward.core.meshes import expect_no_partition
from onward.core.program import Program, Variable
from onward.core.show import short_type
from onward.core.structure import describe, expect_flag
from onward.core.words import Kind
from onward.distribute.pipeline.cut import Pipeline
from onward.execute.disk.encoding import encode
from onward.execute.pipelined import PipelineStep
from onward.execute.state import State
from onward.execute.step import Step
from onward.execute.tuning import Tuning
from onward.fit.model import Model
from onward.serve.export import container
from onward.serve.export.agreement import are_alike
from onward.serve.export.batches import Shapes, fixed_data, writings
from onward.serve.export.finite import nonfinite
from onward.serve.export.of_state import values_of
from onward.serve.export.writing import Writing

FORMAT = 1


def save(
    what: Model | Step | Program,
    path: str | PathLike[str],
    state: State | None = None,
    *,
    batch: int | Iterable[int] | None = None,
    shapes: Shapes | None = None,
    trainable: bool = False,
    allow_nonfinite: bool = False,
    license: str | None = None,  # noqa: A002
    about: Mapping[str, str] | None = None,
) -> Path:
    """Write a model to one file, from which it answers on a machine without the code that made it.

    The file holds the test Program as StableHLO (``jax.export``) and as a graph that can be printed, the
    parameters, names and shapes of what goes in and comes out, versions, and a checksum of every byte. It is
    a safetensors file without pickle, and appears whole or not at all. Of a compiled step it holds the
    training Program and its State, so that training goes on elsewhere: ``load_step``.

    Args:
        what: a Model, or a step that ``compile`` returned; or a Program, forward or training.
        path: the file, such as ``"trained.model"``.
        state: the State of a step or a Program; a Model has its own. It may be that of the same training on
            several devices, whose parts are put together; of parameters of which each device has its own, the
            mean.
        batch: the lengths of batches that it should take. None: any; a network that cannot be traced without
            knowing the length takes the one it was traced with, and 1 where it answers and does not train,
            and a warning says so.
        shapes: for data with more free lengths than that of the batch, by name, its shape with names for what
            is free: ``{"tokens": ("b", "t")}``.
        trainable: write what ``minimize`` needs as well: the derivative, and the network as it is trained
            where that is otherwise (dropout, statistics). What computes becomes about six times as large, and
            takes two to six times as long to write; parameters are there once. A step needs none of it.
        allow_nonfinite: save parameters that hold NaN or infinity as well. Constants may, as masks do.
        license: under which license others may use the parameters, such as ``"Apache-2.0"``.
        about: further words, kept as they are.

    Raises:
        ArgumentError: neither a Model nor a step, a network that calls Python back, or a replicated step;
            the State of another Program; with ``trainable``, a network without a derivative.
        NonFiniteError: a parameter holds NaN or infinity, or the state of the network NaN.
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
    if not isinstance(path, str | PathLike) or not os.fspath(path):
        raise ArgumentError(f'save was given the path {path!r}; expected a file, such as "trained.model".')
    file = Path(path)
    expect_flag(trainable, "save: trainable")
    if isinstance(what, Program):
        what, state = _of_program(what, state)
    program, values, kind = _taken(what, state, trainable)
    if not allow_nonfinite and (found := nonfinite(_trained(values, kind))):
        raise NonFiniteError(
            f"{found} Nothing was saved: restore a checkpoint from before. save(..., allow_nonfinite=True) "
            "saves it all the same."
        )
    named = {v.name: x for v, x in values.items()}
    parts = writings(program, named, batch, shapes, trainable and kind == "model")
    learning = _learning(what, program, named, batch, shapes) if trainable else []
    arrays = {v.name: encode(v.name, value) for v, value in values.items()}
    said = {
        "format": FORMAT,
        "kind": kind,
        "name": program.name,
        "onward": version("onward"),
        "jax": jax.__version__,
        "license": _license(license),
        "about": _words(about or {}),
        "fetch": list(what.fetch) if isinstance(what, Step) else [],
        "inputs": [f"{v.name} {short_type(v)}" for v in parts[0].program.inputs],
        "outputs": [f"{v.name} {short_type(v)}" for v in parts[0].program.outputs],
        "fixed": sorted(fixed_data(program)),
        "arrays": {name: vars(form) for name, (form, _) in arrays.items()},
        "variants": [part.said for part in parts],
        "learning": [part.said for part in learning],
    }
    _expect_free(arrays)
    stored = {name: bits for name, (_, bits) in arrays.items()}
    for i, part in enumerate([*parts, *learning]):
        stored |= part.arrays(i, program)
    container.write(file, said, stored)
    return file


def _taken(what: Any, state: State | None, trainable: bool) -> tuple[Program, dict[Variable, Any], str]:
    """The Program to save, the values of its state, and the word for what it is."""
    if isinstance(what, Model):
        if state is not None:
            raise ArgumentError("save was given a Model and a State; a Model has its own: save(model, path).")
        what.warn_of_training()
        what.warn_of_apart()
        current = what.state
        more = what.topology.state if trainable else ()
        kept = {v.name: v for v in (*what.test_program.state, *more)}
        return what.test_program, {v: current[name] for name, v in kept.items()}, "model"
    if isinstance(what, Pipeline | PipelineStep):
        cut = "pipeline" if isinstance(what, Pipeline) else "step.pipeline"
        raise ArgumentError(
            f"save was given a {type(what).__name__}, which is many Programs, and a file holds one. Save the "
            f"one that was cut, with the State of the stages: save({cut}.program, path, state)."
        )
    if not isinstance(what, Step):
        hint = "Its model: save(trainer.model, path). " * hasattr(what, "model")
        raise ArgumentError(
            f"{hint}save was given {describe(what)}; expected a Model, save(model, path), or a compiled step "
            "with its State, save(step, path, state). A function becomes a Model with its parameters: "
            "Model(trace(function, params, x), params)."
        )
    if not isinstance(state, State):
        raise ArgumentError(
            f"The State of a step is needed and {describe(state)} was given: save(step, path, state)."
        )
    instead = "Compile the Program as it was before partition, and save that step with the State."
    expect_no_partition(what.program, "save", instead)
    if what.program.replicas is not None:
        raise ArgumentError(
            f"{what.program.name!r} is a Program for {what.program.replicas.count} devices, which a file "
            "cannot hold. Compile the Program as it was before replicate, and save that step with the State."
        )
    return what.program, values_of(what.program, state), "training"


def _trained(values: Mapping[Variable, Any], kind: str) -> Mapping[Variable, Any]:
    """The values that have to be finite: of a step the parameters, since slots may hold anything."""
    return {v: x for v, x in values.items() if kind == "model" or v.kind is Kind.PARAMETER}


def _of_program(program: Program, state: State | None) -> tuple[Model | Step, State | None]:
    """A Program as what can be saved: a forward one as a Model, a training one as a step."""
    if not isinstance(state, State):
        raise ArgumentError(
            f"A Program holds no values, and {describe(state)} was given as its State: "
            "save(program, path, state), with the State that step.init(params) or a step returned."
        )
    if program.updates:
        return Step(program, (), donate=True, tuning=Tuning(False, False)), state
    return Model.of(program, values_of(program, state), {}), None


def _learning(
    what: Model | Step, program: Program, values: Mapping[str, Any], batch: Any, shapes: Shapes | None
) -> list[Writing]:
    """The network as it is trained, where that is otherwise than it answers."""
    if not isinstance(what, Model) or are_alike(what.topology, program):
        return []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that lengths are fixed was said of the test Program
        return writings(what.topology, values, batch, shapes, trainable=True)


def _license(word: str | None) -> str | None:
    if not isinstance(word, str | None):
        raise ArgumentError(f'license={word!r} is not text; expected a name such as "Apache-2.0".')
    return word


def _expect_free(names: Iterable[str]) -> None:
    """Raise ``ArgumentError`` for a name that something else in the file has."""
    if taken := [name for name in names if name.startswith(container.OURS) or name == "__metadata__"]:
        raise ArgumentError(f"A file cannot hold a Variable named {taken[0]!r}: rename it.")


def _words(about: Mapping[str, str]) -> dict[str, str]:
    if wrong := [
        key for key, value in about.items() if not (isinstance(key, str) and isinstance(value, str))
    ]:
        raise ArgumentError(f"about={{...}} holds {wrong[0]!r}, which is not text; expected names and texts.")
    return dict(about)
