"""An adopted step: the origin of the recipe of its Program, traced again for data of other types."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import jax

from onward.core.around import Around, compute_the_same
from onward.core.jaxprs.differentiated import hidden_calls
from onward.core.jaxprs.tracing import current_axis, since, traced
from onward.core.program import Program, Recipe
from onward.core.structure import Static
from onward.define.arguments import Leaf, Specification, specify, tracing_again
from onward.define.context import Context
from onward.define.trace import explaining
from onward.derive.update.foreign import ForeignUpdate
from onward.explain.adopt.cut import Cut, CutTrace, cut
from onward.explain.adopt.gradient_call import taking_apart
from onward.explain.inspect.call import CalledStep, is_array
from onward.explain.inspect.matching import Pair
from onward.explain.inspect.replaced import carried_places


@dataclass(frozen=True, eq=False)
class AdoptedStep:
    """Someone's step, its loss and its update told apart: the origin of a Recipe.

    Attributes:
        call: the step, unwrapped from ``jax.jit``, and what it is called with.
        pairs: the results that replace arguments.
        treedef: the containers of what it returns.
        statics: for every leaf in them None for an array, or the value that is none.
        training: whether it is traced as it is when it is trained.
        around: the variables that it read when it was taken apart.
    """

    call: CalledStep
    pairs: tuple[Pair, ...]
    treedef: Any
    statics: tuple[Static | None, ...]
    training: bool = True
    asks_training: bool = False
    fixed_data: frozenset[str] = frozenset()
    makers: Mapping[str, Any] = field(default_factory=dict)
    free_lengths: Mapping[str, tuple[int | str, ...]] = field(default_factory=dict)
    assumes_batch: bool = False
    cuts: dict[Any, Cut] = field(default_factory=dict)
    around: Around = field(default_factory=Around)

    @property
    def data(self) -> tuple[Specification, ...]:
        """The arguments that are fed."""
        return tuple(s for i, s in self.call.plain.items() if i not in self.places)

    @cached_property
    def places(self) -> frozenset[int]:
        """The places of the arguments that are carried on."""
        return carried_places(self.pairs, self.call, self.treedef)

    def trace(self, data: tuple[Any, ...]) -> Program:
        """The forward Program: the loss, what the update reads beside it, and the state it replaces.

        Where nothing is trained, nothing is carried on, and what nothing reads is left out.
        """
        found = self._cut(data)
        origin = replace(self, asks_training=found.asks_training)
        program = replace(found.forward, recipe=Recipe(origin, found.forward.ops))
        if self.training:
            return program
        read = {v for op in program.ops for v in op.inputs} | set(program.outputs)
        return replace(program, state=tuple(v for v in program.state if v in read), next_state={})

    def trained(self, data: tuple[Any, ...]) -> tuple[str, ...]:
        """The names of what the loss is differentiated for, and depends on."""
        return self._cut(data).trained

    def update(self, data: tuple[Any, ...]) -> ForeignUpdate:
        """The update for data of these types."""
        return self._cut(data).update

    def for_test(self) -> Program:
        """The forward Program as it is when nothing is trained."""
        return replace(self, training=False, cuts={}).trace(self.types)

    @property
    def types(self) -> tuple[Any, ...]:
        """The arguments that are fed, by their types."""
        return tuple(s.fill(leaf.type for leaf in s.arrays) for s in self.data)

    def parted(self, leaves: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """The arrays among the leaves of all arguments: those that are carried on, and those that are fed."""
        places = [(i, leaf) for i, s in self.call.plain.items() for leaf in s.leaves]
        arrays = [(i, x) for (i, leaf), x in zip(places, leaves, strict=True) if isinstance(leaf, Leaf)]
        carried = [x for i, x in arrays if i in self.places]
        return carried, [x for i, x in arrays if i not in self.places]

    def returned(self, following: Sequence[Any], results: Sequence[Any]) -> list[Any]:
        """The arrays that the step returns, from what replaces its arguments, and the results beside."""
        leaves = [(i, leaf) for i, s in self.call.plain.items() for leaf in s.leaves]
        own, supply = iter(following), iter(results)
        new = [next(own) if i in self.places and isinstance(x, Leaf) else None for i, x in leaves]
        replaced = {r.start + k: new[a.start + k] for r, a in self.pairs for k in range(len(r.leaves))}
        arrays = (k for k, static in enumerate(self.statics) if static is None)
        return [replaced[k] if k in replaced else next(supply) for k in arrays]

    def _cut(self, data: tuple[Any, ...]) -> Cut:
        specified = tuple(_retyped(s, d) for d, s in zip(data, self.data, strict=True))
        key = (*((s.treedef, s.leaves) for s in specified), current_axis(), since())
        if key not in self.cuts:
            self.cuts[key] = self._traced(specified)
        return self.cuts[key]

    def _traced(self, data: Sequence[Specification]) -> Cut:
        self.around.warn(self.call.title, self._is_as_before)
        return self._cut_anew(data)

    def _is_as_before(self) -> bool:
        """Whether the step computes the same as before, of data that it was traced for."""
        now = current_axis(), since()
        kinds, before = next(((key[:-2], c) for key, c in self.cuts.items() if key[-2:] == now), ((), None))
        if before is None:
            return False
        data = [replace(s, treedef=t, leaves=leaves) for s, (t, leaves) in zip(self.data, kinds, strict=True)]
        again = self._cut_anew(data)
        updates = (
            replace(c.forward, ops=c.update.ops, constants=c.update.constants) for c in (before, again)
        )
        return compute_the_same(before.forward, again.forward) and compute_the_same(*updates)

    def _cut_anew(self, data: Sequence[Specification]) -> Cut:
        supply = iter(data)
        plain = {i: s if i in self.places else next(supply) for i, s in self.call.plain.items()}
        call = replace(self.call, plain=plain)
        with tracing_again(self.data, data, (s for i, s in self.call.plain.items() if i in self.places)):
            found = traced_apart(call, self.training)
        return cut(found, self.pairs, self.places)


def _retyped(old: Specification, data: Any) -> Specification:
    """The specification of an argument for data of other types; numbers that the step looks at stay."""
    new = old.retyped(specify(data, old.name))
    leaves = (a if isinstance(a, Static) else b for a, b in zip(old.leaves, new.leaves, strict=True))
    return replace(new, leaves=tuple(leaves))


def traced_apart(call: CalledStep, training: bool = True) -> CutTrace:
    """The trace of a step in which gradients are left open, but those that are computed in loops."""
    hidden: dict[str, str] = {}
    while True:
        known = len(hidden)
        found = _traced_once(call, training, frozenset(hidden))
        hidden.update({**found.hidden, **dict(hidden_calls(found.closed))})
        if len(hidden) == known:
            return replace(found, hidden=hidden)


def _traced_once(call: CalledStep, training: bool, left: frozenset[str]) -> CutTrace:
    """One trace; gradients at the lines of ``left`` are computed as they always were."""
    found: list[Any] = []
    context = Context(training, None, {}, [])

    def flat(*leaves: Any) -> list[Any]:
        with context.open(), taking_apart(left) as calls:
            returned, modules = call.run(leaves)
        values, treedef = jax.tree.flatten(returned)
        statics = [None if is_array(value) else Static(value) for value in values]
        found.append((treedef, statics, [value is not None for value in modules], calls.hidden))
        return [*filter(is_array, values), *(value for value in modules if value is not None)]

    tracing = partial(traced, flat, apart=("gradients left open", training, left), of=call.title)
    closed = explaining(call.title, tracing, *(leaf.type for _, leaf in call.leaves))
    context.forget()
    treedef, statics, in_place, hidden = found[-1]
    return CutTrace(call, closed, treedef, statics, in_place, hidden, context.asks_training)
