"""``onward bench``: the benchmarks of a checkout, with the arguments as they are."""

import pytest

from onward.core.errors import MissingExtraError
from onward.shell.bench import checkout
from onward.shell.main import main


def test_arguments_go_to_the_benchmarks_as_they_are(capfd):
    assert main(["bench", "speed", "--quick"]) == 2
    assert "no benchmark is named speed" in capfd.readouterr().err


def test_help_is_that_of_the_benchmarks(capfd):
    assert main(["bench", "--help"]) == 0
    assert "usage: python -m benchmarks" in capfd.readouterr().out


def test_the_first_folder_that_is_a_checkout(tmp_path):
    empty, found = tmp_path / "empty", tmp_path / "found"
    (found / "src" / "onward").mkdir(parents=True)
    (found / "benchmarks").mkdir()
    (found / "benchmarks" / "contest.py").touch()
    assert checkout((empty, found)) == found


def test_without_a_checkout_it_says_where_to_get_one(tmp_path):
    with pytest.raises(MissingExtraError, match="not part of the installed package"):
        checkout((tmp_path / "site", tmp_path / "here"))


def test_without_a_checkout_help_says_what_it_is(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("onward.shell.bench.__file__", str(tmp_path / "a" / "b" / "c" / "bench.py"))
    assert main(["bench", "--help"]) == 0
    assert capsys.readouterr().out.startswith("usage: onward bench")
    assert main(["bench"]) == 1
    assert "not part of the installed package" in capsys.readouterr().err
