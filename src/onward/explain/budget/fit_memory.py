"""A training within a memory budget: chunks, recomputation and host memory chosen together.

fit_memory(optimizer.minimize(loss, ...), "12GB")
"""

from __future__ import annotations

from collections.abc import Mapping

from onward.core.amounts import whole_bytes
from onward.core.errors import ArgumentError, GraphError
from onward.core.program import Program
from onward.core.recipe import recipe_of
from onward.core.show import human_bytes
from onward.core.structure import describe, is_number
from onward.core.words import Pass
from onward.distribute.layout.accelerators import Accelerator, known
from onward.execute.memory.held import MemoryShare
from onward.execute.memory.use import MemoryUse
from onward.explain.budget.bases import expect_one_device
from onward.explain.budget.search import BudgetSearch


def fit_memory(program: Program, budget: int | float | str, *, device: str | Accelerator = "H100") -> Program:
    """The same training in no more memory than a budget, at the least time.

    A step takes memory for parameters, the state of the optimizer, its batch, and what it computes. Four
    ways to take less are weighed against each other, and put together where one is not enough: the loss head
    and attention in chunks of rows (``chunk``), activations that the backward pass computes again
    (``recompute``), activations of loops in host memory until it reads them, and state of the optimizer there
    between the steps (``offload``). Chunks and recomputation cost arithmetic, host memory costs the way over
    the bus and back, none of which is taken to be hidden behind arithmetic. Values and gradients stay what
    they are, up to the order of sums.

    Their time is foretold for a kind of device, from its published peaks. Their bytes are those of the
    compiler of the device at hand: the Program is compiled a few times. A CPU has one memory; of what its
    compiler takes, the part counts that a device would hold, as the ops tell it.
    ``print(memory_savings(program))`` tells what was chosen, and what each choice saves and costs. A Program
    that fits comes back as it is.

    Args:
        program: a training Program that was traced, not yet accumulated, replicated or partitioned: these
            come after. What is chunked, recomputed or offloaded in it already stays so.
        budget: the bytes of a device for the whole step: a whole number, such as ``"12GB"``, or a fraction
            between 0 and 1 of what the step takes as it is.
        device: by whose speed and bandwidths the ways are weighed: ``"A100"``, ``"H100"``, ``"H200"``,
            ``"TPU v5p"``, or an ``ow.typing.Accelerator``.

    Raises:
        ArgumentError: a budget that is no such number.
        GraphError: not a training Program, or spread or accumulated already; or nothing fits the budget: it
            says the least that was reached, how, and what that is taken for.
        RecipeError: the Program was not traced, or its ops were changed by hand.
        UnknownNameError: a kind of device that is not known.

    Source: Beaumont et al., Efficient Combination of Rematerialization and Offloading for Training DNNs,
    2021, for weighing both by one budget.

    Example:
        >>> import jax, jax.numpy as jnp, onward as ow
        >>> def loss(params, x, labels):
        ...     log_p = jax.nn.log_softmax(jnp.tanh(x @ params["hidden"]) @ params["words"])
        ...     return -jnp.mean(jnp.take_along_axis(log_p, labels[:, None], axis=1))
        >>> params = {"hidden": jnp.ones((8, 8)), "words": jnp.ones((8, 512))}
        >>> program = ow.Adam(1e-3).minimize(loss, params, jnp.ones((256, 8)), jnp.zeros(256, int))
        >>> less = ow.fit_memory(program, 0.4)
        >>> [head.count for head in ow.graph.chunks_of(less)]
        [8]
    """
    _expect_fit(program)
    search = BudgetSearch(program, known(device, "fit_memory"))
    limit = _limit(budget, search)
    found = search.best(limit)
    if found is None:
        raise GraphError(_too_little(search, limit))
    return found.program


def _limit(budget: int | float | str, search: BudgetSearch) -> int:
    """The budget in bytes."""
    count = whole_bytes(budget)
    if count is not None and count >= 2:
        return count
    if is_number(budget) and 0 < budget < 1:  # type: ignore[operator]
        return int(float(budget) * search.bytes(search.plain))
    raise ArgumentError(
        f"fit_memory: budget is {describe(budget)}; expected bytes above 1, a whole number or such as "
        "'12GB', or a fraction between 0 and 1 of what the step takes as it is, such as 0.5."
    )


_TOO_LITTLE = (
    "fit_memory: {name!r} does not fit {limit}. As it is it takes {plain}; the least that was reached is "
    "{least}, with {how}: as its ops tell {shares}. Give it at least that budget, a smaller batch or "
    "accumulate(program, steps), or an optimizer that keeps less; over several devices, "
    "partition(program, mesh, where)."
)
_LASTING = (MemoryShare.PARAMETERS, MemoryShare.STATE, MemoryShare.FEEDS)


def _too_little(search: BudgetSearch, limit: int) -> str:
    """The message where nothing fits: the least that was reached, how, and what for."""
    least = search.least
    taken = search.bytes(least)
    ways = [
        f"the loss head in {least.base.chunking.head} chunks" if least.base.chunking.head > 1 else "",
        f"attention in {least.base.chunking.attention} chunks" if least.base.chunking.attention > 1 else "",
        "activations computed again" if least.rung else "",
        "activations in host memory" if least.base.chunking.host else "",
        f"{len(least.slots)} arrays of state in host memory" if least.slots else "",
    ]
    parts = sorted(_shares(least.program, taken).items(), key=lambda pair: -pair[1])
    return _TOO_LITTLE.format(
        name=search.program.name,
        limit=human_bytes(limit),
        plain=human_bytes(search.bytes(search.plain)),
        least=human_bytes(taken, up=True),
        how=", ".join(filter(None, ways)) or "nothing changed, for nothing helps",
        shares=", ".join(f"{human_bytes(n)} of {share}" for share, n in parts if n),
    )


def _shares(program: Program, taken: int) -> Mapping[MemoryShare, int]:
    """The bytes of a compiled step by what they are taken for.

    What lies there between two steps is known; the rest is divided as the ops tell it at their peak.
    """
    told = MemoryUse(program).shares
    lasting = {share: told[share] for share in _LASTING}
    passing = {share: n for share, n in told.items() if share not in lasting}
    rest, whole = taken - sum(lasting.values()), sum(passing.values())
    if rest < 0 or not whole:  # the compiler leaves out what nothing reads
        passing, lasting, rest, whole = dict(told), {}, taken, max(sum(told.values()), 1)
    return {**lasting, **{share: n * rest // whole for share, n in passing.items()}}


def _expect_fit(program: Program) -> None:
    expect_one_device(program, "fit_memory")
    made = {op.made_by for op in program.ops}
    if not {Pass.BACKWARD, Pass.UPDATE} <= made:
        raise GraphError(
            f"fit_memory: {program.name!r} is not a training Program. Derive backward pass and update first: "
            "fit_memory(optimizer.minimize(loss, ...), budget)."
        )
    recipe_of(program, "within a budget", "Give fit_memory a Program that was traced")
