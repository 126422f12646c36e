"""Rolling layers into a loop: what is found, what it becomes, and how it goes with other transforms."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import onward as ow
from onward.core.errors import GraphError, UnknownNameError
from onward.core.program import Program
from onward.core.walk import producers
from onward.derive.error_clip import error_clip
from onward.develop.accumulation.accumulate import accumulate
from onward.develop.roll import find
from onward.develop.roll.cost import worth_rolling
from onward.develop.roll.find import find_runs
from onward.develop.roll.line import line_of, returned_by
from onward.develop.roll.roll import roll, rolls_of
from onward.develop.roll.run import From

WIDTH, BATCH = 6, 8
RNG = np.random.default_rng(0)
X, Y = (jnp.asarray(RNG.standard_normal((BATCH, WIDTH)).astype(np.float32)) for _ in range(2))


def layers(count, width=WIDTH):
    rng = np.random.default_rng(1)
    return [
        {"w": jnp.asarray(rng.normal(0, 0.3, (width, width)).astype(np.float32)), "b": jnp.zeros(width)}
        for _ in range(count)
    ]


def loss(params, x, y):
    for layer in params:
        x = x + jnp.tanh(x @ layer["w"] + layer["b"])
    return jnp.mean((x - y) ** 2)


def forward(function=loss, count=4, **options):
    return ow.trace(function, layers(count), X, Y, **options)


@cache
def minimized():
    return ow.Momentum(1e-2).minimize(loss, layers(4), X, Y)


def times(program):
    return [found.times for found in rolls_of(program)]


def types(program):
    return [op.type for op in program.ops]


def trained(program, steps=20, data=(X, Y), params=None, **options):
    """The losses of some steps, the parameters and what else was fetched after them."""
    step = ow.compile(program, **options)
    state = step.init(layers(4) if params is None else params)
    losses = []
    for _ in range(steps):
        state, out = step(state, *data)
        losses.append(float(out.loss))
    return losses, [np.asarray(leaf) for leaf in jax.tree.leaves(state.parameters)], out


def expect_equal(found, wanted, rtol=1e-5):
    np.testing.assert_allclose(found[0], wanted[0], rtol=rtol)
    for mine, theirs in zip(found[1], wanted[1], strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=10 * rtol, atol=rtol)


def runs_in(function, *args):
    program = ow.trace(function, *args)
    return find_runs(line_of(program, returned_by(program), frozenset())).runs


def wired_at_random(count):
    """Sums, each of the one before and of an earlier one, which hardly ever is as far away twice in a row."""

    def function(x):
        made = [x, 2 * x, 3 * x]
        for i in range(count):
            made.append(made[-1] + made[-2 - (i * i * 7 + i // 3) % min(8, len(made) - 2)])
        return made[-1]

    return ow.trace(function, X)


def followed(program, monkeypatch):
    """How many ops the search looks at to see whether layers that look alike read alike."""
    counted = []

    def run_of(layers, between):
        counted.append(len(between))
        return real(layers, between)

    real = find.run_of
    monkeypatch.setattr(find, "run_of", run_of)
    find_runs(line_of(program, returned_by(program), frozenset()))
    monkeypatch.undo()
    return sum(counted)


def test_a_line_whose_layers_end_soon_is_searched_in_time_that_grows_with_its_length(monkeypatch):
    short, long = (followed(wired_at_random(count), monkeypatch) for count in (200, 800))
    assert short > 1000
    assert long < 6 * short


def test_a_search_that_takes_too_long_is_given_up_and_says_so(monkeypatch):
    monkeypatch.setattr(find, "_FOLLOWED", 0)
    monkeypatch.setattr(find, "_FOLLOWED_EACH", 1)
    program = wired_at_random(100)
    assert worth_rolling(program).reason.endswith("(search given up: too much nearly repeats)")
    with pytest.raises(GraphError, match="The search was given up"):
        roll(program)
    deep = forward(count=20)
    assert not worth_rolling(deep) or "given up" in worth_rolling(deep).reason
    assert times(roll(deep)) == [20]


# ------------------------------------------------------------------------------------- what it becomes


def test_a_forward_pass_becomes_stacks_and_one_scan_whose_layer_can_be_looked_into():
    rolled = roll(forward())
    assert types(rolled)[:3] == ["stack", "stack", "scan"]
    stacks, scan = rolled.ops[:2], rolled.ops[2]
    assert [op.outputs[0].name for op in stacks] == ["stack(params/*/w)", "stack(params/*/b)"]
    assert [op.outputs[0].shape for op in stacks] == [(4, WIDTH, WIDTH), (4, WIDTH)]
    assert [v.name for v in stacks[0].inputs] == [f"params/{i}/w" for i in range(4)]
    layer = scan.subprograms["jaxpr"]
    assert types(layer) == ["dot_general", "broadcast_in_dim", "add", "tanh", "add"]
    assert len(scan.body.equations) == 1
    assert scan.source is not None
    assert scan.source.function == "loss"


def test_named_scopes_of_a_layer_stand_in_the_loop():
    def scoped(params, x, y):
        for layer in params:
            with jax.named_scope("block"):
                x = x + jnp.tanh(x @ layer["w"] + layer["b"])
        return jnp.mean((x - y) ** 2)

    rolled = roll(forward(scoped))
    scan = next(op for op in rolled.ops if op.type == "scan")
    assert scan.scope == "block"
    assert {op.scope for op in scan.subprograms["jaxpr"].ops} == {"block"}
    assert str(rolls_of(rolled)[0]) == "4 layers of 5 ops of block in one loop, 2 parameters of each stacked"


def test_ops_and_compiled_instructions_do_not_grow_with_depth():
    def size(count):
        program = roll(ow.SGD(0.1).minimize(forward(count=count)))
        given = [[jax.ShapeDtypeStruct(v.shape, v.dtype) for v in g] for g in (program.state, program.inputs)]
        inner = [op for op in program.ops if op.type not in ("stack", "stack_grad", "sgd")]
        return len(inner), _in_loops(jax.jit(ow.core.lower.lower(program, program.outputs)).lower(*given))

    assert size(4) == size(9)


def _in_loops(lowered):
    """How many operations stand in the loops of what is to be compiled."""
    text = lowered.as_text()
    return text.count("stablehlo.dot_general"), text.count("stablehlo.while"), text.count("stablehlo.tanh")


def test_what_layers_have_in_common_and_of_their_own_is_told_apart():
    def mixed(params, x, y):
        for i, layer in enumerate(params):
            x = jnp.tanh(x @ layer["w"] * np.float32(1 + i) + params[0]["b"] * y)
        return jnp.mean(x)

    (run,) = runs_in(mixed, layers(5), X, Y)
    reads = {read for reads in run.reads for read in reads}
    assert run.times == 5
    assert names_from(reads, From.CARRY) == ["x"]
    assert names_from(reads, From.STACKED) == ["params/0/w"]
    assert names_from(reads, From.SHARED) == ["params/0/b", "y"]


def names_from(reads, source):
    return sorted(read.values[0].name for read in reads if read.source is source)


def test_what_stands_between_layers_moves_before_or_behind_the_loop():
    def with_others(params, x, y):
        seen = 0.0
        for i, layer in enumerate(params):
            x = x + jnp.tanh(x @ layer["w"] + layer["b"])
            if i == 2:
                y = jnp.cumsum(y, 0)
                seen = jnp.max(jnp.sin(x))
        return jnp.mean((x - y) ** 2) + seen

    program = ow.SGD(0.1).minimize(with_others, layers(6), X, Y)
    rolled = roll(program)
    assert times(rolled) == [6]
    place = {kind: types(rolled).index(kind) for kind in ("cumsum", "scan", "reduce_max")}
    assert place["cumsum"] < place["scan"] < place["reduce_max"]
    # Eight steps: later ones oscillate, which magnifies the rounding of another order of sums.
    expect_equal(trained(rolled, 8, params=layers(6)), trained(program, 8, params=layers(6)))


def test_a_layer_that_reads_what_another_op_made_of_layers_before_begins_a_new_loop():
    def in_between(params, x, y):
        for i, layer in enumerate(params):
            x = x + jnp.tanh(x @ layer["w"] + layer["b"])
            if i == 3:
                x = jnp.cumsum(x, 1)
        return jnp.mean((x - y) ** 2)

    assert [run.times for run in runs_in(in_between, layers(9), X, Y)] == [4, 5]


def test_effects_keep_their_order_and_no_loop_reaches_over_them():
    def printing(params, x, y):
        for i, layer in enumerate(params):
            x = x + jnp.tanh(x @ layer["w"] + layer["b"])
            if i in (3, 4):
                jax.debug.print("seen {}", x.sum())
        return jnp.mean((x - y) ** 2)

    rolled = roll(forward(printing, 9))
    assert times(rolled) == [4, 4]
    kinds = [kind for kind in types(rolled) if kind in ("scan", "tanh", "debug_print", "debug_callback")]
    assert [kinds.index("scan"), len(kinds), kinds[2]] == [0, 5, "tanh"]


def test_one_wide_layer_among_narrow_ones_stays_as_it_is():
    def wide(params, x, y):
        for layer in params["a"]:
            x = jnp.tanh(x @ layer["w"] + layer["b"])
        x = jnp.tanh(x @ params["up"]) @ params["down"]
        for layer in params["b"]:
            x = jnp.tanh(x @ layer["w"] + layer["b"])
        return jnp.mean((x - y) ** 2)

    params = {"a": layers(4), "up": jnp.ones((WIDTH, 9)), "down": jnp.ones((9, WIDTH)), "b": layers(3)}
    assert [run.times for run in runs_in(wide, params, X, Y)] == [4, 3]


def test_layers_within_layers_become_a_loop_within_the_loop():
    def blocks(params, x, y):
        for block in params:
            for layer in block:
                x = x + jnp.tanh(x @ layer["w"] + layer["b"])
            x = jnp.sin(x - x.mean(-1, keepdims=True))
        return jnp.mean((x - y) ** 2)

    rolled = roll(ow.trace(blocks, [layers(4) for _ in range(3)], X, Y))
    (scan,) = (op for op in rolled.ops if op.type == "scan")
    assert times(rolled) == [3]
    assert types(scan.subprograms["jaxpr"]).count("scan") == 1
    assert "tanh" not in types(scan.subprograms["jaxpr"])


def test_the_search_ignores_names_and_scopes():
    def renamed(params, x, y):
        for i, layer in enumerate(params):
            with jax.named_scope("abcdefgh"[i]):
                x = checkpoint_name(x + jnp.tanh(x @ layer["w"]), f"h{i}")
        return jnp.mean((x - y) ** 2)

    assert [run.times for run in runs_in(renamed, layers(6), X, Y)] == [6]


# ------------------------------------------------------------------------------- what others read of it


def test_what_is_kept_of_single_layers_bears_its_name():
    rolled = roll(minimized(), keep=["tanh_1", "add_5", "params/0/w"])
    plain = trained(minimized(), 2, fetch=["tanh_1", "add_5"])
    found = trained(rolled, 2, fetch=["tanh_1", "add_5"])
    made = producers(rolled)
    assert {made[rolled[name]].type for name in ("tanh_1", "add_5")} == {"unstack"}
    for name in ("tanh_1", "add_5"):
        np.testing.assert_allclose(found[2][name], plain[2][name], rtol=1e-5, atol=1e-6)


def test_all_layers_can_be_kept_by_a_pattern():
    rolled = roll(minimized(), keep="tanh*")
    (unstack,) = (op for op in rolled.ops if op.type == "unstack")
    assert [v.name for v in unstack.outputs] == ["tanh", "tanh_1", "tanh_2", "tanh_3"]


def test_batch_norm_and_dropout_keep_their_state():
    def network():
        x, y = ow.data("x", (None, WIDTH)), ow.data("y", (None, WIDTH))
        for _ in range(3):
            hidden = ow.layer.batch_norm(ow.layer.fc(x, WIDTH, act="relu"))
            x = x + ow.layer.dropout(hidden, 0.2)
        return jnp.mean((x - y) ** 2)

    program = ow.SGD(0.05).minimize(ow.trace(network, batch_size=BATCH))
    rolled = roll(program)
    assert times(rolled) == [3]
    found, wanted = (after_steps(p) for p in (rolled, program))
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-6, err_msg=name)


def after_steps(program, steps=20):
    """All state but the random key, by name."""
    step = ow.compile(program)
    state = step.init()
    for _ in range(steps):
        state, _ = step(state, x=X, y=Y)
    return {name: np.asarray(state[name]) for name in state if name != "key"}


def test_another_rate_of_dropout_in_each_layer_is_data_of_the_loop():
    def network():
        x = ow.data("x", (None, WIDTH))
        for i in range(4):
            x = x + ow.layer.dropout(jnp.tanh(ow.layer.fc(x, WIDTH)), 0.1 * (i + 1))
        return jnp.mean(x**2)

    rolled = roll(ow.trace(network, batch_size=BATCH))
    assert times(rolled) == [4]
    rates = [value for value in rolled.constants.values() if value.dtype == np.float32]
    assert any(np.allclose(value, 1 - 0.1 * np.arange(1, 5)) for value in rates)


# --------------------------------------------------------------------------------- other transforms


OTHERS = {
    "accumulate": lambda p: accumulate(p, 2),
    "guard": ow.guard,
    "mixed": lambda p: ow.mixed_precision(p, "bfloat16"),
    "replicate": lambda p: ow.replicate(p, 2),
    "guard-accumulate": lambda p: accumulate(ow.guard(p), 2),
    "accumulate-replicate": lambda p: ow.replicate(accumulate(p, 2), 2),
}


@pytest.mark.parametrize("name", OTHERS)
def test_rolled_before_or_after_is_the_same(name):
    before, after = OTHERS[name](roll(minimized())), roll(OTHERS[name](minimized()))
    assert str(before) == str(after)
    assert times(before) == ([3] if name == "mixed" else [4])


@pytest.mark.parametrize("name", ["accumulate-replicate", "mixed"])
def test_with_others_it_trains_as_without(name):
    plain = OTHERS[name](minimized())
    expect_equal(trained(roll(plain)), trained(plain), 2e-2 if name == "mixed" else 1e-5)


def test_servers_cut_it_as_ever():
    plain, rolled = (ow.split(p, servers=2) for p in (minimized(), roll(minimized())))
    assert [list(map(str, own)) for own in rolled.shards] == [list(map(str, own)) for own in plain.shards]
    assert times(rolled.base) == [4]
    assert [v.name for v in rolled.trainer.outputs] == [v.name for v in plain.trainer.outputs]


def test_test_and_evaluation_programs_are_rolled_too():
    averaged = ow.Adam(1e-2, rules=[ow.EMA(0.9)]).minimize(loss, layers(4), X, Y)
    assert times(ow.for_test(roll(averaged))) == [4]
    assert times(ow.for_evaluation(roll(averaged))) == [4]
    assert times(roll(ow.for_test(averaged))) == [4]


def test_a_batch_of_another_length_is_rolled_again():
    step = ow.compile(roll(minimized()))
    _, out = step(step.init(layers(4)), X[:3], Y[:3])
    x, y = np.asarray(X)[:3], np.asarray(Y)[:3]
    for layer in layers(4):
        x = x + np.tanh(x @ np.asarray(layer["w"]) + np.asarray(layer["b"]))
    np.testing.assert_allclose(out.loss, np.mean((x - y) ** 2), rtol=1e-5)


def test_errors_are_clipped_within_the_loop():
    clipped = ow.SGD(0.1).minimize(error_clip(forward(), "tanh*", 0.01))
    rolled = roll(clipped)
    assert [found.ops for found in rolls_of(rolled)] == [6]
    expect_equal(trained(rolled, 5), trained(clipped, 5))


def test_where_no_gradient_flows_stays_outside():
    with pytest.warns(ow.UnreachedWarning):
        stopped = ow.SGD(0.1).minimize(loss, layers(8), X, Y, no_grad_set=["tanh_3"])
    rolled = roll(stopped)
    assert times(rolled) == [3, 4]
    expect_equal(trained(rolled, 5, params=layers(8)), trained(stopped, 5, params=layers(8)))


def test_what_a_program_is_pruned_to_is_handed_out():
    pruned = ow.prune(minimized(), ["tanh_1", "loss"])
    rolled = roll(pruned)
    assert times(rolled) == [4]
    assert [v.name for v in rolled.outputs] == [v.name for v in pruned.outputs] == ["tanh_1", "div"]


def test_frozen_layers_are_rolled():
    program = ow.SGD(0.1).minimize(loss, layers(4), X, Y, parameter_list=["params/3/*"])
    rolled = roll(program)
    assert [g.name for _, g in rolled.gradients] == [g.name for _, g in program.gradients]
    expect_equal(trained(rolled, 5), trained(program, 5))


def test_it_can_be_rolled_before_it_is_minimized_and_only_once():
    early = ow.Momentum(1e-2).minimize(roll(forward()))
    assert str(early) == str(roll(minimized()))
    assert str(roll(early)) == str(early)


# ------------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda p, x, y: jnp.mean(x @ p[0]["w"]), "none of the 3 ops.*No sequence"),
        (lambda p, x, y: jnp.mean(jnp.tanh(jnp.tanh(x @ p[0]["w"]) @ p[1]["w"])), "too small to gain"),
    ],
)
def test_where_nothing_repeats_the_nearest_is_told(function, words):
    with pytest.raises(GraphError, match=words):
        roll(forward(function))


def test_layers_of_other_widths_are_told_by_op_line_and_types():
    def pyramid(params, x):
        for w in params:
            x = jnp.tanh(x @ w)
        return x.sum()

    weights = [jnp.ones((a, b)) for a, b in ((6, 5), (5, 4), (4, 3))]
    with pytest.raises(GraphError, match=r"dot_general at .*test_roll.py:\d+ is .*float32\[5,4\]"):
        roll(ow.trace(pyramid, weights, X))


def test_layers_that_are_one_op_each_are_told_by_it():
    block = jax.checkpoint(lambda w, x: jnp.tanh(x @ w))
    weights = [jnp.ones((a, b)) for a, b in ((6, 5), (5, 4), (4, 3))]

    def pyramid(params, x):
        for w in params:
            x = block(w, x)
        return x.sum()

    with pytest.raises(
        GraphError, match=r"Nearest comes 1 op that follows itself 3 times, but .*float32\[5,4\]"
    ):
        roll(ow.trace(pyramid, weights, X))


def test_a_gradient_within_a_layer_cannot_be_kept():
    with pytest.raises(GraphError, match=r"'grad\(tanh_1\)' is computed within layers"):
        roll(minimized(), keep=["grad(tanh_1)"])
    assert times(roll(minimized(), keep=["grad(params/1/w)", "div", "x"])) == [4]


def test_what_is_kept_must_exist():
    with pytest.raises(UnknownNameError, match="roll, keep: nothing is named 'tnah'"):
        roll(minimized(), keep=["tnah"])


def test_a_program_made_by_hand_cannot_be_rolled():
    with pytest.raises(ow.RecipeError, match="was not made by trace"):
        roll(Program("by hand"))


# ------------------------------------------------------------------------------------------- the cost


def test_many_layers_are_worth_a_loop_and_few_are_not():
    few, many = (ow.SGD(0.1).minimize(forward(count=n)) for n in (4, 60))
    assert not worth_rolling(few)
    assert "4 layers of 5 ops" in worth_rolling(few).reason
    assert worth_rolling(many)
    assert not worth_rolling(ow.trace(lambda w: jnp.sum(w), jnp.ones(3)))


def test_layers_that_are_one_op_are_worth_what_they_run():
    """Twelve layers of one checkpoint each, in which there is enough to gain; and of one op that is all."""

    def blocks(w, x):
        for row in w:
            for _ in range(4):
                x = x + jnp.tanh(x * row) * jax.lax.rsqrt(1 + x * x)
        return x

    def deep(block, w, x):
        for _ in range(12):
            x = block(w, x)
        return jnp.sum(x)

    w, x = jnp.ones((2, 3)), jnp.ones(3)
    of_blocks, of_ops = (
        worth_rolling(ow.trace(lambda w, x, block=block: deep(block, w, x), w, x))
        for block in (jax.checkpoint(blocks), lambda w, x: jnp.tanh(x))
    )
    [run] = runs_in(lambda w, x: deep(jax.checkpoint(blocks), w, x), w, x)
    within = len(jax.make_jaxpr(blocks)(w, x).eqns)
    assert run.saved == 11 * within
    assert of_blocks
    assert of_blocks.reason == "12 layers of 1 op"
    assert of_ops.reason == "12 layers of 1 op: so few ops gain too little from a loop"


@pytest.mark.parametrize("form", [lambda f: f, jax.checkpoint], ids=["as they are", "checkpointed"])
def test_convolutions_are_not_worth_a_loop_on_a_cpu(form):
    def convolved(kernels, x):
        for kernel in kernels:
            x = form(lambda x, k: x + jax.lax.conv(x, k, (1, 1), "SAME"))(x, kernel)
        return jnp.mean(x)

    program = ow.trace(convolved, [jnp.ones((2, 2, 3, 3))] * 150, jnp.ones((1, 2, 4, 4)))
    verdict = worth_rolling(program)
    assert bool(verdict) == (jax.default_backend() != "cpu")
    assert verdict or verdict.reason.endswith("a convolution is slow within a loop on a CPU")
