"""The table of primitives: whole, and true where a primitive can be asked."""

import itertools
import sys
from importlib import import_module

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core as jex

from onward.core.flops import RULES
from onward.core.jaxprs.body import Body, body_of
from onward.core.jaxprs.devices import same_everywhere
from onward.core.primitives.table import ROWS, of
from onward.core.primitives.traits import Linear, Runs, Work
from onward.execute.nonfinite.finding import ADVICE

PUBLIC = """
    jax.numpy jax.lax jax.lax.linalg jax.scipy.special jax.nn jax.random jax.debug jax.export jax.ffi
    jax.ad_checkpoint jax.custom_batching jax.custom_derivatives jax.extend.core.primitives jax.extend.random
    jax.experimental.checkify jax.experimental.custom_partitioning jax.experimental.multihost_utils
    jax.experimental.sparse
"""
OF_KERNELS = ("pallas", "mosaic", "triton")
NUMBERS = np.array([-np.inf, -3.5, -1.0, -0.0, 0.0, 0.5, 1.0, 700.0, np.inf, np.nan], np.float32)
MATRIX = jnp.arange(1.0, 7.0).reshape(2, 3)

# Calls of primitives that move or add numbers: what is said of them is asked of these.
CALLS = {
    "broadcast_in_dim": lambda x: lax.broadcast_in_dim(x, (4, 2, 3), (1, 2)),
    "copy": jnp.array,
    "cumsum": lambda x: lax.cumsum(x, axis=1),
    "dynamic_slice": lambda x: lax.dynamic_slice(x, (0, 1), (2, 2)),
    "gather": lambda x: x.at[jnp.array([1, 0, 1])].get(mode="clip"),
    "name": lambda x: checkpoint_name(x, "x"),
    "neg": lax.neg,
    "reduce_sum": lambda x: lax.reduce_sum(x, (1,)),
    "reshape": lambda x: lax.reshape(x, (6,)),
    "rev": lambda x: lax.rev(x, (1,)),
    "slice": lambda x: lax.slice(x, (0, 1), (2, 3)),
    "split": lambda x: lax.split(x, (1, 2), axis=1),
    "squeeze": lambda x: lax.squeeze(x[:1], (0,)),
    "transpose": lambda x: lax.transpose(x, (1, 0)),
}
EXCHANGES = {
    "all_gather": lambda x: lax.all_gather(x, "devices"),
    "all_to_all": lambda x: lax.all_to_all(x, "devices", 0, 0),
    "pmax": lambda x: lax.pmax(x, "devices"),
    "pmin": lambda x: lax.pmin(x, "devices"),
    "ppermute": lambda x: lax.ppermute(x, "devices", [(i, (i + 1) % 4) for i in range(4)]),
    "psum": lambda x: lax.psum(x, "devices"),
    "reduce_scatter": lambda x: lax.psum_scatter(x, "devices"),
    "axis_index": lambda x: lax.axis_index("devices") + jnp.int32(x[0]),
}


def primitives_of_jax():
    """By name the primitives that stand in a module of JAX, but for those of kernels only."""
    for name in PUBLIC.split():
        import_module(name)
    modules = [vars(m) for name, m in [*sys.modules.items()] if name.split(".")[0] == "jax" and m is not None]
    named = [m for m in modules if not any(word in m["__name__"] for word in OF_KERNELS)]
    found = [value for m in named for value in [*m.values()] if isinstance(value, jex.Primitive)]
    return {str(primitive.name): primitive for primitive in found}


def without_row(names):
    return sorted(set(names) - {row.name for row in ROWS})


def test_every_primitive_of_this_jax_has_a_row():
    names = primitives_of_jax()
    assert len(names) > 250
    assert without_row(names) == [], "new in JAX: give each a row in core/primitives/table.py"


def test_the_test_above_finds_what_has_no_row():
    names = primitives_of_jax()
    assert without_row([*names, "made_up"]) == ["made_up"]
    assert {"add", "scan", "psum", "random_bits", "custom_vjp_call", "svd", "shard_map"} <= names.keys()


def test_each_has_one_row_and_the_unknown_is_opaque():
    assert len({row.name for row in ROWS}) == len(ROWS)
    assert of("made_up") == of("")
    assert not of("made_up").is_fusible
    assert {row.transposes for row in ROWS} - {""} <= {row.name for row in ROWS}


def test_what_is_keyed_by_primitives_agrees_with_the_table():
    assert {row.work for row in ROWS} - RULES.keys() == {Work.EACH, Work.ROOT, Work.SERIES}
    assert {row.name for row in ROWS if row.fails_at_zero} <= ADVICE.keys()
    assert without_row(ADVICE) == []


def functions(count):
    """Of jax.lax those that are one elementwise primitive of so many float operands, by its name."""
    found = {}
    for row in (row for row in ROWS if row.is_fusible):
        function = vars(lax).get(row.name)
        try:
            body = body_of(lambda *xs, f=function: [f(*xs)], *[NUMBERS] * count)
        except Exception:
            continue
        if row.is_elementwise and body.primitives == {row.name}:
            found[row.name] = function
    return found


def results(count):
    """All numbers, or pairs of them, and what each such function makes of them as they stand, and turned."""
    grid = np.array([*itertools.product(NUMBERS, repeat=count)], np.float32).T
    named = functions(count)
    made = jax.jit(lambda *xs: {name: f(*xs) for name, f in named.items()})
    turned = {name: np.asarray(x)[::-1] for name, x in made(*grid[:, ::-1]).items()}
    return grid, {name: np.asarray(x) for name, x in made(*grid).items()}, turned


@pytest.mark.parametrize(("count", "least"), [(1, 30), (2, 12)])
def test_elementwise(count, least):
    grid, made, turned = results(count)
    assert len(made) >= least
    for name, x in made.items():
        np.testing.assert_array_equal(x, turned[name], name)
        if of(name).spreads_nonfinite:
            assert not np.isfinite(x[~np.isfinite(grid).all(0)]).any(), name
        if of(name).keeps_sign:
            for infinity in (np.inf, -np.inf):
                made_of = grid[:, x == infinity]
                assert np.all((made_of == infinity).any(0) | (made_of != -infinity).all(0)), name


def test_what_moves_or_adds():
    values = MATRIX, jnp.cos(MATRIX), 2 * MATRIX - 3 * jnp.cos(MATRIX)
    made = jax.jit(lambda: {name: [jax.tree.leaves(f(v)) for v in values] for name, f in CALLS.items()})()
    for name, (found, other, both) in made.items():
        row = of(name)
        assert row.linear is Linear.FIRST
        assert name in body_of(lambda x, f=CALLS[name]: jax.tree.leaves(f(x)), MATRIX).primitives
        for a, b, c in zip(found, other, both, strict=True):
            np.testing.assert_allclose(c, 2 * a - 3 * b, rtol=1e-5, err_msg=name)
            assert np.isin(a, MATRIX).all() or not row.lays_out
        if row.keeps_order and name != "squeeze":
            np.testing.assert_array_equal(np.ravel(found[0]), np.ravel(MATRIX))


def test_what_devices_exchange():
    different, equal = jnp.cos(jnp.arange(16.0).reshape(4, 4)), jnp.tile(jnp.cos(jnp.arange(4.0)), (4, 1))
    spread = {name: jax.vmap(f, axis_name="devices") for name, f in EXCHANGES.items()}
    made = jax.jit(lambda: {name: (f(different), f(equal)) for name, f in spread.items()})()
    for name, (of_different, of_equal) in made.items():
        assert are_equal(of_different) is of(name).equalizes, name
        assert are_equal(of_equal) or of(name).tells_devices_apart, name
        assert of(name).equalizes is not of(name).tells_devices_apart, name


def are_equal(x):
    return bool(np.all(np.asarray(x) == np.asarray(x)[0]))


def test_what_is_equal_on_all_devices_and_what_only_on_some():
    groups, places = [[0, 1], [2, 3]], jnp.ones(4, jnp.int32)

    def exchanged(x):
        ragged = lax.ragged_all_to_all(x, x, places, places, places, places, axis_name="devices")
        each = [lax.psum(x, "devices", axis_index_groups=groups), lax.all_gather(x, "devices")]
        return [ragged, *each, lax.ppermute(x, "devices", [(0, 1)])]

    closed = jax.make_jaxpr(exchanged, axis_env=[("devices", 4)])(MATRIX[0])
    assert same_everywhere(closed, [0]) == same_everywhere(closed, []) == {2}


def test_what_is_equal_on_all_devices_is_found_once_for_a_body():
    body = Body(jax.make_jaxpr(lambda x: [x, lax.psum(x, "devices")], axis_env=[("devices", 4)])(MATRIX[0]))
    assert body.same_everywhere(frozenset()) == {1}
    assert body.same_everywhere(frozenset([0])) == {0, 1}
    assert body.same_everywhere(frozenset([0])) is body.same_everywhere(frozenset([0]))


def test_what_runs_others():
    closed = {
        "cond": lambda x: lax.cond(x > 0, jnp.sin, jnp.cos, x),
        "custom_jvp_call": jax.nn.relu,
        "jit": jax.jit(jnp.sin),
        "remat2": jax.checkpoint(jnp.sin),
        "scan": lambda x: lax.scan(lambda c, _: (c * x, None), x, length=2)[0],
        "while": lambda x: lax.while_loop(lambda c: c < 9, lambda c: c + x, x),
    }
    for name, function in closed.items():
        equations = jax.make_jaxpr(function)(jnp.float32(1)).jaxpr.eqns
        (equation,) = [e for e in equations if of(e.primitive.name).runs is not None]
        row = of(equation.primitive.name)
        assert equation.primitive.name == name
        assert row.is_loop != row.calls_once
    assert {of(name).runs for name in closed} < set(Runs)
