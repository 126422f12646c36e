"""The dimensions that tensor parallelism splits: columns of one weight, rows of the one that contracts them.

A family of dimensions can be split over an axis if, in the forward pass, all that is computed along it is
computed number by number, by groups such as the heads of an attention, or by a product that contracts it with
rows of a parameter. Then each device computes its part alone, and one sum over devices stands behind that
product, and one, in the backward pass, behind the gradient of what entered.

Source: Shoeybi et al., Megatron-LM, 2019, section 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from onward.core.cost import size
from onward.core.primitives.table import of
from onward.core.program import Variable
from onward.core.words import Kind, Pass
from onward.distribute.layout.families import Dimension, Families, WalkedStep

NOTHING_FITS = (
    "tensor parallelism is left out: no product by a parameter is followed, number by number, by one that "
    "contracts its columns with the rows of another parameter."
)


@dataclass(frozen=True, eq=False)
class SplitFamily:
    """A family that tensor parallelism may split.

    Attributes:
        family: the dimension that stands for it.
        parameters: the parameters in it, and which dimension of each.
        divides: the number of parts divides this.
        covered: bytes of these parameters.
        summed: bytes of what is summed over devices in the forward pass.
    """

    family: Dimension
    parameters: tuple[Dimension, ...]
    divides: int
    covered: int
    summed: int


def split_families(found: Families) -> tuple[SplitFamily, ...]:
    """The families that may be split, no parameter in two; first those that send least for what they split.

    >>> import jax.numpy as jnp, onward as ow
    >>> from onward.distribute.layout.families import families
    >>> def loss(w, x):
    ...     return jnp.mean((jnp.tanh(x @ w["up"]) @ w["down"]) ** 2)
    >>> weights = {"up": jnp.ones((4, 8)), "down": jnp.ones((8, 2))}
    >>> (one,) = split_families(families(ow.trace(loss, weights, jnp.ones((6, 4)))))
    >>> sorted((v.name, i) for v, i in one.parameters), one.divides
    ([('down', 0), ('up', 1)], 8)
    """
    fitting = _Uses(found).fitting()
    fitting.sort(key=lambda one: (one.summed / one.covered, -one.covered, str(one.parameters[0][0].name)))
    taken: set[Variable] = set()
    chosen = []
    for one in fitting:
        if taken.isdisjoint(v for v, _ in one.parameters):
            taken.update(v for v, _ in one.parameters)
            chosen.append(one)
    return tuple(chosen)


class _Uses:
    """A walk that notes what the forward pass does along each family."""

    def __init__(self, found: Families) -> None:
        self.found = found
        self.columns: set[Dimension] = set()
        self.rows: set[Dimension] = set()
        self.whole: set[Dimension] = set()
        self.summed: dict[Dimension, int] = {}
        self.whole.update(found.find((v, i)) for v in found.program.inputs for i in range(v.ndim))
        for step in found.steps:
            if step.made_by is Pass.FORWARD:
                self._note(step)

    def _note(self, step: WalkedStep) -> None:
        find, weights = self.found.find, self.found.weights
        if step.step.programs == () and step.call is None and step.step.body is not None:
            self.whole.update(find((v, i)) for v in step.step.inputs for i in range(v.ndim))
        self.whole.update(find(d) for d in step.needs if d[0] not in weights)
        self.whole.update(find(d) for d in step.needs if d[0] in weights and d not in self.found.turns)
        read = [v for v in step.operands if v is not None and v in weights]
        is_product = of(step.step.kind).is_product and len(read) == 1
        for group in step.sums:
            families = {find(d) for d in group}
            if is_product and len(group) == 2:
                self.rows |= families
                for family in families:
                    more = step.times * sum(map(size, step.step.outputs))
                    self.summed[family] = self.summed.get(family, 0) + more
            else:
                self.whole |= families
        if is_product:
            contracted = {d for group in step.sums for d in group}
            self.columns |= {find((v, i)) for v in read for i in range(v.ndim) if (v, i) not in contracted}

    def fitting(self) -> list[SplitFamily]:
        """Those with columns and rows that nothing needs whole."""
        return [
            one
            for family, members in self.found.members().items()
            if family in self.columns and family in self.rows and family not in self.whole
            if (one := self._family(family, members)) is not None
        ]

    def _family(self, family: Dimension, members: list[Dimension]) -> SplitFamily | None:
        owned = [(v, i) for v, i in members if v.kind is Kind.PARAMETER and v in self.found.weights]
        own = sorted((d for d in owned if d[0] in self.state), key=lambda d: d[0].name)
        parameters = {v for v, _ in own}
        covered = sum(map(size, parameters))
        if len(parameters) < len(own) or not covered:
            return None
        divides = gcd(*(v.shape[i] for v, i in members))
        return SplitFamily(family, tuple(own), divides, covered, self.summed[family])

    @property
    def state(self) -> frozenset[Variable]:
        """The parameters of the whole Program."""
        return frozenset(self.found.program.parameters)
