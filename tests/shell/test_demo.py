"""``onward demo``."""

import pytest
from safetensors.numpy import load_file

from onward.core.extras import require
from onward.shell.demo import load_digits
from onward.shell.main import main

pytestmark = pytest.mark.usefixtures("optimized")


def test_the_demo_learns_to_read_digits(tmp_path, capsys):
    path = tmp_path / "digits.safetensors"
    assert main(["demo", "--out", str(path)]) == 0
    printed = capsys.readouterr().out
    accuracy = float(printed.split("held-out digits: ")[1].split("%")[0])
    assert accuracy >= 98.0
    assert str(path) in printed
    assert "backward" in printed
    parameters = load_file(path)
    assert {name: a.shape for name, a in parameters.items()} == {
        "conv1/b": (32,),
        "conv1/w": (3, 3, 1, 32),
        "conv2/b": (64,),
        "conv2/w": (3, 3, 32, 64),
        "dense/b": (10,),
        "dense/w": (1024, 10),
    }
    assert [p.name for p in tmp_path.iterdir()] == ["digits.safetensors"]


def test_a_fifth_is_held_out():
    train, test = load_digits()
    assert len(train.labels) + len(test.labels) == 1797
    assert len(test.labels) == 359
    held_out = {image.tobytes() for image in test.images}
    assert not held_out & {image.tobytes() for image in train.images}


def test_a_folder_that_does_not_exist_is_an_error_without_a_traceback(capsys):
    assert main(["demo", "--epochs", "1", "--out", "/nowhere/at/all.safetensors"]) == 1
    assert "/nowhere/at" in capsys.readouterr().err


def test_a_folder_in_place_of_a_file_is_refused_before_anything_is_trained(tmp_path, capsys):
    assert main(["demo", "--epochs", "1", "--out", str(tmp_path)]) == 1
    said = capsys.readouterr()
    assert f"{tmp_path} is a folder; expected the name of a file, such as {tmp_path}/digits" in said.err
    assert said.out == ""


def test_a_missing_extra_says_how_to_get_it():
    with pytest.raises(ImportError, match=r"pip install 'onward\[demo\]'"):
        require("no_such_package.datasets", "demo")
