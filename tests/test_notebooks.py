"""Every notebook runs from top to bottom, and ends in a picture.

All run in one process, which imports once what they share; each begins without names, in a folder of its own.
With ONWARD_NOTEBOOKS=FOLDER each one is written there as it ran, for the documentation.
"""

import os
from pathlib import Path

import jupytext
import nbformat
import pytest
from jupyter_client.manager import AsyncKernelManager
from jupyter_core.utils import run_sync
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.py"))
pytestmark = [
    pytest.mark.usefixtures("optimized"),
    pytest.mark.filterwarnings(
        "ignore::DeprecationWarning", "ignore::ResourceWarning", "ignore::RuntimeWarning"
    ),
]


def test_there_are_notebooks():
    assert NOTEBOOKS


@pytest.fixture(scope="module")
def kernel(optimized):
    """What the first notebook starts, and the first one behind a notebook that failed."""
    manager = AsyncKernelManager(kernel_name="python3")
    yield manager
    end(manager)


def end(kernel):
    if kernel.has_kernel:
        run_sync(kernel.shutdown_kernel)(now=True)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook(path, kernel, tmp_path):
    notebook = jupytext.read(path)
    execute(notebook, kernel, tmp_path)
    if folder := os.environ.get("ONWARD_NOTEBOOKS"):
        nbformat.write(notebook, Path(folder) / f"{path.stem}.ipynb")
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert any(map(is_picture, cells[-1].outputs))


def execute(notebook, kernel, folder):
    """Run all cells behind one that forgets the names of the notebook before."""
    notebook.cells.insert(0, nbformat.v4.new_code_cell(f"%reset -f\n%cd -q {folder}"))
    client = NotebookClient(notebook, km=kernel, timeout=300)
    try:
        client.execute()
    except BaseException:
        end(kernel)
        raise
    finally:
        if client.kc is not None:
            client.kc.stop_channels()
    del notebook.cells[0]


def is_picture(output):
    shown = output.get("data", {})
    return "image/png" in shown or "<svg" in shown.get("text/html", "")
