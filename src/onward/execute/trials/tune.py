"""``tune``: which options of the compiler make a Program fast on this machine, found by trying."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any

import jax
import numpy as np
from jax import export

from onward.core.columns import columns
from onward.core.compiler import OPTION, compiler_options
from onward.core.errors import ArgumentError, OnwardError
from onward.core.program import Program
from onward.core.structure import describe, is_count, is_number
from onward.develop.attention.fuse import fuse_attention
from onward.develop.attention.report import attentions_of
from onward.execute.cores import is_in_flags
from onward.execute.disk.encoding import encode
from onward.execute.host_memory import LARGE, arrays_of, can_keep_host_memory, in_pieces, is_wanted
from onward.execute.options import OptionSet, all_options, option_set
from onward.execute.state import State
from onward.execute.step import Step
from onward.execute.trials.agree import agree, rounding_of
from onward.execute.trials.child import ARRAYS
from onward.execute.trials.remembered import machine, remember
from onward.execute.trials.trial import OptionsProcess, TrialError
from onward.execute.tuning import Tuning

_LASTING = 0.05  # seconds of steps that one set of options takes in a round, at least
_GAINS = 0.97  # of the default's time: what is nearer to it may be noise,
_OFTEN = 0.75  # and so may what is not faster in as many rounds
_ROUNDINGS = 3

LIBRARIES = (
    OptionSet("no YNN", {OPTION: ""}),
    OptionSet("YNN for single products", {OPTION: "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"}),
    OptionSet(
        "oneDNN products",
        {
            "xla_cpu_use_onednn": True,
            "xla_cpu_experimental_onednn_fusion_type": "LIBRARY_FUSION_TYPE_DOT",
        },
    ),
)
"""Libraries to which XLA's CPU compiler gives products; by default to YNNPACK, fused with what is around."""


@dataclass(frozen=True)
class Tried:
    """One set of options beside the default.

    Attributes:
        options: what was tried.
        seconds: the median over the rounds of a step's time; None if it was not timed.
        ratio: the median over the rounds of its time over that of the default in the same round.
        low: the least such ratio.
        high: the greatest.
        fault: why it is out: it died, hung, or computes something else; empty if nothing is wrong.
        often: the part of the rounds in which it was faster.
    """

    options: OptionSet
    seconds: float | None = None
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    fault: str = ""
    often: float = 0.0

    @property
    def gains(self) -> bool:
        """Whether it is faster than the default beyond noise."""
        return self.ratio is not None and self.ratio <= _GAINS and self.often >= _OFTEN

    @property
    def row(self) -> tuple[str, str, str, str, str]:
        """As words in columns."""
        name, said = self.options.name, "equal"
        if self.seconds is None or self.ratio is None:
            return name, "", "", "", self.fault
        return (
            name,
            f"{1e3 * self.seconds:.3g}",
            f"{self.ratio:.2f}",
            f"{self.low:.2f}..{self.high:.2f}",
            said,
        )


@dataclass(frozen=True)
class Trials:
    """The options that ``tune`` tried; ``print`` shows a table.

    Attributes:
        program: the name of the Program.
        tried: one for each set of options, the default first.
        best: the fastest that computes the same; the default where none gains 3 %, and that in most rounds.
        rounds: how often each was timed.
        file: where the best is remembered; None if it is not.
    """

    program: str
    tried: tuple[Tried, ...]
    best: OptionSet
    rounds: int
    file: Path | None = None

    def __str__(self) -> str:
        here = machine()
        head = (
            f"Options of {self.program} on {here['devices']} ({here['cores']} cores, jax {here['jax']}), "
            f"{self.rounds} round{'' if self.rounds == 1 else 's'}"
        )
        rows = [("options", "ms", "ratio", "min..max", "results"), *(t.row for t in self.tried)]
        told = [f"best: {self.best.name}" + (f" ({self.best})" if self.best.words else "")]
        if self.file is not None:
            told.append(f"remembered in {self.file}: compile(program, options='tuned')")
        return "\n".join((head, columns(rows, right=(1, 2)), *told))

    __repr__ = __str__


def tune(
    what: Step | Program,
    state: State,
    *batch: Any,
    options: Mapping[str, Any] | None = None,
    rounds: int = 15,
    limit: float = 120.0,
    remember_best: bool = True,
) -> Trials:
    """Try options of XLA's CPU compiler on a step, each in a process of its own, and remember the fastest.

    An option may crash XLA, make it hang, or compute something else; then it is named and out. Results are
    equal if they are apart by no more than rounding makes of the default's own, found by changing its inputs
    in the last bit. What is equal runs in turn, round by round, from the same State and batch, which both
    stay usable. ``compile(program, options="tuned")`` takes the best from then on, in this process and later
    ones on this machine with the same JAX. It is remembered in the folder ONWARD_CACHE, or ``onward`` in the
    system's folder of caches, such as ~/.cache/onward.

    Args:
        what: a Program, or a Step of it, which is tried with what else it was compiled with.
        state: the State before a step.
        batch: the data of a step.
        options: further sets by name, each options of XLA or an OptionSet: ``{"wide":
            {"xla_cpu_prefer_vector_width": 512}}``. Tried beside the default, in place of the own list.
        rounds: how often each is timed; a round of one lasts 0.05 seconds at least.
        limit: seconds after which a process that gives no answer is ended.
        remember_best: write the best to disk.

    Returns:
        What was tried; ``.best`` can be given to ``compile(program, options=...)``.

    Raises:
        ArgumentError: no step, no State, JAX does not run on a CPU; a Program that calls Python back, or
            fails under the default options.

    Example:
        >>> import onward as ow
        >>> def faster(program, state, *batch):
        ...     found = ow.tune(program, state, *batch)
        ...     print(found)
        ...     return ow.compile(program, options=found.best)
    """
    step = _step_of(what)
    _expect(step, state, rounds, limit)
    chosen = (
        None if options is None else [option_set(v, f"tune: options[{k!r}]", k) for k, v in options.items()]
    )
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="onward-tune-")))
        tried = _Contest(_StepOnDisk(folder, step, state, batch), limit, stack)
        for found in _list(tried) if chosen is None else chosen:
            tried.add(found)
        tried.measure(rounds)
    rows = tried.rows()
    best = min((t for t in rows if t.gains), key=lambda t: t.ratio or 1.0, default=rows[0])
    file = remember(step.program, best.options, {"ratio": best.ratio}, step.cores) if remember_best else None
    return Trials(step.program.name, rows, best.options, rounds, file)


class _StepOnDisk:
    """A step on disk, as other processes take it, for each way to transform it, and its arrays."""

    def __init__(self, folder: Path, step: Step, state: State, batch: Sequence[Any]) -> None:
        self.folder, self._step, self._state, self._batch = folder, step, state, batch
        self.steps: dict[tuple[bool, bool], str] = {}
        self._arrays: dict[str, list[Any]] = {}  # those of each step, of which XLA makes pieces
        self.rounding = rounding_of(step.program)
        executable, own, values = self._prepared(True, False)
        self.has_fission = any(note.startswith("fission") for note in self._plain.plan().notes)
        encoded = [[encode("array", x) for x in group] for group in executable.grouped(own, values)]
        self.forms = [[[f.dtype, f.shape, f.generator] for f, _ in group] for group in encoded]
        stored = ((f"{i}_{j}", x) for i, group in enumerate(encoded) for j, (_, x) in enumerate(group))
        arrays: dict[str, Any] = dict(stored)
        np.savez(folder / ARRAYS, **arrays)
        replicas = executable.program.replicas
        self.devices = 1 if replicas is None else replicas.count

    def job(self, options: OptionSet, is_first: bool) -> dict[str, Any]:
        """The job of a process, as ``trials.child`` reads it."""
        here: Any = jax.config
        config: dict[str, Any] = {"jax_enable_x64": bool(here.jax_enable_x64), "jax_platforms": "cpu"}
        if self.devices > 1 and not is_in_flags():
            config["jax_num_cpu_devices"] = self.devices
        step = self._file(options.fission is not False, options.attention is True)
        pieces = in_pieces(self._arrays[step], options.keep_memory)
        return {
            "folder": str(self.folder),
            "step": step,
            "forms": self.forms,
            "options": {**pieces, **all_options(options.compiler)},
            "keep_memory": options.keep_memory,
            "config": config,
            "rounding": self.rounding,
            "roundings": _ROUNDINGS if is_first and self.rounding else 0,
        }

    @property
    def has_attention(self) -> bool:
        """Whether ``fuse_attention`` would compute less of it than is written."""
        try:
            fused = fuse_attention(self._step.program)
        except OnwardError:
            return False
        return any(found.kernel is not None for found in attentions_of(fused))

    def _prepared(self, fission: bool, attention: bool) -> Any:
        self._plain = self._step.uncompiled(fission, attention)
        return self._plain.prepared(self._state, *self._batch)

    def _file(self, fission: bool, attention: bool) -> str:
        """The name of the file of the step, written when it is first asked for."""
        way = fission, attention
        if way not in self.steps:
            executable, *_ = self._prepared(fission, attention)
            name = f"{len(self.steps)}.bin"
            try:
                written = export.export(executable.jitted())(*executable.arguments).serialize()
            except (ValueError, NotImplementedError) as error:
                raise ArgumentError(
                    f"tune: {self._step.program.name!r} cannot be given to another process: {error}"
                ) from error
            (self.folder / name).write_bytes(written)
            self.steps[way], self._arrays[name] = name, list(arrays_of(executable.program))
        return self.steps[way]


class _Contest:
    """The processes that run, with their times, and those that are out; the first is the default."""

    def __init__(self, written: _StepOnDisk, limit: float, stack: ExitStack) -> None:
        self.written, self._limit, self._stack = written, limit, stack
        self.options = [OptionSet()]
        self.faults: dict[int, str] = {}
        self.times: dict[int, list[float]] = {}
        self._running: dict[int, OptionsProcess] = {}
        try:
            first = self._start(0)
        except TrialError as error:
            raise ArgumentError(f"tune: under the default options the process of its own {error}") from error
        count = _ROUNDINGS if written.rounding else 0
        self._expected = first.results(), [first.results(f"{i}-") for i in range(count)]
        self.temporary = first.temporary

    def add(self, options: OptionSet) -> None:
        """Start one more set of options, and compare what it computes."""
        self.options.append(options)
        number = len(self.options) - 1
        try:
            trial = self._start(number)
        except TrialError as error:
            self.faults[number] = f"died: {error}"
            return
        if not agree(trial.results(), *self._expected, self.written.rounding):
            self._end(number, "not equal")

    def measure(self, rounds: int) -> None:
        """Run all in turn, every other round in the opposite order."""
        counts = {number: self._timed(number, 1) for number in list(self._running)}
        counts = {number: self._timed(number, 1) for number in list(self._running)}
        for turn in range(rounds):
            numbers = list(self._running)
            for number in numbers if turn % 2 == 0 else reversed(numbers):
                found = self._timed(number, ceil(_LASTING / max(counts[number] or _LASTING, 1e-6)))
                if found is not None:
                    self.times.setdefault(number, []).append(found)

    def rows(self) -> tuple[Tried, ...]:
        """The findings, in order."""
        return tuple(map(self._row, range(len(self.options))))

    def _row(self, number: int) -> Tried:
        if number in self.faults:
            return Tried(self.options[number], fault=self.faults[number])
        times = self.times[number]
        ratios = [a / b for a, b in zip(times, self.times[0], strict=True)]
        often = sum(r < 1 for r in ratios) / len(ratios)
        numbers = median(times), median(ratios), min(ratios), max(ratios)
        return Tried(self.options[number], *numbers, often=often)

    def _start(self, number: int) -> OptionsProcess:
        job = self.written.job(self.options[number], number == 0)
        trial = OptionsProcess(self.written.folder / str(number), job, self._limit)
        self._stack.callback(trial.close)
        self._running[number] = trial
        return trial

    def _timed(self, number: int, steps: int) -> float | None:
        try:
            return self._running[number].seconds(steps)
        except TrialError as error:
            if number == 0:
                raise ArgumentError(
                    f"tune: under the default options the process of its own {error}"
                ) from error
            self._end(number, f"died: {error}")
            return None

    def _end(self, number: int, fault: str) -> None:
        self.faults[number] = fault
        self._running.pop(number).close()


def _list(tried: _Contest) -> Iterator[OptionSet]:
    """The sets of options that are worth a trial on a CPU."""
    own = compiler_options()
    yield from (found for found in LIBRARIES if found.compiler != own)
    if tried.written.has_fission:
        yield OptionSet("no fission", fission=False)
    if tried.written.has_attention:
        yield OptionSet("fused attention", attention=True)
    if tried.temporary >= LARGE and can_keep_host_memory():
        other = not is_wanted(None)
        yield OptionSet("memory kept" if other else "memory not kept", keep_memory=other)


def _step_of(what: Any) -> Step:
    if isinstance(what, Step):
        return what
    if isinstance(what, Program):
        return Step(what, (), True, ahead=False, tuning=Tuning(), apart=())
    raise ArgumentError(
        f"tune takes a Program or a Step, not {describe(what)}. Make one: step = ow.compile(program); "
        "ow.tune(step, state, *batch)."
    )


def _expect(step: Step, state: Any, rounds: Any, limit: Any) -> None:
    if not isinstance(state, State):
        raise ArgumentError(
            f"tune: the second argument is the State, not {describe(state)}: ow.tune(step, "
            "step.init(params), *batch)."
        )
    if not is_count(rounds):
        raise ArgumentError(f"tune: rounds is {describe(rounds)}; expected a whole number, at least 1.")
    if not is_number(limit) or not limit > 0:
        raise ArgumentError(f"tune: limit is {describe(limit)}; expected seconds, more than 0.")
    if (platform := jax.default_backend()) != "cpu":
        raise ArgumentError(f"tune tries options of XLA's CPU compiler, and JAX runs on {platform} here.")
    if jax.process_count() > 1:
        raise ArgumentError("tune: a step over several processes cannot be tried in one. Tune one device's.")
