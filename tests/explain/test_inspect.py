"""Someone's training step as a Program: against JAX's own jaxpr, the step's results, and the maths."""

import contextlib
import warnings
from collections import Counter
from functools import partial
from itertools import pairwise

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import Mesh, PartitionSpec

import onward as ow
from onward.core.errors import ArgumentError, TraceError
from onward.core.lower import lower
from onward.core.words import Kind, Pass
from onward.explain.inspect import inspect

X, Y = (jnp.asarray(np.random.default_rng(0).normal(size=s), jnp.float32) for s in ((4, 3), (4, 2)))
pytestmark = pytest.mark.usefixtures("earlier_objects_frozen")
SIZES = (3, 8, 2)
LAYERS = len(SIZES) - 1


def plain_parameters():
    rng = np.random.default_rng(1)
    return {
        f"layer{i}": {"w": jnp.asarray(rng.normal(size=s) / 3, jnp.float32), "b": jnp.zeros(s[1])}
        for i, s in enumerate(pairwise(SIZES))
    }


def plain_loss(params, x, y):
    for i in range(LAYERS):
        with jax.named_scope(f"layer{i}"):
            x = x @ params[f"layer{i}"]["w"] + params[f"layer{i}"]["b"]
            x = jnp.tanh(x) if i < LAYERS - 1 else x
    return jnp.mean((x - y) ** 2)


def optax_step():
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))

    def step(params, opt_state, x, y):
        loss, grads = jax.value_and_grad(plain_loss)(params, x, y)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    params = plain_parameters()
    return step, (params, optimizer.init(params), X, Y)


def jitted_step():
    step, args = optax_step()
    return jax.jit(step, donate_argnums=(0, 1)), args


def sgd_step():
    def step(batch, params, velocity):
        grads = jax.grad(plain_loss)(params, *batch)
        velocity = jax.tree.map(lambda v, g: 0.9 * v + g, velocity, grads)
        return velocity, jax.tree.map(lambda p, v: p - 0.1 * v, params, velocity)

    params = plain_parameters()
    return step, ((X, Y), params, jax.tree.map(jnp.zeros_like, params))


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        for size in SIZES[1:-1]:
            x = nn.tanh(nn.Dense(size)(x))
        return nn.Dense(SIZES[-1])(x)


def linen_step():
    net = LinenNet()
    variables = net.init(jax.random.key(0), X)
    state = TrainState.create(apply_fn=net.apply, params=variables["params"], tx=optax.adam(1e-2))

    @jax.jit
    def train_step(state, x, y):
        def loss(params):
            return jnp.mean((state.apply_fn({"params": params}, x) - y) ** 2)

        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), {"loss": value}

    return train_step, (state, X, Y)


class NnxNet(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(a, b, rngs=rngs) for a, b in pairwise(SIZES)])

    def __call__(self, x):
        for layer in self.layers[:-1]:
            x = jnp.tanh(layer(x))
        return self.layers[-1](x)


def nnx_step():
    model = NnxNet(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit
    def train_step(model, optimizer, x, y):
        loss, grads = nnx.value_and_grad(lambda model: jnp.mean((model(x) - y) ** 2))(model)
        optimizer.update(model, grads)
        return loss

    return train_step, (model, optimizer, X, Y)


def equinox_step():
    model = eqx.nn.MLP(3, 2, 8, LAYERS - 1, activation=jnp.tanh, key=jax.random.key(0))
    optimizer = optax.adam(1e-2)

    @eqx.filter_value_and_grad
    def loss(model, x, y):
        return jnp.mean((jax.vmap(model)(x) - y) ** 2)

    @eqx.filter_jit
    def make_step(model, opt_state, x, y):
        value, grads = loss(model, x, y)
        updates, opt_state = optimizer.update(grads, opt_state, eqx.filter(model, eqx.is_array))
        return value, eqx.apply_updates(model, updates), opt_state

    return make_step, (model, optimizer.init(eqx.filter(model, eqx.is_array)), X, Y)


def haiku_step():
    def forward(x):
        return hk.nets.MLP(SIZES[1:], activation=jnp.tanh)(x)

    net = hk.without_apply_rng(hk.transform(forward))
    optimizer = optax.sgd(0.1, momentum=0.9)
    params = net.init(jax.random.key(0), X)

    @jax.jit
    def update(params, opt_state, x, y):
        loss, grads = jax.value_and_grad(lambda p: jnp.mean((net.apply(p, x) - y) ** 2))(params)
        updates, opt_state = optimizer.update(grads, opt_state)
        return (optax.apply_updates(params, updates), opt_state), loss

    return update, (params, optimizer.init(params), X, Y)


FOREIGN = {
    "optax": optax_step,
    "jitted": jitted_step,
    "by hand": sgd_step,
    "linen": linen_step,
    "nnx": nnx_step,
    "equinox": equinox_step,
    "haiku": haiku_step,
}


@pytest.fixture(scope="module")
def inspected():
    """Every foreign step with its Program, traced once."""
    made = {name: make() for name, make in FOREIGN.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "step returns the next values of .* the other way around")
        return {name: (step, args, inspect(step, *args)) for name, (step, args) in made.items()}


def flat_function(step, args):
    """A step as a function of arrays alone, by another road than that of inspect, and these arrays."""
    if any(isinstance(a, nnx.Module | nnx.Optimizer) for a in args):
        graph, state = nnx.split(args[:2])

        def pure(leaves):
            modules = nnx.merge(graph, jax.tree.unflatten(jax.tree.structure(state), leaves[:-2]))
            out = step(*modules, *leaves[-2:])
            return [*jax.tree.leaves(out), *jax.tree.leaves(nnx.split(modules)[1])]

        return pure, [*jax.tree.leaves(state), *args[2:]]
    arrays, static = eqx.partition(args, is_number)
    leaves, treedef = jax.tree.flatten(arrays)

    def pure(leaves):
        out = step(*eqx.combine(jax.tree.unflatten(treedef, leaves), static))
        return [x for x in jax.tree.leaves(out) if is_number(x)]

    return pure, leaves


def is_number(x):
    return eqx.is_array(x) or isinstance(x, int)


def equations(jaxpr, marks=""):
    """Every equation with the marks around it, nested jit inlined."""
    for eqn in jaxpr.eqns:
        here = f"{marks}/{eqn.source_info.name_stack}"
        if eqn.primitive.name in ("jit", "pjit", "closed_call"):
            yield from equations(eqn.params["jaxpr"].jaxpr, here)
        else:
            yield eqn.primitive.name, here


def kinds(program, made_by):
    return Counter(op.type for op in program.ops if op.made_by is made_by)


@pytest.mark.parametrize("name", FOREIGN)
def test_the_dots_are_as_many_as_the_maths_says(inspected, name):
    program = inspected[name][2]
    assert kinds(program, Pass.FORWARD)["dot_general"] == LAYERS
    assert kinds(program, Pass.BACKWARD)["dot_general"] == 2 * LAYERS - 1
    assert kinds(program, Pass.UPDATE)["dot_general"] == 0


@pytest.mark.parametrize("name", FOREIGN)
def test_every_equation_is_an_op_in_the_pass_of_its_mark(inspected, name):
    step, args, program = inspected[name]
    pure, leaves = flat_function(step, args)
    found = list(equations(jax.make_jaxpr(pure)(leaves).jaxpr))
    assert len(program.ops) == len(found)
    marked = Counter("backward" if "transpose(" in m else "forward" if "jvp(" in m else "" for _, m in found)
    passes = Counter(str(op.made_by) for op in program.ops)
    assert passes["backward"] == marked["backward"]
    assert passes["forward"] >= marked["forward"] > 0
    assert passes["update"] > 0


@pytest.mark.parametrize("name", FOREIGN)
def test_state_parameters_gradients_and_loss(inspected, name):
    program = inspected[name][2]
    assert len(program.parameters) == 2 * LAYERS
    assert {p for p, _ in program.gradients} == set(program.parameters)
    assert {g.name for _, g in program.gradients} == {f"grad({p.name})" for p in program.parameters}
    assert set(program.next_state) == set(program.state)
    assert all(g.kind is Kind.GRADIENT for _, g in program.gradients)
    assert [v.shape for v in program.inputs] == [X.shape, Y.shape]
    assert program.outputs == (() if name == "by hand" else (program.loss,))


@pytest.mark.parametrize("name", sorted(set(FOREIGN) - {"optax"}))
def test_results_and_operations_are_those_of_the_step(inspected, name):
    step, args, program = inspected[name]
    pure, leaves = flat_function(step, args)
    wanted = [*program.next_state.values(), *program.outputs]
    state = [x for x in leaves if x is not X and x is not Y]
    original = jax.jit(pure).lower(leaves).compile()
    again = jax.jit(lower(program, wanted, at_once=True)).lower(state, [X, Y]).compile()
    assert original.cost_analysis()["flops"] == again.cost_analysis()["flops"] > 0
    results = (original(leaves), again(state, [X, Y]))
    expected, found = (sorted(np.ravel(x).tolist() for x in values) for values in results)
    assert [len(x) for x in found] == [len(x) for x in expected]
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)


def test_it_is_the_forward_pass_that_onward_traces_itself(inspected):
    own = ow.SGD(0.1).minimize(plain_loss, plain_parameters(), X, Y)
    found = inspected["optax"][2]
    own_types = [op.type for op in own.ops if op.made_by is Pass.FORWARD]
    types = [op.type for op in found.ops if op.made_by is Pass.FORWARD]
    rest = iter(types)
    assert all(t in rest for t in own_types), "the same ops in the same order, and what JAX saves besides"
    assert kinds(own, Pass.FORWARD)["dot_general"] == LAYERS


@pytest.mark.parametrize("name", FOREIGN)
def test_scopes_are_what_people_wrote(inspected, name):
    program = inspected[name][2]
    words = {word for op in program.ops for word in op.scope.split("/")}
    assert not any(mark in word for word in words for mark in ("jvp", "transpose", "(", ")"))
    assert not any(word.startswith("_") for word in words), "no function of JAX's own, such as _where"


def test_scopes_and_sources(inspected):
    program = inspected["optax"][2]
    dots = [op for op in program.ops if op.type == "dot_general"]
    assert [op.scope for op in dots[:LAYERS]] == [f"layer{i}" for i in range(LAYERS)]
    assert all(op.source.file == __file__ for op in dots)
    assert {op.source.function for op in dots} == {"plain_loss"}
    linen = [op.scope for op in inspected["linen"][2].ops if op.type == "dot_general"]
    assert linen[:LAYERS] == [f"LinenNet/Dense_{i}" for i in range(LAYERS)]


@pytest.mark.parametrize("name", FOREIGN)
def test_backward_dots_face_the_forward_dots(inspected, name):
    program = inspected[name][2]
    makers = {v: op for op in program.ops for v in op.outputs}
    faced = [makers[op.of] for op in program.ops if op.type == "dot_general" and op.of is not None]
    assert {op.type for op in faced} == {"dot_general"}
    assert sorted(Counter(op.outputs[0].name for op in faced).values()) == [1] + [2] * (LAYERS - 1)


def test_names_come_from_arguments_and_paths(inspected):
    program = inspected["optax"][2]
    assert [v.name for v in program.parameters][:2] == ["params/layer0/b", "params/layer0/w"]
    assert [v.name for v in program.inputs] == ["x", "y"]
    assert "opt_state/1/0/mu/layer0/w" in program.variables
    nnx_names = [v.name for v in inspected["nnx"][2].parameters]
    assert nnx_names[:2] == ["model/layers/0/bias", "model/layers/0/kernel"]


def test_a_step_in_place_compiles_and_trains(inspected):
    step, (model, optimizer, *_), program = inspected["nnx"]
    compiled = ow.compile(program)
    state = compiled.init(nnx.split((model, optimizer))[1])
    mine = nnx.clone((model, optimizer))
    for _ in range(3):
        state, out = compiled(state, X, Y)
        np.testing.assert_allclose(out.loss, step(*mine, X, Y), rtol=1e-6)
    kernels = state["model/layers/0/kernel"], mine[0].layers[0].kernel[...]
    np.testing.assert_allclose(*kernels, rtol=1e-6)


def test_a_step_that_returns_its_state_compiles_and_trains(inspected):
    step, (train_state, *_), program = inspected["linen"]
    compiled = ow.compile(program)
    state = compiled.init(train_state)
    for _ in range(3):
        state, out = compiled(state, X, Y)
        train_state, metrics = step(train_state, X, Y)
        np.testing.assert_allclose(out.loss, metrics["loss"], rtol=1e-6)
    assert out.value == (None, {"loss": out.loss})
    assert int(state.parameters.step) == 3


@pytest.mark.parametrize("name", FOREIGN)
def test_what_takes_a_program_takes_it(inspected, name):
    program = inspected[name][2]
    total = sum(ow.cost(op).flops for op in program.ops)
    assert total > 2 * 4 * (3 * 8 + 8 * 2) * 3 - 2 * 4 * 3 * 8, "the dots alone"
    assert "backward" in str(ow.summary(program))
    assert any(moment.shares["saved for backward"] for moment in ow.memory(program).curve)
    assert ow.prune(program, [g for _, g in program.gradients]).next_state == {}


def test_it_prints(inspected):
    text = str(inspected["haiku"][2])
    assert "4 parameters (50 numbers)" in text
    assert "(the loss)" in text
    assert "each state Variable x takes the value of next(x)" in text


def sgd(params, grads):
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


def test_a_step_without_a_mark_is_all_forward():
    program = inspect(lambda params, x: plain_loss(params, x, Y), plain_parameters(), X)
    assert {op.made_by for op in program.ops} == {Pass.FORWARD}
    assert (program.state, program.next_state, program.gradients) == ((), {}, ())
    counting = inspect(lambda x, n: (jnp.sum(x), n + 1), X, 1)
    assert {op.made_by for op in counting.ops} == {Pass.FORWARD}


def test_remat_is_one_op_of_the_backward_pass():
    def step(params, x):
        loss = jax.checkpoint(lambda params: plain_loss(params, x, Y))
        value, grads = jax.value_and_grad(loss)(params)
        return sgd(params, grads), value

    program = inspect(step, plain_parameters(), X)
    (again,) = [op for op in program.ops if op.type in ("remat2", "checkpoint")]
    assert again.made_by is Pass.BACKWARD
    (inside,) = again.subprograms.values()
    dots = [op for op in inside.ops if op.type == "dot_general"]
    assert len(dots) == LAYERS + 2 * LAYERS - 1, "what is recomputed, then the gradients"
    assert kinds(program, Pass.FORWARD)["dot_general"] == LAYERS
    assert len(program.gradients) == len(program.parameters) == 2 * LAYERS


def test_a_scan_over_layers_is_one_op_forward_and_one_backward():
    def step(w, x):
        def loss(w):
            return jnp.mean(jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, w)[0] ** 2)

        value, grad = jax.value_and_grad(loss)(w)
        return w - grad, value

    program = inspect(step, jnp.ones((5, 3, 3)), X)
    loops = [op for op in program.ops if op.type == "scan"]
    assert [op.made_by for op in loops] == [Pass.FORWARD, Pass.BACKWARD]
    assert loops[1].of is loops[0].outputs[0]
    dots = [Counter(op.type for op in loop.subprograms["jaxpr"].ops)["dot_general"] for loop in loops]
    assert dots == [1, 2]


def test_statistics_that_the_loss_returns_beside_are_state():
    def step(params, stats, x):
        def loss(params):
            mean = jnp.mean(x @ params["w"], 0)
            return jnp.sum((x @ params["w"] - mean) ** 2), {"mean": 0.9 * stats["mean"] + 0.1 * mean}

        (value, stats), grads = jax.value_and_grad(loss, has_aux=True)(params)
        return sgd(params, grads), stats, {"loss": value, "size": jnp.sum(params["w"] ** 2)}

    program = inspect(step, {"w": jnp.ones((3, 2))}, {"mean": jnp.ones(2)}, X)
    assert [v.name for v in program.parameters] == ["params/w"]
    assert [v.name for v in program.state] == ["params/w", "stats/mean"]
    makers = {v: op for op in program.ops for v in op.outputs}
    assert makers[program.next_state[program["stats/mean"]]].made_by is Pass.FORWARD
    assert program.loss is program.outputs[0]
    assert len(program.outputs) == 2


def test_accumulation_in_a_loop_is_backward_as_a_whole():
    def step(params, xs, ys):
        def add(total, batch):
            found = jax.value_and_grad(plain_loss)(params, *batch)
            return jax.tree.map(jnp.add, total, found), None

        zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
        (loss, grads), _ = jax.lax.scan(add, zeros, (xs, ys))
        return sgd(params, grads), loss

    program = inspect(step, plain_parameters(), X[:, None], Y[:, None])
    (loop,) = [op for op in program.ops if op.type == "scan"]
    assert loop.made_by is Pass.BACKWARD
    inside = loop.subprograms["jaxpr"].ops
    dots = Counter(op.made_by for op in inside if op.type == "dot_general")
    assert dots == {Pass.FORWARD: LAYERS, Pass.BACKWARD: 2 * LAYERS - 1}
    assert len(program.parameters) == 2 * LAYERS
    assert {g for _, g in program.gradients} < set(loop.outputs)
    assert program.loss in loop.outputs


def test_a_loop_of_whole_steps_keeps_its_state():
    def steps(params, x):
        def once(_, params):
            return sgd(params, jax.grad(plain_loss)(params, x, Y))

        return jax.lax.fori_loop(0, 3, once, params)

    program = inspect(steps, plain_parameters(), X)
    assert len(program.next_state) == len(program.state) == 2 * LAYERS
    assert program.outputs == program.gradients == ()


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 2, 0), (2, 1, 0)])
def test_state_of_one_shape_is_told_apart_in_any_order(order):
    def step(*given, back=order):
        w, first, second = (given[order.index(i)] for i in range(3))
        grad = jax.grad(lambda w: jnp.sum(jnp.sin(w * given[3])))(w)
        first = 0.9 * first + 0.1 * grad
        second = 0.99 * second + 0.01 * grad**2
        results = (w - first / (jnp.sqrt(second) + 1e-8), first, second)
        return tuple(results[i] for i in back)

    args = [(jnp.ones(3), jnp.full(3, 2.0), jnp.full(3, 3.0))[i] for i in order]
    program = inspect(step, *args, jnp.ones(3))
    wanted = [program.next_state[program[f"given/{i}"]] for i in range(3)]
    found = lower(program, wanted)(args, [jnp.ones(3)])
    np.testing.assert_allclose(found, step(*args, jnp.ones(3)), rtol=1e-6)
    assert [p.name for p in program.parameters] == [f"given/{order.index(0)}"]
    with pytest.raises(ArgumentError, match=r"Nothing shows which of the two it is the next value of\."):
        inspect(partial(step, back=(order[2], *order[:2])), *args, jnp.ones(3))


def test_devices():
    mesh = Mesh(np.array(jax.devices()[:4]), ("batch",))
    split, whole = PartitionSpec("batch"), PartitionSpec()

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=(whole, split, split), out_specs=whole)
    def step(params, x, y):
        loss, grads = jax.value_and_grad(plain_loss)(jax.lax.pcast(params, "batch", to="varying"), x, y)
        loss, grads = jax.lax.pmean((loss, grads), "batch")
        return sgd(params, grads), loss

    params = plain_parameters()
    program = inspect(step, params, X, Y)
    assert (program.replicas.count, program.replicas.name) == (4, "batch")
    assert program["x"].shape == (1, 3)
    collective = kinds(program, Pass.COLLECTIVE)
    assert sum(collective.values()) == 2 * LAYERS + 1
    assert len(program.gradients) == 2 * LAYERS
    compiled = ow.compile(program)
    state, out = compiled(compiled.init(params), X, Y)
    new, loss = step(params, X, Y)
    np.testing.assert_allclose(out.loss, loss, rtol=1e-6)
    assert jax.tree.all(jax.tree.map(partial(np.allclose, rtol=1e-6), state.parameters, new))


def test_pmap_is_what_each_device_does():
    @partial(jax.pmap, axis_name="batch", devices=jax.devices()[:4])
    def step(params, x, y):
        loss, grads = jax.value_and_grad(plain_loss)(params, x, y)
        return sgd(params, jax.lax.pmean(grads, "batch")), jax.lax.pmean(loss, "batch")

    params = plain_parameters()
    copies = jax.tree.map(lambda a: jnp.stack([a] * 4), params)
    program = inspect(step, copies, X[:, None], Y[:, None])
    assert program.replicas.count == 4
    assert program["x"].shape == (1, 3)
    assert program["params/layer0/w"].shape == (3, 8)
    assert "squeeze" not in {op.type for op in program.ops}
    assert len(program.gradients) == 2 * LAYERS
    compiled = ow.compile(program)
    state, out = compiled(compiled.init(params), X[:, None], Y[:, None])
    new, loss = step(copies, X[:, None], Y[:, None])
    np.testing.assert_allclose(out.loss, loss[0], rtol=1e-6)
    first = jax.tree.map(lambda a: a[0], new)
    assert jax.tree.all(jax.tree.map(partial(np.allclose, rtol=1e-6), state.parameters, first))


def test_devices_that_may_drift_apart_are_one_op():
    mesh = Mesh(np.array(jax.devices()[:2]), ("batch",))
    split, whole = PartitionSpec("batch"), PartitionSpec()

    @partial(jax.shard_map, mesh=mesh, in_specs=(whole, split, split), out_specs=whole, check_vma=False)
    def step(params, x, y):
        return sgd(params, jax.grad(plain_loss)(params, x, y))

    with pytest.warns(UserWarning, match=r"may drift apart.* differs from device to device.*pmean"):
        program = inspect(step, plain_parameters(), X, Y)
    assert [(op.type, op.made_by) for op in program.ops] == [("shard_map", Pass.UPDATE)]
    assert program.replicas is None
    assert len(program.parameters) == 2 * LAYERS


class Normalized(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(3, 2, rngs=rngs)
        self.norm = nnx.BatchNorm(2, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.norm(self.linear(x)))


def test_modules_with_statistics_random_numbers_and_metrics():
    model = Normalized(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"))

    def step(model, optimizer, metrics, batch):
        loss, grads = nnx.value_and_grad(lambda m: jnp.mean((m(batch["x"]) - batch["y"]) ** 2))(model)
        metrics.update(loss=loss)
        optimizer.update(model, grads)

    program = inspect(step, model, optimizer, metrics, {"x": X, "y": Y})
    assert [v.name for v in program.inputs] == ["batch/x", "batch/y"]
    trained = ["model/linear/bias", "model/linear/kernel", "model/norm/bias", "model/norm/scale"]
    assert [p.name for p in program.parameters] == trained
    replaced = {v.name for v in program.next_state} - set(trained)
    assert {"model/norm/mean", "model/norm/var", "model/dropout/rngs/count", "metrics/loss/total"} < replaced
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(nnx.state(model))), "nothing was run"


def test_what_is_made_of_data_is_no_state():
    def step(params, x):
        loss, grads = jax.value_and_grad(lambda p: jnp.mean((x @ p - x) ** 2))(params)
        return sgd(params, grads), loss, x @ params

    program = inspect(step, jnp.ones((3, 3)), X)
    assert [v.name for v in program.inputs] == ["x"]
    assert [v.shape for v in program.outputs] == [(), X.shape]


def autoencoder(returned, taken=lambda data: data):
    """A step that returns what it makes of its reconstruction ``r``, beside parameters and loss ``l``."""

    def step(params, data):
        x = taken(data)

        def loss(params):
            r = jnp.tanh(x @ params)
            return jnp.mean((r - x) ** 2), r

        (value, r), grads = jax.value_and_grad(loss, has_aux=True)(params)
        return (sgd(params, grads), *returned(value, r))

    return step


def image(data):
    return data["image"]


@pytest.mark.parametrize(
    ("step", "data"),
    [
        (autoencoder(lambda value, r: (r, value)), X),
        (autoencoder(lambda value, r: (r,)), X),
        (autoencoder(lambda value, r: ({"loss": value, "r": r},), image), {"image": X}),
        (autoencoder(lambda value, r: ({"image": r}, value), image), {"image": X}),
        (autoencoder(lambda value, r: (value, {"image": r}), image), {"image": X}),
    ],
)
def test_a_result_built_as_the_batch_is_asked_about(step, data):
    name = "data" if data is X else "data/image"
    params = jnp.ones((3, 3))
    with contextlib.suppress(ArgumentError):
        assert [v.name for v in inspect(step, params, data).inputs] == [name], "nothing is taken in silence"
    result = inspect(step, params, data, carried=["params"])
    assert [v.name for v in result.inputs] == [name]
    assert X.shape in [v.shape for v in result.outputs]


def test_a_result_in_the_place_of_the_batch_is_asked_about_in_words():
    step = autoencoder(lambda value, r: (r, value))
    with pytest.raises(
        ArgumentError, match=r"carried=\['params', 'data'\] if it is the next value, carried="
    ):
        inspect(step, jnp.ones((3, 3)), X)
    program = inspect(step, jnp.ones((3, 3)), X, carried=["params", "data"])
    assert program.inputs == ()
    with pytest.raises(ArgumentError, match="The nearest names are 'params'"):
        inspect(step, jnp.ones((3, 3)), X, carried="parms")


def recurrent(size):
    """A step over a hidden state of this length, and its arguments."""

    def step(w, hidden, x):
        def loss(w):
            following = jnp.tanh(hidden @ w + jnp.mean(x))
            return jnp.mean(following**2), following

        (value, following), grads = jax.value_and_grad(loss, has_aux=True)(w)
        return w - 0.1 * grads, following, value

    return step, (jnp.ones((3, 3)), jnp.ones((size, 3)), X)


def test_a_hidden_state_is_asked_about_only_if_it_may_be_a_batch():
    step, args = recurrent(len(X))
    with pytest.raises(ArgumentError, match="as the hidden state of a recurrent network is"):
        inspect(step, *args)
    assert [v.name for v in inspect(step, *args, carried=("w", "hidden")).state] == ["w", "hidden"]
    step, args = recurrent(len(X) + 1)
    assert [v.name for v in inspect(step, *args).state] == ["w", "hidden"]


def moving(w, mean, x):
    """A step that carries on a running mean of its loss."""
    loss, g = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
    return w - 0.1 * g, 0.9 * mean + 0.1 * loss, loss


def scaled(w, scale, x):
    """A step that carries on the largest number that it saw."""
    loss, g = jax.value_and_grad(lambda w: jnp.mean((x / scale @ w) ** 2))(w)
    return w - 0.1 * g, jnp.maximum(0.99 * scale, jnp.max(jnp.abs(x))), loss


def flooded(w, level, x):
    """A step that adds a number to its loss, and returns it in that number's place."""
    loss, g = jax.value_and_grad(lambda w: jnp.abs(jnp.mean((x @ w) ** 2) - level) + level)(w)
    return w - 0.1 * g, loss


@pytest.mark.parametrize("step", [moving, scaled, flooded])
@pytest.mark.parametrize("look", [inspect, ow.adopt])
def test_a_number_to_which_the_batch_adds_is_asked_about(look, step):
    args, name = (jnp.ones(3), jnp.ones(()), X), step.__code__.co_varnames[1]
    with pytest.raises(ArgumentError, match=rf"carried=\['w', '{name}'\] if it is the next value"):
        look(step, *args)
    assert [v.name for v in look(step, *args, carried=["w", name]).state] == ["w", name]
    assert [v.name for v in look(step, *args, carried=["w"]).state] == ["w"]
    for ours, theirs in zip(ow.adopt(step)(*args), step(*args), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)


def test_what_does_not_come_back_is_not_carried():
    step, args = recurrent(len(X) + 1)
    with pytest.raises(ArgumentError, match="returns nothing that is built as 'x'"):
        inspect(step, *args, carried=("w", "x"))


def test_a_key_is_carried_though_nothing_draws_with_what_was_split_off():
    def step(w, key, x):
        key, _ = jax.random.split(key)
        grads = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)
        return w - grads, key

    program = inspect(step, jnp.ones(3), jax.random.key(0), X)
    assert [v.name for v in program.state] == ["w", "key"]


def test_an_update_of_all_gradients_end_to_end():
    optimizer = optax.flatten(optax.adam(1e-2))

    def step(params, opt_state, x):
        grads = jax.grad(plain_loss)(params, x, Y)
        updates, opt_state = optimizer.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state

    params = plain_parameters()
    program = inspect(step, params, optimizer.init(params), X)
    assert len(program.parameters) == 2 * LAYERS
    assert program.gradients == ()


def test_ops_that_only_state_and_results_depend_on():
    def step(params, count, x):
        loss, grads = jax.value_and_grad(plain_loss)(params, x, Y)
        scale = 0.5 ** (count + 1).astype(jnp.float32)
        accuracy = jnp.mean(plain_loss(params, x, Y) < 1.0)
        return jax.tree.map(lambda p, g: p - scale * g, params, grads), count + 1, loss, accuracy

    program = inspect(step, plain_parameters(), jnp.int32(0), X)
    makers = {v: op for op in program.ops for v in op.outputs}
    assert makers[program.next_state[program["count"]]].made_by is Pass.UPDATE
    assert {op.type: op.made_by for op in program.ops}["pow"] is Pass.UPDATE
    assert [makers[v].made_by for v in program.outputs] == [Pass.FORWARD] * 2
    assert kinds(program, Pass.FORWARD)["dot_general"] == 2 * LAYERS


ONES, NUMBER = jnp.ones(3), np.float32(0.1)


def bent_loss(w, x):
    return jnp.sum(jnp.sin(w * x))


def log_norm(w, x, rate):
    loss, grad = jax.value_and_grad(bent_loss)(w, x)
    update = -rate * grad
    return w + update, loss, jnp.linalg.norm(update)


def log_clipped_norm(w, x, most):
    loss, grad = jax.value_and_grad(bent_loss)(w, x)
    grad = grad * jnp.minimum(1, most / jnp.linalg.norm(grad))
    return w - 0.1 * grad, {"loss": loss, "norm": jnp.linalg.norm(grad)}


def log_clip_factor(w, x, most):
    loss, grad = jax.value_and_grad(bent_loss)(w, x)
    factor = jnp.minimum(1, most / jnp.linalg.norm(grad))
    return w - 0.1 * factor * grad, factor, loss


def log_decayed_norm(w, x, decay):
    loss, grad = jax.value_and_grad(bent_loss)(w, x)
    grad = grad + decay * w
    return w - 0.1 * grad, loss, jnp.linalg.norm(grad)


def log_two_norms(w, x, rate):
    loss, grad = jax.value_and_grad(bent_loss)(w, x)
    update = -rate * grad
    return w + update, (loss, jnp.linalg.norm(update)), (jnp.max(update), jnp.linalg.norm(rate * w))


def log_rate(w, x, rate):
    loss, grad = jax.value_and_grad(bent_loss)(w, x)
    now = 0.5 * rate
    return {"loss": loss, "rate": now}, w - now * grad


def log_penalized_loss(w, x, strength):
    loss, grad = jax.value_and_grad(lambda w: bent_loss(w, x) + strength * jnp.sum(w**2))(w)
    return w - 0.1 * grad, loss


def log_unscaled_loss(w, x, scale):
    loss, grad = jax.value_and_grad(lambda w: scale * bent_loss(w, x))(w)
    return w - 0.1 * grad / scale, loss / scale


PLACES = {
    "last": (lambda step, w, x, number: step(w, x, number), NUMBER),
    "dict": (lambda step, w, x, hyper: step(w, x, hyper["rate"]), {"rate": NUMBER}),
    "pair": (lambda step, w, x, hyper: step(w, x, hyper[0] * hyper[1]), (NUMBER, NUMBER)),
}
LOGGING = (
    *(log_norm, log_clipped_norm, log_clip_factor, log_decayed_norm, log_two_norms, log_rate),
    *(log_penalized_loss, log_unscaled_loss),
)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("step", LOGGING)
def test_a_hyperparameter_is_data_whatever_is_logged(step, place):
    call, number = PLACES[place]
    for program in (
        inspect(partial(call, step), ONES, ONES, number),
        inspect(lambda w, n, x: call(step, w, x, n), ONES, number, ONES),
    ):
        assert [p.name for p in program.state] == ["w"] == [v.name for v in program.next_state]
        assert len(program.inputs) == 1 + len(jax.tree.leaves(number))
    results = jax.tree.leaves(call(step, ONES, ONES, number))
    (new,) = [r for r in results if r.shape == (3,)]
    given = [ONES], [*jax.tree.leaves(number), ONES]
    np.testing.assert_allclose(lower(program, [*program.next_state.values()])(*given)[0], new, rtol=1e-6)
    logged = lower(program, program.outputs)(*given)
    np.testing.assert_allclose(logged, [r for r in results if r is not new], rtol=1e-6)


def test_a_hyperparameter_of_numbers_alone():
    def step(w, b, x, rate):
        loss, (dw, db) = jax.value_and_grad(lambda w, b: jnp.sum((w * x + b) ** 2), argnums=(0, 1))(w, b)
        return w - rate * dw, b - rate * db, loss, rate * dw

    program = inspect(step, NUMBER, NUMBER, ONES, NUMBER)
    assert [(p.name, g.name) for p, g in program.gradients] == [("w", "grad(w)"), ("b", "grad(b)")]
    assert [v.name for v in program.inputs] == ["x", "rate"]


def test_numbers_alone():
    def step(w, x, y, rate):
        loss, grad = jax.value_and_grad(lambda w: (w * x - y) ** 2)(w)
        update = -rate * grad
        return w + update, loss, update

    program = inspect(step, NUMBER, NUMBER, NUMBER, NUMBER)
    assert ([v.name for v in program.state], len(program.outputs)) == (["w"], 2)


def test_rates_of_layers_are_no_norms():
    def step(w, rates, x):
        loss, grad = jax.value_and_grad(bent_loss)(w, x)
        update = -rates * grad
        return w + update, jnp.stack([jnp.linalg.norm(update[:i]) for i in (1, 2, 3)]), loss

    assert [v.name for v in inspect(step, ONES, ONES, ONES).state] == ["w"]


def count(w, number, x):
    return w - jax.grad(bent_loss)(w, x), number + 1


def count_and_log(w, number, x):
    now = number + 1
    return {"now": now}, w - jax.grad(bent_loss)(w, x) / now, now


def rate_decays(w, number, x):
    return 0.9 * number, w - number * jax.grad(bent_loss)(w, x)


def loss_scale(w, number, x):
    loss, grad = jax.value_and_grad(lambda w: number * bent_loss(w, x))(w)
    fine = jnp.all(jnp.isfinite(grad))
    return jnp.where(fine, w - grad / number, w), loss / number, number * jnp.where(fine, 2.0, 0.5)


def loss_scale_by_loss(w, number, x):
    loss, grad = jax.value_and_grad(lambda w: number * bent_loss(w, x))(w)
    chosen = jnp.where(jnp.isfinite(loss), number * 2, number / 2)
    return {"loss": loss / number, "scale": chosen}, (w - grad / number, chosen)


def running_norm(w, number, x):
    grad = jax.grad(bent_loss)(w, x)
    return {"w": w - grad, "norm": 0.9 * number + 0.1 * jnp.linalg.norm(grad)}


@pytest.mark.parametrize(
    "step", [count, count_and_log, rate_decays, loss_scale, loss_scale_by_loss, running_norm]
)
def test_a_number_that_is_counted_on_is_state(step):
    program = inspect(step, ONES, NUMBER, ONES)
    assert [v.name for v in program.state] == ["w", "number"]
    wanted = [program.next_state[v] for v in program.state]
    found = lower(program, wanted)([ONES, NUMBER], [ONES])
    results = jax.tree.leaves(step(ONES, NUMBER, ONES))
    for new in found:
        assert any(r.shape == new.shape and np.allclose(r, new, rtol=1e-6) for r in results)
    assert [v.shape for v in wanted] == [(3,), ()]


@pytest.mark.parametrize("optimizer", [optax.adamw(0.1), optax.sgd(0.1), optax.lion(0.1)])
def test_updates_that_are_returned_before_the_parameters(optimizer):
    def step(params, opt_state, x):
        grads = jax.grad(lambda p: bent_loss(p["w"], x) + p["b"] ** 2)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return updates, opt_state, optax.apply_updates(params, updates)

    params = {"w": ONES, "b": NUMBER}
    program = inspect(step, params, optimizer.init(params), ONES)
    assert [p.name for p in program.parameters] == ["params/b", "params/w"]
    assert (len(program.outputs), len(program.inputs)) == (2, 1)
    given = jax.tree.leaves((params, optimizer.init(params)))
    found = lower(program, [program.next_state[p] for p in program.parameters])(given, [ONES])
    expected = jax.tree.leaves(step(params, optimizer.init(params), ONES)[2])
    assert all(np.allclose(a, b, rtol=1e-5) for a, b in zip(found, expected, strict=True))


def test_an_update_with_decay_that_is_returned_before_the_weights():
    def step(w, x):
        loss, grad = jax.value_and_grad(bent_loss)(w, x)
        update = -0.1 * (grad + 0.01 * w)
        return loss, update, w + update

    compiled = ow.compile(inspect(step, ONES, ONES))
    state, out = compiled(compiled.init(ONES), ONES)
    np.testing.assert_allclose(state.parameters, step(ONES, ONES)[2], rtol=1e-6)
    np.testing.assert_allclose(out.value[1], step(ONES, ONES)[1], rtol=1e-6)


def test_a_moving_average_of_the_weights():
    def step(average, w, x):
        loss, grad = jax.value_and_grad(lambda w: jnp.sum((w - average) ** 2 * x))(w)
        w = w - 0.1 * grad
        return loss, w, 0.9 * average + 0.1 * w

    with pytest.warns(UserWarning, match="'average' and 'w', which are built alike, the other way around"):
        program = inspect(step, 2 * ONES, ONES, ONES)
    assert [(p.name, g.name) for p, g in program.gradients] == [("w", "grad(w)")]
    assert [p.name for p in program.parameters] == ["w"], "the average is read, but not trained"
    found = lower(program, [program.next_state[v] for v in program.state])([2 * ONES, ONES], [ONES])
    np.testing.assert_allclose(found, step(2 * ONES, ONES, ONES)[:0:-1], rtol=1e-6)


@pytest.mark.parametrize("copied", [False, True])
def test_master_weights_and_copies_of_low_precision(copied):
    def loss(h, x):
        return jnp.sum((h * x.astype(jnp.bfloat16)).astype(jnp.float32))

    def step(weights, x):
        master, low = weights
        low = low if copied else master.astype(jnp.bfloat16)
        value, grad = jax.value_and_grad(loss)(low, x)
        master = master - 0.1 * grad.astype(jnp.float32)
        return (master, master.astype(jnp.bfloat16)), value

    program = inspect(step, (ONES, ONES.astype(jnp.bfloat16)), ONES)
    assert [p.name for p in program.parameters] == [f"weights/{int(copied)}"], "what the forward pass reads"
    assert len(program.next_state) == 2
    assert all(p.dtype == g.dtype for p, g in program.gradients)


def test_weights_of_which_some_are_rounded():
    def step(w, x):
        rounded = {"a": w["a"].astype(jnp.bfloat16), "b": w["b"]}
        grad = jax.grad(lambda w: jnp.sum(w["a"] * w["b"] * x))(rounded)
        return jax.tree.map(lambda w, g: w - 0.1 * g.astype(jnp.float32), w, grad)

    program = inspect(step, {"a": ONES, "b": ONES}, ONES)
    assert [p.name for p in program.parameters] == ["w/a", "w/b"]


def test_numbers_strings_and_functions():
    @partial(jax.jit, static_argnames=("mode", "repeats", "activation"))
    def step(w, x, rate, mode, *, repeats, activation):
        assert mode == "train"
        grad = jax.grad(lambda w: sum(jnp.sum(activation(w * x)) for _ in range(repeats)))(w)
        return w - rate * grad

    program = inspect(step, jnp.ones(3), jnp.ones(3), 0.1, "train", repeats=2, activation=jnp.sin)
    assert [v.name for v in program.inputs] == ["x", "rate"]
    assert [op.type for op in program.ops].count("sin") == 2
    (found,) = lower(program, [*program.next_state.values()])([jnp.ones(3)], [jnp.ones(3), 0.1])
    expected = step(jnp.ones(3), jnp.ones(3), 0.1, "train", repeats=2, activation=jnp.sin)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_shapes_are_enough():
    step, args = optax_step()
    types = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
    assert str(inspect(step, *types)) == str(inspect(step, *args))


def test_gradients_alone_are_results_and_it_says_so():
    with pytest.warns(UserWarning, match="plain_loss returns nothing that replaces one of its arguments"):
        program = inspect(jax.value_and_grad(plain_loss), plain_parameters(), X, Y)
    assert program.state == ()
    assert len(program.outputs) == 1 + 2 * LAYERS


def test_a_step_that_looks_at_a_number_is_told_where():
    def step(w, x):
        loss, grad = jax.value_and_grad(lambda w: jnp.sum(w * x))(w)
        print(float(loss))
        return w - grad, loss

    line = step.__code__.co_firstlineno + 2
    with pytest.raises(TraceError, match=rf"step cannot be traced. At .*test_inspect.py:{line} in step"):
        inspect(step, jnp.ones(3), jnp.ones(3))


def test_a_step_that_stores_an_array_elsewhere_is_told():
    seen = []

    def step(w):
        seen.append(w)
        return w - jax.grad(lambda w: jnp.sum(w**2))(w)

    with pytest.raises(TraceError, match=r"step is not pure .* keeps a traced array"):
        inspect(step, jnp.ones(3))


def test_a_branch_on_an_array_is_told_what_to_write():
    def step(w):
        return w if w.sum() > 0 else -w

    with pytest.raises(TraceError, match=r"jnp\.where"):
        inspect(step, jnp.ones(3))


@pytest.mark.parametrize(
    ("step", "args", "words"),
    [
        (3, (), "inspect was given 3 in place of a function"),
        (
            plain_loss,
            (1,),
            r"plain_loss\(params, x, y\) cannot be called .* missing a required argument: 'x'",
        ),
        (plain_loss, (1, 2, 3, 4), "too many positional arguments"),
    ],
)
def test_bad_input(step, args, words):
    with pytest.raises(ArgumentError, match=words):
        inspect(step, *args)


@pytest.mark.parametrize("act", [jax.nn.relu, jax.nn.softplus, jnp.tanh])
def test_a_loop_of_gradients_may_call_functions_with_rules_of_their_own(act):
    def step(params, xs):
        def body(total, x):
            value, gradient = jax.value_and_grad(lambda p: jnp.mean(act(x @ p["w"]) ** 2))(params)
            return jax.tree.map(jnp.add, total, gradient), value

        gradients, values = jax.lax.scan(body, jax.tree.map(jnp.zeros_like, params), xs)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), values.mean()

    program = ow.inspect(step, {"w": jnp.ones((4, 4))}, jnp.ones((3, 2, 4)))
    assert [p.name for p in program.parameters] == ["params/w"]


@pytest.mark.parametrize("order", ["before", "behind"])
@pytest.mark.parametrize(
    "together", [lambda a, b: a + b, lambda a, b: a - b, lambda a, b: a + 0.5 * b], ids=["+", "-", "+0.5"]
)
def test_the_loss_is_what_its_terms_make(together, order):
    def loss(params, x):
        h = x @ params["w"]
        terms = jnp.mean(h**2), jnp.mean(jnp.abs(h))
        return together(*terms), terms

    def step(params, x):
        (value, terms), gradients = jax.value_and_grad(loss, has_aux=True)(params, x)
        following = jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)
        return following, (value, terms) if order == "before" else (terms, value)

    program = ow.inspect(step, {"w": jnp.eye(4)}, jnp.ones((4, 4)))
    place = 0 if order == "before" else 2
    assert program.loss is program.outputs[place]
