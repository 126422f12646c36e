"""Replicated Programs at work: by pmap and by shard_map, clipped, in a Trainer and in a Session."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.compiled import compiled_once, together, training

import onward as ow

DEVICES, ROWS = 4, 8
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(18, 3)).astype("float32"), RNG.normal(size=(18, 2)).astype("float32")
BATCH = X[:ROWS], Y[:ROWS]
FEED = {"x": X[:ROWS], "y": Y[:ROWS]}


@pytest.fixture(scope="module", autouse=True)
def programs_compiled_once(tmp_path_factory):
    with compiled_once(tmp_path_factory.mktemp("cache")):
        yield


def network():
    x, y = ow.data("x", (None, 3)), ow.data("y", (None, 2))
    return ow.layer.mse(ow.layer.fc(x, 2), y)


@cache
def program_of(optimizer=None, make=network):
    return (optimizer or ow.Momentum(0.1)).minimize(ow.trace(make, batch_size=ROWS))


def bits(state):
    """Every value of a State as NumPy, keys too."""
    return {
        v.name: np.asarray(jax.random.key_data(x) if jnp.issubdtype(v.dtype, jax.dtypes.prng_key) else x)
        for v, x in zip(state.layout.variables, state.values, strict=True)
    }


def same(found, expected):
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def close(found, expected, rtol=1e-5, atol=1e-6):
    np.testing.assert_allclose(found, expected, rtol, atol)


# ---------------------------------------------------------------- by pmap and by shard_map

# In buckets, TopK; where devices meet, LowPrecision; DiLoCo is local as LocalSGD is.
MERGES = [
    ow.Average(),
    ow.merge.Bucketed(16, ow.merge.TopK(0.5)),
    ow.Sharded(),
    ow.merge.PowerSGD(1),
    ow.merge.DiLoCo(2, exchange=ow.merge.LowPrecision()),
]


def noisy():
    """All that may differ from device to device: statistics, dropout, counts, results over examples."""
    x, y = ow.data("x", (None, 3)), ow.data("y", (None, 2))
    positive = ow.state("positive", (), "int32")
    ow.assign(positive, positive + jnp.sum(y > 0, dtype="int32"))
    h = ow.layer.batch_norm(x, scale=False, offset=False, name="norm")
    h = ow.layer.dropout(h, 0.5, name="drop")
    out = ow.layer.fc(h, 2, name="last")
    return ow.layer.mse(out, y), {"out": out, "positive": jnp.sum(y > 0)}


@cache
def noisy_program():
    program = ow.append_backward(ow.trace(noisy, has_aux=True, batch_size=ROWS))
    return ow.append_update(ow.clip_by_global_norm(program, 0.5), ow.Momentum(0.01))


NOISY = [
    ow.Average(),
    ow.merge.DiLoCo(2, exchange=ow.merge.LowPrecision()),
]  # updates together, and each device its own


def quiet():
    """What differs from device to device without noise."""
    x, y = ow.data("x", (None, 3)), ow.data("y", (None, 2))
    out = ow.layer.fc(x, 2, name="last")
    return ow.layer.mse(out, y), {"out": out, "positive": jnp.sum(y > 0)}


@cache
def quiet_program():
    return ow.Momentum(0.01).minimize(ow.trace(quiet, has_aux=True, batch_size=ROWS))


FETCHED = ("grad(last/w)", "learning_rate")


@cache
def ways(merge):
    """The same step by both; what donates and what does not is compiled apart."""
    program = ow.replicate(noisy_program() if merge in NOISY else quiet_program(), DEVICES, merge)
    fetched = ("drop", "global_norm", *FETCHED) if merge in NOISY else FETCHED
    return (
        ow.compile(program, fetched, donate=merge in EXACT, by="shard_map"),
        ow.compile(program, fetched, donate=merge not in EXACT, by="pmap"),
    )


def ran(steps):
    """The state after each of some steps, and all that they returned."""
    state, found = steps[0].init(seed=3), []
    for step in steps:
        state, out = step(state, *BATCH)
        found.append((bits(state), {name: np.asarray(out[name]) for name in out.results.position}))
    return found


@pytest.mark.parametrize("merge", MERGES, ids=repr)
def test_pmap_and_shard_map_are_equal_bit_for_bit(merge):
    one, other = ways(merge)
    expected, found = ran([one] * 3), ran([other] * 3)
    same(found, expected)
    results = found[0][1]
    assert merge not in NOISY or results["drop"].shape == (ROWS, 3)
    assert results["grad(last/w)"].shape == (DEVICES, 3, 2)


@pytest.mark.parametrize("merge", [*NOISY, ow.Sharded()], ids=repr)
def test_a_state_of_one_goes_on_with_the_other(merge):
    one, other = ways(merge)
    expected = ran([one] * 4)
    same(ran([one, other, one, other]), expected)
    same(ran([other, other, one, one]), expected)


def test_arrays_lie_where_they_lie_by_the_other():
    one, other = ways(ow.Sharded())
    states = [step(step.init(seed=3), *BATCH)[0] for step in (one, other)]
    for x, y in zip(*(state.values for state in states), strict=True):
        assert x.sharding.is_equivalent_to(y.sharding, x.ndim)


def test_a_state_is_spent_if_its_buffers_are_donated():
    for merge in NOISY:
        for step, donates in zip(ways(merge), (merge in EXACT, merge not in EXACT), strict=True):
            state = step.init()
            step(state, *BATCH)
            assert state.is_spent is donates


def test_pmap_under_jit_and_at_another_batch_size():
    step = ow.compile(ow.replicate(program_of(), DEVICES), by="pmap", donate=False)
    state = step.init()
    expected, _ = step(state, *BATCH)
    found, _ = jax.jit(step)(state, *BATCH)
    for name in found:
        close(found[name], expected[name], 1e-6)
    _, out = step(state, X[:16], Y[:16])
    assert step.traces == 1
    alone = ow.compile(program_of(), donate=False)
    close(out.loss, alone(alone.init(), X[:16], Y[:16])[1].loss)


@pytest.mark.parametrize("by", ["xmap", "", None, "PMAP"])
def test_a_word_that_is_no_way(by):
    with pytest.raises(ow.ArgumentError, match=rf"by is {by!r}; expected 'shard_map' or 'pmap'"):
        ow.compile(ow.replicate(program_of(), DEVICES), by=by)


# ---------------------------------------------------------------- clipped by the norm of all gradients

PARAMETERS = {"a": RNG.normal(size=(3, 4)), "b": RNG.normal(size=(4, 2))}
MOST = 0.05


def mean_loss(w, x, y):
    return jnp.mean((jnp.tanh(x @ w["a"]) @ w["b"] - y) ** 2)


def sum_loss(w, x, y):
    return jnp.sum((jnp.tanh(x @ w["a"]) @ w["b"] - y) ** 2) / (2 * ROWS)


EXACT = [ow.Average(), ow.Sum(), ow.merge.Bucketed(16), ow.Sharded()]
INEXACT = [
    ow.merge.LowPrecision(),
    ow.merge.TopK(0.3),
    ow.merge.PowerSGD(1),
    ow.merge.Bucketed(16, ow.merge.TopK(0.3)),
]


def clipping(merge):
    """A training whose gradients are always too long."""
    loss = sum_loss if isinstance(merge, ow.Sum) else mean_loss
    types = [jax.ShapeDtypeStruct((ROWS, n), "float64") for n in (3, 2)]
    program = ow.clip_by_global_norm(ow.append_backward(ow.trace(loss, PARAMETERS, *types)), MOST)
    program = ow.append_update(program, ow.Momentum(0.05))
    return program if merge is None else ow.replicate(program, DEVICES, merge)


def names_of_merged(merge):
    return [f"{merge.name}(grad({name}))" for name in PARAMETERS]


@cache
def clipped():
    """For each merge, and for one device, the last state and the results of each step, compiled as one."""
    data = [np.stack([x[start : start + ROWS] for start in range(4)]).astype("float64") for x in (X, Y)]
    fetches = {merge: ["global_norm"] for merge in (None, *EXACT)}
    for merge in INEXACT:
        names = names_of_merged(merge)
        fetches[merge] = ["global_norm", *names, *(f"clip({name})" for name in names)]
    return together(
        {merge: training(clipping(merge), PARAMETERS, *data, fetch=fetch) for merge, fetch in fetches.items()}
    )


@pytest.mark.parametrize("merge", EXACT, ids=repr)
def test_exact_merges_clip_as_one_device_does(merge):
    with jax.enable_x64(True):
        (expected, one), (found, other) = clipped()[None], clipped()[merge]
        assert (one["global_norm"] > 2 * MOST).all()
        close(other["global_norm"], one["global_norm"], 1e-9)
        for name in ("a", "b"):
            close(found[name], expected[name], 1e-9, 1e-12)


def test_a_bucket_is_as_exact_as_what_is_in_it():
    assert ow.merge.Bucketed(16).exact
    assert not ow.merge.Bucketed(16, ow.merge.TopK(0.5)).exact


@pytest.mark.parametrize("merge", INEXACT, ids=repr)
def test_inexact_merges_clip_what_they_merged(merge):
    with jax.enable_x64(True):
        _, out = clipped()[merge]
    for step in range(4):
        merged = {name: out[name][step] for name in names_of_merged(merge)}
        norm = np.sqrt(sum((x**2).sum() for x in merged.values()))
        close(out["global_norm"][step], norm, 1e-12)
        assert norm > MOST
        for name, x in merged.items():
            close(out[f"clip({name})"][step], x * MOST / norm, 1e-12)


# ---------------------------------------------------------------- parts of parameters


def with_a_float_of_its_own():
    x, y = ow.data("x", (None, 3)), ow.data("y", (None, 2))
    mean = ow.state("mean", ())
    ow.assign(mean, 0.9 * mean + 0.1 * jnp.mean(y))
    return ow.layer.mse(ow.layer.fc(x, 2), y)


def test_sharded_averages_gradients_though_the_network_averages_something_too():
    found = {}
    for merge in (ow.Average(), ow.Sharded()):
        step = ow.compile(ow.replicate(program_of(ow.SGD(0.1), with_a_float_of_its_own), DEVICES, merge))
        state, _ = step(step.init(), *BATCH)
        found[merge] = np.asarray(state["fc_0/w"])
    close(*found.values())


def normalized():
    x, y = ow.data("x", (None, 3)), ow.data("y", (None, 2))
    return ow.layer.mse(ow.layer.fc(ow.layer.batch_norm(x), 2), y)


def test_sharded_averages_gradients_though_statistics_are_those_of_parts():
    program = program_of(ow.SGD(0.1), normalized)
    found = {}
    for merge in (ow.Average(), ow.Sharded()):
        step = ow.compile(ow.replicate(program, DEVICES, merge, sync_batch_norm=False))
        state, _ = step(step.init(), *BATCH)
        found[merge] = np.asarray(state["fc_0/w"])
    close(*found.values())


def test_sharded_with_a_slot_that_is_one_number():
    class Counted(ow.Optimizer):
        learning_rate: ow.Hyperparameter = 0.1

        def init(self, parameter):
            return {"count": jnp.zeros((), "int32")}

        def update(self, parameter, gradient, slots):
            count = slots["count"] + 1
            return parameter - self.learning_rate * gradient / count, {"count": count}

    step = ow.compile(ow.replicate(program_of(Counted()), DEVICES, ow.Sharded()))
    step(step.init(), *BATCH)


# ---------------------------------------------------------------- Trainer


def trainer_of(merge=None, devices=DEVICES, folder=None, seed=1, make=network, optimizer=None):
    model = ow.Model(make, seed=seed)
    return ow.Trainer(model, optimizer or ow.Momentum(0.1), devices=devices, merge=merge, checkpoints=folder)


def reader():
    return ow.batches((X[:16], Y[:16]), ROWS, shuffle=True, seed=3)


TESTS = [(X[:5], Y[:5]), (X[5:18], Y[5:18])]


def with_metrics():
    x, y = ow.data("x", (None, 3)), ow.data("y", (None, 2))
    out = ow.layer.fc(x, 2, act="tanh")
    return ow.layer.mse(out, y), {"largest": jnp.mean(jnp.max(out, 1)), "positive": jnp.sum(y > 0)}


@cache
def metrics_trainer(devices, merge=None, **options):
    trainer = ow.Trainer(
        ow.Model(with_metrics, seed=1, has_aux=True), ow.Adam(0.1), devices=devices, merge=merge
    )
    trainer.train(reader(), test=TESTS, **options)
    return trainer


@pytest.mark.parametrize("merge", [ow.Average(), ow.Sharded()], ids=repr)
def test_the_history_is_that_of_one_device(merge):
    one, many = metrics_trainer(1, epochs=3), metrics_trainer(DEVICES, merge, epochs=3)
    names = ("loss", "largest", "positive", "test_loss", "test_largest", "test_positive", "epoch", "step")
    for name in names:
        close(many.history[name], one.history[name])
    assert many.test(TESTS).keys() == {"loss", "largest", "positive"}
    for name, value in one.test(TESTS).items():
        close(many.test(TESTS)[name], value)


def test_an_early_stop_comes_when_it_comes_on_one_device():
    def stopped(devices):
        return metrics_trainer(devices, epochs=40, callbacks=(ow.EarlyStop("test_loss", patience=2),))

    one, many = stopped(1), stopped(DEVICES)
    assert many.epoch == one.epoch < 40


def test_the_model_is_read_as_on_one_device():
    for merge in (ow.Average(), ow.Sharded(), ow.merge.LocalSGD(2)):
        trainer = trainer_of(merge)
        trainer.train(reader(), epochs=2)
        out = ow.Evaluator(trainer.model).forward(x=X[:5], y=Y[:5])
        w, b = (np.asarray(trainer.model[name]) for name in ("fc_0/w", "fc_0/b"))
        close(out.loss, np.mean((X[:5] @ w + b - Y[:5]) ** 2))
        machine = ow.GradientMachine(trainer.model)
        machine.backward(x=X[:5], y=Y[:5])
        close(machine.gradient("fc_0/b"), np.mean(X[:5] @ w + b - Y[:5], 0))


def test_train_in_one_line():
    x, y = ow.data("x"), ow.data("y")
    histories = []
    for devices in (1, DEVICES):
        cost = ow.layer.mse(ow.layer.fc(x, 2), y)
        trainer = ow.train(cost, reader(), optimizer=ow.Momentum(0.1), epochs=2, devices=devices, seed=2)
        histories.append(trainer.history["loss"])
    close(*histories)
    trainer = ow.train(network, reader(), devices=2, merge=ow.merge.LocalSGD(2))
    assert trainer.program.replicas.count == 2
    assert trainer["fc_0/w/local"].shape == (2, 3, 2)


def test_all_devices():
    assert trainer_of(devices=None).program.replicas.count == jax.device_count()
    assert trainer_of(devices=1).program.replicas is None
    assert trainer_of(ow.merge.TopK(0.5), devices=1).program.replicas.count == 1


def test_a_program_that_is_replicated_already():
    model = ow.Model(network, seed=1)
    program = ow.replicate(ow.Momentum(0.1).minimize(model.topology), DEVICES, ow.Sharded())
    trainer = ow.Trainer(model, program)
    trainer.train(reader())
    expected = trainer_of()
    expected.train(reader())
    close(trainer.history["loss"], expected.history["loss"])
    with pytest.raises(ow.GraphError, match="replicated already, for 4 devices"):
        ow.Trainer(model, program, devices=2)


def test_a_short_batch_without_weights_is_refused_and_named():
    trainer = trainer_of()
    message = r"Batch 2 of epoch 0 \(both counted from 0\): .* 2 rows \('x'\), which 4 devices do not divide"
    with pytest.raises(ow.ArgumentError, match=message):
        trainer.train(ow.batches((X, Y), ROWS))
    assert trainer.step == 2
    with pytest.raises(ow.ArgumentError, match=r"5 rows \('x'\), which 4 devices do not divide. Feed 4 or 8"):
        ow.train(ow.layer.mse(ow.layer.fc(ow.data("x"), 2), ow.data("y")), [(X[:5], Y[:5])], devices=DEVICES)


def weighted():
    x, y = ow.data("x", (None, 3)), ow.data("y", (None, 2))
    weight = ow.data("example_weight", (None,))
    return ow.layer.mse(ow.layer.fc(x, 2), y, weights=weight)


@cache
def weighted_trainer(merge, devices):
    batches = ow.batches((X, Y, np.linspace(0.5, 2, len(X)).astype("float32")), ROWS)
    trainer = trainer_of(merge, devices, make=weighted)
    trainer.train(batches, epochs=2, test=batches)
    return trainer


@pytest.mark.parametrize("merge", [ow.Average(), ow.Sharded()], ids=repr)
def test_a_short_batch_with_weights(merge):
    one, many = weighted_trainer(None, 1), weighted_trainer(merge, DEVICES)
    close(many.history["loss"], one.history["loss"])
    close(many.history["test_loss"], one.history["test_loss"])


def test_several_threads_are_refused():
    with pytest.raises(ow.ArgumentError, match=r"threads is 2, and .* trains on 4 devices"):
        trainer_of().train(reader(), threads=2)


def test_values_given_to_the_model_count_at_once():
    trainer = trainer_of(ow.merge.LocalSGD(2), optimizer=ow.SGD(0.0))
    trainer.model.replace({"fc_0/w": np.zeros((3, 2), "float32")})
    trainer.train(reader(), epochs=1)  # to the first meeting
    assert not np.asarray(trainer.model["fc_0/w"]).any()


# ---------------------------------------------------------------- resumed


def until(step):
    def stop(event):
        if event.kind == "step" and event.step == step:
            raise ow.StopTraining("half way")

    return stop


@pytest.mark.parametrize(
    "merge",
    [ow.Average(), ow.Sharded(), ow.merge.DiLoCo(3, exchange=ow.merge.TopK(0.5))],
    ids=repr,
)
def test_resumed_bit_for_bit(merge, tmp_path):
    """In the middle of an epoch, between two meetings."""
    whole = trainer_of(merge)
    whole.train(reader(), epochs=4)
    trainer_of(merge, folder=tmp_path).train(reader(), epochs=4, callbacks=[until(5)])
    again = trainer_of(merge, folder=tmp_path, seed=9)
    report = again.restore()
    assert (report.kept, report.left, report.changed, again.step) == ((), (), (), 5)
    again.train(reader(), epochs=4)
    same(bits(again.state), bits(whole.state))


@cache
def saved(merge, devices, folder):
    trainer = trainer_of(merge, devices, folder)
    trainer.train(reader(), epochs=2)
    return {name: np.asarray(trainer[name]) for name in bits(trainer.state)}


def restored(merge, devices, folder):
    trainer = trainer_of(merge, devices, seed=9)
    report = trainer.restore(folder)
    trainer.update(*BATCH)
    trainer.restore(folder)
    return trainer, report


ONE, SHARDED, SHARDED_2 = (None, 1), (ow.Sharded(), 4), (ow.Sharded(), 2)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (ONE, (ow.Average(), 4)),
        ((ow.Average(), 4), ONE),
        (ONE, SHARDED),
        (SHARDED, ONE),
        (SHARDED, SHARDED_2),
        (SHARDED_2, (ow.Sharded(), 8)),
        (SHARDED, (ow.Average(), 2)),
    ],
    ids=str,
)
def test_parameters_and_slots_go_from_one_number_of_devices_to_another(before, after, tmp_path):
    values = saved(*before, tmp_path)
    trainer, report = restored(*after, tmp_path)
    assert (report.kept, report.left) == ((), ())
    for name, value in values.items():
        found = np.asarray(trainer[name])
        count = {"fc_0/w": 6, "fc_0/b": 2}.get(name.removesuffix("/velocity"), 1)
        np.testing.assert_array_equal(found.ravel()[:count], value.ravel()[:count], err_msg=name)
        assert not found.ravel()[count:].any()


@pytest.mark.parametrize("before", [(ow.merge.TopK(0.5), 4), (ow.merge.LocalSGD(3), 4)], ids=str)
def test_what_each_device_has_for_itself_becomes_the_mean_for_other_numbers(before, tmp_path):
    values = saved(*before, tmp_path)
    trainer, report = restored(before[0], 2, tmp_path)
    assert (report.kept, report.left) == ((), ())
    own = [v.name for v in trainer.program.state if v.placement is ow.Placement.PER_REPLICA]
    assert {"fc_0/w/local", "grad(fc_0/w)/error"} & set(own)
    for name in own:
        close(trainer[name], [values[name].mean(0)] * 2)


@pytest.mark.parametrize("merge", [ow.merge.LocalSGD(3), ow.merge.DiLoCo(3)], ids=repr)
def test_local_parameters_begin_with_those_of_the_checkpoint(merge, tmp_path):
    values = saved(None, 1, tmp_path)
    trainer = trainer_of(merge, seed=9)
    with pytest.warns(UserWarning, match="newly initialized: fc_0/w/local, fc_0/b/local"):
        trainer.restore(tmp_path)
    same(np.asarray(trainer["fc_0/w/local"]), np.stack([values["fc_0/w"]] * DEVICES))


@pytest.mark.parametrize("merge", [ow.Sharded(), ow.Average()], ids=repr)
def test_slots_and_parameters_of_local_sgd_become_their_mean(merge, tmp_path):
    values = saved(ow.merge.LocalSGD(3), 4, tmp_path)
    trainer, report = restored(merge, 4, tmp_path)
    found = np.asarray(trainer["fc_0/w/velocity"]).ravel()[:6]
    close(found, values["fc_0/w/velocity"].mean(0).ravel())
    close(trainer["fc_0/w"], values["fc_0/w/local"].mean(0))
    assert (report.kept, report.left, set(report.merged)) == ((), (), {"fc_0/w", "fc_0/b"})
    assert "; the mean of what each device had made of them: fc_0/" in str(report)
    model = ow.Model(network, seed=3)
    assert set(model.restore(tmp_path).merged) == {"fc_0/w", "fc_0/b"}
    close(model["fc_0/w"], values["fc_0/w/local"].mean(0))


@pytest.mark.parametrize("copied", [False, True], ids=["the model", "a copy"])
def test_a_model_that_is_saved_between_two_meetings_says_so(copied, tmp_path):
    trainer = trainer_of(ow.merge.LocalSGD(3))
    trainer.update(*BATCH)
    model = trainer.model.copy() if copied else trainer.model
    for save in (lambda: ow.save(model, tmp_path / "a"), lambda: model.save(tmp_path / "folder")):
        with pytest.warns(UserWarning, match=r"each has trained its own fc_0/., fc_0/.; the model has"):
            save()
    ow.save(trainer.model.topology, tmp_path / "mean", trainer.state)
    close(ow.load(tmp_path / "mean")["fc_0/w"], np.asarray(trainer["fc_0/w/local"]).mean(0))
    trainer.update(*BATCH)
    trainer.update(*BATCH)
    ow.save(trainer.model, tmp_path / "met")
    same(ow.load(tmp_path / "met")["fc_0/w"], trainer["fc_0/w/local"][0])


@pytest.mark.filterwarnings("ignore:.*newly initialized:UserWarning", "ignore:.*not needed here:UserWarning")
def test_parts_of_slots_go_to_local_sgd(tmp_path):
    values = saved(ow.Sharded(), 4, tmp_path)
    trainer, _ = restored(ow.merge.LocalSGD(3), 4, tmp_path)
    same(np.asarray(trainer["fc_0/w/velocity"])[1].ravel(), values["fc_0/w/velocity"][:6])


def test_a_state_with_parts_goes_to_no_other_number_of_devices():
    step = ow.compile(ow.replicate(program_of(), DEVICES, ow.Sharded()))
    state, _ = step(step.init(), *BATCH)
    for program in (program_of(), ow.replicate(program_of(), 8, ow.Sharded())):
        with pytest.raises(
            ow.StateError, match=r"'fc_0/[wb]/velocity' is float32\[.*, here .*save a checkpoint of it"
        ):
            ow.compile(program)(state, *BATCH)


# ---------------------------------------------------------------- Session


@cache
def losses_of(merge):
    step = ow.compile(ow.replicate(program_of(), DEVICES, merge))
    state, losses = step.init(seed=4), []
    for _ in range(4):
        state, out = step(state, *BATCH)
        losses.append(float(out.loss))
    return losses


@pytest.mark.parametrize(
    ("merge", "target"),
    [
        (ow.Average(), "updates"),
        (ow.Sharded(), "program"),
        (ow.merge.TopK(0.5), "updates"),
        (ow.Sharded(), "updates"),
        (ow.merge.LocalSGD(2), "updates"),
        (ow.merge.DiLoCo(2), "updates"),
    ],
    ids=str,
)
def test_a_session_trains(merge, target):
    program = ow.replicate(program_of(), DEVICES, merge)
    session = ow.Session(program, seed=4)
    chosen = program if target == "program" else program.updates
    losses = [float(session.run(chosen, FEED, ["loss"])[0]) for _ in range(4)]
    close(losses, losses_of(merge))
    assert int(session["step"]) == 4


def test_programs_of_one_device_and_of_many_share_a_scope():
    """A training Program on many devices, the same on one, and tests of both kinds, in turn."""
    program = program_of()
    test, many = ow.for_test(program), ow.replicate(program, DEVICES)
    tests = test, ow.replicate(test, DEVICES)
    session, other = ow.Session(seed=4), ow.Session(seed=4)
    for runs in range(1, 5):
        session.run(many if runs % 2 else program, FEED)
        other.run(program, FEED)
        [expected] = other.run(test, FEED, [test.loss])
        for chosen in tests:
            close(session.run(chosen, FEED, [chosen.loss])[0], expected)
    close(session["fc_0/w"], other["fc_0/w"])
    assert int(session["step"]) == 4
    shared = ow.Session(scope=session.scope)
    close(shared.run(test, FEED, [test.loss])[0], expected)


def test_a_part_of_a_replicated_program_in_a_session():
    program = ow.replicate(program_of(), DEVICES)
    session, other = ow.Session(program, seed=4), ow.Session(program_of(), seed=4)
    [found], [expected] = (s.run(feed={"x": X[:ROWS]}, fetch=["fc_0"]) for s in (session, other))
    close(found, expected)
    with pytest.raises(ow.ArgumentError, match=r"5 rows \('x'\), which 4 devices do not divide"):
        session.run(feed={"x": X[:5]}, fetch=["fc_0"])


def test_parts_of_slots_are_another_variable_of_the_same_name():
    session = ow.Session(seed=4)
    session.run(program_of(), FEED)
    with pytest.raises(ow.StateError, match=r"'fc_0/w/velocity' is float32\[3,2\] here"):
        session.run(ow.replicate(program_of(), DEVICES, ow.Sharded()), FEED)


# ---------------------------------------------------------------- tests on many devices


def test_a_test_program_on_many_devices():
    program = noisy_program()
    step = ow.compile(program, donate=False)
    state, _ = step(step.init(seed=3), *BATCH)
    results = []
    for test in (ow.for_test(program), ow.replicate(ow.for_test(program), DEVICES)):
        runner = ow.compile(test, fetch=["drop"], donate=False)
        after, out = runner(state, *BATCH)
        results.append(jax.tree.map(np.asarray, (out.value, out["drop"], bits(after))))
    jax.tree.map(close, *results)
    with pytest.raises(ow.ArgumentError, match="5 rows"):
        runner(state, X[:5], Y[:5])


# ---------------------------------------------------------------- before and after replicate


def many():
    return ow.replicate(program_of(), DEVICES)


@pytest.mark.parametrize(
    ("derive", "what"),
    [
        (ow.append_backward, "the backward pass"),
        (lambda p: ow.append_update(p, ow.SGD(0.1)), "the update"),
        (lambda p: ow.clip_by_global_norm(p, 1.0), "a clip"),
        (lambda p: ow.SGD(0.1).minimize(p), "the backward pass"),
        (ow.SGD(0.1).create_backward_pass, "the backward pass"),
        (ow.SGD(0.1).create_optimization_pass, "the update"),
        (ow.graph.update_pass, "a cut along the gradients"),
        (lambda p: ow.gradients(p, "loss", ["x"])[0], "a gradient"),
    ],
)
def test_what_comes_before_replicate(derive, what):
    message = rf"is replicated for 4 devices, and {what}.* comes before that. Replicate last: replicate\("
    for program in (many(), ow.replicate(ow.for_test(program_of()), DEVICES)):
        with pytest.raises(ow.GraphError, match=message):
            derive(program)


def results(program, *data, fetch=()):
    step = ow.compile(program, fetch)
    _, out = step(step.init(seed=5), *data)
    return [np.asarray(x) for x in out.values]


def test_parts_of_a_replicated_program():
    for derive in (ow.graph.forward_pass, lambda p: ow.prune(p, [p.loss])):
        part = derive(many())
        assert {str(op.made_by) for op in part.ops} == {"forward", "collective"}
        assert part.replicas == many().replicas
        close(results(part, *BATCH), results(ow.graph.forward_pass(program_of()), *BATCH))
        close(results(part, X[:16], Y[:16]), results(ow.graph.forward_pass(program_of()), X[:16], Y[:16]))
    part = ow.prune(many(), ["fc_0"])
    close(results(part, BATCH[0])[0], results(ow.prune(program_of(), ["fc_0"]), BATCH[0])[0])


def test_a_test_program_of_a_replicated_one_is_that_of_one_device():
    test = ow.for_test(many())
    assert test.replicas is None
    close(results(test, X[:5], Y[:5])[0], results(ow.for_test(program_of()), X[:5], Y[:5])[0])


@pytest.mark.parametrize(
    "depth",
    [None, 1],
)
def test_shown_with_what_each_device_has(depth, capsys):
    ow.show(many(), depth=depth)
    text = capsys.readouterr().out
    assert "on 4 devices" in text
    assert "f32[2,3] x (each device a part)" in " ".join(text.split())
    assert "all_mean(grad(fc_0/w)) = all_mean(grad(fc_0/w))" in text


def test_a_transform_after_replicate_is_replayed_at_another_batch_size():
    step = ow.compile(ow.prune(many(), ["loss", "fc_0"]))
    for rows in (8, 16):
        _, out = step(step.init(seed=5), X[:rows], Y[:rows])
        assert out["fc_0"].shape == (rows, 2)
    assert step.traces == 1
