"""Every notebook runs from top to bottom, and ends in a picture.

With ONWARD_NOTEBOOKS=FOLDER each one is written there as it ran, for the documentation.
"""

import os
from pathlib import Path

import jupytext
import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.py"))


def test_there_are_notebooks():
    assert NOTEBOOKS


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning", "ignore::RuntimeWarning")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook(path, tmp_path):
    notebook = jupytext.read(path)
    NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    ).execute()
    if folder := os.environ.get("ONWARD_NOTEBOOKS"):
        nbformat.write(notebook, Path(folder) / f"{path.stem}.ipynb")
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert any(map(is_picture, cells[-1].outputs))


def is_picture(output):
    shown = output.get("data", {})
    return "image/png" in shown or "<svg" in shown.get("text/html", "")
