"""What each file of ``benchmarks/`` asks, and what ``benchmarks/cpu.json`` holds of the answer."""

import ast
import json
import re
from pathlib import Path
from textwrap import fill
from typing import Any

from sphinx.application import Sphinx


def setup(app: Sphinx) -> dict[str, bool]:
    """Tell Sphinx what is here."""
    app.connect("builder-inited", write)
    return {"parallel_read_safe": True}


def write(app: Sphinx) -> None:
    """Write one Markdown file that the page about benchmarks includes."""
    folder = Path(app.srcdir) / "_generated"
    folder.mkdir(exist_ok=True)
    root = Path(app.srcdir).parent / "benchmarks"
    answers = json.loads((root / "cpu.json").read_text())
    files = sorted(root.glob("*.py"))
    said = {path.stem: docstring(path) for path in files}
    sections = [section(name, text, answers.get(name)) for name, text in said.items() if "?" in first(text)]
    (folder / "benchmarks.md").write_text("\n".join(sections))


def docstring(path: Path) -> str:
    """What a file says of itself."""
    return ast.get_docstring(ast.parse(path.read_text())) or ""


def first(text: str) -> str:
    """The first paragraph."""
    return text.split("\n\n", 1)[0].strip()


def section(name: str, text: str, answer: dict[str, Any] | None) -> str:
    """A docstring as Markdown: its first sentence is the heading, its indented parts are code already."""
    question, rest = first(text).replace("\n", " "), text.split("\n\n", 1)[1]
    rest = re.sub(r"::$", ":", rest, flags=re.MULTILINE)
    rest = re.sub(r"^    .*$", lambda line: line[0].replace("``", ""), rest, flags=re.MULTILINE)
    return f"## {name}\n\n**{question}**\n\n{rest}\n\n{printout(answer)}\n"


def printout(answer: dict[str, Any] | None) -> str:
    """The command, where it ran, and all that it printed."""
    if answer is None:
        return "It has not been measured yet."
    where = fill(", ".join(f"{key} {value}" for key, value in answer["environment"].items()), 100)
    return f"```text\n$ {answer['command']}\n{where}\n\n{answer['printed']}\n```"
