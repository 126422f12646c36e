"""Trainers and parameter servers in one process: NumPy arrays carried from one to the other by hand."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

import onward as ow
from onward.core.lower import lower
from onward.distribute.split.in_words import in_words
from onward.distribute.split.rows import rows_read
from onward.distribute.split.trainer import TRAINER, plain
from onward.execute.initialize import initialized
from onward.execute.spread import By, Spread

RUNS = {}


@cache
def told(program):
    return in_words(program)


def run(program, state, fed):
    """The outputs of a Program, and its next state by name; equal Programs are compiled once."""
    following = [program.next_state.get(v, v) for v in program.state]
    wanted = [*program.outputs, *following]
    key = (told(program), program.replicas, bool(jax.config.read("jax_enable_x64")))
    given = [state[v.name] for v in program.state], [fed[v.name] for v in program.inputs]
    if key not in RUNS:
        made = lower(program, wanted)
        if program.replicas is not None:
            made = Spread(program, (), wanted, By.SHARD_MAP).over_devices(made)
        RUNS[key] = jax.jit(made)
    values = RUNS[key](*given)
    count = len(program.outputs)
    outputs = {v: np.asarray(x) for v, x in zip(program.outputs, values, strict=False)}
    return outputs, {v.name: x for v, x in zip(program.state, values[count:], strict=True)}


def shaped(program, state, fed):
    """As ``run``, with zeros of the types that the Program makes: for who looks at sizes alone."""
    following = [program.next_state.get(v, v) for v in program.state]
    given = [state[v.name] for v in program.state], [fed[v.name] for v in program.inputs]
    types = jax.eval_shape(lower(program, [*program.outputs, *following]), *given)
    values, count = [zeros(t) for t in types], len(program.outputs)
    outputs = dict(zip(program.outputs, values, strict=False))
    return outputs, {v.name: x for v, x in zip(program.state, values[count:], strict=True)}


def zeros(of):
    if jnp.issubdtype(of.dtype, jax.dtypes.prng_key):
        return jnp.broadcast_to(jax.random.key(0), of.shape)
    return np.zeros(of.shape, of.dtype)


def named(variables, values):
    return {v.name: x for v, x in zip(variables, values, strict=True)}


def size(arrays):
    return sum(x.nbytes for x in arrays)


class ByHand:
    """All state, one step after the other; what the Programs make is computed, or only ``shaped``.

    After each step, by trainer and server: ``up`` and ``down`` are the bytes of the arrays that went from
    and to the trainer, ``asked`` those of the row numbers that it asked for, ``touched`` how many rows of
    each table.
    """

    def __init__(self, cut, params=None, seed=0, run=run):
        self.cut, self.parts, self.run = cut, cut.server_parts, run
        self.first = first_values(cut.source, params, seed)
        self.states = [self._server(part, own) for part, own in zip(self.parts, cut.shards, strict=True)]

    def _server(self, part, own):
        given = {str(s): s.of(self.first[s.parameter.name]) for s in own}
        given |= {v.name: self.first[v.name] for v in self.cut.carried}
        given = {v: given[v.name] for v in part.program.state if v.name in given}
        return {v.name: x for v, x in initialized(part.program, given, 0).items()}

    def step(self, batches, shares=None):
        """Update once; for each trainer its own outputs, None where it has no batch."""
        count, servers = len(batches), len(self.parts)
        shares = np.full(count, 1 / count) if shares is None else np.asarray(shares)
        self.up, self.down, self.asked, self.touched = ([[None] * servers for _ in batches] for _ in range(4))
        shared = self.shared()
        found = [None if b is None else self.trained(t, b, shared) for t, b in enumerate(batches)]
        fed = [self.fed(i, found, shares, shared) for i in range(servers)]
        self.states = self.updated(fed)
        return [None if f is None else f[0] for f in found]

    def shared(self):
        """What the first server tells the others."""
        program = self.cut.shared
        if program is None:
            return {}
        return named(program.outputs, self.run(program, self.states[0], {})[0].values())

    def given(self, i):
        """What a server gives to all trainers."""
        return [
            np.asarray(plain(x) if v.is_key else x)
            for v in self.parts[i].given
            for x in [self.states[i][v.name]]
        ]

    def trained(self, t, batch, shared):
        """A trainer's own outputs, what it sends whole to each server, and the rows with their gradients."""
        part, fed = self.cut.trainer_part, {**batch, TRAINER.name: np.uint32(t)}
        for i, variables in enumerate(part.received):
            given = self.given(i)
            fed |= named(variables, given)
            self.down[t][i] = size(given) + (size(shared.values()) if i == 0 else 0)
            self.asked[t][i] = 0
        numbers = []
        for table, found in zip(self.cut.tables, self.looked_up(batch), strict=True):
            fed |= {f"rows({table.parameter.name})": self.rows(t, table, found.rows)}
            fed |= named(table.positions, found.positions)
            numbers.append(found)
        made, _ = self.run(part.program, self.first, fed)
        gradients = {
            table.parameter.name: (found, made[g])
            for table, found, g in zip(self.cut.tables, numbers, part.row_gradients, strict=True)
        }
        own = [made[v] for v in part.program.outputs[: len(self.cut.base.outputs)]]
        return own, [[made[v] for v in variables] for variables in part.sent], gradients

    def looked_up(self, batch):
        """For each table the rows that are read."""
        if self.cut.places is None:
            return
        by, _ = run(self.cut.places, {}, batch)
        for table in self.cut.tables:
            yield rows_read([by[v] for v in table.places])

    def rows(self, t, table, wanted):
        """These rows of a table, from all servers that own some; the rest is zeros."""
        rows = np.zeros(table.rows.shape, table.rows.dtype)
        for i, own in enumerate(self.cut.shards):
            for s in own:
                if s.parameter.name == table.parameter.name:
                    here = (wanted >= s.begin) & (wanted < s.end)
                    numbers = (wanted[here] - s.begin).astype(np.int32)
                    found = np.asarray(self.states[i][str(s)])[numbers]
                    rows[: len(wanted)][here] = found
                    self.down[t][i] += size([numbers, found])
                    self.asked[t][i] += size([numbers])
        return rows

    def updated(self, fed):
        """The next state of all servers; the first is told what the others add to sums, and tells these."""
        first, *others = self.parts
        told = iter(first.told)
        for i, part in enumerate(others, 1):
            if part.measuring is not None:
                found, _ = self.run(part.measuring, self.states[i], fed[i])
                fed[0] |= named(next(told), found.values())
        states = [self.run(first.program, self.states[0], fed[0])[1]]
        whole = {v.name: np.asarray(states[0][v.name]) for v in first.whole}
        pairs = enumerate(others, 1)
        return states + [self.run(p.program, self.states[i], fed[i] | whole)[1] for i, p in pairs]

    def fed(self, i, found, shares, shared):
        """What one server is sent."""
        part, fed = self.parts[i], dict(shared)
        if part.shares is not None:
            fed[part.shares.name] = shares.astype(part.shares.dtype)
        for t, trainer in enumerate(found):
            _, sent, rows = trainer or (None, None, None)
            whole = sent[i] if trainer else [np.zeros(v.shape, v.dtype) for v in part.received[t]]
            fed |= named(part.received[t], whole)
            self.up[t][i], self.touched[t][i] = size(whole) + (size(shared.values()) if i else 0), {}
            shards = {str(s): s for s in self.cut.shards[i]}
            for v, pair in zip(part.tables, part.rows[t], strict=True):
                fed |= named(pair, self.pushed(i, t, shards[v.name], pair, rows))
        return fed

    def pushed(self, i, t, shard, pair, rows):
        """Row numbers from a shard's first row on, and gradients; filled up with rows that are dropped."""
        at, gradient = pair
        numbers = np.full(at.shape, shard.end - shard.begin, np.int32)
        values = np.zeros(gradient.shape, gradient.dtype)
        if rows:
            found, all_values = rows[shard.parameter.name]
            wanted = found.rows
            here = np.flatnonzero((wanted >= shard.begin) & (wanted < shard.end) & found.moved)
            sent = [(wanted[here] - shard.begin).astype(np.int32), all_values[here]]
            numbers[: len(here)], values[: len(here)] = sent
            self.up[t][i] += size(sent)
            self.touched[t][i][shard.parameter.name] = len(here)
        return numbers, values

    def whole(self, name, suffix=""):
        """A parameter, or with a suffix such as ``/mean`` one of its slots, put together from all servers."""
        found = [
            np.asarray(state[f"{s}{suffix}"])
            for state, own in zip(self.states, self.cut.shards, strict=True)
            for s in own
            if s.parameter.name == name
        ]
        return np.concatenate(found) if len(found) > 1 else found[0]

    def parameters(self):
        """All that is trained, by name."""
        return {p.name: self.whole(p.name) for p, _ in self.cut.source.gradients}


def first_values(program, params, seed):
    """The state of the uncut Program by name."""
    given = {}
    if params is not None:
        structure = program.signature.parameters
        arrays = map(np.array, structure.flatten(params, "params"))
        given = dict(zip(structure.variables, arrays, strict=True))
    return {v.name: x for v, x in initialized(program, given, seed).items()}


class Alone:
    """The uncut Program on one device."""

    def __init__(self, program, params=None, seed=0):
        self.run = ow.compile(program)
        self.state = self.run.init(seed=seed) if params is None else self.run.init(params, seed=seed)

    def step(self, *batch):
        self.state, out = self.run(self.state, *batch)
        return out

    def __getitem__(self, name):
        return self.state[name]


def parts_of(batch, trainers):
    """A batch cut into equal parts, one for each trainer."""
    return zip(*(np.split(np.asarray(x), trainers) for x in batch), strict=True)


def wide(x):
    x = np.asarray(x)
    return x.astype(np.complex128 if np.iscomplexobj(x) else np.float64)


def compared(cut, program, params, batches, trainers, rtol, atol=0.0):
    """Train with the cut and with the Program of the whole batch; both, if all their parameters agree."""
    alone, hand = Alone(program, params), ByHand(cut, params)
    names = [v.name for v in cut.source.inputs]
    for batch in batches:
        expected = alone.step(*batch)
        found = hand.step([dict(zip(names, part, strict=True)) for part in parts_of(batch, trainers)])
        losses = [f[0] for f in found]
        np.testing.assert_allclose(np.mean(wide(losses)), wide(expected.loss), rtol, atol)
    for name, value in hand.parameters().items():
        np.testing.assert_allclose(wide(value), wide(alone[name]), rtol, atol, err_msg=name)
    return hand, alone
