"""The alphabet is the architecture: a folder imports only from folders to its left."""

import ast
from collections import Counter
from collections.abc import Container, Mapping
from functools import cache
from pathlib import Path

import onward
from onward.core.primitives.table import ROWS

HOUSE = Path(onward.__file__).parent
FOLDERS = [
    "core",
    "define",
    "derive",
    "develop",
    "distribute",
    "execute",
    "explain",
    "fit",
    "fleet",
    "serve",
    "shell",
]
FILES = sorted(p for p in HOUSE.rglob("*.py") if p.parent != HOUSE)
WORDS_AS_WELL = {"call", "check", "max", "min", "split"}  # in the house mostly no primitives
PRIMITIVES = {row.name for row in ROWS} - WORDS_AS_WELL
NAMING_PRIMITIVES = {
    "core/primitives/table.py",
    "core/vocabulary.py",  # words of other libraries
    "execute/nonfinite/finding.py",  # the advice, whose keys a test compares with the table
}


def class_names() -> Counter[str]:
    return Counter(
        node.name.lstrip("_")
        for p in FILES
        for node in nodes(p.read_text())
        if isinstance(node, ast.ClassDef)
    )


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


def imported_files(source: str, files: Container[str]) -> set[str]:
    """The files that are imported anywhere in one, be it for annotations only or inside of a function."""
    found = {
        path
        for node in nodes(source)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        for path in (node.module or "", f"{node.module}.{alias.name}")
    }
    found |= {alias.name for node in nodes(source) if isinstance(node, ast.Import) for alias in node.names}
    return {name for path in found if (name := path.removeprefix("onward.")) in files}


def circles(sources: Mapping[str, str]) -> set[frozenset[str]]:
    """The groups of files each of which imports, by however many others, every other and itself."""
    imports = {name: imported_files(source, sources) for name, source in sources.items()}
    reached = {name: everything_behind(name, imports) for name in imports}
    return {
        frozenset(other for other in behind if name in reached[other])
        for name, behind in reached.items()
        if name in behind
    }


def everything_behind(name: str, imports: Mapping[str, set[str]]) -> set[str]:
    found, open_ = set(), [name]
    while open_:
        new = imports[open_.pop()] - found
        found |= new
        open_ += new
    return found


def wrong_way(folder: str, source: str) -> list[str]:
    return [f for f in imported_folders(source) if FOLDERS.index(f) > FOLDERS.index(folder)]


def imports_inside_functions(source: str) -> list[int]:
    functions = [n for n in nodes(source) if isinstance(n, ast.FunctionDef)]
    return [n.lineno for f in functions for n in ast.walk(f) if isinstance(n, ast.Import | ast.ImportFrom)]


def collections_of_primitives(source: str) -> list[list[str]]:
    """The names of primitives in each set, list or dict, or text that is split, which holds several."""
    found = []
    for node in nodes(source):
        if isinstance(node, ast.Set | ast.Tuple | ast.List):
            found.append([e.value for e in node.elts if isinstance(e, ast.Constant)])
        elif isinstance(node, ast.Dict):
            found += [
                [e.value for e in side if isinstance(e, ast.Constant)] for side in (node.keys, node.values)
            ]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and is_a_list(node.value):
            found.append(node.value.split())
    named = ([name for name in names if name in PRIMITIVES] for names in found)
    return [names for names in named if len(names) > 1]


def is_a_list(text: str) -> bool:
    """Whether nothing but words stand in it, and more of them are primitives than are not."""
    words = text.split()
    if not all(word.replace("-", "_").isidentifier() for word in words):
        return False
    return 2 * len(PRIMITIVES.intersection(words)) > len(words)


def test_imports_point_one_way():
    found = {p: wrong_way(p.relative_to(HOUSE).parts[0], p.read_text()) for p in FILES}
    assert {str(path): folders for path, folders in found.items() if folders} == {}


def test_imports_stand_at_the_top():
    found = {p: imports_inside_functions(p.read_text()) for p in FILES}
    assert {str(path): lines for path, lines in found.items() if lines} == {}


def test_files_import_in_no_circle():
    parts = {p: p.relative_to(HOUSE).with_suffix("").parts for p in FILES}
    named = {".".join(part for part in names if part != "__init__"): p for p, names in parts.items()}
    assert circles({name: p.read_text() for name, p in named.items()}) == set()


def test_only_one_room_touches_jaxpr_types_and_none_the_private_ones():
    texts = {str(p.relative_to(HOUSE)): p.read_text() for p in HOUSE.rglob("*.py")}
    others = [text for name, text in texts.items() if not name.startswith("core/jaxprs/")]
    assert [text for text in others if "jax.extend" in text] == []
    assert [name for name, text in texts.items() if "jax._src" in text] == []
    assert [name for name, text in texts.items() if "import optax" in text] == []


def test_only_the_table_holds_names_of_primitives():
    found = {str(p.relative_to(HOUSE)): collections_of_primitives(p.read_text()) for p in FILES}
    assert {path for path, names in found.items() if names} == NAMING_PRIMITIVES


def test_folders_stand_in_alphabetical_order():
    assert sorted(FOLDERS) == FOLDERS
    assert {p.relative_to(HOUSE).parts[0] for p in FILES} <= set(FOLDERS)


def test_the_tests_above_find_what_they_look_for():
    assert wrong_way("core", "from onward.derive.differentiate import Rule") == ["derive"]
    assert wrong_way("derive", "import onward.core.check") == []
    planted = {
        "core.a": "if TYPE_CHECKING:\n    from onward.core.b import B\n",
        "core.b": "def f():\n    from onward.core import c\n",
        "core.c": "import onward.core.a\nfrom onward.core.d import D\n",
        "core.d": "",
        "core.e": "from onward.core.a import A\n",
    }
    assert circles(planted) == {frozenset({"core.a", "core.b", "core.c"})}
    assert circles({**planted, "core.b": ""}) == set()
    assert imports_inside_functions("def f():\n    import os\n") == [2]
    assert collections_of_primitives("LOOPS = ('scan', 'while')") == [["scan", "while"]]
    assert collections_of_primitives("x = {'add': 1, 'mul': 2, 'other': 3}, {1: 'min'}") == [["add", "mul"]]
    assert collections_of_primitives("set('exp log tanh'.split())") == [["exp", "log", "tanh"]]
    assert collections_of_primitives("'what to add to a sum'") == []


def test_a_class_name_is_one_thing_in_the_whole_house():
    assert [name for name, count in class_names().items() if count > 1 and name not in ("L1", "L2")] == []


def test_a_docstring_is_a_plain_sentence():
    """It does not begin with "What": that names a thing by a riddle, where a noun or a verb would say it."""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef
    found = [(p, node) for p in FILES for node in nodes(p.read_text()) if isinstance(node, kinds)]
    told = [(str(p.relative_to(HOUSE)), ast.get_docstring(node) or "") for p, node in found]
    assert [(path, text[:60]) for path, text in told if text.startswith("What ")] == []
