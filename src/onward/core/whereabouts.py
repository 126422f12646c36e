"""Where a name is that somebody looked for in the wrong place, or knows from another library."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from difflib import get_close_matches
from types import ModuleType

from onward.core.errors import known_as, nearest
from onward.core.vocabulary import HYPERPARAMETERS, METHODS, PATHS, SENTENCES, plain


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


def advice(owner: type, name: str) -> str:
    """The words to write in place of an attribute that objects of this type do not have."""
    for kind in owner.__mro__:
        if plain(name) in METHODS.get(kind.__name__, ()):
            return METHODS[kind.__name__][plain(name)]
    return nearest(name, (word for word in dir(owner) if not word.startswith("_")))


def hyperparameter(name: str, names: Sequence[str]) -> str:
    """The words to write in place of a hyperparameter that an optimizer or a rule does not have.

    >>> hyperparameter("lr", ["learning_rate"]), hyperparameter("clipnorm", ["learning_rate"])
    ("Here it is 'learning_rate'.", 'Write rules=[ow.ClipByNorm(1.0)].')
    """
    return HYPERPARAMETERS.get(plain(name)) or known_as(name, names)


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
