import pickle
import types
import warnings

import numpy as np
import pytest

import onward as ow
from onward.core.around import Around, read_around
from onward.core.recipe import rebuilt

PARAMS = {"w": np.ones((3, 1), np.float32)}
X, Y = np.ones((6, 3), np.float32), np.ones((6, 1), np.float32)
NETS = """
def net(w, x):
    return jnp.tanh(x @ w)

class Layer:
    def __call__(self, w, x):
        return jnp.tanh(x @ w)

class Module(linen.Module):
    def __call__(self, w, x):
        return jnp.tanh(x @ w)

jitted, bound, part, layer, module.net = jax.jit(net), Layer().__call__, functools.partial(net), Layer(), net
flax = Module().apply
"""
FIRST = f"""
import functools, types, jax, jax.numpy as jnp
from flax import linen
scale, traces, module = 2.0, 0, types.ModuleType("module")
{NETS}
def loss(p, x, y):
    global traces
    traces += 1
    return jnp.mean(jnp.square(scale * NET(p["w"], x) - y))
"""
SECOND = NETS.replace("tanh", "sin")
SPELLINGS = (
    "net",
    "jitted",
    "bound",
    "part",
    "layer",
    "module.net",
    "(lambda w, x: net(w, x))",
    "functools.partial(flax, {})",
)


def run(cell, variables):
    exec(compile(cell, "<cell>", "exec"), variables)
    return variables


def told(change, name="net", lengths=(4, 5)):
    """What is said where the function is traced again after a change of the variables around it."""
    variables = run(FIRST.replace("NET", name), {"__name__": "cell"})
    program = ow.SGD(0.1).minimize(variables["loss"], PARAMS, X, Y)
    run(change, variables)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for rows in lengths:
            rebuilt(program, (X[:rows], Y[:rows]))
    return [str(w.message) for w in found]


@pytest.mark.parametrize("name", SPELLINGS)
def test_a_helper_that_is_another_one_now_is_told_once(name):
    (words,) = told(SECOND, name)
    read = {"(": "net", "f": "flax"}.get(name[0], name)
    assert f"reads {read}, which was that of <cell>:" in words
    assert "loss is traced again" in words
    assert "call minimize again" in words


OTHERS = {
    "a function of a library": ("net = jax.nn.relu", "net = jax.nn.gelu", "net"),
    "an argument of a partial": (
        """
def f(x, by):
    return by * x
net = functools.partial(f, by=2.0)""",
        "net = functools.partial(f, by=3.0)",
        "net",
    ),
    "an argument of a decorator": (
        """
def scaled(by):
    def of(f):
        @functools.wraps(f)
        def scaling(x):
            return by * f(x)
        return scaling
    return of
@scaled(2.0)
def net(x):
    return jnp.sin(x)""",
        "@scaled(3.0)\ndef net(x):\n    return jnp.sin(x)",
        "by",
    ),
    "one of two closures": (
        """
def make(by):
    return lambda x: by * x
a, b = make(1.0), make(2.0)
def net(x):
    return b(a(x))""",
        "b = make(3.0)",
        "by",
    ),
    "a base class": (
        """
class Base:
    def f(self, x):
        return jnp.sin(x)
class Net(Base):
    pass
net = Net().f""",
        """
class Base:
    def f(self, x):
        return jnp.cos(x)
class Net(Base):
    pass
net = Net().f""",
        "net",
    ),
    "an object whose method is called": (
        """
class Net:
    @staticmethod
    def f(x):
        return x
held = Net()
def net(x):
    return held.f(x)""",
        """
class Net:
    @staticmethod
    def f(x):
        return 2 * x
held = Net()""",
        "held",
    ),
    "one of many names": (
        "names, module = types.SimpleNamespace(), types.ModuleType('module')\n"
        "module.net = jnp.sin\ndef net(x):\n    "
        + "\n    ".join(f"names.a{i} = 0" for i in range(300))
        + "\n    return module.net(x)",
        "module.net = jnp.cos",
        "module.net",
    ),
}


@pytest.mark.parametrize(("first", "second", "name"), OTHERS.values(), ids=OTHERS)
def test_whatever_is_called_is_looked_at(first, second, name):
    variables = run("import functools, types, jax, jax.numpy as jnp\n" + first, {"__name__": "cell"})
    run("def loss(w, x):\n    return jnp.sum(net(w * x))", variables)
    around = Around(variables["loss"])
    assert around.changed() == ""
    run(second, variables)
    assert around.changed().startswith(f"{name}, which was ")


def test_a_helper_that_takes_data_of_before_no_more_is_told_and_runs():
    (words,) = told("def net(w, x):\n    return x.reshape(4, 3) @ w", lengths=[4])
    assert "reads net" in words


def test_what_wraps_itself_or_answers_everything_is_no_obstacle():
    class Answering:
        def __getattr__(self, name):
            raise RuntimeError(name)

    def reader(x):
        return answering.anything(x) + scale

    reader.__wrapped__, answering, scale = reader, Answering(), 1.0
    around = Around(reader)
    scale = 2.0
    assert around.changed() == "scale, which was 1.0 and is 2.0"


def test_a_number_that_is_another_one_now_is_told():
    (words,) = told("scale = 3.0")
    assert "reads scale, which was 2.0 and is 3.0" in words


def test_a_helper_of_a_helper_is_read_too():
    variables = run(FIRST.replace("NET", "outer"), {})
    run("def outer(w, x):\n    return net(w, x)", variables)
    around = Around(variables["loss"])
    run(SECOND, variables)
    assert around.changed().startswith("net, which was that of <cell>:")
    assert around.changed() == ""


@pytest.mark.parametrize(
    "change",
    [
        FIRST.replace("NET", "net").partition("jitted")[0],  # the same cell, run again
        "\n\n# moved\ndef net(w, x):\n    return jnp.tanh(x @ w)",
        "traces = 7",  # which the function counts itself
        "other = scale",
        "def net(w, x):\n    shape = x.shape\n    return jnp.tanh(x @ w)",
        "print = scale",  # which was Python's own
        "class Layer:\n    def plot(self):\n        pass\n    __call__ = lambda self, w, x: jnp.tanh(x @ w)",
    ],
)
def test_what_computes_the_same_is_as_it_was(change):
    assert told(change, "(print, layer, net)[2]") == []


def test_a_number_that_nothing_is_computed_of_is_as_it_was():
    variables = run("scale = 1.0\n" + FIRST.replace("NET", "net").replace("scale *", "0 *"), {})
    run(
        "def step(p, x, y):\n    g = jax.grad(loss)(p, x, y)\n    scale\n    return {'w': p['w'] - g['w']}",
        variables,
    )
    program = ow.adopt(variables["step"], PARAMS, X, Y)
    run("scale = 5.0", variables)
    rebuilt(program, (X[:4], Y[:4]))
    run("def step(p, x, y):\n    return p", variables)  # another step, which nobody adopted
    rebuilt(program, (X[:3], Y[:3]))


def test_a_default_is_read_and_an_object_with_any_attribute_is_not():
    class Any:
        def __getattr__(self, name):
            return self

        def __call__(self, x):
            return x

    any_attribute = Any()
    variables = run("def scaled(x, by=2.0):\n    return by * x", {"any_attribute": any_attribute})
    run("def loss(w, x):\n    return (any_attribute(w) * scaled(x)).sum()", variables)
    around = Around(variables["loss"])
    assert around.changed() == ""
    run("def scaled(x, by=3.0):\n    return by * x", variables)
    assert around.changed().startswith("scaled, which was that of <cell>:1")


def test_a_trace_that_is_there_is_not_looked_at():
    variables = run(FIRST.replace("NET", "net"), {})
    program = ow.SGD(0.1).minimize(variables["loss"], PARAMS, X, Y)
    run(SECOND, variables)
    assert str(rebuilt(program, (X, Y))) == str(program)


def test_a_step_that_is_adopted_is_looked_at_too():
    variables = run(FIRST.replace("NET", "net"), {})
    run("def step(p, x, y):\n    g = jax.grad(loss)(p, x, y)\n    return {'w': p['w'] - g['w']}", variables)
    program = ow.adopt(variables["step"], PARAMS, X, Y)
    run(SECOND, variables)
    with pytest.warns(UserWarning, match="step is traced again.* reads net"):
        rebuilt(program, (X[:4], Y[:4]))


def test_a_test_says_it_at_the_line_that_asks():
    variables = run(FIRST.replace("NET", "net"), {})
    trainer = ow.Trainer(ow.Model(ow.trace(variables["loss"], PARAMS, X, Y), PARAMS), ow.SGD(0.1))
    trainer.train([(X, Y)], epochs=1)
    run(SECOND, variables)
    with pytest.warns(UserWarning, match="reads net") as found:
        trainer.test([(X[:4], Y[:4])])
    assert found[0].filename == __file__


def test_in_another_process_nothing_is_known():
    assert pickle.loads(pickle.dumps(Around(told))).changed() == ""


def test_attributes_are_read_of_modules_only():
    module = types.ModuleType("module")
    module.inner = types.ModuleType("inner")
    module.inner.number = 3
    assert dict(read_around(lambda x: module.inner.number * x.real)) == {
        "module": module,
        "module.inner": module.inner,
        "module.inner.number": 3,
    }
