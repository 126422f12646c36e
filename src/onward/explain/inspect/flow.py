"""The provenance of the results of a step: the arguments they are computed from, and by which passes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import reduce
from operator import or_

import jax
import numpy as np

from onward.core.jaxprs.loops import carries_of
from onward.core.primitives.traits import Linear, Primitive, Runs
from onward.core.program import Op, Variable
from onward.core.words import Pass
from onward.explain.inspect.opened import OpenedBody, OpenedTurn
from onward.explain.inspect.parts import TreePart


class Provenance:
    """From which arguments a Variable is computed by updating ops alone, or by forward ops alone.

    A norm of an argument is not its next value: an update does not flow through sums over an array.
    A loop that trains for several steps makes what it carries from what was carried into it.
    """

    def __init__(
        self, ops: Sequence[Op], given: Sequence[Variable], differentiated: Collection[Variable]
    ) -> None:
        self.bits = {v: 1 << i for i, v in enumerate(given)}
        self.updated = dict(self.bits)
        self.forward = dict(self.bits)
        self.counted, self.wide = counted_on(ops, self.bits, differentiated)
        self.makers = {v: op for op in ops for v in op.outputs}
        self.trains = any(op.made_by is Pass.BACKWARD for op in ops)
        self.looked_at = _looked_at(ops) if self.trains else set(given)
        for op in ops:
            self._through(op)
            if isinstance(op.body, OpenedBody) and not op.body.first.told.carried:
                self._within(op, op.body.first)

    def _within(self, op: Op, opened: OpenedTurn) -> None:
        """Trace the results of ``shard_map`` or a condition to what a device, or a branch, makes them of."""
        turn, told = opened.turn, opened.told
        inner = Provenance(turn.ops, turn.inputs, {v for i in opened.marked for v in turn.ops[i].outputs})
        for mine, theirs in (
            (self.updated, inner.updated),
            (self.forward, inner.forward),
            (self.counted, inner.counted),
        ):
            for v, j in zip(op.outputs, told.results, strict=True):
                made_of = theirs.get(turn.outputs[j], 0)
                given = [at for i, at in enumerate(told.given) if at is not None and made_of >> i & 1]
                mine[v] = reduce(or_, (mine.get(op.inputs[at], 0) for at in given), 0)

    def _through(self, op: Op) -> None:
        row = op.primitive
        is_update = op.made_by in (Pass.UPDATE, Pass.COLLECTIVE) and row.reduces is None
        updated = forward = 0
        for v in op.inputs:
            updated |= self.updated.get(v, 0)
            forward |= self.forward.get(v, 0)
        for v in op.outputs:
            self.updated[v] = updated if is_update or row.keeps_order else 0
            self.forward[v] = forward if op.made_by is Pass.FORWARD else 0
            if v.is_key:  # keys are split wherever it is: what nothing draws with belongs to no pass
                self.forward[v] = forward | updated
        for old, new in carries_of(op.body) if op.made_by is Pass.BACKWARD else ():
            self.updated[op.outputs[new]] = self.updated.get(op.inputs[old], 0)

    def is_updated(self, new: Variable, old: Variable) -> bool:
        """Whether the update makes one from the other."""
        made = new in self.makers and self.makers[new].made_by is not Pass.FORWARD
        return made and bool(self.updated[new] & self.bits[old])

    def is_kept(self, new: Variable, old: Variable) -> bool:
        """Whether it is the argument itself, or what the forward pass makes of it."""
        return new is old or bool(self.forward.get(new, 0) & self.bits[old])

    def is_doubtful(self, new: TreePart, old: TreePart) -> bool:
        """Whether the forward pass alone makes a part from another, and the loss looks at that."""
        changed = [(n, o) for n, o in zip(new.variables, old.variables, strict=True) if n is not o]
        if new.is_numbers or not changed or any(self.is_updated(n, o) for n, o in changed):
            return False
        return any(o in self.looked_at and not o.may_be_key for _, o in changed)

    def share(self, new: TreePart, old: TreePart, told: bool = False) -> int:
        """How many arrays of a part the update makes from those of another; -1 if it does not replace it.

        ``told``: a person says that the other part is replaced.
        """
        pairs = [*zip(new.variables, old.variables, strict=True)]
        changed = [(n, o) for n, o in pairs if n is not o]
        if new.is_numbers and changed:
            if not self.is_counted_on(new, old):
                return -1
            if self.trains and self.wide.isdisjoint(new.variables):
                return len(changed)
        updated = sum(self.is_updated(n, o) for n, o in pairs)
        if updated:
            return updated
        if self._is_state(new, old):
            return 0
        gradients = any(self._is_gradient(n) for n, _ in changed)
        is_wide_number = new.is_numbers and bool(changed) and self.trains
        if is_wide_number and told:
            return 0
        if gradients or not any(self.is_kept(n, o) for n, o in changed):
            return -1
        is_in_place = new.place == old.place and not is_wide_number
        surely = told or not jax.tree_util.treedef_is_leaf(new.treedef) or is_in_place
        return 0 if surely or old.variables[0].may_be_key else -1

    def _is_state(self, new: TreePart, old: TreePart) -> bool:
        """Whether a container holds what the update makes of any part of another, or makes for the next step.

        Such as an iterate that begins at another one, or the gradient beside what that of the step before
        moves. Gradients alone are none.
        """
        is_container = not jax.tree_util.treedef_is_leaf(new.treedef) and not new.is_numbers
        if not is_container or not (new.is_keyed or new.place == old.place):
            return False
        whole = reduce(or_, (self.bits[o] for o in old.variables))
        pairs = [*zip(new.variables, old.variables, strict=True)]
        made = [(n, o) for n, o in pairs if n in self.makers and not self._is_gradient(n)]
        if any(self.makers[n].made_by is not Pass.FORWARD and self.updated[n] & whole for n, _ in made):
            return True
        return any(map(self._is_gradient, new.variables)) and any(self.is_kept(n, o) for n, o in made)

    def _is_gradient(self, v: Variable) -> bool:
        return v in self.makers and self.makers[v].made_by is Pass.BACKWARD

    def may_be_kept_back(self, new: TreePart, old: TreePart) -> bool:
        """Whether the next step may need a part in place of another, though it is not made of that.

        Such as another argument as it is, or, where the loss does not look at what it replaces, gradients,
        and containers with keys or fields.
        """
        pairs = [(n, o) for n, o in zip(new.variables, old.variables, strict=True) if n is not o]
        if not pairs or all(n in self.bits for n, _ in pairs):
            return bool(pairs)
        is_seen = not self.looked_at.isdisjoint(old.variables)
        return not is_seen and (old.bears_keys or any(self._is_gradient(n) for n, _ in pairs))

    def is_counted_on(self, new: TreePart, old: TreePart) -> bool:
        """Whether numbers are made of others by adding to them, or choosing, whatever that is made of."""
        pairs = [(n, o) for n, o in zip(new.variables, old.variables, strict=True) if n is not o]
        return bool(pairs) and all(self.counted.get(n, 0) & self.bits[o] for n, o in pairs)

    def updates(self, new: TreePart, old: TreePart) -> bool:
        """Whether the update makes arrays of a part from those of another, numbers aside."""
        pairs = zip(new.variables, old.variables, strict=True)
        return any(n.shape and self.is_updated(n, o) for n, o in pairs)

    def supersedes(self, part: TreePart, other: TreePart, old: TreePart) -> bool:
        """Whether a part is made of an argument and of another part, as parameters are of their update.

        What is made of the other part alone, such as a norm of the next parameters, is a result beside them.
        """
        return self._reads(part, other.variables) and self._reads(part, old.variables, other.variables)

    def _reads(self, part: TreePart, wanted: Collection[Variable], around: Collection[Variable] = ()) -> bool:
        """Whether a part is computed from any of these, by ways that lead around others."""
        seen, waiting = {*part.variables, *around}, [*part.variables]
        while waiting:
            maker = self.makers.get(waiting.pop())
            new = set(maker.inputs) - seen if maker is not None else set()
            if not new.isdisjoint(wanted):
                return True
            seen |= new
            waiting.extend(new)
        return False


def _looked_at(ops: Sequence[Op]) -> set[Variable]:
    """The Variables that gradients are computed from: those that the loss depends on."""
    needed: set[Variable] = set()
    for op in reversed(ops):
        if op.made_by is Pass.BACKWARD or not needed.isdisjoint(op.outputs):
            needed.update(op.inputs)
    return needed


def counted_on(
    ops: Iterable[Op], bits: Mapping[Variable, int], differentiated: Collection[Variable]
) -> tuple[dict[Variable, int], set[Variable]]:
    """From which numbers among the arguments each number is computed by way of numbers alone.

    Whatever is added to a number, or chosen in place of it, it is counted on. It is scaled only by what is
    neither made of arrays nor differentiated, but for truth values: a learning rate times a gradient is no
    learning rate. Also returned: what is made of such.
    """
    counted = {v: bit for v, bit in bits.items() if not v.shape}
    wide = set(differentiated)
    for op in ops:
        is_marked = not wide.isdisjoint(op.outputs)
        is_wide = [v.dtype != np.bool_ and bool(v.shape or v in wide) for v in op.inputs]
        if op.made_by is Pass.BACKWARD or is_marked or any(is_wide):
            wide.update(op.outputs)
        source, row = 0, op.primitive
        scales = row.linear is Linear.EACH or row.divides
        for i, v in enumerate(op.inputs):
            others = is_wide[:i] + is_wide[i + 1 :]
            is_scaled = not is_marked and not any(others if scales else is_wide)
            source |= counted.get(v, 0) if _counts_on(row) or is_scaled else 0
        counted.update((v, source) for v in op.outputs if not v.shape and op.made_by is not Pass.BACKWARD)
        counted.update((op.outputs[new], counted.get(op.inputs[old], 0)) for old, new in carries_of(op.body))
    return counted, wide


def _counts_on(row: Primitive) -> bool:
    """Whether a number that it makes is one of those it reads, or a sum of them."""
    chosen = row.chooses or row.runs is Runs.BRANCH
    return chosen or row.keeps_order or row.linear is Linear.TOGETHER
