"""Merge strategies: what each device sends, what it keeps for later, and how well one learns by it."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import onward as ow

DEVICES = 4
ROWS, FEATURES = 16, 6
RNG = np.random.default_rng(0)


# ---------------------------------------------------------------- error feedback, on whole numbers


def linear(w, x):
    """Its gradient on a device is the sum of that device's rows, whatever w is."""
    return jnp.sum(jnp.mean(x.reshape(-1, *w.shape), 0) * w)


def whole_numbers(shape, end):
    return RNG.integers(-end, end + 1, (DEVICES, *shape)).astype("float32")


def sent_and_kept(merge, gradients, steps=3):
    """For every step: the gradient of each device, the merged one, and what each device keeps after it."""
    shape = gradients[0].shape[1:]
    program = ow.SGD(0.0).minimize(linear, jnp.zeros(shape), gradients[0])
    step = ow.compile(ow.replicate(program, DEVICES, merge), fetch=[f"{merge.name}(grad(w))", "grad(w)"])
    state, found = step.init(jnp.zeros(shape)), []
    for x in gradients[:steps]:
        state, out = step(state, x)
        np.testing.assert_array_equal(out["grad(w)"], x)
        found.append((x, np.asarray(out[f"{merge.name}(grad(w))"]), np.asarray(state["grad(w)/error"])))
    return found


@pytest.mark.parametrize(
    ("merge", "shape", "end"),
    [
        (ow.merge.LowPrecision(), (5, 3), 1000),
        (ow.merge.LowPrecision("float16"), (7,), 5000),
        (ow.merge.TopK(0.2), (5, 3), 100),
        (ow.merge.TopK(0.01), (7,), 100),
        (ow.merge.TopK(1.0), (5, 3), 100),
    ],
)
def test_sent_and_kept_are_the_gradient(merge, shape, end):
    """The mean over devices of gradient + kept before = merged + mean of kept now, without rounding."""
    before = np.zeros((DEVICES, *shape), "float32")
    gradients = [whole_numbers(shape, end) for _ in range(3)]
    for gradient, merged, kept in sent_and_kept(merge, gradients):
        assert kept.shape == gradient.shape
        sent = gradient + before - kept
        np.testing.assert_array_equal(merged, sent.mean(0))
        before = kept


def test_what_is_sent_of_the_largest():
    gradients = [whole_numbers((5, 3), 100) for _ in range(2)]
    before = np.zeros_like(gradients[0])
    for gradient, _, kept in sent_and_kept(ow.merge.TopK(0.2), gradients, 2):
        whole = (gradient + before).reshape(DEVICES, -1)
        sent = whole - kept.reshape(DEVICES, -1)
        for mine, all_mine in zip(sent, whole, strict=True):
            assert np.count_nonzero(mine) == 3
            assert np.abs(mine[mine != 0]).min() >= np.sort(np.abs(all_mine))[-3]
        before = kept


def test_rounding_is_lost_without_feedback():
    program = ow.SGD(0.0).minimize(linear, jnp.zeros(7), whole_numbers((7,), 1000))
    assert not [
        v
        for v in ow.replicate(program, DEVICES, ow.merge.LowPrecision(feedback=False)).state
        if "error" in v.name
    ]
    x = np.full((DEVICES, 7), 257, "float32")  # between two bfloat16 numbers
    step = ow.compile(
        ow.replicate(program, DEVICES, ow.merge.LowPrecision(feedback=False)),
        fetch=["low_precision(grad(w))"],
    )
    _, out = step(step.init(jnp.zeros(7)), x)
    np.testing.assert_array_equal(out["low_precision(grad(w))"], np.full(7, 256))
    _, merged, kept = sent_and_kept(ow.merge.LowPrecision(), [x], 1)[0]
    np.testing.assert_array_equal(merged + kept.mean(0), np.full(7, 257))


def test_each_device_keeps_the_rest_of_its_own():
    gradients = [whole_numbers((5, 3), 100)]
    _, _, kept = sent_and_kept(ow.merge.TopK(0.2), gradients, 1)[0]
    assert len({k.tobytes() for k in kept}) == DEVICES


def test_power_iteration_keeps_what_two_thin_matrices_cannot_say():
    gradients = [whole_numbers((8, 6), 9) for _ in range(3)]
    before = np.zeros_like(gradients[0])
    for gradient, merged, kept in sent_and_kept(ow.merge.PowerSGD(1), gradients):
        np.testing.assert_allclose(kept, gradient + before - merged, 1e-5, 1e-4)
        assert np.linalg.matrix_rank(merged, tol=1e-3) == 1
        before = kept


def test_power_iteration_is_exact_for_a_matrix_of_its_rank():
    """One power iteration finds all of a matrix whose rank it has."""
    column, row = whole_numbers((8, 1), 3), np.arange(1, 7, dtype="float32")
    gradient, merged, kept = sent_and_kept(ow.merge.PowerSGD(1), [column * row], 1)[0]
    np.testing.assert_allclose(merged, gradient.mean(0), 1e-4, 1e-4)
    np.testing.assert_allclose(kept.mean(0), np.zeros((8, 6)), atol=1e-4)


def test_power_iteration_leaves_alone_what_it_cannot_shorten():
    program = ow.SGD(0.1).minimize(linear, jnp.zeros((2, 2)), whole_numbers((2, 2), 3))
    replicated = ow.replicate(program, DEVICES, ow.merge.PowerSGD(2))
    assert [v.name for v in replicated.state] == [v.name for v in program.state]


# ---------------------------------------------------------------- learning


def regression():
    x, y = ow.data("x", (None, FEATURES)), ow.data("y", (None, 3))
    return ow.layer.mse(ow.layer.fc(x, 3, name="last"), y)


def classification():
    x, y = ow.data("x", (None, FEATURES)), ow.data("y", (None,), "int32")
    return ow.layer.cross_entropy(ow.layer.fc(x, 3, name="last"), y)


def task(network):
    """Data with noise in it, so that the least loss is not zero, and 2 % of it says something."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=(32, FEATURES)).astype("float32")
    scores = (x @ rng.normal(size=(FEATURES, 3)) + rng.normal(0, 1.5, (32, 3))).astype("float32")
    return x, scores if network is regression else scores.argmax(1).astype("int32")


@cache
def learning(network):
    """The Program, and the loss on the whole batch as a Step."""
    program = ow.SGD(0.2).minimize(ow.trace(network, batch_size=32))
    return program, ow.compile(ow.for_test(program))


FIRST = {"last/w": RNG.normal(size=(FEATURES, 3)).astype("float32"), "last/b": np.zeros(3, "float32")}


def final_loss(network, merge, steps=200):
    program, whole = learning(network)
    step = ow.Step(
        program if merge is None else ow.replicate(program, DEVICES, merge), (), False, ahead=False
    )
    x, y = task(network)

    @jax.jit
    def trained(state):
        return jax.lax.scan(lambda s, _: (step(s, x, y)[0], None), state, None, steps)[0]

    state = trained(step.init(FIRST))
    return float(whole(whole.init({p.name: state[p.name] for p in program.parameters}), x, y)[1].loss)


@pytest.mark.parametrize(
    ("network", "merges"),
    [
        (regression, [ow.merge.LowPrecision(), ow.merge.TopK(0.25), ow.merge.LocalSGD(4)]),
        (classification, [ow.merge.TopK(0.25), ow.merge.PowerSGD(1), ow.merge.DiLoCo(4)]),
    ],
    ids=["regression", "classification"],
)
def test_what_is_left_out_costs_at_most_two_percent(network, merges):
    exact = final_loss(network, None)
    assert exact > 0.05
    for merge in merges:
        assert final_loss(network, merge) <= 1.02 * exact, merge


# ---------------------------------------------------------------- a strategy of one's own


class Signs(ow.Merge):
    """The majority's sign, as large as the mean, and what that leaves out kept for later."""

    exact = False

    def init(self, gradient):
        return {"rest": jnp.zeros_like(gradient)}

    def merge(self, gradient, kept, devices):
        whole = gradient + kept["rest"]
        size = devices.mean(jnp.mean(jnp.abs(whole)))
        merged = size * jnp.sign(devices.sum(jnp.sign(whole)))
        return merged, {"rest": whole - merged}


def test_a_strategy_in_ten_lines():
    program = ow.replicate(ow.SGD(0.02).minimize(ow.trace(classification, batch_size=32)), DEVICES, Signs())
    merges = [op for op in program.ops if op.type == "signs"]
    assert [op.made_by for op in merges] == ["collective"] * 2
    rest = program["grad(last/b)/rest"]
    assert rest.placement is ow.Placement.PER_REPLICA
    step = ow.compile(program)
    state, losses = step.init(), []
    assert state[rest].shape == (DEVICES, 3)
    for _ in range(100):
        state, out = step(state, *task(classification))
        losses.append(float(out.loss))
    assert losses[-1] < 0.8 * losses[0]


def test_strategies_are_compared_by_what_they_are():
    assert ow.merge.Bucketed(8) == ow.merge.Bucketed(8) != ow.merge.Bucketed(9)
    assert ow.merge.TopK(0.5) != ow.merge.LowPrecision()
    with pytest.raises(ow.ArgumentError, match="TopK: ratio is 2; expected a share"):
        ow.merge.TopK(2)


# ---------------------------------------------------------------- buckets


def deep(layers=4):
    x, y = ow.data("x", (None, FEATURES)), ow.data("y", (None,), "int32")
    for i in range(layers):
        x = ow.layer.fc(x, FEATURES, act="tanh", name=f"layer_{i}")
    return ow.layer.cross_entropy(x, y)


def deep_data(rows):
    return np.ones((rows, FEATURES), "float32"), np.zeros(rows, "int32")


def buckets(program, kind="bucketed"):
    return [[v.name for v in op.inputs] for op in program.ops if op.type == kind]


def test_buckets_hold_the_gradients_in_the_order_in_which_they_are_made():
    program = ow.SGD(0.1).minimize(ow.trace(deep, batch_size=ROWS))
    found = buckets(ow.replicate(program, DEVICES, ow.merge.Bucketed(200)))
    assert found == [[f"grad(layer_{i}/{p})" for i in pair for p in ("b", "w")] for pair in ((3, 2), (1, 0))]


def test_a_bucket_is_sent_as_soon_as_it_is_full():
    program = ow.replicate(
        ow.SGD(0.1).minimize(ow.trace(deep, batch_size=ROWS)), DEVICES, ow.merge.Bucketed(200)
    )
    order = [op.type if op.type == "bucketed" else str(op.made_by) for op in program.ops]
    first = order.index("bucketed")
    assert "backward" in order[first:]
    assert "backward" not in order[order.index("bucketed", first + 1) :]


def test_buckets_are_the_same_for_every_batch_size_and_every_trace():
    programs = [ow.SGD(0.1).minimize(ow.trace(deep, batch_size=rows)) for rows in (ROWS, ROWS, 2 * ROWS)]
    merge = ow.merge.Bucketed(200, ow.merge.LowPrecision())
    replicated = [ow.replicate(p, DEVICES, merge) for p in programs]
    assert len({str(buckets(p)) for p in replicated}) == 1
    kept = [[(v.name, v.shape) for v in p.state if "error" in v.name] for p in replicated]
    assert kept[0] == kept[1] == kept[2] == [(f"grad(layer_{i}/b)/error", (84,)) for i in (3, 1)]


def test_what_a_bucket_keeps_stays_when_the_batch_size_changes():
    program = ow.SGD(0.1).minimize(ow.trace(lambda: deep(1), batch_size=ROWS))
    step = ow.compile(ow.replicate(program, DEVICES, ow.merge.Bucketed(200, ow.merge.TopK(0.1))))
    state, _ = step(step.init(), *deep_data(ROWS))
    kept = np.asarray(state["grad(layer_0/b)/error"])
    assert kept.any()
    state, _ = step(state, *deep_data(2 * ROWS))
    assert not np.array_equal(kept, state["grad(layer_0/b)/error"])
    assert step.traces == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex64"])
def test_no_gradient_is_padded_to_the_length_of_its_bucket(dtype):
    def loss(w, x):
        h = jnp.abs(w["b"] + x.astype(dtype) @ w["w"]).astype(dtype)
        return jnp.mean(jnp.abs(w["c"] + h @ w["v"])).astype("float32")

    w = {name: jnp.ones(3, dtype) for name in "bc"} | {
        "w": jnp.ones((4, 3), dtype),
        "v": jnp.ones((3, 3), dtype),
    }
    x = jnp.arange(4.0 * ROWS).reshape(ROWS, 4)
    step = ow.compile(ow.replicate(ow.SGD(0.1).minimize(loss, w, x), DEVICES, ow.merge.Bucketed()))
    state = step.init(w)
    text = step.executable(state, x).text
    assert "all-reduce" in text
    assert " pad(" not in text
    alone = ow.compile(ow.SGD(0.1).minimize(loss, w, x))
    found, expected = (s(s.init(w), x)[0].parameters for s in (step, alone))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(*(np.asarray(v, "complex64") for v in (a, b)), rtol=1e-2)


def test_gradients_of_two_dtypes_are_never_in_one_bucket():
    def loss(w, x):
        return jnp.mean((x @ w["a"]) * w["b"].astype("float32") + w["c"])

    w = {"a": jnp.ones(3), "b": jnp.ones(1, "bfloat16"), "c": jnp.ones(2 * ROWS // DEVICES)[:1]}
    program = ow.SGD(0.1).minimize(loss, w, jnp.ones((ROWS, 3)))
    replicated = ow.replicate(program, DEVICES, ow.merge.Bucketed())
    dtypes = [{replicated[name].dtype for name in bucket} for bucket in buckets(replicated)]
    assert sum(map(len, buckets(replicated))) == 3
    assert all(len(d) == 1 for d in dtypes)


# ---------------------------------------------------------------- sharded


def bytes_on(device, arrays):
    """What these arrays take of one device's memory."""
    return sum(s.data.nbytes for a in arrays for s in a.addressable_shards if s.device == device)


@pytest.mark.parametrize("devices", [2, 8])
def test_slots_take_one_part_of_their_memory_on_each_device(devices):
    def network():
        x, y = ow.data("x", (None, 24)), ow.data("y", (None,), "int32")
        return ow.layer.cross_entropy(ow.layer.fc(x, 31), y)

    program = ow.Momentum(0.1).minimize(ow.trace(network, batch_size=ROWS))
    data = np.ones((ROWS, 24), "float32"), np.zeros(ROWS, "int32")
    step = ow.compile(ow.replicate(program, devices, ow.Sharded()))
    state, _ = step(step.init(), *data)
    slots = [state[v.name] for v in step.program.state if v.name.endswith("/velocity")]
    assert len(slots) == 2
    for device in jax.devices()[:devices]:
        assert bytes_on(device, slots) == pytest.approx(4 * (24 * 31 + 31) / devices, rel=0.05)


def test_sizes_that_devices_do_not_divide_and_that_are_less_than_their_number():
    def loss(w, x):
        return jnp.mean((x @ w["odd"] * w["one"] + w["two"].sum()) ** 2)

    rng = np.random.default_rng(0)
    w = {"odd": jnp.ones(7), "one": jnp.float32(0.5), "two": jnp.ones(2)}
    x = rng.normal(size=(ROWS, 7)).astype("float32")
    program = ow.Adam(0.05).minimize(loss, w, x)
    replicated = ow.replicate(program, 8, ow.Sharded())
    assert {v.name: v.shape for v in replicated.state if v.name.endswith("/mean")} == {
        "odd/mean": (1,),
        "one/mean": (1,),
        "two/mean": (1,),
    }
    states = []
    for p in (program, replicated):
        step = ow.compile(p)
        state = step.init(w)
        for _ in range(10):
            state, _ = step(state, x)
        states.append(state)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-5), *(s.parameters for s in states))
    for name, size in (("odd", 7), ("one", 1), ("two", 2)):
        slot = np.asarray(states[1][f"{name}/variance"])
        np.testing.assert_allclose(slot[:size], np.ravel(states[0][f"{name}/variance"]), 1e-4)
        assert not slot[size:].any()


class Muon(ow.Optimizer):
    type = ow.UpdateType.PER_MATRIX
    rate: float = 0.1

    def update(self, parameter, gradient, slots):
        return parameter - self.rate * gradient / (1e-3 + jnp.linalg.norm(gradient)), slots


class Together(ow.Optimizer):
    type = ow.UpdateType.ACROSS
    rate: float = 0.1

    def update(self, parameters, gradients, slots):
        norm = jnp.sqrt(sum(jnp.sum(g**2) for g in gradients))
        return tuple(p - self.rate * g / norm for p, g in zip(parameters, gradients, strict=True)), slots


EXACT = {
    "Average": ow.Average(),
    "Bucketed": ow.merge.Bucketed(),
    "PowerSGD": ow.merge.PowerSGD(2),
    "Sharded": ow.Sharded(),
    "TopK": ow.merge.TopK(1.0),
}


@pytest.mark.parametrize("name", EXACT)
def test_a_parameter_without_numbers_is_left_alone(name):
    """Such as the bias of a layer that has none, or the weights of no experts."""

    def loss(w, x):
        return jnp.mean((x @ w["w"]) ** 2) + jnp.sum(x[:, :0] @ w["none"])

    w = {"w": jnp.ones((4, 3)), "none": jnp.zeros((0, 5))}
    x = np.random.default_rng(0).normal(size=(ROWS, 4)).astype("float32")
    program = ow.Momentum(0.05).minimize(loss, w, x)
    states = []
    for p in (program, ow.replicate(program, DEVICES, EXACT[name])):
        step = ow.compile(p)
        state = step.init(w)
        for _ in range(3):
            state, _ = step(state, x)
        states.append(state.parameters)
    np.testing.assert_allclose(states[1]["w"], states[0]["w"], 1e-5)
    assert states[1]["none"].shape == (0, 5)


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (Muon(), r"Muon looks at them per matrix. Merge with Average\(\) or Bucketed\(\)"),
        (Together(), r"Together looks at them across parameters. Merge with Average\(\) or Bucketed\(\)"),
        (
            ow.Adam(slot_dtype="int8"),
            r"slots of int8 are kept in blocks of the whole. Merge with Average\(\)",
        ),
    ],
)
def test_rules_that_look_further_are_refused_by_name(optimizer, message):
    program = optimizer.minimize(ow.trace(classification, batch_size=32))
    with pytest.raises(ow.GraphError, match=message):
        ow.replicate(program, DEVICES, ow.Sharded())
    ow.replicate(program, DEVICES, ow.merge.Bucketed())


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ow.merge.PowerSGD(1.5), r"PowerSGD: rank is 1\.5; expected a whole number"),
        (lambda: ow.merge.PowerSGD(0), r"PowerSGD: rank is 0"),
        (
            lambda: ow.merge.LowPrecision("int7"),
            r"LowPrecision: dtype is 'int7'; expected a dtype of real numbers",
        ),
        (lambda: ow.merge.LowPrecision("int8"), r"LowPrecision: dtype is 'int8'"),
        (lambda: ow.merge.LowPrecision(feedback="no"), r"LowPrecision: feedback is 'no'"),
        (lambda: ow.merge.TopK("0.1"), r"TopK: ratio is '0\.1'; expected a share"),
        (lambda: ow.merge.TopK(float("nan")), r"TopK: ratio is nan"),
    ],
)
def test_a_strategy_refuses_what_it_cannot_be(make, words):
    with pytest.raises(ow.ArgumentError, match=words):
        make()


HUGE = jax.ShapeDtypeStruct((2**16, 2**17), np.float32)  # 2**33 numbers, traced and never made


def slices(jaxpr):
    """Every ``dynamic_slice`` of a jaxpr: the shape that it cuts."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dynamic_slice":
            yield equation.invars[0].aval.shape
        for inner in equation.params.values():
            if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                yield from slices(getattr(inner, "jaxpr", inner))


def test_a_part_of_more_numbers_than_an_int32_counts_is_cut_by_rows():
    """A place in the whole vector would wrap around, and JAX would clamp it to another place in silence."""
    program = ow.SGD(0.1).minimize(lambda w, x: jnp.mean(w) * jnp.mean(x), HUGE, np.ones(8, "f4"))
    body = next(op.body for op in ow.replicate(program, 8, ow.Sharded()).ops if op.type == "part")
    assert list(slices(body.closed.jaxpr)) == [(8, 2**30)]


def test_places_that_an_int32_cannot_count_are_not_sent():
    program = ow.SGD(0.1).minimize(lambda w, x: jnp.mean(w) * jnp.mean(x), HUGE, np.ones(8, "f4"))
    with pytest.raises(ow.GraphError, match=r"TopK sends places as int32.*8589934592 numbers"):
        ow.replicate(program, 8, ow.merge.TopK())


def test_a_bucket_ends_before_its_places_overflow():
    three = [ow.Variable(name, (2**30,), np.dtype("f4")) for name in "abc"]
    assert [len(bucket) for bucket in ow.merge.Bucketed(2**40).groups(three)] == [1, 1, 1]
    assert [len(bucket) for bucket in ow.merge.Bucketed(2**40).groups([*three[:1], *small(3)])] == [4]


def test_a_group_whose_places_overflow_is_refused():
    class AllAtOnce(ow.Average):
        def groups(self, gradients):
            return [gradients]

    half = jax.ShapeDtypeStruct((2**30,), np.float32)
    program = ow.SGD(0.1).minimize(lambda w, x: jnp.mean(w[0] + w[1]) * jnp.mean(x), [half, half], np.ones(8))
    with pytest.raises(
        ow.GraphError, match=r"Gradients of 2147483648 numbers .* Let groups\(\) return smaller"
    ):
        ow.replicate(program, 8, AllAtOnce())


def small(count):
    return [ow.Variable(f"small {i}", (2,), np.dtype("f4")) for i in range(count)]
