"""The alphabet is the architecture: a folder imports only from folders to its left."""

import ast
from functools import cache
from pathlib import Path

import onward

HOUSE = Path(onward.__file__).parent
FOLDERS = ["core", "define", "derive", "distribute", "execute", "explain", "serve", "shell"]
FILES = sorted(p for p in HOUSE.rglob("*.py") if p.parent != HOUSE)


@cache
def nodes(source: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse(source)))


def imported_folders(source: str) -> list[str]:
    modules = []
    for node in nodes(source):
        if isinstance(node, ast.ImportFrom):
            modules.append(node.module or "")
        elif isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
    parts = [m.split(".") for m in modules]
    return [p[1] for p in parts if p[0] == "onward" and len(p) > 1]


def wrong_way(folder: str, source: str) -> list[str]:
    return [f for f in imported_folders(source) if FOLDERS.index(f) > FOLDERS.index(folder)]


def imports_inside_functions(source: str) -> list[int]:
    functions = [n for n in nodes(source) if isinstance(n, ast.FunctionDef)]
    return [n.lineno for f in functions for n in ast.walk(f) if isinstance(n, ast.Import | ast.ImportFrom)]


def test_imports_point_one_way():
    found = {p: wrong_way(p.relative_to(HOUSE).parts[0], p.read_text()) for p in FILES}
    assert {str(path): folders for path, folders in found.items() if folders} == {}


def test_imports_stand_at_the_top():
    found = {p: imports_inside_functions(p.read_text()) for p in FILES}
    assert {str(path): lines for path, lines in found.items() if lines} == {}


def test_only_one_room_touches_jaxpr_types_and_none_the_private_ones():
    texts = {str(p.relative_to(HOUSE)): p.read_text() for p in HOUSE.rglob("*.py")}
    others = [text for name, text in texts.items() if not name.startswith("core/jaxprs/")]
    assert [text for text in others if "jax.extend" in text] == []
    assert [name for name, text in texts.items() if "jax._src" in text] == []
    assert [name for name, text in texts.items() if "import optax" in text] == []


def test_folders_stand_in_alphabetical_order():
    assert sorted(FOLDERS) == FOLDERS
    assert {p.relative_to(HOUSE).parts[0] for p in FILES} <= set(FOLDERS)


def test_the_tests_above_find_what_they_look_for():
    assert wrong_way("core", "from onward.derive.differentiate import Rule") == ["derive"]
    assert wrong_way("derive", "import onward.core.check") == []
    assert imports_inside_functions("def f():\n    import os\n") == [2]
