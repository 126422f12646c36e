"""The lookup of names given on the command line: ``train.py:loss``, ``package.train:loss``."""

from __future__ import annotations

import inspect
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from onward.core.errors import ArgumentError, OnwardError, nearest
from onward.core.source import is_library

FORMS = "train.py:loss, package.train:loss, or the path of a saved model"
_INSTALLED = tuple({sysconfig.get_path(kind) + os.sep for kind in ("stdlib", "purelib", "platlib")})


@dataclass(frozen=True)
class UserName:
    """A name in a module of the user's, and what it stands for."""

    name: str
    value: Any
    module: ModuleType


def find(target: str) -> UserName:
    """Look up ``FILE:name`` or ``module:name``; it is imported, as ``python FILE`` would find it.

    Args:
        target: a path or the dotted name of a module, a colon, a name in it, with dots if it lies deeper.

    Raises:
        ArgumentError: no such file, module or name, or the file fails while it is imported.

    Example:
        >>> find("onward.shell.demo:network").name
        'network'
    """
    path, _, name = target.rpartition(":")
    if not path:
        raise ArgumentError(_unnamed(target))
    module = imported(path)
    return UserName(name, attribute(module, name), module)


def attribute(module: ModuleType, name: str) -> Any:
    """The value of a name in a module; the name has dots if it lies deeper.

    Raises:
        ArgumentError: there is no such name; the message lists what is there.
    """
    value: Any = module
    for part in name.split("."):
        try:
            value = getattr(value, part)
        except AttributeError:
            raise ArgumentError(
                f"{_file_of(module)} has no {name!r}. {_offered(name, module)}".strip()
            ) from None
    return value


def imported(path: str) -> ModuleType:
    """The module in a file, or of a dotted name.

    Raises:
        ArgumentError: there is none, or it fails while it is imported.
    """
    is_file = path.endswith(".py") or os.sep in path
    if is_file and Path(path).is_dir():
        raise ArgumentError(_folder(path))
    if is_file and not Path(path).is_file():
        raise ArgumentError(f"There is no file {path}. What is to be shown is written as {FORMS}.")
    try:
        return _from_file(Path(path).resolve()) if is_file else _from_path(path)
    except SystemExit as stop:
        raise ArgumentError(
            f"{path} ended itself with status {stop.code} while it was imported. Put what is for running it "
            'under: if __name__ == "__main__":'
        ) from stop
    except Exception as error:
        raise ArgumentError(_failed(path, error, is_file)) from error


def called(name: str, function: Any) -> Any:
    """The result of a function of the user's without arguments.

    Raises:
        ArgumentError: it raises an error; the message says which and where.
        OnwardError: an error of Onward, which tells its place itself.
    """
    try:
        return function()
    except OnwardError:
        raise
    except (Exception, SystemExit) as error:
        raise ArgumentError(f"{name}() cannot be called. At {_place(error)}: {_said(error)}") from error


def names_in(module: ModuleType) -> list[str]:
    """The names that a module defines, in the order of its lines; without what it imports."""
    return [
        name for name, value in vars(module).items() if not name.startswith("_") and _is_own(module, value)
    ]


def _is_own(module: ModuleType, value: Any) -> bool:
    if inspect.isroutine(value) or inspect.isclass(value):
        return bool(value.__module__ == module.__name__)
    return not inspect.ismodule(value)


def signature_of(function: Any) -> str:
    """The arguments of a function in brackets, without annotations."""
    parameters = inspect.signature(function).parameters.values()
    return f"({', '.join(p.name if p.default is p.empty else f'{p.name}={p.default!r}' for p in parameters)})"


def _from_file(path: Path) -> ModuleType:
    """The file as a module; one that was imported before is the same."""
    name = path.stem
    known = sys.modules.get(name)
    if known is not None and getattr(known, "__file__", None) == str(path):
        return known
    if known is not None:
        name = f"shown_{name}"
    spec = spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    _look_in(path.parent)
    sys.modules[name] = module  # dataclasses look themselves up there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _from_path(name: str) -> ModuleType:
    _look_in(Path.cwd())
    return import_module(name)


def _look_in(folder: Path) -> None:
    """Let what lies in a folder be imported, as for a script that lies there."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _folder(path: str) -> str:
    return f"{path} is a folder; expected a file in it. What is to be shown is written as {FORMS}."


def _unnamed(target: str) -> str:
    if Path(target).is_dir():
        return _folder(target)
    if not target.endswith(".py"):
        return f"There is no file {target!r}. What is to be shown is written as {FORMS}."
    module = imported(target)
    return f"Which function of {target}? Write {target}:NAME. {_listed(module)}".strip()


def _offered(name: str, module: ModuleType) -> str:
    """The names of a module that are close to one, or its functions."""
    names = names_in(module)
    return nearest(name, names) if get_close_matches(name, names, cutoff=0.5) else _listed(module)


def _listed(module: ModuleType) -> str:
    """The functions of a module, with their arguments, as a sentence; nothing if it has none."""
    functions = [n for n in names_in(module) if inspect.isfunction(getattr(module, n))]
    shown = ", ".join(f"{n}{signature_of(getattr(module, n))}" for n in functions[:8])
    return f"Its functions: {shown}{', ...' if len(functions) > 8 else ''}." if functions else ""


def _file_of(module: ModuleType) -> str:
    return Path(module.__file__).name if module.__file__ else module.__name__


def _failed(path: str, error: Exception, is_file: bool) -> str:
    """Why a module could not be imported, with the line of it."""
    if isinstance(error, ModuleNotFoundError) and not is_file and f"{path}.".startswith(f"{error.name}."):
        return f"There is no module {error.name!r} here. What is to be shown is written as {FORMS}."
    said = _said(error)
    if "no known parent package" in said:
        return f"{path} belongs to a package. From the folder above the package, write package.module:name."
    rerun = f" python {path} shows all of it." if is_file else ""
    return f"{path} cannot be imported. At {_place(error)}: {said}{'' if said.endswith('.') else '.'}{rerun}"


def _said(error: BaseException) -> str:
    """The class and text of an error in a line, without the notes that JAX adds."""
    told = traceback.TracebackException.from_exception(error)
    told.__notes__ = []
    return [*told.format_exception_only()][-1].strip()


def _place(error: BaseException) -> str:
    """The innermost line of what is not installed."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    frames = [f"{frame.filename}:{frame.lineno}" for frame in _frames(error)]
    return frames[-1] if frames else "an unknown line"


def _frames(error: BaseException) -> Iterator[traceback.FrameSummary]:
    for frame in traceback.extract_tb(error.__traceback__):
        installed = frame.filename.startswith(_INSTALLED) or is_library(frame.filename)
        if not installed and Path(frame.filename) != Path(__file__):
            yield frame
