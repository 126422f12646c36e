"""Trainings on trainers and servers in threads of this process, and the same on one device."""

import threading
from contextlib import contextmanager
from functools import cache

import jax
import numpy as np
from tests.fleet.hosting import Threads

import onward as ow
from onward.core.jaxprs.equations import Type
from onward.distribute.split.cut import Split
from onward.fleet import compute, holding
from onward.fleet.blueprint import Blueprint

WAIT = 120.0


@contextmanager
def running(program, reader, **options):
    """A training that is over, and has left nothing, at the end of the block."""
    engine = Threads()
    run = ow.cluster.start(program, reader, engine=engine, **options)
    try:
        yield run
    finally:
        run.stop()
        assert not any(host.alive for host in engine.hosts)


def trained(program, reader, **options):
    """A training that has ended."""
    with running(program, reader, **options) as run:
        return run.wait(WAIT)


def remembering():
    """Pure functions that make graphs and executables, each with a memory: owner, name, replacement."""
    made = [
        (Blueprint, "program"),
        (Blueprint, "split"),
        (Split, "at"),
        (Split, "over"),
        (Split, "server_part"),
        (holding, "_CompiledUpdate"),
        (compute, "compile"),
        (compute, "lower"),
        (compute, "compiled_alone"),
    ]
    finished = {"over": _with_parts, "compiled_alone": _one_by_one}
    return [(owner, name, _remembered(getattr(owner, name), finished.get(name))) for owner, name in made]


def _with_parts(split):
    """With the Programs that several hosts would else make at the same moment, each for itself."""
    for name in ("trainer_part", "server_parts", "shared"):
        getattr(split, name)
    return split


def _one_by_one(function):
    """Of threads that call it at the same moment the first one compiles it for all."""
    lock = threading.Lock()

    def call(*arguments):
        with lock:
            return function(*arguments)

    return call


def _remembered(function, finish=None):
    """Called once for arguments that are the same objects, which it keeps alive."""
    found, lock = {}, threading.RLock()

    def once(*arguments):
        key = tuple(map(_key, arguments))
        with lock:
            if key not in found:
                made = function(*arguments)
                found[key] = made if finish is None else finish(made), arguments
            return found[key][0]

    return once


def _key(argument):
    if isinstance(argument, Blueprint):
        b = argument
        return (*map(id, (b.recipe.origin, *b.recipe.steps, b.outer)), str(b.data), *_shape(b))
    if isinstance(argument, Type):
        return argument.shape, str(argument.dtype)
    if isinstance(argument, list | tuple):
        return tuple(map(_key, argument))
    if isinstance(argument, dict):
        return tuple(argument.items())
    return argument if isinstance(argument, int) else id(argument)


def _shape(b):
    return b.servers, b.count, b.lazy, b.rows, b.x64


compiled = cache(ow.compile)


def alone(program, batches, parameters=None, state=None, seed=0):
    """The State of a training on one device, and its losses."""
    step = compiled(program)
    values = step.init(seed=seed) if parameters is None else step.init(parameters, state, seed=seed)
    losses = []
    for batch in batches:
        values, out = step(values, **batch) if isinstance(batch, dict) else step(values, *batch)
        losses.append(float(out.loss))
    return values, losses


def together(batches, trainers):
    """For each round the batches of all trainers as one."""
    groups = [batches[i : i + trainers] for i in range(0, len(batches), trainers)]
    return [jax.tree.map(lambda *parts: np.concatenate(parts), *group) for group in groups]


def arrays(values, names):
    return {name: np.asarray(values[name]) for name in names}


def close(found, expected, names, rtol, atol=0.0):
    for name in names:
        np.testing.assert_allclose(found[name], expected[name], rtol, atol, err_msg=name)


def equal(found, expected, names):
    for name in names:
        np.testing.assert_array_equal(found[name], expected[name], err_msg=name)
