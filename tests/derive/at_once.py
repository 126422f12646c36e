"""Many cases in one XLA computation: compiled at once, and what goes wrong keeps the name of its case."""

from contextlib import contextmanager

import jax
from jax import lax

FAST = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
"""For what runs for a moment only: compiled in half the time. Not for pooling, see ``tests/quickly.py``."""


@contextmanager
def named(name, faults):
    """What goes wrong is kept with the name of its case, so that the others go on."""
    try:
        yield
    except Exception as error:
        faults[name] = f"{type(error).__name__}: {error}"


def at_once(cases, faults, options=FAST):
    """What each of ``{name: (function, *arguments)}`` gives, in one computation, with barriers between."""

    def every(given):
        found = {}
        for name, arguments in given.items():
            with named(name, faults):
                found[name] = cases[name][0](*lax.optimization_barrier(arguments))
        return found

    given = {name: tuple(arguments) for name, (_, *arguments) in cases.items()}
    return jax.jit(every, compiler_options=options)(given)


def expect_no(faults):
    assert not faults, "\n".join(f"{name}: {fault}" for name, fault in faults.items())
