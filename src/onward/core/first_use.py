"""Names that a module imports when they are first asked for.

They stand once, in the stub beside the module: the ``.pyi`` that type checkers and editors read in its place
holds ordinary imports. So a program loads the modules that it uses and no others.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Container, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, NoReturn

from onward.core.errors import ArgumentError


class LazyNames(NamedTuple):
    """A module's ``__getattr__``, ``__dir__`` and ``__all__``."""

    get: Callable[[str], Any]
    listed: Callable[[], list[str]]
    public: list[str]


def at_first_call(module: str, name: str) -> Callable[..., Any]:
    """A function of a module that is imported when it is first called: for what few scripts do.

    >>> parse = at_first_call("json", "loads")
    >>> parse("[1, 2]")
    [1, 2]
    """

    def call(*arguments: Any, **named: Any) -> Any:
        return _imported(module, name)(*arguments, **named)

    return call


_whereabouts = at_first_call("onward.core.whereabouts", "whereabouts")


class LibraryFolder(ModuleType):
    """A folder of the library: once loaded, it is met by those who take its name for a function."""

    def __call__(self, *arguments: Any, **named: Any) -> NoReturn:
        """Refuse a call, and say where the function is."""
        package, _, name = self.__name__.rpartition(".")
        told = _whereabouts(name, sys.modules[package], "ow")
        raise ArgumentError(f"ow.{name} is a folder of the library, not a function. {told}")

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled by name, as tools do with modules of the plain type."""
        return import_module, (self.__name__,)


def _mark_rooms(package: ModuleType, public: Container[str]) -> None:
    for name, value in list(vars(package).items()):
        if (
            type(value) is ModuleType
            and value.__name__ == f"{package.__name__}.{name}"
            and name not in public
        ):
            value.__class__ = LibraryFolder


def from_stub(module: str, known_as: str) -> LazyNames:
    """The names that the stub of a module imports; each is kept in the module once it is loaded.

    Args:
        module: the name of the module, which is being imported.
        known_as: what people call it, such as ``ow``, for the error that says where a name is.
    """
    own = sys.modules[module]
    sources = sources_in(Path(str(own.__file__)).with_suffix(".pyi").read_text(encoding="utf-8"))
    lacks = f"module {module!r} has no attribute"
    if "." in module:
        own.__class__, lacks = _Package, f"{known_as} has no"

    def get(name: str) -> Any:
        if name in sources:
            vars(own)[name] = _imported(*sources[name])
            _mark_rooms(own, sources)
            return vars(own)[name]
        # Tools ask for many _names.
        told = "" if name.startswith("_") else f" {_whereabouts(name, own, known_as)}"
        raise AttributeError(f"{lacks} {name!r}.{told}", name=name)

    return LazyNames(get, lambda: sorted({*vars(own), *sources}), sorted(sources))


class _Package(ModuleType):
    """A package of which its own files are no names, loaded or not: ``import`` finds them as before.

    Without that ``ow.optimizer.adam`` is a module, and calling it says no more than that.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if not (isinstance(value, ModuleType) and value.__name__ == f"{self.__name__}.{name}"):
            super().__setattr__(name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled by name, as tools do with modules of the plain type."""
        return import_module, (self.__name__,)


def sources_in(stub: str) -> Mapping[str, tuple[str, str]]:
    """The public names of a stub, each with its module and what it is called there.

    >>> sources_in("from math import pi as pi; from os import path as _path; route = _path")
    {'pi': ('math', 'pi'), 'route': ('os', 'path')}
    """
    nodes = ast.parse(stub).body
    sources = dict(pair for node in nodes if isinstance(node, ast.ImportFrom) for pair in _pairs(node))
    for node in nodes:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Name(id=other)):
                sources[name] = sources[other]
    return {name: source for name, source in sources.items() if not name.startswith("_")}


def _pairs(node: ast.ImportFrom) -> Iterator[tuple[str, tuple[str, str]]]:
    return ((alias.asname or alias.name, (str(node.module), alias.name)) for alias in node.names)


def _imported(module: str, name: str) -> Any:
    """The value that ``from module import name`` gives, without asking the module's own ``__getattr__``."""
    held = vars(import_module(module))
    return held[name] if name in held else import_module(f"{module}.{name}")
