"""What runs for a moment only is compiled in half the time, and together in a quarter of that."""

from contextlib import contextmanager

import jax
import numpy as np

from onward.execute.step import Step

FAST = {"xla_backend_optimization_level": 0}
"""For ``jax.jit(..., compiler_options=FAST)``."""


@contextmanager
def compiled_fast():
    """The same for every computation, those of ``ow.compile`` too."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before)


def together(cases, options=FAST):
    """What each function makes of its arguments, of ``{name: (function, *arguments)}``; one compiled program.

    A program for each of them takes four times as long to compile.
    """

    def whole(given):
        return [function(*arguments) for (function, *_), arguments in zip(cases.values(), given, strict=True)]

    compiled = jax.jit(whole, compiler_options=options)
    results = compiled([arguments for _, *arguments in cases.values()])
    return dict(zip(cases, jax.tree.map(np.asarray, results), strict=True))


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
