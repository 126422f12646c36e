"""The search for layouts: all factorizations of the devices that a Program takes, foretold and ranked."""

from __future__ import annotations

from collections.abc import Iterator
from math import isqrt
from typing import Any

from onward.core.check import expect_program
from onward.core.errors import ArgumentError, GraphError
from onward.core.placement import expect_no_axis
from onward.core.program import Phase, Program
from onward.core.recipe import recipe_of
from onward.core.show import human_bytes
from onward.core.structure import describe, is_count
from onward.core.words import Pass
from onward.distribute.layout.accelerators import Accelerator, accelerator
from onward.distribute.layout.foretold import Foretelling, Spreading
from onward.distribute.layout.layouts import DeviceLayout, DeviceLayouts, foretold
from onward.distribute.layout.tensor import NOTHING_FITS

_NO_LAYERS = "stages are left out: no layer repeats."
_MOST_MICRO_BATCHES = 1024


def layout(
    program: Program,
    devices: int,
    memory: str | int | None = None,
    link: str | float | Any = None,
    device: str | Accelerator = "H100",
) -> DeviceLayouts:
    """Propose ways to spread a training over many devices, ranked by the time of a step; no device is needed.

    Each layout is a length for the axes data (every device has all parameters), fsdp (parameters, gradients
    and optimizer state are split, and gathered layer by layer), tensor (columns and rows of the products of a
    layer are split) and stages (of a pipeline), a number of micro-batches, and whether layers are computed
    again for the backward pass. Its bytes and seconds come from the ops of the Program: from those of one
    turn of a loop times its length, so that the Program of a large model is planned in seconds.

    Bytes of parameters, state and data are those of the compiled step. Activations and temporaries are
    estimated, as by ``memory``; XLA's own choices make them larger or smaller. Seconds are at the published
    peak of a device, and rank layouts.

    Args:
        program: a training Program for one device, whose batch is that of all devices together. Its
            parameters may be ``jax.ShapeDtypeStruct``: nothing is computed.
        devices: how many.
        memory: what each has, in bytes or as ``"80GB"``; that of the kind of device unless given.
        link: bytes a second from a device to those beyond its node, as ``"50GB/s"``, or an
            ``ow.typing.Interconnect``.
        device: ``"A100"``, ``"H100"``, ``"H200"``, ``"TPU v5p"``, or an ``ow.typing.Accelerator``.

    Raises:
        ArgumentError: devices that no axes divide, memory that cannot be read or that no layout fits: it says
            the least that is needed, and how.
        GraphError: the Program is spread or accumulated already, is not a training Program, or has no
            parameters.
        UnknownNameError: a kind of device that is not known.

    Source: Shoeybi et al., Megatron-LM, 2019, section 3 (tensor); Rajbhandari et al., ZeRO, 2020, section 5
    (fsdp); Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters, 2021, section 3
    (how they go together, bubbles).

    Example:
        >>> import jax, jax.numpy as jnp, onward as ow
        >>> def loss(params, x):
        ...     return jnp.mean((jax.nn.relu(x @ params["up"]) @ params["down"]) ** 2)
        >>> shape = jax.ShapeDtypeStruct
        >>> params = {"up": shape((4096, 16384), "float32"), "down": shape((16384, 4096), "float32")}
        >>> program = ow.Adam(1e-3).minimize(loss, params, shape((64, 4096), "float32"))
        >>> best = ow.layout(program, devices=8, memory="1GB")[0]
        >>> best.choice.tensor, best.where["up"], best.limit
        (8, P(None, 'tensor'), 'memory bandwidth')
    """
    _expect_fit(program, devices)
    about = Foretelling(program, accelerator(device, memory, link))
    found = [foretold(about, choice) for choice in choices(about, int(devices))]
    if not found:
        raise ArgumentError(_no_axes(about, devices))
    fitting = [one for one in found if one.kept.all <= about.device.memory]
    if not fitting:
        raise ArgumentError(_too_little(about, found, devices))
    fitting.sort(key=_rank)
    return DeviceLayouts(
        fitting,
        program=program.name,
        devices=devices,
        device=about.device,
        tried=len(found),
        notes=_notes(about),
    )


def _rank(one: DeviceLayout) -> Any:
    """The fastest first; of equally fast ones the one that sends less, then the simplest."""
    c = one.choice
    return (
        one.seconds,
        sum(s.bytes for s in one.sent),
        c.recompute,
        c.stages,
        c.tensor,
        c.micro_batches,
        c.fsdp,
    )


def choices(about: Foretelling, devices: int) -> Iterator[Spreading]:
    """All layouts that the axes of a Program allow."""
    for tensor in _tensor(about, devices):
        for stages in _divisors(devices // tensor):
            if stages <= about.layers.count:
                copies = devices // tensor // stages
                if about.rows % copies == 0:
                    yield from _of_batch(about, tensor, stages, copies)


def _of_batch(about: Foretelling, tensor: int, stages: int, copies: int) -> Iterator[Spreading]:
    again = (False, True) if about.saves_by_recompute(tensor) else (False,)
    for micro_batches in _divisors(about.rows // copies):
        if micro_batches <= _MOST_MICRO_BATCHES and (stages == 1 or micro_batches > 1):
            for fsdp in _divisors(copies):
                for recompute in again:
                    yield Spreading(copies // fsdp, fsdp, tensor, stages, micro_batches, recompute)


def _tensor(about: Foretelling, devices: int) -> list[int]:
    """The numbers of devices that tensor parallelism may split layers over."""
    return [n for n in _divisors(devices) if n == 1 or about.placing.split(n)]


def _divisors(n: int) -> list[int]:
    small = [i for i in range(1, isqrt(n) + 1) if n % i == 0]
    return small + [n // i for i in reversed(small) if i * i != n]


def _notes(about: Foretelling) -> list[str]:
    notes = [] if about.families else [NOTHING_FITS]
    return notes if about.layers.count > 1 else [*notes, _NO_LAYERS]


def _no_axes(about: Foretelling, devices: int) -> str:
    tensor = max((one.divides for one in about.families), default=1)
    layers = about.layers.count
    takes = [
        f"data and fsdp divide the {about.rows} rows of the batch" if about.batch else "no data is a batch",
        f"tensor divides {tensor}" if tensor > 1 else NOTHING_FITS.rstrip("."),
        f"there may be up to {layers} stages" if layers > 1 else _NO_LAYERS.rstrip("."),
    ]
    most = about.rows * max(tensor, 1) * max(layers, 1)  # no axes make more
    fewer = next((n for n in range(min(devices - 1, most), 0, -1) if next(choices(about, n), None)), 1)
    return f"layout: no axes make {devices} devices: {'; '.join(takes)}. Take {fewer}."


def _too_little(about: Foretelling, found: list[DeviceLayout], devices: int) -> str:
    least = min(found, key=lambda one: one.kept.all)
    kept = {
        name: getattr(least.kept, name)
        for name in ("parameters", "state", "gradients", "activations", "temporaries")
    }
    most = max(kept, key=kept.__getitem__)
    room, needed = (human_bytes(round(n)) for n in (about.device.memory, least.kept.all))
    return (
        f"layout: nothing fits {room} on each of {devices} devices. The least that is needed is {needed}, of "
        f"which {human_bytes(round(kept[most]))} {most}, by:\n\n{least.code}\n\nTake more devices, a smaller "
        "batch, or an optimizer that keeps less."
    )


def _expect_fit(program: Program, devices: int) -> None:
    expect_program(program, "layout")
    if not is_count(devices):
        raise ArgumentError(
            f"layout: devices is {describe(devices)}; expected how many there are, such as 64."
        )
    expect_no_axis(program, "layout")
    if program.replicas is not None or program.partition is not None:
        word = "replicated" if program.replicas is not None else "partitioned"
        raise GraphError(f"layout: {program.name!r} is {word} already. Give it the Program for one device.")
    if not program.parameters:
        raise GraphError(f"layout: {program.name!r} has no parameters: there is nothing to lay out.")
    if not any(op.made_by is Pass.UPDATE for op in program.ops) or not program.gradients:
        raise GraphError(
            f"layout: {program.name!r} is not a training Program. Derive backward pass and update first: "
            "optimizer.minimize(program)."
        )
    recipe = recipe_of(program, "over many devices", "Give layout a Program that was traced")
    if any(step.phase is Phase.MICRO_BATCHES for step in recipe.steps):
        raise GraphError(
            f"layout: {program.name!r} is accumulated already, and layout proposes how many micro-batches to "
            "take. Give it the Program without accumulate."
        )
