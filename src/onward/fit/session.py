"""Run any part of a Program by naming targets; values are kept by Variable between the runs.

>>> import numpy as np, onward as ow
>>> images, labels = ow.data("images"), ow.data("labels")
>>> w1, b1 = ow.var("w1"), ow.var("b1")
>>> cost = ow.layer.mse(ow.layer.fc(images, w=w1, b=b1), labels)
>>> updates = ow.Adagrad(learning_rate=0.1).minimize(cost, parameter_list=[w1, b1])
>>> session = ow.Session()
>>> feed = {"images": np.eye(4, dtype="float32"), "labels": np.ones((4, 1), "float32")}
>>> for _ in range(200):
...     [loss] = session.run(target=updates, feed=feed, fetch=[cost])
>>> float(loss) < 1e-3
True
"""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import Any

from onward.core.errors import ArgumentError, ByName, NotPickled, nearest
from onward.core.program import Program, Target, Variable
from onward.core.structure import describe
from onward.core.walk import name_of
from onward.define.deferred import Deferred
from onward.define.lazy import Lazy
from onward.execute.checkpoint.checkpoints import Checkpoints, store_of
from onward.execute.checkpoint.identity import Identity
from onward.execute.feeds import data_names
from onward.execute.loop.interrupt import Interruptible, Terminated
from onward.execute.out import Out
from onward.execute.restore import loaded
from onward.execute.state import State
from onward.execute.step import Step
from onward.fit.counts import CountedPart
from onward.fit.owners import owner_of
from onward.fit.scope import Scope
from onward.fit.targets import Aim, aim, listed, program_in


class Session(ByName, NotPickled):
    """Runs Programs over values that it keeps, by Variable, in its ``scope``.

    Only what the targets need is run. A Variable is initialized when a run first needs it, once; a training
    Program and a test Program over the same Variables share them. What was compiled for targets, fetches and
    shapes is remembered. Ctrl-C waits until a run has stored its values.

    Several optimizers may train, such as the two of a GAN. Parameters are shared, by name; each optimizer
    keeps a learning rate, a step counter and slots of its own, which its Variables find:
    ``session[program["learning_rate"]]``. The mere names are those of the first optimizer that ran. A Program
    that is derived again by an equal optimizer, for the same parameters and a cost of the same name, goes on
    with its values. Updates of one optimizer that are run in parts, one after the other, count as one step.

    Args:
        program: where targets that are mere names, ops or Variables are looked up; unless given, the last
            Program run.
        seed: what declared parameters are initialized from.
        scope: the values of another Session, to be shared.
        checkpoints: where Ctrl-C or SIGTERM during a run, and ``save``, write all values. The first run that
            trains is refused where another run is there; see ``Checkpoints``.

    Example:
        >>> import numpy as np, onward as ow
        >>> def network():
        ...     return ow.layer.mse(ow.layer.fc(ow.data("x", (None, 3)), 1), ow.data("y", (None, 1)))
        >>> program = ow.SGD(0.1).minimize(ow.trace(network))
        >>> session = ow.Session(program)
        >>> feed = {"x": np.ones((8, 3)), "y": np.ones((8, 1))}
        >>> [loss] = session.run(target=program.updates, feed=feed, fetch=["loss"])
        >>> [y] = session.run(feed={"x": np.ones((1, 3))}, fetch=["fc_0"])
        >>> y.shape, int(session["step"])
        ((1, 1), 1)
    """

    unpickled = (
        "A Session",
        "session.save(folder) writes its values, restore(folder) of a new Session reads them.",
    )

    def __init__(
        self,
        program: Program | None = None,
        *,
        seed: int = 0,
        scope: Scope | None = None,
        checkpoints: Checkpoints | str | PathLike[str] | None = None,
    ) -> None:
        self.scope = scope if scope is not None else Scope()
        self.checkpoints = store_of(checkpoints)
        self.grace = None if self.checkpoints is None else self.checkpoints.grace
        self.identity = Identity.new()
        self.runs = 0
        self.seed = seed
        self._given, self._last = program, program
        self._deferred: dict[Any, Deferred] = {}
        self._completed: dict[Deferred, Program] = {}
        self._plans: dict[Any, _RunPlan] = {}

    def run(
        self,
        target: Any = None,
        feed: Mapping[Any, Any] | None = None,
        fetch: Any = (),
    ) -> list[Any]:
        """Run what the targets and fetches need, once.

        Args:
            target: what ``minimize`` returned, one of its update ops (``program.updates``), any op, Variable,
                name or layer; or a list of these.
            feed: arrays by the name of their data, or by its declaration.
            fetch: names, Variables or layers whose values to return. A fetched parameter is its value
                before the update.

        Returns:
            The values of ``fetch``, in order, as JAX arrays that may still be computing.

        Raises:
            ArgumentError: data that is missing, misspelt, or of another shape or dtype.
            GraphError: targets of several Programs, or of another one.
            UnknownNameError: a target or fetch that names no Variable.
            StateError: a Variable without a first value; two layers outside of a function that were numbered
                alike, each traced apart, because they are unnamed; or parameters together that had different
                numbers of updates, by an optimizer that reads its step counter.
        """
        try:
            fed = _named(feed)
            with self.scope.lock, Interruptible(self.grace) as interrupts:
                plan = self._plan(listed(target), listed(fetch), fed)
                plan.check(fed)
                if self.checkpoints is not None and plan.part.trained:
                    self.checkpoints.claim(self.identity)
                self.scope.initialize(plan.step.program, self.seed, plan.owner)
                with interrupts.uninterrupted:
                    out = self._run(plan, fed)
            return [out[name] for name in plan.aim.fetch]
        except (KeyboardInterrupt, Terminated):
            with Interruptible() as interrupts, interrupts.uninterrupted:
                if self.checkpoints is not None:
                    self.save()
                raise

    def _run(self, plan: _RunPlan, fed: Mapping[str, Any]) -> Out:
        """Run a plan over the values of the scope, and keep the new ones; nothing may interrupt this."""
        names = self.scope.names_of(plan.step.program, plan.step.layout)
        part, counts = plan.part, self.scope.counts_of(plan.part.counter)
        before, after = counts.shifts(part.trained, part.is_read)
        values = self.scope.values_of(names, part.counter, before)
        state, out = plan.step(State(plan.step.layout, values), *plan.data(fed))
        self.scope.take(state, names, part.counter, after)
        counts.add(part.trained)
        self.runs += 1
        return out

    def save(self, folder: str | PathLike[str] | None = None) -> Any:
        """Write every value of the scope to disk; returns the path once it is there.

        Args:
            folder: the folder of checkpoints; the Session's own unless given.
        """
        store = self.checkpoints if folder is None else Checkpoints.adding(folder, self.checkpoints)
        if store is None:
            raise ArgumentError("There is no folder to save to: session.save('runs/one').")
        store.claim(self.identity)
        with self.scope.lock:
            path = store.save(self.scope.values_by_name(), self.runs, extra=self.scope.record())
        store.wait()
        return path

    def restore(self, folder: str | PathLike[str] | None = None, which: Any = "latest") -> None:
        """Take the values of a checkpoint, by name.

        Raises:
            CheckpointError: nothing whole is there; nothing is changed then.
            StateError: a value of another type than the Variable that is known here.
        """
        if folder is None and self.checkpoints is None:
            raise ArgumentError("There is no folder to restore from: session.restore('runs/one').")
        found = loaded(self.checkpoints if folder is None else folder, which)
        with self.scope.lock:
            self.scope.restore(found.arrays, found.extra)
            self.runs = found.step
        if self.checkpoints is not None and self.checkpoints.is_at(found.path.parent):
            self.checkpoints.follow(found)
            self.identity = found.identity

    def program(self, target: Any, feed: Mapping[Any, Any] | None = None) -> Program:
        """The part of the Program that ``run`` would run for this target, to be printed or counted."""
        with self.scope.lock:
            return self._plan(listed(target), [], _named(feed)).step.program

    def __getitem__(self, name: str | Variable) -> Any:
        """A copy of the value of a state Variable."""
        return self.scope[name]

    def __setitem__(self, name: str | Variable, value: Any) -> None:
        """Give a state Variable a value."""
        self.scope[name] = value

    def _plan(self, targets: list[Any], fetch: list[Any], fed: Mapping[str, Any]) -> _RunPlan:
        """The plan for these targets, from the cache if they were run before."""
        if not targets and not fetch:
            raise ArgumentError("run was given neither target nor fetch: there is nothing to run.")
        program = self._chosen([*targets, *fetch], fed)
        key = id(program), tuple(map(_key, targets)), tuple(map(_key, fetch))
        if key not in self._plans:
            self._plans[key] = _RunPlan(aim(program, targets, fetch), (targets, fetch))
        return self._plans[key]

    def _chosen(self, targets: list[Any], fed: Mapping[str, Any]) -> Program:
        """The Program that the targets belong to."""
        found = program_in(targets)
        lazies = tuple(t for t in targets if isinstance(t, Lazy))
        if found is None and lazies:
            whole = self._deferred.setdefault(tuple(map(id, lazies)), Deferred(lazies, {"training": False}))
            return self._complete(whole, fed)
        if found is not None:
            self._last = self._complete(found, fed) if isinstance(found, Deferred) else found
            return self._last
        if (program := self._given or self._last) is None:
            raise ArgumentError(
                f"run cannot tell which Program {describe(targets[0])} belongs to. Give the Program once, "
                "Session(program), or a target that knows it: program.updates."
            )
        return program

    def _complete(self, deferred: Deferred, fed: Mapping[str, Any]) -> Program:
        """The Program of Lazy values, its open shapes as they were fed first."""
        if deferred not in self._completed:
            names = deferred.names
            examples = {n: x for n, x in fed.items() if n in names}
            self._completed[deferred] = deferred.complete(examples)
        return self._completed[deferred]

    def __repr__(self) -> str:
        return f"Session({len(self.scope)} Variables, {len(self._plans)} plans)"


class _RunPlan:
    """One way of running: what is aimed at, and the Step that does it."""

    def __init__(self, aimed: Aim, keep: Any) -> None:
        self.aim, self.keep = aimed, keep
        self.step = Step(aimed.pruned(), (), donate=True, ahead=False)
        self.reads = frozenset(name for _, name in self.step.feeds.taken)
        self.known = data_names(aimed.program)
        self.owner, self.part = owner_of(aimed.program), CountedPart.of(self.step.program)

    def data(self, fed: Mapping[str, Any]) -> tuple[Any, ...]:
        """The data of the feed that the step reads, in its order."""
        return self.step.feeds.named((), {name: x for name, x in fed.items() if name in self.reads})

    def check(self, fed: Mapping[str, Any]) -> None:
        """Raise ``ArgumentError`` for a feed that the Program does not know."""
        for name in fed:
            if name not in self.known:
                raise ArgumentError(
                    f"{self.aim.program.name} takes no data named {name!r}. {nearest(name, self.known)}"
                )


def _named(feed: Mapping[Any, Any] | None) -> dict[str, Any]:
    """The feed by name, whatever its keys are."""
    if feed is None:
        return {}
    if not isinstance(feed, Mapping):
        raise ArgumentError(f"The feed is {describe(feed)}; expected a dict, {{'images': array}}.")
    for key in feed:
        if name_of(key) is None:
            raise ArgumentError(f"The feed has the key {key!r}; expected a name of data, or its declaration.")
    return {str(name_of(key)): value for key, value in feed.items()}


def _key(target: Any) -> Any:
    """The cache key of a target: names by value, everything else by identity."""
    if isinstance(target, Target):
        return id(target.program), id(target.op)
    return target if isinstance(target, str) else id(target)
