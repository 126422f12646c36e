"""How treescope shows objects of the house.

Only treescope calls this, so that it is installed and imported by then.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any


def foldable_text(text: str, path: str | None) -> Any:
    """A text as a node whose first line unfolds the rest."""
    parts: Any = import_module("treescope.rendering_parts")
    first, *rest = text.split("\n")
    if not rest:
        return parts.build_one_line_tree_node(parts.text(first), path)
    below = parts.on_separate_lines([parts.text(""), *map(parts.text, rest)])
    contents = parts.fold_condition(collapsed=parts.text(" ..."), expanded=below)
    return parts.build_custom_foldable_tree_node(label=parts.text(first), contents=contents, path=path)


def named_values(kind: type, values: Mapping[str, Any], path: str | None, subtree_renderer: Any) -> Any:
    """Values by name, each shown by itself; ``kind`` is the class whose object ``object[name]`` reads."""
    library: Any = import_module("treescope.repr_lib")
    return library.render_dictionary_wrapper(kind, values, path, subtree_renderer)
