"""What devices can do at most, and what a model asks for: the two numbers of model FLOP utilisation.

    6N                 6 x parameters x tokens: a product with each parameter forward, two backward
    6N + attention     and 12 x layers x width x sequence for each token, halved, for what is causal is
    MFU                these FLOP, over the seconds of a step, over the peak of the device

What is computed again does not count. Without a published peak there is no MFU, only FLOP/s.
"""

from __future__ import annotations

from typing import NamedTuple

import jax

from benchmarks.device.precision import product_precision


class Peak(NamedTuple):
    """FLOP/s of dense products on one device, by the format in which they are computed, and the source."""

    kind: str
    teraflops: dict[str, float]
    source: str


_NVIDIA = "NVIDIA {} datasheet, without sparsity"
_TPU = "Google Cloud documentation of {}"
_PEAKS = (
    Peak("A100", {"bfloat16": 312.0, "tensorfloat32": 156.0, "float32": 19.5}, _NVIDIA.format("A100")),
    Peak(
        "H100 NVL", {"bfloat16": 835.5, "tensorfloat32": 417.5, "float32": 60.0}, _NVIDIA.format("H100 NVL")
    ),
    Peak("H100 PCIe", {"bfloat16": 756.0, "tensorfloat32": 378.0, "float32": 51.0}, _NVIDIA.format("H100")),
    Peak("H100", {"bfloat16": 989.4, "tensorfloat32": 494.7, "float32": 67.0}, _NVIDIA.format("H100 SXM")),
    Peak("H200", {"bfloat16": 989.4, "tensorfloat32": 494.7, "float32": 67.0}, _NVIDIA.format("H200 SXM")),
    Peak("B200", {"bfloat16": 2250.0, "tensorfloat32": 1125.0, "float32": 75.0}, _NVIDIA.format("HGX B200")),
    Peak(
        "RTX 4090",
        {"bfloat16": 165.2, "tensorfloat32": 82.6, "float32": 82.6},
        "NVIDIA Ada GPU architecture, appendix A, adding up in float32",
    ),
    Peak("TPU v4", {"bfloat16": 275.0}, _TPU.format("TPU v4")),
    Peak("TPU v5 lite", {"bfloat16": 197.0}, _TPU.format("TPU v5e")),
    Peak("TPU v5e", {"bfloat16": 197.0}, _TPU.format("TPU v5e")),
    Peak("TPU v5p", {"bfloat16": 459.0}, _TPU.format("TPU v5p")),
    Peak("TPU v5", {"bfloat16": 459.0}, _TPU.format("TPU v5p")),
    Peak("TPU v6", {"bfloat16": 918.0}, _TPU.format("TPU v6e")),
)

FORMULAS = (
    "6N = 6 x parameters x tokens; attention = 12 x layers x width x sequence x tokens / 2, for it is "
    "causal;\nMFU = FLOP / seconds / peak of one device; without a known peak: FLOP/s."
)


def peak(dtype: str, kind: str | None = None) -> tuple[float, str] | None:
    """FLOP/s at most where a model computes in a dtype, with the source; None where none is known.

    >>> peak("bfloat16", "NVIDIA H100 80GB HBM3")
    (989400000000000.0, 'NVIDIA H100 SXM datasheet, without sparsity')
    >>> peak("bfloat16", "cpu") is None
    True
    """
    computed = product_precision() if dtype == "float32" else dtype
    kind = jax.devices()[0].device_kind if kind is None else kind
    for entry in _PEAKS:
        if entry.kind.lower() in kind.lower() and computed in entry.teraflops:
            return entry.teraflops[computed] * 1e12, entry.source
    return None


def six_n(parameters: int, tokens: int) -> float:
    """The FLOP of a training step by its parameters.

    >>> six_n(124_000_000, 1024) / 1e12
    0.761856
    """
    return 6.0 * parameters * tokens


def attention(layers: int, width: int, sequence: int, tokens: int) -> float:
    """The FLOP of causal attention in a training step; width is heads times the size of a head.

    >>> attention(12, 768, 1024, 1024) / six_n(124_000_000, 1024)
    0.07610258836645161
    """
    return 12.0 * layers * width * sequence * tokens / 2
