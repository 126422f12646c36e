"""Public names: listed once, documented, with an example where there is something to show."""

import inspect
import json
import pickle
import re
import subprocess
import sys
from collections import Counter
from operator import attrgetter
from types import ModuleType

import pytest
from tests.test_layers import FOLDERS

import onward as ow
from onward.core import vocabulary
from onward.core.pointing import Pointing
from onward.core.whereabouts import public_paths
from onward.execute.pipelined import PipelineStep

VALUES = {path: attrgetter(path)(ow) for path in public_paths(ow)}
NAMES = [path for path, v in VALUES.items() if inspect.isfunction(v) or inspect.isclass(v)]
FUNCTIONS = [path for path in NAMES if inspect.isfunction(VALUES[path])]
OPTIMIZERS = [
    path for path in NAMES if inspect.isclass(VALUES[path]) and issubclass(VALUES[path], ow.Optimizer)
]

# A process that has read the top of the house, and then does what a script does.
FIRST_USE = """
import json, sys
import jax, jax.numpy as jnp
told = {}
def tell(what):
    told[what] = sorted(name for name in sys.modules if name.startswith("onward."))
import onward as ow
tell("import")
assert set(ow.__all__) <= set(dir(ow))
tell("dir")
def network():
    return ow.layer.mse(ow.layer.fc(ow.data("x", (2, 3)), 1), ow.data("y", (2, 1)))
program = ow.Adam(0.1).minimize(network, batch_size=2)
step = ow.compile(program)
tell("compile")
told["others"] = sorted({"flax", "grain", "jaxtyping", "optax", "orbax", "treescope"} & set(sys.modules))
def inside(x):
    for path in ow.__all__:
        getattr(ow, path)
    return x + 1
jax.make_jaxpr(inside)(1.0)
rooms = [module for name, module in sys.modules.items() if name.startswith("onward.")]
told["tracers"] = [n for m in rooms for n, v in vars(m).items() if isinstance(v, jax.core.Tracer)]
from onward import *
told["star"] = sorted(set(ow.__all__) - set(globals()))
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def first_use():
    done = subprocess.run([sys.executable, "-c", FIRST_USE], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def in_rooms(modules, *rooms):
    return [name for name in modules if name.split(".")[1] in rooms and name.count(".") > 1]


def test_an_import_loads_nothing_of_the_house(first_use):
    assert len(first_use["import"]) <= 5
    assert in_rooms(first_use["import"], *FOLDERS[1:]) == []
    assert first_use["dir"] == first_use["import"]


def test_a_script_loads_the_rooms_that_it_enters(first_use):
    loaded = first_use["compile"]
    assert len(loaded) <= 197
    assert in_rooms(loaded, "explain", "serve", "shell") == []
    assert [name for name in loaded if name.startswith("onward.fleet")] == []


def test_a_script_loads_no_library_that_it_does_not_use(first_use):
    assert first_use["others"] == []


def test_names_may_be_loaded_first_inside_of_a_trace(first_use):
    assert first_use["tracers"] == []
    assert first_use["star"] == []


def test_names_are_what_type_checkers_see():
    assert len(set(ow.__all__)) == len(ow.__all__) <= 157
    public = {n for n in vars(ow) if not n.startswith("_")} - {*FOLDERS, "Any", "from_stub", "version"}
    assert public <= set(ow.__all__) <= set(dir(ow))
    assert dict(inspect.getmembers(ow)).keys() >= set(ow.__all__)  # so does help(ow)


def test_a_type_is_pickled_by_where_it_is_defined():
    types = [v for v in VALUES.values() if inspect.isclass(v) and v.__module__.startswith("onward.")]
    assert pickle.loads(pickle.dumps(types)) == types


POINTERS = {
    "ADOPT": "It is ow.optimizer.ADOPT.",
    "TopK": "It is ow.merge.TopK.",
    "Linear": "It is ow.layer.fc.",
    "adam": "It is ow.Adam.",
    "crossentropy": "It is ow.layer.cross_entropy.",
    "minimize": "It is ow.Optimizer.minimize.",
    "freeze": "Write ow.Adam(1e-3, groups=[ow.Group('embed/*', frozen=True)]).",
    "load_checkpoint": "It is ow.Checkpoints.",
    "replicated": "The nearest names are ow.replicate.",
    "zzz": "dir(ow) lists the names that there are.",
}


@pytest.mark.parametrize(("name", "pointer"), POINTERS.items())
def test_a_name_that_is_not_there_says_where_it_is(name, pointer):
    with pytest.raises(AttributeError) as raised:
        getattr(ow, name)
    assert str(raised.value) == f"module 'onward' has no attribute {name!r}. {pointer}"


IN_MODULES = {
    "layer.Linear": "It is ow.layer.fc.",
    "layer.dense": "It is ow.layer.fc.",
    "layer.conv2d": "It is ow.layer.conv.",
    "layer.softmx": "The nearest names are ow.layer.softmax, ow.layer.log_softmax.",
    "optimizer.adam": "It is ow.optimizer.Adam.",
    "schedule.CosineDecay": "It is ow.schedule.cosine.",
    "initializer.xavier": "It is ow.initializer.xavier_uniform.",
    "rule.adam": "It is ow.Adam.",
    "merge.zzz": "dir(ow.merge) lists the names that there are.",
}


@pytest.mark.parametrize(("path", "pointer"), IN_MODULES.items())
def test_a_name_that_a_module_does_not_have_says_where_it_is(path, pointer):
    module, _, name = path.partition(".")
    with pytest.raises(AttributeError) as raised:
        attrgetter(path)(ow)
    assert str(raised.value) == f"ow.{module} has no {name!r}. {pointer}"


def test_what_other_libraries_call_it_is_there():
    assert [p for p in vocabulary.PATHS.values() if attrgetter(p)(ow) is None] == []
    told = [*vocabulary.SENTENCES.values(), *vocabulary.HYPERPARAMETERS.values()]
    told += [sentence for words in vocabulary.METHODS.values() for sentence in words.values()]
    paths = {path for sentence in told for path in re.findall(r"\bow\.([A-Za-z_.]*\w)", sentence)}
    assert len(paths) > 15
    assert [p for p in paths if attrgetter(p)(ow) is None] == []


def test_a_word_of_another_library_is_said_once_and_is_no_name_of_ours():
    words = [
        word for words in (*vocabulary._PATHS.values(), *vocabulary._SENTENCES) for word in words.split()
    ]
    assert [w for w, count in Counter(words).items() if count > 1 or w != vocabulary.plain(w)] == []
    assert [word for word in words if word in ow.__all__] == []


def test_an_attribute_of_another_library_says_what_to_write():
    owners = (
        ow.Trainer,
        ow.Model,
        ow.Evaluator,
        ow.Step,
        PipelineStep,
        ow.State,
        ow.Program,
        ow.History,
        ow.Out,
    )
    assert {owner.__name__ for owner in owners} == set(vocabulary.METHODS)
    for owner in owners:
        there = {vocabulary.plain(word) for word in dir(owner) if not word.startswith("_")}
        assert [word for word in vocabulary.METHODS[owner.__name__] if word in there] == [], owner


ROOMS = {
    "fit": "It is ow.train.",
    "serve": "It is ow.Endpoint.",
    "explain": "It is ow.summary.",
}


@pytest.mark.parametrize(("name", "pointer"), ROOMS.items())
def test_a_folder_that_is_called_says_where_the_function_is(name, pointer):
    assert pickle.loads(pickle.dumps(getattr(ow, name))) is getattr(ow, name)
    with pytest.raises(ow.ArgumentError) as raised:
        getattr(ow, name)(1, epochs=2)
    assert str(raised.value) == f"ow.{name} is a folder of the library, not a function. {pointer}"


def test_a_path_is_not_what_a_trainer_saves_to():
    network = lambda: ow.layer.mse(ow.layer.fc(ow.data("x", (None, 2)), 1), ow.data("y", (None, 1)))  # noqa: E731
    trainer = ow.Trainer(ow.Model(network), ow.SGD(0.1))
    with pytest.raises(ow.ArgumentError, match=r"not 'folder'. Write trainer.checkpoint\(folder\)"):
        trainer.save("folder")


def test_an_attribute_that_is_not_there_names_the_nearest():
    program = ow.trace(lambda w: w**2, 1.0)
    with pytest.raises(AttributeError, match=r"no attribute 'outpts'. The nearest names are .*'outputs'"):
        program.outpts  # noqa: B018
    with pytest.raises(AttributeError, match=r"no attribute 'params'. Write program.parameters"):
        program.params  # noqa: B018
    with pytest.raises(AttributeError, match=r"no attribute '_hidden'.$"):
        program._hidden  # noqa: B018
    assert not hasattr(program, "__array__")


def test_an_attribute_that_failed_says_why():
    class Held(Pointing):
        __slots__ = ("empty",)

        @property
        def own(self):
            return {}.missing

    with pytest.raises(AttributeError, match=r"'dict' object has no attribute 'missing'"):
        Held().own  # noqa: B018
    with pytest.raises(AttributeError, match=r"empty") as raised:
        Held().empty  # noqa: B018
    assert "nearest" not in str(raised.value)
    with pytest.raises(AttributeError, match=r"no attribute 'owm'. The nearest names are 'own'"):
        Held().owm  # noqa: B018


def test_a_name_of_a_module_is_the_one_at_the_top():
    modules = [v for v in VALUES.values() if isinstance(v, ModuleType)]
    optimizers = [n for n in ow.__all__ if n in OPTIMIZERS and n != "Optimizer"]
    assert len(modules) == 10
    assert [n for n in optimizers if getattr(ow.optimizer, n) is not getattr(ow, n)] == []


def test_every_public_name_has_a_docstring():
    first = {name: (inspect.getdoc(VALUES[name]) or "\n").strip().partition("\n")[0] for name in NAMES}
    assert {name: line for name, line in first.items() if not line.endswith((".", ":"))} == {}


def test_every_optimizer_names_its_source():
    texts = {name: inspect.getdoc(VALUES[name]) for name in OPTIMIZERS if name != "Optimizer"}
    lacking = {
        name: [word for word in ("Source:", ">>>") if word not in text] for name, text in texts.items()
    }
    assert {name: words for name, words in lacking.items() if words} == {}


def test_most_public_functions_show_an_example():
    walks = {f"graph.{name}" for name in ("consumers", "descendants", "liveness", "producers")}
    shown = [n for n in FUNCTIONS if "." not in n or n.startswith("graph.")]
    found = {n for n in shown if ">>>" not in inspect.getdoc(VALUES[n])}
    assert found <= walks


def test_every_error_is_an_onward_error_and_a_builtin_one():
    errors = [VALUES[n] for n in NAMES if n.endswith("Error")]
    assert all(issubclass(e, ow.OnwardError) for e in errors)
    assert all(len(e.__mro__) > 4 for e in errors if e is not ow.OnwardError)
