"""Steps that loop over steps, epochs or micro-batches, and steps spread over devices, opened."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import jax_utils, nnx
from flax.training.train_state import TrainState
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from tests.explain.adopted_programs import KEY, X, Y, layers, mlp

import onward as ow
from onward.core.words import Kind, Pass

pytestmark = pytest.mark.usefixtures("earlier_objects_frozen")
ADAM = optax.adam(1e-2)
NAMES = ["0/b", "0/w", "1/b", "1/w"]
WHOLE, ROWS = PartitionSpec(), PartitionSpec("data")


def mse(params, x, y):
    return jnp.mean((mlp(params, x) - y) ** 2)


def start():
    params = layers(4, 8, 1)
    return params, ADAM.init(params)


def update(params, opt_state, gradients):
    updates, opt_state = ADAM.update(gradients, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


def once(carry, batch):
    loss, gradients = jax.value_and_grad(mse)(carry[0], *batch)
    return update(*carry, gradients), loss


def batches(x, y):
    return x.reshape(4, 4, -1), y.reshape(4, 4, -1)


def over_steps(params, opt_state, x, y):
    (params, opt_state), losses = jax.lax.scan(once, (params, opt_state), batches(x, y))
    return params, opt_state, losses.mean()


def over_epochs(params, opt_state, keys, x, y):
    def epoch(carry, key):
        shuffled = jax.random.permutation(key, x.shape[0])
        carry, losses = jax.lax.scan(once, carry, batches(x[shuffled], y[shuffled]))
        return carry, losses.mean()

    (params, opt_state), losses = jax.lax.scan(epoch, (params, opt_state), keys)
    return params, opt_state, losses.mean()


def without_losses(params, opt_state, x, y):
    def body(carry, batch):
        return update(*carry, jax.grad(mse)(carry[0], *batch)), None

    return jax.lax.scan(body, (params, opt_state), batches(x, y))[0]


def counted(params, opt_state, x, y):
    def body(i, carry):
        params, opt_state, _ = carry
        rows = [jax.lax.dynamic_slice_in_dim(a, 4 * i, 4) for a in (x, y)]
        (params, opt_state), loss = once((params, opt_state), rows)
        return params, opt_state, loss

    return jax.lax.fori_loop(0, 4, body, (params, opt_state, 0.0))


def as_often_as_told(params, opt_state, count, x, y):
    def body(_, carry):
        return once(carry, (x, y))[0]

    return jax.lax.fori_loop(0, count, body, (params, opt_state))


def added_up(params, opt_state, x, y):
    def add(total, batch):
        return jax.tree.map(jnp.add, total, jax.value_and_grad(mse)(params, *batch)), None

    zeros = 0.0, jax.tree.map(jnp.zeros_like, params)
    (loss, gradients), _ = jax.lax.scan(add, zeros, batches(x, y))
    gradients = jax.tree.map(lambda g: g / 4, gradients)
    return *update(params, opt_state, gradients), loss / 4


def stacked(params, opt_state, x, y):
    losses, gradients = jax.lax.map(lambda batch: jax.value_and_grad(mse)(params, *batch), batches(x, y))
    gradients = jax.tree.map(lambda g: g.mean(0), gradients)
    return *update(params, opt_state, gradients), losses.mean()


LOOPS = {
    "steps": (over_steps, (X, Y)),
    "epochs": (over_epochs, (jax.random.split(KEY, 3), X, Y)),
    "no losses": (without_losses, (X, Y)),
    "counted": (counted, (X, Y)),
    "as told": (as_often_as_told, (jnp.int32(3), X, Y)),
    "added up": (added_up, (X, Y)),
    "stacked": (stacked, (X, Y)),
}
RETURN_A_LOSS = sorted(set(LOOPS) - {"no losses", "as told"})


@pytest.fixture(scope="module")
def inspected():
    return {name: ow.inspect(step, *start(), *data) for name, (step, data) in LOOPS.items()}


def innermost(program):
    """The Program of the turn in which gradients are computed; None if there is none."""
    parts = (part for op in program.ops for part in op.subprograms.values())
    within = next(filter(None, map(innermost, parts)), None)
    return within or (program if program.gradients else None)


@pytest.mark.parametrize("name", LOOPS)
def test_roles_within_a_loop(inspected, name):
    program = inspected[name]
    assert [p.name for p in program.parameters] == [f"params/{n}" for n in NAMES]
    turn = innermost(program)
    assert sorted(p.name for p in turn.parameters) == [f"params/{n}" for n in NAMES]
    assert {(p.name, g.name) for p, g in turn.gradients} == {
        (f"params/{n}", f"grad(params/{n})") for n in NAMES
    }
    assert turn.loss is not None
    dots = [op.made_by for op in turn.ops if op.type == "dot_general"]
    assert (dots.count(Pass.FORWARD), dots.count(Pass.BACKWARD)) == (2, 3)
    assert [v.name for v in program.inputs] == [
        n for n in ("keys", "count", "x", "y") if n in program.variables
    ]


@pytest.mark.parametrize("name", sorted(set(LOOPS) - {"added up", "stacked"}))
def test_a_loop_that_trains_updates(inspected, name):
    program = inspected[name]
    (loop,) = (op for op in program.ops if op.subprograms)
    assert loop.made_by is Pass.UPDATE
    assert set(program.next_state) == set(program.state)
    turn = innermost(program)
    assert {v.name for v in turn.next_state} >= {v.name for v in program.state}
    assert {op.made_by for op in turn.ops} == {Pass.FORWARD, Pass.BACKWARD, Pass.UPDATE}


@pytest.mark.parametrize("name", ["added up", "stacked"])
def test_a_loop_that_adds_up_gradients_is_backward(inspected, name):
    program = inspected[name]
    (loop,) = (op for op in program.ops if op.subprograms)
    assert loop.made_by is Pass.BACKWARD
    assert [(p.name, g.name) for p, g in program.gradients] == [
        (f"params/{n}", f"grad(params/{n})") for n in NAMES
    ]
    assert not [v for v in innermost(program).next_state if v.kind is Kind.PARAMETER]


@pytest.mark.parametrize("name", RETURN_A_LOSS)
def test_the_loss_is_what_is_made_of_those_of_all_turns(inspected, name):
    program = inspected[name]
    assert program.loss is not None
    assert program.outputs == (program.loss,)


@pytest.mark.parametrize("name", LOOPS)
def test_an_opened_loop_trains_as_the_step_does(inspected, name):
    step, data = LOOPS[name]
    compiled = ow.compile(inspected[name])
    state, out = compiled(compiled.init(start()), *data)
    expected = jax.jit(step)(*start(), *data)
    for a, b in zip(jax.tree.leaves(state.parameters), jax.tree.leaves(expected[:2]), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)
    if name in RETURN_A_LOSS:
        np.testing.assert_allclose(out.loss, expected[2], rtol=1e-5)


def test_the_listing_shows_a_turn_below_its_loop(inspected):
    lines = str(inspected["epochs"]).splitlines()
    margins = [line.split("│")[0].rstrip() for line in lines]
    assert [m for m in margins if m.startswith("    ")] == ["    forward", "    backward", "    update"]
    assert any("grad(params/0/w) = " in line for line in lines)


@pytest.mark.parametrize("name", ["steps", "epochs", "added up"])
def test_a_summary_counts_what_turns_do_as_often_as_they_run(inspected, name):
    program = inspected[name]
    found = ow.summary(program)
    assert found.total.flops == ow.cost(program).flops
    rows = {(row.scope, row.made_by): row for row in found.rows}
    turns = 12 if name == "epochs" else 4
    product = turns * 2 * 4 * (4 * 8 + 8)
    assert product <= rows["mlp", Pass.FORWARD].flops < 2 * product
    assert rows["mlp", Pass.FORWARD].parameters == found.total.parameters == 4 * 8 + 8 + 8 + 1
    assert found.notes[-1].startswith("What a loop over steps")
    assert found.total.live == ow.memory(program, tune=False).peak


def test_a_summary_of_accumulated_gradients_has_the_rows_of_its_scopes():
    whole = ow.Adam(1e-2).minimize(mse, layers(4, 8, 1), X, Y)
    parts = ow.summary(ow.accumulate(whole, 4))
    rows = {(row.scope, row.made_by): row for row in parts.rows}
    for row in ow.summary(whole).rows:
        if row.scope == "mlp" and row.made_by is not Pass.UPDATE:
            again = rows[row.scope, row.made_by]
            assert (again.ops, again.parameters) == (row.ops, row.parameters)
            assert again.flops == pytest.approx(row.flops, rel=0.02)
            assert again.saved * 4 == row.saved
    assert rows["mlp", Pass.UPDATE].ops == 4, "an update stands where its parameter is read"


def test_a_fault_in_a_turn_is_of_the_pass_that_it_stands_in(inspected):
    params, opt_state = start()
    bad = jax.tree.map(lambda a: a + 1e30, params), opt_state
    found = ow.find_nonfinite(inspected["steps"], jax.tree.leaves(bad), (X, Y))
    assert (found.made_by, found.type) == (Pass.BACKWARD, "dot_general")
    assert "learning rate" not in str(found)


def test_ppo():
    """Steps of an environment, advantages, epochs and mini-batches, in loops within a loop."""
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-3))
    params = {"policy": layers(4, 8, 3), "value": layers(4, 8, 1)}

    def train(train_state, env, key):
        def act(carry, _):
            env, key = carry
            key, mine = jax.random.split(key)
            logits = mlp(train_state[0]["policy"], env)
            action = jax.random.categorical(mine, logits)
            value = mlp(train_state[0]["value"], env)[:, 0]
            moved = jnp.tanh(env + 0.1 * (action[:, None] - 1))
            return (moved, key), (env, action, value, -jnp.abs(moved).sum(1))

        (env, key), (seen, action, value, reward) = jax.lax.scan(act, (env, key), None, 4)
        returns = jnp.cumsum(reward[::-1], 0)[::-1]

        def epoch(carry, _):
            def learn(train_state, batch):
                seen, action, gain = batch

                def loss(params):
                    chosen = jax.nn.log_softmax(mlp(params["policy"], seen))
                    actor = -jnp.mean(jnp.take_along_axis(chosen, action[:, None], 1)[:, 0] * gain)
                    critic = jnp.mean((mlp(params["value"], seen)[:, 0] - gain) ** 2)
                    return actor + 0.5 * critic, (actor, critic)

                (value, _), gradients = jax.value_and_grad(loss, has_aux=True)(train_state[0])
                updates, opt_state = optimizer.update(gradients, train_state[1])
                return (optax.apply_updates(train_state[0], updates), opt_state), value

            return jax.lax.scan(learn, carry, (seen, action, returns - value))

        train_state, losses = jax.lax.scan(epoch, train_state, None, 2)
        return train_state, env, key, losses.mean()

    state = params, optimizer.init(params)
    program = ow.inspect(train, state, X, KEY, carried=["train_state", "env", "key"])
    assert {p.name.split("/")[2] for p in program.parameters} == {"policy", "value"}
    assert len(program.parameters) == 8
    turn = innermost(program)
    assert (turn.name, len(turn.gradients)) == ("learn", 8)
    makers = {v: op for op in turn.ops for v in op.outputs}
    assert makers[turn.loss].type == "add", "the sum of both, not one of them"
    assert program.loss is program.outputs[0]
    rollout = next(op for op in program.ops if op.subprograms)
    assert rollout.made_by is Pass.FORWARD


def test_parameters_that_a_function_makes_itself_are_told_of():
    def train(x, y):
        return jax.lax.scan(once, start(), batches(x, y))[1]

    with pytest.warns(UserWarning, match="scan carries 4 parameters, .* let train take the parameters"):
        program = ow.inspect(train, X, Y)
    assert program.parameters == ()
    assert len(innermost(program).parameters) == 4


def test_train_state_and_modules_in_a_loop():
    net = nn.Dense(1)
    state = TrainState.create(apply_fn=net.apply, params=net.init(KEY, X), tx=ADAM)

    def step(state, batch):
        def loss(params):
            return jnp.mean((state.apply_fn(params, batch[0]) - batch[1]) ** 2)

        value, gradients = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=gradients), value

    program = ow.inspect(lambda state, x, y: jax.lax.scan(step, state, batches(x, y)), state, X, Y)
    assert [p.name for p in program.parameters] == [f"state/params/params/{n}" for n in ("bias", "kernel")]
    model = nnx.Linear(4, 1, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, ADAM, wrt=nnx.Param)

    @nnx.jit
    def epoch(model, optimizer, x, y):
        @nnx.scan(in_axes=(nnx.Carry, 0, 0), out_axes=(nnx.Carry, 0))
        def body(carry, x, y):
            model, optimizer = carry
            loss, gradients = nnx.value_and_grad(lambda model: jnp.mean((model(x) - y) ** 2))(model)
            optimizer.update(model, gradients)
            return carry, loss

        return body((model, optimizer), *batches(x, y))[1].mean()

    program = ow.inspect(epoch, model, optimizer, X, Y)
    assert [p.name for p in program.parameters] == ["model/bias", "model/kernel"]
    assert len(innermost(program).gradients) == 2
    assert program.loss is program.outputs[0]


def test_a_line_search_is_no_training():
    optimizer = optax.lbfgs()
    params = layers(4, 8, 1)

    def step(params, opt_state, x, y):
        def loss(params):
            return mse(params, x, y)

        value, gradients = optax.value_and_grad_from_state(loss)(params, state=opt_state)
        updates, opt_state = optimizer.update(
            gradients, opt_state, params, value=value, grad=gradients, value_fn=loss
        )
        return optax.apply_updates(params, updates), opt_state, value

    program = ow.inspect(step, params, optimizer.init(params), X, Y)
    assert [p.name for p, _ in program.gradients] == [f"params/{n}" for n in NAMES]
    assert program.loss is program.outputs[0]
    (search,) = (op for op in program.ops if op.type == "while")
    assert search.made_by is Pass.BACKWARD
    assert not search.subprograms["body_jaxpr"].parameters


def test_translation():
    """flax's WMT example: pmap, dropout, gradients averaged over devices, metrics summed."""

    class Network(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Dropout(0.1, deterministic=False)(nn.relu(nn.Dense(8)(x)))
            return nn.Dense(3)(x)

    net = Network()
    params = net.init({"params": KEY, "dropout": KEY}, X)["params"]
    state = TrainState.create(apply_fn=net.apply, params=params, tx=optax.adamw(1e-3))

    @partial(jax.pmap, axis_name="batch", devices=jax.devices()[:4])
    def train_step(state, batch, dropout_rng):
        dropout_rng = jax.random.fold_in(dropout_rng, state.step)

        def loss(params):
            logits = state.apply_fn({"params": params}, batch["x"], rngs={"dropout": dropout_rng})
            each = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
            return each.mean(), logits

        (value, logits), gradients = jax.value_and_grad(loss, has_aux=True)(state.params)
        state = state.apply_gradients(grads=jax.lax.pmean(gradients, "batch"))
        correct = jnp.sum(jnp.argmax(logits, -1) == batch["y"])
        return state, jax.lax.psum({"loss": value, "correct": correct}, "batch")

    state = jax_utils.replicate(state, jax.devices()[:4])
    rows = {"x": X, "y": np.arange(16, dtype=np.int32) % 3}
    batch = jax.tree.map(lambda a: a.reshape(4, 4, *a.shape[1:]), rows)
    keys = jax.random.split(jax.random.PRNGKey(0), 4)
    program = ow.inspect(train_step, state, batch, keys)
    assert program.replicas.count == 4
    assert len(program.parameters) == len(program.gradients) == 4
    makers = {v: op for op in program.ops for v in op.outputs}
    assert {makers[g].made_by for _, g in program.gradients} == {Pass.COLLECTIVE}
    assert program.loss in program.outputs
    assert makers[program.loss].made_by is Pass.COLLECTIVE


def mesh(axis_type):
    return jax.make_mesh((2, 2), ("data", "model"), axis_types=(axis_type,) * 2)


def put(mesh, tree, specs):
    return jax.tree.map(lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec)), tree, specs)


def sharded(axis_type):
    """A layer cut over the devices of one axis, rows over those of the other, and the arguments in place."""
    grid = mesh(axis_type)
    columns, lines = PartitionSpec(None, "model"), PartitionSpec("model")
    specs = {"a": columns, "b": lines}
    params = {"a": layers(4, 8)[0]["w"], "b": layers(8, 1)[0]["w"]}
    opt_state = ADAM.init(params)
    of_state = jax.tree.map(lambda a: WHOLE, opt_state)
    of_state = (of_state[0]._replace(mu=specs, nu=specs), *of_state[1:])

    @jax.jit
    @partial(
        jax.shard_map, mesh=grid, in_specs=(specs, of_state, ROWS, ROWS), out_specs=(specs, of_state, WHOLE)
    )
    def step(params, opt_state, x, y):
        def loss(params):
            made = jax.lax.psum(jnp.tanh(x @ params["a"]) @ params["b"], "model")
            return jax.lax.pmean(jnp.mean((made - y) ** 2), "data")

        value, gradients = jax.value_and_grad(loss)(params)
        return *update(params, opt_state, gradients), value

    return step, (put(grid, params, specs), put(grid, opt_state, of_state), *put(grid, (X, Y), (ROWS, ROWS)))


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
@pytest.mark.parametrize("axis_type", [AxisType.Explicit, AxisType.Auto])
def test_a_step_over_a_mesh_of_two_axes_is_one_op_that_is_opened(axis_type):
    step, args = sharded(axis_type)
    program = ow.inspect(step, *args)
    assert [p.name for p in program.parameters] == ["params/a", "params/b"]
    assert [v.name for v in program.inputs] == ["x", "y"]
    (op,) = program.ops
    assert op.made_by is Pass.UPDATE
    (device,) = op.subprograms.values()
    assert device["params/a"].shape == (4, 4), "what one device has of it"
    assert [(p.name, g.name) for p, g in device.gradients] == [
        (f"params/{n}", f"grad(params/{n})") for n in "ab"
    ]
    exchanged = [o for o in device.ops if o.body.collectives]
    assert Pass.FORWARD in {o.made_by for o in exchanged}
    assert program.loss is program.outputs[0]
    compiled = ow.compile(program)
    state, out = compiled(compiled.init(args[:2]), *args[2:])
    params, _, value = step(*args)
    np.testing.assert_allclose(out.loss, value, rtol=1e-6)
    np.testing.assert_allclose(state["params/a"], params["a"], rtol=1e-5)


def test_gradients_of_devices_within_a_step():
    grid = mesh(AxisType.Auto)

    @partial(jax.shard_map, mesh=grid, in_specs=(WHOLE, ROWS, ROWS), out_specs=WHOLE)
    def gradients_of(params, x, y):
        params = jax.lax.pcast(params, "data", to="varying")
        return jax.lax.pmean(jax.value_and_grad(mse)(params, x, y), "data")

    @jax.jit
    def step(params, opt_state, x, y):
        loss, gradients = gradients_of(params, x, y)
        return *update(params, opt_state, gradients), loss

    program = ow.inspect(step, *start(), X, Y)
    (spread,) = (op for op in program.ops if op.subprograms)
    (device,) = spread.subprograms.values()
    assert {g for _, g in program.gradients} < set(spread.outputs)
    assert sorted(p.name for p in device.parameters) == [f"params/{n}" for n in NAMES]
    assert {op.made_by for op in device.ops} > {Pass.FORWARD, Pass.BACKWARD, Pass.COLLECTIVE}
    assert program.loss is program.outputs[0]


# Conditions.


def sgd(params, x, y):
    loss, gradients = jax.value_and_grad(mse)(params, x, y)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), loss


def skipped(params, skip, x, y):
    return jax.lax.cond(skip, lambda p: (p, jnp.float32(0)), lambda p: sgd(p, x, y), params)


def chosen(params, is_hard, x, y):
    return jax.lax.cond(is_hard, lambda p: sgd(p, 2 * x, y), lambda p: sgd(p, x, y), params)


def gradients_alone(params, skip, x, y):
    def nothing(p):
        return jnp.float32(0), jax.tree.map(jnp.zeros_like, p)

    loss, gradients = jax.lax.cond(skip, nothing, lambda p: jax.value_and_grad(mse)(p, x, y), params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), loss


@pytest.mark.parametrize(
    ("step", "parts", "trains"),
    [
        (skipped, ["branch", "branches[1]"], Pass.UPDATE),
        (chosen, ["branch", "branch"], Pass.UPDATE),
        (gradients_alone, ["branch", "branches[1]"], Pass.BACKWARD),
    ],
)
def test_branches_that_train_are_opened(step, parts, trains):
    params = layers(4, 8, 1)
    program = ow.inspect(step, params, jnp.asarray(False), X, Y)
    (op,) = (op for op in program.ops if op.subprograms)
    assert sorted(part.name for part in op.subprograms.values()) == parts
    assert op.made_by is trains
    assert [v.name for v in program.parameters] == [f"params/{name}" for name in NAMES]
    for turn in (part for part in op.subprograms.values() if part.name == "branch"):
        assert [p.name for p, _ in turn.gradients] == [f"params/{name}" for name in NAMES]
        assert turn.loss is not None
    assert program.loss in op.outputs
    assert ow.summary(program).total.flops == ow.cost(program).flops


def test_branches_that_train_different_parameters_train_all_of_them():
    def by_turns(params, is_first, x):
        def half(mine, theirs, swap):
            def loss(w):
                a, b = (theirs, w) if swap else (w, theirs)
                return jnp.mean(jnp.tanh(x * a) * b)

            value, gradient = jax.value_and_grad(loss)(mine)
            new = mine - 0.1 * gradient
            return ((theirs, new) if swap else (new, theirs)), value

        a, b = params
        return jax.lax.cond(is_first, lambda: half(a, b, False), lambda: half(b, a, True))

    program = ow.inspect(by_turns, (jnp.ones(3), jnp.ones(3)), jnp.asarray(True), jnp.ones(3))
    assert [v.name for v in program.parameters] == ["params/0", "params/1"]


def test_a_branch_runs_as_it_did():
    params = layers(4, 8, 1)
    step = ow.compile(ow.inspect(skipped, params, jnp.asarray(False), X, Y))
    for skip in (False, True):
        expected, loss = skipped(params, skip, X, Y)
        state, out = step(step.init(params), jnp.asarray(skip), X, Y)
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), state.parameters, expected)
        assert abs(float(out.loss - loss)) < 1e-6


def test_what_tells_of_the_losses_of_a_loop_updates_nothing():
    def told(params, opt_state, x, y):
        params, opt_state, loss = over_steps(params, opt_state, x, y)
        return params, opt_state, 2 * loss, jnp.sqrt(jnp.sum(params[0]["w"] ** 2))

    program = ow.inspect(told, *start(), X, Y)
    makers = {v: op for op in program.ops for v in op.outputs}
    loss, norm = program.outputs
    assert program.loss is loss
    assert makers[loss].made_by is makers[makers[loss].inputs[0]].made_by is Pass.FORWARD
    assert makers[norm].made_by is Pass.UPDATE


def test_losses_that_are_returned_in_a_stack_stay_those_of_the_turn():
    def stacked(params, opt_state, x, y):
        return jax.lax.scan(once, (params, opt_state), batches(x, y))

    program = ow.inspect(stacked, *start(), X, Y)
    (turn,) = (turn for op in program.ops for turn in op.subprograms.values())
    assert program.loss is None
    assert not turn.loss.shape
