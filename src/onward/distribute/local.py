"""Every device trains for itself for some steps; then the devices meet: local SGD and DiLoCo.

A parameter is what they agreed on when they last met, and equal everywhere; what each device has made of it
since is in the state Variable ``parameter/local``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from jax import lax

from onward.core.builder import Builder
from onward.core.errors import ArgumentError
from onward.core.jaxprs.body import body_of
from onward.core.lower import lower
from onward.core.marks import COUNT, LOCAL
from onward.core.placement import local_copies
from onward.core.program import Applied, Program, Variable
from onward.core.structure import expect_count
from onward.core.walk import substitute
from onward.core.words import Kind, Pass, Placement, UpdateType
from onward.derive.optimizer import Optimizer
from onward.derive.optimizers import Momentum
from onward.derive.update.growing import StandIns
from onward.derive.update.update import with_update
from onward.distribute.merge import Average, Devices, Merge, expect_way


class LocalSGD(Merge):
    """Every device makes its own updates; at every so many steps the parameters become their mean.

    It sends one ``every``-th of what an average of the gradients sends. The slots of the optimizer stay each
    device's own. ``state.parameters`` are those of the last meeting, ``state["w/local"]`` what each device
    has made of ``w`` since; where one device resumes, or a step is saved, ``w`` becomes their mean. What the
    function returns, and the statistics of batch normalization, are small and merged at every step.

    Source: Stich, Local SGD Converges Fast and Communicates Little, 2019, algorithm 1.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> program = ow.SGD(0.1).minimize(lambda w, x: jnp.mean(x @ w), jnp.ones(3), jnp.ones((8, 3)))
        >>> program = ow.replicate(program, devices=2, merge=ow.merge.LocalSGD(every=4))
        >>> [op.type for op in program.ops if op.made_by == "collective"]
        ['local_sgd', 'all_mean']
    """

    exact: ClassVar[bool] = False
    every: int = 16

    def __post_init__(self) -> None:
        expect_count(self.every, f"{type(self).__name__}: every", of="a number of steps")

    @property
    def period(self) -> int:
        """The steps from one meeting to the next."""
        return self.every

    def apply(self, program: Program, devices: Devices, steps: Sequence[Applied]) -> Program:
        """The Program whose forward and backward pass read each device's own parameters."""
        builder = Builder(program, made_by=Pass.COLLECTIVE)
        local = {p: _local(builder, p) for p, _ in program.gradients}
        for op in program.ops:
            read = tuple(local.get(v, v) for v in op.inputs)
            builder.append(op if read == op.inputs else replace(op, inputs=read))
        return builder.program()

    def update(self, program: Program, optimizer: Any, *, devices: Devices) -> Program:
        """Each device's own update, and now and then the meeting."""
        local = local_copies(program)
        pairs = {p: (local[p], g) for p, g in program.gradients}
        copies = StandIns(lambda _: ((), pairs), Placement.PER_REPLICA)
        alone = with_update(program, optimizer, stand_ins=copies)
        added = alone.ops[len(program.ops) :]
        count = next(op for op in added if op.update is UpdateType.BOOKKEEPING and op.type is COUNT)
        following = [(v, alone.next_state[v]) for v in local.values()]
        alone = substitute(alone, {new: replace(new, name=f"updated({v.name})") for v, new in following})
        fed = {p: alone.next_state[v] for p, v in local.items()}
        draft = Program(program.name, tuple(fed.values()), tuple(fed))
        return _now_and_then(alone, self.synchronize(draft, devices), local, count.inputs[0], self)

    def synchronize(self, draft: Program, devices: Devices) -> Program:
        """The Program of a synchronization: its state are the parameters, it is fed each device's own."""
        builder = Builder(draft, made_by=Pass.COLLECTIVE)
        following = {}
        for p, own in zip(draft.state, draft.inputs, strict=True):
            following[p] = builder.behind(own, "all_mean", lambda x: [devices.mean(x)])
        return replace(draft, ops=builder.ops, next_state=following)


class DiLoCo(LocalSGD):
    """Every device makes its own updates; how far they came is the gradient of an outer optimizer.

    When the devices meet, the mean over them of ``w - w/local`` goes to the outer optimizer, and all go on
    from what it makes of ``w``. The difference is merged as ``exchange`` says. Hyperparameters and slots of
    the outer optimizer are in the state, named ``outer/...``.

    Source: Douillard et al., DiLoCo, 2023, algorithm 1, with Nesterov momentum 0.9 and learning rate 0.7 as
    in section 3.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> program = ow.AdamW(0.1).minimize(lambda w, x: jnp.mean(x @ w), jnp.ones(3), jnp.ones((8, 3)))
        >>> program = ow.replicate(program, devices=2, merge=ow.merge.DiLoCo(every=100))
        >>> [v.name for v in program.state if v.name.startswith("outer/")]
        ['outer/learning_rate', 'outer/momentum', 'outer/step', 'outer/w/velocity']
    """

    every: int = 100
    outer: Optimizer = Momentum(0.7, 0.9, nesterov=True)
    exchange: Merge = Average()

    @property
    def name(self) -> str:
        """The type of its op."""
        return "diloco"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.outer, Optimizer) or self.outer.evaluates_loss:
            raise ArgumentError(
                f"DiLoCo: outer is {self.outer!r}; expected an optimizer, such as Momentum(0.7, 0.9), that "
                "does not evaluate the loss."
            )
        expect_way("DiLoCo", self.exchange)

    def synchronize(self, draft: Program, devices: Devices) -> Program:
        """The update of the outer optimizer, by the mean way that the devices went."""
        builder, way = Builder(draft), {}
        for p, own in zip(draft.state, draft.inputs, strict=True):
            way[p] = builder.named(f"way({p.name})", p, Kind.GRADIENT)
            builder.add("sub", (p, own), (way[p],), lambda w, x: [w - x])
        known = builder.program(gradients=tuple(way.items()))
        merged = self.exchange.apply(known, devices, ())
        return with_update(merged, self.outer)


def _local(builder: Builder, p: Variable) -> Variable:
    """Each device's own of a parameter, which begins as the parameter does."""
    same = body_of(lambda x: [x], p.aval)
    return builder.carry(f"{p.name}/local", same, LOCAL, Placement.PER_REPLICA, reads=[p])


def _now_and_then(
    program: Program, sync: Program, local: Mapping[Variable, Variable], step: Variable, merge: LocalSGD
) -> Program:
    """The Program with a synchronization as one op, which does something at every so many steps."""
    builder = Builder(program, program.ops, made_by=Pass.COLLECTIVE)
    parameters = list(local)
    outer = (v for v in sync.state if v not in local)
    renamed = {v: replace(v, name=builder.names.new(f"outer/{v.name}")) for v in outer}
    sync = substitute(sync, renamed)
    changing = [*parameters, *(v for v in sync.next_state if v not in local)]
    fixed = [v for v in sync.state if v not in changing]
    given = (*changing, *fixed, *sync.inputs)
    run = lower(sync, [sync.next_state[v] for v in changing])

    def sometimes(number: Any, *values: Any) -> list[Any]:
        env = dict(zip(given, values, strict=True))
        own = [env[v] for v in sync.inputs]

        def meet() -> list[Any]:
            found = run([env[v] for v in sync.state], own)
            return [*found[: len(own)], *found]

        def part() -> list[Any]:
            return [*own, *values[: len(changing)]]

        return list(lax.cond((number + 1) % merge.every == 0, meet, part))

    builder.state += renamed.values()
    builder.initializers += sync.initializers
    builder.add(merge.name, (step, *given), [], sometimes, replaces=(*local.values(), *changing))
    return builder.program(
        hyperparameters=(*program.hyperparameters, *sync.hyperparameters),
        limits={**program.limits, **sync.limits},
    )
