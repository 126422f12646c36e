"""Local SGD against separate runs that are averaged by hand, DiLoCo against the algorithm of its paper."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import onward as ow

DEVICES, EACH, STEPS = 4, 2, 7
ROWS = DEVICES * EACH
RNG = np.random.default_rng(0)
BATCHES = [(RNG.normal(size=(ROWS, 3)), RNG.normal(size=(ROWS, 2))) for _ in range(STEPS)]
FIRST = {"a": RNG.normal(size=(3, 4)), "b": RNG.normal(size=(4, 2))}


@pytest.fixture(autouse=True)
def in_double():
    with jax.enable_x64(True):
        yield


def loss(w, x, y):
    return jnp.mean((jnp.tanh(x @ w["a"]) @ w["b"] - y) ** 2)


@cache
def program_of(optimizer, max_norm=None, rows=ROWS):
    types = [jax.ShapeDtypeStruct((rows, n), "float64") for n in (3, 2)]
    program = ow.append_backward(ow.trace(loss, FIRST, *types))
    if max_norm is not None:
        program = ow.clip_by_global_norm(program, max_norm)
    return ow.append_update(program, optimizer)


def arrays(state):
    return {name: np.asarray(state[name]) for name in state}


@cache
def trained(optimizer, merge, max_norm=None, fetch=(), steps=STEPS):
    """The state before the first step and after each, and what each step returned."""
    step = ow.compile(ow.replicate(program_of(optimizer, max_norm), DEVICES, merge), fetch)
    state = step.init(FIRST)
    states, outs = [arrays(state)], []
    for batch in BATCHES[:steps]:
        state, out = step(state, *batch)
        states.append(arrays(state))
        outs.append({"loss": np.asarray(out.loss), **{name: np.asarray(out[name]) for name in fetch}})
    return states, outs


def equal(found, expected, rtol=1e-12, atol=1e-14):
    np.testing.assert_allclose(found, expected, rtol, atol)


# ---------------------------------------------------------------- equal to separate runs


def part(batch, device):
    return [x[device * EACH : (device + 1) * EACH] for x in batch]


def apart(optimizer, every, max_norm=None):
    """One run for each device, parameters averaged by hand: all states after every step, and the losses."""
    step = ow.compile(program_of(optimizer, max_norm, EACH), donate=False)
    states = [step.init(FIRST) for _ in range(DEVICES)]
    for number, batch in enumerate(BATCHES, 1):
        found = [step(state, *part(batch, device)) for device, state in enumerate(states)]
        states, losses = [state for state, _ in found], [float(out.loss) for _, out in found]
        if number % every == 0:
            mean = {name: np.mean([s[name] for s in states], 0) for name in FIRST}
            states = [state.replace(mean) for state in states]
        yield states, np.mean(losses)


CASES = {
    "sgd": (ow.SGD(0.1), None, 3),
    "adam": (ow.Adam(0.01), None, 3),
    "schedule": (ow.Momentum(lambda n: 0.1 / (n + 1)), None, 4),
    "clipped": (ow.SGD(0.1), 0.2, 2),
}


@pytest.mark.parametrize("case", CASES)
def test_equal_to_separate_runs_that_are_averaged(case):
    optimizer, max_norm, every = CASES[case]
    many, outs = trained(optimizer, ow.merge.LocalSGD(every), max_norm)
    met = FIRST
    for number, (states, mean) in enumerate(apart(optimizer, every, max_norm), 1):
        if number % every == 0:
            met = {name: states[0][name] for name in FIRST}
        equal(outs[number - 1]["loss"], mean)
        for name in FIRST:
            equal(many[number][name], met[name])
            equal(many[number][f"{name}/local"], [s[name] for s in states])
        for slot in [name for name in states[0] if "/" in name]:
            equal(many[number][slot], [s[slot] for s in states])
        assert many[number]["step"] == number


def test_each_device_clips_its_own_gradient_by_its_own_norm():
    names = ("global_norm", "grad(a)", "grad(b)", "clip(grad(a))")
    _, outs = trained(ow.SGD(0.1), ow.merge.LocalSGD(2), 0.2, names)
    for out in outs:
        squares = [(out[f"grad({name})"] ** 2).reshape(DEVICES, -1).sum(1) for name in FIRST]
        norms = np.sqrt(sum(squares))
        equal(out["global_norm"], norms)
        assert (norms > 0.2).all()
        assert len(set(norms)) == DEVICES
        equal(out["clip(grad(a))"], out["grad(a)"] * (0.2 / norms)[:, None, None])


def test_to_meet_at_every_step_of_sgd_is_to_average_gradients():
    for local, average in zip(
        *(trained(ow.SGD(0.1), m)[0] for m in (ow.merge.LocalSGD(1), ow.Average())), strict=True
    ):
        for name in FIRST:
            equal(local[name], average[name])


def test_parameters_are_those_of_the_last_meeting():
    states, _ = trained(ow.Adam(0.01), ow.merge.LocalSGD(3))
    changed = [
        number for number in range(1, STEPS + 1) if (states[number]["a"] != states[number - 1]["a"]).any()
    ]
    assert changed == [3, 6]
    for number in (3, 6):
        np.testing.assert_array_equal(states[number]["a/local"], [states[number]["a"]] * DEVICES)
    assert (np.ptp(states[7]["a/local"], 0) > 0).all()


def test_parameters_of_a_state_come_in_the_containers_that_were_traced():
    step = ow.compile(ow.replicate(program_of(ow.SGD(0.1)), DEVICES, ow.merge.LocalSGD(2)))
    state = step.init(FIRST)
    assert {name: x.shape for name, x in state.parameters.items()} == {"a": (3, 4), "b": (4, 2)}
    assert state.parameters["a"].is_fully_replicated
    assert state["a/local"].shape == (DEVICES, 3, 4)


def test_what_is_not_trained_has_no_local_one():
    types = [jax.ShapeDtypeStruct((ROWS, n), "float64") for n in (3, 2)]
    program = ow.Adam(0.01).minimize(loss, FIRST, *types, parameter_list=["b"])
    program = ow.replicate(program, DEVICES, ow.merge.LocalSGD(2))
    assert [v.name for v in program.state if v.name.endswith("/local")] == ["b/local"]


def test_under_jit_and_scan_and_at_another_batch_size():
    step = ow.compile(ow.replicate(program_of(ow.SGD(0.1)), DEVICES, ow.merge.LocalSGD(3)), donate=False)
    expected, _ = trained(ow.SGD(0.1), ow.merge.LocalSGD(3))
    x, y = (np.stack(values) for values in zip(*BATCHES, strict=True))
    state, _ = jax.lax.scan(lambda s, batch: step(s, *batch), step.init(FIRST), (x, y))
    for name in (*FIRST, "a/local", "b/local"):
        equal(state[name], expected[-1][name])
    state, _ = step(state, *(np.concatenate(pair) for pair in zip(*BATCHES[:2], strict=True)))
    assert (step.traces, int(state["step"])) == (1, STEPS + 1)


def test_what_the_network_carries_itself_is_that_of_the_whole_batch():
    def network():
        x, y = ow.data("x", (None, 3), "float64"), ow.data("y", (None, 2), "float64")
        positive = ow.state("positive", (), "int32")
        ow.assign(positive, positive + jnp.sum(y > 0, dtype="int32"))
        h = ow.layer.dropout(ow.layer.batch_norm(x, name="norm"), 0.5)
        return ow.layer.mse(ow.layer.fc(h, 2), y)

    program = ow.SGD(0.1).minimize(ow.trace(network, batch_size=ROWS))
    step = ow.compile(ow.replicate(program, DEVICES, ow.merge.LocalSGD(2)))
    state = step.init()
    for batch in BATCHES[:3]:
        state, _ = step(state, *batch)
    running = 0.0
    for x, _ in BATCHES[:3]:
        running = 0.9 * running + 0.1 * x.mean(0)
    equal(state["norm/mean"], running, 1e-6)
    assert int(state["positive"]) == sum((y > 0).sum() for _, y in BATCHES[:3])


def test_a_function_of_the_user_that_is_called_count():
    @jax.custom_jvp
    def count(x):
        return jnp.sin(x)

    count.defjvp(lambda at, way: (jnp.sin(*at), jnp.cos(*at) * way[0]))
    program = ow.SGD(0.1).minimize(lambda w, x: jnp.mean(count(x @ w)), np.ones(3), BATCHES[0][0])
    losses = []
    for merge in (ow.Average(), ow.merge.LocalSGD(1)):
        step = ow.compile(ow.replicate(program, DEVICES, merge))
        state, _ = step(step.init(np.ones(3)), BATCHES[0][0])
        losses.append(state.parameters)
    equal(*losses)


# ---------------------------------------------------------------- the tester is tested


def test_a_meeting_without_the_mean_is_caught():
    class Forgetful(ow.merge.LocalSGD):
        def synchronize(self, draft, devices):
            return replace(draft, next_state=dict(zip(draft.state, draft.inputs, strict=True)))

    message = r"'a' is placed replicated, but 'next\(a\)', which replaces it, differs from device to device"
    with pytest.raises(ow.GraphError, match=message):
        ow.replicate(program_of(ow.SGD(0.1)), DEVICES, Forgetful(2))


def test_a_meeting_of_a_few_devices_is_caught():
    class Partial(ow.merge.LocalSGD):
        def synchronize(self, draft, devices):
            met = super().synchronize(draft, devices)
            first = draft.state[0]
            return replace(met, next_state={**met.next_state, first: draft.inputs[0]})

    with pytest.raises(ow.GraphError, match=r"'a' is placed replicated"):
        ow.replicate(program_of(ow.SGD(0.1)), DEVICES, Partial(2))


def test_an_update_of_the_shared_parameter_by_the_local_one_is_caught():
    program = ow.replicate(program_of(ow.SGD(0.1)), DEVICES, ow.merge.LocalSGD(2))
    mutant = replace(program, next_state={**program.next_state, program["a"]: program["updated(a/local)"]})
    with pytest.raises(ow.GraphError, match=r"'a' is placed replicated, but 'updated\(a/local\)'"):
        ow.check(mutant)


def test_outer_slots_that_differ_are_caught():
    class Alone(ow.Merge):
        def merge(self, gradient, kept, devices):
            return gradient, kept

    with pytest.raises(ow.GraphError, match=r"is placed replicated, but .* differs from device to device"):
        ow.replicate(program_of(ow.SGD(0.1)), DEVICES, ow.merge.DiLoCo(2, exchange=Alone()))


# ---------------------------------------------------------------- DiLoCo

ADAM = {"learning_rate": 0.125, "beta1": 0.5, "beta2": 0.75, "epsilon": 2.0**-20, "weight_decay": 0.25}


def adamw(w, gradient, slots, t):
    """Algorithm 2 of Loshchilov and Hutter; every hyperparameter is a float32 exactly."""
    h = ADAM
    m = h["beta1"] * slots["mean"] + (1 - h["beta1"]) * gradient
    v = h["beta2"] * slots["variance"] + (1 - h["beta2"]) * gradient**2
    direction = (m / (1 - h["beta1"] ** t)) / (np.sqrt(v / (1 - h["beta2"] ** t)) + h["epsilon"])
    return w - h["learning_rate"] * (direction + h["weight_decay"] * w), {"mean": m, "variance": v}


def by_hand(w, x, y):
    """The gradient of the loss, as one writes it down."""
    h = np.tanh(x @ w["a"])
    error = 2 * (h @ w["b"] - y) / y.size
    return {"a": x.T @ (error @ w["b"].T * (1 - h**2)), "b": h.T @ error}


def diloco(every, rate, momentum):
    """Algorithm 1 of Douillard et al.: AdamW inside, Nesterov momentum outside. All state after each step."""
    shared, velocity = dict(FIRST), {name: np.zeros_like(x) for name, x in FIRST.items()}
    local = [dict(FIRST) for _ in range(DEVICES)]
    slots = [
        {name: {"mean": np.zeros_like(x), "variance": np.zeros_like(x)} for name, x in FIRST.items()}
        for _ in range(DEVICES)
    ]
    for t, batch in enumerate(BATCHES, 1):
        for i in range(DEVICES):
            gradients = by_hand(local[i], *part(batch, i))
            for name in FIRST:
                local[i][name], slots[i][name] = adamw(local[i][name], gradients[name], slots[i][name], t)
        if t % every == 0:
            for name in FIRST:
                way = np.mean([shared[name] - own[name] for own in local], 0)
                velocity[name] = momentum * velocity[name] + way
                shared[name] = shared[name] - rate * (way + momentum * velocity[name])
            local = [dict(shared) for _ in range(DEVICES)]
        yield {
            "step": t,
            "outer/step": t // every,
            **shared,
            **{f"outer/{name}/velocity": x for name, x in velocity.items()},
            **{f"{name}/local": [own[name] for own in local] for name in FIRST},
            **{
                f"{name}/{slot}": [own[name][slot] for own in slots]
                for name in FIRST
                for slot in ("mean", "variance")
            },
        }


def test_equal_to_the_algorithm_of_the_paper():
    outer = ow.Momentum(0.75, 0.5, nesterov=True)
    states, _ = trained(ow.AdamW(**ADAM), ow.merge.DiLoCo(3, outer))
    hyperparameters = {*ADAM, "outer/learning_rate", "outer/momentum"}
    for found, expected in zip(states[1:], diloco(3, 0.75, 0.5), strict=True):
        assert found.keys() == expected.keys() | hyperparameters
        for name, value in expected.items():
            np.testing.assert_allclose(found[name], value, 1e-12, 1e-14, err_msg=name)


def test_the_outer_optimizer_is_that_of_the_paper_unless_given():
    assert ow.merge.DiLoCo().outer == ow.Momentum(0.7, 0.9, nesterov=True)
    assert (ow.merge.DiLoCo().every, ow.merge.LocalSGD().every) == (100, 16)


def test_with_an_outer_rate_of_one_it_is_local_sgd():
    pairs = zip(
        trained(ow.Adam(0.01), ow.merge.DiLoCo(3, ow.SGD(1.0)))[0],
        trained(ow.Adam(0.01), ow.merge.LocalSGD(3))[0],
        strict=True,
    )
    for diloco_, local in pairs:
        for name, value in local.items():
            equal(diloco_[name], value, 1e-10)


@pytest.mark.parametrize(
    "exchange",
    [ow.merge.LowPrecision(), ow.merge.TopK(0.25), ow.merge.Bucketed(8, ow.merge.TopK(0.5))],
    ids=str,
)
def test_what_an_exchange_leaves_out_is_kept_until_the_next_meeting(exchange):
    """At a meeting the mean of way + kept before is merged + the mean of kept now; else nothing changes."""
    states, outs = trained(
        ow.Momentum(0.05), ow.merge.DiLoCo(3, ow.SGD(1.0), exchange), fetch=("updated(a/local)",)
    )
    kept = "outer/way(a)/error"
    assert not states[2][kept].any()
    for number in (3, 6):
        before, after = states[number - 1], states[number]
        ways = before["a"] - outs[number - 1]["updated(a/local)"]
        merged = before["a"] - after["a"]
        whole = ways.reshape(before[kept].shape) + before[kept]
        equal(merged, (whole - after[kept]).mean(0).reshape(merged.shape), 1e-9, 1e-12)
        assert (np.abs(after[kept]).reshape(DEVICES, -1).max(1) > 0).all()
        np.testing.assert_array_equal(after["a/local"], [after["a"]] * DEVICES)
    for number in (4, 5, 7):
        np.testing.assert_array_equal(states[number][kept], states[number - 1][kept])


def test_outer_hyperparameters_are_changed_without_compiling_again():
    step = ow.compile(ow.replicate(program_of(ow.SGD(0.1)), DEVICES, ow.merge.DiLoCo(1, ow.SGD(0.5))))
    state = step.init(FIRST)
    assert set(state.hyperparameters) == {"learning_rate", "outer/learning_rate"}
    state, _ = step(state.replace({"outer/learning_rate": 0.0}), *BATCHES[0])
    equal(state["a"], FIRST["a"])
    equal(state["a/local"], [FIRST["a"]] * DEVICES)
    state, _ = step(state.replace({"outer/learning_rate": 1.0}), *BATCHES[0])
    equal(state["a"], FIRST["a"] - 0.1 * by_hand(FIRST, *BATCHES[0])["a"], 1e-10)
    assert step.compilations == 1
    with pytest.raises(ow.HyperparameterError, match="outer/learning_rate is -1"):
        state.replace({"outer/learning_rate": -1})


def test_an_outer_schedule_counts_meetings():
    outer = ow.SGD(lambda n: jnp.where(n == 0, 1.0, jnp.where(n == 1, 0.5, 0.0)))
    states, outs = trained(ow.SGD(0.1), ow.merge.DiLoCo(2, outer), fetch=("updated(a/local)",))
    for number, rate in ((2, 1.0), (4, 0.5), (6, 0.0)):
        before = states[number - 1]["a"]
        mean = outs[number - 1]["updated(a/local)"].mean(0)
        equal(states[number]["a"], before + rate * (mean - before), 1e-11)
        assert states[number]["outer/step"] == number // 2


def test_its_names_are_there_to_be_read():
    text = str(
        ow.replicate(program_of(ow.Adam(0.01)), DEVICES, ow.merge.DiLoCo(3, exchange=ow.merge.TopK(0.5)))
    )
    for line in (
        "f64[3,4] a",
        "f64[3,4] a/local (each device its own)",
        "f64[3,4] a/mean (each device its own)",
        "f64[3,4] outer/way(a)/error (each device its own)",
        "f64[] outer/learning_rate",
        "f64[3,4] outer/a/velocity",
        "= adam(a/local, grad(a), a/mean, a/variance",
        "next(outer/a/velocity)",
        "= diloco(step, a, b,",
    ):
        assert line in " ".join(text.split())


# ---------------------------------------------------------------- between two meetings, to another layout

WAYS = {"local": ow.merge.LocalSGD(3), "diloco": ow.merge.DiLoCo(3, exchange=ow.merge.TopK(0.5))}
LAYOUTS = {
    "one device": lambda p: p,
    "average": lambda p: ow.replicate(p, 2),
    "sharded": lambda p: ow.replicate(p, DEVICES, ow.Sharded()),
    "pipeline": lambda p: ow.pipeline(p, stages=2, micro_batches=2),
}


@cache
def half_way(way, steps=STEPS):
    step = ow.compile(ow.replicate(program_of(ow.Adam(0.01)), DEVICES, WAYS[way]))
    state = step.init(FIRST)
    for batch in BATCHES[:steps]:
        state, _ = step(state, *batch)
    return state


def kept(state, folder, **more):
    with ow.Checkpoints(folder) as checkpoints:
        return checkpoints.save(state, STEPS, **more)


def check_mean(restored, state):
    for name in FIRST:
        own = np.asarray(state[f"{name}/local"])
        assert np.ptp(own, 0).any()
        equal(restored[name], own.mean(0))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_another_layout_goes_on_from_the_mean(way, layout, tmp_path):
    state = half_way(way)
    step = ow.compile(LAYOUTS[layout](program_of(ow.Adam(0.01))))
    restored = step.restore(kept(state, tmp_path))
    check_mean(restored, state)
    expected = loss({name: np.asarray(restored[name]) for name in FIRST}, *BATCHES[0])
    equal(np.mean(step(restored, *BATCHES[0])[1].loss), expected)


@pytest.mark.parametrize("way", WAYS)
def test_what_they_met_at_stays_to_the_bit(way, tmp_path):
    state = half_way(way, 6)
    restored = ow.compile(program_of(ow.Adam(0.01))).restore(kept(state, tmp_path))
    for name in FIRST:
        np.testing.assert_array_equal(restored[name], state[name])


@pytest.mark.parametrize("way", WAYS)
def test_fewer_devices_that_train_by_themselves_begin_at_the_mean_and_know_the_meeting(way, tmp_path):
    state = half_way(way)
    step = ow.compile(ow.replicate(program_of(ow.Adam(0.01)), 2, WAYS[way]))
    restored = step.restore(kept(state, tmp_path))
    for name in FIRST:
        np.testing.assert_array_equal(restored[name], state[name])
        equal(restored[f"{name}/local"], [np.asarray(state[f"{name}/local"]).mean(0)] * 2)


def test_a_checkpoint_from_before_copies_were_noted(tmp_path):
    state = half_way("local")
    words = {v.name: str(v.placement) for v in state.layout.variables if v.placement != "replicated"}
    path = kept({name: state[name] for name in state}, tmp_path, extra={"placements": words})
    check_mean(ow.compile(program_of(ow.Adam(0.01))).restore(path), state)


@pytest.mark.parametrize("way", WAYS)
def test_a_file_holds_the_mean(way, tmp_path):
    state = half_way(way)
    training = program_of(ow.Adam(0.01))
    ow.save(training, tmp_path / "a.step", state)
    check_mean(ow.load_step(tmp_path / "a.step")[1], state)
    types = [jax.ShapeDtypeStruct((ROWS, n), "float64") for n in (3, 2)]
    ow.save(ow.trace(loss, FIRST, *types), tmp_path / "a.model", state)
    check_mean(ow.load(tmp_path / "a.model"), state)


def test_a_state_of_which_a_step_would_leave_the_local_parameters_behind_is_refused():
    step = ow.compile(ow.replicate(program_of(ow.SGD(0.1)), DEVICES, WAYS["local"]), donate=False)
    state, _ = step(step.init(FIRST), *BATCHES[0])
    for program in (program_of(ow.SGD(0.1)), ow.replicate(program_of(ow.SGD(0.1)), DEVICES)):
        with pytest.raises(ow.StateError, match=r"has '[ab]/local', in which .*restore it here: step.rest"):
            ow.compile(program, donate=False)(state, *BATCHES[0])


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize("every", [0, -1, True, 2.0, "two", None])
@pytest.mark.parametrize("strategy", [ow.merge.LocalSGD, ow.merge.DiLoCo])
def test_a_number_of_steps_that_is_none(strategy, every):
    message = rf"{strategy.__name__}: every is {every!r}; expected a number of steps, at least 1"
    with pytest.raises(ow.ArgumentError, match=message):
        strategy(every)


@pytest.mark.parametrize("outer", [None, 0.7, "sgd", ow.SGD, ow.Average()], ids=str)
def test_an_outer_optimizer_that_is_none(outer):
    with pytest.raises(
        ow.ArgumentError, match=r"DiLoCo: outer is .*; expected an optimizer, such as Momentum"
    ):
        ow.merge.DiLoCo(2, outer)


@pytest.mark.parametrize(
    "exchange", [ow.Sharded(), ow.merge.LocalSGD(), ow.merge.DiLoCo(), ow.Average, "average"], ids=str
)
@pytest.mark.parametrize("strategy", [ow.merge.DiLoCo, ow.merge.Bucketed])
def test_a_way_to_exchange_that_is_none(strategy, exchange):
    words = (
        rf"{strategy.__name__} was given .*, which does not say how a single array is merged; expected Aver"
    )
    option = {"exchange": exchange} if strategy is ow.merge.DiLoCo else {"inner": exchange}
    with pytest.raises(ow.ArgumentError, match=words):
        strategy(**option)
