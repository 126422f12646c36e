"""Trainers and parameter servers in one process: NumPy arrays carried from one to the other by hand."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

import onward as ow
from onward.core.lower import lower
from onward.distribute.split.trainer import TRAINER, is_key, plain
from onward.execute.initialize import initialized


@cache
def compiled(program):
    """From state and feeds by Variable to the outputs and the next state, as NumPy arrays."""
    following = [program.next_state.get(v, v) for v in program.state]
    run = jax.jit(lower(program, [*program.outputs, *following]))
    count = len(program.outputs)

    def call(state, fed):
        found = run([state[v] for v in program.state], [fed[v.name] for v in program.inputs])
        outputs = [np.asarray(x) for x in found[:count]]
        return outputs, dict(zip(program.state, found[count:], strict=True))

    return call


def travelling(v, value):
    """A value of state as an array that can be sent."""
    return np.asarray(plain(value) if is_key(v) else value)


class ByHand:
    """The state of all, and one step after the other.

    ``up`` and ``down`` hold the bytes of the arrays that went from and to each trainer at the last step, by
    server; ``touched`` the rows of each table that each trainer read of each server.
    """

    def __init__(self, cut, params=None, seed=0):
        self.cut = cut
        self.first = self._first(params, seed)
        self.parts = cut.server_parts
        self.states = [self._server(part, own) for part, own in zip(self.parts, cut.shards, strict=True)]
        trainer = cut.trainer
        self.kept = {v: self.first[v.name] for v in trainer.state}

    def _first(self, params, seed):
        source = self.cut.source
        if params is None:
            given = {}
        else:
            structure = source.signature.parameters
            arrays = map(jnp.array, structure.flatten(params, "params"))
            given = dict(zip(structure.variables, arrays, strict=True))
        return {v.name: x for v, x in initialized(source, given, seed).items()}

    def _server(self, part, own):
        given = {part.program[str(s)]: s.of(self.first[s.parameter.name]) for s in own}
        carried = {v.name for v in self.cut.carried}
        given |= {v: self.first[v.name] for v in part.program.state if v.name in carried and v not in given}
        return initialized(part.program, given, 0)

    # ------------------------------------------------------------ one step

    def step(self, batches, shares=None):
        """Update once from the trainers' batches, each a dict or None; the outputs of each trainer."""
        count = len(batches)
        shares = np.full(count, 1 / count) if shares is None else np.asarray(shares)
        self.up, self.down, self.touched = ([[] for _ in batches] for _ in range(3))
        pulled = self.pulled()
        found = [None if b is None else self.trained(t, b, pulled) for t, b in enumerate(batches)]
        shared = self.shared()
        self.outputs = [self.updated(i, found, shares, shared) for i in range(len(self.parts))]
        return [None if f is None else f[0] for f in found]

    def pulled(self):
        """For each server what it gives to all trainers."""
        return [
            [travelling(v, state[v]) for v in part.given]
            for part, state in zip(self.parts, self.states, strict=True)
        ]

    def shared(self):
        """What the first server tells the others."""
        program = self.cut.shared
        if program is None:
            return {}
        outputs, _ = compiled(program)(self.states[0], {})
        return {v.name: x for v, x in zip(program.outputs, outputs, strict=True)}

    def trained(self, t, batch, pulled):
        """A trainer's own outputs, what it sends to each server, and the gradients of rows."""
        part = self.cut.trainer_part
        fed = {**batch, TRAINER.name: np.uint32(t)}
        for variables, values in zip(part.received, pulled, strict=True):
            fed |= {v.name: x for v, x in zip(variables, values, strict=True)}
        looked = self.looked_up(batch)
        for table, (numbers, positions) in zip(self.cut.tables, looked, strict=True):
            fed[f"rows({table.parameter.name})"] = self.rows(table, numbers)
            fed |= {v.name: x for v, x in zip(table.positions, positions, strict=True)}
        outputs, _ = compiled(part.program)(self.kept, fed)
        made = dict(zip(part.program.outputs, outputs, strict=True))
        sent = [[made[v] for v in variables] for variables in part.sent]
        own = outputs[: len(self.cut.base.outputs)]
        gradients = [made[g] for g in part.row_gradients]
        self.count_down(t, pulled, looked)
        return own, sent, [(n, g) for (n, _), g in zip(looked, gradients, strict=True)]

    def looked_up(self, batch):
        """For each table the numbers of the rows that are read, and where each place finds its row."""
        if self.cut.places is None:
            return []
        places, _ = compiled(self.cut.places)({}, batch)
        by = dict(zip(self.cut.places.outputs, places, strict=True))
        found = []
        for table in self.cut.tables:
            mine = [by[v] for v in table.places]
            numbers = np.unique(np.concatenate([np.ravel(x) for x in mine]))
            found.append((numbers, [np.searchsorted(numbers, x).astype(np.int32) for x in mine]))
        return found

    def rows(self, table, numbers):
        """These rows of a table, from all servers that own some; the rest is zeros."""
        value = self.parameter(table.parameter.name)
        rows = np.zeros(table.rows.shape, value.dtype)
        rows[: len(numbers)] = value[numbers]
        return rows

    def updated(self, i, found, shares, shared):
        """One server's outputs; its state is the next one."""
        part = self.parts[i]
        fed = dict(shared)
        if part.shares is not None:
            fed[part.shares.name] = shares.astype(part.shares.dtype)
        for t, trainer in enumerate(found):
            whole = (
                [np.zeros(v.shape, v.dtype) for v in part.received[t]] if trainer is None else trainer[1][i]
            )
            fed |= {v.name: x for v, x in zip(part.received[t], whole, strict=True)}
            mine = self.mine(i, t, None if trainer is None else trainer[2])
            for (at, gradient), values in zip(part.rows[t], mine, strict=True):
                fed |= dict(zip((at.name, gradient.name), values, strict=True))
            self.count_up(i, t, [] if trainer is None else whole, shared)
        outputs, self.states[i] = compiled(part.program)(self.states[i], fed)
        return outputs

    def mine(self, i, t, rows):
        """For each table that a server owns a part of: row numbers from its first row on, and gradients."""
        touched, fed = {}, []
        by_name = dict(zip((x.parameter.name for x in self.cut.tables), rows or [], strict=False))
        own = {str(s): s for s in self.cut.shards[i]}
        shards = [own[v.name] for v in self.parts[i].tables]
        for shard, (at, gradient) in zip(shards, self.parts[i].rows[t], strict=True):
            numbers = np.full(at.shape, shard.end - shard.begin, np.int32)
            values = np.zeros(gradient.shape, gradient.dtype)
            if rows is not None:
                n, g = by_name[shard.parameter.name]
                here = np.flatnonzero((n >= shard.begin) & (n < shard.end))
                numbers[: len(here)], values[: len(here)] = n[here] - shard.begin, g[here]
                touched[shard.parameter.name] = len(here)
            fed.append((numbers, values))
        self.touched[t].append(touched)
        return fed

    # ------------------------------------------------------------ bytes

    def count_down(self, t, pulled, looked):
        for i, values in enumerate(pulled):
            size = sum(x.nbytes for x in values)
            for s in self.cut.shards[i]:
                for table, (numbers, _) in zip(self.cut.tables, looked, strict=True):
                    if table.parameter.name == s.parameter.name:
                        asked = numbers[(numbers >= s.begin) & (numbers < s.end)].astype(np.int32)
                        rows = self.parameter(s.parameter.name)[asked]
                        size += rows.nbytes
            size += sum(x.nbytes for x in self.shared().values()) if i == 0 else 0
            self.down[t].append(size)

    def count_up(self, i, t, whole, shared):
        size = sum(x.nbytes for x in whole)
        for s in self.cut.shards[i]:
            name = s.parameter.name
            if name in self.touched[t][i]:
                n = self.touched[t][i][name]
                shape = (n, *s.parameter.shape[1:])
                size += np.zeros(n, np.int32).nbytes + np.zeros(shape, s.parameter.dtype).nbytes
        size += sum(x.nbytes for x in shared.values()) if i else 0
        self.up[t].append(size)

    # ------------------------------------------------------------ what it has become

    def parameter(self, name):
        """All rows of a parameter."""
        return self.whole(name, "")

    def whole(self, name, suffix):
        """A parameter, or with a suffix such as ``/mean`` one of its slots, put together from all servers."""
        found = []
        for part, state, own in zip(self.parts, self.states, self.cut.shards, strict=True):
            found += [
                np.asarray(state[part.program[f"{s}{suffix}"]]) for s in own if s.parameter.name == name
            ]
        return np.concatenate(found) if len(found) > 1 else found[0]

    def parameters(self):
        """All parameters that are trained, by name."""
        return {p.name: self.parameter(p.name) for p, _ in self.cut.source.gradients}

    def carried(self, name):
        """What the forward pass carries."""
        return self.states[0][self.parts[0].program[name]]


class Alone:
    """The uncut Program on one device."""

    def __init__(self, program, params=None, seed=0):
        self.program = program
        self.run = ow.compile(program)
        self.state = self.run.init(seed=seed) if params is None else self.run.init(params, seed=seed)

    def step(self, *batch):
        """The outputs of one step."""
        self.state, out = self.run(self.state, *batch)
        return out

    def __getitem__(self, name):
        value = self.state[name]
        return value if jnp.issubdtype(value.dtype, jax.dtypes.prng_key) else np.asarray(value)
