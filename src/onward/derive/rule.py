"""The base of update rules: a frozen dataclass with hyperparameters, an ``init`` and an ``update``.

Three kinds are built on it: an ``Optimizer`` updates parameters, a ``GradientRule`` changes gradients before
that, a ``ParameterRule`` changes what the optimizer made of the parameters.

    gradient -> gradient rules, in order -> optimizer -> parameter rules, in order -> next parameter

>>> import jax.numpy as jnp, onward as ow
>>> class Halve(ow.GradientRule):
...     def update(self, parameter, gradient, slots):
...         return gradient / 2, slots
>>> program = ow.SGD(0.1, rules=[Halve()]).minimize(lambda w, x: jnp.sum(w * x), jnp.ones(3), jnp.ones(3))
>>> [target.op.type for target in program.updates]
['count', 'halve', 'sgd']
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import wraps
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple, Self, TypeVar, dataclass_transform

import jax
import numpy as np

from onward.core.errors import HyperparameterError
from onward.core.first_use import at_first_call
from onward.core.structure import describe, expect_count, is_number
from onward.core.walk import Where
from onward.core.words import UpdateType

Schedule = Callable[[jax.Array], jax.Array]
Hyperparameter = jax.Array | Any  # the array of this step in ``update``; a number or a Schedule is given
Slots = Mapping[str, jax.Array]
R = TypeVar("R", bound="Rule")
_instead = at_first_call("onward.core.whereabouts", "hyperparameter")

_IN_UPDATE = {
    "step": "the number of updates made before this one",
    "optimizer": "the hyperparameters of the optimizer by name",
}  # what self has in an update beside the fields


def _op_name(rule: type) -> str:
    """The class name in lower case, its words joined."""
    words = re.findall(r"[A-Z]+[0-9]*(?![a-z])|[A-Z][a-z0-9]*", rule.__name__)
    return "_".join(words).lower() or rule.__name__


def _take_from_self(cls: type[Rule], name: str) -> None:
    """Let a method of the older form, which has the hyperparameters as an argument, find them in ``self``."""
    forms = [vars(base)[name] for base in cls.__mro__ if name in vars(base)]
    takes = len(_required(forms[-1])) if name in vars(cls) else 0
    more = 1 + (cls.evaluates_loss and name == "update")
    if not takes or len(_required(method := forms[0])) != takes + more:
        return

    @wraps(method)
    def from_self(self: Rule, *given: Any) -> Any:
        known = SimpleNamespace(**{**vars(self).get("optimizer", {}), **vars(self)})
        return method(self, *given[: takes - 1], known, *given[takes - 1 :])

    setattr(cls, name, from_self)


def _required(method: Any) -> list[str]:
    """The arguments that a method must be given."""
    parameters = inspect.signature(method).parameters.values()
    return [p.name for p in parameters if p.default is p.empty and p.kind <= p.POSITIONAL_OR_KEYWORD]


def _expect_free(cls: type[Rule]) -> None:
    """Refuse fields whose names ``self`` has in an update for something else."""
    for name in _IN_UPDATE.keys() & inspect.get_annotations(cls).keys():
        if any(isinstance(vars(base).get(name), property) for base in cls.__mro__[1:]):
            raise HyperparameterError(
                f"{cls.__name__} has a field named {name!r}, but in an update self.{name} is "
                f"{_IN_UPDATE[name]}. Give the field another name."
            )


@dataclass_transform(frozen_default=True, kw_only_default=False, field_specifiers=(field,))
@dataclass(frozen=True, repr=False)
class Rule:
    """The base of optimizers, gradient rules and parameter rules.

    A subclass is a frozen dataclass without being told so. A field annotated ``Hyperparameter`` becomes a
    state Variable (float32, or float64 where a parameter is), or follows a schedule: in ``update`` and
    ``evaluated`` it holds the array of this step. A field of any other type is fixed when the Program is
    derived; an ``__init__`` of its own is refused. ``type`` says how far the rule looks; with ``ACROSS`` it
    takes tuples over all parameters in place of single arrays; one that keeps no slots and does not ask which
    number lies in which array may set ``any_layout``, and is given stacks. A rule that sets
    ``evaluates_loss`` is given one more argument, a ``Loss``. The hyperparameters named in ``below_one`` must
    be less than 1. Rules compute in float32, or in what is wider.

    Raises:
        HyperparameterError: a hyperparameter is negative, infinite, not a number, or out of range.
    """

    type: ClassVar[UpdateType] = UpdateType.ELEMENTWISE
    evaluates_loss: ClassVar[bool] = False
    any_layout: ClassVar[bool] = False
    below_one: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "__init__" in vars(cls):
            raise HyperparameterError(_no_init_of_its_own(cls))
        _expect_free(cls)
        dataclass(frozen=True, repr=False)(cls)
        for name in ("update", "evaluated"):
            _take_from_self(cls, name)
        if cls.evaluates_loss and cls.type is not UpdateType.ACROSS:
            raise HyperparameterError(
                f"{cls.__name__} evaluates the loss, which depends on all parameters: set type = "
                "UpdateType.ACROSS and take tuples of parameters, gradients and slots."
            )

    def __new__(cls, *args: Any, **options: Any) -> Self:
        """Refuse a hyperparameter that does not exist, and offer the nearest."""
        names = [f.name for f in fields(cls)]
        for name in options:
            if name not in names:
                raise HyperparameterError(
                    f"{cls.__name__} has no hyperparameter {name!r}. {_instead(name, names)}"
                )
        by_place = [f.name for f in fields(cls) if not f.kw_only]
        if len(args) > len(by_place):
            raise HyperparameterError(
                f"{cls.__name__} was given {len(args)} values; it has {', '.join(by_place) or 'none'}, in "
                "this order."
            )
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name, value in self.hyperparameters.items():
            if not callable(value):
                self.check_hyperparameter(name, value)

    def init(self, parameter: jax.Array) -> Slots:
        """The slots of one parameter before the first step, by name; none unless overridden."""
        return {}

    def evaluated(self, parameter: Any, slots: Any, /) -> Any:
        """The parameter to evaluate a model with, where it is not the one that is trained."""
        return parameter

    @property
    def step(self) -> jax.Array:
        """The number of updates made before this one, int32; only inside of ``update`` and ``evaluated``.

        It stays at 2**31 - 128, so a schedule keeps its last value, and what happens every so many steps no
        longer does.
        """
        found: jax.Array = self._of_this_step("step")
        return found

    def __repr__(self) -> str:
        by_place = [f for f in fields(self) if not f.kw_only]
        around = [f for f in fields(self) if f.kw_only and getattr(self, f.name) != f.default]
        shown = (*by_place, *around)
        return f"{type(self).__name__}({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in shown)})"

    @property
    def name(self) -> str:
        """The type of its ops: the class name in lower case."""
        return _op_name(type(self))

    @property
    def title(self) -> str:
        """Its name in sentences: the class name."""
        return type(self).__name__

    @property
    def hyperparameters(self) -> Mapping[str, Hyperparameter]:
        """The fields that may change while training, by name."""
        return {f.name: getattr(self, f.name) for f in fields(self) if _is_hyperparameter(f.type)}

    @property
    def has_evaluated(self) -> bool:
        """Whether it has other parameters to evaluate a model with than those it trains."""
        return type(self).evaluated is not Rule.evaluated

    def _of_this_step(self, name: str) -> Any:
        if name not in vars(self):
            raise AttributeError(
                f"{type(self).__name__}.{name} is {_IN_UPDATE[name]}, which only update and evaluated read."
            )
        return vars(self)[name]

    @classmethod
    def check_hyperparameter(cls, name: str, value: Any) -> None:
        """Raise ``HyperparameterError`` unless this is a finite number that is not negative."""
        try:
            number = math.nan if isinstance(value, bool) else float(value + 0)
        except (TypeError, ValueError):
            raise HyperparameterError(
                f"{cls.__name__}: {name} is {describe(value)}. Give a number, or a schedule: a function of "
                "the step. Parameters go to minimize(loss, params, *data)."
            ) from None
        if not math.isfinite(number) or number < 0:
            raise HyperparameterError(
                f"{cls.__name__}: {name} is {number}. It must be a finite number of at least 0."
            )
        if name in cls.below_one and number >= 1:
            raise HyperparameterError(f"{cls.__name__}: {name} is {number}. It must be less than 1.")


class Piece(NamedTuple):
    """Rows of one of the parameters that a rule looks across.

    ``number`` counts that parameter among the ``parameters`` that there are, ``shape`` is that of all its
    rows, of which these are ``begin`` to ``end``.
    """

    number: int
    parameters: int
    shape: tuple[int, ...]
    begin: int
    end: int

    def of(self, whole: Any) -> Any:
        """These rows of an array that has all."""
        return whole[self.begin : self.end] if self.shape else whole


class Pieces(NamedTuple):
    """The places of the pieces that a rule across parameters is given, and the sums over all pieces.

    Attributes:
        pieces: for each array that it is given, which rows of which parameter it holds.
        sums: what ``sums`` returned of all pieces, wherever they are, added up.
    """

    pieces: Sequence[Piece]
    sums: Sequence[Any]


class RuleBeside(Rule):
    """The base of rules that act before or after an optimizer.

    ``where`` picks the parameters by name, pattern or predicate; all unless given.
    """

    where: Where | Iterable[Where] | None = field(default=None, kw_only=True)

    @property
    def optimizer(self) -> Mapping[str, jax.Array]:
        """The hyperparameters of the optimizer of this parameter, by name; only inside of ``update``.

        A rule that looks across parameters has none of these.
        """
        found: Mapping[str, jax.Array] = self._of_this_step("optimizer")
        return found


class GradientRule(RuleBeside):
    """The base of rules that change gradients before the optimizer sees them.

    ``where`` picks the parameters by name, pattern or predicate whose gradients it changes; all unless given.
    One that looks across parameters works on several parameter servers if it can do with numbers that are
    added up over all of them: ``sums`` makes these of some gradients, and ``update_share`` stands for
    ``update`` where it is given their sums over all, and pieces of the parameters.

    >>> import jax.numpy as jnp, onward as ow
    >>> class Mean(ow.GradientRule):
    ...     type = ow.UpdateType.ACROSS
    ...     def sums(self, gradient):
    ...         return sum(jnp.sum(g) for g in gradient), sum(jnp.float32(g.size) for g in gradient)
    ...     def update(self, parameter, gradient, slots):
    ...         return self.without(gradient, self.sums(gradient)), slots
    ...     def update_share(self, parameter, gradient, slots, share):
    ...         return self.without(gradient, share.sums), slots
    ...     def without(self, gradient, sums):
    ...         return tuple(g - sums[0] / sums[1] for g in gradient)
    >>> program = ow.SGD(1.0, rules=[Mean()]).minimize(lambda w, x: jnp.sum(w * x), jnp.ones(2), jnp.ones(2))
    >>> [op.type for op in ow.split(program, servers=2, trainers=2).servers[0].ops]
    ['recv', 'count', 'sums', 'add', 'mean', 'sgd', 'send']
    """

    def update(self, parameter: Any, gradient: Any, slots: Any, /) -> tuple[Any, Any]:
        """The gradient as the optimizer should see it, and the next slots.

        A hyperparameter of the rule is the array of this step, such as ``self.rate``; ``self.step`` counts
        the updates before; ``self.optimizer["learning_rate"]`` is the optimizer's.
        """
        raise NotImplementedError(f"{type(self).__name__} does not say how to change a gradient")

    def sums(self, gradient: Sequence[Any], /) -> Sequence[Any]:
        """The numbers that are added up over all gradients; none unless overridden."""
        return ()

    def update_share(self, parameter: Any, gradient: Any, slots: Any, share: Pieces, /) -> tuple[Any, Any]:
        """As ``update``, of pieces of some of the parameters."""
        raise NotImplementedError(f"{type(self).__name__} does not say how to change a part of the gradients")

    @property
    def shares(self) -> bool:
        """Whether it can be given pieces of some parameters; a later ``update`` takes that away."""
        whole, part = (_owner(type(self), name) for name in ("update", "update_share"))
        return part is not GradientRule and issubclass(part, whole)


def _owner(rule: type, name: str) -> type:
    """The class that a method comes from."""
    return next(c for c in rule.__mro__ if name in vars(c))


class ParameterRule(RuleBeside):
    """The base of rules that change what the optimizer made of the parameters.

    ``where`` picks the parameters by name, pattern or predicate; all unless given.
    """

    def update(self, parameter: Any, updated: Any, gradient: Any, slots: Any, /) -> tuple[Any, Any]:
        """The next parameter, from the one before the step and what became of it so far; and the slots."""
        raise NotImplementedError(f"{type(self).__name__} does not say how to change a parameter")


def at_step(rule: R, values: Mapping[str, Any]) -> R:
    """A copy of a rule as ``update`` sees it: in place of its hyperparameters these values of one step.

    ``__init__`` and ``__post_init__`` do not run: they check numbers, and these may be traced.

    >>> from onward.derive.optimizers import SGD
    >>> at_step(SGD(0.1), {"learning_rate": 0.5, "step": 0}).update(1.0, 0.5, {})
    (0.75, {})
    """
    copy = object.__new__(type(rule))
    vars(copy).update(vars(rule), **values)
    return copy


def _no_init_of_its_own(cls: type) -> str:
    """A class that has an ``__init__``, and the fields to write in place of it."""
    _, *given = inspect.signature(vars(cls)["__init__"]).parameters.values()
    named = [p for p in given if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    written = f": {'; '.join(map(_as_field, named))}" if named else ""
    return (
        f"{cls.__name__} has an __init__ of its own, and it is a frozen dataclass: its fields make the "
        "__init__, say when two are equal, and become Variables. Write the fields in the class in place of "
        f"it{written}. A field that is not a Hyperparameter is fixed when the Program is derived; in update "
        "the others are arrays of self."
    )


def _as_field(p: inspect.Parameter) -> str:
    """The field to write in place of an argument of an ``__init__``."""
    if p.default is p.empty:
        return f"{p.name}: ow.Hyperparameter"
    kind = "ow.Hyperparameter" if is_number(p.default) else type(p.default).__name__
    return f"{p.name}: {kind} = {p.default!r}"


def expect_held(name: str, value: Any, dtype: Any, limit: float | None = None) -> None:
    """Raise ``HyperparameterError`` for a number that its dtype turns infinite, into 0, or into the limit.

    >>> expect_held("epsilon", 1e-50, np.float64)
    >>> expect_held("epsilon", 1e-50, np.float32)
    Traceback (most recent call last):
        ...
    onward.core.errors.HyperparameterError: epsilon is 1e-50, which float32 cannot tell from 0. Give a number
    that float32 holds, or train float64 parameters (jax_enable_x64).
    """
    given = np.asarray(value, np.float64)
    with np.errstate(over="ignore", under="ignore"):
        held = given.astype(dtype)
    if np.any(np.isinf(held)):
        word = "holds as infinite"
    elif np.any((given != 0) & (np.abs(held) < np.finfo(dtype).tiny)):  # XLA takes subnormal numbers for 0
        word = "cannot tell from 0"
    elif limit is not None and np.any(held >= limit):
        word = f"cannot tell from {limit:g}"
    else:
        return
    kind = np.dtype(dtype).name
    wider = ", or train float64 parameters (jax_enable_x64)" if kind == "float32" else ""
    raise HyperparameterError(
        f"{name} is {value!r}, which {kind} {word}. Give a number that {kind} holds{wider}."
    )


def _is_hyperparameter(annotation: Any) -> bool:
    """Whether a field is annotated ``Hyperparameter``, also as a string (as dataclasses do for ClassVar)."""
    if isinstance(annotation, str):
        return annotation.rpartition(".")[2] == "Hyperparameter"
    return bool(annotation == Hyperparameter)


def expect_steps(rule: Rule, name: str, least: int = 1) -> None:
    """Raise ``HyperparameterError`` unless this field of a rule is a number of steps, at least that many."""
    what = f"{type(rule).__name__}: {name}"
    expect_count(getattr(rule, name), what, least, "a number of steps", HyperparameterError)
