"""What is told of the memory of a step; ``test_foretold`` has its bytes against those of XLA."""

import re
from functools import cache
from xml.etree import ElementTree as ET

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from benchmarks import models

import onward as ow
from onward.core.errors import ArgumentError
from onward.core.show import nbytes
from onward.execute.memory.held import MemoryShare
from onward.explain.memory.memory import memory
from onward.explain.memory.plot import _tick

SMALL = {"d": 32, "heads": 2, "seq": 32, "batch": 8}


def trained(model, optimizer=None):
    return (optimizer or ow.Adam(1e-3)).minimize(model.loss, model.params, *model.data)


@cache
def transformer():
    return trained(models.transformer(layers=2, **SMALL), ow.SGD(0.1))


@cache
def mlp():
    return trained(models.mlp((64, 128, 128, 10), batch=64))


@cache
def blocks(layers=6):
    def loss(params, x):
        for i, w in enumerate(params):
            with jax.named_scope(f"block_{i}"):
                h = jnp.sin(x @ w)
                x = x + jnp.tanh(h) * jnp.exp(-h)
        return jnp.mean(x**2)

    x = jnp.linspace(-1, 1, 256 * 32).reshape(256, 32)
    return ow.SGD(0.1).minimize(loss, [jnp.eye(32) * 0.3] * layers, x)


PROGRAMS = {
    "mlp": mlp,
    "blocks": blocks,
    "blocks recomputed": lambda: ow.recompute(blocks(), scopes="block_*"),
    "transformer": transformer,
}


@cache
def program(name):
    return PROGRAMS[name]()


@pytest.mark.parametrize("name", ["mlp", "blocks", "blocks recomputed", "transformer"])
def test_the_curve_is_the_sum_of_its_shares(name):
    found = memory(program(name))
    assert [m.op for m in found.curve] == list(found.compiled.ops)
    assert all(m.bytes == sum(m.shares.values()) for m in found.curve)
    assert found.peak == max(m.bytes for m in found.curve) == sum(found.shares.values())
    assert found.peak_op is next(m.op for m in found.curve if m.bytes == found.peak)
    assert found.peak == sum(held.bytes for held in found.held)
    assert found.shares[MemoryShare.PARAMETERS] == sum(map(nbytes, program(name).parameters))
    others = [v for v in program(name).state if v.kind is not ow.Kind.PARAMETER]
    assert found.shares[MemoryShare.STATE] == sum(map(nbytes, others))


def test_what_is_saved_is_made_in_the_forward_pass_and_read_after_it():
    found = memory(program("transformer"))
    saved = [held for held in found.held if held.share is MemoryShare.SAVED]
    assert len(saved) > 20
    for held in saved:
        assert held.maker.made_by is ow.Pass.FORWARD
        assert held.reader.made_by is not ow.Pass.FORWARD
        assert held.variable in held.maker.outputs


def test_recomputing_saves_less_and_computes_the_rest_again():
    before, after = memory(blocks()), memory(program("blocks recomputed"))
    assert after.peak < before.peak
    assert after.shares[MemoryShare.SAVED] < 0.6 * before.shares[MemoryShare.SAVED]
    text = str(before.beside(after.program))
    assert [line.split()[0] for line in text.splitlines()][-1] == "all"
    assert "before" in text.splitlines()[0]


def test_gradients_wait_for_the_update():
    def loss(params, x):
        return jnp.sum(jnp.tanh(x @ params[0]) @ params[1])

    p = ow.SGD(0.1).minimize(loss, [jnp.ones((8, 8))] * 2, jnp.ones((4, 8)))
    found = memory(p)
    at_update = [m for m in found.curve if m.op.made_by is ow.Pass.UPDATE]
    assert max(m.shares[MemoryShare.GRADIENTS] for m in at_update) >= 8 * 8 * 4
    assert found.curve[0].shares[MemoryShare.GRADIENTS] == 0


def test_gradients_that_nothing_uses_are_handed_out():
    def loss(params, x):
        return jnp.sum(x @ params[0] @ params[1])

    p = ow.append_backward(ow.trace(loss, [jnp.ones((8, 8))] * 2, jnp.ones((4, 8))))
    lives = memory(p)._lives
    kept = {v for a in lives.arrays if a.begin >= 0 and a.end == len(lives.steps) for v in a.variables}
    assert {g for _, g in p.gradients} <= kept


def test_the_table_names_the_largest_once_for_equal_layers():
    text = str(memory(program("transformer")))
    head, shares, table = text.split("\n\n")
    assert re.match(
        r"Memory of loss: [\d.]+ MiB at the peak, at op \d+ of \d+: \w+  \w+  models.py:\d+", head
    )
    assert "saved for backward" in shares
    assert "2 x block_0/attention/exp" in table
    assert len(table.splitlines()) <= 12


def texts(svg):
    root = ET.fromstring(svg)
    return ["".join(node.itertext()) for node in root.iter("{http://www.w3.org/2000/svg}text")]


def test_the_picture_tells_the_peak_and_every_op():
    found = memory(program("mlp"))
    told = texts(found.plot().svg)
    peak = next(t for t in told if t.startswith("peak "))
    assert found.peak_op.type in peak
    assert sum(t.startswith("here ") for t in told) == len(found.compiled.ops)
    assert {"forward", "backward"} <= set(told)


def test_a_picture_of_many_ops_stays_small():
    svg = memory(transformer()).plot().svg
    assert len(svg) < 300_000
    assert sum(t.startswith("here ") for t in texts(svg)) <= 300


def test_two_stand_on_one_scale():
    one, other = memory(blocks()), memory(program("blocks recomputed"))
    svg = one.beside(other, ("kept", "again")).plot().svg
    told = texts(svg)
    assert {"kept", "again"} <= set(told)
    tops = [float(cy) for cy in re.findall(r'<circle cx="[\d.]+" cy="([\d.]+)"', svg)]
    heights = [260 - top for top in tops]
    assert heights[1] / heights[0] == pytest.approx(other.peak / one.peak, rel=0.01)


def test_pictures_are_saved(tmp_path):
    plot = memory(program("mlp")).plot()
    plot.save(tmp_path / "memory.svg")
    plot.save(str(tmp_path / "memory.html"))
    assert ET.parse(tmp_path / "memory.svg").getroot().tag.endswith("svg")
    assert (tmp_path / "memory.html").read_text().startswith("<!DOCTYPE html>")


def test_names_are_escaped():
    def loss(w):
        with jax.named_scope("<script>"):
            return jnp.sum(jnp.exp(w))

    found = memory(ow.trace(loss, jnp.ones(3), name="<b>"))
    assert "<script>" not in found._repr_html_()
    assert "<b>" not in found._repr_html_()


def test_a_program_that_computes_nothing_holds_what_it_is_given():
    found = memory(ow.trace(lambda w: w, jnp.ones(5)))
    assert found.peak == 20
    assert found.peak_op is None
    assert "20 B at the peak" in str(found)
    assert found._repr_html_()


def test_no_program_is_refused():
    with pytest.raises(ArgumentError, match="memory was given"):
        memory(np.ones(3))


@pytest.mark.parametrize(("most", "tick"), [(1, 1), (4, 1), (5, 2), (8, 2), (1000, 256), (1024, 256)])
def test_marks_are_round_and_some_four(most, tick):
    assert _tick(most) == tick


@pytest.mark.parametrize("where", ["beside", "in a loop"])
def test_a_loss_that_prints_is_looked_at_as_any_other(where, capfd):
    def loss(w, x):
        def layer(h, _):
            if where == "in a loop":
                jax.debug.print("h {}", h.sum())
            return jnp.tanh(h @ w), None

        h, _ = jax.lax.scan(layer, x, None, length=4)
        if where == "beside":
            jax.debug.callback(lambda h: None, h)
        return jnp.mean(h**2)

    w, x = jnp.eye(4), jnp.ones((64, 4))
    program = ow.SGD(0.1).minimize(loss, w, x)
    assert ow.memory(program, tune=False).peak > 0
    assert str(ow.summary(program)).startswith("Program loss: 1 feed")
    assert str(ow.diff(program, ow.accumulate(program, 2)))
    step = ow.compile(program)
    _, out = step(step.init(w), x)
    jax.effects_barrier()
    once = np.tanh(np.tanh(np.tanh(np.tanh(1.0))))
    np.testing.assert_allclose(out.loss, once**2, rtol=1e-5)
    assert ("h 256" in capfd.readouterr().out) == (where == "in a loop")


def test_arrays_without_numbers_are_looked_at_and_trained():
    def loss(p, x):
        return jnp.mean((x @ p["w"] @ p["v"] + p["b"]) ** 2)

    params, x = {"w": jnp.ones((4, 0)), "v": jnp.ones((0, 3)), "b": jnp.ones(3)}, jnp.ones((8, 4))
    program = ow.SGD(0.1).minimize(loss, params, x)
    expected = 1 - 0.1 * jax.grad(loss)(params, x)["b"]
    for p in (program, ow.accumulate(program, 2), ow.mixed_precision(program, "float8")):
        assert ow.memory(p, tune=False).peak > 0
        step = ow.compile(p)
        state, _ = step(step.init(params), x)
        np.testing.assert_allclose(state["b"], expected, rtol=1e-2)
        assert state["w"].shape == (4, 0)
    assert "2 devices" in str(ow.layout(program, devices=2))
