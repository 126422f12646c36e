"""Why a compiled step exchanges numbers between devices: each collective, with the op and the line."""

from __future__ import annotations

import inspect
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from textwrap import fill
from typing import Any

import jax
from jax.sharding import NamedSharding

from onward.core.columns import columns
from onward.core.errors import ArgumentError, GraphError
from onward.core.program import Op, Program
from onward.core.show import human_bytes
from onward.core.structure import describe
from onward.core.walk import producers
from onward.distribute.pipeline.cut import Pipeline
from onward.execute.pipelined import PipelineStep
from onward.execute.processes import expect_all_stages
from onward.execute.stage_executables import StageExecutables
from onward.execute.step import Step
from onward.explain.collectives.found import KINDS, CompiledCollective, ExchangedValue, collectives_in
from onward.explain.collectives.hlo_text import CompiledText
from onward.explain.compiling.once import Marks, compiled_once

_WIDTH = 100
_SHOWN = 3
_NO_STEP = (
    "collectives takes a Program, a step, or a function and its arguments, not {found}. Write "
    "collectives(program), collectives(step, state, *data), or collectives(train_step, *args)."
)
_NO_ARGUMENTS = (
    "collectives: {name} is compiled for its arguments, and {error}. Give them as in a call of it: "
    "collectives({name}, *args), arrays or jax.ShapeDtypeStruct where they are to lie."
)


@dataclass(frozen=True)
class Collectives:
    """The collectives of a compiled step, those of most bytes first; print them, or go through ``found``.

    Attributes:
        name: of the step.
        mesh: the names and lengths of the axes of its devices; empty where there is none.
        found: the collectives.
    """

    name: str
    mesh: Mapping[str, int]
    found: tuple[CompiledCollective, ...]

    @property
    def bytes(self) -> int:
        """The bytes of all in one step; those in a loop of unknown length once."""
        return sum(c.bytes * (c.times or 1) for c in self.found)

    def expect(self, *kinds: str) -> Collectives:
        """Return it if all collectives are of these kinds, such as ``"all-reduce"``.

        Raises:
            GraphError: one of another kind, each with its op and line.

        Example:
            >>> import jax.numpy as jnp, onward as ow
            >>> program = ow.SGD(0.1).minimize(lambda w, x: jnp.mean(x @ w), jnp.ones(3), jnp.ones((8, 3)))
            >>> len(ow.collectives(ow.replicate(program, devices=4)).expect("all-reduce"))
            1
        """
        if unknown := [kind for kind in kinds if kind not in KINDS]:
            raise ArgumentError(
                f"expect: {unknown[0]!r} is not a collective; expected any of {', '.join(KINDS)}."
            )
        others = tuple(c for c in self.found if c.kind not in kinds)
        if others:
            told = replace(self, found=others)
            raise GraphError(f"Expected {', '.join(kinds) or 'none'} alone, and there are others. {told}")
        return self

    def __iter__(self) -> Iterator[CompiledCollective]:
        return iter(self.found)

    def __len__(self) -> int:
        return len(self.found)

    def __str__(self) -> str:
        axes = " x ".join(f"{name} {size}" for name, size in self.mesh.items())
        on = f" on {prod(self.mesh.values())} devices ({axes})" if self.mesh else ""
        many = f"{len(self.found)} collective{'' if len(self.found) == 1 else 's'}"
        head = f"{self.name}{on}: {many}, {human_bytes(self.bytes)} a step"
        return "\n".join([head, *(line for c in self.found for line in ("", *_lines(c)))])

    __repr__ = __str__


def _lines(c: CompiledCollective) -> Iterator[str]:
    along = f"along {', '.join(c.axes)}" if c.axes else f"{c.devices} devices" if c.devices else ""
    often = {1: "", None: "in a loop"}.get(c.times, f"{c.times} times{', in a loop' * (not c.part)}")
    yield "  ".join(filter(None, (c.kind, human_bytes(c.bytes), along, c.part, often)))
    rows = [("  " + v.type, v.op, v.made_by, v.line) for v in c.values[:_SHOWN]]
    told = columns(rows).split("\n")
    for i, line in enumerate(told):
        yield line
        if i + 1 == len(rows) or c.values[i].why != c.values[i + 1].why:
            yield fill(c.values[i].why, _WIDTH, initial_indent="    ", subsequent_indent="    ")
    if len(c.values) > _SHOWN:
        yield f"  {len(c.values) - _SHOWN} more"


def collectives(
    step: Program | Step | Pipeline | PipelineStep | Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Collectives:
    """Find the exchanges between devices in a compiled step, each with the op and the line that need it.

    The compiled text is read: what XLA put in where arrays are sharded as well as what ``replicate``,
    ``jax.shard_map`` and ``jax.pmap`` write. Each collective has its bytes, the axes of the mesh along which
    devices exchange, how often a loop runs it, the primitive of JAX it is for with the user's line, and a
    reason where the text shows one: an exchange that is written there, the sum of a product whose summed
    dimension is split, an argument that is split and needed whole. Otherwise it says what the collective
    does. The step is compiled for it, and not run.

    Args:
        step: a Program, compiled as ``compile`` does; a step that ``compile`` returned, with a State and data
            where they are to lie; a Pipeline, or a step of one, whose stages exchange what their meshes split
            (what they hand to each other is not among it); a function of someone else, under ``jax.jit`` or
            ``jax.pmap``; or what ``lower(...).compile()`` of that returned.
        args: what the step is called with: arrays where they lie on devices, or ``jax.ShapeDtypeStruct`` with
            a sharding.
        kwargs: the same by name.

    Raises:
        ArgumentError: none of these; arguments beside a Program or Pipeline; a Pipeline in several processes.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> program = ow.SGD(0.1).minimize(lambda w, x: jnp.mean(x @ w), jnp.ones(3), jnp.ones((8, 3)))
        >>> found = ow.collectives(ow.replicate(program, devices=4))
        >>> [(c.kind, c.axes, sum(v.type == "f32[3]" for v in c.values)) for c in found]
        [('all-reduce', ('replicas',), 1)]
    """
    if isinstance(step, Program | Pipeline | PipelineStep) and (args or kwargs):
        raise ArgumentError(f"collectives takes a {type(step).__name__} alone: collectives(program).")
    if isinstance(step, Pipeline | PipelineStep):
        return _of_stages(step if isinstance(step, Pipeline) else step.pipeline)
    if isinstance(step, Program):
        found = compiled_once(step)
        return _read(step.name, found.text, found.shardings, found.ops, found.names)
    marks = Marks()
    if isinstance(step, Step):
        _expect_arguments(step, args, kwargs)
        text, shardings, names = step.compiled_text(marks, *args, **kwargs)
        return _read(step.program.name, text, shardings, marks.ops, names)
    return _of_function(step, args, kwargs)


def _of_stages(pipeline: Pipeline) -> Collectives:
    """The collectives of all parts of all stages, those of a micro-batch as often as there are of these."""
    expect_all_stages("collectives")
    marks, found = defaultdict[Program, Marks](Marks), []
    with _with_lines():
        stages = StageExecutables(pipeline, (), {}, lambda program: marks[program](program))
    for part in stages.compiled_parts():
        names = {f"state[{i}]": v.name for i, v in enumerate(part.program.state)}
        made = producers(part.program)
        sums = {f"totals[{i}]": made[v] for i, v in enumerate(part.sums) if v in made}
        ops = {**marks[part.program].ops, **sums}
        for c in _read(part.name, part.call.as_text() or "", _shardings(part.call), ops, names):
            values = tuple(
                v if v.made_by or v.op in names.values() else replace(v, line="") for v in c.values
            )
            often = None if c.times is None else part.times * c.times
            found.append(replace(c, times=often, values=values, part=part.name))
    mesh = {} if pipeline.partition is None else dict(pipeline.partition.mesh)
    name = f"{pipeline.program.name} in {pipeline.schedule.stages} stages"
    return Collectives(name, mesh, _most_first(found))


def _named(v: ExchangedValue, names: Mapping[str, str], ops: Iterable[Op]) -> ExchangedValue:
    """A value with the name of state or data in place of the argument's, and who reads it."""
    why = re.sub(r"argument (\w+\[\d+\])", lambda m: names.get(m[1], m[0]), v.why)
    if (name := names.get(v.op)) is None:
        return replace(v, why=why)
    readers = (op for op in ops if op.source is not None and any(x.name == name for x in op.inputs))
    reader = next(readers, None)
    read = "" if reader is None else f"; {reader.type} reads it"
    return replace(v, op=name, why=why + read, line=str(reader.source) if reader is not None else "")


def _of_function(step: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Collectives:
    if not callable(step) and not hasattr(step, "as_text"):
        raise ArgumentError(_NO_STEP.format(found=describe(step)))
    compiled = step if hasattr(step, "as_text") else _compiled(step, args, kwargs)
    given = (x.sharding for x in jax.tree.leaves((args, kwargs)) if isinstance(x, jax.Array))
    name = getattr(step, "__name__", type(step).__name__)
    return _read(name, compiled.as_text() or "", (*_shardings(compiled), *given), {}, {})


def _compiled(step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    lower = getattr(step, "lower", None) or jax.jit(step).lower
    _expect_arguments(step, args, kwargs)
    with _with_lines():
        return lower(*args, **kwargs).compile()


def _expect_arguments(step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise ``ArgumentError`` unless a function takes these arguments, as far as it tells which it takes."""
    try:
        signature = inspect.signature(step)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        name = getattr(step, "__name__", "step")
        raise ArgumentError(_NO_ARGUMENTS.format(name=name, error=error)) from error


@contextmanager
def _with_lines() -> Iterator[None]:
    """Let what is compiled have its own lines, not those of an older file that the cache knows."""
    option = "jax_compilation_cache_include_metadata_in_key"
    before = getattr(jax.config, option)
    jax.config.update(option, True)
    try:
        yield
    finally:
        jax.config.update(option, before)


def _shardings(compiled: Any) -> Iterable[Any]:
    try:
        return jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    except (AttributeError, NotImplementedError):
        return ()


def _read(
    name: str, text: str, shardings: Iterable[Any], marks: Mapping[str, Op], names: Mapping[str, str]
) -> Collectives:
    meshes = {s.mesh for s in shardings if isinstance(s, NamedSharding) and s.mesh.size > 1}
    mesh = max(meshes, key=lambda m: m.size, default=None)
    axes = {} if mesh is None else dict(mesh.shape)
    count = 1 if mesh is None else mesh.size
    found = [
        replace(c, values=tuple(_named(v, names, marks.values()) for v in c.values))
        for c in collectives_in(CompiledText.of(text), axes, count, marks)
    ]
    return Collectives(name, axes, _most_first(found))


def _most_first(found: Iterable[CompiledCollective]) -> tuple[CompiledCollective, ...]:
    return tuple(sorted(found, key=lambda c: -c.bytes * (c.times or 1)))
