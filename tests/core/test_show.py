"""The text view."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import onward as ow


def loss(params, x):
    for i, w in enumerate(params):
        with jax.named_scope(f"layer_{i}"), jax.named_scope("inner"):
            x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def program(layers, optimizer=None):
    args = [jnp.eye(2)] * layers, jnp.ones((3, 2))
    return optimizer.minimize(loss, *args) if optimizer else ow.trace(loss, *args)


def test_a_small_program_shows_every_op():
    training = program(2, ow.SGD(0.1))
    text = str(training)
    assert all(f"= {op.type}(" in text for op in training.ops)
    assert text.splitlines()[0] == (
        "Program loss: 1 feed, 2 parameters (8 numbers), 2 other state Variables, 18 ops"
    )
    assert [line.split()[0] for line in text.splitlines()[2:] if line[0].isalpha()] == [
        "feed",
        "parameter",
        "state",
        "forward",
        "backward",
        "update",
        "return",
        "next",
    ]


FOLDED = {
    0: ["7 ops     dot_general 2, tanh 2, integer_pow 1, reduce_sum 1, div 1"],
    1: ["2 ops     layer_0: dot_general 1, tanh 1", "2 ops     layer_1: dot_general 1, tanh 1"],
    2: ["2 ops     layer_0/inner: dot_general 1, tanh 1", "2 ops     layer_1/inner: dot_general 1, tanh 1"],
}


@pytest.mark.parametrize("depth", FOLDED)
def test_depth_folds_scopes(depth, capsys):
    ow.show(program(2), depth=depth)
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition("│ ")[2] for line in lines if " ops  " in line] == FOLDED[depth]


def test_a_large_program_is_folded_by_itself():
    training = program(60, ow.Adam(0.1))
    assert len(training.ops) > 200
    text = str(training)
    assert "layer_59: dot_general 1, tanh 1" in text
    assert "layer_58/inner" not in text
    assert "120 arrays   params/... (480 numbers)" in text


def test_source_shows_the_users_lines(capsys):
    ow.show(program(1), source=True)
    text = capsys.readouterr().out
    lines = Path(__file__).read_text().splitlines()
    number = next(n for n, line in enumerate(lines, 1) if "jnp.tanh(x @ w)" in line)
    assert f"dot_general(x, params/0)  # test_show.py:{number}" in text


def test_literals_and_attributes_are_shown():
    text = str(ow.trace(lambda w: jnp.sum(jnp.maximum(w, 0.5)), jnp.ones(3)))
    assert "max = max(w, 0.5)" in text
    assert "reduce_sum(max, axes=(0,))" in text
    half = str(ow.mixed_precision(program(1, ow.SGD(0.1))))  # of a cast JAX tells how it lies on no mesh
    assert "cast_grad(grad(bfloat16(params/0)), new_dtype=float32)" in half


def test_types_are_short_and_repeated_ones_counted():
    text = str(ow.Adam(0.1).minimize(lambda w: jnp.sum(w), jnp.ones((2, 3), jnp.bfloat16)))
    assert "float" not in text.partition("forward")[0]
    assert "f32[2,3] x3 " in text
    assert "bf16[2,3] f32[2,3] " in text


def test_an_op_of_many_parameters_stays_readable():
    params = [jnp.ones(2)] * 30
    program = ow.SGD(0.1, rules=[ow.ClipByGlobalNorm(1.0)]).minimize(lambda p: sum(map(jnp.sum, p)), params)
    clip = next(target.op for target in program.updates if target.op.type == "clip_by_global_norm")
    assert "(p/0" in f"({clip.outputs[0].name.removeprefix('clip_by_global_norm(grad(')}"
    assert str(clip).count("more)") == 2
    assert "... (16 more) = clip_by_global_norm(" in str(clip)


def test_only_one_number_is_marked_as_the_loss():
    def scores(w, x):
        return x @ w

    scored, w = (jnp.ones(shape) for shape in ((2, 3), (3,)))
    assert "(the loss)" not in str(ow.trace(scores, w, scored))
    assert "(the loss)" not in str(ow.trace(lambda w, x: jnp.argmax(x @ w), w, scored))
    assert str(ow.trace(lambda w, x: jnp.sum(x @ w), w, scored)).endswith("reduce_sum  (the loss)")


def test_what_is_shown_is_a_program():
    with pytest.raises(ow.ArgumentError, match="show was given the function 'loss'; expected a Program"):
        ow.show(loss)
