"""Statistics inside the step: the numbers of NumPy, at the steps asked for, the training unchanged."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import onward as ow
from onward.develop.guard import guard
from onward.develop.watch.statistics import SCALARS, Statistic, statistic_of
from onward.develop.watch.watch import unwatched, watch, watching_of

RNG = np.random.default_rng(0)
PARAMS = {"a": RNG.normal(size=(3, 4)).astype("float32"), "b": np.ones(4, "float32")}
BATCHES = [RNG.normal(size=(16, 3)).astype("float32") for _ in range(7)]
NAMES = ("tanh", "dot_general")


def loss(params, x):
    return jnp.mean(jnp.tanh(x @ params["a"] + params["b"]) ** 2)


BASE = ow.Momentum(0.1).minimize(loss, PARAMS, BATCHES[0])
EVERYTHING = {
    "gradients": True,
    "updates": True,
    "parameters": True,
    "activations": NAMES,
    "statistics": ["norm", "std", "max", "zeros", "ratio", "histogram"],
    "bins": 5,
    "every": 3,
}
WATCHED = watch(BASE, **EVERYTHING)
SOME = watch(BASE, "tanh", statistics=["norm", "histogram"], bins=5, every=3)
SOME = watch(SOME, gradients=True, updates="a", parameters="a", statistics="norm", every=3)


@cache
def step_of_some():
    return ow.compile(SOME)


def numpy_of(name, x, base=None):
    """A statistic by NumPy alone, in float64."""
    x = np.abs(x) if np.iscomplexobj(x) else np.asarray(x, np.float64)
    if name == "ratio":
        return np.linalg.norm(x) / np.linalg.norm(np.asarray(base, np.float64))
    if name == "norm":
        return np.linalg.norm(x)
    if not x.size:
        return np.nan
    return {
        "rms": lambda: np.sqrt(np.mean(x**2)),
        "mean": lambda: np.mean(x),
        "std": lambda: np.std(x),
        "min": lambda: np.min(x),
        "max": lambda: np.max(x),
        "zeros": lambda: np.mean(x == 0),
        "nonfinite": lambda: np.mean(~np.isfinite(x)),
    }[name]()


def flat(watched):
    """Every number that was watched, by (label, statistic); histograms as ends and counts."""
    return {
        (label, name): [x.low, x.high, *x.counts] if name == "histogram" else x
        for label, found in watched.items()
        for name, x in found.items()
    }


def run(program, steps=7, params=PARAMS, **options):
    """The State after some steps, and what each step told."""
    step = ow.compile(program, **options)
    state, told = step.init(params), []
    for x in BATCHES[:steps]:
        state, out = step(state, x)
        told.append(out.watched)
    return state, told


@pytest.fixture(scope="module")
def reference():
    """The State and what was told on one device."""
    return run(WATCHED)


def assert_told(watched, other, rtol=1e-5, atol=1e-6):
    """The other tells the same numbers, and perhaps more."""
    ours, theirs = flat(watched), flat(other)
    assert ours.keys() <= theirs.keys()
    for key in ours:
        np.testing.assert_allclose(ours[key], theirs[key], rtol=rtol, atol=atol, err_msg=str(key))


ARRAYS = {
    "matrix": RNG.normal(size=(7, 5)).astype("float32"),
    "scalar": np.float32(-2.5),
    "empty": np.zeros((0, 3), "float32"),
    "sparse": np.array([0.0, -0.0, 3.0, 0.0], "float32"),
    "bfloat16": RNG.normal(size=(40,)).astype(jnp.bfloat16),
    "float16": RNG.normal(size=(40,)).astype("float16"),
    "int32": np.array([[3, 0], [-7, 2]], "int32"),
    "uint8": np.arange(9, dtype="uint8"),
    "bool": np.array([True, False, True]),
    "complex": np.array([3 + 4j, 0, 1j], "complex64"),
    "huge": np.full(10, 3e30, "float32"),
    "tiny": np.full(10, 3e-30, "float32"),
    "far": (1000 + RNG.normal(size=500) * 1e-2).astype("float32"),
    "cube": RNG.normal(size=(2, 3, 4)).astype("float32"),
}


@cache
def told_of_arrays():
    """Every statistic of each array, by one program."""
    base = np.full(3, 2.0, "float32")

    def told(arrays):
        return {kind: {name: s(x, base=base) for name, s in SCALARS.items()} for kind, x in arrays.items()}

    return base, jax.jit(told)(ARRAYS)


@pytest.mark.parametrize("kind", ARRAYS)
def test_each_statistic_is_that_of_numpy(kind):
    base, told = told_of_arrays()
    x = ARRAYS[kind]
    for name, found in told[kind].items():
        assert found.shape == ()
        assert found.dtype == jnp.float32
        tolerance = 1e-2 if (kind, name) == ("far", "std") else 1e-5
        want = numpy_of(name, x, base)
        np.testing.assert_allclose(found, want, rtol=tolerance, atol=1e-30, err_msg=name)


def test_numbers_that_are_none_are_counted_and_not_hidden():
    x, infinite = jnp.array([1.0, np.nan, np.inf, 0.0]), jnp.array([np.inf, 1.0])
    told = jax.jit(lambda x, y: ({name: s(x, base=x) for name, s in SCALARS.items()}, SCALARS["norm"](y)))
    found, norm = told(x, infinite)
    assert (found["nonfinite"], found["zeros"]) == (0.5, 0.25)
    assert all(np.isnan(found[name]) for name in ("norm", "mean", "std", "min", "max"))
    assert float(norm) == np.inf


COUNTED = {
    "normal": RNG.normal(size=(9, 11)),
    "zeros": np.zeros(4),
    "empty": np.zeros(0),
    "scalar": np.float64(0.31171587),
    "integers": RNG.integers(0, 5, 30),
    "huge": [1e30, -1e30],
}
COUNTED = {kind: np.asarray(x, "float32") for kind, x in COUNTED.items()}
EIGHT = statistic_of("histogram", 8)


@cache
def histograms():
    return jax.jit(lambda arrays: {kind: EIGHT(x) for kind, x in arrays.items()})(COUNTED)


@pytest.mark.parametrize("kind", COUNTED)
def test_a_histogram_is_that_of_numpy(kind):
    x, found = COUNTED[kind], EIGHT.shown(np.asarray(histograms()[kind]))
    low, high = (x.min(), x.max()) if x.size else (0, 0)
    assert (found.low, found.high, found.counts.sum()) == (low, high, x.size)
    assert found.counts.min() >= 0
    if low < high:
        counts, edges = np.histogram(x.astype(np.float64), 8)
        np.testing.assert_allclose(found.edges, edges, rtol=1e-6, atol=1e-6)
        np.testing.assert_array_equal(found.counts, counts)


def test_a_histogram_leaves_out_what_is_not_finite():
    statistic = statistic_of("histogram", 2)
    found = jax.jit(statistic)(jnp.array([0.0, np.nan, 1.0, np.inf, 4.0, -np.inf]))
    np.testing.assert_array_equal(found, [0, 4, 2, 1])


def test_values_are_those_that_can_be_fetched(reference):
    names = [*NAMES, "grad(a)", "grad(b)"]
    fetching = ow.compile(BASE, fetch=names, donate=False)
    state = fetching.init(PARAMS)
    told = reference[1]
    for x, watched in zip(BATCHES, told, strict=True):
        before = {name: np.asarray(state[name]) for name in PARAMS}
        state, out = fetching(state, x)
        values = {name: np.asarray(out[name]) for name in names} | before
        values |= {f"update({name})": np.asarray(state[name]) - before[name] for name in PARAMS}
        for (label, name), found in flat(watched).items():
            if label in values and name != "histogram":
                base = before[label[-2]] if label.startswith("update") else None
                want = numpy_of(name, values[label], base)
                np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-6, err_msg=f"{label} {name}")
            elif label in values and found[1] - found[0] > 1e-3:
                counts = np.histogram(values[label], 5)[0]
                assert np.abs(np.cumsum(found[2:] - counts)).max() <= 1  # one may lie on an edge
        for group in ("grad", "update"):
            whole = watched.get(f"all {group}{'ients' if group == 'grad' else 's'}")
            if whole:
                parts = [np.ravel(values[f"{group}({name})"]) for name in PARAMS]
                np.testing.assert_allclose(whole["norm"], np.linalg.norm(np.concatenate(parts)), rtol=1e-5)
    assert any(told)


def test_it_looks_at_the_first_step_and_every_third_after_it(reference):
    told = reference[1]
    assert [w.step for w in told] == [1, None, None, 4, None, None, 7]
    assert [len(w) for w in told] == [11, 0, 0, 11, 0, 0, 11]
    with pytest.raises(ow.UnknownNameError, match="Nothing was watched in this step"):
        told[1]["grad(a)"]
    with pytest.raises(ow.UnknownNameError, match=r"nearest names are .*'grad\(a\)'"):
        told[0]["gradd(a)"]


def test_the_training_is_the_same(reference):
    state, _ = run(BASE)
    for name in state:
        np.testing.assert_allclose(reference[0][name], state[name], rtol=1e-6, atol=1e-7)
    assert set(reference[0]) == set(state)
    assert unwatched(WATCHED).ops == BASE.ops
    assert WATCHED.next_state == BASE.next_state
    assert WATCHED.outputs == BASE.outputs


PLACES = {
    "replicated": lambda p: ow.replicate(p, 8),
    "sharded": lambda p: ow.replicate(p, 4, ow.Sharded()),
    "bucketed": lambda p: ow.replicate(p, 2, ow.merge.Bucketed(64)),
    "accumulated": lambda p: ow.accumulate(p, 4),
    "both": lambda p: ow.replicate(ow.accumulate(p, 2), 4),
    "guarded": guard,
}


ROWS = [*((place, True) for place in PLACES), ("replicated", False), ("sharded", False)]
ROLES = {"gradients": True, "updates": True, "parameters": True, "activations": NAMES}
GROUPS = (["norm"], ["std"], ["max", "zeros"], ["histogram"])


def in_turns(turn):
    """The statistics of each role; over four turns each role has each, and each turn has all."""
    chosen = {role: GROUPS[(i + turn) % 4] for i, role in enumerate(ROLES)}
    return chosen | {"updates": [*chosen["updates"], "ratio"]}


def watched_in_turns(program, turn):
    for role, statistics in in_turns(turn).items():
        program = watch(program, **{role: ROLES[role]}, statistics=statistics, bins=5, every=3)
    return program


def role_of(label):
    if "grad" in label or "update" in label:
        return "gradients" if "grad" in label else "updates"
    return "activations" if label in NAMES else "parameters"


@pytest.mark.parametrize(("place", "first"), ROWS)
def test_everywhere_the_numbers_are_those_of_one_device(place, first, reference):
    turn = ROWS.index((place, first))
    put = PLACES[place]
    program = put(watched_in_turns(BASE, turn)) if first else watched_in_turns(put(BASE), turn)
    told = run(program, steps=4)[1]
    assert [w.step for w in told] == [1, None, None, 4]
    for i in (0, 3):
        ours, theirs = flat(told[i]), flat(reference[1][i])
        assert ours.keys() == {k for k in theirs if k[1] in in_turns(turn)[role_of(k[0])]}
        for key, found in ours.items():
            want = theirs[key]
            if key[1] == "histogram":
                assert sum(found[2:]) == sum(want[2:])
            else:
                np.testing.assert_allclose(found, want, rtol=2e-4, atol=2e-6, err_msg=str(key))


def test_a_gradient_by_name_is_the_one_that_all_devices_share(reference):
    for program in (
        ow.replicate(watch(BASE, "grad(a)", every=1), 4),
        watch(ow.replicate(BASE, 4), "grad(a)"),
    ):
        first = run(program, steps=1)[1][0]
        assert list(first) == ["grad(a)"]
        norm = reference[1][0]["grad(a)"]["norm"]
        np.testing.assert_allclose(first["grad(a)"]["norm"], norm, rtol=1e-5)


def test_what_differs_from_device_to_device_counts_all_together():
    program = ow.replicate(watch(BASE, "tanh", every=1, statistics=["max", "min", "zeros", "std"]), 8)
    x = BATCHES[0]
    values = np.tanh(x @ PARAMS["a"] + PARAMS["b"])
    found = run(program, steps=1)[1][0]["tanh"]
    want = {"max": values.max(), "min": values.min(), "zeros": 0.0, "std": values.std()}
    np.testing.assert_allclose([found[k] for k in want], list(want.values()), rtol=1e-5)


def deep(params, x):
    for w in params:
        x = x + jnp.tanh(x @ w)
    return jnp.mean(x**2)


def test_rolled_layers_hand_out_what_is_watched():
    params = [(0.1 * RNG.normal(size=(3, 3))).astype("float32") for _ in range(4)]
    base = ow.SGD(0.1).minimize(deep, params, BATCHES[0])
    chosen = {"statistics": ["norm", "mean"], "activations": ["tanh_2", "tanh"]}
    program = watch(base, gradients=True, updates=True, every=2, **chosen)
    apart = run(program, 3, params, roll=False)[1]
    rolled = run(program, 3, params, roll=True)
    assert [w.step for w in rolled[1]] == [1, None, 3]
    assert rolled[1][2].keys() == apart[2].keys()
    assert_told(rolled[1][2], apart[2], rtol=1e-4)
    within = watch(base, "grad(tanh_2)", every=1, statistics="norm")
    assert run(within, 1, params)[1][0]["grad(tanh_2)"]["norm"] > 0
    with pytest.raises(ow.GraphError, match=r"'grad\(tanh_2\)' exists no more .* roll=False"):
        ow.compile(within, roll=True)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_mixed_precision_shows_gradients_without_loss_scale(dtype, reference):
    told = run(ow.mixed_precision(SOME, dtype), steps=1)[1][0]
    theirs = reference[1][0]
    for label in ("grad(a)", "grad(b)", "all gradients", "update(a)"):
        np.testing.assert_allclose(told[label]["norm"], theirs[label]["norm"], rtol=0.05)


def test_guard_shows_the_gradient_of_a_step_that_is_left_out():
    step = ow.compile(watch(guard(BASE), gradients=True, updates=True, every=1))
    state, out = step(step.init(PARAMS), np.full_like(BATCHES[0], np.inf))
    assert out.watched["grad(a)"]["nonfinite"] > 0
    assert out.watched["update(a)"]["max"] == 0
    assert int(state["skipped"]) == 1


def test_packed_storage_and_single_buffers_tell_the_same():
    params = {f"w{i}": np.full((2, 2), 0.1 * i, "float32") for i in range(24)}

    def many(params, x):
        return sum(jnp.sum(w**2) for w in params.values()) * jnp.mean(x)

    base = ow.Adam(0.1).minimize(many, params, BATCHES[0])
    program = watch(base, gradients=True, statistics="norm", every=1)
    step = ow.compile(program)
    assert step.storage is not None
    _, out = step(step.init(params), np.ones_like(BATCHES[0]))
    assert len(out.watched) == 25
    for i in range(24):
        want = np.linalg.norm(2 * params[f"w{i}"])
        np.testing.assert_allclose(out.watched[f"grad(w{i})"]["norm"], want, rtol=1e-5)


def test_many_steps_in_one_call(reference):
    step = step_of_some()
    _, outs = step.run(step.init(PARAMS), BATCHES, steps=3)
    assert [w.step for w in outs.watched] == [1, 4, 7]
    assert {name for _, name in flat(outs.watched[2])} == {"norm", "histogram"}
    assert_told(outs.watched[2], reference[1][6], rtol=1e-4)


def test_the_state_is_donated_and_what_was_told_stays_readable():
    step = step_of_some()
    first = step.init(PARAMS)
    state, out = step(first, BATCHES[0])
    told = out.watched
    step(state, BATCHES[1])
    assert first.is_spent
    assert told["a"]["norm"] == pytest.approx(np.linalg.norm(PARAMS["a"]))


def test_two_watches_each_with_its_own_period():
    program = watch(
        watch(BASE, gradients=True, statistics="norm", every=2), "tanh", statistics="max", every=3
    )
    told = run(program, steps=5)[1]
    assert [sorted(w) for w in told] == [
        ["all gradients", "grad(a)", "grad(b)", "tanh"],
        [],
        ["all gradients", "grad(a)", "grad(b)"],
        ["tanh"],
        ["all gradients", "grad(a)", "grad(b)"],
    ]


def test_a_statistic_of_ones_own():
    quarters = Statistic("signs", lambda x, over: jnp.stack([over.count(x < 0), over.count(x > 0)]))
    program = watch(ow.replicate(BASE, 4), "tanh", statistics=[quarters, "max"], every=1)
    found = run(program, steps=1)[1][0]["tanh"]["signs"]
    values = np.tanh(BATCHES[0] @ PARAMS["a"] + PARAMS["b"])
    np.testing.assert_array_equal(found, [(values < 0).sum(), (values > 0).sum()])


def test_a_program_without_update_is_watched_at_every_step():
    program = watch(ow.trace(loss, PARAMS, BATCHES[0]), "tanh", every=1)
    told = run(program, steps=2)[1]
    assert [w.step for w in told] == [0, 0]
    values = np.tanh(BATCHES[1] @ PARAMS["a"] + PARAMS["b"])
    assert told[1]["tanh"]["max"] == pytest.approx(values.max(), rel=1e-5)


def test_another_batch_and_the_parts_of_a_program():
    step = step_of_some()
    _, out = step(step.init(PARAMS), BATCHES[0][:5])
    assert out.watched["tanh"]["norm"] > 0
    assert not watching_of(ow.graph.forward_pass(WATCHED))
    assert [op.type for op in ow.graph.update_pass(WATCHED).ops] == [
        op.type for op in ow.graph.update_pass(BASE).ops
    ]
    assert ow.for_test(WATCHED).outputs


def test_random_keys_are_not_watched():
    def network():
        return jnp.mean(ow.layer.dropout(ow.layer.fc(ow.data("x", (8, 3)), 4), 0.5) ** 2)

    program = watch(ow.SGD(0.1).minimize(network), "*", every=1, statistics="norm")
    step = ow.compile(program)
    _, out = step(step.init(), BATCHES[0][:8])
    assert "key" not in out.watched
    assert out.watched["fc_0/w"]["norm"] > 0


def test_the_statistics_are_written_under_the_users_own_jit():
    step = step_of_some()

    @jax.jit
    def twice(state, x):
        state, _ = step(state, x)
        return step(state, x)

    _, out = twice(step.init(PARAMS), BATCHES[0])
    assert out.watched.step is None


def adopted(w, x):
    value, gradient = jax.value_and_grad(lambda w: jnp.sum(w * x))(w)
    return w - gradient, value


MISTAKES = {
    "nothing": (lambda: watch(BASE), ow.ArgumentError, "given nothing to watch"),
    "no match": (lambda: watch(BASE, "tahn"), ow.UnknownNameError, "nothing is named 'tahn'.*'tanh'"),
    "no parameter": (lambda: watch(BASE, gradients="c"), ow.UnknownNameError, "watch, gradients.*'c'"),
    "every": (lambda: watch(BASE, "tanh", every=0), ow.ArgumentError, "every is 0"),
    "bins": (lambda: watch(BASE, "tanh", bins=0.5), ow.ArgumentError, r"bins is 0\.5"),
    "statistic": (lambda: watch(BASE, "tanh", statistics="median"), ow.ArgumentError, "'median' is not a"),
    "twice": (
        lambda: watch(BASE, "tanh", statistics=["max", Statistic("max", len)]),
        ow.ArgumentError,
        "once",
    ),
    "ratio": (lambda: watch(BASE, "tanh", statistics="ratio"), ow.ArgumentError, "of updates only"),
    "counter": (
        lambda: watch(ow.trace(loss, PARAMS, BATCHES[0]), "tanh"),
        ow.GraphError,
        "no step counter.*every=1; or minimize first",
    ),
    "adopted": (
        lambda: watch(ow.adopt(adopted, jnp.ones(3), jnp.ones(3), carried=["w"]), gradients=True),
        ow.GraphError,
        "no step counter, so watch cannot tell every 10th step. Watch each step, every=1, and look at "
        "out.watched when you like: of an update that was adopted it is not known which number counts",
    ),
    "gradients": (
        lambda: watch(ow.trace(loss, PARAMS, BATCHES[0]), gradients=True, every=1),
        ow.GraphError,
        "has no gradients",
    ),
    "function": (lambda: watch(loss, "tanh"), ow.ArgumentError, "expected a Program"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_told(mistake):
    make, error, message = MISTAKES[mistake]
    with pytest.raises(error, match=message):
        make()
