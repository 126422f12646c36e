"""Arrays from bytes that nobody vouches for: the npy and npz formats of NumPy, without pickle.

What a file says of itself is compared with the bytes that are there before memory is taken for it.
The format: https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html
"""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Mapping
from math import prod

import numpy as np

from onward.serve.endpoint.refusal import Refusal

_HEADER = 4096  # bytes that the header of an array may take
_PACKED = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # what numpy.savez and savez_compressed write
_READERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


def array_of(body: bytes, what: str = "The body") -> np.ndarray:
    """The array that an npy file holds; it reads the bytes where they are.

    Raises:
        Refusal: the bytes are not an npy file, hold Python objects, or are more or less than it says.

    Example:
        >>> file = io.BytesIO()
        >>> np.save(file, np.arange(3))
        >>> array_of(file.getvalue())
        array([0, 1, 2])
    """
    file = io.BytesIO(body)
    shape, by_column, dtype = _header(file, what)
    if dtype.kind not in "biuf":
        raise Refusal(422, f"{what} holds {str(dtype)[:40]}; expected real numbers or booleans.")
    rest = len(body) - file.tell()
    if any(n < 0 for n in shape) or prod(shape) * dtype.itemsize != rest or len(shape) > 32:
        raise Refusal(
            400,
            f"{what} announces an array {_short(shape)} of {dtype}, and {rest} bytes follow. Is it whole?",
        )
    try:
        flat = np.frombuffer(body, dtype, prod(shape), file.tell()) if rest else np.empty(0, dtype)
        return flat.reshape(shape, order="F" if by_column else "C")
    except (ValueError, OverflowError):
        raise Refusal(400, f"{what} announces an array {_short(shape)}, which cannot be.") from None


def arrays_of(body: bytes, most: int, count: int) -> Mapping[str, np.ndarray]:
    """The arrays that an npz file holds, by name.

    Args:
        body: a zip archive of npy files.
        most: bytes that all of them may take.
        count: how many there may be.

    Raises:
        Refusal: the bytes are not an npz file, or one that holds more than that.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(body)) as archive:
            entries = archive.infolist()
            if len(entries) > count:
                raise Refusal(400, f"The npz file holds {len(entries)} arrays; expected at most {count}.")
            return _unpacked(archive, entries, most)
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, EOFError, ValueError) as error:
        raise Refusal(400, f"The body is not an npz file: {_plain(error)}. Use numpy.savez.") from None
    except (OSError, OverflowError):
        raise Refusal(400, "The body is not a readable npz file. Write it with numpy.savez.") from None


def _unpacked(
    archive: zipfile.ZipFile, entries: list[zipfile.ZipInfo], most: int
) -> Mapping[str, np.ndarray]:
    arrays: dict[str, np.ndarray] = {}
    for entry in entries:
        name = entry.filename.removesuffix(".npy")
        if name in arrays:
            raise Refusal(400, f"The npz file holds {name[:80]!r} twice.")
        if entry.compress_type not in _PACKED:
            raise Refusal(400, f"{name[:80]!r} in the npz file is compressed in a way other than deflate.")
        with archive.open(entry) as file:
            data = file.read(most + 1)  # what the archive says of its sizes is not believed
        most -= len(data)
        if most < 0:
            raise Refusal(413, "The npz file unpacks to more bytes than a request may have.")
        arrays[name] = array_of(data, f"{name[:80]!r} in the npz file")
    return arrays


def _header(file: io.BytesIO, what: str) -> tuple[tuple[int, ...], bool, np.dtype]:
    try:
        version = np.lib.format.read_magic(file)
        shape, by_column, dtype = _READERS[version](file, max_header_size=_HEADER)
    except Exception:  # whatever a broken header makes the reader raise, it is a broken header
        raise Refusal(400, f"{what} is not an npy file. Write it with numpy.save(file, array).") from None
    return shape, by_column, dtype


def _short(shape: tuple[int, ...]) -> str:
    return str(list(shape))[:60] if all(abs(n) < 2**63 for n in shape) else "of an absurd shape"


def _plain(error: Exception) -> str:
    return str(error)[:100] or type(error).__name__
