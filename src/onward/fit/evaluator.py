"""Evaluator = {Model, activations}: computes outputs, and remembers what any layer gave on the way.

evaluator = Evaluator(model)                # costs nothing: the parameters are the model's
evaluator.forward(images=images)
evaluator.activation("fc_1")
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from operator import itemgetter
from typing import Any

import jax
import numpy as np

from onward.core.compiler import compiled_alone
from onward.core.errors import ArgumentError, NotPickled, StateError, nearest
from onward.core.pointing import Pointing
from onward.core.program import Program, Variable
from onward.core.walk import find, name_of
from onward.distribute.split.in_words import fingerprint
from onward.execute.feeds import data_names, unshared
from onward.execute.loop.interrupt import uninterrupted
from onward.execute.loop.reader import LoopReader
from onward.execute.out import Out
from onward.execute.processes import told_by_all
from onward.execute.spread import on_one_device
from onward.execute.state import SPENT, State
from onward.execute.step import Step
from onward.execute.tuning import Tuning
from onward.fit.beginning import Beginning, first_of
from onward.fit.model import EvaluationRequest, Model, expect_model
from onward.fit.over_reader import OfReader, ReaderNumbers
from onward.fit.reported import expect_one_loss, expect_real, metrics_of, numbers_of


class Evaluator(NotPickled, Pointing):
    """Runs the test-time Program of a Model; made for each request, thread or purpose, for it is light.

    Args:
        model: whose parameters are read as they are at each ``forward``.
        activations: names that every ``forward`` should compute at once. Any other activation is computed
            when it is first asked for, by another run up to there, from the same data and parameters.

    Raises:
        ArgumentError: something else than a Model.

    Example:
        >>> import numpy as np, onward as ow
        >>> def network():
        ...     hidden = ow.layer.fc(ow.data("x", (None, 4)), 3, act="relu")
        ...     return ow.layer.mse(ow.layer.fc(hidden, 1), ow.data("y", (None, 1)))
        >>> evaluator = ow.Evaluator(ow.Model(network))
        >>> out = evaluator.forward(x=np.ones((5, 4)))      # no y, so the loss is not computed
        >>> evaluator.activation("fc_1").shape
        (5, 1)
    """

    unpickled = ("An Evaluator", "It holds nothing of its own: Evaluator(model) is another one.")

    def __init__(self, model: Model, activations: Iterable[str | Variable] = ()) -> None:
        expect_model(model, "Evaluator")
        self.model = model
        self._fetch = tuple(find(model.test_program, name).name for name in activations)
        self._names = data_names(model.test_program)
        self._out: Out | None = None
        self._seen: tuple[State, dict[str, Any]] | None = None
        self._asked: dict[str, Any] = {}

    def forward(self, *data: Any, **feed: Any) -> Out:
        """Run forward on some data.

        Args:
            data: in the order in which the network takes or declares it; what is left out at the end, and
                what depends on it, is not computed.
            feed: data by name.

        Returns:
            ``out.value`` is what the network returned, ``out[name]`` one Variable.

        Raises:
            ArgumentError: data of the wrong name, shape or dtype.
        """
        given = self._named(data, feed) if data else feed
        self.model.warn_of_training()
        fed = {name: unshared(value) for name, value in given.items()}
        state = self.model.together
        self._out = out = self._forward(fed, self._fetch, only=False)(state, fed)
        self._seen, self._asked = (state, fed), {}
        return out

    def activation(self, layer: Any) -> Any:
        """The value of a layer in the last ``forward``.

        Args:
            layer: its name, the Variable, or what the layer returned outside of a trace.

        Raises:
            StateError: nothing was run forward yet.
            UnknownNameError: no Variable has this name.
            ArgumentError: it needs data that was not given.
        """
        if self._seen is None or self._out is None:
            raise StateError("There are no activations yet: call forward(...) first.")
        name = find(self.model.test_program, layer).name
        if name in self._out.results.position:
            return self._out[name]
        if name not in self._asked:
            state, fed = self._seen
            self._asked[name] = self._forward(fed, (name,), only=True)(state, fed)[name]
        return self._asked[name]

    def test(self, reader: Any) -> dict[str, float]:
        """The loss and every other number that the network returns, of all examples of a reader.

        They are those of one batch with all examples, as the graph tells: of a mean the mean over examples,
        of a sum or a count the sum, of the largest the largest; a quotient of sums, such as a mean over the
        tokens that a mask lets count, is the quotient of those of all. Where several processes train
        together, all of them call this, each with its part of the data, and get the same numbers; given all
        of it each, a sum counts it as often. Of a Program that was loaded from a file the graph cannot be
        followed, and of everything the mean over batches is taken, each by its number of examples.

        Args:
            reader: any iterable of batches, or a callable that returns one; a batch is a tuple of arrays in
                the order of the declarations, or a dict by name. Examples are the first axis of all of them,
                but of what each batch brings whole, as the matrix of a graph. Empty batches are left out.

        Raises:
            ArgumentError: an empty reader, one of the wrong structure, or without what the numbers need;
                values of other shapes from batch to batch; a number beside the loss that is named ``loss``,
                or one that is complex.
            Of several processes one may have no batch; they have the same network and data of the same names.
            PeerError: another process did not come within the deadline, or an error ended its test.

        Warns:
            UserWarning: the network goes on as in training, and never asks ``onward.is_training()``, once for
                a Model; a number that no batch tells its part of, such as a median: the mean is given; or
                data that is not as long as that of the examples, and differs from batch to batch.

        Example:
            >>> import jax.numpy as jnp, numpy as np, onward as ow
            >>> def network():
            ...     x, mask = ow.data("x", (None,)), ow.data("mask", (None,))
            ...     return jnp.sum(mask * x) / jnp.sum(mask)
            >>> x, mask = np.arange(6, dtype="float32"), np.array([0, 0, 0, 1, 1, 1], "float32")
            >>> ow.Evaluator(ow.Model(network)).test(ow.batches((x, mask), 3))
            {'loss': 4.0}
        """
        return self.over(batch for one in [reader] for batch, _ in LoopReader(one, test=True).epoch(0))

    def over(self, batches: Iterable[Any]) -> dict[str, float]:
        """The numbers of ``test`` of these batches, and of those of all processes."""
        model, what = self.model, f"the test of {self.model.test_program.name}"
        model.warn_of_training()
        fed = ({k: unshared(x) for k, x in as_feed(batch, self._names).items()} for batch in batches)
        ahead: list[Mapping[str, Any]] = []
        _ = model.together  # copied by all processes, of which one may have no batch
        begun = told_by_all(what, lambda: self._beginning(fed, ahead).to_bytes())
        first = first_of(begun, model.test_program.name)
        names = frozenset(first.names)
        numbers = ReaderNumbers(self._of_reader(names).at(first.shapes or {}))
        each = told_by_all(
            f"the numbers of {what}", lambda: self._counted(numbers, names, chain(ahead, fed)).tobytes()
        )
        return numbers.of_all(np.stack([np.frombuffer(one) for one in each]), model.together)

    def _beginning(self, fed: Iterator[Mapping[str, Any]], ahead: list[Mapping[str, Any]]) -> Beginning:
        """The data of the first batch that has an example, which is put ``ahead``."""
        program, reader, names = "", None, frozenset[str]()
        if jax.process_count() > 1:
            test_program = self.model.test_program
            program = self.model.once("fingerprint", lambda: fingerprint(test_program))
        for given in fed:
            names = names or frozenset(given)
            reader = reader or self._of_reader(names)
            self._expect_numbers(reader, names, given)
            if reader.given(given)[1]:
                ahead.append(given)
                return Beginning(program, tuple(sorted(names)), reader.shapes(given))
        return Beginning(program, tuple(sorted(names)))

    def _expect_numbers(self, reader: OfReader, names: frozenset[str], given: Mapping[str, Any]) -> None:
        """Raise ``ArgumentError`` for data of other names, or of which no number is computed."""
        if not reader.parts.results or given.keys() != names:
            raise ArgumentError(_no_number(self.model.test_program.name, self._names, given))

    def _counted(
        self, numbers: ReaderNumbers, names: frozenset[str], batches: Iterable[Mapping[str, Any]]
    ) -> np.ndarray:
        """The sums and extremes of these batches, in one row."""
        reader = numbers.reader
        for fed in batches:
            self._expect_numbers(reader, names, fed)
            given, rows, twice = reader.given(fed)
            if not rows:
                continue
            numbers.look(fed)
            if twice or reader.is_alike(rows):
                out = self._over_reader(reader, names)(self.model.together, given)
                numbers.add(rows, twice, {v.name: out[v] for v in numbers.parts.program.outputs})
            else:
                numbers.add_other(rows, metrics_of(self.forward(**fed)))
        return numbers.told()

    def _of_reader(self, given: frozenset[str]) -> OfReader:
        def results(program: Program) -> dict[str, Variable]:
            reached = EvaluationRequest((), given).program(program).outputs
            found = numbers_of(program.loss, program.signature)
            found = {name: v for name, v in found.items() if v in reached}
            expect_real(program, found)
            return found

        self._expect_known(given)
        expect_one_loss(self.model.test_program)
        return self.model.once(("reader", given), lambda: OfReader(self.model.test_program, results))

    def _over_reader(self, reader: OfReader, given: frozenset[str]) -> _Forward:
        return self.model.once(
            ("over reader", reader, given), lambda: _Forward(self.model, reader.parts.program)
        )

    def _named(self, data: tuple[Any, ...], feed: Mapping[str, Any]) -> dict[str, Any]:
        """All data by name."""
        program, names = self.model.test_program.name, self._names
        if len(data) > len(names):
            raise ArgumentError(
                f"{program} takes {len(names)} data ({', '.join(names)}); {len(data)} were given."
            )
        fed = dict(zip(names, data, strict=False))
        if twice := fed.keys() & feed.keys():
            raise ArgumentError(f"{program} was given {min(twice)!r} by place and by name.")
        return {**fed, **feed}

    def _forward(self, fed: Mapping[str, Any], fetch: tuple[str, ...], only: bool) -> _Forward:
        """How the model is run for data of these names, from the model's memory if it was before."""
        return self.model.once((fetch, only, *fed), lambda: self._planned(frozenset(fed), fetch, only))

    def _planned(self, given: frozenset[str], fetch: tuple[str, ...], only: bool) -> _Forward:
        self._expect_known(given)
        request = EvaluationRequest(fetch, None if len(given) == len(self._names) else given, only)
        program = self.model.test_program
        return self.model.once(request, lambda: _Forward(self.model, request.program(program)))

    def _expect_known(self, given: frozenset[str]) -> None:
        """Raise ``ArgumentError`` for data that the network does not take."""
        if unknown := sorted(given - set(self._names)):
            raise ArgumentError(
                f"{self.model.test_program.name} takes no data named {unknown[0]!r}. "
                f"{nearest(unknown[0], self._names)}"
            )

    def __repr__(self) -> str:
        return f"Evaluator({self.model!r})"


class _Forward:
    """One way of running a Model, worked out once, so that a request costs little more than its computation.

    Arrays of the very dtypes that the Program takes go straight into a jitted function, which tells their
    shapes apart. Everything else goes through the Step, which converts it or says what is wrong.
    """

    def __init__(self, model: Model, program: Program) -> None:
        self.step = step = Step(program, (), donate=False, ahead=False, tuning=Tuning())
        self.reads = tuple(name for _, name in step.feeds.taken)
        self._layout = model.state.layout
        self._own = _picking([self._layout.position[v.name] for v in step.layout.variables])
        self._dtypes = [v.dtype for v in step.program.inputs]
        self._plain = step.feeds.flat and len(self.reads) == len(self._dtypes)
        self._bounded = bool(step.program.bounds)
        function = step.function
        self._run = compiled_alone(lambda own, data: function(State(step.layout, own), *data)[1])
        self._run_stored = compiled_alone(lambda state, data: function(state, *data)[1])

    def __call__(self, state: State, fed: Mapping[str, Any]) -> Out:
        """Run on the values of a State, which stay as they are, and on data by name."""
        data = [fed[name] for name in self.reads]
        if not self._is_plain(state, data):
            return self.step(state, *data)[1]
        if self._bounded:
            self.step.feeds.check_bounds(data)
        try:
            return self._at_once(state, data)
        except (RuntimeError, ValueError) as error:
            if state.is_spent:
                raise StateError(SPENT) from error
            raise

    @uninterrupted
    def _at_once(self, state: State, data: list[Any]) -> Out:
        if state.storage is None:
            out: Out = self._run(on_one_device(self._own(state.values)), data)
        else:
            stored = State(state.layout, on_one_device(state.buffers), state.storage)
            out = self._run_stored(stored, data)
        return out

    def _is_plain(self, state: State, data: list[Any]) -> bool:
        """Whether nothing needs to be converted, flattened or reordered."""
        try:
            known = self._plain and state.layout is self._layout and [x.dtype for x in data] == self._dtypes
            return known and not any(isinstance(x, np.ma.MaskedArray) for x in data)
        except AttributeError:
            return False


def _picking(places: list[int]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """A function that picks these places of a tuple, at C speed where there are several."""
    return itemgetter(*places) if len(places) > 1 else lambda values: tuple(values[i] for i in places)


def as_feed(batch: Any, names: tuple[str, ...]) -> dict[str, Any]:
    """A batch of a reader as data by name.

    Raises:
        ArgumentError: another number of arrays than the network takes.
    """
    if isinstance(batch, Mapping):
        return {str(name_of(key)): value for key, value in batch.items()}
    values = tuple(batch) if isinstance(batch, tuple | list) else (batch,)
    if len(values) != len(names):
        raise ArgumentError(
            f"The reader yielded a batch of {len(values)} arrays; the network takes {len(names)}: "
            f"{', '.join(names)}. Yield tuples of arrays in this order, or dicts by name."
        )
    return dict(zip(names, values, strict=True))


def batch_size(fed: Mapping[str, Any]) -> int:
    """How many examples a batch has: the length of its first array that has one."""
    shapes = (np.shape(x) for x in jax.tree.leaves(list(fed.values())))
    return next((shape[0] for shape in shapes if shape), 1)


def _no_number(program: str, names: tuple[str, ...], fed: Mapping[str, Any]) -> str:
    return (
        f"The reader yielded {', '.join(map(repr, fed))}; {program} takes {', '.join(names)}. From that none "
        "of the numbers that are tested can be computed, or other ones than before: the loss, and every "
        "single number that the network returns beside it (has_aux=True)."
    )
