"""Schedules: hyperparameters as pure functions of the step; the first update uses ``schedule(0)``.

    compose    constant  piecewise  join  warmup
    decay      linear  polynomial  cosine  wsd
    fading     exponential  natural_exp  inverse_time  noam
    cycles     restarts  one_cycle  cyclic
    plateau    plateau, which looks at a metric and not at the step: a callback, not a Schedule

One vocabulary. Values: ``begin`` is the value at step 0, ``peak`` the one after the warm-up, ``end`` the one
that stays. Counts of steps: ``steps`` is the whole way to ``end``, ``warmup`` the first part of it, ``decay``
the last; ``every`` is the distance between things that repeat. ``rate`` is how fast it fades, ``power`` an
exponent, ``shape`` the form of a curve.

Any hyperparameter of any optimizer can follow one, or any other function of the step that JAX can trace.
What is made here is frozen, compares by value, computes on whole arrays of steps, and can be scaled:

>>> import numpy as np
>>> import onward as ow
>>> rate = ow.schedule.cosine(1e-3, steps=1000, warmup=100)
>>> rate, rate == ow.schedule.cosine(1e-3, steps=1000, warmup=100)
(cosine(0.001, steps=1000, warmup=100), True)
>>> rate(np.array([0, 50, 100, 1000, 5000])).tolist()
[0.0, 0.0005000000237487257, 0.0010000000474974513, 0.0, 0.0]
>>> float((2 * rate)(100))
0.0020000000949949026
"""

from onward.core.first_use import from_stub

# The names are listed in __init__.pyi.
__getattr__, __dir__, __all__ = from_stub(__name__, "ow.schedule")
