"""Where in the user's code an op came from."""

import subprocess
import sys

import jax.numpy as jnp

import onward as ow

CELLS = """
from IPython.core.interactiveshell import InteractiveShell

shell = InteractiveShell.instance()
for cell in (
    "import jax.numpy as jnp, onward as ow",
    "def loss(w, x):\\n    h = w * x\\n    return jnp.sum(jnp.log(h))",
    "program = ow.SGD(0.1).minimize(loss, jnp.ones(2), jnp.zeros(2))",
    "print([str(op.source) for op in program.ops[:2]])",
    "step = ow.compile(program)",
    "print(ow.find_nonfinite(step, step.init(jnp.ones(2)), (jnp.zeros(2),)))",
    "def leaky(w, x):\\n    kept.append(w)\\n    return w.sum() + 'a'",
    "kept = []",
    "ow.trace(leaky, jnp.ones(2), jnp.zeros(2))",
):
    shell.run_cell(cell, store_history=True)
"""


def test_a_file_is_named_with_its_line():
    def loss(w):
        return jnp.sum(w * w)

    program = ow.trace(loss, jnp.ones(3))
    assert {op.source.name for op in program.ops} == {"test_source.py"}
    assert str(program.ops[0].source) == f"test_source.py:{loss.__code__.co_firstlineno + 1}"


def test_a_cell_of_a_notebook_is_named_by_its_number(tmp_path):
    environment = {"IPYTHONDIR": str(tmp_path), "JAX_PLATFORMS": "cpu", "PATH": ""}
    asked = [sys.executable, "-W", "ignore", "-c", CELLS]
    found = subprocess.run(asked, capture_output=True, text=True, timeout=300, env=environment, check=True)
    assert "['In[2]:2', 'In[2]:3']" in found.stdout
    assert "line    In[2]:3 in loss" in found.stdout
    assert "In[7]:3 in leaky" in found.stdout
