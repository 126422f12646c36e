"""``compile``: from a Program to a Step, with what may be done on the way."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, overload

from onward.core.check import expect_switches
from onward.core.first_use import at_first_call
from onward.core.program import Program, Variable
from onward.core.structure import is_word
from onward.core.walk import Where, listed
from onward.develop.check_finite import check_finite as checked
from onward.execute.cores import Cores
from onward.execute.options import OptionSet, Value, option_set
from onward.execute.spread import By
from onward.execute.step import Step
from onward.execute.tuning import Tuning

if TYPE_CHECKING:  # most scripts compile no Pipeline
    from onward.distribute.pipeline.cut import Pipeline
    from onward.execute.pipelined import PipelineStep

_pipelined = at_first_call("onward.execute.pipelined", "pipelined")
_remembered = at_first_call("onward.execute.trials.remembered", "remembered")


@overload
def compile(  # noqa: A001
    program: Program,
    fetch: Sequence[str | Variable] = ...,
    donate: bool | Iterable[Where] = ...,
    check_feeds: bool = ...,
    by: str = ...,
    deadline: float | None = ...,
    roll: bool | None = ...,
    tune: bool = ...,
    check_finite: bool = ...,
    keep_memory: bool | None = ...,
    options: Mapping[str, Value] | OptionSet | str | None = ...,
    cores: int | str | None = ...,
) -> Step: ...


@overload
def compile(  # noqa: A001
    program: Pipeline,
    *,
    donate: bool | Iterable[Where] = ...,
    check_feeds: bool = ...,
    options: Mapping[str, Value] | OptionSet | None = ...,
) -> PipelineStep: ...


def compile(  # noqa: A001
    program: Program | Pipeline,
    fetch: Sequence[str | Variable] = (),
    donate: bool | Iterable[Where] = True,
    check_feeds: bool = True,
    by: str = By.SHARD_MAP,
    deadline: float | None = None,
    roll: bool | None = None,
    tune: bool = True,
    check_finite: bool = False,
    keep_memory: bool | None = None,
    options: Mapping[str, Value] | OptionSet | str | None = None,
    cores: int | str | None = None,
) -> Step | PipelineStep:
    """Compile a Program to one XLA computation, ahead of time.

    Args:
        program: a Program, with or without backward and update; or a Pipeline, each stage of which is
            compiled for a device of its own, with ``donate``, ``check_feeds`` and ``options`` alone.
        fetch: names of further Variables that ``out[name]`` should hold: activations, gradients,
            hyperparameters. A fetched parameter is its value before the update.
        donate: let the step reuse the buffers of the State it is given. The State is spent then. A list of
            names or patterns donates just these.
        check_feeds: look on the host whether labels and embedding ids lie in their range, which no device
            would say. Arrays that are on an accelerator already are not looked at: there, the loss is NaN.
        by: what of JAX runs a replicated Program: ``"shard_map"`` or ``"pmap"``; the results are equal.
        deadline: how many seconds a step over several processes may take before ``PeerError`` says which
            process it waits for. 300 unless given or said by ONWARD_DEADLINE; ``math.inf`` for no end.
        roll: compile repeated layers as one loop over stacked parameters; None: where it gains something, and
            no gradient of an activation within such a layer is fetched. False leaves loops that are there.
        tune: let many small Variables share a buffer, and rewrite what a device is slow at; the results
            are the same. ``print(step.plan())`` tells what was done.
        check_finite: raise ``NonFiniteError`` where the loss, a gradient or the next state is not finite, and
            name the op. Such a step changes nothing, nor do those after it, so the State stays, though it is
            donated: ``error.state``; ``error.finding`` is what ``find_nonfinite`` found. The next call with
            that State raises, or the one after that if the step is still computing then: a call waits for the
            one before the last, so the host runs at most two calls ahead. ``step.expect_going(state)`` waits
            and raises. Two batches of each State are kept that long. Any number of States may run through
            the step; one of a step without this check is taken over. Under your own ``jax.jit`` or
            ``jax.lax.scan`` nothing can be raised, and no batch is kept: there ``state["is_finite"]`` tells,
            and ``step.expect_going`` after it. What ``guard`` or a loss scale leaves out is not a fault.
        keep_memory: keep the host memory of temporary arrays for the next step in place of asking the system
            for it again, on GNU/Linux, for the whole process: ``keep_host_memory``. None: on a CPU, where
            they take 16 MiB or more and ONWARD_KEEP_MEMORY is not 0; more than 63 MiB where the machine has
            plenty, for up to five times as much is kept. These come in pieces then, but not with JAX's
            compilation cache, which cannot hold such an executable.
        options: options of XLA by name, over those that Onward gives by itself, such as
            ``{"xla_cpu_prefer_vector_width": 512}``; an option set that ``tune`` found; or ``"tuned"``: the
            one that ``tune`` remembered of this Program on this machine, where there is one.
        cores: on a CPU, how many cores to run on, each with its part of the batch and the whole of the
            parameters; ``"auto"`` for all where that gains something. State, results and names are those of
            one device: what cannot be made so is refused. A batch of a length that they do not divide runs on
            one. Each core is a host device, of which JAX has one unless told otherwise before it begins:
            ``jax.config.update("jax_num_cpu_devices", 2)``, which ``cores`` sees to where it is not too late.

    Raises:
        UnknownNameError: a name in ``fetch`` that no Variable has.
        ArgumentError: a Program for more devices or cores than there are; an option that XLA does not know.
        GraphError: ``roll=True`` where no layer repeats; ``cores`` where examples see each other.
        OutOfMemoryError: the compiler of the device says that memory is not enough.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> program = ow.SGD(0.1).minimize(lambda w, x: jnp.sum(w * x), jnp.ones(2), jnp.ones(2))
        >>> step = ow.compile(program, fetch=["grad(w)"])
        >>> state = step.init(jnp.ones(2))
        >>> state, out = step(state, jnp.array([1.0, 2.0]))
        >>> float(out.loss), out["grad(w)"].tolist()
        (3.0, [1.0, 2.0])
        >>> print(state.parameters)
        [0.9 0.8]
    """
    if not isinstance(program, Program):
        beside = {
            "fetch": bool(listed(fetch)),
            "by": by != By.SHARD_MAP,
            "roll": roll is not None,
            "tune": tune is not True,
            "check_finite": check_finite is not False,
            "keep_memory": keep_memory is not None,
            "cores": cores is not None,
        }
        step: PipelineStep = _pipelined(program, donate, check_feeds, options, deadline, beside)
        return step
    expect_switches("compile", tune=tune, check_finite=check_finite, check_feeds=check_feeds)
    expect_switches("compile", (True, False, None), roll=roll, keep_memory=keep_memory)
    given, on = program, Cores.of(cores)
    if on is not None:
        on.expect(program)
    if check_finite:
        program = checked(program)
    found, words = _chosen(options, (program, given), 1 if on is None else on.count)
    tuning = Tuning(tune, roll, found.fission is not False, on, words, found.attention is True)
    keep_memory = found.keep_memory if keep_memory is None else keep_memory
    return Step(
        program,
        listed(fetch),
        donate,
        check_feeds,
        True,
        tuning,
        () if tune else None,
        by,
        deadline,
        keep_memory,
        found.compiler,
    )


def _chosen(options: Any, programs: Sequence[Program], cores: int) -> tuple[OptionSet, tuple[str, ...]]:
    """The options that were given, or remembered of the first of these Programs that is known; in words."""
    if not is_word(options, ["tuned"]):
        found: OptionSet = option_set(options)
        return found, (f"options: {found}",) if found.words else ()
    for program in programs:
        if (found := _remembered(program, cores)) is not None:
            return found, (f"options: {found}, remembered by tune",)
    return OptionSet(), (_UNKNOWN,)


_UNKNOWN = (
    "options: none remembered for this Program on this machine; ow.tune(program, state, *batch) finds them"
)
