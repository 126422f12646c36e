"""Compiling is most of the time of the tests: many cases in one computation, and each computation once."""

from contextlib import contextmanager

import jax
import numpy as np
import pytest
from jax import lax
from jax.experimental.compilation_cache import compilation_cache

from onward.execute.step import Step

HASTE = "JAX_DISABLE_MOST_OPTIMIZATIONS"
OPTIMIZED = {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}
"""For ``jax.jit(..., compiler_options=OPTIMIZED)``: as users compile, though the tests say otherwise."""


@contextmanager
def optimized():
    """What is compiled in the block, and in the processes it starts, is compiled as users compile it."""
    before = jax.config.read(HASTE.lower())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(HASTE, "0")
        jax.config.update(HASTE.lower(), False)
        try:
            yield
        finally:
            jax.config.update(HASTE.lower(), before)


@contextmanager
def named(name, faults):
    """What goes wrong is kept with the name of its case, so that the others go on."""
    try:
        yield
    except Exception as error:
        faults[name] = f"{type(error).__name__}: {error}"


def expect_no(faults):
    assert not faults, "\n".join(f"{name}: {fault}" for name, fault in faults.items())


def at_once(cases, faults, options=None):
    """What each of ``{name: (function, *arguments)}`` gives, in one computation, with barriers between.

    A computation for each of them takes four times as long to compile.
    """

    def every(given):
        found = {}
        for name, arguments in given.items():
            with named(name, faults):
                found[name] = cases[name][0](*lax.optimization_barrier(arguments))
        return found

    given = {name: tuple(arguments) for name, (_, *arguments) in cases.items()}
    return jax.jit(every, compiler_options=options)(given)


def together(cases, options=None):
    """The same as NumPy's arrays, for cases none of which goes wrong."""

    def whole(given):
        return [function(*arguments) for (function, *_), arguments in zip(cases.values(), given, strict=True)]

    results = jax.jit(whole, compiler_options=options)([arguments for _, *arguments in cases.values()])
    return dict(zip(cases, jax.tree.map(np.asarray, results), strict=True))


@contextmanager
def counted():
    """How long each compilation in the block took, found in the compilation cache or not."""
    found = []

    def note(event, seconds, **_):
        if "backend_compile" in event:
            found.append(seconds)

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(note)


def training(program, params, *data, steps=None, fetch=(), after=()):
    """A case for ``together``: the state by name after the last step, and what is asked for at each step.

    Args:
        program: to train, as one loop.
        params: as it was traced.
        data: its data, with one more axis in front.
        steps: how many, where there is no data.
        fetch: names of Variables to see before the step's update.
        after: names of Variables of the state to see after it.
    """
    step = Step(program, fetch, donate=False, ahead=False)

    def advance(state, now):
        state, out = step(state, *now)
        return state, {**{name: out[name] for name in fetch}, **{name: state[name] for name in after}}

    def whole(state, data):
        state, seen = jax.lax.scan(advance, state, data, steps)
        return {name: state[name] for name in state}, seen

    return whole, step.init(params), data


def trained(*args, **options):
    """What ``training`` asks for, alone."""
    return together({"": training(*args, **options)})[""]


@contextmanager
def compiled_once(folder):
    """Programs that are alike are compiled once for all that is in the block.

    They are still traced, lowered and counted each time. With a limit to its size the cache has a lock, and
    no thread reads what another one has half written.
    """
    options = {
        "jax_compilation_cache_dir": str(folder),
        "jax_compilation_cache_max_size": 2**30,
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in options}
    _set(options)
    try:
        yield
    finally:
        _set(before)


def _set(options):
    for name, value in options.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def compilations(run):
    """How often jax compiles while this runs."""
    events = []

    def listen(event, *_, **__):
        events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        run()
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    return sum(event.endswith("backend_compile_duration") for event in events)
