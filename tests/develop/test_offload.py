"""State in host memory: the same numbers, where arrays lie, what the device holds; what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import onward as ow
from onward.core.builder import Builder
from onward.core.marks import FETCH, STORE
from onward.core.show import nbytes
from onward.core.words import UpdateType
from onward.execute.memory.held import MemoryShare

RNG = np.random.default_rng(0)
WIDTH = 16


def _loss(params, x):
    for w in params["layers"]:
        x = x + jnp.tanh(x @ w)
    return jnp.mean((x * params["head"]) ** 2)


def _params(layers=1, dtype="float32"):
    def draw(*shape):
        return jnp.asarray(RNG.normal(size=shape) / 4, dtype)

    return {"layers": [draw(WIDTH, WIDTH) for _ in range(layers)], "head": draw(WIDTH)}


PARAMS, TWO, DEEP = map(_params, (1, 2, 4))  # fewer layers than 4 are not worth a loop
BATCHES = [RNG.normal(size=(8, WIDTH)).astype("float32") for _ in range(5)]


def _adam(optimizer=None, params=None):
    optimizer = optimizer or ow.AdamW(1e-2, rules=[ow.ClipByGlobalNorm(0.1)])
    data = jnp.asarray(BATCHES[0], (params or PARAMS)["head"].dtype)
    return optimizer.minimize(_loss, params or PARAMS, data)


ADAM = _adam()
OFFLOADED, ROLLED = ow.offload(ADAM), ow.roll(_adam(params=DEEP))
NAMES = {v.name for v in ow.graph.offloaded(OFFLOADED)}


def _ran(step, params=None, steps=1, batches=BATCHES):
    params = params or PARAMS
    batches = [jnp.asarray(x, params["head"].dtype) for x in batches]
    return step.run(step.init(params), batches, steps)[0]


def _expect_equal(one, other):
    assert set(one) == set(other)
    for name in one:
        np.testing.assert_array_equal(np.asarray(one[name]), np.asarray(other[name]), err_msg=name)


def _expect_there(state, names=NAMES):
    """What was offloaded lies in host memory, and nothing else does."""
    assert names
    arrays = {v: x for v, x in dict(state).items() if isinstance(x, jax.Array)}
    assert {v for v, x in arrays.items() if x.sharding.memory_kind == "pinned_host"} == set(names)


@pytest.fixture(scope="module")
def plain():
    return ow.compile(ADAM)


@pytest.fixture(scope="module")
def step():
    return ow.compile(OFFLOADED)


@pytest.fixture(scope="module")
def wanted(plain):
    return _ran(plain)


def test_two_ops_for_each_slot_stand_next_to_its_update():
    kinds = [op.type for op in OFFLOADED.ops if op.made_by is ow.Pass.UPDATE]
    one = ["fetch", "fetch", "adam_w", "store", "store"]
    assert kinds[-10:] == one * 2
    assert kinds.count("fetch") == 2 * kinds.count("adam_w")
    assert "fetched(head/mean) = fetch(head/mean)" in str(OFFLOADED)
    assert "next(head/mean) = store(updated(head/mean))" in str(OFFLOADED)
    assert ow.check(OFFLOADED) is OFFLOADED


def test_same_numbers_wherever_a_state_comes_from(plain, step, wanted):
    state = _ran(step)
    _expect_equal(wanted, state)
    _expect_there(state)
    _expect_equal(wanted, _ran(step, steps=2))
    first = plain.init(PARAMS)
    for x in BATCHES[:2]:
        first, _ = plain(first, x)
    before = step.compilations
    moved, _ = step.run(first, BATCHES[2:], steps=3)  # of a step that offloads nothing
    _expect_equal(wanted, moved)
    _expect_there(moved)
    back = _ran(step, batches=BATCHES[:3])
    for x in BATCHES[3:]:
        back, _ = plain(back, x)
    _expect_equal(wanted, back)
    assert not any(back[v].sharding.memory_kind == "pinned_host" for v in back)
    assert step.compilations == before


def test_arrays_of_a_person_are_moved_once(step, wanted):
    begun = step.init(PARAMS)
    for lay in (np.asarray, lambda x: jax.device_put(np.asarray(x), jax.devices()[0])):
        state = ow.State(begun.layout, [lay(x) for x in begun.buffers], begun.storage)
        for x in BATCHES:
            state, _ = step(state, x)
            _expect_there(state)
        _expect_equal(wanted, state)


def test_a_step_takes_the_buffers_over(step):
    state = step.init(PARAMS)
    _expect_there(state)
    old = state["head/mean"]
    following, _ = step(state, BATCHES[0])
    assert old.is_deleted()
    assert state.is_spent
    assert {following.copy()[name].sharding.memory_kind for name in NAMES} == {"pinned_host"}


def test_results_lie_on_the_device():
    step = ow.compile(OFFLOADED, fetch=["head/mean", "next(head/mean)"])
    state, first = step(step.init(PARAMS), BATCHES[0])
    kept = np.asarray(state["head/mean"])
    _, out = step(state, BATCHES[1])
    np.testing.assert_array_equal(first["next(head/mean)"], kept)
    np.testing.assert_array_equal(out["head/mean"], kept)
    assert out["head/mean"].sharding.memory_kind == "device"


CASES = {
    "momentum": lambda: _adam(ow.Momentum(0.1)),
    "muon": lambda: _adam(ow.Muon(0.1)),
    "average": lambda: _adam(ow.Adam(0.1, rules=[ow.EMA(0.9)])),
    "bfloat16": lambda: _adam(ow.Adam(0.1), _params(dtype="bfloat16")),
    "loss scale": lambda: ow.mixed_precision(ADAM, "float16"),
    "rolled": lambda: ROLLED,
    "guard": lambda: ow.guard(ADAM, "skip"),
    "stop": lambda: ow.guard(ADAM, "stop"),
    "micro-batches": lambda: ow.accumulate(ADAM, 2),
    "replicate": lambda: ow.replicate(ADAM, 8),
    "sharded": lambda: ow.replicate(ADAM, 8, merge=ow.Sharded()),
    "partition": lambda: ow.partition(ADAM, {"data": 4, "model": 2}, {"head": "model", "*": "data"}),
}


@pytest.mark.parametrize("case", CASES)
def test_same_numbers_after_other_transforms(case):
    program = CASES[case]()
    params = {"bfloat16": _params(dtype="bfloat16"), "rolled": DEEP}.get(case, PARAMS)
    batches = [BATCHES[0], np.full_like(BATCHES[1], np.nan if case == "guard" else 1), BATCHES[2]]
    offloaded = ow.offload(program)
    step = ow.compile(offloaded)
    found = _ran(step, params, batches=batches)
    _expect_equal(_ran(ow.compile(program), params, batches=batches), found)
    _expect_there(found, {v.name for v in ow.graph.offloaded(offloaded)})
    step(found, jnp.asarray(batches[0], params["head"].dtype))
    assert all(x.is_deleted() for x in found.buffers if x.size > 1)  # taken over: nothing is stored anew


@pytest.mark.parametrize(
    "later",
    [
        ow.guard,
        lambda p: ow.accumulate(p, 2),
        lambda p: ow.replicate(p, 2),
        lambda p: ow.mixed_precision(p, "float16"),
    ],
)
def test_offload_acts_last_whenever_it_is_called(later):
    assert str(later(OFFLOADED)) == str(ow.offload(later(ADAM)))


def test_check_finite_and_other_lengths(plain, wanted):
    step = ow.compile(OFFLOADED, check_finite=True)
    state = _ran(step)
    for name in wanted:
        np.testing.assert_array_equal(np.asarray(wanted[name]), np.asarray(state[name]))
    short, _ = step(state, BATCHES[0][:4])
    other, _ = plain(_ran(plain), BATCHES[0][:4])
    for name in other:
        np.testing.assert_array_equal(np.asarray(other[name]), np.asarray(short[name]))
    with pytest.raises(ow.NonFiniteError):
        step.expect_going(step(short, np.full_like(BATCHES[0], np.nan))[0])


def test_where_the_arrays_of_a_person_lie(step, wanted):
    other = jax.devices()[3]
    state = step.init(jax.device_put(PARAMS, other))
    for x in BATCHES:
        state, _ = step(state, x)
    assert {x.devices().pop() for x in state.buffers} == {other}
    _expect_there(state)
    _expect_equal(wanted, state)


def test_under_transforms_of_jax(step, wanted):
    state, _ = jax.lax.scan(lambda s, x: (step(s, x)[0], None), step.init(PARAMS), np.stack(BATCHES))
    _expect_equal(wanted, state)


def test_checkpoints_bit_for_bit_both_ways(plain, step, wanted, tmp_path):
    for saving, restoring in ((step, plain), (plain, step)):
        with ow.Checkpoints(tmp_path / str(saving is step)) as checkpoints:
            path = checkpoints.save(_ran(saving, batches=BATCHES[:2]), 2)
        state = restoring.restore(path)
        kinds = {state[name].sharding.memory_kind for name in NAMES}
        assert kinds == ({"pinned_host"} if restoring is step else {"device"})
        for x in BATCHES[2:]:
            state, _ = restoring(state, x)
        _expect_equal(wanted, state)


def test_training_goes_on_from_a_checkpoint_of_either(tmp_path):
    def network():
        return ow.layer.mse(ow.layer.fc(ow.data("x", (8, WIDTH)), 3), ow.data("y", (8, 3)))

    program = ow.Adam(1e-2).minimize(network)
    data = [(x, x[:, :3]) for x in BATCHES]
    wanted = ow.train(program, data, epochs=2).history["loss"]
    ow.train(program, data, checkpoints=tmp_path)
    resumed = ow.train(ow.offload(program), data, epochs=2, checkpoints=tmp_path, resume=True)
    np.testing.assert_array_equal(resumed.history["loss"][-5:], wanted[5:])


def test_memory_tells_host_and_device_apart():
    slots = {v: nbytes(v) for v in ow.graph.offloaded(OFFLOADED)}
    before, after = ow.memory(ADAM), ow.memory(OFFLOADED)
    assert after.on_host == sum(slots.values())
    assert before.on_host == 0
    assert after.peak < before.peak
    assert after.shares[MemoryShare.STATE] == before.shares[MemoryShare.STATE] - after.on_host
    assert "of state lie in host memory" in str(after)
    assert "in host memory" in str(before.beside(after))
    plan = str(ow.plan(ow.replicate(OFFLOADED, 8)))
    assert "state in host memory" in plan
    meshed = ow.plan(ow.partition(OFFLOADED, {"data": 8}, {"*": "data"}))
    assert meshed.kept == ow.plan(ow.partition(ADAM, {"data": 8}, {"*": "data"})).kept - after.on_host // 8
    assert "in host memory" in str(ow.compile(OFFLOADED, roll=False).plan())


@pytest.mark.parametrize(
    "program",
    [*(ow.offload(change(_adam(params=TWO))) for change in (lambda p: p, ow.guard)), ow.offload(ROLLED)],
)
def test_the_slots_of_one_parameter_at_a_time(program):
    """Of what was fetched and not yet stored, all belongs to one parameter, in the order of the ops."""
    there, most = set(), 0
    for op in program.ops:
        if op.type is FETCH:
            there.add(op.inputs[0])
        assert len({v.name.rsplit("/", 1)[0] for v in there}) <= 1
        most = max(most, len(there))
        if op.type is STORE:
            there.remove(next(old for old, new in program.next_state.items() if new is op.outputs[0]))
    assert most == 2
    assert not there
    use = ow.memory(program)
    largest, clipped = max(map(nbytes, program.parameters)), sum(map(nbytes, program.parameters))
    in_update = [m.shares[MemoryShare.TEMPORARIES] for m in use.curve if m.op.type is FETCH]
    assert max(in_update) - clipped <= 3 * largest < use.on_host


def test_a_choice_of_state():
    chosen = ow.offload(ADAM, where="*/variance")
    assert {v.name for v in ow.graph.offloaded(chosen)} == {n for n in NAMES if n.endswith("/variance")}
    assert ow.graph.offloaded(ow.offload(ADAM, lambda v: v.name == "head/mean"))[0].name == "head/mean"


def _updating(w, state, x):
    h = jnp.sin(x * w)
    return jnp.sum(h * h), {"last": h}


def _keeping():
    """A Program that hands a value of its forward pass to the next step."""
    w = np.ones(3, "float32")
    return ow.SGD(0.1).minimize(_updating, w, w, state={"last": w})


def _peeking():
    """A Program with an op of the update that reads a value of the forward pass."""
    builder = Builder(ADAM, ADAM.ops, made_by=ow.Pass.UPDATE)
    builder.behind(ADAM["add"], "peek", lambda x: [jnp.sum(x)], update=UpdateType.BOOKKEEPING)
    return builder.program()


def _stored():
    return ow.offload(ADAM, "add")


REFUSED = {
    "nothing is named 'layers/9/mean'": lambda: ow.offload(ADAM, "layers/9/mean"),
    "nothing is named 'tanhh'.*The nearest names are .*'tanh'": lambda: ow.offload(ADAM, "tanhh"),
    r"nothing is named 'nope\*'": lambda: ow.offload(ADAM, "nope*"),
    "nothing is named 'nope'": lambda: ow.offload(ow.accumulate(ADAM, 2), "nope"),
    r"'head' .* is read by broadcast_in_dim at test_offload.py:\d+ in the forward pass": lambda: ow.offload(
        ADAM, "head"
    ),
    "'step' .* is a single number": lambda: ow.offload(ADAM, "step"),
    r"where is empty.*, or leave where= out to offload the state that only": lambda: ow.offload(ADAM, []),
    "is offloaded already": lambda: ow.offload(OFFLOADED),
    "keeps no array that only its update reads": lambda: ow.offload(_adam(ow.SGD(0.1))),
    "keeps no array": lambda: ow.offload(ow.trace(_loss, PARAMS, BATCHES[0])),
    "'dot_general' .* is read by no op of the backward pass": lambda: ow.offload(ADAM, "dot_general"),
    "'div' .* is read by no op of the backward pass": lambda: ow.offload(ADAM, "div"),
    "'x' .* is data, which lies on the device": lambda: ow.offload(ADAM, "x"),
    r"'grad\(tanh\)' .* is made by mul_grad .*in the backward pass": lambda: ow.offload(ADAM, "grad(tanh)"),
    "'add' .* lies in host memory already": lambda: ow.offload(_stored(), "add"),
    "'sin' of '_updating' is a result of the step": lambda: ow.offload(_keeping(), "sin"),
    r"'stack\(layers/\*\)' .* is a stack of parameters": lambda: ow.offload(ROLLED, "stack(layers/*)"),
    "'add' .* is read by peek in the update as well": lambda: ow.offload(_peeking(), "add"),
    "keeps state in host memory, where stages do not look": lambda: ow.pipeline(OFFLOADED, 2, 2),
    "keeps activations in host memory": lambda: ow.pipeline(_stored(), 2, 2),
    "has offload after its update; split cuts": lambda: ow.split(OFFLOADED, servers=2),
    "'_loss' has offload after its update; split cuts": lambda: ow.split(_stored(), servers=2),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refusals(message):
    with pytest.raises(ow.OnwardError, match=message):
        REFUSED[message]()


@pytest.mark.parametrize(("program", "name"), [(lambda: OFFLOADED, "head/mean"), (_stored, r"stored\(add\)")])
def test_a_device_without_such_memory(program, name, monkeypatch):
    class Device:
        def addressable_memories(self):
            return []

        def __repr__(self):
            return "OldDevice(0)"

    monkeypatch.setattr("onward.execute.pinned._default_device", Device)
    told = f"'{name}' in host memory .*OldDevice.* no memory kind 'pinned_host'"
    with pytest.raises(ow.ArgumentError, match=told):
        ow.compile(program())


def test_state_that_is_replaced_unread_takes_no_buffer_of_host_memory():
    """All arrays have one type, so that a buffer could be given to the next value of another."""

    def averaging(w, state, x):
        return jnp.sum(jnp.sin(x * w)), {"average": 2 * x}

    w, x = np.ones(3, "float32"), np.arange(3, dtype="float32")
    program = ow.Adam(0.1).minimize(averaging, w, x, state={"average": w})
    found = []
    for each in (program, ow.offload(program)):
        step = ow.compile(each)
        state = step.init(w, {"average": w})
        for _ in range(3):
            state, out = step(state, x)
        found.append([out.loss, state.parameters, state["state/average"]])
        kinds = {v.name: state[v.name].sharding.memory_kind for v in each.state}
    for a, b in zip(*found, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    assert [name for name, kind in kinds.items() if kind == "pinned_host"] == ["w/mean", "w/variance"]


@pytest.mark.parametrize("names", [["b/mean"], ["b", "a/variance"]])
def test_a_buffer_that_alone_is_donated_becomes_that_of_its_own_successor(names):
    """All parameters have one type: without a place of its own ``b`` would become ``a``."""
    matrix, x = np.eye(3, dtype="float32"), np.arange(3, dtype="float32")

    def loss(params, x):
        return jnp.sum((params["a"] @ params["b"] @ x) ** 2)

    params = {"a": matrix, "b": 2 * matrix}
    program = ow.Adam(0.1).minimize(loss, params, x)
    found = []
    for each, donate in ((program, True), (ow.offload(program), names)):
        step = ow.compile(each, donate=donate)
        before = state = step.init(params)
        for _ in range(2):
            state, _ = step(state, x)
        found.append(state)
    _expect_equal(*found)
    _expect_there(state, {v.name for v in ow.graph.offloaded(each)})
    named = zip(before.layout.variables, before.buffers, strict=True)
    assert {v.name for v, buffer in named if buffer.is_deleted()} == set(names)
