"""The Executables of a Step: one for each shape of the data, and each way in which state is stored."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from threading import RLock
from typing import TYPE_CHECKING, Any

from onward.core.errors import ArgumentError, OnwardError
from onward.core.first_use import at_first_call
from onward.core.program import Program
from onward.core.recipe import rebuilt
from onward.develop.tuned import Tuned
from onward.execute.executable import Executable
from onward.execute.feeds import Feeds, key_of
from onward.execute.layout import Layout
from onward.execute.loop.interrupt import uninterrupted
from onward.execute.portions import Filling
from onward.execute.state import State
from onward.execute.storage.plan import plan as storage_of
from onward.execute.storage.storage import Storage

if TYPE_CHECKING:  # most steps fill up nothing
    from onward.execute.filler import FilledEnd

_filler_of = at_first_call("onward.execute.filler", "filler_of")


class Executables:
    """Finds what runs data of these shapes; data of another shape is traced once more, then remembered.

    Args:
        program: as people gave it.
        make: an Executable of a Program.
        tuning: the Program as it is compiled.
        apart: the names of state that is stored each in a buffer of its own; None: all is.
        check_feeds: look on the host whether labels and ids lie in their range.

    Attributes:
        traces: how often the function was traced again.
        first: for data of the shapes that were traced.
        storage: how the Step stores its state.
        checks: whether there are labels and ids to look at.
    """

    def __init__(
        self,
        program: Program,
        make: Callable[..., Executable],
        tuning: Callable[[Program], Tuned],
        apart: Collection[str] | None,
        check_feeds: bool,
    ) -> None:
        self.program, self.make, self._tuning = program, make, tuning
        self.layout = Layout.of(program)
        self.feeds = Feeds(program)
        self.traces = 0
        self.checks = check_feeds and bool(program.bounds)
        self._lock = RLock()
        is_alone = program.replicas is None and program.partition is None
        self._filler = None if is_alone else _filler_of(program)
        shapes = key_of([self.layout.whole(v) for v in program.inputs])
        first = tuning(program)
        self.notes = first.notes
        self._tuned = {shapes: first}
        if program.code is not None:  # runs as a whole, on arrays as they are
            apart = None
        self.storage = None if apart is None else storage_of(first.program, apart)
        self.first = make(first.program, storage=self.storage)
        self._known = {(self.storage, shapes): self.first}

    @property
    def compilations(self) -> int:
        """How many were compiled: for each shape of the data, each way to lie."""
        return sum(executable.compilations for executable in self._known.values())

    def compile(self, executable: Executable) -> None:
        """Compile ahead of time, once, and count it."""
        with self._lock:
            if not executable.is_compiled:
                executable.compile()

    def find(
        self, state: State, data: tuple[Any, ...], feed: Mapping[str, Any]
    ) -> tuple[Executable, Sequence[Any], Filling | FilledEnd | None]:
        """The Executable for data of these shapes, the data as it takes them, and how they are filled up."""
        values = self.feeds.read(self.feeds.named(data, feed) if feed else data)
        if self.checks:
            self.feeds.check_bounds(values)
        filling = None
        if self._filler is not None:
            values, filling = self._filled(values, self._filler)
        elif self.first.is_shared:
            values = self.first.feed(self.feeds.convert(values))
        try:
            return self._known[state.storage, key_of(values)], values, filling
        except (KeyError, AttributeError):
            values = self.feeds.convert(values)
        with self._lock:
            return self._found(state.storage, values), values, filling

    @uninterrupted
    def _found(self, storage: Storage | None, values: Sequence[Any]) -> Executable:
        """The Executable for data of these shapes on state in this storage."""
        key = storage, key_of(values)
        if key not in self._known:
            tuned = self._tuned.get(key[1]) or self._retraced(values)
            self._known[key] = self.make(tuned.program, storage=storage)
        return self._known[key]

    def _filled(self, values: Sequence[Any], filler: Any) -> tuple[Sequence[Any], Filling | FilledEnd | None]:
        """The batch of all processes, filled up so that the devices divide it."""
        if not all(hasattr(x, "shape") for x in values) or self.first.is_shared:
            values = self.feeds.convert(values)
        filling = filler.filling(values)
        if filling is not None:
            values = filler.filled(self.feeds.convert(values), filling)
        return self.first.feed(values), filling

    def _retraced(self, values: Sequence[Any]) -> Tuned:
        """The Program for data of other shapes, by replaying its recipe, as it is compiled."""
        try:
            program = rebuilt(self.program, self.feeds.types(values))
        except OnwardError as error:
            raise ArgumentError(self._misfit(values, str(error))) from error
        self.traces += 1
        if Layout.of(program) != self.layout:
            raise ArgumentError(self._misfit(values, "the state would be another"))
        tuned = self._tuned[key_of(values)] = self._tuning(program)
        return tuned

    def _misfit(self, values: Sequence[Any], reason: str) -> str:
        wrong = [
            f"{v.name!r} is {v.dtype}{list(value.shape)} (traced as {v.type})"
            for v, value in zip(map(self.layout.whole, self.program.inputs), values, strict=True)
            if tuple(value.shape) != v.shape
        ]
        unread = [v.name for s in self.feeds.structures for v in s.variables if v not in self.feeds.inputs]
        note = f" (What is not fed was taken to follow the batch: {', '.join(unread)}.)" if unread else ""
        return (
            f"{self.program.name}: {', '.join(wrong)}, and the Program cannot be built for it: {reason}{note}"
        )
