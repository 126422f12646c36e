"""The memory of a step as text: the bytes for each purpose, and the arrays in memory at the peak."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from onward.core.columns import columns
from onward.core.program import Op, Variable
from onward.core.show import human_bytes, short_type
from onward.execute.memory.held import Held, MemoryShare, PeakMoment

_SHOWN = 10
_WIDTH = 32


def text(
    title: str,
    peak: int,
    curve: Sequence[PeakMoment],
    number: int,
    shares: Mapping[MemoryShare, int],
    held: Sequence[Held],
    names: Mapping[Variable, str],
) -> str:
    """The text that ``print(memory(program))`` shows; the peak is at the op of this number."""
    head = f"{title}: {human_bytes(peak)} at the peak"
    if curve:
        op = curve[number].op
        head += f", at op {number + 1:,} of {len(curve):,}: {op.made_by}  {place(op)}"
    return f"{head}\n\n{bars(shares)}\n\n{columns(rows(held, names), right=(0,))}"


def bars(shares: Mapping[MemoryShare, int]) -> str:
    """The bytes for each purpose, a row each, with a bar for its part of all."""
    whole = sum(shares.values())
    told = [
        (str(share), human_bytes(n), f"{100 * n / whole:.0f} %", "█" * round(_WIDTH * n / whole))
        for share, n in shares.items()
        if n
    ]
    return columns(told, right=(1, 2))


def side_by_side(
    memories: Sequence[tuple[Mapping[MemoryShare, int], int, int]], labels: Sequence[str]
) -> str:
    """The shares, the peaks and the bytes in host memory of several, a column each."""
    table: list[tuple[str, ...]] = [("", *labels)]
    for share in memories[0][0]:
        if any(shares[share] for shares, *_ in memories):
            table.append((str(share), *(human_bytes(shares[share]) for shares, *_ in memories)))
    table.append(("all at the peak", *(human_bytes(peak) for _, peak, _ in memories)))
    if any(there for *_, there in memories):
        table.append(("in host memory", *(human_bytes(there) for *_, there in memories)))
    return columns(table, right=range(1, len(memories) + 1))


def rows(alive: Iterable[Held], names: Mapping[Variable, str], most: int = _SHOWN) -> list[tuple[str, ...]]:
    """The arrays in memory at the peak, a row each; those of repeated layers in one row.

    Args:
        alive: the arrays.
        names: what Variables are called here, other than by their own names.
        most: how many rows at most, without the one for the rest.
    """
    alike: dict[tuple[str, ...], list[Held]] = {}
    for held in alive:
        ends = (
            place(held.maker) if held.maker else "there before",
            place(held.reader) if held.reader else "stays",
        )
        alike.setdefault((short_type(held.variable), str(held.share), *ends), []).append(held)
    groups = sorted(alike.items(), key=lambda pair: -sum(held.bytes for held in pair[1]))
    table: list[tuple[str, ...]] = [("bytes", "at the peak", "type", "for", "made by", "last read by")]
    for words, group in groups[:most]:
        first = names.get(group[0].variable, group[0].variable.name)
        table.append((_total(group), first if len(group) == 1 else f"{len(group)} x {first}", *words))
    if rest := [held for _, group in groups[most:] for held in group]:
        table.append((_total(rest), f"{len(rest):,} more", "", "", "", ""))
    return table


def _total(group: Iterable[Held]) -> str:
    return human_bytes(sum(held.bytes for held in group))


def place(op: Op) -> str:
    """An op by its type and the user's line."""
    line = str(op.source) if op.source is not None else ""
    return f"{op.type}  {line}" if line else op.type
