"""The compiled computations of a Model, kept for the lengths that were asked for last.

A Model remembers what is compiled for it, for every length there ever was. Here each length has a memory of
its own, which is forgotten with it. It holds no parameters: they are those of the served model, as they are
when it is asked.
"""

from __future__ import annotations

from threading import Lock

from onward.execute.state import State
from onward.fit.model import Model

Lengths = tuple[tuple[int, ...], ...]  # the shape of one example of each input
MOST_LENGTHS = 64  # each is compiled for every batch size, which takes memory


class CompiledByLengths:
    """Gives the model with the memory for some lengths; any number of threads may ask."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self._lock = Lock()
        self._empty: dict[Lengths, Model] = {}  # what was asked last stands last

    def model_for(self, lengths: Lengths) -> Model:
        """A Model with the values of now, and with what was compiled for these lengths before."""
        with self._lock:
            empty = self._empty.pop(lengths, None) or self._without_values()
            self._empty[lengths] = empty
            if len(self._empty) > MOST_LENGTHS:
                del self._empty[next(iter(self._empty))]
        full = empty.copy()  # shares what is compiled; who keeps the values keeps them alive
        full.publish(self.model.together)
        return full

    def __len__(self) -> int:
        return len(self._empty)

    def __contains__(self, lengths: Lengths) -> bool:
        return lengths in self._empty

    def _without_values(self) -> Model:
        layout = self.model.state.layout
        empty = Model.of(self.model.topology, dict.fromkeys(layout.variables), self.model.about)
        empty.publish(State(layout, ()))
        empty.once("test", lambda: self.model.test_program)
        empty.told_of_training()
        return empty
