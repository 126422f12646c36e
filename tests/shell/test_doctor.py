"""``onward doctor``: what it finds, and that its advice fits."""

import os

import jax
import pytest

from onward.shell import doctor
from onward.shell.doctor import examine
from onward.shell.main import main


def findings(environment=None):
    return {finding.what: finding for finding in examine(environment or {})}


def test_the_command_prints_every_finding(capsys):
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    for finding in examine(os.environ):
        assert f"{finding.what:12}{finding.found}\n" in printed
        for line in filter(None, finding.advice.split("\n")):
            assert f"            -> {line}\n" in printed
    assert max(map(len, printed.splitlines())) <= 110


def test_devices_made_of_one_cpu():
    found = findings({"XLA_FLAGS": "--xla_dump_to=x --xla_force_host_platform_device_count=4"})["devices"]
    assert found.advice.startswith("XLA_FLAGS makes 4 devices of one CPU")


def test_extras_that_are_not_installed(monkeypatch):
    monkeypatch.setattr(doctor, "EXTRAS", {"demo": ("json",), "serve": ("json", "no_such_module")})
    found = findings()["extras"]
    assert (found.found, found.advice) == ("demo", "pip install 'onward[serve]'")


@pytest.mark.parametrize(("folder", "words"), [(None, "anew in every process"), ("/kept", "in /kept")])
def test_the_compilation_cache(monkeypatch, folder, words):
    monkeypatch.setattr(type(jax.config), "jax_compilation_cache_dir", folder, raising=False)
    found = findings()["compiled"]
    assert words in found.found
    assert bool(found.advice) == (folder is None)


def test_double_precision():
    with jax.enable_x64(True):
        assert "float64" in findings()["numbers"].found
    assert findings()["numbers"].found == "float32"
