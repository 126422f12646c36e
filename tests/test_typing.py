"""The types that checkers and editors see: pyright, strict, over the README, the first page, the notebooks.

A parameter without an annotation is read as ``Any``: that much a page leaves to its reader. All other
libraries but JAX and NumPy are ``Any`` as well: only what Onward gives out is judged.
"""

import ast
import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ANY = "from typing import Any\ndef __getattr__(name: str) -> Any: ...\n"
OTHERS = (
    "equinox",
    "flax/__init__",
    "flax/linen",
    "flax/nnx",
    "haiku",
    "matplotlib/__init__",
    "matplotlib/pyplot",
    "optax",
    "sklearn/__init__",
    "sklearn/datasets",
)
OFF = (  # types of JAX's own functions, and how a page is told
    "ConstantRedefinition",
    "MissingTypeStubs",
    "OptionalMemberAccess",
    "PossiblyUnboundVariable",
    "PrivateUsage",
    "UnknownMemberType",
    "UnusedExpression",
    "UnusedImport",
)
UNANNOTATED = [f"Unknown{what}Type" for what in ("Argument", "Lambda", "Parameter", "Variable")]
CONFIGURATION = {
    "typeCheckingMode": "strict",
    "pythonVersion": "3.11",
    "stubPath": "typings",
    "ignore": ["typings"],
    **{f"report{rule}": False for rule in OFF},
    "executionEnvironments": [
        {"root": "pages", "extraPaths": [str(ROOT / "src")]},
        {  # lists that begin empty and the like
            "root": "notebooks",
            "extraPaths": [str(ROOT / "src")],
            **{f"report{rule}": False for rule in (*UNANNOTATED, "IncompatibleMethodOverride")},
        },
    ],
}

# What people hold, as a checker should see it. A reader's own containers stay Any.
PROGRAM = """
from typing import Any, assert_type
import jax, jax.numpy as jnp, numpy as np
import onward as ow
from numpy.typing import NDArray

def loss(params: dict[str, Any], x: Any, y: Any) -> jax.Array:
    return jnp.mean((x @ params["w"] - y) ** 2)

x, y = np.eye(2), np.ones((2, 1))
program = ow.Adam(1e-3, rules=[ow.ClipByGlobalNorm(1.0)]).minimize(loss, {"w": y}, x, y)
program = ow.watch(ow.accumulate(ow.mixed_precision(program, "bfloat16"), 2), gradients=True)
assert_type(program, ow.Program)
step = ow.compile(program)
assert_type(step, ow.Step)
state = step.init({"w": y})
assert_type(state, ow.State)
state, out = step(state, x, y)
assert_type(state, ow.State)
assert_type(out, ow.Out)
assert_type(out.loss, jax.Array)
assert_type(out["grad(w)"], jax.Array)
assert_type(state["w"], jax.Array)
state, outs = step.run(state, [(x, y)] * 3)
assert_type(state, ow.State)
assert_type(outs, ow.typing.Outs)
assert_type(outs.loss, NDArray[Any])
assert_type(outs[0], ow.Out)
assert_type(ow.summary(program), ow.typing.Summary)
assert_type(ow.draw(program), ow.typing.Drawing)
assert_type(ow.cost(program).flops, int)

def network() -> jax.Array:
    images = ow.data("x", (None, 8, 8, 1))
    hidden = ow.layer.conv(images, 4, 3, act="relu")
    assert_type(hidden, jax.Array)
    hidden = ow.layer.relu(ow.layer.batch_norm(hidden)).reshape(len(hidden), -1)
    outputs, last = ow.layer.gru(hidden[:, None], 3)
    assert_type(outputs, jax.Array)
    return ow.layer.mse(ow.layer.fc(last, 1), ow.data("y", (None, 1)))

trainer = ow.Trainer(ow.Model(network), ow.SGD(ow.schedule.cosine(0.1, steps=10)))
history = trainer.train(ow.batches({"x": x, "y": y}, 16), epochs=2)
assert_type(history, ow.History)
assert_type(trainer.test([(x, y)]), dict[str, float])
assert_type(ow.Checkpoints("runs").load(), ow.typing.Checkpoint)
"""

MISUSED = """
import onward as ow
program = ow.SGD(0.1).minimize(len, 1.0)
ow.compile(program, fetch=3)
ow.compile(program).run(program, [])
ow.layer.fc([1.0], 3, actt="relu")
program.outpts
"""


def test_pages_and_programs_are_typed(tmp_path):
    if find_spec("basedpyright") is None:
        pytest.skip("needs pyright: pip install basedpyright")
    written(tmp_path, "pyrightconfig.json", json.dumps(CONFIGURATION))
    for other in OTHERS:
        written(tmp_path, f"typings/{other}.pyi", ANY)
    for path in (ROOT / "README.md", ROOT / "docs/start.md"):
        for name, text in chained(path):
            written(tmp_path, f"pages/{name}.py", text)
    for path in (ROOT / "notebooks").rglob("*.py"):
        written(tmp_path, f"notebooks/{path.stem}.py", annotated(path.read_text()))
    written(tmp_path, "pages/program.py", PROGRAM)
    written(tmp_path, "pages/misused.py", MISUSED)
    errors = checked(tmp_path)
    assert [line for name, line, _ in errors if name == "misused.py"] == [4, 5, 6, 7]
    assert [error for error in errors if error[0] != "misused.py"] == []


def written(folder, name, text):
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)


def chained(path):
    """The Python blocks of a page: each has the names of those before it."""
    texts = re.findall(r"^```python\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE)
    names = [f"{path.stem.lower()}_{i}" for i in range(len(texts))]
    before = ["", *(f"from {name} import *\n" for name in names)]
    return [(name, first + annotated(text)) for name, first, text in zip(names, before, texts, strict=False)]


def annotated(text):
    """The text with each bare parameter of a function declared as ``Any``; the number of lines stays."""
    lines = text.split("\n")
    functions = (n.args for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef))
    every = [p for a in functions for p in (*a.posonlyargs, *a.args, *a.kwonlyargs, a.vararg, a.kwarg) if p]
    bare = [(p.end_lineno, p.end_col_offset) for p in every if p.annotation is None and p.arg != "self"]
    for line, column in sorted(bare, reverse=True):
        lines[line - 1] = f"{lines[line - 1][:column]}: _Any{lines[line - 1][column:]}"
    return "from typing import Any as _Any; " + "\n".join(lines) if bare else text


def checked(folder):
    """The errors of the scripts in a folder: file, line, message."""
    command = ["-m", "basedpyright", "--outputjson", "--pythonpath", sys.executable, "-p", str(folder)]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=300)
    found = [x for x in json.loads(done.stdout)["generalDiagnostics"] if x["severity"] == "error"]
    return [(Path(x["file"]).name, x["range"]["start"]["line"] + 1, x["message"]) for x in found]
