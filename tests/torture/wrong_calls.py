"""Calls of the public API with one wrong argument: a named error each, or a result, never a raw error.

python -m tests.torture.wrong_calls [COUNT] [SEED]
"""

from __future__ import annotations

import inspect
import random
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import jax.numpy as jnp
import numpy as np

import onward as ow

PARAMS = {"w": np.ones((3, 2), np.float32), "b": np.zeros(2, np.float32)}
X, Y = np.ones((4, 3), np.float32), np.zeros((4, 2), np.float32)


def loss(params: Any, x: Any, y: Any) -> Any:
    return jnp.mean((jnp.tanh(x @ params["w"] + params["b"]) - y) ** 2)


class NoIterable:
    """Has whatever attribute it is asked for: nothing."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


WRONG: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "text": lambda: "abc",
    "empty text": lambda: "",
    "bytes": lambda: b"w",
    "True": lambda: True,
    "0": lambda: 0,
    "-1": lambda: -1,
    "3": lambda: 3,
    "1.5": lambda: 1.5,
    "nan": lambda: float("nan"),
    "inf": lambda: float("inf"),
    "complex": lambda: 1j,
    "empty list": list,
    "list of None": lambda: [None],
    "nested list": lambda: [["w"]],
    "empty dict": dict,
    "dict by number": lambda: {1: 2},
    "set": lambda: {"w", 3},
    "array": lambda: np.ones((2, 2), np.float32),
    "texts": lambda: np.array(["a", "b"]),
    "objects": lambda: np.array([object()]),
    "object": object,
    "strange object": NoIterable,
    "function": lambda: lambda *args: None,
    "class": lambda: Exception,
    "module": lambda: np,
    "program": lambda: trained(),
    "optimizer": lambda: ow.SGD(0.1),
    "generator": lambda: (x for x in "ab"),
}


@cache
def forward() -> ow.Program:
    return ow.trace(loss, PARAMS, X, Y)


@cache
def trained() -> ow.Program:
    return ow.SGD(0.1).minimize(loss, PARAMS, X, Y)


@cache
def step() -> ow.Step:
    return ow.compile(trained(), donate=False)


@dataclass(frozen=True)
class Call:
    """A call that works, and what its arguments are."""

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...] = ()
    options: dict[str, Any] | None = None

    def spoiled(self, place: Any, value: Any) -> Call:
        if isinstance(place, int):
            return replace(self, arguments=(*self.arguments[:place], value, *self.arguments[place + 1 :]))
        return replace(self, options={**(self.options or {}), place: value})

    @property
    def places(self) -> list[Any]:
        """The arguments that can be wrong: those given, and those that could be."""
        try:
            parameters = inspect.signature(self.function).parameters.values()
        except ValueError:
            parameters = ()
        by_name = (p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
        named = [p.name for p, fits in zip(parameters, by_name, strict=True) if fits]
        return [*range(len(self.arguments)), *named[len(self.arguments) :]]

    def __call__(self) -> Any:
        result = self.function(*self.arguments, **(self.options or {}))
        if self.name.startswith(("rule ", "optimizer ")):  # what it is given is looked at where it is used
            around = ow.SGD(0.1, rules=[result]) if self.name.startswith("rule ") else result
            around.minimize(loss, PARAMS, X, Y)
        return result


def calls() -> Iterator[Call]:
    """One call of each function that derives, rewrites, explains, feeds or runs."""
    program, whole = forward(), trained()
    sgd = ow.SGD(0.1)
    yield Call("trace", ow.trace, (loss, PARAMS, X, Y))
    yield Call("minimize", sgd.minimize, (loss, PARAMS, X, Y))
    yield Call("append_backward", ow.append_backward, (program,))
    yield Call("create_backward_pass", sgd.create_backward_pass, (program,))
    yield Call("create_optimization_pass", sgd.create_optimization_pass, (ow.append_backward(program),))
    yield Call("append_update", ow.append_update, (ow.append_backward(program), sgd))
    yield Call("gradients", ow.gradients, (program, "tanh", "w"))
    yield Call("compile", ow.compile, (whole,))
    explaining = (ow.plan, ow.cost, ow.summary, ow.summary_by_pass, ow.memory, ow.draw, ow.graph.homes)
    for function in (*explaining, ow.check):
        yield Call(function.__name__, function, (whole,))
    for function in (
        ow.graph.liveness,
        ow.graph.producers,
        ow.graph.consumers,
        ow.graph.forward_pass,
        ow.graph.update_pass,
        ow.graph.fences,
    ):
        yield Call(function.__name__, function, (whole,))
    for function in (ow.for_test, ow.for_evaluation, ow.guard, ow.check_finite, ow.fence):
        yield Call(function.__name__, function, (whole,))
    yield Call("rewrite", ow.rewrite, (whole, jnp.tanh, lambda x: jnp.tanh(x)))
    yield Call("mixed_precision", ow.mixed_precision, (whole,))
    for function in (ow.graph.worth_fencing, ow.graph.rolls_of, ow.graph.worth_rolling):
        yield Call(function.__name__, function, (whole,))
    yield Call("ancestors", ow.graph.ancestors, (whole, "loss"))
    yield Call("descendants", ow.graph.descendants, (whole, "w"))
    yield Call("prune", ow.prune, (whole, "tanh"))
    yield Call("error_clip", ow.error_clip, (program, "tanh", 0.1))
    yield Call("watch", ow.watch, (whole, "grad(w)"))
    yield Call("accumulate", ow.accumulate, (whole, 2))
    yield Call("replicate", ow.replicate, (whole, 2))
    yield Call("split", ow.split, (whole, 2))
    yield Call("diff", ow.diff, (program, whole))
    yield Call("inspect", ow.inspect, (lambda p, x: {k: v - 0.1 for k, v in p.items()}, PARAMS, X))
    yield Call("body_of", partial(ow.graph.body_of, lambda x: [x + 1]), (X,))
    yield Call("step", step(), (step().init(PARAMS), X, Y))
    yield Call("init", step().init, (PARAMS,))
    yield Call("fetch", step().init(PARAMS).__getitem__, ("w",))
    yield Call("batches", ow.batches, ((X, Y), 2))
    yield Call("Model", ow.Model, (loss, PARAMS, X, Y))
    for kind in (ow.Momentum, ow.Adam, ow.AdamW, ow.Adagrad, ow.LAMB, ow.Muon):
        yield Call(f"optimizer {kind.__name__}", kind)
    for kind in (ow.SAM, ow.rule.Lookahead):
        yield Call(f"rule {kind.__name__}", kind)
    for kind in (ow.ClipByValue, ow.ClipByNorm, ow.ClipByGlobalNorm, ow.WeightDecay, ow.L1, ow.L2, ow.EMA):
        yield Call(f"rule {kind.__name__}", kind, (0.1,))
    for name in ("cosine", "exponential", "piecewise", "polynomial", "warmup", "constant", "one_cycle"):
        if (found := getattr(ow.schedule, name, None)) is not None:
            yield Call(f"schedule.{name}", found, (0.1,))
    for name in ("fc", "dropout", "embedding", "conv", "pool", "batch_norm", "layer_norm", "cross_entropy"):
        yield Call(f"layer.{name}", in_a_trace(getattr(ow.layer, name)), (X, 2))


def in_a_trace(layer: Callable[..., Any]) -> Callable[..., Any]:
    """A layer as it is called in a network."""

    def call(*args: Any, **options: Any) -> Any:
        return ow.trace(lambda p: jnp.sum(layer(jnp.asarray(X) * p, *args[1:], **options)), jnp.float32(1))

    call.__signature__ = inspect.signature(layer)  # type: ignore[attr-defined]
    return call


def is_raw(error: BaseException) -> bool:
    """Whether an error is none of Onward's own, and no complaint of Python about the call itself."""
    if isinstance(error, ow.OnwardError):
        return False
    last = traceback.extract_tb(error.__traceback__)[-1]
    return last.filename != __file__


def wrong_calls(count: int, seed: int = 0) -> Iterator[tuple[str, BaseException | None]]:
    """So many wrong calls and what each raised, if it was raw."""
    choices = [(call, place, wrong) for call in calls() for place in call.places for wrong in WRONG]
    random.Random(seed).shuffle(choices)
    for call, place, wrong in choices[:count]:
        raw = None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                call.spoiled(place, WRONG[wrong]())()
            except Exception as error:
                raw = error if is_raw(error) else None
        yield f"{call.name}({place}={wrong})", raw


def main() -> None:
    count, seed = [*map(int, sys.argv[1:]), *(2000, 0)[len(sys.argv) - 1 :]]
    made = 0
    found: list[str] = []
    for what, error in wrong_calls(count, seed):
        made += 1
        if error is not None:
            place = traceback.extract_tb(error.__traceback__)[-1]
            found.append(what)
            line = f"{place.filename[-40:]}:{place.lineno}"
            print(f"{what}: {type(error).__name__}: {str(error)[:100]!r} {line}")
    print(f"{made} wrong calls, {len(found)} raw errors")


if __name__ == "__main__":
    main()
