"""Attention: every spelling is found and gives what JAX gives, what only looks like it is left alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from tests.compiled import at_once, expect_no, trained

import onward as ow
from onward.core.lower import lower
from onward.develop.attention import kernels

BATCH, TIME, HEADS, SIZE = 2, 8, 4, 4
WIDTH = HEADS * SIZE


def split(w, x, groups=1):
    """Queries, keys and values as [batch, time, heads, size], those of keys for so many heads of queries."""
    q, k, v = (part.reshape(*x.shape[:2], HEADS, SIZE) for part in jnp.split(x @ w, 3, axis=-1))
    return q, k[:, :, ::groups], v[:, :, ::groups]


def scores(w, x):
    q, k, v = split(w, x)
    return jnp.einsum("bthd,bshd->bhts", q, k) / SIZE**0.5, v


def mean(weights, v):
    return jnp.einsum("bhts,bshd->bthd", weights, v)


def causal(shape=(TIME, TIME)):
    return jnp.tril(jnp.ones(shape, bool))


def einsum(w, x, mask):
    s, v = scores(w, x)
    return mean(jax.nn.softmax(jnp.where(causal(), s, -1e9)), v)


def matmul(w, x, mask):
    q, k, v = (part.transpose(0, 2, 1, 3) for part in split(w, x))
    s = q @ k.swapaxes(-1, -2) * SIZE**-0.5 + jnp.where(causal(), 0, -1e9)
    return (jax.nn.softmax(s) @ v).transpose(0, 2, 1, 3)


def scaled_queries_and_padding(w, x, mask):
    q, k, v = split(w, x)
    s = jnp.einsum("bthd,bshd->bhts", q * SIZE**-0.5, k)
    return mean(jax.nn.softmax(jnp.where(mask[:, None, None], s, -1e9)), v)


def softmax_by_hand(w, x, mask):
    s, v = scores(w, x)
    e = jnp.exp(s - lax.stop_gradient(s.max(-1, keepdims=True)))
    return mean(e / e.sum(-1, keepdims=True), v)


def without_largest(w, x, mask):
    s, v = scores(w, x)
    e = jnp.exp(s)
    return mean(e * (1 / e.sum(-1, keepdims=True)), v)


def divided_at_the_end(w, x, mask):
    s, v = scores(w, x)
    s = jnp.where(causal(), s, -jnp.inf)
    e = jnp.exp(s - s.max(-1, keepdims=True))
    return mean(e, v) / e.sum(-1).transpose(0, 2, 1)[..., None]


def by_logsumexp(w, x, mask):
    s, v = scores(w, x)
    return mean(jnp.exp(s - jax.nn.logsumexp(s, axis=-1, keepdims=True)), v)


def by_log_softmax(w, x, mask):
    s, v = scores(w, x)
    return mean(jnp.exp(jax.nn.log_softmax(s)), v)


def of_jax(w, x, mask):
    q, k, v = (part.astype("float32") for part in split(w, x))
    return jax.nn.dot_product_attention(q, k, v, mask=mask[:, None, None], is_causal=True)


def of_jax_with_groups(w, x, mask):
    q, k, v = (part.astype("float32") for part in split(w, x, groups=2))
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def groups(w, x, mask):
    q, k, v = split(w, x, groups=2)
    q = q.reshape(BATCH, TIME, 2, 2, SIZE)
    s = jnp.einsum("btkgh,bskh->bkgts", q, k)
    weights = jax.nn.softmax(jnp.where(causal(), s, jnp.finfo(s.dtype).min))
    return jnp.einsum("bkgts,bskh->btkgh", weights, v)


def one_head_of_keys(w, x, mask):
    q, k, v = split(w, x, groups=4)
    return jnp.einsum(
        "bhts,bsd->bthd", jax.nn.softmax(jnp.einsum("bthd,bsd->bhts", q, k[:, :, 0])), v[:, :, 0]
    )


def vmapped(w, x, mask):
    def head(q, k, v, mask):
        return jax.nn.softmax(jnp.where(mask, q @ k.T, -1e9)) @ v

    return jax.vmap(jax.vmap(head, (1, 1, 1, None), 1))(*split(w, x), mask)


def one_example_and_head(w, x, mask):
    q, k, v = (part[0, :, 0] for part in split(w, x))
    return jax.nn.softmax(jnp.where(causal(), q @ k.T, -1e30)) @ v


def alibi(w, x, mask):
    s, v = scores(w, x)
    far = jnp.arange(TIME) - jnp.arange(TIME)[:, None]
    return mean(jax.nn.softmax(jnp.where(far <= 0, s + jnp.arange(HEADS)[:, None, None] * far, -1e9)), v)


def learned_bias(w, x, mask):
    s, v = scores(w, x)
    return mean(jax.nn.softmax(jnp.where(causal(), s + w[:TIME, :TIME], -1e9)), v)


def window(w, x, mask):
    s, v = scores(w, x)
    back = jnp.arange(TIME)[:, None] - jnp.arange(TIME)
    return mean(jax.nn.softmax(jnp.where((back >= 0) & (back < 3) & mask[:, None, None], s, -1e9)), v)


def window_of_numpy(w, x, mask):
    s, v = scores(w, x)
    seen = np.tri(TIME, dtype=bool) & ~np.tri(TIME, k=-3, dtype=bool)
    return mean(jax.nn.softmax(s + jnp.where(seen, 0.0, -1e9)), v)


def rows_without_a_key(w, x, mask):
    s, v = scores(w, x)
    mask = mask.at[1, :3].set(False)
    return mean(jax.nn.softmax(jnp.where(causal() & mask[:, None, None], s, -1e9)), v)


def two_masks(w, x, mask):
    s, v = scores(w, x)
    s = jnp.where(causal(), s, -1e9)
    return mean(jax.nn.softmax(jnp.where(mask.at[1, :3].set(False)[:, None, None], s, -1e9)), v)


def ruled_out_by_a_mask(w, x, mask):
    s, v = scores(w, x)
    return mean(jax.nn.softmax(jnp.where(jnp.triu(jnp.ones((TIME, TIME), bool), 1), -1e9, s)), v)


def weighs_what_is_ruled_out(w, x, mask):
    s, v = scores(w, x)
    return mean(jax.nn.softmax(jnp.where(causal(), s, -3.0)), v)


def scaled_behind_the_mask(w, x, mask):
    s, v = scores(w, x)
    return mean(jax.nn.softmax(jnp.where(causal(), s, -3.0) / 2), v)


def turned_behind_the_mask(w, x, mask):
    s, v = scores(w, x)
    return mean(jax.nn.softmax((s + jnp.where(causal(), 0, -1e9)) * -1.0), v)


def temperature(w, x, mask):
    s, v = scores(w, x)
    return mean(jax.nn.softmax(s * jnp.exp(w[0, 0]) + (1 - mask[:, None, None]) * -1e9), v)


def rounded(w, x, mask):
    s, v = scores(w, x)
    low = lax.reduce_precision(jnp.where(causal(), s, -1e9).astype("float32"), 8, 7)
    return mean(jax.nn.softmax(low.astype("float64")), v)


def features_of_two_axes(w, x, mask):
    q, k, v = (part.reshape(BATCH, TIME, HEADS, 2, 2) for part in split(w, x))
    s = jnp.einsum("bthij,bshji->bhts", q, k.swapaxes(3, 4))
    e = jnp.exp(jnp.where(causal(), s, -jnp.inf))
    y = jnp.einsum("bhts,bshij->bthji", e, v) / e.sum(-1).transpose(0, 2, 1)[..., None, None]
    return y.reshape(BATCH, TIME, HEADS, SIZE)


def rounded_to_infinity(w, x, mask):
    s, v = scores(w, x)
    s = jnp.where(causal(), s, -1e9).astype("float16").astype("float64")
    return mean(jax.nn.softmax(s), v)


def keys_first(w, x, mask):
    q, k, v = split(w, x)
    return jnp.einsum("bhst,bshd->bthd", jax.nn.softmax(jnp.einsum("bshd,bthd->bhst", k, q), axis=2), v)


def fewer_keys(w, x, mask):
    q, k, v = split(w, x)
    s = jnp.einsum("bthd,bshd->bhts", q, k[:, :5])
    return mean(jax.nn.softmax(jnp.where(causal((TIME, 5)), s, -jnp.inf)), v[:, :5])


def layer(w, x, mask):
    names = ("query", "key", "value")
    parts = dict(zip(names, jnp.split(w, 3, axis=1), strict=True)) | {"out": jnp.eye(WIDTH)}
    return ow.layer.attention(x, heads=HEADS, causal=True, mask=mask[:, None], w=parts, b=False)


def kept(weights):
    return jax.random.bernoulli(jax.random.key(7), 0.7, weights.shape)


def dropped(w, x, mask):
    s, v = scores(w, x)
    weights = jax.nn.softmax(jnp.where(causal(), s, -1e9))
    return mean(jnp.where(kept(weights), weights / 0.7, 0), v)


def dropped_by_select(w, x, mask):
    s, v = scores(w, x)
    weights = jax.nn.softmax(s + jnp.where(causal(), 0, -1e9))
    return mean(lax.select(kept(weights), weights / 0.7, jnp.zeros_like(weights)), v)


def dropped_without_a_key(w, x, mask):
    s, v = scores(w, x)
    s = jnp.where(causal() & mask.at[1, :3].set(False)[:, None, None], s, -1e9)
    weights = jax.nn.softmax(s)
    return mean(weights * kept(weights).astype(weights.dtype) / 0.7, v)


def dropped_low(w, x, mask):
    s, v = scores(w, x)
    weights = jax.nn.softmax(jnp.where(causal(), s, -1e9)).astype("float32").astype("float64")
    return mean(jnp.where(~kept(weights), 0, weights), v)


def dropped_before_the_division(w, x, mask):
    s, v = scores(w, x)
    e = jnp.exp(jnp.where(causal(), s, -jnp.inf))
    return mean(e * kept(e), v) / e.sum(-1).transpose(0, 2, 1)[..., None]


def gated(w, x, mask):
    s, v = scores(w, x)
    gate = jax.nn.sigmoid(w[:HEADS, :TIME])[:, None]
    return mean(jax.nn.softmax(jnp.where(causal(), s, -3.0)) * gate / (2 + x[:, None, :, :1]), v)


def masked_behind(w, x, mask):
    s, v = scores(w, x)
    return mean(jax.nn.softmax(s) * mask[:, None, None], v)


def softmax_of_seen(w, x, mask):
    s, v = scores(w, x)
    return mean(jax.nn.softmax(s, where=causal() & mask.at[1, :3].set(False)[:, None, None]), v)


def exponentials_chosen(w, x, mask):
    s, v = scores(w, x)
    e = jnp.where(causal() & mask[:, None, None], jnp.exp(s - s.max(-1, keepdims=True)), 0)
    return mean(e, v) / e.sum(-1).transpose(0, 2, 1)[..., None]


def heads_in_the_batch(w, x, mask):
    q, k, v = (part.transpose(0, 2, 1, 3).reshape(BATCH * HEADS, TIME, SIZE) for part in split(w, x))
    s = jnp.matmul(q, k.transpose(0, 2, 1)).reshape(BATCH, HEADS, TIME, TIME)
    s = jnp.where(mask[:, None, None], s, -1e9).reshape(BATCH * HEADS, TIME, TIME)
    seen = jnp.broadcast_to(causal(), (BATCH, HEADS, TIME, TIME)).reshape(s.shape)
    return jnp.matmul(jax.nn.softmax(jnp.where(seen, s, -1e9)), v).reshape(BATCH, HEADS, TIME, SIZE)


def groups_in_the_places(w, x, mask):
    q, k, v = split(w, x, groups=2)
    q = q.reshape(BATCH, TIME, 2, 2, SIZE).transpose(0, 2, 3, 1, 4).reshape(BATCH, 2, 2 * TIME, SIZE)
    s = jnp.einsum("bkqd,bskd->bkqs", q, k).reshape(BATCH, 2, 2, TIME, TIME)
    weights = jax.nn.softmax(jnp.where(causal(), s, -1e9)).reshape(BATCH, 2, 2 * TIME, TIME)
    return jnp.einsum("bkqs,bskd->bkqd", weights, v)


def weights_rounded_and_back(w, x, mask):
    s, v = scores(w, x)
    seen = causal() & mask.at[1, :3].set(False)[:, None, None]
    return mean(jax.nn.softmax(jnp.where(seen, s, -1e9)).astype("bfloat16").astype(s.dtype), v)


def weights_rounded_further(w, x, mask):
    s, v = scores(w, x)
    return mean(lax.reduce_precision(jax.nn.softmax(s), 5, 2), v)


def seen_of(mask):
    """Where a mask of numbers is 1, with places that see no key behind a causal mask."""
    return mask.at[1, :3].set(False)[:, None, None].astype(float)


def masks_multiplied(w, x, mask):
    s, v = scores(w, x)
    return mean(jax.nn.softmax(jnp.where(causal() * seen_of(mask) > 0, s, -1e9)), v)


def masks_multiplied_to_dismiss(w, x, mask):
    s, v = scores(w, x)
    return mean(jax.nn.softmax(jnp.where(causal().astype(float) * seen_of(mask) == 0, -1e9, s)), v)


def ruled_out_by_either(w, x, mask):
    s, v = scores(w, x)
    return mean(jax.nn.softmax(jnp.where(~causal() | (seen_of(mask) == 0), -1e9, s)), v)


def masks_multiplied_and_added(w, x, mask):
    s, v = scores(w, x)
    return mean(jax.nn.softmax(s + (1 - causal() * seen_of(mask)) * -1e9), v)


def masks_added(w, x, mask):
    s, v = scores(w, x)
    s = s + w[:TIME, :TIME] + jnp.where(causal(), 0, -1e9)
    return mean(jax.nn.softmax(s + (1 - mask[:, None, None]) * -1e9), v)


def masks_added_that_leave_one_key_in_another_block(w, x, mask):
    s, v = scores(w, x)
    s = s + w[:TIME, :TIME] + jnp.where(causal().T, 0, -1e9)
    return mean(jax.nn.softmax(s + (1 - mask.at[1, 1:].set(False)[:, None, None]) * -1e9), v)


SPELLINGS = {
    f.__name__: f
    for f in (
        *(einsum, matmul, scaled_queries_and_padding, softmax_by_hand, without_largest, divided_at_the_end),
        *(by_logsumexp, by_log_softmax, of_jax, of_jax_with_groups, groups, one_head_of_keys, vmapped),
        *(one_example_and_head, alibi, learned_bias, window, window_of_numpy, rows_without_a_key, two_masks),
        *(ruled_out_by_a_mask, weighs_what_is_ruled_out, scaled_behind_the_mask, turned_behind_the_mask),
        *(temperature, rounded, features_of_two_axes, rounded_to_infinity, keys_first, fewer_keys, layer),
        *(dropped, dropped_by_select, dropped_without_a_key, dropped_low, dropped_before_the_division),
        *(gated, masked_behind),
        *(weights_rounded_and_back, weights_rounded_further),
    )
}

RULED = (
    *(masks_multiplied, masks_multiplied_to_dismiss, ruled_out_by_either, masks_multiplied_and_added),
    *(
        masks_added,
        masks_added_that_leave_one_key_in_another_block,
        softmax_of_seen,
        exponentials_chosen,
        heads_in_the_batch,
        groups_in_the_places,
    ),
)
SPELLINGS |= {f.__name__: f for f in RULED}

# The same in other words: what JAX gives is computed for one of them.
ALIKE = {
    **dict.fromkeys(("matmul", "divided_at_the_end", "ruled_out_by_a_mask"), "einsum"),
    **dict.fromkeys(("softmax_by_hand", "without_largest", "by_logsumexp"), "by_log_softmax"),
    **dict.fromkeys(("two_masks", "masks_multiplied", "masks_multiplied_to_dismiss"), "rows_without_a_key"),
    "ruled_out_by_either": "rows_without_a_key",
    "groups_in_the_places": "groups",
    "of_jax": "exponentials_chosen",
    "dropped_by_select": "dropped",
}


def numbers():
    rng = np.random.default_rng(0)
    w, x = 0.3 * rng.standard_normal((WIDTH, 3 * WIDTH)), rng.standard_normal((BATCH, TIME, WIDTH))
    return w, x, np.arange(TIME) < np.array([[8], [5]])


def loss_of(f):
    def loss(w, x, mask):
        y = f(w, x, mask)
        return jnp.mean(jnp.sin(y) * jnp.arange(1.0, 1 + y.shape[-1]))

    return loss


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


def test_every_spelling_is_one_op_and_gives_what_jax_gives(x64):
    w, x, mask = numbers()
    faults, cases, wanted = {}, {}, {}
    for name, f in SPELLINGS.items():
        fused = ow.fuse_attention(ow.trace(loss_of(f), w, x, mask), "blocks", blocks=2)
        run = lower(fused, [fused.loss])
        if [op.type for op in fused.ops].count("attention") != 1:
            faults[name] = "is not one op"
        elif f in RULED and [found.share for found in ow.graph.attentions_of(fused)] != [3 / 4]:
            faults[name] = "is computed whole"
        cases[name] = (jax.value_and_grad(lambda w, x, m, run=run: run([w], [x, m])[0], (0, 1)), w, x, mask)
        if name not in ALIKE:
            wanted[name] = (jax.value_and_grad(loss_of(f), (0, 1)), w, x, mask)
    found, expected = at_once(cases, faults), at_once(wanted, faults)
    for name in found:
        bound = 1e-6 if name.startswith("of_jax") or name == "dropped_low" else 1e-13
        theirs = expected[ALIKE.get(name, name)]
        for a, b in zip(jax.tree.leaves(found[name]), jax.tree.leaves(theirs), strict=True):
            if not np.abs(a - b).max() <= bound * np.abs(b).max():
                faults[name] = f"{a} is not {b}"
    expect_no(faults)


def over_queries(s, v, mask):
    return mean(jax.nn.softmax(s, axis=2), v)


def over_heads(s, v, mask):
    return mean(jax.nn.softmax(s, axis=1), v)


def over_queries_and_keys(s, v, mask):
    return mean(jax.nn.softmax(s, axis=(2, 3)), v)


def without_softmax(s, v, mask):
    return mean(s, v)


def by_sigmoid(s, v, mask):
    return mean(jax.nn.sigmoid(s), v)


def capped(s, v, mask):
    return mean(jax.nn.softmax(50 * jnp.tanh(s / 50)), v)


def clipped(s, v, mask):
    return mean(jax.nn.softmax(jnp.clip(s, -1, 1)), v)


def beside_one_more(s, v, mask):
    return mean(jnp.exp(s) / (1 + jnp.exp(s).sum(-1, keepdims=True)), v)


def with_epsilon(s, v, mask):
    return mean(jnp.exp(s) / (jnp.exp(s).sum(-1, keepdims=True) + 1e-3), v)


def of_base_two(s, v, mask):
    return mean(jnp.exp2(s) / jnp.exp2(s).sum(-1, keepdims=True), v)


def by_another_sum(s, v, mask):
    return mean(jnp.exp(s) / jnp.exp(2 * s).sum(-1, keepdims=True), v)


def by_the_sum_of_another_shift(s, v, mask):
    shifted = s - s.max(-1, keepdims=True)
    return mean(jnp.exp(shifted - jax.nn.logsumexp(s, axis=-1, keepdims=True)), v)


def shifted_for_each_key(s, v, mask):
    return mean(jax.nn.softmax(s - s.max(2, keepdims=True)), v)


def shifted_by_other_rows(s, v, mask):
    return mean(jax.nn.softmax(s + s.max(-1)[:, :, None]), v)


def dropped_and_filled(s, v, mask):
    weights = jax.nn.softmax(s)
    return mean(jnp.where(kept(weights), weights, 0.1), v)


def dropped_before_the_sum(s, v, mask):
    e = jnp.exp(s) * kept(s)
    return mean(e / e.sum(-1, keepdims=True), v)


def weighed_by_scores(s, v, mask):
    return mean(jax.nn.softmax(s) * jnp.tanh(s), v)


def squared(s, v, mask):
    return mean(jax.nn.softmax(s) ** 2, v)


def weights_read_twice(s, v, mask):
    weights = jax.nn.softmax(s)
    return mean(weights, v) * jnp.sum(weights**2)


def weights_without_gradient(s, v, mask):
    return mean(lax.stop_gradient(jax.nn.softmax(s)), v)


def sum_without_gradient(s, v, mask):
    return mean(jnp.exp(s) / lax.stop_gradient(jnp.exp(s).sum(-1, keepdims=True)), v)


def of_scores(s, v, mask):
    return jnp.einsum("bhts,bhsu->bhtu", jax.nn.softmax(s), s)


def averaged_over_queries(s, v, mask):
    return jnp.einsum("bhts,bthd->bshd", jax.nn.softmax(s), v)


def rectified(s, v, mask):
    return mean(jax.nn.relu(s) / (jax.nn.relu(s).sum(-1, keepdims=True) + 1), v)


def of_whole_weights(s, v, mask):
    return mean((9 * jax.nn.softmax(s)).astype(int), v)


def chosen_by_scores(s, v, mask):
    return mean(jax.nn.softmax(jnp.where(s > 0, s, -1e9)), v)


def masked_behind_a_shift(s, v, mask):
    return mean(jax.nn.softmax(jnp.where(causal(), s - s.max(-1, keepdims=True), -10.0)), v)


def multiplied_twice(s, v, mask):
    e = jnp.exp(s)
    first, second = mean(e, v), mean(e, 2 * v)
    return first / e.sum(-1).transpose(0, 2, 1)[..., None] + 0 * second


def masked_by_whole_numbers(s, v, mask):
    seen = jnp.broadcast_to(causal().astype(int), s.shape)
    return mean(jax.nn.softmax(lax.select_n(seen, jnp.full_like(s, -1e9), s)), v)


def heads_of_a_bias(s, v, mask):
    bias = jnp.arange(HEADS, dtype=s.dtype)[:, None, None] * causal()
    return mean(jax.nn.softmax(s[:, :1] + bias), v)


def some_chosen_for_the_sum(s, v, mask):
    e = jnp.exp(s - s.max(-1, keepdims=True))
    return mean(e / e.sum(-1, keepdims=True, where=causal()), v)


def some_of_masked_scores_summed(s, v, mask):
    e = jnp.exp(jnp.where(causal(), s, -1e9))
    return mean(e / e.sum(-1, keepdims=True, where=causal()), v)


def over_parts_of_the_keys(s, v, mask):
    return mean(jax.nn.softmax(s.reshape(*s.shape[:-1], 2, -1)).reshape(s.shape), v)


MISSES = {
    f.__name__: f
    for f in (
        *(over_queries, over_heads, over_queries_and_keys, without_softmax, by_sigmoid, capped, clipped),
        *(beside_one_more, with_epsilon, of_base_two, by_another_sum, by_the_sum_of_another_shift),
        *(shifted_for_each_key, shifted_by_other_rows, squared, weights_read_twice),
        *(weights_without_gradient, sum_without_gradient, of_scores, averaged_over_queries, rectified),
        *(of_whole_weights, chosen_by_scores, masked_behind_a_shift, multiplied_twice),
        *(masked_by_whole_numbers, heads_of_a_bias, dropped_and_filled, dropped_before_the_sum),
        *(weighed_by_scores, some_chosen_for_the_sum, some_of_masked_scores_summed),
        over_parts_of_the_keys,
    )
}


@pytest.mark.parametrize("name", MISSES)
def test_what_only_looks_like_it_is_left_alone(name):
    program = ow.trace(loss_of(lambda w, x, mask: MISSES[name](*scores(w, x), mask)), *numbers())
    assert ow.graph.attentions_of(program) == ()


def test_the_error_names_what_came_closest():
    def squared(w, x, mask):
        s, v = scores(w, x)
        return mean(jax.nn.softmax(s) ** 2, v)

    program = ow.trace(loss_of(squared), *numbers())
    with pytest.raises(ow.GraphError, match=r" at .*test_fuse_attention.py:\d+ does what neither softmax"):
        ow.fuse_attention(program)


def test_attention_in_chunks_is_told():
    program = ow.trace(causal_loss, *long_numbers())
    (name,) = (v.name for v in ow.graph.attention_scores(program))
    with pytest.raises(ow.GraphError, match=f"'{name}' on is in chunks already"):
        ow.fuse_attention(ow.chunk(program, 4, where=name))


LONG = 64


def long_numbers(time=LONG, dtype="float32"):
    rng = np.random.default_rng(0)
    w = 0.3 * rng.standard_normal((WIDTH, 3 * WIDTH))
    return w.astype(dtype), rng.standard_normal((BATCH, time, WIDTH)).astype(dtype)


def causal_loss(w, x):
    s, v = scores(w, x)
    return jnp.mean(jnp.sin(mean(jax.nn.softmax(jnp.where(causal(s.shape[-2:]), s, -1e9)), v)))


def test_blocks_are_taken_where_a_known_mask_rules_out_enough():
    found = {}
    for time in (LONG, LONG - 1):
        (found[time],) = ow.graph.attentions_of(ow.fuse_attention(ow.trace(causal_loss, *long_numbers(time))))
    assert found[LONG].kernel == "blocks"
    assert found[LONG].causal
    assert not found[LONG].masked
    assert found[LONG].share == 5 / 8
    assert found[LONG - 1].kernel is None
    assert "fewer than 64 places" in str(found[LONG - 1])


def test_attention_without_a_mask_stays_as_it_is_written():
    def loss(w, x):
        s, v = scores(w, x)
        return jnp.mean(mean(jax.nn.softmax(s), v))

    program = ow.fuse_attention(ow.trace(loss, *long_numbers()))
    (found,) = ow.graph.attentions_of(program)
    assert found.kernel is None
    assert "no mask that is known" in str(found)
    assert "attention" not in {op.type for op in program.ops}


def in_a_scan(w, x):
    def turn(x, w):
        s, v = scores(w, x)
        y = mean(jax.nn.softmax(jnp.where(causal(s.shape[-2:]), s, -1e9)), v)
        return x + y.reshape(x.shape), None

    return jnp.mean(lax.scan(turn, x, jnp.stack([w, 2 * w]))[0] ** 2)


def in_a_checkpoint(w, x):
    return jax.checkpoint(causal_loss)(w, x)


@pytest.mark.parametrize("loss", [causal_loss, in_a_scan, in_a_checkpoint])
def test_training_is_the_same(loss):
    w, x = long_numbers()
    plain = ow.SGD(1e-3 if loss is in_a_scan else 1.0).minimize(loss, w, x)
    fused = ow.fuse_attention(plain, blocks=2)
    assert [found.kernel for found in ow.graph.attentions_of(fused)] == ["blocks"]
    data = np.stack([x, x[::-1]])
    expected, found = (trained(program, w, data)[0]["w"] for program in (plain, fused))
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert np.abs(found - w).max() > 1e-3


def test_other_lengths_are_fused_as_well():
    w, x = long_numbers()
    program = ow.fuse_attention(ow.SGD(1.0).minimize(causal_loss, w, x), blocks=2)
    step = ow.compile(program, donate=False)
    _, longer = long_numbers(96)
    out = step(step.init(w), longer)[1]
    np.testing.assert_allclose(out.loss, jax.jit(causal_loss)(w, longer), rtol=1e-5)


def test_layers_are_rolled_and_computed_low_whatever_the_order():
    def loss(ws, x):
        for w in ws:
            s, v = scores(w, x)
            y = mean(jax.nn.softmax(jnp.where(causal(s.shape[-2:]), s, -1e9)), v)
            x = x + jnp.tanh(y.reshape(x.shape))
        return jnp.mean(x**2)

    w, x = long_numbers()
    program = ow.SGD(0.1).minimize(loss, [w, w / 2, w / 3], x)
    for changed in (ow.roll, ow.mixed_precision):
        before, after = changed(ow.fuse_attention(program)), ow.fuse_attention(changed(program))
        assert str(before) == str(after)
        assert [found.kernel for found in ow.graph.attentions_of(after)] == ["blocks"] * 3


def test_rows_without_a_key_by_minus_infinity_are_not_numbers():
    def loss(w, x):
        s, v = scores(w, x)
        seen = jnp.tril(jnp.ones(s.shape[-2:], bool), -1)
        return jnp.sum(mean(jax.nn.softmax(jnp.where(seen, s, -jnp.inf)), v))

    w, x = long_numbers()
    fused = ow.fuse_attention(ow.trace(loss, w, x), "blocks")
    run = lower(fused, [fused.loss])
    found, expected = (jax.jit(jax.grad(f, (0, 1)))(w, x) for f in (lambda w, x: run([w], [x])[0], loss))
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(np.isnan(a), np.isnan(b))


def test_a_sum_that_is_not_a_number_divides_what_is_chosen_before():
    def weighted(w, x, seen):
        s, v = scores(w, x)
        e = jnp.exp(jnp.where(seen[0], s, -jnp.inf) - s.max(-1, keepdims=True))
        return mean(jnp.where(seen[0] & seen[1], e, 0) / e.sum(-1, keepdims=True), v)

    w, x = long_numbers(TIME)
    seen = np.stack([np.tri(TIME, k=-1, dtype=bool), np.tri(TIME, dtype=bool)])
    fused = ow.fuse_attention(ow.trace(weighted, w, x, seen), "blocks", blocks=1)
    (found,) = jax.jit(lower(fused, fused.outputs))([w], [x, seen])
    np.testing.assert_array_equal(np.isnan(found), np.isnan(jax.jit(weighted)(w, x, seen)))


def test_keys_with_an_axis_of_their_own_stay():
    def loss(w, x):
        q, k, v = split(w, x)
        weights = jax.nn.softmax(jnp.einsum("btd,bsid->btis", q[:, :, 0], k))
        return jnp.mean(jnp.einsum("btis,bsid->btid", weights, v))

    program = ow.trace(loss, *long_numbers())
    (found,) = ow.graph.attentions_of(ow.fuse_attention(program))
    assert "an axis that queries do not" in str(found)
    with pytest.raises(ow.ArgumentError, match="an axis that queries do not"):
        ow.fuse_attention(program, "blocks")


def test_a_saved_model_answers_as_the_step(tmp_path):
    w, x = long_numbers()
    program = ow.fuse_attention(ow.SGD(0.1).minimize(causal_loss, w, x), blocks=2)
    step = ow.compile(program, donate=False)
    state = step.init(w)
    ow.save(step, tmp_path / "step.onward", state)
    loaded, kept = ow.load_step(tmp_path / "step.onward")
    np.testing.assert_allclose(loaded(kept, x)[1].loss, step(state, x)[1].loss, rtol=1e-6)


def test_it_is_fused_once():
    program = ow.fuse_attention(ow.trace(causal_loss, *long_numbers()))
    with pytest.raises(ow.GraphError, match="fused already"):
        ow.fuse_attention(program)


def test_only_what_is_named_is_fused():
    def loss(w, x):
        return causal_loss(w, x) + causal_loss(w, 2 * x)

    program = ow.trace(loss, *long_numbers())
    first, second = (found.name for found in ow.graph.attentions_of(program))
    fused = ow.fuse_attention(program, where=second)
    assert [found.kernel for found in ow.graph.attentions_of(fused)] == [None, "blocks"]
    with pytest.raises(ow.UnknownNameError, match="nowhere"):
        ow.fuse_attention(program, where="nowhere")
    with pytest.raises(ow.ArgumentError, match="where is empty"):
        ow.fuse_attention(program, where=[])
    assert first != second


def test_a_kernel_that_cannot_be_taken_is_refused():
    program = ow.trace(causal_loss, *long_numbers())
    with pytest.raises(ow.ArgumentError, match="expected 'blocks', 'cudnn' or None"):
        ow.fuse_attention(program, "flash")
    with pytest.raises(ow.ArgumentError, match="it runs on cpu"):
        ow.fuse_attention(program, "cudnn")


@pytest.fixture
def gpu(monkeypatch):
    """A machine that says that it is a GPU, where JAX computes what cuDNN is asked for."""
    attend = jax.nn.dot_product_attention
    asked = []

    def instead(*args, implementation, **options):
        asked.append({**options, "bias": args[3] is not None})
        assert implementation == "cudnn"
        return attend(*args, **options)

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(kernels.jax.nn, "dot_product_attention", instead)
    return asked


HALF = {f.__name__: f for f in (einsum, scaled_queries_and_padding, groups, alibi, temperature, window)}


@pytest.mark.parametrize("name", HALF)
def test_cudnn_is_asked_for_the_same(name, gpu, monkeypatch):
    monkeypatch.setattr("tests.develop.test_fuse_attention.SIZE", 8)
    monkeypatch.setattr("tests.develop.test_fuse_attention.WIDTH", 8 * HEADS)
    w, x, mask = numbers()
    w, x = w.astype("bfloat16"), x.astype("bfloat16")
    program = ow.fuse_attention(ow.trace(HALF[name], w, x, mask))
    (found,) = ow.graph.attentions_of(program)
    assert found.kernel == "cudnn"
    assert gpu[-1]["is_causal"] == found.causal == (name in ("einsum", "groups", "alibi"))
    assert gpu[-1]["bias"] == (name not in ("einsum", "groups"))
    expected = jax.jit(HALF[name])(w.astype("float32"), x.astype("float32"), mask)
    (made,) = jax.jit(lower(program, program.outputs))([w], [x, mask])
    np.testing.assert_allclose(made.astype("float32"), expected, atol=0.06)


@pytest.mark.parametrize(
    ("fill", "dtype", "why"),
    [
        (-1e9, "float32", "expected bfloat16 or float16"),
        (-5.0, "bfloat16", "scores are not -9e\\+08 or less"),
    ],
)
def test_cudnn_is_not_asked_for_what_it_would_compute_otherwise(fill, dtype, why, gpu):
    def loss(w, x):
        s, v = scores(w, x)
        return jnp.mean(mean(jax.nn.softmax(jnp.where(causal(s.shape[-2:]), s, fill)), v))

    program = ow.trace(loss, *long_numbers(dtype=dtype))
    with pytest.raises(ow.ArgumentError, match=why):
        ow.fuse_attention(program, "cudnn")
    (found,) = ow.graph.attentions_of(ow.fuse_attention(program))
    assert found.kernel == "blocks"


def test_cudnn_is_not_asked_for_weights_that_are_dropped(gpu):
    def loss(w, x):
        s, v = scores(w, x)
        weights = jax.nn.softmax(jnp.where(causal(s.shape[-2:]), s, -1e9))
        return jnp.mean(mean(jnp.where(kept(weights), weights, 0), v))

    program = ow.trace(loss, *long_numbers(dtype="bfloat16"))
    with pytest.raises(ow.ArgumentError, match=r"changed behind softmax, as by dropout, by .*select_n"):
        ow.fuse_attention(program, "cudnn")
    (found,) = ow.graph.attentions_of(ow.fuse_attention(program))
    assert found.kernel == "blocks"
