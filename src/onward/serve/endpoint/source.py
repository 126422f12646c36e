"""Where the model of an endpoint comes from: an object of this process, or a file."""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike
from pathlib import Path

from onward.core.errors import ArgumentError, NonFiniteError
from onward.core.structure import describe
from onward.fit.model import Model
from onward.serve.endpoint.watch import Mark, mark_of
from onward.serve.export.finite import nonfinite
from onward.serve.export.load import load

Source = Model | str | PathLike[str]


@dataclass(frozen=True)
class OpenedModel:
    """A model with what tells one version of it from another.

    Attributes:
        model: what computes.
        version: the beginning of the file's SHA-256; ``memory`` for a model of this process.
        path: the file; None for a model of this process.
        mark: of the file, from before it was read.
    """

    model: Model
    version: str = "memory"
    path: Path | None = None
    mark: Mark | None = None


def opened(source: Source, allow_nonfinite: bool = False) -> OpenedModel:
    """The model itself, or the one in a file.

    Raises:
        ArgumentError: something else was given.
        ModelFileError: the file holds no model, or one with NaN or infinity for parameters.
        NonFiniteError: the parameters of the model hold NaN or infinity.
    """
    if isinstance(source, Model):
        source.warn_of_training()
        values = {v: source.state[v] for v in source.test_program.state}
        if not allow_nonfinite and (found := nonfinite(values)):
            raise NonFiniteError(f"{found} Every answer would hold it; allow_nonfinite=True serves it.")
        return OpenedModel(source)
    if not isinstance(source, str | PathLike):
        raise ArgumentError(
            f"Endpoint was given {describe(source)}; expected a Model, or a path that ow.save wrote to."
        )
    path = Path(source)
    mark = mark_of(path)
    model = load(path, allow_nonfinite=allow_nonfinite)
    return OpenedModel(model, str(model.about["sha256"])[:16], path, mark)
