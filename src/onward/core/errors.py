"""The errors and warnings of Onward, as one tree.

    OnwardError
    ├── TraceError          (TypeError)     a function that cannot become a Program
    ├── ArgumentError       (TypeError)     a call with the wrong number, structure, shape or dtype
    ├── LossError           (ValueError)    a loss that has no gradient to follow
    ├── HyperparameterError (ValueError)    a hyperparameter that is not a finite number, or out of range
    ├── GraphError          (ValueError)    a Program that breaks the rules of the graph
    ├── UnknownNameError    (LookupError)   a name that no Variable has
    ├── RecipeError         (RuntimeError)  a Program that cannot be traced again at another shape
    ├── StateError          (RuntimeError)  a State that was given away, or belongs elsewhere
    ├── OutOfMemoryError    (MemoryError, RuntimeError)  a step for which the memory of a device is not enough
    ├── NonFiniteError      (FloatingPointError)  a loss, gradient or next state that is not a finite number
    ├── PeerError           (RuntimeError)  another process of the same computation died or hangs
    ├── ClusterError        (RuntimeError)  trainers and parameter servers that cannot go on
    ├── CheckpointError     (OSError)       a checkpoint that cannot be written, or is not what was written
    ├── ModelFileError      (OSError)       a model file that cannot be written, or is not what was written
    ├── ServeError          (OSError)       an endpoint that cannot be started
    └── MissingExtraError   (ImportError)   an optional package that is not installed

    UnreachedWarning        (UserWarning)   a parameter that was to be trained and is not reached

Every message says what was found, what was expected, and what to write instead.
"""

from collections.abc import Callable, Iterable
from difflib import get_close_matches
from functools import wraps
from types import FunctionType
from typing import Any, ClassVar, NoReturn, ParamSpec, TypeVar, cast

P = ParamSpec("P")
R = TypeVar("R")


class OnwardError(Exception):
    """The root of every error that Onward raises on purpose."""


class TraceError(OnwardError, TypeError):
    """The function cannot be traced into a Program."""


class ArgumentError(OnwardError, TypeError):
    """A call has the wrong number, structure, shape or dtype of arguments."""


class LossError(OnwardError, ValueError):
    """The loss is not a floating point scalar, or nothing that it depends on can be trained."""


class UnknownNameError(OnwardError, LookupError):
    """No Variable has this name."""


class HyperparameterError(OnwardError, ValueError):
    """A hyperparameter is not a finite number, or lies outside its range."""


class GraphError(OnwardError, ValueError):
    """A Program breaks a rule of the graph."""


class RecipeError(OnwardError, RuntimeError):
    """A Program cannot be traced again at another shape."""


class StateError(OnwardError, RuntimeError):
    """A State cannot be used here."""


class CheckpointError(OnwardError, OSError):
    """A checkpoint cannot be written, or is not what was written."""


class ModelFileError(OnwardError, OSError):
    """A model file cannot be written, or is not what was written."""


class ServeError(OnwardError, OSError):
    """An endpoint cannot be started: its port is taken, or may not be used."""


class NonFiniteError(OnwardError, FloatingPointError):
    """A loss, a gradient or the next state is NaN or infinite.

    Attributes:
        state: the State before the step, where ``compile(..., check_finite=True)`` kept it.
        finding: which op it was, a ``NonFinite``, where that is known.
        undone: how many steps were begun since that state and changed nothing, as far as that is known.
    """

    state: Any = None
    finding: Any = None
    undone: int = 0


class OutOfMemoryError(OnwardError, MemoryError, RuntimeError):
    """A step needs more memory than a device has left; a ``RuntimeError`` too, as the one of JAX behind it.

    Attributes:
        program: the Program as it was compiled: ``onward.memory(error.program, tune=False)``.
        asked: the bytes that the allocator was asked for; None where it does not say.
        free: the bytes that it had left; None where it does not say.
        limit: the bytes that it may hand out at all; None where nobody says.
    """

    program: Any = None
    asked: int | None = None
    free: int | None = None
    limit: int | None = None


class PeerError(OnwardError, RuntimeError):
    """Another process of the same computation died, hangs, or does something else."""


class ClusterError(OnwardError, RuntimeError):
    """Trainers and parameter servers cannot be started, or cannot go on."""


class MissingExtraError(OnwardError, ImportError):
    """An optional package is needed and not installed."""


class UnreachedWarning(UserWarning):
    """A parameter was to be trained, and the loss does not depend on it."""


_ELSEWHERE = {
    "activation": "act",
    "b1": "beta1",
    "b2": "beta2",
    "bias": "b",
    "bias_attr": "b",
    "eps": "epsilon",
    "decay_steps": "steps",
    "input": "x",
    "kernel_size": "size",
    "lr": "learning_rate",
    "num_epochs": "epochs",
    "num_filters": "filters",
    "out_channels": "filters",
    "out_features": "size",
    "p": "rate",
    "param_attr": "w",
    "params": "parameter_list",
    "kernel": "w",
    "strides": "stride",
    "units": "size",
    "validation_data": "test",
    "var_list": "parameter_list",
    "verbose": "progress",
    "warmup_steps": "warmup",
    "wd": "weight_decay",
    "weight": "w",
}  # what other libraries, and the early designs of Paddle, call arguments


def known_as(name: str, names: Iterable[str]) -> str:
    """A sentence that says what an argument of this name is called here, or which come nearest.

    >>> known_as("var_list", ["parameter_list", "no_grad_set"]), known_as("W", ["w", "b"])
    ("Here it is 'parameter_list'.", "Here it is 'w'.")
    """
    names = list(names)
    here = name.lower() if name.lower() in names else _ELSEWHERE.get(name, name)
    return f"Here it is {here!r}." if here in names and here != name else nearest(name, names)


def answering(function: Callable[P, R]) -> Callable[P, R]:
    """The same function, which says what an argument that it does not have is called here.

    >>> answering(lambda epochs: epochs)(num_epochs=3)
    Traceback (most recent call last):
    onward.core.errors.ArgumentError: <lambda> has no argument 'num_epochs'. Here it is 'epochs'.
    """
    code = cast("FunctionType", function).__code__
    names = [n for n in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount] if n != "self"]

    @wraps(function)
    def called(*args: P.args, **options: P.kwargs) -> R:
        for name in options:
            if name not in names:
                raise ArgumentError(f"{code.co_qualname} has no argument {name!r}. {known_as(name, names)}")
        return function(*args, **options)

    return called


def nearest(name: str, names: Iterable[str]) -> str:
    """A sentence that offers the names closest to the one that was not found.

    >>> nearest("w3", ["w1", "w2", "bias"])
    "The nearest names are 'w1', 'w2'."
    """
    names = list(names)
    close = get_close_matches(str(name), names, n=3, cutoff=0.5)
    if close:
        return f"The nearest names are {', '.join(map(repr, sorted(close)))}."
    if not names:
        return "There are no names to choose from."
    shown = ", ".join(map(repr, sorted(names)[:8]))
    return f"The names are {shown}{', ...' if len(names) > 8 else ''}."


class ByName:
    """The base of what is read by name: ``name in it`` tells whether there is such a one to read."""

    __slots__ = ()
    __iter__: Any = None  # Python would ask for the names 0, 1, 2, ...

    def __getitem__(self, name: Any) -> Any:
        raise NotImplementedError

    def __contains__(self, name: object) -> bool:
        try:
            self[name]
        except UnknownNameError:
            return False
        return True


class NotPickled:
    """The base of everything that holds what was compiled or traced here, which nothing can pickle or copy.

    ``unpickled`` says what it is, and what to write instead.
    """

    unpickled: ClassVar[tuple[str, str]]

    def __reduce__(self) -> NoReturn:
        what, instead = self.unpickled
        raise ArgumentError(
            f"{what} cannot be pickled or copied: it holds what was compiled or traced here. {instead}"
        )
