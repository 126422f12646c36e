"""What each file of ``benchmarks/`` says of itself: its question, how to run it, the printout it gave."""

import ast
import re
from pathlib import Path

from sphinx.application import Sphinx


def setup(app: Sphinx) -> dict[str, bool]:
    """Tell Sphinx what is here."""
    app.connect("builder-inited", write)
    return {"parallel_read_safe": True}


def write(app: Sphinx) -> None:
    """Write one Markdown file that the page about benchmarks includes."""
    folder = Path(app.srcdir) / "_generated"
    folder.mkdir(exist_ok=True)
    files = sorted((Path(app.srcdir).parent / "benchmarks").glob("*.py"))
    sections = [
        section(path.stem, doc)
        for path in files
        if "To expect" in (doc := docstring(path)) or "?" in first(doc)
    ]
    (folder / "benchmarks.md").write_text("\n".join(sections))


def docstring(path: Path) -> str:
    """What a file says of itself."""
    return ast.get_docstring(ast.parse(path.read_text())) or ""


def first(text: str) -> str:
    """The first paragraph."""
    return text.split("\n\n", 1)[0].strip()


def section(name: str, text: str) -> str:
    """A docstring as Markdown: its first sentence is the heading, its indented parts are code already."""
    question, rest = first(text).replace("\n", " "), text.split("\n\n", 1)[1]
    rest = re.sub(r"::$", ":", rest, flags=re.MULTILINE)
    rest = re.sub(r"^    .*$", lambda line: line[0].replace("``", ""), rest, flags=re.MULTILINE)
    return f"## {name}\n\n**{question}**\n\n{rest}\n"
