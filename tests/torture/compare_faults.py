"""Does ``compare`` name the op in which a fault was planted, and none where two programs are equal?

    python -m tests.torture.compare_faults           # all: 200 faults and more, 100 equal pairs
    python -m tests.torture.compare_faults 20 10     # some of both
    python -m tests.torture.compare_faults images    # all whose name holds the word

A network is written as a list of sites. Each site has the right lines and wrong ones: another constant, axis,
dtype, order, a dropped op, swapped inputs, a stale statistic, a missing collective. A fault is found if one
of the lines of its site is named. Each is planted in a program of ours, in one that ``inspect`` opened, or in
a step of ``shard_map``. Equal pairs are a program and what a transform makes of it.

The cost is the CPU time of the comparison by that of compiling both steps: the median, and the most.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import numpy as np

import onward as ow
from onward.core.recipe import build, whole_types
from onward.execute.executable import Executable

ROWS = 16


class Sites:
    """The lines of a network; those of one site are the wrong ones of some kind."""

    def __init__(self, site: str = "", kind: str = "") -> None:
        self.site, self.kind = site, kind
        self.wrong: list[tuple[str, str]] = []
        self.lines: dict[str, set[int]] = {}

    def __call__(self, site: str, right: Callable[[], Any], **wrong: Callable[[], Any]) -> Any:
        self.wrong += [(site, kind) for kind in wrong]
        self.lines[site] = {f.__code__.co_firstlineno for f in (right, *wrong.values())}
        chosen = wrong[self.kind] if self.site == site and self.kind in wrong else right
        return chosen()


def perceptron(at: Sites, p: Any, x: Any, y: Any) -> Any:
    h = at(
        "hidden",
        lambda: x @ p["w1"],
        swapped=lambda: x[::-1] @ p["w1"],
        dtype=lambda: (x.astype(jnp.bfloat16) @ p["w1"].astype(jnp.bfloat16)).astype(jnp.float32),
    )
    h = at(
        "bias",
        lambda: h + jnp.sin(h + p["b1"]),
        dropped=lambda: h + jnp.sin(h),
        constant=lambda: h + jnp.sin(h + 1.01 * p["b1"]),
    )
    mean = at(
        "mean",
        lambda: jnp.mean(h, 0, keepdims=True),
        axis=lambda: jnp.mean(h, 1, keepdims=True),
        stale=lambda: jax.lax.stop_gradient(jnp.mean(h[:8], 0, keepdims=True)),
        dropped=lambda: jnp.zeros((1, 12)) + h[:1] * 0,
    )
    variance = at(
        "variance",
        lambda: jnp.mean((h - mean) ** 2, 0, keepdims=True),
        constant=lambda: jnp.sum((h - mean) ** 2, 0, keepdims=True) / (ROWS - 1),
        axis=lambda: jnp.mean((h - mean) ** 2, 1, keepdims=True),
    )
    h = at(
        "normal",
        lambda: (h - mean) * jax.lax.rsqrt(variance + 1e-5),
        constant=lambda: (h - mean) * jax.lax.rsqrt(variance + 1e-3),
        swapped=lambda: (mean - h) * jax.lax.rsqrt(variance + 1e-5),
        dropped=lambda: h * jax.lax.rsqrt(variance + 1e-5),
    )
    h = at("gain", lambda: h * p["g1"], dropped=lambda: h, constant=lambda: h * p["g1"] * 1.001)
    h = at(
        "bend",
        lambda: jnp.tanh(h),
        constant=lambda: jnp.tanh(h * 1.002),
        dropped=lambda: h,
        other=lambda: jnp.sin(h),
        dtype=lambda: jnp.tanh(h.astype(jnp.bfloat16)).astype(jnp.float32),
    )
    h = at(
        "second",
        lambda: jnp.maximum(h @ p["w2"] + p["b2"], 0),
        order=lambda: jnp.maximum(h @ p["w2"], 0) + p["b2"],
        constant=lambda: jnp.maximum(h @ p["w2"] + p["b2"], 0.01),
        dropped=lambda: h @ p["w2"] + p["b2"],
    )
    out = at(
        "out",
        lambda: h @ p["w3"],
        constant=lambda: 0.999 * (h @ p["w3"]),
        swapped=lambda: h @ p["w3"][:, ::-1],
    )
    error = at("error", lambda: out - y, swapped=lambda: y - 2 * out, constant=lambda: out - 0.99 * y)
    squares = at("square", lambda: error**2, constant=lambda: error**4, other=lambda: jnp.abs(error))
    return at(
        "loss",
        lambda: jnp.mean(squares),
        other=lambda: jnp.sum(squares),
        constant=lambda: 1.01 * jnp.mean(squares),
    )


def attention(at: Sites, p: Any, x: Any, y: Any) -> Any:
    x = x.reshape(ROWS, 4, 6) if x.shape[0] == ROWS else x.reshape(-1, 4, 6)
    h = at(
        "norm",
        lambda: x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6),
        axis=lambda: x * jax.lax.rsqrt(jnp.mean(x**2, 1, keepdims=True) + 1e-6),
        constant=lambda: x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-3),
        order=lambda: x / (jnp.mean(jnp.abs(x), -1, keepdims=True) + 1e-6),
    )
    q = at("query", lambda: h @ p["q"], swapped=lambda: h @ p["k"], constant=lambda: h @ p["q"] * 1.01)
    k = at("key", lambda: h @ p["k"], swapped=lambda: h @ p["q"], order=lambda: x @ p["k"])
    v = at("value", lambda: h @ p["v"], order=lambda: x @ p["v"], dropped=lambda: h)
    scores = at(
        "scores",
        lambda: jnp.einsum("bqd,bkd->bqk", q, k) / 6**0.5,
        constant=lambda: jnp.einsum("bqd,bkd->bqk", q, k) / 6,
        swapped=lambda: jnp.einsum("bqd,bkd->bqk", k, q) / 6**0.5,
        dropped=lambda: jnp.einsum("bqd,bkd->bqk", q, k),
    )
    scores = at(
        "mask",
        lambda: jnp.where(jnp.tril(jnp.ones((4, 4), bool)), scores, -1e9),
        dropped=lambda: scores,
        axis=lambda: jnp.where(jnp.triu(jnp.ones((4, 4), bool)), scores, -1e9),
        constant=lambda: jnp.where(jnp.tril(jnp.ones((4, 4), bool)), scores, -1.0),
    )
    weights = at(
        "softmax",
        lambda: jax.nn.softmax(scores, -1),
        axis=lambda: jax.nn.softmax(scores, 1),
        constant=lambda: jax.nn.softmax(scores * 0.99, -1),
        dtype=lambda: jax.nn.softmax(scores.astype(jnp.bfloat16), -1).astype(jnp.float32),
    )
    mixed = at(
        "mixed",
        lambda: jnp.einsum("bqk,bkd->bqd", weights, v),
        swapped=lambda: jnp.einsum("bkq,bkd->bqd", weights, v),
        dtype=lambda: jnp.einsum("bqk,bkd->bqd", weights.astype(jnp.bfloat16), v.astype(jnp.bfloat16)).astype(
            jnp.float32
        ),
    )
    h = at("residual", lambda: x + mixed, dropped=lambda: mixed, constant=lambda: x + 0.5 * mixed)
    wide = at(
        "wide",
        lambda: jax.nn.gelu(h @ p["up"]),
        other=lambda: jax.nn.relu(h @ p["up"]),
        constant=lambda: jax.nn.gelu(h @ p["up"], approximate=False),
        swapped=lambda: jax.nn.gelu(x @ p["up"]),
    )
    h = at(
        "down",
        lambda: h + wide @ p["down"],
        dropped=lambda: wide @ p["down"],
        swapped=lambda: x + wide @ p["down"],
    )
    pooled = at(
        "pool",
        lambda: jnp.mean(h, 1),
        other=lambda: jnp.max(h, 1),
        dropped=lambda: h[:, -1],
        constant=lambda: jnp.sum(h, 1) / 3,
    )
    logits = at("logits", lambda: pooled @ p["head"], constant=lambda: 1.001 * (pooled @ p["head"]))
    logs = at("logs", lambda: jax.nn.log_softmax(logits), axis=lambda: jax.nn.log_softmax(logits, 0))
    target = jax.nn.softmax(y)
    terms = at(
        "terms", lambda: -jnp.sum(target * logs, -1), order=lambda: -jnp.sum(target, -1) * jnp.sum(logs, -1)
    )
    return at(
        "loss",
        lambda: jnp.mean(terms),
        stale=lambda: jnp.mean(terms[: ROWS // 2]),
        constant=lambda: jnp.mean(terms) + 1e-3,
    )


def images(at: Sites, p: Any, x: Any, y: Any) -> Any:
    x = x.reshape(-1, 4, 6, 1)
    convolved = partial(jax.lax.conv_general_dilated, dimension_numbers=("NHWC", "HWIO", "NHWC"))
    h = at(
        "conv",
        lambda: convolved(x, p["c1"], (1, 1), "SAME"),
        constant=lambda: convolved(x, p["c1"], (1, 1), ((0, 2), (1, 1))),
        axis=lambda: convolved(x, p["c1"].transpose(1, 0, 2, 3), (1, 1), "SAME"),
        swapped=lambda: convolved(x[:, ::-1], p["c1"], (1, 1), "SAME"),
    )
    h = at("relu", lambda: jax.nn.relu(h), other=lambda: jax.nn.leaky_relu(h), dropped=lambda: h)
    h = at(
        "group",
        lambda: h / (jnp.std(h, (1, 2), keepdims=True) + 1e-2),
        axis=lambda: h / (jnp.std(h, (1, 3), keepdims=True) + 1e-2),
        constant=lambda: h / (jnp.std(h, (1, 2), keepdims=True) + 2e-2),
        dropped=lambda: h,
    )
    h = at(
        "second",
        lambda: convolved(h, p["c2"], (2, 2), "SAME"),
        constant=lambda: convolved(h, p["c2"] * 0.99, (2, 2), "SAME"),
        dtype=lambda: convolved(h.astype(jnp.bfloat16), p["c2"].astype(jnp.bfloat16), (2, 2), "SAME").astype(
            jnp.float32
        ),
    )
    h = at(
        "pool",
        lambda: jnp.max(h, (1, 2)),
        other=lambda: jnp.mean(h, (1, 2)),
        axis=lambda: jnp.max(h[:, ::-1, :1], (1, 2)),
    )
    out = at(
        "out", lambda: h @ p["o"], constant=lambda: h @ p["o"] + 0.01, swapped=lambda: h[:, ::-1] @ p["o"]
    )
    return at(
        "loss",
        lambda: jnp.mean(jnp.abs(out - y)),
        constant=lambda: jnp.mean(jnp.abs(out - y) ** 1.1),
        other=lambda: jnp.median(jnp.abs(out - y)),
    )


@dataclass(frozen=True)
class Network:
    """A loss with its parameters and a batch."""

    loss: Callable[..., Any]
    parameters: Any
    batch: tuple[Any, Any]

    def program(self, at: Sites) -> ow.Program:
        named = lambda p, x, y: self.loss(at, p, x, y)  # noqa: E731
        return ow.Adam(1e-2).minimize(named, self.parameters, *self.batch, name=self.loss.__name__)


def networks() -> list[Network]:
    """All three, with numbers of a fixed seed."""
    draw = np.random.default_rng(0)

    def normal(*shape: int) -> Any:
        return draw.normal(size=shape).astype(np.float32) / max(shape[0], 1) ** 0.5 if shape else None

    wide = {
        "w1": normal(24, 12),
        "b1": normal(12),
        "g1": 1 + normal(12),
        "w2": normal(12, 8),
        "b2": normal(8),
        "w3": normal(8, 3),
    }
    heads = {n: normal(6, 6) for n in "qkv"} | {
        "up": normal(6, 12),
        "down": normal(12, 6),
        "head": normal(6, 3),
    }
    kernels = {"c1": normal(3, 3, 1, 4), "c2": normal(3, 3, 4, 6), "o": normal(6, 3)}
    batch = draw.normal(size=(ROWS, 24)).astype(np.float32), draw.normal(size=(ROWS, 3)).astype(np.float32)
    return [
        Network(perceptron, wide, batch),
        Network(attention, heads, batch),
        Network(images, kernels, batch),
    ]


def adam_by_hand(at: Sites, network: Network) -> Callable[..., Any]:
    """A training step as people write one."""

    def update(p: Any, g: Any, m: Any, v: Any, t: Any) -> Any:
        m = at(
            "first", lambda: 0.9 * m + 0.1 * g, constant=lambda: 0.9 * m + 0.2 * g, stale=lambda: m + 0 * g
        )
        v = at(
            "moment",
            lambda: 0.999 * v + 0.001 * g**2,
            constant=lambda: 0.99 * v + 0.01 * g**2,
            order=lambda: 0.999 * v + (0.001 * g) ** 2,
            dropped=lambda: 0.999 * v + 0.001 * g,
        )
        high = at("high", lambda: m / (1 - 0.9**t), dropped=lambda: m, constant=lambda: m / (1 - 0.8**t))
        root = at(
            "root",
            lambda: jnp.sqrt(v / (1 - 0.999**t)),
            dropped=lambda: v / (1 - 0.999**t),
            order=lambda: jnp.sqrt(v) / (1 - 0.999**t),
        )
        new = at(
            "step",
            lambda: p - 0.01 * high / (root + 1e-8),
            constant=lambda: p - 0.02 * high / (root + 1e-8),
            swapped=lambda: p + 0.01 * high / (root + 1e-8),
            order=lambda: p - 0.01 * high / root.mean(),
        )
        return new, m, v

    def step(p: Any, m: Any, v: Any, t: Any, x: Any, y: Any) -> Any:
        loss, g = jax.value_and_grad(lambda p: network.loss(at, p, x, y))(p)
        t = at("count", lambda: t + 1, stale=lambda: t + 0, constant=lambda: t + 2)
        leaves, tree = jax.tree.flatten(p)
        moved = [update(*group, t) for group in zip(leaves, *map(jax.tree.leaves, (g, m, v)), strict=True)]
        return (*(jax.tree.unflatten(tree, part) for part in zip(*moved, strict=True)), t, loss)

    return step


def opened(at: Sites, network: Network) -> tuple[ow.Program, Any]:
    """That step as ``inspect`` opens it, and its state."""
    zeros = jax.tree.map(jnp.zeros_like, network.parameters)
    state = network.parameters, zeros, jax.tree.map(lambda x: x + 0.01, zeros), jnp.float32(1)
    return ow.inspect(adam_by_hand(at, network), *state, *network.batch), state


@dataclass(frozen=True)
class Planted:
    """A fault: what is compared, the lines to be named, and a word for it."""

    name: str
    kind: str
    pair: Callable[[], tuple[ow.Program, ow.Program, Any, tuple[Any, ...]]]
    lines: frozenset[int]


def faults() -> Iterator[Planted]:
    """Every fault in every way."""
    for network in networks():
        right = Sites()
        whole = network.program(right)
        for site, kind in dict.fromkeys(right.wrong):
            lines = frozenset(right.lines[site])

            def ours(
                site: str = site, kind: str = kind, network: Network = network, whole: Any = whole
            ) -> Any:
                return whole, network.program(Sites(site, kind)), network.parameters, network.batch

            yield Planted(f"{network.loss.__name__}/{site}", kind, ours, lines)
        right = Sites()
        theirs, state = opened(right, network)
        for site, kind in dict.fromkeys(right.wrong):
            lines = frozenset(right.lines[site])

            def foreign(
                site: str = site,
                kind: str = kind,
                network: Network = network,
                a: Any = theirs,
                state: Any = state,
            ) -> Any:
                return a, opened(Sites(site, kind), network)[0], state, network.batch

            yield Planted(f"inspect {network.loss.__name__}/{site}", kind, foreign, lines)


def collective_faults() -> Iterator[Planted]:
    """Steps spread over devices by hand, with a collective that is missing, or is another."""
    for network in networks():
        right = Sites()
        program, _ = spread(right, network)
        for site, kind in dict.fromkeys(w for w in right.wrong if w[0] in ("merge", "tell")):

            def apart(
                site: str = site, kind: str = kind, network: Network = network, a: Any = program
            ) -> Any:
                return a, spread(Sites(site, kind), network)[0], network.parameters, network.batch

            yield Planted(f"spread {network.loss.__name__}/{site}", kind, apart, frozenset(right.lines[site]))


def spread(at: Sites, network: Network) -> tuple[ow.Program, Any]:
    """A step of ``shard_map`` over eight devices."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]), ("d",))
    part = jax.sharding.PartitionSpec

    def step(p: Any, x: Any, y: Any) -> Any:
        loss, g = jax.value_and_grad(lambda p: network.loss(at, p, x, y))(p)
        g = at(
            "merge",
            lambda: jax.lax.pmean(g, "d"),
            missing=lambda: jax.tree.map(lambda x: jax.lax.all_gather(x, "d")[0], g),
            other=lambda: jax.lax.psum(g, "d"),
            extreme=lambda: jax.lax.pmax(g, "d"),
        )
        loss = at("tell", lambda: jax.lax.pmean(loss, "d"), other=lambda: jax.lax.pmax(loss, "d"))
        return jax.tree.map(lambda p, g: p - 0.1 * g, p, g), loss

    spread_step = jax.shard_map(
        step, mesh=mesh, in_specs=(part(), part("d"), part("d")), out_specs=(part(), part()), check_vma=False
    )
    return ow.inspect(jax.jit(spread_step), network.parameters, *network.batch), network.parameters


@dataclass(frozen=True)
class Equal:
    """Two programs that train alike."""

    name: str
    pair: Callable[[], tuple[Any, Any, Any, tuple[Any, ...]]]


def equals() -> Iterator[Equal]:
    """What transforms make of a program, and what computes the same in other words."""
    for network in networks():
        a, name = network.program(Sites()), network.loss.__name__
        is_mean = network.loss is not perceptron  # normalized by its batch: micro-batches differ
        for word, made in transforms(a, is_mean):
            yield Equal(
                f"{name} {word}", lambda a=a, made=made, n=network: (a, made(), n.parameters, n.batch)
            )
        for word, _ in transforms(a, is_mean):
            if word not in ("saved", "mixed_precision"):
                yield Equal(
                    f"{name} {word} in low precision",
                    lambda a=a, word=word, m=is_mean, n=network: (
                        b := ow.mixed_precision(a, "bfloat16"),
                        dict(transforms(b, m))[word](),
                        n.parameters,
                        n.batch,
                    ),
                )
        for optimizer in (
            ow.SGD(0.1),
            ow.Momentum(0.1, 0.9),
            ow.AdamW(1e-2),
            ow.Lion(1e-3),
            ow.RMSProp(1e-3),
        ):
            of_it = optimizer.minimize(
                lambda p, x, y, n=network: n.loss(Sites(), p, x, y), network.parameters, *network.batch
            )
            for word, made in transforms(of_it, is_mean):
                if word in ("again", "replicate", "accumulate"):
                    yield Equal(
                        f"{name} {type(optimizer).__name__} {word}",
                        lambda a=of_it, made=made, n=network: (a, made(), n.parameters, n.batch),
                    )
        yield Equal(f"{name} from a file", partial(from_a_file, a, network))
        theirs, state = opened(Sites(), network)
        yield Equal(
            f"inspect {name}", lambda n=network, a=theirs, s=state: (a, opened(Sites(), n)[0], s, n.batch)
        )
        by_hand = ow.inspect(sgd_by_hand(network), network.parameters, *network.batch)
        ours = ow.SGD(0.1).minimize(
            lambda p, x, y, n=network: n.loss(Sites(), p, x, y), network.parameters, *network.batch
        )
        yield Equal(
            f"theirs and ours {name}", lambda n=network, a=by_hand, b=ours: (a, b, n.parameters, n.batch)
        )


def from_a_file(a: ow.Program, network: Network) -> tuple[Any, Any, Any, tuple[Any, ...]]:
    """A program, and the step that was saved of it and loaded."""
    with tempfile.TemporaryDirectory() as folder:
        step = ow.compile(a)
        ow.save(step, f"{folder}/step.onward", step.init(network.parameters))
        loaded, state = ow.load_step(f"{folder}/step.onward")
    return a, loaded.program, state, network.batch


def sgd_by_hand(network: Network) -> Callable[..., Any]:
    def step(p: Any, x: Any, y: Any) -> Any:
        loss, g = jax.value_and_grad(lambda p: network.loss(Sites(), p, x, y))(p)
        return jax.tree.map(lambda p, g: p - 0.1 * g, p, g), loss

    return step


def transforms(a: ow.Program, takes_apart: bool) -> list[tuple[str, Callable[[], Any]]]:
    """What leaves the training as it is."""
    found: list[tuple[str, Callable[[], Any]]] = [
        ("itself", lambda: a),
        ("again", lambda: _rebuilt(a)),
        ("replicate", lambda: ow.replicate(a, 8)),
        ("replicate 2", lambda: ow.replicate(a, 2)),
        ("guard", lambda: ow.guard(a)),
        ("watch", lambda: ow.watch(a, gradients=True)),
        ("mixed_precision", lambda: ow.mixed_precision(a, "bfloat16")),
        ("sharded", lambda: ow.replicate(a, 8, merge=ow.Sharded())),
    ]
    if takes_apart:
        found += [
            ("accumulate", lambda: ow.accumulate(a, 4)),
            ("accumulate and replicate", lambda: ow.accumulate(ow.replicate(a, 2), 4)),
        ]
    return found


def _rebuilt(a: ow.Program) -> ow.Program:
    return build(a.recipe, whole_types(a))


@dataclass(frozen=True)
class Outcome:
    """What came of one pair."""

    name: str
    is_right: bool
    page: str
    seconds: float
    compiling: float

    @property
    def cost(self) -> float:
        """How many times the compilation of both it took."""
        return self.seconds / max(self.compiling, 1e-9)


def tried(fault: Planted | Equal) -> Outcome:
    """Compare a pair."""
    a, b, state, batch = fault.pair()
    begun = time.process_time()
    for program in (a, b):
        _compiled(program)
    compiling = time.process_time() - begun
    begun = time.process_time()
    found = ow.compare(a, b, state, *batch)
    seconds = time.process_time() - begun
    if isinstance(fault, Equal):
        return Outcome(fault.name, found.equal, str(found), seconds, compiling)
    ops = [op for op in (found.before, found.after) if op is not None and op.source is not None]
    is_named = any(op.source.line in fault.lines for op in ops)
    return Outcome(f"{fault.name} {fault.kind}", is_named, str(found), seconds, compiling)


def _compiled(program: ow.Program) -> None:
    Executable(program, (), ()).compile()


_TELL = partial(print, flush=True)


def torture(
    faults_: list[Any], equals_: list[Any], tell: Callable[[str], None] = _TELL
) -> tuple[list[Outcome], list[Outcome]]:
    """Try them all."""
    both: list[list[Outcome]] = []
    for pairs in (faults_, equals_):
        outcomes = []
        for pair in pairs:
            try:
                outcome = tried(pair)
            except ow.OnwardError as error:
                tell(f"not made: {pair.name}: {str(error)[:150]}")
                continue
            outcomes.append(outcome)
            jax.clear_caches()
            word, page = ("right", "") if outcome.is_right else ("WRONG", f"\n{outcome.page}\n")
            tell(f"{word}  {outcome.cost:5.2f}  {outcome.name}{page}")
        right, costs = sum(x.is_right for x in outcomes), [x.cost for x in outcomes] or [0.0]
        tell(
            f"{right} of {len(outcomes)} right; {sum(x.seconds for x in outcomes):.1f} s of CPU, "
            f"{median(costs):.2f} times compiling, {max(costs):.2f} at most, "
            f"above 3 in {sum(cost > 3 for cost in costs)}"
        )
        both.append(outcomes)
    return both[0], both[1]


def main() -> None:
    warnings.simplefilter("ignore")
    counts = [int(x) for x in sys.argv[1:] if x.isdigit()] or [10**6, 10**6]
    words = [x for x in sys.argv[1:] if not x.isdigit()]
    planted = _named([*faults(), *collective_faults()] if counts[0] else [], words)
    equal = _named(list(equals()) if counts[1] else [], words)
    print(
        f"{len(planted)} faults: {dict(Counter(x.kind for x in planted))}; {len(equal)} equal pairs",
        flush=True,
    )
    torture(_some(planted, counts[0]), _some(equal, counts[1]))


def _named(pairs: list[Any], words: list[str]) -> list[Any]:
    """Those whose names hold these words."""
    return [pair for pair in pairs if all(word in pair.name for word in words)]


def _some(pairs: list[Any], count: int) -> list[Any]:
    """So many of them, evenly."""
    return pairs[:: max(1, len(pairs) // count)] if count else []


if __name__ == "__main__":
    main()
