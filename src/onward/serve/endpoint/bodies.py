"""The body of a request becomes arrays that a plan takes, or a sentence that says what is wrong.

JSON is an object with the data by name; npy holds the one input that a plan has, npz several.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from itertools import chain
from typing import Any

import jax
import numpy as np

from onward.core.errors import ArgumentError, nearest
from onward.execute.disk.fields import TWICE, once
from onward.serve.endpoint import pieces
from onward.serve.endpoint.npy import array_of, arrays_of
from onward.serve.endpoint.pieces import LARGE, refuse_constant, values_of
from onward.serve.endpoint.plan import Arrays, Input, RequestPlan
from onward.serve.endpoint.refusal import Refusal

JSON, NPY, NPZ = "application/json", "application/x-npy", "application/x-npz"


def read(body: bytes, media_type: str, plan: RequestPlan, most: int) -> Arrays:
    """The arrays of a request, of the very names, shapes and dtypes that a plan takes.

    Args:
        body: all of it.
        media_type: what the request says that it is.
        plan: what is asked.
        most: bytes that arrays may take once unpacked.

    Raises:
        Refusal: with what was found and what was expected.
    """
    kind = media_type.partition(";")[0].strip().lower()
    if kind not in _READERS:
        raise Refusal(
            415,
            f"The content type is {kind[:80] or 'missing'}; expected {JSON}, {NPY} or {NPZ}. "
            f'With curl: -H "content-type: {JSON}".',
        )
    given = _READERS[kind](body, plan, most)
    _expect_names(given, plan)
    return _converted(given, plan)


def rows_of(feed: Arrays, plan: RequestPlan) -> int:
    """How many examples there are.

    Raises:
        Refusal: none, not as many of each input, or another length that is not the same wherever it is.
    """
    counts = {x.name: len(feed[x.name]) for x in plan.inputs if x.batched}
    if len(set(counts.values())) > 1:
        found = ", ".join(f"{n} of {name}" for name, n in counts.items())
        raise Refusal(422, f"There are {found}; expected one number of examples for all of them.")
    rows = next(iter(counts.values()), 1)
    if not rows:
        first = next(x.shape[0] for x in plan.inputs if x.batched)
        raise Refusal(422, f"There is no example. Expected: {plan.expected}, with {first} of at least 1.")
    _expect_one_length(feed, plan)
    return rows


def _expect_one_length(feed: Arrays, plan: RequestPlan) -> None:
    """Refuse arrays of which one is longer than another along axes that have the same word."""
    found: dict[str, tuple[int, str]] = {}
    for x in plan.inputs:
        for word, size in zip(x.shape, feed[x.name].shape, strict=True):
            if not isinstance(word, str):
                continue
            first, name = found.setdefault(word, (size, x.name))
            if first != size:
                raise Refusal(
                    422,
                    f"{word} is {first} in {name!r} and {size} in {x.name!r}; expected one length. "
                    f"Expected: {plan.expected}.",
                )


def _read_json(body: bytes, plan: RequestPlan, most: int) -> Mapping[str, Any]:
    if len(body) >= LARGE:
        return _read_large(body, plan)
    try:
        found = json.loads(body.decode(), parse_constant=refuse_constant, object_pairs_hook=once)
    except UnicodeDecodeError as error:
        raise Refusal(400, f"The body is not JSON: byte {error.start} is not UTF-8.") from None
    except RecursionError:
        raise Refusal(400, f"The JSON is nested too deep. Expected: {plan.expected}.") from None
    except ValueError as error:
        raise Refusal(400, f"The body is not JSON: {str(error)[:200]}.") from None
    if not isinstance(found, dict):
        raise Refusal(422, f"The JSON is {_kind(found)}; expected an object by name: {plan.expected}.")
    for name, value in found.items():
        if not isinstance(value, list | int | float):
            raise Refusal(422, f"{name[:80]!r} is {_kind(value)}; expected numbers: {plan.expected}.")
    return found


def _read_large(body: bytes, plan: RequestPlan) -> Mapping[str, Any]:
    """The same of a large body, in the memory of the body and of its arrays."""
    found: dict[str, np.ndarray] = {}
    try:
        for name, place in values_of(body):
            if name in found:
                raise Refusal(400, f"The body is not JSON: {TWICE}.")
            if name not in plan.by_name:
                raise Refusal(422, _surplus(name, plan))
            x = plan.by_name[name]
            listed, expect = partial(_listed, x, plan=plan), partial(_expect_shape, x, plan=plan)
            found[name] = pieces.array_of(name, body, place, x.variable.dtype, listed, expect)
    except Refusal as refusal:
        if plan.expected in refusal.sentence:
            raise
        raise Refusal(refusal.status, f"{refusal.sentence} Expected: {plan.expected}.") from None
    return found


def _read_npy(body: bytes, plan: RequestPlan, most: int) -> Mapping[str, Any]:
    if len(plan.inputs) != 1:
        raise Refusal(415, f"An npy file holds one array; expected {plan.expected}. Send {NPZ} or {JSON}.")
    return {plan.inputs[0].name: array_of(body)}


def _read_npz(body: bytes, plan: RequestPlan, most: int) -> Mapping[str, Any]:
    return arrays_of(body, most, len(plan.inputs))


_READERS: Mapping[str, Callable[[bytes, RequestPlan, int], Mapping[str, Any]]] = {
    JSON: _read_json,
    NPY: _read_npy,
    NPZ: _read_npz,
}


def _expect_names(given: Mapping[str, Any], plan: RequestPlan) -> None:
    for name in given:
        if name not in plan.by_name:
            raise Refusal(422, _surplus(name, plan))
    if missing := [x for x in plan.by_name if x not in given]:
        raise Refusal(422, f"{', '.join(map(repr, missing))} was not given. Expected: {plan.expected}.")


def _surplus(name: str, plan: RequestPlan) -> str:
    if any(v.name == name for v in plan.model.test_program.inputs):
        return (
            f"{', '.join(plan.fetch)} does not depend on {name!r}. Leave it out, or ask for what does by "
            f"?fetch=NAME. Expected: {plan.expected}."
        )
    return (
        f"There is no data named {name[:80]!r}. {nearest(name[:80], plan.by_name)} Expected: {plan.expected}."
    )


def _converted(given: Mapping[str, Any], plan: RequestPlan) -> Arrays:
    values = [_as_npy_can_tell(x, _array(x, given[x.name], plan)) for x in plan.inputs]
    for x, value in zip(plan.inputs, values, strict=True):
        _expect_dtype(x, value)
    try:
        arrays = [np.asarray(x) for x in plan.feeds.convert(values)]
        plan.feeds.check_bounds(arrays)
    except ArgumentError as error:
        raise Refusal(422, f"{error} Expected: {plan.expected}.") from None
    return {x.name: array for x, array in zip(plan.inputs, arrays, strict=True)}


def _array(x: Input, value: Any, plan: RequestPlan) -> np.ndarray:
    """The given value as an array of the right shape, whose dtype is checked later."""
    if isinstance(value, np.ndarray):
        _expect_shape(x, value.shape, plan)
        return value.astype(value.dtype.newbyteorder("="), copy=False)
    shape, leaves = _flat(x, value, plan)
    _expect_shape(x, shape, plan)
    return _listed(x, leaves, plan).reshape(shape)


def _as_npy_can_tell(x: Input, value: np.ndarray) -> np.ndarray:
    """Floats rounded to a dtype that no npy file can hold, such as bfloat16; anything else as it is."""
    is_rare = x.variable.dtype.kind == "V" and jax.numpy.issubdtype(x.variable.dtype, np.floating)
    return _rounded(x, value) if is_rare and value.dtype.kind == "f" else value


def _rounded(x: Input, array: np.ndarray) -> np.ndarray:
    """The numbers in the narrow dtype of an input; refused where one of them would become infinite."""
    with np.errstate(over="ignore", invalid="ignore"):
        narrow = array.astype(x.variable.dtype)
    if np.any(np.isfinite(array) & ~np.isfinite(narrow.astype(np.float32))):
        raise Refusal(422, f"{x.name!r} holds a number beyond what {x.variable.dtype} can hold.")
    return narrow


def _expect_shape(x: Input, found: tuple[int, ...], plan: RequestPlan) -> None:
    if x.takes(found):
        return
    lacks = x.batched and x.takes((1, *found))
    advice = " It lacks the axis of the examples: one example is sent as [example]." * lacks
    shown = str(list(found))[:80]
    raise Refusal(422, f"{x.name!r} has the shape {shown}.{advice} Expected: {plan.expected}.")


def _expect_dtype(x: Input, value: np.ndarray) -> None:
    """Refuse another dtype; ``Feeds`` would as well, but would name the lengths that were traced."""
    if jax.dtypes.canonicalize_dtype(value.dtype) != x.variable.dtype:
        found = f"{value.dtype}{list(value.shape)}"
        raise Refusal(
            422,
            f"{x.name!r} is {found}; expected {x.type}. Convert it, array.astype('{x.variable.dtype}').",
        )


def _flat(x: Input, value: Any, plan: RequestPlan) -> tuple[tuple[int, ...], list[Any]]:
    """The shape of nested lists, and the numbers in them.

    They are looked at before an array is made: NumPy would take the room of the longest text for each leaf.
    """
    shape: list[int] = []
    leaves = [value]
    while list in (kinds := set(map(type, leaves))):
        lengths = {len(part) if isinstance(part, list) else -1 for part in leaves}
        if len(lengths) > 1:
            sentence = f"{x.name!r} has lists of different lengths or depths. Expected: {plan.expected}."
            raise Refusal(422, sentence)
        shape.extend(lengths)
        leaves = list(chain.from_iterable(leaves))
    if odd := kinds - {bool, int, float}:
        found = _kind(next(leaf for leaf in leaves if type(leaf) in odd))
        raise Refusal(422, f"{x.name!r} holds {found}; expected numbers: {plan.expected}.")
    return tuple(shape), leaves


def _listed(x: Input, leaves: list[Any], plan: RequestPlan) -> np.ndarray:
    """The array of some numbers; whole ones are taken for every dtype that can hold them, true for none."""
    if bool in set(map(type, leaves)) and jax.numpy.issubdtype(x.variable.dtype, np.number):
        sentence = (
            f"{x.name!r} holds true or false where numbers are expected: {plan.expected}. Write 1 or 0."
        )
        raise Refusal(422, sentence)
    try:
        array = np.asarray(leaves)
    except OverflowError:
        array = np.asarray(leaves, object)
    if array.dtype == object:
        sentence = f"{x.name!r} holds a number which no array can hold. Expected: {plan.expected}."
        raise Refusal(422, sentence)
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise Refusal(422, f"{x.name!r} holds a number beyond what {x.variable.dtype} can hold.")
    if x.variable.dtype.itemsize < 4 and jax.numpy.issubdtype(x.variable.dtype, np.floating):
        return _rounded(x, array)
    if array.dtype.kind not in "bi" or not jax.numpy.issubdtype(x.variable.dtype, np.number):
        return array
    if jax.numpy.issubdtype(x.variable.dtype, np.integer) and array.size:
        iinfo: Any = jax.numpy.iinfo  # without types in some versions
        range_ = iinfo(x.variable.dtype)
        if array.min() < range_.min or array.max() > range_.max:
            what = f"{x.variable.dtype}, which holds {range_.min} to {range_.max}"
            raise Refusal(422, f"{x.name!r} holds numbers beyond {what}. Expected: {plan.expected}.")
    return array.astype(x.variable.dtype)


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
