"""The notebooks as pages, with their outputs where an executed copy of the same text is found.

``tests/test_notebooks.py`` leaves executed copies in the folder ``ONWARD_NOTEBOOKS``. They are looked for
there, or else in ``docs/_executed``.
"""

import os
import shutil
from pathlib import Path

import jupytext
import nbformat
from sphinx.application import Sphinx
from sphinx.util import logging

logger = logging.getLogger(__name__)

HEAD = """# Notebooks

One idea each, in the order of the flow. They are kept as text in `notebooks/`, and every one is executed by
the tests. jupytext opens them in Jupyter.

```{toctree}
:maxdepth: 1

"""


def setup(app: Sphinx) -> dict[str, bool]:
    """Tell Sphinx what is here."""
    app.connect("builder-inited", write)
    return {"parallel_read_safe": True}


def write(app: Sphinx) -> None:
    """Convert all notebooks of the checkout into the source folder."""
    source = Path(app.srcdir).parent / "notebooks"
    folder = Path(app.srcdir) / "notebooks"
    executed = Path(app.srcdir).parent / os.environ.get("ONWARD_NOTEBOOKS", "docs/_executed")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if (source / "pictures").is_dir():
        shutil.copytree(source / "pictures", folder / "pictures")
    paths = sorted(source.glob("*.py"))
    for path in paths:
        nbformat.write(with_outputs(path, executed / f"{path.stem}.ipynb"), folder / f"{path.stem}.ipynb")
    (folder / "index.md").write_text(HEAD + "\n".join(path.stem for path in paths) + "\n```\n")


def with_outputs(path: Path, executed: Path) -> nbformat.NotebookNode:
    """The executed copy if it has the same cells, else the notebook without outputs."""
    plain = jupytext.read(path)
    if not executed.is_file():
        return plain
    copy = nbformat.read(executed, as_version=4)
    if [cell.source for cell in copy.cells] == [cell.source for cell in plain.cells]:
        return copy
    logger.info("%s was changed since it was executed: it is shown without outputs", path.name)
    return plain
