"""How parameters are split over the axes ``fsdp`` and ``tensor``, and what a device keeps of them then."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from jax.sharding import PartitionSpec

from onward.core.cost import size
from onward.core.meshes import parameters_of, part_size
from onward.core.program import Variable
from onward.core.words import Kind, Pass
from onward.distribute.layout.families import Families
from onward.distribute.layout.layers import LayerPart, RepeatedLayers
from onward.distribute.layout.tensor import SplitFamily

FSDP, TENSOR, DATA = "fsdp", "tensor", "data"
Specs = Mapping[str, PartitionSpec]


@dataclass(frozen=True)
class StageShare:
    """The share of one stage of a pipeline: so many layers, and what is before or behind all of them."""

    layers: int
    begins: bool = True
    ends: bool = True

    def of(self, parts: Iterable[LayerPart], count: int) -> float:
        """Which part of something that belongs to these parts a stage has."""
        whole = {LayerPart.BEFORE: self.begins, LayerPart.AFTER: self.ends}
        return (
            1.0
            if any(whole.get(part, False) for part in parts)
            else (self.layers / count if LayerPart.LAYERS in parts else 0.0)
        )


class Placing:
    """The parameters and other state of a Program, split in any way.

    Attributes:
        families: those that tensor parallelism may split.
        used: for each parameter the parts of the forward pass that read it.
    """

    def __init__(self, found: Families, layers: RepeatedLayers, families: Sequence[SplitFamily]) -> None:
        self.found, self.layers, self.families = found, layers, families
        self.program = found.program
        self.used = self._used()
        self._like = parameters_of(self.program)
        self._gradients = dict(self.program.gradients)
        self.specs = cache(self._specs)
        self.kept = cache(self._kept)
        self.one_layer = cache(self._one_layer)

    def _used(self) -> Mapping[Variable, frozenset[LayerPart]]:
        used: dict[Variable, set[LayerPart]] = {v: set() for v in self.program.parameters}
        for step in self.found.steps:
            makes_weights = all(v in self.found.weights for v in step.step.outputs)
            if step.made_by is Pass.FORWARD and not makes_weights:
                part = self.layers.part(self.program.ops[step.op])
                for v in step.operands:
                    for parameter in self.found.weights.get(v, ()) if v is not None else ():
                        used[parameter].add(part)
        return {v: frozenset(parts or {LayerPart.AFTER}) for v, parts in used.items()}

    def split(self, tensor: int) -> list[SplitFamily]:
        """The families that so many devices split."""
        return [one for one in self.families if tensor > 1 and one.divides % tensor == 0]

    def _specs(self, tensor: int, fsdp: int) -> Specs:
        """How each parameter is split; what is whole is not among them."""
        at = dict(d for one in self.split(tensor) for d in one.parameters)
        found = ((v.name, self._spec(v, at.get(v), tensor, fsdp)) for v in self.program.parameters)
        return {name: spec for name, spec in found if len(spec)}

    def _spec(self, v: Variable, split: int | None, tensor: int, fsdp: int) -> PartitionSpec:
        axes: dict[int, str | tuple[str, str]] = {} if split is None else {split: TENSOR}
        if fsdp > 1:
            free = [i for i in range(v.ndim) if (v, i) not in self.found.turns and i != split]
            dividing = [(v.shape[i], -i) for i in free if v.shape[i] and v.shape[i] % fsdp == 0]
            if dividing:
                axes[-max(dividing)[1]] = FSDP
            elif split is not None and v.shape[split] % (tensor * fsdp) == 0:
                axes[split] = TENSOR, FSDP
        return PartitionSpec(*(axes.get(i) for i in range(max(axes, default=-1) + 1)))

    def _kept(self, tensor: int, fsdp: int, stage: StageShare) -> tuple[float, float, float]:
        """The bytes of parameters, of other state, and of gradients that a device of a stage keeps."""
        specs, mesh = self.specs(tensor, fsdp), {TENSOR: tensor, FSDP: fsdp}
        parameters = other = gradients = 0.0
        for v in self.program.state:
            like = self._like.get(v, v)
            part = size(v) // max(v.size, 1) * part_size(v, specs.get(like.name), mesh)
            share = stage.of(self.used[like], self.layers.count) if like in self.used else 1.0
            if v.kind is Kind.PARAMETER:
                parameters += share * part
                gradient = self._gradients.get(v)
                gradients += share * part * (gradient.dtype.itemsize / v.dtype.itemsize if gradient else 0)
            else:
                other += share * part
        return parameters, other, gradients

    def _one_layer(self, tensor: int) -> tuple[float, float]:
        """The bytes of the parameters of one layer, and of the largest parameter of no layer."""
        sizes = {
            v: size(v) / v.size * part_size(v, self.specs(tensor, 1).get(v.name), {TENSOR: tensor})
            for v in self.program.parameters
            if v.size
        }
        inside = sum(n for v, n in sizes.items() if self.used[v] == {LayerPart.LAYERS})
        outside = max((n for v, n in sizes.items() if self.used[v] != {LayerPart.LAYERS}), default=0.0)
        return inside / self.layers.count, outside
