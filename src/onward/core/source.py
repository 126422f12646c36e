"""Where in the user's code an op came from: file, line and function, found when somebody asks."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import count
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any

import jax

_HOUSE = str(Path(__file__).parents[1]) + os.sep
_LIBRARIES = (
    _HOUSE,
    str(Path(jax.__file__).parent) + os.sep,
    f"-packages{os.sep}equinox{os.sep}",
    f"-packages{os.sep}flax{os.sep}",
    f"-packages{os.sep}haiku{os.sep}",
    f"-packages{os.sep}optax{os.sep}",
    "<frozen ",
)
_INSTALLED = f"-packages{os.sep}"
_STANDARD = sysconfig.get_paths()["stdlib"] + os.sep
_SPEAKS_FOR_THE_USER = _HOUSE + "shell"
_order = count()

StackFrame = tuple[CodeType | str, int]
"""A function that was running, and how far; the name of one that JAX ran within an op."""


def is_library(filename: str) -> bool:
    """Whether a frame of this file belongs to a library rather than to the user."""
    if filename.startswith(_SPEAKS_FOR_THE_USER):
        return False
    return any(part in filename for part in _LIBRARIES)


def is_of_user(filename: str) -> bool:
    """Whether a file is the user's own: neither a library's whose frames are left out nor installed."""
    return not (is_library(filename) or _INSTALLED in filename or filename.startswith(_STANDARD))


def named(file: str) -> str:
    """A file as its writer knows it: a cell of a notebook as ``In[3]``, any other by its path.

    Jupyter compiles a cell under the path of a file that does not exist; IPython knows which cell that was.

    >>> named("/home/ann/train.py")
    '/home/ann/train.py'
    """
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    name_of = getattr(getattr(shell, "compile", None), "format_code_name", None)
    cell = name_of(file) if name_of else None
    return str(cell[1]) if cell else file


def function_name(function: Any) -> str:
    """The name of a function; where it stands, if it has none.

    >>> function_name(named)
    'named'
    """
    name = str(getattr(function, "__name__", type(function).__name__))
    code = getattr(function, "__code__", None)
    if name.isidentifier() or code is None:
        return name
    return f"the lambda at {os.path.basename(named(code.co_filename))}:{code.co_firstlineno}"


class Source:
    """The place in the user's code behind an op; reading a traceback is put off until asked.

    Attributes:
        within: the call of a jitted function around it, in whose own trace it stands.
        marks: the scopes that ``jax.named_scope`` opened around it, without the names of jitted functions.
        runs: the function of the user that the op itself runs, such as the body of a loop.
        order: grows in the order in which places are read.
        layers: for an op that stands for repeated layers, the places of the ops of each.
    """

    def __init__(self, traceback: Any, within: Source | None = None, marks: str = "", runs: str = "") -> None:
        self._traceback = traceback
        self.within, self.marks, self.runs, self.order = within, marks, runs, next(_order)
        self.layers: tuple[tuple[Source, ...], ...] = ()

    def over(self, layers: Iterable[Iterable[Source | None]]) -> Source:
        """The same place, for an op that stands for the ops at all of these, layer by layer."""
        source = Source(self._traceback, self.within, self.marks)
        source.__dict__["_frame"] = self._frame
        source.layers = tuple(tuple(s for s in layer if s is not None) for layer in layers)
        return source

    @classmethod
    def at(cls, file: str, line: int, function: str) -> Source:
        """A place that is known already."""
        source = cls(None)
        source.__dict__["_frame"] = (file, line, function)
        return source

    @cached_property
    def _frame(self) -> tuple[str, int, str]:
        frames = self._traceback.frames if self._traceback is not None else ()
        for frame in frames:
            if not is_library(frame.file_name):
                return frame.file_name, frame.line_num, frame.function_name
        return "", 0, ""

    @property
    def file(self) -> str:
        """The path of the user's file, or an empty string where none is known."""
        return self._frame[0]

    @property
    def name(self) -> str:
        """The file as it is shown: its name without the folders, or the cell of a notebook."""
        return os.path.basename(named(self.file))

    @property
    def line(self) -> int:
        """The line in that file, counted from 1; 0 where none is known."""
        return self._frame[1]

    @property
    def function(self) -> str:
        """The name of the function that the line stands in."""
        return self._frame[2]

    @cached_property
    def calls(self) -> tuple[tuple[str, str, int], ...]:
        """The calls that led here, outermost first: file, function and line."""
        frames = self._traceback.frames if self._traceback is not None else ()
        return tuple((f.file_name, f.function_name, f.line_num) for f in reversed(frames))

    @property
    def stack(self) -> Sequence[StackFrame]:
        """The functions that were running, outermost first, from the one that was traced."""
        own: list[StackFrame] = list(self.within.stack) if self.within is not None else []
        if self._traceback is not None:
            codes, positions = self._traceback.raw_frames()
            own += zip(reversed(codes), reversed(positions), strict=True)
        return [*own, (self.runs, 0)] if self.runs else own

    @cached_property
    def key(self) -> tuple[int, ...]:
        """Equal for places that were recorded as one."""
        return (*(self.within.key if self.within is not None else ()), id(self._traceback))

    def __str__(self) -> str:
        return f"{self.name}:{self.line}" if self.file else ""


def line_of(error: BaseException) -> str:
    """The innermost line of the user's code in a traceback, as ``file:line in function``."""
    found = [
        f"{named(frame.tb_frame.f_code.co_filename)}:{frame.tb_lineno} in {frame.tb_frame.f_code.co_name}"
        for frame in _frames(error.__traceback__)
        if not is_library(frame.tb_frame.f_code.co_filename)
    ]
    return found[-1] if found else "an unknown line"


def user_line() -> str:
    """The line of the user's code that is running now, as ``file:line``."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and is_library(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{named(frame.f_code.co_filename)}:{frame.f_lineno}" if frame is not None else "an unknown line"


def user_level() -> int:
    """The ``stacklevel`` that makes a warning given by the caller point at the user's line."""
    frame = sys._getframe(1)
    level = 1
    while frame.f_back is not None and is_library(frame.f_code.co_filename):
        frame, level = frame.f_back, level + 1
    return level


def _frames(traceback: TracebackType | None) -> Iterator[TracebackType]:
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next
