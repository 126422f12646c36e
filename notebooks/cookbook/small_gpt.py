"""Write like a language reference: a small GPT that reads and writes letters.

Trained:  four layers of causal attention and two dense layers each, to guess the next letter. They are one loop when
          they are compiled, which nobody wrote.
Data:     the language reference of Python, inside Python (``pydoc_data.topics``); the end is held out.
You see:  the loss on the held-out part: 2.2 bits for each letter, where the frequencies of pairs of letters give
          3.6; and a text that it writes, with words and an outline that are nearly those of the reference.
Source:   Radford, Wu, Child, Luan, Amodei and Sutskever, Language Models are Unsupervised Multitask Learners, 2019;
          Vaswani et al., Attention Is All You Need, 2017.
Time:     110 CPU seconds.
"""

from pydoc_data.topics import topics

import jax
import jax.numpy as jnp
import numpy as np

import onward as ow

CONTEXT, HEADS = 64, 4


def read_text():
    """The letters that occur, and the text as their numbers."""
    text = "\n\n".join(topics[name] for name in sorted(topics))
    letters = sorted(set(text))
    place = {letter: i for i, letter in enumerate(letters)}
    return letters, np.array([place[letter] for letter in text], np.int32)


def windows(ids, stride):
    """Stretches of the text, each with the same one letter further."""
    cut = np.lib.stride_tricks.sliding_window_view(ids, CONTEXT + 1)[::stride]
    return {"tokens": cut[:, :-1], "targets": cut[:, 1:]}


def initial(letters, width, layers, seed=0):
    """Weights of GPT-2: normal, those that end a residual branch smaller by the number of branches."""
    rng = np.random.default_rng(seed)

    def weight(*shape, scale=0.02):
        return rng.normal(0, scale, shape).astype(np.float32)

    last = 0.02 / np.sqrt(2 * layers)
    blocks = [
        {
            "attend": weight(width, 3 * width),
            "mix": weight(width, width, scale=last),
            "up": weight(width, 4 * width),
            "down": weight(4 * width, width, scale=last),
        }
        for _ in range(layers)
    ]
    return {"embed": weight(letters, width), "place": weight(CONTEXT, width), "blocks": blocks}


def norm(x):
    """The numbers of each letter, with a mean square of 1."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def block(params, x):
    """One layer: letters look at those before them, then each is worked on by itself."""
    batch, length, width = x.shape
    with jax.named_scope("attention"):
        heads = (norm(x) @ params["attend"]).reshape(batch, length, 3, HEADS, -1)
        looked = jax.nn.dot_product_attention(*jnp.moveaxis(heads, 2, 0), is_causal=True)
        x = x + looked.reshape(batch, length, width) @ params["mix"]
    with jax.named_scope("dense"):
        return x + jax.nn.gelu(norm(x) @ params["up"]) @ params["down"]


def logits(params, tokens):
    """The scores of each next letter, [batch, length, letters]; the embedding is used at both ends."""
    x = params["embed"][tokens] + params["place"][: tokens.shape[-1]]
    for layer in params["blocks"]:
        x = block(layer, x)
    return norm(x) @ params["embed"].T


def loss(params, tokens, targets):
    """Cross entropy in nats for each letter."""
    return ow.layer.cross_entropy(logits(params, tokens), targets)


@jax.jit(static_argnums=2)
def write(params, tokens, count, key):
    """The letters that follow, each drawn with the letters before it in view."""

    def one(seen, key):
        scores = logits(params, seen[None])[0, -1] / 0.7
        letter = jax.random.categorical(key, scores).astype(seen.dtype)
        return jnp.append(seen[1:], letter), letter

    return jax.lax.scan(one, tokens, jax.random.split(key, count))[1]


def main(width=64, layers=4, steps=700, size=32, count=400):
    """Train, test, write."""
    letters, ids = read_text()
    train, test = windows(ids[:-30_000], 7), windows(ids[-30_000:], CONTEXT)
    reader = ow.batches(train, size, shuffle=True, drop_last=True)
    params = initial(len(letters), width, layers)
    rate = ow.schedule.cosine(6e-3, steps=steps, warmup=steps // 20)
    optimizer = ow.AdamW(rate, weight_decay=0.1, rules=[ow.ClipByGlobalNorm(1.0)])
    program = optimizer.minimize(loss, params, *next(iter(reader)).values())
    step, losses = ow.compile(program), []
    state = step.init(params)
    for n, batch in zip(range(steps), reader, strict=False):
        state, out = step(state, **batch)
        losses.append(out.loss)
        if n % 100 == 99:
            print(f"step {n + 1}: {float(out.loss) / np.log(2):.2f} bits for each letter")

    evaluated = ow.compile(ow.for_test(program), donate=False)
    tested = np.mean([evaluated(state, **batch)[1].loss for batch in ow.batches(test, 64)]) / np.log(2)
    print(f"held out: {tested:.2f} bits for each letter\n")
    made = write(state.parameters, ids[:CONTEXT], count, jax.random.key(1))
    print("".join(letters[i] for i in (*ids[:CONTEXT], *np.asarray(made))))
    return {"losses": np.array(losses), "tested": tested, "text": made}


if __name__ == "__main__":
    main()
