"""XLA without most of its optimizations, for files in which compiling is most of the time."""

import jax
import pytest


@pytest.fixture(scope="module")
def optimizations_off():
    """All that the tests of a module compile is compiled sooner, and runs slower.

    Not for a module that compares numbers of a network with pooling (``reduce_window`` and, in its gradient,
    ``select_and_scatter``): without its optimizations XLA of JAX 0.10.2 once computed -0.238 as the gradient
    of relu and max pooling where finite differences say -0.415.

    A module takes it by ``optimizations_off = quickly.optimizations_off`` and a ``pytestmark`` that uses it.
    """
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
