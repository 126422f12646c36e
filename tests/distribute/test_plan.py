"""What ``plan`` says is sent, against closed forms and against the collectives of the lowered step."""

from functools import cache
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import onward as ow

ROWS, EVERY = 8, 5
W = {"a": np.ones((6, 5), "float32"), "b": np.ones(5, "float32"), "c": np.ones((7, 3), "float32")}
SIZES = {name: x.size for name, x in W.items()}
DATA = np.ones((ROWS, 6), "float32"), np.ones((ROWS, 7), "float32")
ALL = 4 * sum(SIZES.values())


def loss(w, x, z):
    return jnp.mean((x @ w["a"] + w["b"]) ** 2) + jnp.mean((z @ w["c"]) ** 2)


@cache
def program_of(optimizer=None, max_norm=None):
    program = ow.append_backward(ow.trace(loss, W, *DATA))
    if max_norm is not None:
        program = ow.clip_by_global_norm(program, max_norm)
    return ow.append_update(program, optimizer or ow.SGD(0.1))


@cache
def replicated(merge, devices=4, **options):
    return ow.replicate(program_of(**options), devices, merge)


class Pieces(ow.Merge):
    """A mean, one number after the other; the proof that all devices have the same wants one more."""

    def merge(self, gradient, kept, devices):
        _, found = jax.lax.scan(lambda c, x: (c, devices.mean(x)), None, gradient.ravel())
        return devices.maximum(found.reshape(gradient.shape)), kept


MERGES = [
    ow.Average(),
    ow.Sum(),
    ow.merge.Bucketed(64),
    ow.merge.Bucketed(),
    ow.Sharded(),
    ow.merge.LowPrecision(),
    ow.merge.LowPrecision("float16", feedback=False),
    ow.merge.TopK(0.2),
    ow.merge.PowerSGD(1),
    ow.merge.LocalSGD(EVERY),
    ow.merge.DiLoCo(EVERY),
    ow.merge.DiLoCo(EVERY, exchange=ow.merge.LowPrecision()),
    ow.merge.DiLoCo(EVERY, exchange=ow.merge.Bucketed(64, ow.merge.TopK(0.2))),
]


# ---------------------------------------------------------------- closed forms


def padded(devices):
    return {name: -(-size // devices) * devices for name, size in SIZES.items()}


def sent(merge, n):
    """The bytes of all gradients or parameters that each device sends on a ring, as the papers have it."""
    reduced = 2 * (n - 1) / n
    match merge:
        case ow.merge.DiLoCo():
            return sent(merge.exchange, n) / EVERY
        case ow.merge.LocalSGD():
            return reduced * ALL / EVERY
        case ow.Sharded():
            return reduced * 4 * sum(padded(n).values())
        case ow.merge.LowPrecision():
            return reduced * 2 * sum(padded(n).values())
        case ow.merge.TopK():
            return sum((n - 1) * 8 * max(1, int(merge.ratio * size)) for size in SIZES.values())
        case ow.merge.PowerSGD():
            factors = sum(sum(W[name].shape) for name in ("a", "c"))
            return reduced * 4 * (merge.rank * factors + SIZES["b"])
    return reduced * ALL


@pytest.mark.parametrize("devices", [2, 4, 8])
@pytest.mark.parametrize(
    "merge", [m for m in MERGES if "TopK" not in repr(m) or isinstance(m, ow.merge.TopK)], ids=repr
)
def test_bytes_of_every_strategy(merge, devices):
    plan = ow.plan(replicated(merge, devices))
    of_the_loss = 2 * (devices - 1) / devices * 4
    assert plan.sent == pytest.approx(sent(merge, devices) + of_the_loss, rel=1e-12)
    assert plan.bound == pytest.approx(2 * (devices - 1) / devices * ALL, rel=1e-12)
    assert plan.devices == devices


def test_a_clip_makes_sharded_average_first():
    plan = ow.plan(replicated(ow.Sharded(), max_norm=1.0))
    parts = sum(padded(4).values())
    assert plan.sent == pytest.approx(1.5 * ALL + 0.75 * 4 * parts + 1.5 * 4)
    assert [e.by for e in plan.exchanges] == [("psum",)] * 3 + [("all_gather",)] * 3 + [("psum",)]


def test_one_device_sends_nothing():
    for merge in MERGES:
        plan = ow.plan(replicated(merge, 1))
        assert (plan.sent, plan.bound) == (0, 0)
        assert "each sends 0 B" in str(plan)


def test_every_exchange_is_named_by_what_it_makes():
    plan = ow.plan(replicated(ow.Average()))
    assert [(e.name, e.by, e.bytes, e.every) for e in plan.exchanges] == [
        ("all_mean(grad(c))", ("psum",), 1.5 * 84, 1),
        ("all_mean(grad(b))", ("psum",), 1.5 * 20, 1),
        ("all_mean(grad(a))", ("psum",), 1.5 * 120, 1),
        ("all_mean(add_1)", ("psum",), 6, 1),
    ]
    [together, loss_] = ow.plan(replicated(ow.merge.Bucketed())).exchanges
    assert (together.name, loss_.name) == ("bucketed: bucketed(grad(c)) and 2 more", "all_mean(add_1)")
    [meeting, loss_] = ow.plan(replicated(ow.merge.LocalSGD(EVERY))).exchanges
    assert (meeting.every, loss_.every) == (EVERY, 1)


# ---------------------------------------------------------------- the lowered step

KINDS = {
    "stablehlo.all_reduce": "psum",
    "stablehlo.all_gather": "all_gather",
    "stablehlo.reduce_scatter": "reduce_scatter",
    "stablehlo.all_to_all": "all_to_all",
}
WIDTHS = {"f32": 4, "bf16": 2, "f16": 2, "i32": 4}


def bytes_of(tensor):
    """The bytes of ``tensor<6x5xf32>``."""
    *shape, dtype = tensor.removeprefix("tensor<").removesuffix(">").split("x")
    return prod(map(int, shape)) * WIDTHS[dtype]


def operations(op):
    return [inner.operation for region in op.regions for block in region.blocks for inner in block.operations]


def sends(functions, op, rarely=False):
    """Of all collectives in an operation: kind, bytes that go in, whether only where a ``case`` says so."""
    for inner in operations(op):
        if inner.name in KINDS:
            yield KINDS[inner.name], sum(bytes_of(str(x.type)) for x in inner.operands), rarely
        elif inner.name == "func.call":
            yield from sends(functions, functions[str(inner.attributes["callee"]).strip('@"')], rarely)
        else:
            times = SIZES["a"] if inner.name == "stablehlo.while" else 1
            yield from times * list(sends(functions, inner, rarely or inner.name == "stablehlo.case"))


def collectives(program, first=W, data=DATA):
    """The collectives of the lowered step; loops are taken to be as long as the one parameter ``a``."""
    step = ow.Step(program, (), False, ahead=False)
    module = jax.jit(step.function).lower(step.init(first), *data).compiler_ir("stablehlo").operation
    functions = {
        str(f.attributes["sym_name"]).strip('"'): f for f in operations(module) if f.name == "func.func"
    }
    return list(sends(functions, functions["main"]))


def on_a_ring(kind, size, n):
    factor = {"psum": 2 * (n - 1) / n, "all_gather": n - 1}.get(kind, (n - 1) / n)
    return factor * size


@pytest.mark.parametrize("merge", MERGES, ids=repr)
def test_the_lowered_step_sends_what_the_plan_says(merge):
    program = replicated(merge)
    lowered = collectives(program)
    mine = [(c.kind, c.bytes, not c.always) for op in program.ops for c in op.body.collectives]
    assert sorted(lowered) == sorted(mine)
    total = sum(on_a_ring(kind, size, 4) / (EVERY if rarely else 1) for kind, size, rarely in lowered)
    assert ow.plan(program).sent == pytest.approx(total, rel=1e-12)


def test_what_is_sent_in_a_loop_counts_as_often_as_it_turns():
    program = ow.SGD(0.1).minimize(lambda w, x: jnp.mean((x @ w) ** 2), W["a"], DATA[0])
    program = ow.replicate(program, 4, Pieces())
    lowered = collectives(program, W["a"], DATA[:1])
    assert lowered.count(("psum", 4, False)) == SIZES["a"] + 1
    assert ow.plan(program).sent == sum(on_a_ring(kind, size, 4) for kind, size, _ in lowered)
    assert ow.plan(program).sent == 1.5 * 4 * (SIZES["a"] + SIZES["a"] + 1)


# ---------------------------------------------------------------- what is kept


def kept(merge, optimizer=None):
    plan = ow.plan(replicated(merge, optimizer=optimizer or ow.Adam(0.1)))
    return {(what, str(placement)): size for what, placement, size in plan.kept}


SCALARS = 5 * 4  # four hyperparameters and the step


def test_what_each_device_keeps():
    parts = sum(padded(4).values())
    parameters = {("parameters", "replicated"): ALL}
    assert kept(ow.Average()) == {**parameters, ("state", "replicated"): 2 * ALL + SCALARS}
    assert kept(ow.Sharded()) == {
        **parameters,
        ("state", "sharded"): 2 * parts,
        ("state", "replicated"): SCALARS,
    }
    assert kept(ow.merge.LocalSGD(EVERY)) == {
        **parameters,
        ("state", "per_replica"): 3 * ALL,
        ("state", "replicated"): SCALARS,
    }
    assert kept(ow.merge.TopK(0.2), ow.SGD(0.1)) == {
        **parameters,
        ("state", "per_replica"): ALL,
        ("state", "replicated"): 2 * 4,
    }


@pytest.mark.parametrize(
    "merge", [ow.Average(), ow.Sharded(), ow.merge.DiLoCo(EVERY, exchange=ow.merge.TopK(0.2))], ids=repr
)
def test_what_is_kept_takes_that_memory(merge):
    program = replicated(merge, optimizer=ow.Adam(0.1))
    step = ow.Step(program, (), False, ahead=False)
    state = step.init(W)
    first = jax.devices()[0]
    lying = sum(s.data.nbytes for x in state.values for s in x.addressable_shards if s.device == first)
    assert sum(size for _, _, size in ow.plan(program).kept) == lying


def test_random_keys_and_numbers_of_the_network_are_counted():
    def network():
        x, steps = ow.data("x", (None, 6)), ow.state("steps", (3,), "int32")
        ow.assign(steps, steps + 1)
        return jnp.mean(ow.layer.fc(ow.layer.dropout(x, 0.5), 1))

    plan = ow.plan(ow.replicate(ow.SGD(0.1).minimize(ow.trace(network)), 4))
    sizes = {what: size for what, _, size in plan.kept}
    assert sizes == {
        "parameters": 4 * 7,
        "state": jax.random.key_data(jax.random.key(0)).nbytes + 3 * 4 + 2 * 4,
    }


# ---------------------------------------------------------------- the text


TEXT = """\
Plan of lambda on 4 devices: each sends 1.5 KiB at a step, on the average

collective                           by          sends
local_sgd: next(w/local) and 1 more  psum      1.5 KiB  at every 8 steps; a mean
all_mean(div)                        psum          6 B
all                                            1.5 KiB  0.13 of an all-reduce of the gradients

keeps on each device
parameters                           as all    8.0 KiB
state                                its own  16.0 KiB
state                                as all       12 B"""


def test_the_text():
    w, x = np.ones((64, 32), "float32"), np.ones((8, 64), "float32")
    program = ow.Momentum(0.1).minimize(lambda w, x: jnp.mean((x @ w) ** 2), w, x)
    assert str(ow.plan(ow.replicate(program, 4, ow.merge.LocalSGD(8)))) == TEXT


def test_a_test_program_has_no_gradients_to_compare_with():
    plan = ow.plan(ow.replicate(ow.for_test(program_of()), 4))
    assert (plan.sent, plan.bound) == (6, 0)
    assert "of an all-reduce" not in str(plan)


def test_sums_over_examples_that_layers_make_are_in_it():
    def network():
        x, y = ow.data("x", (None, 6)), ow.data("y", (None, 2))
        return ow.layer.mse(ow.layer.fc(ow.layer.batch_norm(x), 2), y)

    program = ow.SGD(0.1).minimize(ow.trace(network, batch_size=ROWS))
    by = {sync: ow.plan(ow.replicate(program, 4, sync_batch_norm=sync)) for sync in (True, False)}
    data = np.ones((ROWS, 6), "float32"), np.ones((ROWS, 2), "float32")
    for sync, plan in by.items():
        lowered = collectives(ow.replicate(program, 4, sync_batch_norm=sync), None, data)
        assert plan.sent == pytest.approx(sum(on_a_ring(kind, size, 4) for kind, size, _ in lowered))


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    "derive",
    [ow.for_test, ow.graph.forward_pass, ow.graph.update_pass, lambda p: p],
    ids=lambda f: f.__name__,
)
def test_a_program_that_is_not_replicated(derive):
    with pytest.raises(ow.GraphError, match=r"runs on one device.*plan\(replicate\(program, devices\)\)"):
        ow.plan(derive(program_of()))
