"""Ways to break a training on trainers and servers, and a training that counts what that did.

The gradient of batch ``n`` is 1 in place ``n`` and 0 elsewhere, on every server. Servers add gradients and
subtract them once, so the parameters end as minus how often each batch was applied: -1 everywhere, 0 where
one was lost, -2 where one was doubled.
"""

import errno
import os
import random
import signal
import time
from collections import Counter
from functools import cache
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from tests.fleet import hosting

import onward as ow
from onward.fleet.faults import Faults
from onward.fleet.link import Unreachable

MESSAGES = ("drop", "drop reply", "duplicate", "delay", "reorder")


class Breaking(Faults):
    """Kills processes and breaks messages; what was done stands in a folder, which outlives the processes.

    Args:
        folder: where it counts.
        kills: (who, edge, n): who dies when it reaches the edge for the n-th time, over all its lives.
        stops: the same, of who is stopped and not killed.
        rates: how likely each of MESSAGES is for a call of a trainer.
        seed: of the messages.
        how: what "kill" is to mean: "stop" stops the process, "full" fills the disk instead.
    """

    def __init__(self, folder, kills=(), rates=None, seed=0, how="kill", stops=()):
        self.folder, self.seed = str(folder), seed
        self.ends = dict.fromkeys(kills, how) | dict.fromkeys(stops, "stop")
        self.rates = rates or {}
        Path(folder).mkdir(parents=True, exist_ok=True)

    def reach(self, who, edge):
        if hosting.here() is not None and not hosting.here().alive:
            hosting.stand_still()
        count = self.count(f"{who} {edge}")
        if (how := self.ends.get((who, edge, count))) is not None:
            self.note(edge)
            die(how)

    def link(self, who, link):
        if not self.rates:
            return link
        return Broken(self, f"{self.seed} {who} {self.count(who)}", link)

    def count(self, name):
        """Count one more."""
        return self._append(name, b".")

    def note(self, what):
        """Remember that something was broken."""
        self._append("injected", what.encode() + b"\n")

    @property
    def injected(self):
        """What was broken, and how often."""
        path = Path(self.folder, "injected")
        return Counter(path.read_text().splitlines() if path.exists() else ())

    def _append(self, name, text):
        descriptor = os.open(Path(self.folder, name), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            os.write(descriptor, text)
            return os.fstat(descriptor).st_size
        finally:
            os.close(descriptor)


def die(how):
    """End, or stop, this process, or the host whose thread this is."""
    host = hosting.here()
    if how == "full":
        raise OSError(errno.ENOSPC, "No space left on device")
    if host is None:
        os.kill(os.getpid(), signal.SIGSTOP if how == "stop" else signal.SIGKILL)
        time.sleep(60)
    if how == "stop":
        host.stopped = True
    else:
        host.engine.lose(host)
    hosting.stand_still()


class Broken:
    """A link whose messages are lost, doubled, late, or delivered again."""

    def __init__(self, faults, seed, link):
        self.faults, self.link, self.random, self.old = faults, link, random.Random(seed), []

    def call(self, method, *arguments):
        what = self._chosen()
        if what is not None:
            self.faults.note(what)
        if what == "drop":
            return Lost()
        if what == "delay":
            time.sleep(self.random.uniform(0, 0.05))
        if what == "reorder" and self.old:
            old = self.random.choice(self.old)
            self.link.call(*old)
        if what == "duplicate":
            self.link.call(method, *arguments)
        self.old = [*self.old[-5:], (method, *arguments)]
        pending = self.link.call(method, *arguments)
        return Lost(pending) if what == "drop reply" else pending

    def _chosen(self):
        at = self.random.random()
        for what, rate in self.faults.rates.items():
            at -= rate
            if at < 0:
                return what
        return None


class Lost:
    """A call that nobody answers; with a pending one, it is carried out before that is found."""

    def __init__(self, pending=None):
        self.pending = pending

    def result(self, timeout=None):
        if self.pending is not None:
            self.pending.result(timeout)
        raise Unreachable("the message was lost")

    def done(self):
        return self.pending is None or self.pending.done()


# ---------------------------------------------------------------------------- a training that counts


def loss(p, x):
    return sum(jnp.sum(p[name] * x) for name in sorted(p))


def table_loss(p, x, at):
    return jnp.sum(p["dense"] * x) + jnp.sum(p["table"][at])


@cache
def counted(batches):
    """A program, its first parameters, and the batches as one array: batch n is a row with 1 in place n."""
    parameters = {name: np.zeros(batches, np.float32) for name in "abc"}
    rows = np.eye(batches, dtype=np.float32)[:, None]
    return ow.SGD(1.0).minimize(loss, parameters, rows[0]), parameters, list(rows)


@cache
def counted_rows(batches, shards):
    """The same with an embedding table: batch n reads row n of each of so many shards."""
    parameters = {
        "dense": np.zeros(batches, np.float32),
        "table": np.zeros((shards * batches, 64), np.float32),
    }
    ids = np.arange(batches)[:, None] + batches * np.arange(shards)[None]
    read = [(np.eye(batches, dtype=np.float32)[[n]], ids[[n]].astype(np.int32)) for n in range(batches)]
    return ow.SGD(1.0).minimize(table_loss, parameters, *read[0]), parameters, read


def applied(model, names="abc"):
    """How often each server applied each batch."""
    return np.stack([-np.asarray(model[name], np.float64) for name in names])


def tally(model, names="abc"):
    """How many gradients were lost, and how many were doubled, over all servers."""
    times = applied(model, names)
    assert (times == np.round(times)).all()
    return int(np.maximum(1 - times, 0).sum()), int(np.maximum(times - 1, 0).sum())
