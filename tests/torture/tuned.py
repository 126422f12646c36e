"""Is a step that is tuned equal to the same step that is not, and its gradient to that of ``jax.grad``?

    python -m tests.torture.tuned              # 600 random deep and recurrent networks
    python -m tests.torture.tuned 40 --first 7000
    python -m tests.torture.tuned 40 --lean    # all loops keep less, which small ones otherwise do not

Each network is drawn from its number: layers that repeat, convolutions with pooling, attention, and loops
over time and over layers, whose turns are drawn from operations that may leave a loop and such that may not.
It is trained for three steps in float64, as it is or accumulated, recomputed, replicated, rolled, with a rule
that is drawn. Tuned and untuned must agree to 1e-9 of the largest number of each array, and the gradients of
plain JAX too. All is compiled as users have it, optimized.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import onward as ow
from onward.develop import tuned as tuning

ROWS, TURNS = 8, 6
BOUND = 1e-9
Layer = Callable[[Any, Any], Any]


class Drawn:
    """A network drawn from a number: its parameters, and the function that computes its loss.

    Attributes:
        params: arrays by name.
        parts: the kinds of layers, in order.
    """

    def __init__(self, number: int) -> None:
        self.random = np.random.default_rng(number)
        self.params: dict[str, Any] = {}
        self.wide = int(self.pick(8, 16, 32))
        kinds = [dense, repeated, convolved, attended, recurrent, recurrent, scanned_layers, normed]
        self.parts = [self.pick(*kinds) for _ in range(self.random.integers(1, 4))]
        if not {recurrent, scanned_layers, repeated} & {*self.parts}:
            self.parts.append(recurrent)
        self.layers = [part(self) for part in self.parts]
        self.head = self.weight(self.wide, 3)

    def pick(self, *choices: Any) -> Any:
        return choices[self.random.integers(len(choices))]

    def weight(self, *shape: int) -> str:
        """The name of a new parameter."""
        name = f"w{len(self.params)}"
        self.params[name] = jnp.asarray(self.random.normal(0, 1 / np.sqrt(shape[0]), shape))
        return name

    def loss(self, p: Any, x: Any, y: Any) -> Any:
        """The mean squared error of what the layers make of ``x``: ``[rows, turns, wide]``."""
        for i, layer in enumerate(self.layers):
            with jax.named_scope(f"part_{i}"):
                x = layer(p, x)
        return jnp.mean((x.mean(1) @ p[self.head] - y) ** 2)

    def __str__(self) -> str:
        return " ".join(part.__name__ for part in self.parts)


def activation(drawn: Drawn) -> Callable[[Any], Any]:
    return drawn.pick(jnp.tanh, jax.nn.silu, jax.nn.gelu, jax.nn.sigmoid, jax.nn.softplus)


def dense(drawn: Drawn) -> Layer:
    w, b, act = drawn.weight(drawn.wide, drawn.wide), drawn.weight(drawn.wide), activation(drawn)
    return lambda p, x: act(x @ p[w] + p[b])


def normed(drawn: Drawn) -> Layer:
    scale = drawn.weight(drawn.wide)

    def layer(p: Any, x: Any) -> Any:
        centred = x - x.mean(-1, keepdims=True)
        return centred * lax.rsqrt(jnp.var(x, -1, keepdims=True) + 1e-3) * p[scale]

    return layer


def repeated(drawn: Drawn) -> Layer:
    """Two to six layers alike, each with weights of its own, written one after the other."""
    act, inner = activation(drawn), normed(drawn) if drawn.pick(True, False) else None
    weights = [
        (drawn.weight(drawn.wide, drawn.wide), drawn.weight(drawn.wide)) for _ in range(drawn.pick(2, 4, 6))
    ]
    is_checkpointed = drawn.pick(True, False, False)

    def layer(p: Any, x: Any) -> Any:
        def block(w: Any, b: Any, x: Any) -> Any:
            return x + act((inner(p, x) if inner else x) @ w + b)

        for w, b in weights:
            x = (jax.checkpoint(block) if is_checkpointed else block)(p[w], p[b], x)
        return x

    return layer


def convolved(drawn: Drawn) -> Layer:
    """A convolution along the turns, and pooling that keeps their number."""
    w, reach = drawn.weight(3, drawn.wide, drawn.wide), drawn.pick(1, 2, 3)
    computation, start = drawn.pick((lax.add, 0.0), (lax.max, -jnp.inf))

    def layer(p: Any, x: Any) -> Any:
        x = lax.conv_general_dilated(x, p[w], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))
        pooled = lax.reduce_window(x, start, computation, (1, reach, 1), (1, 1, 1), "SAME")
        return jnp.tanh(pooled / 2)

    return layer


def attended(drawn: Drawn) -> Layer:
    w = drawn.weight(drawn.wide, 3 * drawn.wide)

    def layer(p: Any, x: Any) -> Any:
        q, k, v = jnp.split(x @ p[w], 3, -1)
        scores = jnp.einsum("btd,bsd->bts", q, k) / np.sqrt(drawn.wide)
        return x + jnp.einsum("bts,bsd->btd", jax.nn.softmax(scores, -1), v)

    return layer


def scanned_layers(drawn: Drawn) -> Layer:
    """A loop over layers whose weights are stacked."""
    count, act = drawn.pick(1, 3, 5), activation(drawn)
    w, shared = drawn.weight(count, drawn.wide, drawn.wide), drawn.weight(drawn.wide, drawn.wide)
    unroll, body = drawn.pick(1, 1, 2), drawn.pick(lambda f: f, jax.checkpoint)

    def layer(p: Any, x: Any) -> Any:
        def turn(h: Any, w: Any) -> tuple[Any, Any]:
            return h + act(h @ w / 2 + h @ p[shared]), h.mean()

        return lax.scan(body(turn), x, p[w] / count, unroll=min(unroll, count))[0]

    return layer


def recurrent(drawn: Drawn) -> Layer:
    """A loop over time: gates of what is given and what is carried, each term drawn."""
    wide, act = drawn.wide, activation(drawn)
    terms = [drawn.pick(*TERMS)(drawn) for _ in range(drawn.random.integers(1, 4))]
    given, kept = drawn.weight(wide, wide), drawn.weight(wide, wide)
    reverse, rows_apart = drawn.pick(True, False), drawn.pick(True, False, False)
    unroll, returned = drawn.pick(1, 1, 3), drawn.pick("all", "last", "total")

    def layer(p: Any, x: Any) -> Any:
        def turn(carry: Any, now: Any) -> tuple[Any, Any]:
            h, total, i = carry
            new = now @ p[given] + h @ p[kept]
            for term in terms:
                new = new + term(p, h, now, i)
            new = act(new) / 2 + h / 2
            return (new, total + now * 0.1 + new.mean(-1, keepdims=True), i + 1), new

        def along(x: Any) -> Any:
            start = (jnp.zeros(x.shape[1:]), jnp.zeros(x.shape[1:]), jnp.int32(0))
            (h, total, _), out = lax.scan(turn, start, x, reverse=reverse, unroll=unroll)
            return {"all": out, "last": out + h, "total": out + total}[returned]

        if rows_apart:
            return jax.vmap(along)(x)
        return jnp.swapaxes(along(jnp.swapaxes(x, 0, 1)), 0, 1)

    return layer


def twice_given(drawn: Drawn) -> Any:
    one, other = drawn.weight(drawn.wide, drawn.wide), drawn.weight(drawn.wide, drawn.wide)
    return lambda p, h, now, i: jnp.tanh(now @ p[one]) @ p[other]


def tied(drawn: Drawn) -> Any:
    w = drawn.weight(drawn.wide, drawn.wide)
    return lambda p, h, now, i: (h @ p[w]) @ p[w].T / 4 + now @ (p[w] @ p[w]) / 4


def gated(drawn: Drawn) -> Any:
    w = drawn.weight(2 * drawn.wide, drawn.wide)
    return lambda p, h, now, i: jax.nn.sigmoid(jnp.concatenate([h, now], -1) @ p[w]) * h


def decided(drawn: Drawn) -> Any:
    w = drawn.weight(drawn.wide, drawn.wide)
    return lambda p, h, now, i: lax.cond(i % 2 == 0, lambda: now @ p[w], lambda: h - now)


def inner_loop(drawn: Drawn) -> Any:
    w = drawn.weight(drawn.wide, drawn.wide)

    def term(p: Any, h: Any, now: Any, i: Any) -> Any:
        return lax.fori_loop(0, 3, lambda _, v: jnp.tanh(v @ p[w] + now), h)

    return term


def looked_up(drawn: Drawn) -> Any:
    table = drawn.weight(TURNS, drawn.wide)
    return lambda p, h, now, i: lax.dynamic_index_in_dim(p[table], i, keepdims=False) * now


def diagonal(drawn: Drawn) -> Any:
    a = drawn.weight(drawn.wide)
    return lambda p, h, now, i: jnp.exp(-jnp.exp(p[a])) * h


def outer(drawn: Drawn) -> Any:
    w = drawn.weight(drawn.wide, drawn.wide)
    return lambda p, h, now, i: jnp.einsum("...d,...e,ed->...d", h, now, p[w]) / drawn.wide


TERMS = (twice_given, tied, gated, decided, inner_loop, looked_up, diagonal, outer)


def made(drawn: Drawn, x: Any, y: Any) -> tuple[Any, str]:
    """A training program of a network, and how it was made."""
    adam = {"learning_rate": 1e-2, "epsilon": 1e-3}  # a smaller one makes steps of roundings
    rule = drawn.pick(ow.SGD(0.05), ow.Momentum(0.05, 0.9), ow.Adam(**adam), ow.AdamW(**adam))
    program = rule.minimize(drawn.loss, drawn.params, x, y)
    how = drawn.pick("plain", "plain", "accumulate", "recompute", "replicate", "roll")
    if how == "accumulate":
        program = ow.accumulate(program, 2)
    elif how == "recompute":
        program = ow.recompute(program, scopes="part_*")
    elif how == "replicate":
        program = ow.replicate(program, devices=2)
    elif how == "roll":
        program = ow.roll(program)
    return program, f"{type(rule).__name__} {how}"


def trained(step: Any, params: Any, x: Any, y: Any) -> tuple[list[Any], list[float]]:
    """The parameters after each of three steps, and the losses."""
    state, after, losses = step.init(params), [], []
    for _ in range(3):
        state, out = step(state, x, y)
        losses.append(float(out.loss))
        after.append({name: np.asarray(state[name]) for name in params})
    return after, losses


def differs(found: Any, expected: Any) -> float:
    """The largest difference, by the largest number of each array (at least one)."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    return max(float(np.max(np.abs(a - b))) / max(1.0, float(np.max(np.abs(b)))) for a, b in pairs)


def checked(number: int) -> tuple[str, str, list[str]]:
    """What a network is, how it was found (equal, refused, or what differs), and what tuning did to it."""
    drawn = Drawn(number)
    x = jnp.asarray(drawn.random.normal(size=(ROWS, TURNS, drawn.wide)))
    y = jnp.asarray(drawn.random.normal(size=(ROWS, 3)))
    try:
        program, how = made(drawn, x, y)
    except ow.OnwardError as error:
        return str(drawn), f"refused: {str(error).splitlines()[0]}", []
    step, given = ow.compile(program), (drawn.params, x, y)
    after, losses = trained(step, *given)
    plain_after, _ = trained(ow.compile(program, tune=False), *given)
    value, gradient = jax.jit(jax.value_and_grad(drawn.loss))(*given)
    told = {"tuned": differs(after, plain_after), "the loss from JAX's": abs(float(value) - losses[0])}
    if "SGD" in how:
        stepped = jax.tree.map(lambda p, g: np.asarray(p - 0.05 * g), drawn.params, gradient)
        told["the gradient from JAX's"] = differs(after[0], stepped)
    wrong = [f"{what} differs by {off:.1e}" for what, off in told.items() if not off <= BOUND]
    notes = [note.split(":")[0] for note in step.plan().notes if not note.startswith("not rolled")]
    return f"{drawn}, {how}", wrong[0] if wrong else "equal", notes


def main(count: int, first: int, lean: bool) -> int:
    """Check so many networks; the number of those that are wrong."""
    if lean:
        tuning._MUCH = 0
    jax.config.update("jax_enable_x64", True)
    ends: Counter[str] = Counter()
    for number in range(first, first + count):
        name, end, notes = checked(number)
        ends[end.split(":")[0].split(" by ")[0]] += 1
        ends.update(f"({note})" for note in {*notes})
        if end != "equal":
            print(f"{number}: {name}: {end}", flush=True)
        if number % 20 == 0:
            jax.clear_caches()
            print(number, dict(ends), flush=True)
    print(dict(ends))
    return sum(n for end, n in ends.items() if "differs" in end)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("count", nargs="?", type=int, default=600)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--lean", action="store_true")
    sys.exit(main(**vars(parser.parse_args())) > 0)
