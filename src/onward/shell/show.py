"""``onward show``: the Program of a function in somebody's file, as text, as a table, or as a picture."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onward.core.errors import ArgumentError, LossError, ModelFileError, nearest
from onward.core.program import Program
from onward.core.show import listing
from onward.core.structure import describe
from onward.define.deferred import Deferred
from onward.define.lazy import has_lazy
from onward.define.trace import trace
from onward.derive import optimizers
from onward.derive.optimizer import Optimizer
from onward.execute.step import Step
from onward.explain.diff.diff import diff
from onward.explain.draw.draw import draw
from onward.explain.memory.memory import memory
from onward.explain.summary.summary import summary
from onward.fit.model import Model
from onward.fit.trainer import Trainer
from onward.serve.export.load import load, load_step
from onward.shell.arguments import arguments_of, fed, is_maker, value_of
from onward.shell.user_code import UserName, attribute, find

_EXPECTED = "a function, a Program, a Step, a Model, or what a layer returned"


@dataclass(frozen=True)
class ShowRequest:
    """The options of ``onward show``: what to show, and how."""

    target: str
    feed: tuple[str, ...] = ()
    args: str | None = None
    batch: int | None = None
    has_aux: bool = False
    optimizer: str | None = None
    depth: int | None = None
    source: bool = False
    summary: bool = False
    memory: bool = False
    draw: Path | None = None
    diff: str | None = None


def show(request: ShowRequest) -> None:
    """Print what is asked for; the listing, if nothing is.

    Raises:
        ArgumentError: what is named is not there, or is nothing that has a Program.
        OnwardError: it cannot be traced or derived.
    """
    program = program_of(request, request.target)
    for view in _views(request, program):
        print(view)


def _views(request: ShowRequest, program: Program) -> Iterator[Any]:
    chosen = (request.summary, request.memory, request.draw, request.diff)
    if not any(chosen):
        yield listing(program, request.depth, request.source)
    if request.summary:
        yield summary(program)
    if request.memory:
        yield memory(program)
    if request.draw:
        drawing = draw(program, request.depth)
        yield f"{drawing} -> {drawing.save(request.draw)}"
    if request.diff:
        yield diff(program, program_of(request, request.diff))


def program_of(request: ShowRequest, target: str) -> Program:
    """The Program of a target, with the optimizer's part if one is asked for."""
    if Path(target).is_file() and not target.endswith(".py"):
        return _saved(request, target)
    named = find(target)
    program = _forward(request, named)
    if request.optimizer is None:
        return program
    try:
        return _optimizer(request.optimizer, named).minimize(program)
    except LossError as error:
        advice = " If the function returns (loss, anything), say --has-aux." * (not request.has_aux)
        raise LossError(f"{error}{advice}") from None


def _forward(request: ShowRequest, named: UserName) -> Program:
    """The Program that something has, makes, or is when traced."""
    value = _made(named.value)
    if value is None:
        raise ArgumentError(f"{named.name}() returned nothing; expected {_EXPECTED}.")
    if isinstance(value, Deferred):
        return value.complete(fed(request.feed, named.module))
    found = _held(value)
    if found is None:
        return _traced(request, named)
    _expect_traced(request, named.name)
    return found


def _saved(request: ShowRequest, path: str) -> Program:
    """The Program in a file of ``save``: a model, or a step."""
    _expect_traced(request, path)
    if request.optimizer:
        raise ArgumentError(
            f"{path} holds a model without its code, from which no gradient is derived. --optimizer takes "
            "the network itself: FILE:NAME."
        )
    try:
        return load(path).test_program
    except ModelFileError:
        with suppress(ModelFileError):
            return load_step(path)[0].program
        raise


def _expect_traced(request: ShowRequest, name: str) -> None:
    """Raise ``ArgumentError`` for options that say how something is traced, where nothing is."""
    given = request.feed or request.args or request.batch or request.has_aux
    if given and not request.diff:
        raise ArgumentError(
            f"{name} is traced already: --feed, --args, --batch and --has-aux come too late for it."
        )


def _made(value: Any) -> Any:
    """The result of a function without arguments; the function itself if it cannot run outside of a trace.

    A network cannot, once it computes with what it declares.
    """
    if not is_maker(value):
        return value
    try:
        return value()
    except Exception:  # trace says why, with the line
        return value


def _held(value: Any) -> Program | None:
    """The Program that a value is or holds; None if there is none."""
    if isinstance(value, Program):
        return value
    if isinstance(value, Step | Trainer):
        return value.program
    if isinstance(value, Model):
        return value.topology
    return None


def _traced(request: ShowRequest, named: UserName) -> Program:
    value, given = named.value, fed(request.feed, named.module)
    options: dict[str, Any] = {"batch_size": request.batch, "has_aux": request.has_aux}
    if has_lazy(value) and not callable(value):
        return trace(value, feed=given, **options)
    if not callable(value) or isinstance(value, type):
        raise ArgumentError(f"{named.name} is {describe(value)}; expected {_EXPECTED}.")
    first = () if request.args is None else _several(_arguments(request.args, named))
    args, feed = arguments_of(value, given, first, named.module)
    program = trace(value, *args, feed=feed, **options)
    if request.batch is not None and args and not _declares(program, len(args)):
        raise ArgumentError(
            f"--batch {request.batch} is the length of data that is declared, and {named.name} takes all of "
            "its data as arguments: --feed or --args says how long they are."
        )
    return program


def _declares(program: Program, arguments: int) -> bool:
    """Whether there is data beside the arguments of the function, of which the first is the parameters."""
    assert program.signature is not None
    return len(program.signature.data) >= arguments


def _arguments(name: str, named: UserName) -> Any:
    """The value that ``--args`` names: in the same file, or ``FILE:function``."""
    return value_of(name, find(name).value if ":" in name else attribute(named.module, name))


def _several(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _optimizer(name: str, named: UserName) -> Optimizer:
    """An optimizer by its name: one in the user's file, or one of Onward's with its defaults."""
    found = getattr(named.module, name, None) or getattr(optimizers, name, None)
    made = found() if isinstance(found, type) else found
    if not isinstance(made, Optimizer):
        raise ArgumentError(
            f"There is no optimizer {name!r}, neither in the file nor in Onward. "
            f"{nearest(name, optimizers.__all__)}"
        )
    return made
