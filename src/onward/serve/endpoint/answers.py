"""Arrays become the bytes of an answer, in the form that the request accepts."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Mapping
from typing import Any

import numpy as np

from onward.serve.endpoint.bodies import JSON, NPY, NPZ
from onward.serve.endpoint.refusal import Refusal

Answer = tuple[bytes, str]


def form_of(accept: str, count: int) -> str:
    """The media type of the answer: the one preferred among those that are accepted.

    Args:
        accept: the header of the request; empty for whatever there is.
        count: how many arrays are to be answered.

    Raises:
        Refusal: none of ours is accepted.

    Example:
        >>> form_of("application/x-npy, */*;q=0.1", 1), form_of("*/*", 1)
        ('application/x-npy', 'application/json')
    """
    if accept in ("", "*/*", JSON):
        return JSON
    for kind in _preferred(accept):
        if kind in ("*/*", "application/*"):
            return JSON
        if kind in (JSON, NPZ) or (kind == NPY and count == 1):
            return kind
    several = f"; {NPY} holds one array, and there are {count}" if count > 1 and NPY in accept else ""
    raise Refusal(406, f"The request accepts {accept[:80]}; answers are {JSON}, {NPY} or {NPZ}{several}.")


def _preferred(accept: str) -> list[str]:
    """The media types of an Accept header that are wanted, the most wanted first."""
    weighted = []
    for part in accept.split(","):
        kind, *parameters = part.lower().split(";")
        weight = next((p.strip()[2:] for p in parameters if p.strip().startswith("q=")), "1")
        weighted.append((_number(weight), kind.strip()))
    return [kind for weight, kind in sorted(weighted, key=lambda pair: -pair[0]) if weight > 0]


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


def write(arrays: Mapping[str, np.ndarray], form: str) -> bytes:
    """The arrays by name, in the form that was chosen.

    In JSON null stands for a number that is not finite, and in npy what NumPy has no dtype for, such as
    bfloat16, is float32.

    Example:
        >>> write({"y": np.array([1.0, np.nan])}, JSON)
        b'{"outputs":{"y":[1.0,null]}}'
    """
    arrays = {name: _standard(array) for name, array in arrays.items()}
    if form == JSON:
        lists = {name: _listed(array) for name, array in arrays.items()}
        return json.dumps({"outputs": lists}, separators=(",", ":")).encode()
    file = io.BytesIO()
    if form == NPY:
        np.save(file, next(iter(arrays.values())), allow_pickle=False)
    else:
        _pack(file, arrays)
    return file.getvalue()


def _pack(file: io.BytesIO, arrays: Mapping[str, np.ndarray]) -> None:
    """Write the archive that ``numpy.savez`` would, for names that need not be those of arguments."""
    with zipfile.ZipFile(file, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w") as entry:
                np.lib.format.write_array(entry, array, allow_pickle=False)


def _standard(array: np.ndarray) -> np.ndarray:
    return array if array.dtype.kind in "biuf" else array.astype(np.float32)


def _listed(array: np.ndarray) -> Any:
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        objects = array.astype(object)
        objects[~np.isfinite(array)] = None
        return objects.tolist()
    return array.tolist()
