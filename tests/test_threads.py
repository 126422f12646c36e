"""What the threads of a process share, used by several at once while Python changes threads all the time."""

import sys
from threading import Barrier, Thread
from time import sleep

import pytest

import onward as ow
from onward.core.jaxprs.signature import interned
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


def test_every_request_is_counted():
    counts, turns = Counters(), 2000

    def count():
        for _ in range(turns):
            counts.add("onward_requests_total")
            counts.observe("onward_batch_rows", 1.0)

    at_once(count)
    assert counts.total("onward_requests_total") == THREADS * turns
    assert f"onward_batch_rows_count {THREADS * turns}\n" in counts.text()
