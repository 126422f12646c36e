"""``onward doctor``: what it finds, and that its advice fits."""

import os
import tomllib
from importlib.metadata import version
from pathlib import Path

import jax
import pytest

from onward.core.compiler import CURE
from onward.shell.doctor import examine, extras, requirements
from onward.shell.main import main


def findings(environment=None):
    return {finding.what: finding for finding in examine(environment or {})}


def test_the_command_prints_every_finding(capsys):
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    for finding in examine(os.environ):
        assert f"{finding.what:14}{finding.found}\n" in printed
        for line in filter(None, finding.advice.split("\n")):
            assert f"              -> {line}\n" in printed
    assert max(map(len, printed.splitlines())) <= 110


def test_devices_made_of_one_cpu():
    found = findings({"XLA_FLAGS": "--xla_dump_to=x --xla_force_host_platform_device_count=4"})["devices"]
    assert found.advice.startswith("XLA_FLAGS makes 4 devices of one CPU")


def test_every_extra_of_the_package_is_told():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    told = [what.strip("[]") for what in findings() if what.startswith("[")]
    assert set(told) == project["optional-dependencies"].keys() - {"all"}


def test_versions_of_what_is_installed():
    found = findings()
    assert (found["jax"].found, found["jax"].advice) == (version("jax"), "")
    assert f"igraph {version('igraph')}" in found["[plot]"].found


@pytest.mark.parametrize(
    ("affected", "environment", "words"),
    [
        (False, {}, "no known faults of jaxlib"),
        (True, {}, "gets some sums wrong; cured in what Onward compiles"),
        (True, {"XLA_FLAGS": f"--xla_dump_to=x {CURE}"}, "for the whole process"),
    ],
)
def test_known_faults_of_the_compiler(monkeypatch, affected, environment, words):
    monkeypatch.setattr("onward.core.compiler.AFFECTED", affected)
    found = findings(environment)["compiler"]
    assert words in found.found
    assert (CURE in found.advice) == ("cured in" in words)


def test_extras_that_are_missing_or_too_old():
    found = extras(
        requirements(
            [
                "jax>=0.10.2",
                "numpy>=1.5; extra == 'demo'",
                "numpy>=999.1,<1000; extra == 'plot'",
                "numpy; extra == 'serve'",
                'no-such-package>=2; extra == "serve"',
            ]
        )
    )
    told = {finding.what: finding for finding in found}
    here = f"numpy {version('numpy')}"
    assert told["[demo]"] == ("[demo]", here, "")
    assert told["[plot]"].found == f"{here} (too old: Onward needs 999.1)"
    assert told["[serve]"].found == f"{here}, no no-such-package"
    assert told["[serve]"].advice == "answers over HTTP: pip install 'onward[serve]'"


@pytest.mark.parametrize(("folder", "words"), [(None, "again in every process"), ("/kept", "in /kept")])
def test_the_compilation_cache(monkeypatch, folder, words):
    monkeypatch.setattr(type(jax.config), "jax_compilation_cache_dir", folder, raising=False)
    found = findings()["compiled"]
    assert words in found.found
    assert bool(found.advice) == (folder is None)


def test_double_precision():
    with jax.enable_x64(True):
        assert "float64" in findings()["numbers"].found
    assert findings()["numbers"].found == "float32"
