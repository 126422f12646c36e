"""What the threads of a process share, used by several at once while Python changes threads all the time."""

import sys
from collections import OrderedDict
from threading import Barrier, Thread
from time import sleep

import jax.numpy as jnp
import numpy as np
import pytest

import onward as ow
from onward.core.jaxprs.signature import interned
from onward.core.traces import Traces
from onward.derive.differentiate import _RuleCache
from onward.serve.endpoint.metrics import Counters

THREADS = 4


@pytest.fixture(autouse=True)
def threads_change_often():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-7)
    yield
    sys.setswitchinterval(before)


def at_once(action):
    """The results of threads that do this at the same time."""
    barrier, results = Barrier(THREADS), []

    def run():
        barrier.wait()
        results.append(action())

    threads = [Thread(target=run) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_equal_ops_have_one_signature():
    keys = [("of this test", i) for i in range(1000)]
    found = at_once(lambda: [interned(key) for key in keys])
    assert len(found) == THREADS
    assert all(len(set(map(id, signatures))) == 1 for signatures in zip(*found, strict=True))


def test_what_answers_a_request_is_made_once():
    model = ow.Model(lambda: ow.layer.fc(ow.data("x", (None, 2)), 1))
    made = []

    def slowly():
        sleep(0.02)
        made.append(object())
        return made[-1]

    found = at_once(lambda: model.once("request", slowly))
    assert len(made) == 1
    assert found == made * THREADS


class Guarded(OrderedDict):
    """A memory that changes under this lock alone."""

    def __init__(self, lock):
        self.lock = lock

    def __setitem__(self, key, value):
        assert self.lock.locked()
        super().__setitem__(key, value)

    def move_to_end(self, key):
        assert self.lock.locked()
        super().move_to_end(key)

    def popitem(self, last):
        assert self.lock.locked()
        return super().popitem(last)


def test_what_threads_remember_together_changes_under_a_lock():
    traces, rules = Traces(1), _RuleCache(1)
    traces._known, rules.rules = Guarded(traces._lock), Guarded(rules.lock)
    for key in ("first", "second"):
        traces.keep((key,), key)
        rules.put(key, key)
    assert [traces.found((key,), lambda: "new") for key in ("second", "first")] == ["second", "new"]
    assert [rules.get(key) for key in ("second", "first")] == ["second", None]


def test_a_shape_that_threads_ask_for_at_the_same_time_is_made_once():
    step = ow.compile(ow.SGD(0.1).minimize(lambda w, x: jnp.sum(w * x), np.ones(2), np.ones((2, 2))))
    state, executables, made = step.init(np.ones(2)), step._executables, []
    make = executables.make

    def slowly(*args, **options):
        sleep(0.02)
        made.append(make(*args, **options))
        return made[-1]

    executables.make = slowly
    found = at_once(lambda: executables.find(state, (np.ones((4, 2), "f4"),), {})[0])
    assert found == made * THREADS


def test_every_request_is_counted():
    counts, turns = Counters(), 2000

    def count():
        for _ in range(turns):
            counts.add("onward_requests_total")
            counts.observe("onward_batch_rows", 1.0)

    at_once(count)
    assert counts.total("onward_requests_total") == THREADS * turns
    assert f"onward_batch_rows_count {THREADS * turns}\n" in counts.text()
