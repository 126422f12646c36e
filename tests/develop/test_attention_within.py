"""Attention and loss heads in a user's own loops and in ``jax.checkpoint`` are found, and equal to JAX's."""

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.compiled import OPTIMIZED, at_once, expect_no

import onward as ow
from onward.core.lower import lower

BATCH, TIME, WIDTH, HEADS, LAYERS, WORDS = 2, 8, 4, 2, 2, 40
CAUSAL = np.tri(TIME, dtype=bool)


def attention(p, x, mask, fill=-jnp.inf):
    q, k, v = (z.reshape(*x.shape[:2], HEADS, WIDTH // HEADS) for z in jnp.split(x @ p["qkv"], 3, axis=-1))
    s = jnp.einsum("bthd,bshd->bhts", q, k) / 2
    s = s if fill is None else jnp.where(mask, s, fill) if mask.dtype == bool else s + mask
    weights = jax.nn.softmax(s, where=mask if fill is None else None)
    return x + jnp.tanh(jnp.einsum("bhts,bshd->bthd", weights, v).reshape(x.shape))


def block(x, p):
    return attention(p, x, jnp.tri(x.shape[1], dtype=bool)), None


def own_scan(p, x):
    return jnp.mean(jax.lax.scan(block, x, p)[0] ** 2)


def scan_of_checkpoints(p, x):
    return jnp.mean(jax.lax.scan(jax.checkpoint(block), x, p)[0] ** 2)


def with_a_policy(p, x):
    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    return jnp.mean(jax.lax.scan(jax.checkpoint(block, policy=policy), x, p, reverse=True, unroll=2)[0] ** 2)


def checkpoint_of_a_scan(p, x):
    return jax.checkpoint(own_scan)(p, x)


def checkpoints(p, x):
    for i in range(LAYERS):
        x, _ = jax.checkpoint(block)(x, {"qkv": p["qkv"][i]})
    return jnp.mean(x**2)


def twice_in_a_turn(p, x):
    return jnp.mean(jax.lax.scan(lambda x, p: block(block(x, p)[0], p), x, p)[0] ** 2)


def loop_in_a_loop(p, x):
    return jnp.mean(jax.lax.scan(lambda x, _: (jax.lax.scan(block, x, p)[0], None), x, None, 2)[0] ** 2)


def vmapped(p, x):
    return jnp.mean(jax.vmap(lambda x: jax.lax.scan(block, x[None], p)[0])(x) ** 2)


def in_a_branch(p, x):
    return jnp.mean(jax.lax.cond(x[0, 0, 0] < 9, lambda x: jax.lax.scan(block, x, p)[0], jnp.sin, x) ** 2)


def mask_from_outside(p, x):
    mask = jnp.tri(TIME, dtype=bool)
    return jnp.mean(jax.lax.scan(lambda x, p: (attention(p, x, mask), None), x, p)[0] ** 2)


def mask_of_numpy(p, x):
    return jnp.mean(jax.lax.scan(lambda x, p: (attention(p, x, CAUSAL), None), x, p)[0] ** 2)


def mask_with_padding(p, x):
    mask = jnp.tri(TIME, dtype=bool) & (jnp.cos(x[:, :, 0]) > -2)[:, None, None]
    body = jax.checkpoint(lambda x, p: (attention(p, x, mask), None))
    return jnp.mean(jax.lax.scan(body, x, p)[0] ** 2)


def mask_handed_on(p, x):
    def turn(carry, p):
        return (attention(p, *carry), carry[1]), None

    return jnp.mean(jax.lax.scan(turn, (x, jnp.tri(TIME, dtype=bool)), p)[0][0] ** 2)


FORMS = (
    own_scan,
    scan_of_checkpoints,
    with_a_policy,
    checkpoint_of_a_scan,
    checkpoints,
    twice_in_a_turn,
    loop_in_a_loop,
    vmapped,
    in_a_branch,
    mask_from_outside,
    mask_of_numpy,
    mask_with_padding,
    mask_handed_on,
)


class FlaxBlock(nn.Module):
    @nn.compact
    def __call__(self, x, mask):
        return x + nn.MultiHeadDotProductAttention(HEADS, param_dtype=jnp.float64)(x, x, mask=mask), None


def flax_case(turn, x):
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            axes = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "in_axes": nn.broadcast}
            scanned = nn.scan(turn, length=LAYERS, **axes)()
            return jnp.mean(scanned(x, nn.make_causal_mask(x[..., 0]))[0] ** 2)

    net = Net()
    return net.apply, net.init(jax.random.key(0), jnp.asarray(x))


def equinox_case(wrap):
    def layer(key):
        return eqx.nn.MultiheadAttention(HEADS, WIDTH, key=key)

    arrays, rest = eqx.partition(
        eqx.filter_vmap(layer)(jax.random.split(jax.random.key(0), LAYERS)), eqx.is_array
    )

    def loss(p, x):
        def turn(x, own):
            def attend(x):
                return x + eqx.combine(own, rest)(x, x, x, mask=jnp.tri(TIME, dtype=bool))

            return wrap(jax.vmap(attend))(x), None

        return jnp.mean(jax.lax.scan(turn, x, p)[0] ** 2)

    return loss, arrays


def derivatives(program):
    """The loss of a forward Program and the gradients of all parameters, as a function."""
    return derivatives_of(ow.append_backward(program))


def derivatives_of(program):
    assert [p for p, _ in program.gradients] == [*program.parameters]
    run = lower(program, [program.loss, *(g for _, g in program.gradients)])
    return lambda p, *data: run(jax.tree.leaves(p), data)


def by_jax(f):
    def compute(p, *data):
        value, gradients = jax.value_and_grad(f)(p, *data)
        return [value, *jax.tree.leaves(gradients)]

    return compute


def expect_same(cases, wanted, faults):
    """Programs give what ``jax.value_and_grad`` gives of their functions, to 1e-12."""
    found, expected = at_once(cases, faults), at_once(wanted, faults)
    for name, values in found.items():
        for a, b in zip(values, expected[name[0]], strict=True):
            with np.errstate(invalid="ignore"):
                if not np.allclose(a, b, rtol=1e-12, atol=1e-12, equal_nan=True):
                    faults[name] = f"{a} is not {b}"
    expect_no(faults)


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


def numbers():
    rng = np.random.default_rng(0)
    return {"qkv": 0.5 * rng.normal(size=(LAYERS, WIDTH, 3 * WIDTH))}, rng.normal(size=(BATCH, TIME, WIDTH))


def test_attention_within_is_found_and_gives_what_jax_gives(x64):
    p, x = numbers()
    given = {f.__name__: (f, p) for f in FORMS}
    given |= {
        "flax scan": flax_case(FlaxBlock, x),
        "flax scan of remat": flax_case(nn.remat(FlaxBlock), x),
        "equinox": equinox_case(lambda f: f),
        "equinox checkpoint": equinox_case(eqx.filter_checkpoint),
    }
    counts = {"checkpoints": LAYERS, "twice_in_a_turn": 2}
    faults, cases, wanted = {}, {}, {}
    for name, (f, p) in given.items():
        program = ow.trace(f, p, x)
        fused = ow.fuse_attention(program, "blocks", blocks=2)
        chunked = ow.chunk(program, 4, where=ow.graph.attention_scores(program))
        if [found.share for found in ow.graph.attentions_of(fused)] != [3 / 4] * counts.get(name, 1):
            faults[name] = f"fuse_attention: {ow.graph.attentions_of(fused)}"
        if [head.count for head in ow.graph.chunks_of(chunked)] != [4] * counts.get(name, 1):
            faults[name] = f"chunk: {ow.graph.chunks_of(chunked)}"
        cases[name, "fused"] = (derivatives(fused), p, x)
        cases[name, "chunked"] = (derivatives(chunked), p, x)
        wanted[name] = (by_jax(f), p, x)
    expect_same(cases, wanted, faults)


def picked(log_p, labels):
    return jnp.take_along_axis(log_p, labels[..., None], axis=-1)[..., 0]


def of_logits(z, labels):
    return -jnp.mean(picked(jax.nn.log_softmax(z), labels))


def head_in_a_checkpoint(w, x, labels, mask):
    return jax.checkpoint(lambda w, x: of_logits(jnp.tanh(x) @ w, labels))(w, x)


def head_in_two_checkpoints(w, x, labels, mask):
    return jax.checkpoint(
        lambda w, x: jax.checkpoint(lambda h: of_logits(h @ w, labels))(jnp.tanh(x))
    )(w, x)  # fmt: skip


def loss_in_a_checkpoint(w, x, labels, mask):
    return jax.checkpoint(of_logits)(jnp.tanh(x) @ w, labels)


def each_loss_in_a_checkpoint(w, x, labels, mask):
    each = jax.checkpoint(lambda z: jax.nn.logsumexp(z, axis=-1) - picked(z, labels))(x @ w)
    return jnp.mean(each * mask.any(-1))


def product_in_a_checkpoint(w, x, labels, mask):
    return of_logits(jax.checkpoint(lambda x: x @ w)(x), labels)


def product_scaled_and_capped_in_a_checkpoint(w, x, labels, mask):
    z, squares = jax.checkpoint(lambda x, s: (jnp.tanh(jnp.sin(x) @ w * s), x**2))(x, 2.0)
    return of_logits(z, labels) + jnp.mean(squares)


def product_in_two_checkpoints(w, x, labels, mask):
    inner = jax.checkpoint(lambda h: h @ w.T.T + 1)
    return of_logits(jax.checkpoint(lambda x: inner(jnp.tanh(x @ w[:, :WIDTH])) * 2)(x), labels)


def all_but_the_loss_in_a_checkpoint(w, x, labels, mask):
    policy = jax.checkpoint_policies.dots_saveable
    z = jax.checkpoint(lambda w, x: jnp.cos(jnp.sin(x @ w[:, :WIDTH])) @ w, policy=policy)(w, x)
    return of_logits(z, labels) + jnp.mean(jax.nn.logsumexp(z, axis=-1) ** 2)


def numbers_in_a_checkpoint(w, x, labels, mask):
    return jax.checkpoint(lambda z, s, n: of_logits(z * s, labels) / n)(x @ w, 2.0, 3)


def logsumexp_where(w, x, labels, mask):
    z = x @ w
    return jnp.mean(jax.nn.logsumexp(z, axis=-1, where=mask) - picked(z, labels))


def logsumexp_of_scipy(w, x, labels, mask):
    z = x @ w
    each = jax.scipy.special.logsumexp(z, axis=-1, where=mask) - picked(z, labels)
    return jnp.sum(jnp.where(mask.any(-1), each, 0)) / jnp.sum(mask.any(-1))


def log_softmax_where(w, x, labels, mask):
    log_p = picked(jax.nn.log_softmax(x @ w, where=mask), labels)
    return -jnp.mean(jnp.where(jnp.isfinite(log_p), log_p, 0))


def softmax_where(w, x, labels, mask):
    return -jnp.mean(picked(jax.nn.softmax(x @ w, where=mask), labels))


HEADS_OF = (
    head_in_a_checkpoint,
    head_in_two_checkpoints,
    loss_in_a_checkpoint,
    each_loss_in_a_checkpoint,
    product_in_a_checkpoint,
    product_scaled_and_capped_in_a_checkpoint,
    product_in_two_checkpoints,
    all_but_the_loss_in_a_checkpoint,
    numbers_in_a_checkpoint,
    logsumexp_where,
    logsumexp_of_scipy,
    log_softmax_where,
    softmax_where,
)


def test_heads_in_checkpoints_and_of_masked_words_give_what_jax_gives(x64):
    rng = np.random.default_rng(0)
    w, x = rng.normal(size=(WIDTH, WORDS)), rng.normal(size=(BATCH, TIME, WIDTH))
    labels, some = rng.integers(0, WORDS, (BATCH, TIME)), rng.random((BATCH, TIME, WORDS)) < 0.5
    none = some.copy()
    none[0, 3] = False  # a row of which no word counts
    faults, cases, wanted = {}, {}, {}
    for f in HEADS_OF:
        chunked = ow.chunk(ow.trace(f, w, x, labels, some), 4)
        assert [head.count for head in ow.graph.chunks_of(chunked)] == [4]
        run = derivatives(chunked)
        read = [(x, labels, some, none)[("x", "labels", "mask").index(v.name)] for v in chunked.inputs]
        for kind, mask in (("some", some), ("none", none)):
            data = [mask if v is some else v for v in read]
            cases[f"{f.__name__} {kind}", ""] = (run, w, *data)
            wanted[f"{f.__name__} {kind}"] = (by_jax(f), w, x, labels, mask)
    expect_same(cases, wanted, faults)


def test_what_logits_are_computed_of_is_still_computed_again(x64):
    """The head alone leaves its jax.checkpoint, and attention within may be in chunks as well."""

    def loss(p, x):
        def model(p, x):
            return own_scan_of(p, jnp.sin(x)) @ p["head"]

        return jnp.mean(jax.nn.logsumexp(jax.checkpoint(model)(p, x), axis=-1))

    def own_scan_of(p, x):
        return jax.lax.scan(block, x, {"qkv": p["qkv"]})[0]

    p, x = numbers()
    p["head"] = np.random.default_rng(1).normal(size=(WIDTH, WORDS))
    program = ow.trace(loss, p, x)
    (scored,) = ow.graph.attention_scores(program)
    head = f"{program.ops[0].outputs[0].name}/dot_general"
    chunked = ow.chunk(program, 4, where=[scored, head])
    assert [(h.logits, h.count) for h in ow.graph.chunks_of(chunked)] == [(scored.name, 4), (head, 4)]
    head_alone = ow.chunk(program, 4, where=head)
    assert [found.share for found in ow.graph.attentions_of(ow.fuse_attention(head_alone, "blocks"))] == [
        5 / 8
    ]
    again, *_ = chunked.ops
    (inner,) = again.subprograms.values()
    assert [op.type for op in inner.ops] == ["sin", "scan"]
    assert [v.shape for v in again.outputs] == [x.shape]
    expect_same({("one", ""): (derivatives(chunked), p, x)}, {"one": (by_jax(loss), p, x)}, {})


def weighed(weights_of):
    def loss(w, x, mask):
        q, k, v = jnp.split(x @ w, 3, axis=-1)
        return jnp.mean((weights_of(jnp.einsum("btd,bsd->bts", q, k), mask & CAUSAL) @ v) ** 2)

    return loss


def exponentials_of_logarithms(s, mask):
    return jnp.exp(jax.nn.log_softmax(s, where=mask))


def softmax_of_some(s, mask):
    return jax.nn.softmax(s, where=mask)


def less_logsumexp(s, mask):
    return jnp.where(mask, jnp.exp(s - jax.nn.logsumexp(s, axis=-1, keepdims=True, where=mask)), 0)


def test_attention_of_some_keys_gives_what_jax_gives_without_any_as_well(x64):
    rng = np.random.default_rng(0)
    w, x = rng.normal(size=(WIDTH, 3)), rng.normal(size=(BATCH, TIME, WIDTH))
    some = rng.random((BATCH, TIME, TIME)) < 0.5
    some |= np.eye(TIME, dtype=bool)
    none = some.copy()
    none[0, 3] = False
    faults, cases, wanted = {}, {}, {}
    for weights in (exponentials_of_logarithms, softmax_of_some, less_logsumexp):
        program = ow.trace(weighed(weights), w, x, some)
        made = {"chunked": ow.chunk(program, 4, where=ow.graph.attention_scores(program))}
        if weights is less_logsumexp:  # what it masks last is not softmax before
            with pytest.raises(ow.GraphError, match="does what softmax does not"):
                ow.fuse_attention(program)
        else:
            made["fused"] = ow.fuse_attention(program, "blocks", blocks=2)
            assert [found.share for found in ow.graph.attentions_of(made["fused"])] == [3 / 4]
        for kind, mask in (("some", some), ("none", none)):
            name = f"{weights.__name__} {kind}"
            cases |= {(name, how): (derivatives(one), w, x, mask) for how, one in made.items()}
            wanted[name] = (by_jax(weighed(weights)), w, x, mask)
    expect_same(cases, wanted, faults)


def scores_of(p, x):
    return (x @ p["qkv"][:, :WIDTH]) @ x.swapaxes(1, 2)


def weights_stacked(p, x):
    def turn(x, p):
        weights = jax.nn.softmax(scores_of(p, x))
        return x + weights @ x, weights

    x, weights = jax.lax.scan(turn, x, p)
    return jnp.mean(x**2) + jnp.mean(weights**2)


def scores_carried(p, x):
    def turn(carry, p):
        x, s = carry
        s = s + scores_of(p, x)
        return (x + jax.nn.softmax(s) @ x, s), None

    return jnp.mean(jax.lax.scan(turn, (x, jnp.zeros((BATCH, TIME, TIME))), p)[0][0] ** 2)


def weights_for_the_next_turn(p, x):
    def turn(carry, p):
        x, weights = carry
        return (x + weights @ x, jax.nn.softmax(scores_of(p, x))), None

    return jnp.mean(jax.lax.scan(turn, (x, jnp.zeros((BATCH, TIME, TIME))), p)[0][0] ** 2)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("f", [weights_stacked, scores_carried, weights_for_the_next_turn])
def test_what_leaves_its_turn_is_left_alone(f):
    program = ow.trace(f, *numbers())
    assert ow.graph.attention_scores(program) == ()
    with pytest.raises(ow.GraphError, match=r"Closest comes that of which .* at test_attention_within\.py"):
        ow.fuse_attention(program)
    with pytest.raises(ow.GraphError, match=r"about as large as the logits .* at test_attention_within\.py"):
        ow.chunk(program, 4, where=lambda v: v.name.startswith("scan/") and v.shape == (BATCH, TIME, TIME))


def causal():
    return jnp.tri(TIME, dtype=bool)


def window():
    return causal() & ~jnp.tri(TIME, k=-3, dtype=bool)


def some(x):
    """Keys of the data that are no padding: not the first one, so that a place sees no key."""
    return (jnp.arange(TIME) > (jnp.cos(x[:, :1, 0]) > 0.5))[:, None, None]


def low(mask):
    return jnp.where(mask, 0, -1e9)


def own_mask(masks, fill=-jnp.inf, change=lambda mask: mask):
    """Layers of which each is given its own of what is stacked outside of the loop."""

    def loss(p, x):
        turn = lambda x, own: (attention(own[0], x, change(own[1]), fill), None)  # noqa: E731
        return jnp.mean(jax.lax.scan(turn, x, (p, masks(x)))[0] ** 2)

    return loss


def same_mask(mask, fill=-jnp.inf, change=lambda mask: mask):
    """Layers that are all given what is made outside of the loop."""

    def loss(p, x):
        m = mask(x)
        turn = jax.checkpoint(lambda x, p: (attention(p, x, change(m), fill), None))
        return jnp.mean(jax.lax.scan(turn, x, p)[0] ** 2)

    return loss


def stacks_of_stacks(p, x):
    masks = jnp.stack([jnp.stack([causal(), window()]), jnp.stack([window(), causal()])]) & some(x)[0, 0]
    turn = lambda x, own: (attention(own[0], x, own[1], -1e9), None)  # noqa: E731
    twice = lambda x, own: (jax.lax.scan(turn, x, (p, own))[0], None)  # noqa: E731
    return jnp.mean(jax.lax.scan(twice, x, masks)[0] ** 2)


def chosen_by_the_layer(p, x):
    masks = causal(), window()

    def turn(x, own):
        return attention(own[0], x, jnp.where(own[1], *masks) & some(x), -1e9), None

    return jnp.mean(jax.lax.scan(turn, x, (p, jnp.array([True, False])))[0] ** 2)


def bias_and_mask(p, x):
    bias = jnp.sin(p["qkv"][:, :, :HEADS].sum((0, 1)))[None, :, None, None] * jnp.arange(TIME)
    return same_mask(lambda x: low(causal()) + bias + jnp.zeros((1, HEADS, TIME, TIME)))(p, x)


KNOWN_OUTSIDE = {
    "stack": own_mask(lambda x: jnp.stack([causal(), window()])),
    "softmax of some": own_mask(lambda x: jnp.stack([causal(), window()])[:, None, None] & some(x), None),
    "numpy": own_mask(lambda x: np.stack([CAUSAL, CAUSAL])),
    "one of numpy and more": own_mask(lambda x: np.stack([CAUSAL, np.tri(TIME, k=-9, dtype=bool)]), -1e9),
    "concatenated": own_mask(lambda x: jnp.concatenate([window()[None], causal()[None]])),
    "broadcast": own_mask(lambda x: jnp.broadcast_to(causal(), (LAYERS, TIME, TIME))),
    "tiled": own_mask(lambda x: jnp.tile(causal(), (LAYERS, 1, 1))),
    "broadcast with padding": own_mask(
        lambda x: jnp.broadcast_to(causal() & some(x), (LAYERS, BATCH, 1, TIME, TIME)), -1e9
    ),
    "stack of masks with padding": own_mask(
        lambda x: jnp.stack([causal() & some(x), window() & some(x)]), -1e9
    ),
    "padding beside a stack": own_mask(
        lambda x: jnp.stack([window(), causal()])[:, None, None] & some(x), -1e9
    ),
    "where it does not look": own_mask(
        lambda x: ~jnp.stack([window(), causal()])[:, None, None] | ~some(x), -1e9, jnp.logical_not
    ),
    "lengths of windows": own_mask(
        lambda x: causal() & (jnp.arange(TIME)[:, None] - jnp.arange(TIME) < jnp.array([3, 9])[:, None, None])
    ),
    "stack to add": own_mask(lambda x: low(jnp.stack([causal(), window()]))),
    "stack to add with padding": own_mask(
        lambda x: jnp.stack([low(causal()) + low(some(x)), low(window()) + low(some(x))])
    ),
    "added with padding": same_mask(lambda x: low(causal()) + low(some(x))),
    "added of both": same_mask(lambda x: low(causal() & some(x))),
    "added and rounded": same_mask(
        lambda x: low(causal()) + low(some(x)), change=lambda m: m.astype("float32")
    ),
    "made to add within": own_mask(
        lambda x: jnp.stack([causal(), window()])[:, None, None] & some(x), change=low
    ),
    "stacks of stacks": stacks_of_stacks,
    "chosen by the layer": chosen_by_the_layer,
    "bias and mask": bias_and_mask,
}


def test_masks_that_are_stacked_or_added_outside_are_known_as_far_as_they_hold_in_all_turns(x64):
    p, x = numbers()
    faults, cases, wanted = {}, {}, {}
    for name, f in KNOWN_OUTSIDE.items():
        fused = ow.fuse_attention(ow.trace(f, p, x), "blocks", blocks=2)
        if [found.share for found in ow.graph.attentions_of(fused)] != [3 / 4]:
            faults[name] = f"{ow.graph.attentions_of(fused)}"
        cases[name, "fused"] = (derivatives(fused), p, x)
        wanted[name] = (by_jax(f), p, x)
    expect_same(cases, wanted, faults)


@pytest.mark.parametrize(
    "masks",
    [
        lambda x: jnp.stack([causal(), causal().T | causal()]),
        lambda x: jnp.stack([causal(), jnp.broadcast_to(some(x)[0, 0], (TIME, TIME))]),
        lambda x: jnp.stack([low(causal()), low(jnp.broadcast_to(some(x)[0, 0], (TIME, TIME)))]),
        lambda x: jnp.zeros((2, TIME, TIME), bool).at[1].set(causal()) ^ (x[0, 0, 0] > 0),
    ],
)
def test_what_does_not_hold_in_all_turns_is_not_known(masks):
    fused = ow.fuse_attention(ow.trace(own_mask(masks), *numbers()), "blocks")
    assert [found.share for found in ow.graph.attentions_of(fused)] == [1.0]


@pytest.mark.parametrize("f", [own_scan, scan_of_checkpoints, checkpoints, twice_in_a_turn])
def test_what_is_in_chunks_is_no_attention_to_fuse(f):
    program = ow.trace(f, *numbers())
    scored = ow.graph.attention_scores(program)
    chunked = ow.chunk(program, 4, where=scored)
    assert ow.graph.attentions_of(chunked) == ()
    with pytest.raises(ow.GraphError, match=f"scores '{scored[0].name}' on is in chunks already"):
        ow.fuse_attention(chunked)
    if len(scored) > 1:
        fused = ow.fuse_attention(ow.chunk(program, 4, where=scored[0]), "blocks", blocks=2)
        assert [found.share for found in ow.graph.attentions_of(fused)] == [3 / 4]


def test_what_is_in_chunks_is_told_after_any_transform():
    p, x = numbers()
    program = ow.SGD(0.1).minimize(own_scan, p, x)
    chunked = ow.chunk(program, 4, where=ow.graph.attention_scores(program))
    layers = ow.SGD(0.1).minimize(checkpoints, p, x)
    cut = ow.chunk(layers, 4, where=ow.graph.attention_scores(ow.roll(layers)))
    made = {
        "alone": chunked,
        "replicate": ow.replicate(chunked, 2),
        "accumulate": ow.accumulate(chunked, 2),
        "mixed": ow.mixed_precision(chunked, "bfloat16"),
        "recompute": ow.recompute(chunked, 0.9),
    }
    for name, one in made.items():
        assert [(h.logits, h.count) for h in ow.graph.chunks_of(one)] == [
            ("scan/bthd,bshd->bhts/dot_general", 4)
        ], name
    assert [head.count for head in ow.graph.chunks_of(ow.roll(cut))] == [4] * LAYERS


@pytest.mark.parametrize("f", [own_scan, scan_of_checkpoints])
def test_the_scores_never_exist_as_a_whole_in_a_loop(f):
    rng = np.random.default_rng(0)
    p = {"qkv": rng.normal(size=(LAYERS, WIDTH, 3 * WIDTH)).astype("float32")}
    x = rng.normal(size=(1, 512, WIDTH)).astype("float32")
    program = ow.append_backward(ow.trace(f, p, x))
    scores = HEADS * 512 * 512 * 4
    scored = ow.graph.attention_scores(program)

    def temporaries(program):
        run = jax.jit(derivatives_of(program), compiler_options=OPTIMIZED)
        return run.lower(p, x).compile().memory_analysis().temp_size_in_bytes

    before, fused, chunked = map(
        temporaries, (program, ow.fuse_attention(program), ow.chunk(program, 16, where=scored))
    )
    assert before > (LAYERS if f is own_scan else 1) * scores
    assert fused < 0.75 * before
    assert chunked < 0.75 * scores


def scanned_with_a_head(p, x):
    x = jax.lax.scan(block, x, {"qkv": p["qkv"]})[0]
    return jnp.mean(jax.nn.logsumexp(x @ p["words"], axis=-1))


def unrolled_with_a_head(p, x):
    for qkv in p["qkv"]:
        x, _ = block(x, {"qkv": qkv})
    return jnp.mean(jax.nn.logsumexp(x @ p["words"], axis=-1))


def test_attention_and_the_head_are_cut_in_either_order(x64):
    p, x = numbers()
    p["words"] = np.random.default_rng(1).normal(size=(WIDTH, WORDS))
    faults, cases, wanted = {}, {}, {}
    for f in (scanned_with_a_head, unrolled_with_a_head):
        program = ow.trace(f, p, x)
        first = ow.chunk(program, 4, where=ow.graph.attention_scores(program))
        both = {"head last": ow.chunk(first, 2), "head first": ow.chunk(program, 2)}
        with pytest.raises(ow.GraphError, match="in 2 chunks already"):
            ow.chunk(both["head last"], 2)
        head = both["head first"]
        both["head first"] = ow.chunk(head, 4, where=ow.graph.attention_scores(head))
        for name, chunked in both.items():
            found = ow.graph.chunks_of(chunked)
            scores = [c.count for c in found if c.is_attention]
            assert scores == [4] * (1 if f is scanned_with_a_head else LAYERS)
            assert [c.count for c in found if not c.is_attention] == [2]
            cases[f.__name__, name] = (derivatives(chunked), p, x)
        wanted[f.__name__] = (by_jax(f), p, x)
    expect_same(cases, wanted, faults)


def mask_set_in_an_array(p, x):
    mask = jnp.zeros((TIME, TIME), bool).at[:].set(jnp.tri(TIME, dtype=bool))
    return jnp.mean(attention({"qkv": p["qkv"][0]}, x, mask) ** 2)


def mask_that_is_negated(p, x):
    wide, low = jnp.tri(TIME, TIME, 2, dtype=bool), jnp.tri(TIME, dtype=bool)
    added = -jnp.where(x[0, 0, 0] > 0, jnp.where(low, 0, 1e9), jnp.where(wide, 0, 1e9))
    q, k, v = jnp.split(x @ p["qkv"][0], 3, axis=-1)
    return jnp.mean(jax.nn.softmax(q @ k.mT + added) @ v)


def number_beside_the_logits(p, x):
    z, one = jax.checkpoint(lambda x, w: (jnp.sin(x) @ w, 5.0))(x, p["words"])
    return jnp.mean(jax.nn.logsumexp(z, -1)) + one


def number_beside_the_loss(p, x):
    whole = jax.checkpoint(lambda x, w: (jnp.mean(jax.nn.logsumexp(jnp.sin(x) @ w, -1)), 5.0))
    return sum(whole(x, p["words"]))


def test_what_is_no_mask_and_what_checkpoints_return_beside(x64):
    p, x = numbers()
    p["words"] = np.random.default_rng(1).normal(size=(WIDTH, WORDS))
    faults, cases, wanted = {}, {}, {}
    for f in (mask_set_in_an_array, mask_that_is_negated, number_beside_the_logits, number_beside_the_loss):
        program = ow.trace(f, p, x)
        if "mask" in f.__name__:
            made = ow.fuse_attention(program, "blocks", blocks=2)
        else:
            made = ow.chunk(program, 4)
            assert [c.count for c in ow.graph.chunks_of(made)] == [4]
        wanted[f.__name__] = (by_jax(f), p, x)
        cases[f.__name__, "made"] = (by_jax(loss_of(made)), p, x)
    expect_same(cases, wanted, faults)


def loss_of(program):
    run = lower(program, [program.loss])
    return lambda p, x: run(jax.tree.leaves(p), [x])[0]
