"""Which forward ops repeat layer after layer, found by their wiring, so that one layer can stand for all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from onward.core.program import Op, Program
from onward.core.words import Pass
from onward.develop.roll.find import find_runs
from onward.develop.roll.forward import forward_ops
from onward.develop.roll.line import line_of
from onward.develop.roll.run import LayerRun

_LEAST_OPS_SAVED = 12


@dataclass(frozen=True, eq=False)
class Repeat:
    """Layers that are equal; the ops at one place of all layers stand side by side in ``layers``."""

    layers: tuple[tuple[Op, ...], ...]

    @property
    def times(self) -> int:
        """How many layers there are."""
        return len(self.layers)


def repeats_of(program: Program, scopes: Mapping[Op, str]) -> tuple[Repeat, ...]:
    """The repeated layers of a Program's forward pass, whose ops are in these scopes."""
    ops = tuple(op for op in program.ops if op.made_by is Pass.FORWARD)
    first_form = forward_ops(program)
    original = dict(zip(first_form, ops, strict=True))
    line = line_of(replace(program, ops=first_form), frozenset(), frozenset())

    def is_worth_a_box(run: LayerRun) -> bool:
        """Whether enough is saved, and each scope is either in one layer alone or in all of them."""
        return run.saved >= _LEAST_OPS_SAVED and are_whole(
            [[scopes[original[op]] for op in layer] for layer in run.layers]
        )

    runs = find_runs(line, is_worth_a_box).runs
    return tuple(Repeat(tuple(tuple(original[op] for op in layer) for layer in run.layers)) for run in runs)


def are_whole(layers: Sequence[Sequence[str]]) -> bool:
    """Whether layers whose ops have these scopes tear no scope apart.

    >>> are_whole([["a/x", "a/y"], ["b/x", "b/y"]]), are_whole([["x", "y"], ["x", "y"]])
    (True, True)
    >>> are_whole([["a", "a"], ["a", "b"]])
    False
    """
    paths = [[tuple(scope.split("/")) for scope in layer] for layer in layers]
    shared = len(common([path for layer in paths for path in layer]))
    heads = [{path[shared] for path in layer if len(path) > shared} for layer in paths]
    are_equal = all(head == heads[0] for head in heads)
    return are_equal or sum(map(len, heads)) == len(set().union(*heads))


def common(paths: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """The scopes that all of these begin with.

    >>> common([("a", "b", "c"), ("a", "b", "d")])
    ('a', 'b')
    """
    first, last = min(paths), max(paths)
    same = 0
    while same < len(first) and same < len(last) and first[same] == last[same]:
        same += 1
    return first[:same]


def stand_ins(repeats: Iterable[Repeat]) -> Mapping[Op, Op]:
    """For each op of a repeated layer, the op of the first layer that stands for it."""
    return {
        op: first
        for repeat in repeats
        for layer in repeat.layers
        for op, first in zip(layer, repeat.layers[0], strict=True)
    }
