"""Optional packages, imported in this one place."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from onward.core.errors import MissingExtraError


def require(module: str, extra: str) -> Any:
    """Import a module of an optional package.

    Raises:
        MissingExtraError: it is not installed; the message says how to get it.
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise MissingExtraError(
            f"{module.partition('.')[0]} is not installed. It comes with an extra of Onward: "
            f"pip install 'onward[{extra}]'"
        ) from error
