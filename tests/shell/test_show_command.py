"""``onward show``: every way to name a Program, and what each mistake is told."""

import sys
from xml.etree import ElementTree as ET

import numpy as np
import pytest

import onward as ow
from onward.shell.main import main

FILE = """
import jax, jax.numpy as jnp
import onward as ow
import beside

def init():
    return {"layers": [{"w": jnp.ones((4, 8))}, {"w": jnp.ones((8, 1))}]}

def loss(params, x, y, scale=2.0):
    for layer in params["layers"]:
        x = jnp.tanh(x @ layer["w"])
    return jnp.mean((x - y) ** 2) * scale

def with_aux(params, x, y):
    return loss(params, x, y), {"mean": y.mean()}

def example():
    return init(), jnp.ones((16, 4)), jnp.ones((16, 1))

def network():
    hidden = jax.nn.relu(ow.layer.fc(ow.data("x", (None, 4)), 3))
    return ow.layer.mse(hidden, ow.data("y", (None, 3)))

def smaller():
    return ow.layer.mse(ow.layer.fc(ow.data("x", (None, 4)), 3), ow.data("y", (None, 3)))

def made():
    return ow.SGD(0.1).minimize(loss, *example())

def nothing():
    pass

def broken():
    return jnp.ones(3) @ jnp.ones(4)

def raising():
    return {}[3]

def ending():
    raise SystemExit(4)


class Mine(ow.SGD):
    '''An optimizer of the person's own.'''

program = made()
step = ow.compile(program)
model = ow.Model(network, seed=1)
trainer = ow.Trainer(model, ow.SGD(0.1))
mine = ow.SGD(0.25)
lazy = ow.layer.fc(ow.data("a", (None, 3)), 2)
later = ow.SGD(0.1).minimize(ow.layer.mse(ow.layer.fc(ow.data("a"), 2), ow.data("b")))
number = 3
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the person's file, and one beside it that the file imports."""
    path = tmp_path_factory.mktemp("person")
    (path / "shown_by_tests.py").write_text(FILE)
    (path / "beside.py").write_text("")
    return path


@pytest.fixture
def show(folder, monkeypatch, capsys):
    """Runs ``onward show`` in the folder; returns status, what it printed, and what it complained of."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def shown(target, *options):
        status = main(["show", target.replace("FILE", "shown_by_tests.py"), *options])
        return status, *capsys.readouterr()

    yield shown
    for name in [
        n for n, m in sys.modules.items() if (getattr(m, "__file__", "") or "").startswith(str(folder))
    ]:
        if name != "shown_by_tests":  # importing it takes a second
            del sys.modules[name]


@pytest.fixture
def listed(show):
    """What ``onward show`` prints where it succeeds."""

    def told(*arguments):
        status, out, err = show(*arguments)
        assert (status, err) == (0, "")
        return out

    return told


@pytest.fixture
def refused(show):
    """What ``onward show`` complains of where it fails: one line."""

    def told(*arguments):
        status, out, err = show(*arguments)
        assert (status, out) == (1, "")
        assert err.startswith("onward: ")
        assert err.count("\n") == 1
        return err

    return told


@pytest.fixture
def file(listed):
    """The person's module, as ``onward show`` imports it."""
    listed("FILE:network")
    return sys.modules["shown_by_tests"]


# ------------------------------------------------------------------------------ what can be shown


def test_a_network_that_declares_its_data(listed, file):
    assert listed("FILE:network", "--batch", "32") == f"{ow.trace(file.network, batch_size=32)}\n"


def test_a_loss_whose_arguments_are_told_by_their_types(listed, file):
    types = ["params/layers/0/w=f32[4,8]", "params/layers/1/w=[8, 1]", "x=float32[5,4]", "y=bf16[5,1]"]
    params, x, y = file.example()
    expected = ow.trace(file.loss, params, x[:5], y[:5].astype("bfloat16"))
    assert listed("FILE:loss", "--feed", *types) == f"{expected}\n"


def test_a_loss_whose_arguments_are_in_the_file(listed, file):
    expected = f"{ow.trace(file.loss, *file.example())}\n"
    assert listed("FILE:loss", "--args", "example") == expected
    assert listed("FILE:loss", "--args", "shown_by_tests.py:example") == expected
    assert listed("FILE:loss", "--feed", "params=init", "--feed", "x=f32[16,4]", "y=f32[16,1]") == expected


def test_a_type_replaces_what_the_function_of_arguments_gives(listed, file):
    params, x, y = file.example()
    told = listed("FILE:loss", "--args", "example", "--feed", "x=f32[3,4]", "y=f32[3,1]", "scale=f32[]")
    assert told == f"{ow.trace(file.loss, params, x[:3], y[:3], 1.5 * x[0, 0])}\n"


@pytest.mark.parametrize("name", ["made", "program", "step"])
def test_a_program_and_what_holds_one(listed, file, name):
    assert listed(f"FILE:{name}") == f"{file.program}\n"


def test_a_model_a_trainer_and_what_a_layer_returned(listed, file):
    assert listed("FILE:model") == f"{file.model.topology}\n"
    assert listed("FILE:trainer") == f"{file.trainer.program}\n"
    assert listed("FILE:lazy", "--batch", "7") == f"{ow.trace(file.lazy, batch_size=7)}\n"


def test_a_program_whose_shapes_are_open(listed):
    assert "f32[8,3]" in listed("FILE:later", "--feed", "a=[8,3]", "b=[8,2]")


def test_a_function_of_a_module(listed, file):
    assert listed("shown_by_tests:network") == f"{ow.trace(file.network)}\n"


def test_saved_models_and_steps_without_their_code(listed, file, folder):
    ow.save(file.model, folder / "trained.model")
    ow.save(file.step, folder / "half.model", file.step.init(file.init()))
    assert listed("trained.model") == f"{ow.load(folder / 'trained.model').topology}\n"
    assert (
        listed("half.model", "--summary") == f"{ow.summary(ow.load_step(folder / 'half.model')[0].program)}\n"
    )


def test_what_is_no_saved_model(refused, folder):
    (folder / "notes.txt").write_text("not a model")
    assert "notes.txt is not a whole model file" in refused("notes.txt")
    ow.save_safetensors(folder / "notes.safetensors", {"w": np.ones(3, "float32")})
    assert "notes.safetensors is a safetensors file of other contents" in refused("notes.safetensors")


@pytest.mark.parametrize(
    ("options", "words"),
    [(["--batch", "3"], "is traced already"), (["--optimizer", "SGD"], "holds a model without its code")],
)
def test_what_a_saved_model_cannot_be_asked(refused, file, folder, options, words):
    ow.save(file.model, folder / "asked.model")
    assert words in refused("asked.model", *options)


# ------------------------------------------------------------------------------ how it is shown


def test_with_an_optimizer_the_backward_pass_and_the_update(listed, file):
    expected = ow.Adam().minimize(file.with_aux, *file.example(), has_aux=True)
    told = listed("FILE:with_aux", "--args", "example", "--has-aux", "--optimizer", "Adam")
    assert told == f"{expected}\n"


@pytest.mark.parametrize("name", ["Mine", "mine"])
def test_an_optimizer_of_the_file(listed, name):
    assert f"next(fc_0/b) = {'mine' if name == 'Mine' else 'sgd'}" in listed(
        "FILE:network", "--optimizer", name
    )


def test_folded_or_with_the_lines(listed, file):
    program = ow.trace(file.network)
    assert listed("FILE:network", "--depth", "1") == f"{ow.core.show.listing(program, depth=1)}\n"
    assert "# shown_by_tests.py:22" in listed("FILE:network", "--source")


def test_tables_instead_of_the_listing(listed, file):
    assert listed("FILE:program", "--summary") == f"{ow.summary(file.program)}\n"
    assert listed("FILE:program", "--memory") == f"{ow.memory(file.program)}\n"


def test_what_is_different(listed, file):
    told = listed("FILE:smaller", "--diff", "shown_by_tests.py:network", "--batch", "4")
    expected = ow.diff(ow.trace(file.smaller, batch_size=4), ow.trace(file.network, batch_size=4))
    assert told == f"{expected}\n"


def test_how_the_other_one_is_traced_is_no_concern_of_what_is_traced_already(listed, file):
    told = listed("FILE:model", "--diff", "shown_by_tests.py:smaller", "--batch", "4")
    assert told == f"{ow.diff(file.model.topology, ow.trace(file.smaller, batch_size=4))}\n"


def test_a_picture(listed, folder):
    told = listed("FILE:network", "--draw", "network.svg", "--optimizer", "SGD")
    assert told.endswith("-> network.svg\n")
    assert "relu" in "".join(ET.parse(folder / "network.svg").getroot().itertext())


# ------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["none.py:loss"], "There is no file none.py."),
        (["none:loss"], "There is no module 'none' here."),
        (["none"], "There is no file 'none'. What is to be shown is written as train.py:loss"),
        (["FILE"], "Write shown_by_tests.py:NAME. Its functions: init(), loss(params, x, y, scale=2.0), "),
        (["FILE:los"], "has no 'los'. The nearest names are 'loss'."),
        (["FILE:zzzz"], "has no 'zzzz'. Its functions: init(), "),
        (["FILE:number"], "number is 3; expected a function, a Program, "),
        (["FILE:Mine"], "expected a function, a Program, "),
        (["FILE:nothing"], "nothing() returned nothing; expected a function, "),
        (["FILE:broken"], "shown_by_tests.py:34 in broken: TypeError: "),
        (["FILE:program", "--batch", "3"], "traced already: --feed, --args, --batch and --has-aux come"),
        (["FILE:program", "--optimizer", "SGD"], "updates its parameters already"),
        (["FILE:with_aux", "--args", "example", "--optimizer", "SGD"], "say --has-aux"),
        (["FILE:network", "--optimizer", "Adm"], "no optimizer 'Adm', neither in the file nor in Onward."),
        (["FILE:network", "--feed", "z=f32[3]"], "network declares no data 'z'. The names are 'x', 'y'."),
        (["FILE:network", "--draw", "network.gif"], "End it in one of .svg, .html, .png, .dot."),
        (["FILE:loss", "--feed", "x"], "--feed was given 'x'; expected NAME=TYPE"),
        (["FILE:loss", "--feed", "x=[1]", "x=[2]"], "--feed gives 'x' twice."),
        (["FILE:loss", "--feed", "params=init", "params/w=[1]"], "--feed gives 'params' whole and in parts"),
        (["FILE:loss", "--feed", "x=f33[3]"], "'f33[3]' is not a type: "),
        (["FILE:loss", "--feed", "x=exampl"], "'exampl' is not a type like 'f32[32,4]' or 'i32[32]', and "),
        (["FILE:loss", "--feed", "params=with_aux"], "with_aux(params, x, y) takes arguments, so it"),
        (["FILE:loss", "--args", "loss"], "loss(params, x, y, scale=2.0) takes arguments"),
        (["FILE:loss", "--args", "broken"], "shown_by_tests.py:34: TypeError: "),
        (["FILE:loss", "--args", "raising"], "raising() cannot be called. At {folder}/shown_by_"),
        (["FILE:loss", "--args", "ending"], "shown_by_tests.py:40: SystemExit: 4"),
        (["FILE:loss", "--args", "example", "--batch", "4"], "--batch 4 is the length of data that is "),
        (["FILE:loss", "--args", "example", "--feed", "z=f32[3]"], "Its data are the arguments x, y, "),
        (["."], ". is a folder; expected a file in it. What is to be shown is written as train.py:loss"),
        (["./:loss"], "./ is a folder; expected a file in it."),
        (["FILE:loss", "--args", "exampl"], "has no 'exampl'. The nearest names are 'example'."),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told_in_a_sentence(refused, folder, arguments, words):
    assert words.format(folder=folder) in refused(*arguments)


def test_missing_arguments_are_told_with_what_to_write(refused, listed):
    told = refused("FILE:loss", "--feed", "params=init")
    assert "loss(params, x, y, scale=2.0) cannot be traced without x, y." in told
    assert "--feed 'x=f32[...]' 'y=f32[...]'" in told


def test_names_of_the_file_are_offered_for_missing_arguments(refused, folder):
    (folder / "ready.py").write_text(
        "import numpy as np\nw, x = np.ones(3), np.ones(3)\ndef dot(w, x): return w @ x"
    )
    assert "--feed w=w x=x" in refused("ready.py:dot")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "x = 1\ny = x / 0\n",
            "cannot be imported. At {path}:2: ZeroDivisionError: division by zero. python",
        ),
        ("import json\njson.loads('[')\n", "At {path}:2: json.decoder.JSONDecodeError: "),
        ("def f(:\n", "At {path}:1: SyntaxError: "),
        ("import no_such_package\n", "At {path}:1: ModuleNotFoundError: No module named 'no_such_package'."),
        (
            "from . import x\n",
            "belongs to a package. From the folder above the package, write package.module",
        ),
        (
            "raise SystemExit(4)\n",
            "ended itself with status 4 while it was imported. Put what is for running",
        ),
        (
            "import onward as ow\now.trace(3)\n",
            "At {path}:2: onward.core.errors.ArgumentError: trace was given",
        ),
    ],
)
def test_a_file_that_cannot_be_imported(refused, folder, text, words):
    (folder / "failing.py").write_text(text)
    assert words.format(path=folder / "failing.py") in refused("failing.py:f")


def test_a_file_that_is_called_as_a_module_of_another(listed, folder):
    (folder / "json.py").write_text(
        "import onward as ow\ndef network(): return ow.layer.fc(ow.data('x', (None, 4)), 3)"
    )
    assert "fc_0/w" in listed("json.py:network")
    assert not sys.modules["json"].__file__.startswith(str(folder))
