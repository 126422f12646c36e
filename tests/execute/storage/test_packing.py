"""A Program over buffers computes what the Program over Variables does, with one op for each family."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import onward as ow
from onward.core.program import Program
from onward.execute.storage import plan as planning
from onward.execute.storage.families import families_of
from onward.execute.storage.packing import packed, pattern_of
from onward.execute.storage.storage import BufferForm, Storage

SIZE, LAYERS = 4, 8
FEW = 2  # layers, where a Program is compiled
X = jnp.linspace(-1.0, 1.0, 3 * SIZE).reshape(3, SIZE)


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small models are packed as well here."""
    monkeypatch.setattr(planning, "LEAST", 8)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer Variables share a buffer here."""
    monkeypatch.setattr(planning, "LEAST", FEW)
    monkeypatch.setattr(planning, "_FEW", FEW)
    monkeypatch.setattr(planning, "_MANY", FEW)


def parameters(layers: int = LAYERS) -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    return [
        {
            "w": jnp.asarray(rng.normal(size=(SIZE, SIZE)) / 2, jnp.float32),
            "b": jnp.asarray(rng.normal(size=SIZE), jnp.float32),
        }
        for _ in range(layers)
    ]


def loss(layers: list[dict[str, Any]], x: jax.Array) -> jax.Array:
    for layer in layers:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return jnp.mean(x**2)


def storage_of(program: Program) -> Storage:
    found = planning.plan(program)
    assert found is not None
    return found


def count_of(program: Program) -> Counter[str]:
    return Counter(op.type for op in program.ops)


def expect_equal(program: Program, steps: int = 4, rtol: float = 2e-5) -> ow.Step:
    """Raise unless a packed Step and one that is not come to the same State."""
    apart, together = ow.compile(program, tune=False), ow.compile(program, roll=False)
    assert together.storage is not None
    one, other = apart.init(parameters(FEW)), together.init(parameters(FEW))
    for _ in range(steps):
        one, expected = apart(one, X)
        other, found = together(other, X)
        np.testing.assert_allclose(found.loss, expected.loss, rtol=rtol)
    for v in together.layout.variables:
        exact = max(rtol, 2.0**-7) if v.dtype == jnp.bfloat16 else rtol  # one unit in its last place
        np.testing.assert_allclose(
            np.asarray(other[v], np.float32), np.asarray(one[v], np.float32), exact, 1e-6, err_msg=v.name
        )
    return together


OPTIMIZERS = {
    "adam": ow.Adam(0.01),
    "clip, l2, ema": ow.AdamW(0.01, rules=[ow.ClipByGlobalNorm(0.01), ow.L2(0.1), ow.EMA(0.9)]),
    "per matrix": ow.LAMB(0.01),
    "factored": ow.Adafactor(0.01),
    "some decay": ow.SGD(0.01, rules=[ow.WeightDecay(0.1, where="*/w")]),
    "groups": ow.Adam(0.01, groups=[ow.Group("layers/0/w", learning_rate=0.1)]),
    "small slots": ow.Adam(0.01, slot_dtype="bfloat16"),
}


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_packed_is_plain(name: str) -> None:
    expect_equal(OPTIMIZERS[name].minimize(loss, parameters(FEW), X))


def test_one_op_updates_a_stack() -> None:
    optimizer = ow.AdamW(0.01, rules=[ow.ClipByGlobalNorm(0.01), ow.EMA(0.9)])
    program = optimizer.minimize(loss, parameters(), X)
    assert count_of(program)["adam_w"] == 2 * LAYERS
    found = packed(program, storage_of(program), program.outputs)
    ow.check(found)
    kinds = count_of(found)
    assert (kinds["adam_w"], kinds["ema"], kinds["clip_by_global_norm"]) == (2, 2, 1)
    (clip,) = (op for op in found.ops if op.type == "clip_by_global_norm")
    assert [v.shape for v in clip.inputs[:2]] == [(LAYERS, SIZE), (LAYERS, SIZE, SIZE)]


def test_compiled_size_follows_the_groups_not_the_parameters() -> None:
    def lines(layers: int) -> int:
        names = [f"w{i}" for i in range(layers)]
        program = ow.Adam(0.1).minimize(
            lambda ps: sum(jnp.sum(ps[n] ** 2) for n in names), {n: jnp.ones(SIZE) for n in names}
        )
        update = ow.graph.update_pass(program)
        return len(packed(update, storage_of(update), update.outputs).ops)

    assert lines(100) == lines(30)


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("action", ["skip", "stop"])
def test_guarded(action: str) -> None:
    program = ow.guard(ow.Adam(0.01).minimize(loss, parameters(FEW), X), action)
    step = expect_equal(program)
    state = step.init(parameters(FEW))
    before = {name: np.asarray(state[name]) for name in state}
    state, _ = step(state, X.at[0, 0].set(jnp.nan))
    for name in ("layers/1/w", "layers/1/w/mean", "step"):
        np.testing.assert_array_equal(state[name], before[name])
    if action == "stop":
        with pytest.raises(ow.NonFiniteError, match=r"grad\(layers/"):
            step(state, X)


@pytest.mark.usefixtures("few")
def test_accumulated_and_mixed() -> None:
    x = jnp.concatenate([X, X])
    program = ow.accumulate(ow.Adam(0.01).minimize(loss, parameters(FEW), x), 2)
    apart, together = ow.compile(program, tune=False), ow.compile(program, roll=False)
    assert together.storage is not None
    one, _ = apart(apart.init(parameters(FEW)), x)
    other, _ = together(together.init(parameters(FEW)), x)
    np.testing.assert_allclose(other["layers/1/w"], one["layers/1/w"], rtol=2e-5)
    expect_equal(ow.mixed_precision(ow.Adam(0.01).minimize(loss, parameters(FEW), X), "bfloat16"))


@pytest.mark.usefixtures("few")
def test_replicated() -> None:
    x = jnp.concatenate([X, X])
    program = ow.replicate(ow.Adam(0.01).minimize(loss, parameters(FEW), x), 2)
    apart, together = ow.compile(program, tune=False), ow.compile(program, roll=False)
    assert together.storage is not None
    one, other = apart.init(parameters(FEW)), together.init(parameters(FEW))
    for _ in range(3):
        one, _ = apart(one, x)
        other, _ = together(other, x)
    for name in one:
        np.testing.assert_allclose(other[name], one[name], rtol=2e-5, atol=1e-6, err_msg=name)


IN_ORDER = {
    "kept": lambda p: ow.replicate(p, 2, ow.merge.Bucketed(inner=ow.merge.TopK(0.5))),
    "guarded": lambda p: ow.guard(ow.replicate(p, 2, ow.merge.Bucketed(inner=ow.merge.TopK(0.5)))),
    "guarded before": lambda p: ow.replicate(ow.guard(p), 2, ow.merge.Bucketed(inner=ow.merge.TopK(0.5))),
    "accumulated": lambda p: ow.replicate(
        ow.accumulate(p, 2), 2, ow.merge.Bucketed(inner=ow.merge.TopK(0.5))
    ),
    "as a whole": lambda p: ow.replicate(p, 2, ow.merge.Bucketed(300, Halved())),
    "kept where rolled": lambda p: ow.replicate(p, 2, ow.merge.Bucketed(60, ow.merge.PowerSGD(1))),
}


@pytest.mark.parametrize("name", IN_ORDER)
def test_gradients_that_are_merged_in_order_are_not_rolled(name: str) -> None:
    x = jnp.concatenate([X, 2 * X, 3 * X, 4 * X])
    program = ow.Adam(0.1).minimize(loss, parameters(12), x)
    with pytest.raises(ow.GraphError, match=r"in another\. Roll first: replicate\(roll\(program\), n\)"):
        ow.compile(IN_ORDER[name](program), roll=True)


def test_a_merge_in_order_runs_as_it_is_written() -> None:
    x = jnp.concatenate([X, 2 * X, 3 * X, 4 * X])
    program = ow.Adam(0.1).minimize(loss, parameters(12), x)
    kept = IN_ORDER["kept"](program)
    steps = [ow.compile(kept), ow.compile(kept, tune=False)]
    assert "not rolled: several gradients are merged as one vector" in str(steps[0].plan())
    states = [step.init(parameters(12)) for step in steps]
    for _ in range(2):
        states = [step(state, x)[0] for step, state in zip(steps, states, strict=True)]
    for name in states[0]:
        np.testing.assert_allclose(states[0][name], states[1][name], rtol=2e-5, atol=1e-6, err_msg=name)
    first = ow.compile(ow.replicate(ow.roll(program), 2, ow.merge.Bucketed(inner=ow.merge.TopK(0.5))))
    state, _ = first(first.init(parameters(12)), x)
    assert "rolled: 12 layers" in str(first.plan())
    assert np.asarray(state["grad(layers/0/b)/error"]).any()


def test_any_layout_is_said_of_the_merge_at_hand() -> None:
    class Mixin:
        def merge(self, gradient: Any, kept: Any, devices: Any) -> Any:
            return gradient, kept

    class Mixed(Mixin, ow.merge.Average):
        pass

    class Same(ow.merge.Average):
        pass

    found = [m.any_layout for m in (ow.merge.Average(), Same(), Mixed(), Halved(), ow.merge.TopK(0.5))]
    assert found == [True, True, False, False, False]
    assert ow.merge.Bucketed().any_layout
    assert not ow.merge.Bucketed(inner=Halved()).any_layout


def test_families_tell_apart_what_is_related_otherwise() -> None:
    """Mean and variance have one shape and one rule keeps both, and are not of one family."""
    program = ow.guard(ow.Adam(0.01).minimize(loss, parameters(), X), "skip")
    keeps = [f for f in families_of(program) if f.ops[0].type == "keep"]
    assert sorted(len(f.ops) for f in keeps) == [LAYERS] * 6
    for family in keeps:
        names = {v.name.rsplit("/", 1)[-1] for v in family.column(2)}
        assert len(names) == 1


def test_a_family_is_dissolved_that_would_wait_for_itself() -> None:
    """Each value is made of the one before by the same rule: nothing to be done at once."""

    def chained(ws: list[Any], x: Any) -> Any:
        return sum(jnp.sum(w * x) for w in ws)

    program = ow.SGD(0.1).minimize(chained, [jnp.ones(3)] * 80, jnp.ones(3))
    chain = [op for op in program.ops if op.type == "sgd"]
    ops, previous = [], None
    for op in program.ops:
        if op in chain and previous is not None:
            inputs = (op.inputs[0], previous, *op.inputs[2:])
            op = ow.Op(op.type, inputs, op.outputs, op.body, op.made_by, update=op.update)
        if op.type == "sgd":
            previous = op.outputs[0]
        ops.append(op)
    changed = ow.check(Program(**{**vars(program), "ops": tuple(ops), "recipe": None}))
    storage = storage_of(program)
    found = ow.check(packed(changed, storage, changed.outputs))
    assert count_of(found)["sgd"] == 80


def only_read(alike: int, different: int) -> tuple[Program, list[Any]]:
    """A Program without an update, and its parameters, one of those of different shapes as the alike."""
    ws = [np.full(3, i, "float32") for i in range(alike)]
    ws += [np.full(i, 2, "float32") for i in range(1, 1 + different)]
    return ow.trace(lambda ws, x: sum(jnp.sum(w) * x for w in ws), ws, np.float32(2)), ws


def forms(storage: Storage) -> list[tuple[BufferForm, int]]:
    return sorted((b.form, len(b.members)) for b in storage.buffers)


def test_so_many_of_one_type_share_a_buffer() -> None:
    program, _ = only_read(70, 40)
    assert forms(storage_of(program)) == [(BufferForm.FLAT, 39), (BufferForm.STACKED, 71)]


@pytest.mark.usefixtures("few")
def test_what_is_small_and_alike_shares_a_buffer_though_nothing_updates_it() -> None:
    program, ws = only_read(4, 5)
    assert forms(storage_of(program)) == [(BufferForm.FLAT, 4), (BufferForm.STACKED, 5)]
    step = ow.compile(program)
    state, out = step(step.init(ws), jnp.float32(2))
    np.testing.assert_allclose(out.loss, 2 * sum(float(w.sum()) for w in ws), rtol=1e-6)
    for name, w in zip(state, ws, strict=True):
        np.testing.assert_array_equal(state[name], w)


def test_few_and_large_variables_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    small = ow.Adam(0.1).minimize(loss, parameters(2), X)
    assert planning.plan(small) is None
    large = [jnp.ones((80, 80))] * 30
    program = ow.Adam(0.1).minimize(lambda ws: sum(jnp.sum(w) for w in ws), large)
    assert planning.plan(program) is None


def test_names_of_buffers() -> None:
    assert pattern_of(["a/1/w", "a/10/w", "a/2/w"]) == "a/*/w"
    assert pattern_of(["w", "w"]) == "w"
    assert pattern_of(["x1", "x"]) == "x*"
    assert pattern_of(["xx", "x"]) == "x*"
    assert pattern_of(["xw", "w"]) == "*w"


def doubled(x: Any) -> np.ndarray:
    return np.asarray(x) * 2


class Asked(ow.merge.Merge):
    """A strategy that asks the host, which knows nothing of stacks."""

    def merge(self, gradient: Any, kept: Any, devices: ow.merge.Devices) -> tuple[Any, Any]:
        return jax.pure_callback(doubled, gradient, devices.mean(gradient)), kept


class Halved(ow.merge.Average):
    """A strategy that looks at its gradient as a whole."""

    def merge(self, gradient: Any, kept: Any, devices: ow.merge.Devices) -> tuple[Any, Any]:
        largest = jnp.max(jnp.abs(gradient))
        return devices.mean(jnp.where(jnp.abs(gradient) > largest / 2, gradient, 0.0)), kept

    @property
    def name(self) -> str:
        return "halved"


MERGES = {
    "average": (ow.merge.Average(), 3),  # the loss is the third
    "sum": (ow.merge.Sum(), 3),
    "one bucket": (ow.merge.Bucketed(), 1),
    "buckets that cut stacks": (ow.merge.Bucketed(5 * 4 * SIZE), None),
    "each as a whole": (Halved(), 2),
    "each by the host": (Asked(), 2 * LAYERS),
}


@pytest.mark.parametrize("name", MERGES)
def test_gradients_of_rolled_layers_are_merged_as_stacks(name: str) -> None:
    merge, count = MERGES[name]
    optimizer = ow.Adam(0.1) if merge.is_sum else ow.Adam(0.1, rules=[ow.ClipByGlobalNorm(0.5)])
    x = jnp.concatenate([X, 2 * X, 3 * X, 4 * X])
    program = ow.replicate(optimizer.minimize(loss, parameters(), x), 2, merge)
    rolled, plain = ow.compile(program, roll=True), ow.compile(program, roll=False, tune=False)
    kinds = count_of(rolled.plan().compiled)
    if count is not None:
        assert kinds[merge.name] == count
    if name in ("average", "sum", "one bucket"):
        assert kinds["row"] == kinds["stack"] == 0
    states = [step.init(parameters()) for step in (rolled, plain)]
    for _ in range(3):
        states = [step(state, x)[0] for step, state in zip((rolled, plain), states, strict=True)]
    for a, b in zip(*(jax.tree.leaves(s.parameters) for s in states), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-6)
