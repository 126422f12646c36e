"""Every notebook runs from top to bottom, and ends in a picture.

All run in one process, which imports once what they share; each begins without names, in a folder of its own.
What measures or has pooling in it is compiled as users compile it. With ONWARD_NOTEBOOKS=FOLDER each one is,
and is written there as it ran, for the documentation.
"""

import os
import re
from pathlib import Path

import jupytext
import nbformat
import pytest
from jupyter_client.manager import AsyncKernelManager
from jupyter_core.utils import run_sync
from nbclient import NotebookClient
from tests.compiled import HASTE

FOLDER = Path(__file__).parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.py"))
WRITTEN = os.environ.get("ONWARD_NOTEBOOKS")
OPTIMIZED = re.compile(r"process_time|reduce_window|max_pool|\.pool\(")
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::ResourceWarning", "ignore::RuntimeWarning"
)


def test_there_are_notebooks():
    assert NOTEBOOKS


@pytest.fixture(scope="module")
def kernel():
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
    execute(notebook, kernel, tmp_path, in_haste=not WRITTEN and not OPTIMIZED.search(path.read_text()))
    if WRITTEN:
        nbformat.write(notebook, Path(WRITTEN) / f"{path.stem}.ipynb")
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert any(map(is_picture, cells[-1].outputs))


# All that a notebook imported stays, and is not looked through in each collection of garbage: ``%reset`` is
# several of them.
BEFORE = """\
%reset -f
__import__("gc").freeze()
__import__("gc").set_threshold(20_000, 5, 5)
%cd -q {folder}
%env {HASTE}={in_haste:d}
__import__("jax").config.update("{switch}", {in_haste})
"""


def execute(notebook, kernel, folder, in_haste):
    """Run all cells behind one that forgets the names of the notebook before."""
    before = BEFORE.format(folder=folder, HASTE=HASTE, switch=HASTE.lower(), in_haste=in_haste)
    notebook.cells.insert(0, nbformat.v4.new_code_cell(before))
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
