"""The bytes that the parts of a Split send and keep, for each server, known before any of them runs.

>>> import jax.numpy as jnp, onward as ow
>>> params = {"table": jnp.ones((1000, 16)), "w": jnp.ones((16, 4))}
>>> def loss(p, ids):
...     return jnp.mean((p["table"][ids] @ p["w"]) ** 2)
>>> program = ow.Adam(0.1).minimize(loss, params, jnp.zeros(32, jnp.int32))
>>> print(traffic(ow.split(program, servers=2, trainers=3)))
Traffic of loss: 2 servers, 3 trainers; each trainer sends 276 B and gets 276 B at a step, and rows
<BLANKLINE>
server      keeps  parameters      state  from a trainer  to a trainer
0        94.1 KiB    31.4 KiB   62.8 KiB             0 B          20 B
1        94.1 KiB    31.4 KiB   62.8 KiB           276 B         256 B
all     188.3 KiB    62.8 KiB  125.5 KiB           276 B         276 B  the largest keeps 1.00 of the mean
<BLANKLINE>
by rows          server  rows  pushed each  pulled each
table[0:502]          0   502         68 B         68 B
table[502:1000]       1   498         68 B         68 B
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from onward.core.columns import columns
from onward.core.errors import UnknownNameError, nearest
from onward.core.program import Variable
from onward.core.show import human_bytes, nbytes
from onward.core.words import Kind
from onward.distribute.split.cut import Split
from onward.distribute.split.server import ServerPart
from onward.distribute.split.shards import Shard

NUMBER = 4
"""The bytes of a row number: int32."""


@dataclass(frozen=True)
class RowTraffic:
    """The bytes that travel for one row of a table's shard on one server.

    Attributes:
        table: the name of the whole parameter.
        shard: the name of the rows that the server owns.
        rows: how many these are.
        pushed: bytes that a trainer sends for a row that it touched: its number and its gradient.
        pulled: bytes that asking for a row takes: its number, on the way up, and the row, on the way down.
    """

    table: str
    shard: str
    rows: int
    pushed: int
    pulled: int


@dataclass(frozen=True)
class ServerTraffic:
    """The bytes that one server keeps, and those that it exchanges with one trainer at a step.

    Attributes:
        parameters: bytes of the parameters that it owns.
        state: bytes of their slots, and on the first server of what is there once.
        received: bytes of what one trainer sends whole: gradients, and to the first server carried state.
        sent: bytes of what one trainer gets whole: parameters, and from the first server carried state.
        told: bytes of step, schedules and hyperparameters that a trainer brings it; 0 on the first server.
        tells: bytes of these that it gives a trainer for the other servers; 0 on all but the first.
        tables: what travels by rows.
    """

    parameters: int
    state: int
    received: int
    sent: int
    told: int
    tells: int
    tables: tuple[RowTraffic, ...]

    @property
    def kept(self) -> int:
        """All bytes of its state."""
        return self.parameters + self.state


@dataclass(frozen=True)
class Traffic:
    """The bytes that a Split's servers keep, and those exchanged between them and one trainer at a step.

    Counted are the arrays, whole buffers of them; not what a transport puts around them: names, sequence
    numbers, acknowledgements, frames.

    Attributes:
        name: that of the Program that was cut.
        trainers: how many push before a server updates.
        servers: each server's part.
    """

    name: str
    trainers: int
    servers: tuple[ServerTraffic, ...]

    def up(self, server: int, touched: Mapping[str, int] | None = None) -> int:
        """The bytes of a push: of the arrays that one trainer sends to one server at a step.

        Args:
            server: which.
            touched: for each table, by the parameter's name, how many rows of this server's shard the
                trainer touched; 0 unless given.

        Raises:
            UnknownNameError: the server owns no rows of such a table.
        """
        one = self.servers[server]
        return one.received + one.told + sum(r.pushed * n for r, n in _counted(one, server, touched))

    def down(self, server: int, touched: Mapping[str, int] | None = None) -> int:
        """The bytes of a pull: of the arrays that one trainer gets from one server at a step.

        The numbers of the rows that it asks for are counted here too; ``asked`` says how many bytes they are.
        """
        one = self.servers[server]
        return one.sent + one.tells + sum(r.pulled * n for r, n in _counted(one, server, touched))

    def asked(self, server: int, touched: Mapping[str, int] | None = None) -> int:
        """The part of ``down`` that goes up: the numbers of the rows that a trainer asks one server for."""
        return sum(NUMBER * n for _, n in _counted(self.servers[server], server, touched))

    @property
    def pushed(self) -> int:
        """The bytes that one trainer sends to all servers at a step, rows apart."""
        return sum(map(self.up, range(len(self.servers))))

    @property
    def pulled(self) -> int:
        """The bytes that one trainer gets from all servers at a step, rows apart."""
        return sum(map(self.down, range(len(self.servers))))

    @property
    def kept(self) -> int:
        """The bytes of the state of all servers."""
        return sum(s.kept for s in self.servers)

    @property
    def balance(self) -> float:
        """The bytes of the server with the most state, as a multiple of the mean: 1 at best."""
        return max(s.kept for s in self.servers) * len(self.servers) / self.kept

    def __str__(self) -> str:
        tables = [(r, i) for i, s in enumerate(self.servers) for r in s.tables]
        counts = f"{_count(len(self.servers), 'server')}, {_count(self.trainers, 'trainer')}"
        head = (
            f"Traffic of {self.name}: {counts}; each trainer sends {human_bytes(self.pushed)} and gets "
            f"{human_bytes(self.pulled)} at a step{', and rows' if tables else ''}"
        )
        return "\n\n".join((head, self._of_servers(), *([_of_tables(tables)] if tables else [])))

    def _of_servers(self) -> str:
        rows = [["server", "keeps", "parameters", "state", "from a trainer", "to a trainer"]]
        rows += [
            [str(i), *map(human_bytes, (s.kept, s.parameters, s.state, self.up(i), self.down(i)))]
            for i, s in enumerate(self.servers)
        ]
        parameters = sum(s.parameters for s in self.servers)
        sizes = (self.kept, parameters, self.kept - parameters, self.pushed, self.pulled)
        rows.append(["all", *map(human_bytes, sizes)])
        return (
            f"{columns(rows, right=range(1, len(rows[0])))}  the largest keeps {self.balance:.2f} of the mean"
        )


def traffic(cut: Split) -> Traffic:
    """Compute the bytes that a Split's servers keep, and that one trainer exchanges with each at a step.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> program = ow.SGD(0.1).minimize(lambda w, x: jnp.mean(x @ w), jnp.ones(100), jnp.ones((8, 100)))
        >>> found = traffic(ow.split(program, servers=2))
        >>> [found.up(server) for server in (0, 1)], [found.down(server) for server in (0, 1)]
        ([200, 204], [204, 200])
    """
    shared = 0 if cut.shared is None else _size(cut.shared.outputs)
    servers = (
        _of_server(part, own, shared if i else 0, 0 if i else shared)
        for i, (part, own) in enumerate(zip(cut.server_parts, cut.shards, strict=True))
    )
    return Traffic(cut.source.name, cut.count, tuple(servers))


def _of_server(part: ServerPart, own: Sequence[Shard], told: int, tells: int) -> ServerTraffic:
    state = part.program.state
    parameters = _size(v for v in state if v.kind is Kind.PARAMETER)
    by_name = {str(s): s for s in own}
    return ServerTraffic(
        parameters=parameters,
        state=_size(state) - parameters,
        received=_size(part.received[0]),
        sent=_size(part.program.outputs),
        told=told,
        tells=tells,
        tables=tuple(_of_rows(by_name[v.name]) for v in part.tables),
    )


def _of_rows(shard: Shard) -> RowTraffic:
    p = shard.parameter
    row = prod(p.shape[1:]) * int(p.dtype.itemsize)
    return RowTraffic(p.name, str(shard), shard.end - shard.begin, NUMBER + row, NUMBER + row)


def _counted(
    one: ServerTraffic, server: int, touched: Mapping[str, int] | None
) -> list[tuple[RowTraffic, int]]:
    """The tables of a server, each with how many of its rows are touched."""
    by_name = {r.table: r for r in one.tables}
    for name in touched or {}:
        if name not in by_name:
            raise UnknownNameError(
                f"Of {name!r} no rows travel to or from server {server}. {nearest(name, by_name)}"
            )
    return [(by_name[name], count) for name, count in (touched or {}).items()]


def _size(variables: Iterable[Variable]) -> int:
    return sum(map(nbytes, variables))


def _of_tables(tables: Sequence[tuple[RowTraffic, int]]) -> str:
    rows = [("by rows", "server", "rows", "pushed each", "pulled each")]
    rows += [
        (r.shard, str(i), f"{r.rows:,}", human_bytes(r.pushed), human_bytes(r.pulled)) for r, i in tables
    ]
    return columns(rows, right=range(1, len(rows[0])))


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}{'' if n == 1 else 's'}"
