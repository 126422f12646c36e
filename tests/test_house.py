"""The house as a whole: linter, formatter, type checker, the README's code and commands, notebooks."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from tests.cases import chosen
from tests.quick import listed

import onward as ow
from onward.shell.main import main

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
SVG = "{http://www.w3.org/2000/svg}"
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", README, re.DOTALL)
CODE = ["src", "tests", "benchmarks", "notebooks", "docs"]


def run(*command: str) -> None:
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_linter():
    run("ruff", "check", *CODE)


def test_formatter():
    run("ruff", "format", "--check", *CODE)


def test_type_checker():
    """Where mypy has no cache, it writes none: that is a fifth of its time."""
    run("mypy", *([] if (ROOT / ".mypy_cache").exists() else ["--cache-dir=/dev/null"]))


def test_readme_code_runs_and_prints_what_it_shows(capsys):
    names: dict[str, object] = {}
    printed = ""
    shown = 0
    for language, text in BLOCKS:
        if language == "python":
            exec(compile(text, "README.md", "exec"), names)
            printed = capsys.readouterr().out
        elif language == "":
            assert printed.strip() == text.strip()
            assert max(map(len, text.split("\n"))) <= 100
            shown += 1
        else:
            assert language == "sh", "a block that nothing executes"
    assert shown == 3


def test_the_readme_is_short_and_says_what_a_snippet_needs():
    """A package that ``pip install onward`` does not bring is named before the code that imports it."""
    assert len(README) < 12_000
    plain = {"jax", "numpy", "onward", *sys.stdlib_module_names}
    for language, text in BLOCKS:
        if language == "python":
            needed = set(re.findall(r"^(?:import|from) (\w+)", text, re.MULTILINE)) - plain
            before = README[: README.index(text)]
            assert [name for name in needed if f"pip install {name}" not in before] == []


def test_the_picture_of_the_readme_shows_its_program():
    """Each word of the drawing stands in the file; where, igraph decides."""
    first = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    path = re.search(r"!\[.*?\]\((.*?)\)", README)
    assert first is not None
    assert path is not None
    names: dict[str, object] = {}
    exec(compile(first[1], "README.md", "exec"), names)
    drawn, saved = ow.draw(names["program"]).svg, (ROOT / path[1]).read_text()
    assert words(saved) == words(drawn)


def words(svg):
    return sorted("".join(element.itertext()) for element in ET.fromstring(svg).iter(f"{SVG}text"))


def test_readme_gives_commands_that_make_their_own_environment():
    """One runs the main job, one passes the tests, one is for whoever changes something."""
    commands = re.findall(r"```sh\n(.*?)\n```", README, re.DOTALL)
    job, tests, quick = commands
    assert all(c.startswith("python3 -m venv ") and "\n" not in c for c in commands)
    assert job.endswith("onward demo")
    assert tests.endswith(".venv-test/bin/pytest -n 3 --dist loadfile")
    assert quick.endswith(".venv/bin/pytest -m quick -n 2")
    assert quick in (ROOT / "docs" / "contributing.md").read_text()


def test_what_is_not_quick_is_a_test():
    missing = [line for line in listed() if not is_there(*line.split("::"))]
    assert missing == [], "write the list anew: pytest -n 3 --dist loadfile --list-not-quick"


def test_of_what_runs_in_some_cases_there_are_tests():
    missing = [function for function in chosen() if not is_there(*function.split("::"))]
    assert missing == [], "take their lines out of tests/cases.txt, or choose: python -m tests.faults.choose"


def is_there(file, *names):
    """Whether a file of tests has this function; an example in a docstring belongs to the file only."""
    path = ROOT / file
    return path.is_file() and (file.startswith("src/") or f"def {names[-1]}(" in path.read_text())


def test_what_has_pooling_is_compiled_with_all_optimizations():
    pooling = re.compile(r"reduce_window|max_pool|\.pool\((?!.*global)")
    named = [path for path in (ROOT / "tests").rglob("*.py") if pooling.search(path.read_text())]
    hasty = [path.name for path in named if "optimized" not in path.read_text().lower()]
    assert not hasty, hasty


def test_the_links_of_the_readme_lead_to_files():
    targets = re.findall(r"\]\((?!https?:)([^)#]+)", README)
    assert len(targets) > 10
    assert [path for path in targets if not (ROOT / path).exists()] == []


def test_an_index_of_packages_shows_the_readme_without_links_that_lead_nowhere():
    """Code is as it was; ``.ci/package`` looks at what is built."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["metadata"]["hooks"]
    shown = README
    for rule in settings["fancy-pypi-readme"]["substitutions"]:
        shown = re.sub(rule["pattern"], rule["replacement"], shown)
    assert re.findall(r"\]\((?!https?:)[^)]*\)", shown) == []
    assert "in the folder `docs`.\n\nApache" in shown
    assert "The whole table: coming from another library." in shown
    assert re.findall(r"```(\w*)\n(.*?)```", shown, re.DOTALL) == BLOCKS


def test_the_page_of_commands_lists_all_of_them(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    commands = re.findall(r"^    ([a-z]+)  ", capsys.readouterr().out, re.MULTILINE)
    page = (ROOT / "docs" / "how-to" / "commands.md").read_text()
    assert re.findall(r"^\| `onward (\w+)", page, re.MULTILINE) == commands


def test_ci_runs_the_command_of_the_readme():
    assert "README.md" in (ROOT / ".ci" / "run").read_text()


@pytest.mark.parametrize("word", ["/root/", "/work/", "pypi.org"])
def test_no_file_names_a_machine(word):
    files = [p for folder in (*CODE, ".ci") for p in (ROOT / folder).rglob("*") if p.is_file()]
    texts = [p for p in files if p.suffix in (".py", ".md", ".toml", "") and p != Path(__file__)]
    assert [p.name for p in [*texts, ROOT / "README.md"] if word in p.read_text(errors="ignore")] == []


UNUSED_WORDS = {
    r"\bbears?\b": "has",
    r"\bshall\b": "should, is to, will",
    r"\bfor ever\b": "forever",
    r"\b[Ww]hoever\b": "the process that, anyone who",
    r"(?:^|[.:;] |# |\"\"\")Who (?:asks|calls|holds|loads|needs|reads|runs|trains|waits)\b[^?\n]*$": "a noun",
    r"\bbe it\b": "even if, also",
    r"\banew\b": "again",
    r"\bin vain\b": "could not",
    r"\bwould rather\b": "to ..., if you want to",
    r"\b(?:lest|thereof|whereof|herein|therein|whence|thence|hitherto|thereby)\b": "so, of it, in it",
    r"(?<!here )\b(?:is|was) no (?!longer|more\b|such|less|need|difference)[a-z]": "is not a",
    r"(?<!here )\b(?:are|were) no (?!longer|more\b|such|less)[a-z]": "are not",
    r"\breckon": "count",
}  # turns that no native engineer would write, and what we write; docs/contributing.md has more of them
TEXTS = [
    *(p for p in (ROOT / "src").rglob("*.py*") if p.suffix in (".py", ".pyi")),
    *(p for folder in ("", "how-to", "coming-from") for p in (ROOT / "docs" / folder).glob("*.md")),
    *(ROOT / "notebooks").rglob("*.py"),
    ROOT / "README.md",
]


def unused_words_in(text):
    """The lines that have one of these words, but for the table that lists them."""
    found = [(m.end(), use) for word, use in UNUSED_WORDS.items() for m in re.finditer(word, text, re.M)]
    lines = [(text[text.rfind("\n", 0, end - 1) + 1 :].split("\n", 1)[0], use) for end, use in found]
    return [(line.strip(), use) for line, use in lines if " \\* | " not in line]


def test_words_that_we_do_not_use():
    assert len(TEXTS) > 400
    found = {str(p.relative_to(ROOT)): unused_words_in(p.read_text(encoding="utf-8")) for p in TEXTS}
    assert {path: lines for path, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "line",
    [
        "a name that nobody bears",
        "It is no file.",
        "Leaves that are no float arrays",
        "# Who waits holds the lock.",
    ],
)
def test_such_words_are_found(line):
    assert len(unused_words_in(line)) == 1


@pytest.mark.parametrize(
    "line",
    [
        "for every row",
        "there is no file",
        "## Who waits for whom?",
        "it is no longer there",
        "a shallow copy",
    ],
)
def test_plain_words_are_left_alone(line):
    assert unused_words_in(line) == []
