"""Parameters in safetensors files, as Hugging Face keeps them: under other names, with other axes.

A checkpoint (``execute/checkpoint``) is what Onward writes for itself. Here a table of names says what an
array of someone else's file is called, and every array has to find its place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from onward.core.errors import ArgumentError, CheckpointError, nearest
from onward.core.structure import describe, path_name
from onward.core.variable import holds_keys, limits_of
from onward.core.words import some
from onward.define.arguments import Type, type_of
from onward.execute.disk.durable import appearing, make_folder, sync
from onward.execute.disk.encoding import DTYPES
from onward.execute.disk.tensors import CODES, METADATA, entries_of, head_of, packed, spans, write
from onward.execute.exchange.names import Axes, NameTable
from onward.execute.state import State

FilePath = str | PathLike[str]
EXCHANGED: Mapping[str, str] = {
    **CODES,
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
"""The code of each dtype in a file that others read; a checkpoint keeps the rare ones as plain bits."""
MOST = 40  # lines of what does not fit, in one error
_DTYPES = {code: DTYPES[name] for name, code in EXCHANGED.items()}


@dataclass(frozen=True)
class StoredArray:
    """An array in a file: under what name, of what type, and its bytes, which are not read yet."""

    file: Path
    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    data: np.ndarray

    def read(self, axes: Axes) -> np.ndarray:
        """The numbers, with the axes in this order."""
        return turned(self.data.view(self.dtype).reshape(self.shape), axes)

    def type(self, axes: Axes) -> str:
        """Dtype and shape with the axes in this order, and as it is in the file where that differs."""
        if axes is None:
            return f"{self.dtype}{list(self.shape)}"
        return f"{self.dtype}{list(_moved(self.shape, axes))} ({list(self.shape)} in the file)"


@dataclass
class Fitting:
    """Which array of the files goes where, and what is wrong with the rest."""

    chosen: dict[str, tuple[StoredArray, Axes]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def told(self) -> str:
        """The problems, a line each, as many as anybody reads."""
        more = len(self.problems) - MOST
        rest = [f"and {more} more"] if more > 0 else []
        return "".join(f"\n  {line}" for line in [*self.problems[:MOST], *rest])


def load_safetensors(
    files: FilePath | Sequence[FilePath],
    like: Any,
    names: Mapping[str, Any] | None = None,
    *,
    cast: bool = False,
) -> Any:
    """Read parameters from safetensors files, by a table from their names to those of your tree.

    Nothing is filled in silence: each array of the tree has to be in the files and each array of the files in
    the tree, with the same shape. A dtype that holds every number of the file's, as float32 those of
    bfloat16, is taken. Only a square matrix fits both ways: whether to transpose it, the table has to know.

    Args:
        files: a file, several (the shards of one model), or a folder, whose ``*.safetensors`` are read.
        like: a tree of arrays, or of ``jax.ShapeDtypeStruct``: its shapes and dtypes are expected, its
            containers are returned. Leaves that are not arrays of numbers stay as they are. The name of an
            array is its path, ``"layers/0/w"``, as a Program names it.
        names: a row for each name in the files that is another here: ``"wte.weight": "embedding"``.
            ``{word}`` stands for one part of a name: ``"h.{n}.fc.weight": "layers/{n}/w"``. A pair
            transposes, ``("layers/{n}/w", (1, 0))``, by the axes of ``numpy.transpose``. None leaves an
            array out.
        cast: round floating point numbers to a narrower dtype of ``like``.

    Returns:
        The tree with arrays of JAX.

    Raises:
        CheckpointError: not a safetensors file; arrays missing, not in the tree, of another shape or dtype:
            all of them in one message; numbers that ``cast`` would make infinite.
        ArgumentError: a table or a tree of another form.

    Example:
        >>> import tempfile, jax, jax.numpy as jnp, onward as ow
        >>> path = tempfile.mkdtemp() + "/model.safetensors"
        >>> names = {"h.{n}.weight": ("layers/{n}/w", (1, 0))}
        >>> params = {"layers": [{"w": jnp.ones((4, 2), jnp.bfloat16)}]}
        >>> ow.save_safetensors(path, params, names)
        >>> loaded = ow.load_safetensors(path, params, names)
        >>> loaded["layers"][0]["w"].shape
        (4, 2)

    Source: the safetensors format, https://github.com/huggingface/safetensors.
    """
    table = NameTable(names)
    paths, leaves, treedef = _places(like, "load_safetensors: like")
    types = zip(paths, map(_numbers, leaves), strict=True)
    expected = {path: kind for path, kind in types if kind is not None}
    stored = [array for file in _files(files) for array in _stored(file)]
    fitting = _fitting(stored, expected, table, cast)
    if fitting.problems:
        raise CheckpointError(f"The files do not fit:{fitting.told()}")
    values = {path: _held(array, axes, expected[path]) for path, (array, axes) in fitting.chosen.items()}
    return jax.tree.unflatten(treedef, [values.get(p, x) for p, x in zip(paths, leaves, strict=True)])


def save_safetensors(
    path: FilePath,
    parameters: Any,
    names: Mapping[str, Any] | None = None,
    *,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write the arrays of a tree to one safetensors file, by the table that ``load_safetensors`` reads with.

    The file is there whole or not at all; one that was there is replaced.

    Args:
        path: the file.
        parameters: a tree of arrays of numbers, of any dtype that safetensors knows, bfloat16 included.
        names: from the names in the file to the paths of the tree, as for ``load_safetensors``.
        metadata: what the file says of itself; ``{"format": "pt"}`` unless given, which the transformers
            library asks for.

    Raises:
        ArgumentError: a leaf that is not an array of numbers, two arrays of one name, a table of another
            form, metadata that is not text.
        CheckpointError: the file cannot be written.

    Example:
        >>> import tempfile, jax.numpy as jnp, onward as ow
        >>> from safetensors.numpy import load_file
        >>> path = tempfile.mkdtemp() + "/model.safetensors"
        >>> names = {"lm_head.weight": ("head/w", (1, 0))}
        >>> ow.save_safetensors(path, {"head": {"w": jnp.ones((4, 2))}}, names)
        >>> load_file(path)["lm_head.weight"].shape
        (2, 4)
    """
    paths, leaves, _ = _places(parameters, "save_safetensors: parameters")
    table, arrays = NameTable(names), {}
    for place, leaf in zip(paths, leaves, strict=True):
        name, axes = table.there(place)
        if name in arrays or name == METADATA:
            raise ArgumentError(f"save_safetensors: {name!r} would be the name of {place!r} and of another.")
        arrays[name] = _written(place, leaf, axes)
    about = metadata or {"format": "pt"}
    if not isinstance(about, Mapping) or not all(isinstance(x, str) for x in (*about, *about.values())):
        raise ArgumentError(
            f"save_safetensors: metadata is {metadata!r}; expected texts by name, {{'step': '300'}}; "
            "no library reads a file with others."
        )
    final = Path(path).absolute()
    head, pieces = packed(arrays, about, EXCHANGED)
    try:
        make_folder(final.parent)
        with appearing(final) as part:
            write(part, head, pieces)
        sync(final.parent)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {error}.") from error


def _places(tree: Any, what: str) -> tuple[list[str], list[Any], Any]:
    """The paths and leaves of a tree; raises ``ArgumentError`` where two paths are one name."""
    if isinstance(tree, State):
        raise ArgumentError(f"{what} is a State; pass its parameters, state.parameters.")
    found, treedef = jax.tree_util.tree_flatten_with_path(tree)
    paths = [path_name(path) for path, _ in found]
    if twice := sorted(path for path, count in Counter(paths).items() if count > 1):
        raise ArgumentError(f"{what}: {some(twice, 6)} stands for two places of the tree; rename one.")
    return paths, [leaf for _, leaf in found], treedef


def _numbers(leaf: Any) -> Type | None:
    """The type of a leaf that is an array of numbers."""
    found = type_of(leaf, numbers=False)
    if found is None or holds_keys(found.dtype):
        return None
    dtype = jax.dtypes.canonicalize_dtype(found.dtype)  # float64 is not there without x64
    return Type(found.shape, dtype.newbyteorder("="))


def _files(given: FilePath | Sequence[FilePath]) -> list[Path]:
    listed = [given] if isinstance(given, str | PathLike) else list(given)
    files = [file for path in map(Path, listed) for file in _within(path)]
    if not files:
        raise CheckpointError(f"{some([*map(str, listed)], 6)}: there is no *.safetensors file.")
    return files


def _within(path: Path) -> Iterable[Path]:
    return sorted(path.glob("*.safetensors")) if path.is_dir() else [path]


def _stored(file: Path) -> Iterator[StoredArray]:
    """The arrays of a file; the library judges whether its head is possible."""
    try:
        with safe_open(file, framework="np"):
            data = np.memmap(file, np.uint8, mode="r")
        entries = entries_of(head_of(memoryview(data)))
        for name, start, end in spans(memoryview(data)):
            entry = entries[name]
            if entry["dtype"] not in _DTYPES:
                raise ValueError(f"{name!r} is of dtype {entry['dtype']}, which JAX has not")
            yield StoredArray(file, name, _DTYPES[entry["dtype"]], tuple(entry["shape"]), data[start:end])
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"{file} cannot be read as safetensors: {error}.") from error


def _fitting(
    stored: Sequence[StoredArray], expected: Mapping[str, Type], table: NameTable, cast: bool
) -> Fitting:
    """Find the place of each array, and all that does not fit."""
    fitting = Fitting()
    for array in stored:
        if (place := table.here(array.name)) is None:
            continue
        here, axes = place
        if here not in expected:
            among = expected if len(fitting.problems) < MOST else ()  # to compare names takes long
            fitting.problems.append(_surplus(array, here, among))
        elif here in fitting.chosen:
            first = fitting.chosen[here][0]
            fitting.problems.append(
                f"{array.name!r} ({array.file.name}) and {first.name!r} ({first.file.name}) would both be "
                f"{here!r}; None in names leaves one out"
            )
        else:
            fitting.chosen[here] = array, axes
            fitting.problems += _misfits(array, here, axes, expected[here], cast)
    missing = [path for path in expected if path not in fitting.chosen]
    fitting.problems += [_missing(path, expected[path], table) for path in missing]
    return fitting


def _surplus(array: StoredArray, here: str, among: Iterable[str]) -> str:
    renamed = "" if here == array.name else f", {here!r} here,"
    return (
        f"{array.name!r}{renamed} {array.type(None)} is in the file and not in the tree; None in names "
        f"leaves it out. {nearest(here, among)}"
    )


def _missing(path: str, expected: Type, table: NameTable) -> str:
    name, _ = table.there(path)
    return f"{path!r} {expected.dtype}{list(expected.shape)} is missing: the files hold no {name!r}"


def _misfits(array: StoredArray, here: str, axes: Axes, expected: Type, cast: bool) -> Iterator[str]:
    """The reason why an array does not fit its place, in at most one sentence."""
    wanted = f"{expected.dtype}{list(expected.shape)}"
    if axes is not None and len(axes) != len(array.shape):
        yield f"{array.name!r} has shape {list(array.shape)}, and names transposes it by {axes}"
        return
    said = f"{here!r} is {wanted} in the tree; {array.name!r} is {array.type(axes)}"
    if _moved(array.shape, axes) != expected.shape:
        yield said
    elif not _holds(expected.dtype, array.dtype):
        if not all(jnp.issubdtype(dtype, jnp.floating) for dtype in (array.dtype, expected.dtype)):
            yield f"{said}, which it does not hold"
        elif not cast:
            yield f"{said}. cast=True rounds it"


def _holds(wide: Any, dtype: Any) -> bool:
    """Whether a dtype holds every number of another; for NumPy float64 holds int64, and float8 holds int8."""
    if jnp.issubdtype(dtype, jnp.integer) and jnp.issubdtype(wide, jnp.floating):
        limits: Any = jnp.iinfo  # NumPy's has none of 4 bits; JAX's has no types
        whole = limits(dtype)
        return bool(whole.bits - (whole.min < 0) <= limits_of(wide).nmant + 1)
    return np.can_cast(dtype, wide)


def turned(array: np.ndarray, axes: Axes) -> np.ndarray:
    """An array with its axes in this order; None leaves them, which ``numpy.transpose`` would reverse."""
    return array if axes is None else array.transpose(axes)


def _moved(shape: Sequence[int], axes: Axes) -> tuple[int, ...]:
    return tuple(shape if axes is None else (shape[axis] for axis in axes))


def _held(array: StoredArray, axes: Axes, expected: Type) -> jax.Array:
    """The numbers of an array in the dtype that is expected; raises where one becomes infinite."""
    numbers = array.read(axes)
    with np.errstate(over="ignore"):
        held = numbers.astype(expected.dtype, order="C")
    is_rounded = not _holds(expected.dtype, array.dtype)
    if is_rounded and (lost := int(np.sum(np.isfinite(numbers) & ~np.isfinite(held)))):
        raise CheckpointError(f"{array.name!r}: {lost} numbers are too large for {expected.dtype}.")
    return jnp.asarray(held)


def _written(place: str, leaf: Any, axes: Axes) -> np.ndarray:
    """The numbers of a leaf as they are written."""
    if _numbers(leaf) is None or isinstance(leaf, Type) or leaf.dtype.name not in EXCHANGED:
        dtype = f" of {leaf.dtype}" if hasattr(leaf, "dtype") else ""
        raise ArgumentError(
            f"save_safetensors: {place!r} is {describe(leaf)}{dtype}; expected an array of numbers of a "
            "dtype that safetensors has. Save only the part of the tree that holds arrays."
        )
    array = np.asarray(leaf)
    if axes is not None and len(axes) != array.ndim:
        raise ArgumentError(
            f"save_safetensors: {place!r} is {describe(leaf)}; names transposes it by {axes}."
        )
    return np.array(turned(array, axes), array.dtype.newbyteorder("="), order="C")
