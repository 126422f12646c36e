"""By what a training is known again: its network, its optimizer, its schedules, its reader.

A checkpoint holds these fingerprints; where one is restored they are compared, and there is a sentence for
each that differs. They are words and numbers of ours, equal in every process and under every hash seed.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from hashlib import sha256
from itertools import chain
from typing import Any
from zlib import compress, decompress

import jax
import numpy as np

from onward.core.errors import GraphError
from onward.core.jaxprs.body import Body
from onward.core.jaxprs.reading import program_of
from onward.core.marks import SCHEDULE
from onward.core.outline import anonymous, difference, outline
from onward.core.program import Program
from onward.core.walk import name_of
from onward.derive.optimizer import Optimizer
from onward.derive.rule import Rule
from onward.derive.schedules.base import Schedule
from onward.derive.update.groups import Group, Routing

FINGERPRINTS = "fingerprints"  # under which a checkpoint holds them
_LARGEST = 2**20  # bytes of an outline that a checkpoint holds
_OF_READERS = ("batch_size", "shuffle", "seed", "drop_last", "examples", "parts")

Words = Mapping[str, str]


def of_program(program: Program) -> dict[str, Any]:
    """The fingerprint of a forward pass: a digest, and an outline for the sentence that says what differs."""
    told = outline(program)
    packed = b64encode(compress(_json(told))).decode()
    lengths = (v.shape[0] for v in program.inputs if v.shape)
    return {
        "batch": next(lengths, 1),
        "digest": _digest(anonymous(told)),
        "outline": packed if len(packed) <= _LARGEST else None,
    }


def of_training(program: Program) -> dict[str, Any]:
    """The fingerprints of the optimizer and the schedules of a training Program, as far as they are known."""
    steps = () if program.recipe is None else program.recipe.steps
    found = [x for s in steps for x in chain(s.arguments, s.options.values()) if isinstance(x, Optimizer)]
    several = len(found) > 1
    told = [pair for i, x in enumerate(found) for pair in _described(str(i) * several, x)]
    return {
        "jax": jax.__version__,
        "optimizer": {name: word for name, word, follows in told if not follows},
        "schedule": {name: word for name, word, follows in told if follows},
        "computed": {op.outputs[0].name: _computed(op.body) for op in program.ops if op.type is SCHEDULE},
        "transformed": {title: _computed(run) for title, run in _transforming(program, found)},
    }


def of_reader(reader: Any) -> dict[str, str]:
    """The fingerprint of a reader: its kind, its numbers of batches and examples, batch size, order."""
    told = {"kind": getattr(reader, "__qualname__", type(reader).__qualname__)}
    told |= {name: x for name in _OF_READERS if _is_word(x := getattr(reader, name, None))}
    told |= {"batches": _length(reader), "data": _length(getattr(reader, "dataset", None))}
    if (sampler := getattr(reader, "sampler", None)) is not None:
        told["sampler"] = type(sampler).__qualname__
    return {name: str(x) for name, x in told.items() if x is not None}


def differences(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """A sentence for each fingerprint of two trainings that differs; what one lacks is not compared."""
    found: list[str] = []
    if was.get("program") and now.get("program"):
        told = _of_programs(was["program"], now["program"])
        elsewhere = _ELSEWHERE.format(was=was["jax"], now=now["jax"]) if was["jax"] != now["jax"] else ""
        found += [sentence + elsewhere for sentence in told]
    for name in ("optimizer", "schedule", "reader"):
        if was.get(name) and now.get(name):
            found += _of_words(name, was[name], now[name])
    for known, digests, sentence in (
        ("schedule", "computed", _OTHERWISE),
        ("optimizer", "transformed", _TRANSFORMED),
    ):
        if was.get(known) == now.get(known) and was.get("jax") == now.get("jax"):
            pairs = ((n, x, now.get(digests, {}).get(n)) for n, x in was.get(digests, {}).items())
            found += [sentence.format(name=n) for n, x, y in pairs if None not in (x, y) and x != y]
    return found


def _transforming(program: Program, optimizers: Sequence[Optimizer]) -> Iterator[tuple[str, Body]]:
    """The optimizers that are traced functions, in which all numbers are fixed, and these functions."""
    routes = (r for x in optimizers for r in Routing.of(x, program.parameters, program))
    for optimizer in (route.optimizer for route in routes):
        if optimizer.apart is not None:
            yield optimizer.title, optimizer.apart.run


def _of_programs(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    if was["digest"] == now["digest"]:
        return []
    here, there = "another forward pass", "that of the checkpoint"
    if was["outline"] and now["outline"]:
        found = difference(_unpacked(was["outline"]), _unpacked(now["outline"]), now["batch"] / was["batch"])
        if found is None:
            return []
        there, here = found
    return [f"The network computes otherwise: it was {there}, it is {here}."]


def _of_words(what: str, was: Words, now: Words) -> list[str]:
    pairs = ((n, was.get(n, "not given"), now.get(n, "not given")) for n in dict.fromkeys([*was, *now]))
    found = [f"{n} was {x}, is {y}" if n else f"it was {x}, it is {y}" for n, x, y in pairs if x != y]
    return [f"The {what} is another: {'; '.join(found)}."] if found else []


def _described(name: str, value: Any) -> Iterator[tuple[str, str, bool]]:
    """The names and words of what is fixed in a rule, and whether it is a schedule; numbers are state."""
    if isinstance(value, Rule) or (is_dataclass(value) and not isinstance(value, type)):
        yield name, value.title if isinstance(value, Rule) else type(value).__name__, False
        numbers = value.hyperparameters if isinstance(value, Rule) else {}
        for f in fields(value):
            x = getattr(value, f.name)
            if f.name in numbers and callable(x):
                yield _joined(name, f.name), _function(x), True
            elif f.name not in numbers and not _is_default(f, x):
                yield from _described(_joined(name, f.name), x)
    elif isinstance(value, Group):
        yield name, f"Group({', '.join(map(_word, value.where))}{', frozen' * value.frozen})", False
        yield from _described(_joined(name, "optimizer"), value.optimizer)
        for key, x in value.changes.items():
            if callable(x):
                yield _joined(name, key), _function(x), True
            elif isinstance(x, bool) or not isinstance(x, int | float):
                yield from _described(_joined(name, key), x)
    elif isinstance(value, list | tuple):
        for i, x in enumerate(value):
            yield from _described(_joined(name, str(i)), x)
    elif value is not None:
        yield name, _word(value), False


def _word(value: Any) -> str:
    """A value that is told in one word, without an address in it."""
    if isinstance(value, bool | int | float | str | np.generic):
        return str(value)
    return str(name_of(value) or getattr(value, "__qualname__", type(value).__qualname__))


def _function(schedule: Any) -> str:
    return (
        repr(schedule)
        if isinstance(schedule, Schedule) and " at 0x" not in repr(schedule)
        else _word(schedule)
    )


def _is_default(f: Field[Any], value: Any) -> bool:
    made = f.default if f.default_factory is MISSING else f.default_factory()
    return type(made) is type(value) and bool(np.all(made == value))


def _joined(*names: str) -> str:
    return "/".join(filter(None, names))


def _computed(body: Any) -> str | None:
    """The digest of what a schedule computes; None where it came from a file."""
    try:
        return _digest(anonymous(outline(program_of(body.closed, "schedule"))))
    except GraphError:
        return None


def _is_word(value: Any) -> bool:
    return isinstance(value, bool | int | float | str | np.generic)


def _length(value: Any) -> int | None:
    try:
        return len(value)
    except (TypeError, NotImplementedError):
        return None


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _digest(value: Any) -> str:
    return sha256(_json(value)).hexdigest()[:16]


def _unpacked(packed: str) -> Any:
    return json.loads(decompress(b64decode(packed)))


_OTHERWISE = "The schedule of {name} computes otherwise than the function of the same name did."
_TRANSFORMED = (
    "{name} computes otherwise: a learning rate or another number in it is another, or its library is. What "
    "optax.inject_hyperparams makes of a number is state, and comes from the checkpoint."
)
_ELSEWHERE = (
    " It was saved under JAX {was}, this is JAX {now}, which may trace one function in two ways: if the code "
    "is the same, so is the network."
)
