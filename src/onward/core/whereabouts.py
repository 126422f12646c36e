"""Where a name is that somebody looked for in the wrong place, or knows from another library."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from types import ModuleType
from typing import TYPE_CHECKING, Any

from onward.core.errors import nearest
from onward.core.vocabulary import METHODS, PATHS, SENTENCES, plain


def whereabouts(name: str, module: ModuleType, known_as: str) -> str:
    """A sentence that says where a name is which a module does not have, or which come nearest.

    >>> import onward as ow
    >>> whereabouts("ADOPT", ow, "ow"), whereabouts("adam", ow, "ow"), whereabouts("Linear", ow, "ow")
    ('It is ow.optimizer.ADOPT.', 'It is ow.Adam.', 'It is ow.layer.fc.')
    >>> whereabouts("replicated", ow, "ow"), whereabouts("Conv2d", ow.layer, "ow.layer")
    ('The nearest names are ow.replicate.', 'It is ow.layer.conv.')
    """
    root = sys.modules["onward"]
    return (
        _told(name, module, known_as)
        or (module is not root and _told(name, root, "ow"))
        or _near(name, module, known_as)
        or (module is not root and _near(name, root, "ow"))
        or f"dir({known_as}) lists the names that there are."
    )


def _told(name: str, module: ModuleType, known_as: str) -> str:
    """Where a name is: one written in the same way, one that another library calls so, one in capitals."""
    paths, word = public_paths(module), plain(name)
    found = [f"{known_as}.{path}" for path in paths if path.rpartition(".")[2] == name]
    if not found and word in SENTENCES:
        return SENTENCES[word]
    if not found and word in PATHS:
        found = [f"ow.{PATHS[word]}"]
    found = found or [f"{known_as}.{path}" for path in paths if plain(path) == word]
    return f"It is {' or '.join(found)}." if found else ""


def _near(name: str, module: ModuleType, known_as: str) -> str:
    by_word = {plain(path): path for path in reversed(public_paths(module))}
    close = [f"{known_as}.{by_word[word]}" for word in get_close_matches(plain(name), by_word, cutoff=0.7)]
    return f"The nearest names are {', '.join(close)}." if close else ""


def pointing(module: str, known_as: str) -> Callable[[str], Any]:
    """A module's ``__getattr__``, which says where a name is that it does not have.

    The files of a package are not names of it from then on (``import`` finds them as before): without that
    ``ow.optimizer.adam`` is a module, and calling it says no more than that.

    Args:
        module: the name of the module, whose own imports are done.
        known_as: what people call it, such as ``ow.layer``.

    >>> import onward as ow
    >>> ow.layer.Linear
    Traceback (most recent call last):
    AttributeError: ow.layer has no 'Linear'. It is ow.layer.fc.
    """
    own = sys.modules[module]
    for name, value in list(vars(own).items()):
        if isinstance(value, ModuleType) and value.__name__ == f"{module}.{name}":
            delattr(own, name)

    def get(name: str) -> Any:
        told = "" if name.startswith("_") else f" {whereabouts(name, own, known_as)}"
        raise AttributeError(f"{known_as} has no {name!r}.{told}", name=name)

    return get


class Pointing:
    """Base of what people hold in their hands: an attribute that is not there says what to write instead.

    >>> import onward as ow
    >>> ow.trace(lambda w: w**2, 1.0).params
    Traceback (most recent call last):
    AttributeError: 'Program' object has no attribute 'params'. Write program.parameters.
    """

    __slots__ = ()

    if not TYPE_CHECKING:  # a type checker knows the attributes that there are, and no other

        def __getattr__(self, name: str) -> Any:
            """Refuse an attribute that is not there."""
            told = "" if name.startswith("_") else f" {_advice(type(self), name)}"
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}.{told}", name=name
            )


def _advice(owner: type, name: str) -> str:
    for kind in owner.__mro__:
        if plain(name) in METHODS.get(kind.__name__, ()):
            return METHODS[kind.__name__][plain(name)]
    return nearest(name, (word for word in dir(owner) if not word.startswith("_")))


def public_paths(module: ModuleType) -> Sequence[str]:
    """Every public name of a module, and those of the modules among them, such as ``layer.fc``.

    A name that a module has too is listed once, without that.
    """
    values = {name: getattr(module, name) for name in module.__all__}
    modules = {name: value for name, value in values.items() if isinstance(value, ModuleType)}
    held = (
        (f"{name}.{other}", getattr(value, other), other)
        for name, value in modules.items()
        for other in value.__all__
    )
    return [*values, *(path for path, value, other in held if values.get(other) is not value)]
