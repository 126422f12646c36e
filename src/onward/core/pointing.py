"""Modules and objects that say what to write in place of a name that they do not have.

The words, and the tables of what other libraries call things, are read when such a name is first asked for.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from onward.core.first_use import at_first_call

_whereabouts = at_first_call("onward.core.whereabouts", "whereabouts")
_advice = at_first_call("onward.core.whereabouts", "advice")


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
        told = "" if name.startswith("_") else f" {_whereabouts(name, own, known_as)}"
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
            """Refuse an attribute that is not there; one that is failed in its property, which says why."""
            if hasattr(type(self), name):
                return object.__getattribute__(self, name)
            told = "" if name.startswith("_") else f" {_advice(type(self), name)}"
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}.{told}", name=name
            )
