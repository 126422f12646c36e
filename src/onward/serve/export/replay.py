"""A Program traced again for other lengths: as a whole, or only what its function computes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax

from onward.core.program import Phase, Program
from onward.core.recipe import build, rebuilt, recipe_of
from onward.derive.backward import append_backward
from onward.derive.clip import clip_by_global_norm
from onward.derive.update.update import append_update

Shape = tuple[int | str, ...]
_OF_THE_OPS = (append_backward, clip_by_global_norm, append_update)


@dataclass(frozen=True)
class Replay:
    """A Program for other lengths.

    Attributes:
        program: as it was traced.
        shapes: the shape of each data Variable by its name, free lengths by theirs.
    """

    program: Program
    shapes: Mapping[str, Shape]

    def whole(self, lengths: Mapping[str, Any]) -> Program:
        """The Program where the free lengths are these, numbers or symbols."""
        return rebuilt(self.program, self._types(lengths))

    def forward(self, lengths: Mapping[str, Any]) -> Program:
        """Its forward pass alone."""
        recipe = recipe_of(self.program, "for data of another shape", "Feed the shapes it shows")
        return build(recipe.until(Phase.BACKWARD), self._types(lengths))

    @cached_property
    def is_told_by_forward(self) -> bool:
        """Whether all that follows the forward pass is derived of its ops alone, and of rules of JAX's own.

        A rule that someone wrote for a function may ask how long its arrays are; so may a transform.
        """
        steps = () if self.program.recipe is None else self.program.recipe.steps
        later = [step for step in steps if step.phase >= Phase.BACKWARD]
        derived = all(step.function in _OF_THE_OPS for step in later)
        return (
            bool(later)
            and derived
            and not any((op.primal or op.body).has_rule_of_users for op in self.program.ops)
        )

    def _types(self, lengths: Mapping[Any, Any]) -> tuple[Any, ...]:
        assert self.program.signature is not None
        filled = {name: tuple(lengths.get(n, n) for n in shape) for name, shape in self.shapes.items()}
        return tuple(
            s.unflatten(jax.ShapeDtypeStruct(filled[v.name], v.dtype) for v in s.variables)
            for s in self.program.signature.data
        )
