"""Which devices exchange with which: the groups that XLA prints, as axes of a mesh."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from math import prod

import numpy as np

Groups = frozenset[frozenset[int]]

_LISTED = re.compile(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}")
_COUNTED = re.compile(r"replica_groups=(\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?)")
_BY_AXES = re.compile(
    r"replica_groups=mesh\[(?P<mesh>[^\]]*)\](?:, device_ids=\((?P<ids>[^)]*\)?)\))? \{(?P<axes>[^}]*)\}"
)
_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")


def groups_of(text: str, count: int) -> Groups | None:
    """The devices that exchange with each other, as an instruction says; None if it says it otherwise.

    >>> sorted(map(sorted, groups_of("replica_groups=[2,2]<=[2,2]T(1,0)", 4)))
    [[0, 2], [1, 3]]
    >>> sorted(map(sorted, groups_of("replica_groups=mesh['a'=2,'b'=2] {'b'}", 4)))
    [[0, 1], [2, 3]]
    """
    if listed := _LISTED.search(text):
        found = [_numbers(group) for group in re.findall(r"\{([\d,]*)\}", listed[1])]
        return _frozen(found) if found else _frozen([range(count)])
    if counted := _COUNTED.search(text):
        return _frozen(_iota(counted[1]))
    if by_axes := _BY_AXES.search(text):
        return _of_mesh(by_axes["mesh"], by_axes["ids"], by_axes["axes"])
    return None


def pairs_of(text: str) -> list[tuple[int, int]]:
    """Which device gives to which, in a permutation.

    >>> pairs_of("source_target_pairs={{0,1},{1,0}}")
    [(0, 1), (1, 0)]
    """
    found = _PAIRS.search(text)
    return [(int(a), int(b)) for a, b in re.findall(r"\{(\d+),(\d+)\}", found[1])] if found else []


def axes_of(
    groups: Groups | None, pairs: Sequence[tuple[int, int]], mesh: Mapping[str, int]
) -> tuple[str, ...]:
    """The axes of a mesh along which devices exchange; empty where the groups are not axes of it.

    >>> axes_of(frozenset({frozenset({0, 2}), frozenset({1, 3})}), [], {"data": 2, "model": 2})
    ('data',)
    >>> axes_of(None, [(0, 1), (1, 0), (2, 3), (3, 2)], {"data": 2, "model": 2})
    ('model',)
    """
    wide = [name for name, size in mesh.items() if size > 1]
    if pairs:
        places = np.indices(tuple(mesh.values())).reshape(len(mesh), -1).T
        if max(map(max, pairs)) >= len(places):
            return ()
        moved = {i for a, b in pairs for i in np.flatnonzero(places[a] != places[b])}
        return tuple(name for i, name in enumerate(mesh) if i in moved)
    for count in range(1, len(wide) + 1):
        for axes in combinations(wide, count):
            if groups == _along(mesh, axes, np.arange(prod(mesh.values()))):
                return axes
    return ()


def _of_mesh(mesh: str, ids: str | None, axes: str) -> Groups | None:
    sizes = {name: int(size) for name, size in re.findall(r"'([^']*)'=(\d+)", mesh)}
    chosen = re.findall(r"'([^']*)'", axes)
    devices = np.arange(prod(sizes.values()))
    if ids is not None:
        found = re.fullmatch(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", ids)
        if found is None:
            return None
        devices = devices.reshape(_numbers(found[1]))
        devices = devices.transpose(_numbers(found[2])) if found[2] else devices
    if ":" in axes or not set(chosen) <= sizes.keys():  # parts of axes
        return None
    return _along(sizes, chosen, devices)


def _along(mesh: Mapping[str, int], axes: Sequence[str], devices: np.ndarray) -> Groups:
    """The groups of devices that differ in their places along these axes only."""
    names = list(mesh)
    order = [names.index(name) for name in (*(n for n in names if n not in axes), *axes)]
    width = prod(mesh[name] for name in axes)
    return _frozen(devices.reshape(tuple(mesh.values())).transpose(order).reshape(-1, width).tolist())


def _iota(text: str) -> Iterator[Sequence[int]]:
    shape, given = text.split("<=")
    turned = re.search(r"T\(([\d,]+)\)", given)
    dimensions = _numbers(given.split("T")[0].strip("[]"))
    devices = np.arange(prod(dimensions)).reshape(dimensions)
    devices = devices.transpose(_numbers(turned[1])) if turned else devices
    groups = _numbers(shape.strip("[]"))
    yield from devices.reshape(groups[0] if len(groups) > 1 else 1, -1).tolist()


def _frozen(groups: Iterator[Sequence[int]] | Sequence[Sequence[int]]) -> Groups:
    return frozenset(frozenset(group) for group in groups)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", text))
