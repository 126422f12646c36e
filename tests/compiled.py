"""XLA's own cache of compiled programs, for files whose tests compile the same again and again."""

from contextlib import contextmanager

import jax
from jax.experimental.compilation_cache import compilation_cache


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
