"""Training on trainers and parameter servers, on this machine or on a Ray cluster, by one call."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from inspect import signature
from os import PathLike
from threading import Lock
from typing import Any
from weakref import WeakSet

from onward.core.errors import ArgumentError, StateError, nearest
from onward.core.program import Program
from onward.core.recipe import undone
from onward.core.structure import describe
from onward.core.walk import Where, listed, name_of
from onward.develop.check_finite import check_finite as checked
from onward.develop.over_batch.loss import TwoBatches, two_batches
from onward.develop.seam import forward_pass
from onward.distribute.merge import Average, Merge, Sum
from onward.distribute.replicate import replicate, replicated
from onward.distribute.split.devices import TrainerDevices
from onward.execute.initialize import is_declared
from onward.fit.model import Model
from onward.fleet.as_one import adds_up
from onward.fleet.engine import Engine
from onward.fleet.keeper import Durability
from onward.fleet.modes import Mode, Sync, as_mode
from onward.fleet.run import Run
from onward.fleet.settings import Settings
from onward.fleet.stream import Stream

_runs: WeakSet[Run] = WeakSet()
_lock = Lock()


def train(program: Program, reader: Any, **options: Any) -> Run:
    """Train on trainers and parameter servers, and wait for the end; takes what ``start`` takes.

    Returns:
        The Run that has ended: ``run.model``, ``run.history``, ``run.load``, ``run.events``.

    Raises:
        MissingExtraError: Ray is not installed.
        ClusterError: the training cannot begin, or cannot go on; nothing is left running.
        GraphError: the Program cannot be cut so.

    Example:
        >>> import numpy as np, onward as ow
        >>> def loss(w, x):
        ...     return ((x @ w) ** 2).mean()
        >>> w, x = np.ones(3, "float32"), np.ones((8, 3), "float32")
        >>> program = ow.SGD(0.1).minimize(loss, w, x)
        >>> run = ow.cluster.train(program, [(x,)] * 4, parameters=w, trainers=2)
        >>> run.versions, run.history["trainer"].sum(), run.model.parameters.shape
        ((2,), np.float64(2.0), (3,))
    """
    return start(program, reader, **options).wait()


def start(
    program: Program,
    reader: Any,
    *,
    parameters: Any = None,
    state: Any = None,
    seed: int = 0,
    trainers: int = 2,
    servers: int = 1,
    devices: int | None = 1,
    mode: Mode | str = "sync",
    epochs: int = 1,
    merge: Merge | None = None,
    lazy: Iterable[Where] = (),
    durability: int | Durability | None = 1,
    folder: str | PathLike[str] | None = None,
    address: str | None = None,
    token: str | PathLike[str] | None = None,
    deadline: float = 60.0,
    restarts: int = 3,
    start_limit: float = 180.0,
    trainer_options: Mapping[str, Any] | None = None,
    server_options: Mapping[str, Any] | None = None,
    progress: bool | None = None,
    check: bool = True,
    check_finite: bool = False,
    engine: Engine | None = None,
    **hidden: Any,
) -> Run:
    """Begin a training on trainers and parameter servers; it goes on by itself.

    Args:
        program: a training Program, as ``minimize`` makes it.
        reader: an iterable of batches, or a callable that returns one; it is sent to every trainer, which
            takes its share of the batches, in turn. A callable with two required arguments is given the
            trainer's number and how many there are, and returns the trainer's own batches.
        parameters: first values, in the containers that were traced; needed unless declared.
        state: what the model itself carries, for a Program traced with ``state=``.
        seed: what declared parameters are initialized from.
        trainers: how many processes compute gradients.
        servers: how many processes keep and update the parameters.
        devices: over how many devices each trainer takes its batches, which they share; None: all that JAX
            shows it. The gradients of a trainer's devices are merged before they are sent. A Program that
            ``replicate`` made says so itself. On a host without accelerators so many are made of it.
        mode: ``"sync"``, ``"async"``, ``cluster.Bounded(staleness)`` or ``cluster.Local(every)``.
        epochs: how often to read the data.
        merge: ``Average()``, weighed by the batches' sizes, or ``Sum()``; unless given, ``Sum()`` for a loss
            that is a sum over examples, as the graph tells.
        lazy: embedding tables whose untouched rows an update leaves alone; see ``split``.
        durability: after how many updates a server writes its record: 1 (nothing acknowledged is lost when
            it is killed), k (up to k updates of a server are made again in rounds, and lost otherwise), None
            (it cannot be replaced). ``cluster.Durability(1, fsync=True)`` outlives the machine, too.
        folder: where records are kept, and where a training that was stopped goes on, with the batches that
            it has not had; on a cluster a folder that all machines reach. A temporary one unless given.
        address: ``host:port`` of a Ray cluster to join; None: Ray is started here, on loopback. Where Ray
            already runs in this process, it is used.
        token: the file with the token of that cluster.
        deadline: seconds after which a process that does not answer is named, ended and replaced.
        restarts: how often each trainer is replaced.
        start_limit: seconds that a server or a trainer may take to start: to get a process, import JAX and
            trace the graph. One that takes longer than 10 s says what it waits for, in ``run.events``.
        trainer_options: of the Ray actors, such as ``{"num_gpus": 1}``.
        server_options: the same for servers.
        progress: whether to show a bar; None: in a terminal or a notebook.
        check: refuse an empty batch, and data that is NaN or infinite, and end before a step whose loss is:
            ``NonFiniteError``, or for an empty batch ``ClusterError``, names trainer and batch, and ``model``
            has the parameters before it. ``guard`` leaves such a step out.
        check_finite: end as well where a gradient is not finite, or what an update makes; see ``compile``.
        engine: an open ``cluster.Engine``, in place of ``address`` and ``token``: several trainings, one
            after the other, start Ray once.
        hidden: ``settings``, what tests break.

    Returns:
        The Run: ``wait()``, ``snapshot()``, ``history``, ``stop()``. ``train`` has an example.

    Raises:
        ArgumentError: a number of trainers or servers below 1, an unknown mode, a reader that cannot be sent.
        MissingExtraError: Ray is not installed.
        ClusterError: the cluster cannot be started or reached.
        GraphError: the Program cannot be cut so.
        NonFiniteError: from ``wait``: data, a loss or an update is not finite.
    """
    if not isinstance(program, Program):
        raise ArgumentError(
            f"cluster: {describe(program)} is not a Program; make one: "
            "Adam(1e-3).minimize(loss, params, *data)."
        )
    program = checked(program) if check_finite else program
    program, own = _on_devices(program, devices, merge)
    of_trainers = with_host_devices(trainer_options or {}, 0 if own is None else own.replicas.count)
    found = two_batches(program) if trainers > 1 else None
    settings = Settings(
        trainers=trainers,
        servers=servers,
        mode=as_mode(mode),
        epochs=epochs,
        sums=_sums(program, found, merge, trainers, as_mode(mode)),
        batch=None if found is None else found.split[0],
        lazy=tuple(str(name_of(choice)) for choice in listed(lazy)) if lazy else (),
        durability=durability if isinstance(durability, Durability) else Durability(durability),
        folder=None if folder is None else str(folder),
        deadline=deadline,
        restarts=restarts,
        start_limit=start_limit,
        options={"trainers": of_trainers, "servers": server_options or {}},
        devices=own,
        takes_all=devices is None,
        progress=progress,
        check=bool(check),
        **hidden.pop("settings", {}),
    )
    _expect_reader(reader, settings)
    _expect_known(hidden)
    _expect_values(program, parameters)
    model = Model(program, parameters, state, seed=seed)
    hosting = Engine(address, token) if engine is None else nullcontext(engine)
    run = Run(hosting, program, reader, model, settings)
    with _lock:
        _runs.add(run)
    return run


def _on_devices(
    program: Program, devices: int | None, merge: Merge | None
) -> tuple[Program, TrainerDevices | None]:
    """The Program for one device, and over which ones a trainer takes its batches; None: one."""
    if program.replicas is None and devices == 1 and devices is not True:
        return program, None
    if program.replicas is None:
        adds = Sum() if _sums(program, None, merge, 1, Sync()) else Average()
        program = replicate(program, 1 if devices is None else devices, adds)
    elif devices != 1:
        raise ArgumentError(
            f"cluster: {program.name!r} is replicated for {program.replicas.count} devices already, and "
            f"devices is {devices!r}. Leave one of the two out."
        )
    return undone(program, replicated), TrainerDevices.of(program)


def with_host_devices(options: Mapping[str, Any], count: int) -> Mapping[str, Any]:
    """The options of a Ray actor whose process shows so many devices where it has none but its host.

    Example:
        >>> with_host_devices({"num_cpus": 4}, 4)["runtime_env"]["env_vars"]
        {'XLA_FLAGS': '${XLA_FLAGS} --xla_force_host_platform_device_count=4'}
    """
    if count <= 1:
        return options
    environment = dict(options.get("runtime_env") or {})
    variables = dict(environment.get("env_vars") or {})
    flags = variables.get("XLA_FLAGS", "${XLA_FLAGS}")
    variables["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={count}"
    return {**options, "runtime_env": {**environment, "env_vars": variables}}


def snapshot() -> Model:
    """A Model with the parameters that the training of this process has now; see ``Run.snapshot``.

    Raises:
        StateError: no training on a cluster was begun here, or several go on at once.
    """
    with _lock:
        running = [run for run in _runs if run.is_running]
    if len(running) != 1:
        raise StateError(
            f"{len(running)} trainings on a cluster are running in this process. Ask one: run = "
            "cluster.start(...); run.snapshot()."
        )
    return running[0].snapshot()


def _expect_reader(reader: Any, settings: Settings) -> None:
    """Raise ``ArgumentError`` for a reader that trainers cannot read."""
    if isinstance(reader, Iterator):
        raise ArgumentError(
            "The reader is an iterator, which cannot be sent to several trainers. Pass a function that makes "
            "one: reader=lambda: read(files)."
        )
    Stream(reader, 0, settings.trainers, settings.epochs)  # raises what trainers would


def _expect_known(options: Mapping[str, Any]) -> None:
    """Raise ``ArgumentError`` for an option that ``start`` does not have."""
    if options:
        name, known = next(iter(options)), list(signature(start).parameters)[:-1]
        raise ArgumentError(f"cluster: there is no option {name!r}. {nearest(name, known)}")


def _expect_values(program: Program, parameters: Any) -> None:
    """Raise ``ArgumentError`` for a function of parameters of which no first values are given."""
    if parameters is None and program.signature is not None and not is_declared(forward_pass(program)):
        raise ArgumentError(
            f"cluster: {program.name!r} is a function of its parameters, so their first values are needed: "
            "parameters=params, as they were traced."
        )


def _sums(program: Program, found: TwoBatches | None, merge: Merge | None, trainers: int, mode: Mode) -> bool:
    """Whether servers add the gradients that they merge, and do not average them."""
    if merge is None:
        return trainers > 1 and adds_up(program, found, trainers, mode)
    if type(merge) in (Average, Sum):
        return type(merge) is Sum
    raise ArgumentError(f"cluster: merge is {describe(merge)}; servers know Average() and Sum().")
