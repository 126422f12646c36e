"""What a function may take and return, how its Variables are named, and what a refusal says."""

import gc
import inspect
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import io_callback
from jax.experimental.ode import odeint

import onward as ow
from onward.core.lower import lower

pytestmark = pytest.mark.usefixtures("earlier_objects_frozen")
KEY = jax.random.key(0)
W = jnp.arange(1.0, 4.0)
X = jnp.ones((8, 3))
HERE = Path(__file__).name


def line_with(function, text):
    """The number of the line in this file that holds ``text``, inside ``function``."""
    lines, first = inspect.getsourcelines(function)
    (found,) = [first + i for i, line in enumerate(lines) if text in line]
    return found


def names(variables):
    return [v.name for v in variables]


def types(variables):
    return [v.type for v in variables]


def run(program, params, *data, state=None):
    """The first step of a Program."""
    step = ow.compile(program)
    begin = step.init(params) if state is None else step.init(params, state)
    return step(begin, *data)


def dot(params, x):
    return jnp.sum(params * x)


# ------------------------------------------------------------------------- what arguments may be

ARGUMENTS = {
    "arrays": (W, X, "float32[3]", "float32[8,3]"),
    "shapes": (
        jax.ShapeDtypeStruct((3,), np.float32),
        jax.ShapeDtypeStruct((8, 3), np.float32),
        "float32[3]",
        "float32[8,3]",
    ),
    "numpy": (np.ones(3, np.float32), np.ones((8, 3), np.float32), "float32[3]", "float32[8,3]"),
    "numpy in 64 bits": (np.ones(3), np.ones((8, 3), np.int64), "float32[3]", "int32[8,3]"),
    "numpy scalars": (np.float32(2), np.int64(3), "float32[]", "int32[]"),
    "Python numbers": (2.0, 3, "float32[]", "int32[]"),
    "Python bool": (2.0, True, "float32[]", "bool[]"),
    "half precision": (W.astype(jnp.bfloat16), X.astype(jnp.float16), "bfloat16[3]", "float16[8,3]"),
    "complex": (W + 1j, X, "complex64[3]", "float32[8,3]"),
}


@pytest.mark.parametrize(("params", "x", "params_type", "x_type"), ARGUMENTS.values(), ids=ARGUMENTS)
def test_arguments_have_the_types_that_jit_gives_them(params, x, params_type, x_type):
    program = ow.trace(lambda params, x: jnp.sum(jnp.abs(params * x)), params, x)
    assert types(program.state) == [params_type]
    assert types(program.inputs) == [x_type]
    assert program.state[0].kind is ow.Kind.PARAMETER
    assert program.inputs[0].kind is ow.Kind.DATA
    assert program.loss is program.outputs[0]


def test_a_random_key_is_data_like_any_other():
    program = ow.trace(lambda w, key: jnp.sum(w * jax.random.normal(key, (3,))), W, KEY)
    assert types(program.inputs) == ["key<fry>[]"]
    _, out = run(program, W, jax.random.key(7))
    np.testing.assert_allclose(out.loss, jnp.sum(W * jax.random.normal(jax.random.key(7), (3,))), rtol=1e-6)


Layer = namedtuple("Layer", "w b")


@jax.tree_util.register_dataclass
@dataclass
class Block:
    scale: jax.Array
    layers: list


@jax.tree_util.register_pytree_with_keys_class
class Named:
    """A container of a library that Onward does not know."""

    def __init__(self, first, second):
        self.first, self.second = first, second

    def tree_flatten_with_keys(self):
        key = jax.tree_util.GetAttrKey
        return [(key("first"), self.first), (key("second"), self.second)], None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


@jax.tree_util.register_pytree_node_class
class Unnamed:
    """A container that names none of its places."""

    def __init__(self, *children):
        self.children = children

    def tree_flatten(self):
        return self.children, None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


CONTAINERS = {
    "array": (W, ["params"]),
    "dict": ({"w": W, "b": W}, ["b", "w"]),
    "ordered dict": (OrderedDict(w=W, b=W), ["w", "b"]),
    "nested": ({"layers": [{"w": W, "b": W}, {"w": W}]}, ["layers/0/b", "layers/0/w", "layers/1/w"]),
    "list": ([W, {"b": W}], ["params/0", "params/1/b"]),
    "tuple": ((W, (W, W)), ["params/0", "params/1/0", "params/1/1"]),
    "namedtuple": (Layer(W, W), ["w", "b"]),
    "dataclass": (Block(W, [W, Layer(W, W)]), ["scale", "layers/0", "layers/1/w", "layers/1/b"]),
    "custom": (Named(W, {"x": W}), ["first", "second/x"]),
    "custom without keys": (Unnamed(W, [W]), ["0", "1/0"]),
    "none inside": ({"w": W, "b": None}, ["w"]),
    "integer keys": ({10: W, 9: W}, ["9", "10"]),
}


def total(params, x):
    return sum(jnp.sum(leaf * x) for leaf in jax.tree.leaves(params))


@pytest.mark.parametrize(("tree", "paths"), CONTAINERS.values(), ids=CONTAINERS)
def test_parameters_are_named_by_their_path(tree, paths):
    program = ow.trace(total, tree, X)
    assert names(program.parameters) == paths
    state, out = run(program, tree, X)
    np.testing.assert_allclose(out.loss, total(tree, X), rtol=1e-6)
    assert jax.tree.structure(state.parameters) == jax.tree.structure(tree)


@pytest.mark.parametrize(("tree", "paths"), CONTAINERS.values(), ids=CONTAINERS)
def test_data_is_named_by_its_argument_and_path(tree, paths):
    program = ow.trace(lambda w, batch: w * total(batch, X), 2.0, tree)
    below = [p.removeprefix("params").strip("/") for p in paths]
    assert names(program.inputs) == [f"batch/{p}" if p else "batch" for p in below]
    _, out = run(program, 2.0, tree)
    np.testing.assert_allclose(out.loss, 2 * total(tree, X), rtol=1e-6)


def test_the_function_is_given_its_own_containers():
    seen = []

    def loss(params, batch):
        seen.append((type(params), type(params.layers[1]), type(batch)))
        return jnp.sum(params.scale * batch["x"]) * jnp.sum(params.layers[1].w)

    ow.trace(loss, Block(W, [W, Layer(W, W)]), {"x": X})
    assert seen == [(Block, Layer, dict)]


def with_positional(a, b, /, c):
    return jnp.sum(a * b * c)


def with_star(params, *batch):
    return sum(jnp.sum(params * x) for x in batch)


class Model:
    def loss(self, params, x):
        return jnp.sum(params * x)

    def __call__(self, theta, x):
        return jnp.sum(theta * x)


NAMED = {
    "plain": (dot, (W, X), ["params", "x"], "dot"),
    "positional only": (with_positional, (W, X, X), ["a", "b", "c"], "with_positional"),
    "star": (with_star, (W, X, X), ["params", "argument_1", "argument_2"], "with_star"),
    "lambda": (lambda w, mask=None: jnp.sum(w), (W,), ["w"], "lambda"),
    "bound method": (Model().loss, (W, X), ["params", "x"], "loss"),
    "callable object": (Model(), (W, X), ["theta", "x"], "Model"),
    "jitted": (jax.jit(dot), (W, X), ["params", "x"], "dot"),
}


@pytest.mark.parametrize(("function", "args", "expected", "name"), NAMED.values(), ids=NAMED)
def test_programs_and_variables_are_named_after_the_function(function, args, expected, name):
    program = ow.trace(function, *args)
    assert names((*program.state, *program.inputs)) == expected
    assert program.name == name
    assert ow.trace(function, *args, name="other").name == "other"


def test_every_name_is_unique_when_arguments_and_paths_meet():
    def loss(params, w, x):
        return jnp.sum(checkpoint_name(params["w"] * w, "w") + params["x"]["y"] * x["y"])

    program = ow.trace(loss, {"w": W, "x": {"y": W}}, W, {"y": W})
    assert len(program.variables) == 4 + sum(len(op.outputs) for op in program.ops)
    _, out = run(program, {"w": W, "x": {"y": 2 * W}}, 3 * W, {"y": 4 * W})
    np.testing.assert_allclose(out.loss, jnp.sum(3 * W * W + 8 * W * W))


def network(params, x, y):
    with jax.named_scope("hidden"):
        h = jnp.tanh(x @ params["w"] + params["b"])
    h, _ = lax.scan(lambda c, row: (c + row, None), jnp.zeros(4), h)
    return jnp.mean((jax.nn.softmax(h) - y) ** 2)


def test_tracing_again_gives_the_same_names():
    args = {"w": jnp.ones((3, 4)), "b": jnp.zeros(4)}, X, jnp.ones(4)
    first, second = ow.trace(network, *args), ow.trace(network, *args)
    assert [*first.variables] == [*second.variables]
    assert str(first) == str(second)
    smaller = ow.trace(network, args[0], X[:2], args[2])
    assert [*first.variables] == [*smaller.variables]
    assert [(v.name, v.type) for v in first.state] == [(v.name, v.type) for v in smaller.state]


# --------------------------------------------------------------------- what a function may return


AUX = {
    "array": lambda w, x: w * 2,
    "the parameters": lambda w, x: w,
    "nothing": lambda w, x: None,
    "containers": lambda w, x: {"twice": w * 2, "rows": [x[0], (x[1],)], "layer": Layer(w, x)},
    "strings and numbers": lambda w, x: {"name": "mean", "count": 3, "scale": 0.5},
    "custom": lambda w, x: Named(jnp.sum(w), {"x": x}),
    "the same array twice": lambda w, x: [h := w + 1, h],
    "a NumPy constant": lambda w, x: (np.arange(3.0, dtype=np.float32), w),
}


@pytest.mark.parametrize("make", AUX.values(), ids=AUX)
def test_aux_comes_back_in_its_containers(make):
    program = ow.SGD(0.1).minimize(lambda w, x: (jnp.sum(w * x), make(w, x)), W, X, has_aux=True)
    _, out = run(program, W, X)
    expected = make(W, X)
    np.testing.assert_allclose(out.loss, jnp.sum(W * X))
    assert jax.tree.structure(out.aux) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(out.aux), jax.tree.leaves(expected), strict=True):
        assert one == other if isinstance(other, str) else np.array_equal(one, other)


def test_the_whole_result_comes_back_as_value():
    program = ow.trace(lambda w, x: {"sum": jnp.sum(w * x), "parts": (w, 2 * w)}, W, X)
    assert program.loss is None
    _, out = run(program, W, X)
    assert jax.tree.structure(out.value) == jax.tree.structure({"sum": 0, "parts": (0, 0)})
    np.testing.assert_array_equal(out.value["parts"][1], 2 * W)
    with pytest.raises(ow.UnknownNameError, match="none of them named the loss"):
        _ = out.loss
    with pytest.raises(ow.UnknownNameError, match="has_aux=True"):
        _ = out.aux


def test_a_function_of_several_results_has_no_loss_to_minimize():
    with pytest.raises(ow.LossError, match=r"returns 2 arrays; which one is the loss\? .*has_aux=True"):
        ow.SGD(0.1).minimize(lambda w, x: (jnp.sum(w * x), w), W, X)


COUNTS = {"n": jnp.int32(0), "mean": jnp.zeros(3)}


def following(state, x):
    return {"n": state["n"] + 1, "mean": 0.9 * state["mean"] + 0.1 * x.mean(0)}


def test_model_state_is_carried_from_step_to_step():
    def loss(w, stats, x):
        return jnp.sum(w * (x - stats["mean"])), following(stats, x)

    program = ow.SGD(0.1).minimize(loss, W, X, state=COUNTS)
    assert names(program.state)[:3] == ["w", "stats/mean", "stats/n"]
    assert [v.kind for v in program.state[1:3]] == [ow.Kind.STATE] * 2
    assert names(program.inputs) == ["x"]
    assert names(p for p, _ in program.gradients) == ["w"]
    step = ow.compile(program)
    state, expected = step.init(W, COUNTS), COUNTS
    for i in range(3):
        state, out = step(state, i * X)
        expected = following(expected, i * X)
    assert jax.tree.structure(state.model_state) == jax.tree.structure(COUNTS)
    assert int(state.model_state["n"]) == 3
    np.testing.assert_allclose(state.model_state["mean"], expected["mean"], rtol=1e-6)
    assert out.value.shape == ()


def test_model_state_and_aux_together():
    def loss(w, stats, x):
        return jnp.sum(w * x), (following(stats, x), {"prediction": w * x})

    program = ow.SGD(0.1).minimize(loss, W, X, state=COUNTS, has_aux=True)
    state, out = run(program, W, X, state=COUNTS)
    assert int(state.model_state["n"]) == 1
    np.testing.assert_array_equal(out.aux["prediction"], W * X)
    np.testing.assert_allclose(out.loss, jnp.sum(W * X))


def test_state_that_passes_through_unchanged():
    program = ow.trace(
        lambda w, s, x: (jnp.sum(w * x * s["scale"]), s), W, X, state={"scale": jnp.float32(2)}
    )
    state, out = run(program, W, X, state={"scale": jnp.float32(3)})
    assert float(state.model_state["scale"]) == 3
    np.testing.assert_allclose(out.loss, 3 * jnp.sum(W * X))


def test_integers_and_keys_among_the_parameters_are_state_and_never_trained():
    params = {"w": W, "n": jnp.int32(2), "key": KEY, "old key": jax.random.PRNGKey(0), "on": jnp.array(True)}

    def loss(params, x):
        keys = [jax.random.fold_in(params[name], jnp.sum(x).astype(int)) for name in ("key", "old key")]
        noise = jax.random.normal(keys[0]) + jax.random.normal(keys[1])
        return jnp.sum(params["w"] * x) * params["n"] + noise * params["on"]

    program = ow.Adam(0.1).minimize(loss, params, X)
    kinds = {v.name: v.kind for v in program.state}
    assert {name: kinds[name] for name in params} == {
        "w": ow.Kind.PARAMETER,
        **dict.fromkeys(("n", "key", "old key", "on"), ow.Kind.STATE),
    }
    assert names(program.parameters) == names(p for p, _ in program.gradients) == ["w"]
    state, out = run(program, params, X)
    np.testing.assert_allclose(out.loss, loss(params, X), rtol=1e-6)
    after = state.parameters
    assert not np.array_equal(after["w"], W)
    assert int(after["n"]) == 2
    assert bool(after["on"])
    np.testing.assert_array_equal(jax.random.key_data(after["key"]), jax.random.key_data(KEY))
    np.testing.assert_array_equal(after["old key"], jax.random.PRNGKey(0))


def test_arrays_that_the_function_closes_over_are_constants():
    mean, table = np.arange(3.0, dtype=np.float32), jnp.full((3,), 2.0)

    def loss(w, x):
        return jnp.sum((x - mean) * w * table) + jnp.sum(table)

    program = ow.trace(loss, W, X)
    assert [v.kind for v in program.constants] == [ow.Kind.CONSTANT] * 2
    assert {np.asarray(c).tobytes() for c in program.constants.values()} == {
        mean.tobytes(),
        np.asarray(table).tobytes(),
    }
    _, out = run(program, W, X)
    np.testing.assert_allclose(out.loss, loss(W, X), rtol=1e-6)


def test_a_static_argument_is_part_of_the_program():
    def loss(w, x, reduction):
        return jnp.sum(w * x) if reduction == "sum" else jnp.mean(w * x)

    step = ow.compile(ow.trace(loss, W, X, "sum"))
    state = step.init(W)
    np.testing.assert_allclose(step(state, X, "sum")[1].loss, jnp.sum(W * X))
    with pytest.raises(ow.ArgumentError, match=r"reduction holds 'mean' where the traced one holds 'sum'"):
        step(state, X, "mean")


# ------------------------------------------------------------------------ scopes, names, places


@jax.jit
def inner(h):
    return jnp.sin(innermost(h))


@jax.jit
def innermost(h):
    return jnp.cos(h)


def scoped(w, x):
    with jax.named_scope("outer"):
        h = inner(w * x)
        with jax.named_scope("deep"):
            h = h + 1
    h = checkpoint_name(h, "hidden")
    return jnp.sum(h)


def test_nested_jit_is_inlined_and_kept_as_scope():
    program = ow.trace(scoped, W, X)
    assert not {op.type for op in program.ops} & {"jit", "pjit", "closed_call"}
    scopes = {op.type: op.scope for op in program.ops}
    assert scopes["cos"] == "outer/inner/innermost"
    assert scopes["sin"] == "outer/inner"
    assert scopes["add"] == "outer/deep"
    assert scopes["reduce_sum"] == ""
    assert "outer/inner/innermost/cos" in program.variables


def test_checkpoint_name_names_the_variable():
    program = ow.trace(scoped, W, X)
    assert program["hidden"].type == "float32[8,3]"
    step = ow.compile(program, fetch=["hidden"])
    _, out = step(step.init(W), X)
    np.testing.assert_allclose(out["hidden"], jnp.sin(jnp.cos(W * X)) + 1, rtol=1e-6)


def test_a_name_that_is_given_twice_is_numbered():
    def loss(w):
        return jnp.sum(checkpoint_name(w * 2, "h") + checkpoint_name(w * 3, "h"))

    step = ow.compile(ow.trace(loss, W), fetch=["h", "h_1"])
    _, out = step(step.init(W))
    np.testing.assert_array_equal(out["h"], W * 2)
    np.testing.assert_array_equal(out["h_1"], W * 3)


def test_ops_know_the_line_of_the_user():
    ops = {op.type: op.source for op in ow.trace(scoped, W, X).ops}
    expected = {"mul": "inner(w * x)", "add": "h + 1", "name": '"hidden"', "reduce_sum": "return jnp.sum(h)"}
    for kind, text in expected.items():
        assert Path(ops[kind].file).name == HERE
        assert ops[kind].line == line_with(scoped, text)
        assert ops[kind].function == "scoped"
    assert (ops["sin"].line, ops["sin"].function) == (line_with(inner, "jnp.sin"), "inner")
    assert str(ops["add"]) == f"{HERE}:{line_with(scoped, 'h + 1')}"


def test_ops_of_library_functions_know_the_line_that_called_them():
    def loss(w, x):
        return jnp.mean(jax.nn.log_softmax(w * x))

    line = line_with(loss, "log_softmax")
    assert {(Path(op.source.file).name, op.source.line) for op in ow.trace(loss, W, X).ops} == {(HERE, line)}


CONTROL = {
    "scan": (
        "scan",
        lambda w, x: lax.scan(lambda c, row: (c * row.sum(), c + 1), w.sum(), x)[1].sum(),
        {"jaxpr": ["reduce_sum", "mul", "add"]},
    ),
    "cond": (
        "cond",
        lambda w, x: lax.cond(x.sum() > 0, lambda h: h * 2, lambda h: jnp.sin(h), w.sum()),
        {"branches[0]": ["sin"], "branches[1]": ["mul"]},
    ),
    "switch": (
        "cond",
        lambda w, x: lax.switch(x.astype(int).sum() % 3, [jnp.sin, jnp.cos, jnp.tan], w.sum()),
        {"branches[0]": ["sin"], "branches[1]": ["cos"], "branches[2]": ["tan"]},
    ),
    "while": (
        "while",
        lambda w, x: lax.while_loop(lambda c: c < 10, lambda c: c + jnp.exp(c), w.sum()),
        {"cond_jaxpr": ["lt"], "body_jaxpr": ["exp", "add"]},
    ),
}


@pytest.mark.parametrize(("kind", "loss", "expected"), CONTROL.values(), ids=CONTROL)
def test_control_flow_is_one_op_with_programs_inside(kind, loss, expected):
    program = ow.trace(loss, W, X)
    (op,) = [op for op in program.ops if op.type == kind]
    assert {name: [o.type for o in inside.ops] for name, inside in op.subprograms.items()} == expected
    assert all(isinstance(inside, ow.Program) for inside in op.subprograms.values())
    _, out = run(program, W, X)
    np.testing.assert_allclose(out.loss, loss(W, X), rtol=1e-6)


def test_a_program_inside_runs_on_its_own():
    program = ow.trace(CONTROL["cond"][1], W, X)
    (op,) = [op for op in program.ops if op.subprograms]
    inside = op.subprograms["branches[0]"]
    assert names(inside.inputs) == ["input_0"]
    (found,) = lower(inside, inside.outputs)([], [jnp.float32(0.5)])
    np.testing.assert_allclose(found, np.sin(0.5), rtol=1e-6)


# ---------------------------------------------------------------------------------------- effects


def test_debug_prints_appear_once_per_step_and_in_order(capsys):
    def loss(w, x):
        jax.debug.print("first {}", w[0], ordered=True)
        h = w * x
        jax.debug.print("second {}", h.sum(), ordered=True)
        jax.debug.print("third", ordered=True)
        return jnp.sum(h)

    program = ow.SGD(1.0).minimize(loss, W, X)
    assert [op.made_by for op in program.ops if op.body.has_effects] == [ow.Pass.FORWARD] * 3
    step = ow.compile(program)
    state = step.init(W)
    jax.effects_barrier()
    assert capsys.readouterr().out == ""
    for _ in range(2):
        state, _ = step(state, X)
    jax.effects_barrier()
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["first 1.0", "second 48.0", "third", "first -7.0", "second -144.0", "third"]


def test_unordered_prints_appear_once_per_step(capsys):
    def loss(w, x):
        def body(c, row):
            jax.debug.print("row {}", row[0])
            return c + jnp.sum(w * row), None

        jax.debug.print("sum {}", w.sum())
        return lax.scan(body, 0.0, x)[0]

    step = ow.compile(ow.SGD(0.1).minimize(loss, W, X))
    x = X.at[:, 0].set(jnp.arange(8.0))
    step(step.init(W), x)
    jax.effects_barrier()
    found = sorted(capsys.readouterr().out.splitlines())
    assert found == [f"row {float(i)}" for i in range(8)] + ["sum 6.0"]


def test_callbacks_run_once_per_step():
    seen = []

    def loss(w, x):
        io_callback(lambda v: seen.append(float(v)), None, w[0], ordered=True)
        return jnp.sum(w * x)

    step = ow.compile(ow.SGD(1.0).minimize(loss, W, X))
    state = step.init(W)
    for _ in range(3):
        state, _ = step(state, X)
    jax.effects_barrier()
    assert seen == [1.0, -7.0, -15.0]


# --------------------------------------------------------------------------------------- refusals


def branches(w, x):
    if w[0] > 0:  # here
        return jnp.sum(w * x)
    return jnp.sum(x)


def chains(w, x):
    while jnp.sum(w) < 3:  # here
        w = w + 1
    return jnp.sum(w * x)


def calls_numpy(w, x):
    return jnp.sum(np.exp(w) * x)  # here


def converts_to_numpy(w, x):
    h = w * 2
    return jnp.sum(np.asarray(h) * x)  # here


def converts_to_float(w, x):
    return float(jnp.sum(w * x))  # here


def takes_the_item(w, x):
    return jnp.sum(w * x).item()  # here


def ranges(w, n):
    for _ in range(n):  # here
        w = w + 1
    return jnp.sum(w)


def makes_a_shape(w, n):
    return jnp.sum(w) + jnp.sum(jnp.zeros(n))  # here


def masks(w, x):
    return jnp.sum(x[x > 0]) * jnp.sum(w)  # here


def misfits(w, x):
    h = x * w
    return jnp.sum(h @ jnp.ones((5, 5)))  # here


def helper(w):
    return w["missing"]  # here


def looks_up(w, x):
    return jnp.sum(helper({"w": w}) * x)


def recurses(w, x):
    return recurses(w, x) + 1  # here


REFUSED = {
    "if": (branches, X, branches, "Python condition", "jnp.where, jax.lax.cond"),
    "while": (chains, X, chains, "Python condition", "jax.lax.while_loop"),
    "np.exp": (calls_numpy, X, calls_numpy, "given to NumPy", "jax.numpy"),
    "np.asarray": (converts_to_numpy, X, converts_to_numpy, "given to NumPy", "jax.numpy"),
    "float": (converts_to_float, X, converts_to_float, "Python number is needed", "not known while tracing"),
    "item": (takes_the_item, X, takes_the_item, "Python number is needed", "not known while tracing"),
    "range": (ranges, 3, ranges, "Python number is needed", "closure"),
    "shape": (makes_a_shape, 3, makes_a_shape, "Shapes must be 1D sequences of concrete values", "int32"),
    "mask": (masks, X, masks, "boolean indices must be concrete", "bool[8,3]"),
    "shapes that differ": (misfits, X, misfits, "contracting dimensions", "(3,) and (5,)"),
    "KeyError in a helper": (looks_up, X, helper, "KeyError", "'missing'"),
    "recursion": (recurses, X, recurses, "RecursionError", "recursion"),
}


@pytest.mark.parametrize(("function", "data", "place", "what", "advice"), REFUSED.values(), ids=REFUSED)
def test_a_function_that_cannot_be_traced_is_refused_at_its_line(function, data, place, what, advice):
    with pytest.raises(ow.TraceError) as error:
        ow.trace(function, W, data)
    message = str(error.value)
    assert message.startswith(f"{function.__name__} cannot be traced. At ")
    assert f"{HERE}:{line_with(place, '# here')} in {place.__name__}" in message
    assert what in message
    assert advice in message
    assert isinstance(error.value.__cause__, Exception)


def appends_an_argument(kept):
    def loss(w, x):
        kept.append(w)
        return jnp.sum(w * x)

    return loss


def appends_the_loss(kept):
    def loss(w, x):
        kept.append(jnp.sum(w * x))
        return kept[-1]

    return loss


def fills_a_dict(kept):
    found = {}
    kept.append(found)

    def loss(w, x):
        found["hidden"] = w * x
        return jnp.sum(found["hidden"])

    return loss


def sets_an_attribute(kept):
    model = Model()
    kept.append(model)

    def loss(w, x):
        model.hidden = w * x
        return jnp.sum(model.hidden)

    return loss


IMPURE = [appends_an_argument, appends_the_loss, fills_a_dict, sets_an_attribute]


@pytest.mark.parametrize("make", IMPURE)
def test_a_side_effect_is_refused(make):
    kept = []
    with pytest.raises(ow.TraceError, match=r"loss is not pure .*keeps a traced array") as error:
        ow.trace(make(kept), W, X)
    assert kept
    assert "has_aux=True" in str(error.value)


def test_what_jax_keeps_of_a_function_that_it_converts_is_no_side_effect():
    def loss(w, x):
        path = odeint(lambda y, t: jnp.tanh(y @ w), x, jnp.array([0.0, 1.0]))
        return jnp.mean(path[-1] ** 2)

    w = np.eye(3, dtype="float32")
    step = ow.compile(ow.SGD(0.1).minimize(loss, w, X))
    state, out = step(step.init(w), X)
    value, gradient = jax.jit(jax.value_and_grad(loss))(w, X)
    np.testing.assert_allclose(out.loss, value, 1e-6)
    np.testing.assert_allclose(state.parameters, w - 0.1 * gradient, 1e-5)


def test_what_is_kept_inside_the_function_only_is_no_side_effect():
    def loss(w, x):
        kept = [w * x]
        model = Model()
        model.hidden = kept[0] + 1
        model.self = model
        return jnp.sum(model.hidden)

    assert ow.trace(loss, W, X).loss is not None


def test_a_cycle_that_a_trace_leaves_is_found_among_young_objects(monkeypatch):
    """In a long notebook a look through all objects takes longer than a trace."""

    def loss(w, x):
        model = Model()
        model.hidden, model.self = w, model
        return jnp.sum(w * x)

    generations, whole = [], gc.collect

    def collect(generation):
        generations.append(generation)
        return whole(generation)

    monkeypatch.setattr(gc, "collect", collect)
    gc.disable()
    try:
        ow.trace(loss, W, X)
    finally:
        gc.enable()
    assert generations == [1]


def needs_two(w, x, y):
    return jnp.sum(w * x * y)


BAD_CALLS = {
    "no arguments": (lambda: ow.trace(needs_two), ow.ArgumentError, "given no arguments"),
    "too few": (
        lambda: ow.trace(needs_two, W, X),
        ow.ArgumentError,
        r"needs_two\(w, x, y\) cannot be called with 2 arguments: missing .*'y'",
    ),
    "too many": (
        lambda: ow.trace(dot, W, X, X),
        ow.ArgumentError,
        r"dot\(params, x\) cannot be called with 3 arguments: too many",
    ),
    "text": (
        lambda: ow.trace(dot, W, np.array(["a", "b"])),
        ow.ArgumentError,
        "<U1.*Encode it as numbers",
    ),
    "objects": (lambda: ow.trace(dot, W, np.array([{}, {}])), ow.ArgumentError, "dtype object"),
    "aux and no pair": (
        lambda: ow.trace(dot, W, X, has_aux=True),
        ow.TraceError,
        r"dot returned an array of shape \(\)\. With has_aux=True it must return a pair",
    ),
    "aux and three": (
        lambda: ow.trace(lambda w: (w, w, w), W, has_aux=True),
        ow.TraceError,
        "returned a tuple of 3",
    ),
    "loss called": (
        lambda: ow.SGD(0.1).minimize(dot(W, X)),
        ow.ArgumentError,
        "the loss function itself.*not the number that it returned",
    ),
    "loss of a vector": (
        lambda: ow.SGD(0.1).minimize(lambda w, x: jnp.sum(w * x, 1), W, X),
        ow.LossError,
        rf"float32\[8\] .*{HERE}:\d+.*must be a scalar",
    ),
    "loss of an integer": (
        lambda: ow.SGD(0.1).minimize(lambda w, x: jnp.sum(w * x > 0), W, X),
        ow.LossError,
        rf"int32\[\] .*{HERE}:\d+.*floating point",
    ),
    "loss without parameters": (
        lambda: ow.SGD(0.1).minimize(lambda w, x: jnp.sum(x), W, X),
        ow.LossError,
        "does not depend on any of 'w'",
    ),
    "options with a Program": (
        lambda: ow.SGD(0.1).minimize(ow.trace(dot, W, X), W, X),
        ow.ArgumentError,
        "A Program is traced already",
    ),
}


@pytest.mark.parametrize(("call", "error", "message"), BAD_CALLS.values(), ids=BAD_CALLS)
def test_calls_that_are_refused(call, error, message):
    with pytest.raises(error, match=f"(?s){message}"):
        call()


NEXT_STATE = {
    "no pair": (lambda s: jnp.float32(0), r"With state= it must return a pair: \(loss, next_state\)"),
    "three": (lambda s: (0.0, s, s), r"returned a tuple of 3\. With state= it must return a pair"),
    "lacks an array": (lambda s: (0.0, {"n": s["n"]}), "lacks 'mean' of stats"),
    "none": (lambda s: (0.0, None), "lacks 'mean' of stats"),
    "swapped": (lambda s: (s, 0.0), "next state that loss returned .* stats"),
    "wrapped": (lambda s: (0.0, {"stats": s}), "next state that loss returned .*mean"),
    "another shape": (
        lambda s: (0.0, {**s, "mean": jnp.zeros(4)}),
        r"stats/mean goes in as float32\[3\] and loss returned float32\[4\]",
    ),
    "another dtype": (
        lambda s: (0.0, {**s, "n": s["n"] + 0.5}),
        r"stats/n goes in as int32\[\] and loss returned float32\[\]",
    ),
}


@pytest.mark.parametrize(("make", "message"), NEXT_STATE.values(), ids=NEXT_STATE)
def test_a_next_state_that_does_not_fit_is_refused(make, message):
    def loss(w, stats):
        return make(stats)

    with pytest.raises(ow.TraceError, match=message):
        ow.trace(loss, W, state=COUNTS)


def test_state_with_aux_must_come_as_a_pair_in_a_pair():
    with pytest.raises(ow.TraceError, match=r"it must return \(loss, \(next_state, aux\)\)"):
        ow.trace(lambda w, s: (jnp.sum(w), s), W, state=COUNTS, has_aux=True)


# ------------------------------------------------------------------------- what once went wrong


def test_state_whose_paths_read_alike_keeps_its_values_apart():
    def loss(w, s):
        return jnp.sum(w), {"a/b": s["a/b"] + 1, "a": {"b": s["a"]["b"] + 10}}

    before = {"a/b": jnp.float32(0), "a": {"b": jnp.float32(0)}}
    state, _ = run(ow.trace(loss, W, state=before), W, state=before)
    assert jax.tree.map(float, state.model_state) == {"a/b": 1.0, "a": {"b": 10.0}}


def test_a_python_number_is_a_next_state():
    def loss(w, s):
        return jnp.sum(w), {"n": 1.0}

    before = {"n": jnp.float32(0)}
    state, _ = run(ow.trace(loss, W, state=before), W, state=before)
    assert float(state.model_state["n"]) == 1


def test_a_next_state_with_more_than_the_state_is_refused():
    with pytest.raises(ow.TraceError, match="extra"):
        ow.trace(lambda w, s: (jnp.sum(w), {**s, "extra": w}), W, state=COUNTS)


def test_a_side_effect_is_reported_with_the_line_of_the_function():
    loss = appends_an_argument([])
    with pytest.raises(ow.TraceError, match=rf"{HERE}:\d+"):
        ow.trace(loss, W, X)


def test_missing_arguments_are_reported_with_the_signature():
    with pytest.raises(ow.ArgumentError, match=r"needs_two.*\(w, x, y\)"):
        ow.trace(needs_two, W, X)


def test_a_forgotten_return_is_named():
    def loss(w, x):
        jnp.sum(w * x)

    with pytest.raises(ow.LossError, match="None"):
        ow.SGD(0.1).minimize(loss, W, X)


def test_a_value_of_another_trace_is_refused():
    kept = []

    def first(w):
        kept.append(w * 2)
        return jnp.sum(w)

    with pytest.raises(ow.TraceError, match="not pure"):
        ow.trace(first, W)

    def second(w):
        return jnp.sum(w * kept[0])

    with pytest.raises(ow.TraceError, match=r"another trace"):
        ow.trace(second, W)
