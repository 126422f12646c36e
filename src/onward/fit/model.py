"""Model = {topology, parameters}: a network and its values, shared by everything that uses them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from threading import RLock
from typing import Any, TypeVar

from onward.core.errors import ArgumentError, ByName, NotPickled, RecipeError
from onward.core.pointing import Pointing
from onward.core.program import Program, Variable
from onward.core.source import user_level
from onward.core.structure import describe
from onward.core.transform import transform
from onward.core.walk import descendants, prune
from onward.core.words import some
from onward.define.deferred import Deferred
from onward.define.lazy import has_lazy
from onward.define.trace import takes_arguments, trace
from onward.derive.for_test import quietly_for_test, warn_of_training
from onward.develop.seam import forward_pass
from onward.execute.checkpoint.checkpoints import Checkpoints
from onward.execute.feeds import data_names
from onward.execute.initialize import by_name, by_structure, initialized, is_declared
from onward.execute.layout import Layout
from onward.execute.lying import together
from onward.execute.restore import Restored, loaded, matched
from onward.execute.state import State
from onward.fit.applied import applied

T = TypeVar("T")

_TOLD = "told of training"
_APART = (
    "Since the devices last met, each has trained its own {names}; the model has the values of that meeting, "
    "and these are saved. Train until they meet again, a multiple of `every` steps; or save the mean of what "
    "they have now: onward.save(trainer.model.topology, path, trainer.state)."
)


class Model(ByName, NotPickled, Pointing):
    """A network and its parameters; Evaluators, GradientMachines and Trainers share them, none copies them.

    The values are one immutable State. A Trainer publishes the next one by exchanging the reference, so that
    any number of threads may read while one trains.

    Args:
        network: a function that declares what it needs, a Lazy value, or a traced Program.
        parameters: first values: by name for declared ones, or in the containers that were traced.
        state: what the model itself carries, for a Program traced with ``state=``.
        seed: what declared parameters are initialized from.
        options: further arguments of ``trace``, such as ``feed`` or ``has_aux``.

    Attributes:
        topology: the forward Program.
        about: what the file says that it was loaded from: path, sha256, license, versions; empty otherwise.

    Raises:
        ArgumentError: a network whose shapes nothing shows.

    Example:
        >>> import numpy as np, onward as ow
        >>> def network():
        ...     return ow.layer.fc(ow.data("x", (None, 4)), 2)
        >>> model = ow.Model(network, seed=1)
        >>> model
        Model('network', 2 parameters, 10 numbers)
        >>> model["fc_0/b"]
        Array([0., 0.], dtype=float32)
    """

    unpickled = ("A Model", "onward.save(model, path) writes it to a file, onward.load(path) reads it.")

    def __init__(
        self, network: Any, parameters: Any = None, state: Any = None, *, seed: int = 0, **options: Any
    ) -> None:
        topology = _topology(network, options)
        values = initialized(topology, _given(topology, parameters, state), seed)
        self._begin(topology, values, {})
        self._trained = network if isinstance(network, Program) else topology

    @classmethod
    def of(cls, topology: Program, values: Mapping[Variable, Any], about: Mapping[str, Any]) -> Model:
        """A Model of a forward Program with these values of its state, such as ``load`` returns."""
        model = cls.__new__(cls)
        model._begin(topology, values, about)
        return model

    def _begin(self, topology: Program, values: Mapping[Variable, Any], about: Mapping[str, Any]) -> None:
        self.topology = self._trained = topology
        self.about = about
        self.apart: Callable[[], Sequence[str]] = tuple
        self.lock = RLock()
        self._made: dict[Any, Any] = {}
        self._together: tuple[State, State] | None = None
        layout = Layout.of(topology)
        self.state = State(layout, [values[v] for v in layout.variables])

    @property
    def parameters(self) -> Any:
        """The parameters as they are now: a dict by name, or the containers in which they were traced.

        Those that a pipeline trains are copied from its stages to one device; ``model[name]`` stays there.
        """
        return self.together.parameters

    def __getitem__(self, name: str | Variable) -> Any:
        """The value of a parameter or state Variable as it is now."""
        return self.state[name]

    def __call__(self, parameters: Any, *data: Any) -> Any:
        """Evaluate the network at test time with these parameters: a pure function.

        It can be part of a loss, so that a network from a file is trained for something else. Nothing is
        dropped, and what the network itself carries, such as statistics, is read as it is now.

        Args:
            parameters: in the containers of ``model.parameters``.
            data: arrays, in the order of the network.

        Raises:
            ArgumentError: other containers, names, shapes or dtypes than the network takes, as of a step.
            GraphError: the model is from a file, through which ``jax.vmap`` does not go.

        Example:
            >>> import jax.numpy as jnp, onward as ow
            >>> def network():
            ...     return ow.layer.fc(ow.data("x", (None, 4)), 2)
            >>> model = ow.Model(network, seed=1)
            >>> def loss(params, x, y):
            ...     return jnp.mean((model(params, x) - y) ** 2)
            >>> program = ow.SGD(0.1).minimize(loss, model.parameters, jnp.ones((8, 4)), jnp.ones((8, 2)))
            >>> [v.name for v in program.parameters]
            ['fc_0/b', 'fc_0/w']
        """
        self.warn_of_training()
        return applied(self.test_program, self.together, parameters, data)

    @property
    def together(self) -> State:
        """The State where one computation reads all of it: copied, once, from where it lies in parts."""
        state, known = self.state, self._together
        if known is None or known[0] is not state:
            buffers = together(state.buffers)
            found = state if buffers is state.buffers else State(state.layout, buffers, state.storage)
            self._together = known = (state, found)
        return known[1]

    def replace(self, values: Mapping[str, Any]) -> None:
        """Publish other values for some parameters, all at once.

        Raises:
            UnknownNameError: a name that the model does not keep.
            ArgumentError: a value of another shape or dtype.
        """
        with self.lock:
            self.publish(self.state.replace(values))

    def copy(self) -> Model:
        """Another Model of the same network with the values that this one has now; it goes its own way."""
        other = type(self).__new__(type(self))
        other.__dict__.update(self.__dict__)
        other.lock = RLock()
        other.state, names = self.state.copy(), self.apart()
        other.apart = lambda: names
        return other

    __copy__ = copy

    def __deepcopy__(self, memo: Any) -> Model:
        return self.copy()

    def save(self, folder: str | PathLike[str]) -> Any:
        """Write the parameters and the state of the network to disk; returns the path once it is there.

        Example:
            >>> import tempfile, onward as ow
            >>> def network():
            ...     return ow.layer.fc(ow.data("x", (None, 4)), 2)
            >>> folder = tempfile.mkdtemp()
            >>> path = ow.Model(network, seed=1).save(folder)
            >>> print(ow.Model(network, seed=2).restore(folder))
            2 Variables restored
        """
        self.warn_of_apart()
        state = self.state
        arrays = {v.name: x for v, x in zip(state.layout.variables, state.values, strict=True)}
        with Checkpoints.adding(folder) as store:
            return store.save(arrays, 0)

    def restore(
        self, source: Checkpoints | str | PathLike[str], *, which: Any = "latest", fallback: bool = False
    ) -> Restored:
        """Take the parameters from a checkpoint, of a Model or of a Trainer, whose slots are left out.

        Raises:
            CheckpointError: nothing whole is there, or a parameter does not fit; nothing is changed then.
        """
        found = loaded(source, which, fallback)
        with self.lock:
            values, report = matched(self.state, self.state.layout.variables, found)
            self.publish(State(self.state.layout, values))
        return report

    def publish(self, state: State, apart: Callable[[], Sequence[str]] = tuple) -> None:
        """Exchange all values at once; what reads meanwhile sees the old ones or the new ones, whole.

        ``apart`` names the parameters that devices have trained on, each for itself, since they last met.
        """
        self.state, self._together, self.apart = state, None, apart

    def warn_of_apart(self) -> None:
        """Warn where what is saved lacks the steps that devices made since they last met."""
        if names := self.apart():
            warnings.warn(_APART.format(names=some(names, 6)), stacklevel=user_level())

    @property
    def test_program(self) -> Program:
        """The topology as it is when nothing is trained."""
        return self.once("test", lambda: _test_program(self.topology))

    def warn_of_training(self) -> None:
        """Warn, once, where the network evaluates as in training, unless it was traced so on purpose."""
        self.once(_TOLD, self._warn_of_training)

    def told_of_training(self) -> None:
        """Never warn of that: who evaluates it was told."""
        self.once(_TOLD, lambda: True)

    def _warn_of_training(self) -> bool:
        recipe = self.topology.recipe
        if recipe is not None and recipe.origin.training:
            warn_of_training(self._trained, self.test_program)
        return True

    def once(self, request: Hashable, make: Callable[[], T]) -> T:
        """The object that answers a request, made once and shared by everything that uses this model."""
        found: T | None = self._made.get(request)
        if found is None:
            with self.lock:
                found = self._made.get(request) or make()
                self._made[request] = found
        return found

    def __repr__(self) -> str:
        count = sum(v.size for v in self.topology.parameters)
        return f"Model({self.topology.name!r}, {len(self.topology.parameters)} parameters, {count:,} numbers)"


def expect_model(value: object, user: str) -> None:
    """Raise ``ArgumentError`` for what is not a Model."""
    if not isinstance(value, Model):
        raise ArgumentError(
            f"{user} was given {describe(value)}; expected a Model: Model(network), or load(path) of a file "
            "that save wrote."
        )


@dataclass(frozen=True)
class EvaluationRequest:
    """A request to a test Program: further names, and which data is given (None: all of it)."""

    fetch: tuple[str, ...] = ()
    given: frozenset[str] | None = None
    only: bool = False

    def program(self, program: Program) -> Program:
        """The part that computes it: the outputs that the given data reaches, and what is fetched.

        Raises:
            ArgumentError: something fetched needs data that is not given.
        """
        wanted = [] if self.only else list(range(len(program.outputs)))
        if self.given is not None:
            missing = {v for v, name in _data(program) if name not in self.given}
            tainted = descendants(program, missing)
            wanted = [i for i in wanted if program.outputs[i] not in tainted]
            if lost := [n for n in self.fetch if program[n] in tainted]:
                names = sorted({name for v, name in _data(program) if v in missing})
                raise ArgumentError(f"{lost[0]!r} needs data that was not given, among {', '.join(names)}.")
        return _computing(program, tuple(wanted), self.fetch)


@transform
def _computing(program: Program, outputs: tuple[int, ...], names: tuple[str, ...]) -> Program:
    """The part that computes these outputs, by their places, and these Variables.

    For data of another length the function may give its results other names.
    """
    return prune(program, [*(program.outputs[i] for i in outputs), *(program[n] for n in names)])


def _data(program: Program) -> list[tuple[Variable, str]]:
    """The data Variables, each with the name of the argument that it is part of."""
    assert program.signature is not None
    pairs = zip(program.signature.data, data_names(program), strict=True)
    return [(v, name) for structure, name in pairs for v in structure.variables]


def _topology(network: Any, options: dict[str, Any]) -> Program:
    if isinstance(network, Program):
        if options:
            raise ArgumentError(f"The Program is traced already; {', '.join(options)} comes too late.")
        return forward_pass(network)
    if has_lazy(network) and not callable(network):
        network = Deferred(network, {k: v for k, v in options.items() if k != "feed"})
    if isinstance(network, Deferred):
        return forward_pass(network.complete(options.get("feed", {})))
    if not callable(network):
        raise ArgumentError(
            f"Model was given {describe(network)}; expected a function that declares its data and layers, a "
            "traced Program, or what a layer returned."
        )
    if takes_arguments(network):
        raise ArgumentError(
            "Model was given a function that takes arguments. Trace it with them, parameters first: "
            "Model(trace(function, params, x), params)."
        )
    return trace(network, **options)


def _test_program(topology: Program) -> Program:
    try:
        return quietly_for_test(topology)
    except RecipeError:
        return forward_pass(topology)


def _given(topology: Program, parameters: Any, state: Any) -> dict[Variable, Any]:
    signature = topology.signature
    if signature is None or is_declared(topology):
        return by_name(topology, parameters)
    given = by_structure(signature.parameters, parameters, signature.names[0])
    if signature.model_state is not None:
        given |= by_structure(signature.model_state, state, signature.names[1])
    return given
