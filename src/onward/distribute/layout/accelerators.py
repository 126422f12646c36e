"""Devices by what their makers publish: operations a second, memory, and the links between them.

>>> H100.flops_of(2), H100.flops_of(4)
(989000000000000.0, 494000000000000.0)
>>> bytes_of("80GB", "memory"), bytes_of("1.5 GiB", "memory")
(80000000000, 1610612736)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from onward.core.amounts import bytes_in
from onward.core.errors import ArgumentError, UnknownNameError, nearest
from onward.core.structure import is_number


@dataclass(frozen=True)
class Interconnect:
    """The link from one device to others.

    Attributes:
        bandwidth: bytes a second, in one direction.
        latency: seconds until the first of them arrive.
    """

    bandwidth: float
    latency: float


@dataclass(frozen=True)
class Accelerator:
    """A kind of device.

    Attributes:
        name: what it is called.
        flops: operations a second in a product of matrices, by the bytes of a number: 2 for bfloat16.
        memory: bytes that it has.
        bandwidth: bytes a second between it and its memory.
        near: the link to the devices of its own node.
        far: the link to all others.
        node: how many devices make a node.
        source: who published these numbers, and where.
        host: bytes a second between its memory and that of the machine it is in, in one direction.

    Example:
        >>> from onward.typing import Accelerator, Interconnect
        >>> near, far = Interconnect(1e10, 1e-6), Interconnect(1e9, 1e-5)
        >>> mine = Accelerator("mine", {4: 1e12}, 8 * 2**30, 1e11, near, far, 4, "measured")
        >>> mine.flops_of(2)
        1000000000000.0
    """

    name: str
    flops: Mapping[int, float]
    memory: int
    bandwidth: float
    near: Interconnect
    far: Interconnect
    node: int
    source: str
    host: float = 16e9

    def flops_of(self, width: int) -> float:
        """Operations a second on numbers of so many bytes; of the next wider kind that it knows."""
        known = [n for n in sorted(self.flops) if n >= width] or [max(self.flops)]
        return self.flops[known[0]]

    def link(self, stride: int, length: int) -> Interconnect:
        """The link that an axis of this length runs over, whose neighbours are ``stride`` devices apart."""
        return self.near if stride * length <= self.node else self.far


def _flops(half: float, single: float, double: float) -> Mapping[int, float]:
    return MappingProxyType({2: half, 4: single, 8: double})


# Latencies are those by which NCCL chooses its rings (NVIDIA/nccl, src/graph/tuning.cc, simple protocol).
_NVLINK, _NETWORK = 3.4e-6, 14e-6

A100 = Accelerator(
    "A100",
    _flops(312e12, 156e12, 19.5e12),
    80 * 10**9,
    2.039e12,
    Interconnect(300e9, _NVLINK),
    Interconnect(25e9, _NETWORK),
    8,
    "NVIDIA A100 80GB SXM datasheet, 2021 (float32 as TF32); DGX A100: 200 Gb/s of network for each GPU",
    32e9,
)
H100 = Accelerator(
    "H100",
    _flops(989e12, 494e12, 67e12),
    80 * 10**9,
    3.35e12,
    Interconnect(450e9, _NVLINK),
    Interconnect(50e9, _NETWORK),
    8,
    "NVIDIA H100 SXM datasheet, 2023, without sparsity (float32 as TF32); 400 Gb/s of network for each GPU",
    64e9,
)
H200 = replace(
    H100,
    name="H200",
    memory=141 * 10**9,
    bandwidth=4.8e12,
    source="NVIDIA H200 SXM datasheet, 2024; otherwise as H100",
)
V5P = Accelerator(
    "TPU v5p",
    _flops(459e12, 459e12 / 2, 459e12 / 2),
    95 * 10**9,
    2.765e12,
    Interconnect(90e9, 1e-6),
    Interconnect(90e9, 1e-6),
    8960,
    "Google Cloud TPU v5p documentation, 2024; Austin et al., How to Scale Your Model, 2025, chapter 2",
)
KNOWN = MappingProxyType({a.name: a for a in (A100, H100, H200, V5P)})


def known(device: str | Accelerator, what: str) -> Accelerator:
    """The device of a name, in the words of who asks."""
    if isinstance(device, Accelerator):
        return device
    if device not in KNOWN:
        raise UnknownNameError(
            f"{what}: there is no device {device!r}. {nearest(str(device), KNOWN)} Describe others: "
            "device=ow.typing.Accelerator(...)."
        )
    return KNOWN[device]


def accelerator(device: str | Accelerator, memory: str | int | None, link: Any) -> Accelerator:
    """The device of a name, with other memory or another link to what is beyond its node."""
    device = known(device, "layout")
    if memory is not None:
        device = replace(device, memory=bytes_of(memory, "memory"))
    if isinstance(link, Interconnect):
        device = replace(device, far=link)
    elif link is not None:
        device = replace(device, far=replace(device.far, bandwidth=bytes_of(link, "link")))
    return device


def bytes_of(given: Any, what: str) -> int:
    """A number of bytes, written as a person writes it: ``"80GB"``, ``"40 GiB"``, ``"50GB/s"``, 1024."""
    found = bytes_in(given.strip().removesuffix("/s")) if isinstance(given, str) else None
    if what == "link" and found and "b" in given:  # bits, as networks are sold
        found = None
    count = given if found is None else found
    if not is_number(count) or not 0 < count < float("inf"):
        examples = "'80GB', '40 GiB'" if what == "memory" else "'50GB/s', which is 400 Gb/s"
        raise ArgumentError(
            f"layout: {what} is {given!r}; expected bytes as a number above 0, or with a unit: {examples}."
        )
    return int(count)
