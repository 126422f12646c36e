"""What is not a product, and other wrong arguments of ``low_rank``, are named with what to write instead."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import onward as ow

P = {
    "table": np.ones((9, 6), np.float32),
    "w": np.ones((6, 4), np.float32),
    "b": np.ones(4, np.float32),
    "kernel": np.ones((3, 1, 2), np.float32),
    "layers": np.ones((3, 4, 4), np.float32),
}
X, TOKENS = np.ones((5, 6), np.float32), np.zeros(5, np.int32)


def loss(p, x, tokens):
    """A product, a look-up whose table is tied, a bias, a convolution, a loop over layers."""
    x = x + p["table"][tokens]
    h = x @ p["w"] + p["b"]
    h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ jnp.abs(w)), None), h, p["layers"])
    signal = jax.lax.conv_general_dilated(
        h[:, :, None], p["kernel"], (1,), "SAME", None, None, ("NWC", "WIO", "NWC")
    )
    return jnp.mean(signal) + jnp.mean(x @ p["table"].T)


def of(function, **kinds):
    """The Program of a loss of one weight, and of data."""
    return ow.trace(
        function, {"w": np.ones(kinds.pop("shape", (4, 4)), kinds.pop("dtype", np.float32))}, X[:, :4]
    )


PROGRAM = ow.trace(loss, P, X, TOKENS)
WRONG = {
    "an embedding": (
        PROGRAM,
        {"where": "table"},
        ow.GraphError,
        "gather at test_bad_input.py:[0-9]+.*looked up in",
    ),
    "a bias": (PROGRAM, {"where": "b"}, ow.GraphError, "'b' .* read by add at test_bad_input.py:[0-9]+"),
    "a convolution": (
        PROGRAM,
        {"where": "kernel"},
        ow.GraphError,
        "conv_general_dilated at .*Convolutions are not",
    ),
    "stopped": (
        of(lambda p, x: jnp.sum(x @ jax.lax.stop_gradient(p["w"]) + jnp.cos(x) @ p["w"])),
        {"where": "w"},
        ow.GraphError,
        "read by stop_gradient at test_bad_input.py:[0-9]+.* stopped for its factors too",
    ),
    "stopped in a loop": (
        of(lambda p, x: jax.lax.fori_loop(0, 2, lambda _, h: h @ jax.lax.stop_gradient(p["w"]), x).sum()),
        {"where": "w"},
        ow.GraphError,
        "read by stop_gradient",
    ),
    "a loop": (PROGRAM, {"where": "layers"}, ow.GraphError, "'layers' .* read by abs at"),
    "nothing": (
        PROGRAM,
        {"where": "*attention*/w*"},
        ow.UnknownNameError,
        "low_rank, where: nothing is named",
    ),
    "nothing to train": (
        PROGRAM,
        {"train": "x", "rank": 2},
        ow.UnknownNameError,
        "low_rank, train: nothing is named 'x'",
    ),
    "a large rank": (
        PROGRAM,
        {"where": "w", "rank": 5},
        ow.HyperparameterError,
        "'w' .* has 4 .* 6 inputs, 4 outputs",
    ),
    "no rank": (
        PROGRAM,
        {"rank": 0},
        ow.HyperparameterError,
        "rank is 0; expected a whole number, at least 1",
    ),
    "half a rank": (PROGRAM, {"rank": 2.5}, ow.HyperparameterError, "rank is 2.5"),
    "no alpha": (PROGRAM, {"alpha": 0}, ow.HyperparameterError, "alpha is 0; expected a number above 0"),
    "a flag": (
        PROGRAM,
        {"rank_stabilized": 1},
        ow.ArgumentError,
        "rank_stabilized is 1; expected True or False",
    ),
    "a base": (
        PROGRAM,
        {"base": "int4"},
        ow.ArgumentError,
        "base is 'int4'; expected 'bfloat16', 'int8', or None",
    ),
    "both": (PROGRAM, {"where": "w", "train": "w", "rank": 2}, ow.ArgumentError, "in where= and in train="),
    "no weights": (PROGRAM, {"where": []}, ow.ArgumentError, "where is empty"),
    "a number": (PROGRAM, {"where": 3}, ow.ArgumentError, "3 picks nothing"),
    "twice": (ow.low_rank(PROGRAM, rank=2, where="w"), {"rank": 2}, ow.GraphError, "adapted already"),
    "no product": (
        of(lambda p, x: jnp.mean(x * p["w"][0])),
        {},
        ow.GraphError,
        "no parameter .* is read by products",
    ),
    "complex": (
        of(lambda p, x: jnp.mean(jnp.abs(x @ p["w"])), dtype=np.complex64),
        {"where": "w"},
        ow.GraphError,
        "complex64.*real floating",
    ),
    "returned": (
        of(lambda p, x: (x @ p["w"], p["w"].T)),
        {"where": "w"},
        ow.GraphError,
        "returns 'w' itself",
    ),
    "a vector": (
        of(lambda p, x: jnp.mean(x @ p["w"]), shape=4),
        {"where": "w", "rank": 2},
        ow.HyperparameterError,
        "has 1 as its largest rank: 4 inputs, 1 outputs",
    ),
    "with itself": (
        of(lambda p, x: jnp.mean(x @ (p["w"] @ p["w"]))),
        {"where": "w"},
        ow.GraphError,
        "Both operands of the product",
    ),
    "weighed": (
        of(lambda p, x: jnp.mean(x @ jnp.abs(p["w"]))),
        {"where": "w"},
        ow.GraphError,
        "read by abs at",
    ),
    "unread": (of(lambda p, x: jnp.mean(x)), {"where": "w"}, ow.GraphError, "no op of .* reads w"),
    "a part of an axis": (
        of(lambda p, x: jnp.mean(jnp.einsum("bi,oij->boj", x[:, :2], p["w"].reshape(4, 2, 2)))),
        {"where": "w", "rank": 1},
        ow.GraphError,
        "sums over a part of one of its axes",
    ),
    "two ways": (
        of(
            lambda p, x: (
                jnp.mean(x @ p["w"].reshape(4, 9)) + jnp.sum(jnp.einsum("oij,bj->boi", p["w"], x[:, :3]))
            ),
            shape=(4, 3, 3),
        ),
        {"where": "w", "rank": 1},
        ow.GraphError,
        r"summed over its axes \[0\] by dot_general at .*, and over \[2\]",
    ),
    "checkpoint": (
        of(lambda p, x: jnp.mean(jax.checkpoint(lambda w: jnp.tanh(x @ w))(p["w"].T.reshape(4, -1)[:, :2]))),
        {"where": "w"},
        ow.GraphError,
        "'w' .* is read by slice at",
    ),
    "turned before checkpoint": (
        of(lambda p, x: jnp.mean(jax.checkpoint(lambda w: x @ w)(jnp.einsum("ij->ji", p["w"])))),
        {"where": "w"},
        ow.GraphError,
        "Within jax.checkpoint those weights are adapted that it takes as they are",
    ),
    "twice to checkpoint": (
        of(lambda p, x: jnp.mean(jax.checkpoint(lambda a, b: x @ a + x @ b)(p["w"], p["w"]))),
        {"where": "w"},
        ow.GraphError,
        "'w' .* is read by remat2 at .* each as one argument",
    ),
    "carried in a loop": (
        of(lambda p, x: jax.lax.fori_loop(0, 2, lambda _, c: (c[0] @ c[1], c[1].T), (x, p["w"]))[0].sum()),
        {"where": "w"},
        ow.GraphError,
        "'w' .* is read by scan at .* In a loop those weights are adapted that its turns take",
    ),
    "by a loop and by others": (
        of(
            lambda p, x: (
                jnp.mean(jax.lax.scan(lambda x, w: (x @ w, None), x, p["w"])[0])
                + jnp.mean(jnp.einsum("bi,lij->blj", x, p["w"]))
            ),
            shape=(3, 4, 4),
        ),
        {"where": "w", "rank": 1},
        ow.GraphError,
        "'w' .* is read by a loop over layers and by others as well",
    ),
    "within checkpoint": (
        of(lambda p, x: jnp.mean(jax.checkpoint(lambda w: x @ jnp.abs(w))(p["w"]))),
        {"where": "w"},
        ow.GraphError,
        "'w' .* is read by abs at",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument_is_explained(name):
    program, options, error, words = WRONG[name]
    with pytest.raises(error, match=f"(?s){words}"):
        ow.low_rank(program, **options)


def test_what_is_thinner_than_the_factors_is_left_out_unless_it_is_named():
    params, x = {"w": jnp.ones((6, 4)), "head": jnp.ones((4, 1))}, jnp.ones((2, 6))
    program = ow.trace(lambda p, x: jnp.mean(x @ p["w"] @ p["head"]), params, x)
    assert [v.name for v in ow.low_rank(program, rank=2).parameters] == ["w/low_rank_a", "w/low_rank_b"]
    for options in ({"rank": 2, "where": "head"}, {"rank": 5}):
        with pytest.raises(ow.HyperparameterError, match="as its largest rank"):
            ow.low_rank(program, **options)


def test_a_product_of_two_adapted_weights_is_refused():
    params = {"a": np.ones((4, 3), np.float32), "b": np.ones((3, 4), np.float32)}
    with pytest.raises(ow.GraphError, match="multiplies 'a' and 'b' with each other"):
        ow.low_rank(lambda p, x: jnp.mean(x @ (p["a"] @ p["b"])), params, X[:, :4], rank=1)


@pytest.mark.parametrize("form", [lambda f: f, jax.checkpoint], ids=["loop", "loop of checkpoints"])
def test_nor_within_a_loop(form):
    params = {"a": np.ones((2, 4, 3), np.float32), "b": np.ones((2, 3, 4), np.float32)}

    def looped(params, x):
        return jnp.mean(jax.lax.scan(form(lambda x, w: (x @ (w["a"] @ w["b"]), None)), x, params)[0])

    with pytest.raises(ow.GraphError, match="multiplies 'a' and 'b' with each other"):
        ow.low_rank(looped, params, X[:, :4], rank=1)


def test_a_function_needs_its_arguments_and_a_program_has_them():
    with pytest.raises(ow.ArgumentError, match="nothing to trace it with"):
        ow.low_rank(loss, rank=2)
    with pytest.raises(ow.ArgumentError, match=r"low_rank has no argument 'ranks'.*'rank'"):
        ow.low_rank(loss, P, X, TOKENS, ranks=2)
    with pytest.raises(ow.ArgumentError, match="traced already"):
        ow.low_rank(PROGRAM, P, rank=2)


def test_what_does_not_go_together_says_so():
    program = ow.SGD(0.1).minimize(ow.low_rank(PROGRAM, rank=2, where="w", base="int8"))
    state = ow.compile(program, tune=False).init(P)
    with pytest.raises(ow.StateError, match="merge_low_rank"):
        _ = state.parameters
    with pytest.raises(ow.GraphError, match="in fewer bits"):
        ow.pipeline(program, 2, 5)
    with pytest.raises(ow.GraphError, match="factors of low rank"):
        ow.split(program, 1, 1)
    with pytest.raises(ow.ArgumentError, match="has no factors"):
        ow.merge_low_rank(PROGRAM, state)
    with pytest.raises(ow.ArgumentError, match="the second argument is a State"):
        ow.merge_low_rank(program, P)
    with pytest.raises(ow.ArgumentError, match="expected a Program"):
        ow.merge_low_rank(loss, state)
