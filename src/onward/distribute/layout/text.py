"""Layouts as text: the table, one explained, what differs between two, and the code to write."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from jax.sharding import PartitionSpec

from onward.core.columns import columns
from onward.core.show import human_bytes

_SHOWN = 12
_AXES = ("data", "fsdp", "tensor", "stages")
_ASSUMED = """\
assumed of {name} ({source}):
  products at the published peak; each array that XLA keeps is read and written at {bandwidth} a second;
  {near} a second to the {node} devices of a node ({near_us:.1f} us), {far} to others ({far_us:.1f} us).
  tensor is the innermost axis, then fsdp, data, stages. Sums of tensor parallelism are waited for; all else
  is sent while devices compute. FSDP gathers each layer twice, and scatters its gradient, for each
  micro-batch; data sums gradients as often, and stages of a pipeline once. They run by 1F1B. Products seldom
  reach the peak, and kernels such as flash attention move less: the seconds rank layouts and promise
  nothing."""

_FORETOLD = "* is foretold, and its runs is False: here the layers are a loop, which {}"
_EVENLY = "pipeline shares out evenly: stages divide its {} turns"
_NO_SCAN = "pipeline does not share out. It takes a lax.scan, forwards, over stacks of parameters"


def table(layouts: Any) -> str:
    """The layouts under each other, the fastest first."""
    memory = human_bytes(layouts.device.memory)
    head = (
        f"{len(layouts)} of {layouts.tried} layouts of {layouts.program} on {layouts.devices} devices fit "
        f"({layouts.device.name}, {memory}), the fastest first"
    )
    rows: list[tuple[str, ...]] = [
        ("", *_AXES, "micro-batches", "recompute", "keeps", "sends", "bubble", "seconds", "limited by")
    ]
    for number, one in enumerate(layouts[:_SHOWN]):
        rows.append((f"{number}{'' if one.runs else '*'}", *_words(one)))
    shown = columns(rows, right=[0, 1, 2, 3, 4, 5, 7, 8, 9, 10])
    more = [f"{len(layouts) - _SHOWN} more"] if len(layouts) > _SHOWN else []
    more += [_FORETOLD.format(_why(one)) for one in layouts[:_SHOWN] if not one.runs][:1]
    return "\n\n".join([head, shown, *more, *layouts.notes])


def _words(one: Any) -> tuple[str, ...]:
    c = one.choice
    return (
        *(str(getattr(c, axis)) for axis in _AXES),
        str(c.micro_batches),
        "layers" if c.recompute else "",
        human_bytes(round(one.kept.all)),
        human_bytes(round(sum(s.bytes for s in one.sent))),
        f"{100 * one.bubble:.0f} %",
        f"{one.seconds:.3g}",
        one.limit,
    )


def explanation(one: Any) -> str:
    """One layout in words."""
    kept, sent, times = _kept_rows(one), _sent_rows(one), _time_rows(one)
    device = one.device
    assumed = _ASSUMED.format(
        name=device.name,
        source=device.source,
        bandwidth=human_bytes(round(device.bandwidth)),
        near=human_bytes(round(device.near.bandwidth)),
        far=human_bytes(round(device.far.bandwidth)),
        near_us=1e6 * device.near.latency,
        far_us=1e6 * device.far.latency,
        node=device.node,
    )
    head = f"{_title(one)}: {one.seconds:.3g} seconds a step, limited by {one.limit}"
    parts = [columns(rows, right=[1, 2]) for rows in (kept, sent, times) if len(rows) > 1]
    return "\n\n".join([head, *parts, assumed, one.code])


def _title(one: Any) -> str:
    c = one.choice
    axes = [f"{axis} {getattr(c, axis)}" for axis in _AXES if getattr(c, axis) > 1] or ["one device"]
    s = "" if c.micro_batches == 1 else "es"
    again = ", layers computed again" if c.recompute else ""
    return f"{' x '.join(axes)}, {c.micro_batches} micro-batch{s}{again}"


def _kept_rows(one: Any) -> list[tuple[str, ...]]:
    names = ("parameters", "state", "data", "gradients", "activations", "temporaries", "all")
    rows = [(name, human_bytes(round(getattr(one.kept, name)))) for name in names]
    return [("kept on the device of most", ""), *rows]


def _sent_rows(one: Any) -> list[tuple[str, ...]]:
    rows = [(f"{s.axis}, {s.by}", human_bytes(round(s.bytes)), f"{s.seconds:.3g} s") for s in one.sent]
    return [("sent by each device at a step", "", ""), *rows]


def _time_rows(one: Any) -> list[tuple[str, ...]]:
    rows = [
        ("arithmetic", one.working.compute),
        ("waiting for memory", one.working.memory),
        ("sums of tensor parallelism", one.along("tensor")),
        ("sent meanwhile", one.along("data") + one.along("fsdp") + one.along("stages")),
        ("update", one.update),
    ]
    bubble = ("bubble", f"{100 * one.bubble:.1f} %")
    return [("seconds of a step", ""), *((name, f"{n:.3g}") for name, n in rows), bubble]


def difference(a: Any, b: Any) -> str:
    """The rows in which two layouts differ."""
    rows = [("", _title(a), _title(b))]
    pairs = zip(_all_rows(a).items(), _all_rows(b).values(), strict=True)
    rows += [(name, first, second) for (name, first), second in pairs if first != second]
    return columns(rows, right=[1, 2])


def _all_rows(one: Any) -> dict[str, str]:
    sent = {axis: sum(s.bytes for s in one.sent if s.axis == axis) for axis in _AXES}
    rows = {f"keeps, {name}": text for name, text in _kept_rows(one)[1:]}
    rows |= {f"sends, {axis}": human_bytes(round(n)) for axis, n in sent.items()}
    rows |= {f"takes, {name}": text for name, text in _time_rows(one)[1:]}
    return rows | {"seconds a step": f"{one.seconds:.3g}", "limited by": one.limit}


def code(one: Any) -> str:
    """The calls that lay a Program out so."""
    c, lines = one.choice, list(_not_yet(one))
    if one.budget is not None:
        lines.append(f"program = ow.recompute(program, {one.budget:.2g})")
    if c.micro_batches > 1 and c.stages == 1:
        lines.append(f"program = ow.accumulate(program, {c.micro_batches})")
    if c.fsdp * c.tensor > 1 or (c.data > 1 and c.stages == 1):
        axes = ", ".join(f'"{axis}": {n}' for axis, n in one.mesh.items())
        batch = f", batch={one.batch!r}" if one.batch else ""
        found = patterns(one.where, one.names).items()
        where = "\n".join(f"    {name!r}: {_spec(spec)}," for name, spec in found)
        table_ = f"{{\n{where}\n}}" if where else "{}"
        lines.append(f"program = ow.partition(program, {{{axes}}}, {table_}{batch})".replace("'", '"'))
    if c.stages > 1:
        data = f", data={c.data}" if c.data > 1 and c.fsdp * c.tensor == 1 else ""
        lines.append(
            f"program = ow.pipeline(program, stages={c.stages}, micro_batches={c.micro_batches}, "
            f'schedule="1f1b"{data})'
        )
    return "\n".join(lines) or "# as it is, on one device"


def _not_yet(one: Any) -> Iterator[str]:
    """Remarks on what of a layout with stages ``pipeline`` does not do."""
    if not one.runs:
        yield f"# The layers are a loop, which {_why(one)}."


def _why(one: Any) -> str:
    """The reason why a layout with stages is foretold only, in words."""
    return _NO_SCAN if one.turns == 1 else _EVENLY.format(one.turns)


def _spec(spec: PartitionSpec) -> str:
    return f"P({', '.join(map(repr, spec))})"


def patterns(where: Mapping[str, PartitionSpec], known: Iterable[str]) -> dict[str, PartitionSpec]:
    """The same table with one entry for names that differ in numbers only, if it meets no others.

    >>> P = PartitionSpec
    >>> where = {"layers/0/w": P("fsdp"), "layers/1/w": P("fsdp"), "head": P(None, "fsdp")}
    >>> patterns(where, where)
    {'layers/*/w': P('fsdp',), 'head': P(None, 'fsdp')}
    """
    groups: dict[tuple[str, PartitionSpec], list[str]] = {}
    for name, spec in where.items():
        groups.setdefault((re.sub(r"\d+", "*", name), spec), []).append(name)
    found: dict[str, PartitionSpec] = {}
    for (pattern, spec), names in groups.items():
        is_exact = len(names) > 1 and _met(known, pattern) == names
        found.update({pattern: spec} if is_exact else dict.fromkeys(names, spec))
    return found


def _met(known: Iterable[str], pattern: str) -> Sequence[str]:
    return [name for name in known if fnmatchcase(name, pattern)]
