"""The command line as a whole: its help, what it says to what it does not know, and how it ends."""

import os
import platform
import re
import subprocess
import sys

import jax
import jaxlib
import pytest

import onward as ow
from onward.shell.main import main

COMMANDS = ["demo", "show", "bench", "serve", "launch", "doctor"]


@pytest.fixture
def ended(capsys, monkeypatch):
    """Runs a command that ends by itself, in a terminal of 80 columns; returns status and what it printed."""
    monkeypatch.setenv("COLUMNS", "80")

    def run(*arguments):
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        return stop.value.code, *capsys.readouterr()

    return run


def test_alone_it_lists_the_commands_in_the_order_of_their_use(ended):
    told = ended()
    assert told == ended("--help") == ended("help")
    listed = re.findall(r"^    (\w+) ", told[1], re.MULTILINE)
    assert [name for name in listed if name in COMMANDS] == COMMANDS
    assert told[0] == 0


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "bench"])
def test_every_command_has_help_that_fits_a_terminal(ended, name):
    status, told, _ = ended(name, "--help")
    assert status == 0
    assert told == ended("help", name)[1]
    described, _, examples = told.partition("examples:\n")
    assert max(map(len, described.splitlines())) <= 80
    assert all(f"onward {name}" in line or "curl" in line for line in examples.splitlines())
    assert bool(examples) == (name != "doctor")


def test_version(ended):
    status, told, _ = ended("--version")
    names = [f"onward {ow.__version__}", f"jax {jax.__version__}"]
    python = f"Python {platform.python_version()}"
    assert status == 0
    assert told == ", ".join([*names, f"jaxlib {jaxlib.__version__}", python, "8 x cpu"]) + "\n"


def test_the_version_is_told_where_no_device_can_be_used(ended, monkeypatch):
    def none():
        raise RuntimeError("Unable to initialize backend 'cuda': no device\nand more")

    monkeypatch.setattr(jax, "devices", none)
    assert ended("--version")[1].endswith("no device (Unable to initialize backend 'cuda': no device)\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo", "--epochs", "0"], "0 is not a number of at least 1"),
        (["demo", "--epochs", "many"], "many is not a number of at least 1"),
        (["dmo"], "there is no command 'dmo'. The nearest names are 'demo'."),
        (["doctor", "3"], "onward doctor: error: '3' is an argument too many"),
        (["show", "a.py", "--sumary"], "there is no option '--sumary'. The nearest names are '--"),
        (
            ["demo", "--epoch=3"],
            "usage: onward demo [-h] [--epochs N] [--out FILE]\nonward demo: error:",
        ),
        (["--verbose"], "there is no option '--verbose'. The nearest names are '--version'."),
        (
            ["launch", "--procesess", "2", "x.py"],
            "'--procesess'. The nearest names are '--processes'.",
        ),
        (
            ["launch", "--restart=3", "x.py", "--help"],
            "'--restart'. The nearest names are '--restarts'.",
        ),
        (
            ["launch", "--devices", "2", "x.py", "--deep"],
            "are required: -n/--processes",
        ),
        (["serve", "--prt=80"], "no option '--prt'. The nearest names are '--port'."),
        (["show"], "the following arguments are required: TARGET"),
        (["show", "train.py:loss", "--batch", "-1"], "-1 is not a number of at least 1"),
        (["launch", "-n", "2", "--deadline", "0", "x.py"], "0 is not a number of seconds above 0"),
    ],
)
def test_wrong_arguments_are_explained(ended, arguments, message):
    status, _, told = ended(*arguments)
    assert status == 2
    assert message in told


def test_ctrl_c_ends_it_quietly(tmp_path, capsys):
    (tmp_path / "stopped_by_hand.py").write_text("raise KeyboardInterrupt")
    assert main(["show", f"{tmp_path}/stopped_by_hand.py:f"]) == 130
    assert capsys.readouterr() == ("", "")


def test_what_nobody_reads_on_is_not_an_error(tmp_path):
    """As in ``onward show ... | head``: the reader is gone before all is written."""
    path = tmp_path / "long.py"
    lines = ["import onward as ow", "def f():", "    x = ow.data('x', (4,))", *["    x = x + 1"] * 190]
    path.write_text("\n".join([*lines, "    return x"]))
    command = [sys.executable, "-m", "onward", "show", f"{path}:f"]
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as out:
        done = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (141, "")
