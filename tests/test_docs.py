"""The documentation: code runs and prints what it shows, commands exist, the reference is complete."""

import ast
import importlib
import importlib.util
import re
import shutil
import subprocess
import sys
import tomllib
from contextlib import suppress
from operator import attrgetter
from pathlib import Path
from types import ModuleType, SimpleNamespace
from zlib import decompress

import benchmarks
import nbformat
import pytest
import yaml
from benchmarks import __main__ as every_benchmark
from tests.fleet.hosting import Threads, release

import onward as ow
from onward.core.whereabouts import public_paths
from onward.shell.main import main

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.glob("*.md"), *DOCS.glob("how-to/*.md"), *DOCS.glob("coming-from/*.md")])
FENCE = re.compile(r"^```([^\s`]*).*?\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PEERS = {
    "pytorch",
    "paddle",
    "keras",
}  # not installed here: these blocks have to be Python, and are not executed


def blocks(page):
    """The fenced blocks of a page, as (language, text); what Sphinx is told is not among them."""
    return [(language, text) for language, text in FENCE.findall(page.read_text()) if language[:1] != "{"]


def named(page):
    return str(page.relative_to(DOCS).with_suffix(""))


@pytest.fixture
def trainers_and_servers_in_threads(monkeypatch):
    """What pages start without an engine of their own; ``tests/fleet`` starts processes, on Ray."""
    monkeypatch.setattr(importlib.import_module("onward.fleet.train"), "Engine", lambda *where: Threads())
    yield
    release()


@pytest.mark.usefixtures("trainers_and_servers_in_threads")
@pytest.mark.parametrize("page", PAGES, ids=named)
def test_code_runs_and_prints_what_the_page_shows(page, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    names, before, printed = {}, "", ""
    for language, text in blocks(page):
        if language == "python":
            exec(compile(text, f"{page.stem}.py", "exec"), names)
            printed = capfd.readouterr().out
        elif language == "":
            assert before == "python", "a printout stands behind the code that prints it"
            assert printed.strip() == text.strip()
        before = language


def test_every_block_is_of_a_kind_that_is_checked():
    found = [(named(page), language, text) for page in PAGES for language, text in blocks(page)]
    assert [block for block in found if block[1] not in {"python", "", "sh", *SCHEDULERS, *PEERS}] == []
    assert [block for block in found if block[1] in PEERS and not is_python(block[2])] == []


def is_bash(text):
    return subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0


def is_yaml(text):
    return isinstance(yaml.safe_load(text), dict)


SCHEDULERS = {"bash": is_bash, "yaml": is_yaml}


def test_scripts_for_schedulers_can_be_read():
    scripts = [(kind, text) for page in PAGES for kind, text in blocks(page) if kind in SCHEDULERS]
    assert scripts
    assert [text for kind, text in scripts if not SCHEDULERS[kind](text)] == []


def is_python(text):
    with suppress(SyntaxError):
        ast.parse(text)
        return True
    return False


def test_public_names_that_a_page_mentions_exist():
    found = {(named(p), path) for p in PAGES for path in re.findall(r"`ow\.([A-Za-z_][\w.]*)", p.read_text())}
    assert found
    assert [(page, path) for page, path in sorted(found) if not is_public(path.rstrip("."))] == []


def test_files_that_the_pages_on_the_house_mention_exist():
    pages, roots = ("contributing.md", "house.md"), (ROOT, ROOT / "src", ROOT / "src" / "onward")
    found = {path for p in pages for path in re.findall(r"`([\w./]*/[\w./]+)`", (DOCS / p).read_text())}
    assert len(found) > 40
    assert [path for path in sorted(found) if not any((r / path).exists() for r in roots)] == []


def is_public(path):
    with suppress(AttributeError):
        attrgetter(path)(ow)
        return True
    return False


# Commands --------------------------------------------------------------------------------------------------

SHELL = [text for page in PAGES for language, text in blocks(page) if language == "sh"]
COMMANDS = sorted({line for text in SHELL for line in text.split("\n") if line})
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_commands_exist(capfd):
    assert {command: problem for command in COMMANDS if (problem := problem_of(command, capfd))} == {}


def problem_of(command, capfd):
    words = command.replace("'", "").replace('"', "").split()
    while "=" in words[0]:
        words = words[1:]
    try:
        CHECKS[Path(words[0]).name](words[1:], capfd)
    except (AssertionError, KeyError, IndexError, OSError) as error:
        return repr(error)
    return None


def check_onward(words, capfd):
    """The subcommand is there, and its help names every option; that of the benchmarks is their own."""
    begin, command = (every_benchmark.main, []) if words[0] == "bench" else (main, words[:1])
    if words[:2] == ["bench", "device"]:
        command, words = ["device"], words[1:]
    with suppress(SystemExit):  # argparse ends with its help
        begin([*command, "--help"])
    text = capfd.readouterr().out
    assert "usage: " in text
    assert all(word in text for word in words[1:] if word.startswith("-"))


def check_pip(words, capfd):
    """Extras and groups are those of this project."""
    extras = {
        extra for word in words for found in re.findall(r"\[(.*?)\]", word) for extra in found.split(",")
    }
    assert words[0] == "install"
    assert extras <= set(PYPROJECT["project"]["optional-dependencies"])
    if "--group" in words:
        assert words[words.index("--group") + 1] in PYPROJECT["dependency-groups"]


def check_module(words, capfd):
    """What is named exists, and so do options of the benchmarks and of single files."""
    if words[0].endswith(".py"):
        check_files(words, capfd)
        return
    assert words[0] == "-m"
    if words[1].startswith(("tests.", "benchmarks.")) and words[1] != "benchmarks.device":
        text = (ROOT / words[1].replace(".", "/")).with_suffix(".py").read_text()
        assert all(word in text for word in words[2:] if word.startswith("-"))
        return
    assert words[1] in {"venv", "pytest", "benchmarks", "benchmarks.device"}
    if words[1] == "pytest":
        check_files(words[2:], capfd)
    if words[1] == "benchmarks":
        assert all((ROOT / "benchmarks" / f"{w}.py").exists() for w in words[2:] if w.isidentifier())
        check_onward(["bench", *words[2:]], capfd)
    if words[1] == "benchmarks.device":
        check_onward(["bench", "device", *words[2:]], capfd)


def check_files(words, capfd):
    """What a tool is told to read is in the checkout."""
    assert all((ROOT / w).exists() for w in words if w in {"src", "tests", "docs"} or w.endswith(".py"))


CHECKS = {
    "mkdir": lambda words, capfd: None,
    "onward": check_onward,
    "pip": check_pip,
    "python": check_module,
    "python3": check_module,
    "pytest": check_files,
    "ruff": check_files,
    "mypy": check_files,
    "sphinx-build": check_files,
}


# The site --------------------------------------------------------------------------------------------------


def extension(name):
    spec = importlib.util.spec_from_file_location(name, DOCS / "_extensions" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reference_has_every_public_name_once():
    found = extension("reference_pages").names_by_topic().values()
    modules = {n: m for n in ow.__all__ if isinstance(m := getattr(ow, n), ModuleType)}
    held = {f"{n}.{m}": getattr(module, m) for n, module in modules.items() for m in module.__all__}
    again = [p for p, value in held.items() if any(value is getattr(ow, n) for n in ow.__all__)]
    listed = [name for names in found for name in names]
    assert len(set(listed)) == len(listed)
    assert set(listed) == {*ow.__all__, *held} - set(again)


def test_a_name_without_a_topic_is_refused(monkeypatch):
    pages = extension("reference_pages")
    monkeypatch.setattr(pages, "TOPICS", {})
    with pytest.raises(pages.ExtensionError, match=r"onward\.Adafactor stands in derive\.optimizers"):
        pages.names_by_topic()


@pytest.mark.parametrize(("shown", "outputs"), [("print(1)", 1), ("print(2)", 0)])
def test_outputs_of_notebooks_come_from_copies_with_the_same_text(shown, outputs, tmp_path):
    copy = nbformat.v4.new_notebook()
    copy.cells = [nbformat.v4.new_code_cell("print(1)", outputs=[nbformat.v4.new_output("stream", text="1")])]
    nbformat.write(copy, tmp_path / "copy.ipynb")
    (tmp_path / "text.py").write_text(f"# %%\n{shown}\n")
    made = extension("notebook_pages").with_outputs(tmp_path / "text.py", tmp_path / "copy.ipynb")
    assert [cell.source for cell in made.cells] == [shown]
    assert [len(cell.outputs) for cell in made.cells] == [outputs]


def test_every_benchmark_says_its_question_on_the_site(tmp_path):
    pages = extension("benchmark_pages")
    (tmp_path / "docs").mkdir()
    shutil.copytree(ROOT / "benchmarks", tmp_path / "benchmarks")
    pages.write(SimpleNamespace(srcdir=tmp_path / "docs"))
    text = (tmp_path / "docs/_generated/benchmarks.md").read_text()
    asked = re.findall(r"^    (\w+) +\w.*\?$", benchmarks.__doc__, re.MULTILINE)
    assert asked
    assert set(re.findall(r"^## (\w+)$", text, re.MULTILINE)) >= set(asked)


# Its trees are many objects that stay, in which there is no garbage to be found.
SPHINX = "import gc, sys; from sphinx.cmd.build import main; gc.disable(); sys.exit(main(sys.argv[1:]))"


def test_the_site_builds_without_warnings(tmp_path):
    """From a copy without anything that an earlier build left; every public name has its place in it."""
    for folder in ("docs", "notebooks", "benchmarks"):
        shutil.copytree(
            ROOT / folder,
            tmp_path / folder,
            ignore=shutil.ignore_patterns("_build", "_generated", "_executed", "reference"),
        )
    command = [sys.executable, "-c", SPHINX, "-W", "--keep-going", "-q", "-b", "html", "docs", "site"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not done.stderr
    first = (tmp_path / "site" / "index.html").read_text()
    assert f"Onward {ow.__version__}" in first
    assert 'action="search.html"' in first
    lines = decompress((tmp_path / "site/objects.inv").read_bytes().split(b"\n", 4)[4]).decode().split("\n")
    placed = [line.split()[0] for line in lines if line]
    assert [path for path in public_paths(ow) if placed.count(f"onward.{path}") != 1] == []
