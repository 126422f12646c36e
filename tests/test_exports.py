"""Public names: listed once, documented, with an example where there is something to show."""

import inspect

import onward as ow

NAMES = [n for n in ow.__all__ if inspect.isfunction(getattr(ow, n)) or inspect.isclass(getattr(ow, n))]
FUNCTIONS = [n for n in NAMES if inspect.isfunction(getattr(ow, n))]
OPTIMIZERS = [
    n for n in NAMES if inspect.isclass(getattr(ow, n)) and issubclass(getattr(ow, n), ow.Optimizer)
]


def test_all_is_complete():
    submodules = {"core", "define", "derive", "distribute", "execute", "explain", "serve", "shell"}
    public = {n for n in vars(ow) if not n.startswith("_")} - submodules
    assert len(set(ow.__all__)) == len(ow.__all__)
    assert public - {"version", "TYPE_CHECKING"} == set(ow.__all__)


def test_every_public_name_has_a_docstring():
    first = {name: (inspect.getdoc(getattr(ow, name)) or "\n").strip().partition("\n")[0] for name in NAMES}
    assert {name: line for name, line in first.items() if not line.endswith((".", ":"))} == {}


def test_every_optimizer_names_its_source():
    texts = {name: inspect.getdoc(getattr(ow, name)) for name in OPTIMIZERS if name != "Optimizer"}
    lacking = {
        name: [word for word in ("Source:", ">>>") if word not in text] for name, text in texts.items()
    }
    assert {name: words for name, words in lacking.items() if words} == {}


def test_most_public_functions_show_an_example():
    plain = {"ancestors", "consumers", "descendants", "liveness", "producers"}
    assert {n for n in FUNCTIONS if ">>>" not in inspect.getdoc(getattr(ow, n))} <= plain


def test_every_error_is_an_onward_error_and_a_builtin_one():
    errors = [getattr(ow, n) for n in NAMES if n.endswith("Error")]
    assert all(issubclass(e, ow.OnwardError) for e in errors)
    assert all(len(e.__mro__) > 4 for e in errors if e is not ow.OnwardError)
