"""The programs of the cookbook as pages: the docstring as it stands, then the code."""

import ast
import shutil
from pathlib import Path

from sphinx.application import Sphinx


def setup(app: Sphinx) -> dict[str, bool]:
    """Tell Sphinx what is here."""
    app.connect("builder-inited", write)
    return {"parallel_read_safe": True}


def write(app: Sphinx) -> None:
    """Write a page for each program of the checkout into the source folder."""
    folder = Path(app.srcdir) / "cookbook"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for path in (Path(app.srcdir).parent / "notebooks" / "cookbook").glob("*.py"):
        (folder / f"{path.stem}.md").write_text(page(path.name, path.read_text()))


def page(name: str, text: str) -> str:
    """The first line of the docstring is the heading, its other lines are shown as they are laid out."""
    title, said = (ast.get_docstring(ast.parse(text)) or name).split("\n", 1)
    code = text.split('"""', 2)[2].strip()
    return f"# {title.rstrip('.')}\n\n```text\n{said.strip()}\n```\n\n`{name}`:\n\n```python\n{code}\n```\n"
