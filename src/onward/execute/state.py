"""The state of a training program between two steps: stored for speed, shown for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from onward.core.errors import ArgumentError, HyperparameterError, StateError, UnknownNameError, nearest
from onward.core.pointing import Pointing
from onward.core.program import Variable
from onward.core.structure import describe
from onward.core.treescope_view import foldable_text, named_values
from onward.core.variable import holds_keys
from onward.core.words import Kind
from onward.define.arguments import type_of
from onward.derive.rule import expect_held
from onward.execute.layout import Layout
from onward.execute.line import StateLine, follow
from onward.execute.storage.storage import Storage


@jax.tree_util.register_pytree_with_keys_class
class State(Pointing):
    """Parameters, optimizer slots, hyperparameters, step counter: everything the next step needs.

    ``state[name]`` reads any of them, ``state.parameters`` gives them back in the containers in which
    they came, ``state.replace({name: value})`` makes a new State. A State is a pytree.

    Attributes:
        layout: which Variables it holds.
        buffers: the arrays that hold them.
        storage: which buffer holds what; None where each Variable has one of its own.
        line: the States that it came of and that came of it; see ``onward.execute.line``.
    """

    __slots__ = ("__weakref__", "_values", "buffers", "layout", "line", "storage")

    def __init__(self, layout: Layout, buffers: Sequence[Any], storage: Storage | None = None) -> None:
        self.layout = layout
        self.storage = storage
        self.buffers = tuple(buffers)
        self._values = self.buffers if storage is None else None
        self.line: StateLine | None = None

    @property
    def values(self) -> tuple[Any, ...]:
        """Every value by itself, in the order of the layout; what shares a buffer is copied, once.

        Raises:
            AttributeError: values share a buffer, and a function over the tree left no array there.
        """
        if self._values is None:
            other = next((b for b in self.buffers if not isinstance(b, jax.Array | np.ndarray)), None)
            if other is not None:  # this error, for who asks with hasattr is to be answered
                raise AttributeError(
                    f"This State holds {describe(other)} in place of an array that values share. "
                    "dict(state) has each value by itself: map over that."
                )
            self.expect_whole()
            self._values = tuple(map(self._read, range(len(self.layout.variables))))
        return self._values

    def _read(self, i: int) -> Any:
        """The value of the Variable at this place of the layout."""
        if self.storage is None:
            return self.buffers[i]
        return self.storage.read(self.buffers, self.layout.variables[i].name)

    def _buffer(self, i: int) -> int:
        """The number of the buffer that holds the Variable at this place of the layout."""
        return i if self.storage is None else self.storage.place[self.layout.variables[i].name][0]

    def __getitem__(self, name: str | Variable) -> jax.Array:
        """The value of a state Variable.

        Raises:
            UnknownNameError: no state Variable has this name.
            StateError: a step has taken the buffer over.
        """
        i = self._position(name)
        if is_deleted(self.buffers[self._buffer(i)]):
            raise StateError(SPENT)
        return self._read(i) if self._values is None else self._values[i]

    def __iter__(self) -> Iterator[str]:
        """The names of everything it holds."""
        return iter(self.layout.position)

    def __contains__(self, name: object) -> bool:
        return getattr(name, "name", name) in self.layout.position

    def keys(self) -> Iterator[str]:
        """The names, so that ``dict(state)`` is every value by its name, as other libraries store it.

        >>> import jax.numpy as jnp, onward as ow
        >>> step = ow.compile(ow.SGD(0.5).minimize(lambda w: w**2, jnp.float32(1.0)))
        >>> sorted(dict(step.init(jnp.float32(1.0))))
        ['learning_rate', 'step', 'w']
        """
        return iter(self)

    @property
    def parameters(self) -> Any:
        """The parameters in the containers in which they were passed to ``step.init``.

        They are the State's own buffers where these are not shared, and the next step takes those over;
        ``state.copy().parameters`` stays readable.

        Raises:
            StateError: they are adapted, and frozen as they came: ``merge_low_rank``.
        """
        signature = self.layout.signature
        if signature is None:
            return {v.name: self[v] for v in self.layout.variables}
        if adapted := [v.name for v in signature.parameters.variables if v.kind is Kind.FROZEN]:
            raise StateError(
                f"The parameters of this State are adapted: {adapted[0]!r} and others are frozen, factors of "
                "low rank beside them. ow.merge_low_rank(program, state) gives plain weights in your "
                "containers, where the code is: of the Program that low_rank made, not of one from a file; "
                "{v.name: state[v] for v in program.parameters} is what is trained."
            )
        return signature.parameters.unflatten(self[v] for v in signature.parameters.variables)

    @property
    def model_state(self) -> Any:
        """The model state that was passed as ``state=``, as it is now; None if none was passed."""
        signature = self.layout.signature
        if signature is None or signature.model_state is None:
            return None
        return signature.model_state.unflatten(self[v] for v in signature.model_state.variables)

    @property
    def hyperparameters(self) -> Mapping[str, jax.Array]:
        """The hyperparameters that are Variables, by name; change one with ``replace``."""
        self.expect_whole()
        return {v.name: self[v] for v in self.layout.hyperparameters}

    def part(self, layout: Layout) -> State:
        """The State of some of the Variables, in the same arrays."""
        if self.storage is None:
            return State(layout, [self.buffers[self._position(v.name)] for v in layout.variables])
        places, storage = self.storage.part(tuple(v.name for v in layout.variables))
        return State(layout, [self.buffers[i] for i in places], storage)

    def copy(self) -> State:
        """The same State in buffers of its own, to keep while training goes on.

        Example:
            >>> import jax.numpy as jnp, onward as ow
            >>> step = ow.compile(ow.SGD(0.5).minimize(lambda w: w**2, jnp.float32(1.0)))
            >>> state = step.init(jnp.float32(1.0))
            >>> first = state.copy()
            >>> state, out = step(state)
            >>> float(first.parameters), float(state.parameters)
            (1.0, 0.0)
        """
        self.expect_whole()
        return State(self.layout, [copied(x, x.dtype) for x in self.buffers], self.storage)

    __copy__ = copy

    def __deepcopy__(self, memo: Any) -> State:
        return self.copy()

    def __reduce__(self) -> tuple[Any, ...]:
        self.expect_whole()
        return State, (self.layout, self.buffers, self.storage)

    def replace(self, changes: Mapping[str, Any]) -> State:
        """A State with other values for some Variables; the types stay, nothing is compiled again.

        Raises:
            UnknownNameError: a name that is not a state Variable.
            ArgumentError: a value of another shape or dtype.
            HyperparameterError: a hyperparameter that is negative or not finite.

        Example:
            >>> import jax.numpy as jnp, onward as ow
            >>> step = ow.compile(ow.SGD(0.1).minimize(lambda w: w**2, jnp.float32(1.0)))
            >>> state = step.init(jnp.float32(1.0)).replace({"learning_rate": 0.5})
            >>> float(state["learning_rate"])
            0.5
        """
        self.expect_whole()
        values = {}
        for name, value in changes.items():
            i = self._position(name)
            v = self.layout.variables[i]
            if v in self.layout.hyperparameters:
                check_hyperparameter(v.name, value, v.dtype, self.layout.limits.get(v.name))
                value = jnp.asarray(value, v.dtype)
            values[i] = stored(value, self.layout.whole(v), f"state.replace: {v.name!r}")
            if (copy := self.layout.copies.get(v.name)) is not None and copy not in changes:
                place = self._position(copy)
                values[place] = jnp.broadcast_to(values[i], (self.layout.replicas.count, *v.shape))  # type: ignore[union-attr]
        return self._with(values)

    def _with(self, changes: Mapping[int, Any]) -> State:
        """A State with other values at these places of the layout; none shares a buffer if those change."""
        if self.storage is None or not any(self.storage.is_shared(self._buffer(i)) for i in changes):
            buffers = list(self.buffers)
            for i, value in changes.items():
                buffers[self._buffer(i)] = value
            changed = State(self.layout, buffers, self.storage)
            follow(self, changed)
            return changed
        return State(self.layout, [changes.get(i, x) for i, x in enumerate(self.values)])

    def sweep(self, choices: Mapping[str, Sequence[Any] | NDArray[Any] | jax.Array]) -> State:
        """As many States in one as there are choices: every array has one more axis, the first.

        ``jax.vmap`` runs a step over them in one compilation: a search for a learning rate costs one batched
        step per step.

        Raises:
            UnknownNameError: a name that is not a state Variable.
            ArgumentError: choices of different lengths, or none.
            HyperparameterError: a hyperparameter that is negative or not finite.

        Example:
            >>> import jax, jax.numpy as jnp, onward as ow
            >>> one = jnp.float32(1.0)
            >>> step = ow.compile(ow.SGD(0.1).minimize(lambda w, x: w * x, one, one))
            >>> states = step.init(one).sweep({"learning_rate": [0.25, 0.5]})
            >>> states, out = jax.jit(jax.vmap(step, (0, None)))(states, one)
            >>> states.parameters.tolist()
            [0.75, 0.5]
        """
        lengths = {name: len(values) if np.ndim(values) else 0 for name, values in choices.items()}
        if len(set(lengths.values())) != 1 or 0 in lengths.values():
            found = ", ".join(f"{n} for {name!r}" for name, n in lengths.items()) or "none"
            raise ArgumentError(
                f"sweep was given these numbers of choices: {found}; expected equally many choices for each "
                "name, such as {'learning_rate': [0.1, 0.01]}."
            )
        count = next(iter(lengths.values()))
        each = [self.replace({k: v[i] for k, v in choices.items()}) for i in range(count)]
        copies = (self.layout.copies.get(getattr(k, "name", k)) for k in choices)
        names = {self._position(k) for k in (*choices, *copies) if k is not None}
        values = [
            jnp.stack([one.values[i] for one in each]) if i in names else _repeated(x, count)
            for i, x in enumerate(self.values)
        ]
        return State(self.layout, values)

    def _position(self, name: str | Variable) -> int:
        name = name.name if isinstance(name, Variable) else name
        if not isinstance(name, str):
            raise UnknownNameError(f"{describe(name)} names nothing in the state; give a name or a Variable.")
        try:
            return self.layout.position[name]
        except KeyError:
            if name in self.layout.scheduled:
                advice = (
                    "It follows a schedule, computed from 'step'. To set it by hand, give the optimizer a "
                    "number in place of the schedule."
                )
            else:
                advice = nearest(name, self.layout.position)
            raise UnknownNameError(f"The state holds nothing named {name!r}. {advice}") from None

    @property
    def is_spent(self) -> bool:
        """Whether a step has taken over any of this State's buffers."""
        return any(map(is_deleted, self.buffers))

    def expect_whole(self) -> None:
        """Raise ``StateError`` if a step has taken it over."""
        if self.is_spent:
            raise StateError(SPENT)

    def become(self, newest: State) -> None:
        """Hold what another State holds, in the same arrays: so Ctrl-C mends one that a step has spent."""
        self.layout, self.storage = newest.layout, newest.storage
        self.buffers, self._values = newest.buffers, newest._values

    def __repr__(self) -> str:
        if self.is_spent:
            return "State(given to a step, spent)"
        names = ", ".join(v.name for v in self.layout.variables[:4])
        count = len(self.layout.variables)
        return f"State({count} Variables: {names}{', ...' if count > 4 else ''})"

    def __treescope_repr__(self, path: str | None, subtree_renderer: Any) -> Any:
        if self.is_spent:
            return foldable_text(repr(self), path)
        return named_values(State, dict(self), path, subtree_renderer)

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], tuple[Layout, Storage | None]]:
        """The buffers with their names, for ``jax.tree``."""
        names = self.layout.position if self.storage is None else self.storage.names
        return list(zip(map(jax.tree_util.DictKey, names), self.buffers, strict=True)), self._kept

    def tree_flatten(self) -> tuple[tuple[Any, ...], tuple[Layout, Storage | None]]:
        """The buffers, for ``jax.tree``."""
        return self.buffers, self._kept

    @property
    def _kept(self) -> tuple[Layout, Storage | None]:
        return self.layout, self.storage

    @classmethod
    def tree_unflatten(cls, kept: tuple[Layout, Storage | None], buffers: Sequence[Any]) -> State:
        """A State from its buffers, for ``jax.tree``."""
        return cls(kept[0], buffers, kept[1])


SPENT = (
    "This State was given to step(...), which took its buffers over (they are donated, so that the step "
    "needs no second copy). Go on with the State that the step returned: state, out = step(state, ...). To "
    "keep old States readable, compile with donate=False."
)


def expect_state(state: Any) -> None:
    """Raise ``ArgumentError`` if the first argument of a step is something else than a State."""
    if not isinstance(state, State):
        raise ArgumentError(
            f"The first argument of a step is its State, not {describe(state)}. Begin with "
            "state = step.init(params); then state, out = step(state, *data)."
        )


def _repeated(value: Any, count: int) -> Any:
    return jnp.broadcast_to(value, (count, *value.shape))


def check_hyperparameter(name: str, value: Any, dtype: Any, limit: float | None = None) -> None:
    """Raise ``HyperparameterError`` unless this is a finite number of at least 0, and below the limit.

    So it has to be in the dtype that it will have, too.
    """
    if isinstance(value, jax.core.Tracer):
        return
    is_number = isinstance(value, int | float | np.ndarray | np.generic | jax.Array)
    number = np.asarray(value if is_number else np.nan).astype(np.float64)
    if not np.all(np.isfinite(number) & (number >= 0)):
        raise HyperparameterError(f"{name} is {value!r}. It must be a finite number of at least 0.")
    if limit is not None and not np.all(number < limit):
        raise HyperparameterError(f"{name} is {value!r}. It must be less than {limit:g}.")
    expect_held(name, value, dtype, limit)


def stored(value: Any, v: Variable, what: str) -> Any:
    """A copy of a value as the state Variable ``v`` holds it; raises ``ArgumentError`` if it does not fit."""
    if isinstance(value, jax.ShapeDtypeStruct):
        raise ArgumentError(f"{what} is only a shape ({value.dtype}{list(value.shape)}); pass an array.")
    found = type_of(value)
    if found is None:
        raise ArgumentError(f"{what} is {describe(value)}; expected an array {v.type}.")
    if tuple(found.shape) != v.shape or not fits(found, v):
        raise ArgumentError(f"{what} is {found.dtype}{list(found.shape)}; expected {v.type}.")
    return copied(value, v.dtype)


def copied(value: Any, dtype: Any) -> Any:
    """A value in a buffer of its own."""
    if holds_keys(dtype):
        return jax.random.clone(value)
    if _moves_as_it_is(value, dtype):
        return jax.device_put(value, may_alias=False)  # a copy by jnp compiles a kernel for each shape
    if isinstance(value, np.ndarray) and value.dtype == dtype:
        return jax.device_put(np.array(value, order="C"))  # shared with nobody else, if at all
    return jnp.array(value, dtype, copy=True)


def _moves_as_it_is(value: Any, dtype: Any) -> bool:
    """Whether it is an array of JAX, with its numbers, all of it in this process, and of this dtype for good.

    Memory of NumPy stays shared with what ``device_put`` makes of it, whatever it is told.
    """
    if not isinstance(value, jax.Array) or isinstance(value, jax.core.Tracer):
        return False
    return value.dtype == dtype and not value.weak_type and value.is_fully_addressable


def fits(found: jax.ShapeDtypeStruct, v: Variable) -> bool:
    """Whether a value of this type can stand for the Variable: the same dtype, or a Python number."""
    if found.dtype == v.dtype:
        return True
    return found.weak_type and bool(jnp.can_cast(found.dtype, v.dtype, "same_kind"))


def is_deleted(value: Any) -> bool:
    """Whether a value is an array whose buffer is gone."""
    return isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer) and value.is_deleted()
