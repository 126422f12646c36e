"""``load``: what a file of ``save`` holds, without the code that made it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from os import PathLike
from pathlib import Path
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from onward.core.errors import ArgumentError, LossError, ModelFileError
from onward.core.program import Program, Variable
from onward.core.structure import describe
from onward.core.whole import without_derivative
from onward.execute.disk.encoding import ArrayForm, decode
from onward.execute.disk.fields import take
from onward.execute.layout import Layout
from onward.execute.state import State
from onward.execute.step import Step
from onward.execute.tuning import Tuning
from onward.fit.model import Model
from onward.serve.export import container, executable
from onward.serve.export.container import EXPECTED, Contents, short
from onward.serve.export.finite import nonfinite
from onward.serve.export.graph import Template
from onward.serve.export.save import FORMAT
from onward.serve.export.variant import Loaded, Variant
from onward.serve.export.writing import CONSTANT, EXECUTABLE, GRAPH

_KINDS = {"model": "load(path)", "training": "load_step(path)"}


def load(path: str | PathLike[str], *, sha256: str | None = None, allow_nonfinite: bool = False) -> Model:
    """The Model that a file holds: an Evaluator runs it, and ``print(model.topology)`` shows it.

    Nothing of the file is executed but the arithmetic of the model. What cannot be done without the code of
    the network, such as deriving gradients, says so. ``model.about`` holds what the file says of itself.

    Damage is found, and no code of Python is in a file. Still, of a stranger's file give the SHA-256 that it
    must have: the reader of StableHLO that is part of JAX can be made to crash on purpose.

    Args:
        path: a file that ``save(model, path)`` wrote.
        sha256: what ``model.about["sha256"]`` must be.
        allow_nonfinite: load parameters that hold NaN or infinity as well.

    Raises:
        ModelFileError: no such file, a damaged or foreign one, or one that this version cannot read.

    Example:
        >>> import tempfile, onward as ow
        >>> def network():
        ...     return ow.layer.fc(ow.data("x", (None, 4)), 2, name="output")
        >>> path = ow.save(ow.Model(network, seed=1), tempfile.mkdtemp() + "/trained.model")
        >>> ow.load(path)
        Model('network', 2 parameters, 10 numbers)
    """
    file = _ModelFile(path, "model", sha256)
    program = file.program()
    named = {v.name: v for v in program.state}
    values = {named[name]: x for name, x in file.values(program).items()}
    file.expect_finite({v: x for v, x in values.items() if not allow_nonfinite})
    return Model.of(program, values, file.about)


def load_step(
    path: str | PathLike[str], *, sha256: str | None = None, allow_nonfinite: bool = False
) -> tuple[Step, State]:
    """The compiled step that a file holds, and its State, to go on training where it stood.

    Args:
        path: a file that ``save(step, path, state)`` wrote.
        sha256: the checksum that the file must have; see ``load``.
        allow_nonfinite: load parameters that hold NaN or infinity as well.

    Raises:
        ModelFileError: no such file, a damaged or foreign one, or one that this version cannot read.

    Example:
        >>> import tempfile, jax.numpy as jnp, onward as ow
        >>> w, x = jnp.zeros(2), jnp.ones((4, 2))
        >>> step = ow.compile(ow.SGD(0.5).minimize(lambda w, x: jnp.mean((w - x) ** 2), w, x))
        >>> path = ow.save(step, tempfile.mkdtemp() + "/half.model", step.init(w))
        >>> step, state = ow.load_step(path)             # elsewhere, without the loss function
        >>> state, out = step(state, jnp.array([[1.0, 2.0]]))
        >>> float(out.loss), state.parameters.tolist()
        (2.5, [0.5, 1.0])
    """
    file = _ModelFile(path, "training", sha256)
    program = file.program()
    values = file.values(program)
    file.expect_finite({v: values[v.name] for v in program.parameters if not allow_nonfinite})
    fetch = tuple(map(str, take(file.said, "fetch", list)))
    step = Step(program, fetch, donate=True, tuning=Tuning(False, False))
    return step, State(step.layout, [values[v.name] for v in Layout.of(program).variables])


class _ModelFile:
    """A model file that was read whole: what it says, checked as it is taken."""

    def __init__(self, given: Any, kind: str, sha256: str | None) -> None:
        if not isinstance(given, str | PathLike):
            raise ArgumentError(
                f"{_KINDS[kind]} was given {describe(given)}; expected the path of a file that "
                "onward.save wrote."
            )
        path = Path(given)
        self.path = path
        self.contents: Contents = container.read(path)
        if sha256 is not None and sha256.lower() != self.contents.sha256:
            raise ModelFileError(
                f"{path} is whole, and not the file that was asked for: its SHA-256 is "
                f"{self.contents.sha256}; expected {sha256[:80]}."
            )
        self.said = self.contents.about
        with _Explaining(path):
            self._expect(kind)

    def _expect(self, kind: str) -> None:
        """Raise ``ModelFileError`` unless it is of this kind, and written by no later Onward."""
        written, here = take(self.said, "onward", str), version("onward")
        found_format = take(self.said, "format", int)
        if found_format > FORMAT or _major(written) > _major(here):
            raise ModelFileError(
                f"{self.path} was written by Onward {written[:20]} (format {found_format}); this is Onward "
                f"{here}, which reads files up to its own major version and format {FORMAT}. Update Onward: "
                "pip install -U onward"
            )
        take(self.said, "name", str), take(self.said, "jax", str)
        if (found := take(self.said, "kind", str)) != kind:
            how = _KINDS.get(found)
            holds = f"holds a {found} Program: {how}" if how else f"holds {found[:40]!r}"
            raise ModelFileError(f"{self.path} {holds}, not {_KINDS[kind]}.")

    @property
    def about(self) -> dict[str, Any]:
        """The description that the file has of itself, for people."""
        fields = ("name", "onward", "jax", "license", "about", "inputs", "outputs")
        found = {field: self.said.get(field) for field in fields}
        return {"path": str(self.path), "sha256": self.contents.sha256, **found}

    def expect_finite(self, values: Mapping[Variable, Any]) -> None:
        """Raise ``ModelFileError`` where these are not numbers that a model can answer with."""
        if found := nonfinite(values):
            raise ModelFileError(f"{self.path}: {found} allow_nonfinite=True loads it all the same.")

    def program(self) -> Program:
        """The Program as it was saved."""
        with _Explaining(self.path):
            variants, learning = take(self.said, "variants", list), self.said.get("learning", [])
            if not variants:
                raise ValueError("it holds no Program")
            found = tuple(self._variant(i, said) for i, said in enumerate([*variants, *learning]))
            fixed = frozenset(map(str, take(self.said, "fixed", list)))
            as_saved, as_trained = found[: len(variants)], found[len(variants) :]
            origin = Loaded(as_saved, take(self.said, "kind", str) == "training", fixed)
            return (Loaded(as_trained, True, fixed, origin) if as_trained else origin).program()

    def values(self, program: Program) -> dict[str, Any]:
        """The state by name."""
        with _Explaining(self.path):
            forms = take(self.said, "arrays", dict)
            found = {v.name: self._array(v.name, forms[v.name]) for v in program.state}
            for v in program.state:
                self._expect_type(v.name, found[v.name], v.shape, v.dtype)
            return found

    def _variant(self, i: int, said: Mapping[str, Any]) -> Variant:
        record = json.loads(self._bytes(f"{GRAPH}{i}"))
        sizes = {str(name): int(size) for name, size in take(said, "sizes", dict).items()}
        forms = take(said, "constants", dict)
        constants = {name: self._array(f"{CONSTANT}{i}:{name}", form) for name, form in forms.items()}
        template = Template(record)
        call, lacks = self._call(i, said, template, sizes)
        return Variant(template, sizes, call, constants, str(self.path), lacks)

    def _call(
        self, i: int, said: Mapping[str, Any], template: Template, sizes: Mapping[str, int]
    ) -> tuple[Callable[..., Sequence[Any]], str]:
        """The function of a variant, and why it has no derivative.

        If JAX has moved on too far, the function raises a ``ModelFileError`` that says so.
        """
        convention = take(said, "convention", int)
        first = export.minimum_supported_calling_convention_version
        last = export.maximum_supported_calling_convention_version
        if not first <= convention <= last:
            return self._unread(f"it runs versions {first} to {last}, and this has {convention}")
        try:
            found = executable.loaded(self._bytes(f"{EXECUTABLE}{i}"), str(self.path))
        except ModelFileError as error:
            if error.__cause__ is None or not _is_later(take(self.said, "jax", str)):
                raise
            return self._unread(" ".join(str(error.__cause__).split())[:200])
        if (found.takes, found.gives) != template.types:
            raise ValueError("its graph and its executable are not of one Program")
        executable.expect_lowered(found, template.program(sizes))
        if found.derivable:
            return found.call, ""
        lacks = _lacks(self.said)
        return _underived(found.call, without_derivative(str(self.path), lacks)), lacks

    def _unread(self, reason: str) -> tuple[Callable[..., Sequence[Any]], str]:
        return partial(self._too_far, reason), reason

    def _too_far(self, reason: str, *values: Any) -> NoReturn:
        raise ModelFileError(
            f"{self.path} was written with JAX {self.said.get('jax')}, and JAX {jax.__version__} does not "
            f"run it: {reason}. Parameters and graph are all here (model.parameters, print(model.topology)). "
            "Use the JAX that wrote it, or give the parameters to the code of the network and save again."
        )

    def _array(self, name: str, record: Mapping[str, Any]) -> Any:
        """An array of the file in its own dtype."""
        shape, generator = tuple(take(record, "shape", list)), record.get("generator")
        form = ArrayForm(take(record, "dtype", str), shape, generator)
        stored: np.ndarray = self.contents.arrays[name]
        if (stored.dtype, stored.shape) != (form.stored_dtype, form.stored_shape):
            raise ValueError(f"{name[:60]!r} is not stored as it is described")
        return jnp.array(decode(form, stored))

    def _expect_type(self, name: str, value: Any, shape: tuple[int, ...], dtype: Any) -> None:
        if value.shape == shape and value.dtype == dtype:
            return
        if dtype in (np.float64, np.int64, np.uint64, np.complex128):
            raise ModelFileError(
                f"{self.path} holds {name!r} in {dtype}, which JAX takes only where it is told so: "
                'jax.config.update("jax_enable_x64", True), before load.'
            )
        raise ValueError(f"{name[:60]!r} is {value.dtype}{list(value.shape)} and not what the graph says")

    def _bytes(self, name: str) -> bytes:
        return self.contents.arrays[name].tobytes()


class _Explaining:
    """Turns whatever is wrong with what a file says into a ``ModelFileError`` that names the file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, ModelFileError) or not isinstance(error, Exception):
            return
        raise ModelFileError(
            f"{self.path} is sealed, and says what no Onward writes: {short(error)}. {EXPECTED}"
        ) from error


def _lacks(said: Mapping[str, Any]) -> str:
    """Why a file without a derivative has none."""
    if said.get("kind") == "training":
        return "it is a training step, which has its gradients already: load_step(path)"
    return "it was saved without trainable=True" if "learning" in said else "older files have none"


def _underived(call: Callable[..., Sequence[Any]], sentence: str) -> Callable[..., Sequence[Any]]:
    """The same function, which says this when it is differentiated."""

    def refuse(*values: Any) -> NoReturn:
        raise LossError(sentence)

    found = jax.custom_vjp(call)
    found.defvjp(refuse, refuse)
    return found


def _is_later(written: str) -> bool:
    """Whether a version of JAX is later than the one that runs."""
    numbers = re.findall(r"\d{1,6}", written)[:3], re.findall(r"\d{1,6}", jax.__version__)[:3]
    found, here = (tuple(map(int, version)) for version in numbers)
    return found > here


def _major(written: str) -> int:
    head = written.partition(".")[0]
    if not head.isdecimal() or len(head) > 6:
        raise ValueError(f"{written[:20]!r} is not a version")
    return int(head)
