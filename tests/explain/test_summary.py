"""Summaries: every op counted once, sums that hold, layers folded, tables that read well."""

import html.parser
import re
from dataclasses import asdict, replace

import jax
import jax.numpy as jnp
import pytest

import onward as ow
from onward.core.cost import size
from onward.explain.summary.fold import folded
from onward.explain.summary.rows import SummaryRow

DEPTH, WIDTH, BATCH = 4, 6, 5
TRAINS = {ow.Pass.FORWARD, ow.Pass.BACKWARD, ow.Pass.UPDATE}


def layers(params, x):
    for i, w in enumerate(params):
        with jax.named_scope(f"layer_{i}"):
            x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


@pytest.fixture(scope="module")
def program():
    return ow.Adam(0.1).minimize(layers, [jnp.eye(WIDTH)] * DEPTH, jnp.ones((BATCH, WIDTH)))


@pytest.mark.parametrize("depth", [0, 1, 2, None])
def test_every_op_is_counted_once(program, depth):
    found = ow.summary(program, depth=depth)
    for column in ("ops", "parameters", "flops", "read", "written", "saved", "exchanged"):
        together = sum(getattr(row, column) * row.times for row in found.rows)
        by_pass = sum(getattr(row, column) for row in found.totals[:-1])
        assert together == by_pass == getattr(found.total, column)
    assert found.total.ops == len(program.ops)
    assert found.total.parameters == DEPTH * WIDTH**2
    assert found.total.flops == ow.cost(program).flops
    assert found.total.live == max(row.live for row in found.rows)


def test_a_layer_in_closed_form(program):
    forward, backward, update = (
        row for row in ow.summary(program).rows if row.scope.startswith("layer_1") and row.times > 1
    )
    product = 2 * BATCH * WIDTH * WIDTH
    assert forward.flops == product + 2 * BATCH * WIDTH  # tanh, and 1 - tanh for its gradient
    assert forward.parameters == WIDTH**2
    assert forward.output == f"f32[{BATCH},{WIDTH}]"
    assert backward.flops >= 2 * product
    assert update.made_by is ow.Pass.UPDATE
    assert update.ops == 1


def test_what_is_saved_is_what_the_backward_pass_reads(program):
    late = [op for op in program.ops if op.made_by is ow.Pass.BACKWARD]
    early = {v for op in program.ops if op.made_by is ow.Pass.FORWARD for v in op.outputs}
    read = {v for op in late for v in op.inputs}
    assert ow.summary(program).total.saved == sum(map(size, read & early))


def test_alike_layers_are_one_row(program):
    layers = {row.scope: row.times for row in ow.summary(program).rows if row.scope.startswith("layer")}
    assert sum(layers.values()) == DEPTH
    (alike,) = (scope for scope, times in layers.items() if times > 1)
    assert f"{alike}  x {layers[alike]}" in str(ow.summary(program))


def test_layers_that_differ_are_not():
    params = [jnp.ones((3, 4)), jnp.ones((4, 5)), jnp.ones((5, 6))]
    found = ow.summary(ow.trace(layers, params, jnp.ones((2, 3))))
    assert [row.times for row in found.rows] == [1] * 4


def test_sorting(program):
    flops = list(ow.summary(program, sort="flops").rows)
    assert flops[0].scope.startswith("layer_1")
    assert ow.summary(program).sorted("flops").rows == tuple(flops)
    with pytest.raises(ow.ArgumentError, match="nearest names are 'flops'"):
        ow.summary(program, sort="flop")


def test_collectives_and_devices(program):
    found = ow.summary(ow.replicate(program, devices=1))
    merged = ow.summary(
        ow.replicate(ow.SGD(0.1).minimize(layers, [jnp.eye(8)] * 2, jnp.ones((8, 8))), devices=8)
    )
    assert merged.total.exchanged == 2 * 8 * 8 * 4 + 4  # both gradients and the loss
    assert "each of 8 devices" in str(merged)
    assert "exchanged" in str(merged)
    assert "exchanged" not in str(ow.summary(program))
    assert found.total.ops >= len(program.ops)


def test_parameters_that_nothing_reads_are_in_the_total():
    params = {"w": jnp.ones((3, 3)), "unused": jnp.ones(10)}
    found = ow.summary(ow.trace(lambda p, x: jnp.sum(x @ p["w"]), params, jnp.ones((2, 3))))
    assert found.total.parameters == 19
    assert sum(row.parameters for row in found.rows) == 9
    assert "in the total alone: unused" in str(found).replace("params/", "")


def test_a_while_loop_is_told():
    program = ow.trace(lambda x: jax.lax.while_loop(lambda x: x[0] < 9, lambda x: x + 1, x), jnp.ones(4))
    assert "counts as one turn" in str(ow.summary(program))


def test_rows_are_plain(program):
    (record, *_) = map(asdict, ow.summary(program).rows)
    assert set(map(type, record.values())) <= {str, int, ow.Pass}


def test_an_empty_program():
    found = ow.summary(ow.trace(lambda x: x, jnp.ones(3)))
    assert found.total.ops == 0
    assert "total" in str(found)


@pytest.mark.parametrize("wrong", [-1, 1.5, "all"])
def test_depth_that_is_none(program, wrong):
    with pytest.raises(ow.ArgumentError, match="number of levels"):
        ow.summary(program, depth=wrong)


def test_no_program():
    with pytest.raises(ow.ArgumentError, match="expected a Program"):
        ow.summary(layers)


class Cells(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.cells, self.open = [], []

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "td" in self.open:
            self.cells.append(data)


def test_html_says_what_the_text_says(program):
    found = ow.summary(program)
    reader = Cells()
    reader.feed(found._repr_html_())
    assert not reader.open
    table = str(found).split("\n")[2:]
    words = [w for line in table if "─" not in line for w in re.split(r"\s{2,}", line.strip())]
    assert {c for c in reader.cells if " x " not in c} <= set(words)
    assert "http" not in found._repr_html_()


def test_html_is_escaped():
    def loss(w):
        with jax.named_scope("a<b>"):
            return jnp.sum(w)

    shown = ow.summary(ow.trace(loss, jnp.ones(3)))._repr_html_()
    assert "a&lt;b&gt;" in shown
    assert "a<b>" not in shown


def test_the_longest_repetition_is_folded():
    """Three alike and another one, twice: four rows remain, not one for each three."""
    row = SummaryRow("", None, 1, 0, "f32[]", 9, 8, 4, 0, 4, 0)
    rows = [replace(row, scope=scope, flops=10 if scope in "dh" else 9) for scope in "abcdefgh"]
    assert [r.scope for r in folded(rows)] == ["a ... e", "b ... f", "c ... g", "d ... h"]


def test_without_scopes_and_functions_it_goes_by_where_the_parameters_lie():
    block = {"attn": {"wq": jnp.eye(3), "wk": jnp.eye(3)}, "mlp": {"w": jnp.eye(3), "b": jnp.ones(3)}}
    params = {"block_0": block, "block_1": block, "head": jnp.ones(3)}

    def loss(params, x):
        for name in ("block_0", "block_1"):
            attn, mlp = params[name]["attn"], params[name]["mlp"]
            x = x + jax.nn.softmax((x @ attn["wq"]) @ (x @ attn["wk"]).T) @ x
            x = x + jnp.tanh(x @ mlp["w"] + mlp["b"])
        return jnp.mean((x @ params["head"]) ** 2)

    def step(params, x):
        value, gradients = jax.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

    def steps(params, xs):
        return jax.lax.scan(step, params, xs)

    x = jnp.ones((4, 3))
    opened = [ow.inspect(step, params, x), ow.adopt(step, params, x)]
    for program in (*opened, ow.inspect(steps, params, x[None]), ow.SGD(0.1).minimize(loss, params, x)):
        found = ow.summary(program, depth=2)
        numbers = {(row.scope, row.made_by): row.parameters * row.times for row in found.rows}
        blocks = {f"block_{i}/{part}" for i in (0, 1) for part in ("attn", "mlp")}
        shown = {name for scope, _ in numbers for name in scope.split(" ... ")}
        assert shown <= {*blocks, "no scope", "", "(no scope)"}
        assert {made_by for scope, made_by in numbers if scope.startswith("block_0/attn")} == TRAINS
        assert sum(numbers.values()) == 2 * (9 + 9 + 9 + 3) + 3
        assert sum(n for (scope, _), n in numbers.items() if scope.startswith("block")) == 60
