"""How an array is stored: plain numbers as they are, everything else as its bits in unsigned integers.

A bfloat16 array of shape ``[3]`` is stored as uint16 ``[3]``, a typed random key as the uint32 numbers inside
it. The ``ArrayForm`` remembers what they were, so that decoding gives back every bit.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from onward.core.errors import ArgumentError
from onward.core.variable import holds_keys
from onward.execute.disk.tensors import CODES, bytes_of

PLAIN = tuple(CODES)
RARE = (
    *("bfloat16", "complex64", "complex128", "int2", "int4", "uint2", "uint4", "float4_e2m1fn"),
    *("float6_e2m3fn", "float6_e3m2fn", "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn"),
    *("float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
)
DTYPES: Mapping[str, np.dtype[Any]] = {
    name: jnp.dtype(getattr(jnp, "bool_" if name == "bool" else name))
    for name in (*PLAIN, *RARE)
    if name == "bool" or hasattr(jnp, name)
}
KEY = "key"


@dataclass(frozen=True)
class ArrayForm:
    """The form of an array once it is decoded: a dtype by name, a shape, and for random keys their generator.

    >>> ArrayForm("bfloat16", (3,)).stored_dtype, ArrayForm("complex128", (3,)).stored_shape
    (dtype('uint16'), (3, 2))
    """

    dtype: str
    shape: tuple[int, ...]
    generator: str | None = None

    @property
    def stored_dtype(self) -> np.dtype[Any]:
        """The dtype of the plain numbers in which it is stored."""
        if self.dtype == KEY:
            return np.dtype(np.uint32)
        if self.dtype in PLAIN:
            return DTYPES[self.dtype]
        return np.dtype(f"uint{8 * min(DTYPES[self.dtype].itemsize, 8)}")

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of these numbers, one axis more where an element does not fit into one of them."""
        if self.dtype == KEY:
            return (*self.shape, *_numbers_of_a_key(self.generator))
        count = DTYPES[self.dtype].itemsize // self.stored_dtype.itemsize
        return self.shape if count == 1 else (*self.shape, count)

    def __str__(self) -> str:
        kind = f"key<{self.generator}>" if self.dtype == KEY else self.dtype
        return f"{kind}[{','.join(map(str, self.shape))}]"


def encode(name: str, value: Any) -> tuple[ArrayForm, np.ndarray]:
    """The form of an array, and its bits as plain numbers in host memory of their own.

    Raises:
        ArgumentError: no array, or one of a dtype that cannot be stored.

    Example:
        >>> form, stored = encode("w", jnp.ones(2, jnp.bfloat16))
        >>> print(form, stored, decode(form, stored))
        bfloat16[2] [16256 16256] [1 1]
    """
    if isinstance(value, jax.Array) and holds_keys(value.dtype):
        form = ArrayForm(KEY, value.shape, str(jax.random.key_impl(value)))
        return form, _host_copy(name, jax.random.key_data(value))
    copy = _host_copy(name, value)
    form = ArrayForm(copy.dtype.name, copy.shape)
    return form, copy.reshape(-1).view(form.stored_dtype).reshape(form.stored_shape)


def decode(form: ArrayForm, stored: np.ndarray) -> Any:
    """The array of this form whose bits are stored: a NumPy array, or a JAX array of random keys."""
    if form.dtype == KEY:
        return jax.random.wrap_key_data(jnp.asarray(stored), impl=form.generator)
    return stored.reshape(-1).view(DTYPES[form.dtype]).reshape(form.shape)


def checksum(stored: np.ndarray) -> int:
    """The CRC-32 of the bytes of an array.

    >>> checksum(np.zeros(4, np.uint8)) == checksum(np.zeros(1, np.float32)) == zlib.crc32(bytes(4))
    True
    """
    return zlib.crc32(bytes_of(stored))


def _host_copy(name: str, value: Any) -> np.ndarray:
    """A real copy: of a JAX array on the CPU, ``np.asarray`` is a view of a buffer that may be donated."""
    try:
        array = np.asarray(value)
    except (RuntimeError, ValueError) as error:
        raise ArgumentError(f"{name!r} cannot be copied to host memory: {error}") from error
    if array.dtype.name not in DTYPES:
        raise ArgumentError(
            f"{name!r} is {array.dtype}{list(array.shape)}; a checkpoint holds arrays of numbers, booleans "
            "and random keys. Put strings and other data into extra= (as JSON data)."
        )
    return np.array(array, array.dtype.newbyteorder("="), order="C", copy=True)


def _numbers_of_a_key(generator: str | None) -> tuple[int, ...]:
    """How many uint32 numbers are in one random key of this generator."""
    if generator is None:
        raise ValueError("a random key without the name of its generator")
    data = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=generator)))
    return tuple(data.shape)
