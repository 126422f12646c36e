"""The loss of an inspected step, returned or not; steps with several, and gradients added up by hand."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests.explain.adopted_programs import X, Y, layers, mlp

import onward as ow
from onward.core.lower import lower
from onward.core.words import Pass

pytestmark = pytest.mark.usefixtures("earlier_objects_frozen")
ADAM = optax.adam(1e-2)


def mse(params, x, y):
    return jnp.mean((mlp(params, x) - y) ** 2)


def entropy(params, x, y):
    return -jnp.mean(jax.nn.log_sigmoid(mlp(params, x) * y))


def decayed(params, x, y):
    return mse(params, x, y) + 0.01 * sum(jnp.sum(layer["w"] ** 2) for layer in params)


def summed(params, x, y):
    return jnp.sum(jnp.abs(mlp(params, x) - y))


def scaled(params, x, y):
    return 0.5 * jnp.mean((mlp(params, x) - y) ** 2) - 3.0


def halved_precision(params, x, y):
    low = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
    return jnp.mean((mlp(low, x.astype(jnp.bfloat16)) - y) ** 2, dtype=jnp.float32)


def in_turns(params, x, y):
    def turn(total, row):
        return total + jnp.sum((mlp(params, row[0]) - row[1]) ** 2), None

    return jax.lax.scan(turn, 0.0, (x, y))[0] / len(x)


LOSSES = (mse, entropy, decayed, summed, scaled, halved_precision, in_turns)


def descend(params, gradients):
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)


def value_of(program, v, *given):
    state, data = given[: len(given) - len(program.inputs)], given[len(given) - len(program.inputs) :]
    return jax.jit(lower(program, [v]))(jax.tree.leaves(state), data)[0]


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("jitted", [False, True])
def test_a_loss_that_is_not_returned(loss, jitted):
    def step(params, x, y):
        called = jax.jit(loss) if jitted else loss
        return descend(params, jax.grad(called)(params, x, y))

    params = layers(4, 8, 1)
    program = ow.inspect(step, params, X, Y)
    assert (program.outputs, program.losses) == ((), {})
    found = value_of(program, program.loss, params, X, Y)
    np.testing.assert_allclose(found, loss(params, X, Y), rtol=1e-5)
    (line,) = (line for line in str(program).splitlines() if line.endswith("(the loss), not returned"))
    assert program.loss.name in line


def test_a_loss_beside_others_that_are_returned():
    def step(params, x, y):
        def loss(params):
            made = mlp(params, x)
            error = jnp.mean((made - y) ** 2)
            return error + 0.1 * jnp.mean(jnp.abs(made)), {"error": jnp.sqrt(error), "size": jnp.max(made)}

        gradients, told = jax.grad(loss, has_aux=True)(params)
        return descend(params, gradients), told

    params = layers(4, 8, 1)
    program = ow.inspect(step, params, X, Y)
    assert program.loss not in program.outputs
    made = mlp(params, X)
    expected = jnp.mean((made - Y) ** 2) + 0.1 * jnp.mean(jnp.abs(made))
    np.testing.assert_allclose(value_of(program, program.loss, params, X, Y), expected, rtol=1e-6)


@pytest.mark.parametrize(
    "returned", [lambda v: v, lambda v: v * 8, lambda v: v / 8, lambda v: {"loss": v[None]}]
)
def test_what_is_returned_of_a_loss(returned):
    def step(params, x, y):
        value, gradients = jax.value_and_grad(mse)(params, x, y)
        return descend(params, gradients), returned(value)

    program = ow.inspect(step, layers(4, 8, 1), X, Y)
    (result,) = program.outputs
    assert program.loss is result or result.shape


def test_a_perplexity_is_no_loss():
    def step(params, x, y):
        value, gradients = jax.value_and_grad(mse)(params, x, y)
        return descend(params, gradients), jnp.exp(value)

    program = ow.inspect(step, layers(4, 8, 1), X, Y)
    assert program.loss is not program.outputs[0]
    assert program.outputs[0].name == "exp"


def gan(penalty, together, returned=lambda d, g: (d, g)):
    """A discriminator and a generator, one after the other or from the same weights."""

    def step(networks, opt_states, z, x):
        made, judge = networks

        def of_judge(judge, made):
            fake = mlp(made, z)
            error = jnp.mean(mlp(judge, fake)) - jnp.mean(mlp(judge, x))
            if not penalty:
                return error
            slope = jax.vmap(jax.grad(lambda row: mlp(judge, row)[0]))(0.5 * (x + fake))
            return error + 10 * jnp.mean((jnp.sqrt(jnp.sum(slope**2, 1) + 1e-8) - 1) ** 2)

        def of_made(made, judge):
            return -jnp.mean(mlp(judge, mlp(made, z)))

        first, gradients = jax.value_and_grad(of_judge)(judge, made)
        updates, judge_state = ADAM.update(gradients, opt_states[1])
        following = optax.apply_updates(judge, updates)
        second, gradients = jax.value_and_grad(of_made)(made, judge if together else following)
        updates, made_state = ADAM.update(gradients, opt_states[0])
        made = optax.apply_updates(made, updates)
        return (made, following), (made_state, judge_state), returned(first, second)

    made, judge = layers(2, 4, 4), layers(4, 4, 1)
    return step, ((made, judge), (ADAM.init(made), ADAM.init(judge)), X[:, :2], X)


@pytest.mark.parametrize("penalty", [False, True])
@pytest.mark.parametrize("together", [False, True])
def test_both_losses_of_a_gan(penalty, together):
    step, args = gan(penalty, together)
    program = ow.inspect(step, *args)
    assert program.loss is None
    assert set(program.losses) == set(program.outputs)
    trained = {tuple(sorted(p.name for p in ps)) for ps in program.losses.values()}
    names = ["0/b", "0/w", "1/b", "1/w"]
    assert trained == {tuple(f"networks/{i}/{n}" for n in names) for i in (0, 1)}
    expected = step(*args)[2]
    of_judge = next(v for v, ps in program.losses.items() if ps[0].name.startswith("networks/1"))
    np.testing.assert_allclose(value_of(program, of_judge, *args), expected[0], rtol=1e-5, atol=1e-6)
    assert "(a loss, of networks/1/0/b, networks/1/0/w and 2 more)" in str(program)
    compiled = ow.compile(program)
    _, out = compiled(compiled.init(args[:2]), *args[2:])
    np.testing.assert_allclose(out.value[2], expected, rtol=1e-4, atol=1e-6)


def test_losses_of_a_gan_that_are_not_returned_or_only_added_up():
    step, args = gan(False, True, lambda d, g: d + g)
    program = ow.inspect(step, *args)
    assert program.loss is None, "no parameter is trained by the sum"
    assert len(program.losses) == 2
    assert str(program).count("not returned") == 2


def test_actor_and_critic_have_one_loss():
    def step(params, x, y):
        def loss(params):
            actor = jnp.mean(mlp(params["actor"], x) * y)
            critic = jnp.mean((mlp(params["critic"], x) - y) ** 2)
            return actor + critic, (actor, critic)

        (value, parts), gradients = jax.value_and_grad(loss, has_aux=True)(params)
        return descend(params, gradients), parts, value

    params = {"actor": layers(4, 1), "critic": layers(4, 1)}
    program = ow.inspect(step, params, X, Y)
    assert (program.loss, program.losses) == (program.outputs[2], {})


def test_an_inner_loss_is_none_of_the_step():
    def step(params, opt_state, x, y):
        def outer(params):
            return mse(descend(params, jax.grad(mse)(params, x[:8], y[:8])), x[8:], y[8:])

        value, gradients = jax.value_and_grad(outer)(params)
        updates, opt_state = ADAM.update(gradients, opt_state)
        return optax.apply_updates(params, updates), opt_state, value

    params = layers(4, 8, 1)
    program = ow.inspect(step, params, ADAM.init(params), X, Y)
    assert (program.loss, program.losses) == (program.outputs[0], {})


def two_batches(x, y):
    return (x[:8], y[:8]), (x[8:], y[8:])


def by_hand(params, opt_state, x, y):
    total, loss = jax.tree.map(jnp.zeros_like, params), 0.0
    for batch in two_batches(x, y):
        value, gradients = jax.value_and_grad(mse)(params, *batch)
        total, loss = jax.tree.map(jnp.add, total, gradients), loss + value
    updates, opt_state = ADAM.update(jax.tree.map(lambda g: g / 2, total), opt_state)
    return optax.apply_updates(params, updates), opt_state, loss / 2


def side_by_side(params, opt_state, x, y):
    parts = jax.tree.map(lambda a: a.reshape(2, 8, -1), (x, y))
    losses, gradients = jax.vmap(jax.value_and_grad(mse), (None, 0, 0))(params, *parts)
    gradients = jax.tree.map(lambda g: g.mean(0), gradients)
    updates, opt_state = ADAM.update(gradients, opt_state)
    return optax.apply_updates(params, updates), opt_state, losses.mean()


@pytest.mark.parametrize("step", [by_hand, side_by_side])
def test_gradients_that_are_added_up_by_hand(step):
    params = layers(4, 8, 1)
    program = ow.inspect(step, params, ADAM.init(params), X, Y)
    assert program.loss is program.outputs[0]
    assert len(program.gradients) == len(program.parameters) == 4
    gradients = jax.tree.leaves(jax.grad(mse)(params, X, Y))
    for (_, g), expected in zip(program.gradients, gradients, strict=True):
        found = value_of(program, g, params, ADAM.init(params), X, Y)
        np.testing.assert_allclose(found / 2, expected, rtol=1e-4, atol=1e-6)


def test_losses_of_micro_batches_that_are_not_returned():
    def step(params, x, y):
        first, second = (jax.grad(mse)(params, *batch) for batch in two_batches(x, y))
        return descend(params, jax.tree.map(jnp.add, first, second))

    params = layers(4, 8, 1)
    program = ow.inspect(step, params, X, Y)
    assert program.loss is None
    values = [value_of(program, v, params, X, Y) for v in program.losses]
    np.testing.assert_allclose(values, [mse(params, *batch) for batch in two_batches(X, Y)], rtol=1e-5)
    assert {len(ps) for ps in program.losses.values()} == {4}


def multi_steps(params):
    optimizer = optax.MultiSteps(optax.adam(1e-2), 4)

    def step(params, opt_state, x, y):
        value, gradients = jax.value_and_grad(mse)(params, x, y)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    return step, (params, optimizer.init(params))


def with_equinox(_):
    model = eqx.nn.MLP(4, 1, 8, 1, key=jax.random.key(0))
    state = ADAM.init(eqx.filter(model, eqx.is_array))

    @eqx.filter_jit
    def step(model, opt_state, x, y):
        def loss(model):
            return jnp.mean((jax.vmap(model)(x) - y) ** 2)

        updates, opt_state = ADAM.update(eqx.filter_grad(loss)(model), opt_state)
        return eqx.apply_updates(model, updates), opt_state

    return step, (model, state)


@pytest.mark.parametrize("make", [multi_steps, with_equinox])
def test_roles_of_other_steps(make):
    step, state = make(layers(4, 8, 1))
    program = ow.inspect(step, *state, X, Y)
    assert len(program.parameters) == len(program.gradients) == 4
    assert program.loss is not None
    assert {op.made_by for op in program.ops} == {Pass.FORWARD, Pass.BACKWARD, Pass.UPDATE}
